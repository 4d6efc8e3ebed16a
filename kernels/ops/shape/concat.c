/* Concat and Split: tensors joined or cut along one axis.
 *
 * Both see a tensor as [outer, axis, inner]; a part is a box of [outer, part, inner] whose rows of
 * part * inner elements are contiguous on both sides. Nothing is saved. The gradient of Concat is a
 * Split (a Slice where only some inputs need one), that of Split a Concat.
 */
#include <string.h>

#include "kernels/contract/kernel.h"
#include "kernels/contract/op.h"
#include "kernels/cpu/copy.h"
#include "kernels/cpu/parts.h"
#include "kernels/describe/cost.h"
#include "kernels/describe/lanes.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rowwise.h"
#include "kernels/rules/rules.h"

/* ---- kernels --------------------------------------------------------------------------------- */

static gradd_status_t next_part(const gradd_launch_t *r, const gradd_type_t *whole,
                                const gradd_type_t *part, int i, gradd_part_t *inout) {
    int axis;
    GRADD_TRY(gradd_axis(gradd_attr_int(r->attrs, "axis", 0), whole->rank, false, &axis));
    const gradd_lanes_t l = gradd_lanes_of(whole, axis);
    const int64_t first = i ? inout->first + inout->width : 0;
    *inout = (gradd_part_t){l.outer, l.inner * part->dims[axis], l.inner * l.n, first};
    return GRADD_OK;
}

gradd_status_t gradd_part_of_concat(const gradd_launch_t *r, int i, gradd_part_t *inout) {
    return next_part(r, &r->out[0].type, &r->in[i].type, i, inout);
}

gradd_status_t gradd_part_of_split(const gradd_launch_t *r, int i, gradd_part_t *inout) {
    return next_part(r, &r->in[0].type, &r->out[i].type, i, inout);
}

static gradd_status_t concat(const gradd_launch_t *r, gradd_copy_fn_t copy) {
    const size_t bytes = gradd_dtype_bytes(r->out[0].type.dtype);
    gradd_part_t part;
    for (int i = 0; i < r->n_in; i++) {
        GRADD_TRY(gradd_part_of_concat(r, i, &part));
        const gradd_range_t some = gradd_part_of(r, part.width);
        const gradd_copy_t job = {
            .rank = 2,
            .dims = {part.outer, some.to - some.from},
            .to = {part.whole, 1                  },
            .from = {part.width, 1                  }
        };
        copy(&job, bytes, (char *)r->out[0].data + (part.first + some.from) * (int64_t)bytes,
             (const char *)r->in[i].data + some.from * (int64_t)bytes);
    }
    return GRADD_OK;
}

static gradd_status_t compute_concat(const gradd_launch_t *r) {
    return concat(r, gradd_copy_strided);
}

static gradd_status_t ref_concat(const gradd_launch_t *r) {
    return concat(r, gradd_copy_plain);
}

static gradd_status_t split(const gradd_launch_t *r, gradd_copy_fn_t copy) {
    const size_t bytes = gradd_dtype_bytes(r->in[0].type.dtype);
    gradd_part_t part;
    for (int i = 0; i < r->n_out; i++) {
        GRADD_TRY(gradd_part_of_split(r, i, &part));
        const gradd_range_t some = gradd_part_of(r, part.width);
        const gradd_copy_t job = {
            .rank = 2,
            .dims = {part.outer, some.to - some.from},
            .to = {part.width, 1                  },
            .from = {part.whole, 1                  }
        };
        if (r->out[i].data)
            copy(&job, bytes, (char *)r->out[i].data + some.from * (int64_t)bytes,
                 (const char *)r->in[0].data + (part.first + some.from) * (int64_t)bytes);
    }
    return GRADD_OK;
}

static gradd_status_t compute_split(const gradd_launch_t *r) {
    return split(r, gradd_copy_strided);
}

static gradd_status_t ref_split(const gradd_launch_t *r) {
    return split(r, gradd_copy_plain);
}

/* ---- shape rules ----------------------------------------------------------------------------- */

