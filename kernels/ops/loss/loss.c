/* Classification losses: SoftmaxCrossEntropyLoss, NegativeLogLikelihoodLoss, and their gradients.
 *
 * Math: row i has C scores x and a label l; loss_i = w[l] (log sum exp(x) - x[l]), or -w[l] x[l]
 * where x are log-probabilities already; rows whose label is ignore_index do not count. mean
 * divides by the sum of the weights of the rows that count (0 / 0 = NaN if none does, as in torch).
 * Shapes: scores [N, C, D...], labels [N, D...], weights [C]; D contiguous inside C.
 * Saved for backward: scores and labels. The gradient forms softmax(x) again: one pass of exp
 * against keeping a second tensor as large as the scores. */
#include "kernels/math/loss.h"
#include "kernels/contract/fault.h"
#include "kernels/contract/kernel.h"
#include "kernels/cpu/map.h"
#include "kernels/cpu/parts.h"
#include "kernels/cpu/pick.h"
#include "kernels/cpu/softmax_rows.h"
#include "kernels/describe/cross_entropy.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

#include <string.h>

/* ---- kernels -------------------------------------------------------------------------------- */

typedef struct loss_s {
    int64_t n, c, d, rows; /* rows = n * d */
    gradd_reduction_t reduction;
    bool ignores;
    int64_t ignore;
    const gradd_view_t *given, *weights; /* labels; weights NULL = all one */
    int64_t *labels;                     /* checked copy, -1 = the row is ignored */
    double total;                        /* of the weights */
    gradd_range_t part;                  /* rows */
    bool ends;                           /* with this part */
} loss_t;

/* type: the scores'. In scratch lie the total, `skip` numbers per row, and the copy of the labels.
 */
static loss_t loss_of(const gradd_launch_t *r, const gradd_type_t *type, int labels, int64_t skip) {
    loss_t l = {.n = type->dims[0], .c = type->dims[1], .d = 1, .given = &r->in[labels]};
    for (int i = 2; i < type->rank; i++)
        l.d *= type->dims[i];
    l.rows = l.n * l.d;
    l.labels = (int64_t *)r->workspace + 1 + skip * l.rows;
    l.part = gradd_part_of(r, l.rows);
    l.ends = gradd_part_is_last(r);
    l.reduction = gradd_loss_reduction(r->attrs);
    l.ignores = gradd_attr_find(r->attrs, GRADD_CE_IGNORE_INDEX) != NULL;
    l.ignore = gradd_attr_int(r->attrs, GRADD_CE_IGNORE_INDEX, 0);
    if (r->n_in > labels + 1 && r->in[labels + 1].type.dtype) l.weights = &r->in[labels + 1];
    return l;
}

static bool counts(const loss_t *l, int64_t row) {
    return l->labels[row] >= 0;
}

/* Weight of a row; 0 for one that is ignored. */
static double weight_at(const loss_t *l, int64_t row) {
    int64_t label = l->labels[row];
    if (label < 0) return 0;
    if (!l->weights) return 1;
    if (l->weights->type.dtype == GRADD_DT_F32)
        return (double)((const float *)l->weights->data)[label];
    return ((const double *)l->weights->data)[label];
}

/* Labels index memory, and a client may change them while we run: labels are copied, and only the
 * checked copy is used. */
static gradd_status_t copy_labels(loss_t *l) {
    for (int64_t i = 0; i < l->rows; i++) {
        int64_t label = gradd_pick_index(l->given, i);
        bool ignored = l->ignores && label == l->ignore;
        l->labels[i] = ignored ? -1 : label;
        if (ignored) continue;
        if (label < 0 || label >= l->c)
            return gradd_fault_fail(&(gradd_fault_t){
                .kind = GRADD_FAULT_LABEL, .value = label, .limit = l->c, .position = i});
        l->total += weight_at(l, i);
    }
    return GRADD_OK;
}

