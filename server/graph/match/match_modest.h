/* Biases of attention that cannot be taken for a mask. */
#ifndef GRADD_SERVER_GRAPH_MATCH_MATCH_MODEST_H
#define GRADD_SERVER_GRAPH_MATCH_MATCH_MODEST_H

#include "server/graph/graph.h"

/* Whether no number of the bias comes near what a mask puts in a score's place: it is made of
 * parameters, of integers, and of known numbers of modest size, by operators that keep them so.
 * Then a key that the bias alone disfavours has a share beside which that of a masked one is
 * nothing. */
bool match_is_modest(const graph_t *g, gradd_val_t bias);
/* Whether all of it is known to be zero. */
bool match_is_zero(const graph_t *g, gradd_val_t bias);

#endif
