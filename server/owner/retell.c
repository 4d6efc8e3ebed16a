/* See retell.h. */
#include "server/owner/retell.h"

#include <string.h>
#include <unistd.h>

#include "server/session/link.h"
#include "shm/fdpass.h"

#define ANSWER_BYTES (64 << 10)

bool retell_wait(relay_client_t *client) {
    client->dropped |= client->in_flight && !client->moves;
    client->n_tries = client->moves ? client->n_tries + 1 : 0;
    client->moves = false;
    relay_drop_packet(client); /* the client says it again */
    if (client->drains || client->leaves) return false;
    if (client->spoken && (!client->movable || !client->hello.packet)) return false;
    if (client->n_tries >= RETELL_MAX_TRIES) return false;
    if (client->inner >= 0) close(client->inner);
    client->inner = -1;
    client->lost_ms = 0;
    client->waits = true;
    return true;
}

/* What is to be said next: hello, the words if there are any, each segment; NULL: all is said. */
static const held_segment_t *next(const relay_client_t *client) {
    const int n = client->n_told - 1 - (client->words.packet != NULL);
    if (client->n_told == 0) return &client->hello;
    if (n < 0) return &client->words;
    return n < (int)client->n_segments ? &client->segments[n] : NULL;
}

static bool tell_client(relay_client_t *client) {
    wire_out_t *notice = &client->notice;
    wire_key(notice, "dropped");
    wire_put_u64(notice, client->dropped);
    wire_end(notice);
    const bool sent = !notice->failed && gradd_fd_send(client->outer, notice->data, notice->bytes,
                                                       NULL, 0) == GRADD_OK;
    wire_out_finish(notice);
    client->moves = client->waits = client->dropped = false;
    client->n_tries = 0;
    return sent;
}

static relay_state_t say_next(relay_client_t *client) {
    const held_segment_t *said = next(client);
    if (!said) return tell_client(client) ? RELAY_OPEN : RELAY_OVER;
    int fd = said->fd;
    return relay_pass(
        client, &(gradd_fd_packet_t){
                    .data = said->packet, .bytes = said->n_bytes, .fds = &fd, .n_fds = fd >= 0});
}

relay_state_t retell_begin(relay_client_t *client, int inner) {
    client->inner = inner;
    client->moves = client->waits = client->spoken; /* else there is nothing to say */
    client->n_told = 0;
    return client->moves ? say_next(client) : RELAY_OPEN;
}

static void put_value(wire_out_t *out, const msgpack_object *value) {
    char text[256];
    switch (value->type) {
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
        wire_put_u64(out, value->via.u64);
        break;
    case MSGPACK_OBJECT_BIN:
        wire_put_bytes(out, value->via.bin.ptr, value->via.bin.size);
        break;
    case MSGPACK_OBJECT_STR:
        snprintf(text, sizeof text, "%.*s", (int)value->via.str.size, value->via.str.ptr);
        wire_put_text(out, text);
        break;
    default:
        wire_put_nil(out);
    }
}

/* The worker's answer to hello, under another name. */
static void begin_notice(wire_out_t *out, const wire_doc_t *answer) {
    const msgpack_object_map *map = &answer->root.via.map;
    wire_begin(out);
    wire_key(out, "v");
    wire_put_text(out, "replaced");
    for (uint32_t i = 0; i < map->size; i++) {
        char key[WIRE_MAX_VERB + 1];
        const msgpack_object_str *given = &map->ptr[i].key.via.str;
        snprintf(key, sizeof key, "%.*s", (int)given->size, given->ptr);
        if (!strcmp(key, "ok") || !strcmp(key, "q")) continue;
        wire_key(out, key);
        put_value(out, &map->ptr[i].val);
    }
}

relay_state_t retell_go_on(relay_client_t *client) {
    static uint8_t buffer[ANSWER_BYTES]; /* an owner has one thread */
    gradd_fd_packet_t packet = {.data = buffer, .capacity = sizeof buffer};
    gradd_fd_event_t event;
    wire_doc_t answer;
    if (gradd_fd_recv(client->inner, &packet, &event) != GRADD_OK || event == GRADD_FD_CLOSED)
        return RELAY_LOST;
    if (event == GRADD_FD_AGAIN || client->leaves) return RELAY_OPEN;
    if (link_is_last(buffer, packet.bytes)) return RELAY_OVER;
    if (wire_decode(buffer, packet.bytes, &answer) != GRADD_OK) return RELAY_OVER;
    const bool accepted = relay_is_ok(&answer);
    if (accepted && client->n_told == 0) begin_notice(&client->notice, &answer);
    wire_doc_finish(&answer);
    client->n_told++;
    return accepted ? say_next(client) : RELAY_OVER;
}
