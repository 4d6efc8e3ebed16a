/* The owner of a directory and its worker: what each holds, and what becomes of one without the
 * other.
 */
#include <dirent.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "server/owner/retell.h"
#include "server/owner/state.h"
#include "server/session/link.h"
#include "shm/fdpass.h"
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

/* peer_open() of one that reads `replaced`. */
static void open_movable(peer_t *peer, const char *dir) {
    peer_connect(peer, dir);
    peer->reads_replaced = true;
    CHECK_OK(peer_hello(peer, 2, 2));
    CHECK_OK(peer_segment(peer, 1, SMALL_BYTES));
    CHECK_OK(peer_attach(peer));
}

static void fill_small(const peer_t *peer) {
    for (int i = 0; i < 20; i++) {
        ((float *)peer_at(peer, AT_X))[i] = 0.25f * (float)i;
        ((float *)peer_at(peer, AT_W))[i] = 1.5f - (float)(i % 4);
    }
}

TEST(clients_move_to_the_next_worker) {
    peer_daemon_t daemon;
    peer_t peer;
    uint8_t token[16];
    bool dropped;
    gradd_segment_t second = GRADD_SEGMENT_INIT;
    peer_daemon_start(&daemon, NULL);
    open_movable(&peer, daemon.dir);
    memcpy(token, peer.token, sizeof token);
    fill_small(&peer);
    const int64_t session = peer_number(&peer, "session");
    const float loss = peer_run_small(&peer, 7);
    CHECK(loss != 0);
    CHECK_OK(gradd_segment_create("second", 4096, &second));
    CHECK_OK(peer_send_fd(&peer, 2, 4096, second.fd));
    unsegment(&peer, 2);
    CHECK_OK(peer_send_fd(&peer, 3, 4096, second.fd));
    for (int lost = 0; lost < 6; lost++) { /* more often than over one that it does not survive */
        const pid_t worker = peer_daemon_worker(&daemon);
        kill(worker, SIGKILL);
        peer_moved(&peer, &dropped);
        CHECK(!dropped);
        CHECK(peer_number(&peer, "worker") != worker);
        CHECK_EQ_INT(peer_number(&peer, "worker"), peer_daemon_worker(&daemon));
        CHECK_EQ_INT(peer_number(&peer, "pid"), daemon.pid);
        peer.attached = true; /* it knows its token, but this worker has not heard of it */
        peer_request(&peer, "plan.drop");
        wire_key(&peer.out, "plan");
        wire_put_u64(&peer.out, 1);
        CHECK_STATUS(GRADD_E_SESSION, peer_call(&peer));
        peer.attached = false;
        CHECK_OK(peer_attach(&peer));
        CHECK(memcmp(peer.token, token, sizeof token) == 0);
        CHECK_EQ_INT(peer_number(&peer, "session"), session);
        const float again = peer_run_small(&peer, 8);
        CHECK(memcmp(&again, &loss, sizeof loss) == 0);
    }
    CHECK_STATUS(GRADD_E_SHM, peer_send_fd(&peer, 2, 4096, second.fd));
    CHECK_ERROR_HAS("its memory is segment 3 already");
    unsegment(&peer, 3);
    CHECK_OK(peer_send_fd(&peer, 2, 4096, second.fd));
    gradd_segment_finish(&second);
    peer_close(&peer);
    peer_daemon_stop(&daemon);
}

static bool all_halted(pid_t pid) {
    char path[320], text[256];
    bool all = true;
    snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
    DIR *dir = opendir(path);
    CHECK(dir != NULL);
    for (const struct dirent *entry; (entry = readdir(dir));) {
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "/proc/%d/task/%s/stat", (int)pid, entry->d_name);
        FILE *file = fopen(path, "r");
        CHECK(file != NULL);
        text[fread(text, 1, sizeof text - 1, file)] = 0;
        fclose(file);
        all = all && strstr(text, ") T ");
    }
    closedir(dir);
    return all;
}

/* SIGSTOP, until no thread of it runs. */
static void halt(pid_t pid) {
    kill(pid, SIGSTOP);
    for (int i = 0; !all_halted(pid); i++, usleep(1000))
        CHECK(i < PEER_WAIT_MS);
}

