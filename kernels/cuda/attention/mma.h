/* Products of 16 x 16 by 16 x 8 elements of 16 bits, summed in f32, that a warp makes at once
 * (mma.sync.m16n8k16, from sm_80 on), and the functions that load its operands. Each lane holds a
 * part, as the manual of PTX lays it out; with g = lane / 4 and t = 2 (lane % 4), a pair of
 * neighbours in one word, the first in the lower half:
 *
 *     a[16, 16]   words 0..3: a[g, t], a[g + 8, t], a[g, t + 8], a[g + 8, t + 8], pairs along rows
 *     b[16, 8]    words 0..1: b[t, g], b[t + 8, g], pairs along columns
 *     c[16, 8]    c[g, t], c[g, t + 1], c[g + 8, t], c[g + 8, t + 1]
 *
 * So a c of two neighbours, rounded, is an a. All lanes of a warp take part. On the host the same
 * layouts are emulated.
 */
#ifndef GRADD_KERNELS_CUDA_ATTENTION_MMA_H
#define GRADD_KERNELS_CUDA_ATTENTION_MMA_H

#include "kernels/cuda/gpu.h"

/* Two elements as a word. */
GPU_FN uint32_t gpu_word(gradd_bf16_t low, gradd_bf16_t high) {
    return low.bits | (uint32_t)high.bits << 16;
}
GPU_FN uint32_t gpu_word(gradd_f16_t low, gradd_f16_t high) {
    return low.bits | (uint32_t)high.bits << 16;
}

#ifdef __CUDACC__

#define GPU_MMA(T, name)                                                                           \
    GPU_FN void gpu_mma(T, float (&c)[4], const uint32_t *a, const uint32_t *b) {                  \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name                        \
                     ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"                     \
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                              \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));          \
    }
GPU_MMA(gradd_bf16_t, "bf16")
GPU_MMA(gradd_f16_t, "f16")
#undef GPU_MMA

GPU_FN uint32_t gpu_shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Four squares of 8 x 8 elements out of shared memory, a word of each per lane: rows g, pair t.
 * Lanes 8 k .. 8 k + 7 bring the rows of square k, 16 bytes each. */
GPU_FN void gpu_squares(uint32_t (&out)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(gpu_shared_address(row))
                 : "memory");
}
/* The same, transposed: column g, pair of rows t. */
GPU_FN void gpu_squares_turned(uint32_t (&out)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(gpu_shared_address(row))
                 : "memory");
}

/* 16 bytes from global to shared memory, or zeros, some time before gpu_copies_wait returns. */
GPU_FN void gpu_copy_16(void *to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(gpu_shared_address(to)),
                 "l"(__cvta_generic_to_global(from)), "r"(there ? 16 : 0)
                 : "memory");
}
GPU_FN void gpu_copies_wait() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* Two f32, rounded. */
GPU_FN uint32_t gpu_round(gradd_bf16_t, float low, float high) {
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
GPU_FN uint32_t gpu_round(gradd_f16_t, float low, float high) {
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

#else

template <class T> GPU_FN float gpu_half(uint32_t word, int k) {
    return gpu_get(T{(uint16_t)(word >> 16 * k)});
}
template <class T> GPU_FN void gpu_mma(T, float (&c)[4], const uint32_t *a, const uint32_t *b) {
    uint32_t mine[6], ra[4], rb[2];
    float x[2][16], y[2][16];
    memcpy(mine, a, 16);
    memcpy(mine + 4, b, 8);
    const emu::told_t *told = emu::tell(mine, sizeof mine, EMU_AT);
    const int g = emu::lane() / 4, t = emu::lane() % 4 * 2;
    for (int pair = 0; pair < 4; pair++) {
        memcpy(ra, told[g * 4 + pair].bytes, 16);
        for (int k = 0; k < 2; k++)
            for (int half = 0; half < 2; half++)
                for (int row = 0; row < 2; row++)
                    x[row][half * 8 + pair * 2 + k] = gpu_half<T>(ra[half * 2 + row], k);
        for (int column = 0; column < 2; column++) {
            memcpy(rb, told[(t + column) * 4 + pair].bytes + 16, 8);
            for (int k = 0; k < 2; k++)
                for (int half = 0; half < 2; half++)
                    y[column][half * 8 + pair * 2 + k] = gpu_half<T>(rb[half], k);
        }
    }
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 16; k++)
            c[i] = fmaf(x[i / 2][k], y[i % 2][k], c[i]);
}

GPU_FN const uint16_t *gpu_square_row(const emu::told_t *told, int square, int row) {
    const uint16_t *at;
    memcpy(&at, told[square * 8 + row].bytes, sizeof at);
    return at;
}
GPU_FN void gpu_squares(uint32_t (&out)[4], const void *row) {
    const emu::told_t *told = emu::tell(&row, sizeof row, EMU_AT);
    for (int k = 0; k < 4; k++)
        memcpy(&out[k], gpu_square_row(told, k, emu::lane() / 4) + emu::lane() % 4 * 2, 4);
}
GPU_FN void gpu_squares_turned(uint32_t (&out)[4], const void *row) {
    const emu::told_t *told = emu::tell(&row, sizeof row, EMU_AT);
    const int g = emu::lane() / 4, t = emu::lane() % 4 * 2;
    for (int k = 0; k < 4; k++)
        out[k] = gpu_square_row(told, k, t)[g] | (uint32_t)gpu_square_row(told, k, t + 1)[g] << 16;
}

GPU_FN void gpu_copy_16(void *to, const void *from, bool there) {
    emu::copy_later(to, there ? from : nullptr, EMU_AT);
}
GPU_FN void gpu_copies_wait() {
    emu::wait_copies();
}

GPU_FN uint32_t gpu_round(gradd_bf16_t, float low, float high) {
    return gpu_word(gradd_f32_bf16(low), gradd_f32_bf16(high));
}
GPU_FN uint32_t gpu_round(gradd_f16_t, float low, float high) {
    return gpu_word(gradd_f32_f16(low), gradd_f32_f16(high));
}

#endif
#endif
