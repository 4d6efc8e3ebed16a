/* gradd_train.h - training where the data are: a state (parameters, optimizer, properties), and a
 * session that trains it with an ONNX model, in process, without daemon, sockets or Python.
 *
 *     state    = gradd_train_state_load("checkpoint")
 *     session  = gradd_train_open(state, {"training_model.onnx", "eval_model.onnx", ...})
 *     loop:      gradd_train_step, gradd_train_optimizer_step, gradd_train_lazy_reset_grad
 *     result:    gradd_train_state_save, gradd_train_export
 *
 * The training model is a forward whose first output is the loss, one float. Of its inputs those
 * that the state has a parameter for are parameters, all others are the user's, in their order.
 * Models made by ONNX Runtime hold gradient nodes as well, which are left alone: outputs that end
 * in ".accumulation.out", and the inputs that only these need, are not shown.
 *
 * Conventions: fallible functions return gradd_status_t; the sentence that explains a failure is
 * gradd_error_message() of the same thread, and a call that fails changes nothing but what it says.
 * Sizes are bytes unless said otherwise. Tensors are contiguous and row-major. Names and texts that
 * are returned belong to the object that they come from. One thread at a time uses a state and its
 * session.
 */
#ifndef GRADD_TRAIN_H
#define GRADD_TRAIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/contract/adam.h"
#include "shm/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

const char *gradd_version(void); /* "0.1.0" */

/* ---- state: what a training has learnt ------------------------------------------------------- */

typedef struct train_state_s gradd_train_state_t;

#define GRADD_TRAIN_MOMENTS 2

/* A parameter as it is now. Memory is the state's, aligned to 64 bytes, and stays where it is for
 * the life of the state, except where a comment says until when. */
typedef struct gradd_train_parameter_s {
    const char *name;
    gradd_type_t type;
    /* May be read and written between steps; NULL = it has no values yet. Of a state in a file
     * frozen values are written by gradd_train_state_write. */
    void *data;
    bool trainable; /* a step gives it a gradient, and the optimizer changes it */
    /* Of the parameter's type, the sum since the last reset. NULL = there is none. Valid until the
     * next reset or gradd_train_freeze. */
    const void *gradient;
    /* f32, of the parameter's shape: AdamW's first and second moment, SGD's momentum. NULL = there
     * is none yet. Valid until gradd_train_freeze. */
    float *moments[GRADD_TRAIN_MOMENTS];
    int64_t steps; /* of the optimizer that have changed it */
} gradd_train_parameter_t;

/* Errors: NOMEM. */
gradd_status_t gradd_train_state_create(gradd_train_state_t **out_state);
/* Its session is closed. Accepts NULL. */
void gradd_train_state_destroy(gradd_train_state_t *state);

/* Adds a parameter; `data` is copied. NULL: it gets its values later, and steps fail until then (a
 * nominal checkpoint); its rank may be -1 then, and gradd_train_open takes the shape that the model
 * declares. Errors: TENSOR (the name is there already or empty; a trainable one that is no float),
 * LIMIT, UNSUPPORTED (dtype), NOMEM. */
gradd_status_t gradd_train_state_add(gradd_train_state_t *state, const char *name,
                                     const gradd_type_t *type, const void *data, bool trainable);
int gradd_train_state_count(const gradd_train_state_t *state);
/* Position of the parameter of that name, in order of addition; -1 = there is none. */
int gradd_train_state_find(const gradd_train_state_t *state, const char *name);
gradd_train_parameter_t gradd_train_state_parameter(const gradd_train_state_t *state, int i);
/* Copies values in. Errors: TENSOR (the type is not the parameter's), NOMEM. */
gradd_status_t gradd_train_state_write(gradd_train_state_t *state, int i, const gradd_type_t *type,
                                       const void *data);
/* Makes moment k of a trainable parameter and copies `data` in (f32, the parameter's shape; NULL =
 * zeros). Errors: TENSOR, NOMEM. */
gradd_status_t gradd_train_state_set_moment(gradd_train_state_t *state, int i, int k,
                                            const float *data);
