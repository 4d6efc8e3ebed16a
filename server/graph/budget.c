/* See budget.h. Reading the clock is a system call, so it happens once in a while only. */
#include "server/graph/budget.h"

#include <stdbool.h>
#include <time.h>

#define UNITS_PER_LOOK 256

static _Thread_local struct {
    bool running;
    int64_t units; /* since the last look */
    int64_t start_us, limit_us;
} budget;

static int64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

void budget_start(int64_t limit_ms) {
    budget.running = true;
    budget.units = 0;
    budget.start_us = now_us();
    budget.limit_us = limit_ms < INT64_MAX / 1000 ? limit_ms * 1000 : INT64_MAX;
}

void budget_end(void) {
    budget.running = false;
}

gradd_status_t budget_spend(int64_t units) {
    if (!budget.running || budget.limit_us <= 0) return GRADD_OK;
    budget.units += units;
    if (budget.units < UNITS_PER_LOOK) return GRADD_OK;
    budget.units = 0;
    if (now_us() - budget.start_us <= budget.limit_us) return GRADD_OK;
    return GRADD_FAIL(LIMIT, "compiling the graph took more than %lld ms, the limit (--compile-ms)",
                      (long long)(budget.limit_us / 1000));
}
