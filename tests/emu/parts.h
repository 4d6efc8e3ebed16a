/* Parts that kernels of kernels/cuda share, for tests that call them directly: with numbers too
 * large for a tensor of a test, or in the form for such tensors. */
#ifndef GRADD_TESTS_EMU_PARTS_H
#define GRADD_TESTS_EMU_PARTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shm/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* a / by as kernels divide numbers of at most `most`. */
int64_t emu_divide(int64_t by, int64_t most, int64_t a);

/* Positions of n keys, at most `largest`, in sorted order; in 64 bits or in 32. */
gradd_status_t emu_sort(bool wide, const uint64_t *key, int64_t n, uint64_t largest,
                        int64_t *out_at);

/* Sums of rows of f32 by `row` (-1 = nowhere), in 64 bits or in 32, onto what `to` holds. */
typedef struct emu_sums_s {
    const int64_t *row;
    int64_t n, n_rows, width;
    const float *from;
    float *to;
} emu_sums_t;
gradd_status_t emu_sum_rows(bool wide, const emu_sums_t *sums);

/* Where attention's backward keeps gradients of scores: bytes, and blocks of keys that it must have
 * at once if they do not suffice. */
void emu_limit_scores(int64_t bytes, int64_t blocks);

/* Bits of halves and of f32, as kernels convert them. */
uint32_t emu_widen_f16(uint16_t bits);
uint16_t emu_narrow_f16(uint32_t bits);
uint16_t emu_narrow_bf16(uint32_t bits);

#ifdef __cplusplus
}
#endif
#endif