void gradd_train_state_set_steps(gradd_train_state_t *state, int i, int64_t steps);

/* How far the training is. */
typedef struct gradd_train_progress_s {
    int64_t step;                /* that the optimizer has taken */
    float learning_rate;         /* of the next step; default 1e-3 */
    float initial_learning_rate; /* from which a schedule starts; default 1e-3 */
    int64_t position;            /* in the data, as the caller counts it */
} gradd_train_progress_t;

gradd_train_progress_t gradd_train_state_progress(const gradd_train_state_t *state);
void gradd_train_state_set_progress(gradd_train_state_t *state,
                                    const gradd_train_progress_t *progress);

/* The position in the data alone, which a state in a file commits with the step. */
void gradd_train_state_set_position(gradd_train_state_t *state, int64_t position);

/* ---- properties: named values that travel with the state ------------------------------------- */

typedef enum gradd_train_property_kind_e {
    GRADD_TRAIN_INT,
    GRADD_TRAIN_FLOAT,
    GRADD_TRAIN_TEXT,
} gradd_train_property_kind_t;

typedef struct gradd_train_property_s {
    const char *name;
    gradd_train_property_kind_t kind;
    int64_t integer;  /* of that kind; else 0 */
    float real;       /* of that kind; else 0 */
    const char *text; /* of that kind; else "". Valid until the property changes */
} gradd_train_property_t;

/* Adds a property, or replaces the one of that name, whose kind may change; name and text are
 * copied. Errors: TENSOR (empty name), NOMEM. */
gradd_status_t gradd_train_state_set_property(gradd_train_state_t *state,
                                              const gradd_train_property_t *property);
int gradd_train_state_property_count(const gradd_train_state_t *state);
/* -1 = there is none. */
int gradd_train_state_find_property(const gradd_train_state_t *state, const char *name);
gradd_train_property_t gradd_train_state_property(const gradd_train_state_t *state, int i);

/* ---- a state that survives a loss of power ----------------------------------------------------
 */

#define GRADD_TRAIN_COMMIT_MS    1000
#define GRADD_TRAIN_COMMIT_SHARE 0.03 /* of the time that commits may take */

/* When a state is committed by itself: before a training step, if the optimizer has taken a step
 * since the latest commit, and no gradients wait for it. What the caller has set between the steps
 * (a learning rate, the position in the data, properties) is so part of it. */
typedef struct gradd_train_lasting_s {
    const char *checkpoint; /* what a file that is not there is made of; NULL = that is an error */
    int64_t commit_every;   /* steps of the optimizer; 0 = by time: */
    int64_t commit_ms;      /* after so many, and after as many more as it takes for commits to take
                             * GRADD_TRAIN_COMMIT_SHARE of the time; 0 = GRADD_TRAIN_COMMIT_MS */
} gradd_train_lasting_t;

/* Opens the state in a file: parameters, moments, running statistics, progress, seed, schedule and
 * properties as they were committed last. Whatever interrupts the program or the machine, the file
 * holds one of the commits, the latest one that was finished or a later one. Values of frozen
 * parameters stay in the file, which is mapped. `options` may be NULL.
 * Errors: IO (names the path), MODEL (not such a file, or damaged: says where), VERSION, LIMIT,
 * UNSUPPORTED, STALE (it is open already), NOMEM; those of gradd_train_state_load. */
gradd_status_t gradd_train_open_state(const char *path, const gradd_train_lasting_t *options,
                                      gradd_train_state_t **out_state);
/* Writes the state to a file, in place of what is there, and commits it there from now on.
 * Errors: IO, STALE (the file is open already; the state has a file already), NOMEM. */
gradd_status_t gradd_train_keep_state(gradd_train_state_t *state, const char *path,
                                      const gradd_train_lasting_t *options);
/* Commits what there is: at the end of a training, or before a device may be switched off. After a
 * failure the file has the commit before, and the next one tries again. Errors: UNSUPPORTED (the
 * state has no file), STALE (gradients wait for the optimizer, which would be lost; the path names
 * the state's file no longer, since it was deleted, renamed or replaced), IO, NOMEM. */
