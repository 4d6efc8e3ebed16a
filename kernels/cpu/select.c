/* Heap, introselect and introsort of entries; see the header for why every swap counts.
 *
 * Heap sort: J. W. J. Williams, 1964, with the sift of R. W. Floyd. Introsort and introselect: D.
 * R. Musser, 1997: quicksort around a median of three, which gives way to the heap where 2 log2 n
 * partitions were not enough.
 */
#include "kernels/cpu/select.h"

#include <stdbool.h>
#include <stdlib.h>

typedef gradd_entry_t entry_t;

/* Ranges that introsort leaves to the insertion at the end, and introselect to one of its own. */
#define SORT_CUTOFF   16
#define SELECT_CUTOFF 3

static void swap(entry_t *a, entry_t *b) {
    const entry_t t = *a;
    *a = *b, *b = t;
}

/* ---- heap ------------------------------------------------------------------------------------ */

/* Fills the hole at `top`: larger children move up until the hole is a leaf, and the entry rises
 * from there. It mostly belongs near the leaves, so this saves half of the comparisons. */
static void sift(entry_t *heap, int64_t n, int64_t top, entry_t entry) {
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

void gradd_heap_make(entry_t *heap, int64_t n) {
    for (int64_t i = n / 2; i-- > 0;)
        sift(heap, n, i, heap[i]);
}

void gradd_heap_replace(entry_t *heap, int64_t n, entry_t entry) {
    sift(heap, n, 0, entry);
}

void gradd_heap_sort(entry_t *heap, int64_t n) {
    for (int64_t end = n - 1; end > 0; end--) {
        const entry_t last = heap[end];
        heap[end] = heap[0];
        sift(heap, end, 0, last);
    }
}

/* The k smallest keys into a heap in front; what they replace takes their places behind. */
static void select_heap(entry_t *q, int64_t n, int64_t k) {
    gradd_heap_make(q, k);
    for (int64_t i = k; i < n; i++) {
        const entry_t entry = q[i];
        if (entry.key >= q[0].key) continue;
        q[i] = q[0];
        gradd_heap_replace(q, k, entry);
    }
}

/* ---- partitions ------------------------------------------------------------------------------ */

static entry_t *median(entry_t *a, entry_t *b, entry_t *c) {
    if (a->key < b->key) return b->key < c->key ? b : a->key < c->key ? c : a;
    return a->key < c->key ? a : b->key < c->key ? c : b;
}

/* Moves a median of three to q[0] and the others to its sides; returns where the right side
 * begins. Keys equal to the pivot go to either side. No scan can leave the range, as one of the
 * three is on each side. n > 3. */
static int64_t partition(entry_t *q, int64_t n) {
    swap(q, median(q + 1, q + n / 2, q + n - 1));
    const int64_t pivot = q[0].key;
    for (int64_t left = 1, right = n;; left++) {
        while (q[left].key < pivot)
            left++;
        do
            right--;
        while (pivot < q[right].key);
        if (left >= right) return left;
        swap(q + left, q + right);
    }
}

/* Straight insertion of q[from..n) into what is in front, which is sorted already. A new minimum
 * has no end to stop at, so it is looked for first while `guarded`. */
static void insert(entry_t *q, int64_t from, int64_t n, bool guarded) {
    for (int64_t i = from; i < n; i++) {
        const entry_t entry = q[i];
        int64_t to = i;
        if (guarded && entry.key < q[0].key) {
            memmove(q + 1, q, (size_t)i * sizeof *q);
            to = 0;
        } else {
            for (; entry.key < q[to - 1].key; to--)
                q[to] = q[to - 1];
        }
        q[to] = entry;
    }
}

static int depth_limit(int64_t n) {
    return 2 * (63 - __builtin_clzll((unsigned long long)n));
}

void gradd_select_nth(entry_t *q, int64_t n, int64_t nth) {
    for (int depth = depth_limit(n); n > SELECT_CUTOFF; depth--) {
        if (!depth) {
            select_heap(q, n, nth + 1);
            swap(q, q + nth);
            return;
        }
        const int64_t cut = partition(q, n);
        if (cut > nth) {
            n = cut;
        } else {
            q += cut, n -= cut, nth -= cut;
        }
    }
    insert(q, 1, n, true);
}

/* Quicksort down to ranges of the cutoff; the right side first, by recursion of limited depth. */
static void sort_roughly(entry_t *q, int64_t n, int depth) {
    for (; n > SORT_CUTOFF; depth--) {
        if (!depth) {
            gradd_heap_make(q, n);
            gradd_heap_sort(q, n);
            return;
        }
        const int64_t cut = partition(q, n);
        sort_roughly(q + cut, n - cut, depth - 1);
        n = cut;
    }
}

void gradd_sort_entries(entry_t *q, int64_t n) {
    if (n < 2) return;
    sort_roughly(q, n, depth_limit(n));
    /* The smallest key is within the first range, so that the others need no guard. */
    const int64_t guarded = n < SORT_CUTOFF ? n : SORT_CUTOFF;
    insert(q, 1, guarded, true);
    insert(q, guarded, n, false);
}

static int compare_stably(const void *a, const void *b) {
    const entry_t *x = a, *y = b;
    if (x->key != y->key) return x->key < y->key ? -1 : 1;
    return x->at < y->at ? -1 : x->at > y->at;
}

void gradd_sort_stably(entry_t *q, int64_t n) {
    if (n > 1) qsort(q, (size_t)n, sizeof *q, compare_stably);
}
