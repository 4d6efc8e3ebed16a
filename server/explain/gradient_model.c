/* A model with its backward as an ONNX file. See explain_file.h.
 *
 * The graph has been written out in simpler operators. What is left of com.gradd and changes no
 * value (StopGradient, CheckIndex) is an Identity here, for the backward is there already. A
 * dropout gives out its mask, which its gradient reads in place of drawing it again. Constants that
 * hold one number are ConstantOfShape if they are large. */
#include <stdlib.h>
#include <string.h>

#include "server/explain/gradient_writer.h"

#define LEAST_OPSET 18   /* of the operators that rules emit: all read their axes from an operand */
#define SMALL       1024 /* bytes of a constant that is written as it is */

/* ---- which nodes ----------------------------------------------------------------------------- */

static void need(gradient_writer_t *w, gradd_val_t v) {
    if (v == GRADD_NONE) return;
    const graph_value_t *value = w->g->values[v];
    if (value->node >= 0 && !value->data) w->needed[value->node] = true;
}

static gradd_status_t need_mask(gradient_writer_t *w, const graph_node_t *grad) {
    const graph_node_t *n = gradient_dropout_of(w->g, grad);
    if (!n) return GRADD_OK;
    const int k = (int)(n - w->g->nodes);
    w->needed[k] = true;
    w->masks[k] = arena_printf(w->arena, "%smask_%d", w->prefix, k);
    return w->masks[k] ? GRADD_OK : GRADD_E_NOMEM;
}

static gradd_status_t find_needed(gradient_writer_t *w) {
    const graph_t *g = w->g;
    for (int i = 0; i < g->n_outputs; i++)
        need(w, g->outputs[i]);
    for (int i = 0; i < w->options->n_grads; i++)
        need(w, w->grads[i]);
    for (int k = g->n_nodes - 1; k >= 0; k--) {
        const graph_node_t *n = &g->nodes[k];
        if (!w->needed[k]) continue;
        for (int i = 0; i < n->n_in; i++)
            need(w, n->in[i]);
        GRADD_TRY(need_mask(w, n));
    }
    return GRADD_OK;
}

/* ---- names ----------------------------------------------------------------------------------- */

static bool begins(const model_t *m, const char *prefix) {
    const size_t n = strlen(prefix);
    for (int v = 0; v < m->n_values; v++)
        if (!strncmp(m->values[v].name, prefix, n)) return true;
    return false;
}

static bool is_input_or_output(const model_t *m, const char *name) {
    for (int i = 0; i < m->n_inputs; i++)
        if (!strcmp(m->values[m->inputs[i]].name, name)) return true;
    for (int i = 0; i < m->n_outputs; i++)
        if (!strcmp(m->values[m->outputs[i]].name, name)) return true;
    return false;
}

static gradd_status_t choose_prefix(gradient_writer_t *w) {
    for (w->prefix = "gradd_"; w->prefix && begins(w->g->model, w->prefix);)
        w->prefix = arena_printf(w->arena, "%s_", w->prefix);
    return w->prefix ? GRADD_OK : GRADD_E_NOMEM;
}

static const char *output_name(const gradient_writer_t *w, int i) {
    const model_t *m = w->g->model;
    return m->values[m->outputs[w->options->outputs[i]]].name;
}

static gradd_status_t grad_name(gradient_writer_t *w, int i, const char **out) {
    const model_t *m = w->g->model;
    const char *input = m->values[m->inputs[w->options->grads[i]]].name;
    *out = arena_printf(w->arena, "%s_grad", input);
    if (!*out) return GRADD_E_NOMEM;
    if (!is_input_or_output(m, *out)) return GRADD_OK;
    return GRADD_FAIL(GRAPH, "the gradient of '%.200s' would be called '%.200s', as another value",
                      input, *out);
}

/* A value that a node makes may have the name of an output at once; others go through Identity. */
static void claim(gradient_writer_t *w, gradd_val_t v, const char *name) {
    const graph_value_t *value = w->g->values[v];
    if (value->kind == VALUE_NODE && !value->data && !w->names[v]) w->names[v] = name;
}

/* ---- values ---------------------------------------------------------------------------------- */

static bool is_uniform(const gradd_view_t *v) {
    const size_t size = gradd_dtype_bytes(v->type.dtype), n = (size_t)gradd_type_bytes(&v->type);
    return n > SMALL && !memcmp(v->data, (const char *)v->data + size, n - size);
}

/* ConstantOfShape with the first element. */
static gradd_status_t add_uniform(gradient_writer_t *w, const char *name, const gradd_view_t *v) {
    int64_t *dims = arena_array(w->arena, GRADD_MAX_RANK, sizeof dims[0]);
    if (!dims) return GRADD_E_NOMEM;
    memcpy(dims, v->type.dims, sizeof v->type.dims);
    const gradd_view_t sizes = {
        {GRADD_DT_I64, 1, {v->type.rank}},
        dims
    };
    const gradd_attr_t value = {
        .name = "value", .kind = GRADD_ATTR_TENSOR, .tensor = {{v->type.dtype, 1, {1}}, v->data}
    };
    const char *shape = arena_printf(w->arena, "%s_shape", name);
    GRADD_TRY(gradient_add_constant(w, shape, &sizes));
    Onnx__NodeProto *node = gradient_add_node(w, "ConstantOfShape", 1, 1);
    if (!node) return GRADD_E_NOMEM;
    node->input[0] = (char *)shape;
    node->output[0] = (char *)name;
    return gradient_add_attrs(w, node, (gradd_attrs_t){&value, 1});
}

