/* Training sessions: steps against closed forms and against the engine's own runs, what is trained,
 * what is allocated, and what a failure leaves. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/api/gradd.h"
#include "tests/c/onnx_build.h"
#include "tests/test.h"
#include "train/gradd_train.h"

enum { ROWS = 6, IN = 5, HIDDEN = 7, CLASSES = 3 };

/* ---- models ---------------------------------------------------------------------------------- */

/* logits = relu(x w1 + b1) w2 + b2; loss = the cross entropy of the labels. */
static Onnx__ModelProto *classifier(bool with_loss) {
    Onnx__ModelProto *m = build_model();
    build_input(m, "x", GRADD_DT_F32, 2, BUILD_DIMS(-1, IN));
    if (with_loss) build_input(m, "labels", GRADD_DT_I64, 1, BUILD_DIMS(-1));
    build_input(m, "head.w", GRADD_DT_F32, 2, BUILD_DIMS(HIDDEN, CLASSES));
    build_input(m, "head.b", GRADD_DT_F32, 1, BUILD_DIMS(CLASSES));
    build_input(m, "body.w", GRADD_DT_F32, 2, BUILD_DIMS(IN, HIDDEN));
    build_input(m, "body.b", GRADD_DT_F32, 1, BUILD_DIMS(HIDDEN));
    build_node(m, "Gemm", "body", "x,body.w,body.b", "h");
    build_node(m, "Relu", "relu", "h", "r");
    build_node(m, "Gemm", "head", "r,head.w,head.b", "logits");
    if (with_loss) {
        build_node(m, "SoftmaxCrossEntropyLoss", "loss", "logits,labels", "loss");
        build_output(m, "loss");
    }
    build_output(m, "logits");
    return m;
}

/* loss = mean((x w - y)^2), with one weight for each of the columns of x. */
static Onnx__ModelProto *line(void) {
    Onnx__ModelProto *m = build_model();
    build_input(m, "x", GRADD_DT_F32, 2, BUILD_DIMS(-1, IN));
    build_input(m, "y", GRADD_DT_F32, 2, BUILD_DIMS(-1, 1));
    build_input(m, "w", GRADD_DT_F32, 2, BUILD_DIMS(IN, 1));
    build_node(m, "MatMul", "product", "x,w", "p");
    build_node(m, "Sub", "difference", "p,y", "d");
    build_node(m, "Mul", "square", "d,d", "s");
    Onnx__NodeProto *mean = build_node(m, "ReduceMean", "mean", "s", "loss");
    build_attr_int(mean, "keepdims", 0);
    build_output(m, "loss");
    return m;
}

static float drawn(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / (1 << 24) - 0.5f;
}

static void fill(float *to, int64_t n, uint32_t seed) {
    for (int64_t i = 0; i < n; i++)
        to[i] = drawn(&seed);
}

/* ---- states and sessions --------------------------------------------------------------------- */

static gradd_type_t type_of(gradd_dtype_t dtype, int rank, int64_t a, int64_t b) {
    return (gradd_type_t){
        .dtype = dtype, .rank = rank, .dims = {a, rank > 1 ? b : 0}
    };
}

static void add(gradd_train_state_t *state, const char *name, int rank, int64_t a, int64_t b) {
    const gradd_type_t type = type_of(GRADD_DT_F32, rank, a, b);
    float *values = build_alloc(sizeof(float) * (size_t)(a * b));
    fill(values, gradd_type_count(&type), (uint32_t)(a * 31 + b));
    CHECK_OK(gradd_train_state_add(state, name, &type, values, true));
}

static gradd_train_state_t *classifier_state(void) {
    gradd_train_state_t *state;
    CHECK_OK(gradd_train_state_create(&state));
    add(state, "body.w", 2, IN, HIDDEN);
    add(state, "body.b", 1, HIDDEN, 1);
    add(state, "head.w", 2, HIDDEN, CLASSES);
    add(state, "head.b", 1, CLASSES, 1);
    return state;
}

static gradd_train_model_t packed(const Onnx__ModelProto *m) {
    gradd_train_model_t model = {0};
    model.bytes = build_pack(m, &model.n);
    return model;
}

static gradd_train_session_t *open_with(gradd_train_state_t *state,
                                        const gradd_train_options_t *options) {
    gradd_train_session_t *session;
    CHECK_OK(gradd_train_open(state, options, &session));
    return session;
}

static gradd_train_session_t *open_classifier(gradd_train_state_t *state,
                                              gradd_train_optimizer_t optimizer) {
    const gradd_train_options_t options = {.training = packed(classifier(true)),
                                           .eval = packed(classifier(false)),
                                           .optimizer = optimizer,
                                           .threads = 1,
                                           .max_plans = 2};
    return open_with(state, &options);
}

static void close_all(gradd_train_session_t *session, gradd_train_state_t *state) {
    gradd_train_close(session);
    gradd_train_state_destroy(state);
}

/* A batch of the classifier; its memory is aligned to 4 bytes only. */
typedef struct batch_of_s {
    float x[1 + 4 * ROWS * IN];
    int64_t labels[1 + 4 * ROWS];
    gradd_train_tensor_t inputs[2];
} batch_of_t;

