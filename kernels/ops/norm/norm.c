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
#include "kernels/cpu/parts.h"
#include "kernels/describe/dispatch.h"
#include "kernels/describe/norm.h"
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
    GRADD_TRY(gradd_axis(gradd_attr_int(r->attrs, GRADD_NORM_AXIS, -1), x->rank, false, &axis));
    *p = (norm_t){.rows = count_rows(x, axis), .n = 1};
    for (int i = axis; i < x->rank; i++)
        p->n *= x->dims[i];
    p->chunks = count_chunks(p->rows);
    p->epsilon = gradd_attr_float(r->attrs, GRADD_NORM_EPSILON, 1e-5);
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
    const kernels_t *kernels = kernels_of(r->in[GRADD_NORM_X].type.dtype);
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
    GRADD_TRY(read_shape(r, &r->in[GRADD_NORM_X].type, &p));
    p.centred = true;
    size_t room = align_up(sizeof(float) * (size_t)p.n);
    p.x = r->in[GRADD_NORM_X].data, p.scale = wide(&r->in[GRADD_NORM_SCALE], p.n, r->workspace),
    p.y = r->out[GRADD_NORM_Y].data;
    if (r->n_in > GRADD_NORM_BIAS && r->in[GRADD_NORM_BIAS].type.dtype != GRADD_DT_NONE)
        p.bias = wide(&r->in[GRADD_NORM_BIAS], p.n, (char *)r->workspace + room);
    p.mean = output(r, GRADD_LAYER_NORM_MEAN), p.inv = output(r, GRADD_LAYER_NORM_INV);
    return compute_forward(r, &p);
}

static gradd_status_t compute_rms_norm(const gradd_launch_t *r) {
    norm_t p;
    GRADD_TRY(read_shape(r, &r->in[GRADD_NORM_X].type, &p));
    p.x = r->in[GRADD_NORM_X].data, p.scale = wide(&r->in[GRADD_NORM_SCALE], p.n, r->workspace),
    p.y = r->out[GRADD_NORM_Y].data;
    p.inv = output(r, GRADD_RMS_NORM_INV);
    return compute_forward(r, &p);
}

static size_t part_bytes(int64_t chunks, int64_t n, gradd_dtype_t x) {
    return align_up((size_t)(chunks * n) * gradd_dtype_bytes(wide_dtype(x)));
}

/* outputs: dx, dscale, dbias; any of them may be unwanted */
static gradd_status_t compute_backward(const gradd_launch_t *r, norm_t *p) {
    const kernels_t *kernels = kernels_of(r->in[GRADD_NORM_GRAD_DY].type.dtype);
    size_t parts = part_bytes(p->chunks, p->n, r->in[GRADD_NORM_GRAD_DY].type.dtype);
    void *dscale = output(r, GRADD_NORM_DSCALE), *dbias = output(r, GRADD_NORM_DBIAS);
    p->dy = r->in[GRADD_NORM_GRAD_DY].data, p->x = r->in[GRADD_NORM_GRAD_X].data,
    p->y = output(r, GRADD_NORM_DX);
    p->parts_scale = dscale ? r->workspace : NULL;
    p->parts_bias = dbias ? (char *)r->workspace + parts : NULL;
    p->scale = wide(&r->in[GRADD_NORM_GRAD_SCALE], p->n, (char *)r->workspace + 2 * parts);
    const gradd_range_t chunks = gradd_part_of(r, p->chunks);
#pragma omp parallel for schedule(static) if (p->rows * p->n >= GRADD_PARALLEL_MIN)
    for (int64_t c = chunks.from; c < chunks.to; c++)
        kernels->rows_grad(p, c);
    if (!gradd_part_is_last(r)) return GRADD_OK;
    if (dscale) store_sum(kernels, p, p->parts_scale, &r->out[GRADD_NORM_DSCALE]);
    if (dbias) store_sum(kernels, p, p->parts_bias, &r->out[GRADD_NORM_DBIAS]);
    return GRADD_OK;
}

static gradd_status_t compute_layer_norm_grad(const gradd_launch_t *r) {
    norm_t p;
    GRADD_TRY(read_shape(r, &r->in[GRADD_NORM_GRAD_X].type, &p));
    p.centred = true;
    p.mean = r->in[GRADD_LAYER_NORM_GRAD_MEAN].data, p.inv = r->in[GRADD_LAYER_NORM_GRAD_INV].data;
    return compute_backward(r, &p);
}

