/* The graph with nodes over channels-last operands. See channels.h. */
#include <stdlib.h>
#include <string.h>

#include "kernels/contract/registry.h"
#include "kernels/describe/conv.h"
#include "kernels/describe/moves.h"
#include "kernels/describe/windowmax.h"
#include "kernels/describe/windows.h"
#include "kernels/rules/rules.h"
#include "server/graph/channels/channels.h"
#include "server/graph/redirect.h"

typedef struct move_s {
    const channels_t *c;
    graph_t *g;
    gradd_builder_t *b;
    gradd_val_t *last;  /* per value: the same in channels-last form; GRADD_NONE = not there */
    gradd_val_t *first; /* per value that a moved node makes: turned back; the same */
} move_t;

/* ---- forms ----------------------------------------------------------------------------------- */

/* The same value in the other form: a view where no element changes its place. */
static gradd_val_t turned(move_t *w, gradd_val_t v, bool back) {
    const gradd_type_t t = *graph_type(w->g, v);
    const int rank = t.rank, channels = back ? rank - 1 : 1;
    int64_t perm[GRADD_MAX_RANK] = {0}, dims[GRADD_MAX_RANK] = {t.dims[0]}, others = 1;
    for (int i = 1; i < rank; i++) {
        const int to = channels_axis(i, rank);
        perm[back ? i : to] = back ? to : i;
        others *= i == channels ? 1 : t.dims[i];
    }
    for (int i = 1; i < rank; i++)
        dims[i] = t.dims[perm[i]];
    if (t.dims[channels] == 1 || others == 1) return gradd_reshape_to(w->b, v, dims, rank);
    return gradd_transpose(w->b, v, perm, rank);
}

static gradd_val_t last_of(move_t *w, gradd_val_t v) {
    if (v >= w->c->n_values) return turned(w, v, false);
    if (w->last[v] == GRADD_NONE) w->last[v] = turned(w, v, false);
    return w->last[v];
}

static bool is_moved(const move_t *w, gradd_val_t v) {
    const graph_value_t *value = w->g->values[v];
    return v < w->c->n_values && value->kind == VALUE_NODE && w->c->moves[value->node] &&
           w->last[v] != GRADD_NONE;
}

/* A value as it was, also where a moved node makes it. */
static gradd_val_t first_of(move_t *w, gradd_val_t v) {
    if (v == GRADD_NONE || !is_moved(w, v)) return v;
    if (w->first[v] == GRADD_NONE) w->first[v] = turned(w, w->last[v], true);
    return w->first[v];
}

/* An operand of an elementwise node of that rank, aligned as broadcasting does. */
static gradd_val_t aligned(move_t *w, gradd_val_t v, int rank) {
    int64_t dims[GRADD_MAX_RANK];
    if (v == GRADD_NONE || gradd_type_count(graph_type(w->g, v)) == 1) return first_of(w, v);
    if (graph_type(w->g, v)->rank == rank) return last_of(w, v);
    v = first_of(w, v);
    if (v == GRADD_NONE) return v;
    const gradd_type_t *t = graph_type(w->g, v);
    for (int i = 0; i < rank; i++)
        dims[i] = i < rank - t->rank ? 1 : t->dims[i - (rank - t->rank)];
    return last_of(w, gradd_reshape_to(w->b, v, dims, rank));
}

/* ---- nodes ----------------------------------------------------------------------------------- */

/* The node's own operator over other operands, with other attributes. */
static gradd_status_t emit_same(move_t *w, const graph_node_t *n, const gradd_val_t *in,
                                gradd_attrs_t attrs, gradd_val_t *out) {
    GRADD_TRY(w->b->status);
    return graph_emit(w->g,
                      &(graph_emit_t){.op = n->op,
                                      .opset = n->opset,
                                      .attrs = attrs,
                                      .in = in,
                                      .n_in = n->n_in,
                                      .n_out = n->n_out,
                                      .random = n->random},
                      out);
}

static gradd_status_t move_map(move_t *w, const graph_node_t *n, gradd_val_t *out) {
    gradd_val_t in[GRADD_OP_MAX_IN];
    const int rank = graph_type(w->g, n->out[0])->rank;
    for (int i = 0; i < n->n_in; i++)
        in[i] = aligned(w, n->in[i], rank);
    return emit_same(w, n, in, n->attrs, out);
}

