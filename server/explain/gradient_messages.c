/* The messages of a model with its backward. See gradient_writer.h. */
#include <string.h>

#include "server/explain/gradient_writer.h"

Onnx__NodeProto *gradient_add_node(gradient_writer_t *w, const char *op, size_t n_in,
                                   size_t n_out) {
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

static gradd_status_t fill_tensor(gradient_writer_t *w, const gradd_view_t *v,
                                  Onnx__TensorProto *t) {
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

gradd_status_t gradient_add_constant(gradient_writer_t *w, const char *name,
                                     const gradd_view_t *v) {
    Onnx__TensorProto *t = arena_alloc(w->arena, sizeof *t);
    if (!t || !name) return GRADD_E_NOMEM;
    GRADD_TRY(fill_tensor(w, v, t));
    t->name = (char *)name;
    w->constants[w->n_constants++] = t;
    return GRADD_OK;
}

static gradd_status_t add_attr(gradient_writer_t *w, Onnx__NodeProto *node, const gradd_attr_t *a) {
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

gradd_status_t gradient_add_attrs(gradient_writer_t *w, Onnx__NodeProto *node,
                                  gradd_attrs_t attrs) {
    node->attribute = arena_array(w->arena, (size_t)attrs.n + 1, sizeof node->attribute[0]);
    if (!node->attribute) return GRADD_E_NOMEM;
    for (int i = 0; i < attrs.n; i++)
        GRADD_TRY(add_attr(w, node, &attrs.v[i]));
    return GRADD_OK;
}

/* A constant of one element, 0 or 1. */
gradd_status_t gradient_add_number(gradient_writer_t *w, const char *name, const gradd_type_t *type,
                                   int k) {
    static const float f32[] = {0, 1};
    static const double f64[] = {0, 1};
    static const uint16_t bf16[] = {0, 0x3f80}, f16[] = {0, 0x3c00};
    const void *number = type->dtype == GRADD_DT_F32    ? (const void *)&f32[k]
                         : type->dtype == GRADD_DT_F64  ? (const void *)&f64[k]
                         : type->dtype == GRADD_DT_BF16 ? (const void *)&bf16[k]
                                                        : (const void *)&f16[k];
    return gradient_add_constant(w, name, &(gradd_view_t){*type, (void *)number});
}

gradd_status_t gradient_add_identity(gradient_writer_t *w, const char *from, const char *to) {
    Onnx__NodeProto *node = gradient_add_node(w, "Identity", 1, 1);
    if (!node) return GRADD_E_NOMEM;
    node->input[0] = (char *)from;
    node->output[0] = (char *)to;
    return GRADD_OK;
}

Onnx__ValueInfoProto *gradient_value_info(gradient_writer_t *w, const char *name,
                                          const gradd_type_t *type) {
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
