/* ZeroMQ sockets of the daemon. See router.h. */
#include "server/daemon/router.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/host/connections.h"
#include "server/host/log.h"

#define ZAP_ENDPOINT  "inproc://zeromq.zap.01"
#define ZAP_DOMAIN    "gradd"
#define ZAP_FRAMES    16
#define FRAME_SLACK   4096
#define HANDSHAKE_MS  5000
#define HEARTBEAT_MS  1000
#define LINGER_MS     1000
#define HIGH_WATER    64 /* times WIRE_MAX_REPLY is what a peer that does not read costs */
#define RECEIVE_WATER 64
#define MAX_LISTENERS 64 /* each keeps a descriptor */

static gradd_status_t set_int(void *socket, int option, int value) {
    if (zmq_setsockopt(socket, option, &value, sizeof value) == 0) return GRADD_OK;
    return GRADD_FAIL(IO, "zmq option %d = %d: %s", option, value, zmq_strerror(errno));
}

static gradd_status_t configure(router_t *router) {
    void *s = router->socket;
    /* A frame header may claim 8 GiB, which libzmq would reserve: bound it. */
    int64_t max_frame = WIRE_MAX_FRAME + FRAME_SLACK;
    if (zmq_setsockopt(s, ZMQ_MAXMSGSIZE, &max_frame, sizeof max_frame) != 0 ||
        zmq_setsockopt(s, ZMQ_ZAP_DOMAIN, ZAP_DOMAIN, strlen(ZAP_DOMAIN)) != 0)
        return GRADD_FAIL(IO, "zmq options: %s", zmq_strerror(errno));
    /* A second peer with the same routing id must never take over replies. */
    GRADD_TRY(set_int(s, ZMQ_ROUTER_HANDOVER, 0));
    /* Learn of peers that are gone or do not read instead of dropping replies silently. */
    GRADD_TRY(set_int(s, ZMQ_ROUTER_MANDATORY, 1));
    GRADD_TRY(set_int(s, ZMQ_HANDSHAKE_IVL, HANDSHAKE_MS));
    /* When Linux has no memory to send something, libzmq sends it with the next message to or from
     * that peer, and a peer that waits for a reply says nothing. A heartbeat is such a message; a
     * peer that does not answer it, as one that is stopped, stays. */
    GRADD_TRY(set_int(s, ZMQ_HEARTBEAT_IVL, HEARTBEAT_MS));
    GRADD_TRY(set_int(s, ZMQ_HEARTBEAT_TIMEOUT, 0));
    GRADD_TRY(set_int(s, ZMQ_SNDHWM, HIGH_WATER));
    GRADD_TRY(set_int(s, ZMQ_RCVHWM, RECEIVE_WATER));
    return set_int(s, ZMQ_LINGER, LINGER_MS);
}

gradd_status_t router_listen(router_t *router, const char *path, int listener) {
    char endpoint[160];
    if (router->n_listeners == MAX_LISTENERS)
        return GRADD_FAIL(LIMIT, "%s was removed %d times, the limit", path, MAX_LISTENERS);
    snprintf(endpoint, sizeof endpoint, "ipc://%s", path);
    /* Our own listener: zmq_bind would unlink whatever lies at the path. */
    GRADD_TRY(set_int(router->socket, ZMQ_USE_FD, listener));
    if (zmq_bind(router->socket, endpoint) != 0)
        return GRADD_FAIL(IO, "zmq_bind %s: %s", endpoint, zmq_strerror(errno));
    router->n_listeners++;
    return GRADD_OK;
}

gradd_status_t router_open(router_t *router, const char *path, int listener, uid_t uid) {
    gradd_status_t st = GRADD_OK;
    *router = (router_t){.context = zmq_ctx_new(), .uid = uid};
    if (!router->context) return GRADD_FAIL(IO, "zmq_ctx_new: %s", zmq_strerror(errno));
    zmq_ctx_set(router->context, ZMQ_MAX_SOCKETS, 64);
    router->zap = zmq_socket(router->context, ZMQ_ROUTER);
    router->socket = zmq_socket(router->context, ZMQ_ROUTER);
    if (!router->zap || !router->socket || zmq_bind(router->zap, ZAP_ENDPOINT) != 0)
        st = GRADD_FAIL(IO, "zmq sockets: %s", zmq_strerror(errno));
    if (st == GRADD_OK) st = set_int(router->zap, ZMQ_LINGER, 0);
    if (st == GRADD_OK) st = configure(router);
    if (st == GRADD_OK) st = router_listen(router, path, listener);
    if (st != GRADD_OK) router_close(router);
    return st;
}

