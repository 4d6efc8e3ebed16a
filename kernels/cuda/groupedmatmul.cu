/* Products of groups of rows on a GPU: a thread for each element of the result, neighbours along
 * its rows. The ends are known to the device alone, so no library's product fits. See
 * kernels/ops/product/groupedmatmul.c. */
#include "kernels/cuda/gpu.h"

enum { THREADS = 256 };

struct groups_t {
    int64_t rows, k, n, count;
    bool turned;
};

/* The end of a group, within the rows; what is out of order is a fault of that group. */
template <class I>
GPU_FN int64_t end_of(const groups_t &g, const I *ends, int64_t e, gpu_faults_t faults) {
    const int64_t end = ends[e], before = e ? (int64_t)ends[e - 1] : 0;
    if (end >= before && end <= g.rows) return end;
    gpu_fault(faults,
              {.kind = GRADD_FAULT_GROUP_END, .value = end, .limit = g.rows, .position = e});
    return end < 0 ? 0 : end > g.rows ? g.rows : end;
}

template <class T, class I>
__global__ void GPU_BLOCK(THREADS)
    grouped_rows(groups_t g, const T *a, const T *b, const I *ends, T *y, gpu_faults_t faults) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < g.rows * g.n; i += all) {
        const int64_t s = i / g.n, j = i % g.n;
        int64_t e = 0;
        while (e < g.count && end_of(g, ends, e, faults) <= s)
            e++;
        gpu_real<T> sum = 0;
        const T *w = b + e * g.k * g.n + (g.turned ? j * g.k : j);
        for (int64_t k = 0; e < g.count && k < g.k; k++)
            sum += gpu_get(a[s * g.k + k]) * gpu_get(w[g.turned ? k : k * g.n]);
        gpu_put(y + i, sum);
    }
}

template <class T, class I>
__global__ void GPU_BLOCK(THREADS)
    grouped_sums(groups_t g, const T *a, const T *dy, const I *ends, T *db, gpu_faults_t faults) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x, each = g.k * g.n;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < g.count * each; i += all) {
        const int64_t e = i / each, at = i % each, wide = g.turned ? g.k : g.n;
        const int64_t k = g.turned ? at % wide : at / wide, n = g.turned ? at / wide : at % wide;
        const int64_t end = end_of(g, ends, e, faults);
        gpu_real<T> sum = 0;
        for (int64_t s = e ? end_of(g, ends, e - 1, faults) : 0; s < end; s++)
            sum += gpu_get(a[s * g.k + k]) * gpu_get(dy[s * g.n + n]);
        gpu_put(db + i, sum);
    }
}

static groups_t groups_of(const gradd_launch_t *r) {
    const gradd_type_t *y = r->out[0].type.rank == 2 ? &r->out[0].type : &r->in[1].type;
    const gradd_type_t *a = &r->in[0].type;
    return {a->dims[0], a->dims[1], y->dims[1], r->in[2].type.dims[0],
            gradd_attr_int(r->attrs, "transB", 0) != 0};
}

template <class T, class I> static gradd_status_t launch(const gradd_launch_t *r) {
    const T *a = (const T *)r->in[0].data, *b = (const T *)r->in[1].data;
    const I *ends = (const I *)r->in[2].data;
    const unsigned blocks = gpu_blocks(gradd_type_count(&r->out[0].type), THREADS);
    T *out = (T *)r->out[0].data;
    if (r->out[0].type.rank == 2)
        GPU_LAUNCH((grouped_rows<T, I>), blocks, THREADS, groups_of(r), a, b, ends, out,
                   GPU_FAULTS);
    else
        GPU_LAUNCH((grouped_sums<T, I>), blocks, THREADS, groups_of(r), a, b, ends, out,
                   GPU_FAULTS);
    return gpu_launched(r->op->name);
}

static gradd_status_t compute_groups(const gradd_launch_t *r) {
    if (!gradd_type_count(&r->out[0].type)) return GRADD_OK;
    return gpu_switch(gpu_floats(), r->out[0].type.dtype, [&](auto t) {
        return gpu_switch(gpu_ints(), r->in[2].type.dtype, [&](auto i) {
            return launch<typename decltype(t)::type, typename decltype(i)::type>(r);
        });
    });
}

#define ON_GPU(title)                                                                              \
    GRADD_KERNEL(title, "loop", .types = {GPU_T_FLOAT, GPU_T_FLOAT, GPU_T_INT},                    \
                 .compute = compute_groups)

GRADD_KERNELS(cuda, groupedmatmul, ON_GPU("GroupedMatMul"), ON_GPU("GroupedMatMulGrad"));
