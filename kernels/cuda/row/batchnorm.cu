/* BatchNorm and its gradient on a GPU. See kernels/ops/norm/batchnorm.c and row_teams.h.
 *
 * x is [B, C, S]. A block sums a channel, or, where S = 1, 32 neighbouring channels in slices of
 * the batch. Elements are then normalised one by one.
 */
#include "kernels/cuda/row/row_teams.h"
#include "kernels/describe/batch_norm.h"

template <class T> struct batch_t {
    const T *x, *dy, *scale, *bias;
    const T *mean, *inv; /* [C] */
    T *y;                /* y or dx */
    double *sum, *sum_h; /* [C]: of dy and of dy (x - mean) */
    gradd_channels_t s;
    double epsilon;
    bool given;
};

/* The sum of f(i) over the elements i of channel c, in all threads of the block; 0 <= c < C. */
template <class T, class F> GPU_FN double sum_channel(const batch_t<T> &p, int64_t c, F f) {
    double total = 0;
    for (int64_t b = 0; b < p.s.batch; b++)
        for (int64_t i = threadIdx.x; i < p.s.spatial; i += GPU_ROW_THREADS)
            total += f((b * p.s.channels + c) * p.s.spatial + i);
    return gpu_team_sum<GPU_ROW_THREADS>(total);
}

/* The same where S = 1, for the channel of the thread's column; c may be beyond the last one. */
template <class T, class F> GPU_FN double sum_column(const batch_t<T> &p, int64_t c, F f) {
    double total = 0;
    for (int64_t b = gpu_slice(); c < p.s.channels && b < p.s.batch; b += GPU_SLICES)
        total += f(b * p.s.channels + c);
    return gpu_slices_join(total, [](double a, double b) { return a + b; });
}

/* f(c, keeps) for all channels of the block; keeps: in one thread for each. */
template <bool COLUMNS, class T, class F> GPU_FN void each_channel(const batch_t<T> &p, F f) {
    if (COLUMNS) {
        const int64_t all = (int64_t)gridDim.x * GPU_WARP;
        for (int64_t at = (int64_t)blockIdx.x * GPU_WARP; at < p.s.channels; at += all) {
            const int64_t c = at + threadIdx.x % GPU_WARP;
            f(c, gpu_slice() == 0 && c < p.s.channels);
        }
    } else {
        for (int64_t c = blockIdx.x; c < p.s.channels; c += gridDim.x)
            f(c, threadIdx.x == 0);
    }
}
template <bool COLUMNS, class T, class F>
GPU_FN double sum_of(const batch_t<T> &p, int64_t c, F f) {
    if (COLUMNS) return sum_column(p, c, f);
    return sum_channel(p, c, f);
}

template <bool COLUMNS, class T>
__global__ void GPU_BLOCK(GPU_ROW_THREADS)
    batch_moments(batch_t<T> p, T *out_mean, T *out_var, T *out_inv) {
    const double n = (double)p.s.batch * (double)p.s.spatial;
    each_channel<COLUMNS>(p, [&](int64_t c, bool keeps) {
        double mean = sum_of<COLUMNS>(p, c, [&](int64_t i) { return (double)p.x[i]; });
        mean = n > 0 ? mean / n : 0;
        double square = sum_of<COLUMNS>(p, c, [&](int64_t i) {
            const double left = (double)p.x[i] - mean;
            return left * left;
        });
        const T var = (T)(n > 0 ? square / n : 0);
        if (!keeps) return;
        out_mean[c] = (T)mean;
        out_inv[c] = (T)(1 / vsqrt((double)var + p.epsilon));
        if (out_var) out_var[c] = var;
    });
}

template <class T>
__global__ void GPU_BLOCK(GPU_ROW_THREADS)
    batch_given(batch_t<T> p, const T *mean, const T *var, T *out_mean, T *out_var, T *out_inv) {
    const int64_t step = (int64_t)gridDim.x * GPU_ROW_THREADS;
    for (int64_t c = (int64_t)blockIdx.x * GPU_ROW_THREADS + threadIdx.x; c < p.s.channels;
         c += step) {
        out_mean[c] = mean[c];
        out_inv[c] = (T)(1 / vsqrt((double)var[c] + p.epsilon));
        if (out_var) out_var[c] = var[c];
    }
}

