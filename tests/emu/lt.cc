/* The stand-in for cuBLASLt: matrices lie column by column. See cublasLt.h. */
#include "cublasLt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/math/bf16.h"
#include "kernels/math/f16.h"

enum {
    SCRATCH = 4096,
    MAGIC = 0x1e57
}; /* bytes that a product is said to need; of its algorithm */

struct emu_lt_handle {
    int unused;
};
struct emu_lt_desc {
    cublasComputeType_t compute;
    cudaDataType_t scale, bias_type;
    cublasOperation_t op_a, op_b;
    cublasLtEpilogue_t epilogue;
    const void *bias;
};
struct emu_lt_layout {
    cudaDataType_t type;
    int64_t rows, cols, ld, stride;
    int32_t count;
};
struct emu_lt_preference {
    size_t bytes;
};

size_t cublasLtGetVersion(void) {
    return 0;
}

const char *cublasLtGetStatusString(cublasStatus_t status) {
    static const char *const names[] = {"success", "invalid value", "not supported", "no memory"};
    return names[status];
}

template <class T> static cublasStatus_t made(T **out, const T &value) {
    *out = (T *)malloc(sizeof(T));
    if (!*out) return CUBLAS_STATUS_ALLOC_FAILED;
    **out = value;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *out) {
    static emu_lt_handle only;
    *out = &only;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *out, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
    const emu_lt_desc d = {
        compute, scale, scale, CUBLAS_OP_N, CUBLAS_OP_N, CUBLASLT_EPILOGUE_DEFAULT, nullptr};
    return made(out, d);
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
    free(desc);
    return CUBLAS_STATUS_SUCCESS;
}

