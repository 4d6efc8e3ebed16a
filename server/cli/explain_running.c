/* `gradd explain` without a file: asks the running daemon for its plans and the text about one,
 * piece by piece. See explain_command.h and cmd_explain.c. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "server/cli/admin.h"
#include "server/cli/explain_command.h"
#include "server/wire/version.h"

#define ANSWER_MS 60000 /* the engine may be in the middle of a long run */

/* ---- reading replies: the daemon's bytes are checked like any others ------------------------- */

static int64_t integer(const msgpack_object *o) {
    bool number = o && (o->type == MSGPACK_OBJECT_POSITIVE_INTEGER ||
                        o->type == MSGPACK_OBJECT_NEGATIVE_INTEGER);
    return number ? o->via.i64 : 0;
}

/* The id of a plan, which a client may choose above what `integer` can hold. */
static uint64_t plan_id(const msgpack_object *o) {
    return o && o->type == MSGPACK_OBJECT_POSITIVE_INTEGER ? o->via.u64 : 0;
}

static const char *text_of(arena_t *arena, const msgpack_object *o) {
    if (!o || o->type != MSGPACK_OBJECT_STR) return "?";
    const char *copy = arena_string(arena, o->via.str.ptr, o->via.str.size);
    return copy ? copy : "?";
}

static bool is_list(const msgpack_object *o, int n) {
    return o && o->type == MSGPACK_OBJECT_ARRAY && wire_count(o) >= n;
}

/* ---- asking ---------------------------------------------------------------------------------- */

typedef struct question_s {
    const char *path, *dir;
    int64_t session; /* -1 = of any */
    uint64_t plan;
    bool has_plan;    /* else the one used last */
    const char *form; /* NULL: only the list of plans */
    int64_t from;     /* bytes that are here already */
} question_t;

static void put_wish(wire_out_t *out, const char *key, int64_t value) {
    if (value < 0) return;
    wire_key(out, key);
    wire_put_i64(out, value);
}

/* The daemon's own error becomes ours, with its code where we know it. */
static gradd_status_t refused(const wire_doc_t *doc) {
    const msgpack_object *what = wire_get(doc, "what"), *code = wire_get(doc, "code");
    bool known = what && what->type == MSGPACK_OBJECT_STR;
    bool stale = code && code->type == MSGPACK_OBJECT_STR && code->via.str.size == 5 &&
                 !memcmp(code->via.str.ptr, "STALE", 5);
    int n = known ? (int)what->via.str.size : 15;
    const char *text = known ? what->via.str.ptr : "no reason given";
    const int verb = (int)strlen("explain: "); /* our own error begins with it already */
    if (n > verb && !memcmp(text, "explain: ", (size_t)verb)) text += verb, n -= verb;
    if (stale) return GRADD_FAIL(STALE, "%.*s", n, text);
    return GRADD_FAIL(IO, "the daemon refused: %.*s", n, text);
}

/* A daemon of before protocol 2 answers as well, in a form that is not read here. */
static gradd_status_t check_protocol(const question_t *question, const wire_doc_t *doc) {
    char version[ADMIN_VERSION_BYTES];
    int64_t proto = integer(wire_get(doc, "proto"));
    if (proto >= PROTOCOL_LOWEST && proto <= PROTOCOL_HIGHEST) return GRADD_OK;
    admin_version(question->path, version);
    return GRADD_FAIL(
        VERSION,
        "the daemon is gradd %s and speaks an older protocol than this gradd %s (%d): "
        "ask with `gradd explain` of its version, or `gradd stop --dir %s` ends it, "
        "and the next trainer starts another one",
        version, GRADD_VERSION, PROTOCOL_HIGHEST, question->dir);
}

static gradd_status_t ask(const question_t *question, zmq_msg_t *reply, wire_doc_t *out_doc) {
    wire_out_t out = {0};
    wire_begin(&out);
    wire_key(&out, "v");
    wire_put_text(&out, "explain");
    put_wish(&out, "q", 1);
    put_wish(&out, "proto", PROTOCOL_HIGHEST);
    put_wish(&out, "session", question->session);
    if (question->has_plan) {
        wire_key(&out, "plan");
        wire_put_u64(&out, question->plan);
    }
    put_wish(&out, "from", question->from);
    if (question->form) {
        wire_key(&out, "form");
        wire_put_text(&out, question->form);
    } else {
        put_wish(&out, "rows", 0);
    }
    wire_end(&out);
    gradd_status_t st = admin_ask(question->path, &out, ANSWER_MS, reply, out_doc);
    wire_out_finish(&out);
    GRADD_TRY(st);
    if (integer(wire_get(out_doc, "ok")) != 1) return refused(out_doc);
    return check_protocol(question, out_doc);
}

/* ---- printing -------------------------------------------------------------------------------- */

