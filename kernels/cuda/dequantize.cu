/* DequantizeLinear on a GPU: a thread for each element. See kernels/ops/elementwise/dequantize.c.
 */
#include "kernels/cuda/gpu.h"

#include "kernels/describe/dequantize.h"

enum { DEQUANTIZE_THREADS = 256 };

template <class T, class U>
__global__ void GPU_BLOCK(DEQUANTIZE_THREADS)
    dequantize(U *y, const T *x, const U *scale, const T *zero, gradd_scales_t scales, int64_t n) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all) {
        const int64_t k = gradd_scale_of(&scales, i);
        const gpu_real<U> z = zero ? (gpu_real<U>)zero[k] : (gpu_real<U>)0;
        gpu_put(&y[i], ((gpu_real<U>)x[i] - z) * gpu_get(scale[k]));
    }
}

template <class T, class U>
static gradd_status_t launch(const gradd_launch_t *r, const gradd_scales_t &scales) {
    const int64_t n = gradd_type_count(&r->out[0].type);
    const bool has_zero = r->n_in > GRADD_DEQUANTIZE_ZEROS &&
                          r->in[GRADD_DEQUANTIZE_ZEROS].type.dtype != GRADD_DT_NONE;
    if (!n) return GRADD_OK;
    GPU_LAUNCH((dequantize<T, U>), gpu_blocks(n, DEQUANTIZE_THREADS), DEQUANTIZE_THREADS,
               (U *)r->out[0].data, (const T *)r->in[GRADD_DEQUANTIZE_X].data,
               (const U *)r->in[GRADD_DEQUANTIZE_SCALES].data,
               has_zero ? (const T *)r->in[GRADD_DEQUANTIZE_ZEROS].data : (const T *)NULL, scales,
               n);
    return gpu_launched("DequantizeLinear");
}

static gradd_status_t compute_dequantize(const gradd_launch_t *r) {
    gradd_infer_t c = {};
    gradd_scales_t scales;
    c.op = r->op;
    c.attrs = r->attrs;
    c.n_in = r->n_in;
    c.in = r->in;
    GRADD_TRY(gradd_scales_find(&c, &scales));
    return gpu_switch(gpu_floats(), r->out[0].type.dtype, [&](auto u) {
        typedef typename decltype(u)::type U;
        switch ((int)r->in[GRADD_DEQUANTIZE_X].type.dtype) {
        case GRADD_DT_I8:
            return launch<int8_t, U>(r, scales);
        case GRADD_DT_U8:
            return launch<uint8_t, U>(r, scales);
        default:
            return launch<int32_t, U>(r, scales);
        }
    });
}

GRADD_KERNELS(cuda, dequantize,
              GRADD_KERNEL("DequantizeLinear", "map", .types = {GRADD_T_ANY},
                           .compute = compute_dequantize));
