/* An owner, or its worker, is killed between two system calls of a restart and of the hand-over
 * that follows.
 *
 * The owner is traced from one system call to the next. Run as a whole, with GRADD_EVERY_POINT=1,
 * each point is met once; else one in so many, others in each run.
 */
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/c/peer.h"
#include "tests/test.h"

#define STRIDE     37 /* points to the next one that is met */
#define MOST       4000
#define IN_SYSCALL (SIGTRAP | 0x80)

typedef struct scene_s {
    peer_daemon_t daemon;
    peer_t peer;
    float loss;
} scene_t;

static float run_small(peer_t *peer) {
    for (int i = 0; i < 20; i++) {
        ((float *)peer_at(peer, AT_X))[i] = 0.25f * (float)i;
        ((float *)peer_at(peer, AT_W))[i] = 1.5f - (float)(i % 4);
    }
    return peer_run_small(peer, 7);
}

static void open_scene(scene_t *scene) {
    peer_connect(&scene->peer, scene->daemon.dir);
    scene->peer.reads_replaced = true;
    CHECK_OK(peer_hello(&scene->peer, 2, 2));
    CHECK_OK(peer_segment(&scene->peer, 1, SMALL_BYTES));
    CHECK_OK(peer_attach(&scene->peer));
    const float loss = run_small(&scene->peer);
    CHECK(loss != 0 && (scene->loss == 0 || memcmp(&loss, &scene->loss, sizeof loss) == 0));
    scene->loss = loss;
}

static pid_t ask_restart(const peer_daemon_t *daemon) {
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid > 0) return pid;
    char output[256];
    _exit(peer_command(daemon, "restart", output, sizeof output));
}

static bool has_word(const peer_t *peer) {
    struct pollfd p = {.fd = peer->control, .events = POLLIN};
    return poll(&p, 1, 0) == 1;
}

/* Lets the owner go on to the end of its n-th system call; false if all is over before that. */
static bool go_to(const scene_t *scene, int n) {
    const pid_t pid = scene->daemon.pid;
    int status, number = 0, n_stops = 0;
    while (!has_word(&scene->peer)) {
        CHECK(ptrace(PTRACE_SYSCALL, pid, NULL, (void *)(long)number) == 0);
        CHECK(waitpid(pid, &status, __WALL) == pid);
        CHECK(WIFSTOPPED(status));
        const bool syscall_stop = WSTOPSIG(status) == IN_SYSCALL;
        const bool event_stop = status >> 16 != 0;
        number = syscall_stop || event_stop ? 0 : WSTOPSIG(status);
        if (syscall_stop && ++n_stops / 2 >= n) return true;
    }
    return false;
}

static void trace(pid_t pid) {
    int status;
    CHECK(ptrace(PTRACE_SEIZE, pid, NULL, (void *)PTRACE_O_TRACESYSGOOD) == 0);
    CHECK(ptrace(PTRACE_INTERRUPT, pid, NULL, NULL) == 0);
    CHECK(waitpid(pid, &status, __WALL) == pid);
    CHECK(WIFSTOPPED(status));
}

static int first_point(int *out_stride) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    *out_stride = getenv("GRADD_EVERY_POINT") ? 1 : STRIDE;
    return *out_stride == 1 ? 1 : 1 + (int)(now.tv_nsec / 1000 % STRIDE);
}

TEST_LIMIT(the_owner_is_killed_at_each_point, 900) {
    static scene_t scene;
    int stride, n_killed = 0;
    peer_daemon_start(&scene.daemon, NULL);
    open_scene(&scene);
    for (int n = first_point(&stride);; n += stride, n_killed++) {
        CHECK(n < MOST);
        trace(scene.daemon.pid);
        const pid_t asker = ask_restart(&scene.daemon);
        const bool met = go_to(&scene, n);
        if (!met) {
            CHECK(ptrace(PTRACE_DETACH, scene.daemon.pid, NULL, NULL) == 0);
            CHECK_EQ_INT(peer_daemon_wait(&(peer_daemon_t){.pid = asker}, PEER_WAIT_MS), 0);
            break;
        }
        kill(scene.daemon.pid, SIGKILL);
        CHECK_EQ_INT(peer_daemon_wait(&scene.daemon, PEER_WAIT_MS), 128 + SIGKILL);
        peer_daemon_wait(&(peer_daemon_t){.pid = asker}, PEER_WAIT_MS);
        struct pollfd p = {.fd = scene.peer.control, .events = POLLIN};
        CHECK(poll(&p, 1, PEER_WAIT_MS) == 1 && p.revents & POLLHUP);
        peer_close(&scene.peer);
        peer_daemon_restart(&scene.daemon); /* no lock, no worker is left */
        open_scene(&scene);
    }
    printf("%d points\n", n_killed);
    CHECK(n_killed > 0);
    peer_close(&scene.peer);
    peer_daemon_stop(&scene.daemon);
}

TEST_LIMIT(the_worker_is_killed_at_each_point, 900) {
    static scene_t scene;
    int stride, n_killed = 0;
    bool met = true;
    peer_daemon_start(&scene.daemon, NULL);
    open_scene(&scene);
    for (int n = first_point(&stride); met; n += stride) {
        bool dropped;
        CHECK(n < MOST);
        trace(scene.daemon.pid);
        const pid_t asker = ask_restart(&scene.daemon);
        met = go_to(&scene, n);
        const pid_t worker = met ? peer_daemon_worker(&scene.daemon) : 0;
        if (worker) kill(worker, SIGKILL);
        n_killed += worker != 0;
        CHECK(ptrace(PTRACE_DETACH, scene.daemon.pid, NULL, NULL) == 0);
        CHECK_EQ_INT(peer_daemon_wait(&(peer_daemon_t){.pid = asker}, PEER_WAIT_MS), 0);
        do {
            peer_moved(&scene.peer, &dropped);
            CHECK(!dropped);
        } while (peer_attach(&scene.peer) != GRADD_OK); /* that one has died, too */
        const float loss = run_small(&scene.peer);
        CHECK(memcmp(&loss, &scene.loss, sizeof loss) == 0);
    }
    printf("%d points\n", n_killed);
    CHECK(n_killed > 0);
    peer_close(&scene.peer);
    peer_daemon_stop(&scene.daemon);
}