gradd_status_t gradd_train_commit(gradd_train_state_t *state);

typedef struct gradd_train_commits_s {
    int64_t number; /* of the latest commit, from 1; 0 = the state has no file */
    int64_t step;   /* of the optimizer in it */
    int64_t bytes;  /* that were written; 0 after opening, as seconds */
    double seconds; /* that it took */
} gradd_train_commits_t;
gradd_train_commits_t gradd_train_commits(const gradd_train_state_t *state);

/* ---- session: a state, its models and its optimizer ------------------------------------------ */

typedef struct train_session_s gradd_train_session_t;

/* Bytes of an ONNX model, or the path of one: the first that is not NULL. */
typedef struct gradd_train_model_s {
    const void *bytes; /* not kept */
    size_t n;
    const char *path;
} gradd_train_model_t;

typedef enum gradd_train_optimizer_kind_e {
    GRADD_TRAIN_NO_OPTIMIZER,
    GRADD_TRAIN_ADAMW,
    GRADD_TRAIN_SGD,
} gradd_train_optimizer_kind_t;

/* SGD per element, with g' the clipped gradient: g' += weight_decay p;
 * with momentum: m = momentum m + g' (m = g' in the parameter's first step), p -= lr m; else
 * p -= lr g'. AdamW: kernels/contract/adam.h. */
typedef struct gradd_train_optimizer_s {
    gradd_train_optimizer_kind_t kind;
    gradd_adam_mode_t mode;   /* AdamW */
    bool bias_correction;     /* AdamW */
    double beta1, beta2, eps; /* AdamW; betas are below 1, all constants at least 0 */
    double momentum;          /* SGD; 0 = none */
    double weight_decay;      /* both */
    double max_norm;          /* clips the norm of all gradients together; 0 = not clipped */
} gradd_train_optimizer_t;

/* torch's AdamW (0.9, 0.999, 1e-8, weight decay 0.01, bias correction) and plain SGD. */
gradd_train_optimizer_t gradd_train_adamw(void);
gradd_train_optimizer_t gradd_train_sgd(void);

#define GRADD_TRAIN_MAX_PLANS  8 /* default */
#define GRADD_TRAIN_MOST_PLANS 4096

typedef struct gradd_train_options_s {
    gradd_train_model_t training; /* required */
    gradd_train_model_t eval;     /* without it eval steps and export fail */
    gradd_train_optimizer_t optimizer;
    int threads;           /* 0 = as many as the process may use */
    int max_plans;         /* shapes of inputs whose plans are kept, for each of the two models; 0 =
                            * GRADD_TRAIN_MAX_PLANS */
    int64_t memory_budget; /* most bytes of activations and workspace in a step; 0 = what it takes.
                            * What does not fit is computed again, with the same bits */
    uint64_t seed; /* of random numbers (dropout) of a new state; one that was trained goes on
                    * with its own */
} gradd_train_options_t;

/* A tensor of the caller, or of the session. */
typedef struct gradd_train_tensor_s {
    gradd_type_t type;
    const void *data; /* any alignment; what is not aligned to 64 bytes is copied */
} gradd_train_tensor_t;

/* Makes a session; the state stays valid until it is closed, and has one session at a time.
 * Errors: MODEL, GRAPH, LIMIT, EXTDATA, IO (a path), TENSOR (a parameter is not of the type that
 * the model declares; no trainable parameter; the loss is no float; a constant of the optimizer is
 * out of its range), UNSUPPORTED, STALE (the state has a session already), NOMEM. */
gradd_status_t gradd_train_open(gradd_train_state_t *state, const gradd_train_options_t *options,
                                gradd_train_session_t **out_session);
/* Accepts NULL. Gradients go with it. */
void gradd_train_close(gradd_train_session_t *session);
gradd_train_state_t *gradd_train_session_state(const gradd_train_session_t *session);
/* The optimizer of the steps that follow, in place of that of the options. A parameter whose
 * moments are those of another kind (AdamW has two, SGD with momentum one, SGD none) loses them,
 * and its count of steps, in its next step. Errors: TENSOR (names a constant that is out of its
 * range). */
