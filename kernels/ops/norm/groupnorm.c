/* GroupNormalization and InstanceNormalization: each sample's channels are normalised in G groups.
 *
 * x is [B, C, S] (S = all spatial axes), a group is [C / G, S] and contiguous; instance means G =
 * C. y = (x - mean) * inv * scale[c] + bias[c] with mean and inv = 1 / sqrt(var + epsilon) of the
 * group. Before opset 21 scale and bias of GroupNormalization have one entry per group. Saved for
 * backward: mean and inv, [B, G], as outputs that ONNX does not have. GroupNormGrad(dy, x, scale,
 * mean, inv) -> dx, dscale, dbias is internal; dscale and dbias are summed over [B, C] partial sums
 * in order, so the bits do not depend on the number of threads.
 */
#include <math.h>
#include <string.h>

#include "kernels/contract/kernel.h"
#include "kernels/contract/op.h"
#include "kernels/cpu/parts.h"
#include "kernels/cpu/row_lanes.h"
#include "kernels/describe/dispatch.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rowwise.h"
#include "kernels/rules/rules.h"

typedef struct group_s {
    const void *x, *dy, *scale, *bias;
    void *y;              /* y or dx */
    void *mean, *inv;     /* [B, G] */
    void *sum_h, *sum_dy; /* [B, C]: of dy * h and of dy */
    int64_t batch, channels, groups, spatial;
    bool per_group; /* scale has one entry per group */
    double epsilon;
} group_t;

/* ---- kernels --------------------------------------------------------------------------------- */

/* Group `row` of B * G. */
#define GROUP_LOOPS(T, S)                                                                          \
    static void forward_##S(const group_t *p, int64_t row) {                                       \
        int64_t per = p->channels / p->groups, n = per * p->spatial, g = row % p->groups;          \
        const T *x = (const T *)p->x + row * n, *scale = p->scale, *bias = p->bias;                \
        T *y = (T *)p->y + row * n;                                                                \
        T mean = gradd_row_sum_##S(x, n) / (T)n;                                                   \
        T inv = (T)(1 / sqrt((double)(gradd_row_squares_##S(x, mean, n) / (T)n) + p->epsilon));    \
        for (int64_t c = 0; c < per; c++) {                                                        \
            int64_t at = p->per_group ? g : g * per + c;                                           \
            T factor = inv * scale[at], shift = bias[at];                                          \
            for (int64_t i = c * p->spatial; i < (c + 1) * p->spatial; i++)                        \
                y[i] = (x[i] - mean) * factor + shift;                                             \
        }                                                                                          \
        if (p->mean) ((T *)p->mean)[row] = mean;                                                   \
        if (p->inv) ((T *)p->inv)[row] = inv;                                                      \
    }                                                                                              \
    static void backward_##S(const group_t *p, int64_t row) {                                      \
        int64_t per = p->channels / p->groups, n = per * p->spatial, g = row % p->groups;          \
        const T *x = (const T *)p->x + row * n, *dy = (const T *)p->dy + row * n;                  \
        const T *scale = p->scale;                                                                 \
        T *sum_h = (T *)p->sum_h + row * per, *sum_dy = (T *)p->sum_dy + row * per;                \
        T mean = ((const T *)p->mean)[row], inv = ((const T *)p->inv)[row], mean_w = 0,            \
          mean_h = 0;                                                                              \
        for (int64_t c = 0; c < per; c++) {                                                        \
            T factor = scale[p->per_group ? g : g * per + c];                                      \
            sum_dy[c] = gradd_row_sum_##S(dy + c * p->spatial, p->spatial);                        \
            sum_h[c] = inv * gradd_row_dot_##S(dy + c * p->spatial, x + c * p->spatial, mean,      \
                                               p->spatial);                                        \
            mean_w += factor * sum_dy[c];                                                          \
            mean_h += factor * sum_h[c];                                                           \
        }                                                                                          \
        mean_w /= (T)n;                                                                            \
        mean_h /= (T)n;                                                                            \
        if (!p->y) return;                                                                         \
        for (int64_t c = 0; c < per; c++) {                                                        \
            T *dx = (T *)p->y + row * n, factor = scale[p->per_group ? g : g * per + c];           \
            for (int64_t i = c * p->spatial; i < (c + 1) * p->spatial; i++)                        \
                dx[i] = (dy[i] * factor - mean_w - (x[i] - mean) * inv * mean_h) * inv;            \
        }                                                                                          \
    }                                                                                              \
    static void add_batch_##S(const group_t *p, const T *parts, T *out) {                          \
        /* there may be groups and no channels */                                                  \
        int64_t n = p->per_group ? p->groups : p->channels, per = n ? p->channels / n : 1;         \
        memset(out, 0, sizeof(T) * (size_t)n);                                                     \
        for (int64_t b = 0; b < p->batch; b++)                                                     \
            for (int64_t c = 0; c < p->channels; c++)                                              \
                out[c / per] += parts[b * p->channels + c];                                        \
    }

