/* A function of each element of broadcast operands: the loop behind all elementwise operators.
 *
 * gpu_map(out, in, f) computes out = f(a), f(a, b) or f(a, b, c) for every element of out. f is a
 * struct with a __device__ operator() that takes the operands' elements, widened, and returns the
 * element of out before it is rounded. Operands are broadcast as in numpy; out may be exactly one
 * of them. Where all operands are as long as out, or their last axis is a whole number of packs,
 * each thread moves 16 bytes at once. f may have parameters as members. gpu_map_all is for operands
 * that are always as long as out, gpu_copy for bytes.
 *
 * The expressions and values are those of the CPU's loops (kernels/cpu/map.h), so the bits are
 * equal.
 */
#ifndef GRADD_KERNELS_CUDA_MAP_H
#define GRADD_KERNELS_CUDA_MAP_H

#include "kernels/cuda/gpu.h"
#include "kernels/math/formulas.h"

enum { GPU_MAP_THREADS = 256 };

/* Division by a number that the host knows, by a product: exact below 2^31. */
struct gpu_map_divisor {
    uint32_t factor;
    int shift;

    __device__ int64_t quotient(int64_t x) const {
        return (int64_t)((uint64_t)(uint32_t)x * factor >> shift);
    }
};
static inline gpu_map_divisor gpu_map_divisor_of(int64_t d) {
    int log2 = 0;
    if (d < 1) d = 1; /* nothing to divide */
    while ((int64_t)1 << log2 < d)
        log2++;
    const uint64_t power = (uint64_t)1 << (31 + log2);
    return {(uint32_t)((power + (uint64_t)d - 1) / (uint64_t)d), 31 + log2};
}

/* How operands follow an element's number: dimensions that all of them walk without a gap are one,
 * the innermost first. */
template <int N> struct gpu_walk {
    int rank;
    bool small; /* numbers are below 2^31 */
    int64_t dims[GRADD_MAX_RANK];
    gpu_map_divisor by[GRADD_MAX_RANK]; /* dims, if small */
    int64_t step[GRADD_MAX_RANK][N];    /* elements; 0 where the operand is broadcast */

    __device__ void find(int64_t element, int64_t *at) const {
        for (int k = 0; k < N; k++)
            at[k] = 0;
        for (int i = 0; i < rank; i++) {
            const int64_t rest = i + 1 == rank ? 0
                                 : small       ? by[i].quotient(element)
                                               : element / dims[i];
            const int64_t index = element - rest * dims[i];
            for (int k = 0; k < N; k++)
                at[k] += index * step[i][k];
            element = rest;
        }
    }

    /* To be called when dims are set. */
    void prepare() {
        int64_t n = 1;
        for (int i = 0; i < rank; i++)
            n *= dims[i];
        small = n <= INT32_MAX;
        for (int i = 0; i < rank && small; i++)
            by[i] = gpu_map_divisor_of(dims[i]);
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
    w.prepare();
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

/* W elements from one on that is the first of a pack, or W times the same. */
template <class T, int W> GPU_FN gpu_pack<T, W> gpu_pack_or_one(const T *x, bool one) {
    if (!one) return *(const gpu_pack<T, W> *)x;
    const T only = *x;
    gpu_pack<T, W> y;
#pragma unroll
    for (int k = 0; k < W; k++)
        y.v[k] = only;
    return y;
}
template <class U, int W, class... T, class F, int... K>
GPU_FN gpu_pack<U, W> gpu_map_beside(const F &f, const gpu_operands<sizeof...(T)> &in,
                                     const int64_t *at, const gpu_walk<sizeof...(T)> &walk,
                                     gpu_numbers_of<K...>) {
    return gpu_map_packs<U, W>(
        f, gpu_pack_or_one<T, W>((const T *)in.at[K] + at[K], !walk.step[0][K])...);
}
template <class... T, class F, int... K>
GPU_FN auto gpu_map_one(const F &f, const gpu_operands<sizeof...(T)> &in, const int64_t *at,
                        gpu_numbers_of<K...>) {
    return f(gpu_get(((const T *)in.at[K])[at[K]])...);
}

/* Operands as long as out; the rest of the last pack goes one by one. */
template <int W, class F, class U, class... T>
__global__ void GPU_BLOCK(GPU_MAP_THREADS)
    gpu_map_flat(F f, int64_t n, U *out, gpu_operands<sizeof...(T)> in) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x, packs = n / W;
    const int64_t first = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (int64_t i = first; i < packs; i += all)
        ((gpu_pack<U, W> *)out)[i] = gpu_map_at<U, W, T...>(f, in, i, GPU_COUNT(T));
    if (first < n - packs * W) {
        int64_t at[sizeof...(T)];
        for (unsigned k = 0; k < sizeof...(T); k++)
            at[k] = packs * W + first;
        gpu_put(&out[at[0]], gpu_map_one<T...>(f, in, at, GPU_COUNT(T)));
    }
}

/* The innermost dimension is a whole number of packs: the walk counts packs, its steps elements. */
template <int W, class F, class U, class... T>
__global__ void GPU_BLOCK(GPU_MAP_THREADS)
    gpu_map_wide(F f, int64_t packs, gpu_walk<sizeof...(T)> walk, gpu_pack<U, W> *out,
                 gpu_operands<sizeof...(T)> in) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < packs; i += all) {
        int64_t at[sizeof...(T)];
        walk.find(i, at);
        out[i] = gpu_map_beside<U, W, T...>(f, in, at, walk, GPU_COUNT(T));
    }
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

