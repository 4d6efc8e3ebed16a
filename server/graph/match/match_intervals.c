/* See match_intervals.h. */
#include "server/graph/match/match_intervals.h"

#include <string.h>

#include "server/graph/compile_time.h"
#include "server/graph/match/match.h"

static const graph_node_t *maker(const graph_t *g, gradd_val_t v) {
    const graph_value_t *value = g->values[v];
    return value->kind == VALUE_NODE && !value->data ? &g->nodes[value->node] : NULL;
}

/* The truth of a known number; false if it is none. */
static bool known_truth(const graph_t *g, gradd_val_t v, bool *out) {
    double number;
    *out = match_scalar(g, v, &number) && number != 0;
    return match_scalar(g, v, &number);
}

/* The mask that v is equal to, past numbers that a mask was turned into and back: Not, and casts of
 * Where(mask, number, number). */
static gradd_val_t plain_mask(const graph_t *g, gradd_val_t v) {
    bool negated = false, yes, no;
    gradd_val_t found = v;
    for (int step = 0; step < MATCH_MAX_WALK; step++) {
        const graph_node_t *n = maker(g, v);
        if (n && !strcmp(n->op->name, "Not")) {
            negated = !negated;
            v = n->in[0];
        } else {
            const graph_node_t *choice =
                n && !strcmp(n->op->name, "Cast") ? maker(g, n->in[0]) : NULL;
            if (!choice || strcmp(choice->op->name, "Where") ||
                graph_type(g, v)->dtype != GRADD_DT_BOOL ||
                !gradd_type_equal(graph_type(g, v), graph_type(g, choice->in[0])) ||
                !known_truth(g, choice->in[1], &yes) || !known_truth(g, choice->in[2], &no) ||
                yes == no)
                return found;
            negated ^= no;
            v = choice->in[0];
        }
        if (!negated) found = v;
    }
    return found;
}

/* ---- which keys are real --------------------------------------------------------------------- */

/* Whether the sizes beside those of one are [batch, positions], or only one of both where the other
 * is one. */
static bool holds_rows(const match_intervals_t *f, const gradd_type_t *t) {
    int64_t want[2] = {f->batch, f->positions};
    int at = 0;
    for (int d = 0; d < t->rank; d++) {
        if (t->dims[d] == 1) continue;
        while (at < 2 && want[at] == 1)
            at++;
        if (at == 2 || want[at++] != t->dims[d]) return false;
    }
    while (at < 2 && want[at] == 1)
        at++;
    return at == 2;
}

/* Whether the known indices name element (b, s) at place (b, s). */
static bool names_all(const match_intervals_t *f, const graph_value_t *indices) {
    const int64_t *at = indices->data;
    const int64_t n = f->batch * f->positions;
    if (!at || indices->type.dtype != GRADD_DT_I64 || gradd_type_count(&indices->type) != 2 * n)
        return false;
    for (int64_t i = 0; i < n; i++)
        if (at[2 * i] != i / f->positions || at[2 * i + 1] != i % f->positions) return false;
    return true;
}

/* A number among zeros and ones that a comparison with it tells: 1 as true, 0 as false, else -1. */
static int compares_with(const graph_t *g, const graph_node_t *n, gradd_val_t *out_other) {
    for (int k = 0; k < 2; k++) {
        const graph_value_t *c = g->values[n->in[k]];
        if (!c->data || gradd_type_count(&c->type) != 1) continue;
        double number = -1;
        if (c->type.dtype == GRADD_DT_I64) number = (double)*(const int64_t *)c->data;
        if (c->type.dtype == GRADD_DT_F32) number = (double)*(const float *)c->data;
        if (c->type.dtype == GRADD_DT_BOOL) number = *(const uint8_t *)c->data;
        *out_other = n->in[1 - k];
        return number == 1 ? 1 : number == 0 ? 0 : -1;
    }
    return -1;
}

/* Whether v has, in this order, what tells each row real: nonzero, or zero if *negated. */
static gradd_val_t source_of_rows(const graph_t *g, const match_intervals_t *f, gradd_val_t v) {
    bool negated = false;
    for (int step = 0; step < MATCH_MAX_WALK; step++) {
        if (!holds_rows(f, graph_type(g, v))) return GRADD_NONE;
        const graph_node_t *n = maker(g, v);
        if (!n) return g->values[v]->kind == VALUE_INPUT && !negated ? v : GRADD_NONE;
        const char *op = n->op->name;
        gradd_val_t other = n->in[0];
        if (!strcmp(op, "Not")) {
            negated = !negated;
        } else if (!strcmp(op, "Equal")) {
            const int number = compares_with(g, n, &other);
            if (number < 0) return GRADD_NONE;
            negated ^= !number;
        } else if (!strcmp(op, "GatherND")) {
            const bool plain =
                graph_type(g, other)->rank == 2 && !gradd_attr_int(n->attrs, "batch_dims", 0);
            if (!plain || !names_all(f, g->values[n->in[1]])) return GRADD_NONE;
        } else if (strcmp(op, "Cast") && !gradd_op_is_transparent(n->op)) {
            return GRADD_NONE;
        }
        v = other;
    }
    return GRADD_NONE;
}

