/* Offsets in one arena for buffers with known lifetimes: largest first, each at the lowest free
 * place (greedy by size). The result is the exact peak of a run, known before it starts. */
#include <stdlib.h>

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

gradd_status_t memory_place(memory_item_t *items, int n, int64_t *out_peak) {
    memory_item_t **order = malloc(sizeof order[0] * ((size_t)n + 1));
    placed_t placed = {malloc(sizeof placed.v[0] * ((size_t)n + 1)), 0};
    if (!order || !placed.v) {
        free(order);
        free(placed.v);
        return GRADD_FAIL(NOMEM, "no memory to plan the arena");
    }
    for (int i = 0; i < n; i++) {
        items[i].bytes = (items[i].bytes + GRADD_TENSOR_ALIGN - 1) & -(int64_t)GRADD_TENSOR_ALIGN;
        order[i] = &items[i];
    }
    qsort(order, (size_t)n, sizeof order[0], by_size);
    int64_t peak = 0;
    for (int i = 0; i < n; i++) {
        if (order[i]->offset < 0) order[i]->offset = lowest_gap(&placed, order[i]);
        insert(&placed, order[i]);
        if (order[i]->offset + order[i]->bytes > peak) peak = order[i]->offset + order[i]->bytes;
    }
    free(order);
    free(placed.v);
    *out_peak = peak;
    return GRADD_OK;
}
