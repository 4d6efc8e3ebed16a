/* gradd.h - the training engine as a library: load an ONNX forward graph, compile it with its
 * gradient for concrete shapes, run forward and backward on the caller's memory.
 *
 * The daemon is a thin shell around this interface; the same library trains in process, without
 * daemon, ZeroMQ or Python.
 *
 * Conventions: every fallible function returns gradd_status_t; the sentence that explains a failure
 * is gradd_error_message() of the same thread. Sizes are bytes, dims are elements. Tensors are
 * contiguous, row-major, aligned to 64 bytes. The library has no state of its own: a device with
 * its plans and runs belongs to one thread at a time, and several devices may be used at once;
 * models are immutable and may be shared.
 */
#ifndef GRADD_H
#define GRADD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shm/dtype.h"
#include "shm/status.h"
#include "shm/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

const char *gradd_version(void); /* "0.1.0" */

/* ---- device: what runs plans ----------------------------------------------------------------- */

typedef struct device_s gradd_device_t;

/* Asked before runs take `bytes` of new memory (an arena that is used again is none); anything but
 * OK ends the call with that status. */
typedef gradd_status_t (*gradd_admit_t)(void *context, int64_t bytes);

#define GRADD_COMPILE_MS  10000 /* what the daemon gives by default */
#define GRADD_MAX_THREADS 1024  /* of a daemon, and of a plan that the command line makes */

typedef struct gradd_device_options_s {
    const char *name;     /* NULL = "cpu" */
    int threads;          /* 0 = as many as the process may use */
    int64_t memory_limit; /* of the arenas of all its runs together; 0 = none */
    int64_t compile_ms;  /* processor time for one plan, or one more backward of it; 0 = no limit */
    gradd_admit_t admit; /* NULL = what the system gives */
    void *admit_context; /* Borrowed */
} gradd_device_options_t;

/* The properties that do not change while it is open. */
typedef struct gradd_device_info_s {
    const char *name;
    const char *uuid;    /* its driver's name for it; NULL = there is none */
    const char *library; /* that multiplies matrices */
    bool native_bf16;    /* it multiplies bf16 itself, not as f32 */
    int threads;
    int64_t memory_limit; /* INT64_MAX = none */
} gradd_device_info_t;

/* Errors: UNSUPPORTED (there is no device of that name), DEVICE (its plug-in, driver, library or
 * hardware is not there or fails), VERSION (the plug-in is of another build), NOMEM. */
gradd_status_t gradd_device_open(const gradd_device_options_t *options,
                                 gradd_device_t **out_device);
/* Its plans and runs are gone. */
void gradd_device_close(gradd_device_t *device);
const gradd_device_info_t *gradd_device_info(const gradd_device_t *device);
/* Gives back the arenas that finished runs left for the next ones. */
void gradd_device_trim(gradd_device_t *device);

/* ---- model: ONNX bytes, validated ------------------------------------------------------------ */

typedef struct model_s gradd_model_t;

/* Errors: MODEL, GRAPH, LIMIT, EXTDATA, UNSUPPORTED, NOMEM. The bytes are not kept. */
gradd_status_t gradd_model_load(const void *bytes, size_t n, gradd_model_t **out_model);
void gradd_model_destroy(gradd_model_t *model);

/* Memory that it holds. */
int64_t gradd_model_bytes(const gradd_model_t *model);
int gradd_model_n_inputs(const gradd_model_t *model);
int gradd_model_n_outputs(const gradd_model_t *model);
const char *gradd_model_input_name(const gradd_model_t *model, int i);
const char *gradd_model_output_name(const gradd_model_t *model, int i);
/* Declared type of an input: dims -1 where dynamic, rank -1 where not declared. */
gradd_type_t gradd_model_input_type(const gradd_model_t *model, int i);
/* The same for an output, as the file declares it: dtype NONE where it does not. Nothing relies on
 * it; a plan finds the true type. */
