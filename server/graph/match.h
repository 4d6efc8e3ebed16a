/* Looking at a graph from a node upwards: what passes that recognise patterns are made of.
 * Operators are named, not enumerated; operands of commutative operators are tried in both orders.
 */
#ifndef GRADD_SERVER_GRAPH_MATCH_H
#define GRADD_SERVER_GRAPH_MATCH_H

#include "server/graph/graph.h"

/* The node that makes a value if its operator has this name, else NULL. */
const graph_node_t *match_made_by(const graph_t *g, gradd_val_t v, const char *op);
/* A float scalar (one element, any rank) that is known at compile time. */
bool match_scalar(const graph_t *g, gradd_val_t v, double *out);
/* The known scalar operand of a two-operand node; *out_other is the other operand. */
bool match_with_scalar(const graph_t *g, const graph_node_t *n, double *out,
                       gradd_val_t *out_other);
/* Whether a reduction sums over the last axis alone, keeping it. */
bool match_reduces_last(const graph_t *g, const graph_node_t *n);

#endif
