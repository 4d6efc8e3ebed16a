/* The engine on devices that work later, in memory of their own: order, constants, zeros, arenas
 * that grow, what is freed, and what fails. The fake device (tests/fake) has the CPU's bits; the
 * emulated GPU is the CUDA plug-in's device on a stand-in for CUDA (tests/sim). */
#include "tests/fake/fake.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/exec/run.h"
#include "tests/c/onnx_build.h"
#include "tests/c/tested_device.h"
#include "tests/sim/sim.h"
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

/* The first n of inputs and outputs, each with its gradient. */
static gradd_plan_options_t options_of(const gradd_type_t *types, int n_inputs, const int32_t *all,
                                       int n, gradd_device_t *device) {
    return (gradd_plan_options_t){.inputs = types,
                                  .n_inputs = n_inputs,
                                  .grads = all,
                                  .n_grads = n,
                                  .outputs = all,
                                  .n_outputs = n,
                                  .grad_outputs = all,
                                  .n_grad_outputs = n,
                                  .device = device};
}

static gradd_status_t try_plan(gradd_model_t *model, gradd_device_t *device, gradd_plan_t **out) {
    static const int32_t all[N] = {0, 1, 2, 3, 4};
    gradd_type_t types[N];
    for (int i = 0; i < N; i++)
        types[i] = (gradd_type_t){GRADD_DT_F32, 1, {ELEMENTS}};
    const gradd_plan_options_t o = options_of(types, N, all, N, device);
    return gradd_plan_create(model, &o, out);
}

static gradd_plan_t *make_plan(gradd_model_t *model, gradd_device_t *device) {
    gradd_plan_t *plan;
    CHECK_OK(try_plan(model, device, &plan));
    return plan;
}

static gradd_device_t *open_named(const char *name) {
    const gradd_device_options_t o = {.name = name, .threads = 1};
    gradd_device_t *device;
    CHECK_OK(gradd_device_open(&o, &device));
    return device;
}

/* How a device tells of its work, and how it is made to fail. */
typedef struct late_device_s {
    const char *name, *bits; /* bits: the device that has the same */
    const char *no_memory, *no_map, *lost;
    gradd_status_t map_failure;
    void (*fail)(gradd_queue_t *queue, fake_point_t point, int n);
    int (*pending)(gradd_queue_t *queue);
    int64_t (*bytes)(gradd_queue_t *queue); /* that are taken */
} late_device_t;

static void emu_fail(gradd_queue_t *queue, fake_point_t point, int n) {
    static const char *const calls[FAKE_POINTS] = {"cudaMallocAsync", "cudaHostRegister", "kernel",
                                                   "cudaMemcpyAsync"};
    (void)queue;
    sim_fail(calls[point], n);
}

static int emu_pending(gradd_queue_t *queue) {
    (void)queue;
    return sim_pending();
}

static int64_t emu_bytes(gradd_queue_t *queue) {
    (void)queue;
    return (int64_t)sim_bytes();
}

static const late_device_t devices[] = {
    {"fake", "cpu", "the device has no memory for", "the device cannot map 8192 bytes",
     "the device is lost",         GRADD_E_SHM,   fake_fail, fake_pending, fake_bytes},
    {"emu",  "emu", "the GPU has no memory for",    "the GPU cannot map 8192 bytes",
     "unspecified launch failure", GRADD_E_NOMEM, emu_fail,  emu_pending,  emu_bytes }
};
enum { N_DEVICES = sizeof devices / sizeof devices[0] };
#define FOR_DEVICES(d) for (const late_device_t *d = devices; d < devices + N_DEVICES; d++)

/* A plan, and tensors that both sides see: N vectors each. */
typedef struct fake_fixture_s {
    gradd_plan_t *plan;
    shared_t shared;
    vector_t *x, *y, *dy, *dx;
} fake_fixture_t;

