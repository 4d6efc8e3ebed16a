/* Verbs of the control socket, one row each. See control.h. */
#include "server/daemon/control.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/daemon/build.h"
#include "server/host/log.h"
#include "server/session/turns.h"
#include "server/verbs/worker.h"
#include "server/wire/version.h"
#include "server/wire/wire.h"
#include "shm/discard.h"
#include "shm/fdpass.h"

#define PACKETS_PER_CALL 8

typedef struct control_row_s {
    /* `handle`: does it in the engine thread, where there is a mapper; NULL = it maps nothing. */
    command_t command;
    gradd_status_t (*answer)(const control_host_t *host, request_t *request);
    int n_fds;     /* -1: the verb looks at them itself */
    bool is_later; /* than hello */
} control_row_t;

/* Finds the rule for that client. Fails with LIMIT if there are as many of its name as may be. */
static gradd_status_t find_quota(const control_host_t *host, const session_t *session,
                                 const char *client, size_t bytes, quota_t *out_rule) {
    char name[QUOTA_NAME_BYTES];
    quota_name(name, client, bytes);
    *out_rule = quota_for(host->quotas, name);
    const int n = session_count(host->table, name, session);
    if (!out_rule->n_sessions || n < (int)out_rule->n_sessions) return GRADD_OK;
    return GRADD_FAIL(LIMIT,
                      "hello: %d session%s of '%s' %s connected, the quota of daemon %d (gradd "
                      "quota)",
                      n, n == 1 ? "" : "s", name, n == 1 ? "is" : "are", (int)host->owner);
}

/* "protocol 2", "protocols 3 to 5" */
static const char *range_text(uint64_t low, uint64_t high, char text[64]) {
    if (low == high)
        snprintf(text, 64, "protocol %llu", (unsigned long long)low);
    else
        snprintf(text, 64, "protocols %llu to %llu", (unsigned long long)low,
                 (unsigned long long)high);
    return text;
}

/* Says which side is older and which command helps. */
static gradd_status_t refuse_version(const control_host_t *host, const request_t *request,
                                     uint64_t low, uint64_t high) {
    const msgpack_object *given = request->args[2];
    char theirs[64], ours[64], version[80] = "of an unknown version", help[400];
    if (given)
        snprintf(version, sizeof version, "%.*s", (int)given->via.str.size, given->via.str.ptr);
    if (high < PROTOCOL_LOWEST)
        snprintf(help, sizeof help,
                 "the client is the older one: `pip install gradd==" GRADD_VERSION
                 "` where it runs, or `gradd stop --dir %s`, and its next call starts a daemon of "
                 "its own version",
                 host->dir);
    else
        snprintf(
            help, sizeof help,
            "the daemon is the older one: `gradd stop --dir %s` ends it, and the client's next "
            "call starts a daemon of its own version",
            host->dir);
    return GRADD_FAIL(VERSION,
                      "hello: the client, gradd %s, speaks %s, this daemon, gradd %s (pid %d), %s: "
                      "%s",
                      version, range_text(low, high, theirs), GRADD_VERSION, (int)host->owner,
                      range_text(PROTOCOL_LOWEST, PROTOCOL_HIGHEST, ours), help);
}