/* By the first part, for all of them. */
static gradd_status_t read_labels(const gradd_launch_t *r, loss_t *l) {
    double *total = r->workspace;
    if (!r->part) {
        GRADD_TRY(copy_labels(l));
        *total = l->total;
    }
    l->total = *total;
    return GRADD_OK;
}

/* The factor of the gradient of row i. */
static double row_scale(const loss_t *l, const gradd_view_t *d, int64_t i) {
    int64_t at = l->reduction == GRADD_REDUCE_NONE ? i : 0;
    double dy = d->type.dtype == GRADD_DT_F32 ? (double)((const float *)d->data)[at]
                                              : ((const double *)d->data)[at];
    double w = weight_at(l, i);
    return l->reduction == GRADD_REDUCE_MEAN ? dy * (w / l->total) : dy * w;
}

#define LOSS_KERNELS(T, S)                                                                         \
    /* log sum exp and the maximum of a row of C scores, `step` apart */                           \
    static double log_sum_##S(const T *x, int64_t n, int64_t step, bool ref, T *max) {             \
        double sum = 0;                                                                            \
        if (step == 1 && !ref) {                                                                   \
            *max = gradd_row_max(x, n);                                                            \
            return log(gradd_row_exp(x, n, *max, NULL));                                           \
        }                                                                                          \
        *max = x[0];                                                                               \
        for (int64_t i = 0; i < n; i++)                                                            \
            *max = x[i * step] > *max || x[i * step] != x[i * step] ? x[i * step] : *max;          \
        for (int64_t i = 0; i < n; i++)                                                            \
            sum += exp((double)x[i * step] - (double)*max);                                        \
        return log(sum);                                                                           \
    }                                                                                              \
    GRADD_MULTIARCH static void log_probs_##S(const T *x, T *z, int64_t n, int64_t step, T max,    \
                                              T log_sum) {                                         \
        if (step == 1) {                                                                           \
            _Pragma("omp simd") for (int64_t i = 0; i < n; i++) z[i] = (x[i] - max) - log_sum;     \
        } else                                                                                     \
            for (int64_t i = 0; i < n; i++)                                                        \
                z[i * step] = (x[i * step] - max) - log_sum;                                       \
    }                                                                                              \
    /* per-row losses into `each`; logp may be NULL; scores are log-probabilities if !normalise */ \
    static void forward_##S(const loss_t *l, const T *x, T *logp, double *each, bool normalise,    \
                            bool ref) {                                                            \
        const bool many = l->rows * l->c >= GRADD_PARALLEL_MIN;                                    \
        _Pragma("omp parallel for schedule(static) if (many)") for (int64_t i = l->part.from;      \
                                                                    i < l->part.to; i++) {         \
            const int64_t at = i / l->d * l->c * l->d + i % l->d;                                  \
            const bool used = counts(l, i);                                                        \
            double log_sum = 0;                                                                    \
            T max = 0;                                                                             \
            each[i] = 0;                                                                           \
            if (!used && !logp) continue;                                                          \
            if (normalise) log_sum = log_sum_##S(x + at, l->c, l->d, ref, &max);                   \
            if (logp) log_probs_##S(x + at, logp + at, l->c, l->d, max, (T)log_sum);               \
            if (!used) continue;                                                                   \
            const double own = (double)x[at + l->labels[i] * l->d];                                \
            each[i] = weight_at(l, i) * (log_sum - (own - (double)max));                           \
        }                                                                                          \
    }                                                                                              \
    static void reduce_##S(const loss_t *l, const double *each, T *z) {                            \
        double sum = 0;                                                                            \
        if (l->reduction == GRADD_REDUCE_NONE) {                                                   \
            for (int64_t i = 0; i < l->rows; i++)                                                  \
                z[i] = (T)each[i];                                                                 \
            return;                                                                                \
        }                                                                                          \
        for (int64_t i = 0; i < l->rows; i++)                                                      \
            sum += each[i];                                                                        \
        z[0] = (T)(l->reduction == GRADD_REDUCE_MEAN ? sum / l->total : sum);                      \
    }                                                                                              \
    GRADD_MULTIARCH static void scale_##S(T *z, int64_t n, T factor) {                             \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) z[i] *= factor;                        \
    }                                                                                              \
    static void zero_##S(T *z, int64_t n, int64_t step) {                                          \
        for (int64_t i = 0; i < n; i++)                                                            \
            z[i * step] = 0;                                                                       \
    }                                                                                              \
    /* z may be x: a row is read whole before its label's entry is changed */                      \
    static void backward_##S(const loss_t *l, const gradd_view_t *d, const T *x, T *z, bool ref) { \
        const bool many = l->rows * l->c >= GRADD_PARALLEL_MIN;                                    \
        _Pragma("omp parallel for schedule(static) if (many)") for (int64_t i = l->part.from;      \
                                                                    i < l->part.to; i++) {         \
            const int64_t at = i / l->d * l->c * l->d + i % l->d;                                  \
            if (!counts(l, i)) {                                                                   \
                zero_##S(z + at, l->c, l->d);                                                      \
                continue;                                                                          \
            }                                                                                      \
            const double factor = row_scale(l, d, i);                                              \
            const int64_t label = l->labels[i] * l->d;                                             \
            double own; /* p - 1, without the digits that a p near 1 would cost */                 \
            if (l->d == 1 && !ref) {                                                               \
                const double sum =                                                                 \
                    gradd_row_exp(x + at, l->c, gradd_row_max(x + at, l->c), z + at);              \
                own = ((double)z[at + label] - sum) / sum;                                         \
                scale_##S(z + at, l->c, (T)(factor / sum));                                        \
            } else {                                                                               \
                T max;                                                                             \
                const double log_sum = log_sum_##S(x + at, l->c, l->d, true, &max);                \
                own = expm1((double)x[at + label] - (double)max - log_sum);                        \
                for (int64_t c = 0; c < l->c; c++) {                                               \
                    const double below = (double)x[at + c * l->d] - (double)max - log_sum;         \
                    z[at + c * l->d] = (T)(factor * exp(below));                                   \
                }                                                                                  \
            }                                                                                      \
            z[at + label] = (T)(factor * own);                                                     \
        }                                                                                          \
    }                                                                                              \
    static void pick_##S(const loss_t *l, const gradd_view_t *d, T *z) {                           \
        memset(z, 0, sizeof(T) * (size_t)(l->rows * l->c));                                        \
        for (int64_t i = 0; i < l->rows; i++) {                                                    \
            const int64_t at = i / l->d * l->c * l->d + i % l->d;                                  \
            if (counts(l, i)) z[at + l->labels[i] * l->d] = (T) - row_scale(l, d, i);              \
        }                                                                                          \
    }
