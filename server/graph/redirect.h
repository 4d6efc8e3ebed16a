/* Makes the readers of one value read another instead, as a pass does with a result that it has
 * computed in another way. Redirections are collected first and carried out in one walk over the
 * graph. */
#ifndef GRADD_SERVER_GRAPH_REDIRECT_H
#define GRADD_SERVER_GRAPH_REDIRECT_H

#include "server/graph/graph.h"

typedef struct graph_redirect_s {
    gradd_val_t *to; /* per value at the start; GRADD_NONE = itself */
    int n;
    bool any;
} graph_redirect_t;

/* Errors: NOMEM. */
gradd_status_t graph_redirect_begin(graph_t *g, graph_redirect_t *r);
/* Makes all readers of `from`, a value from before the start, read `to`, which has the same
 * type; perhaps it is that value, which a pass has found again. */
void graph_redirect(graph_redirect_t *r, gradd_val_t from, gradd_val_t to);
/* Changes operands, outputs and gradients, and sorts the nodes. Errors: NOMEM. */
gradd_status_t graph_redirect_end(graph_t *g, const graph_redirect_t *r);

#endif
