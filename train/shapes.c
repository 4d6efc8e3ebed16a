/* Plans of a session, one for each shape of the caller's inputs. See session.h. */
#include <stdlib.h>
#include <string.h>

#include "server/exec/run.h"
#include "server/graph/model.h"
#include "train/session.h"

static gradd_status_t no_memory(void) {
    return GRADD_FAIL(NOMEM, "no memory for a plan");
}

static void shape_free(train_shape_t *s) {
    gradd_run_destroy(s->run);
    gradd_plan_destroy(s->plan);
    state_give_back(s->memory, s->memory_bytes);
    state_give_back(s->copies, s->copies_bytes);
    free(s->types);
    free(s->outputs);
    free(s->grad_outputs);
    *s = (train_shape_t){0};
}

void shapes_drop(train_side_t *side) {
    for (int k = 0; k < side->n_shapes; k++)
        shape_free(&side->shapes[k]);
    side->n_shapes = 0;
}

/* ---- the options of a plan ------------------------------------------------------------------- */

/* The lists that a plan is made from; the plan copies them. */
typedef struct lists_s {
    gradd_type_t *inputs;
    int32_t *parameters, *grads;
    int n_parameters, n_grads;
} lists_t;

static gradd_type_t hidden_type(const gradd_model_t *m, int i) {
    gradd_type_t type = gradd_model_input_type(m, i);
    if (type.dtype == GRADD_DT_NONE) type.dtype = GRADD_DT_F32;
    if (type.rank < 0) type.rank = 0;
    for (int d = 0; d < type.rank; d++)
        if (type.dims[d] < 0) type.dims[d] = 1;
    return type;
}

static void fill_lists(const gradd_train_session_t *s, const train_side_t *side,
                       const gradd_train_tensor_t *inputs, lists_t *l) {
    int user = 0;
    for (int i = 0; i < side->model->n_inputs; i++) {
        const int32_t origin = side->origin[i];
        if (origin == INPUT_USER) {
            l->inputs[i] = inputs[user++].type;
        } else if (origin == INPUT_HIDDEN) {
            l->inputs[i] = hidden_type(side->model, i);
        } else {
            l->inputs[i] = s->state->parameters[origin].type;
            l->parameters[l->n_parameters++] = i;
        }
    }
}

static int input_of(const train_side_t *side, int32_t parameter) {
    for (int i = 0; i < side->model->n_inputs; i++)
        if (side->origin[i] == parameter) return i;
    return -1;
}

static gradd_status_t make_plan(const gradd_train_session_t *s, gradd_train_phase_t phase,
                                lists_t *l, gradd_plan_t **out) {
    const train_side_t *side = &s->sides[phase];
    const bool trains = phase == GRADD_TRAIN_TRAINING;
    const int32_t loss = 0;
    for (int k = 0; trains && k < s->n_trained; k++)
        l->grads[l->n_grads++] = input_of(side, s->trained[k]);
    const gradd_plan_options_t options = {.inputs = l->inputs,
                                          .n_inputs = side->model->n_inputs,
                                          .grads = l->grads,
                                          .n_grads = l->n_grads,
                                          .outputs = side->outputs,
                                          .n_outputs = side->n_outputs,
                                          .grad_outputs = &loss,
                                          .n_grad_outputs = trains,
                                          .device = s->device,
                                          .parameters = l->parameters,
                                          .n_parameters = l->n_parameters,
                                          .memory_budget = trains ? s->options.memory_budget : 0};
    return gradd_plan_create(side->model, &options, out);
}

static gradd_status_t plan_for(const gradd_train_session_t *s, gradd_train_phase_t phase,
                               const gradd_train_tensor_t *inputs, gradd_plan_t **out) {
    const train_side_t *side = &s->sides[phase];
    const size_t n = (size_t)side->model->n_inputs + 1;
    lists_t l = {.inputs = calloc(n, sizeof l.inputs[0]),
                 .parameters = calloc(n, sizeof l.parameters[0]),
                 .grads = calloc(n, sizeof l.grads[0])};
    gradd_status_t status = l.inputs && l.parameters && l.grads ? GRADD_OK : no_memory();
    if (!status) fill_lists(s, side, inputs, &l);
    if (!status) status = make_plan(s, phase, &l, out);
    free(l.inputs);
    free(l.parameters);
    free(l.grads);
    return status;
}

/* ---- a plan with its run and memory ---------------------------------------------------------- */

/* The loss is one float, whose gradient is one. */
static gradd_status_t check_loss(const train_shape_t *shape, const train_side_t *side) {
    char text[GRADD_TYPE_TEXT];
    const gradd_type_t *type = &gradd_plan_info(shape->plan)->outputs[0];
    if (type->dtype == GRADD_DT_F32 && gradd_type_count(type) == 1) return GRADD_OK;
    return GRADD_FAIL(TENSOR, "the loss '%s' is %s, not one f32",
                      gradd_model_output_name(side->model, side->outputs[0]),
                      gradd_type_format(type, text));
}

