/* Slice: y = x[start:end:step] along some axes, steps of either sign; and its gradient.
 *
 * starts, ends, axes and steps must be known when the graph is compiled (they set the shape). The
 * gradient places dy into zeros: SliceGrad, an internal operator that carries the normalised
 * geometry in attributes (dims of x, one start and one step per axis). Nothing else is saved.
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/contract/kernel.h"
#include "kernels/contract/op.h"
#include "kernels/cpu/copy.h"
#include "kernels/cpu/parts.h"
#include "kernels/describe/cost.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

typedef struct window_s {
    int64_t start[GRADD_MAX_RANK], step[GRADD_MAX_RANK], size[GRADD_MAX_RANK];
} window_t;

static gradd_status_t read_list(const gradd_view_t *in, int n_in, int input, int64_t *out,
                                int *out_n) {
    if (input >= n_in || in[input].type.dtype == GRADD_DT_NONE) {
        *out_n = -1;
        return GRADD_OK;
    }
    gradd_infer_t c = {.n_in = n_in, .in = in};
    return gradd_known_i64s(&c, input, out, GRADD_MAX_RANK, out_n);
}

/* ONNX clamps: a positive step to [0, n], a negative one to [0, n-1] and [-1, n-1]. */
static void clamp_axis(int64_t n, int64_t start, int64_t end, int64_t step, int64_t *out_start,
                       int64_t *out_size) {
    int64_t low = step > 0 ? 0 : -1, high = step > 0 ? n : n - 1, size = 0;
    if (start < 0) start = start < -n ? low : start + n;
    if (end < 0) end = end < -n ? low : end + n;
    if (step < 0 && start < 0) start = n ? 0 : -1;
    start = start > high ? high : start;
    end = end > high ? high : end;
    if (step > 0 && end > start) size = 1 + (end - start - 1) / step;
    if (step < 0 && end < start) size = 1 + (start - end - 1) / -(step == INT64_MIN ? -1 : step);
    if (step == INT64_MIN && size) size = 1;
    *out_start = size ? start : 0;
    *out_size = size;
}

static gradd_status_t read_window(const gradd_view_t *in, int n_in, window_t *w) {
    const gradd_type_t *x = &in[0].type;
    int64_t starts[GRADD_MAX_RANK], ends[GRADD_MAX_RANK], axes[GRADD_MAX_RANK],
        steps[GRADD_MAX_RANK];
    int n, n_ends, n_axes, n_steps;
    unsigned seen = 0;
    GRADD_TRY(read_list(in, n_in, 1, starts, &n));
    GRADD_TRY(read_list(in, n_in, 2, ends, &n_ends));
    GRADD_TRY(read_list(in, n_in, 3, axes, &n_axes));
    GRADD_TRY(read_list(in, n_in, 4, steps, &n_steps));
    if (n_ends != n || (n_axes >= 0 && n_axes != n) || (n_steps >= 0 && n_steps != n))
        return GRADD_FAIL(GRAPH, "starts, ends, axes and steps differ in length");
    for (int i = 0; i < x->rank; i++)
        w->start[i] = 0, w->step[i] = 1, w->size[i] = x->dims[i];
    for (int i = 0; i < n; i++) {
        int axis;
        GRADD_TRY(gradd_axis(n_axes >= 0 ? axes[i] : i, x->rank, false, &axis));
        int64_t step = n_steps >= 0 ? steps[i] : 1;
        if (step == 0) return GRADD_FAIL(GRAPH, "the step of axis %d is 0", axis);
        if (seen >> axis & 1) return GRADD_FAIL(GRAPH, "axis %d is repeated", axis);
        seen |= 1u << axis;
        w->step[axis] = step;
        clamp_axis(x->dims[axis], starts[i], ends[i], step, &w->start[axis], &w->size[axis]);
        /* with at most one element the step is never taken; 1 keeps it harmless */
        if (w->size[axis] <= 1) w->step[axis] = 1;
    }
    return GRADD_OK;
}

/* ---- kernels --------------------------------------------------------------------------------- */

