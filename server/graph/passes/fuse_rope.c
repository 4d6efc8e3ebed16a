/* Rotary position embedding as models write it -> Rope:
 *
 *   Add(Mul(x, cos), Mul(quarter(x), sin))        operands of Add and Mul in either order
 *
 * where quarter(x) is Concat(Neg(second half), first half), or, interleaved, the pairs (-odd, even)
 * put together by Concat on a new last axis and Reshape; the other sign, Concat(second half,
 * Neg(first half)), turns the other way. Or, with one column of the tables for each pair (a, b),
 *
 *   Sub(Mul(a, cos), Mul(b, sin)) and Add(Mul(b, cos), Mul(a, sin))
 *
 * put together in halves or in pairs; a and b are halves or every second element of x, and from
 * pairs to halves it becomes RopeApart. Halves come from Slice or Split, elements of pairs also
 * from x as [..., R / 2, 2]. Then a tensor of which only the first elements are turned,
 *
 *   Concat(Rope(x[..., :R]), x[..., R:])
 *
 * becomes one Rope of x, and casts around a Rope that computes in f32 go away, because Rope does
 * that itself. The operator needs the tables and nothing else for backward, the pattern keeps x and
 * its quarter turn. */
#include <string.h>

#include "kernels/describe/rope.h"
#include "kernels/rules/rules.h"
#include "server/graph/match/match_cast.h"
#include "server/graph/match/match_part.h"

typedef struct found_s {
    gradd_val_t x, cos, sin;
    bool interleaved, inverse, shared, apart;
} found_t;

static bool same_type(const graph_t *g, gradd_val_t a, gradd_val_t b) {
    return gradd_type_equal(graph_type(g, a), graph_type(g, b));
}

/* Whether v is Neg(.). */
static bool is_negated(const graph_t *g, gradd_val_t v, gradd_val_t *out) {
    const graph_node_t *n = match_made_by(g, v, "Neg");
    if (n) *out = n->in[0];
    return n;
}

/* The two operands of a Concat along the last axis. */
static const graph_node_t *joined_pair(const graph_t *g, gradd_val_t v) {
    const graph_node_t *n = match_made_by(g, v, "Concat");
    if (!n || n->n_in != 2) return NULL;
    return match_is_last_axis(g, v, gradd_attr_int(n->attrs, "axis", 0)) ? n : NULL;
}

/* Whether a and b are the halves of a tensor. */
static bool is_halves(const graph_t *g, gradd_val_t a, gradd_val_t b, gradd_val_t *out_x) {
    match_part_t low, high;
    if (!match_part(g, a, &low) || !match_part(g, b, &high) || low.source != high.source)
        return false;
    int64_t half = match_width(g, low.source) / 2;
    *out_x = low.source;
    return half * 2 == match_width(g, low.source) && (low.step == 1 || half == 1) &&
           (high.step == 1 || half == 1) && low.start == 0 && high.start == half &&
           low.size == half && high.size == half;
}

/* Concat(Neg(x2), x1), or, inverse, Concat(x2, Neg(x1)) */
static bool is_quarter_of_halves(const graph_t *g, gradd_val_t v, found_t *out) {
    gradd_val_t first, second;
    const graph_node_t *n = joined_pair(g, v);
    if (!n) return false;
    out->inverse = is_negated(g, n->in[1], &first);
    second = n->in[0];
    if (!out->inverse) {
        first = n->in[1];
        if (!is_negated(g, n->in[0], &second)) return false;
    }
    return is_halves(g, first, second, &out->x) && same_type(g, v, out->x);
}

/* Operand of an Unsqueeze that adds a last axis. */
static bool is_column(const graph_t *g, gradd_val_t v, gradd_val_t *out) {
    const graph_node_t *n = match_made_by(g, v, "Unsqueeze");
    if (!n || match_width(g, v) != 1) return false;
    const gradd_type_t *to = graph_type(g, v), *from = graph_type(g, n->in[0]);
    if (to->rank != from->rank + 1) return false;
    for (int i = 0; i < from->rank; i++)
        if (to->dims[i] != from->dims[i]) return false;
    *out = n->in[0];
    return true;
}

