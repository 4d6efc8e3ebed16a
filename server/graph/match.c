/* Helpers of passes that recognise patterns. See match.h. */
#include "server/graph/match.h"

#include <string.h>

const graph_node_t *match_made_by(const graph_t *g, gradd_val_t v, const char *op) {
    if (v == GRADD_NONE || g->values[v]->kind != VALUE_NODE) return NULL;
    const graph_node_t *n = &g->nodes[g->values[v]->node];
    return strcmp(n->op->name, op) || n->backward ? NULL : n;
}

bool match_scalar(const graph_t *g, gradd_val_t v, double *out) {
    if (v == GRADD_NONE) return false;
    const graph_value_t *value = g->values[v];
    if (!value->data || gradd_type_count(&value->type) != 1) return false;
    if (value->type.dtype == GRADD_DT_F32)
        *out = *(const float *)value->data;
    else if (value->type.dtype == GRADD_DT_F64)
        *out = *(const double *)value->data;
    else
        return false;
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

bool match_reduces_last(const graph_t *g, const graph_node_t *n) {
    const gradd_type_t *in = &g->values[n->in[0]]->type, *out = &g->values[n->out[0]]->type;
    if (in->rank < 1 || in->rank != out->rank || out->dims[in->rank - 1] != 1) return false;
    for (int i = 0; i < in->rank - 1; i++)
        if (in->dims[i] != out->dims[i]) return false; /* another axis was reduced as well */
    return in->dims[in->rank - 1] != 1;
}
