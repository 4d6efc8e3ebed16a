/* Attention by tensor cores: forward. See attention_mma.h.
 *
 * One block per 64 queries, a warp for 16 of them, which walks over tiles of 64 keys with a running
 * softmax. The tile of v is loaded while scores are computed, and the next keys while v is
 * multiplied. */
#include "kernels/cuda/attention/attention_mma.h"

static const int TILE = 64, THREADS = 128, N = TILE / 8;

/* A tile's products become scores, of the lane's row r. */
template <bool EASY>
GPU_FN void score(const attn_call_t &a, const attn_row_t &row, attn_pairs_t pairs, int first, int r,
                  float (&x)[N][4]) {
    if (pairs != ATTN_ANY) {
        const float scale = (float)a.p.scale;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int key = first + n * 8 + attn_t() + e;
                const bool out = pairs == ATTN_RANGE && (key < row.lo || key >= row.hi);
                x[n][2 * r + e] = out ? -INFINITY : x[n][2 * r + e] * scale;
            }
        return;
    }
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float *at = &x[n][2 * r + e];
            const attn_key_t key = attn_key(a, first + n * 8 + attn_t() + e);
            *at = attn_score<EASY>(a.p, row, key, attn_capped<EASY>(a.p, *at));
        }
}

/* Dropped pairs have no weight. Keys 16 apart share a call of the cipher. */
GPU_FN void drop(const attn_call_t &a, const attn_row_t &row, int first, int r, float (&x)[N][4]) {
#pragma unroll
    for (int begin = 0; begin < 4; begin++) {
        attn_words_t words = attn_words();
        const int e = begin % 2;
#pragma unroll
        for (int n = begin / 2; n < N; n += 2) {
            const attn_key_t key = attn_key(a, first + n * 8 + attn_t() + e);
            if (!attn_kept(a.p.drop, row.drop + (uint64_t)key.position, &words))
                x[n][2 * r + e] = 0;
        }
    }
}

/* Scores become weights; returns what earlier terms shrink by. A row is in four lanes. */
GPU_FN float soften(int r, float (&x)[N][4], float *most, float *sum) {
    float best = *most, add = 0;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 2; e++)
            best = x[n][2 * r + e] > best ? x[n][2 * r + e] : best;
#pragma unroll
    for (int lane = 1; lane < 4; lane *= 2) {
        const float other = __shfl_xor_sync(GPU_ALL, best, lane);
        best = other > best ? other : best;
    }
    const float shift = best == -INFINITY ? 0 : best, factor = attn_fast_exp(*most - shift);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float *at = &x[n][2 * r + e];
            *at = attn_fast_exp(*at - shift);
            add += *at;
        }
    *most = best;
    *sum = *sum * factor + add; /* of the lane's own keys until the end */
    return factor;
}

/* Of four lanes. */
GPU_FN float gather(float sum) {
    sum += __shfl_xor_sync(GPU_ALL, sum, 1);
    return sum + __shfl_xor_sync(GPU_ALL, sum, 2);
}

