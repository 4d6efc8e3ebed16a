/* A real daemon, spoken to as docs/protocol.md says: sessions, runs, errors, start and stop.
 *
 * Hostile and dying clients are in test_daemon_hostile.c.
 */
#include "server/session/session.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "server/host/machine.h"
#include "tests/c/peer.h"
#include "tests/test.h"

static void bind_one(peer_t *peer, uint64_t id, uint64_t offset, int64_t rows) {
    wire_out_t *m = peer_request(peer, "bind");
    wire_key(m, "bind");
    wire_put_u64(m, id);
    peer_put_one(m, "tensors",
                 (peer_f32_t){
                     offset, 2, {rows, 4},
                       0
    });
    CHECK_OK(peer_call(peer));
}

/* A session with the small model as plan 1 and w as binding 1, dw as binding 2. */
static void open_small(peer_t *peer, const char *dir, int64_t rows) {
    peer_open(peer, dir, SMALL_BYTES);
    CHECK_OK(peer_plan_small(peer, 1, rows));
    bind_one(peer, 1, AT_W, rows);
    bind_one(peer, 2, AT_DW, rows);
    float *x = peer_at(peer, AT_X), *w = peer_at(peer, AT_W);
    for (int i = 0; i < rows * 4; i++) {
        x[i] = (float)i;
        w[i] = (float)(2 * i + 1);
    }
    *(float *)peer_at(peer, AT_DLOSS) = 3;
}

static gradd_status_t backward(peer_t *peer, uint64_t run, int64_t rows, bool keep,
                               uint64_t dx_offset) {
    wire_out_t *m = peer_request(peer, "backward");
    wire_key(m, "run");
    wire_put_u64(m, run);
    wire_key(m, "go");
    peer_put_tensors(m, 1, &(peer_f32_t){AT_DLOSS, 0, {0}, 1}, true);
    wire_key(m, "b");
    wire_put_u64(m, 2);
    peer_put_one(m, "g",
                 (peer_f32_t){
                     dx_offset, 2, {rows, 4},
                       0
    });
    wire_key(m, "keep");
    wire_put_u64(m, keep);
    return peer_call(peer);
}

static const msgpack_object *field(const msgpack_object *map, const char *key) {
    for (uint32_t i = 0; i < map->via.map.size; i++) {
        const msgpack_object_kv *pair = &map->via.map.ptr[i];
        if (pair->key.via.str.size == strlen(key) &&
            memcmp(pair->key.via.str.ptr, key, strlen(key)) == 0)
            return &pair->val;
    }
    test_fail(__FILE__, __LINE__, "no '%s'", key);
}

/* A number of the first session in the reply to `ps`. */
static int64_t ps_number(peer_t *peer, const char *key) {
    peer_request(peer, "ps");
    CHECK_OK(peer_call(peer));
    const msgpack_object *sessions = peer_value(peer, "sessions");
    CHECK(wire_count(sessions) >= 1);
    return field(wire_at(sessions, 0), key)->via.i64;
}

TEST(forward_and_backward) {
    peer_daemon_t daemon;
    peer_t peer;
    peer_daemon_start(&daemon, NULL);
    open_small(&peer, daemon.dir, 3);
    peer_forward_small(&peer, 1, 7, 3);
    CHECK_OK(peer_call(&peer));
    float *y = peer_at(&peer, AT_Y), loss = 0;
    for (int i = 0; i < 12; i++) {
        CHECK_NEAR(y[i], i * (2 * i + 1), 0);
        loss += y[i];
    }
    CHECK_NEAR(*(float *)peer_at(&peer, AT_LOSS), loss, 0);
    CHECK_EQ_INT(ps_number(&peer, "runs"), 1);
    CHECK_OK(backward(&peer, 7, 3, true, AT_DX));
    CHECK_EQ_INT(wire_count(peer_value(&peer, "none")), 0);
    for (int i = 0; i < 12; i++) {
        CHECK_NEAR(((float *)peer_at(&peer, AT_DX))[i], 3 * (2 *i + 1), 0);
        CHECK_NEAR(((float *)peer_at(&peer, AT_DW))[i], 3 * i, 0);
    }
    CHECK_OK(backward(&peer, 7, 3, false, AT_DX));
    CHECK_EQ_INT(ps_number(&peer, "runs"), 0);
    CHECK_STATUS(GRADD_E_STALE, backward(&peer, 7, 3, false, AT_DX));
    CHECK_ERROR_HAS("run 7 is not known");
    peer_request(&peer, "detach");
    CHECK_OK(peer_call(&peer));
    peer_request(&peer, "detach");
    CHECK_STATUS(GRADD_E_SESSION, peer_call(&peer));
    peer_close(&peer);
    peer_daemon_stop(&daemon);
}

