/* Linear: a matrix product with one weight matrix, and a bias in the product's epilogue.
 *
 * Math: y[..., N] = x[..., K] W + b[N], with W [K, N], or [N, K] if transB. Recognition makes it
 * from MatMul and Add, or from Gemm. Saved for backward: x and W. Gradients: dx = dy W^T; dW = x^T
 * dy over all rows, in W's own layout; db = sum of dy over all rows, a reduction that has a fixed
 * order. The bias costs no pass over y. bf16 and f16 are summed in f32 and rounded once, after the
 * bias.
 *
 * LinearGelu: a linear layer and gelu by tanh, for devices that do both in one pass over memory.
 *
 * Math: p = x W + b as above, y = p / 2 (1 + tanh(sqrt(2 / pi) (p + 0.044715 p^3))). Saved for
 * backward: x, W, and p, which is the second result. In bf16 and f16 the gelu is that of p before
 * it is rounded, but where a device does one after the other.
 *
 * LinearCrossEntropy: the head of a language model and its loss in one, without logits in memory.
 *
 * Math: rows of logits z = x W + b, with W [K, V], or [V, K] if transB; y = c tanh(scale z / c)
 * with a softcap c, else scale z; loss = CrossEntropy(y, labels), with its attributes, num_items
 * and weights of the classes. "none" is not among the reductions: there a gradient arrives per row.
 * With `weights` m, one per row and without a gradient, the loss of row i is multiplied by m_i;
 * that is for "sum", and a row with a weight of 0 counts as one without a label. With `squares` q,
 * of the same kind, the loss is greater by sum q_i lse_i^2, lse_i = log sum exp(y_i), whatever the
 * labels: the z-loss of PaLM (Chowdhery et al. 2022). Its gradient is 2 q_i lse_i softmax(y_i).
 *
 * Further results, for training: the gradients of x, W and b for a loss gradient of 1. They are
 * formed while a chunk of logits is in memory (`chunk` rows of those that count, 0 = all at once),
 * so the backward only multiplies them by the gradient that arrives (ScaleGrad), and does nothing
 * if that is 1. Rows that do not count have a gradient of zero whatever x holds there, NaN
 * included, and cost nothing. */
#include "kernels/contract/kernel.h"
#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/half.h"
#include "kernels/cpu/linear_loss.h"
#include "kernels/describe/cross_entropy.h"
#include "kernels/describe/dispatch.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rowwise.h"
#include "kernels/rules/rules.h"

#include <math.h>
#include <string.h>

static int64_t rows_in(const gradd_type_t *x) {
    int64_t rows = 1;
    for (int i = 0; i + 1 < x->rank; i++)
        rows *= x->dims[i];
    return rows;
}

static gradd_status_t prepare_linear(const gradd_infer_t *c, gradd_prepared_t *out) {
    gradd_gemm_t g = gradd_gemm_of_linear(c->in, &c->out[0], c->attrs);
    g.threads = c->threads;
    g.parts = c->parts;
    return gradd_gemm_prepare(&g, out);
}

static gradd_status_t compute_linear(const gradd_launch_t *r) {
    return gradd_gemm_part(r->state, r->part,
                           &(gradd_gemm_operands_t){r->in[0].data, r->in[1].data, r->in[2].data,
                                                    r->out[0].data, r->workspace});
}

static gradd_status_t ref_linear(const gradd_launch_t *r) {
    gradd_gemm_t g = gradd_gemm_of_linear(r->in, &r->out[0].type, r->attrs);
    return gradd_gemm_ref(&g, r->in[0].data, r->in[1].data, r->in[2].data, r->out[0].data);
}

static gradd_status_t infer_linear(gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[0].type, *w = &c->in[1].type, *b = &c->in[2].type;
    bool trans = gradd_attr_int(c->attrs, "transB", 0);
    bool fits = x->rank >= 2 && w->rank == 2 && b->rank == 1 && w->dtype == x->dtype &&
                b->dtype == x->dtype && w->dims[trans] == x->dims[x->rank - 1] &&
                w->dims[!trans] == b->dims[0];
    if (!fits) {
        char tx[GRADD_TYPE_TEXT], tw[GRADD_TYPE_TEXT], tb[GRADD_TYPE_TEXT];
        return GRADD_FAIL(GRAPH, "x %s, W %s and bias %s do not make a linear layer",
                          gradd_type_format(x, tx), gradd_type_format(w, tw),
                          gradd_type_format(b, tb));
    }
    c->out[0] = *x;
    c->out[0].dims[x->rank - 1] = b->dims[0];
    return GRADD_OK;
}

static gradd_val_t product_of(gradd_builder_t *b, gradd_val_t x, gradd_val_t y, bool trans_x,
                              bool trans_y) {
    gradd_attr_t attrs[3] = {gradd_make_int("transA", trans_x), gradd_make_int("transB", trans_y),
                             gradd_make_float("alpha", 1)};
    return gradd_emit_attrs(b, "FusedMatMul", (gradd_val_t[]){x, y}, 2, attrs, 3);
}

