/* Inside of a training session, for the modules of train/. The functions are gradd_train.h's.
 *
 * A session has two sides, the training model and the eval model. Each keeps plans, one for each
 * shape of the inputs that it has seen lately, with a run that is used again: after the first step
 * of a shape nothing is allocated. All runs share one arena, the device's spare one, which is as
 * large as the largest plan needs.
 */
#ifndef GRADD_TRAIN_SESSION_H
#define GRADD_TRAIN_SESSION_H

#include "server/api/gradd.h"
#include "train/state.h"

/* What becomes of an input of a model. */
enum {
    INPUT_USER = -1,   /* the caller's */
    INPUT_HIDDEN = -2, /* no output that is shown needs it */
};

/* Running statistics: an output whose value replaces that of a parameter. */
typedef struct train_statistic_s {
    int output;    /* position among the outputs that plans compute */
    int parameter; /* of the state */
} train_statistic_t;

/* A plan for some shape of the inputs. */
typedef struct train_shape_s {
    gradd_plan_t *plan;
    gradd_run_t *run;
    gradd_type_t *types;       /* per input of the caller */
    void **outputs;            /* per output of the plan, in `memory` */
    const void **grad_outputs; /* the same: gradients that arrive, NULL but for the loss */
    void *memory, *copies;
    int64_t memory_bytes, copies_bytes; /* outputs; inputs that are not aligned */
    uint64_t used;                      /* number of the step that did last */
} train_shape_t;

typedef struct train_side_s {
    gradd_model_t *model; /* NULL = there is none */
    int32_t *origin;      /* per input of the model: parameter of the state, or INPUT_... */
    int32_t *user;        /* inputs of the model that are the caller's */
    int n_user;
    int32_t *outputs; /* of the model, that plans compute: those that are shown, then statistics */
    int n_outputs, n_shown;
    train_statistic_t *statistics;
    int n_statistics;
    train_shape_t *shapes;
    int n_shapes;
    const void **inputs; /* per input of the model: those of the step */
} train_side_t;

struct train_session_s {
    gradd_train_state_t *state;
    gradd_device_t *device;
    gradd_train_options_t options; /* without the models */
    train_side_t sides[2];         /* by gradd_train_phase_t */
    int32_t *parameters;           /* of the state, in the order of the training model's inputs */
    int n_parameters;
    /* Trainable ones, which the plans give gradients, and where those of a step go. */
    int32_t *trained;
    void **gradients;
    bool *written;
    int n_trained;
    void *sums; /* gradients of a step that are added to those there are */
    int64_t sums_bytes;
    void *eval_bytes; /* of the eval model, for its export */
    size_t eval_n;
    uint64_t steps;   /* of both sides, for train_shape_t's `used` */
    int plan_threads; /* of the plan of the last step; 0 = there was none */
};

/* side.c. `training`: finds the statistics. Errors: those of gradd_train_open. */
gradd_status_t side_open(gradd_train_session_t *session, gradd_train_phase_t phase,
                         const void *bytes, size_t n);
void side_close(train_side_t *side);
/* Batch norms in evaluation mode have one result. */
void side_trim_norms(struct model_s *model);
/* Of a parameter of the state: whether the model writes it. */
bool side_writes(const train_side_t *side, int parameter);

/* shapes.c: the plan for these inputs, made if there is none. Errors: those of a step. */
gradd_status_t shape_find(gradd_train_session_t *session, gradd_train_phase_t phase,
                          const gradd_train_tensor_t *inputs, train_shape_t **out_shape);
void shapes_drop(train_side_t *side);
/* Where the step reads the i-th input of the caller: there, or in a copy. Errors: NOMEM. */
gradd_status_t shape_place_input(train_shape_t *shape, int n_user, int i,
                                 const gradd_train_tensor_t *input, const void **out);

/* optimizer.c. Errors: TENSOR (names the constant). */
gradd_status_t optimizer_check(const gradd_train_optimizer_t *optimizer);

/* select.c: fills `trained` from the state. Errors: TENSOR, UNSUPPORTED, NOMEM. */
gradd_status_t session_list_trained(gradd_train_session_t *session);

/* Bytes of a piece of memory with the next one aligned behind it. */
static inline int64_t aligned_bytes(int64_t bytes) {
    return (bytes + GRADD_TENSOR_ALIGN - 1) / GRADD_TENSOR_ALIGN * GRADD_TENSOR_ALIGN;
}

#endif
