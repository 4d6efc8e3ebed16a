/* The owner of a directory and its worker: what each holds, and what becomes of one without the
 * other.
 */
#include <dirent.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "server/session/link.h"
#include "tests/c/peer.h"
#include "tests/test.h"

/* Descriptors of memory, or mappings of it. */
static int count_memory(pid_t pid, bool mapped) {
    char path[320], text[512];
    int n = 0;
    if (mapped) {
        snprintf(path, sizeof path, "/proc/%d/maps", (int)pid);
        FILE *file = fopen(path, "r");
        CHECK(file != NULL);
        while (fgets(text, sizeof text, file))
            n += strstr(text, "memfd:") != NULL;
        fclose(file);
        return n;
    }
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    DIR *dir = opendir(path);
    CHECK(dir != NULL);
    for (const struct dirent *entry; (entry = readdir(dir));) {
        snprintf(path, sizeof path, "/proc/%d/fd/%s", (int)pid, entry->d_name);
        const ssize_t got = readlink(path, text, sizeof text - 1);
        text[got > 0 ? got : 0] = 0;
        n += strstr(text, "memfd:") != NULL;
    }
    closedir(dir);
    return n;
}

static void wait_for_hangup(const peer_t *peer) {
    struct pollfd p = {.fd = peer->control, .events = POLLIN};
    CHECK(poll(&p, 1, PEER_WAIT_MS) == 1);
    CHECK(p.revents & POLLHUP);
}

static int64_t ask_ps(const char *dir, const char *key) {
    peer_t peer;
    peer_connect(&peer, dir);
    peer_request(&peer, "ps");
    CHECK_OK(peer_call(&peer));
    const int64_t value = peer_number(&peer, key);
    peer_close(&peer);
    return value;
}

static void unsegment(peer_t *peer, uint64_t id) {
    wire_out_t *m = &peer->out;
    wire_begin(m);
    wire_key(m, "v");
    wire_put_text(m, "unsegment");
    wire_key(m, "id");
    wire_put_u64(m, id);
    CHECK_OK(peer_control(peer, -1));
}

TEST(the_owner_holds_segments_and_maps_none) {
    peer_daemon_t daemon;
    peer_t peer;
    peer_daemon_start(&daemon, NULL);
    const pid_t worker = peer_daemon_worker(&daemon);
    CHECK(worker > 0);
    const int before = count_memory(daemon.pid, false); /* the runner keeps our output in memory */
    peer_open(&peer, daemon.dir, SMALL_BYTES);
    gradd_segment_t second = GRADD_SEGMENT_INIT;
    CHECK_OK(gradd_segment_create("second", 4096, &second));
    CHECK_OK(peer_send_fd(&peer, 2, 4096, second.fd));
    CHECK_STATUS(GRADD_E_SHM, peer_send_fd(&peer, 3, 8192, second.fd)); /* it has other bytes */
    CHECK_EQ_INT(count_memory(daemon.pid, false), before + 2);
    CHECK_EQ_INT(count_memory(daemon.pid, true), 0);
    CHECK_EQ_INT(count_memory(worker, false), before);
    CHECK_EQ_INT(count_memory(worker, true), 2);
    unsegment(&peer, 2);
    CHECK_EQ_INT(count_memory(daemon.pid, false), before + 1);
    gradd_segment_finish(&second);
    peer_close(&peer);
    for (int i = 0; count_memory(daemon.pid, false) > before; i++, usleep(1000))
        CHECK(i < PEER_WAIT_MS);
    peer_daemon_stop(&daemon);
}

