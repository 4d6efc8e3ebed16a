/* Matrix products: MatMul, Gemm, and FusedMatMul, which the gradients are made of.
 *
 * Math: C[..., M, N] = alpha op(A)[..., M, K] op(B)[..., K, N] (+ beta C0), op swaps the last two
 * dimensions; batch dimensions broadcast. Saved for backward: the operands. Gradients:
 * dA = dC op(B)^T, dB = op(A)^T dC, summed over the broadcast dimensions. Against one matrix B, dB
 * is one product over all rows of A. bf16 is summed in f32 and rounded once; FusedMatMul with to=1
 * keeps the f32 result. */
#include "kernels/contract/kernel.h"
#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/half.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rowwise.h"
#include "kernels/rules/rules.h"

#include <string.h>

/* ---- kernels -------------------------------------------------------------------------------- */

static gradd_status_t prepare_matmul(const gradd_infer_t *c, gradd_prepared_t *out) {
    gradd_gemm_t g = gradd_gemm_of_matmul(c->in, &c->out[0], c->attrs);
    g.threads = c->threads;
    g.parts = c->parts;
    return gradd_gemm_prepare(&g, out);
}
static gradd_status_t compute_matmul(const gradd_launch_t *r) {
    return gradd_gemm_part(
        r->state, r->part,
        &(gradd_gemm_operands_t){r->in[0].data, r->in[1].data, NULL, r->out[0].data, r->workspace});
}
static gradd_status_t ref_matmul(const gradd_launch_t *r) {
    gradd_gemm_t g = gradd_gemm_of_matmul(r->in, &r->out[0].type, r->attrs);
    return gradd_gemm_ref(&g, r->in[0].data, r->in[1].data, NULL, r->out[0].data);
}

#define TO_BF16(x) gradd_f32_bf16((float)(x))
#define TO_F16(x)  gradd_f32_f16((float)(x))
/* out = beta * broadcast(c), which the product then adds to */
#define SPREAD(T, READ, WRITE)                                                                     \
    for (int64_t i = 0; i < m; i++)                                                                \
        for (int64_t j = 0; j < n; j++)                                                            \
            ((T *)r->out[0].data)[i * n + j] =                                                     \
                WRITE(beta * (double)READ(((const T *)c->data)[i * step_m + j * step_n]));

static gradd_status_t spread(const gradd_launch_t *r, double beta) {
    const gradd_view_t *c = &r->in[2];
    int64_t m = r->out[0].type.dims[0], n = r->out[0].type.dims[1];
    int64_t cols = c->type.rank ? c->type.dims[c->type.rank - 1] : 1;
    int64_t rows = c->type.rank == 2 ? c->type.dims[0] : 1;
    int64_t step_m = rows == 1 ? 0 : cols, step_n = cols == 1 ? 0 : 1;
    switch (gradd_dtype_is_built(c->type.dtype) ? c->type.dtype : GRADD_DT_NONE) {
    case GRADD_DT_F32:
        SPREAD(float, , (float)) return GRADD_OK;
    case GRADD_DT_BF16:
        SPREAD(gradd_bf16_t, gradd_bf16_f32, TO_BF16) return GRADD_OK;
    case GRADD_DT_F16:
        SPREAD(gradd_f16_t, gradd_f16_f32, TO_F16) return GRADD_OK;
    case GRADD_DT_F64:
        SPREAD(double, , ) return GRADD_OK;
    default:
        return GRADD_FAIL(UNSUPPORTED, "Gemm of %s", gradd_dtype_name(c->type.dtype));
    }
}

