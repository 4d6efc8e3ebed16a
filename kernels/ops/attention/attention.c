/* FusedAttention: y = dropout(softmax(cap(scale q k^T) + bias, masked, sinks)) v, and its gradient.
 *
 * q [B, H, Q, D], k [B, K, N, D], v [B, K, N, E] with H a multiple of K: query head h reads head
 * h / (H / K) of keys and values. mask (boolean, true = may look) and bias (float) broadcast to
 * [B, H, Q, N]; ranges (i32 [..., 3], from MaskRanges) summarises the mask per row and is computed
 * if it is absent; without a mask each row looks at the keys of its range, which has some, and at
 * no others. cap(s) = c tanh(s / c) with c = softcap, if not 0. `layout` has a bit for each of q,
 * k, v, y (1, 2, 4, 8) that is [B, positions, heads, width] instead.
 *
 * A masked key has the score `fill`, plus the bias unless bit 2 of `hides` is set (bit 1: no
 * gradient goes to its product; see kernels/describe/attention.h). That is next to nothing
 * beside an allowed key, but rows may have none, or a bias that hides all of them. Without bit 1
 * the fill is at most -1e30. Bit 4 makes the fill a floor. With `zero`, rows without an allowed key
 * give zero. The bias of a masked key is at most 1e29.
 *
 * sinks [H] (float) is one more score of each row, the same in all rows of a head, whose
 * probability is lost (learned attention sinks, gpt-oss).
 *
 * rows (i64 [Q]) numbers live rows that q holds alone (liverows.c), of sequences of `positions`;
 * key_rows (i64 [N]) those of k and v, of sequences of `key_positions`, and is like rows if it is
 * absent. Dropout's bits and the bias, which broadcasts to [sequences, H, positions,
 * key_positions], are those of the pair of positions among all rows. There are ranges then, within
 * sequences, and no mask.
 *
 * bf16 or f16 q, k, v, y: bias, sinks, statistics and sums are f32. Saved for backward: the
 * operands, y, and stats, two numbers per row; probabilities are computed again, dropout bits too
 * (`node` is the coordinate of the Dropout). FusedAttentionGrad(dy, q, k, v, y, stats, mask, bias,
 * ranges) -> dq, dk, dv, dbias; with `sunk` stats are those of a softmax with sinks, whose own
 * gradient is -sum(exp(sink - max - logarithm) sum(dy y)) over rows and batches, out of other
 * operators.
 */
#include "kernels/cpu/attention/attention_cpu.h"

#include <math.h>
#include <string.h>

#include "kernels/contract/fault.h"
#include "kernels/contract/kernel.h"
#include "kernels/contract/op.h"
#include "kernels/cpu/copy.h"
#include "kernels/describe/dispatch.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

/* Bytes of checked lists of live rows. */
static size_t own_rows(const gradd_view_t *in, int n_in, const gradd_attn_places_t *at,
                       const gradd_attn_t *p) {
    if (!gradd_attn_given(in, n_in, at->rows)) return 0;
    return sizeof(int64_t) * (size_t)(p->n_q + p->n_k);
}

static gradd_status_t copy_rows(const gradd_view_t *list, int64_t limit, int64_t *to) {
    const volatile int64_t *from = list->data; /* a client may write anything there */
    for (int64_t i = 0, n = gradd_type_count(&list->type); i < n; i++) {
        const int64_t row = from[i];
        to[i] = row < 0 ? ~row : row;
        if (to[i] >= limit)
            return gradd_fault_fail(&(gradd_fault_t){
                .kind = GRADD_FAULT_LIVE_ROW, .value = to[i], .limit = limit, .position = i});
    }
    return GRADD_OK;
}

/* Which rows q, k and v are of, in `room`. */
static gradd_status_t find_rows(gradd_attn_t *p, const gradd_launch_t *r,
                                const gradd_attn_places_t *at, int64_t *room) {
    if (!gradd_attn_given(r->in, r->n_in, at->rows)) return GRADD_OK;
    const bool own_keys = gradd_attn_given(r->in, r->n_in, at->key_rows);
    p->rows.q = room;
    p->rows.k = own_keys ? room + p->n_q : room;
    if (p->part) return GRADD_OK; /* they are there */
    GRADD_TRY(copy_rows(&r->in[at->rows], gradd_attn_row_limit(p, r->in, at), room));
    return own_keys ? copy_rows(&r->in[at->key_rows], INT32_MAX, room + p->n_q) : GRADD_OK;
}

/* Ranges behind the kernel's scratch, if the caller brings a mask without. */
static size_t own_ranges(const gradd_view_t *in, int n_in, const gradd_attn_places_t *at) {
    return 3 * sizeof(int32_t) * (size_t)gradd_attn_own_ranges(in, n_in, at);
}

static void find_ranges(gradd_attn_t *p, const gradd_launch_t *r, const gradd_attn_places_t *at,
                        void *room) {
    if (!own_ranges(r->in, r->n_in, at)) return;
    gradd_view_t ranges;
    ranges.type = r->in[at->mask].type, ranges.data = room;
    if (!p->part)
        gradd_attn_ranges(p->mask.data, gradd_attn_mask_rows(&r->in[at->mask].type), p->n_k, room);
    ranges.type.dims[ranges.type.rank - 1] = 3;
    p->range = gradd_attn_extra_of(&ranges);
}

static size_t kernel_workspace(const gradd_infer_t *c, const gradd_attn_places_t *at) {
    gradd_attn_t p;
    gradd_attn_describe(&p, c->in, c->n_in, at, c->attrs);
    p.threads = c->threads;
    size_t bytes = gradd_attn_workspace(&p, at == &gradd_attn_backward_at);
    return (bytes + 63) / 64 * 64 + own_rows(c->in, c->n_in, at, &p) +
           own_ranges(c->in, c->n_in, at);
}
static int kernel_parts(const gradd_infer_t *c, const gradd_attn_places_t *at) {
    gradd_attn_t p;
    gradd_attn_describe(&p, c->in, c->n_in, at, c->attrs);
    p.threads = c->threads;
    return gradd_attn_parts(&p, at == &gradd_attn_backward_at, c->parts);
}
static int parts_forward(const gradd_infer_t *c) {
    return kernel_parts(c, &gradd_attn_forward_at);
}
static int parts_backward(const gradd_infer_t *c) {
    return kernel_parts(c, &gradd_attn_backward_at);
}

static size_t workspace_forward(const gradd_infer_t *c) {
    return kernel_workspace(c, &gradd_attn_forward_at);
}
static size_t workspace_backward(const gradd_infer_t *c) {
    return kernel_workspace(c, &gradd_attn_backward_at);
}

