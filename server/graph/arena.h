/* A bump allocator: many small objects, freed at once.
 *
 * A model, a graph or a plan owns one arena and everything in it, so that error paths free nothing
 * piece by piece. Memory comes in chunks from malloc; large requests get a chunk of their own. An
 * optional limit bounds what hostile input can make us allocate. Under AddressSanitizer the gaps
 * between objects are poisoned.
 *
 * Thread: one at a time.
 */
#ifndef GRADD_SERVER_GRAPH_ARENA_H
#define GRADD_SERVER_GRAPH_ARENA_H

#include <stddef.h>

#include "shm/status.h"

typedef struct arena_s arena_t;

/* limit_bytes bounds the sum of all requests, rounded up to their alignment; 0 = no limit.
 * Errors: NOMEM. */
gradd_status_t arena_create(size_t limit_bytes, arena_t **out_arena);
void arena_destroy(arena_t *arena); /* accepts NULL */

/* Zeroed memory, aligned to 16 bytes; never NULL for 0 bytes. NULL if the limit or the machine's
 * memory is exhausted: the thread's error message says so, and the caller returns
 * GRADD_E_NOMEM. */
void *arena_alloc(arena_t *arena, size_t bytes);
/* Same, for any power of two up to 4096. */
void *arena_alloc_aligned(arena_t *arena, size_t bytes, size_t align);
/* count * size bytes; the product is checked for overflow. */
void *arena_array(arena_t *arena, size_t count, size_t size);
/* Copies n bytes and puts a NUL behind them. */
char *arena_string(arena_t *arena, const void *bytes, size_t n);
/* printf into the arena. */
char *arena_printf(arena_t *arena, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Sum of all requests so far. */
size_t arena_used(const arena_t *arena);

#endif