/* The operands as they are, but the first. */
static void take_operands(move_t *w, const graph_node_t *n, gradd_val_t *in) {
    in[0] = last_of(w, n->in[0]);
    for (int i = 1; i < n->n_in; i++)
        in[i] = first_of(w, n->in[i]);
}

static gradd_status_t move_axis(move_t *w, const graph_node_t *n, gradd_val_t *out) {
    gradd_val_t in[GRADD_OP_MAX_IN];
    gradd_attr_t attrs[8];
    const int rank = graph_type(w->g, n->in[0])->rank;
    const int64_t otherwise = strcmp(n->op->name, "Split") ? -1 : 0;
    int64_t axis = gradd_attr_int(n->attrs, "axis", otherwise);
    int n_attrs = 0;
    if (axis < 0) axis += rank;
    take_operands(w, n, in);
    if (!strcmp(n->op->name, "Concat"))
        for (int i = 1; i < n->n_in; i++)
            in[i] = last_of(w, n->in[i]);
    attrs[n_attrs++] = gradd_make_int("axis", channels_axis((int)axis, rank));
    for (int i = 0; i < n->attrs.n && n_attrs < 8; i++)
        if (strcmp(n->attrs.v[i].name, "axis")) attrs[n_attrs++] = n->attrs.v[i];
    return emit_same(w, n, in, (gradd_attrs_t){attrs, n_attrs}, out);
}

static gradd_status_t move_pad(move_t *w, const graph_node_t *n, gradd_val_t *out) {
    graph_operands_t o;
    gradd_pads_t pads;
    gradd_val_t in[GRADD_OP_MAX_IN];
    int64_t all[2 * GRADD_MAX_RANK];
    const int rank = graph_type(w->g, n->in[0])->rank;
    graph_describe(w->g, n, &o);
    GRADD_TRY(gradd_pads_read(o.in, n->n_in, &pads));
    for (int i = 0; i < rank; i++) {
        all[channels_axis(i, rank)] = pads.begin[i];
        all[rank + channels_axis(i, rank)] = pads.end[i];
    }
    take_operands(w, n, in);
    in[1] = gradd_const_i64s(w->b, all, 2 * rank);
    if (n->n_in > 3) in[3] = GRADD_NONE; /* of all axes */
    return emit_same(w, n, in, n->attrs, out);
}

static gradd_status_t move_reduce(move_t *w, const graph_node_t *n, gradd_val_t *out) {
    gradd_val_t in[2] = {last_of(w, n->in[0]), GRADD_NONE};
    gradd_attr_t attrs[8];
    int64_t axes[GRADD_MAX_RANK];
    bool mask[GRADD_MAX_RANK];
    int n_axes = 0, n_attrs = 0;
    const int rank = graph_type(w->g, n->in[0])->rank;
    const bool given = n->n_in > 1 && n->in[1] != GRADD_NONE;
    if (!given && !gradd_attr_find(n->attrs, "axes")) return emit_same(w, n, in, n->attrs, out);
    if (!channels_reduced(w->g, n, mask)) return GRADD_FAIL(INTERNAL, "unknown axes");
    for (int i = 0; i < rank; i++)
        if (mask[i]) axes[n_axes++] = channels_axis(i, rank);
    for (int i = 0; i < n->attrs.n && n_attrs < 7; i++)
        if (strcmp(n->attrs.v[i].name, "axes")) attrs[n_attrs++] = n->attrs.v[i];
    if (given)
        in[1] = gradd_const_i64s(w->b, axes, n_axes);
    else
        attrs[n_attrs++] = gradd_make_ints("axes", axes, (size_t)n_axes);
    return emit_same(w, n, in, (gradd_attrs_t){attrs, n_attrs}, out);
}

/* BatchNorm takes a matrix [N X, C]. */
static gradd_status_t move_norm(move_t *w, const graph_node_t *n, gradd_val_t *out) {
    gradd_val_t in[GRADD_OP_MAX_IN];
    take_operands(w, n, in);
    GRADD_TRY(w->b->status);
    const gradd_type_t t = *graph_type(w->g, in[0]);
    int64_t rows = 1;
    for (int i = 0; i + 1 < t.rank; i++)
        rows *= t.dims[i];
    in[0] = gradd_reshape_to(w->b, in[0], (int64_t[]){rows, t.dims[t.rank - 1]}, 2);
    GRADD_TRY(emit_same(w, n, in, n->attrs, out));
    out[0] = gradd_reshape_to(w->b, out[0], t.dims, t.rank);
    return w->b->status;
}

