/* Helpers of shape rules. */
#ifndef GRADD_KERNELS_RULES_INFER_H
#define GRADD_KERNELS_RULES_INFER_H

#include "kernels/contract/op.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Normalises axis into 0..rank-1 (or 0..rank with `end_allowed`); fails with GRAPH. */
gradd_status_t gradd_axis(int64_t axis, int rank, bool end_allowed, int *out_axis);
/* numpy broadcasting of two shapes into out->rank and out->dims (dtype untouched). */
gradd_status_t gradd_broadcast(const gradd_type_t *a, const gradd_type_t *b, gradd_type_t *out);
/* Reads a known 1-D (or rank-0) i64 or i32 input; fails with UNSUPPORTED "depends on data" if its
 * elements are not known at compile time, with LIMIT if there are more than max. */
gradd_status_t gradd_known_i64s(const gradd_infer_t *c, int input, int64_t *out, int max,
                                int *out_n);
/* Axes from input `input` if present (opset >= 13 style) or attribute "axes"; all axes if neither
 * (unless noop_with_empty_axes). Normalised, sorted; a repeated axis fails with GRAPH. */
gradd_status_t gradd_known_axes(const gradd_infer_t *c, int input, int rank, bool *out_mask);
/* out[0] = in[0]; the shape rule of unary operators. */
gradd_status_t gradd_infer_same(gradd_infer_t *c);
/* out[0] = broadcast of all inputs, dtype of in[0]; inputs must have one dtype. */
gradd_status_t gradd_infer_broadcast(gradd_infer_t *c);

/* compute() of view operators: copies in[0] to out[0]. */
gradd_status_t gradd_compute_copy(const gradd_launch_t *r);

#ifdef __cplusplus
}
#endif

#endif
