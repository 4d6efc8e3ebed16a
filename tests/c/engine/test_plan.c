/* A plan's choices for its nodes: the kernels of its device, with casts around nodes that none of
 * them takes, and one prepared state for all nodes that are equal. */
#include "server/plan/plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/c/onnx_build.h"
#include "tests/test.h"

enum { SIZE = 16 };

static gradd_device_t *open_device(const gradd_backend_t *backend) {
    const gradd_device_options_t o = {.threads = 2};
    gradd_device_t *device;
    CHECK_OK(device_open(backend, &o, &device));
    return device;
}

static void destroy(gradd_plan_t *plan) {
    gradd_device_t *device = plan->device;
    gradd_plan_destroy(plan);
    gradd_device_close(device);
}

static model_t *load(Onnx__ModelProto *proto, const char *output) {
    model_t *m = NULL;
    size_t n;
    build_output(proto, output);
    uint8_t *bytes = build_pack(proto, &n);
    CHECK_OK(model_load(bytes, n, NULL, &m));
    return m;
}

/* h = h W for so many layers, then a product of another shape. */
static gradd_plan_t *layers(int n, model_t **out_model) {
    static const gradd_type_t wide = {
        GRADD_DT_F32, 2, {SIZE, SIZE}
    };
    const gradd_type_t narrow = {
        GRADD_DT_F32, 2, {SIZE, 3}
    };
    gradd_type_t types[16];
    Onnx__ModelProto *proto = build_model();
    char w[8], from[8] = "h", to[16], operands[32];
    build_input(proto, "h", GRADD_DT_F32, 2, BUILD_DIMS(SIZE, SIZE));
    types[0] = wide;
    for (int i = 0; i <= n; i++) {
        snprintf(w, sizeof w, "w%d", i);
        snprintf(to, sizeof to, "h%d", i);
        snprintf(operands, sizeof operands, "%s,%s", from, w);
        types[1 + i] = i < n ? wide : narrow;
        build_input(proto, w, GRADD_DT_F32, 2, types[1 + i].dims);
        build_node(proto, "MatMul", to, operands, to);
        memcpy(from, to, sizeof from);
    }
    *out_model = load(proto, to);
    const int32_t first = 0;
    const gradd_plan_options_t o = {.inputs = types,
                                    .n_inputs = n + 2,
                                    .grads = &first,
                                    .n_grads = 1,
                                    .outputs = &first,
                                    .n_outputs = 1,
                                    .grad_outputs = &first,
                                    .n_grad_outputs = 1,
                                    .device = open_device(&gradd_backend_cpu)};
    gradd_plan_t *plan = NULL;
    CHECK_OK(gradd_plan_create(*out_model, &o, &plan));
    return plan;
}

/* The masks of operands that may be overwritten have 32 bits. */
TEST(a_sum_of_many_overwrites_none_of_the_last_ones) {
    enum { N = 40 };
    static const gradd_type_t type = {GRADD_DT_F32, 1, {SIZE}};
    static const int32_t first = 0;
    _Alignas(64) float x[SIZE], z[SIZE];
    char from[8] = "x", to[16], operands[32], all[8 * N] = "x";
    Onnx__ModelProto *proto = build_model();
    build_input(proto, "x", GRADD_DT_F32, 1, type.dims);
    for (int i = 1; i < N; i++) { /* (i + 1) x, which live until the sum */
        snprintf(to, sizeof to, "s%d", i);
        snprintf(operands, sizeof operands, "%s,x", from);
        build_node(proto, "Add", to, operands, to);
        strcat(strcat(all, ","), to);
        memcpy(from, to, sizeof from);
    }
    build_node(proto, "Sum", "sum", all, "sum");
    build_node(proto, "Neg", "z", "sum", "z");
    model_t *m = load(proto, "z");
    gradd_device_t *device = open_device(&gradd_backend_cpu);
    const gradd_plan_options_t o = {.inputs = &type,
                                    .n_inputs = 1,
                                    .outputs = &first,
                                    .n_outputs = 1,
                                    .flags = GRADD_PLAN_PLAIN,
                                    .device = device};
    gradd_plan_t *plan = NULL;
    gradd_run_t *run = NULL;
    CHECK_OK(gradd_plan_create(m, &o, &plan));
    const plan_launch_t *sum = &plan->forward.launches[plan->forward.n - 2];
    CHECK_EQ_INT(sum->args.n_in, N);
    for (int i = 1; i < N; i++)
        CHECK(sum->loc[i].offset != sum->loc[N].offset);
    for (int i = 0; i < SIZE; i++)
        x[i] = (float)i;
    CHECK_OK(gradd_run_create(plan, &run));
    CHECK_OK(gradd_run_forward(run, 1, 0, (const void *[]){x}, (void *[]){z}, NULL));
    for (int i = 0; i < SIZE; i++)
        CHECK(z[i] == (float)(-i * N * (N + 1) / 2));
    gradd_run_destroy(run);
    gradd_plan_destroy(plan);
    gradd_device_close(device);
    model_destroy(m);
}

