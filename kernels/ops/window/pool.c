/* Pooling: composites of WindowMax and Taps over the axes behind batch and channels, one to three.
 *
 * MaxPool and AveragePool are ONNX's, with windows that torch has where they reach beyond the end
 * (ceil_mode). SumPool is AveragePool without its division. GlobalMaxPool and GlobalAveragePool
 * have one window; AdaptiveMaxPool and AdaptiveAveragePool(x, sizes) divide each axis into so many
 * parts. Indices of MaxPool are places in x as a whole, those of AdaptiveMaxPool within a plane.
 */
#include <string.h>

#include "kernels/contract/kernel.h"
#include "kernels/describe/windowmax.h"
#include "kernels/describe/windows.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

enum { FRONT = 2 }; /* axes in front: batch and channels */

typedef struct pool_s {
    int axes;
    gradd_pool_axis_t axis[GRADD_WINDOW_AXES];
} pool_t;

static gradd_status_t axes_of(const gradd_type_t *x, int *out_axes) {
    *out_axes = x->rank - FRONT;
    if (*out_axes < 1 || *out_axes > GRADD_WINDOW_AXES)
        return GRADD_FAIL(UNSUPPORTED, "the input has rank %d, pooling is there for 3 to %d",
                          x->rank, FRONT + GRADD_WINDOW_AXES);
    return GRADD_OK;
}

/* ---- attributes ------------------------------------------------------------------------------ */

static gradd_status_t list(gradd_attrs_t attrs, const char *name, int n, const int64_t **out) {
    const gradd_attr_t *attr = gradd_attr_find(attrs, name);
    *out = attr ? attr->ints : NULL;
    if (attr && attr->n != (size_t)n)
        return GRADD_FAIL(GRAPH, "%s has %zu entries, expected %d", name, attr->n, n);
    return GRADD_OK;
}

/* SAME_UPPER, SAME_LOWER: as many windows as strides fit into the axis. */
static void pad_same(int64_t n, bool lower, gradd_pool_axis_t *a) {
    const int64_t reach = (a->kernel - 1) * a->dilation + 1;
    const int64_t count = (n + a->stride - 1) / a->stride;
    const int64_t total = count ? (count - 1) * a->stride + reach - n : 0;
    const int64_t padding = total > 0 ? total : 0;
    a->before = lower ? padding - padding / 2 : padding / 2;
    a->after = padding - a->before;
    a->ceil = false;
}

static gradd_status_t read_pool(const gradd_type_t *x, gradd_attrs_t attrs, pool_t *out) {
    const char *automatic = gradd_attr_string(attrs, "auto_pad", "NOTSET");
    const int64_t *kernel, *stride, *dilation, *pads;
    const bool same = !strncmp(automatic, "SAME_", 5);
    GRADD_TRY(axes_of(x, &out->axes));
    GRADD_TRY(list(attrs, "kernel_shape", out->axes, &kernel));
    GRADD_TRY(list(attrs, "strides", out->axes, &stride));
    GRADD_TRY(list(attrs, "dilations", out->axes, &dilation));
    GRADD_TRY(list(attrs, "pads", 2 * out->axes, &pads));
    if (strcmp(automatic, "NOTSET")) pads = NULL;
    for (int i = 0; i < out->axes; i++) {
        gradd_pool_axis_t *a = &out->axis[i];
        *a = (gradd_pool_axis_t){kernel[i],
                                 stride ? stride[i] : 1,
                                 dilation ? dilation[i] : 1,
                                 pads ? pads[i] : 0,
                                 pads ? pads[out->axes + i] : 0,
                                 gradd_attr_int(attrs, "ceil_mode", 0)};
        int64_t count;
        GRADD_TRY(gradd_pool_count(INT32_MAX, a, &count)); /* its numbers are in range */
        if (same) pad_same(x->dims[FRONT + i], !strcmp(automatic, "SAME_LOWER"), a);
    }
    return GRADD_OK;
}

/* ---- shape rules ----------------------------------------------------------------------------- */

static gradd_status_t infer_pool(gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[0].type;
    pool_t p;
    GRADD_TRY(read_pool(x, c->attrs, &p));
    if (gradd_attr_int(c->attrs, "storage_order", 0))
        return GRADD_FAIL(UNSUPPORTED, "storage_order other than 0");
    gradd_type_t y = *x;
    for (int i = 0; i < p.axes; i++) {
        if (strcmp(c->op->name, "MaxPool") && p.axis[i].dilation != 1)
            return GRADD_FAIL(UNSUPPORTED, "averages of windows with dilations");
        GRADD_TRY(gradd_pool_count(x->dims[FRONT + i], &p.axis[i], &y.dims[FRONT + i]));
    }
    c->out[0] = y;
    if (c->n_out > 1) c->out[1] = y, c->out[1].dtype = GRADD_DT_I64;
    return GRADD_OK;
}

