/* Prints the operator rows and the kernel rows of each device. See list_ops.h.
 *
 * Everything printed comes from the rows themselves, so the list is never out of date. Names in
 * rows are identifiers of our own sources; JSON needs no escaping for them.
 */
#include "server/cli/list_ops.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/contract/backend.h"
#include "kernels/contract/registry.h"

typedef struct op_entry_s {
    const gradd_op_t *op;
    const char *family;
} op_entry_t;

static int compare(const void *a, const void *b) {
    const gradd_op_t *x = ((const op_entry_t *)a)->op, *y = ((const op_entry_t *)b)->op;
    int order = strcmp(x->domain, y->domain);
    if (!order) order = strcmp(x->name, y->name);
    return order ? order : x->since - y->since;
}

/* All rows, sorted; NULL if there is no memory. */
static op_entry_t *sorted_rows(size_t *out_n) {
    size_t n = 0, k = 0;
    for (size_t f = 0; f < gradd_op_family_count; f++)
        n += gradd_op_families[f]->n;
    op_entry_t *rows = malloc((n ? n : 1) * sizeof *rows);
    if (!rows) return NULL;
    for (size_t f = 0; f < gradd_op_family_count; f++)
        for (size_t i = 0; i < gradd_op_families[f]->n; i++)
            rows[k++] = (op_entry_t){&gradd_op_families[f]->v[i], gradd_op_families[f]->file};
    qsort(rows, n, sizeof *rows, compare);
    *out_n = n;
    return rows;
}

/* "f32 f64", each name between `quote`s and with `between` in the middle; "any" for no mask. */
static void print_types(FILE *out, uint32_t mask, const char *quote, const char *between) {
    const char *before = "";
    for (int code = 1; code < GRADD_DT_END; code++) {
        gradd_dtype_t dtype = (gradd_dtype_t)code;
        if (!(mask & 1u << code) || !gradd_dtype_bytes(dtype)) continue;
        fprintf(out, "%s%s%s%s", before, quote, gradd_dtype_name(dtype), quote);
        before = between;
    }
}

/* A mask that names no particular types means anything. */
static bool is_any(uint32_t mask) {
    return !mask || mask == UINT32_MAX;
}

static const char *kind_name(gradd_attr_kind_t kind) {
    static const char *const names[] = {
        [GRADD_ATTR_END] = "?",         [GRADD_ATTR_INT] = "int",
        [GRADD_ATTR_FLOAT] = "float",   [GRADD_ATTR_STRING] = "string",
        [GRADD_ATTR_INTS] = "ints",     [GRADD_ATTR_FLOATS] = "floats",
        [GRADD_ATTR_TENSOR] = "tensor", [GRADD_ATTR_GRAPH] = "graph",
    };
    return names[kind];
}

static const char *gradient_of(const gradd_op_t *op) {
    return op->grad || gradd_op_is_composite(op) ? "yes" : "no";
}

typedef void (*print_kernel_t)(FILE *out, const gradd_backend_t *device, const gradd_op_t *op,
                               const gradd_kernel_t *kernel, bool first);

/* The kernels of all devices for an operator, in the order in which they are asked. */
static void each_kernel(FILE *out, const gradd_op_t *op, print_kernel_t print) {
    for (size_t d = 0; d < gradd_backend_count; d++) {
        bool first = true;
        for (size_t f = 0; f < gradd_backends[d]->n_kernels; f++)
            for (size_t i = 0; i < gradd_backends[d]->kernels[f]->n; i++) {
                const gradd_kernel_t *kernel = &gradd_backends[d]->kernels[f]->v[i];
                if (strcmp(kernel->op, op->name)) continue;
                print(out, gradd_backends[d], op, kernel, first);
                first = false;
            }
    }
}

/* The types that a kernel row takes out of those of its operator, per input. */
static void find_types(const gradd_kernel_t *kernel, const gradd_op_t *op,
                       uint32_t out[GRADD_OP_MAX_TYPES]) {
    for (int i = 0; i < GRADD_OP_MAX_TYPES; i++) {
        const uint32_t whole = gradd_types_at(op->types, i);
        uint32_t all = 0, mask = 0;
        out[i] = 0;
        if (i && !op->types[i] && !kernel->types[i]) continue;
        for (int code = 1; code < GRADD_DT_END; code++) {
            const gradd_dtype_t dtype = (gradd_dtype_t)code;
            if (!gradd_dtype_bytes(dtype)) continue;
            if (!is_any(whole) && !(whole & 1u << code)) continue;
            all |= 1u << code;
            if (gradd_kernel_takes(kernel, op, i, dtype)) mask |= 1u << code;
        }
        out[i] = is_any(whole) && mask == all ? UINT32_MAX : mask;
    }
}

/* ---- JSON ---- */

static void json_types(FILE *out, const uint32_t *types) {
    fprintf(out, "\"types\": [");
    for (int i = 0; i < GRADD_OP_MAX_TYPES && (i == 0 || types[i]); i++) {
        fprintf(out, "%s", i ? ", " : "");
        if (is_any(types[i])) {
            fprintf(out, "\"any\"");
            continue;
        }
        fprintf(out, "[");
        print_types(out, types[i], "\"", ", ");
        fprintf(out, "]");
    }
    fprintf(out, "]");
}

