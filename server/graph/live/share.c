/* How much of a forward is made in some rows only. See live.h. */
#include "kernels/describe/cost.h"
#include "server/graph/live/live.h"

/* Operations of a node; none of one that is not run. */
static double flops_of(const graph_t *g, const graph_node_t *n) {
    graph_operands_t operands;
    gradd_cost_t cost;
    if (n->op->flags & GRADD_OP_VIEW) return 0;
    const gradd_infer_t c = graph_describe(g, n, &operands);
    const gradd_kernel_t *kernel = gradd_backend_kernel(g->backend, &c);
    if (!kernel) return 0;
    gradd_kernel_cost(kernel, &c, &cost);
    return cost.flops;
}

void live_count(const live_t *l, gradd_live_t *out) {
    double of[LIVE_ALL + 1] = {0}, all = 0;
    for (int32_t id = 0; id < l->n_nodes; id++) {
        const live_set_t set = id == l->loss.node ? LIVE_LABELLED : l->at[id];
        if (set == LIVE_NONE) continue;
        const double flops = flops_of(l->g, &l->g->nodes[id]);
        of[set] += flops;
        all += flops;
    }
    out->flops = all;
    out->label_share = all > 0 ? of[LIVE_LABELLED] / all : 0;
    out->real_share = all > 0 ? of[LIVE_REAL] / all : 0;
    out->source_share = all > 0 ? of[LIVE_SOURCE] / all : 0;
}
