/* Event loop of the owner. See owner.h. */
#include "server/owner/owner.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include "server/host/accept_budget.h"
#include "server/host/log.h"
#include "server/host/rundir.h"
#include "server/host/signals.h"
#include "server/owner/kept.h"
#include "server/owner/process.h"
#include "server/owner/relay.h"
#include "server/owner/restart.h"
#include "server/owner/retell.h"
#include "server/owner/state.h"
#include "server/session/link.h"
#include "server/session/session.h"

#define MAX_EVENTS    64
#define TICK_MS       500
#define LOST_MS       1000 /* in which a worker that is dying has ended */
#define MAX_LISTENERS 64   /* of commands: each keeps a descriptor in the worker */
#define MAX_STARTS    5    /* of workers in a row that end before they are ready */

/* The meaning of an epoll event: a kind, and the client's number for the last three. */
enum { ON_LISTENER, ON_SIGNAL, ON_LINK, ON_WORKER, ON_OUTER, ON_INNER, ON_PIDFD };

static uint64_t event_data(uint32_t kind, uint32_t number) {
    return (uint64_t)kind << 32 | number;
}

static gradd_status_t watch(const owner_t *owner, int fd, uint32_t kind, uint32_t number) {
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = event_data(kind, number)};
    if (epoll_ctl(owner->epoll, EPOLL_CTL_ADD, fd, &event) == 0) return GRADD_OK;
    return GRADD_FAIL(IO, "epoll_ctl: %s", strerror(errno));
}

static void unwatch(const owner_t *owner, int fd) {
    epoll_ctl(owner->epoll, EPOLL_CTL_DEL, fd, NULL);
}

/* Nothing is read from a client that waits, or that has said its last word. */
static void watch_outer(const owner_t *owner, const relay_client_t *client) {
    if (client->outer < 0) return;
    struct epoll_event event = {.events = client->waits || client->drains ? 0 : EPOLLIN,
                                .data.u64 = event_data(ON_OUTER, client->number)};
    epoll_ctl(owner->epoll, EPOLL_CTL_MOD, client->outer, &event);
}

/* ---- messages to the worker ---- */

/* What finds no room is sent at the next tick. */
static void send_due(owner_t *owner) {
    const int link = owner->worker.link;
    link_message_t stop = {.kind = LINK_STOP, .cancel = owner->cancel};
    if (!owner->ready) return;
    if (owner->lock_due)
        owner->lock_due =
            link_send(link, &(link_message_t){.kind = LINK_LOCK}, &owner->dir.lock, 1) != GRADD_OK;
    if (owner->listen_due)
        owner->listen_due = link_send(link, &(link_message_t){.kind = LINK_LISTEN},
                                      &owner->commands, 1) != GRADD_OK;
    if (!owner->stop_due) return;
    snprintf(stop.reason, sizeof stop.reason, "%s", owner->reason);
    owner->stop_due = link_send(link, &stop, NULL, 0) == GRADD_E_LIMIT;
}

static void stop(owner_t *owner, const char *reason, bool cancel) {
    owner->stopping = true;
    owner->reason = reason;
    owner->cancel |= cancel;
    owner->stop_due = true;
    if (owner->worker.pid && !owner->ready)
        kill(owner->worker.pid, SIGKILL); /* it has no clients */
    send_due(owner);
}

/* ---- clients ---- */

static relay_client_t *find_client(const owner_t *owner, uint32_t number) {
    for (int i = 0; i < owner->n_clients; i++)
        if (owner->clients[i]->number == number) return owner->clients[i];
    return NULL;
}

static void end_client(owner_t *owner, relay_client_t *client) {
    for (int i = 0; i < owner->n_clients; i++)
        if (owner->clients[i] == client) {
            owner->clients[i] = owner->clients[--owner->n_clients];
            break;
        }
    /* Worker and kept session may have it open, too: closed here it would be reported for ever. */
    unwatch(owner, client->peer.pidfd);
    kept_leave(&owner->kept, client);
    relay_destroy(client);
    owner->idle_since_ms = session_now_ms();
}

