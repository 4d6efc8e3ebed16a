/* See supervisor.h. */
#include "server/users/supervisor.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "server/host/log.h"
#include "server/host/shared_dir.h"
#include "server/host/signals.h"
#include "server/users/account.h"
#include "server/wire/wire.h"
#include "shm/fdpass.h"

#define MOST_USERS  256
#define TICK_MS     1000
#define PAUSE_MS    100   /* before another start, times those that have died in a row */
#define MOST_DEATHS 5     /* in a row: then the client is told how the last one ended */
#define FORGET_MS   10000 /* a daemon that has lived so long has started well */
#define ALREADY     4     /* exit code of a daemon where another one runs */

/* A user who has asked, and the daemon that was started for it. */
typedef struct user_s {
    account_t account;
    pid_t pid; /* 0: it does not run */
    int pidfd; /* Owned, while it does */
    int64_t started_ms, again_ms;
    int n_deaths, code; /* in a row; of the last one: an exit code, or 128 + a signal */
} user_t;

typedef struct supervisor_s {
    rundir_t dir;
    gid_t group;
    char *const *argv; /* Borrowed */
    int listener, signals;
    bool told, lost; /* by a signal; the directory */
    user_t users[MOST_USERS];
    int n_users;
} supervisor_t;

static int64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* ---- daemons ---- */

static void bury(user_t *user) {
    int status = 0;
    const int64_t now = now_ms();
    while (waitpid(user->pid, &status, 0) < 0 && errno == EINTR)
        ;
    close(user->pidfd);
    user->code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    const bool well =
        user->code == 0 || user->code == ALREADY || now - user->started_ms > FORGET_MS;
    user->n_deaths = well ? 0 : user->n_deaths + 1;
    user->again_ms = now + PAUSE_MS * (user->n_deaths + 1);
    log_event(LOG_INFO, "daemon_ended", "uid=%u pid=%d status=%d", (unsigned)user->account.uid,
              (int)user->pid, user->code);
    user->pid = 0;
    user->pidfd = -1;
}

static gradd_status_t start(const supervisor_t *supervisor, user_t *user) {
    char folder[RUNDIR_PATH_MAX + 16];
    const account_t *account = &user->account;
    GRADD_TRY(shared_dir_make_folder(&supervisor->dir, account->uid, account->gid));
    snprintf(folder, sizeof folder, "%s/%u", supervisor->dir.path, (unsigned)account->uid);
    const pid_t pid = fork();
    if (pid == 0) account_become(account, supervisor->group, supervisor->argv, folder);
    if (pid < 0) return GRADD_FAIL(IO, "fork: %s", strerror(errno));
    user->pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (user->pidfd < 0) {
        const gradd_status_t st = GRADD_FAIL(IO, "pidfd_open: %s", strerror(errno));
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        return st;
    }
    user->pid = pid;
    user->started_ms = now_ms();
    log_event(LOG_INFO, "daemon_started", "uid=%u pid=%d", (unsigned)account->uid, (int)pid);
    return GRADD_OK;
}

/* Starts the daemon unless it runs, or has died just now: the client comes again. */
static gradd_status_t ensure(supervisor_t *supervisor, user_t *user) {
    const int64_t now = now_ms();
    if (user->pid || now < user->again_ms) return GRADD_OK;
    if (user->n_deaths < MOST_DEATHS) return start(supervisor, user);
    user->n_deaths--; /* one more try, when this has been read */
    user->again_ms = now + PAUSE_MS * MOST_DEATHS;
    return GRADD_FAIL(SESSION,
                      "the daemon of uid %u has died %d times in a row, the last time with status "
                      "%d; see %s/%u/daemon.log",
                      (unsigned)user->account.uid, MOST_DEATHS, user->code, supervisor->dir.path,
                      (unsigned)user->account.uid);
}

/* ---- clients ---- */

/* A user without a daemon gives its place up to a new one. */
static user_t *place_for_one(supervisor_t *supervisor) {
    if (supervisor->n_users < MOST_USERS) return &supervisor->users[supervisor->n_users++];
    for (int i = 0; i < MOST_USERS; i++)
        if (!supervisor->users[i].pid) return &supervisor->users[i];
    return NULL;
}

static gradd_status_t find_user(supervisor_t *supervisor, const account_t *account,
                                user_t **out_user) {
    for (int i = 0; i < supervisor->n_users; i++) {
        *out_user = &supervisor->users[i];
        if ((*out_user)->account.uid == account->uid) return GRADD_OK;
    }
    GRADD_TRY(account_check(account));
    *out_user = place_for_one(supervisor);
    if (!*out_user)
        return GRADD_FAIL(LIMIT, "%d users have a daemon here, the most that there may be",
                          MOST_USERS);
    **out_user = (user_t){.account = *account, .pidfd = -1};
    return GRADD_OK;
}

static gradd_status_t answer(supervisor_t *supervisor, int client, pid_t *out_pid) {
    account_t account;
    user_t *user;
    GRADD_TRY(account_of(client, supervisor->group, &account));
    GRADD_TRY(find_user(supervisor, &account, &user));
    const gradd_status_t st = ensure(supervisor, user);
    *out_pid = user->pid;
    return st;
}

