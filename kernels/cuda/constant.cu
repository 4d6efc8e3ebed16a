/* Tensors made from attributes, shapes or a few numbers, and Trilu, on a GPU. See
 * kernels/ops/shape/constant.c.
 *
 * All but OneHot and Trilu are known when a plan is made and run here only where nothing is folded.
 */
#include "kernels/cuda/copy.h"
#include "kernels/cuda/row/scan.h"
#include "kernels/describe/cost.h"
#include "kernels/describe/lanes.h"
#include "kernels/rules/infer.h"

enum { THREADS = GPU_COPY_THREADS };

/* ---- a few numbers that the host has --------------------------------------------------------- */

enum { FEW_BYTES = 2048 };
typedef struct few_s {
    uint8_t v[FEW_BYTES];
} few_t;

namespace {
__global__ void GPU_BLOCK(THREADS) put_few(few_t from, int n, uint8_t *to) {
    for (int i = (int)(blockIdx.x * blockDim.x + threadIdx.x); i < n;
         i += (int)(gridDim.x * blockDim.x))
        to[i] = from.v[i];
}
} // namespace

static gradd_status_t put_bytes(const gradd_launch_t *r, const void *from) {
    const int n = (int)gradd_type_bytes(&r->out[0].type);
    few_t few;
    if (!n) return GRADD_OK;
    memcpy(few.v, from, (size_t)n);
    GPU_LAUNCH(put_few, gpu_blocks(n, THREADS), THREADS, few, n, (uint8_t *)r->out[0].data);
    return gpu_launched(r->op->name);
}

static bool is_few(const gradd_infer_t *c) {
    const gradd_attr_t *a = c->attrs.n == 1 ? &c->attrs.v[0] : NULL;
    if (!a) return false;
    if (a->kind == GRADD_ATTR_TENSOR) return gradd_type_bytes(&a->tensor.type) <= FEW_BYTES;
    return a->n * sizeof(int64_t) <= FEW_BYTES || a->kind == GRADD_ATTR_INT ||
           a->kind == GRADD_ATTR_FLOAT;
}

static gradd_status_t compute_constant(const gradd_launch_t *r) {
    const gradd_attr_t *a = &r->attrs.v[0];
    float real[FEW_BYTES / sizeof(float)];
    switch (a->kind) {
    case GRADD_ATTR_TENSOR:
        return put_bytes(r, a->tensor.data);
    case GRADD_ATTR_INT:
        return put_bytes(r, &a->i);
    case GRADD_ATTR_FLOAT:
        real[0] = (float)a->f;
        return put_bytes(r, real);
    case GRADD_ATTR_FLOATS:
        for (size_t i = 0; i < a->n; i++)
            real[i] = (float)a->floats[i];
        return put_bytes(r, real);
    default:
        return put_bytes(r, a->ints);
    }
}

static gradd_status_t compute_shape(const gradd_launch_t *r) {
    int start, end;
    gradd_shape_range(r->attrs, r->in[0].type.rank, &start, &end);
    return put_bytes(r, r->in[0].type.dims + start);
}

static gradd_status_t compute_size(const gradd_launch_t *r) {
    const int64_t n = gradd_type_count(&r->in[0].type);
    return put_bytes(r, &n);
}

static gradd_status_t compute_constant_of_shape(const gradd_launch_t *r) {
    const gradd_type_t &y = r->out[0].type;
    const gradd_attr_t *a = gradd_attr_find(r->attrs, "value");
    const size_t bytes = gradd_dtype_bytes(y.dtype);
    uint64_t element = 0;
    if (a) memcpy(&element, a->tensor.data, bytes);
    return gpu_fill("ConstantOfShape", r->out[0].data, gradd_type_count(&y), bytes, element);
}

/* ---- Range, EyeLike -------------------------------------------------------------------------- */

/* Integers wrap around. */
template <class T>
__global__ void GPU_BLOCK(THREADS) make_range(int64_t n, T *y, const T *start, const T *delta) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    const auto a = gpu_get(*start), d = gpu_get(*delta);
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all) {
        if constexpr ((gpu_real<T>)0.5 == 0)
            y[i] = (T)((uint64_t)a + (uint64_t)i * (uint64_t)d);
        else
            gpu_put(&y[i], a + (gpu_real<T>)i * d);
    }
}

static gradd_status_t compute_range(const gradd_launch_t *r) {
    const int64_t n = r->out[0].type.dims[0];
    if (!n) return GRADD_OK;
    return gpu_switch(gpu_numbers(), r->in[0].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        GPU_LAUNCH((make_range<T>), gpu_blocks(n, THREADS), THREADS, n, (T *)r->out[0].data,
                   (const T *)r->in[0].data, (const T *)r->in[2].data);
        return gpu_launched("Range");
    });
}

template <class T>
__global__ void GPU_BLOCK(THREADS)
    make_eye(int64_t n, gpu_divisor<uint64_t> columns, int64_t k, T *y, T one) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all) {
        const int64_t row = (int64_t)columns.over((uint64_t)i);
        y[i] = i - row * (int64_t)columns.by == row + k ? one : (T)0;
    }
}

