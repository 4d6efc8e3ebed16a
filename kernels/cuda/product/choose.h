/* Which algorithm of cuBLASLt a product takes. */
#ifndef GRADD_KERNELS_CUDA_PRODUCT_CHOOSE_H
#define GRADD_KERNELS_CUDA_PRODUCT_CHOOSE_H

#include "kernels/cuda/product/described.h"

enum { GPU_LT_WORKSPACE = 32 << 20 }; /* what the library may use at most */

/* An algorithm, for operands that are aligned like that. */
typedef struct gpu_choice_s {
    gpu_align_t align;
    cublasLtMatmulAlgo_t algo;
    size_t workspace;
} gpu_choice_t;

/* For a product that is described; out->align is set by the caller. */
gradd_status_t gpu_lt_choose(const gradd_gemm_t *g, gpu_lt_t *lt, gpu_choice_t *out);

#endif