LOSS_KERNELS(float, f32)
LOSS_KERNELS(double, f64)

static gradd_status_t forward(const gradd_launch_t *r, bool normalise, bool ref) {
    loss_t l = loss_of(r, &r->in[0].type, 1, 1);
    void *logp = r->n_out > 1 ? r->out[1].data : NULL;
    double *each = (double *)r->workspace + 1;
    GRADD_TRY(read_labels(r, &l));
    if (!gradd_dtype_is_f64(r->in[0].type.dtype)) {
        forward_f32(&l, r->in[0].data, logp, each, normalise, ref);
        if (l.ends) reduce_f32(&l, each, r->out[0].data);
    } else {
        forward_f64(&l, r->in[0].data, logp, each, normalise, ref);
        if (l.ends) reduce_f64(&l, each, r->out[0].data);
    }
    return GRADD_OK;
}
static gradd_status_t compute_cross_entropy(const gradd_launch_t *r) {
    return forward(r, true, false);
}
static gradd_status_t ref_cross_entropy(const gradd_launch_t *r) {
    return forward(r, true, true);
}
static gradd_status_t compute_likelihood(const gradd_launch_t *r) {
    return forward(r, false, false);
}

static gradd_status_t backward(const gradd_launch_t *r, bool ref) {
    loss_t l = loss_of(r, &r->in[1].type, 2, 0);
    GRADD_TRY(read_labels(r, &l));
    if (!gradd_dtype_is_f64(r->in[1].type.dtype))
        backward_f32(&l, &r->in[0], r->in[1].data, r->out[0].data, ref);
    else
        backward_f64(&l, &r->in[0], r->in[1].data, r->out[0].data, ref);
    return GRADD_OK;
}
static gradd_status_t compute_cross_entropy_grad(const gradd_launch_t *r) {
    return backward(r, false);
}
static gradd_status_t ref_cross_entropy_grad(const gradd_launch_t *r) {
    return backward(r, true);
}
static gradd_status_t compute_likelihood_grad(const gradd_launch_t *r) {
    loss_t l = loss_of(r, &r->out[0].type, 1, 0);
    GRADD_TRY(read_labels(r, &l));
    if (!gradd_dtype_is_f64(r->out[0].type.dtype))
        pick_f32(&l, &r->in[0], r->out[0].data);
    else
        pick_f64(&l, &r->in[0], r->out[0].data);
    return GRADD_OK;
}

