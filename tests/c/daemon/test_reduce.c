/* Verbs reduce.* and the field 'reduce' of backward, with a daemon on the emulated GPU and the
 * stand-in for NCCL. Two sessions of one daemon are two ranks: each waits for the other, so neither
 * could go on if the engine thread waited for one. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/c/peer.h"
#include "tests/test.h"

enum { ROWS = 4, N = ROWS * 4, ID_BYTES = 128, LIMIT_MS = 8000 };

typedef struct join_s {
    uint64_t communicator, rank, ranks, limit_ms;
    size_t id_bytes;
} join_t;

static uint8_t id[ID_BYTES];

/* The daemon of the tests lies beside this program. */
static void start_daemon(peer_daemon_t *daemon) {
    static const char *const emulated[] = {"--device", "emu", "--require-device", NULL};
    char own[PATH_MAX - 32], path[PATH_MAX];
    const ssize_t n = readlink("/proc/self/exe", own, sizeof own - 1);
    CHECK(n > 0);
    own[n] = 0;
    *strrchr(own, '/') = 0;
    snprintf(path, sizeof path, "%s/gradd-fake", own);
    if (access(path, X_OK) != 0) test_skip("%s is not built", path);
    setenv("GRADD_BIN", path, 1);
    snprintf(path, sizeof path, "%s/../lib/libnccl_sim.so", own);
    setenv("GRADD_NCCL", path, 1);
    peer_daemon_start(daemon, emulated);
}

static gradd_status_t make_id(peer_t *peer) {
    peer_request(peer, "reduce.id");
    GRADD_TRY(peer_call(peer));
    const msgpack_object *found = peer_value(peer, "id");
    CHECK_EQ_INT(found->via.bin.size, ID_BYTES);
    memcpy(id, found->via.bin.ptr, ID_BYTES);
    return GRADD_OK;
}

static void ask_to_join(peer_t *peer, const join_t *join) {
    wire_out_t *m = peer_request(peer, "reduce.join");
    wire_key(m, "communicator");
    wire_put_u64(m, join->communicator);
    wire_key(m, "id");
    wire_put_bytes(m, id, join->id_bytes);
    wire_key(m, "rank");
    wire_put_u64(m, join->rank);
    wire_key(m, "ranks");
    wire_put_u64(m, join->ranks);
    wire_key(m, "limit_ms");
    wire_put_u64(m, join->limit_ms);
}

static void bind_one(peer_t *peer, uint64_t binding, uint64_t offset) {
    wire_out_t *m = peer_request(peer, "bind");
    wire_key(m, "bind");
    wire_put_u64(m, binding);
    peer_put_one(m, "tensors",
                 (peer_f32_t){
                     offset, 2, {ROWS, 4},
                       0
    });
    CHECK_OK(peer_call(peer));
}

/* The small model with w as a parameter, and a forward of it: the gradient of w is x * scale. */
static void open_small(peer_t *peer, const char *dir, float scale) {
    peer_open(peer, dir, SMALL_BYTES);
    wire_out_t *m = peer_ask_small(peer, 1, ROWS);
    wire_key(m, "parameters");
    wire_put_list(m, 1);
    wire_put_text(m, "w");
    CHECK_OK(peer_call(peer));
    bind_one(peer, 1, AT_W);
    bind_one(peer, 2, AT_DW);
    float *x = peer_at(peer, AT_X), *w = peer_at(peer, AT_W);
    for (int i = 0; i < N; i++)
        x[i] = (float)i, w[i] = 2;
    *(float *)peer_at(peer, AT_DLOSS) = scale;
    peer_forward_small(peer, 1, 1, ROWS);
    CHECK_OK(peer_call(peer));
}

static wire_out_t *ask_backward(peer_t *peer, uint64_t communicator) {
    wire_out_t *m = peer_request(peer, "backward");
    wire_key(m, "run");
    wire_put_u64(m, 1);
    wire_key(m, "go");
    peer_put_tensors(m, 1, &(peer_f32_t){AT_DLOSS, 0, {0}, 1}, true);
    wire_key(m, "b");
    wire_put_u64(m, 2);
    peer_put_one(m, "g",
                 (peer_f32_t){
                     AT_DX, 2, {ROWS, 4},
                       0
    });
    wire_key(m, "reduce");
    wire_put_u64(m, communicator);
    return m;
}

static void check_gradients(const peer_t *peer, float dw, float dx) {
    const float *w = peer_at(peer, AT_DW), *x = peer_at(peer, AT_DX);
    for (int i = 0; i < N; i++) {
        CHECK(w[i] == dw * (float)i);
        CHECK(x[i] == dx);
    }
}

