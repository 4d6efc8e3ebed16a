/* What an owner hands on to the one that it becomes by `gradd restart`.
 *
 * A file in memory with one msgpack map: numbers of descriptors, which stay open across exec(), and
 * what is known of clients and kept sessions. The worker has ended by then. The reader checks all
 * of it, as another version has written it.
 */
#ifndef GRADD_SERVER_OWNER_STATE_H
#define GRADD_SERVER_OWNER_STATE_H

#include "server/owner/owner.h"

#define STATE_FORMAT 1 /* another meaning of the file is another number */

/* Writes the state, and lets its descriptors stay open across exec(), as *out_fd does. Fails with
 * IO, NOMEM. */
gradd_status_t state_write(const owner_t *owner, int *out_fd);
/* Reads it into an owner without clients; no descriptor stays open across exec() any more. Fails
 * with IO, NOMEM, VERSION (no state of this format); the owner has then what was read so far. */
gradd_status_t state_read(int fd, owner_t *owner);
/* No descriptor stays open across exec(), but for input, output and errors. */
void state_close_on_exec(void);

#endif
