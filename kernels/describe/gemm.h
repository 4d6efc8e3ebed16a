/* The description of a matrix product, for every device: sizes and strides, and those of the
 * operators that are matrix products.
 *
 * C[batch, m, n] = alpha * A[batch, m, k] B[batch, k, n] (+ bias[n]) (+ C). Every operand has its
 * own strides in elements, so a transposed matrix or a broadcast batch (stride 0) costs nothing to
 * describe.
 */
#ifndef GRADD_KERNELS_DESCRIBE_GEMM_H
#define GRADD_KERNELS_DESCRIBE_GEMM_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/contract/kernel.h"
#include "kernels/math/host_device.h"
#include "shm/dtype.h"
#include "shm/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GRADD_GEMM_BATCH_RANK GRADD_MAX_RANK

typedef struct gradd_gemm_s {
    gradd_dtype_t dtype;  /* a float, I32 or I64; of all operands */
    gradd_dtype_t result; /* of C: NONE = dtype; F32 goes with BF16 and F16 operands too */
    int batch_rank;       /* batch dimensions, outermost first */
    int64_t batch[GRADD_GEMM_BATCH_RANK];
    int64_t a_batch[GRADD_GEMM_BATCH_RANK], b_batch[GRADD_GEMM_BATCH_RANK]; /* strides, 0 allowed */
    int64_t m, n, k;
    int64_t a_m, a_k; /* strides; one of the two is 1 */
    int64_t b_k, b_n;
    double alpha;
    bool accumulate; /* add to what C holds */
    bool has_bias;   /* one row of n elements, added to every row of C; needs alpha 1 */
    int threads;     /* 0 = as many as OpenMP would take now */
    int parts;       /* the CPU's prepare makes about so many; 0 = one */
    int64_t c_m;     /* of oneDNN's products alone: from row to row of C; 0 = n */
} gradd_gemm_t;      /* C is row-major, and contiguous without c_m */

/* Merges batch dimensions and folds a batch of rows into m where strides allow. Idempotent; the
 * products call it themselves. */
void gradd_gemm_simplify(gradd_gemm_t *g);

GRADD_HD gradd_dtype_t gradd_gemm_result(const gradd_gemm_t *g) {
    return g->result ? g->result : g->dtype;
}

/* Element offsets of one matrix of the batch. */
GRADD_HD void gradd_gemm_offsets(const gradd_gemm_t *g, int64_t index, int64_t *a, int64_t *b) {
    *a = *b = 0;
    for (int i = g->batch_rank - 1; i >= 0; i--) {
        *a += index % g->batch[i] * g->a_batch[i];
        *b += index % g->batch[i] * g->b_batch[i];
        index /= g->batch[i];
    }
}

GRADD_HD int64_t gradd_gemm_batches(const gradd_gemm_t *g) {
    int64_t count = 1;
    for (int i = 0; i < g->batch_rank; i++)
        count *= g->batch[i];
    return count;
}

/* Products of MatMul and FusedMatMul, Gemm, and Linear with these operands. */
gradd_gemm_t gradd_gemm_of_matmul(const gradd_view_t *in, const gradd_type_t *out,
                                  gradd_attrs_t attrs);
/* With `accumulate` the result holds beta times in[2] before, as it is spread over all rows. */
gradd_gemm_t gradd_gemm_of_gemm(const gradd_view_t *in, int n_in, const gradd_type_t *out,
                                gradd_attrs_t attrs);
gradd_gemm_t gradd_gemm_of_linear(const gradd_view_t *in, const gradd_type_t *out,
                                  gradd_attrs_t attrs);

/* Vectors become a row (left) or a column (right); out gets the dimensions back that MatMul drops.
 */
void gradd_gemm_matrices(gradd_type_t *a, gradd_type_t *b, gradd_type_t *out);

/* Operations: 2 m n k with k from the left operand; a bias is one addition per element. */
void gradd_gemm_cost(const gradd_infer_t *c, gradd_cost_t *cost);

#ifdef __cplusplus
}
#endif
#endif
