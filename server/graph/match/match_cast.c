/* Looking through casts. See match_cast.h. */
#include "server/graph/match/match_cast.h"

/* The operand of the cast that makes v, if that is one between a half and f32; GRADD_NONE if not.
 */
static gradd_val_t under_cast(const graph_t *g, gradd_val_t v) {
    const graph_node_t *n = match_made_by(g, v, "Cast");
    const gradd_dtype_t to = graph_type(g, v)->dtype;
    if (!n) return GRADD_NONE;
    const gradd_dtype_t from = graph_type(g, n->in[0])->dtype;
    const bool widens = gradd_dtype_is_half(from) && to == GRADD_DT_F32;
    return widens || (from == GRADD_DT_F32 && gradd_dtype_is_half(to)) ? n->in[0] : GRADD_NONE;
}

gradd_val_t match_under_cast(const graph_t *g, gradd_val_t v, gradd_dtype_t as) {
    const gradd_dtype_t dtype = graph_type(g, v)->dtype;
    return gradd_dtype_is_half(dtype) && as != dtype ? GRADD_NONE : under_cast(g, v);
}

gradd_val_t match_uncast(const graph_t *g, gradd_val_t v, gradd_dtype_t as) {
    for (int step = 0; step < MATCH_MAX_WALK; step++) {
        const gradd_val_t x = match_under_cast(g, v, as);
        if (x == GRADD_NONE) break;
        v = x;
    }
    return v;
}

bool match_uncast_read_once(const graph_t *g, gradd_val_t v, gradd_dtype_t as,
                            const graph_readers_t *readers) {
    const gradd_val_t end = match_uncast(g, v, as);
    while (v != end && graph_read_once(readers, v))
        v = match_made_by(g, v, "Cast")->in[0];
    return v == end && graph_read_once(readers, v);
}

bool match_uncast_read_by_products(const graph_t *g, gradd_val_t v, gradd_dtype_t as,
                                   const graph_readers_t *readers) {
    if (!graph_read_by_products(readers, v)) return false;
    const gradd_val_t end = match_uncast(g, v, as);
    return v == end || match_uncast_read_once(g, match_made_by(g, v, "Cast")->in[0], as, readers);
}

bool match_same_uncast(const graph_t *g, gradd_val_t a, gradd_val_t b, gradd_dtype_t as) {
    return a == b || match_uncast(g, a, as) == match_uncast(g, b, as);
}

/* Behind the first value in that half nothing is lost any more, but by the other half. */
gradd_val_t match_of_dtype(const graph_t *g, gradd_val_t v, gradd_dtype_t dtype) {
    gradd_val_t found = graph_type(g, v)->dtype == dtype ? v : GRADD_NONE;
    for (int step = 0; gradd_dtype_is_half(dtype) && step < MATCH_MAX_WALK; step++) {
        if ((v = under_cast(g, v)) == GRADD_NONE) break;
        if (graph_type(g, v)->dtype == dtype)
            found = v;
        else if (gradd_dtype_is_half(graph_type(g, v)->dtype))
            break;
    }
    return found;
}

gradd_val_t match_row_vector(const graph_t *g, gradd_val_t v, gradd_val_t x) {
    const gradd_type_t *tv = graph_type(g, v), *tx = graph_type(g, x);
    if (tv->rank != 1 || !tx->rank || tv->dims[0] != tx->dims[tx->rank - 1]) return GRADD_NONE;
    gradd_val_t found = match_of_dtype(g, v, tx->dtype);
    if (found == GRADD_NONE && gradd_dtype_is_half(tx->dtype))
        found = match_of_dtype(g, v, GRADD_DT_F32);
    return found;
}