/* Channels have windows of their own, of one element. */
static gradd_status_t move_windows(move_t *w, graph_node_t *n, gradd_val_t *out) {
    const gradd_pool_axis_t single = {.kernel = 1, .stride = 1, .dilation = 1};
    const gradd_attr_t *steps = gradd_attr_find(n->attrs, GRADD_WINDOW_STEPS);
    gradd_val_t in[1 + GRADD_WINDOW_AXES];
    int64_t all[GRADD_WINDOW_AXES] = {1, 1, 1};
    gradd_windows_t channels;
    take_operands(w, n, in);
    for (int i = 0; steps && i < n->n_in - 1; i++)
        all[i] = steps->ints[i];
    GRADD_TRY(gradd_windows_pool(graph_type(w->g, n->in[0])->dims[1], &single, &channels));
    in[n->n_in] = gradd_windows_span(w->b, &channels);
    gradd_windows_finish(&channels);
    const gradd_attr_t attr = gradd_make_ints(GRADD_WINDOW_STEPS, all, (size_t)n->n_in);
    n->n_in++, n->n_out = 1;
    return emit_same(w, n, in, (gradd_attrs_t){&attr, 1}, out);
}

static gradd_status_t relation_of(move_t *w, const graph_node_t *n, gradd_conv_t *out,
                                  gradd_conv_made_t *out_made) {
    graph_operands_t o;
    const gradd_infer_t c = graph_describe(w->g, n, &o);
    return gradd_conv_of_op(c.op, c.in, c.n_in, c.attrs, out, out_made);
}

/* A convolution by single taps: a product with W [M, C]. */
static gradd_status_t move_product(move_t *w, const graph_node_t *n, gradd_val_t *out) {
    gradd_val_t in[GRADD_OP_MAX_IN];
    const gradd_attr_t attr = gradd_make_int("transB", 1);
    take_operands(w, n, in);
    const bool biased = n->n_in > GRADD_CONV_BIAS && in[GRADD_CONV_BIAS] != GRADD_NONE;
    const int64_t *dims = graph_type(w->g, n->in[GRADD_CONV_W])->dims;
    in[1] = gradd_reshape_to(w->b, in[1], (int64_t[]){dims[0], dims[1]}, 2);
    out[0] =
        gradd_emit_attrs(w->b, biased ? "Linear" : "FusedMatMul", in, biased ? 3 : 2, &attr, 1);
    return w->b->status;
}

static gradd_status_t move_conv(move_t *w, const graph_node_t *n, gradd_val_t *out) {
    gradd_val_t in[GRADD_OP_MAX_IN];
    gradd_attr_t attrs[GRADD_CONV_ATTRS];
    int64_t pads[2 * GRADD_CONV_AXES];
    gradd_conv_t v;
    gradd_conv_made_t made;
    GRADD_TRY(relation_of(w, n, &v, &made));
    take_operands(w, n, in);
    if (made == GRADD_CONV_MAKES_Y) {
        const int n_attrs = gradd_conv_attrs(&v, pads, attrs);
        out[0] = gradd_emit_attrs(w->b, "ConvLast", in, v.has_bias ? 3 : 2, attrs, n_attrs);
        return w->b->status;
    }
    const int n_attrs = gradd_conv_data_attrs(&v, attrs);
    out[0] = gradd_emit_attrs(w->b, "ConvLastDataGrad", in, 2, attrs, n_attrs);
    if (v.has_bias) out[0] = GRADD_EMIT(w->b, "Add", out[0], in[GRADD_CONV_DATA_BIAS]);
    return w->b->status;
}

/* n is a copy of the node; of one whose further results are not read it keeps the first. */
static gradd_status_t move_as(move_t *w, graph_node_t *n, uint8_t kind, gradd_val_t *out) {
    switch (kind) {
    case CHANNELS_CONV:
        return move_conv(w, n, out);
    case CHANNELS_PRODUCT:
        return move_product(w, n, out);
    case CHANNELS_NORM:
        return move_norm(w, n, out);
    case CHANNELS_WINDOWS:
        return move_windows(w, n, out);
    case CHANNELS_AXIS:
        return move_axis(w, n, out);
    case CHANNELS_PAD:
        return move_pad(w, n, out);
    case CHANNELS_REDUCE:
        return move_reduce(w, n, out);
    default:
        return move_map(w, n, out);
    }
}