/* The next one is not. */
TEST(a_plan_may_be_cancelled) {
    static const gradd_type_t type = {GRADD_DT_F32, 1, {SIZE}};
    static const int32_t first = 0;
    char from[8] = "x", to[16], operands[32];
    volatile int cancel = 1;
    Onnx__ModelProto *proto = build_model();
    build_input(proto, "x", GRADD_DT_F32, 1, type.dims);
    for (int i = 0; i < 1000; i++) {
        snprintf(to, sizeof to, "s%d", i);
        snprintf(operands, sizeof operands, "%s,x", from);
        build_node(proto, "Add", to, operands, to);
        memcpy(from, to, sizeof from);
    }
    model_t *m = load(proto, to);
    gradd_device_t *device = open_device(&gradd_backend_cpu);
    const gradd_plan_options_t o = {.inputs = &type,
                                    .n_inputs = 1,
                                    .outputs = &first,
                                    .n_outputs = 1,
                                    .device = device,
                                    .cancel = &cancel};
    gradd_plan_t *plan = NULL;
    CHECK_STATUS(GRADD_E_STALE, gradd_plan_create(m, &o, &plan));
    CHECK_ERROR_HAS("cancelled");
    cancel = 0;
    CHECK_OK(gradd_plan_create(m, &o, &plan));
    gradd_plan_destroy(plan);
    gradd_device_close(device);
    model_destroy(m);
}

TEST(equal_products_share_a_state) {
    model_t *m2, *m8;
    gradd_plan_t *p2 = layers(2, &m2), *p8 = layers(8, &m8);
    const plan_launch_t *launches = p8->forward.launches;
    CHECK_EQ_INT(p8->forward.n, 9);
    CHECK(launches[0].args.state != NULL);
    for (int i = 1; i < 8; i++)
        CHECK(launches[i].args.state == launches[0].args.state);
    CHECK(launches[8].args.state != launches[0].args.state);
    CHECK_EQ_INT(p2->ready_bytes, p8->ready_bytes);
    destroy(p2), destroy(p8);
    model_destroy(m2), model_destroy(m8);
}

TEST(a_plan_of_little_work_takes_one_thread) {
    const plan_cost_t mlp = {100e6, 5e6, 0, 11}, few = {1e9, 40e6, 0, 11},
                      small_calls = {380e6, 70e6, 0, 485};
    CHECK_EQ_INT(plan_threads(&(plan_cost_t){0}, 8), 1);
    CHECK_EQ_INT(plan_threads(&mlp, 2), 1);
    CHECK_EQ_INT(plan_threads(&few, 2), 2);
    CHECK_EQ_INT(plan_threads(&few, 1), 1);
    CHECK_EQ_INT(plan_threads(&small_calls, 2), 1);
    model_t *m;
    gradd_plan_t *p = layers(2, &m);
    const bool arrives = true;
    const variant_t *kept;
    CHECK_EQ_INT(gradd_plan_info(p)->threads, 1);
    CHECK_OK(plan_variant(p, &arrives, true, &kept));
    for (int k = 0; k < p->forward.n; k++)
        CHECK_EQ_INT(p->forward.launches[k].args.threads, 1);
    for (int k = 0; k < kept->program.n; k++)
        CHECK(kept->program.launches[k].args.threads <= 1); /* a copy has none */
    destroy(p);
    model_destroy(m);
}

TEST(a_plan_counts_what_it_holds) {
    model_t *m;
    gradd_plan_t *p = layers(2, &m);
    const int64_t before = gradd_plan_info(p)->constant_bytes;
    const bool arrives = true;
    const variant_t *kept;
    CHECK(p->ready_bytes > 0);
    CHECK(before > p->ready_bytes + (int64_t)arena_used(p->graph->arena));
    CHECK_OK(plan_variant(p, &arrives, true, &kept)); /* another program */
    CHECK(gradd_plan_info(p)->constant_bytes >
          before + (int64_t)arena_used(kept->program.arena) - 1);
    destroy(p);
    model_destroy(m);
}

