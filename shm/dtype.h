/* Element types: one list with size, ONNX code and the short name used on the wire.
 *
 * The numeric value of GRADD_DT_x is its ONNX TensorProto.DataType code, so that one number means
 * the same thing in a model file, in a message and in C.
 */
#ifndef GRADD_SHM_DTYPE_H
#define GRADD_SHM_DTYPE_H

#include <stddef.h>
#include <stdint.h>

#include "shm/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* X(enumerator, ONNX code, bytes, short name, is a float, is a signed or unsigned integer) */
#define GRADD_DTYPE_MAP(X)                                                                         \
    X(F32, 1, 4, "f32", 1, 0)                                                                      \
    X(U8, 2, 1, "u8", 0, 1)                                                                        \
    X(I8, 3, 1, "i8", 0, 1)                                                                        \
    X(U16, 4, 2, "u16", 0, 1)                                                                      \
    X(I16, 5, 2, "i16", 0, 1)                                                                      \
    X(I32, 6, 4, "i32", 0, 1)                                                                      \
    X(I64, 7, 8, "i64", 0, 1)                                                                      \
    X(BOOL, 9, 1, "bool", 0, 0)                                                                    \
    X(F16, 10, 2, "f16", 1, 0)                                                                     \
    X(F64, 11, 8, "f64", 1, 0)                                                                     \
    X(U32, 12, 4, "u32", 0, 1)                                                                     \
    X(U64, 13, 8, "u64", 0, 1)                                                                     \
    X(BF16, 16, 2, "bf16", 1, 0)

typedef enum gradd_dtype_e {
    GRADD_DT_NONE = 0,
#define X(name, onnx, bytes, text, flt, integer) GRADD_DT_##name = onnx,
    GRADD_DTYPE_MAP(X)
#undef X
        GRADD_DT_END = 32 /* all codes are below; GRADD_DTB masks are 32 bits */
} gradd_dtype_t;

/* Bit of a dtype in an accepted-set mask. */
#define GRADD_DTB(name) (1u << GRADD_DT_##name)

/* Bytes of one element; 0 for an unknown code. */
size_t gradd_dtype_bytes(gradd_dtype_t dtype);
/* Short name ("f32"); "?" for an unknown code. */
const char *gradd_dtype_name(gradd_dtype_t dtype);
int gradd_dtype_is_float(gradd_dtype_t dtype);
int gradd_dtype_is_int(gradd_dtype_t dtype);
/* The floats of 16 bits, which are computed with in f32. */
int gradd_dtype_is_half(gradd_dtype_t dtype);

/* A library for devices may do without f64, and without both halves (TYPES in mk/train.mk): what
 * computes in them stands behind these and gradd_dtype_is_half, so that the compiler leaves it out,
 * and a node with such a tensor is refused (kernels/contract/registry.c). */
#ifdef GRADD_NO_F64
#define GRADD_HAS_F64 0
#else
#define GRADD_HAS_F64 1
#endif
#ifdef GRADD_NO_HALVES
#define GRADD_HAS_HALVES           0
#define gradd_dtype_is_half(dtype) ((void)(dtype), 0)
#else
#define GRADD_HAS_HALVES 1
#endif
static inline int gradd_dtype_is_f64(gradd_dtype_t dtype) {
    return GRADD_HAS_F64 && dtype == GRADD_DT_F64;
}
static inline int gradd_dtype_is_built(gradd_dtype_t dtype) {
    return (GRADD_HAS_F64 || dtype != GRADD_DT_F64) &&
           (GRADD_HAS_HALVES || (dtype != GRADD_DT_F16 && dtype != GRADD_DT_BF16));
}
/* GRADD_DT_NONE if no dtype has that short name. */
gradd_dtype_t gradd_dtype_from_name(const char *name, size_t length);
/* Fails with UNSUPPORTED for a code that is not in the list. */
gradd_status_t gradd_dtype_check(int64_t onnx_code, gradd_dtype_t *out_dtype);

#ifdef __cplusplus
}
#endif
#endif