static gradd_val_t as_matrix(gradd_builder_t *b, gradd_val_t v) {
    gradd_type_t t = *gradd_val_type(b, v);
    if (b->status) return GRADD_NONE;
    return gradd_reshape_to(b, v, (int64_t[]){rows_in(&t), t.dims[t.rank - 1]}, 2);
}

/* For a gradient dy of x W + b. */
static gradd_status_t grad_product(gradd_grad_t *g, gradd_val_t dy) {
    gradd_builder_t *b = g->b;
    bool trans = gradd_attr_int(g->attrs, "transB", 0);
    if (dy == GRADD_NONE) return b->status;
    if (g->need[0]) g->din[0] = product_of(b, dy, g->in[1], false, !trans);
    if (g->need[1]) {
        gradd_val_t x = as_matrix(b, g->in[0]), d = as_matrix(b, dy);
        g->din[1] = trans ? product_of(b, d, x, true, false) : product_of(b, x, d, true, false);
    }
    if (g->need[2]) g->din[2] = gradd_reduce_to(b, dy, g->in[2]);
    return b->status;
}

static gradd_status_t grad_linear(gradd_grad_t *g) {
    return grad_product(g, g->dout[0]);
}

static gradd_status_t expand_linear(gradd_expand_t *x) {
    gradd_builder_t *b = x->b;
    const gradd_dtype_t dtype = gradd_val_type(b, x->in[0])->dtype;
    gradd_val_t w = gradd_wide(b, x->in[1]);
    if (gradd_attr_int(x->attrs, "transB", 0)) w = gradd_transpose(b, w, (int64_t[]){1, 0}, 2);
    gradd_val_t y = GRADD_EMIT(b, "MatMul", gradd_wide(b, x->in[0]), w);
    y = GRADD_EMIT(b, "Add", y, gradd_wide(b, x->in[2]));
    x->out[0] = gradd_cast(b, y, dtype);
    return b->status;
}

/* 2 m n k, and one addition of the bias per element. */
static void cost_linear(const gradd_infer_t *c, gradd_cost_t *cost) {
    const gradd_type_t *x = &c->in[0].type;
    double elements = (double)gradd_type_count(&c->out[0]);
    cost->flops = elements * (2 * (double)x->dims[x->rank - 1] + 1);
}

/* ---- LinearGelu ------------------------------------------------------------------------------ */

static gradd_status_t infer_gelu(gradd_infer_t *c) {
    GRADD_TRY(infer_linear(c));
    if (c->n_out > 1) c->out[1] = c->out[0];
    return GRADD_OK;
}

static gradd_status_t grad_gelu(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    const gradd_attr_t tanh = gradd_make_string("approximate", "tanh");
    gradd_val_t dp = GRADD_NONE;
    if (g->dout[0] != GRADD_NONE) {
        const gradd_val_t in[2] = {g->dout[0], g->output(g, 1)};
        dp = gradd_emit_attrs(b, "GeluGrad", in, 2, &tanh, 1);
    }
    if (g->n_out > 1 && g->dout[1] != GRADD_NONE)
        dp = dp == GRADD_NONE ? g->dout[1] : GRADD_EMIT(b, "Add", dp, g->dout[1]);
    return grad_product(g, dp);
}

static gradd_status_t expand_gelu(gradd_expand_t *x) {
    gradd_builder_t *b = x->b;
    const gradd_attr_t tanh = gradd_make_string("approximate", "tanh");
    const gradd_dtype_t dtype = gradd_val_type(b, x->in[0])->dtype;
    const gradd_val_t in[3] = {gradd_wide(b, x->in[0]), gradd_wide(b, x->in[1]),
                               gradd_wide(b, x->in[2])};
    gradd_val_t p = gradd_emit_attrs(b, "Linear", in, 3, x->attrs.v, x->attrs.n);
    x->out[0] = gradd_cast(b, gradd_emit_attrs(b, "Gelu", &p, 1, &tanh, 1), dtype);
    if (x->n_out > 1) x->out[1] = gradd_cast(b, p, dtype);
    return b->status;
}

static gradd_status_t ref_gelu(const gradd_launch_t *r) {
    const gradd_view_t *y = &r->out[0];
    const int64_t n = gradd_type_count(&y->type);
    GRADD_TRY(ref_linear(r));
    if (r->n_out > 1 && r->out[1].data)
        memcpy(r->out[1].data, y->data, (size_t)gradd_type_bytes(&y->type));
    for (int64_t i = 0; i < n; i++) {
        const bool wide = gradd_dtype_is_f64(y->type.dtype);
        const double p = wide ? ((double *)y->data)[i] : (double)((float *)y->data)[i];
        const double v = p / 2 * (1 + tanh(0.79788456080286536 * (p + 0.044715 * p * p * p)));
        if (wide)
            ((double *)y->data)[i] = v;
        else
            ((float *)y->data)[i] = (float)v;
    }
    return GRADD_OK;
}

