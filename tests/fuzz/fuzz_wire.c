/* libFuzzer target: any envelopes through scanner, decoder, field checks and the engine's verbs.
 *
 * An input is a row of envelopes, each after two bytes of length. They run against a real worker
 * and a session that has a segment, a plan and two bindings, as a daemon would run them, but in one
 * thread and without sockets. Checked beside crashes: a failure has a message, every reply can be
 * decoded, and when the session ends nothing of it is left. `make fuzz` builds and runs it; with
 * GRADD_FUZZ_SEEDS=<folder> set it writes its seeds there and ends.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/device/device.h"
#include "server/verbs/worker.h"
#include "server/wire/version.h"
#include "tests/c/onnx_build.h"
#include "tests/fuzz/target.h"

#define SEGMENT_BYTES 8192
#define MAX_ENVELOPES 12
static worker_t worker = {.root = ""};
static session_table_t table;
static session_t *session;
static uint8_t *onnx;
static size_t onnx_bytes;
static uint8_t graph_id[GRADD_SHA256_BYTES];

static gradd_segment_t segment;

static void add_segment(void) {
    REQUIRE(gradd_lease_add(session->lease, 1, dup(segment.fd), SEGMENT_BYTES, NULL) == GRADD_OK);
}

static void make_session(void) {
    int ends[2];
    const uint8_t token[SESSION_KEY_BYTES] = {0};
    gradd_peer_t peer;
    REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) == 0);
    REQUIRE(gradd_peer_identify(ends[0], 0, GRADD_LEASE_AUTO, &peer) == GRADD_OK);
    REQUIRE(session_create(&table, 1, token, ends[0], &peer, &session) == GRADD_OK);
    REQUIRE(gradd_segment_create("fuzz", SEGMENT_BYTES, &segment) == GRADD_OK);
    add_segment();
}

/* y = x * w, loss = ReduceSum(y) */
static void make_model(void) {
    Onnx__ModelProto *model = build_model();
    build_input(model, "x", GRADD_DT_F32, 2, BUILD_DIMS(-1, 4));
    build_input(model, "w", GRADD_DT_F32, 2, BUILD_DIMS(-1, 4));
    build_node(model, "Mul", "multiply", "x,w", "y");
    build_attr_int(build_node(model, "ReduceSum", "sum", "y", "loss"), "keepdims", 0);
    build_output(model, "y");
    build_output(model, "loss");
    onnx = build_pack(model, &onnx_bytes);
    gradd_sha256_t hash;
    gradd_sha256_init(&hash);
    gradd_sha256_update(&hash, onnx, onnx_bytes);
    gradd_sha256_final(&hash, graph_id);
}

/* Runs one envelope as requests.c and objects.c do. */
static gradd_status_t run(const void *data, size_t n, bool with_model) {
    request_t *request = request_create();
    REQUIRE(request && zmq_msg_init_size(&request->envelope, n) == 0);
    memcpy(zmq_msg_data(&request->envelope), data, n);
    if (with_model) {
        REQUIRE(zmq_msg_init_size(&request->payloads[0], onnx_bytes) == 0);
        memcpy(zmq_msg_data(&request->payloads[0]), onnx, onnx_bytes);
        request->n_payloads = 1;
    }
    request->session = session;
    gradd_status_t st = wire_decode(zmq_msg_data(&request->envelope), n, &request->doc);
    if (st == GRADD_OK) {
        const msgpack_object *verb = wire_get(&request->doc, "v");
        if (verb && verb->type == MSGPACK_OBJECT_STR)
            request->command = command_find(verb->via.str.ptr, verb->via.str.size);
        if (request->command) st = command_match(request);
    }
    if (st == GRADD_OK && request->command && request->command->handle) {
        wire_doc_t reply;
        worker_handle(&worker, request);
        st = request->status;
        REQUIRE(wire_decode_any(request->reply.data, request->reply.bytes, WIRE_MAX_ITEMS,
                                &reply) == GRADD_OK);
        wire_doc_finish(&reply);
    }
    REQUIRE(st == GRADD_OK || gradd_error_message()[0]);
    request_destroy(request);
    return st;
}

/* ---- seeds: a session's ordinary life ---- */

typedef struct fuzz_place_s {
    uint64_t offset;
    int64_t rows; /* of 4; 0 = a scalar */
    int at;
} fuzz_place_t;

static void put_column(wire_out_t *m, const char *key, int n) {
    wire_put_text(m, key);
    wire_put_list(m, (uint32_t)n);
}

