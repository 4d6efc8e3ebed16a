/* Choosing and ordering entries by their keys, with ties as PyTorch's CPU kernels break them.
 *
 * None of these is stable: which of several equal keys comes first follows from the swaps that the
 * algorithm makes, so the algorithm is the contract. torch.topk and torch.sort are built on
 * std::partial_sort, std::nth_element and std::sort of GCC's C++ library; the functions here make
 * the same comparisons and the same swaps: a heap whose sift goes down to a leaf before it comes
 * up, introselect and introsort around the median of three, insertion at the end. A change of any
 * of them sends gradients to other elements; tests/python/values/test_ties.py compares with torch.
 *
 * Keys are integers in which the wanted order is rising order (gradd_sort_key_f32 and its like):
 * NaN is above every number and equal to NaN, -0 equals 0, and the complement of a key sorts down.
 *
 * Heap sort: J. W. J. Williams, 1964, with the sift of R. W. Floyd. Introsort and introselect: D.
 * R. Musser, 1997: quicksort around a median of three, which gives way to the heap where 2 log2 n
 * partitions were not enough.
 *
 * Shared with GPUs (kernels/cuda/row/topk.cu). Threading: pure functions of their arguments.
 */
#ifndef GRADD_KERNELS_MATH_SELECT_H
#define GRADD_KERNELS_MATH_SELECT_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "kernels/math/host_device.h"

typedef struct gradd_entry_s {
    int64_t key, at; /* at: the place it was read from; never compared */
} gradd_entry_t;

/* Of two's complement, negative numbers count down: their bits but the sign are turned around. */
GRADD_HD int64_t gradd_sort_key_f32(float x) {
    const float y = x + 0.0f; /* makes 0 of -0 */
    int32_t bits;
    memcpy(&bits, &y, sizeof bits);
    bits ^= bits >> 31 & INT32_MAX;
    return y != y ? INT32_MAX : bits;
}

GRADD_HD int64_t gradd_sort_key_f64(double x) {
    const double y = x + 0.0;
    int64_t bits;
    memcpy(&bits, &y, sizeof bits);
    bits ^= bits >> 63 & INT64_MAX;
    return y != y ? INT64_MAX : bits;
}

/* Ranges that introsort leaves to the insertion at the end, and introselect to one of its own. */
#define GRADD_SORT_CUTOFF   16
#define GRADD_SELECT_CUTOFF 3

GRADD_HD void gradd_entry_swap(gradd_entry_t *a, gradd_entry_t *b) {
    const gradd_entry_t t = *a;
    *a = *b, *b = t;
}

/* ---- heap ------------------------------------------------------------------------------------ */

/* Fills the hole at `top`: larger children move up until the hole is a leaf, and the entry rises
 * from there. It mostly belongs near the leaves, so this saves half of the comparisons. */
GRADD_HD void gradd_heap_sift(gradd_entry_t *heap, int64_t n, int64_t top, gradd_entry_t entry) {
    int64_t hole = top, child;
    while ((child = 2 * hole + 2) < n) {
        if (heap[child].key < heap[child - 1].key) child--;
        heap[hole] = heap[child];
        hole = child;
    }
    if (child == n) { /* a left child alone */
        heap[hole] = heap[n - 1];
        hole = n - 1;
    }
    for (int64_t up; hole > top && heap[up = (hole - 1) / 2].key < entry.key; hole = up)
        heap[hole] = heap[up];
    heap[hole] = entry;
}

/* Makes a heap of n >= 1 entries with the largest key at its root, heap[0]. */
GRADD_HD void gradd_heap_make(gradd_entry_t *heap, int64_t n) {
    for (int64_t i = n / 2; i-- > 0;)
        gradd_heap_sift(heap, n, i, heap[i]);
}

/* Puts an entry in the place of the root. */
GRADD_HD void gradd_heap_replace(gradd_entry_t *heap, int64_t n, gradd_entry_t entry) {
    gradd_heap_sift(heap, n, 0, entry);
}

/* A heap into rising order. */
GRADD_HD void gradd_heap_sort(gradd_entry_t *heap, int64_t n) {
    for (int64_t end = n - 1; end > 0; end--) {
        const gradd_entry_t last = heap[end];
        heap[end] = heap[0];
        gradd_heap_sift(heap, end, 0, last);
    }
}

/* The k smallest keys into a heap in front; what they replace takes their places behind. */
GRADD_HD void gradd_heap_select(gradd_entry_t *q, int64_t n, int64_t k) {
    gradd_heap_make(q, k);
    for (int64_t i = k; i < n; i++) {
        const gradd_entry_t entry = q[i];
        if (entry.key >= q[0].key) continue;
        q[i] = q[0];
        gradd_heap_replace(q, k, entry);
    }
}

