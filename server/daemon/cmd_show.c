/* Verbs show, drain: for the user of the daemon, as those of cmd_admin.c. I/O thread. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/daemon/daemon.h"
#include "server/daemon/shown.h"
#include "server/host/log.h"

#define NAME_BYTES 64

/* A session is found by its number, its process, or the name of its script. */
static bool is_meant(const session_t *session, const char *name) {
    char *end;
    const unsigned long long number = strtoull(name, &end, 10);
    if (*end == 0 && (number == session->number || number == (unsigned long long)session->pid))
        return true;
    return strcmp(session->client, name) == 0;
}

static gradd_status_t show(daemon_t *daemon, request_t *request) {
    const msgpack_object_str *given = &request->args[0]->via.str;
    const session_table_t *table = &daemon->table;
    session_t *found[SESSION_MAX + SESSION_MAX_SURPLUS];
    char name[NAME_BYTES + 1];
    uint32_t n = 0;
    snprintf(name, sizeof name, "%.*s", (int)given->size, given->ptr);
    for (int i = 0; name[0] && i < table->n; i++)
        if (is_meant(table->sessions[i], name)) found[n++] = table->sessions[i];
    wire_key(&request->reply, "device");
    wire_put_text(&request->reply, gradd_device_info(daemon->worker.device)->name);
    wire_key(&request->reply, "sessions");
    wire_put_list(&request->reply, n);
    for (uint32_t i = 0; i < n; i++)
        shown_in_full(&request->reply, found[i]);
    return GRADD_OK;
}

/* What the engine has begun it finishes. A client that dies meanwhile is let go of. */
static gradd_status_t drain(daemon_t *daemon, request_t *request) {
    const msgpack_object *why = request->args[0];
    const session_table_t *table = &daemon->table;
    const bool over = wire_flag(request->args[1]);
    int n_running = 0, n_waiting = 0;
    for (int i = 0; i < table->n; i++) {
        n_running += atomic_load(&table->sessions[i]->counts.running);
        n_waiting += table->sessions[i]->lane.length > 0;
    }
    const char *text = over ? "" : why ? why->via.str.ptr : "maintenance";
    const int n = over || !why ? (int)strlen(text) : (int)why->via.str.size;
    snprintf(daemon->drained, sizeof daemon->drained, "%.*s", n, text);
    for (char *c = daemon->drained; *c; c++)
        if (*c < 0x20 || *c == 0x7f) *c = '?';
    queue_hold(daemon->queue, !over);
    log_event(LOG_INFO, over ? "drain_over" : "drain", "sessions=%d why=\"%s\"", table->n,
              daemon->drained);
    wire_key(&request->reply, "sessions");
    wire_put_i64(&request->reply, table->n);
    wire_key(&request->reply, "running");
    wire_put_i64(&request->reply, n_running);
    wire_key(&request->reply, "waiting");
    wire_put_i64(&request->reply, n_waiting);
    return GRADD_OK;
}

GRADD_COMMANDS(
    show,
    {
        .name = "show",
        .io = show,
        .fields = {{.name = "name", .kind = WIRE_TEXT, .max = NAME_BYTES}}
},
    {.name = "drain",
     .io = drain,
     .fields = {{.name = "why", .kind = WIRE_TEXT, .optional = true, .max = DRAIN_WHY_BYTES - 1},
                {.name = "end", .kind = WIRE_FLAG, .optional = true}}});
