/* A model with its backward as an ONNX file. See explain_file.h.
 *
 * The graph has been written out in simpler operators. What is left of com.gradd and changes no
 * value (StopGradient, CheckIndex) is an Identity here, for the backward is there already. A
 * dropout gives out its mask, which its gradient reads in place of drawing it again. Constants that
 * hold one number are ConstantOfShape if they are large. */
#include <stdlib.h>
#include <string.h>

#include "server/explain/explain_file.h"
#include "server/graph/graph.h"

#define LEAST_OPSET 18   /* of the operators that rules emit: all read their axes from an operand */
#define SMALL       1024 /* bytes of a constant that is written as it is */

typedef struct writer_s {
    const explain_file_t *file;
    const gradd_plan_options_t *options;
    arena_t *arena; /* Owned: everything below */
    graph_t *g;     /* Owned */
    gradd_val_t *grads;
    bool *needed;       /* per node */
    const char **names; /* per value */
    const char **masks; /* per node: of a dropout's mask; NULL = nothing reads it */
    const char *prefix; /* that no name of the model begins with */
    Onnx__NodeProto **nodes;
    Onnx__TensorProto **constants;
    size_t n_nodes, cap_nodes, n_constants;
} writer_t;

/* ---- which nodes ----------------------------------------------------------------------------- */

static void need(writer_t *w, gradd_val_t v) {
    if (v == GRADD_NONE) return;
    const graph_value_t *value = w->g->values[v];
    if (value->node >= 0 && !value->data) w->needed[value->node] = true;
}

/* The dropout that a DropoutGrad belongs to; NULL = there is none. */
static const graph_node_t *dropout_of(const graph_t *g, const graph_node_t *grad) {
    const int64_t random = gradd_attr_int(grad->attrs, "node", -1);
    for (int k = 0; k < g->n_forward; k++)
        if (!strcmp(g->nodes[k].op->name, "Dropout") && (int64_t)g->nodes[k].random == random)
            return &g->nodes[k];
    return NULL;
}

static bool is_dropout_grad(const graph_node_t *n) {
    return !strcmp(n->op->name, "DropoutGrad");
}

static gradd_status_t need_mask(writer_t *w, const graph_node_t *grad) {
    const graph_node_t *n = dropout_of(w->g, grad);
    if (!n) return GRADD_FAIL(INTERNAL, "a gradient of no dropout");
    const int k = (int)(n - w->g->nodes);
    w->needed[k] = true;
    w->masks[k] = arena_printf(w->arena, "%smask_%d", w->prefix, k);
    return w->masks[k] ? GRADD_OK : GRADD_E_NOMEM;
}