gradd_type_t gradd_model_output_type(const gradd_model_t *model, int i);
/* Name of a dynamic dimension of input or output i, "" if it has none. */
const char *gradd_model_input_symbol(const gradd_model_t *model, int i, int dim);
const char *gradd_model_output_symbol(const gradd_model_t *model, int i, int dim);
/* Facts about the whole model from the operators' rows: whether it draws random numbers; the
 * coarsest 16-bit float that it computes with somewhere, NONE if there is none. */
bool gradd_model_is_random(const gradd_model_t *model);
gradd_dtype_t gradd_model_half(const gradd_model_t *model);
/* Which inputs a gradient of output i can reach: bit k of byte k / 8 is input k. Shapes are not
 * known here, so a plan may find no path where this says there can be one, never the reverse.
 * Borrowed from the model. */
const uint8_t *gradd_model_reach(const gradd_model_t *model, int i, size_t *out_bytes);
/* Operators of the model that this engine has no row for: count, and one of them. */
int gradd_model_n_unsupported(const gradd_model_t *model);
void gradd_model_unsupported(const gradd_model_t *model, int i, const char **out_node,
                             const char **out_op, const char **out_domain);

/* ---- plan: a model compiled for concrete shapes ---------------------------------------------- */

typedef struct plan_s gradd_plan_t;

enum {
    /* No pattern is recognised, and operators that can be written in simpler ones are: the
     * reference that kernels of such operators and recognised patterns are tested against. */
    GRADD_PLAN_PLAIN = 1 << 0,
    /* The logits of a language model's loss are made as a whole, not chunk by chunk. */
    GRADD_PLAN_DENSE_LOSS = 1 << 1,
    /* The caller gives memory for gradients of parameters that a forward forms
     * (gradd_run_set_early). */
    GRADD_PLAN_EARLY = 1 << 2,
};

/* The values that a backward computes again instead of reading them from memory, if no budget
 * decides. */
typedef enum gradd_recompute_e {
    GRADD_RECOMPUTE_NONE,
    GRADD_RECOMPUTE_LAYERS,     /* what lies within layers, as far as it lowers the planned peak */
    GRADD_RECOMPUTE_COMPROMISE, /* and what lies between them: the least memory */
} gradd_recompute_t;

const char *gradd_recompute_name(gradd_recompute_t recompute); /* "none", "layers", "compromise" */
/* Errors: UNSUPPORTED, with the names that there are; the sentence begins with `what`. */
gradd_status_t gradd_recompute_find(const char *name, size_t n, const char *what,
                                    gradd_recompute_t *out_recompute);

typedef struct gradd_plan_options_s {
    const gradd_type_t *inputs; /* one per model input: concrete types */
    int n_inputs;
    const int32_t *grads; /* model inputs whose gradient is wanted (parameters, then others) */
    int n_grads;
    const int32_t *outputs; /* model outputs wanted; the order of `outputs` at run time */
    int n_outputs;
    const int32_t
        *grad_outputs; /* positions in `outputs` whose gradient may arrive; empty = inference */
    int n_grad_outputs;
    uint32_t flags;         /* GRADD_PLAN_... */
    gradd_device_t *device; /* that will run it */
    /* Model inputs that are parameters: the same tensors from step to step, changed by an optimizer
     * alone. What the plan computes does not depend on it. Positions, each once. */
    const int32_t *parameters;
    int n_parameters;
    /* Sizes of the lists of live rows, 0 = all rows: see gradd_live_t. Each list that there is
     * becomes an input behind those of the model, i64[size], labelled rows first, source rows last:
     * numbers of rows, rising, then ~r for any row r until it is full. Errors: UNSUPPORTED if the
     * graph has no such rows. */
    int64_t label_rows, real_rows, source_rows;
    /* Of a plan with a backward: the most that arena_bytes may be, 0 = as much as it takes. The
     * plan keeps as much from forward to backward as fits, by a model of time, and computes the
     * rest again, with the same bits. Shorter chunks of a language model's loss are another choice,
     * which changes the rounding of sums over them: results are then the same up to rounding, and
     * bit for bit in every run of the plan. With a budget `recompute` has no say. */
    int64_t memory_budget;
    gradd_recompute_t recompute;
    /* If not NULL, it is read while the plan is made; non-zero ends that, with STALE. */
    const volatile int *cancel;
} gradd_plan_options_t;

