/* The pool of spare arenas: reuse, a bound on what is kept, trimming. */
#include "server/exec/pool.h"

#include <stdlib.h>

#include "server/api/gradd.h"
#include "server/exec/run.h"
#include "tests/test.h"

static int live; /* allocations that were not freed */

static gradd_status_t counted_alloc(size_t bytes, void **out) {
    live++;
    return gradd_backend_cpu.alloc(bytes, out);
}

static void counted_free(void *memory, size_t bytes) {
    live--;
    gradd_backend_cpu.free(memory, bytes);
}

static const gradd_backend_t counted = {.alloc = counted_alloc, .free = counted_free};

static void *take(int64_t bytes, int64_t *out_bytes) {
    void *memory;
    CHECK_OK(pool_take(&counted, bytes, &memory, out_bytes));
    CHECK(*out_bytes >= bytes);
    return memory;
}

TEST(an_arena_is_used_again) {
    int64_t bytes;
    void *first = take(1000, &bytes);
    pool_give(&counted, first, bytes);
    CHECK(take(600, &bytes) == first);
    CHECK_EQ_INT(bytes, 1000);
    CHECK_EQ_INT(live, 1);
    counted_free(first, 1000);
}

TEST(the_pool_keeps_two) {
    int64_t bytes[4];
    void *memory[4];
    for (int i = 0; i < 4; i++)
        memory[i] = take(1000 * (i + 1), &bytes[i]);
    for (int i = 0; i < 4; i++)
        pool_give(&counted, memory[i], bytes[i]);
    CHECK_EQ_INT(live, 2); /* the two largest */
    CHECK(take(4000, &bytes[0]) == memory[3]);
    CHECK(take(100, &bytes[0]) == memory[2]);
    counted_free(memory[3], 4000);
    counted_free(memory[2], 3000);
}

TEST(too_small_spares_make_room) {
    int64_t bytes;
    void *small = take(1000, &bytes);
    pool_give(&counted, small, bytes);
    void *large = take(5000, &bytes);
    CHECK_EQ_INT(live, 1);
    counted_free(large, 5000);
}

TEST(a_small_run_does_not_take_a_large_arena) {
    int64_t bytes, large = INT64_C(300) << 20;
    void *big = take(large, &bytes);
    pool_give(&counted, big, bytes);
    CHECK_EQ_INT(pool_bytes(), large);
    void *small = take(1000, &bytes); /* and the large one stays for the next large run */
    CHECK(small != big);
    CHECK_EQ_INT(bytes, 1000);
    CHECK(take(large - 4096, &bytes) == big);
    CHECK_EQ_INT(pool_bytes(), 0);
    counted_free(small, 1000);
    counted_free(big, large);
}

TEST(trim_gives_everything_back) {
    int64_t bytes;
    void *memory = take(1000, &bytes);
    pool_give(&counted, memory, bytes);
    gradd_trim();
    CHECK_EQ_INT(live, 0);
    CHECK(take(0, &bytes) == NULL);
}

TEST(a_run_that_happens_once_keeps_no_arena) {
    for (int once = 0; once < 2; once++) {
        gradd_trim();
        struct run_s *run = calloc(1, sizeof *run);
        CHECK(run != NULL);
        run->backend = &counted;
        run->arena = take(1000, &run->arena_bytes);
        run->flags = once ? GRADD_RUN_ONCE | GRADD_RUN_DROPOUT_OFF : GRADD_RUN_DROPOUT_OFF;
        gradd_run_destroy(run);
        CHECK_EQ_INT(pool_bytes(), once ? 0 : 1000);
    }
    gradd_trim();
}
