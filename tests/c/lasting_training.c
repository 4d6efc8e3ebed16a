/* See lasting_training.h. */
#include "tests/c/lasting_training.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/c/onnx_build.h"
#include "tests/test.h"

enum { ROWS = 6, IN = 5, HIDDEN = 7, CLASSES = 3 };

/* ---- the model ------------------------------------------------------------------------------- */

/* loss = the cross entropy of dropout(relu(norm(x body.w + body.b))) head.w + head.b */
static gradd_train_model_t make_model(void) {
    static const float half = 0.5f;
    static const uint8_t yes = 1;
    gradd_train_model_t packed = {0};
    Onnx__ModelProto *m = build_model();
    build_input(m, "x", GRADD_DT_F32, 2, BUILD_DIMS(-1, IN));
    build_input(m, "labels", GRADD_DT_I64, 1, BUILD_DIMS(-1));
    build_input(m, "body.w", GRADD_DT_F32, 2, BUILD_DIMS(IN, HIDDEN));
    build_input(m, "body.b", GRADD_DT_F32, 1, BUILD_DIMS(HIDDEN));
    build_input(m, "norm.scale", GRADD_DT_F32, 1, BUILD_DIMS(HIDDEN));
    build_input(m, "norm.bias", GRADD_DT_F32, 1, BUILD_DIMS(HIDDEN));
    build_input(m, "mean", GRADD_DT_F32, 1, BUILD_DIMS(HIDDEN));
    build_input(m, "var", GRADD_DT_F32, 1, BUILD_DIMS(HIDDEN));
    build_input(m, "head.w", GRADD_DT_F32, 2, BUILD_DIMS(HIDDEN, CLASSES));
    build_input(m, "head.b", GRADD_DT_F32, 1, BUILD_DIMS(CLASSES));
    build_raw(build_init(m, "ratio", GRADD_DT_F32, 0, NULL), &half, sizeof half);
    build_raw(build_init(m, "yes", GRADD_DT_BOOL, 0, NULL), &yes, sizeof yes);
    build_node(m, "Gemm", "body", "x,body.w,body.b", "h");
    build_attr_int(build_node(m, "BatchNormalization", "norm", "h,norm.scale,norm.bias,mean,var",
                              "n,new_mean,new_var"),
                   "training_mode", 1);
    build_node(m, "Relu", "relu", "n", "r");
    build_node(m, "Dropout", "dropout", "r,ratio,yes", "d");
    build_node(m, "Gemm", "head", "d,head.w,head.b", "logits");
    build_node(m, "SoftmaxCrossEntropyLoss", "loss", "logits,labels", "loss");
    build_output(m, "loss");
    packed.bytes = build_pack(m, &packed.n);
    return packed;
}

static float drawn(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / (1 << 24) - 0.5f;
}

/* rows 0: of one dimension */
typedef struct parameter_s {
    const char *name;
    int64_t rows, columns;
    bool trainable;
} parameter_t;

enum { N_PARAMETERS = 8 };
static const parameter_t parameters[N_PARAMETERS] = {
    {"head.w",     HIDDEN, CLASSES, true },
    {"body.w",     IN,     HIDDEN,  false},
    {"body.b",     0,      HIDDEN,  false},
    {"norm.scale", 0,      HIDDEN,  true },
    {"norm.bias",  0,      HIDDEN,  true },
    {"mean",       0,      HIDDEN,  false},
    {"var",        0,      HIDDEN,  false},
    {"head.b",     0,      CLASSES, true },
};

static void add(gradd_train_state_t *state, const parameter_t *p) {
    const char *name = p->name;
    const int64_t rows = p->rows, columns = p->columns;
    gradd_type_t type = {.dtype = GRADD_DT_F32, .rank = 1, .dims = {columns}};
    float values[HIDDEN * HIDDEN];
    uint32_t seed = (uint32_t)(rows * 31 + columns);
    if (rows)
        type = (gradd_type_t){
            .dtype = GRADD_DT_F32, .rank = 2, .dims = {rows, columns}
        };
    for (int64_t i = 0; i < gradd_type_count(&type); i++)
        values[i] = drawn(&seed) + (strstr(name, "scale") || strstr(name, "var") ? 1 : 0);
    CHECK_OK(gradd_train_state_add(state, name, &type, values, p->trainable));
}

gradd_train_state_t *lasting_training_state(void) {
    gradd_train_state_t *state;
    CHECK_OK(gradd_train_state_create(&state));
    for (int i = 0; i < N_PARAMETERS; i++)
        add(state, &parameters[i]);
    return state;
}

/* ---- steps ----------------------------------------------------------------------------------- */

