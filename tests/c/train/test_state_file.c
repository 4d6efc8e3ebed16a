/* Tests of train/files/state_file: a state goes to a checkpoint and comes back. */
#include "tests/test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "train/gradd_train.h"

static const float three[] = {1, -2, 3};
static const gradd_type_t vector = {.dtype = GRADD_DT_F32, .rank = 1, .dims = {3}};

static const char *path_of(const char *name) {
    static char path[64];
    snprintf(path, sizeof path, "/tmp/gradd-%ld-%s", (long)getpid(), name);
    return path;
}

static gradd_train_state_t *make_state(void) {
    static const int64_t whole[] = {7, 8, 9};
    const gradd_type_t integers = {.dtype = GRADD_DT_I64, .rank = 1, .dims = {3}};
    gradd_train_state_t *state;
    CHECK_OK(gradd_train_state_create(&state));
    CHECK_OK(gradd_train_state_add(state, "table", &integers, whole, false));
    CHECK_OK(gradd_train_state_add(state, "w", &vector, three, true));
    CHECK_OK(gradd_train_state_add(state, "late", &vector, three, true));
    CHECK_OK(gradd_train_state_add(state, "b", &vector, three, true));
    return state;
}

static gradd_train_state_t *there_and_back(gradd_train_state_t *state, bool with_optimizer) {
    const char *path = path_of("checkpoint");
    gradd_train_state_t *read;
    CHECK_OK(gradd_train_state_save(state, path, with_optimizer));
    CHECK_OK(gradd_train_state_load(path, &read));
    unlink(path);
    gradd_train_state_destroy(state);
    return read;
}

static gradd_train_parameter_t parameter(const gradd_train_state_t *state, const char *name) {
    const int i = gradd_train_state_find(state, name);
    CHECK(i >= 0);
    return gradd_train_state_parameter(state, i);
}

TEST(parameters_and_properties) {
    gradd_train_state_t *state = make_state();
    const gradd_train_property_t properties[] = {
        {.name = "epoch", .kind = GRADD_TRAIN_INT,   .integer = -5   },
        {.name = "rate",  .kind = GRADD_TRAIN_FLOAT, .real = 0.5f    },
        {.name = "note",  .kind = GRADD_TRAIN_TEXT,  .text = "a text"},
    };
    for (int i = 0; i < 3; i++)
        CHECK_OK(gradd_train_state_set_property(state, &properties[i]));
    state = there_and_back(state, false);
    CHECK_EQ_INT(gradd_train_state_count(state), 4);
    CHECK(!parameter(state, "table").trainable);
    CHECK_EQ_INT(((const int64_t *)parameter(state, "table").data)[2], 9);
    CHECK(parameter(state, "w").trainable);
    const gradd_type_t type = parameter(state, "w").type;
    CHECK(gradd_type_equal(&type, &vector));
    CHECK(memcmp(parameter(state, "w").data, three, sizeof three) == 0);
    CHECK(!parameter(state, "w").moments[0]);
    CHECK_EQ_INT(gradd_train_state_property_count(state), 3);
    for (int i = 0; i < 3; i++) {
        const int at = gradd_train_state_find_property(state, properties[i].name);
        CHECK(at >= 0);
        const gradd_train_property_t got = gradd_train_state_property(state, at);
        CHECK_EQ_INT(got.kind, properties[i].kind);
        CHECK_EQ_INT(got.integer, properties[i].integer);
        CHECK(got.real == properties[i].real);
        CHECK_EQ_STR(got.text, properties[i].text ? properties[i].text : "");
    }
    gradd_train_state_destroy(state);
}

static void set_moments(gradd_train_state_t *state, const char *name, int n, int64_t steps) {
    static const float moments[2][3] = {
        {0.5, 0.25, 0},
        {4,   5,    6}
    };
    const int i = gradd_train_state_find(state, name);
    for (int k = 0; k < n; k++)
        CHECK_OK(gradd_train_state_set_moment(state, i, k, moments[k]));
    gradd_train_state_set_steps(state, i, steps);
}

