/* One packet to an owner. See kept_command.h. */
#include "server/cli/kept_command.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "shm/fdpass.h"

#define ANSWER_SECONDS 5

static gradd_status_t connect_to(const char *path, int *out_socket) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const struct timeval limit = {.tv_sec = ANSWER_SECONDS};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0) return GRADD_FAIL(IO, "socket: %s", strerror(errno));
    if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0 &&
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) == 0 &&
        connect(fd, (const struct sockaddr *)&address, sizeof address) == 0) {
        *out_socket = fd;
        return GRADD_OK;
    }
    const gradd_status_t st = GRADD_FAIL(IO, "cannot talk to %s: %s", path, strerror(errno));
    close(fd);
    return st;
}

/* The doc points into the buffer. */
static gradd_status_t ask(const rundir_t *dir, const char *verb, const char *name,
                          uint8_t buffer[KEPT_REPLY_BYTES], wire_doc_t *out_doc) {
    wire_out_t request = {0};
    gradd_fd_packet_t packet = {.data = buffer, .capacity = KEPT_REPLY_BYTES};
    gradd_fd_event_t event = GRADD_FD_CLOSED;
    int fd = -1;
    GRADD_TRY(connect_to(dir->ctl, &fd));
    wire_begin(&request);
    wire_key(&request, "v");
    wire_put_text(&request, verb);
    if (name) {
        wire_key(&request, "name");
        wire_put_text(&request, name);
    }
    wire_end(&request);
    gradd_status_t st = gradd_fd_send(fd, request.data, request.bytes, NULL, 0);
    wire_out_finish(&request);
    if (st == GRADD_OK) st = gradd_fd_recv(fd, &packet, &event);
    /* Not before the daemon has hung up, too: the next `ps` would still list the connection. */
    shutdown(fd, SHUT_WR);
    char rest;
    while (recv(fd, &rest, sizeof rest, 0) > 0)
        ;
    close(fd);
    GRADD_TRY(st);
    if (event != GRADD_FD_PACKET)
        return GRADD_FAIL(IO, "the daemon at %s does not answer", dir->ctl);
    return wire_decode(buffer, packet.bytes, out_doc);
}

const msgpack_object *kept_ask(const rundir_t *dir, uint8_t buffer[KEPT_REPLY_BYTES],
                               wire_doc_t *out_doc) {
    if (ask(dir, "kept", NULL, buffer, out_doc) != GRADD_OK) return NULL;
    const msgpack_object *list = wire_get(out_doc, "kept");
    return list && list->type == MSGPACK_OBJECT_ARRAY ? list : NULL;
}

gradd_status_t kept_forget(const rundir_t *dir, const options_t *options) {
    static uint8_t buffer[KEPT_REPLY_BYTES];
    wire_doc_t doc = {0};
    GRADD_TRY(ask(dir, "forget", options->name, buffer, &doc));
    const msgpack_object *ok = wire_get(&doc, "ok"), *what = wire_get(&doc, "what");
    gradd_status_t st = GRADD_OK;
    if (!ok || ok->type != MSGPACK_OBJECT_POSITIVE_INTEGER || ok->via.u64 != 1) {
        const bool said = what && what->type == MSGPACK_OBJECT_STR;
        st = GRADD_FAIL(SESSION, "%.*s", said ? (int)what->via.str.size : 1,
                        said ? what->via.str.ptr : "?");
    }
    wire_doc_finish(&doc);
    if (st == GRADD_OK) puts("forgotten");
    return st;
}
