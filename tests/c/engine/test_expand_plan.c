/* When a graph has operators, and when their expansions: devices that lack a kernel, plain graphs,
 * and what an expansion takes from the operator's node. */
#include "kernels/contract/registry.h"
#include "server/graph/match/match.h"
#include "server/plan/plan.h"
#include "tests/c/onnx_build.h"
#include "tests/test.h"

#include <math.h>
#include <string.h>

enum { ROWS = 3, WIDTH = 16 };

/* ---- a CPU without the kernels of some operators ---- */

enum { MAX_FAMILIES = 64, MAX_KERNELS = 64 };

static bool is_named(const char *const *names, const char *name) {
    for (; *names; names++)
        if (!strcmp(*names, name)) return true;
    return false;
}

/* The CPU, less the kernels of the operators in a list that NULL ends. */
static const gradd_backend_t *without(const char *const *names) {
    static gradd_backend_t b;
    static gradd_kernels_t families[MAX_FAMILIES];
    static const gradd_kernels_t *list[MAX_FAMILIES];
    static gradd_kernel_t rows[MAX_FAMILIES][MAX_KERNELS];
    b = gradd_backend_cpu;
    CHECK(b.n_kernels <= MAX_FAMILIES);
    for (size_t f = 0; f < b.n_kernels; f++) {
        families[f] = (gradd_kernels_t){.file = b.kernels[f]->file, .v = rows[f]};
        CHECK(b.kernels[f]->n <= MAX_KERNELS);
        for (size_t i = 0; i < b.kernels[f]->n; i++)
            if (!is_named(names, b.kernels[f]->v[i].op))
                rows[f][families[f].n++] = b.kernels[f]->v[i];
        list[f] = &families[f];
    }
    b.kernels = list;
    b.name = "less";
    return &b;
}

/* ---- a plan and one step of it ---- */

typedef struct expand_trial_s {
    model_t *model;
    gradd_device_t *device;
    gradd_plan_t *plan;
    float y[ROWS * WIDTH], dx[ROWS * WIDTH], dw[WIDTH * WIDTH];
} expand_trial_t;

/* y = op(x, w, b) of that device; w is a matrix or a vector. */
static void plan_trial(expand_trial_t *t, Onnx__ModelProto *proto, const gradd_backend_t *backend,
                       int w_rank, uint32_t flags) {
    static const int32_t first[] = {0, 1, 2};
    const gradd_type_t types[] = {
        {GRADD_DT_F32, 2,      {ROWS, WIDTH} },
        {GRADD_DT_F32, w_rank, {WIDTH, WIDTH}},
        {GRADD_DT_F32, 1,      {WIDTH}       },
    };
    const gradd_device_options_t device = {.threads = 1, .compile_ms = GRADD_COMPILE_MS};
    *t = (expand_trial_t){0};
    build_input(proto, "x", GRADD_DT_F32, 2, types[0].dims);
    build_input(proto, "w", GRADD_DT_F32, w_rank, types[1].dims);
    build_input(proto, "b", GRADD_DT_F32, 1, types[2].dims);
    build_output(proto, "y");
    size_t n;
    uint8_t *bytes = build_pack(proto, &n);
    CHECK_OK(model_load(bytes, n, NULL, &t->model));
    CHECK_OK(device_open(backend, &device, &t->device));
    const gradd_plan_options_t o = {.inputs = types,
                                    .n_inputs = 3,
                                    .grads = first,
                                    .n_grads = 2,
                                    .outputs = first,
                                    .n_outputs = 1,
                                    .grad_outputs = first,
                                    .n_grad_outputs = 1,
                                    .flags = flags,
                                    .device = t->device};
    CHECK_OK(gradd_plan_create(t->model, &o, &t->plan));
}

