/* The scanner that stands before msgpack-c: one pass over the bytes, no recursion, no allocation.
 *
 * msgpack-c reserves memory from counts that a message merely claims (5 bytes can ask for 16 GiB),
 * so counts are compared with the bytes that are really there first: every object takes at least
 * one byte.
 */
#include <string.h>

#include "server/wire/wire.h"

#define STACK 32

typedef struct scan_s {
    const uint8_t *p, *end;
    uint64_t left[STACK]; /* objects still to come at each level */
    int depth, max_depth;
    uint32_t items, max_items;
} scan_t;

static gradd_status_t read_be(scan_t *s, int n, uint64_t *out_value) {
    uint64_t v = 0;
    if (s->end - s->p < n) return GRADD_FAIL(LIMIT, "message ends inside a value");
    for (int i = 0; i < n; i++)
        v = v << 8 | *s->p++;
    *out_value = v;
    return GRADD_OK;
}

static gradd_status_t skip(scan_t *s, uint64_t n) {
    if (n > (uint64_t)(s->end - s->p))
        return GRADD_FAIL(LIMIT, "message claims %llu bytes of data where %lld are left",
                          (unsigned long long)n, (long long)(s->end - s->p));
    s->p += n;
    return GRADD_OK;
}

static gradd_status_t enter(scan_t *s, uint64_t n) {
    if (n == 0) return GRADD_OK;
    if (s->depth + 1 >= s->max_depth)
        return GRADD_FAIL(LIMIT, "message nests deeper than %d levels", s->max_depth);
    if (n > (uint64_t)(s->end - s->p))
        return GRADD_FAIL(LIMIT, "message claims %llu entries where %lld bytes are left",
                          (unsigned long long)n, (long long)(s->end - s->p));
    s->left[++s->depth] = n;
    return GRADD_OK;
}

static gradd_status_t sized(scan_t *s, int size_bytes, int unit, bool container) {
    uint64_t n = 0;
    GRADD_TRY(read_be(s, size_bytes, &n));
    return container ? enter(s, n * (uint64_t)unit) : skip(s, n);
}

static gradd_status_t one_object(scan_t *s) {
    uint8_t c = *s->p++;
    if (c <= 0x7f || c >= 0xe0) return GRADD_OK; /* small integers */
    if (c <= 0x8f) return enter(s, 2u * (c & 15));
    if (c <= 0x9f) return enter(s, c & 15);
    if (c <= 0xbf) return skip(s, c & 31);
    switch (c) {
    case 0xc0: /* nil */
    case 0xc2: /* false */
    case 0xc3: /* true */
        return GRADD_OK;
    case 0xc4: /* bin */
    case 0xc5:
    case 0xc6:
        return sized(s, 1 << (c - 0xc4), 1, false);
    case 0xca: /* float */
        return skip(s, 4);
    case 0xcb:
        return skip(s, 8);
    case 0xcc: /* unsigned */
    case 0xcd:
    case 0xce:
    case 0xcf:
        return skip(s, 1u << (c - 0xcc));
    case 0xd0: /* signed */
    case 0xd1:
    case 0xd2:
    case 0xd3:
        return skip(s, 1u << (c - 0xd0));
    case 0xd9: /* text */
    case 0xda:
    case 0xdb:
        return sized(s, 1 << (c - 0xd9), 1, false);
    case 0xdc: /* list */
    case 0xdd:
        return sized(s, 2 << (c - 0xdc), 1, true);
    case 0xde: /* map */
    case 0xdf:
        return sized(s, 2 << (c - 0xde), 2, true);
    default:
        return GRADD_FAIL(LIMIT, "message holds a value of kind 0x%02x, which gradd does not use",
                          c);
    }
}

gradd_status_t wire_scan(const void *data, size_t bytes, int max_depth, uint32_t max_items) {
    scan_t s = {.p = data, .end = (const uint8_t *)data + bytes, .max_items = max_items};
    s.max_depth = max_depth < STACK ? max_depth : STACK;
    s.left[0] = 1;
    while (s.depth >= 0) {
        if (s.left[s.depth] == 0) {
            s.depth--;
            continue;
        }
        s.left[s.depth]--;
        if (s.p == s.end) return GRADD_FAIL(LIMIT, "message ends before its last value");
        if (++s.items > max_items)
            return GRADD_FAIL(LIMIT, "message holds more than %u values", max_items);
        GRADD_TRY(one_object(&s));
    }
    if (s.p != s.end)
        return GRADD_FAIL(LIMIT, "%lld bytes after the message", (long long)(s.end - s.p));
    return GRADD_OK;
}

/* One object with all that is in it, from the top level on. */
static gradd_status_t whole_object(scan_t *s) {
    const int level = s->depth;
    s->left[level]--;
    GRADD_TRY(one_object(s));
    while (s->depth > level) {
        if (s->left[s->depth] == 0) {
            s->depth--;
            continue;
        }
        s->left[s->depth]--;
        GRADD_TRY(one_object(s));
    }
    return GRADD_OK;
}

static uint64_t number_at(const uint8_t *p, const uint8_t *end) {
    scan_t s = {.p = p + 1, .end = end};
    uint64_t value = 0;
    if (*p <= 0x7f) return *p;
    if (*p < 0xcc || *p > 0xcf) return 0;
    return read_be(&s, 1 << (*p - 0xcc), &value) == GRADD_OK ? value : 0;
}

uint64_t wire_scan_number(const void *data, size_t bytes, const char *key) {
    scan_t s = {.p = data, .end = (const uint8_t *)data + bytes, .max_depth = STACK};
    const size_t n = strlen(key);
    if (bytes == 0 || one_object(&s) != GRADD_OK) return 0;
    while (s.depth == 1 && s.left[1] > 1) {
        const uint8_t *name = s.p;
        if (whole_object(&s) != GRADD_OK) return 0;
        const uint8_t *value = s.p;
        if (whole_object(&s) != GRADD_OK) return 0;
        if (*name == (0xa0 | n) && memcmp(name + 1, key, n) == 0) return number_at(value, s.end);
    }
    return 0;
}