static gradd_status_t prepare_gemm(const gradd_infer_t *c, gradd_prepared_t *out) {
    gradd_gemm_t g = gradd_gemm_of_gemm(c->in, c->n_in, &c->out[0], c->attrs);
    g.threads = c->threads;
    g.parts = c->parts;
    return gradd_gemm_prepare(&g, out);
}
static gradd_status_t compute_gemm(const gradd_launch_t *r) {
    gradd_gemm_t g = gradd_gemm_of_gemm(r->in, r->n_in, &r->out[0].type, r->attrs);
    if (g.accumulate && !r->part) GRADD_TRY(spread(r, gradd_attr_float(r->attrs, "beta", 1)));
    return gradd_gemm_part(r->state, r->part,
                           &(gradd_gemm_operands_t){r->in[0].data, r->in[1].data,
                                                    g.has_bias ? r->in[2].data : NULL,
                                                    r->out[0].data, r->workspace});
}
static gradd_status_t ref_gemm(const gradd_launch_t *r) {
    gradd_gemm_t g = gradd_gemm_of_gemm(r->in, r->n_in, &r->out[0].type, r->attrs);
    if (g.accumulate) GRADD_TRY(spread(r, gradd_attr_float(r->attrs, "beta", 1)));
    return gradd_gemm_ref(&g, r->in[0].data, r->in[1].data, g.has_bias ? r->in[2].data : NULL,
                          r->out[0].data);
}

/* ---- shape rules ---------------------------------------------------------------------------- */

static gradd_status_t misfit(const gradd_type_t *a, const gradd_type_t *b) {
    char ta[GRADD_TYPE_TEXT], tb[GRADD_TYPE_TEXT];
    return GRADD_FAIL(GRAPH, "%s %s and %s do not multiply",
                      a->dtype == b->dtype ? "shapes" : "element types of",
                      gradd_type_format(a, ta), gradd_type_format(b, tb));
}

static gradd_status_t infer_product(gradd_infer_t *c, bool trans_a, bool trans_b) {
    gradd_type_t a = c->in[0].type, b = c->in[1].type, *out = &c->out[0];
    bool row = a.rank == 1, col = b.rank == 1;
    if (!a.rank || !b.rank || a.dtype != b.dtype) return misfit(&a, &b);
    if (row)
        a = (gradd_type_t){
            a.dtype, 2, {1, a.dims[0]}
        };
    if (col)
        b = (gradd_type_t){
            b.dtype, 2, {b.dims[0], 1}
        };
    int64_t m = a.dims[a.rank - 1 - !trans_a], k = a.dims[a.rank - 1 - trans_a];
    int64_t l = b.dims[b.rank - 1 - !trans_b], n = b.dims[b.rank - 1 - trans_b];
    if (k != l) return misfit(&c->in[0].type, &c->in[1].type);
    a.rank -= 2, b.rank -= 2;
    out->dtype = a.dtype;
    GRADD_TRY(gradd_broadcast(&a, &b, out));
    if (!row) out->dims[out->rank++] = m;
    if (!col) out->dims[out->rank++] = n;
    return GRADD_OK;
}

static gradd_status_t infer_matmul(gradd_infer_t *c) {
    return infer_product(c, false, false);
}

static gradd_status_t infer_fused(gradd_infer_t *c) {
    if (c->in[0].type.rank < 2 || c->in[1].type.rank < 2)
        return misfit(&c->in[0].type, &c->in[1].type);
    GRADD_TRY(infer_product(c, gradd_attr_int(c->attrs, "transA", 0),
                            gradd_attr_int(c->attrs, "transB", 0)));
    int64_t to = gradd_attr_int(c->attrs, "to", GRADD_DT_NONE);
    if (to != GRADD_DT_NONE && to != GRADD_DT_F32)
        return GRADD_FAIL(GRAPH, "a product has no result of type %lld", (long long)to);
    if (to && gradd_dtype_is_half(c->out[0].dtype)) c->out[0].dtype = GRADD_DT_F32;
    return GRADD_OK;
}

static gradd_status_t infer_gemm(gradd_infer_t *c) {
    if (c->in[0].type.rank != 2 || c->in[1].type.rank != 2)
        return misfit(&c->in[0].type, &c->in[1].type);
    GRADD_TRY(infer_fused(c));
    if (c->n_in < 3 || !c->in[2].type.dtype) return GRADD_OK;
    gradd_type_t both = c->out[0];
    GRADD_TRY(gradd_broadcast(&c->out[0], &c->in[2].type, &both));
    if (!gradd_type_same_shape(&both, &c->out[0]) || c->in[2].type.dtype != c->out[0].dtype)
        return misfit(&c->out[0], &c->in[2].type);
    return GRADD_OK;
}