template <class T> __global__ void GPU_BLOCK(GPU_ROW_THREADS) batch_normalise(batch_t<T> p) {
    const int64_t n = p.s.batch * p.s.channels * p.s.spatial;
    const int64_t step = (int64_t)gridDim.x * GPU_ROW_THREADS;
    for (int64_t i = (int64_t)blockIdx.x * GPU_ROW_THREADS + threadIdx.x; i < n; i += step) {
        const int64_t c = i / p.s.spatial % p.s.channels;
        p.y[i] = (p.x[i] - p.mean[c]) * (p.inv[c] * p.scale[c]) + p.bias[c];
    }
}

template <bool COLUMNS, class T>
__global__ void GPU_BLOCK(GPU_ROW_THREADS) batch_sums(batch_t<T> p, T *dscale, T *dbias) {
    each_channel<COLUMNS>(p, [&](int64_t c, bool keeps) {
        const T mean = c < p.s.channels ? p.mean[c] : (T)0;
        const double sum = sum_of<COLUMNS>(p, c, [&](int64_t i) { return (double)p.dy[i]; });
        const double sum_h =
            sum_of<COLUMNS>(p, c, [&](int64_t i) { return (double)(p.dy[i] * (p.x[i] - mean)); });
        if (!keeps) return;
        p.sum[c] = sum;
        p.sum_h[c] = sum_h;
        if (dbias) dbias[c] = (T)sum;
        if (dscale) dscale[c] = (T)(sum_h * (double)p.inv[c]);
    });
}

