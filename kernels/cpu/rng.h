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
#ifndef GRADD_KERNELS_CPU_RNG_H
#define GRADD_KERNELS_CPU_RNG_H

#include <stdint.h>

#define GRADD_RNG_GROUP 64

/* The cipher itself: four words for one counter. */
static inline void gradd_philox(uint64_t seed, const uint32_t counter[4], uint32_t out[4]) {
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1, c3 = (uint32_t)p0;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

/* Words of the 64 elements [64 * group, 64 * group + 64). The inner loops run over 16 independent
 * counters, which compilers turn into vectors. */
static inline void gradd_rng_group(uint64_t seed, uint64_t node, uint64_t group,
                                   uint32_t out[GRADD_RNG_GROUP]) {
    uint32_t c0[16], c1[16], c2[16], c3[16];
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int i = 0; i < 16; i++) {
        uint64_t counter = group * 16 + (uint64_t)i;
        c0[i] = (uint32_t)counter, c1[i] = (uint32_t)(counter >> 32);
        c2[i] = (uint32_t)node, c3[i] = (uint32_t)(node >> 32);
    }
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
        for (int i = 0; i < 16; i++) {
            uint64_t p0 = (uint64_t)0xD2511F53u * c0[i], p1 = (uint64_t)0xCD9E8D57u * c2[i];
            c0[i] = (uint32_t)(p1 >> 32) ^ c1[i] ^ k0, c1[i] = (uint32_t)p1;
            c2[i] = (uint32_t)(p0 >> 32) ^ c3[i] ^ k1, c3[i] = (uint32_t)p0;
        }
    for (int i = 0; i < 16; i++)
        out[i] = c0[i], out[16 + i] = c1[i], out[32 + i] = c2[i], out[48 + i] = c3[i];
}

/* Word of one element; the plain definition. */
static inline uint32_t gradd_rng_word(uint64_t seed, uint64_t node, uint64_t element) {
    uint64_t counter = element / 64 * 16 + element % 16;
    uint32_t in[4] = {(uint32_t)counter, (uint32_t)(counter >> 32), (uint32_t)node,
                      (uint32_t)(node >> 32)};
    uint32_t out[4];
    gradd_philox(seed, in, out);
    return out[element / 16 % 4];
}

/* [0, 1) with 24 bits: exact in f32. */
static inline double gradd_rng_uniform(uint32_t word) {
    return (double)(word >> 8) * 0x1p-24;
}

#endif