TEST(the_optimizer_with_a_count_of_steps_for_each_parameter) {
    gradd_train_state_t *state = make_state();
    const gradd_train_progress_t progress = {9, 0.125f, 0.25f, 12345};
    gradd_train_state_set_progress(state, &progress);
    set_moments(state, "w", 2, 9);
    set_moments(state, "late", 2, 4);
    set_moments(state, "b", 1, 9);
    state = there_and_back(state, true);
    CHECK_EQ_INT(gradd_train_state_progress(state).step, 9);
    CHECK_EQ_INT(gradd_train_state_progress(state).position, 12345);
    CHECK_EQ_INT(gradd_train_state_property_count(state), 0); /* which is how the file has it */
    CHECK(gradd_train_state_progress(state).initial_learning_rate == 0.25f);
    CHECK(gradd_train_state_progress(state).learning_rate == 0.25f); /* the file has one rate */
    CHECK_EQ_INT(parameter(state, "w").steps, 9);
    CHECK_EQ_INT(parameter(state, "late").steps, 4);
    CHECK(parameter(state, "late").moments[1][2] == 6);
    CHECK(parameter(state, "b").moments[0][1] == 0.25f && !parameter(state, "b").moments[1]);
    CHECK_EQ_INT(parameter(state, "b").steps, 9);
    state = there_and_back(state, false);
    CHECK_EQ_INT(gradd_train_state_progress(state).step, 0);
    CHECK(!parameter(state, "w").moments[0]);
    gradd_train_state_destroy(state);
}

TEST(a_nominal_state) {
    gradd_train_state_t *state;
    CHECK_OK(gradd_train_state_create(&state));
    CHECK_OK(gradd_train_state_add(state, "w", &vector, NULL, true));
    state = there_and_back(state, false);
    CHECK(!parameter(state, "w").data);
    CHECK_EQ_INT(parameter(state, "w").type.dtype, GRADD_DT_F32);
    CHECK_EQ_INT(parameter(state, "w").type.rank, -1); /* the model knows */
    CHECK_OK(gradd_train_state_add(state, "b", &vector, three, true));
    CHECK_STATUS(GRADD_E_TENSOR, gradd_train_state_save(state, path_of("mixed"), false));
    CHECK_ERROR_HAS("parameter 'w' has no values, others have");
    gradd_train_state_destroy(state);
}

TEST(errors_name_the_path) {
    gradd_train_state_t *state;
    CHECK_STATUS(GRADD_E_IO, gradd_train_state_load("/nowhere/checkpoint", &state));
    CHECK_ERROR_HAS("/nowhere/checkpoint");
    const char *path = path_of("text");
    FILE *file = fopen(path, "w");
    CHECK(file && fputs("no checkpoint at all", file) >= 0 && fclose(file) == 0);
    CHECK_STATUS(GRADD_E_MODEL, gradd_train_state_load(path, &state));
    CHECK_ERROR_HAS(path);
    CHECK_ERROR_HAS("checkpoint: the file is not of kind ODTC");
    unlink(path);
}

TEST(more_elements_than_moments_have_bytes_are_refused) {
    gradd_train_state_t *state;
    gradd_type_t type = {
        .dtype = GRADD_DT_BOOL, .rank = 2, .dims = {INT64_C(1) << 31, INT64_C(1) << 31}
    };
    CHECK_OK(gradd_train_state_create(&state));
    CHECK_STATUS(GRADD_E_LIMIT, gradd_train_state_add(state, "w", &type, NULL, false));
    CHECK_ERROR_HAS("'w' has 4611686018427387904 elements");
    type.dims[0] = INT64_C(1) << 29;
    CHECK_OK(gradd_train_state_add(state, "w", &type, NULL, false)); /* it has no memory yet */
    gradd_train_state_destroy(state);
}
