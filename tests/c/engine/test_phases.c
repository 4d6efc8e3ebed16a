/* The phases of rewriting: what a number says, one pass of the joint and one of the placed phase,
 * nodes that may not be merged, and which inputs a plan knows as parameters. */
#include "server/graph/match/match.h"
#include "server/plan/plan.h"
#include "tests/c/onnx_build.h"
#include "tests/test.h"

#include <string.h>

enum { SIZE = 64 };

static const gradd_type_t square = {
    GRADD_DT_F32, 2, {SIZE, SIZE}
};

static model_t *load(Onnx__ModelProto *proto, const char *output) {
    model_t *m = NULL;
    size_t n;
    build_output(proto, output);
    uint8_t *bytes = build_pack(proto, &n);
    CHECK_OK(model_load(bytes, n, NULL, &m));
    return m;
}

/* A plan of output 0 with the gradient of all inputs. */
static gradd_status_t plan_of(model_t *m, const gradd_type_t *types, gradd_plan_options_t o,
                              gradd_plan_t **out) {
    static const int32_t all[] = {0, 1, 2, 3};
    const gradd_device_options_t options = {.threads = 1, .compile_ms = GRADD_COMPILE_MS};
    o.inputs = types, o.n_inputs = m->n_inputs;
    o.grads = all, o.n_grads = m->n_inputs;
    o.outputs = o.grad_outputs = all, o.n_outputs = o.n_grad_outputs = 1;
    CHECK_OK(gradd_device_open(&options, &o.device));
    gradd_status_t status = gradd_plan_create(m, &o, out);
    if (status) gradd_device_close(o.device);
    return status;
}

static void destroy(gradd_plan_t *plan, model_t *m) {
    gradd_device_t *device = plan->device;
    gradd_plan_destroy(plan);
    gradd_device_close(device);
    model_destroy(m);
}

TEST(a_number_says_the_phase) {
    CHECK_EQ_INT(phase_of(0), PHASE_FORWARD);
    CHECK_EQ_INT(phase_of(99), PHASE_FORWARD);
    CHECK_EQ_INT(phase_of(100), PHASE_JOINT);
    CHECK_EQ_INT(phase_of(250), PHASE_PLACED);
    CHECK_EQ_INT(phase_of(300), PHASE_END);
    CHECK_EQ_INT(phase_of(-1), PHASE_END);
}

/* ---- joint: casts of a backward ---- */

/* y = Tanh(cast(cast(x))): the backward casts the other way round. */
static int backward_launches(gradd_dtype_t x, gradd_dtype_t middle, bool plain) {
    static const int64_t dims[] = {SIZE};
    const gradd_type_t type = {x, 1, {SIZE}};
    Onnx__ModelProto *proto = build_model();
    build_input(proto, "x", x, 1, dims);
    build_attr_int(build_node(proto, "Cast", "first", "x", "a"), "to", middle);
    build_attr_int(build_node(proto, "Cast", "second", "a", "b"), "to", x);
    build_node(proto, "Tanh", "last", "b", "y");
    model_t *m = load(proto, "y");
    gradd_plan_t *plan;
    CHECK_OK(
        plan_of(m, &type, (gradd_plan_options_t){.flags = plain ? GRADD_PLAN_PLAIN : 0}, &plan));
    CHECK(gradd_plan_info(plan)->has_grad[0]);
    const int n = gradd_plan_info(plan)->n_launches_backward;
    destroy(plan, m);
    return n;
}

TEST(casts_of_a_backward_that_round_nothing_are_left_out) {
    CHECK_EQ_INT(backward_launches(GRADD_DT_BF16, GRADD_DT_F32, true), 3);
    CHECK_EQ_INT(backward_launches(GRADD_DT_BF16, GRADD_DT_F32, false), 1);
    CHECK_EQ_INT(backward_launches(GRADD_DT_F32, GRADD_DT_F64, false), 1);
    CHECK_EQ_INT(backward_launches(GRADD_DT_F32, GRADD_DT_BF16, false), 3); /* this one rounds */
}

/* ---- placed: gradients of the client as early as can be ---- */

/* h = x W, y = h V */
static gradd_plan_t *two_products(model_t **out_model) {
    const gradd_type_t types[] = {square, square, square};
    Onnx__ModelProto *proto = build_model();
    build_input(proto, "x", GRADD_DT_F32, 2, square.dims);
    build_input(proto, "W", GRADD_DT_F32, 2, square.dims);
    build_input(proto, "V", GRADD_DT_F32, 2, square.dims);
    build_node(proto, "MatMul", "first", "x,W", "h");
    build_node(proto, "MatMul", "second", "h,V", "y");
    *out_model = load(proto, "y");
    gradd_plan_t *plan;
    CHECK_OK(plan_of(*out_model, types, (gradd_plan_options_t){0}, &plan));
    return plan;
}

