/* Operators in simpler ones: the expansion of a row in place of the operator.
 *
 * Called by graph_emit before casts are put and before anything is differentiated, so that an
 * expansion is a piece of graph like any other. It happens where the device has no kernel for the
 * operator, for composites everywhere, and in a plain graph for every operator that has an
 * expansion; gradients then come from the rules of the simpler operators. Gradient rules may emit
 * what passes recognise (a product with a transposed operand); those stay whole in a plain
 * graph, but for one that is written out. */
#include "kernels/contract/registry.h"
#include "server/graph/graph.h"

bool graph_has_kernel(const graph_t *g, const gradd_infer_t *c) {
    gradd_view_t in[GRADD_OP_MAX_IN];
    gradd_infer_t wide = *c;
    bool any = false;
    if (gradd_backend_kernel(g->backend, c)) return true;
    for (int i = 0; i < c->n_in; i++) {
        in[i] = c->in[i];
        if (!gradd_dtype_is_half(in[i].type.dtype)) continue;
        in[i].type.dtype = GRADD_DT_F32;
        in[i].data = NULL; /* kernels choose by types */
        any = true;
    }
    wide.in = in;
    return any && gradd_backend_kernel(g->backend, &wide);
}

bool graph_must_expand(const graph_t *g, const gradd_infer_t *c) {
    if (!c->op->expand) return false;
    if (gradd_op_is_composite(c->op) || g->written_out) return true;
    if (g->plain && !g->in_backward) return true;
    return !graph_has_kernel(g, c);
}

static gradd_status_t check_results(const graph_t *g, const gradd_infer_t *c,
                                    const gradd_val_t *out) {
    char a[GRADD_TYPE_TEXT], b[GRADD_TYPE_TEXT];
    for (int j = 0; j < c->n_out; j++) {
        if (c->out[j].dtype == GRADD_DT_NONE) continue;
        if (out[j] == GRADD_NONE) return GRADD_FAIL(INTERNAL, "there is no output %d", j);
        const gradd_type_t *got = graph_type(g, out[j]);
        if (!gradd_type_equal(got, &c->out[j]))
            return GRADD_FAIL(INTERNAL, "output %d is %s, expected %s", j,
                              gradd_type_format(got, a), gradd_type_format(&c->out[j], b));
    }
    return GRADD_OK;
}

gradd_status_t graph_emit_expanded(graph_t *g, const graph_emit_t *e, gradd_infer_t *c,
                                   gradd_val_t *out) {
    const uint64_t random = g->random;
    gradd_expand_t x = {.op = e->op,
                        .attrs = e->attrs,
                        .opset = e->opset,
                        .n_in = e->n_in,
                        .n_out = e->n_out,
                        .in = e->in,
                        .out = out,
                        .b = &g->builder};
    GRADD_TRY(gradd_op_infer(c));
    for (int j = 0; j < e->n_out; j++)
        out[j] = GRADD_NONE;
    g->random = e->random; /* what it draws is drawn for this node */
    gradd_status_t status = e->op->expand(&x);
    g->random = random;
    if (!status) status = check_results(g, c, out);
    return status ? gradd_wrap(status, "expanding %s", e->op->name) : GRADD_OK;
}
