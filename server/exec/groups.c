/* A backward in groups: when each is done, and where those go that the caller has already. */
#include <stdlib.h>
#include <string.h>

#include "server/exec/run.h"

static gradd_status_t no_memory(void) {
    return GRADD_FAIL(NOMEM, "no memory for a backward");
}

/* The last launch of a group is the last one of its gradients and of the groups before it. */
static gradd_status_t find_marks(const gradd_run_t *run, const variant_t *v, exec_marks_t *marks) {
    const gradd_groups_t *g = &run->groups;
    *marks = (exec_marks_t){g->n, g->skipped, NULL, g->word, g->value};
    marks->after = calloc((size_t)g->n + 1, sizeof marks->after[0]);
    if (!marks->after) return no_memory();
    for (int i = 0; i < run->plan->n_grads; i++)
        if (v->final[i] > marks->after[g->of[i]]) marks->after[g->of[i]] = v->final[i];
    for (int k = 1; k < g->n; k++)
        if (marks->after[k] < marks->after[k - 1]) marks->after[k] = marks->after[k - 1];
    return GRADD_OK;
}

static size_t gradient_bytes(const gradd_plan_t *plan, int i) {
    return (size_t)gradd_type_bytes(&plan->options.inputs[plan->grads[i]]);
}

static bool is_skipped(const gradd_run_t *run, const variant_t *v, int i) {
    return v->grads[i] != GRADD_NONE && run->groups.of[i] < run->groups.skipped;
}

static gradd_status_t admit_skipped(const gradd_run_t *run, const variant_t *v) {
    int64_t bytes = 0;
    for (int i = 0; i < run->plan->n_grads; i++)
        if (is_skipped(run, v, i) &&
            __builtin_add_overflow(bytes, (int64_t)gradient_bytes(run->plan, i), &bytes))
            bytes = INT64_MAX;
    return pool_admit(run->device, bytes);
}

static gradd_status_t place_skipped(const gradd_run_t *run, const variant_t *v,
                                    exec_groups_t *groups) {
    const gradd_backend_t *b = run->device->backend;
    GRADD_TRY(admit_skipped(run, v));
    for (int i = 0; i < run->plan->n_grads; i++) {
        if (!is_skipped(run, v, i)) continue;
        GRADD_TRY(b->alloc(run->device->queue, gradient_bytes(run->plan, i), &groups->skipped[i]));
        groups->grads[i] = groups->skipped[i];
    }
    return GRADD_OK;
}

gradd_status_t groups_init(const gradd_run_t *run, const variant_t *v, void *const *grads,
                           exec_groups_t *out) {
    const size_t n = (size_t)run->plan->n_grads;
    GRADD_TRY(find_marks(run, v, &out->marks));
    out->grads = calloc(n + 1, sizeof out->grads[0]);
    out->skipped = calloc(n + 1, sizeof out->skipped[0]);
    if (!out->grads || !out->skipped) return no_memory();
    if (n) memcpy(out->grads, grads, sizeof grads[0] * n);
    return run->groups.skipped ? place_skipped(run, v, out) : GRADD_OK;
}

void groups_finish(const gradd_run_t *run, exec_groups_t *groups) {
    for (int i = 0; groups->skipped && i < run->plan->n_grads; i++)
        run->device->backend->free(run->device->queue, groups->skipped[i],
                                   gradient_bytes(run->plan, i));
    free(groups->skipped);
    free(groups->grads);
    free(groups->marks.after);
}
