/* Products and elementwise steps on tiles of attention, written once for f32 and f64.
 *
 * Included with REAL, NAME(x), LANES (elements of a 512-bit vector), EXP and TANH defined, once per
 * type; there is no guard on purpose. Tiles of scores are [keys][64 queries]; `lanes` is the number
 * of queries, rounded up to whole vectors. Each function is compiled for 512-bit vectors as well.
 */

/* product, turn, turn_bits and add_turned, for both widths of vectors */
#define VEC_BYTES  GRADD_VECTOR_BYTES
#define VEC(x)     NAME(x##_narrow)
#define VEC_TARGET /* that of the build */
#include "kernels/cpu/attention/attention_vec.h"
#define VEC_BYTES  GRADD_WIDE_BYTES
#define VEC(x)     NAME(x##_wide)
#define VEC_TARGET GRADD_WIDE
#include "kernels/cpu/attention/attention_vec.h"

static void NAME(product)(const attn_product_t *p, const REAL *a, const REAL *b, REAL *c) {
    (GRADD_IS_WIDE() ? NAME(product_wide) : NAME(product_narrow))(p, a, b, c);
}

/* out[c][i] = scale x[i][c] for the n rows of x; zero for further queries. */
static void NAME(turn)(const REAL *x, int64_t ld, int64_t n, int64_t cols, REAL scale, REAL *out) {
    if (n < TILE) memset(out, 0, sizeof(REAL) * (size_t)(cols * TILE));
    (GRADD_IS_WIDE() ? NAME(turn_wide) : NAME(turn_narrow))(x, ld, n, cols, scale, out);
}

/* The same without arithmetic, for elements that are no numbers. */
static void NAME(turn_bits)(const REAL *x, int64_t ld, int64_t n, int64_t cols, REAL *out) {
    if (n < TILE) memset(out, 0, sizeof(REAL) * (size_t)(cols * TILE));
    (GRADD_IS_WIDE() ? NAME(turn_bits_wide) : NAME(turn_bits_narrow))(x, ld, n, cols, out);
}

/* out[c][i] += x[i][c] */
static void NAME(add_turned)(const REAL *x, int64_t ld, int64_t n, int64_t cols, REAL *out,
                             int64_t ld_out) {
    (GRADD_IS_WIDE() ? NAME(add_turned_wide) : NAME(add_turned_narrow))(x, ld, n, cols, out,
                                                                        ld_out);
}

/* x = c tanh(x / c) */
GRADD_MULTIARCH static void NAME(cap)(REAL *x, int64_t keys, int64_t lanes, REAL c) {
    const REAL inverse = 1 / c;
    for (int64_t j = 0; j < keys; j++, x += TILE) {
        _Pragma("omp simd") for (int64_t i = 0; i < lanes; i++) x[i] = c * TANH(x[i] * inverse);
    }
}

/* z *= 1 - (x / c)^2, x the capped scores */
GRADD_MULTIARCH static void NAME(cap_grad)(REAL *z, const REAL *x, int64_t keys, int64_t lanes,
                                           REAL c) {
    const REAL inverse = 1 / c;
    for (int64_t j = 0; j < keys; j++, x += TILE, z += TILE) {
        _Pragma("omp simd") for (int64_t i = 0; i < lanes; i++) z[i] *=
            1 - (x[i] * inverse) * (x[i] * inverse);
    }
}

/* z = bit ? x : other, one bit per key and query; z may be x */
GRADD_MULTIARCH static void NAME(select)(REAL *z, const REAL *x, int64_t keys, int64_t lanes,
                                         const uint64_t *words, REAL other) {
    uint32_t half[2][TILE];
    for (int64_t i = 0; i < TILE; i++)
        half[0][i] = (uint32_t)words[i], half[1][i] = (uint32_t)(words[i] >> 32);
    for (int64_t j = 0; j < keys; j++, x += TILE, z += TILE) {
        const uint32_t *word = half[j >> 5], bit = 1u << (j & 31);
        _Pragma("omp simd") for (int64_t i = 0; i < lanes; i++) z[i] = word[i] & bit ? x[i] : other;
    }
}

/* One more tile of a running softmax: x becomes exp(x - max), sum grows, factor is what earlier
 * terms shrink by. Returns whether any factor is below 1. */
