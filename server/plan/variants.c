/* Variants of a plan's backward: one for each set of arriving gradients that was asked for,
 * differentiated and laid out around what the forward saved. See plan.h. */
#include <stdlib.h>
#include <string.h>

#include "server/graph/compile_time.h"
#include "server/plan/recompute.h"

static gradd_status_t no_memory(void) {
    return GRADD_FAIL(NOMEM, "no memory to plan the graph");
}

static void *copy_array(const void *from, int n, size_t entry) {
    void *to = calloc((size_t)n + 1, entry);
    if (to && n) memcpy(to, from, entry * (size_t)n);
    return to;
}

void variant_destroy(variant_t *v) {
    if (!v) return;
    free(v->arrives);
    free(v->grads);
    free(v->final);
    program_finish(&v->program);
    free(v);
}

gradd_status_t variant_differentiate(gradd_plan_t *p, const bool *arrives, variant_t **out) {
    graph_t *g = p->graph;
    variant_t *v = calloc(1, sizeof *v);
    int32_t *positions = malloc(sizeof positions[0] * ((size_t)g->n_outputs + 1));
    gradd_status_t status = GRADD_OK;
    if (v) {
        v->arrives = copy_array(arrives, g->n_outputs, sizeof arrives[0]);
        v->grads = calloc((size_t)p->n_grads + 1, sizeof v->grads[0]);
    }
    if (!v || !positions || !v->arrives || !v->grads) status = no_memory();
    if (!status) {
        autodiff_t ad = {p->grads, p->n_grads, positions, 0, v->grads};
        for (int j = 0; j < g->n_outputs; j++)
            if (arrives[j]) positions[ad.n_grad_outputs++] = j;
        status = graph_autodiff(g, &ad);
        if (!status) status = graph_apply_joint(g, v->grads, p->n_grads);
    }
    free(positions);
    if (status) {
        variant_destroy(v);
        return status;
    }
    *out = v;
    return GRADD_OK;
}

/* Gradients of this input, or -1. */
static gradd_status_t gradients_of_inputs(const gradd_plan_t *p, int32_t **out) {
    const int n = p->graph->model->n_inputs + p->graph->n_lists;
    int32_t *of = malloc(sizeof of[0] * ((size_t)n + 1));
    if (!of) return no_memory();
    for (int i = 0; i < n; i++)
        of[i] = -1;
    for (int i = 0; i < p->n_grads; i++)
        of[p->grads[i]] = i;
    *out = of;
    return GRADD_OK;
}

/* The client may change a parameter once it has the gradient, so later reads of it count as well.
 */
gradd_status_t variant_find_final(const gradd_plan_t *p, variant_t *v) {
    int32_t *of = NULL;
    GRADD_TRY(gradients_of_inputs(p, &of));
    v->final = calloc((size_t)p->n_grads + 1, sizeof v->final[0]);
    for (int k = 0; v->final && k < v->program.n; k++) {
        const plan_launch_t *launch = &v->program.launches[k];
        for (int i = 0; i < launch->args.n_in + launch->args.n_out; i++) {
            const loc_t *loc = &launch->loc[i];
            int32_t grad = -1;
            if (loc->kind == LOC_GRAD || loc->kind == LOC_EARLY) grad = loc->index;
            if (loc->kind == LOC_INPUT) grad = of[loc->index];
            if (grad >= 0) v->final[grad] = k + 1;
        }
    }
    free(of);
    return v->final ? GRADD_OK : no_memory();
}

/* Lays a variant out around the values that the forward saved. UNSUPPORTED (without a message to
 * show) if it needs one that was not saved. */
static gradd_status_t variant_compile(gradd_plan_t *p, variant_t *v) {
    const graph_t *g = p->graph;
    sequence_t sequence = {0};
    layout_t layout = {0};
    bool *reads = calloc((size_t)g->n_values + 1, sizeof reads[0]);
    gradd_status_t status = reads ? GRADD_OK : no_memory();
    if (!status) status = schedule_backward(g, v->grads, p->n_grads, &sequence);
    if (!status) schedule_mark_saved(g, &sequence, v->grads, p->n_grads, reads);
    for (int i = 0; !status && i < g->n_values; i++)
        if (reads[i] && (i >= p->n_fixed || !p->saved[i]))
            status = GRADD_FAIL(UNSUPPORTED, "a value for this backward was not saved");
    if (!status) status = plan_choose(p, &sequence);
    if (!status) status = plan_apply_passes(p, &sequence);
    if (!status) {
        layout_options_t o = {.sequence = &sequence,
                              .saved = p->saved,
                              .fixed = p->fixed,
                              .n_fixed = p->n_fixed,
                              .keep = v->keep,
                              .grads = v->grads,
                              .n_grads = p->n_grads};
        status = layout_make(g, &o, &layout);
    }
    if (!status) status = program_make(p, &sequence, &layout, false, &v->program);
    if (!status) status = variant_find_final(p, v);
    if (!status) status = constants_upload(p);
    v->arena_bytes = layout.arena_bytes;
    layout_finish(&layout);
    sequence_finish(&sequence);
    free(reads);
    return status;
}

