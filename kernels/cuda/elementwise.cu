/* Elementwise arithmetic on a GPU. See kernels/ops/elementwise/elementwise.c and map.h. */
#include "kernels/cuda/map.h"

GPU_BINARY(add, E_ADD, E_ADD_I)
GPU_BINARY(sub, E_SUB, E_SUB_I)
GPU_BINARY(mul, E_MUL, E_MUL_I)
GPU_BINARY(div, E_DIV, E_DIV_I)
GPU_UNARY(neg, E_NEG, E_NEG_I)
GPU_UNARY(abs, E_ABS, E_ABS_I)
GPU_UNARY(sign, E_SIGN, E_SIGN)
GPU_UNARY(sqrt, E_SQRT, E_SQRT)
GPU_UNARY(reciprocal, E_RECIP, E_RECIP)
GPU_UNARY(exp, E_EXP, E_EXP)
GPU_UNARY(log, E_LOG, E_LOG)
GPU_UNARY(erf, E_ERF, E_ERF)
GPU_UNARY(floor, E_FLOOR, E_FLOOR)
GPU_UNARY(ceil, E_CEIL, E_CEIL)
GPU_UNARY(round, E_ROUND, E_ROUND)
GPU_BINARY(max, E_MAX, E_MAX)
GPU_BINARY(min, E_MIN, E_MIN)
GPU_BINARY(fmod, E_FMOD, E_FMOD_I)
GPU_BINARY(mod, E_FMOD, E_MOD_I)

/* Sine and cosine: the vector form is exact up to GRADD_VEC_SINCOS_MAX, the library takes larger
 * numbers. The CPU takes it for all of a stretch where one element is: the bits may differ there.
 */
#define SINE(name, E, E_FAST)                                                                      \
    struct f_##name {                                                                              \
        __device__ float operator()(float a) const {                                               \
            return fabsf(a) <= GRADD_VEC_SINCOS_MAX ? E_FAST(v) : (float)E(v);                     \
        }                                                                                          \
        __device__ double operator()(double a) const {                                             \
            return E(v);                                                                           \
        }                                                                                          \
    };
SINE(sin, E_SIN, E_VSIN)
SINE(cos, E_COS, E_VCOS)

/* ---- a divisor of zero ---- */

template <class T>
__global__ void GPU_BLOCK(GPU_MAP_THREADS)
    check_divisor(int64_t n, const T *x, gpu_faults_t faults) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all)
        if (!x[i]) gpu_fault(faults, {.kind = GRADD_FAULT_ZERO_DIVISOR, .position = i});
}

static gradd_status_t check_divisors(const gradd_launch_t *r) {
    const gradd_view_t &b = r->in[1];
    const int64_t n = gradd_type_count(&b.type);
    if (gradd_dtype_is_float(b.type.dtype) || !n) return GRADD_OK;
    return gpu_switch(gpu_ints(), b.type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        GPU_LAUNCH((check_divisor<T>), gpu_blocks(n, GPU_MAP_THREADS), GPU_MAP_THREADS, n,
                   (const T *)b.data, GPU_FAULTS);
        return gpu_launched(r->op->name);
    });
}

static gradd_status_t compute_div(const gradd_launch_t *r) {
    GRADD_TRY(check_divisors(r));
    return gpu_binary<f_div, gpu_numbers>(r);
}

static gradd_status_t compute_mod(const gradd_launch_t *r) {
    GRADD_TRY(check_divisors(r));
    return gradd_attr_int(r->attrs, "fmod", 0) ? gpu_binary<f_fmod, gpu_numbers>(r)
                                               : gpu_binary<f_mod, gpu_ints>(r);
}

/* ---- folds over any number of operands, from the left ---- */

struct operands_t {
    const void *at[GRADD_OP_MAX_IN];
};

template <int W, class F, class T>
GPU_FN void fold_at(const F &f, int64_t i, int n_in, T *out, const operands_t &in) {
    typedef gpu_pack<T, W> pack_t;
    pack_t x = *(const pack_t *)((const T *)in.at[0] + i);
    gpu_real<T> sum[W];
#pragma unroll
    for (int w = 0; w < W; w++)
        sum[w] = gpu_get(x.v[w]);
#pragma unroll 4
    for (int k = 1; k < n_in; k++) {
        x = *(const pack_t *)((const T *)in.at[k] + i);
#pragma unroll
        for (int w = 0; w < W; w++)
            sum[w] = f(sum[w], gpu_get(x.v[w]));
    }
#pragma unroll
    for (int w = 0; w < W; w++)
        gpu_put(&x.v[w], sum[w]);
    *(pack_t *)(out + i) = x;
}

