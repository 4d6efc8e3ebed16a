/* Block conversions between f16 and f32. See half.h. */
#include "kernels/cpu/half.h"

#include "kernels/describe/dispatch.h"

GRADD_MULTIARCH void gradd_f16_widen(float *restrict y, const gradd_f16_t *restrict x, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        y[i] = gradd_f16_f32(x[i]);
}

GRADD_MULTIARCH void gradd_f16_narrow(gradd_f16_t *restrict y, const float *restrict x, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        y[i] = gradd_f32_f16(x[i]);
}
