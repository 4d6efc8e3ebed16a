/* The graph with rows left out. See live.h. */
#include <stdlib.h>
#include <string.h>

#include "kernels/contract/registry.h"
#include "kernels/describe/attention.h"
#include "kernels/describe/cross_entropy.h"
#include "kernels/rules/rules.h"
#include "server/graph/compile_time.h"
#include "server/graph/live/live.h"
#include "server/graph/redirect.h"

typedef struct rewrite_s {
    const live_t *l;
    graph_t *g;
    const gradd_val_t *lists; /* per set */
    gradd_val_t within; /* places of the labelled rows among the real ones; GRADD_NONE = not yet */
    gradd_val_t *to;    /* per value that is made in some rows: what holds these */
} rewrite_t;

/* ---- nodes ----------------------------------------------------------------------------------- */

/* Adds a node in place of, or for, another one. */
static gradd_status_t add(rewrite_t *w, const graph_node_t *like, graph_emit_t e,
                          gradd_val_t *out) {
    w->g->origin = like->origin;
    e.opset = like->opset;
    e.random = like->random;
    return graph_emit(w->g, &e, out);
}

static gradd_status_t add_named(rewrite_t *w, const graph_node_t *like, const char *name,
                                const gradd_val_t *in, gradd_attrs_t attrs, gradd_val_t *out) {
    graph_emit_t e = {
        .op = gradd_op_by_name(name), .attrs = attrs, .in = in, .n_in = 2, .n_out = 1};
    if (!e.op) return GRADD_FAIL(INTERNAL, "operator %s is missing", name);
    w->g->origin = like->origin;
    e.opset = w->g->model->opset;
    e.random = like->random;
    return graph_emit(w->g, &e, out);
}

static gradd_status_t sizes_of(rewrite_t *w, const gradd_type_t *type, gradd_val_t *out) {
    const gradd_type_t t = {GRADD_DT_I64, 1, {type->rank}};
    return graph_constant(w->g, &t, type->dims, out);
}

static gradd_status_t resize(rewrite_t *w, const graph_node_t *like, const char *op, gradd_val_t v,
                             const gradd_type_t *type, gradd_val_t *out) {
    gradd_val_t in[2] = {v, GRADD_NONE};
    GRADD_TRY(sizes_of(w, type, &in[1]));
    return add_named(w, like, op, in, (gradd_attrs_t){0}, out);
}

/* ---- operands -------------------------------------------------------------------------------- */

/* The places of the labelled rows among the real ones. */
static gradd_status_t find_within(rewrite_t *w, const graph_node_t *like, gradd_val_t *out) {
    const gradd_val_t in[2] = {w->lists[LIVE_LABELLED], w->lists[LIVE_REAL]};
    if (w->within == GRADD_NONE)
        GRADD_TRY(add_named(w, like, "RowsWithin", in, (gradd_attrs_t){0}, &w->within));
    *out = w->within;
    return GRADD_OK;
}

static live_set_t set_of(const rewrite_t *w, gradd_val_t v) {
    const graph_value_t *value = w->g->values[v];
    if (v >= w->l->n_values || value->kind != VALUE_NODE) return LIVE_ALL;
    return w->l->at[value->node];
}

/* v in the rows of `set`, its first `lead` axes. */
static gradd_status_t rows_of(rewrite_t *w, const graph_node_t *like, gradd_val_t v, live_set_t set,
                              int lead, gradd_val_t *out) {
    const live_set_t there = set_of(w, v);
    gradd_attr_t attr = gradd_make_int("lead", lead);
    gradd_val_t in[2] = {there == LIVE_ALL ? v : w->to[v], w->lists[set]};
    *out = in[0];
    if (there == set) return GRADD_OK;
    if (there != LIVE_ALL) GRADD_TRY(find_within(w, like, &in[1]));
    return add_named(w, like, "GatherRows", in, (gradd_attrs_t){&attr, 1}, out);
}

