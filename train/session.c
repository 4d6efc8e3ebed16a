/* Opens and closes sessions, and says what their models look like. See session.h. */
#include "train/session.h"

#include <stdlib.h>
#include <string.h>

#include "platform/platform.h"
#include "server/device/device.h"
#include "server/exec/run.h"

#define MOST_MODEL ((size_t)2 << 30) /* bytes of an ONNX file */

gradd_train_optimizer_t gradd_train_adamw(void) {
    return (gradd_train_optimizer_t){.kind = GRADD_TRAIN_ADAMW,
                                     .mode = GRADD_ADAMW_TORCH,
                                     .bias_correction = true,
                                     .beta1 = 0.9,
                                     .beta2 = 0.999,
                                     .eps = 1e-8,
                                     .weight_decay = 0.01};
}

gradd_train_optimizer_t gradd_train_sgd(void) {
    return (gradd_train_optimizer_t){.kind = GRADD_TRAIN_SGD};
}

/* ---- opening --------------------------------------------------------------------------------- */

static bool is_given(const gradd_train_model_t *model) {
    return model->bytes || model->path;
}

/* The bytes of a model: the caller's, or those of a file, which *out_file then owns. */
static gradd_status_t read_model(const gradd_train_model_t *model, const void **out_bytes,
                                 size_t *out_n, void **out_file) {
    *out_file = NULL;
    *out_bytes = model->bytes;
    *out_n = model->n;
    if (model->bytes) return GRADD_OK;
    GRADD_TRY(gradd_platform.read_file(model->path, MOST_MODEL, out_file, out_n));
    *out_bytes = *out_file;
    return GRADD_OK;
}

static gradd_status_t open_side(gradd_train_session_t *s, gradd_train_phase_t phase,
                                const gradd_train_model_t *model) {
    static const char *const names[] = {"the training model", "the eval model"};
    const void *bytes;
    void *file;
    size_t n;
    GRADD_TRY(read_model(model, &bytes, &n, &file));
    gradd_status_t status = side_open(s, phase, bytes, n);
    if (!status && phase == GRADD_TRAIN_EVAL) {
        s->eval_bytes = malloc(n + 1);
        s->eval_n = n;
        if (s->eval_bytes)
            memcpy(s->eval_bytes, bytes, n);
        else
            status = GRADD_FAIL(NOMEM, "no memory for the eval model");
    }
    free(file);
    return gradd_wrap(status, "%s", names[phase]);
}

static gradd_status_t check_options(const gradd_train_options_t *o) {
    if (!is_given(&o->training)) return GRADD_FAIL(TENSOR, "no training model was given");
    if (o->threads < 0 || o->threads > GRADD_MAX_THREADS)
        return GRADD_FAIL(LIMIT, "%d threads, at most %d", o->threads, GRADD_MAX_THREADS);
    if (o->max_plans < 0 || o->max_plans > GRADD_TRAIN_MOST_PLANS)
        return GRADD_FAIL(LIMIT, "%d plans, at most %d", o->max_plans, GRADD_TRAIN_MOST_PLANS);
    if (o->memory_budget < 0)
        return GRADD_FAIL(LIMIT, "a memory budget of %lld bytes", (long long)o->memory_budget);
    return optimizer_check(&o->optimizer);
}

static gradd_status_t open_device(gradd_train_session_t *s) {
    const gradd_device_options_t options = {.threads = s->options.threads};
    GRADD_TRY(gradd_device_open(&options, &s->device));
    s->device->any_spare = true;
    return GRADD_OK;
}

/* Parameters in the order of the training model's inputs. */
static gradd_status_t list_parameters(gradd_train_session_t *s) {
    const train_side_t *side = &s->sides[GRADD_TRAIN_TRAINING];
    const int n = gradd_model_n_inputs(side->model);
    const size_t room = (size_t)n + 1;
    s->parameters = calloc(room, sizeof s->parameters[0]);
    s->trained = calloc(room, sizeof s->trained[0]);
    s->gradients = calloc(room, sizeof s->gradients[0]);
    s->written = calloc(room, sizeof s->written[0]);
    if (!s->parameters || !s->trained || !s->gradients || !s->written)
        return GRADD_FAIL(NOMEM, "no memory for a training session");
    for (int i = 0; i < n; i++)
        if (side->origin[i] >= 0) s->parameters[s->n_parameters++] = side->origin[i];
    return GRADD_OK;
}

static gradd_status_t open_all(gradd_train_session_t *s, const gradd_train_options_t *o) {
    GRADD_TRY(open_device(s));
    GRADD_TRY(open_side(s, GRADD_TRAIN_TRAINING, &o->training));
    if (is_given(&o->eval)) GRADD_TRY(open_side(s, GRADD_TRAIN_EVAL, &o->eval));
    GRADD_TRY(list_parameters(s));
    return session_list_trained(s);
}

