/* Recurrent layers, for every device: the operands of Recurrence and its gradient, and what their
 * shapes and attributes come to. The mathematics is in kernels/ops/recurrent/recurrence.c.
 *
 * T steps of B sequences; H cells, of which each has G gates in a row [G H] (LSTM: i, f, g, o; GRU:
 * r, z, n; plain: one); P numbers are the state that goes into the next step: H, or those that PROJ
 * makes of H. Pure functions.
 */
#ifndef GRADD_KERNELS_DESCRIBE_RECURRENCE_H
#define GRADD_KERNELS_DESCRIBE_RECURRENCE_H

#include "kernels/contract/kernel.h"
#include "kernels/describe/gemm.h"
#include "kernels/math/host_device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Operands: X [T, B, G H], the products of the inputs; U [G H, P]; BIAS [G H], of the state's
 * product; the first state [B, P]; of an LSTM its first cells [B, H], and perhaps PROJ [P, H]. */
enum {
    GRADD_RNN_X,
    GRADD_RNN_U,
    GRADD_RNN_STATE,
    GRADD_RNN_CELLS,
    GRADD_RNN_BIAS,
    GRADD_RNN_PROJ,
    GRADD_RNN_INPUTS
};
/* Results: Y [T, B, P], the states; the last state [B, P]; of an LSTM the last cells [B, H]; and
 * for the gradient the gates behind their functions [T, B, G H], and KEPT [T, B, H], in f32 for
 * halves: of an LSTM the cells, of a GRU what r is multiplied with. */
enum {
    GRADD_RNN_Y,
    GRADD_RNN_LAST,
    GRADD_RNN_LAST_CELLS,
    GRADD_RNN_GATES,
    GRADD_RNN_KEPT,
    GRADD_RNN_OUTPUTS
};
/* Operands of RecurrenceGrad. GATES: of a plain layer its Y. LSTM and GRU need KEPT, the former
 * CELLS, the latter Y; gradients that do not arrive are absent. */
enum {
    GRADD_RNN_GRAD_GATES,
    GRADD_RNN_GRAD_U,
    GRADD_RNN_GRAD_STATE,
    GRADD_RNN_GRAD_CELLS,
    GRADD_RNN_GRAD_KEPT,
    GRADD_RNN_GRAD_Y,
    GRADD_RNN_GRAD_PROJ,
    GRADD_RNN_GRAD_DY,
    GRADD_RNN_GRAD_DLAST,
    GRADD_RNN_GRAD_DLAST_CELLS,
    GRADD_RNN_GRAD_INPUTS
};
/* Results: the gradients of X, of the first state and of the first cells; of the state's product
 * [T, B, G H], where it is not that of X (GRU); with PROJ those of what goes out of it [T, B, P],
 * and what goes into it [T, B, H]. */
enum {
    GRADD_RNN_DX,
    GRADD_RNN_DSTATE,
    GRADD_RNN_DCELLS,
    GRADD_RNN_DPRODUCT,
    GRADD_RNN_DPROJECTED,
    GRADD_RNN_PROJECTS,
    GRADD_RNN_GRAD_OUTPUTS
};

#define GRADD_RNN_KIND    "kind"    /* string, required: "lstm", "gru", "tanh", "relu" */
#define GRADD_RNN_REVERSE "reverse" /* from the last step to the first; 0 */

typedef enum gradd_rnn_kind_e {
    GRADD_RNN_LSTM,
    GRADD_RNN_GRU,
    GRADD_RNN_TANH,
    GRADD_RNN_RELU
} gradd_rnn_kind_t;

typedef struct gradd_rnn_s {
    gradd_rnn_kind_t kind;
    gradd_dtype_t dtype, wide;                 /* of operands; of sums and KEPT */
    int64_t steps, batch, cells, state, gates; /* T, B, H, P, G */
    bool reverse, has_bias, has_proj;
} gradd_rnn_t;

/* Of the operands and attributes of the two operators. Operands that do not fit fail with GRAPH,
 * and *out is not written. */
gradd_status_t gradd_rnn_of(const gradd_view_t *in, int n_in, gradd_attrs_t attrs,
                            gradd_rnn_t *out);
gradd_status_t gradd_rnn_of_grad(const gradd_view_t *in, int n_in, gradd_attrs_t attrs,
                                 gradd_rnn_t *out);

/* The products of one step: of the state and U, [B, G H]; of cells and PROJ, [B, P]; and those of
 * the backward, of the gates' gradients and U, [B, P], and of the state's and PROJ, [B, H]. All
 * results are of the type `wide`. The third adds, of a GRU,
 * to what is there. */
gradd_gemm_t gradd_rnn_product(const gradd_rnn_t *v);
gradd_gemm_t gradd_rnn_projection(const gradd_rnn_t *v);
gradd_gemm_t gradd_rnn_product_back(const gradd_rnn_t *v);
gradd_gemm_t gradd_rnn_projection_back(const gradd_rnn_t *v);

/* The place along T of step i in the order of computation. */
GRADD_HD int64_t gradd_rnn_at(const gradd_rnn_t *v, int64_t i) {
    return v->reverse ? v->steps - 1 - i : i;
}

/* Costs: those of the products. */
void gradd_rnn_cost(const gradd_infer_t *c, gradd_cost_t *cost);
void gradd_rnn_grad_cost(const gradd_infer_t *c, gradd_cost_t *cost);

#ifdef __cplusplus
}
#endif
#endif
