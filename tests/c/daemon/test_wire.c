/* The wire: the scanner against hostile bytes, decoding, field checks, encoding.
 */
#include "server/wire/wire.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

static gradd_status_t scan(const char *bytes, size_t n) {
    return wire_scan(bytes, n, WIRE_MAX_DEPTH, WIRE_MAX_ITEMS);
}
#define SCAN(text) scan(text, sizeof(text) - 1)

TEST(scan_accepts_every_kind) {
    CHECK_OK(SCAN("\x00"));
    CHECK_OK(SCAN("\xff"));
    CHECK_OK(SCAN("\xc0"));
    CHECK_OK(SCAN("\xc3"));
    CHECK_OK(SCAN("\xa3"
                  "abc"));
    CHECK_OK(SCAN("\xd9\x01"
                  "a"));
    CHECK_OK(SCAN("\xc4\x02"
                  "ab"));
    CHECK_OK(SCAN("\xcb\0\0\0\0\0\0\0\0"));
    CHECK_OK(SCAN("\xcf\0\0\0\0\0\0\0\0"));
    CHECK_OK(SCAN("\x93\x01\x02\x03"));
    CHECK_OK(SCAN("\xdc\x00\x01\x05"));
    CHECK_OK(SCAN("\x81\xa1"
                  "k\x90"));
    CHECK_OK(SCAN("\xdf\x00\x00\x00\x01\xa1"
                  "k\x80"));
}

TEST(scan_refuses_claims_without_bytes) {
    CHECK_STATUS(GRADD_E_LIMIT, SCAN("\xdd\x10\x00\x00\x00"));
    CHECK_ERROR_HAS("claims 268435456 entries");
    CHECK_STATUS(GRADD_E_LIMIT, SCAN("\xdf\xff\xff\xff\xff"));
    CHECK_STATUS(GRADD_E_LIMIT, SCAN("\xdb\xff\xff\xff\xff"));
    CHECK_ERROR_HAS("claims 4294967295 bytes");
    CHECK_STATUS(GRADD_E_LIMIT, SCAN("\xc6\x00\x00\x00\x09x"));
    CHECK_STATUS(GRADD_E_LIMIT, SCAN("\xdd\x00"));
    CHECK_STATUS(GRADD_E_LIMIT, SCAN("\xcf\x00"));
    CHECK_STATUS(GRADD_E_LIMIT, SCAN(""));
    CHECK_STATUS(GRADD_E_LIMIT, SCAN("\x92\x01"));
}

TEST(scan_refuses_depth_trailing_bytes_and_ext) {
    char deep[64];
    memset(deep, 0x91, sizeof deep);
    deep[63] = 0;
    CHECK_STATUS(GRADD_E_LIMIT, scan(deep, sizeof deep));
    CHECK_ERROR_HAS("deeper than 8");
    CHECK_OK(scan(deep + 57, 7)); /* six lists and a number: seven levels */
    CHECK_STATUS(GRADD_E_LIMIT, SCAN("\x01\x02"));
    CHECK_ERROR_HAS("1 bytes after");
    CHECK_STATUS(GRADD_E_LIMIT, SCAN("\xd4\x01\x00"));
    CHECK_ERROR_HAS("0xd4");
    CHECK_STATUS(GRADD_E_LIMIT, SCAN("\xc1"));
}

/* The number of a request for which there is no memory. */
TEST(a_number_is_found_without_memory) {
    wire_out_t out = {0};
    const uint64_t numbers[] = {0, 127, 128, 65535, 1ull << 40, UINT64_MAX};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        wire_begin(&out);
        wire_key(&out, "v");
        wire_put_text(&out, "q");
        wire_key(&out, "in");
        wire_put_map(&out, 1);
        wire_put_text(&out, "q");
        wire_put_u64(&out, 7); /* of a field, not of the request */
        wire_key(&out, "q");
        wire_put_u64(&out, numbers[i]);
        wire_key(&out, "t");
        wire_put_bytes(&out, "12345678", 8);
        wire_end(&out);
        CHECK(wire_scan_number(out.data, out.bytes, "q") == numbers[i]);
        CHECK_EQ_INT(wire_scan_number(out.data, out.bytes, "x"), 0);
        CHECK_EQ_INT(wire_scan_number(out.data, out.bytes, "v"), 0); /* a text */
        for (size_t n = 0; n < out.bytes; n++)                       /* whatever is cut off */
            (void)wire_scan_number(out.data, n, "q");
    }
    wire_out_finish(&out);
}