/* ---- another device -------------------------------------------------------------------------- */

static gradd_status_t compute_nothing(const gradd_launch_t *r) {
    (void)r;
    return GRADD_OK;
}

static bool accepts_rows(const gradd_infer_t *c) {
    return c->in[0].type.rank == 2;
}

static const gradd_kernel_t rows[] = {
    GRADD_KERNEL("Relu", "matrices", .types = {GRADD_DTB(F32)}, .accepts = accepts_rows,
                 .compute = compute_nothing),
    GRADD_KERNEL("Relu", "anything", .types = {GRADD_DTB(F32)}, .compute = compute_nothing),
    GRADD_KERNEL("Cast", "cast", .compute = compute_nothing),
};
static const gradd_kernels_t family = {"activation", rows, sizeof rows / sizeof rows[0]};
static const gradd_kernels_t *const families[] = {&family};

/* The CPU with these kernels alone. */
static const gradd_backend_t *small(void) {
    static gradd_backend_t b;
    b = gradd_backend_cpu;
    b.name = "test";
    b.kernels = families;
    b.n_kernels = 1;
    return &b;
}

typedef struct plan_trial_s {
    model_t *model;
    gradd_plan_t plan;
    sequence_t forward;
} plan_trial_t;

/* z = op(x) on that device: its forward, with kernels. */
static gradd_status_t choose(const char *op, gradd_dtype_t dtype, int rank, plan_trial_t *t) {
    static const int64_t dims[] = {2, 3, 4};
    Onnx__ModelProto *proto = build_model();
    gradd_type_t x = {.dtype = dtype, .rank = rank};
    memcpy(x.dims, dims, sizeof dims[0] * (size_t)rank);
    build_input(proto, "x", dtype, rank, dims);
    build_node(proto, op, "node", "x", "z");
    const int32_t output = 0;
    const graph_options_t o = {
        .inputs = &x, .outputs = &output, .n_outputs = 1, .backend = small()};
    *t = (plan_trial_t){.model = load(proto, "z"), .plan = {.device = open_device(small())}};
    CHECK_OK(graph_create(t->model, &o, &t->plan.graph));
    bool *none = calloc((size_t)t->plan.graph->n_values + 1, sizeof none[0]);
    CHECK_OK(schedule_forward(t->plan.graph, none, &t->forward));
    free(none);
    return plan_choose(&t->plan, &t->forward);
}

static const char *kernel(const plan_trial_t *t, int i) {
    return t->forward.choices[i].kernel->name;
}

static void finish(plan_trial_t *t) {
    sequence_finish(&t->forward);
    graph_destroy(t->plan.graph);
    gradd_device_close(t->plan.device);
    model_destroy(t->model);
}

TEST(the_first_kernel_that_accepts_runs) {
    plan_trial_t t;
    CHECK_OK(choose("Relu", GRADD_DT_F32, 2, &t));
    CHECK_EQ_STR(kernel(&t, 0), "matrices");
    finish(&t);
    CHECK_OK(choose("Relu", GRADD_DT_F32, 3, &t));
    CHECK_EQ_STR(kernel(&t, 0), "anything");
    finish(&t);
}

TEST(casts_go_where_no_kernel_takes_bf16) {
    plan_trial_t t;
    CHECK_OK(choose("Relu", GRADD_DT_BF16, 2, &t));
    CHECK_EQ_INT(t.forward.n, 3);
    CHECK_EQ_STR(kernel(&t, 0), "cast");
    CHECK_EQ_STR(kernel(&t, 1), "matrices");
    CHECK_EQ_STR(kernel(&t, 2), "cast");
    finish(&t);
}

TEST(what_the_device_cannot_run_is_named) {
    plan_trial_t t;
    CHECK_STATUS(GRADD_E_UNSUPPORTED, choose("Tanh", GRADD_DT_F32, 2, &t));
    CHECK_ERROR_HAS("node 0 'node' (Tanh)");
    CHECK_ERROR_HAS("the device 'test' has no kernel for Tanh of f32");
    finish(&t);
    CHECK_STATUS(GRADD_E_UNSUPPORTED, choose("Relu", GRADD_DT_F64, 2, &t));
    CHECK_ERROR_HAS("Relu of f64");
    finish(&t);
}
