/* Explains a plan: one row per operator in order of execution, with type, bytes, arithmetic, kernel
 * and what it stands for.
 *
 * The rows follow the order of the programs; facts about a launch are read off the launch itself.
 * Only the expected backward is shown: variants are made when a run asks for them. Engine thread,
 * like everything of a plan. See server/api/gradd.h. */
#include "server/plan/explain.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/describe/cost.h"
#include "server/graph/live/live.h"

static gradd_status_t no_memory(void) {
    return GRADD_FAIL(NOMEM, "no memory to explain the plan");
}

static gradd_status_t new_row(gradd_explain_t *e, gradd_explain_row_t **out) {
    if (e->info.n_rows == e->cap_rows) {
        int wider = e->cap_rows ? 2 * e->cap_rows : 256;
        gradd_explain_row_t *moved = realloc(e->rows, sizeof moved[0] * (size_t)wider);
        if (!moved) return no_memory();
        e->rows = moved;
        e->cap_rows = wider;
    }
    *out = &e->rows[e->info.n_rows++];
    **out =
        (gradd_explain_row_t){.launch = -1, .node = -1, .node_name = "", .node_op = "", .live = ""};
    return GRADD_OK;
}

/* Bytes of what a forward node makes that a backward will read. */
static int64_t saved_by(const gradd_plan_t *p, const graph_node_t *n) {
    int64_t bytes = 0;
    for (int j = 0; j < n->n_out; j++) {
        gradd_val_t v = n->out[j];
        if (v == GRADD_NONE || v >= p->n_fixed || plan_root(p->graph, v) != v) continue;
        if (p->saved[v] && p->fixed[v].kind == LOC_ARENA)
            bytes += gradd_type_bytes(graph_type(p->graph, v));
    }
    return bytes;
}

/* Cost and scratch of a launch with these operands. */
static void measure(const plan_launch_t *launch, gradd_explain_row_t *row) {
    const gradd_launch_t *args = &launch->args;
    gradd_type_t out[GRADD_OP_MAX_OUT] = {{0}};
    gradd_cost_t cost;
    for (int j = 0; j < args->n_out; j++)
        out[j] = args->out[j].type;
    gradd_infer_t c = {args->op, args->attrs, args->opset,   args->n_in, args->n_out,
                       args->in, out,         args->threads, 0};
    gradd_kernel_cost(launch->kernel, &c, &cost);
    row->kernel = launch->kernel->name;
    row->flops = cost.flops;
    row->bytes_read = cost.read;
    row->bytes_written = cost.written;
    row->work_bytes = launch->workspace_bytes;
}

static bool is_leftover(const graph_t *g, const graph_node_t *n) {
    if (n->backward || n->n_in < 1 || n->in[0] == GRADD_NONE) return false;
    return explain_is_pattern_part(n->op->name) &&
           gradd_dtype_is_float(graph_type(g, n->in[0])->dtype);
}

static void fill_row(const gradd_explain_t *e, int32_t id, gradd_explain_row_t *row) {
    const graph_t *g = e->plan->graph;
    const graph_node_t *n = &g->nodes[id];
    const model_node_t *origin = graph_origin(g, n);
    row->backward = n->backward;
    row->op = n->op->name;
    row->domain = n->op->domain;
    row->node = n->origin;
    row->node_name = origin->name;
    row->node_op = origin->op_type;
    row->parts = n->parts;
    row->n_parts = n->n_parts;
    if (n->out[0] != GRADD_NONE) row->type = *graph_type(g, n->out[0]);
    row->leftover = is_leftover(g, n);
    if (!n->backward) row->saved_bytes = saved_by(e->plan, n);
    row->again = n->backward ? graph_is_clone(g, id) : e->again[id];
    static const char *const sets[] = {
        [LIVE_LABELLED] = "labelled", [LIVE_REAL] = "real", [LIVE_SOURCE] = "source"};
    row->live = n->rows ? sets[n->rows] : "";
}

/* One scheduled node; *at moves on when the program has a launch for it. */
static gradd_status_t add_node_row(gradd_explain_t *e, int32_t id, const program_t *program,
                                   int *at) {
    const graph_node_t *n = &e->plan->graph->nodes[id];
    gradd_explain_row_t *row = NULL;
    GRADD_TRY(new_row(e, &row));
    e->row_of[id] = e->info.n_rows - 1;
    fill_row(e, id, row);
    if (*at < program->n && program->launches[*at].node == id) {
        row->kind = GRADD_EXPLAIN_RUN;
        row->launch = *at;
        measure(&program->launches[(*at)++], row);
        return GRADD_OK;
    }
    bool view = n->op->flags & GRADD_OP_VIEW;
    row->kind = view ? GRADD_EXPLAIN_VIEW : GRADD_EXPLAIN_EMPTY;
    row->kernel = view ? "view" : "none";
    row->leftover = false;
    return GRADD_OK;
}