/* The name of an operand, which is made here if no node makes it. */
static gradd_status_t operand(gradient_writer_t *w, gradd_val_t v, const char **out) {
    const graph_value_t *value = v == GRADD_NONE ? NULL : w->g->values[v];
    if (!value || w->names[v]) {
        *out = value ? w->names[v] : "";
        return GRADD_OK;
    }
    *out = w->names[v] = arena_printf(w->arena, "%s%d", w->prefix, v);
    if (!*out) return GRADD_E_NOMEM;
    if (value->data) {
        const gradd_view_t view = {value->type, (void *)value->data};
        return is_uniform(&view) ? add_uniform(w, *out, &view)
                                 : gradient_add_constant(w, *out, &view);
    }
    return value->kind == VALUE_GRAD_OUTPUT ? gradient_add_number(w, *out, &value->type, 1)
                                            : GRADD_OK;
}

/* ---- nodes ----------------------------------------------------------------------------------- */

static gradd_status_t write_whole(gradient_writer_t *w, int k, const char *const *in) {
    const graph_node_t *n = &w->g->nodes[k];
    const int opset = w->g->model->opset;
    if (n->op->domain[0] || n->op->since > opset)
        return GRADD_FAIL(UNSUPPORTED, "%s%s%s is no operator of ONNX's opset %d", n->op->domain,
                          n->op->domain[0] ? "::" : "", n->op->name, opset);
    const bool masked = w->masks[k] != NULL;
    const size_t n_out = masked && n->n_out < 2 ? 2 : (size_t)n->n_out;
    Onnx__NodeProto *node = gradient_add_node(w, n->op->name, (size_t)n->n_in, n_out);
    if (!node) return GRADD_E_NOMEM;
    for (int i = 0; i < n->n_in; i++)
        node->input[i] = (char *)in[i];
    for (int j = 0; j < n->n_out; j++) {
        const char *name;
        GRADD_TRY(operand(w, n->out[j], &name));
        node->output[j] = (char *)name;
    }
    if (masked && n->n_out > 1 && n->out[1] != GRADD_NONE)
        w->masks[k] = w->names[n->out[1]];
    else if (masked)
        node->output[1] = (char *)w->masks[k];
    return gradient_add_attrs(w, node, n->attrs);
}

static gradd_status_t write_node(gradient_writer_t *w, int k) {
    const graph_node_t *n = &w->g->nodes[k];
    const char *in[GRADD_OP_MAX_IN + 1] = {NULL}, *out;
    char text[GRAPH_NODE_TEXT];
    const model_node_t *origin = graph_origin(w->g, n);
    gradd_status_t status = GRADD_OK;
    for (int i = 0; i < n->n_in && !status; i++)
        status = operand(w, n->in[i], &in[i]);
    const bool apart = gradient_is_apart(w->g, n);
    if (!status && apart) status = operand(w, n->out[0], &out);
    if (!status) status = apart ? gradient_write_apart(w, n, in, out) : write_whole(w, k, in);
    return gradd_wrap(gradd_at_node(status, origin->name), "%s%s",
                      n->backward ? "gradient of " : "",
                      graph_node_text(w->g, origin, text, sizeof text));
}

/* ---- the model ------------------------------------------------------------------------------- */

static gradd_status_t add_output(gradient_writer_t *w, Onnx__GraphProto *graph, const char *name,
                                 gradd_val_t v) {
    const char *from;
    GRADD_TRY(operand(w, v, &from));
    if (strcmp(from, name) != 0) GRADD_TRY(gradient_add_identity(w, from, name));
    Onnx__ValueInfoProto *info = gradient_value_info(w, name, graph_type(w->g, v));
    if (!info) return GRADD_E_NOMEM;
    graph->output[graph->n_output++] = info;
    return GRADD_OK;
}

static gradd_status_t add_inputs(gradient_writer_t *w, Onnx__GraphProto *graph) {
    const model_t *m = w->g->model;
    for (int i = 0; i < m->n_inputs; i++) {
        w->names[w->g->inputs[i]] = m->values[m->inputs[i]].name;
        graph->input[i] =
            gradient_value_info(w, w->names[w->g->inputs[i]], graph_type(w->g, w->g->inputs[i]));
        if (!graph->input[i]) return GRADD_E_NOMEM;
    }
    graph->n_input = (size_t)m->n_inputs;
    return GRADD_OK;
}

