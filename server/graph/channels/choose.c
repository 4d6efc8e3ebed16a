/* Which nodes move to channels-last. See channels.h. */
#include <stdlib.h>
#include <string.h>

#include "kernels/contract/registry.h"
#include "kernels/describe/conv.h"
#include "kernels/describe/windowmax.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rowwise.h"
#include "server/graph/channels/channels.h"
#include "server/graph/compile_time.h"
#include "server/graph/readers.h"

/* Of tensors with spatial axes. */
enum { LEAST_RANK = 3, MOST_RANK = 2 + GRADD_CONV_AXES, MOST_ROUNDS = 8 };

gradd_type_t channels_last_type(const gradd_type_t *type) {
    gradd_type_t t = *type;
    for (int i = 0; i < type->rank; i++)
        t.dims[channels_axis(i, type->rank)] = type->dims[i];
    return t;
}

static bool is_spatial(const gradd_type_t *t) {
    return t->rank >= LEAST_RANK && t->rank <= MOST_RANK;
}

static bool is_named(const graph_node_t *n, const char *name) {
    return !strcmp(n->op->name, name);
}

/* ---- kinds ----------------------------------------------------------------------------------- */

/* Whether the device has the channels-last form of a convolution, as it is. */
static bool has_last(const graph_t *g, const graph_node_t *n, const gradd_conv_t *v, bool back) {
    gradd_attr_t attrs[GRADD_CONV_ATTRS];
    int64_t pads[2 * GRADD_CONV_AXES];
    gradd_conv_t last = *v;
    last.last = true;
    last.has_bias = v->has_bias && !back; /* added behind it */
    const int n_attrs = back ? gradd_conv_data_attrs(v, attrs) : gradd_conv_attrs(v, pads, attrs);
    gradd_view_t in[3] = {{.type = back ? gradd_conv_y_type(&last) : gradd_conv_x_type(&last)},
                          {.type = *graph_type(g, n->in[GRADD_CONV_W])}};
    if (last.has_bias) in[2].type = *graph_type(g, n->in[GRADD_CONV_BIAS]);
    const gradd_infer_t call = {
        .op = gradd_op_by_name(back ? "ConvLastDataGrad" : "ConvLast"),
        .attrs = {attrs, n_attrs},
        .n_in = last.has_bias ? 3 : 2,
        .n_out = 1,
        .in = in
    };
    return call.op && gradd_backend_kernel(g->backend, &call);
}

/* A product needs no transposition in either form, but f32 alone is computed without in the first:
 * halves have true kernels for channels-last tensors only. A depthwise convolution has a kernel
 * without reorders in either. */
static channels_kind_t kind_of_conv(const graph_t *g, const graph_node_t *n, bool *out_begins) {
    graph_operands_t o;
    gradd_conv_t v;
    gradd_conv_made_t made;
    const gradd_infer_t c = graph_describe(g, n, &o);
    if (gradd_conv_of_op(c.op, c.in, c.n_in, c.attrs, &v, &made)) return CHANNELS_STAY;
    const bool back = made == GRADD_CONV_MAKES_X, has = has_last(g, n, &v, back);
    const bool product = !back && v.groups == 1 && gradd_conv_is_pointwise(&v);
    *out_begins = has && !gradd_conv_is_depthwise(&v) && (!product || gradd_dtype_is_half(v.dtype));
    return product ? CHANNELS_PRODUCT : has ? CHANNELS_CONV : CHANNELS_STAY;
}

static channels_kind_t kind_of_transpose(const graph_node_t *n, int rank) {
    const gradd_attr_t *perm = gradd_attr_find(n->attrs, "perm");
    bool to_last = perm, to_first = perm;
    for (int i = 0; perm && i < rank; i++) {
        to_last &= channels_axis((int)perm->ints[i], rank) == i;
        to_first &= channels_axis(i, rank) == (int)perm->ints[i];
    }
    return to_last ? CHANNELS_TO_LAST : to_first ? CHANNELS_TO_FIRST : CHANNELS_STAY;
}

bool channels_reduced(const graph_t *g, const graph_node_t *n, bool *out_mask) {
    graph_operands_t o;
    const gradd_infer_t c = graph_describe(g, n, &o);
    return !gradd_known_axes(&c, 1, o.in[0].type.rank, out_mask);
}

