/* Loops over one row for LayerNormalization and RMSNormalization, written once for f32, f64 and
 * bf16.
 *
 * Included by kernels/ops/norm/norm.c with REAL, NAME(x) and, for bf16 and f16, CELL, LOAD and
 * STORE; scale, bias, statistics and sums over rows are REAL. There is no guard on purpose. RMS
 * passes centred = false as a constant, and the compiler drops what it does not need. y may be x,
 * and dx may be dy or x: a row is read before it is written, and then element by element.
 */
#include "kernels/cpu/row_lanes.h"

#ifndef CELL
#define CELL     REAL
#define LOAD(x)  (x)
#define STORE(x) (x)
#endif

/* y = (x - mean) * inv * scale + bias; returns mean and inv through the pointers. */
GRADD_INLINE void NAME(norm_row)(CELL *y, const CELL *x, const REAL *scale, const REAL *bias,
                                 int64_t n, bool centred, double epsilon, REAL *out_mean,
                                 REAL *out_inv) {
    REAL mean = centred ? NAME(gradd_row_sum)(x, n) / (REAL)n : (REAL)0;
    REAL square = NAME(gradd_row_squares)(x, mean, n) / (REAL)n;
    REAL inv = (REAL)(1 / sqrt((double)square + epsilon));
    if (bias) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            y[i] = STORE((LOAD(x[i]) - mean) * inv * scale[i] + bias[i]);
    } else {
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            y[i] = STORE((LOAD(x[i]) - mean) * inv * scale[i]);
    }
    *out_mean = mean;
    *out_inv = inv;
}

static inline REAL NAME(add_lanes)(REAL *lane) {
    for (int half = 16; half; half /= 2)
        for (int i = 0; i < half; i++)
            lane[i] += lane[i + half];
    return lane[0];
}

/* With h = (x - mean) * inv and w = dy * scale:
 * dx = (w - mean(w) - h * mean(w * h)) * inv (without mean(w) for RMS); dscale += dy * h;
 * dbias += dy. The sums go through the same 32 lanes. */
static inline void NAME(norm_row_grad)(CELL *dx, const CELL *dy, const CELL *x, const REAL *scale,
                                       REAL mean, REAL inv, int64_t n, bool centred,
                                       REAL *restrict dscale, REAL *restrict dbias) {
    REAL lane_w[32] = {0}, lane_h[32] = {0};
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
#pragma omp simd
        for (int k = 0; k < 32; k++) {
            REAL h = (LOAD(x[i + k]) - mean) * inv, w = LOAD(dy[i + k]) * scale[i + k];
            lane_w[k] += w;
            lane_h[k] += w * h;
        }
    for (int k = 0; i < n; i++, k++) {
        REAL h = (LOAD(x[i]) - mean) * inv, w = LOAD(dy[i]) * scale[i];
        lane_w[k] += w;
        lane_h[k] += w * h;
    }
    REAL mean_w = centred ? NAME(add_lanes)(lane_w) / (REAL)n : (REAL)0;
    REAL mean_h = NAME(add_lanes)(lane_h) / (REAL)n;
    if (dscale)
#pragma omp simd
        for (i = 0; i < n; i++)
            dscale[i] += LOAD(dy[i]) * ((LOAD(x[i]) - mean) * inv);
    if (dbias)
#pragma omp simd
        for (i = 0; i < n; i++)
            dbias[i] += LOAD(dy[i]);
    if (!dx) return;
#pragma omp simd
    for (i = 0; i < n; i++)
        dx[i] = STORE((LOAD(dy[i]) * scale[i] - mean_w - (LOAD(x[i]) - mean) * inv * mean_h) * inv);
}

/* Rows [first, end) of a forward pass. */
static void NAME(norm_rows)(const norm_t *p, int64_t first, int64_t end) {
    const CELL *x = p->x;
    CELL *y = p->y;
    REAL *means = p->mean, *invs = p->inv;
    for (int64_t row = first; row < end; row++) {
        REAL mean, inv;
        if (p->centred)
            NAME(norm_row)(y + row * p->n, x + row * p->n, p->scale, p->bias, p->n, true,
                           p->epsilon, &mean, &inv);
        else
            NAME(norm_row)(y + row * p->n, x + row * p->n, p->scale, p->bias, p->n, false,
                           p->epsilon, &mean, &inv);
        if (means) means[row] = mean;
        if (invs) invs[row] = inv;
    }
}

/* Rows of chunk c of a backward pass; its sums go to part c of dscale and dbias. */
static void NAME(norm_rows_grad)(const norm_t *p, int64_t c) {
    int64_t first = p->rows * c / p->chunks, end = p->rows * (c + 1) / p->chunks;
    const CELL *x = p->x, *dy = p->dy;
    const REAL *means = p->mean, *invs = p->inv;
    CELL *dx = p->y;
    REAL *dscale = p->parts_scale, *dbias = p->parts_bias;
    if (dscale) memset(dscale += c * p->n, 0, sizeof(REAL) * (size_t)p->n);
    if (dbias) memset(dbias += c * p->n, 0, sizeof(REAL) * (size_t)p->n);
    for (int64_t row = first; row < end; row++) {
        int64_t at = row * p->n;
        if (p->centred)
            NAME(norm_row_grad)(dx ? dx + at : NULL, dy + at, x + at, p->scale, means[row],
                                invs[row], p->n, true, dscale, dbias);
        else
            NAME(norm_row_grad)(dx ? dx + at : NULL, dy + at, x + at, p->scale, 0, invs[row], p->n,
                                false, dscale, dbias);
    }
}

/* Adds the parts of all chunks, in order, into the first. */
static void NAME(add_parts)(void *parts_, int64_t chunks, int64_t n) {
    REAL *restrict parts = parts_;
    for (int64_t c = 1; c < chunks; c++)
        for (int64_t i = 0; i < n; i++)
            parts[i] += parts[c * n + i];
}