TEST(a_packet_without_an_answer_is_dropped) {
    peer_daemon_t daemon;
    peer_t peer;
    bool dropped;
    peer_daemon_start(&daemon, NULL);
    open_movable(&peer, daemon.dir);
    const pid_t worker = peer_daemon_worker(&daemon);
    halt(worker);
    wire_out_t *m = &peer.out;
    wire_begin(m);
    wire_key(m, "v");
    wire_put_text(m, "unsegment");
    wire_key(m, "id");
    wire_put_u64(m, 1);
    wire_end(m);
    CHECK_OK(gradd_fd_send(peer.control, m->data, m->bytes, NULL, 0));
    usleep(50000);
    kill(worker, SIGKILL);
    peer_moved(&peer, &dropped);
    CHECK(dropped);
    unsegment(&peer, 1); /* the next worker has it again */
    CHECK_OK(peer_send_fd(&peer, 1, SMALL_BYTES, peer.segment.fd));
    CHECK_OK(peer_attach(&peer));
    CHECK_OK(peer_plan_small(&peer, 1, 5));
    peer_close(&peer);
    peer_daemon_stop(&daemon);
}

typedef struct keep_s {
    const char *name;
    double seconds;
} keep_t;

static gradd_status_t keep_for(peer_t *peer, keep_t asked, uint64_t segment, int fd) {
    wire_out_t *m = &peer->out;
    wire_begin(m);
    wire_key(m, "v");
    wire_put_text(m, "keep");
    wire_key(m, "name");
    wire_put_text(m, asked.name);
    wire_key(m, "seconds");
    wire_put_f64(m, asked.seconds);
    wire_key(m, "segments");
    wire_put_list(m, 1);
    wire_put_u64(m, segment);
    return peer_control(peer, fd);
}

static gradd_status_t keep(peer_t *peer, const char *name, uint64_t segment, int fd) {
    return keep_for(peer, (keep_t){name, 60}, segment, fd);
}

static gradd_status_t reattach(peer_t *peer, const char *name, uint64_t at) {
    wire_out_t *m = &peer->out;
    wire_begin(m);
    wire_key(m, "v");
    wire_put_text(m, "reattach");
    wire_key(m, "name");
    wire_put_text(m, name);
    wire_key(m, "at");
    wire_put_u64(m, at);
    return peer_control(peer, -1);
}

/* A process that keeps a session, with `value` in its segment, and ends. */
static void leave_session(const peer_daemon_t *daemon, const char *name, float value) {
    const pid_t child = fork();
    if (child == 0) {
        peer_t peer;
        peer_open(&peer, daemon->dir, SMALL_BYTES);
        *(float *)peer_at(&peer, AT_W) = value;
        CHECK_OK(keep(&peer, name, 1, peer.segment.fd));
        _exit(0);
    }
    CHECK_EQ_INT(peer_daemon_wait(&(peer_daemon_t){.pid = child}, PEER_WAIT_MS), 0);
}

TEST(a_restart_keeps_clients_and_sessions) {
    peer_daemon_t daemon;
    peer_t peer, quiet, third;
    char output[256];
    uint8_t token[16];
    bool dropped;
    peer_daemon_start(&daemon, NULL);
    leave_session(&daemon, "net", 7.5f);
    open_movable(&peer, daemon.dir);
    memcpy(token, peer.token, sizeof token);
    const int64_t session = peer_number(&peer, "session");
    fill_small(&peer);
    const float loss = peer_run_small(&peer, 7);
    CHECK(loss != 0);
    CHECK_STATUS(GRADD_E_UNSUPPORTED, keep_for(&peer, (keep_t){"mine", NAN}, 1, peer.segment.fd));
    CHECK_ERROR_HAS("field 'seconds': nan");
    CHECK_OK(keep_for(&peer, (keep_t){"mine", INFINITY}, 1, peer.segment.fd));
    CHECK_OK(keep(&peer, "mine", 1, peer.segment.fd));
    for (int i = 0; i < 3; i++) {
        peer_open(&quiet, daemon.dir, SMALL_BYTES); /* of a version that does not move */
        const pid_t worker = peer_daemon_worker(&daemon);
        CHECK_EQ_INT(peer_command(&daemon, "restart", output, sizeof output), 0);
        CHECK(strstr(output, "restarted: gradd ") != NULL);
        wait_for_hangup(&quiet);
        peer_close(&quiet);
        peer_moved(&peer, &dropped);
        CHECK(!dropped);
        CHECK_EQ_INT(peer_number(&peer, "pid"), daemon.pid);
        CHECK(peer_daemon_worker(&daemon) != worker);
        CHECK_OK(peer_attach(&peer));
        CHECK(memcmp(peer.token, token, sizeof token) == 0);
        const float again = peer_run_small(&peer, 8);
        CHECK(memcmp(&again, &loss, sizeof loss) == 0);
    }
    CHECK_OK(reattach(&peer, "net", 1));
    CHECK_EQ_INT(peer_number(&peer, "segments"), 1);
    CHECK_STATUS(GRADD_E_SESSION, reattach(&peer, "mine", 0)); /* it is its own */
    CHECK_ERROR_HAS("this process's own");
    peer_open(&third, daemon.dir, SMALL_BYTES);
    CHECK(peer_number(&third, "session") > session);
    peer_close(&third);
    usleep(100000);
    const int fds = peer_daemon_fds(&daemon);
    CHECK_EQ_INT(peer_command(&daemon, "restart", output, sizeof output), 0);
    peer_moved(&peer, &dropped);
    CHECK_OK(peer_attach(&peer));
    for (int i = 0; peer_daemon_fds(&daemon) != fds; i++, usleep(1000))
        if (i > PEER_WAIT_MS) CHECK_EQ_INT(peer_daemon_fds(&daemon), fds);
    peer_close(&peer);
    peer_daemon_stop(&daemon);
}

