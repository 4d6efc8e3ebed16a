/* Gradients of attention on a GPU for all types and sizes. See attention_gpu.h and
 * kernels/cpu/attention/attention_grad.h for the formulas.
 *
 * dk and dv have one block per tile of keys, dq one per tile of queries, the bias one per tile of
 * pairs: each sum has one owner and one order. Each makes the probabilities again. */
#include "kernels/cuda/attention/attention_pair.h"

/* ---- sums of dy y ---------------------------------------------------------------------------- */

template <class T>
__global__ void GPU_BLOCK(ATTN_THREADS) attention_delta(attn_call_t a, int64_t rows) {
    typedef gpu_real<T> A;
    const gradd_attn_t &p = a.p;
    const int lane = threadIdx.x % GPU_WARP, warps = ATTN_THREADS / GPU_WARP;
    for (int64_t i = (int64_t)blockIdx.x * warps + threadIdx.x / GPU_WARP; i < rows;
         i += (int64_t)gridDim.x * warps) {
        const int64_t head = i / p.n_q, b = head / p.heads, h = head % p.heads;
        const T *y = attn_rows_of<T>(p.y, b, h, i % p.n_q, p.n_q).at;
        const T *dy = attn_rows_of<T>(p.dy, b, h, i % p.n_q, p.n_q).at;
        A sum = 0;
        for (int64_t c = lane; c < p.d_v; c += GPU_WARP)
            sum += gpu_get(y[c]) * gpu_get(dy[c]);
        sum = gpu_warp_sum(sum);
        if (!lane) ((A *)a.delta)[i] = sum;
    }
}

/* ---- a tile of pairs ------------------------------------------------------------------------- */

/* Queries and keys of a tile of pairs, and room to multiply them. */
template <class T> struct tile_t {
    attn_rows<T> q, dy, k, v;
    int key; /* first */
    const attn_query_t<gpu_real<T>> *query;
    gpu_real<T> *room_q, *room_k;
};

template <class T>
GPU_FN void tile_queries(const gradd_attn_t &p, int64_t b, int64_t h, int64_t first, tile_t<T> *t) {
    t->q = attn_rows_of<T>(p.q, b, h, first, p.n_q);
    t->dy = attn_rows_of<T>(p.dy, b, h, first, p.n_q);
}
template <class T>
GPU_FN void tile_keys(const gradd_attn_t &p, int64_t b, int64_t kv, int first, tile_t<T> *t) {
    t->k = attn_rows_of<T>(p.k, b, kv, first, p.n_k);
    t->v = attn_rows_of<T>(p.v, b, kv, first, p.n_k);
    t->key = first;
}

template <bool BIAS, class T, class A, int R>
GPU_FN void pairs(const attn_call_t &a, const tile_t<T> &t, A (&x)[R][R], A (&z)[R][R]) {
    attn_products(x, t.q, t.k, (int)a.p.d, t.room_q, t.room_k);
    attn_products(z, t.dy, t.v, (int)a.p.d_v, t.room_q, t.room_k);
#pragma unroll
    for (int r = 0; r < R; r++) {
        attn_words_t words = attn_words();
#pragma unroll
        for (int c = 0; c < R; c++)
            attn_pair<BIAS>(a, t.query[attn_ty() * R + r],
                            attn_key(a, t.key + attn_tx() + ATTN_SIDE * c), &words, &x[r][c],
                            &z[r][c]);
    }
}

/* A thread's pairs into a tile [query][key]. */
template <class A, int R> GPU_FN void put_by_query(const A (&x)[R][R], A *tile) {
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int c = 0; c < R; c++)
            tile[(attn_ty() * R + r) * attn_ld<A> + attn_tx() + ATTN_SIDE * c] = x[r][c];
}

/* A thread's sums into rows of a result. */
template <int N, class T, class A>
GPU_FN void put_sums(const attn_rows<T> &to, int64_t column, int64_t cols,
                     const A (&sum)[attn_r<A>][N]) {
    for (int r = 0; r < attn_r<A>; r++) {
        const int row = attn_ty() * attn_r<A> + r;
#pragma unroll
        for (int c = 0; c < N; c++) {
            const int64_t col = column + attn_column<A>(c);
            if (row < to.n && col < cols) gpu_put((T *)&to.at[row * to.stride + col], sum[r][c]);
        }
    }
}

template <class A, int N> GPU_FN void clear(A (&sum)[attn_r<A>][N]) {
#pragma unroll
    for (int r = 0; r < attn_r<A>; r++)
#pragma unroll
        for (int c = 0; c < N; c++)
            sum[r][c] = 0;
}

