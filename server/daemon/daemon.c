/* Start, event loop, end. See daemon.h. */
#include "server/daemon/daemon.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/daemon/accept_budget.h"
#include "server/daemon/control.h"
#include "server/daemon/requests.h"
#include "server/device/device.h"
#include "server/host/log.h"
#include "server/host/machine.h"
#include "server/wire/version.h"

#define GREETING_MS      30000 /* from connecting to attach */
#define STALLED_MS       30000
#define REQUESTS_PER_RUN 64

/* The meaning of an epoll event: a kind, and the session's number for two of them. */
enum { ON_CONTROL, ON_PIDFD, ON_LISTENER, ON_ROUTER, ON_ZAP, ON_SIGNAL, ON_QUEUE };

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

/* Takes back what the engine has not begun. */
static void drop_lane(daemon_t *daemon, session_t *session, lane_t *lane) {
    for (job_t *job = queue_drop(daemon->queue, lane), *next; job; job = next) {
        next = job->next;
        session->n_pending--;
        request_destroy((request_t *)job);
    }
}

static void drop_waiting(daemon_t *daemon, session_t *session) {
    drop_lane(daemon, session, &session->lane);
    drop_lane(daemon, session, &session->memory_lane);
}

void daemon_end_session(daemon_t *daemon, session_t *session, const char *reason) {
    __atomic_store_n(&session->cancel, 1,
                     __ATOMIC_RELAXED); /* also of a wait for other processes */
    if (session->state == SESSION_CLOSING) return;
    session->state = SESSION_CLOSING;
    session->end_reason = reason;
    session->ends = true;
    unwatch(daemon, session->control);
    unwatch(daemon, gradd_lease_pidfd(session->lease));
    daemon->idle_since_ms = session_now_ms();
    drop_waiting(daemon, session);
    if (!device_mapper(daemon->worker.device)) { /* else the engine thread unmaps, and hangs up */
        close(session->control);
        session->control = -1;
        gradd_lease_end(session->lease); /* what no run uses is unmapped now */
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
    drop_waiting(daemon, session);
    if (session->n_pending == 0) daemon_end_session(daemon, session, reason);
}

void daemon_stop(daemon_t *daemon, const char *reason, bool cancel) {
    if (!daemon->stopping)
        log_event(LOG_INFO, "daemon_stop", "reason=%s sessions=%d", reason, daemon->table.n);
    daemon->stopping = true;
    for (int i = 0; i < daemon->table.n; i++) {
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
    unwatch(daemon, daemon->control);
    for (int i = 0; i < daemon->table.n; i++)
        daemon_end_session(daemon, daemon->table.sessions[i], "refused");
}

static void accept_session(daemon_t *daemon) {
    session_t *session;
    gradd_status_t st =
        control_accept(&daemon->table, daemon->control, daemon->router.uid, &session);
    if (st == GRADD_OK && session) {
        session->late = daemon->stopping;
        st = watch(daemon, session->control, ON_CONTROL, session->number);
        if (st == GRADD_OK)
            st = watch(daemon, gradd_lease_pidfd(session->lease), ON_PIDFD, session->number);
        if (st != GRADD_OK)
            daemon_end_session(daemon, session, "refused");
        else
            log_event(LOG_DEBUG, "connect", "session=%u pid=%d", session->number,
                      (int)session->pid);
    }
    if (st == GRADD_OK) return;
    log_event(LOG_WARN, "connect_refused", "what=\"%s\"", gradd_error_message());
    if (st == GRADD_E_IO) { /* out of descriptors: do not spin on a listener that stays readable */
        unwatch(daemon, daemon->control);
        daemon->control_paused = true;
    }
}

static void read_session(daemon_t *daemon, uint32_t number) {
    bool open;
    request_t *request;
    const control_host_t host = control_host(daemon->dir.path, daemon->worker.device);
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

/* ---- sockets ---- */

static gradd_status_t open_commands(daemon_t *daemon) {
    int fd;
    GRADD_TRY(rundir_listen(&daemon->dir, RUNDIR_COMMANDS, &fd));
    gradd_status_t st = daemon->router.context
                            ? router_listen(&daemon->router, daemon->dir.cmd, fd)
                            : router_open(&daemon->router, daemon->dir.cmd, fd, geteuid());
    if (st != GRADD_OK) {
        close(fd);
        rundir_unlisten(&daemon->dir, RUNDIR_COMMANDS);
    }
    return st;
}

static gradd_status_t open_control(daemon_t *daemon) {
    int fd, before = daemon->control;
    GRADD_TRY(rundir_listen(&daemon->dir, RUNDIR_CONTROL, &fd));
    if (before >= 0) {
        unwatch(daemon, before);
        close(before); /* clients that waited there reconnect */
    }
    daemon->control = fd;
    gradd_status_t st = watch(daemon, fd, ON_LISTENER, 0);
    daemon->control_paused = st != GRADD_OK; /* the next tick tries again */
    return st;
}

/* Makes anew what was removed under the daemon: sockets, lock or the whole directory. */
static gradd_status_t restore_sockets(daemon_t *daemon, pid_t *out_owner) {
    GRADD_TRY(rundir_restore(&daemon->dir, out_owner));
    if (*out_owner != 0) return GRADD_OK;
    /* ctl.sock is made last: a client that can connect to it finds everything ready. */
    if (!rundir_has(&daemon->dir, RUNDIR_COMMANDS)) GRADD_TRY(open_commands(daemon));
    if (!rundir_has(&daemon->dir, RUNDIR_CONTROL)) GRADD_TRY(open_control(daemon));
    return GRADD_OK;
}

/* A daemon that has become unreachable restores its sockets, for its own clients, too: `ps` and
 * `stop` have to reach it. It exits when it has no clients and its directory is gone or belongs to
 * another daemon. */
static void stay_reachable(daemon_t *daemon) {
    pid_t owner = 0;
    if (daemon->stopping) return;
    if (rundir_is_reachable(&daemon->dir)) {
        daemon->unreachable = false;
        return;
    }
    bool lost = daemon->displaced || daemon->unreachable || !rundir_exists(&daemon->dir);
    if (lost && daemon->table.n == 0) {
        daemon_stop(daemon, "the socket directory or a file in it is gone", false);
        return;
    }
    if (daemon->displaced) return;
    gradd_status_t st = restore_sockets(daemon, &owner);
    daemon->displaced = st == GRADD_E_LIMIT || (st == GRADD_OK && owner != 0);
    if (st == GRADD_OK && owner == 0)
        log_event(LOG_WARN, "sockets_restored", "dir=%s", daemon->dir.path);
    else if (st == GRADD_OK)
        log_event(LOG_WARN, "displaced", "by=%d dir=%s", (int)owner, daemon->dir.path);
    else if (!daemon->unreachable)
        log_event(LOG_WARN, "unreachable", "what=\"%s\"", gradd_error_message());
    daemon->unreachable = st != GRADD_OK;
}

void daemon_tick(daemon_t *daemon) {
    int64_t now = session_now_ms(), idle_exit = daemon->options->idle_exit * 1000;
    for (int i = 0; i < daemon->table.n; i++) {
        session_t *s = daemon->table.sessions[i];
        bool attaching = s->state == SESSION_NEW || s->state == SESSION_GREETED;
        if (attaching && now - s->born_ms > GREETING_MS)
            daemon_end_session(daemon, s, "never attached");
        else if (s->stalled_ms && now - s->stalled_ms > STALLED_MS)
            daemon_end_session(daemon, s, "does not read its replies");
        else if (s->state == SESSION_ATTACHED && s->ends)
            daemon_end_session(daemon, s, "connection closed");
    }
    if (daemon->control_paused && !daemon->stopping &&
        watch(daemon, daemon->control, ON_LISTENER, 0) == GRADD_OK)
        daemon->control_paused = false;
    stay_reachable(daemon);
    if (daemon->table.n > 0) daemon->idle_since_ms = now;
    if (idle_exit > 0 && now - daemon->idle_since_ms >= idle_exit && !daemon->stopping)
        daemon_stop(daemon, "idle", false);
}

/* ---- events ---- */

static void read_signals(daemon_t *daemon) {
    struct signalfd_siginfo info;
    while (read(daemon->signals, &info, sizeof info) == (ssize_t)sizeof info)
        /* The first one lets the request in progress finish, the second one cancels it. */
        daemon_stop(daemon, "signal", daemon->stopping);
}

void daemon_event(daemon_t *daemon, uint64_t data) {
    static const char *const causes[] = {
        [ON_CONTROL] = "control socket",
        [ON_PIDFD] = "process ended",
        [ON_LISTENER] = "connection",
        [ON_SIGNAL] = "signal",
    };
    uint32_t number = (uint32_t)data, kind = (uint32_t)(data >> 32);
    switch (kind) {
    case ON_CONTROL:
        read_session(daemon, number);
        break;
    case ON_PIDFD:
        bury_session(daemon, number);
        break;
    case ON_LISTENER:
        accept_session(daemon);
        break;
    case ON_SIGNAL:
        read_signals(daemon);
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

static gradd_status_t open_signals(int *out_fd) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGHUP);
    pthread_sigmask(SIG_BLOCK, &set, NULL); /* before any thread starts: all inherit it */
    signal(SIGPIPE, SIG_IGN);
    *out_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    return *out_fd >= 0 ? GRADD_OK : GRADD_FAIL(IO, "signalfd: %s", strerror(errno));
}

/* A limit on the size of files, which some shell had, would kill us for a line of the log. */
static void leave_file_limit(void) {
    struct rlimit limit;
    signal(SIGXFSZ, SIG_IGN);
    if (getrlimit(RLIMIT_FSIZE, &limit) != 0) return;
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_FSIZE, &limit);
}

static gradd_status_t open_sockets(daemon_t *daemon) {
    GRADD_TRY(open_commands(daemon));
    GRADD_TRY(open_control(daemon)); /* last: a client that connects finds everything ready */
    GRADD_TRY(watch(daemon, router_fd(&daemon->router), ON_ROUTER, 0));
    return watch(daemon, router_zap_fd(&daemon->router), ON_ZAP, 0);
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

static gradd_status_t start(daemon_t *daemon) {
    GRADD_TRY(open_signals(&daemon->signals));
    gate_open();
    daemon->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (daemon->epoll < 0) return GRADD_FAIL(IO, "epoll_create1: %s", strerror(errno));
    GRADD_TRY(watch(daemon, daemon->signals, ON_SIGNAL, 0));
    GRADD_TRY(queue_create(&daemon->queue));
    GRADD_TRY(watch(daemon, queue_fd(daemon->queue), ON_QUEUE, 0));
    daemon->worker = (worker_t){
        .root = "", .plain = !daemon->options->fuse, .dense_loss = !daemon->options->chunked_loss};
    lost_read(&daemon->worker.lost, &daemon->dir);
    const gradd_device_options_t device = {
        .name = daemon->options->device,
        .threads = machine_threads(daemon->options->threads),
        .memory_limit = daemon->options->memory_mib << 20,
        .compile_ms = daemon->options->compile_ms,
    };
    GRADD_TRY(open_device(&daemon->worker, &device, daemon->options->require_device));
    return open_sockets(daemon);
}

static void finish(daemon_t *daemon) {
    cache_finish(&daemon->worker);
    gradd_device_close(daemon->worker.device);
    router_close(&daemon->router);
    rundir_unlink(&daemon->dir);
    if (daemon->control >= 0) close(daemon->control);
    queue_destroy(daemon->queue);
    if (daemon->epoll >= 0) close(daemon->epoll);
    if (daemon->signals >= 0) close(daemon->signals);
}

static void log_start(const daemon_t *daemon) {
    const gradd_device_info_t *device = gradd_device_info(daemon->worker.device);
    log_event(LOG_INFO, "daemon_start",
              "version=%s pid=%d dir=%s device=%s products=\"%s\" bf16=%s threads=%d "
              "processors=%d memory_mib=%lld",
              GRADD_VERSION, (int)getpid(), daemon->dir.path, device->name, device->library,
              device->native_bf16 ? "native" : "widened", device->threads, machine_processors(),
              (long long)(device->memory_limit >> 20));
}

gradd_status_t daemon_serve(const options_t *options, pid_t *out_other) {
    static daemon_t daemon; /* one per process; large */
    daemon = (daemon_t){.options = options, .epoll = -1, .signals = -1, .control = -1};
    daemon.dir.folder = daemon.dir.lock = -1;
    leave_file_limit();
    GRADD_TRY(rundir_init(&daemon.dir, options->dir));
    GRADD_TRY(rundir_prepare(&daemon.dir));
    GRADD_TRY(rundir_lock(&daemon.dir, out_other));
    if (*out_other != 0) return GRADD_OK;
    prctl(PR_SET_NAME, "gradd");
    daemon.started_ms = daemon.idle_since_ms = session_now_ms();
    gradd_status_t st = start(&daemon);
    if (st == GRADD_OK) {
        log_start(&daemon);
        st = loop_serve(&daemon.loop, &daemon);
    }
    finish(&daemon);
    if (st == GRADD_OK)
        log_event(LOG_INFO, "daemon_end", "requests=%llu", (unsigned long long)daemon.n_requests);
    rundir_finish(&daemon.dir); /* last: now another daemon may start */
    return st;
}
