/* Mul(f(g), u) -> GatedActivation(g, u), for f = Swish, Gelu, Relu, Sigmoid, after fuse_gelu.
 *
 * Where g and u are the two halves of one tensor (one projection for both), the operator takes that
 * tensor, so that the halves need not be copied out, nor their gradients put together. Casts around
 * a product that is computed in f32 between bf16 values go away as well. The product f(g), its
 * gradient and the two products of the gradient become one pass over memory. */
#include <string.h>

#include "kernels/rules/rules.h"
#include "server/graph/match/match_part.h"
#include "server/graph/readers.h"

typedef struct found_s {
    const char *activation;
    double alpha;
    gradd_val_t g, u;
} found_t;

/* Whether v = f(g) for an f that the operator knows. */
static bool is_activated(const graph_t *g, gradd_val_t v, found_t *out) {
    const graph_node_t *n;
    out->alpha = 1;
    if ((n = match_made_by(g, v, "Swish"))) {
        out->activation = "swish";
        out->alpha = gradd_attr_float(n->attrs, "alpha", 1);
    } else if ((n = match_made_by(g, v, "Gelu"))) {
        bool by_tanh = !strcmp(gradd_attr_string(n->attrs, "approximate", "none"), "tanh");
        out->activation = by_tanh ? "gelu_tanh" : "gelu";
    } else if ((n = match_made_by(g, v, "Relu"))) {
        out->activation = "relu";
    } else if ((n = match_made_by(g, v, "Sigmoid"))) {
        out->activation = "sigmoid";
    } else {
        return false;
    }
    out->g = n->in[0];
    return true;
}

/* An f(g) with other readers stays: it would be computed twice. */
static bool is_gated(const graph_t *g, const graph_node_t *n, const graph_readers_t *readers,
                     found_t *out) {
    const gradd_type_t *a = graph_type(g, n->in[0]), *b = graph_type(g, n->in[1]);
    if (n->in[0] == n->in[1] || !gradd_type_equal(a, b)) return false;
    for (int k = 0; k < 2; k++) {
        out->u = n->in[1 - k];
        if (graph_read_once(readers, n->in[k]) && is_activated(g, n->in[k], out)) return true;
    }
    return false;
}

/* Whether g and u are the halves of one tensor; finds it, and which half g is. */
static bool is_packed(const graph_t *g, const found_t *f, gradd_val_t *out_x, int64_t *out_gate) {
    match_part_t a, b;
    if (!match_part(g, f->g, &a) || !match_part(g, f->u, &b) || a.source != b.source) return false;
    int64_t half = match_width(g, f->g);
    if (half * 2 != match_width(g, a.source) || a.start + b.start != half) return false;
    if (a.start * b.start != 0 || half == 0 || (half > 1 && (a.step != 1 || b.step != 1)))
        return false;
    *out_x = a.source;
    *out_gate = a.start ? 1 : 0;
    return true;
}

static gradd_status_t replace(graph_t *g, graph_node_t *n, const found_t *f) {
    gradd_val_t in[2] = {f->g, f->u};
    int64_t gate = 0;
    bool packed = is_packed(g, f, &in[0], &gate);
    gradd_attr_t attrs[3] = {gradd_make_string("activation", f->activation),
                             gradd_make_float("alpha", f->alpha), gradd_make_int("gate", gate)};
    match_fused_t fused = {"GatedActivation", in, packed ? 1 : 2, attrs, 3, NULL};
    return match_replace(g, n, &fused);
}

static gradd_status_t fuse_gated(graph_t *g) {
    graph_readers_t readers;
    GRADD_TRY(graph_find_readers(g, &readers));
    for (int i = 0; i < g->n_nodes; i++) {
        graph_node_t *n = &g->nodes[i];
        found_t f;
        if (n->backward || strcmp(n->op->name, "Mul") || !is_gated(g, n, &readers, &f)) continue;
        GRADD_TRY(replace(g, n, &f));
    }
    return GRADD_OK;
}

const graph_pass_t graph_pass_fuse_gated = {
    "fuse_gated", 22, true, fuse_gated, {"GatedActivation"}};
