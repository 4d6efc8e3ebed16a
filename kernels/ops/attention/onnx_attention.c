/* Attention of ONNX (opset 23), a composite: its expansion is FusedAttention and what lies around.
 *
 * Q [B, H, Q, D], K [B, K, N, D], V [B, K, N, E], or all three [B, positions, heads * width] with
 * the numbers of heads as attributes. past_key and past_value [B, K, P, ...] stand in front of K
 * and V; the results are present_key and present_value. attn_mask broadcasts to [B, H, Q, P + N]
 * and has one entry per key: boolean (true = may look), or of the type of Q, added to the scores.
 * With is_causal, query i sees keys up to i + P. Rows that may see no key give zero, all of them
 * where there is none. Y has the form of Q.
 *
 * qk_matmul_output is the matrix of scores, which nothing else needs: as products (mode 0), capped
 * (1), with mask (2), after the softmax (3). The softmax is computed in f32 or f64, so a
 * softmax_precision other than that is refused.
 * Source: https://onnx.ai/onnx/operators/onnx__Attention.html
 *
 * com.gradd::Attention is the same with an attribute more, for which ONNX has no word: `dropout`,
 * the share of probabilities that a training step leaves out, as in torch's
 * scaled_dot_product_attention.
 */
#include <math.h>
#include <string.h>

#include "kernels/contract/op.h"
#include "kernels/describe/attention.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

enum { Q, K, V, MASK, PAST_KEY, PAST_VALUE };

typedef struct attention_sizes_s {
    bool flat; /* [B, positions, heads * width] */
    int64_t batch, heads, kv_heads, n_q, n_new, n_past, d, d_v;
} attention_sizes_t;

/* ---- shape rule ------------------------------------------------------------------------------ */

static gradd_status_t misfit(const char *what, const gradd_type_t *type) {
    char text[GRADD_TYPE_TEXT];
    return GRADD_FAIL(GRAPH, "%s of type %s does not fit", what, gradd_type_format(type, text));
}

/* The four dimensions of Q, K or V; false if it has not these. */
static bool read_dims(const gradd_type_t *t, bool flat, int64_t heads, int64_t *dims) {
    if (t->rank != (flat ? 3 : 4)) return false;
    if (!flat) {
        memcpy(dims, t->dims, 4 * sizeof dims[0]);
        return true;
    }
    if (heads < 1 || t->dims[2] % heads) return false;
    dims[0] = t->dims[0], dims[1] = heads, dims[2] = t->dims[1], dims[3] = t->dims[2] / heads;
    return true;
}

static gradd_status_t read_sizes(const gradd_type_t *in, gradd_attrs_t attrs,
                                 attention_sizes_t *out) {
    const bool flat = in[Q].rank == 3;
    const int64_t kv_heads = gradd_attr_int(attrs, "kv_num_heads", 0);
    int64_t q[4], k[4], v[4];
    if (!read_dims(&in[Q], flat, gradd_attr_int(attrs, "q_num_heads", 0), q))
        return misfit("Q", &in[Q]);
    if (!read_dims(&in[K], flat, kv_heads, k) || in[K].dtype != in[Q].dtype)
        return misfit("K", &in[K]);
    if (!read_dims(&in[V], flat, kv_heads, v) || in[V].dtype != in[Q].dtype)
        return misfit("V", &in[V]);
    if (k[0] != q[0] || k[3] != q[3] || (k[1] ? q[1] % k[1] : q[1])) return misfit("K", &in[K]);
    if (v[0] != q[0] || v[1] != k[1] || v[2] != k[2]) return misfit("V", &in[V]);
    *out = (attention_sizes_t){flat, q[0], q[1], k[1], q[2], k[2], 0, q[3], v[3]};
    return GRADD_OK;
}

static gradd_status_t read_past(const gradd_type_t *past, const attention_sizes_t *s, int64_t width,
                                const char *name, int64_t *out_n) {
    const bool fits = past->rank == 4 && past->dims[0] == s->batch &&
                      past->dims[1] == s->kv_heads && past->dims[3] == width;
    if (!fits) return misfit(name, past);
    *out_n = past->dims[2];
    return GRADD_OK;
}

