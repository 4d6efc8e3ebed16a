/* ScatterND and ScatterElements: a copy of x with updates u written, or added, at given places.
 *
 * ScatterND:       y = x, y[index[j, 0..d), i] = u[j, i]
 * ScatterElements: y = x, y[..index[..j..]..] = u[..j..] along one axis
 *
 * reduction "none" writes (the last of repeated indices wins; ONNX leaves that open), "add" adds in
 * rising order of j. Gradients of "none": dx = dy with zeros at the places written, du = dy
 * gathered there; of "add": dx = dy, du the same gather; of "min" and "max" (which keep a NaN) all
 * elements that equal the result share its gradient evenly. mul runs forward only; these three are
 * serial.
 */
#include <string.h>

#include "kernels/contract/kernel.h"
#include "kernels/contract/op.h"
#include "kernels/cpu/copy.h"
#include "kernels/cpu/half.h"
#include "kernels/cpu/parts.h"
#include "kernels/cpu/pick.h"
#include "kernels/cpu/picked_rows.h"
#include "kernels/describe/cost.h"
#include "kernels/describe/dispatch.h"
#include "kernels/math/formulas.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

static bool is_nd(const gradd_op_t *op) {
    return !strcmp(op->name, "ScatterND");
}

static const char *reduction_of(gradd_attrs_t attrs) {
    return gradd_attr_string(attrs, "reduction", "none");
}

/* ---- kernels --------------------------------------------------------------------------------- */

/* Which rows of x are written, and how many of them. No numbers yet. */
static gradd_rows_t rows_of(const gradd_op_t *op, const gradd_type_t *x,
                            const gradd_type_t *index) {
    if (!is_nd(op)) return (gradd_rows_t){NULL, gradd_type_count(index), gradd_type_count(x), 1};
    const int last = index->rank - 1, depth = (int)index->dims[last];
    return (gradd_rows_t){NULL, gradd_pick_count(index, 0, last), gradd_pick_count(x, 0, depth),
                          gradd_pick_count(x, depth, x->rank)};
}

/* The pieces of these rows, as rows. */
static gradd_rows_t pieces_of(const gradd_op_t *op, const gradd_type_t *x,
                              const gradd_type_t *index) {
    const gradd_rows_t rows = rows_of(op, x, index);
    const int64_t pieces = gradd_rows_pieces(rows.size, gradd_dtype_bytes(x->dtype));
    return gradd_rows_cut(&rows, pieces, NULL, false);
}

/* Bytes of the lists of numbers in scratch memory. */
static size_t numbers(const gradd_op_t *op, const gradd_type_t *x, const gradd_type_t *index) {
    const int64_t n = rows_of(op, x, index).n, pieces = pieces_of(op, x, index).n;
    return (size_t)(pieces > n ? pieces + n : n) * sizeof(int64_t);
}

static gradd_status_t number(const gradd_launch_t *r, gradd_range_t some, int64_t *list) {
    const gradd_type_t *x = &r->in[0].type;
    int axis;
    if (is_nd(r->op)) return gradd_pick_nd(x, 0, &r->in[1], some, list);
    GRADD_TRY(gradd_axis(gradd_attr_int(r->attrs, "axis", 0), x->rank, false, &axis));
    return gradd_pick_elements(x, axis, &r->in[1], some, list);
}

/* Some of the numbers of pieces; all of them at first, if there are several of a row. */
static gradd_status_t make_rows(const gradd_launch_t *r, gradd_range_t some, gradd_rows_t *out) {
    const gradd_type_t *x = &r->in[0].type;
    gradd_rows_t rows = rows_of(r->op, x, &r->in[1].type);
    const int64_t pieces = gradd_rows_pieces(rows.size, gradd_dtype_bytes(x->dtype));
    int64_t *list = r->workspace, *whole = list + (pieces > 1 ? rows.n * pieces : 0);
    rows.row = whole;
    if (pieces > 1) some = r->part ? (gradd_range_t){0, 0} : (gradd_range_t){0, rows.n};
    if (some.from < some.to) GRADD_TRY(number(r, some, whole));
    *out = pieces > 1 ? gradd_rows_cut(&rows, pieces, list, !r->part) : rows;
    return GRADD_OK;
}

