/* Gather, GatherND, GatherElements and their gradients.
 *
 * Gather:         y[o, j, i] = x[o, index[j], i], x seen as [outer, extent, inner]
 * GatherND:       y[b, j, i] = x[b, index[b, j, 0..d), i]
 * GatherElements: y[..j..]   = x[..index[..j..]..] along one axis
 *
 * The indices become row numbers in scratch memory (checked there), then rows are copied. Backward
 * needs the indices only: dx = zeros with every row of dy added where it came from, in rising order
 * (long rows along an axis in short chains), so the bits do not depend on the number of threads.
 * GatherGrad, GatherNDGrad and GatherElementsGrad are internal; they carry the dims of x in an
 * attribute.
 */
#include <string.h>

#include "kernels/contract/kernel.h"
#include "kernels/contract/op.h"
#include "kernels/cpu/copy.h"
#include "kernels/cpu/parts.h"
#include "kernels/cpu/pick.h"
#include "kernels/cpu/picked_rows.h"
#include "kernels/cpu/row_sums.h"
#include "kernels/describe/cost.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rowwise.h"
#include "kernels/rules/rules.h"

/* ---- kernels --------------------------------------------------------------------------------- */

enum { BY_AXIS, BY_ND, BY_ELEMENT };
enum { LONG_ROW = 16 }; /* elements */

static int mode_of(const gradd_op_t *op) {
    if (!strncmp(op->name, "GatherND", 8)) return BY_ND;
    return !strncmp(op->name, "GatherElements", 14) ? BY_ELEMENT : BY_AXIS;
}

/* How often and by which rows `data` is indexed: x in forward, dx in backward. No numbers yet. */
static gradd_rows_t rows_of(const gradd_op_t *op, gradd_attrs_t attrs, const gradd_type_t *data,
                            const gradd_type_t *index) {
    const int mode = mode_of(op);
    int axis = 0;
    if (mode == BY_ND) {
        const int head = (int)gradd_attr_int(attrs, "batch_dims", 0);
        const int last = index->rank - 1, tail = head + (int)index->dims[last];
        return (gradd_rows_t){NULL, gradd_pick_count(index, 0, last),
                              gradd_pick_count(data, 0, tail),
                              gradd_pick_count(data, tail, data->rank)};
    }
    const int64_t n = gradd_type_count(index);
    if (mode == BY_ELEMENT ||
        gradd_axis(gradd_attr_int(attrs, "axis", 0), data->rank, false, &axis))
        return (gradd_rows_t){NULL, n, gradd_type_count(data), 1};
    return (gradd_rows_t){NULL, n * gradd_pick_count(data, 0, axis),
                          gradd_pick_count(data, 0, axis + 1),
                          gradd_pick_count(data, axis + 1, data->rank)};
}

/* The pieces of these rows, as rows. */
static gradd_rows_t pieces_of(const gradd_op_t *op, gradd_attrs_t attrs, const gradd_type_t *data,
                              const gradd_type_t *index) {
    const gradd_rows_t rows = rows_of(op, attrs, data, index);
    const int64_t pieces = gradd_rows_pieces(rows.size, gradd_dtype_bytes(data->dtype));
    return gradd_rows_cut(&rows, pieces, NULL, false);
}

/* Bytes of the lists of numbers in scratch memory. */
static size_t numbers(const gradd_op_t *op, gradd_attrs_t attrs, const gradd_type_t *data,
                      const gradd_type_t *index) {
    const int64_t n = rows_of(op, attrs, data, index).n;
    const int64_t pieces = pieces_of(op, attrs, data, index).n;
    return (size_t)(pieces > n ? pieces + n : n) * sizeof(int64_t);
}

static gradd_status_t number(const gradd_launch_t *r, const gradd_type_t *data, gradd_range_t some,
                             int64_t *list) {
    const gradd_view_t *indices = &r->in[1];
    const int mode = mode_of(r->op);
    int axis = 0;
    if (mode == BY_ND)
        return gradd_pick_nd(data, (int)gradd_attr_int(r->attrs, "batch_dims", 0), indices, some,
                             list);
    GRADD_TRY(gradd_axis(gradd_attr_int(r->attrs, "axis", 0), data->rank, false, &axis));
    return mode == BY_ELEMENT ? gradd_pick_elements(data, axis, indices, some, list)
                              : gradd_pick_axis(data, axis, indices, some, list);
}

