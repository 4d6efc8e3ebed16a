/* One model of a session: which inputs are parameters, which are the caller's, which outputs are
 * shown, and which are running statistics. See session.h.
 */
#include <stdlib.h>
#include <string.h>

#include "server/graph/model.h"
#include "train/session.h"

/* Outputs of ONNX Runtime's training models that add up gradients. */
#define ACCUMULATED ".accumulation.out"

static gradd_status_t no_memory(void) {
    return GRADD_FAIL(NOMEM, "no memory for a training session");
}

static bool ends_with(const char *text, const char *end) {
    const size_t n = strlen(text), m = strlen(end);
    return n >= m && !strcmp(text + n - m, end);
}

/* ---- what the outputs need ------------------------------------------------------------------- */

/* Which values the outputs need that are shown, or those that are not. */
static bool *needed_by(const model_t *m, bool shown) {
    bool *needed = calloc((size_t)m->n_values + 1, sizeof needed[0]);
    if (!needed) return NULL;
    for (int j = 0; j < m->n_outputs; j++)
        if (ends_with(m->values[m->outputs[j]].name, ACCUMULATED) != shown)
            needed[m->outputs[j]] = true;
    model_mark_needed(m, needed);
    return needed;
}

/* ---- inputs ---------------------------------------------------------------------------------- */

/* Whether values of the type can be given to an input that is declared so. */
static bool fits(const model_value_t *declared, const gradd_type_t *type) {
    if (declared->dtype != GRADD_DT_NONE && declared->dtype != type->dtype) return false;
    if (declared->rank < 0) return true;
    bool same = declared->rank == type->rank;
    for (int d = 0; same && d < type->rank; d++)
        same = declared->dims[d] < 0 || declared->dims[d] == type->dims[d];
    return same;
}

static gradd_status_t check_parameter(const model_value_t *declared, const train_parameter_t *p) {
    char given[GRADD_TYPE_TEXT], expected[GRADD_TYPE_TEXT];
    gradd_type_t type = {.dtype = declared->dtype, .rank = declared->rank};
    memcpy(type.dims, declared->dims, sizeof type.dims);
    if (fits(declared, &p->type)) return GRADD_OK;
    return GRADD_FAIL(TENSOR, "parameter '%s' is %s, but the model declares %s", p->name,
                      gradd_type_format(&p->type, given), gradd_type_format(&type, expected));
}

/* A parameter of a nominal checkpoint gets the shape that the model declares. */
static gradd_status_t find_shape(const model_value_t *declared, train_parameter_t *p) {
    gradd_type_t type = {.dtype = p->type.dtype, .rank = declared->rank};
    bool known = declared->rank >= 0;
    if (p->type.rank >= 0) return GRADD_OK;
    for (int d = 0; known && d < declared->rank; d++) {
        type.dims[d] = declared->dims[d];
        known = type.dims[d] >= 0;
    }
    if (!known)
        return GRADD_FAIL(TENSOR,
                          "parameter '%s' has no values, and the model does not say its "
                          "shape",
                          p->name);
    GRADD_TRY(state_check_type(&type, p->name));
    p->type = type;
    p->bytes = gradd_type_bytes(&type);
    return GRADD_OK;
}

static gradd_status_t sort_inputs(gradd_train_state_t *state, train_side_t *side, const bool *shown,
                                  const bool *hidden) {
    const model_t *m = side->model;
    for (int i = 0; i < m->n_inputs; i++) {
        const model_value_t *v = &m->values[m->inputs[i]];
        const int parameter = gradd_train_state_find(state, v->name);
        side->origin[i] = INPUT_USER;
        if (parameter >= 0) {
            GRADD_TRY(find_shape(v, &state->parameters[parameter]));
            GRADD_TRY(check_parameter(v, &state->parameters[parameter]));
            side->origin[i] = parameter;
        } else if (hidden[m->inputs[i]] && !shown[m->inputs[i]]) {
            side->origin[i] = INPUT_HIDDEN;
        } else {
            side->user[side->n_user++] = i;
        }
    }
    return GRADD_OK;
}

/* ---- outputs and running statistics ---------------------------------------------------------- */

static void show_outputs(train_side_t *side) {
    const model_t *m = side->model;
    for (int j = 0; j < m->n_outputs; j++)
        if (!ends_with(m->values[m->outputs[j]].name, ACCUMULATED))
            side->outputs[side->n_outputs++] = j;
    side->n_shown = side->n_outputs;
}

static int input_of(const model_t *m, int32_t value) {
    for (int i = 0; i < m->n_inputs; i++)
        if (m->inputs[i] == value) return i;
    return -1;
}

static bool has_mode(const model_node_t *n) {
    const gradd_attr_t *training = gradd_attr_find(n->attrs, "training_mode");
    return training && training->i;
}

