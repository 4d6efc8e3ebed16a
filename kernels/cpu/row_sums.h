/* Sums of rows by the number of their target row: gradients of tables in which rows are looked up.
 *
 *     to[r] = (clear ? 0 : to[r]) + scale * (sum of from[i] over all i with row[i] == r)
 *
 * Only rows that a number names are read and summed; the others are cleared or stay, so the cost
 * is that of clearing and of the rows of `from`. A row is summed in rising order of i in short
 * chains, in f32 for bf16 and f16 and in double for double, and rounded once: bits do not depend on
 * threads. Called on the engine thread.
 * Of a launch in parts the first half clears, and the second sums; the numbers are read between.
 * Plain sums are one chain, which begins with to[r]: as if each were added there, without rounding.
 */
#ifndef GRADD_KERNELS_CPU_ROW_SUMS_H
#define GRADD_KERNELS_CPU_ROW_SUMS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/cpu/parts.h"
#include "shm/dtype.h"
#include "shm/status.h"

typedef struct gradd_row_sums_s {
    const int64_t *row; /* Borrowed, n entries in [0, n_rows); -1 = goes nowhere */
    int64_t n, n_rows;
    int64_t width; /* elements of one row */
    double scale;
    bool clear, plain;
    const gradd_launch_t *launch; /* Borrowed: for its parts */
} gradd_row_sums_t;

/* Scratch bytes for n numbers. */
size_t gradd_row_sums_workspace(int64_t n);
/* Floats. Errors: UNSUPPORTED. */
gradd_status_t gradd_row_sums(const gradd_row_sums_t *sums, gradd_dtype_t dtype, void *to,
                              const void *from, void *workspace);

#endif
