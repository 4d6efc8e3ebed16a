/* A training state as a checkpoint file, and back.
 *
 * The format has one count of steps for a group of parameters, and ONNX Runtime has one group,
 * "group0". A state counts for each parameter, since one may be thawed later than others. All
 * moments are written to "group0", with the state's count; a group for each other count, "group1"
 * and on, names its parameters without moments. ONNX Runtime passes over these. What is read has no
 * learning rate but the one that a schedule starts from, and the schedule's where there is one.
 *
 * Seed, schedule and position in the data have no place in the format: they are properties whose
 * names begin with "gradd.", which a state does not list among its own.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "platform/platform.h"
#include "train/files/checkpoint.h"
#include "train/lasting.h"

#define MAIN_GROUP "group0"

/* ---- reading --------------------------------------------------------------------------------- */

static gradd_status_t add_parameters(gradd_train_state_t *state, const checkpoint_t *checkpoint) {
    for (int i = 0; i < checkpoint->n_parameters; i++) {
        const checkpoint_parameter_t *parameter = &checkpoint->parameters[i];
        gradd_type_t type = parameter->tensor.type;
        if (!parameter->tensor.values) type.rank = -1;
        GRADD_TRY(gradd_train_state_add(state, parameter->tensor.name, &type,
                                        parameter->tensor.values, parameter->requires_grad));
    }
    return GRADD_OK;
}

static gradd_status_t add_moment(gradd_train_state_t *state, int i, int k,
                                 const checkpoint_tensor_t *moment) {
    const gradd_train_parameter_t parameter = gradd_train_state_parameter(state, i);
    gradd_type_t expected = parameter.type;
    char want[GRADD_TYPE_TEXT], got[GRADD_TYPE_TEXT];
    expected.dtype = GRADD_DT_F32;
    if (!gradd_type_equal(&moment->type, &expected))
        return GRADD_FAIL(MODEL, "parameter '%s': moment %d is %s, expected %s", parameter.name, k,
                          gradd_type_format(&moment->type, got),
                          gradd_type_format(&expected, want));
    return gradd_train_state_set_moment(state, i, k, moment->values);
}

static gradd_status_t add_moments(gradd_train_state_t *state, const checkpoint_moments_t *moments,
                                  int64_t steps) {
    const int i = gradd_train_state_find(state, moments->parameter);
    if (i < 0)
        return GRADD_FAIL(MODEL, "the optimizer knows a parameter '%s', the model does not",
                          moments->parameter);
    if (moments->n_moments > GRADD_TRAIN_MOMENTS)
        return GRADD_FAIL(UNSUPPORTED, "parameter '%s' has %d moments, expected at most %d",
                          moments->parameter, moments->n_moments, GRADD_TRAIN_MOMENTS);
    for (int k = 0; k < moments->n_moments; k++)
        GRADD_TRY(add_moment(state, i, k, &moments->moments[k]));
    gradd_train_state_set_steps(state, i, steps);
    return GRADD_OK;
}

static gradd_status_t add_groups(gradd_train_state_t *state, const checkpoint_t *checkpoint) {
    for (int i = 0; i < checkpoint->n_groups; i++) {
        const checkpoint_group_t *group = &checkpoint->groups[i];
        for (int k = 0; k < group->n_states; k++)
            GRADD_TRY(add_moments(state, &group->states[k], group->step));
        if (strcmp(group->name, MAIN_GROUP) != 0) continue;
        state->progress = (gradd_train_progress_t){
            .step = group->step,
            .learning_rate = group->initial_learning_rate,
            .initial_learning_rate = group->initial_learning_rate,
        };
    }
    return GRADD_OK;
}

/* Numbers that are properties in a file alone. */
enum { SEED, DRAWS, WARMUP, TOTAL, POSITION, N_OWN };
static const char *const own_names[N_OWN] = {"gradd.seed", "gradd.draws", "gradd.warmup",
                                             "gradd.total", "gradd.position"};

/* Whether the property is one of these; its number is then among them. */
static bool take_own(const checkpoint_property_t *property, int64_t own[N_OWN], bool has[N_OWN]) {
    for (int i = 0; i < N_OWN && property->kind == CHECKPOINT_INT; i++) {
        if (strcmp(property->name, own_names[i]) != 0) continue;
        own[i] = property->integer;
        has[i] = true;
        return true;
    }
    return false;
}

static gradd_status_t set_own(gradd_train_state_t *state, const int64_t own[N_OWN],
                              const bool has[N_OWN]) {
    train_course_t *course = &state->course;
    state->progress.position = own[POSITION];
    course->has_seed = has[SEED];
    course->seed = (uint64_t)own[SEED];
    course->draws = (uint64_t)own[DRAWS];
    if (own[WARMUP] < 0 || own[TOTAL] < 0)
        return GRADD_FAIL(MODEL, "a schedule of %lld steps, %lld of them to warm up",
                          (long long)own[TOTAL], (long long)own[WARMUP]);
    course->has_schedule = has[WARMUP] && has[TOTAL];
    course->warmup = own[WARMUP];
    course->total = own[TOTAL];
    if (course->has_schedule) state_schedule_rate(state);
    return GRADD_OK;
}

