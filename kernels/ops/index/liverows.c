/* Live rows: picking the rows of a batch that matter, and putting them back.
 *
 * A row is what stands behind the leading axes of a tensor: the values of one position. `rows`
 * (i64[k]) names live ones: numbers of rows, rising, and behind them numbers r < 0, which stand for
 * nothing but fill the list up to its size; where something has to be read for them it is row ~r.
 * So any value computed for them is computed for a live row as well, and no new infinities arise.
 *
 * GatherRows(x, rows): x[b1, ..., bl, ...] with l = `lead` axes of rows -> [1, ..., 1, k, ...]; of
 * a live row r, row r + `offset` of x, or `fill` in all elements where that is behind the end of a
 * sequence of `positions` rows; of others row ~r, or `fill`. ScatterRows(x, rows): x[..., k, ...]
 * -> [`dims`, ...], zeros where there is no live row. Each is the gradient of the other.
 *
 * RowsWithin(rows, others): the places of `rows` in the list `others`, which holds all of them.
 * RowRanges(rows, intervals) -> i32[1, 1, k, 3], for attention over live rows alone: rows are
 * positions of sequences of `positions`; position s may look at positions [intervals[s, 0],
 * intervals[s, 1]) of its own sequence, of which it is one itself. A range is where the live ones
 * of these are in the list.
 *
 * CrossRanges(rows, others) -> i32[1, 1, k, 3], for attention to other sequences: rows are those of
 * sequences of `positions`, others of as many of `other_positions`. A range is where those of the
 * row's sequence are in the list of the others.
 *
 * SegmentRanges(segments, intervals) -> i32[b, 1, n, 3], the same over all positions [b, n], whose
 * segments are told by integers that never fall, or never rise, along a sequence.
 *
 * Lists may lie in the memory of a client, which may change them while we run: they are copied
 * before they are checked.
 */
#include <string.h>

#include "kernels/contract/kernel.h"
#include "kernels/cpu/pick.h"
#include "kernels/describe/cost.h"
#include "kernels/describe/dispatch.h"
#include "kernels/describe/live_rows.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

/* ---- lists ----------------------------------------------------------------------------------- */

/* A checked copy. */
typedef struct list_s {
    int64_t *at;
    int64_t n, n_live;
} list_t;

/* Rows of a list, each below `limit`, into `room`. */
static gradd_status_t read_list(const gradd_view_t *rows, int64_t limit, int64_t *room,
                                list_t *out) {
    gradd_fault_t tail = {0};
    *out = (list_t){.at = room, .n = gradd_type_count(&rows->type)};
    for (int64_t i = 0; i < out->n; i++) {
        room[i] = gradd_pick_index(rows, i);
        const gradd_fault_t f = gradd_live_check(room[i], i ? room[i - 1] : 0, i, limit);
        if (f.kind == GRADD_FAULT_LIVE_TAIL)
            tail = f;
        else if (f.kind)
            return gradd_fault_fail(&f);
        out->n_live += room[i] >= 0;
    }
    return gradd_fault_fail(&tail);
}

static size_t workspace_list(const gradd_infer_t *c) {
    return sizeof(int64_t) * (size_t)gradd_type_count(&c->in[1].type);
}

static int64_t leading(const gradd_type_t *t, int64_t lead) {
    int64_t rows = 1;
    for (int d = 0; d < lead; d++)
        rows *= t->dims[d];
    return rows;
}

/* Bytes behind the first `lead` axes. */
static size_t row_bytes(const gradd_type_t *t, int64_t lead) {
    size_t bytes = gradd_dtype_bytes(t->dtype);
    for (int d = (int)lead; d < t->rank; d++)
        bytes *= (size_t)t->dims[d];
    return bytes;
}

/* ---- gather and scatter ---------------------------------------------------------------------- */

