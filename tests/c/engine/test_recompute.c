/* Values that a plan computes again: clones of forward nodes, each in front of its first reader,
 * with the bits of the plan that keeps everything; which of them, by budget or policy. */
#include "server/plan/recompute.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tests/c/onnx_build.h"
#include "tests/c/tested_device.h"
#include "tests/test.h"

enum { SIZE = 64, LAYERS = 6, ELEMENTS = SIZE * SIZE, BYTES = ELEMENTS * 4 };

/* h = h + Tanh(h W) V, so many times: W and V of each layer behind x. */
typedef struct net_s {
    model_t *model;
    gradd_device_t *device;
    gradd_type_t types[1 + 2 * LAYERS];
    int32_t all[1 + 2 * LAYERS];
} net_t;

static void add_layer(Onnx__ModelProto *proto, int i) {
    char text[8][32];
    const int64_t dims[] = {SIZE, SIZE};
    snprintf(text[0], 32, "h%d", i), snprintf(text[1], 32, "w%d", i);
    snprintf(text[2], 32, "v%d", i), snprintf(text[3], 32, "h%d,w%d", i, i);
    snprintf(text[4], 32, "a%d", i), snprintf(text[5], 32, "t%d", i);
    snprintf(text[6], 32, "t%d,v%d", i, i), snprintf(text[7], 32, "b%d", i);
    build_input(proto, text[1], GRADD_DT_F32, 2, dims);
    build_input(proto, text[2], GRADD_DT_F32, 2, dims);
    build_node(proto, "MatMul", text[4], text[3], text[4]);
    build_node(proto, "Tanh", text[5], text[4], text[5]);
    build_node(proto, "MatMul", text[7], text[6], text[7]);
    snprintf(text[1], 32, "h%d,b%d", i, i), snprintf(text[2], 32, "h%d", i + 1);
    build_node(proto, "Add", text[2], text[1], text[2]);
}

static void make_net(net_t *net) {
    Onnx__ModelProto *proto = build_model();
    char last[8];
    size_t n;
    build_input(proto, "h0", GRADD_DT_F32, 2, BUILD_DIMS(SIZE, SIZE));
    for (int i = 0; i < LAYERS; i++)
        add_layer(proto, i);
    snprintf(last, sizeof last, "h%d", LAYERS);
    build_output(proto, last);
    uint8_t *bytes = build_pack(proto, &n);
    CHECK_OK(model_load(bytes, n, NULL, &net->model));
    for (int i = 0; i < 1 + 2 * LAYERS; i++) {
        net->types[i] = (gradd_type_t){
            GRADD_DT_F32, 2, {SIZE, SIZE}
        };
        net->all[i] = i;
    }
    net->device = tested_device_open(1);
}

static gradd_status_t plan_of(const net_t *net, int64_t budget, gradd_recompute_t recompute,
                              gradd_plan_t **out) {
    const gradd_plan_options_t o = {.inputs = net->types,
                                    .n_inputs = 1 + 2 * LAYERS,
                                    .grads = net->all,
                                    .n_grads = 1 + 2 * LAYERS,
                                    .outputs = net->all,
                                    .n_outputs = 1,
                                    .grad_outputs = net->all,
                                    .n_grad_outputs = 1,
                                    .device = net->device,
                                    .memory_budget = budget,
                                    .recompute = recompute};
    return gradd_plan_create(net->model, &o, out);
}

static void finish(net_t *net) {
    gradd_device_close(net->device);
    model_destroy(net->model);
}

/* ---- values ---- */

enum { TENSORS = 3 + 4 * LAYERS + 2 };

/* Fills the inputs, runs twice forward and backward, keeping the first time; output and gradients
 * of the second time lie at the end, and must be those of the first. */
static void run(gradd_plan_t *plan, shared_t *at, float *out) {
    const int n_in = 1 + 2 * LAYERS;
    float *host = (float *)at->host;
    for (int i = 0; i < n_in * ELEMENTS; i++)
        host[i] = 0.2f * sinf((float)(i % 977) + (float)(i / ELEMENTS));
    for (int i = 0; i < ELEMENTS; i++)
        host[n_in * ELEMENTS + i] = cosf((float)i);
    shared_enter(at, gradd_plan_device(plan));
    const void *in[1 + 2 * LAYERS], *dy[] = {shared_at(at, at->host + n_in * BYTES)};
    void *grads[1 + 2 * LAYERS], *y[] = {shared_at(at, at->host + (n_in + 1) * BYTES)};
    bool written[1 + 2 * LAYERS];
    for (int i = 0; i < n_in; i++) {
        in[i] = shared_at(at, at->host + i * BYTES);
        grads[i] = shared_at(at, at->host + (n_in + 2 + i) * BYTES);
    }
    gradd_run_t *r;
    const float *results = host + (n_in + 1) * ELEMENTS;
    CHECK_OK(gradd_run_create(plan, &r));
    CHECK_OK(gradd_run_forward(r, 5, 0, in, y, NULL));
    for (int turn = 0; turn < 2; turn++) {
        CHECK_OK(gradd_run_backward(r, dy, grads, turn == 0, written, NULL));
        gradd_plan_device(plan)->backend->wait(gradd_plan_device(plan)->queue, NULL);
        if (turn) CHECK(!memcmp(out, results, (size_t)(n_in + 1) * BYTES));
        memcpy(out, results, (size_t)(n_in + 1) * BYTES);
    }
    gradd_run_destroy(r);
    shared_leave(at);
}

