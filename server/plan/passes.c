/* Runs the passes of passes/ over a sequence, in the order of their numbers. The list is generated
 * from the files. See plan.h. */
#include <stdlib.h>

#include "server/graph/compile_time.h"
#include "server/plan/plan.h"

#define X(name) extern const placed_pass_t placed_pass_##name;
#include "placed_list.inc"
#undef X

static const placed_pass_t *const passes[] = {
#define X(name) &placed_pass_##name,
#include "placed_list.inc"
#undef X
};

static int by_order(const void *a, const void *b) {
    return (*(const placed_pass_t *const *)a)->order - (*(const placed_pass_t *const *)b)->order;
}

gradd_status_t plan_apply_passes(gradd_plan_t *p, sequence_t *sequence) {
    const placed_pass_t *sorted[sizeof passes / sizeof passes[0]];
    const size_t n = sizeof passes / sizeof passes[0];
    for (size_t i = 0; i < n; i++) {
        sorted[i] = passes[i];
        if (phase_of(sorted[i]->order) != PHASE_PLACED)
            return GRADD_FAIL(INTERNAL, "pass %s: %d is no number of a pass over a sequence",
                              sorted[i]->name, sorted[i]->order);
    }
    qsort(sorted, n, sizeof sorted[0], by_order);
    for (size_t i = 0; i < n; i++) {
        gradd_status_t status = compile_time_spend(sequence->n);
        if (!status) status = sorted[i]->apply(p, sequence);
        if (status) return gradd_wrap(status, "pass %s", sorted[i]->name);
    }
    return GRADD_OK;
}
