/* bfloat16 on the CPU: blocks of elements, compiled for 512-bit vectors as well. */
#ifndef GRADD_KERNELS_CPU_BF16_H
#define GRADD_KERNELS_CPU_BF16_H

#include "kernels/math/bf16.h"

/* Whole blocks; x and y do not overlap. */
void gradd_bf16_widen(float *restrict y, const gradd_bf16_t *restrict x, int64_t n);
void gradd_bf16_narrow(gradd_bf16_t *restrict y, const float *restrict x, int64_t n);

#endif
