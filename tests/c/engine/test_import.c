/* Import of ONNX graphs: what a good model becomes, and one broken model per rule. Every refusal
 * must carry its code and name the culprit. Tensors and attributes: test_import_data.c.
 */
#include <stdio.h>
#include <string.h>

#include "kernels/contract/registry.h"
#include "server/graph/model.h"
#include "tests/c/onnx_build.h"
#include "tests/test.h"

typedef Onnx__ModelProto proto_t;

/* x f32[N,3], w f32[3] -> Concat 'join' -> c -> Transpose 'turn' -> y */
static proto_t *base(void) {
    proto_t *m = build_model();
    build_input(m, "x", GRADD_DT_F32, 2, BUILD_DIMS(-1, 3));
    build_input(m, "z", GRADD_DT_F32, 2, BUILD_DIMS(4, 3));
    build_attr_int(build_node(m, "Concat", "join", "x,z", "c"), "axis", 0);
    build_attr_ints(build_node(m, "Transpose", "turn", "c", "y"), "perm", 2, BUILD_DIMS(1, 0));
    build_output(m, "y");
    return m;
}

static gradd_status_t load(const proto_t *m, const model_limits_t *limits, model_t **out) {
    size_t n;
    uint8_t *bytes = build_pack(m, &n);
    return model_load(bytes, n, limits, out);
}

