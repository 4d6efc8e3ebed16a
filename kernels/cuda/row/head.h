/* The head of a language model with its loss on a GPU, in chunks of rows. See
 * kernels/describe/head.h.
 *
 * Only the GPU knows how many rows count, so all rows go through the products. Rows that do not
 * count are zero there, on both sides, and have a gradient of zero, whatever x and W hold. Plans
 * gather labelled rows beforehand (live rows); this handles the rest.
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
