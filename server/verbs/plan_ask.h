/* The request graph.plan: its fields, read and checked against the model. Engine thread. */
#ifndef GRADD_SERVER_VERBS_PLAN_ASK_H
#define GRADD_SERVER_VERBS_PLAN_ASK_H

#include "server/verbs/worker.h"

#define PLAN_MAX_LIST  65536 /* entries of one list */
#define PLAN_MAX_LISTS 3     /* of live rows */

/* Fields of the verb, in the order of its row. */
enum {
    PLAN_GRAPH,
    PLAN_ID,
    PLAN_IN,
    PLAN_BOUND,
    PLAN_GRAD,
    PLAN_OUT,
    PLAN_GMASK,
    PLAN_PLAIN,
    PLAN_DEVICE,
    PLAN_PARAMETERS,
    PLAN_EARLY,
    PLAN_DENSE,
    PLAN_LABEL_ROWS,
    PLAN_REAL_ROWS,
    PLAN_SOURCE_ROWS,
    PLAN_MEMORY_BUDGET,
    PLAN_RECOMPUTE
};

/* Lists of a plan. Owned; what a plan keeps is taken out and NULL afterwards. */
typedef struct plan_ask_s {
    gradd_type_t *in; /* of the model's inputs, followed by the live-row lists */
    int32_t *bound, *rest, *grads, *out, *gmask;
    int32_t *parameters; /* inputs that are parameters, rising */
    int n_in, n_bound, n_rest, n_grads, n_out, n_gmask, n_parameters;
    int n_lists;
    int64_t label_rows, real_rows, source_rows;
} plan_ask_t;

/* *ask must be finished whatever comes of it. Fails with TENSOR, LIMIT, UNSUPPORTED, NOMEM. */
gradd_status_t plan_ask_init(plan_ask_t *ask, const gradd_model_t *model,
                             const msgpack_object *const *args);
void plan_ask_finish(plan_ask_t *ask);
/* Reads the request's memory fields into the options. Fails with LIMIT or UNSUPPORTED. */
gradd_status_t plan_ask_memory(const msgpack_object *const *args, gradd_plan_options_t *options);

#endif
