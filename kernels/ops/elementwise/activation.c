/* Activations and their gradients.
 *
 * Math: y = f(x) elementwise, any shape. Saved for backward: y for Relu, Sigmoid, Tanh, and Elu but
 * of halves, where y is -1 all too soon; x for the others. Each gradient is an internal operator
 * <Name>Grad(dy, saved), one pass over memory.
 * At the kink of Relu, LeakyRelu, PRelu the slope is that of the left side; at a NaN Relu passes
 * the gradient, Elu and HardSwish give NaN, as in torch. Elu knows its side by the sign of y: where
 * alpha is negative, the capture writes it with WithSlope. */
#include "kernels/contract/kernel.h"
#include "kernels/cpu/map.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rowwise.h"
#include "kernels/rules/rules.h"

#include <string.h>

/* ---- kernels --------------------------------------------------------------------------------- */

#define UNARY(name, E)  GRADD_ROWS1_FLOAT(name, E) GRADD_TABLE_FLOAT(name) GRADD_MAP_COMPUTE(name)
#define BINARY(name, E) GRADD_ROWS2_FLOAT(name, E) GRADD_TABLE_FLOAT(name) GRADD_MAP_COMPUTE(name)
/* with the parameter alpha */
#define COMPUTE_ALPHA(name, otherwise)                                                             \
    static gradd_status_t compute_##name(const gradd_launch_t *r) {                                \
        double alpha = gradd_attr_float(r->attrs, "alpha", otherwise);                             \
        return gradd_map_rows(&name##_rows, r->out, r->in, r->n_in, &alpha, false);                \
    }                                                                                              \
    static gradd_status_t compute_##name##_ref(const gradd_launch_t *r) {                          \
        double alpha = gradd_attr_float(r->attrs, "alpha", otherwise);                             \
        return gradd_map_rows(&name##_refs, r->out, r->in, r->n_in, &alpha, true);                 \
    }
/* one of two by the attribute approximate */
#define COMPUTE_APPROXIMATE(name)                                                                  \
    static gradd_status_t compute_##name(const gradd_launch_t *r) {                                \
        const gradd_row_functions_t *rows =                                                        \
            by_tanh(r->attrs) ? &name##_tanh_rows : &name##_erf_rows;                              \
        return gradd_map_rows(rows, r->out, r->in, r->n_in, NULL, false);                          \
    }                                                                                              \
    static gradd_status_t compute_##name##_ref(const gradd_launch_t *r) {                          \
        const gradd_row_functions_t *rows =                                                        \
            by_tanh(r->attrs) ? &name##_tanh_refs : &name##_erf_refs;                              \
        return gradd_map_rows(rows, r->out, r->in, r->n_in, NULL, true);                           \
    }

UNARY(relu, E_RELU)
BINARY(relu_grad, E_RELU_GRAD)
UNARY(sigmoid, E_SIGMOID)
BINARY(sigmoid_grad, E_SIGMOID_GRAD)
UNARY(tanh, E_TANH)
BINARY(tanh_grad, E_TANH_GRAD)
UNARY(softplus, E_SOFTPLUS)
UNARY(hardswish, E_HARDSWISH)
BINARY(hardswish_grad, E_HARDSWISH_GRAD)
UNARY(mish, E_MISH)
BINARY(mish_grad, E_MISH_GRAD)

GRADD_ROWS1_FLOAT(leaky, E_LEAKY)
GRADD_TABLE_FLOAT(leaky)
COMPUTE_ALPHA(leaky, 0.01)
GRADD_ROWS2_FLOAT(leaky_grad, E_LEAKY_GRAD)
GRADD_TABLE_FLOAT(leaky_grad)
COMPUTE_ALPHA(leaky_grad, 0.01)
GRADD_ROWS1_FLOAT(elu, E_ELU)
GRADD_TABLE_FLOAT(elu)
COMPUTE_ALPHA(elu, 1)
GRADD_ROWS2_FLOAT(elu_grad, E_ELU_GRAD)
GRADD_TABLE_FLOAT(elu_grad)
COMPUTE_ALPHA(elu_grad, 1)
GRADD_ROWS2_FLOAT(elu_input_grad, E_ELU_INPUT_GRAD)
GRADD_TABLE_FLOAT(elu_input_grad)
COMPUTE_ALPHA(elu_input_grad, 1)