static gradd_status_t check_mask(const gradd_type_t *mask, const gradd_type_t *q,
                                 const attention_sizes_t *s) {
    const int64_t whole[4] = {s->batch, s->heads, s->n_q, s->n_past + s->n_new};
    if (mask->dtype != GRADD_DT_BOOL && mask->dtype != q->dtype)
        return GRADD_FAIL(UNSUPPORTED, "attn_mask of %s beside Q of %s",
                          gradd_dtype_name(mask->dtype), gradd_dtype_name(q->dtype));
    /* one entry for all keys would be padded by some, and repeated by others */
    bool fits = mask->rank >= 1 && mask->rank <= 4 && mask->dims[mask->rank - 1] == whole[3];
    for (int i = 0; fits && i < mask->rank; i++)
        fits = mask->dims[i] == 1 || mask->dims[i] == whole[4 - mask->rank + i];
    return fits ? GRADD_OK : misfit("attn_mask", mask);
}

static gradd_status_t check_attrs(gradd_attrs_t attrs, gradd_dtype_t dtype) {
    const int64_t wide = dtype == GRADD_DT_F64 ? GRADD_DT_F64 : GRADD_DT_F32;
    const int64_t precision = gradd_attr_int(attrs, "softmax_precision", wide);
    const int64_t mode = gradd_attr_int(attrs, "qk_matmul_output_mode", 0);
    if (precision != wide)
        return GRADD_FAIL(UNSUPPORTED, "softmax_precision %lld: the softmax is computed in %s",
                          (long long)precision, gradd_dtype_name((gradd_dtype_t)wide));
    if (mode < 0 || mode > 3)
        return GRADD_FAIL(GRAPH, "qk_matmul_output_mode %lld", (long long)mode);
    return GRADD_OK;
}

static bool is_given(const gradd_type_t *in, int i) {
    return in[i].dtype != GRADD_DT_NONE;
}

/* Of six inputs, absent ones without a type. */
static gradd_status_t describe(const gradd_type_t *in, gradd_attrs_t attrs, attention_sizes_t *s) {
    int64_t n = 0;
    GRADD_TRY(check_attrs(attrs, in[Q].dtype));
    GRADD_TRY(read_sizes(in, attrs, s));
    if (is_given(in, PAST_KEY) != is_given(in, PAST_VALUE))
        return GRADD_FAIL(GRAPH, "past_key and past_value must be given together");
    if (is_given(in, PAST_KEY)) {
        GRADD_TRY(read_past(&in[PAST_KEY], s, s->d, "past_key", &s->n_past));
        GRADD_TRY(read_past(&in[PAST_VALUE], s, s->d_v, "past_value", &n));
        if (n != s->n_past) return misfit("past_value", &in[PAST_VALUE]);
    }
    return is_given(in, MASK) ? check_mask(&in[MASK], &in[Q], s) : GRADD_OK;
}

static gradd_status_t infer_attention(gradd_infer_t *c) {
    gradd_type_t in[6] = {{0}};
    attention_sizes_t s;
    for (int i = 0; i < c->n_in; i++)
        in[i] = c->in[i].type;
    GRADD_TRY(describe(in, c->attrs, &s));
    const gradd_dtype_t dtype = in[Q].dtype;
    const int64_t n_k = s.n_past + s.n_new;
    int64_t columns;
    if (__builtin_mul_overflow(s.heads, s.d_v, &columns))
        return GRADD_FAIL(LIMIT, "%lld heads of %lld columns", (long long)s.heads,
                          (long long)s.d_v);
    const gradd_type_t all[4] = {
        s.flat ? (gradd_type_t){dtype, 3, {s.batch, s.n_q, columns}        }
               : (gradd_type_t){dtype, 4, {s.batch, s.heads, s.n_q, s.d_v} },
        {dtype, 4, {s.batch, s.kv_heads, n_k, s.d}  },
        {dtype, 4, {s.batch, s.kv_heads, n_k, s.d_v}},
        {dtype, 4, {s.batch, s.heads, s.n_q, n_k}   },
    };
    for (int j = 0; j < c->n_out; j++)
        c->out[j] = all[j];
    return GRADD_OK;
}

/* ---- expansion ------------------------------------------------------------------------------- */

typedef struct onnx_attention_parts_s {
    gradd_builder_t *b;
    const gradd_expand_t *x;
    attention_sizes_t s;
    gradd_val_t in[6];
    gradd_val_t allowed, bias; /* GRADD_NONE = all, none */
    gradd_dtype_t dtype, wide;
} onnx_attention_parts_t;

/* [B, positions, heads, width] of a flat operand. */
static gradd_val_t apart(const onnx_attention_parts_t *p, int i, int64_t heads) {
    const gradd_type_t t = *gradd_val_type(p->b, p->in[i]);
    if (p->b->status) return GRADD_NONE;
    const int64_t dims[4] = {t.dims[0], t.dims[1], heads, t.dims[2] / heads};
    return gradd_reshape_to(p->b, p->in[i], dims, 4);
}

