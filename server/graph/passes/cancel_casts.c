/* Cast(Cast(x)) -> Cast(x) where the first cast is exact, and x itself where the second leads back
 * to its type: bf16 -> f32 -> bf16 is x, bit for bit, and so is f16 -> f32 -> f16.
 *
 * Such pairs arise when gradients are emitted: a rule gives back in the type of its operand what
 * the rule behind it widens or narrows again. So this runs over the joint graph, and looks at
 * backward nodes. A pair that rounds first stays: its rounding is meant. */
#include <string.h>

#include "server/graph/graph.h"
#include "server/graph/redirect.h"

/* How much a float type holds: each of these holds all values of those below it; the two of width
 * 1 do not hold each other's. 0 = no float. */
static int width_of(gradd_dtype_t dtype) {
    switch (dtype) {
    case GRADD_DT_BF16:
    case GRADD_DT_F16:
        return 1;
    case GRADD_DT_F32:
        return 2;
    case GRADD_DT_F64:
        return 3;
    default:
        return 0;
    }
}

static const graph_node_t *cast_behind(const graph_t *g, gradd_val_t v) {
    if (g->values[v]->kind != VALUE_NODE) return NULL;
    const graph_node_t *n = &g->nodes[g->values[v]->node];
    return strcmp(n->op->name, "Cast") ? NULL : n;
}

/* The value that casts widened into the operand of n, or that operand itself. */
static gradd_val_t unwidened(const graph_t *g, const graph_node_t *n) {
    gradd_val_t v = n->in[0];
    for (const graph_node_t *c; (c = cast_behind(g, v));) {
        const gradd_dtype_t from = graph_type(g, c->in[0])->dtype, to = graph_type(g, v)->dtype;
        if (!width_of(from) || (from != to && width_of(to) <= width_of(from))) break;
        v = c->in[0];
    }
    return v;
}

static gradd_status_t cancel_casts(graph_t *g) {
    graph_redirect_t redirect;
    GRADD_TRY(graph_redirect_begin(g, &redirect));
    for (int i = 0; i < g->n_nodes; i++) {
        graph_node_t *n = &g->nodes[i];
        if (!n->backward || n->no_merge || strcmp(n->op->name, "Cast") ||
            !width_of(graph_type(g, n->out[0])->dtype))
            continue;
        gradd_val_t v = unwidened(g, n);
        if (gradd_type_equal(graph_type(g, v), graph_type(g, n->out[0])))
            graph_redirect(&redirect, n->out[0], v);
        n->in[0] = v;
    }
    return graph_redirect_end(g, &redirect);
}

const graph_pass_t graph_pass_cancel_casts = {
    "cancel_casts", PHASE_JOINT + 10, true, cancel_casts, {NULL}};