/* v[b, h, q, k] says whether key k of sequence b is real. */
static bool tells_keys(const graph_t *g, match_intervals_t *f, gradd_val_t v) {
    const graph_node_t *n = maker(g, v);
    for (int step = 0; n && step < MATCH_MAX_WALK && !strcmp(n->op->name, "Expand"); step++) {
        v = n->in[0];
        n = maker(g, v);
    }
    const gradd_type_t *t = graph_type(g, v);
    if (t->rank < 1 || t->rank > 4 || t->dims[t->rank - 1] != f->positions) return false;
    for (int back = 2; back <= 3 && back <= t->rank; back++)
        if (t->dims[t->rank - back] != 1) return false;
    if (f->batch != 1 && (t->rank < 4 || t->dims[0] != f->batch)) return false;
    const gradd_val_t source = source_of_rows(g, f, v);
    if (source == GRADD_NONE || (f->keys != GRADD_NONE && f->keys != source)) return false;
    f->keys = source;
    return true;
}

/* ---- segments -------------------------------------------------------------------------------- */

/* The value whose elements v has, in this order. */
static gradd_val_t source_of_elements(const graph_t *g, const match_intervals_t *f, gradd_val_t v) {
    for (int step = 0; step < MATCH_MAX_WALK; step++) {
        const graph_node_t *n = maker(g, v);
        if (!n) return v;
        if (!strcmp(n->op->name, "GatherND")) {
            if (graph_type(g, n->in[0])->rank != 2 || gradd_attr_int(n->attrs, "batch_dims", 0) ||
                !names_all(f, g->values[n->in[1]]))
                return v;
        } else if (!gradd_op_is_transparent(n->op)) {
            return v;
        }
        v = n->in[0];
    }
    return v;
}

/* Counts along the positions never fall: what they are equal for lies side by side. */
static bool is_count(const graph_t *g, const match_intervals_t *f, gradd_val_t v) {
    const graph_node_t *n = maker(g, v);
    const gradd_type_t *t = graph_type(g, v);
    if (!n || strcmp(n->op->name, "CumSum") || t->rank < 1) return false;
    if (!holds_rows(f, t) || t->dims[t->rank - 1] != f->positions) return false;
    const graph_value_t *axis = g->values[n->in[1]];
    if (!axis->data || gradd_type_count(&axis->type) != 1) return false;
    const int64_t number = axis->type.dtype == GRADD_DT_I64 ? *(const int64_t *)axis->data
                                                            : *(const int32_t *)axis->data;
    if (number != -1 && number != t->rank - 1) return false;
    const graph_node_t *cast = maker(g, n->in[0]);
    return cast && !strcmp(cast->op->name, "Cast") &&
           graph_type(g, cast->in[0])->dtype == GRADD_DT_BOOL &&
           (t->dtype == GRADD_DT_I64 || t->dtype == GRADD_DT_I32);
}

/* Sizes [batch, 1, n, 1] or [batch, 1, 1, n], from the right. */
static bool lies_along(const match_intervals_t *f, const gradd_type_t *t, bool keys) {
    const int64_t want[4] = {keys ? f->positions : 1, keys ? 1 : f->positions, 1, f->batch};
    if (t->rank < 2 || t->rank > 4) return false;
    for (int back = 0; back < 4; back++)
        if ((back < t->rank ? t->dims[t->rank - 1 - back] : 1) != want[back]) return false;
    return true;
}

/* v[b, h, q, k] says whether q and k are of one segment. */
static bool tells_segments(const graph_t *g, match_intervals_t *f, gradd_val_t v) {
    const graph_node_t *n = maker(g, v);
    if (!n || strcmp(n->op->name, "Equal")) return false;
    const bool turned = lies_along(f, graph_type(g, n->in[0]), true);
    if (!lies_along(f, graph_type(g, n->in[turned]), false) ||
        !lies_along(f, graph_type(g, n->in[!turned]), true))
        return false;
    const gradd_val_t a = source_of_elements(g, f, n->in[0]);
    if (a != source_of_elements(g, f, n->in[1]) || !is_count(g, f, a)) return false;
    if (f->segments != GRADD_NONE && f->segments != a) return false;
    f->segments = a;
    return true;
}