gradd_status_t gradd_move_of_slice(const gradd_launch_t *r, gradd_move_t *out) {
    const gradd_type_t *x = &r->in[0].type;
    int64_t stride[GRADD_MAX_RANK];
    window_t w;
    GRADD_TRY(read_window(r->in, r->n_in, &w));
    *out = (gradd_move_t){.box = {.rank = x->rank}};
    gradd_copy_strides(x, stride);
    gradd_copy_strides(&r->out[0].type, out->box.to);
    for (int i = 0; i < x->rank; i++) {
        out->box.dims[i] = w.size[i];
        out->box.from[i] = stride[i] * w.step[i];
        out->from += stride[i] * w.start[i];
    }
    return GRADD_OK;
}

static gradd_status_t slice(const gradd_launch_t *r, gradd_copy_fn_t copy) {
    gradd_move_t move;
    GRADD_TRY(gradd_move_of_slice(r, &move));
    gradd_copy_move(&move, r, copy);
    return GRADD_OK;
}

static gradd_status_t compute_slice(const gradd_launch_t *r) {
    return slice(r, gradd_copy_strided);
}

static gradd_status_t ref_slice(const gradd_launch_t *r) {
    return slice(r, gradd_copy_plain);
}

gradd_status_t gradd_move_of_slice_grad(const gradd_launch_t *r, gradd_move_t *out) {
    const gradd_type_t *dx = &r->out[0].type, *dy = &r->in[0].type;
    const int64_t *start = gradd_attr_find(r->attrs, "starts")->ints;
    const int64_t *step = gradd_attr_find(r->attrs, "steps")->ints;
    int64_t stride[GRADD_MAX_RANK];
    *out = (gradd_move_t){.box = {.rank = dx->rank}};
    gradd_copy_strides(dx, stride);
    gradd_copy_strides(dy, out->box.from);
    for (int i = 0; i < dx->rank; i++) {
        out->box.dims[i] = dy->dims[i];
        out->box.to[i] = stride[i] * step[i];
        out->to += stride[i] * start[i];
    }
    return GRADD_OK;
}

static void zero_part(const gradd_launch_t *r) {
    const gradd_range_t some = gradd_part_of(r, gradd_type_bytes(&r->out[0].type));
    gradd_copy_zero((char *)r->out[0].data + some.from, (size_t)(some.to - some.from));
}

static gradd_status_t slice_grad(const gradd_launch_t *r, gradd_copy_fn_t copy) {
    gradd_move_t move;
    GRADD_TRY(gradd_move_of_slice_grad(r, &move));
    /* of several parts the first ones clear, the others copy */
    const int clears = r->parts / 2;
    gradd_launch_t clearing = *r, copying = *r;
    if (clears) clearing.parts = clears, copying.parts -= clears, copying.part -= clears;
    if (!clears || r->part < clears) zero_part(&clearing);
    if (copying.part >= 0) gradd_copy_move(&move, &copying, copy);
    return GRADD_OK;
}

static gradd_status_t compute_slice_grad(const gradd_launch_t *r) {
    return slice_grad(r, gradd_copy_strided);
}

static gradd_status_t ref_slice_grad(const gradd_launch_t *r) {
    return slice_grad(r, gradd_copy_plain);
}

/* ---- shape rules ----------------------------------------------------------------------------- */

static gradd_status_t infer_slice(gradd_infer_t *c) {
    window_t w;
    GRADD_TRY(read_window(c->in, c->n_in, &w));
    c->out[0] = c->in[0].type;
    memcpy(c->out[0].dims, w.size, sizeof w.size[0] * (size_t)c->out[0].rank);
    return GRADD_OK;
}

static gradd_status_t infer_slice_grad(gradd_infer_t *c) {
    const gradd_type_t *dy = &c->in[0].type;
    const gradd_attr_t *dims = gradd_attr_find(c->attrs, "dims");
    const gradd_attr_t *start = gradd_attr_find(c->attrs, "starts");
    const gradd_attr_t *step = gradd_attr_find(c->attrs, "steps");
    size_t rank = (size_t)dy->rank;
    if (dims->n != rank || start->n != rank || step->n != rank)
        return GRADD_FAIL(GRAPH, "dims, starts and steps must have %zu entries", rank);
    gradd_type_t out = {.dtype = dy->dtype, .rank = dy->rank};
    for (size_t i = 0; i < rank; i++) {
        int64_t last = start->ints[i] + (dy->dims[i] - 1) * step->ints[i];
        out.dims[i] = dims->ints[i];
        if (dy->dims[i] && (start->ints[i] < 0 || start->ints[i] >= out.dims[i] || last < 0 ||
                            last >= out.dims[i] || !step->ints[i]))
            return GRADD_FAIL(GRAPH, "axis %zu: the window leaves the tensor", i);
    }
    c->out[0] = out;
    return GRADD_OK;
}

