/* Attention on a GPU: the common part of its kernels. See kernels/ops/attention/attention.c for the
 * definition.
 *
 * A block of threads walks over tiles of queries and keys, with 16 x 16 threads and R x R pairs of
 * each tile in a thread's registers: queries are neighbours, keys 16 apart, so that one counter of
 * the random numbers serves four of them. Nothing as large as all scores is ever in memory. As on
 * the CPU (kernels/cpu/attention/attention_bits.h), a query is dead, rare, or neither.
 */
#ifndef GRADD_KERNELS_CUDA_ATTENTION_ATTENTION_GPU_H
#define GRADD_KERNELS_CUDA_ATTENTION_ATTENTION_GPU_H

#include "kernels/cuda/gpu.h"
#include "kernels/describe/attention_call.h"
#include "kernels/math/rng.h"
#include "kernels/math/vec.h"

/* A live row among all. */
typedef struct attn_place_s {
    int32_t sequence, position;
} attn_position_t;

/* The argument of kernels: a call, and the place of its scratch memory. */
typedef struct attn_call_s {
    gradd_attn_t p;                         /* without lists of rows */
    const attn_position_t *q_rows, *k_rows; /* live ones; NULL = all rows */
    const void *limits; /* per row of the bias: what rare queries are not above; NULL = `limit` */
    double limit;
    void *delta;                /* sums of dy y, [B, H, Q] */
    void *mma_room;             /* attn_mma_room bytes, of a backward by tensor cores */
    int64_t bias_count;         /* elements of the bias */
    int heads, kv_heads, group; /* query heads per head of keys */
} attn_call_t;

/* Bytes of the scratch behind a call. */
size_t attn_workspace(const gradd_infer_t *c, const gradd_attn_places_t *at);
/* Fills the scratch of a call of either operator, and says where it is. */
gradd_status_t attn_prepare(const gradd_launch_t *r, const gradd_attn_places_t *at,
                            attn_call_t *out);

/* The kernels for all types and sizes. */
gradd_status_t attn_forward(const attn_call_t *a);
gradd_status_t attn_backward(const attn_call_t *a);
/* Parts of the latter: sums of dy y, which all others read; the bias's gradient. */
gradd_status_t attn_backward_delta(const attn_call_t *a);
gradd_status_t attn_backward_bias(const attn_call_t *a);
gradd_status_t attn_backward_live_bias(const attn_call_t *a); /* of live rows */

/* The kernels for bf16 and f16 that tensor cores multiply: which calls they take, by types and
 * sizes, and the calls themselves, which leave operands that are not aligned to the others. */
bool attn_mma_takes(const gradd_attn_t *p);
gradd_status_t attn_mma_forward(const attn_call_t *a);
gradd_status_t attn_mma_backward(const attn_call_t *a);
/* Bytes of scratch that the latter takes, beyond the sums. */
size_t attn_mma_room(const gradd_attn_t *p);

/* Where it may keep gradients of scores: bytes, and blocks of 128 keys that it must have at once
 * if they do not suffice for all heads; two for each multiprocessor of a large GPU, because a mask
 * of the past leaves twice the mean to the first keys. Tests change it. */
typedef struct attn_scores_limit_s {
    int64_t bytes, blocks;
} attn_scores_limit_t;
extern "C" attn_scores_limit_t attn_scores_limit;

/* Whether a launch may have so many blocks. */
static inline gradd_status_t attn_grid(int64_t blocks) {
    if (blocks <= INT32_MAX) return GRADD_OK;
    return GRADD_FAIL(LIMIT, "attention of %lld blocks of threads", (long long)blocks);
}

/* ---- arithmetic ------------------------------------------------------------------------------ */

