/* IEEE half precision as a storage type, and its conversion from and to f32.
 *
 * 5 bits of exponent, 11 of precision; the largest number is 65504. Rounding is to nearest, ties to
 * even; larger numbers become infinity, NaN stays NaN, subnormals are kept. As bf16 it is
 * stored and moved: kernels widen to f32, compute and sum there, and round once when they store.
 */
#ifndef GRADD_KERNELS_MATH_F16_H
#define GRADD_KERNELS_MATH_F16_H

#include <stdint.h>
#include <string.h>

#include "kernels/math/host_device.h"

/* A struct, so that no arithmetic compiles by accident. */
typedef struct gradd_f16_s {
    uint16_t bits;
} gradd_f16_t;

/* 2^112 moves the exponent of a half to its place in an f32; infinities and NaN are put right. */
GRADD_HD float gradd_f16_f32(gradd_f16_t x) {
    const uint32_t sign = (uint32_t)(x.bits & 0x8000u) << 16, rest = (uint32_t)(x.bits & 0x7fffu);
    uint32_t bits = rest << 13;
    float y;
    memcpy(&y, &bits, sizeof y);
    y *= 0x1p112f;
    memcpy(&bits, &y, sizeof bits);
    if (rest >= 0x7c00u) bits = 0x7f800000u | rest << 13;
    bits |= sign;
    memcpy(&y, &bits, sizeof y);
    return y;
}

/* Numbers below 2^-14 are rounded by an addition that puts their last place where f32 has its. */
GRADD_HD gradd_f16_t gradd_f32_f16(float x) {
    uint32_t bits, half;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000u, a = bits & 0x7fffffffu;
    if (a > 0x7f800000u) {
        half = 0x7e00u;
    } else if (a >= 0x477ff000u) { /* 65520 and more round to infinity */
        half = 0x7c00u;
    } else if (a < 0x38800000u) {
        float y;
        memcpy(&y, &a, sizeof y);
        y += 0.5f;
        memcpy(&half, &y, sizeof half);
        half -= 0x3f000000u;
    } else {
        half = (a - 0x38000000u + 0xfffu + (a >> 13 & 1)) >> 13;
    }
    return (gradd_f16_t){(uint16_t)(sign | half)};
}

#endif
