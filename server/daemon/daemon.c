/* Start, event loop, end of the worker. See daemon.h. */
#include "server/daemon/daemon.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "platform/platform.h"
#include "server/daemon/control.h"
#include "server/daemon/requests.h"
#include "server/device/device.h"
#include "server/host/accept_budget.h"
#include "server/host/connections.h"
#include "server/host/log.h"
#include "server/host/machine.h"
#include "server/host/rundir.h"
#include "server/verbs/maker.h"
#include "server/wire/version.h"
#include "shm/discard.h"

#define GREETING_MS      30000 /* from connecting to attach */
#define STALLED_MS       30000
#define REQUESTS_PER_RUN 64
#define LINKS_PER_EVENT  8 /* messages of the owner */
#define FULL_MS          2000
#define STOOD_MS         2000 /* without a tick: this process has not run */

/* The meaning of an epoll event: a kind, and the session's number for two of them. */
enum { ON_CONTROL, ON_PIDFD, ON_LINK, ON_ROUTER, ON_ZAP, ON_QUEUE };

static gradd_status_t watch(daemon_t *daemon, int fd, uint32_t kind, uint32_t number) {
    struct epoll_event event = {.events = EPOLLIN,
                                .data.u64 = (uint64_t)kind << 32 | (uint64_t)number};
    if (epoll_ctl(daemon->epoll, EPOLL_CTL_ADD, fd, &event) == 0) return GRADD_OK;
    return GRADD_FAIL(IO, "epoll_ctl: %s", strerror(errno));
}

static void unwatch(daemon_t *daemon, int fd) {
    epoll_ctl(daemon->epoll, EPOLL_CTL_DEL, fd, NULL);
}

/* ---- sessions ---- */

static void drop(session_t *session, job_t *list) {
    for (job_t *job = list, *next; job; job = next) {
        next = job->next;
        session->n_pending--;
        request_destroy((request_t *)job);
    }
}

/* Takes back what the engine does not run just now. */
static void drop_waiting(daemon_t *daemon, session_t *session) {
    drop(session, queue_drop(daemon->queue, &session->lane));
    drop(session, queue_drop(daemon->queue, &session->memory_lane));
}

/* Takes back what the engine has not begun. */
static void drop_new(daemon_t *daemon, session_t *session) {
    drop(session, queue_drop_new(daemon->queue, &session->lane));
    drop(session, queue_drop_new(daemon->queue, &session->memory_lane));
}

void daemon_destroy_session(daemon_t *daemon, session_t *session) {
    /* One that only asked the owner something has no name. */
    log_event(session->client[0] ? LOG_INFO : LOG_DEBUG, "session_end",
              "session=%u pid=%d reason=\"%s\" requests=%llu", session->number, (int)session->pid,
              session->end_reason, (unsigned long long)session->n_requests);
    session_destroy(&daemon->table, session);
}

void daemon_end_session(daemon_t *daemon, session_t *session, const char *reason) {
    const bool attached = session->state == SESSION_ATTACHED;
    __atomic_store_n(&session->cancel, 1,
                     __ATOMIC_RELAXED); /* also of a wait for other processes */
    if (session->state == SESSION_CLOSING) return;
    session->state = SESSION_CLOSING;
    session->end_reason = reason;
    session->ends = true;
    unwatch(daemon, session->control);
    unwatch(daemon, gradd_lease_pidfd(session->lease));
    drop_waiting(daemon, session);
    if (!device_mapper(daemon->worker.device)) { /* else the engine thread unmaps, and hangs up */
        link_say_end(session->control);
        gradd_lease_end(session->lease); /* what no run uses is unmapped now */
        if (!attached) { /* the engine has nothing of it, and may be busy for long */
            daemon_destroy_session(daemon, session);
            return;
        }
    }
    request_t *end = request_create();
    if (!end) {
        /* Without memory for the last job the session stays, closed; the next tick tries again. */
        session->state = SESSION_ATTACHED;
        return;
    }
    end->session = session;
    queue_push_first(daemon->queue, &session->lane, &end->job);
}

