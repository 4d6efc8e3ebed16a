/* Verb explain: the plans of the daemon, and what one of them does: its rows, or a
 * finished text. Engine thread; needs no session, only the uid, like ps.
 *
 * Rows come in pages and texts in pieces, so that a reply stays small and the engine free for
 * others in between. The explanation is made again for each: that costs less than keeping it.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/explain/explain_report.h"
#include "server/verbs/run_tensors.h"
#include "server/verbs/worker.h"
#include "server/wire/version.h"

#define MAX_PAGE  1000
#define MAX_PIECE (1u << 20) /* bytes of a text */
#define MAX_PLANS 4096       /* in a list */
#define TEXT      512

enum { ASK_SESSION, ASK_PLAN, ASK_FROM, ASK_ROWS, ASK_NODES, ASK_PROTO, ASK_FORM, ASK_BYTES };

/* ---- sources: the session's table, sorted by node name --------------------------------------- */

typedef struct sourced_s {
    const msgpack_object_str *node, *source; /* Borrowed */
} sourced_t;

typedef struct table_s {
    const gradd_explain_t *explain;
    sourced_t *rows; /* Owned */
    int n;
    char text[TEXT];
} table_t;

static int compare_text(const msgpack_object_str *a, const char *name, size_t n) {
    size_t shorter = a->size < n ? a->size : n;
    int order = shorter ? memcmp(a->ptr, name, shorter) : 0;
    return order ? order : (a->size > n) - (a->size < n);
}

static int by_node(const void *a, const void *b) {
    const sourced_t *x = a, *y = b;
    return compare_text(x->node, y->node->ptr, y->node->size);
}

static gradd_status_t table_make(const session_objects_t *objects, const session_plan_t *plan,
                                 const gradd_explain_t *explain, table_t *out) {
    *out = (table_t){.explain = explain};
    for (int g = 0; g < objects->n_graphs; g++) {
        const struct session_graph_s *graph = &objects->graphs[g];
        if (graph->model != plan->compiled->model || !graph->source.decoded) continue;
        const msgpack_object *nodes = wire_in(&graph->source.root, "nodes");
        const msgpack_object *sources = wire_in(&graph->source.root, "sources");
        int n = wire_count(nodes);
        out->rows = calloc((size_t)n + 1, sizeof out->rows[0]);
        if (!out->rows) return GRADD_FAIL(NOMEM, "no memory for an explanation");
        for (int i = 0; i < n; i++)
            out->rows[i] = (sourced_t){&wire_at(nodes, i)->via.str, &wire_at(sources, i)->via.str};
        out->n = n;
        qsort(out->rows, (size_t)n, sizeof out->rows[0], by_node);
        break;
    }
    return GRADD_OK;
}

