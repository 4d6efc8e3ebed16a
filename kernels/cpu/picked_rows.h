/* Rows picked by number: the engine under the Gather and Scatter operators.
 *
 * row[i] in [0, n_rows) names the i-th row; the caller has checked it. Reading takes rows in any
 * order. Writing splits the work so that every element of the target belongs to one thread, which
 * goes through i in rising order: a repeated row gets the same bits for any number of threads (with
 * put, the last one wins). Called on the engine thread.
 */
#ifndef GRADD_KERNELS_CPU_PICKED_ROWS_H
#define GRADD_KERNELS_CPU_PICKED_ROWS_H

#include <stddef.h>
#include <stdint.h>

#include "shm/dtype.h"
#include "shm/status.h"

typedef struct gradd_rows_s {
    const int64_t *row; /* Borrowed, n entries */
    int64_t n;
    int64_t n_rows; /* of the indexed side */
    int64_t size;   /* elements of one row */
} gradd_rows_t;

/* to[i] = from[row[i]] */
gradd_status_t gradd_rows_get(const gradd_rows_t *rows, size_t bytes, void *to, const void *from);
/* to[row[i]] = from[i] */
gradd_status_t gradd_rows_put(const gradd_rows_t *rows, size_t bytes, void *to, const void *from);
/* to[row[i]] += from[i]; f32, f64, i32, i64, and halves, which are summed in f32 and rounded once
 * per element of the target. */
gradd_status_t gradd_rows_add(const gradd_rows_t *rows, gradd_dtype_t dtype, void *to,
                              const void *from);

#endif
