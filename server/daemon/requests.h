/* The path of a request through the I/O thread, from its frames to its reply.
 */
#ifndef GRADD_SERVER_DAEMON_REQUESTS_H
#define GRADD_SERVER_DAEMON_REQUESTS_H

#include "server/daemon/daemon.h"

/* Decodes, authorizes, orders and dispatches; takes the request over. */
void requests_handle(daemon_t *daemon, request_t *request);
/* A request that the engine has finished: sends and keeps its reply; takes it over. */
void requests_finish(daemon_t *daemon, request_t *request);

#endif
