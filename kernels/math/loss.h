/* The loss of one row of logits and its derivative, in double, for all devices.
 *
 * With label smoothing e and weights w of the classes, of mean m: (1 - e) w[l] (log sum exp(x) -
 * x[l]) + e (m log sum exp(x) - mean(w x)). Of the row are known its maximum, sum = sum of exp(x -
 * maximum) and, beside smoothing, plain = sum of w x. Pure functions.
 */
#ifndef GRADD_KERNELS_MATH_LOSS_H
#define GRADD_KERNELS_MATH_LOSS_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "kernels/math/host_device.h"

typedef enum gradd_reduction_e {
    GRADD_REDUCE_NONE,
    GRADD_REDUCE_SUM,
    GRADD_REDUCE_MEAN
} gradd_reduction_t;

typedef struct gradd_loss_rule_s {
    int64_t classes;
    double smoothing;
    double mean_weight; /* 1 without weights; set where labels are smoothed */
    bool weighted;
} gradd_loss_rule_t;

/* Of a row that counts. */
typedef struct gradd_loss_sums_s {
    double max, sum, plain;
} gradd_loss_sums_t;

/* own: the logit of the label, w: its weight. */
GRADD_HD double gradd_loss_value(gradd_loss_rule_t l, gradd_loss_sums_t row, double w, double own) {
    const double e = l.smoothing, logs = log(row.sum);
    own -= row.max;
    if (e == 0) return w * (logs - own);
    const double plain = row.plain / (double)l.classes;
    if (!l.weighted) return logs - (1 - e) * own - e * (plain - row.max);
    return (1 - e) * w * (logs - own) + e * (l.mean_weight * (logs + row.max) - plain);
}

/* The derivative of that by the label's logit: without weights p - 1, in full where p is near 1;
 * rest = sum - 1. */
GRADD_HD double gradd_loss_own_slope(gradd_loss_rule_t l, double w, double own, double max,
                                     double rest) {
    const double e = l.smoothing, even = e / (double)l.classes;
    const double below = (expm1(own - max) - rest) / (1 + rest); /* p - 1 */
    if (!l.weighted) return below - even + e;
    return ((1 - e) * w + e * l.mean_weight) * below + e * l.mean_weight - even * w;
}

/* The factor of p in the derivatives by all others. */
GRADD_HD double gradd_loss_share(gradd_loss_rule_t l, double w) {
    return l.weighted ? (1 - l.smoothing) * w + l.smoothing * l.mean_weight : 1;
}

#endif