/* The client is gone, or the worker has done with it. What it has named is taken over only when the
 * worker writes to it no more: then its end of the pair closes. */
static void part_with(owner_t *owner, relay_client_t *client) {
    if (client->leaves) return;
    if (!owner->ready || client->inner < 0 || client->lost_ms || !kept_has(&owner->kept, client))
        end_client(owner, client);
    else
        relay_leave(client);
}

/* *out_end: the owner's end of a pair, of which the worker has the other one. */
static gradd_status_t lend(owner_t *owner, const relay_client_t *client, int *out_end) {
    const gradd_peer_t *peer = &client->peer;
    int ends[2];
    link_message_t message = {.kind = LINK_SESSION,
                              .pid = peer->pid,
                              .uid = peer->uid,
                              .gid = peer->gid,
                              .start_ticks = peer->start_ticks,
                              .number = client->number};
    memcpy(message.token, client->token, sizeof message.token);
    GRADD_TRY(link_create(ends));
    gradd_status_t st = watch(owner, ends[0], ON_INNER, client->number);
    if (st == GRADD_OK)
        st = link_send(owner->worker.link, &message, (int[]){ends[1], peer->pidfd}, 2);
    close(ends[1]);
    if (st == GRADD_OK)
        *out_end = ends[0];
    else
        close(ends[0]);
    return st;
}

static gradd_status_t admit(owner_t *owner, relay_client_t *client) {
    GRADD_TRY(session_draw_key(client->token));
    GRADD_TRY(watch(owner, client->outer, ON_OUTER, client->number));
    GRADD_TRY(watch(owner, client->peer.pidfd, ON_PIDFD, client->number));
    const gradd_status_t st = lend(owner, client, &client->inner);
    if (st == GRADD_OK || link_has_room(owner->worker.link)) return st;
    client->waits = true; /* for the next worker */
    watch_outer(owner, client);
    return GRADD_OK;
}

/* The descriptor stays the caller's on failure. */
static gradd_status_t add_client(owner_t *owner, int fd, uint64_t ticks) {
    gradd_peer_t peer = GRADD_PEER_INIT;
    GRADD_TRY(gradd_peer_identify(fd, ticks, GRADD_LEASE_AUTO, &peer));
    gradd_status_t st = GRADD_OK;
    if (peer.uid != geteuid())
        st = GRADD_FAIL(SESSION, "uid %u may not use this daemon", (unsigned)peer.uid);
    relay_client_t *client = st == GRADD_OK ? relay_create(owner->n_born + 1, fd, &peer) : NULL;
    if (!client) {
        gradd_peer_finish(&peer);
        return st != GRADD_OK ? st : GRADD_FAIL(NOMEM, "no memory for a client");
    }
    owner->n_born++;
    owner->clients[owner->n_clients++] = client;
    if (admit(owner, client) == GRADD_OK) return GRADD_OK;
    log_event(LOG_WARN, "connect_refused", "what=\"%s\"", gradd_error_message());
    end_client(owner, client);
    return GRADD_OK;
}

/* Connections stay where they are, at the listener, as long as nothing can be done with them: until
 * the next tick, or until the link has room. */
static void pause_accepting(owner_t *owner) {
    if (owner->paused) return;
    unwatch(owner, owner->control);
    owner->paused = true;
}

static void watch_link(const owner_t *owner, uint32_t events) {
    struct epoll_event event = {.events = events, .data.u64 = event_data(ON_LINK, 0)};
    epoll_ctl(owner->epoll, EPOLL_CTL_MOD, owner->worker.link, &event);
}

