/* Choosing and ordering entries by the threads of a block, with the swaps of kernels/math/select.h.
 *
 * The swaps of a partition are known at once: its left side stops at the entries that are not
 * smaller than the pivot, its right side at those that are not larger, and the i-th of the one is
 * swapped with the i-th of the other until they meet. So the whole block partitions a long range,
 * and a single thread a short one. The final insertion sort never crosses a border between ranges,
 * so each thread sorts its own.
 */
#ifndef GRADD_KERNELS_CUDA_ROW_ORDER_H
#define GRADD_KERNELS_CUDA_ROW_ORDER_H

#include "kernels/cuda/gpu.h"
#include "kernels/cuda/row/row_teams.h"
#include "kernels/math/select.h"

enum { GPU_ORDER_THREADS = 256, GPU_ORDER_ALONE = 256, GPU_ORDER_WAITS = 32 };

/* As many registers as a thread wants: these are long, and few run at once. */
#ifdef __CUDACC__
#define GPU_ORDER_BLOCK __launch_bounds__(GPU_ORDER_THREADS, 1)
#else
#define GPU_ORDER_BLOCK
#endif

/* Bits of the lanes in front. */
GPU_FN uint32_t gpu_lanes_before() {
    return (1u << threadIdx.x % GPU_WARP) - 1;
}

/* Where the two sides stop, in their order; room for n each. */
typedef struct gpu_stops_s {
    int32_t *left, *right;
} gpu_stops_t;

/* Fills the lists and says how many each of them has. */
GPU_FN void gpu_find_stops(const gradd_entry_t *q, int n, gpu_stops_t stops, int *out_lefts,
                           int *out_rights) {
    constexpr int WARPS = GPU_ORDER_THREADS / GPU_WARP;
    GPU_SHARED(int, lefts, WARPS);
    GPU_SHARED(int, rights, WARPS);
    const int lane = (int)threadIdx.x % GPU_WARP, warp = (int)threadIdx.x / GPU_WARP;
    const int share = (n + GPU_ORDER_THREADS - 1) / GPU_ORDER_THREADS * GPU_WARP;
    const int first = warp * share, end = first + share < n ? first + share : n;
    const int64_t pivot = q[0].key;
    int left = 0, right = 0; /* stops of the warps in front, and from here on */
    for (int i = first; i < end; i += GPU_WARP) {
        const int at = i + lane;
        const bool there = at && at < end;
        left += __popc(__ballot_sync(GPU_ALL, there && q[at].key >= pivot));
        right += __popc(__ballot_sync(GPU_ALL, there && q[at].key <= pivot));
    }
    if (!lane) lefts[warp] = left, rights[warp] = right;
    __syncthreads();
    left = right = *out_lefts = *out_rights = 0;
    for (int w = 0; w < WARPS; w++) {
        if (w < warp) left += lefts[w];
        if (w >= warp) right += rights[w];
        *out_lefts += lefts[w], *out_rights += rights[w];
    }
    for (int i = first; i < end; i += GPU_WARP) {
        const int at = i + lane;
        const bool there = at && at < end;
        const bool is_left = there && q[at].key >= pivot, is_right = there && q[at].key <= pivot;
        const uint32_t l = __ballot_sync(GPU_ALL, is_left), r = __ballot_sync(GPU_ALL, is_right);
        const uint32_t before = gpu_lanes_before();
        if (is_left) stops.left[left + __popc(l & before)] = at;
        if (is_right) stops.right[right - __popc(r & before) - 1] = at;
        left += __popc(l), right -= __popc(r);
    }
}

/* gradd_entry_partition by all threads of a block. */
GPU_FN int gpu_partition(gradd_entry_t *q, int n, gpu_stops_t stops) {
    if (!threadIdx.x) gradd_entry_swap(q, gradd_entry_median(q + 1, q + n / 2, q + n - 1));
    __syncthreads();
    int lefts, rights, mine = 0;
    gpu_find_stops(q, n, stops, &lefts, &rights);
    __syncthreads();
    for (int i = (int)threadIdx.x; i < lefts && i < rights; i += GPU_ORDER_THREADS) {
        const int left = stops.left[i], right = stops.right[i];
        if (left >= right) break;
        gradd_entry_swap(q + left, q + right);
        mine++;
    }
    const int swaps = gpu_team_sum<GPU_ORDER_THREADS>(mine);
    /* The left side stops at the next of its own, or at what has just come from there. */
    int cut = n;
    if (swaps < lefts) cut = stops.left[swaps];
    if (swaps && stops.right[swaps - 1] < cut) cut = stops.right[swaps - 1];
    __syncthreads(); /* the lists have been read */
    return cut;
}

GPU_FN void gpu_select_nth(gradd_entry_t *q, int n, int nth, gpu_stops_t stops) {
    int depth = gradd_sort_depth(n);
    for (; n > GPU_ORDER_ALONE && depth; depth--) {
        const int cut = gpu_partition(q, n, stops);
        if (cut > nth)
            n = cut;
        else
            q += cut, n -= cut, nth -= cut;
    }
    if (!threadIdx.x) gradd_select_on(q, n, nth, depth);
    __syncthreads();
}

typedef struct gpu_range_s {
    int from, n, depth;
} gpu_range_t;

GPU_FN void gpu_sort_entries(gradd_entry_t *q, int n, gpu_stops_t stops) {
    GPU_SHARED(gpu_range_t, waiting, GPU_ORDER_WAITS); /* the longer ones: few */
    GPU_SHARED(gpu_range_t, alone, GPU_ORDER_THREADS);
    const bool writes = !threadIdx.x;
    gpu_range_t now = {0, n, gradd_sort_depth(n)};
    int waits = 0, alones = 0;
    for (;;) {
        if (now.n > GPU_ORDER_ALONE && now.depth) {
            const int cut = gpu_partition(q + now.from, now.n, stops);
            const gpu_range_t left = {now.from, cut, now.depth - 1};
            const gpu_range_t right = {now.from + cut, now.n - cut, now.depth - 1};
            const bool left_waits = left.n > right.n;
            if (writes) waiting[waits] = left_waits ? left : right;
            waits++;
            now = left_waits ? right : left;
            continue;
        }
        if (writes) alone[alones] = now;
        alones++;
        __syncthreads();
        if (alones == GPU_ORDER_THREADS || !waits) {
            if ((int)threadIdx.x < alones) {
                const gpu_range_t mine = alone[threadIdx.x];
                gradd_sort_on(q + mine.from, mine.n, mine.depth);
            }
            alones = 0;
        }
        if (!waits) break;
        now = waiting[--waits];
        __syncthreads(); /* what was read may be written again */
    }
    __syncthreads();
}

#endif
