/* Attention as it is defined: query by query, in double. See attention_cpu.h. */
#include "kernels/cpu/attention/attention_cpu.h"

#include <math.h>

#include "kernels/cpu/half.h"
#include "kernels/math/rng.h"

static double element(gradd_dtype_t dtype, const void *data, int64_t i) {
    if (dtype == GRADD_DT_F64) return ((const double *)data)[i];
    if (dtype == GRADD_DT_F32) return (double)((const float *)data)[i];
    return (double)gradd_half_f32((const uint16_t *)data + i, dtype);
}

typedef struct query_s {
    int64_t b, h, i;
} query_t;

static int64_t place(const gradd_attn_side_t *s, int64_t b, int64_t h, int64_t row) {
    return b * s->batch + h * s->head + row * s->row;
}

static int64_t extra_place(const gradd_attn_extra_t *e, const query_t *at, int64_t j) {
    return at->b * e->batch + at->h * e->head + at->i * e->row + j * e->col;
}

/* Product of query and key, scaled and capped. */
static double plain_product(const gradd_attn_t *p, const query_t *at, int64_t j) {
    const int64_t q = place(&p->q, at->b, at->h, at->i);
    const int64_t k = place(&p->k, at->b, at->h / (p->heads / p->kv_heads), j);
    double s = 0;
    for (int64_t c = 0; c < p->d; c++)
        s += element(p->dtype, p->q.data, q + c) * element(p->dtype, p->k.data, k + c);
    s *= p->scale;
    return p->softcap != 0 ? p->softcap * tanh(s / p->softcap) : s;
}

static bool may_look(const gradd_attn_t *p, const query_t *at, int64_t j) {
    const int32_t *range = p->range.data;
    if (!p->mask.data && range) {
        range += extra_place(&p->range, at, 0);
        return range[0] <= j && j < range[1];
    }
    return !p->mask.data || ((const uint8_t *)p->mask.data)[extra_place(&p->mask, at, j)];
}

/* Where a query is among all rows. */
static query_t among_all(const gradd_attn_t *p, const query_t *at) {
    if (!p->rows.q) return *at;
    const int64_t row = p->rows.q[at->i];
    return (query_t){row / p->rows.positions, at->h, row % p->rows.positions};
}

/* The input of the softmax, rounded as sums of large numbers are. */
static double plain_score(const gradd_attn_t *p, const query_t *at, int64_t j) {
    const bool shown = may_look(p, at, j);
    double s = shown ? plain_product(p, at, j) : p->fill;
    const gradd_dtype_t dtype = gradd_dtype_is_half(p->dtype) ? GRADD_DT_F32 : p->dtype;
    if (p->bias.data && (shown || !(p->hides & GRADD_ATTN_HIDES_BIAS))) {
        const query_t row = among_all(p, at);
        const int64_t key = p->rows.k ? p->rows.k[j] % p->rows.key_positions : j;
        s += element(dtype, p->bias.data, extra_place(&p->bias, &row, key));
    }
    return dtype == GRADD_DT_F64 ? s : (double)(float)s;
}

/* The place of a score among all. */
static uint64_t score_place(const gradd_attn_t *p, const query_t *at, int64_t j) {
    const query_t row = among_all(p, at);
    const int64_t n_q = p->rows.q ? p->rows.positions : p->n_q;
    const int64_t n_k = p->rows.k ? p->rows.key_positions : p->n_k;
    const int64_t key = p->rows.k ? p->rows.k[j] % n_k : j;
    return (uint64_t)(((row.b * p->heads + row.h) * n_q + row.i) * n_k + key);
}

/* Element c of y: sum over keys; stats: largest score, logarithm of the sum of exponentials. */
static double plain_element(const gradd_attn_t *p, const query_t *at, int64_t c, double stats[2]) {
    const int64_t kv = at->h / (p->heads / p->kv_heads);
    const gradd_dtype_t wide = gradd_dtype_is_half(p->dtype) ? GRADD_DT_F32 : p->dtype;
    const double sink = p->sinks ? element(wide, p->sinks, at->h) : -INFINITY;
    double max = sink, sum = 0, y = 0;
    bool any = false;
    for (int64_t j = 0; j < p->n_k; j++) {
        any |= may_look(p, at, j);
        max = fmax(max, plain_score(p, at, j));
    }
    stats[0] = p->sinks ? sink : 0, stats[1] = 0;
    if (!any && p->zero) return 0;
    if (sink > -INFINITY) sum = exp(sink - max);
    for (int64_t j = 0; j < p->n_k; j++) {
        double weight = exp(plain_score(p, at, j) - max);
        bool keep = !p->drop.active || gradd_rng_word(p->drop.seed, p->drop.node,
                                                      score_place(p, at, j)) >= p->drop.limit;
        sum += weight;
        if (keep) y += weight * element(p->dtype, p->v.data, place(&p->v, at->b, kv, j) + c);
    }
    stats[0] = max, stats[1] = log(sum);
    return y / sum * (p->drop.active ? p->drop.scale : 1);
}

static void store(gradd_dtype_t dtype, void *data, int64_t i, double value) {
    if (dtype == GRADD_DT_F64)
        ((double *)data)[i] = value;
    else if (dtype == GRADD_DT_F32)
        ((float *)data)[i] = (float)value;
    else
        gradd_half_put((uint16_t *)data + i, dtype, (float)value);
}

void gradd_attn_reference(const gradd_attn_t *p) {
    const gradd_dtype_t wide = p->dtype == GRADD_DT_F64 ? GRADD_DT_F64 : GRADD_DT_F32;
    for (int64_t row = 0; row < p->batch * p->heads * p->n_q; row++) {
        const query_t at = {row / p->n_q / p->heads, row / p->n_q % p->heads, row % p->n_q};
        double stats[2] = {0, 0};
        for (int64_t c = 0; c < p->d_v; c++)
            store(p->dtype, p->y.data, place(&p->y, at.b, at.h, at.i) + c,
                  plain_element(p, &at, c, stats));
        for (int k = 0; k < 2 && p->stats; k++)
            store(wide, p->stats, (row / p->n_q * 2 + k) * p->n_q + at.i, stats[k]);
    }
}
