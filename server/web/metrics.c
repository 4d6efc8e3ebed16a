/* See metrics.h. */
#include "server/web/metrics.h"

#include <math.h>
#include <string.h>

#include "server/wire/print.h"

#define GAUGE   "gauge"
#define COUNTER "counter"

enum {
    UP,
    UPTIME,
    DRAINED,
    RESTARTS,
    SESSIONS,              /* seven states */
    KEPT = SESSIONS + 7,   /* in use or not */
    WAITING = KEPT + 2,    /* requests */
    STEPS_PER_SECOND,      /* now, of all */
    BUSY,                  /* the same */
    FALLBACKS,             /* the same */
    WANTED,                /* bytes */
    BYTES,                 /* eight kinds */
    LIMIT = BYTES + 8,     /* bytes */
    RAN,                   /* five phases */
    WAITED = RAN + 5,      /* the same */
    REQUESTS = WAITED + 5, /* the same */
    FAILED = REQUESTS + 5, /* requests */
    REFUSED,
    N_VALUES
};
_Static_assert(N_VALUES <= METRICS_VALUES, "metrics_t has a place for each");

#define N_STATES 7
#define N_KINDS  8
#define N_PHASES 5
static const char *const states[N_STATES] = {"connecting", "idle",    "queued", "running",
                                             "waiting",    "stalled", "closing"};
static const char *const kinds[N_KINDS] = {"parameters", "gradients",   "state", "ring",
                                           "other",      "activations", "kept",  "base"};
static const char *const phases[N_PHASES] = {"forward", "backward", "optimizer", "plan", "other"};

typedef struct family_s {
    const char *name, *type, *help;
    int first, n;
    const char *label; /* NULL: there is one value */
    const char *const *names;
} family_t;

static const char *const uses[] = {"0", "1"};

static const family_t families[] = {
    {"up",                     GAUGE,   "1: the daemon answers",                               UP,               1,        NULL,    NULL  },
    {"uptime_seconds",         GAUGE,   "since the daemon has started",                        UPTIME,           1,        NULL,    NULL  },
    {"drained",                GAUGE,   "1: it begins no requests",                            DRAINED,          1,        NULL,    NULL  },
    {"worker_restarts_total",  COUNTER, "workers that have died and were replaced",            RESTARTS,         1,
     NULL,                                                                                                                          NULL  },
    {"sessions",               GAUGE,   "clients, by what they do",                            SESSIONS,         N_STATES, "state", states},
    {"kept_sessions",          GAUGE,   "sessions with a name, by whether a process has them", KEPT,             2,
     "in_use",                                                                                                                      uses  },
    {"waiting_requests",       GAUGE,   "requests that wait for the engine",                   WAITING,          1,        NULL,    NULL  },
    {"steps_per_second",       GAUGE,   "backwards lately, of all sessions",                   STEPS_PER_SECOND, 1,        NULL,
     NULL                                                                                                                                 },
    {"engine_busy_ratio",      GAUGE,   "part of the last seconds in which the engine worked", BUSY,             1,
     NULL,                                                                                                                          NULL  },
    {"fallbacks",              GAUGE,   "reasons for which parts of models run in PyTorch",    FALLBACKS,        1,        NULL,
     NULL                                                                                                                                 },
    {"memory_bytes",           GAUGE,   "memory of sessions by kind",                          BYTES,            N_KINDS,  "kind",  kinds },
    {"wanted_bytes",           GAUGE,   "activations for which sessions wait",                 WANTED,           1,        NULL,    NULL  },
    {"memory_limit_bytes",     GAUGE,   "limit of all activations together",                   LIMIT,            1,        NULL,    NULL  },
    {"step_seconds_total",     COUNTER, "time of the engine by phase",                         RAN,              N_PHASES, "phase", phases},
    {"wait_seconds_total",     COUNTER, "time of requests in the queue by phase",              WAITED,           N_PHASES,
     "phase",                                                                                                                       phases},
    {"requests_total",         COUNTER, "requests that were carried out by phase",             REQUESTS,         N_PHASES,
     "phase",                                                                                                                       phases},
    {"failed_requests_total",  COUNTER, "requests that have failed in the engine",             FAILED,           1,        NULL,
     NULL                                                                                                                                 },
    {"refused_requests_total", COUNTER, "requests that were refused",                          REFUSED,          1,        NULL,    NULL  },
};
#define N_FAMILIES (sizeof families / sizeof *families)

/* ---- reading ---- */

static int find(const char *const *names, int n, const char *name) {
    for (int i = 0; i < n; i++)
        if (strcmp(names[i], name) == 0) return i;
    return -1;
}

static int phase_of(const char *verb) {
    if (!strcmp(verb, "step")) return find(phases, N_PHASES, "optimizer");
    if (!strncmp(verb, "graph.", 6)) return find(phases, N_PHASES, "plan");
    const int phase = find(phases, N_PHASES, verb);
    return phase >= 0 ? phase : N_PHASES - 1;
}