static void accept_client(owner_t *owner) {
    const bool has_room = owner->ready && link_has_room(owner->worker.link);
    if (!has_room || owner->n_clients == OWNER_MAX_CLIENTS) {
        if (owner->ready && !has_room) watch_link(owner, EPOLLIN | EPOLLOUT);
        pause_accepting(owner);
        return;
    }
    const int fd = gate_accept(owner->control);
    const uint64_t ticks = gradd_lease_clock_ticks();
    if (fd < 0) {
        if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) return;
        log_event(LOG_WARN, "connect_refused", "what=\"accept: %s\"", strerror(errno));
        pause_accepting(owner); /* out of descriptors: the listener stays readable */
        return;
    }
    const gradd_status_t st = add_client(owner, fd, ticks);
    if (st == GRADD_OK) return;
    log_event(LOG_WARN, "connect_refused", "what=\"%s\"", gradd_error_message());
    close(fd);
    if (st == GRADD_E_IO) pause_accepting(owner);
}

/* A client whose worker has died does not see an end before the process has ended: until then that
 * may write to its memory (replace_worker). */
static void settle(owner_t *owner, relay_client_t *client, relay_state_t state) {
    if (state == RELAY_OVER) {
        part_with(owner, client);
        return;
    }
    if (state == RELAY_LOST && client->leaves) {
        end_client(owner, client);
        return;
    }
    if (state == RELAY_LOST) {
        client->waits = true;
        client->lost_ms = session_now_ms();
        unwatch(owner, client->inner);
    }
    watch_outer(owner, client);
}

/* Gives the clients of the former worker to this one; false if some have to wait for room. */
static bool move_clients(owner_t *owner) {
    for (int i = owner->n_clients - 1; i >= 0; i--) {
        relay_client_t *client = owner->clients[i];
        int end;
        if (client->inner >= 0) continue;
        if (!link_has_room(owner->worker.link)) {
            watch_link(owner, EPOLLIN | EPOLLOUT);
            return false;
        }
        if (lend(owner, client, &end) == GRADD_OK) {
            settle(owner, client, retell_begin(client, end));
        } else if (link_has_room(owner->worker.link)) { /* it lives */
            log_event(LOG_WARN, "not_moved", "what=\"%s\"", gradd_error_message());
            end_client(owner, client);
        }
    }
    return true;
}

static void resume_accepting(owner_t *owner) {
    if (owner->control < 0 || !owner->paused || !owner->ready || !move_clients(owner)) return;
    owner->paused = watch(owner, owner->control, ON_LISTENER, 0) != GRADD_OK;
}

static const relay_client_t *find_for_kept(void *context, uint32_t number) {
    return find_client(context, number);
}

static int count_users(void *context, int fd) {
    const owner_t *owner = context;
    struct stat memory, other;
    int n = 0;
    if (fstat(fd, &memory) != 0) return 0;
    for (int i = 0; i < owner->n_clients; i++)
        for (uint32_t k = 0; k < owner->clients[i]->n_segments; k++) {
            const int held = owner->clients[i]->segments[k].fd;
            if (held < 0 || fstat(held, &other) != 0 || other.st_ino != memory.st_ino ||
                other.st_dev != memory.st_dev)
                continue;
            n++;
            break;
        }
    return n;
}

static kept_clients_t for_kept(owner_t *owner) {
    return (kept_clients_t){find_for_kept, count_users, owner};
}

static bool answer_own(void *context, relay_client_t *client, const wire_doc_t *packet,
                       bool *out_sent) {
    owner_t *owner = context;
    const kept_clients_t clients = for_kept(owner);
    return restart_answer(owner, client, packet, out_sent) ||
           kept_answer(&owner->kept, client, packet, &clients, out_sent);
}

static void read_client(owner_t *owner, uint32_t number, uint32_t events) {
    relay_client_t *client = find_client(owner, number);
    if (!client) return;
    if ((events & EPOLLIN) && !client->waits && !client->drains)
        settle(owner, client, relay_from_client(client, answer_own, owner));
    else if (events & (EPOLLHUP | EPOLLERR))
        part_with(owner, client);
}

static void read_answer(owner_t *owner, uint32_t number) {
    relay_client_t *client = find_client(owner, number);
    if (!client || client->inner < 0) return;
    settle(owner, client, client->moves ? retell_go_on(client) : relay_from_worker(client));
}