void daemon_stop_session(daemon_t *daemon, session_t *session, const char *reason) {
    if (session->state == SESSION_CLOSING) return;
    drop_new(daemon, session);
    if (session->n_pending == 0) daemon_end_session(daemon, session, reason);
}

void daemon_stop(daemon_t *daemon, const char *reason, bool cancel) {
    if (!daemon->stopping)
        log_event(LOG_INFO, "daemon_stop", "reason=%s sessions=%d", reason, daemon->table.n);
    daemon->stopping = true;
    queue_hold(daemon->queue, false); /* nothing waits for the end of a drain */
    /* If there is no room, the owner has told us to stop, or will find us ended with status 0. */
    link_send(daemon->link, &(link_message_t){.kind = LINK_STOPPING}, NULL, 0);
    for (int i = daemon->table.n - 1; i >= 0; i--) { /* backwards: some are gone at once */
        session_t *session = daemon->table.sessions[i];
        if (cancel)
            daemon_end_session(daemon, session, reason);
        else
            daemon_stop_session(daemon, session, reason);
    }
}

/* Clients that have connected since daemon_stop are told to reconnect as long as a request is in
 * progress. After that their sessions end as well, and no more connections are accepted. */
static void end_late_sessions(daemon_t *daemon) {
    for (int i = 0; i < daemon->table.n; i++)
        if (!daemon->table.sessions[i]->late) return;
    daemon->closed = true;
    for (int i = daemon->table.n - 1; i >= 0; i--)
        daemon_end_session(daemon, daemon->table.sessions[i], "refused");
}

static gradd_status_t take_session(daemon_t *daemon, const link_message_t *message,
                                   const int fds[LINK_MAX_FDS]) {
    session_t *session;
    gradd_peer_t peer = {.pidfd = fds[1],
                         .pid = message->pid,
                         .uid = message->uid,
                         .gid = message->gid,
                         .start_ticks = message->start_ticks};
    if (daemon->closed || fds[0] < 0 || fds[1] < 0) { /* the owner hangs up as well */
        gradd_peer_finish(&peer);
        if (fds[0] >= 0) link_say_end(fds[0]);
        if (fds[0] >= 0) close(fds[0]);
        return GRADD_OK;
    }
    GRADD_TRY(
        session_create(&daemon->table, message->number, message->token, fds[0], &peer, &session));
    session->late = daemon->stopping;
    gradd_status_t st = watch(daemon, session->control, ON_CONTROL, session->number);
    if (st == GRADD_OK)
        st = watch(daemon, gradd_lease_pidfd(session->lease), ON_PIDFD, session->number);
    if (st != GRADD_OK)
        daemon_end_session(daemon, session, "refused");
    else
        log_event(LOG_DEBUG, "connect", "session=%u pid=%d", session->number, (int)session->pid);
    return st;
}

static void read_session(daemon_t *daemon, uint32_t number) {
    bool open;
    request_t *request;
    control_host_t host = control_host(daemon->dir->path, daemon->owner, daemon->worker.device);
    host.quotas = &daemon->quotas;
    host.table = &daemon->table;
    host.queue = daemon->queue;
    session_t *session = session_by_number(&daemon->table, number);
    if (!session || session->ends) return;
    control_read(session, &host, &open, &request);
    if (request) {
        unwatch(daemon, session->control); /* until it is answered */
        session->n_pending++;
        queue_push(daemon->queue, &session->memory_lane, &request->job);
    }
    if (!open) daemon_end_session(daemon, session, "connection closed");
}

void daemon_resume_session(daemon_t *daemon, session_t *session) {
    if (watch(daemon, session->control, ON_CONTROL, session->number) == GRADD_OK) return;
    daemon_end_session(daemon, session, "not watched");
}

static void bury_session(daemon_t *daemon, uint32_t number) {
    session_t *session = session_by_number(&daemon->table, number);
    if (session) daemon_end_session(daemon, session, "process ended");
}

/* ---- the owner ---- */

static gradd_status_t take_listener(daemon_t *daemon, int fd) {
    const gradd_status_t st = daemon->router.context
                                  ? router_listen(&daemon->router, daemon->dir->cmd, fd)
                                  : router_open(&daemon->router, daemon->dir->cmd, fd, geteuid());
    if (st != GRADD_OK && fd >= 0) close(fd);
    return st;
}

