/* Operators that give the same bytes another shape: Reshape, Squeeze, Unsqueeze, Flatten, Identity
 * and com.gradd StopGradient.
 *
 * y has the elements of x in the same order, so a planner lets y alias x and none of these kernels
 * runs; where aliasing is impossible (graph outputs, inputs owned by the client) compute() copies.
 * Nothing is saved for backward: dx = dy reshaped to the shape of x. StopGradient passes its input
 * on and no gradient back; the capture puts it where the model detached a value.
 */
#include <string.h>

#include "kernels/contract/kernel.h"
#include "kernels/contract/op.h"
#include "kernels/cpu/copy.h"
#include "kernels/cpu/parts.h"
#include "kernels/describe/cost.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rowwise.h"
#include "kernels/rules/rules.h"

/* ---- kernel ---------------------------------------------------------------------------------- */

static gradd_status_t compute_view(const gradd_launch_t *r) {
    const gradd_range_t some = gradd_part_of(r, gradd_type_bytes(&r->out[0].type));
    gradd_copy_bytes((char *)r->out[0].data + some.from, (const char *)r->in[0].data + some.from,
                     (size_t)(some.to - some.from));
    return GRADD_OK;
}

/* ---- shape rules ----------------------------------------------------------------------------- */

/* The entry -1 of a tensor without elements, as torch's flatten has it: what makes the products of
 * all sizes but zeros equal. The entry itself is 0 where the input has more zeros. -1: none fits.
 */
static int64_t open_of_nothing(const gradd_type_t *in, const gradd_type_t *out, int open) {
    int64_t have = 1, given = 1;
    int zeros = 0;
    for (int i = 0; i < in->rank; i++) {
        zeros += !in->dims[i];
        if (__builtin_mul_overflow(have, in->dims[i] ? in->dims[i] : 1, &have)) return -1;
    }
    for (int i = 0; i < out->rank; i++) {
        if (i == open) continue;
        zeros -= !out->dims[i];
        if (__builtin_mul_overflow(given, out->dims[i] ? out->dims[i] : 1, &given)) return -1;
    }
    if (zeros > 0) return 0;
    return have % given ? -1 : have / given;
}

static gradd_status_t infer_reshape(gradd_infer_t *c) {
    const gradd_type_t *in = &c->in[0].type;
    int64_t want[GRADD_MAX_RANK];
    int n, open = -1;
    GRADD_TRY(gradd_known_i64s(c, 1, want, GRADD_MAX_RANK, &n));
    bool allow_zero = gradd_attr_int(c->attrs, "allowzero", 0);
    gradd_type_t out = {.dtype = in->dtype, .rank = n};
    int64_t known = 1;
    for (int i = 0; i < n; i++) {
        if (want[i] == -1) {
            if (open >= 0) return GRADD_FAIL(GRAPH, "shape has two entries -1: %d and %d", open, i);
            open = i;
            continue;
        }
        if (want[i] == 0 && !allow_zero) {
            if (i >= in->rank)
                return GRADD_FAIL(GRAPH, "shape entry %d is 0 but the input has rank %d", i,
                                  in->rank);
            want[i] = in->dims[i];
        }
        if (want[i] < 0) return GRADD_FAIL(GRAPH, "shape entry %d is %lld", i, (long long)want[i]);
        out.dims[i] = want[i];
        if (__builtin_mul_overflow(known, want[i], &known))
            return GRADD_FAIL(LIMIT, "the shape's element count overflows");
    }
    int64_t count = gradd_type_count(in);
    if (open >= 0 && known > 0 && count % known == 0)
        out.dims[open] = count / known;
    else if (open >= 0)
        known = out.dims[open] = known || count ? -1 : open_of_nothing(in, &out, open);
    if (open >= 0 ? known < 0 : known != count) {
        char text[GRADD_TYPE_TEXT], shape[GRADD_TYPE_TEXT];
        return GRADD_FAIL(GRAPH, "%s cannot be reshaped to %s", gradd_type_format(in, text),
                          gradd_type_format(&out, shape));
    }
    c->out[0] = out;
    return GRADD_OK;
}

