/* Loops of BatchNorm over rows and columns of x [B, C, S], written once for f32, f64 and
 * halves, whose sums, statistics and operands per channel are f32.
 *
 * Included with REAL, NAME(x), CELL, LOAD and STORE as row_lanes.h has them, and batch_t; no guard
 * on purpose.
 * row: of B * C, S elements. Where S = 1, piece: of some rows of C elements, and column: the first
 * of n <= COLUMNS neighbours in them. c: a channel. Sums over rows and pieces are added in double
 * and in order, so bits do not depend on threads.
 */
#include "kernels/cpu/row_lanes.h"

#ifndef CELL
#define CELL     REAL
#define LOAD(x)  (x)
#define STORE(x) (x)
#endif

GRADD_MULTIARCH static void NAME(row_moments)(const batch_t *p, int64_t row) {
    const int64_t n = p->s.spatial;
    const CELL *x = (const CELL *)p->x + row * n;
    const REAL mean = NAME(gradd_row_sum)(x, n) / (REAL)n;
    p->sum[row] = mean;
    p->sum_h[row] = NAME(gradd_row_squares)(x, mean, n);
}

GRADD_MULTIARCH static void NAME(row_sums)(const batch_t *p, int64_t row) {
    const int64_t n = p->s.spatial;
    const CELL *x = (const CELL *)p->x + row * n, *dy = (const CELL *)p->dy + row * n;
    p->sum[row] = NAME(gradd_row_sum)(dy, n);
    p->sum_h[row] = NAME(gradd_row_dot)(dy, x, ((const REAL *)p->mean)[row % p->s.channels], n);
}

/* Of n <= COLUMNS neighbours in the rows of a piece, which stay in a cache meanwhile. */
GRADD_MULTIARCH static void NAME(piece_moments)(const batch_t *p, int64_t piece, int64_t column,
                                                int64_t n) {
    const int64_t step = p->s.channels, rows = part_size(p, piece), at = piece * step + column;
    const CELL *x = (const CELL *)p->x + piece * p->length * step + column;
    REAL sum[COLUMNS] = {0}, square[COLUMNS] = {0};
    for (int64_t b = 0; b < rows; b++)
#pragma omp simd
        for (int64_t k = 0; k < n; k++)
            sum[k] += LOAD(x[b * step + k]);
    for (int64_t k = 0; k < n; k++)
        sum[k] /= (REAL)rows;
    for (int64_t b = 0; b < rows; b++)
#pragma omp simd
        for (int64_t k = 0; k < n; k++) {
            const REAL left = LOAD(x[b * step + k]) - sum[k];
            square[k] += left * left;
        }
    for (int64_t k = 0; k < n; k++)
        p->sum[at + k] = (double)sum[k], p->sum_h[at + k] = (double)square[k];
}

GRADD_MULTIARCH static void NAME(piece_sums)(const batch_t *p, int64_t piece, int64_t column,
                                             int64_t n) {
    const int64_t step = p->s.channels, rows = part_size(p, piece), at = piece * step + column;
    const int64_t first = piece * p->length * step + column;
    const CELL *x = (const CELL *)p->x + first, *dy = (const CELL *)p->dy + first;
    const REAL *mean = (const REAL *)p->mean + column;
    REAL sum[COLUMNS] = {0}, sum_h[COLUMNS] = {0};
    for (int64_t b = 0; b < rows; b++)
#pragma omp simd
        for (int64_t k = 0; k < n; k++) {
            sum[k] += LOAD(dy[b * step + k]);
            sum_h[k] += LOAD(dy[b * step + k]) * (LOAD(x[b * step + k]) - mean[k]);
        }
    for (int64_t k = 0; k < n; k++)
        p->sum[at + k] = (double)sum[k], p->sum_h[at + k] = (double)sum_h[k];
}

static void NAME(keep_moments)(const batch_t *p, int64_t c, double mean, double square,
                               void *out_var) {
    const double n = (double)p->s.batch * (double)p->s.spatial;
    const REAL var = n > 0 ? (REAL)(square / n) : 0;
    ((REAL *)p->mean)[c] = (REAL)mean;
    ((REAL *)p->inv)[c] = (REAL)(1 / sqrt((double)var + p->epsilon));
    if (out_var) ((REAL *)out_var)[c] = var;
}

