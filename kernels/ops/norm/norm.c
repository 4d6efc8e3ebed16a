/* LayerNormalization and RMSNormalization over the trailing axes.
 *
 * x is [R rows, N]; y = (x - mean) * inv * scale + bias with inv = 1 / sqrt(var + epsilon); RMS has
 * no mean, no bias, and the mean square in place of the variance. Saved for backward: mean and inv,
 * one number per row each (RMSNormalization gets inv as a second output, which ONNX does not have).
 * LayerNormGrad(dy, x, scale, mean, inv) -> dx, dscale, dbias and RMSNormGrad(dy, x, scale, inv) ->
 * dx, dscale are internal. The sums over rows are kept per chunk of rows and added in order; the
 * chunks depend on the shape alone, so the bits do not depend on the number of threads. With a bf16
 * x everything is calculated in f32, mean and inv stay f32, and scale and bias may be f32 as well.
 */
#include <math.h>
#include <string.h>

#include "kernels/contract/kernel.h"
#include "kernels/contract/op.h"
#include "kernels/cpu/half.h"
#include "kernels/describe/dispatch.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rowwise.h"
#include "kernels/rules/rules.h"

typedef struct norm_s {
    const void *x, *dy, *scale, *bias;
    void *y;          /* y or dx */
    void *mean, *inv; /* written by forward, read by backward */
    void *parts_scale, *parts_bias;
    int64_t rows, n, chunks;
    double epsilon;
    bool centred;
} norm_t;

/* ---- kernels --------------------------------------------------------------------------------- */

#define REAL    float
#define NAME(x) x##_f32
#include "kernels/cpu/norm_rows.h"
#undef REAL
#undef NAME
#define REAL    double
#define NAME(x) x##_f64
#include "kernels/cpu/norm_rows.h"
#undef REAL
#undef NAME

#undef CELL
#undef LOAD
#undef STORE
#define REAL    float
#define CELL    gradd_bf16_t
#define LOAD    gradd_bf16_f32
#define STORE   gradd_f32_bf16
#define NAME(x) x##_bf16
#include "kernels/cpu/norm_rows.h"
#undef REAL
#undef NAME
#undef CELL
#undef LOAD
#undef STORE
#define REAL    float
#define CELL    gradd_f16_t
#define LOAD    gradd_f16_f32
#define STORE   gradd_f32_f16
#define NAME(x) x##_f16
#include "kernels/cpu/norm_rows.h"
#undef REAL
#undef NAME

typedef struct kernels_s {
    void (*rows)(const norm_t *p, int64_t first, int64_t end);
    void (*rows_grad)(const norm_t *p, int64_t chunk);
    void (*add_parts)(void *parts, int64_t chunks, int64_t n);
} kernels_t;

static const kernels_t *kernels_of(gradd_dtype_t dtype) {
    static const kernels_t f32 = {norm_rows_f32, norm_rows_grad_f32, add_parts_f32};
    static const kernels_t f64 = {norm_rows_f64, norm_rows_grad_f64, add_parts_f64};
    static const kernels_t bf16 = {norm_rows_bf16, norm_rows_grad_bf16, add_parts_bf16};
    static const kernels_t f16 = {norm_rows_f16, norm_rows_grad_f16, add_parts_f16};
    if (dtype == GRADD_DT_F16) return &f16;
    return dtype == GRADD_DT_F32 ? &f32 : dtype == GRADD_DT_F64 ? &f64 : &bf16;
}

/* Of statistics and sums. */
static gradd_dtype_t wide_dtype(gradd_dtype_t dtype) {
    return gradd_dtype_is_half(dtype) ? GRADD_DT_F32 : dtype;
}

#define ROW_BLOCK  16
#define MAX_CHUNKS 64

static int64_t count_rows(const gradd_type_t *x, int axis) {
    int64_t rows = 1;
    for (int i = 0; i < axis; i++)
        rows *= x->dims[i];
    return rows;
}

