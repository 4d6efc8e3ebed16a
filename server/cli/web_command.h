/* `gradd web`: what it shows is asked here, of the daemons that run. */
#ifndef GRADD_SERVER_CLI_WEB_COMMAND_H
#define GRADD_SERVER_CLI_WEB_COMMAND_H

#include "server/host/options.h"
#include "server/host/rundir.h"

/* Serves until a signal ends it. The directory is made if it is missing. Fails with UNSUPPORTED or
 * IO. */
gradd_status_t web_command(rundir_t *dir, const options_t *options);

#endif
