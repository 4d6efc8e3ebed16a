/* Attention -> FusedAttention, which has no matrix of scores (pattern: match_attention.c):
 *
 *   MatMul(dropout(softmax(scores)), v)            the operator itself
 *   Transpose(attention, 0 2 1 3)                  the operator writes [B, positions, heads, width]
 *
 * in this order. The same transposition of an operand is absorbed as well, and so is one above a
 * Rope or a norm, which then work on [B, positions, heads, width]. Where the model has attention
 * whole (ONNX's Attention), it is one operator from the start; here its operands and result are
 * read and written as they lie, and repeated heads of k and v where they are once. MaskRanges
 * summarises a mask once, however many attentions share it. */
#include <string.h>

#include "kernels/describe/attention.h"
#include "kernels/rules/rules.h"
#include "server/graph/compile_time.h"
#include "server/graph/match/match_attention.h"
#include "server/graph/readers.h"

enum { N_IN = GRADD_ATTN_SINKS + 1 };
enum { COST_OF_MATCH = 32 }; /* a match walks up several chains */

typedef struct state_s {
    graph_t *g;
    graph_readers_t readers;
} state_t;

static gradd_status_t emit(graph_t *g, int32_t like, const match_fused_t *op, gradd_val_t *out) {
    graph_node_t node = g->nodes[like]; /* a copy: the list may move */
    return match_emit(g, &node, op, out, 1);
}

/* ---- operands with positions in front of heads ----------------------------------------------- */

/* A table of Rope, [B or 1, 1, S, R] and shorter, as [B or 1, S, 1, R]. */
static gradd_status_t turn_table(graph_t *g, int32_t like, gradd_val_t table, gradd_val_t *out) {
    const gradd_type_t *t = graph_type(g, table);
    int64_t dims[4] = {1, 1, 1, 1};
    *out = GRADD_NONE;
    if (t->rank < 2 || t->rank > 4 || (t->rank >= 3 && t->dims[t->rank - 3] != 1)) return GRADD_OK;
    if (t->rank == 4) dims[0] = t->dims[0];
    dims[1] = t->dims[t->rank - 2];
    dims[3] = t->dims[t->rank - 1];
    gradd_type_t shape = {GRADD_DT_I64, 1, {4}};
    gradd_val_t in[2] = {table, GRADD_NONE};
    GRADD_TRY(graph_constant(g, &shape, dims, &in[1]));
    const gradd_attr_t zero = gradd_make_int("allowzero", 1);
    return emit(g, like, &(match_fused_t){"Reshape", in, 2, &zero, 1, NULL}, out);
}

/* Whether an operator does the same to every row of its first operand, wherever rows lie. */
static bool works_by_row(const graph_t *g, const graph_node_t *n) {
    if (!strcmp(n->op->name, "Rope")) return true;
    if (strcmp(n->op->name, "RMSNormalization") && strcmp(n->op->name, "LayerNormalization"))
        return false;
    int64_t axis = gradd_attr_int(n->attrs, "axis", -1);
    return axis == -1 || axis == graph_type(g, n->in[0])->rank - 1;
}

/* A copy of node `from` that reads x, [B, positions, heads, width]. */
static gradd_status_t emit_turned(graph_t *g, int32_t like, int32_t from, gradd_val_t x,
                                  gradd_val_t *out) {
    graph_node_t node = g->nodes[from];
    gradd_val_t in[3] = {x, GRADD_NONE, GRADD_NONE};
    *out = GRADD_NONE;
    if (node.n_in > 3) return GRADD_OK;
    for (int i = 1; i < node.n_in; i++) {
        in[i] = node.in[i];
        if (!strcmp(node.op->name, "Rope")) GRADD_TRY(turn_table(g, like, node.in[i], &in[i]));
        if (in[i] == GRADD_NONE && node.in[i] != GRADD_NONE) return GRADD_OK;
    }
    GRADD_TRY(emit(g, like,
                   &(match_fused_t){node.op->name, in, node.n_in, node.attrs.v, node.attrs.n, NULL},
                   out));
    if (g->values[*out]->kind != VALUE_NODE) return GRADD_OK;
    graph_node_t *turned = &g->nodes[g->values[*out]->node];
    turned->origin = node.origin;
    turned->parts = node.parts, turned->n_parts = node.n_parts;
    return GRADD_OK;
}

