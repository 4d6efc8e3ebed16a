/* Whether an attention may run over real rows alone. See live.h.
 *
 * Its mask must hide what is padding, and beside that be an interval for each position
 * (match_spans.h). Then real rows look at real rows of their sequence within the interval, which
 * lie side by side in the list of real rows. */
#include <math.h>
#include <string.h>

#include "kernels/attention.h"
#include "server/graph/live/live.h"
#include "server/graph/match/match_modest.h"
#include "server/graph/match/match_spans.h"

static bool given(const graph_node_t *n, int i) {
    return i < n->n_in && n->in[i] != GRADD_NONE;
}

static bool bias_fits(live_t *l, const graph_node_t *n) {
    if (!given(n, LIVE_BIAS) || n->in[LIVE_BIAS] == l->last_bias) return true;
    if (!match_is_modest(l->g, n->in[LIVE_BIAS])) return false;
    l->last_bias = n->in[LIVE_BIAS];
    return true;
}

static bool fits(live_t *l, const graph_node_t *n) {
    const graph_t *g = l->g;
    const int64_t rows = l->loss.rows;
    const gradd_type_t *q = graph_type(g, n->in[0]), *k = graph_type(g, n->in[1]);
    if (gradd_attr_int(n->attrs, "layout", 0) != 15 || !given(n, LIVE_MASK)) return false;
    if (gradd_attr_float(n->attrs, "fill", -INFINITY) > GRADD_ATTN_MASKED) return false;
    return q->dims[0] * q->dims[1] == rows && k->dims[0] == q->dims[0] &&
           k->dims[1] == q->dims[1] && rows < INT32_MAX && bias_fits(l, n);
}

static gradd_status_t find_spans(live_t *l, const graph_node_t *n, gradd_val_t *out) {
    const gradd_type_t *q = graph_type(l->g, n->in[0]);
    match_spans_t s;
    bool known;
    *out = GRADD_NONE;
    GRADD_TRY(match_spans(l->g, n->in[LIVE_MASK], q->dims[0], q->dims[1], &s, &known));
    if (!known || s.keys == GRADD_NONE || s.segments != GRADD_NONE) return GRADD_OK;
    if (l->mask != GRADD_NONE && l->mask != s.keys) return GRADD_OK;
    l->mask = s.keys;
    return match_spans_value(l->g, &s, out);
}

gradd_status_t live_attention(live_t *l, int32_t node, bool *out_can) {
    *out_can = false;
    if (!fits(l, &l->g->nodes[node])) return GRADD_OK;
    const gradd_val_t mask = l->g->nodes[node].in[LIVE_MASK];
    if (l->last_mask != mask) {
        l->last_mask = mask;
        GRADD_TRY(find_spans(l, &l->g->nodes[node], &l->last_spans));
    }
    l->spans[node] = l->last_spans;
    *out_can = l->last_spans != GRADD_NONE;
    return GRADD_OK;
}
