/* A gradient that the client asked for is made as soon as its operands are there.
 *
 * It lies in the client's memory and takes no room in the arena, but its operands do: the input of
 * a layer is kept from the forward for the gradient of the weight alone. Rules emit that gradient
 * behind the one that goes on through the network, so both the kept input and its own gradient
 * would have to fit. Made first, it lets the kept input go before. Views cost nothing and move
 * along. Values do not change: every node reads the same operands. */
#include <stdlib.h>
#include <string.h>

#include "server/plan/plan.h"

typedef struct hoist_s {
    const graph_t *g;
    sequence_t *s;
    int32_t *key;  /* per value that a node of the sequence makes: where it belongs */
    bool *stays;   /* per value: a node of the backward reads it */
    int32_t *slot; /* per position of the sequence: the position that it goes behind */
} hoist_t;

static bool is_view(const graph_node_t *n) {
    return n->op->flags & GRADD_OP_VIEW;
}

/* Marks the values that backward nodes read, except those read only by views without readers. */
static void mark_read(hoist_t *h) {
    for (int k = h->s->n - 1; k >= h->s->n_forward; k--) {
        const graph_node_t *n = &h->g->nodes[h->s->nodes[k]];
        if (is_view(n) && !h->stays[n->out[0]]) continue;
        for (int i = 0, reads = plan_reads(n); i < reads; i++)
            if (n->in[i] != GRADD_NONE) h->stays[n->in[i]] = true;
    }
}

/* Whether nothing that the node makes takes room in the arena. */
static bool takes_no_room(const hoist_t *h, const graph_node_t *n) {
    if (is_view(n)) return true;
    for (int j = 0; j < n->n_out; j++)
        if (n->out[j] != GRADD_NONE && h->stays[n->out[j]]) return false;
    return true;
}

/* Position behind which all operands are there. */
static int32_t behind_operands(const hoist_t *h, const graph_node_t *n) {
    int32_t at = h->s->n_forward - 1;
    for (int i = 0; i < n->n_in; i++)
        if (n->in[i] != GRADD_NONE && h->key[n->in[i]] > at) at = h->key[n->in[i]];
    return at;
}

static void find_slots(hoist_t *h) {
    for (int v = 0; v < h->g->n_values; v++)
        h->key[v] = -1;
    for (int k = h->s->n_forward; k < h->s->n; k++) {
        const graph_node_t *n = &h->g->nodes[h->s->nodes[k]];
        h->slot[k] = takes_no_room(h, n) ? behind_operands(h, n) : k;
        for (int j = 0; j < n->n_out; j++)
            if (n->out[j] != GRADD_NONE) h->key[n->out[j]] = h->slot[k];
    }
}

/* Stable by slot; `first` and `next` chain the positions of a slot. */
static gradd_status_t reorder(hoist_t *h) {
    sequence_t *s = h->s;
    const size_t n = (size_t)s->n + 1;
    int32_t *nodes = malloc(sizeof nodes[0] * n), *chain = malloc(sizeof chain[0] * 2 * n);
    choice_t *choices = malloc(sizeof choices[0] * n);
    if (nodes && chain && choices) {
        int32_t *first = chain, *next = chain + n; /* slot n_forward - 1 may be -1: shifted by 1 */
        int at = s->n_forward;
        for (int k = 0; k <= s->n; k++)
            first[k] = -1;
        for (int k = s->n - 1; k >= s->n_forward; k--) {
            next[k] = first[h->slot[k] + 1];
            first[h->slot[k] + 1] = k;
        }
        for (int slot = s->n_forward; slot <= s->n; slot++)
            for (int k = first[slot]; k >= 0; k = next[k], at++)
                nodes[at] = s->nodes[k], choices[at] = s->choices[k];
        for (int k = s->n_forward; k < s->n; k++)
            s->nodes[k] = nodes[k], s->choices[k] = choices[k];
    }
    gradd_status_t status =
        nodes && chain && choices ? GRADD_OK : GRADD_FAIL(NOMEM, "no memory to plan the graph");
    free(nodes);
    free(chain);
    free(choices);
    return status;
}

static gradd_status_t early_gradients(gradd_plan_t *p, sequence_t *s) {
    const graph_t *g = p->graph;
    hoist_t h = {.g = g, .s = s};
    if (s->n == s->n_forward) return GRADD_OK;
    h.key = malloc(sizeof h.key[0] * ((size_t)g->n_values + 1));
    h.stays = calloc((size_t)g->n_values + 1, sizeof h.stays[0]);
    h.slot = malloc(sizeof h.slot[0] * ((size_t)s->n + 1));
    gradd_status_t status = GRADD_FAIL(NOMEM, "no memory to plan the graph");
    if (h.key && h.stays && h.slot) {
        mark_read(&h);
        find_slots(&h);
        status = reorder(&h);
    }
    free(h.key);
    free(h.stays);
    free(h.slot);
    return status;
}

const placed_pass_t placed_pass_early_gradients = {"early_gradients", PHASE_PLACED + 10,
                                                   early_gradients};
