/* Sums of embeddings -> EmbeddingSum:
 *
 *   Add(Gather(W, ids), Gather(P, positions)), and one Add more for every further table
 *   Where(ids == padding, StopGradient(Gather(W, ids)), Gather(W, ids))
 *   Add(Add(x, Gather(P, positions)), Gather(T, types))
 *
 * In the last, x is no lookup (tokens behind a linear layer); the rows are added up before it is.
 * The second is how a table with padding_idx is exported: rows of padding get no gradient. It is
 * taken alone as well, because it costs a pass over the rows in each direction. Operands in either
 * order; ids broadcast. A plain Gather on its own is left alone.
 *
 * Between rows and sum may stand a Mul of one table's rows by a known number (its scale), an Expand
 * (ids broadcast), a view that keeps the last axis (a Reshape of the ids, if no Expand is above it)
 * and a StopGradient (one of the table). What is added for them is a view. */
#include <string.h>

#include "kernels/rules/rules.h"
#include "server/graph/match/match.h"
#include "server/graph/readers.h"

enum { TABLES = 9 };

typedef struct table_s {
    gradd_val_t rows, ids;
    int64_t padding;
    double scale;
    const gradd_type_t *shape; /* the ids take its leading dimensions; NULL = those they have */
    bool frozen;
} table_t;

typedef struct lookup_s {
    int n;
    table_t of[TABLES];
} lookup_t;

/* Rows of one matrix, picked by integers. */
static const graph_node_t *picked(const graph_t *g, gradd_val_t v) {
    const graph_node_t *n = match_made_by(g, v, "Gather");
    if (!n) return NULL;
    const gradd_type_t *table = graph_type(g, n->in[0]);
    if (table->rank != 2 || !gradd_dtype_is_float(table->dtype)) return NULL;
    int64_t axis = gradd_attr_int(n->attrs, "axis", 0);
    return axis == 0 || axis == -2 ? n : NULL;
}

/* Whether v is Unsqueeze(ids == padding, last axis), for one known padding. */
static bool is_padding(const graph_t *g, gradd_val_t v, gradd_val_t ids, int64_t *out_padding) {
    const graph_node_t *n = match_made_by(g, v, "Unsqueeze");
    if (!n) return false;
    const gradd_type_t *from = graph_type(g, n->in[0]), *to = graph_type(g, v);
    if (to->rank != from->rank + 1 || to->dims[to->rank - 1] != 1) return false;
    for (int i = 0; i < from->rank; i++)
        if (from->dims[i] != to->dims[i]) return false;
    n = match_made_by(g, n->in[0], "Equal");
    for (int k = 0; n && k < 2; k++) {
        const graph_value_t *c = g->values[n->in[1 - k]];
        if (n->in[k] != ids || !c->data || gradd_type_count(&c->type) != 1) continue;
        bool wide = c->type.dtype == GRADD_DT_I64;
        if (!wide && c->type.dtype != GRADD_DT_I32) continue;
        *out_padding = wide ? *(const int64_t *)c->data : *(const int32_t *)c->data;
        return *out_padding >= 0;
    }
    return false;
}

/* The form with padding; rows are read by the Where and the StopGradient alone. */
static bool is_padded(const graph_t *g, const graph_node_t *n, const graph_readers_t *readers,
                      lookup_t *out) {
    const graph_node_t *rows = n->n_in == 3 ? picked(g, n->in[2]) : NULL;
    const graph_node_t *stop = rows ? match_made_by(g, n->in[1], "StopGradient") : NULL;
    if (!stop || stop->in[0] != n->in[2] || n->in[2] >= readers->n || readers->of[n->in[2]] != 2 ||
        !graph_read_once(readers, n->in[1]))
        return false;
    *out = (lookup_t){.n = 1, .of = {{.rows = rows->in[0], .ids = rows->in[1], .scale = 1}}};
    return is_padding(g, n->in[0], rows->in[1], &out->of[0].padding);
}

