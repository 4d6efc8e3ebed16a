/* Execution order after passes appended nodes behind their readers. See graph.h.
 *
 * A walk over the list that visits what a node reads before the node itself, with a stack of its
 * own: a chain of a hundred thousand nodes is no reason to overflow the thread's. */
#include <stdlib.h>
#include <string.h>

#include "server/graph/graph.h"

typedef struct sort_s {
    graph_t *g;
    int32_t *position; /* per old node: its new position, -1 = not yet */
    int32_t *order;    /* per new position: the old node */
    int32_t *stack;
    int n; /* placed so far */
} sort_t;

/* Producer of operand i, or -1. */
static int32_t source(const graph_t *g, const graph_node_t *n, int i) {
    if (n->in[i] == GRADD_NONE || g->values[n->in[i]]->kind != VALUE_NODE) return -1;
    return g->values[n->in[i]]->node;
}

static bool is_sorted(const graph_t *g) {
    for (int32_t id = 0; id < g->n_nodes; id++)
        for (int i = 0; i < g->nodes[id].n_in; i++)
            if (source(g, &g->nodes[id], i) >= id) return false;
    return true;
}

/* An operand's producer that has no position yet, or -1. */
static int32_t unplaced(const sort_t *s, int32_t id) {
    const graph_node_t *n = &s->g->nodes[id];
    for (int i = 0; i < n->n_in; i++) {
        int32_t from = source(s->g, n, i);
        if (from >= 0 && s->position[from] < 0) return from;
    }
    return -1;
}

/* Fails if a node needs itself, which only a faulty pass can bring about. */
static gradd_status_t append(sort_t *s, int32_t id) {
    int depth = 0;
    if (s->position[id] >= 0) return GRADD_OK;
    s->stack[depth++] = id;
    while (depth) {
        int32_t next = unplaced(s, s->stack[depth - 1]);
        if (next >= 0) {
            if (depth >= s->g->n_nodes) return GRADD_FAIL(INTERNAL, "a pass made a cycle");
            s->stack[depth++] = next;
            continue;
        }
        int32_t done = s->stack[--depth];
        s->position[done] = s->n;
        s->order[s->n++] = done;
    }
    return GRADD_OK;
}

static gradd_status_t permute(sort_t *s) {
    graph_t *g = s->g;
    graph_node_t *nodes = malloc(sizeof nodes[0] * (size_t)g->n_nodes);
    if (!nodes) return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    memcpy(nodes, g->nodes, sizeof nodes[0] * (size_t)g->n_nodes);
    for (int i = 0; i < g->n_nodes; i++)
        g->nodes[i] = nodes[s->order[i]];
    free(nodes);
    for (int v = 0; v < g->n_values; v++)
        if (g->values[v]->kind == VALUE_NODE) g->values[v]->node = s->position[g->values[v]->node];
    return graph_rehash(g);
}

/* Views share the bytes of what they read now; a value that is no longer a view is its own root. */
static void find_roots(graph_t *g) {
    for (int i = 0; i < g->n_nodes; i++) {
        const graph_node_t *n = &g->nodes[i];
        const bool view = n->op->flags & GRADD_OP_VIEW;
        if (n->n_out < 1 || n->out[0] == GRADD_NONE) continue;
        g->values[n->out[0]]->root = view ? g->values[n->in[0]]->root : n->out[0];
    }
}

static gradd_status_t sort_nodes(graph_t *g) {
    if (is_sorted(g)) return GRADD_OK;
    int32_t *memory = malloc(sizeof memory[0] * 3 * (size_t)g->n_nodes);
    if (!memory) return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    sort_t s = {g, memory, memory + g->n_nodes, memory + 2 * (size_t)g->n_nodes, 0};
    gradd_status_t status = GRADD_OK;
    for (int i = 0; i < g->n_nodes; i++)
        s.position[i] = -1;
    for (int i = 0; i < g->n_nodes && !status; i++)
        status = append(&s, i);
    if (!status) status = permute(&s);
    free(memory);
    return status;
}

gradd_status_t graph_sort(graph_t *g) {
    GRADD_TRY(sort_nodes(g));
    find_roots(g);
    return GRADD_OK;
}
