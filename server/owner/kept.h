/* Sessions with a name, which outlive their process.
 *
 * A client names its session by `keep`: it says which of its segments stay when it is gone, for how
 * long, and gives a manifest, memory of which only clients know the contents. When the process has
 * ended and the worker is done with it, the owner holds the descriptors, and hands them to the next
 * client that says `reattach`. One client at a time has a name. The owner answers these verbs
 * itself; it maps nothing and reads neither segments nor manifest.
 */
#ifndef GRADD_SERVER_OWNER_KEPT_H
#define GRADD_SERVER_OWNER_KEPT_H

#include "server/owner/relay.h"
#include "server/wire/wire.h"

#define KEPT_NAME_BYTES 64
#define KEPT_MOST       64 /* names */

/* A base is a name for frozen weights, which one process has given and others map. It has one
 * segment, which is held from the beginning, and no client: it stays as long as a client has its
 * memory, and for its time after that.
 */
typedef struct kept_session_s {
    char name[KEPT_NAME_BYTES + 1];
    double seconds;       /* that it stays without a client; below 0: for ever */
    int64_t expires_ms;   /* while there is no client; INT64_MAX: never */
    pid_t pid;            /* of the client that has it, or had it last */
    uint64_t start_ticks; /* of that process */
    int pidfd;            /* Owned: of it */
    uint32_t client;      /* the number of the one that has it; 0: it is gone */
    bool said;            /* `keep`, and not only `reattach` */
    bool base;
    uint64_t *ids; /* Owned: segments of that client, to be held when it is gone */
    uint32_t n_ids;
    int manifest;             /* Owned */
    held_segment_t *segments; /* Owned: of a client that is gone */
    uint32_t n_segments;
} kept_session_t;

typedef struct kept_table_s {
    kept_session_t *sessions[KEPT_MOST]; /* Owned */
    int n;
} kept_table_t;

/* Finds the client of that number, for a session that is in use. */
typedef const relay_client_t *(*kept_find_t)(void *context, uint32_t number);
/* How many clients have lent the memory of that descriptor. */
typedef int (*kept_users_t)(void *context, int fd);

typedef struct kept_clients_s {
    kept_find_t find;
    kept_users_t users;
    void *context;
} kept_clients_t;

/* Answers the verb of a packet that is the owner's: keep, share, reattach, peek, forget, kept.
 * False if it is none of them. *out_sent tells whether the answer could be sent. */
bool kept_answer(kept_table_t *table, relay_client_t *client, const wire_doc_t *doc,
                 const kept_clients_t *clients, bool *out_sent);
/* Whether the client has a name: then its end waits for the worker's. */
bool kept_has(const kept_table_t *table, const relay_client_t *client);
/* The client is gone, and nothing writes to its segments any more: takes over descriptors of those
 * that stay. */
void kept_leave(kept_table_t *table, const relay_client_t *client);
/* Ends those whose time is over. */
void kept_expire(kept_table_t *table, int64_t now_ms, const kept_clients_t *clients);
void kept_finish(kept_table_t *table);

#endif
