/* Gradients of attention by tensor cores. See attention_mma.h and attention_grad.cu.
 *
 * dk and dv: one block per 64 keys, 16 per warp, so scores are computed the other way round, keys
 * by queries: rounded, they are the left side of the sums over queries. dq: one block per 64
 * queries, 16 per warp. The sums of dy y and the bias's gradient are those of the kernels for all
 * types. */
#include "kernels/cuda/attention/attention_mma.h"
#include "kernels/cuda/attention/attention_pair.h"

/* A pair that has nothing but its product, which counts within the query's range. */
template <bool EASY, attn_pairs_t PAIRS>
GPU_FN void plain_pair(const gradd_attn_t &p, const attn_query_t<float> &q, const attn_key_t &key,
                       attn_words_t *words, float *x, float *z) {
    const gradd_attn_drop_t &drop = p.drop;
    const float scale = (float)p.scale;
    float prob = attn_fast_exp((*x * scale - q.most) - q.log);
    if (PAIRS == ATTN_RANGE && (key.at < q.row.lo || key.at >= q.row.hi)) prob = 0;
    if (EASY || !drop.active) {
        *x = prob;
        *z = prob * (*z - q.delta) * scale;
        return;
    }
    const bool kept = attn_kept(drop, q.row.drop + (uint64_t)key.position, words);
    const float factor = kept ? (float)drop.scale : 0;
    *x = prob * factor;
    *z = prob * ((kept ? *z * factor : 0) - q.delta) * scale;
}

template <bool EASY, attn_pairs_t PAIRS>
GPU_FN void pair(const attn_call_t &a, const attn_query_t<float> &q, const attn_key_t &key,
                 attn_words_t *words, float *x, float *z) {
    if (PAIRS == ATTN_ANY)
        attn_pair<false, EASY>(a, q, key, words, x, z);
    else
        plain_pair<EASY, PAIRS>(a.p, q, key, words, x, z);
}

/* ---- keys ------------------------------------------------------------------------------------ */

/* Probabilities and gradients of scores, keys by queries, from products. */
template <bool EASY, attn_pairs_t PAIRS, int N>
GPU_FN void pairs_by_key(const attn_call_t &a, const attn_query_t<float> *query, int first,
                         float (&x)[N][4], float (&z)[N][4]) {
    const int mine = first + attn_warp() * 16 + attn_g();
    const attn_key_t key[2] = {attn_key(a, mine), attn_key(a, mine + 8)};
#pragma unroll
    for (int n = 0; n < N; n++) {
        if (n % 2 == 0) __syncwarp(); /* no loads of all queries at once: registers are few */
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const attn_query_t<float> &q = query[n * 8 + attn_t() + e];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                attn_words_t words = attn_words();
                pair<EASY, PAIRS>(a, q, key[r], &words, &x[n][2 * r + e], &z[n][2 * r + e]);
            }
        }
    }
}

/* The steps of a block of keys: tiles of the queries of all heads that share them. */
template <int QUERIES> struct walk_t {
    int b, first_head, tiles, end; /* end: of steps */

    __device__ __forceinline__ walk_t(const attn_call_t &a, int b_, int kv)
        : b(b_), first_head(kv * a.group), tiles((int)((a.p.n_q + QUERIES - 1) / QUERIES)),
          end(tiles * a.group) {
    }
    __device__ __forceinline__ int head(int step) const {
        return first_head + step / tiles;
    }
    __device__ __forceinline__ int64_t at(int step) const {
        return step % tiles * (int64_t)QUERIES;
    }
};

