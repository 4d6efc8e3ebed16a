/* Rows that threads process together: the common part of reductions, softmax, norms and losses.
 *
 * A team is a warp or a whole block (TEAM threads). It takes one row, W neighbouring elements per
 * thread and turn. A row of known length stays in registers between passes (gpu_row with KEEP packs
 * per thread); a longer one is read again. Where rows lie across memory, a block takes 32 columns
 * side by side, in GPU_SLICES slices of rows (gpu_slice). All orders are fixed by shapes.
 *
 * Sums run in the type that is computed in for the elements of one pack, and in double from there.
 */
#ifndef GRADD_KERNELS_CUDA_ROW_ROW_TEAMS_H
#define GRADD_KERNELS_CUDA_ROW_ROW_TEAMS_H

#include "kernels/cuda/gpu.h"
#include "kernels/math/formulas.h"

enum { GPU_ROW_THREADS = 256, GPU_SLICES = GPU_ROW_THREADS / GPU_WARP };

/* ---- teams ----------------------------------------------------------------------------------- */

/* The first row of the calling team, and how far the next one is. */
template <int TEAM> GPU_FN int64_t gpu_team() {
    return (int64_t)blockIdx.x * (blockDim.x / TEAM) + threadIdx.x / TEAM;
}
template <int TEAM> GPU_FN int64_t gpu_teams() {
    return (int64_t)gridDim.x * (blockDim.x / TEAM);
}
template <int TEAM> GPU_FN int gpu_lane() {
    return (int)threadIdx.x % TEAM;
}

/* Any plain struct of 4-byte words of another lane. */
template <class P> GPU_FN P gpu_of_lane(P mine, int other) {
    uint32_t words[sizeof(P) / 4];
    memcpy(words, &mine, sizeof mine);
#pragma unroll
    for (int i = 0; i < (int)(sizeof(P) / 4); i++)
        words[i] = __shfl_xor_sync(GPU_ALL, words[i], other);
    memcpy(&mine, words, sizeof mine);
    return mine;
}

/* join(a, b) over a team, in a fixed order; all threads get a value, thread 0 of the team the one
 * that counts where join is not symmetric to the last bit. */
template <int TEAM, class P, class J> GPU_FN P gpu_team_join(P v, J join) {
#pragma unroll
    for (int lane = GPU_WARP / 2; lane; lane /= 2)
        v = join(v, gpu_of_lane(v, lane));
    if constexpr (TEAM > GPU_WARP) {
        GPU_SHARED(P, part, TEAM / GPU_WARP);
        __syncthreads(); /* the previous call has read its parts */
        if (threadIdx.x % GPU_WARP == 0) part[threadIdx.x / GPU_WARP] = v;
        __syncthreads();
        v = part[0];
#pragma unroll
        for (int i = 1; i < TEAM / GPU_WARP; i++)
            v = join(v, part[i]);
    }
    return v;
}
template <int TEAM, class A> GPU_FN A gpu_team_sum(A v) {
    return gpu_team_join<TEAM>(v, [](A a, A b) { return a + b; });
}
template <int TEAM, class A> GPU_FN A gpu_team_max(A v) {
    return gpu_team_join<TEAM>(v, [](A a, A b) { return gpu_larger(a, b); });
}

/* ---- rows in packs --------------------------------------------------------------------------- */

/* f(j, i) for the packs i of a row that the calling thread has; j is a constant below KEEP. KEEP =
 * 0: as many as there are. */
template <int TEAM, int KEEP, class F> GPU_FN void gpu_each_pack(int64_t packs, F f) {
    const int lane = gpu_lane<TEAM>();
    if constexpr (KEEP > 0) {
#pragma unroll
        for (int j = 0; j < KEEP; j++)
            if (lane + j * TEAM < packs) f(j, (int64_t)(lane + j * TEAM));
    } else {
#pragma unroll 2
        for (int64_t i = lane; i < packs; i += TEAM)
            f(0, i);
    }
}

/* A row that is read more than once: kept in registers, or left where it is. */
template <class T, int W, int TEAM, int KEEP> struct gpu_row {
    typedef gpu_pack<T, W> pack_t;
    typedef gpu_real<T> A;
    const pack_t *at;
    pack_t kept[KEEP ? KEEP : 1];

    __device__ __forceinline__ void open(const T *row, int64_t packs) {
        at = (const pack_t *)row;
        if constexpr (KEEP > 0)
            gpu_each_pack<TEAM, KEEP>(packs, [&](int j, int64_t i) { kept[j] = at[i]; });
    }
    __device__ __forceinline__ const pack_t get(int j, int64_t i) const {
        if constexpr (KEEP > 0) return kept[j];
        return at[i];
    }
};

