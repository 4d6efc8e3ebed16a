/* Attentions over the same probabilities -> one over their values side by side:
 *
 *   FusedAttention(q, k, v1), FusedAttention(q, k, v2)
 *   -> Split(FusedAttention(q, k, Concat(v1, v2)))
 *
 * Differential attention multiplies one softmax with two values. The operator keeps no matrix of
 * probabilities, so each product would compute the scores again, forward and backward. Where the
 * results are put side by side in the same order, the Split goes away as well. */
#include <string.h>

#include "kernels/describe/attention.h"
#include "kernels/rules/rules.h"
#include "server/graph/compile_time.h"
#include "server/graph/match/match.h"
#include "server/graph/readers.h"
#include "server/graph/redirect.h"

enum { MAX_SHARED = 8, MAX_ABOVE = 64 };

typedef struct share_s {
    graph_t *g;
    graph_redirect_t redirect;
    int32_t *attentions; /* nodes; those that have been merged are -1 */
    int n;
    int32_t *concats; /* per value: the last Concat that it is the first operand of, or -1 */
} share_t;

static bool same_attrs(const graph_node_t *a, const graph_node_t *b) {
    for (int i = 0; i < a->attrs.n; i++) {
        const gradd_attr_t *x = &a->attrs.v[i], *y = gradd_attr_find(b->attrs, x->name);
        if (!y || x->kind != y->kind || x->i != y->i || memcmp(&x->f, &y->f, sizeof x->f))
            return false;
    }
    return a->attrs.n == b->attrs.n;
}

/* Whether two attentions have the same probabilities, and values that fit side by side. */
static bool shares(const graph_t *g, const graph_node_t *a, const graph_node_t *b) {
    const gradd_type_t *va = graph_type(g, a->in[GRADD_ATTN_V]),
                       *vb = graph_type(g, b->in[GRADD_ATTN_V]);
    if (a->n_in != b->n_in) return false;
    for (int i = 0; i < a->n_in; i++) /* equal masks have equal ranges */
        if (i != GRADD_ATTN_V && i != GRADD_ATTN_RANGES && a->in[i] != b->in[i]) return false;
    const bool dropped = gradd_attr_float(a->attrs, GRADD_ATTN_DROPOUT, 0) > 0;
    return same_attrs(a, b) && (!dropped || a->random == b->random) &&
           !memcmp(va->dims, vb->dims, sizeof va->dims[0] * 3);
}

/* The live ones. */
static gradd_status_t find_attentions(share_t *s) {
    const graph_t *g = s->g;
    int32_t *readers;
    GRADD_TRY(graph_count_readers(s->g, &readers));
    s->attentions = arena_alloc(g->arena, sizeof s->attentions[0] * ((size_t)g->n_nodes + 1));
    if (!s->attentions) return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    for (int32_t i = 0; i < g->n_nodes; i++)
        if (!strcmp(g->nodes[i].op->name, "FusedAttention") &&
            readers[g->nodes[i].out[GRADD_ATTN_Y]] > 0)
            s->attentions[s->n++] = i;
    return GRADD_OK;
}

/* Whether a value can be had before node `first` has run. What it is made of after that must be
 * little, and no attention: then each of the merged ones depends on such alone as stood in front of
 * its first, and no two of them on each other. The nodes are in order. */
static bool is_there_before(const graph_t *g, gradd_val_t v, int32_t first) {
    gradd_val_t stack[MAX_ABOVE];
    int depth = 0, steps = 0;
    stack[depth++] = v;
    while (depth) {
        const graph_value_t *value = g->values[stack[--depth]];
        if (value->kind != VALUE_NODE || value->node < first) continue;
        const graph_node_t *n = &g->nodes[value->node];
        if (!strcmp(n->op->name, "FusedAttention") || ++steps > MAX_ABOVE) return false;
        for (int i = 0; i < n->n_in; i++) {
            if (n->in[i] == GRADD_NONE) continue;
            if (depth == MAX_ABOVE) return false;
            stack[depth++] = n->in[i];
        }
    }
    return true;
}

/* Takes those that share the probabilities of number `first` out of the list, in order. */
static int take_shared(share_t *s, int first, int32_t *nodes) {
    const graph_t *g = s->g;
    const graph_node_t *a = &g->nodes[s->attentions[first]];
    int n = 1, tries = MAX_ABOVE;
    nodes[0] = s->attentions[first];
    for (int i = first + 1; i < s->n && n < MAX_SHARED && tries; i++) {
        const int32_t id = s->attentions[i];
        if (id < 0 || !shares(g, a, &g->nodes[id])) continue;
        tries--;
        if (!is_there_before(g, g->nodes[id].in[GRADD_ATTN_V], nodes[0])) continue;
        nodes[n++] = id;
        s->attentions[i] = -1;
    }
    return n;
}

