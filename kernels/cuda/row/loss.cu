/* SoftmaxCrossEntropyLoss, NegativeLogLikelihoodLoss and their gradients on a GPU. See
 * kernels/ops/loss/loss.c, labels.h and row_teams.h.
 *
 * Scores are [N, C, D]. With D = 1 a team takes a row of C; else a block takes 32 columns. The
 * losses of rows lie in scratch memory until one block adds them.
 */
#include "kernels/cuda/row/labels.h"

/* Bytes that a thread keeps of a row. */
enum { KEPT = 128 };

template <class T> struct scores_t {
    const T *x;
    T *z; /* gradient, or log-probabilities; may be NULL in forward */
    int64_t n, c, d;
    gpu_labels_t labels;
    double *each;       /* the loss of each row */
    T *out;             /* the same, if that is the result */
    gpu_any_t dy;       /* of the loss */
    gpu_tally_t *tally; /* of the gradient */
};

/* Where row r begins; its scores are d apart. */
template <class T> GPU_FN int64_t start_of(const scores_t<T> &p, int64_t r) {
    return p.d == 1 ? r * p.c : r / p.d * p.c * p.d + r % p.d;
}

template <class T> GPU_FN void put_loss(const scores_t<T> &p, int64_t r, double loss) {
    p.each[r] = loss;
    if (p.out) gpu_put(&p.out[r], (gpu_real<T>)loss);
}

/* The factor of the gradient of row r. */
template <class T> GPU_FN double factor_of(const scores_t<T> &p, int64_t r, int64_t label) {
    const double w = gpu_weight(p.labels, label);
    const double dy = gpu_number(p.dy, p.labels.reduction == GRADD_REDUCE_NONE ? r : 0);
    return p.labels.reduction == GRADD_REDUCE_MEAN ? dy * (w / p.tally->total) : dy * w;
}

/* ---- rows ------------------------------------------------------------------------------------ */

template <class S, class T> __global__ void GPU_BLOCK(S::THREADS) score_rows(scores_t<T> p) {
    typedef gpu_real<T> A;
    const int64_t packs = p.c / S::W;
    for (int64_t r = gpu_team<S::TEAM>(); r < p.labels.rows; r += gpu_teams<S::TEAM>()) {
        const bool first = gpu_lane<S::TEAM>() == 0;
        const int64_t label = gpu_team_label<S::TEAM>(p.labels, r);
        double loss = 0;
        if (label >= 0 || p.z) {
            gpu_row<T, S::W, S::TEAM, S::KEEP> row;
            row.open(p.x + r * p.c, packs);
            const gpu_soft<A> s = gpu_soft_of<S>(row, packs, gpu_nothing());
            const double logs = log(s.sum);
            gpu_pack<T, S::W> *to = (gpu_pack<T, S::W> *)(p.z + r * p.c);
            if (p.z)
                gpu_each_pack<S::TEAM, S::KEEP>(packs, [&](int j, int64_t i) {
                    gpu_pack<T, S::W> v = row.get(j, i);
#pragma unroll
                    for (int k = 0; k < S::W; k++)
                        gpu_put(&v.v[k], (gpu_get(v.v[k]) - s.max) - (A)logs);
                    to[i] = v;
                });
            if (first && label >= 0)
                loss = gpu_weight(p.labels, label) *
                       (logs - ((double)gpu_get(p.x[r * p.c + label]) - (double)s.max));
        }
        if (first) put_loss(p, r, loss);
    }
}

