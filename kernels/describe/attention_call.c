/* See attention_call.h. */
#include "kernels/describe/attention_call.h"

#include <float.h>

enum { HIDES_BOTH = GRADD_ATTN_HIDES_SCORE | GRADD_ATTN_HIDES_BIAS };

#define PLACES(of) {of##Q, of##K, of##V, of##MASK, of##BIAS, of##RANGES, of##ROWS, of##KEY_ROWS}
const gradd_attn_places_t gradd_attn_forward_at = PLACES(GRADD_ATTN_),
                          gradd_attn_backward_at = PLACES(GRADD_ATTN_GRAD_);

bool gradd_attn_given(const gradd_view_t *in, int n_in, int i) {
    return i < n_in && in[i].type.dtype != GRADD_DT_NONE;
}

static gradd_attn_side_t side_of(const gradd_view_t *v, bool positions_first) {
    const int64_t *n = v->type.dims;
    gradd_attn_side_t s = {.data = v->data, .batch = n[1] * n[2] * n[3]};
    s.head = positions_first ? n[3] : n[2] * n[3];
    s.row = positions_first ? n[2] * n[3] : n[3];
    return s;
}

gradd_attn_extra_t gradd_attn_extra_of(const gradd_view_t *v) {
    gradd_attn_extra_t e = {.data = v->data};
    int64_t *strides[4] = {&e.batch, &e.head, &e.row, &e.col}, step = 1;
    for (int i = 3, at = v->type.rank - 1; at >= 0; i--, at--) {
        *strides[i] = v->type.dims[at] == 1 ? 0 : step;
        step *= v->type.dims[at];
    }
    return e;
}

void gradd_attn_describe_sizes(gradd_attn_t *p, const gradd_view_t *in,
                               const gradd_attn_places_t *at, int64_t layout) {
    const int64_t *q = in[at->q].type.dims, *k = in[at->k].type.dims, *v = in[at->v].type.dims;
    bool q_first = layout & GRADD_ATTN_Q_TURNED, k_first = layout & GRADD_ATTN_K_TURNED;
    p->dtype = in[at->q].type.dtype;
    p->batch = q[0], p->heads = q[q_first ? 2 : 1], p->n_q = q[q_first ? 1 : 2], p->d = q[3];
    p->kv_heads = k[k_first ? 2 : 1], p->n_k = k[k_first ? 1 : 2], p->d_v = v[3];
    p->q = side_of(&in[at->q], q_first);
    p->k = side_of(&in[at->k], k_first);
    p->v = side_of(&in[at->v], layout & GRADD_ATTN_V_TURNED);
}

static gradd_attn_drop_t describe_drop(const gradd_launch_t *r) {
    double ratio = gradd_attr_float(r->attrs, GRADD_ATTN_DROPOUT, 0);
    return (gradd_attn_drop_t){
        .active = ratio > 0 && !r->dropout_off,
        .seed = r->seed,
        .node = (uint64_t)gradd_attr_int(r->attrs, GRADD_ATTN_NODE, (int64_t)r->node),
        .limit = (uint64_t)(ratio * 0x1p32),
        .scale = ratio < 1 ? 1 / (1 - ratio) : 0,
    };
}

void gradd_attn_describe(gradd_attn_t *p, const gradd_view_t *in, int n_in,
                         const gradd_attn_places_t *at, gradd_attrs_t attrs) {
    *p = (gradd_attn_t){.scale = gradd_attr_float(attrs, GRADD_ATTN_SCALE, 1),
                        .softcap = gradd_attr_float(attrs, GRADD_ATTN_SOFTCAP, 0),
                        .fill = gradd_attr_float(attrs, GRADD_ATTN_FILL, -FLT_MAX),
                        .hides = (int)gradd_attr_int(attrs, GRADD_ATTN_HIDES, HIDES_BOTH),
                        .zero = gradd_attr_int(attrs, GRADD_ATTN_ZERO, 0),
                        .sunk = gradd_attr_int(attrs, GRADD_ATTN_SUNK, 0)};
    if (at == &gradd_attn_forward_at && gradd_attn_given(in, n_in, GRADD_ATTN_SINKS))
        p->sinks = in[GRADD_ATTN_SINKS].data, p->sunk = true;
    gradd_attn_describe_sizes(p, in, at, gradd_attr_int(attrs, GRADD_ATTN_LAYOUT, 0));
    if (p->dtype != GRADD_DT_F64) p->fill = (double)(float)p->fill; /* maybe infinite */
    if (gradd_attn_given(in, n_in, at->mask)) p->mask = gradd_attn_extra_of(&in[at->mask]);
    if (gradd_attn_given(in, n_in, at->bias)) p->bias = gradd_attn_extra_of(&in[at->bias]);
    if (gradd_attn_given(in, n_in, at->ranges)) p->range = gradd_attn_extra_of(&in[at->ranges]);
    p->rows.positions = gradd_attr_int(attrs, GRADD_ATTN_POSITIONS, 1);
    p->rows.key_positions = gradd_attr_int(attrs, GRADD_ATTN_KEY_POSITIONS, p->rows.positions);
}

