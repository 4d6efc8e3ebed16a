/* Runs operators one at a time, for the operator tests: a builder whose emit infers and computes at
 * once, so that a gradient rule yields numbers without the engine's graph, planner and executor.
 * Outputs are filled with a pattern before a run and fenced behind, which exposes elements that a
 * kernel forgets and writes past the end. Everything lives until eager_end, or eager_leave.
 *
 * Composites run as their expansion, and with `expand_all` whatever has one does. With `record` the
 * operators that run are kept in a tape, over which eager_backward differentiates. */
#ifndef GRADD_TESTS_EAGER_H
#define GRADD_TESTS_EAGER_H

#include "kernels/cases/cases.h"
#include "kernels/contract/kernel.h"

enum { EAGER_MAX_VALUES = 4096 };

typedef struct eager_node_s eager_node_t;

typedef struct eager_s {
    gradd_builder_t base; /* first: a builder is cast back to its eager_t */
    gradd_view_t value[EAGER_MAX_VALUES];
    bool known[EAGER_MAX_VALUES];
    int n_values;
    uint64_t node; /* Philox coordinate of what runs */
    bool expand_all, record;
    int n_in_parts;         /* launches that were made in parts */
    eager_node_t *tape;     /* the latest first */
    gradd_case_data_t heap; /* owns all memory */
} eager_t;

/* One run of one operator. */
typedef struct eager_call_s {
    const gradd_op_t *op;
    const gradd_kernel_t *kernel; /* NULL = the CPU's */
    gradd_attrs_t attrs;
    const gradd_view_t *in;
    const bool *known; /* inputs the shape rule may read; NULL = none */
    int n_in, n_out;
    bool ref;         /* the operator's plain loop in place of the kernel */
    int overwrite;    /* input that out[0] takes the place of; -1 = none */
    uint64_t dropped; /* bit j: output j is not wanted */
    int parts;        /* about so many, if the launch can be made in parts; 0 = as a whole */
} eager_call_t;

/* Runs a call whose operands are all there on the CPU. */
gradd_status_t eager_launch(gradd_launch_t *launch);
/* Whether some kernel of the CPU takes that dtype as input i. */
bool eager_takes(const gradd_op_t *op, int input, gradd_dtype_t dtype);
void eager_begin(eager_t *e);
void eager_end(eager_t *e);
/* What is allocated in between is freed again. eager_enter returns what eager_leave takes. */
void *eager_enter(eager_t *e);
void eager_leave(eager_t *e, void *entered);
/* Runs and fills out[0..n_out). */
gradd_status_t eager_call(eager_t *e, const eager_call_t *call, gradd_view_t *out);
gradd_val_t eager_add(eager_t *e, gradd_view_t view, bool known);
/* An element of any type that kernels take, as a number. */
double eager_element(const gradd_view_t *view, int64_t i);
/* Copy of a view in fresh memory. */
gradd_view_t eager_copy(eager_t *e, gradd_view_t view);
int eager_opset(const gradd_op_t *op);
/* Whether the operator has kernels, but none for these operands, which a graph puts casts around.
 */
bool eager_widens(const eager_call_t *call);
/* The kernel of a call with these operands, by their types alone; NULL = it needs casts. */
const gradd_kernel_t *eager_kernel(const eager_call_t *call);

/* Gradients of one call: din[i] is GRADD_NONE for zero. dout and need as in op.h. */
typedef struct eager_diff_s {
    const gradd_view_t *out; /* what the call gave */
    const gradd_val_t *in, *dout;
    const bool *need;
} eager_diff_t;
gradd_status_t eager_grad(eager_t *e, const eager_call_t *call, const eager_diff_t *diff,
                          gradd_val_t *din);

/* The operator of the call in simpler ones; `in` are the values of its operands. */
gradd_status_t eager_expand(eager_t *e, const eager_call_t *call, const gradd_val_t *in,
                            gradd_val_t *out);
/* Keeps an operator that has run (eager_tape.c). */
gradd_status_t eager_record(eager_t *e, const eager_call_t *call, const gradd_val_t *in,
                            const gradd_val_t *out);
/* Gradients through what was recorded, from dout of n_out values to those of in that are needed;
 * GRADD_NONE where there is no path. Ends the tape. */
typedef struct eager_ends_s {
    const gradd_val_t *out, *dout;
    int n_out;
    const gradd_val_t *in;
    const bool *need;
    int n_in;
} eager_ends_t;
gradd_status_t eager_backward(eager_t *e, const eager_ends_t *ends, gradd_val_t *din);

#endif
