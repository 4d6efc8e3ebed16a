/* Packets between clients and the worker. See relay.h. */
#include "server/owner/relay.h"

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/host/log.h"
#include "server/session/link.h"
#include "server/wire/wire.h"
#include "shm/discard.h"
#include "shm/fdpass.h"

#define PACKET_BYTES (64 << 10)

static uint8_t buffer[PACKET_BYTES]; /* of the packet in hand; an owner has one thread */

relay_client_t *relay_create(uint32_t number, int outer, const gradd_peer_t *peer) {
    relay_client_t *client = calloc(1, sizeof *client);
    if (!client) return NULL;
    client->number = number;
    client->outer = outer;
    client->inner = -1;
    client->hello.fd = client->words.fd = -1;
    client->peer = *peer;
    return client;
}

void relay_drop_packet(relay_client_t *client) {
    for (int i = 0; i < client->n_fds; i++)
        gradd_discard(client->fds[i]);
    client->n_fds = 0;
    client->change = RELAY_NOTHING;
    free(client->packet);
    client->packet = NULL;
    client->in_flight = false;
}

void relay_let_go(held_segment_t *held) {
    gradd_discard(held->fd);
    free(held->packet);
    *held = (held_segment_t){.fd = -1};
}

void relay_destroy(relay_client_t *client) {
    if (!client) return;
    relay_drop_packet(client);
    for (uint32_t i = 0; i < client->n_segments; i++)
        relay_let_go(&client->segments[i]);
    free(client->segments);
    relay_let_go(&client->hello);
    relay_let_go(&client->words);
    wire_out_finish(&client->notice);
    if (client->inner >= 0) close(client->inner);
    gradd_peer_finish(&client->peer);
    if (client->outer >= 0) close(client->outer); /* last: it may free what it has lent */
    free(client);
}

/* ---- what a packet is about; whatever cannot be read here, the worker refuses ---- */

static bool is_text(const msgpack_object *o, const char *text) {
    return o && o->type == MSGPACK_OBJECT_STR && o->via.str.size == strlen(text) &&
           memcmp(o->via.str.ptr, text, o->via.str.size) == 0;
}

static bool is_set(const msgpack_object *o) {
    return o && (o->type == MSGPACK_OBJECT_BOOLEAN
                     ? o->via.boolean
                     : o->type == MSGPACK_OBJECT_POSITIVE_INTEGER && o->via.u64 == 1);
}

static relay_change_t change_of(const wire_doc_t *doc) {
    const msgpack_object *verb = wire_get(doc, "v"), *id = wire_get(doc, "id");
    if (is_text(verb, "hello")) return RELAY_HELLO;
    if (is_text(verb, "timeline")) return RELAY_WORDS;
    if (!id || id->type != MSGPACK_OBJECT_POSITIVE_INTEGER) return RELAY_NOTHING;
    if (is_text(verb, "segment")) return RELAY_ADD;
    return is_text(verb, "unsegment") ? RELAY_REMOVE : RELAY_NOTHING;
}

/* Notes what a packet would change, with a copy of it: without memory for that, or if it is too
 * long, nothing is kept, and the client is not moved to another worker. */
static void note(relay_client_t *client, const wire_doc_t *doc, size_t bytes) {
    client->change = change_of(doc);
    client->reads_replaced = is_set(wire_get(doc, "replaced"));
    if (client->change == RELAY_ADD || client->change == RELAY_REMOVE)
        client->id = wire_get(doc, "id")->via.u64;
    if (client->change == RELAY_NOTHING || client->change == RELAY_REMOVE) return;
    client->packet = bytes <= RELAY_MAX_KEPT ? malloc(bytes) : NULL;
    client->n_bytes = (uint32_t)bytes;
    if (client->packet) memcpy(client->packet, buffer, bytes);
}

bool relay_is_ok(const wire_doc_t *answer) {
    return is_set(wire_get(answer, "ok"));
}

/* Whether a worker's answer can be read, and whether it says ok. */
static bool read_answer(size_t bytes, bool *out_ok) {
    wire_doc_t doc;
    if (wire_decode(buffer, bytes, &doc) != GRADD_OK) return false;
    *out_ok = relay_is_ok(&doc);
    wire_doc_finish(&doc);
    return true;
}

/* The packet in flight, and its descriptor, become the client's. */
static held_segment_t take_packet(relay_client_t *client) {
    const held_segment_t held = {client->id, client->n_fds > 0 ? client->fds[0] : -1,
                                 client->packet, client->n_bytes};
    if (client->n_fds > 0) client->fds[0] = -1;
    if (!client->packet) client->movable = false;
    client->packet = NULL;
    return held;
}

static bool add(relay_client_t *client) {
    if (client->n_segments == client->segment_capacity) {
        const uint32_t capacity = client->segment_capacity ? 2 * client->segment_capacity : 8;
        held_segment_t *segments = realloc(client->segments, capacity * sizeof *segments);
        if (!segments) return false;
        client->segments = segments;
        client->segment_capacity = capacity;
    }
    client->segments[client->n_segments++] = take_packet(client);
    return true;
}

