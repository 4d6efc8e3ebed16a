/* The worker: command socket, sessions and the two threads around the engine library.
 *
 * The owner of the directory (server/owner) accepts clients and lends them to this process. Hello,
 * attach, ps and stop are answered at once, whatever the engine is doing, and so are
 * segments where nothing is mapped into a device; the rest is queued for the engine thread (loop.h
 * explains how two threads share the I/O). Nothing that a client sends or does ends the daemon,
 * except the verb `stop` of its own user.
 */
#ifndef GRADD_SERVER_DAEMON_DAEMON_H
#define GRADD_SERVER_DAEMON_DAEMON_H

#include <sys/types.h>

#include "server/daemon/loop.h"
#include "server/daemon/recent.h"
#include "server/daemon/router.h"
#include "server/daemon/turn_times.h"
#include "server/host/confine.h"
#include "server/host/options.h"
#include "server/host/rundir.h"
#include "server/session/link.h"
#include "server/session/session.h"
#include "server/verbs/worker.h"

#define DRAIN_WHY_BYTES 200

typedef struct daemon_s {
    const options_t *options; /* Borrowed */
    const rundir_t *dir;      /* Borrowed: of the sockets; the lock is the owner's */
    int epoll;                /* Owned */
    int link, lock;           /* Owned: to the owner; what keeps other daemons out */
    pid_t owner;
    uint32_t n_workers; /* that there were before this one */
    router_t router;
    session_table_t table;
    quotas_t quotas;
    queue_t *queue; /* Owned */
    lane_t guests;  /* requests without a session that the engine answers */
    worker_t worker;
    confined_t confined;
    char owner_confined[CONFINE_TEXT_BYTES];
    loop_t loop;
    laps_t laps;
    bool stopping;
    int64_t full_ms; /* since when no client is taken, for want of descriptors; 0: they are */
    bool closed;     /* no more clients are taken */
    char reason[LINK_REASON_BYTES]; /* of the owner, for ending */
    int64_t started_ms;             /* of the owner */
    int64_t paced_ms;               /* when sessions were looked at last */
    uint64_t n_requests, n_refused;
    char drained[DRAIN_WHY_BYTES]; /* why nothing is begun; "": it is */
    recent_t recent;
} daemon_t;

/* Runs the worker of an owner, which has started this process, until it is told to stop; the link
 * and the lock are at LINK_DESCRIPTOR and LOCK_DESCRIPTOR. If the owner ends, so does the process.
 * Fails with IO, and as the device does that cannot be opened. */
gradd_status_t daemon_work(const options_t *options);

/* ---- for the verbs that run in the I/O thread ---- */

/* Begins the end of a session: cancels what it has begun, drops what waits, asks the engine to
 * give everything back. The session is destroyed when the engine has done so: at once, if it was
 * never attached. */
void daemon_end_session(daemon_t *daemon, session_t *session, const char *reason);
/* The engine has nothing of it any more. */
void daemon_destroy_session(daemon_t *daemon, session_t *session);
/* Ends a session as soon as the request that the engine has begun for it is answered: now, if there
 * is none. Waiting requests are dropped; the client sends them to the next daemon. */
void daemon_stop_session(daemon_t *daemon, session_t *session, const char *reason);
/* Reads packets of the session's control socket again. */
void daemon_resume_session(daemon_t *daemon, session_t *session);
/* Everything that can be done without waiting. True if there may be more. */
bool daemon_turn(daemon_t *daemon);
/* One event of the epoll set. */
void daemon_event(daemon_t *daemon, uint64_t data);
/* Time limits; called now and then. */
void daemon_tick(daemon_t *daemon);
/* Nothing is left to do after daemon_stop. */
bool daemon_ended(const daemon_t *daemon);
/* Refuses new work and ends every session, with `cancel` also in the middle of a request; the
 * daemon ends when the last one has. Until then clients that connect are told to reconnect. */
void daemon_stop(daemon_t *daemon, const char *reason, bool cancel);

#endif
