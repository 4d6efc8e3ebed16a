/* Two devices in one process: threads, limits, spare arenas and hooks of their own, also while both
 * are at work. */
#include "server/device/device.h"

#include <math.h>
#include <omp.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/math/bf16.h"
#include "server/exec/run.h"
#include "tests/c/onnx_build.h"
#include "tests/test.h"

/* Wide enough that a plan takes all threads of its device. */
enum { ROWS = 512, WIDTH = 512, ROUNDS = 6 };

static gradd_device_t *open_device(int threads, int64_t limit) {
    const gradd_device_options_t o = {.threads = threads, .memory_limit = limit};
    gradd_device_t *device;
    CHECK_OK(gradd_device_open(&o, &device));
    return device;
}

/* y = Softmax(Tanh(x W) W) */
static gradd_model_t *load(void) {
    gradd_model_t *model;
    size_t n;
    Onnx__ModelProto *proto = build_model();
    build_input(proto, "x", GRADD_DT_F32, 2, BUILD_DIMS(ROWS, WIDTH));
    build_input(proto, "w", GRADD_DT_F32, 2, BUILD_DIMS(WIDTH, WIDTH));
    build_node(proto, "MatMul", "first", "x,w", "a");
    build_node(proto, "Tanh", "bend", "a", "b");
    build_node(proto, "MatMul", "second", "b,w", "c");
    build_node(proto, "Softmax", "last", "c", "y");
    build_output(proto, "y");
    uint8_t *bytes = build_pack(proto, &n);
    CHECK_OK(gradd_model_load(bytes, n, &model));
    return model;
}

static gradd_plan_t *make_plan(gradd_model_t *model, gradd_device_t *device) {
    static const gradd_type_t types[] = {
        {GRADD_DT_F32, 2, {ROWS, WIDTH} },
        {GRADD_DT_F32, 2, {WIDTH, WIDTH}}
    };
    static const int32_t output = 0, grads[] = {0, 1};
    const gradd_plan_options_t o = {.inputs = types,
                                    .n_inputs = 2,
                                    .grads = grads,
                                    .n_grads = 2,
                                    .outputs = &output,
                                    .n_outputs = 1,
                                    .grad_outputs = &output,
                                    .n_grad_outputs = 1,
                                    .device = device};
    gradd_plan_t *plan;
    CHECK_OK(gradd_plan_create(model, &o, &plan));
    return plan;
}

typedef struct device_tensors_s {
    _Alignas(64) float x[ROWS * WIDTH], w[WIDTH * WIDTH], y[ROWS * WIDTH], dy[ROWS * WIDTH];
    _Alignas(64) float dx[ROWS * WIDTH], dw[WIDTH * WIDTH];
} device_tensors_t;

static void fill(float *v, int n, unsigned step) {
    for (int i = 0; i < n; i++)
        v[i] = (float)((unsigned)i * step % 401) / 400 - 0.5f;
}

static device_tensors_t *new_tensors(void) {
    device_tensors_t *t = aligned_alloc(64, sizeof *t);
    CHECK(t != NULL);
    memset(t, 0, sizeof *t);
    fill(t->x, ROWS * WIDTH, 7919), fill(t->w, WIDTH * WIDTH, 104729);
    fill(t->dy, ROWS * WIDTH, 1299709);
    return t;
}

static void step(gradd_plan_t *plan, device_tensors_t *t) {
    const void *inputs[] = {t->x, t->w}, *grad_outputs[] = {t->dy};
    void *outputs[] = {t->y}, *grads[] = {t->dx, t->dw};
    bool written[2];
    gradd_run_t *run;
    CHECK_OK(gradd_run_create(plan, &run));
    CHECK_OK(gradd_run_forward(run, 1, 0, inputs, outputs, NULL));
    CHECK_OK(gradd_run_backward(run, grad_outputs, grads, false, written, NULL));
    gradd_run_destroy(run);
}

typedef struct side_s {
    gradd_device_t *device;
    gradd_model_t *model;
    device_tensors_t *tensors;
} side_t;

/* Everything that a device does, in one thread: plans as well. */
static void *work(void *arg) {
    side_t *side = arg;
    for (int i = 0; i < ROUNDS; i++) {
        gradd_plan_t *plan = make_plan(side->model, side->device);
        step(plan, side->tensors);
        gradd_plan_destroy(plan);
    }
    return NULL;
}

static void check_same(const device_tensors_t *a, const device_tensors_t *b) {
    CHECK(!memcmp(a->y, b->y, sizeof a->y));
    CHECK(!memcmp(a->dx, b->dx, sizeof a->dx));
    CHECK(!memcmp(a->dw, b->dw, sizeof a->dw));
}

TEST(two_devices_work_at_a_time) {
    gradd_model_t *model = load();
    side_t sides[2], alone[2];
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        sides[i] = (side_t){open_device(i + 1, 0), model, new_tensors()};
        alone[i] = (side_t){open_device(i + 1, 0), model, new_tensors()};
        work(&alone[i]);
    }
    for (int i = 0; i < 2; i++)
        CHECK_EQ_INT(pthread_create(&threads[i], NULL, work, &sides[i]), 0);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < 2; i++) {
        check_same(sides[i].tensors, alone[i].tensors);
        gradd_device_close(sides[i].device), gradd_device_close(alone[i].device);
        free(sides[i].tensors), free(alone[i].tensors);
    }
    gradd_model_destroy(model);
}

