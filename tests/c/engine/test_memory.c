/* The arena planner: no two buffers that live at the same time overlap, and the peak is exact. */
#include <stdlib.h>

#include "server/plan/plan.h"
#include "tests/test.h"

static bool alive_together(const memory_item_t *a, const memory_item_t *b) {
    return a->start <= b->end && b->start <= a->end;
}

static void check_disjoint(const memory_item_t *items, int n, int64_t peak) {
    int64_t highest = 0;
    for (int i = 0; i < n; i++) {
        CHECK(items[i].offset >= 0 && items[i].offset % GRADD_TENSOR_ALIGN == 0);
        if (items[i].offset + items[i].bytes > highest) highest = items[i].offset + items[i].bytes;
        for (int k = 0; k < i; k++)
            if (alive_together(&items[i], &items[k]) && items[i].bytes && items[k].bytes)
                CHECK(items[i].offset + items[i].bytes <= items[k].offset ||
                      items[k].offset + items[k].bytes <= items[i].offset);
    }
    CHECK_EQ_INT(peak, highest);
}

TEST(random_lifetimes_never_overlap) {
    unsigned seed = 7;
    for (int round = 0; round < 50; round++) {
        enum { N = 200 };
        memory_item_t items[N];
        for (int i = 0; i < N; i++) {
            int start = rand_r(&seed) % 100, length = rand_r(&seed) % (i % 7 ? 8 : 90);
            items[i] = (memory_item_t){rand_r(&seed) % 5000, -1, start, start + length};
        }
        int64_t peak;
        CHECK_OK(memory_place(items, N, &peak));
        check_disjoint(items, N, peak);
    }
}

TEST(fixed_places_are_kept_and_avoided) {
    memory_item_t items[3] = {
        {640, 128, 0, 9}, /* fixed */
        {128, -1,  3, 4}, /* fits below */
        {640, -1,  3, 4}, /* must go above */
    };
    int64_t peak;
    CHECK_OK(memory_place(items, 3, &peak));
    CHECK_EQ_INT(items[0].offset, 128);
    CHECK_EQ_INT(items[1].offset, 0);
    CHECK_EQ_INT(items[2].offset, 768);
    CHECK_EQ_INT(peak, 768 + 640);
}

TEST(dead_buffers_are_reused) {
    memory_item_t items[4] = {
        {1000, -1, 0, 1},
        {1000, -1, 2, 3},
        {1000, -1, 4, 5},
        {64,   -1, 0, 5}
    };
    int64_t peak;
    CHECK_OK(memory_place(items, 4, &peak));
    CHECK_EQ_INT(peak, 1024 + 64);
}

/* Two live values whose sizes wrap around would get a small arena, and kernels write past it. */
TEST(sizes_that_overflow_are_refused) {
    const int64_t huge = INT64_C(1) << 62;
    memory_item_t items[4] = {
        {huge, -1, 0, 3},
        {huge, -1, 0, 3},
        {huge, -1, 0, 3},
        {huge, -1, 0, 3}
    };
    int64_t peak = -1;
    CHECK_STATUS(GRADD_E_LIMIT, memory_place(items, 4, &peak));
    memory_item_t last = {INT64_MAX - 8, -1, 0, 0};
    CHECK_STATUS(GRADD_E_LIMIT, memory_place(&last, 1, &peak));
    CHECK_EQ_INT(peak, -1);
}

static int by_offset(const void *a, const void *b) {
    const memory_item_t *x = a, *y = b;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

/* A graph of a hostile size is placed in n log n; here all that live at one time are compared. */
TEST(very_many_buffers_take_little_time) {
    enum { N = 400000 };
    unsigned seed = 3;
    memory_item_t *items = calloc(N, sizeof *items);
    memory_item_t *alive = calloc(N, sizeof *alive);
    for (int i = 0; i < N; i++) {
        int start = i ? rand_r(&seed) % N : 0, length = rand_r(&seed) % (i % 7 ? 8 : 900);
        items[i] = (memory_item_t){rand_r(&seed) % 5000, -1, start, start + length};
    }
    items[5] = (memory_item_t){700, 128, 0, 2 * N}; /* fixed */
    int64_t peak, sum = 0;
    CHECK_OK(memory_place(items, N, &peak));
    CHECK_EQ_INT(items[5].offset, 128);
    for (int i = 0; i < N; i++)
        sum += items[i].bytes;
    CHECK(peak < sum / 100); /* dead buffers are reused */
    for (int position = 0; position < N; position += N / 50) {
        int n = 0;
        for (int i = 0; i < N; i++)
            if (items[i].bytes && items[i].start <= position && items[i].end >= position)
                alive[n++] = items[i];
        qsort(alive, (size_t)n, sizeof alive[0], by_offset);
        for (int i = 1; i < n; i++)
            CHECK(alive[i - 1].offset + alive[i - 1].bytes <= alive[i].offset);
    }
    free(items);
    free(alive);
}
