/* Attention on a GPU for all types and sizes: forward. See attention_gpu.h.
 *
 * One block per tile of queries and chunk of y's columns. It walks over the tiles of keys that its
 * queries look at, with a running softmax. If some query turns out to be rare, which its largest
 * score says, the block starts over with all keys. */
#include "kernels/cuda/attention/attention_gpu.h"

/* A tile's scores become weights; largest scores and sums go on. Returns what earlier terms shrink
 * by. One query is in 16 neighbouring threads. */
template <class A, int R> GPU_FN A soften(A (&x)[R], A *most, A *sum) {
    A best = *most, add = 0;
#pragma unroll
    for (int c = 0; c < R; c++)
        best = x[c] > best ? x[c] : best;
#pragma unroll
    for (int lane = ATTN_SIDE / 2; lane; lane /= 2) {
        const A other = __shfl_xor_sync(GPU_ALL, best, lane);
        best = other > best ? other : best;
    }
    const A shift = best == -(A)INFINITY ? 0 : best, factor = attn_exp(*most - shift);
#pragma unroll
    for (int c = 0; c < R; c++) {
        x[c] = attn_exp(x[c] - shift);
        add += x[c];
    }
#pragma unroll
    for (int lane = ATTN_SIDE / 2; lane; lane /= 2)
        add += __shfl_xor_sync(GPU_ALL, add, lane);
    *most = best;
    *sum = *sum * factor + add;
    return factor;
}

/* Running softmax of a thread's queries. */
template <class A> struct softmax_t {
    A most[attn_r<A>], sum[attn_r<A>];
};

/* Weights of a tile, from products; of dropped pairs they are zero, but in the sum. */
template <class A, int R, int N>
GPU_FN void weigh(const attn_call_t &a, const attn_row_t *row, int first, A (&x)[R][R],
                  softmax_t<A> *s, A (&y)[R][N]) {
    attn_key_t key[R];
#pragma unroll
    for (int c = 0; c < R; c++)
        key[c] = attn_key(a, first + attn_tx() + ATTN_SIDE * c);
#pragma unroll
    for (int r = 0; r < R; r++) {
        attn_words_t words = attn_words();
#pragma unroll
        for (int c = 0; c < R; c++)
            x[r][c] = attn_score(a.p, row[r], key[c], attn_capped(a.p, x[r][c]));
        const A factor = soften(x[r], &s->most[r], &s->sum[r]);
#pragma unroll
        for (int c = 0; c < N; c++)
            y[r][c] *= factor;
#pragma unroll
        for (int c = 0; a.p.drop.active && c < R; c++)
            if (!attn_kept(a.p.drop, row[r].drop + (uint64_t)key[c].position, &words)) x[r][c] = 0;
    }
}

template <class A, int R, int N> GPU_FN void start(A sink, softmax_t<A> *s, A (&y)[R][N]) {
#pragma unroll
    for (int r = 0; r < R; r++) {
        s->most[r] = sink;
        s->sum[r] = sink > -(A)INFINITY ? 1 : 0;
#pragma unroll
        for (int c = 0; c < N; c++)
            y[r][c] = 0;
    }
}

/* Where a thread's part of a row of y goes. */
struct to_t {
    int head;
    int64_t query, column;
};

template <class T, class A, int N>
GPU_FN void put(const attn_call_t &a, const attn_row_t *row, to_t at, A most, A sum, const A *y) {
    const gradd_attn_t &p = a.p;
    const bool zero = row->kind == ATTN_DEAD && p.zero;
    const A factor = zero ? 0 : (p.drop.active ? (A)p.drop.scale : (A)1) / sum;
    T *to = (T *)p.y.data + at.head / a.heads * p.y.batch + at.head % a.heads * p.y.head +
            at.query * p.y.row;
#pragma unroll
    for (int c = 0; c < N; c++) {
        const int64_t col = at.column + attn_column<A>(c);
        if (col < p.d_v) gpu_put(&to[col], y[c] * factor);
    }
    if (!p.stats || at.column || attn_tx()) return;
    A *stats = (A *)p.stats + at.head * 2 * p.n_q + at.query;
    stats[0] = zero && !p.sunk ? 0 : most;
    stats[p.n_q] = zero ? 0 : (A)log((double)sum);
}

