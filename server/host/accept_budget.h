/* A budget of descriptors: what may still be accepted when they run short.
 *
 * libzmq accepts connections to cmd.sock in a thread of its own and aborts the process when accept
 * fails with EMFILE. So the daemon has an accept4() of its own, which libzmq's calls reach: a
 * connection beyond the budget is taken and closed at once (libzmq takes ECONNABORTED for a peer
 * that has left; a client's DEALER comes again), and a part of the descriptors stays free for the
 * control socket, segments and files.
 */
#ifndef GRADD_SERVER_HOST_ACCEPT_BUDGET_H
#define GRADD_SERVER_HOST_ACCEPT_BUDGET_H

#include <stdbool.h>

#include "shm/status.h"

/* Takes what the hard limit allows and opens the spare descriptor; once, before any thread. Fails
 * with LIMIT where that is too few for a daemon to answer. */
gradd_status_t gate_open(void);
/* accept4() with SOCK_CLOEXEC | SOCK_NONBLOCK, also out of the descriptors that are kept free. -1
 * with errno. */
int gate_accept(int listener);
/* True if this process may open two more descriptors. */
bool gate_has_room(void);

#endif
