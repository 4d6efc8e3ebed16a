/* Clients of an owner: each has a connection, and the worker's end of a pair beside it.
 *
 * A packet goes on to the worker as it is, with its descriptors, and the answer comes back the same
 * way; one packet at a time. The worker alone judges it. The relay looks at verb and id of those
 * that the worker has accepted, and keeps these packets and a descriptor of each segment that the
 * client has: what the next worker needs to know of it (retell.h). It maps none. A packet or a
 * descriptor of a client is never waited for.
 */
#ifndef GRADD_SERVER_OWNER_RELAY_H
#define GRADD_SERVER_OWNER_RELAY_H

#include <stdbool.h>
#include <stdint.h>

#include "server/session/session.h"
#include "server/wire/wire.h"
#include "shm/fdpass.h"
#include "shm/lease.h"
#include "shm/status.h"

#define RELAY_MAX_FDS 4 /* in a packet, as the worker's REQUEST_MAX_DESCRIPTORS */
#define RELAY_MAX_KEPT                                                                             \
    2048 /* bytes of a packet that is kept; a client that says more is not moved */

typedef struct held_segment_s {
    uint64_t id;
    int fd;           /* Owned; -1: memory without a descriptor */
    uint8_t *packet;  /* Owned: that lent it, as it came; NULL: it is not known */
    uint32_t n_bytes; /* of the packet */
} held_segment_t;

/* What a packet changes, if the worker agrees. */
typedef enum relay_change_e {
    RELAY_NOTHING,
    RELAY_HELLO,
    RELAY_WORDS, /* of its timeline */
    RELAY_ADD,
    RELAY_REMOVE
} relay_change_t;

typedef struct relay_client_s {
    uint32_t number;
    int outer, inner; /* Owned: to the client, to the worker; -1: it has none now */
    gradd_peer_t peer;
    uint8_t token[SESSION_KEY_BYTES]; /* of its requests, to this worker and the next ones */
    bool waits;        /* nothing is read from it: for the worker's answer, or for a worker */
    bool in_flight;    /* the worker has a packet that it has not answered */
    bool dropped;      /* so had one that has died */
    bool spoken;       /* some worker has had a packet of it */
    bool movable;      /* the client reads `replaced`, and all that it has said is kept */
    bool moves;        /* the next worker is being told what the client has said */
    int n_told;        /* packets of that, so far */
    int n_tries;       /* workers that have died meanwhile */
    wire_out_t notice; /* Owned: `replaced`, for the client */
    bool drains;       /* the client sends no more; the worker hangs up when it is done */
    int64_t lost_ms;   /* since when the worker's end is closed without a word; 0: it is not */
    bool leaves; /* the client is gone, or was hung up on: only the worker's end is waited for */
    relay_change_t change;
    uint64_t id;                   /* the segment of that change */
    int fds[RELAY_MAX_FDS], n_fds; /* Owned: of the packet that waits */
    uint8_t *packet;               /* Owned: that packet, while it is in flight; NULL: unknown */
    uint32_t n_bytes;              /* of it */
    bool reads_replaced;           /* a hello that is in flight says so */
    held_segment_t hello, words;   /* Owned: what it has said; without packet: nothing */
    held_segment_t *segments;      /* Owned */
    uint32_t n_segments, segment_capacity;
} relay_client_t;

/* The connection and the identity are taken over; there is no worker yet. NULL without memory: they
 * stay the caller's. */
relay_client_t *relay_create(uint32_t number, int outer, const gradd_peer_t *peer);
/* Hangs up on both sides and lets go of the segments. Accepts NULL. */
void relay_destroy(relay_client_t *client);
/* What is in flight is not waited for any more. */
void relay_drop_packet(relay_client_t *client);

typedef enum relay_state_e {
    RELAY_OPEN,
    RELAY_OVER, /* the client must be destroyed */
    RELAY_LOST, /* the worker has died without a word; nothing more can be read from it */
} relay_state_t;

/* Answers a packet that is not for the worker; false if it is. *out_sent: the answer is sent. */
typedef bool (*relay_own_t)(void *context, relay_client_t *client, const wire_doc_t *packet,
                            bool *out_sent);

/* A packet of the client. While client->waits nothing may be read. */
relay_state_t relay_from_client(relay_client_t *client, relay_own_t own, void *context);
/* The answer of the worker. */
relay_state_t relay_from_worker(relay_client_t *client);

/* Sends a packet on to the worker. RELAY_OVER if it cannot be sent to one that lives, as the kernel
 * has no room for it or its descriptors: no answer would ever come. */
relay_state_t relay_pass(const relay_client_t *client, const gradd_fd_packet_t *packet);

/* Whether the worker has answered `ok` to a packet. */
bool relay_is_ok(const wire_doc_t *answer);
/* Closes the descriptor and forgets the packet. */
void relay_let_go(held_segment_t *held);
/* The descriptor of a segment, Borrowed; -1: it has none of that id. */
int relay_find(const relay_client_t *client, uint64_t id);
/* Hangs up on the client, and tells the worker; what it has lent stays until relay_destroy. */
void relay_leave(relay_client_t *client);

#endif
