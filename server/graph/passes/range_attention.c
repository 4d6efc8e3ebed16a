/* FusedAttention whose mask is an interval for each position -> the same with ranges in its place:
 *
 *   mask = known numbers (causal, a window)       [And]
 *          equal running counts of segments' starts
 *
 * as masks of packed sequences are. A mask has the square of the positions in elements; ranges have
 * three per position, and are known if there are no segments. What is hidden has to be far below
 * all scores. */
#include <math.h>
#include <string.h>

#include "kernels/describe/attention.h"
#include "server/graph/compile_time.h"
#include "server/graph/match/match.h"
#include "server/graph/match/match_intervals.h"

/* Positions, if queries and keys have the same; else 0. */
static int64_t positions_of(const graph_t *g, const graph_node_t *n) {
    const int64_t layout = gradd_attr_int(n->attrs, GRADD_ATTN_LAYOUT, 0);
    const int64_t q =
        graph_type(g, n->in[GRADD_ATTN_Q])->dims[layout & GRADD_ATTN_Q_TURNED ? 1 : 2];
    const int64_t k =
        graph_type(g, n->in[GRADD_ATTN_K])->dims[layout & GRADD_ATTN_K_TURNED ? 1 : 2];
    return q == k ? q : 0;
}

static bool may_be_ranges(const graph_t *g, const graph_node_t *n) {
    if (n->backward || strcmp(n->op->name, "FusedAttention")) return false;
    if (n->n_in <= GRADD_ATTN_MASK || n->in[GRADD_ATTN_MASK] == GRADD_NONE ||
        n->n_in > GRADD_ATTN_INPUTS)
        return false;
    if (gradd_attr_float(n->attrs, GRADD_ATTN_FILL, -INFINITY) > GRADD_ATTN_MASKED) return false;
    return positions_of(g, n) > 0 && positions_of(g, n) < INT32_MAX;
}

/* Ranges that are known: the intervals themselves, [1, 1, positions, 3]. */
static gradd_status_t known_ranges(graph_t *g, const match_intervals_t *s, gradd_val_t *out) {
    const gradd_type_t type = {
        GRADD_DT_I32, 4, {1, 1, s->positions, 3}
    };
    int32_t *at = arena_array(g->arena, (size_t)s->positions, 3 * sizeof at[0]);
    if (!at) return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    for (int64_t i = 0; i < s->positions; i++) {
        at[3 * i] = s->intervals[2 * i], at[3 * i + 1] = s->intervals[2 * i + 1];
        at[3 * i + 2] = GRADD_ATTN_SOLID;
    }
    return graph_constant(g, &type, at, out);
}

static gradd_status_t segment_ranges(graph_t *g, const graph_node_t *n, const match_intervals_t *s,
                                     gradd_val_t *out) {
    gradd_val_t in[2] = {s->segments, GRADD_NONE};
    GRADD_TRY(match_intervals_value(g, s, &in[1]));
    return match_emit(g, n, &(match_fused_t){.op = "SegmentRanges", .in = in, .n_in = 2}, out, 1);
}

static gradd_status_t find_ranges(graph_t *g, const graph_node_t *n, gradd_val_t *out) {
    match_intervals_t s;
    bool known;
    *out = GRADD_NONE;
    GRADD_TRY(match_intervals(g, n->in[GRADD_ATTN_MASK],
                              graph_type(g, n->in[GRADD_ATTN_Q])->dims[0], positions_of(g, n), &s,
                              &known));
    if (!known || s.keys != GRADD_NONE) return GRADD_OK;
    return s.segments == GRADD_NONE ? known_ranges(g, &s, out) : segment_ranges(g, n, &s, out);
}

static gradd_status_t replace(graph_t *g, int32_t id, gradd_val_t ranges) {
    graph_node_t *n = &g->nodes[id];
    gradd_val_t in[GRADD_ATTN_INPUTS];
    const gradd_attrs_t attrs = n->attrs;
    for (int i = 0; i < GRADD_ATTN_INPUTS; i++)
        in[i] = match_operand(n, i);
    in[GRADD_ATTN_MASK] = GRADD_NONE;
    in[GRADD_ATTN_RANGES] = ranges;
    return match_replace(
        g, n,
        &(match_fused_t){.op = "FusedAttention",
                         .in = in,
                         .n_in = n->n_in > GRADD_ATTN_RANGES ? n->n_in : GRADD_ATTN_RANGES + 1,
                         .attrs = attrs.v,
                         .n_attrs = attrs.n});
}

static gradd_status_t range_attention(graph_t *g) {
    gradd_val_t last = GRADD_NONE, ranges = GRADD_NONE; /* layers have the same mask */
    for (int32_t id = 0, n = g->n_nodes; id < n; id++) {
        GRADD_TRY(compile_time_spend(1));
        if (!may_be_ranges(g, &g->nodes[id])) continue;
        const graph_node_t node = g->nodes[id];
        if (node.in[GRADD_ATTN_MASK] != last) GRADD_TRY(find_ranges(g, &node, &ranges));
        last = node.in[GRADD_ATTN_MASK];
        if (ranges != GRADD_NONE) GRADD_TRY(replace(g, id, ranges));
    }
    return GRADD_OK;
}

const graph_pass_t graph_pass_range_attention = {
    "range_attention", 90, true, range_attention, {"FusedAttention"}};
