/* Row kernels of the cross-entropy. See loss_rows.h. */
#include "kernels/cpu/loss_rows.h"

#include "kernels/cpu/bf16.h"
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
    static void add_block_##S(gradd_loss_row_t *row, const T *x, int64_t n, bool plain) {          \
        const double max = (double)gradd_row_max(x, n);                                            \
        raise(row, max);                                                                           \
        if (max == -(double)INFINITY) return; /* adds nothing; -inf - -inf is no number */         \
        row->sum += gradd_row_exp(x, n, (T)row->max, NULL);                                        \
        for (int64_t i = 0; plain && i < n; i++)                                                   \
            row->plain += (double)x[i];                                                            \
    }                                                                                              \
    GRADD_MULTIARCH static void spread_##S(const T *x, T *z, int64_t n,                            \
                                           const gradd_loss_spread_t *s) {                         \
        const T max = (T)s->max, scale = (T)s->scale, shift = (T)s->shift;                         \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) z[i] =                                 \
            vexp(x[i] - max) * scale - shift;                                                      \
    }
BLOCK_KERNELS(float, f32)
BLOCK_KERNELS(double, f64)

static void add_block(gradd_dtype_t dtype, gradd_loss_row_t *row, const void *x, int64_t at,
                      int64_t n, bool plain) {
    float wide[BLOCK];
    if (dtype == GRADD_DT_F64) {
        add_block_f64(row, (const double *)x + at, n, plain);
    } else if (dtype == GRADD_DT_F32) {
        add_block_f32(row, (const float *)x + at, n, plain);
    } else {
        gradd_bf16_widen(wide, (const gradd_bf16_t *)x + at, n);
        add_block_f32(row, wide, n, plain);
    }
}

gradd_loss_row_t gradd_loss_scan(gradd_dtype_t dtype, const void *x, int64_t n, bool plain) {
    gradd_loss_row_t row;
    start(&row);
    for (int64_t at = 0; at < n; at += BLOCK)
        add_block(dtype, &row, x, at, n - at < BLOCK ? n - at : BLOCK, plain);
    if (row.max == -(double)INFINITY) row.sum = (double)NAN; /* nothing is possible */
    return row;
}

void gradd_loss_spread(gradd_dtype_t dtype, const void *x, void *z, int64_t n,
                       const gradd_loss_spread_t *s) {
    float wide[BLOCK], done[BLOCK];
    if (dtype == GRADD_DT_F64) {
        spread_f64(x, z, n, s);
        return;
    }
    if (dtype == GRADD_DT_F32) {
        spread_f32(x, z, n, s);
        return;
    }
    for (int64_t at = 0; at < n; at += BLOCK) {
        const int64_t m = n - at < BLOCK ? n - at : BLOCK;
        gradd_bf16_widen(wide, (const gradd_bf16_t *)x + at, m);
        spread_f32(wide, done, m, s);
        gradd_bf16_narrow((gradd_bf16_t *)z + at, done, m);
    }
}
