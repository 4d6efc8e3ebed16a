/* GRADD_HD marks a small function that kernels of every device share: formulas that the CPU
 * vectorises and a GPU runs per thread, with the same bits. nvcc compiles it for both sides. */
#ifndef GRADD_KERNELS_MATH_HOST_DEVICE_H
#define GRADD_KERNELS_MATH_HOST_DEVICE_H

#ifdef __CUDACC__
#define GRADD_HD static __host__ __device__ __forceinline__
#else
#define GRADD_HD static inline
#endif

#endif