/* Some of the numbers of pieces; all of them at first, if there are several of a row. */
static gradd_status_t make_rows(const gradd_launch_t *r, const gradd_type_t *data,
                                gradd_range_t some, gradd_rows_t *out) {
    gradd_rows_t rows = rows_of(r->op, r->attrs, data, &r->in[1].type);
    const int64_t pieces = gradd_rows_pieces(rows.size, gradd_dtype_bytes(data->dtype));
    int64_t *list = r->workspace, *whole = list + (pieces > 1 ? rows.n * pieces : 0);
    rows.row = whole;
    if (pieces > 1) some = r->part ? (gradd_range_t){0, 0} : (gradd_range_t){0, rows.n};
    if (some.from < some.to) GRADD_TRY(number(r, data, some, whole));
    *out = pieces > 1 ? gradd_rows_cut(&rows, pieces, list, !r->part) : rows;
    return GRADD_OK;
}

static gradd_status_t compute_gather(const gradd_launch_t *r) {
    const gradd_type_t *x = &r->in[0].type, *y = &r->out[0].type;
    const size_t bytes = gradd_dtype_bytes(x->dtype);
    gradd_rows_t rows;
    if (gradd_type_count(y) == 0) return GRADD_OK;
    const gradd_range_t some = gradd_part_of(r, pieces_of(r->op, r->attrs, x, &r->in[1].type).n);
    GRADD_TRY(make_rows(r, x, some, &rows));
    rows.row += some.from, rows.n = some.to - some.from;
    return gradd_rows_get(&rows, bytes,
                          (char *)r->out[0].data + (size_t)(some.from * rows.size) * bytes,
                          r->in[0].data);
}

/* Whether rows along an axis are worth sorting: they are summed in short chains then. */
static bool has_long_rows(const gradd_op_t *op, const gradd_type_t *dx, gradd_attrs_t attrs) {
    int axis;
    if (mode_of(op) != BY_AXIS ||
        gradd_axis(gradd_attr_int(attrs, "axis", 0), dx->rank, false, &axis))
        return false;
    return gradd_pick_count(dx, axis + 1, dx->rank) >= LONG_ROW;
}

/* The first stage of parts clears dx and makes the numbers of rows, the second adds the rows, in
 * rising order in either way. */
static gradd_status_t compute_gather_grad(const gradd_launch_t *r) {
    const gradd_type_t *dx = &r->out[0].type;
    gradd_rows_t rows = pieces_of(r->op, r->attrs, dx, &r->in[1].type);
    const bool nothing = gradd_type_count(&r->in[0].type) == 0;
    const bool sorted = has_long_rows(r->op, dx, r->attrs);
    const int stages = sorted ? 2 : gradd_rows_add_stages(&rows, dx->dtype);
    const gradd_range_t some = gradd_stage_of(r, 0, stages, nothing ? 0 : rows.n);
    if (nothing)
        rows.n = 0;
    else
        GRADD_TRY(make_rows(r, dx, some, &rows));
    void *rest = (char *)r->workspace + numbers(r->op, r->attrs, dx, &r->in[1].type);
    if (sorted) {
        const gradd_range_t cleared = gradd_half_of(r, false, gradd_type_bytes(dx));
        gradd_copy_zero((char *)r->out[0].data + cleared.from, (size_t)(cleared.to - cleared.from));
        const gradd_row_sums_t sums = {.row = rows.row,
                                       .n = rows.n,
                                       .n_rows = rows.n_rows,
                                       .width = rows.size,
                                       .scale = 1,
                                       .launch = r};
        return gradd_row_sums(&sums, dx->dtype, r->out[0].data, r->in[0].data, rest);
    }
    return gradd_rows_add(&(gradd_row_adds_t){.rows = rows,
                                              .dtype = dx->dtype,
                                              .to = r->out[0].data,
                                              .from = r->in[0].data,
                                              .workspace = rest,
                                              .launch = r});
}

/* ---- shape rules ----------------------------------------------------------------------------- */

