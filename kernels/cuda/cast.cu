/* Cast and CastLike on a GPU: one kernel per pair of stored types. See
 * kernels/ops/elementwise/cast.c. */
#include "kernels/cuda/map.h"

#include "kernels/describe/cost.h"

/* f_to<U>: what a U holds before it is rounded. */
template <class U> struct f_to {
    template <class A> __device__ gpu_real<U> operator()(A a) const {
        return (gpu_real<U>)a;
    }
};
#define TO_INT(code, to, lo, hi, ...)                                                              \
    template <> struct f_to<to> {                                                                  \
        __device__ to operator()(double a) const {                                                 \
            return E_SATURATE(to, lo, hi);                                                         \
        }                                                                                          \
        __device__ to operator()(float a) const {                                                  \
            return (*this)((double)a);                                                             \
        }                                                                                          \
        template <class A> __device__ to operator()(A a) const {                                   \
            return (to)a;                                                                          \
        }                                                                                          \
    };
GRADD_INT_TYPES(TO_INT, )

struct f_truth {
    template <class A> __device__ uint8_t operator()(A a) const {
        return E_TRUTH(v);
    }
};

/* f(gpu_type<T>()) for the type that holds such elements; a boolean is read as its byte. */
template <class F> static gradd_status_t stored(gradd_dtype_t dtype, F f) {
    switch ((int)dtype) {
    case GRADD_DT_I8:
        return f(gpu_type<int8_t>());
    case GRADD_DT_U8:
        return f(gpu_type<uint8_t>());
    case GRADD_DT_I16:
        return f(gpu_type<int16_t>());
    case GRADD_DT_U16:
        return f(gpu_type<uint16_t>());
    default:
        return gpu_switch(gpu_any(), dtype, f);
    }
}

static gradd_status_t compute_cast(const gradd_launch_t *r) {
    const gradd_view_t &in = r->in[0], &out = r->out[0];
    const gradd_dtype_t from = in.type.dtype, to = out.type.dtype;
    const int64_t n = gradd_type_count(&in.type);
    if (from == to) return gpu_copy(r->op->name, out.data, in.data, gradd_type_bytes(&in.type));
    return stored(from, [&](auto t) {
        typedef typename decltype(t)::type T;
        if (to == GRADD_DT_BOOL)
            return gpu_map_all<uint8_t, T>(r->op->name, n, out.data, {{in.data}}, f_truth());
        return stored(to, [&](auto u) {
            typedef typename decltype(u)::type U;
            return gpu_map_all<U, T>(r->op->name, n, out.data, {{in.data}}, f_to<U>());
        });
    });
}

GRADD_KERNELS(cuda, cast,
              GRADD_KERNEL("Cast", "map", .types = {GRADD_T_ANY}, .compute = compute_cast,
                           .cost = gradd_cost_move),
              GRADD_KERNEL("CastLike", "map", .types = {GRADD_T_ANY}, .compute = compute_cast,
                           .cost = gradd_cost_move));