gradd_status_t gradd_train_open(gradd_train_state_t *state, const gradd_train_options_t *options,
                                gradd_train_session_t **out_session) {
    GRADD_TRY(check_options(options));
    if (state->has_session) return GRADD_FAIL(STALE, "the state has a session already");
    gradd_train_session_t *s = calloc(1, sizeof *s);
    if (!s) return GRADD_FAIL(NOMEM, "no memory for a training session");
    s->state = state;
    s->options = *options;
    s->options.training = s->options.eval = (gradd_train_model_t){0};
    if (!s->options.max_plans) s->options.max_plans = GRADD_TRAIN_MAX_PLANS;
    if (!state->course.has_seed) state->course.seed = options->seed;
    state->has_session = true;
    const gradd_status_t status = open_all(s, options);
    if (status) {
        const gradd_failure_t failure = *gradd_failure();
        gradd_train_close(s);
        gradd_failure_restore(&failure);
        return status;
    }
    *out_session = s;
    return GRADD_OK;
}

void gradd_train_close(gradd_train_session_t *s) {
    if (!s) return;
    side_close(&s->sides[GRADD_TRAIN_TRAINING]);
    side_close(&s->sides[GRADD_TRAIN_EVAL]);
    gradd_device_close(s->device);
    for (int i = 0; i < s->state->n_parameters; i++)
        state_drop_gradient(&s->state->parameters[i]);
    s->state->has_session = s->state->waits = false;
    state_give_back(s->sums, s->sums_bytes);
    free(s->parameters);
    free(s->trained);
    free(s->gradients);
    free(s->written);
    free(s->eval_bytes);
    free(s);
}

gradd_train_state_t *gradd_train_session_state(const gradd_train_session_t *s) {
    return s->state;
}

/* ---- models ---------------------------------------------------------------------------------- */

/* A phase that is none has neither inputs nor outputs. */
static const train_side_t *side_of(const gradd_train_session_t *s, gradd_train_phase_t phase) {
    static const train_side_t none = {0};
    return (unsigned)phase > GRADD_TRAIN_EVAL ? &none : &s->sides[phase];
}

int gradd_train_input_count(const gradd_train_session_t *s, gradd_train_phase_t phase) {
    return side_of(s, phase)->n_user;
}

int gradd_train_output_count(const gradd_train_session_t *s, gradd_train_phase_t phase) {
    return side_of(s, phase)->n_shown;
}

const char *gradd_train_input_name(const gradd_train_session_t *s, gradd_train_phase_t phase,
                                   int i) {
    const train_side_t *side = side_of(s, phase);
    return i < 0 || i >= side->n_user ? NULL : gradd_model_input_name(side->model, side->user[i]);
}

const char *gradd_train_output_name(const gradd_train_session_t *s, gradd_train_phase_t phase,
                                    int i) {
    const train_side_t *side = side_of(s, phase);
    return i < 0 || i >= side->n_shown ? NULL
                                       : gradd_model_output_name(side->model, side->outputs[i]);
}

gradd_type_t gradd_train_input_type(const gradd_train_session_t *s, gradd_train_phase_t phase,
                                    int i) {
    const train_side_t *side = side_of(s, phase);
    if (i < 0 || i >= side->n_user) return (gradd_type_t){.rank = -1};
    return gradd_model_input_type(side->model, side->user[i]);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static void count_side(const train_side_t *side, gradd_train_memory_t *m) {
    for (int k = 0; k < side->n_shapes; k++) {
        const train_shape_t *shape = &side->shapes[k];
        const gradd_plan_info_t *info = gradd_plan_info(shape->plan);
        if (info->arena_bytes > m->arena) m->arena = info->arena_bytes;
        m->constants += info->constant_bytes;
        m->buffers += shape->memory_bytes + shape->copies_bytes;
    }
    m->plans += side->n_shapes;
}

gradd_train_memory_t gradd_train_memory(const gradd_train_session_t *s) {
    gradd_train_memory_t m = {.buffers = s->sums_bytes};
    for (int i = 0; i < s->state->n_parameters; i++) {
        const train_parameter_t *p = &s->state->parameters[i];
        m.parameters += p->data ? p->bytes : 0;
        m.gradients += p->gradient ? p->bytes : 0;
        for (int k = 0; k < GRADD_TRAIN_MOMENTS; k++)
            m.moments += p->moments[k] ? state_moment_bytes(p) : 0;
    }
    count_side(&s->sides[GRADD_TRAIN_TRAINING], &m);
    count_side(&s->sides[GRADD_TRAIN_EVAL], &m);
    return m;
}
