/* Linear recurrences on a GPU: a thread for each lane. See kernels/ops/recurrent/linearscan.c. */
#include "kernels/cuda/gpu.h"
#include "kernels/describe/lanes.h"

enum { THREADS = 256 };

/* Where lane `lane` begins, and how far its next element is. */
struct walk_t {
    int64_t at, step;
};

GPU_FN walk_t walk_of(const gradd_lanes_t &l, bool reverse, int64_t lane) {
    const int64_t base = lane / l.inner * l.n, first = reverse ? l.n - 1 : 0;
    return {(base + first) * l.inner + lane % l.inner, reverse ? -l.inner : l.inner};
}

template <class T>
__global__ void GPU_BLOCK(THREADS)
    linear_scan(gradd_lanes_t l, bool reverse, const T *a, const T *b, T *h) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x, lanes = l.outer * l.inner;
    for (int64_t k = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; k < lanes; k += all) {
        walk_t w = walk_of(l, reverse, k);
        T state = 0;
        for (int64_t i = 0; i < l.n; i++, w.at += w.step) {
            state = i ? a[w.at] * state + b[w.at] : b[w.at];
            h[w.at] = state;
        }
    }
}

/* da may be NULL. */
template <class T> struct back_memory {
    const T *dh, *a, *h;
    T *db, *da;
};

template <class T>
__global__ void GPU_BLOCK(THREADS)
    linear_scan_back(gradd_lanes_t l, bool reverse, back_memory<T> m) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x, lanes = l.outer * l.inner;
    for (int64_t k = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; k < lanes; k += all) {
        walk_t w = walk_of(l, !reverse, k);
        T next = 0;
        for (int64_t i = 0; i < l.n; i++, w.at += w.step) {
            const T g = m.dh[w.at] + next;
            next = m.a[w.at] * g;
            if (m.da) m.da[w.at] = i + 1 < l.n ? g * m.h[w.at + w.step] : (T)0;
            m.db[w.at] = g;
        }
    }
}

typedef gpu_types<float, double> wide_floats;

static gradd_status_t compute_scan(const gradd_launch_t *r) {
    gradd_lanes_t l;
    const bool reverse = gradd_attr_int(r->attrs, "reverse", 0);
    GRADD_TRY(gradd_lanes_of_axis(&r->in[0].type, r->attrs, 0, &l));
    if (!gradd_type_count(&r->in[0].type)) return GRADD_OK;
    return gpu_switch(wide_floats(), r->in[0].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        GPU_LAUNCH((linear_scan<T>), gpu_blocks(l.outer * l.inner, THREADS), THREADS, l, reverse,
                   (const T *)r->in[0].data, (const T *)r->in[1].data, (T *)r->out[0].data);
        return gpu_launched("LinearScan");
    });
}

static gradd_status_t compute_back(const gradd_launch_t *r) {
    gradd_lanes_t l;
    const bool reverse = gradd_attr_int(r->attrs, "reverse", 0);
    GRADD_TRY(gradd_lanes_of_axis(&r->in[0].type, r->attrs, 0, &l));
    if (!gradd_type_count(&r->in[0].type)) return GRADD_OK;
    return gpu_switch(wide_floats(), r->in[0].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        const back_memory<T> m = {(const T *)r->in[0].data, (const T *)r->in[1].data,
                                  (const T *)r->in[2].data, (T *)r->out[0].data,
                                  r->n_out > 1 ? (T *)r->out[1].data : (T *)NULL};
        GPU_LAUNCH((linear_scan_back<T>), gpu_blocks(l.outer * l.inner, THREADS), THREADS, l,
                   reverse, m);
        return gpu_launched("LinearScanGrad");
    });
}

GRADD_KERNELS(cuda, linearscan,
              GRADD_KERNEL("LinearScan", "lanes", .types = {GRADD_T_F32_F64}, .inplace = 3,
                           .compute = compute_scan),
              GRADD_KERNEL("LinearScanGrad", "lanes", .types = {GRADD_T_F32_F64}, .inplace = 3,
                           .compute = compute_back));
