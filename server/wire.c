/* Decoding and checking of messages. Encoding is in wire_out.c, the scanner in wire_scan.c. */
#include "server/wire.h"

#include <string.h>

#define MAX_KEY 32

static gradd_status_t unpack(const void *data, size_t bytes, wire_doc_t *doc) {
    size_t offset = 0;
    *doc = (wire_doc_t){0};
    if (!msgpack_zone_init(&doc->zone, 2048)) return GRADD_FAIL(NOMEM, "no memory for a message");
    doc->live = true;
    msgpack_unpack_return rc = msgpack_unpack(data, bytes, &offset, &doc->zone, &doc->root);
    if (rc == MSGPACK_UNPACK_SUCCESS) return GRADD_OK;
    wire_doc_finish(doc);
    return rc == MSGPACK_UNPACK_NOMEM_ERROR ? GRADD_FAIL(NOMEM, "no memory for a message")
                                            : GRADD_FAIL(LIMIT, "message is not msgpack");
}

static gradd_status_t check_keys(const msgpack_object *root) {
    if (root->type != MSGPACK_OBJECT_MAP) return GRADD_FAIL(LIMIT, "message is not a map");
    const msgpack_object_map *map = &root->via.map;
    if (map->size > WIRE_MAX_FIELDS)
        return GRADD_FAIL(LIMIT, "message has %u fields, more than %d", map->size, WIRE_MAX_FIELDS);
    for (uint32_t i = 0; i < map->size; i++) {
        const msgpack_object *key = &map->ptr[i].key;
        if (key->type != MSGPACK_OBJECT_STR || key->via.str.size > MAX_KEY)
            return GRADD_FAIL(LIMIT, "field %u is not named by a text of at most %d bytes", i,
                              MAX_KEY);
        for (uint32_t k = 0; k < i; k++) {
            const msgpack_object_str *other = &map->ptr[k].key.via.str;
            if (other->size == key->via.str.size &&
                memcmp(other->ptr, key->via.str.ptr, other->size) == 0)
                return GRADD_FAIL(LIMIT, "field '%.*s' comes twice", (int)other->size, other->ptr);
        }
    }
    return GRADD_OK;
}

gradd_status_t wire_decode(const void *data, size_t bytes, wire_doc_t *out_doc) {
    *out_doc = (wire_doc_t){0};
    if (bytes > WIRE_MAX_BYTES)
        return GRADD_FAIL(LIMIT, "message has %zu bytes, more than %u", bytes, WIRE_MAX_BYTES);
    GRADD_TRY(wire_scan(data, bytes, WIRE_MAX_DEPTH, WIRE_MAX_ITEMS));
    GRADD_TRY(unpack(data, bytes, out_doc));
    gradd_status_t st = check_keys(&out_doc->root);
    if (st != GRADD_OK) wire_doc_finish(out_doc);
    return st;
}

gradd_status_t wire_decode_any(const void *data, size_t bytes, uint32_t max_items,
                               wire_doc_t *out_doc) {
    *out_doc = (wire_doc_t){0};
    GRADD_TRY(wire_scan(data, bytes, WIRE_MAX_DEPTH, max_items));
    return unpack(data, bytes, out_doc);
}

void wire_doc_finish(wire_doc_t *doc) {
    if (!doc || !doc->live) return;
    msgpack_zone_destroy(&doc->zone);
    *doc = (wire_doc_t){0};
}

const msgpack_object *wire_get(const wire_doc_t *doc, const char *key) {
    size_t n = strlen(key);
    if (!doc->live || doc->root.type != MSGPACK_OBJECT_MAP) return NULL;
    for (uint32_t i = 0; i < doc->root.via.map.size; i++) {
        const msgpack_object_kv *pair = &doc->root.via.map.ptr[i];
        if (pair->key.via.str.size == n && memcmp(pair->key.via.str.ptr, key, n) == 0)
            return &pair->val;
    }
    return NULL;
}

/* ---- fields ---- */

