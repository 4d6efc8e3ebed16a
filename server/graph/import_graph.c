/* Values, nodes, inputs and outputs of an imported graph.
 *
 * Nodes must come in topological order, every value has one definition, and every name that is used
 * is defined before. The planner relies on all this without checking it again.
 */
#include <stdio.h>
#include <string.h>

#include "kernels/contract/registry.h"
#include "server/graph/import.h"

static import_t *import_root(import_t *m) {
    while (m->outer)
        m = m->outer;
    return m;
}

/* ---- graph inputs and initializers ----------------------------------------------------------- */

/* Keeps the name of a dynamic dimension. */
static gradd_status_t dim_name(import_t *m, const char *name, model_value_t *value, int d) {
    if (!name || !name[0]) return GRADD_OK;
    GRADD_TRY(import_check_name(m, "name of a dimension", name, true));
    if (!value->symbols) {
        value->symbols = arena_array(m->model->arena, GRADD_MAX_RANK, sizeof value->symbols[0]);
        for (int i = 0; value->symbols && i < GRADD_MAX_RANK; i++)
            value->symbols[i] = "";
    }
    const char *copy = arena_string(m->model->arena, name, strlen(name));
    if (!value->symbols || !copy) return GRADD_E_NOMEM;
    value->symbols[d] = copy;
    return GRADD_OK;
}

static gradd_status_t input_dims(import_t *m, const Onnx__TensorShapeProto *shape,
                                 model_value_t *value) {
    value->rank = -1;
    for (int d = 0; d < GRADD_MAX_RANK; d++)
        value->dims[d] = -1;
    if (!shape) return GRADD_OK;
    if (shape->n_dim > GRADD_MAX_RANK)
        return GRADD_FAIL(LIMIT, "rank %zu is above the limit of %d", shape->n_dim, GRADD_MAX_RANK);
    value->rank = (int)shape->n_dim;
    gradd_type_t fixed = {.dtype = value->dtype, .rank = value->rank};
    for (int d = 0; d < value->rank; d++) {
        const Onnx__TensorShapeProto__Dimension *dim = shape->dim[d];
        fixed.dims[d] = 1;
        GRADD_TRY(dim_name(m, dim->dim_param, value, d));
        if (!dim->has_dim_value || dim->dim_param) continue;
        if (dim->dim_value < 0)
            return GRADD_FAIL(GRAPH, "dimension %d is %lld", d, (long long)dim->dim_value);
        value->dims[d] = fixed.dims[d] = dim->dim_value;
    }
    return gradd_type_check(&fixed);
}

static gradd_status_t import_input(import_t *m, const Onnx__ValueInfoProto *info,
                                   model_value_t *value) {
    const Onnx__TypeProto *type = info->type;
    if (type && (type->sequence_type || type->optional_type))
        return GRADD_FAIL(UNSUPPORTED, "is %s, only tensors are supported",
                          type->sequence_type ? "a sequence" : "an optional");
    if (!type || !type->tensor_type)
        return GRADD_FAIL(GRAPH, "has no tensor type, only tensors are supported");
    GRADD_TRY(gradd_dtype_check(type->tensor_type->elem_type, &value->dtype));
    return input_dims(m, type->tensor_type->shape, value);
}

static gradd_status_t import_inputs(import_t *m) {
    const Onnx__GraphProto *g = m->graph;
    model_t *model = m->model;
    model->inputs = arena_array(model->arena, g->n_input, sizeof *model->inputs);
    if (!model->inputs) return GRADD_E_NOMEM;
    for (size_t i = 0; i < g->n_input; i++) {
        int32_t id = m->defs[i].id; /* inputs are the first definitions */
        gradd_status_t status = import_input(m, g->input[i], &model->values[id]);
        if (status)
            return gradd_wrap(status, "graph input %zu '%.*s'", i, IMPORT_TEXT(g->input[i]->name));
        model->inputs[model->n_inputs++] = id;
    }
    return GRADD_OK;
}