static bool by_tanh(gradd_attrs_t attrs) {
    return !strcmp(gradd_attr_string(attrs, "approximate", "none"), "tanh");
}
GRADD_ROWS1_FLOAT(gelu_erf, E_GELU)
GRADD_TABLE_FLOAT(gelu_erf)
GRADD_ROWS1_FLOAT(gelu_tanh, E_GELU_TANH)
GRADD_TABLE_FLOAT(gelu_tanh)
COMPUTE_APPROXIMATE(gelu)
GRADD_ROWS2_FLOAT(gelu_grad_erf, E_GELU_GRAD)
GRADD_TABLE_FLOAT(gelu_grad_erf)
GRADD_ROWS2_FLOAT(gelu_grad_tanh, E_GELU_TANH_GRAD)
GRADD_TABLE_FLOAT(gelu_grad_tanh)
COMPUTE_APPROXIMATE(gelu_grad)

BINARY(prelu, E_PRELU)

/* ---- shape rules ---------------------------------------------------------------------------- */

static gradd_status_t infer_gelu(gradd_infer_t *c) {
    const char *kind = gradd_attr_string(c->attrs, "approximate", "none");
    if (strcmp(kind, "none") && strcmp(kind, "tanh"))
        return GRADD_FAIL(GRAPH, "approximate=\"%s\" is not defined", kind);
    return gradd_infer_same(c);
}

static gradd_status_t infer_prelu(gradd_infer_t *c) {
    GRADD_TRY(gradd_infer_broadcast(c));
    if (!gradd_type_equal(&c->out[0], &c->in[0].type))
        return GRADD_FAIL(GRAPH, "slope does not broadcast to the input");
    return GRADD_OK;
}

/* ---- gradient rules ------------------------------------------------------------------------- */

/* <op>(dy, saved) with the attributes of the forward node */
static gradd_status_t grad_by(gradd_grad_t *g, const char *op, bool from_result) {
    gradd_val_t in[2] = {g->dout[0], from_result ? g->output(g, 0) : g->in[0]};
    g->din[0] = gradd_emit_attrs(g->b, op, in, 2, g->attrs.v, g->attrs.n);
    return g->b->status;
}
#define GRAD_BY(name, op, from_result)                                                             \
    static gradd_status_t grad_##name(gradd_grad_t *g) {                                           \
        return grad_by(g, op, from_result);                                                        \
    }
GRAD_BY(relu, "ReluGrad", true)
GRAD_BY(leaky, "LeakyReluGrad", false)
GRAD_BY(sigmoid, "SigmoidGrad", true)
GRAD_BY(tanh, "TanhGrad", true)
GRAD_BY(gelu, "GeluGrad", false)
GRAD_BY(hardswish, "HardSwishGrad", false)
GRAD_BY(mish, "MishGrad", false)

static gradd_status_t grad_elu(gradd_grad_t *g) {
    const bool half = gradd_dtype_is_half(gradd_val_type(g->b, g->in[0])->dtype);
    return half ? grad_by(g, "EluInputGrad", false) : grad_by(g, "EluGrad", true);
}

static gradd_status_t grad_softplus(gradd_grad_t *g) {
    g->din[0] = GRADD_EMIT(g->b, "Mul", g->dout[0], GRADD_EMIT(g->b, "Sigmoid", g->in[0]));
    return g->b->status;
}

