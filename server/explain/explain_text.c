/* Prints an explanation as a table with totals. See explain_report.h. */
#include <stdlib.h>
#include <string.h>

#include "server/explain/explain_report.h"

#define MAX_PLACES 4 /* named per operator that was not recognised */

const char *explain_amount(int64_t bytes, char buffer[24]) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = (double)bytes;
    int unit = 0;
    for (; value >= 1024 && unit < 4; unit++)
        value /= 1024;
    snprintf(buffer, 24, unit ? "%.1f %s" : "%.0f %s", value, units[unit]);
    return buffer;
}

const char *explain_number(double value, char buffer[24]) {
    static const char *const units[] = {"", " k", " M", " G", " T", " P"};
    int unit = 0;
    for (; value >= 1000 && unit < 5; unit++)
        value /= 1000;
    snprintf(buffer, 24, unit ? "%.1f%s" : "%.0f%s", value, units[unit]);
    return buffer;
}

/* A text comes from a file or a trainer: no byte may command a terminal. */
static void print_plain(FILE *out, const char *text) {
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;
        fputc(c < 0x20 || c == 0x7f ? '?' : c, out);
    }
}

/* ---- the table ------------------------------------------------------------------------------- */

/* A line of cells; blanks wait for a text behind them, so that no line ends in any. */
typedef struct cells_s {
    FILE *out;
    int blanks;
    bool any, right; /* a cell was there; it was on the right of its column */
} cells_t;

static void put_text(cells_t *cells, const char *text) {
    if (!text[0]) return;
    fprintf(cells->out, "%*s", cells->blanks, "");
    print_plain(cells->out, text);
    cells->blanks = 0;
}

/* A width below 0 is on the left, with one more blank after one on the right. */
static void put_cell(cells_t *cells, const char *text, int width) {
    int room = abs(width), n = (int)strlen(text), pad = room > n ? room - n : 0;
    if (cells->any) cells->blanks += width < 0 && cells->right ? 2 : 1;
    if (width > 0) cells->blanks += pad;
    put_text(cells, text);
    if (width < 0) cells->blanks += pad;
    cells->any = true;
    cells->right = width > 0;
}

/* The text of a cell of the table: figures with units, nothing for zeros. */
static const char *cell_text(const explain_column_t *column, const explain_line_t *line,
                             char buffer[GRADD_TYPE_TEXT]) {
    const void *value = (const char *)line + column->offset;
    switch (column->form) {
    case EXPLAIN_LAUNCH:
        return *(const int *)value < 0 ? "-" : explain_plain(column, line, buffer);
    case EXPLAIN_TYPE:
        gradd_type_format(value, buffer);
        return buffer;
    case EXPLAIN_BYTES:
        return *(const int64_t *)value ? explain_amount(*(const int64_t *)value, buffer) : "";
    case EXPLAIN_FLOPS:
        return *(const double *)value > 0 ? explain_number(*(const double *)value, buffer) : "";
    default:
        return explain_plain(column, line, buffer);
    }
}

static void print_headings(FILE *out) {
    cells_t cells = {.out = out};
    for (const explain_column_t *c = explain_columns; c->key; c++)
        if (c->heading[0]) put_cell(&cells, c->heading, c->width);
    fputc('\n', out);
}

static void print_line(FILE *out, const explain_line_t *line) {
    cells_t cells = {.out = out};
    char buffer[GRADD_TYPE_TEXT];
    for (const explain_column_t *c = explain_columns; c->key; c++) {
        if (!c->heading[0]) continue;
        put_cell(&cells, cell_text(c, line, buffer), c->width);
        if (c->form != EXPLAIN_PLACE) continue;
        if (line->fused[0]) put_text(&cells, "  <- ");
        put_text(&cells, line->fused);
        if (line->leftover) put_text(&cells, "  (not recognised)");
        if (line->again && !line->backward) put_text(&cells, "  (computed again in backward)");
        if (line->live[0]) {
            put_text(&cells, "  (");
            put_text(&cells, line->live);
            put_text(&cells, " rows)");
        }
    }
    fputc('\n', out);
}

static void print_phase(FILE *out, const explain_report_t *r, bool backward) {
    int launches = 0, views = 0;
    double flops = 0;
    char number[24];
    for (int i = 0; i < r->n_lines; i++) {
        if (r->lines[i].backward != backward) continue;
        launches += r->lines[i].launch >= 0;
        views += r->lines[i].launch < 0;
        flops += r->lines[i].flops;
    }
    if (!launches && !views) return;
    fprintf(out, "\n%s: %d launches, %d without cost, %s FLOP\n", backward ? "backward" : "forward",
            launches, views, explain_number(flops, number));
    print_headings(out);
    for (int i = 0; i < r->n_lines; i++)
        if (r->lines[i].backward == backward) print_line(out, &r->lines[i]);
}

/* ---- totals ---------------------------------------------------------------------------------- */

typedef struct total_s {
    const char *op, *kernel;
    int forward, backward;
    double flops;
    int64_t bytes;
} total_t;

static int by_weight(const void *a, const void *b) {
    const total_t *x = a, *y = b;
    if (x->flops != y->flops) return x->flops < y->flops ? 1 : -1;
    return x->bytes != y->bytes ? (x->bytes < y->bytes ? 1 : -1) : strcmp(x->op, y->op);
}