/* The default of a graph input must be what the input declares. */
static gradd_status_t check_default(const model_value_t *value) {
    const gradd_type_t *type = &value->known.type;
    char text[GRADD_TYPE_TEXT];
    if (value->dtype == GRADD_DT_NONE) return GRADD_OK;
    bool same = type->dtype == value->dtype && (value->rank < 0 || type->rank == value->rank);
    for (int d = 0; same && d < value->rank; d++)
        same = value->dims[d] < 0 || value->dims[d] == type->dims[d];
    if (same) return GRADD_OK;
    return GRADD_FAIL(GRAPH, "is %s, but the graph input of that name declares another type",
                      gradd_type_format(type, text));
}

gradd_status_t import_initializers(import_t *m) {
    const Onnx__GraphProto *g = m->graph;
    for (size_t i = 0; i < g->n_initializer; i++) {
        model_value_t *value = &m->model->values[m->defs[g->n_input + i].id];
        gradd_status_t status = import_tensor(m, g->initializer[i], &value->known);
        if (!status) status = check_default(value);
        value->packed = import_is_packed(g->initializer[i]);
        if (status)
            return gradd_wrap(status, "initializer %zu '%.*s'", i,
                              IMPORT_TEXT(g->initializer[i]->name));
    }
    return GRADD_OK;
}

/* The table grows by the values of bodies. */
static gradd_status_t grow_values(model_t *model, int need, int *cap) {
    if (need <= *cap) return GRADD_OK;
    const int wider = need > 2 * *cap ? need : 2 * *cap;
    model_value_t *values = arena_array(model->arena, (size_t)wider, sizeof *values);
    if (!values) return GRADD_E_NOMEM;
    if (*cap) memcpy(values, model->values, sizeof *values * (size_t)*cap);
    model->values = values;
    *cap = wider;
    return GRADD_OK;
}

gradd_status_t import_create_values(import_t *m) {
    model_t *model = m->model;
    int *cap = &import_root(m)->n_values_cap;
    GRADD_TRY(grow_values(model, model->n_values, cap));
    for (size_t i = 0; i < m->n_defs; i++) {
        model_value_t *value = &model->values[m->defs[i].id];
        if (value->name) continue; /* a default: named as the input already */
        value->rank = -1;
        value->name = arena_string(model->arena, m->defs[i].name, strlen(m->defs[i].name));
        if (!value->name) return GRADD_E_NOMEM;
    }
    return GRADD_OK;
}

/* ---- nodes ----------------------------------------------------------------------------------- */

/* Trailing empty names say nothing; without them the count is the arity. */
static size_t trimmed(char *const *names, size_t n) {
    while (n && !names[n - 1][0])
        n--;
    return n;
}

static gradd_status_t check_arity(const gradd_op_t *op, const char *what, char *const *names,
                                  size_t n, int min, int max) {
    if (n < (size_t)min || n > (size_t)max) {
        if (min == max) return GRADD_FAIL(GRAPH, "%zu %ss, expected %d", n, what, min);
        return GRADD_FAIL(GRAPH, "%zu %ss, expected %d to %d", n, what, min, max);
    }
    for (int i = 0; i < min; i++)
        if (!names[i][0])
            return GRADD_FAIL(GRAPH, "%s %d has no name, but %s requires it", what, i, op->name);
    return GRADD_OK;
}

static gradd_status_t fail_dropped(size_t position, const char *name) {
    return GRADD_FAIL(UNSUPPORTED, "input %zu '%.*s' is a result for gradient nodes alone",
                      position, IMPORT_TEXT(name));
}

