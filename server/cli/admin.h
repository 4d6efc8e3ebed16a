/* The commands of the binary that talk to a running daemon: ps and stop.
 */
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
/* A number of a reply, 0 where it is missing, is none, or is above INT64_MAX / 4. */
int64_t admin_number(const msgpack_object *map, const char *key);
/* A text of a reply, or "?", in a buffer of that size, which it returns. */
const char *admin_text(const msgpack_object *map, const char *key, char *buffer, size_t bytes);
/* The version of the daemon that listens at `path`, or words for "not known". Waits for an answer.
 */
#define ADMIN_VERSION_BYTES 32
void admin_version(const char *path, char version[ADMIN_VERSION_BYTES]);
/* Waits until the daemon has ended. */
gradd_status_t admin_stop(const rundir_t *dir, const options_t *options);

#endif