/* Heads in front of positions, the past in front of new keys and values. */
static gradd_val_t whole(const onnx_attention_parts_t *p, int i, int past, int64_t heads) {
    gradd_val_t v = p->in[i];
    if (p->s.flat) v = gradd_transpose(p->b, apart(p, i, heads), (int64_t[]){0, 2, 1, 3}, 4);
    if (past < 0 || p->in[past] == GRADD_NONE) return v;
    const gradd_val_t both[2] = {p->in[past], v};
    return gradd_concat(p->b, both, 2, 2);
}

static gradd_val_t positions(gradd_builder_t *b, int64_t first, int64_t n) {
    return GRADD_EMIT(b, "Range", gradd_const_scalar(b, GRADD_DT_I64, (double)first),
                      gradd_const_scalar(b, GRADD_DT_I64, (double)(first + n)),
                      gradd_const_scalar(b, GRADD_DT_I64, 1));
}

/* Key j of query i: j <= i + P. */
static gradd_val_t causal(const onnx_attention_parts_t *p) {
    gradd_builder_t *b = p->b;
    const int64_t column[2] = {p->s.n_q, 1};
    gradd_val_t rows = gradd_reshape_to(b, positions(b, p->s.n_past, p->s.n_q), column, 2);
    return GRADD_EMIT(b, "LessOrEqual", positions(b, 0, p->s.n_past + p->s.n_new), rows);
}

/* A bias of minus infinity is no key either, or rows that have nothing else would be NaN. One that
 * is NaN is a key. */
static void find_mask(onnx_attention_parts_t *p) {
    gradd_builder_t *b = p->b;
    if (p->in[MASK] != GRADD_NONE && gradd_val_type(b, p->in[MASK])->dtype == GRADD_DT_BOOL) {
        p->allowed = p->in[MASK];
    } else if (p->in[MASK] != GRADD_NONE) {
        gradd_val_t least = gradd_const_scalar(b, p->wide, -INFINITY);
        p->bias = gradd_wide(b, p->in[MASK]);
        p->allowed = GRADD_EMIT(b, "Not", GRADD_EMIT(b, "Equal", p->bias, least));
    }
    if (!gradd_attr_int(p->x->attrs, "is_causal", 0)) return;
    gradd_val_t lower = causal(p);
    p->allowed = p->allowed == GRADD_NONE ? lower : GRADD_EMIT(b, "And", p->allowed, lower);
}

static double scale_of(const onnx_attention_parts_t *p) {
    return gradd_attr_float(p->x->attrs, "scale", 1 / sqrt((double)p->s.d));
}

static gradd_val_t zeros(const onnx_attention_parts_t *p) {
    const attention_sizes_t *s = &p->s;
    const int64_t flat[3] = {s->batch, s->n_q, s->heads * s->d_v};
    const int64_t apart[4] = {s->batch, s->heads, s->n_q, s->d_v};
    gradd_val_t dims = gradd_const_i64s(p->b, s->flat ? flat : apart, s->flat ? 3 : 4);
    return GRADD_EMIT(p->b, "Expand", gradd_const_scalar(p->b, p->dtype, 0), dims);
}

static gradd_val_t attend(const onnx_attention_parts_t *p) {
    gradd_builder_t *b = p->b;
    const bool past = p->in[PAST_KEY] != GRADD_NONE;
    const int turned = GRADD_ATTN_Q_TURNED | GRADD_ATTN_Y_TURNED |
                       (past ? 0 : GRADD_ATTN_K_TURNED | GRADD_ATTN_V_TURNED);
    const gradd_attr_t attrs[7] = {
        gradd_make_float("scale", scale_of(p)),
        gradd_make_float("softcap", gradd_attr_float(p->x->attrs, "softcap", 0)),
        gradd_make_float("dropout", gradd_attr_float(p->x->attrs, "dropout", 0)),
        gradd_make_float("fill", -INFINITY),
        gradd_make_int("hides", GRADD_ATTN_HIDES_SCORE | GRADD_ATTN_HIDES_BIAS),
        gradd_make_int("zero", 1),
        gradd_make_int("layout", p->s.flat ? turned : 0)};
    gradd_val_t in[6] = {p->in[Q], GRADD_NONE, GRADD_NONE, p->allowed, p->bias, GRADD_NONE};
    if (p->s.flat) in[Q] = apart(p, Q, p->s.heads);
    const bool apart_keys = p->s.flat && !past;
    in[K] = apart_keys ? apart(p, K, p->s.kv_heads) : whole(p, K, PAST_KEY, p->s.kv_heads);
    in[V] = apart_keys ? apart(p, V, p->s.kv_heads) : whole(p, V, PAST_VALUE, p->s.kv_heads);
    if (p->allowed != GRADD_NONE) in[5] = GRADD_EMIT(b, "MaskRanges", p->allowed);
    gradd_val_t y = gradd_emit_attrs(b, "FusedAttention", in, 6, attrs, 7);
    const int64_t flat[3] = {p->s.batch, p->s.n_q, p->s.heads * p->s.d_v};
    return p->s.flat ? gradd_reshape_to(b, y, flat, 3) : y;
}

