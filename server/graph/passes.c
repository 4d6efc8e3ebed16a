/* Runs the rewrites of passes/ in the order of their rows, phase by phase. The list is generated
 * from the files. */
#include <stdlib.h>

#include "server/graph/compile_time.h"
#include "server/graph/graph.h"

#define X(name) extern const graph_pass_t graph_pass_##name;
#include "pass_list.inc"
#undef X

static const graph_pass_t *const passes[] = {
#define X(name) &graph_pass_##name,
#include "pass_list.inc"
#undef X
};

static int by_order(const void *a, const void *b) {
    return (*(const graph_pass_t *const *)a)->order - (*(const graph_pass_t *const *)b)->order;
}

static gradd_status_t apply_pass(graph_t *g, const graph_pass_t *pass) {
    gradd_status_t status = compile_time_spend(g->n_nodes);
    if (!status) status = pass->apply(g);
    return status ? gradd_wrap(status, "pass %s", pass->name) : GRADD_OK;
}

gradd_status_t graph_apply_passes(graph_t *g, phase_t phase) {
    const graph_pass_t *sorted[sizeof passes / sizeof passes[0]];
    size_t n = sizeof passes / sizeof passes[0];
    for (size_t i = 0; i < n; i++) {
        sorted[i] = passes[i];
        if (phase_of(sorted[i]->order) != PHASE_FORWARD &&
            phase_of(sorted[i]->order) != PHASE_JOINT)
            return GRADD_FAIL(INTERNAL, "pass %s: %d is no number of a rewrite", sorted[i]->name,
                              sorted[i]->order);
    }
    qsort(sorted, n, sizeof sorted[0], by_order);
    for (size_t i = 0; i < n; i++) {
        if (phase_of(sorted[i]->order) != phase) continue;
        if (g->written_out || (g->plain && sorted[i]->recognises)) continue;
        GRADD_TRY(apply_pass(g, sorted[i]));
    }
    return graph_sort(g);
}

gradd_status_t graph_apply_joint(graph_t *g, gradd_val_t *grads, int n_grads) {
    g->grads = grads;
    g->n_grads = n_grads;
    g->in_backward = true; /* what is added now must not be taken for the model's */
    gradd_status_t status = graph_apply_passes(g, PHASE_JOINT);
    g->in_backward = false;
    g->grads = NULL;
    g->n_grads = 0;
    return status;
}
