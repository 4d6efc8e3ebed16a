/* Walking protobuf messages as they lie in a file, without decoding them as a whole: what is not
 * asked for is passed over, so a part of a model can be written again byte by byte.
 *
 * A message is a row of fields, each a number (id), a wire type and a value. Nothing is trusted:
 * lengths are checked against the rest of the message. (Source: "Encoding" in protobuf's
 * documentation; the numbers of ONNX's fields are those of onnx.proto.)
 */
#ifndef GRADD_TRAIN_FILES_WIRE_H
#define GRADD_TRAIN_FILES_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shm/status.h"

typedef struct wire_span_s {
    const uint8_t *at; /* Borrowed */
    size_t n;
} wire_span_t;

typedef struct wire_field_s {
    uint32_t id;
    uint64_t number;   /* of a varint, or of 4 or 8 bytes, little-endian; else 0 */
    wire_span_t bytes; /* of strings and messages; else empty */
    wire_span_t whole; /* with what says id and length: to be copied */
} wire_field_t;

/* Takes the next field off the front of `rest`; *out_more is false at its end. Errors: MODEL. */
gradd_status_t wire_next(wire_span_t *rest, wire_field_t *out_field, bool *out_more);
/* Whether the bytes are those of the text. */
bool wire_is(wire_span_t bytes, const char *text);

/* ONNX's fields, as onnx.proto numbers them. */
enum { WIRE_MODEL_OPSET = 8, WIRE_MODEL_GRAPH = 7 };
enum {
    WIRE_GRAPH_NODE = 1,
    WIRE_GRAPH_INITIALIZER = 5,
    WIRE_GRAPH_INPUT = 11,
    WIRE_GRAPH_OUTPUT = 12,
    WIRE_GRAPH_VALUE = 13,
    WIRE_GRAPH_SPARSE = 15,
};
enum {
    WIRE_NODE_INPUT = 1,
    WIRE_NODE_OUTPUT = 2,
    WIRE_NODE_OP = 4,
    WIRE_NODE_ATTRIBUTE = 5,
    WIRE_NODE_DOMAIN = 7,
};
enum {
    WIRE_ATTRIBUTE_NAME = 1,
    WIRE_ATTRIBUTE_FLOAT = 2,
    WIRE_ATTRIBUTE_INT = 3,
    WIRE_ATTRIBUTE_GRAPH = 6,
    WIRE_ATTRIBUTE_GRAPHS = 11,
};
enum { WIRE_VALUE_NAME = 1, WIRE_VALUE_TYPE = 2 };
enum { WIRE_TYPE_TENSOR = 1, WIRE_TYPE_ELEMENT = 1, WIRE_TYPE_SHAPE = 2 };
enum { WIRE_SHAPE_DIM = 1, WIRE_DIM_VALUE = 1 };
enum { WIRE_TENSOR_DIMS = 1, WIRE_TENSOR_TYPE = 2, WIRE_TENSOR_NAME = 8, WIRE_TENSOR_RAW = 9 };

#endif
