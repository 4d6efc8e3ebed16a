/* Tests of shm/lease: identifying the peer in both ways, and what happens to memory when it dies.
 *
 * Clients are forked processes that connect to a listening socket, as real ones do, so that the
 * credentials are those of another process.
 */
#include "tests/c/descriptors.h"
#include "tests/test.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "shm/fdpass.h"
#include "shm/lease.h"

enum { SIZE = 1 << 20 };

static const gradd_lease_method_t methods[] = {GRADD_LEASE_AUTO, GRADD_LEASE_PEERPIDFD,
                                               GRADD_LEASE_PIDFD_OPEN};

typedef struct client_s {
    pid_t pid;
    int socket; /* our end of the connection */
    uint64_t accepted_ticks;
} client_t;

/* Kilobytes of shared memory that this process has mapped. */
static long mapped_segments(void) {
    char line[512];
    long n = 0;
    FILE *maps = fopen("/proc/self/maps", "re");
    while (fgets(line, sizeof line, maps))
        n += strstr(line, "memfd:lease") != NULL;
    fclose(maps);
    return n;
}

/* The client: connects, sends one segment, optionally forks a child that keeps everything open (as
 * DataLoader workers do), says so and waits. */
static _Noreturn void client_main(const struct sockaddr_un *address, bool with_child) {
    gradd_segment_t segment = GRADD_SEGMENT_INIT;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    CHECK_EQ_INT(connect(fd, (const struct sockaddr *)address, sizeof *address), 0);
    CHECK_OK(gradd_segment_create("lease", SIZE, &segment));
    if (with_child && fork() == 0)
        for (;;)
            pause();
    CHECK_OK(gradd_fd_send(fd, "segment", 8, &segment.fd, 1));
    for (;;)
        pause();
}

static client_t start_client(bool with_child) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    client_t client;
    /* Linux picks a free abstract address; fine for a test, never for the daemon. */
    int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    socklen_t size = sizeof address;
    snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "gradd-test-lease-%d-%ld",
             (int)getpid(), random());
    CHECK_EQ_INT(bind(listener, (struct sockaddr *)&address, size), 0);
    CHECK_EQ_INT(listen(listener, 1), 0);
    fflush(NULL);
    client.pid = fork();
    if (client.pid == 0) client_main(&address, with_child);
    client.socket = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    client.accepted_ticks = gradd_lease_clock_ticks();
    CHECK(client.socket >= 0);
    close(listener);
    return client;
}

static void kill_client(const client_t *client) {
    CHECK_EQ_INT(kill(client->pid, SIGKILL), 0);
    CHECK_EQ_INT(waitpid(client->pid, NULL, 0), client->pid);
}

static gradd_status_t identify(const client_t *client, gradd_lease_method_t method,
                               gradd_peer_t *peer) {
    gradd_status_t status =
        gradd_peer_identify(client->socket, client->accepted_ticks, method, peer);
    if (status == GRADD_E_UNSUPPORTED && method == GRADD_LEASE_PEERPIDFD)
        test_skip("%s", gradd_error_message());
    return status;
}

/* Opens the lease and takes the segment that the client has sent, as id 1. */
static gradd_lease_t *lease_of(const client_t *client, gradd_lease_method_t method) {
    gradd_peer_t peer = GRADD_PEER_INIT;
    gradd_lease_t *lease = NULL;
    char data[16];
    int fd;
    gradd_fd_packet_t packet = {.data = data, .capacity = sizeof data, .fds = &fd, .max_fds = 1};
    gradd_fd_event_t event;
    CHECK_OK(identify(client, method, &peer));
    CHECK_OK(gradd_lease_create(&peer, (gradd_handle_limits_t){.segments = 4}, &lease));
    CHECK_EQ_INT(peer.pidfd, -1);
    CHECK_OK(gradd_fd_recv(client->socket, &packet, &event));
    CHECK_EQ_INT(packet.n_fds, 1);
    CHECK_OK(gradd_lease_add(lease, 1, fd, SIZE, NULL));
    return lease;
}

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

