/* Gradients of attention by tensor cores. See attention_mma.h and attention_grad.cu.
 *
 * dk and dv: one block per 64 or 128 keys, 16 per warp, so scores are computed the other way round,
 * keys by queries: rounded, they are the left side of the sums over queries. dq: one block per 64
 * queries, 16 per warp. The sums of dy y and the bias's gradient are those of the kernels for all
 * types.
 *
 * Sums have one order, so no block adds to another one's dq. Up to head size 64 the second kernel
 * makes the scores and their gradients again: seven products in all. For larger sizes the first one
 * keeps the gradients as it has rounded them for its own product, and the second one only
 * multiplies them with the keys: five products. That costs 2 bytes of scratch for each pair of
 * query and key, written and read once; partial sums of dq per 128 keys would cost twice that. As
 * scratch is limited, the heads take turns (`attn_scores_limit`). Where a turn would leave most
 * multiprocessors idle, at more than 4096 queries of four heads that share keys, there are seven
 * products again. Smaller heads have too little arithmetic per pair to gain from it.
 */
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

template <bool EASY, int N>
GPU_FN void pairs_of_tile(const attn_call_t &a, const attn_query_t<float> *query, int first,
                          int keys, float (&x)[N][4], float (&z)[N][4]) {
    const int lane = attn_lane();
    const attn_pairs_t pairs =
        attn_pairs_of<EASY>(a.p, query[lane].row, query[lane + N * 8 - GPU_WARP].row, first, keys);
    if (pairs == ATTN_ALL)
        pairs_by_key<EASY, ATTN_ALL>(a, query, first, x, z);
    else if (pairs == ATTN_RANGE)
        pairs_by_key<EASY, ATTN_RANGE>(a, query, first, x, z);
    else
        pairs_by_key<EASY, ATTN_ANY>(a, query, first, x, z);
}

/* What the kernels below share beside the call: scratch, and the heads whose turn it is. */
struct span_t {
    int32_t lo, hi; /* keys that any of 64 queries sees; hi 0: none */
};
struct pass_t {
    attn_query_t<float> *queries; /* [B, H, 64 tiles] */
    span_t *spans;                /* [B, H, tiles] */
    uint32_t *scores;             /* their gradients, in squares (below); NULL: not kept */
    int tiles, key_groups;        /* of 64 queries; of 16 keys */
    int from, heads;              /* of keys, over the batch */
};
enum { SPAN = 64, SQUARE_WORDS = 32, GROUP_WORDS = 4 * SQUARE_WORDS };

/* 16 keys and 16 queries of gradients: four squares of 8 x 8, each by rows of keys. */
GPU_FN uint32_t *scores_at(const pass_t &m, int64_t head, int64_t query, int key) {
    const int64_t row = head * m.tiles * (SPAN / 16) + query / 16;
    return m.scores + (row * m.key_groups + key / 16) * GROUP_WORDS;
}

/* `to`: of the lane, in the first square. */
GPU_FN void keep(uint32_t *to, const uint32_t (&left)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        to[i * SQUARE_WORDS] = left[i];
}

__global__ void GPU_BLOCK(SPAN) attention_mma_queries(attn_call_t a, pass_t m) {
    GPU_SHARED(span_t, part, SPAN / GPU_WARP);
    const int head = (int)blockIdx.x / m.tiles, i = (int)blockIdx.x % m.tiles * SPAN + threadIdx.x;
    const attn_query_t<float> q = attn_query<float>(a, head / a.heads, head % a.heads, i);
    m.queries[(int64_t)blockIdx.x * SPAN + threadIdx.x] = q;
    const bool sees = q.row.lo < q.row.hi;
    const int lo = -gpu_warp_max(sees ? -q.row.lo : -INT32_MAX);
    const int hi = gpu_warp_max(sees ? q.row.hi : 0);
    if (threadIdx.x % GPU_WARP == 0) part[threadIdx.x / GPU_WARP] = {lo, hi};
    __syncthreads();
    if (threadIdx.x == 0)
        m.spans[blockIdx.x] = {part[0].lo < part[1].lo ? part[0].lo : part[1].lo,
                               part[0].hi > part[1].hi ? part[0].hi : part[1].hi};
}