/* x as [..., R / 2, 2], and one of the two. */
static bool is_member(const graph_t *g, gradd_val_t v, int64_t which, gradd_val_t *out) {
    match_part_t part;
    gradd_val_t pairs;
    const graph_node_t *n = match_made_by(g, v, "Gather");
    if (n) {
        const graph_value_t *at = g->values[n->in[1]];
        if (!match_is_last_axis(g, n->in[0], gradd_attr_int(n->attrs, "axis", 0)) || !at->data ||
            at->type.rank != 0 || at->type.dtype != GRADD_DT_I64)
            return false;
        int64_t index = *(const int64_t *)at->data;
        if (index != which && index != which - 2) return false;
        pairs = n->in[0];
    } else {
        n = match_made_by(g, v, "Squeeze");
        if (!n) n = match_made_by(g, v, "Reshape");
        if (!n || !match_part(g, n->in[0], &part)) return false;
        if (part.start != which || part.size != 1) return false;
        pairs = part.source;
    }
    if (match_width(g, pairs) != 2 || !(n = match_made_by(g, pairs, "Reshape"))) return false;
    *out = n->in[0];
    const gradd_type_t *x = graph_type(g, *out), *to = graph_type(g, pairs);
    const gradd_type_t *own = graph_type(g, v);
    if (to->rank != x->rank + 1 || own->rank != x->rank) return false;
    for (int i = 0; i < x->rank; i++)
        if (to->dims[i] != own->dims[i] ||
            x->dims[i] != (i == x->rank - 1 ? 2 * own->dims[i] : own->dims[i]))
            return false;
    return true;
}

/* Every second element of a tensor, from `start` on. */
static bool is_every_second(const graph_t *g, gradd_val_t v, int64_t start, gradd_val_t *out) {
    match_part_t part;
    if (is_member(g, v, start, out)) return true;
    if (!match_part(g, v, &part)) return false;
    int64_t width = match_width(g, part.source);
    *out = part.source;
    return width % 2 == 0 && part.start == start && part.size == width / 2 &&
           (part.step == 2 || part.size == 1);
}

/* Whether a and b are the elements of the pairs of a tensor. */
static bool is_pairs(const graph_t *g, gradd_val_t a, gradd_val_t b, gradd_val_t *out_x) {
    gradd_val_t other;
    return is_every_second(g, a, 0, out_x) && is_every_second(g, b, 1, &other) && other == *out_x;
}

/* Reshape(Concat(Unsqueeze(a), Unsqueeze(b))) with a new last axis: what stands in pairs in v. */
static bool is_woven(const graph_t *g, gradd_val_t v, gradd_val_t *out_a, gradd_val_t *out_b) {
    const graph_node_t *n = match_made_by(g, v, "Reshape");
    if (!n || !(n = joined_pair(g, n->in[0])) || match_width(g, n->out[0]) != 2) return false;
    *out_a = n->in[0], *out_b = n->in[1];
    const gradd_type_t *pairs = graph_type(g, n->out[0]), *to = graph_type(g, v);
    if (to->rank != pairs->rank - 1) return false;
    for (int i = 0; i < to->rank; i++)
        if (to->dims[i] != pairs->dims[i] * (i == to->rank - 1 ? 2 : 1)) return false;
    return true;
}

/* Reshape(Concat(Unsqueeze(Neg(odd)), Unsqueeze(even))), or Neg behind Unsqueeze */
static bool is_quarter_of_pairs(const graph_t *g, gradd_val_t v, found_t *out) {
    gradd_val_t odd, even;
    out->inverse = false;
    if (!is_woven(g, v, &odd, &even) || !is_column(g, even, &even)) return false;
    if (is_column(g, odd, &odd) ? !is_negated(g, odd, &odd)
                                : !is_negated(g, odd, &odd) || !is_column(g, odd, &odd))
        return false;
    return is_pairs(g, even, odd, &out->x) && same_type(g, v, out->x);
}

