/* Eager builder of the operator tests. See eager.h. */
#include "tests/c/eager.h"

#include "kernels/contract/backend.h"
#include "kernels/contract/registry.h"
#include "kernels/cpu/half.h"
#include "tests/c/tested_device.h"

#include <omp.h>
#include <string.h>

enum { FENCE = 64, FENCE_BYTE = 0xa5, FILL_BYTE = 0xff };

int eager_opset(const gradd_op_t *op) {
    if (op->until) return op->until;
    return op->since > 20 ? op->since : 20;
}

double eager_element(const gradd_view_t *v, int64_t i) {
    switch (v->type.dtype) {
    case GRADD_DT_F32:
        return (double)((const float *)v->data)[i];
    case GRADD_DT_F64:
        return ((const double *)v->data)[i];
    case GRADD_DT_BF16:
    case GRADD_DT_F16:
        return (double)gradd_half_f32((const uint16_t *)v->data + i, v->type.dtype);
    case GRADD_DT_I32:
        return (double)((const int32_t *)v->data)[i];
    case GRADD_DT_I64:
        return (double)((const int64_t *)v->data)[i];
    default:
        return (double)((const uint8_t *)v->data)[i];
    }
}

static void *fenced(eager_t *e, size_t bytes) {
    unsigned char *p = gradd_case_alloc(&e->heap, bytes + FENCE);
    if (!p) return NULL;
    memset(p, FILL_BYTE, bytes);
    memset(p + bytes, FENCE_BYTE, FENCE);
    return p;
}

static gradd_status_t check_fence(const gradd_op_t *op, const void *memory, size_t bytes) {
    for (int i = 0; i < FENCE; i++)
        if (((const unsigned char *)memory)[bytes + (size_t)i] != FENCE_BYTE)
            return GRADD_FAIL(INTERNAL, "%s writes past the end", op->name);
    return GRADD_OK;
}

gradd_view_t eager_copy(eager_t *e, gradd_view_t view) {
    if (!view.type.dtype) return view;
    size_t bytes = (size_t)gradd_type_bytes(&view.type);
    void *to = fenced(e, bytes);
    if (to) memcpy(to, view.data, bytes);
    return (gradd_view_t){view.type, to};
}

static gradd_status_t infer(const eager_call_t *call, gradd_infer_t *c, gradd_view_t *seen,
                            gradd_type_t *types) {
    for (int i = 0; i < call->n_in; i++) {
        seen[i] = call->in[i];
        if (!call->known || !call->known[i]) seen[i].data = NULL;
    }
    *c = (gradd_infer_t){.op = call->op,
                         .attrs = call->attrs,
                         .opset = eager_opset(call->op),
                         .n_in = call->n_in,
                         .n_out = call->n_out,
                         .in = seen,
                         .out = types,
                         .threads = omp_get_max_threads()};
    return gradd_op_infer(c);
}

gradd_status_t eager_launch(gradd_launch_t *launch) {
    gradd_type_t out[GRADD_OP_MAX_OUT];
    for (int j = 0; j < launch->n_out; j++)
        out[j] = launch->out[j].type;
    const gradd_infer_t c = {
        launch->op, launch->attrs, launch->opset, launch->n_in, launch->n_out, launch->in, out, 0,
        0};
    return gradd_cpu_call(&c, launch);
}

bool eager_takes(const gradd_op_t *op, int input, gradd_dtype_t dtype) {
    const gradd_backend_t *b = tested_backend();
    bool any = false; /* kernels; else its expansion takes what it takes itself */
    if (gradd_op_is_composite(op)) return gradd_op_accepts(op, input, dtype);
    for (size_t f = 0; f < b->n_kernels; f++)
        for (size_t i = 0; i < b->kernels[f]->n; i++) {
            const gradd_kernel_t *k = &b->kernels[f]->v[i];
            if (strcmp(k->op, op->name)) continue;
            any = true;
            if (gradd_kernel_takes(k, op, input, dtype)) return true;
        }
    return !any && op->expand && gradd_op_accepts(op, input, dtype);
}

const gradd_kernel_t *eager_kernel(const eager_call_t *call) {
    const gradd_infer_t c = {.op = call->op,
                             .attrs = call->attrs,
                             .opset = eager_opset(call->op),
                             .n_in = call->n_in,
                             .n_out = call->n_out,
                             .in = call->in};
    return call->kernel ? call->kernel : gradd_backend_kernel(tested_backend(), &c);
}

