/* The gradient of attention's bias among live rows. See attention_gpu.h.
 *
 * Lists say which element of the bias a pair of rows has, so sums cannot go along tiles. There is
 * one block per query and head. It owns the gradient of its query's row of the bias if the query is
 * the first with that row: it adds up all queries with the same row, in their order. A list may
 * name rows twice (those that fill it up to its size), and sequences may share a bias. */
#include "kernels/cuda/attention/attention_gpu.h"

static const int THREADS = 128;

template <class A> __global__ void GPU_BLOCK(THREADS) clear(A *to, int64_t n) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all)
        to[i] = 0;
}

template <class T> GPU_FN gpu_real<T> dot(const T *x, const T *y, int64_t n) {
    gpu_real<T> sum = 0;
#pragma unroll 4
    for (int64_t c = 0; c < n; c++)
        sum = attn_fma(gpu_get(x[c]), gpu_get(y[c]), sum);
    return sum;
}

/* The gradient of one pair's score for the bias. */
template <class T>
GPU_FN gpu_real<T> dbias_of(const attn_call_t &a, int h, int64_t i, const attn_row_t &row,
                            const attn_key_t &key) {
    typedef gpu_real<T> A;
    const gradd_attn_t &p = a.p;
    const int kv = h / a.group;
    const T *q = attn_rows_of<T>(p.q, 0, h, i, p.n_q).at;
    const T *dy = attn_rows_of<T>(p.dy, 0, h, i, p.n_q).at;
    const T *k = attn_rows_of<T>(p.k, 0, kv, key.at, p.n_k).at;
    const T *v = attn_rows_of<T>(p.v, 0, kv, key.at, p.n_k).at;
    const A *stats = (const A *)p.stats + h * 2 * p.n_q + i;
    const A score = attn_score(p, row, key, attn_capped(p, dot(q, k, p.d)));
    const A prob = attn_exp((score - stats[0]) - stats[p.n_q]);
    attn_words_t words = attn_words();
    A dp = 0;
    if (attn_kept(p.drop, row.drop + (uint64_t)key.position, &words))
        dp = dot(dy, v, p.d_v) * (p.drop.active ? (A)p.drop.scale : (A)1);
    return prob * (dp - ((const A *)a.delta)[h * p.n_q + i]);
}

/* Adds the pairs of one query, THREADS keys at a time. Of keys with the same place in the bias the
 * first adds all. */
template <class T>
GPU_FN void add_query(const attn_call_t &a, int h, int64_t i, gpu_real<T> *value, int32_t *place) {
    typedef gpu_real<T> A;
    const gradd_attn_t &p = a.p;
    const attn_row_t row = attn_row(a, 0, h, i);
    A *to = (A *)p.dbias + row.bias;
    for (int64_t first = row.lo; first < row.hi; first += THREADS) {
        const int64_t j = first + threadIdx.x;
        A mine = 0;
        int32_t at = -1;
        if (j < row.hi) {
            const attn_key_t key = attn_key(a, j);
            if (attn_is_biased(row, key)) {
                mine = dbias_of<T>(a, h, i, row, key);
                at = p.bias.col ? key.position : 0;
            }
        }
        __syncthreads();
        value[threadIdx.x] = mine;
        place[threadIdx.x] = at;
        __syncthreads();
        bool is_first = at >= 0;
        for (int k = 0; is_first && k < (int)threadIdx.x; k++)
            is_first = place[k] != at;
        if (!is_first) continue;
        for (int k = threadIdx.x + 1; k < THREADS; k++)
            if (place[k] == at) mine += value[k];
        to[at] += mine;
    }
}

template <class T> __global__ void GPU_BLOCK(THREADS, 4) attention_live_dbias(attn_call_t a) {
    typedef gpu_real<T> A;
    GPU_SHARED(A, value, THREADS);
    GPU_SHARED(int32_t, place, THREADS);
    GPU_SHARED(int, same, THREADS);
    const gradd_attn_t &p = a.p;
    const int heads = p.bias.head ? a.heads : 1, mine = blockIdx.x / heads;
    const attn_position_t me = a.q_rows[mine];
    const int from = p.bias.head ? blockIdx.x % heads : 0;
    const int to = p.bias.head ? from + 1 : a.heads;
    for (int64_t first = 0; first < p.n_q; first += THREADS) {
        const int64_t i = first + threadIdx.x;
        const attn_position_t other = i < p.n_q ? a.q_rows[i] : me;
        __syncthreads();
        same[threadIdx.x] = i < p.n_q && (!p.bias.batch || other.sequence == me.sequence) &&
                            (!p.bias.row || other.position == me.position);
        __syncthreads();
        for (int k = 0; k < THREADS; k++) {
            if (!same[k]) continue;
            if (first + k < mine) return; /* another block's */
            for (int h = from; h < to; h++)
                add_query<T>(a, h, first + k, value, place);
        }
    }
}

gradd_status_t attn_backward_live_bias(const attn_call_t *a) {
    const gradd_attn_t &p = a->p;
    const int64_t blocks = p.n_q * (p.bias.head ? p.heads : 1);
    return gpu_switch(gpu_floats(), p.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        typedef gpu_real<T> A;
        if (a->bias_count)
            GPU_LAUNCH((clear<A>), gpu_blocks(a->bias_count, THREADS), THREADS, (A *)p.dbias,
                       a->bias_count);
        if (!blocks) return gpu_launched("FusedAttentionGrad");
        GRADD_TRY(attn_grid(blocks));
        GPU_LAUNCH((attention_live_dbias<T>), (unsigned)blocks, THREADS, *a);
        return gpu_launched("FusedAttentionGrad");
    });
}