/* ---- the graph ------------------------------------------------------------------------------- */

static gradd_status_t misfit(const move_t *w, const graph_node_t *n, gradd_val_t got,
                             const gradd_type_t *want) {
    char a[GRADD_TYPE_TEXT], b[GRADD_TYPE_TEXT];
    return GRADD_FAIL(INTERNAL, "%s makes %s of channels-last operands, expected %s", n->op->name,
                      gradd_type_format(graph_type(w->g, got), a), gradd_type_format(want, b));
}

/* Notes the results: those in channels-last form, and others that are what they were. */
static gradd_status_t keep(move_t *w, graph_redirect_t *redirect, const graph_node_t *n,
                           const gradd_val_t *made) {
    const gradd_type_t of = *graph_type(w->g, n->out[0]);
    const bool reduced =
        of.rank != graph_type(w->g, n->in[0])->rank && !strncmp(n->op->name, "Reduce", 6);
    for (int j = 0; j < n->n_out; j++) {
        if (n->out[j] == GRADD_NONE) continue;
        gradd_type_t want = *graph_type(w->g, n->out[j]);
        const bool turns = !reduced && want.rank == of.rank;
        if (turns) want = channels_last_type(&want);
        if (!gradd_type_equal(&want, graph_type(w->g, made[j])))
            return misfit(w, n, made[j], &want);
        if (turns)
            w->last[n->out[j]] = made[j];
        else
            graph_redirect(redirect, n->out[j], made[j]);
    }
    return GRADD_OK;
}

static gradd_status_t move_node(move_t *w, graph_redirect_t *redirect, int32_t i) {
    graph_node_t n = w->g->nodes[i]; /* a copy: the array may move */
    gradd_val_t out[GRADD_OP_MAX_OUT];
    if (w->c->kind[i] == CHANNELS_TO_FIRST) w->last[n.out[0]] = n.in[0];
    if (!w->c->moves[i]) return GRADD_OK;
    w->g->origin = n.origin;
    w->g->random = n.random;
    w->g->rows = n.rows;
    GRADD_TRY(move_as(w, &n, w->c->kind[i], out));
    GRADD_TRY(keep(w, redirect, &n, out));
    const graph_value_t *made = w->g->values[out[0]];
    if (made->kind != VALUE_NODE || w->g->nodes[made->node].parts) return GRADD_OK;
    graph_node_t *node = &w->g->nodes[made->node];
    if (node->origin == n.origin) node->parts = n.parts, node->n_parts = n.n_parts;
    return GRADD_OK;
}

/* Readers of old values read new ones: what needs the old form, the value turned back. */
static gradd_status_t serve(move_t *w, graph_redirect_t *redirect) {
    graph_t *g = w->g;
    for (int32_t i = 0; i < w->c->n_nodes; i++) {
        const graph_node_t n = g->nodes[i];
        if (w->c->moves[i] || !channels_alive(w->c, &n)) continue;
        if (w->c->kind[i] == CHANNELS_TO_LAST && w->last[n.in[0]] != GRADD_NONE) {
            graph_redirect(redirect, n.out[0], w->last[n.in[0]]);
            continue;
        }
        g->origin = n.origin;
        for (int k = 0; k < n.n_in; k++)
            first_of(w, n.in[k]);
    }
    for (int j = 0; j < g->n_outputs; j++)
        first_of(w, g->outputs[j]);
    for (gradd_val_t v = 0; v < w->c->n_values; v++)
        if (w->first[v] != GRADD_NONE) graph_redirect(redirect, v, w->first[v]);
    return w->b->status;
}

gradd_status_t channels_rewrite(const channels_t *c) {
    graph_t *g = c->g;
    move_t w = {.c = c, .g = g, .b = &g->builder};
    graph_redirect_t redirect;
    w.last = malloc(sizeof w.last[0] * 2 * ((size_t)c->n_values + 1));
    if (!w.last) return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    w.first = w.last + c->n_values;
    for (int v = 0; v < 2 * c->n_values; v++)
        w.last[v] = GRADD_NONE;
    g->builder.status = GRADD_OK;
    gradd_status_t status = graph_redirect_begin(g, &redirect);
    for (int32_t i = 0; i < c->n_nodes && !status; i++)
        status = move_node(&w, &redirect, i);
    if (!status) status = serve(&w, &redirect);
    if (!status) status = graph_redirect_end(g, &redirect);
    g->rows = 0;
    free(w.last);
    return status;
}
