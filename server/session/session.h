/* Sessions: the connected clients, each with its identity, memory, token and request sequence.
 *
 * A session is born when a client connects to the control socket and lives as long as that
 * connection, the process at its other end, or until `detach`. Its lease holds the segments and the
 * pidfd; the one-time nonce binds the ZeroMQ side; from then on a request must carry the token and
 * come from the same uid and the same ZeroMQ connection.
 *
 * This module knows descriptors and identities and nothing of the engine: what the engine keeps for
 * a session hangs on `objects`, opaque here. Everything belongs to the I/O thread except the fields
 * marked otherwise.
 */
#ifndef GRADD_SERVER_SESSION_SESSION_H
#define GRADD_SERVER_SESSION_SESSION_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "server/session/queue.h"
#include "server/session/quota.h"
#include "server/session/record.h"
#include "shm/lease.h"
#include "shm/status.h"

#define SESSION_KEY_BYTES      16
#define SESSION_ROUTE_BYTES    255
#define SESSION_CLIENT_BYTES   64
#define SESSION_MAX            256 /* connections at once */
#define SESSION_MAX_OF_PROCESS 64
#define SESSION_MAX_SURPLUS    32 /* beyond these two limits: refused, and then closed */
#define SESSION_MAX_SEGMENTS   512
#define SESSION_MAX_WAITING    64           /* requests of one session */
#define SESSION_MAX_PAYLOAD    (256u << 20) /* bytes of payload frames that wait, per session */

typedef enum session_state_e {
    SESSION_NEW,     /* connected */
    SESSION_GREETED, /* hello was answered: a nonce is out */
    SESSION_ATTACHED,
    SESSION_CLOSING, /* the engine is giving its things back */
} session_state_t;

/* Written by the engine thread, read for `ps`. */
typedef struct session_counts_s {
    atomic_int graphs, plans, runs, bindings, tensors;
    atomic_llong arena_bytes;
    atomic_llong constant_bytes; /* of its plans; those that it shares with others, too */
    atomic_llong wanted_bytes;   /* for which a run waits; 0 = none does */
    atomic_llong wanted_us;      /* since when */
    atomic_bool running;
} session_counts_t;

/* What it takes of the engine, for `ps`. */
typedef struct session_pace_s {
    int64_t engine_us;             /* of requests that are done */
    uint64_t n_steps;              /* backwards that are done */
    int64_t seen_us;               /* both as of the last look */
    uint64_t seen_steps;           /* the same */
    double busy, steps_per_second; /* lately: the latest seconds count most */
} session_pace_t;

/* Looks at the last `ms`, to be called about twice a second. */
void session_pace_look(session_pace_t *pace, int64_t ms);

typedef struct session_s {
    uint32_t number; /* never used twice in the life of an owner */
    session_state_t state;
    gradd_lease_t *lease; /* Owned; its table is also the engine's */
    /* Owned: the owner's relay of the connection, open as long as memory that the client has lent.
     */
    int control;
    pid_t pid;
    uid_t uid;
    char client[SESSION_CLIENT_BYTES];
    uint8_t nonce[SESSION_KEY_BYTES], token[SESSION_KEY_BYTES];
    uint8_t route[SESSION_ROUTE_BYTES];
    uint8_t n_route; /* 0 before attach */
    int source;      /* Borrowed: the connection of its requests (connections.h) */
    uint64_t source_number;
    uint64_t q_taken, q_done;
    uint8_t *last_reply; /* Owned: the reply to q_done */
    size_t last_reply_bytes;
    lane_t lane;        /* Shared with the engine through queue.h */
    lane_t memory_lane; /* the same: of segments, which wait for no other request of the session */
    uint64_t payload_bytes;
    uint64_t n_requests;
    int n_pending; /* requests in the lane, with the engine, or not answered yet */
    bool ends;     /* nothing is read from it any more */
    bool late;     /* connected while the daemon was ending: its hello is refused */
    bool surplus;  /* one connection too many: its hello is refused, and then it is closed */
    int64_t born_ms, active_ms;
    int64_t awaited_ms; /* since when it is to attach: born_ms, or later, see daemon_tick */
    session_pace_t pace;
    uint32_t share;          /* of the engine's time, see fair.h */
    atomic_llong most_bytes; /* that it may have, see session_own_bytes; 0 = any number */
    int64_t stalled_ms;      /* since when its replies cannot be sent; 0 = they can */
    const char *end_reason;  /* for the log */
    volatile int cancel;     /* read by the engine thread at every node boundary */
    gradd_segment_t words; /* Owned: the turns of its requests (turns.h); unmapped = it has none */
    gradd_segment_t marks; /* Owned: the same memory in the device; unmapped = that reads ours */
    uint64_t failed_chain; /* the engine thread's: of requests of which one has failed; 0 = none */
    session_counts_t counts; /* written by the engine thread */
    session_record_t record; /* the same; read for `show` */
    void *objects;           /* the engine thread's, see worker.h */
} session_t;

