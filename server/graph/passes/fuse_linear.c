/* A linear layer with bias -> Linear: the bias is added by the matrix product.
 *
 *   Add(MatMul(x, W), b)      with FusedMatMul for a transposed W, operands in either order
 *   Gemm(x, W, b)             with alpha = beta = 1
 *
 * b is a vector over the last axis, perhaps expanded to the sum's shape, W a matrix. A product with
 * other readers stays: it would be computed twice. Runs after absorb_transpose, which turns a
 * stored W [N, K] into transB.
 */
#include <string.h>

#include "kernels/rules/rules.h"
#include "server/graph/match/match.h"
#include "server/graph/readers.h"

/* A product x W with one matrix W, of nothing but x and W; *out_trans: W is stored transposed. */
static bool is_product(const graph_t *g, const graph_node_t *n, int64_t *out_trans) {
    const gradd_type_t *x = graph_type(g, n->in[0]), *w = graph_type(g, n->in[1]);
    *out_trans = gradd_attr_int(n->attrs, "transB", 0);
    return x->rank >= 2 && w->rank == 2 && gradd_dtype_is_float(x->dtype) &&
           !gradd_attr_int(n->attrs, "transA", 0) && gradd_attr_float(n->attrs, "alpha", 1) == 1;
}

static bool is_bias(const graph_t *g, gradd_val_t b, gradd_val_t y, gradd_val_t *out) {
    const graph_node_t *expand = match_made_by(g, b, "Expand");
    *out = expand ? expand->in[0] : b;
    const gradd_type_t *tb = graph_type(g, *out), *ty = graph_type(g, y);
    return tb->rank == 1 && tb->dims[0] == ty->dims[ty->rank - 1];
}

static gradd_status_t replace(graph_t *g, graph_node_t *n, const graph_node_t *product,
                              gradd_val_t bias, int64_t trans) {
    gradd_val_t in[3] = {product->in[0], product->in[1], bias};
    gradd_attr_t attr = gradd_make_int("transB", trans);
    return match_replace(
        g, n, &(match_fused_t){.op = "Linear", .in = in, .n_in = 3, .attrs = &attr, .n_attrs = 1});
}

static gradd_status_t fuse_add(graph_t *g, graph_node_t *n, const int32_t *readers) {
    for (int k = 0; k < 2; k++) {
        gradd_val_t y = n->in[k];
        int64_t trans;
        gradd_val_t bias;
        const graph_node_t *product = match_made_by(g, y, "MatMul");
        if (!product) product = match_made_by(g, y, "FusedMatMul");
        if (!product || readers[y] != 1 || !is_product(g, product, &trans)) continue;
        if (is_bias(g, n->in[1 - k], y, &bias)) return replace(g, n, product, bias, trans);
    }
    return GRADD_OK;
}

static gradd_status_t fuse_gemm(graph_t *g, graph_node_t *n) {
    int64_t trans;
    gradd_val_t bias;
    if (n->n_in < 3 || n->in[2] == GRADD_NONE || !is_product(g, n, &trans)) return GRADD_OK;
    if (gradd_attr_float(n->attrs, "beta", 1) != 1 || !is_bias(g, n->in[2], n->out[0], &bias))
        return GRADD_OK;
    return replace(g, n, n, bias, trans);
}

static gradd_status_t fuse_linear(graph_t *g) {
    int32_t *readers;
    GRADD_TRY(graph_count_readers(g, &readers));
    for (int i = 0; i < g->n_nodes; i++) {
        graph_node_t *n = &g->nodes[i];
        if (n->backward) continue;
        if (!strcmp(n->op->name, "Add"))
            GRADD_TRY(fuse_add(g, n, readers));
        else if (!strcmp(n->op->name, "Gemm"))
            GRADD_TRY(fuse_gemm(g, n));
    }
    return GRADD_OK;
}

const graph_pass_t graph_pass_fuse_linear = {"fuse_linear", 60, true, fuse_linear, {NULL}};
