/* Sums of rows by number. See row_sums.h.
 *
 * Positions are sorted by row (radix sort, stable); then every row that occurs, cut into blocks of
 * columns, is a unit that one thread sums. */
#include "kernels/cpu/row_sums.h"

#include <string.h>

#include "kernels/cpu/copy.h"
#include "kernels/cpu/half.h"
#include "kernels/describe/dispatch.h"

enum { BLOCK = 256, CHAIN = 64, DIGIT_BITS = 11, DIGITS = 1 << DIGIT_BITS, SHARE = 8 };

typedef struct sum_entry_s {
    int64_t row, i; /* position in `from` */
} sum_entry_t;

typedef struct summing_s {
    const gradd_row_sums_t *s;
    const sum_entry_t *sorted;
    const int64_t *first; /* n_touched + 1: where each row's entries begin */
    int64_t n_touched;
    const void *from;
    void *to;
} summing_t;

size_t gradd_row_sums_workspace(int64_t n) {
    return 2 * sizeof(sum_entry_t) * (size_t)n + sizeof(int64_t) * ((size_t)n + 2);
}

/* ---- order ----------------------------------------------------------------------------------- */

/* By one digit of the row. */
static void sort_digit(const sum_entry_t *from, sum_entry_t *to, int64_t n, int shift) {
    int64_t start[DIGITS + 1] = {0};
    for (int64_t k = 0; k < n; k++)
        start[((from[k].row >> shift) & (DIGITS - 1)) + 1]++;
    for (int d = 0; d < DIGITS; d++)
        start[d + 1] += start[d];
    for (int64_t k = 0; k < n; k++)
        to[start[(from[k].row >> shift) & (DIGITS - 1)]++] = from[k];
}

static int digit_count(int64_t n_rows) {
    int digits = 0;
    for (int shift = 0; shift < 63 && (n_rows - 1) >> shift > 0; shift += DIGIT_BITS)
        digits++;
    return digits;
}

/* Fills `first` and returns how many rows occur. The entries by row lie in the first of the two
 * lists if there is an even number of digits. */
static int64_t sort_rows(const gradd_row_sums_t *s, sum_entry_t *a, sum_entry_t *b,
                         int64_t *first) {
    int64_t n = 0, touched = 0;
    for (int64_t i = 0; i < s->n; i++)
        if (s->row[i] >= 0) a[n++] = (sum_entry_t){s->row[i], i};
    for (int digit = 0; digit < digit_count(s->n_rows); digit++) {
        sort_digit(a, b, n, digit * DIGIT_BITS);
        sum_entry_t *sorted = b;
        b = a, a = sorted;
    }
    for (int64_t k = 0; k < n; k++)
        if (!k || a[k].row != a[k - 1].row) first[touched++] = k;
    first[touched] = n;
    return touched;
}

/* ---- sums ------------------------------------------------------------------------------------ */

#define ROW_SUMS(T, R, READ, WRITE)                                                                \
    GRADD_MULTIARCH static void add_row_##T(R *sum, const T *x, int64_t n) {                       \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) sum[i] += READ(x[i]);                  \
    }                                                                                              \
    /* to columns [at, at + n): some of the entries */                                             \
    static void add_rows_##T(const summing_t *w, int64_t at, int64_t n, gradd_range_t some,        \
                             R *sum) {                                                             \
        for (int64_t e = some.from; e < some.to; e++)                                              \
            add_row_##T(sum, (const T *)w->from + w->sorted[e].i * w->s->width + at, n);           \
    }                                                                                              \
    /* columns [at, at + n) of one row that occurs */                                              \
    static void sum_block_##T(const summing_t *w, int64_t k, int64_t at, int64_t n) {              \
        R total[BLOCK] = {0}, chain[BLOCK];                                                        \
        const gradd_range_t all = {w->first[k], w->first[k + 1]};                                  \
        T *to = (T *)w->to + w->sorted[all.from].row * w->s->width + at;                           \
        for (int64_t i = 0; w->s->plain && i < n; i++)                                             \
            total[i] = READ(to[i]);                                                                \
        if (w->s->plain) add_rows_##T(w, at, n, all, total);                                       \
        for (int64_t e = all.from; !w->s->plain && e < all.to; e += CHAIN) {                       \
            memset(chain, 0, sizeof(R) * (size_t)n);                                               \
            add_rows_##T(w, at, n, (gradd_range_t){e, all.to - e < CHAIN ? all.to : e + CHAIN},    \
                         chain);                                                                   \
            for (int64_t i = 0; i < n; i++)                                                        \
                total[i] += chain[i];                                                              \
        }                                                                                          \
        for (int64_t i = 0; i < n; i++) {                                                          \
            const R sum = (R)w->s->scale * total[i];                                               \
            to[i] = w->s->clear || w->s->plain ? WRITE(sum) : WRITE(READ(to[i]) + sum);            \
        }                                                                                          \
    }                                                                                              \
    static void sum_all_##T(const summing_t *w) {                                                  \
        const int64_t width = w->s->width, blocks = (width + BLOCK - 1) / BLOCK;                   \
        const gradd_range_t units = gradd_half_of(w->s->launch, true, w->n_touched * blocks);      \
        const bool many = w->first[w->n_touched] * width >= GRADD_PARALLEL_MIN;                    \
        _Pragma("omp parallel for schedule(dynamic, SHARE) if (many)") for (int64_t u =            \
                                                                                units.from;        \
                                                                            u < units.to; u++) {   \
            const int64_t at = u % blocks * BLOCK;                                                 \
            sum_block_##T(w, u / blocks, at, width - at < BLOCK ? width - at : BLOCK);             \
        }                                                                                          \
    }

ROW_SUMS(float, float, , )
ROW_SUMS(double, double, , )
ROW_SUMS(gradd_bf16_t, float, gradd_bf16_f32, gradd_f32_bf16)
ROW_SUMS(gradd_f16_t, float, gradd_f16_f32, gradd_f32_f16)

gradd_status_t gradd_row_sums(const gradd_row_sums_t *s, gradd_dtype_t dtype, void *to,
                              const void *from, void *workspace) {
    sum_entry_t *entries = workspace;
    int64_t *touched = (int64_t *)(entries + 2 * s->n), *first = touched + 1;
    const int64_t bytes = s->n_rows * s->width * (int64_t)gradd_dtype_bytes(dtype);
    const gradd_range_t cleared = gradd_half_of(s->launch, false, s->clear ? bytes : 0);
    if (!gradd_dtype_is_float(dtype))
        return GRADD_FAIL(UNSUPPORTED, "rows of %s cannot be summed", gradd_dtype_name(dtype));
    gradd_copy_zero((char *)to + cleared.from, (size_t)(cleared.to - cleared.from));
    if (!s->n || (s->launch->parts > 1 && s->launch->part < s->launch->parts / 2)) return GRADD_OK;
    if (gradd_halves_meet(s->launch)) *touched = sort_rows(s, entries, entries + s->n, first);
    const summing_t w = {.s = s,
                         .sorted = digit_count(s->n_rows) % 2 ? entries + s->n : entries,
                         .first = first,
                         .n_touched = *touched,
                         .from = from,
                         .to = to};
    if (dtype == GRADD_DT_F32)
        sum_all_float(&w);
    else if (gradd_dtype_is_f64(dtype))
        sum_all_double(&w);
    else if (gradd_dtype_is_half(dtype))
        (dtype == GRADD_DT_F16 ? sum_all_gradd_f16_t : sum_all_gradd_bf16_t)(&w);
    return GRADD_OK;
}