typedef struct session_table_s {
    session_t *sessions[SESSION_MAX + SESSION_MAX_SURPLUS];
    int n;         /* with these: */
    int n_surplus; /* see session_t */
    uint32_t n_born;
} session_table_t;

/* Random bytes for a nonce or a token. Fails with IO. */
gradd_status_t session_draw_key(uint8_t key[SESSION_KEY_BYTES]);
/* Takes over `control` and the client's identity (closed on failure). Fails with LIMIT, NOMEM. */
gradd_status_t session_create(session_table_t *table, uint32_t number,
                              const uint8_t token[SESSION_KEY_BYTES], int control,
                              gradd_peer_t *peer, session_t **out_session);
/* The engine must be done with it. Unmaps its segments. */
void session_destroy(session_table_t *table, session_t *session);

/* Draws a new nonce; the former one is void. Fails with IO. */
gradd_status_t session_greet(session_t *session, const char *client, size_t client_bytes);
/* The sender of a request on the command channel. */
typedef struct session_caller_s {
    uid_t uid;
    const uint8_t *route;
    size_t route_bytes;
} session_caller_t;

/* Finds the session that this nonce was given to, uses the nonce up and binds the session to the
 * caller's route. Fails with SESSION. */
gradd_status_t session_attach(session_table_t *table, const uint8_t *nonce, size_t nonce_bytes,
                              const session_caller_t *caller, session_t **out_session);
/* The open session of the caller whose token this is. Fails with SESSION, without a hint why. */
gradd_status_t session_authorize(session_table_t *table, const uint8_t *token, size_t token_bytes,
                                 const session_caller_t *caller, session_t **out_session);
session_t *session_by_number(session_table_t *table, uint32_t number);

typedef enum session_order_e {
    SESSION_RUN,    /* a new request */
    SESSION_REPEAT, /* answer with the stored reply */
    SESSION_WAIT,   /* the same request is on its way: say nothing, one reply will come */
} session_order_t;

/* Decides what to do with sequence number q. Fails with SESSION for one that was answered long ago,
 * LIMIT when too many wait. */
gradd_status_t session_order(const session_t *session, uint64_t q, session_order_t *out_order);
/* Remembers a new request that is carried out. A request that is refused before that is not
 * remembered and its reply is not kept, because replies to earlier requests may still be due; if it
 * is sent again, it is checked again. */
void session_take(session_t *session, uint64_t q);
/* Keeps a copy of the reply to q. Without memory the reply is simply not repeatable. */
void session_keep_reply(session_t *session, uint64_t q, const void *reply, size_t bytes);

/* Bytes that count for its quota: what it has lent, but for bases, its runs and the constants of
 * its plans. Any thread. */
int64_t session_own_bytes(session_t *session);
/* Whether it may have so many bytes more, for what `what` names. Fails with NOMEM and the figures.
 * Any thread. */
gradd_status_t session_check_bytes(session_t *session, const char *what, int64_t bytes);
/* "session 3, train.py, pid 12, which has 512 MiB of activations" */
#define SESSION_HOLDER_BYTES 160
void session_holder_text(const session_t *session, char text[SESSION_HOLDER_BYTES]);
/* What holds for it from here on. I/O thread. */
void session_set_quota(session_t *session, queue_t *queue, const quota_t *rule);
/* Sessions of that name which are connected, without this one. */
int session_count(const session_table_t *table, const char *client, const session_t *without);

const char *session_state_name(const session_t *session);
int64_t session_now_ms(void);

#endif
