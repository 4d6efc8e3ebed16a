/* com.gradd LogCumSumExp: the logarithm of the running sum of exponentials along one axis.
 *
 * Math: y_i = log(sum of exp(x_j) for j <= i), as a running maximum and a sum relative to it, in
 * double: nothing overflows. Shapes: [outer, n, inner]. Saved for backward: x and y.
 *
 * dx_j = exp(x_j - y_j) h_j with h_j = sum of dy_i exp(y_j - y_i) for i >= j, and so
 * h_j = dy_j + exp(y_j - y_{j+1}) h_{j+1}: y never falls, so no factor is above one. */
#include "kernels/contract/kernel.h"
#include "kernels/describe/dispatch.h"
#include "kernels/describe/lanes.h"
#include "kernels/math/formulas.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

static gradd_status_t compute_forward(const gradd_launch_t *r) {
    gradd_lanes_t l;
    GRADD_TRY(gradd_lanes_of_axis(&r->in[0].type, r->attrs, 0, &l));
    const bool many = l.outer * l.n * l.inner >= GRADD_PARALLEL_MIN;
    GRADD_SWITCH_FLOAT(r->in[0].type.dtype, T, {
        const T *x = r->in[0].data;
        T *y = r->out[0].data;
        _Pragma("omp parallel for schedule(static) if (many)") for (int64_t lane = 0;
                                                                    lane < l.outer * l.inner;
                                                                    lane++) {
            const int64_t base = lane / l.inner * l.n * l.inner + lane % l.inner;
            double sum = -INFINITY;
            for (int64_t i = 0; i < l.n; i++) {
                sum = gradd_log_add(sum, (double)x[base + i * l.inner]);
                y[base + i * l.inner] = (T)sum;
            }
        }
    });
    return GRADD_OK;
}

static gradd_status_t compute_backward(const gradd_launch_t *r) {
    gradd_lanes_t l;
    GRADD_TRY(gradd_lanes_of_axis(&r->in[0].type, r->attrs, 0, &l));
    const bool many = l.outer * l.n * l.inner >= GRADD_PARALLEL_MIN;
    GRADD_SWITCH_FLOAT(r->in[0].type.dtype, T, {
        const T *dy = r->in[0].data, *x = r->in[1].data, *y = r->in[2].data;
        T *dx = r->out[0].data;
        _Pragma("omp parallel for schedule(static) if (many)") for (int64_t lane = 0;
                                                                    lane < l.outer * l.inner;
                                                                    lane++) {
            const int64_t base = lane / l.inner * l.n * l.inner + lane % l.inner;
            double h = 0;
            for (int64_t i = l.n - 1; i >= 0; i--) {
                const int64_t at = base + i * l.inner;
                if (i + 1 < l.n) h *= gradd_log_share((double)y[at], (double)y[at + l.inner]);
                h += (double)dy[at];
                dx[at] = (T)(exp((double)x[at] - (double)y[at]) * h);
            }
        }
    });
    return GRADD_OK;
}

static gradd_status_t infer_lanes(gradd_infer_t *c) {
    gradd_lanes_t l;
    if (!c->in[0].type.rank) return GRADD_FAIL(GRAPH, "a scalar has no axis");
    for (int i = 1; i < c->n_in; i++)
        if (!gradd_type_equal(&c->in[0].type, &c->in[i].type))
            return GRADD_FAIL(GRAPH, "operands must be of one type");
    GRADD_TRY(gradd_lanes_of_axis(&c->in[0].type, c->attrs, 0, &l));
    return gradd_infer_same(c);
}

static gradd_status_t grad_forward(gradd_grad_t *g) {
    gradd_val_t in[3] = {g->dout[0], g->in[0], g->output(g, 0)};
    g->din[0] = gradd_emit_attrs(g->b, "LogCumSumExpGrad", in, 3, g->attrs.v, g->attrs.n);
    return g->b->status;
}

#define AXIS GRADD_ATTR_LIST({"axis", GRADD_ATTR_INT, true})

GRADD_OPS(
    logcumsumexp,
    GRADD_OP(
        "LogCumSumExp", "com.gradd", 1, (1, 1), (1, 1), .types = {GRADD_T_FLOAT}, .attrs = AXIS,
        .infer = infer_lanes, .grad = grad_forward, .ref = GRADD_REF(compute_forward),
        .cases = GRADD_CASES({.text = "f32[2,3,4] | axis=1"}, {.text = "f32[5] | axis=-1"},
                             {.text = "f32[3,0] | axis=1"}, {.text = "f32[3,7]:(-30,30) | axis=1"},
                             {.text = "f32[6]={-inf,1e5,-1e5,inf,nan,1} | axis=0", .grad_tol = -1},
                             {.text = "f32[211,173] | axis=0", .grad_tol = 1e-4},
                             {.text = "f32[3,2500] | axis=1", .grad_tol = -1},
                             {.text = "f32[2,300]:(-300,80) | axis=1", .grad_tol = -1})),
    GRADD_OP("LogCumSumExpGrad", "com.gradd", 1, (3, 3), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD, .types = {GRADD_T_FLOAT}, .attrs = AXIS,
             .infer = infer_lanes, .ref = GRADD_REF(compute_backward),
             .cases = GRADD_CASES(
                 {.text = "f32[2,3] f32[2,3] f32[2,3] | axis=1"},
                 {.text = "f32[2,0] f32[2,0] f32[2,0] | axis=1"},
                 {.text = "f32[4]={1,2,3,4} f32[4]={-inf,1,0,inf} f32[4]={-inf,1,2,inf} | axis=0"},
                 {.text = "f32[2,70] f32[2,70]:(0,1) f32[2,70]={1} | axis=1"},
                 {.text = "f32[2,1500] f32[2,1500]:(0,1) f32[2,1500]={1.5} | axis=1"},
                 {.text = "f32[9,200] f32[9,200]:(0,1) f32[9,200]={2} | axis=0"})));

GRADD_KERNELS(cpu, logcumsumexp,
              GRADD_KERNEL("LogCumSumExp", "loop", .types = {GRADD_T_F32_F64},
                           .compute = compute_forward),
              GRADD_KERNEL("LogCumSumExpGrad", "loop", .types = {GRADD_T_F32_F64},
                           .compute = compute_backward));
