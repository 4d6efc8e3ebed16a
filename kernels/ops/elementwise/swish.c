/* Swish: y = x sigmoid(alpha x), elementwise; alpha 1 is SiLU, 1.702 the quick form of GELU.
 *
 * Saved for backward: x. SwishGrad(dy, x) = dy s (1 + alpha x (1 - s)) with s = sigmoid(alpha x) is
 * internal, one pass over memory. */
#include "kernels/contract/kernel.h"
#include "kernels/cpu/map.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rowwise.h"
#include "kernels/rules/rules.h"

#define COMPUTE_ALPHA(name)                                                                        \
    static gradd_status_t compute_##name(const gradd_launch_t *r) {                                \
        double alpha = gradd_attr_float(r->attrs, "alpha", 1);                                     \
        return gradd_map_rows(&name##_rows, r->out, r->in, r->n_in, &alpha, false);                \
    }                                                                                              \
    static gradd_status_t compute_##name##_ref(const gradd_launch_t *r) {                          \
        double alpha = gradd_attr_float(r->attrs, "alpha", 1);                                     \
        return gradd_map_rows(&name##_refs, r->out, r->in, r->n_in, &alpha, true);                 \
    }
GRADD_ROWS1_FLOAT(swish, E_SWISH)
GRADD_TABLE_FLOAT(swish)
COMPUTE_ALPHA(swish)
GRADD_ROWS2_FLOAT(swish_grad, E_SWISH_GRAD)
GRADD_TABLE_FLOAT(swish_grad)
COMPUTE_ALPHA(swish_grad)

static gradd_status_t grad_swish(gradd_grad_t *g) {
    gradd_val_t in[2] = {g->dout[0], g->in[0]};
    g->din[0] = gradd_emit_attrs(g->b, "SwishGrad", in, 2, g->attrs.v, g->attrs.n);
    return g->b->status;
}

static gradd_status_t expand_swish(gradd_expand_t *e) {
    gradd_builder_t *b = e->b;
    const gradd_dtype_t dtype = gradd_val_type(b, e->in[0])->dtype;
    const double alpha = gradd_attr_float(e->attrs, "alpha", 1);
    gradd_val_t x = gradd_wide(b, e->in[0]), inner = alpha == 1 ? x : gradd_scaled(b, x, alpha);
    gradd_val_t y = GRADD_EMIT(b, "Mul", x, GRADD_EMIT(b, "Sigmoid", inner));
    e->out[0] = gradd_cast(b, y, dtype);
    return b->status;
}

#define ALPHA GRADD_ATTR_LIST({"alpha", GRADD_ATTR_FLOAT, false})

GRADD_OPS(
    swish,
    GRADD_OP("Swish", "", 24, (1, 1), (1, 1), .flags = GRADD_OP_CHEAP, .types = {GRADD_T_FLOAT},
             .attrs = ALPHA, .infer = gradd_infer_same, .rowwise = gradd_rowwise_map,
             .grad = grad_swish, .expand = expand_swish, .ref = GRADD_REF(compute_swish_ref),
             .cases = GRADD_CASES({.text = "f32[3,5]"}, {.text = "f32[]"}, {.text = "f32[0,2]"},
                                  {.text = "f32[3,7]:(-8,8) | alpha=1.702"},
                                  {.text = "f32[6]={-inf,inf,0.5,-100,100,nan}", .grad_tol = -1},
                                  {.text = "f32[211,173] | alpha=-0.7"})),
    GRADD_OP("SwishGrad", "com.gradd", 1, (2, 2), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD | GRADD_OP_CHEAP,
             .types = {GRADD_T_FLOAT}, .attrs = ALPHA, .infer = gradd_infer_broadcast,
             .ref = GRADD_REF(compute_swish_grad_ref),
             .cases = GRADD_CASES({.text = "f32[3,5] f32[3,5]"}, {.text = "f32[] f32[]"},
                                  {.text = "f32[3,7] f32[3,7]:(-8,8) | alpha=1.702"},
                                  {.text = "f32[211,173] f32[211,173]"})));

GRADD_KERNELS(cpu, swish,
              GRADD_KERNEL("Swish", "loop", .types = {GRADD_T_ANY}, .inplace = 1,
                           .compute = compute_swish),
              GRADD_KERNEL("SwishGrad", "loop", .rowwise = gradd_rowwise_map,
                           .types = {GRADD_T_ANY}, .inplace = 3, .compute = compute_swish_grad));