template <class T, int N>
__global__ void GPU_BLOCK(ATTN_THREADS) attention_forward(attn_call_t a, int tiles, int chunks) {
    typedef gpu_real<T> A;
    constexpr int R = attn_r<A>, TILE = attn_tile<A>, LD = attn_ld<A>, ROOM = attn_room<A, N>;
    typedef gpu_pack<A, R> pack_t;
    GPU_SHARED(attn_row_t, row, TILE);
    GPU_SHARED(pack_t, room_q, ATTN_CHUNK * LD / R);
    GPU_SHARED(pack_t, room_k, ROOM / R);
    GPU_SHARED(pack_t, weights, TILE * LD / R);
    GPU_SHARED(int, again, 1);
    const gradd_attn_t &p = a.p;
    const int64_t column = blockIdx.x % chunks * (int64_t)(ATTN_SIDE * N);
    /* a mask of the past leaves most to the last queries: they begin */
    const int64_t first = (tiles - 1 - (int)(blockIdx.x / chunks % tiles)) * (int64_t)TILE;
    const int head = blockIdx.x / chunks / tiles, b = head / a.heads, h = head % a.heads;
    const int kv = h / a.group;
    const attn_rows<T> q = attn_rows_of<T>(p.q, b, h, first, p.n_q);
    const A sink = p.sinks ? ((const A *)p.sinks)[h] : -(A)INFINITY;
    softmax_t<A> s;
    A x[R][R], y[R][N];
    if (threadIdx.x < TILE) row[threadIdx.x] = attn_row(a, b, h, first + threadIdx.x);
    __syncthreads();
    for (int turn = 0; turn < 2; turn++) {
        int from, to;
        attn_interval<TILE>(row, TILE, &from, &to);
        start(sink, &s, y);
        for (int at = from; at < to; at += TILE) {
            attn_products(x, q, attn_rows_of<T>(p.k, b, kv, at, p.n_k), (int)p.d, (A *)room_q,
                          (A *)room_k);
            weigh(a, row + attn_ty() * R, at, x, &s, y);
#pragma unroll
            for (int c = 0; c < R; c++) {
                pack_t w;
#pragma unroll
                for (int r = 0; r < R; r++)
                    w.v[r] = x[r][c];
                weights[((attn_tx() + ATTN_SIDE * c) * LD) / R + attn_ty()] = w;
            }
            attn_add_product(y, (const A *)weights, attn_rows_of<T>(p.v, b, kv, at, p.n_k), column,
                             p.d_v, (A *)room_k);
        }
        if (turn || !p.mask.data) break;
        if (threadIdx.x == 0) *again = 0;
        __syncthreads();
        for (int r = 0; r < R; r++) {
            attn_row_t *mine = &row[attn_ty() * R + r];
            if (attn_tx() || !attn_row_turns_rare(a, *mine, s.most[r])) continue;
            attn_row_rare(p, mine);
            *again = 1;
        }
        __syncthreads();
        if (!*again) break;
    }
    for (int r = 0; r < R; r++) {
        const int at = attn_ty() * R + r;
        if (first + at < p.n_q)
            put<T, A, N>(a, &row[at], {head, first + at, column}, s.most[r], s.sum[r], y[r]);
    }
}

gradd_status_t attn_forward(const attn_call_t *a) {
    const gradd_attn_t &p = a->p;
    return gpu_switch(gpu_floats(), p.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        typedef gpu_real<T> A;
        const int64_t tiles = (p.n_q + attn_tile<A> - 1) / attn_tile<A>;
        const bool wide = sizeof(A) == 4 && p.d_v > 4 * ATTN_SIDE;
        const int64_t width = wide ? 8 * ATTN_SIDE : 4 * ATTN_SIDE;
        const int64_t chunks = p.d_v ? (p.d_v + width - 1) / width : 1;
        const int64_t blocks = p.batch * p.heads * tiles * chunks;
        if (!blocks) return GRADD_OK;
        GRADD_TRY(attn_grid(blocks));
        if constexpr (sizeof(A) == 4)
            if (wide) {
                GPU_LAUNCH((attention_forward<T, 8>), (unsigned)blocks, ATTN_THREADS, *a,
                           (int)tiles, (int)chunks);
                return gpu_launched("FusedAttention");
            }
        GPU_LAUNCH((attention_forward<T, 4>), (unsigned)blocks, ATTN_THREADS, *a, (int)tiles,
                   (int)chunks);
        return gpu_launched("FusedAttention");
    });
}
