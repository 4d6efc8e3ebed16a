/* The file of `gradd trace`: a process for each client, with lanes of its own work, the queue and
 * the engine's work for it, and a counter of the memory of its runs. See trace.h. */
#include "server/cli/trace.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "server/cli/admin.h"
#include "server/explain/explain_report.h"
#include "server/wire/print.h"

#define ANSWER_MS    5000
#define CLIENT_BYTES 64
#define MAX_TRACKS   8192 /* more than a daemon has sessions and remembers requests */

typedef enum lane_number_e {
    TRAINER = 1,
    QUEUE,
    FORWARD,
    BACKWARD,
    OPTIMIZER,
    OTHER
} lane_number_t;

static const char *const lanes[] = {
    [TRAINER] = "trainer",   [QUEUE] = "queue",         [FORWARD] = "forward",
    [BACKWARD] = "backward", [OPTIMIZER] = "optimizer", [OTHER] = "other requests",
};

/* A session as the file shows it. */
typedef struct track_s {
    uint64_t session;
    int64_t pid, ended_us; /* of its last request; 0 = there was none */
} track_t;

typedef struct tracks_s {
    track_t list[MAX_TRACKS];
    int n;
} tracks_t;

/* ---- events ---------------------------------------------------------------------------------- */

static FILE *event(trace_t *trace, const track_t *track, int lane, const char *name) {
    fputs(trace->n_events++ ? ",\n{\"name\": " : "[\n{\"name\": ", trace->out);
    explain_json_text(trace->out, name);
    fprintf(trace->out, ", \"pid\": %" PRId64 ", \"tid\": %" PRIu64 ", ", track->pid,
            track->session * 10 + (uint64_t)lane);
    return trace->out;
}

static void put_name(trace_t *trace, const track_t *track, int lane, const char *what,
                     const char *name) {
    FILE *out = event(trace, track, lane, what);
    fputs("\"ph\": \"M\", \"args\": {\"name\": ", out);
    explain_json_text(out, name);
    fputs("}}", out);
}

static void put_slice(trace_t *trace, const track_t *track, int lane, const char *name,
                      const int64_t times[2]) {
    fprintf(event(trace, track, lane, name),
            "\"ph\": \"X\", \"ts\": %" PRId64 ", \"dur\": %" PRId64 "}", times[0], times[1]);
}

static void put_memory(trace_t *trace, const track_t *track, int64_t at_us, int64_t bytes) {
    fprintf(event(trace, track, 0, "activations"),
            "\"ph\": \"C\", \"ts\": %" PRId64 ", \"args\": {\"MiB\": %.3f}}", at_us,
            (double)bytes / (1 << 20));
}

/* ---- requests -------------------------------------------------------------------------------- */

static int lane_of(const char *verb) {
    if (!strcmp(verb, "forward")) return FORWARD;
    if (!strcmp(verb, "backward")) return BACKWARD;
    return strcmp(verb, "step") ? OTHER : OPTIMIZER;
}

static track_t *begin_track(trace_t *trace, tracks_t *tracks, uint64_t session, int64_t pid,
                            const char *client) {
    char title[160];
    if (tracks->n == MAX_TRACKS) return NULL;
    track_t *track = &tracks->list[tracks->n++];
    *track = (track_t){.session = session, .pid = pid};
    snprintf(title, sizeof title, "%s, session %" PRIu64, client, session);
    put_name(trace, track, 0, "process_name", title);
    for (int lane = TRAINER; lane <= OTHER; lane++)
        put_name(trace, track, lane, "thread_name", lanes[lane]);
    return track;
}

static track_t *find_track(trace_t *trace, tracks_t *tracks, uint64_t session) {
    for (int i = 0; i < tracks->n; i++)
        if (tracks->list[i].session == session) return &tracks->list[i];
    /* its client is gone, and so is what it was; no process has such a number */
    return begin_track(trace, tracks, session, ((int64_t)1 << 32) + (int64_t)session, "ended");
}