/* The loss of each row, and its label. */
static size_t workspace_rows(const gradd_infer_t *c) {
    return sizeof(double) +
           (sizeof(double) + sizeof(int64_t)) * (size_t)gradd_type_count(&c->in[1].type);
}

static size_t workspace_cross_entropy_grad(const gradd_infer_t *c) {
    return sizeof(double) + sizeof(int64_t) * (size_t)gradd_type_count(&c->in[2].type);
}

static size_t workspace_likelihood_grad(const gradd_infer_t *c) {
    return sizeof(double) + sizeof(int64_t) * (size_t)gradd_type_count(&c->in[1].type);
}

static int parts_loss(const gradd_infer_t *c) {
    return gradd_parts_of_tasks(c, gradd_type_count(&c->in[1].type));
}

static int parts_cross_entropy_grad(const gradd_infer_t *c) {
    return gradd_parts_of_tasks(c, gradd_type_count(&c->in[2].type));
}

/* ---- shape rules ---------------------------------------------------------------------------- */

/* Checks labels and weights against scores; `first` is the index of the labels. */
static gradd_status_t check_shapes(const gradd_infer_t *c, const gradd_type_t *x, int first) {
    const gradd_type_t *labels = &c->in[first].type;
    const char *name = gradd_attr_string(c->attrs, GRADD_CE_REDUCTION, "mean");
    if (strcmp(name, "none") && strcmp(name, "sum") && strcmp(name, "mean"))
        return GRADD_FAIL(GRAPH, "reduction=\"%s\" is not defined", name);
    bool fits = x->rank >= 2 && labels->rank == x->rank - 1 && labels->dims[0] == x->dims[0] &&
                x->dims[1] > 0;
    for (int i = 2; fits && i < x->rank; i++)
        fits = labels->dims[i - 1] == x->dims[i];
    if (!fits) {
        char tx[GRADD_TYPE_TEXT], tl[GRADD_TYPE_TEXT];
        return GRADD_FAIL(GRAPH, "labels %s do not fit scores %s", gradd_type_format(labels, tl),
                          gradd_type_format(x, tx));
    }
    if (c->n_in <= first + 1 || !c->in[first + 1].type.dtype) return GRADD_OK;
    const gradd_type_t *w = &c->in[first + 1].type;
    if (w->rank != 1 || w->dims[0] != x->dims[1] || w->dtype != x->dtype)
        return GRADD_FAIL(GRAPH, "weights must be one per class, of the scores' type");
    return GRADD_OK;
}

static gradd_status_t infer_loss(gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[0].type;
    GRADD_TRY(check_shapes(c, x, 1));
    if (gradd_loss_reduction(c->attrs) == GRADD_REDUCE_NONE) c->out[0] = c->in[1].type;
    c->out[0].dtype = x->dtype;
    if (c->n_out > 1) c->out[1] = *x;
    return GRADD_OK;
}

