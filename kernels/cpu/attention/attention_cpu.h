/* Attention on the CPU: softmax(scale q k^T, masked) v and its gradient, without a matrix of
 * scores.
 *
 * q is [B, H, n_q, D], k [B, K, n_k, D], v [B, K, n_k, E], y [B, H, n_q, E] with H a multiple of K;
 * each has its own strides, so either order of heads and positions is read and written in place.
 * Scores exist as tiles of 64 keys by 64 queries. They lie transposed, queries side by side: then
 * no operand of any product of f32 or f64 needs packing but the queries, and statistics per query
 * are vectors. Forward keeps two numbers per query, the largest score and the logarithm of the sum
 * of exp(score - largest), from which backward computes the probabilities again. Their sum would be
 * enough, except for rows whose scores are all large, where it would lose the digits of the
 * logarithm.
 *
 * The keys that a query may look at are given as a range and, where the range has holes, a boolean
 * mask. Key tiles that no query of a block may look at are skipped, which changes nothing where
 * masked probabilities are exactly zero: beside any allowed key whose score is clearly above the
 * fill. Rows without such a key are rare (padding, or a bias that hides all that the mask leaves)
 * and are treated key by key, see attention_bits.h. Dropout bits are a function of the logical
 * element, see rng.h. f32 and f64 compute in their own type, halves in f32 with one rounding at the
 * end; where the processor multiplies bf16, factors are bf16, see attention_pairs.h.
 *
 * Bits depend on the shapes and values alone, not on the number of threads. Engine thread.
 */
#ifndef GRADD_KERNELS_CPU_ATTENTION_ATTENTION_CPU_H
#define GRADD_KERNELS_CPU_ATTENTION_ATTENTION_CPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/describe/attention_call.h"
#include "shm/dtype.h"
#include "shm/status.h"

#define GRADD_ATTN_TILE 64

/* Scratch that the functions below need; depends on nothing but shapes, types and threads. */
size_t gradd_attn_workspace(const gradd_attn_t *p, bool backward);
/* How many parts are made of the work, at most `parts`: each has something for every thread. */
int gradd_attn_parts(const gradd_attn_t *p, bool backward, int parts);
/* Writes y and, if given, stats. */
gradd_status_t gradd_attn_forward(const gradd_attn_t *p, void *workspace);
/* Reads q, k, v, y, dy, stats; writes those of dq, dk, dv, dbias that are given. */
gradd_status_t gradd_attn_backward(const gradd_attn_t *p, void *workspace);
/* Computes the results of the forward query by query in double, for bf16 operands, too. */
void gradd_attn_reference(const gradd_attn_t *p);
/* Whether the processor's products of pairs can do it. Needs the type and the widths. */
bool gradd_attn_pairs(const gradd_attn_t *p);

/* Ranges of `rows` rows of n bytes. */
void gradd_attn_ranges(const uint8_t *mask, int64_t rows, int64_t n, int32_t *out);

#endif
