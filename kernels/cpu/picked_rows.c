/* Rows picked by number. See picked_rows.h.
 *
 * Writers cut the target into one box per thread: by columns if a row is wide (balanced whatever
 * the indices are), else by ranges of rows (every thread reads all numbers and skips foreign ones).
 */
#include "kernels/cpu/picked_rows.h"

#include <omp.h>
#include <string.h>

#include "kernels/cpu/copy.h"
#include "kernels/cpu/half.h"
#include "kernels/cpu/row_sums.h"
#include "kernels/describe/dispatch.h"

#define WIDE_ROW 64 /* elements per thread from which columns are cut */

typedef struct box_s {
    int64_t row0, row1, col0, col1;
} box_t;

static box_t my_box(const gradd_rows_t *rows) {
    int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
    box_t box = {0, rows->n_rows, 0, rows->size};
    if (rows->size >= WIDE_ROW * threads) {
        int64_t blocks = (rows->size + 15) / 16; /* whole cache lines */
        box.col0 = blocks * me / threads * 16;
        box.col1 = blocks * (me + 1) / threads * 16;
        if (box.col1 > rows->size) box.col1 = rows->size;
    } else {
        box.row0 = rows->n_rows * me / threads;
        box.row1 = rows->n_rows * (me + 1) / threads;
    }
    return box;
}

static bool is_large(const gradd_rows_t *rows) {
    return rows->n * rows->size >= GRADD_PARALLEL_MIN;
}

/* ---- typed loops ----------------------------------------------------------------------------- */

#define GET_ONES(T)                                                                                \
    static void get_ones_##T(const gradd_rows_t *rows, T *to, const T *from) {                     \
        const int64_t *row = rows->row;                                                            \
        int64_t n = rows->n;                                                                       \
        _Pragma("omp parallel for schedule(static) if (is_large(rows))") for (int64_t i = 0;       \
                                                                              i < n; i++) to[i] =  \
            from[row[i]];                                                                          \
    }

GET_ONES(uint8_t)
GET_ONES(uint16_t)
GET_ONES(uint32_t)
GET_ONES(uint64_t)

#define ADD_BOX(name, T, F, READ)                                                                  \
    static void add_box_##name(const gradd_rows_t *rows, const box_t *box, T *to, const F *from) { \
        for (int64_t i = 0; i < rows->n; i++) {                                                    \
            int64_t row = rows->row[i];                                                            \
            if (row < box->row0 || row >= box->row1) continue;                                     \
            T *t = to + row * rows->size;                                                          \
            const F *f = from + i * rows->size;                                                    \
            for (int64_t k = box->col0; k < box->col1; k++)                                        \
                t[k] += READ(f[k]);                                                                \
        }                                                                                          \
    }

ADD_BOX(f32, float, float, )
ADD_BOX(f64, double, double, )
ADD_BOX(i32, int32_t, int32_t, )
ADD_BOX(i64, int64_t, int64_t, )
ADD_BOX(bf16, float, gradd_bf16_t, gradd_bf16_f32)
ADD_BOX(f16, float, gradd_f16_t, gradd_f16_f32)

/* ---- pieces ---------------------------------------------------------------------------------- */

#define PIECE_BYTES ((size_t)256 << 10)

int64_t gradd_rows_pieces(int64_t size, size_t bytes) {
    const int64_t least = (int64_t)(((size_t)size * bytes + PIECE_BYTES - 1) / PIECE_BYTES);
    for (int64_t pieces = least; least > 1 && pieces <= 2 * least; pieces++)
        if (size % pieces == 0) return pieces;
    return 1;
}

gradd_rows_t gradd_rows_cut(const gradd_rows_t *rows, int64_t pieces, int64_t *list, bool fill) {
    for (int64_t i = 0; fill && i < rows->n * pieces; i++)
        list[i] = rows->row[i / pieces] * pieces + i % pieces;
    return (gradd_rows_t){list, rows->n * pieces, rows->n_rows * pieces, rows->size / pieces};
}

