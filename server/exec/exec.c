/* The executor: walks the launches of a program on a device. See run.h. */
#include <stdio.h>
#include <string.h>

#include "platform/platform.h"
#include "server/exec/run.h"

static void *address(const exec_bases_t *b, const plan_launch_t *launch, int i) {
    const loc_t *loc = &launch->loc[i];
    switch (loc->kind) {
    case LOC_ARENA:
        return b->arena + loc->offset;
    case LOC_INPUT:
        return (void *)b->inputs[loc->index];
    case LOC_OUTPUT:
        return b->outputs[loc->index];
    case LOC_GRAD:
        return b->grads[loc->index];
    case LOC_EARLY:
        return b->early[loc->index];
    case LOC_GRAD_OUTPUT:
        return (void *)b->grad_outputs[loc->index];
    case LOC_CONST:
        return (char *)b->constants[loc->index].memory + loc->offset;
    case LOC_HOST:
        return (void *)(intptr_t)loc->offset;
    case LOC_NONE:
        break;
    }
    return NULL;
}

static const char *launch_text(const gradd_run_t *run, const plan_launch_t *launch, char *text,
                               size_t bytes) {
    static const char gradient[] = "gradient of ";
    if (launch->node < 0) return "copy to an output or gradient";
    const graph_t *g = run->plan->graph;
    const graph_node_t *n = &g->nodes[launch->node];
    size_t at = n->backward ? sizeof gradient - 1 : 0;
    memcpy(text, gradient, at);
    graph_node_text(g, graph_origin(g, n), text + at, bytes - at);
    return text;
}

/* Says at which launch a run has failed. */
static gradd_status_t at_launch(gradd_status_t status, const gradd_run_t *run,
                                const plan_launch_t *launch) {
    char text[GRAPH_NODE_TEXT + 16];
    const graph_t *g = run->plan->graph;
    if (launch->node >= 0) gradd_at_node(status, graph_origin(g, &g->nodes[launch->node])->name);
    return gradd_wrap(status, "%s", launch_text(run, launch, text, sizeof text));
}

/* The same where the device does not know at which. */
static gradd_status_t at_some_launch(gradd_status_t status, const gradd_run_t *run,
                                     const program_t *program) {
    char first[GRAPH_NODE_TEXT + 16], last[GRAPH_NODE_TEXT + 16];
    if (!program->n) return status;
    return gradd_wrap(status, "one of %d operators, %s to %s", program->n,
                      launch_text(run, &program->launches[0], first, sizeof first),
                      launch_text(run, &program->launches[program->n - 1], last, sizeof last));
}

#define OUTSIDE_TEXT 160 /* with the name of an input */

static bool has_nan(const gradd_run_t *run, const plan_launch_t *launch, const exec_bases_t *b,
                    int i) {
    const gradd_device_t *d = run->device;
    gradd_view_t v = launch->args.in[i];
    gradd_nonfinite_t found;
    v.data = address(b, launch, i);
    if (!v.data || !gradd_dtype_is_float(v.type.dtype)) return false;
    return d->backend->find_nonfinite(d->queue, &v, &found) == GRADD_OK && found.nan >= 0;
}

/* Whether a launch of the backward, the first with a NaN, has read one that the forward has left.
 * Where it has written over an operand, that is taken to be so. */
static bool reads_saved_nan(const gradd_run_t *run, const plan_launch_t *launch,
                            const exec_bases_t *b) {
    for (int i = 0; i < launch->args.n_in; i++) {
        const loc_kind_t kind = launch->loc[i].kind;
        if (kind != LOC_ARENA && kind != LOC_EARLY) continue;
        for (int j = 0; j < launch->args.n_out; j++)
            if (address(b, launch, i) == launch->args.out[j].data) return true;
        if (has_nan(run, launch, b, i)) return true;
    }
    return false;
}

/* Says which operand from outside of the graph, of those that a launch reads, has a NaN already. */
static const char *nan_outside(const gradd_run_t *run, const plan_launch_t *launch,
                               const exec_bases_t *b, char text[OUTSIDE_TEXT]) {
    const model_t *m = run->plan->graph->model;
    for (int i = 0; i < launch->args.n_in; i++) {
        const loc_t *loc = &launch->loc[i];
        if (loc->kind != LOC_INPUT && loc->kind != LOC_GRAD_OUTPUT) continue;
        if (!has_nan(run, launch, b, i)) continue;
        if (loc->kind == LOC_INPUT)
            snprintf(text, OUTSIDE_TEXT, "; input '%.120s' has one already",
                     m->values[m->inputs[loc->index]].name);
        else
            snprintf(text, OUTSIDE_TEXT, "; the gradient of output %d has one when it arrives",
                     loc->index);
        return text;
    }
    return "";
}