/* ---- gradient rules -------------------------------------------------------------------------- */

static gradd_status_t grad_slice(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    if (!g->need[0]) return GRADD_OK;
    gradd_view_t in[5] = {{.data = NULL}};
    window_t w;
    for (int i = 0; i < g->n_in; i++) {
        if (g->in[i] == GRADD_NONE) continue;
        in[i].type = *gradd_val_type(b, g->in[i]);
        if (i) in[i].data = (void *)b->data(b, g->in[i]);
    }
    GRADD_TRY(read_window(in, g->n_in, &w));
    size_t rank = (size_t)in[0].type.rank;
    gradd_attr_t attrs[3] = {gradd_make_ints("dims", in[0].type.dims, rank),
                             gradd_make_ints("starts", w.start, rank),
                             gradd_make_ints("steps", w.step, rank)};
    g->din[0] = gradd_emit_attrs(b, "SliceGrad", g->dout, 1, attrs, 3);
    return b->status;
}

/* Linear: the gradient of placing into zeros is cutting out again. */
static gradd_status_t grad_slice_grad(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    const int64_t *start = gradd_attr_find(g->attrs, "starts")->ints;
    const int64_t *step = gradd_attr_find(g->attrs, "steps")->ints;
    gradd_type_t dy = *gradd_val_type(b, g->in[0]);
    int64_t ends[GRADD_MAX_RANK], axes[GRADD_MAX_RANK];
    for (int i = 0; i < dy.rank; i++) {
        axes[i] = i;
        ends[i] = start[i] + dy.dims[i] * step[i];
        if (ends[i] < 0) ends[i] = INT64_MIN / 2; /* before the first element */
    }
    if (g->need[0])
        g->din[0] =
            GRADD_EMIT(b, "Slice", g->dout[0], gradd_const_i64s(b, start, dy.rank),
                       gradd_const_i64s(b, ends, dy.rank), gradd_const_i64s(b, axes, dy.rank),
                       gradd_const_i64s(b, step, dy.rank));
    return b->status;
}

/* ---- expansion ------------------------------------------------------------------------------- */

/* The elements of v in zeros, each `step` behind the one before along an axis of n elements. */
static gradd_status_t spread(gradd_builder_t *b, int axis, int64_t n, const int64_t *start_step,
                             gradd_val_t *v) {
    const gradd_type_t type = *gradd_val_type(b, *v);
    const gradd_attr_t attr = gradd_make_int("axis", axis);
    const int64_t count = type.dims[axis];
    gradd_type_t places = {.dtype = GRADD_DT_I64, .rank = type.rank}, wide = type;
    for (int i = 0; i < type.rank; i++)
        places.dims[i] = i == axis ? count : 1;
    wide.dims[axis] = n;
    int64_t *place = malloc(sizeof *place * (size_t)(count + 1));
    if (!place) return GRADD_FAIL(NOMEM, "no memory for %lld places", (long long)count);
    for (int64_t i = 0; i < count; i++)
        place[i] = start_step[0] + i * start_step[1];
    gradd_val_t in[3] = {gradd_filled(b, &wide, 0), b->constant(b, &places, place), *v};
    free(place);
    in[1] = GRADD_EMIT(b, "Expand", in[1], gradd_const_i64s(b, type.dims, type.rank));
    *v = gradd_emit_attrs(b, "ScatterElements", in, 3, &attr, 1);
    return b->status;
}