/* Makes the walk count packs; false: they would not fit. */
template <int N> bool gpu_walk_by_packs(gpu_walk<N> *w, int width) {
    if (!w->rank || w->dims[0] % width) return false;
    for (int k = 0; k < N; k++)
        for (int i = 1; i < w->rank && w->step[0][k]; i++)
            if (w->step[i][k] % width) return false;
    w->dims[0] /= width;
    for (int k = 0; k < N; k++)
        w->step[0][k] *= width;
    w->prepare();
    return true;
}

/* n elements of operands that are as long as out. */
template <class U, class... T, class F>
gradd_status_t gpu_map_all(const char *what, int64_t n, void *out,
                           const gpu_operands<sizeof...(T)> &in, F f) {
    constexpr int W = gpu_pack_width<U, T...>();
    constexpr size_t bytes[] = {sizeof(T)...};
    bool wide = gpu_aligned(out, W * sizeof(U));
    for (unsigned k = 0; k < sizeof...(T); k++)
        wide &= gpu_aligned(in.at[k], W * bytes[k]);
    if (n && wide)
        GPU_LAUNCH((gpu_map_flat<W, F, U, T...>), gpu_blocks(n / W, GPU_MAP_THREADS),
                   GPU_MAP_THREADS, f, n, (U *)out, in);
    else if (n)
        GPU_LAUNCH((gpu_map_flat<1, F, U, T...>), gpu_blocks(n, GPU_MAP_THREADS), GPU_MAP_THREADS,
                   f, n, (U *)out, in);
    return gpu_launched(what);
}

/* Copies; out may be in. */
struct gpu_same {
    template <class A> __device__ A operator()(A a) const {
        return a;
    }
};
static inline gradd_status_t gpu_copy(const char *what, void *out, const void *in, int64_t bytes) {
    if (out == in) return GRADD_OK;
    if (bytes % 8 == 0 && gpu_aligned(out, 8) && gpu_aligned(in, 8))
        return gpu_map_all<uint64_t, uint64_t>(what, bytes / 8, out, {{in}}, gpu_same());
    return gpu_map_all<uint8_t, uint8_t>(what, bytes, out, {{in}}, gpu_same());
}