static int64_t count_chunks(int64_t rows) {
    int64_t chunks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    return chunks < 1 ? 1 : chunks > MAX_CHUNKS ? MAX_CHUNKS : chunks;
}

static gradd_status_t read_shape(const gradd_launch_t *r, const gradd_type_t *x, norm_t *p) {
    int axis;
    GRADD_TRY(gradd_axis(gradd_attr_int(r->attrs, "axis", -1), x->rank, false, &axis));
    *p = (norm_t){.rows = count_rows(x, axis), .n = 1};
    for (int i = axis; i < x->rank; i++)
        p->n *= x->dims[i];
    p->chunks = count_chunks(p->rows);
    p->epsilon = gradd_attr_float(r->attrs, "epsilon", 1e-5);
    return GRADD_OK;
}

static void *output(const gradd_launch_t *r, int j) {
    return j < r->n_out ? r->out[j].data : NULL;
}

static size_t align_up(size_t bytes) {
    return (bytes + 63) & ~(size_t)63;
}

/* A row vector in the type that is calculated in; bf16 and f16 are widened into `room`. */
static const void *wide(const gradd_view_t *v, int64_t n, void *room) {
    if (!gradd_dtype_is_half(v->type.dtype)) return v->data;
    gradd_half_widen(room, v->data, v->type.dtype, n);
    return room;
}

/* The sum over rows, from its parts. */
static void store_sum(const kernels_t *kernels, const norm_t *p, void *parts,
                      const gradd_view_t *out) {
    kernels->add_parts(parts, p->chunks, p->n);
    if (gradd_dtype_is_half(out->type.dtype))
        gradd_half_narrow(out->data, parts, out->type.dtype, p->n);
    else
        memcpy(out->data, parts, (size_t)gradd_type_bytes(&out->type));
}

static gradd_status_t compute_forward(const gradd_launch_t *r, norm_t *p) {
    const kernels_t *kernels = kernels_of(r->in[0].type.dtype);
    int64_t blocks = (p->rows + ROW_BLOCK - 1) / ROW_BLOCK;
#pragma omp parallel for schedule(static) if (p->rows * p->n >= GRADD_PARALLEL_MIN)
    for (int64_t block = 0; block < blocks; block++) {
        int64_t first = block * ROW_BLOCK, end = first + ROW_BLOCK;
        if (end > p->rows) end = p->rows;
        kernels->rows(p, first, end);
    }
    return GRADD_OK;
}

static gradd_status_t compute_layer_norm(const gradd_launch_t *r) {
    norm_t p;
    GRADD_TRY(read_shape(r, &r->in[0].type, &p));
    p.centred = true;
    size_t room = align_up(sizeof(float) * (size_t)p.n);
    p.x = r->in[0].data, p.scale = wide(&r->in[1], p.n, r->workspace), p.y = r->out[0].data;
    if (r->n_in > 2 && r->in[2].type.dtype != GRADD_DT_NONE)
        p.bias = wide(&r->in[2], p.n, (char *)r->workspace + room);
    p.mean = output(r, 1), p.inv = output(r, 2);
    return compute_forward(r, &p);
}

static gradd_status_t compute_rms_norm(const gradd_launch_t *r) {
    norm_t p;
    GRADD_TRY(read_shape(r, &r->in[0].type, &p));
    p.x = r->in[0].data, p.scale = wide(&r->in[1], p.n, r->workspace), p.y = r->out[0].data;
    p.inv = output(r, 1);
    return compute_forward(r, &p);
}

static size_t part_bytes(int64_t chunks, int64_t n, gradd_dtype_t x) {
    return align_up((size_t)(chunks * n) * gradd_dtype_bytes(wide_dtype(x)));
}

