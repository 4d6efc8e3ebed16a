/* Reverse-mode differentiation of a graph by the gradient rules of the operator rows.
 *
 * First a forward sweep marks the values that depend on a wanted input through differentiable
 * operators; frozen parameters are not marked, so nothing is emitted for them. Then the forward
 * nodes are visited in reverse; each rule receives the gradients of its outputs and emits nodes for
 * its inputs. Gradients of a value with several readers are collected and added in that fixed order
 * by one operator, which makes the sum reproducible, rounds bf16 once and passes over memory once.
 * Engine thread. */
#include <stdlib.h>
#include <string.h>

#include "kernels/contract/registry.h"
#include "kernels/rules/rules.h"
#include "server/graph/graph.h"

typedef struct part_s {
    struct part_s *next;
    gradd_val_t grad;
} part_t;

typedef struct sweep_s {
    graph_t *g;
    bool *needed;      /* per value: its gradient is wanted */
    part_t **parts;    /* per value: its gradients so far, the latest first; in the graph's arena */
    gradd_val_t *grad; /* per value: their sum, once it is asked for */
    int n;             /* values known to the arrays: those that existed before */
} sweep_t;

static bool carries_gradient(const sweep_t *s, const graph_node_t *n, int i) {
    gradd_val_t v = n->in[i];
    return v != GRADD_NONE && s->needed[v] && gradd_op_carries(n->op, i);
}

static void mark_needed(sweep_t *s, const autodiff_t *ad) {
    graph_t *g = s->g;
    for (int i = 0; i < ad->n_grads; i++) {
        gradd_val_t v = g->inputs[ad->grads[i]];
        s->needed[v] = gradd_dtype_is_float(graph_type(g, v)->dtype);
    }
    for (int k = 0; k < g->n_forward; k++) {
        const graph_node_t *n = &g->nodes[k];
        if (n->dead || n->op->flags & GRADD_OP_NO_GRAD) continue;
        bool any = false;
        for (int i = 0; i < n->n_in && !any; i++)
            any = carries_gradient(s, n, i);
        for (int j = 0; j < n->n_out && any; j++)
            if (n->out[j] != GRADD_NONE)
                s->needed[n->out[j]] = gradd_dtype_is_float(graph_type(g, n->out[j])->dtype);
    }
}

static gradd_status_t add_gradient(sweep_t *s, gradd_val_t value, gradd_val_t grad) {
    graph_t *g = s->g;
    if (grad == GRADD_NONE) return GRADD_OK;
    const gradd_type_t *want = graph_type(g, value), *got = graph_type(g, grad);
    if (!gradd_type_equal(want, got)) {
        char a[GRADD_TYPE_TEXT], b[GRADD_TYPE_TEXT];
        return GRADD_FAIL(INTERNAL, "a gradient has type %s, its value %s",
                          gradd_type_format(got, a), gradd_type_format(want, b));
    }
    part_t *part = arena_alloc(g->arena, sizeof *part);
    if (!part) return GRADD_FAIL(NOMEM, "no memory to differentiate the graph");
    *part = (part_t){s->parts[value], grad};
    s->parts[value] = part;
    return GRADD_OK;
}

/* The sum of all gradients of a value; nothing is added to it any more. */
static gradd_status_t sum_gradients(sweep_t *s, gradd_val_t value) {
    gradd_val_t in[GRADD_OP_MAX_IN];
    graph_t *g = s->g;
    part_t *oldest = NULL;
    int n = 0;
    for (part_t *p = s->parts[value], *next; p; p = next) {
        next = p->next;
        p->next = oldest;
        oldest = p;
    }
    s->parts[value] = NULL;
    for (part_t *p = oldest; p; p = p->next) {
        in[n++] = p->grad;
        if (n < 2 || (p->next && n < GRADD_OP_MAX_IN)) continue;
        in[0] = gradd_emit_n(&g->builder, n == 2 ? "Add" : "Sum", n, in);
        n = 1;
    }
    if (n) s->grad[value] = in[0];
    return g->builder.status;
}

/* Rules ask for an output by number: the node may grow, the sweep's arrays need not know it. */
static gradd_val_t rule_output(gradd_grad_t *c, int j);

typedef struct rule_call_s {
    gradd_grad_t c; /* first member */
    graph_t *g;
    int32_t node;
} rule_call_t;

static gradd_val_t rule_output(gradd_grad_t *c, int j) {
    rule_call_t *call = (rule_call_t *)c;
    gradd_val_t out = GRADD_NONE;
    if (!c->b->status) c->b->status = graph_node_output(call->g, call->node, j, &out);
    return c->b->status ? GRADD_NONE : out;
}

