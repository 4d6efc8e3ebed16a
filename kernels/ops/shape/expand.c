/* Expand: numpy broadcasting of x to a shape; Tile: x repeated along its axes.
 *
 * Both are one strided copy: a repeated axis has stride 0 on the source side. Nothing is saved; the
 * gradient sums the repetitions: dx = reduce_to(dy) for Expand, and for Tile the sum over the
 * repeat axes of dy seen as [r0, d0, r1, d1, ...].
 */
#include <string.h>

#include "kernels/contract/kernel.h"
#include "kernels/contract/op.h"
#include "kernels/cpu/copy.h"
#include "kernels/describe/cost.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

/* ---- kernels --------------------------------------------------------------------------------- */

gradd_status_t gradd_move_of_expand(const gradd_launch_t *r, gradd_move_t *out) {
    const gradd_type_t *x = &r->in[0].type, *y = &r->out[0].type;
    int64_t stride[GRADD_MAX_RANK];
    int lead = y->rank - x->rank;
    *out = (gradd_move_t){.box = {.rank = y->rank}};
    gradd_copy_strides(x, stride);
    gradd_copy_strides(y, out->box.to);
    for (int i = 0; i < y->rank; i++) {
        out->box.dims[i] = y->dims[i];
        out->box.from[i] = i < lead || x->dims[i - lead] == 1 ? 0 : stride[i - lead];
    }
    return GRADD_OK;
}

gradd_status_t gradd_move_of_tile(const gradd_launch_t *r, gradd_move_t *out) {
    const gradd_type_t *x = &r->in[0].type, *y = &r->out[0].type;
    int64_t from[GRADD_MAX_RANK], to[GRADD_MAX_RANK];
    gradd_copy_t *box = &out->box;
    *out = (gradd_move_t){.box = {.rank = 2 * x->rank}};
    gradd_copy_strides(x, from);
    gradd_copy_strides(y, to);
    for (int i = 0; i < x->rank; i++) {
        box->dims[2 * i] = x->dims[i] ? y->dims[i] / x->dims[i] : 0;
        box->to[2 * i] = to[i] * x->dims[i], box->from[2 * i] = 0;
        box->dims[2 * i + 1] = x->dims[i];
        box->to[2 * i + 1] = to[i], box->from[2 * i + 1] = from[i];
    }
    return GRADD_OK;
}

typedef gradd_status_t (*move_of_t)(const gradd_launch_t *r, gradd_move_t *out);

static gradd_status_t repeat(const gradd_launch_t *r, move_of_t move_of, gradd_copy_fn_t copy) {
    gradd_move_t move;
    GRADD_TRY(move_of(r, &move));
    gradd_copy_move(&move, r, copy);
    return GRADD_OK;
}

static gradd_status_t compute_expand(const gradd_launch_t *r) {
    return repeat(r, gradd_move_of_expand, gradd_copy_strided);
}

static gradd_status_t ref_expand(const gradd_launch_t *r) {
    return repeat(r, gradd_move_of_expand, gradd_copy_plain);
}

static gradd_status_t compute_tile(const gradd_launch_t *r) {
    return repeat(r, gradd_move_of_tile, gradd_copy_strided);
}

static gradd_status_t ref_tile(const gradd_launch_t *r) {
    return repeat(r, gradd_move_of_tile, gradd_copy_plain);
}

/* ---- shape rules ----------------------------------------------------------------------------- */

static gradd_status_t infer_expand(gradd_infer_t *c) {
    gradd_type_t want = {.dtype = c->in[0].type.dtype};
    GRADD_TRY(gradd_known_i64s(c, 1, want.dims, GRADD_MAX_RANK, &want.rank));
    for (int i = 0; i < want.rank; i++)
        if (want.dims[i] < 0)
            return GRADD_FAIL(GRAPH, "shape entry %d is %lld", i, (long long)want.dims[i]);
    c->out[0].dtype = want.dtype;
    return gradd_broadcast(&c->in[0].type, &want, &c->out[0]);
}

static gradd_status_t infer_tile(gradd_infer_t *c) {
    int64_t repeats[GRADD_MAX_RANK];
    int n;
    gradd_type_t out = c->in[0].type;
    GRADD_TRY(gradd_known_i64s(c, 1, repeats, GRADD_MAX_RANK, &n));
    if (n != out.rank)
        return GRADD_FAIL(GRAPH, "repeats has %d entries, the input has rank %d", n, out.rank);
    for (int i = 0; i < n; i++)
        if (repeats[i] < 0 || __builtin_mul_overflow(out.dims[i], repeats[i], &out.dims[i]))
            return GRADD_FAIL(GRAPH, "axis %d cannot be repeated %lld times", i,
                              (long long)repeats[i]);
    c->out[0] = out;
    return GRADD_OK;
}