static void close_all(peer_daemon_t *daemon, peer_t *one, peer_t *other) {
    peer_close(one);
    if (other) peer_close(other);
    peer_daemon_stop(daemon);
}

/* A daemon, and its client as the one rank of communicator 7. */
static void begin_alone(peer_daemon_t *daemon, peer_t *peer, float scale) {
    start_daemon(daemon);
    open_small(peer, daemon->dir, scale);
    CHECK_OK(make_id(peer));
    ask_to_join(peer, &(join_t){7, 0, 1, LIMIT_MS, ID_BYTES});
    CHECK_OK(peer_call(peer));
}

TEST(one_rank_has_its_own_gradient) {
    peer_daemon_t daemon;
    peer_t peer;
    begin_alone(&daemon, &peer, 3);
    ask_backward(&peer, 7);
    CHECK_OK(peer_call(&peer));
    CHECK_EQ_INT(wire_count(peer_value(&peer, "none")), 0);
    CHECK(peer_value(&peer, "us"));
    check_gradients(&peer, 3, 6);
    close_all(&daemon, &peer, NULL);
}

static void join_two(peer_t *one, peer_t *other, uint64_t limit_ms) {
    CHECK_OK(make_id(one));
    ask_to_join(one, &(join_t){7, 0, 2, limit_ms, ID_BYTES});
    peer_send(one);
    ask_to_join(other, &(join_t){3, 1, 2, limit_ms, ID_BYTES});
    CHECK_OK(peer_call(other));
    CHECK_OK(peer_receive(one));
}

/* The gradients of inputs stay as they are. */
TEST(two_sessions_have_the_mean) {
    peer_daemon_t daemon;
    peer_t one, other;
    start_daemon(&daemon);
    open_small(&one, daemon.dir, 3);
    open_small(&other, daemon.dir, 5);
    join_two(&one, &other, LIMIT_MS);
    ask_backward(&one, 7);
    peer_send(&one);
    CHECK(!peer_pending(&one, 50));
    ask_backward(&other, 3);
    CHECK_OK(peer_call(&other));
    CHECK_OK(peer_receive(&one));
    check_gradients(&one, 4, 6);
    check_gradients(&other, 4, 10);
    close_all(&daemon, &one, &other);
}

/* One waits for a rank that never comes; the other is served meanwhile. */
TEST(a_session_that_waits_lets_others_go_on) {
    peer_daemon_t daemon;
    peer_t one, other;
    start_daemon(&daemon);
    peer_open(&one, daemon.dir, SMALL_BYTES);
    CHECK_OK(make_id(&one));
    ask_to_join(&one, &(join_t){7, 0, 2, 60000, ID_BYTES});
    peer_send(&one);
    open_small(&other, daemon.dir, 1);
    CHECK(!peer_pending(&one, 1));
    close_all(&daemon, &one, &other); /* nothing keeps the daemon from ending, either */
}

TEST(a_daemon_stops_while_a_session_waits) {
    peer_daemon_t daemon;
    peer_t one, other;
    start_daemon(&daemon);
    open_small(&one, daemon.dir, 3);
    open_small(&other, daemon.dir, 5);
    join_two(&one, &other, 60000);
    ask_backward(&one, 7);
    peer_send(&one);
    CHECK(!peer_pending(&one, 50));
    peer_daemon_stop(&daemon);
    peer_close(&one);
    peer_close(&other);
}

TEST(a_rank_that_has_ended_fails_the_other) {
    peer_daemon_t daemon;
    peer_t one, other;
    start_daemon(&daemon);
    open_small(&one, daemon.dir, 3);
    open_small(&other, daemon.dir, 5);
    join_two(&one, &other, 300);
    peer_close(&other);
    ask_backward(&one, 7);
    CHECK_STATUS(GRADD_E_PEER, peer_call(&one));
    CHECK_ERROR_HAS("backward: communicator 7: rank 0 of 2 has waited 300 ms");
    peer_forward_small(&one, 1, 1, ROWS);
    CHECK_OK(peer_call(&one));
    ask_backward(&one, 7);
    CHECK_STATUS(GRADD_E_PEER, peer_call(&one));
    CHECK_ERROR_HAS("communicator 7 has failed before: rank 0 of 2 has waited");
    close_all(&daemon, &one, NULL);
}

static void check_join_refused(peer_t *peer, join_t join, gradd_status_t code, const char *what) {
    ask_to_join(peer, &join);
    CHECK_STATUS(code, peer_call(peer));
    CHECK_ERROR_HAS(what);
}