static bool has_statistics(const model_node_t *n) {
    const bool is_norm = !strcmp(n->op_type, "BatchNormalization");
    const bool is_old = is_norm && n->opset < 14 && n->n_out > 1; /* it had no attribute */
    return (is_norm || !strcmp(n->op_type, "BatchNormInternal")) && (has_mode(n) || is_old) &&
           n->n_in >= 5;
}

/* The parameter that result j of a batch norm is the new value of; -1 = none. */
static int parameter_of(const train_side_t *side, const model_node_t *n, int j) {
    const bool is_made = j < n->n_out && n->out[j] >= 0;
    const int input = is_made ? input_of(side->model, n->in[2 + j]) : -1;
    return input >= 0 && side->origin[input] >= 0 ? side->origin[input] : -1;
}

bool side_writes(const train_side_t *side, int parameter) {
    for (int k = 0; k < side->n_statistics; k++)
        if (side->statistics[k].parameter == parameter) return true;
    return false;
}

static gradd_status_t add_statistic(train_side_t *side, const model_node_t *n, int j,
                                    int32_t *values) {
    const int parameter = parameter_of(side, n, j);
    if (parameter < 0) return GRADD_OK;
    if (side_writes(side, parameter))
        return GRADD_FAIL(GRAPH, "node '%s': another node writes the same running statistics",
                          n->name);
    const int k = side->n_statistics++;
    values[k] = n->out[j];
    side->statistics[k] = (train_statistic_t){side->n_shown + k, parameter};
    return GRADD_OK;
}

/* Batch norms of a training model give the new statistics as results, which become outputs. */
static gradd_status_t find_statistics(train_side_t *side) {
    model_t *m = side->model;
    gradd_status_t status = GRADD_OK;
    const size_t room = 2 * (size_t)m->n_nodes + 1;
    int32_t *values = calloc(room, sizeof values[0]);
    side->statistics = calloc(room, sizeof side->statistics[0]);
    if (!values || !side->statistics) status = no_memory();
    for (int k = 0; k < m->n_nodes && !status; k++)
        for (int j = 1; j <= 2 && !status; j++)
            if (has_statistics(&m->nodes[k])) status = add_statistic(side, &m->nodes[k], j, values);
    const int first = m->n_outputs;
    if (!status) status = model_add_outputs(m, values, side->n_statistics);
    free(values);
    for (int k = 0; k < side->n_statistics && !status; k++)
        side->outputs[side->n_outputs++] = first + k;
    return status;
}

/* ONNX Runtime's eval models still ask batch norms for the statistics that only a training has. */
void side_trim_norms(model_t *m) {
    for (int k = 0; k < m->n_nodes; k++) {
        model_node_t *n = &m->nodes[k];
        if (!strcmp(n->op_type, "BatchNormalization") && !has_mode(n) && n->n_out > 1) n->n_out = 1;
    }
}

/* ---- the side -------------------------------------------------------------------------------- */

static gradd_status_t make_lists(train_side_t *side) {
    const model_t *m = side->model;
    const size_t n_in = (size_t)m->n_inputs + 1;
    side->origin = calloc(n_in, sizeof side->origin[0]);
    side->user = calloc(n_in, sizeof side->user[0]);
    side->inputs = calloc(n_in, sizeof side->inputs[0]);
    side->outputs =
        calloc((size_t)m->n_outputs + 2 * (size_t)m->n_nodes + 1, sizeof side->outputs[0]);
    return side->origin && side->user && side->inputs && side->outputs ? GRADD_OK : no_memory();
}

static gradd_status_t fill_lists(gradd_train_state_t *state, train_side_t *side) {
    bool *shown = needed_by(side->model, true), *hidden = needed_by(side->model, false);
    gradd_status_t status = shown && hidden ? GRADD_OK : no_memory();
    if (!status) status = sort_inputs(state, side, shown, hidden);
    if (!status) model_drop_nodes(side->model, shown);
    free(shown);
    free(hidden);
    if (!status) show_outputs(side);
    return status;
}

gradd_status_t side_open(gradd_train_session_t *s, gradd_train_phase_t phase, const void *bytes,
                         size_t n) {
    train_side_t *side = &s->sides[phase];
    GRADD_TRY(gradd_model_load(bytes, n, &side->model));
    if (phase == GRADD_TRAIN_EVAL) side_trim_norms(side->model);
    GRADD_TRY(make_lists(side));
    side->shapes = calloc((size_t)s->options.max_plans, sizeof side->shapes[0]);
    if (!side->shapes) return no_memory();
    GRADD_TRY(fill_lists(s->state, side));
    if (!side->n_shown) return GRADD_FAIL(GRAPH, "the model has no output that is shown");
    return phase == GRADD_TRAIN_TRAINING ? find_statistics(side) : GRADD_OK;
}

void side_close(train_side_t *side) {
    shapes_drop(side);
    gradd_model_destroy(side->model);
    free(side->origin);
    free(side->user);
    free(side->inputs);
    free(side->outputs);
    free(side->statistics);
    free(side->shapes);
    *side = (train_side_t){0};
}
