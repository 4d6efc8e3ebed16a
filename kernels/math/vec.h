/* exp, expm1, log, log1p, tanh, erf, sin, cos for f32 in a form that compilers vectorise.
 *
 * No calls, no branches, no tables: select and fused multiply-add only, so a loop under
 * `#pragma omp simd` runs them on whole vectors, and a scalar tail gives the same bits. Errors
 * against libm are below 3 units in the last place over the whole range
 * (tests/c/kernels/test_vec.c); infinities and NaN behave as in libm. Polynomials are our own
 * minimax fits (Lawson iteration on Chebyshev nodes, weighted by the relative error of the result).
 *
 * GRADD_VEC_SINCOS_MAX: beyond it gradd_vsinf and gradd_vcosf lose accuracy, use sinf and cosf.
 */
#ifndef GRADD_KERNELS_MATH_VEC_H
#define GRADD_KERNELS_MATH_VEC_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels/math/host_device.h"

#define GRADD_VEC_SINCOS_MAX 1.0e6f

GRADD_HD float gradd_bits_f32(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

GRADD_HD uint32_t gradd_f32_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* WebAssembly has no fused multiply-add, and that of its C library is a call of many operations.
 * In f64 the product is exact, and rounding the sum twice differs from once about one time in 2^28.
 */
#ifdef __wasm__
#define GRADD_FMA(a, b, c) ((float)((double)(a) * (double)(b) + (double)(c)))
#else
#define GRADD_FMA(a, b, c) fmaf((a), (b), (c))
#endif

/* 2^n for n in -126..127 */
GRADD_HD float gradd_exp2i(int32_t n) {
    return gradd_bits_f32((uint32_t)(n + 127) << 23);
}

/* exp(x) = 2^n exp(r), |r| <= ln2/2. Adding 1.5 * 2^23 rounds to an integer and leaves it in the
 * low bits; two factors of 2^(n/2) reach the subnormal and the overflowing end. */
GRADD_HD float gradd_vexpf(float x) {
    x = x > 89.0f ? 89.0f : x;
    x = x < -104.0f ? -104.0f : x;
    const float t = GRADD_FMA(x, 1.44269504f, 12582912.0f);
    const int32_t n = (int32_t)(gradd_f32_bits(t) - 0x4b400000u);
    const float nf = t - 12582912.0f;
    float r = GRADD_FMA(nf, -0.693145752f, x);
    r = GRADD_FMA(nf, -1.42860677e-6f, r);
    float p = GRADD_FMA(0.00139517174f, r, 0.00836959854f);
    p = GRADD_FMA(p, r, 0.0416661873f);
    p = GRADD_FMA(p, r, 0.166665122f);
    p = GRADD_FMA(p, r, 0.5f);
    p = GRADD_FMA(p, r * r, r) + 1.0f;
    const int32_t half = n >> 1;
    return p * gradd_exp2i(half) * gradd_exp2i(n - half);
}

/* log(x) = e ln2 + log(m), m in [1/sqrt2, sqrt2) */
GRADD_HD float gradd_vlogf(float x) {
    const float scaled = x < 1.17549435e-38f ? x * 8388608.0f : x;
    const float bias = x < 1.17549435e-38f ? -23.0f : 0.0f;
    const uint32_t bits = gradd_f32_bits(scaled) - 0x3f3504f3u;
    const float e = (float)((int32_t)bits >> 23) + bias;
    const float f = gradd_bits_f32((bits & 0x7fffffu) + 0x3f3504f3u) - 1.0f;
    float p = GRADD_FMA(0.0691536814f, f, -0.117898077f);
    p = GRADD_FMA(p, f, 0.118729763f);
    p = GRADD_FMA(p, f, -0.123843484f);
    p = GRADD_FMA(p, f, 0.142186582f);
    p = GRADD_FMA(p, f, -0.16669251f);
    p = GRADD_FMA(p, f, 0.200022265f);
    p = GRADD_FMA(p, f, -0.249999866f);
    p = GRADD_FMA(p, f, 0.333333105f);
    const float f2 = f * f;
    float y = GRADD_FMA(f2 * f, p, e * -2.12194440e-4f);
    y = GRADD_FMA(-0.5f, f2, y);
    y = GRADD_FMA(e, 0.693359375f, f + y);
    y = x == 0.0f ? -INFINITY : y;
    y = x < 0.0f ? NAN : y;
    return x == INFINITY || x != x ? x : y;
}

/* log(1 + u) for u >= 0: the logarithm of the rounded sum, corrected by what rounding lost */
GRADD_HD float gradd_vlog1pf(float u) {
    const float s = 1.0f + u;
    const float y = gradd_vlogf(s) + (u - (s - 1.0f)) / s;
    return u == INFINITY ? u : y;
}

/* log(1 + u) for any u. */
GRADD_HD float gradd_vlog1p_anyf(float u) {
    return u == -1.0f ? -INFINITY : gradd_vlog1pf(u);
}

/* exp(x) - 1 = 2^n (exp(r) - 1) + (2^n - 1), n and r as in gradd_vexpf: no digit of a small x is
 * lost. Where 2^n could overflow before the product, 1 is nothing. */
GRADD_HD float gradd_vexpm1f(float x) {
    const float a = x > 88.0f ? 88.0f : x < -104.0f ? -104.0f : x;
    const float t = GRADD_FMA(a, 1.44269504f, 12582912.0f);
    const int32_t n = (int32_t)(gradd_f32_bits(t) - 0x4b400000u);
    const float nf = t - 12582912.0f;
    float r = GRADD_FMA(nf, -0.693145752f, a);
    r = GRADD_FMA(nf, -1.42860677e-6f, r);
    float p = GRADD_FMA(0.00139517174f, r, 0.00836959854f);
    p = GRADD_FMA(p, r, 0.0416661873f);
    p = GRADD_FMA(p, r, 0.166665122f);
    p = GRADD_FMA(p, r, 0.5f);
    p = GRADD_FMA(p, r * r, r);
    const int32_t half = n >> 1;
    const float scale = gradd_exp2i(half) * gradd_exp2i(n - half);
    const float y = GRADD_FMA(p, scale, scale - 1.0f);
    return x > 88.0f ? gradd_vexpf(x) : x == 0.0f ? x : y;
}

GRADD_HD float gradd_vtanhf(float x) {
    const float a = fabsf(x), s = x * x;
    float p = GRADD_FMA(-0.00571703678f, s, 0.0206505787f);
    p = GRADD_FMA(p, s, -0.0537434965f);
    p = GRADD_FMA(p, s, 0.133314908f);
    p = GRADD_FMA(p, s, -0.333332837f);
    const float small = GRADD_FMA(p * s, x, x);
    const float large = 1.0f - 2.0f / (gradd_vexpf(2.0f * a) + 1.0f);
    return copysignf(a < 0.625f ? small : large, x);
}

GRADD_HD float gradd_verff(float x) {
    const float a = fabsf(x), s = x * x;
    float p = GRADD_FMA(8.34522507e-05f, s, -0.00081374374f);
    p = GRADD_FMA(p, s, 0.00520063424f);
    p = GRADD_FMA(p, s, -0.0268592704f);
    p = GRADD_FMA(p, s, 0.112836942f);
    p = GRADD_FMA(p, s, -0.376126349f);
    p = GRADD_FMA(p, s, 0.128379166f);
    const float small = GRADD_FMA(p, x, x);
    const float t = a > 4.0f ? 4.0f : a; /* erf(4) rounds to 1 */
    float q = GRADD_FMA(1.12314656e-05f, t, -0.000322805397f);
    q = GRADD_FMA(q, t, 0.00364246499f);
    q = GRADD_FMA(q, t, -0.0237620752f);
    q = GRADD_FMA(q, t, 0.10623689f);
    q = GRADD_FMA(q, t, 0.635151327f);
    q = GRADD_FMA(q, t, 1.12864852f);
    const float large = 1.0f - gradd_vexpf(-q * t);
    return copysignf(a < 0.93f ? small : large, x);
}

/* Quadrant and remainder of x by pi/2, in double so that no digit is lost up to 1e6. */
GRADD_HD float gradd_reduce_pi2(float x, uint32_t *quadrant) {
    const double magic = 6755399441055744.0; /* 1.5 * 2^52 */
    const double t = (double)x * 0.63661977236758134 + magic, n = t - magic;
    uint64_t bits;
    memcpy(&bits, &t, sizeof bits);
    *quadrant = (uint32_t)bits;
    return (float)(((double)x - n * 1.5707963267341256) - n * 6.0771005065061922e-11);
}

GRADD_HD float gradd_sincos_poly(float r, uint32_t quadrant) {
    const float s = r * r;
    float p = GRADD_FMA(2.71793988e-06f, s, -0.000198392954f);
    p = GRADD_FMA(p, s, 0.00833332911f);
    p = GRADD_FMA(p, s, -0.166666672f);
    const float sine = GRADD_FMA(p * s, r, r);
    float q = GRADD_FMA(-2.72067865e-07f, s, 2.47994794e-05f);
    q = GRADD_FMA(q, s, -0.00138888834f);
    q = GRADD_FMA(q, s, 0.0416666679f);
    const float cosine = GRADD_FMA(q, s * s, GRADD_FMA(-0.5f, s, 1.0f));
    const float y = quadrant & 1 ? cosine : sine;
    return gradd_bits_f32(gradd_f32_bits(y) ^ ((quadrant & 2) << 30));
}

GRADD_HD float gradd_vsinf(float x) {
    uint32_t quadrant;
    const float r = gradd_reduce_pi2(x, &quadrant);
    return gradd_sincos_poly(r, quadrant);
}

GRADD_HD float gradd_vcosf(float x) {
    uint32_t quadrant;
    const float r = gradd_reduce_pi2(x, &quadrant);
    return gradd_sincos_poly(r, quadrant + 1);
}

#endif
