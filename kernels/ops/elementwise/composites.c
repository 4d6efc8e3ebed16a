/* Activations of ONNX that no capture of PyTorch has, but files for devices do: composites.
 *
 * Selu(x) = gamma Elu(x, alpha), Celu(x) = Elu(x / alpha) alpha, ThresholdedRelu(x) = x where it is
 * above alpha, else 0; elementwise, any shape. Mean: of operands that broadcast. Slopes are those
 * of the parts; at its threshold a ThresholdedRelu has none.
 * Source: https://onnx.ai/onnx/operators/onnx__Selu.html and its neighbours */
#include "kernels/contract/op.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rowwise.h"
#include "kernels/rules/rules.h"

static gradd_val_t elu(gradd_builder_t *b, gradd_val_t x, double alpha) {
    const gradd_attr_t attr = gradd_make_float("alpha", alpha);
    return gradd_emit_attrs(b, "Elu", &x, 1, &attr, 1);
}

static gradd_status_t finish(gradd_expand_t *e, gradd_val_t wide) {
    e->out[0] = gradd_cast(e->b, wide, gradd_val_type(e->b, e->in[0])->dtype);
    return e->b->status;
}

static gradd_status_t expand_selu(gradd_expand_t *e) {
    const double alpha = gradd_attr_float(e->attrs, "alpha", 1.67326319217681884765625);
    const double gamma = gradd_attr_float(e->attrs, "gamma", 1.05070102214813232421875);
    return finish(e, gradd_scaled(e->b, elu(e->b, gradd_wide(e->b, e->in[0]), alpha), gamma));
}

static gradd_status_t infer_celu(gradd_infer_t *c) {
    if (gradd_attr_float(c->attrs, "alpha", 1) == 0) return GRADD_FAIL(GRAPH, "alpha is 0");
    return gradd_infer_same(c);
}

static gradd_status_t expand_celu(gradd_expand_t *e) {
    gradd_builder_t *b = e->b;
    const double alpha = gradd_attr_float(e->attrs, "alpha", 1);
    const gradd_val_t x = gradd_wide(b, e->in[0]);
    if (b->status || x == GRADD_NONE) return b->status;
    const gradd_dtype_t dtype = gradd_val_type(b, x)->dtype;
    const gradd_val_t zero = gradd_const_scalar(b, dtype, 0);
    const gradd_val_t inner = GRADD_EMIT(b, "Div", x, gradd_const_scalar(b, dtype, alpha));
    const gradd_val_t curve = gradd_scaled(b, elu(b, inner, 1), alpha);
    return finish(e, GRADD_EMIT(b, "Where", GRADD_EMIT(b, "Greater", x, zero), x, curve));
}

static gradd_status_t expand_thresholded(gradd_expand_t *e) {
    gradd_builder_t *b = e->b;
    const double alpha = gradd_attr_float(e->attrs, "alpha", 1);
    const gradd_val_t x = gradd_wide(b, e->in[0]);
    if (b->status || x == GRADD_NONE) return b->status;
    const gradd_dtype_t dtype = gradd_val_type(b, x)->dtype;
    const gradd_val_t above = GRADD_EMIT(b, "Greater", x, gradd_const_scalar(b, dtype, alpha));
    return finish(e, GRADD_EMIT(b, "Where", above, x, gradd_const_scalar(b, dtype, 0)));
}

static gradd_status_t expand_mean(gradd_expand_t *e) {
    gradd_builder_t *b = e->b;
    gradd_val_t in[GRADD_OP_MAX_IN];
    for (int i = 0; i < e->n_in; i++)
        in[i] = gradd_wide(b, e->in[i]);
    const gradd_val_t sum = gradd_emit_n(b, "Sum", e->n_in, in);
    if (b->status || sum == GRADD_NONE) return b->status;
    const gradd_val_t n = gradd_const_scalar(b, gradd_val_type(b, sum)->dtype, e->n_in);
    return finish(e, GRADD_EMIT(b, "Div", sum, n));
}

#define ALPHA {"alpha", GRADD_ATTR_FLOAT, false}

GRADD_OPS(composites,
          GRADD_OP("Selu", "", 6, (1, 1), (1, 1), .flags = GRADD_OP_CHEAP, .types = {GRADD_T_FLOAT},
                   .attrs = GRADD_ATTR_LIST(ALPHA, {"gamma", GRADD_ATTR_FLOAT, false}),
                   .infer = gradd_infer_same, .rowwise = gradd_rowwise_map, .expand = expand_selu,
                   .cases = GRADD_CASES({.text = "f32[3,5]"}, {.text = "f32[0,2]"},
                                        {.text = "f32[3,7]:(-8,8) | alpha=0.5 gamma=2.5"},
                                        {.text = "f32[5]={-inf,inf,-100,nan,0}", .grad_tol = -1})),
          GRADD_OP("Celu", "", 12, (1, 1), (1, 1), .flags = GRADD_OP_CHEAP,
                   .types = {GRADD_T_FLOAT}, .attrs = GRADD_ATTR_LIST(ALPHA), .infer = infer_celu,
                   .rowwise = gradd_rowwise_map, .expand = expand_celu,
                   .cases = GRADD_CASES({.text = "f32[3,5]"}, {.text = "f32[]"},
                                        {.text = "f32[3,7]:(-8,8) | alpha=0.5"},
                                        {.text = "f32[5]={-inf,inf,-100,nan,0}", .grad_tol = -1})),
          GRADD_OP("ThresholdedRelu", "", 10, (1, 1), (1, 1), .flags = GRADD_OP_CHEAP,
                   .types = {GRADD_T_FLOAT}, .attrs = GRADD_ATTR_LIST(ALPHA),
                   .infer = gradd_infer_same, .rowwise = gradd_rowwise_map,
                   .expand = expand_thresholded,
                   .cases = GRADD_CASES({.text = "f32[3,5]:(-3,3)"}, {.text = "f32[]"},
                                        {.text = "f32[3,7] | alpha=-0.25"},
                                        {.text = "f32[4]={1,inf,-inf,nan}", .grad_tol = -1})),
          GRADD_OP("Mean", "", 8, (1, GRADD_OP_MAX_IN), (1, 1), .flags = GRADD_OP_CHEAP,
                   .types = {GRADD_T_FLOAT}, .infer = gradd_infer_broadcast, .expand = expand_mean,
                   .cases = GRADD_CASES({.text = "f32[3,5]"}, {.text = "f32[3,5] f32[5] f32[3,1]"},
                                        {.text = "f32[2,3] f32[2,3]"})));
