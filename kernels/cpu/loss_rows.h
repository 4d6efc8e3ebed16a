/* One row of logits, as the cross-entropy reads and writes it: f32, f64, or a half with f32 inside.
 *
 * A row is taken in blocks that fit the first cache: the memory is read once, also for the maximum.
 * A row that holds +inf or NaN, or nothing but -inf, gives NaN, as torch does. n >= 1. Any thread.
 */
#ifndef GRADD_KERNELS_CPU_LOSS_ROWS_H
#define GRADD_KERNELS_CPU_LOSS_ROWS_H

#include <stdbool.h>
#include <stdint.h>

#include "shm/dtype.h"

typedef struct gradd_loss_row_s {
    double max, sum; /* maximum of x, sum of exp(x - max) */
    double plain;    /* sum of x, times the weights if there are any, if it was asked for */
} gradd_loss_row_t;

/* `weights`: one per element, f64 beside f64, else f32; NULL = all one. */
gradd_loss_row_t gradd_loss_scan(gradd_dtype_t dtype, const void *x, int64_t n, bool plain,
                                 const void *weights);

/* z = exp(x - max) * scale - shift * weights, rounded once; z may be x. */
typedef struct gradd_loss_spread_s {
    double max, scale, shift;
    const void *weights; /* as above; NULL = all one */
} gradd_loss_spread_t;

void gradd_loss_spread(gradd_dtype_t dtype, const void *x, void *z, int64_t n,
                       const gradd_loss_spread_t *s);

#endif
