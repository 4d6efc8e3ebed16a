/* Implementation of peer.h: sockets, processes, two small models. */
#include "tests/c/peer.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "shm/fdpass.h"
#include "tests/c/onnx_build.h"
#include "tests/test.h"

#define MAX_ARGS 16

static int64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* ---- the daemon ---- */

/* The daemon that was built with this program lies next to it. */
static const char *binary(void) {
    static char path[4096];
    const char *given = getenv("GRADD_BIN");
    if (given) return given;
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 16);
    CHECK(n > 0);
    path[n] = 0;
    strcpy(strrchr(path, '/'), "/gradd");
    if (access(path, X_OK) != 0) test_skip("%s is not built", path);
    return path;
}

static pid_t spawn(const char *const *args, int output) {
    const char *program = binary();
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid > 0) return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (output >= 0) dup2(output, STDOUT_FILENO);
    execv(program, (char *const *)args);
    _exit(127);
}

static int connect_to(const char *dir, const char *name, int type) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%.64s/%.20s", dir, name);
    int fd = socket(AF_UNIX, type | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) == 0) return fd;
    close(fd);
    return -1;
}

static void start(peer_daemon_t *daemon, const char *const *extra) {
    const char *args[MAX_ARGS] = {"gradd", "serve", "--dir", daemon->dir, "--threads", "2"};
    int n = 6;
    for (int i = 0; extra && extra[i] && n < MAX_ARGS - 1; i++)
        args[n++] = extra[i];
    daemon->pid = spawn(args, -1);
    for (int64_t end = now_ms() + PEER_WAIT_MS; now_ms() < end;) {
        int fd = connect_to(daemon->dir, "ctl.sock", SOCK_SEQPACKET);
        if (fd >= 0) {
            close(fd);
            return;
        }
        usleep(2000);
    }
    test_fail(__FILE__, __LINE__, "the daemon does not listen");
}

void peer_daemon_start(peer_daemon_t *daemon, const char *const *extra) {
    strcpy(daemon->dir, "/tmp/gradd-test-XXXXXX");
    CHECK(mkdtemp(daemon->dir) != NULL);
    start(daemon, extra);
}

void peer_daemon_restart(peer_daemon_t *daemon) {
    start(daemon, NULL);
}

static int exit_code(int status) {
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int peer_daemon_wait(peer_daemon_t *daemon, int limit_ms) {
    int status;
    for (int64_t end = now_ms() + limit_ms; now_ms() < end; usleep(1000))
        if (waitpid(daemon->pid, &status, WNOHANG) == daemon->pid) return exit_code(status);
    test_fail(__FILE__, __LINE__, "the daemon did not end within %d ms", limit_ms);
}

int peer_daemon_again(const peer_daemon_t *daemon) {
    const char *args[] = {"gradd", "serve", "--dir", daemon->dir, NULL};
    peer_daemon_t other = {.pid = spawn(args, -1)};
    return peer_daemon_wait(&other, PEER_WAIT_MS);
}

int peer_command(const peer_daemon_t *daemon, const char *command, char *output, size_t bytes) {
    const char *args[] = {"gradd", command, "--dir", daemon->dir, NULL};
    int ends[2];
    size_t n = 0;
    CHECK(pipe2(ends, O_CLOEXEC) == 0);
    peer_daemon_t child = {.pid = spawn(args, ends[1])};
    close(ends[1]);
    for (ssize_t got; n + 1 < bytes && (got = read(ends[0], output + n, bytes - 1 - n)) > 0;)
        n += (size_t)got;
    output[n] = 0;
    close(ends[0]);
    return peer_daemon_wait(&child, PEER_WAIT_MS);
}

void peer_daemon_stop(peer_daemon_t *daemon) {
    char path[128];
    kill(daemon->pid, SIGTERM);
    CHECK_EQ_INT(peer_daemon_wait(daemon, PEER_WAIT_MS), 0);
    snprintf(path, sizeof path, "%s/cmd.sock", daemon->dir);
    CHECK(access(path, F_OK) != 0);
    snprintf(path, sizeof path, "%s/ctl.sock", daemon->dir);
    CHECK(access(path, F_OK) != 0);
    snprintf(path, sizeof path, "%s/lock", daemon->dir);
    CHECK(unlink(path) == 0);
    CHECK(rmdir(daemon->dir) == 0);
}

void peer_daemon_clean(const peer_daemon_t *daemon) {
    static const char *const names[] = {"cmd.sock", "ctl.sock", "lock"};
    char path[128];
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", daemon->dir, names[i]);
        unlink(path);
    }
    CHECK(rmdir(daemon->dir) == 0);
}

