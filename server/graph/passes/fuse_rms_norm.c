/* RMS normalisation as models write it -> RMSNormalization:
 *
 *   Mul(w, Mul(x, Reciprocal(Sqrt(Add(ReduceMean(Pow(x, 2), -1), eps)))))
 *
 * with Mul(x, x) for the square, Div(1, .) for the reciprocal or Div(x, Sqrt(.)) for the product,
 * Pow(., 0.5) for the root, Pow(., -0.5) for both, the weight on x, and the operands of products in
 * either order; casts between a half and f32 may stand anywhere if the result is in it. w is any
 * vector over the last axis (Gemma adds 1 to its weight first); without one it is a vector of ones.
 * The operator keeps one number per row for backward, the pattern five tensors of the size of x. */
#include <string.h>

#include "kernels/describe/norm.h"
#include "kernels/rules/rules.h"
#include "server/graph/compile_time.h"
#include "server/graph/match/match_cast.h"
#include "server/graph/match/match_mean.h"

typedef struct rms_s {
    gradd_dtype_t as; /* that the operator would have, see match_cast.h */
    double eps;       /* that was found */
} rms_t;

/* Base of v = Pow(base, power) with that very power, or GRADD_NONE. */
static gradd_val_t under_power(const graph_t *g, gradd_val_t v, double power) {
    double known;
    const graph_node_t *n = match_made_by(g, v, "Pow");
    return n && match_scalar(g, n->in[1], &known) && known == power ? n->in[0] : GRADD_NONE;
}

/* The value of v before the mean over the last axis was subtracted, maybe more than once and maybe
 * without a gradient: in a variance neither makes a difference, for deviations add up to 0. */
static gradd_val_t under_deviations(const graph_t *g, gradd_val_t v, gradd_dtype_t as) {
    gradd_val_t found = GRADD_NONE;
    for (;;) {
        const graph_node_t *n = match_made_by(g, match_uncast(g, v, as), "Sub");
        if (!n) return found;
        gradd_val_t mean = match_uncast(g, n->in[1], as);
        const graph_node_t *stop = match_made_by(g, mean, "StopGradient");
        if (stop) mean = match_uncast(g, stop->in[0], as);
        const gradd_val_t x = match_mean_of_last(g, mean);
        if (x == GRADD_NONE || !match_same_uncast(g, x, n->in[0], as)) return found;
        found = v = n->in[0];
    }
}

/* Whether the squares of a are those of b: variances come with means of their own. */
static bool is_same(const graph_t *g, gradd_val_t a, gradd_val_t b, gradd_dtype_t as) {
    if (match_same_uncast(g, a, b, as)) return true;
    const gradd_val_t x = match_centred(g, b, as);
    return x != GRADD_NONE && under_deviations(g, a, as) == x;
}

/* Whether v is the square of x. */
static bool is_square(const graph_t *g, gradd_val_t v, gradd_val_t x, gradd_dtype_t as) {
    const gradd_val_t base = under_power(g, v, 2);
    if (base != GRADD_NONE) return is_same(g, base, x, as);
    const graph_node_t *n = match_made_by(g, v, "Mul");
    return n && n->in[0] == n->in[1] && is_same(g, n->in[0], x, as);
}

/* Whether v is mean(x^2) + eps. */
static bool is_mean_square(const graph_t *g, gradd_val_t v, gradd_val_t x, rms_t *r) {
    gradd_val_t mean;
    const graph_node_t *n = match_made_by(g, match_uncast(g, v, r->as), "Add");
    if (!n || !match_with_scalar(g, n, &r->eps, &mean)) return false;
    const gradd_val_t square = match_mean_of_last(g, match_uncast(g, mean, r->as));
    return square != GRADD_NONE && is_square(g, square, x, r->as);
}

/* Whether v is the root of that. */
static bool is_rms(const graph_t *g, gradd_val_t v, gradd_val_t x, rms_t *r) {
    v = match_uncast(g, v, r->as);
    const graph_node_t *n = match_made_by(g, v, "Sqrt");
    const gradd_val_t under = n ? n->in[0] : under_power(g, v, 0.5);
    return under != GRADD_NONE && is_mean_square(g, under, x, r);
}

/* Operand of 1 / v. */
static gradd_val_t under_inverse(const graph_t *g, gradd_val_t v) {
    double one;
    const graph_node_t *n = match_made_by(g, v, "Reciprocal");
    if (n) return n->in[0];
    n = match_made_by(g, v, "Div");
    return n && match_scalar(g, n->in[0], &one) && one == 1 ? n->in[1] : GRADD_NONE;
}

/* Whether v is 1 / rms(x). */
static bool is_inverse_rms(const graph_t *g, gradd_val_t v, gradd_val_t x, rms_t *r) {
    const gradd_val_t square = under_power(g, v, -0.5), root = under_inverse(g, v);
    if (square != GRADD_NONE) return is_mean_square(g, square, x, r);
    return root != GRADD_NONE && is_rms(g, root, x, r);
}

/* Whether node n is x / rms(x); finds x. */
static bool is_normalised(const graph_t *g, const graph_node_t *n, gradd_val_t *out_x, rms_t *r) {
    if (n && !strcmp(n->op->name, "Div")) {
        *out_x = n->in[0];
        return is_rms(g, n->in[1], n->in[0], r);
    }
    for (int k = 0; n && k < 2; k++) {
        if (!is_inverse_rms(g, match_uncast(g, n->in[1 - k], r->as), n->in[k], r)) continue;
        *out_x = n->in[k];
        return true;
    }
    return false;
}

