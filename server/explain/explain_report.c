/* Collects an explanation for printing. See explain_report.h. */
#include "server/explain/explain_report.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

const explain_column_t explain_columns[] = {
#define COLUMN(member, form, heading, width, note, meaning)                                        \
    {#member, EXPLAIN_##form, offsetof(explain_line_t, member), heading, width, note, meaning},
#include "server/explain/columns.inc"
#undef COLUMN
    {0}};

const explain_column_t explain_totals[] = {
#define TOTAL(member, form, meaning)                                                               \
    {#member, EXPLAIN_##form, offsetof(explain_report_t, member), "", 0, "", meaning},
#include "server/explain/columns.inc"
#undef TOTAL
    {0}};

const char *explain_plain(const explain_column_t *column, const void *base,
                          char buffer[EXPLAIN_PLAIN]) {
    const void *value = (const char *)base + column->offset;
    switch (column->form) {
    case EXPLAIN_INT:
    case EXPLAIN_LAUNCH:
        snprintf(buffer, EXPLAIN_PLAIN, "%d", *(const int *)value);
        return buffer;
    case EXPLAIN_BYTES:
        snprintf(buffer, EXPLAIN_PLAIN, "%" PRId64, *(const int64_t *)value);
        return buffer;
    case EXPLAIN_FLOPS:
        snprintf(buffer, EXPLAIN_PLAIN, "%.0f", *(const double *)value);
        return buffer;
    case EXPLAIN_MS:
        snprintf(buffer, EXPLAIN_PLAIN, "%.3f", *(const double *)value);
        return buffer;
    case EXPLAIN_PHASE:
        return *(const bool *)value ? "backward" : "forward";
    case EXPLAIN_FLAG:
        return *(const bool *)value ? "true" : "false";
    case EXPLAIN_TEXT:
    case EXPLAIN_PLACE:
        return *(const char *const *)value;
    case EXPLAIN_TYPE:
        break;
    }
    return "";
}

static void *room(void **array, int n, int *cap, size_t entry) {
    if (n == *cap) {
        int wider = *cap ? 2 * *cap : 128;
        void *moved = realloc(*array, entry * (size_t)wider);
        if (!moved) return NULL;
        *array = moved;
        *cap = wider;
    }
    void *fresh = (char *)*array + entry * (size_t)n;
    memset(fresh, 0, entry);
    return fresh;
}

static explain_line_t *new_line(explain_report_t *r) {
    explain_line_t *line = room((void **)&r->lines, r->n_lines, &r->cap_lines, sizeof *line);
    if (line) r->n_lines++;
    return line;
}

static explain_fate_t *new_fate(explain_report_t *r) {
    explain_fate_t *fate = room((void **)&r->fates, r->n_fates, &r->cap_fates, sizeof *fate);
    if (fate) r->n_fates++;
    return fate;
}

void explain_report_finish(explain_report_t *r) {
    arena_destroy(r->arena);
    free(r->lines);
    free(r->fates);
    *r = (explain_report_t){0};
}

static const char *kind_name(gradd_explain_kind_t kind) {
    static const char *const names[] = {[GRADD_EXPLAIN_RUN] = "run",
                                        [GRADD_EXPLAIN_COPY] = "copy",
                                        [GRADD_EXPLAIN_VIEW] = "view",
                                        [GRADD_EXPLAIN_EMPTY] = "none"};
    return kind >= 0 && (size_t)kind < sizeof names / sizeof names[0] ? names[kind] : "?";
}

/* ---- what an operator stands for ------------------------------------------------------------- */

static int by_number(const void *a, const void *b) {
    return *(const int32_t *)a - *(const int32_t *)b;
}

/* The distinct nodes of a row, in the order of the model. */
static int sorted_parts(const gradd_explain_row_t *row, int32_t *out) {
    int n = 0;
    memcpy(out, row->parts, sizeof out[0] * (size_t)row->n_parts);
    qsort(out, (size_t)row->n_parts, sizeof out[0], by_number);
    for (int i = 0; i < row->n_parts; i++)
        if (!n || out[n - 1] != out[i]) out[n++] = out[i];
    return n;
}

/* The operators of its nodes in the model's order, with counts. NULL without memory. */
static const char *fused_text(arena_t *arena, const gradd_explain_t *explain,
                              const gradd_explain_row_t *row) {
    const char *text = "";
    if (!row->n_parts) return text;
    int32_t *parts = arena_array(arena, (size_t)row->n_parts, sizeof parts[0]);
    if (!parts) return NULL;
    int n = sorted_parts(row, parts);
    for (int i = 0; i < n && text; i++) {
        const char *op = gradd_explain_node(explain, parts[i])->op;
        int count = 0, before = 0;
        for (int k = 0; k < n; k++) {
            bool equal = !strcmp(gradd_explain_node(explain, parts[k])->op, op);
            count += equal;
            before += equal && k < i;
        }
        if (before) continue;
        const char *between = text[0] ? " " : "";
        text = count > 1 ? arena_printf(arena, "%s%s%s×%d", text, between, op, count)
                         : arena_printf(arena, "%s%s%s", text, between, op);
    }
    return text;
}

/* ---- from a plan ----------------------------------------------------------------------------- */

static const char *keep(arena_t *arena, const char *text) {
    return arena_string(arena, text, strlen(text));
}

/* "model.layers.0.mlp (modeling_llama.py:172)" from "model.layers.0.mlp @ /path/...py:172". */
static const char *place_text(arena_t *arena, const explain_line_t *line) {
    const char *of = line->again && line->backward ? "again "
                     : line->backward              ? "gradient of "
                                                   : "";
    const char *at = strstr(line->source, " @ ");
    if (line->node < 0) return "";
    if (!at)
        return arena_printf(arena, "%s%s", of, line->source[0] ? line->source : line->node_name);
    const char *file = strrchr(at, '/');
    return arena_printf(arena, "%s%.*s (%s)", of, (int)(at - line->source), line->source,
                        file ? file + 1 : at + strlen(" @ "));
}

static gradd_status_t add_line(explain_report_t *r, const gradd_explain_t *explain, int i,
                               const explain_source_t *source) {
    const gradd_explain_row_t *row = gradd_explain_row(explain, i);
    explain_line_t *line = new_line(r);
    if (!line) return GRADD_FAIL(NOMEM, "no memory for an explanation");
    *line = (explain_line_t){.row = i,
                             .launch = row->launch,
                             .node = row->node,
                             .kind = kind_name(row->kind),
                             .backward = row->backward,
                             .leftover = row->leftover,
                             .again = row->again,
                             .live = row->live,
                             .op = row->op,
                             .domain = row->domain,
                             .kernel = row->kernel,
                             .type = row->type,
                             .bytes_read = row->bytes_read,
                             .bytes_written = row->bytes_written,
                             .work_bytes = row->work_bytes,
                             .saved_bytes = row->saved_bytes,
                             .flops = row->flops};
    line->node_name = keep(r->arena, row->node_name);
    line->node_op = keep(r->arena, row->node_op);
    line->fused = fused_text(r->arena, explain, row);
    line->source =
        keep(r->arena, row->node >= 0 && source ? source->of_node(source->context, row->node) : "");
    if (!line->node_name || !line->node_op || !line->fused || !line->source) return GRADD_E_NOMEM;
    line->place = place_text(r->arena, line);
    return line->place ? GRADD_OK : GRADD_E_NOMEM;
}

static int by_fate(const void *a, const void *b) {
    const explain_fate_t *x = a, *y = b;
    if (x->fate != y->fate) return (int)x->fate - (int)y->fate;
    return x->count != y->count ? y->count - x->count : strcmp(x->op, y->op);
}

static gradd_status_t count_fate(explain_report_t *r, const gradd_explain_node_t *node) {
    for (int i = 0; i < r->n_fates; i++)
        if (r->fates[i].fate == node->fate && !strcmp(r->fates[i].op, node->op)) {
            r->fates[i].count++;
            return GRADD_OK;
        }
    explain_fate_t *fate = new_fate(r);
    if (!fate) return GRADD_FAIL(NOMEM, "no memory for an explanation");
    *fate = (explain_fate_t){node->fate, keep(r->arena, node->op), 1};
    return fate->op ? GRADD_OK : GRADD_E_NOMEM;
}

static gradd_status_t add_nodes(explain_report_t *r, const gradd_explain_t *explain) {
    r->n_nodes = gradd_explain_info(explain)->n_nodes;
    r->nodes = arena_array(r->arena, 2 * (size_t)r->n_nodes + 1, sizeof r->nodes[0]);
    if (!r->nodes) return GRADD_E_NOMEM;
    for (int i = 0; i < r->n_nodes; i++) {
        const gradd_explain_node_t *node = gradd_explain_node(explain, i);
        r->nodes[2 * i] = (int32_t)node->fate;
        r->nodes[2 * i + 1] = node->row;
        GRADD_TRY(count_fate(r, node));
    }
    return GRADD_OK;
}

gradd_status_t explain_report_make(const gradd_plan_t *plan, const gradd_explain_t *explain,
                                   const explain_source_t *source, explain_report_t *out_report) {
    const gradd_plan_info_t *p = gradd_plan_info(plan);
    const gradd_explain_info_t *info = gradd_explain_info(explain);
    explain_report_t r = {.title = "",
                          .device = info->device->name,
                          .library = info->device->library,
                          .threads = p->threads,
                          .arena_bytes = p->arena_bytes,
                          .saved_bytes = p->saved_bytes,
                          .constant_bytes = p->constant_bytes,
                          .input_bytes = info->input_bytes,
                          .output_bytes = info->output_bytes,
                          .grad_bytes = info->grad_bytes,
                          .whole_bytes = p->whole_bytes,
                          .recomputed_bytes = p->recomputed_bytes,
                          .recompute_ms = p->recompute_us / 1e3,
                          .model_ms = p->model_us / 1e3,
                          .batch_rows = info->rows,
                          .label_rows = info->label_rows,
                          .real_rows = info->real_rows,
                          .compile_ms = p->compile_ms};
    gradd_status_t status = arena_create(0, &r.arena);
    for (int i = 0; i < info->n_rows && !status; i++)
        status = add_line(&r, explain, i, source);
    if (!status) status = add_nodes(&r, explain);
    if (status) {
        explain_report_finish(&r);
        return status;
    }
    if (r.n_fates) qsort(r.fates, (size_t)r.n_fates, sizeof r.fates[0], by_fate);
    *out_report = r;
    return GRADD_OK;
}

/* ---- notes in a model ------------------------------------------------------------------------ */

static void note(explain_notes_t *notes, const char *key, const char *value) {
    notes->key[notes->n] = key;
    notes->value[notes->n++] = value;
}

gradd_status_t explain_report_notes(const explain_report_t *r, int node,
                                    explain_notes_t *out_notes) {
    explain_notes_t notes = {0};
    const char *fate = gradd_fate_name((gradd_fate_t)r->nodes[2 * node]);
    int row = r->nodes[2 * node + 1];
    note(&notes, "gradd.fate", fate);
    notes.sentence = arena_printf(r->arena, "gradd: %s", fate);
    if (row >= 0) {
        const explain_line_t *line = &r->lines[row];
        notes.sentence = arena_printf(
            r->arena, "gradd: %s, row %d: %s (%s), %" PRId64 " bytes, %.0f FLOP", fate, row,
            line->op, line->kernel, line->bytes_read + line->bytes_written, line->flops);
        for (const explain_column_t *c = explain_columns; c->key; c++) {
            char buffer[EXPLAIN_PLAIN];
            if (!c->note[0] || notes.n == EXPLAIN_MAX_NOTES) continue;
            note(&notes, arena_printf(r->arena, "gradd.%s", c->note),
                 keep(r->arena, explain_plain(c, line, buffer)));
        }
    }
    bool good = notes.sentence;
    for (int i = 0; i < notes.n; i++)
        good = good && notes.key[i] && notes.value[i];
    if (!good) return GRADD_E_NOMEM;
    *out_notes = notes;
    return GRADD_OK;
}
