/* The choice of a product's cuBLASLt algorithm: the first that it proposes or, for products that
 * are worth it, the fastest of several, measured here (kept.h). */
#ifndef GRADD_KERNELS_CUDA_PRODUCT_CHOOSE_H
#define GRADD_KERNELS_CUDA_PRODUCT_CHOOSE_H

#include "kernels/cuda/product/described.h"

/* For a product that is described and out->align; `measured`: it may be. */
gradd_status_t gpu_lt_choose(const gradd_gemm_t *g, const gpu_lt_t *lt, bool measured,
                             gpu_choice_t *out);

#endif