/* Whether v is quarter(x) * sin; casts may stand behind the quarter turn. */
static bool is_sine_term(const graph_t *g, gradd_val_t v, gradd_dtype_t as, found_t *out) {
    const graph_node_t *n = match_made_by(g, v, "Mul");
    for (int k = 0; n && k < 2; k++) {
        gradd_val_t turned = match_uncast(g, n->in[k], as);
        out->sin = n->in[1 - k];
        out->interleaved = false;
        if (is_quarter_of_halves(g, turned, out)) return true;
        out->interleaved = true;
        if (is_quarter_of_pairs(g, turned, out)) return true;
    }
    return false;
}

static bool is_rope(const graph_t *g, const graph_node_t *n, found_t *out) {
    const gradd_dtype_t as = graph_type(g, n->out[0])->dtype;
    *out = (found_t){0};
    for (int k = 0; k < 2; k++) {
        if (!is_sine_term(g, n->in[k], as, out)) continue;
        const graph_node_t *m = match_made_by(g, n->in[1 - k], "Mul");
        for (int j = 0; m && j < 2; j++) {
            out->cos = m->in[1 - j];
            if (!match_same_uncast(g, m->in[j], out->x, as)) continue;
            out->x = match_of_dtype(g, m->in[j], as);
            return out->x != GRADD_NONE;
        }
    }
    return false;
}

/* Mul(x, t) and Mul(y, t) with the same t; x and y are given. */
static bool has_factors(const graph_t *g, gradd_val_t v, gradd_val_t x, gradd_val_t t) {
    const graph_node_t *n = match_made_by(g, v, "Mul");
    return n && ((n->in[0] == x && n->in[1] == t) || (n->in[0] == t && n->in[1] == x));
}

/* Sub(Mul(a, cos), Mul(b, sin)) and Add(Mul(b, cos), Mul(a, sin)), sum in either order; inverse is
 * Add and Sub. */
static bool is_turned(const graph_t *g, gradd_val_t first, gradd_val_t second, gradd_val_t *out_a,
                      gradd_val_t *out_b, found_t *out) {
    out->inverse = match_made_by(g, first, "Add");
    const graph_node_t *p = match_made_by(g, first, out->inverse ? "Add" : "Sub");
    const graph_node_t *q = match_made_by(g, second, out->inverse ? "Sub" : "Add");
    if (!p || !q) return false;
    for (int order = 0; order < 8; order++) {
        const bool swap_p = order & 1, swap_a = order & 2, swap_b = order & 4;
        if (swap_p && !out->inverse) continue;
        const graph_node_t *ac = match_made_by(g, p->in[swap_p], "Mul");
        const graph_node_t *bs = match_made_by(g, p->in[!swap_p], "Mul");
        if (!ac || !bs) return false;
        *out_a = ac->in[swap_a], out->cos = ac->in[!swap_a];
        *out_b = bs->in[swap_b], out->sin = bs->in[!swap_b];
        if (!same_type(g, *out_a, *out_b) || !same_type(g, *out_a, first)) continue;
        if (has_factors(g, q->in[0], *out_b, out->cos) &&
            has_factors(g, q->in[1], *out_a, out->sin))
            return true;
        if (!out->inverse && has_factors(g, q->in[1], *out_b, out->cos) &&
            has_factors(g, q->in[0], *out_a, out->sin))
            return true;
    }
    return false;
}

/* Concat or, in pairs, Reshape of the elements turned one by one, with shared tables. */
static bool is_rope_by_members(const graph_t *g, const graph_node_t *n, found_t *out) {
    gradd_val_t a, b, first, second;
    *out = (found_t){.shared = true};
    const graph_node_t *halves = joined_pair(g, n->out[0]);
    if (halves)
        first = halves->in[0], second = halves->in[1];
    else if (!is_woven(g, n->out[0], &first, &second) || !is_column(g, first, &first) ||
             !is_column(g, second, &second))
        return false;
    if (!is_turned(g, first, second, &a, &b, out)) return false;
    const int64_t half = match_width(g, a); /* a table of width 1 would be broadcast */
    if (match_width(g, out->cos) != half || match_width(g, out->sin) != half) return false;
    if (is_halves(g, a, b, &out->x)) return halves && same_type(g, out->x, n->out[0]);
    out->interleaved = !halves;
    out->apart = halves;
    return is_pairs(g, a, b, &out->x) && same_type(g, out->x, n->out[0]);
}