static gradd_status_t grad_prelu(gradd_grad_t *g) {
    gradd_val_t zero = gradd_const_scalar(g->b, gradd_val_type(g->b, g->in[0])->dtype, 0);
    gradd_val_t positive = GRADD_EMIT(g->b, "Greater", g->in[0], zero);
    if (g->need[0])
        g->din[0] = GRADD_EMIT(g->b, "Where", positive, g->dout[0],
                               GRADD_EMIT(g->b, "Mul", g->dout[0], g->in[1]));
    if (g->need[1]) {
        gradd_val_t d = GRADD_EMIT(g->b, "Mul", g->dout[0], g->in[0]);
        g->din[1] = gradd_reduce_to(g->b, GRADD_EMIT(g->b, "Where", positive, zero, d), g->in[1]);
    }
    return g->b->status;
}

/* ---- expansion ------------------------------------------------------------------------------ */

/* x / 2 (1 + t), with t = erf(x / sqrt 2), or tanh of a cubic polynomial */
static gradd_status_t expand_gelu(gradd_expand_t *e) {
    gradd_builder_t *b = e->b;
    const gradd_dtype_t dtype = gradd_val_type(b, e->in[0])->dtype;
    gradd_val_t x = gradd_wide(b, e->in[0]), t;
    if (by_tanh(e->attrs)) {
        gradd_val_t cube = GRADD_EMIT(b, "Mul", GRADD_EMIT(b, "Mul", x, x), x);
        gradd_val_t sum = GRADD_EMIT(b, "Add", x, gradd_scaled(b, cube, 0.044715));
        t = GRADD_EMIT(b, "Tanh", gradd_scaled(b, sum, 0.79788456080286536));
    } else {
        t = GRADD_EMIT(b, "Erf", gradd_scaled(b, x, 0.70710678118654752));
    }
    gradd_val_t one = gradd_const_scalar(b, gradd_val_type(b, x)->dtype, 1);
    gradd_val_t y = GRADD_EMIT(b, "Mul", gradd_scaled(b, x, 0.5), GRADD_EMIT(b, "Add", t, one));
    e->out[0] = gradd_cast(b, y, dtype);
    return b->status;
}

/* The gradients in simpler operators, in f32 where dy is a half; v is what was saved. */
typedef gradd_val_t (*back_fn)(gradd_builder_t *b, gradd_val_t dy, gradd_val_t v, double alpha);

static gradd_status_t expand_by(gradd_expand_t *e, back_fn back, double alpha) {
    const gradd_dtype_t dtype = gradd_val_type(e->b, e->in[0])->dtype;
    alpha = gradd_attr_float(e->attrs, "alpha", alpha);
    gradd_val_t d = back(e->b, gradd_wide(e->b, e->in[0]), gradd_wide(e->b, e->in[1]), alpha);
    e->out[0] = gradd_cast(e->b, d, dtype);
    return e->b->status;
}

static gradd_val_t number(gradd_builder_t *b, gradd_val_t like, double value) {
    return gradd_const_scalar(b, gradd_val_type(b, like)->dtype, value);
}

static gradd_val_t is_positive(gradd_builder_t *b, gradd_val_t v) {
    return GRADD_EMIT(b, "Greater", v, number(b, v, 0));
}

static gradd_val_t times(gradd_builder_t *b, gradd_val_t a, gradd_val_t c) {
    return GRADD_EMIT(b, "Mul", a, c);
}

static gradd_val_t one_less(gradd_builder_t *b, gradd_val_t v) {
    return GRADD_EMIT(b, "Sub", number(b, v, 1), v);
}

static gradd_val_t back_relu(gradd_builder_t *b, gradd_val_t dy, gradd_val_t y, double alpha) {
    (void)alpha;
    gradd_val_t zero = number(b, y, 0);
    return GRADD_EMIT(b, "Where", GRADD_EMIT(b, "LessOrEqual", y, zero), zero, dy);
}

static gradd_val_t back_leaky(gradd_builder_t *b, gradd_val_t dy, gradd_val_t x, double alpha) {
    return GRADD_EMIT(b, "Where", is_positive(b, x), dy, gradd_scaled(b, dy, alpha));
}

static gradd_val_t back_sigmoid(gradd_builder_t *b, gradd_val_t dy, gradd_val_t y, double alpha) {
    (void)alpha;
    return times(b, times(b, dy, y), one_less(b, y));
}

