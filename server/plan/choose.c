/* Chooses what runs the nodes of a sequence: the first kernel of the device that takes the call.
 * See plan.h. */
#include <stdlib.h>

#include "server/plan/plan.h"

typedef struct operands_s {
    gradd_view_t in[GRADD_OP_MAX_IN];
    gradd_type_t out[GRADD_OP_MAX_OUT];
} operands_t;

static gradd_infer_t describe(const gradd_plan_t *p, const graph_node_t *n, operands_t *o) {
    const graph_t *g = p->graph;
    for (int i = 0; i < n->n_in; i++) {
        o->in[i] = (gradd_view_t){0};
        if (n->in[i] == GRADD_NONE) continue;
        const graph_value_t *v = g->values[n->in[i]];
        o->in[i] = (gradd_view_t){v->type, (void *)v->data};
    }
    for (int j = 0; j < n->n_out; j++)
        o->out[j] = n->out[j] == GRADD_NONE ? (gradd_type_t){0} : g->values[n->out[j]]->type;
    return (gradd_infer_t){n->op, n->attrs, n->opset, n->n_in, n->n_out, o->in, o->out, p->threads};
}

static gradd_status_t choose(const gradd_plan_t *p, const graph_node_t *n, call_t *out) {
    operands_t operands;
    char text[GRAPH_NODE_TEXT];
    gradd_infer_t c = describe(p, n, &operands);
    out->kernel = gradd_backend_kernel(p->backend, &c);
    if (!out->kernel) {
        const char *origin =
            graph_node_text(p->graph, graph_origin(p->graph, n), text, sizeof text);
        return gradd_wrap(gradd_no_kernel(p->backend, &c), "%s", origin);
    }
    out->work_bytes = out->kernel->work ? (int64_t)out->kernel->work(&c) : 0;
    return GRADD_OK;
}

gradd_status_t plan_choose(const gradd_plan_t *p, sequence_t *sequence) {
    sequence->calls = calloc((size_t)sequence->n + 1, sizeof sequence->calls[0]);
    if (!sequence->calls) return GRADD_FAIL(NOMEM, "no memory to plan the graph");
    for (int k = 0; k < sequence->n; k++) {
        const graph_node_t *n = &p->graph->nodes[sequence->nodes[k]];
        if (n->op->flags & GRADD_OP_VIEW || plan_writes_nothing(p->graph, n)) continue;
        GRADD_TRY(choose(p, n, &sequence->calls[k]));
    }
    return GRADD_OK;
}