TEST(bad_input_is_refused_by_name) {
    peer_daemon_t daemon;
    peer_t peer;
    start_daemon(&daemon);
    open_small(&peer, daemon.dir, 1);
    CHECK_OK(make_id(&peer));
    const struct {
        join_t join;
        gradd_status_t code;
        const char *what;
    } rows[] = {
        {{1, 0, 1, 100, 100},           GRADD_E_TENSOR, "field 'id': 100 bytes, expected 128"       },
        {{1, 0, 1, 100, 0},             GRADD_E_TENSOR, "field 'id': 0 bytes"                       },
        {{1, 0, 0, 100, ID_BYTES},      GRADD_E_LIMIT,  "field 'ranks': 0, expected 1 to 1024"      },
        {{1, 0, 1025, 100, ID_BYTES},   GRADD_E_LIMIT,  "field 'ranks': 1025"                       },
        {{1, 2, 2, 100, ID_BYTES},      GRADD_E_TENSOR, "field 'rank': 2 of 2 ranks"                },
        {{1, 1ull << 40, 2, 1, 128},    GRADD_E_TENSOR, "field 'rank': 1099511627776 of 2 ranks"    },
        {{1, 0, 1, 0, ID_BYTES},        GRADD_E_LIMIT,  "field 'limit_ms': 0"                       },
        {{1, 0, 1, 86400001, ID_BYTES}, GRADD_E_LIMIT,  "field 'limit_ms': 86400001"                },
        {{1, 0, 2, 200, ID_BYTES},      GRADD_E_PEER,   "reduce.join: rank 0 of 2 has waited 200 ms"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        check_join_refused(&peer, rows[i].join, rows[i].code, rows[i].what);
    memset(id, 'x', ID_BYTES);
    check_join_refused(&peer, (join_t){1, 0, 1, 100, ID_BYTES}, GRADD_E_PEER, "invalid argument");
    ask_backward(&peer, 1);
    CHECK_STATUS(GRADD_E_STALE, peer_call(&peer));
    CHECK_ERROR_HAS("communicator 1 is not known");
    for (uint64_t k = 1; k <= 16; k++) {
        CHECK_OK(make_id(&peer));
        ask_to_join(&peer, &(join_t){k, 0, 1, LIMIT_MS, ID_BYTES});
        CHECK_OK(peer_call(&peer));
    }
    CHECK_OK(make_id(&peer));
    check_join_refused(&peer, (join_t){16, 0, 1, 100, ID_BYTES}, GRADD_E_TENSOR, "16 exists");
    check_join_refused(&peer, (join_t){17, 0, 1, 100, ID_BYTES}, GRADD_E_LIMIT,
                       "16 communicators, the limit");
    close_all(&daemon, &peer, NULL);
}

static gradd_status_t leave(peer_t *peer, uint64_t communicator) {
    wire_out_t *m = peer_request(peer, "reduce.leave");
    wire_key(m, "communicator");
    wire_put_u64(m, communicator);
    return peer_call(peer);
}

TEST(a_communicator_that_was_left_is_not_known) {
    peer_daemon_t daemon;
    peer_t peer;
    begin_alone(&daemon, &peer, 1);
    CHECK_OK(leave(&peer, 7));
    CHECK_OK(leave(&peer, 7));
    ask_backward(&peer, 7);
    CHECK_STATUS(GRADD_E_STALE, peer_call(&peer));
    close_all(&daemon, &peer, NULL);
}

TEST(groups_are_not_skipped_in_a_backward_that_averages) {
    peer_daemon_t daemon;
    peer_t peer;
    begin_alone(&daemon, &peer, 1);
    wire_out_t *m = ask_backward(&peer, 7);
    wire_key(m, "groups");
    wire_put_list(m, 2);
    wire_put_u64(m, 0), wire_put_u64(m, 1);
    wire_key(m, "skip");
    wire_put_u64(m, 1);
    CHECK_STATUS(GRADD_E_TENSOR, peer_call(&peer));
    CHECK_ERROR_HAS("field 'skip' with 'reduce'");
    /* without a turn the groups say only what is averaged together */
    m = ask_backward(&peer, 7);
    wire_key(m, "groups");
    wire_put_list(m, 2);
    wire_put_u64(m, 0), wire_put_u64(m, 1);
    CHECK_OK(peer_call(&peer));
    check_gradients(&peer, 1, 2);
    close_all(&daemon, &peer, NULL);
}

TEST(the_cpu_names_what_serves) {
    peer_daemon_t daemon;
    peer_t peer;
    peer_daemon_start(&daemon, NULL);
    peer_open(&peer, daemon.dir, SMALL_BYTES);
    CHECK_STATUS(GRADD_E_UNSUPPORTED, make_id(&peer));
    CHECK_ERROR_HAS("reduce.id: device 'cpu' averages no gradients over processes");
    close_all(&daemon, &peer, NULL);
}