static gradd_status_t call_rule(sweep_t *s, int32_t id, const graph_node_t *n,
                                const gradd_val_t *dout) {
    graph_t *g = s->g;
    bool need[GRADD_OP_MAX_IN], any = false;
    gradd_val_t din[GRADD_OP_MAX_IN];
    for (int i = 0; i < n->n_in; i++) {
        need[i] = carries_gradient(s, n, i);
        any |= need[i];
        din[i] = GRADD_NONE;
        if (need[i] && i < 32 && n->op->no_rule >> i & 1)
            return GRADD_FAIL(UNSUPPORTED, "input %d needs a gradient, which %s does not give it",
                              i, n->op->name);
    }
    if (!any) return GRADD_OK;
    g->origin = n->origin;
    g->random = n->random;
    rule_call_t call = {
        .c = {.op = n->op,
              .attrs = n->attrs,
              .opset = n->opset,
              .n_in = n->n_in,
              .n_out = n->n_out,
              .in = n->in,
              .dout = dout,
              .need = need,
              .din = din,
              .node = n->random,
              .b = &g->builder,
              .output = rule_output},
        .g = g,
        .node = id
    };
    GRADD_TRY(n->op->grad(&call.c));
    GRADD_TRY(g->builder.status);
    for (int i = 0; i < n->n_in; i++)
        if (need[i]) GRADD_TRY(add_gradient(s, n->in[i], din[i]));
    return GRADD_OK;
}

static gradd_status_t reverse_node(sweep_t *s, int32_t id) {
    graph_node_t n = s->g->nodes[id]; /* a copy: the array may move */
    gradd_val_t dout[GRADD_OP_MAX_OUT];
    bool any = false;
    if (n.dead || n.op->flags & GRADD_OP_NO_GRAD) return GRADD_OK;
    for (int j = 0; j < GRADD_OP_MAX_OUT; j++)
        dout[j] = GRADD_NONE;
    s->g->origin = n.origin;
    s->g->random = n.random;
    s->g->rows = n.rows;
    for (int j = 0; j < n.n_out; j++) {
        if (n.out[j] == GRADD_NONE || n.out[j] >= s->n) continue;
        GRADD_TRY(sum_gradients(s, n.out[j]));
        dout[j] = s->grad[n.out[j]];
        any |= dout[j] != GRADD_NONE;
    }
    if (!any) return GRADD_OK;
    gradd_status_t status = call_rule(s, id, &n, dout);
    if (!status) return GRADD_OK;
    char text[GRAPH_NODE_TEXT];
    const model_node_t *origin = &s->g->model->nodes[n.origin];
    graph_node_text(s->g, origin, text, sizeof text);
    return gradd_wrap(gradd_at_node(status, origin->name), "gradient of %s", text);
}

static gradd_status_t seed(sweep_t *s, const autodiff_t *ad) {
    graph_t *g = s->g;
    for (int k = 0; k < ad->n_grad_outputs; k++) {
        gradd_val_t out = g->outputs[ad->grad_outputs[k]], grad;
        graph_value_t value = {.type = *graph_type(g, out),
                               .kind = VALUE_GRAD_OUTPUT,
                               .node = -1,
                               .index = ad->grad_outputs[k]};
        GRADD_TRY(graph_new_value(g, &value, &grad));
        GRADD_TRY(add_gradient(s, out, grad));
    }
    return GRADD_OK;
}

static gradd_status_t sweep_back(sweep_t *s, const autodiff_t *ad) {
    graph_t *g = s->g;
    for (int v = 0; v < s->n; v++)
        s->grad[v] = GRADD_NONE;
    mark_needed(s, ad);
    GRADD_TRY(seed(s, ad));
    for (int32_t id = g->n_forward - 1; id >= 0; id--)
        GRADD_TRY(reverse_node(s, id));
    g->rows = 0;
    for (int i = 0; i < ad->n_grads; i++) {
        gradd_val_t v = g->inputs[ad->grads[i]];
        GRADD_TRY(sum_gradients(s, v));
        ad->out_grads[i] = s->needed[v] ? s->grad[v] : GRADD_NONE;
    }
    return GRADD_OK;
}

gradd_status_t graph_autodiff(graph_t *g, const autodiff_t *ad) {
    sweep_t s = {.g = g, .n = g->n_values};
    s.needed = calloc((size_t)s.n + 1, sizeof s.needed[0]);
    s.grad = malloc(sizeof s.grad[0] * ((size_t)s.n + 1));
    s.parts = calloc((size_t)s.n + 1, sizeof s.parts[0]);
    g->in_backward = true;
    g->builder.status = GRADD_OK;
    gradd_status_t status = s.needed && s.grad && s.parts
                                ? sweep_back(&s, ad)
                                : GRADD_FAIL(NOMEM, "no memory to differentiate the graph");
    g->in_backward = false;
    free(s.needed);
    free(s.grad);
    free(s.parts);
    return status;
}