static void make_batch(batch_of_t *b, int rows, uint32_t seed) {
    fill(b->x + 1, rows * IN, seed);
    for (int i = 0; i < rows; i++)
        b->labels[1 + i] = (i + (int)seed) % CLASSES;
    b->inputs[0] = (gradd_train_tensor_t){type_of(GRADD_DT_F32, 2, rows, IN), b->x + 1};
    b->inputs[1] = (gradd_train_tensor_t){type_of(GRADD_DT_I64, 1, rows, 0), b->labels + 1};
}

static float step(gradd_train_session_t *session, const batch_of_t *b) {
    gradd_train_tensor_t outputs[2];
    CHECK_OK(gradd_train_step(session, b->inputs, 2, outputs, NULL));
    return *(const float *)outputs[0].data;
}

static gradd_train_parameter_t look(const gradd_train_state_t *state, const char *name) {
    const int i = gradd_train_state_find(state, name);
    CHECK(i >= 0);
    return gradd_train_state_parameter(state, i);
}

static float *copy_of(const void *from, int64_t n) {
    return build_copy(from, sizeof(float) * (size_t)n);
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* w -= lr * 2/n * xT (x w - y), by hand. */
TEST(sgd_follows_the_closed_form) {
    enum { N = 8, STEPS = 20 };
    float x[N * IN], y[N];
    double w[IN];
    gradd_train_state_t *state;
    CHECK_OK(gradd_train_state_create(&state));
    add(state, "w", 2, IN, 1);
    fill(x, N * IN, 1);
    fill(y, N, 2);
    const gradd_train_options_t options = {
        .training = packed(line()), .optimizer = gradd_train_sgd(), .threads = 1};
    gradd_train_session_t *session = open_with(state, &options);
    const gradd_train_tensor_t inputs[] = {
        {type_of(GRADD_DT_F32, 2, N, IN), x},
        {type_of(GRADD_DT_F32, 2, N, 1),  y}
    };
    for (int k = 0; k < IN; k++)
        w[k] = ((const float *)look(state, "w").data)[k];
    CHECK_OK(gradd_train_set_learning_rate(session, 0.25f));
    for (int s = 0; s < STEPS; s++) {
        double slope[IN] = {0};
        for (int i = 0; i < N; i++) {
            double error = -y[i];
            for (int k = 0; k < IN; k++)
                error += x[i * IN + k] * w[k];
            for (int k = 0; k < IN; k++)
                slope[k] += 2.0 / N * error * x[i * IN + k];
        }
        for (int k = 0; k < IN; k++)
            w[k] -= 0.25 * slope[k];
        CHECK_OK(gradd_train_step(session, inputs, 2, NULL, NULL));
        CHECK_OK(gradd_train_optimizer_step(session, NULL));
        gradd_train_lazy_reset_grad(session);
    }
    for (int k = 0; k < IN; k++)
        CHECK_NEAR(((const float *)look(state, "w").data)[k], w[k], 1e-5);
    CHECK_EQ_INT(look(state, "w").steps, STEPS);
    CHECK_EQ_INT(gradd_train_state_progress(state).step, STEPS);
    close_all(session, state);
}

/* Gradients of the classifier's parameters, in the order of the model's inputs, by a plan and a
 * run of the engine itself. */
static void engine_gradients(const gradd_train_state_t *state, const batch_of_t *b, float *grads[4],
                             float *out_loss) {
    const gradd_device_options_t on = {.threads = 1};
    const gradd_train_model_t bytes = packed(classifier(true));
    gradd_device_t *device;
    gradd_model_t *model;
    gradd_plan_t *plan;
    gradd_run_t *run;
    gradd_type_t types[6] = {b->inputs[0].type, b->inputs[1].type};
    const void *inputs[6] = {0};
    void *outputs[1], *to[4];
    static const int32_t wanted[] = {2, 3, 4, 5}, loss[] = {0};
    bool written[4];
    CHECK_OK(gradd_device_open(&on, &device));
    CHECK_OK(gradd_model_load(bytes.bytes, bytes.n, &model));
    for (int i = 2; i < 6; i++) {
        const gradd_train_parameter_t p = look(state, gradd_model_input_name(model, i));
        types[i] = p.type;
        inputs[i] = p.data;
    }
    for (int i = 0; i < 2; i++) {
        const size_t n = (size_t)gradd_type_bytes(&types[i]);
        inputs[i] = memcpy(aligned_alloc(64, (n + 63) / 64 * 64), b->inputs[i].data, n);
    }
    const gradd_plan_options_t o = {.inputs = types,
                                    .n_inputs = 6,
                                    .grads = wanted,
                                    .n_grads = 4,
                                    .outputs = loss,
                                    .n_outputs = 1,
                                    .grad_outputs = loss,
                                    .n_grad_outputs = 1,
                                    .device = device,
                                    .parameters = wanted,
                                    .n_parameters = 4};
    CHECK_OK(gradd_plan_create(model, &o, &plan));
    CHECK_OK(gradd_run_create(plan, &run));
    for (int k = 0; k < 4; k++)
        to[k] = grads[k] = aligned_alloc(64, 256);
    outputs[0] = aligned_alloc(64, 64);
    float *one = aligned_alloc(64, 64);
    *one = 1;
    const void *arrives[] = {one};
    CHECK_OK(gradd_run_forward(run, 1, 0, inputs, outputs, NULL));
    CHECK_OK(gradd_run_backward(run, arrives, to, false, written, NULL));
    *out_loss = *(float *)outputs[0];
    gradd_run_destroy(run);
    gradd_plan_destroy(plan);
    gradd_model_destroy(model);
    gradd_device_close(device);
}

static const char *const names[] = {"head.w", "head.b", "body.w", "body.b"};

TEST(a_step_has_the_engines_bits) {
    gradd_train_state_t *state = classifier_state();
    gradd_train_session_t *session = open_classifier(state, gradd_train_sgd());
    batch_of_t b;
    float *grads[4], loss;
    make_batch(&b, ROWS, 3);
    engine_gradients(state, &b, grads, &loss);
    const float got = step(session, &b);
    CHECK(!memcmp(&got, &loss, sizeof loss));
    for (int k = 0; k < 4; k++) {
        const gradd_train_parameter_t p = look(state, names[k]);
        CHECK(p.gradient && !memcmp(p.gradient, grads[k], (size_t)gradd_type_bytes(&p.type)));
    }
    close_all(session, state);
}

TEST(gradients_add_up_until_they_are_reset) {
    gradd_train_state_t *state = classifier_state();
    gradd_train_session_t *session = open_classifier(state, gradd_train_sgd());
    batch_of_t a, b;
    make_batch(&a, ROWS, 3);
    make_batch(&b, ROWS, 4);
    CHECK(!look(state, "body.w").gradient);
    step(session, &a);
    const float *first = copy_of(look(state, "body.w").gradient, IN * HIDDEN);
    gradd_train_lazy_reset_grad(session);
    step(session, &b);
    const float *second = copy_of(look(state, "body.w").gradient, IN * HIDDEN);
    step(session, &a);
    const float *both = look(state, "body.w").gradient;
    for (int i = 0; i < IN * HIDDEN; i++)
        CHECK(both[i] == second[i] + first[i]);
    gradd_train_lazy_reset_grad(session);
    CHECK(!look(state, "body.w").gradient);
    close_all(session, state);
}

/* The formula of kernels/contract/adam.h, in double. */
static void adam_by_hand(const gradd_train_optimizer_t *o, int t, double g, double value[3]) {
    double *p = &value[0], *m = &value[1], *v = &value[2];
    const double lr = 0.01, bc1 = o->bias_correction ? 1 - pow(o->beta1, t) : 1;
    const double bc2 = o->bias_correction ? 1 - pow(o->beta2, t) : 1;
    if (o->mode == GRADD_ADAM_L2) g += o->weight_decay * *p;
    *m = o->beta1 * *m + (1 - o->beta1) * g;
    *v = o->beta2 * *v + (1 - o->beta2) * g * g;
    if (o->mode == GRADD_ADAMW_TORCH) {
        *p -= lr * o->weight_decay * *p;
        *p -= lr / bc1 * *m / (sqrt(*v) / sqrt(bc2) + o->eps);
    } else {
        *p -= lr * sqrt(bc2) / bc1 * *m / (sqrt(*v) + o->eps);
        if (o->mode == GRADD_ADAMW_TRANSFORMERS) *p -= lr * o->weight_decay * *p;
    }
}

static void check_adam(gradd_train_optimizer_t o) {
    gradd_train_state_t *state = classifier_state();
    gradd_train_session_t *session = open_classifier(state, o);
    batch_of_t b;
    double value[HIDDEN * CLASSES][3] = {{0}};
    for (int i = 0; i < HIDDEN * CLASSES; i++)
        value[i][0] = ((const float *)look(state, "head.w").data)[i];
    CHECK_OK(gradd_train_set_learning_rate(session, 0.01f));
    for (int t = 1; t <= 5; t++) {
        make_batch(&b, ROWS, (uint32_t)t);
        step(session, &b);
        const gradd_train_parameter_t p = look(state, "head.w");
        for (int i = 0; i < HIDDEN * CLASSES; i++)
            adam_by_hand(&o, t, ((const float *)p.gradient)[i], value[i]);
        CHECK_OK(gradd_train_optimizer_step(session, NULL));
        gradd_train_lazy_reset_grad(session);
        for (int i = 0; i < HIDDEN * CLASSES; i++)
            CHECK_NEAR(((const float *)p.data)[i], value[i][0], 2e-6);
    }
    close_all(session, state);
}

TEST(adamw_has_its_three_modes) {
    gradd_train_optimizer_t o = gradd_train_adamw();
    o.weight_decay = 0.1;
    for (int mode = 0; mode < 3; mode++) {
        o.mode = (gradd_adam_mode_t)mode;
        o.bias_correction = true;
        check_adam(o);
        o.bias_correction = false;
        check_adam(o);
    }
}

TEST(sgd_has_momentum_and_decay) {
    gradd_train_state_t *state = classifier_state();
    gradd_train_optimizer_t o = gradd_train_sgd();
    batch_of_t b;
    o.momentum = 0.9;
    o.weight_decay = 0.1;
    gradd_train_session_t *session = open_classifier(state, o);
    double p[CLASSES], m[CLASSES] = {0};
    for (int i = 0; i < CLASSES; i++)
        p[i] = ((const float *)look(state, "head.b").data)[i];
    CHECK_OK(gradd_train_set_learning_rate(session, 0.1f));
    for (int t = 0; t < 4; t++) {
        make_batch(&b, ROWS, (uint32_t)t);
        step(session, &b);
        const float *g = look(state, "head.b").gradient;
        for (int i = 0; i < CLASSES; i++) {
            const double d = g[i] + 0.1 * p[i];
            m[i] = t ? 0.9 * m[i] + d : d;
            p[i] -= 0.1 * m[i];
        }
        CHECK_OK(gradd_train_optimizer_step(session, NULL));
        gradd_train_lazy_reset_grad(session);
        for (int i = 0; i < CLASSES; i++)
            CHECK_NEAR(((const float *)look(state, "head.b").data)[i], p[i], 1e-6);
    }
    close_all(session, state);
}

static void step_once(gradd_train_session_t *session, uint32_t seed) {
    batch_of_t b;
    make_batch(&b, ROWS, seed);
    step(session, &b);
    CHECK_OK(gradd_train_optimizer_step(session, NULL));
    gradd_train_lazy_reset_grad(session);
}

/* The first step of a second kind of optimizer has the bits of its first step without the other. */
static void check_change(const gradd_train_optimizer_t *first,
                         const gradd_train_optimizer_t *second) {
    gradd_train_state_t *state = classifier_state(), *other = classifier_state();
    gradd_train_session_t *session = open_classifier(state, *first);
    gradd_train_session_t *fresh = open_classifier(other, *second);
    for (uint32_t i = 0; i < 3; i++)
        step_once(session, i);
    const int at = gradd_train_state_find(state, "head.w");
    const gradd_train_parameter_t p = look(state, "head.w");
    for (int i = 0; i < gradd_train_state_count(state); i++) {
        const gradd_train_parameter_t from = gradd_train_state_parameter(state, i);
        CHECK_OK(gradd_train_state_write(other, i, &from.type, from.data));
    }
    CHECK_OK(gradd_train_set_optimizer(session, second));
    for (uint32_t i = 3; i < 6; i++) {
        step_once(session, i);
        step_once(fresh, i);
        CHECK(!memcmp(p.data, look(other, "head.w").data, sizeof(float) * HIDDEN * CLASSES));
    }
    CHECK_EQ_INT(gradd_train_state_parameter(state, at).steps, look(other, "head.w").steps);
    CHECK_EQ_INT(gradd_train_state_progress(state).step, 6);
    close_all(session, state);
    close_all(fresh, other);
}

TEST(moments_of_another_kind_of_optimizer_are_not_used) {
    gradd_train_optimizer_t momentum = gradd_train_sgd();
    const gradd_train_optimizer_t adamw = gradd_train_adamw();
    momentum.momentum = 0.9;
    check_change(&momentum, &adamw);
    check_change(&adamw, &momentum);
}

/* SGD without momentum counts steps all the same, and drops moments. */
TEST(an_optimizer_without_moments_comes_between) {
    const gradd_train_optimizer_t adamw = gradd_train_adamw(), plain = gradd_train_sgd();
    check_change(&plain, &adamw);
    gradd_train_state_t *state = classifier_state();
    gradd_train_session_t *session = open_classifier(state, adamw);
    step_once(session, 1);
    CHECK(look(state, "head.w").moments[1] != NULL);
    CHECK_OK(gradd_train_set_optimizer(session, &plain));
    step_once(session, 2);
    CHECK(look(state, "head.w").moments[0] == NULL);
    close_all(session, state);
}

TEST(constants_of_optimizers_are_checked) {
    const gradd_train_optimizer_t adamw = gradd_train_adamw(), sgd = gradd_train_sgd();
    gradd_train_optimizer_t wrong[11];
    const char *const words[] = {"beta1",        "beta1 is nan", "beta2",   "eps",
                                 "weight_decay", "max_norm",     "mode",    "kind",
                                 "momentum",     "weight_decay", "max_norm"};
    for (int i = 0; i < 11; i++)
        wrong[i] = i < 8 ? adamw : sgd;
    wrong[0].beta1 = 1;
    wrong[1].beta1 = NAN;
    wrong[2].beta2 = -0.1;
    wrong[3].eps = -1e-8;
    wrong[4].weight_decay = INFINITY;
    wrong[5].max_norm = -1;
    wrong[6].mode = (gradd_adam_mode_t)7;
    wrong[7].kind = (gradd_train_optimizer_kind_t)-1;
    wrong[8].momentum = NAN;
    wrong[9].weight_decay = -1;
    wrong[10].max_norm = NAN;
    gradd_train_state_t *state = classifier_state(), *other = classifier_state();
    gradd_train_session_t *session = open_classifier(state, sgd), *second;
    for (int i = 0; i < 11; i++) {
        const gradd_train_options_t options = {
            .training = packed(classifier(true)), .optimizer = wrong[i], .threads = 1};
        CHECK_STATUS(GRADD_E_TENSOR, gradd_train_set_optimizer(session, &wrong[i]));
        CHECK_ERROR_HAS(words[i]);
        CHECK_STATUS(GRADD_E_TENSOR, gradd_train_open(other, &options, &second));
        CHECK_ERROR_HAS(words[i]);
    }
    gradd_train_optimizer_t measured = sgd;
    measured.max_norm = INFINITY;
    CHECK_OK(gradd_train_set_optimizer(session, &measured));
    close_all(session, state);
    gradd_train_state_destroy(other);
}

TEST(the_norm_of_all_gradients_is_clipped) {
    gradd_train_state_t *state = classifier_state();
    gradd_train_optimizer_t o = gradd_train_sgd();
    batch_of_t b;
    double norm, squares = 0;
    o.max_norm = 0.01;
    gradd_train_session_t *session = open_classifier(state, o);
    make_batch(&b, ROWS, 3);
    step(session, &b);
    for (int k = 0; k < 4; k++) {
        const gradd_train_parameter_t p = look(state, names[k]);
        for (int64_t i = 0; i < gradd_type_count(&p.type); i++)
            squares += pow(((const float *)p.gradient)[i], 2);
    }
    const double before = ((const float *)look(state, "head.b").data)[0];
    const double g = ((const float *)look(state, "head.b").gradient)[0];
    CHECK_OK(gradd_train_set_learning_rate(session, 1));
    CHECK_OK(gradd_train_optimizer_step(session, &norm));
    CHECK_NEAR(norm, sqrt(squares), 1e-6);
    CHECK(norm > 0.02);
    CHECK_NEAR(((const float *)look(state, "head.b").data)[0], before - g * 0.01 / norm, 1e-6);
    close_all(session, state);
}

TEST(a_linear_schedule_rises_and_falls) {
    static const float expected[] = {0, 0.25f, 0.5f, 0.5f * 3 / 4, 0.25f, 0.125f, 0, 0};
    gradd_train_state_t *state = classifier_state();
    gradd_train_session_t *session = open_classifier(state, gradd_train_sgd());
    CHECK_STATUS(GRADD_E_UNSUPPORTED, gradd_train_schedule_step(session));
    CHECK_STATUS(GRADD_E_TENSOR, gradd_train_set_linear_schedule(session, -1, 6, 0.5f));
    CHECK_STATUS(GRADD_E_TENSOR, gradd_train_set_learning_rate(session, NAN));
    CHECK_OK(gradd_train_set_linear_schedule(session, 2, 6, 0.5f));
    for (int t = 0; t < 8; t++) {
        CHECK(gradd_train_learning_rate(session) == expected[t]);
        CHECK_OK(gradd_train_optimizer_step(session, NULL));
        CHECK_OK(gradd_train_schedule_step(session));
    }
    close_all(session, state);
}

/* ---- what is trained ------------------------------------------------------------------------- */

TEST(frozen_parameters_keep_their_values) {
    gradd_train_state_t *state = classifier_state();
    gradd_train_session_t *session = open_classifier(state, gradd_train_adamw());
    batch_of_t b;
    int changed;
    make_batch(&b, ROWS, 3);
    step(session, &b);
    CHECK_OK(gradd_train_optimizer_step(session, NULL));
    CHECK_OK(gradd_train_freeze(session, "body.*", &changed));
    CHECK_EQ_INT(changed, 2);
    CHECK_EQ_INT(gradd_train_parameter_count(session, true), 2);
    CHECK_EQ_INT(gradd_train_parameter_count(session, false), 4);
    CHECK(!look(state, "body.w").gradient && !look(state, "body.w").moments[0]);
    const float *body = copy_of(look(state, "body.w").data, IN * HIDDEN);
    const float *head = copy_of(look(state, "head.w").data, HIDDEN * CLASSES);
    gradd_train_lazy_reset_grad(session);
    step(session, &b);
    CHECK(!look(state, "body.w").gradient && look(state, "head.w").gradient);
    CHECK_OK(gradd_train_optimizer_step(session, NULL));
    CHECK(!memcmp(look(state, "body.w").data, body, sizeof(float) * IN * HIDDEN));
    CHECK(memcmp(look(state, "head.w").data, head, sizeof(float) * HIDDEN * CLASSES));
    CHECK_STATUS(GRADD_E_TENSOR, gradd_train_freeze(session, "*", NULL));
    CHECK_ERROR_HAS("would leave no parameter");
    CHECK_STATUS(GRADD_E_TENSOR, gradd_train_freeze(session, "neck.*", NULL));
    CHECK_ERROR_HAS("'neck.*'");
    CHECK_OK(gradd_train_thaw(session, "*.w", &changed));
    CHECK_EQ_INT(changed, 1);
    step(session, &b);
    CHECK(look(state, "body.w").gradient && !look(state, "body.b").gradient);
    CHECK_EQ_INT(look(state, "body.w").steps, 0);
    CHECK_EQ_INT(look(state, "head.w").steps, 2);
    close_all(session, state);
}

TEST(copies_are_in_the_order_of_the_model) {
    gradd_train_state_t *state = classifier_state();
    gradd_train_session_t *session = open_classifier(state, gradd_train_sgd());
    int64_t all, trained;
    CHECK_OK(gradd_train_contiguous_count(session, false, &all));
    CHECK_EQ_INT(all, HIDDEN * CLASSES + CLASSES + IN * HIDDEN + HIDDEN);
    CHECK_OK(gradd_train_freeze(session, "body.*", NULL));
    CHECK_OK(gradd_train_contiguous_count(session, true, &trained));
    CHECK_EQ_INT(trained, HIDDEN * CLASSES + CLASSES);
    float *buffer = build_alloc(sizeof(float) * (size_t)all);
    CHECK_OK(gradd_train_copy_out(session, false, buffer, all));
    CHECK(!memcmp(buffer, look(state, "head.w").data, sizeof(float) * HIDDEN * CLASSES));
    CHECK(!memcmp(buffer + trained, look(state, "body.w").data, sizeof(float) * IN * HIDDEN));
    for (int64_t i = 0; i < trained; i++)
        buffer[i] = (float)i;
    CHECK_STATUS(GRADD_E_TENSOR, gradd_train_copy_in(session, true, buffer, all));
    CHECK_OK(gradd_train_copy_in(session, true, buffer, trained));
    CHECK(((const float *)look(state, "head.b").data)[0] == HIDDEN * CLASSES);
    close_all(session, state);
}

TEST(a_nominal_state_gets_its_values_later) {
    gradd_train_state_t *state;
    batch_of_t b;
    const gradd_type_t types[] = {
        type_of(GRADD_DT_F32, 2, HIDDEN, CLASSES), type_of(GRADD_DT_F32, 1, CLASSES, 0),
        type_of(GRADD_DT_F32, 2, IN, HIDDEN), type_of(GRADD_DT_F32, 1, HIDDEN, 0)};
    CHECK_OK(gradd_train_state_create(&state));
    for (int k = 0; k < 4; k++)
        CHECK_OK(gradd_train_state_add(state, names[k], &types[k], NULL, true));
    gradd_train_session_t *session = open_classifier(state, gradd_train_sgd());
    make_batch(&b, ROWS, 3);
    CHECK_STATUS(GRADD_E_TENSOR, gradd_train_step(session, b.inputs, 2, NULL, NULL));
    CHECK_ERROR_HAS("'head.w' has no values");
    float buffer[HIDDEN * CLASSES + CLASSES + IN * HIDDEN + HIDDEN] = {0};
    CHECK_OK(gradd_train_copy_in(session, false, buffer, sizeof buffer / sizeof buffer[0]));
    CHECK_NEAR(step(session, &b), log(CLASSES), 1e-6);
    close_all(session, state);
}

/* ---- shapes, memory, failures ---------------------------------------------------------------- */

TEST(batch_sizes_are_free_and_plans_are_few) {
    gradd_train_state_t *state = classifier_state();
    gradd_train_session_t *session = open_classifier(state, gradd_train_sgd());
    batch_of_t b;
    gradd_train_tensor_t logits;
    for (int rows = 1; rows <= 4 * ROWS; rows += 5) {
        make_batch(&b, rows, 3);
        const float loss = step(session, &b);
        CHECK_OK(gradd_train_eval_step(session, b.inputs, 1, &logits, NULL));
        CHECK_EQ_INT(logits.type.dims[0], rows);
        CHECK_EQ_INT(logits.type.dims[1], CLASSES);
        double sum = 0; /* the same loss, from the logits */
        for (int i = 0; i < rows; i++) {
            const float *z = (const float *)logits.data + i * CLASSES;
            sum += log(exp(z[0]) + exp(z[1]) + exp(z[2])) - z[b.labels[1 + i]];
        }
        CHECK_NEAR(loss, sum / rows, 1e-5);
        CHECK(gradd_train_memory(session).plans <= 4); /* two of each model */
    }
    close_all(session, state);
}

static void expect_bad_input(gradd_train_session_t *session, const batch_of_t *b,
                             const char *text) {
    CHECK_STATUS(GRADD_E_TENSOR, gradd_train_step(session, b->inputs, 2, NULL, NULL));
    CHECK_ERROR_HAS(text);
}

TEST(a_failed_step_changes_nothing) {
    gradd_train_state_t *state = classifier_state();
    gradd_train_session_t *session = open_classifier(state, gradd_train_sgd());
    const volatile int cancel = 1;
    batch_of_t b;
    make_batch(&b, ROWS, 3);
    step(session, &b);
    const float *before = copy_of(look(state, "body.w").gradient, IN * HIDDEN);
    CHECK_STATUS(GRADD_E_STALE, gradd_train_step(session, b.inputs, 2, NULL, &cancel));
    b.labels[2] = CLASSES;
    CHECK_STATUS(GRADD_E_INDEX, gradd_train_step(session, b.inputs, 2, NULL, NULL));
    CHECK_ERROR_HAS("loss");
    b.inputs[0].type.dims[1]++;
    expect_bad_input(session, &b, "'x'");
    b.inputs[0].type.dims[1]--;
    b.inputs[1].type.dtype = GRADD_DT_I32;
    expect_bad_input(session, &b, "'labels'");
    b.inputs[1].data = NULL;
    expect_bad_input(session, &b, "'labels' has no data");
    CHECK_STATUS(GRADD_E_TENSOR, gradd_train_step(session, b.inputs, 1, NULL, NULL));
    CHECK_ERROR_HAS("expected 2 inputs, got 1");
    CHECK(!memcmp(look(state, "body.w").gradient, before, sizeof(float) * IN * HIDDEN));
    make_batch(&b, ROWS, 3);
    step(session, &b);
    CHECK(((const float *)look(state, "body.w").gradient)[0] == before[0] + before[0]);
    close_all(session, state);
}

enum { DEEP = 12, LONG = 200 };

/* loss = mean(t^2) of x behind DEEP layers t = tanh(sin(t w)), whose values backward reads. */
static Onnx__ModelProto *tower(void) {
    char in[80], p[32], s[32], t[32] = "x";
    Onnx__ModelProto *m = build_model();
    build_input(m, "x", GRADD_DT_F32, 2, BUILD_DIMS(-1, IN));
    build_input(m, "w", GRADD_DT_F32, 2, BUILD_DIMS(IN, IN));
    for (int i = 0; i < DEEP; i++) {
        snprintf(in, sizeof in, "%s,w", t);
        snprintf(p, sizeof p, "p%d", i);
        snprintf(s, sizeof s, "s%d", i);
        snprintf(t, sizeof t, "t%d", i);
        build_node(m, "MatMul", p, build_copy(in, strlen(in)), build_copy(p, strlen(p)));
        build_node(m, "Sin", s, build_copy(p, strlen(p)), build_copy(s, strlen(s)));
        build_node(m, "Tanh", t, build_copy(s, strlen(s)), build_copy(t, strlen(t)));
    }
    snprintf(in, sizeof in, "%s,%s", t, t);
    build_node(m, "Mul", "square", build_copy(in, strlen(in)), "square");
    build_attr_int(build_node(m, "ReduceMean", "mean", "square", "loss"), "keepdims", 0);
    build_output(m, "loss");
    return m;
}

/* A step of the tower; the session and the state live on. */
static float step_tower(gradd_train_session_t *session) {
    static float x[LONG * IN];
    const gradd_train_tensor_t input = {type_of(GRADD_DT_F32, 2, LONG, IN), x};
    gradd_train_tensor_t loss;
    fill(x, LONG * IN, 5);
    CHECK_OK(gradd_train_step(session, &input, 1, &loss, NULL));
    return *(const float *)loss.data;
}

static gradd_train_state_t *tower_state(void) {
    gradd_train_state_t *state;
    CHECK_OK(gradd_train_state_create(&state));
    add(state, "w", 2, IN, IN);
    return state;
}

TEST(a_budget_holds_with_the_same_bits) {
    gradd_train_state_t *states[2] = {tower_state(), tower_state()};
    gradd_train_options_t options = {
        .training = packed(tower()), .optimizer = gradd_train_sgd(), .threads = 1};
    gradd_train_session_t *unbounded = open_with(states[0], &options);
    const float loss = step_tower(unbounded);
    options.memory_budget = gradd_train_memory(unbounded).arena * 9 / 10;
    gradd_train_session_t *tight = open_with(states[1], &options);
    CHECK(step_tower(tight) == loss);
    CHECK(gradd_train_memory(tight).arena <= options.memory_budget);
    CHECK(!memcmp(look(states[0], "w").gradient, look(states[1], "w").gradient,
                  sizeof(float) * IN * IN));
    close_all(unbounded, states[0]);
    close_all(tight, states[1]);
}

TEST(a_budget_that_cannot_be_met_is_named) {
    gradd_train_state_t *state = classifier_state();
    const gradd_train_options_t options = {.training = packed(classifier(true)),
                                           .optimizer = gradd_train_sgd(),
                                           .threads = 1,
                                           .memory_budget = 1};
    gradd_train_session_t *session = open_with(state, &options);
    batch_of_t b;
    make_batch(&b, 4 * ROWS, 3);
    CHECK_STATUS(GRADD_E_NOMEM, gradd_train_step(session, b.inputs, 2, NULL, NULL));
    CHECK_ERROR_HAS("budget");
    CHECK_STATUS(GRADD_E_UNSUPPORTED, gradd_train_eval_step(session, b.inputs, 1, NULL, NULL));
    close_all(session, state);
}

TEST(sessions_that_cannot_be_are_refused) {
    gradd_train_state_t *state = classifier_state(), *other;
    gradd_train_session_t *session = open_classifier(state, gradd_train_sgd()), *second;
    gradd_train_options_t options = {.training = packed(classifier(true)), .threads = 1};
    CHECK_STATUS(GRADD_E_STALE, gradd_train_open(state, &options, &second));
    close_all(session, state);
    CHECK_OK(gradd_train_state_create(&other));
    CHECK_STATUS(GRADD_E_TENSOR, gradd_train_open(other, &options, &second));
    CHECK_ERROR_HAS("no parameter that is trained");
    add(other, "head.w", 2, HIDDEN, CLASSES + 1);
    CHECK_STATUS(GRADD_E_TENSOR, gradd_train_open(other, &options, &second));
    CHECK_ERROR_HAS("'head.w' is f32[7,4], but the model declares f32[7,3]");
    options.training = (gradd_train_model_t){.path = "/no/such/model.onnx"};
    CHECK_STATUS(GRADD_E_IO, gradd_train_open(other, &options, &second));
    CHECK_ERROR_HAS("/no/such/model.onnx");
    options.training = (gradd_train_model_t){.bytes = "\x08", .n = 1};
    CHECK_STATUS(GRADD_E_MODEL, gradd_train_open(other, &options, &second));
    CHECK_ERROR_HAS("the training model");
    gradd_train_state_destroy(other);
}

/* ---- running statistics ---------------------------------------------------------------------- */

/* loss = mean(batch_norm(x) w), where the node's kind is ONNX's or ONNX Runtime's. */
static Onnx__ModelProto *normalised(const char *op, const char *outputs) {
    Onnx__ModelProto *m = build_model();
    build_opset(m, "com.microsoft", 1);
    build_input(m, "x", GRADD_DT_F32, 2, BUILD_DIMS(-1, 2));
    static const char *const of[] = {"scale", "bias", "mean", "var"};
    for (int i = 0; i < 4; i++)
        build_input(m, of[i], GRADD_DT_F32, 1, BUILD_DIMS(2));
    Onnx__NodeProto *n = build_node(m, op, "norm", "x,scale,bias,mean,var", outputs);
    if (!strcmp(op, "BatchNormInternal")) n->domain = "com.microsoft";
    build_attr_int(n, "training_mode", 1);
    build_node(m, "Mul", "square", "y,y", "s");
    build_attr_int(build_node(m, "ReduceMean", "average", "s", "loss"), "keepdims", 0);
    build_output(m, "loss");
    return m;
}

static void check_statistics(const Onnx__ModelProto *model) {
    static const float x[] = {1, 10, 3, 30}, ones[] = {1, 1}, zeros[] = {0, 0};
    const gradd_type_t type = type_of(GRADD_DT_F32, 1, 2, 0);
    const volatile int cancel = 1;
    gradd_train_state_t *state;
    CHECK_OK(gradd_train_state_create(&state));
    CHECK_OK(gradd_train_state_add(state, "scale", &type, ones, true));
    CHECK_OK(gradd_train_state_add(state, "bias", &type, zeros, true));
    CHECK_OK(gradd_train_state_add(state, "mean", &type, zeros, false));
    CHECK_OK(gradd_train_state_add(state, "var", &type, ones, false));
    const gradd_train_options_t options = {
        .training = packed(model), .optimizer = gradd_train_sgd(), .threads = 1};
    gradd_train_session_t *session = open_with(state, &options);
    const gradd_train_tensor_t input = {type_of(GRADD_DT_F32, 2, 2, 2), x};
    CHECK_EQ_INT(gradd_train_output_count(session, GRADD_TRAIN_TRAINING), 1);
    CHECK_STATUS(GRADD_E_STALE, gradd_train_step(session, &input, 1, NULL, &cancel));
    CHECK(((const float *)look(state, "mean").data)[1] == 0);
    CHECK_OK(gradd_train_step(session, &input, 1, NULL, NULL));
    CHECK_NEAR(((const float *)look(state, "mean").data)[0], 0.1 * 2, 1e-6);
    CHECK_NEAR(((const float *)look(state, "mean").data)[1], 0.1 * 20, 1e-5);
    CHECK_NEAR(((const float *)look(state, "var").data)[1], 0.9 + 0.1 * 100, 1e-4);
    CHECK_OK(gradd_train_step(session, &input, 1, NULL, NULL));
    CHECK_NEAR(((const float *)look(state, "mean").data)[1], 0.9 * 2 + 0.1 * 20, 1e-5);
    CHECK_STATUS(GRADD_E_TENSOR, gradd_train_thaw(session, "mean", NULL));
    CHECK_ERROR_HAS("running statistics");
    close_all(session, state);
}

TEST(a_step_writes_running_statistics) {
    check_statistics(normalised("BatchNormalization", "y,new_mean,new_var"));
}

TEST(statistics_of_onnx_runtimes_models) {
    check_statistics(normalised("BatchNormInternal", "y,new_mean,new_var,saved,saved_inv"));
}

/* ---- properties ------------------------------------------------------------------------------ */

TEST(properties_have_three_kinds) {
    gradd_train_state_t *state;
    CHECK_OK(gradd_train_state_create(&state));
    const gradd_train_property_t given[] = {
        {.name = "epoch", .integer = 3,              .real = 9     },
        {.name = "best",  .kind = GRADD_TRAIN_FLOAT, .real = 0.5f  },
        {.name = "place", .kind = GRADD_TRAIN_TEXT,  .text = "here"},
        {.name = "epoch", .kind = GRADD_TRAIN_TEXT,  .text = "four"}
    };
    for (int i = 0; i < 4; i++)
        CHECK_OK(gradd_train_state_set_property(state, &given[i]));
    CHECK_EQ_INT(gradd_train_state_property_count(state), 3);
    CHECK_EQ_INT(gradd_train_state_find_property(state, "loss"), -1);
    const int i = gradd_train_state_find_property(state, "epoch");
    CHECK_EQ_STR(gradd_train_state_property(state, i).text, "four");
    CHECK_EQ_INT(gradd_train_state_property(state, i).integer, 0);
    CHECK(gradd_train_state_property(state, 1).real == 0.5f);
    gradd_train_state_destroy(state);
}