/* ---- LinearCrossEntropy: shape rule --------------------------------------------------------- */

static gradd_status_t misfit(const gradd_infer_t *c) {
    char tx[GRADD_TYPE_TEXT], tw[GRADD_TYPE_TEXT];
    return GRADD_FAIL(GRAPH, "x %s, W %s and their bias do not make logits",
                      gradd_type_format(&c->in[GRADD_HEAD_X].type, tx),
                      gradd_type_format(&c->in[GRADD_HEAD_W].type, tw));
}

static gradd_status_t infer_head(gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[GRADD_HEAD_X].type, *w = &c->in[GRADD_HEAD_W].type;
    const bool trans = gradd_attr_int(c->attrs, "transB", 0);
    const gradd_type_t *bias =
        c->n_in > GRADD_HEAD_BIAS ? &c->in[GRADD_HEAD_BIAS].type : &(gradd_type_t){0};
    if (x->rank < 2 || w->rank != 2 || w->dtype != x->dtype ||
        w->dims[trans] != x->dims[x->rank - 1])
        return misfit(c);
    if (bias->dtype &&
        (bias->dtype != x->dtype || bias->rank != 1 || bias->dims[0] != w->dims[!trans]))
        return misfit(c);
    const gradd_type_t logits = gradd_head_logits(c->in, c->attrs);
    const gradd_loss_operands_t operands = gradd_head_operands(c->in, c->n_in);
    GRADD_TRY(gradd_loss_check(&logits, &operands, c->attrs));
    if (gradd_loss_reduction(c->attrs) == GRADD_REDUCE_NONE)
        return GRADD_FAIL(GRAPH, "LinearCrossEntropy needs a reduction");
    for (int i = GRADD_HEAD_WEIGHTS; i < c->n_in; i++)
        if (c->in[i].type.dtype && gradd_type_count(&c->in[i].type) != rows_in(x))
            return GRADD_FAIL(GRAPH, "LinearCrossEntropy: weights must be one per row");
    if (c->n_in > GRADD_HEAD_WEIGHTS && c->in[GRADD_HEAD_WEIGHTS].type.dtype &&
        gradd_loss_reduction(c->attrs) != GRADD_REDUCE_SUM)
        return GRADD_FAIL(GRAPH, "LinearCrossEntropy: weights of rows need reduction=\"sum\"");
    c->out[GRADD_HEAD_LOSS] = (gradd_type_t){gradd_loss_dtype(x->dtype), 0, {0}};
    if (c->n_out > GRADD_HEAD_DX) c->out[GRADD_HEAD_DX] = *x;
    if (c->n_out > GRADD_HEAD_DW) c->out[GRADD_HEAD_DW] = *w;
    if (c->n_out > GRADD_HEAD_DBIAS) /* that of a zero, if there is none */
        c->out[GRADD_HEAD_DBIAS] = (gradd_type_t){x->dtype, 1, {w->dims[!trans]}};
    return GRADD_OK;
}

/* ---- gradient rule --------------------------------------------------------------------------- */

/* Input i has its gradient as output `formed`. */
static void scale_formed(gradd_grad_t *g, int i, int formed) {
    if (i >= g->n_in || g->in[i] == GRADD_NONE || !g->need[i]) return;
    g->din[i] = GRADD_EMIT(g->b, "ScaleGrad", g->output(g, formed), g->dout[0]);
}

static gradd_status_t grad_head(gradd_grad_t *g) {
    for (int j = 1; j < g->n_out; j++)
        if (g->dout[j] != GRADD_NONE)
            return GRADD_FAIL(UNSUPPORTED, "a gradient arrives for a gradient");
    if (g->dout[0] == GRADD_NONE) return GRADD_OK;
    scale_formed(g, GRADD_HEAD_X, GRADD_HEAD_DX);
    scale_formed(g, GRADD_HEAD_W, GRADD_HEAD_DW);
    scale_formed(g, GRADD_HEAD_BIAS, GRADD_HEAD_DBIAS);
    return g->b->status;
}

/* ---- expansion ------------------------------------------------------------------------------- */

typedef struct plain_linear_s {
    gradd_expand_t *x;
    gradd_builder_t *b;
    gradd_dtype_t dtype, wide;
    gradd_val_t rows, weight; /* wide, as matrices */
    bool trans;
    double softcap, scale;
} plain_linear_t;

static gradd_val_t operand(const gradd_expand_t *x, int i) {
    return i < x->n_in ? x->in[i] : GRADD_NONE;
}

