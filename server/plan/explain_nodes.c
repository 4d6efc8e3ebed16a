/* The fate of every node of the model in a plan: run, fused, a view, folded, merged with its equal,
 * or left out. See explain.h. */
#include <stdlib.h>
#include <string.h>

#include "server/plan/explain.h"

const char *gradd_fate_name(gradd_fate_t fate) {
    static const char *const names[] = {
        [GRADD_FATE_UNUSED] = "unused", [GRADD_FATE_RUN] = "run",
        [GRADD_FATE_FUSED] = "fused",   [GRADD_FATE_VIEW] = "view",
        [GRADD_FATE_FOLDED] = "folded", [GRADD_FATE_MERGED] = "merged",
    };
    return fate >= 0 && (size_t)fate < sizeof names / sizeof names[0] ? names[fate] : "?";
}

/* Whether the operator is a part of attention, GELU, SiLU and gated units, normalisation or losses
 * as models write them. Tests of families list the intended exceptions. */
bool explain_is_pattern_part(const char *op) {
    static const char *const parts[] = {
        "Softmax", "LogSoftmax", "Sigmoid",    "Tanh", "Erf",       "Pow",
        "Sqrt",    "Reciprocal", "ReduceMean", "Exp",  "ReduceSum",
    };
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        if (!strcmp(op, parts[i])) return true;
    return false;
}

/* The graph's value for the first named result of a model node, or GRADD_NONE. */
static gradd_val_t result_of(const graph_t *g, const model_node_t *n) {
    for (int j = 0; j < n->n_out; j++)
        if (n->out[j] >= 0 && g->of_model[n->out[j]] != GRADD_NONE) return g->of_model[n->out[j]];
    return GRADD_NONE;
}

static void set_fate(gradd_explain_t *e, int i, gradd_fate_t fate, int row) {
    e->nodes[i].fate = fate;
    e->nodes[i].row = row;
}

static gradd_fate_t fate_of_row(const gradd_explain_row_t *row) {
    if (row->kind == GRADD_EXPLAIN_VIEW) return GRADD_FATE_VIEW;
    return row->n_parts ? GRADD_FATE_FUSED : GRADD_FATE_RUN;
}

/* As far as the node's own result tells; the insides of recognised patterns follow. */
static void by_result(gradd_explain_t *e, int i) {
    const graph_t *g = e->plan->graph;
    gradd_val_t v = result_of(g, &g->model->nodes[i]);
    set_fate(e, i, GRADD_FATE_UNUSED, -1);
    if (v == GRADD_NONE) return;
    const graph_value_t *value = g->values[v];
    if (value->data)
        set_fate(e, i, GRADD_FATE_FOLDED, -1);
    else if (value->kind != VALUE_NODE)
        set_fate(e, i, GRADD_FATE_MERGED, -1);
    else if (value->node < e->n_row_of && e->row_of[value->node] >= 0) {
        int row = e->row_of[value->node];
        bool own = g->nodes[value->node].origin == i;
        set_fate(e, i, own ? fate_of_row(&e->rows[row]) : GRADD_FATE_MERGED, row);
    }
}

/* Which nodes a recognised operator stands for: those of the pass's list that no earlier row
 * computes. A pass that gives its operator new operands may list what lies behind them, too. */
static void claim_parts(gradd_explain_t *e, int r, int32_t *room) {
    gradd_explain_row_t *row = &e->rows[r];
    int n = 0;
    for (int k = 0; k < row->n_parts; k++) {
        gradd_explain_node_t *node = &e->nodes[row->parts[k]];
        if (node->row < 0 && node->fate == GRADD_FATE_UNUSED)
            set_fate(e, row->parts[k], GRADD_FATE_FUSED, r);
        if (node->row == r) room[n++] = row->parts[k];
    }
    row->parts = room;
    row->n_parts = n > 1 ? n : 0;
}

gradd_status_t explain_nodes(gradd_explain_t *e) {
    e->nodes = calloc((size_t)e->info.n_nodes + 1, sizeof e->nodes[0]);
    if (!e->nodes) return GRADD_FAIL(NOMEM, "no memory to explain the plan");
    for (int i = 0; i < e->info.n_nodes; i++) {
        const model_node_t *n = &e->plan->graph->model->nodes[i];
        e->nodes[i] =
            (gradd_explain_node_t){.name = n->name, .op = n->op_type, .domain = n->domain};
        by_result(e, i);
    }
    int total = 0;
    for (int r = 0; r < e->info.n_rows; r++)
        total += e->rows[r].n_parts;
    int32_t *room = e->parts = malloc(sizeof room[0] * ((size_t)total + 1));
    if (!room) return GRADD_FAIL(NOMEM, "no memory to explain the plan");
    for (int r = 0; r < e->info.n_rows; r++) {
        claim_parts(e, r, room);
        room += e->rows[r].n_parts;
    }
    return GRADD_OK;
}