/* The steps of a block of keys: tiles of the queries of all heads that share them. */
template <int QUERIES> struct walk_t {
    int first_head, tiles, end; /* head: over the batch; end: of steps */

    __device__ __forceinline__ walk_t(const attn_call_t &a, const pass_t &m, int head)
        : first_head(head * a.group), tiles(m.tiles * (SPAN / QUERIES)), end(tiles * a.group) {
    }
    __device__ __forceinline__ int head(int step) const {
        return first_head + step / tiles;
    }
    __device__ __forceinline__ int64_t at(int step) const {
        return step % tiles * (int64_t)QUERIES;
    }
};

/* The first step from `step` on of which a query sees any of the keys. Each lane looks at one. */
template <int QUERIES>
GPU_FN int seek(const pass_t &m, const walk_t<QUERIES> &walk, int step, int first, int keys) {
    for (; step < walk.end; step += GPU_WARP) {
        const int mine = step + attn_lane();
        bool sees = false;
        if (mine < walk.end) {
            const span_t s = m.spans[(int64_t)walk.head(mine) * m.tiles + walk.at(mine) / SPAN];
            sees = s.lo < first + keys && s.hi > first;
        }
        const uint32_t found = __ballot_sync(GPU_ALL, sees);
        if (found) return step + __ffs((int)found) - 1;
    }
    return walk.end;
}

/* Bytes of a block's tiles: one of keys and of values, two of queries and of dy. */
template <int D, int KEYS, int QUERIES>
constexpr int room_dkv = 2 * (KEYS + 2 * QUERIES) * attn_mma_ld<D> * (int)sizeof(uint16_t) +
                         2 * QUERIES * (int)sizeof(attn_query_t<float>);

/* Tiles of queries in shared memory. */
template <class T> struct tiles_t {
    T *q, *dy;
    attn_query_t<float> *query;

    __device__ __forceinline__ tiles_t from(int row, int ld) const {
        return {q + row * ld, dy + row * ld, query + row};
    }
};

/* Brings those of a step. */
template <int D, int QUERIES, int THREADS, class T>
GPU_FN void bring(const attn_call_t &a, const pass_t &m, int head, int64_t at, tiles_t<T> to) {
    constexpr int packs = QUERIES * (int)sizeof(*to.query) / 16;
    const gradd_attn_t &p = a.p;
    const int b = head / a.heads, h = head % a.heads;
    const char *from = (const char *)(m.queries + (int64_t)head * m.tiles * SPAN + at);
    attn_copy<D, QUERIES, THREADS>(to.q, attn_rows_of<T>(p.q, b, h, at, p.n_q), (int)p.d);
    attn_copy<D, QUERIES, THREADS>(to.dy, attn_rows_of<T>(p.dy, b, h, at, p.n_q), (int)p.d_v);
    for (int i = threadIdx.x; i < packs; i += THREADS)
        gpu_copy_16((char *)to.query + 16 * i, from + 16 * i, true);
}

