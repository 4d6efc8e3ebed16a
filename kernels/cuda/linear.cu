/* Linear layers on a GPU: a product with its bias. See kernels/ops/linear.c. */
#include "kernels/cuda/map.h"
#include "kernels/cuda/product.h"
#include "kernels/cuda/row/head.h"
#include "kernels/head.h"

static gradd_status_t prepare_linear(const gradd_infer_t *c, gradd_prepared_t *out) {
    const gradd_gemm_t g = gradd_gemm_of_linear(c->in, &c->out[0], c->attrs);
    return gpu_product_prepare(&g, out);
}

static gradd_status_t compute_linear(const gradd_launch_t *r) {
    const gpu_product_call_t call = {r->in[0].data, r->in[1].data, r->in[2].data, r->out[0].data,
                                     r->workspace};
    return gpu_product(r->state, &call);
}

/* In f32 at least; a factor of 1 changes no bit. */
struct f_scale {
    template <class A, class B> __device__ A operator()(A a, B b) const {
        return a * (A)b;
    }
};

static gradd_status_t compute_scale(const gradd_launch_t *r) {
    gradd_view_t in[2] = {r->in[0], r->in[1]};
    in[1].type.rank = 0;
    return gpu_switch(gpu_floats(), in[0].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        if (in[1].type.dtype == GRADD_DT_F64)
            return gpu_map<T, T, double>("ScaleGrad", r->out[0], in, f_scale());
        return gpu_map<T, T, float>("ScaleGrad", r->out[0], in, f_scale());
    });
}

GRADD_KERNELS(cuda, linear,
              GRADD_KERNEL("Linear", "cuBLASLt", .types = {GPU_T_FLOAT}, .compute = compute_linear,
                           .prepare = prepare_linear, .unprepare = gpu_product_unprepare,
                           .cost = gradd_gemm_cost),
              GRADD_KERNEL("LinearCrossEntropy", "in chunks",
                           .types = {GRADD_T_BF16_F32_F64, GRADD_T_BF16_F32_F64, GPU_T_INT,
                                     GRADD_T_BF16_F32_F64, GRADD_T_F32_F64 | GPU_T_INT,
                                     GRADD_T_F32_F64, GRADD_T_F32_F64 | GPU_T_INT,
                                     GRADD_T_F32_F64 | GPU_T_INT},
                           .compute = gpu_head, .prepare = gpu_head_prepare,
                           .unprepare = gpu_head_unprepare, .cost = gradd_head_cost),
              GRADD_KERNEL("ScaleGrad", "map", .types = {GPU_T_FLOAT, GRADD_T_F32_F64},
                           .inplace = 1, .compute = compute_scale));
