/* Verbs attach, detach: the life of a session on the command channel. */
#include "server/daemon/daemon.h"
#include "server/host/connections.h"
#include "server/host/log.h"
#include "server/wire/version.h"

static gradd_status_t attach(daemon_t *daemon, request_t *request) {
    const msgpack_object *nonce = request->args[0];
    const gradd_device_info_t *device = gradd_device_info(daemon->worker.device);
    const session_caller_t caller = {request->uid, request->route, request->n_route};
    session_t *session;
    GRADD_TRY(session_attach(&daemon->table, (const uint8_t *)nonce->via.bin.ptr,
                             nonce->via.bin.size, &caller, &session));
    request->session = session;
    session->source = request->source;
    session->source_number = connections_keep(request->source);
    session->q_taken = request->q;
    wire_key(&request->reply, "t");
    wire_put_bytes(&request->reply, session->token, SESSION_KEY_BYTES);
    wire_key(&request->reply, "session");
    wire_put_u64(&request->reply, session->number);
    wire_key(&request->reply, "threads");
    wire_put_i64(&request->reply, device->threads);
    wire_key(&request->reply, "bf16");
    wire_put_text(&request->reply, device->native_bf16 ? "native" : "widened");
    wire_key(&request->reply, "device");
    wire_put_text(&request->reply, device->name);
    wire_key(&request->reply, "missed");
    wire_put_text(&request->reply, daemon->worker.missed);
    wire_key(&request->reply, "version");
    wire_put_text(&request->reply, GRADD_VERSION);
    log_event(LOG_INFO, "attach", "session=%u pid=%d uid=%u client=%s", session->number,
              (int)session->pid, (unsigned)session->uid, session->client);
    return GRADD_OK;
}

/* Runs in the engine thread, after all that was sent before it. */
static gradd_status_t detach(worker_t *worker, request_t *request) {
    objects_end(worker, request->session);
    return GRADD_OK;
}

GRADD_COMMANDS(session,
               {.name = "attach",
                .io = attach,
                .fields = {{.name = "nonce", .kind = WIRE_BYTES, .max = SESSION_KEY_BYTES}}},
               {.name = "detach", .handle = detach, .needs_session = true, .ends_session = true});