/* Whether a launch computes a gradient: the backward may make values of the forward again. */
static bool makes_gradient(const gradd_run_t *run, const plan_launch_t *launch) {
    return launch->node < 0 || run->plan->graph->nodes[launch->node].backward;
}

/* The check of gradients alone: a NaN of the forward is noted for when one reaches a gradient.
 * *culprit is the launch that a failure names. */
static gradd_status_t check_gradient(gradd_run_t *run, const plan_launch_t *launch, int j,
                                     const exec_bases_t *b, const plan_launch_t **culprit) {
    char text[GRAPH_NODE_TEXT + 16], outside[OUTSIDE_TEXT];
    gradd_nonfinite_t found;
    const gradd_device_t *d = run->device;
    const gradd_view_t *v = &launch->args.out[j];
    if (!v->data || !gradd_dtype_is_float(v->type.dtype)) return GRADD_OK;
    if (b->grads ? !makes_gradient(run, launch) : run->first_nan != NULL) return GRADD_OK;
    GRADD_TRY(d->backend->find_nonfinite(d->queue, v, &found));
    if (found.nan < 0) return GRADD_OK;
    if (!b->grads) {
        run->first_nan = launch;
        return GRADD_OK;
    }
    if (!run->first_nan || !reads_saved_nan(run, launch, b))
        return GRADD_FAIL(NONFINITE, "output %d, element %lld of %lld is nan%s", j,
                          (long long)found.nan, (long long)gradd_type_count(&v->type),
                          nan_outside(run, launch, b, outside));
    *culprit = run->first_nan;
    return GRADD_FAIL(
        NONFINITE, "it makes the first nan of the forward%s; in the backward that reaches %s",
        nan_outside(run, run->first_nan, b, outside), launch_text(run, launch, text, sizeof text));
}

/* A healthy graph has infinities inside: masks of -inf, an exp that overflows under a division or
 * in the branch that a Where does not take. Only outputs and gradients must be finite; NaN never
 * heals. *first_inf is the first launch with an infinity, for the text. */
static gradd_status_t check_output(const gradd_run_t *run, const plan_launch_t *launch, int j,
                                   const exec_bases_t *b, const plan_launch_t **first_inf) {
    char text[GRAPH_NODE_TEXT + 16], outside[OUTSIDE_TEXT];
    gradd_nonfinite_t found;
    const gradd_device_t *d = run->device;
    const gradd_view_t *v = &launch->args.out[j];
    const loc_kind_t to = launch->loc[launch->args.n_in + j].kind;
    if (!v->data || !gradd_dtype_is_float(v->type.dtype)) return GRADD_OK;
    GRADD_TRY(d->backend->find_nonfinite(d->queue, v, &found));
    if (found.inf >= 0 && !*first_inf) *first_inf = launch;
    bool leaves = found.inf >= 0 && (to == LOC_OUTPUT || to == LOC_GRAD || to == LOC_EARLY);
    bool inf = leaves && (found.nan < 0 || found.inf < found.nan);
    if (!inf && found.nan < 0) return GRADD_OK;
    bool known = inf && *first_inf != launch;
    return GRADD_FAIL(NONFINITE, "output %d, element %lld of %lld is %s%s%s%s", j,
                      (long long)(inf ? found.inf : found.nan),
                      (long long)gradd_type_count(&v->type),
                      !inf             ? "nan"
                      : found.negative ? "-inf"
                                       : "inf",
                      inf ? "" : nan_outside(run, launch, b, outside),
                      known ? "; the first infinity came from " : "",
                      known ? launch_text(run, *first_inf, text, sizeof text) : "");
}

static gradd_status_t check_finite(gradd_run_t *run, const plan_launch_t *launch,
                                   const exec_bases_t *b, nan_names_t *named) {
    for (int j = 0; j < launch->args.n_out; j++)
        if (run->flags & GRADD_RUN_FINITE_CHECK)
            GRADD_TRY(check_output(run, launch, j, b, &named->first_inf));
        else
            GRADD_TRY(check_gradient(run, launch, j, b, &named->culprit));
    return GRADD_OK;
}

