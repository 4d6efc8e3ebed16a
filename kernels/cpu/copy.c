/* Strided copies. See copy.h.
 *
 * After simplification the last two axes form a tile (n1 rows of n0 elements); the other axes, and
 * the tiles of a large last pair, are units that threads take in equal contiguous shares. Indices
 * are divided out once per share, then advanced like an odometer.
 */
#include "kernels/cpu/copy.h"

#include "kernels/cpu/parts.h"

#include <omp.h>
#include <stdbool.h>
#include <string.h>
#ifdef __AVX__
#include <immintrin.h>
#endif

#define TILE_ELEMENTS  16384
#define TURN_N1        128 /* rows of the target, one cache line or more of the source */
#define TURN_N0        64
#define PARALLEL_BYTES (128 * 1024)

enum { KIND_ROWS, KIND_FILL, KIND_TURN, KIND_ANY };

typedef struct tile_s {
    int64_t n1, n0; /* elements */
    int64_t t1, f1; /* bytes between rows */
    int64_t t0, f0; /* bytes between elements */
} tile_t;

/* ---- inner loops ----------------------------------------------------------------------------- */

#define SHORT_ROW 16 /* elements; below, a loop beats the call of memcpy */

#define TILE_LOOPS(T)                                                                              \
    static void tile_any_##T(const tile_t *x, char *to, const char *from) {                        \
        for (int64_t i = 0; i < x->n1; i++) {                                                      \
            char *t = to + i * x->t1;                                                              \
            const char *f = from + i * x->f1;                                                      \
            for (int64_t k = 0; k < x->n0; k++, t += x->t0, f += x->f0)                            \
                *(T *)t = *(const T *)f;                                                           \
        }                                                                                          \
    }                                                                                              \
    static void tile_fill_##T(const tile_t *x, char *to, const char *from) {                       \
        for (int64_t i = 0; i < x->n1; i++) {                                                      \
            T *t = (T *)(to + i * x->t1), value = *(const T *)(from + i * x->f1);                  \
            for (int64_t k = 0; k < x->n0; k++)                                                    \
                t[k] = value;                                                                      \
        }                                                                                          \
    }                                                                                              \
    static void tile_short_##T(const tile_t *x, char *to, const char *from) {                      \
        for (int64_t i = 0; i < x->n1; i++) {                                                      \
            T *t = (T *)(to + i * x->t1);                                                          \
            const T *f = (const T *)(from + i * x->f1);                                            \
            for (int64_t k = 0; k < x->n0; k++)                                                    \
                t[k] = f[k];                                                                       \
        }                                                                                          \
    }

TILE_LOOPS(uint8_t)
TILE_LOOPS(uint16_t)
TILE_LOOPS(uint32_t)
TILE_LOOPS(uint64_t)

static void tile_rows(const tile_t *x, char *to, const char *from) {
    size_t bytes = (size_t)(x->n0 * x->t0);
    for (int64_t i = 0; i < x->n1; i++)
        memcpy(to + i * x->t1, from + i * x->f1, bytes);
}