TEST(scan_counts_items) {
    size_t n = 5 + 1000;
    char *bytes = calloc(1, n);
    memcpy(bytes, "\xdd\x00\x00\x03\xe8", 5);
    CHECK_OK(wire_scan(bytes, n, 4, 1001));
    CHECK_STATUS(GRADD_E_LIMIT, wire_scan(bytes, n, 4, 1000));
    free(bytes);
}

/* Whatever the bytes, the scanner stops inside them and what it accepts can be unpacked. */
TEST_LIMIT(random_bytes_never_break_decoding, 30) {
    uint64_t state = 1;
    int accepted = 0;
    for (int round = 0; round < 200000; round++) {
        uint8_t *bytes = malloc(24); /* its own block: a sanitizer sees the first byte behind it */
        state = state * 6364136223846793005u + 1442695040888963407u;
        size_t n = 1 + (state >> 33) % 24;
        for (size_t i = 0; i < n; i++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            bytes[i] = (uint8_t)(state >> 56);
            if (i == 0 && round % 2) bytes[0] = (uint8_t)(0x80 | (bytes[0] & 0x13));
        }
        uint8_t *exact = memcpy(malloc(n), bytes, n);
        wire_doc_t doc;
        if (wire_decode_any(exact, n, WIRE_MAX_ITEMS, &doc) == GRADD_OK) {
            accepted++;
            wire_doc_finish(&doc);
        }
        if (wire_decode(exact, n, &doc) == GRADD_OK) wire_doc_finish(&doc);
        free(exact);
        free(bytes);
    }
    CHECK(accepted > 100);
}

static gradd_status_t decode(const wire_out_t *out, wire_doc_t *doc) {
    return wire_decode(out->data, out->bytes, doc);
}

TEST(envelope_rules) {
    wire_doc_t doc;
    CHECK_STATUS(GRADD_E_LIMIT, wire_decode("\x93\x01\x02\x03", 4, &doc));
    CHECK_ERROR_HAS("not a map");
    CHECK_STATUS(GRADD_E_LIMIT, wire_decode("\x81\x01\x02", 3, &doc));
    CHECK_ERROR_HAS("not named by a text");
    CHECK_STATUS(GRADD_E_LIMIT, wire_decode("\x82\xa1q\x01\xa1q\x02", 7, &doc));
    CHECK_ERROR_HAS("'q' comes twice");
    wire_out_t out = {0};
    wire_begin(&out);
    for (int i = 0; i < WIRE_MAX_FIELDS + 1; i++) {
        char key[8] = {(char)('a' + i), 0};
        wire_key(&out, key);
        wire_put_nil(&out);
    }
    wire_end(&out);
    CHECK_STATUS(GRADD_E_LIMIT, decode(&out, &doc));
    CHECK_ERROR_HAS("more than 24");
    wire_out_finish(&out);
    uint8_t *large = calloc(1, WIRE_MAX_BYTES + 1);
    CHECK_STATUS(GRADD_E_LIMIT, wire_decode(large, WIRE_MAX_BYTES + 1, &doc));
    free(large);
}

TEST(numbers_survive_the_round_trip) {
    static const int64_t numbers[] = {0,     1,     127,        128,        255,       256,
                                      65535, 65536, 4294967295, 4294967296, INT64_MAX, -1,
                                      -32,   -33,   -128,       -40000,     INT64_MIN};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        wire_out_t out = {0};
        wire_doc_t doc;
        wire_begin(&out);
        wire_key(&out, "n");
        wire_put_i64(&out, numbers[i]);
        wire_key(&out, "f");
        wire_put_f64(&out, 0.1);
        wire_end(&out);
        CHECK_OK(decode(&out, &doc));
        CHECK_EQ_INT(wire_get(&doc, "n")->via.i64, numbers[i]);
        CHECK(wire_get(&doc, "f")->via.f64 == 0.1);
        CHECK(wire_get(&doc, "g") == NULL);
        wire_doc_finish(&doc);
        wire_out_finish(&out);
    }
}