static const char *source_in_table(const void *context, int node) {
    table_t *table = (table_t *)context;
    const char *name = gradd_explain_node(table->explain, node)->name;
    int low = 0, high = table->n;
    while (low < high) {
        int middle = low + (high - low) / 2;
        int order = compare_text(table->rows[middle].node, name, strlen(name));
        if (order == 0) {
            const msgpack_object_str *source = table->rows[middle].source;
            size_t n = source->size < TEXT ? source->size : TEXT - 1;
            memcpy(table->text, source->ptr, n);
            table->text[n] = 0;
            return table->text;
        }
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return "";
}

/* ---- the list of plans ----------------------------------------------------------------------- */

/* "i64[2,8] i64[2,8]": the inputs that change from call to call tell plans apart. */
static void put_inputs(wire_out_t *out, const session_plan_t *plan) {
    char text[TEXT] = "";
    size_t at = 0;
    for (int k = 0; k < plan->n_rest && at < TEXT - GRADD_TYPE_TEXT - 80; k++) {
        char type[GRADD_TYPE_TEXT];
        gradd_type_format(&plan->in[plan->rest[k]], type);
        at += (size_t)snprintf(text + at, TEXT - at, "%s%.60s %s", k ? ", " : "",
                               run_input_name(plan, plan->rest[k]), type);
    }
    wire_put_text(out, text);
}

static void put_plan(wire_out_t *out, const session_objects_t *objects,
                     const session_plan_t *plan) {
    const gradd_plan_info_t *info = gradd_plan_info(plan->compiled->plan);
    wire_put_map(out, 10);
    wire_put_text(out, "session");
    wire_put_u64(out, objects->session->number);
    wire_put_text(out, "pid");
    wire_put_i64(out, objects->session->pid);
    wire_put_text(out, "client");
    wire_put_text(out, objects->session->client);
    wire_put_text(out, "plan");
    wire_put_u64(out, plan->id);
    wire_put_text(out, "inputs");
    put_inputs(out, plan);
    wire_put_text(out, "forward");
    wire_put_i64(out, info->n_launches_forward);
    wire_put_text(out, "backward");
    wire_put_i64(out, info->n_launches_backward);
    wire_put_text(out, "peak");
    wire_put_i64(out, info->arena_bytes);
    wire_put_text(out, "runs");
    wire_put_i64(out, plan->n_runs);
    wire_put_text(out, "used");
    wire_put_u64(out, plan->used);
}

static void put_plans(wire_out_t *out, const worker_t *worker) {
    uint32_t n = 0;
    for (const session_objects_t *w = worker->objects; w; w = w->next)
        n += (uint32_t)w->plans.n;
    if (n > MAX_PLANS) n = MAX_PLANS;
    wire_key(out, "plans");
    wire_put_list(out, n);
    for (const session_objects_t *w = worker->objects; w; w = w->next)
        for (int i = 0; i < w->plans.n && n > 0; i++, n--)
            put_plan(out, w, w->plans.items[i].object);
}

static bool is_later(const session_plan_t *a, const session_plan_t *b) {
    return a->ran != b->ran ? a->ran > b->ran : a->used > b->used;
}

/* The plan that was asked for; without a wish the one that ran last. */
static const session_plan_t *choose(const worker_t *worker, const request_t *request,
                                    const session_objects_t **out_objects) {
    const msgpack_object *session = request->args[ASK_SESSION], *id = request->args[ASK_PLAN];
    const session_plan_t *best = NULL;
    for (const session_objects_t *w = worker->objects; w; w = w->next) {
        if (session && w->session->number != wire_u64(session)) continue;
        for (int i = 0; i < w->plans.n; i++) {
            const session_plan_t *plan = w->plans.items[i].object;
            if (id && plan->id != wire_u64(id)) continue;
            if (best && is_later(best, plan)) continue;
            best = plan;
            *out_objects = w;
        }
    }
    return best;
}

/* ---- one plan -------------------------------------------------------------------------------- */

static void put_number(wire_out_t *out, const char *key, int64_t value) {
    wire_key(out, key);
    wire_put_i64(out, value);
}

static void put_word(wire_out_t *out, const char *key, const char *value) {
    wire_put_text(out, key);
    wire_put_text(out, value);
}

static void put_count(wire_out_t *out, const char *key, int64_t value) {
    wire_put_text(out, key);
    wire_put_i64(out, value);
}

/* A type brings the key of its sizes along. */
static void put_value(wire_out_t *out, const explain_column_t *c, const void *base) {
    const void *value = (const char *)base + c->offset;
    switch (c->form) {
    case EXPLAIN_INT:
    case EXPLAIN_LAUNCH:
        return wire_put_i64(out, *(const int *)value);
    case EXPLAIN_BYTES:
        return wire_put_i64(out, *(const int64_t *)value);
    case EXPLAIN_FLOPS:
    case EXPLAIN_MS:
        return wire_put_f64(out, *(const double *)value);
    case EXPLAIN_PHASE:
    case EXPLAIN_FLAG:
        return wire_put_u64(out, *(const bool *)value ? 1 : 0);
    case EXPLAIN_TEXT:
    case EXPLAIN_PLACE:
        return wire_put_text(out, *(const char *const *)value);
    case EXPLAIN_TYPE:
        wire_put_u64(out, ((const gradd_type_t *)value)->dtype);
        wire_put_text(out, "dims");
        return wire_put_dims(out, value);
    }
}

static void put_head(wire_out_t *out, const explain_report_t *r) {
    for (const explain_column_t *c = explain_totals; c->key; c++) {
        wire_key(out, c->key);
        put_value(out, c, r);
    }
    wire_key(out, "fates");
    wire_put_list(out, (uint32_t)r->n_fates);
    for (int i = 0; i < r->n_fates; i++) {
        wire_put_map(out, 3);
        put_count(out, "fate", r->fates[i].fate);
        put_word(out, "op", r->fates[i].op);
        put_count(out, "count", r->fates[i].count);
    }
}

static void put_line(wire_out_t *out, const explain_line_t *line) {
    uint32_t n = 0;
    for (const explain_column_t *c = explain_columns; c->key; c++)
        n += c->form == EXPLAIN_TYPE ? 2 : 1;
    wire_put_map(out, n);
    for (const explain_column_t *c = explain_columns; c->key; c++) {
        wire_put_text(out, c->form == EXPLAIN_TYPE ? "dtype" : c->key);
        put_value(out, c, line);
    }
}

static void put_rows(wire_out_t *out, const explain_report_t *r, uint64_t from, uint64_t rows) {
    uint64_t left = from < (uint64_t)r->n_lines ? (uint64_t)r->n_lines - from : 0;
    uint64_t n = rows < left ? rows : left;
    put_number(out, "n_rows", r->n_lines);
    wire_key(out, "rows");
    wire_put_list(out, (uint32_t)n);
    for (uint64_t i = 0; i < n; i++)
        put_line(out, &r->lines[from + i]);
}

/* The report has both numbers of a node side by side. */
static void put_nodes(wire_out_t *out, const explain_report_t *r) {
    static const char *const names[] = {"fates", "rows"};
    wire_key(out, "nodes");
    wire_put_map(out, 2);
    for (int k = 0; k < 2; k++) {
        wire_put_text(out, names[k]);
        wire_put_list(out, (uint32_t)r->n_nodes);
        for (int i = 0; i < r->n_nodes; i++)
            wire_put_i64(out, r->nodes[2 * i + k]);
    }
}

/* ---- a finished text ------------------------------------------------------------------------- */

typedef struct form_s {
    const char *name;
    void (*print)(FILE *out, const explain_report_t *report);
} form_t;

/* *out stays NULL for rows. */
static gradd_status_t find_form(const msgpack_object *name, const form_t **out) {
    static const form_t forms[] = {
        {"text",  explain_print_text },
        {"json",  explain_print_json },
        {"notes", explain_print_notes},
    };
    if (!name) return GRADD_OK;
    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++)
        if (compare_text(&name->via.str, forms[i].name, strlen(forms[i].name)) == 0) {
            *out = &forms[i];
            return GRADD_OK;
        }
    return GRADD_FAIL(UNSUPPORTED, "explain: field 'form': expected text, json or notes");
}

