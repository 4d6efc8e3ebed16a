/* Replies as text and as JSON. */
#ifndef GRADD_SERVER_WIRE_PRINT_H
#define GRADD_SERVER_WIRE_PRINT_H

#include <stdio.h>

#include "server/wire/wire.h"

#define PRINT_BYTES 24 /* of a text of the two below */

/* "3.2 MiB", "12 s", in a buffer, which they return. */
const char *print_amount(int64_t bytes, char buffer[PRINT_BYTES]);
const char *print_duration(int64_t ms, char buffer[PRINT_BYTES]);

/* A number of a reply, 0 where it is missing, is none, or is above INT64_MAX / 4. */
int64_t reply_number(const msgpack_object *map, const char *key);
/* The same, 0 where it is no float. */
double reply_real(const msgpack_object *map, const char *key);
/* A text of a reply, or "?", in a buffer of that size, which it returns. */
const char *reply_text(const msgpack_object *map, const char *key, char *buffer, size_t bytes);

/* A value of a reply as JSON: null for bytes, and for numbers that JSON lacks. */
void print_json(FILE *out, const msgpack_object *o);
/* The pairs of a map, without its braces. */
void print_pairs(FILE *out, const msgpack_object *o);

#endif
