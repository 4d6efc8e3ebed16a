/* Masks and biases between the two products of attention. Each of these functions strips one of
 * them: it records it in `f` and says where the scores continue. One mask is found, and a few
 * biases. */
#ifndef GRADD_SERVER_GRAPH_MATCH_MATCH_MASK_H
#define GRADD_SERVER_GRAPH_MATCH_MATCH_MASK_H

#include "server/graph/match/match_attention.h"

/* Scores under a mask: Where(mask, *rest, fill) or Where(mask, fill, *rest). */
bool match_masked_scores(const graph_t *g, const graph_node_t *n, match_attention_t *f,
                         gradd_val_t *rest);
/* A mask as a factor: Add(Mul(*rest, m), Mul(Sub(1, m), fill)), or Sub(., Mul(., -fill)). */
bool match_gate(const graph_t *g, gradd_val_t v, match_attention_t *f, gradd_val_t *rest);
/* A mask in disguise, added to the scores: Where(mask, 0, fill), Where(mask, bias, fill) or
 * Where(mask, 0, fill) + bias. */
bool match_added_mask(const graph_t *g, gradd_val_t v, match_attention_t *f);
/* Anything added to the scores. */
bool match_bias(gradd_val_t v, match_attention_t *f);

#endif
