/* See shown.h. */
#include "server/daemon/shown.h"

void shown_text(wire_out_t *out, const char *key, const char *value) {
    wire_put_text(out, key);
    wire_put_text(out, value);
}

void shown_number(wire_out_t *out, const char *key, int64_t value) {
    wire_put_text(out, key);
    wire_put_i64(out, value);
}

static void put_real(wire_out_t *out, const char *key, double value) {
    wire_put_text(out, key);
    wire_put_f64(out, value);
}

/* Bytes in shared memory by purpose. */
static void put_kinds(wire_out_t *out, gradd_handle_table_t *table) {
    uint64_t bytes[GRADD_N_SEGMENT_PURPOSES];
    gradd_handle_purpose_bytes(table, bytes);
    wire_put_text(out, "segment_kinds");
    wire_put_map(out, GRADD_N_SEGMENT_PURPOSES);
    for (uint32_t i = 0; i < GRADD_N_SEGMENT_PURPOSES; i++)
        shown_number(out, gradd_segment_purpose_name(i), (int64_t)bytes[i]);
}

/* Since when a run waits for memory. */
static int64_t wanted_ms(session_counts_t *counts) {
    const int64_t since_us = atomic_load(&counts->wanted_us);
    return atomic_load(&counts->wanted_bytes) ? session_now_ms() - since_us / 1000 : 0;
}

#define N_FACTS 30

static void put_facts(wire_out_t *out, session_t *session, const session_record_t *record) {
    uint32_t segments;
    uint64_t bytes;
    session_counts_t *counts = &session->counts;
    gradd_handle_usage(gradd_lease_table(session->lease), &segments, &bytes);
    shown_number(out, "session", session->number);
    shown_number(out, "pid", session->pid);
    shown_number(out, "uid", session->uid);
    shown_text(out, "client", session->client);
    shown_text(out, "model", record->model);
    shown_number(out, "parameters", (int64_t)(record->parameters & INT64_MAX));
    shown_number(out, "fallbacks", (int64_t)(record->n_fallbacks & INT64_MAX));
    shown_text(out, "state", session_state_name(session));
    shown_number(out, "graphs", atomic_load(&counts->graphs));
    shown_number(out, "plans", atomic_load(&counts->plans));
    shown_number(out, "bindings", atomic_load(&counts->bindings));
    shown_number(out, "tensors", atomic_load(&counts->tensors));
    shown_number(out, "runs", atomic_load(&counts->runs));
    shown_number(out, "segments", segments);
    shown_number(out, "segment_bytes", (int64_t)bytes);
    put_kinds(out, gradd_lease_table(session->lease));
    shown_number(out, "arena_bytes", atomic_load(&counts->arena_bytes));
    shown_number(out, "peak_arena_bytes", record->peak_arena_bytes);
    shown_number(out, "constant_bytes", atomic_load(&counts->constant_bytes));
    shown_number(out, "quota_bytes", atomic_load(&session->most_bytes));
    shown_number(out, "share", session->share);
    shown_number(out, "wanted_bytes", atomic_load(&counts->wanted_bytes));
    shown_number(out, "wanted_ms", wanted_ms(counts));
    shown_number(out, "requests", (int64_t)session->n_requests);
    shown_number(out, "waiting", session->lane.length);
    shown_number(out, "idle_ms", session_now_ms() - session->active_ms);
    shown_number(out, "engine_ms", session->pace.engine_us / 1000);
    shown_number(out, "steps", (int64_t)session->pace.n_steps);
    put_real(out, "busy", session->pace.busy);
    put_real(out, "steps_per_second", session->pace.steps_per_second);
}

static void put_plans(wire_out_t *out, const session_record_t *record) {
    wire_put_text(out, "plan_list");
    wire_put_list(out, (uint32_t)record->n_plans);
    for (int i = 0; i < record->n_plans; i++) {
        const plan_record_t *plan = &record->plans[i];
        wire_put_map(out, 9);
        shown_number(out, "plan", (int64_t)(plan->id & INT64_MAX));
        shown_number(out, "arena_bytes", plan->arena_bytes);
        shown_number(out, "saved_bytes", plan->saved_bytes);
        shown_number(out, "constant_bytes", plan->constant_bytes);
        put_real(out, "compile_ms", plan->compile_ms);
        shown_number(out, "forwards", (int64_t)plan->n_forward);
        shown_number(out, "backwards", (int64_t)plan->n_backward);
        put_real(out, "ran_ms", (double)plan->ran_us / 1000);
        shown_number(out, "self_check", plan->is_check);
    }
}

/* Oldest first. */
static void put_errors(wire_out_t *out, const session_record_t *record) {
    const uint64_t n = record->n_errors < RECORD_ERRORS ? record->n_errors : RECORD_ERRORS;
    wire_put_text(out, "errors");
    wire_put_list(out, (uint32_t)n);
    for (uint64_t i = record->n_errors - n; i < record->n_errors; i++) {
        const error_record_t *error = &record->errors[i % RECORD_ERRORS];
        wire_put_map(out, 4);
        shown_number(out, "ago_ms", session_now_ms() - error->ms);
        shown_text(out, "verb", error->verb);
        shown_text(out, "code", gradd_status_name(error->status));
        shown_text(out, "what", error->what);
    }
}

void shown_session(wire_out_t *out, session_t *session) {
    session_record_t record;
    record_copy(&session->record, &record);
    wire_put_map(out, N_FACTS);
    put_facts(out, session, &record);
}

void shown_in_full(wire_out_t *out, session_t *session) {
    session_record_t record;
    record_copy(&session->record, &record);
    wire_put_map(out, N_FACTS + 5);
    put_facts(out, session, &record);
    shown_number(out, "age_ms", session_now_ms() - session->born_ms);
    shown_number(out, "payload_bytes", (int64_t)session->payload_bytes);
    shown_number(out, "errors_seen", (int64_t)record.n_errors);
    put_plans(out, &record);
    put_errors(out, &record);
}
