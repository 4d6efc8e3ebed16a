/* The path of a request through the I/O thread. See requests.h. */
#include "server/daemon/requests.h"

#include <string.h>

#include "server/daemon/control.h"
#include "server/host/log.h"
#include "server/session/turns.h"

#define MAX_GUESTS 16
#define REPLY_ROOM 256 /* bytes of a reply without verb */

static void send_reply(daemon_t *daemon, session_t *session, const uint8_t *route, size_t n_route,
                       const void *data, size_t bytes) {
    router_sent_t sent = router_send(&daemon->router, route, n_route, data, bytes);
    if (!session) return;
    if (sent == ROUTER_FULL && !session->stalled_ms) {
        session->stalled_ms = session_now_ms();
        log_event(LOG_WARN, "session_stalled", "session=%u", session->number);
    } else if (sent == ROUTER_NOMEM) {
        session->ends = true; /* the client attaches again, and asks again */
    } else if (sent == ROUTER_SENT) {
        session->stalled_ms = 0;
    }
}

/* Sends the reply. If the request was carried out, whatever came of it, its session remembers the
 * reply, so that the same request can be answered again. */
static void reply_and_destroy(daemon_t *daemon, request_t *request, bool carried_out) {
    const wire_out_t *reply = &request->reply;
    session_t *session = request->session;
    if (reply->failed) { /* not a word of it, but the client waits for one */
        uint8_t room[REPLY_ROOM];
        wire_out_t out = {.data = room, .capacity = sizeof room};
        wire_reply_fail(&out, request->q, GRADD_E_NOMEM, NULL, "no memory for the reply",
                        session ? "alive" : NULL);
        send_reply(daemon, session, request->route, request->n_route, out.data, out.bytes);
    } else {
        send_reply(daemon, session, request->route, request->n_route, reply->data, reply->bytes);
        if (session && carried_out)
            session_keep_reply(session, request->q, reply->data, reply->bytes);
    }
    request_destroy(request);
}

static void fail(daemon_t *daemon, request_t *request, gradd_status_t status) {
    daemon->n_refused++;
    log_event(LOG_DEBUG, "request_refused", "session=%u verb=%s code=%s what=\"%s\"",
              request->session ? request->session->number : 0,
              request->command ? request->command->name : "?", gradd_status_name(status),
              gradd_error_message());
    if (request->session)
        record_error(&request->session->record, session_now_ms(),
                     request->command ? request->command->name : "?", status);
    command_reply(request, status);
    reply_and_destroy(daemon, request, false);
}

/* Reads verb, sequence number and token, in this order, so that an error carries the number. */
static gradd_status_t decode(request_t *request, const msgpack_object **out_token) {
    static const wire_field_t fields[] = {
        {.name = "q", .kind = WIRE_U64},
        {.name = "v", .kind = WIRE_TEXT, .max = WIRE_MAX_VERB},
        {.name = "t", .kind = WIRE_BYTES, .optional = true, .max = SESSION_KEY_BYTES},
    };
    const msgpack_object *values[3];
    void *data = zmq_msg_data(&request->envelope);
    const size_t bytes = zmq_msg_size(&request->envelope);
    GRADD_TRY(request->status); /* the frames were refused */
    const gradd_status_t status = wire_decode(data, bytes, &request->doc);
    if (status == GRADD_E_NOMEM) request->q = wire_scan_number(data, bytes, "q");
    if (status) return status;
    GRADD_TRY(wire_match(&request->doc, "request", fields, 1, values));
    request->q = wire_u64(values[0]);
    GRADD_TRY(wire_match(&request->doc, "request", fields + 1, 2, values + 1));
    const msgpack_object_str *verb = &values[1]->via.str;
    request->command = command_find(verb->ptr, verb->size);
    if (!request->command)
        return GRADD_FAIL(UNSUPPORTED, "unknown verb '%.*s'", (int)verb->size, verb->ptr);
    *out_token = values[2];
    return GRADD_OK;
}