template <class T> static cublasStatus_t set(T *to, const void *value, size_t bytes) {
    if (bytes != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(to, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes) {
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
        return set(&d->op_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB:
        return set(&d->op_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
        return set(&d->epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
        return set(&d->bias, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
        return set(&d->bias_type, value, bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *out, cudaDataType_t type,
                                          uint64_t rows, uint64_t cols, int64_t ld) {
    const emu_lt_layout l = {type, (int64_t)rows, (int64_t)cols, ld, 0, 1};
    if (!rows || !cols || ld < (int64_t)rows) return CUBLAS_STATUS_INVALID_VALUE;
    return made(out, l);
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    free(layout);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void *value, size_t bytes) {
    if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) return set(&l->count, value, bytes);
    return set(&l->stride, value, bytes);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *out) {
    return made(out, emu_lt_preference{0});
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    free(preference);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void *value, size_t bytes) {
    (void)attribute;
    return set(&preference->bytes, value, bytes);
}

/* ---- what fits together ------------------------------------------------------------------------
 */

static bool half(cudaDataType_t type) {
    return type == CUDA_R_16F || type == CUDA_R_16BF;
}

static cublasStatus_t check(const emu_lt_desc *d, const emu_lt_layout *a, const emu_lt_layout *b,
                            const emu_lt_layout *c) {
    const bool ta = d->op_a == CUBLAS_OP_T, tb = d->op_b == CUBLAS_OP_T;
    const int64_t m = ta ? a->cols : a->rows, k = ta ? a->rows : a->cols;
    const int64_t l = tb ? b->cols : b->rows, n = tb ? b->rows : b->cols;
    const bool wide = a->type == CUDA_R_64F;
    if (m != c->rows || n != c->cols || k != l) return CUBLAS_STATUS_INVALID_VALUE;
    if (a->count != c->count || b->count != c->count) return CUBLAS_STATUS_INVALID_VALUE;
    if (c->count > 1 && c->stride < c->ld * (c->cols - 1) + c->rows)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (a->type != b->type || (c->type != a->type && !(half(a->type) && c->type == CUDA_R_32F)))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (wide != (d->compute == CUBLAS_COMPUTE_64F) || wide != (d->scale == CUDA_R_64F))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (d->epilogue == CUBLASLT_EPILOGUE_BIAS && d->bias_type != a->type)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t *out, int *out_n) {
    (void)handle;
    const cublasStatus_t status = check(desc, a, b, c);
    *out_n = 0;
    if (status || c != d || wanted < 1 || preference->bytes < SCRATCH) return status;
    *out = {{{MAGIC}}, SCRATCH, CUBLAS_STATUS_SUCCESS, 1};
    *out_n = 1;
    return CUBLAS_STATUS_SUCCESS;
}

/* ---- the product -------------------------------------------------------------------------------
 */

static double read(const void *p, cudaDataType_t type, int64_t at) {
    switch (type) {
    case CUDA_R_64F:
        return ((const double *)p)[at];
    case CUDA_R_16F:
        return gradd_f16_f32(((const gradd_f16_t *)p)[at]);
    case CUDA_R_16BF:
        return gradd_bf16_f32(((const gradd_bf16_t *)p)[at]);
    default:
        return ((const float *)p)[at];
    }
}

static void write(void *p, cudaDataType_t type, int64_t at, double x) {
    switch (type) {
    case CUDA_R_64F:
        ((double *)p)[at] = x;
        break;
    case CUDA_R_16F:
        ((gradd_f16_t *)p)[at] = gradd_f32_f16((float)x);
        break;
    case CUDA_R_16BF:
        ((gradd_bf16_t *)p)[at] = gradd_f32_bf16((float)x);
        break;
    default:
        ((float *)p)[at] = (float)x;
    }
}

/* Sums of f32 in f32, four beside each other, as a GPU's are: the order is the library's own. */
template <class A>
static double dot(const emu_lt_desc *d, const void *a, const emu_lt_layout *la, const void *b,
                  const emu_lt_layout *lb, const int64_t at[3]) {
    const bool ta = d->op_a == CUBLAS_OP_T, tb = d->op_b == CUBLAS_OP_T;
    const int64_t row = at[0], col = at[1], batch = at[2], k = ta ? la->rows : la->cols;
    A sum[4] = {0, 0, 0, 0};
    for (int64_t i = 0; i < k; i++) {
        const int64_t in_a = batch * la->stride + (ta ? i + row * la->ld : row + i * la->ld);
        const int64_t in_b = batch * lb->stride + (tb ? col + i * lb->ld : i + col * lb->ld);
        sum[i % 4] += (A)read(a, la->type, in_a) * (A)read(b, lb->type, in_b);
    }
    return (double)((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t layout_a, const void *b,
                              cublasLtMatrixLayout_t layout_b, const void *beta, const void *c,
                              cublasLtMatrixLayout_t layout_c, void *d,
                              cublasLtMatrixLayout_t layout_d, const cublasLtMatmulAlgo_t *algo,
                              void *workspace, size_t bytes, cudaStream_t stream) {
    (void)handle, (void)stream;
    const cublasStatus_t status = check(desc, layout_a, layout_b, layout_c);
    const bool wide = desc->compute == CUBLAS_COMPUTE_64F,
               adds = desc->epilogue == CUBLASLT_EPILOGUE_BIAS;
    const double by = wide ? *(const double *)alpha : *(const float *)alpha;
    const double keep = wide ? *(const double *)beta : *(const float *)beta;
    if (status) return status;
    if (layout_c != layout_d || c != d || algo->data[0] != MAGIC || bytes < SCRATCH || !workspace)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (adds && !desc->bias) return CUBLAS_STATUS_INVALID_VALUE;
    memset(workspace, 0x5a, SCRATCH);
    for (int32_t batch = 0; batch < layout_d->count; batch++)
        for (int64_t col = 0; col < layout_d->cols; col++)
            for (int64_t row = 0; row < layout_d->rows; row++) {
                const int64_t at[3] = {row, col, batch};
                const int64_t to = batch * layout_d->stride + row + col * layout_d->ld;
                double x = wide ? dot<double>(desc, a, layout_a, b, layout_b, at)
                                : dot<float>(desc, a, layout_a, b, layout_b, at);
                x *= by;
                if (keep != 0) x += keep * read(c, layout_c->type, to);
                if (adds) x += read(desc->bias, desc->bias_type, row);
                write(d, layout_d->type, to, x);
            }
    return CUBLAS_STATUS_SUCCESS;
}
