/* Messages between owner and worker. See link.h. */
#include "server/session/link.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

#include "shm/fdpass.h"

gradd_status_t link_create(int ends[2]) {
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0)
        return GRADD_OK;
    return GRADD_FAIL(IO, "socketpair: %s", strerror(errno));
}

gradd_status_t link_send(int link, const link_message_t *message, const int *fds, int n_fds) {
    return gradd_fd_send(link, message, sizeof *message, fds, n_fds);
}

bool link_has_room(int link) {
    struct pollfd p = {.fd = link, .events = POLLOUT};
    return poll(&p, 1, 0) == 1 && (p.revents & (POLLOUT | POLLHUP)) == POLLOUT;
}

bool link_is_open(int link) {
    struct pollfd p = {.fd = link};
    return poll(&p, 1, 0) == 0;
}

bool link_comes(int link, link_kind_t kind) {
    link_message_t message;
    const ssize_t got = recv(link, &message, sizeof message, MSG_PEEK | MSG_DONTWAIT);
    return got == (ssize_t)sizeof message && message.kind == kind;
}

/* No map of msgpack, as all other packets are. */
static const char last[] = "end";

void link_say_end(int end) {
    gradd_fd_send(end, last, sizeof last, NULL, 0);
}

bool link_is_last(const void *packet, size_t bytes) {
    return bytes == sizeof last && memcmp(packet, last, bytes) == 0;
}

gradd_status_t link_receive(int link, link_message_t *out_message, int fds[LINK_MAX_FDS],
                            bool *out_any) {
    gradd_fd_packet_t packet = {
        .data = out_message, .capacity = sizeof *out_message, .fds = fds, .max_fds = LINK_MAX_FDS};
    gradd_fd_event_t event;
    *out_any = false;
    for (int i = 0; i < LINK_MAX_FDS; i++)
        fds[i] = -1;
    GRADD_TRY(gradd_fd_recv(link, &packet, &event));
    if (event == GRADD_FD_AGAIN) return GRADD_OK;
    if (event == GRADD_FD_CLOSED || packet.bytes != sizeof *out_message)
        return GRADD_FAIL(IO, "the other side of the link has ended");
    for (int i = packet.n_fds; i < LINK_MAX_FDS; i++)
        fds[i] = -1;
    *out_any = true;
    return GRADD_OK;
}
