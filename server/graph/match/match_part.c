/* Parts of the last axis. See match_part.h. */
#include "server/graph/match/match_part.h"

int64_t match_width(const graph_t *g, gradd_val_t v) {
    const gradd_type_t *type = graph_type(g, v);
    return type->rank ? type->dims[type->rank - 1] : 0;
}

bool match_is_last_axis(const graph_t *g, gradd_val_t v, int64_t axis) {
    int rank = graph_type(g, v)->rank;
    return rank && (axis == -1 || axis == rank - 1);
}

/* A known integer tensor of one element. */
static bool known_i64(const graph_t *g, const graph_node_t *n, int input, int64_t otherwise,
                      int64_t *out) {
    *out = otherwise;
    if (input >= n->n_in || n->in[input] == GRADD_NONE) return true;
    const graph_value_t *v = g->values[n->in[input]];
    if (!v->data || gradd_type_count(&v->type) != 1) return false;
    if (v->type.dtype == GRADD_DT_I64)
        *out = *(const int64_t *)v->data;
    else if (v->type.dtype == GRADD_DT_I32)
        *out = *(const int32_t *)v->data;
    else
        return false;
    return true;
}

static bool part_by_slice(const graph_t *g, const graph_node_t *n, match_part_t *out) {
    int64_t start, axis, step, width = match_width(g, n->in[0]);
    if (!known_i64(g, n, 1, 0, &start) || !known_i64(g, n, 3, 0, &axis) ||
        !known_i64(g, n, 4, 1, &step))
        return false;
    if (step < 1 || !match_is_last_axis(g, n->in[0], axis)) return false;
    if (start < 0) start = start < -width ? 0 : start + width;
    *out = (match_part_t){n->in[0], start, match_width(g, n->out[0]), step};
    return true;
}

static bool part_by_split(const graph_t *g, const graph_node_t *n, int index, match_part_t *out) {
    int64_t start = 0;
    if (!match_is_last_axis(g, n->in[0], gradd_attr_int(n->attrs, "axis", 0))) return false;
    for (int j = 0; j < index; j++) {
        if (n->out[j] == GRADD_NONE) return false;
        start += match_width(g, n->out[j]);
    }
    *out = (match_part_t){n->in[0], start, match_width(g, n->out[index]), 1};
    return true;
}

bool match_part(const graph_t *g, gradd_val_t v, match_part_t *out) {
    const graph_node_t *n = match_made_by(g, v, "Slice");
    if (n) return part_by_slice(g, n, out);
    n = match_made_by(g, v, "Split");
    return n && part_by_split(g, n, g->values[v]->index, out);
}
