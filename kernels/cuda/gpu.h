/* The dialect of CUDA C++ that kernels of this folder are written in.
 *
 * nvcc compiles it for a GPU; any other compiler takes emu.h (tests/emu), which runs the same
 * kernels on the host. Beyond these names, kernels use from CUDA: threadIdx, blockIdx, blockDim,
 * gridDim, __syncthreads, __syncwarp, __shfl_*_sync and __ballot_sync with all lanes, atomics of
 * integers. Sums have a fixed order: no atomics of floats. Floating-point expressions are not
 * contracted (-fmad=false): a kernel that wants a fused multiply-add calls fmaf.
 *
 *     __global__ void GPU_BLOCK(256) add(float *y, const float *x, int64_t n);
 *     GPU_LAUNCH(add, gpu_blocks(n, 256), 256, y, x, n);
 *     return gpu_launched("Add");
 *
 * GPU_BLOCK takes the number of threads of a block, and of blocks that a multiprocessor should
 * hold. Elements are stored in T and computed in gpu_real<T>: f32 for bf16 and f16. GPU_SHARED
 * declares an array in a block's shared memory, of which there are 48 KiB. A kernel that needs more
 * is launched with GPU_LAUNCH_MORE(bytes, kernel, ...) and names that memory with GPU_MORE. Both
 * together may have gpu_shared_most() bytes: 99 KiB on sm_86 and sm_89, 163 on sm_80, 227 on sm_90;
 * the driver refuses a launch that asks for more.
 */
#ifndef GRADD_KERNELS_CUDA_GPU_H
#define GRADD_KERNELS_CUDA_GPU_H

#ifdef __CUDACC__
#include <cuda_runtime.h>
#define GPU_BLOCK(...)         __launch_bounds__(__VA_ARGS__)
#define GPU_SHARED(T, name, n) __shared__ T name[n]
#define GPU_MORE(T, name)                                                                          \
    extern __shared__ uint4 gpu_more[];                                                            \
    T *const name = (T *)gpu_more
#define GPU_RUN(more, kernel, blocks, threads, ...)                                                \
    kernel<<<blocks, threads, more, (cudaStream_t)gpu_call.stream>>>(__VA_ARGS__)
#define GPU_RUN_MORE(more, kernel, ...)                                                            \
    (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(more)),       \
     GPU_RUN(more, kernel, __VA_ARGS__))
#else
#include "emu.h"
#define GPU_BLOCK(...)
#endif
#define GPU_FN   static __device__ __forceinline__
#define GPU_ALL  0xffffffffu
#define GPU_WARP 32
/* A template kernel with commas stands in parentheses. */
#define GPU_LAUNCH(...)            GPU_RUN(0, __VA_ARGS__)
#define GPU_LAUNCH_MORE(more, ...) GPU_RUN_MORE(more, __VA_ARGS__)

#include "kernels/contract/fault.h"
#include "kernels/contract/kernel.h"
#include "kernels/cuda/half.h"

/* ---- of the host ----------------------------------------------------------------------------- */

/* The state that launches of the calling thread use; the device sets it around each kernel's
 * compute. */
typedef struct gpu_call_s {
    void *stream;
    gradd_fault_t *fault; /* memory of the device */
    int launch;           /* number of this one */
    int units;            /* multiprocessors */
    void *scratch;        /* memory of the device for functions beside operators, see step.h */
} gpu_call_t;
extern thread_local gpu_call_t gpu_call;

/* Bytes of shared memory that a block of the GPU may have. */
int gpu_shared_most(void);

/* Whether the last launches of this thread were accepted. */
gradd_status_t gpu_launched(const char *what);

/* Blocks of a loop over n that takes `threads` at a time and starts over with the whole grid. */
static inline unsigned gpu_blocks(int64_t n, int threads) {
    const int64_t wanted = (n + threads - 1) / threads, most = (int64_t)gpu_call.units * 16;
    return (unsigned)(wanted < 1 ? 1 : wanted < most ? wanted : most);
}

/* f(gpu_type<T>()) for the C type of a dtype; another type fails by name. */
template <class T> struct gpu_type {
    typedef T type;
};
template <class... Ts> struct gpu_types {};
template <class T> struct gpu_dtype;
#define GPU_DTYPE(ctype, name)                                                                     \
    template <> struct gpu_dtype<ctype> {                                                          \
        static const gradd_dtype_t value = GRADD_DT_##name;                                        \
    };
GPU_DTYPE(float, F32)
GPU_DTYPE(double, F64)
GPU_DTYPE(gradd_bf16_t, BF16)
GPU_DTYPE(gradd_f16_t, F16)
GPU_DTYPE(int32_t, I32)
GPU_DTYPE(int64_t, I64)
GPU_DTYPE(uint8_t, BOOL)

template <class F> gradd_status_t gpu_switch(gpu_types<>, gradd_dtype_t dtype, F) {
    return GRADD_FAIL(UNSUPPORTED, "element type %s is not supported", gradd_dtype_name(dtype));
}
template <class F, class T, class... More>
gradd_status_t gpu_switch(gpu_types<T, More...>, gradd_dtype_t dtype, F f) {
    if (dtype == gpu_dtype<T>::value) return f(gpu_type<T>());
    return gpu_switch(gpu_types<More...>(), dtype, f);
}
typedef gpu_types<float, gradd_bf16_t, gradd_f16_t, double> gpu_floats;
typedef gpu_types<int64_t, int32_t> gpu_ints;
typedef gpu_types<float, gradd_bf16_t, gradd_f16_t, double, int64_t, int32_t> gpu_numbers;
typedef gpu_types<float, gradd_bf16_t, gradd_f16_t, double, int64_t, int32_t, uint8_t> gpu_any;

