/* Masks of attention that are intervals of positions: made of reasons that are joined by And.
 *
 * A mask says which keys a query may look at. Three kinds of reasons are known: numbers that give
 * for each position an interval of positions around itself (causal, a window, everything); which
 * keys are real, straight from an input of zeros and ones; and segments: two positions are of one
 * if a running count of their starts is equal. */
#ifndef GRADD_SERVER_GRAPH_MATCH_MATCH_INTERVALS_H
#define GRADD_SERVER_GRAPH_MATCH_MATCH_INTERVALS_H

#include "server/graph/graph.h"

typedef struct match_intervals_s {
    int64_t batch, positions;
    gradd_val_t keys;     /* input, [batch, positions] in some sizes: 1 = real; GRADD_NONE = none */
    gradd_val_t segments; /* integers like that, in one order: equal in a segment; GRADD_NONE */
    gradd_val_t order;    /* numbers that rise by one in a segment; the intervals say so, too */
    int64_t before, behind; /* positions that `order` allows: itself and before, behind */
    int32_t
        *intervals; /* [positions, 2], in the graph's arena: first position, one past the last */
} match_intervals_t;

/* Takes the mask of queries and keys at the same positions apart; *out_known: nothing else is in
 * it, and every position may look at itself as far as the intervals say. */
gradd_status_t match_intervals(graph_t *g, gradd_val_t mask, int64_t batch, int64_t positions,
                               match_intervals_t *out, bool *out_known);
/* The intervals as a value, i32[positions, 2]. */
gradd_status_t match_intervals_value(graph_t *g, const match_intervals_t *s, gradd_val_t *out);

#endif
