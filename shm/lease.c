/* Peer identity and the life of what a peer lends. See lease.h for the contract.
 *
 * A pid alone says nothing: it may have been given to another process. SO_PEERPIDFD names the very
 * process that connected. Without it, pidfd_open of the SO_PEERCRED pid is believed only if the
 * process has the same start time before and after, started no later than the connection was
 * accepted, and has the uid that the kernel recorded for the connection; a process that inherited
 * the pid after the client's death started later and fails the second check.
 */
#include "shm/lease.h"
#include "shm/discard.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5; older headers lack the name */
#endif

struct gradd_lease_s {
    gradd_peer_t peer;           /* Owned */
    gradd_handle_table_t *table; /* Owned */
    atomic_bool ended;
    uint64_t owner; /* of its segments with a header; 0 = there was none yet */
};

uint64_t gradd_lease_clock_ticks(void) {
    struct timespec now;
    uint64_t hz = (uint64_t)sysconf(_SC_CLK_TCK);
    clock_gettime(CLOCK_BOOTTIME, &now);
    return (uint64_t)now.tv_sec * hz + (uint64_t)now.tv_nsec * hz / 1000000000u;
}

/* Field 22 of /proc/PID/stat. The command in field 2 may hold spaces and brackets, so counting
 * starts behind the last closing bracket. 0: no such process. */
static uint64_t read_start_ticks(pid_t pid) {
    char path[64], text[2048];
    uint64_t ticks = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    if (got <= 0) return 0;
    text[got] = 0;
    char *field = strrchr(text, ')');
    for (int i = 2; field && i < 22; i++)
        field = strchr(field + 1, ' ');
    if (field) ticks = strtoull(field + 1, NULL, 10);
    return ticks;
}

static gradd_status_t gone(pid_t pid) {
    return GRADD_FAIL(STALE, "the client process %d is gone", (int)pid);
}

static gradd_status_t by_peerpidfd(int socket, gradd_peer_t *peer) {
    socklen_t size = sizeof peer->pidfd;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &peer->pidfd, &size) == 0) {
        fcntl(peer->pidfd, F_SETFD, FD_CLOEXEC);
        return GRADD_OK;
    }
    peer->pidfd = -1;
    if (errno == ENOPROTOOPT)
        return GRADD_FAIL(UNSUPPORTED, "this kernel has no SO_PEERPIDFD (Linux 6.5)");
    if (errno == ESRCH || errno == EINVAL || errno == ENODATA) return gone(peer->pid);
    return GRADD_FAIL(IO, "SO_PEERPIDFD: %s", strerror(errno));
}

static gradd_status_t by_pidfd_open(uint64_t accepted_ticks, gradd_peer_t *peer) {
    char path[64];
    struct stat st;
    if (peer->pid <= 0)
        return GRADD_FAIL(UNSUPPORTED, "the peer's process is not visible from here (another "
                                       "pid namespace, or not a Unix socket)");
    uint64_t before = read_start_ticks(peer->pid);
    peer->pidfd = (int)syscall(SYS_pidfd_open, peer->pid, 0); /* always close-on-exec */
    if (peer->pidfd < 0 && errno == ESRCH) return gone(peer->pid);
    if (peer->pidfd < 0 && errno == ENOSYS)
        return GRADD_FAIL(UNSUPPORTED, "this kernel has no pidfd_open (Linux 5.3)");
    if (peer->pidfd < 0) return GRADD_FAIL(IO, "pidfd_open: %s", strerror(errno));
    uint64_t after = read_start_ticks(peer->pid);
    if (!before || before != after) return gone(peer->pid);
    if (accepted_ticks && after > accepted_ticks)
        return GRADD_FAIL(STALE, "process %d started after the connection was made",
                          (int)peer->pid);
    snprintf(path, sizeof path, "/proc/%d", (int)peer->pid);
    if (stat(path, &st) != 0) return gone(peer->pid);
    /* A process that cannot be dumped belongs to root in /proc; only a third uid is suspicious. */
    if (st.st_uid != peer->uid && st.st_uid != 0)
        return GRADD_FAIL(STALE, "process %d belongs to uid %u, the connection to uid %u",
                          (int)peer->pid, (unsigned)st.st_uid, (unsigned)peer->uid);
    return GRADD_OK;
}

gradd_status_t gradd_peer_identify(int socket, uint64_t accepted_ticks, gradd_lease_method_t method,
                                   gradd_peer_t *out_peer) {
    struct ucred cred;
    socklen_t size = sizeof cred;
    gradd_peer_t peer = GRADD_PEER_INIT;
    gradd_status_t status = GRADD_E_UNSUPPORTED;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &cred, &size) != 0)
        return GRADD_FAIL(IO, "SO_PEERCRED: %s", strerror(errno));
    peer.pid = cred.pid;
    peer.uid = cred.uid;
    peer.gid = cred.gid;
    if (method != GRADD_LEASE_PIDFD_OPEN) status = by_peerpidfd(socket, &peer);
    if (method == GRADD_LEASE_PIDFD_OPEN ||
        (method == GRADD_LEASE_AUTO && status == GRADD_E_UNSUPPORTED))
        status = by_pidfd_open(accepted_ticks, &peer);
    if (status == GRADD_OK && !gradd_peer_alive(&peer)) status = gone(peer.pid);
    if (status != GRADD_OK) {
        gradd_peer_finish(&peer);
        return status;
    }
    peer.start_ticks = read_start_ticks(peer.pid);
    *out_peer = peer;
    return GRADD_OK;
}

