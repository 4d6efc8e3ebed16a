/* How long compiling one graph may take.
 *
 * One thread compiles for every client, so a model that takes minutes would stop them all. Whoever
 * loops over nodes says so here; from time to time that looks at the processor time of the thread
 * and fails once the limit is passed. Processor time, not the clock on the wall: a loaded machine
 * must not refuse what an idle one accepts.
 *
 * The state belongs to the thread. Outside of budget_start and budget_end nothing is counted.
 */
#ifndef GRADD_SERVER_GRAPH_BUDGET_H
#define GRADD_SERVER_GRAPH_BUDGET_H

#include <stdint.h>

#include "shm/status.h"

/* limit_ms of processor time from now on; 0 = no limit. */
void budget_start(int64_t limit_ms);
void budget_end(void);
/* `units` of work of about a microsecond went by. Fails with LIMIT; the caller names the node. */
gradd_status_t budget_spend(int64_t units);

#endif