/* The bits of 1. */
static uint64_t one_of(gradd_dtype_t dtype) {
    const float f32 = 1;
    const double f64 = 1;
    uint64_t bits = 1;
    if (dtype == GRADD_DT_F32) memcpy(&bits, &f32, sizeof f32), bits &= UINT32_MAX;
    if (dtype == GRADD_DT_F64) memcpy(&bits, &f64, sizeof f64);
    if (dtype == GRADD_DT_BF16) bits = gradd_f32_bf16(1).bits;
    if (dtype == GRADD_DT_F16) bits = gradd_f32_f16(1).bits;
    return bits;
}

static gradd_status_t compute_eye_like(const gradd_launch_t *r) {
    const gradd_type_t &y = r->out[0].type;
    const int64_t k = gradd_attr_int(r->attrs, "k", 0), n = gradd_type_count(&y);
    const size_t bytes = gradd_dtype_bytes(y.dtype);
    if (!n) return GRADD_OK;
    if (k >= y.dims[1] || k <= -y.dims[0]) return gpu_fill("EyeLike", r->out[0].data, n, bytes, 0);
    return gpu_switch_bytes(bytes, [&](auto t) {
        typedef typename decltype(t)::type T;
        if constexpr (sizeof(T) < 16)
            GPU_LAUNCH((make_eye<T>), gpu_blocks(n, THREADS), THREADS, n,
                       gpu_divisor_of<uint64_t>(y.dims[1]), k, (T *)r->out[0].data,
                       (T)one_of(y.dtype));
        return gpu_launched("EyeLike");
    });
}

/* ---- OneHot ---------------------------------------------------------------------------------- */

/* A whole number of any type; what none can hold is out of range. */
template <class A> GPU_FN int64_t whole(A x) {
    if constexpr ((A)0.5 != 0) {
        if (!(x > (A)-0x1p62 && x < (A)0x1p62)) return INT64_MIN;
    }
    return (int64_t)x;
}

template <class T, class K, class I>
__global__ void GPU_BLOCK(THREADS) one_hot(gpu_divisor<I> depth, gpu_divisor<I> inner, I n, T *y,
                                           const K *indices, const T *values) {
    const I all = (I)gridDim.x * blockDim.x;
    const T off = values[0], on = values[1];
    for (I i = (I)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all) {
        const I row = inner.over(i), outer = depth.over(row);
        const int64_t at = (int64_t)(row - outer * depth.by);
        int64_t hot = whole(gpu_get(indices[outer * inner.by + (i - row * inner.by)]));
        if (hot < 0) hot += (int64_t)depth.by;
        y[i] = hot == at ? on : off;
    }
}

static gradd_status_t compute_one_hot(const gradd_launch_t *r) {
    const gradd_type_t &y = r->out[0].type;
    const int64_t n = gradd_type_count(&y);
    int axis;
    GRADD_TRY(gradd_axis(gradd_attr_int(r->attrs, "axis", -1), y.rank, false, &axis));
    if (!n) return GRADD_OK;
    const gradd_lanes_t l = gradd_lanes_of(&y, axis);
    return gpu_switch(gpu_numbers(), r->in[0].type.dtype, [&](auto k) {
        return gpu_switch_bytes(gradd_dtype_bytes(y.dtype), [&](auto t) {
            return gpu_switch_count(n, [&](auto i) {
                typedef typename decltype(k)::type K;
                typedef typename decltype(t)::type T;
                typedef typename decltype(i)::type I;
                if constexpr (sizeof(T) < 16)
                    GPU_LAUNCH((one_hot<T, K, I>), gpu_blocks(n, THREADS), THREADS,
                               gpu_divisor_of<I>(l.n), gpu_divisor_of<I>(l.inner), (I)n,
                               (T *)r->out[0].data, (const K *)r->in[0].data,
                               (const T *)r->in[2].data);
                return gpu_launched("OneHot");
            });
        });
    });
}

/* ---- NonZero --------------------------------------------------------------------------------- */

/* Counts what is set, and puts down where it is. */
template <class T> struct running_count {
    typedef int64_t S;
    const T *x;
    int64_t *y, hits;

    __device__ S none() const {
        return 0;
    }
    __device__ S join(S a, S b) const {
        return a + b;
    }
    __device__ S load(int64_t at, bool) const {
        return gpu_get(x[at]) != 0;
    }
    __device__ void store(int64_t at, S before, S with) const {
        if (before != with && before < hits) y[before] = at;
    }
};

namespace {
/* Places, in the first row, into coordinates. */
__global__ void GPU_BLOCK(THREADS) take_apart(gradd_type_t x, int64_t hits, int64_t *y) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < hits; i += all) {
        int64_t at = y[i];
        for (int axis = x.rank - 1; axis >= 0; axis--) {
            const int64_t next = at / x.dims[axis];
            y[axis * hits + i] = at - next * x.dims[axis];
            at = next;
        }
    }
}
} // namespace

