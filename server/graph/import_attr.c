/* Attributes of an imported node.
 *
 * Checked against the operator's row: a name that the row lacks is UNSUPPORTED, a wrong kind or a
 * missing required attribute is GRAPH. Nodes without a row keep what gradd_attr_t can hold.
 * Subgraphs are refused in either case, but for those of If, Loop and Scan (import_region.c).
 */
#include <math.h>
#include <string.h>

#include "server/graph/import.h"

#define KIND(name) ONNX__ATTRIBUTE_PROTO__KIND__##name

typedef struct kind_s {
    const char *name;
    gradd_attr_kind_t as; /* GRADD_ATTR_END: gradd_attr_t cannot hold it */
} kind_t;

static const kind_t kinds[] = {
    [KIND(UNDEFINED)] = {"UNDEFINED",      GRADD_ATTR_END   },
    [KIND(FLOAT)] = {"FLOAT",          GRADD_ATTR_FLOAT },
    [KIND(INT)] = {"INT",            GRADD_ATTR_INT   },
    [KIND(STRING)] = {"STRING",         GRADD_ATTR_STRING},
    [KIND(TENSOR)] = {"TENSOR",         GRADD_ATTR_TENSOR},
    [KIND(GRAPH)] = {"GRAPH",          GRADD_ATTR_GRAPH },
    [KIND(FLOATS)] = {"FLOATS",         GRADD_ATTR_FLOATS},
    [KIND(INTS)] = {"INTS",           GRADD_ATTR_INTS  },
    [KIND(STRINGS)] = {"STRINGS",        GRADD_ATTR_END   },
    [KIND(TENSORS)] = {"TENSORS",        GRADD_ATTR_END   },
    [KIND(GRAPHS)] = {"GRAPHS",         GRADD_ATTR_END   },
    [KIND(SPARSE_TENSOR)] = {"SPARSE_TENSOR",  GRADD_ATTR_END   },
    [KIND(SPARSE_TENSORS)] = {"SPARSE_TENSORS", GRADD_ATTR_END   },
    [KIND(TYPE_PROTO)] = {"TYPE_PROTO",     GRADD_ATTR_END   },
    [KIND(TYPE_PROTOS)] = {"TYPE_PROTOS",    GRADD_ATTR_END   },
};
enum { N_KINDS = sizeof kinds / sizeof kinds[0] };

static const char *name_of_kind(gradd_attr_kind_t kind) {
    for (int k = 0; k < N_KINDS; k++)
        if (kinds[k].as == kind && kind != GRADD_ATTR_END) return kinds[k].name;
    return "?";
}

/* The value must be where the declared kind says, and nowhere else. An absent FLOAT, INT or STRING
 * is its zero: writers of proto3 leave zeros out. */
static gradd_status_t check_kind(const Onnx__AttributeProto *a) {
    if (a->ref_attr_name && a->ref_attr_name[0])
        return GRADD_FAIL(GRAPH, "refers to a function's attribute '%.*s' outside of a function",
                          IMPORT_TEXT(a->ref_attr_name));
    if (a->type <= KIND(UNDEFINED) || a->type >= N_KINDS)
        return GRADD_FAIL(GRAPH, "kind %d is not an ONNX attribute kind", a->type);
    if (a->type == KIND(GRAPH) || a->type == KIND(GRAPHS) || a->g || a->n_graphs)
        return GRADD_FAIL(UNSUPPORTED, "subgraphs are not supported");
    const bool present[] = {
        [KIND(FLOAT)] = a->has_f,           [KIND(INT)] = a->has_i,
        [KIND(STRING)] = a->has_s,          [KIND(TENSOR)] = a->t != NULL,
        [KIND(FLOATS)] = a->n_floats > 0,   [KIND(INTS)] = a->n_ints > 0,
        [KIND(STRINGS)] = a->n_strings > 0, [KIND(TENSORS)] = a->n_tensors > 0,
    };
    for (int k = 0; k < (int)(sizeof present / sizeof present[0]); k++)
        if (present[k] && k != a->type)
            return GRADD_FAIL(GRAPH, "is declared as %s but holds %s", kinds[a->type].name,
                              kinds[k].name);
    if (a->type == KIND(TENSOR) && !a->t) return GRADD_FAIL(GRAPH, "holds no tensor");
    return GRADD_OK;
}