/* The same of an operand that is broadcast along some of the leading axes. */
static gradd_status_t spread_rows_of(rewrite_t *w, const graph_node_t *like, int i,
                                     const gradd_rowwise_t *r, live_set_t set, gradd_val_t *out) {
    const gradd_type_t *in = &r->in[i].type;
    const int own = in->rank - r->in_lead[i]; /* axes behind the leading ones */
    gradd_type_t full = {in->dtype, r->lead + own, {0}};
    for (int d = 0; d < r->lead; d++)
        full.dims[d] = r->out[0].dims[d];
    for (int d = 0; d < own; d++)
        full.dims[r->lead + d] = in->dims[r->in_lead[i] + d];
    gradd_val_t v;
    w->g->rows = LIVE_NONE;
    GRADD_TRY(resize(w, like, "Expand", like->in[i], &full, &v));
    w->g->rows = (uint8_t)set;
    return rows_of(w, like, v, set, r->lead, out);
}

static gradd_type_t with_rows(const rewrite_t *w, const gradd_type_t *type, int lead,
                              live_set_t set) {
    gradd_type_t t = *type;
    for (int d = 0; d + 1 < lead; d++)
        t.dims[d] = 1;
    t.dims[lead - 1] = graph_type(w->g, w->lists[set])->dims[0];
    return t;
}

/* ---- nodes over some rows -------------------------------------------------------------------- */

static gradd_status_t keep(rewrite_t *w, const graph_node_t *old, const gradd_val_t *made, int lead,
                           live_set_t set) {
    char want[GRADD_TYPE_TEXT], got[GRADD_TYPE_TEXT];
    for (int j = 0; j < old->n_out; j++) {
        if (old->out[j] == GRADD_NONE) continue;
        const gradd_type_t expected = with_rows(w, graph_type(w->g, old->out[j]), lead, set);
        if (!gradd_type_equal(&expected, graph_type(w->g, made[j])))
            return GRADD_FAIL(INTERNAL, "%s makes %s of some rows, expected %s", old->op->name,
                              gradd_type_format(graph_type(w->g, made[j]), got),
                              gradd_type_format(&expected, want));
        w->to[old->out[j]] = made[j];
    }
    const graph_value_t *first = w->g->values[made[0]];
    if (first->kind != VALUE_NODE) return GRADD_OK;
    graph_node_t *n = &w->g->nodes[first->node];
    if (!n->parts && n->origin == old->origin) n->parts = old->parts, n->n_parts = old->n_parts;
    return GRADD_OK;
}

static gradd_status_t shrink_rowwise(rewrite_t *w, const graph_node_t *n, int lead,
                                     live_set_t set) {
    gradd_val_t in[GRADD_OP_MAX_IN], out[GRADD_OP_MAX_OUT];
    gradd_rowwise_t r;
    graph_operands_t operands;
    if (!live_rowwise(w->l, n, set, lead, &operands, &r))
        return GRADD_FAIL(INTERNAL, "%s is not row by row any more", n->op->name);
    for (int i = 0; i < n->n_in; i++) {
        in[i] = n->in[i];
        if (in[i] == GRADD_NONE) continue;
        if (r.use[i] == GRADD_USE_ROWS)
            GRADD_TRY(rows_of(w, n, n->in[i], set, r.in_lead[i], &in[i]));
        else if (r.use[i] == GRADD_USE_SPREAD)
            GRADD_TRY(spread_rows_of(w, n, i, &r, set, &in[i]));
    }
    int n_in = n->n_in;
    for (; r.takes_rows && n_in <= r.takes_rows; n_in++)
        in[n_in] = n_in == r.takes_rows ? w->lists[set] : GRADD_NONE;
    if (r.resizes) {
        const gradd_type_t type = with_rows(w, &r.out[0], lead, set);
        GRADD_TRY(resize(w, n, "Reshape", in[0], &type, &out[0]));
        return keep(w, n, out, lead, set);
    }
    GRADD_TRY(add(w, n,
                  (graph_emit_t){.op = n->op,
                                 .attrs = n->attrs,
                                 .in = in,
                                 .n_in = n_in,
                                 .n_out = n->n_out,
                                 .no_merge = n->no_merge},
                  out));
    return keep(w, n, out, lead, set);
}

