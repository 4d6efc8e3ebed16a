/* A second copy of the forward among the backward nodes, for values that are recomputed instead of
 * kept. See graph.h.
 *
 * A clone is the same call: operator, attributes, random coordinate, and the kernel that follows
 * from these. It is not emitted as new nodes are: nothing is merged, folded, expanded or widened a
 * second time, so equal operands give equal bits. A plan decides which nodes read the clones
 * (server/plan/recompute.c); until then they are dead code. */
#include <stdlib.h>
#include <string.h>

#include "server/graph/compile_time.h"
#include "server/graph/graph.h"

static gradd_status_t no_memory(void) {
    return GRADD_FAIL(NOMEM, "no memory to compile the graph");
}

static gradd_status_t clone_outputs(graph_t *g, const graph_node_t *from, int32_t id,
                                    graph_node_t *to) {
    to->out = arena_alloc(g->arena, sizeof to->out[0] * (size_t)(from->op->max_out + 1));
    if (!to->out) return no_memory();
    for (int j = 0; j < from->op->max_out; j++)
        to->out[j] = GRADD_NONE;
    for (int j = 0; j < from->n_out; j++) {
        if (from->out[j] == GRADD_NONE) continue;
        graph_value_t value = *g->values[from->out[j]];
        value.node = id;
        GRADD_TRY(graph_new_value(g, &value, &to->out[j]));
    }
    return GRADD_OK;
}

/* Node `id` of the new list; it reads the clones of what the node reads. */
static gradd_status_t clone_node(graph_t *g, const graph_node_t *from, int32_t id,
                                 graph_node_t *nodes) {
    graph_node_t *to = &nodes[id];
    *to = *from;
    to->backward = true;
    to->no_merge = true;
    to->in = arena_alloc(g->arena, sizeof to->in[0] * (size_t)(from->n_in + 1));
    if (!to->in) return no_memory();
    for (int i = 0; i < from->n_in; i++) {
        to->in[i] = from->in[i];
        if (from->in[i] == GRADD_NONE || g->values[from->in[i]]->kind != VALUE_NODE) continue;
        const graph_value_t *made = g->values[from->in[i]];
        to->in[i] = nodes[g->n_forward + made->node].out[made->index];
    }
    return clone_outputs(g, from, id, to);
}

/* The clones stand in front of the backward that is there, which moves up. */
static void move_up(graph_t *g, int n) {
    for (int v = 0; v < g->n_values; v++)
        if (g->values[v]->kind == VALUE_NODE && g->values[v]->node >= g->n_forward)
            g->values[v]->node += n;
}

gradd_status_t graph_clone_forward(graph_t *g) {
    const int n = g->n_forward, n_nodes = g->n_nodes + n;
    if (g->n_clones) return GRADD_OK;
    GRADD_TRY(compile_time_spend(n));
    graph_node_t *nodes = malloc(sizeof nodes[0] * ((size_t)n_nodes + 1));
    int32_t *chain = malloc(sizeof chain[0] * ((size_t)n_nodes + 1));
    gradd_status_t status = nodes && chain ? GRADD_OK : no_memory();
    if (!status) {
        memcpy(nodes, g->nodes, sizeof nodes[0] * (size_t)n);
        if (g->n_nodes > n)
            memcpy(nodes + 2 * (size_t)n, g->nodes + n, sizeof nodes[0] * (size_t)(g->n_nodes - n));
        move_up(g, n);
    }
    for (int i = 0; i < n && !status; i++)
        status = clone_node(g, &g->nodes[i], n + i, nodes);
    if (status) { /* the graph is given up with its plan */
        free(nodes);
        free(chain);
        return status;
    }
    free(g->nodes);
    free(g->chain);
    g->nodes = nodes;
    g->chain = chain;
    g->n_nodes = g->cap_nodes = n_nodes;
    g->n_clones = n;
    GRADD_TRY(graph_rehash(g));
    return graph_sort(g); /* roots of the clones' views */
}

gradd_val_t graph_original(const graph_t *g, gradd_val_t v) {
    if (v == GRADD_NONE || g->values[v]->kind != VALUE_NODE ||
        !graph_is_clone(g, g->values[v]->node))
        return v;
    return g->nodes[g->values[v]->node - g->n_forward].out[g->values[v]->index];
}

gradd_status_t graph_clone_of(graph_t *g, gradd_val_t v, gradd_val_t *out) {
    const graph_value_t *value = g->values[v];
    return graph_node_output(g, g->n_forward + value->node, value->index, out);
}