/* Concat along the last axis. */
static gradd_status_t side_by_side(graph_t *g, int32_t like, const gradd_val_t *v, int n,
                                   gradd_val_t *out) {
    const graph_node_t node = g->nodes[like];
    const gradd_attr_t axis = gradd_make_int("axis", -1);
    return match_emit(g, &node, &(match_fused_t){"Concat", v, n, &axis, 1, NULL}, out, 1);
}

static gradd_status_t part(graph_t *g, int32_t like, gradd_val_t y, const int64_t *widths, int n,
                           gradd_val_t *out) {
    const graph_node_t node = g->nodes[like];
    const gradd_attr_t axis = gradd_make_int("axis", -1);
    const gradd_val_t in[2] = {y, gradd_const_i64s(&g->builder, widths, n)};
    GRADD_TRY(g->builder.status);
    return match_emit(g, &node, &(match_fused_t){"Split", in, 2, &axis, 1, NULL}, out, n);
}

static gradd_status_t find_concats(share_t *s) {
    const graph_t *g = s->g;
    s->concats = arena_alloc(g->arena, sizeof s->concats[0] * ((size_t)s->redirect.n + 1));
    if (!s->concats) return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    for (int v = 0; v < s->redirect.n; v++)
        s->concats[v] = -1;
    for (int32_t i = 0; i < g->n_nodes; i++)
        if (!strcmp(g->nodes[i].op->name, "Concat")) s->concats[g->nodes[i].in[0]] = i;
    return GRADD_OK;
}

/* A Concat along the last axis of exactly these values becomes the whole. */
static void join(share_t *s, const gradd_val_t *parts, int n, gradd_val_t whole) {
    const int32_t node = s->concats[parts[0]];
    if (node < 0) return;
    const graph_node_t *c = &s->g->nodes[node];
    const int64_t axis = gradd_attr_int(c->attrs, "axis", 0);
    if (c->n_in == n && (axis == -1 || axis == 3) &&
        !memcmp(c->in, parts, sizeof parts[0] * (size_t)n))
        graph_redirect(&s->redirect, c->out[0], whole);
}

/* Makes y stand for everything that the attentions stood for. */
static gradd_status_t add_parts(graph_t *g, const int32_t *nodes, int n, gradd_val_t y) {
    int count = 0, at = 0;
    for (int i = 0; i < n; i++)
        count += g->nodes[nodes[i]].n_parts;
    int32_t *parts = arena_alloc(g->arena, sizeof parts[0] * ((size_t)count + 1));
    if (!parts) return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    for (int i = 0; i < n; i++)
        for (int k = 0; k < g->nodes[nodes[i]].n_parts; k++)
            parts[at++] = g->nodes[nodes[i]].parts[k];
    graph_node_t *node = &g->nodes[g->values[y]->node];
    node->parts = parts, node->n_parts = count;
    return GRADD_OK;
}

static gradd_status_t merge(share_t *s, const int32_t *nodes, int n) {
    graph_t *g = s->g;
    const graph_node_t a = g->nodes[nodes[0]];
    gradd_val_t v[MAX_SHARED], old[MAX_SHARED], part_of[MAX_SHARED], in[GRADD_OP_MAX_IN], y;
    int64_t widths[MAX_SHARED];
    for (int i = 0; i < n; i++) {
        const graph_node_t *one = &g->nodes[nodes[i]];
        v[i] = one->in[GRADD_ATTN_V], old[i] = one->out[GRADD_ATTN_Y];
        widths[i] = graph_type(g, v[i])->dims[3];
    }
    memcpy(in, a.in, sizeof in[0] * (size_t)a.n_in);
    GRADD_TRY(side_by_side(g, nodes[0], v, n, &in[GRADD_ATTN_V]));
    const match_fused_t fused = {"FusedAttention", in, a.n_in, a.attrs.v, a.attrs.n, &a};
    GRADD_TRY(match_emit(g, &a, &fused, &y, 1));
    GRADD_TRY(part(g, nodes[0], y, widths, n, part_of));
    for (int i = 0; i < n; i++)
        graph_redirect(&s->redirect, old[i], part_of[i]);
    join(s, old, n, y);
    return g->values[y]->kind == VALUE_NODE ? add_parts(g, nodes, n, y) : GRADD_OK;
}

static gradd_status_t share_attention(graph_t *g) {
    share_t s = {.g = g};
    int32_t nodes[MAX_SHARED];
    GRADD_TRY(graph_sort(g));
    GRADD_TRY(find_attentions(&s));
    GRADD_TRY(graph_redirect_begin(g, &s.redirect));
    GRADD_TRY(find_concats(&s));
    for (int i = 0; i < s.n; i++) {
        if (s.attentions[i] < 0) continue;
        GRADD_TRY(compile_time_spend(1 + (s.n - i) / 64));
        const int n = take_shared(&s, i, nodes);
        if (n > 1) GRADD_TRY(merge(&s, nodes, n));
    }
    return graph_redirect_end(g, &s.redirect);
}

const graph_pass_t graph_pass_share_attention = {
    "share_attention", 45, true, share_attention, {"FusedAttention"}};
