/* How long compiling one graph may take.
 *
 * One thread compiles for every client, so a model that takes minutes would stop them all. Code
 * that loops over nodes reports here; every now and then such a call checks the processor time of
 * the thread and fails once the limit is passed. Processor time rather than wall-clock time: a
 * loaded machine must not refuse what an idle one accepts.
 *
 * The state belongs to the thread. Outside of compile_time_start and compile_time_end nothing is
 * counted.
 */
#ifndef GRADD_SERVER_GRAPH_COMPILE_TIME_H
#define GRADD_SERVER_GRAPH_COMPILE_TIME_H

#include <stdint.h>

#include "shm/status.h"

/* limit_ms of processor time from now on; 0 = no limit. *cancel, if not NULL, is read until
 * compile_time_end: non-zero = the result is not needed any more. */
void compile_time_start(int64_t limit_ms, const volatile int *cancel);
void compile_time_end(void);
/* `units` of work of about a microsecond went by. Fails with LIMIT, where the caller names the
 * node, and with STALE if it is cancelled. */
gradd_status_t compile_time_spend(int64_t units);

#endif