static void fill_row(const gradd_type_t *t, void *out, size_t bytes, int64_t value) {
    memset(out, 0, bytes);
    if (!value) return;
    if (t->dtype == GRADD_DT_I64)
        for (size_t i = 0; i < bytes / 8; i++)
            ((int64_t *)out)[i] = value;
    else
        for (size_t i = 0; i < bytes / 4; i++)
            ((int32_t *)out)[i] = (int32_t)value;
}

static gradd_status_t compute_gather(const gradd_launch_t *r) {
    const gradd_view_t *x = &r->in[0], *y = &r->out[0];
    const int64_t lead = gradd_attr_int(r->attrs, "lead", 1);
    const int64_t offset = gradd_attr_int(r->attrs, "offset", 0), n = leading(&x->type, lead);
    const int64_t positions = gradd_attr_int(r->attrs, "positions", n);
    const gradd_attr_t *fill = gradd_attr_find(r->attrs, "fill");
    const size_t bytes = row_bytes(&x->type, lead);
    list_t list;
    GRADD_TRY(read_list(&r->in[1], n, r->workspace, &list));
#pragma omp parallel for schedule(static) if (list.n * (int64_t)bytes >= 4 * GRADD_PARALLEL_MIN)
    for (int64_t i = 0; i < list.n; i++) {
        const int64_t row = list.at[i];
        char *to = (char *)y->data + (size_t)i * bytes;
        const bool behind = row >= 0 && offset && row % positions >= positions - offset;
        if (behind || (row < 0 && fill))
            fill_row(&x->type, to, bytes, fill->i);
        else
            memcpy(to, (const char *)x->data + (size_t)(row < 0 ? ~row : row + offset) * bytes,
                   bytes);
    }
    return GRADD_OK;
}

/* Every row writes itself and the zeros in front of it; the last one those behind it, too. */
static gradd_status_t compute_scatter(const gradd_launch_t *r) {
    const gradd_view_t *x = &r->in[0], *y = &r->out[0];
    const gradd_attr_t *dims = gradd_attr_find(r->attrs, "dims");
    const int64_t n = leading(&y->type, (int64_t)dims->n);
    const size_t bytes = row_bytes(&y->type, (int64_t)dims->n);
    char *out = y->data;
    list_t list;
    GRADD_TRY(read_list(&r->in[1], n, r->workspace, &list));
#pragma omp parallel for schedule(static) if (n * (int64_t)bytes >= 4 * GRADD_PARALLEL_MIN)
    for (int64_t i = 0; i <= list.n_live; i++) {
        const int64_t from = i ? list.at[i - 1] + 1 : 0, to = i < list.n_live ? list.at[i] : n;
        memset(out + (size_t)from * bytes, 0, (size_t)(to - from) * bytes);
        if (i < list.n_live)
            memcpy(out + (size_t)to * bytes, (const char *)x->data + (size_t)i * bytes, bytes);
    }
    return GRADD_OK;
}

static gradd_status_t check_rows(const gradd_infer_t *c, int64_t lead) {
    if (c->in[1].type.rank == 1 && c->in[1].type.dims[0] && lead >= 1 && lead <= c->in[0].type.rank)
        return GRADD_OK;
    char x[GRADD_TYPE_TEXT], rows[GRADD_TYPE_TEXT];
    return GRADD_FAIL(GRAPH, "a list %s does not name rows in front of %s along %lld axes",
                      gradd_type_format(&c->in[1].type, rows), gradd_type_format(&c->in[0].type, x),
                      (long long)lead);
}