static void bury_client(owner_t *owner, uint32_t number) {
    relay_client_t *client = find_client(owner, number);
    if (!client) return;
    unwatch(owner, client->peer.pidfd);
    part_with(owner, client);
}

/* ---- the worker ---- */

static gradd_status_t start_worker(owner_t *owner) {
    link_message_t begin = {.kind = LINK_BEGIN,
                            .pid = getpid(),
                            .n_workers = owner->n_workers,
                            .started_ms = owner->started_ms};
    _Static_assert(sizeof begin.confined >= CONFINE_TEXT_BYTES, "the text fits");
    confine_text(&owner->confined, begin.confined);
    owner->ready = owner->listen_due = owner->lock_due = false;
    GRADD_TRY(process_start(owner->words.argv, owner->dir.lock, &owner->worker));
    gradd_status_t st = watch(owner, owner->worker.pidfd, ON_WORKER, 0);
    if (st == GRADD_OK) st = watch(owner, owner->worker.link, ON_LINK, 0);
    if (st != GRADD_OK) {
        kill(owner->worker.pid, SIGKILL);
        unwatch(owner, owner->worker.pidfd);
        process_reap(&owner->worker);
        return st;
    }
    if (link_send(owner->worker.link, &begin, &owner->commands, 1) == GRADD_OK) return GRADD_OK;
    log_event(LOG_WARN, "not_begun", "what=\"%s\"", gradd_error_message());
    kill(owner->worker.pid, SIGKILL); /* it would wait for ever; see ON_WORKER */
    return GRADD_OK;
}

static gradd_status_t open_control(owner_t *owner) {
    int fd;
    GRADD_TRY(rundir_listen(&owner->dir, RUNDIR_CONTROL, &fd));
    if (owner->control >= 0) {
        unwatch(owner, owner->control);
        close(owner->control); /* clients that waited there reconnect */
    }
    owner->control = fd;
    owner->paused = true;
    resume_accepting(owner);
    return GRADD_OK;
}

static void worker_is_ready(owner_t *owner) {
    owner->ready = true;
    owner->n_starts = 0;
    /* ctl.sock is made last: a client that can connect to it finds everything ready. */
    if (!owner->was_ready && open_control(owner) != GRADD_OK) {
        log_event(LOG_ERROR, "no_socket", "what=\"%s\"", gradd_error_message());
        owner->code = 1;
        stop(owner, "no socket", false);
    }
    owner->was_ready = true;
    restart_tell(owner, GRADD_OK);
    resume_accepting(owner);
    send_due(owner);
}

static void read_link(owner_t *owner) {
    link_message_t message;
    int fds[LINK_MAX_FDS];
    bool any = true;
    while (owner->worker.pid && any) {
        /* A link that has ended is looked at no more: its process ends, too. */
        if (link_receive(owner->worker.link, &message, fds, &any) != GRADD_OK) {
            unwatch(owner, owner->worker.link);
            return;
        }
        if (any && message.kind == LINK_READY) worker_is_ready(owner);
        if (any && message.kind == LINK_STOPPING) owner->stopping = true;
    }
}

/* What it computed is lost; what clients have lent is not. Those that do not move to the next
 * worker see the connection end only now, when nothing of it can write to their memory any more. */
static void lose_worker(owner_t *owner) {
    for (int i = owner->n_clients - 1; i >= 0; i--) {
        relay_client_t *client = owner->clients[i];
        const uint32_t number = client->number;
        if (client->in_flight) read_answer(owner, number); /* it may have come, as its last one */
        if (find_client(owner, number) && !retell_wait(client)) end_client(owner, client);
    }
    owner->n_workers++;
    if (owner->control >= 0) pause_accepting(owner);
}

/* What the owner holds would be lost with it, so one that cannot be started is tried again at the
 * next tick. */
static void start_next(owner_t *owner) {
    if (owner->n_starts++ < MAX_STARTS) {
        if (start_worker(owner) != GRADD_OK)
            log_event(LOG_WARN, "not_started", "what=\"%s\"", gradd_error_message());
        return;
    }
    log_event(LOG_ERROR, "no_worker", "starts=%d", MAX_STARTS);
    owner->code = 1;
    owner->ended = true;
}