static gradd_status_t expand_slice_grad(gradd_expand_t *e) {
    gradd_builder_t *b = e->b;
    const int64_t *dims = gradd_attr_find(e->attrs, "dims")->ints;
    const int64_t *start = gradd_attr_find(e->attrs, "starts")->ints;
    const int64_t *step = gradd_attr_find(e->attrs, "steps")->ints;
    const gradd_type_t dy = *gradd_val_type(b, e->in[0]);
    int64_t pads[2 * GRADD_MAX_RANK] = {0};
    gradd_val_t v = e->in[0];
    for (int i = 0; i < dy.rank; i++) {
        if (step[i] != 1) {
            GRADD_TRY(spread(b, i, dims[i], (int64_t[]){start[i], step[i]}, &v));
        } else {
            pads[i] = start[i];
            pads[dy.rank + i] = dims[i] - start[i] - dy.dims[i];
        }
    }
    e->out[0] = GRADD_EMIT(b, "Pad", v, gradd_const_i64s(b, pads, 2 * dy.rank));
    return b->status;
}

/* ---- rows ------------------------------------------------------------------------------------ */

GRADD_OPS(
    slice,
    GRADD_OP(
        "Slice", "", 10, (3, 5), (1, 1), .types = {0xffffffffu, GRADD_T_INDEX},
        .infer = infer_slice, .grad = grad_slice, .ref = GRADD_REF(ref_slice),
        .cases = GRADD_CASES(
            {.text = "f32[4,5] i64[1]={1} i64[1]={3}"},
            {.text = "f32[4,5] i64[1]={-3} i64[1]={100} i64[1]={1}"},
            {.text = "f32[4,5] i64[2]={0,4} i64[2]={4,-6} i64[2]={0,1} i64[2]={2,-2}"},
            {.text = "f32[4,5] i64[1]={9} i64[1]={-9} i64[1]={-2} i64[1]={-1}"},
            {.text = "f32[4,5] i64[1]={2} i64[1]={2} i64[1]={0}"},
            {.text = "f32[2,3,8] i64[1]={4} i64[1]={9223372036854775807} i64[1]={2}"},
            {.text = "i64[5]={1,2,3,4,5} i32[1]={1} i32[1]={-1}"},
            {.text = "f32[3,4] i64[1]={0} i64[1]={2} - i64[1]={2}"},
            {.text = "bool[4,4] i64[1]={1} i64[1]={4} i64[1]={-1}"},
            {.text = "f32[0,3] i64[1]={0} i64[1]={2} i64[1]={1}"},
            {.text = "f32[6,64] i64[2]={1,8} i64[2]={5,56}", .grad_tol = -1},
            {.text = "i64[150,90] i64[2]={-1,3} i64[2]={-999,80} i64[2]={0,1} i64[2]={-1,1}"})),
    GRADD_OP(
        "SliceGrad", "com.gradd", 1, (1, 1), (1, 1), .flags = GRADD_OP_INTERNAL,
        .attrs = GRADD_ATTR_LIST({"dims", GRADD_ATTR_INTS, true}, {"starts", GRADD_ATTR_INTS, true},
                                 {"steps", GRADD_ATTR_INTS, true}),
        .infer = infer_slice_grad, .grad = grad_slice_grad,
        .expand = GRADD_EXPANSION(expand_slice_grad), .ref = GRADD_REF(ref_slice_grad),
        .cases = GRADD_CASES({.text = "f32[2,3] | dims=[4,5] starts=[1,0] steps=[1,2]"},
                             {.text = "f32[2,3] | dims=[2,7] starts=[0,6] steps=[1,-3]"},
                             {.text = "f32[0,3] | dims=[4,3] starts=[0,0] steps=[1,1]"},
                             {.text = "i64[70,60] | dims=[141,64] starts=[140,4] steps=[-2,1]"},
                             {.text = "f32[2,30,40] | dims=[5,30,48] starts=[3,0,8] steps=[1,1,1]",
                              .grad_tol = -1},
                             {.text = "f32[] | dims=[] starts=[] steps=[]"})));

GRADD_KERNELS(cpu, slice,
              GRADD_KERNEL("Slice", "loop", .compute = compute_slice, .parts = gradd_copy_parts,
                           .cost = gradd_cost_move),
              GRADD_KERNEL("SliceGrad", "loop", .compute = compute_slice_grad,
                           .parts = gradd_copy_parts, .cost = gradd_cost_move));