/* The formulas with a of one type: the product of a target and an update, else of an update and a
 * target, which stays if it is NaN. */
#define FOLDED(T, kind, t, f)                                                                      \
    ({                                                                                             \
        T a = (kind) == '*' ? (t) : (f), b = (kind) == '*' ? (f) : (t);                            \
        (T)((kind) == '*'   ? _Generic(a, float: E_MUL(v), double: E_MUL(v), default: E_MUL_I(v))  \
            : (kind) == '<' ? E_MIN(v)                                                             \
                            : E_MAX(v));                                                           \
    })

static void fold_halves(const gradd_rows_t *rows, char kind, gradd_dtype_t dtype, uint16_t *to,
                        const uint16_t *from) {
    for (int64_t i = 0; i < rows->n; i++) {
        uint16_t *t = to + rows->row[i] * rows->size;
        const uint16_t *f = from + i * rows->size;
        for (int64_t k = 0; k < rows->size; k++) {
            const float here = gradd_half_f32(&t[k], dtype), new = gradd_half_f32(&f[k], dtype);
            gradd_half_put(&t[k], dtype, FOLDED(float, kind, here, new));
        }
    }
}

static gradd_status_t fold_rows(const gradd_rows_t *rows, char kind, gradd_dtype_t dtype, void *to,
                                const void *from) {
    if (gradd_dtype_is_half(dtype)) {
        fold_halves(rows, kind, dtype, to, from);
        return GRADD_OK;
    }
    GRADD_SWITCH_NUM(dtype, T, {
        for (int64_t i = 0; i < rows->n; i++) {
            T *t = (T *)to + rows->row[i] * rows->size;
            const T *f = (const T *)from + i * rows->size;
            for (int64_t k = 0; k < rows->size; k++)
                t[k] = FOLDED(T, kind, t[k], f[k]);
        }
    });
    return GRADD_OK;
}

/* The first stage of parts makes all numbers of rows, and the copy: where x is overwritten, an
 * index out of range has changed nothing. The second one writes the rows in rising order. */
static gradd_status_t compute_scatter(const gradd_launch_t *r) {
    const gradd_type_t *x = &r->in[0].type;
    const char *how = reduction_of(r->attrs);
    const size_t element = gradd_dtype_bytes(x->dtype);
    const bool nothing = gradd_type_count(&r->in[2].type) == 0, add = !strcmp(how, "add");
    void *y = r->out[0].data;
    gradd_rows_t rows = pieces_of(r->op, x, &r->in[1].type);
    if (nothing) rows.n = 0;
    const int stages = add ? gradd_rows_add_stages(&rows, x->dtype) : 2;
    if (!nothing) GRADD_TRY(make_rows(r, gradd_stage_of(r, 0, stages, rows.n), &rows));
    if (add)
        return gradd_rows_add(&(gradd_row_adds_t){.rows = rows,
                                                  .dtype = x->dtype,
                                                  .start = r->in[0].data,
                                                  .to = y,
                                                  .from = r->in[2].data,
                                                  .launch = r,
                                                  .workspace = (char *)r->workspace +
                                                               numbers(r->op, x, &r->in[1].type)});
    const gradd_range_t copied = gradd_half_of(r, false, gradd_type_bytes(x));
    if (copied.to > copied.from)
        gradd_copy_bytes((char *)y + copied.from, (const char *)r->in[0].data + copied.from,
                         (size_t)(copied.to - copied.from));
    const gradd_range_t some = gradd_half_of(r, true, rows.n);
    if (some.from >= some.to) return GRADD_OK;
    const char *from = (const char *)r->in[2].data + (size_t)(some.from * rows.size) * element;
    rows.row += some.from, rows.n = some.to - some.from;
    if (!strcmp(how, "none")) return gradd_rows_put(&rows, element, y, from);
    const char kind = !strcmp(how, "mul") ? '*' : !strcmp(how, "min") ? '<' : '>';
    return fold_rows(&rows, kind, x->dtype, y, from);
}

