/* See choose.h. */
#include "kernels/cuda/product/choose.h"

static gradd_status_t prefer(const gpu_choice_t *how, cublasLtMatmulPreferenceOpaque_t *out) {
    const uint64_t most = GPU_LT_WORKSPACE;
    const struct {
        cublasLtMatmulPreferenceAttributes_t of;
        uint32_t bytes;
    } aligned[] = {
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, how->align.b}, /* sides change places */
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, how->align.a},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, how->align.c},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, how->align.c},
    };
    GPU_LT(cublasLtMatmulPreferenceInit(out), "a preference");
    GPU_LT(cublasLtMatmulPreferenceSetAttribute(out, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                &most, sizeof most),
           "a limit of scratch memory");
    for (const auto &one : aligned)
        GPU_LT(cublasLtMatmulPreferenceSetAttribute(out, one.of, &one.bytes, sizeof one.bytes),
               "an alignment");
    return GRADD_OK;
}

gradd_status_t gpu_lt_choose(const gradd_gemm_t *g, gpu_lt_t *lt, gpu_choice_t *out) {
    cublasLtHandle_t handle;
    cublasLtMatmulPreferenceOpaque_t preference;
    cublasLtMatmulHeuristicResult_t found;
    int n = 0;
    GRADD_TRY(gpu_lt_handle(&handle));
    GRADD_TRY(prefer(out, &preference));
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        handle, &lt->desc, &lt->a, &lt->b, &lt->c, &lt->c, &preference, 1, &found, &n);
    if (status != CUBLAS_STATUS_SUCCESS || !n)
        return GRADD_FAIL(UNSUPPORTED,
                          "cuBLASLt has no product of %s [%lld, %lld] and [%lld, %lld]",
                          gradd_dtype_name(g->dtype), (long long)g->m, (long long)g->k,
                          (long long)g->k, (long long)g->n);
    out->algo = found.algo;
    out->workspace = found.workspaceSize;
    return GRADD_OK;
}
