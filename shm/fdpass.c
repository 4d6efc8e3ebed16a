/* Sending and receiving packets with descriptors. See fdpass.h for the contract.
 *
 * Traps that the code avoids: a control buffer that is too small makes the kernel drop descriptors
 * silently (MSG_CTRUNC), and so does a process that may not open as many: both are errors, what did
 * arrive is closed, and whether the room was used up tells them apart; CMSG_SPACE rounds up and
 * would let one descriptor more in than was asked for, so the length given is CMSG_LEN; a packet
 * may carry several control messages.
 */
#include "shm/fdpass.h"
#include "shm/discard.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

/* Room for the descriptors, aligned as a control message must be. */
typedef union control_u {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(sizeof(int) * GRADD_FD_MAX)];
} control_t;

gradd_status_t gradd_fd_send(int socket, const void *data, size_t bytes, const int *fds,
                             int n_fds) {
    control_t control;
    struct iovec io = {(void *)data, bytes};
    struct msghdr message = {.msg_iov = &io, .msg_iovlen = 1};
    ssize_t sent;
    if (bytes == 0) return GRADD_FAIL(LIMIT, "an empty packet");
    if (n_fds < 0 || n_fds > GRADD_FD_MAX)
        return GRADD_FAIL(LIMIT, "%d descriptors in one packet, at most %d", n_fds, GRADD_FD_MAX);
    if (n_fds > 0) {
        size_t fd_bytes = sizeof(int) * (size_t)n_fds;
        memset(&control, 0, sizeof control);
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(fd_bytes);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(fd_bytes);
        memcpy(CMSG_DATA(header), fds, fd_bytes);
    }
    do {
        sent = sendmsg(socket, &message, MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return GRADD_FAIL(LIMIT, "the peer does not read its control socket");
    if (sent < 0 && errno == EMSGSIZE)
        return GRADD_FAIL(LIMIT, "a packet of %zu bytes is too large for the socket", bytes);
    if (sent < 0) return GRADD_FAIL(IO, "sendmsg: %s", strerror(errno));
    if ((size_t)sent != bytes)
        return GRADD_FAIL(IO, "only %zd of %zu bytes were sent", sent, bytes);
    return GRADD_OK;
}

/* Collects descriptors of every SCM_RIGHTS message; those beyond `room` are closed. Returns how
 * many came. */
static int collect(struct msghdr *message, int *fds, int room) {
    int n = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
        size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
            if (n < room)
                fds[n] = fd;
            else
                gradd_discard(fd);
            n++;
        }
    }
    return n;
}

static void discard_all(const int *fds, int n) {
    for (int i = 0; i < n; i++)
        gradd_discard(fds[i]);
}

/* A packet of which something was lost, after `n` descriptors had arrived. */
static gradd_status_t truncated(int flags, size_t capacity, int n, int max_fds) {
    struct rlimit limit = {0};
    if (flags & MSG_TRUNC)
        return GRADD_FAIL(LIMIT, "a control packet is longer than %zu bytes", capacity);
    if (n >= max_fds)
        return GRADD_FAIL(LIMIT, "a control packet carries more than %d descriptors", max_fds);
    getrlimit(RLIMIT_NOFILE, &limit);
    return GRADD_FAIL(LIMIT, "the receiver can open no more descriptors (RLIMIT_NOFILE is %llu)",
                      (unsigned long long)limit.rlim_cur);
}

gradd_status_t gradd_fd_recv(int socket, gradd_fd_packet_t *packet, gradd_fd_event_t *out_event) {
    int *fds = packet->fds;
    const int max_fds = packet->max_fds;
    control_t control;
    struct iovec io = {packet->data, packet->capacity};
    struct msghdr message = {.msg_iov = &io, .msg_iovlen = 1};
    if (max_fds < 0 || max_fds > GRADD_FD_MAX)
        return GRADD_FAIL(LIMIT, "room for %d descriptors, at most %d", max_fds, GRADD_FD_MAX);
    memset(&control, 0, sizeof control);
    message.msg_control = max_fds > 0 ? control.bytes : NULL;
    message.msg_controllen = max_fds > 0 ? CMSG_LEN(sizeof(int) * (size_t)max_fds) : 0;

    ssize_t got;
    do {
        got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    } while (got < 0 && errno == EINTR);
    bool again = got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
    bool closed = got == 0 || (got < 0 && errno == ECONNRESET);
    if (got < 0 && !again && !closed) return GRADD_FAIL(IO, "recvmsg: %s", strerror(errno));

    /* An empty packet can carry descriptors too: take them, or they would stay open for ever. */
    int n = got >= 0 ? collect(&message, fds, max_fds) : 0;
    if (got == 0) {
        discard_all(fds, n < max_fds ? n : max_fds);
        n = 0;
    }
    if (got > 0 && ((message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) || n > max_fds)) {
        discard_all(fds, n < max_fds ? n : max_fds);
        return truncated(message.msg_flags, packet->capacity, n, max_fds);
    }
    packet->bytes = got > 0 ? (size_t)got : 0;
    packet->n_fds = n;
    *out_event = again ? GRADD_FD_AGAIN : closed ? GRADD_FD_CLOSED : GRADD_FD_PACKET;
    return GRADD_OK;
}
