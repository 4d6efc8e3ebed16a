/* Turns a placed sequence into launches: operators whose operands only lack their base
 * addresses. See plan.h. */
#include <stdlib.h>

#include "kernels/contract/registry.h"
#include "server/plan/plan.h"

static gradd_status_t no_memory(void) {
    return GRADD_FAIL(NOMEM, "no memory to plan the graph");
}

static gradd_status_t launch_alloc(program_t *p, int n_in, int n_out, plan_launch_t *launch) {
    size_t n = (size_t)(n_in + n_out) + 1;
    launch->view = arena_array(p->arena, n, sizeof launch->view[0]);
    launch->loc = arena_array(p->arena, n, sizeof launch->loc[0]);
    if (!launch->view || !launch->loc) return no_memory();
    launch->args.launch = p->n;
    launch->args.n_in = n_in;
    launch->args.n_out = n_out;
    launch->args.in = launch->view;
    launch->args.out = launch->view + n_in;
    return GRADD_OK;
}

static gradd_status_t set_operand(gradd_plan_t *plan, const layout_t *layout, plan_launch_t *launch,
                                  int i, gradd_val_t v) {
    const graph_t *g = plan->graph;
    if (v == GRADD_NONE) return GRADD_OK;
    launch->view[i].type = *graph_type(g, v);
    if (!g->values[v]->data) v = plan_root(g, v); /* a known value has elements of its own */
    const bool host = i < launch->args.n_in && i < 32 && launch->kernel->host_in >> i & 1;
    if (host) {
        launch->loc[i] = (loc_t){LOC_HOST, 0, (int64_t)(intptr_t)g->values[v]->data};
        return GRADD_OK;
    }
    if (g->values[v]->data) return constants_place(plan, v, &launch->loc[i]);
    launch->loc[i] = layout->loc[v];
    return GRADD_OK;
}

static gradd_status_t add_launch(gradd_plan_t *plan, const sequence_t *sequence,
                                 const layout_t *layout, int k, program_t *p) {
    const graph_t *g = plan->graph;
    const graph_node_t *n = &g->nodes[sequence->nodes[k]];
    const choice_t *choice = &sequence->choices[k];
    if (!choice->kernel) return GRADD_OK;
    plan_launch_t *launch = &p->launches[p->n];
    GRADD_TRY(launch_alloc(p, n->n_in, n->n_out, launch));
    launch->kernel = choice->kernel;
    launch->args.op = n->op;
    launch->args.attrs = n->attrs;
    launch->args.opset = n->opset;
    launch->args.node = n->random;
    launch->args.threads = plan->info.threads;
    launch->workspace = layout->workspace[k];
    launch->workspace_bytes = (int64_t)choice->prepared.workspace;
    launch->args.state = choice->prepared.state;
    launch->args.parts = choice->prepared.parts;
    launch->args.cut = choice->prepared.cut;
    launch->node = sequence->nodes[k];
    for (int i = 0; i < n->n_in; i++)
        GRADD_TRY(set_operand(plan, layout, launch, i, n->in[i]));
    for (int j = 0; j < n->n_out; j++)
        GRADD_TRY(set_operand(plan, layout, launch, n->n_in + j, n->out[j]));
    p->n++;
    return GRADD_OK;
}

static gradd_status_t add_copy_launch(gradd_plan_t *plan, const layout_t *layout,
                                      const copy_t *copy, program_t *p) {
    const graph_t *g = plan->graph;
    plan_launch_t *launch = &p->launches[p->n];
    gradd_view_t in = {*graph_type(g, copy->from), NULL};
    gradd_infer_t c = {.op = gradd_op_by_name("Identity"), .n_in = 1, .n_out = 1, .in = &in};
    if (!c.op) return GRADD_FAIL(INTERNAL, "operator Identity is missing");
    GRADD_TRY(launch_alloc(p, 1, 1, launch));
    launch->kernel = gradd_backend_kernel(plan->device->backend, &c);
    if (!launch->kernel) return gradd_no_kernel(plan->device->backend, &c);
    launch->args.op = c.op;
    launch->args.opset = g->model->opset;
    if (launch->kernel->makes_parts)
        launch->args.parts = plan_copy_parts(plan, gradd_type_bytes(&in.type));
    launch->workspace = -1;
    launch->node = -1;
    GRADD_TRY(set_operand(plan, layout, launch, 0, copy->from));
    launch->view[1].type = *graph_type(g, copy->from);
    launch->loc[1] = copy->to;
    p->n++;
    return GRADD_OK;
}

static bool is_external(const plan_launch_t *launch, int i) {
    loc_kind_t kind = launch->loc[i].kind;
    return (kind == LOC_INPUT || kind == LOC_OUTPUT || kind == LOC_GRAD || kind == LOC_EARLY) &&
           gradd_type_bytes(&launch->view[i].type) > 0;
}

static int by_place(const void *a, const void *b) {
    const loc_t *x = a, *y = b;
    return x->kind != y->kind ? (int)x->kind - (int)y->kind : x->index - y->index;
}

/* The external memory that a run must provide, found once here and not before every launch. */
static gradd_status_t list_external(program_t *p) {
    size_t most = 0;
    int n = 0;
    for (int k = 0; k < p->n; k++)
        most += (size_t)(p->launches[k].args.n_in + p->launches[k].args.n_out);
    p->external = arena_array(p->arena, most + 1, sizeof p->external[0]);
    if (!p->external) return no_memory();
    for (int k = 0; k < p->n; k++)
        for (int i = 0; i < p->launches[k].args.n_in + p->launches[k].args.n_out; i++)
            if (is_external(&p->launches[k], i)) p->external[n++] = p->launches[k].loc[i];
    qsort(p->external, (size_t)n, sizeof p->external[0], by_place);
    for (int k = 0; k < n; k++)
        if (!p->n_external || by_place(&p->external[p->n_external - 1], &p->external[k]))
            p->external[p->n_external++] = p->external[k];
    return GRADD_OK;
}

static void find_large(program_t *p) {
    for (int k = 0; k < p->n; k++) {
        plan_launch_t *launch = &p->launches[k];
        launch->large = launch->workspace_bytes >= DEVICE_MUCH;
        for (int i = 0; i < launch->args.n_in + launch->args.n_out; i++)
            launch->large |= launch->loc[i].kind != LOC_NONE &&
                             gradd_type_bytes(&launch->view[i].type) >= DEVICE_MUCH;
    }
}

gradd_status_t program_make(gradd_plan_t *plan, const sequence_t *sequence, const layout_t *layout,
                            bool forward, program_t *out) {
    int from = forward ? 0 : sequence->n_forward;
    int to = forward ? sequence->n_forward : sequence->n;
    program_t p = {0};
    GRADD_TRY(arena_create(0, &p.arena));
    p.launches =
        arena_array(p.arena, (size_t)(to - from + layout->n_copies) + 1, sizeof p.launches[0]);
    p.nodes = arena_array(p.arena, (size_t)(to - from) + 1, sizeof p.nodes[0]);
    gradd_status_t status = p.launches && p.nodes ? GRADD_OK : no_memory();
    for (int k = from; k < to && !status; k++)
        p.nodes[p.n_nodes++] = sequence->nodes[k];
    for (int k = from; k < to && !status; k++)
        status = add_launch(plan, sequence, layout, k, &p);
    for (int c = 0; c < layout->n_copies && !status; c++)
        if (layout->copies[c].after_forward == forward)
            status = add_copy_launch(plan, layout, &layout->copies[c], &p);
    if (!status) status = list_external(&p);
    if (!status) find_large(&p);
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
