/* Reading a checkpoint: see checkpoint.h for the file and flat.h for what its bytes may do.
 *
 * The numbers of the fields are their order in ONNX Runtime's schema.
 */
#include "train/files/checkpoint.h"

#include <stdlib.h>
#include <string.h>

#include "train/files/fields.h"
#include "train/files/flat.h"

/* Memory for n elements, zeroed; NULL for none. */
static gradd_status_t make_list(size_t n, size_t element_bytes, void *out_list) {
    void *list = n ? calloc(n, element_bytes) : NULL;
    if (n && !list) return GRADD_FAIL(NOMEM, "no memory for a list of %zu entries", n);
    memcpy(out_list, &list, sizeof list);
    return GRADD_OK;
}

static gradd_status_t read_name(flat_t *flat, const flat_table_t *table, int id, const char *what,
                                const char **out_name) {
    GRADD_TRY(flat_string(flat, table, id, out_name));
    if (!**out_name) return GRADD_FAIL(MODEL, "byte %zu: a %s without a name", table->at, what);
    return GRADD_OK;
}

/* ---- tensors --------------------------------------------------------------------------------- */

static gradd_status_t read_shape(flat_t *flat, const flat_table_t *table, gradd_type_t *type) {
    flat_vector_t dims;
    int32_t code = 0;
    GRADD_TRY(flat_number(flat, table, TENSOR_TYPE, sizeof code, &code));
    GRADD_TRY(gradd_dtype_check(code, &type->dtype));
    GRADD_TRY(flat_vector(flat, table, TENSOR_DIMS, sizeof(int64_t), &dims));
    if (dims.n > GRADD_MAX_RANK)
        return GRADD_FAIL(LIMIT, "%zu dimensions, expected at most %d", dims.n, GRADD_MAX_RANK);
    type->rank = (int)dims.n;
    if (dims.n) memcpy(type->dims, flat->bytes + dims.at, dims.n * sizeof(int64_t));
    return gradd_type_check(type);
}

static gradd_status_t read_values(flat_t *flat, const flat_table_t *table, bool nominal,
                                  checkpoint_tensor_t *tensor) {
    flat_vector_t values;
    int64_t elsewhere = -1;
    GRADD_TRY(flat_number(flat, table, TENSOR_ELSEWHERE, sizeof elsewhere, &elsewhere));
    if (elsewhere >= 0) return GRADD_FAIL(EXTDATA, "its values are in another file");
    GRADD_TRY(flat_vector(flat, table, TENSOR_VALUES, 1, &values));
    if (nominal && values.n == 0) {
        tensor->type = (gradd_type_t){.dtype = tensor->type.dtype};
        return GRADD_OK;
    }
    const int64_t bytes = gradd_type_bytes(&tensor->type);
    char text[GRADD_TYPE_TEXT];
    if ((uint64_t)bytes != values.n)
        return GRADD_FAIL(MODEL, "%zu bytes of values, expected %lld for %s", values.n,
                          (long long)bytes, gradd_type_format(&tensor->type, text));
    tensor->values = flat->bytes + values.at;
    return GRADD_OK;
}

static gradd_status_t read_tensor(flat_t *flat, const flat_table_t *table, bool nominal,
                                  checkpoint_tensor_t *tensor) {
    GRADD_TRY(read_name(flat, table, TENSOR_NAME, "tensor", &tensor->name));
    gradd_status_t status = read_shape(flat, table, &tensor->type);
    if (status == GRADD_OK) status = read_values(flat, table, nominal, tensor);
    return gradd_wrap(status, "tensor '%s'", tensor->name);
}

/* ---- parameters ------------------------------------------------------------------------------ */

static gradd_status_t read_parameters(flat_t *flat, const flat_vector_t *tensors,
                                      bool requires_grad, checkpoint_t *checkpoint) {
    for (size_t i = 0; i < tensors->n; i++) {
        checkpoint_parameter_t *parameter = &checkpoint->parameters[checkpoint->n_parameters];
        flat_table_t table;
        GRADD_TRY(flat_element(flat, tensors, i, &table));
        GRADD_TRY(read_tensor(flat, &table, checkpoint->is_nominal, &parameter->tensor));
        parameter->requires_grad = requires_grad;
        checkpoint->n_parameters++;
    }
    return GRADD_OK;
}

