/* Matrix products by cuBLASLt, and by loops for the few that it lacks.
 *
 * cuBLASLt is column-major: C = A B, row by row, is its C^T = B^T A^T. A bias and the previous
 * contents of C are added within the product. bf16 and f16 are summed in f32 and rounded once; f32
 * is multiplied in f32 (no TF32), as in torch. Batches that have no single stride are several
 * calls.
 */
#ifndef GRADD_KERNELS_CUDA_PRODUCT_H
#define GRADD_KERNELS_CUDA_PRODUCT_H

#include "kernels/cuda/gpu.h"
#include "kernels/describe/gemm.h"

/* The library's operation after a product, on elements that are not rounded yet: gelu by tanh,
 * perhaps with the operand of the gelu as a second result. */
typedef enum gpu_after_e { GPU_AFTER_NOTHING, GPU_AFTER_GELU, GPU_AFTER_GELU_KEPT } gpu_after_t;

gradd_status_t gpu_product_prepare(const gradd_gemm_t *g, gradd_prepared_t *out);
/* UNSUPPORTED: the library does not have it for that product. */
gradd_status_t gpu_product_prepare_after(const gradd_gemm_t *g, gpu_after_t after,
                                         gradd_prepared_t *out);
void gpu_product_unprepare(gradd_prepared_t *prepared);

enum { GPU_PRODUCT_ALIGN = 16 };

/* Operands of one call. */
typedef struct gpu_product_call_s {
    const void *a, *b, *bias;
    void *c, *workspace;
    void *kept; /* of GPU_AFTER_GELU_KEPT, aligned to GPU_PRODUCT_ALIGN */
} gpu_product_call_t;
gradd_status_t gpu_product(const void *state, const gpu_product_call_t *call);

/* "cuBLASLt 13.1.0". */
const char *gpu_product_library(void);

#endif
