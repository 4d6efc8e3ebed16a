/* The commands of the binary that talk to a running daemon: ps and stop.
 */
#ifndef GRADD_SERVER_ADMIN_H
#define GRADD_SERVER_ADMIN_H

#include <stdbool.h>

#include "server/options.h"

/* Both print to stdout. *out_running is false when no daemon runs in the directory; that is not a
 * failure. Fails with IO or the daemon's own code. */
gradd_status_t admin_ps(const options_t *options, bool *out_running);
/* Waits until the daemon has ended. */
gradd_status_t admin_stop(const options_t *options, bool *out_running);

#endif
