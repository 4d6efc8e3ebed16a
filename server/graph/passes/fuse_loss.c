/* Classification losses -> CrossEntropy, over logits and labels as the model and the user made
 * them:
 *
 *   SoftmaxCrossEntropyLoss(logits, labels)
 *   NegativeLogLikelihoodLoss(LogSoftmax(logits), labels)
 *   CrossEntropy(logits, labels), as the capture sends label smoothing
 *   each perhaps with weights of the classes
 *   [Div(sum of losses, number of items)]
 *
 * where logits pass through reshapes, a cast from a half to f32, or a transposition that puts the
 * classes second, and labels through reshapes. Next-token losses shift: labels are padded at the
 * end and cut at the start, or logits are cut at the end and labels at the start; then the operator
 * shifts, and nothing is copied. The operands are read where they lie. */
#include <string.h>

#include "kernels/describe/cross_entropy.h"
#include "kernels/rules/rules.h"
#include "server/graph/compile_time.h"
#include "server/graph/match/match.h"
#include "server/graph/match/match_mean.h"
#include "server/graph/readers.h"

typedef struct pattern_s {
    gradd_val_t logits, labels;
    gradd_val_t items, weights; /* GRADD_NONE = none */
    const char *reduction;
    bool ignores, shift, cut; /* cut: the last position of the logits was sliced off */
    int64_t ignore;
    double smoothing;
} pattern_t;

static int64_t last_dim(const graph_t *g, gradd_val_t v) {
    const gradd_type_t *t = graph_type(g, v);
    return t->rank ? t->dims[t->rank - 1] : 1;
}

/* ---- logits --------------------------------------------------------------------------------- */

/* The classes are moved from the last axis to axis 1. */
static bool moves_classes(const graph_node_t *n, int rank) {
    const gradd_attr_t *perm = gradd_attr_find(n->attrs, "perm");
    if (!perm || (int)perm->n != rank || perm->ints[0] != 0 || perm->ints[1] != rank - 1)
        return false;
    for (int i = 2; i < rank; i++)
        if (perm->ints[i] != i - 1) return false;
    return true;
}

/* One step upwards from the logits, or GRADD_NONE. */
static gradd_val_t above_logits(const graph_t *g, pattern_t *p) {
    const graph_node_t *n = match_producer(g, p->logits);
    if (!n || n->n_in < 1 || n->in[0] == GRADD_NONE) return GRADD_NONE;
    const gradd_type_t *in = graph_type(g, n->in[0]), *out = graph_type(g, p->logits);
    bool same = in->rank && last_dim(g, n->in[0]) == last_dim(g, p->logits);
    if (gradd_op_is_transparent(n->op) && same && in->dtype == out->dtype) return n->in[0];
    if (!strcmp(n->op->name, "Cast") && gradd_dtype_is_half(in->dtype) &&
        out->dtype == GRADD_DT_F32)
        return n->in[0];
    if (!p->cut && match_cuts_one(g, n, out->rank - 2, false)) {
        p->cut = true;
        return n->in[0];
    }
    return GRADD_NONE;
}

/* ---- labels --------------------------------------------------------------------------------- */

/* Whether n appends one entry, the ignored label, to the last axis. */
static bool appends_ignored(const graph_t *g, const graph_node_t *n, const pattern_t *p) {
    if (!n || strcmp(n->op->name, "Pad") || n->n_in < 2 || !p->ignores) return false;
    const gradd_type_t *in = graph_type(g, n->in[0]), *out = graph_type(g, n->out[0]);
    const graph_value_t *pads = g->values[n->in[1]];
    if (strcmp(gradd_attr_string(n->attrs, "mode", "constant"), "constant")) return false;
    if (!pads->data || pads->type.dtype != GRADD_DT_I64 || in->rank < 1) return false;
    for (int i = 0; i < in->rank; i++)
        if (out->dims[i] - in->dims[i] != (i == in->rank - 1)) return false;
    int64_t n_pads = gradd_type_count(&pads->type); /* starts, then ends; the last is an end */
    if (((const int64_t *)pads->data)[n_pads - 1] != 1) return false;
    if (n->n_in < 3 || n->in[2] == GRADD_NONE) return p->ignore == 0;
    const graph_value_t *fill = g->values[n->in[2]];
    if (!fill->data || gradd_type_count(&fill->type) != 1) return false;
    if (fill->type.dtype == GRADD_DT_I64) return *(const int64_t *)fill->data == p->ignore;
    return fill->type.dtype == GRADD_DT_I32 && *(const int32_t *)fill->data == p->ignore;
}

