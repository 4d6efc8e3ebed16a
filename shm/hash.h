/* Hashes of 64 bits that serve tables and compare what one party wrote: FNV-1a over bytes, and a
 * step that stirs in one word. Chains of calls begin with GRADD_HASH_START.
 *
 * Bytes hash alike on every machine and in every version: step journals hold such values. Inputs
 * can be crafted to collide; where that matters, use sha256.h.
 */
#ifndef GRADD_SHM_HASH_H
#define GRADD_SHM_HASH_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GRADD_HASH_START UINT64_C(0xcbf29ce484222325)

static inline uint64_t gradd_hash_bytes(uint64_t hash, const void *bytes, size_t n) {
    for (size_t i = 0; i < n; i++)
        hash = (hash ^ ((const uint8_t *)bytes)[i]) * UINT64_C(0x100000001b3);
    return hash;
}

static inline uint64_t gradd_hash_word(uint64_t hash, uint64_t word) {
    hash ^= word + UINT64_C(0x9e3779b97f4a7c15) + (hash << 6) + (hash >> 2);
    return hash * UINT64_C(0xff51afd7ed558ccd);
}

#ifdef __cplusplus
}
#endif
#endif
