/* Counts the live readers of every value. See readers.h.
 *
 * A walk from the outputs upwards with a stack of its own; every node is visited once. */
#include "server/graph/readers.h"

#include <stdlib.h>

typedef struct walk_s {
    const graph_t *g;
    int32_t *readers;
    bool *seen;     /* per node */
    int32_t *stack; /* nodes whose operands have not been counted yet */
    int depth;
} walk_t;

static void read_value(walk_t *w, gradd_val_t v) {
    if (v == GRADD_NONE) return;
    w->readers[v]++;
    const graph_value_t *value = w->g->values[v];
    if (value->kind != VALUE_NODE || w->seen[value->node]) return;
    w->seen[value->node] = true;
    w->stack[w->depth++] = value->node;
}

gradd_status_t graph_count_readers(graph_t *g, int32_t **out) {
    int32_t *readers = arena_alloc(g->arena, sizeof readers[0] * ((size_t)g->n_values + 1));
    walk_t w = {.g = g, .readers = readers};
    w.seen = calloc((size_t)g->n_nodes + 1, sizeof w.seen[0]);
    w.stack = malloc(sizeof w.stack[0] * ((size_t)g->n_nodes + 1));
    gradd_status_t status = GRADD_OK;
    if (!readers || !w.seen || !w.stack) {
        status = GRADD_FAIL(NOMEM, "no memory to compile the graph");
        goto out;
    }
    for (int v = 0; v < g->n_values; v++)
        readers[v] = 0;
    for (int j = 0; j < g->n_outputs; j++)
        read_value(&w, g->outputs[j]);
    while (w.depth) {
        const graph_node_t *n = &g->nodes[w.stack[--w.depth]];
        for (int i = 0; i < n->n_in; i++)
            read_value(&w, n->in[i]);
    }
    *out = readers;
out:
    free(w.seen);
    free(w.stack);
    return status;
}

gradd_status_t graph_find_readers(graph_t *g, graph_readers_t *out) {
    out->n = g->n_values;
    return graph_count_readers(g, &out->of);
}

bool graph_read_once(const graph_readers_t *readers, gradd_val_t v) {
    return v >= readers->n || readers->of[v] <= 1;
}