static gradd_status_t infer_gather(gradd_infer_t *c) {
    const int64_t lead = gradd_attr_int(c->attrs, "lead", 1);
    const int64_t offset = gradd_attr_int(c->attrs, "offset", 0);
    const gradd_dtype_t dtype = c->in[0].type.dtype;
    GRADD_TRY(check_rows(c, lead));
    if (gradd_attr_int(c->attrs, "fill", 0) && dtype != GRADD_DT_I64 && dtype != GRADD_DT_I32)
        return GRADD_FAIL(GRAPH, "only integers are filled with another number than 0");
    const int64_t n = leading(&c->in[0].type, lead);
    const int64_t positions = gradd_attr_int(c->attrs, "positions", n);
    if (offset < 0) return GRADD_FAIL(GRAPH, "a negative offset");
    if (offset && !gradd_attr_find(c->attrs, "fill"))
        return GRADD_FAIL(GRAPH, "an offset, and nothing to fill in behind the last row");
    if (n && (positions < 1 || n % positions))
        return GRADD_FAIL(GRAPH, "%lld rows are no sequences of %lld positions", (long long)n,
                          (long long)positions);
    c->out[0] = c->in[0].type;
    for (int d = 0; d + 1 < lead; d++)
        c->out[0].dims[d] = 1;
    c->out[0].dims[lead - 1] = c->in[1].type.dims[0];
    return GRADD_OK;
}

static gradd_status_t infer_scatter(gradd_infer_t *c) {
    const gradd_attr_t *dims = gradd_attr_find(c->attrs, "dims");
    GRADD_TRY(check_rows(c, (int64_t)dims->n));
    c->out[0] = c->in[0].type;
    for (size_t d = 0; d < dims->n; d++)
        c->out[0].dims[d] = dims->ints[d];
    if (leading(&c->in[0].type, (int64_t)dims->n) != c->in[1].type.dims[0])
        return GRADD_FAIL(GRAPH, "the operand has not as many rows as the list");
    return gradd_type_check(&c->out[0]);
}

static gradd_status_t grad_gather(gradd_grad_t *g) {
    const int64_t lead = gradd_attr_int(g->attrs, "lead", 1);
    if (!g->need[0] || g->dout[0] == GRADD_NONE) return GRADD_OK;
    if (gradd_attr_int(g->attrs, "offset", 0))
        return GRADD_FAIL(UNSUPPORTED, "moved rows have no gradient");
    const gradd_attr_t dims =
        gradd_make_ints("dims", gradd_val_type(g->b, g->in[0])->dims, (size_t)lead);
    gradd_val_t in[2] = {g->dout[0], g->in[1]};
    g->din[0] = gradd_emit_attrs(g->b, "ScatterRows", in, 2, &dims, 1);
    return g->b->status;
}

static gradd_status_t grad_scatter(gradd_grad_t *g) {
    const gradd_attr_t *dims = gradd_attr_find(g->attrs, "dims");
    if (!g->need[0] || g->dout[0] == GRADD_NONE) return GRADD_OK;
    const gradd_attr_t attrs[2] = {gradd_make_int("lead", (int64_t)dims->n),
                                   gradd_make_int("fill", 0)};
    gradd_val_t in[2] = {g->dout[0], g->in[1]};
    g->din[0] =
        gradd_reshape_as(g->b, gradd_emit_attrs(g->b, "GatherRows", in, 2, attrs, 2), g->in[0]);
    return g->b->status;
}

/* ---- places and ranges ----------------------------------------------------------------------- */

/* Behind the end of `others` there is no limit to a row. */
static gradd_status_t compute_within(const gradd_launch_t *r) {
    int64_t *room = r->workspace, *y = r->out[0].data;
    list_t others, rows;
    GRADD_TRY(read_list(&r->in[1], INT64_MAX, room, &others));
    GRADD_TRY(read_list(&r->in[0], INT64_MAX, room + others.n, &rows));
    for (int64_t i = 0; i < rows.n; i++) {
        const gradd_fault_t f = gradd_live_position(others.at, others.n_live, rows.at[i], &y[i]);
        GRADD_TRY(gradd_fault_fail(&f));
    }
    return GRADD_OK;
}

