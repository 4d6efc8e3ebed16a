/* The contract of FusedAttention and FusedAttentionGrad: the order of operands and results, the
 * names of attributes, and what their numbers mean.
 *
 * Passes and live rows write these nodes, the gradient rule and the expansion rewrite them, and
 * every device's kernels read them; all of them use these names. The mathematics is in
 * kernels/ops/attention/attention.c.
 */
#ifndef GRADD_KERNELS_DESCRIBE_ATTENTION_H
#define GRADD_KERNELS_DESCRIBE_ATTENTION_H

#include "kernels/contract/op.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Operands of FusedAttention; those from MASK on may be absent. */
enum {
    GRADD_ATTN_Q,
    GRADD_ATTN_K,
    GRADD_ATTN_V,
    GRADD_ATTN_MASK,
    GRADD_ATTN_BIAS,
    GRADD_ATTN_RANGES,
    GRADD_ATTN_SINKS,
    GRADD_ATTN_ROWS,     /* numbers of the live rows that q holds */
    GRADD_ATTN_KEY_ROWS, /* the same of k and v */
    GRADD_ATTN_INPUTS
};
enum { GRADD_ATTN_Y, GRADD_ATTN_STATS, GRADD_ATTN_OUTPUTS };

/* Operands of FusedAttentionGrad; those from MASK on may be absent. */
enum {
    GRADD_ATTN_GRAD_DY,
    GRADD_ATTN_GRAD_Q,
    GRADD_ATTN_GRAD_K,
    GRADD_ATTN_GRAD_V,
    GRADD_ATTN_GRAD_Y,
    GRADD_ATTN_GRAD_STATS,
    GRADD_ATTN_GRAD_MASK,
    GRADD_ATTN_GRAD_BIAS,
    GRADD_ATTN_GRAD_RANGES,
    GRADD_ATTN_GRAD_ROWS,
    GRADD_ATTN_GRAD_KEY_ROWS,
    GRADD_ATTN_GRAD_INPUTS
};
enum { GRADD_ATTN_DQ, GRADD_ATTN_DK, GRADD_ATTN_DV, GRADD_ATTN_DBIAS, GRADD_ATTN_GRAD_OUTPUTS };

/* The operand of MaskRanges. */
enum { GRADD_MASK_RANGES_MASK };

/* Attributes of both, all optional. */
#define GRADD_ATTN_SCALE         "scale"         /* float, 1 */
#define GRADD_ATTN_SOFTCAP       "softcap"       /* float, 0 = none */
#define GRADD_ATTN_DROPOUT       "dropout"       /* float, a probability */
#define GRADD_ATTN_FILL          "fill"          /* float: the score of a masked key */
#define GRADD_ATTN_HIDES         "hides"         /* bits, see below */
#define GRADD_ATTN_ZERO          "zero"          /* 1: a query without keys gives zero */
#define GRADD_ATTN_LAYOUT        "layout"        /* bits, see below */
#define GRADD_ATTN_SUNK          "sunk"          /* of the gradient: stats hold sinks */
#define GRADD_ATTN_NODE          "node"          /* coordinate of the random numbers */
#define GRADD_ATTN_POSITIONS     "positions"     /* of a sequence, with ROWS */
#define GRADD_ATTN_KEY_POSITIONS "key_positions" /* of a sequence of keys; as POSITIONS */
#define GRADD_ATTN_ATTRS         11              /* how many there are */

/* Three numbers per query: first and one past the last key that the mask allows, and one of these.
 * A query without any key has the range [0, n_k). */
enum {
    GRADD_ATTN_HOLES = 0, /* some keys in between are masked: the mask must be read */
    GRADD_ATTN_SOLID = 1,
    GRADD_ATTN_NONE = 2, /* nothing is allowed */
};

/* Bits of HIDES: what a mask takes away from a masked key. Its score is `fill` plus what is left,
 * and what is left gets a gradient. A product that is left is absorbed by the fill and not looked
 * at.
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

/* Bits of LAYOUT: what is [B, positions, heads, width]. */
enum {
    GRADD_ATTN_Q_TURNED = 1,
    GRADD_ATTN_K_TURNED = 2,
    GRADD_ATTN_V_TURNED = 4,
    GRADD_ATTN_Y_TURNED = 8,
    GRADD_ATTN_ALL_TURNED = 15,
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
