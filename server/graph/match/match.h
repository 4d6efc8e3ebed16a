/* Looking at a graph from a node upwards: the building blocks of passes that recognise patterns.
 * Operators are named, not enumerated; operands of commutative operators are tried in both orders.
 */
#ifndef GRADD_SERVER_GRAPH_MATCH_MATCH_H
#define GRADD_SERVER_GRAPH_MATCH_MATCH_H

#include "server/graph/graph.h"

/* Steps that a matcher takes along one chain of nodes: more than any model has, few enough that a
 * model made of chains compiles in time. */
#define MATCH_MAX_WALK 64

/* The node that makes a value if its operator has this name, else NULL. */
const graph_node_t *match_made_by(const graph_t *g, gradd_val_t v, const char *op);
/* An operand of a node; GRADD_NONE if it is absent. */
gradd_val_t match_operand(const graph_node_t *n, int i);
/* A float scalar (one element, any rank) that is known at compile time. */
bool match_scalar(const graph_t *g, gradd_val_t v, double *out);
/* The known scalar operand of a two-operand node; *out_other is the other operand. */
bool match_with_scalar(const graph_t *g, const graph_node_t *n, double *out,
                       gradd_val_t *out_other);

/* The node that makes a value, whatever its operator; NULL for inputs and constants. */
const graph_node_t *match_producer(const graph_t *g, gradd_val_t v);
/* The value that v has the elements of, in other sizes. */
gradd_val_t match_through_views(const graph_t *g, gradd_val_t v);
/* Whether n cuts one position off the given axis, at its start or at its end, and nothing else. */
bool match_cuts_one(const graph_t *g, const graph_node_t *n, int axis, bool at_start);

/* ---- rewriting ---- */

/* The operator that a pattern becomes. Arrays are copied. */
typedef struct match_fused_s {
    const char *op;
    const gradd_val_t *in; /* GRADD_NONE = absent */
    int n_in;
    const gradd_attr_t *attrs;
    int n_attrs;
    const graph_node_t *random; /* whose Philox coordinate it takes; NULL = the node's own */
} match_fused_t;

/* Turns the last node of a pattern, whose first output is the pattern's result, into the fused
 * operator. The nodes between its operands and its result become `parts`: what it stands for. The
 * old nodes stay and are scheduled only if they have other readers. A node whose operator does not
 * take these operands, or would give another type, is left alone. Errors: NOMEM, INTERNAL (no such
 * operator). */
gradd_status_t match_replace(graph_t *g, graph_node_t *n, const match_fused_t *fused);
/* The same where operands are new values, made of those at which the pattern ends. */
gradd_status_t match_replace_above(graph_t *g, graph_node_t *n, const match_fused_t *fused,
                                   const gradd_val_t *ends, int n_ends);
/* Adds a node that a pass needs besides (origin and coordinate of `like`), or finds its equal. It
 * may stand behind its readers: graph_apply_passes sorts the list. Node pointers move. */
gradd_status_t match_emit(graph_t *g, const graph_node_t *like, const match_fused_t *fused,
                          gradd_val_t *out, int n_out);

#endif
