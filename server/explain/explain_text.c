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

/* At most n bytes of a text. It comes from a file or a trainer: no byte may command a terminal. */
static void print_plain(FILE *out, const char *text, size_t n) {
    for (size_t i = 0; i < n && text[i]; i++) {
        unsigned char c = (unsigned char)text[i];
        fputc(c < 0x20 || c == 0x7f ? '?' : c, out);
    }
}

/* "model.layers.0.mlp (modeling_llama.py:172)" from "model.layers.0.mlp @ /path/...py:172". */
static void print_source(FILE *out, const explain_line_t *line) {
    const char *at = strstr(line->source, " @ ");
    if (line->node < 0) return;
    if (line->backward) fputs("gradient of ", out);
    if (!line->source[0]) {
        print_plain(out, line->node_name, SIZE_MAX);
    } else if (!at) {
        print_plain(out, line->source, SIZE_MAX);
    } else {
        const char *file = strrchr(at, '/');
        print_plain(out, line->source, (size_t)(at - line->source));
        fputs(" (", out);
        print_plain(out, file ? file + 1 : at + strlen(" @ "), SIZE_MAX);
        fputc(')', out);
    }
}

static const char *blank_zero(int64_t bytes, char buffer[24]) {
    return bytes ? explain_amount(bytes, buffer) : "";
}

static void print_line(FILE *out, const explain_line_t *line) {
    char type[GRADD_TYPE_TEXT], step[16] = "-", read[24], written[24], flops[24], work[24],
                                saved[24];
    if (line->step >= 0) snprintf(step, sizeof step, "%d", line->step);
    gradd_type_format(&line->type, type);
    fprintf(out, "%5s  %-27s %-12s %-22s %10s %10s %8s %10s %10s  ", step, line->op, line->kernel,
            type, blank_zero(line->bytes_read, read), blank_zero(line->bytes_written, written),
            line->flops > 0 ? explain_number(line->flops, flops) : "",
            blank_zero(line->work_bytes, work), blank_zero(line->saved_bytes, saved));
    print_source(out, line);
    if (line->fused[0]) fprintf(out, "  <- %s", line->fused);
    if (line->leftover) fputs("  (not recognised)", out);
    fputc('\n', out);
}

static void print_phase(FILE *out, const explain_report_t *r, bool backward) {
    int steps = 0, views = 0;
    double flops = 0;
    char number[24];
    for (int i = 0; i < r->n_lines; i++) {
        if (r->lines[i].backward != backward) continue;
        steps += r->lines[i].step >= 0;
        views += r->lines[i].step < 0;
        flops += r->lines[i].flops;
    }
    if (!steps && !views) return;
    fprintf(out, "\n%s: %d steps, %d without cost, %s FLOP\n", backward ? "backward" : "forward",
            steps, views, explain_number(flops, number));
    fprintf(out, "%5s  %-27s %-12s %-22s %10s %10s %8s %10s %10s  %s\n", "STEP", "OPERATOR",
            "KERNEL", "TYPE", "READ", "WRITTEN", "FLOP", "WORKSPACE", "SAVED", "SOURCE");
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
            if ((int)r->fates[i].fate == fate)
                fprintf(out, " %s×%d", r->fates[i].op, r->fates[i].count);
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
            print_source(out, &r->lines[k]);
        }
        fputs(count > MAX_PLACES ? ", ...\n" : "\n", out);
    }
    if (!any) fputs("\nnot recognised: nothing\n", out);
}

void explain_print_text(FILE *out, const explain_report_t *r) {
    char a[24], b[24], c[24];
    fprintf(out,
            "%s\nplanned peak %s (one run: activations and workspace), saved for backward %s, ",
            r->title, explain_amount(r->arena_bytes, a), explain_amount(r->saved_bytes, b));
    fprintf(out, "constants %s\n", explain_amount(r->constant_bytes, c));
    fprintf(out, "inputs %s, outputs %s, gradients %s; ", explain_amount(r->input_bytes, a),
            explain_amount(r->output_bytes, b), explain_amount(r->grad_bytes, c));
    fprintf(out, "products by %s; planned in %.1f ms\n", r->library, r->compile_ms);
    print_phase(out, r, false);
    print_phase(out, r, true);
    print_totals(out, r);
    fputs("\nnodes of the model\n", out);
    print_fates(out, r);
    print_leftovers(out, r);
}
