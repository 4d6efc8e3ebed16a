/* Strided copies on a GPU: the engine under all operators that only move elements.
 *
 * Boxes are those of the CPU (kernels/describe/moves.h). A copy is made of the widest atoms, up to
 * 16 bytes, that its strides, sizes and addresses allow; where the innermost axis changes, through
 * tiles in shared memory.
 */
#ifndef GRADD_KERNELS_CUDA_COPY_H
#define GRADD_KERNELS_CUDA_COPY_H

#include "kernels/cuda/gpu.h"
#include "kernels/describe/moves.h"

enum { GPU_COPY_THREADS = 256 };

/* `to` and `from` point to the elements at index 0 of every axis; bytes is 1, 2, 4 or 8. */
gradd_status_t gpu_copy(const char *what, const gradd_copy_t &job, size_t bytes, void *to,
                        const void *from);
/* The box of out[0] that in[0] fills. */
gradd_status_t gpu_move(const gradd_launch_t *r, const gradd_move_t &move);
/* Contiguous bytes. */
gradd_status_t gpu_copy_bytes(const char *what, void *to, const void *from, size_t bytes);
/* One element, whose bits the host has, in n places. */
gradd_status_t gpu_fill(const char *what, void *to, int64_t n, size_t bytes, uint64_t element);

/* x in the midst of y, which is *value around it (on the device; NULL = zeros): x begins at
 * begin[i] of axis i, or before y if that is negative. */
typedef struct gpu_around_s {
    const gradd_view_t *x, *y;
    const int64_t *begin;
    const void *value;
} gpu_around_t;
gradd_status_t gpu_put_around(const char *what, const gpu_around_t &a);

/* f(gpu_type<T>()) for an unsigned type of so many bytes. */
template <class F> gradd_status_t gpu_switch_bytes(size_t bytes, F f) {
    switch (bytes) {
    case 1:
        return f(gpu_type<uint8_t>());
    case 2:
        return f(gpu_type<uint16_t>());
    case 4:
        return f(gpu_type<uint32_t>());
    case 8:
        return f(gpu_type<uint64_t>());
    case 16:
        return f(gpu_type<gpu_pack<uint32_t, 4>>());
    default:
        return GRADD_FAIL(INTERNAL, "elements of %zu bytes", bytes);
    }
}

/* Division by a number that the host knows. Numbers of type uint32_t are below 2^31, and divided by
 * a multiplication. */
template <class I> struct gpu_divisor {
    I by;
    __device__ I over(I n) const {
        return n / by;
    }
};
template <> struct gpu_divisor<uint32_t> {
    uint32_t by, factor, shift;
    __device__ uint32_t over(uint32_t n) const {
        return ((uint32_t)((uint64_t)n * factor >> 32) + n) >> shift;
    }
};
template <class I> gpu_divisor<I> gpu_divisor_of(int64_t by) {
    return {(I)by};
}
template <> inline gpu_divisor<uint32_t> gpu_divisor_of<uint32_t>(int64_t by) {
    uint32_t shift = 0;
    while ((int64_t)1 << shift < by)
        shift++;
    const uint64_t rest = ((uint64_t)1 << shift) - (uint64_t)by;
    return {(uint32_t)by, (uint32_t)((rest << 32) / (uint64_t)by + 1), shift};
}

/* f(gpu_type<I>()) for the type in which n elements are counted. The emulation has no tensors of
 * 2^31 and goes to the longer one sooner, to see both. */
#ifdef __CUDACC__
#define GPU_COUNT_END ((int64_t)1 << 31)
#else
#define GPU_COUNT_END ((int64_t)1 << 12)
#endif
template <class F> gradd_status_t gpu_switch_count(int64_t n, F f) {
    if (n < GPU_COUNT_END) return f(gpu_type<uint32_t>());
    return f(gpu_type<uint64_t>());
}

#endif
