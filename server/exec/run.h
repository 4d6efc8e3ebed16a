/* Execution of a plan: one run = one forward and its backward(s), with one arena.
 *
 * The executor sets the base addresses of every launch's operands and hands the launch to the
 * device table; it calls nothing else. When a program returns, the device is done with it.
 *
 * A program may be put aside between two launches (device_set_way): its arena stays, and it goes on
 * where it was. All that the rest of it needs is kept in the run (underway_t).
 */
#ifndef GRADD_SERVER_EXEC_RUN_H
#define GRADD_SERVER_EXEC_RUN_H

#include "server/plan/plan.h"

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

/* Gradients of the outputs as a variant reads them: what arrives, and zeros in between. The arrays
 * are there as long as the run, so that a backward allocates nothing for them. */
typedef struct arrivals_s {
    bool *given;          /* Owned array: per output */
    const void **address; /* Owned array: per output */
    void **zeros;         /* Owned array, and the device's memory: per output */
} arrivals_t;

/* The launches that texts about NaN and infinity name. Borrowed. */
typedef struct nan_names_s {
    const plan_launch_t *first_inf; /* of the program so far */
    const plan_launch_t *culprit;   /* of a failure, if it is not the launch that has noticed it */
} nan_names_t;

/* A program that has begun. */
typedef struct underway_s {
    program_t *program; /* Borrowed: of the plan; NULL = there is none */
    exec_bases_t bases;
    const volatile int *cancel; /* Borrowed */
    int at;                     /* so many launches are done, */
    int part;                   /* and so many parts of the next one, */
    double part_seconds;        /* in that time, for the hook */
    nan_names_t names;
    /* Of a backward: */
    const variant_t *variant; /* Borrowed: of the plan; NULL = it is the forward */
    exec_groups_t groups;
} underway_t;

struct run_s {
    gradd_plan_t *plan; /* Borrowed; not touched when the run is destroyed, unless it is aside */
    gradd_device_t *device;
    void *arena; /* Owned; NULL: it needs none, or run_rest gave it back */
    int64_t arena_bytes;
    uint64_t seed;
    uint32_t flags;
    const void **inputs;            /* Owned array of borrowed pointers, set by forward */
    void **early;                   /* the same, per gradient, set by gradd_run_set_early */
    arrivals_t arrivals;            /* of the backward that is underway */
    bool has_forward;               /* the saved values are valid */
    gradd_groups_t groups;          /* of the next backward */
    const plan_launch_t *first_nan; /* Borrowed: of the forward; only the check of gradients asks */
    underway_t underway;
};

/* Whether the last forward or backward has returned GRADD_OK without being done: it was put aside.
 * What it was given stays valid until it is done, fails, or the run is destroyed. */
bool run_is_aside(const gradd_run_t *run);
/* Goes on with it. Fails as it does. */
gradd_status_t run_continue(gradd_run_t *run);
/* Gives the arena back until the next forward. */
void run_rest(gradd_run_t *run);

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

/* What is underway, until it is done or put aside. The device's queue has been entered. Waits, also
 * if it fails. */
gradd_status_t exec_program(gradd_run_t *run);

#endif