GRADD_MULTIARCH static bool NAME(soften)(REAL *x, int64_t keys, int64_t lanes, REAL *max, REAL *sum,
                                         REAL *factor) {
    REAL best[TILE], add[TILE], shift[TILE];
    int changed = 0;
    memcpy(best, max, sizeof best);
    for (int64_t j = 0; j < keys; j++) {
        const REAL *y = x + j * TILE;
        _Pragma("omp simd") for (int64_t i = 0; i < lanes; i++) best[i] =
            y[i] > best[i] ? y[i] : best[i];
    }
    _Pragma("omp simd reduction(| : changed)") for (int64_t i = 0; i < lanes; i++) {
        shift[i] = best[i] == -(REAL)INFINITY ? 0 : best[i];
        factor[i] = EXP(max[i] - shift[i]);
        changed |= factor[i] != 1;
        max[i] = best[i], add[i] = 0;
    }
    for (int64_t j = 0; j < keys; j++, x += TILE) {
        _Pragma("omp simd") for (int64_t i = 0; i < lanes; i++) {
            x[i] = EXP(x[i] - shift[i]);
            add[i] += x[i];
        }
    }
    _Pragma("omp simd") for (int64_t i = 0; i < lanes; i++) sum[i] = sum[i] * factor[i] + add[i];
    return changed;
}

/* rows of c times one factor each */
GRADD_MULTIARCH static void NAME(scale_rows)(REAL *c, int64_t ld, int64_t rows, int64_t cols,
                                             const REAL *factor) {
    for (int64_t i = 0; i < rows; i++, c += ld) {
        const REAL f = factor[i];
        _Pragma("omp simd") for (int64_t k = 0; k < cols; k++) c[k] *= f;
    }
}

/* z = exp(x - max - log_sum); z may be x */
GRADD_MULTIARCH static void NAME(probabilities)(REAL *z, const REAL *x, int64_t keys, int64_t lanes,
                                                const REAL *max, const REAL *log_sum) {
    for (int64_t j = 0; j < keys; j++, x += TILE, z += TILE) {
        _Pragma("omp simd") for (int64_t i = 0; i < lanes; i++) z[i] =
            EXP((x[i] - max[i]) - log_sum[i]);
    }
}

/* z = p (z - delta) */
GRADD_MULTIARCH static void NAME(soften_grad)(REAL *z, const REAL *p, int64_t keys, int64_t lanes,
                                              const REAL *delta) {
    for (int64_t j = 0; j < keys; j++, p += TILE, z += TILE) {
        _Pragma("omp simd") for (int64_t i = 0; i < lanes; i++) z[i] = p[i] * (z[i] - delta[i]);
    }
}

GRADD_MULTIARCH static void NAME(times)(REAL *z, int64_t keys, int64_t lanes, REAL factor) {
    for (int64_t j = 0; j < keys; j++, z += TILE) {
        _Pragma("omp simd") for (int64_t i = 0; i < lanes; i++) z[i] *= factor;
    }
}

/* n halves of this type as REAL, and back. */
GRADD_MULTIARCH static void NAME(widen)(REAL *to, const void *from, gradd_dtype_t dtype,
                                        int64_t n) {
    const gradd_bf16_t *b = from;
    const gradd_f16_t *h = from;
    if (dtype == GRADD_DT_BF16) {
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) to[i] = (REAL)gradd_bf16_f32(b[i]);
    } else {
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) to[i] = (REAL)gradd_f16_f32(h[i]);
    }
}

GRADD_MULTIARCH static void NAME(narrow)(void *to, const REAL *from, gradd_dtype_t dtype,
                                         int64_t n) {
    gradd_bf16_t *b = to;
    gradd_f16_t *h = to;
    if (dtype == GRADD_DT_BF16) {
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) b[i] = gradd_f32_bf16((float)from[i]);
    } else {
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) h[i] = gradd_f32_f16((float)from[i]);
    }
}

/* Sums of x y along rows */
GRADD_MULTIARCH static void NAME(row_dots)(const REAL *x, int64_t ld_x, const REAL *y, int64_t ld_y,
                                           int64_t rows, int64_t cols, REAL *out) {
    for (int64_t i = 0; i < rows; i++, x += ld_x, y += ld_y)
        out[i] = NAME(gradd_row_dot)(x, y, 0, cols);
}