static gradd_status_t infer_within(gradd_infer_t *c) {
    for (int i = 0; i < 2; i++)
        if (c->in[i].type.rank != 1 || !c->in[i].type.dims[0])
            return GRADD_FAIL(GRAPH, "input %d is no list of live rows", i);
    c->out[0] = c->in[0].type;
    return GRADD_OK;
}

static gradd_status_t infer_cross(gradd_infer_t *c) {
    for (int i = 0; i < 2; i++)
        if (c->in[i].type.rank != 1 || !c->in[i].type.dims[0])
            return GRADD_FAIL(GRAPH, "input %d is no list of live rows", i);
    if (gradd_attr_int(c->attrs, "positions", 0) < 1 ||
        gradd_attr_int(c->attrs, "other_positions", 0) < 1)
        return GRADD_FAIL(GRAPH, "sequences without positions");
    c->out[0] = (gradd_type_t){
        GRADD_DT_I32, 4, {1, 1, c->in[0].type.dims[0], 3}
    };
    return GRADD_OK;
}

static size_t workspace_within(const gradd_infer_t *c) {
    return workspace_list(c) + sizeof(int64_t) * (size_t)gradd_type_count(&c->in[0].type);
}

static gradd_status_t compute_ranges(const gradd_launch_t *r) {
    int32_t *y = r->out[0].data;
    list_t list;
    GRADD_TRY(read_list(&r->in[0], INT32_MAX, r->workspace, &list));
    for (int64_t i = 0; i < list.n; i++, y += 3) {
        const gradd_fault_t f =
            gradd_live_range(list.at, list.n_live, i, r->in[1].data, r->in[1].type.dims[0], y);
        GRADD_TRY(gradd_fault_fail(&f));
    }
    return GRADD_OK;
}

static gradd_status_t compute_cross(const gradd_launch_t *r) {
    const int64_t positions = gradd_attr_int(r->attrs, "positions", 1);
    const int64_t other_positions = gradd_attr_int(r->attrs, "other_positions", 1);
    int64_t *room = r->workspace;
    int32_t *y = r->out[0].data;
    list_t others, rows;
    GRADD_TRY(read_list(&r->in[1], INT32_MAX, room, &others));
    GRADD_TRY(read_list(&r->in[0], INT32_MAX, room + others.n, &rows));
    for (int64_t i = 0; i < rows.n; i++, y += 3)
        gradd_live_sequence(others.at, others.n_live, gradd_live_row(rows.at[i]) / positions,
                            other_positions, y);
    return GRADD_OK;
}

/* Ranges of one sequence, whose first position is `start`: within the intervals, and the segment.
 */
static void find_segments(const gradd_launch_t *r, int64_t start) {
    const gradd_view_t *segments = &r->in[0];
    const int64_t n = r->in[1].type.dims[0];
    const int32_t *intervals = r->in[1].data;
    int32_t *y = (int32_t *)r->out[0].data + 3 * start;
    int64_t from = 0, to = n, last = 0;
    for (int64_t s = 0; s < n; s++) {
        const int64_t own = gradd_pick_index(segments, start + s);
        if (s && own != last) from = s;
        y[3 * s] = (int32_t)(from > intervals[2 * s] ? from : intervals[2 * s]);
        y[3 * s + 2] = GRADD_ATTN_SOLID;
        last = own;
    }
    for (int64_t s = n - 1; s >= 0; s--) {
        const int64_t own = gradd_pick_index(segments, start + s);
        if (s < n - 1 && own != last) to = s + 1;
        y[3 * s + 1] = (int32_t)(to < intervals[2 * s + 1] ? to : intervals[2 * s + 1]);
        last = own;
    }
}

static gradd_status_t compute_segments(const gradd_launch_t *r) {
    const int64_t positions = r->in[1].type.dims[0], n = gradd_type_count(&r->in[0].type);
#pragma omp parallel for schedule(static) if (n >= GRADD_PARALLEL_MIN)
    for (int64_t start = 0; start < n; start += positions)
        find_segments(r, start);
    return GRADD_OK;
}

