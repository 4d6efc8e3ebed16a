/* Constant folding while a graph is built: shape arithmetic and constant tables are computed once,
 * with the same kernels that would run them later. */
#ifndef GRADD_SERVER_GRAPH_FOLD_H
#define GRADD_SERVER_GRAPH_FOLD_H

#include "server/graph/graph.h"

/* If all that the node reads is known and the result is small, runs it now, makes constants and
 * sets *out_folded. A kernel that fails (an index out of range) fails the build. */
gradd_status_t graph_fold(graph_t *g, const gradd_infer_t *infer, const graph_emit_t *e,
                          gradd_val_t *out, bool *out_folded);

#endif
