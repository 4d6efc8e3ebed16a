/* Rows with the same target, brought together: sums and other folds by the target's number.
 *
 * gpu_fold_rows takes a functor that gives the target of row i (-1 = none), sorts the positions by
 * target, and works on runs of equal targets in rising order of positions, as the CPU does
 * (kernels/cpu/row_sums.h), so bits do not depend on which thread runs first.
 *
 *     GPU_ONTO    to[r] = to[r] + from[i1] + from[i2] ...
 *     GPU_SCALED  to[r] = (clear ? 0 : to[r]) + scale * (from[i1] + from[i2] + ...)
 *     GPU_MIN, GPU_MAX, GPU_MUL: to[r] folded with one after the other
 *
 * gpu_put_rows writes the last of a run in the place of its target, whatever the elements are.
 *
 * Sums go in chains of GPU_CHAIN rows, each by threads of its own: a chain that is a whole run ends
 * in the target, others in scratch memory, from where a second kernel adds them. Of any GPU_CHAIN
 * neighbours at most two begin a chain of a longer run: one its last, one its first.
 */
#ifndef GRADD_KERNELS_CUDA_INDEX_RUNS_H
#define GRADD_KERNELS_CUDA_INDEX_RUNS_H

#include "kernels/cuda/index/sort.h"
#include "kernels/cuda/map.h"

enum { GPU_CHAIN = 64, GPU_AHEAD = 4 };
typedef enum gpu_fold_e { GPU_ONTO, GPU_SCALED, GPU_MIN, GPU_MAX, GPU_MUL } gpu_fold_t;

typedef struct gpu_fold_rows_s {
    int64_t n, n_rows, width; /* rows of `from`, of `to`, elements of one */
    gpu_fold_t how;
    double scale;
    bool clear;
    void *to;
    const void *from;
    void *workspace;
} gpu_fold_rows_t;

GPU_BINARY(fold_add, E_ADD, E_ADD_I)
GPU_BINARY(fold_mul, E_MUL, E_MUL_I)
GPU_BINARY(fold_min, E_MIN, E_MIN)
GPU_BINARY(fold_max, E_MAX, E_MAX)

/* ---- runs ------------------------------------------------------------------------------------ */

/* Sorted positions by target; those of `none` are left out. */
template <class K> struct gpu_runs {
    const K *key, *at;
    int64_t n;
    K none;

    __device__ bool begins(int64_t p) const {
        return p == 0 || key[p - 1] != key[p];
    }
    /* Whether the run of p goes on at p + n. */
    __device__ bool lasts(int64_t p, int64_t more) const {
        return p + more < n && key[p + more] == key[p];
    }
    /* The first of [lo, hi) whose target is not below `row`; hi if there is none. */
    __device__ int64_t find(K row, int64_t lo, int64_t hi) const {
        while (lo < hi) {
            const int64_t mid = (lo + hi) / 2;
            if (key[mid] < row)
                lo = mid + 1;
            else
                hi = mid;
        }
        return lo;
    }
    /* Whether a chain begins at p. */
    __device__ bool chained(int64_t p) const {
        if (begins(p)) return true;
        if (p < GPU_CHAIN || key[p - GPU_CHAIN] != key[p]) return false;
        return (p - find(key[p], 0, p)) % GPU_CHAIN == 0;
    }
    /* The chain's row of scratch memory. */
    __device__ int64_t slot(int64_t p, bool first) const {
        return 2 * (p / GPU_CHAIN) + first;
    }
};

static inline int64_t gpu_runs_slots(int64_t n) {
    return n > GPU_CHAIN ? 2 * ((n + GPU_CHAIN - 1) / GPU_CHAIN) : 0;
}

template <class K, class F>
__global__ void GPU_BLOCK(GPU_GROUP_THREADS)
    gpu_find_targets(F target, int64_t n, K none, K *key, gpu_faults_t faults) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all) {
        const int64_t row = target(i, faults);
        key[i] = row < 0 ? none : (K)row;
    }
}

/* ---- folds ----------------------------------------------------------------------------------- */

