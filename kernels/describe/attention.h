/* Attention's numbers: what the attributes and ranges of its operators mean.
 *
 * Passes write them, every device's kernels read them. The operators are in
 * kernels/ops/attention/attention.c.
 */
#ifndef GRADD_KERNELS_DESCRIBE_ATTENTION_H
#define GRADD_KERNELS_DESCRIBE_ATTENTION_H

#include "kernels/contract/op.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Three numbers per query: first and one past the last key that the mask allows, and one of these.
 * A query without any key has the range [0, n_k). */
enum {
    GRADD_ATTN_HOLES = 0, /* some keys in between are masked: the mask must be read */
    GRADD_ATTN_SOLID = 1,
    GRADD_ATTN_NONE = 2, /* nothing is allowed */
};

/* What a mask takes away from a masked key. Its score is `fill` plus what is left, and what is left
 * gets a gradient. A product that is left is absorbed by the fill and not looked at.
 *
 *   both     Where(mask, qk + bias, fill)
 *   score    Where(mask, qk, fill) + bias
 *   bias     qk + Where(mask, bias, fill)
 *   none     qk + bias + Where(mask, 0, fill)
 *   floor    Max(qk + bias, fill) with the mask bias > fill, or Max(the form before, fill); with
 *            both other bits. As with Max, a hidden key passes half of its gradient on, one whose
 *            bias is below the fill nothing.
 */
enum {
    GRADD_ATTN_HIDES_SCORE = 1,
    GRADD_ATTN_HIDES_BIAS = 2,
    GRADD_ATTN_FLOOR = 4,
};

/* A fill below this is next to nothing beside any score, and absorbs what it is added to. One above
 * it must take the place of the product (HIDES_SCORE); it has a share where no allowed score is
 * clearly higher. */
#define GRADD_ATTN_MASKED (-1e30)

/* Bits of the operators' attribute `layout`: what is [B, positions, heads, width]. */
enum {
    GRADD_ATTN_Q_TURNED = 1,
    GRADD_ATTN_K_TURNED = 2,
    GRADD_ATTN_V_TURNED = 4,
    GRADD_ATTN_Y_TURNED = 8,
};

/* The row's expansion (kernels/describe/attention_expand.c): products, a softmax and what lies
 * between. */
gradd_status_t gradd_attention_expand(gradd_expand_t *x);
/* Heads of [B, K, N, D] repeated so that there are H of them, each K's in a row. */
gradd_val_t gradd_attention_repeat(gradd_builder_t *b, gradd_val_t v, int64_t heads);

#ifdef __cplusplus
}
#endif
#endif