/* ---- reading --------------------------------------------------------------------------------- */

gradd_status_t gradd_rows_get(const gradd_rows_t *rows, size_t bytes, void *to, const void *from) {
    if (rows->size == 1) {
        if (bytes == 1)
            get_ones_uint8_t(rows, to, from);
        else if (bytes == 2)
            get_ones_uint16_t(rows, to, from);
        else if (bytes == 4)
            get_ones_uint32_t(rows, to, from);
        else
            get_ones_uint64_t(rows, to, from);
        return GRADD_OK;
    }
    size_t row_bytes = (size_t)rows->size * bytes;
    const int64_t *row = rows->row;
    int64_t n = rows->n;
#pragma omp parallel for schedule(static) if (is_large(rows))
    for (int64_t i = 0; i < n; i++)
        memcpy((char *)to + (size_t)i * row_bytes, (const char *)from + (size_t)row[i] * row_bytes,
               row_bytes);
    return GRADD_OK;
}

/* ---- writing --------------------------------------------------------------------------------- */

gradd_status_t gradd_rows_put(const gradd_rows_t *rows, size_t bytes, void *to, const void *from) {
    size_t row_bytes = (size_t)rows->size * bytes;
#pragma omp parallel if (is_large(rows))
    {
        box_t box = my_box(rows);
        size_t at = (size_t)box.col0 * bytes, width = (size_t)(box.col1 - box.col0) * bytes;
        for (int64_t i = 0; i < rows->n; i++) {
            int64_t row = rows->row[i];
            if (row < box.row0 || row >= box.row1) continue;
            memcpy((char *)to + (size_t)row * row_bytes + at,
                   (const char *)from + (size_t)i * row_bytes + at, width);
        }
    }
    return GRADD_OK;
}

/* ---- adding ---------------------------------------------------------------------------------- */

/* Of halves, so that a sum can stay f32: either what goes to one row is brought together, in its
 * order; or, where rows are many and short, all of the target is f32 until its last stage. */
#define MANY_ROWS 65536
#define LONG_ROW  16

static bool has_totals(const gradd_rows_t *rows, gradd_dtype_t dtype) {
    return gradd_dtype_is_half(dtype) && rows->n > MANY_ROWS && rows->size < LONG_ROW;
}

int gradd_rows_add_stages(const gradd_rows_t *rows, gradd_dtype_t dtype) {
    return has_totals(rows, dtype) ? 3 : 2;
}

size_t gradd_rows_add_workspace(const gradd_rows_t *rows, gradd_dtype_t dtype) {
    if (!gradd_dtype_is_half(dtype)) return 0;
    if (!has_totals(rows, dtype)) return gradd_row_sums_workspace(rows->n);
    return sizeof(float) * (size_t)(rows->n_rows * rows->size);
}

int gradd_rows_add_parts(const gradd_infer_t *c, const gradd_rows_t *rows, gradd_dtype_t dtype) {
    const int parts = gradd_parts_of_tasks(c, rows->n), stages = gradd_rows_add_stages(rows, dtype);
    return parts && parts < stages ? stages : parts;
}

/* Elements of the target that a task has; a multiple of all vectors. */
#define STRIP 8192

typedef struct strips_s {
    const gradd_row_adds_t *adds;
    float *total;
    int64_t n; /* of all elements */
    gradd_range_t some;
} strips_t;

static strips_t strips_of(const gradd_row_adds_t *a, int stage) {
    const int64_t n = a->rows.n_rows * a->rows.size;
    return (strips_t){a, a->workspace, n,
                      gradd_stage_of(a->launch, stage, 3, (n + STRIP - 1) / STRIP)};
}