/* outputs: dx, dscale, dbias; any of them may be unwanted */
static gradd_status_t compute_backward(const gradd_launch_t *r, norm_t *p) {
    const kernels_t *kernels = kernels_of(r->in[0].type.dtype);
    size_t parts = part_bytes(p->chunks, p->n, r->in[0].type.dtype);
    void *dscale = output(r, 1), *dbias = output(r, 2);
    p->dy = r->in[0].data, p->x = r->in[1].data, p->y = output(r, 0);
    p->parts_scale = dscale ? r->workspace : NULL;
    p->parts_bias = dbias ? (char *)r->workspace + parts : NULL;
    p->scale = wide(&r->in[2], p->n, (char *)r->workspace + 2 * parts);
#pragma omp parallel for schedule(static) if (p->rows * p->n >= GRADD_PARALLEL_MIN)
    for (int64_t c = 0; c < p->chunks; c++)
        kernels->rows_grad(p, c);
    if (dscale) store_sum(kernels, p, p->parts_scale, &r->out[1]);
    if (dbias) store_sum(kernels, p, p->parts_bias, &r->out[2]);
    return GRADD_OK;
}

static gradd_status_t compute_layer_norm_grad(const gradd_launch_t *r) {
    norm_t p;
    GRADD_TRY(read_shape(r, &r->in[1].type, &p));
    p.centred = true;
    p.mean = r->in[3].data, p.inv = r->in[4].data;
    return compute_backward(r, &p);
}

static gradd_status_t compute_rms_norm_grad(const gradd_launch_t *r) {
    norm_t p;
    GRADD_TRY(read_shape(r, &r->in[1].type, &p));
    p.inv = r->in[3].data;
    return compute_backward(r, &p);
}

/* The definition, in double, with plain loops; serves both forward operators. */
static gradd_status_t ref_forward(const gradd_launch_t *r) {
    norm_t p;
    GRADD_TRY(read_shape(r, &r->in[0].type, &p));
    bool layer = !strcmp(r->op->name, "LayerNormalization");
    bool biased = layer && r->n_in > 2 && r->in[2].type.dtype != GRADD_DT_NONE;
    GRADD_SWITCH_FLOAT(r->in[0].type.dtype, T, {
        const T *scale = r->in[1].data, *bias = biased ? r->in[2].data : NULL;
        T *means = layer ? output(r, 1) : NULL, *invs = output(r, layer ? 2 : 1);
        for (int64_t row = 0; row < p.rows; row++) {
            const T *x = (const T *)r->in[0].data + row * p.n;
            T *y = (T *)r->out[0].data + row * p.n;
            double mean = 0, square = 0;
            for (int64_t i = 0; i < p.n && layer; i++)
                mean += x[i] / (double)p.n;
            for (int64_t i = 0; i < p.n; i++)
                square += (x[i] - mean) * (x[i] - mean) / (double)p.n;
            double inv = 1 / sqrt(square + p.epsilon);
            for (int64_t i = 0; i < p.n; i++)
                y[i] = (T)((x[i] - mean) * inv * scale[i] + (bias ? bias[i] : (T)0));
            if (means) means[row] = (T)mean;
            if (invs) invs[row] = (T)inv;
        }
    });
    return GRADD_OK;
}

/* ---- shape rules ----------------------------------------------------------------------------- */

static gradd_status_t check_row_vector(const gradd_infer_t *c, int input, const gradd_type_t *x,
                                       int axis) {
    const gradd_type_t *v = &c->in[input].type;
    bool wider = v->dtype == wide_dtype(x->dtype);
    gradd_type_t want = {.dtype = wider ? v->dtype : x->dtype, .rank = x->rank - axis};
    for (int i = 0; i < want.rank; i++)
        want.dims[i] = x->dims[axis + i];
    if (!gradd_type_equal(v, &want)) {
        char a[GRADD_TYPE_TEXT], b[GRADD_TYPE_TEXT];
        return GRADD_FAIL(UNSUPPORTED, "input %d is %s, expected %s", input,
                          gradd_type_format(v, a), gradd_type_format(&want, b));
    }
    return GRADD_OK;
}

static gradd_type_t stats_type(const gradd_type_t *x, int axis) {
    gradd_type_t out = *x;
    out.dtype = wide_dtype(x->dtype);
    for (int i = axis; i < x->rank; i++)
        out.dims[i] = 1;
    return out;
}

