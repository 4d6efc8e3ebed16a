/* The command channel: a ZeroMQ ROUTER on our own listening socket, guarded by a ZAP handler.
 *
 * The ZAP handler is not optional: without one libzmq accepts ZMTP 1.0 peers, whose garbage would
 * surface as messages. It admits one uid, taken from the kernel's credentials of the connection;
 * messages without the proof that it did so are dropped. No socket option here is a matter of
 * taste: see the comments in router.c. Everything runs in the I/O thread and nothing blocks.
 */
#ifndef GRADD_SERVER_DAEMON_ROUTER_H
#define GRADD_SERVER_DAEMON_ROUTER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "server/verbs/commands.h"

typedef struct router_s {
    void *context, *socket, *zap; /* Owned */
    uid_t uid;                    /* the one that is admitted */
    int n_listeners;
    uint64_t n_messages, n_dropped, n_refused;
} router_t;

typedef enum router_sent_e {
    ROUTER_SENT,
    ROUTER_GONE,  /* the peer has disconnected */
    ROUTER_FULL,  /* the peer does not read */
    ROUTER_NOMEM, /* nothing was sent */
} router_sent_t;

/* listener: a listening socket at `path`; libzmq closes it. Fails with IO. */
gradd_status_t router_open(router_t *router, const char *path, int listener, uid_t uid);
/* Adds a listening socket, because clients no longer find the earlier ones; these stay open, with
 * their connections. Fails with IO, or with LIMIT after 64. */
gradd_status_t router_listen(router_t *router, const char *path, int listener);
/* Sends queued messages for at most a second. Accepts a zeroed one. */
void router_close(router_t *router);

/* Descriptors to wait for; edge-triggered: after a wake-up call router_receive or router_admit
 * until nothing is left. */
int router_fd(const router_t *router);
int router_zap_fd(const router_t *router);

/* Answers the ZAP requests that wait. True if there were any. */
bool router_admit(router_t *router);

/* One message as a request with route, uid and frames. NULL when none waits; messages that break
 * the frame rules come with a status and are answered like any other failure. */
request_t *router_receive(router_t *router);

router_sent_t router_send(router_t *router, const uint8_t *route, size_t route_bytes,
                          const void *data, size_t bytes);

#endif
