/* Verbs ps, trace, stop: for the user of the daemon; they need no session, only the uid. I/O
 * thread. */
#include <unistd.h>

#include "server/daemon/daemon.h"

static void put_text(wire_out_t *out, const char *key, const char *value) {
    wire_put_text(out, key);
    wire_put_text(out, value);
}

static void put_number(wire_out_t *out, const char *key, int64_t value) {
    wire_put_text(out, key);
    wire_put_i64(out, value);
}

/* Bytes in shared memory by purpose. */
static void put_kinds(wire_out_t *out, gradd_handle_table_t *table) {
    uint64_t bytes[GRADD_N_SEGMENT_PURPOSES];
    gradd_handle_purpose_bytes(table, bytes);
    wire_put_text(out, "segment_kinds");
    wire_put_map(out, GRADD_N_SEGMENT_PURPOSES);
    for (uint32_t i = 0; i < GRADD_N_SEGMENT_PURPOSES; i++)
        put_number(out, gradd_segment_purpose_name(i), (int64_t)bytes[i]);
}

static void put_session(wire_out_t *out, session_t *session) {
    uint32_t segments;
    uint64_t bytes;
    session_counts_t *counts = &session->counts;
    gradd_handle_usage(gradd_lease_table(session->lease), &segments, &bytes);
    wire_put_map(out, 21);
    put_number(out, "session", session->number);
    put_number(out, "pid", session->pid);
    put_number(out, "uid", session->uid);
    put_text(out, "client", session->client);
    put_text(out, "state", session_state_name(session));
    put_number(out, "graphs", atomic_load(&counts->graphs));
    put_number(out, "plans", atomic_load(&counts->plans));
    put_number(out, "bindings", atomic_load(&counts->bindings));
    put_number(out, "tensors", atomic_load(&counts->tensors));
    put_number(out, "runs", atomic_load(&counts->runs));
    put_number(out, "segments", segments);
    put_number(out, "segment_bytes", (int64_t)bytes);
    put_kinds(out, gradd_lease_table(session->lease));
    put_number(out, "arena_bytes", atomic_load(&counts->arena_bytes));
    put_number(out, "requests", (int64_t)session->n_requests);
    put_number(out, "waiting", session->lane.length);
    put_number(out, "idle_ms", session_now_ms() - session->active_ms);
    put_number(out, "engine_ms", session->pace.engine_us / 1000);
    put_number(out, "steps", (int64_t)session->pace.n_steps);
    wire_put_text(out, "busy");
    wire_put_f64(out, session->pace.busy);
    wire_put_text(out, "steps_per_second");
    wire_put_f64(out, session->pace.steps_per_second);
}

static void put_counters(wire_out_t *out, const daemon_t *daemon) {
    const worker_t *worker = &daemon->worker;
    wire_key(out, "counters");
    wire_put_map(out, 10);
    put_number(out, "requests", (int64_t)daemon->n_requests);
    put_number(out, "refused", (int64_t)daemon->n_refused);
    put_number(out, "failed", atomic_load(&worker->n_failed));
    put_number(out, "forward", atomic_load(&worker->n_forward));
    put_number(out, "backward", atomic_load(&worker->n_backward));
    put_number(out, "compiled", atomic_load(&worker->n_compiled));
    put_number(out, "plan_hits", atomic_load(&worker->n_plan_hits));
    put_number(out, "sessions_seen", daemon->table.n_born);
    put_number(out, "messages_dropped", (int64_t)daemon->router.n_dropped);
    put_number(out, "peers_refused", (int64_t)daemon->router.n_refused);
}

static gradd_status_t ps(daemon_t *daemon, request_t *request) {
    const gradd_device_info_t *device = gradd_device_info(daemon->worker.device);
    wire_out_t *out = &request->reply;
    char text[CONFINE_TEXT_BYTES];
    wire_put_version(out);
    wire_key(out, "pid");
    wire_put_i64(out, daemon->owner);
    wire_key(out, "worker");
    wire_put_i64(out, getpid());
    wire_key(out, "workers_lost");
    wire_put_i64(out, daemon->n_workers);
    wire_key(out, "confined");
    wire_put_text(out, confine_text(&daemon->confined, text));
    wire_key(out, "owner_confined");
    wire_put_text(out, daemon->owner_confined);
    wire_key(out, "uptime_ms");
    wire_put_i64(out, session_now_ms() - daemon->started_ms);
    wire_key(out, "device");
    wire_put_text(out, device->name);
    wire_key(out, "threads");
    wire_put_i64(out, device->threads);
    wire_key(out, "memory_limit");
    wire_put_i64(out, device->memory_limit);
    wire_key(out, "sessions");
    wire_put_list(out, (uint32_t)daemon->table.n);
    for (int i = 0; i < daemon->table.n; i++)
        put_session(out, daemon->table.sessions[i]);
    put_counters(out, daemon);
    return GRADD_OK;
}

static gradd_status_t stop(daemon_t *daemon, request_t *request) {
    wire_key(&request->reply, "pid");
    wire_put_i64(&request->reply, daemon->owner);
    daemon_stop(daemon, "stop", wire_flag(request->args[0]));
    return GRADD_OK;
}

static gradd_status_t trace(daemon_t *daemon, request_t *request) {
    wire_out_t *out = &request->reply;
    const session_table_t *table = &daemon->table;
    wire_key(out, "pid");
    wire_put_i64(out, daemon->owner);
    wire_key(out, "sessions");
    wire_put_list(out, (uint32_t)table->n);
    for (int i = 0; i < table->n; i++) {
        wire_put_map(out, 3);
        put_number(out, "session", table->sessions[i]->number);
        put_number(out, "pid", table->sessions[i]->pid);
        put_text(out, "client", table->sessions[i]->client);
    }
    const uint64_t since = request->args[0] ? wire_u64(request->args[0]) : 0;
    wire_key(out, "done");
    recent_put(&daemon->recent, since > INT64_MAX ? INT64_MAX : (int64_t)since, out);
    return GRADD_OK;
}

GRADD_COMMANDS(admin, {.name = "ps", .io = ps, .lasting = true},
               {.name = "trace",
                .io = trace,
                .fields = {{.name = "since", .kind = WIRE_U64, .optional = true}}},
               {.name = "stop",
                .io = stop,
                .lasting = true,
                .fields = {{.name = "now", .kind = WIRE_FLAG, .optional = true}}});