/* Finds the data after the kernel's scratch memory: lists of rows, ranges. */
static gradd_status_t find_extras(gradd_attn_t *p, const gradd_launch_t *r,
                                  const gradd_attn_places_t *at) {
    char *room = (char *)r->workspace +
                 (gradd_attn_workspace(p, at == &gradd_attn_backward_at) + 63) / 64 * 64;
    p->part = r->part;
    p->parts = r->parts;
    GRADD_TRY(find_rows(p, r, at, (int64_t *)room));
    find_ranges(p, r, at, room + own_rows(r->in, r->n_in, at, p));
    return GRADD_OK;
}

/* ---- kernels --------------------------------------------------------------------------------- */

static gradd_status_t forward(const gradd_launch_t *r, bool pairs) {
    gradd_attn_t p = gradd_attn_of_forward(r);
    p.pairs = pairs;
    p.threads = r->threads;
    GRADD_TRY(find_extras(&p, r, &gradd_attn_forward_at));
    return gradd_attn_forward(&p, r->workspace);
}

static gradd_status_t compute_attention(const gradd_launch_t *r) {
    return forward(r, false);
}
static gradd_status_t compute_attention_pairs(const gradd_launch_t *r) {
    return forward(r, true);
}

static gradd_status_t backward(const gradd_launch_t *r, bool pairs) {
    gradd_attn_t p = gradd_attn_of_backward(r);
    p.pairs = pairs;
    p.threads = r->threads;
    if (p.dbias && !r->part)
        gradd_copy_zero(p.dbias, (size_t)gradd_type_bytes(&r->out[GRADD_ATTN_DBIAS].type));
    GRADD_TRY(find_extras(&p, r, &gradd_attn_backward_at));
    return gradd_attn_backward(&p, r->workspace);
}

static gradd_status_t compute_attention_grad(const gradd_launch_t *r) {
    return backward(r, false);
}
static gradd_status_t compute_attention_grad_pairs(const gradd_launch_t *r) {
    return backward(r, true);
}

static bool has_pairs(const gradd_infer_t *c, const gradd_attn_places_t *at) {
    gradd_attn_t p = {0};
    gradd_attn_describe_sizes(&p, c->in, at, gradd_attr_int(c->attrs, GRADD_ATTN_LAYOUT, 0));
    return gradd_attn_pairs(&p);
}
static bool accepts_pairs(const gradd_infer_t *c) {
    return has_pairs(c, &gradd_attn_forward_at);
}
static bool accepts_grad_pairs(const gradd_infer_t *c) {
    return has_pairs(c, &gradd_attn_backward_at);
}

static gradd_status_t compute_ranges(const gradd_launch_t *r) {
    const gradd_type_t *mask = &r->in[GRADD_MASK_RANGES_MASK].type;
    gradd_attn_ranges(r->in[GRADD_MASK_RANGES_MASK].data, gradd_attn_mask_rows(mask),
                      mask->dims[mask->rank - 1], r->out[0].data);
    return GRADD_OK;
}

/* The definition: see gradd_attn_reference. */
static gradd_status_t ref_attention(const gradd_launch_t *r) {
    gradd_attn_t p = gradd_attn_of_forward(r);
    p.threads = r->threads;
    GRADD_TRY(find_rows(&p, r, &gradd_attn_forward_at, r->workspace));
    gradd_attn_reference(&p);
    return GRADD_OK;
}

/* ---- shape rules ----------------------------------------------------------------------------- */

static gradd_status_t misfit(const char *what, const gradd_type_t *t) {
    char text[GRADD_TYPE_TEXT];
    return GRADD_FAIL(GRAPH, "attention: %s is %s", what, gradd_type_format(t, text));
}

/* Whether t broadcasts to [B, H, Q, N]. */
static bool broadcasts_to(const gradd_type_t *t, const int64_t want[4]) {
    if (t->rank < 1 || t->rank > 4) return false;
    for (int i = 0; i < t->rank; i++) {
        int64_t n = t->dims[t->rank - 1 - i];
        if (n != want[3 - i] && n != 1) return false;
    }
    return true;
}

static bool broadcasts(const gradd_type_t *t, const gradd_attn_t *p) {
    const int64_t want[4] = {p->batch, p->heads, p->n_q, p->n_k};
    return broadcasts_to(t, want);
}

/* A range has the mask's rows. */
static bool sums_up(const gradd_type_t *ranges, const gradd_type_t *mask) {
    gradd_type_t want = *mask;
    want.dtype = GRADD_DT_I32;
    want.dims[want.rank - 1] = 3;
    return gradd_type_equal(ranges, &want);
}

/* One for every row that there is. */
static bool is_range_alone(const gradd_type_t *ranges, const gradd_attn_t *p) {
    gradd_type_t rows = *ranges;
    if (ranges->rank < 1 || ranges->dims[ranges->rank - 1] != 3) return false;
    rows.dims[rows.rank - 1] = 1;
    return broadcasts(&rows, p);
}

/* The bias of live rows is that of all. */
static bool bias_fits(const gradd_infer_t *c, const gradd_attn_places_t *at,
                      const gradd_attn_t *p) {
    const gradd_type_t *bias = &c->in[at->bias].type;
    const int64_t positions = gradd_attr_int(c->attrs, GRADD_ATTN_POSITIONS, 1);
    const int64_t sequences = bias->rank == 4 ? bias->dims[0] : 1;
    if (!gradd_attn_given(c->in, c->n_in, at->rows)) return broadcasts(bias, p);
    const int64_t want[4] = {sequences, p->heads, positions,
                             gradd_attr_int(c->attrs, GRADD_ATTN_KEY_POSITIONS, positions)};
    return sequences > 0 && broadcasts_to(bias, want);
}

static gradd_status_t check_lists(const gradd_infer_t *c, const gradd_attn_places_t *at,
                                  const gradd_attn_t *p) {
    const gradd_type_t q = {GRADD_DT_I64, 1, {p->n_q}}, k = {GRADD_DT_I64, 1, {p->n_k}};
    const int64_t positions = gradd_attr_int(c->attrs, GRADD_ATTN_POSITIONS, 0);
    if (!gradd_attn_given(c->in, c->n_in, at->rows)) return GRADD_OK;
    const int keys = gradd_attn_given(c->in, c->n_in, at->key_rows) ? at->key_rows : at->rows;
    if (!gradd_type_equal(&c->in[at->rows].type, &q) || p->batch != 1 || positions < 1)
        return misfit("the list of live rows", &c->in[at->rows].type);
    if (!gradd_type_equal(&c->in[keys].type, &k) ||
        gradd_attr_int(c->attrs, GRADD_ATTN_KEY_POSITIONS, positions) < 1)
        return misfit("the list of live keys", &c->in[keys].type);
    if (gradd_attn_given(c->in, c->n_in, at->mask) || !gradd_attn_given(c->in, c->n_in, at->ranges))
        return GRADD_FAIL(GRAPH, "attention: live rows have ranges and no mask");
    return GRADD_OK;
}

