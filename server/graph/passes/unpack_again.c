/* y = DequantizeLinear(w, scale) of frozen weights, read by the backward -> the same node once
 * more, in the backward: the result takes four times the memory of w, and is not worth keeping from
 * forward to backward.
 *
 * A cast, a transposition or a view between it and the reader is made again as well. w has to be
 * there anyway: an input or a constant. Runs over the joint graph, and changes what
 * backward nodes read; the bits are the same. */
#include <string.h>

#include "kernels/rules/rules.h"
#include "server/graph/match/match.h"

static bool is_there(const graph_t *g, gradd_val_t v) {
    return v == GRADD_NONE || g->values[v]->kind != VALUE_NODE;
}

static bool passes_on(const graph_node_t *n) {
    return n->op->flags & GRADD_OP_VIEW || !strcmp(n->op->name, "Transpose") ||
           !strcmp(n->op->name, "Cast");
}

/* The forward nodes from the one that makes v down to the one that unpacks; 0 = it is not such a
 * value. */
static int chain_of(const graph_t *g, gradd_val_t v, int32_t *chain) {
    for (int n = 0; n < MATCH_MAX_WALK && v != GRADD_NONE && !is_there(g, v); n++) {
        const graph_node_t *node = &g->nodes[g->values[v]->node];
        if (node->backward || g->values[v]->index) return 0;
        chain[n] = g->values[v]->node;
        if (node->op->flags & GRADD_OP_UNPACKS) return is_there(g, node->in[0]) ? n + 1 : 0;
        if (!passes_on(node)) return 0;
        v = node->in[0];
    }
    return 0;
}

static gradd_status_t make_again(graph_t *g, const int32_t *chain, int n, gradd_val_t *out) {
    gradd_val_t in[GRADD_OP_MAX_IN];
    for (int k = n - 1; k >= 0; k--) {
        const graph_node_t like = g->nodes[chain[k]];
        memcpy(in, like.in, sizeof in[0] * (size_t)like.n_in);
        if (k < n - 1) in[0] = *out;
        const match_fused_t same = {like.op->name, in, like.n_in, like.attrs.v, like.attrs.n, NULL};
        GRADD_TRY(match_emit(g, &like, &same, out, 1));
    }
    return GRADD_OK;
}

static gradd_status_t unpack_again(graph_t *g) {
    int32_t chain[MATCH_MAX_WALK];
    const int n_nodes = g->n_nodes;
    for (int32_t id = g->n_forward; id < n_nodes; id++)
        for (int i = 0; g->nodes[id].backward && i < g->nodes[id].n_in; i++) {
            const int n = chain_of(g, g->nodes[id].in[i], chain);
            gradd_val_t again;
            if (!n) continue;
            GRADD_TRY(make_again(g, chain, n, &again));
            g->nodes[id].in[i] = again;
        }
    return GRADD_OK;
}

const graph_pass_t graph_pass_unpack_again = {
    "unpack_again", PHASE_JOINT + 30, true, unpack_again, {"DequantizeLinear"}};