TEST(runs_are_released_with_any_request) {
    peer_daemon_t daemon;
    peer_t peer;
    peer_daemon_start(&daemon, NULL);
    open_small(&peer, daemon.dir, 2);
    for (uint64_t run = 1; run <= 3; run++) {
        peer_forward_small(&peer, 1, run, 2);
        CHECK_OK(peer_call(&peer));
    }
    CHECK_EQ_INT(ps_number(&peer, "runs"), 3);
    peer_forward_small(&peer, 1, 4, 2);
    wire_key(&peer.out, "rel");
    wire_put_list(&peer.out, 3);
    wire_put_u64(&peer.out, 1);
    wire_put_u64(&peer.out, 2);
    wire_put_u64(&peer.out, 99);
    CHECK_OK(peer_call(&peer));
    CHECK_EQ_INT(ps_number(&peer, "runs"), 2);
    peer_forward_small(&peer, 1, 4, 2); /* it replaces the open run of this id */
    CHECK_OK(peer_call(&peer));
    CHECK_EQ_INT(ps_number(&peer, "runs"), 2);
    wire_out_t *m = peer_request(&peer, "release");
    wire_key(m, "runs");
    wire_put_list(m, 2);
    wire_put_u64(m, 3);
    wire_put_u64(m, 4);
    CHECK_OK(peer_call(&peer));
    CHECK_EQ_INT(ps_number(&peer, "runs"), 0);
    CHECK_EQ_INT(ps_number(&peer, "arena_bytes"), 0);
    peer_close(&peer);
    peer_daemon_stop(&daemon);
}

TEST(second_client_finds_the_plan) {
    peer_daemon_t daemon;
    peer_t a, b;
    peer_daemon_start(&daemon, NULL);
    peer_open(&a, daemon.dir, SMALL_BYTES);
    peer_open(&b, daemon.dir, SMALL_BYTES);
    CHECK_OK(peer_plan_small(&a, 1, 5));
    CHECK_EQ_INT(peer_number(&a, "cached"), 0);
    CHECK_OK(peer_plan_small(&b, 9, 5));
    CHECK_EQ_INT(peer_number(&b, "cached"), 1);
    CHECK_OK(peer_plan_small(&b, 10, 6));
    CHECK_EQ_INT(peer_number(&b, "cached"), 0);
    peer_close(&a);
    bind_one(&b, 1, AT_W, 5);
    peer_forward_small(&b, 9, 1, 5);
    CHECK_OK(peer_call(&b));
    peer_close(&b);
    peer_daemon_stop(&daemon);
}

/* The small model's plan with these inputs said to be parameters. */
static int64_t cached_with(peer_t *peer, uint64_t plan, int n, const int *parameters) {
    wire_out_t *m = peer_ask_small(peer, plan, 5);
    wire_key(m, "parameters");
    wire_put_list(m, (uint32_t)n);
    for (int i = 0; i < n; i++)
        wire_put_i64(m, parameters[i]);
    wire_key(m, "device");
    wire_put_text(m, "cpu");
    CHECK_OK(peer_call(peer));
    return peer_number(peer, "cached");
}

TEST(plans_with_other_parameters_are_others) {
    peer_daemon_t daemon;
    peer_t peer;
    peer_daemon_start(&daemon, NULL);
    peer_open(&peer, daemon.dir, SMALL_BYTES);
    CHECK_OK(peer_plan_small(&peer, 1, 5));
    CHECK_EQ_INT(cached_with(&peer, 2, 0, NULL), 1); /* none are said, as before */
    CHECK_EQ_INT(cached_with(&peer, 3, 1, (int[]){1}), 0);
    CHECK_EQ_INT(cached_with(&peer, 4, 1, (int[]){1}), 1);
    CHECK_EQ_INT(cached_with(&peer, 5, 2, (int[]){1, 0}), 0);
    CHECK_EQ_INT(cached_with(&peer, 6, 2, (int[]){0, 1}), 1); /* a set, in whatever order */
    peer_close(&peer);
    peer_daemon_stop(&daemon);
}

