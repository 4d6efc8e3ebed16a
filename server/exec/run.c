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
    arrivals_t *a = &run->arrivals;
    const size_t n_outputs = (size_t)plan->info.n_outputs;
    run->inputs = calloc(n_inputs(plan) + 1, sizeof run->inputs[0]);
    run->early = calloc((size_t)plan->n_grads + 1, sizeof run->early[0]);
    a->given = calloc(n_outputs + 1, sizeof a->given[0]);
    a->address = calloc(n_outputs + 1, sizeof a->address[0]);
    a->zeros = calloc(n_outputs + 1, sizeof a->zeros[0]);
    const bool made = run->inputs && run->early && a->given && a->address && a->zeros;
    gradd_status_t status = made ? GRADD_OK : GRADD_FAIL(NOMEM, "no memory for a run");
    if (!status)
        status = pool_take(run->device, plan->info.arena_bytes, &run->arena, &run->arena_bytes);
    if (status) {
        gradd_run_destroy(run);
        return status;
    }
    *out_run = run;
    return GRADD_OK;
}

static void arrivals_finish(const gradd_run_t *run) {
    const gradd_plan_t *plan = run->plan;
    void **zeros = run->arrivals.zeros;
    for (int j = 0; j < plan->info.n_outputs; j++) {
        if (!zeros[j]) continue;
        run->device->backend->free(run->device->queue, zeros[j],
                                   (size_t)gradd_type_bytes(&plan->info.outputs[j]));
        zeros[j] = NULL;
    }
}

/* What was underway is done, or given up. */
static void end_program(gradd_run_t *run) {
    groups_finish(run, &run->underway.groups);
    if (run->underway.variant) arrivals_finish(run);
    run->underway = (underway_t){0};
}

static void give_arena(gradd_run_t *run) {
    if (run->flags & GRADD_RUN_ONCE)
        pool_drop(run->device, run->arena, run->arena_bytes);
    else
        pool_give(run->device, run->arena, run->arena_bytes);
    run->arena = NULL;
    run->arena_bytes = 0;
}

void gradd_run_destroy(gradd_run_t *run) {
    if (!run) return;
    end_program(run);
    give_arena(run);
    free(run->inputs);
    free(run->early);
    free(run->arrivals.given);
    free(run->arrivals.address);
    free(run->arrivals.zeros);
    free(run);
}

void run_rest(gradd_run_t *run) {
    end_program(run);
    run->has_forward = false;
    give_arena(run);
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
    end_program(run); /* one that was put aside and is not wanted any more */
    memcpy(run->inputs, inputs, sizeof inputs[0] * n_inputs(plan));
    run->seed = seed;
    run->flags = flags;
    run->has_forward = false;
    run->first_nan = NULL;
    if (!run->arena) /* it rested */
        GRADD_TRY(pool_take(run->device, plan->info.arena_bytes, &run->arena, &run->arena_bytes));
    exec_bases_t b = {
        .arena = run->arena, .inputs = run->inputs, .outputs = outputs, .early = run->early};
    GRADD_TRY(check_bases(plan, &plan->forward, &b));
    run->underway = (underway_t){.program = &plan->forward, .bases = b, .cancel = cancel};
    return run_continue(run);
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

/* Zeros for the outputs whose gradient a variant reads although none arrives. */
static gradd_status_t fill_zeros(const gradd_run_t *run) {
    const gradd_plan_t *plan = run->plan;
    const arrivals_t *a = &run->arrivals;
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

/* Sets up what is underway, which the caller ends if this fails. */
static gradd_status_t begin_variant(gradd_run_t *run, const variant_t *v,
                                    const void *const *grad_outputs, void *const *grads) {
    underway_t *u = &run->underway;
    GRADD_TRY(admit_variant(run, v, grad_outputs));
    memcpy(run->arrivals.address, grad_outputs,
           sizeof grad_outputs[0] * (size_t)run->plan->info.n_outputs);
    u->variant = v;
    if (v->full) GRADD_TRY(fill_zeros(run));
    if (run->groups.n) GRADD_TRY(groups_init(run, v, grads, &u->groups));
    GRADD_TRY(pool_grow(run->device, v->arena_bytes, &run->arena, &run->arena_bytes));
    u->program = (program_t *)&v->program; /* its views are scratch of each launch */
    u->bases = (exec_bases_t){.arena = run->arena,
                              .inputs = run->inputs,
                              .grads = u->groups.grads ? u->groups.grads : grads,
                              .early = run->early,
                              .grad_outputs = run->arrivals.address,
                              .groups = u->groups.grads ? &u->groups : NULL};
    GRADD_TRY(check_bases(run->plan, u->program, &u->bases));
    if (u->bases.groups) GRADD_TRY(groups_begin(run, v, u->bases.groups));
    run->has_forward = v->keep;
    return GRADD_OK;
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

static gradd_status_t find_variant(gradd_run_t *run, const void *const *grad_outputs,
                                   void *const *grads, bool keep, const variant_t **out) {
    gradd_plan_t *plan = run->plan;
    if (!plan->variants)
        return GRADD_FAIL(STALE, "the plan was made for inference: it has no backward");
    if (!run->has_forward)
        return GRADD_FAIL(STALE, "the activations of this run are gone: a backward without 'keep' "
                                 "went before, or the forward failed");
    GRADD_TRY(check_kept(run, grads, keep));
    for (int j = 0; j < plan->info.n_outputs; j++)
        run->arrivals.given[j] = grad_outputs[j] != NULL;
    return plan_variant(plan, run->arrivals.given, keep, out);
}

static gradd_status_t begin_backward(gradd_run_t *run, const void *const *grad_outputs,
                                     void *const *grads, bool keep, bool *out_written) {
    const variant_t *v;
    GRADD_TRY(find_variant(run, grad_outputs, grads, keep, &v));
    GRADD_TRY(run->device->backend->queue_enter(run->device->queue, run->plan->info.threads));
    end_program(run);
    gradd_status_t status = begin_variant(run, v, grad_outputs, grads);
    if (status) end_program(run);
    for (int i = 0; i < run->plan->n_grads && !status; i++)
        out_written[i] = v->grads[i] != GRADD_NONE;
    return status;
}

gradd_status_t gradd_run_backward(gradd_run_t *run, const void *const *grad_outputs,
                                  void *const *grads, bool keep, bool *out_written,
                                  const volatile int *cancel) {
    gradd_status_t status = begin_backward(run, grad_outputs, grads, keep, out_written);
    if (status) {
        run->groups = (gradd_groups_t){0};
        return status;
    }
    run->underway.cancel = cancel;
    return run_continue(run);
}

/* ---- what is underway ------------------------------------------------------------------------ */

bool run_is_aside(const gradd_run_t *run) {
    return run->underway.program;
}

static gradd_status_t finish_program(gradd_run_t *run) {
    const underway_t *u = &run->underway;
    if (!u->variant) run->has_forward = run->plan->variants != NULL;
    return u->bases.groups ? groups_end(run, u->bases.groups) : GRADD_OK;
}

gradd_status_t run_continue(gradd_run_t *run) {
    underway_t *u = &run->underway;
    u->bases.constants = run->plan->constants.blocks; /* a variant made since may have moved them */
    gradd_status_t status =
        run->device->backend->queue_enter(run->device->queue, run->plan->info.threads);
    if (!status) status = exec_program(run);
    if (!status && u->at < u->program->n) return GRADD_OK;
    if (!status) status = finish_program(run);
    if (u->variant) run->groups = (gradd_groups_t){0};
    end_program(run);
    return status;
}
