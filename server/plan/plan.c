/* Compiles a model for concrete shapes: graph, gradient, schedule, layout, programs. See plan.h. */
#include "server/plan/plan.h"

#include <stdlib.h>
#include <string.h>

#include "platform/platform.h"
#include "server/graph/compile_time.h"
#include "server/plan/recompute.h"

static double now_ms(void) {
    return gradd_platform.seconds() * 1e3;
}

static gradd_status_t no_memory(void) {
    return GRADD_FAIL(NOMEM, "no memory to plan the graph");
}

static void *copy_array(const void *from, int n, size_t entry) {
    void *to = calloc((size_t)n + 1, entry);
    if (to && n) memcpy(to, from, entry * (size_t)n);
    return to;
}

/* ---- the plan -------------------------------------------------------------------------------- */

static gradd_status_t check_list(const char *what, const int32_t *list, int n, int limit) {
    bool *seen = calloc((size_t)limit + 1, sizeof seen[0]);
    gradd_status_t status = seen ? GRADD_OK : no_memory();
    for (int i = 0; i < n && !status; i++) {
        if (list[i] < 0 || list[i] >= limit)
            status = GRADD_FAIL(TENSOR, "%s %d: %d is outside 0..%d", what, i, list[i], limit - 1);
        else if (seen[list[i]])
            status = GRADD_FAIL(TENSOR, "%s %d is repeated", what, list[i]);
        else
            seen[list[i]] = true;
    }
    free(seen);
    return status;
}

static gradd_status_t check_options(const model_t *m, const gradd_plan_options_t *o) {
    if (!o->device) return GRADD_FAIL(UNSUPPORTED, "the plan is for no device");
    if (o->memory_budget < 0)
        return GRADD_FAIL(LIMIT, "a memory budget of %lld bytes", (long long)o->memory_budget);
    if (o->recompute < GRADD_RECOMPUTE_NONE || o->recompute > GRADD_RECOMPUTE_COMPROMISE)
        return GRADD_FAIL(UNSUPPORTED, "there is no way of recomputing with number %d",
                          (int)o->recompute);
    if (o->n_inputs != m->n_inputs)
        return GRADD_FAIL(TENSOR, "expected types of %d inputs, got %d", m->n_inputs, o->n_inputs);
    if (o->label_rows < 0 || o->real_rows < 0 || o->source_rows < 0)
        return GRADD_FAIL(TENSOR, "%lld labelled, %lld real and %lld source rows",
                          (long long)o->label_rows, (long long)o->real_rows,
                          (long long)o->source_rows);
    GRADD_TRY(check_list("gradient of input", o->grads, o->n_grads, m->n_inputs));
    GRADD_TRY(check_list("parameter", o->parameters, o->n_parameters, m->n_inputs));
    GRADD_TRY(check_list("output", o->outputs, o->n_outputs, m->n_outputs));
    return check_list("gradient for output", o->grad_outputs, o->n_grad_outputs, o->n_outputs);
}

/* All lists, so that the plan can be made once more. */
static gradd_status_t copy_options(gradd_plan_t *p, const gradd_plan_options_t *o) {
    gradd_plan_options_t *to = &p->options;
    *to = *o;
    to->cancel = NULL;
    to->inputs = copy_array(o->inputs, o->n_inputs, sizeof o->inputs[0]);
    to->grads = p->grads = copy_array(o->grads, o->n_grads, sizeof o->grads[0]);
    to->outputs = copy_array(o->outputs, o->n_outputs, sizeof o->outputs[0]);
    to->grad_outputs = p->grad_outputs =
        copy_array(o->grad_outputs, o->n_grad_outputs, sizeof o->grad_outputs[0]);
    to->parameters = copy_array(o->parameters, o->n_parameters, sizeof o->parameters[0]);
    p->n_grads = o->n_grads;
    p->n_grad_outputs = o->n_grad_outputs;
    p->output_types = calloc((size_t)o->n_outputs + 1, sizeof p->output_types[0]);
    p->has_grad = calloc((size_t)o->n_grads + 1, sizeof p->has_grad[0]);
    p->is_early = calloc((size_t)o->n_grads + 1, sizeof p->is_early[0]);
    p->early = calloc((size_t)o->n_grads + 1, sizeof p->early[0]);
    for (int i = 0; p->early && i < o->n_grads; i++)
        p->early[i] = GRADD_NONE;
    const bool got = to->inputs && to->grads && to->outputs && to->grad_outputs && to->parameters;
    return got && p->output_types && p->has_grad && p->is_early && p->early ? GRADD_OK
                                                                            : no_memory();
}