TEST(a_lost_worker_is_replaced) {
    peer_daemon_t daemon;
    peer_t peer, other;
    peer_daemon_start(&daemon, NULL);
    CHECK_EQ_INT(ask_ps(daemon.dir, "workers_lost"), 0);
    usleep(100000); /* libzmq closes its side a little later */
    const int fds = peer_daemon_fds(&daemon);
    for (int lost = 1; lost <= 6; lost++) { /* more often than workers may fail to start */
        peer_open(&peer, daemon.dir, SMALL_BYTES);
        const int64_t number = peer_number(&peer, "session");
        const pid_t worker = peer_daemon_worker(&daemon);
        kill(worker, SIGKILL);
        wait_for_hangup(&peer);
        peer_open(&other, daemon.dir, SMALL_BYTES); /* it waits where it is for the next one */
        CHECK(peer_number(&other, "session") > number);
        CHECK_OK(peer_plan_small(&other, 1, 5));
        CHECK(peer_daemon_worker(&daemon) != worker);
        peer_close(&peer);
        peer_close(&other);
        CHECK_EQ_INT(ask_ps(daemon.dir, "workers_lost"), lost);
        CHECK_EQ_INT(ask_ps(daemon.dir, "pid"), daemon.pid);
    }
    for (int i = 0; peer_daemon_fds(&daemon) != fds; i++, usleep(1000))
        if (i > PEER_WAIT_MS) CHECK_EQ_INT(peer_daemon_fds(&daemon), fds);
    peer_daemon_stop(&daemon);
}

TEST(a_worker_ends_with_its_owner) {
    peer_daemon_t daemon;
    peer_t peer;
    peer_daemon_start(&daemon, NULL);
    peer_open(&peer, daemon.dir, SMALL_BYTES);
    const pid_t worker = peer_daemon_worker(&daemon);
    kill(worker, SIGSTOP); /* it cannot notice by itself */
    kill(daemon.pid, SIGKILL);
    CHECK_EQ_INT(peer_daemon_wait(&daemon, PEER_WAIT_MS), 128 + SIGKILL);
    wait_for_hangup(&peer);
    peer_close(&peer);
    peer_daemon_restart(&daemon); /* waits for the lock, which the worker has held to its end */
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/0", (int)worker);
    CHECK(access(path, F_OK) != 0);
    peer_open(&peer, daemon.dir, SMALL_BYTES);
    peer_close(&peer);
    peer_daemon_stop(&daemon);
}

TEST(workers_that_do_not_start_end_the_daemon) {
    peer_daemon_t daemon;
    peer_daemon_start(&daemon, NULL);
    const struct rlimit none = {1 << 20, 1 << 20}; /* which its workers inherit */
    CHECK(prlimit(daemon.pid, RLIMIT_AS, &none, NULL) == 0);
    kill(peer_daemon_worker(&daemon), SIGKILL);
    CHECK_EQ_INT(peer_daemon_wait(&daemon, PEER_WAIT_MS), 1);
    peer_daemon_clean(&daemon);
}

TEST(a_stop_ends_though_the_worker_is_killed_meanwhile) {
    peer_daemon_t daemon;
    peer_daemon_start(&daemon, NULL);
    const pid_t worker = peer_daemon_worker(&daemon);
    kill(worker, SIGSTOP);
    kill(daemon.pid, SIGTERM);
    usleep(50000);
    kill(worker, SIGKILL);
    CHECK_EQ_INT(peer_daemon_wait(&daemon, PEER_WAIT_MS), 0);
    peer_daemon_clean(&daemon);
}

/* ---- the link alone ---- */

TEST(messages_of_the_link) {
    int ends[2], fds[LINK_MAX_FDS];
    bool any;
    link_message_t got, sent = {.kind = LINK_STOP, .cancel = true, .reason = "idle"};
    CHECK_OK(link_create(ends));
    CHECK_OK(link_receive(ends[1], &got, fds, &any));
    CHECK(!any);
    CHECK_OK(link_send(ends[0], &sent, (int[]){0}, 1));
    CHECK_OK(link_receive(ends[1], &got, fds, &any));
    CHECK(any && got.kind == LINK_STOP && got.cancel && !strcmp(got.reason, "idle"));
    CHECK(fds[0] > 2);
    CHECK_EQ_INT(fds[1], -1);
    close(fds[0]);
    int n = 0;
    while (link_has_room(ends[0]))
        CHECK(link_send(ends[0], &sent, NULL, 0) == GRADD_OK && ++n < 100000);
    while (link_send(ends[0], &sent, NULL, 0) == GRADD_OK)
        CHECK(++n < 100000);
    CHECK_STATUS(GRADD_E_LIMIT, link_send(ends[0], &sent, NULL, 0)); /* it does not wait */
    close(ends[0]);
    for (; n > 0; n--)
        CHECK_OK(link_receive(ends[1], &got, fds, &any));
    CHECK_STATUS(GRADD_E_IO, link_receive(ends[1], &got, fds, &any));
    close(ends[1]);
}
