/* Tests of shm/fdpass: descriptors arrive, and nothing that does not fit stays open. */
#include "tests/c/descriptors.h"
#include "tests/test.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "shm/fdpass.h"
#include "shm/segment.h"

enum { ROOM = 64 };

typedef struct received_s {
    char data[ROOM];
    size_t bytes;
    int fds[GRADD_FD_MAX];
    int n_fds;
    gradd_fd_event_t event;
} received_t;

static void make_pair(int pair[2], int flags) {
    CHECK_EQ_INT(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0, pair), 0);
}

static gradd_status_t receive(int socket, int max_fds, received_t *r) {
    memset(r, 0, sizeof *r);
    gradd_fd_packet_t packet = {
        .data = r->data, .capacity = sizeof r->data, .fds = r->fds, .max_fds = max_fds};
    gradd_status_t status = gradd_fd_recv(socket, &packet, &r->event);
    r->bytes = packet.bytes;
    r->n_fds = packet.n_fds;
    return status;
}

/* sendmsg without the checks of gradd_fd_send: what a hostile client can do. */
static void send_raw(int socket, size_t bytes, int n_fds) {
    static char data[4096];
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int) * 253)];
    } control;
    struct iovec io = {data, bytes};
    struct msghdr message = {.msg_iov = &io, .msg_iovlen = 1};
    memset(&control, 0, sizeof control);
    if (n_fds) {
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)n_fds);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)n_fds);
        int null = open("/dev/null", O_RDWR | O_CLOEXEC);
        for (int i = 0; i < n_fds; i++)
            memcpy(CMSG_DATA(header) + (size_t)i * sizeof null, &null, sizeof null);
        CHECK_EQ_INT(sendmsg(socket, &message, 0), bytes);
        close(null);
        return;
    }
    CHECK_EQ_INT(sendmsg(socket, &message, 0), bytes);
}

TEST(packet_and_segment_arrive) {
    int pair[2];
    received_t r;
    gradd_segment_t mine = GRADD_SEGMENT_INIT, theirs = GRADD_SEGMENT_INIT;
    make_pair(pair, 0);
    CHECK_OK(gradd_segment_create("test", 4096, &mine));
    CHECK_OK(gradd_fd_send(pair[0], "segment", 8, &mine.fd, 1));
    CHECK_OK(receive(pair[1], 1, &r));
    CHECK_EQ_INT(r.event, GRADD_FD_PACKET);
    CHECK_EQ_INT(r.bytes, 8);
    CHECK_EQ_STR(r.data, "segment");
    CHECK_EQ_INT(r.n_fds, 1);
    CHECK(fcntl(r.fds[0], F_GETFD) & FD_CLOEXEC);
    CHECK_OK(gradd_segment_open(r.fds[0], 4096, NULL, &theirs));
    strcpy(mine.base, "seen");
    CHECK_EQ_STR(theirs.base, "seen");
    gradd_segment_finish(&mine);
    gradd_segment_finish(&theirs);
}

TEST(packets_keep_their_borders) {
    int pair[2];
    received_t r;
    make_pair(pair, 0);
    CHECK_OK(gradd_fd_send(pair[0], "one", 4, NULL, 0));
    CHECK_OK(gradd_fd_send(pair[0], "second", 7, NULL, 0));
    CHECK_OK(receive(pair[1], GRADD_FD_MAX, &r));
    CHECK_EQ_INT(r.bytes, 4);
    CHECK_OK(receive(pair[1], 0, &r));
    CHECK_EQ_STR(r.data, "second");
    CHECK_EQ_INT(r.n_fds, 0);
}

TEST(as_many_descriptors_as_promised) {
    int pair[2], fds[GRADD_FD_MAX];
    received_t r;
    make_pair(pair, 0);
    for (int i = 0; i < GRADD_FD_MAX; i++)
        fds[i] = open("/dev/null", O_RDWR | O_CLOEXEC);
    CHECK_OK(gradd_fd_send(pair[0], "x", 1, fds, GRADD_FD_MAX));
    CHECK_OK(receive(pair[1], GRADD_FD_MAX, &r));
    CHECK_EQ_INT(r.n_fds, GRADD_FD_MAX);
    for (int i = 0; i < r.n_fds; i++)
        CHECK(fcntl(r.fds[i], F_GETFD) & FD_CLOEXEC);
    CHECK_STATUS(GRADD_E_LIMIT, gradd_fd_send(pair[0], "x", 1, fds, GRADD_FD_MAX + 1));
    CHECK_STATUS(GRADD_E_LIMIT, gradd_fd_send(pair[0], "x", 1, fds, -1));
    CHECK_STATUS(GRADD_E_LIMIT, gradd_fd_send(pair[0], "", 0, NULL, 0));
}

