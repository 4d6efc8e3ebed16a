/* Formulas of fingerprints, the same on every device. See cpu/fingerprint.h. */
#ifndef GRADD_KERNELS_MATH_FINGERPRINT_FORMULAS_H
#define GRADD_KERNELS_MATH_FINGERPRINT_FORMULAS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/math/host_device.h"

enum {
    GRADD_PRINT_LINE = 64, /* bytes of a cache line */
    GRADD_PRINT_WORDS = GRADD_PRINT_LINE / 8,
    GRADD_PRINT_PIECE = 1 << 16, /* bytes that are summed under one key */
    GRADD_PRINT_LINES = 16,      /* lines that are drawn of a tensor; a smaller one is read whole */
};
#define GRADD_PRINT_STEP UINT64_C(0x9e3779b97f4a7c15) /* from a line's key to the next one's */

GRADD_HD uint64_t gradd_print_mix(uint64_t x) {
    x ^= x >> 32;
    x *= UINT64_C(0xd6e8feb86659fd93);
    x ^= x >> 29;
    x *= UINT64_C(0x9fb21c651e98df25);
    return x ^ x >> 32;
}

GRADD_HD uint64_t gradd_print_join(uint64_t a, uint64_t b) {
    return gradd_print_mix(a * UINT64_C(0x9e3779b97f4a7c15) + gradd_print_mix(b));
}

/* Of the bytes of one line, or of a part of one. */
GRADD_HD uint64_t gradd_print_line(const unsigned char *p, size_t bytes) {
    uint64_t h = bytes;
    for (int i = 0; i < GRADD_PRINT_WORDS; i++) {
        uint64_t word = 0;
        if (bytes == GRADD_PRINT_LINE)
            memcpy(&word, p + 8 * i, sizeof word);
        else
            for (size_t k = 0; k < 8 && 8 * (size_t)i + k < bytes; k++)
                word |= (uint64_t)p[8 * (size_t)i + k] << 8 * k;
        h = (h ^ word) * UINT64_C(0xff51afd7ed558ccd) + (h >> 31);
    }
    return h;
}

/* Which line is the k-th that is drawn of tensor `which` with so many: one from each of as many
 * equal parts, so never the same twice. */
GRADD_HD uint64_t gradd_print_place(uint64_t lines, uint64_t k, uint64_t which) {
    const uint64_t n = lines < GRADD_PRINT_LINES ? lines : GRADD_PRINT_LINES;
    const uint64_t first = lines * k / n, last = lines * (k + 1) / n;
    return first + gradd_print_mix(which * GRADD_PRINT_LINES + k) % (last - first);
}

#endif
