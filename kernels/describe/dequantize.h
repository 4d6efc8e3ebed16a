/* DequantizeLinear's operands, attributes, and which scale an element has. For all devices.
 */
#ifndef GRADD_KERNELS_DESCRIBE_DEQUANTIZE_H
#define GRADD_KERNELS_DESCRIBE_DEQUANTIZE_H

#include "kernels/contract/op.h"
#include "kernels/math/host_device.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { GRADD_DEQUANTIZE_X, GRADD_DEQUANTIZE_SCALES, GRADD_DEQUANTIZE_ZEROS };

#define GRADD_DEQUANTIZE_AXIS  "axis"
#define GRADD_DEQUANTIZE_BLOCK "block_size"

/* x is (outer, axis, inner) elements. Element (o, a, i) has the scale, and the zero point, number
 * o outer_step + a / block axis_step + i inner_step. One scale for all of x: every step is 0. */
typedef struct gradd_scales_s {
    int64_t axis, inner, block;
    int64_t outer_step, axis_step, inner_step;
} gradd_scales_t;

/* Checks the sizes of x, scales and zero points. Errors: GRAPH, with both types. */
gradd_status_t gradd_scales_find(const gradd_infer_t *c, gradd_scales_t *out);

/* The number of the scale of element p of x. */
GRADD_HD int64_t gradd_scale_of(const gradd_scales_t *s, int64_t p) {
    const int64_t row = p / s->inner, a = row % s->axis;
    return row / s->axis * s->outer_step + a / s->block * s->axis_step +
           (p - row * s->inner) * s->inner_step;
}

#ifdef __cplusplus
}
#endif
#endif