/* Each row sends more descriptors than there is room for: none may survive. */
TEST(too_many_descriptors_are_all_closed) {
    const int rows[][2] = {
        {1,   0 },
        {2,   1 },
        {3,   1 },
        {4,   3 },
        {100, 1 },
        {253, 16},
        {17,  16}
    };
    int pair[2];
    received_t r;
    make_pair(pair, 0);
    int before = open_descriptors();
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        send_raw(pair[0], 4, rows[i][0]);
        CHECK_STATUS(GRADD_E_LIMIT, receive(pair[1], rows[i][1], &r));
        CHECK_ERROR_HAS("descriptors");
        CHECK_EQ_INT(settled_descriptors(before), before);
    }
    CHECK_OK(gradd_fd_send(pair[0], "usable", 7, NULL, 0));
    CHECK_OK(receive(pair[1], 1, &r));
    CHECK_EQ_STR(r.data, "usable");
}

/* The kernel reports this like too many: the sender must not be blamed for it. */
TEST(a_receiver_out_of_descriptors_says_so) {
    int pair[2];
    received_t r;
    struct rlimit limit;
    make_pair(pair, 0);
    int before = open_descriptors();
    CHECK_EQ_INT(getrlimit(RLIMIT_NOFILE, &limit), 0);
    for (int n_free = 0; n_free < 2; n_free++) {
        send_raw(pair[0], 4, 3);
        int next = pair[1] + 1; /* the lowest free number */
        while (fcntl(next, F_GETFD) >= 0)
            next++;
        struct rlimit lower = {(rlim_t)(next + n_free), limit.rlim_max};
        CHECK_EQ_INT(setrlimit(RLIMIT_NOFILE, &lower), 0);
        CHECK_STATUS(GRADD_E_LIMIT, receive(pair[1], 4, &r));
        CHECK_ERROR_HAS("can open no more descriptors (RLIMIT_NOFILE is ");
        CHECK_EQ_INT(setrlimit(RLIMIT_NOFILE, &limit), 0);
        CHECK_EQ_INT(settled_descriptors(before), before);
    }
    CHECK_OK(gradd_fd_send(pair[0], "usable", 7, NULL, 0));
    CHECK_OK(receive(pair[1], 1, &r));
    CHECK_EQ_STR(r.data, "usable");
}

TEST(too_long_packet_closes_its_descriptors) {
    int pair[2];
    received_t r;
    make_pair(pair, 0);
    int before = open_descriptors();
    send_raw(pair[0], ROOM + 1, 2);
    CHECK_STATUS(GRADD_E_LIMIT, receive(pair[1], 4, &r));
    CHECK_ERROR_HAS("longer than 64 bytes");
    CHECK_EQ_INT(settled_descriptors(before), before);
    send_raw(pair[0], ROOM, 0);
    CHECK_OK(receive(pair[1], 4, &r));
    CHECK_EQ_INT(r.bytes, ROOM);
}

TEST(empty_packet_leaves_no_descriptors) {
    int pair[2];
    received_t r;
    make_pair(pair, 0);
    int before = open_descriptors();
    send_raw(pair[0], 0, 3);
    CHECK_OK(receive(pair[1], 4, &r));
    CHECK_EQ_INT(r.event, GRADD_FD_CLOSED);
    CHECK_EQ_INT(r.n_fds, 0);
    CHECK_EQ_INT(settled_descriptors(before), before);
}

TEST(nothing_there_and_closed_are_told_apart) {
    int pair[2];
    received_t r;
    make_pair(pair, SOCK_NONBLOCK);
    CHECK_OK(receive(pair[1], 1, &r));
    CHECK_EQ_INT(r.event, GRADD_FD_AGAIN);
    CHECK_EQ_INT(r.bytes, 0);
    CHECK_OK(gradd_fd_send(pair[0], "last", 5, NULL, 0));
    close(pair[0]);
    CHECK_OK(receive(pair[1], 1, &r));
    CHECK_EQ_STR(r.data, "last");
    CHECK_OK(receive(pair[1], 1, &r));
    CHECK_EQ_INT(r.event, GRADD_FD_CLOSED);
}

TEST(a_peer_that_does_not_read_or_is_gone) {
    int pair[2];
    gradd_status_t status = GRADD_OK;
    make_pair(pair, SOCK_NONBLOCK);
    for (int i = 0; i < 100000 && status == GRADD_OK; i++)
        status = gradd_fd_send(pair[0], "0123456789", 10, NULL, 0);
    CHECK_EQ_INT(status, GRADD_E_LIMIT);
    CHECK_ERROR_HAS("does not read");
    close(pair[1]);
    CHECK_STATUS(GRADD_E_IO, gradd_fd_send(pair[0], "x", 1, NULL, 0)); /* and no SIGPIPE */
}