TEST(a_weight_s_gradient_is_made_before_what_goes_on) {
    model_t *m;
    gradd_plan_t *plan = two_products(&m);
    const program_t *p = &plan->variants->program;
    CHECK_EQ_INT(p->n, 4);
    CHECK_EQ_INT(p->launches[0].loc[2].kind, LOC_GRAD); /* of V, whose rule emits that of h first */
    CHECK_EQ_INT(p->launches[0].loc[2].index, 2);
    CHECK_EQ_INT(p->launches[1].loc[2].kind, LOC_ARENA); /* of h */
    /* so the kept h and its gradient share a place */
    CHECK_EQ_INT(p->launches[1].loc[2].offset, plan->forward.launches[0].loc[2].offset);
    for (int k = 0; k < p->n; k++) {
        const graph_node_t *n = &plan->graph->nodes[p->launches[k].node];
        CHECK(n->backward);
        CHECK_EQ_INT(p->nodes[k], p->launches[k].node);
    }
    destroy(plan, m);
}

/* ---- nodes that may not be merged ---- */

TEST(a_node_that_may_not_be_merged_stays_alone) {
    model_t *m;
    gradd_plan_t *plan = two_products(&m);
    graph_t *g = plan->graph;
    graph_emit_t e = {
        .op = g->nodes[0].op, .opset = 20, .in = g->nodes[0].in, .n_in = 2, .n_out = 1};
    gradd_val_t same, own, other, again;
    CHECK_OK(graph_emit(g, &e, &same));
    CHECK_EQ_INT(same, g->nodes[0].out[0]);
    e.no_merge = true;
    CHECK_OK(graph_emit(g, &e, &own)); /* a copy of the existing node */
    CHECK(own != same);
    CHECK(g->nodes[g->values[own]->node].no_merge);
    CHECK_OK(graph_emit(g, &e, &other));
    CHECK(other != own);
    CHECK_OK(graph_rehash(g));
    e.no_merge = false;
    CHECK_OK(graph_emit(g, &e, &again)); /* neither copy takes its place */
    CHECK_EQ_INT(again, same);
    destroy(plan, m);
}

/* ---- parameters ---- */

static model_t *sum_of_inputs(void) {
    Onnx__ModelProto *proto = build_model();
    build_input(proto, "x", GRADD_DT_F32, 2, square.dims);
    build_input(proto, "w", GRADD_DT_F32, 2, square.dims);
    build_node(proto, "Add", "add", "x,w", "y");
    return load(proto, "y");
}

TEST(a_plan_knows_its_parameters) {
    static const gradd_type_t types[] = {square, square};
    const int32_t second = 1;
    model_t *m = sum_of_inputs();
    gradd_plan_t *plan;
    CHECK_OK(
        plan_of(m, types, (gradd_plan_options_t){.parameters = &second, .n_parameters = 1}, &plan));
    CHECK(!gradd_plan_is_parameter(plan, 0) && gradd_plan_is_parameter(plan, 1));
    CHECK(!gradd_plan_is_parameter(plan, 2) && !gradd_plan_is_parameter(plan, -1));
    CHECK(!graph_is_parameter(plan->graph, plan->graph->outputs[0]));
    CHECK(!graph_is_parameter(plan->graph, GRADD_NONE));
    CHECK_EQ_INT(gradd_plan_info(plan)->parameter_bytes, gradd_type_bytes(&square));
    destroy(plan, m);
    m = sum_of_inputs();
    CHECK_OK(plan_of(m, types, (gradd_plan_options_t){0}, &plan));
    CHECK(!gradd_plan_is_parameter(plan, 1));
    CHECK_EQ_INT(gradd_plan_info(plan)->parameter_bytes, 0);
    destroy(plan, m);
}

TEST(a_parameter_that_is_no_input_is_named) {
    static const gradd_type_t types[] = {square, square};
    static const int32_t outside[] = {0, 2}, twice[] = {1, 1};
    model_t *m = sum_of_inputs();
    gradd_plan_t *plan = NULL;
    gradd_plan_options_t o = {.parameters = outside, .n_parameters = 2};
    CHECK_STATUS(GRADD_E_TENSOR, plan_of(m, types, o, &plan));
    CHECK_ERROR_HAS("parameter 1: 2 is outside 0..1");
    o.parameters = twice;
    CHECK_STATUS(GRADD_E_TENSOR, plan_of(m, types, o, &plan));
    CHECK_ERROR_HAS("parameter 1 is repeated");
    model_destroy(m);
}
