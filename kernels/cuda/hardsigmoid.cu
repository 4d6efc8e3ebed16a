/* HardSigmoid and its gradient on a GPU. See kernels/ops/elementwise/hardsigmoid.c and map.h. */
#include "kernels/cuda/map.h"

GPU_UNARY_WITH(hard_sigmoid, 2, E_HARD_SIGMOID)
GPU_BINARY_WITH(hard_sigmoid_grad, 2, E_HARD_SIGMOID_GRAD)

static double alpha_of(const gradd_launch_t *r) {
    return gradd_attr_float(r->attrs, "alpha", 0.2);
}

static double beta_of(const gradd_launch_t *r) {
    return gradd_attr_float(r->attrs, "beta", 0.5);
}

static gradd_status_t compute_hard_sigmoid(const gradd_launch_t *r) {
    return gpu_unary_by<gpu_floats>(r, f_hard_sigmoid{
                                           {alpha_of(r), beta_of(r)}
    });
}

static gradd_status_t compute_hard_sigmoid_grad(const gradd_launch_t *r) {
    return gpu_binary_by<gpu_floats>(r, f_hard_sigmoid_grad{
                                            {alpha_of(r), beta_of(r)}
    });
}

GRADD_KERNELS(cuda, hardsigmoid,
              GRADD_KERNEL("HardSigmoid", "map", .types = {GRADD_T_ANY}, .inplace = 1,
                           .compute = compute_hard_sigmoid),
              GRADD_KERNEL("HardSigmoidGrad", "map", .types = {GRADD_T_ANY}, .inplace = 3,
                           .compute = compute_hard_sigmoid_grad));
