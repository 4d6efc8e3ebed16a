/* Numbers sorted with their positions: a stable radix sort, the same bits in any order of threads.
 *
 * gpu_sort_t<K> holds n keys and fills `at` with their positions; keys that are equal stay in the
 * order of positions. K is uint32_t, or uint64_t where there are more numbers than that. Each digit
 * takes three kernels: they count the keys of each digit per tile, find where the keys of a digit
 * and a tile begin, and move them. There are no atomics, except of counters whose order does not
 * matter.
 */
#ifndef GRADD_KERNELS_CUDA_INDEX_SORT_H
#define GRADD_KERNELS_CUDA_INDEX_SORT_H

#include "kernels/cuda/index/row_groups.h"

enum {
    GPU_SORT_BITS = 8,
    GPU_SORT_DIGITS = 1 << GPU_SORT_BITS, /* as many as threads of a block */
    GPU_SORT_ROUNDS = 8,
    GPU_SORT_TILE = GPU_SORT_DIGITS * GPU_SORT_ROUNDS,
    GPU_SORT_WARPS = GPU_SORT_DIGITS / GPU_WARP,
};

template <class K> struct gpu_sort_t {
    K *key, *at; /* given, and at the end the sorted ones */
    K *other_key, *other_at;
    K *count, *total; /* by digit and tile; by digit */
    int64_t n;
};

template <class K> gpu_sort_t<K> gpu_sort_room(gpu_room *room, int64_t n) {
    gpu_sort_t<K> s = {};
    s.n = n;
    s.key = room->take<K>(n);
    s.at = room->take<K>(n);
    s.other_key = room->take<K>(n);
    s.other_at = room->take<K>(n);
    s.count = room->take<K>((n + GPU_SORT_TILE - 1) / GPU_SORT_TILE * GPU_SORT_DIGITS);
    s.total = room->take<K>(GPU_SORT_DIGITS);
    return s;
}

/* Sum of those of threads in front, in a block of GPU_SORT_DIGITS; *all of all threads. */
template <class K> GPU_FN K gpu_sort_before(K mine, K *all) {
    GPU_SHARED(K, warp, GPU_SORT_WARPS);
    const int lane = (int)threadIdx.x % GPU_WARP;
    K sum = mine, before = 0, whole = 0;
#pragma unroll
    for (int n = 1; n < GPU_WARP; n *= 2) {
        const K lower = __shfl_up_sync(GPU_ALL, sum, n);
        if (lane >= n) sum += lower;
    }
    __syncthreads(); /* the previous call has been read */
    if (lane == GPU_WARP - 1) warp[threadIdx.x / GPU_WARP] = sum;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < GPU_SORT_WARPS; w++) {
        if (w < (int)threadIdx.x / GPU_WARP) before += warp[w];
        whole += warp[w];
    }
    *all = whole;
    return before + sum - mine;
}

template <class K>
__global__ void GPU_BLOCK(GPU_SORT_DIGITS)
    gpu_sort_count(gpu_sort_t<K> s, int shift, int64_t tiles) {
    GPU_SHARED(uint32_t, found, GPU_SORT_DIGITS);
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        found[threadIdx.x] = 0;
        __syncthreads();
        for (int k = 0; k < GPU_SORT_ROUNDS; k++) {
            const int64_t i = tile * GPU_SORT_TILE + k * GPU_SORT_DIGITS + threadIdx.x;
            if (i < s.n) atomicAdd(&found[s.key[i] >> shift & (GPU_SORT_DIGITS - 1)], 1u);
        }
        __syncthreads();
        s.count[threadIdx.x * tiles + tile] = found[threadIdx.x];
        __syncthreads();
    }
}

/* A block per digit that occurs: counts of its tiles become where they begin among those of the
 * digit. */
template <class K>
__global__ void GPU_BLOCK(GPU_SORT_DIGITS) gpu_sort_scan(gpu_sort_t<K> s, int64_t tiles) {
    K *count = s.count + blockIdx.x * tiles, carry = 0;
    for (int64_t first = 0; first < tiles; first += GPU_SORT_DIGITS) {
        const int64_t tile = first + threadIdx.x;
        K all;
        const K before = gpu_sort_before(tile < tiles ? count[tile] : (K)0, &all);
        if (tile < tiles) count[tile] = carry + before;
        carry += all;
    }
    if (!threadIdx.x) s.total[blockIdx.x] = carry;
}