/* Labels that were moved by one: finds the user's, which have a position for every row. */
static void find_shift(const graph_t *g, pattern_t *p) {
    gradd_val_t moved = match_through_views(g, p->labels);
    const graph_node_t *n = match_producer(g, moved);
    if (!n || !match_cuts_one(g, n, graph_type(g, moved)->rank - 1, true)) return;
    gradd_val_t labels = n->in[0];
    if (!p->cut) {
        n = match_producer(g, labels);
        if (!appends_ignored(g, n, p)) return;
        labels = n->in[0];
    }
    const gradd_type_t *x = graph_type(g, p->logits);
    if (x->rank < 2 || last_dim(g, labels) != x->dims[x->rank - 2]) return;
    p->labels = labels;
    p->shift = true;
}

/* ---- from the loss's operands to the model's ------------------------------------------------- */

static void read_attrs(const graph_node_t *n, pattern_t *p) {
    p->reduction = gradd_attr_string(n->attrs, GRADD_CE_REDUCTION, "mean");
    p->ignores = gradd_attr_find(n->attrs, GRADD_CE_IGNORE_INDEX) != NULL;
    p->ignore = gradd_attr_int(n->attrs, GRADD_CE_IGNORE_INDEX, 0);
}

/* From scores [N, V] or [N, V, D...] to logits [..., V]; false if they are not made of such. */
static bool find_classes(const graph_t *g, pattern_t *p) {
    const gradd_type_t *x = graph_type(g, p->logits);
    if (x->rank <= 2) return x->rank == 2;
    const graph_node_t *n = match_made_by(g, p->logits, "Transpose");
    if (!n || !moves_classes(n, x->rank)) return false;
    p->logits = n->in[0];
    return true;
}

/* Walks up from logits [..., V] and labels. */
static void find_sources(const graph_t *g, pattern_t *p) {
    bool whole = strcmp(p->reduction, "none") != 0;
    pattern_t best = *p;
    gradd_val_t next = p->logits;
    for (int step = 0; step < MATCH_MAX_WALK && next != GRADD_NONE; step++) {
        p->logits = next;
        pattern_t shifted = *p;
        if (whole) find_shift(g, &shifted);
        if (shifted.shift)
            best = shifted;
        else if (!best.shift && !p->cut)
            best = *p;
        next = above_logits(g, p);
    }
    *p = best;
    if (whole && !p->shift) p->labels = match_through_views(g, p->labels);
}

static gradd_status_t replace(graph_t *g, graph_node_t *n, const pattern_t *p) {
    gradd_val_t in[GRADD_CE_INPUTS] = {[GRADD_CE_LOGITS] = p->logits,
                                       [GRADD_CE_LABELS] = p->labels,
                                       [GRADD_CE_ITEMS] = p->items,
                                       [GRADD_CE_WEIGHTS] = p->weights};
    gradd_attr_t attrs[GRADD_CE_ATTRS] = {gradd_make_string(GRADD_CE_REDUCTION, p->reduction)};
    int n_attrs = 1;
    if (p->ignores) attrs[n_attrs++] = gradd_make_int(GRADD_CE_IGNORE_INDEX, p->ignore);
    if (p->shift) attrs[n_attrs++] = gradd_make_int(GRADD_CE_SHIFT, 1);
    if (p->smoothing != 0) attrs[n_attrs++] = gradd_make_float(GRADD_CE_SMOOTHING, p->smoothing);
    return match_replace(g, n,
                         &(match_fused_t){.op = "CrossEntropy",
                                          .in = in,
                                          .n_in = p->weights != GRADD_NONE ? GRADD_CE_WEIGHTS + 1
                                                  : p->items != GRADD_NONE ? GRADD_CE_ITEMS + 1
                                                                           : GRADD_CE_LABELS + 1,
                                          .attrs = attrs,
                                          .n_attrs = n_attrs});
}

static gradd_status_t fuse_scores(graph_t *g, graph_node_t *n, pattern_t *p) {
    if (!find_classes(g, p)) return GRADD_OK;
    read_attrs(n, p);
    find_sources(g, p);
    return replace(g, n, p);
}

/* LogSoftmax over the axis that holds the classes. */
static const graph_node_t *log_probabilities(const graph_t *g, gradd_val_t v) {
    const graph_node_t *n = match_made_by(g, v, "LogSoftmax");
    if (!n) return NULL;
    int rank = graph_type(g, v)->rank;
    int64_t axis = gradd_attr_int(n->attrs, "axis", -1);
    return rank >= 2 && (axis < 0 ? axis + rank : axis) == 1 ? n : NULL;
}

