/* Encoding of replies: msgpack in its shortest forms, into one growing buffer. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/wire/version.h"
#include "server/wire/wire.h"

#define MAP16_BYTES 3 /* 0xde and the number of pairs, patched by wire_end */

static uint8_t *grow(wire_out_t *out, size_t bytes) {
    if (out->failed) return NULL;
    if (bytes > out->capacity - out->bytes) {
        size_t capacity = out->capacity ? out->capacity : 256;
        while (capacity < out->bytes + bytes)
            capacity *= 2;
        uint8_t *data = realloc(out->data, capacity);
        if (!data) {
            out->failed = true;
            return NULL;
        }
        out->data = data;
        out->capacity = capacity;
    }
    uint8_t *p = out->data + out->bytes;
    out->bytes += bytes;
    return p;
}

/* One head byte and a big-endian number of n bytes. */
static void put_head(wire_out_t *out, uint8_t head, uint64_t value, int n) {
    uint8_t *p = grow(out, (size_t)n + 1);
    if (!p) return;
    *p++ = head;
    for (int i = n - 1; i >= 0; i--)
        *p++ = (uint8_t)(value >> (8 * i));
}

static void put_raw(wire_out_t *out, const void *data, size_t bytes) {
    uint8_t *p = grow(out, bytes);
    if (p && bytes) memcpy(p, data, bytes);
}

void wire_out_finish(wire_out_t *out) {
    if (!out) return;
    free(out->data);
    *out = (wire_out_t){0};
}

void wire_begin(wire_out_t *out) {
    out->bytes = 0;
    out->pairs = 0;
    put_head(out, 0xde, 0, 2);
}

void wire_end(wire_out_t *out) {
    if (out->failed || out->bytes < MAP16_BYTES) return;
    out->data[1] = (uint8_t)(out->pairs >> 8);
    out->data[2] = (uint8_t)out->pairs;
}

void wire_key(wire_out_t *out, const char *key) {
    out->pairs++;
    wire_put_text(out, key);
}

void wire_put_u64(wire_out_t *out, uint64_t v) {
    if (v < 0x80)
        put_head(out, (uint8_t)v, 0, 0);
    else if (v <= UINT8_MAX)
        put_head(out, 0xcc, v, 1);
    else if (v <= UINT16_MAX)
        put_head(out, 0xcd, v, 2);
    else if (v <= UINT32_MAX)
        put_head(out, 0xce, v, 4);
    else
        put_head(out, 0xcf, v, 8);
}

void wire_put_i64(wire_out_t *out, int64_t v) {
    if (v >= 0)
        wire_put_u64(out, (uint64_t)v);
    else if (v >= -32)
        put_head(out, (uint8_t)(0x100 + v), 0, 0);
    else
        put_head(out, 0xd3, (uint64_t)v, 8);
}

void wire_put_f64(wire_out_t *out, double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    put_head(out, 0xcb, bits, 8);
}

/* Bytes of the character at p; 0 if there is none in UTF-8 (RFC 3629). */
static size_t character(const uint8_t *p, size_t left) {
    static const uint8_t lowest[5] = {0, 0, 0xc2, 0xe0, 0xf0};
    size_t n = p[0] < 0x80 ? 1 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : 4;
    if (n > left || p[0] < lowest[n] || p[0] > 0xf4) return 0;
    for (size_t i = 1; i < n; i++)
        if ((p[i] & 0xc0) != 0x80) return 0;
    bool overlong = (p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xf0 && p[1] < 0x90);
    bool outside = (p[0] == 0xed && p[1] > 0x9f) || (p[0] == 0xf4 && p[1] > 0x8f);
    return overlong || outside ? 0 : n;
}

/* Clients refuse messages whose texts are not UTF-8. A name may be anything, and may be cut. */
static void mend(uint8_t *text, size_t n) {
    for (size_t i = 0; i < n;) {
        size_t bytes = character(text + i, n - i);
        if (!bytes) text[i] = '?';
        i += bytes ? bytes : 1;
    }
}

void wire_put_text(wire_out_t *out, const char *text) {
    size_t n = strlen(text);
    if (n < 32)
        put_head(out, (uint8_t)(0xa0 | n), 0, 0);
    else if (n <= UINT8_MAX)
        put_head(out, 0xd9, n, 1);
    else
        put_head(out, 0xdb, n, 4);
    put_raw(out, text, n);
    if (!out->failed) mend(out->data + out->bytes - n, n);
}

void wire_put_bytes(wire_out_t *out, const void *data, size_t bytes) {
    put_head(out, bytes <= UINT8_MAX ? 0xc4 : 0xc6, bytes, bytes <= UINT8_MAX ? 1 : 4);
    put_raw(out, data, bytes);
}

void wire_put_nil(wire_out_t *out) {
    put_head(out, 0xc0, 0, 0);
}

void wire_put_list(wire_out_t *out, uint32_t n) {
    if (n < 16)
        put_head(out, (uint8_t)(0x90 | n), 0, 0);
    else
        put_head(out, 0xdd, n, 4);
}

void wire_put_map(wire_out_t *out, uint32_t n) {
    if (n < 16)
        put_head(out, (uint8_t)(0x80 | n), 0, 0);
    else
        put_head(out, 0xdf, n, 4);
}

void wire_put_types(wire_out_t *out, const gradd_type_t *types, int n) {
    wire_put_map(out, 2);
    wire_put_text(out, "dtypes");
    wire_put_list(out, (uint32_t)n);
    for (int i = 0; i < n; i++)
        wire_put_u64(out, (uint64_t)types[i].dtype);
    wire_put_text(out, "dims");
    wire_put_list(out, (uint32_t)n);
    for (int i = 0; i < n; i++)
        wire_put_dims(out, &types[i]);
}

void wire_put_dims(wire_out_t *out, const gradd_type_t *type) {
    wire_put_list(out, (uint32_t)type->rank);
    for (int i = 0; i < type->rank; i++)
        wire_put_i64(out, type->dims[i]);
}

void wire_put_version(wire_out_t *out) {
    wire_key(out, "proto");
    wire_put_list(out, 2);
    wire_put_u64(out, PROTOCOL_LOWEST);
    wire_put_u64(out, PROTOCOL_HIGHEST);
    wire_key(out, "version");
    wire_put_text(out, GRADD_VERSION);
}

void wire_reply_begin(wire_out_t *out, uint64_t q) {
    wire_begin(out);
    wire_key(out, "ok");
    wire_put_u64(out, 1);
    wire_key(out, "q");
    wire_put_u64(out, q);
}

static void put_what(wire_out_t *out, const char *verb, const char *what) {
    char text[GRADD_ERROR_BYTES + WIRE_MAX_VERB + 2];
    size_t n = verb ? strlen(verb) : 0;
    if (!verb || (!strncmp(what, verb, n) && what[n] == ':')) {
        wire_put_text(out, what);
        return;
    }
    snprintf(text, sizeof text, "%s: %s", verb, what);
    wire_put_text(out, text);
}

void wire_reply_fail(wire_out_t *out, uint64_t q, gradd_status_t status, const char *verb,
                     const char *what, const char *session) {
    wire_begin(out);
    wire_key(out, "ok");
    wire_put_u64(out, 0);
    wire_key(out, "q");
    wire_put_u64(out, q);
    wire_key(out, "code");
    wire_put_text(out, gradd_status_name(status));
    wire_key(out, "what");
    put_what(out, verb, what);
    if (status == GRADD_E_VERSION) wire_put_version(out);
    if (session) {
        wire_key(out, "session");
        wire_put_text(out, session);
    }
    wire_end(out);
}