TEST(segments_of_the_kind_and_device_there_is) {
    peer_daemon_t daemon;
    peer_t peer;
    gradd_segment_t segment;
    peer_daemon_start(&daemon, NULL);
    peer_connect(&peer, daemon.dir);
    CHECK_OK(peer_hello(&peer, 2, 2));
    for (uint64_t id = 1; id <= 3; id++) {
        wire_out_t *m = &peer.out;
        CHECK_OK(gradd_segment_create("test", 4096, &segment));
        wire_begin(m);
        wire_key(m, "v");
        wire_put_text(m, "segment");
        wire_key(m, "id");
        wire_put_u64(m, id);
        wire_key(m, "bytes");
        wire_put_u64(m, 4096);
        wire_key(m, "kind");
        if (id != 2) wire_put_text(m, "memfd");
        if (id == 2) wire_put_nil(m); /* as if it were missing */
        wire_key(m, "device");
        wire_put_text(m, id < 3 ? "cpu" : "GPU-1");
        const gradd_status_t st = peer_control(&peer, segment.fd);
        CHECK_STATUS(id < 3 ? GRADD_OK : GRADD_E_UNSUPPORTED, st);
        gradd_segment_finish(&segment);
    }
    CHECK_ERROR_HAS("no device 'GPU-1', only 'cpu'");
    peer_close(&peer);
    peer_daemon_stop(&daemon);
}

TEST(a_request_is_answered_once_more) {
    peer_daemon_t daemon;
    peer_t peer;
    peer_daemon_start(&daemon, NULL);
    open_small(&peer, daemon.dir, 2);
    peer_forward_small(&peer, 1, 1, 2);
    CHECK_OK(peer_call(&peer));
    /* Running a backward again would fail, because the run is used up; its reply comes again. */
    CHECK_OK(backward(&peer, 1, 2, false, AT_DX));
    peer.q -= 1;
    memset(peer_at(&peer, AT_DX), 0, 32);
    CHECK_OK(backward(&peer, 1, 2, false, AT_DX));
    CHECK_NEAR(((float *)peer_at(&peer, AT_DX))[1], 0, 0);
    CHECK_STATUS(GRADD_E_STALE, backward(&peer, 1, 2, false, AT_DX));
    peer.q -= 2;
    peer_request(&peer, "release"); /* the lower number, whatever it asks */
    CHECK_STATUS(GRADD_E_SESSION, peer_call(&peer));
    CHECK_ERROR_HAS("after request");
    peer.q += 1;
    peer_forward_small(&peer, 1, 1, 2);
    CHECK_OK(peer_call(&peer));
    char first[512];
    size_t n = zmq_msg_size(&peer.reply);
    memcpy(first, zmq_msg_data(&peer.reply), n);
    memset(peer_at(&peer, AT_Y), 0, 32);
    peer.q -= 1;
    peer_forward_small(&peer, 1, 1, 2);
    CHECK_OK(peer_call(&peer));
    CHECK_EQ_INT(zmq_msg_size(&peer.reply), n);
    CHECK(memcmp(first, zmq_msg_data(&peer.reply), n) == 0);
    CHECK_NEAR(((float *)peer_at(&peer, AT_Y))[1], 0, 0); /* it did not run again */
    peer_close(&peer);
    peer_daemon_stop(&daemon);
}

static gradd_status_t forward_with(peer_t *peer, uint64_t x, int64_t columns, uint64_t y,
                                   uint64_t loss) {
    wire_out_t *m = peer_request(peer, "forward");
    wire_key(m, "plan");
    wire_put_u64(m, 1);
    wire_key(m, "run");
    wire_put_u64(m, 1);
    wire_key(m, "seed");
    wire_put_u64(m, 1);
    wire_key(m, "flags");
    wire_put_u64(m, 0);
    wire_key(m, "b");
    wire_put_u64(m, 1);
    peer_put_one(m, "in",
                 (peer_f32_t){
                     x, 2, {2, columns},
                       0
    });
    wire_key(m, "out");
    const peer_f32_t out[] = {
        {y,    2, {2, 4}, 0},
        {loss, 0, {0},    0}
    };
    peer_put_tensors(m, 2, out, false);
    return peer_call(peer);
}

