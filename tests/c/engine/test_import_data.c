/* Import of tensors and attributes: every way ONNX may store elements, and one broken model per
 * rule. Every refusal must carry its code and name the culprit.
 */
#include <math.h>
#include <string.h>

#include "server/graph/model.h"
#include "tests/c/onnx_build.h"
#include "tests/test.h"

typedef Onnx__ModelProto proto_t;
typedef Onnx__TensorProto tensor_t;

/* x -> Transpose 'turn' -> y, and one initializer 'w' to work on. */
static proto_t *with_tensor(int data_type, int rank, const int64_t *dims, tensor_t **out_tensor) {
    proto_t *m = build_model();
    build_input(m, "x", GRADD_DT_F32, 2, BUILD_DIMS(2, 3));
    build_node(m, "Transpose", "turn", "x", "y");
    build_output(m, "y");
    *out_tensor = build_init(m, "w", data_type, rank, dims);
    return m;
}

/* The same graph without the tensor; the node is what to work on. */
static proto_t *with_node(Onnx__NodeProto **out_node) {
    tensor_t *unused;
    proto_t *m = with_tensor(GRADD_DT_F32, 0, NULL, &unused);
    m->graph->n_initializer = 0;
    *out_node = m->graph->node[0];
    return m;
}

static gradd_status_t load(const proto_t *m, model_t **out) {
    size_t n;
    uint8_t *bytes = build_pack(m, &n);
    return model_load(bytes, n, NULL, out);
}