/* Ranges of real rows take the place of the mask; dropout and a bias have to know which rows they
 * are. */
static gradd_status_t shrink_attention(rewrite_t *w, const graph_node_t *n, live_set_t set,
                                       gradd_val_t intervals) {
    enum { MOST_ATTRS = GRADD_ATTN_ATTRS + 2 };
    gradd_val_t in[GRADD_ATTN_ROWS + 1], out[GRADD_OP_MAX_OUT];
    gradd_attr_t attrs[MOST_ATTRS];
    const gradd_val_t ranges[2] = {w->lists[set], intervals};
    const bool biased = n->n_in > GRADD_ATTN_BIAS && n->in[GRADD_ATTN_BIAS] != GRADD_NONE;
    int n_attrs = 0, n_in = GRADD_ATTN_RANGES + 1;
    for (int i = 0; i <= GRADD_ATTN_ROWS; i++)
        in[i] = GRADD_NONE;
    for (int i = GRADD_ATTN_Q; i <= GRADD_ATTN_V; i++)
        GRADD_TRY(rows_of(w, n, n->in[i], set, 2, &in[i]));
    GRADD_TRY(add_named(w, n, "RowRanges", ranges, (gradd_attrs_t){0}, &in[GRADD_ATTN_RANGES]));
    if (biased) in[GRADD_ATTN_BIAS] = n->in[GRADD_ATTN_BIAS];
    if (n->n_in > GRADD_ATTN_SINKS)
        in[GRADD_ATTN_SINKS] = n->in[GRADD_ATTN_SINKS], n_in = GRADD_ATTN_SINKS + 1;
    for (int i = 0; i < n->attrs.n && n_attrs + 1 < MOST_ATTRS; i++)
        attrs[n_attrs++] = n->attrs.v[i];
    attrs[n_attrs++] =
        gradd_make_int(GRADD_ATTN_POSITIONS, graph_type(w->g, n->in[GRADD_ATTN_Q])->dims[1]);
    if (biased || gradd_attr_float(n->attrs, GRADD_ATTN_DROPOUT, 0) > 0)
        in[GRADD_ATTN_ROWS] = w->lists[set], n_in = GRADD_ATTN_ROWS + 1;
    GRADD_TRY(
        add(w, n,
            (graph_emit_t){
                .op = n->op, .attrs = {attrs, n_attrs},
                     .in = in, .n_in = n_in, .n_out = n->n_out
    },
            out));
    return keep(w, n, out, 2, set);
}

/* Queries, and the list of their rows: of a set, or all of them as rows of one sequence. */
static gradd_status_t queries_of(rewrite_t *w, const graph_node_t *n, live_set_t set,
                                 gradd_val_t *out_list, gradd_val_t *out) {
    const int64_t rows = w->l->loss.rows;
    const gradd_type_t all = {GRADD_DT_I64, 1, {rows}};
    gradd_type_t flat = *graph_type(w->g, n->in[GRADD_ATTN_Q]);
    *out_list = w->lists[set < LIVE_ALL ? set : LIVE_NONE];
    if (set < LIVE_ALL) return rows_of(w, n, n->in[GRADD_ATTN_Q], set, 2, out);
    int64_t *numbers = arena_array(w->g->arena, (size_t)rows, sizeof numbers[0]);
    if (!numbers) return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    for (int64_t i = 0; i < rows; i++)
        numbers[i] = i;
    flat.dims[0] = 1, flat.dims[1] = rows;
    GRADD_TRY(graph_constant(w->g, &all, numbers, out_list));
    return resize(w, n, "Reshape", n->in[GRADD_ATTN_Q], &flat, out);
}