static gradd_status_t check_extras(const gradd_infer_t *c, const gradd_attn_places_t *at,
                                   const gradd_attn_t *p) {
    const gradd_view_t *in = c->in;
    gradd_dtype_t wide = p->dtype == GRADD_DT_F64 ? GRADD_DT_F64 : GRADD_DT_F32;
    GRADD_TRY(check_lists(c, at, p));
    if (gradd_attn_given(in, c->n_in, at->mask)) {
        const gradd_type_t *mask = &in[at->mask].type;
        if (mask->dtype != GRADD_DT_BOOL || !broadcasts(mask, p) ||
            mask->dims[mask->rank - 1] != p->n_k)
            return misfit("the mask", mask);
        if (gradd_attn_given(in, c->n_in, at->ranges) && !sums_up(&in[at->ranges].type, mask))
            return misfit("the range of keys", &in[at->ranges].type);
        if (!(p->fill <= GRADD_ATTN_MASKED) && !(p->hides & GRADD_ATTN_HIDES_SCORE))
            return GRADD_FAIL(GRAPH, "attention: a fill of %g must hide the product", p->fill);
    } else if (gradd_attn_given(in, c->n_in, at->ranges) &&
               !is_range_alone(&in[at->ranges].type, p)) {
        return misfit("the range of keys, without a mask,", &in[at->ranges].type);
    }
    if (gradd_attn_given(in, c->n_in, at->bias) &&
        (in[at->bias].type.dtype != wide || !bias_fits(c, at, p)))
        return misfit("the bias", &in[at->bias].type);
    if (at == &gradd_attn_forward_at && gradd_attn_given(in, c->n_in, GRADD_ATTN_SINKS)) {
        const gradd_type_t want = {wide, 1, {p->heads}};
        if (!gradd_type_equal(&in[GRADD_ATTN_SINKS].type, &want))
            return misfit("sinks", &in[GRADD_ATTN_SINKS].type);
    }
    return GRADD_OK;
}

static gradd_status_t check_operands(const gradd_infer_t *c, const gradd_attn_places_t *at,
                                     gradd_attn_t *p) {
    const gradd_type_t *q = &c->in[at->q].type, *k = &c->in[at->k].type, *v = &c->in[at->v].type;
    int64_t layout = gradd_attr_int(c->attrs, GRADD_ATTN_LAYOUT, 0);
    if (q->rank != 4) return misfit("q", q);
    if (k->rank != 4 || k->dtype != q->dtype) return misfit("k", k);
    if (v->rank != 4 || v->dtype != q->dtype) return misfit("v", v);
    gradd_attn_describe(p, c->in, c->n_in, at, c->attrs);
    if (k->dims[0] != p->batch || k->dims[3] != p->d || p->n_k < 1 || p->n_k > INT32_MAX ||
        p->kv_heads < 1 || p->heads % p->kv_heads)
        return misfit("k", k);
    if (v->dims[0] != p->batch || v->dims[layout & GRADD_ATTN_V_TURNED ? 2 : 1] != p->kv_heads ||
        v->dims[layout & GRADD_ATTN_V_TURNED ? 1 : 2] != p->n_k)
        return misfit("v", v);
    double ratio = gradd_attr_float(c->attrs, GRADD_ATTN_DROPOUT, 0);
    if (!(ratio >= 0 && ratio <= 1)) return GRADD_FAIL(GRAPH, "dropout ratio %g", ratio);
    return check_extras(c, at, p);
}

static gradd_type_t result_type(const gradd_attn_t *p, int64_t layout) {
    bool first = layout & GRADD_ATTN_Y_TURNED;
    return (gradd_type_t){
        p->dtype, 4, {p->batch, first ? p->n_q : p->heads, first ? p->heads : p->n_q, p->d_v}
    };
}

static gradd_type_t stats_type(const gradd_attn_t *p) {
    return (gradd_type_t){
        p->dtype == GRADD_DT_F64 ? GRADD_DT_F64 : GRADD_DT_F32, 4, {p->batch, p->heads, 2, p->n_q}
    };
}

static gradd_status_t infer_attention(gradd_infer_t *c) {
    gradd_attn_t p;
    GRADD_TRY(check_operands(c, &gradd_attn_forward_at, &p));
    c->out[GRADD_ATTN_Y] = result_type(&p, gradd_attr_int(c->attrs, GRADD_ATTN_LAYOUT, 0));
    if (c->n_out > GRADD_ATTN_STATS) c->out[GRADD_ATTN_STATS] = stats_type(&p);
    return GRADD_OK;
}

static gradd_status_t infer_attention_grad(gradd_infer_t *c) {
    gradd_attn_t p;
    GRADD_TRY(check_operands(c, &gradd_attn_backward_at, &p));
    gradd_type_t y = result_type(&p, gradd_attr_int(c->attrs, GRADD_ATTN_LAYOUT, 0)),
                 stats = stats_type(&p);
    if (!gradd_type_equal(&c->in[GRADD_ATTN_GRAD_DY].type, &y))
        return misfit("dy", &c->in[GRADD_ATTN_GRAD_DY].type);
    if (!gradd_type_equal(&c->in[GRADD_ATTN_GRAD_Y].type, &y))
        return misfit("y", &c->in[GRADD_ATTN_GRAD_Y].type);
    if (!gradd_type_equal(&c->in[GRADD_ATTN_GRAD_STATS].type, &stats))
        return misfit("stats", &c->in[GRADD_ATTN_GRAD_STATS].type);
    for (int j = GRADD_ATTN_DQ; j <= GRADD_ATTN_DV && j < c->n_out; j++)
        c->out[j] = c->in[GRADD_ATTN_GRAD_Q + j].type;
    if (c->n_out > GRADD_ATTN_DBIAS) {
        if (!gradd_attn_given(c->in, c->n_in, GRADD_ATTN_GRAD_BIAS))
            return GRADD_FAIL(GRAPH, "attention: a gradient of no bias");
        c->out[GRADD_ATTN_DBIAS] = c->in[GRADD_ATTN_GRAD_BIAS].type;
    }
    return GRADD_OK;
}

