/* Masks and biases of attention. See match_mask.h. */
#include "server/graph/match/match_mask.h"

#include "kernels/describe/attention.h"
#include "server/graph/compile_time.h"
#include "server/graph/match/match_cast.h"

/* The highest fill that is taken for a mask where it takes the place of the product. */
#define HIGHEST_FILL (-1e3)

/* Where(mask, *rest, fill) or Where(mask, fill, *rest). */
static bool take_mask(const graph_t *g, const graph_node_t *n, double highest, match_attention_t *f,
                      gradd_val_t *rest) {
    double fill;
    if (f->mask != GRADD_NONE || !graph_type(g, n->in[0])->rank) return false;
    for (int k = 1; k <= 2; k++) {
        if (!match_scalar(g, n->in[k], &fill) || fill > highest) continue;
        f->fill = fill * f->outer;
        f->mask = n->in[0];
        f->mask_hides = k == 1;
        *rest = n->in[3 - k];
        return f->fill <= highest;
    }
    return false;
}

bool match_masked_scores(const graph_t *g, const graph_node_t *n, match_attention_t *f,
                         gradd_val_t *rest) {
    f->hides = GRADD_ATTN_HIDES_SCORE;
    return take_mask(g, n, HIGHEST_FILL, f, rest);
}

/* Whether all elements are zero or one, because they were booleans once. */
static bool is_zero_one(const graph_t *g, gradd_val_t v) {
    static const char *const moves[] = {"Slice",   "Reshape", "Unsqueeze",
                                        "Squeeze", "Expand",  "Transpose"};
    for (int step = 0; step < MATCH_MAX_WALK; step++) {
        const graph_node_t *n = match_made_by(g, v, "Cast");
        if (n && graph_type(g, n->in[0])->dtype == GRADD_DT_BOOL) return true;
        for (size_t i = 0; !n && i < sizeof moves / sizeof moves[0]; i++)
            n = match_made_by(g, v, moves[i]);
        if (!n) return false;
        v = n->in[0];
    }
    return false;
}

/* Whether `filled` is (1 - m) times some fill, both known and in f32. */
static bool fills_known(const graph_t *g, gradd_val_t filled, gradd_val_t m, double *fill) {
    const float *c = g->values[filled]->data, *gate = g->values[m]->data;
    const gradd_type_t *type = graph_type(g, m);
    if (!c || !gate || type->dtype != GRADD_DT_F32 ||
        !gradd_type_equal(type, graph_type(g, filled)))
        return false;
    if (compile_time_spend(1 + gradd_type_count(type) / 1024)) return false; /* fails again soon */
    *fill = 0;
    for (int64_t i = 0, n = gradd_type_count(type); i < n; i++) {
        if (gate[i] == 1 ? c[i] != 0 : gate[i] != 0 || (*fill != 0 && c[i] != *fill)) return false;
        if (gate[i] == 0) *fill = c[i];
    }
    return true;
}

/* Whether `filled` is Mul(Sub(1, m), fill). */
static bool fills(const graph_t *g, gradd_val_t filled, gradd_val_t m, double *fill) {
    double one;
    gradd_val_t inverse;
    const graph_node_t *n = match_made_by(g, filled, "Mul");
    if (!n) return fills_known(g, filled, m, fill);
    if (!match_with_scalar(g, n, fill, &inverse)) return false;
    n = match_made_by(g, inverse, "Sub");
    return n && match_scalar(g, n->in[0], &one) && one == 1 && n->in[1] == m && is_zero_one(g, m);
}

bool match_gate(const graph_t *g, gradd_val_t v, match_attention_t *f, gradd_val_t *rest) {
    double fill;
    const graph_node_t *minus = match_made_by(g, v, "Sub");
    const graph_node_t *n = minus ? minus : match_made_by(g, v, "Add");
    for (int k = 0; n && k < (minus ? 2 : 4) && f->mask == GRADD_NONE; k++) {
        const graph_node_t *kept = match_made_by(g, n->in[k / 2], "Mul");
        if (!kept || !gradd_type_same_shape(graph_type(g, kept->in[k % 2]), graph_type(g, v)))
            continue;
        const gradd_val_t m = kept->in[1 - k % 2];
        if (!graph_type(g, m)->rank || !fills(g, n->in[1 - k / 2], m, &fill)) continue;
        fill *= (minus ? -1 : 1) * f->outer;
        if (fill > HIGHEST_FILL) continue;
        f->fill = fill;
        f->mask = m;
        f->hides = GRADD_ATTN_HIDES_SCORE;
        *rest = kept->in[k % 2];
        return true;
    }
    return false;
}

static bool add_bias(gradd_val_t v, bool hidden, match_attention_t *f) {
    if (f->n_bias == MATCH_MAX_BIAS) return false;
    f->bias[f->n_bias++] = (match_bias_t){v, f->outer, hidden};
    return true;
}

/* A mask of the scores hides what is found further up, not what was found already. */
bool match_bias(gradd_val_t v, match_attention_t *f) {
    return add_bias(v, f->hides & GRADD_ATTN_HIDES_SCORE, f);
}

/* A mask whose values are known: nothing but zeros and one fill, in f32. */
static bool take_known_mask(const graph_t *g, gradd_val_t v, match_attention_t *f) {
    const float *data = g->values[v]->data;
    double fill = 0;
    const gradd_type_t *type = graph_type(g, v);
    if (f->mask != GRADD_NONE || !data || type->dtype != GRADD_DT_F32 || !type->rank) return false;
    if (compile_time_spend(1 + gradd_type_count(type) / 1024)) return false;
    for (int64_t i = 0, n = gradd_type_count(type); i < n; i++) {
        if (data[i] == 0) continue;
        if (data[i] > GRADD_ATTN_MASKED || (fill != 0 && data[i] != fill)) return false;
        fill = data[i];
    }
    if (fill == 0) return false;
    f->fill = fill * f->outer;
    f->mask = v;
    f->mask_hides = true;
    return true;
}

static bool is_zero(const graph_t *g, gradd_val_t v) {
    double zero;
    return match_scalar(g, v, &zero) && zero == 0;
}

bool match_added_mask(const graph_t *g, gradd_val_t v, match_attention_t *f) {
    gradd_val_t rest;
    if (take_known_mask(g, match_uncast(g, v, f->dtype), f)) return true;
    const graph_node_t *n = match_made_by(g, match_uncast(g, v, f->dtype), "Where");
    if (n && take_mask(g, n, GRADD_ATTN_MASKED, f, &rest))
        return is_zero(g, rest) || add_bias(rest, true, f);
    n = match_made_by(g, v, "Add");
    for (int k = 0; n && k < 2; k++) {
        const graph_node_t *w = match_made_by(g, match_uncast(g, n->in[k], f->dtype), "Where");
        if (!w || !take_mask(g, w, GRADD_ATTN_MASKED, f, &rest)) continue;
        return is_zero(g, rest) && match_bias(n->in[1 - k], f);
    }
    return false;
}