/* Lanes whose digit is the same; 0 of those without one. */
GPU_FN uint32_t gpu_sort_peers(uint32_t digit, bool valid, int bits) {
    uint32_t peers = __ballot_sync(GPU_ALL, valid);
    for (int b = 0; b < bits; b++) {
        const bool set = digit >> b & 1;
        const uint32_t lanes = __ballot_sync(GPU_ALL, set);
        peers &= set ? lanes : ~lanes;
    }
    return valid ? peers : 0;
}

/* A warp takes its part of the tile in order, 32 keys at a time; `start` counts what it has had of
 * each digit, and then becomes where these go. */
template <class K>
__global__ void GPU_BLOCK(GPU_SORT_DIGITS)
    gpu_sort_move(gpu_sort_t<K> s, int shift, int bits, int64_t tiles) {
    GPU_SHARED(K, start, GPU_SORT_WARPS * GPU_SORT_DIGITS);
    const int lane = (int)threadIdx.x % GPU_WARP, warp = (int)threadIdx.x / GPU_WARP;
    const uint32_t below = ((uint32_t)1 << lane) - 1;
    K *const mine = start + warp * GPU_SORT_DIGITS, all;
    const bool occurs = (int)threadIdx.x >> bits == 0;
    const K base = gpu_sort_before(occurs ? s.total[threadIdx.x] : (K)0, &all);
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int64_t first = tile * GPU_SORT_TILE + warp * GPU_WARP * GPU_SORT_ROUNDS + lane;
        K key[GPU_SORT_ROUNDS];
        uint32_t before[GPU_SORT_ROUNDS];
        for (int d = lane; d < GPU_SORT_DIGITS; d += GPU_WARP)
            mine[d] = 0;
        __syncwarp();
#pragma unroll
        for (int k = 0; k < GPU_SORT_ROUNDS; k++) {
            const bool valid = first + k * GPU_WARP < s.n;
            key[k] = valid ? s.key[first + k * GPU_WARP] : (K)0;
            const uint32_t digit = (uint32_t)(key[k] >> shift) & (GPU_SORT_DIGITS - 1);
            const uint32_t peers = gpu_sort_peers(digit, valid, bits);
            before[k] = (uint32_t)mine[digit] + (uint32_t)__popc(peers & below);
            __syncwarp();
            if (valid && !(peers & below)) mine[digit] += (K)__popc(peers);
            __syncwarp();
        }
        __syncthreads();
        K next = base + s.count[threadIdx.x * tiles + tile];
#pragma unroll
        for (int w = 0; w < GPU_SORT_WARPS; w++) {
            const K n = start[w * GPU_SORT_DIGITS + threadIdx.x];
            start[w * GPU_SORT_DIGITS + threadIdx.x] = next;
            next += n;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < GPU_SORT_ROUNDS; k++) {
            const int64_t i = first + k * GPU_WARP;
            if (i >= s.n) continue;
            const K to = mine[key[k] >> shift & (GPU_SORT_DIGITS - 1)] + before[k];
            s.other_key[to] = key[k];
            s.other_at[to] = shift ? s.at[i] : (K)i;
        }
        __syncthreads();
    }
}

/* Keys are at most `largest`. */
template <class K> gradd_status_t gpu_sort(const char *what, gpu_sort_t<K> *s, uint64_t largest) {
    const int64_t tiles = (s->n + GPU_SORT_TILE - 1) / GPU_SORT_TILE;
    const unsigned blocks = gpu_blocks(tiles, 1);
    int shift = 0;
    do {
        int bits = 0;
        while (bits < GPU_SORT_BITS && largest >> shift >> bits)
            bits++;
        GPU_LAUNCH((gpu_sort_count<K>), blocks, GPU_SORT_DIGITS, *s, shift, tiles);
        GPU_LAUNCH((gpu_sort_scan<K>), 1u << bits, GPU_SORT_DIGITS, *s, tiles);
        GPU_LAUNCH((gpu_sort_move<K>), blocks, GPU_SORT_DIGITS, *s, shift, bits, tiles);
        K *const key = s->key, *const at = s->at;
        s->key = s->other_key, s->at = s->other_at;
        s->other_key = key, s->other_at = at;
        shift += GPU_SORT_BITS;
    } while (shift < 64 && largest >> shift);
    return gpu_launched(what);
}

#endif