static void free_options(gradd_plan_options_t *o) {
    free((void *)o->inputs);
    free((void *)o->grads);
    free((void *)o->outputs);
    free((void *)o->grad_outputs);
    free((void *)o->parameters);
}

gradd_status_t plan_mark_saved(const gradd_plan_t *p, const variant_t *v, bool *saved) {
    sequence_t sequence = {0};
    GRADD_TRY(schedule_backward(p->graph, v->grads, p->n_grads, &sequence));
    schedule_mark_saved(p->graph, &sequence, v->grads, p->n_grads, saved);
    sequence_finish(&sequence);
    return GRADD_OK;
}

gradd_status_t plan_join(const gradd_plan_t *p, const variant_t *v, const bool *saved,
                         sequence_t *out) {
    const graph_t *g = p->graph;
    sequence_t forward = {0}, backward = {0};
    gradd_status_t status = schedule_forward(g, saved, &forward);
    if (!status && v) status = schedule_backward(g, v->grads, p->n_grads, &backward);
    if (!status) {
        out->n = forward.n + backward.n;
        out->n_forward = forward.n;
        out->nodes = malloc(sizeof out->nodes[0] * ((size_t)out->n + 1));
        if (!out->nodes) status = no_memory();
    }
    if (!status) {
        if (forward.n) memcpy(out->nodes, forward.nodes, sizeof out->nodes[0] * (size_t)forward.n);
        if (backward.n)
            memcpy(out->nodes + forward.n, backward.nodes,
                   sizeof out->nodes[0] * (size_t)backward.n);
    }
    sequence_finish(&forward);
    sequence_finish(&backward);
    return status;
}

static void keep_places(gradd_plan_t *p, const layout_t *layout) {
    for (int v = 0; v < p->n_fixed; v++)
        if (p->saved[v]) p->fixed[v] = layout->loc[v];
}

static gradd_status_t lay_out(gradd_plan_t *p, variant_t *primary) {
    const graph_t *g = p->graph;
    sequence_t sequence = {0};
    layout_t layout = {0};
    gradd_status_t status = plan_join(p, primary, p->saved, &sequence);
    if (!status) status = plan_choose(p, &sequence);
    if (!status) status = plan_apply_passes(p, &sequence);
    if (!status) {
        const layout_options_t o = layout_of_plan(p, &sequence, p->saved, p->n_fixed, primary);
        status = layout_make(g, &o, &layout);
    }
    if (!status) status = program_make(p, &sequence, &layout, true, &p->forward);
    if (!status && primary) status = program_make(p, &sequence, &layout, false, &primary->program);
    if (!status && primary) status = variant_find_final(p, primary);
    if (!status) status = constants_upload(p);
    if (!status) {
        keep_places(p, &layout);
        if (primary) primary->arena_bytes = layout.arena_bytes;
        p->info.arena_bytes = layout.arena_bytes;
        p->info.saved_bytes = layout.saved_bytes;
        p->info.n_launches_forward = p->forward.n;
        p->info.n_launches_backward = primary ? primary->program.n : 0;
    }
    layout_finish(&layout);
    sequence_finish(&sequence);
    return status;
}

/* The part of a parameter's gradient that the forward forms and a backward reads lies in the
 * caller's memory, where the gradient will be. Of several parts, only the first does. */
