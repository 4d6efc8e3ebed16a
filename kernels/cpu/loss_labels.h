/* The common part of the cross-entropy operators: reductions, the labels that count, and the loss
 * of a row.
 *
 * Rows whose label is ignore_index do not count. With `shift`, logits [..., S, V] at position s
 * answer for the label at s + 1, and the last position for none. "mean" divides by the rows that
 * count, or by the sum of the weights of their labels; num_items divides a "sum". Engine thread;
 * the loss of a row on any thread. */
#ifndef GRADD_KERNELS_CPU_LOSS_LABELS_H
#define GRADD_KERNELS_CPU_LOSS_LABELS_H

#include "kernels/contract/op.h"
#include "kernels/cpu/loss_rows.h"
#include "kernels/math/loss.h"

typedef struct gradd_loss_s {
    int64_t rows, classes, positions; /* positions: S with shift, else 0 */
    gradd_dtype_t dtype;              /* of the logits */
    gradd_reduction_t reduction;
    bool ignores;
    int64_t ignore;
    double smoothing, total;     /* total: what the sum is divided by */
    int64_t *labels;             /* checked copy, -1 = the row is ignored; the caller's memory */
    const gradd_view_t *weights; /* Borrowed: of the classes; NULL = all one */
    double mean_weight;          /* 1 without weights; set where labels are smoothed */
} gradd_loss_t;

/* Operands beside the logits. What is optional is NULL, or has no dtype. */
typedef struct gradd_loss_operands_s {
    const gradd_view_t *labels;
    const gradd_view_t *items;   /* optional: what divides a sum */
    const gradd_view_t *weights; /* optional: [classes], of gradd_loss_dtype() */
} gradd_loss_operands_t;

/* f64 for f64, else f32: of losses and statistics. */
gradd_dtype_t gradd_loss_dtype(gradd_dtype_t logits);
/* Operands first, first + 1, ... of n: labels, num_items, weights. */
gradd_loss_operands_t gradd_loss_operands(const gradd_view_t *in, int n, int first);
/* Whether the operands fit the logits; GRAPH if not. */
gradd_status_t gradd_loss_check(const gradd_type_t *logits, const gradd_loss_operands_t *operands,
                                gradd_attrs_t attrs);
/* Attributes and operands for logits of that type; `copy` has an entry per row. INDEX names a
 * label out of range. */
gradd_status_t gradd_loss_read(const gradd_type_t *logits, gradd_attrs_t attrs,
                               const gradd_loss_operands_t *operands, int64_t *copy,
                               gradd_loss_t *out);

/* Of a row that counts. */
typedef struct gradd_loss_label_s {
    int64_t label;
    double own;       /* its logit */
    double max, rest; /* of the row: the maximum, and the sum of exponentials - 1 */
} gradd_loss_label_t;

/* The statistics of a row of logits that the loss needs. */
gradd_loss_row_t gradd_loss_scan_row(const gradd_loss_t *l, const void *x);
/* `own` is the logit of the label. */
double gradd_loss_of_row(const gradd_loss_t *l, const gradd_loss_row_t *row, int64_t label,
                         double own);
/* The derivative of that by the label's logit: without weights p - 1, in full where p is near 1. */
double gradd_loss_own_gradient(const gradd_loss_t *l, const gradd_loss_label_t *at);
/* The derivatives by all others, times `factor`; the label's is to be written over. */
gradd_loss_spread_t gradd_loss_gradient(const gradd_loss_t *l, const gradd_loss_label_t *at,
                                        double factor);

/* Element of a tensor of any real type, as the plain loops read and write it. */
double gradd_loss_number(const gradd_view_t *v, int64_t i);
void gradd_loss_store(const gradd_view_t *v, int64_t i, double value);

#endif