TEST(texts_of_every_length_survive) {
    for (size_t n = 0; n < 70000; n = n * 2 + 1) {
        char *text = malloc(n + 1);
        wire_out_t out = {0};
        wire_doc_t doc;
        memset(text, 'x', n);
        text[n] = 0;
        wire_begin(&out);
        wire_key(&out, "t");
        wire_put_text(&out, text);
        wire_key(&out, "b");
        wire_put_bytes(&out, text, n);
        wire_end(&out);
        CHECK_OK(decode(&out, &doc));
        CHECK_EQ_INT(wire_get(&doc, "t")->via.str.size, n);
        CHECK_EQ_INT(wire_get(&doc, "b")->via.bin.size, n);
        CHECK(memcmp(wire_get(&doc, "b")->via.bin.ptr, text, n) == 0);
        wire_doc_finish(&doc);
        wire_out_finish(&out);
        free(text);
    }
}

/* Python's msgpack refuses a message with a text that is not UTF-8. */
TEST(texts_are_utf8_whatever_a_name_is) {
    static const char *const texts[][2] = {
        {"h\xc3\xa9 \xe2\x82\xac \xf0\x9f\x99\x82", "h\xc3\xa9 \xe2\x82\xac \xf0\x9f\x99\x82"},
        {"cut \xe2\x82",                            "cut ??"                                 },
        {"\x80 \xff",                               "? ?"                                    },
        {"overlong \xc0\xaf \xe0\x80\xaf",          "overlong ?? ???"                        },
        {"surrogate \xed\xa0\x80",                  "surrogate ???"                          },
        {"beyond \xf4\x90\x80\x80",                 "beyond ????"                            },
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        wire_out_t out = {0};
        wire_doc_t doc;
        wire_begin(&out);
        wire_key(&out, "t");
        wire_put_text(&out, texts[i][0]);
        wire_end(&out);
        CHECK_OK(decode(&out, &doc));
        const msgpack_object_str *text = &wire_get(&doc, "t")->via.str;
        CHECK_EQ_INT(text->size, strlen(texts[i][1]));
        CHECK(memcmp(text->ptr, texts[i][1], text->size) == 0);
        wire_doc_finish(&doc);
        wire_out_finish(&out);
    }
}

static gradd_status_t match_one(const char *bytes, size_t n, const wire_field_t *field) {
    wire_doc_t doc;
    const msgpack_object *value;
    CHECK_OK(wire_decode(bytes, n, &doc));
    gradd_status_t st = wire_match(&doc, "verb", field, 1, &value);
    wire_doc_finish(&doc);
    return st;
}
#define MATCH(text, ...) match_one(text, sizeof(text) - 1, &(wire_field_t){__VA_ARGS__})

TEST(fields_are_named_with_what_was_expected) {
    CHECK_STATUS(GRADD_E_TENSOR, MATCH("\x80", .name = "run", .kind = WIRE_U64));
    CHECK_ERROR_HAS("verb: field 'run' is missing, expected an unsigned integer");
    CHECK_OK(MATCH("\x80", .name = "run", .kind = WIRE_U64, .optional = true));
    CHECK_OK(MATCH("\x81\xa3run\xc0", .name = "run", .kind = WIRE_U64, .optional = true));
    CHECK_STATUS(GRADD_E_TENSOR, MATCH("\x81\xa3run\xff", .name = "run", .kind = WIRE_U64));
    CHECK_ERROR_HAS("field 'run': expected an unsigned integer, got a negative integer");
    CHECK_STATUS(GRADD_E_LIMIT, MATCH("\x81\xa1v\xa3"
                                      "abc",
                                      .name = "v", .kind = WIRE_TEXT, .max = 2));
    CHECK_ERROR_HAS("has 3 bytes, more than 2");
    CHECK_STATUS(GRADD_E_LIMIT,
                 MATCH("\x81\xa1v\x93\x01\x02\x03", .name = "v", .kind = WIRE_LIST, .max = 2));
    CHECK_STATUS(GRADD_E_TENSOR,
                 MATCH("\x81\xa1v\x92\x01\xc0", .name = "v", .kind = WIRE_LIST, .item = WIRE_U64));
    CHECK_ERROR_HAS("field 'v[1]': expected an unsigned integer, got nil");
    CHECK_OK(MATCH("\x81\xa1v\xc3", .name = "v", .kind = WIRE_FLAG));
    CHECK_STATUS(GRADD_E_TENSOR, MATCH("\x81\xa1v\x02", .name = "v", .kind = WIRE_FLAG));
    CHECK_OK(MATCH("\x81\xa1v\xca\x3f\x80\x00\x00", .name = "v", .kind = WIRE_F64));
    CHECK_STATUS(GRADD_E_TENSOR, MATCH("\x81\xa1v\xc0", .name = "v", .kind = WIRE_F64));
    CHECK_ERROR_HAS("field 'v': expected a number, got nil");
    CHECK_STATUS(GRADD_E_TENSOR, MATCH("\x81\xa1v\x91\xff", .name = "v", .kind = WIRE_DIMS));
    CHECK_ERROR_HAS("field 'v': expected a list of at most 8 sizes, got a list of another form");
}