static void start_totals(const gradd_row_adds_t *a) {
    const strips_t s = strips_of(a, 0);
#pragma omp parallel for schedule(static) if (s.n >= GRADD_PARALLEL_MIN)
    for (int64_t i = s.some.from; i < s.some.to; i++) {
        const int64_t at = i * STRIP, n = s.n - at < STRIP ? s.n - at : STRIP;
        if (a->start)
            gradd_half_widen(s.total + at, (const uint16_t *)a->start + at, a->dtype, n);
        else
            memset(s.total + at, 0, sizeof(float) * (size_t)n);
    }
}

static void end_totals(const gradd_row_adds_t *a) {
    const strips_t s = strips_of(a, 2);
#pragma omp parallel for schedule(static) if (s.n >= GRADD_PARALLEL_MIN)
    for (int64_t i = s.some.from; i < s.some.to; i++) {
        const int64_t at = i * STRIP, n = s.n - at < STRIP ? s.n - at : STRIP;
        gradd_half_narrow((uint16_t *)a->to + at, s.total + at, a->dtype, n);
    }
}

static void add_boxes(const gradd_row_adds_t *a, gradd_range_t some, void *to) {
    const gradd_rows_t rows = {a->rows.row + some.from, some.to - some.from, a->rows.n_rows,
                               a->rows.size};
    const void *from =
        (const char *)a->from + some.from * rows.size * (int64_t)gradd_dtype_bytes(a->dtype);
    if (!rows.n) return;
#pragma omp parallel if (is_large(&rows))
    {
        box_t box = my_box(&rows);
        if (a->dtype == GRADD_DT_F32)
            add_box_f32(&rows, &box, to, from);
        else if (a->dtype == GRADD_DT_F64)
            add_box_f64(&rows, &box, to, from);
        else if (a->dtype == GRADD_DT_I32)
            add_box_i32(&rows, &box, to, from);
        else if (a->dtype == GRADD_DT_I64)
            add_box_i64(&rows, &box, to, from);
        else if (gradd_dtype_is_half(a->dtype))
            a->dtype == GRADD_DT_F16 ? add_box_f16(&rows, &box, to, from)
                                     : add_box_bf16(&rows, &box, to, from);
    }
}

static void begin(const gradd_row_adds_t *a) {
    const int64_t row = a->rows.size * (int64_t)gradd_dtype_bytes(a->dtype);
    const gradd_range_t some = gradd_half_of(a->launch, false, a->rows.n_rows * row);
    const size_t n = (size_t)(some.to - some.from);
    if (a->start)
        gradd_copy_bytes((char *)a->to + some.from, (const char *)a->start + some.from, n);
    else
        gradd_copy_zero((char *)a->to + some.from, n);
}

gradd_status_t gradd_rows_add(const gradd_row_adds_t *a) {
    const gradd_rows_t *rows = &a->rows;
    if (!gradd_dtype_is_half(a->dtype) && a->dtype != GRADD_DT_F32 && a->dtype != GRADD_DT_F64 &&
        a->dtype != GRADD_DT_I32 && a->dtype != GRADD_DT_I64)
        return GRADD_FAIL(UNSUPPORTED, "rows of %s cannot be added", gradd_dtype_name(a->dtype));
    if (has_totals(rows, a->dtype)) {
        start_totals(a);
        add_boxes(a, gradd_stage_of(a->launch, 1, 3, rows->n), a->workspace);
        end_totals(a);
        return GRADD_OK;
    }
    begin(a);
    if (gradd_dtype_is_half(a->dtype)) {
        const gradd_row_sums_t sums = {.row = rows->row,
                                       .n = rows->n,
                                       .n_rows = rows->n_rows,
                                       .width = rows->size,
                                       .scale = 1,
                                       .plain = true,
                                       .launch = a->launch};
        return gradd_row_sums(&sums, a->dtype, a->to, a->from, a->workspace);
    }
    add_boxes(a, gradd_half_of(a->launch, true, rows->n), a->to);
    return GRADD_OK;
}