/* v where a key is allowed, else `otherwise`. */
static gradd_val_t where_allowed(const onnx_attention_parts_t *p, gradd_val_t v, double otherwise) {
    if (p->allowed == GRADD_NONE) return v;
    return GRADD_EMIT(p->b, "Where", p->allowed, v, gradd_const_scalar(p->b, p->wide, otherwise));
}

/* The matrix of scores, as far as the mode says. */
static gradd_val_t scores(const onnx_attention_parts_t *p) {
    gradd_builder_t *b = p->b;
    const int64_t mode = gradd_attr_int(p->x->attrs, "qk_matmul_output_mode", 0);
    const double cap = gradd_attr_float(p->x->attrs, "softcap", 0);
    const gradd_attr_t axis = gradd_make_int("axis", -1);
    gradd_val_t k = gradd_attention_repeat(b, whole(p, K, PAST_KEY, p->s.kv_heads), p->s.heads);
    k = gradd_transpose(b, gradd_wide(b, k), (int64_t[]){0, 1, 3, 2}, 4);
    gradd_val_t s = GRADD_EMIT(b, "MatMul", gradd_wide(b, whole(p, Q, -1, p->s.heads)), k);
    s = gradd_scaled(b, s, scale_of(p));
    if (mode > 0 && cap != 0)
        s = gradd_scaled(b, GRADD_EMIT(b, "Tanh", gradd_scaled(b, s, 1 / cap)), cap);
    if (mode > 1 && p->bias != GRADD_NONE) s = GRADD_EMIT(b, "Add", s, p->bias);
    if (mode > 1) s = where_allowed(p, s, mode == 2 ? -INFINITY : GRADD_ATTN_MASKED);
    if (mode == 3) s = where_allowed(p, gradd_emit_attrs(b, "Softmax", &s, 1, &axis, 1), 0);
    return gradd_cast(b, s, p->dtype);
}

static gradd_status_t expand_attention(gradd_expand_t *x) {
    onnx_attention_parts_t p = {.b = x->b, .x = x, .allowed = GRADD_NONE, .bias = GRADD_NONE};
    gradd_type_t types[6] = {{0}};
    for (int i = 0; i < 6; i++) {
        p.in[i] = i < x->n_in ? x->in[i] : GRADD_NONE;
        if (p.in[i] != GRADD_NONE) types[i] = *gradd_val_type(x->b, p.in[i]);
    }
    GRADD_TRY(describe(types, x->attrs, &p.s));
    p.dtype = types[Q].dtype;
    p.wide = p.dtype == GRADD_DT_F64 ? GRADD_DT_F64 : GRADD_DT_F32;
    const bool any = p.s.heads && p.s.n_past + p.s.n_new;
    if (any) find_mask(&p);
    x->out[0] = any ? attend(&p) : zeros(&p);
    if (x->n_out > 1) x->out[1] = whole(&p, K, PAST_KEY, p.s.kv_heads);
    if (x->n_out > 2) x->out[2] = whole(&p, V, PAST_VALUE, p.s.kv_heads);
    if (x->n_out > 3) x->out[3] = scores(&p);
    return x->b->status;
}

/* ---- row ------------------------------------------------------------------------------------- */

/* clang-format off */
#define ATTRS                                                                                      \
    {"is_causal", GRADD_ATTR_INT, false}, {"kv_num_heads", GRADD_ATTR_INT, false},                 \
    {"q_num_heads", GRADD_ATTR_INT, false}, {"qk_matmul_output_mode", GRADD_ATTR_INT, false},      \
    {"scale", GRADD_ATTR_FLOAT, false}, {"softcap", GRADD_ATTR_FLOAT, false},                      \
    {"softmax_precision", GRADD_ATTR_INT, false}
/* clang-format on */

