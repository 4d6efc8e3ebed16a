/* CrossEntropy and its gradient on a GPU. See kernels/ops/loss/crossentropy.c, labels.h and
 * row_teams.h.
 *
 * A team reads a row of logits once, whatever its length, and leaves its loss in scratch memory;
 * one block adds these. The gradient is elementwise, given the statistics of each row: the thread
 * that holds the label's logit turns it into its derivative, so the logits may be overwritten. An
 * ignored row is not read.
 */
#include "kernels/cuda/row/labels.h"
#include "kernels/describe/cross_entropy.h"

/* Bytes that a thread keeps of a row. */
enum { KEPT = 128 };

template <class T> struct loss_t {
    typedef gpu_real<T> A;
    const T *x;
    T *z;
    const A *weights;
    gpu_labels_t labels;
    gradd_loss_rule_t rule; /* its mean weight is in the tally */
    gpu_tally_t *tally;     /* NULL = all weights are one */
    double *each;           /* the loss of each row */
    A *out;                 /* the same, if that is the result */
    A *stats;               /* per row: maximum, and sum of exponentials - 1; may be NULL */
    gpu_any_t dy, items, saved;
};

/* ---- forward --------------------------------------------------------------------------------- */

template <class S, class T, bool SMOOTH>
__global__ void GPU_BLOCK(S::THREADS) loss_rows(loss_t<T> p) {
    typedef gpu_real<T> A;
    const int64_t n = p.rule.classes, packs = n / S::W;
    const bool first = gpu_lane<S::TEAM>() == 0;
    for (int64_t r = gpu_team<S::TEAM>(); r < p.labels.rows; r += gpu_teams<S::TEAM>()) {
        const int64_t label = gpu_team_label<S::TEAM>(p.labels, r);
        gpu_soft<A> s = {0, 1};
        double plain = 0;
        if (label >= 0) {
            gpu_row<T, S::W, S::TEAM, S::KEEP> row;
            row.open(p.x + r * n, packs);
            s = gpu_soft_of<S>(row, packs, [&](const A(&x)[S::W], int64_t i) {
                if constexpr (SMOOTH) {
                    A sum = 0;
#pragma unroll
                    for (int k = 0; k < S::W; k++)
                        sum += p.weights ? x[k] * p.weights[i * S::W + k] : x[k];
                    plain += (double)sum;
                }
            });
            if constexpr (SMOOTH) plain = gpu_team_sum<S::TEAM>(plain);
        }
        if (!first) continue;
        double loss = 0;
        if (label >= 0) {
            const gradd_loss_sums_t sums = {(double)s.max, s.sum, plain};
            const double own = (double)gpu_get(p.x[r * n + label]);
            gradd_loss_rule_t rule = p.rule;
            if (SMOOTH && p.tally) rule.mean_weight = p.tally->mean_weight;
            loss = gradd_loss_value(rule, sums, gpu_weight(p.labels, label), own);
        }
        if (p.stats) {
            p.stats[2 * r] = s.max;
            p.stats[2 * r + 1] = (A)(s.sum - 1);
        }
        p.each[r] = loss;
        if (p.out) p.out[r] = (A)loss;
    }
}

/* ---- backward -------------------------------------------------------------------------------- */