static gradd_status_t infer_concat(gradd_infer_t *c) {
    gradd_type_t out = c->in[0].type;
    int axis;
    GRADD_TRY(gradd_axis(gradd_attr_int(c->attrs, "axis", 0), out.rank, false, &axis));
    for (int i = 1; i < c->n_in; i++) {
        gradd_type_t other = c->in[i].type;
        if (other.dtype != out.dtype || other.rank != out.rank)
            return GRADD_FAIL(GRAPH, "input %d differs from input 0 in element type or rank", i);
        if (__builtin_add_overflow(out.dims[axis], other.dims[axis], &out.dims[axis]))
            return GRADD_FAIL(LIMIT, "the joined axis overflows");
        other.dims[axis] = out.dims[axis];
        if (!gradd_type_same_shape(&other, &out))
            return GRADD_FAIL(GRAPH, "input %d differs from input 0 outside axis %d", i, axis);
    }
    c->out[0] = out;
    return GRADD_OK;
}

/* Sizes of equal parts: the last one is smaller if the axis does not divide (opset 18). */
static gradd_status_t equal_parts(const gradd_infer_t *c, int64_t extent, int64_t *out_sizes) {
    int64_t n = gradd_attr_int(c->attrs, "num_outputs", c->n_out);
    if (n != c->n_out)
        return GRADD_FAIL(GRAPH, "num_outputs is %lld but the node has %d outputs", (long long)n,
                          c->n_out);
    int64_t size = (extent + n - 1) / n;
    if (extent % n && !gradd_attr_find(c->attrs, "num_outputs"))
        return GRADD_FAIL(GRAPH, "an axis of %lld does not divide into %lld equal parts",
                          (long long)extent, (long long)n);
    for (int64_t i = 0; i < n; i++) {
        int64_t left = extent - i * size;
        out_sizes[i] = left < 0 ? 0 : left < size ? left : size;
    }
    return GRADD_OK;
}

static gradd_status_t read_sizes(const gradd_infer_t *c, int64_t extent, int64_t *out_sizes) {
    const gradd_attr_t *attr = gradd_attr_find(c->attrs, "split");
    int n = 0;
    if (c->n_in > 1 && c->in[1].type.dtype != GRADD_DT_NONE) {
        GRADD_TRY(gradd_known_i64s(c, 1, out_sizes, GRADD_OP_MAX_OUT, &n));
    } else if (attr && attr->n <= GRADD_OP_MAX_OUT) {
        n = (int)attr->n;
        memcpy(out_sizes, attr->ints, sizeof out_sizes[0] * attr->n);
    } else {
        return equal_parts(c, extent, out_sizes);
    }
    int64_t left = extent;
    for (int i = 0; i < n; i++) {
        if (out_sizes[i] < 0 || out_sizes[i] > left)
            return GRADD_FAIL(GRAPH, "part %d of %lld does not fit an axis of %lld", i,
                              (long long)out_sizes[i], (long long)extent);
        left -= out_sizes[i];
    }
    if (left || n != c->n_out)
        return GRADD_FAIL(GRAPH, "%d parts leave %lld of %lld, for %d outputs", n, (long long)left,
                          (long long)extent, c->n_out);
    return GRADD_OK;
}

static gradd_status_t infer_split(gradd_infer_t *c) {
    const gradd_type_t *in = &c->in[0].type;
    int64_t sizes[GRADD_OP_MAX_OUT] = {0};
    int axis;
    GRADD_TRY(gradd_axis(gradd_attr_int(c->attrs, "axis", 0), in->rank, false, &axis));
    GRADD_TRY(read_sizes(c, in->dims[axis], sizes));
    for (int i = 0; i < c->n_out; i++) {
        c->out[i] = *in;
        c->out[i].dims[axis] = sizes[i];
    }
    return GRADD_OK;
}

/* ---- gradient rules -------------------------------------------------------------------------- */

/* The part [first, first + size) of dy along axis. */
static gradd_val_t cut_out(gradd_builder_t *b, gradd_val_t dy, int64_t axis, int64_t first,
                           int64_t size) {
    int64_t end = first + size;
    return GRADD_EMIT(b, "Slice", dy, gradd_const_i64s(b, &first, 1), gradd_const_i64s(b, &end, 1),
                      gradd_const_i64s(b, &axis, 1));
}