/* The first step from `step` on of which a query sees any of the keys, and its queries. */
template <int QUERIES>
GPU_FN int seek(const attn_call_t &a, const walk_t<QUERIES> &walk, int step, int first, int keys,
                attn_query_t<float> *query) {
    for (; step < walk.end; step++) {
        if (threadIdx.x < QUERIES)
            query[threadIdx.x] =
                attn_query<float>(a, walk.b, walk.head(step), walk.at(step) + threadIdx.x);
        __syncthreads();
        bool sees = false;
        for (int i = attn_lane(); i < QUERIES; i += GPU_WARP)
            sees |= query[i].row.lo < first + keys && query[i].row.hi > first;
        if (__any_sync(GPU_ALL, sees)) break;
        __syncthreads(); /* all have seen it */
    }
    return step;
}

enum { KEYS = 64, THREADS = 128 };

/* Bytes of a block's tiles: one of keys and of values, two of queries and of dy. */
template <int D, int QUERIES>
constexpr int room_dkv = 2 * (KEYS + 2 * QUERIES) * attn_mma_ld<D> * (int)sizeof(uint16_t);

template <class T, int D, int QUERIES, bool EASY>
__global__ void GPU_BLOCK(THREADS) attention_mma_dkv(attn_call_t a, int heads) {
    constexpr int LD = attn_mma_ld<D>, N = QUERIES / 8;
    typedef attn_query_t<float> query_t;
    GPU_SHARED(query_t, queries, 2 * QUERIES);
    GPU_MORE(T, k_tile);
    T *const v_tile = k_tile + KEYS * LD, *const q_tiles = v_tile + KEYS * LD;
    T *const dy_tiles = q_tiles + 2 * QUERIES * LD;
    const gradd_attn_t &p = a.p;
    /* a mask of the past leaves most to the first keys: they begin */
    const int first = (int)blockIdx.x / heads * KEYS, head = (int)blockIdx.x % heads;
    const int b = head / a.kv_heads, kv = head % a.kv_heads, d = (int)p.d, d_v = (int)p.d_v;
    const walk_t<QUERIES> walk(a, b, kv);
    float dk[D / 8][4], dv[D / 8][4], x[N][4], z[N][4];
    attn_clear(dk);
    attn_clear(dv);
    attn_copy<D, KEYS, THREADS>(k_tile, attn_rows_of<T>(p.k, b, kv, first, p.n_k), d);
    attn_copy<D, KEYS, THREADS>(v_tile, attn_rows_of<T>(p.v, b, kv, first, p.n_k), d_v);
    /* the next tiles come while these are multiplied */
    int turn = 1, step = -1;
    for (int next; step < walk.end; step = next, turn ^= 1) {
        const query_t *const query = queries + turn * QUERIES;
        const T *const q_tile = q_tiles + turn * QUERIES * LD;
        const T *const dy_tile = dy_tiles + turn * QUERIES * LD;
        gpu_copies_wait();
        __syncthreads(); /* this tile has arrived, and no warp reads the one before it */
        next = seek(a, walk, step + 1, first, KEYS, queries + (turn ^ 1) * QUERIES);
        if (next < walk.end) {
            const int h = walk.head(next), skip = (turn ^ 1) * QUERIES * LD;
            const int64_t at = walk.at(next);
            attn_copy<D, QUERIES, THREADS>(q_tiles + skip, attn_rows_of<T>(p.q, b, h, at, p.n_q),
                                           d);
            attn_copy<D, QUERIES, THREADS>(dy_tiles + skip, attn_rows_of<T>(p.dy, b, h, at, p.n_q),
                                           d_v);
        }
        if (step < 0) continue;
        attn_clear(x);
        attn_clear(z);
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            uint32_t left[4];
            if (k * 16 < d) {
                attn_left_at<D>(left, k_tile, k * 16);
                attn_mma_step<D>(x, left, q_tile, k * 16);
            }
            if (k * 16 < d_v) {
                attn_left_at<D>(left, v_tile, k * 16);
                attn_mma_step<D>(z, left, dy_tile, k * 16);
            }
        }
        const int lane = attn_lane();
        const attn_pairs_t pairs = attn_pairs_of<EASY>(
            p, query[lane].row, query[lane + QUERIES - GPU_WARP].row, first, KEYS);
        if (pairs == ATTN_ALL)
            pairs_by_key<EASY, ATTN_ALL>(a, query, first, x, z);
        else if (pairs == ATTN_RANGE)
            pairs_by_key<EASY, ATTN_RANGE>(a, query, first, x, z);
        else
            pairs_by_key<EASY, ATTN_ANY>(a, query, first, x, z);
        if (p.dv.data) attn_mma_add<D>(dv, x, dy_tile, d_v);
        if (p.dk.data) attn_mma_add<D>(dk, z, q_tile, d);
    }
    const float one[2] = {1, 1};
    if (p.dk.data) attn_mma_put<D>(attn_rows_of<T>(p.dk, b, kv, first, p.n_k), d, dk, one);
    if (p.dv.data) attn_mma_put<D>(attn_rows_of<T>(p.dv, b, kv, first, p.n_k), d_v, dv, one);
}

