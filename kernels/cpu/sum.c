/* Sums of tensors of one shape. See sum.h. A block of the result stays in the L1 cache while every
 * operand is added to it. */
#include "kernels/cpu/sum.h"

#include <string.h>

#include "kernels/cpu/half.h"
#include "kernels/describe/dispatch.h"

enum { BLOCK = 1024 };

bool gradd_sum_fits(const gradd_view_t *out, const gradd_view_t *in, int n_in) {
    gradd_dtype_t dtype = out->type.dtype;
    if (dtype != GRADD_DT_F32 && !gradd_dtype_is_half(dtype)) return false;
    for (int i = 0; i < n_in; i++)
        if (!gradd_type_equal(&in[i].type, &out->type)) return false;
    return true;
}

GRADD_MULTIARCH static void add_f32(float *restrict sum, const float *restrict x, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        sum[i] += x[i];
}

#define ADD_HALF(name, T, READ)                                                                    \
    GRADD_MULTIARCH static void name(float *restrict sum, const T *restrict x, int64_t n) {        \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) sum[i] += READ(x[i]);                  \
    }
ADD_HALF(add_bf16, gradd_bf16_t, gradd_bf16_f32)
ADD_HALF(add_f16, gradd_f16_t, gradd_f16_f32)

static void sum_block(const gradd_view_t *out, const gradd_view_t *in, int n_in, int64_t from,
                      int64_t n) {
    float sum[BLOCK] __attribute__((aligned(64)));
    const gradd_dtype_t dtype = out->type.dtype;
    const bool narrow = gradd_dtype_is_half(dtype);
    if (narrow)
        gradd_half_widen(sum, (const uint16_t *)in[0].data + from, dtype, n);
    else
        memcpy(sum, (const float *)in[0].data + from, sizeof sum[0] * (size_t)n);
    for (int k = 1; k < n_in; k++) {
        if (dtype == GRADD_DT_F16)
            add_f16(sum, (const gradd_f16_t *)in[k].data + from, n);
        else if (narrow)
            add_bf16(sum, (const gradd_bf16_t *)in[k].data + from, n);
        else
            add_f32(sum, (const float *)in[k].data + from, n);
    }
    if (narrow)
        gradd_half_narrow((uint16_t *)out->data + from, sum, dtype, n);
    else
        memcpy((float *)out->data + from, sum, sizeof sum[0] * (size_t)n);
}

gradd_status_t gradd_sum(const gradd_view_t *out, const gradd_view_t *in, int n_in) {
    int64_t n = gradd_type_count(&out->type), blocks = (n + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) if (n >= GRADD_PARALLEL_MIN)
    for (int64_t b = 0; b < blocks; b++)
        sum_block(out, in, n_in, b * BLOCK, n - b * BLOCK < BLOCK ? n - b * BLOCK : BLOCK);
    return GRADD_OK;
}