/* The value whose heads and positions v has in the other order; GRADD_NONE if there is none.
 * Rope(Norm(Transpose(x))) becomes Rope(Norm(x)). */
static gradd_status_t positions_first(graph_t *g, int32_t like, gradd_val_t v, gradd_val_t *out) {
    int32_t chain[4];
    int n = 0;
    while (match_heads_swapped(g, v) == GRADD_NONE && g->values[v]->kind == VALUE_NODE && n < 4 &&
           works_by_row(g, &g->nodes[g->values[v]->node])) {
        chain[n] = g->values[v]->node;
        v = g->nodes[chain[n++]].in[0];
    }
    *out = match_heads_swapped(g, v);
    while (n > 0 && *out != GRADD_NONE)
        GRADD_TRY(emit_turned(g, like, chain[--n], *out, out));
    return GRADD_OK;
}

static gradd_status_t take_layout(graph_t *g, int32_t like, gradd_val_t *v, int bit, int *layout) {
    gradd_val_t source;
    GRADD_TRY(positions_first(g, like, *v, &source));
    if (source == GRADD_NONE) return GRADD_OK;
    *v = source;
    *layout |= bit;
    return GRADD_OK;
}

/* ---- the operator ---------------------------------------------------------------------------- */

static gradd_status_t emit_mask(graph_t *g, int32_t like, const match_attention_t *f,
                                gradd_val_t *in) {
    const graph_node_t *inverse = match_made_by(g, f->mask, "Not");
    const gradd_attr_t to = gradd_make_int("to", GRADD_DT_BOOL);
    in[GRADD_ATTN_MASK] = f->mask;
    if (f->mask == GRADD_NONE) return GRADD_OK;
    if (graph_type(g, f->mask)->dtype != GRADD_DT_BOOL)
        GRADD_TRY(emit(g, like, &(match_fused_t){"Cast", &f->mask, 1, &to, 1, NULL},
                       &in[GRADD_ATTN_MASK]));
    if (f->mask_hides && inverse)
        in[GRADD_ATTN_MASK] = inverse->in[0];
    else if (f->mask_hides)
        GRADD_TRY(emit(g, like, &(match_fused_t){"Not", &in[GRADD_ATTN_MASK], 1, NULL, 0, NULL},
                       &in[GRADD_ATTN_MASK]));
    return emit(g, like, &(match_fused_t){"MaskRanges", &in[GRADD_ATTN_MASK], 1, NULL, 0, NULL},
                &in[GRADD_ATTN_RANGES]);
}

/* A bias or sinks in the type that sums have. */
static gradd_status_t emit_wide(graph_t *g, int32_t like, gradd_val_t v, gradd_val_t *out) {
    *out = v;
    if (v == GRADD_NONE || !gradd_dtype_is_half(graph_type(g, v)->dtype)) return GRADD_OK;
    gradd_attr_t to = gradd_make_int("to", GRADD_DT_F32);
    return emit(g, like, &(match_fused_t){"Cast", &v, 1, &to, 1, NULL}, out);
}

/* How many of the biases the mask hides. */
static int count_hidden(const match_attention_t *f) {
    int hidden = 0;
    for (int i = 0; i < f->n_bias; i++)
        hidden += f->bias[i].hidden;
    return hidden;
}

/* One bias in the type that sums have; with a mask zero where that hides it. */
static gradd_status_t emit_term(graph_t *g, int32_t like, const match_bias_t *b, gradd_val_t mask,
                                gradd_val_t *out) {
    GRADD_TRY(emit_wide(g, like, b->value, out));
    const gradd_dtype_t dtype = graph_type(g, *out)->dtype;
    g->origin = g->nodes[like].origin;
    if (b->factor != 1) {
        gradd_val_t pair[2] = {*out, gradd_const_scalar(&g->builder, dtype, b->factor)};
        GRADD_TRY(g->builder.status);
        GRADD_TRY(emit(g, like, &(match_fused_t){"Mul", pair, 2, NULL, 0, NULL}, out));
    }
    if (mask == GRADD_NONE || !b->hidden) return GRADD_OK;
    gradd_val_t in[3] = {mask, *out, gradd_const_scalar(&g->builder, dtype, 0)};
    GRADD_TRY(g->builder.status);
    return emit(g, like, &(match_fused_t){"Where", in, 3, NULL, 0, NULL}, out);
}