static gradd_val_t back_tanh(gradd_builder_t *b, gradd_val_t dy, gradd_val_t y, double alpha) {
    (void)alpha;
    return times(b, dy, one_less(b, times(b, y, y)));
}

static gradd_val_t back_elu(gradd_builder_t *b, gradd_val_t dy, gradd_val_t y, double alpha) {
    gradd_val_t slope = GRADD_EMIT(b, "Add", y, number(b, y, alpha));
    return GRADD_EMIT(b, "Where", is_positive(b, y), dy, times(b, dy, slope));
}

static gradd_val_t back_elu_input(gradd_builder_t *b, gradd_val_t dy, gradd_val_t x, double alpha) {
    gradd_val_t slope = gradd_scaled(b, GRADD_EMIT(b, "Exp", x), alpha);
    return GRADD_EMIT(b, "Where", is_positive(b, x), dy, times(b, dy, slope));
}

static gradd_val_t back_hardswish(gradd_builder_t *b, gradd_val_t dy, gradd_val_t x, double alpha) {
    (void)alpha;
    gradd_val_t third = GRADD_EMIT(b, "Div", x, number(b, x, 3));
    gradd_val_t d = times(b, dy, GRADD_EMIT(b, "Add", third, number(b, x, 0.5)));
    d = GRADD_EMIT(b, "Where", GRADD_EMIT(b, "GreaterOrEqual", x, number(b, x, 3)), dy, d);
    gradd_val_t left = GRADD_EMIT(b, "LessOrEqual", x, number(b, x, -3));
    return GRADD_EMIT(b, "Where", left, number(b, x, 0), d);
}

static gradd_val_t back_mish(gradd_builder_t *b, gradd_val_t dy, gradd_val_t x, double alpha) {
    (void)alpha;
    gradd_val_t t = GRADD_EMIT(b, "Tanh", GRADD_EMIT(b, "Softplus", x));
    gradd_val_t slope =
        times(b, times(b, x, GRADD_EMIT(b, "Sigmoid", x)), one_less(b, times(b, t, t)));
    return times(b, dy, GRADD_EMIT(b, "Add", t, slope));
}

#define EXPAND_BY(name, alpha)                                                                     \
    static gradd_status_t expand_##name##_grad(gradd_expand_t *e) {                                \
        return expand_by(e, back_##name, alpha);                                                   \
    }
EXPAND_BY(relu, 0)
EXPAND_BY(leaky, 0.01)
EXPAND_BY(sigmoid, 0)
EXPAND_BY(tanh, 0)
EXPAND_BY(elu, 1)
EXPAND_BY(elu_input, 1)
EXPAND_BY(hardswish, 0)
EXPAND_BY(mish, 0)

/* ---- cases and rows ------------------------------------------------------------------------- */

#define ALPHA       GRADD_ATTR_LIST({"alpha", GRADD_ATTR_FLOAT, false})
#define APPROXIMATE GRADD_ATTR_LIST({"approximate", GRADD_ATTR_STRING, false})
#define CASES                                                                                      \
    {.text = "f32[3,5]"}, {.text = "f32[]"}, {.text = "f32[0,2]"}, {.text = "f32[3,7]:(-8,8)"},    \
        {.text = "f32[6]={-inf,inf,0.5,-100,100,nan}", .grad_tol = -1}, {.text = "f32[211,173]"}
#define CASES_BACK                                                                                 \
    {.text = "f32[3,5] f32[3,5]"}, {.text = "f32[] f32[]"}, {.text = "f32[3,7] f32[3,7]:(-8,8)"},  \
        {.text = "f32[211,173] f32[211,173]"}

#define PLAIN_CASE {.text = "f32[1]"}
#define PLAIN_PAIR {.text = "f32[1] f32[1]"}

