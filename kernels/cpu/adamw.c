/* See adamw.h. */
#include "kernels/cpu/adamw.h"

#include <string.h>

#include "kernels/cpu/half.h"
#include "kernels/math/adam.h"

#define BLOCK ((int64_t)4096)

static void update(const gradd_adam_coefficients_t *c, const gradd_adam_span_t *s, const float *p,
                   const float *g) {
    const float *m = s->m, *v = s->v;
    float *op = s->out_p, *om = s->out_m, *ov = s->out_v;
    gradd_adam_coefficients_t k = *c;
#pragma omp simd
    for (int64_t i = 0; i < s->n; i++) {
        const gradd_adam_one_t new = gradd_adam_one(&k, p[i], g[i], m[i], v[i]);
        om[i] = new.m;
        ov[i] = new.v;
        op[i] = new.p;
    }
}

#define MASTERS(name, T, choose)                                                                   \
    static void name(float *out, const float *master, const T *p, int64_t n) {                     \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) out[i] = choose(master[i], p[i]);      \
    }
MASTERS(masters_bf16, gradd_bf16_t, gradd_adam_master_bf16)
MASTERS(masters_f16, gradd_f16_t, gradd_adam_master_f16)

/* At most BLOCK elements: halves are widened on the stack first. */
static void update_block(const gradd_adam_coefficients_t *c, const gradd_adam_span_t *s) {
    float wide_p[BLOCK], wide_g[BLOCK];
    const float *p = s->p, *g = s->g;
    if (GRADD_HAS_HALVES && s->p16) {
        if (!s->p)
            gradd_half_widen(wide_p, s->p16, s->half, s->n);
        else if (s->half == GRADD_DT_F16)
            masters_f16(wide_p, s->p, s->p16, s->n);
        else
            masters_bf16(wide_p, s->p, s->p16, s->n);
        p = wide_p;
    }
    if (GRADD_HAS_HALVES && s->g16) {
        gradd_half_widen(wide_g, s->g16, s->half, s->n);
        g = wide_g;
    }
    update(c, s, p, g);
}

static gradd_adam_span_t part(const gradd_adam_span_t *s, int64_t from, int64_t n) {
    return (gradd_adam_span_t){.p = s->p ? s->p + from : NULL,
                               .m = s->m + from,
                               .v = s->v + from,
                               .g = s->g ? s->g + from : NULL,
                               .p16 = s->p16 ? (const uint16_t *)s->p16 + from : NULL,
                               .g16 = s->g16 ? (const uint16_t *)s->g16 + from : NULL,
                               .out_p = s->out_p + from,
                               .out_m = s->out_m + from,
                               .out_v = s->out_v + from,
                               .n = n,
                               .half = s->half};
}

void gradd_adam_update(const gradd_adam_t *hyper, float grad_scale, const gradd_adam_span_t *span) {
    gradd_adam_coefficients_t c = gradd_adam_coefficients(hyper, grad_scale);
    int64_t blocks = (span->n + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) if (blocks > 4)
    for (int64_t b = 0; b < blocks; b++) {
        int64_t from = b * BLOCK, left = span->n - from;
        gradd_adam_span_t block = part(span, from, left < BLOCK ? left : BLOCK);
        update_block(&c, &block);
    }
}

#define COMMIT_PIECE ((int64_t)16 << 10)

static void commit_piece(const gradd_adam_commit_t *c, int64_t from, int64_t n) {
    const size_t bytes = sizeof(float) * (size_t)n;
    if (c->out_master) memcpy(c->out_master + from, c->p + from, bytes);
    if (gradd_dtype_is_half(c->dtype))
        gradd_half_narrow((uint16_t *)c->out_p + from, c->p + from, c->dtype, n);
    else
        memcpy((float *)c->out_p + from, c->p + from, bytes);
    memcpy(c->out_m + from, c->m + from, bytes);
    memcpy(c->out_v + from, c->v + from, bytes);
}

