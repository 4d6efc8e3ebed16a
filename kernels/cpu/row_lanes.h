/* Sums along contiguous elements, in one order: so that a row has the same bits whatever vectors
 * the machine has and a compiler makes of a loop. For f32 and f64, and for bf16 and f16 in f32.
 *
 * The order: as many lanes as 128 bytes hold add whole blocks of as many elements. Then the upper
 * half of the lanes is added to the lower one; if that many elements or more are left, these are
 * added; and again, down to 32 bytes. The lanes that remain are added in halves, and to their sum
 * the last elements, one by one. Lanes vectorise and keep the rounding error of a long row small.
 *
 * Pure functions, any thread.
 */
#ifndef GRADD_KERNELS_CPU_ROW_LANES_H
#define GRADD_KERNELS_CPU_ROW_LANES_H

#include <stdint.h>
#include <string.h>

#include "kernels/describe/dispatch.h"
#include "kernels/math/bf16.h"
#include "kernels/math/f16.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

#define GRADD_INLINE static inline __attribute__((always_inline))

/* ---- lanes ----------------------------------------------------------------------------------- */

/* 32 bytes of lanes are one vector, or two on a machine whose registers are shorter. */
#define GRADD_LANE_BYTES   (GRADD_VECTOR_BYTES < 32 ? GRADD_VECTOR_BYTES : 32)
#define GRADD_LANE_VECTORS (32 / GRADD_LANE_BYTES)

typedef float gradd_lanes_f32_t
    __attribute__((vector_size(GRADD_LANE_BYTES), aligned(sizeof(float)), may_alias));
typedef double gradd_lanes_f64_t
    __attribute__((vector_size(GRADD_LANE_BYTES), aligned(sizeof(double)), may_alias));
typedef uint32_t gradd_lanes_u32_t __attribute__((vector_size(GRADD_LANE_BYTES)));
typedef uint16_t gradd_lanes_u16_t
    __attribute__((vector_size(GRADD_LANE_BYTES / 2), aligned(sizeof(uint16_t)), may_alias));

GRADD_INLINE gradd_lanes_f32_t gradd_lanes_at_f32(const float *x) {
    return *(const gradd_lanes_f32_t *)x;
}

GRADD_INLINE gradd_lanes_f64_t gradd_lanes_at_f64(const double *x) {
    return *(const gradd_lanes_f64_t *)x;
}

GRADD_INLINE gradd_lanes_u32_t gradd_lanes_at_u16(const void *x) {
#ifdef __AVX2__
    return (gradd_lanes_u32_t)_mm256_cvtepu16_epi32(_mm_loadu_si128(x));
#else
    return __builtin_convertvector(*(const gradd_lanes_u16_t *)x, gradd_lanes_u32_t);
#endif
}

GRADD_INLINE gradd_lanes_f32_t gradd_lanes_at_bf16(const gradd_bf16_t *x) {
    return (gradd_lanes_f32_t)(gradd_lanes_at_u16(x) << 16);
}

/* gradd_f16_f32 */
GRADD_INLINE gradd_lanes_f32_t gradd_lanes_at_f16(const gradd_f16_t *x) {
#ifdef __F16C__
    return (gradd_lanes_f32_t)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x));
#else
    const gradd_lanes_u32_t half = gradd_lanes_at_u16(x);
    const gradd_lanes_u32_t rest = half & 0x7fff, special = (gradd_lanes_u32_t)(rest >= 0x7c00);
    const gradd_lanes_f32_t number = (gradd_lanes_f32_t)(rest << 13) * 0x1p112f;
    return (gradd_lanes_f32_t)((gradd_lanes_u32_t)number | (special & (0x7f800000 | rest << 13)) |
                               (half & 0x8000) << 16);
#endif
}

GRADD_INLINE float gradd_lane_at_f32(const float *x) {
    return *x;
}

GRADD_INLINE double gradd_lane_at_f64(const double *x) {
    return *x;
}

GRADD_INLINE float gradd_lane_at_bf16(const gradd_bf16_t *x) {
    return gradd_bf16_f32(*x);
}

GRADD_INLINE float gradd_lane_at_f16(const gradd_f16_t *x) {
    return gradd_f16_f32(*x);
}

/* Of 32 bytes. */
GRADD_INLINE float gradd_add_lanes_f32(const void *lanes) {
    typedef float half_t __attribute__((vector_size(16)));
    half_t half[2];
    memcpy(half, lanes, sizeof half);
    half[0] += half[1];
    return (half[0][0] + half[0][2]) + (half[0][1] + half[0][3]);
}

GRADD_INLINE double gradd_add_lanes_f64(const void *lanes) {
    typedef double half_t __attribute__((vector_size(16)));
    half_t half[2];
    memcpy(half, lanes, sizeof half);
    half[0] += half[1];
    return half[0][0] + half[0][1];
}