/* Without the reduced axes, channels must not change places with a spatial one. */
static bool can_reduce(const graph_t *g, const graph_node_t *n) {
    bool mask[GRADD_MAX_RANK], spatial = false;
    const int rank = graph_type(g, n->in[0])->rank;
    if (!channels_reduced(g, n, mask)) return false;
    for (int i = 2; i < rank; i++)
        spatial |= !mask[i];
    return gradd_attr_int(n->attrs, "keepdims", 1) || mask[1] || !spatial;
}

static bool is_elementwise(const graph_t *g, const graph_node_t *n) {
    const gradd_type_t *y = graph_type(g, n->out[0]);
    if (n->op->rowwise != gradd_rowwise_map || n->op->flags & GRADD_OP_RANDOM) return false;
    for (int i = 0; i < n->n_in; i++)
        if (n->in[i] != GRADD_NONE && graph_type(g, n->in[i])->rank > y->rank) return false;
    for (int j = 1; j < n->n_out; j++)
        if (n->out[j] != GRADD_NONE && !gradd_type_same_shape(graph_type(g, n->out[j]), y))
            return false;
    return true;
}

/* All spatial axes have windows, and nothing reads the places, which are those of channels-first
 * planes. */
static bool can_window(const channels_t *c, const graph_node_t *n) {
    const int axes = n->n_in - 1;
    if (axes != graph_type(c->g, n->in[0])->rank - 2 || axes >= GRADD_WINDOW_AXES) return false;
    return n->n_out < 2 || n->out[1] == GRADD_NONE || !c->readers[n->out[1]];
}

static channels_kind_t kind_of(const channels_t *c, const graph_node_t *n, bool *out_begins) {
    const graph_t *g = c->g;
    *out_begins = false;
    if (n->n_in < 1 || n->in[0] == GRADD_NONE || n->out[0] == GRADD_NONE) return CHANNELS_STAY;
    if (!is_spatial(graph_type(g, n->out[0])) && !is_spatial(graph_type(g, n->in[0])))
        return CHANNELS_STAY;
    if (is_named(n, "Conv") || is_named(n, "ConvDataGrad")) return kind_of_conv(g, n, out_begins);
    if (is_named(n, "Transpose")) return kind_of_transpose(n, graph_type(g, n->out[0])->rank);
    if (is_elementwise(g, n))
        return is_spatial(graph_type(g, n->out[0])) ? CHANNELS_MAP : CHANNELS_STAY;
    if (!is_spatial(graph_type(g, n->in[0]))) return CHANNELS_STAY;
    if (is_named(n, "BatchNorm")) return CHANNELS_NORM;
    if (is_named(n, "WindowMax")) return can_window(c, n) ? CHANNELS_WINDOWS : CHANNELS_STAY;
    if (is_named(n, "Concat") || is_named(n, "Split") || is_named(n, "Taps")) return CHANNELS_AXIS;
    if (is_named(n, "Pad")) return CHANNELS_PAD;
    return !strncmp(n->op->name, "Reduce", 6) && can_reduce(g, n) ? CHANNELS_REDUCE : CHANNELS_STAY;
}

/* ---- spreading ------------------------------------------------------------------------------- */

static int32_t maker(const channels_t *c, gradd_val_t v) {
    return v != GRADD_NONE && c->g->values[v]->kind == VALUE_NODE ? c->g->values[v]->node : -1;
}

bool channels_there(const channels_t *c, gradd_val_t v) {
    const int32_t node = maker(c, v);
    return node >= 0 && is_spatial(graph_type(c->g, v)) &&
           (c->moves[node] || c->kind[node] == CHANNELS_TO_FIRST);
}

bool channels_takes(const channels_t *c, int32_t node, int i) {
    return c->g->nodes[node].in[i] != GRADD_NONE &&
           (i == 0 || c->kind[node] == CHANNELS_MAP || is_named(&c->g->nodes[node], "Concat"));
}

static int64_t size_of(const channels_t *c, gradd_val_t v) {
    return c->g->values[v]->data ? 0 : gradd_type_count(graph_type(c->g, v));
}

/* Whether it is as large as the largest of these, and not known. */
static bool is_large(const channels_t *c, int32_t node, int i) {
    const graph_node_t *n = &c->g->nodes[node];
    int64_t most = 1;
    for (int k = 0; k < n->n_in; k++)
        if (channels_takes(c, node, k) && size_of(c, n->in[k]) > most) most = size_of(c, n->in[k]);
    return channels_takes(c, node, i) && size_of(c, n->in[i]) == most;
}

