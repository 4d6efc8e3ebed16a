/* Verbs of the control socket, one row each. See control.h. */
#include "server/daemon/control.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/daemon/accept_budget.h"
#include "server/daemon/build.h"
#include "server/host/log.h"
#include "server/session/turns.h"
#include "server/wire/version.h"
#include "server/wire/wire.h"
#include "shm/discard.h"
#include "shm/fdpass.h"

#define MAX_ARGS         7
#define MAX_DESCRIPTORS  4
#define PACKETS_PER_CALL 8

typedef struct packet_s {
    session_t *session;
    const control_host_t *host;
    const msgpack_object *args[MAX_ARGS];
    int fds[MAX_DESCRIPTORS]; /* Owned; -1 once handed on */
    int n_fds;
    const char *verb; /* NULL while it is not known */
    wire_out_t *reply;
} packet_t;

typedef struct control_row_s {
    const char *name;
    gradd_status_t (*handle)(packet_t *packet);
    int n_fds;    /* -1: the verb looks at them itself */
    bool lasting; /* as in commands.h */
    wire_field_t fields[MAX_ARGS];
} control_row_t;

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
static gradd_status_t refuse_version(const packet_t *packet, uint64_t low, uint64_t high) {
    const msgpack_object *given = packet->args[2];
    char theirs[64], ours[64], version[80] = "of an unknown version", help[400];
    if (given)
        snprintf(version, sizeof version, "%.*s", (int)given->via.str.size, given->via.str.ptr);
    if (high < PROTOCOL_LOWEST)
        snprintf(help, sizeof help,
                 "the client is the older one: `pip install gradd==" GRADD_VERSION
                 "` where it runs, or `gradd stop --dir %s`, and its next call starts a daemon of "
                 "its own version",
                 packet->host->dir);
    else
        snprintf(
            help, sizeof help,
            "the daemon is the older one: `gradd stop --dir %s` ends it, and the client's next "
            "call starts a daemon of its own version",
            packet->host->dir);
    return GRADD_FAIL(VERSION,
                      "hello: the client, gradd %s, speaks %s, this daemon, gradd %s (pid %d), %s: "
                      "%s",
                      version, range_text(low, high, theirs), GRADD_VERSION, (int)getpid(),
                      range_text(PROTOCOL_LOWEST, PROTOCOL_HIGHEST, ours), help);
}

static gradd_status_t handle_hello(packet_t *packet) {
    const msgpack_object *range = packet->args[0], *client = packet->args[1];
    if (wire_count(range) != 2)
        return GRADD_FAIL(VERSION,
                          "hello: field 'proto' has %d entries, expected [lowest, "
                          "highest]",
                          wire_count(range));
    /* A client that connects now will meet another daemon next, which may well speak its
     * version. */
    if (packet->session->surplus)
        return GRADD_FAIL(LIMIT,
                          "hello: %d connections of process %d, or %d of all, are open, the limits "
                          "of daemon %d: close some, or use one session for all models",
                          SESSION_MAX_OF_PROCESS, (int)packet->session->pid, SESSION_MAX,
                          (int)getpid());
    if (packet->session->late)
        return GRADD_FAIL(STALE,
                          "hello: this daemon, pid %d, is ending after the request in "
                          "progress: connect again",
                          (int)getpid());
    uint64_t low = wire_u64(wire_at(range, 0)), high = wire_u64(wire_at(range, 1));
    uint64_t chosen = high < PROTOCOL_HIGHEST ? high : PROTOCOL_HIGHEST;
    if (chosen < low || chosen < PROTOCOL_LOWEST) return refuse_version(packet, low, high);
    GRADD_TRY(session_greet(packet->session, client ? client->via.str.ptr : "?",
                            client ? client->via.str.size : 1));
    wire_key(packet->reply, "proto");
    wire_put_u64(packet->reply, chosen);
    wire_key(packet->reply, "nonce");
    wire_put_bytes(packet->reply, packet->session->nonce, SESSION_KEY_BYTES);
    wire_key(packet->reply, "version");
    wire_put_text(packet->reply, GRADD_VERSION);
    wire_key(packet->reply, "build");
    wire_put_text(packet->reply, build_id());
    wire_key(packet->reply, "pid");
    wire_put_i64(packet->reply, getpid());
    wire_key(packet->reply, "header");
    wire_put_u64(packet->reply, GRADD_HEADER_VERSION);
    wire_key(packet->reply, "device");
    wire_put_text(packet->reply, packet->host->device);
    if (packet->host->uuid) {
        wire_key(packet->reply, "uuid");
        wire_put_text(packet->reply, packet->host->uuid);
    }
    return GRADD_OK;
}