/* The rows that a plan over all rows could leave out. A row is a position of a batch, number b *
 * positions + s. A plan with lists gives the same results, up to rounding, for every step for which
 * they are right:
 *   - labelled rows are all that the loss counts: those whose label is not `ignore`; with `shift`
 *     row (b, s) answers for the label at (b, s + 1), and the last position for none;
 *   - real rows are all whose mask is 1: the mask holds only zeros and ones, and 1 at each
 *     labelled row;
 *   - source rows are positions of an encoder, number b * source_positions + s, whose mask is 1;
 *     that mask holds only zeros and ones, and each sequence has a 1. */
typedef struct gradd_live_s {
    int32_t label_input,
        mask_input; /* of the model, [batch, positions]; -1 = there is no such set */
    int64_t ignore;
    bool shift;
    int64_t batch, positions;
    /* Parts of the forward's operations that are made in labelled, and in real rows only. */
    double label_share, real_share, source_share;
    int32_t
        source_input; /* the encoder's mask, [batch, source_positions]; -1 = there is no such set */
    int64_t source_positions;
    double flops; /* these operations */
} gradd_live_t;

typedef struct gradd_plan_info_s {
    int n_outputs, n_grads;
    const gradd_type_t *outputs; /* Borrowed from the plan, one per wanted output */
    const bool *has_grad;   /* one per `grads`: false = no path, the gradient is exactly absent */
    int64_t arena_bytes;    /* planned peak of activations and workspace of one run */
    int64_t saved_bytes;    /* of these, alive between forward and backward */
    int64_t constant_bytes; /* held once per plan: folded constants, the graph, the launches, what
                               kernels have prepared; grows when a backward is compiled later */
    int n_launches_forward, n_launches_backward;
    double compile_ms;
    int64_t parameter_bytes; /* of the inputs that are parameters */
    int threads; /* that run it: all of the device's, or 1 where waking others costs too much */
    /* One per `grads`: the forward forms it, or its largest part, in memory of the caller. All
     * false without GRADD_PLAN_EARLY. */
    const bool *early;
    /* The effect of a budget or policy; 0 without either. */
    int64_t whole_bytes;      /* arena_bytes if everything was kept */
    int64_t recomputed_bytes; /* by how much saved_bytes is smaller */
    double recompute_us;      /* modelled time of recomputation */
    double model_us;          /* of forward and expected backward beside it, by the same model */
    gradd_live_t live;        /* of a plan over all rows */
    int n_lists;              /* inputs behind those of the model: lists of live rows */
    int64_t lists[3];         /* their sizes */
    /* One per `grads`: after so many launches of the expected backward it is final, and its input
     * is not read any more. 0 = that backward does not make it. */
    const int32_t *final;
} gradd_plan_info_t;

/* The plan keeps the model's nodes by reference: destroy plans before their model and their device.
 * Errors: GRAPH and UNSUPPORTED name the node; TENSOR for input types that do not fit; NOMEM if the
 * memory budget cannot be met, with the smallest that can. */
gradd_status_t gradd_plan_create(gradd_model_t *model, const gradd_plan_options_t *options,
                                 gradd_plan_t **out_plan);
void gradd_plan_destroy(gradd_plan_t *plan);
const gradd_plan_info_t *gradd_plan_info(const gradd_plan_t *plan);
/* Whether that model input was named a parameter. */
bool gradd_plan_is_parameter(const gradd_plan_t *plan, int input);
gradd_device_t *gradd_plan_device(const gradd_plan_t *plan);

#define GRADD_CURVE_POINTS 8

typedef struct gradd_curve_point_s {
    int64_t arena_bytes;      /* a budget that can be met */
    int64_t recomputed_bytes; /* not kept from forward to backward */
    double extra_us;          /* modelled time of computing it again */
} gradd_curve_point_t;