template <class S, class T> __global__ void GPU_BLOCK(S::THREADS) loss_rows_grad(loss_t<T> p) {
    typedef gpu_real<T> A;
    typedef gpu_pack<T, S::W> pack_t;
    const int64_t n = p.rule.classes, packs = n / S::W;
    const double total = gpu_loss_divisor(p.labels, p.tally, p.items);
    p.rule.mean_weight = p.tally->mean_weight;
    for (int64_t r = gpu_team<S::TEAM>(); r < p.labels.rows; r += gpu_teams<S::TEAM>()) {
        const int64_t label = gpu_team_label<S::TEAM>(p.labels, r);
        pack_t *to = (pack_t *)(p.z + r * n);
        if (label < 0) {
            pack_t none;
#pragma unroll
            for (int k = 0; k < S::W; k++)
                gpu_put(&none.v[k], (A)0);
            gpu_each_pack<S::TEAM, S::KEEP>(packs, [&](int, int64_t i) { to[i] = none; });
            continue;
        }
        const int64_t d = p.labels.reduction == GRADD_REDUCE_NONE ? r : 0;
        const double factor = gpu_number(p.dy, d) / total, w = gpu_weight(p.labels, label);
        const double max = gpu_number(p.saved, 2 * r), rest = gpu_number(p.saved, 2 * r + 1);
        const A scale = (A)(gradd_loss_share(p.rule, w) * factor / (1 + rest));
        const A shift = (A)(p.rule.smoothing / (double)n * factor), most = (A)max;
        const A *weights = shift != 0 ? p.weights : nullptr;
        const pack_t *from = (const pack_t *)(p.x + r * n);
        const int64_t own_pack = label / S::W, own_k = label % S::W;
        gpu_each_pack<S::TEAM, S::KEEP>(packs, [&](int, int64_t i) {
            const pack_t x = from[i];
            pack_t v;
#pragma unroll
            for (int k = 0; k < S::W; k++) {
                const A a = gpu_get(x.v[k]), by = weights ? weights[i * S::W + k] : (A)1;
                gpu_put(&v.v[k], vexp(a - most) * scale - shift * by);
            }
            if (i == own_pack) {
#pragma unroll
                for (int k = 0; k < S::W; k++)
                    if (k == own_k)
                        gpu_put(&v.v[k],
                                (A)(factor * gradd_loss_own_slope(
                                                 p.rule, w, (double)gpu_get(x.v[k]), max, rest)));
            }
            to[i] = v;
        });
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

/* x: which operand are the logits; labels stand behind them. */
template <class T>
gradd_status_t read_loss(const gradd_launch_t *r, int x, int labels, int items, int weights,
                         loss_t<T> *out) {
    const gradd_type_t *type = &r->in[x].type;
    loss_t<T> p = {};
    if (gradd_type_count(&r->in[labels].type) > UINT32_MAX)
        return GRADD_FAIL(LIMIT, "more than %u rows", UINT32_MAX);
    p.x = (const T *)r->in[x].data;
    p.labels = gpu_labels_of(r, &r->in[labels], type->dims[type->rank - 1]);
    p.labels.weights = gpu_any_of(r->in, r->n_in, weights);
    if (gradd_attr_int(r->attrs, GRADD_CE_SHIFT, 0))
        p.labels.positions = (uint32_t)type->dims[type->rank - 2];
    p.weights = (const gpu_real<T> *)p.labels.weights.at;
    p.items = gpu_any_of(r->in, r->n_in, items);
    p.rule = {p.labels.classes, gradd_attr_float(r->attrs, GRADD_CE_SMOOTHING, 0), 1,
              p.weights != nullptr};
    p.tally = (gpu_tally_t *)r->workspace;
    *out = p;
    return GRADD_OK;
}

template <class T> void launch_tally(const loss_t<T> &p, bool counts) {
    GPU_LAUNCH((gpu_tally<gpu_tally_t>), 1, GPU_TALLY_THREADS, p.labels, counts,
               p.weights && p.rule.smoothing != 0, p.tally);
}

template <class T, bool SMOOTH> gradd_status_t launch_loss(const loss_t<T> &p, const char *what) {
    return gpu_by_row<T, KEPT>(p.rule.classes, gpu_aligned(p.x, 16), [&](auto shape) {
        typedef decltype(shape) S;
        GPU_LAUNCH((loss_rows<S, T, SMOOTH>), S::blocks(p.labels.rows), S::THREADS, p);
        return gpu_launched(what);
    });
}

static gradd_status_t compute_loss(const gradd_launch_t *r) {
    return gpu_switch(gpu_floats(), r->in[GRADD_CE_LOGITS].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        typedef gpu_real<T> A;
        loss_t<T> p;
        GRADD_TRY(
            read_loss(r, GRADD_CE_LOGITS, GRADD_CE_LABELS, GRADD_CE_ITEMS, GRADD_CE_WEIGHTS, &p));
        const bool smooth = p.rule.smoothing != 0;
        A *out = (A *)r->out[GRADD_CE_LOSS].data;
        p.each = (double *)(p.tally + 1);
        p.stats = r->n_out > GRADD_CE_STATS ? (A *)r->out[GRADD_CE_STATS].data : nullptr;
        p.out = p.labels.reduction == GRADD_REDUCE_NONE ? out : nullptr;
        if (smooth && p.weights)
            launch_tally(p, false);
        else
            p.tally = nullptr;
        if (p.labels.rows)
            GRADD_TRY((smooth ? launch_loss<T, true>(p, r->op->name)
                              : launch_loss<T, false>(p, r->op->name)));
        if (!p.out)
            GPU_LAUNCH((gpu_loss_end<A>), 1, GPU_TALLY_THREADS, p.labels, p.each, p.items, out);
        return gpu_launched(r->op->name);
    });
}

static gradd_status_t compute_loss_grad(const gradd_launch_t *r) {
    return gpu_switch(gpu_floats(), r->in[GRADD_CE_GRAD_LOGITS].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        loss_t<T> p;
        GRADD_TRY(read_loss(r, GRADD_CE_GRAD_LOGITS, GRADD_CE_GRAD_LABELS, GRADD_CE_GRAD_ITEMS,
                            GRADD_CE_GRAD_WEIGHTS, &p));
        p.z = (T *)r->out[GRADD_CE_DLOGITS].data;
        p.dy = gpu_any_of(r->in, r->n_in, GRADD_CE_GRAD_DY);
        p.saved = gpu_any_of(r->in, r->n_in, GRADD_CE_GRAD_STATS);
        if (!p.labels.rows) return GRADD_OK;
        launch_tally(p, p.labels.reduction == GRADD_REDUCE_MEAN);
        return gpu_by_row<T, KEPT>(
            p.rule.classes, gpu_aligned(p.x, 16) && gpu_aligned(p.z, 16), [&](auto shape) {
                typedef decltype(shape) S;
                GPU_LAUNCH((loss_rows_grad<S, T>), S::blocks(p.labels.rows), S::THREADS, p);
                return gpu_launched(r->op->name);
            });
    });
}

/* The tally, and in forward the loss of each row. */
static size_t workspace_loss(const gradd_infer_t *c) {
    return sizeof(gpu_tally_t) +
           sizeof(double) * (size_t)gradd_type_count(&c->in[GRADD_CE_LABELS].type);
}
static size_t workspace_loss_grad(const gradd_infer_t *) {
    return sizeof(gpu_tally_t);
}

#define WIDE (GRADD_DTB(F32) | GRADD_DTB(F64))

GRADD_KERNELS(cuda, crossentropy,
              GRADD_KERNEL("CrossEntropy", "rows",
                           .types = {GPU_T_FLOAT, GPU_T_INT, WIDE | GPU_T_INT, WIDE},
                           .compute = compute_loss, .workspace = workspace_loss),
              GRADD_KERNEL("CrossEntropyGrad", "rows",
                           .types = {WIDE, GPU_T_FLOAT, GPU_T_INT, WIDE, WIDE | GPU_T_INT, WIDE},
                           .inplace = 1 << GRADD_CE_GRAD_LOGITS, .compute = compute_loss_grad,
                           .workspace = workspace_loss_grad));
