/* A linear layer and a gelu: one operator on a device that has a kernel for it, two elsewhere. */
#include <math.h>
#include <string.h>

#include "kernels/math/bf16.h"
#include "server/plan/plan.h"
#include "tests/c/onnx_build.h"
#include "tests/c/tested_device.h"
#include "tests/emu/device.h"
#include "tests/test.h"

enum { ROWS = 3, K = 5, N = 16, N_IN = 3 };

/* y = gelu(x w + b) */
typedef struct shape_s {
    gradd_dtype_t dtype;
    const char *approximate;
    bool second; /* the linear layer has another reader */
    bool plain;
    bool turned; /* the gelu is of [1, ROWS, N] */
} shape_t;

static const gradd_type_t *types_of(const shape_t *s) {
    static gradd_type_t t[N_IN];
    t[0] = (gradd_type_t){
        s->dtype, 2, {ROWS, K}
    };
    t[1] = (gradd_type_t){
        s->dtype, 2, {K, N}
    };
    t[2] = (gradd_type_t){s->dtype, 1, {N}};
    return t;
}

static model_t *load(const shape_t *s) {
    Onnx__ModelProto *proto = build_model();
    const gradd_type_t *types = types_of(s);
    static const char *const names[N_IN] = {"x", "w", "b"};
    static const int64_t dims[3] = {1, ROWS, N};
    model_t *model;
    size_t n;
    for (int i = 0; i < N_IN; i++)
        build_input(proto, names[i], s->dtype, types[i].rank, types[i].dims);
    build_node(proto, "MatMul", "product", "x,w", "p");
    build_node(proto, "Add", "bias", "p,b", "l");
    build_raw(build_init(proto, "d", GRADD_DT_I64, 1, BUILD_DIMS(3)), build_copy(dims, sizeof dims),
              sizeof dims);
    if (s->turned) build_node(proto, "Reshape", "turn", "l,d", "t");
    Onnx__AttributeProto *a =
        build_attr(build_node(proto, "Gelu", "bend", s->turned ? "t" : "l", s->second ? "g" : "y"),
                   "approximate", BUILD_KIND(STRING));
    a->has_s = 1;
    a->s = (ProtobufCBinaryData){strlen(s->approximate),
                                 build_copy(s->approximate, strlen(s->approximate))};
    if (s->second) build_node(proto, "Add", "last", "g,l", "y");
    build_output(proto, "y");
    uint8_t *bytes = build_pack(proto, &n);
    CHECK_OK(model_load(bytes, n, NULL, &model));
    return model;
}

typedef struct gelu_trial_s {
    model_t *model;
    gradd_device_t *device;
    gradd_plan_t *plan;
} gelu_trial_t;

static gelu_trial_t plan(const shape_t *s, const gradd_backend_t *backend) {
    static const int32_t first[] = {0, 1, 2};
    const gradd_device_options_t device = {.threads = 1, .compile_ms = GRADD_COMPILE_MS};
    gelu_trial_t t = {.model = load(s)};
    CHECK_OK(device_open(backend, &device, &t.device));
    const gradd_plan_options_t o = {.inputs = types_of(s),
                                    .n_inputs = N_IN,
                                    .grads = first,
                                    .n_grads = N_IN,
                                    .outputs = first,
                                    .n_outputs = 1,
                                    .grad_outputs = first,
                                    .n_grad_outputs = 1,
                                    .flags = s->plain ? GRADD_PLAN_PLAIN : 0,
                                    .device = t.device};
    CHECK_OK(gradd_plan_create(t.model, &o, &t.plan));
    return t;
}

static void finish(gelu_trial_t *t) {
    gradd_plan_destroy(t->plan);
    gradd_device_close(t->device);
    model_destroy(t->model);
}

static int count(const program_t *p, const char *op) {
    int n = 0;
    for (int k = 0; k < p->n; k++)
        n += !strcmp(p->launches[k].args.op->name, op);
    return n;
}

