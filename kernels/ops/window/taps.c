/* Taps: weighted sums of windows along one axis; what averages and resampling consist of.
 *
 *     y[o, j, i] = sum over t < span[j][1] of weight[j, t] x[o, span[j][0] + t, i]
 *
 * x is seen as [outer, n, inner] around the axis, span is i64[m, 2] and known when a plan is made,
 * weight [m, width] of x's type; y has m elements along the axis. An empty window gives 0. Saved
 * for backward: nothing. The gradient is Taps with the windows turned around (windows.h); there is
 * none for the weights. Sums run in rising order of t, in double: bits do not depend on threads.
 */
#include <stdlib.h>

#include "kernels/contract/kernel.h"
#include "kernels/cpu/parts.h"
#include "kernels/describe/dispatch.h"
#include "kernels/describe/lanes.h"
#include "kernels/describe/windows.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

enum { X, SPAN, WEIGHT, COUNT };
enum { BLOCK = 64 }; /* elements along `inner` that are summed together */

static gradd_status_t compute_taps_ref(const gradd_launch_t *r) {
    gradd_lanes_t l;
    GRADD_TRY(gradd_lanes_of_axis(&r->in[X].type, r->attrs, -1, &l));
    const int64_t m = r->in[SPAN].type.dims[0], width = r->in[WEIGHT].type.dims[1];
    const int64_t *span = r->in[SPAN].data;
    GRADD_SWITCH_FLOAT(r->in[X].type.dtype, T, {
        const T *x = r->in[X].data, *weight = r->in[WEIGHT].data;
        T *y = r->out[0].data;
        for (int64_t at = 0; at < l.outer * m * l.inner; at++) {
            const int64_t i = at % l.inner, j = at / l.inner % m, o = at / l.inner / m;
            double sum = 0;
            for (int64_t t = 0; t < span[2 * j + 1]; t++)
                sum += (double)weight[j * width + t] *
                       (double)x[(o * l.n + span[2 * j] + t) * l.inner + i];
            y[at] = (T)sum;
        }
    });
    return GRADD_OK;
}

#define TAPS_LOOPS(T, S)                                                                           \
    /* n <= BLOCK neighbours of one window */                                                      \
    static void block_##S(T *y, const T *x, const T *weight, int64_t size, int64_t step,           \
                          int64_t n) {                                                             \
        double sum[BLOCK] = {0};                                                                   \
        for (int64_t t = 0; t < size; t++)                                                         \
            for (int64_t i = 0; i < n; i++)                                                        \
                sum[i] += (double)weight[t] * (double)x[t * step + i];                             \
        for (int64_t i = 0; i < n; i++)                                                            \
            y[i] = (T)sum[i];                                                                      \
    }                                                                                              \
    /* some windows of one of `outer` */                                                           \
    static void lane_##S(T *y, const T *x, const gradd_launch_t *r, const gradd_lanes_t *l,        \
                         gradd_range_t some) {                                                     \
        const int64_t *span = r->in[SPAN].data;                                                    \
        const int64_t width = r->in[WEIGHT].type.dims[1];                                          \
        for (int64_t j = some.from; j < some.to; j++) {                                            \
            const T *from = x + span[2 * j] * l->inner;                                            \
            const T *weight = (const T *)r->in[WEIGHT].data + j * width;                           \
            if (l->inner == 1) {                                                                   \
                double sum = 0;                                                                    \
                for (int64_t t = 0; t < span[2 * j + 1]; t++)                                      \
                    sum += (double)weight[t] * (double)from[t];                                    \
                y[j] = (T)sum;                                                                     \
                continue;                                                                          \
            }                                                                                      \
            for (int64_t i = 0; i < l->inner; i += BLOCK)                                          \
                block_##S(y + j * l->inner + i, from + i, weight, span[2 * j + 1], l->inner,       \
                          l->inner - i < BLOCK ? l->inner - i : BLOCK);                            \
        }                                                                                          \
    }

TAPS_LOOPS(float, f32)
TAPS_LOOPS(double, f64)