GRADD_HD float attn_exp(float x) {
    return x < -87.0f ? 0.0f : gradd_vexpf(x);
}
GRADD_HD double attn_exp(double x) {
    return exp(x);
}
GRADD_HD float attn_tanh(float x) {
    return gradd_vtanhf(x);
}
GRADD_HD double attn_tanh(double x) {
    return tanh(x);
}
GRADD_HD float attn_fma(float a, float b, float c) {
    return fmaf(a, b, c);
}
GRADD_HD double attn_fma(double a, double b, double c) {
    return fma(a, b, c);
}

/* ---- queries --------------------------------------------------------------------------------- */

enum attn_kind_t {
    ATTN_SOLID, /* sees its range */
    ATTN_HOLES, /* sees what the mask says of its range */
    ATTN_DEAD,  /* sees nothing: all scores are the same, or it gives zero */
    ATTN_RARE,  /* sees all keys, those that the mask hides with the fill */
};

typedef struct attn_row_s {
    int32_t lo, hi, kind, sequence;
    int64_t mask, bias; /* where its rows begin */
    uint64_t drop;      /* the number of its first pair */
} attn_row_t;

GPU_FN void attn_row_rare(const gradd_attn_t &p, attn_row_t *row) {
    row->kind = ATTN_RARE;
    row->lo = 0;
    row->hi = (int32_t)p.n_k;
}

GPU_FN void attn_row_range(const gradd_attn_t &p, const int32_t *range, attn_row_t *row) {
    /* a range comes from our own kernel, but a wrong one must not lead outside of the tensors */
    row->lo = range[0] < 0 ? 0 : range[0];
    row->hi = range[1] > p.n_k ? (int32_t)p.n_k : range[1];
    if (!p.mask.data) return;
    if (range[2] == GRADD_ATTN_HOLES) row->kind = ATTN_HOLES;
    if (range[2] != GRADD_ATTN_NONE) return;
    const bool uneven = p.bias.data && !(p.hides & GRADD_ATTN_HIDES_BIAS);
    const bool capped = p.softcap != 0 && !(p.hides & GRADD_ATTN_HIDES_SCORE);
    attn_row_rare(p, row);
    if (p.zero || !(uneven || capped || p.sunk || isinf(p.fill))) row->kind = ATTN_DEAD;
    if (p.zero) row->hi = 0;
}

/* Query i; one behind the last sees nothing. */
GPU_FN attn_row_t attn_row(const attn_call_t &a, int64_t b, int64_t h, int64_t i) {
    const gradd_attn_t &p = a.p;
    attn_row_t row = {0, 0, ATTN_DEAD, 0, 0, 0, 0};
    if (i >= p.n_q) return row;
    row.kind = ATTN_SOLID;
    int64_t position = i, n_q = p.n_q, n_k = p.n_k;
    row.hi = (int32_t)p.n_k;
    row.sequence = (int32_t)b;
    if (p.range.data)
        attn_row_range(p,
                       (const int32_t *)p.range.data + b * p.range.batch + h * p.range.head +
                           i * p.range.row,
                       &row);
    row.mask = b * p.mask.batch + h * p.mask.head + i * p.mask.row;
    if (a.q_rows) {
        row.sequence = a.q_rows[i].sequence;
        position = a.q_rows[i].position;
        n_q = p.rows.positions;
        n_k = p.rows.key_positions;
    }
    row.bias = row.sequence * p.bias.batch + h * p.bias.head + position * p.bias.row;
    row.drop = (uint64_t)(((row.sequence * p.heads + h) * n_q + position) * n_k);
    return row;
}

/* Whether a query with that largest score is rare, and was not known to be. */
template <class A>
GPU_FN bool attn_row_turns_rare(const attn_call_t &a, const attn_row_t &row, A most) {
    if (!a.p.mask.data || row.kind == ATTN_DEAD || row.kind == ATTN_RARE) return false;
    const A limit =
        a.limits ? ((const A *)a.limits)[a.p.bias.col ? row.bias / a.p.n_k : row.bias] : (A)a.limit;
    return !(most > limit);
}