static int parts_scatter(const gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[0].type;
    const gradd_rows_t rows = pieces_of(c->op, x, &c->in[1].type);
    if (!strcmp(reduction_of(c->attrs), "add")) return gradd_rows_add_parts(c, &rows, x->dtype);
    return gradd_parts_of_tasks(c, rows.n);
}

/* A row is somewhere else in memory than the one before, so each waits: as long as 600 bytes take
 * to move. */
static void cost_scatter(const gradd_infer_t *c, gradd_cost_t *cost) {
    gradd_cost_move(c, cost);
    cost->again = 600 * (double)rows_of(c->op, &c->in[0].type, &c->in[1].type).n;
}

/* ---- shape rules ----------------------------------------------------------------------------- */

static gradd_status_t check_reduction(const gradd_infer_t *c) {
    static const char *const known[] = {"none", "add", "mul", "min", "max"};
    const char *how = reduction_of(c->attrs);
    for (int i = 0; i < 5; i++)
        if (!strcmp(how, known[i])) {
            if (i && !(1u << c->in[0].type.dtype & GRADD_T_NUM))
                return GRADD_FAIL(UNSUPPORTED, "reduction '%s' of %s", how,
                                  gradd_dtype_name(c->in[0].type.dtype));
            return GRADD_OK;
        }
    return GRADD_FAIL(UNSUPPORTED, "reduction '%s'", how);
}

static gradd_status_t infer_scatter_nd(gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[0].type, *index = &c->in[1].type;
    GRADD_TRY(check_reduction(c));
    int64_t depth = index->rank ? index->dims[index->rank - 1] : 0;
    if (index->rank < 1 || depth > x->rank)
        return GRADD_FAIL(GRAPH, "the indices do not fit data of rank %d", x->rank);
    gradd_type_t want = {.dtype = x->dtype, .rank = index->rank - 1 + x->rank - (int)depth};
    if (want.rank > GRADD_MAX_RANK) return GRADD_FAIL(LIMIT, "the updates' rank is too high");
    for (int i = 0; i < index->rank - 1; i++)
        want.dims[i] = index->dims[i];
    for (int i = (int)depth; i < x->rank; i++)
        want.dims[index->rank - 1 + i - depth] = x->dims[i];
    if (!gradd_type_equal(&want, &c->in[2].type)) {
        char a[GRADD_TYPE_TEXT], b[GRADD_TYPE_TEXT];
        return GRADD_FAIL(GRAPH, "updates are %s, expected %s",
                          gradd_type_format(&c->in[2].type, a), gradd_type_format(&want, b));
    }
    c->out[0] = *x;
    return GRADD_OK;
}

static gradd_status_t infer_scatter_elements(gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[0].type, *index = &c->in[1].type;
    int axis;
    GRADD_TRY(check_reduction(c));
    GRADD_TRY(gradd_axis(gradd_attr_int(c->attrs, "axis", 0), x->rank, false, &axis));
    if (index->rank != x->rank || !gradd_type_same_shape(index, &c->in[2].type))
        return GRADD_FAIL(GRAPH, "indices and updates must have one shape, of rank %d", x->rank);
    if (c->in[2].type.dtype != x->dtype)
        return GRADD_FAIL(GRAPH, "updates and data differ in element type");
    for (int i = 0; i < x->rank; i++)
        if (i != axis && index->dims[i] > x->dims[i])
            return GRADD_FAIL(GRAPH, "axis %d of the indices is longer than that of data", i);
    c->out[0] = *x;
    return GRADD_OK;
}