static bool same_arrivals(const gradd_plan_t *p, const bool *a, const bool *b) {
    return !memcmp(a, b, sizeof a[0] * (size_t)p->graph->n_outputs);
}

void plan_count_bytes(gradd_plan_t *p) {
    size_t bytes = arena_used(p->graph->arena) + arena_used(p->forward.arena);
    for (const variant_t *v = p->variants; v; v = v->next)
        bytes += arena_used(v->program.arena);
    p->info.constant_bytes = (int64_t)bytes + p->ready_bytes + p->constants.bytes;
}

static void add_variant(gradd_plan_t *p, variant_t *v) {
    variant_t **end = &p->variants;
    while (*end)
        end = &(*end)->next;
    *end = v;
    p->n_variants++;
    plan_count_bytes(p);
}

void plan_all_arrivals(const gradd_plan_t *p, bool *out) {
    for (int j = 0; j < p->graph->n_outputs; j++)
        out[j] = false;
    for (int k = 0; k < p->n_grad_outputs; k++)
        out[p->grad_outputs[k]] = true;
}

static gradd_status_t check_arrivals(const gradd_plan_t *p, const bool *arrives, bool *full) {
    bool any = false;
    plan_all_arrivals(p, full);
    for (int j = 0; j < p->graph->n_outputs; j++) {
        any |= arrives[j];
        if (arrives[j] && !full[j])
            return GRADD_FAIL(TENSOR, "a gradient arrives for output %d, which the plan excludes",
                              j);
    }
    if (!any) return GRADD_FAIL(TENSOR, "there is no backward without a gradient for any output");
    return GRADD_OK;
}

/* The variant that was compiled for all outputs, with zeros for those that do not arrive. */
static const variant_t *find_full(const gradd_plan_t *p, bool keep) {
    for (const variant_t *v = p->variants; v; v = v->next)
        if (v->keep == keep && v->full) return v;
    return NULL;
}

static const variant_t *find_variant(const gradd_plan_t *p, const bool *arrives, bool keep) {
    for (const variant_t *v = p->variants; v; v = v->next)
        if (v->keep == keep && same_arrivals(p, v->arrives, arrives)) return v;
    return NULL;
}

/* `full`: computed serves whatever arrives. */
static gradd_status_t new_variant(gradd_plan_t *p, const bool *arrives, const bool *computed,
                                  bool full, bool keep, const variant_t **out) {
    variant_t *v;
    GRADD_TRY(variant_differentiate(p, computed, &v));
    v->keep = keep;
    v->full = full;
    memcpy(v->arrives, arrives, sizeof arrives[0] * (size_t)p->graph->n_outputs);
    gradd_status_t status = GRADD_OK;
    if (p->graph->n_clones) status = recompute_apply(p, p->saved, p->n_fixed, v);
    if (!status) status = variant_compile(p, v);
    if (status) {
        variant_destroy(v);
        return status;
    }
    add_variant(p, v);
    *out = v;
    return GRADD_OK;
}

gradd_status_t plan_variant(gradd_plan_t *p, const bool *arrives, bool keep,
                            const variant_t **out) {
    if ((*out = find_variant(p, arrives, keep))) return GRADD_OK; /* allocates nothing */
    bool *full = calloc((size_t)p->graph->n_outputs + 1, sizeof full[0]);
    if (!full) return no_memory();
    compile_time_start(p->device->compile_ms, NULL);
    gradd_cpu_enter(p->device->info.threads); /* to fold */
    gradd_status_t status = check_arrivals(p, arrives, full);
    if (!status) {
        bool many = p->n_variants >= PLAN_MAX_VARIANTS;
        status = many ? GRADD_E_UNSUPPORTED : new_variant(p, arrives, arrives, false, keep, out);
        /* what was saved serves the union: compute that, with zeros for what does not arrive */
        if (status == GRADD_E_UNSUPPORTED && (*out = find_full(p, keep)))
            status = GRADD_OK;
        else if (status == GRADD_E_UNSUPPORTED)
            status = new_variant(p, full, full, true, keep, out);
    }
    compile_time_end();
    free(full);
    return status;
}
