/* Live rows: which nodes of a graph need only some of the rows of a batch, and the graph that
 * computes no others.
 *
 * A row is a position of a batch. Two sets of rows are known before a step: those that carry a
 * label (the others contribute nothing to a CrossEntropy), and those that are real (the others are
 * padding, which the mask of every attention hides). The search starts at the losses and goes
 * upwards: a value of which only rows of a set are read, and which is made row by row (its
 * operator's row says so), is needed in that set alone. Labelled rows end at attention, whose keys
 * are all rows; real ones go on to the embeddings. Values with other readers (outputs, sums over
 * positions) are computed in full, so a graph that depends on padding in another way has smaller
 * regions, or none.
 *
 * An encoder's positions are rows of their own, source rows: real where its mask says so. They
 * begin at the keys of cross-attention and go up through the encoder.
 *
 * The set's list of rows is an input of the plan, after the inputs of the model. The rewritten
 * nodes read what they need by GatherRows; ranks stay, the leading axes become (1, ..., 1, k).
 *
 * It is valid for every step whose labelled rows are real and whose mask is zeros and ones; the
 * caller must check that.
 */
#ifndef GRADD_SERVER_GRAPH_LIVE_LIVE_H
#define GRADD_SERVER_GRAPH_LIVE_LIVE_H

#include "server/graph/graph.h"

/* In which rows something is computed, or needed. Real rows hold the labelled ones; source rows are
 * others. */
typedef enum live_set_e { LIVE_NONE, LIVE_LABELLED, LIVE_REAL, LIVE_SOURCE, LIVE_ALL } live_set_t;

/* The loss that labels belong to. */
typedef struct live_loss_s {
    int32_t node;       /* CrossEntropy; -1 = none */
    gradd_val_t labels; /* an input of the model, perhaps in other sizes */
    int lead;           /* axes of the logits in front of the classes */
    int64_t rows, positions;
} live_loss_t;

typedef struct live_s {
    graph_t *g;
    live_loss_t loss;
    bool labelled, real, source; /* which sets there are */
    gradd_val_t mask; /* input of the model that tells real rows; GRADD_NONE = none seen yet */
    gradd_val_t source_mask;  /* the same of source rows */
    int64_t source_positions; /* of a sequence; 0 = none seen yet */
    bool *cross;              /* Owned: per node: attention of rows of `at` to source rows */
    int n_nodes, n_values;    /* when it was searched */
    uint8_t *need;            /* Owned: per value a live_set_t */
    uint8_t *lead;            /* Owned: per value that is not needed in full, its leading axes */
    uint8_t *at;              /* Owned: per node the live_set_t that it is computed in */
    gradd_val_t *intervals;   /* Owned: per node: of an attention over real rows */
    live_set_t last_set;
    gradd_val_t last_mask, last_intervals; /* of the last attention; layers are alike */
    gradd_val_t last_bias;                 /* a modest one */
} live_t;

/* Finds the loss, and the set of rows that each value is needed in, where `sets` tells which sets
 * there are. Finish it in any case. */
gradd_status_t live_find(graph_t *g, const bool *sets, live_t *out);
void live_finish(live_t *live);

/* The rows that the loss is made of. */
static inline live_set_t live_loss_set(const live_t *l) {
    return l->labelled ? LIVE_LABELLED : l->real ? LIVE_REAL : LIVE_ALL;
}
/* All rows of a batch: of the space that a set belongs to. */
int64_t live_rows_of(const live_t *l, live_set_t set);
/* How the node treats rows of a set's space, of which its results have `lead` axes; false if not
 * row by row. *out points into *o. */
bool live_rowwise(const live_t *l, const graph_node_t *n, live_set_t set, int lead,
                  graph_operands_t *o, gradd_rowwise_t *out);

/* Looks at an attention: whether it may run over real rows alone, or over source rows. Then
 * l->mask, or l->source_mask, is the input of the model that hides padding, and l->intervals of the
 * node a constant, i32[positions, 2]: what each position may look at beside that. All attentions
 * over such rows have one mask for padding. */
gradd_status_t live_attention(live_t *l, int32_t node, live_set_t set, bool *out_can);
/* The same of an attention whose keys are source rows: whether these may be real ones alone. */
gradd_status_t live_cross(live_t *l, int32_t node, bool *out_can);

/* Operations of the forward, and which parts are needed in labelled and in real rows. */
void live_count(const live_t *live, gradd_live_t *out);

/* The graph with rows left out. `lists` are the values of the lists, per live_set_t. */
gradd_status_t live_rewrite(const live_t *live, const gradd_val_t *lists);

#endif
