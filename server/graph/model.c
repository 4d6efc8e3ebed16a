/* The part of gradd.h that concerns models. Plans are in plan/plan.c, runs in exec/run.c. */
#include "server/api/gradd.h"

#include <string.h>

#include "server/graph/arena.h"
#include "server/graph/model.h"

const char *gradd_version(void) {
    return "0.1.0";
}

gradd_status_t gradd_model_load(const void *bytes, size_t n, gradd_model_t **out_model) {
    return model_load(bytes, n, NULL, out_model);
}

void gradd_model_destroy(gradd_model_t *model) {
    model_destroy(model);
}

int64_t gradd_model_bytes(const gradd_model_t *model) {
    return (int64_t)arena_used(model->arena);
}

int gradd_model_n_inputs(const gradd_model_t *model) {
    return model->n_inputs;
}

int gradd_model_n_outputs(const gradd_model_t *model) {
    return model->n_outputs;
}

const char *gradd_model_input_name(const gradd_model_t *model, int i) {
    return model->values[model->inputs[i]].name;
}

const char *gradd_model_output_name(const gradd_model_t *model, int i) {
    return model->values[model->outputs[i]].name;
}

static gradd_type_t declared_type(const model_value_t *v) {
    gradd_type_t type = {.dtype = v->dtype, .rank = v->rank};
    memcpy(type.dims, v->dims, sizeof type.dims);
    return type;
}

gradd_type_t gradd_model_input_type(const gradd_model_t *model, int i) {
    return declared_type(&model->values[model->inputs[i]]);
}

gradd_type_t gradd_model_output_type(const gradd_model_t *model, int i) {
    return declared_type(&model->declared[i]);
}

const char *gradd_model_input_symbol(const gradd_model_t *model, int i, int dim) {
    const model_value_t *v = &model->values[model->inputs[i]];
    return v->symbols ? v->symbols[dim] : "";
}

const char *gradd_model_output_symbol(const gradd_model_t *model, int i, int dim) {
    const model_value_t *v = &model->declared[i];
    return v->symbols ? v->symbols[dim] : "";
}

bool gradd_model_is_random(const gradd_model_t *model) {
    return model->random;
}

gradd_dtype_t gradd_model_half(const gradd_model_t *model) {
    return model->half;
}

const uint8_t *gradd_model_reach(const gradd_model_t *model, int i, size_t *out_bytes) {
    *out_bytes = model->reach_bytes;
    return model->reach + (size_t)i * model->reach_bytes;
}

int gradd_model_n_unsupported(const gradd_model_t *model) {
    return model->n_unsupported;
}

void gradd_model_unsupported(const gradd_model_t *model, int i, const char **out_node,
                             const char **out_op, const char **out_domain) {
    const model_node_t *n = &model->nodes[model->unsupported[i]];
    *out_node = n->name;
    *out_op = n->op_type;
    *out_domain = n->domain;
}
