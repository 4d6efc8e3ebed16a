/* A thread that makes plans: one that takes seconds holds no other session's request.
 *
 * Of a device that computes in the calling thread alone, because making a plan for another gives
 * work to its queue, which is the engine thread's. Several requests may wait for one plan. What
 * nobody waits for any more is not begun, or thrown away when it is there. Engine thread.
 */
#ifndef GRADD_SERVER_VERBS_MAKER_H
#define GRADD_SERVER_VERBS_MAKER_H

#include "server/verbs/plan_ask.h"

typedef struct maker_s maker_t;

/* A plan on its way. */
typedef struct making_s {
    struct making_s *next, *next_queued; /* of all; in front of the thread */
    int refs;                            /* requests that wait for it */
    atomic_bool dropped;                 /* none does */
    uint64_t done;                       /* the word that they wait for: 1 = the rest is there */
    uint8_t key[GRADD_SHA256_BYTES];
    model_entry_t *model;         /* Shared: retained */
    gradd_plan_options_t options; /* with the lists of: */
    plan_ask_t ask;               /* Owned */
    gradd_plan_t *plan;           /* Owned; NULL = it was taken, or: */
    gradd_status_t status;
    gradd_failure_t failure;
} making_t;

/* For a device with a queue of its own *out is NULL. Fails with NOMEM, IO. */
gradd_status_t maker_start(worker_t *worker, maker_t **out);
/* Waits for the plan that is being made, and forgets all. Accepts NULL. */
void maker_stop(maker_t *maker);
/* The plan of that key, if it is on its way, retained; else NULL. */
making_t *maker_find(maker_t *maker, const uint8_t key[GRADD_SHA256_BYTES]);
/* Begins to make one; the lists of `options` are those of `ask`, which is taken over. */
gradd_status_t maker_begin(maker_t *maker, model_entry_t *model,
                           const gradd_plan_options_t *options, plan_ask_t *ask,
                           making_t **out_making);
void maker_release(maker_t *maker, making_t *making); /* accepts NULL */

#endif
