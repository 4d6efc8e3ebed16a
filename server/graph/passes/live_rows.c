/* Leaves out rows that are not needed: those without a label after the last attention, and padding.
 * See server/graph/live/live.h. A graph over all rows learns what could be left out. */
#include "server/graph/live/live.h"

static gradd_status_t add_list(graph_t *g, int64_t rows, gradd_val_t *out) {
    const graph_value_t value = {
        .type = {GRADD_DT_I64, 1, {rows}},
        .kind = VALUE_INPUT,
        .node = -1,
        .index = g->model->n_inputs + g->n_lists
    };
    GRADD_TRY(graph_new_value(g, &value, out));
    g->lists[g->n_lists++] = *out;
    return GRADD_OK;
}

static gradd_status_t leave_out(graph_t *g, const live_t *l) {
    gradd_val_t lists[LIVE_ALL] = {GRADD_NONE, GRADD_NONE, GRADD_NONE, GRADD_NONE};
    if (l->loss.node < 0)
        return GRADD_FAIL(UNSUPPORTED, "the graph has no loss whose rows could be left out");
    if (l->real && l->mask == GRADD_NONE)
        return GRADD_FAIL(UNSUPPORTED,
                          "the graph depends on padding, or has no mask that hides it");
    if (l->source && l->source_mask == GRADD_NONE)
        return GRADD_FAIL(UNSUPPORTED, "the graph has no encoder whose padding could be left out");
    g->all_rows = l->loss.rows;
    if (l->labelled) GRADD_TRY(add_list(g, g->label_rows, &lists[LIVE_LABELLED]));
    if (l->real) GRADD_TRY(add_list(g, g->real_rows, &lists[LIVE_REAL]));
    if (l->source) GRADD_TRY(add_list(g, g->source_rows, &lists[LIVE_SOURCE]));
    return live_rewrite(l, lists);
}

static void tell(graph_t *g, const live_t *l) {
    const live_loss_t *loss = &l->loss;
    g->live = (gradd_live_t){.label_input = -1, .mask_input = -1, .source_input = -1};
    if (loss->node < 0) return;
    const graph_node_t *n = &g->nodes[loss->node];
    g->live.label_input = g->values[loss->labels]->index;
    g->live.ignore = gradd_attr_int(n->attrs, "ignore_index", 0);
    g->live.shift = gradd_attr_int(n->attrs, "shift", 0);
    g->live.positions = loss->positions;
    g->live.batch = loss->rows / loss->positions;
    if (l->mask != GRADD_NONE) g->live.mask_input = g->values[l->mask]->index;
    if (l->source_mask != GRADD_NONE) {
        g->live.source_input = g->values[l->source_mask]->index;
        g->live.source_positions = l->source_positions;
    }
    live_count(l, &g->live);
}

static gradd_status_t live_rows(graph_t *g) {
    live_t l;
    const bool all = !g->label_rows && !g->real_rows && !g->source_rows;
    const bool sets[LIVE_ALL] = {[LIVE_LABELLED] = all || g->label_rows,
                                 [LIVE_REAL] = all || g->real_rows,
                                 [LIVE_SOURCE] = all || g->source_rows};
    gradd_status_t status = live_find(g, sets, &l);
    if (!status && all)
        tell(g, &l);
    else if (!status)
        status = leave_out(g, &l);
    live_finish(&l);
    return status;
}

const graph_pass_t graph_pass_live_rows = {"live_rows", 95, true, live_rows, {"GatherRows"}};
