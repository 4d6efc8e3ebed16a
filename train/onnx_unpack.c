/* Decodes ONNX for libgradd_train, in the place of protobuf-c's runtime, which a device does not
 * have: the functions of it that the generated code and the importer call, with their names.
 *
 * It relies on model_prescan: the bytes are well formed, fields have the wire type of their
 * declaration, depth is bounded, singular fields occur once. What would still break it ends the
 * decoding with NULL. Of field types it knows those in onnx.proto.
 */
#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { WIRE_VARINT = 0, WIRE_64 = 1, WIRE_BYTES = 2, WIRE_32 = 5 };

typedef struct reader_s {
    ProtobufCAllocator *allocator;
    const uint8_t *at, *end;
} reader_t;

static void *take(const reader_t *r, size_t bytes) {
    return r->allocator ? r->allocator->alloc(r->allocator->allocator_data, bytes) : malloc(bytes);
}

/* A field as it lies there: a number, or bytes. */
typedef struct wire_s {
    uint32_t id;
    int type;
    uint64_t number;
    const uint8_t *data;
    size_t n;
} wire_t;

static bool read_varint(reader_t *r, uint64_t *out) {
    uint64_t value = 0;
    for (int i = 0; i < 10 && r->at < r->end; i++) {
        const uint8_t byte = *r->at++;
        value |= (uint64_t)(byte & 127) << (7 * i);
        if (byte < 128) {
            *out = value;
            return true;
        }
    }
    return false;
}

static bool read_fixed(reader_t *r, size_t bytes, uint64_t *out) {
    *out = 0;
    if ((size_t)(r->end - r->at) < bytes) return false;
    for (size_t i = 0; i < bytes; i++)
        *out |= (uint64_t)r->at[i] << (8 * i);
    r->at += bytes;
    return true;
}

static bool read_wire(reader_t *r, wire_t *out) {
    uint64_t tag, n;
    if (!read_varint(r, &tag) || tag >> 3 == 0 || tag >> 32) return false;
    *out = (wire_t){.id = (uint32_t)(tag >> 3), .type = (int)(tag & 7)};
    switch (out->type) {
    case WIRE_VARINT:
        return read_varint(r, &out->number);
    case WIRE_64:
        return read_fixed(r, 8, &out->number);
    case WIRE_32:
        return read_fixed(r, 4, &out->number);
    case WIRE_BYTES:
        if (!read_varint(r, &n) || n > (size_t)(r->end - r->at)) return false;
        out->data = r->at;
        out->n = (size_t)n;
        r->at += n;
        return true;
    default:
        return false;
    }
}

/* ---- one field ------------------------------------------------------------------------------- */

static size_t size_of(ProtobufCType type) {
    switch (type) {
    case PROTOBUF_C_TYPE_INT32:
    case PROTOBUF_C_TYPE_FLOAT:
        return 4;
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_DOUBLE:
        return 8;
    case PROTOBUF_C_TYPE_BYTES:
        return sizeof(ProtobufCBinaryData);
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_MESSAGE:
        return sizeof(void *);
    default:
        return 0; /* not in onnx.proto */
    }
}

static int wire_of(ProtobufCType type) {
    switch (type) {
    case PROTOBUF_C_TYPE_FLOAT:
        return WIRE_32;
    case PROTOBUF_C_TYPE_DOUBLE:
        return WIRE_64;
    case PROTOBUF_C_TYPE_BYTES:
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_MESSAGE:
        return WIRE_BYTES;
    default:
        return WIRE_VARINT;
    }
}

static ProtobufCMessage *unpack(const ProtobufCMessageDescriptor *d, const reader_t *from);

/* Bytes with a NUL behind them. */
static uint8_t *copy_bytes(const reader_t *r, const wire_t *w) {
    uint8_t *copy = take(r, w->n + 1);
    if (!copy) return NULL;
    if (w->n) memcpy(copy, w->data, w->n);
    copy[w->n] = 0;
    return copy;
}

static void put_number(uint64_t number, size_t bytes, void *to) {
    const uint32_t low = (uint32_t)number;
    if (bytes == 4)
        memcpy(to, &low, 4);
    else
        memcpy(to, &number, 8);
}

static bool put_field(const reader_t *r, const ProtobufCFieldDescriptor *f, const wire_t *w,
                      void *to) {
    const reader_t inner = {r->allocator, w->data, w->data + w->n};
    void *made;
    if (wire_of(f->type) != WIRE_BYTES) {
        put_number(w->number, size_of(f->type), to);
        return true;
    }
    made = f->type == PROTOBUF_C_TYPE_MESSAGE ? (void *)unpack(f->descriptor, &inner)
                                              : (void *)copy_bytes(r, w);
    if (f->type == PROTOBUF_C_TYPE_BYTES)
        *(ProtobufCBinaryData *)to = (ProtobufCBinaryData){made ? w->n : 0, made};
    else
        memcpy(to, &made, sizeof made);
    return made;
}

/* ---- repeated fields ------------------------------------------------------------------------- */

static bool is_packed(const ProtobufCFieldDescriptor *f, const wire_t *w) {
    return w->type == WIRE_BYTES && wire_of(f->type) != WIRE_BYTES;
}

static bool read_number(reader_t *r, ProtobufCType type, uint64_t *out) {
    const int wire = wire_of(type);
    return wire == WIRE_VARINT ? read_varint(r, out) : read_fixed(r, size_of(type), out);
}

