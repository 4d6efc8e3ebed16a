/* Instantiates a model as a graph for concrete input types, and lets gradient rules build into it.
 * See graph.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/contract/registry.h"
#include "server/graph/graph.h"

const model_node_t *graph_origin(const graph_t *g, const graph_node_t *n) {
    static const model_node_t none = {.index = -1, .name = "", .op_type = "", .domain = ""};
    return n->origin < g->model->n_nodes ? &g->model->nodes[n->origin] : &none;
}

const char *graph_node_text(const graph_t *g, const model_node_t *origin, char *buffer,
                            size_t bytes) {
    (void)g;
    snprintf(buffer, bytes, "node %d '%.120s' (%.60s)", origin->index, origin->name,
             origin->op_type);
    return buffer;
}

/* ---- the interface of gradient rules and expansions ------------------------------------------ */

static gradd_status_t rule_emit(gradd_builder_t *b, const gradd_emit_t *node, gradd_val_t *out,
                                int n_out) {
    graph_t *g = (graph_t *)b;
    const gradd_op_t *op = gradd_op_by_name(node->op);
    if (!op) return GRADD_FAIL(INTERNAL, "a rule needs the unknown operator '%s'", node->op);
    for (int i = 0; i < node->n_in; i++)
        if (node->in[i] == GRADD_NONE && i < op->min_in)
            return GRADD_FAIL(INTERNAL, "a rule gave %s no input %d", node->op, i);
    graph_emit_t e = {
        .op = op,
        .opset = g->model->opset,
        .attrs = {node->attrs, node->n_attrs},
        .in = node->in,
        .n_in = node->n_in,
        .n_out = n_out,
        .random = g->random
    };
    return gradd_wrap(graph_emit(g, &e, out), "%s", node->op);
}

static gradd_val_t rule_constant(gradd_builder_t *b, const gradd_type_t *type, const void *data) {
    gradd_val_t value = GRADD_NONE;
    if (!b->status) b->status = graph_constant((graph_t *)b, type, data, &value);
    return b->status ? GRADD_NONE : value;
}

static const gradd_type_t *rule_type(gradd_builder_t *b, gradd_val_t value) {
    return graph_type((graph_t *)b, value);
}

static const void *rule_data(gradd_builder_t *b, gradd_val_t value) {
    return value == GRADD_NONE ? NULL : ((graph_t *)b)->values[value]->data;
}

/* ---- from the model -------------------------------------------------------------------------- */

static gradd_status_t check_input(const model_value_t *declared, const gradd_type_t *given) {
    char text[GRADD_TYPE_TEXT];
    gradd_status_t status = gradd_type_check(given);
    if (status) return gradd_wrap(status, "input '%s'", declared->name);
    gradd_type_format(given, text);
    if (declared->dtype != GRADD_DT_NONE && declared->dtype != given->dtype)
        return GRADD_FAIL(TENSOR, "input '%s': the graph declares element type %s, got %s",
                          declared->name, gradd_dtype_name(declared->dtype), text);
    if (declared->rank < 0) return GRADD_OK;
    if (declared->rank != given->rank)
        return GRADD_FAIL(TENSOR, "input '%s': the graph declares rank %d, got %s", declared->name,
                          declared->rank, text);
    for (int i = 0; i < given->rank; i++)
        if (declared->dims[i] >= 0 && declared->dims[i] != given->dims[i])
            return GRADD_FAIL(TENSOR, "input '%s': the graph declares dimension %d as %lld, got %s",
                              declared->name, i, (long long)declared->dims[i], text);
    return GRADD_OK;
}

static gradd_status_t add_inputs(graph_t *g, const graph_options_t *options, gradd_val_t *map) {
    const model_t *m = g->model;
    for (int i = 0; i < m->n_inputs; i++) {
        const model_value_t *declared = &m->values[m->inputs[i]];
        GRADD_TRY(check_input(declared, &options->inputs[i]));
        graph_value_t value = {
            .type = options->inputs[i], .kind = VALUE_INPUT, .node = -1, .index = i};
        GRADD_TRY(graph_new_value(g, &value, &map[m->inputs[i]]));
        g->inputs[i] = map[m->inputs[i]];
    }
    for (int v = 0; v < m->n_values; v++) {
        const gradd_view_t *known = &m->values[v].known;
        if (!known->data || map[v] != GRADD_NONE) continue;
        graph_value_t value = {
            .type = known->type, .data = known->data, .kind = VALUE_CONST, .node = -1};
        GRADD_TRY(graph_new_value(g, &value, &map[v]));
    }
    return GRADD_OK;
}

static bool passes_sequence(const model_node_t *n, const gradd_val_t *map) {
    return n->op && !strcmp(n->op_type, "Identity") && n->in[0] >= 0 &&
           graph_is_sequence(map[n->in[0]]);
}

/* ---- quantised values ------------------------------------------------------------------------ */