static const char *kind_text(wire_kind_t kind) {
    switch (kind) {
    case WIRE_U64:
        return "an unsigned integer";
    case WIRE_TEXT:
        return "a text";
    case WIRE_BYTES:
        return "bytes";
    case WIRE_TENSOR:
        return "a tensor [segment, offset, dtype, [dims...]]";
    case WIRE_TENSOR_OR_NIL:
        return "a tensor [segment, offset, dtype, [dims...]] or nil";
    case WIRE_TYPE:
        return "a type [dtype, [dims...]]";
    case WIRE_INDEX:
        return "a position or a name";
    case WIRE_LIST:
        return "a list";
    case WIRE_PLACED:
        return "a pair [position, tensor]";
    case WIRE_FLAG:
        return "a boolean";
    default:
        return "something else";
    }
}

static const char *found_text(const msgpack_object *o) {
    switch (o->type) {
    case MSGPACK_OBJECT_NIL:
        return "nil";
    case MSGPACK_OBJECT_BOOLEAN:
        return "a boolean";
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
        return "an unsigned integer";
    case MSGPACK_OBJECT_NEGATIVE_INTEGER:
        return "a negative integer";
    case MSGPACK_OBJECT_FLOAT32:
    case MSGPACK_OBJECT_FLOAT64:
        return "a float";
    case MSGPACK_OBJECT_STR:
        return "a text";
    case MSGPACK_OBJECT_BIN:
        return "bytes";
    case MSGPACK_OBJECT_ARRAY:
        return "a list of another form";
    case MSGPACK_OBJECT_MAP:
        return "a map";
    default:
        return "something else";
    }
}

static bool is_u64(const msgpack_object *o) {
    return o->type == MSGPACK_OBJECT_POSITIVE_INTEGER;
}

static bool is_dims(const msgpack_object *o) {
    if (o->type != MSGPACK_OBJECT_ARRAY || o->via.array.size > GRADD_MAX_RANK) return false;
    for (uint32_t i = 0; i < o->via.array.size; i++)
        if (!is_u64(&o->via.array.ptr[i]) || o->via.array.ptr[i].via.u64 > INT64_MAX) return false;
    return true;
}

static bool is_type(const msgpack_object *o) {
    return o->type == MSGPACK_OBJECT_ARRAY && o->via.array.size == 2 &&
           is_u64(&o->via.array.ptr[0]) && is_dims(&o->via.array.ptr[1]);
}

static bool is_tensor(const msgpack_object *o) {
    const msgpack_object *p = o->via.array.ptr;
    return o->type == MSGPACK_OBJECT_ARRAY && o->via.array.size == 4 && is_u64(&p[0]) &&
           is_u64(&p[1]) && is_u64(&p[2]) && is_dims(&p[3]);
}

static bool has_kind(const msgpack_object *o, wire_kind_t kind) {
    switch (kind) {
    case WIRE_U64:
        return is_u64(o);
    case WIRE_TEXT:
        return o->type == MSGPACK_OBJECT_STR;
    case WIRE_BYTES:
        return o->type == MSGPACK_OBJECT_BIN;
    case WIRE_TENSOR_OR_NIL:
        if (o->type == MSGPACK_OBJECT_NIL) return true;
        return is_tensor(o);
    case WIRE_TENSOR:
        return is_tensor(o);
    case WIRE_TYPE:
        return is_type(o);
    case WIRE_INDEX:
        return is_u64(o) || o->type == MSGPACK_OBJECT_STR;
    case WIRE_LIST:
        return o->type == MSGPACK_OBJECT_ARRAY;
    case WIRE_PLACED:
        return o->type == MSGPACK_OBJECT_ARRAY && o->via.array.size == 2 &&
               is_u64(&o->via.array.ptr[0]) && is_tensor(&o->via.array.ptr[1]);
    case WIRE_FLAG:
        return o->type == MSGPACK_OBJECT_BOOLEAN || (is_u64(o) && o->via.u64 <= 1);
    default:
        return true;
    }
}