/* Finds the session and the place of this request in its sequence. */
static gradd_status_t authorize(daemon_t *daemon, request_t *request, const msgpack_object *token,
                                session_order_t *out_order) {
    session_t *session;
    *out_order = SESSION_RUN;
    bool queued = request->command->handle != NULL;
    if (daemon->stopping && (queued || request->command->needs_session))
        return GRADD_FAIL(SESSION, "the daemon is ending");
    if (!request->command->needs_session && queued && daemon->guests.length >= MAX_GUESTS)
        return GRADD_FAIL(LIMIT, "%d requests without a session wait, the limit", MAX_GUESTS);
    if (!request->command->needs_session) return GRADD_OK;
    const session_caller_t caller = {request->uid, request->route, request->n_route};
    GRADD_TRY(session_authorize(&daemon->table, token ? (const uint8_t *)token->via.bin.ptr : NULL,
                                token ? token->via.bin.size : 0, &caller, &session));
    request->session = session;
    GRADD_TRY(session_order(session, request->q, out_order));
    if (*out_order == SESSION_RUN &&
        session->payload_bytes + request->payload_bytes > SESSION_MAX_PAYLOAD)
        return GRADD_FAIL(LIMIT, "%u MiB of payload wait in this session, the limit",
                          SESSION_MAX_PAYLOAD >> 20);
    return GRADD_OK;
}

static void dispatch(daemon_t *daemon, request_t *request) {
    const command_t *command = request->command;
    if (command->handle) {
        session_t *session = request->session;
        if (session) session_take(session, request->q);
        if (session) session->payload_bytes += request->payload_bytes;
        if (session) session->n_pending++;
        if (request->turn) request->job.word = turns_ready(session);
        request->job.value = request->turn;
        queue_push(daemon->queue, session ? &session->lane : &daemon->guests, &request->job);
        return;
    }
    wire_reply_begin(&request->reply, request->q);
    gradd_status_t st = command->io(daemon, request);
    if (st != GRADD_OK) {
        fail(daemon, request, st);
        return;
    }
    command_reply(request, st);
    reply_and_destroy(daemon, request, true);
}

void requests_handle(daemon_t *daemon, request_t *request) {
    const msgpack_object *token = NULL;
    session_order_t order = SESSION_RUN;
    daemon->n_requests++;
    request->arrived_us = command_now_us();
    gradd_status_t st = decode(request, &token);
    if (st == GRADD_OK) st = authorize(daemon, request, token, &order);
    session_t *session = request->session;
    laps_cause(&daemon->laps, request->command ? request->command->name : "request",
               session ? session->number : 0);
    if (st == GRADD_OK && order == SESSION_REPEAT) {
        send_reply(daemon, session, request->route, request->n_route, session->last_reply,
                   session->last_reply_bytes);
        request_destroy(request);
        return;
    }
    if (st == GRADD_OK && order == SESSION_WAIT) {
        request_destroy(request);
        return;
    }
    if (st == GRADD_OK) st = command_match(request);
    if (st != GRADD_OK)
        fail(daemon, request, st);
    else
        dispatch(daemon, request);
}

/* A packet of the control socket that the engine thread has carried out. */
static void finish_packet(daemon_t *daemon, request_t *request) {
    session_t *session = request->session;
    const bool sent = session->ends || control_reply(request);
    session->n_pending--;
    request_destroy(request);
    if (session->ends) return;
    daemon_resume_session(daemon, session);
    if (!sent)
        daemon_end_session(daemon, session, "connection closed");
    else if (daemon->stopping)
        daemon_stop_session(daemon, session, "answered");
}

void requests_finish(daemon_t *daemon, request_t *request) {
    session_t *session = request->session;
    laps_cause(&daemon->laps, request->command ? "reply" : "session end",
               session ? session->number : 0);
    if (!request->command) { /* the engine has let go of the session */
        request_destroy(request);
        daemon_destroy_session(daemon, session);
        return;
    }
    if (request->by_control) {
        finish_packet(daemon, request);
        return;
    }
    bool detach = request->command->ends_session && request->status == GRADD_OK;
    if (session) session->payload_bytes -= request->payload_bytes;
    if (session) session->n_pending--;
    if (session) {
        recent_add(&daemon->recent, request);
        session->pace.engine_us += request->ran_us;
        session->pace.n_steps += request->command->is_step && request->status == GRADD_OK;
    }
    reply_and_destroy(daemon, request, true);
    if (detach)
        daemon_end_session(daemon, session, "detach");
    else if (session && daemon->stopping)
        daemon_stop_session(daemon, session, "answered");
}
