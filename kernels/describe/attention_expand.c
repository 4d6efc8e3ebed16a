/* FusedAttention in simpler operators: two products, a softmax, and masks as models write them.
 *
 * The scores are a tensor here, in f32 for bf16. Where rows without an allowed key give zero, their
 * scores are set to zero first, so that no NaN can reach a gradient. Ranges only summarise the mask
 * for kernels and are not read. See kernels/describe/attention.h for the forms of masks. */
#include "kernels/describe/attention.h"

#include <float.h>
#include <math.h>

#include "kernels/rules/rules.h"

typedef struct attention_parts_s {
    gradd_builder_t *b;
    const gradd_expand_t *x;
    gradd_val_t mask, bias, sinks; /* GRADD_NONE = absent */
    gradd_val_t any;               /* with `zero`: rows that have an allowed key */
    int64_t layout, hides, heads, n_k;
    gradd_dtype_t wide;
    double fill;
} attention_parts_t;

static gradd_val_t input(const gradd_expand_t *x, int i) {
    return i < x->n_in ? x->in[i] : GRADD_NONE;
}

/* [B, positions, heads, width] the other way round, if the bit is set. */
static gradd_val_t turned(const attention_parts_t *p, gradd_val_t v, int bit) {
    return p->layout & bit ? gradd_transpose(p->b, v, (int64_t[]){0, 2, 1, 3}, 4) : v;
}

gradd_val_t gradd_attention_repeat(gradd_builder_t *b, gradd_val_t v, int64_t heads) {
    const gradd_type_t t = *gradd_val_type(b, v);
    if (b->status || t.dims[1] == heads) return v;
    const int64_t apart[5] = {t.dims[0], t.dims[1], 1, t.dims[2], t.dims[3]};
    const int64_t wide[5] = {t.dims[0], t.dims[1], heads / t.dims[1], t.dims[2], t.dims[3]};
    const int64_t whole[4] = {t.dims[0], heads, t.dims[2], t.dims[3]};
    v = gradd_reshape_to(b, v, apart, 5);
    return gradd_reshape_to(b, GRADD_EMIT(b, "Expand", v, gradd_const_i64s(b, wide, 5)), whole, 4);
}

static gradd_val_t product(const attention_parts_t *p, gradd_val_t q, gradd_val_t k) {
    gradd_builder_t *b = p->b;
    const double cap = gradd_attr_float(p->x->attrs, GRADD_ATTN_SOFTCAP, 0);
    k = gradd_transpose(b, k, (int64_t[]){0, 1, 3, 2}, 4);
    gradd_val_t s = GRADD_EMIT(b, "MatMul", q, k);
    s = gradd_scaled(b, s, gradd_attr_float(p->x->attrs, GRADD_ATTN_SCALE, 1));
    if (cap != 0) s = gradd_scaled(b, GRADD_EMIT(b, "Tanh", gradd_scaled(b, s, 1 / cap)), cap);
    return s;
}

static gradd_val_t plus(gradd_builder_t *b, gradd_val_t s, gradd_val_t more) {
    return more == GRADD_NONE ? s : GRADD_EMIT(b, "Add", s, more);
}

/* A hidden key has the score `fill` and half of its gradient, one whose bias is below it none. */
static gradd_val_t floored(const attention_parts_t *p, gradd_val_t s, gradd_val_t fill) {
    gradd_builder_t *b = p->b;
    const gradd_type_t t = *gradd_val_type(b, s);
    if (b->status) return GRADD_NONE;
    gradd_val_t filled = GRADD_EMIT(b, "Expand", fill, gradd_const_i64s(b, t.dims, t.rank));
    gradd_val_t hidden = GRADD_EMIT(b, "StraightThrough", filled, s);
    if (p->bias != GRADD_NONE)
        hidden = GRADD_EMIT(b, "Where", GRADD_EMIT(b, "Less", p->bias, fill), filled, hidden);
    return GRADD_EMIT(b, "Max", GRADD_EMIT(b, "Where", p->mask, s, hidden), fill);
}

