/* CumSum: running sum along one axis.
 *
 * Math: z_i = sum of x_j for j <= i (exclusive: j < i; reverse: from the end). Shapes:
 * [outer, n, inner]. Floats accumulate in double. Nothing is saved: the gradient is the running sum
 * of dz in the opposite direction. */
#include "kernels/contract/kernel.h"
#include "kernels/cpu/pick.h"
#include "kernels/describe/dispatch.h"
#include "kernels/describe/lanes.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

/* ---- kernels -------------------------------------------------------------------------------- */

static gradd_status_t axis_of(const gradd_view_t *view, int rank, int *out_axis) {
    return gradd_axis(gradd_pick_index(view, 0), rank, false, out_axis);
}

gradd_status_t gradd_lanes_of_cumsum(const gradd_launch_t *r, gradd_lanes_t *out) {
    int axis;
    GRADD_TRY(axis_of(&r->in[1], r->in[0].type.rank, &axis));
    *out = gradd_lanes_of(&r->in[0].type, axis);
    return GRADD_OK;
}

static gradd_status_t compute_cumsum(const gradd_launch_t *r) {
    const gradd_type_t *t = &r->in[0].type;
    const bool exclusive = gradd_attr_int(r->attrs, "exclusive", 0);
    const bool reverse = gradd_attr_int(r->attrs, "reverse", 0);
    gradd_lanes_t l;
    GRADD_TRY(gradd_lanes_of_cumsum(r, &l));
    const int64_t n = l.n, inner = l.inner;
    GRADD_SWITCH_NUM(t->dtype, T, {
        for (int64_t lane = 0; lane < l.outer * inner; lane++) {
            const int64_t base = lane / inner * n * inner + lane % inner;
            const T *x = (const T *)r->in[0].data + base;
            T *z = (T *)r->out[0].data + base;
            GRADD_ACC(T) sum = 0;
            for (int64_t i = 0; i < n; i++) {
                const int64_t at = (reverse ? n - 1 - i : i) * inner;
                const GRADD_ACC(T) before = sum;
                if (gradd_dtype_is_float(t->dtype))
                    sum += x[at];
                else
                    sum = (GRADD_ACC(T))((uint64_t)sum + (uint64_t)x[at]); /* wraps around */
                z[at] = (T)(exclusive ? before : sum);
            }
        }
    });
    return GRADD_OK;
}

/* ---- shape rule ----------------------------------------------------------------------------- */

static gradd_status_t infer_cumsum(gradd_infer_t *c) {
    int axis;
    if (gradd_type_count(&c->in[1].type) != 1) return GRADD_FAIL(GRAPH, "axis must be one number");
    if (!c->in[0].type.rank) return GRADD_FAIL(GRAPH, "a scalar has no axis");
    if (c->in[1].data) GRADD_TRY(axis_of(&c->in[1], c->in[0].type.rank, &axis));
    return gradd_infer_same(c);
}

/* ---- gradient rule -------------------------------------------------------------------------- */

static gradd_status_t grad_cumsum(gradd_grad_t *g) {
    gradd_attr_t attrs[2] = {gradd_make_int("exclusive", gradd_attr_int(g->attrs, "exclusive", 0)),
                             gradd_make_int("reverse", !gradd_attr_int(g->attrs, "reverse", 0))};
    gradd_val_t in[2] = {g->dout[0], g->in[1]};
    if (g->need[0]) g->din[0] = gradd_emit_attrs(g->b, "CumSum", in, 2, attrs, 2);
    return g->b->status;
}

/* ---- cases and row -------------------------------------------------------------------------- */

GRADD_OPS(
    cumsum,
    GRADD_OP(
        "CumSum", "", 11, (2, 2), (1, 1), .types = {GRADD_T_NUM, GRADD_T_INDEX},
        .attrs = GRADD_ATTR_LIST({"exclusive", GRADD_ATTR_INT, false},
                                 {"reverse", GRADD_ATTR_INT, false}),
        .infer = infer_cumsum, .grad = grad_cumsum, .ref = compute_cumsum,
        .cases = GRADD_CASES(
            {.text = "f32[2,3,4] i64[]={1}"}, {.text = "f32[5] i32[]={0}"},
            {.text = "f32[2,3] i64[1]={-1} | exclusive=1"},
            {.text = "f32[2,3] i64[]={0} | reverse=1"},
            {.text = "f32[2,4] i64[]={1} | exclusive=1 reverse=1"}, {.text = "i64[2,5] i64[]={1}"},
            {.text = "i32[4] i64[]={-1}"}, {.text = "f32[0,3] i64[]={0}"},
            {.text = "f32[3,0] i64[]={1}"}, {.text = "f32[3,2500] i64[]={1}", .grad_tol = -1},
            {.text =
                 "i64[70,300]:(-9000000000000000000,9000000000000000000) i64[]={1} | reverse=1"},
            {.text = "i32[2,2049]:(0,2000000000) i64[]={1} | exclusive=1"},
            {.text = "f32[20,2,90] i64[]={0} | reverse=1", .grad_tol = -1},
            {.text = "f32[2,700,3] i64[]={1} | exclusive=1", .grad_tol = -1},
            {.text = "f32[5]={1,inf,2,-inf,3} i64[]={0}", .grad_tol = -1},
            {.text = "f32[2,1,7] i64[]={1} | exclusive=1", .grad_tol = -1})));

GRADD_KERNELS(cpu, cumsum,
              GRADD_KERNEL("CumSum", "loop",
                           .types = {GRADD_T_F32_F64 | GRADD_T_INT, GRADD_T_INDEX}, .inplace = 1,
                           .compute = compute_cumsum));
