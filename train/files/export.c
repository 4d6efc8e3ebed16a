/* Export for inference. Nodes of an ONNX graph stand behind what they read, so one look at them
 * from the last to the first finds all that some outputs need. Everything is copied as it lies in
 * the model but the nodes that behave otherwise in training.
 */
#include "train/files/export.h"

#include <stdlib.h>
#include <string.h>

#include "train/files/nodes.h"
#include "train/files/pieces.h"
#include "train/files/proto.h"
#include "train/session.h"

/* A name of the graph, and whether the outputs need its value. */
typedef struct exported_name_s {
    proto_span_t text;
    proto_span_t type; /* the ValueInfo's whole field without its head; empty = not said */
    bool needed;
} exported_name_t;

/* Fields of the graph. */
typedef struct exported_s {
    proto_span_t graph;
    proto_field_t *fields; /* Owned */
    int n_fields;
    exported_name_t *names; /* Owned, sorted, each once */
    int n_names, room;
} exported_t;

/* ---- names ----------------------------------------------------------------------------------- */

static int compare_spans(proto_span_t a, proto_span_t b) {
    const size_t n = a.n < b.n ? a.n : b.n;
    const int order = n ? memcmp(a.at, b.at, n) : 0;
    return order ? order : (a.n > b.n) - (a.n < b.n);
}

static int compare_names(const void *a, const void *b) {
    return compare_spans(((const exported_name_t *)a)->text, ((const exported_name_t *)b)->text);
}

static exported_name_t *find_name(const exported_t *exported, proto_span_t text) {
    const exported_name_t key = {.text = text};
    return exported->n_names ? bsearch(&key, exported->names, (size_t)exported->n_names, sizeof key,
                                       compare_names)
                             : NULL;
}

static exported_name_t *find_text(const exported_t *exported, const char *text) {
    return find_name(exported, (proto_span_t){(const uint8_t *)text, strlen(text)});
}

static gradd_status_t add_name(void *context, proto_span_t text) {
    exported_t *exported = context;
    if (exported->n_names == exported->room) {
        const int larger = exported->room * 2 + 64;
        exported_name_t *names = realloc(exported->names, (size_t)larger * sizeof *exported->names);
        if (!names) return GRADD_FAIL(NOMEM, "no memory for the names of the model");
        exported->names = names;
        exported->room = larger;
    }
    exported->names[exported->n_names++] = (exported_name_t){.text = text};
    return GRADD_OK;
}

static gradd_status_t add_names(exported_t *exported, proto_span_t node) {
    proto_span_t rest = node;
    proto_field_t field;
    bool more;
    for (;;) {
        GRADD_TRY(proto_next(&rest, &field, &more));
        if (!more) return node_visit_bodies(node, add_name, exported);
        if (field.id == PROTO_NODE_INPUT || field.id == PROTO_NODE_OUTPUT)
            GRADD_TRY(add_name(exported, field.bytes));
    }
}

/* Every name that a node reads or writes, and those of inputs that are outputs as they are. */
static gradd_status_t list_names(exported_t *exported) {
    int n = 0;
    for (int i = 0; i < exported->n_fields; i++) {
        const proto_field_t *field = &exported->fields[i];
        proto_span_t name;
        if (field->id == PROTO_GRAPH_NODE) {
            GRADD_TRY(add_names(exported, field->bytes));
        } else if (field->id == PROTO_GRAPH_OUTPUT) {
            GRADD_TRY(proto_find(field->bytes, PROTO_VALUE_NAME, &name));
            GRADD_TRY(add_name(exported, name));
        }
    }
    if (exported->n_names)
        qsort(exported->names, (size_t)exported->n_names, sizeof *exported->names, compare_names);
    for (int i = 0; i < exported->n_names; i++)
        if (n == 0 || compare_names(&exported->names[n - 1], &exported->names[i]) != 0)
            exported->names[n++] = exported->names[i];
    exported->n_names = n;
    return GRADD_OK;
}

/* ---- the graph ------------------------------------------------------------------------------- */

static gradd_status_t list_fields(exported_t *exported) {
    proto_span_t rest = exported->graph;
    proto_field_t field;
    bool more;
    int room = 0;
    for (;;) {
        GRADD_TRY(proto_next(&rest, &field, &more));
        if (!more) return GRADD_OK;
        if (exported->n_fields == room) {
            room = room * 2 + 64;
            proto_field_t *fields =
                realloc(exported->fields, (size_t)room * sizeof *exported->fields);
            if (!fields) return GRADD_FAIL(NOMEM, "no memory for the nodes of the model");
            exported->fields = fields;
        }
        exported->fields[exported->n_fields++] = field;
    }
}

