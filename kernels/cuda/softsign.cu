/* Softsign and its gradient on a GPU. See kernels/ops/elementwise/softsign.c and map.h. */
#include "kernels/cuda/map.h"

GPU_UNARY_FLOAT(softsign, E_SOFTSIGN)
GPU_BINARY_FLOAT(softsign_grad, E_SOFTSIGN_GRAD)

GRADD_KERNELS(cuda, softsign,
              GRADD_KERNEL("Softsign", "map", .types = {GRADD_T_ANY}, .inplace = 1,
                           .compute = gpu_unary<f_softsign, gpu_floats>),
              GRADD_KERNEL("SoftsignGrad", "map", .types = {GRADD_T_ANY}, .inplace = 3,
                           .compute = gpu_binary<f_softsign_grad, gpu_floats>));
