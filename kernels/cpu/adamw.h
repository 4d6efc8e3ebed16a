/* Adam on the CPU: update, commit and the sum of squares. They are defined in
 * kernels/contract/adam.h. Each runs on the calling thread's OpenMP team. */
#ifndef GRADD_KERNELS_CPU_ADAMW_H
#define GRADD_KERNELS_CPU_ADAMW_H

#include "kernels/contract/adam.h"

void gradd_adam_update(const gradd_adam_t *hyper, float grad_scale, const gradd_adam_span_t *span);
void gradd_adam_commit(const gradd_adam_commit_t *commit);
/* Of all spans together: in double, in an order that depends on nothing but their sizes. */
double gradd_sum_squares(const gradd_span_t *list, int n);
/* Bit r % 64 of bits[r / 64]: whether row r has an element that is not zero (NaN is not). */
void gradd_touched_rows(const gradd_span_t *span, int64_t width, uint64_t *bits);

#endif
