/* LinearScan: a linear recurrence along one axis, as in state-space models.
 *
 * Math: h_t = a_t h_(t-1) + b_t, the first h = b, elementwise over the other axes; `reverse` goes
 * from the end. Shapes: a, b and h [outer, n, inner]. Saved for backward: a and h.
 *
 * LinearScanGrad(dh, a, h) -> db, da is internal. It goes the other way:
 *     g_t = dh_t + a_(t+1) g_(t+1);  db_t = g_t;  da_t = g_t h_(t-1), the first 0
 */
#include "kernels/contract/kernel.h"
#include "kernels/describe/dispatch.h"
#include "kernels/describe/lanes.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

enum { LANES = 64 }; /* neighbours of a task */

/* ---- kernels --------------------------------------------------------------------------------- */

/* Neighbouring lanes from one end to the other: n steps of `step` elements. */
typedef struct scan_part_s {
    const void *dh, *a, *b; /* b: of the gradient h */
    void *out, *da;         /* h, or db; da may be NULL */
    int64_t first, n, step, width;
} scan_part_t;

#define SCAN(T)                                                                                    \
    GRADD_MULTIARCH static void scan_##T(const scan_part_t *p) {                                   \
        T state[LANES] = {0};                                                                      \
        for (int64_t i = 0, at = p->first; i < p->n; i++, at += p->step) {                         \
            const T *a = (const T *)p->a + at, *b = (const T *)p->b + at;                          \
            T *h = (T *)p->out + at;                                                               \
            _Pragma("omp simd") for (int64_t k = 0; k < p->width; k++) {                           \
                state[k] = i ? a[k] * state[k] + b[k] : b[k];                                      \
                h[k] = state[k];                                                                   \
            }                                                                                      \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    /* backwards, so that h of the step before stands at at + step */                              \
    GRADD_MULTIARCH static void back_##T(const scan_part_t *p) {                                   \
        T next[LANES] = {0}, unread[LANES];                                                        \
        for (int64_t i = 0, at = p->first; i < p->n; i++, at += p->step) {                         \
            const T *a = (const T *)p->a + at, *dh = (const T *)p->dh + at;                        \
            const bool first = i + 1 == p->n;                                                      \
            const T *before = (const T *)p->b + at + (first ? 0 : p->step);                        \
            T *db = (T *)p->out + at, *da = p->da ? (T *)p->da + at : unread;                      \
            _Pragma("omp simd") for (int64_t k = 0; k < p->width; k++) {                           \
                const T g = dh[k] + next[k];                                                       \
                da[k] = first ? 0 : g * before[k];                                                 \
                next[k] = a[k] * g;                                                                \
                db[k] = g;                                                                         \
            }                                                                                      \
        }                                                                                          \
    }

SCAN(float)
SCAN(double)

/* All lanes of [outer, n, inner]; `whole` has the tensors. */
static void each_part(const gradd_lanes_t *l, bool reverse, const scan_part_t *whole,
                      void (*run)(const scan_part_t *part)) {
    const int64_t parts = (l->inner + LANES - 1) / LANES, last = l->n - 1;
    const bool large = l->outer * l->n * l->inner >= GRADD_PARALLEL_MIN;
#pragma omp parallel for schedule(static) if (large)
    for (int64_t task = 0; task < l->outer * parts; task++) {
        scan_part_t p = *whole;
        const int64_t from = task % parts * LANES, left = l->inner - from;
        p.first = (task / parts * l->n + (reverse ? last : 0)) * l->inner + from;
        p.n = l->n, p.step = reverse ? -l->inner : l->inner;
        p.width = left < LANES ? left : LANES;
        run(&p);
    }
}

static gradd_status_t compute_scan(const gradd_launch_t *r) {
    gradd_lanes_t l;
    const bool reverse = gradd_attr_int(r->attrs, "reverse", 0);
    const scan_part_t p = {.a = r->in[0].data, .b = r->in[1].data, .out = r->out[0].data};
    GRADD_TRY(gradd_lanes_of_axis(&r->in[0].type, r->attrs, 0, &l));
    each_part(&l, reverse, &p, r->in[0].type.dtype == GRADD_DT_F32 ? scan_float : scan_double);
    return GRADD_OK;
}

static gradd_status_t compute_back(const gradd_launch_t *r) {
    gradd_lanes_t l;
    const bool reverse = gradd_attr_int(r->attrs, "reverse", 0);
    const scan_part_t p = {.dh = r->in[0].data,
                           .a = r->in[1].data,
                           .b = r->in[2].data,
                           .out = r->out[0].data,
                           .da = r->n_out > 1 ? r->out[1].data : NULL};
    GRADD_TRY(gradd_lanes_of_axis(&r->in[0].type, r->attrs, 0, &l));
    each_part(&l, !reverse, &p, r->in[0].type.dtype == GRADD_DT_F32 ? back_float : back_double);
    return GRADD_OK;
}

/* ---- plain loops ----------------------------------------------------------------------------- */

static gradd_status_t ref_scan(const gradd_launch_t *r) {
    gradd_lanes_t l;
    const bool reverse = gradd_attr_int(r->attrs, "reverse", 0);
    GRADD_TRY(gradd_lanes_of_axis(&r->in[0].type, r->attrs, 0, &l));
    GRADD_SWITCH_FLOAT(r->in[0].type.dtype, T, {
        const T *a = r->in[0].data, *b = r->in[1].data;
        for (int64_t lane = 0; lane < l.outer * l.inner; lane++) {
            double h = 0;
            for (int64_t i = 0; i < l.n; i++) {
                const int64_t t = reverse ? l.n - 1 - i : i;
                const int64_t at = (lane / l.inner * l.n + t) * l.inner + lane % l.inner;
                h = i ? (double)a[at] * h + (double)b[at] : (double)b[at];
                ((T *)r->out[0].data)[at] = (T)h;
            }
        }
    });
    return GRADD_OK;
}

