/* The tape of the eager builder: what ran, and its gradient by the rules of the rows. See eager.h.
 */
#include "kernels/contract/registry.h"
#include "kernels/rules/rules.h"
#include "tests/c/eager.h"

#include <string.h>

struct eager_node_s {
    eager_node_t *before;
    const gradd_op_t *op;
    gradd_attrs_t attrs;
    int n_in, n_out;
    gradd_val_t *in, *out;
};

static void *keep(eager_t *e, const void *from, size_t bytes) {
    void *to = gradd_case_alloc(&e->heap, bytes + 1);
    if (to && bytes) memcpy(to, from, bytes);
    return to;
}

/* Arrays belong to the emitting code, so they are copied. */
static bool keep_attr(eager_t *e, const gradd_attr_t *from, gradd_attr_t *to) {
    *to = *from;
    if (from->kind == GRADD_ATTR_INTS) to->ints = keep(e, from->ints, from->n * sizeof *to->ints);
    if (from->kind == GRADD_ATTR_FLOATS)
        to->floats = keep(e, from->floats, from->n * sizeof *to->floats);
    return (from->kind != GRADD_ATTR_INTS || to->ints) &&
           (from->kind != GRADD_ATTR_FLOATS || to->floats);
}

gradd_status_t eager_record(eager_t *e, const eager_call_t *call, const gradd_val_t *in,
                            const gradd_val_t *out) {
    eager_node_t node = {
        .before = e->tape, .op = call->op, .n_in = call->n_in, .n_out = call->n_out};
    gradd_attr_t *attrs = keep(e, call->attrs.v, sizeof *attrs * (size_t)call->attrs.n);
    node.in = keep(e, in, sizeof *in * (size_t)call->n_in);
    node.out = keep(e, out, sizeof *out * (size_t)call->n_out);
    bool kept = attrs && node.in && node.out;
    for (int i = 0; kept && i < call->attrs.n; i++)
        kept = keep_attr(e, &call->attrs.v[i], &attrs[i]);
    node.attrs = (gradd_attrs_t){attrs, call->attrs.n};
    e->tape = kept ? keep(e, &node, sizeof node) : NULL;
    return e->tape ? GRADD_OK : GRADD_FAIL(NOMEM, "no memory for the tape");
}

typedef struct sweep_s {
    eager_t *e;
    bool needed[EAGER_MAX_VALUES];
    gradd_val_t grad[EAGER_MAX_VALUES];
} sweep_t;

static bool carries(const sweep_t *s, const eager_node_t *n, int i) {
    return n->in[i] != GRADD_NONE && s->needed[n->in[i]] && gradd_op_carries(n->op, i);
}

/* In the order in which they ran: earlier nodes first. */
static void mark_needed(sweep_t *s, const eager_node_t *n) {
    if (!n) return;
    mark_needed(s, n->before);
    bool any = false;
    for (int i = 0; i < n->n_in && !(n->op->flags & GRADD_OP_NO_GRAD); i++)
        any |= carries(s, n, i);
    for (int j = 0; j < n->n_out && any; j++)
        s->needed[n->out[j]] = gradd_dtype_is_float(s->e->value[n->out[j]].type.dtype);
}

static void add_gradient(sweep_t *s, gradd_val_t v, gradd_val_t grad) {
    if (grad == GRADD_NONE) return;
    s->grad[v] = s->grad[v] == GRADD_NONE ? grad : GRADD_EMIT(&s->e->base, "Add", s->grad[v], grad);
}

static gradd_status_t reverse_node(sweep_t *s, const eager_node_t *n) {
    gradd_view_t in[GRADD_OP_MAX_IN] = {0}, out[GRADD_OP_MAX_OUT];
    gradd_val_t dout[GRADD_OP_MAX_OUT], din[GRADD_OP_MAX_IN];
    bool need[GRADD_OP_MAX_IN], known[GRADD_OP_MAX_IN], any = false, arrives = false;
    for (int i = 0; i < n->n_in; i++) {
        need[i] = carries(s, n, i);
        any |= need[i];
        known[i] = n->in[i] != GRADD_NONE && s->e->known[n->in[i]];
        if (n->in[i] != GRADD_NONE) in[i] = s->e->value[n->in[i]];
    }
    for (int j = 0; j < n->n_out; j++) {
        dout[j] = s->grad[n->out[j]];
        out[j] = s->e->value[n->out[j]];
        arrives |= dout[j] != GRADD_NONE;
    }
    if (!any || !arrives || n->op->flags & GRADD_OP_NO_GRAD) return GRADD_OK;
    const eager_call_t call = {.op = n->op,
                               .attrs = n->attrs,
                               .in = in,
                               .known = known,
                               .n_in = n->n_in,
                               .n_out = n->n_out,
                               .overwrite = -1};
    GRADD_TRY(gradd_wrap(eager_grad(s->e, &call, &(eager_diff_t){out, n->in, dout, need}, din),
                         "gradient of %s", n->op->name));
    for (int i = 0; i < n->n_in; i++)
        if (need[i]) add_gradient(s, n->in[i], din[i]);
    return s->e->base.status;
}

gradd_status_t eager_backward(eager_t *e, const eager_ends_t *ends, gradd_val_t *din) {
    static sweep_t s;
    const eager_node_t *last = e->tape;
    s = (sweep_t){.e = e};
    e->tape = NULL;
    for (int v = 0; v < EAGER_MAX_VALUES; v++)
        s.grad[v] = GRADD_NONE;
    for (int i = 0; i < ends->n_in; i++)
        if (ends->need[i]) s.needed[ends->in[i]] = true;
    mark_needed(&s, last);
    for (int j = 0; j < ends->n_out; j++)
        if (s.needed[ends->out[j]]) add_gradient(&s, ends->out[j], ends->dout[j]);
    for (const eager_node_t *n = last; n; n = n->before)
        GRADD_TRY(reverse_node(&s, n));
    for (int i = 0; i < ends->n_in; i++)
        din[i] = ends->need[i] ? s.grad[ends->in[i]] : GRADD_NONE;
    return e->base.status;
}
