/* The head of a language model with its loss on a GPU, in chunks of rows. See
 * kernels/describe/head.h.
 *
 * How many rows count only the GPU knows, so all go through the products. What does not count is
 * zero there, on both sides, and has the gradient zero, whatever x and W hold. Plans gather rows
 * with labels before (live rows); this is for what is left.
 */
#ifndef GRADD_KERNELS_CUDA_ROW_HEAD_H
#define GRADD_KERNELS_CUDA_ROW_HEAD_H

#include "kernels/cuda/gpu.h"

/* By the rates of an H100: 700 TFLOP/s in bf16 and 4 TB/s. The block stays in its L2 cache. Where
 * all is emulated a block has little, to see several. */
#define GPU_HEAD_ROWS 4096
#ifdef __CUDACC__
#define GPU_HEAD_BLOCK ((int64_t)16 << 20)
#else
#define GPU_HEAD_BLOCK ((int64_t)1 << 20)
#endif

gradd_status_t gpu_head_prepare(const gradd_infer_t *c, gradd_prepared_t *out);
void gpu_head_unprepare(gradd_prepared_t *prepared);
gradd_status_t gpu_head(const gradd_launch_t *r);

#endif
