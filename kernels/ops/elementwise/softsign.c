/* Softsign: y = x / (1 + |x|), elementwise, any shape. An infinite x gives NaN, as the formula
 * does.
 *
 * Saved for backward: x. SoftsignGrad(dy, x) = dy / (1 + |x|)^2 is internal, one pass over memory.
 */
#include "kernels/contract/kernel.h"
#include "kernels/cpu/map.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rowwise.h"
#include "kernels/rules/rules.h"

GRADD_ROWS1_FLOAT(softsign, E_SOFTSIGN)
GRADD_TABLE_FLOAT(softsign)
GRADD_MAP_COMPUTE(softsign)
GRADD_ROWS2_FLOAT(softsign_grad, E_SOFTSIGN_GRAD)
GRADD_TABLE_FLOAT(softsign_grad)
GRADD_MAP_COMPUTE(softsign_grad)

static gradd_status_t grad_softsign(gradd_grad_t *g) {
    gradd_val_t in[2] = {g->dout[0], g->in[0]};
    g->din[0] = gradd_emit_attrs(g->b, "SoftsignGrad", in, 2, NULL, 0);
    return g->b->status;
}

static gradd_status_t expand_softsign_grad(gradd_expand_t *e) {
    gradd_builder_t *b = e->b;
    const gradd_dtype_t dtype = gradd_val_type(b, e->in[0])->dtype;
    gradd_val_t dy = gradd_wide(b, e->in[0]), x = gradd_wide(b, e->in[1]);
    gradd_val_t one = gradd_const_scalar(b, gradd_val_type(b, x)->dtype, 1);
    gradd_val_t sum = GRADD_EMIT(b, "Add", GRADD_EMIT(b, "Abs", x), one);
    gradd_val_t dx = GRADD_EMIT(b, "Div", dy, GRADD_EMIT(b, "Mul", sum, sum));
    e->out[0] = gradd_cast(b, dx, dtype);
    return b->status;
}

GRADD_OPS(softsign,
          GRADD_OP("Softsign", "", 1, (1, 1), (1, 1), .flags = GRADD_OP_CHEAP,
                   .types = {GRADD_T_FLOAT}, .infer = gradd_infer_same,
                   .rowwise = gradd_rowwise_map, .grad = grad_softsign,
                   .ref = GRADD_REF(compute_softsign_ref),
                   .cases = GRADD_CASES(
                       {.text = "f32[3,5]:(1,8)"}, {.text = "f32[3,7]:(-8,-1)"}, {.text = "f32[1]"},
                       {.text = "f32[0,2]"}, {.text = "f32[211,173]"},
                       {.text = "f32[7]={-inf,inf,0,-0.0,-1e30,100,nan}", .grad_tol = -1})),
          GRADD_OP("SoftsignGrad", "com.gradd", 1, (2, 2), (1, 1),
                   .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD | GRADD_OP_CHEAP,
                   .types = {GRADD_T_FLOAT}, .infer = gradd_infer_broadcast,
                   .expand = GRADD_EXPANSION(expand_softsign_grad),
                   .ref = GRADD_REF(compute_softsign_grad_ref),
                   .cases = GRADD_CASES({.text = "f32[3,5] f32[3,5]"}, {.text = "f32[] f32[]"},
                                        {.text = "f32[4] f32[4]={0,-0.0,1e30,-inf}"},
                                        {.text = "f32[211,173] f32[211,173]"})));

GRADD_KERNELS(cpu, softsign,
              GRADD_KERNEL("Softsign", "loop", .types = {GRADD_T_ANY}, .inplace = 1,
                           .compute = compute_softsign),
              GRADD_KERNEL("SoftsignGrad", "loop", .rowwise = gradd_rowwise_map,
                           .types = {GRADD_T_ANY}, .inplace = 3, .compute = compute_softsign_grad));