static gradd_status_t infer_global(gradd_infer_t *c) {
    int axes;
    c->out[0] = c->in[0].type;
    if (c->out[0].rank < FRONT)
        return GRADD_FAIL(GRAPH, "the input has rank %d, at least 2", c->out[0].rank);
    if (strcmp(c->op->name, "GlobalAveragePool") && c->out[0].rank > FRONT)
        GRADD_TRY(axes_of(&c->out[0], &axes));
    for (int i = FRONT; i < c->out[0].rank; i++)
        c->out[0].dims[i] = 1;
    return GRADD_OK;
}

static gradd_status_t infer_adaptive(gradd_infer_t *c) {
    int64_t sizes[GRADD_WINDOW_AXES];
    int axes, n;
    GRADD_TRY(axes_of(&c->in[0].type, &axes));
    GRADD_TRY(gradd_known_i64s(c, 1, sizes, GRADD_WINDOW_AXES, &n));
    if (n != axes) return GRADD_FAIL(GRAPH, "%d sizes for %d axes", n, axes);
    c->out[0] = c->in[0].type;
    for (int i = 0; i < axes; i++) {
        if (sizes[i] < 0) return GRADD_FAIL(GRAPH, "a size of %lld", (long long)sizes[i]);
        if (sizes[i] && !c->in[0].type.dims[FRONT + i])
            return GRADD_FAIL(GRAPH, "axis %d is empty, its parts are not", FRONT + i);
        c->out[0].dims[FRONT + i] = sizes[i];
    }
    if (c->n_out > 1) c->out[1] = c->out[0], c->out[1].dtype = GRADD_DT_I64;
    return GRADD_OK;
}

/* ---- expansions ------------------------------------------------------------------------------ */

/* Of axis i of an operator with `how`. */
typedef gradd_status_t (*windows_fn)(int64_t n, int i, const void *how, gradd_windows_t *out);

/* Averages or sums along one axis after the other, rounded once. */
static gradd_status_t average(gradd_expand_t *x, int axes, windows_fn of, const void *how) {
    gradd_builder_t *b = x->b;
    const gradd_type_t type = *gradd_val_type(b, x->in[0]);
    gradd_val_t v = x->in[0];
    for (int i = 0; i < axes; i++) {
        gradd_windows_t w;
        GRADD_TRY(of(type.dims[FRONT + i], i, how, &w));
        v = gradd_emit_taps(b, v, FRONT + i, &w);
        gradd_windows_finish(&w);
    }
    x->out[0] = gradd_cast(b, v, type.dtype);
    return b->status;
}

static gradd_status_t maximum(gradd_expand_t *x, int axes, windows_fn of, const void *how,
                              const int64_t *steps) {
    gradd_builder_t *b = x->b;
    const gradd_type_t type = *gradd_val_type(b, x->in[0]);
    const gradd_attr_t attr = gradd_make_ints(GRADD_WINDOW_STEPS, steps, (size_t)axes);
    gradd_val_t in[1 + GRADD_WINDOW_AXES] = {x->in[0]};
    for (int i = 0; i < axes; i++) {
        gradd_windows_t w;
        GRADD_TRY(of(type.dims[FRONT + i], i, how, &w));
        in[1 + i] = gradd_windows_span(b, &w);
        gradd_windows_finish(&w);
    }
    if (b->status) return b->status;
    return b->emit(b, &(gradd_emit_t){"WindowMax", in, 1 + axes, &attr, 1}, x->out, x->n_out);
}

static gradd_status_t by_pool(int64_t n, int i, const void *how, gradd_windows_t *out) {
    return gradd_windows_pool(n, &((const pool_t *)how)->axis[i], out);
}

static gradd_status_t by_average(int64_t n, int i, const void *how, gradd_windows_t *out) {
    return gradd_windows_average(n, &((const pool_t *)how)->axis[i], false, out);
}

static gradd_status_t by_padded_average(int64_t n, int i, const void *how, gradd_windows_t *out) {
    return gradd_windows_average(n, &((const pool_t *)how)->axis[i], true, out);
}

static gradd_status_t by_sum(int64_t n, int i, const void *how, gradd_windows_t *out) {
    GRADD_TRY(by_average(n, i, how, out));
    for (int64_t j = 0; j < out->out; j++)
        for (int64_t t = 0; t < out->span[2 * j + 1]; t++)
            out->weight[j * out->width + t] = 1;
    return GRADD_OK;
}

static gradd_status_t by_parts(int64_t n, int i, const void *how, gradd_windows_t *out) {
    return gradd_windows_adaptive(n, ((const int64_t *)how)[i], false, out);
}

