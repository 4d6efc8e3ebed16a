/* Checks of a message's fields against what a verb expects. See wire.h. */
#include <stdio.h>
#include <string.h>

#include "server/wire/wire.h"

#define PATH 128 /* of the name of a field in an error */

#define COLUMN(key, of) {.name = key, .kind = WIRE_LIST, .item = of}

const wire_field_t wire_tensor_keys[] = {
    {.name = "segment", .kind = WIRE_U64},
    {.name = "offset", .kind = WIRE_U64},
    {.name = "dtype", .kind = WIRE_U64},
    {.name = "dims", .kind = WIRE_DIMS},
    {0},
};
const wire_field_t wire_tensors_keys[] = {
    COLUMN("segments", WIRE_U64),
    COLUMN("offsets", WIRE_U64),
    COLUMN("dtypes", WIRE_U64),
    COLUMN("dims", WIRE_DIMS),
    {0},
};
const wire_field_t wire_placed_keys[] = {
    COLUMN("segments", WIRE_U64),
    COLUMN("offsets", WIRE_U64),
    COLUMN("dtypes", WIRE_U64),
    COLUMN("dims", WIRE_DIMS),
    {.name = "at", .kind = WIRE_LIST, .item = WIRE_U64, .optional = true},
    {0},
};
const wire_field_t wire_types_keys[] = {
    COLUMN("dtypes", WIRE_U64),
    COLUMN("dims", WIRE_DIMS),
    {0},
};

