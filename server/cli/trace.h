/* `gradd trace`: the last requests of running daemons as a file for Perfetto, in Chrome's format of
 * traces.
 */
#ifndef GRADD_SERVER_CLI_TRACE_H
#define GRADD_SERVER_CLI_TRACE_H

#include <stdio.h>

#include "server/host/options.h"
#include "server/host/rundir.h"

typedef struct trace_s {
    FILE *out;        /* Owned */
    const char *path; /* Borrowed: of the options */
    int64_t since_us; /* CLOCK_MONOTONIC */
    int n_events, n_requests, n_daemons;
} trace_t;

/* Creates the file. Fails with IO. */
gradd_status_t trace_open(trace_t *trace, const options_t *options);
/* Writes what a daemon remembers; `context` is the trace. Fails with IO. */
gradd_status_t trace_daemon(const rundir_t *dir, void *context);
/* Ends the file and says on stdout what it has; after a failure it is removed and `status` comes
 * back. Fails with IO. */
gradd_status_t trace_close(trace_t *trace, gradd_status_t status);

#endif
