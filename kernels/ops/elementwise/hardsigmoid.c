/* HardSigmoid: y = alpha x + beta, cut to [0, 1], elementwise, any shape. NaN stays NaN.
 *
 * Saved for backward: x. HardSigmoidGrad(dy, x) = alpha dy where 0 < alpha x + beta < 1, else 0, is
 * internal, one pass over memory: as in torch there is no gradient on the bounds. */
#include "kernels/contract/kernel.h"
#include "kernels/cpu/map.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rowwise.h"
#include "kernels/rules/rules.h"

GRADD_ROWS1_FLOAT(hard_sigmoid, E_HARD_SIGMOID)
GRADD_TABLE_FLOAT(hard_sigmoid)
GRADD_ROWS2_FLOAT(hard_sigmoid_grad, E_HARD_SIGMOID_GRAD)
GRADD_TABLE_FLOAT(hard_sigmoid_grad)

static double alpha_of(gradd_attrs_t attrs) {
    return gradd_attr_float(attrs, "alpha", 0.2);
}

static double beta_of(gradd_attrs_t attrs) {
    return gradd_attr_float(attrs, "beta", 0.5);
}

static gradd_status_t compute(const gradd_launch_t *r, const gradd_row_functions_t *rows,
                              bool ref) {
    const double p[] = {alpha_of(r->attrs), beta_of(r->attrs)};
    return gradd_map_rows(rows, r->out, r->in, r->n_in, p, ref);
}

static gradd_status_t compute_hard_sigmoid(const gradd_launch_t *r) {
    return compute(r, &hard_sigmoid_rows, false);
}

static gradd_status_t compute_hard_sigmoid_ref(const gradd_launch_t *r) {
    return compute(r, &hard_sigmoid_refs, true);
}

static gradd_status_t compute_hard_sigmoid_grad(const gradd_launch_t *r) {
    return compute(r, &hard_sigmoid_grad_rows, false);
}

static gradd_status_t compute_hard_sigmoid_grad_ref(const gradd_launch_t *r) {
    return compute(r, &hard_sigmoid_grad_refs, true);
}

static gradd_status_t grad_hard_sigmoid(gradd_grad_t *g) {
    const gradd_val_t in[] = {g->dout[0], g->in[0]};
    const gradd_attr_t attrs[] = {gradd_make_float("alpha", alpha_of(g->attrs)),
                                  gradd_make_float("beta", beta_of(g->attrs))};
    g->din[0] = gradd_emit_attrs(g->b, "HardSigmoidGrad", in, 2, attrs, 2);
    return g->b->status;
}

/* 0 < v and v < 1. */
static gradd_val_t inside(gradd_builder_t *b, gradd_val_t v, gradd_dtype_t dtype) {
    const gradd_val_t zero = gradd_const_scalar(b, dtype, 0), one = gradd_const_scalar(b, dtype, 1);
    return GRADD_EMIT(b, "And", GRADD_EMIT(b, "Greater", v, zero), GRADD_EMIT(b, "Less", v, one));
}

/* alpha x + beta. */
static gradd_val_t line(const gradd_expand_t *e, gradd_val_t x) {
    const gradd_val_t scaled = gradd_scaled(e->b, x, alpha_of(e->attrs));
    if (e->b->status) return GRADD_NONE;
    const gradd_dtype_t dtype = gradd_val_type(e->b, x)->dtype;
    return GRADD_EMIT(e->b, "Add", scaled, gradd_const_scalar(e->b, dtype, beta_of(e->attrs)));
}

