/* Channels-last: which nodes compute over tensors [N, X..., C] instead of [N, C, X...], and the
 * graph that does.
 *
 * It begins at the convolutions for which the device has a channels-last kernel, but reorders
 * operands around a channels-first one. From there it spreads over nodes that do not mind the order
 * of axes, downwards to what reads a channels-last value, and upwards to what nothing else reads;
 * each node then reads its operands in that form. A value that is there in the other form alone is
 * transposed, once for all its readers. So a graph is right whatever spreads, and a transposition
 * that the model has itself is left out where the other form is there.
 *
 * The first axis (N) stays, so a value of rank R has its axis 1 at R - 1 in the other form, and
 * axes from 2 on one further in front.
 */
#ifndef GRADD_SERVER_GRAPH_CHANNELS_CHANNELS_H
#define GRADD_SERVER_GRAPH_CHANNELS_CHANNELS_H

#include "server/graph/graph.h"

/* How a node is written over channels-last operands. */
typedef enum channels_kind_e {
    CHANNELS_STAY,     /* it is not */
    CHANNELS_CONV,     /* ConvLast, ConvLastDataGrad */
    CHANNELS_PRODUCT,  /* a convolution by single taps: a product */
    CHANNELS_MAP,      /* elementwise */
    CHANNELS_NORM,     /* BatchNorm over a matrix [N X, C] */
    CHANNELS_WINDOWS,  /* WindowMax with windows of single channels behind the others */
    CHANNELS_AXIS,     /* with another attribute `axis` */
    CHANNELS_PAD,      /* with other pads */
    CHANNELS_REDUCE,   /* over other axes */
    CHANNELS_TO_LAST,  /* a Transpose of the model to channels-last */
    CHANNELS_TO_FIRST, /* and one back */
} channels_kind_t;

typedef struct channels_s {
    graph_t *g;
    int n_nodes, n_values; /* when it was searched */
    int32_t *readers;      /* per value; of the graph's arena */
    uint8_t *kind;         /* Owned: per node a channels_kind_t */
    bool *moves;           /* Owned: per node, whether it is written over channels-last operands */
    bool any;
} channels_t;

/* Which nodes move. Finish it in any case. */
gradd_status_t channels_choose(graph_t *g, channels_t *out);
void channels_finish(channels_t *c);
/* Leaves alone what is not worth its transpositions; begins: per node, a convolution that saves
 * reorders. */
gradd_status_t channels_weigh(channels_t *c, const bool *begins);
/* Whether a node that moves reads that operand in channels-last form. */
bool channels_takes(const channels_t *c, int32_t node, int i);
/* Whether the value is there in channels-last form: a node that moves makes it, or the model. */
bool channels_there(const channels_t *c, gradd_val_t v);
/* Whether something reads a result of the node. */
bool channels_alive(const channels_t *c, const graph_node_t *n);
/* Puts what the nodes that move become beside them, and redirects their readers. */
gradd_status_t channels_rewrite(const channels_t *c);

/* Where an axis of a value of that rank is in the other form. */
static inline int channels_axis(int axis, int rank) {
    return axis == 1 ? rank - 1 : axis > 1 ? axis - 1 : 0;
}
/* The same type in the other form. */
gradd_type_t channels_last_type(const gradd_type_t *type);
/* The axes that a reduction folds, per axis of its operand; false: they are not known. */
bool channels_reduced(const graph_t *g, const graph_node_t *n, bool *out_mask);

#endif
