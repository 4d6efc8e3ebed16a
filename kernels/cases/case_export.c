/* Export of executed test cases. See case_export.h. */
#include "kernels/cases/case_export.h"

#include "kernels/contract/backend.h"
#include "kernels/contract/registry.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const gradd_op_t *find_case(int64_t index, const gradd_case_t **out) {
    for (size_t f = 0; f < gradd_op_family_count; f++)
        for (size_t i = 0; i < gradd_op_families[f]->n; i++) {
            const gradd_op_t *op = &gradd_op_families[f]->v[i];
            for (*out = op->cases; *out && (*out)->text; (*out)++)
                if (!index--) return op;
        }
    return NULL;
}

static int opset_of(const gradd_op_t *op) {
    if (op->until) return op->until;
    return op->since > 20 || *op->domain ? op->since : 20;
}

gradd_status_t gradd_case_compute(const gradd_op_t *op, gradd_case_data_t *data,
                                  gradd_view_t *out) {
    gradd_view_t seen[GRADD_OP_MAX_IN];
    gradd_type_t types[GRADD_OP_MAX_OUT];
    for (int i = 0; i < data->n_in; i++)
        seen[i] = (gradd_view_t){data->in[i].type, data->known[i] ? data->in[i].data : NULL};
    if (!data->n_out) data->n_out = op->min_out;
    if (gradd_op_is_composite(op)) return GRADD_OK;
    gradd_infer_t c = {
        .op = op,
        .attrs = {data->attrs, data->n_attrs},
        .opset = opset_of(op),
        .n_in = data->n_in,
        .n_out = data->n_out,
        .in = seen,
        .out = types
    };
    GRADD_TRY(gradd_op_infer(&c));
    if (op->expand && !gradd_cpu_can(&c)) return GRADD_OK;
    gradd_launch_t r = {.op = op,
                        .attrs = c.attrs,
                        .opset = c.opset,
                        .n_in = data->n_in,
                        .n_out = data->n_out,
                        .in = data->in,
                        .out = out};
    for (int j = 0; j < data->n_out; j++) {
        out[j] = (gradd_view_t){.type = types[j]};
        if (!types[j].dtype) continue;
        out[j].data = gradd_case_alloc(data, (size_t)gradd_type_bytes(&types[j]) + 1);
        if (!out[j].data) return GRADD_FAIL(NOMEM, "output of %s", op->name);
    }
    return gradd_cpu_call(&c, &r);
}

static void put_text(FILE *to, const char *text) {
    fputc('"', to);
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') fputc('\\', to);
        fputc(*text, to);
    }
    fputc('"', to);
}

static void put_views(FILE *to, const char *name, const gradd_view_t *views, int n) {
    fprintf(to, ", \"%s\": [", name);
    for (int i = 0; i < n; i++) {
        if (i) fputs(", ", to);
        if (!views[i].type.dtype) {
            fputs("null", to);
            continue;
        }
        fprintf(to, "{\"dtype\": \"%s\", \"shape\": [", gradd_dtype_name(views[i].type.dtype));
        for (int k = 0; k < views[i].type.rank; k++)
            fprintf(to, "%s%" PRId64, k ? ", " : "", views[i].type.dims[k]);
        fputs("]}", to);
    }
    fputc(']', to);
}

/* Infinity as Python's reader takes it. */
static void put_number(FILE *to, double x) {
    if (isinf(x))
        fputs(x < 0 ? "-Infinity" : "Infinity", to);
    else
        fprintf(to, "%.17g", x);
}

static void put_attr(FILE *to, const gradd_attr_t *a) {
    static const char *const kinds[] = {[GRADD_ATTR_INT] = "int",
                                        [GRADD_ATTR_FLOAT] = "float",
                                        [GRADD_ATTR_STRING] = "string",
                                        [GRADD_ATTR_INTS] = "ints",
                                        [GRADD_ATTR_FLOATS] = "floats"};
    fprintf(to, "{\"name\": \"%s\", \"kind\": \"%s\", \"value\": ", a->name, kinds[a->kind]);
    if (a->kind == GRADD_ATTR_INT)
        fprintf(to, "%" PRId64, a->i);
    else if (a->kind == GRADD_ATTR_FLOAT)
        put_number(to, a->f);
    else if (a->kind == GRADD_ATTR_STRING)
        put_text(to, a->s);
    else {
        fputc('[', to);
        for (size_t i = 0; i < a->n; i++) {
            if (i) fputs(", ", to);
            if (a->kind == GRADD_ATTR_INTS)
                fprintf(to, "%" PRId64, a->ints[i]);
            else
                put_number(to, a->floats[i]);
        }
        fputc(']', to);
    }
    fputc('}', to);
}

static void put_all(FILE *to, const gradd_op_t *op, const gradd_case_t *spec,
                    const gradd_case_data_t *data, const gradd_view_t *out) {
    fprintf(to,
            "{\"op\": \"%s\", \"domain\": \"%s\", \"opset\": %d, \"flags\": %u, \"expands\": %s",
            op->name, op->domain, opset_of(op), op->flags, op->expand ? "true" : "false");
    fprintf(to, ", \"tol\": %.17g, \"text\": ", spec->tol);
    put_text(to, spec->text);
    put_views(to, "in", data->in, data->n_in);
    fputs(", \"attrs\": [", to);
    for (int i = 0; i < data->n_attrs; i++) {
        if (i) fputs(", ", to);
        put_attr(to, &data->attrs[i]);
    }
    fputc(']', to);
    put_views(to, "out", out, data->n_out);
    fputc('}', to);
    fputc(0, to);
    for (int i = 0; i < data->n_in; i++)
        if (data->in[i].type.dtype)
            fwrite(data->in[i].data, 1, (size_t)gradd_type_bytes(&data->in[i].type), to);
    for (int j = 0; j < data->n_out; j++)
        if (out[j].type.dtype) fwrite(out[j].data, 1, (size_t)gradd_type_bytes(&out[j].type), to);
}

int64_t gradd_case_export(int64_t index, void *buffer, int64_t bytes) {
    const gradd_case_t *spec;
    const gradd_op_t *op = find_case(index, &spec);
    gradd_view_t out[GRADD_OP_MAX_OUT] = {0};
    gradd_case_data_t data;
    char *text = NULL;
    size_t size = 0;
    if (!op) return 0;
    gradd_status_t status = gradd_case_parse(spec->text, GRADD_DT_NONE, 42, &data);
    if (status) return -(int64_t)status;
    status = gradd_case_compute(op, &data, out);
    FILE *to = status ? NULL : open_memstream(&text, &size);
    if (!status && !to) status = GRADD_FAIL(NOMEM, "case of %s", op->name);
    if (to) {
        put_all(to, op, spec, &data, out);
        if (fclose(to))
            status = GRADD_FAIL(NOMEM, "case of %s", op->name);
        else if ((int64_t)size <= bytes)
            memcpy(buffer, text, size);
    }
    free(text);
    gradd_case_free(&data);
    return status ? -(int64_t)status : (int64_t)size;
}
