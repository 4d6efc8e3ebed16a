/* See match_mean.h. */
#include "server/graph/match/match_mean.h"

#include "server/graph/match/match_cast.h"

/* Whether `few` is `all` without its last axis, or with one element there. */
static bool lacks_last(const gradd_type_t *few, const gradd_type_t *all) {
    const int last = all->rank - 1;
    if (last < 0 || (few->rank != last && (few->rank != all->rank || few->dims[last] != 1)))
        return false;
    for (int i = 0; i < last; i++)
        if (few->dims[i] != all->dims[i]) return false;
    return true;
}

bool match_names_last(const graph_t *g, const graph_node_t *n) {
    const int rank = graph_type(g, n->in[0])->rank;
    const gradd_attr_t *attr = gradd_attr_find(n->attrs, "axes");
    const graph_value_t *axes = n->n_in > 1 && n->in[1] != GRADD_NONE ? g->values[n->in[1]] : NULL;
    int64_t axis;
    if (attr && attr->n == 1)
        axis = attr->ints[0];
    else if (axes && axes->data && axes->type.dtype == GRADD_DT_I64 &&
             gradd_type_count(&axes->type) == 1)
        axis = *(const int64_t *)axes->data;
    else
        return false;
    return axis == -1 || axis == rank - 1;
}

gradd_val_t match_under_reduction(const graph_t *g, gradd_val_t v, const char *op) {
    const gradd_type_t *kept = graph_type(g, v);
    const graph_node_t *n = match_made_by(g, v, "Reshape");
    if (!n) n = match_made_by(g, v, "Unsqueeze");
    if (!(n = match_made_by(g, n ? n->in[0] : v, op))) return GRADD_NONE;
    const gradd_type_t *x = graph_type(g, n->in[0]), *y = graph_type(g, n->out[0]);
    if (kept->rank != x->rank || !lacks_last(kept, x) || !lacks_last(y, x)) return GRADD_NONE;
    if (y->rank != x->rank && !match_names_last(g, n)) return GRADD_NONE;
    return x->dims[x->rank - 1] == 1 ? GRADD_NONE : n->in[0];
}

gradd_val_t match_mean_of_last(const graph_t *g, gradd_val_t v) {
    double size;
    const graph_node_t *n = match_made_by(g, v, "Div");
    if (!n) return match_under_reduction(g, v, "ReduceMean");
    const gradd_val_t x = match_under_reduction(g, n->in[0], "ReduceSum");
    if (x == GRADD_NONE || !match_scalar(g, n->in[1], &size)) return GRADD_NONE;
    const gradd_type_t *type = graph_type(g, x);
    return size == (double)type->dims[type->rank - 1] ? x : GRADD_NONE;
}

gradd_val_t match_centred(const graph_t *g, gradd_val_t v, gradd_dtype_t as) {
    const graph_node_t *n = match_made_by(g, match_uncast(g, v, as), "Sub");
    if (!n) return GRADD_NONE;
    const gradd_val_t x = match_mean_of_last(g, match_uncast(g, n->in[1], as));
    return x != GRADD_NONE && match_same_uncast(g, x, n->in[0], as) ? n->in[0] : GRADD_NONE;
}