bool eager_widens(const eager_call_t *call) {
    const gradd_backend_t *b = tested_backend();
    bool any = false;
    for (size_t f = 0; f < b->n_kernels; f++)
        for (size_t i = 0; i < b->kernels[f]->n; i++)
            any |= !strcmp(b->kernels[f]->v[i].op, call->op->name);
    return any && !eager_kernel(call);
}

gradd_status_t eager_expand(eager_t *e, const eager_call_t *call, const gradd_val_t *in,
                            gradd_val_t *out) {
    gradd_expand_t x = {.op = call->op,
                        .attrs = call->attrs,
                        .opset = eager_opset(call->op),
                        .n_in = call->n_in,
                        .n_out = call->n_out,
                        .in = in,
                        .out = out,
                        .b = &e->base};
    for (int j = 0; j < call->n_out; j++)
        out[j] = GRADD_NONE;
    GRADD_TRY(call->op->expand(&x));
    return e->base.status;
}

/* A composite: only its results are kept. */
static gradd_status_t call_expanded(eager_t *e, const eager_call_t *call, gradd_view_t *out) {
    gradd_val_t in[GRADD_OP_MAX_IN], results[GRADD_OP_MAX_OUT];
    const int n = e->n_values;
    const bool record = e->record;
    e->record = false;
    for (int i = 0; i < call->n_in; i++)
        in[i] = call->in[i].type.dtype ? eager_add(e, call->in[i], call->known && call->known[i])
                                       : GRADD_NONE;
    gradd_status_t status = eager_expand(e, call, in, results);
    for (int j = 0; j < call->n_out && !status; j++) {
        out[j] = eager_copy(e, e->value[results[j]]); /* an operand may go through as it is */
        if (call->dropped >> j & 1) out[j].data = NULL;
    }
    e->record = record;
    e->n_values = n;
    return status;
}

gradd_status_t eager_call(eager_t *e, const eager_call_t *call, gradd_view_t *out) {
    const gradd_kernel_t *kernel = eager_kernel(call);
    gradd_view_t seen[GRADD_OP_MAX_IN], in[GRADD_OP_MAX_IN];
    gradd_type_t types[GRADD_OP_MAX_OUT];
    gradd_infer_t c;
    gradd_prepared_t prepared = {0};
    GRADD_TRY(infer(call, &c, seen, types));
    /* the plain loop has the scratch memory of the CPU's kernel */
    if (call->ref && !call->kernel) kernel = gradd_backend_kernel(&gradd_backend_cpu, &c);
    if (gradd_op_is_composite(call->op) || (!kernel && call->op->expand && !call->ref))
        return call_expanded(e, call, out);
    if (!kernel && !call->ref) return gradd_no_kernel(tested_backend(), &c);
    memcpy(in, call->in, sizeof in[0] * (size_t)call->n_in);
    if (call->overwrite >= 0) in[call->overwrite] = eager_copy(e, in[call->overwrite]);
    for (int j = 0; j < call->n_out; j++) {
        out[j] = (gradd_view_t){.type = types[j]};
        if (!types[j].dtype || call->dropped >> j & 1) continue;
        if (j == 0 && call->overwrite >= 0)
            out[0].data = in[call->overwrite].data;
        else
            out[j].data = fenced(e, (size_t)gradd_type_bytes(&types[j]));
        if (!out[j].data) return GRADD_FAIL(NOMEM, "output %d", j);
    }
    c.parts = call->parts;
    if (kernel) GRADD_TRY(gradd_kernel_prepare(kernel, &c, &prepared));
    const size_t workspace = prepared.workspace;
    gradd_launch_t r = {.op = call->op,
                        .attrs = call->attrs,
                        .opset = c.opset,
                        .n_in = call->n_in,
                        .n_out = call->n_out,
                        .in = in,
                        .out = out,
                        .workspace = workspace ? fenced(e, workspace) : NULL,
                        .state = prepared.state,
                        .seed = 7,
                        .node = e->node,
                        .threads = c.threads,
                        .parts = prepared.parts,
                        .cut = prepared.cut};
    gradd_status_t status = call->ref ? call->op->ref(&r) : GRADD_OK;
    for (; !call->ref && !status && r.part < (r.parts > 1 ? r.parts : 1); r.part++)
        status = tested_call(kernel, &r, workspace, FENCE);
    e->n_in_parts += r.parts > 1;
    if (kernel) gradd_kernel_unprepare(kernel, &prepared);
    GRADD_TRY(status);
    if (workspace) GRADD_TRY(check_fence(call->op, r.workspace, workspace));
    for (int j = 0; j < call->n_out; j++)
        if (out[j].data)
            GRADD_TRY(check_fence(call->op, out[j].data, (size_t)gradd_type_bytes(&types[j])));
    return GRADD_OK;
}