TEST(tensors_are_checked_before_anything_runs) {
    peer_daemon_t daemon;
    peer_t peer;
    peer_daemon_start(&daemon, NULL);
    open_small(&peer, daemon.dir, 2);
    CHECK_STATUS(GRADD_E_TENSOR, forward_with(&peer, AT_X, 5, AT_Y, AT_LOSS));
    CHECK_ERROR_HAS("input 0 'x': expected f32[2,4], got f32[2,5]");
    CHECK_STATUS(GRADD_E_TENSOR, forward_with(&peer, AT_X + 4, 4, AT_Y, AT_LOSS));
    CHECK_STATUS(GRADD_E_TENSOR, forward_with(&peer, SMALL_BYTES, 4, AT_Y, AT_LOSS));
    CHECK_STATUS(GRADD_E_TENSOR, forward_with(&peer, UINT64_MAX - 63, 4, AT_Y, AT_LOSS));
    CHECK_STATUS(GRADD_E_TENSOR, forward_with(&peer, AT_X, 4, AT_Y, AT_Y));
    CHECK_ERROR_HAS("output 0 and output 1 share memory");
    CHECK_STATUS(GRADD_E_TENSOR, forward_with(&peer, AT_X, 4, AT_X, AT_LOSS));
    CHECK_ERROR_HAS("output 0 and input 0 share memory");
    CHECK_STATUS(GRADD_E_TENSOR, forward_with(&peer, AT_X, 4, AT_Y, AT_W));
    CHECK_ERROR_HAS("bound input 0 share memory");
    CHECK_EQ_INT(ps_number(&peer, "runs"), 0);
    CHECK_OK(forward_with(&peer, AT_X, 4, AT_Y, AT_LOSS));
    CHECK_STATUS(GRADD_E_TENSOR, backward(&peer, 1, 2, true, AT_DW));
    CHECK_ERROR_HAS("share memory");
    CHECK_STATUS(GRADD_E_TENSOR, backward(&peer, 1, 2, true, AT_W));
    CHECK_STATUS(GRADD_E_TENSOR, backward(&peer, 1, 2, true, AT_X));
    CHECK_STATUS(GRADD_E_TENSOR, backward(&peer, 1, 3, true, AT_DX));
    CHECK_ERROR_HAS("gradient 0 'x': expected f32[2,4], got f32[3,4]");
    CHECK_OK(backward(&peer, 1, 2, false, AT_DX));
    peer_close(&peer);
    peer_daemon_stop(&daemon);
}

TEST(fields_and_verbs_are_checked) {
    peer_daemon_t daemon;
    peer_t peer;
    peer_daemon_start(&daemon, NULL);
    open_small(&peer, daemon.dir, 2);
    peer_request(&peer, "forward");
    CHECK_STATUS(GRADD_E_TENSOR, peer_call(&peer));
    CHECK_ERROR_HAS("forward: field 'plan' is missing, expected an unsigned integer");
    peer_request(&peer, "fly");
    CHECK_STATUS(GRADD_E_UNSUPPORTED, peer_call(&peer));
    CHECK_ERROR_HAS("unknown verb 'fly'");
    wire_out_t *m = peer_request(&peer, "unbind");
    wire_key(m, "bind");
    wire_put_text(m, "one");
    CHECK_STATUS(GRADD_E_TENSOR, peer_call(&peer));
    CHECK_ERROR_HAS("unbind: field 'bind': expected an unsigned integer, got a text");
    peer_request(&peer, "graph.put");
    CHECK_STATUS(GRADD_E_MODEL, peer_call_with(&peer, "\xff\xff\xff", 3));
    peer_request(&peer, "graph.put");
    CHECK_STATUS(GRADD_E_MODEL, peer_call(&peer));
    CHECK_ERROR_HAS("no ONNX bytes");
    peer_forward_small(&peer, 5, 1, 2);
    CHECK_STATUS(GRADD_E_STALE, peer_call(&peer));
    CHECK_ERROR_HAS("plan 5 is not known");
    peer_close(&peer);
    peer_daemon_stop(&daemon);
}

TEST(segments_in_use_stay) {
    peer_daemon_t daemon;
    peer_t peer;
    peer_daemon_start(&daemon, NULL);
    open_small(&peer, daemon.dir, 2);
    for (int i = 0; i < 2; i++) {
        wire_out_t *m = &peer.out;
        wire_begin(m);
        wire_key(m, "v");
        wire_put_text(m, "unsegment");
        wire_key(m, "id");
        wire_put_u64(m, 1);
        if (i == 1) {
            CHECK_OK(peer_control(&peer, -1));
            break;
        }
        CHECK_STATUS(GRADD_E_STALE, peer_control(&peer, -1));
        for (uint64_t id = 1; id <= 2; id++) {
            m = peer_request(&peer, "unbind");
            wire_key(m, "bind");
            wire_put_u64(m, id);
            CHECK_OK(peer_call(&peer));
        }
    }
    peer_close(&peer);
    peer_daemon_stop(&daemon);
}

