/* The pattern of attention:
 *
 *   MatMul(q, Transpose(k)) > Mul/Div by a scalar > [Div, Tanh, Mul: soft cap]
 *     > [Where(mask, ., fill)] [Add(., Where(mask, 0, fill))] [Add(., bias)]
 *     > [Add(Mul(., m), Mul(Sub(1, m), fill)), m a float mask of zeros and ones]
 *     > [Max(., fill)] > [Concat(., sinks)] > [Sub(., largest of it)] > [a factor] > Softmax
 *     > [all but the last column] > [Dropout] > MatMul(., v)
 *
 * with casts between a half and f32 anywhere if the result is in that half, operands of Add and Mul
 * in either order, factors on q or k instead of their product, and heads of k and v repeated by
 * Unsqueeze, Expand, Reshape. One mask and a few biases are found, in any order; a second mask that
 * is added is a bias. Several last products may share one softmax (differential attention). */
#include "server/graph/match/match_attention.h"

#include <string.h>

#include "kernels/describe/attention.h"
#include "server/graph/match/match_cast.h"
#include "server/graph/match/match_mask.h"
#include "server/graph/match/match_mean.h"
#include "server/graph/match/match_part.h"

enum { MOST_TERMS = MATCH_MAX_BIAS + 1 }; /* biases and a mask */

/* v as an operand in `dtype`, if it is one but for casts that lose nothing. */
static gradd_val_t as_type(const graph_t *g, gradd_val_t v, gradd_dtype_t dtype) {
    const gradd_val_t found = match_of_dtype(g, v, dtype);
    return found == GRADD_NONE ? v : found;
}

/* Peels one multiplication or division by a known scalar. */
static bool peel_factor(const graph_t *g, gradd_val_t *v, double *factor) {
    double c;
    gradd_val_t other;
    const graph_node_t *n = match_made_by(g, *v, "Mul");
    if (n && match_with_scalar(g, n, &c, &other)) {
        if (!gradd_type_same_shape(graph_type(g, other), graph_type(g, *v))) return false;
        *v = other;
        *factor *= c;
        return true;
    }
    n = match_made_by(g, *v, "Div");
    if (!n || !match_scalar(g, n->in[1], &c) || c == 0) return false;
    if (!gradd_type_same_shape(graph_type(g, n->in[0]), graph_type(g, *v))) return false;
    *v = n->in[0];
    *factor /= c;
    return true;
}

static bool has_perm(const graph_t *g, const graph_node_t *n, int a, int b, int c) {
    const gradd_attr_t *perm = n ? gradd_attr_find(n->attrs, "perm") : NULL;
    return perm && perm->n == 4 && graph_type(g, n->in[0])->rank == 4 && perm->ints[0] == 0 &&
           perm->ints[1] == a && perm->ints[2] == b && perm->ints[3] == c;
}

gradd_val_t match_heads_swapped(const graph_t *g, gradd_val_t v) {
    const graph_node_t *n = match_made_by(g, v, "Transpose");
    return has_perm(g, n, 2, 1, 3) ? n->in[0] : GRADD_NONE;
}

gradd_val_t match_unrepeated(const graph_t *g, gradd_val_t v) {
    const gradd_type_t *all = graph_type(g, v);
    const graph_node_t *n = match_made_by(g, v, "Reshape");
    if (!n || all->rank != 4 || graph_type(g, n->in[0])->rank != 5) return v;
    const gradd_type_t *wide = graph_type(g, n->in[0]);
    if (wide->dims[1] * wide->dims[2] != all->dims[1] || wide->dims[3] != all->dims[2] ||
        wide->dims[4] != all->dims[3])
        return v;
    gradd_val_t one = n->in[0];
    if ((n = match_made_by(g, one, "Expand"))) one = n->in[0];
    const gradd_type_t *few = graph_type(g, one);
    if (few->rank != 5 || few->dims[2] != 1 || few->dims[1] != wide->dims[1] ||
        few->dims[0] != wide->dims[0] || few->dims[3] != wide->dims[3])
        return v;
    if (!(n = match_made_by(g, one, "Unsqueeze")) && !(n = match_made_by(g, one, "Reshape")))
        return v;
    const gradd_type_t *source = graph_type(g, n->in[0]);
    bool same = source->rank == 4 && source->dims[0] == few->dims[0] &&
                source->dims[1] == few->dims[1] && source->dims[2] == few->dims[3] &&
                source->dims[3] == few->dims[4];
    return same ? n->in[0] : v;
}

