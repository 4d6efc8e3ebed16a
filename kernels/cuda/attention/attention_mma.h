/* Attention by tensor cores: shared parts of forward and backward. See attention_gpu.h and mma.h.
 *
 * A warp has 16 rows of a tile of scores, queries or keys, in the layout that the product gives:
 * rounded, it is the left side of the next product. Right sides are in shared memory, rows 8
 * elements apart from each other's banks. Sizes up to 64 and up to 128 have a kernel each; shorter
 * rows skip the rest in steps of 16.
 */
#ifndef GRADD_KERNELS_CUDA_ATTENTION_ATTENTION_MMA_H
#define GRADD_KERNELS_CUDA_ATTENTION_ATTENTION_MMA_H

#include "kernels/cuda/attention/attention_gpu.h"
#include "kernels/cuda/attention/mma.h"

/* For what is rounded to 16 bits at once: subnormal results are zero. */
GPU_FN float attn_fast_exp(float x) {
#ifdef __CUDACC__
    float y;
    asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
    return y;
#else
    return attn_exp(x);
#endif
}

GPU_FN int attn_lane() {
    return (int)threadIdx.x % GPU_WARP;
}
GPU_FN int attn_warp() {
    return (int)threadIdx.x / GPU_WARP;
}
/* Row and first column of a lane's part of a product; further rows are 8, columns 1 away. */
GPU_FN int attn_g() {
    return attn_lane() / 4;
}
GPU_FN int attn_t() {
    return attn_lane() % 4 * 2;
}

template <int D> constexpr int attn_mma_ld = D + 8;

/* Rows into shared memory; zeros for those that are not there. */
template <int D, int ROWS, int THREADS, class T>
GPU_FN void attn_copy(T *to, const attn_rows<T> &rows, int d) {
    constexpr int packs = D / 8;
#pragma unroll 4
    for (int i = threadIdx.x; i < ROWS * packs; i += THREADS) {
        const int row = i / packs, col = i % packs * 8;
        const bool there = row < rows.n;
        if (col < d)
            gpu_copy_16(to + row * attn_mma_ld<D> + col,
                        rows.at + (there ? row * rows.stride + col : 0), there);
    }
}

/* Left sides of 16 rows, straight from the tensor. */
template <int D, class T>
GPU_FN void attn_left(uint32_t (&a)[D / 16][4], const attn_rows<T> &rows, int d) {
#pragma unroll
    for (int k = 0; k < D / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = attn_warp() * 16 + attn_g() + i % 2 * 8;
            const int col = k * 16 + attn_t() + i / 2 * 8;
            const bool there = row < rows.n && k * 16 < d;
            a[k][i] = there ? *(const uint32_t *)(rows.at + row * rows.stride + col) : 0;
        }
}
/* The same from shared memory, 16 columns from `col` on of the warp's rows. */
template <int D, class T> GPU_FN void attn_left_at(uint32_t (&a)[4], const T *tile, int col) {
    const int lane = attn_lane();
    gpu_squares(a, tile + (attn_warp() * 16 + lane % 16) * attn_mma_ld<D> + col + lane / 16 * 8);
}

/* Right sides: 16 rows of a tile are columns of the product, 16 elements of theirs are summed. */
template <int D, class T>
GPU_FN void attn_right(uint32_t (&b)[4], const T *tile, int row, int col) {
    const int lane = attn_lane();
    gpu_squares(b,
                tile + (row + lane / 16 * 8 + lane % 8) * attn_mma_ld<D> + col + lane / 8 % 2 * 8);
}
/* 16 rows of a tile are summed over, 16 elements of theirs are columns of the product. */
template <int D, class T>
GPU_FN void attn_right_turned(uint32_t (&b)[4], const T *tile, int row, int col) {
    const int lane = attn_lane();
    gpu_squares_turned(b, tile + (row + lane % 16) * attn_mma_ld<D> + col + lane / 16 * 8);
}

/* sum[rows of the warp][rows of the tile] += 16 elements from `col` on. */
template <int D, int N, class T>
GPU_FN void attn_mma_step(float (&sum)[N][4], const uint32_t *a, const T *tile, int col) {
#pragma unroll
    for (int n = 0; n < N / 2; n++) {
        uint32_t b[4];
        attn_right<D>(b, tile, n * 16, col);
        gpu_mma(T(), sum[2 * n], a, b);
        gpu_mma(T(), sum[2 * n + 1], a, b + 2);
    }
}