/* Scores with bias and mask, as `hides` says. */
static gradd_val_t masked(const attention_parts_t *p, gradd_val_t s) {
    gradd_builder_t *b = p->b;
    if (p->mask == GRADD_NONE) return plus(b, s, p->bias);
    gradd_val_t fill = gradd_const_scalar(b, p->wide, p->fill);
    gradd_val_t zero = gradd_const_scalar(b, p->wide, 0);
    if (p->hides & GRADD_ATTN_FLOOR) return floored(p, plus(b, s, p->bias), fill);
    const bool score = p->hides & GRADD_ATTN_HIDES_SCORE, bias = p->hides & GRADD_ATTN_HIDES_BIAS;
    if (score && bias) return GRADD_EMIT(b, "Where", p->mask, plus(b, s, p->bias), fill);
    if (score) return plus(b, GRADD_EMIT(b, "Where", p->mask, s, fill), p->bias);
    if (bias) {
        gradd_val_t shown = p->bias == GRADD_NONE ? zero : p->bias;
        return GRADD_EMIT(b, "Add", s, GRADD_EMIT(b, "Where", p->mask, shown, fill));
    }
    return GRADD_EMIT(b, "Add", plus(b, s, p->bias), GRADD_EMIT(b, "Where", p->mask, zero, fill));
}

/* The score that is lost, as one more column. */
static gradd_val_t with_sinks(const attention_parts_t *p, gradd_val_t s) {
    gradd_builder_t *b = p->b;
    const gradd_type_t t = *gradd_val_type(b, s);
    if (b->status || p->sinks == GRADD_NONE) return s;
    const int64_t column[4] = {t.dims[0], t.dims[1], t.dims[2], 1}, head[4] = {1, t.dims[1], 1, 1};
    gradd_val_t sink = gradd_reshape_to(b, p->sinks, head, 4);
    gradd_val_t both[2] = {s, GRADD_EMIT(b, "Expand", sink, gradd_const_i64s(b, column, 4))};
    return gradd_concat(b, both, 2, 3);
}

static gradd_val_t dropped(const attention_parts_t *p, gradd_val_t v) {
    static const gradd_type_t flag = {.dtype = GRADD_DT_BOOL};
    static const uint8_t yes = 1;
    gradd_builder_t *b = p->b;
    const double ratio = gradd_attr_float(p->x->attrs, GRADD_ATTN_DROPOUT, 0);
    if (ratio <= 0 || b->status) return v;
    gradd_val_t p_of = gradd_const_scalar(b, GRADD_DT_F64, ratio), on = b->constant(b, &flag, &yes);
    return GRADD_EMIT(b, "Dropout", v, p_of, on);
}

/* v where a row has an allowed key, else `otherwise`. */
static gradd_val_t in_rows(const attention_parts_t *p, gradd_val_t v, double otherwise) {
    gradd_builder_t *b = p->b;
    if (p->any == GRADD_NONE) return v;
    return GRADD_EMIT(b, "Where", p->any, v, gradd_const_scalar(b, p->wide, otherwise));
}

/* Largest score and logarithm of the sum of exponentials, [B, H, 2, Q]. */
static gradd_val_t statistics(const attention_parts_t *p, gradd_val_t s) {
    gradd_builder_t *b = p->b;
    const gradd_type_t t = *gradd_val_type(b, s);
    if (b->status) return GRADD_NONE;
    const int64_t row[4] = {t.dims[0], t.dims[1], 1, t.dims[2]}, head[4] = {1, t.dims[1], 1, 1};
    gradd_val_t max = gradd_reduce_from(b, "ReduceMax", s, 3);
    gradd_val_t sum =
        gradd_reduce_from(b, "ReduceSum", GRADD_EMIT(b, "Exp", GRADD_EMIT(b, "Sub", s, max)), 3);
    gradd_val_t pair[2] = {max, GRADD_EMIT(b, "Log", sum)};
    if (p->any != GRADD_NONE) {
        gradd_val_t none = gradd_const_scalar(b, p->wide, 0);
        if (p->sinks != GRADD_NONE) none = gradd_reshape_to(b, p->sinks, head, 4);
        pair[0] = GRADD_EMIT(b, "Where", p->any, pair[0], none);
        pair[1] = in_rows(p, pair[1], 0);
    }
    for (int k = 0; k < 2; k++)
        pair[k] = gradd_reshape_to(b, pair[k], row, 4);
    return gradd_concat(b, pair, 2, 2);
}