static gradd_status_t read_module(flat_t *flat, const flat_table_t *root,
                                  checkpoint_t *checkpoint) {
    flat_table_t module;
    flat_vector_t trained, frozen;
    uint8_t nominal = 0, elsewhere = 0;
    GRADD_TRY(flat_table(flat, root, ROOT_MODULE, &module));
    GRADD_TRY(flat_number(flat, &module, MODULE_NOMINAL, 1, &nominal));
    GRADD_TRY(flat_number(flat, &module, MODULE_ELSEWHERE, 1, &elsewhere));
    if (elsewhere)
        return GRADD_FAIL(EXTDATA, "the checkpoint keeps its values in a second file, which is not "
                                   "read: write it with less than 2 GB of parameters");
    GRADD_TRY(flat_vector(flat, &module, MODULE_TRAINED, sizeof(uint32_t), &trained));
    GRADD_TRY(flat_vector(flat, &module, MODULE_FROZEN, sizeof(uint32_t), &frozen));
    GRADD_TRY(
        make_list(trained.n + frozen.n, sizeof *checkpoint->parameters, &checkpoint->parameters));
    checkpoint->is_nominal = nominal != 0;
    GRADD_TRY(read_parameters(flat, &trained, true, checkpoint));
    return read_parameters(flat, &frozen, false, checkpoint);
}

/* ---- optimizer ------------------------------------------------------------------------------- */

static gradd_status_t read_moments(flat_t *flat, const flat_table_t *table,
                                   checkpoint_moments_t *state) {
    flat_vector_t moments;
    GRADD_TRY(read_name(flat, table, STATE_PARAMETER, "state of a parameter", &state->parameter));
    GRADD_TRY(flat_vector(flat, table, STATE_MOMENTS, sizeof(uint32_t), &moments));
    if (moments.n > CHECKPOINT_MOMENTS)
        return GRADD_FAIL(UNSUPPORTED, "parameter '%s' has %zu moments, expected at most %d",
                          state->parameter, moments.n, CHECKPOINT_MOMENTS);
    for (size_t i = 0; i < moments.n; i++) {
        flat_table_t moment;
        gradd_status_t status = flat_element(flat, &moments, i, &moment);
        if (status == GRADD_OK) status = read_tensor(flat, &moment, false, &state->moments[i]);
        if (status != GRADD_OK) return gradd_wrap(status, "parameter '%s'", state->parameter);
        state->n_moments++;
    }
    return GRADD_OK;
}

static gradd_status_t read_group(flat_t *flat, const flat_table_t *table,
                                 checkpoint_group_t *group) {
    flat_vector_t states;
    GRADD_TRY(read_name(flat, table, GROUP_NAME, "group of the optimizer", &group->name));
    GRADD_TRY(flat_number(flat, table, GROUP_STEP, sizeof group->step, &group->step));
    GRADD_TRY(flat_number(flat, table, GROUP_RATE, sizeof(float), &group->initial_learning_rate));
    if (group->step < 0)
        return GRADD_FAIL(MODEL, "group '%s': step %lld, expected 0 or more", group->name,
                          (long long)group->step);
    GRADD_TRY(flat_vector(flat, table, GROUP_STATES, sizeof(uint32_t), &states));
    GRADD_TRY(make_list(states.n, sizeof *group->states, &group->states));
    for (size_t i = 0; i < states.n; i++) {
        flat_table_t state;
        GRADD_TRY(flat_element(flat, &states, i, &state));
        GRADD_TRY(read_moments(flat, &state, &group->states[i]));
        group->n_states++;
    }
    return GRADD_OK;
}

static gradd_status_t read_groups(flat_t *flat, const flat_table_t *root,
                                  checkpoint_t *checkpoint) {
    flat_vector_t groups;
    GRADD_TRY(flat_vector(flat, root, ROOT_GROUPS, sizeof(uint32_t), &groups));
    GRADD_TRY(make_list(groups.n, sizeof *checkpoint->groups, &checkpoint->groups));
    for (size_t i = 0; i < groups.n; i++) {
        flat_table_t table;
        GRADD_TRY(flat_element(flat, &groups, i, &table));
        checkpoint->n_groups++; /* also if reading it fails: its list is to be freed */
        GRADD_TRY(read_group(flat, &table, &checkpoint->groups[i]));
    }
    return GRADD_OK;
}

/* ---- properties ------------------------------------------------------------------------------ */

static gradd_status_t read_property(flat_t *flat, const flat_table_t *table,
                                    checkpoint_property_t *property) {
    GRADD_TRY(read_name(flat, table, PROPERTY_NAME, "property", &property->name));
    switch (property->kind) {
    case CHECKPOINT_INT:
        return flat_number(flat, table, PROPERTY_VALUE, sizeof(int64_t), &property->integer);
    case CHECKPOINT_FLOAT:
        return flat_number(flat, table, PROPERTY_VALUE, sizeof(float), &property->real);
    case CHECKPOINT_STRING:
        return flat_string(flat, table, PROPERTY_VALUE, &property->text);
    }
    return GRADD_OK;
}

