/* RMS normalisation as models write it -> RMSNormalization:
 *
 *   Mul(w, Mul(x, Reciprocal(Sqrt(Add(ReduceMean(Pow(x, 2), -1), eps)))))
 *
 * with Mul(x, x) for the square, Div(1, .) for the reciprocal, and the operands of products in
 * either order. w is any vector over the last axis (Gemma adds 1 to its weight first). The operator
 * keeps one number per row for backward, the pattern five tensors of the size of x. */
#include <string.h>

#include "kernels/rules.h"
#include "server/graph/match.h"

/* Whether v is the square of x. */
static bool is_square(const graph_t *g, gradd_val_t v, gradd_val_t x) {
    double power;
    const graph_node_t *n = match_made_by(g, v, "Pow");
    if (n) return n->in[0] == x && match_scalar(g, n->in[1], &power) && power == 2;
    n = match_made_by(g, v, "Mul");
    return n && n->in[0] == x && n->in[1] == x;
}

/* Operand of 1 / sqrt(.). */
static gradd_val_t under_inverse_root(const graph_t *g, gradd_val_t v) {
    double one;
    gradd_val_t root = GRADD_NONE;
    const graph_node_t *n = match_made_by(g, v, "Reciprocal");
    if (n)
        root = n->in[0];
    else if ((n = match_made_by(g, v, "Div")) && match_scalar(g, n->in[0], &one) && one == 1)
        root = n->in[1];
    n = match_made_by(g, root, "Sqrt");
    return n ? n->in[0] : GRADD_NONE;
}

/* Whether `inverse` is 1 / sqrt(mean(x^2) + eps). */
static bool is_inverse_rms(const graph_t *g, gradd_val_t inverse, gradd_val_t x, double *out_eps) {
    gradd_val_t mean;
    gradd_val_t sum = under_inverse_root(g, inverse);
    const graph_node_t *n = match_made_by(g, sum, "Add");
    if (!n || !match_with_scalar(g, n, out_eps, &mean)) return false;
    n = match_made_by(g, mean, "ReduceMean");
    return n && match_reduces_last(g, n) && is_square(g, n->in[0], x);
}

/* Whether v is x / rms(x); finds x. */
static bool is_normalised(const graph_t *g, gradd_val_t v, gradd_val_t *out_x, double *out_eps) {
    const graph_node_t *n = match_made_by(g, v, "Mul");
    for (int k = 0; n && k < 2; k++)
        if (is_inverse_rms(g, n->in[1 - k], n->in[k], out_eps)) {
            *out_x = n->in[k];
            return true;
        }
    return false;
}

static bool is_scale(const graph_t *g, gradd_val_t w, gradd_val_t x) {
    const gradd_type_t *tw = &g->values[w]->type, *tx = &g->values[x]->type;
    return tw->rank == 1 && tw->dtype == tx->dtype && tw->dims[0] == tx->dims[tx->rank - 1];
}

static gradd_status_t replace(graph_t *g, graph_node_t *n, gradd_val_t x, gradd_val_t w,
                              double eps) {
    gradd_attr_t attrs[2] = {gradd_make_int("axis", -1), gradd_make_float("epsilon", eps)};
    gradd_val_t in[2] = {x, w};
    match_fused_t fused = {"RMSNormalization", in, 2, attrs, 2, NULL};
    return match_replace(g, n, &fused);
}

static gradd_status_t fuse_rms_norm(graph_t *g) {
    for (int i = 0; i < g->n_nodes; i++) {
        graph_node_t *n = &g->nodes[i];
        if (n->backward || strcmp(n->op->name, "Mul")) continue;
        for (int k = 0; k < 2; k++) {
            gradd_val_t x;
            double eps;
            if (!is_normalised(g, n->in[k], &x, &eps) || !is_scale(g, n->in[1 - k], x)) continue;
            GRADD_TRY(replace(g, n, x, n->in[1 - k], eps));
            break;
        }
    }
    return GRADD_OK;
}

const graph_pass_t graph_pass_fuse_rms_norm = {"fuse_rms_norm", 10, true, fuse_rms_norm};
