/* The gradd binary: arguments, commands, exit codes. The only file that prints usage or decides how
 * the process ends.
 *
 * Exit codes: 0 done, 1 failure, 2 wrong usage, 3 no daemon runs, 4 a daemon runs already, 5 the
 * required device cannot be used. `worker` and `resume:` are no commands for users: an owner starts
 * the one, and becomes the other.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/cli/admin.h"
#include "server/cli/cache.h"
#include "server/cli/doctor.h"
#include "server/cli/explain_command.h"
#include "server/cli/list_ops.h"
#include "server/cli/logs.h"
#include "server/cli/owner_command.h"
#include "server/cli/quota_command.h"
#include "server/cli/show.h"
#include "server/cli/trace.h"
#include "server/cli/users.h"
#include "server/cli/web_command.h"
#include "server/daemon/daemon.h"
#include "server/host/log.h"
#include "server/host/machine.h"
#include "server/owner/owner.h"
#include "server/owner/restart.h"
#include "server/session/quota.h"
#include "server/users/supervisor.h"
#include "server/wire/version.h"

enum { EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_NONE, EXIT_ALREADY, EXIT_DEVICE };

static int failed(gradd_status_t status) {
    fprintf(stderr, "gradd: %s: %s\n", gradd_status_name(status), gradd_error_message());
    return EXIT_FAILED;
}

/* A worker shares its cores with the trainer, whose own threads run while ours wait. OpenMP's
 * default is to spin for milliseconds after each operator, which takes the core from them; a few
 * microseconds still cover the gap between two operators. A value set by the user is kept. */
static void limit_spinning(void) {
    if (!getenv("OMP_WAIT_POLICY") && !getenv("GOMP_SPINCOUNT")) setenv("GOMP_SPINCOUNT", "500", 1);
}

/* Threads are the plan's. A number that a trainer has set for its own, as torchrun does, is not for
 * the daemon that it happens to start: a limit would hold in every parallel region. */