static gradd_status_t infer_ranges(gradd_infer_t *c) {
    c->out[0] = c->in[GRADD_MASK_RANGES_MASK].type;
    if (!c->out[0].rank || c->out[0].dims[c->out[0].rank - 1] > INT32_MAX)
        return misfit("the mask", &c->in[GRADD_MASK_RANGES_MASK].type);
    c->out[0].dtype = GRADD_DT_I32;
    c->out[0].dims[c->out[0].rank - 1] = 3;
    return GRADD_OK;
}

/* ---- gradient rule --------------------------------------------------------------------------- */

/* -sum over batches and rows of exp(sink - largest - logarithm) sum(dy y) */
static gradd_val_t grad_sinks(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    const gradd_type_t stats = *gradd_val_type(b, g->output(g, GRADD_ATTN_STATS));
    const int64_t heads = stats.dims[1], all[2] = {0, 2}, last[1] = {-1}, halves[2] = {1, 1};
    const bool turned = gradd_attr_int(g->attrs, GRADD_ATTN_LAYOUT, 0) & GRADD_ATTN_Y_TURNED;
    const int64_t column[3] = {1, heads, 1}, rows[3] = {stats.dims[0], heads, stats.dims[3]};
    const int64_t swap[3] = {0, 2, 1};
    const gradd_attr_t to = gradd_make_int("to", stats.dtype), axis = gradd_make_int("axis", 2);
    const gradd_attr_t drop = gradd_make_int("keepdims", 0);
    gradd_val_t dy = gradd_emit_attrs(b, "Cast", &g->dout[GRADD_ATTN_Y], 1, &to, 1);
    gradd_val_t y = g->output(g, GRADD_ATTN_Y);
    y = gradd_emit_attrs(b, "Cast", &y, 1, &to, 1);
    gradd_val_t sum[2] = {GRADD_EMIT(b, "Mul", dy, y), gradd_const_i64s(b, last, 1)};
    gradd_val_t delta = gradd_emit_attrs(b, "ReduceSum", sum, 2, &drop, 1), part[2];
    if (turned) delta = gradd_transpose(b, delta, swap, 3);
    const gradd_val_t split[2] = {g->output(g, GRADD_ATTN_STATS), gradd_const_i64s(b, halves, 2)};
    if (!b->status) b->status = b->emit(b, &(gradd_emit_t){"Split", split, 2, &axis, 1}, part, 2);
    if (b->status) return GRADD_NONE;
    gradd_val_t sink = gradd_reshape_to(b, g->in[GRADD_ATTN_SINKS], column, 3);
    for (int k = 0; k < 2; k++)
        sink = GRADD_EMIT(b, "Sub", sink, gradd_reshape_to(b, part[k], rows, 3));
    gradd_val_t share = GRADD_EMIT(b, "Exp", sink);
    gradd_val_t lost[2] = {GRADD_EMIT(b, "Mul", share, delta), gradd_const_i64s(b, all, 2)};
    return GRADD_EMIT(b, "Neg", gradd_emit_attrs(b, "ReduceSum", lost, 2, &drop, 1));
}

static gradd_status_t grad_attention(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    gradd_attr_t attrs[GRADD_ATTN_ATTRS + 2];
    gradd_val_t in[GRADD_ATTN_GRAD_INPUTS], out[GRADD_ATTN_GRAD_OUTPUTS];
    int n_out = 0, n_attrs = 0, n_in = GRADD_ATTN_GRAD_ROWS;
    if (g->n_out > GRADD_ATTN_STATS && g->dout[GRADD_ATTN_STATS] != GRADD_NONE)
        return GRADD_FAIL(UNSUPPORTED, "a gradient arrives for a saved statistic");
    for (int i = GRADD_ATTN_Q; i <= GRADD_ATTN_V; i++) {
        if (g->need[i]) n_out = GRADD_ATTN_DQ + i + 1;
        in[GRADD_ATTN_GRAD_Q + i] = g->in[i];
    }
    for (int i = GRADD_ATTN_MASK; i <= GRADD_ATTN_RANGES; i++)
        in[GRADD_ATTN_GRAD_MASK + i - GRADD_ATTN_MASK] = i < g->n_in ? g->in[i] : GRADD_NONE;
    const bool bias = g->n_in > GRADD_ATTN_BIAS && g->need[GRADD_ATTN_BIAS];
    if (bias) n_out = GRADD_ATTN_GRAD_OUTPUTS;
    in[GRADD_ATTN_GRAD_DY] = g->dout[GRADD_ATTN_Y];
    in[GRADD_ATTN_GRAD_Y] = g->output(g, GRADD_ATTN_Y);
    in[GRADD_ATTN_GRAD_STATS] = g->output(g, GRADD_ATTN_STATS);
    if (b->status || g->dout[GRADD_ATTN_Y] == GRADD_NONE) return b->status;
    const bool sunk = g->n_in > GRADD_ATTN_SINKS && g->in[GRADD_ATTN_SINKS] != GRADD_NONE;
    if (sunk && g->need[GRADD_ATTN_SINKS]) g->din[GRADD_ATTN_SINKS] = grad_sinks(g);
    if (!n_out) return b->status;
    for (int i = 0; i < g->attrs.n && n_attrs < GRADD_ATTN_ATTRS; i++)
        if (strcmp(g->attrs.v[i].name, GRADD_ATTN_NODE)) attrs[n_attrs++] = g->attrs.v[i];
    attrs[n_attrs++] = gradd_make_int(GRADD_ATTN_SUNK, sunk);
    attrs[n_attrs++] = gradd_make_int(GRADD_ATTN_NODE,
                                      gradd_attr_int(g->attrs, GRADD_ATTN_NODE, (int64_t)g->node));
    for (int i = GRADD_ATTN_ROWS; i < g->n_in; i++)
        in[n_in++] = g->in[i];
    b->status =
        b->emit(b, &(gradd_emit_t){"FusedAttentionGrad", in, n_in, attrs, n_attrs}, out, n_out);
    if (b->status) return b->status;
    for (int i = GRADD_ATTN_Q; i <= GRADD_ATTN_V; i++)
        if (g->need[i]) g->din[i] = out[GRADD_ATTN_DQ + i];
    if (bias) g->din[GRADD_ATTN_BIAS] = out[GRADD_ATTN_DBIAS];
    return GRADD_OK;
}

/* ---- rows ------------------------------------------------------------------------------------ */

