/* Layer normalisation as models write it -> LayerNormalization, after fuse_rms_norm:
 *
 *   Add(RMSNormalization(Sub(x, ReduceMean(x, -1)), w), b)
 *
 * since layer normalisation is RMS normalisation of centred values; the bias may be missing. Then
 * casts around either normalisation go away where x and the result are bf16 or f16: the operators
 * calculate in f32 anyway and round once. A norm with other readers stays: it would be computed
 * twice. */
#include <string.h>

#include "kernels/describe/norm.h"
#include "kernels/rules/rules.h"
#include "server/graph/match/match_cast.h"
#include "server/graph/match/match_mean.h"

static gradd_status_t replace(graph_t *g, graph_node_t *n, const graph_node_t *norm, const char *op,
                              const gradd_val_t *in, int n_in) {
    gradd_attr_t attrs[2] = {
        gradd_make_int(GRADD_NORM_AXIS, gradd_attr_int(norm->attrs, GRADD_NORM_AXIS, -1)),
        gradd_make_float(GRADD_NORM_EPSILON,
                         gradd_attr_float(norm->attrs, GRADD_NORM_EPSILON, 1e-5))};
    match_fused_t fused = {op, in, n_in, attrs, 2, NULL};
    return match_replace(g, n, &fused);
}

/* Whether the axes from `axis` on are the last one alone. */
static bool is_over_last(const graph_t *g, const graph_node_t *norm) {
    int64_t axis = gradd_attr_int(norm->attrs, GRADD_NORM_AXIS, -1);
    return axis == -1 || axis == graph_type(g, norm->in[GRADD_NORM_X])->rank - 1;
}

/* RMSNormalization(x - mean(x)) */
static gradd_status_t fuse_centred(graph_t *g, graph_node_t *n, const graph_readers_t *readers) {
    (void)readers; /* the norm itself becomes another one: nothing is computed twice */
    gradd_val_t x =
        match_centred(g, n->in[GRADD_NORM_X], graph_type(g, n->out[GRADD_NORM_Y])->dtype);
    if (x == GRADD_NONE || !is_over_last(g, n)) return GRADD_OK;
    x = match_of_dtype(g, x, graph_type(g, n->out[GRADD_NORM_Y])->dtype);
    if (x == GRADD_NONE) return GRADD_OK;
    gradd_val_t in[] = {[GRADD_NORM_X] = x, [GRADD_NORM_SCALE] = n->in[GRADD_NORM_SCALE]};
    return replace(g, n, n, "LayerNormalization", in, GRADD_NORM_SCALE + 1);
}

/* LayerNormalization(x, w) + b */
static gradd_status_t fuse_bias(graph_t *g, graph_node_t *n, const graph_readers_t *readers) {
    const gradd_dtype_t dtype = graph_type(g, n->out[0])->dtype;
    for (int k = 0; k < 2; k++) {
        const graph_node_t *norm =
            match_made_by(g, match_uncast(g, n->in[k], dtype), "LayerNormalization");
        if (!norm || (norm->n_in > GRADD_NORM_BIAS && norm->in[GRADD_NORM_BIAS] != GRADD_NONE) ||
            !is_over_last(g, norm))
            continue;
        if (!match_uncast_read_once(g, n->in[k], dtype, readers)) continue;
        gradd_val_t x = match_of_dtype(g, norm->in[GRADD_NORM_X], dtype);
        if (x == GRADD_NONE) continue;
        gradd_val_t bias = match_row_vector(g, n->in[1 - k], x);
        if (bias == GRADD_NONE) continue;
        gradd_val_t in[GRADD_NORM_INPUTS] = {x, norm->in[GRADD_NORM_SCALE], bias};
        return replace(g, n, norm, "LayerNormalization", in, GRADD_NORM_INPUTS);
    }
    return GRADD_OK;
}

/* Cast(Norm(Cast(x), w, b)), calculated in f32 for an x and a result in one half */
static gradd_status_t fuse_casts(graph_t *g, graph_node_t *n, const graph_readers_t *readers) {
    const gradd_dtype_t half = graph_type(g, n->out[0])->dtype;
    if (!gradd_dtype_is_half(half)) return GRADD_OK;
    const graph_node_t *norm = match_made_by(g, n->in[0], "LayerNormalization");
    if (!norm) norm = match_made_by(g, n->in[0], "RMSNormalization");
    if (!norm || !is_over_last(g, norm) || !graph_read_once(readers, n->in[0])) return GRADD_OK;
    gradd_val_t in[GRADD_NORM_INPUTS], x = match_of_dtype(g, norm->in[GRADD_NORM_X], half);
    if (x == GRADD_NONE) return GRADD_OK;
    bool narrow = true; /* scale and bias must be of one type */
    for (int i = GRADD_NORM_SCALE; i < norm->n_in; i++)
        narrow = narrow && norm->in[i] != GRADD_NONE &&
                 match_of_dtype(g, norm->in[i], half) != GRADD_NONE;
    in[GRADD_NORM_X] = x;
    for (int i = GRADD_NORM_SCALE; i < norm->n_in; i++)
        in[i] = narrow ? match_of_dtype(g, norm->in[i], half) : norm->in[i];
    return replace(g, n, norm, norm->op->name, in, norm->n_in);
}

static gradd_status_t fuse_layer_norm(graph_t *g) {
    static const struct {
        const char *op;
        gradd_status_t (*fuse)(graph_t *g, graph_node_t *n, const graph_readers_t *readers);
    } forms[] = {
        {"RMSNormalization", fuse_centred},
        {"Add",              fuse_bias   },
        {"Cast",             fuse_casts  }
    };
    graph_readers_t readers;
    GRADD_TRY(graph_find_readers(g, &readers));
    for (size_t k = 0; k < sizeof forms / sizeof forms[0]; k++)
        for (int i = 0; i < g->n_nodes; i++) {
            graph_node_t *n = &g->nodes[i];
            if (!n->backward && !strcmp(n->op->name, forms[k].op))
                GRADD_TRY(forms[k].fuse(g, n, &readers));
        }
    return GRADD_OK;
}

const graph_pass_t graph_pass_fuse_layer_norm = {
    "fuse_layer_norm", 12, true, fuse_layer_norm, {"LayerNormalization", "RMSNormalization"}
};