/* ---- keys ------------------------------------------------------------------------------------ */

template <class T, int N>
__global__ void GPU_BLOCK(ATTN_THREADS, 1) attention_dkv(attn_call_t a, int tiles, int chunks) {
    typedef gpu_real<T> A;
    constexpr int R = attn_r<A>, TILE = attn_tile<A>, LD = attn_ld<A>, ROOM = attn_room<A, N>;
    typedef gpu_pack<A, R> pack_t;
    typedef attn_query_t<A> queries_t;
    GPU_SHARED(queries_t, query, TILE);
    GPU_SHARED(pack_t, room_q, ATTN_CHUNK * LD / R);
    GPU_SHARED(pack_t, room_k, ROOM / R);
    GPU_SHARED(pack_t, by_query, TILE * LD / R);
    GPU_SHARED(int, any, 1);
    const gradd_attn_t &p = a.p;
    const int64_t column = blockIdx.x % chunks * (int64_t)(ATTN_SIDE * N);
    const int first = (int)(blockIdx.x / chunks % tiles) * TILE;
    const int head = blockIdx.x / chunks / tiles, b = head / a.kv_heads, kv = head % a.kv_heads;
    tile_t<T> t = {.query = query, .room_q = (A *)room_q, .room_k = (A *)room_k};
    A x[R][R], z[R][R], dk[R][N], dv[R][N];
    clear(dk);
    clear(dv);
    tile_keys(p, b, kv, first, &t);
    for (int h = kv * a.group; h < (kv + 1) * a.group; h++)
        for (int64_t at = 0; at < p.n_q; at += TILE) {
            __syncthreads();
            if (threadIdx.x == 0) *any = 0;
            __syncthreads();
            if (threadIdx.x < TILE) {
                const queries_t q = attn_query<A>(a, b, h, at + threadIdx.x);
                query[threadIdx.x] = q;
                if (q.row.lo < first + TILE && q.row.hi > first) *any = 1;
            }
            __syncthreads();
            if (!*any) continue;
            tile_queries(p, b, h, at, &t);
            pairs<false>(a, t, x, z);
            if (p.dv.data) {
                put_by_query(x, (A *)by_query);
                attn_add_product(dv, (const A *)by_query, t.dy, column, p.d_v, (A *)room_k);
                __syncthreads();
            }
            if (p.dk.data) {
                put_by_query(z, (A *)by_query);
                attn_add_product(dk, (const A *)by_query, t.q, column, p.d, (A *)room_k);
            }
        }
    if (p.dk.data) put_sums(attn_rows_of<T>(p.dk, b, kv, first, p.n_k), column, p.d, dk);
    if (p.dv.data) put_sums(attn_rows_of<T>(p.dv, b, kv, first, p.n_k), column, p.d_v, dv);
}

/* ---- queries --------------------------------------------------------------------------------- */

template <class T, int N>
__global__ void GPU_BLOCK(ATTN_THREADS) attention_dq(attn_call_t a, int tiles, int chunks) {
    typedef gpu_real<T> A;
    constexpr int R = attn_r<A>, TILE = attn_tile<A>, LD = attn_ld<A>, ROOM = attn_room<A, N>;
    typedef gpu_pack<A, R> pack_t;
    typedef attn_query_t<A> queries_t;
    GPU_SHARED(queries_t, query, TILE);
    GPU_SHARED(pack_t, room_q, ATTN_CHUNK * LD / R);
    GPU_SHARED(pack_t, room_k, ROOM / R);
    GPU_SHARED(pack_t, by_key, TILE * LD / R);
    const gradd_attn_t &p = a.p;
    const int64_t column = blockIdx.x % chunks * (int64_t)(ATTN_SIDE * N);
    /* a mask of the past leaves most to the last queries: they begin */
    const int64_t first = (tiles - 1 - (int)(blockIdx.x / chunks % tiles)) * (int64_t)TILE;
    const int head = blockIdx.x / chunks / tiles, b = head / a.heads, h = head % a.heads;
    tile_t<T> t = {.query = query, .room_q = (A *)room_q, .room_k = (A *)room_k};
    A x[R][R], z[R][R], dq[R][N];
    clear(dq);
    if (threadIdx.x < TILE) query[threadIdx.x] = attn_query<A>(a, b, h, first + threadIdx.x);
    __syncthreads();
    int from, to;
    attn_interval<TILE>(query, TILE, &from, &to);
    for (int at = from; at < to; at += TILE) {
        tile_queries(p, b, h, first, &t);
        tile_keys(p, b, h / a.group, at, &t);
        pairs<false>(a, t, x, z);
#pragma unroll
        for (int c = 0; c < R; c++) {
            pack_t w;
#pragma unroll
            for (int r = 0; r < R; r++)
                w.v[r] = z[r][c];
            by_key[((attn_tx() + ATTN_SIDE * c) * LD) / R + attn_ty()] = w;
        }
        attn_add_product(dq, (const A *)by_key, t.k, column, p.d, (A *)room_k);
    }
    put_sums(attn_rows_of<T>(p.dq, b, h, first, p.n_q), column, p.d, dq);
}