/* ---- the builder ---- */

gradd_val_t eager_add(eager_t *e, gradd_view_t view, bool known) {
    if (e->n_values >= EAGER_MAX_VALUES) {
        e->base.status = GRADD_FAIL(LIMIT, "more than %d values", EAGER_MAX_VALUES);
        return GRADD_NONE;
    }
    e->value[e->n_values] = view;
    e->known[e->n_values] = known;
    return e->n_values++;
}

/* ---- operators without a kernel for a half run in f32, as in a graph ---- */

static gradd_view_t recast(eager_t *e, gradd_view_t view, gradd_dtype_t to) {
    gradd_view_t out = {.type = view.type};
    int64_t n = gradd_type_count(&view.type);
    out.type.dtype = to;
    out.data = fenced(e, (size_t)gradd_type_bytes(&out.type));
    if (to == GRADD_DT_F32)
        gradd_half_widen(out.data, view.data, view.type.dtype, n);
    else
        gradd_half_narrow(out.data, view.data, to, n);
    return out;
}

static gradd_status_t call_widened(eager_t *e, eager_call_t *call, gradd_view_t *in,
                                   gradd_view_t *out) {
    const bool widen = !eager_kernel(call);
    gradd_type_t own[GRADD_OP_MAX_OUT] = {0};
    gradd_view_t seen[GRADD_OP_MAX_IN];
    for (int i = 0; i < call->n_in; i++) {
        seen[i] = in[i];
        if (!call->known[i] || gradd_dtype_is_half(in[i].type.dtype)) seen[i].data = NULL;
        if (widen && gradd_dtype_is_half(in[i].type.dtype)) in[i] = recast(e, in[i], GRADD_DT_F32);
    }
    gradd_infer_t c = {.op = call->op,
                       .attrs = call->attrs,
                       .opset = eager_opset(call->op),
                       .n_in = call->n_in,
                       .n_out = call->n_out,
                       .in = seen,
                       .out = own};
    if (widen) GRADD_TRY(call->op->infer(&c)); /* what it would have given for halves */
    GRADD_TRY(eager_call(e, call, out));
    for (int j = 0; widen && j < call->n_out; j++)
        if (out[j].data && gradd_dtype_is_half(own[j].dtype))
            out[j] = recast(e, out[j], own[j].dtype);
    return GRADD_OK;
}

static gradd_status_t emit(gradd_builder_t *b, const gradd_emit_t *node, gradd_val_t *out,
                           int n_out) {
    eager_t *e = (eager_t *)b;
    const gradd_val_t *in = node->in;
    gradd_view_t views[GRADD_OP_MAX_IN] = {0}, results[GRADD_OP_MAX_OUT];
    bool known[GRADD_OP_MAX_IN], all = true;
    for (int j = 0; j < n_out; j++)
        out[j] = GRADD_NONE;
    if (b->status) return b->status;
    eager_call_t call = {
        .op = gradd_op_by_name(node->op),
        .attrs = {node->attrs, node->n_attrs},
        .in = views,
        .known = known,
        .n_in = node->n_in,
        .n_out = n_out,
        .overwrite = -1
    };
    if (!call.op) return b->status = GRADD_FAIL(UNSUPPORTED, "rule emits unknown '%s'", node->op);
    for (int i = 0; i < node->n_in; i++) {
        if (in[i] == GRADD_NONE && i < call.op->min_in)
            return b->status = GRADD_FAIL(INTERNAL, "rule emits %s without input %d", node->op, i);
        known[i] = in[i] == GRADD_NONE || e->known[in[i]];
        if (in[i] != GRADD_NONE) views[i] = e->value[in[i]];
        if (!(call.op->flags & GRADD_OP_SHAPE_ONLY)) all &= known[i];
    }
    const bool expands = gradd_op_is_composite(call.op) || (e->expand_all && call.op->expand);
    b->status = expands ? eager_expand(e, &call, in, out) : call_widened(e, &call, views, results);
    if (b->status) return gradd_wrap(b->status, "emitting %s", node->op);
    if (expands) return b->status;
    for (int j = 0; j < n_out; j++)
        out[j] = eager_add(e, results[j], all);
    if (e->record && !b->status) b->status = eager_record(e, &call, in, out);
    return b->status;
}

