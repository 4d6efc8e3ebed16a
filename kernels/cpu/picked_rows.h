/* Rows picked by number: the engine under the Gather and Scatter operators.
 *
 * row[i] in [0, n_rows) names the i-th row; the caller has checked it. Reading takes rows in any
 * order. Writing splits the work so that every element of the target belongs to one thread, which
 * goes through i in rising order: a repeated row gets the same bits for any number of threads (with
 * put, the last one wins). Called on the engine thread.
 *
 * Long rows are cut into pieces, which are rows of their own (gradd_rows_pieces): a launch in parts
 * has some of them.
 */
#ifndef GRADD_KERNELS_CPU_PICKED_ROWS_H
#define GRADD_KERNELS_CPU_PICKED_ROWS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/cpu/parts.h"
#include "shm/dtype.h"
#include "shm/status.h"

typedef struct gradd_rows_s {
    const int64_t *row; /* Borrowed, n entries */
    int64_t n;
    int64_t n_rows; /* of the indexed side */
    int64_t size;   /* elements of one row */
} gradd_rows_t;

/* How many pieces of equal length a row is cut into: 1 if it is short, or its size has no divisor
 * that serves. */
int64_t gradd_rows_pieces(int64_t size, size_t bytes);
/* The pieces as rows, whose numbers are in `list`, n * pieces entries: `fill` writes them there. */
gradd_rows_t gradd_rows_cut(const gradd_rows_t *rows, int64_t pieces, int64_t *list, bool fill);

/* to[i] = from[row[i]] */
gradd_status_t gradd_rows_get(const gradd_rows_t *rows, size_t bytes, void *to, const void *from);
/* to[row[i]] = from[i] */
gradd_status_t gradd_rows_put(const gradd_rows_t *rows, size_t bytes, void *to, const void *from);

/* to = start, then to[row[i]] += from[i]: f32, f64, i32, i64, and halves, which are summed in f32
 * and rounded once per element of the target. */
typedef struct gradd_row_adds_s {
    gradd_rows_t rows;
    gradd_dtype_t dtype;
    const void *start; /* NULL: zeros; may be `to` */
    void *to;
    const void *from;
    void *workspace;
    const gradd_launch_t *launch; /* Borrowed: for its parts */
} gradd_row_adds_t;

/* All numbers are there when the first of a launch's stages has ended. */
gradd_status_t gradd_rows_add(const gradd_row_adds_t *adds);
int gradd_rows_add_stages(const gradd_rows_t *rows, gradd_dtype_t dtype);
size_t gradd_rows_add_workspace(const gradd_rows_t *rows, gradd_dtype_t dtype);
/* As gradd_kernel_t.parts. */
int gradd_rows_add_parts(const gradd_infer_t *c, const gradd_rows_t *rows, gradd_dtype_t dtype);

#endif
