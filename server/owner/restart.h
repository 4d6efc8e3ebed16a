/* `gradd restart`: the owner becomes a process of the binary that lies at its path now.
 *
 * Clients keep their connections, and kept sessions stay; the worker is replaced, as if it had
 * died. Only the file from which the owner was started is executed, and only if the client that
 * asks is a process of it and says that it reads the state (state.h): no client can name another
 * one.
 */
#ifndef GRADD_SERVER_OWNER_RESTART_H
#define GRADD_SERVER_OWNER_RESTART_H

#include "server/owner/owner.h"

#define RESTART_COMMAND "resume:" /* and the number of the descriptor of the state */

/* Answers `restart`, a refusal at once; false if the packet is another one. If it is fine,
 * owner->successor and owner->asker are set, and the answer comes later. */
bool restart_answer(owner_t *owner, const relay_client_t *client, const wire_doc_t *packet,
                    bool *out_sent);
/* The worker has ended. Returns only on failure: IO, NOMEM; nothing has changed then. */
gradd_status_t restart_become(const owner_t *owner);
/* Tells the client that has asked, if there is one, and lets go of it. */
void restart_tell(owner_t *owner, gradd_status_t status);

#endif
