/* WindowMax: the largest element of each window of the last one to three axes, and its place.
 *
 *     y[p, j..] = max x[p, span[j..]]    index[p, j..] = the place of it within the plane x[p]
 *
 * There is a span i64[m, 2] for each of the axes (windows.h), known when a plan is made; elements
 * of a window lie `steps` apart. As in PyTorch the first of equal elements counts, and the last NaN
 * if there is one. An empty window gives -inf and the place 0. Saved for backward: index.
 *
 * Where the windows of the last axis are its single elements (channels behind positions), many of
 * them are compared at a time.
 *
 * WindowMaxGrad(dy, index, turned spans) -> dx is internal: an element has the sum of dy over the
 * windows whose largest element it is, in rising order of them, so bits do not depend on threads.
 */
#include <math.h>
#include <string.h>

#include "kernels/contract/kernel.h"
#include "kernels/cpu/parts.h"
#include "kernels/describe/dispatch.h"
#include "kernels/describe/windowmax.h"
#include "kernels/describe/windows.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

/* ---- kernels --------------------------------------------------------------------------------- */

#define MAX_LOOPS(T, S)                                                                            \
    static T largest_##S(const T *x, const gradd_plane_t *p, const int64_t *const *span,           \
                         int64_t *out_at) {                                                        \
        const int64_t *a = span[0], *b = span[1], *c = span[2], step = p->step[2];                 \
        T best = -(T)INFINITY;                                                                     \
        int64_t place = a[1] && b[1] && c[1] ? (a[0] * p->n[1] + b[0]) * p->n[2] + c[0] : 0;       \
        for (int64_t i = 0; i < a[1]; i++)                                                         \
            for (int64_t j = 0; j < b[1]; j++) {                                                   \
                const int64_t row = (a[0] + i * p->step[0]) * p->n[1] + b[0] + j * p->step[1];     \
                const int64_t first = row * p->n[2] + c[0];                                        \
                for (int64_t k = 0; k < c[1]; k++) {                                               \
                    const T v = x[first + k * step];                                               \
                    if (v > best || v != v) best = v, place = first + k * step;                    \
                }                                                                                  \
            }                                                                                      \
        *out_at = place;                                                                           \
        return best;                                                                               \
    }                                                                                              \
    static void plane_max_##S(const T *x, T *y, int64_t *index, const gradd_plane_t *p) {          \
        int64_t at = 0, place;                                                                     \
        for (int64_t i = 0; i < p->m[0]; i++)                                                      \
            for (int64_t j = 0; j < p->m[1]; j++)                                                  \
                for (int64_t k = 0; k < p->m[2]; k++, at++) {                                      \
                    const int64_t *const span[] = {gradd_plane_span(p, 0, i),                      \
                                                   gradd_plane_span(p, 1, j),                      \
                                                   gradd_plane_span(p, 2, k)};                     \
                    y[at] = largest_##S(x, p, span, &place);                                       \
                    if (index) index[at] = place;                                                  \
                }                                                                                  \
    }                                                                                              \
    static void plane_grad_##S(const T *dy, const int64_t *index, T *dx, const gradd_plane_t *p) { \
        const int64_t size = p->n[0] * p->n[1] * p->n[2], count = p->m[0] * p->m[1] * p->m[2];     \
        memset(dx, 0, sizeof *dx * (size_t)size);                                                  \
        for (int64_t at = 0; at < count; at++) {                                                   \
            const int64_t place = index[at];                                                       \
            if (place >= 0 && place < size) dx[place] += dy[at];                                   \
        }                                                                                          \
    }

MAX_LOOPS(float, f32)
MAX_LOOPS(double, f64)

/* ---- windows of single elements along the last axis ------------------------------------------ */

enum { BLOCK = 64 };

static bool is_apart(const gradd_plane_t *p) {
    const int64_t channels = p->n[2];
    if (p->m[2] != channels || !p->span[2] || p->n[0] * p->n[1] > INT32_MAX) return false;
    for (int64_t c = 0; c < channels; c++)
        if (p->span[2][2 * c] != c || p->span[2][2 * c + 1] != 1) return false;
    return channels > 1;
}

