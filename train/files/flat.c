/* See flat.h. Every range check asks whether the rest is large enough, so no sum can wrap. */
#include "train/files/flat.h"

#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "files are little-endian");

enum {
    WORD = 4, /* bytes of an offset */
    HALF = 2, /* of an entry of a vtable */
    HEAD = 8, /* the root's offset and the identifier */
    SHORT = 1024,
};

static bool within(const flat_t *flat, size_t at, size_t bytes) {
    return at <= flat->n && bytes <= flat->n - at;
}

static uint32_t word_at(const flat_t *flat, size_t at) {
    uint32_t word;
    memcpy(&word, flat->bytes + at, sizeof word);
    return word;
}

static uint16_t half_at(const flat_t *flat, size_t at) {
    uint16_t half;
    memcpy(&half, flat->bytes + at, sizeof half);
    return half;
}

/* Counts a part; fails if the parts of the file are together larger than the file. */
static gradd_status_t visit(flat_t *flat, size_t at, size_t bytes) {
    if (bytes > flat->n - flat->visited)
        return GRADD_FAIL(MODEL, "byte %zu: parts of the file are named more than once", at);
    flat->visited += bytes;
    return GRADD_OK;
}

gradd_status_t flat_open(flat_t *flat, const void *bytes, size_t n, const char identifier[4]) {
    *flat = (flat_t){.bytes = bytes, .n = n};
    if (n < HEAD)
        return GRADD_FAIL(MODEL, "a file of %zu bytes is too short to be of kind %.4s", n,
                          identifier);
    if (memcmp(flat->bytes + WORD, identifier, 4) != 0)
        return GRADD_FAIL(MODEL, "the file is not of kind %.4s: bytes 4 to 7 say otherwise",
                          identifier);
    return GRADD_OK;
}

/* The place that the offset at `at` leads to. */
static gradd_status_t follow(const flat_t *flat, size_t at, size_t *out_at) {
    if (!within(flat, at, WORD))
        return GRADD_FAIL(MODEL, "byte %zu: an offset is beyond the end, %zu bytes", at, flat->n);
    const uint32_t distance = word_at(flat, at);
    if (distance < WORD || distance > flat->n - at)
        return GRADD_FAIL(MODEL, "byte %zu: the offset %u leads out of the file, %zu bytes", at,
                          (unsigned)distance, flat->n);
    *out_at = at + distance;
    return GRADD_OK;
}

static gradd_status_t table_at(flat_t *flat, size_t at, flat_table_t *out_table) {
    if (!within(flat, at, WORD))
        return GRADD_FAIL(MODEL, "byte %zu: a table is beyond the end, %zu bytes", at, flat->n);
    /* The distance is signed and subtracted: both places are within the file, or refused. */
    const int64_t vtable = (int64_t)at - (int32_t)word_at(flat, at);
    if (vtable < 0 || !within(flat, (size_t)vtable, 2 * HALF))
        return GRADD_FAIL(MODEL, "byte %zu: a table's list of fields is not in the file", at);
    const size_t list = half_at(flat, (size_t)vtable);
    const size_t bytes = half_at(flat, (size_t)vtable + HALF);
    if (list < 2 * HALF || list % HALF != 0 || !within(flat, (size_t)vtable, list))
        return GRADD_FAIL(MODEL, "byte %zu: a list of fields of %zu bytes", (size_t)vtable, list);
    if (bytes < WORD || !within(flat, at, bytes))
        return GRADD_FAIL(MODEL, "byte %zu: a table of %zu bytes in a file of %zu", at, bytes,
                          flat->n);
    GRADD_TRY(visit(flat, at, bytes));
    *out_table = (flat_table_t){.at = at,
                                .bytes = bytes,
                                .vtable_at = (size_t)vtable + 2 * HALF,
                                .vtable_fields = list / HALF - 2};
    return GRADD_OK;
}

gradd_status_t flat_root(flat_t *flat, flat_table_t *out_table) {
    size_t at = 0;
    GRADD_TRY(follow(flat, 0, &at));
    return table_at(flat, at, out_table);
}

