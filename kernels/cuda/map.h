/* One value of every element of broadcast operands: the loop behind all elementwise operators.
 *
 * gpu_map(out, in, f) computes out = f(a), f(a, b) or f(a, b, c) for every element of out. f is a
 * struct with a __device__ operator() that takes what the operands hold, widened, and returns what
 * out holds before it is rounded. Operands are broadcast as in numpy; out may be exactly one of
 * them. Where all operands are as long as out, each thread moves 16 bytes at once.
 *
 * In terms of the CPU's loops (kernels/cpu/map.h) the same expressions on the same values: equal
 * bits.
 */
#ifndef GRADD_KERNELS_CUDA_MAP_H
#define GRADD_KERNELS_CUDA_MAP_H

#include "kernels/cuda/gpu.h"
#include "kernels/formulas.h"

enum { GPU_MAP_THREADS = 256 };

/* How operands follow an element's number: dimensions that all of them walk without a gap are one,
 * the innermost first. */
template <int N> struct gpu_walk {
    int rank;
    int64_t dims[GRADD_MAX_RANK];
    int64_t step[GRADD_MAX_RANK][N]; /* elements; 0 where the operand is broadcast */

    __device__ void find(int64_t element, int64_t *at) const {
        for (int k = 0; k < N; k++)
            at[k] = 0;
        for (int i = 0; i < rank; i++) {
            const int64_t index = i + 1 < rank ? element % dims[i] : element;
            element = i + 1 < rank ? element / dims[i] : 0;
            for (int k = 0; k < N; k++)
                at[k] += index * step[i][k];
        }
    }
};

/* Element steps of an operand along the dimensions of out; 0 where it is broadcast. */
static inline void gpu_steps(const gradd_type_t &in, const gradd_type_t &out, int64_t *step) {
    int64_t s = 1;
    for (int i = out.rank - 1; i >= 0; i--) {
        const int k = i - (out.rank - in.rank);
        const int64_t d = k >= 0 ? in.dims[k] : 1;
        step[i] = d == 1 ? 0 : s;
        s *= d;
    }
}

template <int N> gpu_walk<N> gpu_walk_of(const gradd_type_t &out, const gradd_view_t *in) {
    int64_t step[N][GRADD_MAX_RANK];
    gpu_walk<N> w = {};
    for (int k = 0; k < N; k++)
        gpu_steps(in[k].type, out, step[k]);
    for (int i = out.rank - 1; i >= 0; i--) {
        const int last = w.rank - 1;
        if (out.dims[i] == 1) continue;
        bool joins = w.rank > 0;
        for (int k = 0; joins && k < N; k++)
            joins = step[k][i] == w.step[last][k] * w.dims[last];
        if (joins) {
            w.dims[last] *= out.dims[i];
            continue;
        }
        w.dims[w.rank] = out.dims[i];
        for (int k = 0; k < N; k++)
            w.step[w.rank][k] = step[k][i];
        w.rank++;
    }
    return w;
}

/* All operands are as long as out. */
template <int N> bool gpu_walk_is_flat(const gpu_walk<N> &w) {
    if (w.rank > 1) return false;
    for (int k = 0; w.rank && k < N; k++)
        if (w.step[0][k] != 1) return false;
    return true;
}

template <int N> struct gpu_operands {
    const void *at[N];
};

/* 0 .. N-1, to go through operands and their types together. */
template <int... K> struct gpu_numbers_of {};
template <int N, int... K> struct gpu_count : gpu_count<N - 1, N - 1, K...> {};
template <int... K> struct gpu_count<0, K...> {
    typedef gpu_numbers_of<K...> type;
};
#define GPU_COUNT(T) typename gpu_count<(int)sizeof...(T)>::type()

/* Packs by value: of a reference nvcc loads one element at a time. */
template <class U, int W, class F, class... P>
GPU_FN gpu_pack<U, W> gpu_map_packs(const F &f, P... x) {
    gpu_pack<U, W> y;
#pragma unroll
    for (int k = 0; k < W; k++)
        gpu_put(&y.v[k], f(gpu_get(x.v[k])...));
    return y;
}
template <class U, int W, class... T, class F, int... K>
GPU_FN gpu_pack<U, W> gpu_map_at(const F &f, const gpu_operands<sizeof...(T)> &in, int64_t i,
                                 gpu_numbers_of<K...>) {
    return gpu_map_packs<U, W>(f, ((const gpu_pack<T, W> *)in.at[K])[i]...);
}
template <class... T, class F, int... K>
GPU_FN auto gpu_map_one(const F &f, const gpu_operands<sizeof...(T)> &in, const int64_t *at,
                        gpu_numbers_of<K...>) {
    return f(gpu_get(((const T *)in.at[K])[at[K]])...);
}

