/* Products of bf16 matrices for attention, where the processor multiplies bf16 in pairs
 * (AVX512_BF16) and oneDNN does so too. Internal to attention.
 *
 * A pair is two neighbours along the sum in one 32-bit word, the first in the lower half. Rows of a
 * tensor are rows of pairs already where the sum runs along them, and need no more than the
 * transposition that they need anyway. Where it runs over rows, two rows are packed into one. Tiles
 * are rounded. The missing half of the last pair is zero on both sides, because zero times infinity
 * is not zero. Sums are f32, one chain per element in the order of the pairs. The instruction takes
 * subnormal numbers for zero. */
#ifndef GRADD_KERNELS_CPU_ATTENTION_ATTENTION_PAIRS_H
#define GRADD_KERNELS_CPU_ATTENTION_ATTENTION_PAIRS_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/cpu/bf16.h"

/* Whether this build has them: where it has not, no function below exists but attn_pairs_ready. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(GRADD_NO_WIDE)
#define ATTN_PAIRS 1
#else
#define ATTN_PAIRS 0
#endif

typedef uint32_t attn_pair_t __attribute__((may_alias, aligned(2)));

/* C[m, n] = A B, or C += A B. A has any strides, rows of B and C are contiguous, n is a multiple of
 * the elements of a 512-bit vector. k and the steps of A and B count elements, or pairs. */
typedef struct attn_product_s {
    int64_t m, n, k;
    int64_t a_m, a_k, ldb, ldc;
    bool add;
} attn_product_t;

/* Whether this machine has the instructions; false while gradd_narrow is set. */
bool attn_pairs_ready(void);

/* n is a multiple of 16. */
void attn_pairs_product(const attn_product_t *p, const attn_pair_t *a, const attn_pair_t *b,
                        float *c);

/* out[j][c] = x[2j][c], x[2j + 1][c] for the rows of x; zero below the last row and, up to ld_out,
 * beyond the last column. */
void attn_pairs_rows(const gradd_bf16_t *x, int64_t ld, int64_t rows, int64_t cols,
                     attn_pair_t *out, int64_t ld_out);

/* A tile [keys][64 queries] of f32, rounded: pairs of keys, out[j][i] = x[2j][i], x[2j + 1][i], or
 * of queries, out[j][i] = x[j][2i], x[j][2i + 1] with rows of 32. Zero stands for the key and the
 * query behind the last one. Up to 15 further queries are written. */
void attn_pairs_of_keys(const float *x, int64_t keys, int64_t queries, attn_pair_t *out);
void attn_pairs_of_queries(const float *x, int64_t keys, int64_t queries, attn_pair_t *out);

typedef struct attn_rows_bf16_s {
    const gradd_bf16_t *at;
    int64_t ld; /* from row to row */
} attn_rows_bf16_t;

/* Sums of x y along rows, in f32. */
void attn_pairs_dots(attn_rows_bf16_t x, attn_rows_bf16_t y, int64_t rows, int64_t cols,
                     float *out);

#endif