/* Two columns of squares of a product, rounded: a left side. */
template <class T>
GPU_FN void attn_left_of(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = gpu_round(T(), left[0], left[1]);
    a[1] = gpu_round(T(), left[2], left[3]);
    a[2] = gpu_round(T(), right[0], right[1]);
    a[3] = gpu_round(T(), right[2], right[3]);
}

/* sum[rows of the warp][elements] += a[rows of the warp][16] times 16 rows of a tile. */
template <int D, class T>
GPU_FN void attn_mma_sum(float (&sum)[D / 8][4], const uint32_t *a, const T *tile, int row,
                         int cols) {
#pragma unroll
    for (int n = 0; n < D / 16; n++) {
        uint32_t b[4];
        if (n * 16 >= cols) continue;
        attn_right_turned<D>(b, tile, row, n * 16);
        gpu_mma(T(), sum[2 * n], a, b);
        gpu_mma(T(), sum[2 * n + 1], a, b + 2);
    }
}

/* sum[rows of the warp][elements] += x[rows of the warp][rows of the tile] tile, x rounded. */
template <int D, int N, class T>
GPU_FN void attn_mma_add(float (&sum)[D / 8][4], const float (&x)[N][4], const T *tile, int cols) {
#pragma unroll
    for (int k = 0; k < N / 2; k++) {
        uint32_t a[4];
        attn_left_of<T>(a, x[2 * k], x[2 * k + 1]);
        attn_mma_sum<D>(sum, a, tile, k * 16, cols);
    }
}

template <int N> GPU_FN void attn_clear(float (&x)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[n][i] = 0;
}

/* Rows of a result, times a factor per row. */
template <int D, class T>
GPU_FN void attn_mma_put(const attn_rows<T> &to, int cols, const float (&x)[D / 8][4],
                         const float *factor) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = attn_warp() * 16 + attn_g() + 8 * r;
        if (row >= to.n) continue;
        T *at = (T *)to.at + row * to.stride + attn_t();
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            if (n * 8 < cols)
                *(uint32_t *)(at + n * 8) =
                    gpu_round(T(), x[n][2 * r] * factor[r], x[n][2 * r + 1] * factor[r]);
    }
}

/* ---- pairs that need little ------------------------------------------------------------------ */

/* The most frequent kind of call: a score only gets its scale and a mask. Such calls have kernels
 * of their own (EASY), because the code for all other cases does not fit a multiprocessor's cache.
 */
static inline bool attn_is_easy(const gradd_attn_t &p) {
    return !p.bias.data && p.softcap == 0 && !p.drop.active;
}

/* The information needed about a query's pairs with keys [first, first + n), beyond their
 * products. */
enum attn_pairs_t {
    ATTN_ALL,   /* nothing: it sees all */
    ATTN_RANGE, /* where its range ends */
    ATTN_ANY,   /* all that there is */
};
template <bool EASY>
GPU_FN attn_pairs_t attn_pairs_of(const gradd_attn_t &p, const attn_row_t &row, int first, int n) {
    const bool empty = row.lo >= row.hi;
    if (!EASY && (p.bias.data || p.softcap != 0)) return ATTN_ANY;
    if (row.kind != ATTN_SOLID && !empty) return ATTN_ANY;
    return row.lo <= first && row.hi >= first + n ? ATTN_ALL : ATTN_RANGE;
}
/* Of all queries of the lanes of a warp, so that it takes one way. */
template <bool EASY>
GPU_FN attn_pairs_t attn_pairs_of(const gradd_attn_t &p, const attn_row_t &a, const attn_row_t &b,
                                  int first, int n) {
    const attn_pairs_t x = attn_pairs_of<EASY>(p, a, first, n);
    const attn_pairs_t y = attn_pairs_of<EASY>(p, b, first, n);
    if (__any_sync(GPU_ALL, x == ATTN_ANY || y == ATTN_ANY)) return ATTN_ANY;
    return __any_sync(GPU_ALL, x == ATTN_RANGE || y == ATTN_RANGE) ? ATTN_RANGE : ATTN_ALL;
}

#endif
