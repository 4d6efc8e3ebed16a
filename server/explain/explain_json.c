/* Prints an explanation as one JSON object. See explain_report.h. */
#include "server/explain/explain_report.h"

void explain_json_text(FILE *out, const char *text) {
    fputc('"', out);
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;
        if (c < 0x20 || c == '"' || c == '\\' || c == 0x7f)
            fprintf(out, "\\u%04x", c);
        else
            fputc(c, out);
    }
    fputc('"', out);
}

static void print_type(FILE *out, const gradd_type_t *type) {
    fprintf(out, "\"dtype\": \"%s\", \"shape\": [", gradd_dtype_name(type->dtype));
    for (int d = 0; d < type->rank; d++)
        fprintf(out, "%s%lld", d ? ", " : "", (long long)type->dims[d]);
    fputc(']', out);
}

/* All columns of a list, without braces. */
static void print_columns(FILE *out, const explain_column_t *columns, const void *base) {
    char buffer[EXPLAIN_PLAIN];
    for (const explain_column_t *c = columns; c->key; c++) {
        bool phase = c->form == EXPLAIN_PHASE;
        if (c != columns) fputs(", ", out);
        if (c->form == EXPLAIN_TYPE) {
            print_type(out, (const void *)((const char *)base + c->offset));
            continue;
        }
        fprintf(out, "\"%s\": ", phase ? "phase" : c->key);
        const char *text = explain_plain(c, base, buffer);
        if (phase || c->form == EXPLAIN_TEXT || c->form == EXPLAIN_PLACE)
            explain_json_text(out, text);
        else
            fputs(text, out);
    }
}

static void print_fates(FILE *out, const explain_report_t *r) {
    fputs("\"nodes\": {", out);
    for (int i = 0; i < r->n_fates; i++) {
        bool first = !i || r->fates[i - 1].fate != r->fates[i].fate;
        if (first) fprintf(out, "%s\"%s\": {", i ? "}, " : "", gradd_fate_name(r->fates[i].fate));
        if (!first) fputs(", ", out);
        explain_json_text(out, r->fates[i].op);
        fprintf(out, ": %d", r->fates[i].count);
    }
    fputs(r->n_fates ? "}}, " : "}, ", out);
}

void explain_print_json(FILE *out, const explain_report_t *r) {
    fputs("{\"title\": ", out);
    explain_json_text(out, r->title);
    fputs(", ", out);
    print_columns(out, explain_totals, r);
    fputs(", ", out);
    print_fates(out, r);
    fputs("\"rows\": [", out);
    for (int i = 0; i < r->n_lines; i++) {
        fputs(i ? ",\n{" : "\n{", out);
        print_columns(out, explain_columns, &r->lines[i]);
        fputc('}', out);
    }
    fputs("]}\n", out);
}

void explain_print_notes(FILE *out, const explain_report_t *r) {
    fputc('[', out);
    for (int i = 0; i < r->n_nodes; i++) {
        explain_notes_t notes = {.sentence = ""};
        (void)explain_report_notes(r, i, &notes); /* without memory: of this node nothing */
        fputs(i ? ",\n{\"sentence\": " : "\n{\"sentence\": ", out);
        explain_json_text(out, notes.sentence);
        fputs(", \"notes\": {", out);
        for (int k = 0; k < notes.n; k++) {
            if (k) fputs(", ", out);
            explain_json_text(out, notes.key[k]);
            fputs(": ", out);
            explain_json_text(out, notes.value[k]);
        }
        fputs("}}", out);
    }
    fputs("]\n", out);
}
