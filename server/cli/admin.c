/* `gradd ps` and `gradd stop`: one request over a DEALER, and tables for people. See admin.h. */
#include "server/cli/admin.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

#include "server/cli/owner_command.h"
#include "server/wire/wire.h"

#define ANSWER_MS    5000
#define STOP_MS      60000
#define CLIENT_WIDTH 22

/* The listener may be any process, so its reply is checked. */
static gradd_status_t decode(const char *path, zmq_msg_t *reply, wire_doc_t *out_doc) {
    gradd_status_t st =
        wire_decode_any(zmq_msg_data(reply), zmq_msg_size(reply), WIRE_MAX_ITEMS, out_doc);
    if (st != GRADD_OK)
        return gradd_wrap(st, "the process that answers at %s is not a gradd daemon", path);
    if (out_doc->root.type == MSGPACK_OBJECT_MAP) return GRADD_OK;
    wire_doc_finish(out_doc);
    return GRADD_FAIL(
        IO, "the process that answers at %s is not a gradd daemon: its reply is not a map", path);
}

gradd_status_t admin_ask(const char *path, const wire_out_t *request, int timeout_ms,
                         zmq_msg_t *reply, wire_doc_t *out_doc) {
    char endpoint[160];
    int linger = 0, timeout = timeout_ms;
    gradd_status_t st = GRADD_OK;
    void *context = zmq_ctx_new();
    void *socket = context ? zmq_socket(context, ZMQ_DEALER) : NULL;
    snprintf(endpoint, sizeof endpoint, "ipc://%s", path);
    if (!socket || request->failed ||
        zmq_setsockopt(socket, ZMQ_LINGER, &linger, sizeof linger) != 0 ||
        zmq_setsockopt(socket, ZMQ_RCVTIMEO, &timeout, sizeof timeout) != 0 ||
        zmq_connect(socket, endpoint) != 0 ||
        zmq_send(socket, request->data, request->bytes, 0) < 0)
        st = GRADD_FAIL(IO, "cannot talk to %s: %s", path, zmq_strerror(errno));
    else if (zmq_msg_recv(reply, socket, 0) < 0)
        st = GRADD_FAIL(IO, "the daemon at %s does not answer: %s", path, zmq_strerror(errno));
    if (st == GRADD_OK) st = decode(path, reply, out_doc);
    if (socket) zmq_close(socket);
    if (context) zmq_ctx_term(context);
    return st;
}

/* Sends {v: verb, q: 1, now} and waits. The reply must be finished by the caller. */
static gradd_status_t ask(const char *path, const char *verb, bool now, zmq_msg_t *reply,
                          wire_doc_t *out_doc) {
    wire_out_t out = {0};
    wire_begin(&out);
    wire_key(&out, "v");
    wire_put_text(&out, verb);
    wire_key(&out, "q");
    wire_put_u64(&out, 1);
    wire_key(&out, "now");
    wire_put_u64(&out, now);
    wire_end(&out);
    gradd_status_t st = admin_ask(path, &out, ANSWER_MS, reply, out_doc);
    wire_out_finish(&out);
    return st;
}

int64_t admin_number(const msgpack_object *map, const char *key) {
    const msgpack_object *value = wire_in(map, key);
    bool fits =
        value && value->type == MSGPACK_OBJECT_POSITIVE_INTEGER && value->via.u64 <= INT64_MAX / 4;
    return fits ? (int64_t)value->via.u64 : 0;
}

const char *admin_text(const msgpack_object *map, const char *key, char *buffer, size_t bytes) {
    const msgpack_object *value = wire_in(map, key);
    bool is_text = value && value->type == MSGPACK_OBJECT_STR;
    snprintf(buffer, bytes, "%.*s", is_text ? (int)value->via.str.size : 1,
             is_text ? value->via.str.ptr : "?");
    return buffer;
}

void admin_version(const char *path, char version[ADMIN_VERSION_BYTES]) {
    zmq_msg_t reply;
    wire_doc_t doc = {0};
    snprintf(version, ADMIN_VERSION_BYTES, "of an unknown version");
    zmq_msg_init(&reply);
    if (ask(path, "ps", false, &reply, &doc) == GRADD_OK && wire_get(&doc, "version"))
        admin_text(&doc.root, "version", version, ADMIN_VERSION_BYTES);
    wire_doc_finish(&doc);
    zmq_msg_close(&reply);
}

