/* Parameters, what the optimizer knows of them, and its progress. See gradd_train.h. */
#include "train/lasting.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "platform/platform.h"

#define RATE            1e-3f /* before anything sets it */
#define MOST_PARAMETERS 16384 /* they are looked up one by one */

/* ---- memory ---------------------------------------------------------------------------------- */

/* A byte at least, so that a tensor without elements has an address as well. */
gradd_status_t state_take(int64_t bytes, const char *what, void **out) {
    *out = gradd_platform.take((size_t)bytes + 1);
    return *out ? GRADD_OK
                : GRADD_FAIL(NOMEM, "no memory for %s (%lld bytes)", what, (long long)bytes);
}

void state_give_back(void *memory, int64_t bytes) {
    gradd_platform.give_back(memory, (size_t)bytes + 1);
}

int64_t state_moment_bytes(const train_parameter_t *p) {
    return gradd_type_count(&p->type) * (int64_t)sizeof(float);
}

static gradd_status_t take_for(const train_parameter_t *p, const char *what, int64_t bytes,
                               void **out) {
    if (*out) return GRADD_OK;
    return gradd_wrap(state_take(bytes, what, out), "parameter '%s'", p->name);
}

gradd_status_t state_make_data(train_parameter_t *p) {
    return take_for(p, "its values", p->bytes, &p->data);
}

gradd_status_t state_make_gradient(train_parameter_t *p) {
    return take_for(p, "its gradient", p->bytes, &p->gradient);
}

gradd_status_t state_make_moment(train_parameter_t *p, int k) {
    void *memory = p->moments[k];
    if (memory) return GRADD_OK;
    GRADD_TRY(take_for(p, "its optimizer state", state_moment_bytes(p), &memory));
    memset(memory, 0, (size_t)state_moment_bytes(p));
    p->moments[k] = memory;
    return GRADD_OK;
}

void *state_piece(const train_parameter_t *p, int k) {
    return k ? p->moments[k - 1] : p->data;
}

int64_t state_piece_bytes(const train_parameter_t *p, int k) {
    return k ? state_moment_bytes(p) : p->bytes;
}

void state_drop_gradient(train_parameter_t *p) {
    state_give_back(p->gradient, p->bytes);
    p->gradient = NULL;
    p->has_gradient = false;
}

void state_drop_moments(train_parameter_t *p) {
    for (int k = 0; k < GRADD_TRAIN_MOMENTS; k++) {
        state_give_back(p->moments[k], state_moment_bytes(p));
        p->moments[k] = NULL;
    }
    p->steps = 0;
}

static void free_parameter(train_parameter_t *p) {
    state_drop_gradient(p);
    state_drop_moments(p);
    if (!p->places.is_mapped) state_give_back(p->data, p->bytes);
    free(p->name);
}

/* Room for one more entry. */
static gradd_status_t grow(void **list, int n, int *room, size_t entry) {
    if (n < *room) return GRADD_OK;
    if (*room > INT_MAX / 2) return GRADD_FAIL(LIMIT, "%d entries are too many", n);
    const int wider = *room ? *room * 2 : 16;
    void *moved = realloc(*list, entry * (size_t)wider);
    if (!moved) return GRADD_FAIL(NOMEM, "no memory for the training state");
    *list = moved;
    *room = wider;
    return GRADD_OK;
}

gradd_status_t gradd_train_state_create(gradd_train_state_t **out_state) {
    gradd_train_state_t *state = calloc(1, sizeof *state);
    if (!state) return GRADD_FAIL(NOMEM, "no memory for the training state");
    state->progress =
        (gradd_train_progress_t){.learning_rate = RATE, .initial_learning_rate = RATE};
    *out_state = state;
    return GRADD_OK;
}

void gradd_train_state_destroy(gradd_train_state_t *state) {
    if (!state) return;
    for (int i = 0; i < state->n_parameters; i++)
        free_parameter(&state->parameters[i]);
    for (int i = 0; i < state->n_properties; i++) {
        free((char *)state->properties[i].name);
        free((char *)state->properties[i].text);
    }
    lasting_close(state->lasting);
    free(state->parameters);
    free(state->properties);
    free(state);
}

