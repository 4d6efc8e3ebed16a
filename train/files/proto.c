/* See proto.h. */
#include "train/files/proto.h"

#include <string.h>

enum { VARINT = 0, EIGHT = 1, BYTES = 2, FOUR = 5, MAX_VARINT = 10 };

static gradd_status_t take_varint(proto_span_t *rest, uint64_t *out_value) {
    uint64_t value = 0;
    for (size_t i = 0; i < MAX_VARINT && i < rest->n; i++) {
        value |= (uint64_t)(rest->at[i] & 0x7f) << (7 * i);
        if (rest->at[i] & 0x80) continue;
        *rest = (proto_span_t){rest->at + i + 1, rest->n - i - 1};
        *out_value = value;
        return GRADD_OK;
    }
    return GRADD_FAIL(MODEL, "a number in the model does not end");
}

static gradd_status_t take_bytes(proto_span_t *rest, uint64_t n, proto_span_t *out_bytes) {
    if (n > rest->n)
        return GRADD_FAIL(MODEL, "a part of the model claims %llu bytes, %zu are left",
                          (unsigned long long)n, rest->n);
    *out_bytes = (proto_span_t){rest->at, (size_t)n};
    *rest = (proto_span_t){rest->at + n, rest->n - (size_t)n};
    return GRADD_OK;
}

static gradd_status_t take_value(proto_span_t *rest, int type, proto_field_t *field) {
    proto_span_t fixed = {0};
    uint64_t n = 0;
    switch (type) {
    case VARINT:
        return take_varint(rest, &field->number);
    case BYTES:
        GRADD_TRY(take_varint(rest, &n));
        return take_bytes(rest, n, &field->bytes);
    case FOUR:
    case EIGHT:
        GRADD_TRY(take_bytes(rest, type == FOUR ? 4 : 8, &fixed));
        memcpy(&field->number, fixed.at, fixed.n);
        return GRADD_OK;
    default:
        return GRADD_FAIL(MODEL, "field %u of the model is of wire type %d", (unsigned)field->id,
                          type);
    }
}

gradd_status_t proto_next(proto_span_t *rest, proto_field_t *out_field, bool *out_more) {
    const uint8_t *begin = rest->at;
    proto_field_t field = {0};
    uint64_t tag = 0;
    *out_more = rest->n > 0;
    if (!*out_more) return GRADD_OK;
    GRADD_TRY(take_varint(rest, &tag));
    if (tag >> 3 == 0 || tag >> 32 != 0)
        return GRADD_FAIL(MODEL, "a field of the model has the number %llu",
                          (unsigned long long)(tag >> 3));
    field.id = (uint32_t)(tag >> 3);
    GRADD_TRY(take_value(rest, (int)(tag & 7), &field));
    field.whole = (proto_span_t){begin, (size_t)(rest->at - begin)};
    *out_field = field;
    return GRADD_OK;
}

gradd_status_t proto_find(proto_span_t message, uint32_t id, proto_span_t *out_bytes) {
    proto_field_t field;
    bool more = true;
    *out_bytes = (proto_span_t){0};
    while (more && !out_bytes->at) {
        GRADD_TRY(proto_next(&message, &field, &more));
        if (more && field.id == id) *out_bytes = field.bytes;
    }
    return GRADD_OK;
}

bool proto_is(proto_span_t bytes, const char *text) {
    return bytes.n == strlen(text) && memcmp(bytes.at, text, bytes.n) == 0;
}