/* "3.2 MiB" */
static const char *amount(int64_t bytes, char buffer[24]) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = (double)bytes;
    int unit = 0;
    for (; value >= 1024 && unit < 4; unit++)
        value /= 1024;
    snprintf(buffer, 24, unit ? "%.1f %s" : "%.0f %s", value, units[unit]);
    return buffer;
}

static const char *duration(int64_t ms, char buffer[24]) {
    if (ms < 10000)
        snprintf(buffer, 24, "%.1f s", (double)ms / 1000);
    else if (ms < 600000)
        snprintf(buffer, 24, "%" PRId64 " s", ms / 1000);
    else
        snprintf(buffer, 24, "%" PRId64 " min", ms / 60000);
    return buffer;
}

/* 0 where an older daemon does not say it. */
static double real_of(const msgpack_object *map, const char *key) {
    const msgpack_object *value = wire_in(map, key);
    return value && value->type == MSGPACK_OBJECT_FLOAT64 ? value->via.f64 : 0;
}

static void print_session(const msgpack_object *s) {
    char client[CLIENT_WIDTH + 1], state[16], shared[24], arena[24], idle[24];
    printf("%7" PRId64 " %8" PRId64 "  %-*s %-10s %6" PRId64 " %5" PRId64 " %5" PRId64
           " %10s %10s %9" PRId64 " %7s %6.0f%% %8.1f\n",
           admin_number(s, "session"), admin_number(s, "pid"), CLIENT_WIDTH,
           admin_text(s, "client", client, sizeof client),
           admin_text(s, "state", state, sizeof state), admin_number(s, "graphs"),
           admin_number(s, "plans"), admin_number(s, "runs"),
           amount(admin_number(s, "segment_bytes"), shared),
           amount(admin_number(s, "arena_bytes"), arena), admin_number(s, "requests"),
           duration(admin_number(s, "idle_ms"), idle), 100 * real_of(s, "busy"),
           real_of(s, "steps_per_second"));
}

/* Sessions with a name: those of living processes as well. */
static void print_kept(const msgpack_object *list) {
    char name[72], shared[24], left[24];
    if (!list || wire_count(list) == 0) return;
    printf("%-*s %8s  %-10s %10s %7s\n", 8 + CLIENT_WIDTH, "KEPT", "PID", "STATE", "SHARED",
           "LEFT");
    for (int i = 0; i < wire_count(list); i++) {
        const msgpack_object *kept = wire_at(list, i);
        if (kept->type != MSGPACK_OBJECT_MAP) continue;
        const msgpack_object *ms = wire_in(kept, "left_ms");
        const bool ends = ms && ms->type == MSGPACK_OBJECT_POSITIVE_INTEGER;
        printf("%-*s %8" PRId64 "  %-10s %10s %7s\n", 8 + CLIENT_WIDTH,
               admin_text(kept, "name", name, sizeof name), admin_number(kept, "pid"),
               admin_number(kept, "in_use") ? "in use" : "left",
               amount(admin_number(kept, "bytes"), shared),
               ends ? duration(admin_number(kept, "left_ms"), left) : "-");
    }
}

static void print_table(const msgpack_object *root) {
    const msgpack_object *sessions = wire_in(root, "sessions");
    char version[24], up[24], device[32];
    if (!sessions || sessions->type != MSGPACK_OBJECT_ARRAY) return;
    printf("gradd %s, pid %" PRId64 ", up %s, device %s, %" PRId64 " thread%s, %d session%s\n",
           admin_text(root, "version", version, sizeof version), admin_number(root, "pid"),
           duration(admin_number(root, "uptime_ms"), up),
           admin_text(root, "device", device, sizeof device), admin_number(root, "threads"),
           admin_number(root, "threads") == 1 ? "" : "s", wire_count(sessions),
           wire_count(sessions) == 1 ? "" : "s");
    if (wire_count(sessions) == 0) return;
    printf("%7s %8s  %-*s %-10s %6s %5s %5s %10s %10s %9s %7s %7s %8s\n", "SESSION", "PID",
           CLIENT_WIDTH, "CLIENT", "STATE", "GRAPHS", "PLANS", "RUNS", "SHARED", "ARENA",
           "REQUESTS", "IDLE", "ENGINE", "STEPS/S");
    for (int i = 0; i < wire_count(sessions); i++)
        if (wire_at(sessions, i)->type == MSGPACK_OBJECT_MAP) print_session(wire_at(sessions, i));
}

/* Prints the contents of a reply: no bytes, no floats that JSON lacks, nesting bounded by the
 * scanner. */
