/* From a run-time element type to C types, by one macro.
 *
 *     GRADD_SWITCH_NUM(r->in[0].type.dtype, T, {
 *         const T *x = r->in[0].data;
 *         ...
 *     });
 *
 * instantiates the block once per type with T as its C type; inside, GRADD_ACC(T) is the type sums
 * are kept in, which is never narrower than the storage type. A type that is not in the list makes
 * the calling function return a failure, so the caller must return gradd_status_t. The block may
 * hold `return` and commas; a `break` leaves the block.
 *
 * GRADD_MULTIARCH marks a hot function that is compiled once more for 512-bit vectors and chosen
 * when the program starts. Put the loop into such a static function and call it from the parallel
 * region: OpenMP moves the body of a region into a function of its own, which would not be cloned.
 * Cloning is for loops that the compiler vectorises. A function with vectors of its own in it is
 * written twice, with GRADD_VECTOR_BYTES and, marked GRADD_WIDE, with GRADD_WIDE_BYTES, because
 * vectors that are longer than a register are kept in memory; GRADD_IS_WIDE() chooses.
 */
#ifndef GRADD_KERNELS_DESCRIBE_DISPATCH_H
#define GRADD_KERNELS_DESCRIBE_DISPATCH_H

#include <stdbool.h>
#include <stdint.h>

#include "shm/dtype.h"
#include "shm/status.h"

/* Below this many elements a loop runs in the calling thread. */
#define GRADD_PARALLEL_MIN 32768

#define GRADD_DISPATCH_CASE(name, ctype, T, ...)                                                   \
    case GRADD_DT_##name: {                                                                        \
        typedef ctype T;                                                                           \
        __VA_ARGS__                                                                                \
    } break;

#define GRADD_DISPATCH(dtype, cases)                                                               \
    switch ((int)(dtype)) {                                                                        \
        cases default : return GRADD_FAIL(UNSUPPORTED, "element type %s is not supported",         \
                                          gradd_dtype_name(dtype));                                \
    }

#if GRADD_HAS_F64
#define GRADD_CASE_F64(T, ...) GRADD_DISPATCH_CASE(F64, double, T, __VA_ARGS__)
#else
#define GRADD_CASE_F64(T, ...)
#endif
#define GRADD_CASES_FLOAT(T, ...)                                                                  \
    GRADD_DISPATCH_CASE(F32, float, T, __VA_ARGS__)                                                \
    GRADD_CASE_F64(T, __VA_ARGS__)
#define GRADD_CASES_INT(T, ...)                                                                    \
    GRADD_DISPATCH_CASE(I32, int32_t, T, __VA_ARGS__)                                              \
    GRADD_DISPATCH_CASE(I64, int64_t, T, __VA_ARGS__)
#define GRADD_CASES_BOOL(T, ...) GRADD_DISPATCH_CASE(BOOL, uint8_t, T, __VA_ARGS__)

#define GRADD_SWITCH_FLOAT(dtype, T, ...) GRADD_DISPATCH(dtype, GRADD_CASES_FLOAT(T, __VA_ARGS__))
#define GRADD_SWITCH_INT(dtype, T, ...)   GRADD_DISPATCH(dtype, GRADD_CASES_INT(T, __VA_ARGS__))
#define GRADD_SWITCH_NUM(dtype, T, ...)                                                            \
    GRADD_DISPATCH(dtype, GRADD_CASES_FLOAT(T, __VA_ARGS__) GRADD_CASES_INT(T, __VA_ARGS__))
#define GRADD_SWITCH_ALL(dtype, T, ...)                                                            \
    GRADD_DISPATCH(dtype, GRADD_CASES_FLOAT(T, __VA_ARGS__) GRADD_CASES_INT(T, __VA_ARGS__)        \
                              GRADD_CASES_BOOL(T, __VA_ARGS__))

/* Moving elements without looking at them: T is an unsigned type of `bytes` bytes. */
#define GRADD_SWITCH_BYTES(bytes, T, ...)                                                          \
    switch ((int)(bytes)) {                                                                        \
        GRADD_BYTES_CASE(1, uint8_t, T, __VA_ARGS__)                                               \
        GRADD_BYTES_CASE(2, uint16_t, T, __VA_ARGS__)                                              \
        GRADD_BYTES_CASE(4, uint32_t, T, __VA_ARGS__)                                              \
        GRADD_BYTES_CASE(8, uint64_t, T, __VA_ARGS__)                                              \
    default:                                                                                       \
        return GRADD_FAIL(INTERNAL, "elements of %d bytes", (int)(bytes));                         \
    }
#define GRADD_BYTES_CASE(size, ctype, T, ...)                                                      \
    case size: {                                                                                   \
        typedef ctype T;                                                                           \
        __VA_ARGS__                                                                                \
    } break;

/* Type of sums over T: floats are summed in double, integers in int64. */
#define GRADD_ACC(T)                                                                               \
    __typeof__(_Generic((T)0, float: (double)0, double: (double)0, default: (int64_t)0))

/* Length of a register on every machine that this build runs on. */
#if defined(__AVX512F__)
#define GRADD_VECTOR_BYTES 64
#elif defined(__AVX__)
#define GRADD_VECTOR_BYTES 32
#else
#define GRADD_VECTOR_BYTES 16
#endif

/* Set: GRADD_IS_WIDE() and attn_pairs_ready() are false. For tests, which compare the two on one
 * machine. */
extern bool gradd_narrow;

/* Clones need run-time resolvers, which run before a sanitizer is ready: not under sanitizers. Nor
 * where ARCH has 512-bit vectors anyway. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) &&                             \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && defined(__OPTIMIZE__) &&    \
    !defined(__AVX512F__) && !defined(GRADD_NO_WIDE)
#define GRADD_MULTIARCH  __attribute__((noinline, target_clones("arch=x86-64-v4", "default")))
#define GRADD_WIDE       __attribute__((target("arch=x86-64-v4")))
#define GRADD_WIDE_BYTES 64
#define GRADD_IS_WIDE()  (__builtin_cpu_supports("x86-64-v4") && !gradd_narrow)
#else
#define GRADD_MULTIARCH __attribute__((noinline))
#define GRADD_WIDE
#define GRADD_WIDE_BYTES GRADD_VECTOR_BYTES
#define GRADD_IS_WIDE()  false
#endif

/* Of a function whose products and sums are one operation, rounded once, where the machine has it.
 * clang has no such attribute, but a pragma that stands first in the function's block. */
#ifdef __clang__
#define GRADD_FUSED
#define GRADD_FUSED_BLOCK _Pragma("clang fp contract(fast)")
#else
#define GRADD_FUSED __attribute__((optimize("fp-contract=fast")))
#define GRADD_FUSED_BLOCK
#endif

#endif