static gradd_status_t answer_hello(const control_host_t *host, request_t *request) {
    const msgpack_object *range = request->args[0], *client = request->args[1];
    session_t *session = request->session;
    wire_out_t *reply = &request->reply;
    if (wire_count(range) != 2)
        return GRADD_FAIL(VERSION,
                          "hello: field 'proto' has %d entries, expected [lowest, "
                          "highest]",
                          wire_count(range));
    /* A client that connects now will meet another daemon next, which may well speak its
     * version. */
    if (session->surplus)
        return GRADD_FAIL(LIMIT,
                          "hello: %d connections of process %d, or %d of all, are open, the limits "
                          "of daemon %d: close some, or use one session for all models",
                          SESSION_MAX_OF_PROCESS, (int)session->pid, SESSION_MAX, (int)host->owner);
    if (session->late)
        return GRADD_FAIL(STALE,
                          "hello: this daemon, pid %d, is ending after the request in "
                          "progress: connect again",
                          (int)host->owner);
    uint64_t low = wire_u64(wire_at(range, 0)), high = wire_u64(wire_at(range, 1));
    uint64_t chosen = high < PROTOCOL_HIGHEST ? high : PROTOCOL_HIGHEST;
    if (chosen < low || chosen < PROTOCOL_LOWEST) return refuse_version(host, request, low, high);
    const char *name = client ? client->via.str.ptr : "?";
    const size_t name_bytes = client ? client->via.str.size : 1;
    quota_t rule;
    GRADD_TRY(find_quota(host, session, name, name_bytes, &rule));
    GRADD_TRY(session_greet(session, name, name_bytes));
    session_set_quota(session, host->queue, &rule);
    wire_key(reply, "proto");
    wire_put_u64(reply, chosen);
    wire_key(reply, "nonce");
    wire_put_bytes(reply, session->nonce, SESSION_KEY_BYTES);
    wire_key(reply, "version");
    wire_put_text(reply, GRADD_VERSION);
    wire_key(reply, "build");
    wire_put_text(reply, build_id());
    wire_key(reply, "pid");
    wire_put_i64(reply, host->owner);
    wire_key(reply, "worker");
    wire_put_i64(reply, getpid());
    wire_key(reply, "header");
    wire_put_u64(reply, GRADD_HEADER_VERSION);
    wire_key(reply, "device");
    wire_put_text(reply, host->device);
    if (host->uuid) {
        wire_key(reply, "uuid");
        wire_put_text(reply, host->uuid);
    }
    return GRADD_OK;
}

static gradd_status_t check_descriptors(const request_t *request, int expected) {
    if (request->n_fds == expected) return GRADD_OK;
    return GRADD_FAIL(SHM, "%s: %d descriptors came along, expected %d", request->command->name,
                      request->n_fds, expected);
}

/* ---- segments -------------------------------------------------------------------------------- */

enum {
    SEGMENT_ID,
    SEGMENT_BYTES,
    SEGMENT_MEMORY,
    SEGMENT_DEVICE,
    SEGMENT_HEADER,
    SEGMENT_PURPOSE,
    SEGMENT_HANDLE
};

static bool says(const msgpack_object *given, const char *text) {
    return text && given->via.str.size == strlen(text) &&
           !memcmp(given->via.str.ptr, text, given->via.str.size);
}

static gradd_status_t unknown(const msgpack_object *given, const char *field, const char *what,
                              const char *known) {
    const msgpack_object_str *text = &given->via.str;
    return GRADD_FAIL(UNSUPPORTED, "segment: field '%s': there is no %s '%.*s', only %s", field,
                      what, text->size < 60 ? (int)text->size : 60, text->ptr, known);
}

/* By its name or its UUID; absent: the only one. */
static gradd_status_t check_device(const control_host_t *host, const msgpack_object *given) {
    char known[128];
    if (!given || says(given, host->device) || says(given, host->uuid)) return GRADD_OK;
    snprintf(known, sizeof known, "'%s'%s%s", host->device, host->uuid ? ", " : "",
             host->uuid ? host->uuid : "");
    return unknown(given, "device", "device", known);
}

static gradd_status_t read_memory(const msgpack_object *given, gradd_memory_t *out) {
    static const char *const names[] = {
#define MEMORY(symbol, name) name,
        GRADD_MEMORIES(MEMORY)
#undef MEMORY
    };
    for (*out = 0; given && *out < GRADD_N_MEMORIES && !says(given, names[*out]);)
        ++*out;
    if (*out < GRADD_N_MEMORIES) return GRADD_OK;
    return unknown(given, "kind", "kind of segment", "'memfd', 'cuda-vmm', 'cuda-ipc'");
}

/* What memory without a header is for; absent: it does not say. */
static gradd_status_t read_purpose(const msgpack_object *given, uint32_t *out) {
    *out = GRADD_SEGMENT_OTHER;
    while (given && *out < GRADD_SEGMENT_base && !says(given, gradd_segment_purpose_name(*out)))
        ++*out;
    if (*out < GRADD_SEGMENT_base) return GRADD_OK;
    return unknown(given, "purpose", "purpose", "'parameters', 'gradients', 'state', 'ring'");
}

