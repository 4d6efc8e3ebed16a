/* Runs: arenas, forward, backward. The functions of gradd.h that execute. See run.h. */
#include "server/exec/run.h"

#include <stdlib.h>
#include <string.h>

/* Number of inputs: the model's, followed by the live-row lists. */
static size_t n_inputs(const gradd_plan_t *plan) {
    return (size_t)plan->graph->model->n_inputs + (size_t)plan->graph->n_lists;
}

gradd_status_t gradd_run_create(gradd_plan_t *plan, gradd_run_t **out_run) {
    gradd_run_t *run = calloc(1, sizeof *run);
    if (!run) return GRADD_FAIL(NOMEM, "no memory for a run");
    run->plan = plan;
    run->device = plan->device;
    run->inputs = calloc(n_inputs(plan) + 1, sizeof run->inputs[0]);
    run->early = calloc((size_t)plan->n_grads + 1, sizeof run->early[0]);
    gradd_status_t status =
        run->inputs && run->early ? GRADD_OK : GRADD_FAIL(NOMEM, "no memory for a run");
    if (!status)
        status = pool_take(run->device, plan->info.arena_bytes, &run->arena, &run->arena_bytes);
    if (status) {
        gradd_run_destroy(run);
        return status;
    }
    *out_run = run;
    return GRADD_OK;
}

void gradd_run_destroy(gradd_run_t *run) {
    if (!run) return;
    if (run->flags & GRADD_RUN_ONCE)
        pool_drop(run->device, run->arena, run->arena_bytes);
    else
        pool_give(run->device, run->arena, run->arena_bytes);
    free(run->inputs);
    free(run->early);
    free(run);
}

void gradd_run_set_early(gradd_run_t *run, void *const *early) {
    memcpy(run->early, early, sizeof early[0] * (size_t)run->plan->n_grads);
}

void gradd_run_set_groups(gradd_run_t *run, const gradd_groups_t *groups) {
    run->groups = *groups;
}

int64_t gradd_run_bytes(const gradd_run_t *run) {
    return run->arena_bytes;
}

/* Checks that all memory that the launches touch is present. */
static gradd_status_t check_bases(const gradd_plan_t *plan, const program_t *program,
                                  const exec_bases_t *b) {
    const model_t *m = plan->graph->model;
    for (int k = 0; k < program->n_external; k++) {
        const loc_t *loc = &program->external[k];
        if (loc->kind == LOC_INPUT && !b->inputs[loc->index])
            return GRADD_FAIL(TENSOR, "input '%s' is missing",
                              loc->index < m->n_inputs ? m->values[m->inputs[loc->index]].name
                                                       : "list of live rows");
        if (loc->kind == LOC_OUTPUT && !b->outputs[loc->index])
            return GRADD_FAIL(TENSOR, "no memory was given for output %d", loc->index);
        if (loc->kind == LOC_GRAD && !b->grads[loc->index])
            return GRADD_FAIL(TENSOR, "no memory was given for gradient %d", loc->index);
        if (loc->kind == LOC_EARLY && !b->early[loc->index])
            return GRADD_FAIL(TENSOR, "no memory was given for gradient %d, which a forward forms",
                              loc->index);
    }
    return GRADD_OK;
}

gradd_status_t gradd_run_forward(gradd_run_t *run, uint64_t seed, uint32_t flags,
                                 const void *const *inputs, void *const *outputs,
                                 const volatile int *cancel) {
    gradd_plan_t *plan = run->plan;
    memcpy(run->inputs, inputs, sizeof inputs[0] * n_inputs(plan));
    run->seed = seed;
    run->flags = flags;
    run->has_forward = false;
    run->first_nan = NULL;
    exec_bases_t b = {.arena = run->arena,
                      .constants = plan->constants.blocks,
                      .inputs = run->inputs,
                      .outputs = outputs,
                      .early = run->early};
    GRADD_TRY(check_bases(plan, &plan->forward, &b));
    GRADD_TRY(run->device->backend->queue_enter(run->device->queue, plan->info.threads));
    GRADD_TRY(exec_program(run, &plan->forward, &b, cancel));
    run->has_forward = plan->variants != NULL;
    return GRADD_OK;
}

/* The memory of a variant beside the present arena: a wider one, because both live while the saved
 * values move, and zeros. All of it is admitted at once, before any of it exists. */
static gradd_status_t admit_variant(const gradd_run_t *run, const variant_t *v,
                                    const void *const *given) {
    const gradd_plan_t *plan = run->plan;
    int64_t bytes = v->arena_bytes > run->arena_bytes ? v->arena_bytes : 0;
    for (int k = 0; v->full && k < plan->n_grad_outputs; k++) {
        int j = plan->grad_outputs[k];
        if (!given[j] &&
            __builtin_add_overflow(bytes, gradd_type_bytes(&plan->info.outputs[j]), &bytes))
            bytes = INT64_MAX;
    }
    return pool_admit(run->device, bytes);
}

/* Gradients of the outputs as a variant reads them: what arrives, and zeros in between. */
typedef struct arrivals_s {
    const void **address; /* Owned array: per output */
    void **zeros;         /* Owned array, and the device's memory: per output */
} arrivals_t;

