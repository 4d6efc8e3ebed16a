/* `gradd logs [-f] [NAME]`: the files that daemons of a directory log to. */
#ifndef GRADD_SERVER_CLI_LOGS_H
#define GRADD_SERVER_CLI_LOGS_H

#include "server/host/options.h"
#include "server/host/rundir.h"

/* Prints the lines of the user's daemon and of those of GPUs; with a name, those about sessions of
 * that name, process or number, and about kept sessions of that name. With -f it goes on until it
 * is ended. No daemon needs to run. Fails with IO: there is no such file. */
gradd_status_t logs_show(const rundir_t *dir, const options_t *options);

#endif