bool gradd_peer_alive(const gradd_peer_t *peer) {
    struct pollfd p = {.fd = peer->pidfd, .events = POLLIN};
    int ready;
    if (peer->pidfd < 0) return false;
    do {
        ready = poll(&p, 1, 0);
    } while (ready < 0 && errno == EINTR);
    return ready == 0;
}

void gradd_peer_finish(gradd_peer_t *peer) {
    if (!peer) return;
    if (peer->pidfd > 0) close(peer->pidfd); /* 0: a zeroed struct */
    *peer = (gradd_peer_t)GRADD_PEER_INIT;
}

gradd_status_t gradd_lease_create(gradd_peer_t *peer, gradd_handle_limits_t limits,
                                  gradd_lease_t **out_lease) {
    gradd_lease_t *lease = calloc(1, sizeof *lease);
    if (!lease) return GRADD_FAIL(NOMEM, "no memory for a lease");
    gradd_status_t status = gradd_handle_table_create(limits, &lease->table);
    if (status != GRADD_OK) {
        free(lease);
        return status;
    }
    lease->peer = *peer;
    *peer = (gradd_peer_t)GRADD_PEER_INIT;
    *out_lease = lease;
    return GRADD_OK;
}

void gradd_lease_destroy(gradd_lease_t *lease) {
    if (!lease) return;
    gradd_lease_end(lease);
    gradd_handle_table_destroy(lease->table);
    gradd_peer_finish(&lease->peer);
    free(lease);
}

gradd_handle_table_t *gradd_lease_table(gradd_lease_t *lease) {
    return lease->table;
}

int gradd_lease_pidfd(const gradd_lease_t *lease) {
    return lease->peer.pidfd;
}

/* The descriptor is looked at before it is read: reading a FUSE file waits for its owner. */
static gradd_status_t read_header(const gradd_lease_t *lease, uint64_t id, int fd, uint64_t bytes,
                                  gradd_header_t *out_header) {
    uint64_t real;
    GRADD_TRY(gradd_segment_check(fd, &real));
    if (real != bytes) return GRADD_OK; /* gradd_segment_open says so */
    return gradd_header_read(fd, id, bytes, lease->owner, out_header);
}

static gradd_status_t add(gradd_lease_t *lease, uint64_t id, int fd, uint64_t expect_bytes,
                          const gradd_mapper_t *mapper, gradd_header_t *header) {
    gradd_segment_t segment = GRADD_SEGMENT_INIT;
    gradd_status_t status = header ? read_header(lease, id, fd, expect_bytes, header) : GRADD_OK;
    if (status == GRADD_OK) status = gradd_segment_open(fd, expect_bytes, mapper, &segment);
    if (status != GRADD_OK) {
        gradd_discard(fd);
        return gradd_wrap(status, "segment %llu", (unsigned long long)id);
    }
    if (header) segment.header_bytes = header->header_bytes, segment.purpose = header->purpose;
    status = gradd_handle_add(lease->table, id, &segment);
    gradd_segment_finish(&segment); /* empty unless the table refused it */
    return status;
}

gradd_status_t gradd_lease_add(gradd_lease_t *lease, uint64_t id, int fd, uint64_t expect_bytes,
                               const gradd_mapper_t *mapper) {
    return add(lease, id, fd, expect_bytes, mapper, NULL);
}

gradd_status_t gradd_lease_add_headed(gradd_lease_t *lease, uint64_t id, int fd,
                                      uint64_t expect_bytes, const gradd_mapper_t *mapper) {
    gradd_header_t header = {0};
    GRADD_TRY(add(lease, id, fd, expect_bytes, mapper, &header));
    lease->owner = header.owner;
    return GRADD_OK;
}

gradd_status_t gradd_lease_add_base(gradd_lease_t *lease, uint64_t id, int fd,
                                    uint64_t expect_bytes) {
    gradd_segment_t segment = GRADD_SEGMENT_INIT;
    const gradd_status_t status = gradd_segment_open_base(fd, expect_bytes, &segment);
    if (status != GRADD_OK) {
        gradd_discard(fd);
        return gradd_wrap(status, "segment %llu", (unsigned long long)id);
    }
    segment.purpose = GRADD_SEGMENT_base;
    const gradd_status_t added = gradd_handle_add(lease->table, id, &segment);
    gradd_segment_finish(&segment); /* empty unless the table refused it */
    return added;
}

gradd_status_t gradd_lease_borrow(gradd_lease_t *lease, uint64_t id, const gradd_lent_t *lent,
                                  uint32_t purpose, const gradd_mapper_t *mapper) {
    gradd_segment_t segment = GRADD_SEGMENT_INIT;
    const gradd_status_t status = gradd_segment_borrow(lent, mapper, &segment);
    if (status != GRADD_OK) return gradd_wrap(status, "segment %llu", (unsigned long long)id);
    segment.purpose = purpose;
    const gradd_status_t added = gradd_handle_add(lease->table, id, &segment);
    gradd_segment_finish(&segment); /* empty unless the table refused it */
    return added;
}

void gradd_lease_end(gradd_lease_t *lease) {
    if (!atomic_exchange(&lease->ended, true)) gradd_handle_close(lease->table);
}