static void step(expand_trial_t *t) {
    static _Alignas(64) float x[ROWS * WIDTH], w[WIDTH * WIDTH], b[WIDTH], dy[ROWS * WIDTH];
    for (int i = 0; i < ROWS * WIDTH; i++)
        x[i] = sinf((float)i), dy[i] = cosf((float)i);
    for (int i = 0; i < WIDTH * WIDTH; i++)
        w[i] = 0.2f * cosf(3 * (float)i);
    for (int i = 0; i < WIDTH; i++)
        b[i] = 0.1f * (float)i;
    static _Alignas(64) float y[ROWS * WIDTH], dx[ROWS * WIDTH], dw[WIDTH * WIDTH];
    const void *in[] = {x, w, b}, *grads[] = {dy};
    void *out[] = {y}, *got[] = {dx, dw};
    bool written[2];
    gradd_run_t *run;
    CHECK_OK(gradd_run_create(t->plan, &run));
    CHECK_OK(gradd_run_forward(run, 5, 0, in, out, NULL));
    CHECK_OK(gradd_run_backward(run, grads, got, false, written, NULL));
    CHECK(written[0] && written[1]);
    memcpy(t->y, y, sizeof y), memcpy(t->dx, dx, sizeof dx), memcpy(t->dw, dw, sizeof dw);
    gradd_run_destroy(run);
}

static void finish(expand_trial_t *t) {
    gradd_plan_destroy(t->plan);
    gradd_device_close(t->device);
    model_destroy(t->model);
}

/* Launches of the forward that run this operator. */
static int runs(const expand_trial_t *t, const char *op) {
    int n = 0;
    for (int k = 0; k < t->plan->forward.n; k++)
        n += !strcmp(t->plan->forward.launches[k].args.op->name, op);
    return n;
}

static void check_near(const float *a, const float *b, int n) {
    for (int i = 0; i < n; i++)
        CHECK(fabsf(a[i] - b[i]) <= 2e-5f * fmaxf(1, fabsf(b[i])));
}

static void check_same_step(expand_trial_t *a, expand_trial_t *b, int n_w) {
    step(a), step(b);
    check_near(a->y, b->y, ROWS * WIDTH);
    check_near(a->dx, b->dx, ROWS * WIDTH);
    check_near(a->dw, b->dw, n_w);
}

/* ---- tests ---- */

static Onnx__ModelProto *norm(void) {
    Onnx__ModelProto *proto = build_model();
    build_node(proto, "LayerNormalization", "norm", "x,w,b", "y");
    return proto;
}

TEST(a_device_without_a_kernel_runs_the_expansion) {
    static const char *const lacks[] = {"LayerNormalization", "RMSNormalization", NULL};
    expand_trial_t all, less, plain;
    plan_trial(&all, norm(), &gradd_backend_cpu, 1, 0);
    plan_trial(&less, norm(), without(lacks), 1, 0);
    plan_trial(&plain, norm(), &gradd_backend_cpu, 1, GRADD_PLAN_PLAIN);
    CHECK_EQ_INT(runs(&all, "LayerNormalization"), 1);
    CHECK_EQ_INT(all.plan->forward.n, 1);
    CHECK_EQ_INT(runs(&less, "LayerNormalization"), 0);
    CHECK_EQ_INT(runs(&less, "ReduceMean"), 2);
    CHECK_EQ_INT(plain.plan->forward.n, less.plan->forward.n);
    check_same_step(&all, &less, WIDTH);
    check_same_step(&all, &plain, WIDTH);
    finish(&all), finish(&less), finish(&plain);
}

/* y = x w' + b, w' transposed */
static Onnx__ModelProto *linear(void) {
    Onnx__ModelProto *proto = build_model();
    build_node(proto, "Transpose", "turn", "w", "t");
    build_node(proto, "MatMul", "product", "x,t", "p");
    build_node(proto, "Add", "bias", "p,b", "y");
    return proto;
}