/* run(shape) with a gpu_shape that fits rows of n elements which may be read W at once; a thread
 * keeps up to BYTES of a row as it is computed. FINE: blocks of 128 and 512 threads as well, for
 * kernels of few blocks. */
template <int W_, int TEAM_, int KEEP_> struct gpu_shape {
    static const int W = W_, TEAM = TEAM_, KEEP = KEEP_;
    static const int THREADS = TEAM > GPU_WARP ? TEAM : GPU_ROW_THREADS;
    /* Blocks for so many rows. */
    static unsigned blocks(int64_t rows) {
        return gpu_blocks(rows, THREADS / TEAM);
    }
};
template <class A, int W, int BYTES, bool FINE, class F>
gradd_status_t gpu_by_width(int64_t n, F run) {
    /* single elements cost a comparison each, and registers */
    constexpr int MANY = BYTES / (int)sizeof(A) / (W > 1 ? 1 : 4);
    constexpr int EACH = MANY < W ? W : MANY, KEEP = EACH / W;
    if (n <= EACH * GPU_WARP) return run(gpu_shape<W, GPU_WARP, KEEP>());
    if constexpr (FINE)
        if (n <= EACH * 128) return run(gpu_shape<W, 128, KEEP>());
    if (n <= EACH * GPU_ROW_THREADS) return run(gpu_shape<W, GPU_ROW_THREADS, KEEP>());
    if constexpr (FINE)
        if (n <= EACH * 512) return run(gpu_shape<W, 512, KEEP>());
    return run(gpu_shape<W, GPU_ROW_THREADS, 0>());
}
template <class T, int BYTES, bool FINE = false, class F>
gradd_status_t gpu_by_row(int64_t n, bool wide, F run) {
    typedef gpu_real<T> A;
    if (wide && n % gpu_width<T> == 0) return gpu_by_width<A, gpu_width<T>, BYTES, FINE>(n, run);
    return gpu_by_width<A, 1, BYTES, FINE>(n, run);
}

/* Elements of T, or already widened, which serve all rows: one per element of a row. */
template <class T> struct gpu_vector {
    const void *at; /* NULL = none */
    bool wide;

    template <class U, int W>
    __device__ __forceinline__ void load(gpu_real<T> (&to)[W], int64_t i) const {
        constexpr int V = W < gpu_width<U> ? W : gpu_width<U>;
#pragma unroll
        for (int j = 0; j < W / V; j++) {
            const gpu_pack<U, V> v = ((const gpu_pack<U, V> *)((const U *)at + i * W))[j];
#pragma unroll
            for (int k = 0; k < V; k++)
                to[j * V + k] = gpu_get(v.v[k]);
        }
    }
    /* Pack i. */
    template <int W> __device__ __forceinline__ void get(gpu_real<T> (&to)[W], int64_t i) const {
        if (wide)
            load<gpu_real<T>>(to, i);
        else
            load<T>(to, i);
    }
};
template <class T> gpu_vector<T> gpu_vector_of(const gradd_view_t &v) {
    return {v.type.dtype ? v.data : nullptr, v.type.dtype == gpu_dtype<gpu_real<T>>::value};
}

/* ---- softmax --------------------------------------------------------------------------------- */

/* The maximum of a row, and the sum of exp(x - maximum). */
template <class A> struct gpu_soft {
    A max;
    double sum;
};
template <class A> GPU_FN gpu_soft<A> gpu_soft_none() {
    return {-(A)INFINITY, 0};
}
/* Moves the sum under a larger maximum, or under NaN. */
template <class A> GPU_FN void gpu_soft_raise(gpu_soft<A> *s, A max) {
    max = gpu_larger(s->max, max);
    if (!(max != s->max)) return;
    if (s->sum != 0) s->sum *= (double)vexp(s->max - max);
    s->max = max;
}
template <class A> GPU_FN gpu_soft<A> gpu_soft_join(gpu_soft<A> a, gpu_soft<A> b) {
    const A max = gpu_larger(a.max, b.max);
    gpu_soft_raise(&a, max);
    gpu_soft_raise(&b, max);
    return {max, a.sum + b.sum};
}
/* Adds elements below a maximum that is known; ones apart, as beside a 1 the others would lose
 * their digits. */
template <class A, int W> GPU_FN void gpu_soft_add(gpu_soft<A> *s, const A (&x)[W]) {
    A sum = 0, ones = 0;
#pragma unroll
    for (int k = 0; k < W; k++) {
        const A e = vexp(x[k] - s->max);
        sum += e == 1 ? (A)0 : e;
        ones += e == 1 ? (A)1 : (A)0;
    }
    s->sum += (double)sum + (double)ones;
}
/* Adds elements that may be larger than those before. */
template <class A, int W> GPU_FN void gpu_soft_scan(gpu_soft<A> *s, const A (&x)[W]) {
    A max = x[0];
#pragma unroll
    for (int k = 1; k < W; k++)
        max = gpu_larger(max, x[k]);
    gpu_soft_raise(s, max);
    if (s->max != -(A)INFINITY) gpu_soft_add(s, x); /* -inf - -inf is no number */
}