static gradd_status_t infer_squeeze(gradd_infer_t *c) {
    const gradd_type_t *in = &c->in[0].type;
    bool drop[GRADD_MAX_RANK];
    bool given =
        gradd_attr_find(c->attrs, "axes") || (c->n_in > 1 && c->in[1].type.dtype != GRADD_DT_NONE);
    if (given) {
        GRADD_TRY(gradd_known_axes(c, 1, in->rank, drop));
    } else {
        for (int i = 0; i < in->rank; i++)
            drop[i] = in->dims[i] == 1;
    }
    gradd_type_t out = {.dtype = in->dtype};
    for (int i = 0; i < in->rank; i++) {
        if (!drop[i])
            out.dims[out.rank++] = in->dims[i];
        else if (in->dims[i] != 1)
            return GRADD_FAIL(GRAPH, "axis %d has size %lld, not 1", i, (long long)in->dims[i]);
    }
    c->out[0] = out;
    return GRADD_OK;
}

static gradd_status_t infer_unsqueeze(gradd_infer_t *c) {
    const gradd_type_t *in = &c->in[0].type;
    const gradd_attr_t *attr = gradd_attr_find(c->attrs, "axes");
    int64_t axes[GRADD_MAX_RANK];
    int n = 0;
    if (c->n_in > 1) {
        GRADD_TRY(gradd_known_i64s(c, 1, axes, GRADD_MAX_RANK, &n));
    } else if (attr && attr->n <= GRADD_MAX_RANK) {
        n = (int)attr->n;
        memcpy(axes, attr->ints, sizeof axes[0] * attr->n);
    } else {
        return GRADD_FAIL(GRAPH, "axes are missing");
    }
    int rank = in->rank + n;
    if (rank > GRADD_MAX_RANK)
        return GRADD_FAIL(LIMIT, "rank %d is above %d", rank, GRADD_MAX_RANK);
    bool added[GRADD_MAX_RANK] = {false};
    for (int i = 0; i < n; i++) {
        int axis;
        GRADD_TRY(gradd_axis(axes[i], rank, false, &axis));
        if (added[axis]) return GRADD_FAIL(GRAPH, "axis %d is repeated", axis);
        added[axis] = true;
    }
    gradd_type_t out = {.dtype = in->dtype, .rank = rank};
    for (int i = 0, k = 0; i < rank; i++)
        out.dims[i] = added[i] ? 1 : in->dims[k++];
    c->out[0] = out;
    return GRADD_OK;
}

static gradd_status_t infer_flatten(gradd_infer_t *c) {
    const gradd_type_t *in = &c->in[0].type;
    int axis;
    /* axis counts from the end as for any other operator: -1 is the last axis, not "after it" */
    int64_t given = gradd_attr_int(c->attrs, "axis", 1);
    GRADD_TRY(gradd_axis(given, in->rank, given >= 0, &axis));
    gradd_type_t out = {
        .dtype = in->dtype, .rank = 2, .dims = {1, 1}
    };
    for (int i = 0; i < in->rank; i++)
        out.dims[i >= axis] *= in->dims[i];
    c->out[0] = out;
    return GRADD_OK;
}

/* ---- gradient rules -------------------------------------------------------------------------- */

static gradd_status_t grad_view(gradd_grad_t *g) {
    if (g->need[0]) g->din[0] = gradd_reshape_as(g->b, g->dout[0], g->in[0]);
    return g->b->status;
}

/* ---- rows ------------------------------------------------------------------------------------ */

#define AXES_TYPES {0xffffffffu, GRADD_T_INDEX}