/* ---- parameters ------------------------------------------------------------------------------ */

gradd_status_t state_check_type(const gradd_type_t *type, const char *name) {
    GRADD_TRY(gradd_wrap(gradd_type_check(type), "parameter '%s'", name));
    if (gradd_type_count(type) <= INT64_MAX / (int64_t)sizeof(float)) return GRADD_OK;
    return GRADD_FAIL(LIMIT, "parameter '%s' has %lld elements, whose moments no memory can have",
                      name, (long long)gradd_type_count(type));
}

static gradd_status_t check_new(const gradd_train_state_t *state, const char *name,
                                const gradd_type_t *type, bool trainable) {
    char text[GRADD_TYPE_TEXT];
    gradd_dtype_t dtype;
    if (!name || !name[0]) return GRADD_FAIL(TENSOR, "a parameter has no name");
    if (state->n_parameters >= MOST_PARAMETERS)
        return GRADD_FAIL(LIMIT, "more than %d parameters", MOST_PARAMETERS);
    if (gradd_train_state_find(state, name) >= 0)
        return GRADD_FAIL(TENSOR, "there are two parameters '%s'", name);
    GRADD_TRY(gradd_wrap(gradd_dtype_check(type->dtype, &dtype), "parameter '%s'", name));
    if (type->rank != -1) GRADD_TRY(state_check_type(type, name));
    if (trainable && !gradd_dtype_is_float(type->dtype))
        return GRADD_FAIL(TENSOR, "parameter '%s' is to be trained, but %s is not a float", name,
                          gradd_type_format(type, text));
    return GRADD_OK;
}

gradd_status_t gradd_train_state_add(gradd_train_state_t *state, const char *name,
                                     const gradd_type_t *type, const void *data, bool trainable) {
    GRADD_TRY(check_new(state, name, type, trainable));
    if (type->rank == -1 && data)
        return GRADD_FAIL(TENSOR, "parameter '%s' has values, but no shape", name);
    GRADD_TRY(grow((void **)&state->parameters, state->n_parameters, &state->parameter_room,
                   sizeof state->parameters[0]));
    train_parameter_t p = {.type = *type, .trainable = trainable, .changed = true};
    if (type->rank >= 0) p.bytes = gradd_type_bytes(type);
    p.name = strdup(name);
    gradd_status_t status = p.name ? GRADD_OK : GRADD_FAIL(NOMEM, "no memory for a parameter");
    if (!status && data) status = state_make_data(&p);
    if (status) {
        free_parameter(&p);
        return status;
    }
    if (data) memcpy(p.data, data, (size_t)p.bytes);
    state->parameters[state->n_parameters++] = p;
    return GRADD_OK;
}

int gradd_train_state_count(const gradd_train_state_t *state) {
    return state->n_parameters;
}

int gradd_train_state_find(const gradd_train_state_t *state, const char *name) {
    for (int i = 0; i < state->n_parameters; i++)
        if (!strcmp(state->parameters[i].name, name)) return i;
    return -1;
}

gradd_train_parameter_t gradd_train_state_parameter(const gradd_train_state_t *state, int i) {
    const train_parameter_t *p = &state->parameters[i];
    return (gradd_train_parameter_t){
        .name = p->name,
        .type = p->type,
        .data = p->data,
        .trainable = p->trainable,
        .gradient = p->has_gradient ? p->gradient : NULL,
        .moments = {p->moments[0], p->moments[1]},
        .steps = p->steps
    };
}

gradd_status_t gradd_train_state_write(gradd_train_state_t *state, int i, const gradd_type_t *type,
                                       const void *data) {
    char expected[GRADD_TYPE_TEXT], got[GRADD_TYPE_TEXT];
    train_parameter_t *p = &state->parameters[i];
    if (!data && p->bytes)
        return GRADD_FAIL(TENSOR, "parameter '%s': the values are missing", p->name);
    if (!gradd_type_equal(type, &p->type))
        return GRADD_FAIL(TENSOR, "parameter '%s' is %s, not %s", p->name,
                          gradd_type_format(&p->type, expected), gradd_type_format(type, got));
    GRADD_TRY(state_make_data(p));
    memcpy(p->data, data, (size_t)p->bytes);
    p->changed = true;
    return GRADD_OK;
}

