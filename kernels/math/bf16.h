/* bfloat16: the storage type, and its conversion from and to f32.
 *
 * A bf16 number is the upper half of an f32: 8 bits of exponent, 8 of precision. It is stored and
 * moved, never calculated with: kernels widen to f32, compute and sum there, and round once when
 * they store. Products of matrices are the exception, where the processor has them. Rounding is to
 * nearest, ties to even; NaN stays NaN, overflow becomes infinity, subnormals are kept. The
 * functions have neither branches nor calls and vectorise inside `#pragma omp simd` loops.
 *
 * A kernel that does not read bf16 says so in the `types` of its row (GRADD_T_F32_F64, op.h) and
 * gets casts around it when the graph is built.
 */
#ifndef GRADD_KERNELS_MATH_BF16_H
#define GRADD_KERNELS_MATH_BF16_H

#include <stdint.h>
#include <string.h>

#include "kernels/math/host_device.h"

/* A struct, so that no arithmetic compiles by accident. */
typedef struct gradd_bf16_s {
    uint16_t bits;
} gradd_bf16_t;

GRADD_HD float gradd_bf16_f32(gradd_bf16_t x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

/* Adds half of the last place kept, or a little less where that place is even already. */
GRADD_HD gradd_bf16_t gradd_f32_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    const uint32_t nan = bits >> 16 | 0x40u; /* quiet: rounding could make an infinity of it */
    return (gradd_bf16_t){(uint16_t)(x != x ? nan : rounded)};
}

#endif