template <class R, int W, class T> GPU_FN gpu_pack<R, W> gpu_wide(gpu_pack<T, W> x) {
    gpu_pack<R, W> y;
#pragma unroll
    for (int k = 0; k < W; k++)
        y.v[k] = gpu_get(x.v[k]);
    return y;
}
template <class T, int W, class R> GPU_FN gpu_pack<T, W> gpu_narrow(const gpu_pack<R, W> &x) {
    gpu_pack<T, W> y;
#pragma unroll
    for (int k = 0; k < W; k++)
        gpu_put(&y.v[k], x.v[k]);
    return y;
}
template <class F, class R, int W, class T>
GPU_FN void gpu_fold_in(F f, gpu_pack<R, W> *sum, gpu_pack<T, W> x) {
#pragma unroll
    for (int k = 0; k < W; k++)
        sum->v[k] = f((R)gpu_get(x.v[k]), sum->v[k]);
}

template <class T, class K, int W> struct gpu_fold {
    typedef gpu_real<T> R;
    gpu_runs<K> runs;
    gpu_groups groups;
    bool onto, clear;
    R scale;
    gpu_pack<T, W> *to;
    const gpu_pack<T, W> *from;
    gpu_pack<R, W> *part;

    /* Folds the rows of a run from p on, at most `most`, in order; several are on their way at a
     * time. Returns the end. */
    template <class F>
    __device__ int64_t run(F f, int64_t p, int64_t most, int64_t pack, gpu_pack<R, W> *sum) const {
        const K own = runs.key[p];
        const int64_t end = runs.n - p < most ? runs.n : p + most;
        while (p + GPU_AHEAD <= end && runs.key[p + GPU_AHEAD - 1] == own) {
            gpu_pack<T, W> x[GPU_AHEAD];
#pragma unroll
            for (int k = 0; k < GPU_AHEAD; k++)
                x[k] = from[(int64_t)runs.at[p + k] * groups.packs + pack];
#pragma unroll
            for (int k = 0; k < GPU_AHEAD; k++)
                gpu_fold_in(f, sum, x[k]);
            p += GPU_AHEAD;
        }
        for (; p < end && runs.key[p] == own; p++)
            gpu_fold_in(f, sum, from[(int64_t)runs.at[p] * groups.packs + pack]);
        return p;
    }

    /* A whole sum to its target. */
    __device__ void store(int64_t place, gpu_pack<R, W> sum) const {
        if (!onto) {
#pragma unroll
            for (int k = 0; k < W; k++)
                sum.v[k] = scale * sum.v[k];
            if (!clear) gpu_fold_in(f_fold_add(), &sum, to[place]);
        }
        to[place] = gpu_narrow<T>(sum);
    }
};

/* The functors add x + sum; floats add the same both ways. */
template <class T, class K, int W>
__global__ void GPU_BLOCK(GPU_GROUP_THREADS) gpu_sum_chains(gpu_fold<T, K, W> s) {
    const gpu_groups &l = s.groups;
    for (int64_t u = l.first(); u < l.units; u += l.all()) {
        const int64_t p = l.pieces(u), pack = l.pack(u - p * l.pieces.by);
        const K row = s.runs.key[p];
        if (pack >= l.packs || row == s.runs.none || !s.runs.chained(p)) continue;
        const bool first = s.runs.begins(p);
        const int64_t place = (int64_t)row * l.packs + pack;
        gpu_pack<gpu_real<T>, W> sum = {};
        if (s.onto && first) sum = gpu_wide<gpu_real<T>>(s.to[place]);
        s.run(f_fold_add(), p, GPU_CHAIN, pack, &sum);
        if (first && !s.runs.lasts(p, GPU_CHAIN))
            s.store(place, sum);
        else
            s.part[s.runs.slot(p, first) * l.packs + pack] = sum;
    }
}

template <class T, class K, int W>
__global__ void GPU_BLOCK(GPU_GROUP_THREADS) gpu_sum_long(gpu_fold<T, K, W> s) {
    const gpu_groups &l = s.groups;
    for (int64_t u = l.first(); u < l.units; u += l.all()) {
        const int64_t p = l.pieces(u), pack = l.pack(u - p * l.pieces.by);
        const K row = s.runs.key[p];
        if (pack >= l.packs || row == s.runs.none || !s.runs.begins(p) ||
            !s.runs.lasts(p, GPU_CHAIN))
            continue;
        gpu_pack<gpu_real<T>, W> sum = s.part[s.runs.slot(p, true) * l.packs + pack];
        const int64_t end = s.runs.find(row + 1, p, s.runs.n);
        for (int64_t q = p + GPU_CHAIN; q < end; q += GPU_AHEAD * GPU_CHAIN) {
            gpu_pack<gpu_real<T>, W> x[GPU_AHEAD] = {};
#pragma unroll
            for (int k = 0; k < GPU_AHEAD; k++)
                if (q + k * GPU_CHAIN < end)
                    x[k] = s.part[s.runs.slot(q + k * GPU_CHAIN, false) * l.packs + pack];
#pragma unroll
            for (int k = 0; k < GPU_AHEAD; k++)
                if (q + k * GPU_CHAIN < end) gpu_fold_in(f_fold_add(), &sum, x[k]);
        }
        s.store((int64_t)row * l.packs + pack, sum);
    }
}

