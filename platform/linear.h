/* Memory and clock of WebAssembly: no pages to map, no clock of a thread. See platform.h. */
#ifndef GRADD_PLATFORM_LINEAR_H
#define GRADD_PLATFORM_LINEAR_H

#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#define LINEAR_ALIGN ((size_t)64)

static void *linear_take(size_t bytes) {
    if (bytes > SIZE_MAX - LINEAR_ALIGN) return NULL;
    return aligned_alloc(LINEAR_ALIGN, (bytes + LINEAR_ALIGN) / LINEAR_ALIGN * LINEAR_ALIGN);
}

static void linear_give_back(void *memory, size_t bytes) {
    (void)bytes;
    free(memory);
}

static double linear_seconds(void) {
    struct timespec t;
    if (clock_gettime(CLOCK_MONOTONIC, &t)) return 0;
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

#endif
