/* libFuzzer target: any bytes as a checkpoint. What loads is walked, written and read again: a
 * second writing must give the same bytes as the first.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/target.h"
#include "train/files/checkpoint.h"

static volatile uint8_t sink;

static void touch(const void *bytes, size_t n) {
    for (size_t i = 0; i < n; i++)
        sink ^= ((const uint8_t *)bytes)[i];
}

static void check_tensor(const checkpoint_tensor_t *tensor, bool nominal) {
    REQUIRE(tensor->name[0]);
    touch(tensor->name, strlen(tensor->name));
    REQUIRE(gradd_type_check(&tensor->type) == GRADD_OK);
    REQUIRE(tensor->values || nominal);
    if (tensor->values) touch(tensor->values, (size_t)gradd_type_bytes(&tensor->type));
}

static void check_groups(const checkpoint_t *read) {
    for (int i = 0; i < read->n_groups; i++) {
        const checkpoint_group_t *group = &read->groups[i];
        REQUIRE(group->name[0] && group->step >= 0);
        for (int k = 0; k < group->n_states; k++) {
            REQUIRE(group->states[k].parameter[0]);
            for (int m = 0; m < group->states[k].n_moments; m++)
                check_tensor(&group->states[k].moments[m], false);
        }
    }
}

static void check(const checkpoint_t *read) {
    for (int i = 0; i < read->n_parameters; i++)
        check_tensor(&read->parameters[i].tensor, read->is_nominal);
    check_groups(read);
    for (int i = 0; i < read->n_properties; i++) {
        const checkpoint_property_t *property = &read->properties[i];
        REQUIRE(property->name[0]);
        REQUIRE((property->kind == CHECKPOINT_STRING) == (property->text != NULL));
        if (property->text) touch(property->text, strlen(property->text));
    }
}

/* The whole file, to be freed. */
static uint8_t *write_file(const checkpoint_t *checkpoint, size_t *out_n) {
    checkpoint_file_t file;
    size_t n = 0;
    REQUIRE(checkpoint_write(checkpoint, &file) == GRADD_OK);
    for (int i = 0; i < file.n_parts; i++)
        n += file.parts[i].n;
    uint8_t *bytes = malloc(n);
    REQUIRE(bytes);
    *out_n = 0;
    for (int i = 0; i < file.n_parts; i++) {
        if (file.parts[i].n) memcpy(bytes + *out_n, file.parts[i].data, file.parts[i].n);
        *out_n += file.parts[i].n;
    }
    checkpoint_file_finish(&file);
    return bytes;
}

static void write_again(const checkpoint_t *read) {
    checkpoint_t second;
    size_t n, n_again;
    uint8_t *bytes = write_file(read, &n);
    REQUIRE(checkpoint_read(bytes, n, &second) == GRADD_OK);
    uint8_t *again = write_file(&second, &n_again);
    REQUIRE(n == n_again && memcmp(bytes, again, n) == 0);
    checkpoint_finish(&second);
    free(again);
    free(bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    checkpoint_t read;
    gradd_error_set("");
    const gradd_status_t status = checkpoint_read(data, n, &read);
    REQUIRE(status == GRADD_OK || gradd_error_message()[0]);
    REQUIRE(status != GRADD_E_NOMEM && status != GRADD_E_INTERNAL);
    if (status != GRADD_OK) return 0;
    check(&read);
    write_again(&read);
    checkpoint_finish(&read);
    return 0;
}

static void write_seed(const char *folder, int i, const checkpoint_t *checkpoint) {
    char path[4096];
    size_t n;
    uint8_t *bytes = write_file(checkpoint, &n);
    snprintf(path, sizeof path, "%s/seed_%d", folder, i);
    FILE *file = fopen(path, "wb");
    REQUIRE(file && fwrite(bytes, 1, n, file) == n && fclose(file) == 0);
    free(bytes);
}

static void write_seeds(const char *folder) {
    static const float values[] = {1, 2, 3, 4, 5, 6};
    const gradd_type_t matrix = {
        .dtype = GRADD_DT_F32, .rank = 2, .dims = {2, 3}
    };
    const gradd_type_t scalar = {.dtype = GRADD_DT_I64};
    checkpoint_parameter_t parameters[] = {
        {{"fc.weight", matrix, values}, true },
        {{"step", scalar, values},      false},
    };
    checkpoint_moments_t states[] = {
        {"fc.weight", {{"momentum0", matrix, values}, {"momentum1", matrix, values}}, 2},
    };
    checkpoint_group_t group = {"group0", 7, 1e-3f, states, 1};
    checkpoint_property_t properties[] = {
        {.name = "epoch", .kind = CHECKPOINT_INT,    .integer = 3  },
        {.name = "loss",  .kind = CHECKPOINT_FLOAT,  .real = 0.5f  },
        {.name = "note",  .kind = CHECKPOINT_STRING, .text = "text"},
    };
    checkpoint_t made = {.parameters = parameters, .n_parameters = 2};
    write_seed(folder, 0, &made);
    made.is_nominal = true;
    write_seed(folder, 1, &made);
    made = (checkpoint_t){.parameters = parameters,
                          .n_parameters = 2,
                          .groups = &group,
                          .n_groups = 1,
                          .properties = properties,
                          .n_properties = 3};
    write_seed(folder, 2, &made);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    const char *folder = getenv("GRADD_FUZZ_SEEDS");
    if (!folder) return 0;
    write_seeds(folder);
    exit(0);
}