/* Launches of the forward: one of both, or the two. */
static bool is_fused(const shape_t *s, const gradd_backend_t *backend) {
    gelu_trial_t t = plan(s, backend);
    const program_t *forward = &t.plan->forward;
    const bool both = count(forward, "LinearGelu") == 1;
    if (!s->plain) {
        CHECK_EQ_INT(count(forward, "Linear"), !both);
        CHECK_EQ_INT(count(forward, "Gelu"), !both);
        CHECK_EQ_INT(forward->n, (both ? 1 : 2) + s->second);
        CHECK_EQ_INT(count(&t.plan->variants->program, "GeluGrad"), 1);
        CHECK_EQ_INT(count(&t.plan->variants->program, "Linear"), 0);
    }
    finish(&t);
    return both;
}

TEST(a_device_with_the_kernel_has_one_operator) {
    const shape_t half = {GRADD_DT_BF16, "tanh", false, false, false};
    CHECK(is_fused(&half, &gradd_backend_emu));
    CHECK(is_fused(&(shape_t){GRADD_DT_F16, "tanh", false, false, false}, &gradd_backend_emu));
    CHECK(is_fused(&(shape_t){GRADD_DT_BF16, "tanh", false, false, true}, &gradd_backend_emu));
    CHECK(!is_fused(&(shape_t){GRADD_DT_BF16, "tanh", false, false, true}, &gradd_backend_cpu));
    CHECK(!is_fused(&half, &gradd_backend_cpu));
    CHECK(!is_fused(&(shape_t){GRADD_DT_F32, "tanh", false, false, false}, &gradd_backend_emu));
    CHECK(!is_fused(&(shape_t){GRADD_DT_BF16, "none", false, false, false}, &gradd_backend_emu));
    CHECK(!is_fused(&(shape_t){GRADD_DT_BF16, "tanh", true, false, false}, &gradd_backend_emu));
    CHECK(!is_fused(&(shape_t){GRADD_DT_BF16, "tanh", false, true, false}, &gradd_backend_emu));
}

/* ---- values ---- */

enum { SLOTS = 8, SLOT = 256 }; /* x w b y dy dx dw db; bytes of each */

static float value(const shared_t *g, int slot, int i) {
    return gradd_bf16_f32(((gradd_bf16_t *)(g->host + slot * SLOT))[i]);
}

/* Forward and backward in bf16, with their tensors in `g`. */
static void step(const shape_t *s, const gradd_backend_t *backend, shared_t *g) {
    gelu_trial_t t = plan(s, backend);
    void *at[SLOTS];
    bool written[N_IN];
    gradd_run_t *run;
    *g = shared_make(SLOTS * SLOT);
    for (int slot = 0; slot < SLOTS; slot++)
        for (int i = 0; i < SLOT / 2; i++)
            ((gradd_bf16_t *)(g->host + slot * SLOT))[i] =
                gradd_f32_bf16(sinf((float)(i * 7 + slot)));
    shared_enter(g, t.device);
    for (int slot = 0; slot < SLOTS; slot++)
        at[slot] = shared_at(g, g->host + slot * SLOT);
    CHECK_OK(gradd_run_create(t.plan, &run));
    CHECK_OK(gradd_run_forward(run, 5, 0, (const void *const *)at, &at[3], NULL));
    CHECK_OK(gradd_run_backward(run, (const void *const *)&at[4], &at[5], false, written, NULL));
    CHECK(written[0] && written[1] && written[2]);
    gradd_run_destroy(run);
    shared_leave(g);
    finish(&t);
}

static void check_step(bool turned) {
    static const int sizes[SLOTS] = {[3] = ROWS * N, [5] = ROWS * K, [6] = K * N, [7] = N};
    const shape_t s = {GRADD_DT_BF16, "tanh", false, false, turned};
    shared_t cpu, gpu;
    step(&s, &gradd_backend_cpu, &cpu);
    step(&s, &gradd_backend_emu, &gpu);
    for (int slot = 3; slot < SLOTS; slot++)
        for (int i = 0; i < sizes[slot]; i++)
            CHECK_NEAR(value(&gpu, slot, i), value(&cpu, slot, i),
                       0x1p-6 * fmaxf(1, fabsf(value(&cpu, slot, i))));
    shared_free(&cpu), shared_free(&gpu);
}

TEST(a_step_has_the_cpu_s_values) {
    check_step(false);
    check_step(true);
}
