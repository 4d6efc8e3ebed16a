/* See product.h. */
#include "kernels/cuda/product.h"

#include <cublasLt.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/cuda/map.h"

enum { WORKSPACE = 32 << 20 }; /* what the library may use at most */

/* A product that is ready. `outer` batches are calls of their own. */
typedef struct product_s {
    gradd_gemm_t g;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algo;
    size_t workspace;
    int outer;    /* batch dimensions that calls go through */
    bool library; /* cuBLASLt multiplies; else loops do, or nothing is multiplied */
} product_t;

static gradd_status_t failed(cublasStatus_t status, const char *what) {
    return GRADD_FAIL(DEVICE, "cuBLASLt: %s: %s (%d)", what, cublasLtGetStatusString(status),
                      (int)status);
}
#define LT(call, what)                                                                             \
    do {                                                                                           \
        const cublasStatus_t lt_status_ = (call);                                                  \
        if (lt_status_ != CUBLAS_STATUS_SUCCESS) return failed(lt_status_, what);                  \
    } while (0)

/* One for the process: it holds no work and any thread may use it. */
static gradd_status_t handle(cublasLtHandle_t *out) {
    static cublasLtHandle_t made;
    if (!made) LT(cublasLtCreate(&made), "no handle");
    *out = made;
    return GRADD_OK;
}

const char *gpu_product_library(void) {
    static char text[40];
    const size_t v = cublasLtGetVersion();
    snprintf(text, sizeof text, "cuBLASLt %zu.%zu.%zu", v / 10000, v / 100 % 100, v % 100);
    return text;
}

/* ---- descriptions ---------------------------------------------------------------------------- */

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

/* A matrix in memory: `rows` runs of `cols` elements that lie side by side, `ld` apart. */
typedef struct stored_s {
    gradd_dtype_t dtype;
    int64_t rows, cols, ld, stride;
} stored_t;

static gradd_status_t describe(const stored_t *s, int64_t count, cublasLtMatrixLayout_t *out) {
    const int32_t n = (int32_t)count;
    LT(cublasLtMatrixLayoutCreate(out, type_of(s->dtype), (uint64_t)s->cols, (uint64_t)s->rows,
                                  s->ld),
       "a matrix's layout");
    if (count == 1) return GRADD_OK;
    LT(cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &n, sizeof n),
       "a batch");
    LT(cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                        &s->stride, sizeof s->stride),
       "a batch's stride");
    return GRADD_OK;
}

/* Distance of two neighbours along the axis that is not contiguous: at least what it spans. */
static int64_t leading(int64_t step, int64_t span) {
    return step > span ? step : span > 0 ? span : 1;
}

static gradd_status_t describe_matrices(product_t *p) {
    const gradd_gemm_t *g = &p->g;
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
    GRADD_TRY(describe(&b, n, &p->a)); /* the sides change places */
    GRADD_TRY(describe(&a, n, &p->b));
    return describe(&c, n, &p->c);
}

static gradd_status_t describe_product(product_t *p) {
    const gradd_gemm_t *g = &p->g;
    const bool wide = g->dtype == GRADD_DT_F64;
    const cublasOperation_t op_a = g->b_n == 1 ? CUBLAS_OP_N : CUBLAS_OP_T;
    const cublasOperation_t op_b = g->a_k == 1 ? CUBLAS_OP_N : CUBLAS_OP_T;
    LT(cublasLtMatmulDescCreate(&p->desc, wide ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                                wide ? CUDA_R_64F : CUDA_R_32F),
       "a product's description");
    LT(cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a),
       "a transposition");
    LT(cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b),
       "a transposition");
    if (!g->has_bias) return GRADD_OK;
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    const cudaDataType_t type = type_of(g->dtype);
    LT(cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
                                      sizeof epilogue),
       "a bias");
    LT(cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type,
                                      sizeof type),
       "a bias's type");
    return GRADD_OK;
}

/* The first of what the library proposes. */
static gradd_status_t choose(product_t *p) {
    cublasLtHandle_t lt;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t found;
    const size_t most = WORKSPACE;
    const gradd_gemm_t *g = &p->g;
    int n = 0;
    GRADD_TRY(handle(&lt));
    LT(cublasLtMatmulPreferenceCreate(&preference), "a preference");
    LT(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                            &most, sizeof most),
       "a limit of scratch memory");
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(lt, p->desc, p->a, p->b, p->c,
                                                                 p->c, preference, 1, &found, &n);
    cublasLtMatmulPreferenceDestroy(preference);
    if (status != CUBLAS_STATUS_SUCCESS || !n)
        return GRADD_FAIL(UNSUPPORTED,
                          "cuBLASLt has no product of %s [%lld, %lld] and [%lld, %lld]",
                          gradd_dtype_name(g->dtype), (long long)g->m, (long long)g->k,
                          (long long)g->k, (long long)g->n);
    p->algo = found.algo;
    p->workspace = found.workspaceSize;
    return GRADD_OK;
}

static bool is_empty(const gradd_gemm_t *g) {
    return !g->m || !g->n || !gradd_gemm_batches(g);
}

void gpu_product_unprepare(gradd_prepared_t *prepared) {
    product_t *p = (product_t *)prepared->state;
    if (!p) return;
    if (p->desc) cublasLtMatmulDescDestroy(p->desc);
    if (p->a) cublasLtMatrixLayoutDestroy(p->a);
    if (p->b) cublasLtMatrixLayoutDestroy(p->b);
    if (p->c) cublasLtMatrixLayoutDestroy(p->c);
    free(p);
    prepared->state = NULL;
}

