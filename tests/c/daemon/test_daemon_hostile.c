/* A real daemon against clients that lie, flood, forge, die or never read. After each attack a good
 * client is served and the daemon ends cleanly with exit code 0.
 */
#include "server/session/session.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/c/peer.h"
#include "tests/test.h"

static uint64_t random_state = 42;

static uint32_t draw(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 33);
}

static int raw_connect(const char *dir, const char *name, int type) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%.64s/%.20s", dir, name);
    int fd = socket(AF_UNIX, type | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0);
    CHECK(connect(fd, (struct sockaddr *)&address, sizeof address) == 0);
    return fd;
}

static void serve_good_client(const char *dir) {
    peer_t peer;
    peer_open(&peer, dir, SMALL_BYTES);
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
    ((float *)peer_at(&peer, AT_X))[3] = 5;
    ((float *)peer_at(&peer, AT_W))[3] = 7;
    peer_forward_small(&peer, 1, 1, 2);
    CHECK_OK(peer_call(&peer));
    CHECK_NEAR(*(float *)peer_at(&peer, AT_LOSS), 35, 0);
    peer_close(&peer);
}

/* Sessions of the daemon, seen by a client that has none itself. */
static int count_sessions(const peer_daemon_t *daemon) {
    peer_t peer;
    peer_connect(&peer, daemon->dir); /* its own control connection counts too */
    peer_request(&peer, "ps");
    CHECK_OK(peer_call(&peer));
    int n = wire_count(peer_value(&peer, "sessions")) - 1;
    peer_close(&peer);
    return n;
}

static void wait_for_sessions(const peer_daemon_t *daemon, int n, int limit_ms) {
    for (int waited = 0; count_sessions(daemon) > n; waited += 10) {
        if (waited > limit_ms) test_fail(__FILE__, __LINE__, "sessions stay after %d ms", limit_ms);
        usleep(10000);
    }
}

/* No descriptor is left behind: the count returns to what it was. */
static void wait_for_fds(const peer_daemon_t *daemon, int n) {
    for (int waited = 0; peer_daemon_fds(daemon) > n; waited += 10) {
        if (waited > 2000) CHECK_EQ_INT(peer_daemon_fds(daemon), n);
        usleep(10000);
    }
}

TEST_LIMIT(garbage_on_the_command_socket, 40) {
    peer_daemon_t daemon;
    peer_daemon_start(&daemon, NULL);
    for (int i = 0; i < 2000; i++) {
        uint8_t bytes[300];
        size_t n = 1 + draw() % sizeof bytes;
        int fd = raw_connect(daemon.dir, "cmd.sock", SOCK_STREAM);
        for (size_t k = 0; k < n; k++)
            bytes[k] = (uint8_t)draw();
        if (i & 1 && n > 10) { /* the signature of ZMTP */
            bytes[0] = 0xff;
            bytes[9] = 0x7f;
        }
        send(fd, bytes, n, MSG_NOSIGNAL);
        close(fd);
    }
    /* ZMTP 1.0: routing id "evil", message "hello" */
    int old = raw_connect(daemon.dir, "cmd.sock", SOCK_STREAM);
    send(old,
         "\x05\x00"
         "evil"
         "\x06\x00"
         "hello",
         13, MSG_NOSIGNAL);
    serve_good_client(daemon.dir);
    peer_t peer;
    peer_connect(&peer, daemon.dir);
    peer_request(&peer, "ps");
    CHECK_OK(peer_call(&peer));
    const msgpack_object *counters = peer_value(&peer, "counters");
    for (uint32_t i = 0; i < counters->via.map.size; i++) /* nothing surfaced as a message */
        if (counters->via.map.ptr[i].key.via.str.size == 8 &&
            memcmp(counters->via.map.ptr[i].key.via.str.ptr, "requests", 8) == 0)
            CHECK(counters->via.map.ptr[i].val.via.u64 < 20);
    peer_close(&peer);
    close(old);
    peer_daemon_stop(&daemon);
}

