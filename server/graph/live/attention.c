/* Whether an attention may run over real rows alone. See live.h.
 *
 * Its mask must be made of two things: which keys are real, straight from an input of the model
 * that is zeros and ones, and known numbers that say for each position an interval of positions
 * around itself (causal, a window, everything). Then real rows look at real rows of their sequence
 * within the interval, which lie side by side in the list of real rows. */
#include <math.h>
#include <string.h>

#include "kernels/attention.h"
#include "server/graph/budget.h"
#include "server/graph/live/live.h"
#include "server/graph/match/match.h"

typedef struct found_s {
    const graph_t *g;
    int64_t batch, positions;
    gradd_val_t mask; /* input that tells real rows */
    bool tells_keys;  /* this mask hides what is not real */
    int32_t *spans;   /* [positions, 2] */
} found_t;

static const graph_node_t *maker(const graph_t *g, gradd_val_t v) {
    const graph_value_t *value = g->values[v];
    return value->kind == VALUE_NODE && !value->data ? &g->nodes[value->node] : NULL;
}

/* ---- which keys are real --------------------------------------------------------------------- */

/* Whether the sizes beside those of one are [batch, positions], or only one of both where the other
 * is one. */
static bool holds_rows(const found_t *f, const gradd_type_t *t) {
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
static bool names_all(const found_t *f, const graph_value_t *indices) {
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
static gradd_val_t source_of_rows(const found_t *f, gradd_val_t v) {
    bool negated = false;
    const graph_t *g = f->g;
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
static bool tells_keys(found_t *f, gradd_val_t v) {
    const graph_t *g = f->g;
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
    const gradd_val_t source = source_of_rows(f, v);
    if (source == GRADD_NONE || (f->mask != GRADD_NONE && f->mask != source)) return false;
    f->mask = source;
    f->tells_keys = true;
    return true;
}

/* ---- intervals of positions ------------------------------------------------------------------ */

/* Narrows the interval of a position to what a row of n booleans says; false if that has holes. */
static bool narrow(const uint8_t *row, int64_t n, int64_t own, int32_t *span) {
    int64_t from = own, to = own + 1;
    if (!row[own]) return false;
    while (from > 0 && row[from - 1])
        from--;
    while (to < n && row[to])
        to++;
    for (int64_t k = 0; k < n; k++)
        if (row[k] && (k < from || k >= to)) return false;
    if (from > span[0]) span[0] = (int32_t)from;
    if (to < span[1]) span[1] = (int32_t)to;
    return true;
}

static bool all_true(const graph_value_t *v) {
    const int64_t n = gradd_type_count(&v->type);
    return n && !memchr(v->data, 0, (size_t)n);
}

/* Known numbers that say for each position what it may look at, whatever the sequence. */
static gradd_status_t tells_positions(found_t *f, gradd_val_t v, bool *out_does) {
    const graph_value_t *value = f->g->values[v];
    const gradd_type_t *t = &value->type;
    const int64_t n = f->positions;
    *out_does = false;
    if (!value->data || t->dtype != GRADD_DT_BOOL) return GRADD_OK;
    GRADD_TRY(budget_spend(1 + gradd_type_count(t) / 1024));
    *out_does = all_true(value);
    if (*out_does || t->rank < 2) return GRADD_OK;
    if (gradd_type_count(t) != n * n || t->dims[t->rank - 1] != n || t->dims[t->rank - 2] != n)
        return GRADD_OK;
    for (int64_t s = 0; s < n; s++)
        if (!narrow((const uint8_t *)value->data + s * n, n, s, f->spans + 2 * s)) return GRADD_OK;
    *out_does = true;
    return GRADD_OK;
}

/* ---- the mask -------------------------------------------------------------------------------- */

/* Takes a mask apart at its Ands; there are at most as many parts as a mask has reasons. */
static gradd_status_t take_apart(found_t *f, gradd_val_t mask, bool *out_known) {
    gradd_val_t parts[16] = {mask};
    int n_parts = 1;
    *out_known = true;
    for (int i = 0; i < n_parts && *out_known; i++) {
        const graph_node_t *n = maker(f->g, parts[i]);
        if (n && !strcmp(n->op->name, "And")) {
            if (n_parts + 2 > (int)(sizeof parts / sizeof parts[0])) *out_known = false;
            for (int k = 0; k < 2 && *out_known; k++)
                parts[n_parts++] = n->in[k];
        } else if (!tells_keys(f, parts[i])) {
            GRADD_TRY(tells_positions(f, parts[i], out_known));
        }
    }
    return GRADD_OK;
}

static bool given(const graph_node_t *n, int i) {
    return i < n->n_in && n->in[i] != GRADD_NONE;
}

enum { MASK = 3, BIAS = 4 };

static bool fits(const graph_t *g, const graph_node_t *n, int64_t rows) {
    const gradd_type_t *q = graph_type(g, n->in[0]), *k = graph_type(g, n->in[1]);
    if (gradd_attr_int(n->attrs, "layout", 0) != 15 || !given(n, MASK) || given(n, BIAS))
        return false;
    if (gradd_attr_float(n->attrs, "fill", -INFINITY) > GRADD_ATTN_MASKED) return false;
    return q->dims[0] * q->dims[1] == rows && k->dims[0] == q->dims[0] &&
           k->dims[1] == q->dims[1] && rows < INT32_MAX;
}

static gradd_status_t find_spans(live_t *l, const graph_node_t *n, gradd_val_t *out) {
    graph_t *g = l->g;
    const gradd_type_t *q = graph_type(g, n->in[0]);
    found_t f = {.g = g, .batch = q->dims[0], .positions = q->dims[1], .mask = l->mask};
    bool known;
    f.spans = arena_array(g->arena, (size_t)f.positions, 2 * sizeof f.spans[0]);
    if (!f.spans) return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    for (int64_t s = 0; s < f.positions; s++)
        f.spans[2 * s] = 0, f.spans[2 * s + 1] = (int32_t)f.positions;
    GRADD_TRY(take_apart(&f, n->in[MASK], &known));
    *out = GRADD_NONE;
    if (!known || f.mask == GRADD_NONE || !f.tells_keys) return GRADD_OK;
    const gradd_type_t type = {
        GRADD_DT_I32, 2, {f.positions, 2}
    };
    l->mask = f.mask;
    return graph_constant(g, &type, f.spans, out);
}

gradd_status_t live_attention(live_t *l, int32_t node, bool *out_can) {
    const graph_node_t *n = &l->g->nodes[node];
    *out_can = false;
    if (!fits(l->g, n, l->loss.rows)) return GRADD_OK;
    if (l->last_mask != n->in[MASK]) {
        l->last_mask = n->in[MASK];
        GRADD_TRY(find_spans(l, n, &l->last_spans));
    }
    l->spans[node] = l->last_spans;
    *out_can = l->last_spans != GRADD_NONE;
    return GRADD_OK;
}
