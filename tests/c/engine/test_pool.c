/* The arenas of a device: reuse, a bound on spare ones, trimming, the limit. */
#include <limits.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "platform/platform.h"
#include "server/exec/run.h"
#include "tests/sim/sim.h"
#include "tests/test.h"

static int live; /* allocations that were not freed */
static int most = INT_MAX;

static gradd_status_t counted_alloc(gradd_queue_t *queue, size_t bytes, void **out) {
    if (live == most) return GRADD_FAIL(NOMEM, "%d allocations", live);
    live++;
    return gradd_backend_cpu.alloc(queue, bytes, out);
}

static void counted_free(gradd_queue_t *queue, void *memory, size_t bytes) {
    live--;
    gradd_backend_cpu.free(queue, memory, bytes);
}

static gradd_backend_t counted;

static gradd_device_t *open_counted(int64_t limit) {
    const gradd_device_options_t o = {.threads = 1, .memory_limit = limit};
    gradd_device_t *device;
    counted = gradd_backend_cpu;
    counted.alloc = counted_alloc;
    counted.free = counted_free;
    CHECK_OK(device_open(&counted, &o, &device));
    return device;
}

static void *take(gradd_device_t *device, int64_t bytes, int64_t *out_bytes) {
    void *memory;
    CHECK_OK(pool_take(device, bytes, &memory, out_bytes));
    CHECK(*out_bytes >= bytes);
    return memory;
}

static void close_counted(gradd_device_t *device) {
    CHECK_EQ_INT(device->arena_bytes, 0);
    gradd_device_close(device);
    CHECK_EQ_INT(live, 0);
}

TEST(an_arena_is_used_again) {
    gradd_device_t *d = open_counted(0);
    int64_t bytes;
    void *first = take(d, 1000, &bytes);
    pool_give(d, first, bytes);
    CHECK(take(d, 600, &bytes) == first);
    CHECK_EQ_INT(bytes, 1000);
    CHECK_EQ_INT(live, 1);
    pool_drop(d, first, bytes);
    close_counted(d);
}

TEST(the_pool_keeps_two) {
    gradd_device_t *d = open_counted(0);
    int64_t bytes[4];
    void *memory[4];
    for (int i = 0; i < 4; i++)
        memory[i] = take(d, 1000 * (i + 1), &bytes[i]);
    for (int i = 0; i < 4; i++)
        pool_give(d, memory[i], bytes[i]);
    CHECK_EQ_INT(live, 2); /* the two largest */
    CHECK(take(d, 4000, &bytes[0]) == memory[3]);
    CHECK(take(d, 100, &bytes[0]) == memory[2]);
    pool_drop(d, memory[3], 4000);
    pool_drop(d, memory[2], 3000);
    close_counted(d);
}

TEST(too_small_spares_make_room) {
    gradd_device_t *d = open_counted(0);
    int64_t bytes;
    pool_give(d, take(d, 1000, &bytes), 1000);
    void *large = take(d, 5000, &bytes);
    CHECK_EQ_INT(live, 1);
    pool_drop(d, large, 5000);
    close_counted(d);
}

TEST(a_small_run_does_not_take_a_large_arena) {
    gradd_device_t *d = open_counted(0);
    int64_t bytes, large = INT64_C(300) << 20;
    void *big = take(d, large, &bytes);
    pool_give(d, big, bytes);
    CHECK_EQ_INT(pool_bytes(d), large);
    void *small = take(d, 1000, &bytes); /* and the large one stays for the next large run */
    CHECK(small != big);
    CHECK_EQ_INT(bytes, 1000);
    CHECK(take(d, large - 4096, &bytes) == big);
    CHECK_EQ_INT(pool_bytes(d), 0);
    pool_drop(d, small, 1000);
    pool_drop(d, big, large);
    close_counted(d);
}

TEST(trim_gives_everything_back) {
    gradd_device_t *d = open_counted(0);
    int64_t bytes;
    pool_give(d, take(d, 1000, &bytes), 1000);
    gradd_device_trim(d);
    CHECK_EQ_INT(live, 0);
    CHECK(take(d, 0, &bytes) == NULL);
    close_counted(d);
}

/* On the CUDA plug-in's device over the stand-in, which says how much of its memory is free. */
TEST(what_is_given_back_is_free_on_the_device) {
    const gradd_device_options_t o = {.name = "emu"};
    const int64_t arena = 8 << 20;
    int64_t bytes, before, used, after, all;
    gradd_device_t *d;
    void *memory;
    CHECK_OK(gradd_device_open(&o, &d));
    CHECK(device_memory(d, false, &before, &all));
    pool_give(d, take(d, arena, &bytes), arena);
    CHECK(device_memory(d, false, &used, &all));
    CHECK_EQ_INT(before - used, arena);
    device_give_back(d);
    CHECK(device_memory(d, false, &after, &all));
    CHECK_EQ_INT(after, before);
    pool_give(d, take(d, arena, &bytes), arena);
    sim_fail("cudaMallocAsync", 1); /* another process has taken the rest */
    CHECK_OK(device_alloc(d, 4096, &memory));
    CHECK_EQ_INT(pool_bytes(d), 0);
    d->backend->free(d->queue, memory, 4096);
    sim_fail("cudaMallocAsync", 1);
    CHECK_STATUS(GRADD_E_NOMEM, device_alloc(d, 4096, &memory)); /* nothing is spare */
    gradd_device_close(d);
}