GROUP_LOOPS(float, f32)
GROUP_LOOPS(double, f64)

static bool is_instance(const gradd_op_t *op) {
    return !strcmp(op->name, "InstanceNormalization");
}

static void read_group(const gradd_launch_t *r, const gradd_view_t *x, group_t *p) {
    *p = (group_t){.x = x->data, .batch = x->type.dims[0], .channels = x->type.dims[1]};
    p->spatial = 1;
    for (int i = 2; i < x->type.rank; i++)
        p->spatial *= x->type.dims[i];
    p->groups = is_instance(r->op) ? p->channels : gradd_attr_int(r->attrs, "num_groups", 1);
    p->epsilon = gradd_attr_float(r->attrs, "epsilon", 1e-5);
}

static void *output(const gradd_launch_t *r, int j) {
    return j < r->n_out ? r->out[j].data : NULL;
}

static gradd_status_t compute_forward(const gradd_launch_t *r) {
    group_t p;
    if (gradd_type_count(&r->in[0].type) == 0) return GRADD_OK;
    read_group(r, &r->in[0], &p);
    p.scale = r->in[1].data, p.bias = r->in[2].data, p.y = r->out[0].data;
    p.mean = output(r, 1), p.inv = output(r, 2);
    p.per_group = r->in[1].type.dims[0] != p.channels;
    bool f32 = r->in[0].type.dtype == GRADD_DT_F32;
    int64_t rows = p.batch * p.groups;
#pragma omp parallel for schedule(static) if (gradd_type_count(&r->in[0].type) >=                  \
                                                  GRADD_PARALLEL_MIN)
    for (int64_t row = 0; row < rows; row++) {
        if (f32)
            forward_f32(&p, row);
        else
            forward_f64(&p, row);
    }
    return GRADD_OK;
}

static gradd_status_t compute_backward(const gradd_launch_t *r) {
    const gradd_type_t *x = &r->in[1].type;
    group_t p;
    read_group(r, &r->in[1], &p);
    bool f32 = x->dtype == GRADD_DT_F32;
    size_t bytes = (size_t)(p.batch * p.channels) * gradd_dtype_bytes(x->dtype);
    p.dy = r->in[0].data, p.scale = r->in[2].data, p.y = output(r, 0);
    p.mean = r->in[3].data, p.inv = r->in[4].data;
    p.sum_h = r->workspace, p.sum_dy = (char *)r->workspace + bytes;
    p.per_group = r->in[2].type.dims[0] != p.channels;
    int64_t rows = gradd_type_count(x) ? p.batch * p.groups : 0;
    if (!rows) p.batch = 0;
    const gradd_range_t part = gradd_part_of(r, rows);
#pragma omp parallel for schedule(static) if (gradd_type_count(x) >= GRADD_PARALLEL_MIN)
    for (int64_t row = part.from; row < part.to; row++) {
        if (f32)
            backward_f32(&p, row);
        else
            backward_f64(&p, row);
    }
    if (!gradd_part_is_last(r)) return GRADD_OK;
    for (int j = 1; j < 3; j++) {
        const void *parts = j == 1 ? p.sum_h : p.sum_dy;
        if (output(r, j) && f32)
            add_batch_f32(&p, parts, output(r, j));
        else if (output(r, j))
            add_batch_f64(&p, parts, output(r, j));
    }
    return GRADD_OK;
}

