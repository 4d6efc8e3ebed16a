/* Pad and its gradient on a GPU. See kernels/ops/shape/pad.c.
 *
 * An element of y is looked for in x, axis by axis. Axes that are not padded are part of the one in
 * front of them, and where only such a run is innermost, atoms of up to 16 bytes move. The gradient
 * of an element of x is the sum of those of y that were taken from it, in their order, as on the
 * CPU.
 */
#include "kernels/cuda/copy.h"
#include "kernels/describe/cost.h"

/* Axes, the innermost first. */
typedef struct axes_s {
    int rank;
    int64_t x[GRADD_MAX_RANK], y[GRADD_MAX_RANK], begin[GRADD_MAX_RANK];
} axes_t;

static axes_t merge(const gradd_type_t &x, const gradd_type_t &y, const int64_t *begin) {
    axes_t a = {};
    int64_t inner = 1; /* elements of what is not padded, behind the next one that is */
    for (int i = x.rank - 1; i >= 0; i--) {
        const bool whole = x.dims[i] == y.dims[i] && !begin[i];
        const int64_t behind = inner;
        inner *= x.dims[i];
        if (whole && i) continue;
        a.x[a.rank] = inner, a.y[a.rank] = y.dims[i] * behind, a.begin[a.rank] = begin[i] * behind;
        a.rank++;
        inner = 1;
    }
    if (!a.rank) a.rank = 1, a.x[0] = a.y[0] = 1;
    return a;
}

/* ---- by a constant --------------------------------------------------------------------------- */

template <class I> struct around_t {
    int rank;
    gpu_divisor<I> y[GRADD_MAX_RANK];
    int64_t x[GRADD_MAX_RANK], begin[GRADD_MAX_RANK];
};

template <class I> static around_t<I> around_of(const axes_t &axes) {
    around_t<I> a = {.rank = axes.rank};
    for (int k = 0; k < axes.rank; k++)
        a.y[k] = gpu_divisor_of<I>(axes.y[k]), a.x[k] = axes.x[k], a.begin[k] = axes.begin[k];
    return a;
}

/* T is made of equal elements U of the constant. */
template <class T, class U> GPU_FN T spread(U value) {
    T all;
    U part[sizeof(T) / sizeof(U)];
#pragma unroll
    for (int k = 0; k < (int)(sizeof(T) / sizeof(U)); k++)
        part[k] = value;
    memcpy(&all, part, sizeof all);
    return all;
}

template <class T, class U, class I>
__global__ void GPU_BLOCK(GPU_COPY_THREADS)
    pad_around(around_t<I> a, I n, T *y, const T *x, const U *value) {
    const I all = (I)gridDim.x * blockDim.x;
    const T outside = spread<T>(value ? *value : (U)0);
    for (I i = (I)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all) {
        I rest = i;
        int64_t from = 0, stride = 1;
        bool inside = true;
        for (int k = 0; k < a.rank; k++) {
            const I next = k + 1 < a.rank ? a.y[k].over(rest) : 0;
            const int64_t at = (int64_t)(rest - next * a.y[k].by) - a.begin[k];
            inside &= at >= 0 && at < a.x[k];
            from += at * stride;
            stride *= a.x[k];
            rest = next;
        }
        y[i] = inside ? x[from] : outside;
    }
}

/* The widest atom of which the innermost axis is made on both sides. */
static size_t atom_of(const axes_t &a, size_t bytes, const void *x, const void *y) {
    size_t atom = 16;
    for (; atom > bytes; atom /= 2) {
        const int64_t w = (int64_t)(atom / bytes);
        if (a.x[0] % w == 0 && a.y[0] % w == 0 && a.begin[0] % w == 0 && gpu_aligned(x, atom) &&
            gpu_aligned(y, atom))
            break;
    }
    return atom;
}

gradd_status_t gpu_put_around(const char *what, const gpu_around_t &p) {
    const void *x = p.x->data;
    void *y = p.y->data;
    axes_t axes = merge(p.x->type, p.y->type, p.begin);
    const size_t bytes = gradd_dtype_bytes(p.y->type.dtype), atom = atom_of(axes, bytes, x, y);
    const int64_t w = (int64_t)(atom / bytes), n = gradd_type_count(&p.y->type) / w;
    if (!n) return GRADD_OK;
    axes.x[0] /= w, axes.y[0] /= w, axes.begin[0] /= w;
    return gpu_switch_bytes(bytes, [&](auto u) {
        return gpu_switch_bytes(atom, [&](auto t) {
            return gpu_switch_count(n, [&](auto i) {
                typedef typename decltype(u)::type U;
                typedef typename decltype(t)::type T;
                typedef typename decltype(i)::type I;
                if constexpr (sizeof(U) <= sizeof(T) && sizeof(U) < 16)
                    GPU_LAUNCH((pad_around<T, U, I>), gpu_blocks(n, GPU_COPY_THREADS),
                               GPU_COPY_THREADS, around_of<I>(axes), (I)n, (T *)y, (const T *)x,
                               (const U *)p.value);
                return gpu_launched(what);
            });
        });
    });
}

/* ---- padding with elements of x: edge, reflect, wrap ----------------------------------------- */

/* Axes as they are, the innermost first. */
static axes_t all_axes(const gradd_type_t &x, const gradd_type_t &y, const int64_t *begin) {
    axes_t a = {.rank = x.rank};
    for (int i = 0; i < x.rank; i++) {
        const int k = x.rank - 1 - i;
        a.x[k] = x.dims[i], a.y[k] = y.dims[i], a.begin[k] = begin[i];
    }
    return a;
}

