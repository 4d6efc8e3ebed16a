/* One row of a softmax: shared by the softmax and the loss families.
 *
 * Rows are contiguous. A row that holds +inf or NaN, or nothing but -inf, gives NaN, as torch does.
 * Sums run in short f32 chains that flow into double. n >= 1. */
#ifndef GRADD_KERNELS_CPU_SOFTMAX_ROWS_H
#define GRADD_KERNELS_CPU_SOFTMAX_ROWS_H

#include <stdint.h>

/* Largest element (NaN if there is one). */
float gradd_row_max_f32(const float *x, int64_t n);
double gradd_row_max_f64(const double *x, int64_t n);
/* sum of exp(x - shift); with z not NULL also stores the terms there (z may be x). */
double gradd_row_exp_f32(const float *x, int64_t n, float shift, float *z);
double gradd_row_exp_f64(const double *x, int64_t n, double shift, double *z);

#define gradd_row_max(x, n)                                                                        \
    _Generic((x), const float *: gradd_row_max_f32, const double *: gradd_row_max_f64)(x, n)
#define gradd_row_exp(x, n, shift, z)                                                              \
    _Generic((x), const float *: gradd_row_exp_f32, const double *: gradd_row_exp_f64)(x, n,       \
                                                                                       shift, z)

#endif
