/* Strided copies: the engine under every operator that only moves elements.
 *
 * A job names a box of elements and, for both sides, the distance between neighbours along each
 * axis. Stride 0 on the source side broadcasts. gradd_copy_strided simplifies the box (drops axes
 * of size 1, merges axes that are contiguous on both sides), picks one of four inner loops (rows,
 * fill, blocked transposition, general) and splits the rest among OpenMP threads. gradd_copy_plain
 * is the loop that defines it. Elements are moved as bytes; both sides must not overlap, and no two
 * elements of the target may be the same. Called on the engine thread.
 */
#ifndef GRADD_KERNELS_CPU_COPY_H
#define GRADD_KERNELS_CPU_COPY_H

#include <stddef.h>
#include <stdint.h>

#include "shm/tensor.h"

#define GRADD_COPY_RANK (2 * GRADD_MAX_RANK) /* Tile needs two axes for each of a tensor */

typedef struct gradd_copy_s {
    int rank;
    int64_t dims[GRADD_COPY_RANK]; /* elements, >= 0 */
    int64_t to[GRADD_COPY_RANK];   /* strides in elements, may be negative */
    int64_t from[GRADD_COPY_RANK];
} gradd_copy_t;

/* `to` and `from` point to the elements at index 0 of every axis; bytes is 1, 2, 4 or 8. */
void gradd_copy_strided(const gradd_copy_t *job, size_t bytes, void *to, const void *from);
void gradd_copy_plain(const gradd_copy_t *job, size_t bytes, void *to, const void *from);

/* memcpy and memset to zero, split among threads when large. */
void gradd_copy_bytes(void *to, const void *from, size_t bytes);
void gradd_copy_zero(void *to, size_t bytes);

/* Row-major strides in elements of a contiguous tensor. */
void gradd_copy_strides(const gradd_type_t *type, int64_t *out_strides);

#endif