gradd_status_t gpu_product_prepare(const gradd_gemm_t *g, gradd_prepared_t *out) {
    product_t *p = (product_t *)calloc(1, sizeof *p);
    if (!p) return GRADD_FAIL(NOMEM, "no memory for a product");
    *out = gradd_prepared_t{0, p, sizeof *p};
    p->g = *g;
    gradd_gemm_simplify(&p->g);
    p->outer = p->g.batch_rank > 1 ? p->g.batch_rank - 1 : 0;
    p->library = gradd_dtype_is_float(g->dtype) && p->g.k && !is_empty(&p->g);
    if (!p->library) return GRADD_OK;
    gradd_status_t status = describe_product(p);
    if (!status) status = describe_matrices(p);
    if (!status) status = choose(p);
    out->workspace = p->workspace;
    if (status) gpu_product_unprepare(out);
    return status;
}

/* ---- without the library: integers, and sums of nothing ----------------------------------------
 */

typedef struct plain_s {
    gradd_gemm_t g;
    int64_t n;
} plain_t;

template <class T, class R>
__global__ void GPU_BLOCK(256)
    plain_product(plain_t p, R *c, const T *a, const T *b, const T *bias) {
    const gradd_gemm_t &g = p.g;
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < p.n; i += all) {
        const int64_t col = i % g.n, row = i / g.n % g.m;
        int64_t at_a, at_b;
        gradd_gemm_offsets(&g, i / g.n / g.m, &at_a, &at_b);
        at_a += row * g.a_m;
        at_b += col * g.b_n;
        gpu_real<T> sum = 0;
        for (int64_t k = 0; k < g.k; k++)
            sum += gpu_get(a[at_a + k * g.a_k]) * gpu_get(b[at_b + k * g.b_k]);
        if (g.has_bias) sum += gpu_get(bias[col]);
        if (g.accumulate) sum += gpu_get(c[i]);
        gpu_put(&c[i], sum);
    }
}

template <class T, class R> gradd_status_t plain(const product_t *p, const gpu_product_call_t *x) {
    const plain_t how = {p->g, gradd_gemm_batches(&p->g) * p->g.m * p->g.n};
    GPU_LAUNCH((plain_product<T, R>), gpu_blocks(how.n, 256), 256, how, (R *)x->c, (const T *)x->a,
               (const T *)x->b, (const T *)x->bias);
    return gpu_launched("a product");
}

static gradd_status_t multiply_plainly(const product_t *p, const gpu_product_call_t *x) {
    if (is_empty(&p->g)) return GRADD_OK;
    return gpu_switch(gpu_numbers(), p->g.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        if (gradd_gemm_result(&p->g) == p->g.dtype) return plain<T, T>(p, x);
        if constexpr (sizeof(T) == 2) return plain<T, float>(p, x);
        return GRADD_FAIL(UNSUPPORTED, "a product of %s with a result of %s",
                          gradd_dtype_name(p->g.dtype), gradd_dtype_name(p->g.result));
    });
}

/* ---- by the library ---------------------------------------------------------------------------
 */

static gradd_status_t multiply(const product_t *p, const gpu_product_call_t *x) {
    cublasLtHandle_t lt;
    const float alpha = (float)p->g.alpha, beta = p->g.accumulate;
    const double alpha64 = p->g.alpha, beta64 = p->g.accumulate;
    const bool wide = p->g.dtype == GRADD_DT_F64;
    GRADD_TRY(handle(&lt));
    if (p->g.has_bias)
        LT(cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &x->bias,
                                          sizeof x->bias),
           "a bias");
    LT(cublasLtMatmul(lt, p->desc, wide ? (const void *)&alpha64 : &alpha, x->b, p->a, x->a, p->b,
                      wide ? (const void *)&beta64 : &beta, x->c, p->c, x->c, p->c, &p->algo,
                      x->workspace, p->workspace, (cudaStream_t)gpu_call.stream),
       "a product");
    return GRADD_OK;
}

/* One call for each index of the outer batch dimensions. */
static gradd_status_t multiply_batches(const product_t *p, const gpu_product_call_t *x) {
    const gradd_gemm_t *g = &p->g;
    const int64_t size = (int64_t)gradd_dtype_bytes(g->dtype);
    gradd_gemm_t outer = *g;
    outer.batch_rank = p->outer;
    const int64_t inner = p->outer ? g->batch[p->outer] : 1, total = gradd_gemm_batches(g) / inner;
    const int64_t bytes_c = g->m * g->n * inner * (int64_t)gradd_dtype_bytes(gradd_gemm_result(g));
    for (int64_t i = 0; i < total; i++) {
        gpu_product_call_t one = *x;
        int64_t at_a, at_b;
        gradd_gemm_offsets(&outer, i, &at_a, &at_b);
        one.a = (const char *)x->a + at_a * size;
        one.b = (const char *)x->b + at_b * size;
        one.c = (char *)x->c + i * bytes_c;
        GRADD_TRY(multiply(p, &one));
    }
    return GRADD_OK;
}

gradd_status_t gpu_product(const void *state, const gpu_product_call_t *call) {
    const product_t *p = (const product_t *)state;
    if (!p->library) return multiply_plainly(p, call);
    return p->outer ? multiply_batches(p, call) : multiply(p, call);
}
