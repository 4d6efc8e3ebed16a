/* Block conversions between bf16 and f32. See bf16.h. Pure functions, any thread. */
#include "kernels/cpu/bf16.h"

#include "kernels/describe/dispatch.h"

GRADD_MULTIARCH void gradd_bf16_widen(float *restrict y, const gradd_bf16_t *restrict x,
                                      int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        y[i] = gradd_bf16_f32(x[i]);
}

GRADD_MULTIARCH void gradd_bf16_narrow(gradd_bf16_t *restrict y, const float *restrict x,
                                       int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        y[i] = gradd_f32_bf16(x[i]);
}