static gradd_status_t resolve_input(const import_t *m, int32_t index, bool runs, size_t position,
                                    const char *name, int32_t *out_id) {
    *out_id = -1;
    if (!name[0]) return GRADD_OK;
    GRADD_TRY(import_check_name(m, "input name", name, true));
    const import_def_t *def = import_find(m, name);
    for (const import_t *inner = m; !def && inner->outer; inner = inner->outer) {
        const import_def_t *found = import_find(inner->outer, name);
        if (!found || found->from >= inner->at) continue;
        if (found->dropped) return fail_dropped(position, name);
        *out_id = found->id;
        return GRADD_OK;
    }
    if (!def)
        return GRADD_FAIL(GRAPH,
                          "input %zu '%.*s' is not defined: no graph input, initializer or node "
                          "output has that name",
                          position, IMPORT_TEXT(name));
    if (def->from == index)
        return GRADD_FAIL(GRAPH, "input %zu '%.*s' is the node's own output", position,
                          IMPORT_TEXT(name));
    if (def->from > index)
        return GRADD_FAIL(GRAPH, "input %zu '%.*s' is produced by node %d, which comes later",
                          position, IMPORT_TEXT(name), def->from);
    if (def->dropped && runs) return fail_dropped(position, name);
    *out_id = def->id;
    return GRADD_OK;
}

/* Results of an alias behind those of ONNX's operator. */
static size_t drop_outputs(const import_t *m, const Onnx__NodeProto *proto, size_t n_out,
                           size_t most) {
    for (size_t j = most; j < n_out; j++)
        if (proto->output[j][0]) m->defs[import_find(m, proto->output[j]) - m->defs].dropped = true;
    return n_out < most ? n_out : most;
}

static gradd_status_t import_edges(import_t *m, const Onnx__NodeProto *proto,
                                   const import_alias_t *alias, model_node_t *node) {
    const bool region = import_is_region(proto); /* a Loop may have nothing but absent operands */
    size_t n_in = region ? proto->n_input : trimmed(proto->input, proto->n_input);
    size_t n_out = trimmed(proto->output, proto->n_output);
    const gradd_op_t *op = node->op;
    const bool runs = op || region || node->sequence; /* no gradient node of ONNX Runtime */
    if (alias) n_out = drop_outputs(m, proto, n_out, (size_t)op->max_out);
    if (op) {
        GRADD_TRY(check_arity(op, "input", proto->input, n_in, op->min_in, op->max_in));
        GRADD_TRY(check_arity(op, "output", proto->output, n_out, op->min_out, op->max_out));
    }
    if (n_in > INT32_MAX || n_out > INT32_MAX) return GRADD_FAIL(LIMIT, "too many inputs");
    int32_t *in = arena_array(m->model->arena, n_in, sizeof *in);
    int32_t *out = arena_array(m->model->arena, n_out, sizeof *out);
    if (!in || !out) return GRADD_E_NOMEM;
    for (size_t i = 0; i < n_in; i++)
        GRADD_TRY(resolve_input(m, node->index, runs, i, proto->input[i], &in[i]));
    for (size_t j = 0; j < n_out; j++) {
        const import_def_t *def = proto->output[j][0] ? import_find(m, proto->output[j]) : NULL;
        out[j] = def ? def->id : -1;
    }
    node->in = in;
    node->out = out;
    node->n_in = node->n_given = (int)n_in;
    node->n_out = (int)n_out;
    return GRADD_OK;
}

/* A node of a body counts as the model's node that has the body. */
static void note_unsupported(const import_t *m, int32_t index, const Onnx__NodeProto *proto) {
    model_t *model = m->model;
    if (import_is_region(proto)) return;
    for (; m->outer; m = m->outer)
        index = m->at;
    if (!model->nodes[index].unsupported) model->unsupported[model->n_unsupported++] = index;
    model->nodes[index].unsupported = true;
}

static gradd_status_t find_row(import_t *m, const Onnx__NodeProto *proto, model_node_t *node,
                               const import_alias_t **out_alias) {
    const char *domain = import_text(proto->domain);
    node->opset = import_opset(m, domain);
    if (!node->opset)
        return GRADD_FAIL(GRAPH, "domain '%.*s' is not among the model's opset imports",
                          IMPORT_TEXT(domain));
    if (!proto->overload || !proto->overload[0])
        node->op = gradd_op_find(domain, proto->op_type, node->opset);
    *out_alias = node->op ? NULL : import_find_alias(domain, proto->op_type);
    if (*out_alias) {
        node->opset = (*out_alias)->opset;
        node->op = gradd_op_find("", (*out_alias)->is, node->opset);
        if (!node->op) *out_alias = NULL; /* not in this library */
    }
    node->sequence = !node->op && import_is_sequence(proto);
    if (!node->op && !node->sequence)
        note_unsupported(m, node->index, proto);
    else if (node->op && node->op->flags & GRADD_OP_INTERNAL)
        return GRADD_FAIL(GRAPH, "the operator is internal to gradd and not taken from a model");
    return GRADD_OK;
}

