/* `gradd ps` and `gradd stop`: one request over a DEALER, and tables. See admin.h. */
#include "server/cli/admin.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

#include "server/cli/owner_command.h"
#include "server/cli/users.h"
#include "server/wire/print.h"
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
        st = errno == EAGAIN ? GRADD_FAIL(IO, "the daemon at %s does not answer within %d s", path,
                                          timeout_ms / 1000)
                             : GRADD_FAIL(IO, "the daemon at %s does not answer: %s", path,
                                          zmq_strerror(errno));
    if (st == GRADD_OK) st = decode(path, reply, out_doc);
    if (socket) zmq_close(socket);
    if (context) zmq_ctx_term(context);
    return st;
}

void admin_begin(wire_out_t *out, const char *verb) {
    wire_begin(out);
    wire_key(out, "v");
    wire_put_text(out, verb);
    wire_key(out, "q");
    wire_put_u64(out, 1);
}

gradd_status_t admin_send(const char *path, wire_out_t *request, admin_reply_t *out_reply) {
    *out_reply = (admin_reply_t){0};
    wire_end(request);
    zmq_msg_init(&out_reply->message);
    const gradd_status_t st =
        admin_ask(path, request, ANSWER_MS, &out_reply->message, &out_reply->doc);
    wire_out_finish(request);
    return st;
}

void admin_finish(admin_reply_t *reply) {
    wire_doc_finish(&reply->doc);
    zmq_msg_close(&reply->message);
}

gradd_status_t admin_check(const msgpack_object *root) {
    const msgpack_object *ok = wire_in(root, "ok");
    char what[GRADD_ERROR_BYTES];
    if (ok && ok->type == MSGPACK_OBJECT_POSITIVE_INTEGER && ok->via.u64 == 1) return GRADD_OK;
    return GRADD_FAIL(SESSION, "%s", reply_text(root, "what", what, sizeof what));
}

/* Sends {v: verb, q: 1, now} and waits. */
static gradd_status_t ask(const char *path, const char *verb, bool now, admin_reply_t *out_reply) {
    wire_out_t out = {0};
    admin_begin(&out, verb);
    wire_key(&out, "now");
    wire_put_u64(&out, now);
    return admin_send(path, &out, out_reply);
}

void admin_version(const char *path, char version[ADMIN_VERSION_BYTES]) {
    admin_reply_t reply;
    snprintf(version, ADMIN_VERSION_BYTES, "of an unknown version");
    if (ask(path, "ps", false, &reply) == GRADD_OK && wire_get(&reply.doc, "version"))
        reply_text(&reply.doc.root, "version", version, ADMIN_VERSION_BYTES);
    admin_finish(&reply);
}

/* Without bases, which are listed once for all. */
static int64_t own_bytes(const msgpack_object *s) {
    const msgpack_object *kinds = wire_in(s, "segment_kinds");
    const bool known = kinds && kinds->type == MSGPACK_OBJECT_MAP;
    return reply_number(s, "segment_bytes") - (known ? reply_number(kinds, "base") : 0);
}

static const char *kept_state(const msgpack_object *kept, char buffer[24]) {
    if (!reply_number(kept, "base")) return reply_number(kept, "in_use") ? "in use" : "left";
    snprintf(buffer, 24, "base, %" PRId64, reply_number(kept, "users"));
    return buffer;
}

static void print_session(const msgpack_object *s) {
    char client[CLIENT_WIDTH + 1], state[16], shared[24], arena[24], idle[24];
    printf("%7" PRId64 " %8" PRId64 "  %-*s %-10s %6" PRId64 " %5" PRId64 " %5" PRId64
           " %10s %10s %9" PRId64 " %7s %5" PRId64 " %6.0f%% %8.1f\n",
           reply_number(s, "session"), reply_number(s, "pid"), CLIENT_WIDTH,
           reply_text(s, "client", client, sizeof client),
           reply_text(s, "state", state, sizeof state), reply_number(s, "graphs"),
           reply_number(s, "plans"), reply_number(s, "runs"), print_amount(own_bytes(s), shared),
           print_amount(reply_number(s, "arena_bytes"), arena), reply_number(s, "requests"),
           print_duration(reply_number(s, "idle_ms"), idle), reply_number(s, "share"),
           100 * reply_real(s, "busy"), reply_real(s, "steps_per_second"));
}