/* A field of n tensors of f32 in segment 1. */
static void put_tensors(wire_out_t *m, const char *field, int n, const fuzz_place_t *places,
                        bool with_at) {
    wire_key(m, field);
    wire_put_map(m, with_at ? 5 : 4);
    put_column(m, "segments", n);
    for (int i = 0; i < n; i++)
        wire_put_u64(m, 1);
    put_column(m, "offsets", n);
    for (int i = 0; i < n; i++)
        wire_put_u64(m, places[i].offset);
    put_column(m, "dtypes", n);
    for (int i = 0; i < n; i++)
        wire_put_u64(m, GRADD_DT_F32);
    put_column(m, "dims", n);
    for (int i = 0; i < n; i++) {
        gradd_type_t type = {
            .rank = places[i].rows ? 2 : 0, .dims = {places[i].rows, 4}
        };
        wire_put_dims(m, &type);
    }
    if (with_at) put_column(m, "at", n);
    for (int i = 0; i < n && with_at; i++)
        wire_put_i64(m, places[i].at);
}

static void put_numbers(wire_out_t *m, const char *key, int n, const int *numbers) {
    wire_key(m, key);
    wire_put_list(m, (uint32_t)n);
    for (int i = 0; i < n; i++)
        wire_put_i64(m, numbers[i]);
}

static void begin(wire_out_t *m, const char *verb) {
    wire_begin(m);
    wire_key(m, "v");
    wire_put_text(m, verb);
}

static void key_u64(wire_out_t *m, const char *key, uint64_t value) {
    wire_key(m, key);
    wire_put_u64(m, value);
}

static void make_plan(wire_out_t *m, uint64_t plan) {
    const gradd_type_t type = {
        .dtype = GRADD_DT_F32, .rank = 2, .dims = {2, 4}
    };
    begin(m, "graph.plan");
    wire_key(m, "graph");
    wire_put_bytes(m, graph_id, sizeof graph_id);
    key_u64(m, "plan", plan);
    wire_key(m, "in");
    wire_put_types(m, (gradd_type_t[]){type, type}, 2);
    wire_key(m, "bound");
    wire_put_list(m, 1);
    wire_put_text(m, "w");
    put_numbers(m, "grad", 2, (int[]){1, 0});
    put_numbers(m, "out", 2, (int[]){0, 1});
    put_numbers(m, "gmask", 1, (int[]){1});
    put_numbers(m, "parameters", 1, (int[]){1});
    wire_key(m, "device");
    wire_put_text(m, "cpu");
    wire_end(m);
}

static void make_bind(wire_out_t *m, uint64_t id, uint64_t offset) {
    begin(m, "bind");
    key_u64(m, "bind", id);
    put_tensors(m, "tensors", 1, &(fuzz_place_t){offset, 2, 0}, false);
    wire_end(m);
}

static void make_forward(wire_out_t *m, uint64_t run_id) {
    begin(m, "forward");
    key_u64(m, "plan", 1);
    key_u64(m, "run", run_id);
    key_u64(m, "seed", 3);
    key_u64(m, "flags", 0);
    key_u64(m, "b", 1);
    put_tensors(m, "in", 1, &(fuzz_place_t){0, 2, 0}, false);
    put_tensors(m, "out", 2,
                (fuzz_place_t[]){
                    {2048, 2, 0},
                    {3072, 0, 0}
    },
                false);
    wire_end(m);
}

static void make_backward(wire_out_t *m, uint64_t run_id) {
    begin(m, "backward");
    key_u64(m, "run", run_id);
    put_tensors(m, "go", 1, &(fuzz_place_t){3136, 0, 1}, true);
    key_u64(m, "b", 2);
    put_tensors(m, "g", 1, &(fuzz_place_t){4096, 2, 0}, true);
    key_u64(m, "keep", 1);
    wire_end(m);
}

static void put_setting(wire_out_t *m, const char *key, double value) {
    put_column(m, key, 1);
    wire_put_f64(m, value);
}

static void put_choice(wire_out_t *m, const char *key, uint64_t value) {
    put_column(m, key, 1);
    wire_put_u64(m, value);
}

