/* Sorted address ranges: do two sets of tensors share memory?
 *
 * A binding sorts its ranges once; a request then compares lists in one linear walk, so the check
 * of a step costs microseconds even for hundreds of parameters.
 */
#ifndef GRADD_SERVER_VERBS_SPANS_H
#define GRADD_SERVER_VERBS_SPANS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct span_s {
    uintptr_t lo, hi; /* [lo, hi) */
    int tag;          /* the owner's number of this range */
} span_t;

/* Sorts by lo and drops empty ranges; returns how many are left. */
int spans_sort(span_t *spans, int n);
/* Overlap within one sorted list; the tags of two offenders are stored. */
bool spans_overlap_self(const span_t *spans, int n, int *out_a, int *out_b);
/* Overlap of a range of `a` with a range of `b`, both sorted. O(n_a + n_b). */
bool spans_overlap(const span_t *a, int n_a, const span_t *b, int n_b, int *out_a, int *out_b);

#endif