/* ---- the bias -------------------------------------------------------------------------------- */

/* The range of a sum where the bias is broadcast. */
struct tile_interval_t {
    int from, to;
};
GPU_FN tile_interval_t interval_of(bool one, int at, int n) {
    return one ? tile_interval_t{at, at + 1} : tile_interval_t{0, n};
}

/* A thread's sums of pairs, summed further where the bias is broadcast, into dbias. */
template <class A, int R>
GPU_FN void put_bias(const gradd_attn_t &p, A *to, int64_t query, int64_t key, A (&sum)[R][R],
                     A *tile) {
    constexpr int TILE = attn_tile<A>, LD = attn_ld<A>;
    const int t = threadIdx.x;
    if (p.bias.row && p.bias.col) {
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int c = 0; c < R; c++) {
                const int64_t i = query + attn_ty() * R + r, j = key + attn_tx() + ATTN_SIDE * c;
                if (i < p.n_q && j < p.n_k) to[i * p.bias.row + j * p.bias.col] = sum[r][c];
            }
        return;
    }
    __syncthreads();
    put_by_query(sum, tile);
    __syncthreads();
    A total = 0;
    for (int i = 0; t < TILE && i < TILE; i++)
        total += p.bias.row ? tile[t * LD + i] : tile[i * LD + t];
    if (t < TILE && p.bias.row && query + t < p.n_q) to[(query + t) * p.bias.row] = total;
    if (t < TILE && p.bias.col && key + t < p.n_k) to[(key + t) * p.bias.col] = total;
    if (p.bias.row || p.bias.col) return;
    __syncthreads();
    if (t < TILE) tile[t] = total;
    __syncthreads();
    for (int i = 1; t == 0 && i < TILE; i++)
        total += tile[i];
    if (t == 0) to[0] = total;
}

template <class T>
__global__ void GPU_BLOCK(ATTN_THREADS, 1)
    attention_dbias(attn_call_t a, int q_tiles, int k_tiles) {
    typedef gpu_real<T> A;
    constexpr int R = attn_r<A>, TILE = attn_tile<A>, LD = attn_ld<A>;
    typedef gpu_pack<A, R> pack_t;
    typedef attn_query_t<A> queries_t;
    GPU_SHARED(queries_t, query, TILE);
    GPU_SHARED(pack_t, room_q, ATTN_CHUNK * LD / R);
    GPU_SHARED(pack_t, room_k, ATTN_CHUNK * LD / R);
    GPU_SHARED(pack_t, tile, TILE * LD / R);
    const gradd_attn_t &p = a.p;
    const int rows = p.bias.row ? q_tiles : 1, cols = p.bias.col ? k_tiles : 1;
    const int heads = p.bias.head ? a.heads : 1, head = blockIdx.x / cols / rows;
    const tile_interval_t bs = interval_of(p.bias.batch, head / heads, (int)p.batch);
    const tile_interval_t hs = interval_of(p.bias.head, head % heads, a.heads);
    const tile_interval_t is = interval_of(p.bias.row, blockIdx.x / cols % rows, q_tiles);
    const tile_interval_t js = interval_of(p.bias.col, blockIdx.x % cols, k_tiles);
    tile_t<T> t = {.query = query, .room_q = (A *)room_q, .room_k = (A *)room_k};
    A x[R][R], z[R][R], sum[R][R];
    clear(sum);
    for (int b = bs.from; b < bs.to; b++)
        for (int h = hs.from; h < hs.to; h++)
            for (int i = is.from; i < is.to; i++) {
                int from, to;
                __syncthreads();
                if (threadIdx.x < TILE)
                    query[threadIdx.x] = attn_query<A>(a, b, h, (int64_t)i * TILE + threadIdx.x);
                __syncthreads();
                attn_interval<TILE>(query, TILE, &from, &to);
                tile_queries(p, b, h, (int64_t)i * TILE, &t);
                for (int j = js.from; j < js.to; j++) {
                    if (j * TILE >= to || (j + 1) * TILE <= from) continue;
                    tile_keys(p, b, h / a.group, j * TILE, &t);
                    pairs<true>(a, t, x, z);
#pragma unroll
                    for (int r = 0; r < R; r++)
#pragma unroll
                        for (int c = 0; c < R; c++)
                            sum[r][c] += z[r][c];
                }
            }
    A *to = (A *)p.dbias + head / heads * p.bias.batch + head % heads * p.bias.head;
    put_bias(p, to, (int64_t)is.from * TILE, (int64_t)js.from * TILE, sum, (A *)tile);
}

