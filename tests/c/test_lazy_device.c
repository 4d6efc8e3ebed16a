/* The engine on a device that does nothing before somebody waits: order, constants, zeros, arenas
 * that grow, and what is freed. Every bit is the CPU's. */
#include "tests/c/lazy_device.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/exec/run.h"
#include "tests/c/onnx_build.h"
#include "tests/test.h"

enum { N = 5, ELEMENTS = 1000, SETS = 1 << N };

typedef float vector_t[ELEMENTS];

/* y0 = Tanh(x0 * c) * c0, and Erf for all others, whose gradient has a constant of its own. More
 * sets of gradients may arrive than a plan has backwards of its own, so that one serves the last of
 * them with zeros. */
static gradd_model_t *load(void) {
    gradd_model_t *model;
    size_t n;
    char x[16], y[16], half[16], bent[16], c[16], operands[40];
    vector_t values;
    Onnx__ModelProto *proto = build_model();
    for (int i = 0; i <= N; i++) {
        for (int k = 0; k < ELEMENTS; k++)
            values[k] = (float)((k * 7919 + i * 31) % 401) / 400;
        snprintf(c, sizeof c, "c%d", i);
        build_raw(build_init(proto, c, GRADD_DT_F32, 1, BUILD_DIMS(ELEMENTS)),
                  memcpy(build_alloc(sizeof values), values, sizeof values), sizeof values);
    }
    for (int i = 0; i < N; i++) {
        snprintf(x, sizeof x, "x%d", i), snprintf(y, sizeof y, "y%d", i);
        snprintf(half, sizeof half, "half%d", i), snprintf(bent, sizeof bent, "bent%d", i);
        build_input(proto, x, GRADD_DT_F32, 1, BUILD_DIMS(ELEMENTS));
        snprintf(operands, sizeof operands, "%s,c%d", x, N);
        build_node(proto, "Mul", half, operands, half);
        build_node(proto, i ? "Erf" : "Tanh", bent, half, bent);
        snprintf(operands, sizeof operands, "%s,c%d", bent, i);
        build_node(proto, "Mul", y, operands, y);
        build_output(proto, y);
    }
    uint8_t *bytes = build_pack(proto, &n);
    CHECK_OK(gradd_model_load(bytes, n, &model));
    return model;
}

static gradd_plan_t *make_plan(gradd_model_t *model, gradd_device_t *device) {
    static const int32_t all[N] = {0, 1, 2, 3, 4};
    gradd_type_t types[N];
    for (int i = 0; i < N; i++)
        types[i] = (gradd_type_t){GRADD_DT_F32, 1, {ELEMENTS}};
    const gradd_plan_options_t o = {types, N, all, N, all, N, all, N, 0, device, NULL, 0};
    gradd_plan_t *plan;
    CHECK_OK(gradd_plan_create(model, &o, &plan));
    return plan;
}

typedef struct world_s {
    gradd_plan_t *plan;
    vector_t *x, *y, *dy, *dx; /* N each */
} world_t;

static vector_t *vectors(int salt) {
    vector_t *v = aligned_alloc(64, (sizeof(vector_t) * N / 64 + 1) * 64);
    CHECK(v != NULL);
    for (int i = 0; i < N; i++)
        for (int k = 0; k < ELEMENTS; k++)
            v[i][k] = salt ? (float)((k * 104729 + i * 77 + salt) % 997) / 500 - 1 : 0;
    return v;
}

static world_t open_world(gradd_model_t *model, gradd_device_t *device) {
    return (world_t){make_plan(model, device), vectors(1), vectors(0), vectors(2), vectors(0)};
}

static void close_world(world_t *w) {
    gradd_plan_destroy(w->plan);
    free(w->x), free(w->y), free(w->dy), free(w->dx);
}

static void pointers(vector_t *v, unsigned set, void **out) {
    for (int i = 0; i < N; i++)
        out[i] = set >> i & 1 ? (void *)v[i] : NULL;
}