/* U and T are the stored types of out and the operands. */
template <class U, class... T, class F>
gradd_status_t gpu_map(const char *what, const gradd_view_t &out, const gradd_view_t *in, F f) {
    constexpr int N = sizeof...(T), W = gpu_pack_width<U, T...>();
    constexpr size_t bytes[] = {sizeof(T)...};
    const int64_t n = gradd_type_count(&out.type);
    if (!n) return GRADD_OK;
    gpu_walk<N> walk = gpu_walk_of<N>(out.type, in);
    gpu_operands<N> operands;
    const bool flat = gpu_walk_is_flat(walk);
    bool wide = gpu_aligned(out.data, W * sizeof(U));
    for (int k = 0; k < N; k++) {
        operands.at[k] = in[k].data;
        wide &= (walk.rank && !walk.step[0][k]) || gpu_aligned(in[k].data, W * bytes[k]);
    }
    if (wide && flat)
        GPU_LAUNCH((gpu_map_flat<W, F, U, T...>), gpu_blocks(n / W, GPU_MAP_THREADS),
                   GPU_MAP_THREADS, f, n, (U *)out.data, operands);
    else if (wide && gpu_walk_by_packs(&walk, W))
        GPU_LAUNCH((gpu_map_wide<W, F, U, T...>), gpu_blocks(n / W, GPU_MAP_THREADS),
                   GPU_MAP_THREADS, f, n / W, walk, (gpu_pack<U, W> *)out.data, operands);
    else
        GPU_LAUNCH((gpu_map_any<F, U, T...>), gpu_blocks(n, GPU_MAP_THREADS), GPU_MAP_THREADS, f, n,
                   walk, (U *)out.data, operands);
    return gpu_launched(what);
}

/* ---- operators by expressions of kernels/math/formulas.h
 * ------------------------------------------ */

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

/* The same of floats alone. */
#define GPU_UNARY_FLOAT(name, E)                                                                   \
    struct f_##name {                                                                              \
        template <class A> __device__ A operator()(A a) const {                                    \
            return (A)(E(v));                                                                      \
        }                                                                                          \
    };
#define GPU_BINARY_FLOAT(name, E)                                                                  \
    struct f_##name {                                                                              \
        template <class A> __device__ A operator()(A a, A b) const {                               \
            return (A)(E(v));                                                                      \
        }                                                                                          \
    };
/* With parameters: {{values}} makes a functor. */
#define GPU_UNARY_WITH(name, parameters, E)                                                        \
    struct f_##name {                                                                              \
        double p[parameters];                                                                      \
        template <class A> __device__ A operator()(A a) const {                                    \
            return (A)(E(v));                                                                      \
        }                                                                                          \
    };
#define GPU_BINARY_WITH(name, parameters, E)                                                       \
    struct f_##name {                                                                              \
        double p[parameters];                                                                      \
        template <class A> __device__ A operator()(A a, A b) const {                               \
            return (A)(E(v));                                                                      \
        }                                                                                          \
    };

/* compute of rows whose operands and result have one type of the list; one operand has the shape of
 * the result. */
template <class Types, class F> gradd_status_t gpu_unary_by(const gradd_launch_t *r, F f) {
    return gpu_switch(Types(), r->in[0].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        return gpu_map_all<T, T>(r->op->name, gradd_type_count(&r->out[0].type), r->out[0].data,
                                 {{r->in[0].data}}, f);
    });
}
template <class Types, class F> gradd_status_t gpu_binary_by(const gradd_launch_t *r, F f) {
    return gpu_switch(Types(), r->in[0].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        return gpu_map<T, T, T>(r->op->name, r->out[0], r->in, f);
    });
}
template <class F, class Types> gradd_status_t gpu_unary(const gradd_launch_t *r) {
    return gpu_unary_by<Types>(r, F());
}
template <class F, class Types> gradd_status_t gpu_binary(const gradd_launch_t *r) {
    return gpu_binary_by<Types>(r, F());
}

#endif