/* ---- shape rules ----------------------------------------------------------------------------- */

static gradd_status_t check_groups(const gradd_infer_t *c, const gradd_type_t *x,
                                   const gradd_type_t *scale, int64_t *out_groups) {
    if (x->rank < 2) return GRADD_FAIL(GRAPH, "the input has rank %d, at least 2", x->rank);
    int64_t groups = is_instance(c->op) ? x->dims[1] : gradd_attr_int(c->attrs, "num_groups", 1);
    if (!is_instance(c->op) && (groups < 1 || x->dims[1] % groups))
        return GRADD_FAIL(GRAPH, "%lld channels do not divide into %lld groups",
                          (long long)x->dims[1], (long long)groups);
    if (scale->rank != 1 || (scale->dims[0] != x->dims[1] && scale->dims[0] != groups))
        return GRADD_FAIL(GRAPH, "scale must have one entry per channel or per group");
    *out_groups = groups;
    return GRADD_OK;
}

static gradd_status_t infer_forward(gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[0].type, *scale = &c->in[1].type;
    int64_t groups;
    GRADD_TRY(check_groups(c, x, scale, &groups));
    if (!gradd_type_equal(scale, &c->in[2].type) || scale->dtype != x->dtype)
        return GRADD_FAIL(GRAPH, "scale and bias must have one shape and the input's type");
    if (gradd_attr_int(c->attrs, "stash_type", 1) != 1)
        return GRADD_FAIL(UNSUPPORTED, "stash_type other than float");
    c->out[0] = *x;
    for (int j = 1; j < c->n_out; j++)
        c->out[j] = (gradd_type_t){
            .dtype = x->dtype, .rank = 2, .dims = {x->dims[0], groups}
        };
    return GRADD_OK;
}

static gradd_status_t infer_backward(gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[1].type, *scale = &c->in[2].type;
    int64_t groups;
    GRADD_TRY(check_groups(c, x, scale, &groups));
    gradd_type_t stats = {
        .dtype = x->dtype, .rank = 2, .dims = {x->dims[0], groups}
    };
    if (!gradd_type_equal(&c->in[0].type, x) || !gradd_type_equal(&c->in[3].type, &stats) ||
        !gradd_type_equal(&c->in[4].type, &stats))
        return GRADD_FAIL(GRAPH, "dy or the statistics do not fit the input");
    c->out[0] = *x;
    for (int j = 1; j < c->n_out; j++)
        c->out[j] = *scale;
    return GRADD_OK;
}

static size_t workspace_backward(const gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[1].type;
    return 2 * (size_t)(x->dims[0] * x->dims[1]) * gradd_dtype_bytes(x->dtype);
}

static int parts_backward(const gradd_infer_t *c) {
    return gradd_parts_of_tasks(c, gradd_type_count(&c->in[3].type)); /* one for each mean */
}

/* ---- gradient rule --------------------------------------------------------------------------- */

