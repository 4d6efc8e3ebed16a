/* Reductions over the last axis, as models and the exporter write them. */
#ifndef GRADD_SERVER_GRAPH_MATCH_MATCH_MEAN_H
#define GRADD_SERVER_GRAPH_MATCH_MATCH_MEAN_H

#include "server/graph/match/match.h"

/* Whether a reduction names the last axis alone: where it drops an axis, shapes may agree by
 * chance.
 */
bool match_names_last(const graph_t *g, const graph_node_t *n);
/* x where v is a reduction (its operator's name) of x over the last axis, which is kept or put back
 * by Reshape or Unsqueeze. Else GRADD_NONE. */
gradd_val_t match_under_reduction(const graph_t *g, gradd_val_t v, const char *op);
/* x where v is the mean of x over the last axis, which stays as an axis of size 1: ReduceMean, or
 * ReduceSum divided by the size, with the axis kept or put back by Reshape. Else GRADD_NONE. */
gradd_val_t match_mean_of_last(const graph_t *g, gradd_val_t v);
/* x where v, but for casts (match_cast.h), is x minus that mean. Else GRADD_NONE. */
gradd_val_t match_centred(const graph_t *g, gradd_val_t v, gradd_dtype_t as);

#endif