static gradd_status_t take_message(daemon_t *daemon, const link_message_t *message,
                                   const int fds[LINK_MAX_FDS]) {
    switch (message->kind) {
    case LINK_BEGIN:
        daemon->owner = daemon->worker.owner = message->pid;
        daemon->started_ms = message->started_ms;
        daemon->n_workers = message->n_workers;
        memcpy(daemon->owner_confined, message->confined, sizeof daemon->owner_confined);
        return take_listener(daemon, fds[0]);
    case LINK_LISTEN:
        return take_listener(daemon, fds[0]);
    case LINK_LOCK:
        close(daemon->lock);
        daemon->lock = fds[0];
        return GRADD_OK;
    case LINK_SESSION:
        return take_session(daemon, message, fds);
    case LINK_STOP:
        snprintf(daemon->reason, sizeof daemon->reason, "%.*s", LINK_REASON_BYTES - 1,
                 message->reason);
        daemon_stop(daemon, daemon->reason, message->cancel);
        return GRADD_OK;
    case LINK_READY:
    case LINK_STOPPING:
        break;
    }
    return GRADD_FAIL(INTERNAL, "message %d of the owner", (int)message->kind);
}

/* Out of descriptors, a client stays where it is until a tick: received now, it would be lost.
 * After some time it is, as the word to stop may be behind it. */
static bool must_wait(daemon_t *daemon) {
    const int64_t now = session_now_ms();
    if (!link_comes(daemon->link, LINK_SESSION) || gate_has_room()) {
        daemon->full_ms = 0;
        return false;
    }
    if (!daemon->full_ms) daemon->full_ms = now;
    if (now - daemon->full_ms >= FULL_MS) return false;
    unwatch(daemon, daemon->link);
    return true;
}

/* Without an owner the process must not live: another may take the directory. */
static void read_link(daemon_t *daemon) {
    link_message_t message;
    int fds[LINK_MAX_FDS];
    bool any = true;
    for (int i = 0; i < LINKS_PER_EVENT && any; i++) {
        if (must_wait(daemon)) return;
        gradd_status_t st = link_receive(daemon->link, &message, fds, &any);
        if (st == GRADD_E_IO) _exit(1);
        if (st == GRADD_OK && any) st = take_message(daemon, &message, fds);
        if (st != GRADD_OK)
            log_event(LOG_WARN, "connect_refused", "what=\"%s\"", gradd_error_message());
    }
}

/* Stopped, starved, or on a machine that was suspended: clients may have said what was not heard.
 * That time counts against none of them. */
static void forgive(daemon_t *daemon, int64_t ms) {
    log_event(LOG_WARN, "stood_still", "ms=%lld", (long long)ms);
    connections_forgive(ms);
    for (int i = 0; i < daemon->table.n; i++) {
        session_t *s = daemon->table.sessions[i];
        s->awaited_ms += ms;
        if (s->stalled_ms) s->stalled_ms += ms;
    }
}

void daemon_tick(daemon_t *daemon) {
    const int64_t now = session_now_ms(), past = now - daemon->paced_ms;
    if (past >= STOOD_MS) forgive(daemon, past);
    daemon->paced_ms = now;
    connections_expire(now);
    if (daemon->full_ms) {
        watch(daemon, daemon->link, ON_LINK, 0);
        read_link(daemon);
    }
    worker_tell_room(&daemon->worker);
    for (int i = daemon->table.n - 1; i >= 0; i--) {
        session_t *s = daemon->table.sessions[i];
        if (past > 0) session_pace_look(&s->pace, past);
        bool attaching = s->state == SESSION_NEW || s->state == SESSION_GREETED;
        if (attaching && now - s->awaited_ms > GREETING_MS)
            daemon_end_session(daemon, s, "never attached");
        else if (s->stalled_ms && now - s->stalled_ms > STALLED_MS)
            daemon_end_session(daemon, s, "does not read its replies");
        else if (s->state == SESSION_ATTACHED && s->ends)
            daemon_end_session(daemon, s, "connection closed");
        else if (s->state == SESSION_ATTACHED && !connections_live(s->source, s->source_number))
            daemon_end_session(daemon, s, "its requests' connection closed");
    }
}

