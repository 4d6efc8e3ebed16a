/* Sizes and products of recurrent layers: see recurrence.h. */
#include "kernels/describe/recurrence.h"

#include <string.h>

static bool has(const gradd_view_t *in, int n_in, int i) {
    return i < n_in && in[i].type.dtype != GRADD_DT_NONE;
}

static gradd_status_t read_attrs(gradd_attrs_t attrs, gradd_rnn_t *v) {
    static const char *const names[] = {"lstm", "gru", "tanh", "relu"};
    static const int gates[] = {4, 3, 1, 1};
    const char *kind = gradd_attr_string(attrs, GRADD_RNN_KIND, "");
    v->reverse = gradd_attr_int(attrs, GRADD_RNN_REVERSE, 0);
    for (int i = 0; i < 4; i++) {
        if (strcmp(kind, names[i])) continue;
        v->kind = (gradd_rnn_kind_t)i;
        v->gates = gates[i];
        return GRADD_OK;
    }
    return GRADD_FAIL(GRAPH, "kind is \"%s\", expected lstm, gru, tanh or relu", kind);
}

/* T, B and H from the gates [T, B, G H], P from U. */
static gradd_status_t read_sizes(const gradd_type_t *gates, const gradd_type_t *u, gradd_rnn_t *v) {
    char text[GRADD_TYPE_TEXT], of_u[GRADD_TYPE_TEXT];
    v->dtype = gates->dtype;
    v->wide = gradd_dtype_is_half(v->dtype) ? GRADD_DT_F32 : v->dtype;
    if (gates->rank != 3 || gates->dims[2] % v->gates)
        return GRADD_FAIL(GRAPH, "the gates are %s, expected steps, batch and %lld times the cells",
                          gradd_type_format(gates, text), (long long)v->gates);
    if (u->rank != 2 || u->dims[0] != gates->dims[2])
        return GRADD_FAIL(GRAPH, "U is %s, which does not fit gates %s", gradd_type_format(u, of_u),
                          gradd_type_format(gates, text));
    v->steps = gates->dims[0], v->batch = gates->dims[1];
    v->cells = gates->dims[2] / v->gates, v->state = u->dims[1];
    if (!v->has_proj && v->state != v->cells)
        return GRADD_FAIL(GRAPH, "a state of %lld for %lld cells needs a projection",
                          (long long)v->state, (long long)v->cells);
    return GRADD_OK;
}

typedef struct expected_s {
    const char *name;
    int at;
    bool required, wide;
    int rank;
    int64_t dims[3];
} expected_t;

static gradd_status_t check(const gradd_view_t *in, int n_in, const gradd_rnn_t *v,
                            const expected_t *e) {
    char is[GRADD_TYPE_TEXT], wanted[GRADD_TYPE_TEXT];
    if (!has(in, n_in, e->at))
        return e->required ? GRADD_FAIL(GRAPH, "%s is missing", e->name) : GRADD_OK;
    gradd_type_t type = {.dtype = e->wide ? v->wide : v->dtype, .rank = e->rank};
    memcpy(type.dims, e->dims, sizeof e->dims);
    if (gradd_type_equal(&type, &in[e->at].type)) return GRADD_OK;
    return GRADD_FAIL(GRAPH, "%s is %s, expected %s", e->name,
                      gradd_type_format(&in[e->at].type, is), gradd_type_format(&type, wanted));
}

static gradd_status_t check_all(const gradd_view_t *in, int n_in, const gradd_rnn_t *v,
                                const expected_t *list, size_t n) {
    for (size_t i = 0; i < n; i++)
        GRADD_TRY(check(in, n_in, v, &list[i]));
    if (v->has_proj && v->kind != GRADD_RNN_LSTM)
        return GRADD_FAIL(GRAPH, "only an LSTM has a projection");
    return GRADD_OK;
}

gradd_status_t gradd_rnn_of(const gradd_view_t *in, int n_in, gradd_attrs_t attrs,
                            gradd_rnn_t *out) {
    gradd_rnn_t v = {.has_bias = has(in, n_in, GRADD_RNN_BIAS),
                     .has_proj = has(in, n_in, GRADD_RNN_PROJ)};
    GRADD_TRY(read_attrs(attrs, &v));
    GRADD_TRY(read_sizes(&in[GRADD_RNN_X].type, &in[GRADD_RNN_U].type, &v));
    const bool lstm = v.kind == GRADD_RNN_LSTM;
    const expected_t list[] = {
        {"U",               GRADD_RNN_U,     true,  false, 2, {v.gates * v.cells, v.state}},
        {"the first state", GRADD_RNN_STATE, true,  false, 2, {v.batch, v.state}          },
        {"the first cells", GRADD_RNN_CELLS, lstm,  false, 2, {v.batch, v.cells}          },
        {"the bias",        GRADD_RNN_BIAS,  false, false, 1, {v.gates * v.cells}         },
        {"the projection",  GRADD_RNN_PROJ,  false, false, 2, {v.state, v.cells}          },
    };
    GRADD_TRY(check_all(in, n_in, &v, list, sizeof list / sizeof list[0]));
    *out = v;
    return GRADD_OK;
}

