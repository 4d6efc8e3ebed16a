/* Attention on the CPU: softmax(scale q k^T, masked) v and its gradient, without a matrix of
 * scores.
 *
 * q is [B, H, n_q, D], k [B, K, n_k, D], v [B, K, n_k, E], y [B, H, n_q, E] with H a multiple of K;
 * each has its own strides, so either order of heads and positions is read and written in place.
 * Scores exist as tiles of 64 keys by 64 queries. They lie transposed, queries side by side: then
 * no operand of any product of f32 or f64 needs packing but the queries, and statistics per query
 * are vectors.
 * Forward keeps two numbers per query, the largest score and the logarithm of the sum of exp(score
 * - largest), from which backward computes the probabilities again. Their sum would do but for rows
 * whose scores are all large, which it would leave without the digits of the logarithm.
 *
 * What a query may look at comes as a range of keys and, where the range has holes, as a boolean
 * mask; key tiles that no query of a block may look at are skipped, which changes nothing where
 * masked probabilities are exactly zero: beside any allowed key whose score is clearly above the
 * fill. Rows without one are rare (padding, or a bias that hides what the mask leaves) and looked
 * at key by key, see attention_bits.h. Dropout bits are a function of the logical element, see
 * rng.h. f32 and f64 compute in their own type, bf16 in f32 with one rounding at the end; where the
 * processor multiplies bf16, factors are bf16, see attention_pairs.h.
 *
 * Bits depend on the shapes and values alone, not on the number of threads. Engine thread.
 */
#ifndef GRADD_KERNELS_CPU_ATTENTION_H
#define GRADD_KERNELS_CPU_ATTENTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/attention.h"
#include "shm/dtype.h"
#include "shm/status.h"

#define GRADD_ATTN_TILE 64

typedef struct gradd_attn_side_s {
    void *data;               /* Borrowed; NULL = absent or not wanted */
    int64_t batch, head, row; /* strides in elements; along a row elements are neighbours */
} gradd_attn_side_t;

typedef struct gradd_attn_extra_s {
    const void *data;              /* Borrowed; NULL = absent */
    int64_t batch, head, row, col; /* strides in elements, 0 = broadcast */
} gradd_attn_extra_t;

typedef struct gradd_attn_drop_s {
    bool active;
    uint64_t seed, node;
    uint64_t limit; /* an element is kept if its word is not below; > UINT32_MAX = none is */
    double scale;   /* 1 / (1 - p) */
} gradd_attn_drop_t;

/* Where q, and k and v, hold live rows alone: their numbers among all rows, none negative, of
 * sequences of so many positions. Dropout's bits and the bias are those of the pair of positions
 * among all rows. NULL = all rows. */
typedef struct gradd_attn_rows_s {
    const int64_t *q, *k; /* both or none */
    int64_t positions, key_positions;
} gradd_attn_rows_t;

typedef struct gradd_attn_s {
    gradd_dtype_t dtype; /* of q, k, v, y and their gradients; all else is f64 for F64, or f32 */
    int64_t batch, heads, kv_heads, n_q, n_k, d, d_v;
    gradd_attn_side_t q, k, v, y, dy, dq, dk, dv;
    void *stats;              /* [B, H, 2, n_q]: largest score, logarithm; NULL = not wanted */
    gradd_attn_extra_t mask;  /* bytes; col is 1 */
    gradd_attn_extra_t range; /* int32_t, three per row; required with a mask; col is unused */
    gradd_attn_extra_t bias;  /* added to the scaled and capped scores; of all rows */
    const void *sinks;        /* [H], one more score per head that looks at nothing; NULL = none */
    bool sunk;                /* whether there are such: backward finds them in stats */
    void *dbias;              /* of the bias's shape, cleared by the caller; NULL = not wanted */
    double scale, softcap;    /* softcap 0 = none: else c tanh(score / c) */
    double fill;              /* in place of what the mask hides; -inf is one, too */
    int hides;                /* bits of GRADD_ATTN_HIDES_... */
    bool zero;                /* a query without any allowed key gives zero, without gradients */
    gradd_attn_drop_t drop;
    gradd_attn_rows_t rows; /* with a range, without a mask */
    bool pairs;             /* multiply bf16 in pairs; needs gradd_attn_pairs */
    int threads;            /* at most so many work; 0 = as many as the process may use */
} gradd_attn_t;

/* Scratch that the functions below need; depends on nothing but shapes, types and threads. */
size_t gradd_attn_workspace(const gradd_attn_t *p, bool backward);
/* Writes y and, if given, stats. */
gradd_status_t gradd_attn_forward(const gradd_attn_t *p, void *workspace);
/* Reads q, k, v, y, dy, stats; writes those of dq, dk, dv, dbias that are given. */
gradd_status_t gradd_attn_backward(const gradd_attn_t *p, void *workspace);
/* What the forward writes, query by query in double; of bf16 operands, too. */
void gradd_attn_reference(const gradd_attn_t *p);
/* Whether the processor's products of pairs can do it. Needs the type and the widths. */
bool gradd_attn_pairs(const gradd_attn_t *p);

/* Ranges of `rows` rows of n bytes. */
void gradd_attn_ranges(const uint8_t *mask, int64_t rows, int64_t n, int32_t *out);

#endif