/* The lookup that v itself is: one table, or those of a sum that is recognised already. */
static bool is_lookup(const graph_t *g, gradd_val_t v, lookup_t *out) {
    const graph_node_t *n = picked(g, v);
    *out = (lookup_t){.n = 1};
    if (n) {
        out->of[0] = (table_t){.rows = n->in[0], .ids = n->in[1], .padding = -1, .scale = 1};
        return true;
    }
    n = match_made_by(g, v, "EmbeddingSum");
    if (!n) return false;
    const gradd_attr_t *paddings = gradd_attr_find(n->attrs, "paddings");
    const gradd_attr_t *scales = gradd_attr_find(n->attrs, "scales");
    out->n = n->n_in / 2;
    for (int t = 0; t < out->n; t++)
        out->of[t] = (table_t){.rows = n->in[t],
                               .ids = n->in[out->n + t],
                               .padding = paddings->ints[t],
                               .scale = scales ? scales->floats[t] : 1};
    return true;
}

/* The nodes between a sum and the rows that it adds, walked upwards. */
typedef struct way_s {
    gradd_val_t v;
    bool frozen, scaled;
    double scale;
    const gradd_type_t *shape; /* of the last view that changes it */
} way_t;

static bool keeps_rows(const gradd_type_t *in, const gradd_type_t *out) {
    if (in->dtype != out->dtype || in->rank < 1 || out->rank < 1) return false;
    return in->dims[in->rank - 1] == out->dims[out->rank - 1] && out->dims[out->rank - 1] > 0;
}

static bool step_up(const graph_t *g, way_t *w) {
    if (g->values[w->v]->kind != VALUE_NODE) return false;
    const graph_node_t *n = &g->nodes[g->values[w->v]->node];
    gradd_val_t from = n->n_in ? n->in[0] : GRADD_NONE;
    const bool stops = n->op->flags & GRADD_OP_NO_GRAD && n->op->flags & GRADD_OP_VIEW;
    const bool view = stops || gradd_op_is_transparent(n->op), mul = !strcmp(n->op->name, "Mul");
    if (n->backward || (mul && (w->scaled || !match_with_scalar(g, n, &w->scale, &from))) ||
        from == GRADD_NONE)
        return false;
    const gradd_type_t *in = graph_type(g, from), *out = graph_type(g, w->v);
    const bool same = gradd_type_equal(in, out);
    if (!keeps_rows(in, out)) return false;
    if (mul) {
        w->scaled = true;
        if (!same) return false;
    } else if (view) {
        if (stops) w->frozen = true;
        if (!same && !w->shape) w->shape = out;
    } else if (strcmp(n->op->name, "Expand") || w->shape) {
        return false; /* ids that are reshaped afterwards would have to be expanded */
    }
    w->v = from;
    return true;
}

/* Finds the lookup in v. A scale and another shape are recognised for a single table only. */
static bool find_lookup(const graph_t *g, gradd_val_t v, const graph_readers_t *readers,
                        lookup_t *out) {
    way_t way = {.v = v, .scale = 1};
    int steps = 0;
    while (graph_read_once(readers, way.v) && !is_lookup(g, way.v, out))
        if (++steps > MATCH_MAX_WALK || !step_up(g, &way)) return false;
    if (!graph_read_once(readers, way.v)) return false;
    if ((way.scaled || way.shape) && (out->n > 1 || out->of[0].scale != 1)) return false;
    for (int t = 0; t < out->n; t++)
        out->of[t].frozen = way.frozen;
    if (way.scaled) out->of[0].scale = way.scale;
    out->of[0].shape = way.shape;
    return true;
}

/* The table and its ids as the operator reads them. */
static gradd_status_t make_operands(graph_t *g, const graph_node_t *like, const table_t *t,
                                    gradd_val_t *out_rows, gradd_val_t *out_ids) {
    *out_rows = t->rows;
    *out_ids = t->ids;
    if (t->frozen && !g->values[t->rows]->data && !match_made_by(g, t->rows, "StopGradient"))
        GRADD_TRY(match_emit(g, like,
                             &(match_fused_t){.op = "StopGradient", .in = &t->rows, .n_in = 1},
                             out_rows, 1));
    if (!t->shape) return GRADD_OK;
    const gradd_attr_t literal = gradd_make_int("allowzero", 1);
    const gradd_val_t in[2] = {t->ids,
                               gradd_const_i64s(&g->builder, t->shape->dims, t->shape->rank - 1)};
    GRADD_TRY(g->builder.status);
    const match_fused_t reshape = {
        .op = "Reshape", .in = in, .n_in = 2, .attrs = &literal, .n_attrs = 1};
    return match_emit(g, like, &reshape, out_ids, 1);
}

