/* Checks and formatting of tensor types. See tensor.h. */
#include "shm/tensor.h"

#include <stdio.h>
#include <string.h>

gradd_status_t gradd_type_check(const gradd_type_t *type) {
    size_t bytes = gradd_dtype_bytes(type->dtype);
    if (!bytes) return GRADD_FAIL(UNSUPPORTED, "element type %d is not supported", type->dtype);
    if (type->rank < 0 || type->rank > GRADD_MAX_RANK)
        return GRADD_FAIL(LIMIT, "rank %d is outside 0..%d", type->rank, GRADD_MAX_RANK);
    int64_t total = (int64_t)bytes;
    for (int i = 0; i < type->rank; i++) {
        if (type->dims[i] < 0)
            return GRADD_FAIL(LIMIT, "dimension %d is %lld, less than 0", i,
                              (long long)type->dims[i]);
        /* a zero dimension must not hide an overflow of the others */
        int64_t factor = type->dims[i] ? type->dims[i] : 1;
        if (__builtin_mul_overflow(total, factor, &total))
            return GRADD_FAIL(LIMIT, "the size in bytes overflows 64 bits at dimension %d", i);
    }
    return GRADD_OK;
}

int64_t gradd_type_count(const gradd_type_t *type) {
    int64_t count = 1;
    for (int i = 0; i < type->rank; i++)
        count *= type->dims[i];
    return count;
}

int64_t gradd_type_bytes(const gradd_type_t *type) {
    return gradd_type_count(type) * (int64_t)gradd_dtype_bytes(type->dtype);
}

bool gradd_type_same_shape(const gradd_type_t *a, const gradd_type_t *b) {
    if (a->rank != b->rank) return false;
    for (int i = 0; i < a->rank; i++)
        if (a->dims[i] != b->dims[i]) return false;
    return true;
}

bool gradd_type_equal(const gradd_type_t *a, const gradd_type_t *b) {
    return a->dtype == b->dtype && gradd_type_same_shape(a, b);
}

const char *gradd_type_format(const gradd_type_t *type, char buffer[GRADD_TYPE_TEXT]) {
    size_t used = (size_t)snprintf(buffer, GRADD_TYPE_TEXT, "%s[", gradd_dtype_name(type->dtype));
    for (int i = 0; i < type->rank && i < GRADD_MAX_RANK && used < GRADD_TYPE_TEXT - 24; i++)
        used += (size_t)snprintf(buffer + used, GRADD_TYPE_TEXT - used, "%s%lld", i ? "," : "",
                                 (long long)type->dims[i]);
    snprintf(buffer + used, GRADD_TYPE_TEXT - used, "]");
    return buffer;
}