static void print_json(FILE *out, const msgpack_object *o);

static void print_pairs(FILE *out, const msgpack_object *o) {
    for (uint32_t i = 0; i < o->via.map.size; i++) {
        if (i) fputs(", ", out);
        print_json(out, &o->via.map.ptr[i].key);
        fputs(": ", out);
        print_json(out, &o->via.map.ptr[i].val);
    }
}

static void print_json(FILE *out, const msgpack_object *o) {
    switch (o->type) {
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
        fprintf(out, "%" PRIu64, o->via.u64);
        break;
    case MSGPACK_OBJECT_NEGATIVE_INTEGER:
        fprintf(out, "%" PRId64, o->via.i64);
        break;
    case MSGPACK_OBJECT_FLOAT64:
        fprintf(out, isfinite(o->via.f64) ? "%.17g" : "null", o->via.f64);
        break;
    case MSGPACK_OBJECT_STR:
        fputc('"', out);
        for (uint32_t i = 0; i < o->via.str.size; i++) {
            unsigned char c = (unsigned char)o->via.str.ptr[i];
            if (c < 0x20 || c == '"' || c == '\\')
                fprintf(out, "\\u%04x", c);
            else
                fputc(c, out);
        }
        fputc('"', out);
        break;
    case MSGPACK_OBJECT_ARRAY:
        fputc('[', out);
        for (int i = 0; i < wire_count(o); i++) {
            if (i) fputs(", ", out);
            print_json(out, wire_at(o, i));
        }
        fputc(']', out);
        break;
    case MSGPACK_OBJECT_MAP:
        fputc('{', out);
        print_pairs(out, o);
        fputc('}', out);
        break;
    default:
        fputs("null", out);
    }
}

static void print_ps(const rundir_t *dir, const msgpack_object *root, bool json) {
    static uint8_t buffer[KEPT_REPLY_BYTES];
    wire_doc_t doc = {0};
    const msgpack_object *kept = kept_ask(dir, buffer, &doc);
    if (!json) {
        print_table(root);
        if (kept) print_kept(kept);
    } else {
        putchar('{');
        print_pairs(stdout, root);
        if (kept) {
            fputs(", \"kept\": ", stdout);
            print_json(stdout, kept);
        }
        puts("}");
    }
    wire_doc_finish(&doc);
}

gradd_status_t admin_ps(const rundir_t *dir, const options_t *options) {
    zmq_msg_t reply;
    wire_doc_t doc = {0};
    zmq_msg_init(&reply);
    gradd_status_t st = ask(dir->cmd, "ps", false, &reply, &doc);
    const msgpack_object *sessions = st == GRADD_OK ? wire_get(&doc, "sessions") : NULL;
    if (st == GRADD_OK && (!sessions || sessions->type != MSGPACK_OBJECT_ARRAY))
        st = GRADD_FAIL(
            IO, "the process that answers at %s is not a gradd daemon: it lists no sessions",
            dir->cmd);
    if (st == GRADD_OK) print_ps(dir, &doc.root, options->json);
    wire_doc_finish(&doc);
    zmq_msg_close(&reply);
    return st;
}

gradd_status_t admin_stop(const rundir_t *dir, const options_t *options) {
    static uint8_t buffer[KEPT_REPLY_BYTES];
    zmq_msg_t reply;
    wire_doc_t doc = {0}, kept_doc = {0};
    const msgpack_object *kept = kept_ask(dir, buffer, &kept_doc); /* they end with the daemon */
    zmq_msg_init(&reply);
    gradd_status_t st = ask(dir->cmd, "stop", options->now, &reply, &doc);
    pid_t pid = st == GRADD_OK ? (pid_t)admin_number(&doc.root, "pid") : 0;
    if (st == GRADD_OK && pid <= 0)
        st = GRADD_FAIL(IO, "the daemon at %s does not tell its pid", dir->cmd);
    wire_doc_finish(&doc);
    zmq_msg_close(&reply);
    if (st == GRADD_OK && !options->json) print_kept(kept);
    wire_doc_finish(&kept_doc);
    GRADD_TRY(st);
    /* Trainers start the next one at once, which is none of our business. */
    for (int waited = 0; rundir_owner(dir) == pid; waited += 10) {
        if (waited >= STOP_MS)
            return GRADD_FAIL(IO, "the daemon still finishes a request (gradd stop --now cancels)");
        usleep(10000);
    }
    puts(options->json ? "{\"stopped\": true}" : "stopped");
    return GRADD_OK;
}