static void json_kernel(FILE *out, const gradd_backend_t *device, const gradd_op_t *op,
                        const gradd_kernel_t *kernel, bool first) {
    fprintf(out, "%s{\"device\": \"%s\", \"name\": \"%s\", ",
            first && device == gradd_backends[0] ? "" : ", ", device->name, kernel->name);
    uint32_t types[GRADD_OP_MAX_TYPES];
    find_types(kernel, op, types);
    json_types(out, types);
    fprintf(out, "}");
}

static void json_attrs(FILE *out, const gradd_op_t *op) {
    fprintf(out, "\"attributes\": [");
    for (const gradd_attr_spec_t *a = op->attrs; a && a->name; a++)
        fprintf(out, "%s{\"name\": \"%s\", \"kind\": \"%s\", \"required\": %s}",
                a == op->attrs ? "" : ", ", a->name, kind_name(a->kind),
                a->required ? "true" : "false");
    fprintf(out, "]");
}

static void json_row(FILE *out, const op_entry_t *row) {
    const gradd_op_t *op = row->op;
    fprintf(out, "  {\"name\": \"%s\", \"domain\": \"%s\", \"since\": %d, \"until\": ", op->name,
            op->domain[0] ? op->domain : "ai.onnx", op->since);
    if (op->until)
        fprintf(out, "%d, ", op->until);
    else
        fprintf(out, "null, ");
    fprintf(out, "\"inputs\": [%d, %d], \"outputs\": [%d, %d], ", op->min_in, op->max_in,
            op->min_out, op->max_out);
    json_types(out, op->types);
    fprintf(out, ", ");
    json_attrs(out, op);
    fprintf(out,
            ", \"gradient\": %s, \"expands\": %s, \"from_model\": %s, \"family\": \"%s\", "
            "\"kernels\": [",
            op->grad || gradd_op_is_composite(op) ? "true" : "false", op->expand ? "true" : "false",
            op->flags & GRADD_OP_INTERNAL ? "false" : "true", row->family);
    each_kernel(out, op, json_kernel);
    fprintf(out, "]}");
}

static void list_json(FILE *out, const op_entry_t *rows, size_t n) {
    fprintf(out, "[\n");
    for (size_t i = 0; i < n; i++) {
        json_row(out, &rows[i]);
        fprintf(out, "%s\n", i + 1 < n ? "," : "");
    }
    fprintf(out, "]\n");
}

/* ---- text ---- */

static const char *arity(char *buffer, size_t n, int min, int max, int unbounded) {
    if (max >= unbounded)
        snprintf(buffer, n, "%d or more", min);
    else if (min == max)
        snprintf(buffer, n, "%d", min);
    else
        snprintf(buffer, n, "%d to %d", min, max);
    return buffer;
}

/* " cpu: oneDNN f32 (f32), blocked f64 (f64)"; without types where it takes all that there are. */
static void text_kernel(FILE *out, const gradd_backend_t *device, const gradd_op_t *op,
                        const gradd_kernel_t *kernel, bool first) {
    if (first)
        fprintf(out, " | %s: %s", device->name, kernel->name);
    else
        fprintf(out, ", %s", kernel->name);
    uint32_t types[GRADD_OP_MAX_TYPES];
    find_types(kernel, op, types);
    if (types[0] == op->types[0] || (is_any(types[0]) && is_any(op->types[0]))) return;
    fprintf(out, " (");
    print_types(out, types[0], "", " ");
    fprintf(out, ")");
}

static void list_text(FILE *out, const op_entry_t *rows, size_t n) {
    char in[32], outs[32], opset[32];
    fprintf(out, "%-30s %-10s %-8s %-10s %-10s %-8s %s\n", "operator", "domain", "opset", "inputs",
            "outputs", "gradient", "types of the first input | kernels of the device");
    for (size_t i = 0; i < n; i++) {
        const gradd_op_t *op = rows[i].op;
        if (op->until)
            snprintf(opset, sizeof opset, "%d-%d", op->since, op->until);
        else
            snprintf(opset, sizeof opset, "%d+", op->since);
        fprintf(out, "%-30s %-10s %-8s %-10s %-10s %-8s ", op->name,
                op->domain[0] ? op->domain : "ai.onnx", opset,
                arity(in, sizeof in, op->min_in, op->max_in, GRADD_OP_MAX_IN),
                arity(outs, sizeof outs, op->min_out, op->max_out, GRADD_OP_MAX_OUT),
                gradient_of(op));
        if (is_any(op->types[0]))
            fprintf(out, "any");
        else
            print_types(out, op->types[0], "", " ");
        fprintf(out, "%s", op->flags & GRADD_OP_INTERNAL ? " (internal)" : "");
        each_kernel(out, op, text_kernel);
        fprintf(out, "\n");
    }
}

void list_ops(FILE *out, bool json) {
    size_t n = 0;
    op_entry_t *rows = sorted_rows(&n);
    if (!rows) return;
    if (json)
        list_json(out, rows, n);
    else
        list_text(out, rows, n);
    free(rows);
}
