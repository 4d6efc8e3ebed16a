/* Swish and its gradient on a GPU. See kernels/ops/elementwise/swish.c and map.h. */
#include "kernels/cuda/map.h"

GPU_UNARY_WITH(swish, 1, E_SWISH)
GPU_BINARY_WITH(swish_grad, 1, E_SWISH_GRAD)

static gradd_status_t compute_swish(const gradd_launch_t *r) {
    return gpu_unary_by<gpu_floats>(r, f_swish{{gradd_attr_float(r->attrs, "alpha", 1)}});
}
static gradd_status_t compute_swish_grad(const gradd_launch_t *r) {
    return gpu_binary_by<gpu_floats>(r, f_swish_grad{{gradd_attr_float(r->attrs, "alpha", 1)}});
}

GRADD_KERNELS(cuda, swish,
              GRADD_KERNEL("Swish", "map", .types = {GRADD_T_ANY}, .inplace = 1,
                           .compute = compute_swish),
              GRADD_KERNEL("SwishGrad", "map", .types = {GRADD_T_ANY}, .inplace = 3,
                           .compute = compute_swish_grad));