static void *output(const gradd_launch_t *r, int j) {
    return j < r->n_out ? r->out[j].data : NULL;
}

gradd_attn_t gradd_attn_of_forward(const gradd_launch_t *r) {
    gradd_attn_t p;
    gradd_attn_describe(&p, r->in, r->n_in, &gradd_attn_forward_at, r->attrs);
    p.y = side_of(&r->out[GRADD_ATTN_Y],
                  gradd_attr_int(r->attrs, GRADD_ATTN_LAYOUT, 0) & GRADD_ATTN_Y_TURNED);
    p.stats = output(r, GRADD_ATTN_STATS);
    p.drop = describe_drop(r);
    return p;
}

gradd_attn_t gradd_attn_of_backward(const gradd_launch_t *r) {
    const int64_t layout = gradd_attr_int(r->attrs, GRADD_ATTN_LAYOUT, 0);
    gradd_attn_t p;
    gradd_attn_describe(&p, r->in, r->n_in, &gradd_attn_backward_at, r->attrs);
    p.dy = side_of(&r->in[GRADD_ATTN_GRAD_DY], layout & GRADD_ATTN_Y_TURNED);
    p.y = side_of(&r->in[GRADD_ATTN_GRAD_Y], layout & GRADD_ATTN_Y_TURNED);
    p.stats = r->in[GRADD_ATTN_GRAD_STATS].data;
    p.dq = p.q, p.dk = p.k, p.dv = p.v;
    p.dq.data = output(r, GRADD_ATTN_DQ), p.dk.data = output(r, GRADD_ATTN_DK);
    p.dv.data = output(r, GRADD_ATTN_DV), p.dbias = output(r, GRADD_ATTN_DBIAS);
    p.drop = describe_drop(r);
    return p;
}

int64_t gradd_attn_mask_rows(const gradd_type_t *mask) {
    int64_t rows = 1;
    for (int i = 0; i + 1 < mask->rank; i++)
        rows *= mask->dims[i];
    return rows;
}

int64_t gradd_attn_own_ranges(const gradd_view_t *in, int n_in, const gradd_attn_places_t *at) {
    if (!gradd_attn_given(in, n_in, at->mask) || gradd_attn_given(in, n_in, at->ranges)) return 0;
    return gradd_attn_mask_rows(&in[at->mask].type);
}

int64_t gradd_attn_row_limit(const gradd_attn_t *p, const gradd_view_t *in,
                             const gradd_attn_places_t *at) {
    const int64_t sequences = p->bias.batch ? in[at->bias].type.dims[0] : 0;
    return sequences ? sequences * p->rows.positions : INT32_MAX;
}

/* Two products per pair of query and key; backward makes the scores again and has five. All pairs
 * are counted, also those that a mask lets the kernel skip; a live row looks at its own sequence.
 */
static void count_pairs(const gradd_infer_t *c, const gradd_attn_places_t *at, bool backward,
                        gradd_cost_t *cost) {
    gradd_attn_t p = {0};
    gradd_attn_describe_sizes(&p, c->in, at, gradd_attr_int(c->attrs, GRADD_ATTN_LAYOUT, 0));
    const int64_t own = gradd_attr_int(c->attrs, GRADD_ATTN_POSITIONS, p.n_k);
    const int64_t positions = gradd_attr_int(c->attrs, GRADD_ATTN_KEY_POSITIONS, own);
    const int64_t keys = positions < p.n_k ? positions : p.n_k;
    double pairs = (double)p.batch * (double)p.heads * (double)p.n_q * (double)keys;
    double d = (double)p.d, d_v = (double)p.d_v;
    cost->flops = 2 * pairs * (backward ? 3 * d + 2 * d_v : d + d_v);
}
void gradd_attn_cost(const gradd_infer_t *c, gradd_cost_t *cost) {
    count_pairs(c, &gradd_attn_forward_at, false, cost);
}
void gradd_attn_grad_cost(const gradd_infer_t *c, gradd_cost_t *cost) {
    count_pairs(c, &gradd_attn_backward_at, true, cost);
}
