/* The emulated GPU: the device of kernels/cuda/plugin and its kernels, compiled for the host
 * against a stand-in for CUDA (tests/sim), which reports what it finds. */
#ifndef GRADD_TESTS_EMU_DEVICE_H
#define GRADD_TESTS_EMU_DEVICE_H

#include "kernels/contract/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

#ifndef __cplusplus
extern const gradd_backend_t gradd_backend_emu;
#endif

/* Its work in memory of the process, done when the function returns: a table whose functions take
 * no queue. */
extern const gradd_backend_t emu_here;

/* A launch of a kernel there; a value that it refuses is the failure. */
gradd_status_t emu_compute(const gradd_kernel_t *kernel, const gradd_launch_t *launch);

#ifdef __cplusplus
}
#endif

#endif
