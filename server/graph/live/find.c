/* Which nodes need only some rows. See live.h. */
#include <stdlib.h>
#include <string.h>

#include "kernels/describe/attention.h"
#include "kernels/describe/cross_entropy.h"
#include "server/graph/compile_time.h"
#include "server/graph/live/live.h"
#include "server/graph/match/match.h"

/* ---- the loss -------------------------------------------------------------------------------- */

static bool is_input(const graph_t *g, gradd_val_t v) {
    return g->values[v]->kind == VALUE_INPUT;
}

static bool describe_loss(const graph_t *g, int32_t id, live_loss_t *out) {
    const graph_node_t *n = &g->nodes[id];
    if (strcmp(n->op->name, "CrossEntropy")) return false;
    if (!gradd_attr_find(n->attrs, GRADD_CE_IGNORE_INDEX)) return false;
    const gradd_type_t *x = graph_type(g, n->in[GRADD_CE_LOGITS]);
    const bool shift = gradd_attr_int(n->attrs, GRADD_CE_SHIFT, 0);
    *out = (live_loss_t){.node = id,
                         .labels = match_through_views(g, n->in[GRADD_CE_LABELS]),
                         .lead = x->rank - 1,
                         .rows = gradd_type_count(graph_type(g, n->in[GRADD_CE_LABELS]))};
    if (out->lead < 1 || !out->rows || !is_input(g, out->labels)) return false;
    const gradd_type_t *labels = graph_type(g, out->labels);
    if (!labels->rank || gradd_type_count(labels) != out->rows) return false;
    out->positions = labels->dims[labels->rank - 1];
    return !shift || out->positions == x->dims[x->rank - 2];
}

static int64_t classes(const graph_t *g, int32_t id) {
    const gradd_type_t *x = graph_type(g, g->nodes[id].in[GRADD_CE_LOGITS]);
    return x->dims[x->rank - 1];
}

/* Of several losses the one with the most classes; another one reads all rows. */
static void find_loss(const graph_t *g, const bool *used, live_loss_t *out) {
    live_loss_t found;
    out->node = -1;
    for (int32_t id = 0; id < g->n_nodes; id++)
        if (used[id] && describe_loss(g, id, &found) &&
            (out->node < 0 || classes(g, id) > classes(g, out->node)))
            *out = found;
}

/* ---- needed rows ----------------------------------------------------------------------------- */

int64_t live_rows_of(const live_t *l, live_set_t set) {
    if (set != LIVE_SOURCE) return l->loss.rows;
    return l->loss.rows / l->loss.positions * l->source_positions;
}

bool live_rowwise(const live_t *l, const graph_node_t *n, live_set_t set, int lead,
                  graph_operands_t *o, gradd_rowwise_t *out) {
    if (!n->op->rowwise || lead < 1) return false;
    graph_describe(l->g, n, o);
    if (lead > o->out[0].rank) return false;
    *out = (gradd_rowwise_t){.op = n->op,
                             .attrs = n->attrs,
                             .n_in = n->n_in,
                             .n_out = n->n_out,
                             .in = o->in,
                             .out = o->out,
                             .lead = lead,
                             .rows = live_rows_of(l, set)};
    return n->op->rowwise(out) && !(n->op->flags & GRADD_OP_RANDOM && !out->takes_rows);
}

/* Values that are known or come from outside are there in full. */
static bool is_made(const graph_t *g, gradd_val_t v) {
    return v != GRADD_NONE && g->values[v]->kind == VALUE_NODE;
}

/* The smallest set that holds both. */
static live_set_t join(live_set_t a, live_set_t b) {
    const bool apart = a == LIVE_SOURCE || b == LIVE_SOURCE;
    if (a == LIVE_NONE || b == LIVE_NONE || a == b) return a > b ? a : b;
    return apart ? LIVE_ALL : a > b ? a : b;
}

static void need(live_t *l, gradd_val_t v, live_set_t set, int lead) {
    if (!is_made(l->g, v)) return;
    if (set < LIVE_ALL && l->need[v] != LIVE_NONE && l->need[v] < LIVE_ALL && l->lead[v] != lead)
        set = LIVE_ALL; /* two readings of the same axes */
    l->need[v] = (uint8_t)join(set, l->need[v]);
    l->lead[v] = (uint8_t)lead;
}

/* The largest set that is needed of the results, and their leading axes; they must agree. */
static live_set_t needed(const live_t *l, const graph_node_t *n, int *out_lead) {
    live_set_t set = LIVE_NONE;
    *out_lead = 0;
    for (int j = 0; j < n->n_out; j++) {
        if (n->out[j] == GRADD_NONE || l->need[n->out[j]] == LIVE_NONE) continue;
        const live_set_t own = l->need[n->out[j]];
        if (own == LIVE_ALL) return LIVE_ALL;
        if (*out_lead && *out_lead != l->lead[n->out[j]]) return LIVE_ALL;
        *out_lead = l->lead[n->out[j]];
        set = join(set, own);
    }
    return set;
}

static gradd_status_t visit_whole(live_t *l, int32_t id) {
    const graph_node_t *n = &l->g->nodes[id];
    l->at[id] = LIVE_ALL;
    for (int i = 0; i < n->n_in; i++)
        need(l, n->in[i], LIVE_ALL, 0);
    return GRADD_OK;
}

