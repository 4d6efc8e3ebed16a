/* The scan of serialized ONNX before it is unpacked: truncations, bombs, broken encodings. */
#include <stdlib.h>
#include <string.h>

#include "server/graph/arena.h"
#include "server/graph/model.h"
#include "tests/c/onnx_build.h"
#include "tests/test.h"

typedef struct bytes_s {
    uint8_t *data;
    size_t n;
} bytes_t;

/* Tag and length before what is there already: builds nested messages from the inside out. */
static void wrap(bytes_t *b, unsigned field) {
    uint8_t head[16];
    size_t n = 0;
    for (uint64_t v = field << 3 | 2; n == 0 || v; v >>= 7)
        head[n++] = (uint8_t)(v > 127 ? v | 128 : v);
    size_t v = b->n;
    do {
        head[n++] = (uint8_t)(v > 127 ? v | 128 : v);
        v >>= 7;
    } while (v);
    uint8_t *data = build_alloc(n + b->n);
    memcpy(data, head, n);
    memcpy(data + n, b->data, b->n);
    b->data = data;
    b->n += n;
}

static bytes_t bytes_of(const void *data, size_t n) {
    return (bytes_t){build_copy(data, n), n};
}
#define BYTES(text) bytes_of(text, sizeof text - 1)

static gradd_status_t scan(bytes_t b, const model_limits_t *limits) {
    size_t heap = 0;
    /* an exact copy, so that a sanitizer sees a read behind the end */
    uint8_t *exact = malloc(b.n ? b.n : 1);
    memcpy(exact, b.data, b.n);
    gradd_status_t status = model_prescan(exact, b.n, limits, &heap);
    free(exact);
    return status;
}

