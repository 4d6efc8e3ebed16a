/* Lookups over the dtype list. See dtype.h. */
#include "shm/dtype.h"

#include <string.h>

typedef struct dtype_row_s {
    const char *name;
    uint8_t bytes, is_float, is_int;
} dtype_row_t;

static const dtype_row_t rows[GRADD_DT_END] = {
#define X(enumerator, onnx, size, text, flt, integer) [onnx] = {text, size, flt, integer},
    GRADD_DTYPE_MAP(X)
#undef X
};

static const dtype_row_t *row_of(gradd_dtype_t dtype) {
    static const dtype_row_t none = {"?", 0, 0, 0};
    if ((unsigned)dtype >= GRADD_DT_END || !rows[dtype].name) return &none;
    return &rows[dtype];
}

size_t gradd_dtype_bytes(gradd_dtype_t dtype) {
    return row_of(dtype)->bytes;
}

const char *gradd_dtype_name(gradd_dtype_t dtype) {
    return row_of(dtype)->name;
}

int gradd_dtype_is_float(gradd_dtype_t dtype) {
    return row_of(dtype)->is_float;
}

int gradd_dtype_is_int(gradd_dtype_t dtype) {
    return row_of(dtype)->is_int;
}

int(gradd_dtype_is_half)(gradd_dtype_t dtype) {
    return dtype == GRADD_DT_BF16 || dtype == GRADD_DT_F16;
}

gradd_dtype_t gradd_dtype_from_name(const char *name, size_t length) {
    for (int i = 0; i < GRADD_DT_END; i++)
        if (rows[i].name && strlen(rows[i].name) == length && !memcmp(rows[i].name, name, length))
            return (gradd_dtype_t)i;
    return GRADD_DT_NONE;
}

gradd_status_t gradd_dtype_check(int64_t onnx_code, gradd_dtype_t *out_dtype) {
    if (onnx_code <= 0 || onnx_code >= GRADD_DT_END || !rows[onnx_code].name)
        return GRADD_FAIL(UNSUPPORTED, "element type %lld is not supported", (long long)onnx_code);
    *out_dtype = (gradd_dtype_t)onnx_code;
    return GRADD_OK;
}
