/* Sweeps over sorted address ranges. See spans.h. */
#include "server/verbs/spans.h"

#include <stdlib.h>

static int by_lo(const void *a, const void *b) {
    const span_t *x = a, *y = b;
    return x->lo < y->lo ? -1 : x->lo > y->lo;
}

int spans_sort(span_t *spans, int n) {
    int kept = 0;
    for (int i = 0; i < n; i++)
        if (spans[i].hi > spans[i].lo) spans[kept++] = spans[i];
    if (kept > 1) qsort(spans, (size_t)kept, sizeof *spans, by_lo); /* never NULL */
    return kept;
}

bool spans_overlap_self(const span_t *spans, int n, int *out_a, int *out_b) {
    int widest = 0; /* the range that reaches furthest so far */
    for (int i = 1; i < n; i++) {
        if (spans[i].lo < spans[widest].hi) {
            *out_a = spans[widest].tag;
            *out_b = spans[i].tag;
            return true;
        }
        widest = i; /* it starts at or after the end of all before it */
    }
    return false;
}

bool spans_overlap(const span_t *a, int n_a, const span_t *b, int n_b, int *out_a, int *out_b) {
    const span_t *far_a = NULL, *far_b = NULL; /* ranges that reach furthest so far, per list */
    int i = 0, k = 0;
    while (i < n_a || k < n_b) {
        bool from_a = k == n_b || (i < n_a && a[i].lo <= b[k].lo);
        const span_t *next = from_a ? &a[i++] : &b[k++];
        const span_t *other = from_a ? far_b : far_a;
        if (other && next->lo < other->hi) {
            *out_a = from_a ? next->tag : other->tag;
            *out_b = from_a ? other->tag : next->tag;
            return true;
        }
        const span_t **far = from_a ? &far_a : &far_b;
        if (!*far || next->hi > (*far)->hi) *far = next;
    }
    return false;
}
