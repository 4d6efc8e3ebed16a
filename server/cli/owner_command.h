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
/* A look at a kept session, which stays whose it is. */
typedef struct kept_look_s {
    int socket;       /* Owned */
    const char *name; /* Borrowed */
    uint8_t buffer[KEPT_REPLY_BYTES];
} kept_look_t;

typedef struct kept_part_s {
    uint64_t id;         /* of the segment, as the session's client calls it; 0: the manifest */
    uint32_t n_segments; /* of the session */
    int fd;              /* Owned, the caller's */
} kept_part_t;

gradd_status_t kept_open(const rundir_t *dir, const char *name, kept_look_t *out_look);
/* at: 0 = the manifest, else a segment. Fails with IO, or as the daemon says. */
gradd_status_t kept_part(kept_look_t *look, uint64_t at, kept_part_t *out_part);
void kept_close(kept_look_t *look);
/* `gradd forget --name NAME`: ends it. Fails as the daemon says, or with IO. */
gradd_status_t kept_forget(const rundir_t *dir, const options_t *options);
/* `gradd restart`: the daemon becomes a process of this binary. Fails as the daemon says, or with
 * IO. */
gradd_status_t owner_restart(const rundir_t *dir, const options_t *options);

#endif