static gradd_status_t compute_taps(const gradd_launch_t *r) {
    gradd_lanes_t l;
    GRADD_TRY(gradd_lanes_of_axis(&r->in[X].type, r->attrs, -1, &l));
    const bool f32 = r->in[X].type.dtype == GRADD_DT_F32;
    const int64_t m = r->in[SPAN].type.dims[0], from = l.n * l.inner, to = m * l.inner;
    const gradd_range_t all = gradd_part_of(r, l.outer * m); /* windows of all lanes */
    const int64_t first = m ? all.from / m : 0, end = m ? (all.to + m - 1) / m : 0;
#pragma omp parallel for schedule(static) if ((end - first) * (from + to) >= GRADD_PARALLEL_MIN)
    for (int64_t o = first; o < end; o++) {
        const gradd_range_t some = {o == first ? all.from - o * m : 0,
                                    o == end - 1 ? all.to - o * m : m};
        if (f32)
            lane_f32((float *)r->out[0].data + o * to, (const float *)r->in[X].data + o * from, r,
                     &l, some);
        else
            lane_f64((double *)r->out[0].data + o * to, (const double *)r->in[X].data + o * from, r,
                     &l, some);
    }
    return GRADD_OK;
}

static gradd_status_t axis_of(gradd_attrs_t attrs, int rank, int *out_axis) {
    return gradd_axis(gradd_attr_int(attrs, "axis", -1), rank, false, out_axis);
}

static gradd_status_t infer_taps(gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[X].type, *weight = &c->in[WEIGHT].type;
    int axis;
    GRADD_TRY(axis_of(c->attrs, x->rank, &axis));
    GRADD_TRY(gradd_check_span(c, SPAN, x->dims[axis], 1));
    const int64_t *span = c->in[SPAN].data, m = c->in[SPAN].type.dims[0];
    const bool same = weight->dtype == x->dtype ||
                      (gradd_dtype_is_half(x->dtype) && weight->dtype == GRADD_DT_F32);
    if (weight->rank != 2 || weight->dims[0] != m || !same)
        return GRADD_FAIL(GRAPH, "the weights do not fit %lld windows", (long long)m);
    for (int64_t j = 0; j < m; j++)
        if (span[2 * j + 1] > weight->dims[1])
            return GRADD_FAIL(GRAPH, "window %lld has %lld elements and %lld weights", (long long)j,
                              (long long)span[2 * j + 1], (long long)weight->dims[1]);
    c->out[0] = *x;
    c->out[0].dims[axis] = m;
    return GRADD_OK;
}

static gradd_status_t grad_taps(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    const gradd_type_t *x = gradd_val_type(b, g->in[X]), *weight = gradd_val_type(b, g->in[WEIGHT]);
    const void *values = b->data(b, g->in[WEIGHT]);
    const gradd_dtype_t dtype = x->dtype;
    int axis;
    if (g->need[WEIGHT]) return GRADD_FAIL(UNSUPPORTED, "the weights of windows have no gradient");
    if (!g->need[X]) return GRADD_OK;
    if (!values)
        return GRADD_FAIL(UNSUPPORTED, "the gradient needs weights that are known before the run");
    GRADD_TRY(axis_of(g->attrs, x->rank, &axis));
    gradd_windows_t given, turned;
    GRADD_TRY(gradd_windows_room(x->dims[axis], weight->dims[0], weight->dims[1], &given));
    const int64_t *span = b->data(b, g->in[SPAN]);
    for (int64_t i = 0; i < 2 * given.out; i++)
        given.span[i] = span[i];
    for (int64_t i = 0; i < given.out * weight->dims[1]; i++)
        given.weight[i] = weight->dtype == GRADD_DT_F64 ? ((const double *)values)[i]
                                                        : (double)((const float *)values)[i];
    gradd_status_t status = gradd_windows_turned(&given, 1, &turned);
    gradd_windows_finish(&given);
    GRADD_TRY(status);
    g->din[X] = gradd_cast(b, gradd_emit_taps(b, g->dout[0], axis, &turned), dtype);
    gradd_windows_finish(&turned);
    return b->status;
}

/* Products of weights and gathered windows, [..., m, width, ...], summed; behind a window's end the
 * gathered elements count as 0, whatever they are. */
