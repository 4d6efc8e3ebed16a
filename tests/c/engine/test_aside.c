/* What is put aside between two launches, or two chunks of a step, goes on where it was: the same
 * bits, whatever ran meanwhile.
 */
#include "tests/c/step_fixture.h"

#include "server/device/device.h"
#include "server/exec/run.h"
#include "tests/c/onnx_build.h"
#include "tests/c/tanh_layers.h"

enum { LAYERS = 3, HIGH = TANH_ROWS, WIDTH = TANH_WIDTH };

typedef float square_t[WIDTH * WIDTH];

/* Of one client. */
typedef struct stack_s {
    _Alignas(64) float x[HIGH * WIDTH], y[HIGH * WIDTH], dy[HIGH * WIDTH];
    _Alignas(64) square_t w[LAYERS], dw[LAYERS];
    const void *inputs[LAYERS + 1], *grad_outputs[1];
    void *outputs[1], *grads[LAYERS];
    bool written[LAYERS];
    gradd_run_t *run;
} layers_t;

static layers_t *new_stack(unsigned salt, gradd_plan_t *plan) {
    layers_t *s = aligned_alloc(64, sizeof *s);
    CHECK(s != NULL);
    memset(s, 0, sizeof *s);
    tanh_layers_fill(s->x, HIGH * WIDTH, 7919 + salt),
        tanh_layers_fill(s->dy, HIGH * WIDTH, 1299709 + salt);
    s->inputs[0] = s->x, s->grad_outputs[0] = s->dy, s->outputs[0] = s->y;
    for (int i = 0; i < LAYERS; i++) {
        tanh_layers_fill(s->w[i], WIDTH * WIDTH, 104729 + salt + (unsigned)i);
        s->inputs[1 + i] = s->w[i], s->grads[i] = s->dw[i];
    }
    CHECK_OK(gradd_run_create(plan, &s->run));
    return s;
}

static void destroy_stack(layers_t *s) {
    gradd_run_destroy(s->run);
    free(s);
}

static int n_asked;

static bool always(void *context) {
    (void)context;
    n_asked++;
    return true;
}

static gradd_status_t forward(layers_t *s) {
    return gradd_run_forward(s->run, 1, 0, s->inputs, s->outputs, NULL);
}

static gradd_status_t backward(layers_t *s) {
    return gradd_run_backward(s->run, s->grad_outputs, s->grads, false, s->written, NULL);
}

static void continue_both(layers_t *a, layers_t *b) {
    int turns = 0;
    for (layers_t *s = a; run_is_aside(a->run) || run_is_aside(b->run); s = s == a ? b : a) {
        if (!run_is_aside(s->run)) continue;
        CHECK_OK(run_continue(s->run));
        turns++;
    }
    CHECK(turns >= 4);
}

static void check_same(const layers_t *s, const layers_t *expected) {
    CHECK(!memcmp(s->y, expected->y, sizeof s->y));
    CHECK(!memcmp(s->dw, expected->dw, sizeof s->dw));
}

TEST(two_runs_of_a_plan_go_on_in_turn) {
    gradd_device_t *device = open_on(&gradd_backend_cpu);
    gradd_model_t *model = tanh_layers_load(LAYERS);
    gradd_plan_t *plan = tanh_layers_plan(model, device, LAYERS, false);
    layers_t *alone[2], *both[2];
    for (unsigned i = 0; i < 2; i++) {
        alone[i] = new_stack(17 * i, plan);
        CHECK_OK(forward(alone[i]));
        CHECK_OK(backward(alone[i]));
        CHECK(!run_is_aside(alone[i]->run));
    }
    CHECK(memcmp(alone[0]->dw, alone[1]->dw, sizeof alone[0]->dw) != 0);
    device_set_way(device, always, NULL);
    for (unsigned i = 0; i < 2; i++) {
        both[i] = new_stack(17 * i, plan);
        CHECK_OK(forward(both[i]));
        CHECK(run_is_aside(both[i]->run));
    }
    continue_both(both[0], both[1]);
    for (int i = 0; i < 2; i++)
        CHECK_OK(backward(both[i]));
    continue_both(both[0], both[1]);
    for (int i = 0; i < 2; i++) {
        check_same(both[i], alone[i]);
        CHECK(both[i]->written[0]);
        destroy_stack(both[i]), destroy_stack(alone[i]);
    }
    gradd_plan_destroy(plan);
    gradd_model_destroy(model);
    gradd_device_close(device);
}

