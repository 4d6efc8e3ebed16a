/* GroupedMatMul: groups of rows, each multiplied by a matrix of its own, as experts are.
 *
 * Math: y[s] = a[s] op(b[e]) for ends[e-1] <= s < ends[e], the first group from row 0; rows behind
 * the last group are 0. op swaps the last two dimensions with transB=1. Shapes: a [S, K], b
 * [E, K, N], or [E, N, K] with transB, ends [E] of integers, y [S, N]. The ends do not fall, and
 * the last one is at most S. Saved for backward: a, b and ends. bf16 and f16 are summed in f32 and
 * rounded once.
 *
 * Gradients: da = GroupedMatMul(dy, b, ends), b transposed the other way; db[e] is the sum over
 * the group's rows of op(a[s]^T dy[s]), which is GroupedMatMulGrad(a, dy, ends), internal; it is 0
 * for a group without rows. */
#include <string.h>

#include "kernels/contract/fault.h"
#include "kernels/contract/kernel.h"
#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/pick.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

enum { A, B, ENDS }; /* operands; b, or the gradient of y */

/* ---- kernels --------------------------------------------------------------------------------- */

typedef gradd_status_t (*product_fn)(const gradd_gemm_t *g, const void *a, const void *b, void *c,
                                     void *workspace);

static gradd_status_t fast(const gradd_gemm_t *g, const void *a, const void *b, void *c,
                           void *workspace) {
    return gradd_gemm_blocked(g, a, b, NULL, c, workspace);
}

static gradd_status_t plain(const gradd_gemm_t *g, const void *a, const void *b, void *c,
                            void *workspace) {
    (void)workspace;
    return gradd_gemm_ref(g, a, b, NULL, c);
}

/* The product of a group with `rows` rows: of the forward, or of the gradient of b. */
static gradd_gemm_t product_of(const gradd_view_t *in, const gradd_type_t *out, gradd_attrs_t attrs,
                               int64_t rows) {
    const int64_t *b = in[B].type.dims;
    const bool turned = gradd_attr_int(attrs, "transB", 0), whole = out->rank == 2;
    gradd_gemm_t g = {.dtype = out->dtype, .alpha = 1};
    if (whole) {
        g.m = rows, g.n = out->dims[1], g.k = in[A].type.dims[1];
        g.a_m = g.k, g.a_k = 1;
        g.b_k = turned ? 1 : b[2], g.b_n = turned ? b[2] : 1;
        return g;
    }
    /* [K, N] = a^T dy, or [N, K] = dy^T a with the operands exchanged */
    g.m = out->dims[1], g.n = out->dims[2], g.k = rows;
    g.a_m = 1, g.a_k = g.m, g.b_k = g.n, g.b_n = 1;
    return g;
}

static gradd_status_t each_group(const gradd_launch_t *r, product_fn product) {
    const gradd_type_t *out = &r->out[0].type;
    const bool forward = out->rank == 2, turned = gradd_attr_int(r->attrs, "transB", 0);
    const size_t size = gradd_dtype_bytes(out->dtype);
    const int64_t rows = r->in[A].type.dims[0], k = r->in[A].type.dims[1];
    const int64_t n = forward ? out->dims[1] : r->in[B].type.dims[1];
    int64_t from = 0;
    for (int64_t e = 0; e < r->in[ENDS].type.dims[0]; e++) {
        const int64_t end = gradd_pick_index(&r->in[ENDS], e);
        if (end < from || end > rows) {
            const gradd_fault_t f = {
                .kind = GRADD_FAULT_GROUP_END, .value = end, .limit = rows, .position = e};
            return gradd_fault_fail(&f);
        }
        const gradd_gemm_t g = product_of(r->in, out, r->attrs, end - from);
        const char *a = (const char *)r->in[A].data + (size_t)(from * k) * size;
        const char *b = (const char *)r->in[B].data;
        char *c = r->out[0].data;
        b += (size_t)(forward ? e * k * n : from * n) * size;
        c += (size_t)(forward ? from * n : e * k * n) * size;
        if (end == from && !forward) memset(c, 0, (size_t)(k * n) * size);
        if (end > from)
            GRADD_TRY(product(&g, !forward && turned ? b : a, !forward && turned ? a : b, c,
                              r->workspace));
        from = end;
    }
    if (forward)
        memset((char *)r->out[0].data + (size_t)(from * n) * size, 0,
               (size_t)((rows - from) * n) * size);
    return GRADD_OK;
}

static gradd_status_t compute_groups(const gradd_launch_t *r) {
    return each_group(r, fast);
}

static gradd_status_t ref_groups(const gradd_launch_t *r) {
    return each_group(r, plain);
}

/* Of the largest product that there can be: all rows in a group. */
static size_t workspace_groups(const gradd_infer_t *c) {
    gradd_gemm_t g = product_of(c->in, &c->out[0], c->attrs, c->in[A].type.dims[0]);
    g.threads = c->threads;
    return gradd_gemm_blocked_workspace(&g);
}

/* All rows are in a group. */
static void cost_groups(const gradd_infer_t *c, gradd_cost_t *cost) {
    const int last = c->in[B].type.rank - 1;
    const double other =
        (double)(c->out[0].rank == 2 ? c->out[0].dims[1] : c->in[B].type.dims[last]);
    cost->flops = 2 * (double)gradd_type_count(&c->in[A].type) * other;
}

/* ---- shape and gradient rules ---------------------------------------------------------------- */

