/* When a rewrite runs: its row has a number, whose range here gives the phase. This is the only
 * list of phases.
 *
 *   forward  the nodes of the model, before differentiation. Operators are still those that models
 *            are written in, so this is where patterns are recognised.
 *   joint    forward and backward nodes, after the differentiation for one set of arriving
 *            gradients, and before anything is saved for it. Nodes that a pass adds are backward
 *            nodes. Programs may name nodes of an earlier backward by number: a node that was there
 *            before this differentiation may read something older, never something newer.
 *   placed   a sequence of nodes in the order of their execution, with kernels and scratch, before
 *            values get their places in memory. These passes are in server/plan/passes/.
 *
 * Within a range, the lower number runs first.
 */
#ifndef GRADD_SERVER_GRAPH_PHASES_H
#define GRADD_SERVER_GRAPH_PHASES_H

typedef enum phase_e {
    PHASE_FORWARD = 0,
    PHASE_JOINT = 100,
    PHASE_PLACED = 200,
    PHASE_END = 300,
} phase_t;

/* The phase of a number; PHASE_END for one that belongs to none. */
static inline phase_t phase_of(int order) {
    if (order < PHASE_FORWARD || order >= PHASE_END) return PHASE_END;
    if (order >= PHASE_PLACED) return PHASE_PLACED;
    return order >= PHASE_JOINT ? PHASE_JOINT : PHASE_FORWARD;
}

#endif
