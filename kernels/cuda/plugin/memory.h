/* Memory of clients as memory of the GPU: pages of the host, and what the driver shares between
 * processes. The functions are those of the device table (kernels/contract/backend.h). */
#ifndef GRADD_KERNELS_CUDA_PLUGIN_MEMORY_H
#define GRADD_KERNELS_CUDA_PLUGIN_MEMORY_H

#include "kernels/contract/backend.h"

/* Looks for the driver's functions, once, before all else. */
void gpu_find_driver(void);

gradd_status_t gpu_map(gradd_queue_t *queue, int fd, size_t bytes, void **out);
void gpu_unmap(gradd_queue_t *queue, void *memory, size_t bytes);
gradd_status_t gpu_open(gradd_queue_t *queue, const gradd_lent_t *lent, void **out);
void gpu_close(gradd_queue_t *queue, gradd_memory_t memory, void *at, size_t bytes);

#endif
