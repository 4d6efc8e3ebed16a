/* EmbeddingSum: rows of one to nine tables, looked up and added in one pass, and its gradient.
 *
 * Math: y[i, :] = scale0 table0[ids0[i], :] + scale1 table1[ids1[i], :] + ..., added in this order,
 * in f32 for bf16, which is rounded once; without `scales` all are 1. Inputs: T tables [R, D], then
 * the T ids of these, whose shapes broadcast; y has the ids' shape and D. Negative ids count from
 * the end. Saved for backward: ids.
 *
 * EmbeddingGrad(dy, ids[, base]; dims, padding, scale) -> dtable adds the rows of dy where they
 * came from, times `scale`, to zeros or to `base`, the gradient from the table's other readers.
 * Where an id equals `padding` (torch's padding_idx) nothing is added. Only rows that were looked
 * up are summed (kernels/cpu/row_sums.h); the others are only cleared.
 *
 * Up to three tables without scales, which is what most models have, are added in one loop; others
 * one after another to a block of columns. */
#include "kernels/contract/fault.h"
#include "kernels/contract/kernel.h"
#include "kernels/cpu/copy.h"
#include "kernels/cpu/half.h"
#include "kernels/cpu/parts.h"
#include "kernels/cpu/pick.h"
#include "kernels/cpu/row_sums.h"
#include "kernels/describe/dispatch.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rowwise.h"
#include "kernels/rules/rules.h"

#include <string.h>

enum { TABLES = 9, FEW = 3, BLOCK = 256 };
enum { BASE = 2 }; /* operand of EmbeddingGrad */

/* ---- ids to rows ----------------------------------------------------------------------------- */

/* Steps of ids within a shape of `rank` dimensions that it broadcasts to; 0 where it does. */
static void broadcast_steps(const gradd_type_t *ids, int rank, int64_t *steps) {
    int64_t step = 1;
    for (int i = rank - 1; i >= 0; i--) {
        int at = i - (rank - ids->rank);
        int64_t n = at >= 0 ? ids->dims[at] : 1;
        steps[i] = n == 1 ? 0 : step;
        step *= n;
    }
}

typedef struct lookup_s {
    const gradd_view_t *ids;
    const gradd_type_t *shape; /* of the result: its last dimension is a row's */
    int64_t extent;            /* rows of the table */
    int64_t padding;           /* the id that stands for no row; -1 = none */
    int table;                 /* for messages */
} lookup_t;

/* Table row per position of the shape, checked; -1 for padding. */
static gradd_status_t find_rows(const lookup_t *l, int64_t *rows) {
    const gradd_view_t *ids = l->ids;
    const gradd_type_t *shape = l->shape;
    const int64_t extent = l->extent, padding = l->padding;
    const int rank = shape->rank - 1;
    int64_t steps[GRADD_MAX_RANK], at[GRADD_MAX_RANK] = {0}, from = 0, n = 1;
    broadcast_steps(&ids->type, rank, steps);
    for (int a = 0; a < rank; a++)
        n *= shape->dims[a];
    for (int64_t i = 0; i < n; i++) {
        int64_t id = gradd_pick_index(ids, from), row = id < 0 ? id + extent : id;
        if (row < 0 || row >= extent)
            return gradd_fault_fail(&(gradd_fault_t){.kind = GRADD_FAULT_TABLE_INDEX,
                                                     .value = id,
                                                     .limit = extent,
                                                     .position = from,
                                                     .table = l->table});
        rows[i] = padding >= 0 && id == padding ? -1 : row;
        for (int a = rank - 1; a >= 0; a--) {
            from += steps[a];
            if (++at[a] < shape->dims[a]) break;
            from -= steps[a] * shape->dims[a];
            at[a] = 0;
        }
    }
    return GRADD_OK;
}

/* ---- forward --------------------------------------------------------------------------------- */

typedef struct sum_s {
    int n_tables;
    int64_t n, width; /* rows of y, elements of one */
    const void *table[TABLES];
    const int64_t *row[TABLES];
    const double *scale; /* one per table; NULL = all 1 */
    void *y;
} sum_t;

