/* The emulated GPU: rows of kernels/cuda, compiled for the host, behind the queue of the fake
 * device (tests/fake). */
#ifndef GRADD_TESTS_EMU_DEVICE_H
#define GRADD_TESTS_EMU_DEVICE_H

#include "kernels/contract/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

extern const gradd_backend_t gradd_backend_emu;

/* Its work in memory of the process, here and now: a table whose functions take no queue. */
extern const gradd_backend_t emu_here;

/* A launch of a kernel there; a value that it refuses is the failure. */
gradd_status_t emu_compute(const gradd_kernel_t *kernel, const gradd_launch_t *launch);

#ifdef __cplusplus
}
#endif

#endif
