/* The handler calls functions that are safe in one: openat, write and those of memory. See crash.h.
 */
#include "server/verbs/crash.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

#define STACK_BYTES (64 << 10)

static lost_plans_t *noted;
static _Atomic(const uint8_t *) blamed, blamed_making;
static atomic_bool in_backward;
static _Thread_local bool makes; /* this thread makes plans */

/* Any thread's fault. A second one, here or elsewhere, finds nothing to blame. */
static void handle(int number) {
    const uint8_t *key = atomic_exchange(makes ? &blamed_making : &blamed, NULL);
    if (key) lost_note(noted, key, !makes && atomic_load(&in_backward));
    signal(number, SIG_DFL);
    raise(number); /* comes when the handler has returned, if the fault does not */
}

#ifdef __SANITIZE_ADDRESS__ /* has a handler of its own, which says more */
void crash_guard(lost_plans_t *lost) {
    noted = lost;
    (void)handle;
}

void crash_guard_making(void) {
    makes = true;
}
#else
void crash_guard_making(void) {
    static char stack[STACK_BYTES];
    const stack_t other = {.ss_sp = stack, .ss_size = sizeof stack};
    makes = true;
    sigaltstack(&other, NULL);
}

void crash_guard(lost_plans_t *lost) {
    static const int crashes[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
    static char stack[STACK_BYTES];
    const stack_t other = {.ss_sp = stack, .ss_size = sizeof stack};
    struct sigaction action = {.sa_handler = handle, .sa_flags = SA_ONSTACK};
    noted = lost;
    sigemptyset(&action.sa_mask);
    sigaltstack(&other, NULL);
    for (size_t i = 0; i < sizeof crashes / sizeof *crashes; i++)
        sigaction(crashes[i], &action, NULL);
}
#endif

void crash_blame(const uint8_t *key, bool backward) {
    atomic_store(&in_backward, backward);
    atomic_store(&blamed, key);
}

void crash_blame_making(const uint8_t *key) {
    atomic_store(&blamed_making, key);
}