/* Type of y for indexed data; also checks the axis, the ranks and the batch dims. */
static gradd_status_t gathered_type(const gradd_infer_t *c, const gradd_type_t *data,
                                    gradd_type_t *y) {
    const gradd_type_t *index = &c->in[1].type;
    int mode = mode_of(c->op), axis = 0, head, tail;
    *y = (gradd_type_t){.dtype = data->dtype};
    if (mode != BY_ND)
        GRADD_TRY(gradd_axis(gradd_attr_int(c->attrs, "axis", 0), data->rank, false, &axis));
    if (mode == BY_ELEMENT) {
        if (index->rank != data->rank)
            return GRADD_FAIL(GRAPH, "indices have rank %d, data has %d", index->rank, data->rank);
        for (int i = 0; i < index->rank; i++)
            if (i != axis && index->dims[i] > data->dims[i])
                return GRADD_FAIL(GRAPH, "axis %d of the indices is longer than that of data", i);
        *y = *index;
        y->dtype = data->dtype;
        return GRADD_OK;
    }
    int64_t batch_dims = gradd_attr_int(c->attrs, "batch_dims", 0);
    if (mode == BY_AXIS) {
        head = axis, tail = axis + 1;
    } else {
        int64_t depth = index->rank ? index->dims[index->rank - 1] : 0;
        if (index->rank < 1 || batch_dims < 0 || batch_dims >= index->rank || depth < 0 ||
            depth > data->rank - batch_dims)
            return GRADD_FAIL(GRAPH, "indices do not fit data of rank %d with batch_dims %lld",
                              data->rank, (long long)batch_dims);
        for (int i = 0; i < batch_dims; i++)
            if (index->dims[i] != data->dims[i])
                return GRADD_FAIL(GRAPH, "batch axis %d of data and indices differ", i);
        head = 0, tail = (int)(batch_dims + depth);
    }
    int n_index = mode == BY_ND ? index->rank - 1 : index->rank;
    if (head + n_index + data->rank - tail > GRADD_MAX_RANK)
        return GRADD_FAIL(LIMIT, "the result's rank is above %d", GRADD_MAX_RANK);
    for (int i = 0; i < head; i++)
        y->dims[y->rank++] = data->dims[i];
    for (int i = 0; i < n_index; i++)
        y->dims[y->rank++] = index->dims[i];
    for (int i = tail; i < data->rank; i++)
        y->dims[y->rank++] = data->dims[i];
    return GRADD_OK;
}

static gradd_status_t infer_gather(gradd_infer_t *c) {
    return gathered_type(c, &c->in[0].type, &c->out[0]);
}

static gradd_status_t infer_gather_grad(gradd_infer_t *c) {
    const gradd_attr_t *dims = gradd_attr_find(c->attrs, "dims");
    gradd_type_t dx = {.dtype = c->in[0].type.dtype, .rank = (int)dims->n}, y;
    if (dims->n > GRADD_MAX_RANK) return GRADD_FAIL(LIMIT, "dims has %zu entries", dims->n);
    memcpy(dx.dims, dims->ints, sizeof dims->ints[0] * dims->n);
    GRADD_TRY(gradd_type_check(&dx));
    GRADD_TRY(gathered_type(c, &dx, &y));
    if (!gradd_type_equal(&y, &c->in[0].type))
        return GRADD_FAIL(GRAPH, "dy does not have the shape that indexing dims gives");
    c->out[0] = dx;
    return GRADD_OK;
}

static size_t workspace_gather(const gradd_infer_t *c) {
    return numbers(c->op, c->attrs, &c->in[0].type, &c->in[1].type);
}

static size_t workspace_gather_grad(const gradd_infer_t *c) {
    const gradd_type_t *dx = &c->out[0];
    const gradd_rows_t rows = pieces_of(c->op, c->attrs, dx, &c->in[1].type);
    return numbers(c->op, c->attrs, dx, &c->in[1].type) +
           (has_long_rows(c->op, dx, c->attrs) ? gradd_row_sums_workspace(rows.n)
                                               : gradd_rows_add_workspace(&rows, dx->dtype));
}

static int parts_gather(const gradd_infer_t *c) {
    return gradd_parts_of_tasks(c, pieces_of(c->op, c->attrs, &c->in[0].type, &c->in[1].type).n);
}

static int parts_gather_grad(const gradd_infer_t *c) {
    const gradd_type_t *dx = &c->out[0];
    const gradd_rows_t rows = pieces_of(c->op, c->attrs, dx, &c->in[1].type);
    if (has_long_rows(c->op, dx, c->attrs)) return gradd_parts_of_tasks(c, rows.n);
    return gradd_rows_add_parts(c, &rows, dx->dtype);
}

/* A row is somewhere else in memory than the one before, so each waits: as long as 600 bytes take
 * to move. */
static void cost_rows(const gradd_infer_t *c, const gradd_type_t *data, gradd_cost_t *cost) {
    cost->again = 600 * (double)rows_of(c->op, c->attrs, data, &c->in[1].type).n;
}