#define REFUSED(code, bytes, part)                                                                 \
    do {                                                                                           \
        CHECK_STATUS(GRADD_E_##code, scan(bytes, NULL));                                           \
        CHECK_ERROR_HAS(part);                                                                     \
    } while (0)

static bytes_t small_model(void) {
    Onnx__ModelProto *m = build_model();
    build_input(m, "x", GRADD_DT_F32, 2, BUILD_DIMS(2, 3));
    build_raw(build_init(m, "w", GRADD_DT_F32, 1, BUILD_DIMS(2)), "12345678", 8);
    Onnx__NodeProto *node = build_node(m, "Transpose", "t", "x", "y");
    build_attr_ints(node, "perm", 2, BUILD_DIMS(1, 0));
    build_output(m, "y");
    bytes_t b;
    b.data = build_pack(m, &b.n);
    return b;
}

TEST(estimate_covers_what_unpacking_takes) {
    bytes_t b = small_model();
    size_t heap = 0;
    CHECK_OK(model_prescan(b.data, b.n, NULL, &heap));
    CHECK(heap > b.n && heap < 100000);
    model_t *model = NULL;
    CHECK_OK(model_load(b.data, b.n, NULL, &model));
    CHECK_EQ_INT(model->n_nodes, 1);
    model_destroy(model);
}

TEST(empty_is_refused) {
    REFUSED(MODEL, BYTES(""), "empty");
    CHECK_STATUS(GRADD_E_MODEL, model_prescan(NULL, 5, NULL, &(size_t){0}));
}

/* Every prefix is either refused by the scan with a sentence, or, where it happens to end between
 * two fields of the model, refused by the import. */
TEST(every_truncation_is_refused) {
    bytes_t b = small_model();
    int by_scan = 0;
    for (size_t n = 0; n < b.n; n++) {
        model_t *model = NULL;
        CHECK(model_load(b.data, n, NULL, &model) != GRADD_OK);
        CHECK(model == NULL);
        CHECK(gradd_error_message()[0] != 0);
        by_scan += scan((bytes_t){b.data, n}, NULL) == GRADD_E_MODEL;
    }
    CHECK(by_scan > (int)b.n - 8);
}

TEST(truncation_names_the_place) {
    bytes_t b = small_model();
    const uint8_t *perm = memmem(b.data, b.n, "perm", 4);
    bytes_t cut = {b.data, (size_t)(perm - b.data) + 2};
    REFUSED(MODEL, cut, "at graph");
    CHECK_ERROR_HAS("truncated");
    /* the inner lengths agree, the innermost string does not */
    bytes_t inner = BYTES("\x0a\x05"
                          "ab");
    wrap(&inner, 5);
    wrap(&inner, 1);
    wrap(&inner, 7);
    REFUSED(MODEL, inner, "at graph.node[0].attribute[0].name: 5 bytes are announced, 2 are left");
}

TEST(garbage_is_refused) {
    REFUSED(MODEL, BYTES("GIF89a is not a model"),
            "this is not an ONNX model: at opset_import[0]: wire type 7");
    REFUSED(MODEL, BYTES("\x80\x80\x80\x80\x80\x80"), "this is not an ONNX model: ");
    REFUSED(MODEL, BYTES("\xff\xff\xff\xff\xff\x01"), "tag is broken");
    REFUSED(MODEL, BYTES("\x02"), "tag is broken"); /* field number 0 */
    REFUSED(MODEL, BYTES("\x0b\x01"), "not an ONNX model: at ir_version: wire type 3, expected 0");
    REFUSED(MODEL, BYTES("\xfb\x01"), "wire type 3 of field 31");
}

TEST(broken_numbers_are_refused) {
    REFUSED(MODEL, BYTES("\x08\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01"), "at ir_version");
    REFUSED(MODEL, BYTES("\x08\x80"), "at ir_version: a number is broken");
    REFUSED(MODEL, BYTES("\xfd\x01\x01"), "inside a number");             /* fixed32, field 31 */
    REFUSED(MODEL, BYTES("\xf9\x01\x01\x02\x03\x04"), "inside a number"); /* fixed64 */
    REFUSED(MODEL, BYTES("\x0d\x01\x02\x03\x04"), "at ir_version: wire type 5, expected 0");
    REFUSED(MODEL, BYTES("\x38\x01"), "at graph: wire type 0, expected 2");
}

static bytes_t in_tensor(bytes_t b) {
    wrap(&b, 5);
    wrap(&b, 7);
    return b;
}

TEST(broken_packed_numbers_are_refused) {
    REFUSED(MODEL, in_tensor(BYTES("\x22\x03xyz")),
            "at graph.initializer[0].float_data[0]: 3 packed bytes are no multiple of 4");
    REFUSED(MODEL, in_tensor(BYTES("\x52\x04wxyz")), "no multiple of 8");
    REFUSED(MODEL, in_tensor(BYTES("\x3a\x03\x01\x02\x80")), "int64_data[0]: packed number 2");
    REFUSED(MODEL, in_tensor(BYTES("\x0a\x0b\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")),
            "dims[0]: packed number 0 is broken");
}

TEST(text_must_be_clean) {
    REFUSED(MODEL,
            BYTES("\x12\x03"
                  "a\0b"),
            "at producer_name: the text is not UTF-8 or has a NUL");
    REFUSED(MODEL, BYTES("\x12\x01\xff"), "UTF-8");
    REFUSED(MODEL, BYTES("\x12\x02\xc3("), "UTF-8");
    REFUSED(MODEL, BYTES("\x12\x02\xc0\xaf"), "UTF-8");         /* overlong */
    REFUSED(MODEL, BYTES("\x12\x03\xed\xa0\x80"), "UTF-8");     /* surrogate */
    REFUSED(MODEL, BYTES("\x12\x04\xf4\x90\x80\x80"), "UTF-8"); /* above U+10FFFF */
    REFUSED(MODEL, BYTES("\x12\x02\xe2\x82"), "UTF-8");         /* ends inside a character */
    CHECK_OK(scan(BYTES("\x12\x04gr\xc3\xa4"), NULL));
    CHECK_OK(scan(BYTES("\x12\x04\xf0\x9f\x94\xa5"), NULL));
}

/* The scan keeps one bit per field of a message. */
static void check_field_count(const ProtobufCMessageDescriptor *message, int depth) {
    CHECK(message->n_fields <= 64);
    for (unsigned i = 0; depth < 8 && i < message->n_fields; i++)
        if (message->fields[i].type == PROTOBUF_C_TYPE_MESSAGE)
            check_field_count(message->fields[i].descriptor, depth + 1);
}

TEST(messages_have_few_fields) {
    check_field_count(&onnx__model_proto__descriptor, 0);
}

TEST(repeated_singular_fields_are_refused) {
    REFUSED(MODEL, BYTES("\x3a\x00\x3a\x00"), "at graph: the field occurs twice");
    REFUSED(MODEL, BYTES("\x08\x01\x08\x01"), "at ir_version: the field occurs twice");
}

TEST(unknown_fields_are_skipped) {
    CHECK_OK(scan(BYTES("\xa2\x06\x05hello\xa8\x06\x01\xad\x06"
                        "abcd\xa9\x06"
                        "abcdefgh"),
                  NULL));
}

/* graph.node.attribute.g.node.attribute.g...: what overflows the stack of a recursive decoder. */
static bytes_t deep_model(int levels) {
    static const unsigned fields[] = {6, 5, 1};
    bytes_t b = BYTES("\x12\x01x"); /* the innermost graph has a name */
    for (int i = 0; i < levels; i++)
        wrap(&b, fields[i % 3]);
    wrap(&b, 7);
    return b;
}

TEST(deep_nesting_is_refused) {
    REFUSED(LIMIT, deep_model(9000), "nesting 65 is deeper than the limit of 64");
    CHECK_ERROR_HAS("graph.node[0].attribute[0].g.node[0]");
    CHECK_STATUS(GRADD_E_LIMIT, scan(deep_model(63), NULL));
    CHECK_OK(scan(deep_model(60), NULL));
}

TEST(a_larger_depth_limit_has_a_bound) {
    model_limits_t limits = model_default_limits;
    limits.max_depth = 1 << 30;
    CHECK_STATUS(GRADD_E_LIMIT, scan(deep_model(300), &limits));
    CHECK_OK(scan(deep_model(90), &limits));
    limits.max_depth = 3;
    CHECK_STATUS(GRADD_E_LIMIT, scan(deep_model(3), &limits));
    CHECK_ERROR_HAS("limit of 3");
}

/* Two bytes of empty node cost more than a hundred bytes once decoded. */
TEST(wide_bomb_is_refused) {
    const size_t n = 4000000;
    bytes_t b = {build_alloc(2 * n), 2 * n};
    for (size_t i = 0; i < n; i++)
        memcpy(b.data + 2 * i, "\x0a\x00", 2);
    wrap(&b, 7);
    model_limits_t limits = model_default_limits;
    limits.max_heap_bytes = (size_t)256 << 20;
    CHECK_STATUS(GRADD_E_LIMIT, scan(b, &limits));
    CHECK_ERROR_HAS("at graph.node[");
    CHECK_ERROR_HAS("268435456 bytes");
}

TEST(packed_numbers_count_decoded) {
    const size_t n = 1 << 20;
    bytes_t b = {build_alloc(n), n}; /* a byte each, eight bytes decoded */
    wrap(&b, 7);
    model_limits_t limits = model_default_limits;
    limits.max_heap_bytes = 2 << 20;
    CHECK_STATUS(GRADD_E_LIMIT, scan(in_tensor(b), &limits));
    CHECK_ERROR_HAS("graph.initializer[0].int64_data");
    limits.max_heap_bytes = 16 << 20;
    b = (bytes_t){build_alloc(n), n};
    wrap(&b, 7);
    CHECK_OK(scan(in_tensor(b), &limits));
}

TEST(size_limit_holds) {
    bytes_t b = small_model();
    model_limits_t limits = model_default_limits;
    limits.max_bytes = b.n - 1;
    CHECK_STATUS(GRADD_E_LIMIT, scan(b, &limits));
    CHECK_ERROR_HAS("the limit is");
    limits.max_bytes = b.n;
    CHECK_OK(scan(b, &limits));
}

/* Any single byte changed: never a crash, never an empty message (sanitizers look on). */
TEST(every_byte_flipped) {
    bytes_t b = small_model();
    static const uint8_t masks[] = {0x01, 0x02, 0x04, 0x08, 0x10, 0x20, 0x40, 0x80, 0xff};
    int loaded = 0;
    for (size_t i = 0; i < b.n; i++)
        for (size_t k = 0; k < sizeof masks; k++) {
            model_t *model = NULL;
            b.data[i] ^= masks[k];
            gradd_status_t status = model_load(b.data, b.n, NULL, &model);
            b.data[i] ^= masks[k];
            CHECK((status == GRADD_OK) == (model != NULL));
            CHECK(status == GRADD_OK || gradd_error_message()[0]);
            loaded += status == GRADD_OK;
            model_destroy(model);
        }
    CHECK(loaded > 0); /* data bytes and names may change */
}
