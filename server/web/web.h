/* `gradd web`: metrics, a health check and one page about the user's daemons, by HTTP.
 *
 * A process of its own: daemons speak no HTTP. It listens on a Unix socket, or on the loopback
 * address, where every path begins with a token. It only reads.
 */
#ifndef GRADD_SERVER_WEB_WEB_H
#define GRADD_SERVER_WEB_WEB_H

#include "server/host/rundir.h"
#include "server/wire/wire.h"

/* What one daemon says. Borrowed, for the call. */
typedef struct web_daemon_s {
    const char *name;           /* "main", or the name of its folder */
    const msgpack_object *root; /* its reply to `ps`; NULL: it does not answer */
    const msgpack_object *kept; /* the list of kept sessions; NULL: none is known */
} web_daemon_t;

typedef void (*web_visit_t)(const web_daemon_t *daemon, void *visitor);
/* Asks all daemons that run, and calls `visit` for each. */
typedef void (*web_look_t)(void *context, web_visit_t visit, void *visitor);

typedef struct web_options_s {
    const rundir_t *dir; /* Borrowed: prepared; the token lies in it */
    const char *socket;  /* Borrowed: path of the Unix socket; NULL: loopback */
    int port;            /* of the loopback; 0: any */
    web_look_t look;
    void *context; /* of `look` */
} web_options_t;

/* Prints the address and serves until SIGINT or SIGTERM. Fails with UNSUPPORTED (there is no
 * libmicrohttpd) or IO. */
gradd_status_t web_serve(const web_options_t *options);

#endif