/* Types of values that may be outputs. */
static gradd_status_t list_types(exported_t *exported) {
    for (int i = 0; i < exported->n_fields; i++) {
        const proto_field_t *field = &exported->fields[i];
        proto_span_t text;
        if (field->id != PROTO_GRAPH_OUTPUT && field->id != PROTO_GRAPH_VALUE) continue;
        GRADD_TRY(proto_find(field->bytes, PROTO_VALUE_NAME, &text));
        exported_name_t *name = find_name(exported, text);
        if (name) name->type = field->bytes;
    }
    return GRADD_OK;
}

enum { DROPOUT_INPUTS = 2, NORM_OUTPUTS = 1 }; /* in evaluation mode */

static gradd_status_t need_name(void *exported, proto_span_t name) {
    find_name(exported, name)->needed = true;
    return GRADD_OK;
}

/* Whether a value that the node writes is needed; then all that it reads is. */
static gradd_status_t need_node(exported_t *exported, proto_span_t node, bool *out_needed) {
    const proto_span_t whole = node;
    proto_span_t rest = node;
    proto_field_t field;
    node_kind_t kind;
    bool more = true;
    int inputs = 0;
    *out_needed = false;
    GRADD_TRY(node_find_kind(node, &kind));
    while (more) {
        GRADD_TRY(proto_next(&rest, &field, &more));
        if (more && field.id == PROTO_NODE_OUTPUT && field.bytes.n)
            *out_needed = *out_needed || find_name(exported, field.bytes)->needed;
    }
    for (more = *out_needed; more;) {
        GRADD_TRY(proto_next(&node, &field, &more));
        if (!more || field.id != PROTO_NODE_INPUT) continue;
        if (kind != NODE_DROPOUT || inputs++ < DROPOUT_INPUTS)
            find_name(exported, field.bytes)->needed = true;
    }
    return *out_needed ? node_visit_bodies(whole, need_name, exported) : GRADD_OK;
}

/* An output is the result of a node, and is named once. */
static gradd_status_t check_outputs(const exported_t *exported, const char *const *outputs,
                                    int n_outputs) {
    if (n_outputs <= 0) return GRADD_FAIL(TENSOR, "%d outputs, expected one at least", n_outputs);
    if (!outputs) return GRADD_FAIL(TENSOR, "the names of the outputs are missing");
    for (int i = 0; i < n_outputs; i++) {
        if (!outputs[i]) return GRADD_FAIL(TENSOR, "output %d has no name", i);
        for (int k = 0; k < i; k++)
            if (!strcmp(outputs[i], outputs[k]))
                return GRADD_FAIL(TENSOR, "output '%s' is named twice", outputs[i]);
        for (int k = 0; k < exported->n_fields; k++) {
            const proto_field_t *field = &exported->fields[k];
            proto_span_t name;
            if (field->id != PROTO_GRAPH_INPUT) continue;
            GRADD_TRY(proto_find(field->bytes, PROTO_VALUE_NAME, &name));
            if (proto_is(name, outputs[i]))
                return GRADD_FAIL(TENSOR, "'%s' is an input of the model, no output", outputs[i]);
        }
    }
    return GRADD_OK;
}

/* Takes out the nodes that are not needed: their id becomes 0. */
static gradd_status_t need_outputs(exported_t *exported, const char *const *outputs,
                                   int n_outputs) {
    for (int i = 0; i < n_outputs; i++) {
        exported_name_t *name = find_text(exported, outputs[i]);
        if (!name) return GRADD_FAIL(TENSOR, "the model has no output '%s'", outputs[i]);
        name->needed = true;
    }
    for (int i = exported->n_fields - 1; i >= 0; i--) {
        proto_field_t *field = &exported->fields[i];
        bool needed;
        if (field->id != PROTO_GRAPH_NODE) continue;
        GRADD_TRY(need_node(exported, field->bytes, &needed));
        if (!needed) field->id = 0;
    }
    return GRADD_OK;
}

/* ---- nodes in evaluation mode ---------------------------------------------------------------- */

static gradd_status_t is_training_mode(const proto_field_t *field, bool *out_is) {
    proto_span_t name;
    *out_is = false;
    if (field->id != PROTO_NODE_ATTRIBUTE) return GRADD_OK;
    GRADD_TRY(proto_find(field->bytes, PROTO_ATTRIBUTE_NAME, &name));
    *out_is = proto_is(name, "training_mode");
    return GRADD_OK;
}

/* BatchNormalization without its statistics as outputs; Dropout without its third input, the mode.
 */
