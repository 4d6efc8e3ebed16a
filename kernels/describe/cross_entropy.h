/* The contract of CrossEntropy and CrossEntropyGrad: the order of operands and results, and the
 * names of attributes, which LinearCrossEntropy (head.h) and ONNX's losses share.
 *
 * Passes and live rows write these nodes, every device's kernels read them. The mathematics is in
 * kernels/ops/loss/crossentropy.c.
 */
#ifndef GRADD_KERNELS_DESCRIBE_CROSS_ENTROPY_H
#define GRADD_KERNELS_DESCRIBE_CROSS_ENTROPY_H

#include <string.h>

#include "kernels/contract/op.h"
#include "kernels/math/loss.h"

/* Operands of CrossEntropy; those from ITEMS on may be absent. */
enum {
    GRADD_CE_LOGITS,
    GRADD_CE_LABELS,
    GRADD_CE_ITEMS,   /* a number to divide the sum by */
    GRADD_CE_WEIGHTS, /* of the classes */
    GRADD_CE_INPUTS
};
enum { GRADD_CE_LOSS, GRADD_CE_STATS, GRADD_CE_OUTPUTS };

/* Operands of CrossEntropyGrad; those from ITEMS on may be absent. */
enum {
    GRADD_CE_GRAD_DY,
    GRADD_CE_GRAD_LOGITS,
    GRADD_CE_GRAD_LABELS,
    GRADD_CE_GRAD_STATS,
    GRADD_CE_GRAD_ITEMS,
    GRADD_CE_GRAD_WEIGHTS,
    GRADD_CE_GRAD_INPUTS
};
enum { GRADD_CE_DLOGITS, GRADD_CE_GRAD_OUTPUTS };

/* Attributes of both, all optional. */
#define GRADD_CE_REDUCTION    "reduction"    /* "mean", "sum" or "none" */
#define GRADD_CE_IGNORE_INDEX "ignore_index" /* the label of rows that do not count */
#define GRADD_CE_SHIFT        "shift"        /* 1: a row answers for the label behind its own */
#define GRADD_CE_SMOOTHING    "smoothing"    /* float, 0 */
#define GRADD_CE_ATTRS        4              /* how many there are */

static inline gradd_reduction_t gradd_loss_reduction(gradd_attrs_t attrs) {
    const char *name = gradd_attr_string(attrs, GRADD_CE_REDUCTION, "mean");
    if (!strcmp(name, "none")) return GRADD_REDUCE_NONE;
    return !strcmp(name, "sum") ? GRADD_REDUCE_SUM : GRADD_REDUCE_MEAN;
}

#endif
