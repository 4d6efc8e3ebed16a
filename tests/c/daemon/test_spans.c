/* Overlap checks against the definition: every pair compared.
 */
#include "server/verbs/spans.h"

#include "tests/test.h"

static uint32_t state = 7;

static int draw(int limit) {
    state = state * 1664525u + 1013904223u;
    return (int)((state >> 8) % (uint32_t)limit);
}

static int fill(span_t *spans, int n, int space) {
    for (int i = 0; i < n; i++) {
        uintptr_t lo = (uintptr_t)draw(space);
        spans[i] = (span_t){.lo = lo, .hi = lo + (uintptr_t)draw(6), .tag = i};
    }
    return spans_sort(spans, n);
}

static bool touch(const span_t *a, const span_t *b) {
    return a->lo < b->hi && b->lo < a->hi;
}

TEST(sorted_lists_agree_with_pairs) {
    int overlaps = 0;
    for (int round = 0; round < 50000; round++) {
        span_t a[8], b[8];
        int space = 4 + draw(200), i = -1, k = -1;
        int n_a = fill(a, draw(8), space), n_b = fill(b, draw(8), space);
        bool cross = false, self = false;
        for (int x = 0; x < n_a; x++) {
            for (int y = 0; y < n_b; y++)
                cross |= touch(&a[x], &b[y]);
            for (int y = 0; y < x; y++)
                self |= touch(&a[x], &a[y]);
        }
        CHECK_EQ_INT(spans_overlap(a, n_a, b, n_b, &i, &k), cross);
        if (cross) {
            const span_t *x = a, *y = b;
            while (x->tag != i)
                x++;
            while (y->tag != k)
                y++;
            CHECK(touch(x, y));
        }
        CHECK_EQ_INT(spans_overlap_self(a, n_a, &i, &k), self);
        overlaps += cross + self;
    }
    CHECK(overlaps > 1000);
}

TEST(empty_ranges_never_overlap) {
    span_t a[] = {
        {.lo = 5, .hi = 5},
        {.lo = 5, .hi = 5},
        {.lo = 0, .hi = 9, .tag = 2}
    };
    int i, k;
    CHECK_EQ_INT(spans_sort(a, 3), 1);
    CHECK(!spans_overlap_self(a, 1, &i, &k));
}