/* A client that connects asks for its daemon; it says nothing. The answer fits into the buffer of a
 * new connection, so none is waited for. */
static void serve_client(supervisor_t *supervisor) {
    wire_out_t reply = {0};
    pid_t pid = 0;
    const int client = accept4(supervisor->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (client < 0) {
        if (errno == EMFILE || errno == ENFILE) poll(NULL, 0, PAUSE_MS); /* it stays readable */
        return;
    }
    const gradd_status_t st = answer(supervisor, client, &pid);
    if (st == GRADD_OK) {
        wire_reply_begin(&reply, 0);
        wire_key(&reply, "pid");
        wire_put_u64(&reply, (uint64_t)pid);
        wire_end(&reply);
    } else {
        log_event(LOG_DEBUG, "not_served", "what=\"%s\"", gradd_error_message());
        wire_reply_fail(&reply, 0, st, NULL, gradd_error_message(), NULL);
    }
    if (!reply.failed) gradd_fd_send(client, reply.data, reply.bytes, NULL, 0);
    wire_out_finish(&reply);
    close(client);
}

/* ---- the loop ---- */

/* The daemons finish the requests in progress. None is waited for: what one user's takes is no
 * matter of another one, which may ask the next supervisor meanwhile. */
static void pass_on(supervisor_t *supervisor) {
    supervisor->told = true;
    for (int i = 0; i < supervisor->n_users; i++)
        if (supervisor->users[i].pid)
            syscall(SYS_pidfd_send_signal, supervisor->users[i].pidfd, SIGTERM, NULL, 0);
}

static void turn(supervisor_t *supervisor) {
    struct pollfd fds[2 + MOST_USERS];
    const int n_users = supervisor->n_users;
    fds[0] = (struct pollfd){supervisor->listener, POLLIN, 0};
    fds[1] = (struct pollfd){supervisor->signals, POLLIN, 0};
    for (int i = 0; i < n_users; i++)
        fds[2 + i] = (struct pollfd){supervisor->users[i].pidfd, POLLIN, 0};
    if (poll(fds, (nfds_t)(2 + n_users), TICK_MS) < 0) return;
    if (fds[1].revents) pass_on(supervisor);
    for (int i = 0; i < n_users; i++)
        if (fds[2 + i].revents) bury(&supervisor->users[i]);
    if (fds[0].revents) serve_client(supervisor);
    supervisor->lost = !rundir_exists(&supervisor->dir) || !rundir_owns(&supervisor->dir) ||
                       !rundir_has(&supervisor->dir, RUNDIR_CONTROL);
}

static gradd_status_t serve(supervisor_t *supervisor) {
    while (!supervisor->told && !supervisor->lost)
        turn(supervisor);
    if (!supervisor->lost) return GRADD_OK;
    return GRADD_FAIL(IO, "%s, or a file in it, is gone", supervisor->dir.path);
}

static gradd_status_t open_all(supervisor_t *supervisor, pid_t *out_other) {
    GRADD_TRY(shared_dir_prepare(&supervisor->dir, supervisor->group));
    GRADD_TRY(rundir_lock(&supervisor->dir, out_other));
    if (*out_other != 0) return GRADD_OK;
    GRADD_TRY(signals_open(&supervisor->signals));
    return rundir_listen_for(&supervisor->dir, RUNDIR_CONTROL, supervisor->group,
                             &supervisor->listener);
}

static supervisor_t the_supervisor; /* one per process; large */

gradd_status_t supervisor_serve(const options_t *options, char *const *argv, pid_t *out_other) {
    supervisor_t *supervisor = &the_supervisor;
    *supervisor = (supervisor_t){.argv = argv, .listener = -1, .signals = -1};
    *out_other = 0;
    if (geteuid() != 0)
        return GRADD_FAIL(UNSUPPORTED,
                          "--allow-group needs root: the daemon of each user runs under that "
                          "user's uid; this is uid %u",
                          (unsigned)geteuid());
    if (!options->dir || !options->dir[0])
        return GRADD_FAIL(UNSUPPORTED, "--allow-group needs --dir, as --dir /run/gradd");
    GRADD_TRY(account_group(options->allow_group, &supervisor->group));
    GRADD_TRY(shared_dir_init(&supervisor->dir, options->dir));
    umask(077);
    prctl(PR_SET_NAME, "gradd-users");
    gradd_status_t st = open_all(supervisor, out_other);
    if (st == GRADD_OK && *out_other == 0) {
        log_event(LOG_INFO, "supervisor_start", "pid=%d dir=%s group=%u", (int)getpid(),
                  supervisor->dir.path, (unsigned)supervisor->group);
        st = serve(supervisor);
    }
    if (supervisor->listener >= 0) {
        close(supervisor->listener);
        if (rundir_owns(&supervisor->dir)) rundir_unlisten(&supervisor->dir, RUNDIR_CONTROL);
    }
    if (supervisor->signals >= 0) close(supervisor->signals);
    rundir_finish(&supervisor->dir);
    return st;
}