/* Ranges without a mask: the keys [first, second) of each row. */
static gradd_val_t mask_of_ranges(gradd_builder_t *b, gradd_val_t ranges, int64_t n_k) {
    gradd_val_t keys = GRADD_EMIT(b, "Range", gradd_const_scalar(b, GRADD_DT_I32, 0),
                                  gradd_const_scalar(b, GRADD_DT_I32, (double)n_k),
                                  gradd_const_scalar(b, GRADD_DT_I32, 1));
    gradd_val_t from = gradd_slice(b, ranges, -1, 0, 1, 1),
                to = gradd_slice(b, ranges, -1, 1, 2, 1);
    return GRADD_EMIT(b, "And", GRADD_EMIT(b, "LessOrEqual", from, keys),
                      GRADD_EMIT(b, "Less", keys, to));
}

/* Numbers of live rows, or of their positions if there are `positions`. */
static gradd_val_t numbers_of(gradd_builder_t *b, gradd_val_t rows, int64_t positions) {
    gradd_val_t zero = gradd_const_scalar(b, GRADD_DT_I64, 0);
    gradd_val_t turned = GRADD_EMIT(b, "Sub", gradd_const_scalar(b, GRADD_DT_I64, -1), rows);
    rows = GRADD_EMIT(b, "Where", GRADD_EMIT(b, "Less", rows, zero), turned, rows);
    if (!positions) return rows;
    gradd_val_t n = gradd_const_scalar(b, GRADD_DT_I64, (double)positions);
    gradd_val_t whole = GRADD_EMIT(b, "Mul", GRADD_EMIT(b, "Div", rows, n), n);
    return GRADD_EMIT(b, "Sub", rows, whole);
}

static gradd_val_t picked(gradd_builder_t *b, gradd_val_t v, gradd_val_t at, int64_t axis) {
    const gradd_attr_t attr = gradd_make_int("axis", axis);
    const gradd_val_t in[2] = {v, at};
    return gradd_emit_attrs(b, "Gather", in, 2, &attr, 1);
}

/* The bias of all rows for the live ones, [H, Q, N]. */
static gradd_val_t bias_of_rows(const gradd_expand_t *x, gradd_val_t bias, int64_t heads) {
    gradd_builder_t *b = x->b;
    const int64_t n = gradd_attr_int(x->attrs, GRADD_ATTN_POSITIONS, 1);
    const int64_t n_k = gradd_attr_int(x->attrs, GRADD_ATTN_KEY_POSITIONS, n);
    const gradd_type_t t = *gradd_val_type(b, bias);
    const int64_t sequences = t.rank == 4 ? t.dims[0] : 1, all[4] = {sequences, heads, n, n_k};
    const int64_t flat[3] = {sequences * n, heads, n_k};
    gradd_val_t keys = input(x, GRADD_ATTN_KEY_ROWS) == GRADD_NONE ? input(x, GRADD_ATTN_ROWS)
                                                                   : input(x, GRADD_ATTN_KEY_ROWS);
    if (b->status) return GRADD_NONE;
    bias = GRADD_EMIT(b, "Expand", bias, gradd_const_i64s(b, all, 4));
    bias = gradd_transpose(b, bias, (int64_t[]){0, 2, 1, 3}, 4);
    bias = gradd_reshape_to(b, bias, flat, 3);
    bias = picked(b, bias, numbers_of(b, input(x, GRADD_ATTN_ROWS), sequences > 1 ? 0 : n), 0);
    bias = picked(b, bias, numbers_of(b, keys, n_k), 2);
    return gradd_transpose(b, bias, (int64_t[]){1, 0, 2}, 3);
}