static gradd_status_t put_piece(wire_out_t *out, const form_t *form, const explain_report_t *r,
                                uint64_t from, uint64_t bytes) {
    char *text = NULL;
    size_t n = 0;
    FILE *memory = open_memstream(&text, &n);
    bool good = memory;
    if (memory) {
        form->print(memory, r);
        good = !ferror(memory);
        good = fclose(memory) == 0 && good;
    }
    if (good) {
        size_t at = from < n ? (size_t)from : n;
        put_number(out, "n_bytes", (int64_t)n);
        wire_key(out, "text");
        wire_put_bytes(out, text + at, bytes < n - at ? (size_t)bytes : n - at);
    }
    free(text);
    return good ? GRADD_OK : GRADD_FAIL(NOMEM, "no memory for the text of an explanation");
}

static gradd_status_t report_of(const session_objects_t *objects, const session_plan_t *plan,
                                explain_report_t *out) {
    gradd_explain_t *explain = NULL;
    table_t table = {0};
    GRADD_TRY(gradd_plan_explain(plan->compiled->plan, &explain));
    gradd_status_t st = table_make(objects, plan, explain, &table);
    explain_source_t source = {source_in_table, &table};
    if (st == GRADD_OK) st = explain_report_make(plan->compiled->plan, explain, &source, out);
    free(table.rows);
    gradd_explain_destroy(explain);
    GRADD_TRY(st);
    out->title =
        arena_printf(out->arena, "session %u, plan %" PRIu64, objects->session->number, plan->id);
    if (!out->title) explain_report_finish(out);
    return out->title ? GRADD_OK : GRADD_E_NOMEM;
}

