/* Which nodes run, and in which order. Node ids are already in topological order; it remains to
 * leave out dead code and to split forward from backward. See plan.h. */
#include <stdlib.h>
#include <string.h>

#include "server/plan/plan.h"

gradd_val_t plan_root(const graph_t *g, gradd_val_t v) {
    return g->values[v]->root;
}

int plan_reads(const graph_node_t *n) {
    return n->op->flags & GRADD_OP_VIEW && n->n_in > 1 ? 1 : n->n_in;
}

bool plan_writes_nothing(const graph_t *g, const graph_node_t *n) {
    for (int j = 0; j < n->n_out; j++)
        if (n->out[j] != GRADD_NONE && gradd_type_count(graph_type(g, n->out[j]))) return false;
    return true;
}

static void want(const graph_t *g, gradd_val_t v, bool *wanted) {
    if (v != GRADD_NONE && g->values[v]->kind == VALUE_NODE) wanted[g->values[v]->node] = true;
}

/* Wanted nodes of one phase, with all they need within that phase. */
static gradd_status_t collect(const graph_t *g, bool *wanted, bool backward, sequence_t *out) {
    for (int32_t id = g->n_nodes - 1; id >= 0; id--) {
        if (!wanted[id] || g->nodes[id].backward != backward) continue;
        for (int i = 0, n = plan_reads(&g->nodes[id]); i < n; i++)
            want(g, g->nodes[id].in[i], wanted);
    }
    int n = 0;
    out->nodes = malloc(sizeof out->nodes[0] * ((size_t)g->n_nodes + 1));
    if (!out->nodes) return GRADD_FAIL(NOMEM, "no memory to schedule the graph");
    for (int32_t id = 0; id < g->n_nodes; id++)
        if (wanted[id] && g->nodes[id].backward == backward) out->nodes[n++] = id;
    out->n = n;
    out->n_forward = backward ? 0 : n;
    return GRADD_OK;
}

gradd_status_t schedule_forward(const graph_t *g, const bool *extra, sequence_t *out) {
    bool *wanted = calloc((size_t)g->n_nodes + 1, sizeof wanted[0]);
    if (!wanted) return GRADD_FAIL(NOMEM, "no memory to schedule the graph");
    for (int j = 0; j < g->n_outputs; j++)
        want(g, g->outputs[j], wanted);
    for (gradd_val_t v = 0; v < g->n_values; v++)
        if (extra[v]) want(g, v, wanted);
    gradd_status_t status = collect(g, wanted, false, out);
    free(wanted);
    return status;
}

gradd_status_t schedule_backward(const graph_t *g, const gradd_val_t *grads, int n_grads,
                                 sequence_t *out) {
    bool *wanted = calloc((size_t)g->n_nodes + 1, sizeof wanted[0]);
    if (!wanted) return GRADD_FAIL(NOMEM, "no memory to schedule the graph");
    for (int i = 0; i < n_grads; i++)
        want(g, grads[i], wanted);
    gradd_status_t status = collect(g, wanted, true, out);
    free(wanted);
    return status;
}

static void mark(const graph_t *g, gradd_val_t v, bool *saved) {
    if (v == GRADD_NONE) return;
    /* a view made in backward reads what it views; a view made in forward, too */
    gradd_val_t root = plan_root(g, v);
    const graph_value_t *value = g->values[root];
    if (value->kind == VALUE_NODE && !g->nodes[value->node].backward) saved[root] = true;
}

void sequence_finish(sequence_t *sequence) {
    free(sequence->nodes);
    free(sequence->choices);
    *sequence = (sequence_t){0};
}

void schedule_mark_saved(const graph_t *g, const sequence_t *sequence, const gradd_val_t *grads,
                         int n_grads, bool *saved) {
    for (int k = 0; k < sequence->n; k++) {
        const graph_node_t *n = &g->nodes[sequence->nodes[k]];
        if (!n->backward) continue;
        for (int i = 0, reads = plan_reads(n); i < reads; i++)
            mark(g, n->in[i], saved);
    }
    for (int i = 0; i < n_grads; i++)
        mark(g, grads[i], saved);
}
