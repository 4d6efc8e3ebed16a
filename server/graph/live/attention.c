/* Whether an attention may run over real rows alone. See live.h.
 *
 * Its mask must hide padding, and otherwise be an interval for each position (match_intervals.h).
 * Then real rows look at real rows of their sequence within the interval, which lie side by side in
 * the list of real rows. */
#include <math.h>
#include <string.h>

#include "kernels/describe/attention.h"
#include "server/graph/live/live.h"
#include "server/graph/match/match_intervals.h"
#include "server/graph/match/match_modest.h"

static bool given(const graph_node_t *n, int i) {
    return i < n->n_in && n->in[i] != GRADD_NONE;
}

static bool bias_fits(live_t *l, const graph_node_t *n) {
    if (!given(n, GRADD_ATTN_BIAS) || n->in[GRADD_ATTN_BIAS] == l->last_bias) return true;
    if (!match_is_modest(l->g, n->in[GRADD_ATTN_BIAS])) return false;
    l->last_bias = n->in[GRADD_ATTN_BIAS];
    return true;
}

/* Whether lists of rows can take the place of the mask. */
static bool may_have_lists(live_t *l, const graph_node_t *n) {
    return gradd_attr_int(n->attrs, GRADD_ATTN_LAYOUT, 0) == GRADD_ATTN_ALL_TURNED &&
           given(n, GRADD_ATTN_MASK) &&
           gradd_attr_float(n->attrs, GRADD_ATTN_FILL, -INFINITY) <= GRADD_ATTN_MASKED &&
           bias_fits(l, n);
}

static bool fits(live_t *l, const graph_node_t *n, live_set_t set) {
    const graph_t *g = l->g;
    const int64_t rows = live_rows_of(l, set);
    const gradd_type_t *q = graph_type(g, n->in[GRADD_ATTN_Q]);
    const gradd_type_t *k = graph_type(g, n->in[GRADD_ATTN_K]);
    return may_have_lists(l, n) && q->dims[0] * q->dims[1] == rows && k->dims[0] == q->dims[0] &&
           k->dims[1] == q->dims[1] && rows < INT32_MAX;
}

static gradd_status_t find_spans(live_t *l, const graph_node_t *n, gradd_val_t *mask,
                                 gradd_val_t *out) {
    const gradd_type_t *q = graph_type(l->g, n->in[GRADD_ATTN_Q]);
    match_intervals_t s;
    bool known;
    *out = GRADD_NONE;
    GRADD_TRY(match_intervals(l->g, n->in[GRADD_ATTN_MASK], q->dims[0], q->dims[1], &s, &known));
    if (!known || s.keys == GRADD_NONE || s.segments != GRADD_NONE) return GRADD_OK;
    if (*mask != GRADD_NONE && *mask != s.keys) return GRADD_OK;
    *mask = s.keys;
    return match_intervals_value(l->g, &s, out);
}

gradd_status_t live_attention(live_t *l, int32_t node, live_set_t set, bool *out_can) {
    *out_can = false;
    if (!fits(l, &l->g->nodes[node], set)) return GRADD_OK;
    const gradd_val_t mask = l->g->nodes[node].in[GRADD_ATTN_MASK];
    if (l->last_mask != mask || l->last_set != set) {
        l->last_mask = mask, l->last_set = set;
        GRADD_TRY(find_spans(l, &l->g->nodes[node], set == LIVE_SOURCE ? &l->source_mask : &l->mask,
                             &l->last_intervals));
    }
    l->intervals[node] = l->last_intervals;
    *out_can = l->last_intervals != GRADD_NONE;
    return GRADD_OK;
}

/* ---- cross-attention ------------------------------------------------------------------------- */

enum { NEAREST = 96 };

/* Values that v is made of, nearest first, up to attentions. */
static int find_above(const graph_t *g, gradd_val_t v, gradd_val_t *out) {
    int n = 0;
    out[n++] = v;
    for (int i = 0; i < n; i++) {
        const graph_value_t *value = g->values[out[i]];
        if (value->kind != VALUE_NODE || value->data) continue;
        const graph_node_t *node = &g->nodes[value->node];
        for (int k = 0; k < node->n_in && strcmp(node->op->name, "FusedAttention"); k++) {
            const gradd_val_t above = node->in[k];
            bool seen = above == GRADD_NONE || g->values[above]->kind != VALUE_NODE ||
                        g->values[above]->data;
            for (int j = 0; j < n && !seen; j++)
                seen = out[j] == above;
            if (!seen && n < NEAREST) out[n++] = above;
        }
    }
    return n;
}

/* Whether keys are not made of what queries are made of. Where they are after all, their rows are
 * needed in two sets, hence in full: it costs time and nothing else. */
static bool are_others(const graph_t *g, gradd_val_t q, gradd_val_t k) {
    gradd_val_t of_q[NEAREST], of_k[NEAREST];
    const int n_q = find_above(g, q, of_q), n_k = find_above(g, k, of_k);
    for (int i = 0; i < n_q; i++)
        for (int j = 0; j < n_k; j++)
            if (of_q[i] == of_k[j]) return false;
    return true;
}

/* All queries of a sequence may look at its real keys. */
static bool is_open(const match_intervals_t *s) {
    for (int64_t i = 0; i < s->positions; i++)
        if (s->intervals[2 * i] != 0 || s->intervals[2 * i + 1] != s->positions) return false;
    return s->segments == GRADD_NONE && s->order == GRADD_NONE;
}

gradd_status_t live_cross(live_t *l, int32_t node, bool *out_can) {
    const graph_node_t *n = &l->g->nodes[node];
    const gradd_type_t *q = graph_type(l->g, n->in[GRADD_ATTN_Q]);
    const gradd_type_t *k = graph_type(l->g, n->in[GRADD_ATTN_K]);
    match_intervals_t s;
    bool known;
    *out_can = false;
    if (!may_have_lists(l, n) || q->dims[0] * q->dims[1] != l->loss.rows ||
        q->dims[1] != l->loss.positions || k->dims[0] != q->dims[0])
        return GRADD_OK;
    if (k->dims[0] * k->dims[1] >= INT32_MAX || l->loss.rows >= INT32_MAX || !k->dims[1] ||
        (l->source_positions && l->source_positions != k->dims[1]))
        return GRADD_OK;
    if (q->dims[1] == k->dims[1] && !are_others(l->g, n->in[GRADD_ATTN_Q], n->in[GRADD_ATTN_K]))
        return GRADD_OK;
    const int64_t positions = k->dims[1];
    GRADD_TRY(match_intervals(l->g, n->in[GRADD_ATTN_MASK], q->dims[0], positions, &s, &known));
    if (!known || s.keys == GRADD_NONE || !is_open(&s)) return GRADD_OK;
    if (l->source_mask != GRADD_NONE && l->source_mask != s.keys) return GRADD_OK;
    l->source_mask = s.keys, l->source_positions = positions;
    *out_can = true;
    return GRADD_OK;
}
