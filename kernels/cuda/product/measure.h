/* The device functions that measuring needs: a stream of its own with memory, and times. The
 * plug-in's device (kernels/cuda/plugin/device.cu) and tests/emu/device.cc implement them. */
#ifndef GRADD_KERNELS_CUDA_PRODUCT_MEASURE_H
#define GRADD_KERNELS_CUDA_PRODUCT_MEASURE_H

#include "kernels/cuda/gpu.h"

/* The properties that choices depend on, beside the library. */
typedef struct gpu_device_s {
    const char *name;
    int driver; /* its version */
} gpu_device_t;
gpu_device_t gpu_device(void);

/* Waits until the device has nothing else to do. Until the end gpu_call.stream is one of its own.
 * The memory, aligned to 256 bytes, holds small numbers of whatever type. Nothing is left behind
 * where it fails. */
gradd_status_t gpu_measure_begin(size_t bytes, void **out_memory);
/* How long the device takes for what `work` enqueues. */
gradd_status_t gpu_measure(gradd_status_t (*work)(void *argument), void *argument, double *out_ms);
void gpu_measure_end(void);

#endif
