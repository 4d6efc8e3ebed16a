/* Fingerprints of memory. See fingerprint.h.
 *
 * A sum has two parts: the words themselves, which every change of one word changes, and products
 * of their halves under a key that differs from place to place, which an exchange of equal words
 * changes. Both are sums over pieces, so pieces may be counted in any order. */
#include "kernels/cpu/fingerprint.h"

#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

enum { LINE = 64, WORDS = LINE / 8, PIECE = 1 << 16, DRAWN = GRADD_PRINT_LINES };

static uint64_t mix(uint64_t x) {
    x ^= x >> 32;
    x *= UINT64_C(0xd6e8feb86659fd93);
    x ^= x >> 29;
    x *= UINT64_C(0x9fb21c651e98df25);
    return x ^ x >> 32;
}

static uint64_t join(uint64_t a, uint64_t b) {
    return mix(a * UINT64_C(0x9e3779b97f4a7c15) + mix(b));
}

/* ---- some lines ---- */

static uint64_t of_line(const unsigned char *p, size_t bytes) {
    uint64_t words[WORDS] = {0}, h = bytes;
    memcpy(words, p, bytes);
    for (int i = 0; i < WORDS; i++)
        h = (h ^ words[i]) * UINT64_C(0xff51afd7ed558ccd) + (h >> 31);
    return h;
}

/* Offsets of the lines of one tensor, which are asked for at once: memory is what takes the time.
 * One from each of as many equal parts, so never the same twice. */
static int draw(const gradd_bytes_t *t, uint64_t which, size_t *out_at) {
    const size_t lines = (t->bytes + LINE - 1) / LINE;
    const int n = lines < DRAWN ? (int)lines : DRAWN;
    for (int k = 0; k < n; k++) {
        size_t first = lines * (size_t)k / (size_t)n, last = lines * (size_t)(k + 1) / (size_t)n;
        out_at[k] = (first + mix(which * DRAWN + (size_t)k) % (last - first)) * LINE;
        __builtin_prefetch((const char *)t->data + out_at[k]);
    }
    return n;
}

static uint64_t of_drawn(const gradd_bytes_t *t, const size_t *at, int n) {
    uint64_t h = t->bytes;
    for (int k = 0; k < n; k++) {
        size_t rest = t->bytes - at[k];
        h = join(h, of_line((const unsigned char *)t->data + at[k], rest < LINE ? rest : LINE));
    }
    return h;
}

uint64_t gradd_print_drawn(const gradd_bytes_t *list, int n) {
    size_t at[2][DRAWN];
    int lines[2] = {n ? draw(&list[0], 0, at[0]) : 0, 0};
    uint64_t h = (uint64_t)n;
    for (int i = 0; i < n; i++) {
        int here = i % 2, next = 1 - here; /* the next one's lines are under way meanwhile */
        if (i + 1 < n) lines[next] = draw(&list[i + 1], (uint64_t)i + 1, at[next]);
        h = join(h, of_drawn(&list[i], at[here], lines[here]));
    }
    return h;
}

/* ---- all bytes ---- */

/* Full lines of one piece. */
static uint64_t of_lines(const unsigned char *p, size_t lines, uint64_t key) {
    uint64_t plain[WORDS] = {0}, keyed[WORDS] = {0}, keys[WORDS];
    const uint64_t step = UINT64_C(0x9e3779b97f4a7c15);
    for (int j = 0; j < WORDS; j++)
        keys[j] = mix(key + (uint64_t)j);
#ifdef __AVX2__
    enum { HALVES = 2, LANES = WORDS / HALVES };
    __m256i sum[HALVES], product[HALVES], k[HALVES];
    for (int v = 0; v < HALVES; v++) {
        sum[v] = product[v] = _mm256_setzero_si256();
        k[v] = _mm256_loadu_si256((const __m256i *)(const void *)(keys + LANES * v));
    }
    for (size_t i = 0; i < lines; i++)
        for (int v = 0; v < HALVES; v++) {
            const void *at = p + i * LINE + sizeof(__m256i) * (size_t)v;
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
    for (size_t i = 0; i < lines * WORDS; i++) {
        uint64_t word, *k = &keys[i % WORDS];
        memcpy(&word, p + i * sizeof word, sizeof word);
        plain[i % WORDS] += word;
        keyed[i % WORDS] += ((word ^ *k) & UINT32_MAX) * ((word ^ *k) >> 32);
        *k += step;
    }
#endif
    uint64_t h = 0;
    for (int j = 0; j < WORDS; j++)
        h = join(h + plain[j], keyed[j] + (uint64_t)j);
    return h;
}

static uint64_t of_piece(const unsigned char *p, size_t bytes, uint64_t key) {
    const size_t lines = bytes / LINE, rest = bytes % LINE;
    return join(of_lines(p, lines, key), of_line(p + lines * LINE, rest) + key);
}

static uint64_t of_all(const gradd_bytes_t *t, uint64_t which) {
    const unsigned char *p = t->data;
    const int64_t pieces = (int64_t)((t->bytes + PIECE - 1) / PIECE);
    uint64_t sum = 0;
#pragma omp parallel for schedule(static) reduction(+ : sum) if (pieces > 4)
    for (int64_t k = 0; k < pieces; k++) {
        const size_t first = (size_t)k * PIECE, rest = t->bytes - first;
        const size_t bytes = rest < PIECE ? rest : PIECE;
        sum += of_piece(p + first, bytes, mix(which << 40 ^ (uint64_t)k));
    }
    return join(t->bytes, sum);
}

uint64_t gradd_print_sum(const gradd_bytes_t *list, int n) {
    uint64_t h = (uint64_t)n;
    for (int i = 0; i < n; i++)
        h = join(h, of_all(&list[i], (uint64_t)i));
    return h;
}