static gradd_status_t fuse_softmax_loss(graph_t *g, graph_node_t *n, const int32_t *readers) {
    pattern_t p = {.logits = n->in[0],
                   .labels = n->in[1],
                   .items = GRADD_NONE,
                   .weights = match_operand(n, 2)};
    if (n->n_out > 1 && n->out[1] != GRADD_NONE && readers[n->out[1]]) return GRADD_OK;
    return fuse_scores(g, n, &p);
}

/* One that the model has already; its classes are the last axis. */
static gradd_status_t fuse_whole(graph_t *g, graph_node_t *n) {
    pattern_t p = {.logits = n->in[GRADD_CE_LOGITS],
                   .labels = n->in[GRADD_CE_LABELS],
                   .items = GRADD_NONE,
                   .weights = match_operand(n, GRADD_CE_WEIGHTS)};
    if (match_operand(n, GRADD_CE_ITEMS) != GRADD_NONE || n->n_out > 1 ||
        gradd_attr_int(n->attrs, GRADD_CE_SHIFT, 0))
        return GRADD_OK;
    read_attrs(n, &p);
    p.smoothing = gradd_attr_float(n->attrs, GRADD_CE_SMOOTHING, 0);
    find_sources(g, &p);
    return replace(g, n, &p);
}

static gradd_status_t fuse_likelihood(graph_t *g, graph_node_t *n, const int32_t *readers) {
    const graph_node_t *logs = log_probabilities(g, n->in[0]);
    if (!logs || readers[n->in[0]] != 1) return GRADD_OK;
    pattern_t p = {.logits = logs->in[0],
                   .labels = n->in[1],
                   .items = GRADD_NONE,
                   .weights = match_operand(n, 2)};
    return fuse_scores(g, n, &p);
}

/* ---- division by a number of items ----------------------------------------------------------- */

/* A number without a gradient: an integer, perhaps cast, or a known one. */
static gradd_val_t count_of(const graph_t *g, gradd_val_t v) {
    double known;
    const graph_node_t *n = match_made_by(g, v, "Cast");
    gradd_val_t source = n ? n->in[0] : v;
    gradd_dtype_t dtype = graph_type(g, source)->dtype;
    if (gradd_type_count(graph_type(g, source)) != 1) return GRADD_NONE;
    if (dtype == GRADD_DT_I64 || dtype == GRADD_DT_I32) return source;
    return match_scalar(g, v, &known) ? v : GRADD_NONE;
}

static gradd_status_t fuse_division(graph_t *g, graph_node_t *n, const int32_t *readers) {
    const graph_node_t *loss = match_made_by(g, n->in[0], "CrossEntropy");
    if (!loss || readers[n->in[0]] != 1 || match_operand(loss, GRADD_CE_ITEMS) != GRADD_NONE)
        return GRADD_OK;
    pattern_t p = {.logits = loss->in[GRADD_CE_LOGITS],
                   .labels = loss->in[GRADD_CE_LABELS],
                   .items = count_of(g, n->in[1]),
                   .weights = match_operand(loss, GRADD_CE_WEIGHTS)};
    read_attrs(loss, &p);
    p.shift = gradd_attr_int(loss->attrs, GRADD_CE_SHIFT, 0);
    p.smoothing = gradd_attr_float(loss->attrs, GRADD_CE_SMOOTHING, 0);
    if (p.items == GRADD_NONE || strcmp(p.reduction, "sum")) return GRADD_OK;
    return replace(g, n, &p);
}

static gradd_status_t fuse_loss(graph_t *g) {
    int32_t *readers;
    GRADD_TRY(graph_count_readers(g, &readers));
    for (int i = 0; i < g->n_nodes; i++) {
        graph_node_t *n = &g->nodes[i];
        if (n->backward) continue;
        GRADD_TRY(compile_time_spend(1));
        if (!strcmp(n->op->name, "SoftmaxCrossEntropyLoss"))
            GRADD_TRY(fuse_softmax_loss(g, n, readers));
        else if (!strcmp(n->op->name, "NegativeLogLikelihoodLoss"))
            GRADD_TRY(fuse_likelihood(g, n, readers));
        else if (!strcmp(n->op->name, "CrossEntropy"))
            GRADD_TRY(fuse_whole(g, n));
    }
    for (int i = 0; i < g->n_nodes; i++)
        if (!g->nodes[i].backward && !strcmp(g->nodes[i].op->name, "Div"))
            GRADD_TRY(fuse_division(g, &g->nodes[i], readers));
    return GRADD_OK;
}

const graph_pass_t graph_pass_fuse_loss = {"fuse_loss", 80, true, fuse_loss, {"CrossEntropy"}};