static gradd_status_t find_needed(writer_t *w) {
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
        if (is_dropout_grad(n)) GRADD_TRY(need_mask(w, n));
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

static gradd_status_t choose_prefix(writer_t *w) {
    for (w->prefix = "gradd_"; w->prefix && begins(w->g->model, w->prefix);)
        w->prefix = arena_printf(w->arena, "%s_", w->prefix);
    return w->prefix ? GRADD_OK : GRADD_E_NOMEM;
}

static const char *output_name(const writer_t *w, int i) {
    const model_t *m = w->g->model;
    return m->values[m->outputs[w->options->outputs[i]]].name;
}

static gradd_status_t grad_name(writer_t *w, int i, const char **out) {
    const model_t *m = w->g->model;
    const char *input = m->values[m->inputs[w->options->grads[i]]].name;
    *out = arena_printf(w->arena, "%s_grad", input);
    if (!*out) return GRADD_E_NOMEM;
    if (!is_input_or_output(m, *out)) return GRADD_OK;
    return GRADD_FAIL(GRAPH, "the gradient of '%.200s' would be called '%.200s', as another value",
                      input, *out);
}

/* A value that a node makes may have the name of an output at once; others go through Identity. */
static void claim(writer_t *w, gradd_val_t v, const char *name) {
    const graph_value_t *value = w->g->values[v];
    if (value->kind == VALUE_NODE && !value->data && !w->names[v]) w->names[v] = name;
}

/* ---- messages -------------------------------------------------------------------------------- */

static Onnx__NodeProto *add_node(writer_t *w, const char *op, size_t n_in, size_t n_out) {
    if (w->n_nodes == w->cap_nodes) {
        w->cap_nodes = w->cap_nodes ? 2 * w->cap_nodes : 256;
        Onnx__NodeProto **moved = arena_array(w->arena, w->cap_nodes, sizeof moved[0]);
        if (!moved) return NULL;
        if (w->n_nodes) memcpy(moved, w->nodes, sizeof moved[0] * w->n_nodes);
        w->nodes = moved;
    }
    Onnx__NodeProto *node = arena_alloc(w->arena, sizeof *node);
    if (!node) return NULL;
    onnx__node_proto__init(node);
    node->op_type = (char *)op;
    node->n_input = n_in;
    node->n_output = n_out;
    node->input = arena_array(w->arena, n_in + 1, sizeof node->input[0]);
    node->output = arena_array(w->arena, n_out + 1, sizeof node->output[0]);
    if (!node->input || !node->output) return NULL;
    w->nodes[w->n_nodes++] = node;
    return node;
}

static gradd_status_t fill_tensor(writer_t *w, const gradd_view_t *v, Onnx__TensorProto *t) {
    onnx__tensor_proto__init(t);
    t->n_dims = (size_t)v->type.rank;
    t->dims = arena_array(w->arena, t->n_dims + 1, sizeof t->dims[0]);
    if (!t->dims) return GRADD_E_NOMEM;
    memcpy(t->dims, v->type.dims, sizeof t->dims[0] * t->n_dims);
    t->has_data_type = t->has_raw_data = 1;
    t->data_type = (int32_t)v->type.dtype;
    t->raw_data = (ProtobufCBinaryData){(size_t)gradd_type_bytes(&v->type), v->data};
    return GRADD_OK;
}

static gradd_status_t add_constant(writer_t *w, const char *name, const gradd_view_t *v) {
    Onnx__TensorProto *t = arena_alloc(w->arena, sizeof *t);
    if (!t || !name) return GRADD_E_NOMEM;
    GRADD_TRY(fill_tensor(w, v, t));
    t->name = (char *)name;
    w->constants[w->n_constants++] = t;
    return GRADD_OK;
}

static gradd_status_t add_attr(writer_t *w, Onnx__NodeProto *node, const gradd_attr_t *a) {
    Onnx__AttributeProto *p = arena_alloc(w->arena, sizeof *p);
    if (!p) return GRADD_E_NOMEM;
    onnx__attribute_proto__init(p);
    p->name = (char *)a->name;
    p->has_type = 1;
    switch (a->kind) {
    case GRADD_ATTR_INT:
        p->type = ONNX__ATTRIBUTE_PROTO__KIND__INT;
        p->has_i = 1;
        p->i = a->i;
        break;
    case GRADD_ATTR_FLOAT:
        p->type = ONNX__ATTRIBUTE_PROTO__KIND__FLOAT;
        p->has_f = 1;
        p->f = (float)a->f;
        break;
    case GRADD_ATTR_STRING:
        p->type = ONNX__ATTRIBUTE_PROTO__KIND__STRING;
        p->has_s = 1;
        p->s = (ProtobufCBinaryData){strlen(a->s), (uint8_t *)a->s};
        break;
    case GRADD_ATTR_INTS:
        p->type = ONNX__ATTRIBUTE_PROTO__KIND__INTS;
        p->n_ints = a->n;
        p->ints = (int64_t *)a->ints;
        break;
    case GRADD_ATTR_FLOATS:
        p->type = ONNX__ATTRIBUTE_PROTO__KIND__FLOATS;
        p->n_floats = a->n;
        p->floats = arena_array(w->arena, a->n + 1, sizeof p->floats[0]);
        if (!p->floats) return GRADD_E_NOMEM;
        for (size_t i = 0; i < a->n; i++)
            p->floats[i] = (float)a->floats[i];
        break;
    case GRADD_ATTR_TENSOR:
        p->type = ONNX__ATTRIBUTE_PROTO__KIND__TENSOR;
        p->t = arena_alloc(w->arena, sizeof *p->t);
        if (!p->t) return GRADD_E_NOMEM;
        GRADD_TRY(fill_tensor(w, &a->tensor, p->t));
        break;
    default:
        return GRADD_FAIL(INTERNAL, "attribute '%s' of no kind", a->name);
    }
    node->attribute[node->n_attribute++] = p;
    return GRADD_OK;
}

static gradd_status_t add_attrs(writer_t *w, Onnx__NodeProto *node, gradd_attrs_t attrs) {
    node->attribute = arena_array(w->arena, (size_t)attrs.n + 1, sizeof node->attribute[0]);
    if (!node->attribute) return GRADD_E_NOMEM;
    for (int i = 0; i < attrs.n; i++)
        GRADD_TRY(add_attr(w, node, &attrs.v[i]));
    return GRADD_OK;
}

static gradd_status_t add_identity(writer_t *w, const char *from, const char *to) {
    Onnx__NodeProto *node = add_node(w, "Identity", 1, 1);
    if (!node) return GRADD_E_NOMEM;
    node->input[0] = (char *)from;
    node->output[0] = (char *)to;
    return GRADD_OK;
}

/* ---- values ---------------------------------------------------------------------------------- */

static bool is_uniform(const gradd_view_t *v) {
    const size_t size = gradd_dtype_bytes(v->type.dtype), n = (size_t)gradd_type_bytes(&v->type);
    return n > SMALL && !memcmp(v->data, (const char *)v->data + size, n - size);
}

/* ConstantOfShape with the first element. */
static gradd_status_t add_uniform(writer_t *w, const char *name, const gradd_view_t *v) {
    const gradd_view_t sizes = {
        {GRADD_DT_I64, 1, {v->type.rank}},
        (void *)v->type.dims
    };
    const gradd_attr_t value = {
        .name = "value", .kind = GRADD_ATTR_TENSOR, .tensor = {{v->type.dtype, 1, {1}}, v->data}
    };
    const char *shape = arena_printf(w->arena, "%s_shape", name);
    GRADD_TRY(add_constant(w, shape, &sizes));
    Onnx__NodeProto *node = add_node(w, "ConstantOfShape", 1, 1);
    if (!node) return GRADD_E_NOMEM;
    node->input[0] = (char *)shape;
    node->output[0] = (char *)name;
    return add_attrs(w, node, (gradd_attrs_t){&value, 1});
}

/* The gradient that arrives: 1. */
static gradd_status_t add_seed(writer_t *w, const char *name, const gradd_type_t *type) {
    static const float f32 = 1;
    static const double f64 = 1;
    static const uint16_t bf16 = 0x3f80, f16 = 0x3c00;
    const void *one = type->dtype == GRADD_DT_F32    ? (const void *)&f32
                      : type->dtype == GRADD_DT_F64  ? (const void *)&f64
                      : type->dtype == GRADD_DT_BF16 ? (const void *)&bf16
                                                     : (const void *)&f16;
    return add_constant(w, name, &(gradd_view_t){*type, (void *)one});
}

/* The name of an operand, which is made here if no node makes it. */
static gradd_status_t operand(writer_t *w, gradd_val_t v, const char **out) {
    const graph_value_t *value = v == GRADD_NONE ? NULL : w->g->values[v];
    if (!value || w->names[v]) {
        *out = value ? w->names[v] : "";
        return GRADD_OK;
    }
    *out = w->names[v] = arena_printf(w->arena, "%s%d", w->prefix, v);
    if (!*out) return GRADD_E_NOMEM;
    if (value->data) {
        const gradd_view_t view = {value->type, (void *)value->data};
        return is_uniform(&view) ? add_uniform(w, *out, &view) : add_constant(w, *out, &view);
    }
    return value->kind == VALUE_GRAD_OUTPUT ? add_seed(w, *out, &value->type) : GRADD_OK;
}

/* ---- nodes ----------------------------------------------------------------------------------- */

/* dy where the mask kept an element, scaled; 0 elsewhere. */
static gradd_status_t write_dropout_grad(writer_t *w, const graph_node_t *n, const char *dy,
                                         const char *dx) {
    const graph_t *g = w->g;
    const graph_node_t *forward = dropout_of(g, n);
    const graph_value_t *ratio = n->in[1] == GRADD_NONE ? NULL : g->values[n->in[1]];
    const gradd_dtype_t dtype = graph_type(g, n->in[0])->dtype;
    const bool known =
        !ratio ||
        (ratio->data && (ratio->type.dtype == GRADD_DT_F32 || ratio->type.dtype == GRADD_DT_F64));
    const uint8_t *trains = n->in[2] == GRADD_NONE ? NULL : g->values[n->in[2]]->data;
    if (!known || !trains || !*trains || n->n_in > 3 ||
        (dtype != GRADD_DT_F32 && dtype != GRADD_DT_F64))
        return GRADD_FAIL(UNSUPPORTED,
                          "a dropout in %s, or whose ratio or mode is not known, has "
                          "no gradient in ONNX",
                          gradd_dtype_name(dtype));
    double p = 0.5;
    if (ratio)
        p = ratio->type.dtype == GRADD_DT_F32 ? (double)*(const float *)ratio->data
                                              : *(const double *)ratio->data;
    const gradd_type_t scalar = {.dtype = dtype};
    double *scale = arena_alloc(w->arena, 2 * sizeof *scale), *zero = scale + 1;
    const char *names[3];
    for (int i = 0; i < 3; i++)
        names[i] = arena_printf(w->arena, "%s_%d", dx, i);
    if (!scale || !names[2]) return GRADD_E_NOMEM;
    *scale = p < 1 ? 1 / (1 - p) : 0;
    if (dtype == GRADD_DT_F32) *(float *)scale = (float)*scale;
    GRADD_TRY(add_constant(w, names[0], &(gradd_view_t){scalar, scale}));
    GRADD_TRY(add_constant(w, names[1], &(gradd_view_t){scalar, zero}));
    Onnx__NodeProto *kept = add_node(w, "Where", 3, 1), *node = add_node(w, "Mul", 2, 1);
    if (!kept || !node) return GRADD_E_NOMEM;
    kept->input[0] = (char *)w->masks[forward - g->nodes];
    kept->input[1] = (char *)dy;
    kept->input[2] = (char *)names[1];
    kept->output[0] = node->input[0] = (char *)names[2];
    node->input[1] = (char *)names[0];
    node->output[0] = (char *)dx;
    return GRADD_OK;
}

/* Of com.gradd: gives its operand back, as long as nothing is differentiated. */
static bool gives_back(const graph_t *g, const graph_node_t *n) {
    return n->op->domain[0] && n->op->flags & GRADD_OP_VIEW &&
           gradd_type_equal(graph_type(g, n->in[0]), graph_type(g, n->out[0]));
}

static gradd_status_t write_whole(writer_t *w, int k, const char *const *in) {
    const graph_node_t *n = &w->g->nodes[k];
    const int opset = w->g->model->opset;
    if (n->op->domain[0] || n->op->since > opset)
        return GRADD_FAIL(UNSUPPORTED, "%s%s%s is no operator of ONNX's opset %d", n->op->domain,
                          n->op->domain[0] ? "::" : "", n->op->name, opset);
    const bool masked = w->masks[k] != NULL;
    const size_t n_out = masked && n->n_out < 2 ? 2 : (size_t)n->n_out;
    Onnx__NodeProto *node = add_node(w, n->op->name, (size_t)n->n_in, n_out);
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
    return add_attrs(w, node, n->attrs);
}

static gradd_status_t write_node(writer_t *w, int k) {
    const graph_node_t *n = &w->g->nodes[k];
    const char *in[GRADD_OP_MAX_IN + 1] = {NULL}, *out;
    char text[GRAPH_NODE_TEXT];
    const model_node_t *origin = graph_origin(w->g, n);
    gradd_status_t status = GRADD_OK;
    for (int i = 0; i < n->n_in && !status; i++)
        status = operand(w, n->in[i], &in[i]);
    if (!status && (gives_back(w->g, n) || is_dropout_grad(n))) {
        status = operand(w, n->out[0], &out);
        if (!status && is_dropout_grad(n))
            status = write_dropout_grad(w, n, in[0], out);
        else if (!status)
            status = add_identity(w, in[0], out);
    } else if (!status) {
        status = write_whole(w, k, in);
    }
    return gradd_wrap(gradd_at_node(status, origin->name), "%s%s",
                      n->backward ? "gradient of " : "",
                      graph_node_text(w->g, origin, text, sizeof text));
}

/* ---- the model ------------------------------------------------------------------------------- */

static Onnx__ValueInfoProto *value_info(writer_t *w, const char *name, const gradd_type_t *type) {
    Onnx__ValueInfoProto *info = arena_alloc(w->arena, sizeof *info);
    Onnx__TypeProto *t = arena_alloc(w->arena, sizeof *t);
    Onnx__TypeProto__Tensor *tensor = arena_alloc(w->arena, sizeof *tensor);
    Onnx__TensorShapeProto *shape = arena_alloc(w->arena, sizeof *shape);
    Onnx__TensorShapeProto__Dimension *dims = arena_array(w->arena, GRADD_MAX_RANK, sizeof dims[0]);
    Onnx__TensorShapeProto__Dimension **list =
        arena_array(w->arena, GRADD_MAX_RANK, sizeof list[0]);
    if (!info || !t || !tensor || !shape || !dims || !list) return NULL;
    onnx__value_info_proto__init(info);
    onnx__type_proto__init(t);
    onnx__type_proto__tensor__init(tensor);
    onnx__tensor_shape_proto__init(shape);
    for (int i = 0; i < type->rank; i++) {
        onnx__tensor_shape_proto__dimension__init(&dims[i]);
        dims[i].has_dim_value = 1;
        dims[i].dim_value = type->dims[i];
        list[i] = &dims[i];
    }
    shape->n_dim = (size_t)type->rank;
    shape->dim = list;
    tensor->has_elem_type = 1;
    tensor->elem_type = (int32_t)type->dtype;
    tensor->shape = shape;
    t->tensor_type = tensor;
    info->name = (char *)name;
    info->type = t;
    return info;
}

static gradd_status_t add_output(writer_t *w, Onnx__GraphProto *graph, const char *name,
                                 gradd_val_t v) {
    const char *from;
    GRADD_TRY(operand(w, v, &from));
    if (strcmp(from, name) != 0) GRADD_TRY(add_identity(w, from, name));
    Onnx__ValueInfoProto *info = value_info(w, name, graph_type(w->g, v));
    if (!info) return GRADD_E_NOMEM;
    graph->output[graph->n_output++] = info;
    return GRADD_OK;
}

static gradd_status_t add_inputs(writer_t *w, Onnx__GraphProto *graph) {
    const model_t *m = w->g->model;
    for (int i = 0; i < m->n_inputs; i++) {
        w->names[w->g->inputs[i]] = m->values[m->inputs[i]].name;
        graph->input[i] =
            value_info(w, w->names[w->g->inputs[i]], graph_type(w->g, w->g->inputs[i]));
        if (!graph->input[i]) return GRADD_E_NOMEM;
    }
    graph->n_input = (size_t)m->n_inputs;
    return GRADD_OK;
}

static gradd_status_t fill_graph(writer_t *w, Onnx__GraphProto *graph) {
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

static gradd_status_t check_arrivals(const writer_t *w) {
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

static gradd_status_t write_model(writer_t *w, const char *path) {
    const graph_t *g = w->g;
    /* Each value, a shape beside it, and two numbers for each dropout, at most. */
    const size_t n = 2 * (size_t)g->n_values + 2 * (size_t)g->n_nodes + 1;
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
    writer_t w = {.file = file, .options = options};
    if (!options->n_grads || !options->n_grad_outputs)
        return GRADD_FAIL(UNSUPPORTED, "--gradient needs --train: there is no gradient otherwise");
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