/* The copies that follow the operators of a program. */
static gradd_status_t add_copy_rows(gradd_explain_t *e, const program_t *program, int at,
                                    bool backward) {
    for (; at < program->n; at++) {
        gradd_explain_row_t *row = NULL;
        if (program->launches[at].node >= 0) continue;
        GRADD_TRY(new_row(e, &row));
        row->kind = GRADD_EXPLAIN_COPY;
        row->launch = at;
        row->backward = backward;
        row->op = program->launches[at].args.op->name;
        row->domain = program->launches[at].args.op->domain;
        row->type = program->launches[at].args.out[0].type;
        measure(&program->launches[at], row);
        row->kernel = "copy";
    }
    return GRADD_OK;
}

static gradd_status_t add_phase(gradd_explain_t *e, const program_t *program, bool backward) {
    int at = 0;
    for (int k = 0; k < program->n_nodes; k++)
        GRADD_TRY(add_node_row(e, program->nodes[k], program, &at));
    return add_copy_rows(e, program, at, backward);
}

static void find_again(gradd_explain_t *e) {
    const graph_t *g = e->plan->graph;
    const program_t *program = &e->plan->variants->program;
    for (int k = 0; k < program->n_nodes; k++)
        if (graph_is_clone(g, program->nodes[k])) e->again[program->nodes[k] - g->n_forward] = true;
}

static gradd_status_t add_rows(gradd_explain_t *e) {
    const gradd_plan_t *p = e->plan;
    if (p->variants) find_again(e);
    GRADD_TRY(add_phase(e, &p->forward, false));
    return p->variants ? add_phase(e, &p->variants->program, true) : GRADD_OK;
}

static void add_info(gradd_explain_t *e) {
    const gradd_plan_t *p = e->plan;
    const graph_t *g = p->graph;
    e->info.n_nodes = g->model->n_nodes;
    e->info.device = &p->device->info;
    e->info.rows = g->all_rows;
    e->info.label_rows = g->label_rows;
    e->info.real_rows = g->real_rows;
    for (int i = 0; i < g->model->n_inputs; i++)
        e->info.input_bytes += gradd_type_bytes(graph_type(g, g->inputs[i]));
    for (int j = 0; j < p->info.n_outputs; j++)
        e->info.output_bytes += gradd_type_bytes(&p->info.outputs[j]);
    for (int i = 0; i < p->n_grads; i++)
        if (p->has_grad[i])
            e->info.grad_bytes += gradd_type_bytes(graph_type(g, g->inputs[p->grads[i]]));
}

gradd_status_t gradd_plan_explain(const gradd_plan_t *plan, gradd_explain_t **out_explain) {
    gradd_explain_t *e = calloc(1, sizeof *e);
    if (!e) return no_memory();
    e->plan = plan;
    e->n_row_of = plan->graph->n_nodes;
    e->row_of = malloc(sizeof e->row_of[0] * ((size_t)e->n_row_of + 1));
    e->again = calloc((size_t)plan->graph->n_forward + 1, sizeof e->again[0]);
    gradd_status_t status = e->row_of && e->again ? GRADD_OK : no_memory();
    for (int i = 0; !status && i < e->n_row_of; i++)
        e->row_of[i] = -1;
    if (!status) status = add_rows(e);
    if (!status) add_info(e);
    if (!status) status = explain_nodes(e);
    if (status) {
        gradd_explain_destroy(e);
        return status;
    }
    *out_explain = e;
    return GRADD_OK;
}

void gradd_explain_destroy(gradd_explain_t *e) {
    if (!e) return;
    free(e->rows);
    free(e->row_of);
    free(e->again);
    free(e->nodes);
    free(e->parts);
    free(e);
}

const gradd_explain_info_t *gradd_explain_info(const gradd_explain_t *e) {
    return &e->info;
}

const gradd_explain_row_t *gradd_explain_row(const gradd_explain_t *e, int i) {
    return i >= 0 && i < e->info.n_rows ? &e->rows[i] : NULL;
}

const gradd_explain_node_t *gradd_explain_node(const gradd_explain_t *e, int i) {
    return i >= 0 && i < e->info.n_nodes ? &e->nodes[i] : NULL;
}