static gradd_status_t take_memfd(const control_host_t *host, request_t *request) {
    const msgpack_object *const *args = request->args;
    const bool headed = args[SEGMENT_HEADER] && wire_flag(args[SEGMENT_HEADER]);
    const bool base = args[SEGMENT_PURPOSE] && says(args[SEGMENT_PURPOSE], "base");
    const int fd = request->fds[0];
    if (base && host->mapper)
        return GRADD_FAIL(UNSUPPORTED, "segment: a base is for the CPU only so far");
    request->fds[0] = -1;
    if (base)
        return gradd_lease_add_base(request->session->lease, wire_u64(args[SEGMENT_ID]), fd,
                                    wire_u64(args[SEGMENT_BYTES]));
    return (headed ? gradd_lease_add_headed
                   : gradd_lease_add)(request->session->lease, wire_u64(args[SEGMENT_ID]), fd,
                                      wire_u64(args[SEGMENT_BYTES]), host->mapper);
}

static gradd_status_t borrow(const control_host_t *host, const request_t *request,
                             gradd_memory_t memory) {
    const msgpack_object *const *args = request->args, *handle = args[SEGMENT_HANDLE];
    gradd_lent_t lent = {memory, -1, NULL, wire_u64(args[SEGMENT_BYTES])};
    uint32_t purpose;
    GRADD_TRY(read_purpose(args[SEGMENT_PURPOSE], &purpose));
    if (memory == GRADD_MEMORY_CUDA_VMM) {
        lent.fd = request->fds[0];
    } else {
        const uint32_t n = handle ? handle->via.bin.size : 0;
        if (n != GRADD_IPC_HANDLE_BYTES)
            return GRADD_FAIL(SHM, "segment: field 'handle': expected %d bytes, got %u",
                              GRADD_IPC_HANDLE_BYTES, (unsigned)n);
        lent.handle = handle->via.bin.ptr;
    }
    return gradd_lease_borrow(request->session->lease, wire_u64(args[SEGMENT_ID]), &lent, purpose,
                              host->mapper);
}

/* A base is counted for none of its sessions. */
static gradd_status_t check_quota(const request_t *request) {
    const msgpack_object *const *args = request->args;
    const uint64_t bytes = wire_u64(args[SEGMENT_BYTES]);
    if (args[SEGMENT_PURPOSE] && says(args[SEGMENT_PURPOSE], "base")) return GRADD_OK;
    return session_check_bytes(request->session, "segment: it",
                               bytes < INT64_MAX ? (int64_t)bytes : INT64_MAX);
}

static gradd_status_t answer_segment(const control_host_t *host, request_t *request) {
    gradd_memory_t memory;
    GRADD_TRY(read_memory(request->args[SEGMENT_MEMORY], &memory));
    GRADD_TRY(check_device(host, request->args[SEGMENT_DEVICE]));
    GRADD_TRY(check_descriptors(request, memory == GRADD_MEMORY_CUDA_IPC ? 0 : 1));
    GRADD_TRY(check_quota(request));
    GRADD_TRY(memory == GRADD_MEMORY_MEMFD ? take_memfd(host, request)
                                           : borrow(host, request, memory));
    wire_key(&request->reply, "id");
    wire_put_u64(&request->reply, wire_u64(request->args[SEGMENT_ID]));
    return GRADD_OK;
}

static gradd_status_t segment_by_engine(worker_t *worker, request_t *request) {
    const control_host_t host = control_host(NULL, 0, worker->device);
    return answer_segment(&host, request);
}

/* Maps the words into a device that has addresses of its own: one page, which takes microseconds.
 */