static gradd_status_t misfit(const gradd_infer_t *c) {
    char a[GRADD_TYPE_TEXT], b[GRADD_TYPE_TEXT], ends[GRADD_TYPE_TEXT];
    return GRADD_FAIL(GRAPH, "operands %s, %s and ends %s do not fit",
                      gradd_type_format(&c->in[A].type, a), gradd_type_format(&c->in[B].type, b),
                      gradd_type_format(&c->in[ENDS].type, ends));
}

static gradd_status_t infer_groups(gradd_infer_t *c) {
    const gradd_type_t *a = &c->in[A].type, *b = &c->in[B].type, *ends = &c->in[ENDS].type;
    const bool turned = gradd_attr_int(c->attrs, "transB", 0);
    if (a->rank != 2 || b->rank != 3 || ends->rank != 1 || a->dtype != b->dtype) return misfit(c);
    if (b->dims[turned ? 2 : 1] != a->dims[1] || b->dims[0] != ends->dims[0]) return misfit(c);
    c->out[0] = (gradd_type_t){
        a->dtype, 2, {a->dims[0], b->dims[turned ? 1 : 2]}
    };
    return GRADD_OK;
}

static gradd_status_t infer_groups_grad(gradd_infer_t *c) {
    const gradd_type_t *a = &c->in[A].type, *dy = &c->in[B].type, *ends = &c->in[ENDS].type;
    const bool turned = gradd_attr_int(c->attrs, "transB", 0);
    if (a->rank != 2 || dy->rank != 2 || ends->rank != 1 || a->dtype != dy->dtype ||
        a->dims[0] != dy->dims[0])
        return misfit(c);
    const int64_t k = a->dims[1], n = dy->dims[1];
    c->out[0] = (gradd_type_t){
        a->dtype, 3, {ends->dims[0], turned ? n : k, turned ? k : n}
    };
    return GRADD_OK;
}

static gradd_status_t grad_groups(gradd_grad_t *g) {
    const bool turned = gradd_attr_int(g->attrs, "transB", 0);
    const gradd_attr_t same = gradd_make_int("transB", turned);
    const gradd_attr_t other = gradd_make_int("transB", !turned);
    const gradd_val_t dy = g->dout[0], ends = g->in[ENDS];
    if (g->need[A])
        g->din[A] = gradd_emit_attrs(g->b, "GroupedMatMul", (gradd_val_t[]){dy, g->in[B], ends}, 3,
                                     &other, 1);
    if (g->need[B])
        g->din[B] = gradd_emit_attrs(g->b, "GroupedMatMulGrad", (gradd_val_t[]){g->in[A], dy, ends},
                                     3, &same, 1);
    return g->b->status;
}

/* ---- cases and rows -------------------------------------------------------------------------- */

#define ATTRS GRADD_ATTR_LIST({"transB", GRADD_ATTR_INT, false})
#define TYPES {GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_T_INT}

GRADD_OPS(
    groupedmatmul,
    GRADD_OP(
        "GroupedMatMul", "com.gradd", 1, (3, 3), (1, 1), .flags = GRADD_OP_COSTLY, .types = TYPES,
        .attrs = ATTRS, .infer = infer_groups, .grad = grad_groups, .ref = GRADD_REF(ref_groups),
        .cases = GRADD_CASES(
            {.text = "f32[5,3] f32[2,3,4] i64[2]={2,5}"},
            {.text = "f32[5,3] f32[2,4,3] i64[2]={2,5} | transB=1"},
            {.text = "f32[6,3] f32[4,3,2] i32[4]={0,2,2,5}"},
            {.text = "f32[6,3] f32[4,2,3] i32[4]={3,3,6,6} | transB=1"},
            {.text = "f32[4,3] f32[2,3,1] i64[2]={0,0}"},
            {.text = "f32[0,3] f32[2,3,4] i64[2]={0,0}"},
            {.text = "f32[3,0] f32[2,0,4] i64[2]={1,2}"},
            {.text = "f32[3,2] f32[2,2,0] i64[2]={1,3}"}, {.text = "f32[3,2] f32[0,2,4] i64[0]"},
            {.text = "f32[300,70] f32[3,70,150] i64[3]={17,17,290}", .grad_tol = -1},
            {.text = "f32[260,70] f32[3,130,70] i64[3]={199,200,260} | transB=1", .grad_tol = -1})),
    GRADD_OP(
        "GroupedMatMulGrad", "com.gradd", 1, (3, 3), (1, 1),
        .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD | GRADD_OP_COSTLY, .types = TYPES,
        .attrs = ATTRS, .infer = infer_groups_grad, .ref = GRADD_REF(ref_groups),
        .cases = GRADD_CASES(
            {.text = "f32[5,3] f32[5,4] i64[2]={2,5}"},
            {.text = "f32[5,3] f32[5,4] i64[2]={2,5} | transB=1"},
            {.text = "f32[6,3] f32[6,2] i32[4]={0,2,2,5}"},
            {.text = "f32[0,3] f32[0,2] i64[2]={0,0} | transB=1"},
            {.text = "f32[3,0] f32[3,2] i64[2]={1,3}"}, {.text = "f32[3,2] f32[3,4] i64[0]"},
            {.text = "f32[120,70]:(-1,1) f32[120,150]:(-1,1) i64[3]={17,17,110}"},
            {.text = "f32[130,70]:(-1,1) f32[130,130]:(-1,1) i64[3]={99,100,130} | transB=1"})));

#define ON_CPU(title)                                                                              \
    GRADD_KERNEL(title, "blocked", .types = TYPES, .workspace = workspace_groups,                  \
                 .compute = compute_groups, .cost = cost_groups)

GRADD_KERNELS(cpu, groupedmatmul, ON_CPU("GroupedMatMul"), ON_CPU("GroupedMatMulGrad"));