static gradd_status_t add_properties(gradd_train_state_t *state, const checkpoint_t *checkpoint) {
    int64_t own[N_OWN] = {0};
    bool has[N_OWN] = {false};
    for (int i = 0; i < checkpoint->n_properties; i++) {
        const checkpoint_property_t *from = &checkpoint->properties[i];
        if (take_own(from, own, has)) continue;
        const gradd_train_property_t property = {.name = from->name,
                                                 .kind = (gradd_train_property_kind_t)from->kind,
                                                 .integer = from->integer,
                                                 .real = from->real,
                                                 .text = from->text};
        GRADD_TRY(gradd_train_state_set_property(state, &property));
    }
    return set_own(state, own, has);
}

gradd_status_t gradd_train_state_load_bytes(const void *bytes, size_t n,
                                            gradd_train_state_t **out_state) {
    checkpoint_t checkpoint;
    gradd_train_state_t *state = NULL;
    if (!bytes) return GRADD_FAIL(MODEL, "a checkpoint: the bytes are missing");
    GRADD_TRY(checkpoint_read(bytes, n, &checkpoint));
    gradd_status_t status = gradd_train_state_create(&state);
    if (status == GRADD_OK) status = add_parameters(state, &checkpoint);
    if (status == GRADD_OK) status = add_groups(state, &checkpoint);
    if (status == GRADD_OK) status = add_properties(state, &checkpoint);
    checkpoint_finish(&checkpoint);
    if (status != GRADD_OK) {
        gradd_train_state_destroy(state);
        return gradd_wrap(status, "checkpoint");
    }
    *out_state = state;
    return GRADD_OK;
}

gradd_status_t gradd_train_state_load(const char *path, gradd_train_state_t **out_state) {
    void *bytes;
    size_t n;
    if (!path) return GRADD_FAIL(IO, "a checkpoint: the path is missing");
    GRADD_TRY(gradd_platform.read_file(path, INT32_MAX, &bytes, &n));
    const gradd_status_t status = gradd_train_state_load_bytes(bytes, n, out_state);
    free(bytes);
    return gradd_wrap(status, "%s", path);
}

/* ---- writing --------------------------------------------------------------------------------- */

#define NAME_BYTES 24

/* The lists of a checkpoint that is being made. */
typedef struct made_s {
    checkpoint_t checkpoint;
    checkpoint_moments_t *states; /* Owned: of all groups, one after the other */
    char (*names)[NAME_BYTES];    /* Owned: of the groups */
} made_t;

static void made_finish(made_t *made) {
    checkpoint_t *checkpoint = &made->checkpoint;
    free(checkpoint->parameters);
    free(checkpoint->groups);
    free(checkpoint->properties);
    free(made->states);
    free(made->names);
}

static gradd_status_t make_lists(const gradd_train_state_t *state, made_t *made) {
    const size_t n = (size_t)gradd_train_state_count(state);
    const size_t n_properties = (size_t)gradd_train_state_property_count(state);
    checkpoint_t *checkpoint = &made->checkpoint;
    checkpoint->parameters = calloc(n + 1, sizeof *checkpoint->parameters);
    checkpoint->groups = calloc(n + 1, sizeof *checkpoint->groups);
    checkpoint->properties = calloc(n_properties + N_OWN, sizeof *checkpoint->properties);
    made->states = calloc(2 * n + 1, sizeof *made->states);
    made->names = calloc(n + 1, sizeof *made->names);
    if (!checkpoint->parameters || !checkpoint->groups || !checkpoint->properties ||
        !made->states || !made->names)
        return GRADD_FAIL(NOMEM, "no memory for the lists of a checkpoint");
    return GRADD_OK;
}

/* A state without any values is nominal; one with values for a part of it cannot be written. */
static gradd_status_t list_parameters(const gradd_train_state_t *state, checkpoint_t *checkpoint) {
    int n_empty = 0;
    const char *empty = "";
    for (int i = 0; i < gradd_train_state_count(state); i++) {
        const gradd_train_parameter_t parameter = gradd_train_state_parameter(state, i);
        if (!parameter.data) {
            n_empty++;
            empty = parameter.name;
        }
        checkpoint->parameters[checkpoint->n_parameters++] = (checkpoint_parameter_t){
            {parameter.name, parameter.type, parameter.data},
            parameter.trainable
        };
    }
    checkpoint->is_nominal = n_empty > 0;
    if (n_empty > 0 && n_empty < checkpoint->n_parameters)
        return GRADD_FAIL(TENSOR, "parameter '%s' has no values, others have", empty);
    return GRADD_OK;
}