/* ---- events ---- */

void daemon_event(daemon_t *daemon, uint64_t data) {
    static const char *const causes[] = {
        [ON_CONTROL] = "control socket",
        [ON_PIDFD] = "process ended",
        [ON_LINK] = "owner",
    };
    uint32_t number = (uint32_t)data, kind = (uint32_t)(data >> 32);
    switch (kind) {
    case ON_CONTROL:
        read_session(daemon, number);
        break;
    case ON_PIDFD:
        bury_session(daemon, number);
        break;
    case ON_LINK:
        read_link(daemon);
        break;
    default: /* the sockets and the queue are looked at in every round */
        return;
    }
    laps_cause(&daemon->laps, causes[kind], number);
    laps_end(&daemon->laps);
}

bool daemon_turn(daemon_t *daemon) {
    bool any = router_admit(&daemon->router);
    laps_cause(&daemon->laps, "admission", 0);
    laps_end(&daemon->laps);
    for (int i = 0; i < REQUESTS_PER_RUN; i++) {
        request_t *request = router_receive(&daemon->router);
        if (!request) break;
        requests_handle(daemon, request);
        laps_end(&daemon->laps);
        any = true;
    }
    for (job_t *job = queue_reap(daemon->queue), *next; job; job = next) {
        next = job->next;
        requests_finish(daemon, (request_t *)job);
        laps_end(&daemon->laps);
        any = true;
    }
    if (daemon->stopping) end_late_sessions(daemon);
    return any;
}

bool daemon_ended(const daemon_t *daemon) {
    return daemon->stopping && daemon->table.n == 0 && queue_depth(daemon->queue) == 0;
}

/* ---- start and end ---- */

/* The first message of the owner has come before the device is open, or comes now. */
static gradd_status_t begin(daemon_t *daemon) {
    link_message_t message;
    int fds[LINK_MAX_FDS];
    bool any;
    struct pollfd p = {.fd = daemon->link, .events = POLLIN};
    daemon->paced_ms = session_now_ms();
    while (poll(&p, 1, -1) < 0 && errno == EINTR)
        ;
    GRADD_TRY(link_receive(daemon->link, &message, fds, &any));
    if (!any || message.kind != LINK_BEGIN) return GRADD_FAIL(INTERNAL, "the owner is no owner");
    return take_message(daemon, &message, fds);
}

/* Where the wanted device is known and cannot be used (no plug-in, no driver, no GPU, a library
 * that is missing), a daemon with the default one is worth more than none. Its clients are told. */
static gradd_status_t open_device(worker_t *worker, const gradd_device_options_t *wanted,
                                  bool required) {
    gradd_device_options_t other = *wanted;
    gradd_status_t status = worker_open_device(worker, wanted);
    if (required || (status != GRADD_E_DEVICE && status != GRADD_E_VERSION)) return status;
    log_event(LOG_WARN, "device", "wanted=%s used=default reason=\"%s\"", wanted->name,
              gradd_error_message());
    snprintf(worker->missed, sizeof worker->missed, "%s: %s", wanted->name, gradd_error_message());
    other.name = NULL;
    return worker_open_device(worker, &other);
}

static bool makes_way(void *queue) {
    return queue_makes_way(queue);
}

/* Before there are threads, and a device: of this one no driver is known to need more. */
static void confine_start(daemon_t *daemon) {
    const bool on_host = options_on_host(daemon->options);
    confine_end_first();
    if (daemon->options->debuggable) return;
    confine_process(on_host, &daemon->confined);
    if (on_host) confine_paths(false, daemon->dir->folder, &daemon->confined);
}

/* Large memory is given back by a thread: it takes a tenth of a second for a GiB. */
static const gradd_discarder_t discarder = {gradd_discard_mapping, gradd_discard_wait};