void gradd_adam_commit(const gradd_adam_commit_t *c) {
    int64_t pieces = (c->n + COMMIT_PIECE - 1) / COMMIT_PIECE;
#pragma omp parallel for schedule(static) if (pieces > 1)
    for (int64_t k = 0; k < pieces; k++) {
        int64_t from = k * COMMIT_PIECE, left = c->n - from;
        commit_piece(c, from, left < COMMIT_PIECE ? left : COMMIT_PIECE);
    }
}

static double block_squares(const float *x, int64_t n) {
    double lanes[8] = {0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int l = 0; l < 8; l++)
            lanes[l] += (double)x[i + l] * (double)x[i + l];
    double sum = 0;
    for (; i < n; i++)
        sum += (double)x[i] * (double)x[i];
    for (int l = 0; l < 8; l++)
        sum += lanes[l];
    return sum;
}

/* Partial sums of fixed blocks, added in block order: the same bits for any number of threads. */
#define NORM_GROUP 256

static double part_squares(const gradd_span_t *s, int64_t from, int64_t n) {
    if (s->dtype == GRADD_DT_F32) return block_squares((const float *)s->data + from, n);
    float wide[BLOCK];
    gradd_half_widen(wide, (const uint16_t *)s->data + from, s->dtype, n);
    return block_squares(wide, n);
}

static double sum_squares(const gradd_span_t *s) {
    const int64_t n = s->n;
    int64_t blocks = (n + BLOCK - 1) / BLOCK;
    double total = 0, partial[NORM_GROUP];
    for (int64_t base = 0; base < blocks; base += NORM_GROUP) {
        int64_t group = blocks - base < NORM_GROUP ? blocks - base : NORM_GROUP;
#pragma omp parallel for schedule(static) if (group > 8)
        for (int64_t b = 0; b < group; b++) {
            int64_t from = (base + b) * BLOCK, left = n - from;
            partial[b] = part_squares(s, from, left < BLOCK ? left : BLOCK);
        }
        for (int64_t b = 0; b < group; b++)
            total += partial[b];
    }
    return total;
}

double gradd_sum_squares(const gradd_span_t *list, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += sum_squares(&list[i]);
    return sum;
}

/* ---- rows of a gradient ---------------------------------------------------------------------- */

/* Zeros of either sign have no bit but the first: what is shifted out. Eight bytes at a time. */
static bool has_bits(const void *from, size_t bytes, uint64_t signs) {
    const char *at = from;
    uint64_t any = 0, last = 0;
    for (; bytes >= sizeof any; bytes -= sizeof any, at += sizeof any) {
        uint64_t word;
        memcpy(&word, at, sizeof word);
        any |= word;
    }
    memcpy(&last, at, bytes);
    return (any | last) & ~signs;
}

static bool is_touched(const gradd_span_t *s, int64_t row, int64_t width) {
    enum { PIECE = 1024 }; /* bytes: most rows that hold anything show it in the first */
    const bool half = gradd_dtype_is_half(s->dtype);
    const uint64_t signs = half ? UINT64_C(0x8000800080008000) : UINT64_C(0x8000000080000000);
    const size_t bytes = (size_t)width * (half ? 2 : 4);
    const char *at = (const char *)s->data + (size_t)row * bytes;
    for (size_t from = 0; from < bytes; from += PIECE)
        if (has_bits(at + from, bytes - from < PIECE ? bytes - from : PIECE, signs)) return true;
    return false;
}

void gradd_touched_rows(const gradd_span_t *s, int64_t width, uint64_t *bits) {
    const int64_t rows = width ? s->n / width : 0;
#pragma omp parallel for schedule(static) if (s->n > 4 * BLOCK)
    for (int64_t word = 0; word < (rows + 63) / 64; word++) {
        uint64_t set = 0;
        for (int64_t r = word * 64; r < rows && r < word * 64 + 64; r++)
            set |= (uint64_t)is_touched(s, r, width) << (r % 64);
        bits[word] = set;
    }
}
