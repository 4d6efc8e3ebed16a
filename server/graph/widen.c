/* Operators that the device has no kernel for in bf16 or f16 run in f32, between casts. Those that
 * no device has in integers of 8 and 16 bits run in i32: the lowest bits of a result are the same.
 *
 * Called by graph_emit, so that models, passes and gradient rules need not know which kernels read
 * such a half themselves. All operands that are halves are widened, so that operands that must have
 * one type still do; an f32 result that would have been a half is rounded back to it, and an i32
 * result that would have been smaller is cut to that. The operator's shape rule, given the original
 * types, says which results those are; where it cannot say (it reads no elements of halves), every
 * f32 result is rounded, to the first operand's half.
 *
 * The other way round, a half product of the backward that is only widened (the gradient of a
 * weight under autocast) is computed in f32, which is more exact and saves a pass over it. */
#include <string.h>

#include "kernels/contract/registry.h"
#include "server/graph/graph.h"

static bool is_half(const graph_t *g, gradd_val_t v) {
    return v != GRADD_NONE && gradd_dtype_is_half(graph_type(g, v)->dtype);
}

/* The type that an operand of a small integer is computed in; NONE if it stays as it is. */
static gradd_dtype_t wider_integer(const gradd_op_t *op, int input, gradd_dtype_t dtype) {
    if (!gradd_dtype_is_int(dtype) || gradd_dtype_bytes(dtype) > 2) return GRADD_DT_NONE;
    const bool has = gradd_op_accepts(op, input, dtype);
    return !has && gradd_op_accepts(op, input, GRADD_DT_I32) ? GRADD_DT_I32 : GRADD_DT_NONE;
}

bool graph_has_small(const gradd_infer_t *c) {
    for (int i = 0; i < c->n_in; i++)
        if (wider_integer(c->op, i, c->in[i].type.dtype)) return true;
    return false;
}

bool graph_must_widen(const graph_t *g, const gradd_infer_t *c) {
    if (graph_has_small(c)) return true;
    if (g->written_out) return false; /* for no device */
    bool any = false;
    for (int i = 0; i < c->n_in; i++)
        any |= gradd_dtype_is_half(c->in[i].type.dtype);
    return any && !gradd_backend_kernel(g->backend, c);
}

static const graph_node_t *product_behind(const graph_t *g, const graph_emit_t *e) {
    if (!g->in_backward || e->n_in != 1 || strcmp(e->op->name, "Cast") || !is_half(g, e->in[0]))
        return NULL;
    const graph_value_t *v = g->values[e->in[0]];
    gradd_attrs_t attrs = e->attrs;
    if (v->kind != VALUE_NODE || gradd_attr_int(attrs, "to", 0) != GRADD_DT_F32) return NULL;
    const graph_node_t *n = &g->nodes[v->node];
    return n->backward && !strcmp(n->op->name, "FusedMatMul") ? n : NULL;
}

gradd_status_t graph_emit_wide_product(graph_t *g, const graph_emit_t *e, gradd_val_t *out,
                                       bool *out_done) {
    const graph_node_t *n = product_behind(g, e);
    gradd_attr_t attrs[8];
    *out_done = n && n->attrs.n < 8 && !g->written_out;
    if (!*out_done) return GRADD_OK;
    for (int i = 0; i < n->attrs.n; i++)
        attrs[i] = n->attrs.v[i];
    attrs[n->attrs.n] = (gradd_attr_t){.name = "to", .kind = GRADD_ATTR_INT, .i = GRADD_DT_F32};
    graph_emit_t wide = *e;
    wide.op = n->op;
    wide.attrs = (gradd_attrs_t){attrs, n->attrs.n + 1};
    wide.in = n->in;
    wide.n_in = n->n_in;
    return graph_emit(g, &wide, out);
}

static gradd_status_t cast(graph_t *g, const graph_emit_t *like, gradd_val_t from, gradd_dtype_t to,
                           gradd_val_t *out) {
    gradd_attr_t attr = {.name = "to", .kind = GRADD_ATTR_INT, .i = to};
    graph_emit_t e = {
        .op = gradd_op_by_name("Cast"),
        .opset = like->opset,
        .attrs = {&attr, 1},
        .in = &from,
        .n_in = 1,
        .n_out = 1,
        .random = like->random
    };
    return e.op ? graph_emit(g, &e, out) : GRADD_FAIL(INTERNAL, "operator Cast is missing");
}

/* What an operand is computed in; NONE if it stays as it is. */
static gradd_dtype_t wider(const graph_t *g, const graph_emit_t *e, int input) {
    if (e->in[input] == GRADD_NONE) return GRADD_DT_NONE;
    if (is_half(g, e->in[input])) return GRADD_DT_F32;
    return wider_integer(e->op, input, graph_type(g, e->in[input])->dtype);
}

/* Of each output, the half, or the small integer of an operand, that the operator gives it in for
 * the operands as they are; or NONE. */
static void ask_row(const graph_t *g, const graph_emit_t *e, gradd_dtype_t *out_narrow) {
    uint32_t narrow = GRADD_DTB(BF16) | GRADD_DTB(F16);
    gradd_view_t in[GRADD_OP_MAX_IN];
    gradd_type_t types[GRADD_OP_MAX_OUT] = {0};
    gradd_dtype_t first = GRADD_DT_NONE;
    for (int i = 0; i < e->n_in; i++) {
        in[i] = (gradd_view_t){0};
        if (e->in[i] == GRADD_NONE) continue;
        const graph_value_t *v = g->values[e->in[i]];
        in[i].type = v->type;
        /* rules read known elements as the types they expect */
        const bool is_narrow = wider(g, e, i);
        in[i].data = is_narrow ? NULL : (void *)(uintptr_t)v->data;
        if (is_narrow) narrow |= 1u << v->type.dtype;
        if (is_narrow && !first) first = v->type.dtype;
    }
    gradd_infer_t infer = {e->op, e->attrs, e->opset, e->n_in, e->n_out, in, types, 0, 0};
    bool sure = !e->op->infer(&infer);
    for (int j = 0; j < e->n_out; j++) {
        const gradd_dtype_t dtype = sure ? types[j].dtype : first;
        out_narrow[j] = narrow >> dtype & 1 ? dtype : GRADD_DT_NONE;
    }
}

gradd_status_t graph_emit_widened(graph_t *g, const graph_emit_t *e, gradd_val_t *out) {
    gradd_val_t in[GRADD_OP_MAX_IN], wide[GRADD_OP_MAX_OUT];
    gradd_dtype_t narrow[GRADD_OP_MAX_OUT];
    graph_emit_t inner = *e;
    inner.in = in;
    for (int i = 0; i < e->n_in; i++) {
        const gradd_dtype_t wide_type = wider(g, e, i);
        in[i] = e->in[i];
        if (wide_type) GRADD_TRY(cast(g, e, e->in[i], wide_type, &in[i]));
    }
    GRADD_TRY(graph_emit(g, &inner, wide));
    ask_row(g, e, narrow);
    for (int j = 0; j < e->n_out; j++) {
        out[j] = wide[j];
        if (!narrow[j] || wide[j] == GRADD_NONE) continue;
        const gradd_dtype_t given = gradd_dtype_is_half(narrow[j]) ? GRADD_DT_F32 : GRADD_DT_I32;
        if (graph_type(g, wide[j])->dtype == given)
            GRADD_TRY(cast(g, e, wide[j], narrow[j], &out[j]));
    }
    return GRADD_OK;
}