static bool can_follow(const channels_t *c, int32_t node) {
    const uint8_t kind = c->kind[node];
    return kind != CHANNELS_STAY && kind != CHANNELS_TO_LAST && kind != CHANNELS_TO_FIRST &&
           !c->moves[node];
}

bool channels_alive(const channels_t *c, const graph_node_t *n) {
    for (int j = 0; j < n->n_out; j++)
        if (n->out[j] != GRADD_NONE && c->readers[n->out[j]]) return true;
    return false;
}

/* A node moves if a large operand comes from one that has moved. */
static bool follow_down(channels_t *c) {
    bool changed = false;
    for (int32_t i = 0; i < c->n_nodes; i++) {
        const graph_node_t *n = &c->g->nodes[i];
        if (!can_follow(c, i)) continue;
        for (int k = 0; k < n->n_in && !c->moves[i]; k++) {
            const int32_t from = maker(c, n->in[k]);
            c->moves[i] =
                from >= 0 && c->moves[from] && channels_there(c, n->in[k]) && is_large(c, i, k);
        }
        changed |= c->moves[i];
    }
    return changed;
}

/* Whether all that reads a node's results has moved, and no more has to be transposed for it.
 * moved: per value, by how many operands of nodes that move. */
static bool is_read_last(const channels_t *c, int32_t node, const int32_t *moved) {
    const graph_node_t *n = &c->g->nodes[node];
    int missing = 0;
    if (!is_spatial(graph_type(c->g, n->out[0]))) return false;
    for (int j = 0; j < n->n_out; j++)
        if (n->out[j] != GRADD_NONE && is_spatial(graph_type(c->g, n->out[j])) &&
            moved[n->out[j]] != c->readers[n->out[j]])
            return false;
    for (int k = 0; k < n->n_in; k++)
        missing += is_large(c, node, k) && !channels_there(c, n->in[k]);
    return missing <= 1;
}

static gradd_status_t follow_up(channels_t *c, bool *out_changed) {
    int32_t *moved = calloc((size_t)c->n_values + 1, sizeof moved[0]);
    if (!moved) return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    *out_changed = false;
    for (int32_t i = c->n_nodes - 1; i >= 0; i--) {
        const graph_node_t *n = &c->g->nodes[i];
        if (can_follow(c, i) && channels_alive(c, n) && is_read_last(c, i, moved))
            c->moves[i] = *out_changed = true;
        if ((!c->moves[i] && c->kind[i] != CHANNELS_TO_LAST) || !channels_alive(c, n)) continue;
        for (int k = 0; k < n->n_in; k++)
            if (channels_takes(c, i, k)) moved[n->in[k]]++;
    }
    free(moved);
    return GRADD_OK;
}

static gradd_status_t spread(channels_t *c) {
    bool changed = c->any;
    for (int round = 0; round < MOST_ROUNDS && changed; round++) {
        bool up = false;
        GRADD_TRY(compile_time_spend(c->n_nodes));
        changed = follow_down(c);
        GRADD_TRY(follow_up(c, &up));
        changed |= up;
    }
    return GRADD_OK;
}

gradd_status_t channels_choose(graph_t *g, channels_t *c) {
    *c = (channels_t){.g = g, .n_nodes = g->n_nodes, .n_values = g->n_values};
    bool any = false;
    for (int i = 0; i < g->n_nodes && !any; i++)
        any = is_named(&g->nodes[i], "Conv") || is_named(&g->nodes[i], "ConvDataGrad");
    if (!any) return GRADD_OK;
    const size_t n = (size_t)g->n_nodes + 1;
    c->kind = calloc(n, sizeof c->kind[0]);
    c->moves = calloc(n, sizeof c->moves[0]);
    bool *begins = arena_alloc(g->arena, n * sizeof begins[0]);
    if (!c->kind || !c->moves || !begins)
        return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    GRADD_TRY(graph_count_readers(g, &c->readers));
    for (int i = 0; i < g->n_nodes; i++) {
        begins[i] = false;
        if (channels_alive(c, &g->nodes[i])) c->kind[i] = kind_of(c, &g->nodes[i], &begins[i]);
        c->any |= c->moves[i] = begins[i];
    }
    if (!c->any) return GRADD_OK;
    GRADD_TRY(spread(c));
    return channels_weigh(c, begins);
}

void channels_finish(channels_t *c) {
    free(c->kind);
    free(c->moves);
}
