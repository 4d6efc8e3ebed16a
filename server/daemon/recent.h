/* The last requests that the engine has done, with their times: what `gradd trace` shows of a
 * daemon that runs. I/O thread.
 */
#ifndef GRADD_SERVER_DAEMON_RECENT_H
#define GRADD_SERVER_DAEMON_RECENT_H

#include "server/verbs/commands.h"

#define RECENT_MOST 4096

typedef struct recent_request_s {
    const char *verb; /* Borrowed: of its row */
    uint32_t session;
    int64_t arrived_us, started_us, ended_us; /* CLOCK_MONOTONIC */
    int64_t arena_bytes, rest_bytes;          /* of the session's runs: meanwhile, and at its end */
} recent_request_t;

/* Of all requests of a verb that were carried out. */
typedef struct verb_total_s {
    const char *verb; /* Borrowed: of its row */
    uint64_t n;
    int64_t waited_us, ran_us;
} verb_total_t;

#define RECENT_VERBS 32

typedef struct recent_s {
    verb_total_t totals[RECENT_VERBS];
    int n_totals;
    uint64_t n;                             /* all that there were */
    recent_request_t requests[RECENT_MOST]; /* the i-th at i % RECENT_MOST */
} recent_t;

/* A request of a session that has been carried out. */
void recent_add(recent_t *recent, const request_t *request);
/* Puts the list of totals into a reply. */
void recent_put_totals(const recent_t *recent, wire_out_t *reply);
/* Puts a list into a reply, oldest first: the requests that ended at `since_us` or later. */
void recent_put(const recent_t *recent, int64_t since_us, wire_out_t *reply);

#endif
