/* Loops of BatchNorm over rows and columns of x [B, C, S], written once for f32 and f64.
 *
 * Included with REAL and NAME(x) defined as row_lanes.h has them, and batch_t; no guard on purpose.
 * row: of B * C, S elements. column: the first of n <= COLUMNS neighbours, where S = 1. c: a
 * channel. Sums over rows are added in double and in order, so bits do not depend on threads.
 */
#include "kernels/cpu/row_lanes.h"

static void NAME(row_moments)(const batch_t *p, int64_t row) {
    const int64_t n = p->s.spatial;
    const REAL *x = (const REAL *)p->x + row * n, mean = NAME(row_sum)(x, n) / (REAL)n;
    p->sum[row] = mean;
    p->sum_h[row] = NAME(row_squares)(x, mean, n);
}

static REAL NAME(row_dot)(const REAL *dy, const REAL *x, REAL mean, int64_t n) {
    REAL lane[32] = {0};
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
        for (int k = 0; k < 32; k++)
            lane[k] += dy[i + k] * (x[i + k] - mean);
    for (int k = 0; i < n; i++, k++)
        lane[k] += dy[i] * (x[i] - mean);
    return NAME(add_lanes)(lane);
}

static void NAME(row_sums)(const batch_t *p, int64_t row) {
    const int64_t n = p->s.spatial;
    const REAL *x = (const REAL *)p->x + row * n, *dy = (const REAL *)p->dy + row * n;
    p->sum[row] = NAME(row_sum)(dy, n);
    p->sum_h[row] = NAME(row_dot)(dy, x, ((const REAL *)p->mean)[row % p->s.channels], n);
}

static void NAME(column_moments)(const batch_t *p, int64_t column, int64_t n) {
    const int64_t step = p->s.channels;
    const REAL *x = (const REAL *)p->x + column;
    double sum[COLUMNS] = {0}, square[COLUMNS] = {0};
    for (int64_t b = 0; b < p->s.batch; b++)
        for (int64_t k = 0; k < n; k++)
            sum[k] += (double)x[b * step + k];
    for (int64_t k = 0; k < n; k++)
        sum[k] /= (double)p->s.batch;
    for (int64_t b = 0; b < p->s.batch; b++)
        for (int64_t k = 0; k < n; k++) {
            double left = (double)x[b * step + k] - sum[k];
            square[k] += left * left;
        }
    memcpy(p->sum + column, sum, (size_t)n * sizeof *sum);
    memcpy(p->sum_h + column, square, (size_t)n * sizeof *square);
}

static void NAME(column_sums)(const batch_t *p, int64_t column, int64_t n) {
    const int64_t step = p->s.channels;
    const REAL *x = (const REAL *)p->x + column, *dy = (const REAL *)p->dy + column;
    const REAL *mean = (const REAL *)p->mean + column;
    double sum[COLUMNS] = {0}, sum_h[COLUMNS] = {0};
    for (int64_t b = 0; b < p->s.batch; b++)
        for (int64_t k = 0; k < n; k++) {
            sum[k] += (double)dy[b * step + k];
            sum_h[k] += (double)(dy[b * step + k] * (x[b * step + k] - mean[k]));
        }
    memcpy(p->sum + column, sum, (size_t)n * sizeof *sum);
    memcpy(p->sum_h + column, sum_h, (size_t)n * sizeof *sum_h);
}

static void NAME(keep_moments)(const batch_t *p, int64_t c, void *out_var) {
    const int64_t rows = p->s.spatial == 1 ? 1 : p->s.batch;
    const double n = (double)p->s.batch * (double)p->s.spatial;
    double mean = 0, square = 0;
    for (int64_t b = 0; b < rows; b++)
        mean += p->sum[b * p->s.channels + c];
    mean = n > 0 ? mean / (double)rows : 0;
    for (int64_t b = 0; b < rows && n > 0; b++) {
        double off = p->sum[b * p->s.channels + c] - mean;
        square += p->sum_h[b * p->s.channels + c];
        if (rows > 1) square += (double)p->s.spatial * off * off;
    }
    const REAL var = n > 0 ? (REAL)(square / n) : 0;
    ((REAL *)p->mean)[c] = (REAL)mean;
    ((REAL *)p->inv)[c] = (REAL)(1 / sqrt((double)var + p->epsilon));
    if (out_var) ((REAL *)out_var)[c] = var;
}