static gradd_status_t take_outputs(train_shape_t *shape) {
    const gradd_plan_info_t *info = gradd_plan_info(shape->plan);
    int64_t bytes = 0;
    shape->outputs = calloc((size_t)info->n_outputs + 1, sizeof shape->outputs[0]);
    shape->grad_outputs = calloc((size_t)info->n_outputs + 1, sizeof shape->grad_outputs[0]);
    if (!shape->outputs || !shape->grad_outputs) return no_memory();
    for (int j = 0; j < info->n_outputs; j++)
        bytes += aligned_bytes(gradd_type_bytes(&info->outputs[j]));
    GRADD_TRY(state_take(bytes, "the outputs of a step", &shape->memory));
    shape->memory_bytes = bytes;
    char *at = shape->memory;
    for (int j = 0; j < info->n_outputs; j++) {
        shape->outputs[j] = at;
        at += aligned_bytes(gradd_type_bytes(&info->outputs[j]));
    }
    return GRADD_OK;
}

static gradd_status_t shape_make(gradd_train_session_t *s, gradd_train_phase_t phase,
                                 const gradd_train_tensor_t *inputs, train_shape_t *shape) {
    const train_side_t *side = &s->sides[phase];
    shape->types = calloc((size_t)side->n_user + 1, sizeof shape->types[0]);
    if (!shape->types) return no_memory();
    for (int i = 0; i < side->n_user; i++)
        shape->types[i] = inputs[i].type;
    GRADD_TRY(plan_for(s, phase, inputs, &shape->plan));
    if (phase == GRADD_TRAIN_TRAINING) GRADD_TRY(check_loss(shape, side));
    GRADD_TRY(take_outputs(shape));
    GRADD_TRY(gradd_run_create(shape->plan, &shape->run));
    run_rest(shape->run); /* the arena is for all plans */
    return GRADD_OK;
}

static bool matches(const train_shape_t *shape, int n_user, const gradd_train_tensor_t *inputs) {
    for (int i = 0; i < n_user; i++)
        if (!gradd_type_equal(&shape->types[i], &inputs[i].type)) return false;
    return true;
}

/* A free place among the plans; the one that was used longest ago makes room. */
static train_shape_t *free_place(const gradd_train_session_t *s, train_side_t *side) {
    if (side->n_shapes < s->options.max_plans) return &side->shapes[side->n_shapes++];
    train_shape_t *oldest = &side->shapes[0];
    for (int k = 1; k < side->n_shapes; k++)
        if (side->shapes[k].used < oldest->used) oldest = &side->shapes[k];
    shape_free(oldest);
    return oldest;
}

gradd_status_t shape_find(gradd_train_session_t *s, gradd_train_phase_t phase,
                          const gradd_train_tensor_t *inputs, train_shape_t **out_shape) {
    train_side_t *side = &s->sides[phase];
    train_shape_t made = {0}, *found = NULL;
    for (int k = 0; k < side->n_shapes && !found; k++)
        if (matches(&side->shapes[k], side->n_user, inputs)) found = &side->shapes[k];
    if (!found) {
        const gradd_status_t status = shape_make(s, phase, inputs, &made);
        if (status) {
            shape_free(&made);
            return status;
        }
        found = free_place(s, side);
        *found = made;
    }
    found->used = ++s->steps;
    *out_shape = found;
    return GRADD_OK;
}

/* ---- inputs that are not aligned ------------------------------------------------------------- */

static gradd_status_t take_copies(train_shape_t *shape, int n_user) {
    int64_t bytes = 0;
    if (shape->copies) return GRADD_OK;
    for (int i = 0; i < n_user; i++)
        bytes += aligned_bytes(gradd_type_bytes(&shape->types[i]));
    GRADD_TRY(state_take(bytes, "copies of inputs", &shape->copies));
    shape->copies_bytes = bytes;
    return GRADD_OK;
}

gradd_status_t shape_place_input(train_shape_t *shape, int n_user, int i,
                                 const gradd_train_tensor_t *input, const void **out) {
    *out = input->data;
    if ((uintptr_t)input->data % GRADD_TENSOR_ALIGN == 0) return GRADD_OK;
    GRADD_TRY(take_copies(shape, n_user));
    char *at = shape->copies;
    for (int k = 0; k < i; k++)
        at += aligned_bytes(gradd_type_bytes(&shape->types[k]));
    memcpy(at, input->data, (size_t)gradd_type_bytes(&shape->types[i]));
    *out = at;
    return GRADD_OK;
}