static void check_identity(gradd_lease_method_t method) {
    client_t client = start_client(false);
    gradd_peer_t peer = GRADD_PEER_INIT;
    CHECK_OK(identify(&client, method, &peer));
    CHECK_EQ_INT(peer.pid, client.pid);
    CHECK_EQ_INT(peer.uid, getuid());
    CHECK_EQ_INT(peer.gid, getgid());
    CHECK(peer.pidfd >= 0);
    CHECK(peer.start_ticks > 0 && peer.start_ticks <= client.accepted_ticks);
    CHECK(gradd_peer_alive(&peer));
    kill(client.pid, SIGKILL);
    struct pollfd p = {.fd = peer.pidfd, .events = POLLIN};
    CHECK_EQ_INT(poll(&p, 1, 5000), 1);
    CHECK(!gradd_peer_alive(&peer)); /* a zombie until we wait for it, and dead all the same */
    CHECK_EQ_INT(waitpid(client.pid, NULL, 0), client.pid);
    CHECK(!gradd_peer_alive(&peer));
    gradd_peer_finish(&peer);
    gradd_peer_finish(&peer);
    CHECK(!gradd_peer_alive(&peer));
}

TEST(identity_whatever_the_kernel_has) {
    check_identity(GRADD_LEASE_AUTO);
}

TEST(identity_by_peerpidfd) {
    check_identity(GRADD_LEASE_PEERPIDFD);
}

TEST(identity_by_pidfd_open) {
    check_identity(GRADD_LEASE_PIDFD_OPEN);
}

TEST(a_dead_peer_is_not_identified) {
    for (size_t i = 0; i < sizeof methods / sizeof methods[0]; i++) {
        client_t client = start_client(false);
        gradd_peer_t peer = GRADD_PEER_INIT;
        kill_client(&client);
        int before = open_descriptors();
        CHECK_STATUS(GRADD_E_STALE, identify(&client, methods[i], &peer));
        CHECK_EQ_INT(peer.pidfd, -1);
        CHECK_EQ_INT(open_descriptors(), before);
        close(client.socket);
    }
}

/* A process that has the pid now but started after the connection was made: as after pid reuse. */
TEST(a_later_process_is_not_the_peer) {
    client_t client = start_client(false);
    gradd_peer_t peer = GRADD_PEER_INIT;
    CHECK_OK(identify(&client, GRADD_LEASE_PIDFD_OPEN, &peer));
    uint64_t started = peer.start_ticks;
    gradd_peer_finish(&peer);
    CHECK_STATUS(GRADD_E_STALE,
                 gradd_peer_identify(client.socket, started - 1, GRADD_LEASE_PIDFD_OPEN, &peer));
    CHECK_ERROR_HAS("started after");
    CHECK_OK(gradd_peer_identify(client.socket, started, GRADD_LEASE_PIDFD_OPEN, &peer));
    gradd_peer_finish(&peer);
    kill_client(&client);
}

TEST(not_a_unix_socket) {
    gradd_peer_t peer = GRADD_PEER_INIT;
    int pipes[2];
    CHECK_EQ_INT(pipe(pipes), 0);
    CHECK_STATUS(GRADD_E_IO, gradd_peer_identify(pipes[0], 0, GRADD_LEASE_AUTO, &peer));
    CHECK(gradd_peer_identify(socket(AF_INET, SOCK_STREAM, 0), 0, GRADD_LEASE_AUTO, &peer) !=
          GRADD_OK);
}