/* The keys that any of n queries looks at, from the beginning of a tile of TILE on. */
GPU_FN const attn_row_t &attn_row_in(const attn_row_t &row) {
    return row;
}
template <int TILE, class Q>
GPU_FN void attn_interval(const Q *query, int n, int *out_from, int *out_to) {
    int from = INT32_MAX, to = 0;
    for (int i = 0; i < n; i++) {
        const attn_row_t &row = attn_row_in(query[i]);
        if (row.lo >= row.hi) continue;
        from = row.lo < from ? row.lo : from;
        to = row.hi > to ? row.hi : to;
    }
    *out_from = to ? from / TILE * TILE : 0;
    *out_to = to;
}

/* Whether the mask leaves the pair; of keys within the tensor. */
GPU_FN bool attn_shown(const gradd_attn_t &p, const attn_row_t &row, int64_t key) {
    if (row.kind < ATTN_DEAD) return true;
    return row.kind == ATTN_RARE && ((const uint8_t *)p.mask.data)[row.mask + key];
}

/* A key as rows see it. */
typedef struct attn_key_s {
    int32_t at, sequence, position;
} attn_key_t;

GPU_FN attn_key_t attn_key(const attn_call_t &a, int64_t key) {
    if (!a.k_rows || key >= a.p.n_k) return {(int32_t)key, -1, (int32_t)key};
    return {(int32_t)key, a.k_rows[key].sequence, a.k_rows[key].position};
}

/* Whether a bias belongs to the pair: live rows of different sequences have none. */
GPU_FN bool attn_is_biased(const attn_row_t &row, const attn_key_t &key) {
    return key.sequence < 0 || key.sequence == row.sequence;
}

/* The score of a pair whose product, scaled and capped, is x. -inf: the query does not see it.
 * EASY, here and below: the call has no bias, no cap and no dropout. */
template <bool EASY = false, class A>
GPU_FN A attn_score(const gradd_attn_t &p, const attn_row_t &row, const attn_key_t &key, A x) {
    const bool hides_bias = p.hides & GRADD_ATTN_HIDES_BIAS;
    if (key.at < row.lo || key.at >= row.hi) return -(A)INFINITY;
    if (row.kind == ATTN_DEAD) return 0;
    if (row.kind != ATTN_SOLID && !((const uint8_t *)p.mask.data)[row.mask + key.at]) {
        if (row.kind == ATTN_HOLES) return -(A)INFINITY;
        x = (A)p.fill;
        if (hides_bias) return x;
    }
    if (!EASY && p.bias.data && attn_is_biased(row, key))
        x += ((const A *)p.bias.data)[row.bias + key.position * p.bias.col];
    return x;
}

/* The product, scaled and capped. */
template <bool EASY = false, class A> GPU_FN A attn_capped(const gradd_attn_t &p, A x) {
    x *= (A)p.scale;
    return !EASY && p.softcap != 0 ? (A)p.softcap * attn_tanh(x * (1 / (A)p.softcap)) : x;
}

/* Random words; neighbours of one counter cost one call of the cipher. */
typedef struct attn_words_s {
    uint64_t counter;
    uint32_t word[4];
} attn_words_t;

GPU_FN attn_words_t attn_words() {
    return {
        ~(uint64_t)0, {0, 0, 0, 0}
    };
}

GPU_FN bool attn_kept(const gradd_attn_drop_t &d, uint64_t element, attn_words_t *words) {
    const uint64_t counter = element / 64 * 16 + element % 16;
    if (!d.active) return true;
    if (d.limit > UINT32_MAX) return false;
    if (counter != words->counter) {
        const uint32_t at[4] = {(uint32_t)counter, (uint32_t)(counter >> 32), (uint32_t)d.node,
                                (uint32_t)(d.node >> 32)};
        gradd_philox(d.seed, at, words->word);
        words->counter = counter;
    }
    const int k = (int)(element / 16 % 4);
    const uint32_t word = k < 2    ? (k ? words->word[1] : words->word[0])
                          : k == 2 ? words->word[2]
                                   : words->word[3];
    return word >= (uint32_t)d.limit;
}