static gradd_status_t expand_hard_sigmoid(gradd_expand_t *e) {
    gradd_builder_t *b = e->b;
    const gradd_dtype_t dtype = gradd_val_type(b, e->in[0])->dtype;
    const gradd_val_t v = line(e, gradd_wide(b, e->in[0]));
    if (b->status) return b->status;
    const gradd_dtype_t wide = gradd_val_type(b, v)->dtype;
    const gradd_val_t zero = gradd_const_scalar(b, wide, 0), one = gradd_const_scalar(b, wide, 1);
    const gradd_val_t ends = GRADD_EMIT(b, "StopGradient", GRADD_EMIT(b, "Clip", v, zero, one));
    e->out[0] = gradd_cast(b, GRADD_EMIT(b, "Where", inside(b, v, wide), v, ends), dtype);
    return b->status;
}

static gradd_status_t expand_hard_sigmoid_grad(gradd_expand_t *e) {
    gradd_builder_t *b = e->b;
    const gradd_dtype_t dtype = gradd_val_type(b, e->in[0])->dtype;
    const gradd_val_t dy = gradd_wide(b, e->in[0]), v = line(e, gradd_wide(b, e->in[1]));
    if (b->status) return b->status;
    const gradd_dtype_t wide = gradd_val_type(b, v)->dtype;
    const gradd_val_t scaled = gradd_scaled(b, dy, alpha_of(e->attrs));
    const gradd_val_t zero = gradd_const_scalar(b, wide, 0);
    e->out[0] = gradd_cast(b, GRADD_EMIT(b, "Where", inside(b, v, wide), scaled, zero), dtype);
    return b->status;
}

GRADD_OPS(
    hardsigmoid,
    GRADD_OP(
        "HardSigmoid", "", 6, (1, 1), (1, 1), .flags = GRADD_OP_CHEAP, .types = {GRADD_T_FLOAT},
        .attrs = GRADD_ATTR_LIST({"alpha", GRADD_ATTR_FLOAT, false},
                                 {"beta", GRADD_ATTR_FLOAT, false}),
        .infer = gradd_infer_same, .rowwise = gradd_rowwise_map, .grad = grad_hard_sigmoid,
        .expand = GRADD_EXPANSION(expand_hard_sigmoid), .ref = GRADD_REF(compute_hard_sigmoid_ref),
        .cases = GRADD_CASES({.text = "f32[3,5]"}, {.text = "f32[3,7]:(3,8)"}, {.text = "f32[]"},
                             {.text = "f32[0,2]"}, {.text = "f32[7]:(-1,1) | alpha=-0.3 beta=0.4"},
                             {.text = "f32[6]={-inf,inf,-2.5,2.5,nan,0}", .grad_tol = -1},
                             {.text = "f32[211,173]:(-2,2)"})),
    GRADD_OP("HardSigmoidGrad", "com.gradd", 1, (2, 2), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD | GRADD_OP_CHEAP,
             .types = {GRADD_T_FLOAT},
             .attrs = GRADD_ATTR_LIST({"alpha", GRADD_ATTR_FLOAT, false},
                                      {"beta", GRADD_ATTR_FLOAT, false}),
             .infer = gradd_infer_broadcast, .expand = GRADD_EXPANSION(expand_hard_sigmoid_grad),
             .ref = GRADD_REF(compute_hard_sigmoid_grad_ref),
             .cases = GRADD_CASES({.text = "f32[3,5] f32[3,5]"}, {.text = "f32[] f32[]"},
                                  {.text = "f32[5] f32[5]={0,1,-3,nan,-0.0} | alpha=-0.3"},
                                  {.text = "f32[5] f32[5]={-2.5,2.5,inf,-inf,1}"},
                                  {.text = "f32[211,173] f32[211,173]:(-4,4)"})));

GRADD_KERNELS(cpu, hardsigmoid,
              GRADD_KERNEL("HardSigmoid", "loop", .types = {GRADD_T_ANY}, .inplace = 1,
                           .compute = compute_hard_sigmoid),
              GRADD_KERNEL("HardSigmoidGrad", "loop", .rowwise = gradd_rowwise_map,
                           .types = {GRADD_T_ANY}, .inplace = 3,
                           .compute = compute_hard_sigmoid_grad));
