/* Execution of a plan: one run = one forward and its backward(s), with one arena.
 *
 * The executor sets the base addresses of every launch's operands and hands the launch to the
 * device table; it calls nothing else. When a program returns, the device is done with it.
 */
#ifndef GRADD_SERVER_EXEC_RUN_H
#define GRADD_SERVER_EXEC_RUN_H

#include "server/plan/plan.h"

struct run_s {
    gradd_plan_t *plan; /* Borrowed; not touched when the run is destroyed */
    gradd_device_t *device;
    void *arena; /* Owned */
    int64_t arena_bytes;
    uint64_t seed;
    uint32_t flags;
    const void **inputs;            /* Owned array of borrowed pointers, set by forward */
    void **early;                   /* the same, per gradient, set by gradd_run_set_early */
    bool has_forward;               /* the saved values are valid */
    gradd_groups_t groups;          /* of the next backward */
    const plan_launch_t *first_nan; /* Borrowed: of the forward; only the check of gradients asks */
};

/* When a program raises the word of its groups. */
typedef struct exec_marks_s {
    int n;          /* groups */
    int done;       /* of these, already */
    int32_t *after; /* Owned: per group, behind so many launches; rising */
    uint64_t *word; /* Borrowed: of the device */
    uint64_t value;
} exec_marks_t;

struct exec_groups_s;

/* External addresses of one program. */
typedef struct exec_bases_s {
    char *arena;
    const constant_block_t *constants;
    const void *const *inputs;
    void *const *outputs;
    void *const *grads;
    void *const *early;
    const void *const *grad_outputs;
    struct exec_groups_s *groups; /* NULL = there are none */
} exec_bases_t;

/* The groups of a backward: their marks, and the gradients with memory for those that are not for
 * the caller. */
typedef struct exec_groups_s {
    exec_marks_t marks;
    void **grads;   /* Owned array: per gradient */
    void **skipped; /* Owned array, and the device's memory: the same, NULL = for the caller */
    /* Of a backward that averages: its tensors, those of a group side by side; and where those of
     * each group begin, n + 1 places. */
    gradd_span_t *spans; /* Owned */
    int32_t *first;      /* Owned */
} exec_groups_t;

gradd_status_t groups_init(const gradd_run_t *run, const variant_t *variant, void *const *grads,
                           exec_groups_t *out);
/* Nothing is given to the queue yet, and all memory is there. */
gradd_status_t groups_begin(const gradd_run_t *run, const variant_t *variant,
                            exec_groups_t *groups);
/* So many launches are given to the queue: groups that are done with them. */
gradd_status_t groups_mark(const gradd_run_t *run, exec_groups_t *groups, int launches);
/* All is computed, without a failure. */
gradd_status_t groups_end(const gradd_run_t *run, exec_groups_t *groups);
/* Accepts one that is half built, or zeroed. */
void groups_finish(const gradd_run_t *run, exec_groups_t *groups);

/* The device's queue has been entered. Waits, also if it fails. */
gradd_status_t exec_program(gradd_run_t *run, program_t *program, const exec_bases_t *bases,
                            const volatile int *cancel);

#endif