static void leave_inherited_threads(void) {
    static const char *const names[] = {"OMP_NUM_THREADS", "OMP_THREAD_LIMIT", "OMP_DYNAMIC",
                                        "OMP_MAX_ACTIVE_LEVELS"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        unsetenv(names[i]);
}

/* The daemon is for all of the user's trainers, but inherits the processors of the one that started
 * it: pinned to a core, it would keep all others there, too. An explicit number of threads is a
 * deliberate choice, so the mask is kept then. */
static void leave_inherited_mask(const options_t *options) {
    int inherited = machine_processors();
    if (options->threads > 0) return;
    log_set_level(options->log);
    machine_unpin();
    if (machine_processors() != inherited)
        log_event(LOG_INFO, "processors", "inherited=%d used=%d", inherited, machine_processors());
}

static int already_running(pid_t other) {
    fprintf(stderr, "gradd: already running pid %ld\n", (long)other);
    return EXIT_ALREADY;
}

static int serve_users(const options_t *options, char **argv) {
    pid_t other;
    const gradd_status_t st = supervisor_serve(options, argv, &other);
    if (st == GRADD_E_UNSUPPORTED) return failed(st), EXIT_USAGE; /* no other try helps */
    if (st != GRADD_OK) return failed(st);
    return other == 0 ? EXIT_DONE : already_running(other);
}

/* OpenMP's runtime reads environment and mask when it is loaded: the worker inherits both. */
static int handle_serve(const options_t *options, char **argv) {
    const size_t n = strlen(RESTART_COMMAND);
    const bool resumes = !strncmp(options->command, RESTART_COMMAND, n);
    owner_words_t words = {argv, argv};
    owner_end_t end;
    if (!log_set_level(options->log)) {
        fprintf(stderr, "gradd: --log: expected error, warn, info or debug, got '%s'\n",
                options->log);
        return EXIT_USAGE;
    }
    if (options->allow_group && options->allow_group[0]) return serve_users(options, argv);
    leave_inherited_mask(options);
    limit_spinning();
    leave_inherited_threads();
    while (*words.command != options->command)
        words.command++;
    *words.command = "worker";
    gradd_status_t st = resumes ? owner_resume(options, words, atoi(options->command + n), &end)
                                : owner_serve(options, words, &end);
    if (st != GRADD_OK) return failed(st);
    return end.other == 0 ? end.code : already_running(end.other);
}

static int handle_worker(const options_t *options) {
    log_set_level(options->log);
    gradd_status_t st = daemon_work(options);
    if (st == GRADD_E_UNSUPPORTED) return failed(st), EXIT_USAGE; /* a device: no other try helps */
    if (st == GRADD_E_DEVICE || st == GRADD_E_VERSION) return failed(st), EXIT_DEVICE;
    return st == GRADD_OK ? EXIT_DONE : failed(st);
}

static int no_daemon(const rundir_t *dir) {
    fprintf(stderr, "gradd: no daemon runs in %s\n", dir->path);
    return EXIT_NONE;
}

typedef struct admin_s {
    const options_t *options;
    gradd_status_t (*handle)(const rundir_t *, const options_t *);
    const char *between; /* of the texts about two daemons */
    int n;
} admin_t;

static gradd_status_t handle_one(const rundir_t *dir, void *context) {
    admin_t *admin = context;
    if (admin->n++ && !admin->options->json) fputs(admin->between, stdout);
    return admin->handle(dir, admin->options);
}

static int handle_admin(admin_t admin) {
    rundir_t dir;
    gradd_status_t st = rundir_init(&dir, admin.options->dir);
    if (st == GRADD_OK) st = rundir_each_running(admin.options->dir, handle_one, &admin);
    if (st != GRADD_OK) return failed(st);
    return admin.n > 0 ? EXIT_DONE : no_daemon(&dir);
}

/* Of a shared directory the sums are told, also where this user has no daemon. */
static int handle_ps(const options_t *options) {
    const int code = handle_admin((admin_t){options, admin_ps, "\n", 0});
    rundir_t dir;
    users_t users;
    if (code == EXIT_NONE && !options->json && rundir_init(&dir, options->dir) == GRADD_OK &&
        users_look(&dir, &users))
        users_print(&users);
    return code;
}

/* The table in place of the former one. */
static int handle_top(const options_t *options) {
    int code = EXIT_DONE;
    for (int64_t i = 0; code == EXIT_DONE && (!options->times || i < options->times); i++) {
        if (i) sleep((unsigned)(options->every ? options->every : 1));
        if (isatty(STDOUT_FILENO)) fputs("\033[H\033[2J", stdout);
        code = handle_ps(options);
        fflush(stdout);
    }
    return code;
}

static int handle_stop(const options_t *options) {
    return handle_admin((admin_t){options, admin_stop, "", 0});
}

static int handle_trace(const options_t *options) {
    trace_t trace;
    if (!options->out) {
        fprintf(stderr, "gradd: trace needs --out FILE\n");
        return EXIT_USAGE;
    }
    gradd_status_t st = trace_open(&trace, options);
    if (st != GRADD_OK) return failed(st);
    rundir_t dir;
    st = rundir_init(&dir, options->dir);
    if (st == GRADD_OK) st = rundir_each_running(options->dir, trace_daemon, &trace);
    st = trace_close(&trace, st);
    if (st != GRADD_OK) return failed(st);
    return trace.n_daemons > 0 ? EXIT_DONE : no_daemon(&dir);
}

static int handle_forget(const options_t *options) {
    if (!options->name) {
        fprintf(stderr, "gradd: forget needs the NAME of a session\n");
        return EXIT_USAGE;
    }
    return handle_admin((admin_t){options, kept_forget, "", 0});
}

static int handle_restart(const options_t *options) {
    return handle_admin((admin_t){options, owner_restart, "", 0});
}

static int handle_show(const options_t *options) {
    rundir_t dir;
    show_t show = {options, 0, 0};
    if (!options->name) {
        fprintf(stderr, "gradd: show needs a NAME: of a session, its number or its pid\n");
        return EXIT_USAGE;
    }
    gradd_status_t st = rundir_init(&dir, options->dir);
    if (st == GRADD_OK) st = rundir_each_running(options->dir, show_daemon, &show);
    if (st != GRADD_OK) return failed(st);
    if (show.n_daemons == 0) return no_daemon(&dir);
    if (show.n_found > 0) return EXIT_DONE;
    fprintf(stderr, "gradd: there is no session '%s' (gradd ps lists them)\n", options->name);
    return EXIT_FAILED;
}

static int handle_drain(const options_t *options) {
    return handle_admin((admin_t){options, drain, "", 0});
}

static int handle_quota(const options_t *options) {
    const bool sets = options->share >= 0 || options->quota_mib >= 0 || options->sessions >= 0;
    if (!options->name && (sets || options->remove)) {
        fprintf(stderr, "gradd: a quota needs the NAME of sessions, or '" QUOTA_OTHERS "'\n");
        return EXIT_USAGE;
    }
    return handle_admin((admin_t){options, quota_command, "\n", 0});
}

static int handle_logs(const options_t *options) {
    rundir_t dir;
    gradd_status_t st = rundir_init(&dir, options->dir);
    if (st == GRADD_OK) st = logs_show(&dir, options);
    return st == GRADD_OK ? EXIT_DONE : failed(st);
}

static int handle_web(const options_t *options) {
    rundir_t dir;
    gradd_status_t st = rundir_init(&dir, options->dir);
    if (st == GRADD_OK) st = web_command(&dir, options);
    return st == GRADD_OK ? EXIT_DONE : failed(st);
}

static int handle_version(const options_t *options) {
    printf(options->json ? "{\"version\": \"%s\", \"engine\": \"%s\", \"protocol\": [%d, %d]}\n"
                         : "gradd %s (engine %s), protocol %d to %d\n",
           GRADD_VERSION, gradd_version(), PROTOCOL_LOWEST, PROTOCOL_HIGHEST);
    return EXIT_DONE;
}

static int handle_list_ops(const options_t *options) {
    list_ops(stdout, options->json);
    return EXIT_DONE;
}

static int handle_doctor(const options_t *options) {
    const char *wanted = options->device ? options->device : "";
    return doctor(stdout, wanted, options->dir, options->json) ? EXIT_DONE : EXIT_FAILED;
}

static int handle_cache(const options_t *options) {
    gradd_status_t st = cache_show(stdout, options->clear, options->json);
    return st == GRADD_OK ? EXIT_DONE : failed(st);
}

/* The command of the wheels has these, which are programs of Python, and leaves the rest to this
 * one.
 */
static int handle_demo(const options_t *options) {
    (void)options;
    fputs("gradd: the demo is a program of Python: run `make demo` in a clone, or `gradd demo` of "
          "the installed wheels\n",
          stderr);
    return EXIT_USAGE;
}

static int artifacts_main(void) {
    fputs(
        "gradd: artifacts are made by a program of Python: run `python -m gradd.train artifacts`, "
        "or `gradd artifacts` of the installed wheels\n",
        stderr);
    return EXIT_USAGE;
}

/* Alone: the last line of a log must say what is wrong. */
static int wrong_usage(void) {
    fprintf(stderr, "gradd: %s\n", gradd_error_message());
    return EXIT_USAGE;
}

static int handle_help(const options_t *options) {
    return options_usage(stdout, options->about) ? wrong_usage() : EXIT_DONE;
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        int (*handle)(const options_t *options);
    } commands[] = {
        {"ps",         handle_ps      },
        {"top",        handle_top     },
        {"show",       handle_show    },
        {"logs",       handle_logs    },
        {"drain",      handle_drain   },
        {"quota",      handle_quota   },
        {"web",        handle_web     },
        {"stop",       handle_stop    },
        {"trace",      handle_trace   },
        {"forget",     handle_forget  },
        {"restart",    handle_restart },
        {"version",    handle_version },
        {"--version",  handle_version },
        {"--list-ops", handle_list_ops},
        {"doctor",     handle_doctor  },
        {"cache",      handle_cache   },
        {"demo",       handle_demo    },
        {"--help",     handle_help    },
    };
    options_t options;
    if (argc > 1 && !strcmp(argv[1], "explain")) return explain_main(argc - 2, argv + 2);
    if (argc > 1 && !strcmp(argv[1], "estimate")) return estimate_main(argc - 2, argv + 2);
    if (argc > 1 && !strcmp(argv[1], "artifacts")) return artifacts_main();
    if (options_parse(argc, argv, &options) != GRADD_OK) return wrong_usage();
    if (!strcmp(options.command, "worker")) return handle_worker(&options);
    if (!strncmp(options.command, RESTART_COMMAND, strlen(RESTART_COMMAND)))
        return handle_serve(&options, argv);
    if (!strcmp(options.command, "serve"))
        return options_check(&options) ? wrong_usage() : handle_serve(&options, argv);
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        if (strcmp(options.command, commands[i].name) != 0) continue;
        if (options_check(&options) != GRADD_OK) return wrong_usage();
        return commands[i].handle(&options);
    }
    if (options.command[0]) return options_usage(stderr, options.command), wrong_usage();
    fputs("gradd: no command\n", stderr);
    options_usage(stderr, NULL);
    return EXIT_USAGE;
}
