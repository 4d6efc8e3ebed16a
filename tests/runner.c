/* Runs the C tests, each in its own process with a time limit.
 *
 * Usage: tests [--list] [--filter TEXT]... [--quick] [--part I/N] [--limit-scale N]
 *              [--limit SECONDS] [--times FILE] [--verbose]
 * The list comes from the makefile (test_list.inc: module, name, seconds). The output of a test is
 * shown when it fails. The last line is "N passed, N failed"; skipped tests are listed before it
 * with their reasons. Each test leads its own process group, which is killed afterwards, so nothing
 * that a test forked outlives it. Single-threaded: of N runners beside each other, the one with
 * --part I/N (I from 1) runs every N-th of the chosen tests. FILE gets a line "seconds module.test"
 * of each. With --limit no test gets more than that. --quick leaves out tests with a TEST_LIMIT
 * above QUICK_S. On SIGTERM and SIGINT the running test's name and output so far are shown, and
 * what was counted.
 */
#include "tests/test.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { EXIT_SKIPPED = 77, MAX_FILTERS = 32, MAX_SKIPS = 256, STOP_S = 2, QUICK_S = 10 };

typedef struct test_case_s {
    const char *name; /* "module.test" */
    void (*run)(void);
    int limit_s;
} test_case_t;

#define X(module, name, seconds) void TEST_SYMBOL(module, name)(void);
#include "test_list.inc"
#undef X

static const test_case_t cases[] = {
#define X(module, name, seconds) {#module "." #name, TEST_SYMBOL(module, name), seconds},
#include "test_list.inc"
#undef X
    {NULL, NULL, 0},
};

typedef enum { PASSED, FAILED, SKIPPED } outcome_t;

typedef struct run_s {
    const char *filters[MAX_FILTERS];
    int n_filters;
    int part, n_parts;
    int limit_scale, limit_most; /* 0 = no such limit */
    bool quick, verbose;
    FILE *times; /* Owned; NULL: not asked for */
    int n_passed, n_failed, n_skipped;
} run_t;

/* ---- what tests call ---- */

void test_fail(const char *file, int line, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "%s:%d: ", file, line);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    fflush(NULL);
    _exit(1);
}