TEST(spares_make_room_where_the_device_has_none) {
    gradd_device_t *d = open_counted(0);
    const int64_t large = INT64_C(300) << 20;
    int64_t bytes;
    void *constants, *small;
    pool_give(d, take(d, large, &bytes), large);
    most = 1;
    small = take(d, 1000, &bytes); /* which the large one is too large for */
    CHECK_EQ_INT(pool_bytes(d), 0);
    CHECK_STATUS(GRADD_E_NOMEM, device_alloc(d, 1000, &constants));
    pool_give(d, small, bytes);
    CHECK_OK(device_alloc(d, 1000, &constants));
    most = INT_MAX;
    counted_free(d->queue, constants, 1000);
    close_counted(d);
}

TEST(a_run_that_happens_once_keeps_no_arena) {
    gradd_device_t *d = open_counted(0);
    for (int once = 0; once < 2; once++) {
        gradd_device_trim(d);
        gradd_run_t *run = calloc(1, sizeof *run);
        CHECK(run != NULL);
        run->device = d;
        run->arena = take(d, 1000, &run->arena_bytes);
        run->flags = once ? GRADD_RUN_ONCE | GRADD_RUN_DROPOUT_OFF : GRADD_RUN_DROPOUT_OFF;
        gradd_run_destroy(run);
        CHECK_EQ_INT(pool_bytes(d), once ? 0 : 1000);
    }
    close_counted(d);
}

TEST(an_arena_grows_with_what_it_holds) {
    gradd_device_t *d = open_counted(0);
    int64_t bytes;
    void *memory = take(d, 64, &bytes);
    *(int *)memory = 42;
    CHECK_OK(pool_grow(d, 32, &memory, &bytes));
    CHECK_EQ_INT(bytes, 64);
    CHECK_OK(pool_grow(d, 5000, &memory, &bytes));
    CHECK_EQ_INT(*(int *)memory, 42);
    CHECK_EQ_INT(bytes, 5000);
    CHECK_EQ_INT(d->arena_bytes, 5000);
    CHECK_EQ_INT(live, 1);
    pool_drop(d, memory, bytes);
    close_counted(d);
}

/* Spares count as well, but never stand in the way. */
TEST(runs_stay_below_the_limit) {
    const int64_t mib = 1 << 20;
    gradd_device_t *d = open_counted(14 * mib);
    int64_t bytes;
    void *held = take(d, 5 * mib, &bytes), *other = take(d, 4 * mib, &bytes);
    pool_give(d, other, bytes);
    CHECK_STATUS(GRADD_E_NOMEM, pool_take(d, 10 * mib, &other, &bytes));
    CHECK_ERROR_HAS("needs 10 MiB of activations; 5 of 14 MiB are in use by unreleased runs");
    other = take(d, 9 * mib, &bytes);
    CHECK_EQ_INT(live, 2);
    pool_drop(d, held, 5 * mib);
    pool_drop(d, other, 9 * mib);
    close_counted(d);
}

/* ---- large memory ---- */

static void *given;
static uint64_t given_bytes;
static int settled;

static void note_given(void *mapping, uint64_t bytes) {
    given = mapping, given_bytes = bytes;
}

static void note_settled(void) {
    settled++;
}

TEST(a_large_arena_goes_to_what_gives_it_back) {
    static const gradd_discarder_t noting = {note_given, note_settled};
    gradd_device_t *d = open_counted(0);
    int64_t bytes;
    void *arena = take(d, (int64_t)64 << 20, &bytes);
    gradd_discarder = &noting;
    pool_drop(d, arena, bytes);
    CHECK(given == arena);
    CHECK_EQ_INT(given_bytes, bytes);
    CHECK_EQ_INT(munmap(given, given_bytes), 0);
    arena = take(d, 1000, &bytes); /* small memory does not */
    given = NULL;
    pool_drop(d, arena, bytes);
    CHECK(given == NULL);
    CHECK_EQ_INT(settled, 0);
    CHECK(gradd_platform.take((size_t)1 << 60) == NULL); /* asked once more when all is back */
    CHECK_EQ_INT(settled, 1);
    gradd_discarder = NULL;
    close_counted(d);
}