static gradd_status_t fill_graph(gradient_writer_t *w, Onnx__GraphProto *graph) {
    const graph_t *g = w->g;
    const int n_grads = w->options->n_grads;
    const char **names = arena_array(w->arena, (size_t)n_grads + 1, sizeof names[0]);
    graph->input = arena_array(w->arena, (size_t)g->model->n_inputs + 1, sizeof graph->input[0]);
    graph->output =
        arena_array(w->arena, (size_t)(g->n_outputs + n_grads) + 1, sizeof graph->output[0]);
    if (!names || !graph->input || !graph->output) return GRADD_E_NOMEM;
    GRADD_TRY(add_inputs(w, graph));
    for (int i = 0; i < n_grads; i++)
        GRADD_TRY(grad_name(w, i, &names[i]));
    for (int i = 0; i < g->n_outputs; i++)
        claim(w, g->outputs[i], output_name(w, i));
    for (int i = 0; i < n_grads; i++)
        if (w->grads[i] != GRADD_NONE) claim(w, w->grads[i], names[i]);
    for (int k = 0; k < g->n_nodes; k++)
        if (w->needed[k]) GRADD_TRY(write_node(w, k));
    for (int i = 0; i < g->n_outputs; i++)
        GRADD_TRY(add_output(w, graph, output_name(w, i), g->outputs[i]));
    for (int i = 0; i < n_grads; i++)
        if (w->grads[i] != GRADD_NONE) GRADD_TRY(add_output(w, graph, names[i], w->grads[i]));
    graph->name = (char *)"gradient";
    graph->node = w->nodes;
    graph->n_node = w->n_nodes;
    graph->initializer = w->constants;
    graph->n_initializer = w->n_constants;
    return GRADD_OK;
}

static gradd_status_t check_arrivals(const gradient_writer_t *w) {
    char text[GRADD_TYPE_TEXT];
    for (int i = 0; i < w->options->n_grad_outputs; i++) {
        const int at = w->options->grad_outputs[i];
        const gradd_type_t *type = graph_type(w->g, w->g->outputs[at]);
        if (!gradd_dtype_is_float(type->dtype) || gradd_type_count(type) != 1)
            return GRADD_FAIL(TENSOR,
                              "output '%.200s' is %s: a gradient of 1 arrives at one element of "
                              "floats alone; --grad says at which output",
                              output_name(w, at), gradd_type_format(type, text));
    }
    return GRADD_OK;
}

static gradd_status_t write_model(gradient_writer_t *w, const char *path) {
    const graph_t *g = w->g;
    /* Each value, a shape beside it, and two numbers for each node, at most. */
    const size_t n = 2 * ((size_t)g->n_values + (size_t)g->n_nodes) + 1;
    w->needed = arena_array(w->arena, (size_t)g->n_nodes + 1, sizeof w->needed[0]);
    w->masks = arena_array(w->arena, (size_t)g->n_nodes + 1, sizeof w->masks[0]);
    w->names = arena_array(w->arena, (size_t)g->n_values + 1, sizeof w->names[0]);
    w->constants = arena_array(w->arena, n, sizeof w->constants[0]);
    if (!w->needed || !w->masks || !w->names || !w->constants) return GRADD_E_NOMEM;
    Onnx__GraphProto graph = ONNX__GRAPH_PROTO__INIT;
    Onnx__ModelProto model = ONNX__MODEL_PROTO__INIT;
    Onnx__OperatorSetIdProto opset = ONNX__OPERATOR_SET_ID_PROTO__INIT, *opsets = &opset;
    GRADD_TRY(check_arrivals(w));
    GRADD_TRY(choose_prefix(w));
    GRADD_TRY(find_needed(w));
    GRADD_TRY(fill_graph(w, &graph));
    opset.has_version = model.has_ir_version = 1;
    opset.version = g->model->opset;
    opset.domain = (char *)"";
    model.ir_version = w->file->proto->ir_version;
    model.opset_import = &opsets;
    model.n_opset_import = 1;
    model.producer_name = (char *)"gradd";
    model.producer_version = (char *)gradd_version();
    model.graph = &graph;
    return explain_write(w->arena, &model, path);
}

gradd_status_t explain_file_gradient(const explain_file_t *file,
                                     const gradd_plan_options_t *options, const char *path) {
    gradient_writer_t w = {.file = file, .options = options};
    if (!options->n_grads || !options->n_grad_outputs)
        return GRADD_FAIL(TENSOR, "--gradient: nothing that is wanted has a gradient");
    if (file->model->opset < LEAST_OPSET)
        return GRADD_FAIL(UNSUPPORTED, "--gradient: the model has opset %d, expected %d or later",
                          file->model->opset, LEAST_OPSET);
    GRADD_TRY(arena_create(0, &w.arena));
    w.grads = arena_array(w.arena, (size_t)options->n_grads + 1, sizeof w.grads[0]);
    gradd_status_t status = w.grads ? GRADD_OK : GRADD_E_NOMEM;
    if (!status) status = graph_differentiate(file->model, options, &w.g, w.grads);
    if (!status) status = write_model(&w, path);
    graph_destroy(w.g);
    arena_destroy(w.arena);
    return status;
}
