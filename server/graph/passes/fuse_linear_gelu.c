/* Gelu(Linear(x, W, b)) -> LinearGelu, where the device has a kernel that does both at once.
 *
 * The gelu is the one by tanh (approximate="tanh"), as GPT-2 has it. The result of the linear layer
 * has no other reader: the backward reads it as the second result. Between the two the leading axes
 * may be split or joined (GPT-2 multiplies [rows, width] and applies the gelu to sequences); x is
 * reshaped in their place. A device without such a kernel, such as the CPU, keeps the two
 * operators. */
#include <string.h>

#include "kernels/contract/registry.h"
#include "kernels/rules/rules.h"
#include "server/graph/match/match.h"
#include "server/graph/readers.h"

static int64_t last_dim(const gradd_type_t *t) {
    return t->dims[t->rank - 1];
}

/* The linear layer that makes v, perhaps with other leading axes, if v has no other reader. */
static const graph_node_t *linear_of(const graph_t *g, gradd_val_t v, const int32_t *readers) {
    const int64_t width = last_dim(graph_type(g, v));
    for (int step = 0; step < MATCH_MAX_WALK && readers[v] == 1; step++) {
        const graph_node_t *n = match_producer(g, v);
        if (!n || n->backward) return NULL;
        if (!strcmp(n->op->name, "Linear")) return n;
        if (!gradd_op_is_transparent(n->op) || n->in[0] == GRADD_NONE) return NULL;
        const gradd_type_t *from = graph_type(g, n->in[0]);
        if (!from->rank || last_dim(from) != width) return NULL;
        v = n->in[0];
    }
    return NULL;
}

/* Asked before anything is added: plans of other devices stay what they are. */
static bool has_kernel(const graph_t *g, const graph_node_t *linear) {
    gradd_view_t in[3];
    gradd_type_t out[1];
    for (int i = 0; i < 3; i++)
        in[i] = (gradd_view_t){*graph_type(g, linear->in[i]), NULL};
    const gradd_infer_t c = {
        .op = gradd_op_by_name("LinearGelu"),
        .attrs = linear->attrs,
        .opset = g->model->opset,
        .n_in = 3,
        .n_out = 1,
        .in = in,
        .out = out,
    };
    return c.op && gradd_backend_kernel(g->backend, &c);
}

/* x with the leading axes of y. */
static gradd_status_t fit(graph_t *g, const graph_node_t *like, const gradd_type_t *y,
                          gradd_val_t *x) {
    gradd_type_t want = *graph_type(g, *x);
    const int64_t width = last_dim(&want);
    want.rank = y->rank;
    memcpy(want.dims, y->dims, sizeof want.dims);
    want.dims[want.rank - 1] = width;
    if (gradd_type_equal(&want, graph_type(g, *x))) return GRADD_OK;
    const gradd_val_t in[2] = {*x, gradd_const_i64s(&g->builder, want.dims, want.rank)};
    GRADD_TRY(g->builder.status);
    return match_emit(g, like, &(match_fused_t){.op = "Reshape", .in = in, .n_in = 2}, x, 1);
}

static gradd_status_t fuse(graph_t *g, int32_t node, const int32_t *readers) {
    const graph_node_t gelu = g->nodes[node];
    const gradd_type_t y = *graph_type(g, gelu.out[0]);
    if (y.rank < 2 || strcmp(gradd_attr_string(gelu.attrs, "approximate", "none"), "tanh"))
        return GRADD_OK;
    const graph_node_t *found = linear_of(g, gelu.in[0], readers);
    if (!found || !has_kernel(g, found)) return GRADD_OK;
    const graph_node_t linear = *found; /* the list may move */
    gradd_val_t in[3] = {linear.in[0], linear.in[1], linear.in[2]};
    GRADD_TRY(fit(g, &linear, &y, &in[0]));
    const match_fused_t fused = {"LinearGelu", in, 3, linear.attrs.v, linear.attrs.n, NULL};
    return match_replace_above(g, &g->nodes[node], &fused, linear.in, 3);
}

static gradd_status_t fuse_linear_gelu(graph_t *g) {
    int32_t *readers;
    GRADD_TRY(graph_count_readers(g, &readers));
    for (int32_t i = 0, n = g->n_nodes; i < n; i++)
        if (!g->nodes[i].backward && !strcmp(g->nodes[i].op->name, "Gelu"))
            GRADD_TRY(fuse(g, i, readers));
    return GRADD_OK;
}

const graph_pass_t graph_pass_fuse_linear_gelu = {
    "fuse_linear_gelu", 62, true, fuse_linear_gelu, {"LinearGelu"}};
