/* Internals of the explanation of a plan: explain.c makes rows, explain_nodes.c says what became of
 * the model's nodes. The public interface is in server/api/gradd.h. */
#ifndef GRADD_SERVER_PLAN_EXPLAIN_H
#define GRADD_SERVER_PLAN_EXPLAIN_H

#include "server/plan/plan.h"

struct gradd_explain_s {
    const gradd_plan_t *plan; /* Borrowed */
    gradd_explain_info_t info;
    gradd_explain_row_t *rows; /* Owned */
    int cap_rows;
    int32_t *row_of; /* Owned; per node of the graph: its row, -1 = not scheduled */
    bool *again;     /* Owned; per forward node: the backward computes it again */
    int n_row_of;
    gradd_explain_node_t *nodes; /* Owned; per node of the model */
    int32_t *parts;              /* Owned: the lists of the rows */
};

/* Fills e->nodes from rows and row_of. */
gradd_status_t explain_nodes(gradd_explain_t *e);
/* True for operators that remain when a pattern is not recognised: the insides of activations,
 * normalisations, attention and losses. */
bool explain_is_pattern_part(const char *op);

#endif
