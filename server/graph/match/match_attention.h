/* Attention as models write it, seen from the last product upwards. See match_attention.c. */
#ifndef GRADD_SERVER_GRAPH_MATCH_MATCH_ATTENTION_H
#define GRADD_SERVER_GRAPH_MATCH_MATCH_ATTENTION_H

#include "server/graph/match/match.h"
#include "server/graph/readers.h"

enum { MATCH_MAX_BIAS = 4 };

typedef struct match_bias_s {
    gradd_val_t value; /* float, broadcasts to the scores */
    double factor;
    bool hidden; /* by the mask */
} match_bias_t;

typedef struct match_attention_s {
    gradd_val_t q, k, v; /* [B, heads, positions, width], heads of k and v not repeated */
    bool k_turned;       /* k is [B, positions, heads, width]: one Transpose makes all of k^T */
    bool k_moved;        /* k is yet to be transposed, by `k_perm` */
    int64_t k_perm[4];
    gradd_val_t mask; /* boolean, or a float that counts as false if 0; GRADD_NONE = none */
    bool mask_hides;  /* true elements are the masked ones */
    double fill;      /* score of masked elements */
    int hides;        /* what it takes the place of: GRADD_ATTN_HIDES_... */
    match_bias_t bias[MATCH_MAX_BIAS]; /* added up */
    int n_bias;
    bool floor;          /* scores are at least `fill`, and the mask is bias > fill */
    gradd_val_t sinks;   /* float, one per head, of any shape; GRADD_NONE = none */
    gradd_dtype_t dtype; /* of q, k, v and the result */
    double scale, softcap, dropout;
    double outer; /* factor on what is masked already; part of scale in the end */
    int32_t drop; /* the Dropout node, -1 = none */
} match_attention_t;

/* Whether a node is MatMul(dropout(softmax(scores)), v). The probabilities must have no other
 * reader, before a cast or after it. */
bool match_attention(const graph_t *g, const graph_node_t *n, const graph_readers_t *readers,
                     match_attention_t *out);
/* [B, few, S, D] where v is Reshape(Expand(Unsqueeze(.))) of it, each head repeated in place, else
 * v itself. */
gradd_val_t match_unrepeated(const graph_t *g, gradd_val_t v);
/* Operand of a Transpose that swaps the two axes in the middle of four, or GRADD_NONE. */
gradd_val_t match_heads_swapped(const graph_t *g, gradd_val_t v);

#endif
