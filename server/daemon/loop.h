/* Two threads, one event loop: which one waits for clients and which one runs their requests.
 *
 * Waking a thread costs more than a small request. So the engine thread itself waits for requests
 * while it has nothing to run: a request is received, run and answered by one thread. Before it
 * runs one it hands the loop back; one that runs for more than a millisecond or two wakes the
 * standby thread, which takes the loop and serves every client until the engine is free again. A
 * short request never pays for the second thread, and a long one never makes `ps` wait.
 *
 * The holder of `lock` owns everything that belongs to I/O: sockets, session table, router. ZeroMQ
 * allows a socket to move between threads across such a barrier. Only the engine thread runs
 * requests, hence only it opens OpenMP regions; another one makes plans (server/verbs/maker.h).
 */
#ifndef GRADD_SERVER_DAEMON_LOOP_H
#define GRADD_SERVER_DAEMON_LOOP_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "shm/status.h"

struct daemon_s;

typedef struct loop_s {
    struct daemon_s *daemon; /* Borrowed */
    pthread_mutex_t lock;    /* of the I/O role */
    int timer;               /* Owned: wakes the standby thread */
    atomic_bool running;     /* the engine thread is inside a request */
    atomic_bool armed;       /* the timer will fire */
    atomic_uint n_requests;  /* started so far */
    atomic_bool ended;
    unsigned rounds;    /* of the loop; by the holder of the lock */
    unsigned polls;     /* in a row for jobs that wait for a word; the same */
    int64_t ticked_ms;  /* the same */
    unsigned n_before;  /* requests at the last tick of the engine thread */
    int64_t resting_ms; /* since when there are no more; 0 = memory is given back */
} loop_t;

/* Runs both roles until the daemon has ended; the caller becomes the standby thread. Fails with IO
 * when the threads cannot be started. */
gradd_status_t loop_serve(loop_t *loop, struct daemon_s *daemon);

#endif