/* The Mul or Div that makes v, looking through casts. */
static const graph_node_t *product_of(const graph_t *g, gradd_val_t v, gradd_dtype_t as) {
    v = match_uncast(g, v, as);
    const graph_node_t *n = match_made_by(g, v, "Mul");
    return n ? n : match_made_by(g, v, "Div");
}

static gradd_status_t replace(graph_t *g, graph_node_t *n, gradd_val_t x, gradd_val_t w,
                              double eps) {
    gradd_attr_t attrs[2] = {gradd_make_int(GRADD_NORM_AXIS, -1),
                             gradd_make_float(GRADD_NORM_EPSILON, eps)};
    gradd_val_t in[] = {[GRADD_NORM_X] = x, [GRADD_NORM_SCALE] = w};
    match_fused_t fused = {"RMSNormalization", in, GRADD_NORM_SCALE + 1, attrs, 2, NULL};
    return match_replace(g, n, &fused);
}

/* A middle with other readers stays: it would be computed twice. */
static gradd_status_t fuse_scaled(graph_t *g, graph_node_t *n, const graph_readers_t *readers) {
    rms_t r = {.as = graph_type(g, n->out[0])->dtype};
    for (int k = 0; k < 2; k++) {
        gradd_val_t x, w;
        if (!is_normalised(g, product_of(g, n->in[k], r.as), &x, &r)) continue;
        if (!match_uncast_read_once(g, n->in[k], r.as, readers)) continue;
        x = match_of_dtype(g, x, r.as);
        if (x == GRADD_NONE || (w = match_row_vector(g, n->in[1 - k], x)) == GRADD_NONE) continue;
        return replace(g, n, x, w, r.eps);
    }
    return GRADD_OK;
}

/* Whether node n is v / rms(x). */
static bool is_over_rms(const graph_t *g, const graph_node_t *n, gradd_val_t v, gradd_val_t x,
                        rms_t *r) {
    if (!strcmp(n->op->name, "Div")) return n->in[0] == v && is_rms(g, n->in[1], x, r);
    const gradd_val_t other = n->in[n->in[0] == v];
    return is_inverse_rms(g, match_uncast(g, other, r->as), x, r);
}

/* (w x) / rms(x) */
static gradd_status_t fuse_weighed(graph_t *g, graph_node_t *n, const graph_readers_t *readers) {
    rms_t r = {.as = graph_type(g, n->out[0])->dtype};
    for (int k = 0; k < 4; k++) {
        const gradd_val_t v = n->in[k / 2];
        const graph_node_t *mul = match_made_by(g, match_uncast(g, v, r.as), "Mul");
        if (!mul || !is_over_rms(g, n, v, mul->in[k % 2], &r)) continue;
        const gradd_val_t x = match_of_dtype(g, mul->in[k % 2], r.as);
        const gradd_val_t w = x == GRADD_NONE ? x : match_row_vector(g, mul->in[1 - k % 2], x);
        if (w == GRADD_NONE || !match_uncast_read_once(g, v, r.as, readers)) continue;
        return replace(g, n, x, w, r.eps);
    }
    return GRADD_OK;
}

/* Ones over the last axis of x. */
static gradd_status_t make_ones(graph_t *g, gradd_val_t x, gradd_val_t *out) {
    const gradd_type_t *tx = graph_type(g, x);
    gradd_type_t type = {.dtype = GRADD_DT_F32, .rank = 1, .dims = {tx->dims[tx->rank - 1]}};
    if (tx->dtype == GRADD_DT_F64) type.dtype = tx->dtype;
    char *data = arena_alloc(g->arena, (size_t)gradd_type_bytes(&type));
    if (!data) return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    for (int64_t i = 0; i < type.dims[0]; i++) {
        if (type.dtype == GRADD_DT_F32)
            ((float *)data)[i] = 1;
        else
            ((double *)data)[i] = 1;
    }
    return graph_constant(g, &type, data, out);
}

static gradd_status_t fuse_plain(graph_t *g, graph_node_t *n) {
    rms_t r = {.as = graph_type(g, n->out[0])->dtype};
    gradd_val_t x, ones;
    if (!is_normalised(g, n, &x, &r)) return GRADD_OK;
    x = match_of_dtype(g, x, r.as);
    if (x == GRADD_NONE) return GRADD_OK;
    GRADD_TRY(make_ones(g, x, &ones));
    return replace(g, n, x, ones, r.eps);
}

/* Scaled ones first: after that nothing reads their middles, which need no operator of their own.
 */
static gradd_status_t fuse_rms_norm(graph_t *g) {
    graph_readers_t readers;
    GRADD_TRY(graph_find_readers(g, &readers));
    for (int scaled = 1; scaled >= 0; scaled--)
        for (int i = 0; i < g->n_nodes; i++) {
            graph_node_t *n = &g->nodes[i];
            bool mul = !strcmp(n->op->name, "Mul"), div = !strcmp(n->op->name, "Div");
            if (n->backward || (!mul && !div)) continue;
            GRADD_TRY(compile_time_spend(1));
            if (scaled) GRADD_TRY(fuse_weighed(g, n, &readers));
            if (scaled && mul) GRADD_TRY(fuse_scaled(g, n, &readers));
            if (!scaled) GRADD_TRY(fuse_plain(g, n));
        }
    return GRADD_OK;
}

const graph_pass_t graph_pass_fuse_rms_norm = {
    "fuse_rms_norm", 10, true, fuse_rms_norm, {"RMSNormalization"}};