/* A pack, widened. */
template <class A, class T, int W> GPU_FN void gpu_widen(A (&to)[W], const gpu_pack<T, W> &from) {
#pragma unroll
    for (int k = 0; k < W; k++)
        to[k] = gpu_get(from.v[k]);
}

/* Of a row that a team has opened (a gpu_row, or what gives packs as one does), the same in all of
 * its threads; nothing but -inf, or +inf, gives a sum that is NaN. also(x, i) sees every pack once,
 * widened. */
template <class S, class Row, class F>
GPU_FN gpu_soft<typename Row::A> gpu_soft_of(const Row &row, int64_t packs, F also) {
    typedef typename Row::A A;
    gpu_soft<A> s = gpu_soft_none<A>();
    if constexpr (S::KEEP > 0) {
        gpu_each_pack<S::TEAM, S::KEEP>(packs, [&](int j, int64_t i) {
#pragma unroll
            for (int k = 0; k < S::W; k++)
                s.max = gpu_larger(s.max, gpu_get(row.get(j, i).v[k]));
        });
        s.max = gpu_team_max<S::TEAM>(s.max);
        gpu_each_pack<S::TEAM, S::KEEP>(packs, [&](int j, int64_t i) {
            A x[S::W];
            gpu_widen(x, row.get(j, i));
            gpu_soft_add(&s, x);
            also(x, i);
        });
    } else {
        gpu_each_pack<S::TEAM, S::KEEP>(packs, [&](int j, int64_t i) {
            A x[S::W];
            gpu_widen(x, row.get(j, i));
            gpu_soft_scan(&s, x);
            also(x, i);
        });
        gpu_soft_raise(&s, gpu_team_max<S::TEAM>(s.max));
    }
    s.sum = gpu_team_sum<S::TEAM>(s.sum);
    if (s.max == -(A)INFINITY) s.sum = (double)NAN;
    return s;
}
struct gpu_nothing {
    template <class X> __device__ __forceinline__ void operator()(const X &, int64_t) const {
    }
};

/* ---- columns --------------------------------------------------------------------------------- */

/* Blocks of GPU_ROW_THREADS that take 32 columns each. */
static inline unsigned gpu_column_blocks(int64_t columns) {
    return gpu_blocks(columns, GPU_WARP);
}
GPU_FN int gpu_slice() {
    return (int)threadIdx.x / GPU_WARP;
}

/* Joins the slices' values of each of 32 columns of a block, in order: the same result in all. */
template <class P, class J> GPU_FN P gpu_slices_join(P v, J join) {
    GPU_SHARED(P, part, GPU_ROW_THREADS);
    const int column = (int)threadIdx.x % GPU_WARP;
    __syncthreads();
    part[threadIdx.x] = v;
    __syncthreads();
    v = part[column];
#pragma unroll
    for (int i = 1; i < GPU_SLICES; i++)
        v = join(v, part[i * GPU_WARP + column]);
    return v;
}

/* Of columns whose elements the slices have scanned; as gpu_soft_of. */
template <class A> GPU_FN gpu_soft<A> gpu_slices_soft(gpu_soft<A> s) {
    gpu_soft_raise(&s, gpu_slices_join(s.max, [](A a, A b) { return gpu_larger(a, b); }));
    s.sum = gpu_slices_join(s.sum, [](double a, double b) { return a + b; });
    if (s.max == -(A)INFINITY) s.sum = (double)NAN;
    return s;
}

/* sum[c] of `rows` rows of n columns, in double; U is the stored type. */
template <class U, class A>
__global__ void GPU_BLOCK(GPU_ROW_THREADS)
    gpu_add_rows(U *sum, const A *parts, int64_t rows, int64_t n) {
    for (int64_t at = (int64_t)blockIdx.x * GPU_WARP; at < n; at += (int64_t)gridDim.x * GPU_WARP) {
        const int64_t c = at + threadIdx.x % GPU_WARP;
        double total = 0;
        for (int64_t r = gpu_slice(); c < n && r < rows; r += GPU_SLICES)
            total += (double)parts[r * n + c];
        total = gpu_slices_join(total, [](double a, double b) { return a + b; });
        if (gpu_slice() == 0 && c < n) gpu_put(&sum[c], (gpu_real<U>)total);
    }
}

#endif