/* ---- sums ------------------------------------------------------------------------------------ */

#define GRADD_LANES_ADD(to, S, i, TERM)                                                            \
    to[0] += TERM(gradd_lanes_at, S, i);                                                           \
    if (GRADD_LANE_VECTORS > 1)                                                                    \
    to[GRADD_LANE_VECTORS - 1] += TERM(gradd_lanes_at, S, (i) + step / GRADD_LANE_VECTORS)
#define GRADD_LANES_FOLD(to, upper)                                                                \
    to[0] += upper[0];                                                                             \
    if (GRADD_LANE_VECTORS > 1) to[GRADD_LANE_VECTORS - 1] += upper[GRADD_LANE_VECTORS - 1]

/* Defines a function `name parameters`, one of which is n, that returns the sum of n terms. The
 * elements are of type S (f32, f64, bf16 or f16) and the sum of R (f32 or f64), whose C type is T.
 * TERM(AT, S, i) is the term of element i, or the terms from i on that a vector has: an expression
 * in which AT##_##S(x + (i)) is what x has there. */
#define GRADD_ROW_SUM(name, parameters, S, R, T, TERM)                                             \
    static inline T name parameters {                                                              \
        enum { step = 32 / sizeof(T) };                                                            \
        int64_t i = 0;                                                                             \
        T sum = 0;                                                                                 \
        if (n >= step) {                                                                           \
            gradd_lanes_##R##_t a[GRADD_LANE_VECTORS] = {0};                                       \
            if (n >= 2 * step) {                                                                   \
                gradd_lanes_##R##_t b[GRADD_LANE_VECTORS] = {0};                                   \
                if (n >= 4 * step) {                                                               \
                    gradd_lanes_##R##_t c[GRADD_LANE_VECTORS] = {0}, d[GRADD_LANE_VECTORS] = {0};  \
                    for (; i <= n - 4 * step; i += 4 * step) {                                     \
                        GRADD_LANES_ADD(a, S, i, TERM);                                            \
                        GRADD_LANES_ADD(b, S, i + step, TERM);                                     \
                        GRADD_LANES_ADD(c, S, i + 2 * step, TERM);                                 \
                        GRADD_LANES_ADD(d, S, i + 3 * step, TERM);                                 \
                    }                                                                              \
                    GRADD_LANES_FOLD(a, c);                                                        \
                    GRADD_LANES_FOLD(b, d);                                                        \
                }                                                                                  \
                if (n & 2 * step) {                                                                \
                    GRADD_LANES_ADD(a, S, i, TERM);                                                \
                    GRADD_LANES_ADD(b, S, i + step, TERM);                                         \
                    i += 2 * step;                                                                 \
                }                                                                                  \
                GRADD_LANES_FOLD(a, b);                                                            \
            }                                                                                      \
            if (n & step) {                                                                        \
                GRADD_LANES_ADD(a, S, i, TERM);                                                    \
                i += step;                                                                         \
            }                                                                                      \
            sum = gradd_add_lanes_##R(a);                                                          \
        }                                                                                          \
        for (; i < n; i++)                                                                         \
            sum += TERM(gradd_lane_at, S, i);                                                      \
        return sum;                                                                                \
    }

/* gradd_row_sum: of x. gradd_row_squares: of (x - mean)^2. gradd_row_dot: of y (x - mean). */
#define GRADD_TERM(AT, S, i)        AT##_##S(x + (i))
#define GRADD_TERM_SQUARE(AT, S, i) ((AT##_##S(x + (i)) - mean) * (AT##_##S(x + (i)) - mean))
#define GRADD_TERM_DOT(AT, S, i)    (AT##_##S(y + (i)) * (AT##_##S(x + (i)) - mean))
#define GRADD_ROW_SUMS(C, S, R, T)                                                                 \
    GRADD_ROW_SUM(gradd_row_sum_##S, (const C *x, int64_t n), S, R, T, GRADD_TERM)                 \
    GRADD_ROW_SUM(gradd_row_squares_##S, (const C *x, T mean, int64_t n), S, R, T,                 \
                  GRADD_TERM_SQUARE)                                                               \
    GRADD_ROW_SUM(gradd_row_dot_##S, (const C *y, const C *x, T mean, int64_t n), S, R, T,         \
                  GRADD_TERM_DOT)
GRADD_ROW_SUMS(float, f32, f32, float)
GRADD_ROW_SUMS(double, f64, f64, double)
GRADD_ROW_SUMS(gradd_bf16_t, bf16, f32, float)
GRADD_ROW_SUMS(gradd_f16_t, f16, f32, float)

#endif