/* k where k^T is made in some other way: by a Transpose that moves other axes, too, or by none. */
static void move_k(const graph_node_t *t, gradd_val_t turned, match_attention_t *f) {
    const gradd_attr_t *perm = t ? gradd_attr_find(t->attrs, "perm") : NULL;
    const bool known = perm && perm->n == 4;
    f->k_moved = true;
    f->k = known ? t->in[0] : turned;
    for (int i = 0; i < 4; i++)
        f->k_perm[i] = known ? perm->ints[i < 2 ? i : 5 - i] : i < 2 ? i : 5 - i;
}

/* MatMul(q, Transpose(k)). Where the graph transposes [B, S, H, D] as a whole, k is that. */
static bool find_operands(const graph_t *g, const graph_node_t *n, match_attention_t *f) {
    const gradd_dtype_t dtype = f->dtype;
    gradd_val_t k = as_type(g, n->in[1], dtype);
    for (int step = 0; step < MATCH_MAX_WALK && peel_factor(g, &k, &f->scale); step++)
        k = as_type(g, k, dtype);
    const graph_node_t *t = match_made_by(g, k, "Transpose");
    if (graph_type(g, n->in[0])->rank != 4 || graph_type(g, k)->rank != 4) return false;
    f->q = as_type(g, n->in[0], dtype);
    f->k_turned = has_perm(g, t, 2, 3, 1);
    if (has_perm(g, t, 1, 3, 2))
        f->k = match_unrepeated(g, as_type(g, t->in[0], dtype));
    else if (f->k_turned)
        f->k = t->in[0];
    else
        move_k(t, k, f);
    return true;
}

/* From capped and scaled scores to q and k. */
static bool find_product(const graph_t *g, gradd_val_t v, match_attention_t *f) {
    const graph_node_t *n;
    double factor = 1;
    for (int step = 0; step < MATCH_MAX_WALK; step++) {
        v = match_uncast(g, v, f->dtype);
        if (peel_factor(g, &v, &factor)) continue;
        if (!(n = match_made_by(g, v, "Tanh"))) break;
        if (f->softcap != 0 || factor <= 0) return false;
        f->softcap = factor;
        v = n->in[0];
    }
    f->scale = factor;
    n = match_made_by(g, v, "MatMul");
    return n && find_operands(g, n, f);
}

/* ---- what lies between products and softmax -------------------------------------------------- */

/* Factors on what is masked: softmax((scores + mask) / c). */
static gradd_val_t peel_outer(const graph_t *g, gradd_val_t v, match_attention_t *f) {
    double outer = 1;
    gradd_val_t inner = match_uncast(g, v, f->dtype);
    for (int step = 0; step < MATCH_MAX_WALK && peel_factor(g, &inner, &outer); step++)
        inner = match_uncast(g, inner, f->dtype);
    if (!match_made_by(g, inner, "Where") && !match_made_by(g, inner, "Add") &&
        !match_made_by(g, inner, "Sub"))
        return match_uncast(g, v, f->dtype);
    f->outer *= outer;
    return inner;
}

/* From what goes into softmax, or into a floor under it, to q and k. Goes at most `depth` additions
 * up, and tries what is added as a mask first, then as a bias. */
static bool find_scores(const graph_t *g, gradd_val_t v, match_attention_t *f, int depth) {
    const graph_node_t *n;
    v = peel_outer(g, v, f);
    if ((n = match_made_by(g, v, "Where"))) {
        if (!match_masked_scores(g, n, f, &v)) return false;
        v = match_uncast(g, v, f->dtype);
    }
    gradd_val_t rest;
    if (match_gate(g, v, f, &rest)) v = match_uncast(g, rest, f->dtype);
    n = match_made_by(g, v, "Add");
    for (int way = 0; n && depth > 0 && way < 4; way++) {
        match_attention_t tried = *f;
        const gradd_val_t added = n->in[1 - way % 2];
        if (way < 2 ? !match_added_mask(g, added, &tried) : !match_bias(added, &tried)) continue;
        if (!find_scores(g, n->in[way % 2], &tried, depth - 1)) continue;
        *f = tried;
        return true;
    }
    return !n && find_product(g, v, f);
}

