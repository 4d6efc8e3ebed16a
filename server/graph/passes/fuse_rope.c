/* Rotary position embedding as models write it -> Rope:
 *
 *   Add(Mul(x, cos), Mul(quarter(x), sin))        operands of Add and Mul in either order
 *
 * where quarter(x) is Concat(Neg(second half), first half), or, interleaved, the pairs (-odd, even)
 * put together by Concat on a new last axis and Reshape. Halves come from Slice or Split. Then a
 * tensor of which only the first elements are turned,
 *
 *   Concat(Rope(x[..., :R]), x[..., R:])
 *
 * becomes one Rope of x, and casts around a Rope that computes in f32 go away, because Rope does
 * that itself. The operator needs the tables and nothing else for backward, the pattern keeps x and
 * its quarter turn. */
#include <string.h>

#include "kernels/rules.h"
#include "server/graph/match_cast.h"
#include "server/graph/match_part.h"

typedef struct found_s {
    gradd_val_t x, cos, sin;
    bool interleaved;
} found_t;

static bool same_type(const graph_t *g, gradd_val_t a, gradd_val_t b) {
    return gradd_type_equal(&g->values[a]->type, &g->values[b]->type);
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

/* Concat(Neg(x2), x1) */
static bool is_quarter_of_halves(const graph_t *g, gradd_val_t v, gradd_val_t *out_x) {
    match_part_t low, high;
    gradd_val_t negated;
    const graph_node_t *n = joined_pair(g, v);
    if (!n || !is_negated(g, n->in[0], &negated)) return false;
    if (!match_part(g, negated, &high) || !match_part(g, n->in[1], &low)) return false;
    int64_t half = match_width(g, v) / 2;
    *out_x = low.source;
    return low.source == high.source && same_type(g, v, low.source) && low.step == 1 &&
           high.step == 1 && low.start == 0 && high.start == half && low.size == half &&
           high.size == half;
}

/* Operand of an Unsqueeze that adds a last axis. */
static bool is_column(const graph_t *g, gradd_val_t v, gradd_val_t *out) {
    const graph_node_t *n = match_made_by(g, v, "Unsqueeze");
    if (!n || match_width(g, v) != 1) return false;
    const gradd_type_t *to = &g->values[v]->type, *from = &g->values[n->in[0]]->type;
    if (to->rank != from->rank + 1) return false;
    for (int i = 0; i < from->rank; i++)
        if (to->dims[i] != from->dims[i]) return false;
    *out = n->in[0];
    return true;
}

/* Every second element of a tensor, from `start` on. */
static bool is_every_second(const graph_t *g, gradd_val_t v, int64_t start, gradd_val_t *out) {
    match_part_t part;
    if (!match_part(g, v, &part)) return false;
    int64_t width = match_width(g, part.source);
    *out = part.source;
    return width % 2 == 0 && part.start == start && part.size == width / 2 &&
           (part.step == 2 || part.size == 1);
}

/* Reshape(Concat(Unsqueeze(Neg(odd)), Unsqueeze(even))) */
static bool is_quarter_of_pairs(const graph_t *g, gradd_val_t v, gradd_val_t *out_x) {
    gradd_val_t odd, even, x_odd;
    const graph_node_t *n = match_made_by(g, v, "Reshape");
    if (!n || !(n = joined_pair(g, n->in[0])) || match_width(g, n->out[0]) != 2) return false;
    if (!is_column(g, n->in[1], &even)) return false;
    if (is_column(g, n->in[0], &odd) ? !is_negated(g, odd, &odd)
                                     : !is_negated(g, n->in[0], &odd) || !is_column(g, odd, &odd))
        return false;
    return is_every_second(g, odd, 1, &x_odd) && is_every_second(g, even, 0, out_x) &&
           x_odd == *out_x && same_type(g, v, *out_x);
}

/* Whether v is quarter(x) * sin; casts may stand behind the quarter turn. */
static bool is_sine_term(const graph_t *g, gradd_val_t v, found_t *out) {
    const graph_node_t *n = match_made_by(g, v, "Mul");
    for (int k = 0; n && k < 2; k++) {
        gradd_val_t turned = match_uncast(g, n->in[k]);
        out->sin = n->in[1 - k];
        out->interleaved = false;
        if (is_quarter_of_halves(g, turned, &out->x)) return true;
        out->interleaved = true;
        if (is_quarter_of_pairs(g, turned, &out->x)) return true;
    }
    return false;
}

static bool is_rope(const graph_t *g, const graph_node_t *n, found_t *out) {
    for (int k = 0; k < 2; k++) {
        if (!is_sine_term(g, n->in[k], out)) continue;
        const graph_node_t *m = match_made_by(g, n->in[1 - k], "Mul");
        for (int j = 0; m && j < 2; j++) {
            out->cos = m->in[1 - j];
            if (!match_same_uncast(g, m->in[j], out->x)) continue;
            out->x = match_of_dtype(g, m->in[j], g->values[n->out[0]]->type.dtype);
            return out->x != GRADD_NONE;
        }
    }
    return false;
}

static gradd_status_t replace(graph_t *g, graph_node_t *n, const found_t *f) {
    gradd_attr_t attrs[2] = {gradd_make_int("interleaved", f->interleaved),
                             gradd_make_int("transposed", 0)};
    gradd_val_t in[3] = {f->x, f->cos, f->sin};
    match_fused_t fused = {"Rope", in, 3, attrs, 2, NULL};
    return match_replace(g, n, &fused);
}

/* Reads a Rope node back. */
static const graph_node_t *made_by_rope(const graph_t *g, gradd_val_t v, found_t *out) {
    const graph_node_t *n = match_made_by(g, v, "Rope");
    if (n)
        *out = (found_t){n->in[0], n->in[1], n->in[2],
                         gradd_attr_int(n->attrs, "interleaved", 0) != 0};
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

/* Cast(Rope(Cast(x))) with x and the result in bf16 */
static bool is_widened(const graph_t *g, const graph_node_t *n, found_t *out) {
    if (g->values[n->out[0]]->type.dtype != GRADD_DT_BF16 || !made_by_rope(g, n->in[0], out))
        return false;
    out->x = match_of_dtype(g, out->x, GRADD_DT_BF16);
    return out->x != GRADD_NONE;
}

static gradd_status_t fuse_rope(graph_t *g) {
    static const struct {
        const char *op;
        bool (*matches)(const graph_t *g, const graph_node_t *n, found_t *out);
    } forms[] = {
        {"Add",    is_rope   },
        {"Concat", is_partial},
        {"Cast",   is_widened}
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

const graph_pass_t graph_pass_fuse_rope = {"fuse_rope", 30, true, fuse_rope};