gradd_status_t gradd_train_state_set_moment(gradd_train_state_t *state, int i, int k,
                                            const float *data) {
    train_parameter_t *p = &state->parameters[i];
    if (k < 0 || k >= GRADD_TRAIN_MOMENTS)
        return GRADD_FAIL(TENSOR, "parameter '%s': moment %d, there are %d", p->name, k,
                          GRADD_TRAIN_MOMENTS);
    if (!p->trainable)
        return GRADD_FAIL(TENSOR, "parameter '%s' is frozen: it has no moments", p->name);
    GRADD_TRY(state_make_moment(p, k));
    if (data)
        memcpy(p->moments[k], data, (size_t)state_moment_bytes(p));
    else
        memset(p->moments[k], 0, (size_t)state_moment_bytes(p));
    return GRADD_OK;
}

void gradd_train_state_set_steps(gradd_train_state_t *state, int i, int64_t steps) {
    state->parameters[i].steps = steps;
}

gradd_train_progress_t gradd_train_state_progress(const gradd_train_state_t *state) {
    return state->progress;
}

void gradd_train_state_set_progress(gradd_train_state_t *state,
                                    const gradd_train_progress_t *progress) {
    state->progress = *progress;
}

void gradd_train_state_set_position(gradd_train_state_t *state, int64_t position) {
    state->progress.position = position;
}

void state_schedule_rate(gradd_train_state_t *state) {
    const train_course_t *c = &state->course;
    gradd_train_progress_t *p = &state->progress;
    const float left = (float)(c->total - p->step);
    const int64_t fall = c->total - c->warmup;
    const float factor = p->step < c->warmup ? (float)p->step / (float)c->warmup
                         : left > 0          ? left / (float)(fall > 1 ? fall : 1)
                                             : 0;
    p->learning_rate = p->initial_learning_rate * factor;
}

/* ---- properties ------------------------------------------------------------------------------ */

int gradd_train_state_property_count(const gradd_train_state_t *state) {
    return state->n_properties;
}

int gradd_train_state_find_property(const gradd_train_state_t *state, const char *name) {
    for (int i = 0; i < state->n_properties; i++)
        if (!strcmp(state->properties[i].name, name)) return i;
    return -1;
}

gradd_train_property_t gradd_train_state_property(const gradd_train_state_t *state, int i) {
    return state->properties[i];
}

gradd_status_t gradd_train_state_set_property(gradd_train_state_t *state,
                                              const gradd_train_property_t *property) {
    gradd_train_property_t made = {.kind = property->kind};
    if ((unsigned)made.kind > GRADD_TRAIN_TEXT)
        return GRADD_FAIL(TENSOR, "a property of kind %d", (int)made.kind);
    if (!property->name || !property->name[0]) return GRADD_FAIL(TENSOR, "a property has no name");
    GRADD_TRY(grow((void **)&state->properties, state->n_properties, &state->property_room,
                   sizeof state->properties[0]));
    made.integer = made.kind == GRADD_TRAIN_INT ? property->integer : 0;
    made.real = made.kind == GRADD_TRAIN_FLOAT ? property->real : 0;
    made.name = strdup(property->name);
    made.text = strdup(made.kind == GRADD_TRAIN_TEXT && property->text ? property->text : "");
    if (!made.name || !made.text) {
        free((char *)made.name);
        free((char *)made.text);
        return GRADD_FAIL(NOMEM, "no memory for property '%s'", property->name);
    }
    const int i = gradd_train_state_find_property(state, property->name);
    if (i >= 0) {
        free((char *)state->properties[i].name);
        free((char *)state->properties[i].text);
    }
    state->properties[i >= 0 ? i : state->n_properties++] = made;
    return GRADD_OK;
}