/* The thread that has the label's score makes p - 1 of it, so z may be x. */
template <class S, class T> __global__ void GPU_BLOCK(S::THREADS) score_rows_grad(scores_t<T> p) {
    typedef gpu_real<T> A;
    typedef gpu_pack<T, S::W> pack_t;
    const int64_t packs = p.c / S::W;
    for (int64_t r = gpu_team<S::TEAM>(); r < p.labels.rows; r += gpu_teams<S::TEAM>()) {
        const int64_t label = gpu_team_label<S::TEAM>(p.labels, r);
        pack_t *to = (pack_t *)(p.z + r * p.c);
        if (label < 0) {
            pack_t none;
#pragma unroll
            for (int k = 0; k < S::W; k++)
                gpu_put(&none.v[k], (A)0);
            gpu_each_pack<S::TEAM, S::KEEP>(packs, [&](int, int64_t i) { to[i] = none; });
            continue;
        }
        gpu_row<T, S::W, S::TEAM, S::KEEP> row;
        row.open(p.x + r * p.c, packs);
        const double factor = factor_of(p, r, label);
        const gpu_soft<A> s = gpu_soft_of<S>(row, packs, gpu_nothing());
        const A scale = (A)(factor / s.sum);
        gpu_each_pack<S::TEAM, S::KEEP>(packs, [&](int j, int64_t i) {
            const pack_t x = row.get(j, i);
            pack_t v;
#pragma unroll
            for (int k = 0; k < S::W; k++) {
                const A e = vexp(gpu_get(x.v[k]) - s.max);
                A z = e * scale;
                if (i * S::W + k == label) z = (A)(factor * (((double)e - s.sum) / s.sum));
                gpu_put(&v.v[k], z);
            }
            to[i] = v;
        });
    }
}

/* ---- columns --------------------------------------------------------------------------------- */

template <class T>
__global__ void GPU_BLOCK(GPU_ROW_THREADS) score_columns(scores_t<T> p, bool backward) {
    typedef gpu_real<T> A;
    const int64_t all = (int64_t)gridDim.x * GPU_WARP;
    for (int64_t at = (int64_t)blockIdx.x * GPU_WARP; at < p.labels.rows; at += all) {
        const int64_t r = at + threadIdx.x % GPU_WARP;
        const bool first = gpu_slice() == 0, here = r < p.labels.rows;
        const int64_t label = here ? gpu_label(p.labels, r, first) : -1;
        const int64_t start = here ? start_of(p, r) : 0, n = here ? p.c : 0;
        const T *x = p.x + start;
        gpu_soft<A> s = gpu_soft_none<A>();
        for (int64_t i = gpu_slice(); i < n; i += GPU_SLICES) {
            const A one[1] = {gpu_get(x[i * p.d])};
            gpu_soft_scan(&s, one);
        }
        const double own = !backward && label >= 0 ? (double)gpu_get(x[label * p.d]) : 0;
        s = gpu_slices_soft(s);
        const double logs = log(s.sum);
        if (backward) {
            const double factor = label >= 0 ? factor_of(p, r, label) : 0;
            const A scale = (A)(factor / s.sum);
            for (int64_t i = gpu_slice(); i < n; i += GPU_SLICES) {
                const A e = vexp(gpu_get(x[i * p.d]) - s.max);
                A z = e * scale;
                if (i == label) z = (A)(factor * (((double)e - s.sum) / s.sum));
                gpu_put(&p.z[start + i * p.d], label < 0 ? (A)0 : z);
            }
            continue;
        }
        for (int64_t i = gpu_slice(); p.z && i < n; i += GPU_SLICES)
            gpu_put(&p.z[start + i * p.d], (gpu_get(x[i * p.d]) - s.max) - (A)logs);
        if (first && here)
            put_loss(p, r,
                     label < 0 ? 0 : gpu_weight(p.labels, label) * (logs - (own - (double)s.max)));
    }
}

/* ---- of log-probabilities -------------------------------------------------------------------- */

template <class T> __global__ void GPU_BLOCK(GPU_ROW_THREADS) pick_rows(scores_t<T> p) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t r = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; r < p.labels.rows; r += all) {
        const int64_t label = gpu_label(p.labels, r, true);
        double loss = 0;
        if (label >= 0)
            loss =
                gpu_weight(p.labels, label) * -(double)gpu_get(p.x[start_of(p, r) + label * p.d]);
        put_loss(p, r, loss);
    }
}

