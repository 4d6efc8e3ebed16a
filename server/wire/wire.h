/* Messages as msgpack: scan, decode and check requests, encode replies.
 *
 * No claim of a peer is trusted: wire_decode first walks the bytes without allocating (depth,
 * counts, sizes, types) and only then lets msgpack-c build the object tree, whose memory is thereby
 * bounded by a constant times the length of the message. Fields are checked against the verb's row
 * and errors name the field, the expected and the actual value.
 */
#ifndef GRADD_SERVER_WIRE_WIRE_H
#define GRADD_SERVER_WIRE_WIRE_H

#include <msgpack.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shm/status.h"
#include "shm/tensor.h"

#define WIRE_MAX_BYTES    (1u << 20) /* of an envelope */
#define WIRE_MAX_DEPTH    8          /* of a request */
#define WIRE_ANY_DEPTH    16         /* of other texts: payload frames, manifests, notes */
#define WIRE_MAX_ITEMS    (1u << 18) /* objects of all kinds in one message */
#define WIRE_MAX_FIELDS   24         /* of the outermost map */
#define WIRE_MAX_VERB     32         /* bytes */
#define WIRE_MAX_PAYLOADS 7          /* frames after the envelope */
#define WIRE_MAX_FRAME    (16u << 20)
#define WIRE_MAX_REPLY    (4u << 20)

/* Walks the bytes iteratively: exactly one object, no deeper than max_depth, at most max_items
 * objects, no ext types, every length inside the bytes. Allocates nothing. Fails with LIMIT. */
gradd_status_t wire_scan(const void *data, size_t bytes, int max_depth, uint32_t max_items);

/* The number of this short key of a map that wire_scan has passed; 0 = there is none. Allocates
 * nothing: for the answer to a message for which there is no memory. */
uint64_t wire_scan_number(const void *data, size_t bytes, const char *key);

/* ---- decoding ---- */

/* A decoded message. Texts and bytes point into the buffer that was decoded, which must outlive
 * it. A zeroed one is empty. */
typedef struct wire_doc_s {
    msgpack_zone zone; /* Owned: the tree */
    msgpack_object root;
    bool decoded;
} wire_doc_t;

/* Scans with the limits above and unpacks one map with short, distinct text keys. Fails with LIMIT
 * or NOMEM; then the doc is empty. */
gradd_status_t wire_decode(const void *data, size_t bytes, wire_doc_t *out_doc);
/* The same for any single object with other limits (a payload frame). */
gradd_status_t wire_decode_any(const void *data, size_t bytes, uint32_t max_items,
                               wire_doc_t *out_doc);
void wire_doc_finish(wire_doc_t *doc); /* accepts NULL and empty ones */

/* NULL when the map has no such key. */
const msgpack_object *wire_get(const wire_doc_t *doc, const char *key);

typedef enum wire_kind_e {
    WIRE_NONE,
    WIRE_U64,
    WIRE_F64, /* or an integer */
    WIRE_TEXT,
    WIRE_BYTES,
    WIRE_INDEX, /* a position, or a name */
    WIRE_LIST,
    WIRE_FLAG,  /* a boolean, 0 or 1 */
    WIRE_DIMS,  /* a list of up to GRADD_MAX_RANK sizes */
    WIRE_MAP,   /* a map with the keys of the field */
    WIRE_TABLE, /* the same, of lists of equal length: one entry per row in each */
} wire_kind_t;

#define WIRE_MAX_KEYS 12 /* of a map in a field */

/* A verb's expectation of one field. */
typedef struct wire_field_s {
    const char *name;
    wire_kind_t kind;
    wire_kind_t item; /* WIRE_LIST: of its entries */
    bool optional;    /* may be missing; a nil counts as missing then */
    uint32_t max;     /* WIRE_LIST: entries; WIRE_TEXT and WIRE_BYTES: bytes; 0 = no own limit */
    const struct wire_field_s *keys; /* WIRE_MAP and WIRE_TABLE; ends at the first without a name */
} wire_field_t;

/* Finds and checks the fields; out_values[i] is NULL for a missing optional one. Other fields of
 * the message are not looked at; in the map of a field an unknown key is UNSUPPORTED. Fails with
 * LIMIT for counts and with TENSOR for kinds; the sentence begins with "<verb>: field '<name>'". */
gradd_status_t wire_match(const wire_doc_t *doc, const char *verb, const wire_field_t *fields,
                          int n_fields, const msgpack_object **out_values);