static gradd_status_t compute_non_zero(const gradd_launch_t *r) {
    const gradd_type_t &x = r->in[0].type;
    int64_t *y = (int64_t *)r->out[0].data;
    const int64_t hits = r->out[0].type.dims[1], n = gradd_type_count(&x);
    if (!x.rank || !hits) return GRADD_OK;
    GRADD_TRY(gpu_switch(gpu_any(), x.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        const running_count<T> f = {(const T *)r->in[0].data, y, hits};
        return gpu_scan("NonZero", {1, n, 1}, false, f);
    }));
    GPU_LAUNCH(take_apart, gpu_blocks(hits, THREADS), THREADS, x, hits, y);
    return gpu_launched("NonZero");
}

/* ---- Trilu ----------------------------------------------------------------------------------- */

/* Rows of packs; k may be absent. */
template <class I> struct triangle_t {
    gpu_divisor<I> columns, rows;
    I n;
    gradd_view_t k;
    bool upper;
};

/* Packs of W elements of one row; elements that are not kept are not read. */
template <class T, int W, class I>
__global__ void GPU_BLOCK(THREADS) keep_triangle(triangle_t<I> t, T *y, const T *x) {
    typedef gpu_pack<T, W> pack;
    const I all = (I)gridDim.x * blockDim.x;
    const int64_t k = !t.k.data                        ? 0
                      : t.k.type.dtype == GRADD_DT_I32 ? *(const int32_t *)t.k.data
                                                       : *(const int64_t *)t.k.data;
    for (I i = (I)blockIdx.x * blockDim.x + threadIdx.x; i < t.n; i += all) {
        const I line = t.columns.over(i);
        const int64_t row = (int64_t)(line - t.rows.over(line) * t.rows.by);
        const int64_t first = (int64_t)(i - line * t.columns.by) * W;
        const int64_t edge = gradd_trilu_edge(row, (int64_t)t.columns.by * W, k, t.upper);
        pack p = {};
        if (t.upper ? first + W > edge : first < edge) p = ((const pack *)x)[i];
#pragma unroll
        for (int w = 0; w < W; w++)
            if ((first + w < edge) == t.upper) p.v[w] = 0;
        ((pack *)y)[i] = p;
    }
}

template <class T, int W> static gradd_status_t launch_triangle(const gradd_launch_t *r) {
    const gradd_type_t &x = r->in[0].type;
    const int64_t n = gradd_type_count(&x) / W;
    return gpu_switch_count(n, [&](auto i) {
        typedef typename decltype(i)::type I;
        const triangle_t<I> t = {
            gpu_divisor_of<I>(x.dims[x.rank - 1] / W), gpu_divisor_of<I>(x.dims[x.rank - 2]), (I)n,
            r->n_in > 1 ? r->in[1] : gradd_view_t{}, gradd_attr_int(r->attrs, "upper", 1) != 0};
        GPU_LAUNCH((keep_triangle<T, W, I>), gpu_blocks(n, THREADS), THREADS, t,
                   (T *)r->out[0].data, (const T *)r->in[0].data);
        return gpu_launched("Trilu");
    });
}

static gradd_status_t compute_trilu(const gradd_launch_t *r) {
    const gradd_type_t &x = r->in[0].type;
    if (!gradd_type_count(&x)) return GRADD_OK;
    return gpu_switch_bytes(gradd_dtype_bytes(x.dtype), [&](auto t) {
        typedef typename decltype(t)::type T;
        if constexpr (sizeof(T) < 16) {
            if (x.dims[x.rank - 1] % gpu_width<T> == 0 && gpu_aligned(r->in[0].data, 16) &&
                gpu_aligned(r->out[0].data, 16))
                return launch_triangle<T, gpu_width<T>>(r);
            return launch_triangle<T, 1>(r);
        }
        return gpu_launched("Trilu");
    });
}

#define MOVE(op, how) GRADD_KERNEL(op, "move", .compute = compute_##how, .cost = gradd_cost_move)

GRADD_KERNELS(cuda, constant,
              GRADD_KERNEL("Constant", "move", .accepts = is_few, .compute = compute_constant),
              MOVE("ConstantOfShape", constant_of_shape), MOVE("Shape", shape), MOVE("Size", size),
              GRADD_KERNEL("Range", "move", .types = {GRADD_T_F32_F64 | GRADD_T_INT},
                           .compute = compute_range), /* known halves say no length */
              MOVE("EyeLike", eye_like),
              GRADD_KERNEL("OneHot", "move", /* nor a depth */
                           .types = {GPU_T_NUM, GRADD_T_F32_F64 | GRADD_T_INT, 0xffffffffu},
                           .compute = compute_one_hot, .cost = gradd_cost_move),
              GRADD_KERNEL("NonZero", "move", .types = {GPU_T_ALL}, .compute = compute_non_zero),
              GRADD_KERNEL("Trilu", "move", .inplace = 1, .compute = compute_trilu,
                           .cost = gradd_cost_move));
