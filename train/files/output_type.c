/* The type of a value inside a model, found by compiling the model up to it for two sizes of the
 * inputs: a dimension that is the same in both does not follow them. See export.h.
 */
#include <stdlib.h>
#include <string.h>

#include "server/api/gradd.h"
#include "server/graph/model.h"
#include "train/files/export.h"
#include "train/session.h"

enum { MOST_TRIES = 32 };

static const int64_t sizes[] = {2, 3}; /* of dynamic dimensions */

/* What dynamic dimensions are taken for: `rows` the first of an input, `more` the others. */
typedef struct guess_s {
    int64_t rows, more;
} guess_t;

static gradd_status_t fill_inputs(const gradd_model_t *model, const gradd_train_state_t *state,
                                  guess_t guess, gradd_type_t *types) {
    for (int i = 0; i < gradd_model_n_inputs(model); i++) {
        const int parameter = gradd_train_state_find(state, gradd_model_input_name(model, i));
        types[i] = parameter >= 0 ? gradd_train_state_parameter(state, parameter).type
                                  : gradd_model_input_type(model, i);
        if (types[i].rank < 0)
            return GRADD_FAIL(TENSOR, "input '%s' has no declared shape",
                              gradd_model_input_name(model, i));
        for (int d = 0; d < types[i].rank; d++)
            if (types[i].dims[d] < 0) types[i].dims[d] = d ? guess.more : guess.rows;
    }
    return GRADD_OK;
}

static gradd_status_t type_at(gradd_model_t *model, const export_source_t *source, guess_t guess,
                              gradd_type_t *out_type) {
    const int n = gradd_model_n_inputs(model);
    const int32_t output = gradd_model_n_outputs(model) - 1;
    gradd_type_t *types = calloc((size_t)n + 1, sizeof types[0]);
    gradd_plan_t *plan = NULL;
    if (!types) return GRADD_FAIL(NOMEM, "no memory for the types of the inputs");
    gradd_status_t status = fill_inputs(model, source->state, guess, types);
    const gradd_plan_options_t options = {.inputs = types,
                                          .n_inputs = n,
                                          .outputs = &output,
                                          .n_outputs = 1,
                                          .device = source->device};
    if (!status) status = gradd_plan_create(model, &options, &plan);
    if (!status) *out_type = gradd_plan_info(plan)->outputs[0];
    gradd_plan_destroy(plan);
    free(types);
    return status;
}

/* Types for two sizes; `more` 0 = dimensions behind the first one have these sizes as well. */
static gradd_status_t types_at(gradd_model_t *model, const export_source_t *source, int64_t more,
                               gradd_type_t *types) {
    for (int k = 0; k < 2; k++) {
        const guess_t guess = {sizes[k], more ? more : sizes[k]};
        GRADD_TRY(type_at(model, source, guess, &types[k]));
    }
    return GRADD_OK;
}

/* A model may declare a dimension that it takes in one size alone, that of a weight. Tries the
 * sizes of the parameters; the error is that of the first try. */
static gradd_status_t find_types(gradd_model_t *model, const export_source_t *source,
                                 gradd_type_t *types) {
    const gradd_status_t first = types_at(model, source, 0, types);
    int64_t last = 0;
    if (!first || first == GRADD_E_NOMEM) return first;
    const gradd_failure_t failure = *gradd_failure();
    for (int i = 0, tries = 0; i < gradd_train_state_count(source->state); i++) {
        const gradd_type_t type = gradd_train_state_parameter(source->state, i).type;
        for (int d = 0; d < type.rank && tries < MOST_TRIES; d++) {
            if (type.dims[d] == last) continue;
            last = type.dims[d], tries++;
            if (!types_at(model, source, last, types)) return GRADD_OK;
        }
    }
    gradd_failure_restore(&failure);
    return first;
}

/* Makes the value the model's last output, and leaves out what it does not need. */
static gradd_status_t end_at(model_t *model, const char *name) {
    bool *needed = calloc((size_t)model->n_values + 1, sizeof needed[0]);
    int32_t value = -1;
    if (!needed) return GRADD_FAIL(NOMEM, "no memory for the values of the model");
    for (int i = 0; i < model->n_values; i++)
        if (strcmp(model->values[i].name, name) == 0) value = i;
    gradd_status_t status =
        value >= 0 ? model_add_outputs(model, &value, 1) : GRADD_FAIL(TENSOR, "it is not there");
    if (!status) {
        needed[value] = true;
        model_mark_needed(model, needed);
        model_drop_nodes(model, needed);
    }
    free(needed);
    return status;
}

gradd_status_t export_output_type(const export_source_t *source, const char *name,
                                  gradd_type_t *out_type) {
    gradd_model_t *model = NULL;
    gradd_type_t types[2];
    GRADD_TRY(gradd_model_load(source->model, source->n, &model));
    side_trim_norms(model);
    gradd_status_t status = end_at(model, name);
    if (!status) status = find_types(model, source, types);
    gradd_model_destroy(model);
    if (status) return status;
    for (int d = 0; d < types[0].rank; d++)
        if (types[0].dims[d] != types[1].dims[d]) types[0].dims[d] = -1;
    *out_type = types[0];
    return GRADD_OK;
}
