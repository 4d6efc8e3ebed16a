/* Tensors of a run against its plan: the checks of the verbs bind, forward and backward before
 * anything runs. Errors begin with the verb. Engine thread. */
#ifndef GRADD_SERVER_VERBS_RUN_TENSORS_H
#define GRADD_SERVER_VERBS_RUN_TENSORS_H

#include "server/verbs/worker.h"

/* Whether bindings and unreleased runs of the session may hold `more` tensors. Fails with LIMIT. */
gradd_status_t run_check_held(const session_objects_t *objects, int more, const char *verb);

/* Always fails: TENSOR, with both types. `what` and i name the tensor to the client. */
gradd_status_t run_wrong_type(const char *verb, const char *what, const char *name, int i,
                              const gradd_type_t *want, const gradd_type_t *got);
/* Compares tensors [0, n) of a list with the plan's input types of these positions; those that are
 * left out are in order. Fails with TENSOR. */
gradd_status_t run_check_inputs(const session_plan_t *plan, const char *verb, const char *what,
                                const int32_t *positions, int n, const tensors_t *tensors);
/* Name of input i of the plan, a list of live rows among them; of output i. */
const char *run_input_name(const session_plan_t *plan, int i);
const char *run_output_name(const session_plan_t *plan, int i);

/* The binding of field 'b'; NULL for none, which is an error if the plan has n > 0 bound inputs.
 * Fails with STALE, TENSOR. */
gradd_status_t run_find_binding(session_objects_t *objects, const msgpack_object *id, int n,
                                const char *verb, binding_t **out_binding);

/* No tensor of a shares memory with one of b, or with another one of a. Fails with TENSOR. */
gradd_status_t run_check_disjoint(const char *verb, const char *what_a, const tensors_t *a,
                                  const char *what_b, const tensors_t *b);
gradd_status_t run_check_self(const char *verb, const char *what, const tensors_t *a);

#endif
