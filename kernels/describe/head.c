/* See head.h. */
#include "kernels/describe/head.h"
#include "kernels/describe/cross_entropy.h"

static int64_t quotient_up(int64_t n, int64_t by) {
    return (n + by - 1) / by;
}

gradd_type_t gradd_head_logits(const gradd_view_t *in, gradd_attrs_t attrs) {
    gradd_type_t t = in[GRADD_HEAD_X].type;
    const gradd_type_t *w = &in[GRADD_HEAD_W].type;
    if (t.rank && w->rank == 2)
        t.dims[t.rank - 1] = w->dims[!gradd_attr_int(attrs, GRADD_HEAD_TRANS, 0)];
    return t;
}

bool gradd_head_has(const gradd_view_t *in, int n_in, int i) {
    return n_in > i && in[i].type.dtype != GRADD_DT_NONE;
}

static bool wanted(const gradd_infer_t *c, int j) {
    return c->n_out > j && c->out[j].dtype != GRADD_DT_NONE;
}

void gradd_head_describe(const gradd_infer_t *c, gradd_head_t *h) {
    const gradd_type_t *x = &c->in[GRADD_HEAD_X].type;
    const gradd_type_t logits = gradd_head_logits(c->in, c->attrs);
    *h = (gradd_head_t){.dtype = x->dtype, .rows = 1, .k = x->dims[x->rank - 1]};
    h->bytes = gradd_dtype_bytes(h->dtype);
    for (int i = 0; i + 1 < x->rank; i++)
        h->rows *= x->dims[i];
    h->v = logits.dims[logits.rank - 1];
    h->squares = gradd_head_has(c->in, c->n_in, GRADD_HEAD_SQUARES);
    if (gradd_attr_int(c->attrs, GRADD_CE_SHIFT, 0)) h->positions = x->dims[x->rank - 2];
    h->ignores = h->squares || gradd_head_has(c->in, c->n_in, GRADD_HEAD_WEIGHTS) ||
                 gradd_attr_find(c->attrs, GRADD_CE_IGNORE_INDEX);
    h->trans = gradd_attr_int(c->attrs, GRADD_HEAD_TRANS, 0);
    h->bias = gradd_head_has(c->in, c->n_in, GRADD_HEAD_BIAS);
    h->dx = wanted(c, GRADD_HEAD_DX);
    h->dw = wanted(c, GRADD_HEAD_DW);
    h->dbias = wanted(c, GRADD_HEAD_DBIAS);
    h->softcap = gradd_attr_float(c->attrs, GRADD_HEAD_SOFTCAP, 0);
    h->scale = gradd_attr_float(c->attrs, GRADD_HEAD_SCALE, 1);
    h->dw_rows = h->trans ? h->v : h->k;
    h->dw_cols = h->trans ? h->k : h->v;
}

int64_t gradd_head_chunk(gradd_attrs_t attrs, int64_t rows) {
    int64_t chunk = gradd_attr_int(attrs, GRADD_HEAD_CHUNK, 0);
    if (chunk <= 0 || chunk > rows) chunk = rows;
    return chunk ? quotient_up(rows, quotient_up(rows, chunk)) : 0;
}

int64_t gradd_head_block(const gradd_head_t *h, int64_t bytes) {
    if (!h->dw_cols) return h->dw_rows;
    const int64_t fit = (bytes / (4 * h->dw_cols) + 64) / 64 * 64;
    if (fit >= h->dw_rows) return h->dw_rows;
    return (quotient_up(h->dw_rows, quotient_up(h->dw_rows, fit)) + 15) / 16 * 16;
}

/* ---- products -------------------------------------------------------------------------------- */

static gradd_gemm_t product(const gradd_head_t *h, int64_t m, int64_t n, int64_t k) {
    return (gradd_gemm_t){.dtype = h->dtype, .alpha = 1, .m = m, .n = n, .k = k};
}

gradd_gemm_t gradd_head_logits_product(const gradd_head_t *h, int64_t rows) {
    gradd_gemm_t g = product(h, rows, h->v, h->k);
    g.a_m = h->k, g.a_k = 1;
    g.b_k = h->trans ? 1 : h->v, g.b_n = h->trans ? h->k : 1;
    g.has_bias = h->bias;
    return g;
}

gradd_gemm_t gradd_head_rows_product(const gradd_head_t *h, int64_t rows) {
    gradd_gemm_t g = product(h, rows, h->k, h->v);
    g.a_m = h->v, g.a_k = 1;
    g.b_k = h->trans ? h->k : 1, g.b_n = h->trans ? 1 : h->v;
    return g;
}

gradd_gemm_t gradd_head_weight_product(const gradd_head_t *h, int64_t rows, int64_t block,
                                       bool first) {
    gradd_gemm_t g = product(h, block, h->dw_cols, rows);
    g.a_m = 1, g.a_k = h->dw_rows;
    g.b_k = h->dw_cols, g.b_n = 1;
    g.accumulate = !first;
    if (h->dtype == GRADD_DT_BF16) g.result = GRADD_DT_F32;
    return g;
}

void gradd_head_cost(const gradd_infer_t *c, gradd_cost_t *cost) {
    gradd_head_t h;
    gradd_head_describe(c, &h);
    const double weight = (double)h.k * (double)h.v;
    const int64_t last = h.positions && !h.squares ? h.rows / h.positions : 0;
    const int64_t most = h.rows - last, chunk = gradd_head_chunk(c->attrs, most);
    cost->flops = 2 * (double)most * weight * (1 + h.dx + h.dw);
    const double further = most > chunk ? (double)quotient_up(most, chunk) - 1 : 0;
    const double bytes = (double)h.bytes, sum = bytes + (h.dtype == GRADD_DT_BF16);
    cost->again = further * weight * ((1 + h.dx) * bytes + h.dw * 2 * sum);
}