TEST_LIMIT(garbage_on_the_control_socket, 40) {
    peer_daemon_t daemon;
    peer_daemon_start(&daemon, NULL);
    for (int i = 0; i < 300; i++) {
        uint8_t bytes[200], reply[65536];
        int fd = raw_connect(daemon.dir, "ctl.sock", SOCK_SEQPACKET);
        for (int packet = 0; packet < 5; packet++) {
            size_t n = 1 + draw() % sizeof bytes;
            for (size_t k = 0; k < n; k++)
                bytes[k] = (uint8_t)draw();
            if (send(fd, bytes, n, MSG_NOSIGNAL) < 0) break;
            if (i % 2 && recv(fd, reply, sizeof reply, 0) <= 0) break;
        }
        close(fd);
    }
    uint8_t *large = calloc(1, 100000);
    int fd = raw_connect(daemon.dir, "ctl.sock", SOCK_SEQPACKET);
    send(fd, large, 100000, MSG_NOSIGNAL);
    free(large);
    serve_good_client(daemon.dir);
    close(fd);
    wait_for_sessions(&daemon, 0, 2000);
    peer_daemon_stop(&daemon);
}

/* A random envelope after a good start: valid msgpack, nonsense content. */
TEST_LIMIT(random_envelopes, 40) {
    static const char *const verbs[] = {"attach",  "detach?", "graph.put", "graph.plan",
                                        "bind",    "unbind",  "forward",   "backward",
                                        "release", "ps",      "plan.drop", "plan.estimate"};
    static const char *const keys[] = {"plan", "run",  "seed",  "flags", "b",     "in",     "out",
                                       "go",   "g",    "keep",  "bind",  "rel",   "runs",   "graph",
                                       "grad", "onnx", "alias", "bound", "gmask", "tensors"};
    peer_daemon_t daemon;
    peer_t peer;
    int failed = 0;
    peer_daemon_start(&daemon, NULL);
    peer_open(&peer, daemon.dir, SMALL_BYTES);
    CHECK_OK(peer_plan_small(&peer, 1, 2));
    for (int i = 0; i < 5000; i++) {
        wire_out_t *m = peer_request(&peer, verbs[draw() % (sizeof verbs / sizeof *verbs)]);
        unsigned used = 0;
        for (int k = 0; k < 8; k++) {
            unsigned key = draw() % (sizeof keys / sizeof *keys);
            if (used & 1u << key) continue;
            used |= 1u << key;
            wire_key(m, keys[key]);
            switch (draw() % 7) {
            case 0:
                wire_put_u64(m, draw() % 3);
                break;
            case 1:
                wire_put_u64(m, (uint64_t)draw() << 33);
                break;
            case 2:
                wire_put_nil(m);
                break;
            case 3:
                peer_put_tensors(m, 1,
                                 &(peer_f32_t){
                                     draw() % 100 * 64, 2, {draw() % 4, 4},
                                           0
                },
                                 draw() % 2);
                break;
            case 4:
                wire_put_list(m, 2);
                peer_put_tensors(m, 1,
                                 &(peer_f32_t){
                                     draw(), 2, {2, 4},
                                       0
                },
                                 false);
                wire_put_u64(m, 1);
                break;
            case 5:
                wire_put_list(m, 0);
                break;
            default:
                wire_put_bytes(m, "0123456789abcdef0123456789abcdef", 32);
            }
        }
        failed += peer_call(&peer) != GRADD_OK;
    }
    CHECK(failed > 2000);
    serve_good_client(daemon.dir);
    peer_close(&peer);
    wait_for_sessions(&daemon, 0, 2000);
    peer_daemon_stop(&daemon);
}

TEST(frames_are_limited) {
    peer_daemon_t daemon;
    peer_t peer;
    peer_daemon_start(&daemon, NULL);
    peer_open(&peer, daemon.dir, SMALL_BYTES);
    for (int n = 8; n < 30000; n = n * 60) {
        peer_request(&peer, "ps");
        wire_end(&peer.out);
        CHECK(zmq_send(peer.dealer, peer.out.data, peer.out.bytes, ZMQ_SNDMORE) >= 0);
        for (int i = 0; i < n; i++)
            CHECK(zmq_send(peer.dealer, "", 0, i + 1 < n ? ZMQ_SNDMORE : 0) >= 0);
        CHECK_STATUS(GRADD_E_LIMIT, peer_receive(&peer));
        CHECK_ERROR_HAS("more than 8");
    }
    peer_request(&peer, "ps"); /* takes no payload at all */
    CHECK_STATUS(GRADD_E_LIMIT, peer_call_with(&peer, "x", 1));
    CHECK_ERROR_HAS("expected at most 0");
    /* An envelope above its limit, and a frame above libzmq's: the latter ends the connection. */
    size_t bytes = (16u << 20) + (1u << 20);
    uint8_t *large = calloc(1, bytes);
    CHECK(zmq_send(peer.dealer, large, WIRE_MAX_BYTES + 1, 0) >= 0);
    CHECK_STATUS(GRADD_E_LIMIT, peer_receive(&peer));
    CHECK(zmq_send(peer.dealer, large, bytes, 0) >= 0);
    CHECK(!peer_pending(&peer, 200));
    free(large);
    serve_good_client(daemon.dir);
    peer_close(&peer);
    peer_daemon_stop(&daemon);
}