static gradd_status_t infer_cross_entropy_grad(gradd_infer_t *c) {
    c->out[0] = c->in[1].type;
    return check_shapes(c, &c->in[1].type, 2);
}

static gradd_status_t infer_likelihood_grad(gradd_infer_t *c) {
    const gradd_attr_t *shape = gradd_attr_find(c->attrs, "shape");
    if (shape->n > GRADD_MAX_RANK) return GRADD_FAIL(LIMIT, "rank %zu", shape->n);
    c->out[0] = (gradd_type_t){.dtype = c->in[0].type.dtype, .rank = (int)shape->n};
    memcpy(c->out[0].dims, shape->ints, sizeof shape->ints[0] * shape->n);
    return check_shapes(c, &c->out[0], 1);
}

/* ---- gradient rules ------------------------------------------------------------------------- */

static int copy_attrs(gradd_grad_t *g, gradd_attr_t *to) {
    int n = 0;
    for (int i = 0; i < g->attrs.n && n < 3; i++)
        to[n++] = g->attrs.v[i];
    return n;
}

static gradd_status_t grad_cross_entropy(gradd_grad_t *g) {
    gradd_attr_t attrs[4], axis = gradd_make_int("axis", 1);
    int n = copy_attrs(g, attrs);
    if (!g->need[0]) return GRADD_OK;
    if (g->dout[0] != GRADD_NONE) {
        gradd_val_t in[4] = {g->dout[0], g->in[0], g->in[1], g->n_in > 2 ? g->in[2] : GRADD_NONE};
        g->din[0] =
            gradd_emit_attrs(g->b, "SoftmaxCrossEntropyLossGrad", in, g->n_in + 1, attrs, n);
    }
    if (g->n_out > 1 && g->dout[1] != GRADD_NONE) {
        gradd_val_t in[2] = {g->dout[1], g->output(g, 1)};
        gradd_val_t d = gradd_emit_attrs(g->b, "LogSoftmaxGrad", in, 2, &axis, 1);
        g->din[0] = g->din[0] == GRADD_NONE ? d : GRADD_EMIT(g->b, "Add", g->din[0], d);
    }
    return g->b->status;
}

static gradd_status_t grad_likelihood(gradd_grad_t *g) {
    gradd_attr_t attrs[4];
    int n = copy_attrs(g, attrs);
    if (!g->need[0] || g->dout[0] == GRADD_NONE) return GRADD_OK;
    gradd_type_t x = *gradd_val_type(g->b, g->in[0]);
    attrs[n++] = gradd_make_ints("shape", x.dims, (size_t)x.rank);
    gradd_val_t in[3] = {g->dout[0], g->in[1], g->n_in > 2 ? g->in[2] : GRADD_NONE};
    g->din[0] = gradd_emit_attrs(g->b, "NegativeLogLikelihoodLossGrad", in, g->n_in, attrs, n);
    return g->b->status;
}

/* ---- expansions ------------------------------------------------------------------------------ */

/* Of labels [N, D...] beside scores [N, C, D...]. */
typedef struct parts_s {
    gradd_type_t row;   /* [N, 1, D...] of floats */
    gradd_val_t hit;    /* [N, C, D...] of floats: 1 at the label's class */
    gradd_val_t counts; /* [N, 1, D...]: the label is not ignore_index; GRADD_NONE = all */
    gradd_val_t factor; /* [N, 1, D...]: of the gradient of a row that counts */
} parts_t;

/* [N, 1, D...] of weights: of the labels' classes, 0 for a row that does not count. */
static gradd_val_t weights_of(gradd_builder_t *b, const parts_t *p, gradd_val_t labels,
                              gradd_val_t weights) {
    gradd_val_t w = weights == GRADD_NONE ? gradd_filled(b, &p->row, 1)
                                          : GRADD_EMIT(b, "Gather", gradd_wide(b, weights), labels);
    if (p->counts == GRADD_NONE) return w;
    return GRADD_EMIT(b, "Where", p->counts, w, gradd_const_scalar(b, p->row.dtype, 0));
}

