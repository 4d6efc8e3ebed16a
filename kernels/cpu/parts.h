/* Launches in parts, for kernels that walk over tasks which do not depend on each other, or over
 * steps in order: each part has some of them, one behind the other.
 */
#ifndef GRADD_KERNELS_CPU_PARTS_H
#define GRADD_KERNELS_CPU_PARTS_H

#include "kernels/contract/op.h"

typedef struct gradd_range_s {
    int64_t from, to;
} gradd_range_t;

/* Those of n tasks that are the launch's part; all of them if there are no parts. */
static inline gradd_range_t gradd_part_of(const gradd_launch_t *r, int64_t n) {
    if (r->parts < 2) return (gradd_range_t){0, n};
    return (gradd_range_t){n * r->part / r->parts, n * (r->part + 1) / r->parts};
}

/* Of a launch in stages, each of which readies what the next one works on: the launch's part of n
 * tasks of one of them. There are at least as many parts as stages, or none. */
static inline gradd_range_t gradd_stage_of(const gradd_launch_t *r, int stage, int stages,
                                           int64_t n) {
    const int first = r->parts * stage / stages, end = r->parts * (stage + 1) / stages;
    const gradd_launch_t own = {.parts = end - first, .part = r->part - first};
    if (r->parts < 2) return (gradd_range_t){0, n};
    if (own.part < 0 || own.part >= own.parts) return (gradd_range_t){0, 0};
    return gradd_part_of(&own, n);
}

/* The same with two stages. */
static inline gradd_range_t gradd_half_of(const gradd_launch_t *r, bool second, int64_t n) {
    return gradd_stage_of(r, second, 2, n);
}

/* Whether what lies between the halves is due. */
static inline bool gradd_halves_meet(const gradd_launch_t *r) {
    return r->parts < 2 || r->part == r->parts / 2;
}

static inline bool gradd_part_is_last(const gradd_launch_t *r) {
    return r->part + 1 >= r->parts;
}

/* How many parts n steps are made in, each by all threads. */
static inline int gradd_parts_of_steps(const gradd_infer_t *c, int64_t n) {
    return c->parts < 2 || n < 2 ? 0 : n < c->parts ? (int)n : c->parts;
}

/* How many parts n tasks are made in, so that each has one for every thread. */
static inline int gradd_parts_of_tasks(const gradd_infer_t *c, int64_t n) {
    return gradd_parts_of_steps(c, n / (c->threads > 1 ? c->threads : 1));
}

#endif