/* No operator means anything by NaN, but for Constant, whose numbers are data. */
static gradd_status_t check_number(const Onnx__AttributeProto *a) {
    if (!isnan(a->f) || !strcmp(a->name, "value_float")) return GRADD_OK;
    return GRADD_FAIL(GRAPH, "is NaN, expected a number");
}

static gradd_status_t check_spec(const Onnx__AttributeProto *a, const gradd_op_t *op) {
    const gradd_attr_spec_t *spec = op->attrs;
    while (spec && spec->name && strcmp(spec->name, a->name))
        spec++;
    if (!spec || !spec->name)
        return GRADD_FAIL(UNSUPPORTED, "%s takes no such attribute in gradd", op->name);
    if (spec->kind != kinds[a->type].as)
        return GRADD_FAIL(GRAPH, "is %s, expected %s", kinds[a->type].name,
                          name_of_kind(spec->kind));
    return GRADD_OK;
}

static gradd_status_t copy_string(arena_t *arena, const Onnx__AttributeProto *a,
                                  gradd_attr_t *out) {
    for (size_t i = 0; i < a->s.len; i++)
        if (a->s.data[i] < 0x20 || a->s.data[i] == 0x7f)
            return GRADD_FAIL(GRAPH, "the string has a control character (code %d at byte %zu)",
                              a->s.data[i], i);
    out->s = arena_string(arena, a->s.data, a->s.len);
    out->n = a->s.len;
    return out->s ? GRADD_OK : GRADD_E_NOMEM;
}

static gradd_status_t copy_floats(arena_t *arena, const Onnx__AttributeProto *a,
                                  gradd_attr_t *out) {
    double *floats = arena_array(arena, a->n_floats, sizeof *floats);
    if (!floats) return GRADD_E_NOMEM;
    for (size_t i = 0; i < a->n_floats; i++)
        floats[i] = (double)a->floats[i];
    out->floats = floats;
    out->n = a->n_floats;
    return GRADD_OK;
}

static gradd_status_t copy_ints(arena_t *arena, const Onnx__AttributeProto *a, gradd_attr_t *out) {
    int64_t *ints = arena_array(arena, a->n_ints, sizeof *ints);
    if (!ints) return GRADD_E_NOMEM;
    if (a->n_ints) memcpy(ints, a->ints, a->n_ints * sizeof *ints);
    out->ints = ints;
    out->n = a->n_ints;
    return GRADD_OK;
}

static gradd_status_t copy_value(import_t *m, const Onnx__AttributeProto *a, gradd_attr_t *out) {
    arena_t *arena = m->model->arena;
    switch (out->kind) {
    case GRADD_ATTR_INT:
        out->i = a->i;
        return GRADD_OK;
    case GRADD_ATTR_FLOAT:
        out->f = (double)a->f;
        return GRADD_OK;
    case GRADD_ATTR_STRING:
        return copy_string(arena, a, out);
    case GRADD_ATTR_INTS:
        return copy_ints(arena, a, out);
    case GRADD_ATTR_FLOATS:
        return copy_floats(arena, a, out);
    case GRADD_ATTR_TENSOR:
        return import_tensor(m, a->t, &out->tensor);
    default:
        return GRADD_FAIL(INTERNAL, "attribute kind %d cannot be copied", out->kind);
    }
}

