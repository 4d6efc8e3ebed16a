/* Softmax, LogSoftmax and their gradients on a GPU. See kernels/ops/norm/softmax.c and row_teams.h.
 *
 * Rows along the last axis go to teams; short ones stay in registers between the passes, so that
 * memory is read and written once. Along other axes a block takes 32 columns.
 */
#include "kernels/cuda/row/row_teams.h"
#include "kernels/describe/lanes.h"

/* One element of the result. */
template <bool LOG, class A> struct soft_end {
    A max, by; /* 1 / sum, or its logarithm */

    __device__ __forceinline__ soft_end(const gpu_soft<A> &s)
        : max(s.max), by((A)(LOG ? log(s.sum) : 1 / s.sum)) {
    }
    __device__ __forceinline__ A operator()(A x) const {
        return LOG ? (x - max) - by : vexp(x - max) * by;
    }
};
/* One element of the gradient; sum: of dy, or of dy * y. */
template <bool LOG, class A> GPU_FN A soft_back(A d, A y, A sum) {
    return LOG ? d - vexp(y) * sum : y * (d - sum);
}

/* ---- rows ------------------------------------------------------------------------------------ */

template <class S, class T, bool LOG>
__global__ void GPU_BLOCK(S::THREADS) softmax_rows(int64_t rows, int64_t packs, const T *x, T *z) {
    typedef gpu_real<T> A;
    for (int64_t r = gpu_team<S::TEAM>(); r < rows; r += gpu_teams<S::TEAM>()) {
        gpu_row<T, S::W, S::TEAM, S::KEEP> row;
        row.open(x + r * packs * S::W, packs);
        const soft_end<LOG, A> end(gpu_soft_of<S>(row, packs, gpu_nothing()));
        gpu_pack<T, S::W> *to = (gpu_pack<T, S::W> *)z + r * packs;
        gpu_each_pack<S::TEAM, S::KEEP>(packs, [&](int j, int64_t i) {
            gpu_pack<T, S::W> v = row.get(j, i);
#pragma unroll
            for (int k = 0; k < S::W; k++)
                gpu_put(&v.v[k], end(gpu_get(v.v[k])));
            to[i] = v;
        });
    }
}

template <class S, class T, bool LOG>
__global__ void GPU_BLOCK(S::THREADS)
    softmax_rows_grad(int64_t rows, int64_t packs, const T *d, const T *y, T *z) {
    typedef gpu_real<T> A;
    for (int64_t r = gpu_team<S::TEAM>(); r < rows; r += gpu_teams<S::TEAM>()) {
        gpu_row<T, S::W, S::TEAM, S::KEEP> row_d, row_y;
        row_d.open(d + r * packs * S::W, packs);
        row_y.open(y + r * packs * S::W, packs);
        double total = 0;
        gpu_each_pack<S::TEAM, S::KEEP>(packs, [&](int j, int64_t i) {
            const gpu_pack<T, S::W> a = row_d.get(j, i);
            A sum = 0;
            if constexpr (LOG) {
#pragma unroll
                for (int k = 0; k < S::W; k++)
                    sum += gpu_get(a.v[k]);
            } else {
                const gpu_pack<T, S::W> b = row_y.get(j, i);
#pragma unroll
                for (int k = 0; k < S::W; k++)
                    sum += gpu_get(a.v[k]) * gpu_get(b.v[k]);
            }
            total += (double)sum;
        });
        const A sum = (A)gpu_team_sum<S::TEAM>(total);
        gpu_pack<T, S::W> *to = (gpu_pack<T, S::W> *)z + r * packs;
        gpu_each_pack<S::TEAM, S::KEEP>(packs, [&](int j, int64_t i) {
            const gpu_pack<T, S::W> a = row_d.get(j, i), b = row_y.get(j, i);
            gpu_pack<T, S::W> v;
#pragma unroll
            for (int k = 0; k < S::W; k++)
                gpu_put(&v.v[k], soft_back<LOG>(gpu_get(a.v[k]), gpu_get(b.v[k]), sum));
            to[i] = v;
        });
    }
}

/* ---- columns --------------------------------------------------------------------------------- */

template <class T, bool LOG>
__global__ void GPU_BLOCK(GPU_ROW_THREADS) softmax_columns(gradd_lanes_t s, const T *x, T *z) {
    typedef gpu_real<T> A;
    const int64_t columns = s.outer * s.inner, all = (int64_t)gridDim.x * GPU_WARP;
    for (int64_t first = (int64_t)blockIdx.x * GPU_WARP; first < columns; first += all) {
        const int64_t c = first + threadIdx.x % GPU_WARP, o = c / s.inner;
        const int64_t at = o * s.n * s.inner + (c - o * s.inner), n = c < columns ? s.n : 0;
        gpu_soft<A> soft = gpu_soft_none<A>();
        for (int64_t i = gpu_slice(); i < n; i += GPU_SLICES) {
            const A one[1] = {gpu_get(x[at + i * s.inner])};
            gpu_soft_scan(&soft, one);
        }
        const soft_end<LOG, A> end(gpu_slices_soft(soft));
        for (int64_t i = gpu_slice(); i < n; i += GPU_SLICES)
            gpu_put(&z[at + i * s.inner], end(gpu_get(x[at + i * s.inner])));
    }
}

