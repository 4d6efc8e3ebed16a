/* com.gradd WithSlope: y = value, whose gradients are given.
 *
 * Math: WithSlope(value, x1, s1, x2, s2, ...) is `value`, and passes to each xk the gradient
 * dxk = dy * sk, summed to the shape of xk; nothing reaches `value` or the slopes. A boolean slope
 * is a mask: dxk = sk ? dy : 0, also where dy is not finite. Slopes broadcast with y to the shape
 * of xk, so a reduction that keeps its axes has them as well. A slope in another float type than y
 * is multiplied in its own (f32 for bf16 and f16). The capture writes functions with it whose
 * derivative at edges is defined by torch and not by the composition that computes their value.
 *
 * A view of its first operand: the slopes are computed only where a gradient wants them. The
 * gradient is not the derivative on purpose: the cases compare values only,
 * tests/python/values/test_edges.py has the gradients. */
#include "kernels/contract/kernel.h"
#include "kernels/contract/op.h"
#include "kernels/cpu/copy.h"
#include "kernels/describe/cost.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

static gradd_status_t compute_slope(const gradd_launch_t *r) {
    gradd_copy_bytes(r->out[0].data, r->in[0].data, (size_t)gradd_type_bytes(&r->out[0].type));
    return GRADD_OK;
}

static gradd_status_t infer_slope(gradd_infer_t *c) {
    const gradd_type_t *y = &c->in[0].type;
    if (c->n_in % 2 == 0) return GRADD_FAIL(GRAPH, "operand %d has no slope", c->n_in - 1);
    for (int k = 1; k < c->n_in; k += 2) {
        const gradd_type_t *x = &c->in[k].type, *s = &c->in[k + 1].type;
        gradd_type_t all = {.dtype = y->dtype};
        if (!x->dtype || !s->dtype || !gradd_dtype_is_float(x->dtype) ||
            !(gradd_dtype_is_float(s->dtype) || s->dtype == GRADD_DT_BOOL))
            return GRADD_FAIL(GRAPH, "operand %d and its slope must be floats or a mask", k);
        GRADD_TRY(gradd_broadcast(y, s, &all));
        for (int i = 1; i <= x->rank; i++)
            if (x->dims[x->rank - i] != 1 &&
                (i > all.rank || x->dims[x->rank - i] != all.dims[all.rank - i]))
                return GRADD_FAIL(GRAPH, "slope %d does not cover its operand", k);
        if (x->rank > all.rank) return GRADD_FAIL(GRAPH, "slope %d has too few axes", k);
    }
    return gradd_infer_same(c);
}

static gradd_val_t cast(gradd_builder_t *b, gradd_val_t value, gradd_dtype_t dtype) {
    gradd_attr_t to = gradd_make_int("to", dtype);
    if (b->status || gradd_val_type(b, value)->dtype == dtype) return value;
    return gradd_emit_attrs(b, "Cast", &value, 1, &to, 1);
}

static gradd_status_t grad_slope(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    for (int k = 1; k < g->n_in; k += 2) {
        if (!g->need[k]) continue;
        gradd_val_t d = g->dout[0], slope = g->in[k + 1];
        gradd_dtype_t dtype = gradd_val_type(b, slope)->dtype;
        if (dtype == GRADD_DT_BOOL) {
            gradd_val_t zero = gradd_const_scalar(b, gradd_val_type(b, d)->dtype, 0);
            d = GRADD_EMIT(b, "Where", slope, d, zero);
        } else {
            d = GRADD_EMIT(b, "Mul", cast(b, d, dtype), slope);
        }
        d = gradd_reduce_to(b, d, g->in[k]);
        g->din[k] = cast(b, d, gradd_val_type(b, g->in[k])->dtype);
    }
    return b->status;
}

GRADD_OPS(slope,
          GRADD_OP("WithSlope", "com.gradd", 1, (3, 15), (1, 1), .flags = GRADD_OP_VIEW,
                   .no_diff = 0x55555555u,
                   .types = {GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_T_FLOAT | GRADD_T_BOOL,
                             GRADD_T_FLOAT, GRADD_T_FLOAT | GRADD_T_BOOL, GRADD_T_FLOAT,
                             GRADD_T_FLOAT | GRADD_T_BOOL, GRADD_T_FLOAT | GRADD_T_BOOL},
                   .infer = infer_slope, .grad = grad_slope, .ref = GRADD_REF(compute_slope),
                   .cases = GRADD_CASES({.text = "f32[2,3] f32[2,3] f32[2,3]", .grad_tol = -1},
                                        {.text = "f32[2,1] f32[2,3] bool[2,3]", .grad_tol = -1},
                                        {.text = "f32[2,3] f32[3] f32[2,3] f32[2,1] bool[2,3]",
                                         .grad_tol = -1},
                                        {.text = "f32[] f32[] f32[]", .grad_tol = -1},
                                        {.text = "f32[0,2] f32[0,2] f32[]", .grad_tol = -1})));

GRADD_KERNELS(cpu, slope,
              GRADD_KERNEL("WithSlope", "loop", .types = {GRADD_T_ANY}, .compute = compute_slope,
                           .cost = gradd_cost_move));