/* ---- gradient rules ------------------------------------------------------------------------- */

static gradd_val_t fused(gradd_builder_t *b, gradd_val_t x, gradd_val_t y, bool trans_x,
                         bool trans_y, double alpha) {
    gradd_attr_t attrs[3] = {gradd_make_int("transA", trans_x), gradd_make_int("transB", trans_y),
                             gradd_make_float("alpha", alpha)};
    return gradd_emit_attrs(b, "FusedMatMul", (gradd_val_t[]){x, y}, 2, attrs, 3);
}

/* All rows of a value as one matrix. */
static gradd_val_t rows_of(gradd_builder_t *b, gradd_val_t value) {
    gradd_type_t t = *gradd_val_type(b, value);
    int64_t rows = 1;
    for (int i = 0; i + 1 < t.rank; i++)
        rows *= t.dims[i];
    return gradd_reshape_to(b, value, (int64_t[]){rows, t.dims[t.rank - 1]}, 2);
}

/* Gradients of d = alpha op(x) op(y) for operands of rank >= 2, in the operands' layout. */
/* alpha op(x) op(y), each transposed or not, and the gradient d of that. */
typedef struct factors_s {
    gradd_val_t x, y, d;
    bool tx, ty;
    double alpha;
} factors_t;

static gradd_val_t left(gradd_builder_t *b, const factors_t *f) {
    const gradd_val_t x = f->x, y = f->y, d = f->d;
    const bool ty = f->ty;
    const double alpha = f->alpha;
    gradd_val_t dx = f->tx ? fused(b, y, d, ty, true, alpha) : fused(b, d, y, false, !ty, alpha);
    return gradd_reduce_to(b, dx, x);
}

static gradd_val_t right(gradd_builder_t *b, const factors_t *f) {
    gradd_val_t x = f->x, d = f->d;
    const gradd_val_t y = f->y;
    const bool tx = f->tx;
    const double alpha = f->alpha;
    const gradd_type_t *type_y = gradd_val_type(b, y), *type_x = gradd_val_type(b, x);
    if (type_y->rank == 2 && type_x->rank > 2 && !tx) {
        x = rows_of(b, x);
        d = rows_of(b, d);
    }
    gradd_val_t dy = f->ty ? fused(b, d, x, true, tx, alpha) : fused(b, x, d, !tx, false, alpha);
    return gradd_reduce_to(b, dy, y);
}

/* The gradient of an f32 result of bf16 or f16 operands multiplies them so, too. */
static gradd_val_t like_operands(gradd_grad_t *g, gradd_val_t d) {
    gradd_dtype_t dtype = gradd_val_type(g->b, g->in[0])->dtype;
    gradd_attr_t to = gradd_make_int("to", dtype);
    if (g->b->status || gradd_val_type(g->b, d)->dtype == dtype) return d;
    return gradd_emit_attrs(g->b, "Cast", &d, 1, &to, 1);
}

static gradd_status_t grad_fused(gradd_grad_t *g) {
    gradd_val_t d = like_operands(g, g->dout[0]);
    bool ta = gradd_attr_int(g->attrs, "transA", 0), tb = gradd_attr_int(g->attrs, "transB", 0);
    double alpha = gradd_attr_float(g->attrs, "alpha", 1);
    const factors_t f = {g->in[0], g->in[1], d, ta, tb, alpha};
    if (g->need[0]) g->din[0] = left(g->b, &f);
    if (g->need[1]) g->din[1] = right(g->b, &f);
    return g->b->status;
}