GRADD_OPS(
    activation,
    GRADD_OP("Relu", "", 6, (1, 1), (1, 1), .flags = GRADD_OP_CHEAP, .types = {GRADD_T_FLOAT},
             .infer = gradd_infer_same, .rowwise = gradd_rowwise_map, .grad = grad_relu,
             .ref = GRADD_REF(compute_relu_ref), .cases = GRADD_CASES(CASES, PLAIN_CASE)),
    GRADD_OP("LeakyRelu", "", 6, (1, 1), (1, 1), .flags = GRADD_OP_CHEAP, .types = {GRADD_T_FLOAT},
             .attrs = ALPHA, .infer = gradd_infer_same, .rowwise = gradd_rowwise_map,
             .grad = grad_leaky, .ref = GRADD_REF(compute_leaky_ref),
             .cases = GRADD_CASES(CASES, {.text = "f32[3,5] | alpha=0.2"})),
    GRADD_OP("Sigmoid", "", 6, (1, 1), (1, 1), .flags = GRADD_OP_CHEAP, .types = {GRADD_T_FLOAT},
             .infer = gradd_infer_same, .rowwise = gradd_rowwise_map, .grad = grad_sigmoid,
             .ref = GRADD_REF(compute_sigmoid_ref), .cases = GRADD_CASES(CASES, PLAIN_CASE)),
    GRADD_OP("Tanh", "", 6, (1, 1), (1, 1), .flags = GRADD_OP_CHEAP, .types = {GRADD_T_FLOAT},
             .infer = gradd_infer_same, .rowwise = gradd_rowwise_map, .grad = grad_tanh,
             .ref = GRADD_REF(compute_tanh_ref), .cases = GRADD_CASES(CASES, PLAIN_CASE)),
    GRADD_OP("Elu", "", 6, (1, 1), (1, 1), .flags = GRADD_OP_CHEAP, .types = {GRADD_T_FLOAT},
             .attrs = ALPHA, .infer = gradd_infer_same, .rowwise = gradd_rowwise_map,
             .grad = grad_elu, .ref = GRADD_REF(compute_elu_ref),
             .cases = GRADD_CASES(CASES, {.text = "f32[3,5] | alpha=0.7"})),
    GRADD_OP("Gelu", "", 20, (1, 1), (1, 1), .flags = GRADD_OP_CHEAP, .types = {GRADD_T_FLOAT},
             .attrs = APPROXIMATE, .infer = infer_gelu, .rowwise = gradd_rowwise_map,
             .grad = grad_gelu, .expand = expand_gelu, .ref = GRADD_REF(compute_gelu_ref),
             .cases = GRADD_CASES(CASES, {.text = "f32[3,5]:(-6,6) | approximate=\"tanh\""},
                                  {.text = "f32[3,5] | approximate=\"none\""},
                                  {.text = "f32[211,173] | approximate=\"tanh\""})),
    GRADD_OP("Softplus", "", 1, (1, 1), (1, 1), .flags = GRADD_OP_CHEAP, .types = {GRADD_T_FLOAT},
             .infer = gradd_infer_same, .rowwise = gradd_rowwise_map, .grad = grad_softplus,
             .ref = GRADD_REF(compute_softplus_ref),
             .cases = GRADD_CASES(CASES, {.text = "f32[3,5]:(-40,40)", .tol = 1e-6})),
    GRADD_OP("HardSwish", "", 14, (1, 1), (1, 1), .flags = GRADD_OP_CHEAP, .types = {GRADD_T_FLOAT},
             .infer = gradd_infer_same, .rowwise = gradd_rowwise_map, .grad = grad_hardswish,
             .ref = GRADD_REF(compute_hardswish_ref), .cases = GRADD_CASES(CASES, PLAIN_CASE)),
    GRADD_OP("Mish", "", 18, (1, 1), (1, 1), .flags = GRADD_OP_CHEAP, .types = {GRADD_T_FLOAT},
             .infer = gradd_infer_same, .rowwise = gradd_rowwise_map, .grad = grad_mish,
             .ref = GRADD_REF(compute_mish_ref),
             .cases = GRADD_CASES(CASES, {.text = "f32[3,5]:(-40,40)"})),
    GRADD_OP("PRelu", "", 7, (2, 2), (1, 1), .flags = GRADD_OP_CHEAP, .types = {GRADD_T_FLOAT},
             .infer = infer_prelu, .rowwise = gradd_rowwise_map, .grad = grad_prelu,
             .ref = GRADD_REF(compute_prelu_ref),
             .cases = GRADD_CASES({.text = "f32[2,3,4] f32[3,1]"}, {.text = "f32[5] f32[1]"},
                                  {.text = "f32[2,3] f32[2,3]"})),
    GRADD_OP("ReluGrad", "com.gradd", 1, (2, 2), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD | GRADD_OP_CHEAP,
             .types = {GRADD_T_FLOAT}, .infer = gradd_infer_broadcast,
             .expand = GRADD_EXPANSION(expand_relu_grad), .ref = GRADD_REF(compute_relu_grad_ref),
             .cases = GRADD_CASES(CASES_BACK, {.text = "f32[4] f32[4]={0,-0.0,1,-1}"})),
    GRADD_OP("LeakyReluGrad", "com.gradd", 1, (2, 2), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD | GRADD_OP_CHEAP,
             .types = {GRADD_T_FLOAT}, .attrs = ALPHA, .infer = gradd_infer_broadcast,
             .expand = GRADD_EXPANSION(expand_leaky_grad), .ref = GRADD_REF(compute_leaky_grad_ref),
             .cases = GRADD_CASES(CASES_BACK, {.text = "f32[4] f32[4] | alpha=0.2"})),
    GRADD_OP("SigmoidGrad", "com.gradd", 1, (2, 2), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD | GRADD_OP_CHEAP,
             .types = {GRADD_T_FLOAT}, .infer = gradd_infer_broadcast,
             .expand = GRADD_EXPANSION(expand_sigmoid_grad),
             .ref = GRADD_REF(compute_sigmoid_grad_ref),
             .cases = GRADD_CASES(CASES_BACK, PLAIN_PAIR)),
    GRADD_OP("TanhGrad", "com.gradd", 1, (2, 2), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD | GRADD_OP_CHEAP,
             .types = {GRADD_T_FLOAT}, .infer = gradd_infer_broadcast,
             .expand = GRADD_EXPANSION(expand_tanh_grad), .ref = GRADD_REF(compute_tanh_grad_ref),
             .cases = GRADD_CASES(CASES_BACK, PLAIN_PAIR)),
    GRADD_OP("EluGrad", "com.gradd", 1, (2, 2), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD | GRADD_OP_CHEAP,
             .types = {GRADD_T_FLOAT}, .attrs = ALPHA, .infer = gradd_infer_broadcast,
             .expand = GRADD_EXPANSION(expand_elu_grad), .ref = GRADD_REF(compute_elu_grad_ref),
             .cases = GRADD_CASES(CASES_BACK, {.text = "f32[4] f32[4] | alpha=0.7"})),
    GRADD_OP("EluInputGrad", "com.gradd", 1, (2, 2), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD | GRADD_OP_CHEAP,
             .types = {GRADD_T_FLOAT}, .attrs = ALPHA, .infer = gradd_infer_broadcast,
             .expand = GRADD_EXPANSION(expand_elu_input_grad),
             .ref = GRADD_REF(compute_elu_input_grad_ref),
             .cases = GRADD_CASES(CASES_BACK, {.text = "f32[4] f32[4] | alpha=0.7"})),
    GRADD_OP("GeluGrad", "com.gradd", 1, (2, 2), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD | GRADD_OP_CHEAP,
             .types = {GRADD_T_FLOAT}, .attrs = APPROXIMATE, .infer = gradd_infer_broadcast,
             .ref = GRADD_REF(compute_gelu_grad_ref),
             .cases = GRADD_CASES(CASES_BACK,
                                  {.text = "f32[3,5] f32[3,5] | approximate=\"tanh\""})),
    GRADD_OP("HardSwishGrad", "com.gradd", 1, (2, 2), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD | GRADD_OP_CHEAP,
             .types = {GRADD_T_FLOAT}, .infer = gradd_infer_broadcast,
             .expand = GRADD_EXPANSION(expand_hardswish_grad),
             .ref = GRADD_REF(compute_hardswish_grad_ref),
             .cases = GRADD_CASES(CASES_BACK, PLAIN_PAIR)),
    GRADD_OP("MishGrad", "com.gradd", 1, (2, 2), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD | GRADD_OP_CHEAP,
             .types = {GRADD_T_FLOAT}, .infer = gradd_infer_broadcast,
             .expand = GRADD_EXPANSION(expand_mish_grad), .ref = GRADD_REF(compute_mish_grad_ref),
             .cases = GRADD_CASES(CASES_BACK, PLAIN_PAIR)));

