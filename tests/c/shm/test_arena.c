/* The bump allocator: alignment, zeroing, chunks, limit, overflow. */
#include "server/graph/arena.h"

#include <stdint.h>
#include <string.h>

#include "tests/test.h"

TEST(objects_are_aligned_zeroed_and_apart) {
    arena_t *arena;
    CHECK_OK(arena_create(0, &arena));
    unsigned char *last = NULL;
    for (size_t i = 0; i < 5000; i++) {
        size_t n = i * 7 % 300, align = (size_t)16 << i % 9;
        unsigned char *p = arena_alloc_aligned(arena, n, align);
        CHECK(p != NULL);
        CHECK_EQ_INT((uintptr_t)p % align, 0);
        for (size_t k = 0; k < n; k++)
            CHECK_EQ_INT(p[k], 0);
        memset(p, 0xee, n);
        CHECK(p != last);
        last = p;
    }
    arena_destroy(arena);
    arena_destroy(NULL);
}

TEST(large_objects_leave_the_chunk_in_use) {
    arena_t *arena;
    CHECK_OK(arena_create(0, &arena));
    char *a = arena_alloc(arena, 16);
    char *large = arena_alloc(arena, 8 << 20);
    char *b = arena_alloc(arena, 16);
    CHECK(a && large && b);
    memset(large, 1, 8 << 20);
    CHECK(b > a && b < a + 4096); /* behind a, in the same chunk */
    CHECK_EQ_INT(*b, 0);
    CHECK_EQ_INT(arena_used(arena), 32 + (8 << 20));
    arena_destroy(arena);
}

TEST(the_limit_holds) {
    arena_t *arena;
    CHECK_OK(arena_create(1000, &arena));
    CHECK(arena_alloc(arena, 500) != NULL);
    CHECK(arena_alloc(arena, 500) == NULL);
    CHECK_ERROR_HAS("the limit of 1000 bytes");
    CHECK(arena_alloc(arena, 400) != NULL); /* a refusal takes nothing */
    CHECK_EQ_INT(arena_used(arena), 512 + 400);
    arena_destroy(arena);
}

TEST(sizes_do_not_overflow) {
    arena_t *arena;
    CHECK_OK(arena_create(0, &arena));
    CHECK(arena_alloc(arena, SIZE_MAX) == NULL);
    CHECK(arena_alloc(arena, SIZE_MAX / 2) == NULL);
    CHECK(arena_array(arena, SIZE_MAX / 4, 8) == NULL);
    CHECK(arena_array(arena, (size_t)1 << 33, (size_t)1 << 33) == NULL);
    CHECK(arena_string(arena, "x", SIZE_MAX) == NULL);
    CHECK(arena_array(arena, 0, 8) != NULL);
    CHECK(arena_alloc_aligned(arena, 8, 8192) == NULL);
    arena_destroy(arena);
}

TEST(strings_are_copied) {
    arena_t *arena;
    CHECK_OK(arena_create(0, &arena));
    char source[] = "abcdef";
    char *copy = arena_string(arena, source, 3);
    source[0] = 'X';
    CHECK_EQ_STR(copy, "abc");
    CHECK_EQ_STR(arena_string(arena, NULL, 0), "");
    CHECK_EQ_STR(arena_printf(arena, "node_%d", 17), "node_17");
    arena_destroy(arena);
}
