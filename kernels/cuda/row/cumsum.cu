/* CumSum on a GPU, floats in double as on the CPU. See kernels/ops/reduce/cumsum.c. */
#include "kernels/cuda/row/scan.h"

template <class T> struct sum_of {
    typedef double type;
};
template <> struct sum_of<int64_t> {
    typedef int64_t type;
};
template <> struct sum_of<int32_t> {
    typedef int64_t type;
};

template <class T> struct running_sum {
    typedef gpu_real<T> real;
    typedef typename sum_of<T>::type S;
    const T *x;
    T *z;
    bool exclusive;

    __device__ S none() const {
        return 0;
    }
    __device__ S join(S a, S b) const {
        if constexpr ((S)0.5 == 0)
            return (S)((uint64_t)a + (uint64_t)b); /* wraps around */
        else
            return a + b;
    }
    __device__ S load(int64_t at, bool) const {
        return (S)gpu_get(x[at]);
    }
    __device__ void store(int64_t at, S before, S with) const {
        gpu_put(&z[at], (real)(exclusive ? before : with));
    }
};

static gradd_status_t compute_cumsum(const gradd_launch_t *r) {
    const bool reverse = gradd_attr_int(r->attrs, "reverse", 0);
    const bool exclusive = gradd_attr_int(r->attrs, "exclusive", 0);
    gradd_lanes_t l;
    GRADD_TRY(gradd_lanes_of_cumsum(r, &l));
    return gpu_switch(gpu_numbers(), r->in[0].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        const running_sum<T> f = {(const T *)r->in[0].data, (T *)r->out[0].data, exclusive};
        return gpu_scan("CumSum", l, reverse, f);
    });
}

GRADD_KERNELS(cuda, cumsum,
              GRADD_KERNEL("CumSum", "scan", .types = {GPU_T_NUM, GRADD_T_INDEX}, .inplace = 1,
                           .host_in = 2, .compute = compute_cumsum));
