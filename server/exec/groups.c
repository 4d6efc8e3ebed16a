/* A backward in groups: when each is done, where those go that the caller has already, and averages
 * over the ranks of a communicator.
 *
 * A group is averaged when it is done, while the rest is computed; the last one when all has been
 * computed without a failure. So the rounds of all ranks end, or those of none: a rank that fails
 * never gives its last group.
 */
#include <stdlib.h>
#include <string.h>

#include "server/exec/run.h"
#include "shm/hash.h"

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

/* ---- groups that the caller has -------------------------------------------------------------- */

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

/* ---- averages -------------------------------------------------------------------------------- */

static bool is_averaged(const gradd_run_t *run, const variant_t *v, int i) {
    return v->grads[i] != GRADD_NONE && gradd_plan_is_parameter(run->plan, run->plan->grads[i]) &&
           gradient_bytes(run->plan, i) > 0;
}

/* Sorts what is averaged by its group. */
static gradd_status_t find_spans(const gradd_run_t *run, const variant_t *v,
                                 exec_groups_t *groups) {
    const gradd_plan_t *plan = run->plan;
    const int n = run->groups.n;
    groups->spans = calloc((size_t)plan->n_grads + 1, sizeof groups->spans[0]);
    groups->first = calloc((size_t)n + 2, sizeof groups->first[0]);
    if (!groups->spans || !groups->first) return no_memory();
    for (int i = 0; i < plan->n_grads; i++)
        if (is_averaged(run, v, i)) groups->first[run->groups.of[i] + 2]++;
    for (int k = 2; k <= n + 1; k++)
        groups->first[k] += groups->first[k - 1];
    for (int i = 0; i < plan->n_grads; i++) {
        if (!is_averaged(run, v, i)) continue;
        const gradd_type_t *type = &plan->options.inputs[plan->grads[i]];
        if (!groups->grads[i]) return GRADD_FAIL(TENSOR, "no memory was given for gradient %d", i);
        groups->spans[groups->first[run->groups.of[i] + 1]++] =
            (gradd_span_t){groups->grads[i], type->dtype, gradd_type_count(type)};
    }
    return GRADD_OK;
}

/* Of what has to be the same in all ranks: names, types and groups. */
static uint64_t fingerprint(const gradd_run_t *run, const variant_t *v) {
    const gradd_plan_t *plan = run->plan;
    uint64_t hash = gradd_hash_word(GRADD_HASH_START, (uint64_t)run->groups.n);
    hash = gradd_hash_word(hash, run->groups.same);
    for (int i = 0; i < plan->n_grads; i++) {
        if (!is_averaged(run, v, i)) continue;
        const int input = plan->grads[i];
        const gradd_type_t *type = &plan->options.inputs[input];
        const char *name = gradd_model_input_name(plan->graph->model, input);
        hash = gradd_hash_bytes(hash, name, strlen(name));
        hash = gradd_hash_word(hash, (uint64_t)run->groups.of[i]);
        hash = gradd_hash_word(hash, (uint64_t)type->dtype);
        for (int k = 0; k < type->rank; k++)
            hash = gradd_hash_word(hash, (uint64_t)type->dims[k]);
    }
    return hash;
}

static gradd_status_t average(const gradd_run_t *run, exec_groups_t *groups, int group) {
    const exec_marks_t *marks = &groups->marks;
    const int first = groups->first[group];
    const gradd_comm_part_t part = {.spans = groups->spans + first,
                                    .n = groups->first[group + 1] - first,
                                    .word = marks->word,
                                    .value = marks->value + (uint64_t)group + 1,
                                    .last = group + 1 == marks->n};
    return run->device->backend->comm_average(run->device->queue, run->groups.comm, &part);
}

/* ---- a backward ------------------------------------------------------------------------------ */

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

gradd_status_t groups_begin(const gradd_run_t *run, const variant_t *v, exec_groups_t *groups) {
    if (!run->groups.comm) return GRADD_OK;
    GRADD_TRY(find_spans(run, v, groups));
    return run->device->backend->comm_begin(run->groups.comm, fingerprint(run, v),
                                            run->groups.out_round);
}

gradd_status_t groups_mark(const gradd_run_t *run, exec_groups_t *groups, int launches) {
    const gradd_device_t *d = run->device;
    exec_marks_t *marks = &groups->marks;
    const int before = marks->done, last = run->groups.comm ? marks->n - 1 : marks->n;
    while (marks->done < last && marks->after[marks->done] <= launches) {
        if (run->groups.comm) GRADD_TRY(average(run, groups, marks->done));
        marks->done++;
    }
    if (marks->done == before || run->groups.comm || !marks->word) return GRADD_OK;
    return d->backend->store(d->queue, marks->word, marks->value + (uint64_t)marks->done);
}

gradd_status_t groups_end(const gradd_run_t *run, exec_groups_t *groups) {
    while (run->groups.comm && groups->marks.done < groups->marks.n)
        GRADD_TRY(average(run, groups, groups->marks.done++));
    return GRADD_OK;
}

void groups_finish(const gradd_run_t *run, exec_groups_t *groups) {
    for (int i = 0; groups->skipped && i < run->plan->n_grads; i++)
        run->device->backend->free(run->device->queue, groups->skipped[i],
                                   gradient_bytes(run->plan, i));
    free(groups->skipped);
    free(groups->grads);
    free(groups->marks.after);
    free(groups->spans);
    free(groups->first);
}