#define APART_LOOPS(T, S)                                                                          \
    /* one window of n <= BLOCK channels from c on; at: rows of x as [n0 n1, channels] */          \
    GRADD_MULTIARCH static void window_##S(const T *x, const gradd_plane_t *p, const int64_t *a,   \
                                           const int64_t *b, int64_t n, T *best, int32_t *at) {    \
        const int32_t first = a[1] && b[1] ? (int32_t)(a[0] * p->n[1] + b[0]) : 0;                 \
        for (int64_t c = 0; c < n; c++)                                                            \
            best[c] = -(T)INFINITY, at[c] = first;                                                 \
        for (int64_t i = 0; i < a[1]; i++)                                                         \
            for (int64_t j = 0; j < b[1]; j++) {                                                   \
                const int64_t row = (a[0] + i * p->step[0]) * p->n[1] + b[0] + j * p->step[1];     \
                const T *v = x + row * p->n[2];                                                    \
                _Pragma("omp simd") for (int64_t c = 0; c < n; c++) {                              \
                    const bool more = v[c] > best[c] || v[c] != v[c];                              \
                    best[c] = more ? v[c] : best[c];                                               \
                    at[c] = more ? (int32_t)row : at[c];                                           \
                }                                                                                  \
            }                                                                                      \
    }                                                                                              \
    /* the results of position i of the first axis */                                              \
    static void apart_max_##S(const T *x, T *y, int64_t *index, const gradd_plane_t *p,            \
                              int64_t i) {                                                         \
        const int64_t channels = p->n[2], *a = gradd_plane_span(p, 0, i);                          \
        int32_t at[BLOCK];                                                                         \
        for (int64_t j = 0; j < p->m[1]; j++)                                                      \
            for (int64_t c = 0; c < channels; c += BLOCK) {                                        \
                const int64_t n = channels - c < BLOCK ? channels - c : BLOCK;                     \
                const int64_t *b = gradd_plane_span(p, 1, j),                                      \
                              to = (i * p->m[1] + j) * channels + c;                               \
                window_##S(x + c, p, a, b, n, y + to, at);                                         \
                for (int64_t k = 0; index && k < n; k++)                                           \
                    index[to + k] = a[1] && b[1] ? at[k] * channels + c + k : 0;                   \
            }                                                                                      \
    }                                                                                              \
    /* of n <= BLOCK channels from c on */                                                         \
    static void apart_grad_##S(const T *dy, const int64_t *index, T *dx, const gradd_plane_t *p,   \
                               int64_t c) {                                                        \
        const int64_t channels = p->n[2], size = p->n[0] * p->n[1] * channels;                     \
        const int64_t n = channels - c < BLOCK ? channels - c : BLOCK;                             \
        for (int64_t at = c; at < size; at += channels)                                            \
            memset(dx + at, 0, sizeof *dx * (size_t)n);                                            \
        for (int64_t at = c; at < p->m[0] * p->m[1] * channels; at += channels)                    \
            for (int64_t k = 0; k < n; k++) {                                                      \
                const int64_t place = index[at + k];                                               \
                if (place >= 0 && place < size) dx[place] += dy[at + k];                           \
            }                                                                                      \
    }

APART_LOOPS(float, f32)
APART_LOOPS(double, f64)

static int64_t product(const int64_t *n) {
    return n[0] * n[1] * n[2];
}

static void compute_apart(const gradd_launch_t *r, const gradd_plane_t *p, int64_t *index) {
    const int64_t from = product(p->n), to = product(p->m), rows = p->m[0];
    const gradd_range_t part = gradd_part_of(r, p->planes * rows);
#pragma omp parallel for schedule(static) if (p->planes * (from + to) >= GRADD_PARALLEL_MIN)
    for (int64_t u = part.from; u < part.to; u++) {
        const int64_t i = u / rows;
        int64_t *places = index ? index + i * to : NULL;
        if (r->in[0].type.dtype == GRADD_DT_F32)
            apart_max_f32((const float *)r->in[0].data + i * from, (float *)r->out[0].data + i * to,
                          places, p, u % rows);
        else
            apart_max_f64((const double *)r->in[0].data + i * from,
                          (double *)r->out[0].data + i * to, places, p, u % rows);
    }
}

static void compute_apart_grad(const gradd_launch_t *r, const gradd_plane_t *p,
                               const int64_t *index) {
    const int64_t from = product(p->m), to = product(p->n), blocks = (p->n[2] + BLOCK - 1) / BLOCK;
    const gradd_range_t part = gradd_part_of(r, p->planes * blocks);
#pragma omp parallel for schedule(static) if (p->planes * (from + to) >= GRADD_PARALLEL_MIN)
    for (int64_t u = part.from; u < part.to; u++) {
        const int64_t i = u / blocks, c = u % blocks * BLOCK;
        if (r->in[GRADD_WINDOW_DY].type.dtype == GRADD_DT_F32)
            apart_grad_f32((const float *)r->in[GRADD_WINDOW_DY].data + i * from, index + i * from,
                           (float *)r->out[0].data + i * to, p, c);
        else
            apart_grad_f64((const double *)r->in[GRADD_WINDOW_DY].data + i * from, index + i * from,
                           (double *)r->out[0].data + i * to, p, c);
    }
}

