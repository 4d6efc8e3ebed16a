/* Weighted sums over rows, as trainers write them out beside a loss, or instead of its reduction:
 *
 *   sum_i w_i e_i   or   sum_i w_i e_i^2
 *
 * by ReduceSum or ReduceMean over everything, products and quotients with numbers and masks, Where
 * with zero, squares, and views. e has one number per row; w depends on nothing that is trained. */
#ifndef GRADD_SERVER_GRAPH_MATCH_MATCH_ROWS_H
#define GRADD_SERVER_GRAPH_MATCH_MATCH_ROWS_H

#include "server/graph/match/match.h"

#define MATCH_ROWS_PARTS 8

/* A factor of the weights. */
typedef struct match_rows_part_s {
    gradd_val_t value;
    gradd_type_t shape; /* that it is broadcast to: an element per row, or one for all */
    enum { MATCH_ROWS_TIMES, MATCH_ROWS_OVER, MATCH_ROWS_WHERE, MATCH_ROWS_UNLESS } how;
} match_rows_part_t;

typedef struct match_rows_s {
    const graph_node_t *leaf; /* makes e */
    bool squared;
    double factor;
    match_rows_part_t parts[MATCH_ROWS_PARTS];
    int n_parts;
} match_rows_t;

/* out[v]: whether a gradient of v would reach an input whose gradient is wanted; of the n values
 * that there are, in the graph's arena. Errors: NOMEM. */
gradd_status_t match_find_trained(graph_t *g, bool **out);

/* Whether v is such a sum over the result of an operator named `leaf`, and the values in between
 * have no other readers. */
bool match_rows(const graph_t *g, gradd_val_t v, const char *leaf, const int32_t *readers,
                const bool *trained, match_rows_t *out);
/* The weights, [rows], of that type; new nodes are of node `like`. */
gradd_status_t match_rows_weights(graph_t *g, int32_t like, const match_rows_t *rows,
                                  gradd_dtype_t dtype, gradd_val_t *out);

#endif
