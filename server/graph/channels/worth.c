/* Whether what has been chosen is worth its transpositions. See channels.h.
 *
 * Nodes that read each other in channels-last form are one region. It saves the reorders that a
 * library puts around each channels-first convolution, and costs transpositions at its ends; both
 * are counted in bytes, in the forward and, where one follows, in the backward. A region that costs
 * more stays as it is: depthwise convolutions between small products, one convolution alone. */
#include <stdlib.h>

#include "server/graph/channels/channels.h"

/* A byte that is transposed costs about as much as so many that a library reorders: measured. */
#define TURN 2.0

typedef struct regions_s {
    const channels_t *c;
    int32_t *of;      /* per node: another one of its region, in the end the first */
    double *saved;    /* per node that is the first of a region: bytes */
    int32_t *paid_by; /* per value: the region that pays for turning it, -1 = none yet */
    bool *begins;     /* per node */
} regions_t;

static int32_t region_of(const regions_t *r, int32_t node) {
    while (r->of[node] != node)
        node = r->of[node] = r->of[r->of[node]];
    return node;
}

static double bytes_of(const channels_t *c, gradd_val_t v) {
    return (double)gradd_type_bytes(graph_type(c->g, v));
}

/* Whether another form of the value is another order of its bytes. */
static bool turns(const channels_t *c, gradd_val_t v) {
    const gradd_type_t *t = graph_type(c->g, v);
    const int64_t channels = t->dims[1], all = gradd_type_count(t) / (t->dims[0] ? t->dims[0] : 1);
    return !c->g->values[v]->data && channels > 1 && all > channels;
}

/* A node of the region reads a value that is not there, or another node one that it makes. */
static void pay(const regions_t *r, int32_t node, gradd_val_t v) {
    const graph_t *g = r->c->g;
    const int32_t region = region_of(r, node);
    if (r->paid_by[v] == region || !turns(r->c, v)) return;
    const bool returns = g->trains && (g->values[v]->kind != VALUE_INPUT || graph_is_trained(g, v));
    r->paid_by[v] = region;
    r->saved[region] -= TURN * (returns ? 2 : 1) * bytes_of(r->c, v);
}

static void join_regions(const regions_t *r) {
    const channels_t *c = r->c;
    for (int32_t i = 0; i < c->n_nodes; i++)
        for (int k = 0; c->moves[i] && k < c->g->nodes[i].n_in; k++) {
            const gradd_val_t v = c->g->nodes[i].in[k];
            const int32_t from = channels_takes(c, i, k) ? c->g->values[v]->node : -1;
            if (from >= 0 && c->moves[from] && channels_there(c, v))
                r->of[region_of(r, i)] = region_of(r, from);
        }
}

/* Data, filters and result of a convolution: the first and the last are reordered. */
static void count_node(const regions_t *r, int32_t i) {
    const channels_t *c = r->c;
    const graph_node_t *n = &c->g->nodes[i];
    if (c->moves[i] && r->begins[i])
        r->saved[region_of(r, i)] +=
            (c->g->trains ? 3 : 1) * (bytes_of(c, n->in[0]) + bytes_of(c, n->out[0]));
    for (int k = 0; k < n->n_in; k++) {
        const gradd_val_t v = n->in[k];
        if (v == GRADD_NONE) continue;
        if (c->moves[i] && channels_takes(c, i, k) && !channels_there(c, v) &&
            graph_type(c->g, v)->rank == graph_type(c->g, n->in[0])->rank)
            pay(r, i, v);
        else if (c->kind[i] != CHANNELS_TO_LAST && channels_there(c, v) &&
                 c->moves[c->g->values[v]->node] && !(c->moves[i] && channels_takes(c, i, k)))
            pay(r, c->g->values[v]->node, v);
    }
}

static void weigh(const regions_t *r) {
    const channels_t *c = r->c;
    join_regions(r);
    for (int32_t i = 0; i < c->n_nodes; i++)
        if (channels_alive(c, &c->g->nodes[i])) count_node(r, i);
    for (int j = 0; j < c->g->n_outputs; j++) {
        const gradd_val_t v = c->g->outputs[j];
        if (channels_there(c, v) && c->moves[c->g->values[v]->node])
            pay(r, c->g->values[v]->node, v);
    }
}

gradd_status_t channels_weigh(channels_t *c, const bool *begins) {
    regions_t r = {.c = c, .begins = (bool *)begins};
    r.of = malloc(sizeof r.of[0] * ((size_t)c->n_nodes + 1));
    r.saved = calloc((size_t)c->n_nodes + 1, sizeof r.saved[0]);
    r.paid_by = malloc(sizeof r.paid_by[0] * ((size_t)c->n_values + 1));
    gradd_status_t status = GRADD_FAIL(NOMEM, "no memory to compile the graph");
    if (r.of && r.saved && r.paid_by) {
        status = GRADD_OK;
        for (int32_t i = 0; i < c->n_nodes; i++)
            r.of[i] = i;
        for (int32_t v = 0; v < c->n_values; v++)
            r.paid_by[v] = -1;
        weigh(&r);
        c->any = false;
        for (int32_t i = 0; i < c->n_nodes; i++) {
            const int32_t region = region_of(&r, i);
            c->any |= c->moves[i] = c->moves[i] && r.saved[region] > 0;
        }
    }
    free(r.of);
    free(r.saved);
    free(r.paid_by);
    return status;
}