static size_t workspace_scatter(const gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[0].type, *index = &c->in[1].type;
    const gradd_rows_t rows = pieces_of(c->op, x, index);
    const bool add = !strcmp(reduction_of(c->attrs), "add");
    return numbers(c->op, x, index) + (add ? gradd_rows_add_workspace(&rows, x->dtype) : 0);
}

/* ---- gradient rule --------------------------------------------------------------------------- */

static gradd_val_t emit_at(gradd_grad_t *g, const char *op, const gradd_val_t *in, int n_in,
                           const char *how) {
    gradd_attr_t attrs[2];
    int n = 0;
    if (how) attrs[n++] = gradd_make_string("reduction", how);
    if (!is_nd(g->op)) attrs[n++] = gradd_make_int("axis", gradd_attr_int(g->attrs, "axis", 0));
    return gradd_emit_attrs(g->b, op, in, n_in, attrs, n);
}

/* For max and min: every element that equals the result gets an equal share of its gradient. */
static gradd_status_t grad_extremum(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    const char *gather = is_nd(g->op) ? "GatherND" : "GatherElements";
    gradd_attr_t to = gradd_make_int("to", gradd_val_type(b, g->in[0])->dtype);
    gradd_val_t y = g->output(g, 0);
    gradd_val_t there = emit_at(g, gather, (gradd_val_t[]){y, g->in[1]}, 2, NULL);
    gradd_val_t own = GRADD_EMIT(b, "Equal", g->in[0], y);
    gradd_val_t other = GRADD_EMIT(b, "Equal", g->in[2], there);
    own = gradd_emit_attrs(b, "Cast", &own, 1, &to, 1);
    other = gradd_emit_attrs(b, "Cast", &other, 1, &to, 1);
    gradd_val_t count = emit_at(g, g->op->name, (gradd_val_t[]){own, g->in[1], other}, 3, "add");
    gradd_val_t share = GRADD_EMIT(b, "Div", g->dout[0], count);
    if (g->need[0]) g->din[0] = GRADD_EMIT(b, "Mul", own, share);
    if (g->need[2]) {
        share = emit_at(g, gather, (gradd_val_t[]){share, g->in[1]}, 2, NULL);
        g->din[2] = GRADD_EMIT(b, "Mul", other, share);
    }
    return b->status;
}

