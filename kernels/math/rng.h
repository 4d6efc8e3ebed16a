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
 * Any device that evaluates these formulas gets the same bits.
 */
#ifndef GRADD_KERNELS_MATH_RNG_H
#define GRADD_KERNELS_MATH_RNG_H

#include <math.h>
#include <stdint.h>

#include "kernels/math/host_device.h"

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

/* Words of the elements e, e + 16, e + 32 and e + 48 with e = counter / 16 * 64 + counter % 16. */
GRADD_HD void gradd_rng_four(uint64_t seed, uint64_t node, uint64_t counter, uint32_t out[4]) {
    const uint32_t in[4] = {(uint32_t)counter, (uint32_t)(counter >> 32), (uint32_t)node,
                            (uint32_t)(node >> 32)};
    gradd_philox(seed, in, out);
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
        uint32_t words[4];
        gradd_rng_four(seed, node, group * 16 + i, words);
        for (int k = 0; k < 4; k++)
            out[16 * k + i] = words[k];
    }
#endif
}

/* Word of one element; the plain definition. */
GRADD_HD uint32_t gradd_rng_word(uint64_t seed, uint64_t node, uint64_t element) {
    uint32_t out[4];
    gradd_rng_four(seed, node, element / 64 * 16 + element % 16, out);
    return out[element / 16 % 4];
}

/* [0, 1) with 24 bits: exact in f32. */
GRADD_HD double gradd_rng_uniform(uint32_t word) {
    return (double)(word >> 8) * 0x1p-24;
}

/* Normal numbers by Box and Muller from two words: those of elements i and i + 16 of a group, for
 * i % 32 < 16; the pair gives both elements theirs. */
GRADD_HD double gradd_rng_normal(uint32_t low, uint32_t high, int second) {
    const double u = ((double)low + 1) * 0x1p-32, v = (double)high * 0x1p-32;
    const double radius = sqrt(-2 * log(u)), angle = 6.283185307179586 * v;
    return second ? radius * sin(angle) : radius * cos(angle);
}

/* The parameters of dropout for a ratio p within 0 and 1. */
typedef struct gradd_drop_s {
    uint64_t limit; /* an element is kept if its word is not below */
    double scale;   /* 1 / (1 - p) */
} gradd_drop_t;

GRADD_HD gradd_drop_t gradd_rng_drop(double p) {
    gradd_drop_t d = {(uint64_t)(p * 0x1p32), p < 1 ? 1 / (1 - p) : 0};
    return d;
}

#endif
