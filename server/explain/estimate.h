/* Bytes of one training step, added up from a plan: of a file (estimate.c) or of one in the daemon
 * (verb plan.estimate). The parts are listed in columns.inc.
 */
#ifndef GRADD_SERVER_EXPLAIN_ESTIMATE_H
#define GRADD_SERVER_EXPLAIN_ESTIMATE_H

#include "server/api/gradd.h"

typedef struct optimizer_s {
    const char *name;
    int per_byte, per_element; /* bytes of state per byte of parameter, and per element */
} optimizer_t;

typedef struct estimate_s {
    int64_t batch;       /* 0 = as given */
    gradd_curve_t curve; /* no points = not asked for */
#define PART(member, heading) int64_t member;
#include "server/explain/columns.inc"
#undef PART
} estimate_t;

typedef struct estimate_part_s {
    const char *key, *heading;
    size_t offset;
} estimate_part_t;

/* Ends with one that has no key; the total comes last. */
extern const estimate_part_t estimate_parts[];
int64_t estimate_value(const estimate_t *e, const estimate_part_t *part);

/* The curve as a table: what stands above it, and a line for each point. */
#define ESTIMATE_CURVE_HEAD "        arena of a run  computed again  more time (by a model)"
#define ESTIMATE_CURVE_LINE 64
const char *estimate_curve_line(const gradd_curve_t *curve, int point,
                                char buffer[ESTIMATE_CURVE_LINE]);
/* More time of a point, in percent. */
double estimate_percent(const gradd_curve_t *curve, int point);

/* The line below the table, with the name of the optimizer. */
#define ESTIMATE_FOOT "(optimizer %s; memory of the processes without a model is not included)"

extern const char estimate_optimizers[]; /* their names, each with a blank in front */
/* NULL: the default; '_' counts as '-'. Fails with UNSUPPORTED; the sentence begins with
 * `what`. */
gradd_status_t estimate_optimizer(const char *name, size_t n, const char *what,
                                  const optimizer_t **out_optimizer);

typedef enum estimate_role_e {
    ESTIMATE_FROZEN,
    ESTIMATE_TRAINED, /* a parameter with a gradient */
    ESTIMATE_DATA,    /* comes with the call */
} estimate_role_t;

/* Adds one input, then what the plan itself takes. Sums that are too large stay at INT64_MAX. */
void estimate_add_input(estimate_t *e, estimate_role_t role, const gradd_type_t *type,
                        const optimizer_t *optimizer);
/* Sets the trained parameters where several plans read the same ones: it replaces the plans' sum.
 */
void estimate_set_trained(estimate_t *e, int64_t bytes, int64_t elements,
                          const optimizer_t *optimizer);
/* arriving: positions of the outputs whose gradient arrives, which is copied, too. Of several plans
 * of one step all arenas are alive at once. */
void estimate_add_plan(estimate_t *e, const gradd_plan_info_t *info, const int32_t *arriving,
                       int n_arriving);
/* Makes `curve` that of two plans of one step: each saving is the cheapest that is left of either.
 */
void estimate_merge_curves(gradd_curve_t *curve, const gradd_curve_t *other);
/* accumulate: gradients of several backwards are added up. */
void estimate_finish(estimate_t *e, bool accumulate);

#endif