static gradd_status_t grad_scatter(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    const char *how = reduction_of(g->attrs);
    bool add = !strcmp(how, "add"), nd = is_nd(g->op);
    if (!strcmp(how, "max") || !strcmp(how, "min")) return grad_extremum(g);
    if (!add && strcmp(how, "none"))
        return GRADD_FAIL(UNSUPPORTED, "no gradient of %s with reduction '%s'", g->op->name, how);
    gradd_attr_t attr = gradd_make_int("axis", gradd_attr_int(g->attrs, "axis", 0));
    if (g->need[0] && add) g->din[0] = g->dout[0];
    if (g->need[0] && !add) {
        gradd_val_t in[3] = {g->dout[0], g->in[1], gradd_zeros_like(b, g->in[2])};
        g->din[0] = gradd_emit_attrs(b, g->op->name, in, 3, &attr, nd ? 0 : 1);
    }
    if (g->need[2]) {
        gradd_val_t in[2] = {g->dout[0], g->in[1]};
        g->din[2] =
            gradd_emit_attrs(b, nd ? "GatherND" : "GatherElements", in, 2, &attr, nd ? 0 : 1);
    }
    return b->status;
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* The cases of "none" name every index once, or the gradient of u would be ill defined. */
GRADD_OPS(
    scatter,
    GRADD_OP(
        "ScatterND", "", 11, (3, 3), (1, 1), .types = {0xffffffffu, GRADD_T_INDEX, 0xffffffffu},
        .attrs = GRADD_ATTR_LIST({"reduction", GRADD_ATTR_STRING, false}),
        .infer = infer_scatter_nd, .grad = grad_scatter, .ref = GRADD_REF(compute_scatter),
        .cases = GRADD_CASES(
            {.text = "f32[5,3] i64[2,1]={4,-4} f32[2,3]"},
            {.text = "f32[4,5] i64[3,2]={0,0,3,4,1,-1} f32[3]"},
            {.text = "f32[4,5] i64[3,2]={0,0,0,0,1,2} f32[3] | reduction=\"add\""},
            {.text = "f32[4,5] i64[3,1]={0,2,0} f32[3,5] | reduction=\"max\""},
            {.text = "f32[4,5] i64[3,1]={0,2,0} f32[3,5] | reduction=\"min\""},
            {.text = "f32[4,5] i64[3,1]={0,2,0} f32[3,5] | reduction=\"mul\"", .grad_tol = -1},
            {.text = "i64[6] i64[2,1]={5,0} i64[2]"}, {.text = "f32[3] i64[0,1] f32[0]"},
            {.text = "bool[5,7] i64[2,1]={3,0} bool[2,7]"},
            {.text = "f32[40,300] i64[300,1]:(-40,39) f32[300,300]", .grad_tol = -1},
            {.text = "f32[4000,2] i64[500,1]:(0,3999) f32[500,2]", .grad_tol = -1},
            {.text = "f32[90,8] i64[5,1]={7,7,-83,2,7} f32[5,8]", .grad_tol = -1},
            {.text = "f32[3,16] i64[300,1]:(0,2) f32[300,16] | reduction=\"add\""},
            {.text = "f32[3,3] i64[65,1]:(1,1) f32[65,3] | reduction=\"add\""},
            {.text = "f32[5,16] i64[3,1]={4,0,-3} f32[3,16] | reduction=\"mul\"", .grad_tol = -1},
            {.text = "f32[3,16] i64[90,1]:(0,2) f32[90,16] | reduction=\"min\"", .grad_tol = -1},
            {.text = "f32[4]={1,nan,-0.0,2} i64[6,1]={0,0,1,2,3,3} "
                     "f32[6]={nan,3,4,0,inf,-inf} | reduction=\"max\"",
             .grad_tol = -1},
            {.text = "i64[6] i64[300,1]:(0,5) i64[300] | reduction=\"add\""},
            {.text = "i32[6] i64[80,1]:(0,5) i32[80]:(1,9) | reduction=\"mul\""})),
    GRADD_OP(
        "ScatterElements", "", 11, (3, 3), (1, 1),
        .types = {0xffffffffu, GRADD_T_INDEX, 0xffffffffu},
        .attrs = GRADD_ATTR_LIST({"axis", GRADD_ATTR_INT, false},
                                 {"reduction", GRADD_ATTR_STRING, false}),
        .infer = infer_scatter_elements, .grad = grad_scatter, .ref = GRADD_REF(compute_scatter),
        .cases = GRADD_CASES({.text = "f32[3,5] i64[2,2]={0,4,-3,1} f32[2,2] | axis=1"},
                             {.text = "f32[5,3] i64[2,3]={1,0,2,4,1,3} f32[2,3]"},
                             {.text = "f32[5,3] i64[4,3] f32[4,3] | reduction=\"add\""},
                             {.text = "f32[2,5] i32[2,4] f32[2,4] | axis=-1 reduction=\"max\""},
                             {.text = "f32[3,5,4] i64[3,90,4] f32[3,90,4] | axis=1 "
                                      "reduction=\"add\""},
                             {.text = "f32[60,70] i32[50,70]:(-60,59) f32[50,70]", .grad_tol = -1},
                             {.text = "i64[1,4] i64[1,2]={3,0} i64[1,2] | axis=1"})));

GRADD_KERNELS(cpu, scatter,
              GRADD_KERNEL("ScatterND", "loop", .inplace = 1, .compute = compute_scatter,
                           .workspace = workspace_scatter, .parts = parts_scatter,
                           .cost = cost_scatter),
              GRADD_KERNEL("ScatterElements", "loop", .inplace = 1, .compute = compute_scatter,
                           .workspace = workspace_scatter, .parts = parts_scatter,
                           .cost = cost_scatter));