static void fill(vector_t *v, int salt) {
    for (int i = 0; i < N; i++)
        for (int k = 0; k < ELEMENTS; k++)
            v[i][k] = (float)((k * 104729 + i * 77 + salt) % 997) / 500 - 1;
}

static fake_fixture_t open_fixture(gradd_plan_t *plan) {
    enum { ROOM = (sizeof(vector_t) * N / 64 + 1) * 64 };
    fake_fixture_t w = {.plan = plan, .shared = shared_make(4 * (size_t)ROOM)};
    char *at = w.shared.host;
    w.x = (vector_t *)at, w.y = (vector_t *)(at + ROOM);
    w.dy = (vector_t *)(at + 2 * ROOM), w.dx = (vector_t *)(at + 3 * ROOM);
    fill(w.x, 1), fill(w.dy, 2);
    shared_enter(&w.shared, gradd_plan_device(plan));
    return w;
}

static void close_fixture(fake_fixture_t *w) {
    shared_free(&w->shared);
    gradd_plan_destroy(w->plan);
}

static void pointers(const fake_fixture_t *w, vector_t *v, unsigned set, void **out) {
    for (int i = 0; i < N; i++)
        out[i] = set >> i & 1 ? shared_at(&w->shared, v[i]) : NULL;
}

static gradd_status_t forward(fake_fixture_t *w, uint32_t flags, const int *cancel,
                              gradd_run_t **out_run) {
    void *x[N], *y[N];
    pointers(w, w->x, ~0u, x), pointers(w, w->y, ~0u, y);
    GRADD_TRY(gradd_run_create(w->plan, out_run));
    return gradd_run_forward(*out_run, 1, flags, (const void *const *)x, y, cancel);
}

static gradd_status_t backward(fake_fixture_t *w, gradd_run_t *run, unsigned set, bool keep) {
    void *dy[N], *dx[N];
    bool written[N];
    pointers(w, w->dx, ~0u, dx), pointers(w, w->dy, set, dy);
    return gradd_run_backward(run, (const void *const *)dy, dx, keep, written, NULL);
}

/* Forward, and a backward of the gradients in the set; twice if the first keeps the activations. */
static void train(fake_fixture_t *w, unsigned set, bool keep) {
    gradd_run_t *run;
    memset(w->dx, 0, sizeof(vector_t) * N);
    CHECK_OK(forward(w, 0, NULL, &run));
    for (int i = 0; i <= keep; i++)
        CHECK_OK(backward(w, run, set, keep && !i));
    gradd_run_destroy(run);
}

TEST(every_backward_has_the_cpus_bits) {
    gradd_model_t *model = load();
    gradd_device_t *fake = open_named("fake"), *cpu = open_named("cpu");
    fake_fixture_t late = open_fixture(make_plan(model, fake)),
                   now = open_fixture(make_plan(model, cpu));
    for (unsigned set = 1; set < SETS; set++) {
        train(&late, set, set % 3 == 0), train(&now, set, set % 3 == 0);
        CHECK(!memcmp(late.y, now.y, sizeof(vector_t) * N));
        CHECK(!memcmp(late.dx, now.dx, sizeof(vector_t) * N));
    }
    CHECK(late.plan->constants.n_blocks > 1); /* a later backward has read others */
    close_fixture(&late), close_fixture(&now);
    gradd_device_close(fake), gradd_device_close(cpu);
    gradd_model_destroy(model);
}

TEST(constants_are_uploaded_once) {
    gradd_model_t *model = load();
    gradd_device_t *fake = open_named("fake");
    fake_fixture_t w = open_fixture(make_plan(model, fake));
    const int64_t block = w.plan->constants.bytes;
    CHECK_EQ_INT(fake_bytes(fake->queue), block);
    CHECK(block >= (int64_t)sizeof(vector_t) * (N + 1));
    CHECK(block < (int64_t)sizeof(vector_t) * (N + 2));
    train(&w, 1, false), train(&w, 1, false); /* the expected backward */
    gradd_device_trim(fake);
    CHECK(fake_pending(fake->queue) > 0); /* the arena goes when its turn comes */
    CHECK_OK(fake->backend->wait(fake->queue, NULL));
    CHECK_EQ_INT(fake_bytes(fake->queue), block);
    close_fixture(&w);
    CHECK_OK(fake->backend->wait(fake->queue, NULL));
    CHECK_EQ_INT(fake_bytes(fake->queue), 0);
    gradd_device_close(fake);
    gradd_model_destroy(model);
}

