/* Distribution of rows of memory among threads, and the functions that move them.
 *
 * A group of 2^shift neighbouring threads works on one unit, a row or a piece of a long one, so
 * short rows waste no threads, and long ones are spread over many groups. Rows are walked in packs
 * of up to 16 bytes, as their length and addresses allow.
 */
#ifndef GRADD_KERNELS_CUDA_INDEX_ROW_GROUPS_H
#define GRADD_KERNELS_CUDA_INDEX_ROW_GROUPS_H

#include "kernels/cuda/index/pick.h"

enum { GPU_GROUP_THREADS = 256 };

struct gpu_groups {
    int shift, each; /* threads of a group; packs of a thread, as far as a row reaches */
    int64_t packs;   /* of a row */
    int64_t units;   /* pieces of all rows */
    gpu_div pieces;  /* of a row */
    unsigned blocks; /* to launch, of GPU_GROUP_THREADS */

    __device__ int64_t first() const {
        return ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) >> shift;
    }
    __device__ int64_t all() const {
        return (int64_t)gridDim.x * blockDim.x >> shift;
    }
    /* The first of this thread's packs of a piece; the next ones are step() further. */
    __device__ int64_t pack(int64_t piece) const {
        const int64_t lane = threadIdx.x & (((unsigned)1 << shift) - 1);
        return ((piece * each) << shift) + lane;
    }
    __device__ int step() const {
        return 1 << shift;
    }
    /* Packs from `first` on to the end of the row, as far as a piece reaches. */
    __device__ int left(int64_t first) const {
        const int64_t all = packs - first;
        return all < each << shift ? (int)all : each << shift;
    }
};

/* A thread's packs of a row, N at most; all loads are on their way before one is used. */
template <int N, class P> struct gpu_part {
    P v[N];

    __device__ void load(const P *from, int step, int left) {
#pragma unroll
        for (int k = 0; k < N; k++)
            if (k * step < left) v[k] = from[k * step];
    }
    __device__ void fill(const P &x) {
#pragma unroll
        for (int k = 0; k < N; k++)
            v[k] = x;
    }
    __device__ void store(P *to, int step, int left) const {
#pragma unroll
        for (int k = 0; k < N; k++)
            if (k * step < left) to[k * step] = v[k];
    }
};

/* For `rows` rows, at most 2^most threads to each group. */
static inline gpu_groups gpu_groups_of(int64_t rows, int64_t packs, int most, int each) {
    gpu_groups l = {.shift = 0, .each = each, .packs = packs};
    while (l.shift < most && ((int64_t)1 << l.shift) < packs)
        l.shift++;
    const int64_t span = (int64_t)each << l.shift, pieces = (packs + span - 1) / span;
    l.units = rows * pieces;
    l.pieces = gpu_div_by(pieces, l.units);
    l.blocks = gpu_blocks(l.units << l.shift, GPU_GROUP_THREADS);
    return l;
}

/* ---- bytes ----------------------------------------------------------------------------------- */

typedef gpu_types<gpu_pack<uint32_t, 4>, gpu_pack<uint32_t, 2>, uint32_t, uint16_t, uint8_t>
    gpu_units;

/* f(gpu_type<P>()) for the widest P that a length and addresses are multiples of. */
template <class F> gradd_status_t gpu_by_width(gpu_types<>, uintptr_t, F) {
    return GRADD_OK;
}
template <class F, class P, class... More>
gradd_status_t gpu_by_width(gpu_types<P, More...>, uintptr_t bits, F f) {
    if (bits % sizeof(P) == 0) return f(gpu_type<P>());
    return gpu_by_width(gpu_types<More...>(), bits, f);
}

template <class P>
__global__ void GPU_BLOCK(GPU_GROUP_THREADS) gpu_copy_packs(int64_t n, P *to, const P *from) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all)
        to[i] = from ? from[i] : P{};
}

/* Copies; zeros where `from` is NULL. */
static inline gradd_status_t gpu_fill(const char *what, void *to, const void *from, size_t bytes) {
    if (!bytes || to == from) return GRADD_OK;
    return gpu_by_width(gpu_units(), (uintptr_t)to | (uintptr_t)from | bytes, [&](auto t) {
        typedef typename decltype(t)::type P;
        const int64_t n = (int64_t)(bytes / sizeof(P));
        GPU_LAUNCH((gpu_copy_packs<P>), gpu_blocks(n, GPU_GROUP_THREADS), GPU_GROUP_THREADS, n,
                   (P *)to, (const P *)from);
        return gpu_launched(what);
    });
}

/* ---- scratch --------------------------------------------------------------------------------- */

/* Takes arrays from scratch memory one after the other; without memory it counts their bytes. */
struct gpu_room {
    char *at;
    size_t bytes;

    template <class T> T *take(int64_t n) {
        T *p = at ? (T *)(at + bytes) : nullptr;
        bytes += (sizeof(T) * (size_t)n + 63) / 64 * 64;
        return p;
    }
};

#endif