static void compute_planes(const gradd_launch_t *r, const gradd_plane_t *p, int64_t *index) {
    const int64_t from = product(p->n), to = product(p->m);
    const gradd_range_t part = gradd_part_of(r, p->planes);
#pragma omp parallel for schedule(static) if (p->planes * (from + to) >= GRADD_PARALLEL_MIN)
    for (int64_t i = part.from; i < part.to; i++) {
        int64_t *places = index ? index + i * to : NULL;
        if (r->in[0].type.dtype == GRADD_DT_F32)
            plane_max_f32((const float *)r->in[0].data + i * from, (float *)r->out[0].data + i * to,
                          places, p);
        else
            plane_max_f64((const double *)r->in[0].data + i * from,
                          (double *)r->out[0].data + i * to, places, p);
    }
}

static void compute_planes_grad(const gradd_launch_t *r, const gradd_plane_t *p,
                                const int64_t *index) {
    const int64_t from = product(p->m), to = product(p->n);
    const gradd_range_t part = gradd_part_of(r, p->planes);
#pragma omp parallel for schedule(static) if (p->planes * (from + to) >= GRADD_PARALLEL_MIN)
    for (int64_t i = part.from; i < part.to; i++) {
        if (r->in[GRADD_WINDOW_DY].type.dtype == GRADD_DT_F32)
            plane_grad_f32((const float *)r->in[GRADD_WINDOW_DY].data + i * from, index + i * from,
                           (float *)r->out[0].data + i * to, p);
        else
            plane_grad_f64((const double *)r->in[GRADD_WINDOW_DY].data + i * from, index + i * from,
                           (double *)r->out[0].data + i * to, p);
    }
}

/* plain: by the loops that define the operator. */
static gradd_status_t run_max(const gradd_launch_t *r, bool plain) {
    const gradd_plane_t p = gradd_plane_of(r, &r->in[0].type, &r->out[0].type, 1);
    (!plain && is_apart(&p) ? compute_apart : compute_planes)(r, &p,
                                                              r->n_out > 1 ? r->out[1].data : NULL);
    return GRADD_OK;
}

static gradd_status_t run_max_grad(const gradd_launch_t *r, bool plain) {
    const gradd_plane_t p =
        gradd_plane_of(r, &r->out[0].type, &r->in[GRADD_WINDOW_DY].type, GRADD_WINDOW_TURNED);
    (!plain && is_apart(&p) ? compute_apart_grad
                            : compute_planes_grad)(r, &p, r->in[GRADD_WINDOW_INDEX].data);
    return GRADD_OK;
}

static gradd_status_t compute_max(const gradd_launch_t *r) {
    return run_max(r, false);
}
static gradd_status_t ref_max(const gradd_launch_t *r) {
    return run_max(r, true);
}
static gradd_status_t compute_max_grad(const gradd_launch_t *r) {
    return run_max_grad(r, false);
}
static gradd_status_t ref_max_grad(const gradd_launch_t *r) {
    return run_max_grad(r, true);
}

/* By whole planes, which are many where a launch takes long. */
static int parts_of(const gradd_infer_t *c, int axes) {
    int64_t planes = 1;
    for (int i = 0; i < c->in[0].type.rank - axes; i++)
        planes *= c->in[0].type.dims[i];
    return gradd_parts_of_tasks(c, planes);
}
static int parts_max(const gradd_infer_t *c) {
    return parts_of(c, c->n_in - 1);
}
static int parts_max_grad(const gradd_infer_t *c) {
    return parts_of(c, c->n_in - GRADD_WINDOW_TURNED);
}

/* ---- shape rules ----------------------------------------------------------------------------- */

static gradd_status_t check_axes(const gradd_infer_t *c, const gradd_type_t *x, int first) {
    const int axes = c->n_in - first;
    const gradd_attr_t *steps = gradd_attr_find(c->attrs, GRADD_WINDOW_STEPS);
    if (axes < 1 || axes > GRADD_WINDOW_AXES || axes > x->rank || (steps && (int)steps->n != axes))
        return GRADD_FAIL(GRAPH, "windows of %d axes of rank %d", axes, x->rank);
    for (int i = 0; steps && i < axes; i++)
        if (steps->ints[i] < 1)
            return GRADD_FAIL(GRAPH, "a step of %lld", (long long)steps->ints[i]);
    return GRADD_OK;
}

