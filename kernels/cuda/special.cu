/* Trigonometric, hyperbolic and special functions on a GPU. See kernels/ops/elementwise/special.c
 * and map.h. */
#include "kernels/cuda/map.h"
#include "kernels/math/special.h"

GPU_UNARY_FLOAT(tan, E_TAN)
GPU_UNARY_FLOAT(asin, E_ASIN)
GPU_UNARY_FLOAT(acos, E_ACOS)
GPU_UNARY_FLOAT(atan, E_ATAN)
GPU_UNARY_FLOAT(sinh, E_SINH)
GPU_UNARY_FLOAT(cosh, E_COSH)
GPU_UNARY_FLOAT(asinh, E_ASINH)
GPU_UNARY_FLOAT(acosh, E_ACOSH)
GPU_UNARY_FLOAT(atanh, E_ATANH)
GPU_UNARY_FLOAT(lgamma, E_LGAMMA)
GPU_UNARY_FLOAT(digamma, E_DIGAMMA)
GPU_UNARY_FLOAT(trigamma, E_TRIGAMMA)
GPU_UNARY_FLOAT(erfinv, E_ERFINV)
GPU_BINARY(atan2, E_ATAN2, E_ATAN2)

#define MAP(title, fn)                                                                             \
    GRADD_KERNEL(title, "map", .types = {GRADD_T_ANY}, .inplace = 1,                               \
                 .compute = gpu_unary<f_##fn, gpu_floats>)

GRADD_KERNELS(cuda, special, MAP("Tan", tan), MAP("Asin", asin), MAP("Acos", acos),
              MAP("Atan", atan), MAP("Sinh", sinh), MAP("Cosh", cosh), MAP("Asinh", asinh),
              MAP("Acosh", acosh), MAP("Atanh", atanh), MAP("Lgamma", lgamma),
              MAP("Digamma", digamma), MAP("Trigamma", trigamma), MAP("Erfinv", erfinv),
              GRADD_KERNEL("Atan2", "map", .types = {GRADD_T_ANY}, .inplace = 1,
                           .compute = gpu_binary<f_atan2, gpu_floats>));
