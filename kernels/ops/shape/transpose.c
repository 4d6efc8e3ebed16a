/* Transpose: y[i_perm] = x[i]; out.dims[k] = in.dims[perm[k]], perm reverses the axes if absent.
 *
 * The strided copy merges axes that stay neighbours ([B,S,H,D] -> [B,H,S,D] moves rows of D) and
 * turns 8 x 8 blocks where the innermost axis changes. Nothing is saved: dx = dy by the inverse.
 */
#include "kernels/contract/kernel.h"
#include "kernels/contract/op.h"
#include "kernels/cpu/copy.h"
#include "kernels/describe/cost.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rowwise.h"
#include "kernels/rules/rules.h"

static gradd_status_t read_perm(gradd_attrs_t attrs, int rank, int *out_perm) {
    const gradd_attr_t *attr = gradd_attr_find(attrs, "perm");
    if (attr && attr->n != (size_t)rank)
        return GRADD_FAIL(GRAPH, "perm has %zu entries, the input has rank %d", attr->n, rank);
    unsigned seen = 0;
    for (int i = 0; i < rank; i++) {
        int64_t axis = attr ? attr->ints[i] : rank - 1 - i;
        if (axis < 0 || axis >= rank || (seen >> axis & 1))
            return GRADD_FAIL(GRAPH, "perm entry %d is %lld: out of range or repeated", i,
                              (long long)axis);
        seen |= 1u << axis;
        out_perm[i] = (int)axis;
    }
    return GRADD_OK;
}

/* ---- kernel ---------------------------------------------------------------------------------- */

gradd_status_t gradd_move_of_transpose(const gradd_launch_t *r, gradd_move_t *out) {
    const gradd_type_t *x = &r->in[0].type, *y = &r->out[0].type;
    int perm[GRADD_MAX_RANK];
    int64_t from[GRADD_MAX_RANK];
    GRADD_TRY(read_perm(r->attrs, x->rank, perm));
    *out = (gradd_move_t){.box = {.rank = x->rank}};
    gradd_copy_strides(x, from);
    gradd_copy_strides(y, out->box.to);
    for (int i = 0; i < x->rank; i++)
        out->box.dims[i] = y->dims[i], out->box.from[i] = from[perm[i]];
    return GRADD_OK;
}

static gradd_status_t transpose(const gradd_launch_t *r, gradd_copy_fn_t copy) {
    gradd_move_t move;
    GRADD_TRY(gradd_move_of_transpose(r, &move));
    gradd_copy_move(&move, r, copy);
    return GRADD_OK;
}

static gradd_status_t compute_transpose(const gradd_launch_t *r) {
    return transpose(r, gradd_copy_strided);
}

static gradd_status_t ref_transpose(const gradd_launch_t *r) {
    return transpose(r, gradd_copy_plain);
}

/* ---- shape rule ------------------------------------------------------------------------------ */

static gradd_status_t infer_transpose(gradd_infer_t *c) {
    const gradd_type_t *in = &c->in[0].type;
    int perm[GRADD_MAX_RANK];
    GRADD_TRY(read_perm(c->attrs, in->rank, perm));
    c->out[0] = *in;
    for (int i = 0; i < in->rank; i++)
        c->out[0].dims[i] = in->dims[perm[i]];
    return GRADD_OK;
}

/* ---- gradient rule --------------------------------------------------------------------------- */

static gradd_status_t grad_transpose(gradd_grad_t *g) {
    int rank = gradd_val_type(g->b, g->in[0])->rank, perm[GRADD_MAX_RANK];
    int64_t inverse[GRADD_MAX_RANK];
    GRADD_TRY(read_perm(g->attrs, rank, perm));
    for (int i = 0; i < rank; i++)
        inverse[perm[i]] = i;
    if (g->need[0]) g->din[0] = gradd_transpose(g->b, g->dout[0], inverse, rank);
    return g->b->status;
}

/* ---- rows ------------------------------------------------------------------------------------ */

GRADD_OPS(transpose,
          GRADD_OP("Transpose", "", 1, (1, 1), (1, 1),
                   .attrs = GRADD_ATTR_LIST({"perm", GRADD_ATTR_INTS, false}),
                   .infer = infer_transpose, .grad = grad_transpose,
                   .ref = GRADD_REF(ref_transpose),
                   .cases = GRADD_CASES(
                       {.text = "f32[3,5]"}, {.text = "f32[2,3,4,5] | perm=[0,2,1,3]"},
                       {.text = "f32[2,3,4,5] | perm=[0,1,3,2]"},
                       {.text = "f32[2,3,4] | perm=[2,0,1]"}, {.text = "f32[17,19] | perm=[1,0]"},
                       {.text = "f32[1,3,1,2] | perm=[3,2,1,0]"}, {.text = "f32[]"},
                       {.text = "f32[0,3] | perm=[1,0]"}, {.text = "i64[5,3]"},
                       {.text = "bool[9,10]"}, {.text = "i64[9,2,11] | perm=[2,1,0]"},
                       {.text = "f32[70,131]", .grad_tol = -1}, {.text = "bool[131,70]"},
                       {.text = "f32[72,136]", .grad_tol = -1}, /* packs of 8, some tiles partly */
                       {.text = "f32[66,130]", .grad_tol = -1}, /* pairs */
                       {.text = "f32[2,64,3,24] | perm=[2,0,3,1]", .grad_tol = -1},
                       {.text = "f32[3,10,2,14] | perm=[0,3,2,1]"},
                       {.text = "f32[40,16,72] | perm=[0,2,1]", .grad_tol = -1}, /* many tiles */
                       {.text = "i64[3,33,2,41] | perm=[2,3,0,1]"},
                       {.text = "f32[3,130,9,8] | perm=[3,1,0,2]", .grad_tol = -1},
                       {.text = "f32[3,40,2,64] | perm=[2,0,1,3]", .grad_tol = -1},
                       {.text = "i64[30,11,40] | perm=[0,2,1]"})));

GRADD_KERNELS(cpu, transpose,
              GRADD_KERNEL("Transpose", "loop", .parts = gradd_copy_parts, .makes_parts = true,
                           .compute = compute_transpose, .cost = gradd_cost_move));