TEST(forged_identities) {
    peer_daemon_t daemon;
    peer_t a, b;
    peer_daemon_start(&daemon, NULL);
    peer_connect(&a, daemon.dir);
    CHECK_STATUS(GRADD_E_SESSION, peer_attach(&a)); /* a nonce of zeros, before hello */
    CHECK_OK(peer_hello(&a, 2, 2));
    a.nonce[0] ^= 1;
    CHECK_STATUS(GRADD_E_SESSION, peer_attach(&a));
    a.nonce[0] ^= 1;
    CHECK_OK(peer_attach(&a));
    a.attached = false;
    CHECK_STATUS(GRADD_E_SESSION, peer_attach(&a)); /* it was used */
    a.attached = true;
    peer_open(&b, daemon.dir, SMALL_BYTES);
    memcpy(b.token, a.token, sizeof b.token); /* another session's token on this connection */
    peer_request(&b, "detach");
    CHECK_STATUS(GRADD_E_SESSION, peer_call(&b));
    const msgpack_object *session = peer_value(&b, "session");
    CHECK(session->via.str.size == 4 && memcmp(session->via.str.ptr, "lost", 4) == 0);
    a.token[15] ^= 0x80;
    peer_request(&a, "detach");
    CHECK_STATUS(GRADD_E_SESSION, peer_call(&a));
    a.token[15] ^= 0x80;
    a.attached = false;
    peer_request(&a, "release"); /* no token at all */
    CHECK_STATUS(GRADD_E_SESSION, peer_call(&a));
    a.attached = true;
    peer_request(&a, "detach");
    CHECK_OK(peer_call(&a));
    peer_close(&a);
    peer_close(&b);
    peer_daemon_stop(&daemon);
}

/* A second socket with the victim's routing id gets neither its replies nor its session. */
TEST(routing_id_cannot_be_taken_over) {
    peer_daemon_t daemon;
    peer_t victim, thief;
    peer_daemon_start(&daemon, NULL);
    for (int i = 0; i < 2; i++) {
        peer_t *p = i ? &thief : &victim;
        char endpoint[128];
        int linger = 0;
        peer_connect(p, daemon.dir);
        zmq_close(p->dealer);
        p->dealer = zmq_socket(p->context, ZMQ_DEALER);
        int timeout = i ? 300 : PEER_WAIT_MS;
        zmq_setsockopt(p->dealer, ZMQ_LINGER, &linger, sizeof linger);
        zmq_setsockopt(p->dealer, ZMQ_RCVTIMEO, &timeout, sizeof timeout);
        CHECK(zmq_setsockopt(p->dealer, ZMQ_ROUTING_ID, "victim", 6) == 0);
        snprintf(endpoint, sizeof endpoint, "ipc://%s/cmd.sock", daemon.dir);
        CHECK(zmq_connect(p->dealer, endpoint) == 0);
        if (i == 0) {
            CHECK_OK(peer_hello(p, 2, 2));
            CHECK_OK(peer_attach(p));
        }
    }
    memcpy(thief.token, victim.token, sizeof thief.token);
    thief.attached = true;
    thief.q = 100;
    peer_request(&thief, "detach");
    peer_send(&thief);
    CHECK(!peer_pending(&thief, 300));
    peer_request(&victim, "ps");
    CHECK_OK(peer_call(&victim));
    peer_request(&victim, "detach");
    CHECK_OK(peer_call(&victim));
    peer_close(&thief);
    peer_close(&victim);
    peer_daemon_stop(&daemon);
}

