/* Leases: memory that a peer lends us for as long as it lives.
 *
 * A lease is opened on the control connection of a client. It holds the identity of the process at
 * the other end (pid, uid and a pidfd that cannot be fooled by a reused pid) and the table of
 * segments that this client has sent. The pidfd becomes readable when the process ends, whatever
 * its forked children still hold open; the owner polls it and calls gradd_lease_end(), which
 * gives the memory back at once, or at the end of the run that is using it.
 *
 * Identity comes from SO_PEERPIDFD where the kernel has it (Linux 6.5), otherwise from pidfd_open
 * of the SO_PEERCRED pid, guarded by the process's start time. Both ways can be asked for by name,
 * so that both are tested on every machine. Functions may be called from any thread; create and
 * destroy belong to one owner.
 */
#ifndef GRADD_SHM_LEASE_H
#define GRADD_SHM_LEASE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "shm/handle.h"
#include "shm/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum gradd_lease_method_e {
    GRADD_LEASE_AUTO,       /* SO_PEERPIDFD, else pidfd_open */
    GRADD_LEASE_PEERPIDFD,  /* only SO_PEERPIDFD; UNSUPPORTED on older kernels */
    GRADD_LEASE_PIDFD_OPEN, /* only pidfd_open with the start time check */
} gradd_lease_method_t;

/* The process at the other end of a Unix socket. */
typedef struct gradd_peer_s {
    int pidfd; /* Owned, close-on-exec; readable once the process has ended. -1: none */
    pid_t pid; /* 0: in another pid namespace */
    uid_t uid;
    gid_t gid;
    uint64_t start_ticks; /* start time from /proc/PID/stat, clock ticks since boot; 0: not known */
} gradd_peer_t;

#define GRADD_PEER_INIT {-1, 0, 0, 0, 0}

/* Clock ticks since boot, the unit of start_ticks: take it right after accept(). */
uint64_t gradd_lease_clock_ticks(void);

/* Identity of the process that connected `socket`. accepted_ticks is gradd_lease_clock_ticks()
 * right after accept(), or 0: a process that started later cannot be the one that connected. Fails
 * with STALE (the peer has ended or is not the one that connected), UNSUPPORTED (method), IO. */
gradd_status_t gradd_peer_identify(int socket, uint64_t accepted_ticks, gradd_lease_method_t method,
                                   gradd_peer_t *out_peer);
/* False once the process has ended (even as a zombie). */
bool gradd_peer_alive(const gradd_peer_t *peer);
/* Closes the pidfd. Accepts NULL and an empty peer. */
void gradd_peer_finish(gradd_peer_t *peer);

typedef struct gradd_lease_s gradd_lease_t;

/* Makes a lease for *peer and takes the peer over (it is emptied) on success. */
gradd_status_t gradd_lease_create(gradd_peer_t *peer, gradd_handle_limits_t limits,
                                  gradd_lease_t **out_lease);
/* Ends the lease if needed and frees it. All uses of its segments must be over. Accepts NULL. */
void gradd_lease_destroy(gradd_lease_t *lease);

/* Borrowed: the segments of this client. */
gradd_handle_table_t *gradd_lease_table(gradd_lease_t *lease);
/* The descriptor to poll for the peer's end. */
int gradd_lease_pidfd(const gradd_lease_t *lease);

/* Checks a received descriptor and adds it under `id`: gradd_segment_open + gradd_handle_add. The
 * descriptor is always consumed: closed on failure. */
gradd_status_t gradd_lease_add(gradd_lease_t *lease, uint64_t id, int fd, uint64_t expect_bytes,
                               const gradd_mapper_t *mapper);
/* The same of a segment that begins with a header (header.h), which is checked as well: it must say
 * what the message says, and name the owner that the lease's first one names. One thread at a
 * time. */
gradd_status_t gradd_lease_add_headed(gradd_lease_t *lease, uint64_t id, int fd,
                                      uint64_t expect_bytes, const gradd_mapper_t *mapper);

/* The same of a base (gradd_segment_open_base). */
gradd_status_t gradd_lease_add_base(gradd_lease_t *lease, uint64_t id, int fd,
                                    uint64_t expect_bytes);

/* Memory of a device, which has no header: the message says what it is for (GRADD_SEGMENT_... of
 * header.h). Fails as gradd_segment_borrow and gradd_handle_add. */
gradd_status_t gradd_lease_borrow(gradd_lease_t *lease, uint64_t id, const gradd_lent_t *lent,
                                  uint32_t purpose, const gradd_mapper_t *mapper);

/* The peer is gone or has detached: closes the table (see gradd_handle_close). Idempotent. */
void gradd_lease_end(gradd_lease_t *lease);

#ifdef __cplusplus
}
#endif
#endif
