/* Philox4x32-10: random bits as a pure function of coordinates.
 *
 * Coordinates are (seed of the forward call, node's index in the model, logical element index), so
 * a mask can be recomputed in backward, replayed after a restart, and does not depend on threads,
 * chunking or fusion. The seed is the cipher's key. The counter's high half is the node; its low
 * half and the output word come from the element: elements go in groups of 64, 16 counters of 4
 * words each, laid out so that vectors of counters give vectors of neighbouring elements:
 *
 *     counter = element / 64 * 16 + element % 16      word = element / 16 % 4
 *
 * Any device that fills these formulas in gets the same bits.
 */
#ifndef GRADD_KERNELS_RNG_H
#define GRADD_KERNELS_RNG_H

#include "kernels/hd.h"
#include <stdint.h>

#if defined(__AVX2__) && !defined(__CUDACC__)
#include <immintrin.h>
#endif

#define GRADD_RNG_GROUP 64

/* The cipher itself: four words for one counter. */
GRADD_HD void gradd_philox(uint64_t seed, const uint32_t counter[4], uint32_t out[4]) {
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1, c3 = (uint32_t)p0;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

#if defined(__AVX2__) && !defined(__CUDACC__)
/* One round's product of 8 words by a constant, as low and high halves. */
static inline void gradd_rng_multiply(__m256i a, uint32_t by, __m256i *out_low, __m256i *out_high) {
    __m256i factor = _mm256_set1_epi64x((long long)by);
    __m256i even = _mm256_mul_epu32(a, factor);
    __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), factor);
    *out_low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
    *out_high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}

/* Words of 8 counters that start at `counter` (a multiple of 8); out[16 * word + i]. */
static inline void gradd_rng_eight(uint64_t seed, uint64_t node, uint64_t counter, uint32_t *out) {
    __m256i c0 = _mm256_add_epi32(_mm256_set1_epi32((int)counter),
                                  _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    __m256i c1 = _mm256_set1_epi32((int)(counter >> 32)), c2 = _mm256_set1_epi32((int)node);
    __m256i c3 = _mm256_set1_epi32((int)(node >> 32));
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        __m256i low0, high0, low1, high1;
        gradd_rng_multiply(c0, 0xD2511F53u, &low0, &high0);
        gradd_rng_multiply(c2, 0xCD9E8D57u, &low1, &high1);
        c0 = _mm256_xor_si256(_mm256_xor_si256(high1, c1), _mm256_set1_epi32((int)k0));
        c2 = _mm256_xor_si256(_mm256_xor_si256(high0, c3), _mm256_set1_epi32((int)k1));
        c1 = low1, c3 = low0;
    }
    _mm256_storeu_si256((__m256i *)out, c0);
    _mm256_storeu_si256((__m256i *)(out + 16), c1);
    _mm256_storeu_si256((__m256i *)(out + 32), c2);
    _mm256_storeu_si256((__m256i *)(out + 48), c3);
}
#endif

/* Words of the 64 elements [64 * group, 64 * group + 64). */
static inline void gradd_rng_group(uint64_t seed, uint64_t node, uint64_t group,
                                   uint32_t out[GRADD_RNG_GROUP]) {
#if defined(__AVX2__) && !defined(__CUDACC__)
    gradd_rng_eight(seed, node, group * 16, out);
    gradd_rng_eight(seed, node, group * 16 + 8, out + 8);
#else
    for (uint32_t i = 0; i < 16; i++) {
        uint64_t counter = group * 16 + i;
        uint32_t in[4] = {(uint32_t)counter, (uint32_t)(counter >> 32), (uint32_t)node,
                          (uint32_t)(node >> 32)};
        uint32_t words[4];
        gradd_philox(seed, in, words);
        for (int k = 0; k < 4; k++)
            out[16 * k + i] = words[k];
    }
#endif
}

/* Word of one element; the plain definition. */
GRADD_HD uint32_t gradd_rng_word(uint64_t seed, uint64_t node, uint64_t element) {
    uint64_t counter = element / 64 * 16 + element % 16;
    uint32_t in[4] = {(uint32_t)counter, (uint32_t)(counter >> 32), (uint32_t)node,
                      (uint32_t)(node >> 32)};
    uint32_t out[4];
    gradd_philox(seed, in, out);
    return out[element / 16 % 4];
}

/* [0, 1) with 24 bits: exact in f32. */
GRADD_HD double gradd_rng_uniform(uint32_t word) {
    return (double)(word >> 8) * 0x1p-24;
}

#endif