static void take_session(double *values, const msgpack_object *session) {
    char state[24];
    const int at = find(states, N_STATES, reply_text(session, "state", state, sizeof state));
    const msgpack_object *bytes = wire_in(session, "segment_kinds");
    if (at >= 0) values[SESSIONS + at]++;
    values[WAITING] += (double)reply_number(session, "waiting");
    values[FALLBACKS] += (double)reply_number(session, "fallbacks");
    values[WANTED] += (double)reply_number(session, "wanted_bytes");
    values[BUSY] += reply_real(session, "busy");
    values[STEPS_PER_SECOND] += reply_real(session, "steps_per_second");
    /* A base is counted once, not for each session that has it. */
    for (int i = 0; bytes && i < find(kinds, N_KINDS, "base"); i++)
        values[BYTES + i] += (double)reply_number(bytes, kinds[i]);
    values[BYTES + find(kinds, N_KINDS, "activations")] +=
        (double)reply_number(session, "arena_bytes");
}

static void take_kept(double *values, const msgpack_object *kept) {
    const bool in_use = reply_number(kept, "in_use");
    if (reply_number(kept, "base")) {
        values[BYTES + find(kinds, N_KINDS, "base")] += (double)reply_number(kept, "bytes");
        return;
    }
    values[KEPT + in_use]++;
    /* Those of a session are counted there. */
    if (!in_use)
        values[BYTES + find(kinds, N_KINDS, "kept")] += (double)reply_number(kept, "bytes");
}

static void take_verb(double *values, const msgpack_object *total) {
    char verb[WIRE_MAX_VERB + 1];
    const int phase = phase_of(reply_text(total, "v", verb, sizeof verb));
    values[RAN + phase] += (double)reply_number(total, "ran_us") / 1e6;
    values[WAITED + phase] += (double)reply_number(total, "waited_us") / 1e6;
    values[REQUESTS + phase] += (double)reply_number(total, "n");
}

static void take_list(double *values, const msgpack_object *list,
                      void (*take)(double *, const msgpack_object *)) {
    if (!list || list->type != MSGPACK_OBJECT_ARRAY) return;
    for (int i = 0; i < wire_count(list); i++)
        if (wire_at(list, i)->type == MSGPACK_OBJECT_MAP) take(values, wire_at(list, i));
}

static void take_root(double *values, const msgpack_object *root) {
    const msgpack_object *counters = wire_in(root, "counters"), *why = wire_in(root, "drained");
    values[UP] = 1;
    values[UPTIME] = (double)reply_number(root, "uptime_ms") / 1000;
    values[DRAINED] = why && why->type == MSGPACK_OBJECT_STR && why->via.str.size > 0;
    values[RESTARTS] = (double)reply_number(root, "workers_lost");
    values[LIMIT] = (double)reply_number(root, "memory_limit");
    if (counters && counters->type == MSGPACK_OBJECT_MAP) {
        values[FAILED] = (double)reply_number(counters, "failed");
        values[REFUSED] = (double)reply_number(counters, "refused");
    }
    take_list(values, wire_in(root, "sessions"), take_session);
    take_list(values, wire_in(root, "verbs"), take_verb);
}

/* Of a label's value: what would end it is left out. */
static void clean(char *text) {
    for (; *text; text++)
        if ((unsigned char)*text < 0x20 || *text == '"' || *text == '\\') *text = '_';
}

void metrics_take(metrics_t *metrics, const web_daemon_t *daemon) {
    char device[32] = "unknown", name[64];
    if (metrics->n == METRICS_DAEMONS) return;
    struct metrics_row_s *row = &metrics->rows[metrics->n++];
    memset(row, 0, sizeof *row);
    if (daemon->root) reply_text(daemon->root, "device", device, sizeof device);
    snprintf(name, sizeof name, "%s", daemon->name);
    clean(device);
    clean(name);
    snprintf(row->labels, sizeof row->labels, "device=\"%s\",daemon=\"%s\"", device, name);
    if (!daemon->root) return;
    take_root(row->values, daemon->root);
    take_list(row->values, daemon->kept, take_kept);
}

/* ---- printing ---- */

static void print_family(const metrics_t *metrics, const family_t *family, FILE *out) {
    fprintf(out, "# HELP gradd_%s %s\n# TYPE gradd_%s %s\n", family->name, family->help,
            family->name, family->type);
    for (int i = 0; i < metrics->n; i++) {
        const struct metrics_row_s *row = &metrics->rows[i];
        for (int k = 0; k < family->n; k++) {
            const double value = row->values[family->first + k];
            fprintf(out, "gradd_%s{%s", family->name, row->labels);
            if (family->label) fprintf(out, ",%s=\"%s\"", family->label, family->names[k]);
            fprintf(out, "} %.15g\n", isfinite(value) ? value : 0);
        }
    }
}

void metrics_print(const metrics_t *metrics, FILE *out) {
    for (size_t i = 0; i < N_FAMILIES; i++)
        print_family(metrics, &families[i], out);
}
