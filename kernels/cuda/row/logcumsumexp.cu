/* LogCumSumExp and its gradient on a GPU, in double as on the CPU. See
 * kernels/ops/reduce/logcumsumexp.c.
 *
 * The gradient's h_j = dy_j + w_j h_{j+1} runs from the end, by composing maps h -> a h + b.
 */
#include "kernels/cuda/row/scan.h"
#include "kernels/math/formulas.h"

template <class T> struct running_log {
    typedef double S;
    const T *x;
    T *y;

    __device__ S none() const {
        return -INFINITY;
    }
    __device__ S join(S a, S b) const {
        return gradd_log_add(a, b);
    }
    __device__ S load(int64_t at, bool) const {
        return (S)gpu_get(x[at]);
    }
    __device__ void store(int64_t at, S, S with) const {
        gpu_put(&y[at], (gpu_real<T>)with);
    }
};

typedef struct affine_s {
    double a, b;
} affine_t;

GPU_FN affine_t gpu_scan_up(affine_t v, int lanes) {
    return {__shfl_up_sync(GPU_ALL, v.a, lanes), __shfl_up_sync(GPU_ALL, v.b, lanes)};
}
GPU_FN affine_t gpu_scan_from(affine_t v, int lane) {
    return {__shfl_sync(GPU_ALL, v.a, lane), __shfl_sync(GPU_ALL, v.b, lane)};
}

template <class T> struct running_share {
    typedef affine_t S;
    const T *dy, *x, *y;
    T *dx;
    int64_t inner;

    __device__ S none() const {
        return {1, 0};
    }
    __device__ S join(S first, S then) const {
        return {then.a * first.a, then.a * first.b + then.b};
    }
    __device__ S load(int64_t at, bool first) const {
        const double here = (double)gpu_get(y[at]);
        const double a = first ? 1 : gradd_log_share(here, (double)gpu_get(y[at + inner]));
        return {a, (double)gpu_get(dy[at])};
    }
    __device__ void store(int64_t at, S, S with) const {
        const double share = exp((double)gpu_get(x[at]) - (double)gpu_get(y[at]));
        gpu_put(&dx[at], (gpu_real<T>)(share * with.b));
    }
};

static gradd_status_t compute_forward(const gradd_launch_t *r) {
    gradd_lanes_t l;
    GRADD_TRY(gradd_lanes_of_axis(&r->in[0].type, r->attrs, 0, &l));
    return gpu_switch(gpu_floats(), r->in[0].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        const running_log<T> f = {(const T *)r->in[0].data, (T *)r->out[0].data};
        return gpu_scan("LogCumSumExp", l, false, f);
    });
}

static gradd_status_t compute_backward(const gradd_launch_t *r) {
    gradd_lanes_t l;
    GRADD_TRY(gradd_lanes_of_axis(&r->in[0].type, r->attrs, 0, &l));
    return gpu_switch(gpu_floats(), r->in[0].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        const running_share<T> f = {(const T *)r->in[0].data, (const T *)r->in[1].data,
                                    (const T *)r->in[2].data, (T *)r->out[0].data, l.inner};
        return gpu_scan("LogCumSumExpGrad", l, true, f);
    });
}

GRADD_KERNELS(cuda, logcumsumexp,
              GRADD_KERNEL("LogCumSumExp", "scan", .types = {GPU_T_FLOAT},
                           .compute = compute_forward),
              GRADD_KERNEL("LogCumSumExpGrad", "scan", .types = {GPU_T_FLOAT},
                           .compute = compute_backward));