static gradd_val_t all_classes(gradd_builder_t *b, const gradd_type_t *x) {
    int64_t dims[GRADD_MAX_RANK];
    const gradd_val_t ends[] = {gradd_const_scalar(b, GRADD_DT_I64, 0),
                                gradd_const_scalar(b, GRADD_DT_I64, (double)x->dims[1]),
                                gradd_const_scalar(b, GRADD_DT_I64, 1)};
    for (int i = 0; i < x->rank; i++)
        dims[i] = i == 1 ? x->dims[1] : 1;
    return gradd_reshape_to(b, gradd_emit_n(b, "Range", 3, ends), dims, x->rank);
}

/* `first`: the operand with the labels; x: the type of the scores, in f32 for halves. */
static parts_t find_parts(gradd_expand_t *e, const gradd_type_t *x, int first) {
    gradd_builder_t *b = e->b;
    parts_t p = {.row = *x, .counts = GRADD_NONE};
    p.row.dims[1] = 1;
    gradd_val_t labels = gradd_cast(b, e->in[first], GRADD_DT_I64);
    labels = gradd_reshape_to(b, labels, p.row.dims, p.row.rank);
    if (gradd_attr_find(e->attrs, GRADD_CE_IGNORE_INDEX)) {
        const int64_t ignore = gradd_attr_int(e->attrs, GRADD_CE_IGNORE_INDEX, 0);
        const gradd_type_t scalar = {.dtype = GRADD_DT_I64};
        gradd_val_t is = GRADD_EMIT(b, "Equal", labels, b->constant(b, &scalar, &ignore));
        p.counts = GRADD_EMIT(b, "Not", is);
        labels = GRADD_EMIT(b, "Where", is, gradd_const_scalar(b, GRADD_DT_I64, 0), labels);
    }
    p.hit = gradd_cast(b, GRADD_EMIT(b, "Equal", labels, all_classes(b, x)), x->dtype);
    const gradd_val_t given = e->n_in > first + 1 ? e->in[first + 1] : GRADD_NONE;
    gradd_val_t w = weights_of(b, &p, labels, given), dy = gradd_wide(b, e->in[0]);
    const gradd_reduction_t reduction = gradd_loss_reduction(e->attrs);
    if (reduction == GRADD_REDUCE_NONE) dy = gradd_reshape_to(b, dy, p.row.dims, p.row.rank);
    p.factor = GRADD_EMIT(b, "Mul", dy, w);
    if (reduction == GRADD_REDUCE_MEAN)
        p.factor = GRADD_EMIT(b, "Div", p.factor, gradd_reduce_from(b, "ReduceSum", w, 0));
    return p;
}

/* What each element gets, times the row's factor; a row that does not count gets 0. */
static gradd_val_t spread(gradd_builder_t *b, const parts_t *p, gradd_val_t each) {
    gradd_val_t d = GRADD_EMIT(b, "Mul", each, p->factor);
    if (p->counts == GRADD_NONE) return d;
    return GRADD_EMIT(b, "Where", p->counts, d, gradd_const_scalar(b, p->row.dtype, 0));
}

static gradd_status_t expand_cross_entropy_grad(gradd_expand_t *e) {
    gradd_builder_t *b = e->b;
    const gradd_attr_t axis = gradd_make_int("axis", 1);
    const gradd_dtype_t dtype = gradd_val_type(b, e->in[1])->dtype;
    gradd_val_t x = gradd_wide(b, e->in[1]);
    if (b->status) return b->status;
    const gradd_type_t type = *gradd_val_type(b, x);
    const parts_t p = find_parts(e, &type, 2);
    gradd_val_t share = gradd_emit_attrs(b, "Softmax", &x, 1, &axis, 1);
    gradd_val_t d = spread(b, &p, GRADD_EMIT(b, "Sub", share, p.hit));
    e->out[0] = gradd_cast(b, d, dtype);
    return b->status;
}