gradd_status_t gradd_rnn_of_grad(const gradd_view_t *in, int n_in, gradd_attrs_t attrs,
                                 gradd_rnn_t *out) {
    gradd_rnn_t v = {.has_proj = has(in, n_in, GRADD_RNN_GRAD_PROJ)};
    GRADD_TRY(read_attrs(attrs, &v));
    GRADD_TRY(read_sizes(&in[GRADD_RNN_GRAD_GATES].type, &in[GRADD_RNN_GRAD_U].type, &v));
    const bool lstm = v.kind == GRADD_RNN_LSTM, gru = v.kind == GRADD_RNN_GRU;
    const int64_t t = v.steps, b = v.batch, h = v.cells, p = v.state;
    const expected_t list[] = {
        {"U",               GRADD_RNN_GRAD_U,           true,        false, 2, {v.gates * h, p}},
        {"the first state", GRADD_RNN_GRAD_STATE,       true,        false, 2, {b, p}          },
        {"the first cells", GRADD_RNN_GRAD_CELLS,       lstm,        false, 2, {b, h}          },
        {"KEPT",            GRADD_RNN_GRAD_KEPT,        lstm || gru, true,  3, {t, b, h}       },
        {"Y",               GRADD_RNN_GRAD_Y,           gru,         false, 3, {t, b, p}       },
        {"the projection",  GRADD_RNN_GRAD_PROJ,        false,       false, 2, {p, h}          },
        {"dY",              GRADD_RNN_GRAD_DY,          false,       false, 3, {t, b, p}       },
        {"d(last state)",   GRADD_RNN_GRAD_DLAST,       false,       false, 2, {b, p}          },
        {"d(last cells)",   GRADD_RNN_GRAD_DLAST_CELLS, false,       false, 2, {b, h}          },
    };
    GRADD_TRY(check_all(in, n_in, &v, list, sizeof list / sizeof list[0]));
    *out = v;
    return GRADD_OK;
}

/* ---- products -------------------------------------------------------------------------------- */

/* [B, k] times a matrix [k, n], or times the transpose of one [n, k]. */
static gradd_gemm_t product(const gradd_rnn_t *v, int64_t n, int64_t k, bool transposed) {
    return (gradd_gemm_t){.dtype = v->dtype,
                          .result = v->wide,
                          .m = v->batch,
                          .n = n,
                          .k = k,
                          .a_m = k,
                          .a_k = 1,
                          .b_k = transposed ? 1 : n,
                          .b_n = transposed ? k : 1,
                          .alpha = 1};
}

gradd_gemm_t gradd_rnn_product(const gradd_rnn_t *v) {
    return product(v, v->gates * v->cells, v->state, true);
}

gradd_gemm_t gradd_rnn_projection(const gradd_rnn_t *v) {
    return product(v, v->state, v->cells, true);
}

gradd_gemm_t gradd_rnn_product_back(const gradd_rnn_t *v) {
    gradd_gemm_t g = product(v, v->state, v->gates * v->cells, false);
    g.accumulate = v->kind == GRADD_RNN_GRU;
    return g;
}

gradd_gemm_t gradd_rnn_projection_back(const gradd_rnn_t *v) {
    return product(v, v->cells, v->state, false);
}

static double operations(const gradd_rnn_t *v) {
    const double rows = (double)v->steps * (double)v->batch, state = (double)v->state;
    double each = 2 * (double)(v->gates * v->cells) * state;
    if (v->has_proj) each += 2 * (double)v->cells * state;
    return rows * each;
}

void gradd_rnn_cost(const gradd_infer_t *c, gradd_cost_t *cost) {
    gradd_rnn_t v;
    if (!gradd_rnn_of(c->in, c->n_in, c->attrs, &v)) cost->flops = operations(&v);
}

void gradd_rnn_grad_cost(const gradd_infer_t *c, gradd_cost_t *cost) {
    gradd_rnn_t v;
    if (!gradd_rnn_of_grad(c->in, c->n_in, c->attrs, &v)) cost->flops = operations(&v);
}
