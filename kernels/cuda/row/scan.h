/* Running results along one axis of a tensor: the loop behind CumSum and its like.
 *
 * gpu_scan(what, l, reverse, f) walks each lane of [outer, n, inner] from one end to the other. f
 * is a struct with
 *     typedef ... S;                                  what runs
 *     S none() const;                                 in front of the first element
 *     S join(S a, S b) const;                         a's elements, and then b's; associative
 *     S load(int64_t at, bool first) const;           of one element
 *     void store(int64_t at, S before, S with) const; results in front of it and with it
 * where `at` is the element's place in the tensor and `first` that of its lane. Every thread writes
 * only what it has read before, so f may work in place. Many lanes side by side take a thread each,
 * in order; a lane of its own takes a warp or a block, which joins runs of elements as a tree.
 */
#ifndef GRADD_KERNELS_CUDA_ROW_SCAN_H
#define GRADD_KERNELS_CUDA_ROW_SCAN_H

#include "kernels/cuda/gpu.h"
#include "kernels/describe/lanes.h"

enum { GPU_SCAN_THREADS = 256, GPU_SCAN_ITEMS = 4, GPU_SCAN_AHEAD = 8 };

/* Lanes, and the place of their elements. */
struct gpu_lanes {
    gradd_lanes_t l;
    bool reverse;

    __device__ int64_t base(int64_t lane) const {
        return l.inner == 1 ? lane * l.n : lane / l.inner * l.n * l.inner + lane % l.inner;
    }
    __device__ int64_t at(int64_t base, int64_t i) const {
        return base + (reverse ? l.n - 1 - i : i) * l.inner;
    }
};

/* Exchanges within a warp; overloaded for what is longer than 8 bytes. */
template <class T> GPU_FN T gpu_scan_up(T v, int lanes) {
    return __shfl_up_sync(GPU_ALL, v, lanes);
}
template <class T> GPU_FN T gpu_scan_from(T v, int lane) {
    return __shfl_sync(GPU_ALL, v, lane);
}

/* One thread per lane; the next elements are read ahead. */
template <class F>
__global__ void GPU_BLOCK(GPU_SCAN_THREADS) gpu_scan_lanes(F f, gpu_lanes x, int64_t lanes) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t k = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; k < lanes; k += all) {
        const int64_t base = x.base(k);
        typename F::S sum = f.none(), item[GPU_SCAN_AHEAD];
        for (int64_t i = 0; i < x.l.n; i += GPU_SCAN_AHEAD) {
#pragma unroll
            for (int j = 0; j < GPU_SCAN_AHEAD; j++)
                if (i + j < x.l.n) item[j] = f.load(x.at(base, i + j), i + j == 0);
#pragma unroll
            for (int j = 0; j < GPU_SCAN_AHEAD; j++) {
                if (i + j >= x.l.n) continue;
                const typename F::S before = sum;
                sum = f.join(sum, item[j]);
                f.store(x.at(base, i + j), before, sum);
            }
        }
    }
}

/* Of a warp or a block of THREADS: what stands in front of each thread's `mine`, and the whole. */
template <int THREADS, class F>
GPU_FN typename F::S gpu_scan_threads(const F &f, typename F::S mine, typename F::S *out_whole) {
    typedef typename F::S S;
    constexpr int WARPS = THREADS / GPU_WARP;
    const int lane = (int)threadIdx.x % GPU_WARP, warp = (int)threadIdx.x / GPU_WARP;
    S with = mine;
#pragma unroll
    for (int d = 1; d < GPU_WARP; d *= 2) {
        const S up = gpu_scan_up(with, d);
        if (lane >= d) with = f.join(up, with);
    }
    S before = gpu_scan_up(with, 1);
    if (!lane) before = f.none();
    if constexpr (WARPS == 1) {
        *out_whole = gpu_scan_from(with, GPU_WARP - 1);
        return before;
    } else {
        GPU_SHARED(S, part, WARPS);
        __syncthreads(); /* the parts of the chunk before have been read */
        if (lane == GPU_WARP - 1) part[warp] = with;
        __syncthreads();
        S whole = f.none(), front = whole;
        for (int i = 0; i < WARPS; i++) {
            if (i == warp) front = whole;
            whole = f.join(whole, part[i]);
        }
        *out_whole = whole;
        return f.join(front, before);
    }
}

/* One warp or block per lane. */
template <int THREADS, class F>
__global__ void GPU_BLOCK(GPU_SCAN_THREADS) gpu_scan_wide(F f, gpu_lanes x, int64_t lanes) {
    typedef typename F::S S;
    constexpr int ITEMS = GPU_SCAN_ITEMS, PER_BLOCK = GPU_SCAN_THREADS / THREADS;
    const int me = (int)threadIdx.x % THREADS;
    for (int64_t k = (int64_t)blockIdx.x * PER_BLOCK + threadIdx.x / THREADS; k < lanes;
         k += (int64_t)gridDim.x * PER_BLOCK) {
        const int64_t base = x.base(k);
        S carry = f.none();
        for (int64_t chunk = 0; chunk < x.l.n; chunk += THREADS * ITEMS) {
            const int64_t from = chunk + me * ITEMS;
            S item[ITEMS], mine = f.none(), whole;
#pragma unroll
            for (int j = 0; j < ITEMS; j++) {
                const int64_t i = from + j;
                item[j] = i < x.l.n ? f.load(x.at(base, i), i == 0) : f.none();
                mine = f.join(mine, item[j]);
            }
            S sum = gpu_scan_threads<THREADS>(f, mine, &whole);
            sum = f.join(carry, sum);
#pragma unroll
            for (int j = 0; j < ITEMS; j++) {
                const S before = sum;
                sum = f.join(sum, item[j]);
                if (from + j < x.l.n) f.store(x.at(base, from + j), before, sum);
            }
            carry = f.join(carry, whole);
        }
    }
}

template <class F>
gradd_status_t gpu_scan(const char *what, const gradd_lanes_t &l, bool reverse, const F &f) {
    const int64_t lanes = l.outer * l.inner, busy = (int64_t)gpu_call.units * 64;
    const gpu_lanes x = {l, reverse};
    if (!lanes || !l.n) return GRADD_OK;
    if (l.inner > 1 && (lanes >= busy || l.n <= GPU_SCAN_AHEAD))
        GPU_LAUNCH((gpu_scan_lanes<F>), gpu_blocks(lanes, GPU_SCAN_THREADS), GPU_SCAN_THREADS, f, x,
                   lanes);
    else if (l.n <= 2 * GPU_WARP * GPU_SCAN_ITEMS)
        GPU_LAUNCH((gpu_scan_wide<GPU_WARP, F>), gpu_blocks(lanes, GPU_SCAN_THREADS / GPU_WARP),
                   GPU_SCAN_THREADS, f, x, lanes);
    else
        GPU_LAUNCH((gpu_scan_wide<GPU_SCAN_THREADS, F>), gpu_blocks(lanes, 1), GPU_SCAN_THREADS, f,
                   x, lanes);
    return gpu_launched(what);
}

#endif
