/* Strided copies: the engine under every operator that only moves elements.
 *
 * A job is a box of elements (kernels/describe/moves.h). gradd_copy_strided simplifies it, picks
 * one of four inner loops (rows, fill, blocked transposition, general) and splits the rest among
 * OpenMP threads. gradd_copy_plain is the loop that defines it. Elements are moved as bytes; both
 * sides must not overlap, and no two elements of the target may be the same. Called on the engine
 * thread.
 */
#ifndef GRADD_KERNELS_CPU_COPY_H
#define GRADD_KERNELS_CPU_COPY_H

#include "kernels/describe/moves.h"

/* `to` and `from` point to the elements at index 0 of every axis; bytes is 1, 2, 4 or 8. */
void gradd_copy_strided(const gradd_copy_t *job, size_t bytes, void *to, const void *from);
void gradd_copy_plain(const gradd_copy_t *job, size_t bytes, void *to, const void *from);

/* memcpy and memset to zero, split among threads when large. */
void gradd_copy_bytes(void *to, const void *from, size_t bytes);
void gradd_copy_zero(void *to, size_t bytes);

/* The box of a move, from `from` to `to`, the first elements of both tensors. */
typedef void (*gradd_copy_fn_t)(const gradd_copy_t *, size_t, void *, const void *);
void gradd_copy_move(const gradd_move_t *move, const gradd_launch_t *r, gradd_copy_fn_t copy);
/* For rows whose launches are such a move: it makes as many parts as are asked for. */
int gradd_copy_parts(const gradd_infer_t *c);

#endif
