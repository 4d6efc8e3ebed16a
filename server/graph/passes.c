/* Runs the rewrites of passes/ in the order of their rows. The list is generated from the files. */
#include <stdlib.h>

#include "server/graph/budget.h"
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

gradd_status_t graph_run_passes(graph_t *g, bool plain) {
    const graph_pass_t *sorted[sizeof passes / sizeof passes[0]];
    size_t n = sizeof passes / sizeof passes[0];
    for (size_t i = 0; i < n; i++)
        sorted[i] = passes[i];
    qsort(sorted, n, sizeof sorted[0], by_order);
    for (size_t i = 0; i < n; i++) {
        if (plain && sorted[i]->recognises) continue;
        gradd_status_t status = budget_spend(g->n_nodes);
        if (!status) status = sorted[i]->run(g);
        if (status) return gradd_wrap(status, "pass %s", sorted[i]->name);
    }
    return graph_sort(g);
}