static gradd_status_t expand_likelihood_grad(gradd_expand_t *e) {
    gradd_builder_t *b = e->b;
    const gradd_attr_t *shape = gradd_attr_find(e->attrs, "shape");
    const gradd_dtype_t dtype = gradd_val_type(b, e->in[0])->dtype;
    gradd_type_t type = {.dtype = gradd_dtype_is_half(dtype) ? GRADD_DT_F32 : dtype,
                         .rank = (int)shape->n};
    memcpy(type.dims, shape->ints, sizeof shape->ints[0] * shape->n);
    const parts_t p = find_parts(e, &type, 1);
    gradd_val_t d = spread(b, &p, GRADD_EMIT(b, "Neg", p.hit));
    e->out[0] = gradd_cast(b, d, dtype);
    return b->status;
}

/* ---- cases and rows ------------------------------------------------------------------------- */

#define LOSS_ATTRS                                                                                 \
    {GRADD_CE_REDUCTION, GRADD_ATTR_STRING, false}, {                                              \
        GRADD_CE_IGNORE_INDEX, GRADD_ATTR_INT, false                                               \
    }
#define LABELS "i64[4]={0,-100,2,1}"
#define CASES_LOSS(more)                                                                           \
    {.text = "f32[4,3] i64[4]:(0,2)" more}, {.text = "f32[4,3] i32[4]:(0,2)" more},                \
        {.text = "f32[4,3] " LABELS " | ignore_index=-100" more},                                  \
        {.text = "f32[4,3] " LABELS " | ignore_index=-100 reduction=\"sum\"" more},                \
        {.text = "f32[4,3] " LABELS " | ignore_index=-100 reduction=\"none\"" more},               \
        {.text = "f32[4,3] i64[4]:(0,2) f32[3]:(0.1,2)" more},                                     \
        {.text = "f32[4,3] " LABELS " f32[3]:(0.1,2) | ignore_index=-100" more},                   \
        {.text = "f32[4,3] i64[4]:(0,2) f32[3]:(0.1,2) | reduction=\"none\"" more},                \
        {.text = "f32[2,3,4] i64[2,4]:(0,2) | ignore_index=1" more},                               \
        {.text = "f32[2,3,2,2] i64[2,2,2]:(0,2) f32[3]:(0.1,2) | reduction=\"sum\"" more},         \
        {.text = "f32[2,3] i64[2]={-1,-1} | ignore_index=-1", .grad_tol = -1},                     \
        {.text = "f32[1,1] i64[1]={0}" more}, {                                                    \
        .text = "f32[0,3] i64[0] | reduction=\"sum\"" more                                         \
    }

