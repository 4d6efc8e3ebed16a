/* ArgMax, ArgMin: position of the extremum along one axis.
 *
 * Math: z = first (or last) index of the largest (smallest) element; NaN counts as the extremum, as
 * in numpy. Shapes: [outer, n, inner] -> [outer, 1 or nothing, inner], i64. No gradient. */
#include "kernels/contract/kernel.h"
#include "kernels/describe/dispatch.h"
#include "kernels/describe/lanes.h"
#include "kernels/rules/infer.h"

/* ---- kernel --------------------------------------------------------------------------------- */

#define ARG_KERNEL(T, S)                                                                           \
    static void arg_##S(const T *x, int64_t *z, int64_t outer, int64_t n, int64_t inner,           \
                        bool largest, bool last) {                                                 \
        const bool many = outer * n * inner >= GRADD_PARALLEL_MIN;                                 \
        _Pragma("omp parallel for schedule(static) if (many)") for (int64_t lane = 0;              \
                                                                    lane < outer * inner;          \
                                                                    lane++) {                      \
            const T *y = x + lane / inner * n * inner + lane % inner;                              \
            int64_t best = 0;                                                                      \
            for (int64_t i = 1; i < n && y[best * inner] == y[best * inner]; i++) {                \
                const T a = y[i * inner], b = y[best * inner];                                     \
                if (a != a || (largest ? a > b : a < b) || (last && a == b)) best = i;             \
            }                                                                                      \
            z[lane] = best;                                                                        \
        }                                                                                          \
    }
ARG_KERNEL(float, f32)
ARG_KERNEL(double, f64)
ARG_KERNEL(int32_t, i32)
ARG_KERNEL(int64_t, i64)

static gradd_status_t arg(const gradd_launch_t *r, bool largest) {
    const gradd_type_t *t = &r->in[0].type;
    const bool last = gradd_attr_int(r->attrs, "select_last_index", 0);
    int64_t *z = r->out[0].data;
    gradd_lanes_t l;
    GRADD_TRY(gradd_lanes_of_axis(t, r->attrs, 0, &l));
    const int64_t outer = l.outer, n = l.n, inner = l.inner;
    switch (t->dtype) {
    case GRADD_DT_F32:
        arg_f32(r->in[0].data, z, outer, n, inner, largest, last);
        break;
    case GRADD_DT_F64:
        arg_f64(r->in[0].data, z, outer, n, inner, largest, last);
        break;
    case GRADD_DT_I32:
        arg_i32(r->in[0].data, z, outer, n, inner, largest, last);
        break;
    default:
        arg_i64(r->in[0].data, z, outer, n, inner, largest, last);
        break;
    }
    return GRADD_OK;
}
static gradd_status_t compute_argmax(const gradd_launch_t *r) {
    return arg(r, true);
}
static gradd_status_t compute_argmin(const gradd_launch_t *r) {
    return arg(r, false);
}

/* ---- shape rule ----------------------------------------------------------------------------- */

static gradd_status_t infer_arg(gradd_infer_t *c) {
    const gradd_type_t *in = &c->in[0].type;
    gradd_type_t *out = &c->out[0];
    bool keep = gradd_attr_int(c->attrs, "keepdims", 1);
    int axis;
    GRADD_TRY(gradd_axis(gradd_attr_int(c->attrs, "axis", 0), in->rank, false, &axis));
    out->dtype = GRADD_DT_I64;
    for (int i = 0; i < in->rank; i++)
        if (i != axis || keep) out->dims[out->rank++] = i == axis ? 1 : in->dims[i];
    if (!in->dims[axis] && gradd_type_count(out))
        return GRADD_FAIL(GRAPH, "no elements along axis %d", axis);
    return GRADD_OK;
}

/* ---- cases and rows ------------------------------------------------------------------------- */