gradd_train_session_t *lasting_training_open(gradd_train_state_t *state) {
    static gradd_train_model_t model;
    gradd_train_session_t *session;
    if (!model.bytes) model = make_model();
    const gradd_train_options_t options = {
        .training = model, .optimizer = gradd_train_adamw(), .threads = 1, .seed = 5};
    CHECK_OK(gradd_train_open(state, &options, &session));
    if (!gradd_train_state_progress(state).step)
        CHECK_OK(gradd_train_set_linear_schedule(session, 2, 1000, 0.05f));
    return session;
}

static gradd_status_t train(gradd_train_session_t *session, int64_t position) {
    float x[ROWS * IN];
    int64_t labels[ROWS];
    uint32_t seed = (uint32_t)position;
    for (int i = 0; i < ROWS * IN; i++)
        x[i] = drawn(&seed);
    for (int i = 0; i < ROWS; i++)
        labels[i] = (i + position) % CLASSES;
    const gradd_train_tensor_t inputs[] = {
        {{.dtype = GRADD_DT_F32, .rank = 2, .dims = {ROWS, IN}}, x     },
        {{.dtype = GRADD_DT_I64, .rank = 1, .dims = {ROWS}},     labels}
    };
    return gradd_train_step(session, inputs, 2, NULL, NULL);
}

/* A text that becomes longer, and shorter again: the table needs several pages, or one. */
static gradd_status_t note(gradd_train_state_t *state, int64_t position) {
    char text[7001];
    const size_t n = (size_t)(position * 2503 % 7000);
    memset(text, 'a' + (int)(position % 26), n);
    text[n] = 0;
    const gradd_train_property_t made = {"note", GRADD_TRAIN_TEXT, 0, 0, text};
    return gradd_train_state_set_property(state, &made);
}

gradd_status_t lasting_training_step(gradd_train_session_t *session) {
    gradd_train_state_t *state = gradd_train_session_state(session);
    const gradd_train_progress_t now = gradd_train_state_progress(state);
    if (now.step == LASTING_THAWS) GRADD_TRY(gradd_train_thaw(session, "body.*", NULL));
    GRADD_TRY(train(session, now.position));
    GRADD_TRY(gradd_train_optimizer_step(session, NULL));
    GRADD_TRY(gradd_train_schedule_step(session));
    gradd_train_lazy_reset_grad(session);
    gradd_train_state_set_position(state, now.position + 1);
    return note(state, now.position);
}

gradd_status_t lasting_training_run(gradd_train_state_t *state, int64_t steps) {
    gradd_train_session_t *session = lasting_training_open(state);
    gradd_status_t status = GRADD_OK;
    while (!status && gradd_train_state_progress(state).step < steps)
        status = lasting_training_step(session);
    if (!status && gradd_train_commits(state).number) status = gradd_train_commit(state);
    gradd_train_close(session);
    return status;
}

/* ---- comparing ------------------------------------------------------------------------------- */

char *lasting_training_image(const gradd_train_state_t *state, size_t *out_n) {
    char *image;
    FILE *to = open_memstream(&image, out_n);
    CHECK(to);
    CHECK_EQ_INT(gradd_train_state_count(state), N_PARAMETERS);
    for (int i = 0; i < N_PARAMETERS; i++) { /* in a checkpoint they have another order */
        const int at = gradd_train_state_find(state, parameters[i].name);
        CHECK(at >= 0);
        const gradd_train_parameter_t p = gradd_train_state_parameter(state, at);
        const size_t n = (size_t)gradd_type_bytes(&p.type);
        fprintf(to, "%s %d %lld ", p.name, p.trainable, (long long)p.steps);
        fwrite(p.data, 1, n, to);
        for (int k = 0; k < GRADD_TRAIN_MOMENTS && p.moments[k]; k++)
            fwrite(p.moments[k], 1, n, to);
    }
    const gradd_train_progress_t now = gradd_train_state_progress(state);
    fprintf(to, "%lld %lld %a %a", (long long)now.step, (long long)now.position,
            (double)now.learning_rate, (double)now.initial_learning_rate);
    for (int i = 0; i < gradd_train_state_property_count(state); i++) {
        const gradd_train_property_t p = gradd_train_state_property(state, i);
        fprintf(to, " %s=%s", p.name, p.text);
    }
    CHECK(fclose(to) == 0);
    return image;
}

void lasting_training_check(const gradd_train_state_t *state, int64_t steps) {
    gradd_train_state_t *expected = lasting_training_state();
    size_t n, n_expected;
    CHECK_OK(lasting_training_run(expected, steps));
    char *a = lasting_training_image(state, &n);
    char *b = lasting_training_image(expected, &n_expected);
    CHECK_EQ_INT(n, n_expected);
    CHECK(!memcmp(a, b, n));
    free(a);
    free(b);
    gradd_train_state_destroy(expected);
}
