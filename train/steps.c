/* One step of training, and one of evaluation. See session.h. */
#include <string.h>

#include "server/exec/run.h"
#include "train/lasting.h"
#include "train/session.h"

/* ---- inputs ---------------------------------------------------------------------------------- */

static const char *name_of(const train_side_t *side, int i) {
    return gradd_model_input_name(side->model, i);
}

static gradd_status_t check_types(const train_side_t *side, const gradd_train_tensor_t *inputs,
                                  int n) {
    if (n >= 0 && n < side->n_user)
        return GRADD_FAIL(TENSOR,
                          "expected %d inputs, got %d: '%s' is neither given nor a parameter "
                          "of the state",
                          side->n_user, n, name_of(side, side->user[n]));
    if (n != side->n_user) return GRADD_FAIL(TENSOR, "expected %d inputs, got %d", side->n_user, n);
    if (n && !inputs) return GRADD_FAIL(TENSOR, "%d inputs, but their list is missing", n);
    for (int i = 0; i < n; i++)
        GRADD_TRY(gradd_wrap(gradd_type_check(&inputs[i].type), "input '%s'",
                             name_of(side, side->user[i])));
    return GRADD_OK;
}

static gradd_status_t check_inputs(const gradd_train_session_t *s, const train_side_t *side,
                                   const gradd_train_tensor_t *inputs, int n) {
    GRADD_TRY(check_types(side, inputs, n));
    for (int i = 0; i < n; i++)
        if (!inputs[i].data && gradd_type_count(&inputs[i].type))
            return GRADD_FAIL(TENSOR, "input '%s' has no data", name_of(side, side->user[i]));
    for (int i = 0; i < gradd_model_n_inputs(side->model); i++)
        if (side->origin[i] >= 0 && !s->state->parameters[side->origin[i]].data)
            return GRADD_FAIL(TENSOR, "parameter '%s' has no values yet", name_of(side, i));
    return GRADD_OK;
}

static gradd_status_t place_inputs(const gradd_train_session_t *s, train_side_t *side,
                                   train_shape_t *shape, const gradd_train_tensor_t *inputs) {
    for (int i = 0; i < gradd_model_n_inputs(side->model); i++)
        side->inputs[i] = side->origin[i] >= 0 ? s->state->parameters[side->origin[i]].data : NULL;
    for (int i = 0; i < side->n_user; i++)
        GRADD_TRY(
            shape_place_input(shape, side->n_user, i, &inputs[i], &side->inputs[side->user[i]]));
    return GRADD_OK;
}

static void show_outputs(const train_side_t *side, const train_shape_t *shape,
                         gradd_train_tensor_t *outputs) {
    const gradd_plan_info_t *info = gradd_plan_info(shape->plan);
    for (int j = 0; outputs && j < side->n_shown; j++)
        outputs[j] = (gradd_train_tensor_t){info->outputs[j], shape->outputs[j]};
}

/* ---- gradients ------------------------------------------------------------------------------- */

/* Room for the gradients of a step that are added to those there are. */
static gradd_status_t take_sums(gradd_train_session_t *s) {
    int64_t bytes = 0;
    for (int k = 0; k < s->n_trained; k++)
        bytes += aligned_bytes(s->state->parameters[s->trained[k]].bytes);
    if (s->sums && s->sums_bytes == bytes) return GRADD_OK;
    state_give_back(s->sums, s->sums_bytes);
    s->sums = NULL;
    s->sums_bytes = 0;
    GRADD_TRY(state_take(bytes, "a second set of gradients", &s->sums));
    s->sums_bytes = bytes;
    return GRADD_OK;
}

/* A gradient is made in its place, or beside it if there is one to add to. */
static gradd_status_t place_gradients(gradd_train_session_t *s) {
    bool adds = false;
    for (int k = 0; k < s->n_trained; k++) {
        train_parameter_t *p = &s->state->parameters[s->trained[k]];
        GRADD_TRY(state_make_gradient(p));
        adds |= p->has_gradient;
    }
    if (adds) GRADD_TRY(take_sums(s));
    char *at = s->sums;
    for (int k = 0; k < s->n_trained; k++) {
        const train_parameter_t *p = &s->state->parameters[s->trained[k]];
        s->gradients[k] = p->has_gradient ? at : p->gradient;
        if (adds) at += aligned_bytes(p->bytes);
    }
    return GRADD_OK;
}

static void add(float *to, const float *from, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        to[i] += from[i];
}

static void commit_gradients(gradd_train_session_t *s) {
    for (int k = 0; k < s->n_trained; k++) {
        train_parameter_t *p = &s->state->parameters[s->trained[k]];
        if (!s->written[k]) continue;
        if (p->has_gradient) add(p->gradient, s->gradients[k], gradd_type_count(&p->type));
        p->has_gradient = true;
    }
}

