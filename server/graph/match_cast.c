/* Looking through casts. See match_cast.h. */
#include "server/graph/match_cast.h"

static bool is_float(gradd_dtype_t dtype) {
    return dtype == GRADD_DT_F32 || dtype == GRADD_DT_BF16 || dtype == GRADD_DT_F64;
}

gradd_val_t match_uncast(const graph_t *g, gradd_val_t v) {
    for (int step = 0; step < MATCH_MAX_WALK; step++) {
        const graph_node_t *n = match_made_by(g, v, "Cast");
        if (!n || !is_float(g->values[n->in[0]]->type.dtype)) break;
        v = n->in[0];
    }
    return v;
}

bool match_uncast_read_once(const graph_t *g, gradd_val_t v, const graph_readers_t *readers) {
    const gradd_val_t end = match_uncast(g, v);
    while (v != end && graph_read_once(readers, v))
        v = match_made_by(g, v, "Cast")->in[0];
    return v == end && graph_read_once(readers, v);
}

bool match_uncast_read_by_products(const graph_t *g, gradd_val_t v,
                                   const graph_readers_t *readers) {
    if (!graph_read_by_products(readers, v)) return false;
    const gradd_val_t end = match_uncast(g, v);
    return v == end || match_uncast_read_once(g, match_made_by(g, v, "Cast")->in[0], readers);
}

bool match_same_uncast(const graph_t *g, gradd_val_t a, gradd_val_t b) {
    return a == b || match_uncast(g, a) == match_uncast(g, b);
}

gradd_val_t match_of_dtype(const graph_t *g, gradd_val_t v, gradd_dtype_t dtype) {
    gradd_val_t base = match_uncast(g, v);
    if (g->values[base]->type.dtype == dtype) return base;
    return g->values[v]->type.dtype == dtype ? v : GRADD_NONE;
}

gradd_val_t match_row_vector(const graph_t *g, gradd_val_t v, gradd_val_t x) {
    const gradd_type_t *tv = &g->values[v]->type, *tx = &g->values[x]->type;
    if (tv->rank != 1 || !tx->rank || tv->dims[0] != tx->dims[tx->rank - 1]) return GRADD_NONE;
    gradd_val_t found = match_of_dtype(g, v, tx->dtype);
    if (found == GRADD_NONE && tx->dtype == GRADD_DT_BF16)
        found = match_of_dtype(g, v, GRADD_DT_F32);
    return found;
}