/* One field 'v' that is a map of these keys with one value each, written by `put`. */
static gradd_status_t match_map(const char *keys, void (*put)(wire_out_t *out, const char *key),
                                wire_kind_t kind, const wire_field_t *known, wire_doc_t *doc) {
    static wire_out_t out; /* the doc points into it until the next call */
    const msgpack_object *value;
    const wire_field_t field = {.name = "v", .kind = kind, .keys = known};
    char text[256];
    int n = 1;
    for (const char *p = keys; *p; p++)
        n += *p == ' ';
    snprintf(text, sizeof text, "%s", keys);
    wire_begin(&out);
    wire_key(&out, "v");
    wire_put_map(&out, (uint32_t)n);
    for (char *key = strtok(text, " "); key; key = strtok(NULL, " ")) {
        wire_put_text(&out, key);
        put(&out, key);
    }
    wire_end(&out);
    CHECK_OK(wire_decode(out.data, out.bytes, doc));
    return wire_match(doc, "verb", &field, 1, &value);
}

static void put_two(wire_out_t *out, const char *key) {
    wire_put_list(out, 2);
    for (int i = 0; i < 2; i++)
        if (strcmp(key, "dims") == 0)
            wire_put_list(out, 0);
        else
            wire_put_u64(out, 64 * (uint64_t)i + 1);
}

static void put_unequal(wire_out_t *out, const char *key) {
    if (strcmp(key, "offsets") != 0) {
        put_two(out, key);
        return;
    }
    wire_put_list(out, 1);
    wire_put_u64(out, 0);
}

static void put_one(wire_out_t *out, const char *key) {
    if (strcmp(key, "dims") == 0)
        wire_put_list(out, 0);
    else
        wire_put_u64(out, 1);
}

TEST(maps_have_the_keys_of_their_field) {
    wire_doc_t doc;
    CHECK_OK(match_map("segment offset dtype dims", put_one, WIRE_MAP, wire_tensor_keys, &doc));
    wire_doc_finish(&doc);
    CHECK_STATUS(GRADD_E_TENSOR,
                 match_map("segment dtype dims", put_one, WIRE_MAP, wire_tensor_keys, &doc));
    CHECK_ERROR_HAS("verb: field 'v.offset' is missing, expected an unsigned integer");
    wire_doc_finish(&doc);
    CHECK_STATUS(GRADD_E_UNSUPPORTED, match_map("segment offset dtype dims strides", put_one,
                                                WIRE_MAP, wire_tensor_keys, &doc));
    CHECK_ERROR_HAS("verb: unknown field 'v.strides' (known: segment, offset, dtype, dims)");
    wire_doc_finish(&doc);
    CHECK_STATUS(GRADD_E_TENSOR, match_map("segment offset dtype dims offset", put_one, WIRE_MAP,
                                           wire_tensor_keys, &doc));
    CHECK_ERROR_HAS("verb: field 'v.offset' comes twice");
    wire_doc_finish(&doc);
    CHECK_STATUS(GRADD_E_TENSOR,
                 match_map("segment offset dtype dims", put_two, WIRE_MAP, wire_tensor_keys, &doc));
    CHECK_ERROR_HAS("verb: field 'v.segment': expected an unsigned integer, got a list");
    wire_doc_finish(&doc);
    CHECK_STATUS(GRADD_E_TENSOR, MATCH("\x81\xa1v\x81\x01\x01", .name = "v", .kind = WIRE_MAP,
                                       .keys = wire_tensor_keys));
    CHECK_ERROR_HAS("verb: field 'v': a key is an unsigned integer, not a text");
    CHECK_STATUS(GRADD_E_TENSOR,
                 MATCH("\x81\xa1v\x90", .name = "v", .kind = WIRE_MAP, .keys = wire_tensor_keys));
    CHECK_ERROR_HAS("verb: field 'v': expected a map, got a list");
}