template <class F, class T, class K, int W>
__global__ void GPU_BLOCK(GPU_GROUP_THREADS) gpu_fold_runs(F f, gpu_fold<T, K, W> s) {
    const gpu_groups &l = s.groups;
    for (int64_t u = l.first(); u < l.units; u += l.all()) {
        const int64_t p = l.pieces(u), pack = l.pack(u - p * l.pieces.by);
        const K row = s.runs.key[p];
        if (pack >= l.packs || row == s.runs.none || !s.runs.begins(p)) continue;
        const int64_t place = (int64_t)row * l.packs + pack;
        gpu_pack<gpu_real<T>, W> sum = gpu_wide<gpu_real<T>>(s.to[place]);
        s.run(f, p, s.runs.n, pack, &sum);
        s.to[place] = gpu_narrow<T>(sum);
    }
}

/* ---- of the host ----------------------------------------------------------------------------- */

template <class T, class K> struct gpu_fold_room {
    gpu_sort_t<K> sort;
    gpu_real<T> *part;
};
template <class T, class K>
gpu_fold_room<T, K> gpu_fold_room_of(gpu_room *room, int64_t n, int64_t width, bool chains) {
    gpu_fold_room<T, K> r = {gpu_sort_room<K>(room, n), nullptr};
    if (chains) r.part = room->take<gpu_real<T>>(gpu_runs_slots(n) * width);
    return r;
}

/* Whether 32 bits hold every target, the one that stands for none, and every position. */
static inline bool gpu_fold_is_small(int64_t n, int64_t n_rows) {
    return n < INT32_MAX && n_rows < UINT32_MAX;
}

/* Scratch bytes of gpu_fold_rows; 0 for an element type that it does not take. */
static inline size_t gpu_fold_workspace(gradd_dtype_t dtype, int64_t n, int64_t n_rows,
                                        int64_t width, bool chains) {
    gpu_room room = {};
    const bool small = gpu_fold_is_small(n, n_rows);
    const bool twice = dtype == GRADD_DT_F64 || dtype == GRADD_DT_I64;
    if (twice && small)
        gpu_fold_room_of<double, uint32_t>(&room, n, width, chains);
    else if (twice)
        gpu_fold_room_of<double, uint64_t>(&room, n, width, chains);
    else if (small)
        gpu_fold_room_of<float, uint32_t>(&room, n, width, chains);
    else
        gpu_fold_room_of<float, uint64_t>(&room, n, width, chains);
    return room.bytes;
}

template <class T, class K, int W>
gradd_status_t gpu_fold_run(const char *what, const gpu_fold_rows_t *s, const gpu_runs<K> &runs,
                            gpu_real<T> *part) {
    typedef gpu_real<T> R;
    gpu_fold<T, K, W> f = {};
    f.runs = runs;
    f.groups = gpu_groups_of(s->n, s->width / W, 5, 1);
    f.onto = s->how != GPU_SCALED;
    f.clear = s->clear;
    f.scale = (R)s->scale;
    f.to = (gpu_pack<T, W> *)s->to;
    f.from = (const gpu_pack<T, W> *)s->from;
    f.part = (gpu_pack<R, W> *)part;
    const unsigned blocks = f.groups.blocks;
    if (s->how == GPU_MUL)
        GPU_LAUNCH((gpu_fold_runs<f_fold_mul, T, K, W>), blocks, GPU_GROUP_THREADS, f_fold_mul(),
                   f);
    else if (s->how == GPU_MIN)
        GPU_LAUNCH((gpu_fold_runs<f_fold_min, T, K, W>), blocks, GPU_GROUP_THREADS, f_fold_min(),
                   f);
    else if (s->how == GPU_MAX)
        GPU_LAUNCH((gpu_fold_runs<f_fold_max, T, K, W>), blocks, GPU_GROUP_THREADS, f_fold_max(),
                   f);
    else {
        GPU_LAUNCH((gpu_sum_chains<T, K, W>), blocks, GPU_GROUP_THREADS, f);
        if (s->n > GPU_CHAIN) GPU_LAUNCH((gpu_sum_long<T, K, W>), blocks, GPU_GROUP_THREADS, f);
    }
    return gpu_launched(what);
}