TEST(segments_must_be_sealed_and_honest) {
    peer_daemon_t daemon;
    peer_t peer;
    gradd_segment_t segment;
    peer_daemon_start(&daemon, NULL);
    peer_connect(&peer, daemon.dir);
    int open_memfd = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(ftruncate(open_memfd, 4096) == 0);
    CHECK_STATUS(GRADD_E_SESSION, peer_send_fd(&peer, 1, 4096, open_memfd)); /* before hello */
    CHECK_OK(peer_hello(&peer, 2, 2));
    CHECK_STATUS(GRADD_E_SHM, peer_send_fd(&peer, 1, 4096, open_memfd));
    CHECK_ERROR_HAS("segment 1");
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    CHECK_STATUS(GRADD_E_SHM, peer_send_fd(&peer, 1, 4096, null));
    CHECK_STATUS(GRADD_E_SHM, peer_send_fd(&peer, 1, 4096, -1)); /* no descriptor */
    CHECK_OK(gradd_segment_create("good", 4096, &segment));
    CHECK_STATUS(GRADD_E_SHM, peer_send_fd(&peer, 1, 8192, segment.fd)); /* a lie about its size */
    CHECK_OK(peer_send_fd(&peer, 1, 4096, segment.fd));
    CHECK_STATUS(GRADD_E_SHM, peer_send_fd(&peer, 1, 4096, segment.fd)); /* the id is taken */
    for (uint64_t id = 2; id <= SESSION_MAX_SEGMENTS; id++) {
        gradd_segment_t more;
        CHECK_OK(gradd_segment_create("more", 4096, &more));
        CHECK_OK(peer_send_fd(&peer, id, 4096, more.fd));
        gradd_segment_finish(&more);
    }
    CHECK_OK(gradd_segment_create("one too many", 4096, &segment));
    CHECK_STATUS(GRADD_E_LIMIT, peer_send_fd(&peer, 1000, 4096, segment.fd));
    serve_good_client(daemon.dir);
    peer_close(&peer);
    peer_daemon_stop(&daemon);
}

/* ---- long steps ---- */

#define SLOW_N        512
#define SLOW_PRODUCTS 400
#define SLOW_BYTES    (3 * SLOW_N * SLOW_N * 4)

static void send_slow_step(peer_t *peer, uint64_t run) {
    wire_out_t *m = peer_request(peer, "forward");
    wire_key(m, "plan");
    wire_put_u64(m, 1);
    wire_key(m, "run");
    wire_put_u64(m, run);
    wire_key(m, "seed");
    wire_put_u64(m, 1);
    wire_key(m, "flags");
    wire_put_u64(m, 0);
    wire_key(m, "b");
    wire_put_u64(m, 1);
    peer_put_one(m, "in",
                 (peer_f32_t){
                     0, 2, {SLOW_N, SLOW_N},
                       0
    });
    peer_put_one(m, "out",
                 (peer_f32_t){
                     2 * SLOW_N * SLOW_N * 4, 2, {SLOW_N, SLOW_N},
                             0
    });
    peer_send(peer);
}

/* A session with a plan whose forward takes many seconds in hundreds of nodes. */
static void open_slow(peer_t *peer, const char *dir, int products) {
    peer_open(peer, dir, SLOW_BYTES);
    CHECK_OK(peer_plan_slow(peer, 1, SLOW_N, products));
    wire_out_t *m = peer_request(peer, "bind");
    wire_key(m, "bind");
    wire_put_u64(m, 1);
    peer_put_one(m, "tensors",
                 (peer_f32_t){
                     SLOW_N * SLOW_N * 4, 2, {SLOW_N, SLOW_N},
                           0
    });
    CHECK_OK(peer_call(peer));
}