static float *values(const gradd_type_t *type) {
    const int n = (int)gradd_type_count(type);
    float *v = aligned_alloc(64, sizeof *v * (size_t)n);
    CHECK(v != NULL);
    tanh_layers_fill(v, n, 7919);
    return v;
}

static int64_t *indices(const gradd_type_t *type) {
    const int64_t n = gradd_type_count(type);
    int64_t *v = aligned_alloc(64, sizeof *v * (size_t)n);
    CHECK(v != NULL);
    for (int64_t i = 0; i < n; i++)
        v[i] = i * 7919 % 211;
    return v;
}

static gradd_backend_t touching;
static int n_touched;
static size_t most_touched;

static void count_touch(gradd_queue_t *queue, void *memory, size_t bytes, bool written) {
    n_touched++;
    if (bytes > most_touched) most_touched = bytes;
    CHECK_EQ_INT((uintptr_t)memory % 4096, 0);
    gradd_backend_cpu.touch(queue, memory, bytes, written);
}

static gradd_device_t *open_touching(void) {
    touching = gradd_backend_cpu;
    touching.touch = count_touch;
    n_touched = 0;
    return open_on(&touching);
}

static int count_turns(gradd_plan_t *plan, const float *x, const void *w, float *y) {
    gradd_run_t *run;
    int turns = 0;
    CHECK_OK(gradd_run_create(plan, &run));
    CHECK_OK(gradd_run_forward(run, 1, 0, (const void *[]){x, w}, (void *[]){y}, NULL));
    for (; run_is_aside(run); turns++)
        CHECK_OK(run_continue(run));
    gradd_run_destroy(run);
    return turns;
}

/* An operator over two inputs that takes long by the model is made in parts, put aside between
 * them, and has the bits of a launch that nothing interrupts. It is put aside as well between
 * pieces of memory that it is the first to use, of which it asks for each once. */
static void check_parts(const char *op, const gradd_type_t types[2], const gradd_type_t *result) {
    static const int32_t output = 0;
    const size_t bytes = sizeof(float) * (size_t)gradd_type_count(result);
    gradd_device_t *device = open_touching();
    gradd_model_t *model;
    gradd_plan_t *plan;
    size_t n;
    Onnx__ModelProto *proto = build_model();
    build_input(proto, "x", GRADD_DT_F32, types[0].rank, types[0].dims);
    build_input(proto, "w", types[1].dtype, types[1].rank, types[1].dims);
    build_node(proto, op, "y", "x,w", "y");
    build_output(proto, "y");
    uint8_t *onnx = build_pack(proto, &n);
    CHECK_OK(gradd_model_load(onnx, n, &model));
    const gradd_plan_options_t o = {
        .inputs = types, .n_inputs = 2, .outputs = &output, .n_outputs = 1, .device = device};
    CHECK_OK(gradd_plan_create(model, &o, &plan));
    int parts = 0;
    for (int i = 0; i < plan->forward.n; i++) {
        const int of_launch = plan->forward.launches[i].args.parts;
        parts += of_launch > 1 ? of_launch : 1;
    }
    CHECK(parts > plan->forward.n);
    float *x = values(&types[0]), *y[2];
    void *w = types[1].dtype == GRADD_DT_F32 ? (void *)values(&types[1]) : indices(&types[1]);
    for (int i = 0; i < 2; i++) {
        y[i] = aligned_alloc(64, bytes);
        CHECK(y[i] != NULL);
    }
    CHECK_EQ_INT(count_turns(plan, x, w, y[0]), 0);
    CHECK_EQ_INT(n_touched, 0);
    device_set_way(device, always, NULL);
    const int turns = count_turns(plan, x, w, y[1]);
    CHECK_EQ_INT(turns, parts - 1 + n_touched);
    CHECK(n_touched >= 2 && most_touched <= (size_t)16 << 20);
    const int touched = n_touched;
    CHECK_EQ_INT(count_turns(plan, x, w, y[1]), parts - 1);
    device_forget(device, NULL, 0);
    CHECK_EQ_INT(count_turns(plan, x, w, y[1]), parts - 1 + touched);
    CHECK(!memcmp(y[0], y[1], bytes));
    CHECK(y[0][bytes / sizeof(float) - 1] != 0);
    free(x), free(w), free(y[0]), free(y[1]);
    gradd_plan_destroy(plan);
    gradd_model_destroy(model);
    gradd_device_close(device);
}

