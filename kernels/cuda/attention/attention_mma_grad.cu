/* Gradients of attention by tensor cores. See attention_mma.h and attention_grad.cu.
 *
 * dk and dv: one block per tile of keys, 16 of them per warp, so scores are made the other way
 * round, keys by queries: what is rounded of them is the left side of the sums over queries. dq:
 * one block per 64 queries, 16 per warp. The sums of dy y and the bias's gradient are those of the
 * kernels for all types. */
#include "kernels/cuda/attention/attention_mma.h"
#include "kernels/cuda/attention/attention_pair.h"

/* A pair that has nothing but its product. */
GPU_FN void plain_pair(const gradd_attn_t &p, const attn_query_t<float> &q, const attn_key_t &key,
                       attn_words_t *words, float *x, float *z) {
    const gradd_attn_drop_t &drop = p.drop;
    const float scale = (float)p.scale;
    const float prob = attn_fast_exp((*x * scale - q.most) - q.log);
    if (!drop.active) {
        *x = prob;
        *z = prob * (*z - q.delta) * scale;
        return;
    }
    const bool kept = attn_kept(drop, q.row.drop + (uint64_t)key.position, words);
    const float factor = kept ? (float)drop.scale : 0;
    *x = prob * factor;
    *z = prob * ((kept ? *z * factor : 0) - q.delta) * scale;
}

/* ---- keys ------------------------------------------------------------------------------------ */

/* Probabilities and gradients of scores, keys by queries, from products. */
template <int N>
GPU_FN void pairs_by_key(const attn_call_t &a, const attn_query_t<float> *query, int first,
                         int keys, float (&x)[N][4], float (&z)[N][4]) {
    const int mine = first + attn_warp() * 16 + attn_g();
    const attn_key_t key[2] = {attn_key(a, mine), attn_key(a, mine + 8)};
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const attn_query_t<float> &q = query[n * 8 + attn_t() + e];
            const bool plain = attn_is_plain(a.p, q.row, first, keys);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                attn_words_t words = attn_words();
                if (plain)
                    plain_pair(a.p, q, key[r], &words, &x[n][2 * r + e], &z[n][2 * r + e]);
                else
                    attn_pair<false>(a, q, key[r], &words, &x[n][2 * r + e], &z[n][2 * r + e]);
            }
        }
}

template <class T, int D, int WARPS, int QUERIES>
__global__ void GPU_BLOCK(GPU_WARP *WARPS) attention_mma_dkv(attn_call_t a, int tiles) {
    constexpr int LD = attn_mma_ld<D>, KEYS = 16 * WARPS, THREADS = GPU_WARP * WARPS;
    constexpr int N = QUERIES / 8;
    typedef gpu_pack<T, 8> pack_t;
    typedef attn_query_t<float> query_t;
    GPU_SHARED(query_t, query, QUERIES);
    GPU_SHARED(pack_t, k_packs, KEYS * LD / 8);
    GPU_SHARED(pack_t, v_packs, KEYS * LD / 8);
    GPU_SHARED(pack_t, q_packs, QUERIES * LD / 8);
    GPU_SHARED(pack_t, dy_packs, QUERIES * LD / 8);
    GPU_SHARED(int, any, 1);
    T *const k_tile = (T *)k_packs, *const v_tile = (T *)v_packs;
    T *const q_tile = (T *)q_packs, *const dy_tile = (T *)dy_packs;
    const gradd_attn_t &p = a.p;
    const int first = blockIdx.x % tiles * KEYS, head = blockIdx.x / tiles;
    const int b = head / a.kv_heads, kv = head % a.kv_heads, d = (int)p.d, d_v = (int)p.d_v;
    float dk[D / 8][4], dv[D / 8][4], x[N][4], z[N][4];
    attn_clear(dk);
    attn_clear(dv);
    attn_copy<D, KEYS, THREADS>(k_tile, attn_rows_of<T>(p.k, b, kv, first, p.n_k), d);
    attn_copy<D, KEYS, THREADS>(v_tile, attn_rows_of<T>(p.v, b, kv, first, p.n_k), d_v);
    for (int h = kv * a.group; h < (kv + 1) * a.group; h++)
        for (int64_t at = 0; at < p.n_q; at += QUERIES) {
            __syncthreads(); /* nobody reads the queries before these any more */
            if (threadIdx.x == 0) *any = 0;
            __syncthreads();
            if (threadIdx.x < QUERIES) {
                const query_t q = attn_query<float>(a, b, h, at + threadIdx.x);
                query[threadIdx.x] = q;
                if (q.row.lo < first + KEYS && q.row.hi > first) *any = 1;
            }
            __syncthreads();
            if (!*any) continue;
            attn_copy<D, QUERIES, THREADS>(q_tile, attn_rows_of<T>(p.q, b, h, at, p.n_q), d);
            attn_copy<D, QUERIES, THREADS>(dy_tile, attn_rows_of<T>(p.dy, b, h, at, p.n_q), d_v);
            gpu_copies_wait();
            __syncthreads();
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
            pairs_by_key(a, query, first, KEYS, x, z);
            if (p.dv.data) attn_mma_add<D>(dv, x, dy_tile, d_v);
            if (p.dk.data) attn_mma_add<D>(dk, z, q_tile, d);
        }
    const float one[2] = {1, 1};
    if (p.dk.data) attn_mma_put<D>(attn_rows_of<T>(p.dk, b, kv, first, p.n_k), d, dk, one);
    if (p.dv.data) attn_mma_put<D>(attn_rows_of<T>(p.dv, b, kv, first, p.n_k), d_v, dv, one);
}

