/* See redirect.h. */
#include "server/graph/redirect.h"

gradd_status_t graph_redirect_begin(graph_t *g, graph_redirect_t *r) {
    *r = (graph_redirect_t){.n = g->n_values};
    r->to = arena_alloc(g->arena, sizeof r->to[0] * ((size_t)r->n + 1));
    if (!r->to) return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    for (int v = 0; v < r->n; v++)
        r->to[v] = GRADD_NONE;
    return GRADD_OK;
}

void graph_redirect(graph_redirect_t *r, gradd_val_t from, gradd_val_t to) {
    if (from == to) return;
    r->to[from] = to;
    r->any = true;
}

static void follow(const graph_redirect_t *r, gradd_val_t *v) {
    while (*v != GRADD_NONE && *v < r->n && r->to[*v] != GRADD_NONE)
        *v = r->to[*v];
}

gradd_status_t graph_redirect_end(graph_t *g, const graph_redirect_t *r) {
    if (!r->any) return GRADD_OK;
    for (int i = 0; i < g->n_nodes; i++)
        for (int k = 0; k < g->nodes[i].n_in; k++)
            follow(r, &g->nodes[i].in[k]);
    for (int j = 0; j < g->n_outputs; j++)
        follow(r, &g->outputs[j]);
    for (int i = 0; i < g->n_grads; i++)
        follow(r, &g->grads[i]);
    return graph_sort(g);
}