static void put_request(trace_t *trace, tracks_t *tracks, const msgpack_object *request) {
    char verb[WIRE_MAX_VERB + 1];
    track_t *track = find_track(trace, tracks, (uint64_t)reply_number(request, "session"));
    if (!track) return;
    reply_text(request, "v", verb, sizeof verb);
    const int64_t at = reply_number(request, "at"), queued = reply_number(request, "queued");
    const int64_t began = at + queued, ran = reply_number(request, "ran");
    if (track->ended_us && at > track->ended_us)
        put_slice(trace, track, TRAINER, "trainer",
                  (int64_t[]){track->ended_us, at - track->ended_us});
    put_slice(trace, track, QUEUE, verb, (int64_t[]){at, queued});
    put_slice(trace, track, lane_of(verb), verb, (int64_t[]){began, ran});
    put_memory(trace, track, began, reply_number(request, "arena"));
    put_memory(trace, track, began + ran, reply_number(request, "rest"));
    track->ended_us = began + ran;
    trace->n_requests++;
}

static gradd_status_t put_all(trace_t *trace, const rundir_t *dir, const wire_doc_t *doc) {
    const msgpack_object *sessions = wire_get(doc, "sessions"), *done = wire_get(doc, "done");
    char client[CLIENT_BYTES + 1];
    static tracks_t tracks; /* large */
    tracks.n = 0;
    if (!sessions || sessions->type != MSGPACK_OBJECT_ARRAY || !done ||
        done->type != MSGPACK_OBJECT_ARRAY)
        return GRADD_FAIL(IO,
                          "the daemon at %s does not tell its last requests (it is of another "
                          "version: gradd stop ends it)",
                          dir->path);
    for (int i = 0; i < wire_count(sessions); i++) {
        const msgpack_object *s = wire_at(sessions, i);
        begin_track(trace, &tracks, (uint64_t)reply_number(s, "session"), reply_number(s, "pid"),
                    reply_text(s, "client", client, sizeof client));
    }
    for (int i = 0; i < wire_count(done); i++)
        put_request(trace, &tracks, wire_at(done, i));
    return GRADD_OK;
}

gradd_status_t trace_daemon(const rundir_t *dir, void *context) {
    trace_t *trace = context;
    zmq_msg_t reply;
    wire_doc_t doc = {0};
    wire_out_t out = {0};
    trace->n_daemons++;
    zmq_msg_init(&reply);
    wire_begin(&out);
    wire_key(&out, "v");
    wire_put_text(&out, "trace");
    wire_key(&out, "q");
    wire_put_u64(&out, 1);
    wire_key(&out, "since");
    wire_put_i64(&out, trace->since_us);
    wire_end(&out);
    gradd_status_t st = admin_ask(dir->cmd, &out, ANSWER_MS, &reply, &doc);
    wire_out_finish(&out);
    if (st == GRADD_OK) st = put_all(trace, dir, &doc);
    wire_doc_finish(&doc);
    zmq_msg_close(&reply);
    return st;
}

/* ---- the file -------------------------------------------------------------------------------- */

gradd_status_t trace_open(trace_t *trace, const options_t *options) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    const int64_t now = (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
    const int64_t since = options->seconds ? now - options->seconds * 1000000 : 0;
    *trace = (trace_t){.path = options->out, .since_us = since > 0 ? since : 0};
    trace->out = fopen(trace->path, "we");
    if (!trace->out) return GRADD_FAIL(IO, "cannot write %s: %s", trace->path, strerror(errno));
    return GRADD_OK;
}

gradd_status_t trace_close(trace_t *trace, gradd_status_t status) {
    fputs(trace->n_events ? "\n]\n" : "[]\n", trace->out);
    bool bad = ferror(trace->out) != 0;
    bad |= fclose(trace->out) != 0;
    if (status == GRADD_OK && bad)
        status = GRADD_FAIL(IO, "cannot write %s: %s", trace->path, strerror(errno));
    if (status != GRADD_OK || !trace->n_daemons)
        unlink(trace->path);
    else
        printf("%d requests of %d daemon%s in %s: open it at https://ui.perfetto.dev\n",
               trace->n_requests, trace->n_daemons, trace->n_daemons == 1 ? "" : "s", trace->path);
    return status;
}