gradd_status_t gradd_train_set_optimizer(gradd_train_session_t *session,
                                         const gradd_train_optimizer_t *optimizer);

typedef enum gradd_train_phase_e {
    GRADD_TRAIN_TRAINING,
    GRADD_TRAIN_EVAL,
} gradd_train_phase_t;

/* The user's inputs and the outputs of a model; 0 of an eval model that was not given. NULL beyond
 * the last one. */
int gradd_train_input_count(const gradd_train_session_t *session, gradd_train_phase_t phase);
int gradd_train_output_count(const gradd_train_session_t *session, gradd_train_phase_t phase);
const char *gradd_train_input_name(const gradd_train_session_t *session, gradd_train_phase_t phase,
                                   int i);
const char *gradd_train_output_name(const gradd_train_session_t *session, gradd_train_phase_t phase,
                                    int i);
/* As the model declares it: dims -1 where dynamic, rank -1 where not declared. */
gradd_type_t gradd_train_input_type(const gradd_train_session_t *session, gradd_train_phase_t phase,
                                    int i);

/* Forward and backward: the gradients of the loss are added to those there are, and the running
 * statistics of normalisations get their new values. Inputs: all of the model's, in order; they
 * are not needed afterwards. outputs (may be NULL): one per output of the model; their memory is
 * the session's and valid until its next step. `cancel` (may be NULL) is read at every node, by
 * any thread written; non-zero ends the step with STALE. A step that fails changes neither
 * gradients nor statistics. The first step with inputs of other shapes makes a plan; later ones
 * allocate nothing. Errors: TENSOR (names the input), INDEX, NOMEM (also of a budget that cannot be
 * met), NONFINITE, STALE, UNSUPPORTED (names the node). */
gradd_status_t gradd_train_step(gradd_train_session_t *session, const gradd_train_tensor_t *inputs,
                                int n_inputs, gradd_train_tensor_t *outputs,
                                const volatile int *cancel);
/* A forward of the eval model, which changes nothing. Errors: those of a step; UNSUPPORTED without
 * an eval model. */
gradd_status_t gradd_train_eval_step(gradd_train_session_t *session,
                                     const gradd_train_tensor_t *inputs, int n_inputs,
                                     gradd_train_tensor_t *outputs, const volatile int *cancel);
/* Makes the plan of a step with inputs of these types, whose data are not read. gradd_train_memory
 * then says what it takes. Errors: TENSOR, NOMEM, UNSUPPORTED, as of a step. */
gradd_status_t gradd_train_prepare(gradd_train_session_t *session, gradd_train_phase_t phase,
                                   const gradd_train_tensor_t *inputs, int n_inputs);
/* The next step's gradients replace those there are. */
void gradd_train_lazy_reset_grad(gradd_train_session_t *session);
/* Changes every trainable parameter that has a gradient. *out_norm (may be NULL): L2 norm of all
 * gradients together before clipping, 0 if they are not clipped. Without a gradient since the last
 * reset it does nothing but count. Errors: UNSUPPORTED (no optimizer), NOMEM (the first step makes
 * the moments). */
gradd_status_t gradd_train_optimizer_step(gradd_train_session_t *session, double *out_norm);

float gradd_train_learning_rate(const gradd_train_session_t *session);
/* Errors: TENSOR (negative or not finite). */
gradd_status_t gradd_train_set_learning_rate(gradd_train_session_t *session, float rate);
/* From now on gradd_train_schedule_step sets the rate, by the number t of steps that the optimizer
 * has taken: initial * t / warmup before `warmup`, then falling to 0 at `total`:
 * initial * max(0, (total - t) / max(1, total - warmup)). Sets it at once. Errors: TENSOR (warmup
 * or total is negative, initial is negative or not finite). */
gradd_status_t gradd_train_set_linear_schedule(gradd_train_session_t *session, int64_t warmup,
                                               int64_t total, float initial);