static gradd_status_t map_marks(const control_host_t *host, request_t *request, uint64_t bytes) {
    if (!host->mapper) return GRADD_OK;
    const int fd = fcntl(request->fds[0], F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return GRADD_FAIL(IO, "timeline: no descriptor: %s", strerror(errno));
    const gradd_status_t st = gradd_segment_open(fd, bytes, host->mapper, &request->session->marks);
    if (st != GRADD_OK) close(fd);
    return st;
}

/* Words that are in use cannot be exchanged. */
static gradd_status_t answer_timeline(const control_host_t *host, request_t *request) {
    session_t *session = request->session;
    const uint64_t bytes = wire_u64(request->args[0]);
    if (session->words.base) return GRADD_FAIL(SHM, "timeline: the session has one");
    if (bytes < TURNS_BYTES || bytes > TURNS_MOST_BYTES)
        return GRADD_FAIL(SHM, "timeline: %llu bytes, expected %d to %d", (unsigned long long)bytes,
                          TURNS_BYTES, TURNS_MOST_BYTES);
    GRADD_TRY(map_marks(host, request, bytes));
    const gradd_status_t st = gradd_segment_open(request->fds[0], bytes, NULL, &session->words);
    if (st == GRADD_OK)
        request->fds[0] = -1;
    else
        gradd_segment_finish(&session->marks);
    return st;
}

static gradd_status_t remove_segment(request_t *request) {
    const uint64_t id = wire_u64(request->args[0]);
    GRADD_TRY(gradd_handle_remove(gradd_lease_table(request->session->lease), id));
    wire_key(&request->reply, "id");
    wire_put_u64(&request->reply, id);
    return GRADD_OK;
}

static gradd_status_t answer_unsegment(const control_host_t *host, request_t *request) {
    (void)host;
    return remove_segment(request);
}

static gradd_status_t unsegment_by_engine(worker_t *worker, request_t *request) {
    (void)worker;
    return remove_segment(request);
}

static const control_row_t rows[] = {
    {.answer = answer_hello,
     .command = {.name = "hello",
                 .lasting = true,
                 .fields = {{.name = "proto", .kind = WIRE_LIST, .item = WIRE_U64, .max = 2},
                            {.name = "client", .kind = WIRE_TEXT, .optional = true, .max = 1024},
                            {.name = "version", .kind = WIRE_TEXT, .optional = true, .max = 64},
                            /* for the owner: the client reads `replaced` */
                            {.name = "replaced", .kind = WIRE_FLAG, .optional = true}}}},
    {.answer = answer_segment,
     .n_fds = -1,
     .is_later = true,
     .command =
         {.name = "segment",
          .handle = segment_by_engine,
          .fields = {[SEGMENT_ID] = {.name = "id", .kind = WIRE_U64},
                     [SEGMENT_BYTES] = {.name = "bytes", .kind = WIRE_U64},
                     [SEGMENT_MEMORY] = {.name = "kind", .kind = WIRE_TEXT, .optional = true},
                     [SEGMENT_DEVICE] = {.name = "device", .kind = WIRE_TEXT, .optional = true},
                     [SEGMENT_HEADER] = {.name = "header", .kind = WIRE_FLAG, .optional = true},
                     [SEGMENT_PURPOSE] = {.name = "purpose", .kind = WIRE_TEXT, .optional = true},
                     [SEGMENT_HANDLE] = {.name = "handle", .kind = WIRE_BYTES, .optional = true}}}},
    {.answer = answer_timeline,
     .n_fds = 1,
     .is_later = true,
     .command = {.name = "timeline", .fields = {{.name = "bytes", .kind = WIRE_U64}}}},
    {.answer = answer_unsegment,
     .command = {.name = "unsegment",
                 .handle = unsegment_by_engine,
                 .fields = {{.name = "id", .kind = WIRE_U64}}}},
};

static const control_row_t *find_row(const msgpack_object_str *name) {
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (strlen(rows[i].command.name) == name->size &&
            !memcmp(rows[i].command.name, name->ptr, name->size))
            return &rows[i];
    return NULL;
}

static gradd_status_t match(const control_row_t *row, request_t *request) {
    static const char *const envelope[] = {"v", "q", NULL};
    const command_t *command = &row->command;
    int n = 0;
    while (n < COMMAND_MAX_FIELDS && command->fields[n].name)
        n++;
    if (!command->lasting)
        GRADD_TRY(wire_check_known(&request->doc, command->name, command->fields, n, envelope));
    GRADD_TRY(wire_match(&request->doc, command->name, command->fields, n, request->args));
    if (row->is_later && request->session->state == SESSION_NEW)
        return GRADD_FAIL(SESSION, "%s: say hello first", command->name);
    return row->n_fds >= 0 ? check_descriptors(request, row->n_fds) : GRADD_OK;
}

static uint64_t sequence_of(const wire_doc_t *doc) {
    const msgpack_object *q = wire_get(doc, "q");
    return q && q->type == MSGPACK_OBJECT_POSITIVE_INTEGER ? q->via.u64 : 0;
}

static gradd_status_t dispatch(const control_host_t *host, request_t *request, bool *out_later) {
    static const wire_field_t verb_field = {.name = "v", .kind = WIRE_TEXT, .max = WIRE_MAX_VERB};
    zmq_msg_t *envelope = &request->envelope;
    const msgpack_object *verb;
    GRADD_TRY(wire_decode(zmq_msg_data(envelope), zmq_msg_size(envelope), &request->doc));
    request->q = sequence_of(&request->doc);
    GRADD_TRY(wire_match(&request->doc, "control", &verb_field, 1, &verb));
    const control_row_t *row = find_row(&verb->via.str);
    if (!row)
        return GRADD_FAIL(UNSUPPORTED, "unknown control verb '%.*s'", (int)verb->via.str.size,
                          verb->via.str.ptr);
    request->command = &row->command;
    GRADD_TRY(match(row, request));
    *out_later = row->command.handle && host->mapper;
    if (*out_later) return GRADD_OK;
    wire_reply_begin(&request->reply, request->q);
    return row->answer(host, request);
}

bool control_reply(const request_t *request) {
    const wire_out_t *reply = &request->reply;
    return !reply->failed &&
           gradd_fd_send(request->session->control, reply->data, reply->bytes, NULL, 0) == GRADD_OK;
}

/* Takes the packet's descriptors. NULL without memory. */
static request_t *take(session_t *session, const gradd_fd_packet_t *packet) {
    zmq_msg_t envelope;
    request_t *request = request_create();
    if (!request || zmq_msg_init_size(&envelope, packet->bytes)) {
        for (int i = 0; i < packet->n_fds; i++)
            gradd_discard(packet->fds[i]);
        request_destroy(request);
        return NULL;
    }
    memcpy(zmq_msg_data(&envelope), packet->data, packet->bytes);
    zmq_msg_move(&request->envelope, &envelope);
    request->session = session;
    request->by_control = true;
    request->n_fds = packet->n_fds;
    memcpy(request->fds, packet->fds, (size_t)packet->n_fds * sizeof *packet->fds);
    return request;
}

/* False when there is no memory or the reply cannot be sent. */
static bool answer(session_t *session, const control_host_t *host, const gradd_fd_packet_t *packet,
                   request_t **out_request) {
    bool later = false;
    request_t *request = take(session, packet);
    if (!request) return false;
    const gradd_status_t st = dispatch(host, request, &later);
    if (later) {
        *out_request = request;
        return true;
    }
    if (st != GRADD_OK)
        log_event(LOG_DEBUG, "control_refused", "session=%u code=%s what=\"%s\"", session->number,
                  gradd_status_name(st), gradd_error_message());
    command_reply(request, st);
    const bool sent = control_reply(request);
    request_destroy(request);
    return sent;
}

control_host_t control_host(const char *dir, pid_t owner, gradd_device_t *device) {
    const gradd_device_info_t *info = gradd_device_info(device);
    return (control_host_t){.dir = dir,
                            .owner = owner,
                            .device = info->name,
                            .uuid = info->uuid,
                            .mapper = device_mapper(device)};
}

void control_read(session_t *session, const control_host_t *host, bool *out_open,
                  request_t **out_request) {
    static uint8_t buffer[CONTROL_MAX_PACKET]; /* one I/O thread */
    *out_open = true;
    *out_request = NULL;
    for (int i = 0; i < PACKETS_PER_CALL && *out_open && !*out_request; i++) {
        int fds[REQUEST_MAX_DESCRIPTORS];
        gradd_fd_packet_t packet = {.data = buffer,
                                    .capacity = sizeof buffer,
                                    .fds = fds,
                                    .max_fds = REQUEST_MAX_DESCRIPTORS};
        gradd_fd_event_t event;
        gradd_status_t st = gradd_fd_recv(session->control, &packet, &event);
        if (st == GRADD_E_LIMIT) {
            wire_out_t reply = {0};
            wire_reply_fail(&reply, 0, st, NULL, gradd_error_message(), "alive");
            *out_open = !reply.failed && gradd_fd_send(session->control, reply.data, reply.bytes,
                                                       NULL, 0) == GRADD_OK;
            wire_out_finish(&reply);
            continue;
        }
        if (st != GRADD_OK || event == GRADD_FD_CLOSED) {
            *out_open = false;
            return;
        }
        if (event == GRADD_FD_AGAIN) return;
        *out_open = answer(session, host, &packet, out_request) && !session->surplus;
    }
}