/* One number per row, [R, 1]. */
static gradd_val_t column(gradd_builder_t *b, gradd_val_t v) {
    if (b->status) return GRADD_NONE;
    return gradd_reshape_to(b, v, (int64_t[]){gradd_type_count(gradd_val_type(b, v)), 1}, 2);
}

static gradd_val_t transposed(gradd_builder_t *b, gradd_val_t v) {
    return gradd_transpose(b, v, (int64_t[]){1, 0}, 2);
}

/* Of all rows, [R, V], in the shape that the loss knows positions by. */
static gradd_val_t logits_of(const plain_linear_t *p) {
    gradd_builder_t *b = p->b;
    gradd_val_t bias = gradd_wide(b, operand(p->x, GRADD_HEAD_BIAS));
    gradd_val_t w = p->trans ? transposed(b, p->weight) : p->weight;
    gradd_val_t z = GRADD_EMIT(b, "MatMul", gradd_wide(b, p->x->in[GRADD_HEAD_X]), w);
    if (bias != GRADD_NONE) z = GRADD_EMIT(b, "Add", z, bias);
    if (p->softcap || p->scale != 1)
        z = gradd_scaled(b, z, p->softcap ? p->scale / p->softcap : p->scale);
    return p->softcap ? gradd_scaled(b, GRADD_EMIT(b, "Tanh", z), p->softcap) : z;
}

/* From the gradient of what the loss is of to that of the product. */
static gradd_val_t before_cap(const plain_linear_t *p, gradd_val_t dz, gradd_val_t y) {
    gradd_builder_t *b = p->b;
    if (p->scale != 1) dz = gradd_scaled(b, dz, p->scale);
    if (!p->softcap) return dz;
    gradd_val_t t = gradd_scaled(b, y, 1 / p->softcap);
    gradd_val_t slope =
        GRADD_EMIT(b, "Sub", gradd_const_scalar(b, p->wide, 1), GRADD_EMIT(b, "Mul", t, t));
    return GRADD_EMIT(b, "Mul", dz, slope);
}

static void expand_gradients(const plain_linear_t *p, gradd_val_t dz) {
    gradd_expand_t *x = p->x;
    gradd_builder_t *b = p->b;
    dz = as_matrix(b, dz);
    gradd_val_t columns = transposed(b, dz), w = p->trans ? p->weight : transposed(b, p->weight);
    gradd_val_t dx = gradd_cast(b, GRADD_EMIT(b, "MatMul", dz, w), p->dtype);
    x->out[GRADD_HEAD_DX] = gradd_reshape_as(b, dx, x->in[GRADD_HEAD_X]);
    if (x->n_out > GRADD_HEAD_DW) {
        gradd_val_t dw = p->trans ? GRADD_EMIT(b, "MatMul", columns, p->rows)
                                  : GRADD_EMIT(b, "MatMul", transposed(b, p->rows), dz);
        x->out[GRADD_HEAD_DW] = gradd_cast(b, dw, p->dtype);
    }
    if (x->n_out <= GRADD_HEAD_DBIAS || b->status) return;
    const int64_t classes = gradd_val_type(b, dz)->dims[1];
    gradd_val_t sum = gradd_cast(b, gradd_reduce_from(b, "ReduceSum", columns, 1), p->dtype);
    x->out[GRADD_HEAD_DBIAS] = gradd_reshape_to(b, sum, &classes, 1);
}

/* Attributes that are the loss's own. */
static int loss_attrs(gradd_attrs_t all, gradd_attr_t *out) {
    static const char *const names[] = {GRADD_CE_REDUCTION, GRADD_CE_IGNORE_INDEX, GRADD_CE_SHIFT,
                                        GRADD_CE_SMOOTHING};
    int n = 0;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (gradd_attr_find(all, names[i])) out[n++] = *gradd_attr_find(all, names[i]);
    return n;
}