static void NAME(keep_inverse)(const batch_t *p, int64_t c, const void *var) {
    ((REAL *)p->inv)[c] = (REAL)(1 / sqrt((double)((const REAL *)var)[c] + p->epsilon));
}

GRADD_MULTIARCH static void NAME(normalise)(const batch_t *p, int64_t row) {
    const int64_t n = p->s.spatial, c = row % p->s.channels;
    const CELL *x = (const CELL *)p->x + row * n;
    const REAL mean = ((const REAL *)p->mean)[c];
    const REAL factor = ((const REAL *)p->inv)[c] * ((const REAL *)p->scale)[c];
    const REAL shift = ((const REAL *)p->bias)[c];
    CELL *y = (CELL *)p->y + row * n;
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        y[i] = STORE((LOAD(x[i]) - mean) * factor + shift);
}

GRADD_MULTIARCH static void NAME(normalise_across)(const batch_t *p, int64_t b) {
    const int64_t n = p->s.channels;
    const CELL *x = (const CELL *)p->x + b * n;
    const REAL *mean = p->mean, *inv = p->inv, *scale = p->scale, *bias = p->bias;
    CELL *y = (CELL *)p->y + b * n;
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        y[i] = STORE((LOAD(x[i]) - mean[i]) * (inv[i] * scale[i]) + bias[i]);
}

static void NAME(keep_sums)(const batch_t *p, int64_t c, REAL *dscale, REAL *dbias) {
    const double sum = p->sum[c], sum_h = p->sum_h[c];
    if (dbias) dbias[c] = (REAL)sum;
    if (dscale) dscale[c] = (REAL)(sum_h * (double)((const REAL *)p->inv)[c]);
}

/* out: a, b and c of dx = a dy + b (x - mean) + c. */
static void NAME(slopes)(const batch_t *p, int64_t c, REAL *out) {
    const double n = (double)p->s.batch * (double)p->s.spatial;
    const double inv = (double)((const REAL *)p->inv)[c];
    const double factor = inv * (double)((const REAL *)p->scale)[c];
    out[0] = (REAL)factor;
    out[1] = p->given ? 0 : (REAL)(-factor * inv * inv * p->sum_h[c] / n);
    out[2] = p->given ? 0 : (REAL)(-factor * p->sum[c] / n);
}

GRADD_MULTIARCH static void NAME(backward)(const batch_t *p, int64_t row) {
    const int64_t n = p->s.spatial, c = row % p->s.channels;
    const CELL *x = (const CELL *)p->x + row * n, *dy = (const CELL *)p->dy + row * n;
    const REAL mean = ((const REAL *)p->mean)[c];
    CELL *dx = (CELL *)p->y + row * n;
    REAL k[3];
    NAME(slopes)(p, c, k);
    if (p->given)
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            dx[i] = STORE(k[0] * LOAD(dy[i]));
    else
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            dx[i] = STORE(k[0] * LOAD(dy[i]) + k[1] * (LOAD(x[i]) - mean) + k[2]);
}

/* The slopes of all channels behind each other, [3, C]. */
static void NAME(keep_slopes)(const batch_t *p, int64_t c, void *room) {
    REAL all[3];
    NAME(slopes)(p, c, all);
    for (int i = 0; i < 3; i++)
        ((REAL *)room)[i * p->s.channels + c] = all[i];
}

GRADD_MULTIARCH static void NAME(backward_across)(const batch_t *p, int64_t b, const void *room) {
    const int64_t n = p->s.channels;
    const CELL *x = (const CELL *)p->x + b * n, *dy = (const CELL *)p->dy + b * n;
    const REAL *mean = p->mean, *slope = room, *h = slope + n, *shift = h + n;
    CELL *dx = (CELL *)p->y + b * n;
    if (p->given)
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            dx[i] = STORE(slope[i] * LOAD(dy[i]));
    else
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            dx[i] = STORE(slope[i] * LOAD(dy[i]) + h[i] * (LOAD(x[i]) - mean[i]) + shift[i]);
}
