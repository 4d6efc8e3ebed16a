/* The owner of a directory: lock, sockets, clients and their segments, and a worker that computes.
 *
 * `gradd serve` is an owner. It has one thread, opens no device and maps no memory of a client, so
 * a graph, a kernel or a driver can end the worker only. The owner then starts another worker, and
 * hangs up on the clients, which connect again and repeat what was outstanding. The worker has the
 * command socket: a step does not pass through the owner.
 *
 * Worker and owner hold one lock, so that no other daemon begins while a worker may still write to
 * the memory of clients.
 */
#ifndef GRADD_SERVER_OWNER_OWNER_H
#define GRADD_SERVER_OWNER_OWNER_H

#include <limits.h>
#include <sys/types.h>

#include "server/host/confine.h"
#include "server/host/options.h"
#include "server/host/rundir.h"
#include "server/owner/kept.h"
#include "server/owner/process.h"
#include "server/owner/relay.h"

#define OWNER_MAX_CLIENTS                                                                          \
    (SESSION_MAX + SESSION_MAX_SURPLUS + 32) /* the worker refuses them by name */
#define OWNER_PATH_BYTES PATH_MAX

/* The command line, of which a worker gets a copy. Borrowed. */
typedef struct owner_words_s {
    char **argv;    /* with `worker` in place of the command */
    char **command; /* where that is */
} owner_words_t;

typedef struct owner_s {
    const options_t *options; /* Borrowed */
    owner_words_t words;
    rundir_t dir;
    int epoll, signals;    /* Owned */
    int control, commands; /* Owned: listeners; -1: there is none (yet) */
    int n_listeners;       /* of commands, so far */
    bool paused;           /* nothing is accepted until the next tick */
    bool displaced;        /* the directory is another daemon's now */
    bool unreachable;      /* the last try to come back has failed */
    worker_process_t worker;
    bool resumed;                        /* another process was this one before */
    bool ready, was_ready;               /* this worker; any */
    bool listen_due, lock_due, stop_due; /* messages for which there was no room */
    bool stopping, cancel, ended;
    const char *reason;
    int code;
    int n_starts; /* in a row, of workers that were not ready */
    uint32_t n_workers, n_born;
    int64_t started_ms, idle_since_ms, ticked_ms;
    relay_client_t *clients[OWNER_MAX_CLIENTS]; /* Owned */
    int n_clients;
    kept_table_t kept;
    confined_t confined;
    char binary[OWNER_PATH_BYTES]; /* of which it is a process, as of its start */
    int successor;                 /* Owned: the binary to become; -1: none */
    int asker; /* Owned: to the client that has asked for that, and has no answer yet; -1: none */
} owner_t;

typedef struct owner_end_s {
    pid_t other; /* the daemon that runs in this directory already (-1: unknown); else 0 */
    int code;    /* 0, or the exit code of a worker that did not start or end as it should */
} owner_end_t;

/* Serves until it is told to stop. Fails with IO. */
gradd_status_t owner_serve(const options_t *options, owner_words_t words, owner_end_t *out_end);
/* The same for the process that an owner has become by `gradd restart`: `state` is what state_write
 * has made, and is closed. Fails with IO, VERSION. */
gradd_status_t owner_resume(const options_t *options, owner_words_t words, int state,
                            owner_end_t *out_end);

#endif
