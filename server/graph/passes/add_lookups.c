/* The gradient of a table that others read as well (a tied head, two lookups) is a sum; rows that
 * were looked up are added to the rest of it in place:
 *
 *   Add(dW, GatherGrad(dy, ids))                   -> EmbeddingGrad(dy, ids, dW)
 *   Sum(dW, EmbeddingGrad(..), EmbeddingGrad(..))  -> EmbeddingGrad(.., EmbeddingGrad(.., dW))
 *
 * So a table of zeros with a few rows in it is neither written nor read again. Only sums that the
 * client asked for are looked at: nothing else reads them, so no older node has to change. Runs
 * over the joint graph. */
#include <string.h>

#include "kernels/rules/rules.h"
#include "server/graph/match/match.h"
#include "server/graph/readers.h"

enum { DY, IDS, BASE };

typedef struct sum_s {
    gradd_val_t lookups[GRADD_OP_MAX_IN], others[GRADD_OP_MAX_IN];
    int n_lookups, n_others;
} sum_t;

/* The node of the backward that makes v. */
static const graph_node_t *maker(const graph_t *g, gradd_val_t v) {
    if (v == GRADD_NONE || g->values[v]->kind != VALUE_NODE) return NULL;
    const graph_node_t *n = &g->nodes[g->values[v]->node];
    return n->backward ? n : NULL;
}

static bool is(const graph_node_t *n, const char *op) {
    return !strcmp(n->op->name, op);
}

/* Gradient of rows that were looked up in a matrix. */
static const graph_node_t *is_lookup(const graph_t *g, const graph_readers_t *readers,
                                     gradd_val_t v) {
    const graph_node_t *n = maker(g, v);
    if (!n || !graph_read_once(readers, v)) return NULL;
    if (is(n, "EmbeddingGrad")) return n->n_in == BASE ? n : NULL;
    if (!is(n, "GatherGrad") || graph_type(g, v)->rank != 2) return NULL;
    const int64_t axis = gradd_attr_int(n->attrs, "axis", 0);
    return axis == 0 || axis == -2 ? n : NULL;
}

/* Whether v is a sum with lookups that only the client reads. */
static bool is_sum(const graph_t *g, const graph_readers_t *readers, gradd_val_t v, sum_t *out) {
    const graph_node_t *n = maker(g, v);
    *out = (sum_t){.n_others = 0};
    if (!n || !graph_read_once(readers, v) || (!is(n, "Add") && !is(n, "Sum"))) return false;
    for (int i = 0; i < n->n_in; i++) {
        if (!gradd_type_equal(graph_type(g, n->in[i]), graph_type(g, v))) return false;
        if (is_lookup(g, readers, n->in[i]))
            out->lookups[out->n_lookups++] = n->in[i];
        else
            out->others[out->n_others++] = n->in[i];
    }
    return out->n_lookups > 0;
}

/* The sum of the other operands, or the first lookup; the rest of the lookups is added to it. */
static gradd_status_t make_base(graph_t *g, const graph_node_t *like, sum_t *s, gradd_val_t *out) {
    if (s->n_others < 2) {
        *out = s->n_others ? s->others[0] : s->lookups[0];
        return GRADD_OK;
    }
    const match_fused_t rest = {
        .op = s->n_others == 2 ? "Add" : "Sum", .in = s->others, .n_in = s->n_others};
    return match_emit(g, like, &rest, out, 1);
}

static gradd_status_t add_lookup(graph_t *g, const graph_node_t *lookup, gradd_val_t *base) {
    const graph_node_t like = *lookup;
    const gradd_val_t in[] = {like.in[DY], like.in[IDS], *base};
    const gradd_attr_t attrs[] = {
        gradd_make_ints("dims", graph_type(g, *base)->dims, 2),
        gradd_make_int("padding", gradd_attr_int(like.attrs, "padding", -1)),
        gradd_make_float("scale", gradd_attr_float(like.attrs, "scale", 1))};
    const match_fused_t onto = {
        .op = "EmbeddingGrad", .in = in, .n_in = 3, .attrs = attrs, .n_attrs = 3};
    return match_emit(g, &like, &onto, base, 1);
}

static gradd_status_t rewrite(graph_t *g, gradd_val_t *grad, sum_t *s) {
    const graph_node_t like = g->nodes[g->values[*grad]->node];
    gradd_val_t sum;
    GRADD_TRY(make_base(g, &like, s, &sum));
    for (int k = s->n_others ? 0 : 1; k < s->n_lookups; k++)
        GRADD_TRY(add_lookup(g, &g->nodes[g->values[s->lookups[k]]->node], &sum));
    *grad = sum;
    return GRADD_OK;
}

static gradd_status_t add_lookups(graph_t *g) {
    graph_readers_t readers;
    GRADD_TRY(graph_find_readers(g, &readers));
    for (int j = 0; j < g->n_grads; j++) {
        sum_t sum;
        if (g->grads[j] != GRADD_NONE && is_sum(g, &readers, g->grads[j], &sum))
            GRADD_TRY(rewrite(g, &g->grads[j], &sum));
    }
    return GRADD_OK;
}

const graph_pass_t graph_pass_add_lookups = {
    "add_lookups", PHASE_JOINT + 20, true, add_lookups, {NULL}};