static gradd_status_t start(daemon_t *daemon) {
    confine_start(daemon);
    GRADD_TRY(gate_open());
    daemon->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (daemon->epoll < 0) return GRADD_FAIL(IO, "epoll_create1: %s", strerror(errno));
    GRADD_TRY(queue_create(&daemon->queue));
    GRADD_TRY(watch(daemon, queue_fd(daemon->queue), ON_QUEUE, 0));
    daemon->worker = (worker_t){
        .root = "", .plain = !daemon->options->fuse, .dense_loss = !daemon->options->chunked_loss};
    daemon->worker.wait_ms = daemon->options->wait * 1000;
    lost_read(&daemon->worker.lost, daemon->dir);
    if (quota_read(&daemon->quotas, daemon->dir->folder) != GRADD_OK)
        log_event(LOG_WARN, "quotas", "what=\"%s\"", gradd_error_message());
    const gradd_device_options_t device = {
        .name = daemon->options->device,
        .threads = machine_threads(daemon->options->threads),
        .memory_limit = daemon->options->memory_mib << 20,
        .compile_ms = daemon->options->compile_ms,
    };
    GRADD_TRY(open_device(&daemon->worker, &device, daemon->options->require_device));
    device_set_way(daemon->worker.device, makes_way, daemon->queue);
    gradd_discarder = &discarder;
    GRADD_TRY(maker_start(&daemon->worker, &daemon->worker.maker));
    GRADD_TRY(begin(daemon));
    GRADD_TRY(watch(daemon, router_fd(&daemon->router), ON_ROUTER, 0));
    GRADD_TRY(watch(daemon, router_zap_fd(&daemon->router), ON_ZAP, 0));
    GRADD_TRY(watch(daemon, daemon->link, ON_LINK, 0));
    if (!daemon->options->debuggable && options_on_host(daemon->options))
        confine_calls(false, &daemon->confined);
    return GRADD_OK;
}

static void finish(daemon_t *daemon) {
    maker_stop(daemon->worker.maker);
    cache_finish(&daemon->worker);
    gradd_device_close(daemon->worker.device);
    router_close(&daemon->router);
    queue_destroy(daemon->queue);
    if (daemon->epoll >= 0) close(daemon->epoll);
    close(daemon->link);
}

static void log_start(const daemon_t *daemon) {
    const gradd_device_info_t *device = gradd_device_info(daemon->worker.device);
    log_event(LOG_INFO, daemon->n_workers ? "worker_start" : "daemon_start",
              "version=%s pid=%d worker=%d dir=%s device=%s products=\"%s\" bf16=%s threads=%d "
              "processors=%d memory_mib=%lld",
              GRADD_VERSION, (int)daemon->owner, (int)getpid(), daemon->dir->path, device->name,
              device->library, device->native_bf16 ? "native" : "widened", device->threads,
              machine_processors(), (long long)(device->memory_limit >> 20));
}

/* What the owner has left at these numbers, close-on-exec from here on. */
static gradd_status_t find_owner(daemon_t *daemon) {
    daemon->link = LINK_DESCRIPTOR;
    daemon->lock = LOCK_DESCRIPTOR;
    if (fcntl(daemon->link, F_SETFD, FD_CLOEXEC) == 0 &&
        fcntl(daemon->lock, F_SETFD, FD_CLOEXEC) == 0)
        return GRADD_OK;
    return GRADD_FAIL(IO, "`gradd serve` starts a worker, nothing else does");
}

gradd_status_t daemon_work(const options_t *options) {
    static daemon_t daemon; /* one per process; large */
    static rundir_t dir;    /* not locked: that is the owner's part */
    daemon = (daemon_t){.options = options, .epoll = -1};
    GRADD_TRY(find_owner(&daemon));
    GRADD_TRY(rundir_init(&dir, options->dir));
    GRADD_TRY(rundir_prepare(&dir));
    daemon.dir = &dir;
    prctl(PR_SET_NAME, "gradd-worker");
    gradd_status_t st = start(&daemon);
    if (st == GRADD_OK) {
        log_start(&daemon);
        st = link_send(daemon.link, &(link_message_t){.kind = LINK_READY}, NULL, 0);
    }
    if (st == GRADD_OK) st = loop_serve(&daemon.loop, &daemon);
    finish(&daemon);
    rundir_finish(&dir);
    if (st == GRADD_OK)
        log_event(LOG_INFO, "daemon_end", "requests=%llu", (unsigned long long)daemon.n_requests);
    return st; /* the lock is free when process and owner have ended */
}