static gradd_status_t infer_forward(gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[0].type;
    int axis;
    GRADD_TRY(gradd_axis(gradd_attr_int(c->attrs, "axis", -1), x->rank, false, &axis));
    if (gradd_attr_int(c->attrs, "stash_type", 1) != 1)
        return GRADD_FAIL(UNSUPPORTED, "stash_type other than float");
    for (int i = 1; i < c->n_in; i++)
        if (c->in[i].type.dtype != GRADD_DT_NONE) GRADD_TRY(check_row_vector(c, i, x, axis));
    if (c->n_in > 2 && c->in[2].type.dtype != GRADD_DT_NONE &&
        c->in[2].type.dtype != c->in[1].type.dtype)
        return GRADD_FAIL(UNSUPPORTED, "scale and bias differ in type");
    c->out[0] = *x;
    for (int j = 1; j < c->n_out; j++)
        c->out[j] = stats_type(x, axis);
    return GRADD_OK;
}

static gradd_status_t infer_backward(gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[1].type;
    int axis;
    GRADD_TRY(gradd_axis(gradd_attr_int(c->attrs, "axis", -1), x->rank, false, &axis));
    GRADD_TRY(check_row_vector(c, 2, x, axis));
    gradd_type_t stats = stats_type(x, axis);
    if (!gradd_type_equal(x, &c->in[0].type)) return GRADD_FAIL(GRAPH, "dy and x differ in shape");
    for (int i = 3; i < c->n_in; i++)
        if (!gradd_type_equal(&c->in[i].type, &stats))
            return GRADD_FAIL(GRAPH, "input %d does not have one entry per row", i);
    c->out[0] = *x;
    for (int j = 1; j < c->n_out; j++)
        c->out[j] = c->in[2].type;
    return GRADD_OK;
}

/* Room for scale and bias in f32. */
static size_t workspace_forward(const gradd_infer_t *c) {
    if (!gradd_dtype_is_half(c->in[0].type.dtype)) return 0;
    return 2 * align_up(sizeof(float) * (size_t)gradd_type_count(&c->in[1].type));
}

/* Parts of dscale and dbias, and the scale in f32. */
static size_t workspace_backward(const gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[1].type, *scale = &c->in[2].type;
    int64_t n = gradd_type_count(scale),
            chunks = count_chunks(count_rows(x, x->rank - scale->rank));
    return 2 * part_bytes(chunks, n, x->dtype) + align_up(sizeof(float) * (size_t)n);
}

/* ---- gradient rules -------------------------------------------------------------------------- */

static gradd_status_t grad_norm(gradd_grad_t *g, const char *op, int n_stats) {
    gradd_builder_t *b = g->b;
    int n_out = 1;
    for (int i = 1; i < g->n_in; i++)
        if (g->need[i]) n_out = i + 1; /* frozen scales cost nothing */
    for (int j = 1; j < g->n_out; j++)
        if (g->dout[j] != GRADD_NONE)
            return GRADD_FAIL(UNSUPPORTED, "a gradient arrives for a saved statistic");
    if (g->dout[0] == GRADD_NONE) return GRADD_OK;
    gradd_val_t in[5] = {g->dout[0], g->in[0], g->in[1]}, out[3];
    for (int i = 0; i < n_stats; i++)
        in[3 + i] = g->output(g, 1 + i);
    gradd_attr_t attr = gradd_make_int("axis", gradd_attr_int(g->attrs, "axis", -1));
    if (b->status) return b->status;
    b->status = b->emit(b, &(gradd_emit_t){op, in, 3 + n_stats, &attr, 1}, out, n_out);
    if (b->status) return b->status;
    for (int i = 0; i < g->n_in && i < n_out; i++)
        if (g->need[i]) g->din[i] = out[i];
    return GRADD_OK;
}

static gradd_status_t grad_layer_norm(gradd_grad_t *g) {
    return grad_norm(g, "LayerNormGrad", 2);
}