/* ---- partitions ------------------------------------------------------------------------------ */

GRADD_HD gradd_entry_t *gradd_entry_median(gradd_entry_t *a, gradd_entry_t *b, gradd_entry_t *c) {
    if (a->key < b->key) return b->key < c->key ? b : a->key < c->key ? c : a;
    return a->key < c->key ? a : b->key < c->key ? c : b;
}

/* Moves a median of three to q[0] and the others to its sides; returns where the right side
 * begins. Keys equal to the pivot go to either side. No scan can leave the range, as one of the
 * three is on each side. n > 3. */
GRADD_HD int64_t gradd_entry_partition(gradd_entry_t *q, int64_t n) {
    gradd_entry_swap(q, gradd_entry_median(q + 1, q + n / 2, q + n - 1));
    const int64_t pivot = q[0].key;
    for (int64_t left = 1, right = n;; left++) {
        while (q[left].key < pivot)
            left++;
        do
            right--;
        while (pivot < q[right].key);
        if (left >= right) return left;
        gradd_entry_swap(q + left, q + right);
    }
}

/* Straight insertion of q[from..n) into what is in front, which is sorted already. A new minimum
 * has no end to stop at, so it is looked for first while `guarded`. */
GRADD_HD void gradd_entry_insert(gradd_entry_t *q, int64_t from, int64_t n, bool guarded) {
    for (int64_t i = from; i < n; i++) {
        const gradd_entry_t entry = q[i];
        int64_t to = i;
        if (guarded && entry.key < q[0].key) {
            for (; to > 0; to--)
                q[to] = q[to - 1];
        } else {
            for (; entry.key < q[to - 1].key; to--)
                q[to] = q[to - 1];
        }
        q[to] = entry;
    }
}

/* 2 log2 n */
GRADD_HD int gradd_sort_depth(int64_t n) {
    int depth = 0;
    for (; n > 1; n /= 2)
        depth += 2;
    return depth;
}

/* Goes on with a selection to which so many partitions are left. */
GRADD_HD void gradd_select_on(gradd_entry_t *q, int64_t n, int64_t nth, int depth) {
    for (; n > GRADD_SELECT_CUTOFF; depth--) {
        if (!depth) {
            gradd_heap_select(q, n, nth + 1);
            gradd_entry_swap(q, q + nth);
            return;
        }
        const int64_t cut = gradd_entry_partition(q, n);
        if (cut > nth) {
            n = cut;
        } else {
            q += cut, n -= cut, nth -= cut;
        }
    }
    gradd_entry_insert(q, 1, n, true);
}

/* Moves entries until no key in front of q[nth] is larger and none behind it smaller; nth < n. */
GRADD_HD void gradd_select_nth(gradd_entry_t *q, int64_t n, int64_t nth) {
    gradd_select_on(q, n, nth, gradd_sort_depth(n));
}

/* Quicksort down to ranges of the cutoff. Which side is next changes nothing, so the longer one
 * waits: then few do. */
GRADD_HD void gradd_sort_roughly(gradd_entry_t *q, int64_t n, int depth) {
    struct {
        gradd_entry_t *q;
        int64_t n;
        int depth;
    } waiting[64];
    int waits = 0;
    for (;; depth--) {
        if (n > GRADD_SORT_CUTOFF && depth) {
            const int64_t cut = gradd_entry_partition(q, n);
            const bool left_waits = cut > n - cut;
            waiting[waits].q = left_waits ? q : q + cut;
            waiting[waits].n = left_waits ? cut : n - cut;
            waiting[waits++].depth = depth - 1;
            if (left_waits) q += cut;
            n = left_waits ? n - cut : cut;
            continue;
        }
        if (n > GRADD_SORT_CUTOFF) {
            gradd_heap_make(q, n);
            gradd_heap_sort(q, n);
        }
        if (!waits) return;
        waits--;
        q = waiting[waits].q, n = waiting[waits].n;
        depth = waiting[waits].depth + 1; /* the loop counts down */
    }
}

/* Goes on with a sort to which so many partitions are left. */
GRADD_HD void gradd_sort_on(gradd_entry_t *q, int64_t n, int depth) {
    if (n < 2) return;
    gradd_sort_roughly(q, n, depth);
    /* The smallest key is within the first range, so that the others need no guard. */
    const int64_t guarded = n < GRADD_SORT_CUTOFF ? n : GRADD_SORT_CUTOFF;
    gradd_entry_insert(q, 1, guarded, true);
    gradd_entry_insert(q, guarded, n, false);
}

/* Rising order. */
GRADD_HD void gradd_sort_entries(gradd_entry_t *q, int64_t n) {
    gradd_sort_on(q, n, gradd_sort_depth(n));
}

#endif