static void worker_has_ended(owner_t *owner) {
    read_link(owner); /* it may have said that it would */
    unwatch(owner, owner->worker.pidfd);
    unwatch(owner, owner->worker.link);
    const bool told = owner->stopping;
    const int code = process_reap(&owner->worker);
    owner->ready = false;
    if (told || !owner->was_ready) {
        owner->ended = true;
        if (owner->code == 0 && (!told || code < 128)) owner->code = code;
        return;
    }
    log_event(LOG_ERROR, "worker_lost", "status=%d sessions=%d", code, owner->n_clients);
    lose_worker(owner);
    start_next(owner);
}

/* The worker dies, as it may at any time: its successor's clients repeat what it had in hand. */
static void restart(owner_t *owner) {
    log_event(LOG_INFO, "restart", "binary=%s sessions=%d", owner->binary, owner->n_clients);
    if (owner->worker.pid) {
        kill(owner->worker.pid, SIGKILL);
        unwatch(owner, owner->worker.pidfd);
        unwatch(owner, owner->worker.link);
        read_link(owner);
        process_reap(&owner->worker);
        owner->ready = false;
    }
    lose_worker(owner);
    const gradd_status_t st = owner->stopping
                                  ? GRADD_FAIL(STALE, "this daemon, pid %d, is ending", getpid())
                                  : restart_become(owner);
    log_event(LOG_ERROR, "not_restarted", "what=\"%s\"", gradd_error_message());
    close(owner->successor);
    owner->successor = -1;
    restart_tell(owner, st);
    if (owner->stopping)
        owner->ended = true;
    else
        start_next(owner);
}

/* ---- the directory ---- */

static gradd_status_t open_commands(owner_t *owner) {
    int fd;
    if (owner->n_listeners == MAX_LISTENERS)
        return GRADD_FAIL(LIMIT, "%s was removed %d times, the limit", owner->dir.cmd,
                          MAX_LISTENERS);
    GRADD_TRY(rundir_listen(&owner->dir, RUNDIR_COMMANDS, &fd));
    if (owner->commands >= 0) close(owner->commands);
    owner->commands = fd;
    owner->n_listeners++;
    owner->listen_due = true;
    return GRADD_OK;
}

/* Restores what was removed under the daemon: sockets, lock or the whole directory. */
static gradd_status_t restore_sockets(owner_t *owner, pid_t *out_other) {
    const int lock = owner->dir.lock;
    GRADD_TRY(rundir_restore(&owner->dir, out_other));
    if (*out_other != 0) return GRADD_OK;
    owner->lock_due |= owner->dir.lock != lock;
    if (!rundir_has(&owner->dir, RUNDIR_COMMANDS)) GRADD_TRY(open_commands(owner));
    if (!rundir_has(&owner->dir, RUNDIR_CONTROL)) GRADD_TRY(open_control(owner));
    send_due(owner);
    return GRADD_OK;
}

/* A daemon that has become unreachable restores its sockets, for its own clients, too: `ps` and
 * `stop` have to reach it. It exits when it has no clients and its directory is gone or belongs to
 * another daemon. */
static void stay_reachable(owner_t *owner) {
    pid_t other = 0;
    if (owner->stopping || !owner->was_ready) return;
    if (rundir_is_reachable(&owner->dir)) {
        owner->unreachable = false;
        return;
    }
    const bool lost = owner->displaced || owner->unreachable || !rundir_exists(&owner->dir);
    if (lost && owner->n_clients == 0) {
        stop(owner, "the socket directory or a file in it is gone", false);
        return;
    }
    if (owner->displaced) return;
    const gradd_status_t st = restore_sockets(owner, &other);
    owner->displaced = st == GRADD_E_LIMIT || (st == GRADD_OK && other != 0);
    if (st == GRADD_OK && other == 0)
        log_event(LOG_WARN, "sockets_restored", "dir=%s", owner->dir.path);
    else if (st == GRADD_OK)
        log_event(LOG_WARN, "displaced", "by=%d dir=%s", (int)other, owner->dir.path);
    else if (!owner->unreachable)
        log_event(LOG_WARN, "unreachable", "what=\"%s\"", gradd_error_message());
    owner->unreachable = st != GRADD_OK;
}