/* The loss, and with `dz` the gradient of logits z for a gradient of 1 of it. */
static gradd_val_t expand_loss(const plain_linear_t *p, gradd_val_t z, gradd_val_t *dz) {
    gradd_builder_t *b = p->b;
    const gradd_expand_t *x = p->x;
    gradd_attr_t attrs[5];
    int n = loss_attrs(x->attrs, attrs);
    gradd_val_t weights = operand(x, GRADD_HEAD_WEIGHTS), out[2];
    const bool weighted = weights != GRADD_NONE;
    for (int i = 0; i < n && weighted; i++)
        if (!strcmp(attrs[i].name, GRADD_CE_REDUCTION)) attrs[i] = attrs[--n];
    gradd_val_t labels = operand(x, GRADD_HEAD_LABELS);
    if (weighted) {
        attrs[n++] = gradd_make_string(GRADD_CE_REDUCTION, "none");
        weights = gradd_reshape_as(b, gradd_cast(b, weights, p->wide), labels);
    }
    gradd_val_t in[4] = {z, labels, operand(x, GRADD_HEAD_ITEMS), operand(x, GRADD_HEAD_CLASSES)};
    const int n_in = in[3] != GRADD_NONE ? 4 : in[2] != GRADD_NONE ? 3 : 2;
    if (b->status) return GRADD_NONE;
    const gradd_emit_t emit = {"CrossEntropy", in, n_in, attrs, n};
    b->status = b->emit(b, &emit, out, dz ? 2 : 1);
    if (dz && !b->status) {
        gradd_val_t one = weighted ? weights : gradd_const_scalar(b, p->wide, 1);
        gradd_val_t back[6] = {one, z, in[1], out[1], in[2], in[3]};
        *dz = gradd_emit_attrs(b, "CrossEntropyGrad", back, n_in + 2, attrs, n);
    }
    if (!weighted || b->status) return out[0];
    gradd_val_t each = column(b, GRADD_EMIT(b, "Mul", weights, out[0]));
    return gradd_reshape_to(b, gradd_reduce_from(b, "ReduceSum", each, 0), NULL, 0);
}

/* Adds the weighted squares of the log-sum-exps of logits z. */
static void expand_squares(const plain_linear_t *p, gradd_val_t z, gradd_val_t *loss,
                           gradd_val_t *dz) {
    gradd_builder_t *b = p->b;
    gradd_val_t weights = operand(p->x, GRADD_HEAD_SQUARES);
    if (weights == GRADD_NONE || b->status) return;
    const gradd_val_t rows = as_matrix(b, z);
    weights = column(b, gradd_cast(b, weights, p->wide));
    gradd_val_t lse = column(b, gradd_reduce_from(b, "ReduceLogSumExp", rows, 1));
    gradd_val_t each = GRADD_EMIT(b, "Mul", weights, lse);
    gradd_val_t sum = gradd_reduce_from(b, "ReduceSum", GRADD_EMIT(b, "Mul", each, lse), 0);
    *loss = GRADD_EMIT(b, "Add", *loss, gradd_reshape_to(b, sum, NULL, 0));
    if (!dz || b->status) return;
    gradd_attr_t axis = gradd_make_int("axis", 1);
    gradd_val_t share = gradd_emit_attrs(b, "Softmax", &rows, 1, &axis, 1);
    gradd_val_t more = GRADD_EMIT(b, "Mul", share, gradd_scaled(b, each, 2));
    *dz = GRADD_EMIT(b, "Add", as_matrix(b, *dz), more);
}

static gradd_status_t expand_head(gradd_expand_t *x) {
    gradd_builder_t *b = x->b;
    plain_linear_t p = {.x = x,
                        .b = b,
                        .dtype = gradd_val_type(b, x->in[GRADD_HEAD_X])->dtype,
                        .rows = as_matrix(b, gradd_wide(b, x->in[GRADD_HEAD_X])),
                        .weight = gradd_wide(b, x->in[GRADD_HEAD_W]),
                        .trans = gradd_attr_int(x->attrs, GRADD_HEAD_TRANS, 0),
                        .softcap = gradd_attr_float(x->attrs, GRADD_HEAD_SOFTCAP, 0),
                        .scale = gradd_attr_float(x->attrs, GRADD_HEAD_SCALE, 1)};
    p.wide = gradd_loss_dtype(p.dtype);
    const bool trains = x->n_out > 1;
    gradd_val_t z = logits_of(&p), dz = GRADD_NONE;
    gradd_val_t loss = expand_loss(&p, z, trains ? &dz : NULL);
    expand_squares(&p, z, &loss, trains ? &dz : NULL);
    x->out[GRADD_HEAD_LOSS] = loss;
    if (b->status || !trains) return b->status;
    z = as_matrix(b, z), dz = as_matrix(b, dz);
    expand_gradients(&p, before_cap(&p, dz, z));
    return b->status;
}

/* ---- ScaleGrad: a gradient that was formed for 1, for what arrives --------------------------- */

#define SCALE(T)                                                                                   \
    GRADD_MULTIARCH static void scale_##T(T *y, const T *x, int64_t n, T factor) {                 \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) y[i] = x[i] * factor;                  \
    }
SCALE(float)
SCALE(double)

enum { BLOCK = 1024 };

static void scale_block(gradd_dtype_t dtype, char *y, const char *x, int64_t n, double factor) {
    float wide[BLOCK];
    if (factor == 1) {
        memcpy(y, x, (size_t)n * gradd_dtype_bytes(dtype));
    } else if (gradd_dtype_is_f64(dtype)) {
        scale_double((double *)y, (const double *)x, n, factor);
    } else if (dtype == GRADD_DT_F32) {
        scale_float((float *)y, (const float *)x, n, (float)factor);
    } else {
        gradd_half_widen(wide, x, dtype, n);
        scale_float(wide, wide, n, (float)factor);
        gradd_half_narrow(y, wide, dtype, n);
    }
}