/* PART queries of a tile at a time: the registers of more would not suffice. */
template <class T, int D, int KEYS, int QUERIES, int PART, bool EASY>
__global__ void GPU_BLOCK(2 * KEYS, 1) attention_mma_dkv(attn_call_t a, pass_t m) {
    constexpr int LD = attn_mma_ld<D>, N = PART / 8, THREADS = 2 * KEYS;
    GPU_MORE(T, k_tile);
    T *const v_tile = k_tile + KEYS * LD, *const q_tiles = v_tile + KEYS * LD;
    T *const dy_tiles = q_tiles + 2 * QUERIES * LD;
    const tiles_t<T> tiles = {q_tiles, dy_tiles,
                              (attn_query_t<float> *)(dy_tiles + 2 * QUERIES * LD)};
    const gradd_attn_t &p = a.p;
    /* a mask of the past leaves most to the first keys: they begin */
    const int first = (int)blockIdx.x / m.heads * KEYS, head = m.from + (int)blockIdx.x % m.heads;
    const int b = head / a.kv_heads, kv = head % a.kv_heads, d = (int)p.d, d_v = (int)p.d_v;
    const walk_t<QUERIES> walk(a, m, head);
    float dk[D / 8][4], dv[D / 8][4], x[N][4], z[N][4];
    attn_clear(dk);
    attn_clear(dv);
    attn_copy<D, KEYS, THREADS>(k_tile, attn_rows_of<T>(p.k, b, kv, first, p.n_k), d);
    attn_copy<D, KEYS, THREADS>(v_tile, attn_rows_of<T>(p.v, b, kv, first, p.n_k), d_v);
    /* the next tiles come while these are multiplied */
    int turn = 1, step = -1;
    for (int next; step < walk.end; step = next, turn ^= 1) {
        gpu_copies_wait();
        __syncthreads(); /* this tile has arrived, and no warp reads the one before it */
        next = seek(m, walk, step + 1, first, KEYS);
        if (next < walk.end)
            bring<D, QUERIES, THREADS>(a, m, walk.head(next), walk.at(next),
                                       tiles.from((turn ^ 1) * QUERIES, LD));
        if (step < 0) continue;
#pragma unroll 1
        for (int part = turn * QUERIES; part < (turn + 1) * QUERIES; part += PART) {
            const tiles_t<T> tile = tiles.from(part, LD);
            attn_clear(x);
            attn_clear(z);
#pragma unroll
            for (int k = 0; k < D / 16; k++) {
                uint32_t left[4];
                if (k * 16 < d) {
                    attn_left_at<D>(left, k_tile, k * 16);
                    attn_mma_step<D>(x, left, tile.q, k * 16);
                }
                if (k * 16 < d_v) {
                    attn_left_at<D>(left, v_tile, k * 16);
                    attn_mma_step<D>(z, left, tile.dy, k * 16);
                }
            }
            pairs_of_tile<EASY>(a, tile.query, first, KEYS, x, z);
            if (p.dv.data) attn_mma_add<D>(dv, x, tile.dy, d_v);
            uint32_t *const to =
                m.scores
                    ? scores_at(m, walk.head(step) - (int64_t)m.from * a.group,
                                walk.at(step) + part - turn * QUERIES, first + attn_warp() * 16) +
                          attn_lane()
                    : nullptr;
#pragma unroll
            for (int k = 0; k < N / 2; k++) {
                uint32_t left[4];
                attn_left_of<T>(left, z[2 * k], z[2 * k + 1]);
                if (to) keep(to + (int64_t)k * m.key_groups * GROUP_WORDS, left);
                if (p.dk.data) attn_mma_sum<D>(dk, left, tile.q, k * 16, d);
            }
        }
    }
    const float one[2] = {1, 1};
    if (p.dk.data) attn_mma_put<D>(attn_rows_of<T>(p.dk, b, kv, first, p.n_k), d, dk, one);
    if (p.dv.data) attn_mma_put<D>(attn_rows_of<T>(p.dv, b, kv, first, p.n_k), d_v, dv, one);
}

/* ---- queries, from gradients of scores that are kept ------------------------------------------
 */

enum { TILE = 64, THREADS = 128, TILE_WORDS = TILE / 16 * GROUP_WORDS };

template <int D>
constexpr int room_dq = 2 * TILE * attn_mma_ld<D> * (int)sizeof(uint16_t) +
                        2 * (SPAN / 16) * TILE_WORDS * (int)sizeof(uint32_t);

/* The left side of the product: 16 queries by 16 keys, out of 16 keys by 16 queries. */
GPU_FN void left_turned(uint32_t (&a)[4], const uint32_t *group) {
    const int lane = attn_lane(), square = lane / 8 % 2 * 2 + lane / 16;
    gpu_squares_turned(a, group + square * SQUARE_WORDS + lane % 8 * 4);
}

