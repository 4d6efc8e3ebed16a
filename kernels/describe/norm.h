/* The contract of LayerNormalization, RMSNormalization and their gradients: the order of operands
 * and results, and the names of attributes. Passes write these nodes, every device's kernels read
 * them. The mathematics is in kernels/ops/norm/norm.c.
 */
#ifndef GRADD_KERNELS_DESCRIBE_NORM_H
#define GRADD_KERNELS_DESCRIBE_NORM_H

/* Operands; BIAS, of LayerNormalization alone, may be absent. */
enum { GRADD_NORM_X, GRADD_NORM_SCALE, GRADD_NORM_BIAS, GRADD_NORM_INPUTS };
enum { GRADD_NORM_Y, GRADD_LAYER_NORM_MEAN, GRADD_LAYER_NORM_INV, GRADD_LAYER_NORM_OUTPUTS };
enum { GRADD_RMS_NORM_INV = GRADD_NORM_Y + 1, GRADD_RMS_NORM_OUTPUTS };

/* Operands of LayerNormGrad and RMSNormGrad: the statistics of the forward stand behind the scale.
 */
enum { GRADD_NORM_GRAD_DY, GRADD_NORM_GRAD_X, GRADD_NORM_GRAD_SCALE, GRADD_NORM_GRAD_STATS };
enum {
    GRADD_LAYER_NORM_GRAD_MEAN = GRADD_NORM_GRAD_STATS,
    GRADD_LAYER_NORM_GRAD_INV,
    GRADD_LAYER_NORM_GRAD_INPUTS
};
enum { GRADD_RMS_NORM_GRAD_INV = GRADD_NORM_GRAD_STATS, GRADD_RMS_NORM_GRAD_INPUTS };
enum { GRADD_NORM_DX, GRADD_NORM_DSCALE, GRADD_NORM_DBIAS, GRADD_NORM_GRAD_OUTPUTS };

#define GRADD_NORM_AXIS       "axis"       /* the first one that is normalised over, -1 */
#define GRADD_NORM_EPSILON    "epsilon"    /* float, 1e-5 */
#define GRADD_NORM_STASH_TYPE "stash_type" /* 1 */

#endif