static gradd_status_t infer_max(gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[0].type;
    const gradd_attr_t *steps = gradd_attr_find(c->attrs, GRADD_WINDOW_STEPS);
    GRADD_TRY(check_axes(c, x, 1));
    gradd_type_t y = *x;
    for (int i = 1; i < c->n_in; i++) {
        const int axis = x->rank - c->n_in + i;
        GRADD_TRY(gradd_check_span(c, i, x->dims[axis], steps ? steps->ints[i - 1] : 1));
        y.dims[axis] = c->in[i].type.dims[0];
    }
    c->out[0] = y;
    if (c->n_out > 1) c->out[1] = y, c->out[1].dtype = GRADD_DT_I64;
    return GRADD_OK;
}

static gradd_status_t infer_max_grad(gradd_infer_t *c) {
    const gradd_type_t *dy = &c->in[GRADD_WINDOW_DY].type;
    GRADD_TRY(check_axes(c, dy, GRADD_WINDOW_TURNED));
    if (!gradd_type_same_shape(dy, &c->in[GRADD_WINDOW_INDEX].type))
        return GRADD_FAIL(GRAPH, "dy does not fit the places");
    c->out[0] = *dy;
    for (int i = GRADD_WINDOW_TURNED; i < c->n_in; i++) {
        const int axis = dy->rank - c->n_in + i;
        GRADD_TRY(gradd_check_span(c, i, dy->dims[axis], 1));
        c->out[0].dims[axis] = c->in[i].type.dims[0];
    }
    return GRADD_OK;
}

/* ---- gradient rule --------------------------------------------------------------------------- */

static gradd_status_t turn(gradd_grad_t *g, int i, int64_t n, int64_t step, gradd_val_t *out) {
    gradd_builder_t *b = g->b;
    const gradd_windows_t given = {.n = n,
                                   .out = gradd_val_type(b, g->in[i])->dims[0],
                                   .width = 1,
                                   .span = (int64_t *)(uintptr_t)b->data(b, g->in[i])};
    gradd_windows_t turned;
    if (!given.span) return GRADD_FAIL(INTERNAL, "the spans of a window are not known");
    GRADD_TRY(gradd_windows_turned(&given, step, &turned));
    *out = gradd_windows_span(b, &turned);
    gradd_windows_finish(&turned);
    return b->status;
}

static gradd_status_t grad_max(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    const gradd_attr_t *steps = gradd_attr_find(g->attrs, GRADD_WINDOW_STEPS);
    if (!g->need[0] || g->dout[0] == GRADD_NONE) return GRADD_OK;
    gradd_val_t in[GRADD_WINDOW_TURNED + GRADD_WINDOW_AXES] = {g->dout[0], g->output(g, 1)};
    const gradd_type_t x = *gradd_val_type(b, g->in[0]);
    if (b->status) return b->status;
    for (int i = 1; i < g->n_in; i++)
        GRADD_TRY(turn(g, i, x.dims[x.rank - g->n_in + i], steps ? steps->ints[i - 1] : 1,
                       &in[GRADD_WINDOW_TURNED + i - 1]));
    g->din[0] = gradd_emit_n(b, "WindowMaxGrad", GRADD_WINDOW_TURNED + g->n_in - 1, in);
    return b->status;
}

static void cost_max(const gradd_infer_t *c, gradd_cost_t *cost) {
    double each = 1;
    for (int i = 1; i < c->n_in; i++) {
        const int64_t *span = c->in[i].data;
        if (span && c->in[i].type.dims[0]) each *= (double)span[c->in[i].type.dims[0] / 2 * 2 + 1];
    }
    cost->flops = each * (double)gradd_type_count(&c->out[0]);
}

/* ---- rows ------------------------------------------------------------------------------------ */

