/* Turns a placed sequence into steps: operator calls whose operands only lack their base addresses.
 * See plan.h. */
#include <stdlib.h>

#include "kernels/registry.h"
#include "server/plan/plan.h"

static gradd_status_t no_memory(void) {
    return GRADD_FAIL(NOMEM, "no memory to plan the graph");
}

static gradd_status_t step_alloc(program_t *p, int n_in, int n_out, step_t *step) {
    size_t n = (size_t)(n_in + n_out) + 1;
    step->view = arena_array(p->arena, n, sizeof step->view[0]);
    step->loc = arena_array(p->arena, n, sizeof step->loc[0]);
    if (!step->view || !step->loc) return no_memory();
    step->run.step = p->n;
    step->run.n_in = n_in;
    step->run.n_out = n_out;
    step->run.in = step->view;
    step->run.out = step->view + n_in;
    return GRADD_OK;
}

static gradd_status_t set_operand(gradd_plan_t *plan, const layout_t *layout, step_t *step, int i,
                                  gradd_val_t v) {
    const graph_t *g = plan->graph;
    if (v == GRADD_NONE) return GRADD_OK;
    step->view[i].type = g->values[v]->type;
    if (!g->values[v]->data) v = plan_root(g, v); /* a known value has elements of its own */
    const bool host = i < step->run.n_in && i < 32 && step->kernel->host_in >> i & 1;
    if (host) {
        step->loc[i] = (loc_t){LOC_HOST, 0, (int64_t)(intptr_t)g->values[v]->data};
        return GRADD_OK;
    }
    if (g->values[v]->data) return constants_place(plan, v, &step->loc[i]);
    step->loc[i] = layout->loc[v];
    return GRADD_OK;
}

static gradd_status_t add_step(gradd_plan_t *plan, const sequence_t *sequence,
                               const layout_t *layout, int k, program_t *p) {
    const graph_t *g = plan->graph;
    const graph_node_t *n = &g->nodes[sequence->nodes[k]];
    const call_t *call = &sequence->calls[k];
    if (!call->kernel) return GRADD_OK;
    step_t *step = &p->steps[p->n];
    GRADD_TRY(step_alloc(p, n->n_in, n->n_out, step));
    step->kernel = call->kernel;
    step->run.op = n->op;
    step->run.attrs = n->attrs;
    step->run.opset = n->opset;
    step->run.node = n->random;
    step->run.threads = plan->info.threads;
    step->work = layout->work[k];
    step->work_bytes = (int64_t)call->prepared.work;
    step->run.state = call->prepared.state;
    step->node = sequence->nodes[k];
    for (int i = 0; i < n->n_in; i++)
        GRADD_TRY(set_operand(plan, layout, step, i, n->in[i]));
    for (int j = 0; j < n->n_out; j++)
        GRADD_TRY(set_operand(plan, layout, step, n->n_in + j, n->out[j]));
    p->n++;
    return GRADD_OK;
}

static gradd_status_t add_copy_step(gradd_plan_t *plan, const layout_t *layout, const copy_t *copy,
                                    program_t *p) {
    const graph_t *g = plan->graph;
    step_t *step = &p->steps[p->n];
    gradd_view_t in = {g->values[copy->from]->type, NULL};
    gradd_infer_t c = {.op = gradd_op_by_name("Identity"), .n_in = 1, .n_out = 1, .in = &in};
    if (!c.op) return GRADD_FAIL(INTERNAL, "operator Identity is missing");
    GRADD_TRY(step_alloc(p, 1, 1, step));
    step->kernel = gradd_backend_kernel(plan->device->backend, &c);
    if (!step->kernel) return gradd_no_kernel(plan->device->backend, &c);
    step->run.op = c.op;
    step->run.opset = g->model->opset;
    step->work = -1;
    step->node = -1;
    GRADD_TRY(set_operand(plan, layout, step, 0, copy->from));
    step->view[1].type = g->values[copy->from]->type;
    step->loc[1] = copy->to;
    p->n++;
    return GRADD_OK;
}

static bool is_external(const step_t *step, int i) {
    loc_kind_t kind = step->loc[i].kind;
    return (kind == LOC_INPUT || kind == LOC_OUTPUT || kind == LOC_GRAD) &&
           gradd_type_bytes(&step->view[i].type) > 0;
}

static int by_place(const void *a, const void *b) {
    const loc_t *x = a, *y = b;
    return x->kind != y->kind ? (int)x->kind - (int)y->kind : x->index - y->index;
}

/* What a call must bring along, found once here and not before every step. */
static gradd_status_t list_external(program_t *p) {
    size_t most = 0;
    int n = 0;
    for (int k = 0; k < p->n; k++)
        most += (size_t)(p->steps[k].run.n_in + p->steps[k].run.n_out);
    p->external = arena_array(p->arena, most + 1, sizeof p->external[0]);
    if (!p->external) return no_memory();
    for (int k = 0; k < p->n; k++)
        for (int i = 0; i < p->steps[k].run.n_in + p->steps[k].run.n_out; i++)
            if (is_external(&p->steps[k], i)) p->external[n++] = p->steps[k].loc[i];
    qsort(p->external, (size_t)n, sizeof p->external[0], by_place);
    for (int k = 0; k < n; k++)
        if (!p->n_external || by_place(&p->external[p->n_external - 1], &p->external[k]))
            p->external[p->n_external++] = p->external[k];
    return GRADD_OK;
}

gradd_status_t program_make(gradd_plan_t *plan, const sequence_t *sequence, const layout_t *layout,
                            bool forward, program_t *out) {
    int from = forward ? 0 : sequence->n_forward;
    int to = forward ? sequence->n_forward : sequence->n;
    program_t p = {0};
    GRADD_TRY(arena_create(0, &p.arena));
    p.steps = arena_array(p.arena, (size_t)(to - from + layout->n_copies) + 1, sizeof p.steps[0]);
    p.nodes = arena_array(p.arena, (size_t)(to - from) + 1, sizeof p.nodes[0]);
    gradd_status_t status = p.steps && p.nodes ? GRADD_OK : no_memory();
    for (int k = from; k < to && !status; k++)
        p.nodes[p.n_nodes++] = sequence->nodes[k];
    for (int k = from; k < to && !status; k++)
        status = add_step(plan, sequence, layout, k, &p);
    for (int c = 0; c < layout->n_copies && !status; c++)
        if (layout->copies[c].after_forward == forward)
            status = add_copy_step(plan, layout, &layout->copies[c], &p);
    if (!status) status = list_external(&p);
    if (status) {
        program_finish(&p);
        return status;
    }
    *out = p;
    return GRADD_OK;
}

void program_finish(program_t *program) {
    if (!program) return;
    arena_destroy(program->arena);
    *program = (program_t){0};
}