static void commit_statistics(gradd_train_session_t *s, const train_side_t *side,
                              const train_shape_t *shape) {
    for (int k = 0; k < side->n_statistics; k++) {
        const train_statistic_t *t = &side->statistics[k];
        train_parameter_t *p = &s->state->parameters[t->parameter];
        p->changed = true;
        memcpy(p->data, shape->outputs[t->output], (size_t)p->bytes);
    }
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* Numbers of neighbouring steps, and of the same step under neighbouring seeds, have nothing in
 * common (splitmix64: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators"). */
static uint64_t mix(uint64_t z) {
    z += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static gradd_status_t forward_backward(gradd_train_session_t *s, train_side_t *side,
                                       train_shape_t *shape, const volatile int *cancel) {
    static const float one = 1;
    const void **grad_outputs = shape->grad_outputs;
    const train_course_t *course = &s->state->course;
    const uint64_t seed = mix(mix(course->seed) + course->draws);
    grad_outputs[0] = &one;
    memset(s->written, 0, sizeof s->written[0] * (size_t)s->n_trained);
    GRADD_TRY(gradd_run_forward(shape->run, seed, 0, side->inputs, shape->outputs, cancel));
    return gradd_run_backward(shape->run, grad_outputs, s->gradients, false, s->written, cancel);
}

static gradd_status_t begin(gradd_train_session_t *s, gradd_train_phase_t phase,
                            const gradd_train_tensor_t *inputs, int n_inputs,
                            train_shape_t **out_shape) {
    train_side_t *side = &s->sides[phase];
    GRADD_TRY(check_inputs(s, side, inputs, n_inputs));
    GRADD_TRY(shape_find(s, phase, inputs, out_shape));
    s->plan_threads = gradd_plan_info((*out_shape)->plan)->threads;
    return place_inputs(s, side, *out_shape, inputs);
}

gradd_status_t gradd_train_step(gradd_train_session_t *s, const gradd_train_tensor_t *inputs,
                                int n_inputs, gradd_train_tensor_t *outputs,
                                const volatile int *cancel) {
    train_side_t *side = &s->sides[GRADD_TRAIN_TRAINING];
    train_shape_t *shape;
    GRADD_TRY(lasting_commit_due(s->state));
    GRADD_TRY(begin(s, GRADD_TRAIN_TRAINING, inputs, n_inputs, &shape));
    GRADD_TRY(place_gradients(s));
    const gradd_status_t status = forward_backward(s, side, shape, cancel);
    run_rest(shape->run);
    GRADD_TRY(status);
    commit_gradients(s);
    commit_statistics(s, side, shape);
    s->state->course.draws++;
    s->state->course.has_seed = true;
    s->state->waits = true;
    show_outputs(side, shape, outputs);
    return GRADD_OK;
}

gradd_status_t gradd_train_eval_step(gradd_train_session_t *s, const gradd_train_tensor_t *inputs,
                                     int n_inputs, gradd_train_tensor_t *outputs,
                                     const volatile int *cancel) {
    train_side_t *side = &s->sides[GRADD_TRAIN_EVAL];
    train_shape_t *shape;
    if (!side->model) return GRADD_FAIL(UNSUPPORTED, "the session has no eval model");
    GRADD_TRY(begin(s, GRADD_TRAIN_EVAL, inputs, n_inputs, &shape));
    const gradd_status_t status = gradd_run_forward(shape->run, 0, GRADD_RUN_DROPOUT_OFF,
                                                    side->inputs, shape->outputs, cancel);
    run_rest(shape->run);
    GRADD_TRY(status);
    show_outputs(side, shape, outputs);
    return GRADD_OK;
}

void gradd_train_lazy_reset_grad(gradd_train_session_t *s) {
    for (int i = 0; i < s->state->n_parameters; i++)
        s->state->parameters[i].has_gradient = false;
    s->state->waits = false;
}

void gradd_train_set_seed(gradd_train_session_t *s, uint64_t seed) {
    train_course_t *course = &s->state->course;
    course->seed = seed;
    course->draws = 0;
    course->has_seed = true;
}

gradd_status_t gradd_train_prepare(gradd_train_session_t *session, gradd_train_phase_t phase,
                                   const gradd_train_tensor_t *inputs, int n_inputs) {
    if ((unsigned)phase > GRADD_TRAIN_EVAL) return GRADD_FAIL(TENSOR, "phase %d", (int)phase);
    train_side_t *side = &session->sides[phase];
    train_shape_t *shape;
    if (!side->model) return GRADD_FAIL(UNSUPPORTED, "the session has no such model");
    GRADD_TRY(check_types(side, inputs, n_inputs));
    return shape_find(session, phase, inputs, &shape);
}
