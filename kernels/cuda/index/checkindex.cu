/* CheckIndex on a GPU: it checks the copy, which stays in a register. See
 * kernels/ops/index/checkindex.c. */
#include "kernels/cuda/copy.h"
#include "kernels/describe/cost.h"

template <class T, int W>
__global__ void GPU_BLOCK(GPU_COPY_THREADS)
    checked_copy(int64_t n, T *y, const T *x, const int64_t *given, gpu_faults_t faults) {
    typedef gpu_pack<T, W> pack;
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    const int64_t limit = *given < 0 ? 0 : *given;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all) {
        const pack p = ((const pack *)x)[i];
#pragma unroll
        for (int k = 0; k < W; k++)
            if (p.v[k] < 0 || p.v[k] >= limit)
                gpu_fault(faults, {.kind = GRADD_FAULT_INDEX,
                                   .value = p.v[k],
                                   .limit = limit,
                                   .position = i * W + k});
        ((pack *)y)[i] = p;
    }
}

static gradd_status_t compute_check_index(const gradd_launch_t *r) {
    const int64_t n = gradd_type_count(&r->out[0].type);
    if (!n) return GRADD_OK;
    return gpu_switch(gpu_ints(), r->in[0].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        constexpr int W = gpu_width<T>;
        const T *x = (const T *)r->in[0].data;
        const int64_t *limit = (const int64_t *)r->in[1].data;
        T *y = (T *)r->out[0].data;
        if (n % W == 0 && gpu_aligned(x, 16) && gpu_aligned(y, 16))
            GPU_LAUNCH((checked_copy<T, W>), gpu_blocks(n / W, GPU_COPY_THREADS), GPU_COPY_THREADS,
                       n / W, y, x, limit, GPU_FAULTS);
        else
            GPU_LAUNCH((checked_copy<T, 1>), gpu_blocks(n, GPU_COPY_THREADS), GPU_COPY_THREADS, n,
                       y, x, limit, GPU_FAULTS);
        return gpu_launched("CheckIndex");
    });
}

GRADD_KERNELS(cuda, checkindex,
              GRADD_KERNEL("CheckIndex", "move", .inplace = 1, .compute = compute_check_index,
                           .cost = gradd_cost_move));