/* The same for the keys of any object, which fails if it is no map; others are not looked at. */
gradd_status_t wire_match_map(const msgpack_object *map, const char *verb,
                              const wire_field_t *fields, int n_fields,
                              const msgpack_object **out_values);
/* Checks one object that is a table, as in a field of that name. */
gradd_status_t wire_check_table(const msgpack_object *o, const char *verb, const char *name,
                                const wire_field_t *keys);

/* Whether every key of a message is one of the fields or of the envelope (NULL at the end). Fails
 * with UNSUPPORTED. */
gradd_status_t wire_check_known(const wire_doc_t *doc, const char *verb, const wire_field_t *fields,
                                int n_fields, const char *const *envelope);

/* Conversions of checked objects. wire_find: the value of a key, NULL if there is none or the
 * object is no map; wire_in takes a nil for none. */
const msgpack_object *wire_find(const msgpack_object *map, const char *key);
const msgpack_object *wire_in(const msgpack_object *map, const char *key);
int wire_rows(const msgpack_object *table); /* 0 for NULL */
double wire_f64(const msgpack_object *o);
uint64_t wire_u64(const msgpack_object *o);
bool wire_flag(const msgpack_object *o); /* false for NULL */
int wire_count(const msgpack_object *list);
const msgpack_object *wire_at(const msgpack_object *list, int i);

/* ---- tensors and types: docs/protocol.md ---- */

/* Keys of one tensor, of a list of tensors, of one whose entries may have positions, and of a list
 * of types. */
extern const wire_field_t wire_tensor_keys[], wire_tensors_keys[], wire_placed_keys[],
    wire_types_keys[];

/* The columns of a list of tensors or types that was checked; borrowed. */
typedef struct wire_tensors_s {
    const msgpack_object *at, *segments, *offsets, *dtypes, *dims; /* at: NULL = 0, 1, ... */
    int n;
} wire_tensors_t;

wire_tensors_t wire_tensors(const msgpack_object *table); /* NULL: no tensors */
/* Entry i. The dims and the dtype are still to be validated: fails with UNSUPPORTED, LIMIT. */
gradd_status_t wire_type_at(const wire_tensors_t *types, int i, gradd_type_t *out_type);
gradd_status_t wire_tensor_at(const wire_tensors_t *tensors, int i, gradd_tensor_t *out_tensor);
/* One tensor that is a map. */
gradd_status_t wire_tensor(const msgpack_object *o, gradd_tensor_t *out_tensor);
/* The type of two values that are a dtype and dims. */
gradd_status_t wire_type(const msgpack_object *dtype, const msgpack_object *dims,
                         gradd_type_t *out_type);

/* ---- encoding ---- */

/* A growing buffer. The first failed allocation sticks in `failed`; later calls do nothing. */
typedef struct wire_out_s {
    uint8_t *data; /* Owned */
    size_t bytes, capacity;
    uint32_t pairs; /* of the outermost map */
    bool failed;
} wire_out_t;

void wire_out_finish(wire_out_t *out); /* accepts NULL and zeroed ones */

/* The outermost map: begin, then wire_key and one value in turn, then end, which patches the
 * number of pairs. begin empties the buffer. */
void wire_begin(wire_out_t *out);
void wire_end(wire_out_t *out);
void wire_key(wire_out_t *out, const char *key);

void wire_put_u64(wire_out_t *out, uint64_t value);
void wire_put_i64(wire_out_t *out, int64_t value);
void wire_put_f64(wire_out_t *out, double value);
void wire_put_text(wire_out_t *out, const char *text);
void wire_put_bytes(wire_out_t *out, const void *data, size_t bytes);
void wire_put_nil(wire_out_t *out);
void wire_put_list(wire_out_t *out, uint32_t n); /* n values follow */
void wire_put_map(wire_out_t *out, uint32_t n);  /* n texts, each with a value, follow */
void wire_put_dims(wire_out_t *out, const gradd_type_t *type);
void wire_put_types(wire_out_t *out, const gradd_type_t *types, int n);

/* Keys of what this daemon is: `proto`, the lowest and the highest protocol, and `version`. */
void wire_put_version(wire_out_t *out);

/* Whole replies, without begin and end. Code VERSION brings the keys of wire_put_version along.
 * `what` gets the verb in front unless it begins with it; a NULL verb is one that is not known.
 * session: "alive" or "lost", NULL leaves it out. */
void wire_reply_fail(wire_out_t *out, uint64_t q, gradd_status_t status, const char *verb,
                     const char *what, const char *session);
/* begin, ok and q; the verb's own keys and wire_end follow. */
void wire_reply_begin(wire_out_t *out, uint64_t q);

#endif