#define ATTENTION_ATTRS                                                                            \
    GRADD_ATTR_LIST(                                                                               \
        {GRADD_ATTN_SCALE, GRADD_ATTR_FLOAT, false},                                               \
        {GRADD_ATTN_SOFTCAP, GRADD_ATTR_FLOAT, false},                                             \
        {GRADD_ATTN_DROPOUT, GRADD_ATTR_FLOAT, false}, {GRADD_ATTN_FILL, GRADD_ATTR_FLOAT, false}, \
        {GRADD_ATTN_HIDES, GRADD_ATTR_INT, false}, {GRADD_ATTN_ZERO, GRADD_ATTR_INT, false},       \
        {GRADD_ATTN_LAYOUT, GRADD_ATTR_INT, false}, {GRADD_ATTN_SUNK, GRADD_ATTR_INT, false},      \
        {GRADD_ATTN_NODE, GRADD_ATTR_INT, false}, {GRADD_ATTN_POSITIONS, GRADD_ATTR_INT, false},   \
        {GRADD_ATTN_KEY_POSITIONS, GRADD_ATTR_INT, false})
/* mask, bias and ranges */
#define EXTRA_TYPES(floats) GRADD_T_BOOL, floats, GRADD_DTB(I32)

GRADD_OPS(
    attention,
    GRADD_OP(
        "FusedAttention", "com.gradd", 1, (GRADD_ATTN_MASK, GRADD_ATTN_INPUTS),
        (1, GRADD_ATTN_OUTPUTS), .flags = GRADD_OP_INTERNAL | GRADD_OP_RANDOM | GRADD_OP_COSTLY,
        .attrs = ATTENTION_ATTRS,
        .types = {GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_T_FLOAT, EXTRA_TYPES(GRADD_T_FLOAT),
                  GRADD_T_FLOAT, GRADD_DTB(I64)},
        .infer = infer_attention, .grad = grad_attention, .expand = gradd_attention_expand,
        .ref = GRADD_REF(ref_attention),
        .cases = GRADD_CASES(
            {.text = "f32[1,1,3,4] f32[1,1,5,4] f32[1,1,5,4]"},
            {.text = "f32[2,4,9,8] f32[2,2,9,8] f32[2,2,9,8] | scale=0.35 -> 2", .grad_tol = -1},
            {.text = "f32[2,4,9,8] f32[2,2,9,8] f32[2,2,9,8] bool[2,1,9,9] | scale=0.35"},
            {.text = "f32[2,4,9,8] f32[2,2,9,8] f32[2,2,9,8] bool[9,9] | zero=1 -> 2",
             .grad_tol = -1},
            {.text =
                 "f32[1,2,5,8] f32[1,2,4,8] f32[1,2,4,8] bool[5,4]={0,0,0,0,0,1,1,0,1,0,0,1,0,0,"
                 "0,0,1,1,1,1}"},
            {.text =
                 "f32[1,2,5,8] f32[1,2,4,8] f32[1,2,4,8] bool[5,4]={0,0,0,0,0,1,1,0,1,0,0,1,0,0,"
                 "0,0,1,1,1,1} | zero=1 dropout=0.25"},
            {.text = "f32[1,2,3,8] f32[1,2,4,8] f32[1,2,4,8] bool[3,4]={0,0,0,0,0,1,1,0,1,0,0,1} "
                     "f32[2,3,4] | hides=1 fill=-60.0"},
            {.text = "f32[1,2,3,8] f32[1,2,4,8] f32[1,2,4,8] bool[3,4]={0,0,0,0,0,1,1,0,1,0,0,1} "
                     "f32[2,3,4] | hides=2",
             .grad_tol = -1},
            {.text = "f32[1,2,3,8] f32[1,2,4,8] f32[1,2,4,8] bool[3,4]={0,0,0,0,0,1,1,0,1,0,1,0} "
                     "f32[4]={-3.4e38,0,-inf,0} | hides=0 fill=-3e38 softcap=2.0",
             .grad_tol = -1},
            {.text = "f32[1,2,3,8] f32[1,2,4,8] f32[1,2,4,8] bool[3,4]={0,1,0,0,0,1,1,0,1,0,1,0} "
                     "f32[4]={-2e4,0,-inf,0} | hides=1 fill=-1e4",
             .grad_tol = -1},
            {.text = "f32[1,2,3,8] f32[1,2,4,8] f32[1,2,4,8] bool[3,4]={0,1,0,0,0,1,1,0,1,0,1,0} | "
                     "fill=-2.0"},
            {.text = "f32[1,2,3,8] f32[1,2,4,8] f32[1,2,4,8] bool[3,4]={0,1,0,1,0,0,0,0,1,0,1,0} "
                     "f32[3,4]={-9,0.5,-inf,1,-9,-9,-9,-9,0,-inf,2,-9} | hides=7 fill=-9.0",
             .grad_tol = -1},
            {.text = "f32[1,2,2,8] f32[1,2,3,8] f32[1,2,3,8] - f32[2,3]={-inf,-inf,-inf,0,-inf,1}",
             .grad_tol = -1},
            {.text = "f32[1,2,2,8] f32[1,2,3,8] f32[1,2,3,8] bool[2,3]={0,0,0,1,0,1} | fill=-inf",
             .grad_tol = -1},
            {.text = "f32[1,2,70,8] f32[1,1,130,8] f32[1,1,130,8] bool[70,130] f32[1,2,70,130] | "
                     "hides=1 fill=-100.0"},
            {.text = "f32[2,2,3,5] f32[2,2,3,5] f32[2,2,3,5] bool[2,1,1,3] f32[1,2,1,3]"},
            {.text = "f32[2,2,3,5] f32[2,1,6,5] f32[2,1,6,3] - f32[2,3,6] | softcap=1.5"},
            {.text = "f32[2,2,3,5] f32[2,2,6,5] f32[2,2,6,3] bool[2,1,1,6] f32[2,1,1] | layout=0"},
            {.text = "f32[2,2,3,5] f32[2,2,6,5] f32[2,2,6,3] bool[6]={0,1,1,0,1,1} f32[2,2,3,6]"},
            {.text = "f32[2,3,4,16] f32[2,6,2,16] f32[2,6,2,16] bool[3,6] | layout=15 scale=0.25"},
            {.text = "f32[2,3,4,16] f32[2,2,6,16] f32[2,6,2,16] | layout=5 dropout=0.5"},
            {.text = "f32[1,2,150,24] f32[1,1,200,24] f32[1,1,200,40] bool[150,200] | scale=0.2"},
            {.text = "f32[1,2,130,16] f32[1,1,140,16] f32[1,1,140,16] - f32[1,2,130,140] | "
                     "softcap=3.0 dropout=0.1"},
            {.text =
                 "f32[2,4,9,8] f32[2,2,9,8] f32[2,2,9,8] bool[2,1,9,9] - - f32[4] | scale=0.35"},
            {.text = "f32[2,9,4,8] f32[2,9,2,8] f32[2,9,2,6] - - - f32[4] | layout=15"},
            {.text =
                 "f32[1,2,5,8] f32[1,2,4,8] f32[1,2,4,8] bool[5,4]={0,0,0,0,0,1,1,0,1,0,0,1,0,0,"
                 "0,0,1,1,1,1} f32[1,2,5,4] - f32[2] | hides=1 fill=-3.0"},
            {.text =
                 "f32[1,2,5,8] f32[1,2,4,8] f32[1,2,4,8] bool[5,4]={0,0,0,0,0,1,1,0,1,0,0,1,0,0,"
                 "0,0,1,1,1,1} - - f32[2] | zero=1 dropout=0.25"},
            {.text =
                 "f32[1,2,5,8] f32[1,2,4,8] f32[1,2,4,8] bool[5,4]={0,0,0,0,0,1,1,0,1,0,0,1,0,0,"
                 "0,0,1,1,1,1} - - f32[2]={-inf,90} -> 2",
             .grad_tol = -1},
            {.text = "f32[1,2,70,16] f32[1,1,140,16] f32[1,1,140,16] - f32[70,140] - f32[2] | "
                     "softcap=3.0 dropout=0.1"},
            {.text = "f32[1,2,5,8] f32[1,2,4,8] f32[1,2,4,8] - f32[4]={100,99,0,98}"},
            {.text = "f32[2,2,3,6] f32[2,1,7,6] f32[2,1,7,4] bool[2,1,1,7] f32[1,2,1,7] | "
                     "softcap=1.5"},
            {.text = "f32[1,2,71,64] f32[1,1,131,64] f32[1,1,131,64] bool[71,131] | scale=0.125"},
            {.text = "f32[1,64,2,32] f32[1,64,1,32] f32[1,64,1,32] | layout=15 scale=0.2"},
            {.text = "f32[0,2,3,4] f32[0,2,3,4] f32[0,2,3,4]"},
            {.text = "f32[1,5,2,8] f32[1,5,1,8] f32[1,5,1,8] - - "
                     "i32[1,1,5,3]={0,1,1,0,2,1,2,3,1,2,4,1,2,5,1} | layout=15 scale=0.3 -> 2",
             .grad_tol = -1},
            {.text = "f32[1,5,2,8] f32[1,5,1,8] f32[1,5,1,8] - - "
                     "i32[1,1,5,3]={0,2,1,0,2,1,2,5,1,2,5,1,2,5,1} f32[2] | layout=15"},
            {.text = "f32[1,6,2,8] f32[1,6,1,8] f32[1,6,1,8] - f32[1,2,4,4] "
                     "i32[1,1,6,3]={0,1,1,0,2,1,2,3,1,2,4,1,2,5,1,2,5,1} - i64[6]={0,2,4,5,7,-8} | "
                     "layout=15 positions=4"},
            {.text = "f32[1,5,2,8] f32[1,5,1,8] f32[1,5,1,8] - f32[3,1,1,4] "
                     "i32[1,1,5,3]={0,2,1,0,2,1,2,5,1,2,5,1,2,5,1} - i64[5]={1,3,8,9,11} | "
                     "layout=15 positions=4 -> 2",
             .grad_tol = -1},
            {.text = "f32[1,3,2,8] f32[1,4,1,8] f32[1,4,1,8] - f32[3,5] "
                     "i32[1,1,3,3]={0,1,1,1,4,1,1,4,1} - i64[3]={1,3,5} i64[4]={2,5,6,8} | "
                     "layout=15 positions=3 key_positions=5"},
            {.text = "f32[1,71,2,16] f32[1,71,1,16] f32[1,71,1,16] - f32[2,80,80] "
                     "i32[1,1,1,3]={0,71,1} - i64[71]:(0,79) | layout=15 positions=80"},
            {.text = "f32[1,70,4,40] f32[1,130,2,40] f32[1,130,2,24] bool[1,1,70,130] "
                     "f32[1,4,70,130] | layout=15 scale=0.2 dropout=0.25 -> 2",
             .grad_tol = -1},
            {.text = "f32[2,2,20,128] f32[2,1,70,128] f32[2,1,70,144] bool[2,1,20,70] - - f32[2] | "
                     "scale=0.1 hides=2 -> 2",
             .grad_tol = -1},
            {.text = "f32[1,2,3,200] f32[1,2,5,200] f32[1,2,5,8] | scale=0.1 softcap=2.0"},
            {.text =
                 "f32[1,2,70,128] f32[1,1,70,128] f32[1,1,70,128] bool[70,70] | scale=0.08 -> 2",
             .grad_tol = -1},
            {.text = "f32[1,70,2,48] f32[1,130,1,48] f32[1,130,1,80] | layout=15 scale=0.1 "
                     "dropout=0.25 -> 2",
             .grad_tol = -1},
            {.text = "f32[1,2,5,32] f32[1,2,4,32] f32[1,2,4,32] "
                     "bool[5,4]={0,0,0,0,0,1,1,0,1,0,0,1,0,0,0,0,1,1,1,1} "
                     "f32[5,1]={-300,0,0.5,1,-1} | scale=0.1 hides=1 fill=-2.0 -> 2",
             .grad_tol = -1},
            {.text = "f32[1,2,5,32] f32[1,2,4,32] f32[1,2,4,32] "
                     "bool[5,4]={0,0,0,0,0,1,1,0,1,0,0,1,0,0,0,0,1,1,1,1} - - f32[2] | scale=0.1 "
                     "zero=1 -> 2",
             .grad_tol = -1},
            {.text = "f32[1,6,2,32] f32[1,6,1,32] f32[1,6,1,32] - f32[1,2,4,4] "
                     "i32[1,1,6,3]={0,1,1,0,2,1,2,3,1,2,4,1,2,5,1,2,6,1} - i64[6]={0,2,4,5,7,-8} | "
                     "layout=15 positions=4 softcap=2.0 scale=0.2 -> 2",
             .grad_tol = -1})),
    GRADD_OP(
        "FusedAttentionGrad", "com.gradd", 1, (GRADD_ATTN_GRAD_MASK, GRADD_ATTN_GRAD_INPUTS),
        (1, GRADD_ATTN_GRAD_OUTPUTS),
        .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD | GRADD_OP_COSTLY, .attrs = ATTENTION_ATTRS,
        .types = {GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_T_FLOAT,
                  GRADD_T_FLOAT, EXTRA_TYPES(GRADD_T_FLOAT), GRADD_DTB(I64)},
        .infer = infer_attention_grad, .ref = GRADD_REF(compute_attention_grad),
        .cases = GRADD_CASES(
            {.text = "f32[1,1,3,4] f32[1,1,3,4] f32[1,1,5,4] f32[1,1,5,4] f32[1,1,3,4] "
                     "f32[1,1,2,3]:(3,4) -> 3"},
            {.text = "f32[2,70,4,16] f32[2,70,4,16] f32[2,90,2,16] f32[2,90,2,16] f32[2,70,4,16] "
                     "f32[2,4,2,70]:(3,4) bool[70,90] f32[1,4,1,90] | layout=15 scale=0.2 -> 4"},
            {.text = "f32[1,2,71,16] f32[1,2,71,16] f32[1,1,301,16] f32[1,1,301,16] f32[1,2,71,16] "
                     "f32[1,2,2,71]:(3,4) -> 3",
             .tol = 1e-4, /* scores of some hundreds */
             .bf16_tol = 2e-2},
            {.text =
                 "f32[1,4,2,8] f32[1,4,2,8] f32[1,4,1,8] f32[1,4,1,8] f32[1,4,2,8] "
                 "f32[1,2,2,4]:(3,4) - - i32[1,1,4,3]={0,1,1,0,2,1,2,3,1,2,4,1} | layout=15 -> 3"},
            {.text = "f32[1,70,4,24] f32[1,70,4,40] f32[1,130,2,40] f32[1,130,2,24] f32[1,70,4,24] "
                     "f32[1,4,2,70]:(3,4) bool[1,1,70,130] f32[1,4,70,130] | layout=15 scale=0.2 "
                     "dropout=0.25 -> 4",
             .bf16_tol = 2e-2},
            {.text = "f32[2,2,66,64] f32[2,2,66,64] f32[2,1,70,64] f32[2,1,70,64] f32[2,2,66,64] "
                     "f32[2,2,2,66]:(3,4) - f32[1,2,66,70] | scale=0.125 softcap=2.0 -> 4",
             .bf16_tol = 2e-2},
            {.text = "f32[1,2,35,72] f32[1,2,35,128] f32[1,2,70,128] f32[1,2,70,72] f32[1,2,35,72] "
                     "f32[1,2,2,35]:(3,4) bool[35,70] | scale=0.1 -> 3",
             .bf16_tol = 2e-2},
            {.text = "f32[1,2,5,8] f32[1,2,5,200] f32[1,1,4,200] f32[1,1,4,8] f32[1,2,5,8] "
                     "f32[1,2,2,5]:(3,4) bool[5,4]={0,0,0,0,0,1,1,0,1,0,0,1,0,0,0,0,1,1,1,1} "
                     "f32[5,1]={-300,0,0.5,1,-1} | scale=0.05 hides=1 fill=-2.0 -> 4",
             .bf16_tol = 2e-2},
            {.text = "f32[2,2,5,8] f32[2,2,5,8] f32[2,1,4,8] f32[2,1,4,8] f32[2,2,5,8] "
                     "f32[2,2,2,5]:(3,4) bool[5,4]={0,0,0,0,0,1,1,0,1,0,0,1,0,0,0,0,1,1,1,1} "
                     "f32[2,1,1,4] | scale=0.2 hides=3 fill=-2.0 -> 4",
             .bf16_tol = 2e-2},
            {.text = "f32[1,2,5,8] f32[1,2,5,8] f32[1,2,4,8] f32[1,2,4,8] f32[1,2,5,8] "
                     "f32[1,2,2,5]:(3,4) bool[5,4]={0,0,0,0,0,1,1,0,1,0,0,1,0,0,0,0,1,1,1,1} "
                     "f32[1] | hides=1 scale=0.1 -> 4",
             .bf16_tol = 2e-2},
            {.text = "f32[1,2,5,8] f32[1,2,5,8] f32[1,1,4,8] f32[1,1,4,8] f32[1,2,5,8] "
                     "f32[1,2,2,5]:(3,4) bool[5,4]={0,0,0,0,0,1,1,0,1,0,0,1,0,0,0,0,1,1,1,1} "
                     "f32[2,5,4] | scale=0.2 hides=7 fill=-1.0 -> 4",
             .bf16_tol = 2e-2},
            {.text = "f32[1,2,5,8] f32[1,2,5,8] f32[1,1,4,8] f32[1,1,4,8] f32[1,2,5,8] "
                     "f32[1,2,2,5]:(3,4) bool[5,4]={0,0,0,0,0,1,1,0,1,0,0,1,0,0,0,0,1,1,1,1} "
                     "f32[2,1,4] | scale=0.2 hides=4 fill=-1e31 -> 4",
             .bf16_tol = 2e-2},
            {.text = "f32[1,2,5,8] f32[1,2,5,8] f32[1,1,4,8] f32[1,1,4,8] f32[1,2,5,8] "
                     "f32[1,2,2,5]:(3,4) bool[5,4]={0,0,0,0,0,1,1,0,1,0,0,1,0,0,0,0,1,1,1,1} "
                     "f32[4] | scale=0.2 hides=0 softcap=2.0 fill=-3e38 -> 4",
             .bf16_tol = 2e-2},
            {.text = "f32[1,2,5,8] f32[1,2,5,8] f32[1,2,4,8] f32[1,2,4,8] f32[1,2,5,8] "
                     "f32[1,2,2,5]:(3,4) bool[5,4]={0,0,0,0,0,1,1,0,1,0,0,1,0,0,0,0,1,1,1,1} | "
                     "scale=0.2 zero=1 sunk=1 dropout=0.5 -> 3",
             .bf16_tol = 2e-2},
            {.text = "f32[1,2,5,8] f32[1,2,5,8] f32[1,2,4,8] f32[1,2,4,8] f32[1,2,5,8] "
                     "f32[1,2,2,5]:(3,4) bool[5,4]={0,0,0,0,0,1,1,0,1,0,0,1,0,0,0,0,1,1,1,1} | "
                     "scale=0.2 sunk=1 -> 3",
             .bf16_tol = 2e-2},
            {.text = "f32[2,2,3,8] f32[2,2,3,8] f32[2,2,70,8] f32[2,2,70,8] f32[2,2,3,8] "
                     "f32[2,2,2,3]:(3,4) bool[2,1,1,70] f32[2,2,1,1] | scale=0.2 dropout=1.0 -> 4",
             .bf16_tol = 2e-2},
            {.text = "f32[0,2,3,8] f32[0,2,3,8] f32[0,2,4,8] f32[0,2,4,8] f32[0,2,3,8] "
                     "f32[0,2,2,3]:(3,4) - f32[2,3,4] | scale=0.2 -> 4",
             .bf16_tol = 2e-2},
            {.text = "f32[1,6,2,8] f32[1,6,2,8] f32[1,6,1,8] f32[1,6,1,8] f32[1,6,2,8] "
                     "f32[1,2,2,6]:(3,4) - f32[1,2,4,4] "
                     "i32[1,1,6,3]={0,1,1,0,2,1,2,3,1,2,4,1,2,5,1,2,6,1} i64[6]={0,2,4,5,7,-8} | "
                     "scale=0.2 layout=15 positions=4 -> 4",
             .bf16_tol = 2e-2},
            {.text =
                 "f32[1,5,2,8] f32[1,5,2,8] f32[1,5,1,8] f32[1,5,1,8] f32[1,5,2,8] "
                 "f32[1,2,2,5]:(3,4) - f32[3,1,1,4] i32[1,1,5,3]={0,2,1,0,2,1,2,5,1,2,5,1,2,5,1} "
                 "i64[5]={1,3,8,9,11} | scale=0.2 layout=15 positions=4 dropout=0.25 -> 4",
             .bf16_tol = 2e-2},
            {.text =
                 "f32[1,3,2,8] f32[1,3,2,8] f32[1,4,1,8] f32[1,4,1,8] f32[1,3,2,8] "
                 "f32[1,2,2,3]:(3,4) - f32[3,1] i32[1,1,3,3]={0,1,1,1,4,1,1,4,1} i64[3]={1,3,5} "
                 "i64[4]={2,5,6,8} | scale=0.2 layout=15 positions=3 key_positions=5 -> 4",
             .bf16_tol = 2e-2},
            {.text = "f32[1,71,2,16] f32[1,71,2,16] f32[1,150,1,16] f32[1,150,1,16] f32[1,71,2,16] "
                     "f32[1,2,2,71]:(3,4) - f32[2,80,160] i32[1,1,1,3]={0,150,1} i64[71]:(0,79) "
                     "i64[150]:(0,159) | scale=0.2 layout=15 positions=80 key_positions=160 -> 4",
             .bf16_tol = 2e-2},
            {.text = "f32[1,2,40,128] f32[1,2,40,128] f32[1,1,70,128] f32[1,1,70,128] "
                     "f32[1,2,40,128] f32[1,2,2,40]:(3,4) | scale=0.08 dropout=0.25 -> 3",
             .bf16_tol = 2e-2},
            {.text = "f32[1,2,64,32] f32[1,2,64,32] f32[1,2,64,32] f32[1,2,64,32] f32[1,2,64,32] "
                     "f32[1,2,2,64]:(3,4) | scale=0.1 -> 3",
             .bf16_tol = 2e-2},
            {.text = "f32[1,35,4,80] f32[1,35,4,48] f32[1,70,2,48] f32[1,70,2,80] f32[1,35,4,80] "
                     "f32[1,4,2,35]:(3,4) bool[35,70] | layout=15 scale=0.1 dropout=0.25 -> 3",
             .bf16_tol = 2e-2},
            {.text = "f32[1,70,2,32] f32[1,70,2,32] f32[1,70,1,32] f32[1,70,1,32] f32[1,70,2,32] "
                     "f32[1,2,2,70]:(3,4) - - i32[1,1,1,3]={0,70,1} | layout=15 scale=0.1 "
                     "softcap=2.0 -> 3",
             .bf16_tol = 2e-2},
            {.text = "f32[1,2,5,32] f32[1,2,5,32] f32[1,1,4,32] f32[1,1,4,32] f32[1,2,5,32] "
                     "f32[1,2,2,5]:(3,4) bool[5,4]={0,0,0,0,0,1,1,0,1,0,0,1,0,0,0,0,1,1,1,1} "
                     "f32[5,1]={-300,0,0.5,1,-1} | scale=0.1 hides=1 fill=-2.0 -> 4",
             .bf16_tol = 2e-2},
            {.text = "f32[1,6,2,32] f32[1,6,2,32] f32[1,6,1,32] f32[1,6,1,32] f32[1,6,2,32] "
                     "f32[1,2,2,6]:(3,4) - f32[1,2,4,4] "
                     "i32[1,1,6,3]={0,1,1,0,2,1,2,3,1,2,4,1,2,5,1,2,6,1} i64[6]={0,2,4,5,7,-8} | "
                     "layout=15 scale=0.1 positions=4 dropout=0.25 -> 4",
             .bf16_tol = 2e-2})),
    GRADD_OP("MaskRanges", "com.gradd", 1, (1, 1), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD, .types = {GRADD_T_BOOL},
             .infer = infer_ranges, .ref = GRADD_REF(compute_ranges),
             .cases = GRADD_CASES({.text = "bool[2,3,7]"}, {.text = "bool[70,600]"},
                                  {.text = "bool[2,4]={0,0,0,0,1,1,0,1}"})));

