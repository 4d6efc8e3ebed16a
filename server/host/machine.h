/* The memory and processors that this machine, and the control groups that we are in, leave us.
 *
 * `root` is the folder with /proc and /sys: "", except in tests. Memory is read from files each
 * time, which costs tens of microseconds, so it is not read per request.
 */
#ifndef GRADD_SERVER_HOST_MACHINE_H
#define GRADD_SERVER_HOST_MACHINE_H

#include <stdint.h>

#include "shm/status.h"

/* Memory that all programs together may ever use here: the machine's, or the lowest limit of our
 * control groups (v2, or v1's memory hierarchy). INT64_MAX when it cannot be found out. */
int64_t machine_memory(const char *root);
/* Memory that could be taken now without waking the killer of processes: available memory and free
 * swap, and no more than each control group has left. Page cache counts as free, for the kernel
 * drops it first. INT64_MAX when it cannot be found out. */
int64_t machine_memory_left(const char *root);

/* Processors that the calling thread, and what it will start, may use; at least 1. */
int machine_processors(void);
/* Lets it use all that the control group allows, whatever mask it has inherited. */
void machine_unpin(void);
/* Threads of a daemon that was asked for `wanted`; 0 = one per processor. At least 1. */
int machine_threads(int64_t wanted);

#endif