static attention_parts_t read_parts(const gradd_expand_t *x) {
    gradd_builder_t *b = x->b;
    attention_parts_t p = {.b = b,
                           .x = x,
                           .mask = input(x, GRADD_ATTN_MASK),
                           .bias = input(x, GRADD_ATTN_BIAS),
                           .sinks = input(x, GRADD_ATTN_SINKS),
                           .any = GRADD_NONE,
                           .layout = gradd_attr_int(x->attrs, GRADD_ATTN_LAYOUT, 0),
                           .hides = gradd_attr_int(x->attrs, GRADD_ATTN_HIDES,
                                                   GRADD_ATTN_HIDES_SCORE | GRADD_ATTN_HIDES_BIAS),
                           .fill = gradd_attr_float(x->attrs, GRADD_ATTN_FILL, -FLT_MAX)};
    const gradd_type_t q = *gradd_val_type(b, x->in[GRADD_ATTN_Q]),
                       k = *gradd_val_type(b, x->in[GRADD_ATTN_K]);
    p.wide = q.dtype == GRADD_DT_F64 ? GRADD_DT_F64 : GRADD_DT_F32;
    if (p.wide == GRADD_DT_F32) p.fill = (double)(float)p.fill;
    p.heads = q.dims[p.layout & GRADD_ATTN_Q_TURNED ? 2 : 1];
    p.n_k = k.dims[p.layout & GRADD_ATTN_K_TURNED ? 1 : 2];
    if (p.mask == GRADD_NONE && input(x, GRADD_ATTN_RANGES) != GRADD_NONE)
        p.mask = mask_of_ranges(b, input(x, GRADD_ATTN_RANGES), p.n_k);
    if (p.bias != GRADD_NONE && input(x, GRADD_ATTN_ROWS) != GRADD_NONE)
        p.bias = bias_of_rows(x, p.bias, p.heads);
    p.bias = gradd_wide(b, p.bias);
    p.sinks = gradd_wide(b, p.sinks);
    if (p.mask != GRADD_NONE && gradd_attr_int(x->attrs, GRADD_ATTN_ZERO, 0)) {
        const int rank = gradd_val_type(b, p.mask)->rank;
        gradd_val_t most =
            gradd_reduce_from(b, "ReduceMax", gradd_cast(b, p.mask, GRADD_DT_I32), rank - 1);
        p.any = gradd_cast(b, most, GRADD_DT_BOOL);
    }
    return p;
}

gradd_status_t gradd_attention_expand(gradd_expand_t *x) {
    gradd_builder_t *b = x->b;
    const attention_parts_t p = read_parts(x);
    const gradd_attr_t axis = gradd_make_int("axis", -1);
    if (b->status) return b->status;
    if (input(x, GRADD_ATTN_ROWS) != GRADD_NONE &&
        gradd_attr_float(x->attrs, GRADD_ATTN_DROPOUT, 0) > 0)
        return GRADD_FAIL(UNSUPPORTED, "dropout among live rows has no expansion");
    gradd_val_t q = turned(&p, gradd_wide(b, x->in[GRADD_ATTN_Q]), GRADD_ATTN_Q_TURNED);
    gradd_val_t k = turned(&p, gradd_wide(b, x->in[GRADD_ATTN_K]), GRADD_ATTN_K_TURNED);
    gradd_val_t v = turned(&p, gradd_wide(b, x->in[GRADD_ATTN_V]), GRADD_ATTN_V_TURNED);
    k = gradd_attention_repeat(b, k, p.heads);
    v = gradd_attention_repeat(b, v, p.heads);
    gradd_val_t s = with_sinks(&p, in_rows(&p, masked(&p, product(&p, q, k)), 0));
    gradd_val_t share = gradd_emit_attrs(b, "Softmax", &s, 1, &axis, 1);
    if (p.sinks != GRADD_NONE) share = gradd_slice(b, share, 3, 0, p.n_k, 1);
    gradd_val_t y = in_rows(&p, GRADD_EMIT(b, "MatMul", dropped(&p, share), v), 0);
    x->out[GRADD_ATTN_Y] = gradd_cast(b, turned(&p, y, GRADD_ATTN_Y_TURNED),
                                      gradd_val_type(b, x->in[GRADD_ATTN_Q])->dtype);
    if (x->n_out > GRADD_ATTN_STATS) x->out[GRADD_ATTN_STATS] = statistics(&p, s);
    return b->status;
}