static void cost_gather(const gradd_infer_t *c, gradd_cost_t *cost) {
    gradd_cost_pick(c, cost);
    cost_rows(c, &c->in[0].type, cost);
}

static void cost_gather_grad(const gradd_infer_t *c, gradd_cost_t *cost) {
    cost_rows(c, &c->out[0], cost);
}

/* ---- gradient rules -------------------------------------------------------------------------- */

static gradd_status_t grad_gather(gradd_grad_t *g) {
    static const char *const names[] = {"GatherGrad", "GatherNDGrad", "GatherElementsGrad"};
    if (!g->need[0]) return GRADD_OK;
    int mode = mode_of(g->op);
    gradd_type_t x = *gradd_val_type(g->b, g->in[0]);
    gradd_val_t in[2] = {g->dout[0], g->in[1]};
    const char *other = mode == BY_ND ? "batch_dims" : "axis";
    gradd_attr_t attrs[2] = {gradd_make_ints("dims", x.dims, (size_t)x.rank),
                             gradd_make_int(other, gradd_attr_int(g->attrs, other, 0))};
    g->din[0] = gradd_emit_attrs(g->b, names[mode], in, 2, attrs, 2);
    return g->b->status;
}

/* Adding rows into zeros is linear: its gradient picks them again. */
static gradd_status_t grad_gather_grad(gradd_grad_t *g) {
    static const char *const names[] = {"Gather", "GatherND", "GatherElements"};
    if (!g->need[0]) return GRADD_OK;
    int mode = mode_of(g->op);
    gradd_val_t in[2] = {g->dout[0], g->in[1]};
    const char *other = mode == BY_ND ? "batch_dims" : "axis";
    gradd_attr_t attr = gradd_make_int(other, gradd_attr_int(g->attrs, other, 0));
    g->din[0] = gradd_emit_attrs(g->b, names[mode], in, 2, &attr, 1);
    return g->b->status;
}

/* ---- expansions ------------------------------------------------------------------------------ */

/* x with rows of dy added by number along its first axis, or by tuples of numbers: ScatterND. */
static gradd_val_t add_rows(gradd_builder_t *b, const gradd_type_t *x, gradd_val_t index,
                            gradd_val_t dy) {
    const gradd_attr_t add = gradd_make_string("reduction", "add");
    gradd_val_t in[3] = {gradd_filled(b, x, 0), gradd_cast(b, index, GRADD_DT_I64), dy};
    return gradd_emit_attrs(b, "ScatterND", in, 3, &add, 1);
}

/* Along an axis: dy [outer, n, inner] with n in front. */
static gradd_val_t add_along(gradd_builder_t *b, const gradd_type_t *x, int axis, gradd_val_t index,
                             gradd_val_t dy) {
    static const int64_t turned[] = {1, 0, 2};
    const int64_t n = gradd_type_count(gradd_val_type(b, index));
    const int64_t outer = gradd_pick_count(x, 0, axis);
    const int64_t inner = gradd_pick_count(x, axis + 1, x->rank);
    const gradd_type_t rows = {
        x->dtype, 3, {x->dims[axis], outer, inner}
    };
    dy = gradd_reshape_to(b, dy, (int64_t[]){outer, n, inner}, 3);
    if (outer != 1) dy = gradd_transpose(b, dy, turned, 3);
    dy = gradd_reshape_to(b, dy, (int64_t[]){n, outer, inner}, 3);
    index = gradd_reshape_to(b, index, (int64_t[]){n, 1}, 2);
    gradd_val_t dx = add_rows(b, &rows, index, dy);
    if (outer != 1) dx = gradd_transpose(b, dx, turned, 3);
    return gradd_reshape_to(b, dx, x->dims, x->rank);
}

