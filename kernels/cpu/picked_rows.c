/* Rows picked by number. See picked_rows.h.
 *
 * Writers cut the target into one box per thread: by columns if a row is wide (balanced whatever
 * the indices are), else by ranges of rows (every thread reads all numbers and skips foreign ones).
 */
#include "kernels/cpu/picked_rows.h"

#include <omp.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/half.h"
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

#define ADD_BOX(T)                                                                                 \
    static void add_box_##T(const gradd_rows_t *rows, const box_t *box, T *to, const T *from) {    \
        for (int64_t i = 0; i < rows->n; i++) {                                                    \
            int64_t row = rows->row[i];                                                            \
            if (row < box->row0 || row >= box->row1) continue;                                     \
            T *t = to + row * rows->size;                                                          \
            const T *f = from + i * rows->size;                                                    \
            for (int64_t k = box->col0; k < box->col1; k++)                                        \
                t[k] += f[k];                                                                      \
        }                                                                                          \
    }

ADD_BOX(float)
ADD_BOX(double)
ADD_BOX(int32_t)
ADD_BOX(int64_t)

/* bf16 and f16: what goes to one row is brought together, in its order, so that the sum can stay
 * f32. */
typedef struct pair_s {
    int64_t row, i;
} pair_t;

typedef struct halves_s {
    const gradd_rows_t *rows;
    const pair_t *pairs; /* sorted */
    gradd_dtype_t dtype;
    uint16_t *to;
    const uint16_t *from;
} halves_t;

static int by_row(const void *a, const void *b) {
    const pair_t *x = a, *y = b;
    if (x->row != y->row) return x->row < y->row ? -1 : 1;
    return x->i < y->i ? -1 : x->i > y->i;
}

#define ADD_WIDE(name, T, READ)                                                                    \
    GRADD_MULTIARCH static void name(float *sum, const void *from, int64_t n) {                    \
        const T *x = from;                                                                         \
        _Pragma("omp simd") for (int64_t k = 0; k < n; k++) sum[k] += READ(x[k]);                  \
    }
ADD_WIDE(add_wide_bf16, gradd_bf16_t, gradd_bf16_f32)
ADD_WIDE(add_wide_f16, gradd_f16_t, gradd_f16_f32)

/* Pairs [0, n) of one row, columns [col0, col1). */
static void add_half_row(const halves_t *h, const pair_t *pairs, int64_t n, const box_t *box) {
    enum { PIECE = 512 };
    float sum[PIECE];
    const int64_t size = h->rows->size;
    uint16_t *t = h->to + pairs->row * size;
    for (int64_t at = box->col0; at < box->col1; at += PIECE) {
        const int64_t m = box->col1 - at < PIECE ? box->col1 - at : PIECE;
        gradd_half_widen(sum, t + at, h->dtype, m);
        for (int64_t p = 0; p < n; p++)
            (h->dtype == GRADD_DT_F16 ? add_wide_f16
                                      : add_wide_bf16)(sum, h->from + pairs[p].i * size + at, m);
        gradd_half_narrow(t + at, sum, h->dtype, m);
    }
}

static void add_half_box(const halves_t *h, const box_t *box) {
    const pair_t *pairs = h->pairs;
    for (int64_t i = 0, n; i < h->rows->n; i += n) {
        for (n = 1; i + n < h->rows->n && pairs[i + n].row == pairs[i].row;)
            n++;
        if (pairs[i].row < box->row0 || pairs[i].row >= box->row1) continue;
        add_half_row(h, pairs + i, n, box);
    }
}

static gradd_status_t add_halves(const gradd_rows_t *rows, gradd_dtype_t dtype, void *to,
                                 const void *from) {
    pair_t *pairs = malloc(sizeof pairs[0] * ((size_t)rows->n + 1));
    if (!pairs) return GRADD_FAIL(NOMEM, "no memory to add %lld rows", (long long)rows->n);
    for (int64_t i = 0; i < rows->n; i++)
        pairs[i] = (pair_t){rows->row[i], i};
    qsort(pairs, (size_t)rows->n, sizeof pairs[0], by_row);
    const halves_t h = {rows, pairs, dtype, to, from};
#pragma omp parallel if (is_large(rows))
    {
        box_t box = my_box(rows);
        add_half_box(&h, &box);
    }
    free(pairs);
    return GRADD_OK;
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

gradd_status_t gradd_rows_add(const gradd_rows_t *rows, gradd_dtype_t dtype, void *to,
                              const void *from) {
    if (gradd_dtype_is_half(dtype)) return add_halves(rows, dtype, to, from);
    if (dtype != GRADD_DT_F32 && dtype != GRADD_DT_F64 && dtype != GRADD_DT_I32 &&
        dtype != GRADD_DT_I64)
        return GRADD_FAIL(UNSUPPORTED, "rows of %s cannot be added", gradd_dtype_name(dtype));
#pragma omp parallel if (is_large(rows))
    {
        box_t box = my_box(rows);
        if (dtype == GRADD_DT_F32)
            add_box_float(rows, &box, to, from);
        else if (dtype == GRADD_DT_F64)
            add_box_double(rows, &box, to, from);
        else if (dtype == GRADD_DT_I32)
            add_box_int32_t(rows, &box, to, from);
        else
            add_box_int64_t(rows, &box, to, from);
    }
    return GRADD_OK;
}