template <int W, class F, class U, class... T>
__global__ void GPU_BLOCK(GPU_MAP_THREADS)
    gpu_map_flat(F f, int64_t packs, gpu_pack<U, W> *out, gpu_operands<sizeof...(T)> in) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < packs; i += all)
        out[i] = gpu_map_at<U, W, T...>(f, in, i, GPU_COUNT(T));
}

template <class F, class U, class... T>
__global__ void GPU_BLOCK(GPU_MAP_THREADS) gpu_map_any(F f, int64_t n, gpu_walk<sizeof...(T)> walk,
                                                       U *out, gpu_operands<sizeof...(T)> in) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all) {
        int64_t at[sizeof...(T)];
        walk.find(i, at);
        gpu_put(&out[i], gpu_map_one<T...>(f, in, at, GPU_COUNT(T)));
    }
}

template <class... T> constexpr int gpu_pack_width() {
    int widest = 1;
    ((widest = (int)sizeof(T) > widest ? (int)sizeof(T) : widest), ...);
    return 16 / widest;
}

/* U and T are the stored types of out and the operands. */
template <class U, class... T, class F>
gradd_status_t gpu_map(const char *what, const gradd_view_t &out, const gradd_view_t *in, F f) {
    constexpr int N = sizeof...(T), W = gpu_pack_width<U, T...>();
    constexpr size_t bytes[] = {sizeof(T)...};
    const int64_t n = gradd_type_count(&out.type);
    if (!n) return GRADD_OK;
    const gpu_walk<N> walk = gpu_walk_of<N>(out.type, in);
    gpu_operands<N> operands;
    bool wide = gpu_walk_is_flat(walk) && n % W == 0 && gpu_aligned(out.data, W * sizeof(U));
    for (int k = 0; k < N; k++) {
        operands.at[k] = in[k].data;
        wide &= gpu_aligned(in[k].data, W * bytes[k]);
    }
    if (wide)
        GPU_LAUNCH((gpu_map_flat<W, F, U, T...>), gpu_blocks(n / W, GPU_MAP_THREADS),
                   GPU_MAP_THREADS, f, n / W, (gpu_pack<U, W> *)out.data, operands);
    else
        GPU_LAUNCH((gpu_map_any<F, U, T...>), gpu_blocks(n, GPU_MAP_THREADS), GPU_MAP_THREADS, f, n,
                   walk, (U *)out.data, operands);
    return gpu_launched(what);
}

/* ---- operators by expressions of kernels/formulas.h ------------------------------------------ */

template <class A> constexpr bool gpu_is_int = (A)0.5 == (A)0;

/* f_<name>: E of floats, E_I of integers. */
#define GPU_UNARY(name, E, E_I)                                                                    \
    struct f_##name {                                                                              \
        template <class A> __device__ A operator()(A a) const {                                    \
            if constexpr (gpu_is_int<A>)                                                           \
                return (A)(E_I(v));                                                                \
            else                                                                                   \
                return (A)(E(v));                                                                  \
        }                                                                                          \
    };
#define GPU_BINARY(name, E, E_I)                                                                   \
    struct f_##name {                                                                              \
        template <class A> __device__ A operator()(A a, A b) const {                               \
            if constexpr (gpu_is_int<A>)                                                           \
                return (A)(E_I(v));                                                                \
            else                                                                                   \
                return (A)(E(v));                                                                  \
        }                                                                                          \
    };

/* compute of rows whose operands and result have one type of the list. */
template <class F, class Types> gradd_status_t gpu_unary(const gradd_launch_t *r) {
    return gpu_switch(Types(), r->in[0].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        return gpu_map<T, T>(r->op->name, r->out[0], r->in, F());
    });
}
template <class F, class Types> gradd_status_t gpu_binary(const gradd_launch_t *r) {
    return gpu_switch(Types(), r->in[0].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        return gpu_map<T, T, T>(r->op->name, r->out[0], r->in, F());
    });
}

#endif