/* The heart: kill -9 of a client whose forked child keeps socket and memory open. */
static void check_death(gradd_lease_method_t method) {
    int descriptors = open_descriptors();
    client_t client = start_client(true);
    gradd_lease_t *lease = lease_of(&client, method);
    void *p;
    CHECK_OK(gradd_handle_resolve(gradd_lease_table(lease), 1, 0, SIZE, 64, &p));
    memset(p, 1, SIZE);
    CHECK_EQ_INT(mapped_segments(), 1);

    double start = now_ms();
    kill_client(&client);
    struct pollfd by_pidfd = {.fd = gradd_lease_pidfd(lease), .events = POLLIN};
    CHECK_EQ_INT(poll(&by_pidfd, 1, 1000), 1);
    struct pollfd by_socket = {.fd = client.socket, .events = POLLIN};
    CHECK_EQ_INT(poll(&by_socket, 1, 0), 0); /* the fork holds it: a hang-up would say nothing */
    memset(p, 2, SIZE); /* our mapping keeps the memory: no fault after the owner's death */
    gradd_lease_end(lease);
    CHECK_EQ_INT(mapped_segments(), 0);
    CHECK(now_ms() - start < 1000);
    gradd_lease_end(lease);
    CHECK_STATUS(GRADD_E_STALE, gradd_handle_resolve(gradd_lease_table(lease), 1, 0, 1, 1, &p));
    gradd_lease_destroy(lease);
    close(client.socket);
    CHECK_EQ_INT(open_descriptors(), descriptors);
}

TEST(death_frees_memory_by_peerpidfd) {
    check_death(GRADD_LEASE_PEERPIDFD);
}

TEST(death_frees_memory_by_pidfd_open) {
    check_death(GRADD_LEASE_PIDFD_OPEN);
}

TEST(a_run_in_progress_keeps_its_memory) {
    client_t client = start_client(false);
    gradd_lease_t *lease = lease_of(&client, GRADD_LEASE_AUTO);
    gradd_handle_table_t *table = gradd_lease_table(lease);
    void *p;
    CHECK_OK(gradd_handle_retain(table, 1));
    CHECK_OK(gradd_handle_resolve(table, 1, 0, SIZE, 64, &p));
    kill_client(&client);
    gradd_lease_end(lease);
    CHECK_EQ_INT(mapped_segments(), 1);
    memset(p, 3, SIZE);
    gradd_handle_release(table, 1);
    CHECK_EQ_INT(mapped_segments(), 0);
    gradd_lease_destroy(lease);
}

TEST(refused_descriptors_are_closed) {
    client_t client = start_client(false);
    gradd_lease_t *lease = lease_of(&client, GRADD_LEASE_AUTO);
    gradd_segment_t segment = GRADD_SEGMENT_INIT;
    CHECK_OK(gradd_segment_create("mine", SIZE, &segment));
    int before = open_descriptors();
    CHECK_STATUS(GRADD_E_SHM, gradd_lease_add(lease, 2, dup(segment.fd), SIZE + 1, NULL));
    CHECK_ERROR_HAS("segment 2: ");
    CHECK_STATUS(GRADD_E_SHM, gradd_lease_add(lease, 1, dup(segment.fd), SIZE, NULL));
    CHECK_STATUS(GRADD_E_SHM, gradd_lease_add(lease, 2, dup(STDIN_FILENO), SIZE, NULL));
    CHECK_STATUS(GRADD_E_SHM, gradd_lease_add(lease, 2, -1, SIZE, NULL));
    CHECK_EQ_INT(settled_descriptors(before), before);
    gradd_lease_end(lease);
    CHECK_STATUS(GRADD_E_STALE, gradd_lease_add(lease, 3, dup(segment.fd), SIZE, NULL));
    CHECK_EQ_INT(open_descriptors(), before);
    gradd_segment_finish(&segment);
    gradd_lease_destroy(lease);
    gradd_lease_destroy(NULL);
    kill_client(&client);
}

TEST_LIMIT(many_clients_leave_nothing, 30) {
    int descriptors = open_descriptors();
    for (int i = 0; i < 100; i++) {
        client_t client = start_client(false);
        gradd_lease_t *lease = lease_of(&client, methods[i % 2 ? 0 : 2]);
        kill_client(&client);
        gradd_lease_destroy(lease);
        close(client.socket);
    }
    CHECK_EQ_INT(open_descriptors(), descriptors);
    CHECK_EQ_INT(mapped_segments(), 0);
}
