/* See record.h. */
#include "server/session/record.h"

#include <stdio.h>
#include <string.h>

void record_init(session_record_t *record) {
    pthread_mutex_init(&record->lock, NULL);
}

void record_finish(session_record_t *record) {
    pthread_mutex_destroy(&record->lock);
}

void record_copy(session_record_t *record, session_record_t *out_copy) {
    pthread_mutex_lock(&record->lock);
    memcpy(out_copy, record, sizeof *out_copy);
    pthread_mutex_unlock(&record->lock);
}

void record_model(session_record_t *record, const char *model, size_t bytes, uint64_t parameters) {
    const size_t n = bytes < RECORD_MODEL_BYTES ? bytes : RECORD_MODEL_BYTES - 1;
    pthread_mutex_lock(&record->lock);
    for (size_t i = 0; i < n; i++)
        record->model[i] = model[i] >= 0x20 && model[i] < 0x7f ? model[i] : '_';
    record->model[n] = 0;
    record->parameters = parameters;
    pthread_mutex_unlock(&record->lock);
}

void record_fallbacks(session_record_t *record, uint64_t n) {
    pthread_mutex_lock(&record->lock);
    record->n_fallbacks = n;
    pthread_mutex_unlock(&record->lock);
}

/* ---- plans; the lock is held ---- */

static plan_record_t *find(session_record_t *record, uint64_t id) {
    for (int i = 0; i < record->n_plans; i++)
        if (record->plans[i].id == id) return &record->plans[i];
    return NULL;
}

static plan_record_t *place_for(session_record_t *record, uint64_t id) {
    plan_record_t *oldest = find(record, id);
    if (oldest) return oldest;
    if (record->n_plans < RECORD_PLANS) return &record->plans[record->n_plans++];
    oldest = &record->plans[0];
    for (int i = 1; i < record->n_plans; i++)
        if (record->plans[i].used < oldest->used) oldest = &record->plans[i];
    return oldest;
}

void record_plan(session_record_t *record, const plan_record_t *plan) {
    pthread_mutex_lock(&record->lock);
    plan_record_t *place = place_for(record, plan->id);
    *place = *plan;
    place->used = ++record->clock;
    pthread_mutex_unlock(&record->lock);
}

void record_drop_plan(session_record_t *record, uint64_t id) {
    pthread_mutex_lock(&record->lock);
    plan_record_t *plan = find(record, id);
    if (plan) *plan = record->plans[--record->n_plans];
    pthread_mutex_unlock(&record->lock);
}

void record_check(session_record_t *record, uint64_t id) {
    pthread_mutex_lock(&record->lock);
    plan_record_t *plan = find(record, id);
    if (plan) plan->is_check = true;
    pthread_mutex_unlock(&record->lock);
}

void record_ran(session_record_t *record, uint64_t id, bool backward, int64_t us) {
    pthread_mutex_lock(&record->lock);
    plan_record_t *plan = find(record, id);
    if (plan) {
        plan->used = ++record->clock;
        plan->n_forward += !backward;
        plan->n_backward += backward;
        plan->ran_us += us;
    }
    pthread_mutex_unlock(&record->lock);
}

void record_arena(session_record_t *record, int64_t bytes) {
    pthread_mutex_lock(&record->lock);
    if (bytes > record->peak_arena_bytes) record->peak_arena_bytes = bytes;
    pthread_mutex_unlock(&record->lock);
}

void record_error(session_record_t *record, int64_t ms, const char *verb, gradd_status_t status) {
    char what[RECORD_WHAT_BYTES]; /* plain text: names in it are the client's */
    snprintf(what, sizeof what, "%.*s", RECORD_WHAT_BYTES - 1, gradd_error_message());
    for (char *c = what; *c; c++)
        if (*c < 0x20 || *c == 0x7f) *c = '?';
    pthread_mutex_lock(&record->lock);
    error_record_t *error = &record->errors[record->n_errors++ % RECORD_ERRORS];
    error->ms = ms;
    error->status = status;
    snprintf(error->verb, sizeof error->verb, "%s", verb);
    memcpy(error->what, what, sizeof what);
    pthread_mutex_unlock(&record->lock);
}
