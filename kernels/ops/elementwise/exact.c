/* com.gradd Expm1 and Log1p: exp(x) - 1 and log(1 + x), exact for small x.
 *
 * Math: elementwise, any shape. ONNX has neither, and the composition of Exp or Log and an addition
 * loses every digit of an x below 1e-7. Saved for backward: Expm1 its result, Log1p its operand. */
#include "kernels/contract/kernel.h"
#include "kernels/cpu/map.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rowwise.h"
#include "kernels/rules/rules.h"

GRADD_ROWS1_FLOAT(expm1, E_EXPM1)
GRADD_TABLE_FLOAT(expm1)
GRADD_MAP_COMPUTE(expm1)
GRADD_ROWS1_FLOAT(log1p, E_LOG1P)
GRADD_TABLE_FLOAT(log1p)
GRADD_MAP_COMPUTE(log1p)

static gradd_val_t plus_one(gradd_grad_t *g, gradd_val_t value) {
    gradd_dtype_t dtype = gradd_val_type(g->b, g->in[0])->dtype;
    return GRADD_EMIT(g->b, "Add", value, gradd_const_scalar(g->b, dtype, 1));
}

static gradd_status_t grad_expm1(gradd_grad_t *g) {
    g->din[0] = GRADD_EMIT(g->b, "Mul", g->dout[0], plus_one(g, g->output(g, 0)));
    return g->b->status;
}

static gradd_status_t grad_log1p(gradd_grad_t *g) {
    g->din[0] = GRADD_EMIT(g->b, "Div", g->dout[0], plus_one(g, g->in[0]));
    return g->b->status;
}

GRADD_OPS(
    exact,
    GRADD_OP("Expm1", "com.gradd", 1, (1, 1), (1, 1), .flags = GRADD_OP_CHEAP,
             .types = {GRADD_T_FLOAT}, .infer = gradd_infer_same, .rowwise = gradd_rowwise_map,
             .grad = grad_expm1, .ref = GRADD_REF(compute_expm1_ref),
             .cases = GRADD_CASES({.text = "f32[3,5]:(-0.9,3)"}, {.text = "f32[]:(-0.9,3)"},
                                  {.text = "f32[0,2]"}, {.text = "f32[211,173]:(-0.9,9)"},
                                  {.text = "f32[3,5]:(-1e-5,1e-5)"}, {.text = "f32[37]:(-90,88)"},
                                  {.text = "f32[7]={-inf,inf,nan,1e-22,-1e-22,88.6,-120}",
                                   .grad_tol = -1})),
    GRADD_OP("Log1p", "com.gradd", 1, (1, 1), (1, 1), .flags = GRADD_OP_CHEAP,
             .types = {GRADD_T_FLOAT}, .infer = gradd_infer_same, .rowwise = gradd_rowwise_map,
             .grad = grad_log1p, .ref = GRADD_REF(compute_log1p_ref),
             .cases = GRADD_CASES({.text = "f32[3,5]:(-0.9,3)"}, {.text = "f32[]:(-0.9,3)"},
                                  {.text = "f32[0,2]"}, {.text = "f32[211,173]:(-0.9,9)"},
                                  {.text = "f32[3,5]:(-1e-5,1e-5)"}, {.text = "f32[37]:(0,1e6)"},
                                  {.text = "f32[7]={-1,inf,nan,1e-22,-1e-22,-2,3e38}",
                                   .grad_tol = -1})));

GRADD_KERNELS(cpu, exact,
              GRADD_KERNEL("Expm1", "loop", .types = {GRADD_T_ANY}, .inplace = 1,
                           .compute = compute_expm1),
              GRADD_KERNEL("Log1p", "loop", .types = {GRADD_T_ANY}, .inplace = 1,
                           .compute = compute_log1p));
