/* The socket between the owner of a directory and its worker (docs/architecture.md).
 *
 * The owner accepts clients, and lends each to the worker: a LINK_SESSION comes with the worker's
 * end of a socket pair, on which it finds the client's packets as if it had accepted the client
 * itself. Both sides are one binary, so messages are plain structs. Neither side waits for the
 * other: a message that finds no room fails with LIMIT, and is sent again later.
 */
#ifndef GRADD_SERVER_SESSION_LINK_H
#define GRADD_SERVER_SESSION_LINK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "server/session/session.h"
#include "shm/status.h"

#define LINK_DESCRIPTOR     3 /* where a worker finds the link when it starts, */
#define LOCK_DESCRIPTOR     4 /* and the lock, which is free only when both have ended */
#define LINK_REASON_BYTES   64
#define LINK_CONFINED_BYTES 96
#define LINK_MAX_FDS        2

typedef enum link_kind_e {
    LINK_BEGIN,   /* to the worker, first: facts of the owner; with a listener of commands */
    LINK_LISTEN,  /* to it: one more, because clients no longer find the former */
    LINK_LOCK,    /* to it: the owner's new lock, in place of a removed one */
    LINK_SESSION, /* to it: a client has connected, to this worker or to one before; with the
                     connection and the client's pidfd */
    LINK_STOP,    /* to it: it shall end, for this reason */
    LINK_READY,   /* from it: its device is open, it reads commands */
    LINK_STOPPING /* from it: it ends, because a client said so */
} link_kind_t;

typedef struct link_message_s {
    link_kind_t kind;
    pid_t pid;                        /* BEGIN: of the owner; SESSION: of the client */
    uid_t uid;                        /* SESSION: */
    gid_t gid;                        /* the same */
    uint64_t start_ticks;             /* the same: see gradd_peer_t */
    uint32_t number;                  /* the same: never used twice in the life of an owner */
    uint8_t token[SESSION_KEY_BYTES]; /* the same: of the client's requests, for all workers */
    uint32_t n_workers;               /* BEGIN: that there were before */
    int64_t started_ms;               /* the same: of the owner, by session_now_ms */
    bool cancel;                      /* STOP: also what runs */
    char reason[LINK_REASON_BYTES];
    char confined[LINK_CONFINED_BYTES]; /* BEGIN: what the owner has given up */
} link_message_t;

/* Makes both ends, non-blocking and close-on-exec. Fails with IO. */
gradd_status_t link_create(int ends[2]);
/* Descriptors stay the caller's. Fails with LIMIT (no room now), IO (the other side has ended). */
gradd_status_t link_send(int link, const link_message_t *message, const int *fds, int n_fds);
/* True if a message has room, and the other side lives. */
bool link_has_room(int link);
/* True if the other side lives. */
bool link_is_open(int link);
/* True if the next message is of that kind; it stays there, and so do its descriptors. */
bool link_comes(int link, link_kind_t kind);
/* On the worker's end of a client's connection: it wants nothing more of the client, which the
 * owner hangs up on. The end closes when nothing of the worker uses the client's memory any more.
 * Where it closes and nothing was said, the worker has died. */
void link_say_end(int end);
/* True of the packet that says so. */
bool link_is_last(const void *packet, size_t bytes);
/* One message, with descriptors that are the caller's from here on, -1 where there are fewer.
 * *out_any is false when none waits. Fails with IO when the other side has ended, or is none. */
gradd_status_t link_receive(int link, link_message_t *out_message, int fds[LINK_MAX_FDS],
                            bool *out_any);

#endif
