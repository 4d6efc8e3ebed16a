/* Linear: a matrix product with one weight matrix, and a bias in the product's epilogue.
 *
 * Math: y[..., N] = x[..., K] W + b[N], with W [K, N], or [N, K] if transB. Recognition makes it
 * from MatMul and Add, or from Gemm. Saved for backward: x and W. Gradients: dx = dy W^T; dW = x^T
 * dy over all rows, in W's own layout; db = sum of dy over all rows, a reduction that has a fixed
 * order. The bias costs no pass over y. bf16 is summed in f32 and rounded once, after the bias. */
#include "kernels/cpu/gemm/gemm.h"
#include "kernels/infer.h"
#include "kernels/kernel.h"
#include "kernels/rowwise.h"
#include "kernels/rules.h"

static int64_t rows_in(const gradd_type_t *x) {
    int64_t rows = 1;
    for (int i = 0; i + 1 < x->rank; i++)
        rows *= x->dims[i];
    return rows;
}

static gradd_gemm_t describe(const gradd_view_t *in, const gradd_type_t *y, gradd_attrs_t attrs) {
    const gradd_type_t *x = &in[0].type;
    bool trans = gradd_attr_int(attrs, "transB", 0);
    gradd_gemm_t g = {.dtype = x->dtype, .alpha = 1, .has_bias = true};
    g.m = rows_in(x), g.k = x->dims[x->rank - 1], g.n = y->dims[y->rank - 1];
    g.a_m = g.k, g.a_k = 1;
    g.b_k = trans ? 1 : g.n, g.b_n = trans ? g.k : 1;
    return g;
}

static gradd_status_t prepare_linear(const gradd_infer_t *c, gradd_prepared_t *out) {
    gradd_gemm_t g = describe(c->in, &c->out[0], c->attrs);
    g.threads = c->threads;
    return gradd_gemm_prepare(&g, out);
}

static gradd_status_t compute_linear(const gradd_launch_t *r) {
    return gradd_gemm(r->state, r->in[0].data, r->in[1].data, r->in[2].data, r->out[0].data,
                      r->workspace);
}

static gradd_status_t ref_linear(const gradd_launch_t *r) {
    gradd_gemm_t g = describe(r->in, &r->out[0].type, r->attrs);
    return gradd_gemm_ref(&g, r->in[0].data, r->in[1].data, r->in[2].data, r->out[0].data);
}

static gradd_status_t infer_linear(gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[0].type, *w = &c->in[1].type, *b = &c->in[2].type;
    bool trans = gradd_attr_int(c->attrs, "transB", 0);
    bool fits = x->rank >= 2 && w->rank == 2 && b->rank == 1 && w->dtype == x->dtype &&
                b->dtype == x->dtype && w->dims[trans] == x->dims[x->rank - 1] &&
                w->dims[!trans] == b->dims[0];
    if (!fits) {
        char tx[GRADD_TYPE_TEXT], tw[GRADD_TYPE_TEXT], tb[GRADD_TYPE_TEXT];
        return GRADD_FAIL(GRAPH, "x %s, W %s and bias %s do not make a linear layer",
                          gradd_type_format(x, tx), gradd_type_format(w, tw),
                          gradd_type_format(b, tb));
    }
    c->out[0] = *x;
    c->out[0].dims[x->rank - 1] = b->dims[0];
    return GRADD_OK;
}

static gradd_val_t product_of(gradd_builder_t *b, gradd_val_t x, gradd_val_t y, bool trans_x,
                              bool trans_y) {
    gradd_attr_t attrs[3] = {gradd_make_int("transA", trans_x), gradd_make_int("transB", trans_y),
                             gradd_make_float("alpha", 1)};
    return gradd_emit_attrs(b, "FusedMatMul", (gradd_val_t[]){x, y}, 2, attrs, 3);
}

static gradd_val_t as_matrix(gradd_builder_t *b, gradd_val_t v) {
    gradd_type_t t = *gradd_val_type(b, v);
    if (b->status) return GRADD_NONE;
    return gradd_reshape_to(b, v, (int64_t[]){rows_in(&t), t.dims[t.rank - 1]}, 2);
}

static gradd_status_t grad_linear(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    bool trans = gradd_attr_int(g->attrs, "transB", 0);
    gradd_val_t dy = g->dout[0];
    if (dy == GRADD_NONE) return GRADD_OK;
    if (g->need[0]) g->din[0] = product_of(b, dy, g->in[1], false, !trans);
    if (g->need[1]) {
        gradd_val_t x = as_matrix(b, g->in[0]), d = as_matrix(b, dy);
        g->din[1] = trans ? product_of(b, d, x, true, false) : product_of(b, x, d, true, false);
    }
    if (g->need[2]) g->din[2] = gradd_reduce_to(b, dy, g->in[2]);
    return b->status;
}

static gradd_status_t expand_linear(gradd_expand_t *x) {
    gradd_builder_t *b = x->b;
    const gradd_dtype_t dtype = gradd_val_type(b, x->in[0])->dtype;
    gradd_val_t w = gradd_wide(b, x->in[1]);
    if (gradd_attr_int(x->attrs, "transB", 0)) w = gradd_transpose(b, w, (int64_t[]){1, 0}, 2);
    gradd_val_t y = GRADD_EMIT(b, "MatMul", gradd_wide(b, x->in[0]), w);
    y = GRADD_EMIT(b, "Add", y, gradd_wide(b, x->in[2]));
    x->out[0] = gradd_cast(b, y, dtype);
    return b->status;
}

/* 2 m n k, and one addition of the bias per element. */
static void cost_linear(const gradd_infer_t *c, gradd_cost_t *cost) {
    const gradd_type_t *x = &c->in[0].type;
    double elements = (double)gradd_type_count(&c->out[0]);
    cost->flops = elements * (2 * (double)x->dims[x->rank - 1] + 1);
}

GRADD_OPS(linear,
          GRADD_OP("Linear", "com.gradd", 1, (3, 3), (1, 1),
                   .flags = GRADD_OP_INTERNAL | GRADD_OP_COSTLY, .types = {GRADD_T_FLOAT},
                   .attrs = GRADD_ATTR_LIST({"transB", GRADD_ATTR_INT, false}),
                   .infer = infer_linear, .rowwise = gradd_rowwise_product, .grad = grad_linear,
                   .expand = expand_linear, .ref = ref_linear,
                   .cases = GRADD_CASES({.text = "f32[3,4] f32[4,5] f32[5]"},
                                        {.text = "f32[3,4] f32[5,4] f32[5] | transB=1"},
                                        {.text = "f32[2,3,4] f32[5,4] f32[5] | transB=1"},
                                        {.text = "f32[2,3,4] f32[4,1] f32[1]"},
                                        {.text = "f32[2,1,3,7] f32[7,6] f32[6]"},
                                        {.text = "f32[0,4] f32[4,5] f32[5]"},
                                        {.text = "f32[3,0] f32[0,5] f32[5]"},
                                        {.text = "f32[1,1] f32[1,1] f32[1] | transB=1"},
                                        {.text = "f32[5,13,70] f32[33,70] f32[33] | transB=1"})));

GRADD_KERNELS(cpu, linear,
              GRADD_GEMM_KERNELS("Linear", .prepare = prepare_linear, .compute = compute_linear,
                                 .cost = cost_linear));