/* y = op(op(op(x))) */
static gradd_plan_t *chain(const char *op, gradd_device_t *device, gradd_model_t **out_model) {
    static const int32_t first = 0;
    static const gradd_type_t x = {GRADD_DT_F32, 1, {ELEMENTS}};
    const gradd_plan_options_t o = options_of(&x, 1, &first, 1, device);
    gradd_plan_t *plan;
    size_t n;
    Onnx__ModelProto *proto = build_model();
    build_input(proto, "x", GRADD_DT_F32, 1, BUILD_DIMS(ELEMENTS));
    build_node(proto, op, "one", "x", "a");
    build_node(proto, op, "two", "a", "b");
    build_node(proto, op, "three", "b", "y");
    build_output(proto, "y");
    uint8_t *bytes = build_pack(proto, &n);
    CHECK_OK(gradd_model_load(bytes, n, out_model));
    CHECK_OK(gradd_plan_create(*out_model, &o, &plan));
    return plan;
}

/* A backward that keeps the activations cannot put gradients in their place. */
static void move_arena(const late_device_t *d) {
    gradd_model_t *model;
    gradd_device_t *fake = open_named(d->name);
    fake_fixture_t w = open_fixture(chain("Sin", fake, &model)); /* the gradient needs cosines */
    gradd_run_t *run;
    vector_t first;
    CHECK_OK(forward(&w, 0, NULL, &run));
    CHECK_OK(backward(&w, run, 1, true));
    CHECK(gradd_run_bytes(run) > gradd_plan_info(w.plan)->arena_bytes);
    memcpy(first, w.dx[0], sizeof first);
    CHECK_OK(backward(&w, run, 1, false));
    gradd_run_destroy(run);
    CHECK(!memcmp(w.dx[0], first, sizeof first));
    for (int k = 0; k < ELEMENTS; k++) {
        float a = sinf(w.x[0][k]), b = sinf(a);
        CHECK_NEAR(first[k], w.dy[0][k] * cosf(w.x[0][k]) * cosf(a) * cosf(b), 1e-5);
    }
    close_fixture(&w);
    gradd_device_close(fake);
    gradd_model_destroy(model);
}

TEST(an_arena_moves_with_what_it_holds) {
    FOR_DEVICES(d) move_arena(d);
}

/* ---- waiting --------------------------------------------------------------------------------- */

static void cancel_later(void *context, const gradd_plan_t *plan, const plan_launch_t *launch,
                         double seconds) {
    (void)plan, (void)launch, (void)seconds;
    *(int *)context = 1;
}

/* A caller that is told that a run has ended may reuse its tensors. */
static void cancel_run(const late_device_t *d) {
    gradd_model_t *model = load();
    gradd_device_t *fake = open_named(d->name);
    fake_fixture_t w = open_fixture(make_plan(model, fake));
    int cancel = 0;
    gradd_run_t *run;
    device_set_hook(fake, cancel_later, &cancel);
    CHECK_STATUS(GRADD_E_STALE, forward(&w, 0, &cancel, &run));
    CHECK_EQ_INT(d->pending(fake->queue), 0);
    gradd_run_destroy(run);
    close_fixture(&w);
    gradd_device_close(fake);
    gradd_model_destroy(model);
}

TEST(nothing_is_under_way_after_a_run_has_failed) {
    FOR_DEVICES(d) cancel_run(d);
}