GRADD_OPS(
    reshape,
    GRADD_OP("Reshape", "", 5, (2, 2), (1, 1), .flags = GRADD_OP_VIEW, .types = AXES_TYPES,
             .attrs = GRADD_ATTR_LIST({"allowzero", GRADD_ATTR_INT, false}), .infer = infer_reshape,
             .rowwise = gradd_rowwise_view, .grad = grad_view, .ref = GRADD_REF(compute_view),
             .cases = GRADD_CASES({.text = "f32[2,3,4] i64[2]={6,4}"},
                                  {.text = "f32[2,3,4] i64[2]={0,-1}"},
                                  {.text = "f32[] i64[2]={1,-1}"}, {.text = "f32[1,1] i64[0]={}"},
                                  {.text = "f32[0,3] i64[2]={3,0} | allowzero=1"},
                                  {.text = "i64[6] i64[3]={3,1,2}"},
                                  {.text = "bool[4] i64[1]={-1}"})),
    GRADD_OP("Squeeze", "", 1, (1, 2), (1, 1), .flags = GRADD_OP_VIEW, .types = AXES_TYPES,
             .attrs = GRADD_ATTR_LIST({"axes", GRADD_ATTR_INTS, false}), .infer = infer_squeeze,
             .rowwise = gradd_rowwise_view, .grad = grad_view, .ref = GRADD_REF(compute_view),
             .cases = GRADD_CASES({.text = "f32[1,3,1] i64[1]={0}"},
                                  {.text = "f32[1,3,1] i64[2]={-1,0}"}, {.text = "f32[1,3,1]"},
                                  {.text = "f32[1,3,1] -"}, {.text = "f32[1,3,1] | axes=[2]"},
                                  {.text = "i64[1] i64[1]={0}"})),
    GRADD_OP("Unsqueeze", "", 1, (1, 2), (1, 1), .flags = GRADD_OP_VIEW, .types = AXES_TYPES,
             .attrs = GRADD_ATTR_LIST({"axes", GRADD_ATTR_INTS, false}), .infer = infer_unsqueeze,
             .rowwise = gradd_rowwise_view, .grad = grad_view, .ref = GRADD_REF(compute_view),
             .cases = GRADD_CASES({.text = "f32[3,2] i64[1]={1}"}, {.text = "f32[3] i64[2]={-1,0}"},
                                  {.text = "f32[] i64[1]={0}"}, {.text = "f32[3,2] | axes=[1]"},
                                  {.text = "bool[3] i64[1]={-1}"})),
    GRADD_OP("Flatten", "", 1, (1, 1), (1, 1), .flags = GRADD_OP_VIEW,
             .attrs = GRADD_ATTR_LIST({"axis", GRADD_ATTR_INT, false}), .infer = infer_flatten,
             .rowwise = gradd_rowwise_view, .grad = grad_view, .ref = GRADD_REF(compute_view),
             .cases = GRADD_CASES({.text = "f32[2,3,4]"}, {.text = "f32[2,3,4] | axis=0"},
                                  {.text = "f32[2,3,4] | axis=3"},
                                  {.text = "f32[2,3,4] | axis=-1"})),
    GRADD_OP("Identity", "", 1, (1, 1), (1, 1), .flags = GRADD_OP_VIEW, .infer = gradd_infer_same,
             .rowwise = gradd_rowwise_map, .grad = grad_view, .ref = GRADD_REF(compute_view),
             .cases = GRADD_CASES({.text = "f32[2,3]"}, {.text = "i64[3]"}, {.text = "f32[]"},
                                  {.text = "f32[50001]", .grad_tol = -1}, {.text = "bool[17]"},
                                  {.text = "f32[0,2]"})),
    GRADD_OP("StopGradient", "com.gradd", 1, (1, 1), (1, 1),
             .flags = GRADD_OP_VIEW | GRADD_OP_NO_GRAD, .infer = gradd_infer_same,
             .rowwise = gradd_rowwise_map, .ref = GRADD_REF(compute_view),
             .cases = GRADD_CASES({.text = "f32[2,3]"}, {.text = "f32[]"})));

GRADD_KERNELS(cpu, reshape,
              GRADD_KERNEL("Reshape", "loop", .compute = compute_view, .cost = gradd_cost_move),
              GRADD_KERNEL("Squeeze", "loop", .compute = compute_view, .cost = gradd_cost_move),
              GRADD_KERNEL("Unsqueeze", "loop", .compute = compute_view, .cost = gradd_cost_move),
              GRADD_KERNEL("Flatten", "loop", .compute = compute_view, .cost = gradd_cost_move),
              GRADD_KERNEL("Identity", "loop", .compute = compute_view, .parts = gradd_copy_parts,
                           .makes_parts = true, .cost = gradd_cost_move),
              GRADD_KERNEL("StopGradient", "loop", .compute = compute_view,
                           .cost = gradd_cost_move));