template <class T, int D>
__global__ void GPU_BLOCK(THREADS) attention_mma_dq_kept(attn_call_t a, pass_t m) {
    constexpr int LD = attn_mma_ld<D>;
    GPU_MORE(T, k_tiles);
    uint32_t *const score_tiles = (uint32_t *)(k_tiles + 2 * TILE * LD);
    const gradd_attn_t &p = a.p;
    const int heads = m.heads * a.group, tile = m.tiles - 1 - (int)blockIdx.x / heads;
    const int in_turn = (int)blockIdx.x % heads, head = m.from * a.group + in_turn;
    const int b = head / a.heads, h = head % a.heads, d = (int)p.d;
    const span_t span = m.spans[(int64_t)head * m.tiles + tile];
    const int from = span.hi ? span.lo / TILE * TILE : 0;
    float dq[D / 8][4];
    attn_clear(dq);
    /* the next tiles come while these are multiplied */
    for (int at = from - TILE, turn = 0; at < span.hi; at += TILE, turn ^= 1) {
        const int next = at + TILE;
        gpu_copies_wait();
        __syncthreads(); /* these tiles have arrived, and no warp reads the ones before them */
        if (next < span.hi) {
            uint32_t *const to = score_tiles + (turn ^ 1) * (SPAN / 16) * TILE_WORDS;
            attn_copy<D, TILE, THREADS>(k_tiles + (turn ^ 1) * TILE * LD,
                                        attn_rows_of<T>(p.k, b, h / a.group, next, p.n_k), d);
#pragma unroll
            for (int i = 0; i < SPAN / 16; i++)
                gpu_copy_16(to + i * TILE_WORDS + threadIdx.x * 4,
                            scores_at(m, in_turn, tile * SPAN + i * 16, next) + threadIdx.x * 4,
                            true);
        }
        if (at < from) continue;
        const T *const k_tile = k_tiles + turn * TILE * LD;
        const uint32_t *const scores =
            score_tiles + (turn * (SPAN / 16) + attn_warp()) * TILE_WORDS;
#pragma unroll
        for (int k = 0; k < TILE / 16; k++) {
            uint32_t left[4];
            left_turned(left, scores + k * GROUP_WORDS);
            attn_mma_sum<D>(dq, left, k_tile, k * 16, d);
        }
    }
    const float one[2] = {1, 1};
    attn_mma_put<D>(attn_rows_of<T>(p.dq, b, h, tile * (int64_t)SPAN, p.n_q), d, dq, one);
}

/* ---- queries, once more from the beginning ----------------------------------------------------
 */

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