/* Field 4 of /proc/PID/stat, behind the command in brackets; 0 if there is no such process. */
static pid_t parent_of(const char *pid) {
    char path[300], text[512], *end;
    snprintf(path, sizeof path, "/proc/%s/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    const size_t n = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[n] = 0;
    end = strrchr(text, ')');
    return end && strlen(end) > 4 ? (pid_t)strtol(end + 4, NULL, 10) : 0;
}

pid_t peer_daemon_worker(const peer_daemon_t *daemon) {
    pid_t found = 0;
    DIR *dir = opendir("/proc");
    CHECK(dir != NULL);
    for (const struct dirent *entry; !found && (entry = readdir(dir));)
        if (entry->d_name[0] >= '1' && entry->d_name[0] <= '9' &&
            parent_of(entry->d_name) == daemon->pid)
            found = (pid_t)strtol(entry->d_name, NULL, 10);
    closedir(dir);
    return found;
}

static int count_fds(pid_t pid) {
    char path[64];
    int n = 0;
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    DIR *dir = opendir(path);
    CHECK(dir != NULL);
    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

int peer_daemon_fds(const peer_daemon_t *daemon) {
    return count_fds(daemon->pid) + count_fds(peer_daemon_worker(daemon));
}

/* ---- the client ---- */

static void connect_dealer(peer_t *peer) {
    char endpoint[128];
    int linger = 0, timeout = PEER_WAIT_MS;
    peer->dealer = zmq_socket(peer->context, ZMQ_DEALER);
    CHECK(zmq_setsockopt(peer->dealer, ZMQ_LINGER, &linger, sizeof linger) == 0);
    CHECK(zmq_setsockopt(peer->dealer, ZMQ_RCVTIMEO, &timeout, sizeof timeout) == 0);
    snprintf(endpoint, sizeof endpoint, "ipc://%s/cmd.sock", peer->dir);
    CHECK(zmq_connect(peer->dealer, endpoint) == 0);
}

void peer_connect(peer_t *peer, const char *dir) {
    memset(peer, 0, sizeof *peer);
    snprintf(peer->dir, sizeof peer->dir, "%s", dir);
    peer->segment = (gradd_segment_t)GRADD_SEGMENT_INIT;
    zmq_msg_init(&peer->reply);
    peer->control = connect_to(dir, "ctl.sock", SOCK_SEQPACKET);
    CHECK(peer->control >= 0);
    peer->context = zmq_ctx_new();
    connect_dealer(peer);
}

void peer_close(peer_t *peer) {
    wire_doc_finish(&peer->doc);
    wire_out_finish(&peer->out);
    zmq_msg_close(&peer->reply);
    zmq_close(peer->dealer);
    zmq_ctx_term(peer->context);
    close(peer->control);
    gradd_segment_finish(&peer->segment);
}

static gradd_status_t status_of_name(const msgpack_object *name) {
    static const char *const names[] = {"OK",
#define X(name) #name,
                                        GRADD_STATUS_MAP(X)
#undef X
    };
    for (int i = 1; i < GRADD_STATUS_COUNT; i++)
        if (name && name->type == MSGPACK_OBJECT_STR && strlen(names[i]) == name->via.str.size &&
            memcmp(names[i], name->via.str.ptr, name->via.str.size) == 0)
            return (gradd_status_t)i;
    test_fail(__FILE__, __LINE__, "a failed reply without a known code");
}

/* Decodes a reply; its failure becomes this thread's failure. */
static gradd_status_t take_reply(peer_t *peer, const void *data, size_t bytes) {
    wire_doc_finish(&peer->doc);
    CHECK_OK(wire_decode_any(data, bytes, WIRE_MAX_ITEMS, &peer->doc));
    CHECK(peer->doc.root.type == MSGPACK_OBJECT_MAP);
    const msgpack_object *ok = wire_get(&peer->doc, "ok"), *what = wire_get(&peer->doc, "what");
    CHECK(ok && ok->type == MSGPACK_OBJECT_POSITIVE_INTEGER);
    if (ok->via.u64 == 1) return GRADD_OK;
    CHECK(what && what->type == MSGPACK_OBJECT_STR && what->via.str.size > 0);
    char text[GRADD_ERROR_BYTES];
    snprintf(text, sizeof text, "%.*s", (int)what->via.str.size, what->via.str.ptr);
    gradd_error_set(text);
    return status_of_name(wire_get(&peer->doc, "code"));
}

gradd_status_t peer_control(peer_t *peer, int fd) {
    int fds[1];
    gradd_fd_packet_t packet = {
        .data = peer->packet, .capacity = sizeof peer->packet, .fds = fds, .max_fds = 1};
    gradd_fd_event_t event;
    wire_end(&peer->out);
    CHECK_OK(gradd_fd_send(peer->control, peer->out.data, peer->out.bytes, &fd, fd >= 0));
    CHECK_OK(gradd_fd_recv(peer->control, &packet, &event));
    CHECK_EQ_INT(event, GRADD_FD_PACKET);
    for (int i = 0; i < packet.n_fds; i++)
        close(fds[i]);
    return take_reply(peer, peer->packet, packet.bytes);
}

static void take_nonce(peer_t *peer) {
    const msgpack_object *nonce = wire_get(&peer->doc, "nonce");
    CHECK(nonce && nonce->type == MSGPACK_OBJECT_BIN && nonce->via.bin.size == 16);
    memcpy(peer->nonce, nonce->via.bin.ptr, 16);
}

gradd_status_t peer_hello(peer_t *peer, int low, int high) {
    wire_out_t *m = &peer->out;
    wire_begin(m);
    wire_key(m, "v");
    wire_put_text(m, "hello");
    wire_key(m, "proto");
    wire_put_list(m, 2);
    wire_put_i64(m, low);
    wire_put_i64(m, high);
    wire_key(m, "client");
    wire_put_text(m, "c-test");
    if (peer->reads_replaced) {
        wire_key(m, "replaced");
        wire_put_u64(m, 1);
    }
    GRADD_TRY(peer_control(peer, -1));
    take_nonce(peer);
    return GRADD_OK;
}

void peer_moved(peer_t *peer, bool *out_dropped) {
    gradd_fd_packet_t packet = {.data = peer->packet, .capacity = sizeof peer->packet};
    gradd_fd_event_t event;
    struct pollfd p = {.fd = peer->control, .events = POLLIN};
    CHECK(poll(&p, 1, PEER_WAIT_MS) == 1);
    CHECK_OK(gradd_fd_recv(peer->control, &packet, &event));
    CHECK_EQ_INT(event, GRADD_FD_PACKET);
    wire_doc_finish(&peer->doc);
    CHECK_OK(wire_decode(peer->packet, packet.bytes, &peer->doc));
    const msgpack_object *verb = wire_get(&peer->doc, "v");
    CHECK(verb && verb->via.str.size == 8 && !memcmp(verb->via.str.ptr, "replaced", 8));
    *out_dropped = peer_number(peer, "dropped");
    take_nonce(peer);
    zmq_close(peer->dealer);
    connect_dealer(peer);
    peer->attached = false;
}

gradd_status_t peer_send_fd(peer_t *peer, uint64_t id, uint64_t bytes, int fd) {
    wire_out_t *m = &peer->out;
    wire_begin(m);
    wire_key(m, "v");
    wire_put_text(m, "segment");
    wire_key(m, "id");
    wire_put_u64(m, id);
    wire_key(m, "bytes");
    wire_put_u64(m, bytes);
    return peer_control(peer, fd);
}

gradd_status_t peer_segment(peer_t *peer, uint64_t id, uint64_t bytes) {
    gradd_segment_finish(&peer->segment);
    CHECK_OK(gradd_segment_create("test", bytes, &peer->segment));
    return peer_send_fd(peer, id, bytes, peer->segment.fd);
}

gradd_status_t peer_attach(peer_t *peer) {
    wire_out_t *m = peer_request(peer, "attach");
    wire_key(m, "nonce");
    wire_put_bytes(m, peer->nonce, sizeof peer->nonce);
    GRADD_TRY(peer_call(peer));
    const msgpack_object *token = wire_get(&peer->doc, "t");
    CHECK(token && token->type == MSGPACK_OBJECT_BIN && token->via.bin.size == 16);
    memcpy(peer->token, token->via.bin.ptr, 16);
    peer->attached = true;
    return GRADD_OK;
}

void peer_open(peer_t *peer, const char *dir, uint64_t bytes) {
    peer_connect(peer, dir);
    CHECK_OK(peer_hello(peer, 2, 2));
    CHECK_OK(peer_segment(peer, 1, bytes));
    CHECK_OK(peer_attach(peer));
}

wire_out_t *peer_request(peer_t *peer, const char *verb) {
    wire_out_t *m = &peer->out;
    wire_begin(m);
    wire_key(m, "v");
    wire_put_text(m, verb);
    wire_key(m, "q");
    wire_put_u64(m, ++peer->q);
    if (peer->attached) {
        wire_key(m, "t");
        wire_put_bytes(m, peer->token, sizeof peer->token);
    }
    return m;
}

static void send_frames(peer_t *peer, const void *frame, size_t bytes) {
    wire_end(&peer->out);
    CHECK(!peer->out.failed);
    CHECK(zmq_send(peer->dealer, peer->out.data, peer->out.bytes, frame ? ZMQ_SNDMORE : 0) >= 0);
    if (frame) CHECK(zmq_send(peer->dealer, frame, bytes, 0) >= 0);
}

void peer_send(peer_t *peer) {
    send_frames(peer, NULL, 0);
}

gradd_status_t peer_receive(peer_t *peer) {
    wire_doc_finish(&peer->doc);
    if (zmq_msg_recv(&peer->reply, peer->dealer, 0) < 0)
        test_fail(__FILE__, __LINE__, "no reply: %s", zmq_strerror(errno));
    return take_reply(peer, zmq_msg_data(&peer->reply), zmq_msg_size(&peer->reply));
}

gradd_status_t peer_call_with(peer_t *peer, const void *frame, size_t bytes) {
    send_frames(peer, frame, bytes);
    return peer_receive(peer);
}

gradd_status_t peer_call(peer_t *peer) {
    return peer_call_with(peer, NULL, 0);
}

bool peer_pending(peer_t *peer, int ms) {
    zmq_pollitem_t item = {.socket = peer->dealer, .events = ZMQ_POLLIN};
    return zmq_poll(&item, 1, ms) == 1;
}

const msgpack_object *peer_value(const peer_t *peer, const char *key) {
    const msgpack_object *value = wire_get(&peer->doc, key);
    if (!value) test_fail(__FILE__, __LINE__, "the reply has no '%s'", key);
    return value;
}

int64_t peer_number(const peer_t *peer, const char *key) {
    const msgpack_object *value = peer_value(peer, key);
    CHECK(value->type == MSGPACK_OBJECT_POSITIVE_INTEGER);
    return value->via.i64;
}

void *peer_at(const peer_t *peer, uint64_t offset) {
    CHECK(offset < peer->segment.bytes);
    return (char *)peer->segment.base + offset;
}

static void put_numbers(wire_out_t *out, const char *key, int n, const peer_f32_t *tensors,
                        uint64_t (*number)(const peer_f32_t *tensor)) {
    wire_put_text(out, key);
    wire_put_list(out, (uint32_t)n);
    for (int i = 0; i < n; i++)
        wire_put_u64(out, number(&tensors[i]));
}

static uint64_t one(const peer_f32_t *tensor) { /* segment 1; and f32 is element type 1 */
    (void)tensor;
    return 1;
}

static uint64_t offset_of(const peer_f32_t *tensor) {
    return tensor->offset;
}

static uint64_t position_of(const peer_f32_t *tensor) {
    return (uint64_t)tensor->at;
}

void peer_put_tensors(wire_out_t *out, int n, const peer_f32_t *tensors, bool with_at) {
    wire_put_map(out, with_at ? 5 : 4);
    put_numbers(out, "segments", n, tensors, one);
    put_numbers(out, "offsets", n, tensors, offset_of);
    put_numbers(out, "dtypes", n, tensors, one);
    wire_put_text(out, "dims");
    wire_put_list(out, (uint32_t)n);
    for (int i = 0; i < n; i++) {
        wire_put_list(out, (uint32_t)tensors[i].rank);
        for (int d = 0; d < tensors[i].rank; d++)
            wire_put_i64(out, tensors[i].dims[d]);
    }
    if (with_at) put_numbers(out, "at", n, tensors, position_of);
}

void peer_put_one(wire_out_t *out, const char *key, peer_f32_t tensor) {
    wire_key(out, key);
    peer_put_tensors(out, 1, &tensor, false);
}

/* ---- models ---- */

static void put_positions(wire_out_t *m, const char *key, int n, const int *positions) {
    wire_key(m, key);
    wire_put_list(m, (uint32_t)n);
    for (int i = 0; i < n; i++)
        wire_put_i64(m, positions[i]);
}

static gradd_status_t put_graph(peer_t *peer, const Onnx__ModelProto *model, uint8_t id[32]) {
    size_t n;
    uint8_t *bytes = build_pack(model, &n);
    peer_request(peer, "graph.put");
    GRADD_TRY(peer_call_with(peer, bytes, n));
    const msgpack_object *graph = peer_value(peer, "graph");
    CHECK(graph->type == MSGPACK_OBJECT_BIN && graph->via.bin.size == 32);
    memcpy(id, graph->via.bin.ptr, 32);
    return GRADD_OK;
}

static wire_out_t *request_plan(peer_t *peer, uint64_t plan, const uint8_t id[32], int64_t rows,
                                int64_t columns, int64_t w_rows) {
    wire_out_t *m = peer_request(peer, "graph.plan");
    wire_key(m, "graph");
    wire_put_bytes(m, id, 32);
    wire_key(m, "plan");
    wire_put_u64(m, plan);
    const gradd_type_t types[] = {
        {.dtype = GRADD_DT_F32, .rank = 2, .dims = {rows, columns}  },
        {.dtype = GRADD_DT_F32, .rank = 2, .dims = {w_rows, columns}},
    };
    wire_key(m, "in");
    wire_put_types(m, types, 2);
    put_positions(m, "bound", 1, (int[]){1});
    return m;
}

wire_out_t *peer_ask_small(peer_t *peer, uint64_t plan, int64_t rows) {
    uint8_t id[32];
    Onnx__ModelProto *model = build_model();
    build_input(model, "x", GRADD_DT_F32, 2, BUILD_DIMS(-1, 4));
    build_input(model, "w", GRADD_DT_F32, 2, BUILD_DIMS(-1, 4));
    build_node(model, "Mul", "multiply", "x,w", "y");
    build_attr_int(build_node(model, "ReduceSum", "sum", "y", "loss"), "keepdims", 0);
    build_output(model, "y");
    build_output(model, "loss");
    CHECK_OK(put_graph(peer, model, id));
    wire_out_t *m = request_plan(peer, plan, id, rows, 4, rows);
    put_positions(m, "grad", 2, (int[]){1, 0});
    put_positions(m, "out", 2, (int[]){0, 1});
    put_positions(m, "gmask", 1, (int[]){1});
    return m;
}

gradd_status_t peer_plan_small(peer_t *peer, uint64_t plan, int64_t rows) {
    peer_ask_small(peer, plan, rows);
    return peer_call(peer);
}

gradd_status_t peer_plan_slow(peer_t *peer, uint64_t plan, int64_t n, int n_products) {
    uint8_t id[32];
    Onnx__ModelProto *model = build_model();
    build_input(model, "x", GRADD_DT_F32, 2, BUILD_DIMS(n, n));
    build_input(model, "w", GRADD_DT_F32, 2, BUILD_DIMS(n, n));
    for (int i = 0; i < n_products; i++) {
        char name[32], in[32], out[32];
        snprintf(name, sizeof name, "product_%d", i);
        snprintf(in, sizeof in, i ? "v%d,w" : "x,w", i - 1);
        snprintf(out, sizeof out, i + 1 < n_products ? "v%d" : "y", i);
        build_node(model, "MatMul", name, in, out);
    }
    build_output(model, "y");
    GRADD_TRY(put_graph(peer, model, id));
    wire_out_t *m = request_plan(peer, plan, id, n, n, n);
    put_positions(m, "out", 1, (int[]){0});
    return peer_call(peer);
}

void peer_forward_small(peer_t *peer, uint64_t plan, uint64_t run, int64_t rows) {
    wire_out_t *m = peer_request(peer, "forward");
    wire_key(m, "plan");
    wire_put_u64(m, plan);
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
                     AT_X, 2, {rows, 4},
                       0
    });
    wire_key(m, "out");
    const peer_f32_t out[] = {
        {AT_Y,    2, {rows, 4}, 0},
        {AT_LOSS, 0, {0},       0}
    };
    peer_put_tensors(m, 2, out, false);
}

float peer_run_small(peer_t *peer, uint64_t run) {
    const peer_f32_t w = {
        AT_W, 2, {5, 4},
          0
    };
    CHECK_OK(peer_plan_small(peer, 1, 5));
    wire_out_t *m = peer_request(peer, "bind");
    wire_key(m, "bind");
    wire_put_u64(m, 1);
    wire_key(m, "tensors");
    peer_put_tensors(m, 1, &w, false);
    CHECK_OK(peer_call(peer));
    *(float *)peer_at(peer, AT_LOSS) = 0;
    peer_forward_small(peer, 1, run, 5);
    CHECK_OK(peer_call(peer));
    return *(const float *)peer_at(peer, AT_LOSS);
}
