/* A device for tests that does nothing before somebody waits, and computes in memory of its own.
 *
 * What is given to its queue is carried out at the next wait, by the CPU's kernels. So whoever
 * reads a result too early, frees what is still in use, changes what was given or hands out an
 * address of the process finds out: freed memory is overwritten first. One thread at a time.
 */
#ifndef GRADD_TESTS_C_LAZY_DEVICE_H
#define GRADD_TESTS_C_LAZY_DEVICE_H

#include "server/exec/device.h"

/* Closed with gradd_device_close. */
gradd_device_t *lazy_open(void);
/* Work that waits in its queue. */
int lazy_waiting(const gradd_device_t *device);
/* Memory that it holds, in bytes. */
int64_t lazy_bytes(const gradd_device_t *device);

#endif
