/* Scan of serialized ONNX before protobuf-c unpacks it. See model.h for the contract.
 *
 * protobuf-c recurses without a limit (30 KB of nested subgraphs overflow an 8 MiB stack), turns
 * two bytes of empty message into 168 bytes of heap, and copies again and again when a singular
 * submessage is repeated. This scan walks the same bytes with a fixed stack, guided by the
 * descriptors that protoc-c generated, and refuses messages that are malformed, too deep, too large
 * once decoded, or repeated where they may not be. Bytes that pass the scan unpack within the
 * estimate.
 *
 * Failures say where: "graph.node[3].attribute[0].t". Indices count consecutive elements.
 */
#include <protobuf-c/protobuf-c.h>
#include <stdio.h>
#include <string.h>

#include "server/graph/model.h"
#include "server/graph/onnx.pb-c.h"

#define LEVELS_MAX 128 /* upper bound of limits.max_depth */

/* The bytes that protobuf-c allocates per field beside its payload: the slot in the list of scanned
 * members, which is doubled as it grows, and the header of a malloc block. */
enum { FIELD_COST = 96, BLOCK_COST = 32, UNKNOWN_COST = 64 };

enum { WIRE_VARINT = 0, WIRE_64 = 1, WIRE_BYTES = 2, WIRE_32 = 5 };

/* Models of the real world decode to 25 to 40 times their size as long as they are small. A large
 * one that does is made of empty messages, and decoding them would hold the engine. */
#define HEAP_BASE     ((size_t)256 << 20)
#define HEAP_PER_BYTE ((size_t)16)

typedef struct level_s {
    const ProtobufCMessageDescriptor *message;
    const ProtobufCFieldDescriptor *field; /* last known field seen */
    const uint8_t *end;
    uint64_t seen; /* singular fields that occurred, by position in the descriptor (< 64: tested) */
    size_t index;  /* consecutive occurrences of `field` before this one */
} level_t;

typedef struct prescan_s {
    const uint8_t *at;
    size_t heap, max_heap;
    int depth, max_depth;
    level_t levels[LEVELS_MAX];
} prescan_t;

/* "graph.node[3].attribute[0]" for the innermost level; keeps both ends if it is too long. */
static const char *path_of(const prescan_t *s, char *buffer, size_t n) {
    size_t used = 0;
    buffer[0] = 0;
    for (int d = 0; d <= s->depth; d++) {
        const level_t *level = &s->levels[d];
        if (!level->field) break;
        if (d > 12 && d < s->depth - 3) {
            if (d == 13) used += (size_t)snprintf(buffer + used, n - used, "...");
            continue;
        }
        const char *dot = used ? "." : "";
        if (level->field->label == PROTOBUF_C_LABEL_REPEATED)
            used += (size_t)snprintf(buffer + used, n - used, "%s%s[%zu]", dot, level->field->name,
                                     level->index);
        else
            used += (size_t)snprintf(buffer + used, n - used, "%s%s", dot, level->field->name);
        if (used >= n - 1) break;
    }
    if (!buffer[0]) snprintf(buffer, n, "the start of the model");
    return buffer;
}

#define PATH_TEXT               512
#define SCAN_FAIL(s, code, ...) scan_fail(s, GRADD_FAIL(code, __VA_ARGS__))

static gradd_status_t scan_fail(const prescan_t *s, gradd_status_t status) {
    char path[PATH_TEXT];
    return gradd_wrap(status, "at %s", path_of(s, path, sizeof path));
}

/* A tag that no message of ONNX has. In the outermost one, the bytes are something else. */
static gradd_status_t not_a_field(const prescan_t *s, gradd_status_t status) {
    status = scan_fail(s, status);
    return s->depth ? status : gradd_wrap(status, "this is not an ONNX model");
}

#define NOT_A_FIELD(s, ...) not_a_field(s, GRADD_FAIL(MODEL, __VA_ARGS__))

static gradd_status_t add_heap(prescan_t *s, size_t bytes) {
    if (bytes > s->max_heap - s->heap)
        return SCAN_FAIL(s, LIMIT, "the decoded model would need more than %zu bytes", s->max_heap);
    s->heap += bytes;
    return GRADD_OK;
}