#ifdef __AVX__
/* 8 x 8 words: source rows are f0 bytes apart, target rows t1. */
static inline void turn_8x8(char *to, int64_t t1, const char *from, int64_t f0) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i++)
        a[i] = _mm256_loadu_ps((const float *)(from + i * f0));
    for (int i = 0; i < 4; i++) {
        b[2 * i] = _mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < 2; k++) {
            a[4 * i + 2 * k] = _mm256_shuffle_ps(b[4 * i + k], b[4 * i + k + 2], 0x44);
            a[4 * i + 2 * k + 1] = _mm256_shuffle_ps(b[4 * i + k], b[4 * i + k + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps((float *)(to + i * t1), _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
        _mm256_storeu_ps((float *)(to + (i + 4) * t1),
                         _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    }
}

/* 16 x 16 words: whole cache lines on both sides. */
static inline void turn_16x16(char *to, int64_t t1, const char *from, int64_t f0) {
    for (int i = 0; i < 16; i += 8)
        for (int k = 0; k < 16; k += 8)
            turn_8x8(to + i * t1 + k * 4, t1, from + i * 4 + k * f0, f0);
}

static void turn_strip(const tile_t *x, int64_t i, int64_t height, char *to, const char *from) {
    int64_t k = 0, m0 = x->n0 & ~(int64_t)7;
    to += i * x->t1, from += i * 4;
    if (height == 16)
        for (; k + 16 <= m0; k += 16)
            turn_16x16(to + k * 4, x->t1, from + k * x->f0, x->f0);
    for (; k < m0; k += 8)
        for (int64_t j = 0; j < height; j += 8)
            turn_8x8(to + j * x->t1 + k * 4, x->t1, from + j * 4 + k * x->f0, x->f0);
}

static void tile_turn_uint32_t(const tile_t *x, char *to, const char *from) {
    int64_t m1 = x->n1 & ~(int64_t)7, m0 = x->n0 & ~(int64_t)7, i = 0;
    for (; i + 16 <= m1; i += 16)
        turn_strip(x, i, 16, to, from);
    if (i < m1) turn_strip(x, i, 8, to, from);
    tile_t right = *x, below = *x;
    right.n1 = m1, right.n0 = x->n0 - m0;
    tile_any_uint32_t(&right, to + m0 * 4, from + m0 * x->f0);
    below.n1 = x->n1 - m1;
    tile_any_uint32_t(&below, to + m1 * x->t1, from + m1 * 4);
}

/* 8 x 8 halves. */
static inline void turn_8x8_halves(char *to, int64_t t1, const char *from, int64_t f0) {
    __m128i a[8], b[8];
    for (int i = 0; i < 8; i++)
        a[i] = _mm_loadu_si128((const __m128i *)(from + i * f0));
    for (int i = 0; i < 4; i++) {
        b[2 * i] = _mm_unpacklo_epi16(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < 2; k++) {
            a[4 * i + 2 * k] = _mm_unpacklo_epi32(b[4 * i + k], b[4 * i + k + 2]);
            a[4 * i + 2 * k + 1] = _mm_unpackhi_epi32(b[4 * i + k], b[4 * i + k + 2]);
        }
    for (int i = 0; i < 4; i++) {
        _mm_storeu_si128((__m128i *)(to + 2 * i * t1), _mm_unpacklo_epi64(a[i], a[i + 4]));
        _mm_storeu_si128((__m128i *)(to + (2 * i + 1) * t1), _mm_unpackhi_epi64(a[i], a[i + 4]));
    }
}

/* Strips of 32 rows of the target, a cache line of the source. */
static void tile_turn_uint16_t(const tile_t *x, char *to, const char *from) {
    const int64_t m1 = x->n1 & ~(int64_t)7, m0 = x->n0 & ~(int64_t)7;
    for (int64_t i = 0; i < m1; i += 32)
        for (int64_t k = 0; k < m0; k += 8)
            for (int64_t j = i; j < m1 && j < i + 32; j += 8)
                turn_8x8_halves(to + j * x->t1 + k * 2, x->t1, from + j * 2 + k * x->f0, x->f0);
    tile_t right = *x, below = *x;
    right.n1 = m1, right.n0 = x->n0 - m0;
    tile_any_uint16_t(&right, to + m0 * 2, from + m0 * x->f0);
    below.n1 = x->n1 - m1;
    tile_any_uint16_t(&below, to + m1 * x->t1, from + m1 * 2);
}
#else
#define tile_turn_uint32_t tile_any_uint32_t
#define tile_turn_uint16_t tile_any_uint16_t
#endif

typedef void (*tile_fn_t)(const tile_t *x, char *to, const char *from);

static tile_fn_t choose_loop(int kind, size_t bytes, int64_t n0) {
    static const tile_fn_t any[] = {tile_any_uint8_t, tile_any_uint16_t, tile_any_uint32_t,
                                    tile_any_uint64_t};
    static const tile_fn_t fill[] = {tile_fill_uint8_t, tile_fill_uint16_t, tile_fill_uint32_t,
                                     tile_fill_uint64_t};
    static const tile_fn_t brief[] = {tile_short_uint8_t, tile_short_uint16_t, tile_short_uint32_t,
                                      tile_short_uint64_t};
    int width = bytes == 8 ? 3 : bytes == 4 ? 2 : bytes == 2 ? 1 : 0;
    if (kind == KIND_ROWS) return n0 < SHORT_ROW ? brief[width] : tile_rows;
    if (kind == KIND_FILL) return fill[width];
    if (kind == KIND_TURN && width == 2) return tile_turn_uint32_t;
    if (kind == KIND_TURN && width == 1) return tile_turn_uint16_t;
    return any[width];
}

/* ---- simplification -------------------------------------------------------------------------- */

bool gradd_copy_simplify(const gradd_copy_t *job, gradd_copy_t *out) {
    int n = 0;
    for (int i = 0; i < job->rank; i++) {
        if (job->dims[i] == 0) return false;
        if (job->dims[i] == 1) continue;
        if (n && out->to[n - 1] == job->to[i] * job->dims[i] &&
            out->from[n - 1] == job->from[i] * job->dims[i]) {
            out->dims[n - 1] *= job->dims[i];
            out->to[n - 1] = job->to[i], out->from[n - 1] = job->from[i];
            continue;
        }
        out->dims[n] = job->dims[i], out->to[n] = job->to[i], out->from[n] = job->from[i];
        n++;
    }
    out->rank = n;
    return true;
}

static void rotate_to_end(gradd_copy_t *c, int axis, int end) {
    int64_t d = c->dims[axis], t = c->to[axis], f = c->from[axis];
    for (int i = axis; i < end; i++)
        c->dims[i] = c->dims[i + 1], c->to[i] = c->to[i + 1], c->from[i] = c->from[i + 1];
    c->dims[end] = d, c->to[end] = t, c->from[end] = f;
}

static int classify(gradd_copy_t *c) {
    int last = c->rank - 1;
    if (last < 0) return KIND_ANY;
    if (c->to[last] != 1) return KIND_ANY;
    if (c->from[last] == 1) return KIND_ROWS;
    if (c->from[last] == 0) return KIND_FILL;
    for (int i = last - 1; i >= 0; i--)
        if (c->from[i] == 1) {
            rotate_to_end(c, i, last - 1);
            return KIND_TURN;
        }
    return KIND_ANY;
}

/* ---- units and threads ----------------------------------------------------------------------- */

/* Axes of the odometer: the outer axes, then tiles along n1, then tiles along n0. */
typedef struct copy_walk_s {
    int rank;
    int64_t dims[GRADD_COPY_RANK + 2], to[GRADD_COPY_RANK + 2], from[GRADD_COPY_RANK + 2];
    int64_t units;
    int64_t n1, n0, b1, b0; /* whole extents and tile extents */
    tile_t tile;
    tile_fn_t loop;
    char *target;
    const char *source;
} copy_walk_t;

static void add_axis(copy_walk_t *w, int64_t dim, int64_t to, int64_t from) {
    w->dims[w->rank] = dim, w->to[w->rank] = to, w->from[w->rank] = from;
    w->rank++;
    w->units *= dim;
}

static void make_walk(const gradd_copy_t *c, int kind, size_t bytes, copy_walk_t *w) {
    int64_t size = (int64_t)bytes;
    int last = c->rank - 1;
    w->rank = 0, w->units = 1;
    for (int i = 0; i < last - 1; i++)
        add_axis(w, c->dims[i], c->to[i] * size, c->from[i] * size);
    bool two = last >= 1;
    w->n0 = last >= 0 ? c->dims[last] : 1;
    w->n1 = two ? c->dims[last - 1] : 1;
    w->tile.t0 = last >= 0 ? c->to[last] * size : 0;
    w->tile.f0 = last >= 0 ? c->from[last] * size : 0;
    w->tile.t1 = two ? c->to[last - 1] * size : 0;
    w->tile.f1 = two ? c->from[last - 1] * size : 0;
    int64_t most0 = kind == KIND_TURN ? TURN_N0 : TILE_ELEMENTS;
    w->b0 = w->n0 < most0 ? w->n0 : most0;
    int64_t most1 = kind == KIND_TURN ? TURN_N1 : TILE_ELEMENTS / w->b0;
    w->b1 = w->n1 < most1 ? w->n1 : most1;
    add_axis(w, (w->n1 + w->b1 - 1) / w->b1, w->b1 * w->tile.t1, w->b1 * w->tile.f1);
    add_axis(w, (w->n0 + w->b0 - 1) / w->b0, w->b0 * w->tile.t0, w->b0 * w->tile.f0);
    w->loop = choose_loop(kind, bytes, w->n0);
}

static void walk_range(const copy_walk_t *w, int64_t first, int64_t end) {
    int64_t at[GRADD_COPY_RANK + 2], rest = first;
    char *to = w->target;
    const char *from = w->source;
    for (int i = w->rank - 1; i >= 0; i--) {
        at[i] = rest % w->dims[i], rest /= w->dims[i];
        to += at[i] * w->to[i], from += at[i] * w->from[i];
    }
    for (int64_t u = first; u < end; u++) {
        tile_t tile = w->tile;
        int64_t left1 = w->n1 - at[w->rank - 2] * w->b1, left0 = w->n0 - at[w->rank - 1] * w->b0;
        tile.n1 = left1 < w->b1 ? left1 : w->b1;
        tile.n0 = left0 < w->b0 ? left0 : w->b0;
        w->loop(&tile, to, from);
        for (int i = w->rank - 1; i >= 0; i--) {
            to += w->to[i], from += w->from[i];
            if (++at[i] < w->dims[i]) break;
            to -= w->dims[i] * w->to[i], from -= w->dims[i] * w->from[i];
            at[i] = 0;
        }
    }
}

static void share(int64_t total, int64_t *out_first, int64_t *out_end) {
    int64_t n = omp_get_num_threads(), me = omp_get_thread_num();
    *out_first = total * me / n;
    *out_end = total * (me + 1) / n;
}

void gradd_copy_strided(const gradd_copy_t *job, size_t bytes, void *to, const void *from) {
    gradd_copy_t c;
    if (!gradd_copy_simplify(job, &c)) return;
    int kind = classify(&c);
    copy_walk_t w;
    make_walk(&c, kind, bytes, &w);
    w.target = to, w.source = from;
    int64_t moved = w.units * w.b1 * w.b0 * (int64_t)bytes;
    if (moved < PARALLEL_BYTES || w.units < 2) {
        walk_range(&w, 0, w.units);
        return;
    }
#pragma omp parallel
    {
        int64_t first, end;
        share(w.units, &first, &end);
        if (first < end) walk_range(&w, first, end);
    }
}

void gradd_copy_plain(const gradd_copy_t *job, size_t bytes, void *to, const void *from) {
    int64_t at[GRADD_COPY_RANK] = {0}, total = 1;
    for (int i = 0; i < job->rank; i++)
        total *= job->dims[i];
    for (int64_t e = 0; e < total; e++) {
        int64_t t = 0, f = 0;
        for (int i = 0; i < job->rank; i++)
            t += at[i] * job->to[i], f += at[i] * job->from[i];
        memcpy((char *)to + t * (int64_t)bytes, (const char *)from + f * (int64_t)bytes, bytes);
        for (int i = job->rank - 1; i >= 0; i--) {
            if (++at[i] < job->dims[i]) break;
            at[i] = 0;
        }
    }
}

void gradd_copy_bytes(void *to, const void *from, size_t bytes) {
    if (!bytes || to == from) return;
#pragma omp parallel if (bytes >= PARALLEL_BYTES)
    {
        int64_t first, end;
        share((int64_t)((bytes + 63) / 64), &first, &end);
        size_t a = (size_t)first * 64, b = (size_t)end * 64 < bytes ? (size_t)end * 64 : bytes;
        if (a < b) memcpy((char *)to + a, (const char *)from + a, b - a);
    }
}

void gradd_copy_zero(void *to, size_t bytes) {
    if (!bytes) return;
#pragma omp parallel if (bytes >= PARALLEL_BYTES)
    {
        int64_t first, end;
        share((int64_t)((bytes + 63) / 64), &first, &end);
        size_t a = (size_t)first * 64, b = (size_t)end * 64 < bytes ? (size_t)end * 64 : bytes;
        if (a < b) memset((char *)to + a, 0, b - a);
    }
}

/* What the launch's part has of the longest axis; false: nothing. */
static bool take_part(const gradd_launch_t *r, gradd_move_t *inout) {
    gradd_copy_t *box = &inout->box;
    int axis = 0;
    for (int d = 1; d < box->rank; d++)
        if (box->dims[d] > box->dims[axis]) axis = d;
    if (!box->rank) return true;
    const gradd_range_t some = gradd_part_of(r, box->dims[axis]);
    box->dims[axis] = some.to - some.from;
    inout->to += some.from * box->to[axis];
    inout->from += some.from * box->from[axis];
    return some.to > some.from;
}

void gradd_copy_move(const gradd_move_t *move, const gradd_launch_t *r, gradd_copy_fn_t copy) {
    const size_t bytes = gradd_dtype_bytes(r->out[0].type.dtype);
    if (!gradd_type_count(&r->in[0].type) || !gradd_type_count(&r->out[0].type)) return;
    gradd_move_t some = *move;
    if (r->parts > 1 && !take_part(r, &some)) return;
    copy(&some.box, bytes, (char *)r->out[0].data + some.to * (int64_t)bytes,
         (const char *)r->in[0].data + some.from * (int64_t)bytes);
}

int gradd_copy_parts(const gradd_infer_t *c) {
    return c->parts;
}
