/* The part of LinearCrossEntropy that is the same on every device: operands, attributes, sizes, and
 * the products of a chunk of rows. kernels/ops/product/linear.c defines the operator.
 *
 * The logits of a chunk lie in scratch memory, become their gradient there, and go into the
 * gradients of rows and weight before the next chunk. So the scratch memory has one chunk of
 * logits, and no product is computed twice.
 *
 * In bf16 the weight's gradient is summed in f32, and rounded once at the end. From chunk to chunk
 * 24 bits of a sum are kept, which is 2^-8 of what the rounding at the end takes: 16 in the
 * gradient's own memory and 8 in scratch memory (math/split_sum.h). It is summed block by block of
 * its rows, so that a block in f32 stays in a cache between its reads and its writes.
 */
#ifndef GRADD_KERNELS_DESCRIBE_HEAD_H
#define GRADD_KERNELS_DESCRIBE_HEAD_H

#include "kernels/contract/kernel.h"
#include "kernels/describe/gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Operands and results. */
enum {
    GRADD_HEAD_X,
    GRADD_HEAD_W,
    GRADD_HEAD_LABELS,
    GRADD_HEAD_BIAS,
    GRADD_HEAD_ITEMS,
    GRADD_HEAD_CLASSES, /* weights of the classes */
    GRADD_HEAD_WEIGHTS, /* per row: what its loss is multiplied by */
    GRADD_HEAD_SQUARES, /* per row: what the square of its log-sum-exp is multiplied by */
    GRADD_HEAD_INPUTS
};
enum { GRADD_HEAD_LOSS, GRADD_HEAD_DX, GRADD_HEAD_DW, GRADD_HEAD_DBIAS };

/* Attributes beside those of CrossEntropy (cross_entropy.h). */
#define GRADD_HEAD_TRANS   "transB"  /* 1: the weight is [V, K] */
#define GRADD_HEAD_SOFTCAP "softcap" /* float, 0 = none */
#define GRADD_HEAD_SCALE   "scale"   /* float, 1: of the logits */
#define GRADD_HEAD_CHUNK   "chunk"   /* rows at a time; 0 = all */

typedef struct gradd_head_s {
    gradd_dtype_t dtype;
    size_t bytes;      /* of an element */
    int64_t rows;      /* of x */
    int64_t positions; /* the last row of so many has no label; 0 = all have one */
    int64_t k, v;      /* widths of x and of the logits */
    bool trans, bias, squares;
    bool dx, dw, dbias; /* wanted results */
    bool ignores;       /* rows with a label may not count */
    double softcap, scale;
    int64_t dw_rows, dw_cols; /* of the weight's gradient */
} gradd_head_t;

void gradd_head_describe(const gradd_infer_t *c, gradd_head_t *out);
/* Type of the logits. W is [V, K] with transB, else [K, V]. */
gradd_type_t gradd_head_logits(const gradd_view_t *in, gradd_attrs_t attrs);
/* Whether operand i is there. */
bool gradd_head_has(const gradd_view_t *in, int n_in, int i);
/* Rows of a chunk, where so many count: of equal length, so that none is short. */
int64_t gradd_head_chunk(gradd_attrs_t attrs, int64_t rows);
/* Rows of a block of the weight's gradient that has about so many bytes in f32. */
int64_t gradd_head_block(const gradd_head_t *h, int64_t bytes);

/* x W + b, dz W^T for `rows` rows, and `block` rows of dW from `rows` rows, over what the sums hold
 * or added to it. dW is z^T x, or x^T z: both lie row by row, and are read as columns on the left.
 */
gradd_gemm_t gradd_head_logits_product(const gradd_head_t *h, int64_t rows);
gradd_gemm_t gradd_head_rows_product(const gradd_head_t *h, int64_t rows);
gradd_gemm_t gradd_head_weight_product(const gradd_head_t *h, int64_t rows, int64_t block,
                                       bool first);

/* 2 m n k for each product. With each further chunk the weight is read once more for logits and
 * rows, and the sums of its gradient are read and written. */
void gradd_head_cost(const gradd_infer_t *c, gradd_cost_t *cost);

#ifdef __cplusplus
}
#endif
#endif
