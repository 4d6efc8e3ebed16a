/* Fingerprints of memory. See fingerprint.h.
 *
 * A sum has two parts: the words themselves, which every change of one word changes, and products
 * of their halves under a key that differs from place to place, which an exchange of equal words
 * changes. Both are sums over pieces, so pieces may be counted in any order. */
#include "kernels/cpu/fingerprint.h"

#include "kernels/math/fingerprint_formulas.h"

#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

/* Offsets of the lines of one tensor, which are asked for at once: memory is what takes the time.
 * One from each of as many equal parts, so never the same twice. */
static int draw(const gradd_bytes_t *t, uint64_t which, size_t *out_at) {
    const size_t lines = (t->bytes + GRADD_PRINT_LINE - 1) / GRADD_PRINT_LINE;
    const int n = lines < GRADD_PRINT_LINES ? (int)lines : GRADD_PRINT_LINES;
    for (int k = 0; k < n; k++) {
        out_at[k] = gradd_print_place(lines, (uint64_t)k, which) * GRADD_PRINT_LINE;
        __builtin_prefetch((const char *)t->data + out_at[k]);
    }
    return n;
}

static uint64_t of_drawn(const gradd_bytes_t *t, const size_t *at, int n) {
    uint64_t h = t->bytes;
    for (int k = 0; k < n; k++) {
        size_t rest = t->bytes - at[k];
        h = gradd_print_join(h,
                             gradd_print_line((const unsigned char *)t->data + at[k],
                                              rest < GRADD_PRINT_LINE ? rest : GRADD_PRINT_LINE));
    }
    return h;
}

uint64_t gradd_print_drawn(const gradd_bytes_t *list, int n) {
    size_t at[2][GRADD_PRINT_LINES];
    int lines[2] = {n ? draw(&list[0], 0, at[0]) : 0, 0};
    uint64_t h = (uint64_t)n;
    for (int i = 0; i < n; i++) {
        int here = i % 2, next = 1 - here; /* the next one's lines are under way meanwhile */
        if (i + 1 < n) lines[next] = draw(&list[i + 1], (uint64_t)i + 1, at[next]);
        h = gradd_print_join(h, of_drawn(&list[i], at[here], lines[here]));
    }
    return h;
}

/* ---- all bytes ---- */

/* Full lines of one piece. */
static uint64_t of_lines(const unsigned char *p, size_t lines, uint64_t key) {
    uint64_t plain[GRADD_PRINT_WORDS] = {0}, keyed[GRADD_PRINT_WORDS] = {0},
             keys[GRADD_PRINT_WORDS];
    const uint64_t step = GRADD_PRINT_STEP;
    for (int j = 0; j < GRADD_PRINT_WORDS; j++)
        keys[j] = gradd_print_mix(key + (uint64_t)j);
#ifdef __AVX2__
    enum { HALVES = 2, LANES = GRADD_PRINT_WORDS / HALVES };
    __m256i sum[HALVES], product[HALVES], k[HALVES];
    for (int v = 0; v < HALVES; v++) {
        sum[v] = product[v] = _mm256_setzero_si256();
        k[v] = _mm256_loadu_si256((const __m256i *)(const void *)(keys + LANES * v));
    }
    for (size_t i = 0; i < lines; i++)
        for (int v = 0; v < HALVES; v++) {
            const void *at = p + i * GRADD_PRINT_LINE + sizeof(__m256i) * (size_t)v;
            __m256i word = _mm256_loadu_si256((const __m256i *)at);
            __m256i x = _mm256_xor_si256(word, k[v]);
            sum[v] = _mm256_add_epi64(sum[v], word);
            product[v] =
                _mm256_add_epi64(product[v], _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32)));
            k[v] = _mm256_add_epi64(k[v], _mm256_set1_epi64x((long long)step));
        }
    memcpy(plain, sum, sizeof plain);
    memcpy(keyed, product, sizeof keyed);
#else
    for (size_t i = 0; i < lines * GRADD_PRINT_WORDS; i++) {
        uint64_t word, *k = &keys[i % GRADD_PRINT_WORDS];
        memcpy(&word, p + i * sizeof word, sizeof word);
        plain[i % GRADD_PRINT_WORDS] += word;
        keyed[i % GRADD_PRINT_WORDS] += ((word ^ *k) & UINT32_MAX) * ((word ^ *k) >> 32);
        *k += step;
    }
#endif
    uint64_t h = 0;
    for (int j = 0; j < GRADD_PRINT_WORDS; j++)
        h = gradd_print_join(h + plain[j], keyed[j] + (uint64_t)j);
    return h;
}

static uint64_t of_piece(const unsigned char *p, size_t bytes, uint64_t key) {
    const size_t lines = bytes / GRADD_PRINT_LINE, rest = bytes % GRADD_PRINT_LINE;
    return gradd_print_join(of_lines(p, lines, key),
                            gradd_print_line(p + lines * GRADD_PRINT_LINE, rest) + key);
}

static uint64_t of_all(const gradd_bytes_t *t, uint64_t which) {
    const unsigned char *p = t->data;
    const int64_t pieces = (int64_t)((t->bytes + GRADD_PRINT_PIECE - 1) / GRADD_PRINT_PIECE);
    uint64_t sum = 0;
#pragma omp parallel for schedule(static) reduction(+ : sum) if (pieces > 4)
    for (int64_t k = 0; k < pieces; k++) {
        const size_t first = (size_t)k * GRADD_PRINT_PIECE, rest = t->bytes - first;
        const size_t bytes = rest < GRADD_PRINT_PIECE ? rest : GRADD_PRINT_PIECE;
        sum += of_piece(p + first, bytes, gradd_print_mix(which << 40 ^ (uint64_t)k));
    }
    return gradd_print_join(t->bytes, sum);
}

uint64_t gradd_print_sum(const gradd_bytes_t *list, int n) {
    uint64_t h = (uint64_t)n;
    for (int i = 0; i < n; i++)
        h = gradd_print_join(h, of_all(&list[i], (uint64_t)i));
    return h;
}
