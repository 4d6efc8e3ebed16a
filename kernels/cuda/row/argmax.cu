/* ArgMax and ArgMin on a GPU: a warp or a block per lane, or a thread where lanes lie side by side.
 * See kernels/ops/reduce/argmax.c. */
#include "kernels/cuda/gpu.h"
#include "kernels/describe/lanes.h"

enum { THREADS = 256, AHEAD = 8 };

template <class R> struct found_t {
    R value;
    int64_t at; /* -1: nothing yet */
};

/* Whether a replaces b. NaN is the extremum, and the first of several stays. */
typedef struct order_s {
    bool largest, last;

    template <class R> __device__ bool wins(found_t<R> a, found_t<R> b) const {
        if (a.at < 0 || b.at < 0) return b.at < 0;
        const bool nan_a = a.value != a.value, nan_b = b.value != b.value;
        if (nan_a || nan_b) return nan_a && (!nan_b || a.at < b.at);
        if (a.value == b.value) return last ? a.at > b.at : a.at < b.at;
        return (a.value > b.value) == largest;
    }
} order_t;

template <class R> GPU_FN found_t<R> best_of_warp(order_t order, found_t<R> mine) {
#pragma unroll
    for (int lane = GPU_WARP / 2; lane; lane /= 2) {
        const found_t<R> other = {__shfl_xor_sync(GPU_ALL, mine.value, lane),
                                  __shfl_xor_sync(GPU_ALL, mine.at, lane)};
        if (order.wins(other, mine)) mine = other;
    }
    return mine;
}

/* A lane takes ROW threads: those of a warp, or of the block. They read packs of W elements, more
 * than one only of lanes that are contiguous. */
template <int ROW, int W, class T>
__global__ void GPU_BLOCK(THREADS)
    arg_rows(order_t order, gradd_lanes_t l, int64_t lanes, const T *x, int64_t *z) {
    typedef found_t<gpu_real<T>> found;
    typedef gpu_pack<T, W> pack;
    const int me = (int)threadIdx.x % ROW;
    for (int64_t k = (int64_t)blockIdx.x * (THREADS / ROW) + threadIdx.x / ROW; k < lanes;
         k += (int64_t)gridDim.x * (THREADS / ROW)) {
        const T *row = x + (l.inner == 1 ? k * l.n : k / l.inner * l.n * l.inner + k % l.inner);
        found best = {0, -1};
#pragma unroll 4
        for (int64_t i = me; i < l.n / W; i += ROW) {
            const pack p = *(const pack *)(row + i * W * l.inner);
#pragma unroll
            for (int j = 0; j < W; j++) {
                const found here = {gpu_get(p.v[j]), i * W + j};
                if (order.wins(here, best)) best = here;
            }
        }
        best = best_of_warp(order, best);
        if constexpr (ROW > GPU_WARP) {
            GPU_SHARED(found, part, ROW / GPU_WARP);
            __syncthreads(); /* the parts of the lane before have been read */
            if (me % GPU_WARP == 0) part[me / GPU_WARP] = best;
            __syncthreads();
            for (int i = 0; i < ROW / GPU_WARP; i++)
                if (order.wins(part[i], best)) best = part[i];
        }
        if (!me) z[k] = best.at;
    }
}

template <class T>
__global__ void GPU_BLOCK(THREADS)
    arg_lanes(order_t order, gradd_lanes_t l, int64_t lanes, const T *x, int64_t *z) {
    typedef found_t<gpu_real<T>> found;
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t k = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; k < lanes; k += all) {
        const T *row = x + k / l.inner * l.n * l.inner + k % l.inner;
        found best = {0, -1};
#pragma unroll AHEAD
        for (int64_t i = 0; i < l.n; i++) {
            const found here = {gpu_get(row[i * l.inner]), i};
            if (order.wins(here, best)) best = here;
        }
        z[k] = best.at;
    }
}

static gradd_status_t arg(const gradd_launch_t *r, bool largest) {
    const gradd_type_t &t = r->in[0].type;
    const order_t order = {largest, gradd_attr_int(r->attrs, "select_last_index", 0) != 0};
    gradd_lanes_t l;
    GRADD_TRY(gradd_lanes_of_axis(&t, r->attrs, 0, &l));
    const int64_t lanes = l.outer * l.inner;
    if (!lanes) return GRADD_OK;
    return gpu_switch(gpu_numbers(), t.dtype, [&](auto type) {
        typedef typename decltype(type)::type T;
        const T *x = (const T *)r->in[0].data;
        int64_t *z = (int64_t *)r->out[0].data;
        if (l.inner > 1 && (lanes >= (int64_t)gpu_call.units * 64 || l.n <= AHEAD))
            GPU_LAUNCH((arg_lanes<T>), gpu_blocks(lanes, THREADS), THREADS, order, l, lanes, x, z);
        else if (l.n <= 8 * GPU_WARP)
            GPU_LAUNCH((arg_rows<GPU_WARP, 1, T>), gpu_blocks(lanes, THREADS / GPU_WARP), THREADS,
                       order, l, lanes, x, z);
        else if (l.inner == 1 && l.n % gpu_width<T> == 0 && gpu_aligned(x, 16))
            GPU_LAUNCH((arg_rows<THREADS, gpu_width<T>, T>), gpu_blocks(lanes, 1), THREADS, order,
                       l, lanes, x, z);
        else
            GPU_LAUNCH((arg_rows<THREADS, 1, T>), gpu_blocks(lanes, 1), THREADS, order, l, lanes, x,
                       z);
        return gpu_launched(r->op->name);
    });
}

static gradd_status_t compute_argmax(const gradd_launch_t *r) {
    return arg(r, true);
}
static gradd_status_t compute_argmin(const gradd_launch_t *r) {
    return arg(r, false);
}

/* It compares as the CPU does: the same places. */
GRADD_KERNELS(cuda, argmax,
              GRADD_KERNEL("ArgMax", "move", .types = {GPU_T_NUM}, .compute = compute_argmax),
              GRADD_KERNEL("ArgMin", "move", .types = {GPU_T_NUM}, .compute = compute_argmin));
