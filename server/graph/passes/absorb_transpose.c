/* MatMul(Transpose(a), b) -> FusedMatMul(a, b; transA): the matrix library reads either layout, so
 * a transposition of the last two axes need not be carried out. Models write every linear layer as
 * MatMul(x, Transpose(W)); after this rewrite the gradient of W comes out in W's own layout, too.
 * GroupedMatMul takes its matrices either way as well. The Transpose stays for its other readers
 * and is dropped if it has none. */
#include <string.h>

#include "kernels/contract/registry.h"
#include "kernels/rules/rules.h"
#include "server/graph/graph.h"

static bool swaps_last_two(const graph_node_t *n, int rank) {
    if (strcmp(n->op->name, "Transpose") || rank < 2) return false;
    const gradd_attr_t *perm = gradd_attr_find(n->attrs, "perm");
    if (!perm) return rank == 2;
    for (int i = 0; i < rank - 2; i++)
        if (perm->ints[i] != i) return false;
    return perm->ints[rank - 2] == rank - 1 && perm->ints[rank - 1] == rank - 2;
}

/* Source of a transposed operand, or GRADD_NONE. */
static gradd_val_t untransposed(const graph_t *g, gradd_val_t operand) {
    const graph_value_t *v = g->values[operand];
    if (v->kind != VALUE_NODE) return GRADD_NONE;
    const graph_node_t *producer = &g->nodes[v->node];
    return swaps_last_two(producer, v->type.rank) ? producer->in[0] : GRADD_NONE;
}

/* The product now stands for the transpositions, too. `in` are its new operands. */
static gradd_status_t record_parts(graph_t *g, graph_node_t *n, const gradd_val_t *in) {
    int32_t *parts = arena_alloc(g->arena, sizeof parts[0] * ((size_t)n->n_parts + 3));
    int count = 0;
    if (!parts) return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    for (int i = 0; i < n->n_parts; i++)
        parts[count++] = n->parts[i];
    if (!count) parts[count++] = n->origin;
    for (int k = 0; k < 2; k++)
        if (in[k] != n->in[k]) parts[count++] = g->nodes[g->values[n->in[k]]->node].origin;
    n->parts = parts;
    n->n_parts = count;
    return GRADD_OK;
}

static gradd_status_t rewrite(graph_t *g, graph_node_t *n, const gradd_op_t *fused) {
    gradd_val_t in[2] = {n->in[0], n->in[1]};
    int64_t flip[2] = {0, 0};
    for (int k = 0; k < 2; k++) {
        gradd_val_t source = untransposed(g, n->in[k]);
        if (source == GRADD_NONE) continue;
        in[k] = source;
        flip[k] = 1;
    }
    if (!flip[0] && !flip[1]) return GRADD_OK;
    const gradd_view_t views[2] = {
        {*graph_type(g, in[0]), NULL},
        {*graph_type(g, in[1]), NULL}
    };
    const gradd_infer_t call = {.op = fused, .n_in = 2, .n_out = 1, .in = views};
    if (!graph_has_kernel(g, &call)) return GRADD_OK;
    gradd_attr_t *attrs = arena_alloc(g->arena, sizeof attrs[0] * 3);
    if (!attrs) return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    attrs[0] = gradd_make_int("transA", gradd_attr_int(n->attrs, "transA", 0) ^ flip[0]);
    attrs[1] = gradd_make_int("transB", gradd_attr_int(n->attrs, "transB", 0) ^ flip[1]);
    attrs[2] = gradd_make_float("alpha", gradd_attr_float(n->attrs, "alpha", 1));
    GRADD_TRY(record_parts(g, n, in));
    n->op = fused;
    n->attrs = (gradd_attrs_t){attrs, 3};
    memcpy(n->in, in, sizeof in);
    return GRADD_OK;
}

/* The matrices of GroupedMatMul. */
static gradd_status_t rewrite_grouped(graph_t *g, graph_node_t *n) {
    const gradd_val_t source = untransposed(g, n->in[1]), in[2] = {n->in[0], source};
    if (source == GRADD_NONE) return GRADD_OK;
    gradd_attr_t *attr = arena_alloc(g->arena, sizeof *attr);
    if (!attr) return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    *attr = gradd_make_int("transB", !gradd_attr_int(n->attrs, "transB", 0));
    GRADD_TRY(record_parts(g, n, in));
    n->attrs = (gradd_attrs_t){attr, 1};
    n->in[1] = source;
    return GRADD_OK;
}

static gradd_status_t absorb_transpose(graph_t *g) {
    const gradd_op_t *fused = gradd_op_by_name("FusedMatMul");
    if (!fused) return GRADD_FAIL(INTERNAL, "operator FusedMatMul is missing");
    for (int i = 0; i < g->n_nodes; i++) {
        graph_node_t *n = &g->nodes[i];
        if (!strcmp(n->op->name, "GroupedMatMul")) GRADD_TRY(rewrite_grouped(g, n));
        if (n->op != fused && strcmp(n->op->name, "MatMul")) continue;
        if (graph_type(g, n->in[0])->rank < 2 || graph_type(g, n->in[1])->rank < 2) continue;
        GRADD_TRY(rewrite(g, n, fused));
    }
    return GRADD_OK;
}

const graph_pass_t graph_pass_absorb_transpose = {
    "absorb_transpose", 50, false, absorb_transpose, {NULL}};
