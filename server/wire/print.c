/* See print.h. */
#include "server/wire/print.h"

#include <inttypes.h>
#include <math.h>

int64_t reply_number(const msgpack_object *map, const char *key) {
    const msgpack_object *value = wire_in(map, key);
    bool fits =
        value && value->type == MSGPACK_OBJECT_POSITIVE_INTEGER && value->via.u64 <= INT64_MAX / 4;
    return fits ? (int64_t)value->via.u64 : 0;
}

const char *reply_text(const msgpack_object *map, const char *key, char *buffer, size_t bytes) {
    const msgpack_object *value = wire_in(map, key);
    bool is_text = value && value->type == MSGPACK_OBJECT_STR;
    snprintf(buffer, bytes, "%.*s", is_text ? (int)value->via.str.size : 1,
             is_text ? value->via.str.ptr : "?");
    return buffer;
}

const char *print_amount(int64_t bytes, char buffer[PRINT_BYTES]) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = (double)bytes;
    int unit = 0;
    for (; value >= 1024 && unit < 4; unit++)
        value /= 1024;
    snprintf(buffer, PRINT_BYTES, unit ? "%.1f %s" : "%.0f %s", value, units[unit]);
    return buffer;
}

const char *print_duration(int64_t ms, char buffer[PRINT_BYTES]) {
    if (ms < 10000)
        snprintf(buffer, PRINT_BYTES, "%.1f s", (double)ms / 1000);
    else if (ms < 600000)
        snprintf(buffer, PRINT_BYTES, "%" PRId64 " s", ms / 1000);
    else
        snprintf(buffer, PRINT_BYTES, "%" PRId64 " min", ms / 60000);
    return buffer;
}

/* 0 where an older daemon does not say it. */
double reply_real(const msgpack_object *map, const char *key) {
    const msgpack_object *value = wire_in(map, key);
    return value && value->type == MSGPACK_OBJECT_FLOAT64 ? value->via.f64 : 0;
}

/* JSON has texts alone. */
static void print_key(FILE *out, const msgpack_object *key) {
    const bool is_text = key->type == MSGPACK_OBJECT_STR;
    if (!is_text) fputc('"', out);
    print_json(out, key);
    if (!is_text) fputc('"', out);
}

/* Nesting is bounded by the scanner. */
void print_pairs(FILE *out, const msgpack_object *o) {
    for (uint32_t i = 0; i < o->via.map.size; i++) {
        if (i) fputs(", ", out);
        print_key(out, &o->via.map.ptr[i].key);
        fputs(": ", out);
        print_json(out, &o->via.map.ptr[i].val);
    }
}

void print_json(FILE *out, const msgpack_object *o) {
    switch (o->type) {
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
        fprintf(out, "%" PRIu64, o->via.u64);
        break;
    case MSGPACK_OBJECT_NEGATIVE_INTEGER:
        fprintf(out, "%" PRId64, o->via.i64);
        break;
    case MSGPACK_OBJECT_BOOLEAN:
        fputs(o->via.boolean ? "true" : "false", out);
        break;
    case MSGPACK_OBJECT_FLOAT32:
    case MSGPACK_OBJECT_FLOAT64:
        fprintf(out, isfinite(o->via.f64) ? "%.17g" : "null", o->via.f64);
        break;
    case MSGPACK_OBJECT_STR:
        fputc('"', out);
        for (uint32_t i = 0; i < o->via.str.size; i++) {
            unsigned char c = (unsigned char)o->via.str.ptr[i];
            if (c < 0x20 || c == '"' || c == '\\')
                fprintf(out, "\\u%04x", c);
            else
                fputc(c, out);
        }
        fputc('"', out);
        break;
    case MSGPACK_OBJECT_ARRAY:
        fputc('[', out);
        for (int i = 0; i < wire_count(o); i++) {
            if (i) fputs(", ", out);
            print_json(out, wire_at(o, i));
        }
        fputc(']', out);
        break;
    case MSGPACK_OBJECT_MAP:
        fputc('{', out);
        print_pairs(out, o);
        fputc('}', out);
        break;
    default:
        fputs("null", out);
    }
}
