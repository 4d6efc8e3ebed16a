/* The directory of a daemon: its place, permitted owner, lock and two listening sockets.
 *
 * One flock on `lock` decides which process is the daemon of a directory; the kernel drops it
 * whenever that process ends, so a stale socket is one whose directory can be locked. Sockets are
 * replaced only under the lock. We bind and listen ourselves, because zmq_bind would silently take
 * over the path of a listening server.
 *
 * The daemon of a GPU has a directory of its own within the one of the CPU's, named by the client.
 *
 * A path may come to mean another directory while a daemon runs (the end of a login removes
 * /run/user/UID, a cleaner /tmp/gradd-UID), and another daemon may have locked that one. So files
 * are removed by name within the directory that we opened, and only while its lock is still ours.
 */
#ifndef GRADD_SERVER_HOST_RUNDIR_H
#define GRADD_SERVER_HOST_RUNDIR_H

#include <stdbool.h>
#include <sys/types.h>

#include "shm/status.h"

#define RUNDIR_PATH_MAX 108 /* of sockaddr_un, with the final 0 */
#define RUNDIR_CMD      "cmd.sock"
#define RUNDIR_CTL      "ctl.sock"
#define RUNDIR_LOCK     "lock"
#define RUNDIR_LOST     "lost" /* plans over which a device was lost */
#define RUNDIR_NO_GROUP ((gid_t) - 1)

typedef enum rundir_socket_e { RUNDIR_COMMANDS, RUNDIR_CONTROL, RUNDIR_SOCKETS } rundir_socket_t;

typedef struct rundir_s {
    char path[RUNDIR_PATH_MAX];
    char cmd[RUNDIR_PATH_MAX];
    char ctl[RUNDIR_PATH_MAX];
    int folder; /* Owned: the directory itself; -1 = not prepared */
    int lock;   /* Owned; -1 = not locked */
    struct {
        dev_t device;
        ino_t inode; /* 0 = not made */
    } sockets[RUNDIR_SOCKETS];
} rundir_t;

/* Fills the paths: `given` (may be NULL or empty), else $XDG_RUNTIME_DIR/gradd, else gradd-<uid> in
 * the temporary folder; of a shared directory (shared_dir.h) the user's folder in it. Fails with IO
 * when a socket's path would be longer than 107 bytes. */
gradd_status_t rundir_init(rundir_t *dir, const char *given);
/* The same of this path as it is. */
gradd_status_t rundir_at(rundir_t *dir, const char *path);
/* Unlocks. Accepts a failed one whose folder and lock are -1. */
void rundir_finish(rundir_t *dir);

/* Creates the directory (0700) if it is missing and opens it; refuses one that is a symlink, not
 * ours or open to others. Fails with IO. */
gradd_status_t rundir_prepare(rundir_t *dir);

/* Opens a plain file of this folder (AT_FDCWD: any path), flags as of openat(); a new one is the
 * user's alone. Never waits, as a fifo would make it. Returns -1 with errno, ENXIO for what is no
 * plain file. */
int rundir_open(int folder, const char *name, int flags);

/* Takes the lock of a prepared directory and writes our pid into it. *out_owner is 0 on success;
 * when another daemon holds it, the call succeeds too and *out_owner is that pid (-1 when it is not
 * readable). */
gradd_status_t rundir_lock(rundir_t *dir, pid_t *out_owner);
/* True if some process holds the lock. Holds it itself for a moment. */
bool rundir_is_locked(const rundir_t *dir);
/* Calls `visit` for each directory that a daemon may have: the one of rundir_init(given), then its
 * folders by name. Goes on after a failure; returns the last one, with its message. Errors: those
 * of rundir_init, and of `visit`. */
typedef gradd_status_t (*rundir_visit_t)(const rundir_t *dir, void *context);
gradd_status_t rundir_each(const char *given, rundir_visit_t visit, void *context);
/* The same for those in which a daemon runs. */
gradd_status_t rundir_each_running(const char *given, rundir_visit_t visit, void *context);
/* The pid of the daemon that holds the lock: 0 = none does, -1 = not readable. */
pid_t rundir_owner(const rundir_t *dir);
/* True while the path leads to the directory that was prepared. */
bool rundir_exists(const rundir_t *dir);
/* True while the directory that was prepared has the lock that we hold. */
bool rundir_owns(const rundir_t *dir);
/* True while the path of this socket leads to the one that we have made. */
bool rundir_has(const rundir_t *dir, rundir_socket_t which);
/* True while the paths lead to the lock that we hold and to our two sockets: clients find us, and
 * no other process can be the daemon there. */
bool rundir_is_reachable(const rundir_t *dir);
/* Makes directory and lock anew where the paths no longer lead to ours; sockets are the caller's.
 * *out_owner as in rundir_lock: another daemon may have taken the place. Fails as rundir_prepare
 * and rundir_lock do; then nothing has changed. */
gradd_status_t rundir_restore(rundir_t *dir, pid_t *out_owner);

/* A listening socket (mode 0600; commands: SOCK_STREAM, control: SOCK_SEQPACKET), replacing what
 * lies at its path. Only under the lock. Fails with IO. */
gradd_status_t rundir_listen(rundir_t *dir, rundir_socket_t which, int *out_fd);
/* The same, with mode 0660 for a group. */
gradd_status_t rundir_listen_for(rundir_t *dir, rundir_socket_t which, gid_t group, int *out_fd);
/* Removes a socket on which the daemon will not listen after all. */
void rundir_unlisten(rundir_t *dir, rundir_socket_t which);
/* Removes both sockets and what was noted, unless another daemon has locked the directory since:
 * then they are its. */
void rundir_unlink(const rundir_t *dir);

#endif
