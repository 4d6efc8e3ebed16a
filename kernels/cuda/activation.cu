/* Activations and their gradients on a GPU. See kernels/ops/elementwise/activation.c and map.h. */
#include "kernels/cuda/map.h"

#include <string.h>

GPU_UNARY_FLOAT(relu, E_RELU)
GPU_UNARY_FLOAT(sigmoid, E_SIGMOID)
GPU_UNARY_FLOAT(tanh, E_TANH)
GPU_UNARY_FLOAT(softplus, E_SOFTPLUS)
GPU_UNARY_FLOAT(hardswish, E_HARDSWISH)
GPU_UNARY_FLOAT(mish, E_MISH)
GPU_UNARY_FLOAT(gelu_erf, E_GELU)
GPU_UNARY_FLOAT(gelu_tanh, E_GELU_TANH)
GPU_UNARY_WITH(leaky, 1, E_LEAKY)
GPU_UNARY_WITH(elu, 1, E_ELU)
GPU_BINARY_FLOAT(prelu, E_PRELU)

GPU_BINARY_FLOAT(relu_grad, E_RELU_GRAD)
GPU_BINARY_FLOAT(sigmoid_grad, E_SIGMOID_GRAD)
GPU_BINARY_FLOAT(tanh_grad, E_TANH_GRAD)
GPU_BINARY_FLOAT(hardswish_grad, E_HARDSWISH_GRAD)
GPU_BINARY_FLOAT(mish_grad, E_MISH_GRAD)
GPU_BINARY_FLOAT(gelu_grad_erf, E_GELU_GRAD)
GPU_BINARY_FLOAT(gelu_grad_tanh, E_GELU_TANH_GRAD)
GPU_BINARY_WITH(leaky_grad, 1, E_LEAKY_GRAD)
GPU_BINARY_WITH(elu_grad, 1, E_ELU_GRAD)
GPU_BINARY_WITH(elu_input_grad, 1, E_ELU_INPUT_GRAD)

/* with the parameter alpha */
static gradd_status_t compute_leaky(const gradd_launch_t *r) {
    return gpu_unary_by<gpu_floats>(r, f_leaky{{gradd_attr_float(r->attrs, "alpha", 0.01)}});
}
static gradd_status_t compute_leaky_grad(const gradd_launch_t *r) {
    return gpu_binary_by<gpu_floats>(r, f_leaky_grad{{gradd_attr_float(r->attrs, "alpha", 0.01)}});
}
static gradd_status_t compute_elu(const gradd_launch_t *r) {
    return gpu_unary_by<gpu_floats>(r, f_elu{{gradd_attr_float(r->attrs, "alpha", 1)}});
}
static gradd_status_t compute_elu_grad(const gradd_launch_t *r) {
    return gpu_binary_by<gpu_floats>(r, f_elu_grad{{gradd_attr_float(r->attrs, "alpha", 1)}});
}
static gradd_status_t compute_elu_input_grad(const gradd_launch_t *r) {
    return gpu_binary_by<gpu_floats>(r, f_elu_input_grad{{gradd_attr_float(r->attrs, "alpha", 1)}});
}

/* one of two by the attribute approximate */
static bool by_tanh(gradd_attrs_t attrs) {
    return !strcmp(gradd_attr_string(attrs, "approximate", "none"), "tanh");
}
static gradd_status_t compute_gelu(const gradd_launch_t *r) {
    return by_tanh(r->attrs) ? gpu_unary<f_gelu_tanh, gpu_floats>(r)
                             : gpu_unary<f_gelu_erf, gpu_floats>(r);
}
static gradd_status_t compute_gelu_grad(const gradd_launch_t *r) {
    return by_tanh(r->attrs) ? gpu_binary<f_gelu_grad_tanh, gpu_floats>(r)
                             : gpu_binary<f_gelu_grad_erf, gpu_floats>(r);
}

#define UNARY(op, name)                                                                            \
    GRADD_KERNEL(op, "map", .types = {GRADD_T_ANY}, .inplace = 1,                                  \
                 .compute = gpu_unary<f_##name, gpu_floats>)
#define BINARY(op, name)                                                                           \
    GRADD_KERNEL(op, "map", .types = {GRADD_T_ANY}, .inplace = 3,                                  \
                 .compute = gpu_binary<f_##name, gpu_floats>)

GRADD_KERNELS(cuda, activation, UNARY("Relu", relu),
              GRADD_KERNEL("LeakyRelu", "map", .types = {GRADD_T_ANY}, .inplace = 1,
                           .compute = compute_leaky),
              UNARY("Sigmoid", sigmoid), UNARY("Tanh", tanh),
              GRADD_KERNEL("Elu", "map", .types = {GRADD_T_ANY}, .inplace = 1,
                           .compute = compute_elu),
              GRADD_KERNEL("Gelu", "map", .types = {GRADD_T_ANY}, .inplace = 1,
                           .compute = compute_gelu),
              UNARY("Softplus", softplus), UNARY("HardSwish", hardswish), UNARY("Mish", mish),
              BINARY("PRelu", prelu), BINARY("ReluGrad", relu_grad),
              GRADD_KERNEL("LeakyReluGrad", "map", .types = {GRADD_T_ANY}, .inplace = 3,
                           .compute = compute_leaky_grad),
              BINARY("SigmoidGrad", sigmoid_grad), BINARY("TanhGrad", tanh_grad),
              GRADD_KERNEL("EluGrad", "map", .types = {GRADD_T_ANY}, .inplace = 3,
                           .compute = compute_elu_grad),
              GRADD_KERNEL("EluInputGrad", "map", .types = {GRADD_T_ANY}, .inplace = 3,
                           .compute = compute_elu_input_grad),
              GRADD_KERNEL("GeluGrad", "map", .types = {GRADD_T_ANY}, .inplace = 3,
                           .compute = compute_gelu_grad),
              BINARY("HardSwishGrad", hardswish_grad), BINARY("MishGrad", mish_grad));
