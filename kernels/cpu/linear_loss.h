/* The product of a head and its cross-entropy, chunk of rows by chunk of rows.
 *
 * The rows that count are gathered; the logits of a chunk of them lie in the workspace, become
 * their gradient there, and go into the gradients of rows and weight before the next chunk. So the
 * workspace has one chunk of logits, no product is computed twice, and rows that do not count cost
 * nothing. Of x only rows that count are read: those with a label, and those whose log-sum-exp has
 * a weight other than zero.
 *
 * In bf16 the weight's gradient is summed in f32, and rounded once at the end. From chunk to chunk
 * 24 bits of a sum are kept, which is 2^-8 of what the rounding at the end takes: 16 in the
 * gradient's own memory and 8 in the workspace. Where one chunk has all rows there are none.
 *
 * A chunk is cut into pieces of a few sizes, for each of which the products are prepared. */
#ifndef GRADD_KERNELS_CPU_LINEAR_LOSS_H
#define GRADD_KERNELS_CPU_LINEAR_LOSS_H

#include "kernels/cpu/loss_labels.h"
#include "kernels/kernel.h"

/* Operands and results of LinearCrossEntropy. */
enum {
    GRADD_HEAD_X,
    GRADD_HEAD_W,
    GRADD_HEAD_LABELS,
    GRADD_HEAD_BIAS,
    GRADD_HEAD_ITEMS,
    GRADD_HEAD_CLASSES, /* weights of the classes */
    GRADD_HEAD_WEIGHTS, /* per row: what its loss is multiplied by */
    GRADD_HEAD_SQUARES, /* per row: what the square of its log-sum-exp is multiplied by */
    GRADD_HEAD_INPUTS
};
enum { GRADD_HEAD_LOSS, GRADD_HEAD_DX, GRADD_HEAD_DW, GRADD_HEAD_DBIAS };

/* Type of the logits, which exist in chunks only. W is [V, K] with transB, else [K, V]. */
gradd_type_t gradd_head_logits(const gradd_view_t *in, gradd_attrs_t attrs);
/* Those of the loss. */
gradd_loss_operands_t gradd_head_operands(const gradd_view_t *in, int n_in);

gradd_status_t gradd_head_prepare(const gradd_infer_t *c, gradd_prepared_t *out);
void gradd_head_unprepare(gradd_prepared_t *prepared);
gradd_status_t gradd_head_compute(const gradd_launch_t *r);
/* The definition: row by row, sums in double. */
gradd_status_t gradd_head_ref(const gradd_launch_t *r);
void gradd_head_cost(const gradd_infer_t *c, gradd_cost_t *cost);

#endif