/* ---- queries --------------------------------------------------------------------------------- */

/* The gradients of scores, queries by keys. Keys 16 apart share a call of the cipher. */
template <bool EASY, attn_pairs_t PAIRS, int N>
GPU_FN void pairs_by_query(const attn_call_t &a, const attn_query_t<float> *query, int first,
                           float (&x)[N][4], float (&z)[N][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const attn_query_t<float> &q = query[8 * (i / 2)];
#pragma unroll
        for (int begin = 0; begin < 2; begin++) {
            attn_words_t words = attn_words();
#pragma unroll
            for (int n = begin; n < N; n += 2) {
                const attn_key_t key = attn_key(a, first + n * 8 + attn_t() + i % 2);
                pair<EASY, PAIRS>(a, q, key, &words, &x[n][i], &z[n][i]);
            }
        }
    }
}

template <class T, int D, int TILE, bool EASY>
__global__ void GPU_BLOCK(THREADS) attention_mma_dq(attn_call_t a, int tiles) {
    constexpr int LD = attn_mma_ld<D>, QUERIES = 64, N = TILE / 8;
    typedef gpu_pack<T, 8> pack_t;
    typedef attn_query_t<float> query_t;
    GPU_SHARED(query_t, queries, QUERIES);
    GPU_SHARED(pack_t, k_packs, 2 * TILE * LD / 8);
    GPU_SHARED(pack_t, v_packs, 2 * TILE * LD / 8);
    const gradd_attn_t &p = a.p;
    /* a mask of the past leaves most to the last queries: they begin */
    const int heads = (int)gridDim.x / tiles, head = (int)blockIdx.x % heads;
    const int64_t first = (tiles - 1 - (int)blockIdx.x / heads) * (int64_t)QUERIES;
    const int b = head / a.heads, h = head % a.heads, kv = h / a.group;
    const int d = (int)p.d, d_v = (int)p.d_v;
    const query_t *const query = queries + attn_warp() * 16 + attn_g();
    uint32_t q[D / 16][4], dy[D / 16][4];
    float dq[D / 8][4], x[N][4], z[N][4];
    attn_clear(dq);
    attn_left<D>(q, attn_rows_of<T>(p.q, b, h, first, p.n_q), d);
    attn_left<D>(dy, attn_rows_of<T>(p.dy, b, h, first, p.n_q), d_v);
    if (threadIdx.x < QUERIES)
        queries[threadIdx.x] = attn_query<float>(a, b, h, first + threadIdx.x);
    __syncthreads();
    int from, to, turn = 0;
    attn_interval<TILE>(queries, QUERIES, &from, &to);
    for (int at = from - TILE; at < to; at += TILE, turn ^= 1) {
        /* the next tiles come while these are multiplied */
        T *const k_tile = (T *)k_packs + turn * TILE * LD, *const v_tile =
                                                               (T *)v_packs + turn * TILE * LD;
        gpu_copies_wait();
        __syncthreads();
        if (at + TILE < to) {
            const int skip = (1 - 2 * turn) * TILE * LD;
            attn_copy<D, TILE, THREADS>(k_tile + skip,
                                        attn_rows_of<T>(p.k, b, kv, at + TILE, p.n_k), d);
            attn_copy<D, TILE, THREADS>(v_tile + skip,
                                        attn_rows_of<T>(p.v, b, kv, at + TILE, p.n_k), d_v);
        }
        if (at < from) continue;
        attn_clear(x);
        attn_clear(z);
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            if (k * 16 < d) attn_mma_step<D>(x, q[k], k_tile, k * 16);
            if (k * 16 < d_v) attn_mma_step<D>(z, dy[k], v_tile, k * 16);
        }
        const attn_pairs_t pairs = attn_pairs_of<EASY>(p, query[0].row, query[8].row, at, TILE);
        if (pairs == ATTN_ALL)
            pairs_by_query<EASY, ATTN_ALL>(a, query, at, x, z);
        else if (pairs == ATTN_RANGE)
            pairs_by_query<EASY, ATTN_RANGE>(a, query, at, x, z);
        else
            pairs_by_query<EASY, ATTN_ANY>(a, query, at, x, z);
        attn_mma_add<D>(dq, z, k_tile, d);
    }
    const float one[2] = {1, 1};
    attn_mma_put<D>(attn_rows_of<T>(p.dq, b, h, first, p.n_q), d, dq, one);
}