/* A piece of the memory that the launch uses, before its first part; false: all is there. What it
 * reads in the arena has been written. */
static bool touch_memory(const gradd_run_t *run, const plan_launch_t *launch) {
    const underway_t *u = &run->underway;
    if (!launch->large || u->part) return false;
    for (int i = 0; i < launch->args.n_in + launch->args.n_out; i++) {
        const bool written = i >= launch->args.n_in;
        const loc_kind_t kind = launch->loc[i].kind;
        if (kind == LOC_NONE || kind == LOC_CONST || kind == LOC_HOST) continue;
        if (kind == LOC_ARENA && !written) continue;
        if (device_touch(run->device, address(&u->bases, launch, i),
                         gradd_type_bytes(&launch->view[i].type), written))
            return true;
    }
    return launch->workspace >= 0 && device_touch(run->device, u->bases.arena + launch->workspace,
                                                  launch->workspace_bytes, true);
}

/* All of the launch, or the next part of it. */
static gradd_status_t launch_part(gradd_run_t *run, plan_launch_t *launch) {
    underway_t *u = &run->underway;
    const gradd_device_t *d = run->device;
    int n = launch->args.n_in + launch->args.n_out;
    for (int i = 0; i < n; i++)
        launch->view[i].data = address(&u->bases, launch, i);
    launch->args.workspace = launch->workspace < 0 ? NULL : u->bases.arena + launch->workspace;
    launch->args.seed = run->seed;
    launch->args.dropout_off = run->flags & GRADD_RUN_DROPOUT_OFF;
    launch->args.part = u->part;
    double start = d->hook ? gradd_platform.seconds() : 0;
    gradd_status_t status = d->backend->launch(d->queue, launch->kernel, &launch->args);
    if (d->hook) u->part_seconds += gradd_platform.seconds() - start;
    u->part++;
    return status;
}

/* The last part of the launch is done. */
static gradd_status_t end_launch(gradd_run_t *run, const plan_launch_t *launch) {
    underway_t *u = &run->underway;
    const gradd_device_t *d = run->device;
    gradd_status_t status = GRADD_OK;
    if (run->flags & (GRADD_RUN_FINITE_CHECK | GRADD_RUN_GRADIENT_CHECK))
        status = check_finite(run, launch, &u->bases, &u->names);
    if (d->hook) d->hook(d->hook_context, run->plan, launch, u->part_seconds);
    u->part = 0;
    u->part_seconds = 0;
    u->at++;
    if (!status && u->bases.groups) status = groups_mark(run, u->bases.groups, u->at);
    return status;
}

/* Until the end, or until something else is to run. */
static gradd_status_t execute_all(gradd_run_t *run) {
    underway_t *u = &run->underway;
    program_t *program = u->program;
    while (u->at < program->n) {
        if (u->cancel && __atomic_load_n(u->cancel, __ATOMIC_RELAXED))
            return GRADD_FAIL(STALE, "the run was cancelled");
        plan_launch_t *launch = &program->launches[u->at];
        gradd_status_t status = GRADD_OK;
        if (!touch_memory(run, launch)) {
            status = launch_part(run, launch);
            if (!status && u->part >= launch->args.parts) status = end_launch(run, launch);
        }
        if (status) return at_launch(status, run, u->names.culprit ? u->names.culprit : launch);
        if (u->at < program->n && device_makes_way(run->device)) return GRADD_OK;
    }
    return GRADD_OK;
}

gradd_status_t exec_program(gradd_run_t *run) {
    const gradd_device_t *d = run->device;
    const program_t *program = run->underway.program;
    int failed = -1;
    gradd_status_t status = execute_all(run);
    gradd_failure_t noticed;
    if (status) noticed = *gradd_failure();
    /* also after a failure: a caller that is told of it may reuse the memory */
    gradd_status_t waited = d->backend->wait(d->queue, &failed);
    if (!waited) return status;
    /* it comes before whatever was noticed here, but for a loss of the device that was */
    if (failed >= 0)
        at_launch(waited, run, &program->launches[failed]);
    else if (status == waited)
        gradd_failure_restore(&noticed);
    else
        at_some_launch(waited, run, program);
    return waited;
}