static gradd_status_t grad_rms_norm(gradd_grad_t *g) {
    return grad_norm(g, "RMSNormGrad", 1);
}

/* ---- expansions ------------------------------------------------------------------------------ */

/* Both norms, outputs as the row has them. */
static gradd_status_t expand_norm(gradd_expand_t *x, bool centred) {
    gradd_builder_t *b = x->b;
    const gradd_type_t type = *gradd_val_type(b, x->in[0]);
    int axis;
    GRADD_TRY(gradd_axis(gradd_attr_int(x->attrs, "axis", -1), type.rank, false, &axis));
    const double epsilon = gradd_attr_float(x->attrs, "epsilon", 1e-5);
    gradd_val_t v = gradd_wide(b, x->in[0]), mean = GRADD_NONE;
    if (centred) {
        mean = gradd_reduce_from(b, "ReduceMean", v, axis);
        v = GRADD_EMIT(b, "Sub", v, mean);
    }
    gradd_val_t square = gradd_reduce_from(b, "ReduceMean", GRADD_EMIT(b, "Mul", v, v), axis);
    gradd_val_t small = gradd_const_scalar(b, wide_dtype(type.dtype), epsilon);
    gradd_val_t root = GRADD_EMIT(b, "Sqrt", GRADD_EMIT(b, "Add", square, small));
    gradd_val_t inv = GRADD_EMIT(b, "Reciprocal", root);
    gradd_val_t y = GRADD_EMIT(b, "Mul", GRADD_EMIT(b, "Mul", v, inv), gradd_wide(b, x->in[1]));
    if (x->n_in > 2 && x->in[2] != GRADD_NONE) y = GRADD_EMIT(b, "Add", y, gradd_wide(b, x->in[2]));
    const gradd_val_t all[3] = {gradd_cast(b, y, type.dtype), centred ? mean : inv, inv};
    for (int j = 0; j < x->n_out; j++)
        x->out[j] = all[j];
    return b->status;
}

static gradd_status_t expand_layer_norm(gradd_expand_t *x) {
    return expand_norm(x, true);
}

static gradd_status_t expand_rms_norm(gradd_expand_t *x) {
    return expand_norm(x, false);
}

/* ---- rows ------------------------------------------------------------------------------------ */

#define NORM_ATTRS                                                                                 \
    GRADD_ATTR_LIST({"axis", GRADD_ATTR_INT, false}, {"epsilon", GRADD_ATTR_FLOAT, false},         \
                    {"stash_type", GRADD_ATTR_INT, false})

