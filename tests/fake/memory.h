/* Memory of the fake device. See fake.h.
 *
 * Threading: memory_find and memory_leave by the thread of the queue; the others by any.
 */
#ifndef GRADD_TESTS_FAKE_MEMORY_H
#define GRADD_TESTS_FAKE_MEMORY_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Says what is wrong and ends the process: a defect of the engine that no status may hide. */
#define REQUIRE(condition, ...)                                                                    \
    ((condition) ? (void)0 : fake_defect(__FILE__, __LINE__, #condition, __VA_ARGS__))
void fake_defect(const char *file, int line, const char *condition, const char *format, ...)
    __attribute__((format(printf, 4, 5), noreturn, cold));

typedef struct fake_block_s fake_block_t;

typedef struct memory_s {
    pthread_mutex_t lock;
    fake_block_t *blocks;
    int64_t bytes; /* of memory_take, without mapped files */
} memory_t;

void memory_init(memory_t *memory);
/* Nothing may be left. */
void memory_finish(memory_t *memory);
/* Bytes of an own file, all ones: NaN, -1. NULL: no memory. */
void *memory_take(memory_t *memory, size_t bytes);
/* The bytes of a foreign file. */
void *memory_map(memory_t *memory, int fd, size_t bytes);
/* Gives back what either of them gave. */
void memory_drop(memory_t *memory, void *address, size_t bytes);

/* Where the work may read and write what the device calls `address`, until memory_leave; NULL: it
 * is no address of the device. The end of a block is one, too. */
void *memory_find(memory_t *memory, const void *address);
/* The work is done. */
void memory_leave(memory_t *memory);

#endif