/* The node that makes v, if that is of this operator. */
static const graph_node_t *made_by(const graph_t *g, gradd_val_t v, const char *op) {
    if (v == GRADD_NONE || g->values[v]->kind != VALUE_NODE) return NULL;
    const graph_node_t *n = &g->nodes[g->values[v]->node];
    return strcmp(n->op->name, op) ? NULL : n;
}

/* Of what a QuantizeLinear gives, the same as floats with a history; else GRADD_NONE. */
static gradd_val_t as_floats(const graph_t *g, gradd_val_t v) {
    const graph_node_t *cast = made_by(g, v, "Cast");
    const bool is = cast && gradd_dtype_is_int(graph_type(g, v)->dtype) &&
                    made_by(g, cast->in[0], "StraightThrough");
    return is ? cast->in[0] : GRADD_NONE;
}

/* DequantizeLinear of a QuantizeLinear is computed in floats, through which gradients go. */
static gradd_status_t add_requantised(graph_t *g, const graph_emit_t *e, gradd_val_t *out) {
    gradd_val_t in[GRADD_OP_MAX_IN];
    gradd_view_t views[GRADD_OP_MAX_IN] = {0};
    gradd_type_t types[GRADD_OP_MAX_OUT] = {0};
    graph_emit_t of_floats = *e;
    for (int i = 0; i < e->n_in; i++) {
        in[i] = e->in[i];
        if (in[i] != GRADD_NONE) views[i].type = *graph_type(g, in[i]);
    }
    in[0] = as_floats(g, in[0]);
    of_floats.in = in;
    gradd_infer_t c = {.op = e->op,
                       .attrs = e->attrs,
                       .opset = e->opset,
                       .n_in = e->n_in,
                       .n_out = e->n_out,
                       .in = views,
                       .out = types};
    return graph_emit_expanded(g, &of_floats, &c, out);
}

static gradd_status_t emit_node(graph_t *g, const graph_emit_t *e, gradd_val_t *out) {
    const bool dequantises = !strcmp(e->op->name, "DequantizeLinear");
    for (int i = 0; g->trains && i < e->n_in; i++) {
        if (as_floats(g, e->in[i]) == GRADD_NONE || !strcmp(e->op->name, "Shape")) continue;
        if (dequantises && i == 0) return add_requantised(g, e, out);
        return GRADD_FAIL(UNSUPPORTED,
                          "operand %d is what a QuantizeLinear gives, which only a "
                          "DequantizeLinear may read where a model trains",
                          i);
    }
    return graph_emit(g, e, out);
}

gradd_status_t graph_add_node(graph_t *g, const model_node_t *n, gradd_val_t *map) {
    char text[GRAPH_NODE_TEXT];
    gradd_val_t in[GRADD_OP_MAX_IN], out[GRADD_OP_MAX_OUT];
    graph_node_text(g, n, text, sizeof text);
    if (n->n_bodies)
        return gradd_wrap(gradd_at_node(graph_add_region(g, n, map), n->name), "%s", text);
    if (n->sequence || passes_sequence(n, map))
        return gradd_wrap(gradd_at_node(graph_add_sequence(g, n, map), n->name), "%s", text);
    if (!n->op)
        return gradd_at_node(GRADD_FAIL(UNSUPPORTED,
                                        "%s: operator %s%s%s of opset %d is not supported", text,
                                        n->domain, n->domain[0] ? "::" : "", n->op_type, n->opset),
                             n->name);
    if (n->n_in > GRADD_OP_MAX_IN || n->n_out > GRADD_OP_MAX_OUT)
        return gradd_at_node(
            GRADD_FAIL(LIMIT, "%s: more than %d inputs or outputs", text, GRADD_OP_MAX_IN),
            n->name);
    for (int i = 0; i < n->n_in; i++) {
        in[i] = n->in[i] < 0 ? GRADD_NONE : map[n->in[i]];
        if (graph_is_sequence(in[i]))
            return gradd_at_node(GRADD_FAIL(GRAPH, "%s: input %d is a sequence", text, i), n->name);
    }
    graph_emit_t e = {n->op, n->opset, n->attrs, in, n->n_in, n->n_out, (uint64_t)n->index, false};
    gradd_status_t status = emit_node(g, &e, out);
    if (status) return gradd_wrap(gradd_at_node(status, n->name), "%s", text);
    for (int j = 0; j < n->n_out; j++)
        if (n->out[j] >= 0) map[n->out[j]] = out[j];
    return GRADD_OK;
}