/* Ranges of source rows take the place of the mask of cross-attention. */
static gradd_status_t shrink_cross(rewrite_t *w, const graph_node_t *n, live_set_t set) {
    enum { MOST_ATTRS = GRADD_ATTN_ATTRS + 2 };
    gradd_val_t in[GRADD_ATTN_INPUTS], out[GRADD_OP_MAX_OUT], lists[2];
    gradd_attr_t attrs[MOST_ATTRS];
    const gradd_type_t whole = *graph_type(w->g, n->out[GRADD_ATTN_Y]);
    int n_attrs = 0;
    for (int i = 0; i < GRADD_ATTN_INPUTS; i++)
        in[i] = i >= GRADD_ATTN_BIAS && i < n->n_in ? n->in[i] : GRADD_NONE;
    GRADD_TRY(queries_of(w, n, set, &lists[0], &in[GRADD_ATTN_Q]));
    lists[1] = w->lists[LIVE_SOURCE];
    for (int i = GRADD_ATTN_K; i <= GRADD_ATTN_V; i++)
        GRADD_TRY(rows_of(w, n, n->in[i], LIVE_SOURCE, 2, &in[i]));
    const gradd_attr_t sizes[2] = {gradd_make_int("positions", w->l->loss.positions),
                                   gradd_make_int("other_positions", w->l->source_positions)};
    GRADD_TRY(
        add_named(w, n, "CrossRanges", lists, (gradd_attrs_t){sizes, 2}, &in[GRADD_ATTN_RANGES]));
    for (int i = 0; i < n->attrs.n && n_attrs + 2 < MOST_ATTRS; i++)
        attrs[n_attrs++] = n->attrs.v[i];
    attrs[n_attrs++] = gradd_make_int(GRADD_ATTN_POSITIONS, w->l->loss.positions);
    attrs[n_attrs++] = gradd_make_int(GRADD_ATTN_KEY_POSITIONS, w->l->source_positions);
    in[GRADD_ATTN_ROWS] = lists[0], in[GRADD_ATTN_KEY_ROWS] = lists[1];
    const graph_emit_t e = {
        .op = n->op,
        .attrs = {attrs, n_attrs},
        .in = in,
        .n_in = GRADD_ATTN_INPUTS,
        .n_out = n->n_out
    };
    GRADD_TRY(add(w, n, e, out));
    if (set < LIVE_ALL) return keep(w, n, out, 2, set);
    return resize(w, n, "Reshape", out[0], &whole, &w->to[n->out[GRADD_ATTN_Y]]);
}

/* ---- the loss -------------------------------------------------------------------------------- */

/* Labels of the rows of a set. What stands for nothing has the ignored one, and with a shift so has
 * the last row of a sequence, which is real where the sequence has no padding. */
static gradd_status_t labels_of(rewrite_t *w, const graph_node_t *loss, live_set_t set,
                                gradd_val_t *out) {
    const live_loss_t *l = &w->l->loss;
    const gradd_type_t flat = {graph_type(w->g, l->labels)->dtype, 1, {l->rows}};
    const gradd_attr_t attrs[4] = {
        gradd_make_int("lead", 1),
        gradd_make_int("offset", gradd_attr_int(loss->attrs, GRADD_CE_SHIFT, 0)),
        gradd_make_int("positions", l->positions),
        gradd_make_int("fill", gradd_attr_int(loss->attrs, GRADD_CE_IGNORE_INDEX, 0))};
    gradd_val_t in[2] = {GRADD_NONE, w->lists[set]};
    w->g->rows = LIVE_NONE;
    GRADD_TRY(resize(w, loss, "Reshape", l->labels, &flat, &in[0]));
    w->g->rows = (uint8_t)set;
    return add_named(w, loss, "GatherRows", in, (gradd_attrs_t){attrs, 4}, out);
}

/* Losses of some rows among zeros: the losses of all. */
static gradd_status_t in_full(rewrite_t *w, const graph_node_t *loss, live_set_t set,
                              gradd_val_t *value) {
    const gradd_type_t all = *graph_type(w->g, loss->out[GRADD_CE_LOSS]);
    const gradd_attr_t dims = gradd_make_ints("dims", &w->l->loss.rows, 1);
    gradd_val_t in[2] = {*value, w->lists[set]};
    if (strcmp(gradd_attr_string(loss->attrs, GRADD_CE_REDUCTION, "mean"), "none")) return GRADD_OK;
    GRADD_TRY(add_named(w, loss, "ScatterRows", in, (gradd_attrs_t){&dims, 1}, value));
    return resize(w, loss, "Reshape", *value, &all, value);
}