static gradd_status_t replace(graph_t *g, graph_node_t *n, const found_t *f) {
    gradd_attr_t attrs[GRADD_ROPE_ATTRS] = {gradd_make_int(GRADD_ROPE_TRANSPOSED, 0),
                                            gradd_make_int(GRADD_ROPE_INVERSE, f->inverse),
                                            gradd_make_int(GRADD_ROPE_INTERLEAVED, f->interleaved),
                                            gradd_make_int(GRADD_ROPE_SHARED, f->shared)};
    gradd_val_t in[GRADD_ROPE_INPUTS] = {f->x, f->cos, f->sin};
    match_fused_t fused = {f->apart ? "RopeApart" : "Rope",
                           in,
                           GRADD_ROPE_INPUTS,
                           attrs,
                           f->apart ? GRADD_ROPE_APART_ATTRS : GRADD_ROPE_ATTRS,
                           NULL};
    return match_replace(g, n, &fused);
}

/* Reads a Rope node back. */
static const graph_node_t *made_by_rope(const graph_t *g, gradd_val_t v, found_t *out) {
    const graph_node_t *n = match_made_by(g, v, "Rope");
    const bool apart = !n && (n = match_made_by(g, v, "RopeApart"));
    if (n)
        *out = (found_t){.x = n->in[GRADD_ROPE_X],
                         .cos = n->in[GRADD_ROPE_COS],
                         .sin = n->in[GRADD_ROPE_SIN],
                         .interleaved = gradd_attr_int(n->attrs, GRADD_ROPE_INTERLEAVED, 0),
                         .inverse = gradd_attr_int(n->attrs, GRADD_ROPE_INVERSE, 0),
                         .shared = gradd_attr_int(n->attrs, GRADD_ROPE_SHARED, 0),
                         .apart = apart};
    return n;
}

/* Concat(Rope(x[..., :R]), x[..., R:]) */
static bool is_partial(const graph_t *g, const graph_node_t *n, found_t *out) {
    match_part_t turned, rest;
    if (!joined_pair(g, n->out[0]) || !made_by_rope(g, n->in[0], out)) return false;
    if (!match_part(g, out->x, &turned) || !match_part(g, n->in[1], &rest)) return false;
    out->x = turned.source;
    return turned.source == rest.source && turned.start == 0 && rest.start == turned.size &&
           (turned.step == 1 || turned.size == 1) && (rest.step == 1 || rest.size == 1) &&
           turned.size + rest.size == match_width(g, turned.source);
}

/* Cast(Rope(Cast(x))) with x and the result in one half */
static bool is_widened(const graph_t *g, const graph_node_t *n, found_t *out) {
    const gradd_dtype_t half = graph_type(g, n->out[0])->dtype;
    if (!gradd_dtype_is_half(half) || !made_by_rope(g, n->in[0], out)) return false;
    out->x = match_of_dtype(g, out->x, half);
    return out->x != GRADD_NONE;
}

static gradd_status_t fuse_rope(graph_t *g) {
    static const struct {
        const char *op;
        bool (*matches)(const graph_t *g, const graph_node_t *n, found_t *out);
    } forms[] = {
        {"Add",     is_rope           },
        {"Concat",  is_rope_by_members},
        {"Reshape", is_rope_by_members},
        {"Concat",  is_partial        },
        {"Cast",    is_widened        }
    };
    for (size_t k = 0; k < sizeof forms / sizeof forms[0]; k++)
        for (int i = 0; i < g->n_nodes; i++) {
            graph_node_t *n = &g->nodes[i];
            found_t f;
            if (n->backward || strcmp(n->op->name, forms[k].op)) continue;
            if (forms[k].matches(g, n, &f)) GRADD_TRY(replace(g, n, &f));
        }
    return GRADD_OK;
}

const graph_pass_t graph_pass_fuse_rope = {
    "fuse_rope", 30, true, fuse_rope, {"Rope", "RopeApart"}
};