static gradd_status_t infer_segments(gradd_infer_t *c) {
    const gradd_type_t *segments = &c->in[0].type, *intervals = &c->in[1].type;
    if (intervals->rank != 2 || intervals->dims[1] != 2 || !intervals->dims[0] ||
        gradd_type_count(segments) % intervals->dims[0])
        return GRADD_FAIL(GRAPH, "ranges need an interval for each position of a segment");
    c->out[0] = (gradd_type_t){
        GRADD_DT_I32,
        4,
        {gradd_type_count(segments) / intervals->dims[0], 1, intervals->dims[0], 3}
    };
    return GRADD_OK;
}

static gradd_status_t infer_ranges(gradd_infer_t *c) {
    const gradd_type_t *rows = &c->in[0].type, *intervals = &c->in[1].type;
    if (rows->rank != 1 || intervals->rank != 2 || intervals->dims[1] != 2 || !intervals->dims[0])
        return GRADD_FAIL(GRAPH, "ranges need a list of live rows and an interval per position");
    c->out[0] = (gradd_type_t){
        GRADD_DT_I32, 4, {1, 1, rows->dims[0], 3}
    };
    return GRADD_OK;
}

static size_t workspace_ranges(const gradd_infer_t *c) {
    return sizeof(int64_t) * (size_t)gradd_type_count(&c->in[0].type);
}

/* ---- rows ------------------------------------------------------------------------------------ */

#define LIST_TYPES {0xffffffffu, GRADD_DTB(I64)}