/* Forward, and a backward of the gradients in the set; twice if the first keeps the activations. */
static void train(world_t *w, unsigned set, bool keep) {
    void *x[N], *y[N], *dy[N], *dx[N];
    bool written[N];
    gradd_run_handle_t *run;
    pointers(w->x, ~0u, x), pointers(w->y, ~0u, y), pointers(w->dx, ~0u, dx);
    pointers(w->dy, set, dy);
    memset(w->dx, 0, sizeof(vector_t) * N);
    CHECK_OK(gradd_run_create(w->plan, &run));
    CHECK_OK(gradd_run_forward(run, 1, 0, (const void *const *)x, y, NULL));
    for (int i = 0; i <= keep; i++)
        CHECK_OK(gradd_run_backward(run, (const void *const *)dy, dx, keep && !i, written, NULL));
    gradd_run_destroy(run);
}

TEST(every_backward_has_the_cpus_bits) {
    gradd_model_t *model = load();
    const gradd_device_options_t o = {.threads = 1};
    gradd_device_t *lazy = lazy_open(), *cpu;
    CHECK_OK(gradd_device_open(&o, &cpu));
    world_t late = open_world(model, lazy), now = open_world(model, cpu);
    for (unsigned set = 1; set < SETS; set++) {
        train(&late, set, set % 3 == 0), train(&now, set, set % 3 == 0);
        CHECK(!memcmp(late.y, now.y, sizeof(vector_t) * N));
        CHECK(!memcmp(late.dx, now.dx, sizeof(vector_t) * N));
    }
    CHECK(late.plan->constants.n_blocks > 1); /* a later backward has read others */
    close_world(&late), close_world(&now);
    gradd_device_close(lazy), gradd_device_close(cpu);
    gradd_model_destroy(model);
}

TEST(constants_are_uploaded_once) {
    gradd_model_t *model = load();
    gradd_device_t *lazy = lazy_open();
    world_t w = open_world(model, lazy);
    const int64_t block = w.plan->constants.bytes;
    CHECK_EQ_INT(lazy_bytes(lazy), block);
    CHECK(block >= (int64_t)sizeof(vector_t) * (N + 1));
    CHECK(block < (int64_t)sizeof(vector_t) * (N + 2));
    train(&w, 1, false), train(&w, 1, false); /* the expected backward */
    gradd_device_trim(lazy);
    CHECK(lazy_waiting(lazy) > 0); /* the arena goes when its turn comes */
    CHECK_OK(lazy->backend->wait(lazy->queue));
    CHECK_EQ_INT(lazy_bytes(lazy), block);
    close_world(&w);
    CHECK_OK(lazy->backend->wait(lazy->queue));
    CHECK_EQ_INT(lazy_bytes(lazy), 0);
    gradd_device_close(lazy);
    gradd_model_destroy(model);
}

/* y = Tanh(Tanh(Tanh(x))) */
static gradd_plan_t *chain(gradd_device_t *device, gradd_model_t **out_model) {
    static const int32_t first = 0;
    static const gradd_type_t x = {GRADD_DT_F32, 1, {ELEMENTS}};
    const gradd_plan_options_t o = {&x, 1, &first, 1, &first, 1, &first, 1, 0, device, NULL, 0};
    gradd_plan_t *plan;
    size_t n;
    Onnx__ModelProto *proto = build_model();
    build_input(proto, "x", GRADD_DT_F32, 1, BUILD_DIMS(ELEMENTS));
    build_node(proto, "Tanh", "one", "x", "a");
    build_node(proto, "Tanh", "two", "a", "b");
    build_node(proto, "Tanh", "three", "b", "y");
    build_output(proto, "y");
    uint8_t *bytes = build_pack(proto, &n);
    CHECK_OK(gradd_model_load(bytes, n, out_model));
    CHECK_OK(gradd_plan_create(*out_model, &o, &plan));
    return plan;
}