/* The worker lives, so it has lost their connections: it had no descriptor for them. */
static void end_lost_clients(owner_t *owner, int64_t now) {
    for (int i = owner->n_clients - 1; i >= 0; i--) {
        relay_client_t *client = owner->clients[i];
        if (client->lost_ms && now - client->lost_ms > LOST_MS) end_client(owner, client);
    }
}

static void tick(owner_t *owner) {
    const int64_t now = session_now_ms(), idle_exit = owner->options->idle_exit * 1000;
    owner->ticked_ms = now;
    if (!owner->worker.pid) {
        if (owner->stopping)
            owner->ended = true;
        else
            start_next(owner);
    }
    resume_accepting(owner);
    send_due(owner);
    end_lost_clients(owner, now);
    stay_reachable(owner);
    const kept_clients_t clients = for_kept(owner);
    kept_expire(&owner->kept, now, &clients);
    if (owner->n_clients > 0 || owner->kept.n > 0) owner->idle_since_ms = now;
    if (idle_exit > 0 && now - owner->idle_since_ms >= idle_exit && !owner->stopping)
        stop(owner, "idle", false);
}

/* ---- events ---- */

static void read_signals(owner_t *owner) {
    struct signalfd_siginfo info;
    while (read(owner->signals, &info, sizeof info) == (ssize_t)sizeof info)
        /* The first one lets the request in progress finish, the second one cancels it. */
        stop(owner, "signal", owner->stopping);
}

static void handle_event(owner_t *owner, const struct epoll_event *event) {
    const uint32_t kind = (uint32_t)(event->data.u64 >> 32), number = (uint32_t)event->data.u64;
    switch (kind) {
    case ON_LISTENER:
        if (!owner->paused) accept_client(owner);
        break;
    case ON_SIGNAL:
        read_signals(owner);
        break;
    case ON_LINK:
        if (event->events & ~(uint32_t)EPOLLOUT) read_link(owner);
        if (event->events & EPOLLOUT) {
            watch_link(owner, EPOLLIN);
            resume_accepting(owner);
        }
        break;
    case ON_WORKER:
        if (owner->worker.pid) worker_has_ended(owner);
        break;
    case ON_OUTER:
        read_client(owner, number, event->events);
        break;
    case ON_INNER:
        read_answer(owner, number);
        break;
    default:
        bury_client(owner, number);
    }
}

static void serve(owner_t *owner) {
    struct epoll_event events[MAX_EVENTS];
    while (!owner->ended) {
        const int n = epoll_wait(owner->epoll, events, MAX_EVENTS, TICK_MS);
        /* Descriptors of a worker that has ended may be in the rest of the list under numbers that
         * its successor has: look again. */
        const uint32_t n_workers = owner->n_workers;
        for (int i = 0; i < n && !owner->ended && n_workers == owner->n_workers; i++)
            handle_event(owner, &events[i]);
        if (owner->successor >= 0 && !owner->ended) restart(owner);
        if (session_now_ms() - owner->ticked_ms >= TICK_MS) tick(owner);
    }
}

/* ---- start and end ---- */

/* A limit on the size of files, which some shell had, would kill us for a line of the log. */
static void leave_file_limit(void) {
    struct rlimit limit;
    signal(SIGXFSZ, SIG_IGN);
    if (getrlimit(RLIMIT_FSIZE, &limit) != 0) return;
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_FSIZE, &limit);
}

static gradd_status_t start(owner_t *owner) {
    GRADD_TRY(signals_open(&owner->signals));
    GRADD_TRY(gate_open());
    owner->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (owner->epoll < 0) return GRADD_FAIL(IO, "epoll_create1: %s", strerror(errno));
    return watch(owner, owner->signals, ON_SIGNAL, 0);
}

