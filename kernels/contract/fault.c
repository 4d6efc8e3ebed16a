/* See fault.h. */
#include "kernels/contract/fault.h"

#include <string.h>

static double number(int64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

gradd_status_t gradd_fault_fail(const gradd_fault_t *f) {
    const long long value = f->value, limit = f->limit, at = f->position;
    switch ((gradd_fault_kind_t)f->kind) {
    case GRADD_FAULT_NONE:
        return GRADD_OK;
    case GRADD_FAULT_INDEX:
        return GRADD_FAIL(INDEX, "index %lld is out of range for size %lld, at position %lld",
                          value, limit, at);
    case GRADD_FAULT_TABLE_INDEX:
        return GRADD_FAIL(INDEX,
                          "table %lld: index %lld is out of range for size %lld, at position %lld",
                          (long long)f->table, value, limit, at);
    case GRADD_FAULT_LABEL:
        return GRADD_FAIL(INDEX, "label %lld is out of range for %lld classes, at row %lld", value,
                          limit, at);
    case GRADD_FAULT_ZERO_DIVISOR:
        return GRADD_FAIL(INDEX, "integer division by zero, element %lld", at);
    case GRADD_FAULT_PROBABILITY:
        return GRADD_FAIL(INDEX, "probability %g, element %lld, is not within 0 and 1",
                          number(value), at);
    case GRADD_FAULT_RATIO:
        return GRADD_FAIL(INDEX, "the ratio is %g, not within 0 and 1", number(value));
    case GRADD_FAULT_LIVE_ROW:
        return GRADD_FAIL(INDEX, "row %lld of %lld, entry %lld of the list of live rows", value,
                          limit, at);
    case GRADD_FAULT_LIVE_ORDER:
        return GRADD_FAIL(INDEX, "row %lld behind %lld, entry %lld of the list of live rows", value,
                          limit, at);
    case GRADD_FAULT_LIVE_TAIL:
        return GRADD_FAIL(INDEX, "the list of live rows has live ones behind its end");
    case GRADD_FAULT_LIVE_OTHER:
        return GRADD_FAIL(INDEX, "row %lld is not in the other list of live rows", value);
    case GRADD_FAULT_LIVE_RANGE:
        return GRADD_FAIL(INDEX, "position %lld may look at [%lld, %lld)", at, value, limit);
    case GRADD_FAULT_GROUP_END:
        return GRADD_FAIL(INDEX,
                          "group %lld ends at row %lld, expected one from the end of the group "
                          "before it up to %lld",
                          at, value, limit);
    }
    return GRADD_FAIL(INTERNAL, "a fault of kind %d", (int)f->kind);
}
