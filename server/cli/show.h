/* `gradd show NAME`: one session in full; `gradd drain`. */
#ifndef GRADD_SERVER_CLI_SHOW_H
#define GRADD_SERVER_CLI_SHOW_H

#include "server/host/options.h"
#include "server/host/rundir.h"

typedef struct show_s {
    const options_t *options; /* Borrowed: the name in it is a number, a pid or a name */
    int n_daemons, n_found;
} show_t;

/* Prints the sessions of that name which the daemon there has. A visit of rundir_each_running; the
 * context is a show_t. Fails with IO or as the daemon says. */
gradd_status_t show_daemon(const rundir_t *dir, void *context);

/* The daemon begins no further request; waits for the one in progress. With --end: it does again.
 * Fails with IO or as the daemon says. */
gradd_status_t drain(const rundir_t *dir, const options_t *options);

#endif