/* The memory that its constants are copied from is freed with it. */
TEST(the_end_of_a_plan_waits) {
    gradd_model_t *model = load();
    gradd_device_t *fake = open_named("fake");
    gradd_plan_t *plan = make_plan(model, fake);
    const int blocks = plan->constants.n_blocks;
    CHECK(fake_pending(fake->queue) > blocks);
    gradd_plan_destroy(plan);
    CHECK(fake_pending(fake->queue) <= blocks); /* which go in their turn */
    gradd_device_close(fake);
    gradd_model_destroy(model);
}

static void check_finite(const late_device_t *d) {
    gradd_model_t *model = load();
    gradd_device_t *fake = open_named(d->name);
    fake_fixture_t w = open_fixture(make_plan(model, fake));
    gradd_run_t *run;
    w.x[2][7] = NAN;
    CHECK_STATUS(GRADD_E_NONFINITE, forward(&w, GRADD_RUN_FINITE_CHECK, NULL, &run));
    CHECK_ERROR_HAS("'half2' (Mul): output 0, element 7 of 1000 is nan");
    gradd_run_destroy(run);
    close_fixture(&w);
    gradd_device_close(fake);
    gradd_model_destroy(model);
}

TEST(the_finite_check_waits) {
    FOR_DEVICES(d) check_finite(d);
}

/* The forward passes; the backward names what has made the NaN there, or its own first node. */
static void check_gradients(const late_device_t *d) {
    gradd_model_t *model = load();
    gradd_device_t *fake = open_named(d->name);
    fake_fixture_t w = open_fixture(make_plan(model, fake));
    gradd_run_t *run;
    CHECK_OK(forward(&w, GRADD_RUN_GRADIENT_CHECK, NULL, &run));
    w.dy[2][7] = INFINITY; /* as in PyTorch, no anomaly */
    CHECK_OK(backward(&w, run, 1 << 2, true));
    w.dy[2][7] = NAN;
    CHECK_STATUS(GRADD_E_NONFINITE, backward(&w, run, 1 << 2, true));
    CHECK_ERROR_HAS("gradient of node");
    CHECK_ERROR_HAS("is nan; the gradient of output 2 has one when it arrives");
    gradd_run_destroy(run);
    w.x[2][7] = NAN;
    w.dy[2][7] = 1;
    CHECK_OK(forward(&w, GRADD_RUN_GRADIENT_CHECK, NULL, &run));
    CHECK_OK(backward(&w, run, 1 << 1, true)); /* it does not reach that gradient */
    w.dy[1][7] = NAN;
    CHECK_STATUS(GRADD_E_NONFINITE, backward(&w, run, 1 << 1, true));
    CHECK_ERROR_HAS("is nan; the gradient of output 1 has one when it arrives");
    CHECK_STATUS(GRADD_E_NONFINITE, backward(&w, run, 1 << 2, false));
    CHECK_ERROR_HAS("'half2' (Mul): it makes the first nan of the forward; input 'x2' has one");
    CHECK_ERROR_HAS("in the backward that reaches gradient of node");
    gradd_run_destroy(run);
    close_fixture(&w);
    gradd_device_close(fake);
    gradd_model_destroy(model);
}

TEST(the_check_of_gradients_waits) {
    FOR_DEVICES(d) check_gradients(d);
}

static void read_back(const late_device_t *d) {
    gradd_device_t *fake = open_named(d->name);
    shared_t g = shared_make(sizeof(vector_t));
    vector_t *there = (vector_t *)g.host, mine;
    shared_enter(&g, fake);
    (*there)[9] = 42;
    CHECK_OK(device_read(fake, mine, shared_at(&g, *there), sizeof mine));
    CHECK(mine[9] == 42);
    shared_free(&g);
    gradd_device_close(fake);
}

TEST(reading_back_waits) {
    FOR_DEVICES(d) read_back(d);
}

/* ---- what fails ------------------------------------------------------------------------------ */