static int collect_totals(const explain_report_t *r, total_t *totals) {
    int n = 0;
    for (int i = 0; i < r->n_lines; i++) {
        const explain_line_t *line = &r->lines[i];
        int k = 0;
        while (k < n && (strcmp(totals[k].op, line->op) || strcmp(totals[k].kernel, line->kernel)))
            k++;
        if (k == n) totals[n++] = (total_t){.op = line->op, .kernel = line->kernel};
        totals[k].forward += !line->backward;
        totals[k].backward += line->backward;
        totals[k].flops += line->flops;
        totals[k].bytes += line->bytes_read + line->bytes_written;
    }
    qsort(totals, (size_t)n, sizeof totals[0], by_weight);
    return n;
}

static void print_totals(FILE *out, const explain_report_t *r) {
    total_t *totals = calloc((size_t)r->n_lines + 1, sizeof totals[0]);
    double all = 0;
    if (!totals) return;
    int n = collect_totals(r, totals);
    for (int k = 0; k < n; k++)
        all += totals[k].flops;
    fprintf(out, "\n%-27s %-12s %8s %8s %10s %6s %10s\n", "OPERATOR", "KERNEL", "FORWARD",
            "BACKWARD", "FLOP", "SHARE", "BYTES");
    for (int k = 0; k < n; k++) {
        char flops[24], bytes[24];
        fprintf(out, "%-27s %-12s %8d %8d %10s %5.1f%% %10s\n", totals[k].op, totals[k].kernel,
                totals[k].forward, totals[k].backward, explain_number(totals[k].flops, flops),
                all > 0 ? 100 * totals[k].flops / all : 0, explain_amount(totals[k].bytes, bytes));
    }
    free(totals);
}

static void print_fates(FILE *out, const explain_report_t *r) {
    for (int fate = 0; fate < EXPLAIN_FATES; fate++) {
        int total = 0;
        for (int i = 0; i < r->n_fates; i++)
            if ((int)r->fates[i].fate == fate) total += r->fates[i].count;
        if (!total) continue;
        fprintf(out, "  %-8s %5d ", gradd_fate_name((gradd_fate_t)fate), total);
        for (int i = 0; i < r->n_fates; i++)
            if ((int)r->fates[i].fate == fate) {
                fputc(' ', out);
                print_plain(out, r->fates[i].op);
                fprintf(out, "×%d", r->fates[i].count);
            }
        fputc('\n', out);
    }
}

/* Operators of patterns that stayed as the model wrote them, with a few places each. */
static void print_leftovers(FILE *out, const explain_report_t *r) {
    bool any = false;
    for (int i = 0; i < r->n_lines; i++) {
        const explain_line_t *line = &r->lines[i];
        int count = 0, before = 0;
        for (int k = 0; line->leftover && k < r->n_lines; k++) {
            bool equal = r->lines[k].leftover && !strcmp(r->lines[k].op, line->op);
            count += equal;
            before += equal && k < i;
        }
        if (!count || before) continue;
        if (!any) fputs("\nnot recognised\n", out);
        any = true;
        fprintf(out, "  %s×%d:", line->op, count);
        for (int k = i, shown = 0; k < r->n_lines && shown < MAX_PLACES; k++) {
            if (!r->lines[k].leftover || strcmp(r->lines[k].op, line->op)) continue;
            fputs(shown++ ? ", " : " ", out);
            print_plain(out, r->lines[k].place);
        }
        fputs(count > MAX_PLACES ? ", ...\n" : "\n", out);
    }
    if (!any) fputs("\nnot recognised: nothing\n", out);
}

static void print_rows(FILE *out, const explain_report_t *r) {
    if (!r->batch_rows) return;
    fprintf(out, "of %lld rows of a batch places for", (long long)r->batch_rows);
    if (r->label_rows) fprintf(out, " %lld labelled", (long long)r->label_rows);
    if (r->real_rows)
        fprintf(out, "%s %lld real", r->label_rows ? " and" : "", (long long)r->real_rows);
    fputs(" ones; operators that run over these alone are marked\n", out);
}

void explain_print_text(FILE *out, const explain_report_t *r) {
    char a[24], b[24], c[24];
    fprintf(out,
            "%s\nplanned peak %s (one run: activations and workspace), saved for backward %s, ",
            r->title, explain_amount(r->arena_bytes, a), explain_amount(r->saved_bytes, b));
    fprintf(out, "constants %s\n", explain_amount(r->constant_bytes, c));
    if (r->whole_bytes)
        fprintf(out,
                "of %s that a plan takes which keeps everything; computed again: %s, for %.1f %% "
                "more time by a model\n",
                explain_amount(r->whole_bytes, a), explain_amount(r->recomputed_bytes, b),
                r->model_ms > 0 ? 100 * r->recompute_ms / r->model_ms : 0);
    print_rows(out, r);
    fprintf(out, "inputs %s, outputs %s, gradients %s; ", explain_amount(r->input_bytes, a),
            explain_amount(r->output_bytes, b), explain_amount(r->grad_bytes, c));
    fprintf(out, "device %s, products by %s; planned in %.1f ms\n", r->device, r->library,
            r->compile_ms);
    print_phase(out, r, false);
    print_phase(out, r, true);
    print_totals(out, r);
    fputs("\nnodes of the model\n", out);
    print_fates(out, r);
    print_leftovers(out, r);
}

void explain_print_columns(FILE *out) {
    for (const explain_column_t *c = explain_columns; c->key; c++) {
        bool type = c->form == EXPLAIN_TYPE;
        const char *key = type ? "dtype, shape" : c->form == EXPLAIN_PHASE ? "phase" : c->key;
        fprintf(out, "  %-18s %s%s%s%s\n", key, c->meaning, c->heading[0] ? " (" : "", c->heading,
                c->heading[0] ? ")" : "");
    }
}
