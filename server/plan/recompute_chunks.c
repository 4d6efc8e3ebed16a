/* Operators that work chunk by chunk, as choices of a plan that has a budget. See recompute.h.
 *
 * Levels are prepared when the search begins: a kernel's scratch memory is known only then. */
#include <stdlib.h>
#include <string.h>

#include "kernels/rules/rules.h"
#include "server/plan/recompute.h"

static gradd_status_t no_memory(void) {
    return GRADD_FAIL(NOMEM, "no memory to plan the graph");
}

static bool is_chunked(const recompute_t *r, int k) {
    const int32_t id = r->sequence.nodes[k];
    return id < r->plan->graph->n_forward && r->sequence.choices[k].kernel &&
           r->plan->graph->nodes[id].op->flags & GRADD_OP_CHUNKED;
}

/* The attributes of the node, but for the length of a chunk. */
static gradd_status_t change_chunk(graph_t *g, gradd_attrs_t from, int64_t rows,
                                   gradd_attrs_t *out) {
    gradd_attr_t *list = arena_array(g->arena, (size_t)from.n + 1, sizeof list[0]);
    int n = 0;
    if (!list) return no_memory();
    for (int i = 0; i < from.n; i++)
        if (strcmp(from.v[i].name, "chunk")) list[n++] = from.v[i];
    list[n++] = gradd_make_int("chunk", rows);
    *out = (gradd_attrs_t){.v = list, .n = n};
    return GRADD_OK;
}

static size_t scratch(const chunked_t *c, int level) {
    return c->choices[level].prepared.workspace;
}

/* Chunks of so many rows, if they take less than those that are there. */
static gradd_status_t add_level(recompute_t *r, chunked_t *c, int64_t rows) {
    graph_t *g = r->plan->graph;
    graph_node_t node = g->nodes[c->node];
    GRADD_TRY(change_chunk(g, node.attrs, rows, &node.attrs));
    GRADD_TRY(plan_choose_node(r->plan, &node, &c->choices[c->n]));
    if (scratch(c, c->n) >= scratch(c, c->n - 1)) return GRADD_OK;
    c->attrs[c->n] = node.attrs;
    c->us[c->n] = plan_node_us(r->plan, &node, &c->choices[c->n]);
    c->n++;
    return GRADD_OK;
}

static int64_t rows_of(const gradd_type_t *t) {
    return t->rank && t->dims[t->rank - 1] ? gradd_type_count(t) / t->dims[t->rank - 1] : 0;
}

static gradd_status_t find_levels(recompute_t *r, int k, chunked_t *c) {
    const graph_t *g = r->plan->graph;
    const graph_node_t *n = &g->nodes[r->sequence.nodes[k]];
    const int64_t all = rows_of(graph_type(g, n->in[0]));
    int64_t now = gradd_attr_int(n->attrs, "chunk", 0);
    if (now <= 0 || now > all) now = all;
    *c = (chunked_t){.node = r->sequence.nodes[k], .n = 1};
    c->attrs[0] = n->attrs;
    c->choices[0] = r->sequence.choices[k];
    c->us[0] = plan_node_us(r->plan, n, &c->choices[0]);
    for (int64_t rows = RECOMPUTE_CHUNK_MOST; rows >= RECOMPUTE_CHUNK_LEAST; rows /= 2)
        if (rows < now && c->n < RECOMPUTE_LEVELS) GRADD_TRY(add_level(r, c, rows));
    return GRADD_OK;
}

gradd_status_t recompute_find_chunks(recompute_t *r) {
    int n = 0;
    for (int k = 0; k < r->sequence.n_forward; k++)
        n += is_chunked(r, k);
    r->chunked = calloc((size_t)n + 1, sizeof r->chunked[0]);
    if (!r->chunked) return no_memory();
    for (int k = 0; k < r->sequence.n_forward; k++)
        if (is_chunked(r, k)) GRADD_TRY(find_levels(r, k, &r->chunked[r->n_chunked++]));
    return GRADD_OK;
}

void recompute_set_level(recompute_t *r, chunked_t *c, int level) {
    graph_t *g = r->plan->graph;
    c->level = level;
    g->nodes[c->node].attrs = c->attrs[level];
    g->nodes[c->node + g->n_forward].attrs = c->attrs[level]; /* its clone */
    r->choices[c->node] = c->choices[level];
}

int64_t recompute_spared(const chunked_t *c) {
    if (c->level + 1 >= c->n) return 0;
    return (int64_t)(scratch(c, c->level) - scratch(c, c->level + 1));
}