static gradd_status_t compute_scale(const gradd_launch_t *r) {
    const gradd_dtype_t dtype = r->in[0].type.dtype;
    const int64_t n = gradd_type_count(&r->in[0].type), blocks = (n + BLOCK - 1) / BLOCK;
    const size_t bytes = gradd_dtype_bytes(dtype);
    const double factor = gradd_loss_number(&r->in[1], 0);
    if (factor == 1 && r->out[0].data == r->in[0].data) return GRADD_OK;
#pragma omp parallel for schedule(static) if (n >= GRADD_PARALLEL_MIN)
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t at = b * BLOCK, m = n - at < BLOCK ? n - at : BLOCK;
        const size_t from = (size_t)at * bytes;
        scale_block(dtype, (char *)r->out[0].data + from, (const char *)r->in[0].data + from, m,
                    factor);
    }
    return GRADD_OK;
}

static gradd_status_t ref_scale(const gradd_launch_t *r) {
    const double factor = gradd_loss_number(&r->in[1], 0);
    for (int64_t i = 0, n = gradd_type_count(&r->in[0].type); i < n; i++)
        gradd_loss_store(&r->out[0], i, gradd_loss_number(&r->in[0], i) * factor);
    return GRADD_OK;
}

static gradd_status_t infer_scale(gradd_infer_t *c) {
    c->out[0] = c->in[0].type;
    if (gradd_type_count(&c->in[1].type) == 1) return GRADD_OK;
    return GRADD_FAIL(GRAPH, "a gradient is scaled by one number");
}

static gradd_status_t expand_scale(gradd_expand_t *x) {
    gradd_builder_t *b = x->b;
    const gradd_dtype_t dtype = gradd_val_type(b, x->in[0])->dtype;
    gradd_val_t v = gradd_wide(b, x->in[0]);
    if (b->status) return b->status;
    gradd_val_t factor = gradd_cast(b, x->in[1], gradd_val_type(b, v)->dtype);
    factor = gradd_reshape_to(b, factor, (int64_t[]){0}, 0);
    x->out[0] = gradd_cast(b, GRADD_EMIT(b, "Mul", v, factor), dtype);
    return b->status;
}

/* ---- cases and rows -------------------------------------------------------------------------- */

#define IGNORED "i64[5]={0,-100,6,-100,2}"
/* Logits, and their gradients, are rounded to bf16. */
#define ROUNDED   .bf16_tol = 0x1p-8
#define GRADIENTS .bf16_tol = 0x1p-6, .grad_tol = -1

