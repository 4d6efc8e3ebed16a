/* The part of the device table beside operators: scans, fingerprints, and the optimizer's step.
 *
 * Each function gives its work to the stream of gpu_call; those with a result wait for it. Memory
 * is the device's, except where a result is written. gpu_call.scratch holds GPU_SCRATCH bytes.
 */
#ifndef GRADD_KERNELS_CUDA_STEP_H
#define GRADD_KERNELS_CUDA_STEP_H

#include "kernels/contract/backend.h"
#include "kernels/cuda/gpu.h"

enum { GPU_SCRATCH = 1 << 20 };

/* The device's: copies, and waits where the host reads. */
gradd_status_t gpu_write(void *to, const void *from, size_t bytes);
gradd_status_t gpu_read(void *to, const void *from, size_t bytes);

gradd_status_t gpu_find_nonfinite(const gradd_view_t *view, gradd_nonfinite_t *out);
gradd_status_t gpu_fingerprint(const gradd_bytes_t *list, int n, bool whole, uint64_t *out);
gradd_status_t gpu_touched(const gradd_span_t *span, int64_t width, uint64_t *bits);

/* The CPU's bits. */
gradd_status_t gpu_norm2(const gradd_span_t *list, int n, double *out);
gradd_status_t gpu_adam(const gradd_adam_t *hyper, float grad_scale, const gradd_adam_span_t *span);
gradd_status_t gpu_adam_commit(const gradd_adam_commit_t *commit);
/* Runs after all work before it; for readers in other processes. */
gradd_status_t gpu_store(uint64_t *word, uint64_t value);

#endif
