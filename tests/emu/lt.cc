/* The stand-in for cuBLASLt: matrices lie column by column. See cublasLt.h. */
#include "cublasLt.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/math/bf16.h"
#include "kernels/math/f16.h"
#include "tests/emu/lt.h"
#include "tests/sim/sim.h"

enum { SCRATCH = 4096, WIDEST = 16, MAGIC = 0x1e57 };
enum { ADDS = 4, BENDS = 32, KEEPS = 128 }; /* parts of an epilogue */

struct emu_lt_handle {
    int unused;
};

/* The contents of the opaque values. */
typedef struct desc_s {
    cublasComputeType_t compute;
    cudaDataType_t scale, bias_type;
    cublasOperation_t op_a, op_b;
    cublasLtEpilogue_t epilogue;
    const void *bias;
    void *aux;
    int64_t aux_ld;
} desc_t;
typedef struct lt_layout_s {
    cudaDataType_t type;
    int32_t count;
    int64_t rows, cols, ld, stride;
} lt_layout_t;
typedef struct preference_s {
    size_t bytes;
    uint32_t align[4]; /* of A, B, C, D */
} preference_t;
typedef struct algo_s {
    uint32_t magic, variant;
    uint32_t align[4];
} algo_t;

template <class T, class Opaque> static T opened(const Opaque *from) {
    T to;
    static_assert(sizeof to <= sizeof *from, "it holds the value");
    memcpy(&to, from, sizeof to);
    return to;
}

template <class T, class Opaque> static cublasStatus_t closed(Opaque *to, const T &from) {
    static_assert(sizeof from <= sizeof *to, "it holds the value");
    memset(to, 0, sizeof *to);
    memcpy(to, &from, sizeof from);
    return CUBLAS_STATUS_SUCCESS;
}

static emu_lt_t state = {.version = 0, .fastest = -1};

emu_lt_t *emu_lt(void) {
    return &state;
}

/* The time that an algorithm took, for the driver. */
static float elapsed(void) {
    return state.fastest < 0 ? -1 : state.last == state.fastest ? 1 : 1.5f;
}

__attribute__((constructor)) static void tell_times(void) {
    sim_settings()->elapsed = elapsed;
}

size_t cublasLtGetVersion(void) {
    return emu_lt()->version;
}