static gradd_status_t grad_matmul(gradd_grad_t *g) {
    gradd_type_t ta = *gradd_val_type(g->b, g->in[0]), tb = *gradd_val_type(g->b, g->in[1]);
    gradd_type_t td = *gradd_val_type(g->b, g->dout[0]);
    if (g->b->status) return g->b->status;
    gradd_gemm_matrices(&ta, &tb, &td);
    gradd_val_t a = gradd_reshape_to(g->b, g->in[0], ta.dims, ta.rank);
    gradd_val_t b = gradd_reshape_to(g->b, g->in[1], tb.dims, tb.rank);
    gradd_val_t d = gradd_reshape_to(g->b, g->dout[0], td.dims, td.rank);
    const factors_t f = {a, b, d, false, false, 1};
    if (g->need[0]) g->din[0] = gradd_reshape_as(g->b, left(g->b, &f), g->in[0]);
    if (g->need[1]) g->din[1] = gradd_reshape_as(g->b, right(g->b, &f), g->in[1]);
    return g->b->status;
}

static gradd_status_t grad_gemm(gradd_grad_t *g) {
    GRADD_TRY(grad_fused(g));
    double beta = gradd_attr_float(g->attrs, "beta", 1);
    if (g->n_in < 3 || !g->need[2]) return g->b->status;
    gradd_val_t d = gradd_reduce_to(g->b, g->dout[0], g->in[2]);
    g->din[2] = beta == 1 ? d : gradd_scaled(g->b, d, beta);
    return g->b->status;
}

/* ---- expansion ------------------------------------------------------------------------------ */

static gradd_val_t turned(gradd_builder_t *b, gradd_val_t v, bool turn) {
    const int rank = gradd_val_type(b, v)->rank;
    int64_t perm[GRADD_MAX_RANK];
    if (!turn || b->status) return v;
    for (int i = 0; i < rank; i++)
        perm[i] = i < rank - 2 ? i : 2 * rank - 3 - i;
    return gradd_transpose(b, v, perm, rank);
}

static gradd_status_t expand_fused(gradd_expand_t *x) {
    gradd_builder_t *b = x->b;
    const gradd_dtype_t dtype = gradd_val_type(b, x->in[0])->dtype;
    const double alpha = gradd_attr_float(x->attrs, "alpha", 1);
    const bool wide = gradd_attr_int(x->attrs, "to", GRADD_DT_NONE) == GRADD_DT_F32;
    gradd_val_t l = turned(b, gradd_wide(b, x->in[0]), gradd_attr_int(x->attrs, "transA", 0));
    gradd_val_t r = turned(b, gradd_wide(b, x->in[1]), gradd_attr_int(x->attrs, "transB", 0));
    gradd_val_t y = GRADD_EMIT(b, "MatMul", l, r);
    if (alpha != 1) y = gradd_scaled(b, y, alpha);
    x->out[0] = wide && gradd_dtype_is_half(dtype) ? y : gradd_cast(b, y, dtype);
    return b->status;
}

/* ---- cases and rows ------------------------------------------------------------------------- */

#define TRANSPOSITIONS                                                                             \
    {"transA", GRADD_ATTR_INT, false}, {                                                           \
        "transB", GRADD_ATTR_INT, false                                                            \
    }

