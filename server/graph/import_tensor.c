/* Constants of an imported model: initializers and tensor attributes.
 *
 * Only dense tensors whose elements are in the model itself are taken; external data is refused
 * before anything looks at its path. The dims determine the number of bytes, and nothing is
 * allocated before the bytes present match it. Elements come as raw_data (little-endian, as on
 * every machine gradd runs on) or in the typed field that ONNX assigns to the element type. Those
 * of int4 and uint4, of which a byte has two, the first in its lower half, become i8 and u8.
 */
#include <string.h>

#include "server/graph/import.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "raw_data is copied as it is");

static gradd_status_t refuse_external(const Onnx__TensorProto *t) {
    const char *location = "";
    for (size_t i = 0; i < t->n_external_data; i++) {
        const Onnx__StringStringEntryProto *entry = t->external_data[i];
        if (entry->key && !strcmp(entry->key, "location")) location = entry->value;
    }
    return GRADD_FAIL(EXTDATA,
                      "its data is in an external file ('%.*s'); gradd opens no files for a model",
                      IMPORT_TEXT(location));
}

bool import_is_packed(const Onnx__TensorProto *t) {
    return t->data_type == IMPORT_UINT4 || t->data_type == IMPORT_INT4;
}

static gradd_status_t tensor_type(const Onnx__TensorProto *t, gradd_type_t *out_type) {
    gradd_type_t type = {.dtype = t->data_type == IMPORT_INT4 ? GRADD_DT_I8 : GRADD_DT_U8};
    if (!import_is_packed(t)) GRADD_TRY(gradd_dtype_check(t->data_type, &type.dtype));
    if (t->n_dims > GRADD_MAX_RANK)
        return GRADD_FAIL(LIMIT, "rank %zu is above the limit of %d", t->n_dims, GRADD_MAX_RANK);
    type.rank = (int)t->n_dims;
    for (int d = 0; d < type.rank; d++) {
        if (t->dims[d] < 0)
            return GRADD_FAIL(GRAPH, "dimension %d is %lld", d, (long long)t->dims[d]);
        type.dims[d] = t->dims[d];
    }
    GRADD_TRY(gradd_type_check(&type));
    *out_type = type;
    return GRADD_OK;
}

/* One typed field of TensorProto. */
typedef struct typed_s {
    const char *name;
    size_t n;
    const void *data;
    size_t size; /* of one entry */
} typed_t;

enum { IN_FLOAT, IN_INT32, IN_INT64, IN_DOUBLE, IN_UINT64, IN_COUNT };

static int field_for(gradd_dtype_t dtype) {
    switch (dtype) {
    case GRADD_DT_F32:
        return IN_FLOAT;
    case GRADD_DT_F64:
        return IN_DOUBLE;
    case GRADD_DT_I64:
        return IN_INT64;
    case GRADD_DT_U32:
    case GRADD_DT_U64:
        return IN_UINT64;
    default:
        return IN_INT32;
    }
}

static void typed_fields(const Onnx__TensorProto *t, typed_t out[IN_COUNT]) {
    out[IN_FLOAT] = (typed_t){"float_data", t->n_float_data, t->float_data, 4};
    out[IN_INT32] = (typed_t){"int32_data", t->n_int32_data, t->int32_data, 4};
    out[IN_INT64] = (typed_t){"int64_data", t->n_int64_data, t->int64_data, 8};
    out[IN_DOUBLE] = (typed_t){"double_data", t->n_double_data, t->double_data, 8};
    out[IN_UINT64] = (typed_t){"uint64_data", t->n_uint64_data, t->uint64_data, 8};
}

/* The elements as 64-bit numbers that a narrower dtype must be able to hold. F16 and BF16 are bit
 * patterns here. */
static void range_of(gradd_dtype_t dtype, int64_t *out_min, int64_t *out_max) {
    int bits = 8 * (int)gradd_dtype_bytes(dtype);
    bool is_signed = dtype == GRADD_DT_I8 || dtype == GRADD_DT_I16 || dtype == GRADD_DT_I32;
    *out_min = is_signed ? -(1ll << (bits - 1)) : 0;
    *out_max = is_signed ? (1ll << (bits - 1)) - 1 : (1ll << bits) - 1;
    if (dtype == GRADD_DT_BOOL) *out_max = 1;
}

/* int32_data and uint64_data hold narrower elements, one per entry. */
static gradd_status_t narrow(const typed_t *field, gradd_dtype_t dtype, void *out) {
    int64_t min, max;
    size_t bytes = gradd_dtype_bytes(dtype);
    range_of(dtype, &min, &max);
    for (size_t i = 0; i < field->n; i++) {
        int64_t value = field->size == 8 ? (int64_t)((const uint64_t *)field->data)[i]
                                         : ((const int32_t *)field->data)[i];
        if (value < min || value > max)
            return GRADD_FAIL(GRAPH, "element %zu is %lld, expected %lld to %lld for %s", i,
                              (long long)value, (long long)min, (long long)max,
                              gradd_dtype_name(dtype));
        memcpy((char *)out + i * bytes, &value, bytes);
    }
    return GRADD_OK;
}

