/* ArgMax, ArgMin: position of the extremum along one axis.
 *
 * Math: z = first (or last) index of the largest (smallest) element; NaN counts as the extremum, as
 * in numpy. Shapes: [outer, n, inner] -> [outer, 1 or nothing, inner], i64. No gradient. */
#include <string.h>

#include "kernels/contract/kernel.h"
#include "kernels/cpu/parts.h"
#include "kernels/describe/dispatch.h"
#include "kernels/describe/lanes.h"
#include "kernels/rules/infer.h"

/* ---- kernels -------------------------------------------------------------------------------- */

/* What is asked of each lane. */
typedef struct arg_s {
    gradd_lanes_t l;
    bool largest, last;
} arg_t;

/* Neighbouring lanes that are walked together, row by row: so an axis that is not the last takes
 * the time of memory. */
enum { BLOCK = 512 };

/* Whether a takes the place of b, which is no NaN. */
#define TAKES(p, a, b)                                                                             \
    ((a) != (a) || ((p)->largest ? (a) > (b) : (a) < (b)) || ((p)->last && (a) == (b)))

#define ARG_KERNEL(T, S)                                                                           \
    static void lane_##S(const arg_t *p, const T *x, int64_t *z) {                                 \
        T best = x[0];                                                                             \
        *z = 0;                                                                                    \
        for (int64_t i = 1; i < p->l.n && best == best; i++) {                                     \
            const T a = x[i * p->l.inner];                                                         \
            if (TAKES(p, a, best)) best = a, *z = i;                                               \
        }                                                                                          \
    }                                                                                              \
    static void block_##S(const arg_t *p, int64_t lanes, const T *x, int64_t *z) {                 \
        const arg_t own = *p; /* which no result can be */                                         \
        T best[BLOCK];                                                                             \
        int64_t at[BLOCK] = {0};                                                                   \
        memcpy(best, x, sizeof best[0] * (size_t)lanes);                                           \
        for (int64_t i = 1; i < own.l.n; i++)                                                      \
            for (int64_t k = 0; k < lanes; k++) {                                                  \
                const T a = x[i * own.l.inner + k], b = best[k];                                   \
                const bool takes = b == b && TAKES(&own, a, b);                                    \
                best[k] = takes ? a : b;                                                           \
                at[k] = takes ? i : at[k];                                                         \
            }                                                                                      \
        memcpy(z, at, sizeof at[0] * (size_t)lanes);                                               \
    }                                                                                              \
    static void ref_##S(const arg_t *p, const T *x, int64_t *z) {                                  \
        for (int64_t lane = 0; lane < p->l.outer * p->l.inner; lane++)                             \
            lane_##S(p, x + lane / p->l.inner * p->l.n * p->l.inner + lane % p->l.inner,           \
                     z + lane);                                                                    \
    }                                                                                              \
    static void arg_##S(const arg_t *p, const T *x, int64_t *z, gradd_range_t tasks, bool many) {  \
        const int64_t across = (p->l.inner + BLOCK - 1) / BLOCK;                                   \
        _Pragma("omp parallel for schedule(static) if (many)") for (int64_t t = tasks.from;        \
                                                                    t < tasks.to; t++) {           \
            const int64_t o = t / across, lane = t % across * BLOCK, rest = p->l.inner - lane;     \
            const T *from = x + o * p->l.n * p->l.inner + lane;                                    \
            int64_t *to = z + o * p->l.inner + lane;                                               \
            if (p->l.inner == 1)                                                                   \
                lane_##S(p, from, to);                                                             \
            else                                                                                   \
                block_##S(p, rest < BLOCK ? rest : BLOCK, from, to);                               \
        }                                                                                          \
    }
ARG_KERNEL(float, f32)
ARG_KERNEL(double, f64)
ARG_KERNEL(int32_t, i32)
ARG_KERNEL(int64_t, i64)

static int64_t count_tasks(const gradd_lanes_t *l) {
    return l->outer * ((l->inner + BLOCK - 1) / BLOCK);
}

static gradd_status_t describe(const gradd_launch_t *r, bool largest, arg_t *out) {
    *out = (arg_t){.largest = largest, .last = gradd_attr_int(r->attrs, "select_last_index", 0)};
    return gradd_lanes_of_axis(&r->in[0].type, r->attrs, 0, &out->l);
}

static gradd_status_t ref(const gradd_launch_t *r, bool largest) {
    arg_t p;
    GRADD_TRY(describe(r, largest, &p));
    switch (r->in[0].type.dtype) {
    case GRADD_DT_F32:
        ref_f32(&p, r->in[0].data, r->out[0].data);
        break;
    case GRADD_DT_F64:
        ref_f64(&p, r->in[0].data, r->out[0].data);
        break;
    case GRADD_DT_I32:
        ref_i32(&p, r->in[0].data, r->out[0].data);
        break;
    default:
        ref_i64(&p, r->in[0].data, r->out[0].data);
    }
    return GRADD_OK;
}
static gradd_status_t ref_argmax(const gradd_launch_t *r) {
    return ref(r, true);
}
static gradd_status_t ref_argmin(const gradd_launch_t *r) {
    return ref(r, false);
}

