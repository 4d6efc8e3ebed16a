/* Helpers of gradient rules and expansions. See rules.h. */
#include "kernels/rules/rules.h"

#include <string.h>

#include "kernels/math/bf16.h"
#include "kernels/math/f16.h"

gradd_val_t gradd_emit_attrs(gradd_builder_t *b, const char *op, const gradd_val_t *in, int n_in,
                             const gradd_attr_t *attrs, int n_attrs) {
    gradd_val_t out = GRADD_NONE;
    if (b->status) return GRADD_NONE;
    b->status = b->emit(b, &(gradd_emit_t){op, in, n_in, attrs, n_attrs}, &out, 1);
    return b->status ? GRADD_NONE : out;
}

gradd_val_t gradd_emit_n(gradd_builder_t *b, const char *op, int n_in, const gradd_val_t *in) {
    return gradd_emit_attrs(b, op, in, n_in, NULL, 0);
}

gradd_attr_t gradd_make_int(const char *name, int64_t value) {
    return (gradd_attr_t){.name = name, .kind = GRADD_ATTR_INT, .i = value};
}

gradd_attr_t gradd_make_float(const char *name, double value) {
    return (gradd_attr_t){.name = name, .kind = GRADD_ATTR_FLOAT, .f = value};
}

gradd_attr_t gradd_make_string(const char *name, const char *value) {
    return (gradd_attr_t){.name = name, .kind = GRADD_ATTR_STRING, .s = value, .n = strlen(value)};
}

gradd_attr_t gradd_make_ints(const char *name, const int64_t *values, size_t n) {
    return (gradd_attr_t){.name = name, .kind = GRADD_ATTR_INTS, .ints = values, .n = n};
}

gradd_attr_t gradd_make_floats(const char *name, const double *values, size_t n) {
    return (gradd_attr_t){.name = name, .kind = GRADD_ATTR_FLOATS, .floats = values, .n = n};
}

const gradd_type_t *gradd_val_type(gradd_builder_t *b, gradd_val_t value) {
    static const gradd_type_t none;
    return b->status || value == GRADD_NONE ? &none : b->type(b, value);
}

gradd_val_t gradd_const_scalar(gradd_builder_t *b, gradd_dtype_t dtype, double value) {
    if (b->status) return GRADD_NONE;
    gradd_type_t type = {.dtype = dtype};
    union {
        float f32;
        gradd_bf16_t bf16;
        gradd_f16_t f16;
        double f64;
        int32_t i32;
        int64_t i64;
    } u;
    switch (dtype) {
    case GRADD_DT_F32:
        u.f32 = (float)value;
        break;
    case GRADD_DT_BF16:
        u.bf16 = gradd_f32_bf16((float)value);
        break;
    case GRADD_DT_F16:
        u.f16 = gradd_f32_f16((float)value);
        break;
    case GRADD_DT_F64:
        u.f64 = value;
        break;
    case GRADD_DT_I32:
        u.i32 = (int32_t)value;
        break;
    case GRADD_DT_I64:
        u.i64 = (int64_t)value;
        break;
    default:
        b->status = GRADD_FAIL(UNSUPPORTED, "no scalar constant of element type %s",
                               gradd_dtype_name(dtype));
        return GRADD_NONE;
    }
    return b->constant(b, &type, &u);
}

gradd_val_t gradd_const_i64s(gradd_builder_t *b, const int64_t *values, int n) {
    if (b->status) return GRADD_NONE;
    gradd_type_t type = {.dtype = GRADD_DT_I64, .rank = 1, .dims = {n}};
    return b->constant(b, &type, values);
}

gradd_val_t gradd_reshape_to(gradd_builder_t *b, gradd_val_t value, const int64_t *dims, int rank) {
    if (b->status || value == GRADD_NONE) return GRADD_NONE;
    const gradd_type_t *type = gradd_val_type(b, value);
    gradd_type_t want = {.dtype = type->dtype, .rank = rank};
    memcpy(want.dims, dims, sizeof dims[0] * (size_t)rank);
    if (gradd_type_same_shape(type, &want)) return value;
    /* allowzero: a zero dimension means zero here, not "copy" */
    gradd_attr_t attr = gradd_make_int("allowzero", 1);
    gradd_val_t in[2] = {value, gradd_const_i64s(b, dims, rank)};
    return gradd_emit_attrs(b, "Reshape", in, 2, &attr, 1);
}

gradd_val_t gradd_reshape_as(gradd_builder_t *b, gradd_val_t value, gradd_val_t like) {
    if (b->status || value == GRADD_NONE) return GRADD_NONE;
    gradd_type_t type = *gradd_val_type(b, like);
    return gradd_reshape_to(b, value, type.dims, type.rank);
}

gradd_val_t gradd_transpose(gradd_builder_t *b, gradd_val_t value, const int64_t *perm, int rank) {
    if (b->status || value == GRADD_NONE) return GRADD_NONE;
    gradd_attr_t attr = gradd_make_ints("perm", perm, (size_t)rank);
    return gradd_emit_attrs(b, "Transpose", &value, 1, &attr, 1);
}

