/* Helpers of passes that recognise patterns. See match.h. */
#include "server/graph/match/match.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/contract/registry.h"
#include "kernels/math/formulas.h"

const graph_node_t *match_made_by(const graph_t *g, gradd_val_t v, const char *op) {
    if (v == GRADD_NONE || g->values[v]->kind != VALUE_NODE) return NULL;
    const graph_node_t *n = &g->nodes[g->values[v]->node];
    return strcmp(n->op->name, op) || n->backward ? NULL : n;
}

gradd_val_t match_operand(const graph_node_t *n, int i) {
    return i < n->n_in ? n->in[i] : GRADD_NONE;
}

bool match_scalar(const graph_t *g, gradd_val_t v, double *out) {
    if (v == GRADD_NONE) return false;
    const graph_value_t *value = g->values[v];
    if (!value->data || gradd_type_count(&value->type) != 1) return false;
    if (!gradd_dtype_is_float(value->type.dtype)) return false;
    *out = gradd_real_at(value->data, 0, (int)value->type.dtype);
    return true;
}

bool match_with_scalar(const graph_t *g, const graph_node_t *n, double *out,
                       gradd_val_t *out_other) {
    for (int k = 0; k < 2 && n->n_in == 2; k++)
        if (match_scalar(g, n->in[k], out)) {
            *out_other = n->in[1 - k];
            return true;
        }
    return false;
}

const graph_node_t *match_producer(const graph_t *g, gradd_val_t v) {
    const graph_value_t *value = g->values[v];
    return value->kind == VALUE_NODE ? &g->nodes[value->node] : NULL;
}

gradd_val_t match_through_views(const graph_t *g, gradd_val_t v) {
    for (int step = 0; step < MATCH_MAX_WALK; step++) {
        const graph_node_t *n = match_producer(g, v);
        if (!n || !(n->op->flags & GRADD_OP_VIEW) || n->in[0] == GRADD_NONE) break;
        v = n->in[0];
    }
    return v;
}

bool match_cuts_one(const graph_t *g, const graph_node_t *n, int axis, bool at_start) {
    const gradd_type_t *in = graph_type(g, n->in[0]), *out = graph_type(g, n->out[0]);
    if (strcmp(n->op->name, "Slice") || n->n_in < 3 || axis < 0 || in->rank != out->rank)
        return false;
    for (int i = 0; i < in->rank; i++)
        if (in->dims[i] - out->dims[i] != (i == axis)) return false;
    /* one start per sliced axis; axes of full length start at 0 */
    const graph_value_t *starts = g->values[n->in[1]];
    if (!starts->data || starts->type.dtype != GRADD_DT_I64) return false;
    if (n->n_in > 4 && n->in[4] != GRADD_NONE) {
        const graph_value_t *steps = g->values[n->in[4]];
        if (!steps->data || steps->type.dtype != GRADD_DT_I64) return false;
        for (int64_t i = 0; i < gradd_type_count(&steps->type); i++)
            if (((const int64_t *)steps->data)[i] != 1) return false;
    }
    int64_t largest = 0;
    for (int64_t i = 0; i < gradd_type_count(&starts->type); i++) {
        int64_t start = ((const int64_t *)starts->data)[i];
        if (start < 0 || start > 1) return false;
        if (start > largest) largest = start;
    }
    return largest == at_start;
}

/* ---- rewriting ------------------------------------------------------------------------------ */

#define MAX_PARTS 128 /* more than any pattern has */

typedef struct match_parts_s {
    int32_t nodes[MAX_PARTS]; /* of the graph */
    int n;
    const gradd_val_t *ends;
    int n_ends;
} match_parts_t;

static bool is_among(const gradd_val_t *values, int n, gradd_val_t v) {
    for (int i = 0; i < n; i++)
        if (values[i] == v) return true;
    return false;
}

static void add_part(const graph_t *g, const match_fused_t *f, gradd_val_t v, match_parts_t *p) {
    if (v == GRADD_NONE || g->values[v]->kind != VALUE_NODE) return;
    if (is_among(f->in, f->n_in, v) || is_among(p->ends, p->n_ends, v)) return;
    for (int i = 0; i < p->n; i++)
        if (p->nodes[i] == g->values[v]->node) return;
    if (p->n < MAX_PARTS) p->nodes[p->n++] = g->values[v]->node;
}

/* The nodes between the operands and the node itself, which comes first. */
static void collect_parts(const graph_t *g, const graph_node_t *n, const match_fused_t *f,
                          match_parts_t *p) {
    p->nodes[0] = (int32_t)(n - g->nodes);
    p->n = 1;
    for (int at = 0; at < p->n; at++)
        for (int i = 0; i < g->nodes[p->nodes[at]].n_in; i++)
            add_part(g, f, g->nodes[p->nodes[at]].in[i], p);
}