static gradd_status_t write_changed(pieces_t *out, proto_span_t node, bool dropout) {
    proto_field_t field;
    bool more = true, mode;
    int inputs = 0, results = 0;
    while (more) {
        GRADD_TRY(proto_next(&node, &field, &more));
        if (!more) return GRADD_OK;
        GRADD_TRY(is_training_mode(&field, &mode));
        if (mode || (field.id == PROTO_NODE_INPUT && dropout && inputs++ >= DROPOUT_INPUTS) ||
            (field.id == PROTO_NODE_OUTPUT && !dropout && results++ >= NORM_OUTPUTS))
            continue;
        if (field.id == PROTO_NODE_OP && !dropout)
            pieces_bytes(out, PROTO_NODE_OP, "BatchNormalization", strlen("BatchNormalization"));
        else if (field.id != PROTO_NODE_DOMAIN)
            pieces_refer(out, field.whole.at, field.whole.n);
    }
    return GRADD_OK;
}

static gradd_status_t write_node(pieces_t *out, const proto_field_t *field) {
    node_kind_t kind;
    pieces_t node = {0};
    GRADD_TRY(node_find_kind(field->bytes, &kind));
    if (kind == NODE_ORDINARY) {
        pieces_refer(out, field->whole.at, field->whole.n);
        return GRADD_OK;
    }
    const gradd_status_t status = write_changed(&node, field->bytes, kind == NODE_DROPOUT);
    pieces_head(out, PROTO_GRAPH_NODE, node.bytes);
    pieces_take(out, &node);
    return status;
}

/* ---- writing --------------------------------------------------------------------------------- */

static void write_parameter(pieces_t *out, const gradd_train_parameter_t *parameter) {
    const size_t bytes = (size_t)gradd_type_bytes(&parameter->type);
    pieces_t tensor = {0};
    for (int i = 0; i < parameter->type.rank; i++)
        pieces_number(&tensor, PROTO_TENSOR_DIMS, (uint64_t)parameter->type.dims[i]);
    pieces_number(&tensor, PROTO_TENSOR_TYPE, (uint64_t)parameter->type.dtype);
    pieces_bytes(&tensor, PROTO_TENSOR_NAME, parameter->name, strlen(parameter->name));
    pieces_bytes(&tensor, PROTO_TENSOR_RAW, parameter->data, bytes);
    pieces_head(out, PROTO_GRAPH_INITIALIZER, tensor.bytes);
    pieces_take(out, &tensor);
}

static gradd_status_t write_parameters(pieces_t *out, const exported_t *exported,
                                       const gradd_train_state_t *state) {
    for (int i = 0; i < gradd_train_state_count(state); i++) {
        const gradd_train_parameter_t parameter = gradd_train_state_parameter(state, i);
        const exported_name_t *name = find_text(exported, parameter.name);
        if (!name || !name->needed) continue;
        if (!parameter.data)
            return GRADD_FAIL(TENSOR, "parameter '%s' has no values", parameter.name);
        write_parameter(out, &parameter);
    }
    return GRADD_OK;
}

static bool is_parameter(const gradd_train_state_t *state, proto_span_t name) {
    for (int i = 0; i < gradd_train_state_count(state); i++)
        if (proto_is(name, gradd_train_state_parameter(state, i).name)) return true;
    return false;
}

/* A field of the graph that is not a node: kept if its value is needed, or it is no value. */
static gradd_status_t write_field(pieces_t *out, const exported_t *exported,
                                  const gradd_train_state_t *state, const proto_field_t *field) {
    proto_span_t text = {0};
    switch (field->id) {
    case 0: /* taken out */
    case PROTO_GRAPH_OUTPUT:
        return GRADD_OK;
    case PROTO_GRAPH_NODE:
        return write_node(out, field);
    case PROTO_GRAPH_INPUT:
    case PROTO_GRAPH_VALUE:
        GRADD_TRY(proto_find(field->bytes, PROTO_VALUE_NAME, &text));
        break;
    case PROTO_GRAPH_INITIALIZER:
        GRADD_TRY(proto_find(field->bytes, PROTO_TENSOR_NAME, &text));
        break;
    default:
        pieces_refer(out, field->whole.at, field->whole.n);
        return GRADD_OK;
    }
    const exported_name_t *name = find_name(exported, text);
    if (name && name->needed && !is_parameter(state, text))
        pieces_refer(out, field->whole.at, field->whole.n);
    return GRADD_OK;
}