void router_close(router_t *router) {
    if (router->socket) zmq_close(router->socket);
    if (router->zap) zmq_close(router->zap);
    if (router->context) zmq_ctx_term(router->context);
    *router = (router_t){0};
}

static int socket_fd(void *socket) {
    int fd = -1;
    size_t size = sizeof fd;
    zmq_getsockopt(socket, ZMQ_FD, &fd, &size);
    return fd;
}

int router_fd(const router_t *router) {
    return socket_fd(router->socket);
}

int router_zap_fd(const router_t *router) {
    return socket_fd(router->zap);
}

/* "localhost:uid:gid:pid" */
static bool parse_uid(const char *address, size_t bytes, uint32_t *out_uid) {
    char text[96], *end;
    if (bytes >= sizeof text) return false;
    memcpy(text, address, bytes);
    text[bytes] = 0;
    const char *colon = strchr(text, ':');
    if (!colon || colon[1] < '0' || colon[1] > '9') return false;
    unsigned long long uid = strtoull(colon + 1, &end, 10);
    if (*end != ':' || uid >= UINT32_MAX) return false;
    *out_uid = (uint32_t)uid;
    return true;
}

/* ---- ZAP (RFC 27): frames routing id, empty, version, request id, domain, address, ... ---- */

static void send_zap(void *zap, zmq_msg_t *frames, bool allowed) {
    const char *texts[] = {allowed ? "200" : "400", allowed ? "OK" : "not your daemon",
                           allowed ? "peer" : "", ""};
    const int echoed[] = {0, 1, 2, 3};
    for (int i = 0; i < 4; i++) {
        zmq_msg_t copy;
        zmq_msg_init(&copy);
        zmq_msg_copy(&copy, &frames[echoed[i]]);
        if (zmq_msg_send(&copy, zap, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0) zmq_msg_close(&copy);
    }
    for (int i = 0; i < 4; i++)
        zmq_send(zap, texts[i], strlen(texts[i]), ZMQ_DONTWAIT | (i < 3 ? ZMQ_SNDMORE : 0));
}

static void admit_one(router_t *router, zmq_msg_t *frames, int n) {
    uint32_t uid = 0;
    bool known = n >= 6 && parse_uid(zmq_msg_data(&frames[5]), zmq_msg_size(&frames[5]), &uid);
    bool allowed = known && uid == router->uid;
    if (n < 6) return;
    if (!allowed) {
        router->n_refused++;
        log_event(LOG_WARN, "peer_refused", "uid=%lld", known ? (long long)uid : -1LL);
    }
    send_zap(router->zap, frames, allowed);
}

bool router_admit(router_t *router) {
    bool any = false;
    for (;;) {
        zmq_msg_t frames[ZAP_FRAMES];
        int n = 0;
        bool more = true;
        while (more) {
            zmq_msg_t extra;
            zmq_msg_t *frame = n < ZAP_FRAMES ? &frames[n] : &extra;
            zmq_msg_init(frame);
            if (zmq_msg_recv(frame, router->zap, ZMQ_DONTWAIT) < 0) {
                zmq_msg_close(frame);
                break;
            }
            more = zmq_msg_more(frame);
            if (n < ZAP_FRAMES)
                n++;
            else
                zmq_msg_close(frame);
        }
        if (n > 0) admit_one(router, frames, n);
        for (int i = 0; i < n; i++)
            zmq_msg_close(&frames[i]);
        if (n == 0) return any;
        any = true;
    }
}

/* ---- requests ---- */

/* Reads the rest of a message into the request; frames beyond the limit are read and forgotten. */
static gradd_status_t read_frames(router_t *router, request_t *request) {
    int n = 0;
    uint64_t total = 0;
    bool more = zmq_msg_more(&request->envelope);
    while (more) {
        zmq_msg_t extra;
        zmq_msg_t *frame = n < WIRE_MAX_PAYLOADS ? &request->payloads[n] : &extra;
        if (frame == &extra) zmq_msg_init(frame);
        if (zmq_msg_recv(frame, router->socket, ZMQ_DONTWAIT) < 0)
            return GRADD_FAIL(LIMIT, "message ends inside its frames");
        total += zmq_msg_size(frame);
        more = zmq_msg_more(frame);
        if (frame == &extra) zmq_msg_close(frame);
        n++;
    }
    request->n_frames = n + 1;
    request->n_payloads = n < WIRE_MAX_PAYLOADS ? n : WIRE_MAX_PAYLOADS;
    request->payload_bytes = total;
    if (n > WIRE_MAX_PAYLOADS)
        return GRADD_FAIL(LIMIT, "message has %d frames, more than %d", n + 1,
                          WIRE_MAX_PAYLOADS + 1);
    return GRADD_OK;
}

/* Copies route and uid; false if the message does not carry what the ZAP handler guarantees. */
static bool identify(request_t *request, zmq_msg_t *id) {
    const char *address = zmq_msg_gets(&request->envelope, "Peer-Address");
    const char *user = zmq_msg_gets(&request->envelope, "User-Id");
    size_t n = zmq_msg_size(id);
    if (!address || !user || n == 0 || n > SESSION_ROUTE_BYTES) return false;
    memcpy(request->route, zmq_msg_data(id), n);
    request->n_route = (uint8_t)n;
    return parse_uid(address, strlen(address), &request->uid);
}

static request_t *receive_one(router_t *router, zmq_msg_t *id) {
    request_t *request = request_create();
    zmq_msg_t lost;
    zmq_msg_init(&lost);
    zmq_msg_t *envelope = request ? &request->envelope : &lost;
    if (!zmq_msg_more(id) || zmq_msg_recv(envelope, router->socket, ZMQ_DONTWAIT) < 0) goto drop;
    if (!request) { /* no memory: read to the end of the message */
        while (zmq_msg_more(&lost) && zmq_msg_recv(&lost, router->socket, ZMQ_DONTWAIT) >= 0)
            ;
        goto drop;
    }
    request->status = read_frames(router, request);
    request->source = zmq_msg_get(&request->envelope, ZMQ_SRCFD);
    connections_taken(request->source, request->payload_bytes + zmq_msg_size(&request->envelope),
                      request->n_frames);
    if (!identify(request, id)) goto drop;
    zmq_msg_close(&lost);
    return request;
drop:
    router->n_dropped++;
    zmq_msg_close(&lost);
    request_destroy(request);
    return NULL;
}

request_t *router_receive(router_t *router) {
    for (;;) {
        zmq_msg_t id;
        zmq_msg_init(&id);
        if (zmq_msg_recv(&id, router->socket, ZMQ_DONTWAIT) < 0) {
            zmq_msg_close(&id);
            return NULL;
        }
        router->n_messages++;
        request_t *request = receive_one(router, &id);
        zmq_msg_close(&id);
        if (request) return request;
    }
}

router_sent_t router_send(router_t *router, const uint8_t *route, size_t route_bytes,
                          const void *data, size_t bytes) {
    zmq_msg_t reply; /* before the route is sent: whatever comes next would go there, too */
    if (zmq_msg_init_size(&reply, bytes) != 0) return ROUTER_NOMEM;
    memcpy(zmq_msg_data(&reply), data, bytes);
    if (zmq_send(router->socket, route, route_bytes, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0) {
        const int error = errno;
        zmq_msg_close(&reply);
        return error == EHOSTUNREACH ? ROUTER_GONE : ROUTER_FULL;
    }
    if (zmq_msg_send(&reply, router->socket, ZMQ_DONTWAIT) >= 0) return ROUTER_SENT;
    zmq_msg_close(&reply);
    return ROUTER_GONE;
}