/* Sorts the positions by target. */
template <class K, class F>
gradd_status_t gpu_runs_of(const char *what, const gpu_fold_rows_t *s, F target,
                           gpu_sort_t<K> *sort, gpu_runs<K> *out) {
    const K none = (K)s->n_rows;
    GPU_LAUNCH((gpu_find_targets<K, F>), gpu_blocks(s->n, GPU_GROUP_THREADS), GPU_GROUP_THREADS,
               target, s->n, none, sort->key, GPU_FAULTS);
    GRADD_TRY(gpu_sort(what, sort, none));
    *out = {sort->key, sort->at, s->n, none};
    return GRADD_OK;
}

template <class T, class K, class F>
gradd_status_t gpu_fold_keyed(const char *what, const gpu_fold_rows_t *s, F target) {
    constexpr int W = gpu_width<T>;
    gpu_room scratch = {(char *)s->workspace, 0};
    gpu_runs<K> runs;
    gpu_fold_room<T, K> room =
        gpu_fold_room_of<T, K>(&scratch, s->n, s->width, s->how <= GPU_SCALED);
    GRADD_TRY(gpu_runs_of(what, s, target, &room.sort, &runs));
    if constexpr (sizeof(K) == sizeof(uint32_t))
        if (s->width % W == 0 && gpu_aligned(s->to, 16) && gpu_aligned(s->from, 16))
            return gpu_fold_run<T, K, W>(what, s, runs, room.part);
    return gpu_fold_run<T, K, 1>(what, s, runs, room.part);
}

/* target(i, faults) is a function of the device. */
template <class T, class F>
gradd_status_t gpu_fold_rows(const char *what, const gpu_fold_rows_t *s, F target) {
    if (!s->n || !s->width) return GRADD_OK;
    if (gpu_fold_is_small(s->n, s->n_rows)) return gpu_fold_keyed<T, uint32_t>(what, s, target);
    return gpu_fold_keyed<T, uint64_t>(what, s, target);
}

/* ---- the last one ---------------------------------------------------------------------------- */

template <class P, class K>
__global__ void GPU_BLOCK(GPU_GROUP_THREADS)
    gpu_put_last(gpu_runs<K> runs, gpu_groups l, P *to, const P *from) {
    for (int64_t u = l.first(); u < l.units; u += l.all()) {
        const int64_t p = l.pieces(u), first = l.pack(u - p * l.pieces.by);
        const K row = runs.key[p];
        if (first >= l.packs || row == runs.none || runs.lasts(p, 1)) continue;
        gpu_part<GPU_AHEAD, P> x;
        x.load(from + (int64_t)runs.at[p] * l.packs + first, l.step(), l.left(first));
        x.store(to + (int64_t)row * l.packs + first, l.step(), l.left(first));
    }
}

template <class K, class F>
gradd_status_t gpu_put_keyed(const char *what, const gpu_fold_rows_t *s, size_t bytes, F target) {
    gpu_room scratch = {(char *)s->workspace, 0};
    gpu_sort_t<K> sort = gpu_sort_room<K>(&scratch, s->n);
    gpu_runs<K> runs;
    GRADD_TRY(gpu_runs_of(what, s, target, &sort, &runs));
    return gpu_by_width(gpu_units(), (uintptr_t)s->to | (uintptr_t)s->from | bytes, [&](auto t) {
        typedef typename decltype(t)::type P;
        const gpu_groups l = gpu_groups_of(s->n, (int64_t)(bytes / sizeof(P)), 6, GPU_AHEAD);
        GPU_LAUNCH((gpu_put_last<P, K>), l.blocks, GPU_GROUP_THREADS, runs, l, (P *)s->to,
                   (const P *)s->from);
        return gpu_launched(what);
    });
}

/* Rows of so many bytes. The scratch is that of folds without chains. */
template <class F>
gradd_status_t gpu_put_rows(const char *what, const gpu_fold_rows_t *s, size_t bytes, F target) {
    if (!s->n || !bytes) return GRADD_OK;
    if (gpu_fold_is_small(s->n, s->n_rows)) return gpu_put_keyed<uint32_t>(what, s, bytes, target);
    return gpu_put_keyed<uint64_t>(what, s, bytes, target);
}

#endif