/* A ValueInfo; a dimension that is not known is there without a value. */
static void write_type(pieces_t *out, const char *name, const gradd_type_t *type) {
    pieces_t shape = {0}, tensor = {0}, kind = {0}, value = {0};
    for (int i = 0; i < type->rank; i++) {
        pieces_t dim = {0};
        if (type->dims[i] >= 0) pieces_number(&dim, PROTO_DIM_VALUE, (uint64_t)type->dims[i]);
        pieces_head(&shape, PROTO_SHAPE_DIM, dim.bytes);
        pieces_take(&shape, &dim);
    }
    pieces_number(&tensor, PROTO_TYPE_ELEMENT, (uint64_t)type->dtype);
    pieces_head(&tensor, PROTO_TYPE_SHAPE, shape.bytes);
    pieces_take(&tensor, &shape);
    pieces_head(&kind, PROTO_TYPE_TENSOR, tensor.bytes);
    pieces_take(&kind, &tensor);
    pieces_bytes(&value, PROTO_VALUE_NAME, name, strlen(name));
    pieces_head(&value, PROTO_VALUE_TYPE, kind.bytes);
    pieces_take(&value, &kind);
    pieces_head(out, PROTO_GRAPH_OUTPUT, value.bytes);
    pieces_take(out, &value);
}

static gradd_status_t write_output(pieces_t *out, const exported_t *exported,
                                   const export_source_t *source, const char *output) {
    const proto_span_t declared = find_text(exported, output)->type;
    gradd_type_t type;
    if (declared.at) {
        pieces_bytes(out, PROTO_GRAPH_OUTPUT, declared.at, declared.n);
        return GRADD_OK;
    }
    if (!source->device)
        return GRADD_FAIL(TENSOR, "'%s' cannot be an output: the model does not say its type",
                          output);
    GRADD_TRY(gradd_wrap(export_output_type(source, output, &type),
                         "the type of output '%s' is not known", output));
    write_type(out, output, &type);
    return GRADD_OK;
}

static gradd_status_t write_graph(pieces_t *out, exported_t *exported,
                                  const export_source_t *source, const char *const *outputs,
                                  int n_outputs) {
    const gradd_train_state_t *state = source->state;
    GRADD_TRY(list_fields(exported));
    GRADD_TRY(list_names(exported));
    GRADD_TRY(list_types(exported));
    GRADD_TRY(check_outputs(exported, outputs, n_outputs));
    GRADD_TRY(need_outputs(exported, outputs, n_outputs));
    for (int i = 0; i < exported->n_fields; i++)
        GRADD_TRY(write_field(out, exported, state, &exported->fields[i]));
    GRADD_TRY(write_parameters(out, exported, state));
    for (int i = 0; i < n_outputs; i++)
        GRADD_TRY(write_output(out, exported, source, outputs[i]));
    return GRADD_OK;
}

static gradd_status_t split_model(proto_span_t model, exported_t *exported, pieces_t *out) {
    proto_field_t field;
    bool more;
    for (;;) {
        GRADD_TRY(proto_next(&model, &field, &more));
        if (!more) break;
        if (field.id != PROTO_MODEL_GRAPH)
            pieces_refer(out, field.whole.at, field.whole.n);
        else if (exported->graph.at)
            return GRADD_FAIL(MODEL, "the model has two graphs");
        else
            exported->graph = field.bytes;
    }
    return exported->graph.at ? GRADD_OK : GRADD_FAIL(MODEL, "the model has no graph");
}

gradd_status_t export_model(const export_source_t *source, const char *const *outputs,
                            int n_outputs, const char *path) {
    exported_t exported = {0};
    pieces_t file = {0}, graph = {0};
    gradd_status_t status = split_model((proto_span_t){source->model, source->n}, &exported, &file);
    if (status == GRADD_OK) status = write_graph(&graph, &exported, source, outputs, n_outputs);
    if (status == GRADD_OK) {
        pieces_head(&file, PROTO_MODEL_GRAPH, graph.bytes);
        pieces_take(&file, &graph);
        status = pieces_write(&file, path);
    }
    pieces_finish(&graph);
    pieces_finish(&file);
    free(exported.names);
    free(exported.fields);
    return gradd_wrap(status, "export");
}

gradd_status_t gradd_train_export(const gradd_train_session_t *session, const char *path,
                                  const char *const *outputs, int n_outputs) {
    if (!path) return GRADD_FAIL(IO, "export: the path is missing");
    if (!session->eval_bytes)
        return GRADD_FAIL(UNSUPPORTED, "the session has no eval model to export from");
    const export_source_t source = {session->eval_bytes, session->eval_n, session->state,
                                    session->device};
    return export_model(&source, outputs, n_outputs, path);
}