/* A kernel for q, k, v, y and their gradients of one type; `...`: what else its row says. */
#define FORWARD(name, type, ...)                                                                   \
    GRADD_KERNEL("FusedAttention", name,                                                           \
                 .types = {GRADD_DTB(type), GRADD_DTB(type), GRADD_DTB(type),                      \
                           EXTRA_TYPES(GRADD_T_F32_F64), GRADD_T_F32_F64, GRADD_DTB(I64)},         \
                 .workspace = workspace_forward, .parts = parts_forward, .cost = gradd_attn_cost,  \
                 __VA_ARGS__)
#define BACKWARD(name, type, ...)                                                                  \
    GRADD_KERNEL("FusedAttentionGrad", name,                                                       \
                 .types = {GRADD_DTB(type), GRADD_DTB(type), GRADD_DTB(type), GRADD_DTB(type),     \
                           GRADD_DTB(type), GRADD_T_F32_F64, EXTRA_TYPES(GRADD_T_F32_F64),         \
                           GRADD_DTB(I64)},                                                        \
                 .workspace = workspace_backward, .parts = parts_backward,                         \
                 .cost = gradd_attn_grad_cost, __VA_ARGS__)

GRADD_KERNELS(cpu, attention, FORWARD("tiles f32", F32, .compute = compute_attention),
              FORWARD("tiles f64", F64, .compute = compute_attention),
              FORWARD("tiles bf16", BF16, .accepts = accepts_pairs,
                      .compute = compute_attention_pairs),
              FORWARD("tiles f32 of bf16", BF16, .compute = compute_attention),
              FORWARD("tiles f32 of f16", F16, .compute = compute_attention),
              BACKWARD("tiles f32", F32, .compute = compute_attention_grad),
              BACKWARD("tiles f64", F64, .compute = compute_attention_grad),
              BACKWARD("tiles bf16", BF16, .accepts = accepts_grad_pairs,
                       .compute = compute_attention_grad_pairs),
              BACKWARD("tiles f32 of bf16", BF16, .compute = compute_attention_grad),
              BACKWARD("tiles f32 of f16", F16, .compute = compute_attention_grad),
              GRADD_KERNEL("MaskRanges", "loop", .compute = compute_ranges));