static gradd_status_t name_node(import_t *m, const Onnx__NodeProto *proto, model_node_t *node) {
    arena_t *arena = m->model->arena;
    const char *domain = import_text(proto->domain);
    if (!strcmp(domain, "ai.onnx")) domain = "";
    node->op_type =
        node->op ? node->op->name : arena_string(arena, proto->op_type, strlen(proto->op_type));
    node->domain = node->op ? node->op->domain : arena_string(arena, domain, strlen(domain));
    node->name = proto->name && proto->name[0]
                     ? arena_string(arena, proto->name, strlen(proto->name))
                     : arena_printf(arena, "node_%d", node->index);
    return node->op_type && node->domain && node->name ? GRADD_OK : GRADD_E_NOMEM;
}

static bool is_packed_constant(const Onnx__NodeProto *proto) {
    return !strcmp(proto->op_type, "Constant") && proto->n_attribute && proto->attribute[0]->t &&
           import_is_packed(proto->attribute[0]->t);
}

/* Follows constants of int4 and uint4, which are i8 and u8 in the model, to where that matters: the
 * zero point of a QuantizeLinear says which integers it gives. */
static gradd_status_t follow_packed(const import_t *m, const Onnx__NodeProto *proto,
                                    const model_node_t *node) {
    enum { ZERO_POINT = 2 };
    model_value_t *values = m->model->values;
    if (!strcmp(proto->op_type, "DequantizeLinear") || !strcmp(proto->op_type, "Cast"))
        return GRADD_OK;
    bool packed = is_packed_constant(proto);
    for (int i = 0; i < node->n_in; i++) {
        if (node->in[i] < 0 || !values[node->in[i]].packed) continue;
        if (i == ZERO_POINT && !strcmp(proto->op_type, "QuantizeLinear"))
            return GRADD_FAIL(UNSUPPORTED,
                              "its zero point is of int4 or uint4: int8 and uint8 are supported");
        packed = true;
    }
    for (int j = 0; j < node->n_out; j++)
        if (node->out[j] >= 0) values[node->out[j]].packed = packed;
    return GRADD_OK;
}

static gradd_status_t import_node(import_t *m, const Onnx__NodeProto *proto, model_node_t *node) {
    GRADD_TRY(import_check_name(m, "node name", proto->name, false));
    GRADD_TRY(import_check_name(m, "operator", proto->op_type, true));
    GRADD_TRY(import_check_name(m, "domain", proto->domain, false));
    const import_alias_t *alias = NULL;
    GRADD_TRY(find_row(m, proto, node, &alias));
    GRADD_TRY(import_attrs(m, proto, node->op, &node->attrs));
    if (alias) GRADD_TRY(import_alias_attrs(m, alias, &node->attrs));
    GRADD_TRY(import_edges(m, proto, alias, node));
    GRADD_TRY(follow_packed(m, proto, node));
    GRADD_TRY(name_node(m, proto, node));
    return import_is_region(proto) ? import_bodies(m, proto, node) : GRADD_OK;
}