static gradd_status_t expand_taps(gradd_expand_t *e) {
    gradd_builder_t *b = e->b;
    const gradd_type_t x = *gradd_val_type(b, e->in[X]), w = *gradd_val_type(b, e->in[WEIGHT]);
    const int64_t *span = b->data(b, e->in[SPAN]), m = w.dims[0], width = w.dims[1];
    gradd_type_t y = x, each = {
                            .dtype = GRADD_DT_I64, .rank = 2, .dims = {m, width}
    };
    int axis;
    GRADD_TRY(axis_of(e->attrs, x.rank, &axis));
    y.dims[axis] = m;
    if (!gradd_type_count(&x) || !gradd_type_count(&y) || !width) {
        e->out[0] = gradd_filled(b, &y, 0);
        return b->status;
    }
    const int64_t n = m * width, behind = axis + 1;
    int64_t *places = malloc((sizeof *places + 1) * (size_t)n);
    if (!places) return GRADD_FAIL(NOMEM, "no memory for %lld windows", (long long)m);
    uint8_t *within = (uint8_t *)(places + n);
    for (int64_t k = 0; k < n; k++) {
        within[k] = k % width < span[k / width * 2 + 1];
        places[k] = within[k] ? span[k / width * 2] + k % width : 0;
    }
    gradd_val_t v[2] = {gradd_wide(b, e->in[X]), b->constant(b, &each, places)};
    for (int i = axis + 1; i < x.rank; i++)
        each.dims[each.rank++] = 1;
    each.dtype = GRADD_DT_BOOL;
    gradd_val_t inside = b->constant(b, &each, within);
    free(places);
    const gradd_attr_t along = gradd_make_int("axis", axis), keep = gradd_make_int("keepdims", 0);
    v[0] = gradd_emit_attrs(b, "Gather", v, 2, &along, 1);
    if (b->status) return b->status;
    const gradd_dtype_t wide = gradd_val_type(b, v[0])->dtype;
    v[0] = GRADD_EMIT(b, "Where", inside, v[0], gradd_const_scalar(b, wide, 0));
    gradd_val_t weight =
        gradd_reshape_to(b, gradd_cast(b, e->in[WEIGHT], wide), each.dims, each.rank);
    v[0] = GRADD_EMIT(b, "Mul", v[0], weight);
    v[1] = gradd_const_i64s(b, &behind, 1);
    e->out[0] = gradd_cast(b, gradd_emit_attrs(b, "ReduceSum", v, 2, &keep, 1), x.dtype);
    return b->status;
}

static int parts_taps(const gradd_infer_t *c) {
    return gradd_parts_of_tasks(c, gradd_type_count(&c->out[0]) / BLOCK);
}

static void cost_taps(const gradd_infer_t *c, gradd_cost_t *cost) {
    cost->flops = 2.0 * (double)gradd_type_count(&c->out[0]) * (double)c->in[WEIGHT].type.dims[1];
}

GRADD_OPS(taps,
          GRADD_OP("Taps", "com.gradd", 1, (COUNT, COUNT), (1, 1), .flags = GRADD_OP_INTERNAL,
                   .no_diff = 1 << WEIGHT, .types = {GRADD_T_FLOAT, GRADD_DTB(I64), GRADD_T_FLOAT},
                   .attrs = GRADD_ATTR_LIST({"axis", GRADD_ATTR_INT, false}), .infer = infer_taps,
                   .grad = grad_taps, .expand = GRADD_EXPANSION(expand_taps),
                   .ref = GRADD_REF(compute_taps_ref),
                   .cases = GRADD_CASES(
                       {.text = "f32[2,5] i64[3,2]={0,2,1,3,3,2} f32[3,3]={1,2,0,0.5,1,-1,2,3,0}"},
                       {.text = "f32[2,5,3] i64[2,2]={0,2,2,3} f32[2,3]={1,2,0,0.5,1,-1} | axis=1"},
                       {.text = "f32[4,70] i64[2,2]={1,1,4,0} f32[2,1]={1,2} | axis=0"},
                       {.text = "f32[0,5] i64[1,2]={0,5} f32[1,5]={1,1,1,1,1}"},
                       {.text = "f32[2,0] i64[1,2]={0,0} f32[1,1]={1}"},
                       {.text = "f32[2,3] i64[0,2]={} f32[0,1]={}", .grad_tol = -1},
                       {.text = "f32[3]={1,inf,nan} i64[3,2]={0,1,0,2,2,1} f32[3,2]={1,0,1,1,1,0}",
                        .grad_tol = -1},
                       {.text = "f32[40,6,200] i64[4,2]={0,2,1,2,2,3,4,2} "
                                "f32[4,3]={1,2,0,1,1,0,0.5,1,-1,2,3,0} | axis=-2",
                        .grad_tol = -1})));

GRADD_KERNELS(cpu, taps,
              GRADD_KERNEL("Taps", "loop",
                           .types = {GRADD_T_F32_F64, GRADD_DTB(I64), GRADD_T_F32_F64},
                           .compute = compute_taps, .parts = parts_taps, .cost = cost_taps));