/* Operands as long as out; the rest of the last pack goes one by one. */
template <int W, class F, class T>
__global__ void GPU_BLOCK(GPU_MAP_THREADS)
    fold_flat(F f, int64_t n, int n_in, T *out, operands_t in) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x, packs = n / W;
    const int64_t first = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (int64_t i = first; i < packs; i += all)
        fold_at<W>(f, i * W, n_in, out, in);
    if (first < n - packs * W) fold_at<1>(f, packs * W + first, n_in, out, in);
}

template <int W, class F, class T> static gradd_status_t fold_packs(const gradd_launch_t *r) {
    const int64_t n = gradd_type_count(&r->out[0].type);
    operands_t in;
    for (int k = 0; k < r->n_in; k++)
        in.at[k] = r->in[k].data;
    GPU_LAUNCH((fold_flat<W, F, T>), gpu_blocks(n / W, GPU_MAP_THREADS), GPU_MAP_THREADS, F(), n,
               r->n_in, (T *)r->out[0].data, in);
    return gpu_launched(r->op->name);
}

static bool is_flat(const gradd_view_t *in, int n_in, const gradd_type_t &out) {
    for (int k = 0; k < n_in; k++)
        if (!gradd_type_equal(&in[k].type, &out)) return false;
    return true;
}

/* S holds what has been folded so far: out, or the scratch memory. */
template <class F, class T, class S> static gradd_status_t fold_pairs(const gradd_launch_t *r) {
    const char *what = r->op->name;
    gradd_view_t so_far = r->out[0], pair[2] = {r->in[0], r->in[1]};
    so_far.type.dtype = gpu_dtype<S>::value;
    if (r->workspace) so_far.data = r->workspace;
    if (r->n_in == 2) return gpu_map<T, T, T>(what, r->out[0], pair, F());
    GRADD_TRY((gpu_map<S, T, T>(what, so_far, pair, F())));
    pair[0] = so_far;
    for (int k = 2; k < r->n_in; k++) {
        pair[1] = r->in[k];
        if (k + 1 < r->n_in) GRADD_TRY((gpu_map<S, S, T>(what, so_far, pair, F())));
    }
    return gpu_map<T, S, T>(what, r->out[0], pair, F());
}

/* Sums of bf16 and f16 stay f32 until the end: in the scratch memory where shapes differ. */
static size_t workspace_sum(const gradd_infer_t *c) {
    const gradd_dtype_t dtype = c->out[0].dtype;
    if (c->n_in < 3 || gradd_dtype_bytes(dtype) != 2 || is_flat(c->in, c->n_in, c->out[0]))
        return 0;
    return (size_t)gradd_type_count(&c->out[0]) * sizeof(float);
}

template <class F, bool WIDE> static gradd_status_t fold(const gradd_launch_t *r) {
    const gradd_view_t &out = r->out[0];
    const int64_t n = gradd_type_count(&out.type);
    if (!n) return GRADD_OK;
    return gpu_switch(gpu_numbers(), out.type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        constexpr int W = gpu_width<T>;
        if (!is_flat(r->in, r->n_in, out.type)) {
            if constexpr (WIDE)
                return fold_pairs<F, T, gpu_real<T>>(r);
            else
                return fold_pairs<F, T, T>(r);
        }
        bool wide = gpu_aligned(out.data, 16);
        for (int k = 0; k < r->n_in; k++)
            wide &= gpu_aligned(r->in[k].data, 16);
        return wide ? fold_packs<W, F, T>(r) : fold_packs<1, F, T>(r);
    });
}

/* ---- powers ---- */

/* `one`: a whole stretch of the CPU's has that exponent (kernels/ops/elementwise/elementwise.c). */
template <class A> GPU_FN A power(A a, double y, bool one) {
    if constexpr (gpu_is_int<A>) {
        return (A)gradd_power_i64(a, y);
    } else {
        if (one && y == 2) return E_SQUARE(v);
        if (one && y == 3) return E_CUBE(v);
        if (one && y == -0.5) return E_RSQRT(v);
        if (one && y == 0.5) return E_SQRT(v);
        return (A)pow((double)a, y);
    }
}

/* One exponent for all elements. */
struct f_power {
    const void *y;
    int dtype;
    bool one;
    template <class A> __device__ A operator()(A a) const {
        return power(a, gradd_real_at(y, 0, dtype), one);
    }
};

template <class T>
__global__ void GPU_BLOCK(GPU_MAP_THREADS)
    power_any(int64_t n, gpu_walk<2> walk, T *out, const T *x, f_power p) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all) {
        int64_t at[2];
        walk.find(i, at);
        gpu_put(&out[i], power(gpu_get(x[at[0]]), gradd_real_at(p.y, at[1], p.dtype), p.one));
    }
}