/* ---- queries --------------------------------------------------------------------------------- */

/* The gradients of scores, queries by keys. Keys 16 apart share a call of the cipher. */
template <int N>
GPU_FN void pairs_by_query(const attn_call_t &a, const attn_query_t<float> &q, int first, int r,
                           float (&x)[N][4], float (&z)[N][4]) {
    const bool plain = attn_is_plain(a.p, q.row, first, N * 8);
#pragma unroll
    for (int begin = 0; begin < 4; begin++) {
        attn_words_t words = attn_words();
        const int i = 2 * r + begin % 2;
#pragma unroll
        for (int n = begin / 2; n < N; n += 2) {
            const attn_key_t key = attn_key(a, first + n * 8 + attn_t() + begin % 2);
            if (plain)
                plain_pair(a.p, q, key, &words, &x[n][i], &z[n][i]);
            else
                attn_pair<false>(a, q, key, &words, &x[n][i], &z[n][i]);
        }
    }
}

template <class T, int D, int KEYS>
__global__ void GPU_BLOCK(128) attention_mma_dq(attn_call_t a, int tiles) {
    constexpr int LD = attn_mma_ld<D>, QUERIES = 64, THREADS = 128, N = KEYS / 8;
    typedef gpu_pack<T, 8> pack_t;
    typedef attn_query_t<float> query_t;
    GPU_SHARED(query_t, queries, QUERIES);
    GPU_SHARED(pack_t, k_packs, 2 * KEYS * LD / 8);
    GPU_SHARED(pack_t, v_packs, 2 * KEYS * LD / 8);
    const gradd_attn_t &p = a.p;
    /* a mask of the past leaves most to the last queries: they begin */
    const int64_t first = (tiles - 1 - (int)(blockIdx.x % tiles)) * (int64_t)QUERIES;
    const int head = blockIdx.x / tiles, b = head / a.heads, h = head % a.heads, kv = h / a.group;
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
    attn_span<KEYS>(queries, QUERIES, &from, &to);
    for (int at = from - KEYS; at < to; at += KEYS, turn ^= 1) {
        /* the next tiles come while these are multiplied */
        T *const k_tile = (T *)k_packs + turn * KEYS * LD, *const v_tile =
                                                               (T *)v_packs + turn * KEYS * LD;
        gpu_copies_wait();
        __syncthreads();
        if (at + KEYS < to) {
            const int skip = (1 - 2 * turn) * KEYS * LD;
            attn_copy<D, KEYS, THREADS>(k_tile + skip,
                                        attn_rows_of<T>(p.k, b, kv, at + KEYS, p.n_k), d);
            attn_copy<D, KEYS, THREADS>(v_tile + skip,
                                        attn_rows_of<T>(p.v, b, kv, at + KEYS, p.n_k), d_v);
        }
        if (at < from) continue;
        attn_clear(x);
        attn_clear(z);
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            if (k * 16 < d) attn_mma_step<D>(x, q[k], k_tile, k * 16);
            if (k * 16 < d_v) attn_mma_step<D>(z, dy[k], v_tile, k * 16);
        }
#pragma unroll
        for (int r = 0; r < 2; r++)
            pairs_by_query(a, query[8 * r], at, r, x, z);
        attn_mma_add<D>(dq, z, k_tile, d);
    }
    const float one[2] = {1, 1};
    attn_mma_put<D>(attn_rows_of<T>(p.dq, b, h, first, p.n_q), d, dq, one);
}

/* ---- launches -------------------------------------------------------------------------------- */

template <class T, int D, int WARPS, int QUERIES>
static gradd_status_t launch_dkv(const attn_call_t *a) {
    const gradd_attn_t &p = a->p;
    const int64_t tiles = (p.n_k + 16 * WARPS - 1) / (16 * WARPS);
    const int64_t blocks = p.batch * p.kv_heads * tiles;
    if (!blocks || (!p.dk.data && !p.dv.data)) return GRADD_OK;
    GRADD_TRY(attn_grid(blocks));
    GPU_LAUNCH((attention_mma_dkv<T, D, WARPS, QUERIES>), (unsigned)blocks, GPU_WARP * WARPS, *a,
               (int)tiles);
    return gpu_launched("FusedAttentionGrad");
}

template <class T, int D, int KEYS> static gradd_status_t launch_dq(const attn_call_t *a) {
    const gradd_attn_t &p = a->p;
    const int64_t tiles = (p.n_q + 63) / 64, blocks = p.batch * p.heads * tiles;
    if (!blocks || !p.dq.data) return GRADD_OK;
    GRADD_TRY(attn_grid(blocks));
    GPU_LAUNCH((attention_mma_dq<T, D, KEYS>), (unsigned)blocks, 128, *a, (int)tiles);
    return gpu_launched("FusedAttentionGrad");
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
        if (p.d <= 64 && p.d_v <= 64) {
            GRADD_TRY((launch_dkv<T, 64, 4, 64>(a)));
            return launch_dq<T, 64, 64>(a);
        }
        GRADD_TRY((launch_dkv<T, 128, 2, 32>(a)));
        return launch_dq<T, 128, 32>(a);
    });
}
