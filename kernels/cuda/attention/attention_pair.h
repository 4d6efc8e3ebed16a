/* One pair of query and key in the gradient of attention. See attention_gpu.h. */
#ifndef GRADD_KERNELS_CUDA_ATTENTION_ATTENTION_PAIR_H
#define GRADD_KERNELS_CUDA_ATTENTION_ATTENTION_PAIR_H

#include "kernels/cuda/attention/attention_gpu.h"

/* The data of a query. */
template <class A> struct attn_query_t {
    attn_row_t row;
    A most, log, delta; /* of the softmax; sum of dy y */
};

template <class A> GPU_FN const attn_row_t &attn_row_in(const attn_query_t<A> &q) {
    return q.row;
}

template <class A>
GPU_FN attn_query_t<A> attn_query(const attn_call_t &a, int64_t b, int64_t h, int64_t i) {
    const gradd_attn_t &p = a.p;
    attn_query_t<A> q = {attn_row(a, b, h, i), 0, 0, 0};
    if (i >= p.n_q) return q;
    const int64_t head = b * p.heads + h;
    const A *stats = (const A *)p.stats + head * 2 * p.n_q + i;
    q.most = stats[0];
    q.log = stats[p.n_q];
    q.delta = ((const A *)a.delta)[head * p.n_q + i];
    if (attn_row_turns_rare(a, q.row, q.most)) attn_row_rare(p, &q.row);
    return q;
}

/* x and z are the products of a pair; they become its probability, dropped, and the gradient of its
 * product or, with BIAS, of its bias. */
template <bool BIAS, bool EASY = false, class A>
GPU_FN void attn_pair(const attn_call_t &a, const attn_query_t<A> &q, const attn_key_t &key,
                      attn_words_t *words, A *x, A *z) {
    const gradd_attn_t &p = a.p;
    const A capped = attn_capped<EASY>(p, *x), score = attn_score<EASY>(p, q.row, key, capped);
    const A prob = attn_exp((score - q.most) - q.log);
    const bool kept = EASY || attn_kept(p.drop, q.row.drop + (uint64_t)key.position, words);
    const A scale = !kept ? (A)0 : !EASY && p.drop.active ? (A)p.drop.scale : (A)1;
    const attn_dscore_t<A> left =
        attn_dscore<EASY>(p, q.row, key, capped, prob * ((kept ? *z * scale : 0) - q.delta));
    *x = kept ? prob * scale : 0;
    *z = BIAS ? left.bias : left.product;
}

#endif