#define SUM_ROWS(T, R, READ, WRITE)                                                                \
    GRADD_MULTIARCH static void sum_row_##T(int n_tables, int64_t n, T *y, const T *a, const T *b, \
                                            const T *c) {                                          \
        if (n_tables == 1)                                                                         \
            memcpy(y, a, sizeof(T) * (size_t)n);                                                   \
        else if (n_tables == 2) {                                                                  \
            _Pragma("omp simd") for (int64_t i = 0; i < n; i++) y[i] =                             \
                WRITE(READ(a[i]) + READ(b[i]));                                                    \
        } else {                                                                                   \
            _Pragma("omp simd") for (int64_t i = 0; i < n; i++) y[i] =                             \
                WRITE(READ(a[i]) + READ(b[i]) + READ(c[i]));                                       \
        }                                                                                          \
    }                                                                                              \
    static void sum_rows_##T(const sum_t *s) {                                                     \
        const bool many = s->n * s->width >= GRADD_PARALLEL_MIN;                                   \
        _Pragma("omp parallel for schedule(static) if (many)") for (int64_t i = 0; i < s->n;       \
                                                                    i++) {                         \
            const T *from[FEW] = {NULL};                                                           \
            for (int t = 0; t < s->n_tables; t++)                                                  \
                from[t] = (const T *)s->table[t] + s->row[t][i] * s->width;                        \
            sum_row_##T(s->n_tables, s->width, (T *)s->y + i * s->width, from[0], from[1],         \
                        from[2]);                                                                  \
        }                                                                                          \
    }

SUM_ROWS(float, float, , )
SUM_ROWS(double, double, , )
SUM_ROWS(gradd_bf16_t, float, gradd_bf16_f32, gradd_f32_bf16)
SUM_ROWS(gradd_f16_t, float, gradd_f16_f32, gradd_f32_f16)

#define SUM_MANY(T, R, READ, WRITE)                                                                \
    /* columns [at, at + n) of row i */                                                            \
    GRADD_MULTIARCH static void sum_block_##T(const sum_t *s, int64_t i, int64_t at, int64_t n) {  \
        R sum[BLOCK];                                                                              \
        T *y = (T *)s->y + i * s->width + at;                                                      \
        for (int t = 0; t < s->n_tables; t++) {                                                    \
            const T *x = (const T *)s->table[t] + s->row[t][i] * s->width + at;                    \
            const R scale = s->scale ? (R)s->scale[t] : 1;                                         \
            if (t == 0) {                                                                          \
                _Pragma("omp simd") for (int64_t k = 0; k < n; k++) sum[k] = scale * READ(x[k]);   \
            } else {                                                                               \
                _Pragma("omp simd") for (int64_t k = 0; k < n; k++) sum[k] += scale * READ(x[k]);  \
            }                                                                                      \
        }                                                                                          \
        _Pragma("omp simd") for (int64_t k = 0; k < n; k++) y[k] = WRITE(sum[k]);                  \
    }                                                                                              \
    static void sum_long_row_##T(const sum_t *s, int64_t i) {                                      \
        for (int64_t at = 0; at < s->width; at += BLOCK)                                           \
            sum_block_##T(s, i, at, s->width - at < BLOCK ? s->width - at : BLOCK);                \
    }                                                                                              \
    static void sum_many_##T(const sum_t *s) {                                                     \
        const bool many = s->n * s->width >= GRADD_PARALLEL_MIN;                                   \
        _Pragma("omp parallel for schedule(static) if (many)") for (int64_t i = 0; i < s->n; i++)  \
            sum_long_row_##T(s, i);                                                                \
    }                                                                                              \
    static void sum_##T(const sum_t *s) {                                                          \
        if (s->scale || s->n_tables > FEW)                                                         \
            sum_many_##T(s);                                                                       \
        else                                                                                       \
            sum_rows_##T(s);                                                                       \
    }

SUM_MANY(float, float, , )
SUM_MANY(double, double, , )
SUM_MANY(gradd_bf16_t, float, gradd_bf16_f32, gradd_f32_bf16)
SUM_MANY(gradd_f16_t, float, gradd_f16_f32, gradd_f32_f16)

static const double *find_scales(gradd_attrs_t attrs) {
    const gradd_attr_t *scales = gradd_attr_find(attrs, "scales");
    return scales ? scales->floats : NULL;
}

/* Rows of all tables, n numbers for each. */
static gradd_status_t find_all_rows(const gradd_launch_t *r, int64_t n, int64_t *rows) {
    const gradd_type_t *y = &r->out[0].type;
    const int tables = r->n_in / 2;
    for (int t = 0; t < tables; t++)
        GRADD_TRY(find_rows(&(lookup_t){&r->in[tables + t], y, r->in[t].type.dims[0], -1, t},
                            rows + t * n));
    return GRADD_OK;
}