static gradd_status_t compute_rms_norm_grad(const gradd_launch_t *r) {
    norm_t p;
    GRADD_TRY(read_shape(r, &r->in[GRADD_NORM_GRAD_X].type, &p));
    p.inv = r->in[GRADD_RMS_NORM_GRAD_INV].data;
    return compute_backward(r, &p);
}

/* The definition, in double, with plain loops; serves both forward operators. */
static gradd_status_t ref_forward(const gradd_launch_t *r) {
    norm_t p;
    GRADD_TRY(read_shape(r, &r->in[GRADD_NORM_X].type, &p));
    bool layer = !strcmp(r->op->name, "LayerNormalization");
    bool biased =
        layer && r->n_in > GRADD_NORM_BIAS && r->in[GRADD_NORM_BIAS].type.dtype != GRADD_DT_NONE;
    GRADD_SWITCH_FLOAT(r->in[GRADD_NORM_X].type.dtype, T, {
        const T *scale = r->in[GRADD_NORM_SCALE].data,
                *bias = biased ? r->in[GRADD_NORM_BIAS].data : NULL;
        T *means = layer ? output(r, GRADD_LAYER_NORM_MEAN) : NULL,
          *invs = output(r, layer ? GRADD_LAYER_NORM_INV : GRADD_RMS_NORM_INV);
        for (int64_t row = 0; row < p.rows; row++) {
            const T *x = (const T *)r->in[GRADD_NORM_X].data + row * p.n;
            T *y = (T *)r->out[GRADD_NORM_Y].data + row * p.n;
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
    const gradd_type_t *x = &c->in[GRADD_NORM_X].type;
    int axis;
    GRADD_TRY(gradd_axis(gradd_attr_int(c->attrs, GRADD_NORM_AXIS, -1), x->rank, false, &axis));
    if (gradd_attr_int(c->attrs, GRADD_NORM_STASH_TYPE, 1) != 1)
        return GRADD_FAIL(UNSUPPORTED, "stash_type other than float");
    for (int i = GRADD_NORM_SCALE; i < c->n_in; i++)
        if (c->in[i].type.dtype != GRADD_DT_NONE) GRADD_TRY(check_row_vector(c, i, x, axis));
    if (c->n_in > GRADD_NORM_BIAS && c->in[GRADD_NORM_BIAS].type.dtype != GRADD_DT_NONE &&
        c->in[GRADD_NORM_BIAS].type.dtype != c->in[GRADD_NORM_SCALE].type.dtype)
        return GRADD_FAIL(UNSUPPORTED, "scale and bias differ in type");
    c->out[GRADD_NORM_Y] = *x;
    for (int j = GRADD_NORM_Y + 1; j < c->n_out; j++)
        c->out[j] = stats_type(x, axis);
    return GRADD_OK;
}

static gradd_status_t infer_backward(gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[GRADD_NORM_GRAD_X].type;
    int axis;
    GRADD_TRY(gradd_axis(gradd_attr_int(c->attrs, GRADD_NORM_AXIS, -1), x->rank, false, &axis));
    GRADD_TRY(check_row_vector(c, GRADD_NORM_GRAD_SCALE, x, axis));
    gradd_type_t stats = stats_type(x, axis);
    if (!gradd_type_equal(x, &c->in[GRADD_NORM_GRAD_DY].type))
        return GRADD_FAIL(GRAPH, "dy and x differ in shape");
    for (int i = GRADD_NORM_GRAD_STATS; i < c->n_in; i++)
        if (!gradd_type_equal(&c->in[i].type, &stats))
            return GRADD_FAIL(GRAPH, "input %d does not have one entry per row", i);
    c->out[GRADD_NORM_DX] = *x;
    for (int j = GRADD_NORM_DSCALE; j < c->n_out; j++)
        c->out[j] = c->in[GRADD_NORM_GRAD_SCALE].type;
    return GRADD_OK;
}

/* Room for scale and bias in f32. */
static size_t workspace_forward(const gradd_infer_t *c) {
    if (!gradd_dtype_is_half(c->in[GRADD_NORM_X].type.dtype)) return 0;
    return 2 * align_up(sizeof(float) * (size_t)gradd_type_count(&c->in[GRADD_NORM_SCALE].type));
}

/* Parts of dscale and dbias, and the scale in f32. */
static size_t workspace_backward(const gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[GRADD_NORM_GRAD_X].type,
                       *scale = &c->in[GRADD_NORM_GRAD_SCALE].type;
    int64_t n = gradd_type_count(scale),
            chunks = count_chunks(count_rows(x, x->rank - scale->rank));
    return 2 * part_bytes(chunks, n, x->dtype) + align_up(sizeof(float) * (size_t)n);
}

/* Of a gradient whose rows are summed: chunks of them, where it is not cut by rows. */
static int parts_backward(const gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[GRADD_NORM_GRAD_X].type;
    return gradd_parts_of_tasks(
        c, count_chunks(count_rows(x, x->rank - c->in[GRADD_NORM_GRAD_SCALE].type.rank)));
}

/* ---- gradient rules -------------------------------------------------------------------------- */

static gradd_status_t grad_norm(gradd_grad_t *g, const char *op, int n_stats) {
    gradd_builder_t *b = g->b;
    int n_out = 1;
    for (int i = GRADD_NORM_SCALE; i < g->n_in; i++)
        if (g->need[i]) n_out = i + 1; /* frozen scales cost nothing */
    for (int j = GRADD_NORM_Y + 1; j < g->n_out; j++)
        if (g->dout[j] != GRADD_NONE)
            return GRADD_FAIL(UNSUPPORTED, "a gradient arrives for a saved statistic");
    if (g->dout[GRADD_NORM_Y] == GRADD_NONE) return GRADD_OK;
    gradd_val_t in[GRADD_LAYER_NORM_GRAD_INPUTS] = {[GRADD_NORM_GRAD_DY] = g->dout[GRADD_NORM_Y],
                                                    [GRADD_NORM_GRAD_X] = g->in[GRADD_NORM_X],
                                                    [GRADD_NORM_GRAD_SCALE] =
                                                        g->in[GRADD_NORM_SCALE]};
    gradd_val_t out[GRADD_NORM_GRAD_OUTPUTS];
    for (int i = 0; i < n_stats; i++)
        in[GRADD_NORM_GRAD_STATS + i] = g->output(g, GRADD_NORM_Y + 1 + i);
    gradd_attr_t attr =
        gradd_make_int(GRADD_NORM_AXIS, gradd_attr_int(g->attrs, GRADD_NORM_AXIS, -1));
    if (b->status) return b->status;
    b->status =
        b->emit(b, &(gradd_emit_t){op, in, GRADD_NORM_GRAD_STATS + n_stats, &attr, 1}, out, n_out);
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
    const gradd_type_t type = *gradd_val_type(b, x->in[GRADD_NORM_X]);
    int axis;
    GRADD_TRY(gradd_axis(gradd_attr_int(x->attrs, GRADD_NORM_AXIS, -1), type.rank, false, &axis));
    const double epsilon = gradd_attr_float(x->attrs, GRADD_NORM_EPSILON, 1e-5);
    gradd_val_t v = gradd_wide(b, x->in[GRADD_NORM_X]), mean = GRADD_NONE;
    if (centred) {
        mean = gradd_reduce_from(b, "ReduceMean", v, axis);
        v = GRADD_EMIT(b, "Sub", v, mean);
    }
    gradd_val_t square = gradd_reduce_from(b, "ReduceMean", GRADD_EMIT(b, "Mul", v, v), axis);
    gradd_val_t small = gradd_const_scalar(b, wide_dtype(type.dtype), epsilon);
    gradd_val_t root = GRADD_EMIT(b, "Sqrt", GRADD_EMIT(b, "Add", square, small));
    gradd_val_t inv = GRADD_EMIT(b, "Reciprocal", root);
    gradd_val_t y =
        GRADD_EMIT(b, "Mul", GRADD_EMIT(b, "Mul", v, inv), gradd_wide(b, x->in[GRADD_NORM_SCALE]));
    if (x->n_in > GRADD_NORM_BIAS && x->in[GRADD_NORM_BIAS] != GRADD_NONE)
        y = GRADD_EMIT(b, "Add", y, gradd_wide(b, x->in[GRADD_NORM_BIAS]));
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
    GRADD_ATTR_LIST({GRADD_NORM_AXIS, GRADD_ATTR_INT, false},                                      \
                    {GRADD_NORM_EPSILON, GRADD_ATTR_FLOAT, false},                                 \
                    {GRADD_NORM_STASH_TYPE, GRADD_ATTR_INT, false})

GRADD_OPS(
    norm,
    GRADD_OP("LayerNormalization", "", 17, (GRADD_NORM_BIAS, GRADD_NORM_INPUTS),
             (1, GRADD_LAYER_NORM_OUTPUTS), .types = {GRADD_T_FLOAT}, .attrs = NORM_ATTRS,
             .infer = infer_forward, .rowwise = gradd_rowwise_axis, .grad = grad_layer_norm,
             .expand = expand_layer_norm, .ref = GRADD_REF(ref_forward),
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
    GRADD_OP("LayerNormGrad", "com.gradd", 1,
             (GRADD_LAYER_NORM_GRAD_INPUTS, GRADD_LAYER_NORM_GRAD_INPUTS),
             (1, GRADD_NORM_GRAD_OUTPUTS), .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD,
             .types = {GRADD_T_FLOAT},
             .attrs = GRADD_ATTR_LIST({GRADD_NORM_AXIS, GRADD_ATTR_INT, false}),
             .infer = infer_backward, .ref = GRADD_REF(compute_layer_norm_grad),
             .cases = GRADD_CASES(
                 {.text = "f32[3,7] f32[3,7] f32[7] f32[3,1] f32[3,1]:(0.5,2) -> 3"},
                 {.text = "f32[67,64] f32[67,64] f32[64] f32[67,1] f32[67,1]:(0.5,2) -> 3"},
                 {.text = "f32[19,768] f32[19,768] f32[768] f32[19,1] f32[19,1]:(0.5,2) -> 3"},
                 {.text = "f32[19,4096] f32[19,4096] f32[4096] f32[19,1] f32[19,1]:(0.5,2) -> 3"},
                 {.text = "f32[3,8192] f32[3,8192] f32[8192] f32[3,1] f32[3,1]:(0.5,2) -> 3"},
                 {.text = "f32[18,9001] f32[18,9001] f32[9001] f32[18,1] f32[18,1]:(0.5,2) -> 3"},
                 {.text = "f32[0,8] f32[0,8] f32[8] f32[0,1] f32[0,1] -> 3"})),
    GRADD_OP("RMSNormalization", "", 23, (GRADD_NORM_BIAS, GRADD_NORM_BIAS),
             (1, GRADD_RMS_NORM_OUTPUTS), .types = {GRADD_T_FLOAT}, .attrs = NORM_ATTRS,
             .infer = infer_forward, .rowwise = gradd_rowwise_axis, .grad = grad_rms_norm,
             .expand = expand_rms_norm, .ref = GRADD_REF(ref_forward),
             .cases = GRADD_CASES({.text = "f32[3,7] f32[7]"},
                                  {.text = "f32[2,3,45] f32[45] | epsilon=1e-6"},
                                  {.text = "f32[2,3,5] f32[3,5] | axis=1"},
                                  {.text = "f32[37,70] f32[70]"}, {.text = "f32[401,130] f32[130]"},
                                  {.text = "f32[5,1024] f32[1024] -> 2", .grad_tol = -1},
                                  {.text = "f32[2,9000] f32[9000] -> 2", .grad_tol = -1})),
    GRADD_OP(
        "RMSNormGrad", "com.gradd", 1, (GRADD_RMS_NORM_GRAD_INPUTS, GRADD_RMS_NORM_GRAD_INPUTS),
        (1, GRADD_NORM_DBIAS), .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD,
        .types = {GRADD_T_FLOAT},
        .attrs = GRADD_ATTR_LIST({GRADD_NORM_AXIS, GRADD_ATTR_INT, false}), .infer = infer_backward,
        .ref = GRADD_REF(compute_rms_norm_grad),
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
                           .workspace = workspace_backward, .parts = parts_backward),
              GRADD_KERNEL("RMSNormalization", "loop", .types = {GRADD_T_ANY}, .inplace = 1,
                           .compute = compute_rms_norm, .workspace = workspace_forward),
              GRADD_KERNEL("RMSNormGrad", "loop",
                           .types = {GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_T_F32_F64},
                           .inplace = 3, .compute = compute_rms_norm_grad,
                           .workspace = workspace_backward, .parts = parts_backward));
