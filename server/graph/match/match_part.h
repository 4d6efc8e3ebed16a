/* Parts of the last axis, for patterns that cut a tensor in two or take every second element. A
 * Slice over the last axis alone and an output of a Split are the same thing here. */
#ifndef GRADD_SERVER_GRAPH_MATCH_MATCH_PART_H
#define GRADD_SERVER_GRAPH_MATCH_MATCH_PART_H

#include "server/graph/match/match.h"

/* source[..., start], source[..., start + step], ... : size elements; step > 0 */
typedef struct match_part_s {
    gradd_val_t source;
    int64_t start, size, step;
} match_part_t;

/* Whether v is such a part of another value. */
bool match_part(const graph_t *g, gradd_val_t v, match_part_t *out);
/* Whether `axis` (possibly negative) is the last one of v. */
bool match_is_last_axis(const graph_t *g, gradd_val_t v, int64_t axis);
/* Elements of v along its last axis; 0 for rank 0. */
int64_t match_width(const graph_t *g, gradd_val_t v);

#endif