/* A bool that is neither 0 nor 1 would be undefined behaviour in every kernel that reads it. */
static gradd_status_t check_bools(const uint8_t *data, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (data[i] > 1)
            return GRADD_FAIL(GRAPH, "element %zu is %d, expected 0 or 1 for bool", i, data[i]);
    return GRADD_OK;
}

static gradd_status_t take_raw(import_t *m, const Onnx__TensorProto *t, gradd_view_t *view) {
    size_t bytes = (size_t)gradd_type_bytes(&view->type);
    char text[GRADD_TYPE_TEXT];
    if (t->raw_data.len != bytes)
        return GRADD_FAIL(GRAPH, "raw_data has %zu bytes, expected %zu for %s", t->raw_data.len,
                          bytes, gradd_type_format(&view->type, text));
    if (view->type.dtype == GRADD_DT_BOOL) GRADD_TRY(check_bools(t->raw_data.data, bytes));
    view->data = arena_alloc_aligned(m->model->arena, bytes, GRADD_TENSOR_ALIGN);
    if (!view->data) return GRADD_E_NOMEM;
    if (bytes) memcpy(view->data, t->raw_data.data, bytes);
    return GRADD_OK;
}

static gradd_status_t take_typed(import_t *m, const typed_t *field, gradd_view_t *view) {
    char text[GRADD_TYPE_TEXT];
    if (field->n != (size_t)gradd_type_count(&view->type))
        return GRADD_FAIL(GRAPH, "%s has %zu elements, expected %lld for %s", field->name, field->n,
                          (long long)gradd_type_count(&view->type),
                          gradd_type_format(&view->type, text));
    size_t bytes = (size_t)gradd_type_bytes(&view->type);
    view->data = arena_alloc_aligned(m->model->arena, bytes, GRADD_TENSOR_ALIGN);
    if (!view->data) return GRADD_E_NOMEM;
    gradd_dtype_t dtype = view->type.dtype;
    if (gradd_dtype_bytes(dtype) != field->size) return narrow(field, dtype, view->data);
    if (bytes) memcpy(view->data, field->data, bytes);
    return GRADD_OK;
}

/* Byte i of packed elements. */
static int32_t packed_byte(const Onnx__TensorProto *t, size_t i) {
    return t->n_int32_data ? t->int32_data[i] : t->raw_data.data[i];
}

static gradd_status_t take_packed(import_t *m, const Onnx__TensorProto *t, gradd_view_t *view) {
    const size_t n = (size_t)gradd_type_count(&view->type), bytes = n / 2 + n % 2;
    const size_t got = t->n_int32_data ? t->n_int32_data : t->raw_data.len;
    if (got != bytes)
        return GRADD_FAIL(GRAPH, "%zu bytes of two elements, expected %zu for %zu elements of %s",
                          got, bytes, n, t->data_type == IMPORT_INT4 ? "int4" : "uint4");
    int8_t *to = arena_alloc_aligned(m->model->arena, n, GRADD_TENSOR_ALIGN);
    if (!to) return GRADD_E_NOMEM;
    for (size_t i = 0; i < n; i++) {
        const int32_t both = packed_byte(t, i / 2);
        if (both < 0 || both > 255)
            return GRADD_FAIL(GRAPH, "entry %zu is %d, expected a byte of two elements", i / 2,
                              both);
        const int one = i % 2 ? both >> 4 : both & 15;
        to[i] = (int8_t)(t->data_type == IMPORT_INT4 && one > 7 ? one - 16 : one);
    }
    view->data = to;
    return GRADD_OK;
}

/* Exactly one of raw_data and the typed fields may hold data, and the right one. */
static gradd_status_t take_elements(import_t *m, const Onnx__TensorProto *t, gradd_view_t *view) {
    typed_t fields[IN_COUNT];
    typed_fields(t, fields);
    int want = field_for(view->type.dtype);
    bool raw = t->has_raw_data && t->raw_data.len > 0;
    for (int f = 0; f < IN_COUNT; f++) {
        if (!fields[f].n) continue;
        if (raw) return GRADD_FAIL(GRAPH, "data is in both raw_data and %s", fields[f].name);
        if (f != want)
            return GRADD_FAIL(GRAPH, "data is in %s, expected %s or raw_data for %s",
                              fields[f].name, fields[want].name,
                              gradd_dtype_name(view->type.dtype));
    }
    if (import_is_packed(t)) return take_packed(m, t, view);
    if (t->has_raw_data && !fields[want].n) return take_raw(m, t, view);
    return take_typed(m, &fields[want], view);
}

gradd_status_t import_tensor(import_t *m, const Onnx__TensorProto *tensor, gradd_view_t *out_view) {
    if (tensor->n_external_data || tensor->data_location != ONNX__TENSOR_PROTO__LOCATION__DEFAULT)
        return refuse_external(tensor);
    if (tensor->has_segment) return GRADD_FAIL(UNSUPPORTED, "segmented tensors are not supported");
    gradd_view_t view = {0};
    GRADD_TRY(tensor_type(tensor, &view.type));
    if (tensor->n_string_data) return GRADD_FAIL(GRAPH, "data is in string_data");
    GRADD_TRY(take_elements(m, tensor, &view));
    *out_view = view;
    return GRADD_OK;
}