static gradd_status_t by_weighted_parts(int64_t n, int i, const void *how, gradd_windows_t *out) {
    return gradd_windows_adaptive(n, ((const int64_t *)how)[i], true, out);
}

/* Places in a plane become places in the whole. */
static gradd_val_t in_whole(gradd_builder_t *b, gradd_val_t places, const gradd_type_t *x) {
    int64_t each = 1;
    gradd_type_t type = {.dtype = GRADD_DT_I64, .rank = x->rank};
    for (int i = 0; i < x->rank; i++) {
        type.dims[i] = i < FRONT ? x->dims[i] : 1;
        if (i >= FRONT) each *= x->dims[i];
    }
    const int64_t planes = type.dims[0] * type.dims[1];
    const gradd_val_t ends[] = {gradd_const_scalar(b, GRADD_DT_I64, 0),
                                gradd_const_scalar(b, GRADD_DT_I64, (double)planes),
                                gradd_const_scalar(b, GRADD_DT_I64, 1)};
    gradd_val_t first = gradd_emit_n(b, "Range", 3, ends);
    first = GRADD_EMIT(b, "Mul", first, gradd_const_scalar(b, GRADD_DT_I64, (double)each));
    return GRADD_EMIT(b, "Add", places, gradd_reshape_to(b, first, type.dims, type.rank));
}

static gradd_status_t expand_max_pool(gradd_expand_t *x) {
    const gradd_type_t type = *gradd_val_type(x->b, x->in[0]);
    int64_t steps[GRADD_WINDOW_AXES];
    pool_t p;
    GRADD_TRY(read_pool(&type, x->attrs, &p));
    for (int i = 0; i < p.axes; i++)
        steps[i] = p.axis[i].dilation;
    GRADD_TRY(maximum(x, p.axes, by_pool, &p, steps));
    if (x->n_out > 1) x->out[1] = in_whole(x->b, x->out[1], &type);
    return x->b->status;
}

static gradd_status_t expand_average_pool(gradd_expand_t *x) {
    pool_t p;
    GRADD_TRY(read_pool(gradd_val_type(x->b, x->in[0]), x->attrs, &p));
    const bool padded = gradd_attr_int(x->attrs, "count_include_pad", 0);
    return average(x, p.axes, padded ? by_padded_average : by_average, &p);
}

static gradd_status_t expand_sum_pool(gradd_expand_t *x) {
    pool_t p;
    GRADD_TRY(read_pool(gradd_val_type(x->b, x->in[0]), x->attrs, &p));
    return average(x, p.axes, by_sum, &p);
}

static gradd_status_t expand_global_average(gradd_expand_t *x) {
    if (gradd_val_type(x->b, x->in[0])->rank > FRONT)
        x->out[0] = gradd_reduce_from(x->b, "ReduceMean", x->in[0], FRONT);
    else
        x->out[0] = GRADD_EMIT(x->b, "Identity", x->in[0]);
    return x->b->status;
}

static const int64_t ones[] = {1, 1, 1};

static gradd_status_t expand_global_max(gradd_expand_t *x) {
    const int axes = gradd_val_type(x->b, x->in[0])->rank - FRONT;
    if (axes) return maximum(x, axes, by_parts, ones, ones);
    x->out[0] = GRADD_EMIT(x->b, "Identity", x->in[0]);
    return x->b->status;
}

static gradd_status_t expand_adaptive(gradd_expand_t *x) {
    const int axes = gradd_val_type(x->b, x->in[0])->rank - FRONT;
    const void *sizes = x->b->data(x->b, x->in[1]);
    int64_t parts[GRADD_WINDOW_AXES];
    const bool narrow = gradd_val_type(x->b, x->in[1])->dtype == GRADD_DT_I32;
    for (int i = 0; i < axes; i++)
        parts[i] = narrow ? ((const int32_t *)sizes)[i] : ((const int64_t *)sizes)[i];
    if (!strcmp(x->op->name, "AdaptiveMaxPool")) return maximum(x, axes, by_parts, parts, ones);
    return average(x, axes, by_weighted_parts, parts);
}

/* ---- rows ------------------------------------------------------------------------------------ */

#define POOL_ATTRS                                                                                 \
    {"auto_pad", GRADD_ATTR_STRING, false}, {"ceil_mode", GRADD_ATTR_INT, false},                  \
        {"dilations", GRADD_ATTR_INTS, false}, {"kernel_shape", GRADD_ATTR_INTS, true},            \
        {"pads", GRADD_ATTR_INTS, false}, {                                                        \
        "strides", GRADD_ATTR_INTS, false                                                          \
    }