/* y = Gather(x, i), then Tanh */
static gradd_plan_t *gather(gradd_device_t *device, gradd_model_t **out_model) {
    static const int32_t first = 0;
    static const gradd_type_t types[] = {
        {GRADD_DT_F32, 1, {ELEMENTS}},
        {GRADD_DT_I64, 1, {4}       }
    };
    const gradd_plan_options_t o = options_of(types, 2, &first, 1, device);
    gradd_plan_t *plan;
    size_t n;
    Onnx__ModelProto *proto = build_model();
    build_input(proto, "x", GRADD_DT_F32, 1, BUILD_DIMS(ELEMENTS));
    build_input(proto, "i", GRADD_DT_I64, 1, BUILD_DIMS(4));
    build_node(proto, "Gather", "pick", "x,i", "picked");
    build_node(proto, "Tanh", "bend", "picked", "y");
    build_output(proto, "y");
    uint8_t *bytes = build_pack(proto, &n);
    CHECK_OK(gradd_model_load(bytes, n, out_model));
    CHECK_OK(gradd_plan_create(*out_model, &o, &plan));
    return plan;
}

/* The operator has been given away long ago when its indices are looked at. */
static void name_fault(const late_device_t *d) {
    gradd_model_t *model;
    gradd_device_t *fake = open_named(d->name);
    gradd_plan_t *plan = gather(fake, &model);
    shared_t g = shared_make(2 * sizeof(vector_t));
    int64_t *i = (int64_t *)(g.host + 4096);
    gradd_run_t *run;
    for (int turn = 0; turn < 3; turn++) {
        shared_enter(&g, fake);
        const void *in[] = {shared_at(&g, g.host), shared_at(&g, i)};
        void *out[] = {shared_at(&g, i + 8)};
        i[2] = turn == 1 ? ELEMENTS : 5;
        CHECK_OK(gradd_run_create(plan, &run));
        gradd_status_t status = gradd_run_forward(run, 1, 0, in, out, NULL);
        CHECK_EQ_INT(status, turn == 1 ? GRADD_E_INDEX : GRADD_OK);
        if (status) CHECK_ERROR_HAS("'pick' (Gather): ");
        if (status) CHECK_ERROR_HAS("1000");
        CHECK_EQ_INT(d->pending(fake->queue), 0);
        gradd_run_destroy(run);
        shared_leave(&g);
    }
    shared_free(&g);
    gradd_plan_destroy(plan);
    gradd_device_close(fake);
    gradd_model_destroy(model);
}

TEST(a_fault_names_its_node) {
    FOR_DEVICES(d) name_fault(d);
}

/* Whichever allocation fails, of plans, arenas, wider arenas or zeros: a named error, nothing lost,
 * and the next try succeeds. */
static void fail_allocations(const late_device_t *d) {
    gradd_model_t *model = load();
    gradd_device_t *fake = open_named(d->name), *other = open_named(d->bits);
    fake_fixture_t now = open_fixture(make_plan(model, other));
    train(&now, 6, true);
    const int64_t before = d->bytes(fake->queue);
    int failed = 0;
    for (int n = 1; failed == n - 1; n++) {
        gradd_plan_t *plan = NULL;
        gradd_run_t *run = NULL;
        gradd_device_trim(fake);
        d->fail(fake->queue, FAKE_ALLOC, n);
        gradd_status_t status = try_plan(model, fake, &plan);
        fake_fixture_t late = {0};
        if (!status) {
            late = open_fixture(plan);
            status = forward(&late, 0, NULL, &run);
            if (!status) status = backward(&late, run, 6, true);
            if (!status) status = backward(&late, run, 6, false);
        }
        if (status) CHECK_EQ_INT(status, GRADD_E_NOMEM);
        if (status) CHECK_ERROR_HAS(d->no_memory);
        if (!status) CHECK(!memcmp(late.dx, now.dx, sizeof(vector_t) * N));
        failed += status != GRADD_OK;
        d->fail(fake->queue, FAKE_ALLOC, 0);
        if (run) gradd_run_destroy(run);
        if (plan) close_fixture(&late);
    }
    CHECK(failed >= 3);
    gradd_device_trim(fake);
    CHECK_OK(fake->backend->wait(fake->queue, NULL));
    CHECK_EQ_INT(d->bytes(fake->queue), before);
    close_fixture(&now);
    gradd_device_close(fake), gradd_device_close(other);
    gradd_model_destroy(model);
}