gradd_val_t gradd_reduce_to(gradd_builder_t *b, gradd_val_t grad, gradd_val_t like) {
    if (b->status || grad == GRADD_NONE) return GRADD_NONE;
    gradd_type_t from = *gradd_val_type(b, grad), to = *gradd_val_type(b, like);
    if (gradd_type_same_shape(&from, &to)) return grad;
    int64_t axes[GRADD_MAX_RANK];
    int n = 0, lead = from.rank - to.rank;
    for (int i = 0; i < from.rank; i++)
        if (i < lead || (to.dims[i - lead] == 1 && from.dims[i] != 1)) axes[n++] = i;
    if (n) {
        gradd_attr_t attr = gradd_make_int("keepdims", 1);
        gradd_val_t in[2] = {grad, gradd_const_i64s(b, axes, n)};
        grad = gradd_emit_attrs(b, "ReduceSum", in, 2, &attr, 1);
    }
    return gradd_reshape_as(b, grad, like);
}

gradd_val_t gradd_filled(gradd_builder_t *b, const gradd_type_t *type, double value) {
    gradd_val_t in[2] = {gradd_const_scalar(b, type->dtype, value),
                         gradd_const_i64s(b, type->dims, type->rank)};
    return b->status ? GRADD_NONE : gradd_emit_attrs(b, "Expand", in, 2, NULL, 0);
}

gradd_val_t gradd_zeros_like(gradd_builder_t *b, gradd_val_t like) {
    if (b->status) return GRADD_NONE;
    const gradd_type_t type = *gradd_val_type(b, like);
    return gradd_filled(b, &type, 0);
}

gradd_val_t gradd_slice(gradd_builder_t *b, gradd_val_t v, int64_t axis, int64_t start, int64_t end,
                        int64_t step) {
    if (b->status || v == GRADD_NONE) return GRADD_NONE;
    if (axis < 0) axis += gradd_val_type(b, v)->rank;
    return GRADD_EMIT(b, "Slice", v, gradd_const_i64s(b, &start, 1), gradd_const_i64s(b, &end, 1),
                      gradd_const_i64s(b, &axis, 1), gradd_const_i64s(b, &step, 1));
}

gradd_val_t gradd_cast(gradd_builder_t *b, gradd_val_t v, gradd_dtype_t dtype) {
    if (b->status || v == GRADD_NONE || gradd_val_type(b, v)->dtype == dtype) return v;
    gradd_attr_t to = gradd_make_int("to", dtype);
    return gradd_emit_attrs(b, "Cast", &v, 1, &to, 1);
}

gradd_val_t gradd_wide(gradd_builder_t *b, gradd_val_t v) {
    const bool narrow = gradd_dtype_is_half(gradd_val_type(b, v)->dtype);
    return narrow ? gradd_cast(b, v, GRADD_DT_F32) : v;
}

/* Whether a number has that value in the type, or is none of a half. */
static bool holds(gradd_dtype_t dtype, double value) {
    if (dtype == GRADD_DT_BF16) return gradd_bf16_f32(gradd_f32_bf16((float)value)) == value;
    if (dtype == GRADD_DT_F16) return gradd_f16_f32(gradd_f32_f16((float)value)) == value;
    return true;
}

gradd_val_t gradd_scaled(gradd_builder_t *b, gradd_val_t v, double factor) {
    if (b->status || v == GRADD_NONE) return GRADD_NONE;
    const gradd_dtype_t dtype = gradd_val_type(b, v)->dtype;
    if (!holds(dtype, factor))
        return gradd_cast(b, gradd_scaled(b, gradd_wide(b, v), factor), dtype);
    return GRADD_EMIT(b, "Mul", v, gradd_const_scalar(b, dtype, factor));
}

gradd_val_t gradd_reduce_from(gradd_builder_t *b, const char *op, gradd_val_t v, int first) {
    int64_t axes[GRADD_MAX_RANK];
    const int rank = gradd_val_type(b, v)->rank;
    if (b->status || v == GRADD_NONE) return GRADD_NONE;
    for (int i = first; i < rank; i++)
        axes[i - first] = i;
    gradd_attr_t keep = gradd_make_int("keepdims", 1);
    gradd_val_t in[2] = {v, gradd_const_i64s(b, axes, rank - first)};
    return gradd_emit_attrs(b, op, in, 2, &keep, 1);
}

gradd_val_t gradd_concat(gradd_builder_t *b, const gradd_val_t *in, int n, int64_t axis) {
    if (n > GRADD_OP_MAX_IN) {
        gradd_val_t parts[GRADD_OP_MAX_IN];
        const int each = (n + GRADD_OP_MAX_IN - 1) / GRADD_OP_MAX_IN;
        int n_parts = 0;
        for (int from = 0; from < n; from += each)
            parts[n_parts++] = gradd_concat(b, in + from, n - from < each ? n - from : each, axis);
        return gradd_concat(b, parts, n_parts, axis);
    }
    gradd_attr_t attr = gradd_make_int("axis", axis);
    return gradd_emit_attrs(b, "Concat", in, n, &attr, 1);
}