static gradd_status_t grad_group_norm(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    for (int j = 1; j < g->n_out; j++)
        if (g->dout[j] != GRADD_NONE)
            return GRADD_FAIL(UNSUPPORTED, "a gradient arrives for a saved statistic");
    if (g->dout[0] == GRADD_NONE) return GRADD_OK;
    int64_t groups = is_instance(g->op) ? gradd_val_type(b, g->in[0])->dims[1]
                                        : gradd_attr_int(g->attrs, "num_groups", 1);
    int n_out = g->need[2] ? 3 : g->need[1] ? 2 : 1;
    gradd_val_t in[5] = {g->dout[0], g->in[0], g->in[1], g->output(g, 1), g->output(g, 2)}, out[3];
    /* a model without channels has no groups either; the kernel then has nothing to do */
    gradd_attr_t attr = gradd_make_int("num_groups", groups ? groups : 1);
    if (b->status) return b->status;
    b->status = b->emit(b, &(gradd_emit_t){"GroupNormGrad", in, 5, &attr, 1}, out, n_out);
    for (int i = 0; i < n_out && !b->status; i++)
        if (g->need[i]) g->din[i] = out[i];
    return b->status;
}

/* ---- expansion ------------------------------------------------------------------------------- */

static gradd_status_t expand_group_norm(gradd_expand_t *e) {
    gradd_builder_t *b = e->b;
    const gradd_type_t type = *gradd_val_type(b, e->in[0]);
    const int64_t scales = gradd_val_type(b, e->in[1])->dims[0], batch = type.dims[0];
    const int64_t groups =
        is_instance(e->op) ? type.dims[1] : gradd_attr_int(e->attrs, "num_groups", 1);
    int64_t each = 1, spatial = 1; /* elements of a group, and of what has one scale */
    for (int i = 2; i < type.rank; i++)
        spatial *= type.dims[i];
    if (groups) each = type.dims[1] / groups * spatial;
    if (scales != type.dims[1]) spatial = each;
    gradd_val_t x =
        gradd_reshape_to(b, gradd_wide(b, e->in[0]), (int64_t[]){batch, groups, each}, 3);
    gradd_val_t mean = gradd_reduce_from(b, "ReduceMean", x, 2), v[2];
    x = GRADD_EMIT(b, "Sub", x, mean);
    gradd_val_t inv = gradd_reduce_from(b, "ReduceMean", GRADD_EMIT(b, "Mul", x, x), 2);
    if (b->status) return b->status;
    const gradd_dtype_t wide = gradd_val_type(b, inv)->dtype;
    const double epsilon = gradd_attr_float(e->attrs, "epsilon", 1e-5);
    inv = GRADD_EMIT(b, "Add", inv, gradd_const_scalar(b, wide, epsilon));
    inv = GRADD_EMIT(b, "Reciprocal", GRADD_EMIT(b, "Sqrt", inv));
    for (int i = 0; i < 2; i++)
        v[i] = gradd_reshape_to(b, gradd_wide(b, e->in[1 + i]), (int64_t[]){scales, 1}, 2);
    x = gradd_reshape_to(b, GRADD_EMIT(b, "Mul", x, inv), (int64_t[]){batch, scales, spatial}, 3);
    x = GRADD_EMIT(b, "Add", GRADD_EMIT(b, "Mul", x, v[0]), v[1]);
    e->out[0] = gradd_cast(b, gradd_reshape_to(b, x, type.dims, type.rank), type.dtype);
    for (int j = 1; j < e->n_out; j++) {
        gradd_val_t stat = gradd_reshape_to(b, j == 1 ? mean : inv, (int64_t[]){batch, groups}, 2);
        e->out[j] = gradd_cast(b, stat, type.dtype);
    }
    return b->status;
}

/* ---- rows ------------------------------------------------------------------------------------ */

