/* Builds ONNX models for tests, valid ones and broken ones.
 *
 * The functions write straight into protobuf-c's structures and check nothing, so a test makes a
 * valid graph and breaks one thing. All memory comes from one arena that lives as long as the
 * test's process, so nothing needs to be freed.
 */
#ifndef GRADD_TESTS_C_ONNX_BUILD_H
#define GRADD_TESTS_C_ONNX_BUILD_H

#include "server/graph/onnx.pb-c.h"
#include "shm/dtype.h"

#define BUILD_KIND(name) ONNX__ATTRIBUTE_PROTO__KIND__##name

/* A model with IR version 10, opset 20 of ai.onnx and an empty graph. */
Onnx__ModelProto *build_model(void);
void build_opset(Onnx__ModelProto *model, const char *domain, int64_t version);
/* A graph input; a dim below 0 is symbolic. */
Onnx__ValueInfoProto *build_input(Onnx__ModelProto *model, const char *name, gradd_dtype_t dtype,
                                  int rank, const int64_t *dims);
void build_output(Onnx__ModelProto *model, const char *name);
/* inputs and outputs: names separated by commas, "a,,b" has an absent one; "" is no name at all. */
Onnx__NodeProto *build_node(Onnx__ModelProto *model, const char *op_type, const char *name,
                            const char *inputs, const char *outputs);
Onnx__AttributeProto *build_attr(Onnx__NodeProto *node, const char *name, int kind);
void build_attr_int(Onnx__NodeProto *node, const char *name, int64_t value);
void build_attr_ints(Onnx__NodeProto *node, const char *name, size_t n, const int64_t *values);
/* A tensor without data; build_tensor is not attached to the graph. */
Onnx__TensorProto *build_tensor(const char *name, int data_type, int rank, const int64_t *dims);
Onnx__TensorProto *build_init(Onnx__ModelProto *model, const char *name, int data_type, int rank,
                              const int64_t *dims);
void build_raw(Onnx__TensorProto *tensor, const void *data, size_t n);

uint8_t *build_pack(const Onnx__ModelProto *model, size_t *out_n);

/* Appends a pointer to a protobuf-c repeated field. */
#define BUILD_APPEND(owner, field, item)                                                           \
    ((owner)->field = build_grow((owner)->field, (owner)->n_##field, sizeof *(owner)->field),      \
     (owner)->field[(owner)->n_##field++] = (item))
void *build_grow(void *array, size_t n, size_t size);
void *build_alloc(size_t n); /* zeroed */
/* n bytes and a NUL behind them. */
void *build_copy(const void *data, size_t n);

#define BUILD_DIMS(...)                                                                            \
    (const int64_t[]) {                                                                            \
        __VA_ARGS__                                                                                \
    }

#endif
