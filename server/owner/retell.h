/* Clients of a worker that has ended move to the next one.
 *
 * The owner says to the next worker what the client has said to the former one, packet by packet:
 * `hello`, the memory of its turns, its segments, each with its descriptor. Then the client gets
 * the packet `replaced` on its connection: the answer to that `hello`, with a new nonce, and
 * whether a packet of its own has had no answer. It attaches, which gives it the token that it has,
 * and repeats its requests. A client that does not say in `hello` that it reads `replaced` is hung
 * up on instead, and connects again.
 */
#ifndef GRADD_SERVER_OWNER_RETELL_H
#define GRADD_SERVER_OWNER_RETELL_H

#include "server/owner/relay.h"

#define RETELL_MAX_TRIES 3 /* workers in a row that end over one client */

/* The worker has ended. True if the client stays, and waits for the next one. */
bool retell_wait(relay_client_t *client);
/* There is a worker, with its end of a pair: the first packet. */
relay_state_t retell_begin(relay_client_t *client, int inner);
/* An answer of the worker, while client->moves: the next packet, or the client's notice. */
relay_state_t retell_go_on(relay_client_t *client);

#endif