/* A backward that keeps the activations cannot put gradients in their place. */
TEST(an_arena_moves_with_what_it_holds) {
    gradd_model_t *model;
    gradd_device_t *lazy = lazy_open();
    gradd_plan_t *plan = chain(lazy, &model);
    gradd_run_handle_t *run;
    vector_t *x = vectors(1), *y = vectors(0), *dy = vectors(2), *dx = vectors(0);
    const void *in[] = {x}, *arrives[] = {dy};
    void *out[] = {y}, *kept[] = {dx[0]}, *last[] = {dx[1]};
    bool written;
    CHECK_OK(gradd_run_create(plan, &run));
    CHECK_OK(gradd_run_forward(run, 1, 0, in, out, NULL));
    CHECK_OK(gradd_run_backward(run, arrives, kept, true, &written, NULL));
    CHECK(gradd_run_bytes(run) > gradd_plan_info(plan)->arena_bytes);
    CHECK_OK(gradd_run_backward(run, arrives, last, false, &written, NULL));
    gradd_run_destroy(run);
    CHECK(!memcmp(dx[0], dx[1], sizeof dx[0]));
    for (int k = 0; k < ELEMENTS; k++) {
        float a = tanhf(x[0][k]), b = tanhf(a), c = tanhf(b);
        CHECK_NEAR(dx[0][k], dy[0][k] * (1 - a * a) * (1 - b * b) * (1 - c * c), 1e-5);
    }
    gradd_plan_destroy(plan);
    gradd_device_close(lazy);
    gradd_model_destroy(model);
    free(x), free(y), free(dy), free(dx);
}

static void cancel_later(void *context, const gradd_plan_t *plan, const step_t *step,
                         double seconds) {
    (void)plan, (void)step, (void)seconds;
    *(int *)context = 1;
}

/* Whoever is told that a run has ended may give its tensors away. */
TEST(nothing_is_under_way_after_a_run_has_failed) {
    gradd_model_t *model = load();
    gradd_device_t *lazy = lazy_open();
    world_t w = open_world(model, lazy);
    void *x[N], *y[N];
    int cancel = 0;
    gradd_run_handle_t *run;
    pointers(w.x, ~0u, x), pointers(w.y, ~0u, y);
    device_set_hook(lazy, cancel_later, &cancel);
    CHECK_OK(gradd_run_create(w.plan, &run));
    CHECK_STATUS(GRADD_E_STALE, gradd_run_forward(run, 1, 0, (const void *const *)x, y, &cancel));
    CHECK_EQ_INT(lazy_waiting(lazy), 0);
    gradd_run_destroy(run);
    close_world(&w);
    gradd_device_close(lazy);
    gradd_model_destroy(model);
}

/* What is freed afterwards is the caller's: its tensors, and the steps with their states. */
TEST(the_ends_of_a_run_and_of_a_plan_wait) {
    gradd_model_t *model = load();
    gradd_device_t *lazy = lazy_open();
    world_t w = open_world(model, lazy);
    gradd_run_handle_t *run;
    CHECK_OK(gradd_run_create(w.plan, &run));
    CHECK_OK(lazy->backend->queue_enter(lazy->queue));
    CHECK_OK(lazy->backend->zero(lazy->queue, w.y, sizeof(vector_t)));
    gradd_run_destroy(run);
    CHECK_EQ_INT(lazy_waiting(lazy), 0);
    CHECK_OK(lazy->backend->queue_enter(lazy->queue));
    CHECK_OK(lazy->backend->zero(lazy->queue, w.y, sizeof(vector_t)));
    const int blocks = w.plan->constants.n_blocks;
    close_world(&w);
    CHECK_EQ_INT(lazy_waiting(lazy), blocks); /* which go in their turn */
    gradd_device_close(lazy);
    gradd_model_destroy(model);
}

TEST(the_finite_check_waits) {
    gradd_model_t *model = load();
    gradd_device_t *lazy = lazy_open();
    world_t w = open_world(model, lazy);
    void *x[N], *y[N];
    gradd_run_handle_t *run;
    pointers(w.x, ~0u, x), pointers(w.y, ~0u, y);
    w.x[2][7] = NAN;
    CHECK_OK(gradd_run_create(w.plan, &run));
    CHECK_STATUS(GRADD_E_NONFINITE, gradd_run_forward(run, 1, GRADD_RUN_FINITE_CHECK,
                                                      (const void *const *)x, y, NULL));
    CHECK_ERROR_HAS("'half2' (Mul): output 0, element 7 of 1000 is nan");
    gradd_run_destroy(run);
    close_world(&w);
    gradd_device_close(lazy);
    gradd_model_destroy(model);
}
