/* Averages over the GPUs of several processes, by NCCL. The functions are those of the device table
 * (kernels/contract/backend.h). */
#ifndef GRADD_KERNELS_CUDA_PLUGIN_COMM_H
#define GRADD_KERNELS_CUDA_PLUGIN_COMM_H

#include <cuda_runtime.h>

#include "kernels/contract/backend.h"

gradd_status_t gpu_comm_id(uint8_t *out);
gradd_status_t gpu_comm_join(gradd_queue_t *queue, const gradd_comm_options_t *options,
                             gradd_comm_t **out);
gradd_status_t gpu_comm_begin(gradd_comm_t *comm, uint64_t fingerprint, uint64_t *out_round);
/* `behind`: the stream of the queue. */
gradd_status_t gpu_comm_average(cudaStream_t behind, gradd_comm_t *comm,
                                const gradd_comm_part_t *part);
const uint64_t *gpu_comm_ended(const gradd_comm_t *comm);
gradd_status_t gpu_comm_status(gradd_comm_t *comm);
void gpu_comm_leave(gradd_comm_t *comm);
/* Waits a few seconds for communicators that were left and say good-bye to the other ranks. */
void gpu_comm_settle(void);

#endif
