/* Sums of embeddings -> EmbeddingSum:
 *
 *   Add(Gather(W, ids), Gather(P, positions)), and one Add more for a third table
 *   Where(ids == padding, StopGradient(Gather(W, ids)), Gather(W, ids))
 *
 * The second is how a table with padding_idx is exported: rows of padding get no gradient. It is
 * taken alone as well, because it costs a pass over the rows in each direction. Operands in either
 * order; ids broadcast. A plain Gather on its own stays what it is. */
#include <string.h>

#include "kernels/rules.h"
#include "server/graph/match.h"
#include "server/graph/readers.h"

enum { TABLES = 3 };

typedef struct lookup_s {
    int n;
    gradd_val_t table[TABLES], ids[TABLES];
    int64_t padding[TABLES];
} lookup_t;

/* Rows of one matrix, picked by integers. */
static const graph_node_t *picked(const graph_t *g, gradd_val_t v) {
    const graph_node_t *n = match_made_by(g, v, "Gather");
    if (!n) return NULL;
    const gradd_type_t *table = &g->values[n->in[0]]->type;
    if (table->rank != 2 || !gradd_dtype_is_float(table->dtype)) return NULL;
    int64_t axis = gradd_attr_int(n->attrs, "axis", 0);
    return axis == 0 || axis == -2 ? n : NULL;
}

/* Whether v is Unsqueeze(ids == padding, last axis), for one known padding. */
static bool is_padding(const graph_t *g, gradd_val_t v, gradd_val_t ids, int64_t *out_padding) {
    const graph_node_t *n = match_made_by(g, v, "Unsqueeze");
    if (!n) return false;
    const gradd_type_t *from = &g->values[n->in[0]]->type, *to = &g->values[v]->type;
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
static bool is_padded(const graph_t *g, const graph_node_t *n, const int32_t *readers,
                      lookup_t *out) {
    const graph_node_t *rows = n->n_in == 3 ? picked(g, n->in[2]) : NULL;
    const graph_node_t *stop = rows ? match_made_by(g, n->in[1], "StopGradient") : NULL;
    if (!stop || stop->in[0] != n->in[2] || readers[n->in[2]] != 2 || readers[n->in[1]] != 1)
        return false;
    *out = (lookup_t){.n = 1, .table = {rows->in[0]}, .ids = {rows->in[1]}};
    return is_padding(g, n->in[0], rows->in[1], &out->padding[0]);
}

/* What is looked up in v: one table, or up to two of a sum that is recognised already. */
static bool find_lookup(const graph_t *g, gradd_val_t v, const int32_t *readers, lookup_t *out) {
    const graph_node_t *n = picked(g, v);
    *out = (lookup_t){0};
    if (readers[v] != 1) return false;
    if (n) {
        *out = (lookup_t){.n = 1, .table = {n->in[0]}, .ids = {n->in[1]}, .padding = {-1}};
        return true;
    }
    n = match_made_by(g, v, "EmbeddingSum");
    if (!n) return false;
    const gradd_attr_t *paddings = gradd_attr_find(n->attrs, "paddings");
    for (; out->n < TABLES && n->in[out->n] != GRADD_NONE; out->n++) {
        out->table[out->n] = n->in[out->n];
        out->ids[out->n] = n->in[TABLES + out->n];
        out->padding[out->n] = paddings->ints[out->n];
    }
    return true;
}

static gradd_status_t replace(graph_t *g, graph_node_t *n, const lookup_t *l) {
    gradd_val_t in[2 * TABLES];
    int64_t paddings[TABLES];
    for (int t = 0; t < TABLES; t++) {
        in[t] = t < l->n ? l->table[t] : GRADD_NONE;
        in[TABLES + t] = t < l->n ? l->ids[t] : GRADD_NONE;
        paddings[t] = t < l->n ? l->padding[t] : -1;
    }
    gradd_attr_t attr = gradd_make_ints("paddings", paddings, TABLES);
    return match_replace(
        g, n,
        &(match_fused_t){
            .op = "EmbeddingSum", .in = in, .n_in = 2 * TABLES, .attrs = &attr, .n_attrs = 1});
}

/* The longer operand comes first: (a + b) + c is how its numbers were added. */
static gradd_status_t fuse_sum(graph_t *g, graph_node_t *n, const int32_t *readers) {
    lookup_t a, b;
    if (!find_lookup(g, n->in[0], readers, &a) || !find_lookup(g, n->in[1], readers, &b))
        return GRADD_OK;
    lookup_t *all = a.n >= b.n ? &a : &b, *more = a.n >= b.n ? &b : &a;
    if (a.n + b.n > TABLES) return GRADD_OK;
    for (int t = 0; t < more->n; t++, all->n++) {
        all->table[all->n] = more->table[t];
        all->ids[all->n] = more->ids[t];
        all->padding[all->n] = more->padding[t];
    }
    return replace(g, n, all);
}

static gradd_status_t fuse_embedding(graph_t *g) {
    int32_t *readers;
    lookup_t one;
    GRADD_TRY(graph_count_readers(g, &readers));
    for (int i = 0; i < g->n_nodes; i++) {
        graph_node_t *n = &g->nodes[i];
        if (n->backward) continue;
        if (!strcmp(n->op->name, "Where") && is_padded(g, n, readers, &one))
            GRADD_TRY(replace(g, n, &one));
        else if (!strcmp(n->op->name, "Add"))
            GRADD_TRY(fuse_sum(g, n, readers));
    }
    return GRADD_OK;
}

const graph_pass_t graph_pass_fuse_embedding = {"fuse_embedding", 70, true, fuse_embedding};