static gradd_status_t grad_concat(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    gradd_val_t dy = g->dout[0];
    int64_t sizes[GRADD_OP_MAX_IN];
    int axis, needed = 0;
    GRADD_TRY(
        gradd_axis(gradd_attr_int(g->attrs, "axis", 0), gradd_val_type(b, dy)->rank, false, &axis));
    for (int i = 0; i < g->n_in; i++) {
        sizes[i] = gradd_val_type(b, g->in[i])->dims[axis];
        needed += g->need[i];
    }
    if (needed == g->n_in && !b->status) {
        gradd_attr_t attr = gradd_make_int("axis", axis);
        gradd_val_t in[2] = {dy, gradd_const_i64s(b, sizes, g->n_in)};
        if (!b->status)
            b->status = b->emit(b, &(gradd_emit_t){"Split", in, 2, &attr, 1}, g->din, g->n_in);
        return b->status;
    }
    int64_t first = 0;
    for (int i = 0; i < g->n_in; i++) {
        if (g->need[i]) g->din[i] = cut_out(b, dy, axis, first, sizes[i]);
        first += sizes[i];
    }
    return b->status;
}

static gradd_status_t grad_split(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    if (!g->need[0]) return GRADD_OK;
    gradd_val_t parts[GRADD_OP_MAX_OUT + 1];
    int axis, n = g->n_out;
    gradd_type_t in = *gradd_val_type(b, g->in[0]);
    GRADD_TRY(gradd_axis(gradd_attr_int(g->attrs, "axis", 0), in.rank, false, &axis));
    for (int i = 0; i < n; i++)
        parts[i] = g->dout[i] != GRADD_NONE ? g->dout[i] : gradd_zeros_like(b, g->output(g, i));
    gradd_attr_t attr = gradd_make_int("axis", axis);
    g->din[0] = gradd_emit_attrs(b, "Concat", parts, n, &attr, 1);
    return b->status;
}

/* ---- rows ------------------------------------------------------------------------------------ */

GRADD_OPS(
    concat,
    GRADD_OP("Concat", "", 4, (1, GRADD_OP_MAX_IN), (1, 1),
             .attrs = GRADD_ATTR_LIST({"axis", GRADD_ATTR_INT, true}), .infer = infer_concat,
             .rowwise = gradd_rowwise_join, .grad = grad_concat, .ref = GRADD_REF(ref_concat),
             .cases = GRADD_CASES({.text = "f32[2,3] f32[2,1] f32[2,4] | axis=1"},
                                  {.text = "f32[2,3] f32[1,3] | axis=-2"},
                                  {.text = "f32[3] | axis=0"},
                                  {.text = "i64[1] i64[2]={3,4} i64[0]={} | axis=0"},
                                  {.text = "f32[2,3,4] f32[2,2,4] | axis=1"},
                                  {.text = "bool[1,2] bool[1,3] | axis=1"},
                                  {.text = "f32[3,16] f32[3,0] f32[3,8] | axis=1", .grad_tol = -1},
                                  {.text = "i64[90,70] i64[90,31] | axis=1"})),
    GRADD_OP(
        "Split", "", 2, (1, 2), (1, GRADD_OP_MAX_OUT), .types = {0xffffffffu, GRADD_T_INDEX},
        .attrs = GRADD_ATTR_LIST({"axis", GRADD_ATTR_INT, false}, {"split", GRADD_ATTR_INTS, false},
                                 {"num_outputs", GRADD_ATTR_INT, false}),
        .infer = infer_split, .rowwise = gradd_rowwise_split, .grad = grad_split,
        .ref = GRADD_REF(ref_split),
        .cases = GRADD_CASES({.text = "f32[2,6] i64[2]={4,2} | axis=1 -> 2"},
                             {.text = "f32[2,6] i64[3]={1,0,5} | axis=-1 -> 3"},
                             {.text = "f32[7,2] | num_outputs=3 -> 3"},
                             {.text = "f32[2,4,3] | axis=1 -> 2"},
                             {.text = "f32[2,4,3] | axis=1 split=[3,1] -> 2"},
                             {.text = "i64[6] i64[2]={4,2} -> 2"},
                             {.text = "f32[5,48] i64[3]={8,24,16} | axis=1 -> 3", .grad_tol = -1},
                             {.text = "i64[90,101] i64[2]={60,41} | axis=1 -> 2"},
                             {.text = "f32[0,4] | axis=1 -> 2"})));

GRADD_KERNELS(cpu, concat,
              GRADD_KERNEL("Concat", "loop", .compute = compute_concat, .parts = gradd_copy_parts,
                           .cost = gradd_cost_move),
              GRADD_KERNEL("Split", "loop", .compute = compute_split, .parts = gradd_copy_parts,
                           .cost = gradd_cost_move));