static gradd_status_t read_properties(flat_t *flat, const flat_table_t *root,
                                      checkpoint_t *checkpoint) {
    flat_table_t bag;
    flat_vector_t lists[CHECKPOINT_STRING + 1];
    size_t n = 0;
    if (!flat_has(flat, root, ROOT_PROPERTIES)) return GRADD_OK;
    GRADD_TRY(flat_table(flat, root, ROOT_PROPERTIES, &bag));
    for (int kind = CHECKPOINT_INT; kind <= CHECKPOINT_STRING; kind++) {
        GRADD_TRY(flat_vector(flat, &bag, kind, sizeof(uint32_t), &lists[kind]));
        n += lists[kind].n;
    }
    GRADD_TRY(make_list(n, sizeof *checkpoint->properties, &checkpoint->properties));
    for (int kind = CHECKPOINT_INT; kind <= CHECKPOINT_STRING; kind++)
        for (size_t i = 0; i < lists[kind].n; i++) {
            checkpoint_property_t *property = &checkpoint->properties[checkpoint->n_properties];
            flat_table_t table;
            property->kind = (checkpoint_kind_t)kind;
            GRADD_TRY(flat_element(flat, &lists[kind], i, &table));
            GRADD_TRY(read_property(flat, &table, property));
            checkpoint->n_properties++;
        }
    return GRADD_OK;
}

/* ---- names ----------------------------------------------------------------------------------- */

static int compare_names(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Fails if a name stands twice among n records of `stride` bytes that begin with their name. */
static gradd_status_t check_once(const char *what, const void *records, size_t n, size_t stride) {
    const char **names = NULL;
    gradd_status_t status = GRADD_OK;
    GRADD_TRY(make_list(n, sizeof *names, &names));
    for (size_t i = 0; i < n; i++)
        memcpy(&names[i], (const char *)records + i * stride, sizeof *names);
    if (n) qsort(names, n, sizeof *names, compare_names);
    for (size_t i = 1; i < n && status == GRADD_OK; i++)
        if (strcmp(names[i - 1], names[i]) == 0)
            status = GRADD_FAIL(MODEL, "%s '%s' is there twice", what, names[i]);
    free(names);
    return status;
}

static gradd_status_t check_names(const checkpoint_t *checkpoint) {
    GRADD_TRY(check_once("parameter", checkpoint->parameters, (size_t)checkpoint->n_parameters,
                         sizeof *checkpoint->parameters));
    GRADD_TRY(check_once("group", checkpoint->groups, (size_t)checkpoint->n_groups,
                         sizeof *checkpoint->groups));
    for (int i = 0; i < checkpoint->n_groups; i++)
        GRADD_TRY(check_once("the state of parameter", checkpoint->groups[i].states,
                             (size_t)checkpoint->groups[i].n_states,
                             sizeof *checkpoint->groups[i].states));
    return check_once("property", checkpoint->properties, (size_t)checkpoint->n_properties,
                      sizeof *checkpoint->properties);
}

/* ---- the file -------------------------------------------------------------------------------- */

static gradd_status_t read_all(flat_t *flat, checkpoint_t *checkpoint) {
    flat_table_t root;
    int32_t version = 0;
    GRADD_TRY(flat_root(flat, &root));
    GRADD_TRY(flat_number(flat, &root, ROOT_VERSION, sizeof version, &version));
    if (version < CHECKPOINT_OLDEST || version > CHECKPOINT_VERSION)
        return GRADD_FAIL(VERSION, "version %d of the format, expected %d to %d", (int)version,
                          CHECKPOINT_OLDEST, CHECKPOINT_VERSION);
    GRADD_TRY(read_module(flat, &root, checkpoint));
    GRADD_TRY(read_groups(flat, &root, checkpoint));
    GRADD_TRY(read_properties(flat, &root, checkpoint));
    return check_names(checkpoint);
}

gradd_status_t checkpoint_read(const void *bytes, size_t n, checkpoint_t *out_checkpoint) {
    flat_t flat;
    checkpoint_t checkpoint = {0};
    gradd_status_t status = flat_open(&flat, bytes, n, CHECKPOINT_IDENTIFIER);
    if (status == GRADD_OK) status = read_all(&flat, &checkpoint);
    if (status != GRADD_OK) {
        checkpoint_finish(&checkpoint);
        return gradd_wrap(status, "checkpoint");
    }
    *out_checkpoint = checkpoint;
    return GRADD_OK;
}

void checkpoint_finish(checkpoint_t *checkpoint) {
    if (!checkpoint) return;
    for (int i = 0; i < checkpoint->n_groups; i++)
        free(checkpoint->groups[i].states);
    free(checkpoint->groups);
    free(checkpoint->parameters);
    free(checkpoint->properties);
    *checkpoint = (checkpoint_t){0};
}
