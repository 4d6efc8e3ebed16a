/* Linear layers on a GPU: a product with its bias, and a gelu. See kernels/ops/product/linear.c. */
#include "kernels/cuda/map.h"
#include "kernels/cuda/product.h"
#include "kernels/cuda/row/head.h"
#include "kernels/cuda/step.h"
#include "kernels/describe/head.h"

#include <stdlib.h>

static gradd_status_t prepare_linear(const gradd_infer_t *c, gradd_prepared_t *out) {
    const gradd_gemm_t g = gradd_gemm_of_linear(c->in, &c->out[0], c->attrs);
    return gpu_product_prepare(&g, out);
}

static gradd_status_t compute_linear(const gradd_launch_t *r) {
    const gpu_product_call_t call = {r->in[0].data, r->in[1].data, r->in[2].data, r->out[0].data,
                                     r->workspace};
    return gpu_product(r->state, &call);
}

/* ---- LinearGelu ---- */

GPU_UNARY_FLOAT(gelu_tanh, E_GELU_TANH)

/* The product with the gelu in it, or without where the library does not have that. A launch that
 * does not want the second result has it in scratch memory: the first one has the same bits. */
typedef struct linear_gelu_s {
    gradd_prepared_t product;
    bool whole;
    size_t scratch; /* where it begins in the workspace */
} linear_gelu_t;

static void unprepare_linear_gelu(gradd_prepared_t *prepared) {
    linear_gelu_t *s = (linear_gelu_t *)prepared->state;
    if (s) gpu_product_unprepare(&s->product);
    free(s);
    prepared->state = NULL;
}

static gradd_status_t prepare_linear_gelu(const gradd_infer_t *c, gradd_prepared_t *out) {
    const gradd_gemm_t g = gradd_gemm_of_linear(c->in, &c->out[0], c->attrs);
    const bool kept = c->n_out > 1 && c->out[1].dtype;
    linear_gelu_t *s = (linear_gelu_t *)calloc(1, sizeof *s);
    if (!s) return GRADD_FAIL(NOMEM, "no memory for a product");
    gradd_status_t status =
        gpu_product_prepare_after(&g, kept ? GPU_AFTER_GELU_KEPT : GPU_AFTER_GELU, &s->product);
    s->whole = !status;
    if (status == GRADD_E_UNSUPPORTED) status = gpu_product_prepare(&g, &s->product);
    s->scratch = (s->product.workspace + 255) / 256 * 256;
    *out = gradd_prepared_t{s->product.workspace, s, sizeof *s + s->product.bytes};
    if (kept && s->whole) out->workspace = s->scratch + (size_t)gradd_type_bytes(&c->out[0]);
    if (status) unprepare_linear_gelu(out);
    return status;
}

static gradd_status_t compute_linear_gelu(const gradd_launch_t *r) {
    const linear_gelu_t *s = (const linear_gelu_t *)r->state;
    const gradd_view_t *y = &r->out[0];
    void *kept = r->n_out > 1 ? r->out[1].data : NULL;
    gpu_product_call_t call = {r->in[0].data, r->in[1].data, r->in[2].data, y->data, r->workspace};
    if (s->whole) {
        call.kept = kept;
        if (r->n_out > 1 && (!kept || !gpu_aligned(kept, GPU_PRODUCT_ALIGN)))
            call.kept = (char *)r->workspace + s->scratch;
        GRADD_TRY(gpu_product(s->product.state, &call));
        if (!kept || kept == call.kept) return GRADD_OK;
        return gpu_write(kept, call.kept, (size_t)gradd_type_bytes(&y->type));
    }
    const gradd_view_t product = {y->type, kept ? kept : y->data};
    call.c = product.data;
    GRADD_TRY(gpu_product(s->product.state, &call));
    return gpu_switch(gpu_floats(), y->type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        return gpu_map<T, T>("LinearGelu", *y, &product, f_gelu_tanh());
    });
}

/* ---- ScaleGrad ---- */

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
              GRADD_KERNEL("LinearGelu", "cuBLASLt", .types = {GRADD_DTB(BF16) | GRADD_DTB(F16)},
                           .compute = compute_linear_gelu, .prepare = prepare_linear_gelu,
                           .unprepare = unprepare_linear_gelu, .cost = gradd_gemm_cost),
              GRADD_KERNEL("LinearCrossEntropy", "in chunks",
                           .types = {GRADD_T_BF16_F32_F64, GRADD_T_BF16_F32_F64, GPU_T_INT,
                                     GRADD_T_BF16_F32_F64, GRADD_T_F32_F64 | GPU_T_INT,
                                     GRADD_T_F32_F64, GRADD_T_F32_F64 | GPU_T_INT,
                                     GRADD_T_F32_F64 | GPU_T_INT},
                           .compute = gpu_head, .prepare = gpu_head_prepare,
                           .unprepare = gpu_head_unprepare, .cost = gradd_head_cost),
              GRADD_KERNEL("ScaleGrad", "map", .types = {GPU_T_FLOAT, GRADD_T_F32_F64},
                           .inplace = 1, .compute = compute_scale));
