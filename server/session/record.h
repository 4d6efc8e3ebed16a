/* What is remembered of a session for `gradd show`: its model, plans and last failures.
 *
 * The engine thread writes, the I/O thread reads, also in the middle of a step. The lock is held
 * for copies in memory only, so neither waits for work of the other.
 */
#ifndef GRADD_SERVER_SESSION_RECORD_H
#define GRADD_SERVER_SESSION_RECORD_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shm/status.h"

#define RECORD_PLANS       32 /* that were used last */
#define RECORD_ERRORS      8  /* the last ones */
#define RECORD_MODEL_BYTES 128
#define RECORD_VERB_BYTES  24
#define RECORD_WHAT_BYTES  400

typedef struct plan_record_s {
    uint64_t id, used; /* `used` rises with every use of any plan */
    int64_t arena_bytes, saved_bytes, constant_bytes;
    double compile_ms;
    uint64_t n_forward, n_backward; /* that succeeded */
    int64_t ran_us;                 /* of these */
    bool is_check;                  /* a self-check has made it, not the training */
} plan_record_t;

typedef struct error_record_s {
    int64_t ms; /* by session_now_ms */
    gradd_status_t status;
    char verb[RECORD_VERB_BYTES], what[RECORD_WHAT_BYTES];
} error_record_t;

typedef struct session_record_s {
    pthread_mutex_t lock;
    char model[RECORD_MODEL_BYTES]; /* "": the client has not said */
    uint64_t parameters;            /* numbers in it, the same */
    int64_t peak_arena_bytes;       /* the most that its runs took at once */
    uint64_t n_fallbacks;           /* as the client says */
    uint64_t clock, n_errors;       /* all that there were */
    plan_record_t plans[RECORD_PLANS];
    int n_plans;
    error_record_t errors[RECORD_ERRORS]; /* the i-th at i % RECORD_ERRORS */
} session_record_t;

void record_init(session_record_t *record);
void record_finish(session_record_t *record);
/* A copy, whose lock is of no use. */
void record_copy(session_record_t *record, session_record_t *out_copy);

/* `model` is text of a client: shown in tables, so unprintable characters become '_'. */
void record_model(session_record_t *record, const char *model, size_t bytes, uint64_t parameters);
/* Calls or parts of calls that have run in PyTorch instead, as the client counts them. */
void record_fallbacks(session_record_t *record, uint64_t n);
/* In place of the plan of that id, or of the one that was used least recently. */
void record_plan(session_record_t *record, const plan_record_t *plan);
void record_drop_plan(session_record_t *record, uint64_t id);
/* It was made for a self-check. An unknown one is ignored. */
void record_check(session_record_t *record, uint64_t id);
/* A forward or backward of it has succeeded. */
void record_ran(session_record_t *record, uint64_t id, bool backward, int64_t us);
void record_arena(session_record_t *record, int64_t bytes);
void record_error(session_record_t *record, int64_t ms, const char *verb, gradd_status_t status);

#endif
