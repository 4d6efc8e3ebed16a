/* Long sums in pieces: C = A[:, 0..P) B[0..P, :], then C += the next piece of k.
 *
 * Where B lies row by row, oneDNN 3.2 copies a strip of columns of it for each block, all of k
 * long: such a copy touches a page per row of B, and beyond some thousand rows the processor's
 * table of pages does not hold them. Products with the gradient of logits, or of a wide layer, are
 * 10 to 40 % faster in pieces. Where columns of B are contiguous, or A is transposed, nothing is
 * won. bf16 results are summed in f32 scratch and rounded once. */
#include "kernels/cpu/gemm/gemm_impl.h"

#include <limits.h>
#include <stdlib.h>

#include "kernels/cpu/bf16.h"

enum { PIECE = 2048, LEAST_K = 3072, LEAST_M = 16, LEAST_N = 256 };

/* f32 goes to the library's plain product, which packs so many rows of B and columns of A at a time
 * and passes over C for each: steps of as many are what it does anyway. (A primitive that adds to C
 * reads all of it once more.) */
enum { BLOCK = 384, PIECE_BLOCKS = 5 };

enum { FIRST, MIDDLE, LAST, PRIMITIVES };

struct gradd_split_s {
    gradd_primitive_t *of[PRIMITIVES]; /* Owned; MIDDLE may be missing */
    size_t workspace;                  /* of one of them, a multiple of 64 */
    bool narrows;
    bool is_plain; /* without primitives */
};

bool gradd_split_fits(const gradd_gemm_t *g) {
    const bool rounds_twice = gradd_gemm_result(g) == GRADD_DT_BF16 && g->accumulate;
    if (g->parts > 1 && gradd_sgemm_fits(g)) return g->k > BLOCK;
    return !g->batch_rank && g->k >= LEAST_K && !rounds_twice;
}

bool gradd_split_pays(const gradd_gemm_t *g) {
    return gradd_split_fits(g) && g->a_k == 1 && g->b_n == 1 && g->m >= LEAST_M && g->n >= LEAST_N;
}

int gradd_split_pieces(const gradd_gemm_t *g) {
    const int64_t each = gradd_sgemm_fits(g) ? BLOCK : PIECE, pieces = (g->k + each - 1) / each;
    return pieces < INT_MAX ? (int)pieces : INT_MAX;
}

void gradd_split_destroy(gradd_split_t *s) {
    if (!s) return;
    for (int i = 0; i < PRIMITIVES; i++)
        gradd_primitive_destroy(s->of[i]);
    free(s);
}

static int64_t rest_of(const gradd_gemm_t *g) {
    return (g->k - 1) % PIECE + 1;
}

static gradd_status_t make(const gradd_gemm_t *g, gradd_split_t *s, bool *out_whole) {
    gradd_gemm_t piece = *g;
    piece.result = GRADD_DT_F32;
    *out_whole = true;
    for (int i = FIRST; i < PRIMITIVES; i++) {
        if (i == MIDDLE && g->k <= 2 * PIECE) continue;
        piece.k = i == LAST ? rest_of(g) : PIECE;
        if (i > FIRST) piece.accumulate = true, piece.has_bias = false;
        GRADD_TRY(gradd_primitive_create(&piece, &s->of[i]));
        if (!s->of[i]) *out_whole = false;
        if (!s->of[i]) return GRADD_OK;
        const size_t bytes = (gradd_primitive_workspace(s->of[i]) + 63) / 64 * 64;
        if (bytes > s->workspace) s->workspace = bytes;
    }
    return GRADD_OK;
}

gradd_status_t gradd_split_create(const gradd_gemm_t *g, gradd_split_t **out) {
    bool whole = false;
    gradd_split_t *s = calloc(1, sizeof *s);
    if (!s) return GRADD_FAIL(NOMEM, "matrix product");
    s->narrows = gradd_gemm_result(g) == GRADD_DT_BF16;
    s->is_plain = gradd_sgemm_fits(g);
    gradd_status_t status = s->is_plain ? GRADD_OK : make(g, s, &whole);
    whole = whole || s->is_plain;
    if (status || !whole) gradd_split_destroy(s);
    if (!status) *out = whole ? s : NULL;
    return status;
}

size_t gradd_split_workspace(const gradd_split_t *s, const gradd_gemm_t *g) {
    return s->workspace + (s->narrows ? sizeof(float) * (size_t)(g->m * g->n) : 0);
}

size_t gradd_split_bytes(const gradd_split_t *s) {
    if (s->is_plain) return sizeof *s;
    return sizeof *s + (s->of[MIDDLE] ? 3 : 2) * GRADD_PRIMITIVE_BYTES;
}

static void begin_with_bias(const gradd_gemm_t *g, const gradd_gemm_operands_t *o) {
    const int64_t step = g->c_m ? g->c_m : g->n;
    const float *bias = o->bias;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < g->m; i++) {
        float *c = (float *)o->c + i * step;
        for (int64_t j = 0; j < g->n; j++)
            c[j] = g->accumulate ? c[j] + bias[j] : bias[j];
    }
}

/* Blocks [from, to) of k. */
static gradd_status_t compute_plain(const gradd_gemm_t *g, const gradd_gemm_operands_t *o,
                                    int64_t from, int64_t to) {
    if (!from && g->has_bias) begin_with_bias(g, o);
    while (from < to) {
        const int64_t next = from + PIECE_BLOCKS < to ? from + PIECE_BLOCKS : to;
        const gradd_k_range_t range = {from * BLOCK, next * BLOCK < g->k ? next * BLOCK : g->k};
        GRADD_TRY(gradd_sgemm(g, o, range, from || g->accumulate || g->has_bias));
        from = next;
    }
    return GRADD_OK;
}

gradd_status_t gradd_split_compute(const gradd_split_t *s, const gradd_gemm_t *g,
                                   const gradd_gemm_operands_t *o, int step, int steps) {
    const size_t size = gradd_dtype_bytes(g->dtype);
    const int64_t pieces = gradd_split_pieces(g), last = pieces * (step + 1) / steps;
    if (s->is_plain) return compute_plain(g, o, pieces * step / steps, last);
    float *sum = s->narrows ? (float *)((char *)o->workspace + s->workspace) : o->c;
    for (int64_t i = pieces * step / steps; i < last; i++) {
        const int which = !i ? FIRST : i + 1 == pieces ? LAST : MIDDLE;
        const size_t at = size * (size_t)(i * PIECE);
        GRADD_TRY(gradd_primitive_compute(s->of[which], (const char *)o->a + at * (size_t)g->a_k,
                                          (const char *)o->b + at * (size_t)g->b_k,
                                          i ? NULL : o->bias, sum, o->workspace));
    }
    if (!s->narrows || last < pieces) return GRADD_OK;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < g->m; i++)
        gradd_bf16_narrow((gradd_bf16_t *)o->c + i * g->n, sum + i * g->n, g->n);
    return GRADD_OK;
}