/* Zeros for the outputs whose gradient a variant reads although none arrives. */
static gradd_status_t fill_zeros(const gradd_run_t *run, arrivals_t *a) {
    const gradd_plan_t *plan = run->plan;
    const gradd_backend_t *b = run->device->backend;
    for (int k = 0; k < plan->n_grad_outputs; k++) {
        int j = plan->grad_outputs[k];
        size_t bytes = (size_t)gradd_type_bytes(&plan->info.outputs[j]);
        if (a->address[j]) continue;
        gradd_status_t status = b->alloc(run->device->queue, bytes, &a->zeros[j]);
        if (status) return gradd_wrap(status, "zero gradient of output %d", j);
        GRADD_TRY(b->zero(run->device->queue, a->zeros[j], bytes));
        a->address[j] = a->zeros[j];
    }
    return GRADD_OK;
}

static gradd_status_t arrivals_init(const gradd_run_t *run, const variant_t *v,
                                    const void *const *given, arrivals_t *a) {
    const size_t n = (size_t)run->plan->info.n_outputs;
    a->address = calloc(n + 1, sizeof a->address[0]);
    a->zeros = calloc(n + 1, sizeof a->zeros[0]);
    if (!a->address || !a->zeros) return GRADD_FAIL(NOMEM, "no memory for a backward");
    memcpy(a->address, given, sizeof given[0] * n);
    return v->full ? fill_zeros(run, a) : GRADD_OK;
}

static void arrivals_finish(const gradd_run_t *run, arrivals_t *a) {
    const gradd_plan_t *plan = run->plan;
    for (int j = 0; a->zeros && j < plan->info.n_outputs; j++)
        run->device->backend->free(run->device->queue, a->zeros[j],
                                   (size_t)gradd_type_bytes(&plan->info.outputs[j]));
    free(a->address);
    free(a->zeros);
}

static gradd_status_t run_variant(gradd_run_t *run, const variant_t *v,
                                  const void *const *grad_outputs, void *const *grads,
                                  const volatile int *cancel) {
    arrivals_t arrivals = {0};
    exec_groups_t groups = {0};
    gradd_status_t status = admit_variant(run, v, grad_outputs);
    if (!status) status = arrivals_init(run, v, grad_outputs, &arrivals);
    if (!status && run->groups.n) status = groups_init(run, v, grads, &groups);
    if (!status) status = pool_grow(run->device, v->arena_bytes, &run->arena, &run->arena_bytes);
    if (!status) {
        exec_bases_t b = {.arena = run->arena,
                          .constants = run->plan->constants.blocks,
                          .inputs = run->inputs,
                          .grads = groups.grads ? groups.grads : grads,
                          .early = run->early,
                          .grad_outputs = arrivals.address,
                          .groups = groups.grads ? &groups : NULL};
        program_t *program = (program_t *)&v->program; /* its views are scratch of this call */
        status = check_bases(run->plan, program, &b);
        if (!status && b.groups) status = groups_begin(run, v, b.groups);
        if (!status) run->has_forward = v->keep;
        if (!status) status = exec_program(run, program, &b, cancel);
        if (!status && b.groups) status = groups_end(run, b.groups);
    }
    groups_finish(run, &groups);
    arrivals_finish(run, &arrivals);
    return status;
}

/* Gradients that the forward has formed must not be overwritten while another backward may read
 * them. */
static gradd_status_t check_kept(const gradd_run_t *run, void *const *grads, bool keep) {
    for (int i = 0; keep && i < run->plan->n_grads; i++)
        if (run->plan->info.early[i] && grads[i] && grads[i] == run->early[i])
            return GRADD_FAIL(TENSOR,
                              "gradient %d is to be written where the forward has formed it, but "
                              "another backward may follow",
                              i);
    return GRADD_OK;
}

static gradd_status_t backward(gradd_run_t *run, const void *const *grad_outputs,
                               void *const *grads, bool keep, bool *out_written,
                               const volatile int *cancel) {
    gradd_plan_t *plan = run->plan;
    if (!plan->variants)
        return GRADD_FAIL(STALE, "the plan was made for inference: it has no backward");
    if (!run->has_forward)
        return GRADD_FAIL(STALE, "the activations of this run are gone: a backward without 'keep' "
                                 "went before, or the forward failed");
    GRADD_TRY(check_kept(run, grads, keep));
    bool *arrives = calloc((size_t)plan->info.n_outputs + 1, sizeof arrives[0]);
    if (!arrives) return GRADD_FAIL(NOMEM, "no memory for a backward");
    for (int j = 0; j < plan->info.n_outputs; j++)
        arrives[j] = grad_outputs[j] != NULL;
    const variant_t *v;
    gradd_status_t status = plan_variant(plan, arrives, keep, &v);
    free(arrives);
    GRADD_TRY(status);
    GRADD_TRY(run->device->backend->queue_enter(run->device->queue, plan->info.threads));
    GRADD_TRY(run_variant(run, v, grad_outputs, grads, cancel));
    for (int i = 0; i < plan->n_grads; i++)
        out_written[i] = v->grads[i] != GRADD_NONE;
    return GRADD_OK;
}

gradd_status_t gradd_run_backward(gradd_run_t *run, const void *const *grad_outputs,
                                  void *const *grads, bool keep, bool *out_written,
                                  const volatile int *cancel) {
    const gradd_status_t status = backward(run, grad_outputs, grads, keep, out_written, cancel);
    run->groups = (gradd_groups_t){0};
    return status;
}
