/* Add(Dropout(x), residual) -> DropoutAdd: one pass over memory in place of two.
 *
 * Operands in either order, of one type; ratio and mode are known, and nobody else reads what
 * Dropout gives. The fused operator takes the coordinates of the Dropout, so the mask is bit for
 * bit that of the plain plan. A bias in front of the dropout has been taken up by the product
 * already (fuse_linear). If both operands are dropouts, the one that the model lists first is
 * taken. */
#include <string.h>

#include "kernels/rules.h"
#include "server/graph/match.h"
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

static gradd_status_t fuse(graph_t *g, graph_node_t *n, const int32_t *readers) {
    for (int k = 0; k < 2; k++) {
        double ratio;
        const graph_node_t *drop = dropped(g, n->in[k], readers, &ratio);
        if (!drop || !gradd_type_equal(&g->values[n->in[0]]->type, &g->values[n->in[1]]->type))
            continue;
        gradd_val_t in[2] = {drop->in[0], n->in[1 - k]};
        gradd_attr_t attr = gradd_make_float("ratio", ratio);
        return match_replace(g, n,
                             &(match_fused_t){.op = "DropoutAdd",
                                              .in = in,
                                              .n_in = 2,
                                              .attrs = &attr,
                                              .n_attrs = 1,
                                              .random = drop});
    }
    return GRADD_OK;
}

static gradd_status_t fuse_dropout_add(graph_t *g) {
    int32_t *readers;
    GRADD_TRY(graph_count_readers(g, &readers));
    for (int i = 0; i < g->n_nodes; i++)
        if (!g->nodes[i].backward && !strcmp(g->nodes[i].op->name, "Add"))
            GRADD_TRY(fuse(g, &g->nodes[i], readers));
    return GRADD_OK;
}

const graph_pass_t graph_pass_fuse_dropout_add = {"fuse_dropout_add", 65, true, fuse_dropout_add};
