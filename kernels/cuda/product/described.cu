/* See described.h. */
#include "kernels/cuda/product/described.h"

gradd_status_t gpu_lt_failed(cublasStatus_t status, const char *what) {
    return GRADD_FAIL(DEVICE, "cuBLASLt: %s: %s (%d)", what, cublasLtGetStatusString(status),
                      (int)status);
}

gradd_status_t gpu_lt_handle(cublasLtHandle_t *out) {
    static cublasLtHandle_t made;
    if (!made) GPU_LT(cublasLtCreate(&made), "no handle");
    *out = made;
    return GRADD_OK;
}

static cudaDataType_t type_of(gradd_dtype_t dtype) {
    switch (dtype) {
    case GRADD_DT_BF16:
        return CUDA_R_16BF;
    case GRADD_DT_F16:
        return CUDA_R_16F;
    case GRADD_DT_F64:
        return CUDA_R_64F;
    default:
        return CUDA_R_32F;
    }
}

/* ---- matrices -------------------------------------------------------------------------------- */

/* A matrix in memory: `rows` runs of `cols` elements that lie side by side, `ld` apart. */
typedef struct stored_s {
    gradd_dtype_t dtype;
    int64_t rows, cols, ld, stride;
} stored_t;

static gradd_status_t describe(const stored_t *s, int64_t count,
                               cublasLtMatrixLayoutOpaque_t *out) {
    const int32_t n = (int32_t)count;
    GPU_LT(cublasLtMatrixLayoutInit(out, type_of(s->dtype), (uint64_t)s->cols, (uint64_t)s->rows,
                                    s->ld),
           "a matrix's layout");
    if (count == 1) return GRADD_OK;
    GPU_LT(cublasLtMatrixLayoutSetAttribute(out, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &n, sizeof n),
           "a batch");
    GPU_LT(cublasLtMatrixLayoutSetAttribute(out, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                            &s->stride, sizeof s->stride),
           "a batch's stride");
    return GRADD_OK;
}

/* Distance of two neighbours along the axis that is not contiguous: at least what it spans. */
static int64_t leading(int64_t step, int64_t span) {
    return step > span ? step : span > 0 ? span : 1;
}

static gradd_status_t describe_matrices(const gradd_gemm_t *g, gpu_lt_t *out) {
    const int last = g->batch_rank - 1;
    const int64_t n = last >= 0 ? g->batch[last] : 1;
    const bool turned_a = g->a_k != 1, turned_b = g->b_n != 1;
    const stored_t a = {g->dtype, turned_a ? g->k : g->m, turned_a ? g->m : g->k,
                        turned_a ? leading(g->a_k, g->m) : leading(g->a_m, g->k),
                        last >= 0 ? g->a_batch[last] : 0};
    const stored_t b = {g->dtype, turned_b ? g->n : g->k, turned_b ? g->k : g->n,
                        turned_b ? leading(g->b_n, g->k) : leading(g->b_k, g->n),
                        last >= 0 ? g->b_batch[last] : 0};
    const stored_t c = {gradd_gemm_result(g), g->m, g->n, g->n, g->m * g->n};
    GRADD_TRY(describe(&b, n, &out->a));
    GRADD_TRY(describe(&a, n, &out->b));
    return describe(&c, n, &out->c);
}

/* ---- the product ----------------------------------------------------------------------------- */

static gradd_status_t describe_bias(const gradd_gemm_t *g, gpu_lt_t *out) {
    const cudaDataType_t type = type_of(g->dtype);
    GPU_LT(cublasLtMatmulDescSetAttribute(&out->desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type,
                                          sizeof type),
           "a bias's type");
    return GRADD_OK;
}