template <class T, int D, int KEYS, bool EASY>
__global__ void GPU_BLOCK(THREADS) attention_mma_dq(attn_call_t a, int tiles) {
    constexpr int LD = attn_mma_ld<D>, QUERIES = 64, N = KEYS / 8;
    typedef gpu_pack<T, 8> pack_t;
    typedef attn_query_t<float> query_t;
    GPU_SHARED(query_t, queries, QUERIES);
    GPU_SHARED(pack_t, k_packs, 2 * KEYS * LD / 8);
    GPU_SHARED(pack_t, v_packs, 2 * KEYS * LD / 8);
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
    attn_interval<KEYS>(queries, QUERIES, &from, &to);
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
        const attn_pairs_t pairs = attn_pairs_of<EASY>(p, query[0].row, query[8].row, at, KEYS);
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

attn_scores_limit_t attn_scores_limit = {(int64_t)1 << 30, 256};

/* Parts of the scratch, and how many heads of keys have a turn; 0: gradients are not kept. */
struct parts_t {
    size_t spans, scores, bytes;
    int64_t tiles, key_groups, turn;
};

static parts_t parts_of(const gradd_attn_t &p) {
    parts_t at = {};
    at.tiles = (p.n_q + SPAN - 1) / SPAN;
    at.key_groups = (p.n_k + 127) / 128 * 8;
    const int64_t heads = p.batch * p.heads, kv_heads = p.batch * p.kv_heads;
    const int64_t groups = at.tiles * (SPAN / 16) * at.key_groups;
    at.spans = (size_t)(heads * at.tiles * SPAN) * sizeof(attn_query_t<float>);
    at.scores = at.spans + ((size_t)(heads * at.tiles) * sizeof(span_t) + 63) / 64 * 64;
    at.bytes = at.scores;
    if (!groups || !kv_heads || (p.d <= 64 && p.d_v <= 64)) return at;
    const int64_t each = p.heads / p.kv_heads * groups * GROUP_WORDS * (int64_t)sizeof(uint32_t);
    const int64_t most = attn_scores_limit.bytes / each;
    if (most < kv_heads && most * (at.key_groups / 8) < attn_scores_limit.blocks) return at;
    const int64_t turns = (kv_heads + most - 1) / most;
    at.turn = (kv_heads + turns - 1) / turns;
    at.bytes += (size_t)(at.turn * each);
    return at;
}

size_t attn_mma_room(const gradd_attn_t *p) {
    return parts_of(*p).bytes;
}

template <class T, int D, int KEYS, int QUERIES, int PART, bool EASY>
static gradd_status_t launch_dkv(const attn_call_t *a, const pass_t &m) {
    const int64_t blocks = m.heads * ((a->p.n_k + KEYS - 1) / KEYS);
    if (!blocks || !(a->p.dk.data || a->p.dv.data || m.scores)) return GRADD_OK;
    GRADD_TRY(attn_grid(blocks));
    GPU_LAUNCH_MORE((room_dkv<D, KEYS, QUERIES>),
                    (attention_mma_dkv<T, D, KEYS, QUERIES, PART, EASY>), (unsigned)blocks,
                    2 * KEYS, *a, m);
    return gpu_launched("FusedAttentionGrad");
}

template <class T, int D, bool EASY>
static gradd_status_t launch_keys(const attn_call_t *a, const pass_t &m) {
    if constexpr (D == 64)
        return launch_dkv<T, 64, 64, 64, 64, EASY>(a, m);
    else if (gpu_shared_most() >= room_dkv<128, 128, 64>)
        return launch_dkv<T, 128, 128, 64, 32, EASY>(a, m);
    else /* a GPU with less shared memory, as of sm_86 and sm_89 */
        return launch_dkv<T, 128, 64, 32, 32, EASY>(a, m);
}

template <class T, int D, int KEYS, bool EASY>
static gradd_status_t launch_dq(const attn_call_t *a) {
    const gradd_attn_t &p = a->p;
    const int64_t tiles = (p.n_q + 63) / 64, blocks = p.batch * p.heads * tiles;
    if (!blocks || !p.dq.data) return GRADD_OK;
    GRADD_TRY(attn_grid(blocks));
    GPU_LAUNCH((attention_mma_dq<T, D, KEYS, EASY>), (unsigned)blocks, THREADS, *a, (int)tiles);
    return gpu_launched("FusedAttentionGrad");
}

template <class T, bool EASY>
static gradd_status_t launch_turns(const attn_call_t *a, pass_t m, const parts_t &parts) {
    const int heads = m.heads;
    m.scores = (uint32_t *)((char *)a->mma_room + parts.scores);
    for (m.from = 0; m.from < heads; m.from += (int)parts.turn) {
        m.heads = heads - m.from < parts.turn ? heads - m.from : (int)parts.turn;
        const int64_t blocks = (int64_t)m.heads * a->group * m.tiles;
        GRADD_TRY((launch_keys<T, 128, EASY>(a, m)));
        GRADD_TRY(attn_grid(blocks));
        GPU_LAUNCH_MORE((room_dq<128>), (attention_mma_dq_kept<T, 128>), (unsigned)blocks, THREADS,
                        *a, m);
        GRADD_TRY(gpu_launched("FusedAttentionGrad"));
    }
    return GRADD_OK;
}

template <class T, int D, int KEYS, bool EASY> static gradd_status_t launch(const attn_call_t *a) {
    const gradd_attn_t &p = a->p;
    const parts_t parts = parts_of(p);
    const int64_t heads = p.batch * p.kv_heads, blocks = p.batch * p.heads * parts.tiles;
    char *const room = (char *)a->mma_room;
    pass_t m = {.queries = (attn_query_t<float> *)room,
                .spans = (span_t *)(room + parts.spans),
                .tiles = (int)parts.tiles,
                .key_groups = (int)parts.key_groups,
                .heads = (int)heads};
    GRADD_TRY(attn_grid(blocks));
    if (blocks) GPU_LAUNCH(attention_mma_queries, (unsigned)blocks, SPAN, *a, m);
    if (!parts.turn || !p.dq.data) {
        GRADD_TRY((launch_keys<T, D, EASY>(a, m)));
        return launch_dq<T, D, KEYS, EASY>(a);
    }
    if constexpr (D == 128) return launch_turns<T, EASY>(a, m, parts);
    return GRADD_OK;
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
