/* A value that is computed again is computed directly before its first reader, together with the
 * values computed again that it reads itself. So is what an operator unpacks (GRADD_OP_UNPACKS), in
 * the forward as well.
 *
 * Any earlier, it would take up the memory that was to be saved by not keeping it. Earlier passes
 * see it before the backward, so they order the rest as they do where everything is kept. Values do
 * not change: every node reads the same operands. */
#include <stdlib.h>
#include <string.h>

#include "server/plan/plan.h"

typedef struct late_s {
    const graph_t *g;
    const sequence_t *s;
    int32_t *position; /* per node: its position in the sequence while it waits, else -1 */
    int32_t *order;    /* per new position: the old one */
    int32_t *stack;
    int n;
} late_t;

/* Views cost nothing, and wait so that what they view can. */
static bool is_late(const late_t *l, int32_t id) {
    return graph_is_clone(l->g, id) ||
           l->g->nodes[id].op->flags & (GRADD_OP_VIEW | GRADD_OP_UNPACKS);
}

/* Position of an operand's producer that waits for its place, or -1. */
static int32_t waiting(const late_t *l, int32_t position) {
    const graph_node_t *n = &l->g->nodes[l->s->nodes[position]];
    for (int i = 0, reads = plan_reads(n); i < reads; i++) {
        if (n->in[i] == GRADD_NONE || l->g->values[n->in[i]]->kind != VALUE_NODE) continue;
        const int32_t at = l->position[l->g->values[n->in[i]]->node];
        if (at >= 0) return at;
    }
    return -1;
}

static void append(late_t *l, int32_t position) {
    int depth = 0;
    l->stack[depth++] = position;
    while (depth) {
        const int32_t top = l->stack[depth - 1], next = waiting(l, top);
        if (next >= 0) {
            l->stack[depth++] = next; /* waiting nodes are read later: depth <= nodes */
            continue;
        }
        l->position[l->s->nodes[top]] = -1;
        l->order[l->n++] = top;
        depth--;
    }
}

static void place(late_t *l, int from, int to) {
    const sequence_t *s = l->s;
    for (int k = from; k < to; k++)
        if (is_late(l, s->nodes[k])) l->position[s->nodes[k]] = k;
    for (int k = from; k < to; k++)
        if (!is_late(l, s->nodes[k])) append(l, k);
    for (int k = from; k < to; k++) /* results without other readers */
        if (l->position[s->nodes[k]] == k) append(l, k);
}

static bool unpacks(const graph_t *g, const sequence_t *s) {
    for (int k = 0; k < s->n; k++)
        if (g->nodes[s->nodes[k]].op->flags & GRADD_OP_UNPACKS) return true;
    return false;
}

static void place_all(late_t *l) {
    const sequence_t *s = l->s;
    for (int i = 0; i < l->g->n_nodes; i++)
        l->position[i] = -1;
    if (unpacks(l->g, s))
        place(l, 0, s->n_forward);
    else
        while (l->n < s->n_forward)
            l->order[l->n] = l->n, l->n++;
    place(l, s->n_forward, s->n);
}

static gradd_status_t late_recomputation(gradd_plan_t *p, sequence_t *s) {
    if (!p->graph->n_clones && !unpacks(p->graph, s)) return GRADD_OK;
    const size_t n = (size_t)s->n + 1;
    late_t l = {.g = p->graph, .s = s};
    l.position = malloc(sizeof l.position[0] * ((size_t)l.g->n_nodes + 1));
    l.order = malloc(sizeof l.order[0] * n);
    l.stack = malloc(sizeof l.stack[0] * n);
    int32_t *nodes = malloc(sizeof nodes[0] * n);
    choice_t *choices = malloc(sizeof choices[0] * n);
    const bool got = l.position && l.order && l.stack && nodes && choices;
    if (got) {
        place_all(&l);
        for (int i = 0; i < l.n; i++) {
            nodes[i] = s->nodes[l.order[i]];
            choices[i] = s->choices[l.order[i]];
        }
        memcpy(s->nodes, nodes, sizeof nodes[0] * (size_t)l.n);
        memcpy(s->choices, choices, sizeof choices[0] * (size_t)l.n);
    }
    free(l.position);
    free(l.order);
    free(l.stack);
    free(nodes);
    free(choices);
    return got ? GRADD_OK : GRADD_FAIL(NOMEM, "no memory to plan the graph");
}

const placed_pass_t placed_pass_late_recomputation = {"late_recomputation", PHASE_PLACED + 20,
                                                      late_recomputation};
