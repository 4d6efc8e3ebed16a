/* A second device, for tests: the CPU's kernels behind a queue of their own thread, in memory that
 * the process cannot touch.
 *
 * An address of the device is reserved and never readable. Its bytes are a memfd, which the thread
 * of the queue maps while it carries out one piece of work, at another address, and unmaps behind
 * it. So code that takes an address of the device for one of the process, or the other way round,
 * is stopped at once, and so is work on memory that was freed. Work begins some random time after
 * it was given: code that does not wait sees old bytes. New memory holds NaN. Kernels take one
 * thread.
 *
 * Environment, read when a queue is made:
 *   GRADD_FAKE_DELAY_US    longest pause in front of work that finds the queue empty (500)
 *   GRADD_FAKE_FAIL=WHAT:N the N-th one fails, from 1: `alloc` (NOMEM), `map` (SHM); or the device
 *                          is lost (DEVICE) with a piece of work (`item`), which is reported later,
 * or when an operator is given (`launch`) GRADD_FAKE_ONCE=FILE   ... unless FILE exists; it is made
 * when that happens
 */
#ifndef GRADD_TESTS_FAKE_FAKE_H
#define GRADD_TESTS_FAKE_FAKE_H

#include "kernels/contract/backend.h"

extern const gradd_backend_t gradd_backend_fake;

typedef enum fake_point_e {
    FAKE_ALLOC,
    FAKE_MAP,
    FAKE_ITEM,
    FAKE_LAUNCH,
    FAKE_POINTS
} fake_point_t;

/* The n-th one from now on fails, 1 = the next. 0 = none. */
void fake_fail(gradd_queue_t *queue, fake_point_t point, int n);
/* Work that is not done yet. */
int fake_pending(gradd_queue_t *queue);
/* Memory that was taken and is not freed yet, in bytes. */
int64_t fake_bytes(gradd_queue_t *queue);

#endif