/* Sessions with a name: those of living processes as well. */
static void print_kept(const msgpack_object *list) {
    char name[72], shared[24], left[24], state[24];
    if (!list || wire_count(list) == 0) return;
    printf("%-*s %8s  %-10s %10s %7s\n", 8 + CLIENT_WIDTH, "KEPT", "PID", "STATE", "SHARED",
           "LEFT");
    for (int i = 0; i < wire_count(list); i++) {
        const msgpack_object *kept = wire_at(list, i);
        if (kept->type != MSGPACK_OBJECT_MAP) continue;
        const msgpack_object *ms = wire_in(kept, "left_ms");
        const bool ends = ms && ms->type == MSGPACK_OBJECT_POSITIVE_INTEGER;
        printf("%-*s %8" PRId64 "  %-10s %10s %7s\n", 8 + CLIENT_WIDTH,
               reply_text(kept, "name", name, sizeof name), reply_number(kept, "pid"),
               kept_state(kept, state), print_amount(reply_number(kept, "bytes"), shared),
               ends ? print_duration(reply_number(kept, "left_ms"), left) : "-");
    }
}

static void print_table(const msgpack_object *root) {
    const msgpack_object *sessions = wire_in(root, "sessions");
    char version[24], up[24], device[32];
    if (!sessions || sessions->type != MSGPACK_OBJECT_ARRAY) return;
    printf("gradd %s, pid %" PRId64 ", up %s, device %s, %" PRId64 " thread%s, %d session%s\n",
           reply_text(root, "version", version, sizeof version), reply_number(root, "pid"),
           print_duration(reply_number(root, "uptime_ms"), up),
           reply_text(root, "device", device, sizeof device), reply_number(root, "threads"),
           reply_number(root, "threads") == 1 ? "" : "s", wire_count(sessions),
           wire_count(sessions) == 1 ? "" : "s");
    char why[256];
    const msgpack_object *drained = wire_in(root, "drained");
    if (drained && drained->type == MSGPACK_OBJECT_STR && drained->via.str.size > 0)
        printf("drained: %s (gradd drain --end)\n", reply_text(root, "drained", why, sizeof why));
    if (wire_count(sessions) == 0) return;
    printf("%7s %8s  %-*s %-10s %6s %5s %5s %10s %10s %9s %7s %5s %7s %8s\n", "SESSION", "PID",
           CLIENT_WIDTH, "CLIENT", "STATE", "GRAPHS", "PLANS", "RUNS", "SHARED", "ARENA",
           "REQUESTS", "IDLE", "SHARE", "ENGINE", "STEPS/S");
    for (int i = 0; i < wire_count(sessions); i++)
        if (wire_at(sessions, i)->type == MSGPACK_OBJECT_MAP) print_session(wire_at(sessions, i));
}

/* {the pairs of a reply, "kept": list, "shared": sums of a shared directory} */
static void print_object(const msgpack_object *root, const msgpack_object *kept,
                         const users_t *users) {
    putchar('{');
    print_pairs(stdout, root);
    if (kept) {
        fputs(", \"kept\": ", stdout);
        print_json(stdout, kept);
    }
    if (users) {
        fputs(", \"shared\": ", stdout);
        users_print_json(users);
    }
    puts("}");
}

gradd_status_t admin_ask_ps(const rundir_t *dir, admin_reply_t *out_reply) {
    GRADD_TRY(ask(dir->cmd, "ps", false, out_reply));
    const msgpack_object *sessions = wire_get(&out_reply->doc, "sessions");
    if (sessions && sessions->type == MSGPACK_OBJECT_ARRAY) return GRADD_OK;
    return GRADD_FAIL(
        IO, "the process that answers at %s is not a gradd daemon: it lists no sessions", dir->cmd);
}

