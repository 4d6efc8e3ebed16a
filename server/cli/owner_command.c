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
#include "server/wire/print.h"
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

/* Sends the request, and ends it in any case. The doc points into the buffer. out_fd: NULL, or gets
 * the descriptor that comes along, -1: none. */
static gradd_status_t exchange(int socket, wire_out_t *request, uint8_t buffer[KEPT_REPLY_BYTES],
                               wire_doc_t *out_doc, int *out_fd) {
    int fd = -1;
    gradd_fd_packet_t packet = {
        .data = buffer, .capacity = KEPT_REPLY_BYTES, .fds = &fd, .max_fds = 1};
    gradd_fd_event_t event = GRADD_FD_CLOSED;
    wire_end(request);
    gradd_status_t st = gradd_fd_send(socket, request->data, request->bytes, NULL, 0);
    wire_out_finish(request);
    if (st == GRADD_OK) st = gradd_fd_recv(socket, &packet, &event);
    if (st == GRADD_OK && event != GRADD_FD_PACKET)
        st = GRADD_FAIL(IO, "the daemon does not answer");
    if (st == GRADD_OK) st = wire_decode(buffer, packet.bytes, out_doc);
    if (out_fd && st == GRADD_OK)
        *out_fd = fd;
    else if (fd >= 0)
        close(fd);
    return st;
}

/* Not before the daemon has hung up, too: the next `ps` would still list the connection. */
static void hang_up(int socket) {
    char rest;
    shutdown(socket, SHUT_WR);
    while (recv(socket, &rest, sizeof rest, 0) > 0)
        ;
    close(socket);
}

/* One question on a connection of its own. */
static gradd_status_t say(const rundir_t *dir, wire_out_t *request, int seconds,
                          uint8_t buffer[KEPT_REPLY_BYTES], wire_doc_t *out_doc) {
    int socket;
    gradd_status_t st = connect_to(dir->ctl, seconds, &socket);
    if (st != GRADD_OK) {
        wire_out_finish(request);
        return st;
    }
    st = exchange(socket, request, buffer, out_doc, NULL);
    hang_up(socket);
    return st;
}

static void begin(wire_out_t *request, const char *verb) {
    wire_begin(request);
    wire_key(request, "v");
    wire_put_text(request, verb);
}

static void put_name(wire_out_t *request, const char *name) {
    wire_key(request, "name");
    wire_put_text(request, name);
}

static gradd_status_t ask(const rundir_t *dir, const char *verb, const char *name,
                          uint8_t buffer[KEPT_REPLY_BYTES], wire_doc_t *out_doc) {
    wire_out_t request = {0};
    begin(&request, verb);
    if (name) put_name(&request, name);
    return say(dir, &request, ANSWER_SECONDS, buffer, out_doc);
}

/* ---- a look at what is kept ---- */

gradd_status_t kept_open(const rundir_t *dir, const char *name, kept_look_t *out_look) {
    GRADD_TRY(connect_to(dir->ctl, ANSWER_SECONDS, &out_look->socket));
    out_look->name = name;
    return GRADD_OK;
}

gradd_status_t kept_part(kept_look_t *look, uint64_t at, kept_part_t *out_part) {
    wire_out_t request = {0};
    wire_doc_t doc = {0};
    int fd = -1;
    begin(&request, "peek");
    put_name(&request, look->name);
    wire_key(&request, "at");
    wire_put_u64(&request, at);
    GRADD_TRY(exchange(look->socket, &request, look->buffer, &doc, &fd));
    *out_part = (kept_part_t){(uint64_t)reply_number(&doc.root, "id"),
                              (uint32_t)reply_number(&doc.root, "segments"), fd};
    const gradd_status_t st = admin_check(&doc.root);
    wire_doc_finish(&doc);
    if (st == GRADD_OK && fd >= 0) return GRADD_OK;
    if (fd >= 0) close(fd);
    return st ? st : GRADD_FAIL(IO, "no descriptor of the session '%s' came", look->name);
}

void kept_close(kept_look_t *look) {
    hang_up(look->socket);
}

/* ---- whole answers ---- */

const msgpack_object *kept_ask(const rundir_t *dir, uint8_t buffer[KEPT_REPLY_BYTES],
                               wire_doc_t *out_doc) {
    if (ask(dir, "kept", NULL, buffer, out_doc) != GRADD_OK) return NULL;
    const msgpack_object *list = wire_get(out_doc, "kept");
    return list && list->type == MSGPACK_OBJECT_ARRAY ? list : NULL;
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
    const gradd_status_t st = admin_check(&doc.root);
    if (st == GRADD_OK)
        printf(options->json ? "{\"restarted\": true, \"version\": \"%s\", \"pid\": %" PRId64 "}\n"
                             : "restarted: gradd %s, pid %" PRId64 "\n",
               reply_text(&doc.root, "version", version, sizeof version),
               reply_number(&doc.root, "pid"));
    wire_doc_finish(&doc);
    return st;
}

gradd_status_t kept_forget(const rundir_t *dir, const options_t *options) {
    static uint8_t buffer[KEPT_REPLY_BYTES];
    wire_doc_t doc = {0};
    GRADD_TRY(ask(dir, "forget", options->name, buffer, &doc));
    const gradd_status_t st = admin_check(&doc.root);
    wire_doc_finish(&doc);
    if (st == GRADD_OK) puts("forgotten");
    return st;
}