GRADD_OPS(
    argmax,
    GRADD_OP(
        "ArgMax", "", 13, (1, 1), (1, 1), .flags = GRADD_OP_NO_GRAD, .types = {GRADD_T_NUM},
        .attrs = GRADD_ATTR_LIST({"axis", GRADD_ATTR_INT, false},
                                 {"keepdims", GRADD_ATTR_INT, false},
                                 {"select_last_index", GRADD_ATTR_INT, false}),
        .infer = infer_arg, .ref = GRADD_REF(compute_argmax),
        .cases = GRADD_CASES(
            {.text = "f32[2,3,4] | axis=1"}, {.text = "f32[2,3,4] | axis=-1 keepdims=0"},
            {.text = "f32[5]"}, {.text = "i64[2,5]:(0,1) | axis=1"},
            {.text = "i64[2,5]:(0,1) | axis=1 select_last_index=1"},
            {.text = "i32[4,3] | keepdims=0"}, {.text = "f32[4]={1,nan,3,nan}"},
            {.text = "f32[67,1031] | axis=1"},
            {.text = "i64[3,700]:(0,3) | axis=1 select_last_index=1"},
            {.text = "i32[3,700]:(0,3) | axis=1"}, {.text = "f32[3,60,70] | axis=1"},
            {.text = "f32[2,90,3] | axis=1"}, {.text = "f32[3,2,2048] | axis=2"},
            {.text = "f32[3]={-0.0,0,-0.0} | select_last_index=1"},
            {.text = "f32[3]={nan,nan,1} | select_last_index=1"},
            {.text = "f32[4]={-inf,-inf,-inf,-inf}"},
            {.text = "i64[3]={-9223372036854775807,-9223372036854775807,-9223372036854775807}"},
            {.text = "f32[2,0,3] | axis=2"})),
    GRADD_OP(
        "ArgMin", "", 13, (1, 1), (1, 1), .flags = GRADD_OP_NO_GRAD, .types = {GRADD_T_NUM},
        .attrs = GRADD_ATTR_LIST({"axis", GRADD_ATTR_INT, false},
                                 {"keepdims", GRADD_ATTR_INT, false},
                                 {"select_last_index", GRADD_ATTR_INT, false}),
        .infer = infer_arg, .ref = GRADD_REF(compute_argmin),
        .cases = GRADD_CASES(
            {.text = "f32[2,3,4] | axis=1"}, {.text = "f32[2,3,4] | axis=-1 keepdims=0"},
            {.text = "f32[5]"}, {.text = "i64[2,5]:(0,1) | axis=1"},
            {.text = "i64[2,5]:(0,1) | axis=1 select_last_index=1"},
            {.text = "i32[4,3] | keepdims=0"}, {.text = "f32[4]={1,nan,3,nan}"},
            {.text = "f32[67,1031] | axis=1"},
            {.text = "i64[3,700]:(0,3) | axis=1 select_last_index=1"},
            {.text = "i32[3,700]:(0,3) | axis=1"}, {.text = "f32[3,60,70] | axis=1"},
            {.text = "f32[2,90,3] | axis=1"}, {.text = "f32[3,2,2048] | axis=2"},
            {.text = "f32[3]={-0.0,0,-0.0} | select_last_index=1"},
            {.text = "f32[3]={nan,nan,1} | select_last_index=1"},
            {.text = "f32[4]={-inf,-inf,-inf,-inf}"},
            {.text = "i64[3]={-9223372036854775807,-9223372036854775807,-9223372036854775807}"},
            {.text = "f32[2,0,3] | axis=2"})));

GRADD_KERNELS(cpu, argmax,
              GRADD_KERNEL("ArgMax", "loop", .types = {GRADD_T_F32_F64 | GRADD_T_INT},
                           .compute = compute_argmax),
              GRADD_KERNEL("ArgMin", "loop", .types = {GRADD_T_F32_F64 | GRADD_T_INT},
                           .compute = compute_argmin));