/* The sum of all biases. The operator's mask hides all of it or nothing. */
static gradd_status_t emit_bias(graph_t *g, int32_t like, const match_attention_t *f,
                                gradd_val_t *in) {
    const gradd_val_t mask = count_hidden(f) < f->n_bias ? in[GRADD_ATTN_MASK] : GRADD_NONE;
    for (int i = 0; i < f->n_bias; i++) {
        gradd_val_t pair[2] = {in[GRADD_ATTN_BIAS], GRADD_NONE};
        GRADD_TRY(emit_term(g, like, &f->bias[i], mask, &pair[1]));
        in[GRADD_ATTN_BIAS] = pair[1];
        if (i)
            GRADD_TRY(emit(g, like, &(match_fused_t){"Add", pair, 2, NULL, 0, NULL},
                           &in[GRADD_ATTN_BIAS]));
    }
    return GRADD_OK;
}

static gradd_status_t emit_sinks(graph_t *g, int32_t like, const match_attention_t *f,
                                 gradd_val_t *in) {
    if (f->sinks == GRADD_NONE) return GRADD_OK;
    const int64_t heads = gradd_type_count(graph_type(g, f->sinks));
    g->origin = g->nodes[like].origin;
    gradd_val_t flat = gradd_reshape_to(&g->builder, f->sinks, &heads, 1);
    GRADD_TRY(g->builder.status);
    return emit_wide(g, like, flat, &in[GRADD_ATTN_SINKS]);
}

/* The keys that a floor leaves: those whose bias is above it. */
static gradd_status_t emit_floor(graph_t *g, int32_t like, const match_attention_t *f,
                                 gradd_val_t *in) {
    gradd_val_t pair[2] = {in[GRADD_ATTN_BIAS], GRADD_NONE};
    if (!f->floor || !graph_type(g, in[GRADD_ATTN_BIAS])->rank) return GRADD_OK;
    g->origin = g->nodes[like].origin;
    pair[1] = gradd_const_scalar(&g->builder, graph_type(g, in[GRADD_ATTN_BIAS])->dtype, f->fill);
    GRADD_TRY(g->builder.status);
    GRADD_TRY(
        emit(g, like, &(match_fused_t){"Greater", pair, 2, NULL, 0, NULL}, &in[GRADD_ATTN_MASK]));
    return emit(g, like, &(match_fused_t){"MaskRanges", &in[GRADD_ATTN_MASK], 1, NULL, 0, NULL},
                &in[GRADD_ATTN_RANGES]);
}

static gradd_status_t fuse_product(state_t *s, int32_t id, const match_attention_t *f) {
    graph_t *g = s->g;
    gradd_val_t in[N_IN] = {f->q, f->k, f->v, GRADD_NONE, GRADD_NONE, GRADD_NONE, GRADD_NONE};
    int layout = f->k_turned ? GRADD_ATTN_K_TURNED : 0;
    g->origin = g->nodes[id].origin;
    if (f->k_moved) in[GRADD_ATTN_K] = gradd_transpose(&g->builder, f->k, f->k_perm, 4);
    GRADD_TRY(g->builder.status);
    GRADD_TRY(take_layout(g, id, &in[GRADD_ATTN_Q], GRADD_ATTN_Q_TURNED, &layout));
    if (!f->k_turned)
        GRADD_TRY(take_layout(g, id, &in[GRADD_ATTN_K], GRADD_ATTN_K_TURNED, &layout));
    GRADD_TRY(take_layout(g, id, &in[GRADD_ATTN_V], GRADD_ATTN_V_TURNED, &layout));
    GRADD_TRY(emit_mask(g, id, f, in));
    GRADD_TRY(emit_bias(g, id, f, in));
    GRADD_TRY(emit_floor(g, id, f, in));
    GRADD_TRY(emit_sinks(g, id, f, in));
    const int hides = f->hides | (count_hidden(f) == f->n_bias ? GRADD_ATTN_HIDES_BIAS : 0);
    gradd_attr_t attrs[7] = {gradd_make_float(GRADD_ATTN_SCALE, f->scale),
                             gradd_make_float(GRADD_ATTN_SOFTCAP, f->softcap),
                             gradd_make_float(GRADD_ATTN_DROPOUT, f->dropout),
                             gradd_make_float(GRADD_ATTN_FILL, f->fill),
                             gradd_make_int(GRADD_ATTN_HIDES, hides),
                             gradd_make_int(GRADD_ATTN_ZERO, 0),
                             gradd_make_int(GRADD_ATTN_LAYOUT, layout)};
    gradd_val_t ends[3 + MATCH_MAX_BIAS] = {f->k, f->mask, f->sinks};
    for (int i = 0; i < f->n_bias; i++)
        ends[3 + i] = f->bias[i].value;
    const match_fused_t fused = {
        "FusedAttention", in, N_IN, attrs, 7, f->drop < 0 ? NULL : &g->nodes[f->drop]};
    return match_replace_above(g, &g->nodes[id], &fused, ends, 3 + f->n_bias);
}