TEST(newer_and_older_protocols) {
    peer_daemon_t daemon;
    peer_t peer;
    peer_daemon_start(&daemon, NULL);
    peer_connect(&peer, daemon.dir);
    CHECK_STATUS(GRADD_E_VERSION, peer_hello(&peer, 3, 5));
    CHECK_ERROR_HAS("speaks protocols 3 to 5, this daemon, gradd ");
    CHECK_ERROR_HAS("protocol 2: the daemon is the older one");
    CHECK_STATUS(GRADD_E_VERSION, peer_hello(&peer, 1, 1));
    CHECK_ERROR_HAS("protocol 2: the client is the older one");
    CHECK_EQ_INT(wire_u64(wire_at(peer_value(&peer, "proto"), 0)), 2);
    CHECK_STATUS(GRADD_E_SESSION, peer_attach(&peer)); /* there was no nonce */
    CHECK_OK(peer_hello(&peer, 0, 9));
    CHECK_EQ_INT(peer_number(&peer, "proto"), 2);
    CHECK_OK(peer_attach(&peer));
    peer_close(&peer);
    peer_daemon_stop(&daemon);
}

TEST(one_daemon_per_directory) {
    peer_daemon_t daemon;
    peer_t peer;
    char text[4096];
    peer_daemon_start(&daemon, NULL);
    CHECK_EQ_INT(peer_daemon_again(&daemon), 4);
    peer_open(&peer, daemon.dir, SMALL_BYTES); /* the first one is untouched */
    CHECK_EQ_INT(peer_command(&daemon, "ps", text, sizeof text), 0);
    CHECK(strstr(text, "SESSION") && strstr(text, "c-test") && strstr(text, "idle"));
    peer_close(&peer);
    CHECK_EQ_INT(peer_command(&daemon, "stop", text, sizeof text), 0);
    CHECK_EQ_INT(peer_daemon_wait(&daemon, 1000), 0);
    CHECK_EQ_INT(peer_command(&daemon, "ps", text, sizeof text), 3);
    CHECK_EQ_INT(peer_command(&daemon, "stop", text, sizeof text), 3);
    peer_daemon_clean(&daemon);
}

/* kill -9 leaves both sockets behind; the next daemon replaces them. */
TEST(stale_sockets_are_replaced) {
    peer_daemon_t daemon;
    peer_t peer;
    char text[256];
    peer_daemon_start(&daemon, NULL);
    kill(daemon.pid, SIGKILL);
    CHECK_EQ_INT(peer_daemon_wait(&daemon, 5000), 128 + SIGKILL);
    CHECK_EQ_INT(peer_command(&daemon, "ps", text, sizeof text), 3);
    for (int i = 0; i < 3; i++) {
        peer_daemon_restart(&daemon);
        peer_open(&peer, daemon.dir, SMALL_BYTES);
        peer_close(&peer);
        kill(daemon.pid, SIGKILL);
        peer_daemon_wait(&daemon, 5000);
    }
    peer_daemon_clean(&daemon);
}

TEST(directory_must_be_ours_alone) {
    peer_daemon_t daemon = {.dir = "/tmp/gradd-test-XXXXXX"};
    char text[256], link[96];
    CHECK(mkdtemp(daemon.dir) != NULL);
    CHECK(chmod(daemon.dir, 0755) == 0);
    CHECK_EQ_INT(peer_command(&daemon, "serve", text, sizeof text), 1);
    CHECK(chmod(daemon.dir, 0700) == 0);
    snprintf(link, sizeof link, "%s-link", daemon.dir);
    CHECK(symlink(daemon.dir, link) == 0);
    peer_daemon_t other = {0};
    snprintf(other.dir, sizeof other.dir, "%.60s", link);
    CHECK_EQ_INT(peer_command(&other, "serve", text, sizeof text), 1);
    unlink(link);
    rmdir(daemon.dir);
}