template <class T> __global__ void GPU_BLOCK(GPU_ROW_THREADS) batch_slopes(batch_t<T> p) {
    const int64_t n = p.s.batch * p.s.channels * p.s.spatial;
    const int64_t step = (int64_t)gridDim.x * GPU_ROW_THREADS;
    const double each = (double)p.s.batch * (double)p.s.spatial;
    for (int64_t i = (int64_t)blockIdx.x * GPU_ROW_THREADS + threadIdx.x; i < n; i += step) {
        const int64_t c = i / p.s.spatial % p.s.channels;
        const double inv = (double)p.inv[c], factor = inv * (double)p.scale[c];
        const T slope = (T)factor, by_h = (T)(-factor * inv * inv * p.sum_h[c] / each);
        const T shift = (T)(-factor * p.sum[c] / each);
        p.y[i] = p.given ? slope * p.dy[i] : slope * p.dy[i] + by_h * (p.x[i] - p.mean[c]) + shift;
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

static void *output(const gradd_launch_t *r, int j) {
    return j < r->n_out ? r->out[j].data : nullptr;
}

static gradd_channels_t sizes_of(const gradd_type_t *x) {
    gradd_channels_t s = gradd_channels_of(x);
    if (!s.spatial) s.batch = 0, s.spatial = 1;
    return s;
}

typedef gpu_types<float, double> types_t;

static gradd_status_t compute_forward(const gradd_launch_t *r) {
    return gpu_switch(types_t(), r->in[GRADD_BATCH_X].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        batch_t<T> p = {};
        p.s = sizes_of(&r->in[GRADD_BATCH_X].type);
        if (!p.s.channels) return GRADD_OK;
        p.x = (const T *)r->in[GRADD_BATCH_X].data;
        p.scale = (const T *)r->in[GRADD_BATCH_SCALE].data;
        p.bias = (const T *)r->in[GRADD_BATCH_BIAS].data;
        p.y = (T *)r->out[0].data;
        p.epsilon = gradd_attr_float(r->attrs, GRADD_BATCH_EPSILON, 1e-5);
        T *mean = (T *)output(r, GRADD_BATCH_OUT_MEAN);
        T *var = (T *)output(r, GRADD_BATCH_OUT_VAR);
        T *inv = (T *)output(r, GRADD_BATCH_OUT_INV), *room = (T *)r->workspace;
        mean = mean ? mean : room;
        inv = inv ? inv : room + p.s.channels;
        p.mean = mean, p.inv = inv;
        const bool given = r->n_in > GRADD_BATCH_MEAN && r->in[GRADD_BATCH_MEAN].type.dtype;
        if (given)
            GPU_LAUNCH((batch_given<T>), gpu_blocks(p.s.channels, GPU_ROW_THREADS), GPU_ROW_THREADS,
                       p, (const T *)r->in[GRADD_BATCH_MEAN].data,
                       (const T *)r->in[GRADD_BATCH_VAR].data, mean, var, inv);
        else if (p.s.spatial == 1)
            GPU_LAUNCH((batch_moments<true, T>), gpu_column_blocks(p.s.channels), GPU_ROW_THREADS,
                       p, mean, var, inv);
        else
            GPU_LAUNCH((batch_moments<false, T>), gpu_blocks(p.s.channels, 1), GPU_ROW_THREADS, p,
                       mean, var, inv);
        const int64_t n = gradd_type_count(&r->in[GRADD_BATCH_X].type);
        if (n) GPU_LAUNCH((batch_normalise<T>), gpu_blocks(n, GPU_ROW_THREADS), GPU_ROW_THREADS, p);
        return gpu_launched(r->op->name);
    });
}

/* Outputs: dx, dscale, dbias; any of them may be unwanted. */
static gradd_status_t compute_backward(const gradd_launch_t *r) {
    return gpu_switch(types_t(), r->in[GRADD_BATCH_GRAD_X].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        batch_t<T> p = {};
        p.s = sizes_of(&r->in[GRADD_BATCH_GRAD_X].type);
        if (!p.s.channels) return GRADD_OK;
        p.x = (const T *)r->in[GRADD_BATCH_GRAD_X].data;
        p.dy = (const T *)r->in[GRADD_BATCH_GRAD_DY].data;
        p.scale = (const T *)r->in[GRADD_BATCH_GRAD_SCALE].data;
        p.mean = (const T *)r->in[GRADD_BATCH_GRAD_MEAN].data;
        p.inv = (const T *)r->in[GRADD_BATCH_GRAD_INV].data;
        p.y = (T *)output(r, GRADD_BATCH_DX);
        p.sum = (double *)r->workspace;
        p.sum_h = p.sum + p.s.channels;
        p.given = gradd_attr_int(r->attrs, GRADD_BATCH_GIVEN, 0);
        T *dscale = (T *)output(r, GRADD_BATCH_DSCALE);
        T *dbias = (T *)output(r, GRADD_BATCH_DBIAS);
        if (p.s.spatial == 1)
            GPU_LAUNCH((batch_sums<true, T>), gpu_column_blocks(p.s.channels), GPU_ROW_THREADS, p,
                       dscale, dbias);
        else
            GPU_LAUNCH((batch_sums<false, T>), gpu_blocks(p.s.channels, 1), GPU_ROW_THREADS, p,
                       dscale, dbias);
        const int64_t n = gradd_type_count(&r->in[GRADD_BATCH_X].type);
        if (p.y && n)
            GPU_LAUNCH((batch_slopes<T>), gpu_blocks(n, GPU_ROW_THREADS), GPU_ROW_THREADS, p);
        return gpu_launched(r->op->name);
    });
}

static size_t workspace_backward(const gradd_infer_t *c) {
    return 2 * sizeof(double) * (size_t)c->in[GRADD_BATCH_GRAD_X].type.dims[1];
}

static size_t workspace_forward(const gradd_infer_t *c) {
    return 2 * sizeof(double) * (size_t)c->in[GRADD_BATCH_X].type.dims[1];
}

#define WIDE (GRADD_DTB(F32) | GRADD_DTB(F64))

GRADD_KERNELS(cuda, batchnorm,
              GRADD_KERNEL("BatchNorm", "channels", .types = {WIDE}, .inplace = 1,
                           .compute = compute_forward, .workspace = workspace_forward),
              GRADD_KERNEL("BatchNormGrad", "channels", .types = {WIDE}, .inplace = 3,
                           .compute = compute_backward, .workspace = workspace_backward));
