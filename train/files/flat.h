/* Reading FlatBuffers: tables, vectors and strings inside bytes that nothing has vouched for.
 *
 * The format: a table begins with the signed distance to its vtable, which lists where each field
 * lies within the table (0 = absent). Tables, vectors and strings are reached by unsigned distances
 * from the field that names them; a vector begins with its count. All numbers are little-endian.
 * (Source: the page "FlatBuffers Internals" of its documentation.)
 *
 * Each function checks that what it returns lies within the bytes. Nothing is assumed about
 * alignment. A file may name one part from many places, so what a reader makes of it could be far
 * larger than the file. The reader therefore counts what it has visited, and refuses parts that a
 * file of this size cannot hold side by side. Strings of up to 1 KiB are not counted: writers share
 * equal names. Errors: MODEL, with the place in the file.
 */
#ifndef GRADD_TRAIN_FILES_FLAT_H
#define GRADD_TRAIN_FILES_FLAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shm/status.h"

typedef struct flat_s {
    const uint8_t *bytes; /* Borrowed */
    size_t n;
    size_t visited; /* bytes of tables and vectors so far, at most n */
} flat_t;

typedef struct flat_table_s {
    size_t at, bytes;                /* of the table */
    size_t vtable_at, vtable_fields; /* of its list of fields */
} flat_table_t;

typedef struct flat_vector_s {
    size_t at; /* of the first element */
    size_t n;  /* elements */
} flat_vector_t;

/* The root table of a file with that identifier (four letters). */
gradd_status_t flat_open(flat_t *flat, const void *bytes, size_t n, const char identifier[4]);
gradd_status_t flat_root(flat_t *flat, flat_table_t *out_table);

/* A number of `size` bytes at field `id`, little-endian; left as it is if the field is absent. */
gradd_status_t flat_number(const flat_t *flat, const flat_table_t *table, int id, size_t size,
                           void *value);
/* Parts that fields name. An absent vector has no elements, an absent string is "", an absent
 * table fails. A string with a zero byte inside fails. The string is Borrowed from the bytes. */
gradd_status_t flat_table(flat_t *flat, const flat_table_t *table, int id, flat_table_t *out_table);
gradd_status_t flat_vector(flat_t *flat, const flat_table_t *table, int id, size_t element_bytes,
                           flat_vector_t *out_vector);
gradd_status_t flat_string(flat_t *flat, const flat_table_t *table, int id,
                           const char **out_string);
/* Element i of a vector of tables. */
gradd_status_t flat_element(flat_t *flat, const flat_vector_t *vector, size_t i,
                            flat_table_t *out_table);
bool flat_has(const flat_t *flat, const flat_table_t *table, int id);

#endif
