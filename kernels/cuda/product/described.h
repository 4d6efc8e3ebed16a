/* A product as cuBLASLt sees it: its matrices, their layout in memory, and the alignment of its
 * operands.
 *
 * cuBLASLt is column-major: C = A B, row by row, is its C^T = B^T A^T, so the sides change places.
 * Descriptions are values: code that sets a pointer in one works on its own copy.
 */
#ifndef GRADD_KERNELS_CUDA_PRODUCT_DESCRIBED_H
#define GRADD_KERNELS_CUDA_PRODUCT_DESCRIBED_H

#include <cublasLt.h>

#include "kernels/cuda/product.h"

/* A product without its outer batches. */
typedef struct gpu_lt_s {
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t a, b, c; /* the library's sides */
    gpu_after_t after;
} gpu_lt_t;

/* Bytes to which operands of the gradd_gemm_t are aligned, each a power of two; the bias as C. */
typedef struct gpu_align_s {
    uint32_t a, b, c;
} gpu_align_t;

/* An algorithm, for operands that are aligned like that. */
typedef struct gpu_choice_s {
    gpu_align_t align;
    cublasLtMatmulAlgo_t algo;
    size_t workspace;
} gpu_choice_t;

/* More than this no instruction asks for. */
enum { GPU_ALIGN = GPU_PRODUCT_ALIGN };

gradd_status_t gpu_lt_failed(cublasStatus_t status, const char *what);
#define GPU_LT(call, what)                                                                         \
    do {                                                                                           \
        const cublasStatus_t lt_status_ = (call);                                                  \
        if (lt_status_ != CUBLAS_STATUS_SUCCESS) return gpu_lt_failed(lt_status_, what);           \
    } while (0)

/* One for the process: it holds no work and any thread may use it. */
gradd_status_t gpu_lt_handle(cublasLtHandle_t *out);

/* Of a simplified product, with its last batch dimension. */
gradd_status_t gpu_lt_describe(const gradd_gemm_t *g, gpu_after_t after, gpu_lt_t *out);

/* One call of the library, on the stream of gpu_call. */
cublasStatus_t gpu_lt_multiply(const gradd_gemm_t *g, const gpu_lt_t *lt,
                               const gpu_choice_t *choice, const gpu_product_call_t *x);

/* The alignment that holds for every call where tensors begin at GPU_ALIGN, with steps along
 * `outer` batch dimensions; and the one that holds wherever they lie. */
gpu_align_t gpu_align_of_steps(const gradd_gemm_t *g, int outer);
gpu_align_t gpu_align_least(const gradd_gemm_t *g);

#endif
