/* bf16 and f16 from and to f32 by the GPU's own instructions, with the CPU's bits (kernels/math).
 *
 * By the PTX manual they round to nearest, ties to even; subnormals are kept without .ftz; numbers
 * that are too large become infinity. The formulas do the same. Any NaN becomes the GPU's own,
 * 0x7fff, so NaN is corrected here. Elsewhere the formulas stand in for the instructions, and give
 * that NaN, too. `probe half` (tools/gpu) compares all of it on a GPU.
 */
#ifndef GRADD_KERNELS_CUDA_HALF_H
#define GRADD_KERNELS_CUDA_HALF_H

#include "kernels/math/bf16.h"
#include "kernels/math/f16.h"

/* ---- the instructions ---- */

#ifdef __CUDA_ARCH__
GRADD_HD float gpu_cvt_f32_f16(uint16_t x) {
    float y;
    asm("cvt.f32.f16 %0,%1;" : "=f"(y) : "h"(x));
    return y;
}
/* In pairs with a zero: ptxas gives single ones to a slower unit (F2F). */
GRADD_HD uint16_t gpu_cvt_f16_f32(float x) {
    uint32_t y;
    asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(y) : "f"(0.0f), "f"(x));
    return (uint16_t)y;
}
GRADD_HD uint16_t gpu_cvt_bf16_f32(float x) {
    uint32_t y;
    asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(y) : "f"(0.0f), "f"(x));
    return (uint16_t)y;
}
#else
GRADD_HD float gpu_cvt_f32_f16(uint16_t x) {
    const uint32_t nan = 0x7fffffffu;
    float y = gradd_f16_f32((gradd_f16_t){x});
    if (y != y) memcpy(&y, &nan, sizeof y);
    return y;
}
GRADD_HD uint16_t gpu_cvt_f16_f32(float x) {
    return x != x ? (uint16_t)0x7fffu : gradd_f32_f16(x).bits;
}
GRADD_HD uint16_t gpu_cvt_bf16_f32(float x) {
    return x != x ? (uint16_t)0x7fffu : gradd_f32_bf16(x).bits;
}
#endif

/* ---- with the CPU's NaN ---- */

/* All bits of a NaN's exponent are ones, so the sign, extended, puts itself and most of them. */
GRADD_HD float gpu_f16_f32(gradd_f16_t x) {
    const uint32_t nan = (uint32_t)(int32_t)(int16_t)x.bits << 13 | 0x70000000u;
    float y = gpu_cvt_f32_f16(x.bits);
    if (y != y) memcpy(&y, &nan, sizeof y);
    return y;
}

GRADD_HD gradd_f16_t gpu_f32_f16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint16_t nan = (uint16_t)((bits >> 16 & 0x8000u) | 0x7e00u), y = gpu_cvt_f16_f32(x);
    return gradd_f16_t{x != x ? nan : y};
}

GRADD_HD gradd_bf16_t gpu_f32_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint16_t nan = (uint16_t)(bits >> 16 | 0x40u), y = gpu_cvt_bf16_f32(x);
    return gradd_bf16_t{x != x ? nan : y};
}

#endif