GRADD_OPS(
    matmul,
    GRADD_OP(
        "MatMul", "", 9, (2, 2), (1, 1), .flags = GRADD_OP_COSTLY, .types = {GRADD_T_NUM},
        .infer = infer_matmul, .rowwise = gradd_rowwise_product, .grad = grad_matmul,
        .ref = GRADD_REF(ref_matmul),
        .cases = GRADD_CASES({.text = "f32[3,4] f32[4,5]"}, {.text = "f32[2,3,4] f32[4,5]"},
                             {.text = "f32[2,3,4] f32[2,4,5]"}, {.text = "f32[3,4] f32[2,4,5]"},
                             {.text = "f32[2,1,3,4] f32[3,4,5]"}, {.text = "f32[2,3,1,4] f32[4,1]"},
                             {.text = "f32[2,2,3,4] f32[2,2,4,3]"}, {.text = "f32[4] f32[4]"},
                             {.text = "f32[4] f32[4,5]"}, {.text = "f32[3,4] f32[4]"},
                             {.text = "f32[4] f32[2,4,5]"}, {.text = "f32[2,3,4] f32[4]"},
                             {.text = "f32[0,4] f32[4,5]"}, {.text = "f32[3,0] f32[0,5]"},
                             {.text = "f32[1,1] f32[1,1]"}, {.text = "f32[2,17,40] f32[40,33]"},
                             {.text = "i64[3,4] i64[4,2]"}, {.text = "i32[2,2,3] i32[3,1]"})),
    GRADD_OP("FusedMatMul", "com.gradd", 1, (2, 2), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_COSTLY, .types = {GRADD_T_FLOAT},
             .attrs = GRADD_ATTR_LIST(TRANSPOSITIONS, {"alpha", GRADD_ATTR_FLOAT, false},
                                      {"to", GRADD_ATTR_INT, false}),
             .infer = infer_fused, .rowwise = gradd_rowwise_product, .grad = grad_fused,
             .expand = expand_fused, .ref = GRADD_REF(ref_matmul),
             .cases = GRADD_CASES({.text = "f32[4,3] f32[4,5] | transA=1"},
                                  {.text = "f32[3,4] f32[5,4] | transB=1 alpha=0.5"},
                                  {.text = "f32[4,3] f32[5,4] | transA=1 transB=1 alpha=-2.0"},
                                  {.text = "f32[2,4,3] f32[4,5] | transA=1"},
                                  {.text = "f32[2,3,4] f32[5,4] | transB=1"},
                                  {.text = "f32[2,4,3] f32[2,5,4] | transA=1 transB=1"},
                                  {.text = "f32[2,1,4,3] f32[3,4,5] | transA=1 alpha=0.25"},
                                  {.text = "f32[2,3,4] f32[4,5]"}, {.text = "f32[2,3,0] f32[0,2]"},
                                  {.text = "bf16[2,3,4] bf16[4,5] | to=1"})),
    GRADD_OP("Gemm", "", 11, (2, 3), (1, 1), .flags = GRADD_OP_COSTLY, .types = {GRADD_T_FLOAT},
             .attrs = GRADD_ATTR_LIST(TRANSPOSITIONS, {"alpha", GRADD_ATTR_FLOAT, false},
                                      {"beta", GRADD_ATTR_FLOAT, false}),
             .infer = infer_gemm, .rowwise = gradd_rowwise_product, .grad = grad_gemm,
             .ref = GRADD_REF(ref_gemm),
             .cases = GRADD_CASES(
                 {.text = "f32[3,4] f32[5,4] f32[5] | transB=1"},
                 {.text = "f32[3,4] f32[4,5] f32[3,5]"}, {.text = "f32[3,4] f32[4,5]"},
                 {.text = "f32[4,3] f32[4,5] f32[3,1] | transA=1 alpha=0.5 beta=2.0"},
                 {.text = "f32[3,4] f32[4,5] f32[1,5]"}, {.text = "f32[3,4] f32[4,5] f32[]"},
                 {.text = "f32[3,4] f32[4,5] f32[5] | beta=0.5"},
                 {.text = "f32[4,1] f32[1,4] f32[1]"}, {.text = "f32[0,4] f32[4,5] f32[5]"},
                 {.text = "f32[5,1] f32[1,1] f32[5,1]"},
                 {.text = "f32[65,70] f32[33,70] f32[33] | transB=1"})));

GRADD_KERNELS(cpu, matmul,
              GRADD_GEMM_KERNELS("MatMul", .prepare = prepare_matmul, .compute = compute_matmul,
                                 .cost = gradd_gemm_cost),
              GRADD_KERNEL("MatMul", "plain loops", .types = {GRADD_T_INT},
                           .unprepare = gradd_gemm_unprepare, .prepare = prepare_matmul,
                           .makes_parts = true, .compute = compute_matmul, .cost = gradd_gemm_cost),
              GRADD_GEMM_KERNELS("FusedMatMul", .prepare = prepare_matmul,
                                 .compute = compute_matmul, .cost = gradd_gemm_cost),
              GRADD_GEMM_KERNELS("Gemm", .prepare = prepare_gemm, .compute = compute_gemm,
                                 .cost = gradd_gemm_cost));