static cublasLtEpilogue_t epilogue_of(const gradd_gemm_t *g, gpu_after_t after) {
    if (after == GPU_AFTER_GELU)
        return g->has_bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    if (after == GPU_AFTER_GELU_KEPT)
        return g->has_bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    return g->has_bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

/* The kept operand has the layout of the result. */
static gradd_status_t describe_after(const gradd_gemm_t *g, gpu_lt_t *out) {
    const cublasLtEpilogue_t epilogue = epilogue_of(g, out->after);
    GPU_LT(cublasLtMatmulDescSetAttribute(&out->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
                                          sizeof epilogue),
           "what follows a product");
    if (out->after == GPU_AFTER_GELU_KEPT)
        GPU_LT(cublasLtMatmulDescSetAttribute(&out->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD,
                                              &g->n, sizeof g->n),
               "a second result");
    return GRADD_OK;
}

gradd_status_t gpu_lt_describe(const gradd_gemm_t *g, gpu_after_t after, gpu_lt_t *out) {
    const bool wide = g->dtype == GRADD_DT_F64;
    const cublasOperation_t op_a = g->b_n == 1 ? CUBLAS_OP_N : CUBLAS_OP_T;
    const cublasOperation_t op_b = g->a_k == 1 ? CUBLAS_OP_N : CUBLAS_OP_T;
    GPU_LT(cublasLtMatmulDescInit(&out->desc, wide ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                                  wide ? CUDA_R_64F : CUDA_R_32F),
           "a product's description");
    GPU_LT(
        cublasLtMatmulDescSetAttribute(&out->desc, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a),
        "a transposition");
    GPU_LT(
        cublasLtMatmulDescSetAttribute(&out->desc, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b),
        "a transposition");
    out->after = after;
    if (g->has_bias) GRADD_TRY(describe_bias(g, out));
    GRADD_TRY(describe_after(g, out));
    return describe_matrices(g, out);
}

static cublasStatus_t set_pointers(const gradd_gemm_t *g, const gpu_product_call_t *x,
                                   gpu_lt_t *lt) {
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    if (g->has_bias)
        status = cublasLtMatmulDescSetAttribute(&lt->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                                &x->bias, sizeof x->bias);
    if (status == CUBLAS_STATUS_SUCCESS && lt->after == GPU_AFTER_GELU_KEPT)
        status = cublasLtMatmulDescSetAttribute(
            &lt->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &x->kept, sizeof x->kept);
    return status;
}

/* Pointers of the call go to a copy: others may multiply by the same description meanwhile. */
cublasStatus_t gpu_lt_multiply(const gradd_gemm_t *g, const gpu_lt_t *lt,
                               const gpu_choice_t *choice, const gpu_product_call_t *x) {
    cublasLtHandle_t handle = NULL;
    gpu_lt_t mine = *lt;
    const float alpha = (float)g->alpha, beta = g->accumulate;
    const double alpha64 = g->alpha, beta64 = g->accumulate;
    const bool wide = g->dtype == GRADD_DT_F64;
    if (gpu_lt_handle(&handle)) return CUBLAS_STATUS_ALLOC_FAILED;
    const cublasStatus_t status = set_pointers(g, x, &mine);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    return cublasLtMatmul(handle, &mine.desc, wide ? (const void *)&alpha64 : &alpha, x->b, &mine.a,
                          x->a, &mine.b, wide ? (const void *)&beta64 : &beta, x->c, &mine.c, x->c,
                          &mine.c, &choice->algo, x->workspace, choice->workspace,
                          (cudaStream_t)gpu_call.stream);
}

/* ---- alignment ------------------------------------------------------------------------------- */

/* The part of `align` that remains after steps of so many bytes. */
static uint32_t after_step(uint32_t align, int64_t bytes) {
    while (bytes % align)
        align /= 2;
    return align;
}

gpu_align_t gpu_align_of_steps(const gradd_gemm_t *g, int outer) {
    const int64_t size = (int64_t)gradd_dtype_bytes(g->dtype);
    const int64_t inner = outer ? g->batch[outer] : 1;
    gpu_align_t align = {GPU_ALIGN, GPU_ALIGN, GPU_ALIGN};
    for (int i = 0; i < outer; i++) {
        align.a = after_step(align.a, g->a_batch[i] * size);
        align.b = after_step(align.b, g->b_batch[i] * size);
    }
    if (outer)
        align.c = after_step(align.c, g->m * g->n * inner *
                                          (int64_t)gradd_dtype_bytes(gradd_gemm_result(g)));
    return align;
}

gpu_align_t gpu_align_least(const gradd_gemm_t *g) {
    const uint32_t size = (uint32_t)gradd_dtype_bytes(g->dtype);
    return {size, size, size};
}