/* There was no hello: the request itself says which protocol its sender reads. */
static gradd_status_t check_protocol(const worker_t *worker, const msgpack_object *proto) {
    uint64_t asked = proto ? wire_u64(proto) : 1;
    if (asked >= PROTOCOL_LOWEST && asked <= PROTOCOL_HIGHEST) return GRADD_OK;
    return GRADD_FAIL(VERSION,
                      "explain: you read protocol %llu, this daemon, gradd %s (pid %d), speaks "
                      "protocol %d: ask with `gradd explain` of gradd %s",
                      (unsigned long long)asked, GRADD_VERSION, (int)worker->owner,
                      PROTOCOL_HIGHEST, GRADD_VERSION);
}

/* "session 3 has no plan 7 (any more): ..." */
static gradd_status_t gone(const request_t *request) {
    const msgpack_object *session = request->args[ASK_SESSION], *id = request->args[ASK_PLAN];
    char owner[48] = "the daemon", plan[32] = "plan";
    if (session) snprintf(owner, sizeof owner, "session %" PRIu64, wire_u64(session));
    if (id) snprintf(plan, sizeof plan, "plan %" PRIu64, wire_u64(id));
    return GRADD_FAIL(STALE,
                      "explain: %s has no %s (any more): `gradd explain --list` has those "
                      "that there are",
                      owner, plan);
}

static uint64_t at_most(const msgpack_object *wish, uint64_t most) {
    uint64_t count = wish ? wire_u64(wish) : most;
    return count < most ? count : most;
}

static gradd_status_t explain(worker_t *worker, request_t *request) {
    const session_objects_t *objects = NULL;
    const form_t *form = NULL;
    GRADD_TRY(check_protocol(worker, request->args[ASK_PROTO]));
    GRADD_TRY(find_form(request->args[ASK_FORM], &form));
    const session_plan_t *plan = choose(worker, request, &objects);
    const msgpack_object *from = request->args[ASK_FROM];
    uint64_t first = from ? wire_u64(from) : 0;
    bool wished = request->args[ASK_SESSION] || request->args[ASK_PLAN];
    if (!plan && wished) return gone(request);
    wire_key(&request->reply, "proto");
    wire_put_u64(&request->reply, PROTOCOL_HIGHEST);
    if (first == 0) put_plans(&request->reply, worker);
    if (!plan) return GRADD_OK; /* nothing to explain: the list is empty */
    explain_report_t report = {0};
    GRADD_TRY(report_of(objects, plan, &report));
    put_number(&request->reply, "session", objects->session->number);
    wire_key(&request->reply, "plan");
    wire_put_u64(&request->reply, plan->id); /* the client's choice, up to 2^64 - 1 */
    gradd_status_t st = GRADD_OK;
    if (form) {
        uint64_t bytes = at_most(request->args[ASK_BYTES], MAX_PIECE);
        st = put_piece(&request->reply, form, &report, first, bytes);
    } else {
        if (first == 0) put_head(&request->reply, &report);
        if (wire_flag(request->args[ASK_NODES])) put_nodes(&request->reply, &report);
        put_rows(&request->reply, &report, first, at_most(request->args[ASK_ROWS], MAX_PAGE));
    }
    explain_report_finish(&report);
    return st;
}

GRADD_COMMANDS(
    explain, {
                 .name = "explain",
                 .handle = explain,
                 .fields = {[ASK_SESSION] = {.name = "session", .kind = WIRE_U64, .optional = true},
                            [ASK_PLAN] = {.name = "plan", .kind = WIRE_U64, .optional = true},
                            [ASK_FROM] = {.name = "from", .kind = WIRE_U64, .optional = true},
                            [ASK_ROWS] = {.name = "rows", .kind = WIRE_U64, .optional = true},
                            [ASK_NODES] = {.name = "nodes", .kind = WIRE_FLAG, .optional = true},
                            [ASK_PROTO] = {.name = "proto", .kind = WIRE_U64, .optional = true},
                            [ASK_FORM] = {.name = "form", .kind = WIRE_TEXT, .optional = true},
                            [ASK_BYTES] = {.name = "bytes", .kind = WIRE_U64, .optional = true}}
});