/* ---- order ----------------------------------------------------------------------------------- */

/* Whether v is `whole` without its last element along the last axis, or without its first. */
static bool is_rest(const graph_t *g, gradd_val_t v, gradd_val_t whole, bool behind_first) {
    const graph_node_t *n = maker(g, v);
    return n && n->in[0] == whole &&
           match_cuts_one(g, n, graph_type(g, whole)->rank - 1, behind_first);
}

/* Whether segments start exactly where `numbers` do not rise by one: the count is of
 * Not(Equal(joined[1:] - joined[:-1], 1)), where joined has one number in front of all. */
static bool starts_where_not_rising(const graph_t *g, gradd_val_t segments, gradd_val_t numbers) {
    const graph_node_t *n = maker(g, maker(g, segments)->in[0]); /* the cast, see is_count */
    gradd_val_t difference;
    n = maker(g, n->in[0]);
    if (!n || strcmp(n->op->name, "Not")) return false;
    n = maker(g, n->in[0]);
    if (!n || strcmp(n->op->name, "Equal") || compares_with(g, n, &difference) != 1) return false;
    n = maker(g, difference);
    if (!n || strcmp(n->op->name, "Sub")) return false;
    const graph_node_t *later = maker(g, n->in[0]);
    if (!later || strcmp(later->op->name, "Slice")) return false;
    const gradd_val_t joined = later->in[0];
    if (!is_rest(g, n->in[0], joined, true) || !is_rest(g, n->in[1], joined, false)) return false;
    const graph_node_t *join = maker(g, joined);
    const int rank = graph_type(g, joined)->rank;
    if (!join || strcmp(join->op->name, "Concat") || join->n_in != 2) return false;
    const int64_t axis = gradd_attr_int(join->attrs, "axis", 0);
    const gradd_type_t *one = graph_type(g, join->in[0]);
    return join->in[1] == numbers && (axis == -1 || axis == rank - 1) &&
           one->dims[one->rank - 1] == 1;
}

/* Whether two operands are the same numbers, of keys and of queries; takes note of these. */
static bool are_numbers(const graph_t *g, match_intervals_t *f, gradd_val_t keys,
                        gradd_val_t queries) {
    if (!lies_along(f, graph_type(g, keys), true) || !lies_along(f, graph_type(g, queries), false))
        return false;
    const gradd_val_t a = source_of_elements(g, f, keys);
    if (a != source_of_elements(g, f, queries) || !holds_rows(f, graph_type(g, a))) return false;
    if (f->order != GRADD_NONE && f->order != a) return false;
    f->order = a;
    return true;
}

/* v[b, h, q, k] says whether the number of k is not above that of q. Where segments are runs of
 * rising numbers, that is: k does not come after q. */
static bool tells_order(const graph_t *g, match_intervals_t *f, gradd_val_t v) {
    const graph_node_t *n = maker(g, v);
    if (!n || strcmp(n->op->name, "LessOrEqual") || !are_numbers(g, f, n->in[0], n->in[1]))
        return false;
    f->behind = 0;
    return true;
}

/* The same, whether the number of k is above that of q less a window. */
static bool tells_window(const graph_t *g, match_intervals_t *f, gradd_val_t v) {
    const graph_node_t *n = maker(g, v), *less;
    if (!n || strcmp(n->op->name, "Greater")) return false;
    less = maker(g, n->in[1]);
    if (!less || strcmp(less->op->name, "Sub")) return false;
    const graph_value_t *width = g->values[less->in[1]];
    if (!width->data || width->type.dtype != GRADD_DT_I64 || gradd_type_count(&width->type) != 1)
        return false;
    const int64_t window = *(const int64_t *)width->data;
    if (window < 1 || !are_numbers(g, f, n->in[0], less->in[0])) return false;
    if (window < f->before) f->before = window;
    return true;
}

/* No position looks ahead, or further back than the window. */
static bool settle_order(const graph_t *g, match_intervals_t *f) {
    if (f->order == GRADD_NONE) return true;
    if (f->segments == GRADD_NONE || !starts_where_not_rising(g, f->segments, f->order))
        return false;
    for (int64_t s = 0; s < f->positions; s++) {
        const int64_t from = f->before <= s ? s - f->before + 1 : 0;
        const int64_t to = f->behind < f->positions - s ? s + f->behind + 1 : f->positions;
        if (f->intervals[2 * s] < from) f->intervals[2 * s] = (int32_t)from;
        if (f->intervals[2 * s + 1] > to) f->intervals[2 * s + 1] = (int32_t)to;
    }
    return true;
}

