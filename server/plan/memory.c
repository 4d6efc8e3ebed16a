/* Offsets in one arena for buffers with known lifetimes: largest first, each at the lowest free
 * place (greedy by size). The result is the exact peak of a run, known before it starts.
 *
 * Greedy by size compares every buffer with all that are placed. Graphs of more buffers than any
 * real model has are placed in the order of time instead, from lists of free places by size class:
 * a looser arena, but planning takes n log n, so that a hostile graph cannot hold the engine. */
#include <stdlib.h>

#include "server/graph/compile_time.h"
#include "server/plan/plan.h"

static int by_size(const void *a, const void *b) {
    const memory_item_t *x = *(memory_item_t *const *)a, *y = *(memory_item_t *const *)b;
    bool fx = x->offset >= 0, fy = y->offset >= 0; /* what is fixed comes first */
    if (fx != fy) return fx ? -1 : 1;
    if (x->bytes != y->bytes) return x->bytes > y->bytes ? -1 : 1;
    if (x->start != y->start) return x->start < y->start ? -1 : 1;
    return x < y ? -1 : x > y;
}

/* Placed items, kept sorted by offset, so that one sweep finds the lowest gap. */
typedef struct placed_s {
    memory_item_t **v;
    int n;
} placed_t;

static void insert(placed_t *p, memory_item_t *item) {
    int lo = 0, hi = p->n;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (p->v[mid]->offset <= item->offset)
            lo = mid + 1;
        else
            hi = mid;
    }
    for (int i = p->n; i > lo; i--)
        p->v[i] = p->v[i - 1];
    p->v[lo] = item;
    p->n++;
}

static int64_t lowest_gap(const placed_t *p, const memory_item_t *item) {
    int64_t at = 0;
    for (int i = 0; i < p->n; i++) {
        const memory_item_t *other = p->v[i];
        if (other->end < item->start || other->start > item->end) continue;
        if (other->offset >= at + item->bytes) break;
        int64_t after = other->offset + other->bytes;
        if (after > at) at = after;
    }
    return at;
}

static gradd_status_t place_by_size(memory_item_t **order, int n, memory_item_t **scratch) {
    placed_t placed = {scratch, 0};
    qsort(order, (size_t)n, sizeof order[0], by_size);
    for (int i = 0; i < n; i++) {
        GRADD_TRY(compile_time_spend(1 + i / 256));
        if (order[i]->offset < 0) order[i]->offset = lowest_gap(&placed, order[i]);
        insert(&placed, order[i]);
    }
    return GRADD_OK;
}

/* ---- many buffers ---- */

#define CLASSES (64 * 4)

static int by_start(const void *a, const void *b) {
    const memory_item_t *x = *(memory_item_t *const *)a, *y = *(memory_item_t *const *)b;
    if (x->start != y->start) return x->start < y->start ? -1 : 1;
    return x < y ? -1 : x > y;
}

static int by_end(const void *a, const void *b) {
    const memory_item_t *x = *(memory_item_t *const *)a, *y = *(memory_item_t *const *)b;
    if (x->end != y->end) return x->end < y->end ? -1 : 1;
    return x < y ? -1 : x > y;
}

/* Four classes per power of two; *out_bytes is the size that every place of the class has. */
static int class_of(int64_t bytes, int64_t *out_bytes) {
    uint64_t size = (uint64_t)bytes;
    int top = size < 8 ? 3 : 63 - __builtin_clzll(size);
    uint64_t step = (uint64_t)1 << (top - 2);
    uint64_t rounded = (size + step - 1) & -step;
    *out_bytes = (int64_t)rounded;
    top = rounded < 8 ? 3 : 63 - __builtin_clzll(rounded);
    return top * 4 + (int)(rounded >> (top - 2) & 3);
}

/* next[i]: the place of item i is free, and so is that of item next[i]; -1 ends a list. */
static void place_by_time(memory_item_t *items, memory_item_t **starts, memory_item_t **ends,
                          int32_t *next, int n) {
    int32_t free_of[CLASSES];
    int64_t high = 0, bytes;
    int gone = 0;
    for (int c = 0; c < CLASSES; c++)
        free_of[c] = -1;
    for (int i = 0; i < n; i++) {
        const memory_item_t *item = &items[i];
        next[i] = item->offset < 0 ? -1 : -2; /* fixed: lies below `high`, is never handed on */
        if (item->offset >= 0 && item->offset + item->bytes > high)
            high = item->offset + item->bytes;
    }
    qsort(starts, (size_t)n, sizeof starts[0], by_start);
    qsort(ends, (size_t)n, sizeof ends[0], by_end);
    for (int i = 0; i < n; i++) {
        if (starts[i]->offset >= 0) continue;
        for (; gone < n && ends[gone]->end < starts[i]->start; gone++) {
            int32_t old = (int32_t)(ends[gone] - items);
            int c = class_of(items[old].bytes, &bytes);
            if (next[old] == -2) continue;
            next[old] = free_of[c];
            free_of[c] = old;
        }
        int c = class_of(starts[i]->bytes, &bytes);
        int32_t place = free_of[c];
        starts[i]->offset = place < 0 ? high : items[place].offset;
        if (place < 0)
            high += bytes;
        else
            free_of[c] = next[place];
    }
}

/* ---- the interface ---- */

/* Rounds sizes up. With the sum of all below a quarter of the range of 64 bits, no offset that
 * either way of placing can choose overflows. */
static gradd_status_t round_sizes(memory_item_t *items, int n) {
    int64_t sum = 0;
    for (int i = 0; i < n; i++) {
        int64_t end;
        if (items[i].bytes < 0 ||
            __builtin_add_overflow(items[i].bytes, GRADD_TENSOR_ALIGN - 1, &items[i].bytes) ||
            __builtin_add_overflow(sum, items[i].bytes, &sum) || sum > INT64_MAX / 4 ||
            __builtin_add_overflow(items[i].offset, items[i].bytes, &end) || end > INT64_MAX / 4)
            return GRADD_FAIL(LIMIT, "the values of the graph need more memory than 64 bits count");
        items[i].bytes &= -(int64_t)GRADD_TENSOR_ALIGN;
    }
    return GRADD_OK;
}

gradd_status_t memory_place(memory_item_t *items, int n, int64_t *out_peak) {
    GRADD_TRY(round_sizes(items, n));
    memory_item_t **order = malloc(sizeof order[0] * ((size_t)n + 1));
    memory_item_t **other = malloc(sizeof other[0] * ((size_t)n + 1));
    int32_t *next = malloc(sizeof next[0] * ((size_t)n + 1));
    gradd_status_t status =
        order && other && next ? GRADD_OK : GRADD_FAIL(NOMEM, "no memory to plan the arena");
    for (int i = 0; !status && i < n; i++)
        order[i] = other[i] = &items[i];
    if (!status && n <= MEMORY_BY_SIZE_MAX)
        status = place_by_size(order, n, other);
    else if (!status)
        place_by_time(items, order, other, next, n);
    int64_t peak = 0;
    for (int i = 0; !status && i < n; i++)
        if (items[i].offset + items[i].bytes > peak) peak = items[i].offset + items[i].bytes;
    free(order);
    free(other);
    free(next);
    if (!status) *out_peak = peak;
    return status;
}
