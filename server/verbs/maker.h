/* A thread that loads models and makes plans: one that takes seconds holds no other session's
 * request.
 *
 * Of a device that computes in the calling thread alone, because making a plan for another gives
 * work to its queue, which is the engine thread's. Several requests may wait for one. What is
 * not waited for any more is not begun, or thrown away when it is there. Engine thread.
 */
#ifndef GRADD_SERVER_VERBS_MAKER_H
#define GRADD_SERVER_VERBS_MAKER_H

#include "server/verbs/plan_ask.h"

typedef struct plan_maker_s plan_maker_t;

/* A model or a plan on its way. */
typedef struct making_s {
    struct making_s *next, *next_queued; /* of all; in front of the thread */
    int refs;                            /* requests that wait for it */
    volatile int dropped;                /* none does */
    uint64_t done;                       /* the word that they wait for: 1 = the rest is there */
    uint8_t key[GRADD_SHA256_BYTES];     /* of the plan, or the model's id */
    /* Of a model: */
    void *onnx; /* Owned; NULL = it is a plan */
    size_t onnx_bytes;
    gradd_model_t *loaded; /* Owned; NULL = it was taken, or has failed */
    /* Of a plan: */
    model_entry_t *model;         /* Shared: retained */
    gradd_plan_options_t options; /* with the lists of: */
    plan_ask_t ask;               /* Owned */
    gradd_plan_t *plan;           /* Owned; NULL = it was taken, or has failed */
    gradd_status_t status;
    gradd_failure_t failure;
} making_t;

/* For a device with a queue of its own *out is NULL. Fails with NOMEM, IO. */
gradd_status_t maker_start(worker_t *worker, plan_maker_t **out);
/* Waits for the plan that is being made, and forgets all. Accepts NULL. */
void maker_stop(plan_maker_t *maker);
/* What is on its way under that key, retained; or NULL. */
making_t *maker_find(plan_maker_t *maker, const uint8_t key[GRADD_SHA256_BYTES]);
/* Begins to make one; the lists of `options` are those of `ask`, which is taken over. */
gradd_status_t maker_begin(plan_maker_t *maker, model_entry_t *model,
                           const gradd_plan_options_t *options, plan_ask_t *ask,
                           making_t **out_making);
/* Begins to load a model; takes the bytes over, also if it fails. */
gradd_status_t maker_load(plan_maker_t *maker, const uint8_t id[GRADD_SHA256_BYTES], void *onnx,
                          size_t bytes, making_t **out_making);
/* The failure of one that is done, if it has failed. */
gradd_status_t making_status(const making_t *making);
void maker_release(plan_maker_t *maker, making_t *making); /* accepts NULL */

#endif
