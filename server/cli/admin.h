/* The commands of the binary that talk to a running daemon: ps, stop, and what others need. */
#ifndef GRADD_SERVER_CLI_ADMIN_H
#define GRADD_SERVER_CLI_ADMIN_H

#include <zmq.h>

#include "server/host/options.h"
#include "server/host/rundir.h"
#include "server/wire/wire.h"

/* Both print to stdout, about the daemon that holds the lock of a directory. Fails with IO or the
 * daemon's own code. */
gradd_status_t admin_ps(const rundir_t *dir, const options_t *options);
/* Sends one envelope to the command socket at `path` and waits for the answer, which may say that
 * it failed. The caller closes `reply` (initialised before) and finishes the doc, in any case. */
gradd_status_t admin_ask(const char *path, const wire_out_t *request, int timeout_ms,
                         zmq_msg_t *reply, wire_doc_t *out_doc);
/* An answer; zeroed, it may be finished. */
typedef struct admin_reply_s {
    zmq_msg_t message; /* what `doc` points into */
    wire_doc_t doc;
} admin_reply_t;

/* A request of that verb begins; the caller adds pairs. */
void admin_begin(wire_out_t *out, const char *verb);
/* Ends the request, sends it and waits, some seconds. The request is finished; the reply is the
 * caller's to finish, in any case. Fails with IO. */
gradd_status_t admin_send(const char *path, wire_out_t *request, admin_reply_t *out_reply);
/* The same with `ps`. Fails with IO, also where the reply is no daemon's. */
gradd_status_t admin_ask_ps(const rundir_t *dir, admin_reply_t *out_reply);
void admin_finish(admin_reply_t *reply);
/* Fails with SESSION and the daemon's sentence if it has refused. */
gradd_status_t admin_check(const msgpack_object *root);
/* The version of the daemon that listens at `path`, or words for "not known". Waits for an answer.
 */
#define ADMIN_VERSION_BYTES 32
void admin_version(const char *path, char version[ADMIN_VERSION_BYTES]);
/* Waits until the daemon has ended. */
gradd_status_t admin_stop(const rundir_t *dir, const options_t *options);

#endif