static bool has_running(peer_t *peer) {
    peer_request(peer, "ps");
    CHECK_OK(peer_call(peer));
    const char *text = zmq_msg_data(&peer->reply);
    return memmem(text, zmq_msg_size(&peer->reply), "running", 7) != NULL;
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

TEST_LIMIT(client_killed_in_a_step, 60) {
    peer_daemon_t daemon;
    peer_t watch;
    int ends[2];
    pid_t worker;
    peer_daemon_start(&daemon, NULL);
    serve_good_client(daemon.dir);
    wait_for_sessions(&daemon, 0, 2000);
    usleep(100000); /* libzmq closes its side a little later */
    int fds = peer_daemon_fds(&daemon);
    CHECK(pipe(ends) == 0);
    pid_t child = fork();
    if (child == 0) {
        peer_t peer;
        open_slow(&peer, daemon.dir, 40 * SLOW_PRODUCTS);
        send_slow_step(&peer, 1);
        if ((worker = fork()) == 0) pause(); /* a data loader keeps every descriptor open */
        CHECK(write(ends[1], &worker, sizeof worker) == sizeof worker);
        pause();
    }
    CHECK(read(ends[0], &worker, sizeof worker) == sizeof worker);
    peer_connect(&watch, daemon.dir);
    for (int i = 0; !has_running(&watch); i++) {
        CHECK(i < 1000);
        usleep(5000);
    }
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    double start = now_s();
    wait_for_sessions(&daemon, 1, 3000); /* the watcher's own connection is left */
    CHECK(now_s() - start < 2.0);
    peer_close(&watch);
    kill(worker, SIGKILL);
    wait_for_fds(&daemon, fds);
    serve_good_client(daemon.dir);
    peer_daemon_stop(&daemon);
}

TEST_LIMIT(answers_while_the_engine_is_busy, 60) {
    peer_daemon_t daemon;
    peer_t slow, other;
    peer_daemon_start(&daemon, NULL);
    open_slow(&slow, daemon.dir, SLOW_PRODUCTS);
    send_slow_step(&slow, 1);
    peer_connect(&other, daemon.dir);
    double worst = 0;
    int answered = 0;
    while (!peer_pending(&slow, 1)) {
        double start = now_s();
        peer_request(&other, "ps");
        CHECK_OK(peer_call(&other));
        if (now_s() - start > worst) worst = now_s() - start;
        answered++;
    }
    CHECK_OK(peer_receive(&slow));
    CHECK(answered > 10);
    CHECK(worst < 1.0);
    peer_close(&other);
    peer_close(&slow);
    peer_daemon_stop(&daemon);
}

/* A request that is refused at once overtakes the one that runs; the reply of that one is kept all
 * the same, and asking for it meanwhile is no error. */
TEST_LIMIT(a_refusal_does_not_hide_an_earlier_reply, 60) {
    peer_daemon_t daemon;
    peer_t slow;
    peer_daemon_start(&daemon, NULL);
    open_slow(&slow, daemon.dir, SLOW_PRODUCTS / 4);
    send_slow_step(&slow, 1);
    peer_request(&slow, "forward");
    CHECK_STATUS(GRADD_E_TENSOR, peer_call(&slow));
    CHECK_ERROR_HAS("field 'plan' is missing");
    slow.q -= 2;
    send_slow_step(&slow, 1);
    CHECK_OK(peer_receive(&slow));
    CHECK(!peer_pending(&slow, 100)); /* one reply, although it was asked for twice */
    slow.q -= 1;
    send_slow_step(&slow, 1);
    CHECK_OK(peer_receive(&slow));
    peer_close(&slow);
    peer_daemon_stop(&daemon);
}

TEST_LIMIT(stop_finishes_the_request_in_progress, 60) {
    peer_daemon_t daemon;
    peer_t slow, other;
    peer_daemon_start(&daemon, NULL);
    open_slow(&slow, daemon.dir, SLOW_PRODUCTS / 4);
    send_slow_step(&slow, 1);
    peer_connect(&other, daemon.dir);
    while (!has_running(&other))
        usleep(1000);
    peer_request(&other, "stop");
    CHECK_OK(peer_call(&other));
    CHECK_OK(peer_receive(&slow));
    CHECK_EQ_INT(peer_daemon_wait(&daemon, 5000), 0);
    peer_daemon_clean(&daemon);
    peer_close(&other);
    peer_close(&slow);
}

/* Stopping ends idle sessions at once, leaves the one whose request runs its connection until the
 * reply, and tells clients that connect meanwhile to reconnect. */
TEST_LIMIT(stop_answers_clients_that_connect_meanwhile, 60) {
    peer_daemon_t daemon;
    peer_t slow, idle, late;
    peer_daemon_start(&daemon, NULL);
    open_slow(&slow, daemon.dir, SLOW_PRODUCTS);
    peer_open(&idle, daemon.dir, SMALL_BYTES);
    send_slow_step(&slow, 1);
    while (!has_running(&idle))
        usleep(1000);
    kill(daemon.pid, SIGTERM);
    struct pollfd fds[] = {
        {.fd = idle.control, .events = POLLIN},
        {.fd = slow.control, .events = POLLIN}
    };
    CHECK_EQ_INT(poll(fds, 1, 2000), 1);
    CHECK_EQ_INT(poll(fds + 1, 1, 50), 0);
    for (int i = 0; i < 3; i++) {
        peer_connect(&late, daemon.dir);
        CHECK_STATUS(GRADD_E_STALE, peer_hello(&late, 2, 2));
        CHECK_ERROR_HAS("is ending after the request in progress: connect again");
        if (i < 2) peer_close(&late); /* the last one stays and must not keep the daemon */
    }
    CHECK_OK(peer_receive(&slow));
    CHECK_EQ_INT(peer_daemon_wait(&daemon, 5000), 0);
    peer_daemon_clean(&daemon);
    peer_close(&late);
    peer_close(&idle);
    peer_close(&slow);
}

TEST_LIMIT(stop_now_cancels_the_request_in_progress, 60) {
    peer_daemon_t daemon;
    peer_t slow, other;
    peer_daemon_start(&daemon, NULL);
    open_slow(&slow, daemon.dir, 40 * SLOW_PRODUCTS);
    send_slow_step(&slow, 1);
    peer_connect(&other, daemon.dir);
    while (!has_running(&other))
        usleep(1000);
    wire_out_t *m = peer_request(&other, "stop");
    wire_key(m, "now");
    wire_put_u64(m, 1);
    CHECK_OK(peer_call(&other));
    CHECK_STATUS(GRADD_E_STALE, peer_receive(&slow));
    const msgpack_object_str *session = &peer_value(&slow, "session")->via.str;
    CHECK(session->size == 4 && memcmp(session->ptr, "lost", 4) == 0);
    CHECK_EQ_INT(peer_daemon_wait(&daemon, 3000), 0);
    peer_daemon_clean(&daemon);
    peer_close(&other);
    peer_close(&slow);
}

/* Sessions come and go; descriptors do not pile up. */
TEST_LIMIT(churn_leaks_nothing, 60) {
    peer_daemon_t daemon;
    int base = 0;
    peer_daemon_start(&daemon, NULL);
    for (int i = 0; i < 60; i++) {
        serve_good_client(daemon.dir);
        if (i != 5) continue;
        wait_for_sessions(&daemon, 0, 2000);
        usleep(100000); /* libzmq closes its side a little later */
        base = peer_daemon_fds(&daemon);
    }
    wait_for_fds(&daemon, base);
    peer_daemon_stop(&daemon);
}

TEST_LIMIT(a_flood_of_one_session_does_not_starve_another, 60) {
    peer_daemon_t daemon;
    peer_t slow, other;
    peer_daemon_start(&daemon, NULL);
    open_slow(&slow, daemon.dir, 10);
    for (uint64_t run = 1; run <= 20; run++)
        send_slow_step(&slow, run);
    peer_open(&other, daemon.dir, SMALL_BYTES);
    CHECK_OK(peer_plan_small(&other, 1, 2));
    int answered = 0;
    while (peer_pending(&slow, 0)) {
        CHECK_OK(peer_receive(&slow));
        answered++;
    }
    CHECK(answered < 18); /* the other one was served in between */
    for (; answered < 20; answered++)
        CHECK_OK(peer_receive(&slow));
    peer_close(&other);
    peer_close(&slow);
    peer_daemon_stop(&daemon);
}

/* Clients die at random moments of their life; a neighbour's results stay the same bits and the
 * daemon's descriptors return to what they were. */
TEST_LIMIT(clients_killed_at_random, 90) {
    peer_daemon_t daemon;
    peer_t peer;
    peer_daemon_start(&daemon, NULL);
    open_slow(&peer, daemon.dir, 3);
    float *x = peer_at(&peer, 0), *w = peer_at(&peer, SLOW_N * SLOW_N * 4);
    float *y = peer_at(&peer, 2 * SLOW_N * SLOW_N * 4), *first = malloc(SLOW_N * SLOW_N * 4);
    for (int i = 0; i < SLOW_N * SLOW_N; i++) {
        x[i] = (float)(draw() % 1000) / 1000;
        w[i] = (float)(draw() % 1000) / 100000;
    }
    send_slow_step(&peer, 1);
    CHECK_OK(peer_receive(&peer));
    memcpy(first, y, SLOW_N * SLOW_N * 4);
    usleep(100000);
    int fds = peer_daemon_fds(&daemon);
    for (int i = 0; i < 60; i++) {
        pid_t child = fork();
        if (child == 0) {
            peer_t victim;
            open_slow(&victim, daemon.dir, 30);
            for (uint64_t run = 1;; run++) {
                send_slow_step(&victim, run);
                if (run % 3 == 0) CHECK_OK(peer_receive(&victim));
            }
        }
        usleep(draw() % 60000);
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        if (i % 6) continue;
        memset(y, 0, SLOW_N * SLOW_N * 4);
        send_slow_step(&peer, 1);
        CHECK_OK(peer_receive(&peer));
        CHECK(memcmp(first, y, SLOW_N * SLOW_N * 4) == 0);
    }
    wait_for_sessions(&daemon, 1, 3000);
    wait_for_fds(&daemon, fds);
    free(first);
    peer_close(&peer);
    peer_daemon_stop(&daemon);
}
