/* A tensor as [outer, n, inner] around the axis that the attribute "axis" (default: the last)
 * names. What normalises from that axis on sees rows of n * inner. Pure functions. */
#ifndef GRADD_KERNELS_RULES_SPAN_H
#define GRADD_KERNELS_RULES_SPAN_H

#include "kernels/rules/infer.h"

typedef struct gradd_span_s {
    int64_t outer, n, inner;
} gradd_span_t;

static inline gradd_status_t gradd_span_of(gradd_attrs_t attrs, const gradd_type_t *type,
                                           gradd_span_t *out) {
    int axis;
    GRADD_TRY(gradd_axis(gradd_attr_int(attrs, "axis", -1), type->rank, false, &axis));
    out->outer = out->inner = 1;
    out->n = type->dims[axis];
    for (int i = 0; i < axis; i++)
        out->outer *= type->dims[i];
    for (int i = axis + 1; i < type->rank; i++)
        out->inner *= type->dims[i];
    return GRADD_OK;
}

#endif