GRADD_OPS(
    liverows,
    GRADD_OP("GatherRows", "com.gradd", 1, (2, 2), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_CHEAP, .types = LIST_TYPES,
             .attrs = GRADD_ATTR_LIST({"lead", GRADD_ATTR_INT, false},
                                      {"offset", GRADD_ATTR_INT, false},
                                      {"positions", GRADD_ATTR_INT, false},
                                      {"fill", GRADD_ATTR_INT, false}),
             .infer = infer_gather, .grad = grad_gather, .ref = GRADD_REF(compute_gather),
             .cases = GRADD_CASES({.text = "f32[5,3] i64[3]={0,2,4}"},
                                  {.text = "f32[2,3,4] i64[4]={0,1,5,-6} | lead=2 fill=0"},
                                  {.text = "f32[2,3,4] i64[2]={-1,-1} | lead=2", .grad_tol = -1},
                                  {.text = "i64[2,3] i64[3]={0,3,-1} | lead=2 offset=1 fill=-100"},
                                  {.text = "i64[2,3] i64[6]={0,1,2,4,5,-1} | lead=2 offset=1 "
                                           "positions=3 fill=-100"},
                                  {.text = "i32[6] i64[3]={1,4,5} | offset=3 positions=2 fill=7"},
                                  {.text = "i32[4] i64[3]={1,3,-4} | fill=7"},
                                  {.text = "f32[4] i64[2]={1,3}"},
                                  {.text = "bool[2,2,1] i64[2]={1,3} | lead=2"},
                                  {.text = "f32[3,0] i64[2]={1,2}"},
                                  {.text = "f32[70,300] i64[4]={0,1,60,69}"},
                                  {.text = "f32[6,1500] i64[4]={0,2,5,-2}", .grad_tol = -1},
                                  {.text = "f32[6,1500] i64[4]={0,2,5,-2} | fill=0"})),
    GRADD_OP("ScatterRows", "com.gradd", 1, (2, 2), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_CHEAP, .types = LIST_TYPES,
             .attrs = GRADD_ATTR_LIST({"dims", GRADD_ATTR_INTS, true}), .infer = infer_scatter,
             .grad = grad_scatter, .ref = GRADD_REF(compute_scatter),
             .cases = GRADD_CASES({.text = "f32[3,2] i64[3]={0,2,4} | dims=[5]"},
                                  {.text = "f32[1,4,3] i64[4]={1,4,-5,-5} | dims=[2,3]"},
                                  {.text = "f32[1,2,3] i64[2]={-1,-1} | dims=[2,3]"},
                                  {.text = "f32[3] i64[3]={0,1,2} | dims=[3]"},
                                  {.text = "f32[2,300] i64[2]={5,69} | dims=[70]"},
                                  {.text = "f32[3,1500] i64[3]={2,5,-3} | dims=[6]"})),
    GRADD_OP("RowsWithin", "com.gradd", 1, (2, 2), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD, .types = {GRADD_DTB(I64)},
             .infer = infer_within, .ref = GRADD_REF(compute_within),
             .cases = GRADD_CASES({.text = "i64[4]={3,7,-8,-8} i64[5]={1,3,4,7,-8}"},
                                  {.text = "i64[2]={-1,-1} i64[3]={2,3,-4}"})),
    GRADD_OP("RowRanges", "com.gradd", 1, (2, 2), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD,
             .types = {GRADD_DTB(I64), GRADD_DTB(I32)}, .infer = infer_ranges,
             .ref = GRADD_REF(compute_ranges),
             .cases = GRADD_CASES({.text = "i64[6]={0,1,4,6,-7,-7} i32[4,2]={0,1,0,2,0,3,0,4}"},
                                  {.text = "i64[5]={1,2,3,5,7} i32[4,2]={0,2,0,3,1,4,2,4}"},
                                  {.text = "i64[2]={-1,-1} i32[4,2]={0,4,0,4,0,4,0,4}"})),
    GRADD_OP("CrossRanges", "com.gradd", 1, (2, 2), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD, .types = {GRADD_DTB(I64)},
             .attrs = GRADD_ATTR_LIST({"positions", GRADD_ATTR_INT, true},
                                      {"other_positions", GRADD_ATTR_INT, true}),
             .infer = infer_cross, .ref = GRADD_REF(compute_cross),
             .cases = GRADD_CASES({.text = "i64[4]={0,5,6,-7} i64[5]={1,3,4,7,-8} | positions=3 "
                                           "other_positions=4"},
                                  {.text = "i64[2]={2,3} i64[2]={-1,-1} | positions=2 "
                                           "other_positions=4"})),
    GRADD_OP("SegmentRanges", "com.gradd", 1, (2, 2), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD,
             .types = {GRADD_T_INDEX, GRADD_DTB(I32)}, .infer = infer_segments,
             .ref = GRADD_REF(compute_segments),
             .cases = GRADD_CASES({.text = "i64[2,4]={0,0,1,1,0,1,2,2} i32[4,2]={0,1,0,2,0,3,0,4}"},
                                  {.text = "i32[1,5]={3,3,3,2,1} i32[5,2]={0,5,0,5,1,5,1,5,2,5}"},
                                  {.text = "i64[3,700]:(0,1) i32[700,2]:(0,700)"},
                                  {.text = "i64[2,700]:(3,3) i32[700,2]:(0,700)"},
                                  {.text = "i64[0,4] i32[4,2]"})));

GRADD_KERNELS(
    cpu, liverows,
    GRADD_KERNEL("GatherRows", "loop", .workspace = workspace_list, .compute = compute_gather,
                 .cost = gradd_cost_pick),
    GRADD_KERNEL("ScatterRows", "loop", .workspace = workspace_list, .compute = compute_scatter,
                 .cost = gradd_cost_move),
    GRADD_KERNEL("RowsWithin", "loop", .workspace = workspace_within, .compute = compute_within),
    GRADD_KERNEL("RowRanges", "loop", .workspace = workspace_ranges, .compute = compute_ranges),
    GRADD_KERNEL("CrossRanges", "loop", .workspace = workspace_within, .compute = compute_cross),
    GRADD_KERNEL("SegmentRanges", "loop", .compute = compute_segments));
