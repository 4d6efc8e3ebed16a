/* Elementwise arithmetic on a GPU. See kernels/ops/elementwise.c and map.h. */
#include "kernels/cuda/map.h"

GPU_BINARY(add, E_ADD, E_ADD_I)
GPU_BINARY(sub, E_SUB, E_SUB_I)
GPU_BINARY(mul, E_MUL, E_MUL_I)
GPU_BINARY(div, E_DIV, E_DIV_I)
GPU_UNARY(neg, E_NEG, E_NEG_I)
GPU_UNARY(abs, E_ABS, E_ABS_I)
GPU_UNARY(sign, E_SIGN, E_SIGN)
GPU_UNARY(sqrt, E_SQRT, E_SQRT)
GPU_UNARY(reciprocal, E_RECIP, E_RECIP)
GPU_UNARY(exp, E_EXP, E_EXP)
GPU_UNARY(log, E_LOG, E_LOG)
GPU_UNARY(erf, E_ERF, E_ERF)
GPU_UNARY(floor, E_FLOOR, E_FLOOR)
GPU_UNARY(ceil, E_CEIL, E_CEIL)
GPU_UNARY(round, E_ROUND, E_ROUND)

/* ---- a divisor of zero ---- */

template <class T>
__global__ void GPU_BLOCK(GPU_MAP_THREADS)
    check_divisor(int64_t n, const T *x, gpu_faults_t faults) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all)
        if (!x[i]) gpu_fault(faults, {.kind = GRADD_FAULT_ZERO_DIVISOR, .position = i});
}

static gradd_status_t compute_div(const gradd_launch_t *r) {
    const gradd_view_t &b = r->in[1];
    const int64_t n = gradd_type_count(&b.type);
    if (!gradd_dtype_is_float(b.type.dtype) && n)
        GRADD_TRY(gpu_switch(gpu_ints(), b.type.dtype, [&](auto t) {
            typedef typename decltype(t)::type T;
            GPU_LAUNCH((check_divisor<T>), gpu_blocks(n, GPU_MAP_THREADS), GPU_MAP_THREADS, n,
                       (const T *)b.data, GPU_FAULTS);
            return gpu_launched("Div");
        }));
    return gpu_binary<f_div, gpu_numbers>(r);
}

#define UNARY(op, name, types)                                                                     \
    GRADD_KERNEL(op, "map", .inplace = 1, .compute = gpu_unary<f_##name, types>)
#define BINARY(op, name, types)                                                                    \
    GRADD_KERNEL(op, "map", .inplace = 3, .compute = gpu_binary<f_##name, types>)

GRADD_KERNELS(cuda, elementwise, BINARY("Add", add, gpu_numbers), BINARY("Sub", sub, gpu_numbers),
              BINARY("Mul", mul, gpu_numbers),
              GRADD_KERNEL("Div", "map", .inplace = 3, .compute = compute_div),
              UNARY("Neg", neg, gpu_numbers), UNARY("Abs", abs, gpu_numbers),
              UNARY("Sign", sign, gpu_numbers), UNARY("Sqrt", sqrt, gpu_floats),
              UNARY("Reciprocal", reciprocal, gpu_floats), UNARY("Exp", exp, gpu_floats),
              UNARY("Log", log, gpu_floats), UNARY("Erf", erf, gpu_floats),
              UNARY("Floor", floor, gpu_floats), UNARY("Ceil", ceil, gpu_floats),
              UNARY("Round", round, gpu_floats));