typedef struct nodes_s {
    int32_t *list; /* of the model */
    bool *seen;    /* per node of the model */
    int n;
} nodes_t;

static void add_node(nodes_t *to, int32_t node) {
    if (to->seen[node]) return;
    to->seen[node] = true;
    to->list[to->n++] = node;
}

/* Model nodes of the parts, with those that an earlier pass had put together already, each once: a
 * walk may come to what stands for the same ones again, layer above layer. */
static gradd_status_t record_parts(graph_t *g, graph_node_t *n, const match_parts_t *p) {
    const size_t most = (size_t)g->model->n_nodes + 1;
    nodes_t to = {malloc(sizeof to.list[0] * most), calloc(most, sizeof to.seen[0]), 0};
    int32_t *list = NULL;
    if (to.list && to.seen) {
        for (int i = 0; i < p->n; i++) {
            const graph_node_t *part = &g->nodes[p->nodes[i]];
            for (int k = 0; k < part->n_parts; k++)
                add_node(&to, part->parts[k]);
            if (!part->n_parts) add_node(&to, part->origin);
        }
        list = arena_alloc(g->arena, sizeof list[0] * (size_t)(to.n + 1));
        if (list) memcpy(list, to.list, sizeof list[0] * (size_t)to.n);
    }
    free(to.list);
    free(to.seen);
    if (!list) return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    n->parts = list;
    n->n_parts = to.n;
    return GRADD_OK;
}

static bool fits(const graph_t *g, const graph_node_t *n, const gradd_op_t *op,
                 const match_fused_t *f) {
    gradd_view_t in[GRADD_OP_MAX_IN] = {0};
    gradd_type_t out[GRADD_OP_MAX_OUT];
    for (int i = 0; i < f->n_in; i++)
        if (f->in[i] != GRADD_NONE)
            in[i] = (gradd_view_t){*graph_type(g, f->in[i]), (void *)g->values[f->in[i]]->data};
    gradd_infer_t infer = {
        op, {f->attrs, f->n_attrs},
         g->model->opset, f->n_in, 1, in, out, 0, 0
    };
    if (graph_must_expand(g, &infer)) return false; /* the device has no kernel */
    if (graph_must_widen(g, &infer)) return false;  /* casts would cost more than is won */
    return !gradd_op_infer(&infer) && gradd_type_equal(&out[0], graph_type(g, n->out[0]));
}

gradd_status_t match_replace(graph_t *g, graph_node_t *n, const match_fused_t *f) {
    return match_replace_above(g, n, f, NULL, 0);
}

gradd_status_t match_replace_above(graph_t *g, graph_node_t *n, const match_fused_t *f,
                                   const gradd_val_t *ends, int n_ends) {
    const gradd_op_t *op = gradd_op_by_name(f->op);
    if (!op) return GRADD_FAIL(INTERNAL, "operator %s is missing", f->op);
    if (f->n_in > GRADD_OP_MAX_IN || !fits(g, n, op, f)) return GRADD_OK;
    match_parts_t parts = {.ends = ends, .n_ends = n_ends};
    collect_parts(g, n, f, &parts);
    gradd_attr_t *attrs = arena_alloc(g->arena, sizeof attrs[0] * (size_t)(f->n_attrs + 1));
    gradd_val_t *in = arena_alloc(g->arena, sizeof in[0] * (size_t)(f->n_in + 1));
    gradd_val_t *out = arena_alloc(g->arena, sizeof out[0] * (size_t)op->max_out);
    if (!attrs || !in || !out) return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    GRADD_TRY(record_parts(g, n, &parts));
    for (int i = 0; i < f->n_attrs; i++)
        GRADD_TRY(graph_copy_attr(g, &f->attrs[i], &attrs[i]));
    memcpy(in, f->in, sizeof in[0] * (size_t)f->n_in);
    for (int j = 0; j < op->max_out; j++)
        out[j] = j ? GRADD_NONE : n->out[0];
    if (f->random) n->random = f->random->random;
    n->op = op;
    n->attrs = (gradd_attrs_t){attrs, f->n_attrs};
    n->in = in, n->n_in = f->n_in;
    n->out = out, n->n_out = 1;
    return GRADD_OK;
}

gradd_status_t match_emit(graph_t *g, const graph_node_t *like, const match_fused_t *f,
                          gradd_val_t *out, int n_out) {
    const gradd_op_t *op = gradd_op_by_name(f->op);
    if (!op) return GRADD_FAIL(INTERNAL, "operator %s is missing", f->op);
    g->origin = like->origin;
    g->rows = like->rows;
    graph_emit_t emit = {
        .op = op,
        .opset = g->model->opset,
        .attrs = {f->attrs, f->n_attrs},
        .in = f->in,
        .n_in = f->n_in,
        .n_out = n_out,
        .random = f->random ? f->random->random : like->random
    };
    return graph_emit(g, &emit, out);
}
