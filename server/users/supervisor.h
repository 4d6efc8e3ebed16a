/* The supervisor of a machine's users: `gradd serve --allow-group`.
 *
 * It listens in a shared directory (server/host/shared_dir.h), and starts a daemon for each user
 * of a group that connects: a whole one, owner and worker, which runs under that user's uid in a
 * folder that is that user's alone. So what separates users is the kernel, by the uids of
 * processes: their memory, sockets and files. The supervisor runs as root, for setuid() alone: it
 * reads nothing that a client sends, has no descriptor of a client's memory, and no step passes
 * through it. Daemons outlive it, and the next one leaves those alone that are there.
 */
#ifndef GRADD_SERVER_USERS_SUPERVISOR_H
#define GRADD_SERVER_USERS_SUPERVISOR_H

#include <sys/types.h>

#include "server/host/options.h"
#include "shm/status.h"

/* Serves until SIGTERM, SIGINT or SIGHUP. To the daemons that it has started it passes that on as
 * SIGTERM, and waits for none. argv is
 * its command line, of which each daemon gets a copy, with a folder for the directory. *out_other
 * is the pid of another supervisor that has the directory already (-1: unknown), else 0. Fails with
 * UNSUPPORTED (not root; no such group; no directory is given), IO. */
gradd_status_t supervisor_serve(const options_t *options, char *const *argv, pid_t *out_other);

#endif