#define REFUSED_WITH(limits, code, proto, part)                                                    \
    do {                                                                                           \
        model_t *refused = NULL;                                                                   \
        CHECK_STATUS(GRADD_E_##code, load(proto, limits, &refused));                               \
        CHECK(refused == NULL);                                                                    \
        CHECK_ERROR_HAS(part);                                                                     \
    } while (0)
#define REFUSED(code, proto, part) REFUSED_WITH(NULL, code, proto, part)

/* ---- what a good model becomes ---- */

TEST(a_good_model_is_complete) {
    model_t *model = NULL;
    CHECK_OK(load(base(), NULL, &model));
    CHECK_EQ_INT(model->opset, 20);
    CHECK_EQ_INT(model->n_values, 4);
    CHECK_EQ_INT(model->n_nodes, 2);
    CHECK_EQ_INT(model->n_unsupported, 0);
    CHECK_EQ_INT(model->n_inputs, 2);
    const model_value_t *x = &model->values[model->inputs[0]];
    CHECK_EQ_STR(x->name, "x");
    CHECK_EQ_INT(x->dtype, GRADD_DT_F32);
    CHECK_EQ_INT(x->rank, 2);
    CHECK_EQ_INT(x->dims[0], -1);
    CHECK_EQ_INT(x->dims[1], 3);
    CHECK(x->known.data == NULL);
    const model_node_t *join = &model->nodes[0], *turn = &model->nodes[1];
    CHECK_EQ_STR(join->name, "join");
    CHECK_EQ_STR(join->op_type, "Concat");
    CHECK(join->op == gradd_op_find("", "Concat", 20));
    CHECK_EQ_INT(join->index, 0);
    CHECK_EQ_INT(join->opset, 20);
    CHECK_EQ_INT(join->n_in, 2);
    CHECK_EQ_INT(join->in[0], model->inputs[0]);
    CHECK_EQ_INT(join->in[1], model->inputs[1]);
    CHECK_EQ_INT(gradd_attr_int(join->attrs, "axis", 7), 0);
    CHECK_EQ_INT(turn->index, 1);
    CHECK_EQ_INT(turn->in[0], join->out[0]);
    CHECK_EQ_INT(turn->attrs.v[0].n, 2);
    CHECK_EQ_INT(turn->attrs.v[0].ints[0], 1);
    CHECK_EQ_INT(model->outputs[0], turn->out[0]);
    CHECK_EQ_INT(model->values[turn->out[0]].rank, -1);
    model_destroy(model);
    model_destroy(NULL);
}

TEST(nodes_without_a_name_get_one) {
    proto_t *m = base();
    m->graph->node[1]->name = NULL;
    model_t *model = NULL;
    CHECK_OK(load(m, NULL, &model));
    CHECK_EQ_STR(model->nodes[1].name, "node_1");
    model_destroy(model);
}

TEST(unsupported_operators_are_counted) {
    proto_t *m = base();
    Onnx__NodeProto *node = build_node(m, "NoSuchOp", "odd", "y,,x", "a,,b,");
    build_attr_int(node, "k", 3);
    build_attr(node, "names", BUILD_KIND(STRINGS));
    build_opset(m, "org.example", 7);
    build_node(m, "Concat", "foreign", "a", "f")->domain = "org.example";
    model_t *model = NULL;
    CHECK_OK(load(m, NULL, &model));
    CHECK_EQ_INT(model->n_unsupported, 2);
    const model_node_t *odd = &model->nodes[2];
    CHECK(odd->op == NULL);
    CHECK_EQ_STR(odd->op_type, "NoSuchOp");
    CHECK_EQ_STR(odd->domain, "");
    CHECK_EQ_INT(odd->n_in, 3);
    CHECK_EQ_INT(odd->in[1], -1);
    CHECK_EQ_INT(odd->n_out, 3);
    CHECK_EQ_INT(odd->out[1], -1);
    CHECK_EQ_INT(odd->attrs.n, 1);
    CHECK_EQ_INT(gradd_attr_int(odd->attrs, "k", 0), 3);
    CHECK_EQ_STR(model->nodes[3].domain, "org.example");
    CHECK_EQ_INT(model->nodes[3].opset, 7);
    model_destroy(model);
}

TEST(trailing_empty_names_are_dropped) {
    proto_t *m = base();
    BUILD_APPEND(m->graph->node[1], input, "");
    BUILD_APPEND(m->graph->node[1], output, "");
    model_t *model = NULL;
    CHECK_OK(load(m, NULL, &model));
    CHECK_EQ_INT(model->nodes[1].n_in, 1);
    CHECK_EQ_INT(model->nodes[1].n_out, 1);
    model_destroy(model);
}

TEST(a_domain_has_two_spellings) {
    proto_t *m = base();
    m->opset_import[0]->domain = "ai.onnx";
    m->graph->node[1]->domain = "ai.onnx";
    model_t *model = NULL;
    CHECK_OK(load(m, NULL, &model));
    CHECK_EQ_INT(model->n_unsupported, 0);
    CHECK_EQ_INT(model->opset, 20);
    model_destroy(model);
}

TEST(an_input_may_have_a_default) {
    proto_t *m = base();
    build_raw(build_init(m, "z", GRADD_DT_F32, 2, BUILD_DIMS(4, 3)), (float[12]){1, 2}, 48);
    model_t *model = NULL;
    CHECK_OK(load(m, NULL, &model));
    CHECK_EQ_INT(model->n_inputs, 2);
    CHECK_EQ_INT(model->n_values, 4);
    const model_value_t *z = &model->values[model->inputs[1]];
    CHECK_EQ_INT(z->dtype, GRADD_DT_F32);
    CHECK_NEAR(((const float *)z->known.data)[1], 2, 0);
    model_destroy(model);
}

TEST(an_input_may_be_an_output) {
    proto_t *m = base();
    build_output(m, "x");
    model_t *model = NULL;
    CHECK_OK(load(m, NULL, &model));
    CHECK_EQ_INT(model->outputs[1], model->inputs[0]);
    model_destroy(model);
}

/* ---- the header ---- */

TEST(header_must_be_onnx) {
    proto_t *m = base();
    m->has_ir_version = 0;
    REFUSED(MODEL, m, "IR version 0");
    m = base();
    m->ir_version = 2;
    REFUSED(MODEL, m, "IR version 2");
    m = base();
    m->graph = NULL;
    REFUSED(MODEL, m, "no graph");
}

TEST(opsets_outside_the_range) {
    proto_t *m = base();
    m->opset_import[0]->version = 12;
    REFUSED(UNSUPPORTED, m, "opset 12 of 'ai.onnx' is not supported, 13 to 25 are");
    m->opset_import[0]->version = 26;
    REFUSED(UNSUPPORTED, m, "opset 26 of 'ai.onnx'");
    m->opset_import[0]->version = -1;
    REFUSED(UNSUPPORTED, m, "opset -1");
    m->opset_import[0]->version = (1ll << 32) + 20;
    REFUSED(UNSUPPORTED, m, "opset 4294967316");
    for (int opset = 13; opset <= 25; opset++) {
        model_t *model = NULL;
        m->opset_import[0]->version = opset;
        CHECK_OK(load(m, NULL, &model));
        CHECK_EQ_INT(model->opset, opset);
        model_destroy(model);
    }
    build_opset(m, "com.gradd", 2);
    REFUSED(UNSUPPORTED, m, "opset 2 of 'com.gradd' is not supported, 1 to 1 are");
}

TEST(opset_imports_must_be_unambiguous) {
    proto_t *m = base();
    build_opset(m, "ai.onnx", 21);
    REFUSED(GRAPH, m, "domain 'ai.onnx' is imported twice, with opsets 20 and 21");
    m = base();
    m->opset_import[0]->domain = "com.gradd";
    m->opset_import[0]->version = 1;
    REFUSED(GRAPH, m, "no opset of 'ai.onnx'");
    m = base();
    m->graph->node[0]->domain = "org.example";
    REFUSED(GRAPH, m, "node 0 'join' (Concat): domain 'org.example' is not among");
    m = base();
    for (int i = 0; i < 64; i++)
        build_opset(m, "org.example", 1);
    REFUSED(LIMIT, m, "65 opset imports, the limit is 64");
}

TEST(functions_and_training_info_are_refused) {
    proto_t *m = base();
    ProtobufCBinaryData empty = {0, NULL};
    BUILD_APPEND(m, functions, empty);
    REFUSED(UNSUPPORTED, m, "1 functions");
    m = base();
    BUILD_APPEND(m, training_info, empty);
    REFUSED(UNSUPPORTED, m, "training_info");
    m = base();
    BUILD_APPEND(m->graph, sparse_initializer, empty);
    REFUSED(UNSUPPORTED, m, "1 sparse initializers");
}

/* ---- names and order ---- */

TEST(dangling_names_are_refused) {
    proto_t *m = base();
    m->graph->node[0]->input[1] = "nowhere";
    REFUSED(GRAPH, m, "node 0 'join' (Concat): input 1 'nowhere' is not defined");
    m = base();
    m->graph->output[0]->name = "nothing";
    REFUSED(GRAPH, m, "graph output 0 'nothing' is not produced");
    m = base();
    m->graph->output[0]->name = NULL;
    REFUSED(GRAPH, m, "graph output 0: the name is empty");
    m = base();
    m->graph->n_output = 0;
    REFUSED(GRAPH, m, "no outputs");
}

TEST(nodes_must_be_in_order) {
    proto_t *m = base();
    Onnx__NodeProto *first = m->graph->node[0];
    m->graph->node[0] = m->graph->node[1];
    m->graph->node[1] = first;
    REFUSED(GRAPH, m, "node 0 'turn' (Transpose): input 0 'c' is produced by node 1, which comes");
}

TEST(cycles_are_refused) {
    proto_t *m = base();
    m->graph->node[1]->input[0] = "y";
    REFUSED(GRAPH, m, "node 1 'turn' (Transpose): input 0 'y' is the node's own output");
    m = base();
    m->graph->node[0]->input[1] = "y";
    REFUSED(GRAPH, m, "node 0 'join' (Concat): input 1 'y' is produced by node 1");
}

TEST(duplicate_definitions_are_refused) {
    proto_t *m = base();
    m->graph->node[1]->output[0] = "c";
    REFUSED(GRAPH, m, "node 1 'turn' (Transpose): output 0 'c' is already an output of node 0");
    m = base();
    m->graph->node[1]->output[0] = "x";
    REFUSED(GRAPH, m, "output 0 'x' is already a graph input");
    m = base();
    build_raw(build_init(m, "k", GRADD_DT_F32, 0, NULL), "1234", 4);
    m->graph->node[1]->output[0] = "k";
    REFUSED(GRAPH, m, "output 0 'k' is already an initializer");
    m = base();
    build_node(m, "NoSuchOp", "twin", "y", "t,t");
    REFUSED(GRAPH, m, "node 2 'twin' (NoSuchOp): output 1 't' is already an output of node 2");
    m = base();
    build_input(m, "x", GRADD_DT_F32, 0, NULL);
    REFUSED(GRAPH, m, "graph input 'x' is listed twice (positions 0 and 2)");
    m = base();
    build_raw(build_init(m, "k", GRADD_DT_F32, 0, NULL), "1234", 4);
    build_raw(build_init(m, "k", GRADD_DT_F32, 0, NULL), "1234", 4);
    REFUSED(GRAPH, m, "initializer 'k' is given twice");
}

/* A default given twice hides behind the pair that is allowed. */
TEST(two_defaults_of_one_input_are_refused) {
    proto_t *m = base();
    float data[12] = {0};
    build_raw(build_init(m, "z", GRADD_DT_F32, 2, BUILD_DIMS(4, 3)), data, 48);
    build_raw(build_init(m, "z", GRADD_DT_F32, 2, BUILD_DIMS(4, 3)), data, 48);
    REFUSED(GRAPH, m, "initializer 'z' is given twice");
    m = base();
    build_raw(build_init(m, "z", GRADD_DT_F32, 2, BUILD_DIMS(4, 3)), data, 48);
    m->graph->node[1]->output[0] = "z";
    REFUSED(GRAPH, m, "node 1 'turn' (Transpose): output 0 'z' is already an initializer");
}

TEST(names_must_be_there_and_printable) {
    proto_t *m = base();
    m->graph->input[1]->name = "";
    REFUSED(GRAPH, m, "graph input 1: the name is empty");
    m = base();
    build_init(m, "", GRADD_DT_F32, 0, NULL);
    REFUSED(GRAPH, m, "initializer 0: the name is empty");
    m = base();
    m->graph->node[1]->op_type = NULL;
    REFUSED(GRAPH, m, "node 1 'turn' (): the operator is empty");
    m = base();
    m->graph->node[1]->name = "a\nERROR forged log line";
    REFUSED(GRAPH, m, "node name has a control character (code 10 at byte 1)");
    m = base();
    m->graph->input[0]->name = "x\x1b[2J";
    REFUSED(GRAPH, m, "graph input 0: the name has a control character (code 27");
}

TEST(long_names_are_refused) {
    char name[1100];
    memset(name, 'n', sizeof name);
    name[sizeof name - 1] = 0;
    proto_t *m = base();
    m->graph->node[1]->name = name;
    REFUSED(LIMIT, m, "has 1099 bytes, the limit is 1024");
    name[1024] = 0;
    model_t *model = NULL;
    CHECK_OK(load(m, NULL, &model));
    model_destroy(model);
    /* long names are cut in messages, between characters: 79 bytes, then two of one character */
    memset(name, 'n', sizeof name);
    memcpy(name + 79, "\xc3\xa4...", 6);
    m->graph->node[1]->input[0] = "gone";
    REFUSED(GRAPH, m, "nnn' (Transpose): input 0 'gone'");
    CHECK(strstr(gradd_error_message(), "\xc3") == NULL);
}

/* ---- operators ---- */

TEST(arity_is_checked) {
    proto_t *m = base();
    BUILD_APPEND(m->graph->node[1], input, "x");
    REFUSED(GRAPH, m, "node 1 'turn' (Transpose): 2 inputs, expected 1");
    m = base();
    m->graph->node[1]->n_input = 0;
    REFUSED(GRAPH, m, "node 1 'turn' (Transpose): 0 inputs, expected 1");
    m = base();
    BUILD_APPEND(m->graph->node[1], output, "extra");
    REFUSED(GRAPH, m, "node 1 'turn' (Transpose): 2 outputs, expected 1");
    m = base();
    m->graph->node[0]->input[0] = "";
    REFUSED(GRAPH, m, "node 0 'join' (Concat): input 0 has no name");
    m = base();
    for (int i = 0; i < 63; i++)
        BUILD_APPEND(m->graph->node[0], input, "x");
    REFUSED(GRAPH, m, "node 0 'join' (Concat): 65 inputs, expected 1 to 64");
}

TEST(internal_operators_are_refused) {
    int found = 0;
    for (size_t f = 0; f < gradd_op_family_count; f++)
        for (size_t i = 0; i < gradd_op_families[f]->n; i++) {
            const gradd_op_t *op = &gradd_op_families[f]->v[i];
            if (!(op->flags & GRADD_OP_INTERNAL)) continue;
            proto_t *m = base();
            if (op->domain[0]) build_opset(m, op->domain, 1);
            build_node(m, op->name, "sneak", "y", "s")->domain = (char *)op->domain;
            REFUSED(GRAPH, m, "node 2 'sneak' (");
            CHECK_ERROR_HAS("internal to gradd");
            found++;
        }
    CHECK(found > 0);
}

/* ---- inputs ---- */

TEST(inputs_must_be_tensors) {
    proto_t *m = base();
    m->graph->input[0]->type = NULL;
    REFUSED(GRAPH, m, "graph input 0 'x': has no tensor type");
    m = base();
    Onnx__TypeProto__Sequence sequence = ONNX__TYPE_PROTO__SEQUENCE__INIT;
    m->graph->input[1]->type->sequence_type = &sequence;
    REFUSED(UNSUPPORTED, m, "graph input 1 'z': is a sequence");
    m = base();
    Onnx__TypeProto__Optional optional = ONNX__TYPE_PROTO__OPTIONAL__INIT;
    m->graph->input[1]->type->optional_type = &optional;
    REFUSED(UNSUPPORTED, m, "graph input 1 'z': is an optional");
    m = base();
    m->graph->input[0]->type->tensor_type->elem_type = 8; /* string */
    REFUSED(UNSUPPORTED, m, "graph input 0 'x': element type 8");
}

TEST(input_shapes_are_checked) {
    proto_t *m = base();
    m->graph->input[1]->type->tensor_type->shape->dim[0]->dim_value = -4;
    REFUSED(GRAPH, m, "graph input 1 'z': dimension 0 is -4");
    m = base();
    m->graph->input[1]->type->tensor_type->shape->dim[0]->dim_value = INT64_MAX;
    REFUSED(LIMIT, m, "graph input 1 'z': the size in bytes overflows");
    m = base();
    build_input(m, "deep", GRADD_DT_F32, 9, BUILD_DIMS(1, 1, 1, 1, 1, 1, 1, 1, 1));
    REFUSED(LIMIT, m, "graph input 2 'deep': rank 9 is above the limit of 8");
    m = base();
    m->graph->input[0]->type->tensor_type->shape = NULL;
    model_t *model = NULL;
    CHECK_OK(load(m, NULL, &model));
    CHECK_EQ_INT(model->values[model->inputs[0]].rank, -1);
    model_destroy(model);
}

TEST(defaults_must_match_their_input) {
    proto_t *m = base();
    build_raw(build_init(m, "z", GRADD_DT_I32, 2, BUILD_DIMS(4, 3)), (float[12]){0}, 48);
    REFUSED(GRAPH, m, "initializer 0 'z': is i32[4,3], but the graph input");
    m = base();
    build_raw(build_init(m, "z", GRADD_DT_F32, 2, BUILD_DIMS(3, 4)), (float[12]){0}, 48);
    REFUSED(GRAPH, m, "initializer 0 'z': is f32[3,4]");
}

/* ---- limits ---- */

TEST(counts_are_limited) {
    model_limits_t limits = model_default_limits;
    limits.max_nodes = 1;
    REFUSED_WITH(&limits, LIMIT, base(), "2 nodes, the limit is 1");
    limits = model_default_limits;
    limits.max_values = 3;
    REFUSED_WITH(&limits, LIMIT, base(), "4 values, the limit is 3");
    limits = model_default_limits;
    limits.max_heap_bytes = 2000;
    REFUSED_WITH(&limits, LIMIT, base(), "more than 2000 bytes");
    proto_t *m = base();
    for (int i = 0; i < 10; i++)
        build_output(m, "y");
    limits = model_default_limits;
    limits.max_values = 8;
    REFUSED_WITH(&limits, LIMIT, m, "11 graph outputs, the limit is 8");
}

/* Long chains and wide fans load in time that grows with n log n. */
TEST(large_graphs_load) {
    enum { N = 50000 };
    proto_t *m = base();
    char in[32] = "y", out[32];
    m->graph->node = build_alloc((N + 2) * sizeof m->graph->node[0]);
    m->graph->n_node = 0;
    for (int i = 0; i < N; i++) {
        snprintf(out, sizeof out, "v%d", N - i); /* sorted against the order of definition */
        Onnx__NodeProto *node = build_alloc(sizeof *node);
        onnx__node_proto__init(node);
        node->op_type = "Transpose";
        BUILD_APPEND(node, input, build_copy(i ? in : "x", strlen(i ? in : "x")));
        BUILD_APPEND(node, output, build_copy(out, strlen(out)));
        m->graph->node[m->graph->n_node++] = node;
        memcpy(in, out, sizeof in);
    }
    m->graph->output[0]->name = "v1";
    model_t *model = NULL;
    CHECK_OK(load(m, NULL, &model));
    CHECK_EQ_INT(model->n_nodes, N);
    CHECK_EQ_INT(model->nodes[N - 1].in[0], model->nodes[N - 2].out[0]);
    model_destroy(model);
}