TEST(what_is_computed_again_has_the_same_bits) {
    static float want[(2 + 2 * LAYERS) * ELEMENTS], got[(2 + 2 * LAYERS) * ELEMENTS];
    net_t net;
    gradd_plan_t *whole, *plan;
    make_net(&net);
    shared_t at = shared_make((size_t)TENSORS * BYTES);
    CHECK_OK(plan_of(&net, 0, GRADD_RECOMPUTE_NONE, &whole));
    run(whole, &at, want);
    for (int64_t cut = 0; cut < 4; cut++) {
        const int64_t budget = gradd_plan_info(whole)->arena_bytes - cut * 2 * BYTES;
        CHECK_OK(plan_of(&net, budget, GRADD_RECOMPUTE_NONE, &plan));
        CHECK(gradd_plan_info(plan)->arena_bytes <= budget);
        CHECK_EQ_INT(gradd_plan_info(plan)->whole_bytes, gradd_plan_info(whole)->arena_bytes);
        CHECK((gradd_plan_info(plan)->recomputed_bytes > 0) == (cut > 0));
        memset(got, 0, sizeof got);
        run(plan, &at, got);
        CHECK(!memcmp(got, want, sizeof got));
        gradd_plan_destroy(plan);
    }
    gradd_plan_destroy(whole);
    shared_free(&at);
    finish(&net);
}

/* ---- order ---- */

static bool reads(const graph_t *g, int32_t reader, int32_t node) {
    for (int i = 0; i < g->nodes[reader].n_in; i++) {
        const gradd_val_t v = g->nodes[reader].in[i];
        if (v != GRADD_NONE && g->values[v]->kind == VALUE_NODE && g->values[v]->node == node)
            return true;
    }
    return false;
}

TEST(a_clone_stands_in_front_of_its_first_reader) {
    net_t net;
    gradd_plan_t *plan;
    int n_clones = 0;
    make_net(&net);
    CHECK_OK(plan_of(&net, 0, GRADD_RECOMPUTE_LAYERS, &plan));
    const graph_t *g = plan->graph;
    const program_t *p = &plan->variants->program;
    for (int k = 0; k < p->n_nodes; k++) {
        const int32_t id = p->nodes[k];
        int next = k + 1;
        if (!graph_is_clone(g, id)) continue;
        n_clones++;
        CHECK(g->nodes[id].backward && g->nodes[id].no_merge);
        CHECK(g->nodes[id].op == g->nodes[id - g->n_forward].op);
        CHECK_EQ_INT(g->nodes[id].random, g->nodes[id - g->n_forward].random);
        /* between it and its reader are only others that this reader waits for */
        while (next < p->n_nodes && !reads(g, p->nodes[next], id)) {
            CHECK(graph_is_clone(g, p->nodes[next]) ||
                  g->nodes[p->nodes[next]].op->flags & GRADD_OP_VIEW);
            next++;
        }
        CHECK(next < p->n_nodes);
    }
    CHECK(n_clones >= LAYERS - 1); /* the last layer's would be needed at once */
    gradd_plan_destroy(plan);
    finish(&net);
}

TEST(where_all_is_kept_there_are_no_clones) {
    net_t net;
    gradd_plan_t *plan;
    make_net(&net);
    CHECK_OK(plan_of(&net, 0, GRADD_RECOMPUTE_NONE, &plan));
    const int64_t whole = gradd_plan_info(plan)->arena_bytes;
    CHECK_EQ_INT(plan->graph->n_clones, 0);
    CHECK_EQ_INT(gradd_plan_info(plan)->whole_bytes, 0);
    gradd_plan_destroy(plan);
    CHECK_OK(plan_of(&net, whole, GRADD_RECOMPUTE_NONE, &plan)); /* a budget that is met */
    CHECK_EQ_INT(plan->graph->n_clones, 0);
    CHECK_EQ_INT(gradd_plan_info(plan)->whole_bytes, whole);
    CHECK(gradd_plan_info(plan)->model_us > 0);
    gradd_plan_destroy(plan);
    finish(&net);
}

/* ---- the choice ---- */

TEST(a_budget_that_cannot_be_met_names_the_smallest) {
    net_t net;
    gradd_plan_t *plan;
    gradd_curve_t curve;
    char text[64];
    make_net(&net);
    CHECK_OK(plan_of(&net, 0, GRADD_RECOMPUTE_NONE, &plan));
    CHECK_OK(gradd_plan_curve(plan, &curve));
    CHECK(curve.n > 2);
    CHECK_EQ_INT(curve.points[0].arena_bytes, gradd_plan_info(plan)->arena_bytes);
    gradd_plan_destroy(plan);
    const int64_t least = curve.points[curve.n - 1].arena_bytes;
    CHECK_STATUS(GRADD_E_NOMEM, plan_of(&net, least - 1, GRADD_RECOMPUTE_NONE, &plan));
    snprintf(text, sizeof text, "the smallest that can be met is %lld bytes", (long long)least);
    CHECK_ERROR_HAS(text);
    CHECK_OK(plan_of(&net, least, GRADD_RECOMPUTE_NONE, &plan));
    CHECK_EQ_INT(gradd_plan_info(plan)->arena_bytes, least);
    gradd_plan_destroy(plan);
    finish(&net);
}

TEST(a_policy_has_a_name) {
    gradd_recompute_t found;
    for (int i = 0; i <= GRADD_RECOMPUTE_COMPROMISE; i++) {
        const char *name = gradd_recompute_name((gradd_recompute_t)i);
        CHECK_OK(gradd_recompute_find(name, strlen(name), "x", &found));
        CHECK_EQ_INT(found, i);
    }
    CHECK_STATUS(GRADD_E_UNSUPPORTED, gradd_recompute_find("lay", 3, "--recompute", &found));
    CHECK_ERROR_HAS("--recompute 'lay': expected none, layers or compromise");
}