TEST(a_pattern_stays_where_its_operator_has_no_kernel) {
    static const char *const no_linear[] = {"Linear", NULL};
    static const char *const neither[] = {"Linear", "FusedMatMul", NULL};
    expand_trial_t all, less, least;
    plan_trial(&all, linear(), &gradd_backend_cpu, 2, 0);
    plan_trial(&less, linear(), without(no_linear), 2, 0);
    CHECK_EQ_INT(runs(&all, "Linear"), 1);
    CHECK_EQ_INT(runs(&less, "Linear"), 0);
    CHECK_EQ_INT(runs(&less, "FusedMatMul"), 1);
    check_same_step(&all, &less, WIDTH * WIDTH);
    finish(&less);
    /* and a rule that emits such an operator gets its expansion */
    plan_trial(&least, linear(), without(neither), 2, 0);
    CHECK_EQ_INT(runs(&least, "FusedMatMul"), 0);
    CHECK_EQ_INT(runs(&least, "MatMul"), 1);
    for (int k = 0; k < least.plan->variants->program.n; k++)
        CHECK(strcmp(least.plan->variants->program.launches[k].args.op->name, "FusedMatMul"));
    check_same_step(&all, &least, WIDTH * WIDTH);
    finish(&all), finish(&least);
}

TEST(an_expansion_draws_for_the_operator_s_node) {
    expand_trial_t t;
    plan_trial(&t, linear(), &gradd_backend_cpu, 2, GRADD_PLAN_PLAIN);
    graph_t *g = t.plan->graph;
    const gradd_attr_t ratio = {.name = "ratio", .kind = GRADD_ATTR_FLOAT, .f = 0.25};
    const gradd_val_t in[] = {g->inputs[0], g->inputs[0]};
    graph_node_t like = g->nodes[0];
    like.random = 77;
    const match_fused_t add = {"DropoutAdd", in, 2, &ratio, 1, &like};
    const int before = g->n_nodes;
    gradd_val_t out;
    g->random = 5;
    CHECK_OK(match_emit(g, &like, &add, &out, 1));
    CHECK_EQ_INT(g->random, 5);
    CHECK_EQ_INT(g->n_nodes, before + 2);
    CHECK_EQ_STR(g->nodes[before].op->name, "Dropout");
    CHECK_EQ_INT(g->nodes[before].random, 77);
    CHECK_EQ_STR(g->nodes[before + 1].op->name, "Add");
    CHECK_EQ_INT(out, g->nodes[before + 1].out[0]);
    finish(&t);
}

/* ---- wrong expansions are found out ---- */

static gradd_status_t expand_to_nothing(gradd_expand_t *x) {
    return x->b->status;
}

static gradd_status_t expand_to_a_cast(gradd_expand_t *x) {
    const gradd_attr_t to = {.name = "to", .kind = GRADD_ATTR_INT, .i = GRADD_DT_F64};
    return x->b->emit(x->b, &(gradd_emit_t){"Cast", x->in, 1, &to, 1}, x->out, 1);
}

TEST(an_expansion_without_the_promised_results_is_named) {
    expand_trial_t t;
    plan_trial(&t, linear(), &gradd_backend_cpu, 2, GRADD_PLAN_PLAIN);
    graph_t *g = t.plan->graph;
    gradd_op_t wrong = *gradd_op_by_name("Swish");
    const graph_emit_t e = {.op = &wrong, .opset = 24, .in = g->inputs, .n_in = 1, .n_out = 1};
    gradd_val_t out;
    wrong.expand = expand_to_nothing;
    CHECK_STATUS(GRADD_E_INTERNAL, graph_emit(g, &e, &out));
    CHECK_ERROR_HAS("expanding Swish: there is no output 0");
    wrong.expand = expand_to_a_cast;
    CHECK_STATUS(GRADD_E_INTERNAL, graph_emit(g, &e, &out));
    CHECK_ERROR_HAS("expanding Swish: output 0 is f64[3,16], expected f32[3,16]");
    finish(&t);
}