GRADD_OPS(
    groupnorm,
    GRADD_OP("GroupNormalization", "", 18, (3, 3), (1, 3), .types = {GRADD_T_FLOAT},
             .attrs = GRADD_ATTR_LIST({"epsilon", GRADD_ATTR_FLOAT, false},
                                      {"num_groups", GRADD_ATTR_INT, true},
                                      {"stash_type", GRADD_ATTR_INT, false}),
             .infer = infer_forward, .grad = grad_group_norm,
             .expand = GRADD_EXPANSION(expand_group_norm), .ref = GRADD_REF(compute_forward),
             .cases = GRADD_CASES(
                 {.text = "f32[2,6,5] f32[6] f32[6] | num_groups=3"},
                 {.text = "f32[2,6,3,3] f32[2] f32[2] | num_groups=2 epsilon=0.01"},
                 {.text = "f32[3,4] f32[4] f32[4] | num_groups=1"},
                 {.text = "f32[2,0,5] f32[3] f32[3] | num_groups=3"},
                 {.text = "f32[2,8,50,50] f32[8] f32[8] | num_groups=4"},
                 {.text = "f32[2,4,8,8] f32[4] f32[4] | num_groups=2 -> 3", .grad_tol = -1},
                 {.text = "f32[2,2,50,100] f32[2] f32[2] | num_groups=1 -> 3", .grad_tol = -1},
                 {.text = "f32[2,300,5] f32[300] f32[300] | num_groups=3", .grad_tol = -1})),
    GRADD_OP("GroupNormGrad", "com.gradd", 1, (5, 5), (1, 3),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD, .types = {GRADD_T_FLOAT},
             .attrs = GRADD_ATTR_LIST({"num_groups", GRADD_ATTR_INT, true}),
             .infer = infer_backward, .ref = GRADD_REF(compute_backward),
             .cases = GRADD_CASES({.text = "f32[2,6,5] f32[2,6,5] f32[6] f32[2,3] f32[2,3]:(0.5,2) "
                                           "| num_groups=3 -> 3"},
                                  {.text = "f32[2,4,8,8] f32[2,4,8,8] f32[2] f32[2,2] "
                                           "f32[2,2]:(0.5,2) | num_groups=2 -> 3"},
                                  {.text = "f32[2,4,30,40] f32[2,4,30,40] f32[4] f32[2,2] "
                                           "f32[2,2]:(0.5,2) | num_groups=2 -> 3"},
                                  {.text = "f32[9,300,5] f32[9,300,5] f32[300] f32[9,3] "
                                           "f32[9,3]:(0.5,2) | num_groups=3 -> 3"},
                                  {.text = "f32[0,4,5] f32[0,4,5] f32[4] f32[0,2] f32[0,2] | "
                                           "num_groups=2 -> 3"},
                                  {.text = "f32[2,0,5] f32[2,0,5] f32[3] f32[2,3] f32[2,3] | "
                                           "num_groups=3 -> 3"})),
    GRADD_OP("InstanceNormalization", "", 6, (3, 3), (1, 3), .types = {GRADD_T_FLOAT},
             .attrs = GRADD_ATTR_LIST({"epsilon", GRADD_ATTR_FLOAT, false}), .infer = infer_forward,
             .grad = grad_group_norm, .expand = GRADD_EXPANSION(expand_group_norm),
             .ref = GRADD_REF(compute_forward),
             .cases = GRADD_CASES({.text = "f32[2,3,7] f32[3] f32[3]"},
                                  {.text = "f32[2,3,4,5] f32[3] f32[3] | epsilon=0.001"},
                                  {.text = "f32[0,3,4] f32[3] f32[3]"})));

GRADD_KERNELS(cpu, groupnorm,
              GRADD_KERNEL("GroupNormalization", "loop", .rowwise = gradd_rowwise_batch,
                           .types = {GRADD_T_F32_F64}, .compute = compute_forward),
              GRADD_KERNEL("GroupNormGrad", "loop", .types = {GRADD_T_F32_F64},
                           .compute = compute_backward, .workspace = workspace_backward,
                           .parts = parts_backward),
              GRADD_KERNEL("InstanceNormalization", "loop", .rowwise = gradd_rowwise_batch,
                           .types = {GRADD_T_F32_F64}, .compute = compute_forward));
