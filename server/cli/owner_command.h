/* What the command line asks and tells the owner: sessions that outlive their process, restart.
 */
#ifndef GRADD_SERVER_CLI_OWNER_COMMAND_H
#define GRADD_SERVER_CLI_OWNER_COMMAND_H

#include <stdio.h>

#include "server/host/options.h"
#include "server/host/rundir.h"
#include "server/wire/wire.h"

#define KEPT_REPLY_BYTES (64 << 10)

/* The list of kept sessions of the daemon there, in a document that the caller finishes; the buffer
 * must outlive it. NULL where the daemon is an older one, or does not answer. */
const msgpack_object *kept_ask(const rundir_t *dir, uint8_t buffer[KEPT_REPLY_BYTES],
                               wire_doc_t *out_doc);
/* `gradd forget --name NAME`: ends it. Fails as the daemon says, or with IO. */
gradd_status_t kept_forget(const rundir_t *dir, const options_t *options);
/* `gradd restart`: the daemon becomes a process of this binary. Fails as the daemon says, or with
 * IO. */
gradd_status_t owner_restart(const rundir_t *dir, const options_t *options);

#endif
