/* A call of attention, for every device: operands, strides and attributes of FusedAttention and
 * FusedAttentionGrad as one description. kernels/ops/attention/attention.c says what they mean.
 */
#ifndef GRADD_KERNELS_DESCRIBE_ATTENTION_CALL_H
#define GRADD_KERNELS_DESCRIBE_ATTENTION_CALL_H

#include "kernels/contract/kernel.h"
#include "kernels/describe/attention.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gradd_attn_side_s {
    void *data;               /* Borrowed; NULL = absent or not wanted */
    int64_t batch, head, row; /* strides in elements; along a row elements are neighbours */
} gradd_attn_side_t;

typedef struct gradd_attn_extra_s {
    const void *data;              /* Borrowed; NULL = absent */
    int64_t batch, head, row, col; /* strides in elements, 0 = broadcast */
} gradd_attn_extra_t;

typedef struct gradd_attn_drop_s {
    bool active;
    uint64_t seed, node;
    uint64_t limit; /* an element is kept if its word is not below; > UINT32_MAX = none is */
    double scale;   /* 1 / (1 - p) */
} gradd_attn_drop_t;

/* Where q, and k and v, hold live rows alone: their numbers among all rows, none negative, of
 * sequences of so many positions. Dropout's bits and the bias are those of the pair of positions
 * among all rows. NULL = all rows. */
typedef struct gradd_attn_rows_s {
    const int64_t *q, *k; /* both or none */
    int64_t positions, key_positions;
} gradd_attn_rows_t;

typedef struct gradd_attn_s {
    gradd_dtype_t dtype; /* of q, k, v, y and their gradients; all else is f64 for F64, or f32 */
    int64_t batch, heads, kv_heads, n_q, n_k, d, d_v;
    gradd_attn_side_t q, k, v, y, dy, dq, dk, dv;
    void *stats;              /* [B, H, 2, n_q]: largest score, logarithm; NULL = not wanted */
    gradd_attn_extra_t mask;  /* bytes; col is 1 */
    gradd_attn_extra_t range; /* int32_t, three per row; required with a mask; col is unused */
    gradd_attn_extra_t bias;  /* added to the scaled and capped scores; of all rows */
    const void *sinks;        /* [H], one more score per head that looks at nothing; NULL = none */
    bool sunk;                /* whether there are such: backward finds them in stats */
    void *dbias;              /* of the bias's shape, cleared by the caller; NULL = not wanted */
    double scale, softcap;    /* softcap 0 = none: else c tanh(score / c) */
    double fill;              /* in place of what the mask hides; -inf is one, too */
    int hides;                /* bits of GRADD_ATTN_HIDES_... */
    bool zero;                /* a query without any allowed key gives zero, without gradients */
    gradd_attn_drop_t drop;
    gradd_attn_rows_t rows; /* with a range, without a mask */
    bool pairs;             /* multiply bf16 in pairs; needs gradd_attn_pairs */
    int threads;            /* at most so many work; 0 = as many as the process may use */
    int part, parts;        /* of the CPU's work: this one, of so many; 0 = all of it */
} gradd_attn_t;

/* Places of the operands that both have. */
typedef struct gradd_attn_places_s {
    int q, k, v, mask, bias, ranges, rows, key_rows;
} gradd_attn_places_t;
extern const gradd_attn_places_t gradd_attn_forward_at, gradd_attn_backward_at;

bool gradd_attn_given(const gradd_view_t *in, int n_in, int i);
/* Type, sizes, and the sides of q, k and v. */
void gradd_attn_describe_sizes(gradd_attn_t *p, const gradd_view_t *in,
                               const gradd_attn_places_t *at, int64_t layout);
/* Fills in everything that operands and attributes say, except results, dropout and the lists of
 * live rows. */
void gradd_attn_describe(gradd_attn_t *p, const gradd_view_t *in, int n_in,
                         const gradd_attn_places_t *at, gradd_attrs_t attrs);
/* Launches; the lists of live rows, and ranges of a mask that has none, are the kernel's to add. */
gradd_attn_t gradd_attn_of_forward(const gradd_launch_t *r);
gradd_attn_t gradd_attn_of_backward(const gradd_launch_t *r);

/* Strides of something that broadcasts to [B, H, Q, N]. */
gradd_attn_extra_t gradd_attn_extra_of(const gradd_view_t *v);
/* Rows of a mask, each of n_k bytes. */
int64_t gradd_attn_mask_rows(const gradd_type_t *mask);
/* Of a mask that comes without ranges, so that a kernel makes them itself; else 0. */
int64_t gradd_attn_own_ranges(const gradd_view_t *in, int n_in, const gradd_attn_places_t *at);
/* The exclusive upper bound of live rows; that of their keys is INT32_MAX. */
int64_t gradd_attn_row_limit(const gradd_attn_t *p, const gradd_view_t *in,
                             const gradd_attn_places_t *at);

/* Of rows of FusedAttention and of its gradient. */
void gradd_attn_cost(const gradd_infer_t *c, gradd_cost_t *cost);
void gradd_attn_grad_cost(const gradd_infer_t *c, gradd_cost_t *cost);

#ifdef __cplusplus
}
#endif
#endif