/* A state keeps its schedule for later sessions. Errors: UNSUPPORTED without one. */
gradd_status_t gradd_train_schedule_step(gradd_train_session_t *session);

/* Starts the random numbers of the steps that follow again. */
void gradd_train_set_seed(gradd_train_session_t *session, uint64_t seed);

/* ---- parameters of a session ----------------------------------------------------------------- */

/* Parameters of the training model in the order of its inputs; those of the state that it does not
 * have do not count. */
int gradd_train_parameter_count(const gradd_train_session_t *session, bool trainable_only);
/* Position in the state of the i-th of these, -1 beyond the last one. */
int gradd_train_parameter_index(const gradd_train_session_t *session, bool trainable_only, int i);

/* What is trained is chosen here: the parameters whose name matches `pattern`, in which "*" stands
 * for any characters. Frozen ones lose gradient and moments; thawed ones begin with none. Later
 * steps make new plans. *out_changed (may be NULL): so many were not so before. Errors: TENSOR
 * (none matches; a matching one that is no float, or that the model writes; none would be left to
 * train). */
gradd_status_t gradd_train_freeze(gradd_train_session_t *session, const char *pattern,
                                  int *out_changed);
gradd_status_t gradd_train_thaw(gradd_train_session_t *session, const char *pattern,
                                int *out_changed);

/* Elements of a contiguous copy. All parameters in it are f32. Errors: TENSOR (names one that is
 * not). */
gradd_status_t gradd_train_contiguous_count(const gradd_train_session_t *session,
                                            bool trainable_only, int64_t *out_count);
/* Copies the values of the parameters, one after the other, to or from a buffer of `count`
 * elements. Errors: TENSOR (count, dtype; out: a parameter without values), NOMEM. */
gradd_status_t gradd_train_copy_out(const gradd_train_session_t *session, bool trainable_only,
                                    float *buffer, int64_t count);
gradd_status_t gradd_train_copy_in(gradd_train_session_t *session, bool trainable_only,
                                   const float *buffer, int64_t count);

/* What the session holds, in bytes. */
typedef struct gradd_train_memory_s {
    int64_t parameters, gradients, moments;
    int64_t arena;     /* of the largest plan: activations and workspace */
    int64_t constants; /* of all plans together: folded constants, launches, prepared operands */
    int64_t buffers;   /* outputs, copies of inputs, a second set of gradients while steps add up */
    int plans;
} gradd_train_memory_t;
gradd_train_memory_t gradd_train_memory(const gradd_train_session_t *session);

/* ---- files (train/files) --------------------------------------------------------------------- */

/* Reads a checkpoint: FlatBuffers with the identifier ODTC, as ONNX Runtime writes them. Errors: IO
 * (names the path), MODEL (not such a file, or damaged; says where), EXTDATA, UNSUPPORTED, LIMIT,
 * NOMEM. */
gradd_status_t gradd_train_state_load(const char *path, gradd_train_state_t **out_state);
gradd_status_t gradd_train_state_load_bytes(const void *bytes, size_t n,
                                            gradd_train_state_t **out_state);
/* Writes beside the path, then renames. Errors: IO, STALE (the path names the file that the state
 * is committed to), NOMEM. */
gradd_status_t gradd_train_state_save(const gradd_train_state_t *state, const char *path,
                                      bool with_optimizer);
/* Kind and constants of an optimizer model, as ONNX Runtime writes them. Errors: those of
 * gradd_train_state_load. */
gradd_status_t gradd_train_optimizer_load(const gradd_train_model_t *model,
                                          gradd_train_optimizer_t *out_optimizer);
/* Writes the part of the eval model that the named outputs need, with the parameters inside as
 * initializers. Errors: UNSUPPORTED without an eval model, TENSOR (names an output that it does not
 * have), IO, NOMEM. */
gradd_status_t gradd_train_export(const gradd_train_session_t *session, const char *path,
                                  const char *const *outputs, int n_outputs);

#ifdef __cplusplus
}
#endif
#endif