/* The functions of a recurrent layer, per direction: a list that says these says nothing. */
static const struct {
    const char *op;
    int n;
    const char *functions[3];
} usual[] = {
    {"RNN",  1, {"Tanh"}                   },
    {"GRU",  2, {"Sigmoid", "Tanh"}        },
    {"LSTM", 3, {"Sigmoid", "Tanh", "Tanh"}},
};

static gradd_status_t check_functions(const gradd_op_t *op, const Onnx__AttributeProto *a,
                                      bool *out_usual) {
    *out_usual = false;
    for (size_t k = 0; k < sizeof usual / sizeof usual[0]; k++) {
        if (strcmp(op->name, usual[k].op) || strcmp(a->name, "activations")) continue;
        const size_t n = (size_t)usual[k].n;
        for (size_t i = 0; i < a->n_strings; i++) {
            const char *one = usual[k].functions[i % n];
            const ProtobufCBinaryData *got = &a->strings[i];
            if (got->len != strlen(one) || memcmp(got->data, one, got->len))
                return GRADD_FAIL(UNSUPPORTED, "function %zu is not %s, as it has to be in gradd",
                                  i, one);
        }
        *out_usual = a->n_strings == n || a->n_strings == 2 * n;
    }
    return GRADD_OK;
}

static gradd_status_t import_attr(import_t *m, const Onnx__NodeProto *node, size_t position,
                                  const gradd_op_t *op, gradd_attr_t *out) {
    const Onnx__AttributeProto *a = node->attribute[position];
    for (size_t k = 0; k < position; k++)
        if (!strcmp(node->attribute[k]->name, a->name)) return GRADD_FAIL(GRAPH, "is given twice");
    if (a->type == KIND(GRAPH) && a->g && import_is_region(node)) return GRADD_OK;
    GRADD_TRY(check_kind(a));
    if (a->type == KIND(FLOAT)) GRADD_TRY(check_number(a));
    bool said = false;
    if (op && a->type == KIND(STRINGS)) GRADD_TRY(check_functions(op, a, &said));
    if (op && !said) GRADD_TRY(check_spec(a, op));
    gradd_attr_t attr = {.kind = kinds[a->type].as};
    if (attr.kind == GRADD_ATTR_END) return GRADD_OK;
    GRADD_TRY(copy_value(m, a, &attr));
    attr.name = arena_string(m->model->arena, a->name, strlen(a->name));
    if (!attr.name) return GRADD_E_NOMEM;
    *out = attr;
    return GRADD_OK;
}

static gradd_status_t check_required(const gradd_op_t *op, gradd_attrs_t attrs) {
    for (const gradd_attr_spec_t *spec = op->attrs; spec && spec->name; spec++)
        if (spec->required && !gradd_attr_find(attrs, spec->name))
            return GRADD_FAIL(GRAPH, "attribute '%s' is missing", spec->name);
    return GRADD_OK;
}

gradd_status_t import_attrs(import_t *m, const Onnx__NodeProto *node, const gradd_op_t *op,
                            gradd_attrs_t *out_attrs) {
    size_t n = node->n_attribute;
    if (n > IMPORT_MAX_ATTRS)
        return GRADD_FAIL(LIMIT, "%zu attributes, the limit is %d", n, IMPORT_MAX_ATTRS);
    gradd_attr_t *v = arena_array(m->model->arena, n, sizeof *v);
    if (!v) return GRADD_E_NOMEM;
    gradd_attrs_t attrs = {.v = v};
    for (size_t i = 0; i < n; i++) {
        const char *name = node->attribute[i]->name;
        GRADD_TRY(import_check_name(m, "attribute name", name, true));
        gradd_status_t status = import_attr(m, node, i, op, &v[attrs.n]);
        if (status) return gradd_wrap(status, "attribute '%.*s'", IMPORT_TEXT(name));
        if (v[attrs.n].kind != GRADD_ATTR_END) attrs.n++;
    }
    if (op) GRADD_TRY(check_required(op, attrs));
    *out_attrs = attrs;
    return GRADD_OK;
}