GRADD_OPS(
    norm,
    GRADD_OP("LayerNormalization", "", 17, (2, 3), (1, 3), .types = {GRADD_T_FLOAT},
             .attrs = NORM_ATTRS, .infer = infer_forward, .rowwise = gradd_rowwise_axis,
             .grad = grad_layer_norm, .expand = expand_layer_norm, .ref = ref_forward,
             .cases = GRADD_CASES(
                 {.text = "f32[3,7] f32[7] f32[7]"}, {.text = "f32[2,3,45] f32[45]"},
                 {.text = "f32[2,3,5] f32[3,5] f32[3,5] | axis=1 epsilon=0.01"},
                 {.text = "f32[2,3,5] f32[2,3,5] - | axis=-3"},
                 {.text = "f32[37,70] f32[70] f32[70] | axis=-1 epsilon=1e-12 stash_type=1"},
                 {.text = "f32[0,4] f32[4] f32[4]"}, {.text = "f32[2,401,130] f32[130] f32[130]"},
                 {.text = "f32[5,1024] f32[1024] f32[1024] -> 3", .grad_tol = -1},
                 {.text = "f32[3,4096] f32[4096]", .grad_tol = -1},
                 {.text = "f32[2,9000] f32[9000] f32[9000] -> 3", .grad_tol = -1},
                 {.text = "f32[2,8999] f32[8999] f32[8999]", .grad_tol = -1})),
    GRADD_OP("LayerNormGrad", "com.gradd", 1, (5, 5), (1, 3),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD, .types = {GRADD_T_FLOAT},
             .attrs = GRADD_ATTR_LIST({"axis", GRADD_ATTR_INT, false}), .infer = infer_backward,
             .ref = compute_layer_norm_grad,
             .cases = GRADD_CASES(
                 {.text = "f32[3,7] f32[3,7] f32[7] f32[3,1] f32[3,1]:(0.5,2) -> 3"},
                 {.text = "f32[67,64] f32[67,64] f32[64] f32[67,1] f32[67,1]:(0.5,2) -> 3"},
                 {.text = "f32[19,768] f32[19,768] f32[768] f32[19,1] f32[19,1]:(0.5,2) -> 3"},
                 {.text = "f32[19,4096] f32[19,4096] f32[4096] f32[19,1] f32[19,1]:(0.5,2) -> 3"},
                 {.text = "f32[3,8192] f32[3,8192] f32[8192] f32[3,1] f32[3,1]:(0.5,2) -> 3"},
                 {.text = "f32[18,9001] f32[18,9001] f32[9001] f32[18,1] f32[18,1]:(0.5,2) -> 3"},
                 {.text = "f32[0,8] f32[0,8] f32[8] f32[0,1] f32[0,1] -> 3"})),
    GRADD_OP("RMSNormalization", "", 23, (2, 2), (1, 2), .types = {GRADD_T_FLOAT},
             .attrs = NORM_ATTRS, .infer = infer_forward, .rowwise = gradd_rowwise_axis,
             .grad = grad_rms_norm, .expand = expand_rms_norm, .ref = ref_forward,
             .cases = GRADD_CASES({.text = "f32[3,7] f32[7]"},
                                  {.text = "f32[2,3,45] f32[45] | epsilon=1e-6"},
                                  {.text = "f32[2,3,5] f32[3,5] | axis=1"},
                                  {.text = "f32[37,70] f32[70]"}, {.text = "f32[401,130] f32[130]"},
                                  {.text = "f32[5,1024] f32[1024] -> 2", .grad_tol = -1},
                                  {.text = "f32[2,9000] f32[9000] -> 2", .grad_tol = -1})),
    GRADD_OP(
        "RMSNormGrad", "com.gradd", 1, (4, 4), (1, 2),
        .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD, .types = {GRADD_T_FLOAT},
        .attrs = GRADD_ATTR_LIST({"axis", GRADD_ATTR_INT, false}), .infer = infer_backward,
        .ref = compute_rms_norm_grad,
        .cases = GRADD_CASES({.text = "f32[3,7] f32[3,7] f32[7] f32[3,1]:(0.5,2) -> 2"},
                             {.text = "f32[67,64] f32[67,64] f32[64] f32[67,1]:(0.5,2) -> 2"},
                             {.text = "f32[9,4096] f32[9,4096] f32[4096] f32[9,1]:(0.5,2) -> 2"},
                             {.text = "f32[9,9000] f32[9,9000] f32[9000] f32[9,1]:(0.5,2) -> 2"})));

GRADD_KERNELS(cpu, norm,
              GRADD_KERNEL("LayerNormalization", "loop", .types = {GRADD_T_ANY}, .inplace = 1,
                           .compute = compute_layer_norm, .workspace = workspace_forward),
              GRADD_KERNEL("LayerNormGrad", "loop",
                           .types = {GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_T_F32_F64},
                           .inplace = 3, .compute = compute_layer_norm_grad,
                           .workspace = workspace_backward),
              GRADD_KERNEL("RMSNormalization", "loop", .types = {GRADD_T_ANY}, .inplace = 1,
                           .compute = compute_rms_norm, .workspace = workspace_forward),
              GRADD_KERNEL("RMSNormGrad", "loop",
                           .types = {GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_T_F32_F64},
                           .inplace = 3, .compute = compute_rms_norm_grad,
                           .workspace = workspace_backward));
