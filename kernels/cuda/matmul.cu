/* MatMul, FusedMatMul and Gemm on a GPU. See kernels/ops/product/matmul.c. */
#include "kernels/cuda/map.h"
#include "kernels/cuda/product.h"

static gradd_status_t prepare_matmul(const gradd_infer_t *c, gradd_prepared_t *out) {
    const gradd_gemm_t g = gradd_gemm_of_matmul(c->in, &c->out[0], c->attrs);
    return gpu_product_prepare(&g, out);
}

static gradd_status_t compute_matmul(const gradd_launch_t *r) {
    const gpu_product_call_t call = {r->in[0].data, r->in[1].data, NULL, r->out[0].data,
                                     r->workspace};
    return gpu_product(r->state, &call);
}

static gradd_status_t prepare_gemm(const gradd_infer_t *c, gradd_prepared_t *out) {
    const gradd_gemm_t g = gradd_gemm_of_gemm(c->in, c->n_in, &c->out[0], c->attrs);
    return gpu_product_prepare(&g, out);
}

struct f_times {
    double beta;
    template <class A> __device__ A operator()(A a) const {
        return (A)(beta * (double)a);
    }
};

static gradd_status_t compute_gemm(const gradd_launch_t *r) {
    const gradd_gemm_t g = gradd_gemm_of_gemm(r->in, r->n_in, &r->out[0].type, r->attrs);
    const gpu_product_call_t call = {r->in[0].data, r->in[1].data,
                                     g.has_bias ? r->in[2].data : NULL, r->out[0].data,
                                     r->workspace};
    if (g.accumulate)
        GRADD_TRY(gpu_switch(gpu_floats(), g.dtype, [&](auto t) {
            typedef typename decltype(t)::type T;
            const f_times times = {gradd_attr_float(r->attrs, "beta", 1)};
            return gpu_map<T, T>("Gemm", r->out[0], &r->in[2], times);
        }));
    return gpu_product(r->state, &call);
}

#define PRODUCT(op, title, mask, how)                                                              \
    GRADD_KERNEL(op, title, .types = {mask}, .compute = compute_##how, .prepare = prepare_##how,   \
                 .unprepare = gpu_product_unprepare, .cost = gradd_gemm_cost)

GRADD_KERNELS(cuda, matmul, PRODUCT("MatMul", "cuBLASLt", GPU_T_FLOAT, matmul),
              PRODUCT("MatMul", "plain loops", GPU_T_INT, matmul),
              PRODUCT("FusedMatMul", "cuBLASLt", GPU_T_FLOAT, matmul),
              PRODUCT("Gemm", "cuBLASLt", GPU_T_FLOAT, gemm));
