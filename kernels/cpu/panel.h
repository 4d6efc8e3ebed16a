/* Register tiles of matrix products.
 *
 * GRADD_PANEL(name, T, BYTES, TARGET) defines name(p, rows, a, b, c): C[rows, 64 bytes] = A B, or C
 * += A B, with up to GRADD_PANEL_ROWS rows, which stay in registers for the whole sum. BYTES is the
 * length of the vectors and TARGET nothing, or GRADD_WIDE: see dispatch.h. `rows` must be a
 * constant. Each element of C is one chain of multiply-adds over k, so its bits do not depend on
 * BYTES. */
#ifndef GRADD_KERNELS_CPU_PANEL_H
#define GRADD_KERNELS_CPU_PANEL_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/describe/dispatch.h"

#define GRADD_PANEL_ROWS  6
#define GRADD_PANEL_BYTES 64

/* Steps in elements: A[i, l] is a[i a_m + l a_k], rows of B and C are contiguous. */
typedef struct gradd_panel_s {
    int64_t k, a_m, a_k, ldb, ldc;
    bool add;
} gradd_panel_t;

#define GRADD_PANEL(name, T, BYTES, TARGET)                                                        \
    TARGET static inline __attribute__((always_inline)) void name(                                 \
        const gradd_panel_t *p, const int rows, const T *a, const T *b, T *c) {                    \
        GRADD_FUSED_BLOCK                                                                          \
        typedef T vec_t __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));        \
        enum { EACH = (BYTES) / sizeof(T), PARTS = GRADD_PANEL_BYTES / (BYTES) };                  \
        vec_t sum[GRADD_PANEL_ROWS][PARTS], row[PARTS];                                            \
        for (int i = 0; i < rows; i++)                                                             \
            for (int v = 0; v < PARTS; v++)                                                        \
                sum[i][v] = p->add ? *(vec_t *)(c + i * p->ldc + v * EACH) : (vec_t){0};           \
        for (int64_t l = 0; l < p->k; l++, a += p->a_k, b += p->ldb) {                             \
            for (int v = 0; v < PARTS; v++)                                                        \
                row[v] = *(const vec_t *)(b + v * EACH);                                           \
            _Pragma("GCC unroll 6") for (int i = 0; i < rows; i++) {                               \
                const T x = a[i * p->a_m];                                                         \
                _Pragma("GCC unroll 4") for (int v = 0; v < PARTS; v++) sum[i][v] += x * row[v];   \
            }                                                                                      \
        }                                                                                          \
        for (int i = 0; i < rows; i++)                                                             \
            for (int v = 0; v < PARTS; v++)                                                        \
                *(vec_t *)(c + i * p->ldc + v * EACH) = sum[i][v];                                 \
    }

#endif