template <class T, int D, bool EASY>
__global__ void GPU_BLOCK(THREADS) attention_mma(attn_call_t a, int tiles) {
    constexpr int LD = attn_mma_ld<D>;
    typedef gpu_pack<T, 8> pack_t;
    GPU_SHARED(attn_row_t, rows, TILE);
    GPU_SHARED(pack_t, k_packs, TILE * LD / 8);
    GPU_SHARED(pack_t, v_packs, TILE * LD / 8);
    GPU_SHARED(int, again, 1);
    T *const k_tile = (T *)k_packs, *const v_tile = (T *)v_packs;
    const gradd_attn_t &p = a.p;
    /* a mask of the past leaves most to the last queries: they begin */
    const int heads = (int)gridDim.x / tiles, head = (int)blockIdx.x % heads;
    const int64_t first = (tiles - 1 - (int)blockIdx.x / heads) * (int64_t)TILE;
    const int b = head / a.heads, h = head % a.heads, kv = h / a.group;
    const int d = (int)p.d, d_v = (int)p.d_v;
    const float sink = p.sinks ? ((const float *)p.sinks)[h] : -INFINITY;
    const attn_row_t *const row = rows + attn_warp() * 16 + attn_g();
    uint32_t q[D / 16][4];
    float y[D / 8][4], x[N][4], most[2], sum[2];
    attn_left<D>(q, attn_rows_of<T>(p.q, b, h, first, p.n_q), d);
    if (threadIdx.x < TILE) rows[threadIdx.x] = attn_row(a, b, h, first + threadIdx.x);
    __syncthreads();
    for (int turn = 0; turn < 2; turn++) {
        int from, to;
        attn_interval<TILE>(rows, TILE, &from, &to);
        attn_clear(y);
        most[0] = most[1] = sink;
        sum[0] = sum[1] = sink > -INFINITY && attn_t() == 0 ? 1 : 0;
        if (from < to)
            attn_copy<D, TILE, THREADS>(k_tile, attn_rows_of<T>(p.k, b, kv, from, p.n_k), d);
        for (int at = from; at < to; at += TILE) {
            gpu_copies_wait();
            __syncthreads(); /* the keys have arrived, and v is no longer read */
            attn_copy<D, TILE, THREADS>(v_tile, attn_rows_of<T>(p.v, b, kv, at, p.n_k), d_v);
            attn_clear(x);
#pragma unroll
            for (int k = 0; k < D / 16; k++)
                if (k * 16 < d) attn_mma_step<D>(x, q[k], k_tile, k * 16);
            const attn_pairs_t pairs = attn_pairs_of<EASY>(p, row[0], row[8], at, TILE);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                score<EASY>(a, row[8 * r], pairs, at, r, x);
                const float factor = soften(r, x, &most[r], &sum[r]);
#pragma unroll
                for (int n = 0; n < D / 8; n++) {
                    y[n][2 * r] *= factor;
                    y[n][2 * r + 1] *= factor;
                }
                if (!EASY && p.drop.active) drop(a, row[8 * r], at, r, x);
            }
            gpu_copies_wait();
            __syncthreads();
            if (at + TILE < to)
                attn_copy<D, TILE, THREADS>(k_tile, attn_rows_of<T>(p.k, b, kv, at + TILE, p.n_k),
                                            d);
            attn_mma_add<D>(y, x, v_tile, d_v);
        }
        if (turn || !p.mask.data) break;
        if (threadIdx.x == 0) *again = 0;
        __syncthreads();
        for (int r = 0; r < 2; r++)
            if (attn_t() == 0 && attn_row_turns_rare(a, row[8 * r], most[r])) {
                attn_row_rare(p, &rows[attn_warp() * 16 + attn_g() + 8 * r]);
                *again = 1;
            }
        __syncthreads();
        if (!*again) break;
    }
    float factor[2];
    for (int r = 0; r < 2; r++) {
        const bool zero = row[8 * r].kind == ATTN_DEAD && p.zero;
        const int64_t query = first + attn_warp() * 16 + attn_g() + 8 * r;
        const float all = gather(sum[r]);
        factor[r] = zero ? 0 : (p.drop.active ? (float)p.drop.scale : 1) / all;
        if (!p.stats || attn_t() || query >= p.n_q) continue;
        float *stats = (float *)p.stats + (int64_t)head * 2 * p.n_q + query;
        stats[0] = zero && !p.sunk ? 0 : most[r];
        stats[p.n_q] = zero ? 0 : (float)log((double)all);
    }
    attn_mma_put<D>(attn_rows_of<T>(p.y, b, h, first, p.n_q), d_v, y, factor);
}

/* ---- launches -------------------------------------------------------------------------------- */

static bool fits(int64_t d) {
    return d % 16 == 0 && d >= 32 && d <= 128;
}

bool attn_mma_takes(const gradd_attn_t *p) {
    return (p->dtype == GRADD_DT_BF16 || p->dtype == GRADD_DT_F16) && fits(p->d) && fits(p->d_v);
}

template <class T, int D> static void launch(const attn_call_t *a, int64_t blocks, int64_t tiles) {
    if (attn_is_easy(a->p))
        GPU_LAUNCH((attention_mma<T, D, true>), (unsigned)blocks, THREADS, *a, (int)tiles);
    else
        GPU_LAUNCH((attention_mma<T, D, false>), (unsigned)blocks, THREADS, *a, (int)tiles);
}

gradd_status_t attn_mma_forward(const attn_call_t *a) {
    const gradd_attn_t &p = a->p;
    const int64_t tiles = (p.n_q + TILE - 1) / TILE, blocks = p.batch * p.heads * tiles;
    if (!blocks) return GRADD_OK;
    const void *const ends[] = {p.q.data, p.k.data, p.v.data, p.y.data};
    for (const void *at : ends)
        if (!gpu_aligned(at, 16)) return attn_forward(a);
    GRADD_TRY(attn_grid(blocks));
    return gpu_switch(gpu_types<gradd_bf16_t, gradd_f16_t>(), p.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        if (p.d <= 64 && p.d_v <= 64)
            launch<T, 64>(a, blocks, tiles);
        else
            launch<T, 128>(a, blocks, tiles);
        return gpu_launched("FusedAttention");
    });
}