const char *cublasLtGetStatusString(cublasStatus_t status) {
    static const char *const names[] = {"success", "invalid value", "not supported", "no memory"};
    return names[status];
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *out) {
    static emu_lt_handle only;
    *out = &only;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescInit(cublasLtMatmulDesc_t desc, cublasComputeType_t compute,
                                      cudaDataType_t scale) {
    return closed(desc, desc_t{compute, scale, scale, CUBLAS_OP_N, CUBLAS_OP_N,
                               CUBLASLT_EPILOGUE_DEFAULT, nullptr, nullptr, 0});
}

template <class T> static cublasStatus_t set(T *to, const void *value, size_t bytes) {
    if (bytes != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(to, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t set_desc(desc_t *d, cublasLtMatmulDescAttributes_t attribute,
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
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
        return set(&d->aux, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
        return set(&d->aux_ld, value, bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes) {
    desc_t d = opened<desc_t>(desc);
    const cublasStatus_t status = set_desc(&d, attribute, value, bytes);
    return status ? status : closed(desc, d);
}

cublasStatus_t cublasLtMatrixLayoutInit(cublasLtMatrixLayout_t layout, cudaDataType_t type,
                                        uint64_t rows, uint64_t cols, int64_t ld) {
    if (!rows || !cols || ld < (int64_t)rows) return CUBLAS_STATUS_INVALID_VALUE;
    return closed(layout, lt_layout_t{type, 1, (int64_t)rows, (int64_t)cols, ld, 0});
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void *value, size_t bytes) {
    lt_layout_t l = opened<lt_layout_t>(layout);
    const cublasStatus_t status = attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT
                                      ? set(&l.count, value, bytes)
                                      : set(&l.stride, value, bytes);
    return status ? status : closed(layout, l);
}

cublasStatus_t cublasLtMatmulPreferenceInit(cublasLtMatmulPreference_t preference) {
    return closed(preference, preference_t{
                                  0, {256, 256, 256, 256}
    });
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void *value, size_t bytes) {
    preference_t p = opened<preference_t>(preference);
    const int operand = attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES;
    const cublasStatus_t status =
        operand < 0 ? set(&p.bytes, value, bytes) : set(&p.align[operand], value, bytes);
    return status ? status : closed(preference, p);
}

/* ---- what fits together ------------------------------------------------------------------------
 */

static bool half(cudaDataType_t type) {
    return type == CUDA_R_16F || type == CUDA_R_16BF;
}

static cublasStatus_t check(const desc_t *d, const lt_layout_t *a, const lt_layout_t *b,
                            const lt_layout_t *c) {
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
    if (d->epilogue & ADDS && d->bias_type != a->type) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (d->epilogue & KEEPS && (d->aux_ld % 8 || d->aux_ld < m || c->count > 1))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (d->epilogue & BENDS && wide) return CUBLAS_STATUS_NOT_SUPPORTED;
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t check(cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                            cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c) {
    const desc_t d = opened<desc_t>(desc);
    const lt_layout_t la = opened<lt_layout_t>(a), lb = opened<lt_layout_t>(b),
                      lc = opened<lt_layout_t>(c);
    return check(&d, &la, &lb, &lc);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t *out, int *out_n) {
    (void)handle;
    const cublasStatus_t status = check(desc, a, b, c);
    const preference_t p = opened<preference_t>(preference);
    emu_lt()->proposals++;
    *out_n = 0;
    if (status || c != d || wanted < 1 || p.bytes < SCRATCH) return status;
    for (uint32_t k = 0; k < EMU_LT_ALGORITHMS && *out_n < wanted; k++) {
        cublasLtMatmulHeuristicResult_t *to = &out[(*out_n)++];
        *to = {{}, SCRATCH, CUBLAS_STATUS_SUCCESS, 1};
        closed(&to->algo, algo_t{
                              MAGIC, k, {p.align[0], p.align[1], p.align[2], p.align[3]}
        });
    }
    return CUBLAS_STATUS_SUCCESS;
}

static bool known(const algo_t *algo) {
    return algo->magic == MAGIC && algo->variant < EMU_LT_ALGORITHMS;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                       cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t *algo,
                                       cublasLtMatmulHeuristicResult_t *out) {
    (void)handle;
    const algo_t wanted = opened<algo_t>(algo);
    const cublasStatus_t status = check(desc, a, b, c);
    emu_lt()->checks++;
    if (status || c != d || !known(&wanted)) return CUBLAS_STATUS_INVALID_VALUE;
    if (emu_lt()->refuses_kept && emu_lt()->refuses_kept--) return CUBLAS_STATUS_NOT_SUPPORTED;
    *out = {{}, SCRATCH, CUBLAS_STATUS_SUCCESS, 1};
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

/* A product with all that is known of it. */
typedef struct lt_product_s {
    desc_t d;
    lt_layout_t a, b, c;
    algo_t algo;
    const void *at_a, *at_b, *at_c;
    void *at_d;
    double alpha, beta;
} lt_product_t;

/* Sums of f32 in f32, some beside each other, as a GPU's are: how many is the algorithm's own. */
template <class A>
static double dot(const lt_product_t *p, int64_t row, int64_t col, int64_t batch) {
    static const int beside[EMU_LT_ALGORITHMS] = {4, 1, 2, 8};
    const bool ta = p->d.op_a == CUBLAS_OP_T, tb = p->d.op_b == CUBLAS_OP_T;
    const int64_t k = ta ? p->a.rows : p->a.cols, n = beside[p->algo.variant];
    A sum[8] = {};
    for (int64_t i = 0; i < k; i++) {
        const int64_t in_a = batch * p->a.stride + (ta ? i + row * p->a.ld : row + i * p->a.ld);
        const int64_t in_b = batch * p->b.stride + (tb ? col + i * p->b.ld : i + col * p->b.ld);
        sum[i % n] += (A)read(p->at_a, p->a.type, in_a) * (A)read(p->at_b, p->b.type, in_b);
    }
    for (int64_t step = 1; step < n; step *= 2) /* (0 + 1) + (2 + 3) */
        for (int64_t i = 0; i + step < n; i += 2 * step)
            sum[i] += sum[i + step];
    return (double)sum[0];
}

/* A pointer that is less aligned than was promised when the algorithm was chosen. */
static bool misaligned(const lt_product_t *p) {
    const void *const at[4] = {p->at_a, p->at_b, p->at_c, p->at_d};
    for (int i = 0; i < 4; i++) {
        const uint32_t wanted = emu_lt()->wants ? emu_lt()->wants : p->algo.align[i];
        if ((uintptr_t)at[i] % wanted == 0) continue;
        fprintf(stderr, "cuBLASLt's stand-in: %c lies at %p, which was to be aligned to %u\n",
                "ABCD"[i], at[i], wanted);
        return true;
    }
    return false;
}

/* Bias, what is kept, and gelu by tanh, of an element that is not rounded yet. */
static double finished(const lt_product_t *p, int64_t row, int64_t col, double x) {
    if (p->d.epilogue & ADDS) x += read(p->d.bias, p->d.bias_type, row);
    if (p->d.epilogue & KEEPS) write(p->d.aux, p->c.type, row + col * p->d.aux_ld, x);
    if (p->d.epilogue & BENDS)
        x = 0.5 * x * (1 + tanh(0.79788456080286536 * (x + 0.044715 * x * x * x)));
    return x;
}

static void multiply(const lt_product_t *p) {
    const bool wide = p->d.compute == CUBLAS_COMPUTE_64F;
    for (int32_t batch = 0; batch < p->c.count; batch++)
        for (int64_t col = 0; col < p->c.cols; col++)
            for (int64_t row = 0; row < p->c.rows; row++) {
                const int64_t to = batch * p->c.stride + row + col * p->c.ld;
                double x = wide ? dot<double>(p, row, col, batch) : dot<float>(p, row, col, batch);
                x *= p->alpha;
                if (p->beta != 0) x += p->beta * read(p->at_c, p->c.type, to);
                x = finished(p, row, col, x);
                write(p->at_d, p->c.type, to, x);
            }
}

typedef struct lt_turn_s {
    lt_product_t product;
    void *workspace;
} lt_turn_t;

static void multiply_in_turn(void *argument) {
    lt_turn_t *turn = (lt_turn_t *)argument;
    if (!sim_kernel_fails()) {
        memset(turn->workspace, 0x5a, SCRATCH);
        multiply(&turn->product);
    }
    free(turn);
}

static double number(const desc_t *d, const void *p) {
    return d->scale == CUDA_R_64F ? *(const double *)p : *(const float *)p;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t layout_a, const void *b,
                              cublasLtMatrixLayout_t layout_b, const void *beta, const void *c,
                              cublasLtMatrixLayout_t layout_c, void *d,
                              cublasLtMatrixLayout_t layout_d, const cublasLtMatmulAlgo_t *algo,
                              void *workspace, size_t bytes, cudaStream_t stream) {
    (void)handle;
    const cublasStatus_t status = check(desc, layout_a, layout_b, layout_c);
    const desc_t how = opened<desc_t>(desc);
    const lt_product_t p = {how,
                            opened<lt_layout_t>(layout_a),
                            opened<lt_layout_t>(layout_b),
                            opened<lt_layout_t>(layout_c),
                            opened<algo_t>(algo),
                            a,
                            b,
                            c,
                            d,
                            number(&how, alpha),
                            number(&how, beta)};
    if (status) return status;
    if (layout_c != layout_d || c != d || !known(&p.algo) || bytes < SCRATCH || !workspace ||
        (uintptr_t)workspace % 256 || misaligned(&p))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (how.epilogue & ADDS && !how.bias) return CUBLAS_STATUS_INVALID_VALUE;
    if (how.epilogue & KEEPS && (!how.aux || (uintptr_t)how.aux % WIDEST))
        return CUBLAS_STATUS_INVALID_VALUE;
    lt_turn_t *turn = (lt_turn_t *)malloc(sizeof *turn);
    if (!turn) return CUBLAS_STATUS_ALLOC_FAILED;
    *turn = {p, workspace};
    sim_give(stream, multiply_in_turn, turn);
    emu_lt()->products++;
    emu_lt()->last = (int)p.algo.variant;
    emu_lt()->last_align = (int)p.algo.align[0];
    return CUBLAS_STATUS_SUCCESS;
}