/* ---- gradient rules -------------------------------------------------------------------------- */

static gradd_status_t grad_expand(gradd_grad_t *g) {
    if (g->need[0]) g->din[0] = gradd_reduce_to(g->b, g->dout[0], g->in[0]);
    return g->b->status;
}

static gradd_status_t grad_tile(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    gradd_type_t x = *gradd_val_type(b, g->in[0]), y = *gradd_val_type(b, g->dout[0]);
    int64_t dims[2 * GRADD_MAX_RANK + 1], axes[GRADD_MAX_RANK];
    int rank = 0, n = 0;
    bool open = false; /* the last entry of dims is an axis of x that the next may join */
    if (!g->need[0]) return GRADD_OK;
    if (gradd_type_count(&y) == 0) {
        g->din[0] = gradd_zeros_like(b, g->in[0]);
        return b->status;
    }
    for (int i = 0; i < x.rank; i++) {
        int64_t repeat = y.dims[i] / x.dims[i];
        if (repeat != 1) axes[n++] = rank, dims[rank++] = repeat, open = false;
        if (open)
            dims[rank - 1] *= x.dims[i];
        else
            dims[rank++] = x.dims[i];
        open = true;
    }
    if (rank > GRADD_MAX_RANK)
        return GRADD_FAIL(LIMIT, "the gradient of Tile needs rank %d, at most %d", rank,
                          GRADD_MAX_RANK);
    gradd_val_t dy = gradd_reshape_to(b, g->dout[0], dims, rank);
    gradd_attr_t keep = gradd_make_int("keepdims", 0);
    gradd_val_t in[2] = {dy, GRADD_NONE};
    if (n) {
        in[1] = gradd_const_i64s(b, axes, n);
        dy = gradd_emit_attrs(b, "ReduceSum", in, 2, &keep, 1);
    }
    g->din[0] = gradd_reshape_as(b, dy, g->in[0]);
    return b->status;
}

/* ---- rows ------------------------------------------------------------------------------------ */

GRADD_OPS(
    expand,
    GRADD_OP("Expand", "", 8, (2, 2), (1, 1), .flags = GRADD_OP_CHEAP | GRADD_OP_SAME_IS_IDENTITY,
             .types = {0xffffffffu, GRADD_T_INDEX}, .infer = infer_expand, .grad = grad_expand,
             .ref = GRADD_REF(ref_expand),
             .cases = GRADD_CASES(
                 {.text = "f32[3,1] i64[2]={3,4}"}, {.text = "f32[3,1] i64[3]={2,1,4}"},
                 {.text = "f32[2,1,3,1,5] i64[5]={2,4,3,2,5}"}, {.text = "f32[] i64[2]={2,3}"},
                 {.text = "f32[4] i64[1]={1}"}, {.text = "f32[3] i64[0]={}"},
                 {.text = "bool[1,2] i64[2]={3,2}"}, {.text = "i64[1] i64[1]={0}"},
                 {.text = "f32[5,1] i64[2]={5,64}", .grad_tol = -1},
                 {.text = "bool[3,1] i64[2]={3,37}"}, {.text = "i64[1,40] i64[2]={300,40}"},
                 {.text = "f32[3,1,16] i64[3]={3,5,16}", .grad_tol = -1},
                 {.text = "i64[2,0] i64[3]={3,2,0}"})),
    GRADD_OP("Tile", "", 6, (2, 2), (1, 1), .flags = GRADD_OP_CHEAP | GRADD_OP_SAME_IS_IDENTITY,
             .types = {0xffffffffu, GRADD_T_INDEX}, .infer = infer_tile, .grad = grad_tile,
             .ref = GRADD_REF(ref_tile),
             .cases = GRADD_CASES({.text = "f32[2,3] i64[2]={2,2}"},
                                  {.text = "f32[2,3,2] i64[3]={1,1,3}"},
                                  {.text = "f32[2,3,2] i64[3]={2,1,1}"},
                                  {.text = "i64[3] i64[1]={4}"}, {.text = "f32[2,2] i64[2]={1,1}"},
                                  {.text = "f32[2,2] i64[2]={0,1}"},
                                  {.text = "f32[3,16] i64[2]={2,3}", .grad_tol = -1},
                                  {.text = "bool[2,3,2,3] i64[4]={2,3,2,3}"})));

GRADD_KERNELS(cpu, expand,
              GRADD_KERNEL("Expand", "loop", .compute = compute_expand, .parts = gradd_copy_parts,
                           .cost = gradd_cost_move),
              GRADD_KERNEL("Tile", "loop", .compute = compute_tile, .parts = gradd_copy_parts,
                           .cost = gradd_cost_move));