void test_skip(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fputs("skipped: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    fflush(NULL);
    _exit(EXIT_SKIPPED);
}

void test_eq_int(const char *file, int line, const char *text_a, const char *text_b, intmax_t a,
                 intmax_t b) {
    if (a != b) test_fail(file, line, "%s == %s: %jd != %jd", text_a, text_b, a, b);
}

void test_eq_str(const char *file, int line, const char *text_a, const char *text_b, const char *a,
                 const char *b) {
    if (!a || !b || strcmp(a, b) != 0)
        test_fail(file, line, "%s == %s: '%s' != '%s'", text_a, text_b, a ? a : "(null)",
                  b ? b : "(null)");
}

void test_near(const char *file, int line, const char *text_a, const char *text_b,
               test_near_t values) {
    if (!(fabs(values.a - values.b) <= values.tolerance))
        test_fail(file, line, "%s ~ %s: %.9g against %.9g, tolerance %g", text_a, text_b, values.a,
                  values.b, values.tolerance);
}

void test_ok(const char *file, int line, const char *text, gradd_status_t status) {
    if (status != GRADD_OK)
        test_fail(file, line, "%s: %s: %s (%s)", text, gradd_status_name(status),
                  gradd_error_message(), gradd_error_where());
}

void test_status(const char *file, int line, const char *text, gradd_status_t want,
                 gradd_status_t got) {
    if (want != got)
        test_fail(file, line, "%s: expected %s, got %s%s%s", text, gradd_status_name(want),
                  gradd_status_name(got), got == GRADD_OK ? "" : ": ",
                  got == GRADD_OK ? "" : gradd_error_message());
}

void test_error_has(const char *file, int line, const char *part) {
    if (!strstr(gradd_error_message(), part))
        test_fail(file, line, "error message '%s' does not say '%s'", gradd_error_message(), part);
}

/* ---- the runner ---- */

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The test that runs now; read by the signal handler. */
static volatile pid_t current = 0;
static volatile sig_atomic_t stopped_by = 0;

/* An interrupted runner takes its test along: the test has a process group of its own. That wakes
 * the runner, which shows what the test has said: by a limit from outside more is lost than time.
 */
static void stop(int signal_number) {
    stopped_by = signal_number;
    if (current > 0) kill(-current, SIGKILL);
}

static bool selected(const run_t *run, const test_case_t *test) {
    if (run->quick && test->limit_s > QUICK_S) return false;
    if (run->n_filters == 0) return true;
    for (int i = 0; i < run->n_filters; i++)
        if (strstr(test->name, run->filters[i])) return true;
    return false;
}

/* "I/N"; false where that is no part. */
static bool parse_part(run_t *run, const char *text) {
    return sscanf(text, "%d/%d", &run->part, &run->n_parts) == 2 && run->part >= 1 &&
           run->part <= run->n_parts;
}

static _Noreturn void child_main(const test_case_t *test, int output) {
    setpgid(0, 0);
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
    dup2(output, STDOUT_FILENO);
    dup2(output, STDERR_FILENO);
    test->run();
    fflush(NULL);
    exit(0); /* not _exit: leak checkers report here */
}

/* Waits for the child by its pidfd; true if it ended within the limit. A runner that is to stop
 * waits for STOP_S at most, as the process that stops it will not wait longer. */
static bool wait_limited(pid_t child, double limit_s) {
    int pidfd = (int)syscall(SYS_pidfd_open, child, 0);
    double end = now_s() + limit_s;
    bool ended = false;
    while (!ended) {
        const double t = now_s();
        if (stopped_by && end > t + STOP_S) end = t + STOP_S;
        const double left = end - t;
        if (left <= 0) break;
        if (pidfd >= 0) {
            struct pollfd p = {.fd = pidfd, .events = POLLIN};
            ended = poll(&p, 1, (int)(left * 1000) + 1) == 1;
        } else {
            siginfo_t info = {0};
            usleep(1000);
            ended = waitid(P_PID, (id_t)child, &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
                    info.si_pid == child;
        }
    }
    if (pidfd >= 0) close(pidfd);
    return ended;
}

static void show_output(int fd, const char *indent) {
    FILE *in = fdopen(dup(fd), "r");
    char line[2048];
    if (!in) return;
    rewind(in);
    while (fgets(line, sizeof line, in))
        printf("%s%s", indent, line);
    fclose(in);
}

static int limit_of(const run_t *run, const test_case_t *test) {
    const int limit = test->limit_s * run->limit_scale;
    return run->limit_most && run->limit_most < limit ? run->limit_most : limit;
}

static outcome_t run_one(const run_t *run, const test_case_t *test) {
    int output = memfd_create("test-output", MFD_CLOEXEC);
    double start = now_s();
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) child_main(test, output);
    if (child < 0 || output < 0) {
        printf("FAIL  %s: cannot start: %s\n", test->name, strerror(errno));
        if (output >= 0) close(output);
        return FAILED;
    }
    setpgid(child, child);
    current = child;
    if (stopped_by) kill(-child, SIGKILL); /* it came before the handler knew the test */
    bool ended = wait_limited(child, limit_of(run, test));
    int status = 0;
    kill(-child, SIGKILL);
    bool gone = wait_limited(child, STOP_S); /* a driver may hold on to one that is killed */
    waitpid(child, &status, gone ? 0 : WNOHANG);
    current = 0;
    double took_s = now_s() - start;
    if (run->times) fprintf(run->times, "%.3f %s\n", took_s, test->name);

    outcome_t outcome = FAILED;
    if (ended && WIFEXITED(status) && WEXITSTATUS(status) == 0) outcome = PASSED;
    if (ended && WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SKIPPED) outcome = SKIPPED;
    const char *words[] = {"ok   ", "FAIL ", "skip "};
    if (outcome != PASSED || run->verbose)
        printf("%s %s (%.2f s)", words[outcome], test->name, took_s);
    if (outcome == FAILED && stopped_by)
        printf(": stopped by signal %d while it ran", (int)stopped_by);
    else if (outcome == FAILED && !ended)
        printf(": did not end within %d s", limit_of(run, test));
    else if (outcome == FAILED && WIFSIGNALED(status))
        printf(": killed by signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
    if (!gone) printf(", and a kill does not end it");
    if (outcome != PASSED || run->verbose) {
        putchar('\n');
        show_output(output, "      ");
    }
    close(output);
    return outcome;
}

static int usage(const char *program) {
    fprintf(stderr,
            "usage: %s [--list] [--filter TEXT]... [--quick] [--part I/N] [--limit-scale N] "
            "[--limit SECONDS] [--times FILE] [--verbose]\n",
            program);
    return 2;
}

/* Threads that wait for the next parallel region spin only as long as the daemon's: tests run on
 * all cores, and by default OpenMP's take three quarters of the time. It reads the environment when
 * it is loaded. */
static void limit_spinning(char **argv) {
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT")) return;
    if (!setenv("GOMP_SPINCOUNT", "500", 1)) execv("/proc/self/exe", argv);
}

int main(int argc, char **argv) {
    limit_spinning(argv);
    run_t run = {.part = 1, .n_parts = 1, .limit_scale = 1};
    bool list = false;
    int n_selected = 0;
    setvbuf(stdout, NULL, _IOLBF,
            0); /* output written before a kill is not lost; tests inherit this buffering */
    for (int i = 1; i < argc; i++) {
        bool more = i + 1 < argc;
        if (strcmp(argv[i], "--list") == 0)
            list = true;
        else if (strcmp(argv[i], "--verbose") == 0)
            run.verbose = true;
        else if (strcmp(argv[i], "--quick") == 0)
            run.quick = true;
        else if (strcmp(argv[i], "--filter") == 0 && more && run.n_filters < MAX_FILTERS)
            run.filters[run.n_filters++] = argv[++i];
        else if (strcmp(argv[i], "--part") == 0 && more && parse_part(&run, argv[i + 1]))
            i++;
        else if (strcmp(argv[i], "--limit-scale") == 0 && more && atoi(argv[i + 1]) > 0)
            run.limit_scale = atoi(argv[++i]);
        else if (strcmp(argv[i], "--limit") == 0 && more && atoi(argv[i + 1]) > 0)
            run.limit_most = atoi(argv[++i]);
        else if (strcmp(argv[i], "--times") == 0 && more && !run.times)
            run.times = fopen(argv[++i], "we");
        else
            return usage(argv[0]);
    }
    signal(SIGINT, stop);
    signal(SIGTERM, stop);
    for (const test_case_t *test = cases; test->name; test++) {
        if (!selected(&run, test)) continue;
        if (n_selected++ % run.n_parts != run.part - 1) continue;
        if (list) {
            puts(test->name);
            continue;
        }
        if (stopped_by) break;
        outcome_t outcome = run_one(&run, test);
        run.n_passed += outcome == PASSED;
        run.n_failed += outcome == FAILED;
        run.n_skipped += outcome == SKIPPED;
    }
    if (run.times) fclose(run.times);
    if (list) return 0;
    if (run.n_skipped) printf("%d skipped\n", run.n_skipped);
    printf("%d passed, %d failed\n", run.n_passed, run.n_failed);
    if (stopped_by) return 128 + stopped_by;
    return run.n_failed != 0 || run.n_passed + run.n_skipped == 0;
}