GRADD_OPS(
    loss,
    GRADD_OP("SoftmaxCrossEntropyLoss", "", 12, (2, 3), (1, 2), .no_rule = 4,
             .types = {GRADD_T_FLOAT, GRADD_T_INDEX, GRADD_T_FLOAT},
             .attrs = GRADD_ATTR_LIST(LOSS_ATTRS), .infer = infer_loss, .grad = grad_cross_entropy,
             .ref = GRADD_REF(ref_cross_entropy),
             .cases = GRADD_CASES(
                 CASES_LOSS(""), CASES_LOSS(" -> 2"),
                 {.text = "f32[67,1031]:(-9,9) i64[67]:(0,1030) | ignore_index=7"},
                 {.text = "f32[2,9000]:(-9,9) i64[2]:(0,8999) -> 2", .grad_tol = -1},
                 {.text = "f32[600,8] i64[600]:(0,7) f32[8]:(0.1,2) -> 2", .grad_tol = -1},
                 {.text = "f32[2,40,35] i64[2,35]:(0,39) | ignore_index=3 -> 2", .grad_tol = -1},
                 {.text = "f32[2,2]={1000,0,0,-1000} i64[2]={1,1}", .grad_tol = -1})),
    GRADD_OP("SoftmaxCrossEntropyLossGrad", "com.gradd", 1, (3, 4), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD,
             .types = {GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_T_INDEX, GRADD_T_FLOAT},
             .attrs = GRADD_ATTR_LIST(LOSS_ATTRS), .infer = infer_cross_entropy_grad,
             .expand = GRADD_EXPANSION(expand_cross_entropy_grad),
             .ref = GRADD_REF(ref_cross_entropy_grad),
             .cases = GRADD_CASES(
                 {.text = "f32[] f32[4,3] " LABELS " | ignore_index=-100"},
                 {.text = "f32[4] f32[4,3] i32[4]:(0,2) | reduction=\"none\""},
                 {.text = "f32[] f32[2,3,4] i64[2,4]:(0,2) f32[3] | reduction=\"sum\""},
                 {.text = "f32[] f32[67,1031]:(-9,9) i64[67]:(0,1030) | ignore_index=7"},
                 {.text = "f32[] f32[3,1024]:(-9,9) i64[3]:(0,1023) f32[1024]:(0.1,2)"},
                 {.text = "f32[] f32[2,9000]:(-9,9) i64[2]:(0,8999)"},
                 {.text = "f32[2,35] f32[2,40,35] i64[2,35]:(0,39) | ignore_index=3 "
                          "reduction=\"none\""},
                 {.text = "f32[] f32[2,2]={1000,0,0,-1000} i64[2]={0,1}"},
                 {.text = "f32[] f32[2,3] i64[2]={-1,-1} | ignore_index=-1"})),
    GRADD_OP("NegativeLogLikelihoodLoss", "", 12, (2, 3), (1, 1), .no_rule = 4,
             .types = {GRADD_T_FLOAT, GRADD_T_INDEX, GRADD_T_FLOAT},
             .attrs = GRADD_ATTR_LIST(LOSS_ATTRS), .infer = infer_loss, .grad = grad_likelihood,
             .ref = GRADD_REF(compute_likelihood), .cases = GRADD_CASES(CASES_LOSS(""))),
    GRADD_OP("NegativeLogLikelihoodLossGrad", "com.gradd", 1, (2, 3), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD,
             .types = {GRADD_T_FLOAT, GRADD_T_INDEX, GRADD_T_FLOAT},
             .attrs = GRADD_ATTR_LIST(LOSS_ATTRS, {"shape", GRADD_ATTR_INTS, true}),
             .infer = infer_likelihood_grad, .expand = GRADD_EXPANSION(expand_likelihood_grad),
             .ref = GRADD_REF(compute_likelihood_grad),
             .cases = GRADD_CASES({.text = "f32[] " LABELS " | ignore_index=-100 shape=[4,3]"},
                                  {.text = "f32[2,2] i64[2,2]:(0,2) f32[3] | reduction=\"none\" "
                                           "shape=[2,3,2]"})));

GRADD_KERNELS(
    cpu, loss,
    GRADD_KERNEL("SoftmaxCrossEntropyLoss", "loop",
                 .types = {GRADD_T_F32_F64, GRADD_T_INDEX, GRADD_T_F32_F64},
                 .compute = compute_cross_entropy, .workspace = workspace_rows,
                 .parts = parts_loss),
    GRADD_KERNEL("SoftmaxCrossEntropyLossGrad", "loop",
                 .types = {GRADD_T_F32_F64, GRADD_T_F32_F64, GRADD_T_INDEX, GRADD_T_F32_F64},
                 .inplace = 2, .compute = compute_cross_entropy_grad,
                 .workspace = workspace_cross_entropy_grad, .parts = parts_cross_entropy_grad),
    GRADD_KERNEL("NegativeLogLikelihoodLoss", "loop",
                 .types = {GRADD_T_F32_F64, GRADD_T_INDEX, GRADD_T_F32_F64},
                 .compute = compute_likelihood, .workspace = workspace_rows, .parts = parts_loss),
    GRADD_KERNEL("NegativeLogLikelihoodLossGrad", "loop",
                 .types = {GRADD_T_F32_F64, GRADD_T_INDEX, GRADD_T_F32_F64},
                 .compute = compute_likelihood_grad, .workspace = workspace_likelihood_grad));
