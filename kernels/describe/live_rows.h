/* Lists of live rows (kernels/ops/index/liverows.c): their validity, and places and ranges in them.
 *
 * Every device's kernels share these. A list may lie in the memory of a client, which may change it
 * meanwhile: each entry is read once, and whatever its value, results stay within the list.
 */
#ifndef GRADD_KERNELS_DESCRIBE_LIVE_ROWS_H
#define GRADD_KERNELS_DESCRIBE_LIVE_ROWS_H

#include "kernels/contract/fault.h"
#include "kernels/describe/attention.h"
#include "kernels/math/host_device.h"

/* The row that has to be read for an entry. */
GRADD_HD int64_t gradd_live_row(int64_t entry) {
    return entry < 0 ? ~entry : entry;
}

/* The fault of entry i, which follows `before`. LIVE_TAIL: a row number behind the negative entries
 * that fill the list. */
GRADD_HD gradd_fault_t gradd_live_check(int64_t entry, int64_t before, int64_t i, int64_t limit) {
    gradd_fault_t f = {GRADD_FAULT_NONE, 0, 0, 0, i, 0, 0};
    if (gradd_live_row(entry) >= limit) {
        f.kind = GRADD_FAULT_LIVE_ROW;
        f.value = gradd_live_row(entry);
        f.limit = limit;
    } else if (entry >= 0 && i && entry <= before) {
        f.kind = GRADD_FAULT_LIVE_ORDER;
        f.value = entry;
        f.limit = before;
    } else if (entry >= 0 && i && before < 0) {
        f.kind = GRADD_FAULT_LIVE_TAIL;
    }
    return f;
}

/* How many live rows of n entries are below r: at most n, whatever changes meanwhile. */
GRADD_HD int64_t gradd_live_below(const int64_t *list, int64_t n, int64_t r) {
    int64_t lo = 0, hi = n;
    while (lo < hi) {
        const int64_t mid = (lo + hi) / 2, entry = list[mid];
        if (entry >= 0 && entry < r)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* The place of an entry in another list, which must have its row; else LIVE_OTHER. */
GRADD_HD gradd_fault_t gradd_live_position(const int64_t *others, int64_t n, int64_t entry,
                                           int64_t *out) {
    gradd_fault_t f = {GRADD_FAULT_NONE, 0, 0, 0, 0, 0, 0};
    const int64_t row = gradd_live_row(entry), at = gradd_live_below(others, n, row);
    const int found = at < n && others[at] == row;
    if (entry >= 0 && !found) {
        f.kind = GRADD_FAULT_LIVE_OTHER;
        f.value = row;
    }
    *out = entry >= 0 ? at : ~(found ? at : 0);
    return f;
}

/* The range of live rows of the sequence of entry i that it may look at by its interval; the entry
 * itself where there is none. LIVE_RANGE: an interval that does not contain its position. */
GRADD_HD gradd_fault_t gradd_live_range(const int64_t *list, int64_t n, int64_t i,
                                        const volatile int32_t *intervals, int64_t positions,
                                        int32_t *out) {
    const int64_t entry = ((const volatile int64_t *)list)[i], row = gradd_live_row(entry);
    const int64_t s = row % positions, from = intervals[2 * s], to = intervals[2 * s + 1];
    gradd_fault_t f = {GRADD_FAULT_NONE, 0, from, to, s, 0, 0};
    if (from < 0 || from > s || to <= s || to > positions) {
        f.kind = GRADD_FAULT_LIVE_RANGE;
        return f;
    }
    out[0] = (int32_t)gradd_live_below(list, n, row - s + from);
    out[1] = (int32_t)gradd_live_below(list, n, row - s + to);
    out[2] = GRADD_ATTN_SOLID;
    if (out[0] >= out[1]) {
        out[0] = (int32_t)i;
        out[1] = (int32_t)i + 1;
    }
    return f;
}

/* The range of live rows of a sequence of so many positions; the first one where there is none: the
 * result of looking at it is never used. */
GRADD_HD void gradd_live_sequence(const int64_t *list, int64_t n, int64_t sequence,
                                  int64_t positions, int32_t *out) {
    out[0] = (int32_t)gradd_live_below(list, n, sequence * positions);
    out[1] = (int32_t)gradd_live_below(list, n, (sequence + 1) * positions);
    out[2] = GRADD_ATTN_SOLID;
    if (out[0] >= out[1]) {
        out[0] = 0;
        out[1] = 1;
    }
}

#endif
