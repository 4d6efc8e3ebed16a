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

static void text_field(FILE *out, const char *key, const char *value) {
    fprintf(out, "\"%s\": ", key);
    explain_json_text(out, value);
    fputs(", ", out);
}

static void number_field(FILE *out, const char *key, int64_t value) {
    fprintf(out, "\"%s\": %lld, ", key, (long long)value);
}

static void print_line(FILE *out, const explain_line_t *line) {
    fputc('{', out);
    number_field(out, "row", line->row);
    number_field(out, "step", line->step);
    text_field(out, "kind", line->kind);
    text_field(out, "phase", line->backward ? "backward" : "forward");
    text_field(out, "op", line->op);
    text_field(out, "domain", line->domain);
    text_field(out, "kernel", line->kernel);
    number_field(out, "node", line->node);
    text_field(out, "node_name", line->node_name);
    text_field(out, "node_op", line->node_op);
    text_field(out, "fused", line->fused);
    text_field(out, "source", line->source);
    text_field(out, "dtype", gradd_dtype_name(line->type.dtype));
    fputs("\"shape\": [", out);
    for (int d = 0; d < line->type.rank; d++)
        fprintf(out, "%s%lld", d ? ", " : "", (long long)line->type.dims[d]);
    fputs("], ", out);
    number_field(out, "bytes_read", line->bytes_read);
    number_field(out, "bytes_written", line->bytes_written);
    number_field(out, "work_bytes", line->work_bytes);
    number_field(out, "saved_bytes", line->saved_bytes);
    fprintf(out, "\"flops\": %.0f, \"leftover\": %s}", line->flops,
            line->leftover ? "true" : "false");
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
    fputc('{', out);
    text_field(out, "title", r->title);
    text_field(out, "library", r->library);
    number_field(out, "threads", r->threads);
    number_field(out, "arena_bytes", r->arena_bytes);
    number_field(out, "saved_bytes", r->saved_bytes);
    number_field(out, "constant_bytes", r->constant_bytes);
    number_field(out, "input_bytes", r->input_bytes);
    number_field(out, "output_bytes", r->output_bytes);
    number_field(out, "grad_bytes", r->grad_bytes);
    fprintf(out, "\"compile_ms\": %.3f, ", r->compile_ms);
    print_fates(out, r);
    fputs("\"rows\": [", out);
    for (int i = 0; i < r->n_lines; i++) {
        fputs(i ? ",\n" : "\n", out);
        print_line(out, &r->lines[i]);
    }
    fputs("]}\n", out);
}
