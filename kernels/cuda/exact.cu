/* Expm1 and Log1p on a GPU. See kernels/ops/elementwise/exact.c and map.h. */
#include "kernels/cuda/map.h"

GPU_UNARY_FLOAT(expm1, E_EXPM1)
GPU_UNARY_FLOAT(log1p, E_LOG1P)

GRADD_KERNELS(cuda, exact,
              GRADD_KERNEL("Expm1", "map", .types = {GRADD_T_ANY}, .inplace = 1,
                           .compute = gpu_unary<f_expm1, gpu_floats>),
              GRADD_KERNEL("Log1p", "map", .types = {GRADD_T_ANY}, .inplace = 1,
                           .compute = gpu_unary<f_log1p, gpu_floats>));
