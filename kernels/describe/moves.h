/* Operators that only move elements, for every device: boxes of elements, and the boxes of each
 * operator.
 *
 * A box names elements and, for both sides, the distance between neighbours along each axis. Stride
 * 0 on the source side broadcasts. The functions of each operator are in its file below
 * kernels/ops.
 */
#ifndef GRADD_KERNELS_DESCRIBE_MOVES_H
#define GRADD_KERNELS_DESCRIBE_MOVES_H

#include "kernels/contract/op.h"
#include "kernels/math/host_device.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GRADD_COPY_RANK (2 * GRADD_MAX_RANK) /* Tile needs two axes for each of a tensor */

typedef struct gradd_copy_s {
    int rank;
    int64_t dims[GRADD_COPY_RANK]; /* elements, >= 0 */
    int64_t to[GRADD_COPY_RANK];   /* strides in elements, may be negative */
    int64_t from[GRADD_COPY_RANK];
} gradd_copy_t;

/* A box of out[0] that in[0] fills. */
typedef struct gradd_move_s {
    gradd_copy_t box;
    int64_t to, from; /* elements at index 0 of every axis */
} gradd_move_t;

/* Row-major strides in elements of a contiguous tensor. */
static inline void gradd_copy_strides(const gradd_type_t *type, int64_t *out_strides) {
    int64_t stride = 1;
    for (int i = type->rank - 1; i >= 0; i--) {
        out_strides[i] = stride;
        stride *= type->dims[i];
    }
}

/* Drops axes of size 1 and merges those that are contiguous on both sides; false: the box is
 * empty. */
bool gradd_copy_simplify(const gradd_copy_t *job, gradd_copy_t *out);

/* Only operands behind in[0] that say which elements are meant must be readable. */
gradd_status_t gradd_move_of_transpose(const gradd_launch_t *r, gradd_move_t *out);
gradd_status_t gradd_move_of_expand(const gradd_launch_t *r, gradd_move_t *out);
gradd_status_t gradd_move_of_tile(const gradd_launch_t *r, gradd_move_t *out);
gradd_status_t gradd_move_of_slice(const gradd_launch_t *r, gradd_move_t *out);
gradd_status_t gradd_move_of_slice_grad(const gradd_launch_t *r, gradd_move_t *out);

/* Part i of Concat or Split: a box that is contiguous on one side and has rows of the whole tensor
 * on the other, where it begins at `first`. */
typedef struct gradd_part_s {
    int64_t outer, width, whole, first; /* elements */
} gradd_part_t;
gradd_status_t gradd_part_of_concat(const gradd_launch_t *r, int i, gradd_part_t *inout);
gradd_status_t gradd_part_of_split(const gradd_launch_t *r, int i, gradd_part_t *inout);

/* ---- Pad ---- */

typedef struct gradd_pads_s {
    int64_t begin[GRADD_MAX_RANK], end[GRADD_MAX_RANK];
} gradd_pads_t;
gradd_status_t gradd_pads_read(const gradd_view_t *in, int n_in, gradd_pads_t *out);

/* Index in an axis of n >= 1 elements for position i of the padded axis, by the first letter of
 * the mode. */
GRADD_HD int64_t gradd_pad_source(char mode, int64_t i, int64_t n) {
    if (i >= 0 && i < n) return i;
    if (mode == 'e') return i < 0 ? 0 : n - 1;
    if (mode == 'w') return (i % n + n) % n;
    if (n == 1) return 0;
    const int64_t period = 2 * (n - 1), k = (i % period + period) % period;
    return k < n ? k : period - k;
}

/* ---- triangles, ranges, one of many ---- */

/* First column that an upper triangle keeps in that row; a lower one keeps those in front of it. */
GRADD_HD int64_t gradd_trilu_edge(int64_t row, int64_t columns, int64_t k, bool upper) {
    const int64_t add = upper ? 0 : 1;
    if (k >= columns) return columns;
    if (k < -row - add) return 0;
    const int64_t edge = row + add + k;
    return edge < columns ? edge : columns;
}

void gradd_shape_range(gradd_attrs_t attrs, int rank, int *out_start, int *out_end);

#ifdef __cplusplus
}
#endif
#endif