static void drop(relay_client_t *client) {
    for (uint32_t i = 0; i < client->n_segments; i++) {
        if (client->segments[i].id != client->id) continue;
        relay_let_go(&client->segments[i]);
        client->segments[i] = client->segments[--client->n_segments];
        return;
    }
}

/* The worker has agreed. False without memory. */
static bool change(relay_client_t *client) {
    switch (client->change) {
    case RELAY_HELLO:
        relay_let_go(&client->hello);
        client->movable =
            client->reads_replaced && client->n_segments == 0 && !client->words.packet;
        client->hello = take_packet(client);
        return true;
    case RELAY_WORDS:
        client->words = take_packet(client);
        return true;
    case RELAY_ADD:
        return add(client);
    case RELAY_REMOVE:
        drop(client);
        return true;
    case RELAY_NOTHING:
        break;
    }
    return true;
}

/* ---- the two ways ---- */

/* A packet with too many descriptors, or too long, or without memory to read it. */
static bool refuse(const relay_client_t *client, gradd_status_t st) {
    wire_out_t reply = {0};
    wire_reply_fail(&reply, 0, st, NULL, gradd_error_message(), "alive");
    const bool sent =
        !reply.failed && gradd_fd_send(client->outer, reply.data, reply.bytes, NULL, 0) == GRADD_OK;
    wire_out_finish(&reply);
    return sent;
}

int relay_find(const relay_client_t *client, uint64_t id) {
    for (uint32_t i = 0; i < client->n_segments; i++)
        if (client->segments[i].id == id) return client->segments[i].fd;
    return -1;
}

void relay_leave(relay_client_t *client) {
    client->leaves = true;
    shutdown(client->inner, SHUT_WR); /* it has a worker */
    if (client->outer >= 0) close(client->outer);
    client->outer = -1;
}

relay_state_t relay_pass(const relay_client_t *client, const gradd_fd_packet_t *packet) {
    const gradd_status_t st =
        gradd_fd_send(client->inner, packet->data, packet->bytes, packet->fds, packet->n_fds);
    /* If the worker has hung up, or died, its end of the pair tells. */
    if (st == GRADD_OK || !link_is_open(client->inner)) return RELAY_OPEN;
    log_event(LOG_WARN, "not_passed_on", "session=%u pid=%d what=\"%s\"", client->number,
              (int)client->peer.pid, gradd_error_message());
    return RELAY_OVER;
}

relay_state_t relay_from_client(relay_client_t *client, relay_own_t own, void *context) {
    gradd_fd_packet_t packet = {
        .data = buffer, .capacity = sizeof buffer, .fds = client->fds, .max_fds = RELAY_MAX_FDS};
    gradd_fd_event_t event;
    const gradd_status_t st = gradd_fd_recv(client->outer, &packet, &event);
    if (st == GRADD_E_LIMIT) return refuse(client, st) ? RELAY_OPEN : RELAY_OVER;
    if (st != GRADD_OK) return RELAY_OVER;
    if (event == GRADD_FD_AGAIN) return RELAY_OPEN;
    if (event == GRADD_FD_CLOSED) { /* memory that it has lent may be open in a device */
        client->drains = true;
        shutdown(client->inner, SHUT_WR);
        return RELAY_OPEN;
    }
    client->n_fds = packet.n_fds;
    wire_doc_t doc;
    bool sent;
    const gradd_status_t decoded = wire_decode(buffer, packet.bytes, &doc);
    if (decoded == GRADD_E_NOMEM) { /* it may be for the owner itself */
        relay_drop_packet(client);
        return refuse(client, decoded) ? RELAY_OPEN : RELAY_OVER;
    }
    if (decoded == GRADD_OK) {
        const bool is_own = own(context, client, &doc, &sent);
        if (!is_own) note(client, &doc, packet.bytes);
        wire_doc_finish(&doc);
        if (is_own) {
            relay_drop_packet(client);
            return sent ? RELAY_OPEN : RELAY_OVER;
        }
    }
    client->waits = client->in_flight = client->spoken = true;
    return relay_pass(client, &packet);
}

relay_state_t relay_from_worker(relay_client_t *client) {
    gradd_fd_packet_t packet = {.data = buffer, .capacity = sizeof buffer};
    gradd_fd_event_t event;
    if (gradd_fd_recv(client->inner, &packet, &event) != GRADD_OK || event == GRADD_FD_CLOSED)
        return RELAY_LOST;
    if (event == GRADD_FD_AGAIN) return RELAY_OPEN;
    if (link_is_last(buffer, packet.bytes)) return RELAY_OVER;
    if (client->leaves) return RELAY_OPEN;
    bool ok = false, kept = client->change == RELAY_NOTHING;
    if (!kept) kept = read_answer(packet.bytes, &ok) && (!ok || change(client));
    relay_drop_packet(client);
    client->waits = false;
    kept = kept && gradd_fd_send(client->outer, buffer, packet.bytes, NULL, 0) == GRADD_OK;
    return kept ? RELAY_OPEN : RELAY_OVER;
}
