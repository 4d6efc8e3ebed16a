/* One packet to an owner. See owner_command.h. */
#include "server/cli/owner_command.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "server/cli/admin.h"
#include "server/owner/state.h"
#include "shm/fdpass.h"

#define ANSWER_SECONDS  5
#define RESTART_SECONDS 60

static gradd_status_t connect_to(const char *path, int seconds, int *out_socket) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const struct timeval limit = {.tv_sec = seconds};
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

/* Sends the request, and ends it in any case. The doc points into the buffer. */
static gradd_status_t say(const rundir_t *dir, wire_out_t *request, int seconds,
                          uint8_t buffer[KEPT_REPLY_BYTES], wire_doc_t *out_doc) {
    gradd_fd_packet_t packet = {.data = buffer, .capacity = KEPT_REPLY_BYTES};
    gradd_fd_event_t event = GRADD_FD_CLOSED;
    int fd = -1;
    gradd_status_t st = connect_to(dir->ctl, seconds, &fd);
    wire_end(request);
    if (st == GRADD_OK) st = gradd_fd_send(fd, request->data, request->bytes, NULL, 0);
    wire_out_finish(request);
    if (fd < 0) return st;
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

static void begin(wire_out_t *request, const char *verb) {
    wire_begin(request);
    wire_key(request, "v");
    wire_put_text(request, verb);
}

static gradd_status_t ask(const rundir_t *dir, const char *verb, const char *name,
                          uint8_t buffer[KEPT_REPLY_BYTES], wire_doc_t *out_doc) {
    wire_out_t request = {0};
    begin(&request, verb);
    if (name) {
        wire_key(&request, "name");
        wire_put_text(&request, name);
    }
    return say(dir, &request, ANSWER_SECONDS, buffer, out_doc);
}

const msgpack_object *kept_ask(const rundir_t *dir, uint8_t buffer[KEPT_REPLY_BYTES],
                               wire_doc_t *out_doc) {
    if (ask(dir, "kept", NULL, buffer, out_doc) != GRADD_OK) return NULL;
    const msgpack_object *list = wire_get(out_doc, "kept");
    return list && list->type == MSGPACK_OBJECT_ARRAY ? list : NULL;
}

/* The failure that an answer tells. */
static gradd_status_t check(const wire_doc_t *doc) {
    const msgpack_object *ok = wire_get(doc, "ok"), *what = wire_get(doc, "what");
    if (ok && ok->type == MSGPACK_OBJECT_POSITIVE_INTEGER && ok->via.u64 == 1) return GRADD_OK;
    const bool said = what && what->type == MSGPACK_OBJECT_STR;
    return GRADD_FAIL(SESSION, "%.*s", said ? (int)what->via.str.size : 1,
                      said ? what->via.str.ptr : "?");
}

gradd_status_t owner_restart(const rundir_t *dir, const options_t *options) {
    static uint8_t buffer[KEPT_REPLY_BYTES];
    wire_out_t request = {0};
    wire_doc_t doc = {0};
    struct stat self;
    char version[24];
    if (stat("/proc/self/exe", &self) != 0)
        return GRADD_FAIL(IO, "/proc/self/exe: %s", strerror(errno));
    begin(&request, "restart");
    wire_key(&request, "format");
    wire_put_u64(&request, STATE_FORMAT);
    wire_key(&request, "device");
    wire_put_u64(&request, self.st_dev);
    wire_key(&request, "inode");
    wire_put_u64(&request, self.st_ino);
    GRADD_TRY(say(dir, &request, RESTART_SECONDS, buffer, &doc));
    const gradd_status_t st = check(&doc);
    if (st == GRADD_OK)
        printf(options->json ? "{\"restarted\": true, \"version\": \"%s\", \"pid\": %" PRId64 "}\n"
                             : "restarted: gradd %s, pid %" PRId64 "\n",
               admin_text(&doc.root, "version", version, sizeof version),
               admin_number(&doc.root, "pid"));
    wire_doc_finish(&doc);
    return st;
}

gradd_status_t kept_forget(const rundir_t *dir, const options_t *options) {
    static uint8_t buffer[KEPT_REPLY_BYTES];
    wire_doc_t doc = {0};
    GRADD_TRY(ask(dir, "forget", options->name, buffer, &doc));
    const gradd_status_t st = check(&doc);
    wire_doc_finish(&doc);
    if (st == GRADD_OK) puts("forgotten");
    return st;
}