/* The parts of the gradient z of a score that reach the bias and the product. */
template <class A> struct attn_dscore_t {
    A bias, product;
};
template <bool EASY = false, class A>
GPU_FN attn_dscore_t<A> attn_dscore(const gradd_attn_t &p, const attn_row_t &row,
                                    const attn_key_t &key, A capped, A z) {
    if (key.at < row.lo || key.at >= row.hi) return {0, 0};
    const bool shown = attn_shown(p, row, key.at), floor = p.hides & GRADD_ATTN_FLOOR;
    if (!shown && floor) {
        const A *bias = EASY ? NULL : (const A *)p.bias.data;
        z *= bias && bias[row.bias + key.position * p.bias.col] < (A)p.fill ? (A)0 : (A)0.5;
    }
    const bool passes = shown || floor;
    const A of_bias = passes || !(p.hides & GRADD_ATTN_HIDES_BIAS) ? z : 0;
    if (!passes && p.hides & GRADD_ATTN_HIDES_SCORE) z = 0;
    if (!EASY && p.softcap != 0) {
        const A x = capped * (1 / (A)p.softcap);
        z *= 1 - x * x;
    }
    return {of_bias, z * (A)p.scale};
}

/* ---- products of tiles ----------------------------------------------------------------------- */

constexpr int ATTN_THREADS = 256, ATTN_SIDE = 16;

/* Tiles of pairs for arithmetic in A: R x R per thread. */
template <class A> constexpr int attn_r = sizeof(A) == 8 ? 2 : 4;
template <class A> constexpr int attn_tile = ATTN_SIDE * attn_r<A>;
template <class A> constexpr int attn_ld = attn_tile<A> + attn_r<A>; /* packs stay aligned */
constexpr int ATTN_CHUNK = 32;                                       /* of sums along rows */

GPU_FN int attn_ty() {
    return (int)threadIdx.x / ATTN_SIDE;
}
GPU_FN int attn_tx() {
    return (int)threadIdx.x % ATTN_SIDE;
}

/* Rows of a tensor from `first` on. */
template <class T> struct attn_rows {
    const T *at;
    int64_t stride;
    int n;
};

template <class T>
GPU_FN attn_rows<T> attn_rows_of(const gradd_attn_side_t &s, int64_t b, int64_t h, int64_t first,
                                 int64_t n) {
    const int64_t left = n - first;
    return {(const T *)s.data + b * s.batch + h * s.head + first * s.row, s.row,
            (int)(left < 1 << 20 ? left : 1 << 20)};
}

/* Where key j of a tile is in a turned chunk: a thread's keys are 16 apart, and neighbours there.
 */
template <class A> GPU_FN int attn_key_at(int j) {
    return j % ATTN_SIDE * attn_r<A> + j / ATTN_SIDE;
}

/* Elements [first, first + 32) of a tile of rows, turned: to[element][row]; zeros beyond. A warp
 * takes 8 elements of 4 rows, which are next to each other in the chunk: no two lanes meet in a
 * bank. */
template <bool KEYS, class T, class A>
GPU_FN void attn_load_turned(A *to, const attn_rows<T> &rows, int first, int cols) {
    constexpr int apart = KEYS ? attn_tile<A> / 4 : 1, warps = ATTN_THREADS / GPU_WARP;
    const int warp = threadIdx.x / GPU_WARP, col = threadIdx.x % 8;
    const int row = warp * (KEYS ? 1 : 4) + threadIdx.x / 8 % 4 * apart;
#pragma unroll 1 /* more at once would not stay in registers */
    for (int k = 0; k < attn_tile<A> / (4 * warps); k++) {
        const int at = row + k * warps * (KEYS ? 1 : 4);
        const T *from = rows.at + at * rows.stride + first + col;
        A *place = to + col * attn_ld<A> + (KEYS ? attn_key_at<A>(at) : at);
#pragma unroll
        for (int i = 0; i < ATTN_CHUNK; i += 8)
            place[i * attn_ld<A>] = at < rows.n && first + col + i < cols ? gpu_get(from[i]) : (A)0;
    }
}