/* Clients of the process that this one was wait for a worker. */
static gradd_status_t watch_clients(owner_t *owner) {
    for (int i = 0; i < owner->n_clients; i++) {
        const relay_client_t *client = owner->clients[i];
        GRADD_TRY(watch(owner, client->outer, ON_OUTER, client->number));
        watch_outer(owner, client);
        GRADD_TRY(watch(owner, client->peer.pidfd, ON_PIDFD, client->number));
    }
    return GRADD_OK;
}

static void finish(owner_t *owner) {
    while (owner->n_clients > 0)
        end_client(owner, owner->clients[owner->n_clients - 1]);
    if (owner->worker.pid) { /* something has failed */
        kill(owner->worker.pid, SIGKILL);
        process_reap(&owner->worker);
    }
    kept_finish(&owner->kept);
    rundir_unlink(&owner->dir);
    if (owner->control >= 0) close(owner->control);
    if (owner->commands >= 0) close(owner->commands);
    if (owner->asker >= 0) close(owner->asker);
    if (owner->epoll >= 0) close(owner->epoll);
    if (owner->signals >= 0) close(owner->signals);
    rundir_finish(&owner->dir); /* last: now another daemon may start */
}

static void init(owner_t *owner, const options_t *options, owner_words_t words) {
    *owner = (owner_t){
        .options = options,
        .words = words,
        .epoll = -1,
        .signals = -1,
        .control = -1,
        .commands = -1,
        .worker = {0, -1, -1},
        .successor = -1,
        .asker = -1,
    };
    const ssize_t n = readlink("/proc/self/exe", owner->binary, sizeof owner->binary - 1);
    owner->binary[n > 0 ? n : 0] = 0;
    owner->started_ms = owner->idle_since_ms = owner->ticked_ms = session_now_ms();
    leave_file_limit();
    prctl(PR_SET_NAME, "gradd");
}

/* Paths and calls stay given up in the process that this one becomes. */
static void confine(owner_t *owner) {
    confined_t *confined = &owner->confined;
    if (owner->options->debuggable) return;
    confine_process(true, confined);
    if (!options_on_host(owner->options) || (owner->resumed && confine_is_done(confined))) return;
    confine_paths(true, owner->dir.folder, confined);
    confine_calls(true, confined);
}

static gradd_status_t run(owner_t *owner, gradd_status_t st, owner_end_t *out_end) {
    if (st == GRADD_OK) confine(owner);
    if (st == GRADD_OK) st = start_worker(owner);
    if (st == GRADD_OK) serve(owner);
    finish(owner);
    out_end->code = owner->code;
    return st;
}

static owner_t the_owner; /* one per process; large */

gradd_status_t owner_serve(const options_t *options, owner_words_t words, owner_end_t *out_end) {
    owner_t *owner = &the_owner;
    *out_end = (owner_end_t){0, 0};
    init(owner, options, words);
    GRADD_TRY(rundir_init(&owner->dir, options->dir));
    GRADD_TRY(rundir_prepare(&owner->dir));
    GRADD_TRY(rundir_lock(&owner->dir, &out_end->other));
    if (out_end->other != 0) {
        rundir_finish(&owner->dir);
        return GRADD_OK;
    }
    gradd_status_t st = start(owner);
    if (st == GRADD_OK) st = open_commands(owner);
    return run(owner, st, out_end);
}

gradd_status_t owner_resume(const options_t *options, owner_words_t words, int state,
                            owner_end_t *out_end) {
    owner_t *owner = &the_owner;
    *out_end = (owner_end_t){0, 0};
    init(owner, options, words);
    GRADD_TRY(rundir_init(&owner->dir, options->dir));
    gradd_status_t st = state_read(state, owner);
    close(state);
    owner->was_ready = owner->paused = owner->resumed = true;
    if (st == GRADD_OK) st = start(owner);
    if (st == GRADD_OK) st = watch_clients(owner);
    return run(owner, st, out_end);
}
