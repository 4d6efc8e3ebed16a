/* The readers of a value, without dead code: a pass that duplicates some work must know that the
 * original has no other readers. Nodes that earlier passes have replaced stay in the list and do
 * not count unless an output still needs them. */
#ifndef GRADD_SERVER_GRAPH_READERS_H
#define GRADD_SERVER_GRAPH_READERS_H

#include "server/graph/graph.h"

/* out[v] = number of operands of nodes that run, and of graph outputs and gradients, that are v;
 * n_values entries in the graph's arena. A snapshot: rewrites that follow can only lower a count of
 * an old value, until they let a node read more than before. Errors: NOMEM. */
gradd_status_t graph_count_readers(graph_t *g, int32_t **out);

/* The same with its size, for passes that add values on the way. */
typedef struct graph_readers_s {
    int32_t *of;
    int32_t *products; /* of these the first operands of MatMul without broadcasting */
    int n;
} graph_readers_t;

gradd_status_t graph_find_readers(graph_t *g, graph_readers_t *out);
/* Whether at most one operand is v. Values that are newer than the snapshot count as such: a pass
 * that adds one knows its reader. */
bool graph_read_once(const graph_readers_t *readers, gradd_val_t v);
/* Whether that holds, or all readers of v multiply it from the left, matrix by matrix. */
bool graph_read_by_products(const graph_readers_t *readers, gradd_val_t v);

#endif