/* ---- intervals of positions ------------------------------------------------------------------ */

/* Narrows the interval of a position to what a row of n booleans says; false if that has holes. */
static bool narrow(const uint8_t *row, int64_t n, int64_t own, int32_t *interval) {
    int64_t from = own, to = own + 1;
    if (!row[own]) return false;
    while (from > 0 && row[from - 1])
        from--;
    while (to < n && row[to])
        to++;
    for (int64_t k = 0; k < n; k++)
        if (row[k] && (k < from || k >= to)) return false;
    if (from > interval[0]) interval[0] = (int32_t)from;
    if (to < interval[1]) interval[1] = (int32_t)to;
    return true;
}

static bool all_true(const graph_value_t *v) {
    const int64_t n = gradd_type_count(&v->type);
    return n && !memchr(v->data, 0, (size_t)n);
}

/* Known numbers that say for each position what it may look at, whatever the sequence. */
static gradd_status_t tells_positions(const graph_t *g, match_intervals_t *f, gradd_val_t v,
                                      bool *out_does) {
    const graph_value_t *value = g->values[v];
    const gradd_type_t *t = &value->type;
    const int64_t n = f->positions;
    *out_does = false;
    if (!value->data || t->dtype != GRADD_DT_BOOL) return GRADD_OK;
    GRADD_TRY(compile_time_spend(1 + gradd_type_count(t) / 1024));
    *out_does = all_true(value);
    if (*out_does || t->rank < 2) return GRADD_OK;
    if (gradd_type_count(t) != n * n || t->dims[t->rank - 1] != n || t->dims[t->rank - 2] != n)
        return GRADD_OK;
    for (int64_t s = 0; s < n; s++)
        if (!narrow((const uint8_t *)value->data + s * n, n, s, f->intervals + 2 * s))
            return GRADD_OK;
    *out_does = true;
    return GRADD_OK;
}

/* ---- the mask -------------------------------------------------------------------------------- */

/* Takes a mask apart at its Ands; there are at most as many parts as a mask has reasons. */
static gradd_status_t take_apart(const graph_t *g, match_intervals_t *f, gradd_val_t mask,
                                 bool *out_known) {
    gradd_val_t parts[16] = {mask};
    int n_parts = 1;
    *out_known = true;
    for (int i = 0; i < n_parts && *out_known; i++) {
        parts[i] = plain_mask(g, parts[i]);
        const graph_node_t *n = maker(g, parts[i]);
        if (n && !strcmp(n->op->name, "And")) {
            if (n_parts + 2 > (int)(sizeof parts / sizeof parts[0])) *out_known = false;
            for (int k = 0; k < 2 && *out_known; k++)
                parts[n_parts++] = n->in[k];
        } else if (!tells_keys(g, f, parts[i]) && !tells_segments(g, f, parts[i]) &&
                   !tells_order(g, f, parts[i]) && !tells_window(g, f, parts[i])) {
            GRADD_TRY(tells_positions(g, f, parts[i], out_known));
        }
    }
    return GRADD_OK;
}

gradd_status_t match_intervals(graph_t *g, gradd_val_t mask, int64_t batch, int64_t positions,
                               match_intervals_t *out, bool *out_known) {
    *out = (match_intervals_t){.batch = batch,
                               .positions = positions,
                               .keys = GRADD_NONE,
                               .segments = GRADD_NONE,
                               .order = GRADD_NONE,
                               .before = positions,
                               .behind = positions};
    out->intervals = arena_array(g->arena, (size_t)positions, 2 * sizeof out->intervals[0]);
    if (!out->intervals) return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    for (int64_t s = 0; s < positions; s++)
        out->intervals[2 * s] = 0, out->intervals[2 * s + 1] = (int32_t)positions;
    GRADD_TRY(take_apart(g, out, mask, out_known));
    *out_known = *out_known && settle_order(g, out);
    return GRADD_OK;
}

gradd_status_t match_intervals_value(graph_t *g, const match_intervals_t *s, gradd_val_t *out) {
    const gradd_type_t type = {
        GRADD_DT_I32, 2, {s->positions, 2}
    };
    return graph_constant(g, &type, s->intervals, out);
}