/* Scores with a floor: Max(scores, fill), where the same fill was added by a mask. If there is no
 * mask it is what the bias says. */
static bool find_floored_scores(const graph_t *g, gradd_val_t v, match_attention_t *f) {
    double fill;
    const graph_node_t *n = match_made_by(g, match_uncast(g, v, f->dtype), "Max");
    if (!n) return find_scores(g, v, f, MOST_TERMS);
    gradd_val_t scores;
    if (!match_with_scalar(g, n, &fill, &scores) || !(fill <= GRADD_ATTN_MASKED)) return false;
    if (!find_scores(g, scores, f, MOST_TERMS) || f->outer != 1 || f->softcap != 0) return false;
    /* beside a mask, what a bias makes of the floor depends on both */
    if (f->mask != GRADD_NONE && (f->hides || f->n_bias || f->fill != fill)) return false;
    f->floor = f->mask == GRADD_NONE;
    f->fill = fill;
    f->hides = GRADD_ATTN_HIDES_SCORE | GRADD_ATTN_HIDES_BIAS | GRADD_ATTN_FLOOR;
    return f->mask != GRADD_NONE || f->n_bias;
}

/* ---- sinks ----------------------------------------------------------------------------------- */

/* Whether only this output of its node is read. */
static bool is_only_output(const graph_t *g, gradd_val_t v, const graph_readers_t *readers) {
    const graph_node_t *n = &g->nodes[g->values[v]->node];
    for (int j = 0; j < n->n_out; j++)
        if (n->out[j] != v && n->out[j] != GRADD_NONE && n->out[j] < readers->n &&
            readers->of[n->out[j]])
            return false;
    return true;
}

/* The softmax under the weights, of which a sink's column may have been cut off. */
static const graph_node_t *find_softmax(const graph_t *g, gradd_val_t weights, gradd_dtype_t as,
                                        const graph_readers_t *readers, bool *cut) {
    match_part_t part;
    gradd_val_t v = match_uncast(g, weights, as);
    *cut = match_part(g, v, &part) && part.start == 0 && part.step == 1 &&
           part.size == match_width(g, part.source) - 1;
    if (*cut &&
        !(match_uncast_read_once(g, part.source, as, readers) && is_only_output(g, v, readers)))
        return NULL;
    return match_made_by(g, match_uncast(g, *cut ? part.source : v, as), "Softmax");
}

/* x where v is its largest entry along the last axis: reduced, or taken from where it is. */
static gradd_val_t above_largest(const graph_t *g, gradd_val_t v, gradd_dtype_t as) {
    const graph_node_t *taken = match_made_by(g, v, "GatherElements");
    if (!taken) return match_under_reduction(g, v, "ReduceMax");
    const graph_node_t *at = match_made_by(g, taken->in[1], "ArgMax");
    const bool last =
        at && match_is_last_axis(g, taken->in[0], gradd_attr_int(taken->attrs, "axis", 0)) &&
        match_is_last_axis(g, at->in[0], gradd_attr_int(at->attrs, "axis", 0));
    return last && match_same_uncast(g, taken->in[0], at->in[0], as) ? taken->in[0] : GRADD_NONE;
}

/* x where v is x - max(x), which changes no probability, or a factor times that. */
static gradd_val_t peel_largest(const graph_t *g, gradd_val_t v, match_attention_t *f) {
    double factor = 1;
    gradd_val_t inner = match_uncast(g, v, f->dtype);
    for (int step = 0; step < MATCH_MAX_WALK && peel_factor(g, &inner, &factor); step++)
        inner = match_uncast(g, inner, f->dtype);
    const graph_node_t *n = match_made_by(g, inner, "Sub");
    const gradd_val_t x =
        n ? above_largest(g, match_uncast(g, n->in[1], f->dtype), f->dtype) : GRADD_NONE;
    if (x == GRADD_NONE || !match_same_uncast(g, x, n->in[0], f->dtype)) return v;
    f->outer *= factor;
    return n->in[0];
}