/* At most `max` bytes: 10 for 64 bits, 5 for tags and lengths. */
static bool read_varint(const uint8_t **at, const uint8_t *end, int max, uint64_t *out) {
    uint64_t value = 0;
    for (int i = 0; i < max && *at < end; i++) {
        uint8_t byte = *(*at)++;
        value |= (uint64_t)(byte & 127) << (7 * i);
        if (byte < 128) {
            *out = value;
            return true;
        }
    }
    return false;
}

static int wire_type_of(ProtobufCType type) {
    switch (type) {
    case PROTOBUF_C_TYPE_SFIXED32:
    case PROTOBUF_C_TYPE_FIXED32:
    case PROTOBUF_C_TYPE_FLOAT:
        return WIRE_32;
    case PROTOBUF_C_TYPE_SFIXED64:
    case PROTOBUF_C_TYPE_FIXED64:
    case PROTOBUF_C_TYPE_DOUBLE:
        return WIRE_64;
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_BYTES:
    case PROTOBUF_C_TYPE_MESSAGE:
        return WIRE_BYTES;
    default:
        return WIRE_VARINT;
    }
}

/* Length of the UTF-8 sequence at p, 0 if it is not one, or is NUL. Overlong forms and surrogates
 * are refused: names come back to Python in error messages. */
static size_t utf8_step(const uint8_t *p, const uint8_t *end) {
    size_t left = (size_t)(end - p);
    if (p[0] < 0x80) return p[0] ? 1 : 0;
    size_t n = p[0] >= 0xf0 && p[0] <= 0xf4 ? 4 : p[0] >= 0xe0 ? 3 : p[0] >= 0xc2 ? 2 : 0;
    if (!n || p[0] > 0xf4 || left < n) return 0;
    for (size_t i = 1; i < n; i++)
        if ((p[i] & 0xc0) != 0x80) return 0;
    if (p[0] == 0xe0 && p[1] < 0xa0) return 0;
    if (p[0] == 0xed && p[1] > 0x9f) return 0;
    if (p[0] == 0xf0 && p[1] < 0x90) return 0;
    if (p[0] == 0xf4 && p[1] > 0x8f) return 0;
    return n;
}

static gradd_status_t scan_string(prescan_t *s, const uint8_t *end) {
    for (const uint8_t *p = s->at; p < end;) {
        size_t step = utf8_step(p, end);
        if (!step) return SCAN_FAIL(s, MODEL, "the text is not UTF-8 or has a NUL byte in it");
        p += step;
    }
    return GRADD_OK;
}

/* A packed stretch of numbers: `length` bytes that end at `end`. */
static gradd_status_t scan_packed(prescan_t *s, int wire, size_t length, const uint8_t *end) {
    if (wire == WIRE_32 || wire == WIRE_64) {
        size_t size = wire == WIRE_32 ? 4 : 8;
        if (length % size)
            return SCAN_FAIL(s, MODEL, "%zu packed bytes are no multiple of %zu", length, size);
        return add_heap(s, length);
    }
    size_t count = 0;
    for (const uint8_t *p = s->at; p < end; count++) {
        uint64_t value;
        if (!read_varint(&p, end, 10, &value))
            return SCAN_FAIL(s, MODEL, "packed number %zu is broken", count);
    }
    return add_heap(s, 8 * count);
}

static gradd_status_t enter(prescan_t *s, const ProtobufCMessageDescriptor *message,
                            const uint8_t *end) {
    if (s->depth + 2 > s->max_depth)
        return SCAN_FAIL(s, LIMIT, "nesting %d is deeper than the limit of %d", s->depth + 2,
                         s->max_depth);
    GRADD_TRY(add_heap(s, message->sizeof_message + BLOCK_COST));
    s->levels[++s->depth] = (level_t){.message = message, .end = end};
    return GRADD_OK;
}

static gradd_status_t scan_bytes(prescan_t *s, const ProtobufCFieldDescriptor *field) {
    const uint8_t *limit = s->levels[s->depth].end;
    uint64_t length;
    if (!read_varint(&s->at, limit, 5, &length))
        return SCAN_FAIL(s, MODEL, "a length is broken or the data ends inside it");
    if (length > (uint64_t)(limit - s->at))
        return SCAN_FAIL(s, MODEL, "%llu bytes are announced, %zu are left (truncated?)",
                         (unsigned long long)length, (size_t)(limit - s->at));
    const uint8_t *end = s->at + length;
    if (field && field->type == PROTOBUF_C_TYPE_MESSAGE)
        return length
                   ? enter(s, field->descriptor, end)
                   : add_heap(
                         s,
                         ((const ProtobufCMessageDescriptor *)field->descriptor)->sizeof_message +
                             BLOCK_COST);
    if (field && field->type == PROTOBUF_C_TYPE_STRING) GRADD_TRY(scan_string(s, end));
    if (field && wire_type_of(field->type) != WIRE_BYTES)
        GRADD_TRY(scan_packed(s, wire_type_of(field->type), (size_t)length, end));
    else
        GRADD_TRY(add_heap(s, (size_t)length + BLOCK_COST));
    s->at = end;
    return GRADD_OK;
}