GRADD_KERNELS(
    cpu, activation,
    GRADD_KERNEL("Relu", "loop", .types = {GRADD_T_ANY}, .inplace = 1, .compute = compute_relu),
    GRADD_KERNEL("LeakyRelu", "loop", .types = {GRADD_T_ANY}, .inplace = 1,
                 .compute = compute_leaky),
    GRADD_KERNEL("Sigmoid", "loop", .types = {GRADD_T_ANY}, .inplace = 1,
                 .compute = compute_sigmoid),
    GRADD_KERNEL("Tanh", "loop", .types = {GRADD_T_ANY}, .inplace = 1, .compute = compute_tanh),
    GRADD_KERNEL("Elu", "loop", .types = {GRADD_T_ANY}, .inplace = 1, .compute = compute_elu),
    GRADD_KERNEL("Gelu", "loop", .types = {GRADD_T_ANY}, .inplace = 1, .compute = compute_gelu),
    GRADD_KERNEL("Softplus", "loop", .types = {GRADD_T_ANY}, .inplace = 1,
                 .compute = compute_softplus),
    GRADD_KERNEL("HardSwish", "loop", .types = {GRADD_T_ANY}, .inplace = 1,
                 .compute = compute_hardswish),
    GRADD_KERNEL("Mish", "loop", .types = {GRADD_T_ANY}, .inplace = 1, .compute = compute_mish),
    GRADD_KERNEL("PRelu", "loop", .types = {GRADD_T_ANY}, .inplace = 1, .compute = compute_prelu),
    GRADD_KERNEL("ReluGrad", "loop", .rowwise = gradd_rowwise_map, .types = {GRADD_T_ANY},
                 .inplace = 3, .compute = compute_relu_grad),
    GRADD_KERNEL("LeakyReluGrad", "loop", .rowwise = gradd_rowwise_map, .types = {GRADD_T_ANY},
                 .inplace = 3, .compute = compute_leaky_grad),
    GRADD_KERNEL("SigmoidGrad", "loop", .rowwise = gradd_rowwise_map, .types = {GRADD_T_ANY},
                 .inplace = 3, .compute = compute_sigmoid_grad),
    GRADD_KERNEL("TanhGrad", "loop", .rowwise = gradd_rowwise_map, .types = {GRADD_T_ANY},
                 .inplace = 3, .compute = compute_tanh_grad),
    GRADD_KERNEL("EluGrad", "loop", .rowwise = gradd_rowwise_map, .types = {GRADD_T_ANY},
                 .inplace = 3, .compute = compute_elu_grad),
    GRADD_KERNEL("EluInputGrad", "loop", .rowwise = gradd_rowwise_map, .types = {GRADD_T_ANY},
                 .inplace = 3, .compute = compute_elu_input_grad),
    GRADD_KERNEL("GeluGrad", "loop", .rowwise = gradd_rowwise_map, .types = {GRADD_T_ANY},
                 .inplace = 3, .compute = compute_gelu_grad),
    GRADD_KERNEL("HardSwishGrad", "loop", .rowwise = gradd_rowwise_map, .types = {GRADD_T_ANY},
                 .inplace = 3, .compute = compute_hardswish_grad),
    GRADD_KERNEL("MishGrad", "loop", .rowwise = gradd_rowwise_map, .types = {GRADD_T_ANY},
                 .inplace = 3, .compute = compute_mish_grad));
