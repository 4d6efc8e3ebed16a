/* Lanes along the axis that an attribute names. See lanes.h. */
#include "kernels/describe/lanes.h"

#include "kernels/rules/infer.h"

gradd_status_t gradd_lanes_of_axis(const gradd_type_t *type, gradd_attrs_t attrs, int64_t absent,
                                   gradd_lanes_t *out) {
    int axis;
    GRADD_TRY(gradd_axis(gradd_attr_int(attrs, "axis", absent), type->rank, false, &axis));
    *out = gradd_lanes_of(type, axis);
    return GRADD_OK;
}
