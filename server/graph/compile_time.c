/* See compile_time.h. Reading the clock is a system call, so it happens once in a while only. */
#include "server/graph/compile_time.h"

#include <stdbool.h>

#include "platform/platform.h"

#define UNITS_PER_LOOK 256

static _Thread_local struct {
    bool running;
    int64_t units; /* since the last look */
    int64_t start_us, limit_us;
    const volatile int *cancel; /* Borrowed; NULL = none */
} spent;

static int64_t now_us(void) {
    return (int64_t)(gradd_platform.thread_seconds() * 1e6);
}

void compile_time_start(int64_t limit_ms, const volatile int *cancel) {
    spent.running = true;
    spent.cancel = cancel;
    spent.units = 0;
    spent.start_us = now_us();
    spent.limit_us = limit_ms < INT64_MAX / 1000 ? limit_ms * 1000 : INT64_MAX;
}

void compile_time_end(void) {
    spent.running = false;
}

gradd_status_t compile_time_spend(int64_t units) {
    if (!spent.running) return GRADD_OK;
    spent.units += units;
    if (spent.units < UNITS_PER_LOOK) return GRADD_OK;
    spent.units = 0;
    if (spent.cancel && __atomic_load_n(spent.cancel, __ATOMIC_RELAXED))
        return GRADD_FAIL(STALE, "compiling the graph was cancelled");
    if (spent.limit_us <= 0 || now_us() - spent.start_us <= spent.limit_us) return GRADD_OK;
    return GRADD_FAIL(LIMIT, "compiling the graph took more than %lld ms, the limit (--compile-ms)",
                      (long long)(spent.limit_us / 1000));
}