gradd_status_t admin_ps(const rundir_t *dir, const options_t *options) {
    static uint8_t buffer[KEPT_REPLY_BYTES];
    admin_reply_t reply;
    wire_doc_t doc = {0};
    users_t users;
    const gradd_status_t st = admin_ask_ps(dir, &reply);
    const msgpack_object *kept = st == GRADD_OK ? kept_ask(dir, buffer, &doc) : NULL;
    const bool shares = users_look(dir, &users);
    if (st == GRADD_OK && options->json)
        print_object(&reply.doc.root, kept, shares ? &users : NULL);
    if (st == GRADD_OK && !options->json) {
        print_table(&reply.doc.root);
        print_kept(kept);
        if (shares) users_print(&users);
    }
    wire_doc_finish(&doc);
    admin_finish(&reply);
    return st;
}

/* ---- stop ---- */

static gradd_status_t await_end(const rundir_t *dir, pid_t pid) {
    /* Trainers start the next one at once, which is none of our business. */
    for (int waited = 0; rundir_owner(dir) == pid; waited += 10) {
        if (waited >= STOP_MS)
            return GRADD_FAIL(IO, "the daemon still finishes a request (gradd stop --now cancels)");
        usleep(10000);
    }
    return GRADD_OK;
}

static gradd_status_t send_stop(const rundir_t *dir, bool now) {
    admin_reply_t reply;
    const gradd_status_t st = ask(dir->cmd, "stop", now, &reply);
    const pid_t pid = st == GRADD_OK ? (pid_t)reply_number(&reply.doc.root, "pid") : 0;
    admin_finish(&reply);
    GRADD_TRY(st);
    if (pid <= 0) return GRADD_FAIL(IO, "the daemon at %s does not tell its pid", dir->cmd);
    return await_end(dir, pid);
}

/* Those whose clients will have to start another daemon, and kept ones, which end with it. */
static void name_victims(const msgpack_object *sessions, const msgpack_object *kept) {
    char client[72], state[16];
    for (int i = 0; i < wire_count(sessions); i++) {
        const msgpack_object *s = wire_at(sessions, i);
        if (s->type != MSGPACK_OBJECT_MAP) continue;
        printf("session %" PRId64 ", %s, pid %" PRId64 ", %s\n", reply_number(s, "session"),
               reply_text(s, "client", client, sizeof client), reply_number(s, "pid"),
               reply_text(s, "state", state, sizeof state));
    }
    print_kept(kept);
}

static void print_stopped(bool stopped, const msgpack_object *sessions, const msgpack_object *kept,
                          bool json) {
    if (!json) {
        puts(stopped ? "stopped" : "not stopped (--dry-run)");
        return;
    }
    printf("{\"stopped\": %s, \"sessions\": ", stopped ? "true" : "false");
    print_json(stdout, sessions);
    if (kept) {
        fputs(", \"kept\": ", stdout);
        print_json(stdout, kept);
    }
    puts("}");
}

gradd_status_t admin_stop(const rundir_t *dir, const options_t *options) {
    static uint8_t buffer[KEPT_REPLY_BYTES];
    static const msgpack_object none = {.type = MSGPACK_OBJECT_ARRAY};
    admin_reply_t reply;
    wire_doc_t doc = {0};
    const msgpack_object *kept = kept_ask(dir, buffer, &doc);
    const bool listed = admin_ask_ps(dir, &reply) == GRADD_OK; /* an older one stops all the same */
    const msgpack_object *sessions = listed ? wire_get(&reply.doc, "sessions") : &none;
    if (!options->json) name_victims(sessions, kept);
    const gradd_status_t st = options->dry_run ? GRADD_OK : send_stop(dir, options->now);
    if (st == GRADD_OK) print_stopped(!options->dry_run, sessions, kept, options->json);
    wire_doc_finish(&doc);
    admin_finish(&reply);
    return st;
}