static const char *kind_text(wire_kind_t kind) {
    switch (kind) {
    case WIRE_U64:
        return "an unsigned integer";
    case WIRE_F64:
        return "a number";
    case WIRE_TEXT:
        return "a text";
    case WIRE_BYTES:
        return "bytes";
    case WIRE_INDEX:
        return "a position or a name";
    case WIRE_LIST:
        return "a list";
    case WIRE_FLAG:
        return "a boolean";
    case WIRE_DIMS:
        return "a list of at most 8 sizes";
    case WIRE_MAP:
    case WIRE_TABLE:
        return "a map";
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

static bool is_number(const msgpack_object *o) {
    return is_u64(o) || o->type == MSGPACK_OBJECT_NEGATIVE_INTEGER ||
           o->type == MSGPACK_OBJECT_FLOAT32 || o->type == MSGPACK_OBJECT_FLOAT64;
}

static bool is_dims(const msgpack_object *o) {
    if (o->type != MSGPACK_OBJECT_ARRAY || o->via.array.size > GRADD_MAX_RANK) return false;
    for (uint32_t i = 0; i < o->via.array.size; i++)
        if (!is_u64(&o->via.array.ptr[i]) || o->via.array.ptr[i].via.u64 > INT64_MAX) return false;
    return true;
}

static bool has_kind(const msgpack_object *o, wire_kind_t kind) {
    switch (kind) {
    case WIRE_U64:
        return is_u64(o);
    case WIRE_F64:
        return is_number(o);
    case WIRE_TEXT:
        return o->type == MSGPACK_OBJECT_STR;
    case WIRE_BYTES:
        return o->type == MSGPACK_OBJECT_BIN;
    case WIRE_INDEX:
        return is_u64(o) || o->type == MSGPACK_OBJECT_STR;
    case WIRE_LIST:
        return o->type == MSGPACK_OBJECT_ARRAY;
    case WIRE_FLAG:
        return o->type == MSGPACK_OBJECT_BOOLEAN || (is_u64(o) && o->via.u64 <= 1);
    case WIRE_DIMS:
        return is_dims(o);
    case WIRE_MAP:
    case WIRE_TABLE:
        return o->type == MSGPACK_OBJECT_MAP;
    default:
        return true;
    }
}

/* Where a field is, for messages: in the verb's own map, or in the map of one of its fields. */
typedef struct match_scope_s {
    const char *verb, *outer; /* NULL: the verb's */
} match_scope_t;

/* "in.offsets" */
static const char *path(const match_scope_t *scope, const char *name, char buffer[PATH]) {
    snprintf(buffer, PATH, "%s%s%s", scope->outer ? scope->outer : "", scope->outer ? "." : "",
             name);
    return buffer;
}

static gradd_status_t check_list(const msgpack_object *o, const match_scope_t *scope,
                                 const wire_field_t *field) {
    char name[PATH];
    if (field->max && o->via.array.size > field->max)
        return GRADD_FAIL(LIMIT, "%s: field '%s' has %u entries, more than %u", scope->verb,
                          path(scope, field->name, name), o->via.array.size, field->max);
    if (field->item == WIRE_NONE) return GRADD_OK;
    for (uint32_t i = 0; i < o->via.array.size; i++)
        if (!has_kind(&o->via.array.ptr[i], field->item))
            return GRADD_FAIL(TENSOR, "%s: field '%s[%u]': expected %s, got %s", scope->verb,
                              path(scope, field->name, name), i, kind_text(field->item),
                              found_text(&o->via.array.ptr[i]));
    return GRADD_OK;
}

static gradd_status_t check_sized(const msgpack_object *o, const match_scope_t *scope,
                                  const wire_field_t *field) {
    char name[PATH];
    uint32_t size = field->kind == WIRE_TEXT ? o->via.str.size : o->via.bin.size;
    if (!field->max || size <= field->max) return GRADD_OK;
    return GRADD_FAIL(LIMIT, "%s: field '%s' has %u bytes, more than %u", scope->verb,
                      path(scope, field->name, name), size, field->max);
}

static gradd_status_t check_map(const msgpack_object *o, const match_scope_t *scope,
                                const wire_field_t *field);

static gradd_status_t check_field(const msgpack_object *o, const match_scope_t *scope,
                                  const wire_field_t *field) {
    char name[PATH];
    if (!has_kind(o, field->kind))
        return GRADD_FAIL(TENSOR, "%s: field '%s': expected %s, got %s", scope->verb,
                          path(scope, field->name, name), kind_text(field->kind), found_text(o));
    if (field->kind == WIRE_LIST) return check_list(o, scope, field);
    if (field->kind == WIRE_TEXT || field->kind == WIRE_BYTES) return check_sized(o, scope, field);
    if (field->kind == WIRE_MAP || field->kind == WIRE_TABLE) return check_map(o, scope, field);
    return GRADD_OK;
}

/* A value of the map, or NULL for an optional one that is not there. */
static gradd_status_t match_one(const msgpack_object *o, const match_scope_t *scope,
                                const wire_field_t *field, const msgpack_object **out_value) {
    char name[PATH];
    *out_value = NULL;
    if (o && o->type == MSGPACK_OBJECT_NIL && field->optional) o = NULL;
    if (!o && field->optional) return GRADD_OK;
    if (!o)
        return GRADD_FAIL(TENSOR, "%s: field '%s' is missing, expected %s", scope->verb,
                          path(scope, field->name, name), kind_text(field->kind));
    GRADD_TRY(check_field(o, scope, field));
    *out_value = o;
    return GRADD_OK;
}

static bool is_named(const msgpack_object *key, const char *name) {
    return key->type == MSGPACK_OBJECT_STR && key->via.str.size == strlen(name) &&
           memcmp(key->via.str.ptr, name, key->via.str.size) == 0;
}

/* Always fails. The known ones end at n, or at the first without a name. */
static gradd_status_t unknown(const match_scope_t *scope, const msgpack_object_str *key,
                              const wire_field_t *known, int n) {
    char name[PATH], text[64], all[512] = "";
    size_t at = 0;
    snprintf(text, sizeof text, "%.*s", key->size < 60 ? (int)key->size : 60, key->ptr);
    for (int k = 0; k < n && known[k].name && at < sizeof all; k++)
        at += (size_t)snprintf(all + at, sizeof all - at, "%s%s", k ? ", " : "", known[k].name);
    return GRADD_FAIL(UNSUPPORTED, "%s: unknown field '%s' (known: %s)", scope->verb,
                      path(scope, text, name), all[0] ? all : "none");
}

/* Every key of a map is one of the field's, and comes once. */
static gradd_status_t check_keys(const msgpack_object *map, const match_scope_t *inside,
                                 const wire_field_t *keys) {
    uint32_t seen = 0;
    for (uint32_t i = 0; i < map->via.map.size; i++) {
        const msgpack_object *key = &map->via.map.ptr[i].key;
        int k = 0;
        while (k < WIRE_MAX_KEYS && keys[k].name && !is_named(key, keys[k].name))
            k++;
        if (key->type != MSGPACK_OBJECT_STR)
            return GRADD_FAIL(TENSOR, "%s: field '%s': a key is %s, not a text", inside->verb,
                              inside->outer, found_text(key));
        if (k == WIRE_MAX_KEYS || !keys[k].name)
            return unknown(inside, &key->via.str, keys, WIRE_MAX_KEYS);
        if (seen & 1u << k)
            return GRADD_FAIL(TENSOR, "%s: field '%s.%s' comes twice", inside->verb, inside->outer,
                              keys[k].name);
        seen |= 1u << k;
    }
    return GRADD_OK;
}

static gradd_status_t check_map(const msgpack_object *o, const match_scope_t *scope,
                                const wire_field_t *field) {
    const match_scope_t inside = {scope->verb, field->name};
    const msgpack_object *value;
    const char *first = NULL;
    uint32_t rows = 0;
    GRADD_TRY(check_keys(o, &inside, field->keys));
    for (int k = 0; k < WIRE_MAX_KEYS && field->keys[k].name; k++) {
        const wire_field_t *key = &field->keys[k];
        const msgpack_object *found = wire_in(o, key->name);
        GRADD_TRY(match_one(found, &inside, key, &value));
        if (!value || field->kind != WIRE_TABLE) continue;
        if (first && value->via.array.size != rows)
            return GRADD_FAIL(TENSOR, "%s: field '%s': %u %s, but %u %s", scope->verb, field->name,
                              rows, first, value->via.array.size, key->name);
        first = key->name;
        rows = value->via.array.size;
    }
    return GRADD_OK;
}

static bool is_known(const msgpack_object *key, const wire_field_t *fields, int n_fields,
                     const char *const *envelope) {
    for (int i = 0; i < n_fields; i++)
        if (is_named(key, fields[i].name)) return true;
    for (; *envelope; envelope++)
        if (is_named(key, *envelope)) return true;
    return false;
}

gradd_status_t wire_check_known(const wire_doc_t *doc, const char *verb, const wire_field_t *fields,
                                int n_fields, const char *const *envelope) {
    const match_scope_t scope = {verb, NULL};
    const msgpack_object_map *map = &doc->root.via.map;
    for (uint32_t i = 0; i < map->size; i++)
        if (!is_known(&map->ptr[i].key, fields, n_fields, envelope))
            return unknown(&scope, &map->ptr[i].key.via.str, fields, n_fields);
    return GRADD_OK;
}

gradd_status_t wire_match_map(const msgpack_object *map, const char *verb,
                              const wire_field_t *fields, int n_fields,
                              const msgpack_object **out_values) {
    const match_scope_t scope = {verb, NULL};
    for (int i = 0; i < n_fields; i++)
        GRADD_TRY(match_one(wire_find(map, fields[i].name), &scope, &fields[i], &out_values[i]));
    return GRADD_OK;
}

gradd_status_t wire_match(const wire_doc_t *doc, const char *verb, const wire_field_t *fields,
                          int n_fields, const msgpack_object **out_values) {
    return wire_match_map(&doc->root, verb, fields, n_fields, out_values);
}

gradd_status_t wire_check_table(const msgpack_object *o, const char *verb, const char *name,
                                const wire_field_t *keys) {
    const match_scope_t scope = {verb, NULL};
    return check_field(o, &scope, &(wire_field_t){.name = name, .kind = WIRE_TABLE, .keys = keys});
}
