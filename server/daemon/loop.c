/* The event loop and the two threads that take turns in it. See loop.h. */
#include "server/daemon/loop.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "server/daemon/daemon.h"
#include "server/verbs/crash.h"

#define MAX_EVENTS      64
#define TICK_MS         500
#define ROUNDS_PER_POLL 16
#define POLL_US         30
#define POLL_LATER_US   1000
#define POLLED_OFTEN    10000 /* times: some 0.5 s */
#define WATCH_NS 1000000 /* a request that outlives one to two of these gets the standby thread */

/* By the engine thread, which alone uses the device: gives memory back after some idle time. */
static void rest(loop_t *loop, int64_t now) {
    const int64_t after_ms = loop->daemon->options->idle_trim * 1000;
    const unsigned n = atomic_load(&loop->n_requests);
    if (n != loop->n_before) {
        loop->n_before = n;
        loop->resting_ms = now;
    } else if (after_ms && loop->resting_ms && now - loop->resting_ms >= after_ms) {
        loop->resting_ms = 0;
        worker_trim(&loop->daemon->worker);
    }
}

/* One turn: all work that is there, else sleep until an event. The caller owns the loop. */
static void turn(loop_t *loop, bool is_engine) {
    daemon_t *daemon = loop->daemon;
    struct epoll_event events[MAX_EVENTS];
    laps_finish(&daemon->laps);
    laps_begin(&daemon->laps);
    bool busy = daemon_turn(daemon) || (is_engine && queue_ready(daemon->queue));
    /* No event tells that a device has written the word for which a job waits. */
    const bool polls = is_engine && !busy && queue_waits(daemon->queue);
    loop->polls = polls ? loop->polls + 1 : 0;
    if (polls) usleep(loop->polls < POLLED_OFTEN ? POLL_US : POLL_LATER_US);
    /* Requests that never pause must not keep the other descriptors from their turn. */
    if (busy && ++loop->rounds % ROUNDS_PER_POLL != 0) return;
    if (daemon_ended(daemon)) return;
    /* libzmq tells of a message once: sleep only after a round that found none. */
    bool quiet = !busy && !polls && queue_sleep(daemon->queue);
    int n = epoll_wait(daemon->epoll, events, MAX_EVENTS, quiet ? TICK_MS : 0);
    laps_begin(&daemon->laps);
    queue_wake(daemon->queue);
    for (int i = 0; i < n; i++)
        daemon_event(daemon, events[i].data.u64);
    int64_t now = session_now_ms();
    if (now - loop->ticked_ms < TICK_MS) return;
    loop->ticked_ms = now;
    daemon_tick(daemon);
    if (is_engine) rest(loop, now);
    laps_cause(&daemon->laps, "tick", 0);
    laps_end(&daemon->laps);
}

static void set_timer(loop_t *loop, long ns) {
    struct itimerspec when = {.it_value.tv_nsec = ns};
    timerfd_settime(loop->timer, 0, &when, NULL);
}

/* Setting a timer costs as much as a small request, so it runs on over several of them. */
static void arm(loop_t *loop) {
    if (!atomic_exchange(&loop->armed, true)) set_timer(loop, WATCH_NS);
}

/* ---- engine thread ---- */

static void handle_job(loop_t *loop, job_t *job) {
    daemon_t *daemon = loop->daemon;
    atomic_fetch_add(&loop->n_requests, 1);
    atomic_store(&loop->running, true);
    arm(loop);
    const bool finished = worker_handle(&daemon->worker, (request_t *)job);
    atomic_store(&loop->running, false);
    /* Sends the reply in the next turn, or wakes the standby thread, which does, and leaves. */
    if (finished)
        queue_finish(daemon->queue, job);
    else
        queue_again(daemon->queue, job);
}

static void *engine_main(void *arg) {
    loop_t *loop = arg;
    daemon_t *daemon = loop->daemon;
    prctl(PR_SET_NAME, "gradd-engine");
    crash_guard(&daemon->worker.lost);
    for (bool ended = false; !ended;) {
        job_t *job = queue_take(daemon->queue);
        if (job) handle_job(loop, job);
        if (!queue_ready(daemon->queue))
            pthread_mutex_lock(&loop->lock);
        else if (pthread_mutex_trylock(&loop->lock) != 0)
            continue; /* more to run, and the other thread serves the clients */
        turn(loop, true);
        ended = daemon_ended(daemon);
        pthread_mutex_unlock(&loop->lock);
    }
    atomic_store(&loop->ended, true);
    set_timer(loop, 1);
    return NULL;
}

/* ---- standby thread ---- */

/* Serves the clients until the engine is free. */
static void take_over(loop_t *loop) {
    if (pthread_mutex_trylock(&loop->lock) != 0) return; /* the engine is back already */
    while (atomic_load(&loop->running))
        turn(loop, false);
    daemon_turn(loop->daemon); /* the reply of the request that has just ended */
    pthread_mutex_unlock(&loop->lock);
}

static void stand_by(loop_t *loop) {
    unsigned seen = 0; /* what ran when the timer fired last */
    while (!atomic_load(&loop->ended)) {
        uint64_t count;
        if (read(loop->timer, &count, sizeof count) < 0) continue; /* EINTR */
        atomic_store(&loop->armed, false);
        unsigned now = atomic_load(&loop->n_requests);
        if (!atomic_load(&loop->running)) continue;
        if (now == seen) take_over(loop);
        seen = now;
        arm(loop);
    }
}

gradd_status_t loop_serve(loop_t *loop, daemon_t *daemon) {
    pthread_t engine;
    *loop = (loop_t){.daemon = daemon, .ticked_ms = session_now_ms()};
    loop->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
    if (loop->timer < 0) return GRADD_FAIL(IO, "timerfd: %s", strerror(errno));
    pthread_mutex_init(&loop->lock, NULL);
    int rc = pthread_create(&engine, NULL, engine_main, loop);
    if (rc == 0) {
        stand_by(loop);
        pthread_join(engine, NULL);
    }
    pthread_mutex_destroy(&loop->lock);
    close(loop->timer);
    return rc == 0 ? GRADD_OK : GRADD_FAIL(IO, "pthread_create: %s", strerror(rc));
}