static gradd_status_t ref_back(const gradd_launch_t *r) {
    gradd_lanes_t l;
    const bool reverse = gradd_attr_int(r->attrs, "reverse", 0);
    GRADD_TRY(gradd_lanes_of_axis(&r->in[0].type, r->attrs, 0, &l));
    GRADD_SWITCH_FLOAT(r->in[0].type.dtype, T, {
        const T *dh = r->in[0].data, *a = r->in[1].data, *h = r->in[2].data;
        for (int64_t lane = 0; lane < l.outer * l.inner; lane++) {
            double next = 0;
            for (int64_t i = l.n - 1; i >= 0; i--) {
                const int64_t t = reverse ? l.n - 1 - i : i, before = reverse ? t + 1 : t - 1;
                const int64_t base = lane / l.inner * l.n, rest = lane % l.inner;
                const int64_t at = (base + t) * l.inner + rest;
                const double g = (double)dh[at] + next;
                next = (double)a[at] * g;
                ((T *)r->out[0].data)[at] = (T)g;
                if (r->n_out < 2 || !r->out[1].data) continue;
                ((T *)r->out[1].data)[at] =
                    i ? (T)(g * (double)h[(base + before) * l.inner + rest]) : (T)0;
            }
        }
    });
    return GRADD_OK;
}

/* ---- shape and gradient rules ---------------------------------------------------------------- */

static gradd_status_t infer_scan(gradd_infer_t *c) {
    gradd_lanes_t l;
    char is[GRADD_TYPE_TEXT], first[GRADD_TYPE_TEXT];
    for (int i = 1; i < c->n_in; i++)
        if (!gradd_type_equal(&c->in[i].type, &c->in[0].type))
            return GRADD_FAIL(GRAPH, "operand %d is %s, expected %s as the first", i,
                              gradd_type_format(&c->in[i].type, is),
                              gradd_type_format(&c->in[0].type, first));
    GRADD_TRY(gradd_lanes_of_axis(&c->in[0].type, c->attrs, 0, &l));
    for (int j = 0; j < c->n_out; j++)
        c->out[j] = c->in[0].type;
    return GRADD_OK;
}

static gradd_status_t grad_scan(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    gradd_val_t out[2];
    const gradd_val_t in[3] = {g->dout[0], g->in[0], g->output(g, 0)};
    const gradd_emit_t node = {"LinearScanGrad", in, 3, g->attrs.v, g->attrs.n};
    if (!b->status) b->status = b->emit(b, &node, out, g->need[0] ? 2 : 1);
    if (b->status) return b->status;
    if (g->need[0]) g->din[0] = out[1];
    if (g->need[1]) g->din[1] = out[0];
    return GRADD_OK;
}

static void cost_scan(const gradd_infer_t *c, gradd_cost_t *cost) {
    cost->flops = 2 * (double)gradd_type_count(&c->out[0]);
}

/* ---- cases and rows -------------------------------------------------------------------------- */

#define ATTRS GRADD_ATTR_LIST({"axis", GRADD_ATTR_INT, true}, {"reverse", GRADD_ATTR_INT, false})

GRADD_OPS(
    linearscan,
    GRADD_OP("LinearScan", "com.gradd", 1, (2, 2), (1, 1), .types = {GRADD_T_FLOAT}, .attrs = ATTRS,
             .infer = infer_scan, .grad = grad_scan, .ref = GRADD_REF(ref_scan),
             .cases = GRADD_CASES(
                 {.text = "f32[2,3,4] f32[2,3,4] | axis=1"},
                 {.text = "f32[3,2] f32[3,2] | axis=0 reverse=1"},
                 {.text = "f32[2,4] f32[2,4] | axis=-1"}, {.text = "f32[1] f32[1] | axis=0"},
                 {.text = "f32[3,2]={inf,2,1,inf,-1,0} f32[3,2] | axis=0", .grad_tol = -1},
                 {.text = "f32[0,3] f32[0,3] | axis=0"},
                 {.text = "f32[2,3,0] f32[2,3,0] | axis=1 reverse=1"},
                 {.text = "f32[3,40,170]:(0,1) f32[3,40,170] | axis=1", .grad_tol = -1},
                 {.text = "f32[700,50]:(0,1) f32[700,50] | axis=1 reverse=1", .grad_tol = -1})),
    GRADD_OP("LinearScanGrad", "com.gradd", 1, (3, 3), (1, 2),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD, .types = {GRADD_T_FLOAT},
             .attrs = ATTRS, .infer = infer_scan, .ref = GRADD_REF(ref_back),
             .cases = GRADD_CASES(
                 {.text = "f32[2,3,4] f32[2,3,4] f32[2,3,4] | axis=1 -> 2"},
                 {.text = "f32[3,2] f32[3,2] f32[3,2] | axis=0 reverse=1 -> 2"},
                 {.text = "f32[0,2] f32[0,2] f32[0,2] | axis=0 -> 2"},
                 {.text = "f32[3,40,170] f32[3,40,170]:(0,1) f32[3,40,170] | axis=1 -> 2"})));

GRADD_KERNELS(cpu, linearscan,
              GRADD_KERNEL("LinearScan", "loop", .types = {GRADD_T_F32_F64}, .inplace = 3,
                           .compute = compute_scan, .cost = cost_scan),
              GRADD_KERNEL("LinearScanGrad", "loop", .types = {GRADD_T_F32_F64}, .inplace = 3,
                           .compute = compute_back, .cost = cost_scan));
