/* The contract of com.gradd BatchNorm and its gradient: the order of operands and results, and how
 * a tensor [B, C, ...] is read. The mathematics is in kernels/ops/norm/batchnorm.c. Pure functions,
 * for every device.
 */
#ifndef GRADD_KERNELS_DESCRIBE_BATCH_NORM_H
#define GRADD_KERNELS_DESCRIBE_BATCH_NORM_H

#include "kernels/contract/op.h"

/* Operands. MEAN and VAR, absent together: the statistics to normalise by, [C], in place of the
 * batch's own. */
enum {
    GRADD_BATCH_X,
    GRADD_BATCH_SCALE,
    GRADD_BATCH_BIAS,
    GRADD_BATCH_MEAN,
    GRADD_BATCH_VAR,
    GRADD_BATCH_INPUTS
};
/* Results: y, and of each channel the statistics that it was normalised by: mean, variance (of the
 * batch the biased one) and 1 / sqrt(variance + epsilon), in f32 for halves. */
enum {
    GRADD_BATCH_Y,
    GRADD_BATCH_OUT_MEAN,
    GRADD_BATCH_OUT_VAR,
    GRADD_BATCH_OUT_INV,
    GRADD_BATCH_OUTPUTS
};
/* Operands and results of BatchNormGrad. */
enum {
    GRADD_BATCH_GRAD_DY,
    GRADD_BATCH_GRAD_X,
    GRADD_BATCH_GRAD_SCALE,
    GRADD_BATCH_GRAD_MEAN,
    GRADD_BATCH_GRAD_INV,
    GRADD_BATCH_GRAD_INPUTS
};
enum { GRADD_BATCH_DX, GRADD_BATCH_DSCALE, GRADD_BATCH_DBIAS, GRADD_BATCH_GRAD_OUTPUTS };

#define GRADD_BATCH_EPSILON "epsilon" /* float, 1e-5 */
#define GRADD_BATCH_GIVEN   "given"   /* of the gradient: the statistics are constants, 0 */

/* x as [batch, channels, spatial]. */
typedef struct gradd_channels_s {
    int64_t batch, channels, spatial;
} gradd_channels_t;

static inline gradd_channels_t gradd_channels_of(const gradd_type_t *x) {
    gradd_channels_t s = {x->dims[0], x->dims[1], 1};
    for (int i = 2; i < x->rank; i++)
        s.spatial *= x->dims[i];
    return s;
}

#endif
