/* SHA-256 as FIPS 180-4 writes it: 64-byte blocks, 64 rounds, big-endian words.
 *
 * The constants are the fractional parts of the square and cube roots of the first primes, so they
 * are facts of the standard. Speed (a few hundred MB/s) is enough: a graph is hashed once.
 */
#include "shm/sha256.h"

#include <string.h>

static const uint32_t round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotr(uint32_t x, int n) {
    return x >> n | x << (32 - n);
}

static void compress(uint32_t state[8], const uint8_t *block) {
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 |
               (uint32_t)block[4 * i + 2] << 8 | block[4 * i + 3];
    for (int i = 16; i < 64; i++) {
        uint32_t s0 = rotr(w[i - 15], 7) ^ rotr(w[i - 15], 18) ^ w[i - 15] >> 3;
        uint32_t s1 = rotr(w[i - 2], 17) ^ rotr(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    memcpy(s, state, sizeof s);
    for (int i = 0; i < 64; i++) {
        uint32_t e = s[4], a = s[0];
        uint32_t choose = (e & s[5]) ^ (~e & s[6]);
        uint32_t majority = (a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]);
        uint32_t t1 =
            s[7] + (rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25)) + choose + round_constants[i] + w[i];
        uint32_t t2 = (rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22)) + majority;
        memmove(s + 1, s, 7 * sizeof *s);
        s[4] += t1;
        s[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++)
        state[i] += s[i];
}

void gradd_sha256_init(gradd_sha256_t *hash) {
    static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(hash->state, start, sizeof start);
    hash->bytes = 0;
}

void gradd_sha256_update(gradd_sha256_t *hash, const void *data, size_t bytes) {
    const uint8_t *p = data;
    size_t have = hash->bytes % 64;
    if (bytes == 0) return;
    hash->bytes += bytes;
    if (have + bytes < 64) {
        memcpy(hash->block + have, p, bytes);
        return;
    }
    if (have > 0) {
        memcpy(hash->block + have, p, 64 - have);
        compress(hash->state, hash->block);
        p += 64 - have;
        bytes -= 64 - have;
    }
    for (; bytes >= 64; p += 64, bytes -= 64)
        compress(hash->state, p);
    if (bytes > 0) memcpy(hash->block, p, bytes);
}

void gradd_sha256_final(gradd_sha256_t *hash, uint8_t out_digest[GRADD_SHA256_BYTES]) {
    static const uint8_t pad[64] = {0x80};
    uint8_t length[8];
    uint64_t bits = hash->bytes * 8;
    size_t have = hash->bytes % 64;
    for (int i = 0; i < 8; i++)
        length[i] = (uint8_t)(bits >> (56 - 8 * i));
    gradd_sha256_update(hash, pad, have < 56 ? 56 - have : 120 - have);
    gradd_sha256_update(hash, length, sizeof length);
    for (int i = 0; i < 8; i++)
        for (int k = 0; k < 4; k++)
            out_digest[4 * i + k] = (uint8_t)(hash->state[i] >> (24 - 8 * k));
}
