/* Counts the readers of every value, without dead code. See readers.h.
 *
 * A walk from the outputs upwards with a stack of its own; every node is visited once. */
#include "server/graph/readers.h"

#include <stdlib.h>
#include <string.h>

typedef struct readers_walk_s {
    const graph_t *g;
    int32_t *readers;
    int32_t *products; /* NULL = not wanted */
    bool *seen;        /* per node */
    int32_t *stack;    /* nodes whose operands have not been counted yet */
    int depth;
} readers_walk_t;

static void read_value(readers_walk_t *w, gradd_val_t v) {
    if (v == GRADD_NONE) return;
    w->readers[v]++;
    const graph_value_t *value = w->g->values[v];
    if (value->kind != VALUE_NODE || w->seen[value->node]) return;
    w->seen[value->node] = true;
    w->stack[w->depth++] = value->node;
}

/* MatMul of as many matrices on either side. */
static bool is_product(const graph_t *g, const graph_node_t *n) {
    if (strcmp(n->op->name, "MatMul")) return false;
    const gradd_type_t *a = graph_type(g, n->in[0]), *b = graph_type(g, n->in[1]);
    for (int i = 0; i + 2 < a->rank; i++)
        if (a->dims[i] != b->dims[i]) return false;
    return a->rank == b->rank;
}

static void read_operands(readers_walk_t *w, const graph_node_t *n) {
    for (int i = 0; i < n->n_in; i++)
        read_value(w, n->in[i]);
    if (w->products && is_product(w->g, n)) w->products[n->in[0]]++;
}

static int32_t *make_counts(graph_t *g) {
    size_t bytes = sizeof(int32_t) * ((size_t)g->n_values + 1);
    int32_t *counts = arena_alloc(g->arena, bytes);
    return counts ? memset(counts, 0, bytes) : NULL;
}

static gradd_status_t count(graph_t *g, int32_t *readers, int32_t *products) {
    readers_walk_t w = {.g = g, .readers = readers, .products = products};
    w.seen = calloc((size_t)g->n_nodes + 1, sizeof w.seen[0]);
    w.stack = malloc(sizeof w.stack[0] * ((size_t)g->n_nodes + 1));
    gradd_status_t status = GRADD_OK;
    if (!w.seen || !w.stack) {
        status = GRADD_FAIL(NOMEM, "no memory to compile the graph");
        goto out;
    }
    for (int j = 0; j < g->n_outputs; j++)
        read_value(&w, g->outputs[j]);
    for (int j = 0; j < g->n_grads; j++) /* joint passes */
        read_value(&w, g->grads[j]);
    while (w.depth)
        read_operands(&w, &g->nodes[w.stack[--w.depth]]);
out:
    free(w.seen);
    free(w.stack);
    return status;
}

gradd_status_t graph_count_readers(graph_t *g, int32_t **out) {
    if (!(*out = make_counts(g))) return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    return count(g, *out, NULL);
}

gradd_status_t graph_find_readers(graph_t *g, graph_readers_t *out) {
    out->n = g->n_values;
    out->of = make_counts(g);
    out->products = make_counts(g);
    if (!out->of || !out->products) return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    return count(g, out->of, out->products);
}

bool graph_read_once(const graph_readers_t *readers, gradd_val_t v) {
    return v >= readers->n || readers->of[v] <= 1;
}

bool graph_read_by_products(const graph_readers_t *readers, gradd_val_t v) {
    return graph_read_once(readers, v) || readers->of[v] == readers->products[v];
}