static gradd_status_t compute_pow(const gradd_launch_t *r) {
    const gradd_view_t &y = r->in[1], &out = r->out[0];
    const int64_t n = gradd_type_count(&out.type);
    const gpu_walk<2> walk = gpu_walk_of<2>(out.type, r->in);
    const bool one = walk.rank && walk.step[0][0] && !walk.step[0][1];
    const f_power p = {y.data, y.type.dtype, one};
    if (!n) return GRADD_OK;
    return gpu_switch(gpu_numbers(), out.type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        if constexpr (sizeof(T) < 8 && !gpu_is_int<gpu_real<T>>) /* packs of others spill */
            if (gradd_type_count(&y.type) == 1)
                return gpu_map_all<T, T>("Pow", n, out.data, {{r->in[0].data}}, p);
        GPU_LAUNCH((power_any<T>), gpu_blocks(n, GPU_MAP_THREADS), GPU_MAP_THREADS, n, walk,
                   (T *)out.data, (const T *)r->in[0].data, p);
        return gpu_launched("Pow");
    });
}

/* ---- bounds ---- */

/* Bounds are scalars, which may be absent; one that is NaN gives NaN. */
template <class T> struct f_clip {
    const T *low, *high;
    template <class A> __device__ A operator()(A a) const {
        if (low) {
            const A bound = gpu_get(*low);
            a = bound != bound ? bound : E_AT_LEAST(a, bound);
        }
        if (high) {
            const A bound = gpu_get(*high);
            a = a != a ? a : bound != bound ? bound : E_AT_MOST(a, bound);
        }
        return a;
    }
};

static gradd_status_t compute_clip(const gradd_launch_t *r) {
    return gpu_switch(gpu_numbers(), r->in[0].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        f_clip<T> f = {};
        if (r->n_in > 1 && r->in[1].type.dtype) f.low = (const T *)r->in[1].data;
        if (r->n_in > 2 && r->in[2].type.dtype) f.high = (const T *)r->in[2].data;
        return gpu_map_all<T, T>("Clip", gradd_type_count(&r->out[0].type), r->out[0].data,
                                 {{r->in[0].data}}, f);
    });
}

#define UNARY(op, name, list)                                                                      \
    GRADD_KERNEL(op, "map", .types = {GRADD_T_ANY}, .inplace = 1,                                  \
                 .compute = gpu_unary<f_##name, list>)
#define BINARY(op, name, list)                                                                     \
    GRADD_KERNEL(op, "map", .types = {GRADD_T_ANY}, .inplace = 3,                                  \
                 .compute = gpu_binary<f_##name, list>)

GRADD_KERNELS(
    cuda, elementwise, BINARY("Add", add, gpu_numbers), BINARY("Sub", sub, gpu_numbers),
    BINARY("Mul", mul, gpu_numbers),
    GRADD_KERNEL("Div", "map", .types = {GRADD_T_ANY}, .inplace = 3, .compute = compute_div),
    GRADD_KERNEL("Mod", "map", .types = {GRADD_T_ANY}, .inplace = 3, .compute = compute_mod),
    GRADD_KERNEL("Pow", "map", .types = {GRADD_T_ANY}, .inplace = 1, .compute = compute_pow),
    GRADD_KERNEL("Max", "map", .types = {GRADD_T_ANY}, .inplace = 3, .compute = fold<f_max, false>),
    GRADD_KERNEL("Min", "map", .types = {GRADD_T_ANY}, .inplace = 3, .compute = fold<f_min, false>),
    GRADD_KERNEL("Sum", "map", .types = {GRADD_T_ANY}, .inplace = 3, .compute = fold<f_add, true>,
                 .workspace = workspace_sum),
    UNARY("Neg", neg, gpu_numbers), UNARY("Abs", abs, gpu_numbers),
    UNARY("Sign", sign, gpu_numbers), UNARY("Sqrt", sqrt, gpu_floats),
    UNARY("Reciprocal", reciprocal, gpu_floats), UNARY("Exp", exp, gpu_floats),
    UNARY("Log", log, gpu_floats), UNARY("Erf", erf, gpu_floats), UNARY("Floor", floor, gpu_floats),
    UNARY("Ceil", ceil, gpu_floats), UNARY("Round", round, gpu_floats),
    GRADD_KERNEL("Sin", "sines", .inplace = 1, .compute = gpu_unary<f_sin, gpu_floats>),
    GRADD_KERNEL("Cos", "sines", .inplace = 1, .compute = gpu_unary<f_cos, gpu_floats>),
    GRADD_KERNEL("Clip", "map", .types = {GRADD_T_ANY}, .inplace = 1, .compute = compute_clip));