static void find_early(gradd_plan_t *p) {
    const graph_t *g = p->graph;
    for (int k = 0; k < g->n_forward; k++) {
        const graph_node_t *n = &g->nodes[k];
        for (int j = 0; j < n->n_out && j < (int)sizeof n->op->formed; j++) {
            const int input = n->op->formed[j] - 1;
            const gradd_val_t v = n->out[j];
            if (input < 0 || v == GRADD_NONE || !p->saved[v] || plan_root(g, v) != v) continue;
            for (int i = 0; i < p->n_grads; i++)
                if (g->inputs[p->grads[i]] == n->in[input] && p->early[i] == GRADD_NONE &&
                    graph_is_parameter(g, n->in[input]))
                    p->early[i] = v, p->is_early[i] = true;
        }
    }
    p->graph->formed = p->early;
    p->graph->n_formed = p->n_grads;
}

/* The backward that is expected: the gradient of the first listed output alone (a loss), while the
 * forward saves for the union of all that may arrive. */
static gradd_status_t differentiate(gradd_plan_t *p, recompute_ends_t *out) {
    graph_t *g = p->graph;
    bool *arrives = calloc((size_t)g->n_outputs + 1, sizeof arrives[0]);
    if (!arrives) return no_memory();
    variant_t *all = NULL, *primary = NULL;
    plan_all_arrivals(p, arrives);
    gradd_status_t status = variant_differentiate(p, arrives, &all);
    if (!status && p->n_grad_outputs > 1) {
        memset(arrives, 0, sizeof arrives[0] * (size_t)g->n_outputs);
        arrives[p->grad_outputs[0]] = true;
        status = variant_differentiate(p, arrives, &primary);
    }
    free(arrives);
    bool *saved = status ? NULL : calloc((size_t)g->n_values + 1, sizeof saved[0]);
    if (!status && !saved) status = no_memory();
    if (!status) status = plan_mark_saved(p, all, saved);
    if (!status && primary) status = plan_mark_saved(p, primary, saved);
    for (int i = 0; !status && i < p->n_grads; i++)
        p->has_grad[i] = all->grads[i] != GRADD_NONE;
    p->saved = saved;
    *out = (recompute_ends_t){primary ? primary : all, primary ? all : NULL};
    return status;
}

static gradd_status_t begin(gradd_plan_t *p, const model_t *m, const gradd_plan_options_t *o,
                            recompute_ends_t *ends) {
    const graph_options_t go = {.inputs = o->inputs,
                                .outputs = o->outputs,
                                .n_outputs = o->n_outputs,
                                .plain = o->flags & GRADD_PLAN_PLAIN,
                                .backend = p->device->backend,
                                .parameters = o->parameters,
                                .n_parameters = o->n_parameters,
                                .trained = o->grads,
                                .n_trained = o->n_grad_outputs ? o->n_grads : 0,
                                .dense_loss = o->flags & GRADD_PLAN_DENSE_LOSS,
                                .early = o->flags & GRADD_PLAN_EARLY,
                                .label_rows = o->label_rows,
                                .real_rows = o->real_rows,
                                .source_rows = o->source_rows};
    GRADD_TRY(copy_options(p, o));
    GRADD_TRY(graph_create(m, &go, &p->graph));
    if (o->n_grad_outputs && o->n_grads) {
        GRADD_TRY(differentiate(p, ends));
        if (p->graph->early) find_early(p);
        return GRADD_OK;
    }
    p->saved = calloc((size_t)p->graph->n_values + 1, sizeof p->saved[0]);
    return p->saved ? GRADD_OK : no_memory();
}

static gradd_status_t place(gradd_plan_t *p, variant_t *primary) {
    p->n_fixed = p->graph->n_values;
    p->fixed = calloc((size_t)p->n_fixed + 1, sizeof p->fixed[0]);
    return p->fixed ? lay_out(p, primary) : no_memory();
}