GRADD_OPS(
    pool,
    GRADD_OP(
        "MaxPool", "", 8, (1, 1), (1, 2), .counts = 2, .types = {GRADD_T_FLOAT},
        .attrs = GRADD_ATTR_LIST(POOL_ATTRS, {"storage_order", GRADD_ATTR_INT, false}),
        .infer = infer_pool, .expand = expand_max_pool,
        .cases = GRADD_CASES(
            {.text = "f32[2,3,7] | kernel_shape=[3] strides=[2]"},
            {.text = "f32[2,3,7,8] | kernel_shape=[3,2] strides=[2,2] pads=[1,1,1,0]"},
            {.text = "f32[2,3,7,8] | kernel_shape=[3,2] dilations=[2,3] -> 2", .grad_tol = -1},
            {.text = "f32[1,2,5,4,6] | kernel_shape=[2,2,3] strides=[2,2,2] ceil_mode=1"},
            {.text = "f32[1,2,7,7] | kernel_shape=[3,3] strides=[2,2] auto_pad=\"SAME_UPPER\""},
            {.text = "f32[1,2,6,6] | kernel_shape=[3,3] strides=[2,2] auto_pad=\"SAME_LOWER\""},
            {.text = "f32[1,2,6,6] | kernel_shape=[3,3] auto_pad=\"VALID\" -> 2", .grad_tol = -1},
            {.text = "f32[0,3,7] | kernel_shape=[3]"})),
    GRADD_OP(
        "AveragePool", "", 7, (1, 1), (1, 1), .types = {GRADD_T_FLOAT},
        .attrs = GRADD_ATTR_LIST(POOL_ATTRS, {"count_include_pad", GRADD_ATTR_INT, false}),
        .infer = infer_pool, .expand = expand_average_pool,
        .cases = GRADD_CASES(
            {.text = "f32[2,3,7] | kernel_shape=[3] strides=[2]"},
            {.text = "f32[2,3,7,8] | kernel_shape=[3,2] strides=[2,2] pads=[1,1,1,0]"},
            {.text = "f32[2,3,7,8] | kernel_shape=[3,2] pads=[1,1,1,0] count_include_pad=1"},
            {.text = "f32[1,2,5,4,6] | kernel_shape=[2,2,3] strides=[2,2,2] ceil_mode=1"},
            {.text = "f32[1,2,7,7] | kernel_shape=[3,3] strides=[2,2] auto_pad=\"SAME_UPPER\""},
            {.text = "f32[0,3,7] | kernel_shape=[3]"})),
    GRADD_OP("SumPool", "com.gradd", 1, (1, 1), (1, 1), .types = {GRADD_T_FLOAT},
             .attrs = GRADD_ATTR_LIST(POOL_ATTRS), .infer = infer_pool, .expand = expand_sum_pool,
             .cases = GRADD_CASES(
                 {.text = "f32[2,3,7,8] | kernel_shape=[3,2] strides=[2,2] pads=[1,1,1,0]"})),
    GRADD_OP("GlobalAveragePool", "", 1, (1, 1), (1, 1), .types = {GRADD_T_FLOAT},
             .infer = infer_global, .expand = expand_global_average,
             .cases = GRADD_CASES({.text = "f32[2,3,4,5]"}, {.text = "f32[2,3,4]"},
                                  {.text = "f32[2,3]"})),
    GRADD_OP("GlobalMaxPool", "", 1, (1, 1), (1, 1), .types = {GRADD_T_FLOAT},
             .infer = infer_global, .expand = expand_global_max,
             .cases = GRADD_CASES({.text = "f32[2,3,4,5]"}, {.text = "f32[2,3]"})),
    GRADD_OP("AdaptiveAveragePool", "com.gradd", 1, (2, 2), (1, 1),
             .types = {GRADD_T_FLOAT, GRADD_T_INDEX}, .infer = infer_adaptive,
             .expand = expand_adaptive,
             .cases = GRADD_CASES({.text = "f32[2,3,7] i64[1]={3}"},
                                  {.text = "f32[2,3,5,4] i64[2]={3,6}"},
                                  {.text = "f32[1,2,3,4,5] i64[3]={1,3,2}"})),
    GRADD_OP("AdaptiveMaxPool", "com.gradd", 1, (2, 2), (1, 2), .counts = 2,
             .types = {GRADD_T_FLOAT, GRADD_T_INDEX}, .infer = infer_adaptive,
             .expand = expand_adaptive,
             .cases = GRADD_CASES({.text = "f32[2,3,7] i64[1]={3}"},
                                  {.text = "f32[2,3,5,4] i64[2]={3,6} -> 2", .grad_tol = -1},
                                  {.text = "f32[1,2,3,4,5] i64[3]={1,3,2}"})));