static gradd_status_t expand_gather_grad(gradd_expand_t *e) {
    gradd_builder_t *b = e->b;
    const gradd_attr_t *dims = gradd_attr_find(e->attrs, "dims");
    const gradd_dtype_t dtype = gradd_val_type(b, e->in[0])->dtype;
    gradd_val_t dy = gradd_wide(b, e->in[0]), dx;
    gradd_type_t x = {.rank = (int)dims->n};
    int axis = 0;
    if (b->status) return b->status;
    x.dtype = gradd_val_type(b, dy)->dtype;
    memcpy(x.dims, dims->ints, sizeof dims->ints[0] * dims->n);
    const int mode = mode_of(e->op);
    if (mode != BY_ND)
        GRADD_TRY(gradd_axis(gradd_attr_int(e->attrs, "axis", 0), x.rank, false, &axis));
    if (mode == BY_AXIS) {
        dx = add_along(b, &x, axis, e->in[1], dy);
    } else if (mode == BY_ELEMENT) {
        const gradd_attr_t attrs[2] = {gradd_make_int("axis", axis),
                                       gradd_make_string("reduction", "add")};
        gradd_val_t in[3] = {gradd_filled(b, &x, 0), e->in[1], dy};
        dx = gradd_emit_attrs(b, "ScatterElements", in, 3, attrs, 2);
    } else if (gradd_attr_int(e->attrs, "batch_dims", 0) == 0) {
        dx = add_rows(b, &x, e->in[1], dy);
    } else {
        return GRADD_FAIL(UNSUPPORTED, "%s with batch_dims has no expansion", e->op->name);
    }
    e->out[0] = gradd_cast(b, dx, dtype);
    return b->status;
}

/* ---- rows ------------------------------------------------------------------------------------ */

GRADD_OPS(
    gather,
    GRADD_OP("Gather", "", 1, (2, 2), (1, 1), .types = {0xffffffffu, GRADD_T_INDEX},
             .attrs = GRADD_ATTR_LIST({"axis", GRADD_ATTR_INT, false}), .infer = infer_gather,
             .rowwise = gradd_rowwise_lookup, .grad = grad_gather, .ref = GRADD_REF(compute_gather),
             .cases = GRADD_CASES({.text = "f32[5,3] i64[2,4]"}, {.text = "f32[5,3] i64[]={-1}"},
                                  {.text = "f32[2,5,3] i64[3]={4,0,4} | axis=1"},
                                  {.text = "f32[2,3,5] i32[2]={-5,1} | axis=-1"},
                                  {.text = "i64[4]={7,8,9,6} i64[2]={1,3}"},
                                  {.text = "f32[5,3] i64[0]={}"}, {.text = "f32[5,70] i64[40]"},
                                  {.text = "f32[300,160] i64[400]:(-300,299)"},
                                  {.text = "f32[3,2500] i64[4]:(0,2)"},
                                  {.text = "f32[70,40] i64[9]:(-40,39) | axis=1"},
                                  {.text = "bool[5] i64[3]"})),
    GRADD_OP("GatherND", "", 1, (2, 2), (1, 1), .types = {0xffffffffu, GRADD_T_INDEX},
             .attrs = GRADD_ATTR_LIST({"batch_dims", GRADD_ATTR_INT, false}), .infer = infer_gather,
             .grad = grad_gather, .ref = GRADD_REF(compute_gather),
             .cases = GRADD_CASES({.text = "f32[5,6,3] i64[4,2]"}, {.text = "f32[5,6] i64[2,3,1]"},
                                  {.text = "f32[2,5,3] i64[2,4,1] | batch_dims=1"},
                                  {.text = "f32[2,5,5] i64[2,4,2]:(-5,4) | batch_dims=1"},
                                  {.text = "bool[5,7] i64[3,2,2]"}, {.text = "f32[5] i64[1]={2}"},
                                  {.text = "f32[2,3] i64[2,0]"})),
    GRADD_OP("GatherElements", "", 1, (2, 2), (1, 1), .types = {0xffffffffu, GRADD_T_INDEX},
             .attrs = GRADD_ATTR_LIST({"axis", GRADD_ATTR_INT, false}), .infer = infer_gather,
             .grad = grad_gather, .ref = GRADD_REF(compute_gather),
             .cases = GRADD_CASES({.text = "f32[5,3] i64[2,3]"},
                                  {.text = "f32[3,5] i64[3,7]:(-5,4) | axis=1"},
                                  {.text = "f32[2,5,3] i64[1,4,2] | axis=-2"},
                                  {.text = "f32[20,6,30] i64[20,5,30]:(-6,5) | axis=1"},
                                  {.text = "i64[5] i32[8]"}, {.text = "f32[5,3] i64[0,3]"})),
    GRADD_OP("GatherGrad", "com.gradd", 1, (2, 2), (1, 1), .flags = GRADD_OP_INTERNAL,
             .types = {GRADD_T_FLOAT, GRADD_T_INDEX},
             .attrs = GRADD_ATTR_LIST({"dims", GRADD_ATTR_INTS, true},
                                      {"axis", GRADD_ATTR_INT, false}),
             .infer = infer_gather_grad, .grad = grad_gather_grad,
             .expand = GRADD_EXPANSION(expand_gather_grad), .ref = GRADD_REF(compute_gather_grad),
             .cases = GRADD_CASES({.text = "f32[6,3] i64[6] | dims=[5,3]"},
                                  {.text = "f32[2,7,3] i64[7] | dims=[2,5,3] axis=1"},
                                  {.text = "f32[9,128] i64[9] | dims=[5,128]"},
                                  {.text = "f32[600,160] i64[600]:(0,9) | dims=[10,160]"},
                                  {.text = "f32[40000] i64[40000]:(0,9) | dims=[10]"},
                                  {.text = "f32[5000] i64[5000]:(-70000,69999) | dims=[70000]"},
                                  {.text = "f32[64,16] i64[64]:(1,1) | dims=[3,16]"},
                                  {.text = "f32[65,16] i64[65]:(2,2) | dims=[3,16]"},
                                  {.text = "f32[4,128,3] i64[128]:(0,0) | dims=[4,2,3] axis=1"},
                                  {.text = "f32[5]={inf,1,-inf,nan,inf} i64[5]={0,0,1,2,1} | "
                                           "dims=[4]",
                                   .grad_tol = -1},
                                  {.text = "f32[0,3] i64[0] | dims=[5,3]"})),
    GRADD_OP("GatherNDGrad", "com.gradd", 1, (2, 2), (1, 1), .flags = GRADD_OP_INTERNAL,
             .types = {GRADD_T_FLOAT, GRADD_T_INDEX},
             .attrs = GRADD_ATTR_LIST({"dims", GRADD_ATTR_INTS, true},
                                      {"batch_dims", GRADD_ATTR_INT, false}),
             .infer = infer_gather_grad, .grad = grad_gather_grad,
             .expand = GRADD_EXPANSION(expand_gather_grad), .ref = GRADD_REF(compute_gather_grad),
             .cases = GRADD_CASES({.text = "f32[4,3] i64[4,2] | dims=[5,6,3]"},
                                  {.text = "f32[2,4] i64[2,4,1] | dims=[2,5] batch_dims=1"},
                                  {.text = "f32[3,500,4] i64[3,500,1] | dims=[3,5,4] "
                                           "batch_dims=1"})),
    GRADD_OP("GatherElementsGrad", "com.gradd", 1, (2, 2), (1, 1), .flags = GRADD_OP_INTERNAL,
             .types = {GRADD_T_FLOAT, GRADD_T_INDEX},
             .attrs = GRADD_ATTR_LIST({"dims", GRADD_ATTR_INTS, true},
                                      {"axis", GRADD_ATTR_INT, false}),
             .infer = infer_gather_grad, .grad = grad_gather_grad,
             .expand = GRADD_EXPANSION(expand_gather_grad), .ref = GRADD_REF(compute_gather_grad),
             .cases = GRADD_CASES({.text = "f32[2,9] i64[2,9] | dims=[3,5] axis=1"},
                                  {.text = "f32[8,2] i64[8,2] | dims=[5,3] axis=0"},
                                  {.text = "f32[30,90] i64[30,90] | dims=[30,5] axis=1"})));