TEST_LIMIT(every_allocation_may_fail, 60) {
    FOR_DEVICES(d) fail_allocations(d);
}

static void refuse_segment(const late_device_t *d) {
    gradd_device_t *fake = open_named(d->name);
    gradd_segment_t mine = GRADD_SEGMENT_INIT, theirs = GRADD_SEGMENT_INIT;
    CHECK_OK(gradd_segment_create("test", 8192, &mine));
    d->fail(fake->queue, FAKE_MAP, 1);
    int fd = dup(mine.fd);
    CHECK_STATUS(d->map_failure, gradd_segment_open(fd, 8192, device_mapper(fake), &theirs));
    CHECK_ERROR_HAS(d->no_map);
    CHECK_OK(gradd_segment_open(fd, 8192, device_mapper(fake), &theirs));
    CHECK(theirs.base != mine.base);
    gradd_segment_finish(&theirs), gradd_segment_finish(&mine);
    gradd_device_close(fake);
}

TEST(a_segment_may_be_refused) {
    FOR_DEVICES(d) refuse_segment(d);
}

/* Wherever it is lost: the run says so, with the node if the device knows it, and so does
 * everything that is asked afterwards. */
static void check_lost(const late_device_t *d, fake_point_t point) {
    gradd_model_t *model = load();
    for (int n = 1, lost = 1; lost; n++) {
        sim_recover();
        gradd_device_t *fake = open_named(d->name);
        fake_fixture_t w = open_fixture(make_plan(model, fake));
        gradd_run_t *run;
        d->fail(fake->queue, point, n);
        gradd_status_t status = forward(&w, 0, NULL, &run);
        if (!status) status = backward(&w, run, 2, true);
        lost = status == GRADD_E_DEVICE;
        if (status) CHECK_STATUS(GRADD_E_DEVICE, status);
        if (lost) CHECK_ERROR_HAS(d->lost);
        if (lost) CHECK((strstr(gradd_error_message(), "one of ") != NULL) == (point == FAKE_ITEM));
        if (lost && point == FAKE_LAUNCH) CHECK(strcmp(gradd_error_message(), d->lost));
        gradd_run_destroy(run);
        if (lost) CHECK_STATUS(GRADD_E_DEVICE, forward(&w, 0, NULL, &run));
        if (lost) gradd_run_destroy(run);
        if (!lost) CHECK(n > 10);
        close_fixture(&w);
        gradd_device_close(fake);
    }
    gradd_model_destroy(model);
}

TEST_LIMIT(a_lost_device_says_so, 60) {
    FOR_DEVICES(d) check_lost(d, FAKE_ITEM);
}

TEST_LIMIT(a_device_that_is_lost_in_a_launch_names_it, 60) {
    check_lost(&devices[0], FAKE_LAUNCH);
}

/* A plan, a forward and a backward on the emulated GPU, where a call of CUDA fails on the way. */
static gradd_status_t try_emu(gradd_model_t *model, const char *call, int n, int *out_left) {
    gradd_device_t *device = NULL;
    gradd_plan_t *plan = NULL;
    gradd_run_t *run = NULL;
    fake_fixture_t w = {0};
    const gradd_device_options_t options = {.name = "emu", .threads = 1};
    sim_recover();
    sim_fail(call, n);
    gradd_status_t status = gradd_device_open(&options, &device);
    if (!status) status = try_plan(model, device, &plan);
    if (!status) {
        w = open_fixture(plan);
        status = forward(&w, 0, NULL, &run);
        if (!status) status = backward(&w, run, 6, false);
    }
    *out_left = sim_left();
    sim_fail("", 0);
    if (status)
        CHECK(strstr(gradd_error_message(), "GPU") || strstr(gradd_error_message(), "CUDA"));
    if (run) gradd_run_destroy(run);
    if (w.plan) close_fixture(&w);
    if (device) gradd_device_close(device);
    sim_recover();
    CHECK_EQ_INT(sim_bytes(), 0);
    return status;
}

