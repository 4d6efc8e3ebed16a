/* The daemon's cost per request: the forward of a plan that computes almost nothing.
 *
 * Usage: build/bin/bench_ipc [requests]
 * A real daemon is started. One line each for `forward` (both threads), `ps` (I/O thread alone) and
 * the bare ZeroMQ round trip between two processes, which is the floor. The client blocks in
 * zmq_poll; a last line shows `forward` to one that spins, for which no processor falls asleep:
 * on an idle virtual machine waking one costs as much as all the rest. Microseconds.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/c/peer.h"
#include "tests/test.h"

#define WARM_UP 500

void test_fail(const char *file, int line, const char *format, ...) {
    fprintf(stderr, "%s:%d: %s\n", file, line, format);
    exit(1);
}

void test_skip(const char *format, ...) {
    fprintf(stderr, "%s\n", format);
    exit(1);
}

void test_ok(const char *file, int line, const char *text, gradd_status_t status) {
    if (status == GRADD_OK) return;
    fprintf(stderr, "%s:%d: %s: %s\n", file, line, text, gradd_error_message());
    exit(1);
}

void test_eq_int(const char *file, int line, const char *text_a, const char *text_b, intmax_t a,
                 intmax_t b) {
    if (a == b) return;
    fprintf(stderr, "%s:%d: %s == %s: %jd, %jd\n", file, line, text_a, text_b, a, b);
    exit(1);
}

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void report(const char *what, double *us, int n) {
    qsort(us, (size_t)n, sizeof *us, by_value);
    printf("%-28s p50 %7.1f  p90 %7.1f  p99 %7.1f  max %8.1f us\n", what, us[n / 2], us[n * 9 / 10],
           us[n * 99 / 100], us[n - 1]);
}

static void wait_spinning(void *socket) {
    int events = 0;
    size_t bytes = sizeof events;
    while (!(events & ZMQ_POLLIN))
        CHECK(zmq_getsockopt(socket, ZMQ_EVENTS, &events, &bytes) == 0);
}

static void bench_forward(peer_t *peer, double *us, int n, bool spin) {
    for (int i = -WARM_UP; i < n; i++) {
        peer_forward_small(peer, 1, 1, 2);
        double start = now_us();
        peer_send(peer);
        if (spin) wait_spinning(peer->dealer);
        CHECK(peer_pending(peer, PEER_WAIT_MS));
        CHECK_OK(peer_receive(peer));
        if (i >= 0) us[i] = now_us() - start;
    }
    report(spin ? "the same, client spins" : "forward, empty plan", us, n);
}

static void bench_ps(peer_t *peer, double *us, int n) {
    for (int i = -WARM_UP; i < n; i++) {
        peer_request(peer, "ps");
        double start = now_us();
        peer_send(peer);
        CHECK(peer_pending(peer, PEER_WAIT_MS));
        CHECK_OK(peer_receive(peer));
        if (i >= 0) us[i] = now_us() - start;
    }
    report("ps, I/O thread alone", us, n);
}

static _Noreturn void echo(const char *endpoint) {
    void *router = zmq_socket(zmq_ctx_new(), ZMQ_ROUTER);
    if (zmq_bind(router, endpoint) != 0) _exit(1);
    for (;;) {
        zmq_msg_t part;
        zmq_msg_init(&part);
        if (zmq_msg_recv(&part, router, 0) < 0) _exit(1);
        zmq_msg_send(&part, router, zmq_msg_more(&part) ? ZMQ_SNDMORE : 0);
    }
}

static void bench_floor(double *us, int n) {
    char endpoint[64], data[200] = {0};
    snprintf(endpoint, sizeof endpoint, "ipc:///tmp/gradd-bench-%d", (int)getpid());
    pid_t child = fork();
    if (child == 0) echo(endpoint);
    void *context = zmq_ctx_new(), *dealer = zmq_socket(context, ZMQ_DEALER);
    int linger = 0;
    zmq_setsockopt(dealer, ZMQ_LINGER, &linger, sizeof linger);
    CHECK(zmq_connect(dealer, endpoint) == 0);
    for (int i = -WARM_UP; i < n; i++) {
        zmq_pollitem_t item = {.socket = dealer, .events = ZMQ_POLLIN};
        double start = now_us();
        CHECK(zmq_send(dealer, data, sizeof data, 0) >= 0);
        CHECK(zmq_poll(&item, 1, PEER_WAIT_MS) == 1);
        CHECK(zmq_recv(dealer, data, sizeof data, 0) >= 0);
        if (i >= 0) us[i] = now_us() - start;
    }
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    zmq_close(dealer);
    zmq_ctx_term(context);
    unlink(endpoint + strlen("ipc://"));
    report("bare ZeroMQ round trip", us, n);
}

int main(int argc, char **argv) {
    int n = argc > 1 ? atoi(argv[1]) : 20000;
    peer_daemon_t daemon;
    peer_t peer;
    if (n < 100) n = 100;
    double *us = malloc((size_t)n * sizeof *us);
    if (!us) return 1;
    bench_floor(us, n);
    peer_daemon_start(&daemon, (const char *const[]){"--log", "warn", NULL});
    peer_open(&peer, daemon.dir, SMALL_BYTES);
    CHECK_OK(peer_plan_small(&peer, 1, 2));
    wire_out_t *m = peer_request(&peer, "bind");
    wire_key(m, "bind");
    wire_put_u64(m, 1);
    peer_put_one(m, "tensors",
                 (peer_f32_t){
                     AT_W, 2, {2, 4},
                       0
    });
    CHECK_OK(peer_call(&peer));
    bench_ps(&peer, us, n);
    bench_forward(&peer, us, n, false);
    bench_forward(&peer, us, n, true);
    peer_close(&peer);
    peer_daemon_stop(&daemon);
    free(us);
    return 0;
}