static gradd_status_t fuse_matmul(state_t *s, int32_t id) {
    match_attention_t f;
    GRADD_TRY(compile_time_spend(COST_OF_MATCH));
    if (!match_attention(s->g, &s->g->nodes[id], &s->readers, &f)) return GRADD_OK;
    return fuse_product(s, id, &f);
}

/* Replaces node `id` by the attention before it, or by itself, with one attribute changed, and with
 * these operands. */
static gradd_status_t refine(graph_t *g, int32_t id, const graph_node_t *attention,
                             const gradd_val_t *in, const char *name, int64_t value) {
    gradd_attr_t attrs[GRADD_ATTN_ATTRS];
    int n = attention->attrs.n < GRADD_ATTN_ATTRS ? attention->attrs.n : GRADD_ATTN_ATTRS;
    for (int i = 0; i < n; i++) {
        attrs[i] = attention->attrs.v[i];
        if (!strcmp(attrs[i].name, name)) attrs[i] = gradd_make_int(name, value);
    }
    match_fused_t fused = {"FusedAttention", in, attention->n_in, attrs, n, attention};
    return match_replace(g, &g->nodes[id], &fused);
}

/* An attention that is whole already: how its operands lie. */
static gradd_status_t fuse_operands(graph_t *g, int32_t id) {
    const graph_node_t *n = &g->nodes[id];
    const int before = (int)gradd_attr_int(n->attrs, GRADD_ATTN_LAYOUT, 0);
    int layout = before;
    bool changed = false;
    gradd_val_t in[N_IN];
    if (n->n_in > N_IN) return GRADD_OK;
    memcpy(in, n->in, sizeof in[0] * (size_t)n->n_in);
    for (int i = GRADD_ATTN_Q; i <= GRADD_ATTN_V; i++) {
        const int bit = GRADD_ATTN_Q_TURNED << i;
        if (before & bit) continue;
        if (i != GRADD_ATTN_Q) in[i] = match_unrepeated(g, in[i]);
        GRADD_TRY(take_layout(g, id, &in[i], bit, &layout));
        changed |= in[i] != g->nodes[id].in[i];
    }
    const graph_node_t whole = g->nodes[id]; /* a copy: the list may have moved */
    return changed ? refine(g, id, &whole, in, GRADD_ATTN_LAYOUT, layout) : GRADD_OK;
}

static gradd_status_t fuse_transpose(state_t *s, int32_t id) {
    const graph_t *g = s->g;
    gradd_val_t y = match_heads_swapped(g, g->nodes[id].out[0]);
    const graph_node_t *a = match_made_by(g, y, "FusedAttention");
    int64_t layout = a ? gradd_attr_int(a->attrs, GRADD_ATTN_LAYOUT, 0) : GRADD_ATTN_Y_TURNED;
    if (layout & GRADD_ATTN_Y_TURNED || !graph_read_once(&s->readers, y)) return GRADD_OK;
    return refine(s->g, id, a, a->in, GRADD_ATTN_LAYOUT, layout | GRADD_ATTN_Y_TURNED);
}

static gradd_status_t fuse_attention(graph_t *g) {
    state_t s = {.g = g};
    GRADD_TRY(graph_find_readers(g, &s.readers));
    for (int32_t i = 0, n = g->n_nodes; i < n; i++) { /* not what is added on the way */
        const char *op = g->nodes[i].op->name;
        if (!strcmp(op, "Transpose"))
            GRADD_TRY(fuse_transpose(&s, i));
        else if (!strcmp(op, "MatMul"))
            GRADD_TRY(fuse_matmul(&s, i));
        else if (!strcmp(op, "FusedAttention"))
            GRADD_TRY(fuse_operands(g, i));
    }
    return GRADD_OK;
}

const graph_pass_t graph_pass_fuse_attention = {
    "fuse_attention", 40, true, fuse_attention, {"FusedAttention"}};