/* Planned memory against modelled time: falling in bytes, rising in time. The first point keeps
 * everything. */
typedef struct gradd_curve_s {
    gradd_curve_point_t points[GRADD_CURVE_POINTS];
    int n;
    double model_us; /* of forward and backward where everything is kept */
} gradd_curve_t;

/* Of what the plan was made from; it stays as it is. Takes as long as making a plan with a budget.
 * One without a backward has one point. Errors: those of gradd_plan_create. */
gradd_status_t gradd_plan_curve(const gradd_plan_t *plan, gradd_curve_t *out_curve);

/* ---- explanation: what a plan does, row by row ----------------------------------------------- */

typedef enum gradd_explain_kind_e {
    GRADD_EXPLAIN_RUN,   /* an operator that is carried out */
    GRADD_EXPLAIN_COPY,  /* of a result to an output or gradient that it could not be made in */
    GRADD_EXPLAIN_VIEW,  /* shares the bytes of its operand: costs nothing */
    GRADD_EXPLAIN_EMPTY, /* has no element to write: not run */
} gradd_explain_kind_t;

/* One operator of a plan. Later versions append fields. Texts and lists are the plan's and the
 * model's. */
typedef struct gradd_explain_row_s {
    gradd_explain_kind_t kind;
    int launch; /* position among the launches of its phase, -1 = not run */
    bool backward;
    const char *op, *domain;
    const char *kernel;              /* "oneDNN f32", "loop", "view", "copy", "none" */
    int node;                        /* model node it comes from or differentiates; -1 = a copy */
    const char *node_name, *node_op; /* of that node; "" for a copy */
    const int32_t *parts;            /* model nodes that a recognised operator stands for */
    int n_parts;
    gradd_type_t type; /* of the first result */
    int64_t bytes_read, bytes_written;
    int64_t work_bytes;  /* scratch */
    int64_t saved_bytes; /* of its results, kept for backward */
    double flops;
    bool leftover; /* forward, on floats, of an operator that patterns are made of */
    /* forward: a backward computes some of its results again; backward: it is that */
    bool again;
    const char *live; /* "labelled", "real" or "source": runs over these rows alone; or "" */
} gradd_explain_row_t;

typedef enum gradd_fate_e {
    GRADD_FATE_UNUSED, /* no wanted output needs it */
    GRADD_FATE_RUN,
    GRADD_FATE_FUSED, /* into a recognised operator */
    GRADD_FATE_VIEW,
    GRADD_FATE_FOLDED, /* computed when the plan was made */
    GRADD_FATE_MERGED, /* equal to an earlier node, or gives its operand back */
} gradd_fate_t;

/* The fate of one node of the model. */
typedef struct gradd_explain_node_s {
    gradd_fate_t fate;
    int row; /* the row that computes it, -1 = none */
    const char *name, *op, *domain;
} gradd_explain_node_t;

typedef struct gradd_explain_info_s {
    int n_rows, n_nodes; /* nodes: of the model, in the order of its bytes */
    const gradd_device_info_t *device;
    int64_t input_bytes, output_bytes, grad_bytes; /* of the caller's tensors, each once */
    int64_t rows;                  /* of a batch, where some are left out; 0 = all are computed */
    int64_t label_rows, real_rows; /* sizes of the lists; 0 = there is none */
} gradd_explain_info_t;

typedef struct gradd_explain_s gradd_explain_t;

/* Of the forward and the expected backward. Destroy it before the plan. Errors: NOMEM. */
gradd_status_t gradd_plan_explain(const gradd_plan_t *plan, gradd_explain_t **out_explain);
void gradd_explain_destroy(gradd_explain_t *explain);
const gradd_explain_info_t *gradd_explain_info(const gradd_explain_t *explain);
/* Rows in order of execution: forward, then backward. NULL behind the last one. */
const gradd_explain_row_t *gradd_explain_row(const gradd_explain_t *explain, int i);
const gradd_explain_node_t *gradd_explain_node(const gradd_explain_t *explain, int i);
const char *gradd_fate_name(gradd_fate_t fate); /* "folded" */