static gradd_status_t ask_restart(peer_t *peer, uint64_t format, uint64_t device, uint64_t inode) {
    wire_out_t *m = &peer->out;
    wire_begin(m);
    wire_key(m, "v");
    wire_put_text(m, "restart");
    wire_key(m, "format");
    wire_put_u64(m, format);
    wire_key(m, "device");
    wire_put_u64(m, device);
    wire_key(m, "inode");
    wire_put_u64(m, inode);
    return peer_control(peer, -1);
}

TEST(another_program_is_not_put_in_place_of_the_daemon) {
    peer_daemon_t daemon;
    peer_t peer;
    struct stat self;
    peer_daemon_start(&daemon, NULL);
    open_movable(&peer, daemon.dir);
    CHECK(stat("/proc/self/exe", &self) == 0);
    CHECK_STATUS(GRADD_E_UNSUPPORTED, ask_restart(&peer, STATE_FORMAT, self.st_dev, self.st_ino));
    CHECK_ERROR_HAS("is not the program that asks");
    CHECK_STATUS(GRADD_E_VERSION, ask_restart(&peer, STATE_FORMAT + 1, self.st_dev, self.st_ino));
    CHECK_OK(peer_plan_small(&peer, 1, 5)); /* nothing has happened */
    CHECK_EQ_INT(ask_ps(daemon.dir, "workers_lost"), 0);
    peer_close(&peer);
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

/* ---- sessions with a name ---- */

static bool answer_none(void *context, relay_client_t *client, const wire_doc_t *packet,
                        bool *out_sent) {
    (void)context;
    (void)client;
    (void)packet;
    (void)out_sent;
    return false;
}

/* What a worker that lives never gets, it never answers: its client is hung up on, and connects
 * again, in place of a wait without end. */
TEST(a_packet_that_cannot_be_passed_on_ends_the_connection) {
    enum { BYTES = 40 << 10, ROOM = 4 << 10 };
    const int room = ROOM;
    const gradd_peer_t peer = GRADD_PEER_INIT;
    int outer[2], inner[2], next[2];
    CHECK_OK(link_create(outer));
    CHECK_OK(link_create(inner));
    CHECK_OK(link_create(next));
    CHECK(setsockopt(inner[0], SOL_SOCKET, SO_SNDBUF, &room, sizeof room) == 0);
    CHECK(setsockopt(next[0], SOL_SOCKET, SO_SNDBUF, &room, sizeof room) == 0);
    relay_client_t *client = relay_create(1, outer[0], &peer);
    uint8_t *packet = calloc(1, BYTES);
    CHECK(client && packet);
    client->inner = inner[0];
    CHECK_OK(gradd_fd_send(outer[1], packet, BYTES, NULL, 0));
    CHECK_EQ_INT(relay_from_client(client, answer_none, NULL), RELAY_OVER);
    CHECK_ERROR_HAS("too large for the socket");
    /* The same of what the next worker is told. */
    client->hello.packet = packet;
    client->hello.n_bytes = BYTES;
    client->movable = true;
    CHECK(retell_wait(client));
    CHECK_EQ_INT(retell_begin(client, next[0]), RELAY_OVER);
    /* One that has died is replaced. */
    CHECK_OK(link_create(inner));
    CHECK(retell_wait(client));
    close(inner[1]);
    CHECK_EQ_INT(retell_begin(client, inner[0]), RELAY_OPEN);
    relay_destroy(client);
    close(outer[1]);
    close(next[1]);
}

TEST(a_session_is_handed_to_the_next_process) {
    peer_daemon_t daemon;
    peer_t peer, other;
    peer_daemon_start(&daemon, NULL);
    const int before = count_memory(daemon.pid, false);
    leave_session(&daemon, "net", 7.5f);
    peer_open(&peer, daemon.dir, SMALL_BYTES);
    gradd_status_t st;
    while ((st = reattach(&peer, "net", 0)) == GRADD_E_STALE) /* its worker lets go of it */
        usleep(1000);
    CHECK_OK(st);
    CHECK_EQ_INT(peer_number(&peer, "segments"), 1);
    CHECK_EQ_INT(peer_number(&peer, "id"), 0);
    CHECK_OK(reattach(&peer, "net", 1));
    CHECK_EQ_INT(peer_number(&peer, "id"), 1);
    CHECK_STATUS(GRADD_E_LIMIT, reattach(&peer, "net", 2));
    CHECK_STATUS(GRADD_E_LIMIT, reattach(&peer, "net", UINT64_MAX));
    /* Two descriptors of the kept one, and the segment of this client. */
    CHECK_EQ_INT(count_memory(daemon.pid, false), before + 3);
    const pid_t child = fork();
    if (child == 0) { /* it is this process's now, and it lives */
        peer_connect(&other, daemon.dir);
        CHECK_STATUS(GRADD_E_SESSION, reattach(&other, "net", 0));
        CHECK_ERROR_HAS("in use by process");
        _exit(0);
    }
    CHECK_EQ_INT(peer_daemon_wait(&(peer_daemon_t){.pid = child}, PEER_WAIT_MS), 0);
    CHECK_OK(keep(&peer, "net", 1, peer.segment.fd)); /* it has what it wants */
    CHECK_EQ_INT(count_memory(daemon.pid, false), before + 2);
    peer_close(&peer);
    for (int i = 0; count_memory(daemon.pid, false) != before + 2; i++, usleep(1000))
        CHECK(i < PEER_WAIT_MS);
    CHECK_EQ_INT(ask_ps(daemon.dir, "workers_lost"), 0);
    peer_daemon_stop(&daemon);
}

TEST(hostile_names_and_lists) {
    peer_daemon_t daemon;
    peer_t peer;
    char name[16];
    peer_daemon_start(&daemon, NULL);
    peer_open(&peer, daemon.dir, SMALL_BYTES);
    const int before = count_memory(daemon.pid, false);
    CHECK_STATUS(GRADD_E_UNSUPPORTED, keep(&peer, "", 1, peer.segment.fd));
    CHECK_STATUS(GRADD_E_UNSUPPORTED, keep(&peer, "a\nb", 1, peer.segment.fd));
    CHECK_STATUS(GRADD_E_UNSUPPORTED, keep(&peer, "a b", 1, peer.segment.fd));
    CHECK_STATUS(GRADD_E_SHM, keep(&peer, "net", 2, peer.segment.fd));
    CHECK_ERROR_HAS("unknown segment 2");
    CHECK_STATUS(GRADD_E_SHM, keep(&peer, "net", 1, -1));
    CHECK_ERROR_HAS("0 descriptors came along");
    CHECK_STATUS(GRADD_E_SESSION, reattach(&peer, "net", 0));
    CHECK_ERROR_HAS("none is kept");
    for (int i = 0; i < 64; i++) {
        snprintf(name, sizeof name, "net%d", i);
        CHECK_OK(keep(&peer, name, 1, peer.segment.fd));
    }
    CHECK_STATUS(GRADD_E_LIMIT, keep(&peer, "net64", 1, peer.segment.fd));
    for (int i = 0; i < 200; i++) /* said again, it takes no more */
        CHECK_OK(keep(&peer, "net7", 1, peer.segment.fd));
    CHECK_EQ_INT(count_memory(daemon.pid, false), before + 64);
    CHECK_STATUS(GRADD_E_SESSION, reattach(&peer, "net7", 0));
    CHECK_ERROR_HAS("this process's own");
    CHECK_OK(peer_plan_small(&peer, 1, 5)); /* the session goes on */
    peer_close(&peer);
    for (int i = 0; count_memory(daemon.pid, false) != before - 1 + 128; i++, usleep(1000))
        CHECK(i < PEER_WAIT_MS);
    peer_daemon_stop(&daemon);
}
