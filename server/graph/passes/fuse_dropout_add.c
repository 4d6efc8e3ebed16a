/* Add(Dropout(x), residual) -> DropoutAdd: one pass over memory in place of two.
 *
 * Operands in either order, of one type; ratio and mode are known, and the result of Dropout has no
 * other reader. The fused operator takes the coordinates of the Dropout, so the mask is bit for bit
 * that of the plain plan. A bias in front of the dropout has been taken up by the product already
 * (fuse_linear). If both operands are dropouts, the one that the model lists first is taken; if a
 * residual is added to that sum, the other one is added to the residual first:
 *
 *   (Dropout(a) + Dropout(b)) + residual -> DropoutAdd(a, DropoutAdd(b, residual)) */
#include <string.h>

#include "kernels/rules/rules.h"
#include "server/graph/match/match.h"
#include "server/graph/readers.h"

/* The Dropout behind v, if it is active and read once; *out_ratio is its rate. */
static const graph_node_t *dropped(const graph_t *g, gradd_val_t v, const int32_t *readers,
                                   double *out_ratio) {
    const graph_node_t *n = match_made_by(g, v, "Dropout");
    if (!n || readers[v] != 1 || n->n_in < 3 || n->in[2] == GRADD_NONE) return NULL;
    if (n->n_out > 1 && n->out[1] != GRADD_NONE && readers[n->out[1]]) return NULL;
    const uint8_t *training = g->values[n->in[2]]->data;
    if (!training || !*training) return NULL;
    *out_ratio = 0.5;
    return n->in[1] == GRADD_NONE || match_scalar(g, n->in[1], out_ratio) ? n : NULL;
}

/* A sum of a Dropout and n's other operand. */
static gradd_status_t fuse_one(graph_t *g, graph_node_t *n, const int32_t *readers) {
    for (int k = 0; k < 2; k++) {
        double ratio;
        const graph_node_t *drop = dropped(g, n->in[k], readers, &ratio);
        if (!drop) continue;
        const gradd_val_t in[2] = {drop->in[0], n->in[1 - k]};
        const gradd_attr_t attr = gradd_make_float("ratio", ratio);
        return match_replace(g, n, &(match_fused_t){"DropoutAdd", in, 2, &attr, 1, drop});
    }
    return GRADD_OK;
}

/* A sum of DropoutAdd(a, Dropout(b)), which fuse_one() made, and n's other operand. */
static gradd_status_t fuse_two(graph_t *g, int node, const int32_t *readers) {
    const graph_node_t n = g->nodes[node];
    for (int k = 0; k < 2; k++) {
        double ratio;
        const graph_node_t *sum = match_made_by(g, n.in[k], "DropoutAdd");
        const graph_node_t *drop = sum ? dropped(g, sum->in[1], readers, &ratio) : NULL;
        if (!drop || readers[n.in[k]] != 1) continue;
        const graph_node_t first = *sum, second = *drop;
        const gradd_attr_t attr = gradd_make_float("ratio", ratio);
        gradd_val_t in[2] = {second.in[0], n.in[1 - k]};
        const gradd_val_t ends[2] = {first.in[1], n.in[1 - k]};
        const match_fused_t inner = {"DropoutAdd", in, 2, &attr, 1, &second};
        gradd_val_t residual;
        GRADD_TRY(match_emit(g, &second, &inner, &residual, 1));
        in[0] = first.in[0], in[1] = residual;
        const match_fused_t outer = {"DropoutAdd", in, 2, first.attrs.v, first.attrs.n, &first};
        return match_replace_above(g, &g->nodes[node], &outer, ends, 2);
    }
    return GRADD_OK;
}

static gradd_status_t fuse_dropout_add(graph_t *g) {
    int32_t *readers;
    GRADD_TRY(graph_count_readers(g, &readers));
    const int n_nodes = g->n_nodes;
    for (int i = 0; i < n_nodes; i++) {
        const graph_node_t *n = &g->nodes[i];
        if (n->backward || strcmp(n->op->name, "Add") ||
            !gradd_type_equal(graph_type(g, n->in[0]), graph_type(g, n->in[1])))
            continue;
        GRADD_TRY(fuse_one(g, &g->nodes[i], readers));
        if (!strcmp(g->nodes[i].op->name, "Add")) GRADD_TRY(fuse_two(g, i, readers));
    }
    return GRADD_OK;
}

const graph_pass_t graph_pass_fuse_dropout_add = {
    "fuse_dropout_add", 65, true, fuse_dropout_add, {"DropoutAdd"}};