/* Refused for its journal, which is too small here, after everything else was read. */
static void make_step(wire_out_t *m) {
    begin(m, "step");
    key_u64(m, "step", 0);
    wire_key(m, "groups");
    wire_put_map(m, 8);
    put_setting(m, "lr", 1e-3);
    put_setting(m, "beta1", 0.9);
    put_setting(m, "beta2", 0.999);
    put_setting(m, "eps", 1e-8);
    put_setting(m, "weight_decay", 0);
    put_choice(m, "mode", 2);
    put_choice(m, "bias_correction", 1);
    put_choice(m, "t", 1);
    put_numbers(m, "group", 1, (int[]){0});
    key_u64(m, "bp", 1);
    key_u64(m, "bm", 2);
    key_u64(m, "bv", 2);
    put_tensors(m, "g", 1, &(fuzz_place_t){4096, 2, 0}, true);
    wire_key(m, "max_norm");
    wire_put_f64(m, 1);
    wire_key(m, "journal");
    wire_put_map(m, 4);
    wire_put_text(m, "segment");
    wire_put_u64(m, 1);
    wire_put_text(m, "offset");
    wire_put_u64(m, 0);
    wire_put_text(m, "dtype");
    wire_put_u64(m, GRADD_DT_U8);
    put_column(m, "dims", 1);
    wire_put_u64(m, 64);
    wire_end(m);
}

static void make_list(wire_out_t *m, const char *verb, const char *key) {
    begin(m, verb);
    put_numbers(m, key, 2, (int[]){1, 2});
    put_numbers(m, "rel", 1, (int[]){1});
    wire_end(m);
}

static void make_number(wire_out_t *m, const char *verb, const char *key) {
    begin(m, verb);
    key_u64(m, key, 1);
    wire_end(m);
}

static void make_explain(wire_out_t *m, const char *form) {
    begin(m, "explain");
    key_u64(m, "proto", PROTOCOL_HIGHEST);
    key_u64(m, "bytes", 100);
    wire_key(m, "form");
    wire_put_text(m, form);
    wire_end(m);
}

static void append(FILE *out, const wire_out_t *m) {
    fputc((int)(m->bytes >> 8), out);
    fputc((int)(m->bytes & 255), out);
    fwrite(m->data, 1, m->bytes, out);
}

static void write_seed(const char *folder, int which) {
    char path[4096];
    wire_out_t m = {0};
    snprintf(path, sizeof path, "%s/seed_%d", folder, which);
    FILE *out = fopen(path, "wb");
    REQUIRE(out);
    make_forward(&m, 1);
    append(out, &m);
    if (which == 1) make_plan(&m, 2);
    if (which == 2) make_bind(&m, 3, 128);
    if (which == 3) make_list(&m, "release", "runs");
    if (which == 4) make_number(&m, "plan.drop", "plan");
    if (which == 5) make_number(&m, "unbind", "bind");
    if (which == 6) make_step(&m);
    if (which == 7) make_number(&m, "plan.estimate", "plan");
    if (which == 8) make_explain(&m, "notes");
    if (which > 0) append(out, &m);
    make_backward(&m, 1);
    append(out, &m);
    make_number(&m, "detach", "q");
    append(out, &m);
    wire_out_finish(&m);
    fclose(out);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    const char *folder = getenv("GRADD_FUZZ_SEEDS");
    (void)argc;
    (void)argv;
    const gradd_device_options_t device = {.threads = 1, .memory_limit = 64 << 20};
    REQUIRE(worker_open_device(&worker, &device) == GRADD_OK);
    make_model();
    make_session();
    for (int i = 0; folder && i <= 8; i++)
        write_seed(folder, i);
    if (folder) exit(0);
    return 0;
}

/* Every input starts from the same session. */
static void prepare(void) {
    wire_out_t m = {0};
    begin(&m, "graph.put");
    wire_end(&m);
    REQUIRE(run(m.data, m.bytes, true) == GRADD_OK);
    make_plan(&m, 1);
    REQUIRE(run(m.data, m.bytes, false) == GRADD_OK);
    make_bind(&m, 1, 1024);
    REQUIRE(run(m.data, m.bytes, false) == GRADD_OK);
    make_bind(&m, 2, 5120);
    REQUIRE(run(m.data, m.bytes, false) == GRADD_OK);
    wire_out_finish(&m);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    prepare();
    for (int i = 0; i < MAX_ENVELOPES && n >= 2; i++) {
        size_t size = (size_t)data[0] << 8 | data[1];
        data += 2;
        n -= 2;
        if (size > n) size = n;
        run(data, size, false);
        data += size;
        n -= size;
    }
    objects_end(&worker, session);
    REQUIRE(worker.device->arena_bytes == 0 && atomic_load(&session->counts.arena_bytes) == 0);
    for (compiled_t *c = worker.compiled; c; c = c->next)
        REQUIRE(c->refs == 0);
    /* The segment can be removed exactly when every use of it was given back. */
    REQUIRE(gradd_handle_remove(gradd_lease_table(session->lease), 1) == GRADD_OK);
    add_segment();
    return 0;
}
