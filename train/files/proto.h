/* Walking protobuf messages as they lie in a file, without decoding them as a whole: what is not
 * asked for is passed over, so a part of a model can be written again byte by byte.
 *
 * A message is a row of fields, each a number (id), a wire type and a value. Nothing is trusted:
 * lengths are checked against the rest of the message. (Source: "Encoding" in protobuf's
 * documentation; the numbers of ONNX's fields are those of onnx.proto.)
 */
#ifndef GRADD_TRAIN_FILES_PROTO_H
#define GRADD_TRAIN_FILES_PROTO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shm/status.h"

typedef struct proto_span_s {
    const uint8_t *at; /* Borrowed */
    size_t n;
} proto_span_t;

typedef struct proto_field_s {
    uint32_t id;
    uint64_t number;    /* of a varint, or of 4 or 8 bytes, little-endian; else 0 */
    proto_span_t bytes; /* of strings and messages; else empty */
    proto_span_t whole; /* with what says id and length: to be copied */
} proto_field_t;

/* Takes the next field off the front of `rest`; *out_more is false at its end. Errors: MODEL. */
gradd_status_t proto_next(proto_span_t *rest, proto_field_t *out_field, bool *out_more);
/* The bytes of the first field with that id in a message; empty if there is none. Errors: MODEL. */
gradd_status_t proto_find(proto_span_t message, uint32_t id, proto_span_t *out_bytes);
/* Whether the bytes are those of the text. */
bool proto_is(proto_span_t bytes, const char *text);

/* ONNX's fields, as onnx.proto numbers them. */
enum { PROTO_MODEL_OPSET = 8, PROTO_MODEL_GRAPH = 7 };
enum {
    PROTO_GRAPH_NODE = 1,
    PROTO_GRAPH_INITIALIZER = 5,
    PROTO_GRAPH_INPUT = 11,
    PROTO_GRAPH_OUTPUT = 12,
    PROTO_GRAPH_VALUE = 13,
    PROTO_GRAPH_SPARSE = 15,
};
enum {
    PROTO_NODE_INPUT = 1,
    PROTO_NODE_OUTPUT = 2,
    PROTO_NODE_OP = 4,
    PROTO_NODE_ATTRIBUTE = 5,
    PROTO_NODE_DOMAIN = 7,
};
enum {
    PROTO_ATTRIBUTE_NAME = 1,
    PROTO_ATTRIBUTE_FLOAT = 2,
    PROTO_ATTRIBUTE_INT = 3,
    PROTO_ATTRIBUTE_GRAPH = 6,
    PROTO_ATTRIBUTE_GRAPHS = 11,
};
enum { PROTO_VALUE_NAME = 1, PROTO_VALUE_TYPE = 2 };
enum { PROTO_TYPE_TENSOR = 1, PROTO_TYPE_ELEMENT = 1, PROTO_TYPE_SHAPE = 2 };
enum { PROTO_SHAPE_DIM = 1, PROTO_DIM_VALUE = 1 };
enum { PROTO_TENSOR_DIMS = 1, PROTO_TENSOR_TYPE = 2, PROTO_TENSOR_NAME = 8, PROTO_TENSOR_RAW = 9 };

#endif
