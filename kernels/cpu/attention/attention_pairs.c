/* Products of bf16 in pairs. See attention_pairs.h. Pure functions, any thread. */
#include "kernels/cpu/attention/attention_pairs.h"

#include "kernels/cpu/attention/attention_cpu.h"
#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/row_lanes.h"
#include "kernels/describe/dispatch.h"

enum { TILE = GRADD_ATTN_TILE, LANES = 16 };

/* The library's own answer counts too, so that ONEDNN_MAX_CPU_ISA makes an older processor of this
 * one throughout. */
bool attn_pairs_ready(void) {
#if ATTN_PAIRS
    return !gradd_narrow && __builtin_cpu_supports("avx512bf16") && gradd_gemm_bf16_native();
#else
    return false;
#endif
}

#if ATTN_PAIRS

#include <immintrin.h>

#define PAIRS  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#define INLINE PAIRS static inline __attribute__((always_inline))

/* ---- products -------------------------------------------------------------------------------- */

/* `rows` rows of `vecs` vectors, in registers for the whole sum; both are constants. The arrays are
 * of unaligned types because GCC's address sanitizer may place them at 32-byte alignment. */
INLINE void panel(const attn_product_t *p, const int rows, const int vecs, const attn_pair_t *a,
                  const attn_pair_t *b, float *c) {
    __m512_u sum[8][2];
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < vecs; v++)
            sum[i][v] = p->add ? _mm512_loadu_ps(c + i * p->ldc + v * LANES) : _mm512_setzero_ps();
    for (int64_t l = 0; l < p->k; l++, a += p->a_k, b += p->ldb) {
        __m512i_u row[2];
        for (int v = 0; v < vecs; v++)
            row[v] = _mm512_loadu_si512(b + v * LANES);
        _Pragma("GCC unroll 8") for (int i = 0; i < rows; i++) {
            const __m512i x = _mm512_set1_epi32((int)a[i * p->a_m]);
            _Pragma("GCC unroll 2") for (int v = 0; v < vecs; v++) sum[i][v] =
                _mm512_dpbf16_ps(sum[i][v], (__m512bh)x, (__m512bh)row[v]);
        }
    }
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < vecs; v++)
            _mm512_storeu_ps(c + i * p->ldc + v * LANES, sum[i][v]);
}

INLINE void columns(const attn_product_t *p, const int vecs, const attn_pair_t *a,
                    const attn_pair_t *b, float *c) {
    int64_t i = 0;
    for (; i + 8 <= p->m; i += 8)
        panel(p, 8, vecs, a + i * p->a_m, b, c + i * p->ldc);
    if (p->m & 4) panel(p, 4, vecs, a + i * p->a_m, b, c + i * p->ldc);
    i += p->m & 4;
    if (p->m & 2) panel(p, 2, vecs, a + i * p->a_m, b, c + i * p->ldc);
    i += p->m & 2;
    if (p->m & 1) panel(p, 1, vecs, a + i * p->a_m, b, c + i * p->ldc);
}

PAIRS void attn_pairs_product(const attn_product_t *p, const attn_pair_t *a, const attn_pair_t *b,
                              float *c) {
    int64_t j = 0;
    for (; j + 2 * LANES <= p->n; j += 2 * LANES)
        columns(p, 2, a, b + j, c + j);
    if (j < p->n) columns(p, 1, a, b + j, c + j);
}

/* ---- packing --------------------------------------------------------------------------------- */

/* 32-bit words with those of a in the lower halves, those of b in the upper. */
INLINE __m512i zip(__m256i a, __m256i b) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(a),
                           _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
}

PAIRS void attn_pairs_rows(const gradd_bf16_t *x, int64_t ld, int64_t rows, int64_t cols,
                           attn_pair_t *out, int64_t ld_out) {
    const __m256i none = _mm256_setzero_si256();
    for (int64_t j = 0; j < rows; j += 2, x += 2 * ld, out += ld_out) {
        const bool both = j + 1 < rows;
        int64_t c = 0;
        for (; c + LANES <= cols; c += LANES) {
            const __m256i a = _mm256_loadu_si256((const __m256i_u *)(x + c));
            const __m256i b = both ? _mm256_loadu_si256((const __m256i_u *)(x + ld + c)) : none;
            _mm512_storeu_si512(out + c, zip(a, b));
        }
        for (; c < cols; c++)
            out[c] = x[c].bits | (both ? (uint32_t)x[ld + c].bits << 16 : 0);
        for (; c < ld_out; c++)
            out[c] = 0;
    }
}

PAIRS void attn_pairs_of_keys(const float *x, int64_t keys, int64_t queries, attn_pair_t *out) {
    for (int64_t j = 0; j < keys; j += 2, x += 2 * TILE, out += TILE)
        for (int64_t i = 0; i < queries; i += LANES) {
            const __m512 a = _mm512_loadu_ps(x + i);
            const __m512 b = j + 1 < keys ? _mm512_loadu_ps(x + TILE + i) : _mm512_setzero_ps();
            _mm512_storeu_si512(
                out + i, zip((__m256i)_mm512_cvtneps_pbh(a), (__m256i)_mm512_cvtneps_pbh(b)));
        }
}

PAIRS void attn_pairs_of_queries(const float *x, int64_t keys, int64_t queries, attn_pair_t *out) {
    for (int64_t j = 0; j < keys; j++, x += TILE, out += TILE / 2)
        for (int64_t i = 0; i < queries; i += LANES) {
            const int64_t left = queries - i;
            const __mmask16 valid = (__mmask16)(left < LANES ? (1u << left) - 1 : 0xffffu);
            const __m256bh y = _mm512_maskz_cvtneps_pbh(valid, _mm512_loadu_ps(x + i));
            _mm256_storeu_si256((__m256i_u *)(out + i / 2), (__m256i)y);
        }
}

GRADD_MULTIARCH void attn_pairs_dots(attn_rows_bf16_t x, attn_rows_bf16_t y, int64_t rows,
                                     int64_t cols, float *out) {
    const gradd_bf16_t *xi = x.at, *yi = y.at;
    for (int64_t i = 0; i < rows; i++, xi += x.ld, yi += y.ld)
        out[i] = gradd_row_dot_bf16(xi, yi, 0, cols);
}

#endif
