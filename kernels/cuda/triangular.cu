/* SolveTriangular on a GPU: a thread for each column of X. See kernels/ops/product/triangular.c. */
#include "kernels/cuda/gpu.h"
#include "kernels/describe/triangular.h"

enum { THREADS = 128 };

template <class T>
__global__ void GPU_BLOCK(THREADS)
    solve_triangular(gradd_triangular_t s, const T *a, const T *b, T *x) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t c = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; c < s.batch * s.k; c += all) {
        const T *of = a + c / s.k * s.n * s.n;
        const int64_t base = c / s.k * s.n * s.k + c % s.k;
        for (int64_t step = 0; step < s.n; step++) {
            const int64_t i = s.ascends ? step : s.n - 1 - step;
            T sum = b[base + i * s.k];
            for (int64_t before = 0; before < step; before++) {
                const int64_t j = s.ascends ? before : s.n - 1 - before;
                sum -= of[i * s.by_row + j * s.by_column] * x[base + j * s.k];
            }
            x[base + i * s.k] = s.unit ? sum : sum / of[i * (s.n + 1)];
        }
    }
}

static gradd_status_t compute_solve(const gradd_launch_t *r) {
    const gradd_triangular_t s = gradd_triangular_of(&r->in[1].type, r->attrs);
    if (!gradd_type_count(&r->in[1].type)) return GRADD_OK;
    return gpu_switch(gpu_types<float, double>(), r->in[0].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        GPU_LAUNCH((solve_triangular<T>), gpu_blocks(s.batch * s.k, THREADS), THREADS, s,
                   (const T *)r->in[0].data, (const T *)r->in[1].data, (T *)r->out[0].data);
        return gpu_launched("SolveTriangular");
    });
}

GRADD_KERNELS(cuda, triangular,
              GRADD_KERNEL("SolveTriangular", "columns", .types = {GRADD_T_F32_F64}, .inplace = 2,
                           .compute = compute_solve));