static gradd_status_t compute_sum(const gradd_launch_t *r) {
    const gradd_type_t *y = &r->out[0].type;
    sum_t s = {.n_tables = r->n_in / 2,
               .n = 1,
               .width = y->dims[y->rank - 1],
               .scale = find_scales(r->attrs),
               .y = r->out[0].data};
    for (int i = 0; i + 1 < y->rank; i++)
        s.n *= y->dims[i];
    GRADD_TRY(find_all_rows(r, s.n, r->workspace));
    for (int t = 0; t < s.n_tables; t++) {
        s.table[t] = r->in[t].data;
        s.row[t] = (const int64_t *)r->workspace + t * s.n;
    }
    if (y->dtype == GRADD_DT_F32)
        sum_float(&s);
    else if (y->dtype == GRADD_DT_F64)
        sum_double(&s);
    else if (y->dtype == GRADD_DT_F16)
        sum_gradd_f16_t(&s);
    else
        sum_gradd_bf16_t(&s);
    return GRADD_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

static int64_t rows_of_grad(const gradd_type_t *dy) {
    int64_t n = 1;
    for (int i = 0; i + 1 < dy->rank; i++)
        n *= dy->dims[i];
    return n;
}

static gradd_status_t compute_grad(const gradd_launch_t *r) {
    const gradd_type_t *dy = &r->in[0].type, *out = &r->out[0].type;
    const bool onto = r->n_in > BASE && r->in[BASE].type.dtype;
    int64_t *rows = r->workspace;
    const int64_t n = rows_of_grad(dy);
    const lookup_t lookup = {&r->in[1], dy, out->dims[0], gradd_attr_int(r->attrs, "padding", -1),
                             0};
    if (!r->part) GRADD_TRY(find_rows(&lookup, rows));
    const gradd_range_t copied = gradd_half_of(r, false, onto ? gradd_type_bytes(out) : 0);
    if (copied.to > copied.from)
        gradd_copy_bytes((char *)r->out[0].data + copied.from,
                         (const char *)r->in[BASE].data + copied.from,
                         (size_t)(copied.to - copied.from));
    const gradd_row_sums_t sums = {.row = rows,
                                   .n = n,
                                   .n_rows = out->dims[0],
                                   .width = out->dims[1],
                                   .scale = gradd_attr_float(r->attrs, "scale", 1),
                                   .clear = !onto,
                                   .launch = r};
    return gradd_row_sums(&sums, out->dtype, r->out[0].data, r->in[0].data, rows + n);
}

/* ---- the definitions ------------------------------------------------------------------------- */

static double element(const gradd_view_t *v, int64_t i) {
    if (v->type.dtype == GRADD_DT_F32) return (double)((const float *)v->data)[i];
    if (v->type.dtype == GRADD_DT_F64) return ((const double *)v->data)[i];
    return (double)gradd_half_f32((const uint16_t *)v->data + i, v->type.dtype);
}

static void put(const gradd_view_t *v, int64_t i, double x) {
    if (v->type.dtype == GRADD_DT_F32)
        ((float *)v->data)[i] = (float)x;
    else if (v->type.dtype == GRADD_DT_F64)
        ((double *)v->data)[i] = x;
    else
        gradd_half_put((uint16_t *)v->data + i, v->type.dtype, (float)x);
}

static gradd_status_t ref_sum(const gradd_launch_t *r) {
    const gradd_type_t *y = &r->out[0].type;
    int64_t width = y->dims[y->rank - 1], n = gradd_type_count(y) / (width ? width : 1);
    int64_t *rows = r->workspace;
    const double *scale = find_scales(r->attrs);
    GRADD_TRY(find_all_rows(r, n, rows));
    for (int64_t i = 0; i < n * width; i++) {
        double sum = 0;
        for (int t = 0; t < r->n_in / 2; t++)
            sum += (scale ? scale[t] : 1) *
                   element(&r->in[t], rows[t * n + i / width] * width + i % width);
        put(&r->out[0], i, sum);
    }
    return GRADD_OK;
}

static gradd_status_t ref_grad(const gradd_launch_t *r) {
    const gradd_type_t *dy = &r->in[0].type, *out = &r->out[0].type;
    int64_t width = out->dims[1], n = gradd_type_count(dy) / (width ? width : 1),
            *rows = r->workspace;
    GRADD_TRY(find_rows(
        &(lookup_t){&r->in[1], dy, out->dims[0], gradd_attr_int(r->attrs, "padding", -1), 0},
        rows));
    const bool onto = r->n_in > BASE && r->in[BASE].type.dtype;
    for (int64_t i = 0; i < gradd_type_count(out); i++) {
        double sum = 0, base = onto ? element(&r->in[BASE], i) : 0;
        for (int64_t k = 0; k < n; k++)
            if (rows[k] == i / width) sum += element(&r->in[0], k * width + i % width);
        put(&r->out[0], i, base + gradd_attr_float(r->attrs, "scale", 1) * sum);
    }
    return GRADD_OK;
}

/* ---- shape rules ----------------------------------------------------------------------------- */

static gradd_status_t check_per_table(gradd_attrs_t attrs, const char *name, int tables) {
    const gradd_attr_t *attr = gradd_attr_find(attrs, name);
    if (!attr || attr->n == (size_t)tables) return GRADD_OK;
    return GRADD_FAIL(GRAPH, "%d tables, but %zu %s", tables, attr->n, name);
}

static gradd_status_t infer_sum(gradd_infer_t *c) {
    gradd_type_t shape = {.dtype = GRADD_DT_I64};
    const gradd_type_t *first = &c->in[0].type;
    const int tables = c->n_in / 2;
    if (c->n_in % 2) return GRADD_FAIL(GRAPH, "tables and ids must come in pairs");
    GRADD_TRY(check_per_table(c->attrs, "paddings", tables));
    GRADD_TRY(check_per_table(c->attrs, "scales", tables));
    for (int t = 0; t < tables; t++) {
        const gradd_type_t *table = &c->in[t].type, *ids = &c->in[tables + t].type;
        if (table->rank != 2 || table->dtype != first->dtype || table->dims[1] != first->dims[1])
            return GRADD_FAIL(GRAPH, "table %d does not match the first one", t);
        if (!gradd_dtype_is_float(table->dtype) ||
            (ids->dtype != GRADD_DT_I64 && ids->dtype != GRADD_DT_I32))
            return GRADD_FAIL(GRAPH, "table %d: rows of %s picked by %s", t,
                              gradd_dtype_name(table->dtype), gradd_dtype_name(ids->dtype));
        gradd_type_t both = shape;
        GRADD_TRY(gradd_broadcast(&shape, ids, &both));
        shape = both;
    }
    if (shape.rank + 1 > GRADD_MAX_RANK) return GRADD_FAIL(LIMIT, "rank %d", shape.rank + 1);
    c->out[0] = shape;
    c->out[0].dtype = first->dtype;
    c->out[0].dims[c->out[0].rank++] = first->dims[1];
    return GRADD_OK;
}

static gradd_status_t infer_grad(gradd_infer_t *c) {
    const gradd_type_t *dy = &c->in[0].type, *ids = &c->in[1].type;
    const gradd_attr_t *dims = gradd_attr_find(c->attrs, "dims");
    bool fits = dims->n == 2 && dy->rank >= 1 && dims->ints[1] == dy->dims[dy->rank - 1] &&
                dims->ints[0] >= 0 && ids->rank <= dy->rank - 1;
    for (int i = 0; fits && i < ids->rank; i++) {
        int64_t own = ids->dims[i], full = dy->dims[dy->rank - 1 - ids->rank + i];
        fits = own == full || own == 1;
    }
    if (!fits) return GRADD_FAIL(GRAPH, "dy does not have the shape of the rows looked up");
    c->out[0] = (gradd_type_t){
        dy->dtype, 2, {dims->ints[0], dims->ints[1]}
    };
    if (c->n_in > BASE && c->in[BASE].type.dtype &&
        !gradd_type_equal(&c->in[BASE].type, &c->out[0]))
        return GRADD_FAIL(GRAPH, "the gradient that is added to does not have the table's type");
    return GRADD_OK;
}

static size_t workspace_sum(const gradd_infer_t *c) {
    const gradd_type_t *y = &c->out[0];
    int64_t n = 1;
    for (int i = 0; i + 1 < y->rank; i++)
        n *= y->dims[i];
    return sizeof(int64_t) * (size_t)(c->n_in / 2) * (size_t)n;
}

static size_t workspace_grad(const gradd_infer_t *c) {
    const int64_t n = rows_of_grad(&c->in[0].type);
    return sizeof(int64_t) * (size_t)n + gradd_row_sums_workspace(n);
}

static int parts_grad(const gradd_infer_t *c) {
    return gradd_parts_of_tasks(c, rows_of_grad(&c->in[0].type));
}

/* Every row of the result comes from the ids at its place. */
static bool rowwise_sum(gradd_rowwise_t *r) {
    bool any = false;
    if (r->lead >= r->out[0].rank) return false;
    for (int i = 0; i < r->n_in; i++) {
        r->use[i] = GRADD_USE_WHOLE;
        if (i >= r->n_in / 2) gradd_rowwise_align(r, i, 1);
        any = any || r->use[i] != GRADD_USE_WHOLE;
    }
    return any;
}

/* ---- gradient rule --------------------------------------------------------------------------- */

static gradd_status_t grad_sum(gradd_grad_t *g) {
    const gradd_attr_t *paddings = gradd_attr_find(g->attrs, "paddings");
    const double *scales = find_scales(g->attrs);
    const int tables = g->n_in / 2;
    if (g->dout[0] == GRADD_NONE) return GRADD_OK;
    for (int t = 0; t < tables; t++) {
        if (!g->need[t]) continue;
        gradd_type_t table = *gradd_val_type(g->b, g->in[t]);
        gradd_attr_t attrs[3] = {gradd_make_ints("dims", table.dims, 2),
                                 gradd_make_int("padding", paddings ? paddings->ints[t] : -1),
                                 gradd_make_float("scale", scales ? scales[t] : 1)};
        gradd_val_t in[2] = {g->dout[0], g->in[tables + t]};
        g->din[t] = gradd_emit_attrs(g->b, "EmbeddingGrad", in, 2, attrs, 3);
    }
    return g->b->status;
}

/* ---- expansion ------------------------------------------------------------------------------- */

/* Rows of one table; those of the padding have no gradient. */
static gradd_val_t look_up(gradd_expand_t *x, int t, int tables, int64_t padding) {
    gradd_builder_t *b = x->b;
    const gradd_val_t ids = x->in[tables + t], last = gradd_const_i64s(b, &(int64_t){-1}, 1);
    gradd_val_t rows = gradd_wide(b, GRADD_EMIT(b, "Gather", x->in[t], ids));
    if (padding < 0) return rows;
    gradd_val_t none = gradd_const_scalar(b, gradd_val_type(b, ids)->dtype, (double)padding);
    gradd_val_t padded = GRADD_EMIT(b, "Unsqueeze", GRADD_EMIT(b, "Equal", ids, none), last);
    return GRADD_EMIT(b, "Where", padded, GRADD_EMIT(b, "StopGradient", rows), rows);
}

static gradd_status_t expand_sum(gradd_expand_t *x) {
    const gradd_attr_t *paddings = gradd_attr_find(x->attrs, "paddings");
    const double *scales = find_scales(x->attrs);
    const int tables = x->n_in / 2;
    gradd_val_t sum = GRADD_NONE;
    for (int t = 0; t < tables; t++) {
        gradd_val_t rows = look_up(x, t, tables, paddings ? paddings->ints[t] : -1);
        if (scales && scales[t] != 1) rows = gradd_scaled(x->b, rows, scales[t]);
        sum = t ? GRADD_EMIT(x->b, "Add", sum, rows) : rows;
    }
    x->out[0] = gradd_cast(x->b, sum, gradd_val_type(x->b, x->in[0])->dtype);
    return x->b->status;
}

/* ---- rows ------------------------------------------------------------------------------------ */

GRADD_OPS(
    embedding,
    GRADD_OP(
        "EmbeddingSum", "com.gradd", 1, (2, 2 * TABLES), (1, 1), .flags = GRADD_OP_INTERNAL,
        .types = {GRADD_T_FLOAT, GRADD_T_FLOAT | GRADD_T_INDEX},
        .attrs = GRADD_ATTR_LIST({"paddings", GRADD_ATTR_INTS, false},
                                 {"scales", GRADD_ATTR_FLOATS, false}),
        .infer = infer_sum, .rowwise = rowwise_sum, .grad = grad_sum, .expand = expand_sum,
        .ref = GRADD_REF(ref_sum),
        .cases = GRADD_CASES(
            {.text = "f32[5,3] i64[2,4]"},
            {.text = "f32[5,3] f32[6,3] i64[2,4]:(-5,4) i32[1,4]:(0,5)"},
            {.text = "f32[5,7] f32[9,7] f32[2,7] i64[2,4] i64[4] i64[2,1]:(0,1)"},
            {.text = "f32[5,8] f32[6,8] i64[3,1,4] i64[2,1]:(0,5)"},
            {.text = "f32[5,3] f32[6,3] i64[] i64[3]"}, {.text = "f32[5,3] i64[0,4]"},
            {.text = "f32[40,300] f32[70,300] i64[3,64]:(0,39) i64[64]:(0,69)"},
            {.text = "f32[5,3] i64[2,4] | scales=[-2.5]"},
            {.text = "f32[5,3] f32[6,3] i64[2,4] i64[4] | scales=[8.0,1.0] paddings=[-1,-1]"},
            {.text = "f32[5,3] f32[6,3] i64[0,4] i64[4] | scales=[8.0,1.0]"},
            {.text = "f32[5,3] f32[6,3] f32[7,3] f32[5,3] i64[2,4] i64[4] i32[2,1] i64[]"},
            {.text =
                 "f32[9,600] f32[8,600] f32[7,600] f32[6,600] f32[5,600] f32[5,600] f32[5,600] "
                 "f32[5,600] f32[5,600] i64[40,3] i64[3] i64[40,1] i64[40,3] i64[1] i64[40,3] "
                 "i64[40,3]:(-5,4) i64[3] i64[] | scales=[0.5,1.0,2.0,1.0,1.0,3.0,1.0,1.0,-1.0]"})),
    GRADD_OP(
        "EmbeddingGrad", "com.gradd", 1, (2, 3), (1, 1),
        .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD,
        .types = {GRADD_T_FLOAT, GRADD_T_INDEX, GRADD_T_FLOAT},
        .attrs = GRADD_ATTR_LIST({"dims", GRADD_ATTR_INTS, true},
                                 {"padding", GRADD_ATTR_INT, false},
                                 {"scale", GRADD_ATTR_FLOAT, false}),
        .infer = infer_grad, .ref = GRADD_REF(ref_grad),
        .cases = GRADD_CASES({.text = "f32[6,3] i64[6] | dims=[5,3]"},
                             {.text = "f32[2,4,3] i64[1,4] | dims=[5,3] padding=2"},
                             {.text = "f32[2,4,3] i32[4] | dims=[7,3] padding=-1"},
                             {.text = "f32[300,300] i64[300]:(0,1) | dims=[3,300]", .tol = 1e-4},
                             {.text = "f32[600,70] i64[600]:(-90,89) | dims=[90,70]"},
                             {.text = "f32[2,4,3] i64[4] | dims=[5,3] padding=2 scale=-5.5"},
                             {.text = "f32[0,3] i64[0] | dims=[5,3]"},
                             {.text = "f32[2,4,3] i64[1,4] f32[5,3] | dims=[5,3] padding=2"},
                             {.text = "f32[600,70] i64[600]:(-90,89) f32[90,70] | "
                                      "dims=[90,70] scale=-0.5"},
                             {.text = "f32[40,8] i64[40]:(0,5000) | dims=[5001,8]"},
                             {.text = "f32[700,300] i64[700]:(0,99) | dims=[100,300]", .tol = 1e-4},
                             {.text = "f32[0,3] i64[0] f32[5,3] | dims=[5,3]"},
                             {.text = "f32[2,150,16] i64[150]:(-3,0) f32[3,16] | dims=[3,16] "
                                      "padding=0 scale=0.5"},
                             {.text = "f32[2100,8] i64[2100]:(0,599) | dims=[600,8]"})));

GRADD_KERNELS(cpu, embedding,
              GRADD_KERNEL("EmbeddingSum", "loop", .types = {GRADD_T_ANY}, .compute = compute_sum,
                           .workspace = workspace_sum),
              GRADD_KERNEL("EmbeddingGrad", "loop", .types = {GRADD_T_ANY}, .inplace = 1 << BASE,
                           .compute = compute_grad, .workspace = workspace_grad,
                           .parts = parts_grad));