static void list_properties(const gradd_train_state_t *state, checkpoint_t *checkpoint) {
    for (int i = 0; i < gradd_train_state_property_count(state); i++) {
        const gradd_train_property_t from = gradd_train_state_property(state, i);
        checkpoint->properties[checkpoint->n_properties++] =
            (checkpoint_property_t){.name = from.name,
                                    .kind = (checkpoint_kind_t)from.kind,
                                    .integer = from.integer,
                                    .real = from.real,
                                    .text = from.text};
    }
}

static void list_own(const gradd_train_state_t *state, checkpoint_t *checkpoint) {
    const train_course_t *course = &state->course;
    const int64_t own[N_OWN] = {(int64_t)course->seed, (int64_t)course->draws, course->warmup,
                                course->total, state->progress.position};
    const bool has[N_OWN] = {course->has_seed, course->has_seed, course->has_schedule,
                             course->has_schedule, state->progress.position != 0};
    for (int i = 0; i < N_OWN; i++)
        if (has[i])
            checkpoint->properties[checkpoint->n_properties++] = (checkpoint_property_t){
                .name = own_names[i], .kind = CHECKPOINT_INT, .integer = own[i]};
}

static void list_moments(const gradd_train_parameter_t *parameter, checkpoint_moments_t *out) {
    static const char *const names[GRADD_TRAIN_MOMENTS] = {"momentum0", "momentum1"};
    for (int k = 0; k < GRADD_TRAIN_MOMENTS && parameter->moments[k]; k++) {
        checkpoint_tensor_t *moment = &out->moments[out->n_moments++];
        *moment = (checkpoint_tensor_t){names[k], parameter->type, parameter->moments[k]};
        moment->type.dtype = GRADD_DT_F32;
    }
}

/* Adds a group behind the states of the groups before it. The first one has all moments, the others
 * name the parameters whose count of steps is theirs. */
static void list_group(const gradd_train_state_t *state, int64_t steps, made_t *made) {
    checkpoint_t *checkpoint = &made->checkpoint;
    const int number = checkpoint->n_groups;
    checkpoint_group_t *group = &checkpoint->groups[number];
    const checkpoint_group_t *before = number ? group - 1 : NULL;
    snprintf(made->names[number], NAME_BYTES, "group%d", number);
    *group = (checkpoint_group_t){
        .name = made->names[number],
        .step = steps,
        .initial_learning_rate = gradd_train_state_progress(state).initial_learning_rate,
        .states = before ? before->states + before->n_states : made->states,
    };
    for (int i = 0; i < gradd_train_state_count(state); i++) {
        const gradd_train_parameter_t parameter = gradd_train_state_parameter(state, i);
        if (!parameter.moments[0] || (number && parameter.steps != steps)) continue;
        checkpoint_moments_t *listed = &group->states[group->n_states++];
        listed->parameter = parameter.name;
        if (!number) list_moments(&parameter, listed);
    }
    checkpoint->n_groups++;
}

static void list_groups(const gradd_train_state_t *state, made_t *made) {
    const checkpoint_t *checkpoint = &made->checkpoint;
    list_group(state, gradd_train_state_progress(state).step, made);
    for (int i = 0; i < gradd_train_state_count(state); i++) {
        const gradd_train_parameter_t parameter = gradd_train_state_parameter(state, i);
        bool listed = !parameter.moments[0];
        for (int k = 0; k < checkpoint->n_groups; k++)
            listed = listed || checkpoint->groups[k].step == parameter.steps;
        if (!listed) list_group(state, parameter.steps, made);
    }
}

static gradd_status_t write_made(const checkpoint_t *checkpoint, const char *path) {
    checkpoint_file_t file;
    GRADD_TRY(checkpoint_write(checkpoint, &file));
    const gradd_status_t status = gradd_platform.write_file(path, file.parts, file.n_parts);
    checkpoint_file_finish(&file);
    return status;
}

gradd_status_t gradd_train_state_save(const gradd_train_state_t *state, const char *path,
                                      bool with_optimizer) {
    made_t made = {0};
    if (!path) return GRADD_FAIL(IO, "a checkpoint: the path is missing");
    if (lasting_is_at(state->lasting, path))
        return GRADD_FAIL(STALE,
                          "'%s' is the file that the state is committed to: a checkpoint needs "
                          "another path",
                          path);
    gradd_status_t status = make_lists(state, &made);
    if (status == GRADD_OK) status = list_parameters(state, &made.checkpoint);
    if (status == GRADD_OK) {
        list_properties(state, &made.checkpoint);
        if (with_optimizer) list_own(state, &made.checkpoint);
        if (with_optimizer) list_groups(state, &made);
        status = write_made(&made.checkpoint, path);
    }
    made_finish(&made);
    return status;
}
