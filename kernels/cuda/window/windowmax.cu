/* WindowMax and its gradient on a GPU: a thread for each result, or for each element. See
 * kernels/ops/window/windowmax.c. */
#include "kernels/cuda/gpu.h"
#include "kernels/describe/windowmax.h"

enum { THREADS = 256, DY = 0, INDEX, TURNED };

struct gpu_span {
    int64_t first, size;
};

GPU_FN gpu_span span_of(const gradd_plane_t &p, int axis, int64_t j) {
    if (!p.span[axis]) return {0, 1};
    return {p.span[axis][2 * j], p.span[axis][2 * j + 1]};
}

template <class T>
__global__ void GPU_BLOCK(THREADS)
    window_max(gradd_plane_t p, const T *x, T *y, int64_t *index, int64_t all) {
    const int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x; at < all; at += step) {
        int64_t left = at;
        const gpu_span c = span_of(p, 2, left % p.m[2]);
        left /= p.m[2];
        const gpu_span b = span_of(p, 1, left % p.m[1]);
        left /= p.m[1];
        const gpu_span a = span_of(p, 0, left % p.m[0]);
        const T *plane = x + left / p.m[0] * p.n[0] * p.n[1] * p.n[2];
        T best = -(T)INFINITY;
        int64_t place =
            a.size && b.size && c.size ? (a.first * p.n[1] + b.first) * p.n[2] + c.first : 0;
        for (int64_t i = 0; i < a.size; i++)
            for (int64_t j = 0; j < b.size; j++)
                for (int64_t k = 0; k < c.size; k++) {
                    const int64_t to =
                        ((a.first + i * p.step[0]) * p.n[1] + b.first + j * p.step[1]) * p.n[2] +
                        c.first + k * p.step[2];
                    const T v = plane[to];
                    if (v > best || v != v) best = v, place = to;
                }
        y[at] = best;
        if (index) index[at] = place;
    }
}

template <class T>
__global__ void GPU_BLOCK(THREADS)
    window_max_grad(gradd_plane_t p, const T *dy, const int64_t *index, T *dx, int64_t all) {
    const int64_t step = (int64_t)gridDim.x * THREADS, size = p.n[0] * p.n[1] * p.n[2];
    for (int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x; at < all; at += step) {
        const int64_t place = at % size;
        int64_t left = place;
        const gpu_span c = span_of(p, 2, left % p.n[2]);
        left /= p.n[2];
        const gpu_span b = span_of(p, 1, left % p.n[1]);
        const gpu_span a = span_of(p, 0, left / p.n[1]);
        const int64_t plane = at / size * p.m[0] * p.m[1] * p.m[2];
        T sum = 0;
        for (int64_t i = a.first; i < a.first + a.size; i++)
            for (int64_t j = b.first; j < b.first + b.size; j++)
                for (int64_t k = c.first; k < c.first + c.size; k++) {
                    const int64_t from = plane + (i * p.m[1] + j) * p.m[2] + k;
                    if (index[from] == place) sum += dy[from];
                }
        dx[at] = sum;
    }
}

static gradd_status_t compute_max(const gradd_launch_t *r) {
    return gpu_switch(gpu_types<float, double>(), r->in[0].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        const gradd_plane_t p = gradd_plane_of(r, &r->in[0].type, &r->out[0].type, 1);
        const int64_t all = gradd_type_count(&r->out[0].type);
        if (!all) return GRADD_OK;
        GPU_LAUNCH((window_max<T>), gpu_blocks(all, THREADS), THREADS, p, (const T *)r->in[0].data,
                   (T *)r->out[0].data, r->n_out > 1 ? (int64_t *)r->out[1].data : nullptr, all);
        return gpu_launched("WindowMax");
    });
}

static gradd_status_t compute_max_grad(const gradd_launch_t *r) {
    return gpu_switch(gpu_types<float, double>(), r->in[DY].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        const gradd_plane_t p = gradd_plane_of(r, &r->out[0].type, &r->in[DY].type, TURNED);
        const int64_t all = gradd_type_count(&r->out[0].type);
        if (!all) return GRADD_OK;
        GPU_LAUNCH((window_max_grad<T>), gpu_blocks(all, THREADS), THREADS, p,
                   (const T *)r->in[DY].data, (const int64_t *)r->in[INDEX].data,
                   (T *)r->out[0].data, all);
        return gpu_launched("WindowMaxGrad");
    });
}

#define WIDE (GRADD_DTB(F32) | GRADD_DTB(F64))

GRADD_KERNELS(cuda, windowmax,
              GRADD_KERNEL("WindowMax", "windows", .types = {WIDE, GRADD_DTB(I64)},
                           .compute = compute_max),
              GRADD_KERNEL("WindowMaxGrad", "windows", .types = {WIDE, GRADD_DTB(I64)},
                           .compute = compute_max_grad));
