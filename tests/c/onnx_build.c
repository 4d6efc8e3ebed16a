/* Builder of ONNX models for tests. See onnx_build.h. */
#include "tests/c/onnx_build.h"

#include <stdlib.h>
#include <string.h>

#include "server/graph/arena.h"

static arena_t *memory; /* reachable until the process ends: no leak */

void *build_alloc(size_t n) {
    if (!memory && arena_create(0, &memory)) abort(); /* also used by the fuzzer: no CHECK here */
    void *p = arena_alloc(memory, n);
    if (!p) abort();
    return p;
}

void *build_copy(const void *data, size_t n) {
    void *to = build_alloc(n + 1);
    if (n) memcpy(to, data, n);
    return to;
}

void *build_grow(void *array, size_t n, size_t size) {
    void *to = build_alloc((n + 1) * size);
    if (n) memcpy(to, array, n * size);
    return to;
}

static char *text(const char *s) {
    return build_copy(s, strlen(s));
}

Onnx__ModelProto *build_model(void) {
    Onnx__ModelProto *model = build_alloc(sizeof *model);
    onnx__model_proto__init(model);
    model->has_ir_version = 1;
    model->ir_version = 10;
    model->graph = build_alloc(sizeof *model->graph);
    onnx__graph_proto__init(model->graph);
    model->graph->name = text("test");
    build_opset(model, "", 20);
    return model;
}

void build_opset(Onnx__ModelProto *model, const char *domain, int64_t version) {
    Onnx__OperatorSetIdProto *set = build_alloc(sizeof *set);
    onnx__operator_set_id_proto__init(set);
    set->domain = text(domain);
    set->has_version = 1;
    set->version = version;
    BUILD_APPEND(model, opset_import, set);
}

static Onnx__TensorShapeProto *shape_of(int rank, const int64_t *dims) {
    Onnx__TensorShapeProto *shape = build_alloc(sizeof *shape);
    onnx__tensor_shape_proto__init(shape);
    for (int d = 0; d < rank; d++) {
        Onnx__TensorShapeProto__Dimension *dim = build_alloc(sizeof *dim);
        onnx__tensor_shape_proto__dimension__init(dim);
        dim->has_dim_value = dims[d] >= 0;
        dim->dim_value = dims[d];
        if (dims[d] < 0) dim->dim_param = text("N");
        BUILD_APPEND(shape, dim, dim);
    }
    return shape;
}

static Onnx__ValueInfoProto *value_info(const char *name) {
    Onnx__ValueInfoProto *info = build_alloc(sizeof *info);
    onnx__value_info_proto__init(info);
    info->name = text(name);
    info->type = build_alloc(sizeof *info->type);
    onnx__type_proto__init(info->type);
    return info;
}

Onnx__ValueInfoProto *build_input(Onnx__ModelProto *model, const char *name, gradd_dtype_t dtype,
                                  int rank, const int64_t *dims) {
    Onnx__ValueInfoProto *info = value_info(name);
    Onnx__TypeProto__Tensor *tensor = build_alloc(sizeof *tensor);
    onnx__type_proto__tensor__init(tensor);
    tensor->has_elem_type = 1;
    tensor->elem_type = dtype;
    tensor->shape = shape_of(rank, dims);
    info->type->tensor_type = tensor;
    BUILD_APPEND(model->graph, input, info);
    return info;
}

void build_output(Onnx__ModelProto *model, const char *name) {
    BUILD_APPEND(model->graph, output, value_info(name));
}

#define APPEND_NAMES(node, field, list)                                                            \
    for (const char *at = (list); *at;) {                                                          \
        size_t n = strcspn(at, ",");                                                               \
        BUILD_APPEND(node, field, (char *)build_copy(at, n));                                      \
        at += n;                                                                                   \
        if (*at == ',' && !*++at) BUILD_APPEND(node, field, text(""));                             \
    }

Onnx__NodeProto *build_node(Onnx__ModelProto *model, const char *op_type, const char *name,
                            const char *inputs, const char *outputs) {
    Onnx__NodeProto *node = build_alloc(sizeof *node);
    onnx__node_proto__init(node);
    node->op_type = text(op_type);
    if (name[0]) node->name = text(name);
    APPEND_NAMES(node, input, inputs);
    APPEND_NAMES(node, output, outputs);
    BUILD_APPEND(model->graph, node, node);
    return node;
}

Onnx__AttributeProto *build_attr(Onnx__NodeProto *node, const char *name, int kind) {
    Onnx__AttributeProto *attr = build_alloc(sizeof *attr);
    onnx__attribute_proto__init(attr);
    attr->name = text(name);
    attr->has_type = 1;
    attr->type = kind;
    BUILD_APPEND(node, attribute, attr);
    return attr;
}

void build_attr_int(Onnx__NodeProto *node, const char *name, int64_t value) {
    Onnx__AttributeProto *attr = build_attr(node, name, BUILD_KIND(INT));
    attr->has_i = 1;
    attr->i = value;
}

void build_attr_ints(Onnx__NodeProto *node, const char *name, size_t n, const int64_t *values) {
    Onnx__AttributeProto *attr = build_attr(node, name, BUILD_KIND(INTS));
    attr->n_ints = n;
    attr->ints = build_copy(values, n * sizeof *values);
}

Onnx__TensorProto *build_tensor(const char *name, int data_type, int rank, const int64_t *dims) {
    Onnx__TensorProto *tensor = build_alloc(sizeof *tensor);
    onnx__tensor_proto__init(tensor);
    tensor->name = text(name);
    tensor->has_data_type = 1;
    tensor->data_type = data_type;
    tensor->n_dims = (size_t)rank;
    tensor->dims = build_copy(dims, (size_t)rank * sizeof *dims);
    return tensor;
}

Onnx__TensorProto *build_init(Onnx__ModelProto *model, const char *name, int data_type, int rank,
                              const int64_t *dims) {
    Onnx__TensorProto *tensor = build_tensor(name, data_type, rank, dims);
    BUILD_APPEND(model->graph, initializer, tensor);
    return tensor;
}

void build_raw(Onnx__TensorProto *tensor, const void *data, size_t n) {
    tensor->has_raw_data = 1;
    tensor->raw_data.len = n;
    tensor->raw_data.data = build_copy(data, n);
}

uint8_t *build_pack(const Onnx__ModelProto *model, size_t *out_n) {
    size_t n = onnx__model_proto__get_packed_size(model);
    uint8_t *bytes = build_alloc(n + 1);
    *out_n = onnx__model_proto__pack(model, bytes);
    return bytes;
}