/* From scores with one more column, which is the same in all rows of a head, to scores. */
static bool take_sinks(const graph_t *g, gradd_val_t *v, match_attention_t *f) {
    const graph_node_t *n = match_made_by(g, match_uncast(g, *v, f->dtype), "Concat");
    if (!n || n->n_in != 2 ||
        !match_is_last_axis(g, n->out[0], gradd_attr_int(n->attrs, "axis", 0)))
        return false;
    gradd_val_t sinks = match_uncast(g, n->in[1], f->dtype);
    const int64_t heads = graph_type(g, sinks)->dims[1];
    const graph_node_t *all = match_made_by(g, sinks, "Expand");
    if (all) sinks = match_uncast(g, all->in[0], f->dtype);
    const gradd_type_t *t = graph_type(g, sinks);
    if (t->rank != 4 || t->dims[1] != heads || gradd_type_count(t) != heads) return false;
    f->sinks = sinks;
    *v = n->in[0];
    return true;
}

/* ---- from the last product ------------------------------------------------------------------- */

static bool is_true(const graph_t *g, gradd_val_t v) {
    const uint8_t *data = v == GRADD_NONE ? NULL : g->values[v]->data;
    return data && *data;
}

/* Dropout in training with a known ratio. */
static bool take_dropout(const graph_t *g, const graph_node_t *n, match_attention_t *f) {
    if (n->n_in < 3 || !is_true(g, n->in[2]) || !match_scalar(g, n->in[1], &f->dropout))
        return false;
    f->drop = (int32_t)(n - g->nodes);
    return f->dropout >= 0 && f->dropout <= 1;
}

/* Whether biases and sinks are of the type of the sums, or become it by widening. */
static bool has_fitting_terms(const graph_t *g, const match_attention_t *f) {
    const gradd_dtype_t wide = gradd_dtype_is_half(f->dtype) ? GRADD_DT_F32 : f->dtype;
    for (int i = 0; i <= f->n_bias; i++) {
        const gradd_val_t v = i < f->n_bias ? f->bias[i].value : f->sinks;
        if (v == GRADD_NONE) continue;
        const gradd_dtype_t dtype = graph_type(g, v)->dtype;
        if (dtype != wide && (!gradd_dtype_is_half(dtype) || wide != GRADD_DT_F32)) return false;
    }
    return true;
}

bool match_attention(const graph_t *g, const graph_node_t *n, const graph_readers_t *readers,
                     match_attention_t *out) {
    match_attention_t f = {
        .mask = GRADD_NONE, .sinks = GRADD_NONE, .scale = 1, .outer = 1, .drop = -1};
    if (strcmp(n->op->name, "MatMul")) return false;
    const gradd_type_t *y = graph_type(g, n->out[0]);
    gradd_val_t v = n->in[0];
    const graph_node_t *drop = match_made_by(g, match_uncast(g, v, y->dtype), "Dropout");
    const gradd_val_t weights = v;
    if (drop && !take_dropout(g, drop, &f)) return false;
    if (drop) v = drop->in[0];
    bool cut;
    const graph_node_t *soft = find_softmax(g, v, y->dtype, readers, &cut);
    if (!soft || y->rank != 4) return false;
    /* products that share their probabilities are put together afterwards (share_attention) */
    if (!match_uncast_read_by_products(g, weights, y->dtype, readers)) return false;
    if (drop && !match_uncast_read_once(g, v, y->dtype, readers)) return false;
    int64_t axis = gradd_attr_int(soft->attrs, "axis", -1);
    if (axis != -1 && axis != 3) return false;
    f.dtype = y->dtype;
    gradd_val_t scores = peel_largest(g, soft->in[0], &f);
    if (cut && f.outer != 1) return false; /* sinks have no factor */
    if (cut && !take_sinks(g, &scores, &f)) return false;
    if (!find_floored_scores(g, scores, &f) || f.outer <= 0) return false;
    if ((f.outer != 1 && f.softcap != 0) || !has_fitting_terms(g, &f)) return false;
    f.scale *= f.outer;
    f.v = match_unrepeated(g, as_type(g, n->in[1], y->dtype));
    *out = f;
    return true;
}
