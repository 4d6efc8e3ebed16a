/* Bump allocator with chunks and a limit. See arena.h.
 *
 * Chunks start at 4 KiB and double up to 1 MiB, so a small graph stays small and a large one makes
 * few calls to malloc. A request of more than a quarter of the next chunk gets a chunk of its own,
 * behind the current one, whose free rest stays in use.
 */
#include "server/graph/arena.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__SANITIZE_ADDRESS__)
#define ARENA_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ARENA_ASAN 1
#endif
#endif
#ifdef ARENA_ASAN
#include <sanitizer/asan_interface.h>
#define POISON(p, n)   ASAN_POISON_MEMORY_REGION(p, n)
#define UNPOISON(p, n) ASAN_UNPOISON_MEMORY_REGION(p, n)
#define GAP            16 /* poisoned bytes behind every object */
#else
#define POISON(p, n)   ((void)(p), (void)(n))
#define UNPOISON(p, n) ((void)(p), (void)(n))
#define GAP            0
#endif

#define CHUNK_MIN   ((size_t)4096)
#define CHUNK_MAX   ((size_t)1 << 20)
#define ALIGN_MAX   4096
#define REQUEST_MAX ((size_t)PTRDIFF_MAX / 2)

typedef struct chunk_s {
    struct chunk_s *next; /* Owned */
    size_t bytes, used;   /* of data */
    _Alignas(16) char data[];
} chunk_t;

struct arena_s {
    chunk_t *chunks; /* Owned; the first one has room */
    size_t next_bytes;
    size_t used, limit;
};

static chunk_t *chunk_create(size_t bytes) {
    chunk_t *chunk = calloc(1, sizeof *chunk + bytes);
    if (!chunk) return NULL;
    chunk->bytes = bytes;
    POISON(chunk->data, bytes);
    return chunk;
}

gradd_status_t arena_create(size_t limit_bytes, arena_t **out_arena) {
    arena_t *arena = calloc(1, sizeof *arena);
    if (!arena) return GRADD_FAIL(NOMEM, "no memory for an arena");
    arena->limit = limit_bytes ? limit_bytes : SIZE_MAX;
    arena->next_bytes = CHUNK_MIN;
    *out_arena = arena;
    return GRADD_OK;
}

void arena_destroy(arena_t *arena) {
    if (!arena) return;
    for (chunk_t *chunk = arena->chunks, *next; chunk; chunk = next) {
        next = chunk->next;
        UNPOISON(chunk->data, chunk->bytes);
        free(chunk);
    }
    free(arena);
}

/* Room for `bytes` at `align` in the chunk, or NULL. */
static void *chunk_take(chunk_t *chunk, size_t bytes, size_t align) {
    uintptr_t start = (uintptr_t)chunk->data + chunk->used;
    size_t pad = (size_t)(-start & (align - 1));
    size_t left = chunk->bytes - chunk->used;
    if (left < pad || left - pad < bytes + GAP) return NULL;
    char *p = chunk->data + chunk->used + pad;
    chunk->used += pad + bytes + GAP;
    UNPOISON(p, bytes);
    return p;
}

static void *take_from_new_chunk(arena_t *arena, size_t bytes, size_t align) {
    size_t need = bytes + align + GAP;
    int own = need > arena->next_bytes / 4 && arena->chunks;
    chunk_t *chunk = chunk_create(own || need > arena->next_bytes ? need : arena->next_bytes);
    if (!chunk) return NULL;
    if (own) {
        chunk->next = arena->chunks->next;
        arena->chunks->next = chunk;
    } else {
        chunk->next = arena->chunks;
        arena->chunks = chunk;
        if (arena->next_bytes < CHUNK_MAX) arena->next_bytes *= 2;
    }
    return chunk_take(chunk, bytes, align);
}

void *arena_alloc_aligned(arena_t *arena, size_t bytes, size_t align) {
    if (bytes == 0) bytes = 1;
    if (align < 16) align = 16;
    size_t cost = bytes <= REQUEST_MAX ? (bytes + align - 1) & ~(align - 1) : bytes;
    if (align > ALIGN_MAX || bytes > REQUEST_MAX || cost > arena->limit - arena->used) {
        (void)GRADD_FAIL(NOMEM, "%zu bytes more would exceed the limit of %zu bytes, %zu are used",
                         bytes, arena->limit, arena->used);
        return NULL;
    }
    void *p = arena->chunks ? chunk_take(arena->chunks, bytes, align) : NULL;
    if (!p) p = take_from_new_chunk(arena, bytes, align);
    if (!p) {
        (void)GRADD_FAIL(NOMEM, "out of memory: %zu bytes requested", bytes);
        return NULL;
    }
    arena->used += cost;
    return p;
}

void *arena_alloc(arena_t *arena, size_t bytes) {
    return arena_alloc_aligned(arena, bytes, 16);
}

void *arena_array(arena_t *arena, size_t count, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes)) bytes = SIZE_MAX;
    return arena_alloc(arena, bytes);
}

char *arena_string(arena_t *arena, const void *bytes, size_t n) {
    char *s = arena_alloc(arena, n < SIZE_MAX ? n + 1 : n);
    if (s && n) memcpy(s, bytes, n);
    return s;
}

char *arena_printf(arena_t *arena, const char *format, ...) {
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, format, args);
    char *s = n < 0 ? NULL : arena_alloc(arena, (size_t)n + 1);
    if (s) vsnprintf(s, (size_t)n + 1, format, again);
    va_end(again);
    va_end(args);
    return s;
}

size_t arena_used(const arena_t *arena) {
    return arena->used;
}