static gradd_status_t check_list(const msgpack_object *o, const char *verb,
                                 const wire_field_t *field) {
    if (field->max && o->via.array.size > field->max)
        return GRADD_FAIL(LIMIT, "%s: field '%s' has %u entries, more than %u", verb, field->name,
                          o->via.array.size, field->max);
    if (field->item == WIRE_NONE) return GRADD_OK;
    for (uint32_t i = 0; i < o->via.array.size; i++)
        if (!has_kind(&o->via.array.ptr[i], field->item))
            return GRADD_FAIL(TENSOR, "%s: field '%s[%u]': expected %s, got %s", verb, field->name,
                              i, kind_text(field->item), found_text(&o->via.array.ptr[i]));
    return GRADD_OK;
}

static gradd_status_t check_field(const msgpack_object *o, const char *verb,
                                  const wire_field_t *field) {
    if (!has_kind(o, field->kind))
        return GRADD_FAIL(TENSOR, "%s: field '%s': expected %s, got %s", verb, field->name,
                          kind_text(field->kind), found_text(o));
    if (field->kind == WIRE_LIST) return check_list(o, verb, field);
    bool sized = field->kind == WIRE_TEXT || field->kind == WIRE_BYTES;
    uint32_t size = field->kind == WIRE_TEXT ? o->via.str.size : o->via.bin.size;
    if (sized && field->max && size > field->max)
        return GRADD_FAIL(LIMIT, "%s: field '%s' has %u bytes, more than %u", verb, field->name,
                          size, field->max);
    return GRADD_OK;
}

gradd_status_t wire_match(const wire_doc_t *doc, const char *verb, const wire_field_t *fields,
                          int n_fields, const msgpack_object **out_values) {
    for (int i = 0; i < n_fields; i++) {
        const msgpack_object *o = wire_get(doc, fields[i].name);
        if (o && o->type == MSGPACK_OBJECT_NIL && fields[i].optional) o = NULL;
        out_values[i] = o;
        if (!o && fields[i].optional) continue;
        if (!o)
            return GRADD_FAIL(TENSOR, "%s: field '%s' is missing, expected %s", verb,
                              fields[i].name, kind_text(fields[i].kind));
        GRADD_TRY(check_field(o, verb, &fields[i]));
    }
    return GRADD_OK;
}

uint64_t wire_u64(const msgpack_object *o) {
    return o->via.u64;
}

bool wire_flag(const msgpack_object *o) {
    if (!o) return false;
    return o->type == MSGPACK_OBJECT_BOOLEAN ? o->via.boolean : o->via.u64 != 0;
}

int wire_count(const msgpack_object *list) {
    return list ? (int)list->via.array.size : 0;
}

const msgpack_object *wire_at(const msgpack_object *list, int i) {
    return &list->via.array.ptr[i];
}

static gradd_status_t fill_type(const msgpack_object *dtype, const msgpack_object *dims,
                                gradd_type_t *out_type) {
    gradd_type_t type = {.rank = (int)dims->via.array.size};
    uint64_t code = dtype->via.u64;
    GRADD_TRY(gradd_dtype_check(code < 1000 ? (int64_t)code : -1, &type.dtype));
    for (int i = 0; i < type.rank; i++)
        type.dims[i] = (int64_t)dims->via.array.ptr[i].via.u64;
    GRADD_TRY(gradd_type_check(&type));
    *out_type = type;
    return GRADD_OK;
}

gradd_status_t wire_type(const msgpack_object *o, gradd_type_t *out_type) {
    return fill_type(wire_at(o, 0), wire_at(o, 1), out_type);
}

gradd_status_t wire_tensor(const msgpack_object *o, gradd_tensor_t *out_tensor) {
    gradd_tensor_t tensor = {.segment = wire_u64(wire_at(o, 0)), .offset = wire_u64(wire_at(o, 1))};
    GRADD_TRY(fill_type(wire_at(o, 2), wire_at(o, 3), &tensor.type));
    *out_tensor = tensor;
    return GRADD_OK;
}