static void fill_info(gradd_plan_t *p, const gradd_plan_options_t *o) {
    for (int j = 0; j < p->graph->n_outputs; j++)
        p->output_types[j] = *graph_type(p->graph, p->graph->outputs[j]);
    p->info.n_outputs = o->n_outputs;
    p->info.n_grads = o->n_grads;
    p->info.outputs = p->output_types;
    p->info.has_grad = p->has_grad;
    p->info.early = p->is_early;
    p->info.final = p->variants ? p->variants->final : NULL;
    p->info.live = p->graph->live;
    p->info.n_lists = p->graph->n_lists;
    for (int i = 0; i < p->graph->n_lists; i++)
        p->info.lists[i] = graph_type(p->graph, p->graph->lists[i])->dims[0];
    for (int i = 0; i < o->n_parameters; i++)
        p->info.parameter_bytes += gradd_type_bytes(&o->inputs[o->parameters[i]]);
    plan_count_bytes(p);
}

static gradd_status_t build(gradd_plan_t *p, const model_t *m, const gradd_plan_options_t *o) {
    recompute_ends_t ends = {0};
    gradd_status_t status = begin(p, m, o, &ends);
    if (!status && ends.primary && (o->memory_budget || o->recompute))
        status = recompute_choose(p, &ends);
    if (!status) status = place(p, ends.primary);
    variant_destroy(ends.all);
    if (status) {
        variant_destroy(ends.primary);
        return status;
    }
    p->variants = ends.primary;
    fill_info(p, o);
    return GRADD_OK;
}

gradd_status_t gradd_plan_create(gradd_model_t *model, const gradd_plan_options_t *options,
                                 gradd_plan_t **out_plan) {
    double start = now_ms();
    GRADD_TRY(check_options(model, options));
    gradd_plan_t *p = calloc(1, sizeof *p);
    if (!p) return no_memory();
    p->device = options->device;
    compile_time_start(p->device->compile_ms, options->cancel);
    gradd_cpu_enter(1); /* to fold: other threads have more to do */
    gradd_status_t status = build(p, model, options);
    compile_time_end();
    if (status) {
        gradd_plan_destroy(p);
        return status;
    }
    p->info.compile_ms = now_ms() - start;
    *out_plan = p;
    return GRADD_OK;
}

void gradd_plan_destroy(gradd_plan_t *p) {
    if (!p) return;
    p->device->backend->wait(p->device->queue, NULL); /* its constants may be on their way */
    for (variant_t *v = p->variants, *next; v; v = next) {
        next = v->next;
        variant_destroy(v);
    }
    program_finish(&p->forward);
    constants_finish(p);
    plan_unprepare(p);
    graph_destroy(p->graph);
    free(p->output_types);
    free(p->has_grad);
    free(p->is_early);
    free(p->early);
    free_options(&p->options);
    free(p->saved);
    free(p->fixed);
    free(p);
}

gradd_status_t gradd_plan_curve(const gradd_plan_t *plan, gradd_curve_t *out_curve) {
    recompute_ends_t ends = {0};
    *out_curve = (gradd_curve_t){.points = {{plan->info.arena_bytes, 0, 0}}, .n = 1};
    if (!plan->variants) return GRADD_OK;
    gradd_plan_t *p = calloc(1, sizeof *p);
    if (!p) return no_memory();
    p->device = plan->device;
    compile_time_start(p->device->compile_ms, NULL);
    gradd_cpu_enter(1); /* to fold: other threads have more to do */
    gradd_status_t status = begin(p, plan->graph->model, &plan->options, &ends);
    if (!status) status = recompute_curve(p, &ends, out_curve);
    compile_time_end();
    variant_destroy(ends.all);
    variant_destroy(ends.primary);
    gradd_plan_destroy(p);
    return status;
}

const gradd_plan_info_t *gradd_plan_info(const gradd_plan_t *plan) {
    return &plan->info;
}

gradd_device_t *gradd_plan_device(const gradd_plan_t *plan) {
    return plan->device;
}

bool gradd_plan_is_parameter(const gradd_plan_t *plan, int input) {
    const graph_t *g = plan->graph;
    return input >= 0 && input < g->model->n_inputs && graph_is_parameter(g, g->inputs[input]);
}