gradd_status_t import_nodes(import_t *m, model_node_t **out_nodes, int *out_n) {
    const Onnx__GraphProto *g = m->graph;
    import_t *root = import_root(m);
    root->n_nodes += g->n_node;
    if (root->n_nodes > (size_t)m->limits.max_nodes)
        return GRADD_FAIL(LIMIT, "the graph has %zu nodes, the limit is %d", root->n_nodes,
                          m->limits.max_nodes);
    *out_n = 0;
    *out_nodes = arena_array(m->model->arena, g->n_node, sizeof **out_nodes);
    if (!*out_nodes) return GRADD_E_NOMEM;
    for (size_t k = 0; k < g->n_node; k++) {
        model_node_t *node = &(*out_nodes)[k];
        node->index = (int)k;
        gradd_status_t status = import_node(m, g->node[k], node);
        if (status)
            return gradd_wrap(gradd_at_node(status, g->node[k]->name), "node %zu '%.*s' (%.*s)", k,
                              IMPORT_TEXT(g->node[k]->name), IMPORT_TEXT(g->node[k]->op_type));
        ++*out_n;
    }
    return GRADD_OK;
}

/* ---- graph outputs --------------------------------------------------------------------------- */

gradd_status_t import_outputs(import_t *m, int32_t **out_ids, int *out_n) {
    const Onnx__GraphProto *g = m->graph;
    *out_n = 0;
    if (!g->n_output) return GRADD_FAIL(GRAPH, "the graph has no outputs");
    if (g->n_output > (size_t)m->limits.max_values)
        return GRADD_FAIL(LIMIT, "%zu graph outputs, the limit is %d", g->n_output,
                          m->limits.max_values);
    *out_ids = arena_array(m->model->arena, g->n_output, sizeof **out_ids);
    if (!*out_ids) return GRADD_E_NOMEM;
    for (size_t i = 0; i < g->n_output; i++) {
        const char *name = import_text(g->output[i]->name);
        gradd_status_t status = import_check_name(m, "name", name, true);
        if (status) return gradd_wrap(status, "graph output %zu", i);
        const import_def_t *def = import_find(m, name);
        if (!def)
            return GRADD_FAIL(GRAPH, "graph output %zu '%.*s' is not produced by any node", i,
                              IMPORT_TEXT(name));
        if (def->dropped)
            return GRADD_FAIL(UNSUPPORTED,
                              "graph output %zu '%.*s' is a result for gradient nodes alone", i,
                              IMPORT_TEXT(name));
        (*out_ids)[(*out_n)++] = def->id;
    }
    return GRADD_OK;
}

/* Reads the file's declarations of the outputs. A model whose outputs are described wrongly, or not
 * at all, is a model all the same: their types are those that a plan finds. */
static gradd_status_t import_declarations(import_t *m) {
    model_t *model = m->model;
    model->declared =
        arena_array(model->arena, (size_t)model->n_outputs, sizeof model->declared[0]);
    if (!model->declared) return GRADD_E_NOMEM;
    for (int j = 0; j < model->n_outputs; j++) {
        gradd_status_t status = import_input(m, m->graph->output[j], &model->declared[j]);
        if (status == GRADD_E_NOMEM) return status;
        if (status) model->declared[j] = (model_value_t){.rank = -1};
    }
    return GRADD_OK;
}

gradd_status_t import_graph(import_t *m) {
    const Onnx__GraphProto *g = m->graph;
    model_t *model = m->model;
    if (g->n_node > (size_t)m->limits.max_nodes)
        return GRADD_FAIL(LIMIT, "the graph has %zu nodes, the limit is %d", g->n_node,
                          m->limits.max_nodes);
    if (g->n_sparse_initializer)
        return GRADD_FAIL(UNSUPPORTED,
                          "the graph has %zu sparse initializers, only dense tensors "
                          "are supported",
                          g->n_sparse_initializer);
    model->unsupported = arena_array(model->arena, g->n_node, sizeof *model->unsupported);
    if (!model->unsupported) return GRADD_E_NOMEM;
    GRADD_TRY(import_define_values(m));
    GRADD_TRY(import_create_values(m));
    GRADD_TRY(import_inputs(m));
    GRADD_TRY(import_initializers(m));
    GRADD_TRY(import_nodes(m, &model->nodes, &model->n_nodes));
    GRADD_TRY(import_outputs(m, &model->outputs, &model->n_outputs));
    return import_declarations(m);
}