static gradd_status_t check_descriptors(const packet_t *packet, int expected) {
    if (packet->n_fds == expected) return GRADD_OK;
    return GRADD_FAIL(SHM, "%s: %d descriptors came along, expected %d", packet->verb,
                      packet->n_fds, expected);
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
static gradd_status_t check_device(const packet_t *packet) {
    const msgpack_object *given = packet->args[SEGMENT_DEVICE];
    const control_host_t *host = packet->host;
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
    while (given && *out < GRADD_N_SEGMENT_PURPOSES &&
           !says(given, gradd_segment_purpose_name(*out)))
        ++*out;
    if (*out < GRADD_N_SEGMENT_PURPOSES) return GRADD_OK;
    return unknown(given, "purpose", "purpose", "'parameters', 'gradients', 'state', 'ring'");
}

static gradd_status_t take_memfd(packet_t *packet) {
    const uint64_t id = wire_u64(packet->args[SEGMENT_ID]);
    const uint64_t bytes = wire_u64(packet->args[SEGMENT_BYTES]);
    const bool headed = packet->args[SEGMENT_HEADER] && wire_flag(packet->args[SEGMENT_HEADER]);
    const int fd = packet->fds[0];
    packet->fds[0] = -1;
    return (headed ? gradd_lease_add_headed : gradd_lease_add)(packet->session->lease, id, fd,
                                                               bytes, packet->host->mapper);
}

static gradd_status_t borrow(const packet_t *packet, gradd_memory_t memory) {
    const msgpack_object *handle = packet->args[SEGMENT_HANDLE];
    gradd_lent_t lent = {memory, -1, NULL, wire_u64(packet->args[SEGMENT_BYTES])};
    uint32_t purpose;
    GRADD_TRY(read_purpose(packet->args[SEGMENT_PURPOSE], &purpose));
    if (memory == GRADD_MEMORY_CUDA_VMM) {
        lent.fd = packet->fds[0];
    } else {
        const uint32_t n = handle ? handle->via.bin.size : 0;
        if (n != GRADD_IPC_HANDLE_BYTES)
            return GRADD_FAIL(SHM, "segment: field 'handle': expected %d bytes, got %u",
                              GRADD_IPC_HANDLE_BYTES, (unsigned)n);
        lent.handle = handle->via.bin.ptr;
    }
    return gradd_lease_borrow(packet->session->lease, wire_u64(packet->args[SEGMENT_ID]), &lent,
                              purpose, packet->host->mapper);
}

static gradd_status_t handle_segment(packet_t *packet) {
    gradd_memory_t memory;
    GRADD_TRY(read_memory(packet->args[SEGMENT_MEMORY], &memory));
    GRADD_TRY(check_device(packet));
    GRADD_TRY(check_descriptors(packet, memory == GRADD_MEMORY_CUDA_IPC ? 0 : 1));
    if (packet->session->state == SESSION_NEW)
        return GRADD_FAIL(SESSION, "segment: say hello first");
    GRADD_TRY(memory == GRADD_MEMORY_MEMFD ? take_memfd(packet) : borrow(packet, memory));
    wire_key(packet->reply, "id");
    wire_put_u64(packet->reply, wire_u64(packet->args[SEGMENT_ID]));
    return GRADD_OK;
}

/* Maps the words into a device that has addresses of its own. */
static gradd_status_t map_marks(packet_t *packet, uint64_t bytes) {
    const gradd_mapper_t *mapper = packet->host->mapper;
    if (!mapper) return GRADD_OK;
    const int fd = fcntl(packet->fds[0], F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return GRADD_FAIL(IO, "timeline: no descriptor: %s", strerror(errno));
    const gradd_status_t st = gradd_segment_open(fd, bytes, mapper, &packet->session->marks);
    if (st != GRADD_OK) close(fd);
    return st;
}

/* Words that are in use cannot be exchanged. */
static gradd_status_t handle_timeline(packet_t *packet) {
    session_t *session = packet->session;
    const uint64_t bytes = wire_u64(packet->args[0]);
    if (session->state == SESSION_NEW) return GRADD_FAIL(SESSION, "timeline: say hello first");
    if (session->words.base) return GRADD_FAIL(SHM, "timeline: the session has one");
    if (bytes < TURNS_BYTES)
        return GRADD_FAIL(SHM, "timeline: %llu bytes, expected at least %d",
                          (unsigned long long)bytes, TURNS_BYTES);
    GRADD_TRY(map_marks(packet, bytes));
    const gradd_status_t st = gradd_segment_open(packet->fds[0], bytes, NULL, &session->words);
    if (st == GRADD_OK)
        packet->fds[0] = -1;
    else
        gradd_segment_finish(&session->marks);
    return st;
}

static gradd_status_t handle_unsegment(packet_t *packet) {
    uint64_t id = wire_u64(packet->args[0]);
    GRADD_TRY(gradd_handle_remove(gradd_lease_table(packet->session->lease), id));
    wire_key(packet->reply, "id");
    wire_put_u64(packet->reply, id);
    return GRADD_OK;
}

static const control_row_t rows[] = {
    {.name = "hello",
     .handle = handle_hello,
     .lasting = true,
     .fields = {{.name = "proto", .kind = WIRE_LIST, .item = WIRE_U64, .max = 2},
                {.name = "client", .kind = WIRE_TEXT, .optional = true, .max = 1024},
                {.name = "version", .kind = WIRE_TEXT, .optional = true, .max = 64}}},
    {.name = "segment",
     .handle = handle_segment,
     .n_fds = -1,
     .fields = {[SEGMENT_ID] = {.name = "id", .kind = WIRE_U64},
                [SEGMENT_BYTES] = {.name = "bytes", .kind = WIRE_U64},
                [SEGMENT_MEMORY] = {.name = "kind", .kind = WIRE_TEXT, .optional = true},
                [SEGMENT_DEVICE] = {.name = "device", .kind = WIRE_TEXT, .optional = true},
                [SEGMENT_HEADER] = {.name = "header", .kind = WIRE_FLAG, .optional = true},
                [SEGMENT_PURPOSE] = {.name = "purpose", .kind = WIRE_TEXT, .optional = true},
                [SEGMENT_HANDLE] = {.name = "handle", .kind = WIRE_BYTES, .optional = true}}},
    {.name = "timeline",
     .handle = handle_timeline,
     .n_fds = 1,
     .fields = {{.name = "bytes", .kind = WIRE_U64}}},
    {.name = "unsegment", .handle = handle_unsegment, .fields = {{.name = "id", .kind = WIRE_U64}}},
};

static gradd_status_t dispatch(packet_t *packet, const wire_doc_t *doc) {
    static const wire_field_t verb_field = {.name = "v", .kind = WIRE_TEXT, .max = WIRE_MAX_VERB};
    static const char *const envelope[] = {"v", "q", NULL};
    const msgpack_object *verb;
    GRADD_TRY(wire_match(doc, "control", &verb_field, 1, &verb));
    const msgpack_object_str *name = &verb->via.str;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const control_row_t *row = &rows[i];
        int n = 0;
        if (strlen(row->name) != name->size || memcmp(row->name, name->ptr, name->size) != 0)
            continue;
        packet->verb = row->name;
        while (n < MAX_ARGS && row->fields[n].name)
            n++;
        if (!row->lasting) GRADD_TRY(wire_check_known(doc, row->name, row->fields, n, envelope));
        GRADD_TRY(wire_match(doc, row->name, row->fields, n, packet->args));
        if (row->n_fds >= 0) GRADD_TRY(check_descriptors(packet, row->n_fds));
        return row->handle(packet);
    }
    return GRADD_FAIL(UNSUPPORTED, "unknown control verb '%.*s'", (int)name->size, name->ptr);
}

static uint64_t sequence_of(const wire_doc_t *doc) {
    const msgpack_object *q = wire_get(doc, "q");
    return q && q->type == MSGPACK_OBJECT_POSITIVE_INTEGER ? q->via.u64 : 0;
}

/* False when the reply cannot be sent. */
static bool answer(session_t *session, const control_host_t *host, const void *data, size_t bytes,
                   int *fds, int n_fds) {
    wire_out_t reply = {0};
    wire_doc_t doc = {0};
    packet_t packet = {.session = session, .host = host, .n_fds = n_fds, .reply = &reply};
    memcpy(packet.fds, fds, (size_t)n_fds * sizeof *fds);
    gradd_status_t st = wire_decode(data, bytes, &doc);
    uint64_t q = sequence_of(&doc);
    wire_reply_begin(&reply, q);
    if (st == GRADD_OK) st = dispatch(&packet, &doc);
    if (st == GRADD_OK) {
        wire_end(&reply);
    } else {
        log_event(LOG_DEBUG, "control_refused", "session=%u code=%s what=\"%s\"", session->number,
                  gradd_status_name(st), gradd_error_message());
        wire_reply_fail(&reply, q, st, packet.verb, gradd_error_message(), "alive");
    }
    for (int i = 0; i < n_fds; i++)
        gradd_discard(packet.fds[i]);
    bool sent = !reply.failed &&
                gradd_fd_send(session->control, reply.data, reply.bytes, NULL, 0) == GRADD_OK;
    wire_doc_finish(&doc);
    wire_out_finish(&reply);
    return sent;
}

gradd_status_t control_accept(session_table_t *table, int listener, uid_t uid,
                              session_t **out_session) {
    *out_session = NULL;
    int fd = gate_accept(listener);
    uint64_t ticks = gradd_lease_clock_ticks();
    if (fd < 0) {
        if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) return GRADD_OK;
        return GRADD_FAIL(IO, "accept: %s", strerror(errno));
    }
    return session_create(table, fd, ticks, uid, out_session);
}

void control_read(session_t *session, const control_host_t *host, bool *out_open) {
    static uint8_t buffer[CONTROL_MAX_PACKET]; /* one I/O thread */
    *out_open = true;
    for (int i = 0; i < PACKETS_PER_CALL && *out_open; i++) {
        int fds[MAX_DESCRIPTORS];
        gradd_fd_packet_t packet = {
            .data = buffer, .capacity = sizeof buffer, .fds = fds, .max_fds = MAX_DESCRIPTORS};
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
        *out_open =
            answer(session, host, buffer, packet.bytes, fds, packet.n_fds) && !session->surplus;
    }
}