static gradd_status_t arg(const gradd_launch_t *r, bool largest) {
    const void *x = r->in[0].data;
    int64_t *z = r->out[0].data;
    const bool many = gradd_type_count(&r->in[0].type) >= GRADD_PARALLEL_MIN;
    arg_t p;
    GRADD_TRY(describe(r, largest, &p));
    const gradd_range_t tasks = gradd_part_of(r, count_tasks(&p.l));
    if (!p.l.n) return GRADD_OK;
    switch (r->in[0].type.dtype) {
    case GRADD_DT_F32:
        arg_f32(&p, x, z, tasks, many);
        break;
    case GRADD_DT_F64:
        arg_f64(&p, x, z, tasks, many);
        break;
    case GRADD_DT_I32:
        arg_i32(&p, x, z, tasks, many);
        break;
    default:
        arg_i64(&p, x, z, tasks, many);
    }
    return GRADD_OK;
}
static gradd_status_t compute_argmax(const gradd_launch_t *r) {
    return arg(r, true);
}
static gradd_status_t compute_argmin(const gradd_launch_t *r) {
    return arg(r, false);
}

static int parts_arg(const gradd_infer_t *c) {
    gradd_lanes_t l;
    if (gradd_lanes_of_axis(&c->in[0].type, c->attrs, 0, &l)) return 0;
    return gradd_parts_of_tasks(c, count_tasks(&l));
}

/* A lane by itself waits for each comparison, as long as 60 bytes take to move. */
static void cost_arg(const gradd_infer_t *c, gradd_cost_t *cost) {
    gradd_lanes_t l;
    if (gradd_lanes_of_axis(&c->in[0].type, c->attrs, 0, &l)) return;
    cost->again = (l.inner == 1 ? 60.0 : 20.0) * (double)gradd_type_count(&c->in[0].type);
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
        .infer = infer_arg, .ref = GRADD_REF(ref_argmax),
        .cases = GRADD_CASES(
            {.text = "f32[2,3,4] | axis=1"}, {.text = "f32[2,3,4] | axis=-1 keepdims=0"},
            {.text = "f32[5]"}, {.text = "i64[2,5]:(0,1) | axis=1"},
            {.text = "i64[2,5]:(0,1) | axis=1 select_last_index=1"},
            {.text = "i32[4,3] | keepdims=0"}, {.text = "f32[4]={1,nan,3,nan}"},
            {.text = "f32[67,1031] | axis=1"},
            {.text = "i64[3,700]:(0,3) | axis=1 select_last_index=1"},
            {.text = "i32[3,700]:(0,3) | axis=1"}, {.text = "f32[3,60,70] | axis=1"},
            {.text = "f32[2,90,3] | axis=1"}, {.text = "f32[3,2,2048] | axis=2"},
            {.text = "i64[50,600]:(0,3)"},
            {.text = "i32[2,40,300]:(0,9) | axis=1 select_last_index=1"},
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
        .infer = infer_arg, .ref = GRADD_REF(ref_argmin),
        .cases = GRADD_CASES(
            {.text = "f32[2,3,4] | axis=1"}, {.text = "f32[2,3,4] | axis=-1 keepdims=0"},
            {.text = "f32[5]"}, {.text = "i64[2,5]:(0,1) | axis=1"},
            {.text = "i64[2,5]:(0,1) | axis=1 select_last_index=1"},
            {.text = "i32[4,3] | keepdims=0"}, {.text = "f32[4]={1,nan,3,nan}"},
            {.text = "f32[67,1031] | axis=1"},
            {.text = "i64[3,700]:(0,3) | axis=1 select_last_index=1"},
            {.text = "i32[3,700]:(0,3) | axis=1"}, {.text = "f32[3,60,70] | axis=1"},
            {.text = "f32[2,90,3] | axis=1"}, {.text = "f32[3,2,2048] | axis=2"},
            {.text = "i64[50,600]:(0,3)"},
            {.text = "i32[2,40,300]:(0,9) | axis=1 select_last_index=1"},
            {.text = "f32[3]={-0.0,0,-0.0} | select_last_index=1"},
            {.text = "f32[3]={nan,nan,1} | select_last_index=1"},
            {.text = "f32[4]={-inf,-inf,-inf,-inf}"},
            {.text = "i64[3]={-9223372036854775807,-9223372036854775807,-9223372036854775807}"},
            {.text = "f32[2,0,3] | axis=2"})));

GRADD_KERNELS(cpu, argmax,
              GRADD_KERNEL("ArgMax", "loop", .types = {GRADD_T_F32_F64 | GRADD_T_INT},
                           .compute = compute_argmax, .parts = parts_arg, .cost = cost_arg),
              GRADD_KERNEL("ArgMin", "loop", .types = {GRADD_T_F32_F64 | GRADD_T_INT},
                           .compute = compute_argmin, .parts = parts_arg, .cost = cost_arg));
