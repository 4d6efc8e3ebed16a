/* Verbs of the command channel: one row each, found by the build from the files cmd_*.c.
 *
 * A row gives the verb's name, its fields and the thread that runs it: `io` runs at once in the I/O
 * thread and must be short; `run` is queued for the engine thread. Fields are decoded and checked
 * before the handler sees them, as request->args in the order of the row. A handler appends its own
 * keys to request->reply, which has `ok` and `q` already; on failure all of it is replaced.
 *
 * A new verb is one row in a file cmd_<theme>.c, of server/verbs if the engine thread runs it, of
 * server/daemon if the I/O thread answers it:
 *
 *     GRADD_COMMANDS(theme, {.name = "verb", .handle = verb_handle, .needs_session = true,
 *                             .fields = {{.name = "plan", .kind = WIRE_U64}}});
 */
#ifndef GRADD_SERVER_VERBS_COMMANDS_H
#define GRADD_SERVER_VERBS_COMMANDS_H

#include <zmq.h>

#include "server/session/queue.h"
#include "server/session/session.h"
#include "server/wire/wire.h"

#define COMMAND_MAX_FIELDS      20
#define REQUEST_MAX_DESCRIPTORS 4

struct daemon_s;
struct worker_s;
struct request_s;

typedef struct command_s {
    const char *name;
    gradd_status_t (*io)(struct daemon_s *daemon, struct request_s *request);
    gradd_status_t (*handle)(struct worker_s *worker, struct request_s *request);
    bool needs_session; /* a valid token; without it only the uid is known, and session is NULL */
    bool
        lasting; /* spoken by all versions of the protocol: fields that are not known are ignored */
    bool is_step;      /* what `ps` counts as a step of a training */
    bool ends_session; /* the session ends when the reply has been sent */
    int max_payloads;
    wire_field_t fields[COMMAND_MAX_FIELDS]; /* ends at the first without a name */
} command_t;

typedef struct command_family_s {
    const command_t *rows;
    size_t n;
} command_family_t;

#define GRADD_COMMANDS(family, ...)                                                                \
    static const command_t command_list_##family[] = {__VA_ARGS__};                                \
    extern const command_family_t command_family_##family;                                         \
    const command_family_t command_family_##family = {                                             \
        command_list_##family, sizeof command_list_##family / sizeof command_list_##family[0]}

/* One request on its way. Owned by the I/O thread, lent to the engine between push and reap. */
typedef struct request_s {
    job_t job;                /* first: queue.h hands out this pointer */
    const command_t *command; /* NULL: the session's end, see worker_handle */
    session_t *session;       /* Borrowed; NULL where the verb needs none */
    uint64_t q;
    uint32_t uid;
    uint8_t route[SESSION_ROUTE_BYTES];
    uint8_t n_route;
    int source;         /* Borrowed: its connection, which may have ended */
    zmq_msg_t envelope; /* what `doc` points into */
    zmq_msg_t payloads[WIRE_MAX_PAYLOADS];
    int n_payloads;
    uint64_t payload_bytes;
    int n_frames; /* that came, with the envelope */
    wire_doc_t doc;
    const msgpack_object *args[COMMAND_MAX_FIELDS]; /* NULL: an optional field is missing */
    const msgpack_object *rel;                      /* runs to release first, or NULL */
    uint64_t turn, chain;                           /* see turns.h; 0 = it has none */
    int64_t wait_ms; /* that its run waits for memory; INT64_MAX = for ever, -1 = it does not say */
    bool by_control; /* it came by the control socket, with these: */
    int fds[REQUEST_MAX_DESCRIPTORS], n_fds; /* Owned; -1 once handed on */
    /* What is left to do once the word of `job` is there; NULL = nothing. See request_go_on. */
    gradd_status_t (*rest)(struct worker_s *worker, struct request_s *request);
    gradd_status_t status; /* result; `reply` is complete either way */
    wire_out_t reply;
    int64_t arrived_us; /* the rest is the engine thread's: */
    int64_t started_us, ended_us;
    int64_t entered_us, ran_us; /* since when it runs this time; before, where it was put aside */
    int64_t arena_bytes;        /* of the session's runs, meanwhile */
} request_t;

request_t *request_create(void); /* NULL without memory */
void request_destroy(request_t *request);

/* NULL when there is no such verb. */
const command_t *command_find(const char *name, size_t bytes);
/* Fills args and rel from the decoded envelope; also checks the number of payload frames. */
gradd_status_t command_match(request_t *request);
/* Completes request->reply from what a handler returned. */
void command_reply(request_t *request, gradd_status_t status);

/* For a handler that returns GRADD_OK before the request is done: `rest` goes on once *word is at
 * least `value`. Until then the session's other requests wait, and nothing else. Without a word the
 * request is put aside: it goes on when its session is next. */
void request_go_on(request_t *request, const uint64_t *word, uint64_t value,
                   gradd_status_t (*rest)(struct worker_s *worker, struct request_s *request));

int64_t command_now_us(void);
/* Puts when the request came, the microseconds that it waited and ran so far, and the bytes of the
 * session's runs into its reply. */
void command_put_times(request_t *request);

#endif