#define REFUSED(code, proto, part)                                                                 \
    do {                                                                                           \
        model_t *refused = NULL;                                                                   \
        CHECK_STATUS(GRADD_E_##code, load(proto, &refused));                                       \
        CHECK(refused == NULL);                                                                    \
        CHECK_ERROR_HAS(part);                                                                     \
    } while (0)

/* Loads and returns the tensor, which must have these bytes. The model is returned to be freed. */
static void check_elements(const proto_t *m, const void *want, size_t n, int line) {
    model_t *model = NULL;
    CHECK_OK(load(m, &model));
    const model_value_t *w = &model->values[1];
    CHECK_EQ_STR(w->name, "w");
    CHECK(w->known.data != NULL);
    CHECK_EQ_INT((uintptr_t)w->known.data % GRADD_TENSOR_ALIGN, 0);
    CHECK_EQ_INT(gradd_type_bytes(&w->known.type), n);
    if (memcmp(w->known.data, want, n)) test_fail(__FILE__, line, "the elements differ");
    model_destroy(model);
}
#define ELEMENTS(proto, ctype, ...)                                                                \
    check_elements(proto, (ctype[]){__VA_ARGS__}, sizeof (ctype[]){__VA_ARGS__}, __LINE__)

#define PUT(tensor, field, ctype, ...)                                                             \
    ((tensor)->n_##field = sizeof (ctype[]){__VA_ARGS__} / sizeof(ctype),                          \
     (tensor)->field = build_copy((ctype[]){__VA_ARGS__}, sizeof (ctype[]){__VA_ARGS__}))

/* ---- tensors ---- */

TEST(raw_data_is_copied) {
    tensor_t *w;
    proto_t *m = with_tensor(GRADD_DT_F32, 2, BUILD_DIMS(1, 2), &w);
    build_raw(w, (float[]){1.5f, -2}, 8);
    ELEMENTS(m, float, 1.5f, -2);
    m = with_tensor(GRADD_DT_BOOL, 1, BUILD_DIMS(3), &w);
    build_raw(w, "\1\0\1", 3);
    ELEMENTS(m, uint8_t, 1, 0, 1);
}

TEST(typed_fields_are_copied) {
    tensor_t *w;
    proto_t *m = with_tensor(GRADD_DT_F32, 1, BUILD_DIMS(2), &w);
    PUT(w, float_data, float, 0.25f, 8);
    ELEMENTS(m, float, 0.25f, 8);
    m = with_tensor(GRADD_DT_F64, 1, BUILD_DIMS(2), &w);
    PUT(w, double_data, double, 0.1, -8);
    ELEMENTS(m, double, 0.1, -8);
    m = with_tensor(GRADD_DT_I64, 1, BUILD_DIMS(2), &w);
    PUT(w, int64_data, int64_t, INT64_MIN, 5);
    ELEMENTS(m, int64_t, INT64_MIN, 5);
    m = with_tensor(GRADD_DT_U64, 1, BUILD_DIMS(1), &w);
    PUT(w, uint64_data, uint64_t, UINT64_MAX);
    ELEMENTS(m, uint64_t, UINT64_MAX);
    m = with_tensor(GRADD_DT_U32, 1, BUILD_DIMS(1), &w);
    PUT(w, uint64_data, uint64_t, UINT32_MAX);
    ELEMENTS(m, uint32_t, UINT32_MAX);
}

TEST(int32_data_holds_narrow_elements) {
    tensor_t *w;
    proto_t *m = with_tensor(GRADD_DT_I32, 1, BUILD_DIMS(2), &w);
    PUT(w, int32_data, int32_t, INT32_MIN, 7);
    ELEMENTS(m, int32_t, INT32_MIN, 7);
    m = with_tensor(GRADD_DT_BOOL, 1, BUILD_DIMS(3), &w);
    PUT(w, int32_data, int32_t, 1, 0, 1);
    ELEMENTS(m, uint8_t, 1, 0, 1);
    m = with_tensor(GRADD_DT_I8, 1, BUILD_DIMS(2), &w);
    PUT(w, int32_data, int32_t, -128, 127);
    ELEMENTS(m, int8_t, -128, 127);
    m = with_tensor(GRADD_DT_U16, 1, BUILD_DIMS(2), &w);
    PUT(w, int32_data, int32_t, 0, 65535);
    ELEMENTS(m, uint16_t, 0, 65535);
    m = with_tensor(GRADD_DT_BF16, 1, BUILD_DIMS(1), &w);
    PUT(w, int32_data, int32_t, 0x3f80);
    ELEMENTS(m, uint16_t, 0x3f80);
}

TEST(scalars_and_empty_tensors) {
    tensor_t *w;
    proto_t *m = with_tensor(GRADD_DT_I64, 0, NULL, &w);
    PUT(w, int64_data, int64_t, 42);
    ELEMENTS(m, int64_t, 42);
    m = with_tensor(GRADD_DT_I64, 1, BUILD_DIMS(0), &w);
    check_elements(m, "", 0, __LINE__);
    m = with_tensor(GRADD_DT_I64, 2, BUILD_DIMS(3, 0), &w);
    build_raw(w, "", 0);
    check_elements(m, "", 0, __LINE__);
}

TEST(values_out_of_range_are_refused) {
    tensor_t *w;
    proto_t *m = with_tensor(GRADD_DT_BOOL, 1, BUILD_DIMS(2), &w);
    PUT(w, int32_data, int32_t, 1, 2);
    REFUSED(GRAPH, m, "initializer 0 'w': element 1 is 2, expected 0 to 1 for bool");
    m = with_tensor(GRADD_DT_BOOL, 1, BUILD_DIMS(2), &w);
    build_raw(w, "\0\xff", 2);
    REFUSED(GRAPH, m, "initializer 0 'w': element 1 is 255, expected 0 or 1 for bool");
    m = with_tensor(GRADD_DT_I8, 1, BUILD_DIMS(1), &w);
    PUT(w, int32_data, int32_t, 128);
    REFUSED(GRAPH, m, "element 0 is 128, expected -128 to 127 for i8");
    m = with_tensor(GRADD_DT_U8, 1, BUILD_DIMS(1), &w);
    PUT(w, int32_data, int32_t, -1);
    REFUSED(GRAPH, m, "element 0 is -1, expected 0 to 255 for u8");
    m = with_tensor(GRADD_DT_U32, 1, BUILD_DIMS(1), &w);
    PUT(w, uint64_data, uint64_t, 1ull << 32);
    REFUSED(GRAPH, m, "element 0 is 4294967296, expected 0 to 4294967295 for u32");
}

TEST(sizes_must_agree) {
    tensor_t *w;
    proto_t *m = with_tensor(GRADD_DT_F32, 2, BUILD_DIMS(2, 3), &w);
    build_raw(w, "12345678", 8);
    REFUSED(GRAPH, m, "initializer 0 'w': raw_data has 8 bytes, expected 24 for f32[2,3]");
    m = with_tensor(GRADD_DT_F32, 1, BUILD_DIMS(1), &w);
    build_raw(w, "12345678", 8);
    REFUSED(GRAPH, m, "raw_data has 8 bytes, expected 4 for f32[1]");
    m = with_tensor(GRADD_DT_F32, 1, BUILD_DIMS(3), &w);
    PUT(w, float_data, float, 1, 2);
    REFUSED(GRAPH, m, "initializer 0 'w': float_data has 2 elements, expected 3 for f32[3]");
    m = with_tensor(GRADD_DT_F32, 1, BUILD_DIMS(3), &w);
    REFUSED(GRAPH, m, "float_data has 0 elements, expected 3");
    m = with_tensor(GRADD_DT_F32, 1, BUILD_DIMS(3), &w);
    build_raw(w, "", 0);
    REFUSED(GRAPH, m, "raw_data has 0 bytes, expected 12");
}

/* Huge claims with no bytes behind them: refused before anything is allocated. */
TEST(huge_claims_are_refused) {
    tensor_t *w;
    proto_t *m = with_tensor(GRADD_DT_F32, 1, BUILD_DIMS(1ll << 40), &w);
    REFUSED(GRAPH, m, "initializer 0 'w': float_data has 0 elements, expected 1099511627776");
    m = with_tensor(GRADD_DT_F32, 2, BUILD_DIMS(1ll << 40, 1ll << 40), &w);
    REFUSED(LIMIT, m, "initializer 0 'w': the size in bytes overflows");
    m = with_tensor(GRADD_DT_F32, 3, BUILD_DIMS(1ll << 40, 0, 1ll << 40), &w);
    REFUSED(LIMIT, m, "overflows 64 bits at dimension 2");
    m = with_tensor(GRADD_DT_F32, 1, BUILD_DIMS(-1), &w);
    REFUSED(GRAPH, m, "initializer 0 'w': dimension 0 is -1");
    m = with_tensor(GRADD_DT_F32, 9, BUILD_DIMS(1, 1, 1, 1, 1, 1, 1, 1, 1), &w);
    REFUSED(LIMIT, m, "initializer 0 'w': rank 9 is above the limit of 8");
}

TEST(data_must_be_in_one_place) {
    tensor_t *w;
    proto_t *m = with_tensor(GRADD_DT_F32, 1, BUILD_DIMS(1), &w);
    PUT(w, float_data, float, 1);
    build_raw(w, "1234", 4);
    REFUSED(GRAPH, m, "initializer 0 'w': data is in both raw_data and float_data");
    m = with_tensor(GRADD_DT_F32, 1, BUILD_DIMS(1), &w);
    PUT(w, int64_data, int64_t, 1);
    REFUSED(GRAPH, m, "data is in int64_data, expected float_data or raw_data for f32");
    m = with_tensor(GRADD_DT_I64, 1, BUILD_DIMS(1), &w);
    PUT(w, int64_data, int64_t, 1);
    PUT(w, double_data, double, 1);
    REFUSED(GRAPH, m, "data is in double_data, expected int64_data");
    m = with_tensor(GRADD_DT_I64, 1, BUILD_DIMS(1), &w);
    ProtobufCBinaryData text = {2, (uint8_t *)"hi"};
    BUILD_APPEND(w, string_data, text);
    REFUSED(GRAPH, m, "initializer 0 'w': data is in string_data");
}

TEST(element_types_are_checked) {
    static const int codes[] = {0, 8, 14, 15, 17, 31, 32, 1000, -1}; /* string, complex, f8, ... */
    for (size_t i = 0; i < sizeof codes / sizeof codes[0]; i++) {
        tensor_t *w;
        proto_t *m = with_tensor(codes[i], 0, NULL, &w);
        build_raw(w, "12345678", 8);
        REFUSED(UNSUPPORTED, m, "initializer 0 'w': element type ");
    }
}

TEST(external_data_is_refused) {
    tensor_t *w;
    Onnx__StringStringEntryProto entry = ONNX__STRING_STRING_ENTRY_PROTO__INIT;
    entry.key = "location";
    entry.value = "../../etc/passwd";
    proto_t *m = with_tensor(GRADD_DT_F32, 1, BUILD_DIMS(1), &w);
    w->has_data_location = 1;
    w->data_location = ONNX__TENSOR_PROTO__LOCATION__EXTERNAL;
    BUILD_APPEND(w, external_data, &entry);
    REFUSED(EXTDATA, m, "initializer 0 'w': its data is in an external file ('../../etc/passwd')");
    m = with_tensor(GRADD_DT_F32, 1, BUILD_DIMS(1), &w);
    build_raw(w, "1234", 4);
    BUILD_APPEND(w, external_data, &entry); /* without the location flag */
    REFUSED(EXTDATA, m, "initializer 0 'w'");
    m = with_tensor(GRADD_DT_F32, 1, BUILD_DIMS(1), &w);
    build_raw(w, "1234", 4);
    w->has_data_location = 1;
    w->data_location = 2; /* unknown */
    REFUSED(EXTDATA, m, "initializer 0 'w'");
    Onnx__NodeProto *node;
    m = with_node(&node);
    Onnx__NodeProto *odd = build_node(m, "NoSuchOp", "odd", "y", "o");
    Onnx__AttributeProto *a = build_attr(odd, "value", BUILD_KIND(TENSOR));
    a->t = build_tensor("hidden", GRADD_DT_F32, 0, NULL);
    BUILD_APPEND(a->t, external_data, &entry);
    REFUSED(EXTDATA, m, "node 1 'odd' (NoSuchOp): attribute 'value': its data is in an external");
}

TEST(segments_are_refused) {
    tensor_t *w;
    proto_t *m = with_tensor(GRADD_DT_F32, 1, BUILD_DIMS(1), &w);
    build_raw(w, "1234", 4);
    w->has_segment = 1;
    REFUSED(UNSUPPORTED, m, "initializer 0 'w': segmented");
}

/* ---- attributes ---- */

/* A node without a row keeps its attributes, which shows all kinds at once. */
TEST(attribute_kinds_arrive) {
    Onnx__NodeProto *turn;
    proto_t *m = with_node(&turn);
    Onnx__NodeProto *odd = build_node(m, "NoSuchOp", "odd", "y", "o");
    build_attr_int(odd, "i", INT64_MIN);
    Onnx__AttributeProto *a = build_attr(odd, "f", BUILD_KIND(FLOAT));
    a->has_f = 1;
    a->f = 0.5f;
    a = build_attr(odd, "s", BUILD_KIND(STRING));
    a->has_s = 1;
    a->s = (ProtobufCBinaryData){4, (uint8_t *)"tanhXXXX"};
    build_attr_ints(odd, "ints", 3, BUILD_DIMS(5, -6, 7));
    build_attr_ints(odd, "none", 0, NULL);
    a = build_attr(odd, "floats", BUILD_KIND(FLOATS));
    PUT(a, floats, float, 0.25f, INFINITY);
    a = build_attr(odd, "t", BUILD_KIND(TENSOR));
    a->t = build_tensor("", GRADD_DT_I64, 1, BUILD_DIMS(2));
    build_raw(a->t, (int64_t[]){8, 9}, 16);
    build_attr(odd, "zero", BUILD_KIND(INT)); /* a zero that proto3 does not write */
    model_t *model = NULL;
    CHECK_OK(load(m, &model));
    gradd_attrs_t attrs = model->nodes[1].attrs;
    CHECK_EQ_INT(attrs.n, 8);
    CHECK(gradd_attr_int(attrs, "i", 0) == INT64_MIN);
    CHECK_NEAR(gradd_attr_float(attrs, "f", 0), 0.5, 0);
    CHECK_EQ_STR(gradd_attr_string(attrs, "s", ""), "tanh");
    CHECK_EQ_INT(gradd_attr_find(attrs, "s")->n, 4);
    CHECK_EQ_INT(gradd_attr_find(attrs, "ints")->n, 3);
    CHECK_EQ_INT(gradd_attr_find(attrs, "ints")->ints[1], -6);
    CHECK_EQ_INT(gradd_attr_find(attrs, "none")->n, 0);
    CHECK_EQ_INT(gradd_attr_find(attrs, "none")->kind, GRADD_ATTR_INTS);
    CHECK_NEAR(gradd_attr_find(attrs, "floats")->floats[0], 0.25, 0);
    CHECK(isinf(gradd_attr_find(attrs, "floats")->floats[1]));
    const gradd_view_t *t = &gradd_attr_find(attrs, "t")->tensor;
    CHECK_EQ_INT(t->type.dims[0], 2);
    CHECK_EQ_INT(((const int64_t *)t->data)[1], 9);
    CHECK_EQ_INT(gradd_attr_int(attrs, "zero", 3), 0);
    model_destroy(model);
}

TEST(attributes_must_fit_the_row) {
    Onnx__NodeProto *turn;
    proto_t *m = with_node(&turn);
    build_attr_int(turn, "permutation", 1);
    REFUSED(UNSUPPORTED, m, "node 0 'turn' (Transpose): attribute 'permutation': Transpose takes");
    m = with_node(&turn);
    build_attr_int(turn, "perm", 1);
    REFUSED(GRAPH, m, "node 0 'turn' (Transpose): attribute 'perm': is INT, expected INTS");
    m = with_node(&turn);
    build_attr(turn, "perm", BUILD_KIND(STRINGS));
    REFUSED(GRAPH, m, "attribute 'perm': is STRINGS, expected INTS");
    m = with_node(&turn);
    build_node(m, "Concat", "join", "x", "c");
    REFUSED(GRAPH, m, "node 1 'join' (Concat): attribute 'axis' is missing");
}

TEST(duplicate_attributes_are_refused) {
    Onnx__NodeProto *turn;
    proto_t *m = with_node(&turn);
    build_attr_ints(turn, "perm", 2, BUILD_DIMS(0, 1));
    build_attr_ints(turn, "perm", 2, BUILD_DIMS(1, 0));
    REFUSED(GRAPH, m, "node 0 'turn' (Transpose): attribute 'perm': is given twice");
}

TEST(attribute_kinds_are_checked) {
    Onnx__NodeProto *turn;
    proto_t *m = with_node(&turn);
    build_attr(turn, "perm", BUILD_KIND(UNDEFINED));
    REFUSED(GRAPH, m, "attribute 'perm': kind 0 is not an ONNX attribute kind");
    turn->attribute[0]->type = 99;
    REFUSED(GRAPH, m, "attribute 'perm': kind 99");
    turn->attribute[0]->type = -7;
    REFUSED(GRAPH, m, "attribute 'perm': kind -7");
    m = with_node(&turn);
    build_attr_ints(turn, "perm", 2, BUILD_DIMS(0, 1));
    turn->attribute[0]->has_i = 1;
    REFUSED(GRAPH, m, "attribute 'perm': is declared as INTS but holds INT");
    m = with_node(&turn);
    build_attr(build_node(m, "NoSuchOp", "odd", "y", "o"), "value", BUILD_KIND(TENSOR));
    REFUSED(GRAPH, m, "node 1 'odd' (NoSuchOp): attribute 'value': holds no tensor");
    m = with_node(&turn);
    build_attr_ints(turn, "perm", 2, BUILD_DIMS(0, 1));
    turn->attribute[0]->ref_attr_name = "outer";
    REFUSED(GRAPH, m, "attribute 'perm': refers to a function's attribute 'outer'");
}

TEST(subgraphs_are_checked) {
    Onnx__NodeProto *turn;
    Onnx__GraphProto body = ONNX__GRAPH_PROTO__INIT;
    proto_t *m = with_node(&turn);
    build_attr(build_node(m, "If", "branch", "y", "o"), "then_branch", BUILD_KIND(GRAPH))->g =
        &body;
    REFUSED(GRAPH, m, "node 1 'branch' (If): then_branch: the graph has no outputs");
    m = with_node(&turn);
    build_node(m, "If", "branch", "y", "o");
    REFUSED(GRAPH, m, "node 1 'branch' (If): attribute 'then_branch' is missing");
    m = with_node(&turn);
    build_attr(turn, "perm", BUILD_KIND(INTS))->g = &body; /* behind another kind */
    REFUSED(UNSUPPORTED, m, "node 0 'turn' (Transpose): attribute 'perm': subgraphs");
    m = with_node(&turn);
    build_attr(turn, "bodies", BUILD_KIND(GRAPHS));
    REFUSED(UNSUPPORTED, m, "attribute 'bodies': subgraphs");
}

TEST(attribute_text_is_checked) {
    Onnx__NodeProto *turn;
    proto_t *m = with_node(&turn);
    build_attr_int(turn, "", 1);
    REFUSED(GRAPH, m, "node 0 'turn' (Transpose): the attribute name is empty");
    turn->attribute[0]->name = NULL;
    REFUSED(GRAPH, m, "the attribute name is empty");
    m = with_node(&turn);
    Onnx__AttributeProto *a =
        build_attr(build_node(m, "NoSuchOp", "odd", "y", "o"), "mode", BUILD_KIND(STRING));
    a->has_s = 1;
    a->s = (ProtobufCBinaryData){3, (uint8_t *)"a\0b"};
    REFUSED(GRAPH, m, "attribute 'mode': the string has a control character (code 0 at byte 1)");
}

TEST(attribute_tensors_are_checked) {
    Onnx__NodeProto *turn;
    proto_t *m = with_node(&turn);
    Onnx__NodeProto *odd = build_node(m, "NoSuchOp", "odd", "y", "o");
    Onnx__AttributeProto *a = build_attr(odd, "value", BUILD_KIND(TENSOR));
    a->t = build_tensor("", GRADD_DT_F32, 1, BUILD_DIMS(4));
    build_raw(a->t, "12345678", 8);
    REFUSED(GRAPH, m, "node 1 'odd' (NoSuchOp): attribute 'value': raw_data has 8 bytes");
}

TEST(attributes_are_counted) {
    Onnx__NodeProto *turn;
    proto_t *m = with_node(&turn);
    Onnx__NodeProto *odd = build_node(m, "NoSuchOp", "odd", "y", "o");
    for (int i = 0; i < 257; i++) {
        char name[2] = {(char)('0' + i % 64), 0};
        build_attr_int(odd, name, i);
    }
    REFUSED(LIMIT, m, "node 1 'odd' (NoSuchOp): 257 attributes, the limit is 256");
}
