/* The owner of a directory: lock, sockets, clients and their segments, and a worker that computes.
 *
 * `gradd serve` is an owner. It has one thread, opens no device and maps no memory of a client, so
 * a graph, a kernel or a driver can end the worker only. The owner then starts another worker, and
 * hangs up on the clients, which connect again and repeat what was outstanding. The worker has the
 * command socket: a step does not pass through the owner.
 *
 * Worker and owner hold one lock, so that no other daemon begins while a worker may still write to
 * the memory of clients.
 */
#ifndef GRADD_SERVER_OWNER_OWNER_H
#define GRADD_SERVER_OWNER_OWNER_H

#include <sys/types.h>

#include "server/host/options.h"

typedef struct owner_end_s {
    pid_t other; /* the daemon that runs in this directory already (-1: unknown); else 0 */
    int code;    /* 0, or the exit code of a worker that did not start or end as it should */
} owner_end_t;

/* Serves until it is told to stop. argv: how the worker is started, with `worker` in place of the
 * command. Fails with IO. */
gradd_status_t owner_serve(const options_t *options, char **argv, owner_end_t *out_end);

#endif