static gradd_status_t add_outputs(graph_t *g, const graph_options_t *options,
                                  const gradd_val_t *map) {
    const model_t *m = g->model;
    for (int j = 0; j < options->n_outputs; j++) {
        int32_t k = options->outputs[j];
        if (k < 0 || k >= m->n_outputs)
            return GRADD_FAIL(TENSOR, "output %d of %d", k, m->n_outputs);
        if (graph_is_sequence(map[m->outputs[k]]))
            return GRADD_FAIL(UNSUPPORTED, "output '%.120s' is a sequence",
                              m->values[m->outputs[k]].name);
        g->outputs[j] = map[m->outputs[k]];
    }
    g->n_outputs = options->n_outputs;
    return GRADD_OK;
}

static gradd_status_t instantiate(graph_t *g, const graph_options_t *options) {
    const model_t *m = g->model;
    gradd_val_t *map = arena_alloc(g->arena, sizeof map[0] * (size_t)(m->n_values + 1));
    g->inputs = arena_alloc(g->arena, sizeof g->inputs[0] * (size_t)(m->n_inputs + 1));
    g->outputs = arena_alloc(g->arena, sizeof g->outputs[0] * (size_t)(options->n_outputs + 1));
    if (!map || !g->inputs || !g->outputs)
        return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    for (int v = 0; v < m->n_values; v++)
        map[v] = GRADD_NONE;
    g->of_model = map;
    GRADD_TRY(add_inputs(g, options, map));
    for (int i = 0; i < m->n_nodes; i++) {
        g->origin = i;
        g->random = (uint64_t)m->nodes[i].index;
        GRADD_TRY(graph_add_node(g, &m->nodes[i], map));
    }
    GRADD_TRY(add_outputs(g, options, map));
    for (int v = 0; v < m->n_values; v++) /* no value of the graph: what follows reads tensors */
        if (graph_is_sequence(map[v])) map[v] = GRADD_NONE;
    return GRADD_OK;
}

/* Per model input, whether it is in the list. */
static gradd_status_t mark_inputs(graph_t *g, const int32_t *list, int n, const bool **out) {
    const size_t n_inputs = (size_t)g->model->n_inputs;
    bool *is = arena_alloc(g->arena, sizeof is[0] * (n_inputs + 1));
    if (!is) return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    memset(is, 0, sizeof is[0] * n_inputs);
    for (int i = 0; i < n; i++)
        is[list[i]] = true;
    *out = is;
    return GRADD_OK;
}

bool graph_is_parameter(const graph_t *g, gradd_val_t v) {
    return v != GRADD_NONE && g->values[v]->kind == VALUE_INPUT &&
           g->values[v]->index < g->model->n_inputs && g->parameters[g->values[v]->index];
}

bool graph_is_trained(const graph_t *g, gradd_val_t v) {
    return v != GRADD_NONE && g->values[v]->kind == VALUE_INPUT &&
           g->values[v]->index < g->model->n_inputs && g->trained[g->values[v]->index];
}

gradd_status_t graph_create(const model_t *model, const graph_options_t *options,
                            graph_t **out_graph) {
    graph_t *g = calloc(1, sizeof *g);
    if (!g) return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    g->builder = (gradd_builder_t){
        .emit = rule_emit, .constant = rule_constant, .type = rule_type, .data = rule_data};
    g->model = model;
    g->backend = options->backend;
    g->plain = options->plain;
    g->written_out = options->written_out;
    g->trains = options->n_trained > 0;
    g->dense_loss = options->dense_loss;
    g->early = options->early;
    g->label_rows = options->label_rows;
    g->real_rows = options->real_rows;
    g->source_rows = options->source_rows;
    g->live = (gradd_live_t){.label_input = -1, .mask_input = -1, .source_input = -1};
    gradd_status_t status = arena_create(GRAPH_MAX_BYTES, &g->arena);
    if (!status)
        status = mark_inputs(g, options->parameters, options->n_parameters, &g->parameters);
    if (!status) status = mark_inputs(g, options->trained, options->n_trained, &g->trained);
    if (!status) status = instantiate(g, options);
    if (!status) status = graph_apply_passes(g, PHASE_FORWARD);
    if (status) {
        graph_destroy(g);
        return status;
    }
    g->n_forward = g->n_nodes;
    *out_graph = g;
    return GRADD_OK;
}

gradd_status_t graph_differentiate(const model_t *model, const gradd_plan_options_t *o,
                                   graph_t **out_graph, gradd_val_t *out_grads) {
    const graph_options_t options = {.inputs = o->inputs,
                                     .outputs = o->outputs,
                                     .n_outputs = o->n_outputs,
                                     .plain = true,
                                     .written_out = true,
                                     .trained = o->grads,
                                     .n_trained = o->n_grads,
                                     .dense_loss = true};
    const autodiff_t ad = {o->grads, o->n_grads, o->grad_outputs, o->n_grad_outputs, out_grads};
    graph_t *g = NULL;
    GRADD_TRY(graph_create(model, &options, &g));
    const gradd_status_t status = graph_autodiff(g, &ad);
    if (status)
        graph_destroy(g);
    else
        *out_graph = g;
    return status;
}
