/* Decoding of messages and their values. Fields are checked in wire_match.c, replies encoded in
 * wire_out.c; the scanner is wire_scan.c. */
#include "server/wire/wire.h"

#include <string.h>

#define MAX_KEY 32

static gradd_status_t unpack(const void *data, size_t bytes, wire_doc_t *doc) {
    size_t offset = 0;
    *doc = (wire_doc_t){0};
    if (!msgpack_zone_init(&doc->zone, 2048)) return GRADD_FAIL(NOMEM, "no memory for a message");
    doc->decoded = true;
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
    GRADD_TRY(wire_scan(data, bytes, WIRE_ANY_DEPTH, max_items));
    return unpack(data, bytes, out_doc);
}

void wire_doc_finish(wire_doc_t *doc) {
    if (!doc || !doc->decoded) return;
    msgpack_zone_destroy(&doc->zone);
    *doc = (wire_doc_t){0};
}

const msgpack_object *wire_find(const msgpack_object *map, const char *key) {
    size_t n = strlen(key);
    if (map->type != MSGPACK_OBJECT_MAP) return NULL;
    for (uint32_t i = 0; i < map->via.map.size; i++) {
        const msgpack_object_kv *pair = &map->via.map.ptr[i];
        if (pair->key.type == MSGPACK_OBJECT_STR && pair->key.via.str.size == n &&
            memcmp(pair->key.via.str.ptr, key, n) == 0)
            return &pair->val;
    }
    return NULL;
}

const msgpack_object *wire_get(const wire_doc_t *doc, const char *key) {
    return doc->decoded ? wire_find(&doc->root, key) : NULL;
}

const msgpack_object *wire_in(const msgpack_object *map, const char *key) {
    const msgpack_object *value = wire_find(map, key);
    return value && value->type != MSGPACK_OBJECT_NIL ? value : NULL;
}

int wire_rows(const msgpack_object *table) {
    for (uint32_t i = 0; table && i < table->via.map.size; i++)
        if (table->via.map.ptr[i].val.type == MSGPACK_OBJECT_ARRAY)
            return (int)table->via.map.ptr[i].val.via.array.size;
    return 0;
}

uint64_t wire_u64(const msgpack_object *o) {
    return o->via.u64;
}

double wire_f64(const msgpack_object *o) {
    if (o->type == MSGPACK_OBJECT_POSITIVE_INTEGER) return (double)o->via.u64;
    return o->type == MSGPACK_OBJECT_NEGATIVE_INTEGER ? (double)o->via.i64 : o->via.f64;
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

/* ---- tensors and types ---- */

gradd_status_t wire_type(const msgpack_object *dtype, const msgpack_object *dims,
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

wire_tensors_t wire_tensors(const msgpack_object *table) {
    if (!table) return (wire_tensors_t){0};
    return (wire_tensors_t){.at = wire_in(table, "at"),
                            .segments = wire_in(table, "segments"),
                            .offsets = wire_in(table, "offsets"),
                            .dtypes = wire_in(table, "dtypes"),
                            .dims = wire_in(table, "dims"),
                            .n = wire_rows(table)};
}

gradd_status_t wire_type_at(const wire_tensors_t *types, int i, gradd_type_t *out_type) {
    return wire_type(wire_at(types->dtypes, i), wire_at(types->dims, i), out_type);
}

gradd_status_t wire_tensor_at(const wire_tensors_t *tensors, int i, gradd_tensor_t *out_tensor) {
    gradd_tensor_t tensor = {.segment = wire_u64(wire_at(tensors->segments, i)),
                             .offset = wire_u64(wire_at(tensors->offsets, i))};
    GRADD_TRY(wire_type_at(tensors, i, &tensor.type));
    *out_tensor = tensor;
    return GRADD_OK;
}

gradd_status_t wire_tensor(const msgpack_object *o, gradd_tensor_t *out_tensor) {
    gradd_tensor_t tensor = {.segment = wire_u64(wire_in(o, "segment")),
                             .offset = wire_u64(wire_in(o, "offset"))};
    GRADD_TRY(wire_type(wire_in(o, "dtype"), wire_in(o, "dims"), &tensor.type));
    *out_tensor = tensor;
    return GRADD_OK;
}
