/* Types, overlaps and counts of a run's tensors. See run_tensors.h. */
#include "server/verbs/run_tensors.h"

gradd_status_t run_check_held(const session_objects_t *objects, int more, const char *verb) {
    if (more <= SESSION_MAX_HELD - objects->n_held) return GRADD_OK;
    return GRADD_FAIL(LIMIT,
                      "%s: bindings and unreleased runs of this session would hold %d tensors, the "
                      "limit is %d",
                      verb, objects->n_held + more, SESSION_MAX_HELD);
}

gradd_status_t run_wrong_type(const char *verb, const char *what, const char *name, int i,
                              const gradd_type_t *want, const gradd_type_t *got) {
    char expected[GRADD_TYPE_TEXT], found[GRADD_TYPE_TEXT];
    return GRADD_FAIL(TENSOR, "%s: %s %d '%s': expected %s, got %s", verb, what, i, name,
                      gradd_type_format(want, expected), gradd_type_format(got, found));
}

const char *run_input_name(const session_plan_t *plan, int i) {
    const gradd_model_t *model = plan->compiled->model->model;
    return i < gradd_model_n_inputs(model) ? gradd_model_input_name(model, i) : "live rows";
}

const char *run_output_name(const session_plan_t *plan, int i) {
    return gradd_model_output_name(plan->compiled->model->model, plan->out[i]);
}

gradd_status_t run_check_inputs(const session_plan_t *plan, const char *verb, const char *what,
                                const int32_t *positions, int n, const tensors_t *tensors) {
    for (int i = 0; i < n; i++) {
        const gradd_type_t *want = &plan->in[positions[i]];
        if (!tensors->address[i]) continue;
        if (!gradd_type_equal(want, &tensors->types[i]))
            return run_wrong_type(verb, what, run_input_name(plan, positions[i]), i, want,
                                  &tensors->types[i]);
    }
    return GRADD_OK;
}

gradd_status_t run_find_binding(session_objects_t *objects, const msgpack_object *id, int n,
                                const char *verb, binding_t **out_binding) {
    binding_t *binding = id ? id_list_get(&objects->bindings, wire_u64(id)) : NULL;
    *out_binding = NULL;
    if (id && !binding)
        return GRADD_FAIL(STALE, "%s: binding %llu is not known (bind it again)", verb,
                          (unsigned long long)wire_u64(id));
    if (!id && n > 0)
        return GRADD_FAIL(TENSOR, "%s: field 'b': the plan has %d bound inputs, got nil", verb, n);
    *out_binding = binding;
    return GRADD_OK;
}

static gradd_status_t overlap(const char *verb, const char *a, int i, const char *b, int k) {
    return GRADD_FAIL(TENSOR, "%s: %s %d and %s %d share memory", verb, a, i, b, k);
}

gradd_status_t run_check_disjoint(const char *verb, const char *what_a, const tensors_t *a,
                                  const char *what_b, const tensors_t *b) {
    int i, k;
    if (spans_overlap(a->spans, a->n_spans, b->spans, b->n_spans, &i, &k))
        return overlap(verb, what_a, i, what_b, k);
    return GRADD_OK;
}

gradd_status_t run_check_self(const char *verb, const char *what, const tensors_t *a) {
    int i, k;
    if (spans_overlap_self(a->spans, a->n_spans, &i, &k)) return overlap(verb, what, i, what, k);
    return GRADD_OK;
}
