/* A tensor as [outer, n, inner] around one axis: lanes of n elements that lie `inner` apart. Pure
 * functions, for every device.
 */
#ifndef GRADD_KERNELS_DESCRIBE_LANES_H
#define GRADD_KERNELS_DESCRIBE_LANES_H

#include "kernels/contract/op.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gradd_lanes_s {
    int64_t outer, n, inner;
} gradd_lanes_t;

static inline gradd_lanes_t gradd_lanes_of(const gradd_type_t *type, int axis) {
    gradd_lanes_t l = {1, type->dims[axis], 1};
    for (int i = 0; i < axis; i++)
        l.outer *= type->dims[i];
    for (int i = axis + 1; i < type->rank; i++)
        l.inner *= type->dims[i];
    return l;
}

/* Along the axis of the attribute "axis"; without one, along `absent`. A norm, which starts at that
 * axis, sees rows of n * inner elements. Fails with SHAPE for an axis that the type does not have.
 */
gradd_status_t gradd_lanes_of_axis(const gradd_type_t *type, gradd_attrs_t attrs, int64_t absent,
                                   gradd_lanes_t *out);
/* Along the axis of CumSum's second operand. */
gradd_status_t gradd_lanes_of_cumsum(const gradd_launch_t *r, gradd_lanes_t *out);

#ifdef __cplusplus
}
#endif
#endif
