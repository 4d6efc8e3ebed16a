/* Rewriting a graph: parts of a recognised operator, nodes that a pass appends, and their order. */
#include "server/graph/match/match.h"
#include "tests/c/onnx_build.h"
#include "tests/test.h"

/* y = Relu(Neg(Abs(x))); z = Sigmoid(y) */
static graph_t *chain(model_t **out_model) {
    Onnx__ModelProto *proto = build_model();
    build_input(proto, "x", GRADD_DT_F32, 2, BUILD_DIMS(2, 3));
    build_node(proto, "Abs", "first", "x", "a");
    build_node(proto, "Neg", "second", "a", "b");
    build_node(proto, "Relu", "third", "b", "y");
    build_node(proto, "Sigmoid", "last", "y", "z");
    build_output(proto, "z");
    size_t n;
    uint8_t *bytes = build_pack(proto, &n);
    gradd_type_t x = {
        GRADD_DT_F32, 2, {2, 3}
    };
    int32_t output = 0;
    graph_options_t options = {.inputs = &x,
                               .outputs = &output,
                               .n_outputs = 1,
                               .plain = true,
                               .backend = &gradd_backend_cpu};
    graph_t *g = NULL;
    CHECK_OK(model_load(bytes, n, NULL, out_model));
    CHECK_OK(graph_create(*out_model, &options, &g));
    CHECK_EQ_INT(g->n_nodes, 4);
    return g;
}

static void finish(graph_t *g, model_t *m) {
    graph_destroy(g);
    model_destroy(m);
}

TEST(a_fused_node_names_the_nodes_between_its_operands_and_its_result) {
    model_t *m;
    graph_t *g = chain(&m);
    gradd_val_t y = g->nodes[2].out[0];
    match_fused_t tanh = {.op = "Tanh", .in = &g->inputs[0], .n_in = 1};
    CHECK_OK(match_replace(g, &g->nodes[2], &tanh));
    const graph_node_t *n = &g->nodes[2];
    CHECK_EQ_STR(n->op->name, "Tanh");
    CHECK_EQ_INT(n->in[0], g->inputs[0]);
    CHECK_EQ_INT(n->out[0], y);
    CHECK_EQ_INT(n->n_parts, 3);
    for (int32_t origin = 0; origin < 3; origin++) {
        int found = 0;
        for (int i = 0; i < n->n_parts; i++)
            found += n->parts[i] == origin;
        CHECK_EQ_INT(found, 1);
    }
    /* a second pass that takes the result of the first inherits its parts */
    match_fused_t erf = {.op = "Erf", .in = &g->inputs[0], .n_in = 1};
    CHECK_OK(match_replace(g, &g->nodes[3], &erf));
    CHECK_EQ_INT(g->nodes[3].n_parts, 4);
    finish(g, m);
}

TEST(an_operator_that_does_not_fit_leaves_the_node_alone) {
    model_t *m;
    graph_t *g = chain(&m);
    int64_t to = GRADD_DT_F64;
    gradd_attr_t attr = {.name = "to", .kind = GRADD_ATTR_INT, .i = to};
    match_fused_t cast = {"Cast", &g->inputs[0], 1, &attr, 1, NULL};
    CHECK_OK(match_replace(g, &g->nodes[2], &cast)); /* another type */
    CHECK_EQ_STR(g->nodes[2].op->name, "Relu");
    match_fused_t unknown = {.op = "NoSuchOperator", .in = &g->inputs[0], .n_in = 1};
    CHECK_STATUS(GRADD_E_INTERNAL, match_replace(g, &g->nodes[2], &unknown));
    finish(g, m);
}

TEST(appended_nodes_are_sorted_in_front_of_their_first_reader) {
    model_t *m;
    graph_t *g = chain(&m);
    gradd_val_t exp, both;
    gradd_val_t neg_in = g->nodes[1].in[0];
    match_fused_t first = {.op = "Exp", .in = &neg_in, .n_in = 1};
    CHECK_OK(match_emit(g, &g->nodes[1], &first, &exp, 1));
    match_fused_t second = {.op = "Sqrt", .in = &exp, .n_in = 1};
    CHECK_OK(match_emit(g, &g->nodes[1], &second, &both, 1));
    CHECK_EQ_INT(g->n_nodes, 6);
    CHECK_EQ_INT(g->nodes[5].origin, 1);
    g->nodes[1].in[0] = both; /* Neg now reads what stands behind it */
    CHECK_OK(graph_sort(g));
    const char *want[] = {"Abs", "Exp", "Sqrt", "Neg", "Relu", "Sigmoid"};
    for (int i = 0; i < 6; i++) {
        CHECK_EQ_STR(g->nodes[i].op->name, want[i]);
        CHECK_EQ_INT(g->values[g->nodes[i].out[0]]->node, i);
    }
    /* the table of equal nodes followed */
    gradd_val_t again;
    CHECK_OK(match_emit(g, &g->nodes[1], &second, &again, 1));
    CHECK_EQ_INT(again, both);
    CHECK_EQ_INT(g->n_nodes, 6);
    finish(g, m);
}

TEST(a_cycle_is_refused) {
    model_t *m;
    graph_t *g = chain(&m);
    g->nodes[1].in[0] = g->nodes[2].out[0];
    CHECK_STATUS(GRADD_E_INTERNAL, graph_sort(g));
    finish(g, m);
}
