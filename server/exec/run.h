/* Execution of a plan: one run = one forward and its backward(s), with one arena.
 *
 * The executor sets the base addresses of every step's operands and hands the step to the device
 * table; it calls nothing else. One hook per node serves tracing and checks. Engine thread.
 */
#ifndef GRADD_SERVER_EXEC_RUN_H
#define GRADD_SERVER_EXEC_RUN_H

#include "server/plan/plan.h"

struct run_s {
    gradd_plan_t *plan; /* Borrowed; not touched when the run is destroyed */
    const gradd_backend_t *backend;
    void *arena; /* Owned */
    int64_t arena_bytes;
    uint64_t seed;
    uint32_t flags;
    const void **inputs; /* Owned array of borrowed pointers, set by forward */
    bool has_forward;    /* the saved values are valid */
};

/* Called after each node when set; `seconds` is its own time on a synchronous device. */
typedef void (*exec_hook_t)(void *context, const gradd_plan_t *plan, const step_t *step,
                            double seconds);

/* Process-wide hook for tracing and tests; NULL = none. */
void exec_set_hook(exec_hook_t hook, void *context);

/* External addresses of one program. */
typedef struct exec_bases_s {
    char *arena;
    const void *const *inputs;
    void *const *outputs;
    void *const *grads;
    const void *const *grad_outputs;
} exec_bases_t;

gradd_status_t exec_program(const struct run_s *run, program_t *program, const exec_bases_t *bases,
                            const volatile int *cancel);

#endif
