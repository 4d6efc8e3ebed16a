/* Choosing and ordering entries by their keys, with ties as PyTorch's CPU kernels break them.
 *
 * None of these is stable: which of several equal keys comes first follows from the swaps that the
 * algorithm makes, so the algorithm is the contract. torch.topk and torch.sort are built on
 * std::partial_sort, std::nth_element and std::sort of GCC's C++ library; what is here makes the
 * same comparisons and the same swaps: a heap whose sift goes down to a leaf before it comes up,
 * introselect and introsort around the median of three, insertion at the end. A change of any of
 * them sends gradients to other elements; tests/python/values/test_ties.py compares with torch.
 *
 * Keys are integers in which the wanted order is rising order (gradd_sort_key_f32 and its like):
 * NaN is above every number and equal to NaN, -0 equals 0, and the complement of a key sorts down.
 *
 * Threading: pure functions of their arguments.
 */
#ifndef GRADD_KERNELS_CPU_SELECT_H
#define GRADD_KERNELS_CPU_SELECT_H

#include <stdint.h>
#include <string.h>

typedef struct gradd_entry_s {
    int64_t key, at; /* at: the place it was read from; never compared */
} gradd_entry_t;

/* Of two's complement, negative numbers count down: their bits but the sign are turned around. */
static inline int64_t gradd_sort_key_f32(float x) {
    const float y = x + 0.0f; /* makes 0 of -0 */
    int32_t bits;
    memcpy(&bits, &y, sizeof bits);
    bits ^= bits >> 31 & INT32_MAX;
    return y != y ? INT32_MAX : bits;
}

static inline int64_t gradd_sort_key_f64(double x) {
    const double y = x + 0.0;
    int64_t bits;
    memcpy(&bits, &y, sizeof bits);
    bits ^= bits >> 63 & INT64_MAX;
    return y != y ? INT64_MAX : bits;
}

/* Makes a heap of n >= 1 entries with the largest key at its root, heap[0]. */
void gradd_heap_make(gradd_entry_t *heap, int64_t n);
/* Puts an entry in the place of the root. */
void gradd_heap_replace(gradd_entry_t *heap, int64_t n, gradd_entry_t entry);
/* A heap into rising order. */
void gradd_heap_sort(gradd_entry_t *heap, int64_t n);

/* Moves entries until no key in front of q[nth] is larger and none behind it smaller; nth < n. */
void gradd_select_nth(gradd_entry_t *q, int64_t n, int64_t nth);
/* Rising order. */
void gradd_sort_entries(gradd_entry_t *q, int64_t n);
/* Rising order, equal keys by rising place. */
void gradd_sort_stably(gradd_entry_t *q, int64_t n);

#endif