static void NAME(keep_inverse)(const batch_t *p, int64_t c, const void *var) {
    ((REAL *)p->inv)[c] = (REAL)(1 / sqrt((double)((const REAL *)var)[c] + p->epsilon));
}

static void NAME(normalise)(const batch_t *p, int64_t row) {
    const int64_t n = p->s.spatial, c = row % p->s.channels;
    const REAL *x = (const REAL *)p->x + row * n, mean = ((const REAL *)p->mean)[c];
    const REAL factor = ((const REAL *)p->inv)[c] * ((const REAL *)p->scale)[c];
    const REAL shift = ((const REAL *)p->bias)[c];
    REAL *y = (REAL *)p->y + row * n;
    for (int64_t i = 0; i < n; i++)
        y[i] = (x[i] - mean) * factor + shift;
}

static void NAME(normalise_across)(const batch_t *p, int64_t b) {
    const int64_t n = p->s.channels;
    const REAL *x = (const REAL *)p->x + b * n, *mean = p->mean, *inv = p->inv;
    const REAL *scale = p->scale, *bias = p->bias;
    REAL *y = (REAL *)p->y + b * n;
    for (int64_t i = 0; i < n; i++)
        y[i] = (x[i] - mean[i]) * (inv[i] * scale[i]) + bias[i];
}

static void NAME(add_rows)(const batch_t *p, int64_t c, REAL *dscale, REAL *dbias) {
    const int64_t rows = p->s.spatial == 1 && p->s.batch ? 1 : p->s.batch;
    double sum = 0, sum_h = 0;
    for (int64_t b = 0; b < rows; b++) {
        sum += p->sum[b * p->s.channels + c];
        sum_h += p->sum_h[b * p->s.channels + c];
    }
    if (dbias) dbias[c] = (REAL)sum;
    if (dscale) dscale[c] = (REAL)(sum_h * (double)((const REAL *)p->inv)[c]);
    if (rows) p->sum[c] = sum, p->sum_h[c] = sum_h;
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

static void NAME(backward)(const batch_t *p, int64_t row) {
    const int64_t n = p->s.spatial, c = row % p->s.channels;
    const REAL *x = (const REAL *)p->x + row * n, *dy = (const REAL *)p->dy + row * n;
    const REAL mean = ((const REAL *)p->mean)[c];
    REAL *dx = (REAL *)p->y + row * n, k[3];
    NAME(slopes)(p, c, k);
    if (p->given)
        for (int64_t i = 0; i < n; i++)
            dx[i] = k[0] * dy[i];
    else
        for (int64_t i = 0; i < n; i++)
            dx[i] = k[0] * dy[i] + k[1] * (x[i] - mean) + k[2];
}

static void NAME(backward_columns)(const batch_t *p, int64_t column, int64_t n) {
    const int64_t step = p->s.channels;
    const REAL *x = (const REAL *)p->x + column, *dy = (const REAL *)p->dy + column;
    const REAL *mean = (const REAL *)p->mean + column;
    REAL *dx = (REAL *)p->y + column, a[COLUMNS], h[COLUMNS], shift[COLUMNS];
    for (int64_t k = 0; k < n; k++) {
        REAL all[3];
        NAME(slopes)(p, column + k, all);
        a[k] = all[0], h[k] = all[1], shift[k] = all[2];
    }
    for (int64_t at = 0; at < p->s.batch * step; at += step)
        for (int64_t k = 0; k < n; k++)
            dx[at + k] = p->given ? a[k] * dy[at + k]
                                  : a[k] * dy[at + k] + h[k] * (x[at + k] - mean[k]) + shift[k];
}
