/* Helpers that keep gradient rules and expansions to a few lines. All follow the builder's sticky
 * failure: an operand GRADD_NONE gives GRADD_NONE. Called on the engine thread.
 */
#ifndef GRADD_KERNELS_RULES_RULES_H
#define GRADD_KERNELS_RULES_RULES_H

#include "kernels/contract/op.h"

/* Emits an operator without attributes and returns its first output. */
gradd_val_t gradd_emit_n(gradd_builder_t *b, const char *op, int n_in, const gradd_val_t *in);
#define GRADD_EMIT(b, op, ...)                                                                     \
    gradd_emit_n((b), (op), (int)(sizeof((gradd_val_t[]){__VA_ARGS__}) / sizeof(gradd_val_t)),     \
                 (gradd_val_t[]){__VA_ARGS__})
/* The same with attributes. */
gradd_val_t gradd_emit_attrs(gradd_builder_t *b, const char *op, const gradd_val_t *in, int n_in,
                             const gradd_attr_t *attrs, int n_attrs);

/* Attribute values for emit. The arrays must live until emit returns; the engine copies them. */
gradd_attr_t gradd_make_int(const char *name, int64_t value);
gradd_attr_t gradd_make_float(const char *name, double value);
gradd_attr_t gradd_make_string(const char *name, const char *value);
gradd_attr_t gradd_make_ints(const char *name, const int64_t *values, size_t n);
gradd_attr_t gradd_make_floats(const char *name, const double *values, size_t n);

const gradd_type_t *gradd_val_type(gradd_builder_t *b, gradd_val_t value);
/* Rank-0 constant of that dtype. */
gradd_val_t gradd_const_scalar(gradd_builder_t *b, gradd_dtype_t dtype, double value);
/* 1-D i64 constant. */
gradd_val_t gradd_const_i64s(gradd_builder_t *b, const int64_t *values, int n);

/* Sums a gradient down to the shape of `like`, undoing numpy broadcasting. */
gradd_val_t gradd_reduce_to(gradd_builder_t *b, gradd_val_t grad, gradd_val_t like);
/* Reshapes to the shape of `like`. */
gradd_val_t gradd_reshape_as(gradd_builder_t *b, gradd_val_t value, gradd_val_t like);
gradd_val_t gradd_reshape_to(gradd_builder_t *b, gradd_val_t value, const int64_t *dims, int rank);
gradd_val_t gradd_transpose(gradd_builder_t *b, gradd_val_t value, const int64_t *perm, int rank);
/* v[..., start:end:step, ...] along an axis, which may count from the end. */
gradd_val_t gradd_slice(gradd_builder_t *b, gradd_val_t v, int64_t axis, int64_t start, int64_t end,
                        int64_t step);
/* The value in that type: itself, or a Cast. */
gradd_val_t gradd_cast(gradd_builder_t *b, gradd_val_t v, gradd_dtype_t dtype);
/* The value in the type that sums have: f32 for bf16 and f16. GRADD_NONE stays GRADD_NONE. */
gradd_val_t gradd_wide(gradd_builder_t *b, gradd_val_t v);
/* The product of a value and a number, in the value's type; formed in f32 where a half would round
 * the number, which may be less than any half. */
gradd_val_t gradd_scaled(gradd_builder_t *b, gradd_val_t v, double factor);
/* ReduceSum, ReduceMean, ReduceMax ... over axes [first, rank), which are kept as 1. */
gradd_val_t gradd_reduce_from(gradd_builder_t *b, const char *op, gradd_val_t v, int first);
/* Concatenation of any number along an axis, which may count from the end. */
gradd_val_t gradd_concat(gradd_builder_t *b, const gradd_val_t *in, int n, int64_t axis);
/* That number in every element of a type. */
gradd_val_t gradd_filled(gradd_builder_t *b, const gradd_type_t *type, double value);
/* Zeros with the type of `like`. */
gradd_val_t gradd_zeros_like(gradd_builder_t *b, gradd_val_t like);

#endif