/* Of the mask nothing is needed, where lists take its place. */
static void need_of_attention(live_t *l, int32_t id, live_set_t queries, live_set_t keys) {
    const graph_node_t *n = &l->g->nodes[id];
    l->at[id] = (uint8_t)queries;
    for (int i = 0; i < n->n_in; i++)
        if (i < GRADD_ATTN_MASK)
            need(l, n->in[i], i == GRADD_ATTN_Q ? queries : keys, 2);
        else if (i >= GRADD_ATTN_BIAS)
            need(l, n->in[i], LIVE_ALL, 0);
}

static gradd_status_t visit_attention(live_t *l, int32_t id, live_set_t set, int lead) {
    const bool rows = set < LIVE_ALL && lead == 2;
    bool can = false;
    if (l->source && set != LIVE_SOURCE && (rows || set == LIVE_ALL))
        GRADD_TRY(live_cross(l, id, &can));
    if (can) {
        l->cross[id] = true;
        need_of_attention(l, id, set, LIVE_SOURCE);
        return GRADD_OK;
    }
    const live_set_t real = set == LIVE_SOURCE ? LIVE_SOURCE : LIVE_REAL;
    if (rows && (set == LIVE_SOURCE || l->real)) GRADD_TRY(live_attention(l, id, real, &can));
    if (!can) return visit_whole(l, id);
    need_of_attention(l, id, real, real);
    return GRADD_OK;
}

/* Passes on what a node needs for the set that is needed of it, or a larger one. */
static gradd_status_t visit(live_t *l, int32_t id) {
    int lead;
    gradd_rowwise_t rowwise;
    graph_operands_t operands;
    const graph_node_t *n = &l->g->nodes[id];
    live_set_t set = needed(l, n, &lead);
    if (set == LIVE_NONE) return GRADD_OK;
    if (set < LIVE_ALL && live_rowwise(l, n, set, lead, &operands, &rowwise)) {
        l->at[id] = (uint8_t)set;
        for (int i = 0; i < n->n_in; i++)
            need(l, n->in[i], rowwise.use[i] == GRADD_USE_ROWS ? set : LIVE_ALL,
                 rowwise.in_lead[i]);
        return GRADD_OK;
    }
    return strcmp(n->op->name, "FusedAttention") ? visit_whole(l, id)
                                                 : visit_attention(l, id, set, lead);
}

static gradd_status_t sweep(live_t *l) {
    graph_t *g = l->g;
    for (int j = 0; j < g->n_outputs; j++)
        need(l, g->outputs[j], LIVE_ALL, 0);
    for (int32_t id = l->n_nodes - 1; id >= 0; id--) {
        GRADD_TRY(compile_time_spend(1));
        if (id != l->loss.node) {
            GRADD_TRY(visit(l, id));
            continue;
        }
        const graph_node_t *n = &g->nodes[id];
        l->at[id] = LIVE_ALL;
        need(l, n->in[GRADD_CE_LOGITS], live_loss_set(l), l->loss.lead);
        for (int i = GRADD_CE_LABELS; i < n->n_in; i++)
            need(l, n->in[i], LIVE_ALL, 0);
    }
    return GRADD_OK;
}

/* ---- the interface --------------------------------------------------------------------------- */

static gradd_status_t mark_used(const graph_t *g, bool **out) {
    bool *used = calloc((size_t)g->n_nodes + 1, sizeof used[0]);
    if (!used) return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    for (int j = 0; j < g->n_outputs; j++)
        if (is_made(g, g->outputs[j])) used[g->values[g->outputs[j]]->node] = true;
    for (int32_t id = g->n_nodes - 1; id >= 0; id--)
        for (int i = 0; used[id] && i < g->nodes[id].n_in; i++)
            if (is_made(g, g->nodes[id].in[i])) used[g->values[g->nodes[id].in[i]]->node] = true;
    *out = used;
    return GRADD_OK;
}

gradd_status_t live_find(graph_t *g, const bool *sets, live_t *out) {
    bool *used = NULL;
    *out = (live_t){.g = g,
                    .labelled = sets[LIVE_LABELLED],
                    .real = sets[LIVE_REAL],
                    .source = sets[LIVE_SOURCE],
                    .mask = GRADD_NONE,
                    .source_mask = GRADD_NONE,
                    .last_mask = GRADD_NONE,
                    .last_bias = GRADD_NONE};
    out->loss.node = -1;
    GRADD_TRY(graph_sort(g));
    out->n_nodes = g->n_nodes, out->n_values = g->n_values;
    GRADD_TRY(mark_used(g, &used));
    find_loss(g, used, &out->loss);
    free(used);
    if (out->loss.node < 0) return GRADD_OK;
    const size_t values = (size_t)g->n_values + 1, nodes = (size_t)g->n_nodes + 1;
    out->need = calloc(values, sizeof out->need[0]);
    out->lead = calloc(values, sizeof out->lead[0]);
    out->at = calloc(nodes, sizeof out->at[0]);
    out->intervals = calloc(nodes, sizeof out->intervals[0]);
    out->cross = calloc(nodes, sizeof out->cross[0]);
    if (!out->need || !out->lead || !out->at || !out->intervals || !out->cross)
        return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    return sweep(out);
}

void live_finish(live_t *live) {
    free(live->need);
    free(live->lead);
    free(live->at);
    free(live->intervals);
    free(live->cross);
}