template <class T> __global__ void GPU_BLOCK(GPU_ROW_THREADS) pick_rows_grad(scores_t<T> p) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t r = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; r < p.labels.rows; r += all) {
        const int64_t label = gpu_label(p.labels, r, true);
        if (label >= 0)
            gpu_put(&p.z[start_of(p, r) + label * p.d], (gpu_real<T>)-factor_of(p, r, label));
    }
}

/* Bytes of zeros, the last few one by one. */
template <class Pack>
__global__ void GPU_BLOCK(GPU_ROW_THREADS) fill_zero(void *to, int64_t bytes) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x, packs = bytes / (int64_t)sizeof(Pack);
    const int64_t first = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (int64_t i = first; i < packs; i += all)
        ((Pack *)to)[i] = Pack();
    for (int64_t i = packs * (int64_t)sizeof(Pack) + first; i < bytes; i += all)
        ((uint8_t *)to)[i] = 0;
}

/* ---- launches -------------------------------------------------------------------------------- */

/* Labels are operand `labels`, and weights the one behind. */
template <class T>
scores_t<T> read_scores(const gradd_launch_t *r, const gradd_view_t &x, int labels) {
    scores_t<T> p = {};
    p.x = (const T *)x.data;
    p.n = x.type.dims[0];
    p.c = x.type.dims[1];
    p.d = 1;
    for (int i = 2; i < x.type.rank; i++)
        p.d *= x.type.dims[i];
    p.labels = gpu_labels_of(r, &r->in[labels], p.c);
    p.labels.weights = gpu_any_of(r->in, r->n_in, labels + 1);
    return p;
}

template <class T> bool is_wide(const scores_t<T> &p) {
    return gpu_aligned(p.x, 16) && gpu_aligned(p.z, 16);
}

template <class T> gradd_status_t end_loss(const gradd_launch_t *r, const scores_t<T> &p) {
    const gpu_any_t none = {nullptr, 0};
    if (!p.out)
        GPU_LAUNCH((gpu_loss_end<T>), 1, GPU_TALLY_THREADS, p.labels, p.each, none,
                   (T *)r->out[0].data);
    return gpu_launched(r->op->name);
}

template <class T> scores_t<T> read_forward(const gradd_launch_t *r) {
    scores_t<T> p = read_scores<T>(r, r->in[0], 1);
    p.z = r->n_out > 1 ? (T *)r->out[1].data : nullptr;
    p.each = (double *)r->workspace;
    p.out = p.labels.reduction == GRADD_REDUCE_NONE ? (T *)r->out[0].data : nullptr;
    return p;
}

static gradd_status_t compute_cross_entropy(const gradd_launch_t *r) {
    return gpu_switch(gpu_floats(), r->in[0].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        const scores_t<T> p = read_forward<T>(r);
        if (p.labels.rows && p.d == 1)
            GRADD_TRY((gpu_by_row<T, KEPT>(p.c, is_wide(p), [&](auto shape) {
                typedef decltype(shape) S;
                GPU_LAUNCH((score_rows<S, T>), S::blocks(p.labels.rows), S::THREADS, p);
                return gpu_launched(r->op->name);
            })));
        else if (p.labels.rows)
            GPU_LAUNCH((score_columns<T>), gpu_column_blocks(p.labels.rows), GPU_ROW_THREADS, p,
                       false);
        return end_loss(r, p);
    });
}

static gradd_status_t compute_likelihood(const gradd_launch_t *r) {
    return gpu_switch(gpu_floats(), r->in[0].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        const scores_t<T> p = read_forward<T>(r);
        if (p.labels.rows)
            GPU_LAUNCH((pick_rows<T>), gpu_blocks(p.labels.rows, GPU_ROW_THREADS), GPU_ROW_THREADS,
                       p);
        return end_loss(r, p);
    });
}