GRADD_OPS(
    onnx_attention,
    GRADD_OP(
        "Attention", "", 23, (3, 6), (1, 4), .flags = GRADD_OP_COSTLY,
        .types = {GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_T_FLOAT | GRADD_T_BOOL,
                  GRADD_T_FLOAT},
        .infer = infer_attention, .expand = expand_attention, .attrs = GRADD_ATTR_LIST(ATTRS),
        .cases = GRADD_CASES(
            {.text = "f32[2,3,4,8] f32[2,3,6,8] f32[2,3,6,8]"},
            {.text = "f32[2,4,5,8] f32[2,2,5,8] f32[2,2,5,6] | is_causal=1 scale=0.3"},
            {.text = "f32[1,2,3,4] f32[1,2,5,4] f32[1,2,5,4] | is_causal=1"},
            {.text = "f32[2,5,12] f32[2,6,6] f32[2,6,4] | q_num_heads=4 kv_num_heads=2"},
            {.text = "f32[2,5,12] f32[2,5,12] f32[2,5,12] | q_num_heads=3 kv_num_heads=3 "
                     "is_causal=1 -> 3"},
            {.text = "f32[1,2,3,4] f32[1,2,5,4] f32[1,2,5,4] "
                     "bool[3,5]={0,0,0,0,0,1,1,0,1,0,1,0,0,0,1}"},
            {.text = "f32[2,2,3,4] f32[2,1,5,4] f32[2,1,5,4] bool[2,1,1,5]={1,1,1,0,0,1,1,1,1,1} | "
                     "softcap=2.5"},
            {.text = "f32[1,2,3,4] f32[1,2,3,4] f32[1,2,3,4] bool[3,3]={0,1,1,1,1,1,0,0,1} | "
                     "is_causal=1"},
            {.text = "f32[2,2,3,4] f32[2,2,5,4] f32[2,2,5,4] f32[2,3,5] | softcap=1.5"},
            {.text = "f32[1,2,3,4] f32[1,2,3,4] f32[1,2,3,4] f32[1,3,3] | is_causal=1"},
            {.text = "f32[1,2,2,4] f32[1,2,3,4] f32[1,2,3,4] f32[2,3]={-inf,-inf,-inf,0,-inf,0.5}",
             .grad_tol = -1},
            {.text = "f32[2,2,3,4] f32[2,2,2,4] f32[2,2,2,4] - f32[2,2,3,4] f32[2,2,3,4] | "
                     "is_causal=1 -> 3"},
            {.text = "f32[1,3,8] f32[1,2,4] f32[1,2,4] bool[3,5] f32[1,1,3,4] f32[1,1,3,4] | "
                     "q_num_heads=2 kv_num_heads=1 -> 3"},
            {.text = "f32[1,2,3,4] f32[1,1,5,4] f32[1,1,5,4] | scale=0.7 -> 4"},
            {.text = "f32[1,2,3,4] f32[1,2,5,4] f32[1,2,5,4] f32[3,5] | qk_matmul_output_mode=1 "
                     "softcap=2.5 -> 4"},
            {.text =
                 "f32[1,2,3,4] f32[1,2,5,4] f32[1,2,5,4] f32[3,5] | qk_matmul_output_mode=2 -> 4"},
            {.text = "f32[1,2,3,4] f32[1,2,3,4] f32[1,2,3,4] bool[3,3]={0,1,1,1,1,1,0,0,1} | "
                     "is_causal=1 qk_matmul_output_mode=3 -> 4"},
            {.text = "f32[1,2,2,4] f32[1,2,0,4] f32[1,2,0,3] -> 3"},
            {.text = "f32[0,2,3,4] f32[0,2,5,4] f32[0,2,5,4]"})),
    GRADD_OP("Attention", "com.gradd", 1, (3, 6), (1, 4),
             .flags = GRADD_OP_COSTLY | GRADD_OP_RANDOM,
             .types = {GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_T_FLOAT | GRADD_T_BOOL,
                       GRADD_T_FLOAT},
             .infer = infer_attention, .expand = expand_attention,
             .attrs = GRADD_ATTR_LIST({"dropout", GRADD_ATTR_FLOAT, false}, ATTRS),
             .cases = GRADD_CASES(
                 {.text = "f32[2,4,5,8] f32[2,2,5,8] f32[2,2,5,6] | is_causal=1 dropout=0.25"},
                 {.text = "f32[1,2,3,4] f32[1,2,5,4] f32[1,2,5,4] "
                          "bool[3,5]={0,0,0,0,0,1,1,0,1,0,1,0,0,0,1} | dropout=0.5"})));