/* ---- launches -------------------------------------------------------------------------------- */

template <class T, int N> static gradd_status_t launch_dkv(const attn_call_t *a) {
    const gradd_attn_t &p = a->p;
    constexpr int TILE = attn_tile<gpu_real<T>>;
    const int64_t most = p.d > p.d_v ? p.d : p.d_v, tiles = (p.n_k + TILE - 1) / TILE;
    const int64_t chunks = (most + ATTN_SIDE * N - 1) / (ATTN_SIDE * N);
    const int64_t blocks = p.batch * p.kv_heads * tiles * chunks;
    if (!blocks || (!p.dk.data && !p.dv.data)) return GRADD_OK;
    GRADD_TRY(attn_grid(blocks));
    GPU_LAUNCH((attention_dkv<T, N>), (unsigned)blocks, ATTN_THREADS, *a, (int)tiles, (int)chunks);
    return gpu_launched("FusedAttentionGrad");
}

template <class T, int N> static gradd_status_t launch_dq(const attn_call_t *a) {
    const gradd_attn_t &p = a->p;
    constexpr int TILE = attn_tile<gpu_real<T>>;
    const int64_t tiles = (p.n_q + TILE - 1) / TILE;
    const int64_t chunks = (p.d + ATTN_SIDE * N - 1) / (ATTN_SIDE * N);
    const int64_t blocks = p.batch * p.heads * tiles * chunks;
    if (!blocks || !p.dq.data) return GRADD_OK;
    GRADD_TRY(attn_grid(blocks));
    GPU_LAUNCH((attention_dq<T, N>), (unsigned)blocks, ATTN_THREADS, *a, (int)tiles, (int)chunks);
    return gpu_launched("FusedAttentionGrad");
}

gradd_status_t attn_backward_bias(const attn_call_t *a) {
    const gradd_attn_t &p = a->p;
    if (!p.dbias) return GRADD_OK;
    if (a->q_rows) return attn_backward_live_bias(a);
    return gpu_switch(gpu_floats(), p.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        constexpr int TILE = attn_tile<gpu_real<T>>;
        const int64_t rows = (p.n_q + TILE - 1) / TILE, cols = (p.n_k + TILE - 1) / TILE;
        const int64_t blocks = (p.bias.batch ? p.batch : 1) * (p.bias.head ? p.heads : 1) *
                               (p.bias.row ? rows : 1) * (p.bias.col ? cols : 1);
        if (!blocks || !a->bias_count) return GRADD_OK;
        GRADD_TRY(attn_grid(blocks));
        GPU_LAUNCH((attention_dbias<T>), (unsigned)blocks, ATTN_THREADS, *a, (int)rows, (int)cols);
        return gpu_launched("FusedAttentionGrad");
    });
}

gradd_status_t attn_backward_delta(const attn_call_t *a) {
    const gradd_attn_t &p = a->p;
    const int64_t rows = p.batch * p.heads * p.n_q;
    if (!rows) return GRADD_OK;
    return gpu_switch(gpu_floats(), p.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        GPU_LAUNCH((attention_delta<T>), gpu_blocks(rows, ATTN_THREADS / GPU_WARP), ATTN_THREADS,
                   *a, rows);
        return gpu_launched("FusedAttentionGrad");
    });
}

gradd_status_t attn_backward(const attn_call_t *a) {
    const gradd_attn_t &p = a->p;
    GRADD_TRY(attn_backward_delta(a));
    GRADD_TRY(attn_backward_bias(a));
    return gpu_switch(gpu_floats(), p.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        if constexpr (sizeof(gpu_real<T>) == 4)
            if ((p.d > p.d_v ? p.d : p.d_v) > 4 * ATTN_SIDE) {
                GRADD_TRY((launch_dkv<T, 8>(a)));
                return launch_dq<T, 8>(a);
            }
        GRADD_TRY((launch_dkv<T, 4>(a)));
        return launch_dq<T, 4>(a);
    });
}