/* 32 rows from `row` on, and of each 16 N elements from `first` on, as they lie. */
template <int N, class T, class A>
GPU_FN void attn_load_rows(A *to, const attn_rows<T> &rows, int row, int64_t first, int64_t cols) {
    constexpr int width = ATTN_SIDE * N;
    const int k = threadIdx.x / width, col = threadIdx.x % width;
    const T *from = rows.at + (row + k) * rows.stride + first + col;
    const int n = first + col < cols ? rows.n - row - k : 0;
    constexpr int step = ATTN_THREADS / width;
    to += threadIdx.x;
#pragma unroll 4
    for (int i = 0; i < ATTN_CHUNK; i += step, from += step * rows.stride)
        to[i * width] = i < n ? gpu_get(*from) : (A)0;
}

/* Column c of a thread: as many neighbours as 16 bytes hold. */
template <class A> GPU_FN int attn_column(int c) {
    constexpr int width = gpu_width<A>;
    return (c / width * ATTN_SIDE + attn_tx()) * width + c % width;
}

/* sum[r][c] += a[k][R ty + r] b[k][column c] over 32 k. */
template <int N, int LDB, class A>
GPU_FN void attn_multiply(A (&sum)[attn_r<A>][N], const A *a, const A *b) {
    constexpr int R = attn_r<A>, width = gpu_width<A>;
    const A *row = a + attn_ty() * R, *col = b + attn_tx() * width;
#pragma unroll 4
    for (int k = 0; k < ATTN_CHUNK; k++) {
        const gpu_pack<A, R> x = *(const gpu_pack<A, R> *)(row + k * attn_ld<A>);
#pragma unroll
        for (int c = 0; c < N; c += width) {
            const gpu_pack<A, width> y =
                *(const gpu_pack<A, width> *)(col + k * LDB + c * ATTN_SIDE);
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int i = 0; i < width; i++)
                    sum[r][c + i] = attn_fma(x.v[r], y.v[i], sum[r][c + i]);
        }
    }
}

/* sum[query][key] of products along rows: x are queries, y keys, 16 apart. */
template <class T, class A>
GPU_FN void attn_products(A (&sum)[attn_r<A>][attn_r<A>], const attn_rows<T> &x,
                          const attn_rows<T> &y, int cols, A *room_x, A *room_y) {
    for (int r = 0; r < attn_r<A>; r++)
        for (int c = 0; c < attn_r<A>; c++)
            sum[r][c] = 0;
    for (int at = 0; at < cols; at += ATTN_CHUNK) {
        __syncthreads(); /* the previous products are done */
        attn_load_turned<false>(room_x, x, at, cols);
        attn_load_turned<true>(room_y, y, at, cols);
        __syncthreads();
        attn_multiply<attn_r<A>, attn_ld<A>>(sum, room_x, room_y);
    }
}

/* sum[r][c] += sums over the tile's keys (or queries) of a[k][row] rows[k][first + column]. */
template <int N, class T, class A>
GPU_FN void attn_add_product(A (&sum)[attn_r<A>][N], const A *a, const attn_rows<T> &rows,
                             int64_t first, int64_t cols, A *room) {
    for (int k = 0; k < attn_tile<A>; k += ATTN_CHUNK) {
        __syncthreads();
        attn_load_rows<N>(room, rows, k, first, cols);
        __syncthreads();
        attn_multiply<N, ATTN_SIDE * N>(sum, a + k * attn_ld<A>, room);
    }
}

/* Room for a chunk of either side. */
template <class A, int N>
constexpr int attn_room = ATTN_CHUNK * (attn_ld<A> > ATTN_SIDE * N ? attn_ld<A> : ATTN_SIDE * N);

#endif