/* Masks of kernel rows: what the kernels above store. */
#define GPU_T_FLOAT (GRADD_DTB(F32) | GRADD_DTB(BF16) | GRADD_DTB(F16) | GRADD_DTB(F64))
#define GPU_T_INT   (GRADD_DTB(I64) | GRADD_DTB(I32))
#define GPU_T_NUM   (GPU_T_FLOAT | GPU_T_INT)
#define GPU_T_ALL   (GPU_T_NUM | GRADD_DTB(BOOL))

/* ---- elements -------------------------------------------------------------------------------- */

/* The type in which a stored T is computed. */
template <class T> struct gpu_real_of {
    typedef T type;
};
template <> struct gpu_real_of<gradd_bf16_t> {
    typedef float type;
};
template <> struct gpu_real_of<gradd_f16_t> {
    typedef float type;
};
template <class T> using gpu_real = typename gpu_real_of<T>::type;

template <class A> constexpr bool gpu_is_int = (A)0.5 == (A)0;

template <class T> GRADD_HD T gpu_get(T x) {
    return x;
}
GRADD_HD float gpu_get(gradd_bf16_t x) {
    return gradd_bf16_f32(x);
}
GRADD_HD float gpu_get(gradd_f16_t x) {
    return gpu_f16_f32(x);
}
template <class T> GRADD_HD void gpu_put(T *p, gpu_real<T> x) {
    *p = x;
}
GRADD_HD void gpu_put(gradd_bf16_t *p, float x) {
    *p = gradd_f32_bf16(x); /* in fewer registers than the instruction, of which NaN is put right */
}
GRADD_HD void gpu_put(gradd_f16_t *p, float x) {
    *p = gpu_f32_f16(x);
}

/* W neighbours that are moved at once: 16 bytes where W is gpu_width<T>. */
template <class T, int W> struct alignas(W * sizeof(T)) gpu_pack {
    T v[W];
};
template <class T> constexpr int gpu_width = 16 / (int)sizeof(T);

/* Whether an address and a length allow packs of that many bytes. */
static inline bool gpu_aligned(const void *p, size_t bytes) {
    return (uintptr_t)p % bytes == 0;
}

/* ---- faults ---------------------------------------------------------------------------------- */

/* The argument of kernels that check values: GPU_FAULTS on the host. */
typedef struct gpu_faults_s {
    gradd_fault_t *to;
    int launch;
} gpu_faults_t;
#define GPU_FAULTS                                                                                 \
    gpu_faults_t {                                                                                 \
        gpu_call.fault, gpu_call.launch                                                            \
    }

/* Whether an offender that is recorded comes before this one. The record only moves to the front,
 * and its table is written behind its position, so it may move while it is read. */
GPU_FN bool gpu_fault_is_late(gpu_faults_t faults, const gradd_fault_t &found) {
    const volatile gradd_fault_t *now = faults.to;
    if (now->kind == GRADD_FAULT_NONE) return false;
    __threadfence();
    if (now->launch != faults.launch || now->table < found.table) return true;
    const bool same = now->table == found.table;
    __threadfence();
    return same && now->position <= found.position;
}

/* Records an offender. Per launch, the one with the lowest table is kept, and within a table the
 * one at the lowest position, whichever thread comes first. Where no table is named, `table` may be
 * what is checked first. Of very many offenders few wait for the lock. */
GPU_FN void gpu_fault(gpu_faults_t faults, gradd_fault_t found) {
    gradd_fault_t *f = faults.to;
    if (gpu_fault_is_late(faults, found)) return;
    while (atomicCAS(&f->lock, 0, 1))
        ;
    __threadfence();
    if (!gpu_fault_is_late(faults, found)) {
        volatile gradd_fault_t *now = f;
        now->value = found.value;
        now->limit = found.limit;
        now->position = found.position;
        __threadfence();
        now->table = found.table;
        now->launch = faults.launch;
        __threadfence();
        now->kind = found.kind;
    }
    __threadfence();
    atomicCAS(&f->lock, 1, 0);
}

/* ---- sums over a warp and a block, in a fixed order -------------------------------------------
 */

template <class T> GPU_FN T gpu_warp_sum(T v) {
#pragma unroll
    for (int lane = GPU_WARP / 2; lane; lane /= 2)
        v += __shfl_xor_sync(GPU_ALL, v, lane);
    return v;
}

/* The larger one; NaN counts as the largest, as in torch. */
template <class T> GPU_FN T gpu_larger(T a, T b) {
    return a > b || a != a ? a : b;
}
template <class T> GPU_FN T gpu_warp_max(T v) {
#pragma unroll
    for (int lane = GPU_WARP / 2; lane; lane /= 2)
        v = gpu_larger(v, __shfl_xor_sync(GPU_ALL, v, lane));
    return v;
}

#endif