static gradd_status_t scan_number(prescan_t *s, int wire) {
    const uint8_t *end = s->levels[s->depth].end;
    uint64_t value;
    if (wire == WIRE_VARINT) {
        if (!read_varint(&s->at, end, 10, &value))
            return SCAN_FAIL(s, MODEL, "a number is broken or the data ends inside it");
        return GRADD_OK;
    }
    size_t size = wire == WIRE_32 ? 4 : 8;
    if ((size_t)(end - s->at) < size) return SCAN_FAIL(s, MODEL, "the data ends inside a number");
    s->at += size;
    return GRADD_OK;
}

/* Books the occurrence of a known field: its wire type, its index, and that singular fields do not
 * repeat (protobuf would merge repeated messages, at quadratic cost). */
static gradd_status_t note_field(prescan_t *s, const ProtobufCFieldDescriptor *field, int wire) {
    level_t *level = &s->levels[s->depth];
    level->index = field == level->field ? level->index + 1 : 0;
    level->field = field;
    bool repeated = field->label == PROTOBUF_C_LABEL_REPEATED;
    int want = wire_type_of(field->type);
    if (wire != want && !(repeated && wire == WIRE_BYTES))
        return NOT_A_FIELD(s, "wire type %d, expected %d", wire, want);
    if (repeated) return GRADD_OK;
    uint64_t bit = 1ull << (field - level->message->fields);
    if (level->seen & bit) return SCAN_FAIL(s, MODEL, "the field occurs twice");
    level->seen |= bit;
    return GRADD_OK;
}

static gradd_status_t scan_field(prescan_t *s) {
    const level_t *level = &s->levels[s->depth];
    uint64_t tag;
    if (!read_varint(&s->at, level->end, 5, &tag) || tag > UINT32_MAX || tag < 8)
        return NOT_A_FIELD(s, "a field's tag is broken (truncated?)");
    int wire = (int)(tag & 7);
    const ProtobufCFieldDescriptor *field =
        protobuf_c_message_descriptor_get_field(level->message, (unsigned)(tag >> 3));
    if (field) GRADD_TRY(note_field(s, field, wire));
    GRADD_TRY(add_heap(s, field ? FIELD_COST : FIELD_COST + UNKNOWN_COST));
    switch (wire) {
    case WIRE_VARINT:
    case WIRE_32:
    case WIRE_64:
        return scan_number(s, wire);
    case WIRE_BYTES:
        return scan_bytes(s, field);
    default:
        return NOT_A_FIELD(s, "wire type %d of field %u is not in use", wire, (unsigned)(tag >> 3));
    }
}

gradd_status_t model_prescan(const void *bytes, size_t n, const model_limits_t *limits,
                             size_t *out_heap) {
    if (!limits) limits = &model_default_limits;
    if (!bytes || !n) return GRADD_FAIL(MODEL, "the model is empty");
    if (n > limits->max_bytes || n > INT32_MAX)
        return GRADD_FAIL(LIMIT, "the model has %zu bytes, the limit is %zu", n,
                          limits->max_bytes < INT32_MAX ? limits->max_bytes : INT32_MAX);
    prescan_t s = {.at = bytes, .max_heap = HEAP_BASE + HEAP_PER_BYTE * n, .max_depth = LEVELS_MAX};
    if (limits->max_heap_bytes < s.max_heap) s.max_heap = limits->max_heap_bytes;
    if (limits->max_depth < LEVELS_MAX) s.max_depth = limits->max_depth;
    s.levels[0] = (level_t){.message = &onnx__model_proto__descriptor, .end = s.at + n};
    GRADD_TRY(add_heap(&s, sizeof(Onnx__ModelProto)));
    while (s.depth >= 0) {
        if (s.at == s.levels[s.depth].end)
            s.depth--;
        else
            GRADD_TRY(scan_field(&s));
    }
    *out_heap = s.heap;
    return GRADD_OK;
}
