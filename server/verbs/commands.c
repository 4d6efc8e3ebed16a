/* The table of verbs and what all verbs share. The list of families comes from the build. */
#include "server/verbs/commands.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "server/session/turns.h"
#include "shm/discard.h"

#define X(family) extern const command_family_t command_family_##family;
#include "cmd_list.inc"
#undef X

static const command_family_t *const families[] = {
#define X(family) &command_family_##family,
#include "cmd_list.inc"
#undef X
};

#define MAX_RELEASES 4096

/* For a request without memory, which is to be answered all the same. */
static request_t spare;
static atomic_bool spare_taken;

static request_t *take_spare(void) {
    if (atomic_exchange(&spare_taken, true)) return NULL;
    memset(&spare, 0, sizeof spare);
    return &spare;
}

request_t *request_create(void) {
    request_t *request = calloc(1, sizeof *request);
    if (!request) request = take_spare();
    if (!request) return NULL;
    zmq_msg_init(&request->envelope);
    for (int i = 0; i < WIRE_MAX_PAYLOADS; i++)
        zmq_msg_init(&request->payloads[i]);
    return request;
}

void request_destroy(request_t *request) {
    if (!request) return;
    wire_doc_finish(&request->doc);
    zmq_msg_close(&request->envelope);
    for (int i = 0; i < WIRE_MAX_PAYLOADS; i++)
        zmq_msg_close(&request->payloads[i]);
    for (int i = 0; i < request->n_fds; i++)
        gradd_discard(request->fds[i]);
    wire_out_finish(&request->reply);
    if (request == &spare)
        atomic_store(&spare_taken, false);
    else
        free(request);
}

const command_t *command_find(const char *name, size_t bytes) {
    for (size_t f = 0; f < sizeof families / sizeof *families; f++)
        for (size_t i = 0; i < families[f]->n; i++) {
            const command_t *row = &families[f]->rows[i];
            if (strlen(row->name) == bytes && memcmp(row->name, name, bytes) == 0) return row;
        }
    return NULL;
}

static int n_fields(const command_t *command) {
    int n = 0;
    while (n < COMMAND_MAX_FIELDS && command->fields[n].name)
        n++;
    return n;
}

static int64_t clamped_ms(uint64_t ms) {
    return ms < INT64_MAX / 1000 ? (int64_t)ms : INT64_MAX;
}

gradd_status_t command_match(request_t *request) {
    static const wire_field_t common[] = {
        {.name = "rel", .kind = WIRE_LIST, .item = WIRE_U64, .optional = true, .max = MAX_RELEASES},
        {.name = "turn", .kind = WIRE_U64, .optional = true},
        {.name = "chain", .kind = WIRE_U64, .optional = true},
        {.name = "wait", .kind = WIRE_U64, .optional = true},
    };
    static const char *const envelope[] = {"v", "q", "t", "rel", "turn", "chain", "wait", NULL};
    const msgpack_object *found[4];
    const command_t *row = request->command;
    const int n = n_fields(row);
    if (request->n_payloads > row->max_payloads)
        return GRADD_FAIL(LIMIT, "%s: %d payload frames, expected at most %d", row->name,
                          request->n_payloads, row->max_payloads);
    if (!row->lasting)
        GRADD_TRY(wire_check_known(&request->doc, row->name, row->fields, n, envelope));
    GRADD_TRY(wire_match(&request->doc, row->name, common, 4, found));
    request->rel = found[0];
    request->turn = found[1] ? wire_u64(found[1]) : 0;
    request->chain = found[2] ? wire_u64(found[2]) : 0;
    request->wait_ms = found[3] ? clamped_ms(wire_u64(found[3])) : -1;
    if (request->turn && !(request->session && turns_ready(request->session)))
        return GRADD_FAIL(SESSION, "%s: field 'turn': the session has no timeline", row->name);
    return wire_match(&request->doc, row->name, row->fields, n, request->args);
}

void command_reply(request_t *request, gradd_status_t status) {
    wire_out_t *reply = &request->reply;
    /* A client cancelled because the daemon ends has no session any more: it must not take this for
     * a failure of its request. */
    const char *session = !request->session ? NULL : request->session->cancel ? "lost" : "alive";
    if (status == GRADD_OK) wire_end(reply);
    if (status == GRADD_OK && reply->failed) status = GRADD_FAIL(NOMEM, "no memory for the reply");
    if (status == GRADD_OK && reply->bytes > WIRE_MAX_REPLY)
        status = GRADD_FAIL(LIMIT, "%s: the reply has %zu bytes, more than %u",
                            request->command->name, reply->bytes, WIRE_MAX_REPLY);
    request->status = status;
    if (status == GRADD_OK) return;
    reply->failed = false;
    if (!session && status == GRADD_E_SESSION) session = "lost";
    wire_reply_fail(reply, request->q, status, request->command ? request->command->name : NULL,
                    gradd_error_message(), session);
}

void request_go_on(request_t *request, const uint64_t *word, uint64_t value,
                   gradd_status_t (*rest)(struct worker_s *worker, struct request_s *request)) {
    request->job.word = word;
    request->job.told = false;
    request->job.value = value;
    request->rest = rest;
}

int64_t command_now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

void command_put_times(request_t *request) {
    wire_out_t *reply = &request->reply;
    const int64_t now = command_now_us(), ran = request->ran_us + now - request->entered_us;
    request->arena_bytes = atomic_load(&request->session->counts.arena_bytes);
    wire_key(reply, "arena");
    wire_put_i64(reply, request->arena_bytes);
    wire_key(reply, "us");
    wire_put_map(reply, 3);
    wire_put_text(reply, "at");
    wire_put_i64(reply, request->arrived_us);
    wire_put_text(reply, "queued");
    wire_put_i64(reply, now - request->arrived_us - ran);
    wire_put_text(reply, "ran");
    wire_put_i64(reply, ran);
}