/* The gradient by scores of the type of x; counts what "mean" divides by. */
template <class T>
scores_t<T> read_backward(const gradd_launch_t *r, const gradd_view_t &x, int labels) {
    scores_t<T> p = read_scores<T>(r, x, labels);
    p.z = (T *)r->out[0].data;
    p.dy = gpu_any_of(r->in, r->n_in, 0);
    p.tally = (gpu_tally_t *)r->workspace;
    if (p.labels.rows && p.labels.reduction == GRADD_REDUCE_MEAN)
        GPU_LAUNCH((gpu_tally<gpu_tally_t>), 1, GPU_TALLY_THREADS, p.labels, true, false, p.tally);
    return p;
}

static gradd_status_t compute_cross_entropy_grad(const gradd_launch_t *r) {
    return gpu_switch(gpu_floats(), r->in[1].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        const scores_t<T> p = read_backward<T>(r, r->in[1], 2);
        if (!p.labels.rows) return GRADD_OK;
        if (p.d == 1)
            return gpu_by_row<T, KEPT>(p.c, is_wide(p), [&](auto shape) {
                typedef decltype(shape) S;
                GPU_LAUNCH((score_rows_grad<S, T>), S::blocks(p.labels.rows), S::THREADS, p);
                return gpu_launched(r->op->name);
            });
        GPU_LAUNCH((score_columns<T>), gpu_column_blocks(p.labels.rows), GPU_ROW_THREADS, p, true);
        return gpu_launched(r->op->name);
    });
}

static gradd_status_t compute_likelihood_grad(const gradd_launch_t *r) {
    return gpu_switch(gpu_floats(), r->out[0].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        const scores_t<T> p = read_backward<T>(r, r->out[0], 1);
        const int64_t bytes = gradd_type_bytes(&r->out[0].type);
        if (!bytes) return GRADD_OK;
        const unsigned blocks = gpu_blocks(bytes / 16, GPU_ROW_THREADS);
        if (gpu_aligned(p.z, 16))
            GPU_LAUNCH((fill_zero<gpu_pack<uint32_t, 4>>), blocks, GPU_ROW_THREADS, p.z, bytes);
        else
            GPU_LAUNCH((fill_zero<uint8_t>), blocks, GPU_ROW_THREADS, p.z, bytes);
        GPU_LAUNCH((pick_rows_grad<T>), gpu_blocks(p.labels.rows, GPU_ROW_THREADS), GPU_ROW_THREADS,
                   p);
        return gpu_launched(r->op->name);
    });
}

/* The loss of each row. */
static size_t workspace_rows(const gradd_infer_t *c) {
    return sizeof(double) * (size_t)gradd_type_count(&c->in[1].type);
}
static size_t workspace_tally(const gradd_infer_t *) {
    return sizeof(gpu_tally_t);
}

GRADD_KERNELS(cuda, loss,
              GRADD_KERNEL("SoftmaxCrossEntropyLoss", "rows",
                           .types = {GPU_T_FLOAT, GPU_T_INT, GPU_T_FLOAT},
                           .compute = compute_cross_entropy, .workspace = workspace_rows),
              GRADD_KERNEL("SoftmaxCrossEntropyLossGrad", "rows",
                           .types = {GPU_T_FLOAT, GPU_T_FLOAT, GPU_T_INT, GPU_T_FLOAT},
                           .inplace = 2, .compute = compute_cross_entropy_grad,
                           .workspace = workspace_tally),
              GRADD_KERNEL("NegativeLogLikelihoodLoss", "pick",
                           .types = {GPU_T_FLOAT, GPU_T_INT, GPU_T_FLOAT},
                           .compute = compute_likelihood, .workspace = workspace_rows),
              GRADD_KERNEL("NegativeLogLikelihoodLossGrad", "pick",
                           .types = {GPU_T_FLOAT, GPU_T_INT, GPU_T_FLOAT},
                           .compute = compute_likelihood_grad, .workspace = workspace_tally));
