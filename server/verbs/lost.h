/* Plans over which the device was lost, or which have crashed the worker (crash.h), in a file of
 * the daemon's directory: so the next workers and daemons know them.
 *
 * Sessions share a device, and its loss ends the daemon of all. One whose request is repeated would
 * lose it again and again, so a plan that has lost the device twice, without an end in between, is
 * refused. A daemon that is told to end removes the file. Engine thread.
 */
#ifndef GRADD_SERVER_VERBS_LOST_H
#define GRADD_SERVER_VERBS_LOST_H

#include "server/host/rundir.h"
#include "shm/sha256.h"

#define LOST_MOST  64 /* the oldest one is forgotten then */
#define LOST_TIMES 2

typedef struct lost_plan_s {
    uint8_t key[GRADD_SHA256_BYTES]; /* of the compiled plan */
    uint32_t backward, times;        /* which of its runs, and how often */
} lost_plan_t;

typedef struct lost_plans_s {
    const rundir_t *dir; /* Borrowed; NULL: nothing is read or written */
    int n;
    lost_plan_t plans[LOST_MOST];
} lost_plans_t;

/* What earlier daemons have noted there. */
void lost_read(lost_plans_t *lost, const rundir_t *dir);
/* Fails with UNSUPPORTED if the plan is refused. */
gradd_status_t lost_check(const lost_plans_t *lost, const uint8_t key[GRADD_SHA256_BYTES]);
/* The device is lost, and a forward or backward of the plan was running. */
void lost_note(lost_plans_t *lost, const uint8_t key[GRADD_SHA256_BYTES], bool backward);
/* One has come to its end: what was noted had another reason. */
void lost_ran(lost_plans_t *lost, const uint8_t key[GRADD_SHA256_BYTES], bool backward);

#endif