static void note_threads(void *context, const gradd_plan_t *plan, const plan_launch_t *launch,
                         double seconds) {
    (void)plan, (void)launch, (void)seconds;
    *(int *)context = omp_get_max_threads();
}

TEST(a_thread_may_use_two_devices_in_turn) {
    gradd_model_t *model = load();
    gradd_device_t *devices[2];
    gradd_plan_t *plans[2];
    device_tensors_t *t = new_tensors();
    int seen[2] = {0};
    for (int i = 0; i < 2; i++) {
        devices[i] = open_device(i + 2, 0);
        plans[i] = make_plan(model, devices[i]);
    }
    for (int i = 0; i < 2; i++) {
        device_set_hook(devices[i], note_threads, &seen[i]);
        step(plans[i], t);
    }
    CHECK_EQ_INT(seen[0], 2);
    CHECK_EQ_INT(seen[1], 3);
    CHECK_EQ_INT(pool_bytes(devices[0]), gradd_plan_info(plans[0])->arena_bytes);
    gradd_device_trim(devices[0]);
    CHECK_EQ_INT(pool_bytes(devices[0]), 0);
    CHECK_EQ_INT(pool_bytes(devices[1]), gradd_plan_info(plans[1])->arena_bytes);
    for (int i = 0; i < 2; i++) {
        gradd_plan_destroy(plans[i]);
        gradd_device_close(devices[i]);
    }
    gradd_model_destroy(model);
    free(t);
}

static gradd_status_t refuse(void *context, int64_t bytes) {
    *(int64_t *)context = bytes;
    return GRADD_FAIL(NOMEM, "refused");
}

TEST(limits_are_the_devices_own) {
    gradd_model_t *model = load();
    int64_t asked = 0;
    const gradd_device_options_t o = {.threads = 1, .admit = refuse, .admit_context = &asked};
    gradd_device_t *free_one = open_device(1, 0), *tight = open_device(1, 1000), *asking;
    CHECK_OK(gradd_device_open(&o, &asking));
    gradd_plan_t *plans[] = {make_plan(model, free_one), make_plan(model, tight),
                             make_plan(model, asking)};
    gradd_run_t *run;
    CHECK_STATUS(GRADD_E_NOMEM, gradd_run_create(plans[1], &run));
    CHECK_EQ_INT(asked, 0);
    CHECK_STATUS(GRADD_E_NOMEM, gradd_run_create(plans[2], &run));
    CHECK_EQ_INT(asked, gradd_plan_info(plans[2])->arena_bytes);
    CHECK_OK(gradd_run_create(plans[0], &run));
    gradd_run_destroy(run);
    for (int i = 0; i < 3; i++)
        gradd_plan_destroy(plans[i]);
    gradd_device_close(free_one), gradd_device_close(tight), gradd_device_close(asking);
    gradd_model_destroy(model);
}

TEST(an_unknown_device_is_named) {
    const gradd_device_options_t o = {.name = "abacus"};
    gradd_device_t *device;
    CHECK_STATUS(GRADD_E_UNSUPPORTED, gradd_device_open(&o, &device));
    CHECK_ERROR_HAS("there is no device 'abacus'");
}

/* ---- looking ---- */

static gradd_nonfinite_t find_nonfinite(gradd_dtype_t dtype, void *data, int64_t n) {
    const gradd_view_t view = {
        {dtype, 1, {n}},
        data
    };
    gradd_device_t *d = open_device(1, 0);
    gradd_nonfinite_t found;
    CHECK_OK(d->backend->find_nonfinite(d->queue, &view, &found));
    gradd_device_close(d);
    return found;
}

TEST(a_scan_finds_the_first_of_each) {
    float f32[] = {1, -INFINITY, 0, NAN, INFINITY, NAN}, good[] = {1, -1e38f};
    double f64[] = {0, 0, INFINITY};
    gradd_bf16_t bf16[] = {gradd_f32_bf16(NAN), gradd_f32_bf16(1)};
    int32_t i32[] = {INT32_MAX};
    gradd_nonfinite_t found = find_nonfinite(GRADD_DT_F32, f32, 6);
    CHECK(found.nan == 3 && found.inf == 1 && found.negative);
    found = find_nonfinite(GRADD_DT_F32, good, 2);
    CHECK(found.nan == -1 && found.inf == -1);
    found = find_nonfinite(GRADD_DT_F64, f64, 3);
    CHECK(found.nan == -1 && found.inf == 2 && !found.negative);
    found = find_nonfinite(GRADD_DT_BF16, bf16, 2);
    CHECK(found.nan == 0 && found.inf == -1);
    found = find_nonfinite(GRADD_DT_I32, i32, 1);
    CHECK(found.nan == -1 && found.inf == -1);
}
