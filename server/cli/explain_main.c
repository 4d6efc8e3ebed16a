/* Entry of `gradd explain` and `gradd estimate`: arguments, then the command. See
 * explain_command.h. */
#include <string.h>

#include "server/cli/explain_command.h"
#include "server/host/machine.h"
#include "server/host/options.h"

enum { DONE, FAILED, USAGE, NONE }; /* exit codes, as in main.c */

static int failed(const char *command, gradd_status_t status) {
    fprintf(stderr, "gradd %s: %s: %s\n", command, gradd_status_name(status),
            gradd_error_message());
    return FAILED;
}

/* Plans as a daemon started here would: with the same number of threads. */
static gradd_status_t plan_as_daemon(explain_args_t *args) {
    char *serve[] = {"gradd", "serve"};
    options_t daemon;
    GRADD_TRY(options_parse(2, serve, &daemon));
    args->plain |= !daemon.fuse;
    args->dense_loss = !daemon.chunked_loss;
    if (args->threads > 0) return GRADD_OK;
    if (daemon.threads == 0) machine_unpin();
    args->threads = machine_threads(daemon.threads);
    return GRADD_OK;
}

static explain_use_t use_of(const explain_args_t *args, const char *command) {
    if (!strcmp(command, "estimate")) return EXPLAIN_ESTIMATE;
    return args->model ? EXPLAIN_FILE : EXPLAIN_LIVE;
}

/* Wrong arguments are the user's, whatever the code says. */
static int parse(const char *command, int argc, char **argv, explain_args_t *args,
                 void (*usage)(FILE *out)) {
    gradd_status_t status = explain_args_parse(argc, argv, args);
    if (status == GRADD_OK && !args->help &&
        explain_args_check(args, use_of(args, command)) != GRADD_OK) {
        fprintf(stderr, "gradd %s: %s\n", command, gradd_error_message());
        return USAGE;
    }
    if (status == GRADD_OK && !args->help) status = plan_as_daemon(args);
    if (status == GRADD_OK) return DONE;
    fprintf(stderr, "gradd %s: %s\n", command, gradd_error_message());
    usage(stderr);
    return USAGE;
}

typedef struct explaining_s {
    const explain_args_t *args;
    int n, n_failed;
} explaining_t;

static gradd_status_t explain_one(const rundir_t *dir, void *context) {
    explaining_t *e = context;
    if (e->n++ && !e->args->json) printf("\ndaemon in %s\n", dir->path);
    const gradd_status_t status = explain_running(e->args, dir);
    if (status) e->n_failed++;
    return status;
}

static int explain_daemons(const explain_args_t *args) {
    explaining_t explaining = {.args = args};
    rundir_t dir;
    gradd_status_t status = rundir_init(&dir, args->dir);
    if (status == GRADD_OK) status = rundir_each_running(args->dir, explain_one, &explaining);
    /* a session or plan that was asked for is one of a single daemon */
    if (status == GRADD_E_STALE && explaining.n_failed < explaining.n) status = GRADD_OK;
    if (status != GRADD_OK) return failed("explain", status);
    if (explaining.n > 0) return DONE;
    fprintf(stderr,
            "gradd: no daemon runs in %s; to explain a file: gradd explain MODEL.onnx "
            "NAME=SIZES...\n",
            dir.path);
    return NONE;
}

int explain_main(int argc, char **argv) {
    explain_args_t args;
    if (parse("explain", argc, argv, &args, explain_args_usage) != DONE) return USAGE;
    if (args.help) {
        explain_args_usage(stdout);
        return DONE;
    }
    if (!args.model) return explain_daemons(&args);
    gradd_status_t status = explain_model(&args);
    return status == GRADD_OK ? DONE : failed("explain", status);
}

int estimate_main(int argc, char **argv) {
    explain_args_t args;
    if (parse("estimate", argc, argv, &args, estimate_args_usage) != DONE) return USAGE;
    if (args.help || !args.model) {
        estimate_args_usage(args.help ? stdout : stderr);
        return args.help ? DONE : USAGE;
    }
    gradd_status_t status = estimate_model(&args);
    return status == GRADD_OK ? DONE : failed("estimate", status);
}