GRADD_OPS(
    linear,
    GRADD_OP("Linear", "com.gradd", 1, (3, 3), (1, 1), .flags = GRADD_OP_INTERNAL | GRADD_OP_COSTLY,
             .types = {GRADD_T_FLOAT}, .attrs = GRADD_ATTR_LIST({"transB", GRADD_ATTR_INT, false}),
             .infer = infer_linear, .rowwise = gradd_rowwise_product, .grad = grad_linear,
             .expand = expand_linear, .ref = GRADD_REF(ref_linear),
             .cases = GRADD_CASES({.text = "f32[3,4] f32[4,5] f32[5]"},
                                  {.text = "f32[3,4] f32[5,4] f32[5] | transB=1"},
                                  {.text = "f32[2,3,4] f32[5,4] f32[5] | transB=1"},
                                  {.text = "f32[2,3,4] f32[4,1] f32[1]"},
                                  {.text = "f32[2,1,3,7] f32[7,6] f32[6]"},
                                  {.text = "f32[0,4] f32[4,5] f32[5]"},
                                  {.text = "f32[3,0] f32[0,5] f32[5]"},
                                  {.text = "f32[1,1] f32[1,1] f32[1] | transB=1"},
                                  {.text = "f32[5,13,70] f32[33,70] f32[33] | transB=1"})),
    GRADD_OP("LinearGelu", "com.gradd", 1, (3, 3), (1, 2),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_COSTLY, .types = {GRADD_T_FLOAT},
             .attrs = GRADD_ATTR_LIST({"transB", GRADD_ATTR_INT, false}), .infer = infer_gelu,
             .rowwise = gradd_rowwise_product, .grad = grad_gelu, .expand = expand_gelu,
             .ref = GRADD_REF(ref_gelu),
             .cases = GRADD_CASES({.text = "f32[3,4] f32[4,8] f32[8]"},
                                  {.text = "f32[3,4] f32[4,8] f32[8] -> 2"},
                                  {.text = "f32[3,4] f32[4,5] f32[5] -> 2"},
                                  {.text = "f32[2,3,4] f32[8,4] f32[8] | transB=1 -> 2"},
                                  {.text = "f32[2,3,4] f32[4,1] f32[1]"},
                                  {.text = "f32[0,4] f32[4,8] f32[8] -> 2"},
                                  {.text = "f32[3,0] f32[0,8] f32[8] -> 2"},
                                  {.text = "f32[5,13,70] f32[40,70] f32[40] | transB=1 -> 2"})),
    GRADD_OP(
        "LinearCrossEntropy", "com.gradd", 1, (3, 8), (1, 4),
        .flags = GRADD_OP_INTERNAL | GRADD_OP_COSTLY | GRADD_OP_CHUNKED,
        .no_rule = 1 << GRADD_HEAD_ITEMS | 1 << GRADD_HEAD_CLASSES | 1 << GRADD_HEAD_WEIGHTS |
                   1 << GRADD_HEAD_SQUARES,
        .formed = {[GRADD_HEAD_DX] = GRADD_HEAD_X + 1,
                   [GRADD_HEAD_DW] = GRADD_HEAD_W + 1,
                   [GRADD_HEAD_DBIAS] = GRADD_HEAD_BIAS + 1},
        .types = {GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_T_INDEX, GRADD_T_FLOAT, GRADD_T_NUM,
                  GRADD_T_NUM, GRADD_T_NUM},
        .attrs = GRADD_ATTR_LIST({GRADD_CE_REDUCTION, GRADD_ATTR_STRING, false},
                                 {GRADD_CE_IGNORE_INDEX, GRADD_ATTR_INT, false},
                                 {GRADD_CE_SHIFT, GRADD_ATTR_INT, false},
                                 {GRADD_CE_SMOOTHING, GRADD_ATTR_FLOAT, false},
                                 {GRADD_HEAD_TRANS, GRADD_ATTR_INT, false},
                                 {GRADD_HEAD_SOFTCAP, GRADD_ATTR_FLOAT, false},
                                 {GRADD_HEAD_SCALE, GRADD_ATTR_FLOAT, false},
                                 {GRADD_HEAD_CHUNK, GRADD_ATTR_INT, false}),
        .infer = infer_head, .grad = grad_head, .expand = expand_head,
        .ref = GRADD_REF(gradd_head_ref),
        .cases = GRADD_CASES(
            {.text = "f32[5,3] f32[3,7] i64[5]:(0,6)", ROUNDED},
            {.text = "f32[5,3] f32[7,3] i32[5]:(0,6) | transB=1 chunk=2", ROUNDED},
            {.text = "f32[5,3] f32[7,3] " IGNORED " | transB=1 ignore_index=-100 chunk=1", ROUNDED},
            {.text = "f32[5,3] f32[7,3] " IGNORED " f32[7] | transB=1 ignore_index=-100", ROUNDED},
            {.text = "f32[5,3] f32[3,7] " IGNORED " f32[7] | ignore_index=-100 chunk=2", ROUNDED},
            {.text = "f32[2,4,3] f32[7,3] i64[2,4]:(0,6) | transB=1 shift=1 smoothing=0.2",
             ROUNDED},
            {.text = "f32[2,4,3] f32[7,3] i64[2,4]:(0,6) - i64[]={5} | transB=1 shift=1 "
                     "reduction=\"sum\" chunk=4",
             ROUNDED},
            {.text = "f32[5,3] f32[7,3] i64[5]:(0,6) f32[7] | transB=1 softcap=1.5 scale=0.7",
             ROUNDED},
            {.text = "f32[5,3] f32[7,3] i64[5]:(0,6) | transB=1 scale=-0.5 smoothing=0.1", ROUNDED},
            {.text = "f32[2,3] f32[4,3] i64[2]={-1,-1} | transB=1 ignore_index=-1",
             ROUNDED,
             .grad_tol = -1},
            {.text = "f32[5,3] f32[7,3] " IGNORED " - - f32[7]:(0.1,2) | transB=1 "
                     "ignore_index=-100 chunk=2",
             ROUNDED},
            {.text = "f32[5,3] f32[7,3] i64[5]:(0,6) f32[7] i64[]={5} f32[7]:(0.1,2) | transB=1 "
                     "reduction=\"sum\" smoothing=0.2 softcap=1.5",
             ROUNDED},
            {.text = "f32[0,3] f32[4,3] i64[0] | transB=1 reduction=\"sum\"", ROUNDED},
            {.text = "f32[1,0] f32[4,0] i64[1]={2} | transB=1", ROUNDED},
            {.text = "f32[5,3] f32[7,3] " IGNORED
                     " f32[7] | transB=1 ignore_index=-100 chunk=1 -> 4",
             GRADIENTS},
            {.text = "f32[5,3] f32[3,7] " IGNORED " f32[7] | ignore_index=-100 softcap=2.0 -> 4",
             GRADIENTS},
            {.text = "f32[3,2] f32[4,2] i64[3]={-1,-1,-1} - - | transB=1 ignore_index=-1 -> 3",
             GRADIENTS},
            {.text = "f32[0,3] f32[4,3] i64[0] | transB=1 reduction=\"sum\" -> 3", GRADIENTS},
            {.text = "f32[67,33]:(-0.5,0.5) f32[1031,33]:(-0.5,0.5) i64[67]:(0,1030) | "
                     "ignore_index=7 transB=1 "
                     "chunk=32 -> 3",
             GRADIENTS},
            {.text = "f32[2,60,19]:(-0.5,0.5) f32[19,531]:(-0.5,0.5) i64[2,60]:(0,9) - f32[]={40} "
                     "| ignore_index=3 "
                     "chunk=48 shift=1 reduction=\"sum\" -> 3",
             GRADIENTS},
            {.text = "f32[2,60,19]:(-0.5,0.5) f32[1531,19]:(-0.5,0.5) i64[2,60]:(0,9) - - "
                     "f32[1531]:(0,2) | transB=1 ignore_index=3 chunk=48 shift=1 smoothing=0.1 "
                     "softcap=2.0 -> 3",
             GRADIENTS},
            {.text = "f32[5,3] f32[7,3] " IGNORED
                     " - - - - f32[5] | transB=1 ignore_index=-100 chunk=2",
             ROUNDED},
            {.text = "f32[2,4,3] f32[7,3] i64[2,4]:(0,6) f32[7] i64[]={5} - - f32[8] | transB=1 "
                     "shift=1 reduction=\"sum\" softcap=1.5 scale=0.7 smoothing=0.1",
             ROUNDED},
            {.text = "f32[5,3] f32[3,7] " IGNORED " - - - f32[5] f32[5] | ignore_index=-100 "
                     "reduction=\"sum\"",
             ROUNDED},
            {.text = "f32[5,3]:(0,1) f32[3,7]:(0,1) " IGNORED " - - f32[7]:(0.1,2) f32[5] f32[5] | "
                     "ignore_index=-100 reduction=\"sum\" smoothing=0.2",
             ROUNDED},
            {.text = "f32[5,3] f32[7,3] " IGNORED " f32[7] - - - f32[5]={0.5,0,0,0.25,1} | "
                     "transB=1 ignore_index=-100 chunk=2 -> 4",
             GRADIENTS},
            {.text = "f32[5,3] f32[3,7] " IGNORED " f32[7] - f32[7]:(0.1,2) f32[5] f32[5] | "
                     "ignore_index=-100 softcap=2.0 reduction=\"sum\" smoothing=0.1 -> 4",
             GRADIENTS},
            {.text = "f32[67,33]:(-0.5,0.5) f32[1031,33]:(-0.5,0.5) i64[67]:(0,1030) - - - "
                     "f32[67] f32[67] | ignore_index=7 transB=1 reduction=\"sum\" chunk=32 -> 3",
             GRADIENTS},
            /* several blocks of the weight's gradient */
            {.text = "f32[9,600]:(-0.1,0.1) f32[1500,600]:(-0.1,0.1) i64[9]:(0,9) | transB=1 "
                     "ignore_index=3 chunk=4 -> 3",
             GRADIENTS})),
    GRADD_OP("ScaleGrad", "com.gradd", 1, (2, 2), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD, .types = {GRADD_T_FLOAT, GRADD_T_FLOAT},
             .infer = infer_scale, .expand = expand_scale, .ref = GRADD_REF(ref_scale),
             .cases = GRADD_CASES({.text = "f32[3,4] f32[]"}, {.text = "f32[0,4] f32[1]"},
                                  {.text = "f32[3,700] f32[]={1}"},
                                  {.text = "f32[211,173] f32[]={-0.3}"})));

GRADD_KERNELS(cpu, linear,
              GRADD_GEMM_KERNELS("Linear", .prepare = prepare_linear, .compute = compute_linear,
                                 .cost = cost_linear),
              GRADD_KERNEL("LinearCrossEntropy", "in chunks",
                           .types = {GRADD_T_BF16_F32_F64, GRADD_T_BF16_F32_F64, GRADD_T_INDEX,
                                     GRADD_T_BF16_F32_F64, GRADD_T_F32_F64 | GRADD_T_INT,
                                     GRADD_T_F32_F64, GRADD_T_F32_F64 | GRADD_T_INT,
                                     GRADD_T_F32_F64 | GRADD_T_INT},
                           .compute = gradd_head_compute, .prepare = gradd_head_prepare,
                           .unprepare = gradd_head_unprepare, .makes_parts = true,
                           .cost = gradd_head_cost),
              GRADD_KERNEL("ScaleGrad", "loop", .rowwise = gradd_rowwise_map,
                           .types = {GRADD_T_FLOAT, GRADD_T_F32_F64}, .inplace = 1,
                           .compute = compute_scale));