/* Whichever call of CUDA fails, and whenever: an error that names CUDA or the GPU, or none; nothing
 * is left, and the next device works. Segments are left out: the test's own code maps them. */
TEST_LIMIT(every_call_of_cuda_may_fail, 60) {
    static const char *const calls[] = {"cudaMalloc",
                                        "cudaMallocAsync",
                                        "cudaMemsetAsync",
                                        "cudaMemcpyAsync",
                                        "cudaStreamSynchronize",
                                        "cudaEventCreate",
                                        "cudaEventRecord",
                                        "cudaEventSynchronize",
                                        "cudaEventElapsedTime",
                                        "cudaDeviceSynchronize",
                                        "cudaStreamCreateWithFlags",
                                        "kernel"};
    gradd_model_t *model = load();
    int failed = 0;
    for (size_t k = 0; k < sizeof calls / sizeof calls[0]; k++)
        for (int n = 1, left = 0; !left; n += 1 + n / 4) {
            const gradd_status_t status = try_emu(model, calls[k], n, &left);
            if (left) CHECK_OK(status); /* it did not come to that */
            failed += status != GRADD_OK;
        }
    CHECK(failed > 20);
    gradd_model_destroy(model);
}

/* ---- operands that the host reads -------------------------------------------------------------
 */

static gradd_status_t cumsum(gradd_device_t *device, bool known, gradd_model_t **out_model,
                             gradd_plan_t **out) {
    static const int32_t first = 0;
    static const gradd_type_t types[] = {
        {GRADD_DT_F32, 1, {ELEMENTS}},
        {GRADD_DT_I64, 0, {0}       }
    };
    const gradd_plan_options_t o = options_of(types, known ? 1 : 2, &first, 1, device);
    static const int64_t axis = 0;
    size_t n;
    Onnx__ModelProto *proto = build_model();
    build_input(proto, "x", GRADD_DT_F32, 1, BUILD_DIMS(ELEMENTS));
    if (known)
        build_raw(build_init(proto, "axis", GRADD_DT_I64, 0, BUILD_DIMS(1)),
                  memcpy(build_alloc(sizeof axis), &axis, sizeof axis), sizeof axis);
    else
        build_input(proto, "axis", GRADD_DT_I64, 0, BUILD_DIMS(1));
    build_node(proto, "CumSum", "sum", "x,axis", "y");
    build_output(proto, "y");
    uint8_t *bytes = build_pack(proto, &n);
    CHECK_OK(gradd_model_load(bytes, n, out_model));
    return gradd_plan_create(*out_model, &o, out);
}

TEST(what_the_host_reads_must_be_known) {
    gradd_device_t *fake = open_named("fake");
    gradd_model_t *model;
    gradd_plan_t *plan;
    gradd_run_t *run;
    CHECK_STATUS(GRADD_E_UNSUPPORTED, cumsum(fake, false, &model, &plan));
    CHECK_ERROR_HAS("'sum' (CumSum): the device 'fake' runs CumSum only where input 1 is known");
    gradd_model_destroy(model);
    CHECK_OK(cumsum(fake, true, &model, &plan));
    fake_fixture_t w = open_fixture(plan);
    CHECK_OK(forward(&w, 0, NULL, &run));
    CHECK_OK(backward(&w, run, 1, false));
    CHECK_NEAR(w.y[0][1], w.x[0][0] + w.x[0][1], 1e-6);
    gradd_run_destroy(run);
    close_fixture(&w);
    gradd_device_close(fake);
    gradd_model_destroy(model);
}