/* Where field `id` of `size` bytes lies; 0 if it is absent. */
static gradd_status_t field(const flat_t *flat, const flat_table_t *table, int id, size_t size,
                            size_t *out_at) {
    *out_at = 0;
    if ((size_t)id >= table->vtable_fields) return GRADD_OK;
    const size_t place = half_at(flat, table->vtable_at + (size_t)id * HALF);
    if (place == 0) return GRADD_OK;
    if (place < WORD || place > table->bytes || size > table->bytes - place)
        return GRADD_FAIL(MODEL, "byte %zu: field %d is not within its table", table->at, id);
    *out_at = table->at + place;
    return GRADD_OK;
}

bool flat_has(const flat_t *flat, const flat_table_t *table, int id) {
    return (size_t)id < table->vtable_fields &&
           half_at(flat, table->vtable_at + (size_t)id * HALF) != 0;
}

gradd_status_t flat_number(const flat_t *flat, const flat_table_t *table, int id, size_t size,
                           void *value) {
    size_t at;
    GRADD_TRY(field(flat, table, id, size, &at));
    if (at) memcpy(value, flat->bytes + at, size);
    return GRADD_OK;
}

gradd_status_t flat_table(flat_t *flat, const flat_table_t *table, int id,
                          flat_table_t *out_table) {
    size_t at;
    GRADD_TRY(field(flat, table, id, WORD, &at));
    if (!at) return GRADD_FAIL(MODEL, "byte %zu: field %d is missing", table->at, id);
    GRADD_TRY(follow(flat, at, &at));
    return table_at(flat, at, out_table);
}

/* A vector that is not counted. */
static gradd_status_t find_vector(const flat_t *flat, const flat_table_t *table, int id,
                                  size_t element_bytes, flat_vector_t *out_vector) {
    size_t at;
    GRADD_TRY(field(flat, table, id, WORD, &at));
    if (!at) {
        *out_vector = (flat_vector_t){0};
        return GRADD_OK;
    }
    GRADD_TRY(follow(flat, at, &at));
    if (!within(flat, at, WORD))
        return GRADD_FAIL(MODEL, "byte %zu: a vector is beyond the end, %zu bytes", at, flat->n);
    const size_t n = word_at(flat, at), room = (flat->n - at - WORD) / element_bytes;
    if (n > room)
        return GRADD_FAIL(MODEL, "byte %zu: a vector of %zu elements where %zu have room", at, n,
                          room);
    *out_vector = (flat_vector_t){.at = at + WORD, .n = n};
    return GRADD_OK;
}

gradd_status_t flat_vector(flat_t *flat, const flat_table_t *table, int id, size_t element_bytes,
                           flat_vector_t *out_vector) {
    GRADD_TRY(find_vector(flat, table, id, element_bytes, out_vector));
    return visit(flat, out_vector->at, out_vector->n * element_bytes);
}

gradd_status_t flat_string(flat_t *flat, const flat_table_t *table, int id,
                           const char **out_string) {
    flat_vector_t letters = {0};
    if (!flat_has(flat, table, id)) {
        *out_string = "";
        return GRADD_OK;
    }
    GRADD_TRY(find_vector(flat, table, id, 1, &letters));
    if (letters.n > SHORT) GRADD_TRY(visit(flat, letters.at, letters.n));
    const size_t end = letters.at + letters.n;
    if (end >= flat->n || memchr(flat->bytes + letters.at, 0, letters.n + 1) != flat->bytes + end)
        return GRADD_FAIL(MODEL, "byte %zu: a string does not end where its length says",
                          letters.at);
    *out_string = (const char *)flat->bytes + letters.at;
    return GRADD_OK;
}

gradd_status_t flat_element(flat_t *flat, const flat_vector_t *vector, size_t i,
                            flat_table_t *out_table) {
    size_t at = 0;
    GRADD_TRY(follow(flat, vector->at + i * WORD, &at));
    return table_at(flat, at, out_table);
}
