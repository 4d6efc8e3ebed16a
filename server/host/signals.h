/* The signals that end a daemon, as a descriptor. */
#ifndef GRADD_SERVER_HOST_SIGNALS_H
#define GRADD_SERVER_HOST_SIGNALS_H

#include "shm/status.h"

/* Blocks SIGTERM, SIGINT and SIGHUP, here and in children, and opens a descriptor that reads them;
 * ignores SIGPIPE. Fails with IO. */
gradd_status_t signals_open(int *out_fd);

#endif