template <class T, class I>
__global__ void GPU_BLOCK(GPU_COPY_THREADS)
    pad_mapped(around_t<I> a, char mode, I n, T *y, const T *x) {
    const I all = (I)gridDim.x * blockDim.x;
    for (I i = (I)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all) {
        I rest = i;
        int64_t from = 0, stride = 1;
        for (int k = 0; k < a.rank; k++) {
            const I next = k + 1 < a.rank ? a.y[k].over(rest) : 0;
            const int64_t at = (int64_t)(rest - next * a.y[k].by) - a.begin[k];
            from += gradd_pad_source(mode, at, a.x[k]) * stride;
            stride *= a.x[k];
            rest = next;
        }
        y[i] = x[from];
    }
}

static char mode_of(const gradd_launch_t *r) {
    return gradd_attr_string(r->attrs, "mode", "constant")[0];
}

static gradd_status_t compute_pad(const gradd_launch_t *r) {
    const gradd_type_t &x = r->in[0].type, &y = r->out[0].type;
    const int64_t n = gradd_type_count(&y);
    gradd_pads_t pads;
    GRADD_TRY(gradd_pads_read(r->in, r->n_in, &pads));
    if (!n) return GRADD_OK;
    if (mode_of(r) == 'c') {
        const void *value = r->n_in > 2 && r->in[2].type.dtype ? r->in[2].data : NULL;
        return gpu_put_around("Pad", {&r->in[0], &r->out[0], pads.begin, value});
    }
    const axes_t a = all_axes(x, y, pads.begin);
    return gpu_switch_bytes(gradd_dtype_bytes(y.dtype), [&](auto t) {
        return gpu_switch_count(n, [&](auto i) {
            typedef typename decltype(t)::type T;
            typedef typename decltype(i)::type I;
            if constexpr (sizeof(T) < 16)
                GPU_LAUNCH((pad_mapped<T, I>), gpu_blocks(n, GPU_COPY_THREADS), GPU_COPY_THREADS,
                           around_of<I>(a), mode_of(r), (I)n, (T *)r->out[0].data,
                           (const T *)r->in[0].data);
            return gpu_launched("Pad");
        });
    });
}

/* ---- gradient -------------------------------------------------------------------------------- */

GPU_FN int64_t rest_of(int64_t a, int64_t n) {
    return (a % n + n) % n;
}

/* The first position from o on that was taken from element i of an axis of n. */
GPU_FN int64_t taker(char mode, int64_t i, int64_t n, int64_t begin, int64_t o) {
    const int64_t own = begin + i, past = o - begin;
    if (mode == 'e') {
        if (o <= own) return i ? own : o;
        return i == n - 1 ? o : INT64_MAX;
    }
    if (mode == 'w') return o + rest_of(i - past, n);
    if (n == 1) return o;
    const int64_t period = 2 * (n - 1), up = rest_of(i - past, period);
    const int64_t down = rest_of(-i - past, period);
    return o + (up < down ? up : down);
}

template <class T>
__global__ void GPU_BLOCK(GPU_COPY_THREADS)
    pad_back(axes_t a, char mode, int64_t n, T *dx, const T *dy) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t e = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; e < n; e += all) {
        int64_t i[GRADD_MAX_RANK], o[GRADD_MAX_RANK], rest = e;
        gpu_real<T> sum = 0;
        bool any = true;
#pragma unroll
        for (int k = 0; k < GRADD_MAX_RANK; k++) {
            if (k >= a.rank) continue;
            const int64_t next = rest / a.x[k];
            i[k] = rest - next * a.x[k];
            o[k] = taker(mode, i[k], a.x[k], a.begin[k], 0);
            any &= o[k] < a.y[k];
            rest = next;
        }
        while (any) {
            int64_t at = 0, stride = 1;
            bool more = true; /* an axis goes on where all that are further in are through */
#pragma unroll
            for (int k = 0; k < GRADD_MAX_RANK; k++) {
                if (k >= a.rank) continue;
                at += o[k] * stride;
                stride *= a.y[k];
                if (!more) continue;
                o[k] =
                    o[k] + 1 < a.y[k] ? taker(mode, i[k], a.x[k], a.begin[k], o[k] + 1) : INT64_MAX;
                more = o[k] >= a.y[k];
            }
            sum += gpu_get(dy[at]);
            any = !more;
#pragma unroll
            for (int k = 0; k < GRADD_MAX_RANK; k++)
                if (k < a.rank && o[k] >= a.y[k]) o[k] = taker(mode, i[k], a.x[k], a.begin[k], 0);
        }
        gpu_put(&dx[e], sum);
    }
}

static gradd_status_t compute_pad_grad(const gradd_launch_t *r) {
    const gradd_type_t &y = r->in[0].type, &x = r->out[0].type;
    const int64_t n = gradd_type_count(&x);
    const axes_t a = all_axes(x, y, gradd_attr_find(r->attrs, "begins")->ints);
    if (!n) return GRADD_OK;
    return gpu_switch(gpu_floats(), y.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        GPU_LAUNCH((pad_back<T>), gpu_blocks(n, GPU_COPY_THREADS), GPU_COPY_THREADS, a, mode_of(r),
                   n, (T *)r->out[0].data, (const T *)r->in[0].data);
        return gpu_launched("PadGrad");
    });
}

GRADD_KERNELS(cuda, pad,
              GRADD_KERNEL("Pad", "move", .host_in = 0xa, .compute = compute_pad,
                           .cost = gradd_cost_move),
              GRADD_KERNEL("PadGrad", "move", .types = {GPU_T_FLOAT}, .compute = compute_pad_grad,
                           .cost = gradd_cost_move));
