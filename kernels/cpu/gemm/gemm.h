/* Matrix products on the CPU: one small interface over oneDNN and over our own blocked product.
 *
 * C[batch, m, n] = alpha * A[batch, m, k] B[batch, k, n] (+ bias[n]) (+ C). Every operand has its
 * own strides in elements, so a transposed matrix or a broadcast batch (stride 0) costs nothing to
 * describe. f32 goes to oneDNN, and so does bf16 where the processor multiplies it. Everything
 * else, and everything in builds without oneDNN, goes to our own loops, as do products for which
 * oneDNN has no fast implementation. bf16 and f16 are summed in f32 and rounded once.
 *
 * A product is prepared once and then called often: its primitive costs some 90 KiB and a fraction
 * of a millisecond, and scratch of the library is the caller's memory. The same description, inputs
 * and thread count give the same bits. Any thread; a product that is ready serves one at a time.
 */
#ifndef GRADD_KERNELS_CPU_GEMM_GEMM_H
#define GRADD_KERNELS_CPU_GEMM_GEMM_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/contract/kernel.h"
#include "kernels/describe/gemm.h"
#include "shm/dtype.h"
#include "shm/tensor.h"

gradd_status_t gradd_gemm_prepare(const gradd_gemm_t *g, gradd_prepared_t *out);
void gradd_gemm_unprepare(gradd_prepared_t *prepared);
/* All parts. `state` and `workspace` are those of prepare; the number of threads is the same as
 * there. */
gradd_status_t gradd_gemm(const void *state, const void *a, const void *b, const void *bias,
                          void *c, void *workspace);
typedef struct gradd_gemm_operands_s {
    const void *a, *b, *bias; /* bias: NULL = none */
    void *c, *workspace;
} gradd_gemm_operands_t;

/* One part, of which prepare has set the number: a tile of C, a step of its sums, or some matrices
 * of the batch. In order, with the same workspace. */
gradd_status_t gradd_gemm_part(const void *state, int part, const gradd_gemm_operands_t *o);
/* The definition: plain loops, sums in double (integers: int64). */
gradd_status_t gradd_gemm_ref(const gradd_gemm_t *g, const void *a, const void *b, const void *bias,
                              void *c);
/* Our own blocked, threaded product, whatever gradd_gemm uses; floats. Its scratch. */
size_t gradd_gemm_blocked_workspace(const gradd_gemm_t *g);
gradd_status_t gradd_gemm_blocked(const gradd_gemm_t *g, const void *a, const void *b,
                                  const void *bias, void *c, void *workspace);
/* Whether this processor and build multiply bf16 directly; otherwise operands are widened to f32,
 * which is not faster than f32. */
bool gradd_gemm_bf16_native(void);
/* "oneDNN 3.2.0" or "blocked". */
const char *gradd_gemm_library(void);

/* Rows of an operator that is one product of in[0] and in[1]. */
#define GRADD_GEMM_KERNELS(title, ...)                                                             \
    GRADD_KERNEL(title, "oneDNN f32", .types = {GRADD_DTB(F32)}, .accepts = gradd_gemm_accepts,    \
                 .unprepare = gradd_gemm_unprepare, .makes_parts = true, __VA_ARGS__),             \
        GRADD_KERNEL(title, "oneDNN bf16", .types = {GRADD_DTB(BF16)},                             \
                     .accepts = gradd_gemm_accepts, .unprepare = gradd_gemm_unprepare,             \
                     .makes_parts = true, __VA_ARGS__),                                            \
        GRADD_KERNEL(title, "blocked f32", .types = {GRADD_DTB(F32)},                              \
                     .unprepare = gradd_gemm_unprepare, .makes_parts = true, __VA_ARGS__),         \
        GRADD_KERNEL(title, "blocked f32 of bf16", .types = {GRADD_DTB(BF16)},                     \
                     .unprepare = gradd_gemm_unprepare, .makes_parts = true, __VA_ARGS__),         \
        GRADD_KERNEL(title, "blocked f32 of f16", .types = {GRADD_DTB(F16)},                       \
                     .unprepare = gradd_gemm_unprepare, .makes_parts = true, __VA_ARGS__),         \
        GRADD_KERNEL(title, "blocked f64", .types = {GRADD_DTB(F64)},                              \
                     .unprepare = gradd_gemm_unprepare, .makes_parts = true, __VA_ARGS__)
/* Whether oneDNN multiplies the type of in[0] fast. */
bool gradd_gemm_accepts(const gradd_infer_t *c);

#endif