static gradd_status_t replace(graph_t *g, int node, const lookup_t *l) {
    const graph_node_t like = g->nodes[node];
    gradd_val_t in[2 * TABLES], ends[2 * TABLES];
    int64_t paddings[TABLES];
    double scales[TABLES];
    bool scaled = false;
    for (int t = 0; t < l->n; t++) {
        ends[t] = l->of[t].rows;
        ends[l->n + t] = l->of[t].ids;
        paddings[t] = l->of[t].padding;
        scales[t] = l->of[t].scale;
        scaled = scaled || scales[t] != 1;
        GRADD_TRY(make_operands(g, &like, &l->of[t], &in[t], &in[l->n + t]));
    }
    const gradd_attr_t attrs[2] = {gradd_make_ints("paddings", paddings, (size_t)l->n),
                                   gradd_make_floats("scales", scales, (size_t)l->n)};
    const match_fused_t fused = {.op = "EmbeddingSum",
                                 .in = in,
                                 .n_in = 2 * l->n,
                                 .attrs = attrs,
                                 .n_attrs = scaled ? 2 : 1};
    return match_replace_above(g, &g->nodes[node], &fused, ends, 2 * l->n);
}

/* Whether a + b are lookups of one operator. The longer operand comes first: (a + b) + c is how its
 * numbers were added. */
static bool find_sum(const graph_t *g, gradd_val_t a, gradd_val_t b, const graph_readers_t *readers,
                     lookup_t *out) {
    lookup_t one;
    if (!find_lookup(g, a, readers, out) || !find_lookup(g, b, readers, &one)) return false;
    if (out->n < one.n) {
        const lookup_t longer = one;
        one = *out, *out = longer;
    }
    if (one.n > 1 || out->n == TABLES) return false;
    out->of[out->n++] = one.of[0];
    return true;
}

/* (x + first) + last -> x + (first + last) where only these two are lookups. */
static gradd_status_t fuse_behind(graph_t *g, int node, const graph_readers_t *readers) {
    const graph_node_t n = g->nodes[node];
    for (int k = 0; k < 4; k++) {
        const gradd_val_t sum = n.in[k / 2], last = n.in[1 - k / 2];
        const graph_node_t *inner = match_made_by(g, sum, "Add");
        if (!inner || !graph_read_once(readers, sum)) continue;
        const gradd_val_t x = inner->in[k % 2], first = inner->in[1 - k % 2];
        lookup_t all;
        if (!find_sum(g, first, last, readers, &all)) continue;
        gradd_val_t in[2] = {first, last};
        const gradd_val_t ends[3] = {x, first, last};
        const match_fused_t add = {"Add", in, 2, NULL, 0, NULL};
        gradd_val_t rows;
        GRADD_TRY(match_emit(g, &n, &add, &rows, 1));
        GRADD_TRY(replace(g, g->values[rows]->node, &all));
        in[0] = x, in[1] = rows;
        return match_replace_above(g, &g->nodes[node], &add, ends, 3);
    }
    return GRADD_OK;
}

static gradd_status_t fuse_sum(graph_t *g, int node, const graph_readers_t *readers) {
    const graph_node_t *n = &g->nodes[node];
    lookup_t all;
    if (find_sum(g, n->in[0], n->in[1], readers, &all)) return replace(g, node, &all);
    return fuse_behind(g, node, readers);
}

static gradd_status_t fuse_embedding(graph_t *g) {
    const int n_nodes = g->n_nodes;
    graph_readers_t readers;
    lookup_t one;
    GRADD_TRY(graph_find_readers(g, &readers));
    for (int i = 0; i < n_nodes; i++) {
        const graph_node_t *n = &g->nodes[i];
        if (n->backward) continue;
        if (!strcmp(n->op->name, "Where") && is_padded(g, n, &readers, &one))
            GRADD_TRY(replace(g, i, &one));
        else if (!strcmp(n->op->name, "Add"))
            GRADD_TRY(fuse_sum(g, i, &readers));
    }
    return GRADD_OK;
}

const graph_pass_t graph_pass_fuse_embedding = {
    "fuse_embedding", 70, true, fuse_embedding, {"EmbeddingSum"}};