/* Numbers in a packed field; false if the bytes do not divide into such. */
static bool count_packed(const ProtobufCFieldDescriptor *f, const wire_t *w, size_t *out) {
    reader_t r = {NULL, w->data, w->data + w->n};
    uint64_t number;
    for (*out = 0; r.at < r.end; ++*out)
        if (!read_number(&r, f->type, &number)) return false;
    return true;
}

static size_t *quantity(ProtobufCMessage *m, const ProtobufCFieldDescriptor *f) {
    return (size_t *)((char *)m + f->quantifier_offset);
}

static void **list_of(ProtobufCMessage *m, const ProtobufCFieldDescriptor *f) {
    return (void **)((char *)m + f->offset);
}

/* The message's field for those bytes, NULL for one that is unknown; false if they cannot be its.
 */
static bool find_field(const ProtobufCMessageDescriptor *d, const wire_t *w,
                       const ProtobufCFieldDescriptor **out) {
    const ProtobufCFieldDescriptor *f = protobuf_c_message_descriptor_get_field(d, w->id);
    *out = f;
    if (!f) return true;
    if (!size_of(f->type)) return false;
    return w->type == wire_of(f->type) ||
           (f->label == PROTOBUF_C_LABEL_REPEATED && is_packed(f, w));
}

/* How many elements each repeated field has. */
static bool count_all(const ProtobufCMessageDescriptor *d, reader_t r, ProtobufCMessage *m) {
    while (r.at < r.end) {
        const ProtobufCFieldDescriptor *f;
        wire_t w;
        size_t n = 1;
        if (!read_wire(&r, &w) || !find_field(d, &w, &f)) return false;
        if (!f || f->label != PROTOBUF_C_LABEL_REPEATED) continue;
        if (is_packed(f, &w) && !count_packed(f, &w, &n)) return false;
        *quantity(m, f) += n;
    }
    return true;
}

/* Lists of that many, still empty. */
static bool take_lists(const ProtobufCMessageDescriptor *d, const reader_t *r,
                       ProtobufCMessage *m) {
    for (unsigned i = 0; i < d->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &d->fields[i];
        if (f->label != PROTOBUF_C_LABEL_REPEATED || !*quantity(m, f)) continue;
        *list_of(m, f) = take(r, *quantity(m, f) * size_of(f->type));
        if (!*list_of(m, f)) return false;
        *quantity(m, f) = 0;
    }
    return true;
}

static void *next_of(ProtobufCMessage *m, const ProtobufCFieldDescriptor *f) {
    return (char *)*list_of(m, f) + size_of(f->type) * (*quantity(m, f))++;
}

static bool put_repeated(const reader_t *r, const ProtobufCFieldDescriptor *f, const wire_t *w,
                         ProtobufCMessage *m) {
    reader_t packed = {NULL, w->data, w->data + w->n};
    uint64_t number;
    if (!is_packed(f, w)) return put_field(r, f, w, next_of(m, f));
    while (packed.at < packed.end) {
        if (!read_number(&packed, f->type, &number)) return false;
        put_number(number, size_of(f->type), next_of(m, f));
    }
    return true;
}

/* ---- messages -------------------------------------------------------------------------------- */

static bool put_singular(const reader_t *r, const ProtobufCFieldDescriptor *f, const wire_t *w,
                         ProtobufCMessage *m) {
    const bool is_pointer = f->type == PROTOBUF_C_TYPE_STRING || f->type == PROTOBUF_C_TYPE_MESSAGE;
    if (!is_pointer) *(protobuf_c_boolean *)((char *)m + f->quantifier_offset) = 1;
    return put_field(r, f, w, (char *)m + f->offset);
}

static bool fill(const ProtobufCMessageDescriptor *d, reader_t r, ProtobufCMessage *m) {
    while (r.at < r.end) {
        const ProtobufCFieldDescriptor *f;
        wire_t w;
        if (!read_wire(&r, &w) || !find_field(d, &w, &f)) return false;
        if (!f) continue;
        if (f->label == PROTOBUF_C_LABEL_REPEATED ? !put_repeated(&r, f, &w, m)
                                                  : !put_singular(&r, f, &w, m))
            return false;
    }
    return true;
}

static ProtobufCMessage *unpack(const ProtobufCMessageDescriptor *d, const reader_t *from) {
    ProtobufCMessage *m = take(from, d->sizeof_message);
    if (!m) return NULL;
    d->message_init(m);
    return count_all(d, *from, m) && take_lists(d, from, m) && fill(d, *from, m) ? m : NULL;
}

/* Memory of a failure stays the allocator's: the importer's is an arena. */
ProtobufCMessage *protobuf_c_message_unpack(const ProtobufCMessageDescriptor *d,
                                            ProtobufCAllocator *allocator, size_t n,
                                            const uint8_t *data) {
    const reader_t r = {allocator, data, data + n};
    return unpack(d, &r);
}

/* Fields are sorted by number. */
const ProtobufCFieldDescriptor *
protobuf_c_message_descriptor_get_field(const ProtobufCMessageDescriptor *d, unsigned id) {
    unsigned from = 0, to = d->n_fields;
    while (from < to) {
        const unsigned middle = from + (to - from) / 2;
        if (d->fields[middle].id == id) return &d->fields[middle];
        if (d->fields[middle].id < id)
            from = middle + 1;
        else
            to = middle;
    }
    return NULL;
}
