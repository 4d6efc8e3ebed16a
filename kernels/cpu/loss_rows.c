/* Row kernels of the cross-entropy. See loss_rows.h. */
#include "kernels/cpu/loss_rows.h"

#include "kernels/cpu/half.h"
#include "kernels/cpu/map.h"
#include "kernels/cpu/softmax_rows.h"

enum { BLOCK = 1024 };

static void start(gradd_loss_row_t *row) {
    *row = (gradd_loss_row_t){.max = -(double)INFINITY};
}

/* Moves the sum under a larger maximum, or under NaN. */
static void raise(gradd_loss_row_t *row, double max) {
    if (!(max > row->max) && max == max) return;
    if (row->sum != 0) row->sum *= exp(row->max - max);
    row->max = max;
}

#define BLOCK_KERNELS(T, S)                                                                        \
    static void add_block_##S(gradd_loss_row_t *row, const T *x, int64_t n, bool plain,            \
                              const T *weights) {                                                  \
        const double max = (double)gradd_row_max(x, n);                                            \
        raise(row, max);                                                                           \
        if (max == -(double)INFINITY) return; /* adds nothing; -inf - -inf is no number */         \
        row->sum += gradd_row_exp(x, n, (T)row->max, NULL);                                        \
        for (int64_t i = 0; plain && i < n; i++)                                                   \
            row->plain += (double)x[i] * (weights ? (double)weights[i] : 1);                       \
    }                                                                                              \
    GRADD_MULTIARCH static void spread_##S(const T *x, T *z, int64_t n,                            \
                                           const gradd_loss_spread_t *s) {                         \
        const T max = (T)s->max, scale = (T)s->scale, shift = (T)s->shift, *w = s->weights;        \
        if (w && s->shift != 0) {                                                                  \
            _Pragma("omp simd") for (int64_t i = 0; i < n; i++) z[i] =                             \
                vexp(x[i] - max) * scale - shift * w[i];                                           \
            return;                                                                                \
        }                                                                                          \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) z[i] =                                 \
            vexp(x[i] - max) * scale - shift;                                                      \
    }
BLOCK_KERNELS(float, f32)
BLOCK_KERNELS(double, f64)

gradd_loss_row_t gradd_loss_scan(gradd_dtype_t dtype, const void *x, int64_t n, bool plain,
                                 const void *weights) {
    gradd_loss_row_t row;
    float wide[BLOCK];
    start(&row);
    for (int64_t at = 0; at < n; at += BLOCK) {
        const int64_t m = n - at < BLOCK ? n - at : BLOCK;
        if (gradd_dtype_is_f64(dtype)) {
            const double *w = weights;
            add_block_f64(&row, (const double *)x + at, m, plain, w ? w + at : NULL);
            continue;
        }
        const float *w = weights, *part = (const float *)x + at;
        if (gradd_dtype_is_half(dtype)) {
            gradd_half_widen(wide, (const uint16_t *)x + at, dtype, m);
            part = wide;
        }
        add_block_f32(&row, part, m, plain, w ? w + at : NULL);
    }
    if (row.max == -(double)INFINITY) row.sum = (double)NAN; /* nothing is possible */
    return row;
}

void gradd_loss_spread(gradd_dtype_t dtype, const void *x, void *z, int64_t n,
                       const gradd_loss_spread_t *s) {
    float wide[BLOCK], done[BLOCK];
    const float *weights = s->weights;
    if (gradd_dtype_is_f64(dtype)) {
        spread_f64(x, z, n, s);
        return;
    }
    if (dtype == GRADD_DT_F32) {
        spread_f32(x, z, n, s);
        return;
    }
    for (int64_t at = 0; at < n; at += BLOCK) {
        const int64_t m = n - at < BLOCK ? n - at : BLOCK;
        const gradd_loss_spread_t part = {s->max, s->scale, s->shift,
                                          weights ? weights + at : NULL};
        gradd_half_widen(wide, (const uint16_t *)x + at, dtype, m);
        spread_f32(wide, done, m, &part);
        gradd_half_narrow((uint16_t *)z + at, done, dtype, m);
    }
}