TEST_LIMIT(a_long_product_is_made_in_parts, 60) {
    const gradd_type_t types[] = {
        {GRADD_DT_F32, 2, {1024, 4096}},
        {GRADD_DT_F32, 2, {4096, 1024}}
    };
    const gradd_type_t result = {
        GRADD_DT_F32, 2, {1024, 1024}
    };
    check_parts("MatMul", types, &result);
}

/* The kernel knows nothing of parts: its launches are cut along the batch. */
TEST_LIMIT(a_long_convolution_is_made_in_parts, 60) {
    const gradd_type_t types[] = {
        {GRADD_DT_F32, 4, {48, 64, 64, 64}},
        {GRADD_DT_F32, 4, {64, 64, 3, 3}  }
    };
    const gradd_type_t result = {
        GRADD_DT_F32, 4, {48, 64, 62, 62}
    };
    check_parts("Conv", types, &result);
}

/* Each part makes its own numbers of rows. */
TEST_LIMIT(many_lookups_are_made_in_parts, 60) {
    const gradd_type_t types[] = {
        {GRADD_DT_F32, 2, {4096, 512}},
        {GRADD_DT_I64, 2, {4096, 512}}
    };
    const gradd_type_t result = {
        GRADD_DT_F32, 2, {4096, 512}
    };
    check_parts("GatherElements", types, &result);
}

/* Of few operations, and of much memory. */
TEST_LIMIT(a_long_sum_of_tensors_is_made_in_parts, 60) {
    const gradd_type_t types[] = {
        {GRADD_DT_F32, 2, {8192, 2048}},
        {GRADD_DT_F32, 2, {8192, 2048}}
    };
    const gradd_type_t result = {
        GRADD_DT_F32, 2, {8192, 2048}
    };
    check_parts("Add", types, &result);
}

/* What is aside may be given up, or found to be cancelled. */
TEST(a_run_that_is_aside_may_end) {
    gradd_device_t *device = open_on(&gradd_backend_cpu);
    gradd_model_t *model = tanh_layers_load(LAYERS);
    gradd_plan_t *plan = tanh_layers_plan(model, device, LAYERS, false);
    volatile int cancel = 0;
    device_set_way(device, always, NULL);
    layers_t *s = new_stack(0, plan);
    CHECK_OK(gradd_run_forward(s->run, 1, 0, s->inputs, s->outputs, &cancel));
    cancel = 1;
    CHECK_STATUS(GRADD_E_STALE, run_continue(s->run));
    CHECK(!run_is_aside(s->run));
    CHECK_STATUS(GRADD_E_STALE, backward(s)); /* there is no forward */
    CHECK_OK(forward(s));
    while (run_is_aside(s->run))
        CHECK_OK(run_continue(s->run));
    CHECK_OK(backward(s));
    CHECK(run_is_aside(s->run));
    destroy_stack(s);
    gradd_plan_destroy(plan);
    gradd_model_destroy(model);
    gradd_device_close(device);
}

/* ---- steps ----------------------------------------------------------------------------------- */

TEST(a_step_is_put_aside_behind_each_chunk) {
    gradd_device_t *device = open_on(&gradd_backend_cpu);
    fixture_t whole, parts;
    fixture_open(&whole, GRADD_ADAMW_TORCH), fixture_open(&parts, GRADD_ADAMW_TORCH);
    device_set_way(device, always, NULL);
    for (uint64_t number = 0; number < 2; number++) {
        const step_request_t r = request(&whole, number, 1), s = request(&parts, number, 1);
        double norm;
        bool left_out, done = false;
        stepping_t *step;
        int turns = 0;
        CHECK_OK(run(&r, &norm));
        CHECK_OK(step_create(device, &s, &step));
        for (; !done; turns++)
            CHECK_OK(step_continue(step, &done));
        CHECK(turns >= 4); /* three chunks, and one */
        CHECK(step_norm(step, &left_out) == norm && !left_out);
        step_destroy(step);
    }
    CHECK(n_asked >= 8);
    CHECK(same_parameters(&whole, &parts));
    fixture_close(&whole), fixture_close(&parts);
    gradd_device_close(device);
}