static gradd_val_t constant(gradd_builder_t *b, const gradd_type_t *type, const void *data) {
    eager_t *e = (eager_t *)b;
    gradd_view_t view = {.type = *type, .data = fenced(e, (size_t)gradd_type_bytes(type))};
    if (gradd_type_bytes(type)) memcpy(view.data, data, (size_t)gradd_type_bytes(type));
    return eager_add(e, view, true);
}

static const gradd_type_t *type_of(gradd_builder_t *b, gradd_val_t value) {
    return &((eager_t *)b)->value[value].type;
}

static const void *data_of(gradd_builder_t *b, gradd_val_t value) {
    eager_t *e = (eager_t *)b;
    return value != GRADD_NONE && e->known[value] ? e->value[value].data : NULL;
}

void eager_begin(eager_t *e) {
    *e = (eager_t){
        .base = {.emit = emit, .constant = constant, .type = type_of, .data = data_of}
    };
    e->node = 3;
}

void eager_end(eager_t *e) {
    gradd_case_free(&e->heap);
}

void *eager_enter(eager_t *e) {
    void *before = e->heap.blocks;
    e->heap.blocks = NULL;
    return before;
}

void eager_leave(eager_t *e, void *entered) {
    gradd_case_free(&e->heap);
    e->heap.blocks = entered;
}

/* ---- gradients ---- */

typedef struct grad_call_s {
    gradd_grad_t g; /* first */
    eager_t *e;
    const eager_call_t *call;
    const gradd_view_t *out;
} grad_call_t;

static gradd_val_t output(gradd_grad_t *g, int j) {
    grad_call_t *gc = (grad_call_t *)g;
    gradd_view_t in[GRADD_OP_MAX_IN], results[GRADD_OP_MAX_OUT];
    if (g->b->status) return GRADD_NONE;
    if (j < gc->call->n_out && gc->out[j].data) return eager_add(gc->e, gc->out[j], false);
    eager_call_t more = *gc->call;
    more.n_out = j + 1;
    if (more.n_in) memcpy(in, more.in, sizeof in[0] * (size_t)more.n_in);
    more.in = in;
    g->b->status = call_widened(gc->e, &more, in, results);
    return g->b->status ? GRADD_NONE : eager_add(gc->e, results[j], false);
}

static gradd_status_t grad_expanded(eager_t *e, const eager_call_t *call, const eager_diff_t *diff,
                                    gradd_val_t *din) {
    gradd_val_t out[GRADD_OP_MAX_OUT];
    e->record = true;
    gradd_status_t status = eager_expand(e, call, diff->in, out);
    e->record = false;
    const eager_ends_t ends = {out, diff->dout, call->n_out, diff->in, diff->need, call->n_in};
    return status ? status : eager_backward(e, &ends, din);
}

gradd_status_t eager_grad(eager_t *e, const eager_call_t *call, const eager_diff_t *diff,
                          gradd_val_t *din) {
    grad_call_t gc = {
        .g = {.op = call->op,
              .attrs = call->attrs,
              .opset = eager_opset(call->op),
              .n_in = call->n_in,
              .n_out = call->n_out,
              .in = diff->in,
              .dout = diff->dout,
              .need = diff->need,
              .din = din,
              .node = e->node,
              .b = &e->base,
              .output = output},
        .e = e,
        .call = call,
        .out = diff->out
    };
    for (int i = 0; i < call->n_in; i++)
        din[i] = GRADD_NONE;
    if (gradd_op_is_composite(call->op)) return grad_expanded(e, call, diff, din);
    GRADD_TRY(call->op->grad(&gc.g));
    return e->base.status;
}