GRADD_KERNELS(cpu, gather,
              GRADD_KERNEL("Gather", "loop", .types = {GRADD_T_ANY}, .compute = compute_gather,
                           .workspace = workspace_gather, .parts = parts_gather,
                           .makes_parts = true, .cost = cost_gather),
              GRADD_KERNEL("GatherND", "loop", .types = {GRADD_T_ANY}, .compute = compute_gather,
                           .workspace = workspace_gather, .parts = parts_gather,
                           .cost = cost_gather),
              GRADD_KERNEL("GatherElements", "loop", .types = {GRADD_T_ANY},
                           .compute = compute_gather, .workspace = workspace_gather,
                           .parts = parts_gather, .cost = cost_gather),
              GRADD_KERNEL("GatherGrad", "loop", .types = {GRADD_T_ANY},
                           .compute = compute_gather_grad, .workspace = workspace_gather_grad,
                           .parts = parts_gather_grad, .cost = cost_gather_grad),
              GRADD_KERNEL("GatherNDGrad", "loop", .types = {GRADD_T_ANY},
                           .compute = compute_gather_grad, .workspace = workspace_gather_grad,
                           .parts = parts_gather_grad, .cost = cost_gather_grad),
              GRADD_KERNEL("GatherElementsGrad", "loop", .types = {GRADD_T_ANY},
                           .compute = compute_gather_grad, .workspace = workspace_gather_grad,
                           .parts = parts_gather_grad, .cost = cost_gather_grad));
