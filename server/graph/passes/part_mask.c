/* FusedAttention whose bias holds its mask -> mask and bias apart:
 *
 *   bias = Where(mask, b, fill), what is minus infinite of it being masked -> mask, b
 *
 * as scaled_dot_product_attention is called with biases of relative positions. b has the size of
 * one sequence, where bias has that of the batch; a b of zeros is none. No number of b may come
 * near the fill, which is far below all scores. */
#include <math.h>
#include <string.h>

#include "kernels/describe/attention.h"
#include "kernels/rules/rules.h"
#include "server/graph/compile_time.h"
#include "server/graph/match/match.h"
#include "server/graph/match/match_modest.h"

enum { MOST_IN = GRADD_ATTN_INPUTS, MOST_ATTRS = GRADD_ATTN_ATTRS + 1 };

typedef struct mask_parts_s {
    gradd_val_t mask, bias; /* GRADD_NONE = no bias is left */
    double fill;
    bool narrow; /* the bias is a half, which attention takes as f32 */
} mask_parts_t;

/* The value from which v has been cast, a half to f32, or v. */
static gradd_val_t before_cast(const graph_t *g, gradd_val_t v) {
    const graph_node_t *n = match_made_by(g, v, "Cast");
    const bool widens = n && gradd_dtype_is_half(graph_type(g, n->in[0])->dtype) &&
                        graph_type(g, v)->dtype == GRADD_DT_F32;
    return widens ? n->in[0] : v;
}

/* mask = Not(Equal(bias, -inf)), perhaps before it was cast */
static bool shows_finite(const graph_t *g, gradd_val_t mask, gradd_val_t bias) {
    const graph_node_t *n = match_made_by(g, mask, "Not");
    double number;
    gradd_val_t other;
    n = n ? match_made_by(g, n->in[0], "Equal") : NULL;
    return n && match_with_scalar(g, n, &number, &other) && number == -INFINITY &&
           before_cast(g, other) == bias;
}

static bool take_apart(const graph_t *g, const graph_node_t *n, mask_parts_t *out) {
    if (n->backward || strcmp(n->op->name, "FusedAttention") || n->n_in <= GRADD_ATTN_BIAS)
        return false;
    if (n->in[GRADD_ATTN_MASK] == GRADD_NONE || n->in[GRADD_ATTN_BIAS] == GRADD_NONE ||
        n->n_in > MOST_IN)
        return false;
    const gradd_type_t *k = graph_type(g, n->in[GRADD_ATTN_K]);
    const int64_t layout = gradd_attr_int(n->attrs, GRADD_ATTN_LAYOUT, 0);
    const gradd_val_t bias = before_cast(g, n->in[GRADD_ATTN_BIAS]);
    const graph_node_t *choice = match_made_by(g, bias, "Where");
    if (!choice || !shows_finite(g, n->in[GRADD_ATTN_MASK], bias)) return false;
    if (!match_scalar(g, choice->in[2], &out->fill) || !isfinite(out->fill) ||
        out->fill > GRADD_ATTN_MASKED)
        return false;
    out->mask = choice->in[0], out->bias = choice->in[1];
    out->narrow = bias != n->in[GRADD_ATTN_BIAS];
    const gradd_type_t *mask = graph_type(g, out->mask);
    if (!mask->rank || mask->dims[mask->rank - 1] != k->dims[layout & GRADD_ATTN_K_TURNED ? 1 : 2])
        return false;
    if (!match_is_modest(g, out->bias)) return false;
    if (match_is_zero(g, out->bias)) out->bias = GRADD_NONE;
    return true;
}

static gradd_status_t replace(graph_t *g, int32_t id, const mask_parts_t *p) {
    const graph_node_t n = g->nodes[id]; /* a copy: the list moves */
    gradd_val_t in[MOST_IN];
    gradd_attr_t attrs[MOST_ATTRS];
    int n_attrs = 0;
    memcpy(in, n.in, sizeof in[0] * (size_t)n.n_in);
    in[GRADD_ATTN_MASK] = p->mask, in[GRADD_ATTN_BIAS] = p->bias;
    const gradd_attr_t wide = gradd_make_int("to", GRADD_DT_F32);
    if (p->narrow && p->bias != GRADD_NONE)
        GRADD_TRY(match_emit(g, &n, &(match_fused_t){"Cast", &p->bias, 1, &wide, 1, NULL},
                             &in[GRADD_ATTN_BIAS], 1));
    if (n.n_in > GRADD_ATTN_RANGES)
        GRADD_TRY(match_emit(
            g, &n, &(match_fused_t){.op = "MaskRanges", .in = &in[GRADD_ATTN_MASK], .n_in = 1},
            &in[GRADD_ATTN_RANGES], 1));
    for (int i = 0; i < n.attrs.n && n_attrs + 2 < MOST_ATTRS; i++)
        if (strcmp(n.attrs.v[i].name, GRADD_ATTN_FILL) &&
            strcmp(n.attrs.v[i].name, GRADD_ATTN_HIDES) &&
            strcmp(n.attrs.v[i].name, GRADD_ATTN_ZERO))
            attrs[n_attrs++] = n.attrs.v[i];
    attrs[n_attrs++] = gradd_make_float(GRADD_ATTN_FILL, p->fill);
    attrs[n_attrs++] = gradd_make_int(GRADD_ATTN_HIDES, GRADD_ATTN_HIDES_BIAS);
    return match_replace(g, &g->nodes[id],
                         &(match_fused_t){.op = "FusedAttention",
                                          .in = in,
                                          .n_in = n.n_in,
                                          .attrs = attrs,
                                          .n_attrs = n_attrs,
                                          .random = &n});
}

static gradd_status_t part_mask(graph_t *g) {
    mask_parts_t parts;
    for (int32_t id = 0, n = g->n_nodes; id < n; id++) {
        GRADD_TRY(compile_time_spend(1));
        if (take_apart(g, &g->nodes[id], &parts)) GRADD_TRY(replace(g, id, &parts));
    }
    return GRADD_OK;
}

const graph_pass_t graph_pass_part_mask = {"part_mask", 42, true, part_mask, {"FusedAttention"}};