/* ---- launches -------------------------------------------------------------------------------- */

template <class T, int D, int QUERIES, bool EASY>
static gradd_status_t launch_dkv(const attn_call_t *a) {
    const gradd_attn_t &p = a->p;
    const int64_t heads = p.batch * p.kv_heads, blocks = heads * ((p.n_k + KEYS - 1) / KEYS);
    if (!blocks || (!p.dk.data && !p.dv.data)) return GRADD_OK;
    GRADD_TRY(attn_grid(blocks));
    GPU_LAUNCH_MORE((room_dkv<D, QUERIES>), (attention_mma_dkv<T, D, QUERIES, EASY>),
                    (unsigned)blocks, THREADS, *a, (int)heads);
    return gpu_launched("FusedAttentionGrad");
}

template <class T, int D, int TILE, bool EASY>
static gradd_status_t launch_dq(const attn_call_t *a) {
    const gradd_attn_t &p = a->p;
    const int64_t tiles = (p.n_q + 63) / 64, blocks = p.batch * p.heads * tiles;
    if (!blocks || !p.dq.data) return GRADD_OK;
    GRADD_TRY(attn_grid(blocks));
    GPU_LAUNCH((attention_mma_dq<T, D, TILE, EASY>), (unsigned)blocks, THREADS, *a, (int)tiles);
    return gpu_launched("FusedAttentionGrad");
}

template <class T, int D, int TILE, bool EASY> static gradd_status_t launch(const attn_call_t *a) {
    GRADD_TRY((launch_dkv<T, D, TILE, EASY>(a)));
    return launch_dq<T, D, TILE, EASY>(a);
}

gradd_status_t attn_mma_backward(const attn_call_t *a) {
    const gradd_attn_t &p = a->p;
    const void *const ends[] = {p.q.data,  p.k.data,  p.v.data, p.dy.data,
                                p.dq.data, p.dk.data, p.dv.data};
    for (const void *at : ends)
        if (!gpu_aligned(at, 16)) return attn_backward(a);
    GRADD_TRY(attn_backward_delta(a));
    GRADD_TRY(attn_backward_bias(a));
    return gpu_switch(gpu_types<gradd_bf16_t, gradd_f16_t>(), p.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        const bool easy = attn_is_easy(p);
        if (p.d <= 64 && p.d_v <= 64)
            return easy ? launch<T, 64, 64, true>(a) : launch<T, 64, 64, false>(a);
        return easy ? launch<T, 128, 32, true>(a) : launch<T, 128, 32, false>(a);
    });
}
