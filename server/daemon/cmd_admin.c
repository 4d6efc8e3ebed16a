/* Verbs ps, trace, stop: for the user of the daemon; they need no session, only the uid. I/O
 * thread. */
#include <unistd.h>

#include "server/daemon/daemon.h"
#include "server/daemon/shown.h"

static void put_counters(wire_out_t *out, const daemon_t *daemon) {
    const worker_t *worker = &daemon->worker;
    wire_key(out, "counters");
    wire_put_map(out, 10);
    shown_number(out, "requests", (int64_t)daemon->n_requests);
    shown_number(out, "refused", (int64_t)daemon->n_refused);
    shown_number(out, "failed", atomic_load(&worker->n_failed));
    shown_number(out, "forward", atomic_load(&worker->n_forward));
    shown_number(out, "backward", atomic_load(&worker->n_backward));
    shown_number(out, "compiled", atomic_load(&worker->n_compiled));
    shown_number(out, "plan_hits", atomic_load(&worker->n_plan_hits));
    shown_number(out, "sessions_seen", daemon->table.n_born);
    shown_number(out, "messages_dropped", (int64_t)daemon->router.n_dropped);
    shown_number(out, "peers_refused", (int64_t)daemon->router.n_refused);
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
    wire_key(out, "drained");
    wire_put_text(out, daemon->drained);
    wire_key(out, "sessions");
    wire_put_list(out, (uint32_t)daemon->table.n);
    for (int i = 0; i < daemon->table.n; i++)
        shown_session(out, daemon->table.sessions[i]);
    put_counters(out, daemon);
    wire_key(out, "verbs");
    recent_put_totals(&daemon->recent, out);
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
        shown_number(out, "session", table->sessions[i]->number);
        shown_number(out, "pid", table->sessions[i]->pid);
        shown_text(out, "client", table->sessions[i]->client);
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
