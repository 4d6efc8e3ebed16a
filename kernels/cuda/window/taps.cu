/* Taps on a GPU: a thread for each result. See kernels/ops/window/taps.c. */
#include "kernels/cuda/gpu.h"
#include "kernels/describe/lanes.h"

enum { THREADS = 256 };

template <class T> struct taps_t {
    const T *x, *weight;
    const int64_t *span;
    T *y;
    int64_t n, m, inner, width, all;
};

template <class T> __global__ void GPU_BLOCK(THREADS) sum_windows(taps_t<T> p) {
    const int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x; at < p.all; at += step) {
        const int64_t i = at % p.inner, j = at / p.inner % p.m, o = at / p.inner / p.m;
        const int64_t first = p.span[2 * j], size = p.span[2 * j + 1];
        const T *x = p.x + (o * p.n + first) * p.inner + i, *weight = p.weight + j * p.width;
        double sum = 0;
        for (int64_t t = 0; t < size; t++)
            sum += (double)weight[t] * (double)x[t * p.inner];
        p.y[at] = (T)sum;
    }
}

static gradd_status_t compute_taps(const gradd_launch_t *r) {
    gradd_lanes_t l;
    GRADD_TRY(gradd_lanes_of_axis(&r->in[0].type, r->attrs, -1, &l));
    return gpu_switch(gpu_types<float, double>(), r->in[0].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        const int64_t m = r->in[1].type.dims[0];
        const taps_t<T> p = {(const T *)r->in[0].data,
                             (const T *)r->in[2].data,
                             (const int64_t *)r->in[1].data,
                             (T *)r->out[0].data,
                             l.n,
                             m,
                             l.inner,
                             r->in[2].type.dims[1],
                             l.outer * m * l.inner};
        if (!p.all) return GRADD_OK;
        GPU_LAUNCH((sum_windows<T>), gpu_blocks(p.all, THREADS), THREADS, p);
        return gpu_launched("Taps");
    });
}

#define WIDE (GRADD_DTB(F32) | GRADD_DTB(F64))

GRADD_KERNELS(cuda, taps,
              GRADD_KERNEL("Taps", "windows", .types = {WIDE, GRADD_DTB(I64), WIDE},
                           .compute = compute_taps));