static gradd_status_t shrink_loss(rewrite_t *w, const graph_node_t *n, gradd_val_t *out) {
    const live_set_t set = live_loss_set(w->l);
    gradd_val_t in[GRADD_OP_MAX_IN];
    gradd_attr_t attrs[GRADD_CE_ATTRS];
    int n_attrs = 0;
    memcpy(in, n->in, sizeof in[0] * (size_t)n->n_in);
    w->g->rows = (uint8_t)set;
    GRADD_TRY(rows_of(w, n, n->in[GRADD_CE_LOGITS], set, w->l->loss.lead, &in[GRADD_CE_LOGITS]));
    GRADD_TRY(labels_of(w, n, set, &in[GRADD_CE_LABELS]));
    for (int i = 0; i < n->attrs.n && n_attrs < GRADD_CE_ATTRS; i++)
        if (strcmp(n->attrs.v[i].name, GRADD_CE_SHIFT)) attrs[n_attrs++] = n->attrs.v[i];
    GRADD_TRY(
        add(w, n,
            (graph_emit_t){
                .op = n->op, .attrs = {attrs, n_attrs},
                     .in = in, .n_in = n->n_in, .n_out = 1
    },
            out));
    graph_node_t *made = &w->g->nodes[w->g->values[*out]->node];
    made->parts = n->parts, made->n_parts = n->n_parts;
    return in_full(w, n, set, out);
}

/* ---- the graph ------------------------------------------------------------------------------- */

/* Leading axes of what a node over some rows makes. */
static int lead_of(const live_t *l, const graph_node_t *n) {
    for (int j = 0; j < n->n_out; j++)
        if (n->out[j] != GRADD_NONE && l->need[n->out[j]] != LIVE_NONE) return l->lead[n->out[j]];
    return 0;
}

static gradd_status_t shrink(rewrite_t *w, int32_t id) {
    const graph_node_t n = w->g->nodes[id]; /* a copy: the list moves */
    const live_set_t set = w->l->at[id];
    GRADD_TRY(compile_time_spend(1));
    w->g->rows = set == LIVE_ALL ? LIVE_NONE : (uint8_t)set;
    if (w->l->cross[id]) return shrink_cross(w, &n, set);
    if (set == LIVE_NONE || set == LIVE_ALL) return GRADD_OK;
    if (!strcmp(n.op->name, "FusedAttention"))
        return shrink_attention(w, &n, set, w->l->intervals[id]);
    return shrink_rowwise(w, &n, lead_of(w->l, &n), set);
}

gradd_status_t live_rewrite(const live_t *l, const gradd_val_t *lists) {
    graph_t *g = l->g;
    graph_redirect_t redirect;
    const graph_node_t loss = g->nodes[l->loss.node];
    gradd_val_t made = GRADD_NONE;
    gradd_status_t status = GRADD_OK;
    rewrite_t w = {.l = l, .g = g, .lists = lists, .within = GRADD_NONE};
    w.to = malloc(sizeof w.to[0] * ((size_t)l->n_values + 1));
    if (!w.to) return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    for (int32_t id = 0; id < l->loss.node && !status; id++)
        status = shrink(&w, id);
    const bool shrinks = live_loss_set(l) != LIVE_ALL;
    if (!status && shrinks) status = shrink_loss(&w, &loss, &made);
    g->rows = LIVE_NONE;
    if (!status) status = graph_redirect_begin(g, &redirect);
    for (int32_t id = 0; id < l->loss.node && !status; id++) {
        const gradd_val_t old = g->nodes[id].out[0];
        if (l->cross[id] && l->at[id] == LIVE_ALL) graph_redirect(&redirect, old, w.to[old]);
    }
    free(w.to);
    if (status) return status;
    if (shrinks) graph_redirect(&redirect, loss.out[0], made);
    return graph_redirect_end(g, &redirect);
}
