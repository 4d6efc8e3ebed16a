/* See gemm.h. */
#include "kernels/describe/gemm.h"

#include <string.h>

static void drop_batch(gradd_gemm_t *g, int at) {
    for (int i = at; i + 1 < g->batch_rank; i++) {
        g->batch[i] = g->batch[i + 1];
        g->a_batch[i] = g->a_batch[i + 1];
        g->b_batch[i] = g->b_batch[i + 1];
    }
    g->batch_rank--;
}

void gradd_gemm_simplify(gradd_gemm_t *g) {
    for (int i = g->batch_rank - 1; i >= 0; i--)
        if (g->batch[i] == 1) drop_batch(g, i);
    for (int i = g->batch_rank - 2; i >= 0; i--) {
        int64_t n = g->batch[i + 1];
        if (g->a_batch[i] != g->a_batch[i + 1] * n || g->b_batch[i] != g->b_batch[i + 1] * n)
            continue;
        g->batch[i + 1] *= g->batch[i];
        drop_batch(g, i);
    }
    while (g->batch_rank) { /* matrices of rows against one B are one matrix of more rows */
        int last = g->batch_rank - 1;
        if (g->b_batch[last] || !g->a_batch[last]) break;
        if (g->m == 1 && g->a_k == 1) g->a_m = g->a_batch[last];
        if (g->a_batch[last] != g->m * g->a_m) break;
        g->m *= g->batch[last];
        g->batch_rank--;
    }
    for (int i = g->batch_rank; i < GRADD_GEMM_BATCH_RANK; i++)
        g->batch[i] = g->a_batch[i] = g->b_batch[i] = 0;
}

/* Strides of the batch dimensions of an operand of rank >= 2 within out; 0 where broadcast. */
static void batch_strides(const gradd_type_t *in, const gradd_type_t *out, int64_t *steps) {
    int64_t step = in->dims[in->rank - 1] * in->dims[in->rank - 2];
    for (int i = out->rank - 3; i >= 0; i--) {
        int at = i - (out->rank - in->rank);
        int64_t n = at >= 0 ? in->dims[at] : 1;
        steps[i] = n == 1 ? 0 : step;
        step *= n;
    }
}

/* a, b, out have rank >= 2. */
static gradd_gemm_t describe(const gradd_type_t *a, const gradd_type_t *b, const gradd_type_t *out,
                             bool trans_a, bool trans_b) {
    gradd_gemm_t g = {
        .dtype = a->dtype, .result = out->dtype, .alpha = 1, .batch_rank = out->rank - 2};
    int64_t rows = a->dims[a->rank - 2], cols = a->dims[a->rank - 1];
    g.m = trans_a ? cols : rows, g.k = trans_a ? rows : cols;
    g.a_m = trans_a ? 1 : cols, g.a_k = trans_a ? cols : 1;
    g.n = out->dims[out->rank - 1];
    g.b_k = trans_b ? 1 : g.n, g.b_n = trans_b ? g.k : 1;
    memcpy(g.batch, out->dims, sizeof g.batch[0] * (size_t)g.batch_rank);
    batch_strides(a, out, g.a_batch);
    batch_strides(b, out, g.b_batch);
    return g;
}

/* Vectors become a row (left) or a column (right); out gets the dimensions back that MatMul drops.
 */
void gradd_gemm_matrices(gradd_type_t *a, gradd_type_t *b, gradd_type_t *out) {
    bool row = a->rank == 1, col = b->rank == 1;
    if (row)
        *a = (gradd_type_t){
            a->dtype, 2, {1, a->dims[0]}
        };
    if (col)
        *b = (gradd_type_t){
            b->dtype, 2, {b->dims[0], 1}
        };
    if (row) {
        int at = col ? out->rank : out->rank - 1;
        if (!col) out->dims[out->rank] = out->dims[out->rank - 1];
        out->dims[at] = 1;
        out->rank++;
    }
    if (col) out->dims[out->rank++] = 1;
}

gradd_gemm_t gradd_gemm_of_matmul(const gradd_view_t *in, const gradd_type_t *result,
                                  gradd_attrs_t attrs) {
    gradd_type_t a = in[0].type, b = in[1].type, out = *result;
    gradd_gemm_matrices(&a, &b, &out);
    gradd_gemm_t g = describe(&a, &b, &out, gradd_attr_int(attrs, "transA", 0),
                              gradd_attr_int(attrs, "transB", 0));
    g.alpha = gradd_attr_float(attrs, "alpha", 1);
    return g;
}
/* A bias of one row goes into the product; other forms of C0 are spread over the result first. */
gradd_gemm_t gradd_gemm_of_gemm(const gradd_view_t *in, int n_in, const gradd_type_t *out,
                                gradd_attrs_t attrs) {
    gradd_gemm_t g = describe(&in[0].type, &in[1].type, out, gradd_attr_int(attrs, "transA", 0),
                              gradd_attr_int(attrs, "transB", 0));
    double beta = gradd_attr_float(attrs, "beta", 1);
    g.alpha = gradd_attr_float(attrs, "alpha", 1);
    if (n_in > 2 && in[2].type.dtype && beta != 0) {
        const gradd_type_t *c = &in[2].type;
        g.has_bias = beta == 1 && g.alpha == 1 && gradd_type_count(c) == g.n && c->rank &&
                     c->dims[c->rank - 1] == g.n;
        g.accumulate = !g.has_bias;
    }
    return g;
}
gradd_gemm_t gradd_gemm_of_linear(const gradd_view_t *in, const gradd_type_t *y,
                                  gradd_attrs_t attrs) {
    const gradd_type_t *x = &in[0].type;
    bool trans = gradd_attr_int(attrs, "transB", 0);
    gradd_gemm_t g = {.dtype = x->dtype, .alpha = 1, .has_bias = true};
    g.k = x->dims[x->rank - 1], g.m = 1, g.n = y->dims[y->rank - 1];
    for (int i = 0; i + 1 < x->rank; i++)
        g.m *= x->dims[i];
    g.a_m = g.k, g.a_k = 1;
    g.b_k = trans ? 1 : g.n, g.b_n = trans ? g.k : 1;
    return g;
}

/* 2 m n k, with k from the left operand; a bias is one addition per element. */
void gradd_gemm_cost(const gradd_infer_t *c, gradd_cost_t *cost) {
    const gradd_type_t *a = &c->in[0].type;
    int at = gradd_attr_int(c->attrs, "transA", 0) ? a->rank - 2 : a->rank - 1;
    double elements = (double)gradd_type_count(&c->out[0]);
    cost->flops = 2 * elements * (double)a->dims[at];
    if (c->n_in > 2 && c->in[2].type.dtype) cost->flops += elements;
}