/* ---- run: one forward and its backward ------------------------------------------------------- */

typedef struct run_s gradd_run_t;

enum {
    GRADD_RUN_DROPOUT_OFF = 1 << 0,
    /* Fail with NONFINITE at the first node that makes a NaN, or an infinity in an output or
     * gradient. Within the graph infinities are in order: a mask of -inf, an exp that overflows
     * under a division. */
    GRADD_RUN_FINITE_CHECK = 1 << 1,
    /* The arena goes back to the system with the run instead of waiting for the next one. */
    GRADD_RUN_ONCE = 1 << 2,
    /* Backwards fail with NONFINITE at the first node that makes a NaN in a gradient; if that has
     * read a NaN of the forward, they name the node that has made the first there. Forwards pass.
     */
    GRADD_RUN_GRADIENT_CHECK = 1 << 3,
};

/* A run owns one arena. `cancel`, if not NULL, is read at every node boundary; non-zero ends the
 * call with STALE. */
gradd_status_t gradd_run_create(gradd_plan_t *plan, gradd_run_t **out_run);
/* Waits: nothing that the run was given is touched afterwards. */
void gradd_run_destroy(gradd_run_t *run);
/* Of its arena now: at least the plan's arena_bytes. A reused arena may be larger, and a backward
 * that keeps the activations may need more. */
int64_t gradd_run_bytes(const gradd_run_t *run);

/* Memory for the early gradients of the forwards that follow: one per wanted gradient, of which
 * those that are not early are not looked at. It keeps its content from the forward to the last
 * backward of a run. That backward may be given the same memory for the gradient; one with `keep`
 * needs other memory, for what the forward has formed is read again. */
void gradd_run_set_early(gradd_run_t *run, void *const *early);
/* inputs: one pointer per model input (an input the graph does not use may be NULL); they stay
 * valid and unchanged until the run is destroyed. outputs: one per wanted output. Only outputs are
 * written. Errors: INDEX, NONFINITE, NOMEM, STALE; they name the node. */
gradd_status_t gradd_run_forward(gradd_run_t *run, uint64_t seed, uint32_t flags,
                                 const void *const *inputs, void *const *outputs,
                                 const volatile int *cancel);
/* The gradients of a backward in groups, which are done one after the other while it goes on. */
typedef struct gradd_groups_s {
    int n;             /* 0 = there are none */
    const int32_t *of; /* Borrowed: one per wanted gradient, its group, from 0 to n - 1 */
    /* Of the first so many groups nothing is written for the caller, and the word is not raised:
     * an earlier backward with the same results has given them. */
    int skipped;
    /* Borrowed: of the device. Raised to value + g once the first g groups are done: their
     * gradients are final, and their inputs are not read any more. */
    uint64_t *word; /* NULL = none */
    uint64_t value;
    /* Borrowed: gradients of parameters are averaged over the ranks of this communicator, a group
     * at a time, and a group is done behind that; NULL = they are not. The backward then ends when
     * all is computed, and *out_round is the round of the communicator that has to end before the
     * gradients are final and their memory may be used. After a failure the communicator is of no
     * use any more. Nothing is skipped. */
    struct gradd_comm_s *comm;
    uint64_t *out_round;
    uint64_t same; /* a number that has to be the same in all ranks, as the gradients' types have */
} gradd_groups_t;

/* Of the next backward; what is borrowed stays valid until that returns. */
void gradd_run_set_groups(gradd_run_t *run, const gradd_groups_t *groups);
/* grad_outputs: one per wanted output, NULL = no gradient arrives. grads: one per wanted gradient;
 * entries without a path are not touched, out_written[i] tells. keep: the activations stay for
 * another backward. */
gradd_status_t gradd_run_backward(gradd_run_t *run, const void *const *grad_outputs,
                                  void *const *grads, bool keep, bool *out_written,
                                  const volatile int *cancel);

#ifdef __cplusplus
}
#endif
#endif