template <class T, bool LOG>
__global__ void GPU_BLOCK(GPU_ROW_THREADS)
    softmax_columns_grad(gradd_lanes_t s, const T *d, const T *y, T *z) {
    typedef gpu_real<T> A;
    const int64_t columns = s.outer * s.inner, all = (int64_t)gridDim.x * GPU_WARP;
    for (int64_t first = (int64_t)blockIdx.x * GPU_WARP; first < columns; first += all) {
        const int64_t c = first + threadIdx.x % GPU_WARP, o = c / s.inner;
        const int64_t at = o * s.n * s.inner + (c - o * s.inner), n = c < columns ? s.n : 0;
        double total = 0;
        for (int64_t i = gpu_slice(); i < n; i += GPU_SLICES) {
            const A a = gpu_get(d[at + i * s.inner]);
            total += (double)(LOG ? a : a * gpu_get(y[at + i * s.inner]));
        }
        const A sum = (A)gpu_slices_join(total, [](double a, double b) { return a + b; });
        for (int64_t i = gpu_slice(); i < n; i += GPU_SLICES) {
            const int64_t k = at + i * s.inner;
            gpu_put(&z[k], soft_back<LOG>(gpu_get(d[k]), gpu_get(y[k]), sum));
        }
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

/* Bytes that a thread keeps of a row. */
enum { KEPT = 128, KEPT_GRAD = 64 };

template <class T, bool LOG> gradd_status_t softmax(const gradd_launch_t *r) {
    const T *x = (const T *)r->in[0].data;
    T *z = (T *)r->out[0].data;
    gradd_lanes_t s;
    GRADD_TRY(gradd_lanes_of_axis(&r->in[0].type, r->attrs, -1, &s));
    if (!gradd_type_count(&r->in[0].type)) return GRADD_OK;
    if (s.inner == 1)
        return gpu_by_row<T, KEPT>(s.n, gpu_aligned(x, 16) && gpu_aligned(z, 16), [&](auto shape) {
            typedef decltype(shape) S;
            GPU_LAUNCH((softmax_rows<S, T, LOG>), S::blocks(s.outer), S::THREADS, s.outer,
                       s.n / S::W, x, z);
            return gpu_launched(r->op->name);
        });
    GPU_LAUNCH((softmax_columns<T, LOG>), gpu_column_blocks(s.outer * s.inner), GPU_ROW_THREADS, s,
               x, z);
    return gpu_launched(r->op->name);
}

template <class T, bool LOG> gradd_status_t softmax_grad(const gradd_launch_t *r) {
    const T *d = (const T *)r->in[0].data, *y = (const T *)r->in[1].data;
    T *z = (T *)r->out[0].data;
    gradd_lanes_t s;
    GRADD_TRY(gradd_lanes_of_axis(&r->in[0].type, r->attrs, -1, &s));
    if (!gradd_type_count(&r->in[0].type)) return GRADD_OK;
    const bool wide = gpu_aligned(d, 16) && gpu_aligned(y, 16) && gpu_aligned(z, 16);
    if (s.inner == 1)
        return gpu_by_row<T, KEPT_GRAD>(s.n, wide, [&](auto shape) {
            typedef decltype(shape) S;
            GPU_LAUNCH((softmax_rows_grad<S, T, LOG>), S::blocks(s.outer), S::THREADS, s.outer,
                       s.n / S::W, d, y, z);
            return gpu_launched(r->op->name);
        });
    GPU_LAUNCH((softmax_columns_grad<T, LOG>), gpu_column_blocks(s.outer * s.inner),
               GPU_ROW_THREADS, s, d, y, z);
    return gpu_launched(r->op->name);
}

#define SOFTMAX_RUN(name, function, LOG)                                                           \
    static gradd_status_t compute_##name(const gradd_launch_t *r) {                                \
        return gpu_switch(gpu_floats(), r->in[0].type.dtype,                                       \
                          [&](auto t) { return function<typename decltype(t)::type, LOG>(r); });   \
    }
SOFTMAX_RUN(softmax, softmax, false)
SOFTMAX_RUN(log_softmax, softmax, true)
SOFTMAX_RUN(softmax_grad, softmax_grad, false)
SOFTMAX_RUN(log_softmax_grad, softmax_grad, true)

GRADD_KERNELS(cuda, softmax,
              GRADD_KERNEL("Softmax", "rows", .inplace = 1, .compute = compute_softmax),
              GRADD_KERNEL("LogSoftmax", "rows", .inplace = 1, .compute = compute_log_softmax),
              GRADD_KERNEL("SoftmaxGrad", "rows", .inplace = 3, .compute = compute_softmax_grad),
              GRADD_KERNEL("LogSoftmaxGrad", "rows", .inplace = 3,
                           .compute = compute_log_softmax_grad));