static void print_plan(const msgpack_object *plan, arena_t *arena) {
    char peak[24];
    printf("%7" PRId64 " %8" PRId64 " %5" PRIu64 " %8" PRId64 " %8" PRId64 " %5" PRId64
           " %10s  %-16.16s %s\n",
           integer(wire_in(plan, "session")), integer(wire_in(plan, "pid")),
           plan_id(wire_in(plan, "plan")), integer(wire_in(plan, "forward")),
           integer(wire_in(plan, "backward")), integer(wire_in(plan, "runs")),
           explain_amount(integer(wire_in(plan, "peak")), peak),
           text_of(arena, wire_in(plan, "client")), text_of(arena, wire_in(plan, "inputs")));
}

/* A list can be of one session, or of the plans of one number. */
static bool is_asked_for(const explain_args_t *args, const msgpack_object *plan) {
    bool session = args->session < 0 || integer(wire_in(plan, "session")) == args->session;
    return session && (args->plan < 0 || plan_id(wire_in(plan, "plan")) == (uint64_t)args->plan);
}

static void print_plans(const explain_args_t *args, const msgpack_object *plans, arena_t *arena) {
    printf("%7s %8s %5s %8s %8s %5s %10s  %-16s %s\n", "SESSION", "PID", "PLAN", "FORWARD",
           "BACKWARD", "RUNS", "PEAK", "CLIENT", "INPUTS");
    for (int i = 0; is_list(plans, i + 1); i++)
        if (!args->list || is_asked_for(args, wire_at(plans, i)))
            print_plan(wire_at(plans, i), arena);
    putchar('\n');
}

static void print_plans_json(const explain_args_t *args, const msgpack_object *plans,
                             arena_t *arena) {
    const char *between = "";
    static const char *const numbers[] = {"session", "pid", "forward", "backward", "runs", "peak"};
    fputs("{\"plans\": [", stdout);
    for (int i = 0; is_list(plans, i + 1); i++) {
        const msgpack_object *plan = wire_at(plans, i);
        if (!is_asked_for(args, plan)) continue;
        printf("%s{\"plan\": %" PRIu64 ", ", between, plan_id(wire_in(plan, "plan")));
        between = ", ";
        for (size_t k = 0; k < sizeof numbers / sizeof numbers[0]; k++)
            printf("\"%s\": %" PRId64 ", ", numbers[k], integer(wire_in(plan, numbers[k])));
        fputs("\"client\": ", stdout);
        explain_json_text(stdout, text_of(arena, wire_in(plan, "client")));
        fputs(", \"inputs\": ", stdout);
        explain_json_text(stdout, text_of(arena, wire_in(plan, "inputs")));
        putchar('}');
    }
    fputs("]}\n", stdout);
}

/* ---- one plan -------------------------------------------------------------------------------- */

/* The daemon makes its text safe for a terminal; another listener may not. */
static void print_piece(const msgpack_object *text) {
    for (uint32_t i = 0; i < text->via.bin.size; i++) {
        unsigned char c = (unsigned char)text->via.bin.ptr[i];
        putchar((c < 0x20 && c != '\n') || c == 0x7f ? '?' : c);
    }
}

static void print_list(const explain_args_t *args, const msgpack_object *plans, arena_t *arena) {
    if (args->json && args->list)
        print_plans_json(args, plans, arena);
    else if (!args->json && (args->list || !is_list(plans, 1) || is_list(plans, 2)))
        print_plans(args, plans, arena);
}

/* Prints one piece; *out_more says whether another one follows. The first fixes which plan. */
static gradd_status_t take_piece(question_t *question, const explain_args_t *args, arena_t *arena,
                                 bool *out_more) {
    zmq_msg_t reply;
    wire_doc_t doc = {0};
    zmq_msg_init(&reply);
    *out_more = false;
    gradd_status_t st = ask(question, &reply, &doc);
    if (st == GRADD_OK) {
        const msgpack_object *text = wire_get(&doc, "text");
        if (question->from == 0) print_list(args, wire_get(&doc, "plans"), arena);
        if (question->form && text && text->type == MSGPACK_OBJECT_BIN && text->via.bin.size) {
            print_piece(text);
            question->session = integer(wire_get(&doc, "session"));
            question->plan = plan_id(wire_get(&doc, "plan"));
            question->has_plan = true;
            question->from += text->via.bin.size;
            *out_more = question->from < integer(wire_get(&doc, "n_bytes"));
        }
    }
    wire_doc_finish(&doc);
    zmq_msg_close(&reply);
    return st;
}

static gradd_status_t take_all(const explain_args_t *args, const rundir_t *dir, arena_t *arena) {
    question_t question = {.path = dir->cmd,
                           .dir = dir->path,
                           .session = args->session,
                           .plan = (uint64_t)args->plan,
                           .has_plan = args->plan >= 0,
                           .form = args->list   ? NULL
                                   : args->json ? "json"
                                                : "text"};
    bool more = true;
    while (more)
        GRADD_TRY(take_piece(&question, args, arena, &more));
    if (question.form && question.from == 0)
        puts(args->json ? "{\"plans\": []}" : "no plan lives in the daemon");
    return GRADD_OK;
}

gradd_status_t explain_running(const explain_args_t *args, const rundir_t *dir) {
    arena_t *arena = NULL;
    gradd_status_t st = arena_create(0, &arena);
    if (st == GRADD_OK) st = take_all(args, dir, arena);
    arena_destroy(arena);
    return st;
}
