/* Applies a choice of forward values to compute again, and says what it costs. See recompute.h.
 */
#include "server/plan/recompute.h"

#include <stdlib.h>
#include <string.h>

#include "server/graph/compile_time.h"

static gradd_status_t no_memory(void) {
    return GRADD_FAIL(NOMEM, "no memory to plan the graph");
}

/* ---- a set of kept values -------------------------------------------------------------------- */

/* Whether backward finds the value where the forward left it. */
static bool is_there(const graph_t *g, gradd_val_t v, const bool *keep, int n_keep) {
    const graph_value_t *value = g->values[v];
    if (value->data || value->kind != VALUE_NODE || value->node >= g->n_forward) return true;
    return value->root < n_keep ? keep[value->root] || g->values[value->root]->kind != VALUE_NODE
                                : g->values[value->root]->kind != VALUE_NODE;
}

static gradd_status_t redirect(graph_t *g, const bool *keep, int n_keep, gradd_val_t *v) {
    if (*v == GRADD_NONE) return GRADD_OK;
    *v = graph_original(g, *v);
    return is_there(g, *v, keep, n_keep) ? GRADD_OK : graph_clone_of(g, *v, v);
}

gradd_status_t recompute_apply(gradd_plan_t *p, const bool *keep, int n_keep, variant_t *variant) {
    graph_t *g = p->graph;
    for (int32_t id = g->n_forward; id < g->n_nodes; id++) {
        for (int i = 0; i < g->nodes[id].n_in; i++)
            GRADD_TRY(redirect(g, keep, n_keep, &g->nodes[id].in[i]));
        const graph_node_t *n = &g->nodes[id];
        if (n->op->flags & GRADD_OP_VIEW && n->out[0] != GRADD_NONE)
            g->values[n->out[0]]->root = g->values[n->in[0]]->root;
    }
    for (int i = 0; i < p->n_grads; i++)
        GRADD_TRY(redirect(g, keep, n_keep, &variant->grads[i]));
    return GRADD_OK;
}

/* ---- what it takes --------------------------------------------------------------------------- */

static gradd_status_t find_costs(recompute_t *r) {
    const graph_t *g = r->plan->graph;
    for (int k = 0; k < r->sequence.n; k++) {
        const int32_t id = r->sequence.nodes[k];
        const double us = plan_node_us(r->plan, &g->nodes[id], &r->sequence.choices[k]);
        r->choices[id] = r->sequence.choices[k];
        r->total_us += us;
        if (id < g->n_forward) r->us[id] = us;
    }
    return GRADD_OK;
}

/* The choice for a node serves its clone: the same operator on the same types. */
static gradd_status_t take_choices(recompute_t *r) {
    const graph_t *g = r->plan->graph;
    sequence_t *s = &r->sequence;
    s->choices = malloc(sizeof s->choices[0] * ((size_t)s->n + 1));
    if (!s->choices) return no_memory();
    r->extra_us = 0;
    for (int k = 0; k < s->n; k++) {
        int32_t id = s->nodes[k];
        if (graph_is_clone(g, id)) {
            id -= g->n_forward;
            r->extra_us += r->us[id];
        }
        s->choices[k] = r->choices[id];
    }
    for (int i = 0; i < r->n_chunked; i++)
        r->extra_us += r->chunked[i].us[r->chunked[i].level] - r->chunked[i].us[0];
    return GRADD_OK;
}

static gradd_status_t mark_saved(recompute_t *r) {
    memset(r->saved, 0, sizeof r->saved[0] * (size_t)r->n_values);
    GRADD_TRY(plan_mark_saved(r->plan, r->ends.primary, r->saved));
    return r->ends.all ? plan_mark_saved(r->plan, r->ends.all, r->saved) : GRADD_OK;
}

static gradd_status_t find_in_use(recompute_t *r) {
    const graph_t *g = r->plan->graph;
    const layout_options_t o =
        layout_of_plan(r->plan, &r->sequence, r->saved, r->n_values, r->ends.primary);
    free(r->in_use);
    r->in_use = malloc(sizeof r->in_use[0] * ((size_t)r->sequence.n + 1));
    if (!r->in_use) return no_memory();
    GRADD_TRY(layout_in_use(g, &o, r->in_use));
    r->peak = r->n_peak = 0;
    for (int k = 0; k <= r->sequence.n; k++) {
        if (r->in_use[k] > r->in_use[r->peak]) r->peak = k, r->n_peak = 0;
        r->n_peak += r->in_use[k] == r->in_use[r->peak];
    }
    return GRADD_OK;
}

gradd_status_t recompute_measure(recompute_t *r) {
    GRADD_TRY(compile_time_spend(1 + r->plan->graph->n_nodes / 8));
    GRADD_TRY(recompute_apply(r->plan, r->keep, r->n_values, r->ends.primary));
    if (r->ends.all) GRADD_TRY(recompute_apply(r->plan, r->keep, r->n_values, r->ends.all));
    GRADD_TRY(mark_saved(r));
    sequence_finish(&r->sequence);
    GRADD_TRY(plan_join(r->plan, r->ends.primary, r->saved, &r->sequence));
    GRADD_TRY(take_choices(r));
    GRADD_TRY(plan_apply_passes(r->plan, &r->sequence));
    return find_in_use(r);
}

/* ---- beginning and end ----------------------------------------------------------------------- */

static gradd_status_t begin(recompute_t *r) {
    gradd_plan_t *p = r->plan;
    GRADD_TRY(plan_join(p, r->ends.primary, p->saved, &r->sequence));
    GRADD_TRY(plan_choose(p, &r->sequence));
    return graph_clone_forward(p->graph);
}

/* Numbers of nodes are those behind the cloning, which moves the backward. */
static gradd_status_t alloc_arrays(recompute_t *r) {
    const graph_t *g = r->plan->graph;
    const size_t values = (size_t)g->n_values + 1, nodes = (size_t)g->n_nodes + 1;
    for (int k = 0; k < r->sequence.n; k++)
        if (r->sequence.nodes[k] >= g->n_forward) r->sequence.nodes[k] += g->n_clones;
    r->n_values = g->n_values;
    r->keep = calloc(values, sizeof r->keep[0]);
    r->first_saved = calloc(values, sizeof r->first_saved[0]);
    r->saved = calloc(values, sizeof r->saved[0]);
    r->choices = calloc(nodes, sizeof r->choices[0]);
    r->us = calloc(nodes, sizeof r->us[0]);
    return r->keep && r->first_saved && r->saved && r->choices && r->us ? GRADD_OK : no_memory();
}

gradd_status_t recompute_begin(gradd_plan_t *plan, const recompute_ends_t *ends, recompute_t *out) {
    const size_t n_before = (size_t)plan->graph->n_values;
    *out = (recompute_t){.plan = plan, .ends = *ends};
    GRADD_TRY(begin(out));
    GRADD_TRY(alloc_arrays(out));
    GRADD_TRY(find_costs(out));
    memcpy(out->first_saved, plan->saved, sizeof out->first_saved[0] * n_before);
    memcpy(out->keep, plan->saved, sizeof out->keep[0] * n_before);
    return recompute_measure(out);
}

void recompute_finish(recompute_t *r) {
    sequence_finish(&r->sequence);
    free(r->chunked);
    free(r->keep);
    free(r->first_saved);
    free(r->saved);
    free(r->choices);
    free(r->us);
    free(r->in_use);
}