static void move_away(peer_daemon_t *daemon, peer_daemon_t *moved) {
    *moved = *daemon;
    strcat(moved->dir, "-old");
    CHECK(rename(daemon->dir, moved->dir) == 0);
}

/* The end of a login removes the directory of sockets; the daemon of a trainer that goes on meets
 * the one of the next login, and must leave its sockets alone. */
TEST(an_old_daemon_leaves_the_sockets_of_a_new_one) {
    peer_daemon_t old, moved, new;
    peer_t peer;
    char text[4096];
    peer_daemon_start(&old, NULL);
    peer_open(&peer, old.dir, SMALL_BYTES);
    move_away(&old, &moved);
    new = old;
    peer_daemon_restart(&new);
    kill(old.pid, SIGTERM);
    CHECK_EQ_INT(peer_daemon_wait(&old, PEER_WAIT_MS), 0);
    CHECK_EQ_INT(peer_command(&new, "ps", text, sizeof text), 0);
    peer_close(&peer);
    peer_open(&peer, new.dir, SMALL_BYTES);
    peer_close(&peer);
    peer_daemon_stop(&new);
    snprintf(text, sizeof text, "%s/ctl.sock", moved.dir);
    CHECK(access(text, F_OK) != 0);
    peer_daemon_clean(&moved);
}

TEST(an_unreachable_daemon_ends) {
    peer_daemon_t daemon, moved;
    peer_daemon_start(&daemon, NULL);
    move_away(&daemon, &moved);
    CHECK_EQ_INT(peer_daemon_wait(&daemon, 5000), 0);
    peer_daemon_clean(&moved);
}

/* The process that starts it may be pinned; the daemon serves others as well. */
TEST(an_inherited_processor_mask_stays_with_threads_only) {
    peer_daemon_t daemon;
    peer_t peer;
    cpu_set_t all, one;
    machine_unpin();
    CHECK(sched_getaffinity(0, sizeof all, &all) == 0);
    if (CPU_COUNT(&all) < 2) test_skip("one processor");
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    for (int given = 0; given < 2; given++) {
        cpu_set_t mask;
        const char *const threads[] = {"--threads", given ? "1" : "0", NULL};
        peer_daemon_start(&daemon, threads);
        peer_connect(&peer, daemon.dir);
        peer_request(&peer, "ps");
        CHECK_OK(peer_call(&peer));
        CHECK_EQ_INT(peer_number(&peer, "threads"), given ? 1 : CPU_COUNT(&all));
        CHECK(sched_getaffinity(daemon.pid, sizeof mask, &mask) == 0);
        CHECK(CPU_EQUAL(&mask, given ? &one : &all));
        peer_close(&peer);
        peer_daemon_stop(&daemon);
    }
}

/* A plan's id is any number; the client of `gradd explain` asks for page after page by it. */
TEST(large_plan_ids_are_explained) {
    peer_daemon_t daemon;
    peer_t peer;
    char text[16384];
    const uint64_t id = (UINT64_C(1) << 63) + 5;
    peer_daemon_start(&daemon, NULL);
    peer_open(&peer, daemon.dir, SMALL_BYTES);
    CHECK_OK(peer_plan_small(&peer, id, 2));
    wire_out_t *m = peer_request(&peer, "explain");
    wire_key(m, "proto");
    wire_put_u64(m, 2);
    wire_key(m, "plan");
    wire_put_u64(m, id);
    CHECK_OK(peer_call(&peer));
    CHECK(peer_value(&peer, "plan")->type == MSGPACK_OBJECT_POSITIVE_INTEGER);
    CHECK(peer_value(&peer, "plan")->via.u64 == id);
    CHECK_EQ_INT(peer_command(&daemon, "explain", text, sizeof text), 0);
    CHECK(strstr(text, "plan 9223372036854775813") != NULL);
    peer_close(&peer);
    peer_daemon_stop(&daemon);
}

TEST(idle_daemon_ends) {
    peer_daemon_t daemon;
    peer_t peer;
    peer_daemon_start(&daemon, (const char *const[]){"--foreground", "--idle-exit", "1", NULL});
    peer_open(&peer, daemon.dir, SMALL_BYTES);
    usleep(1800000); /* a session, even without requests, keeps it */
    peer_request(&peer, "ps");
    CHECK_OK(peer_call(&peer));
    peer_close(&peer);
    CHECK_EQ_INT(peer_daemon_wait(&daemon, 5000), 0);
    peer_daemon_clean(&daemon);
}
