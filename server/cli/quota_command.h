/* `gradd quota`: the rules of daemons for sessions by name. */
#ifndef GRADD_SERVER_CLI_QUOTA_COMMAND_H
#define GRADD_SERVER_CLI_QUOTA_COMMAND_H

#include "server/host/options.h"
#include "server/host/rundir.h"

/* Changes the rule that the command line names, if it gives more than the name, and prints all of
 * them. Fails with IO or as the daemon says. */
gradd_status_t quota_command(const rundir_t *dir, const options_t *options);

#endif