TEST(tables_have_lists_of_equal_length) {
    wire_doc_t doc;
    CHECK_OK(
        match_map("segments offsets dtypes dims", put_two, WIRE_TABLE, wire_tensors_keys, &doc));
    const wire_tensors_t list = wire_tensors(wire_get(&doc, "v"));
    gradd_tensor_t t;
    CHECK_EQ_INT(list.n, 2);
    CHECK(list.at == NULL);
    CHECK_OK(wire_tensor_at(&list, 0, &t));
    CHECK(t.segment == 1 && t.offset == 1 && t.type.dtype == GRADD_DT_F32 && t.type.rank == 0);
    CHECK_STATUS(GRADD_E_UNSUPPORTED, wire_tensor_at(&list, 1, &t)); /* element type 65 */
    wire_doc_finish(&doc);
    CHECK_STATUS(GRADD_E_TENSOR, match_map("segments offsets dtypes dims", put_unequal, WIRE_TABLE,
                                           wire_tensors_keys, &doc));
    CHECK_ERROR_HAS("verb: field 'v': 2 segments, but 1 offsets");
    wire_doc_finish(&doc);
    CHECK_STATUS(GRADD_E_UNSUPPORTED, match_map("segments offsets dtypes dims at", put_two,
                                                WIRE_TABLE, wire_tensors_keys, &doc));
    CHECK_ERROR_HAS("unknown field 'v.at'");
    wire_doc_finish(&doc);
    CHECK_OK(
        match_map("segments offsets dtypes dims at", put_two, WIRE_TABLE, wire_placed_keys, &doc));
    CHECK(wire_tensors(wire_get(&doc, "v")).at != NULL);
    wire_doc_finish(&doc);
    CHECK_STATUS(GRADD_E_TENSOR, match_map("segments offsets dtypes dims", put_one, WIRE_TABLE,
                                           wire_tensors_keys, &doc));
    CHECK_ERROR_HAS("verb: field 'v.segments': expected a list, got an unsigned integer");
    wire_doc_finish(&doc);
    CHECK_EQ_INT(wire_tensors(NULL).n, 0);
}

/* A tensor of segment 7 at offset 256. */
static gradd_status_t tensor_of(uint64_t dtype, int rank, const uint64_t *dims,
                                gradd_tensor_t *tensor) {
    wire_out_t out = {0};
    wire_doc_t doc;
    wire_begin(&out);
    wire_key(&out, "segment");
    wire_put_u64(&out, 7);
    wire_key(&out, "offset");
    wire_put_u64(&out, 256);
    wire_key(&out, "dtype");
    wire_put_u64(&out, dtype);
    wire_key(&out, "dims");
    wire_put_list(&out, (uint32_t)rank);
    for (int i = 0; i < rank; i++)
        wire_put_u64(&out, dims[i]);
    wire_end(&out);
    CHECK_OK(wire_decode(out.data, out.bytes, &doc));
    gradd_status_t st = wire_tensor(&doc.root, tensor);
    wire_doc_finish(&doc);
    wire_out_finish(&out);
    return st;
}

TEST(tensors_are_validated) {
    const uint64_t small[] = {2, 3}, large[] = {UINT64_C(1) << 62, UINT64_C(1) << 62};
    gradd_tensor_t t;
    CHECK_OK(tensor_of(GRADD_DT_F32, 2, small, &t));
    CHECK_EQ_INT(t.segment, 7);
    CHECK_EQ_INT(t.offset, 256);
    CHECK_EQ_INT(gradd_type_bytes(&t.type), 24);
    CHECK_STATUS(GRADD_E_UNSUPPORTED, tensor_of(8, 0, NULL, &t));       /* text */
    CHECK_STATUS(GRADD_E_LIMIT, tensor_of(GRADD_DT_F32, 2, large, &t)); /* elements overflow */
}
