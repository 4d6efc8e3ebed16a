/* Floats of 16 bits on the CPU, bf16 and f16 alike: blocks and single elements from and to f32, by
 * a type that is known at run time. Pure functions, any thread.
 */
#ifndef GRADD_KERNELS_CPU_HALF_H
#define GRADD_KERNELS_CPU_HALF_H

#include "kernels/cpu/bf16.h"
#include "kernels/math/f16.h"
#include "shm/dtype.h"

/* Whole blocks; x and y do not overlap. */
void gradd_f16_widen(float *restrict y, const gradd_f16_t *restrict x, int64_t n);
void gradd_f16_narrow(gradd_f16_t *restrict y, const float *restrict x, int64_t n);

static inline void gradd_half_widen(float *restrict y, const void *restrict x, gradd_dtype_t dtype,
                                    int64_t n) {
    if (dtype == GRADD_DT_F16)
        gradd_f16_widen(y, (const gradd_f16_t *)x, n);
    else
        gradd_bf16_widen(y, (const gradd_bf16_t *)x, n);
}

static inline void gradd_half_narrow(void *restrict y, const float *restrict x, gradd_dtype_t dtype,
                                     int64_t n) {
    if (dtype == GRADD_DT_F16)
        gradd_f16_narrow((gradd_f16_t *)y, x, n);
    else
        gradd_bf16_narrow((gradd_bf16_t *)y, x, n);
}

static inline float gradd_half_f32(const void *x, gradd_dtype_t dtype) {
    return dtype == GRADD_DT_F16 ? gradd_f16_f32(*(const gradd_f16_t *)x)
                                 : gradd_bf16_f32(*(const gradd_bf16_t *)x);
}

static inline void gradd_half_put(void *to, gradd_dtype_t dtype, float x) {
    if (dtype == GRADD_DT_F16)
        *(gradd_f16_t *)to = gradd_f32_f16(x);
    else
        *(gradd_bf16_t *)to = gradd_f32_bf16(x);
}

#endif