GRADD_OPS(
    windowmax,
    GRADD_OP(
        "WindowMax", "com.gradd", 1, (2, 1 + GRADD_WINDOW_AXES), (1, 2), .flags = GRADD_OP_INTERNAL,
        .counts = 2, .types = {GRADD_T_FLOAT, GRADD_DTB(I64)},
        .attrs = GRADD_ATTR_LIST({GRADD_WINDOW_STEPS, GRADD_ATTR_INTS, false}), .infer = infer_max,
        .grad = grad_max, .expand = GRADD_EXPANSION(gradd_window_max_expand),
        .ref = GRADD_REF(ref_max),
        .cases = GRADD_CASES(
            {.text = "f32[2,5] i64[3,2]={0,2,1,3,3,2}"},
            {.text = "f32[2,5] i64[3,2]={0,2,1,2,0,3} | steps=[2] -> 2", .grad_tol = -1},
            {.text = "f32[2,3,4,5] i64[2,2]={0,2,2,2} i64[3,2]={0,2,1,3,3,2}"},
            {.text = "f32[2,3,4,5] i64[2,2]={0,2,1,2} i64[1,2]={1,2} | steps=[2,3]"},
            {.text = "f32[2,3,2,4,5] i64[1,2]={0,2} i64[2,2]={0,2,2,2} i64[2,2]={0,2,3,1} "
                     "-> 2",
             .grad_tol = -1},
            {.text = "f32[2,6]={1,3,3,nan,2,nan,-inf,-inf,inf,inf,-inf,-inf} "
                     "i64[3,2]={0,3,2,4,4,2} -> 2",
             .grad_tol = -1},
            {.text = "f32[0,5] i64[1,2]={0,5}"},
            {.text = "f32[2,5,3] i64[3,2]={0,2,1,3,3,2} i64[3,2]={0,1,1,1,2,1}"},
            {.text = "f32[2,6,2]={1,5,3,5,3,nan,nan,1,2,nan,nan,2,-inf,-inf,-inf,0,inf,1,inf,1,"
                     "-inf,2,-inf,2} i64[4,2]={0,3,2,4,4,2,6,0} i64[2,2]={0,1,1,1} -> 2",
             .grad_tol = -1},
            {.text = "f32[2,7,5,70] i64[3,2]={0,2,2,3,6,1} i64[2,2]={0,3,2,2} "
                     "i64[70,2]={0,1,1,1,2,1,3,1,4,1,5,1,6,1,7,1,8,1,9,1,10,1,11,1,12,1,13,1,"
                     "14,1,15,1,16,1,17,1,18,1,19,1,20,1,21,1,22,1,23,1,24,1,25,1,26,1,27,1,"
                     "28,1,29,1,30,1,31,1,32,1,33,1,34,1,35,1,36,1,37,1,38,1,39,1,40,1,41,1,"
                     "42,1,43,1,44,1,45,1,46,1,47,1,48,1,49,1,50,1,51,1,52,1,53,1,54,1,55,1,"
                     "56,1,57,1,58,1,59,1,60,1,61,1,62,1,63,1,64,1,65,1,66,1,67,1,68,1,69,1} "
                     "| steps=[2,1,1] -> 2",
             .grad_tol = -1},
            {.text = "f32[2,3] i64[0,2]={}", .grad_tol = -1},
            {.text = "f32[2,40,30,40] i64[3,2]={0,3,10,12,28,2} i64[4,2]={0,3,1,9,2,3,30,10} "
                     "-> 2",
             .grad_tol = -1})),
    GRADD_OP("WindowMaxGrad", "com.gradd", 1,
             (GRADD_WINDOW_TURNED + 1, GRADD_WINDOW_TURNED + GRADD_WINDOW_AXES), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD,
             .types = {GRADD_T_FLOAT, GRADD_DTB(I64)}, .infer = infer_max_grad,
             .expand = GRADD_EXPANSION(gradd_window_max_grad_expand),
             .ref = GRADD_REF(ref_max_grad),
             .cases = GRADD_CASES(
                 {.text = "f32[2,3] i64[2,3]={0,2,2,1,1,4} i64[5,2]={0,1,0,2,0,3,1,2,2,1}"},
                 {.text = "f32[2,2,2] i64[2,2,2]={0,1,5,5,4,4,4,4} i64[2,2]={0,2,0,2} "
                          "i64[3,2]={0,2,0,2,0,2}"},
                 {.text = "f32[3,2,2,1] i64[3,2,2,1]={0} i64[1,2]={0,2} i64[2,2]={0,2,0,2} "
                          "i64[3,2]={0,1,0,1,0,1}"},
                 {.text = "f32[0,3] i64[0,3] i64[5,2]={0,1,0,2,0,3,1,2,2,1}"})));

GRADD_KERNELS(cpu, windowmax,
              GRADD_KERNEL("WindowMax", "loop", .types = {GRADD_T_F32_F64, GRADD_DTB(I64)},
                           .compute = compute_max, .cost = cost_max, .parts = parts_max),
              GRADD_KERNEL("WindowMaxGrad", "loop", .types = {GRADD_T_F32_F64, GRADD_DTB(I64)},
                           .compute = compute_max_grad, .parts = parts_max_grad));
