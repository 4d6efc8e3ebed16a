/* A directory that the users of a group share, and the folder of each of them in it.
 *
 * It belongs to root, and no other user can write to it. The supervisor (server/users) listens
 * there, makes a folder for each user, named by the uid, that is the user's alone, and starts a
 * daemon in it. To that daemon, and to all that talk to it, the folder is a directory as any other:
 * a program that is given a shared directory goes on to its user's folder (rundir_init).
 */
#ifndef GRADD_SERVER_HOST_SHARED_DIR_H
#define GRADD_SERVER_HOST_SHARED_DIR_H

#include <stdbool.h>
#include <sys/types.h>

#include "server/host/rundir.h"
#include "shm/status.h"

#define SHARED_DIR_SOCKET "users.sock" /* where a client asks for its daemon */

/* True of a directory that is root's and has mode 0750. Where this process is root's, too, a
 * supervisor must have listened there: else the directory is its own, as any other. */
bool shared_dir_is(const char *path);
/* The shared directory of which that is this process's folder, without links in its path. False if
 * it is none. */
bool shared_dir_around(const rundir_t *dir, char out_path[RUNDIR_PATH_MAX]);
/* Goes on to the folder of this process's user if that is a shared directory. Fails with IO if its
 * path is too long. */
gradd_status_t shared_dir_enter(rundir_t *dir);

/* ---- for the supervisor ---- */

/* Fills the paths: of an absolute one, whose parents may be links, the path without; its control
 * socket is SHARED_DIR_SOCKET. Fails with IO, also where another user than root can change what is
 * above it. */
gradd_status_t shared_dir_init(rundir_t *dir, const char *path);
/* Makes the directory (0750, root's and the group's) if it is missing, and opens it. Refuses one
 * that is a symlink, another user's or group's, or that others than root can write to, or that
 * others than the group can use. Fails with IO. */
gradd_status_t shared_dir_prepare(rundir_t *dir, gid_t group);
/* Makes the folder of a user (0700) if it is missing; refuses one that is a link, another user's
 * or open to others. Fails with IO. */
gradd_status_t shared_dir_make_folder(const rundir_t *dir, uid_t uid, gid_t gid);

#endif
