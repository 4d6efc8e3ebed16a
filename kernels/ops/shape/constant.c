/* Tensors made from attributes, shapes or a few numbers: Constant, ConstantOfShape, Shape, Size,
 * Range, EyeLike, OneHot, NonZero; and Trilu, which keeps a triangle of matrices.
 *
 * Most of these are the leaves of shape arithmetic and run once, when a graph is compiled, through
 * the same kernels as at run time. Only Trilu (dx = the same triangle of dy) and OneHot's two
 * values carry a gradient; nothing is saved.
 */
#include <math.h>
#include <string.h>

#include "kernels/contract/kernel.h"
#include "kernels/contract/op.h"
#include "kernels/cpu/copy.h"
#include "kernels/cpu/half.h"
#include "kernels/cpu/pick.h"
#include "kernels/describe/cost.h"
#include "kernels/describe/dispatch.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

/* ---- kernels --------------------------------------------------------------------------------- */

/* Spreads one element over the whole output. */
static void fill(const gradd_view_t *out, const void *element) {
    gradd_copy_t job = {.rank = 1, .dims = {gradd_type_count(&out->type)}, .to = {1}};
    gradd_copy_strided(&job, gradd_dtype_bytes(out->type.dtype), out->data, element);
}

static gradd_status_t compute_constant(const gradd_launch_t *r) {
    const gradd_attr_t *a = &r->attrs.v[0];
    if (a->kind == GRADD_ATTR_TENSOR) {
        size_t bytes = (size_t)gradd_type_bytes(&a->tensor.type);
        if (bytes) memcpy(r->out[0].data, a->tensor.data, bytes);
        return GRADD_OK;
    }
    if (a->kind == GRADD_ATTR_INT) *(int64_t *)r->out[0].data = a->i;
    if (a->kind == GRADD_ATTR_FLOAT) *(float *)r->out[0].data = (float)a->f;
    for (size_t i = 0; i < a->n && a->kind == GRADD_ATTR_INTS; i++)
        ((int64_t *)r->out[0].data)[i] = a->ints[i];
    for (size_t i = 0; i < a->n && a->kind == GRADD_ATTR_FLOATS; i++)
        ((float *)r->out[0].data)[i] = (float)a->floats[i];
    return GRADD_OK;
}

static gradd_status_t compute_constant_of_shape(const gradd_launch_t *r) {
    static const float zero;
    const gradd_attr_t *a = gradd_attr_find(r->attrs, "value");
    fill(&r->out[0], a ? a->tensor.data : &zero);
    return GRADD_OK;
}

void gradd_shape_range(gradd_attrs_t attrs, int rank, int *out_start, int *out_end) {
    int64_t start = gradd_attr_int(attrs, "start", 0), end = gradd_attr_int(attrs, "end", rank);
    start = start < 0 ? start + rank : start;
    end = end < 0 ? end + rank : end;
    start = start < 0 ? 0 : start > rank ? rank : start;
    end = end < 0 ? 0 : end > rank ? rank : end;
    *out_start = (int)start;
    *out_end = (int)(end < start ? start : end);
}

static gradd_status_t compute_shape(const gradd_launch_t *r) {
    int start, end;
    gradd_shape_range(r->attrs, r->in[0].type.rank, &start, &end);
    for (int i = start; i < end; i++)
        ((int64_t *)r->out[0].data)[i - start] = r->in[0].type.dims[i];
    return GRADD_OK;
}

static gradd_status_t compute_size(const gradd_launch_t *r) {
    *(int64_t *)r->out[0].data = gradd_type_count(&r->in[0].type);
    return GRADD_OK;
}

/* Integers wrap in unsigned arithmetic: i * delta may pass the end of the type although the sum, an
 * entry of the range, does not. */
static gradd_status_t compute_range(const gradd_launch_t *r) {
    int64_t n = r->out[0].type.dims[0];
    const void *start = r->in[0].data, *delta = r->in[2].data;
    if (gradd_dtype_is_int(r->in[0].type.dtype)) {
        GRADD_SWITCH_INT(r->in[0].type.dtype, T, {
            uint64_t a = (uint64_t)*(const T *)start, d = (uint64_t)*(const T *)delta;
            for (int64_t i = 0; i < n; i++)
                ((T *)r->out[0].data)[i] = (T)(a + (uint64_t)i * d);
        });
        return GRADD_OK;
    }
    GRADD_SWITCH_FLOAT(r->in[0].type.dtype, T, {
        for (int64_t i = 0; i < n; i++)
            ((T *)r->out[0].data)[i] = *(const T *)start + (T)i * *(const T *)delta;
    });
    return GRADD_OK;
}

static gradd_status_t compute_eye_like(const gradd_launch_t *r) {
    const gradd_type_t *y = &r->out[0].type;
    int64_t k = gradd_attr_int(r->attrs, "k", 0), rows = y->dims[0], columns = y->dims[1];
    memset(r->out[0].data, 0, (size_t)gradd_type_bytes(y));
    if (k >= columns || k <= -rows) return GRADD_OK;
    if (gradd_dtype_is_half(y->dtype)) {
        uint16_t *to = r->out[0].data;
        for (int64_t i = k < 0 ? -k : 0; i < rows && i + k < columns; i++)
            gradd_half_put(&to[i * columns + i + k], y->dtype, 1);
        return GRADD_OK;
    }
    GRADD_SWITCH_ALL(y->dtype, T, {
        T *to = r->out[0].data;
        for (int64_t i = k < 0 ? -k : 0; i < rows && i + k < columns; i++)
            to[i * columns + i + k] = 1;
    });
    return GRADD_OK;
}

/* A whole number; what none can hold is out of range, whatever a machine makes of it. */
static int64_t whole(double x) {
    return x >= -0x1p63 && x < 0x1p63 ? (int64_t)x : INT64_MIN;
}

/* Floats are allowed as indices by ONNX; they are whole numbers. Read once, as gradd_pick_index. */
static int64_t whole_at(const gradd_view_t *v, int64_t i) {
    switch (v->type.dtype) {
    case GRADD_DT_F32:
        return whole((double)((const volatile float *)v->data)[i]);
    case GRADD_DT_F64:
        return whole(((const volatile double *)v->data)[i]);
    default:
        return gradd_pick_index(v, i);
    }
}

static gradd_status_t compute_one_hot(const gradd_launch_t *r) {
    const gradd_view_t *indices = &r->in[0];
    const gradd_type_t *y = &r->out[0].type;
    int axis;
    GRADD_TRY(gradd_axis(gradd_attr_int(r->attrs, "axis", -1), y->rank, false, &axis));
    int64_t depth = y->dims[axis], inner = 1, n = gradd_type_count(&indices->type);
    size_t bytes = gradd_dtype_bytes(y->dtype);
    const char *values = r->in[2].data;
    for (int i = axis + 1; i < y->rank; i++)
        inner *= y->dims[i];
    fill(&r->out[0], values);
    for (int64_t i = 0; i < n; i++) {
        int64_t hot = whole_at(indices, i);
        if (hot < 0) hot += depth;
        if (hot < 0 || hot >= depth) continue; /* the row stays off */
        int64_t at = (i / inner * depth + hot) * inner + i % inner;
        memcpy((char *)r->out[0].data + (size_t)at * bytes, values + bytes, bytes);
    }
    return GRADD_OK;
}

static bool is_zero(const char *element, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (element[i]) return false;
    return true;
}

/* -0.0 is zero although its bytes are not. */
static bool is_set(const gradd_view_t *x, int64_t i) {
    size_t bytes = gradd_dtype_bytes(x->type.dtype);
    if (x->type.dtype == GRADD_DT_F32) return ((const float *)x->data)[i] != 0;
    if (x->type.dtype == GRADD_DT_F64) return ((const double *)x->data)[i] != 0;
    if (gradd_dtype_is_half(x->type.dtype))
        return gradd_half_f32((const uint16_t *)x->data + i, x->type.dtype) != 0;
    return !is_zero((const char *)x->data + (size_t)i * bytes, bytes);
}

static gradd_status_t compute_non_zero(const gradd_launch_t *r) {
    const gradd_view_t *x = &r->in[0];
    int64_t n = gradd_type_count(&x->type), found = 0, hits = r->out[0].type.dims[1];
    int64_t *y = r->out[0].data;
    for (int64_t i = 0; i < n; i++) {
        if (!is_set(x, i)) continue;
        if (found == hits) return GRADD_FAIL(INTERNAL, "NonZero: the data changed");
        int64_t rest = i;
        for (int a = x->type.rank - 1; a >= 0; a--) {
            y[a * hits + found] = rest % x->type.dims[a];
            rest /= x->type.dims[a];
        }
        found++;
    }
    return GRADD_OK;
}

/* Row i keeps columns [0, i + k] (lower) or [i + k, columns) (upper). */
static gradd_status_t compute_trilu(const gradd_launch_t *r) {
    const gradd_type_t *x = &r->in[0].type;
    int64_t rows = x->dims[x->rank - 2], columns = x->dims[x->rank - 1], k = 0;
    size_t bytes = gradd_dtype_bytes(x->dtype), row_bytes = (size_t)columns * bytes;
    bool upper = gradd_attr_int(r->attrs, "upper", 1);
    if (r->n_in > 1 && r->in[1].type.dtype != GRADD_DT_NONE) k = whole_at(&r->in[1], 0);
    if (gradd_type_count(x) == 0) return GRADD_OK;
    int64_t all = gradd_type_count(x) / columns;
#pragma omp parallel for schedule(static) if (all * columns >= GRADD_PARALLEL_MIN)
    for (int64_t j = 0; j < all; j++) {
        char *to = (char *)r->out[0].data + (size_t)j * row_bytes;
        const char *from = (const char *)r->in[0].data + (size_t)j * row_bytes;
        size_t at = (size_t)gradd_trilu_edge(j % rows, columns, k, upper) * bytes;
        if (to != from) memcpy(to, from, row_bytes);
        if (upper)
            memset(to, 0, at);
        else
            memset(to + at, 0, row_bytes - at);
    }
    return GRADD_OK;
}

/* ---- shape rules ----------------------------------------------------------------------------- */

static gradd_status_t infer_constant(gradd_infer_t *c) {
    if (c->attrs.n != 1) return GRADD_FAIL(GRAPH, "exactly one value attribute is needed");
    const gradd_attr_t *a = &c->attrs.v[0];
    bool vector = a->kind == GRADD_ATTR_INTS || a->kind == GRADD_ATTR_FLOATS;
    bool real = a->kind == GRADD_ATTR_FLOAT || a->kind == GRADD_ATTR_FLOATS;
    c->out[0] = (gradd_type_t){.dtype = real ? GRADD_DT_F32 : GRADD_DT_I64,
                               .rank = vector,
                               .dims = {vector ? (int64_t)a->n : 0}};
    if (a->kind == GRADD_ATTR_TENSOR) c->out[0] = a->tensor.type;
    return GRADD_OK;
}

static gradd_status_t infer_constant_of_shape(gradd_infer_t *c) {
    const gradd_attr_t *a = gradd_attr_find(c->attrs, "value");
    gradd_type_t out = {.dtype = a ? a->tensor.type.dtype : GRADD_DT_F32};
    if (a && gradd_type_count(&a->tensor.type) != 1)
        return GRADD_FAIL(GRAPH, "value must have one element");
    GRADD_TRY(gradd_known_i64s(c, 0, out.dims, GRADD_MAX_RANK, &out.rank));
    c->out[0] = out;
    return GRADD_OK;
}

static gradd_status_t infer_shape(gradd_infer_t *c) {
    int start, end;
    gradd_shape_range(c->attrs, c->in[0].type.rank, &start, &end);
    c->out[0] = (gradd_type_t){.dtype = GRADD_DT_I64, .rank = 1, .dims = {end - start}};
    return GRADD_OK;
}

static gradd_status_t infer_size(gradd_infer_t *c) {
    c->out[0] = (gradd_type_t){.dtype = GRADD_DT_I64};
    return GRADD_OK;
}

/* ceil((limit - start) / delta), not below 0 */
static gradd_status_t range_length(const gradd_infer_t *c, int64_t *out_n) {
    double n = 0;
    GRADD_SWITCH_NUM(c->in[0].type.dtype, T, {
        T start = *(const T *)c->in[0].data, limit = *(const T *)c->in[1].data;
        T delta = *(const T *)c->in[2].data;
        if (delta == 0) return GRADD_FAIL(GRAPH, "delta is 0");
        n = ceil(((double)limit - (double)start) / (double)delta);
    });
    if (!(n < 0x1p53)) return GRADD_FAIL(LIMIT, "the range has %g entries", n);
    *out_n = n > 0 ? (int64_t)n : 0;
    return GRADD_OK;
}

static gradd_status_t infer_range(gradd_infer_t *c) {
    gradd_dtype_t dtype = c->in[0].type.dtype;
    for (int i = 0; i < 3; i++) {
        if (!c->in[i].data)
            return GRADD_FAIL(UNSUPPORTED,
                              "input %d depends on data that is not known before "
                              "the run",
                              i);
        if (c->in[i].type.dtype != dtype || gradd_type_count(&c->in[i].type) != 1)
            return GRADD_FAIL(GRAPH, "start, limit and delta must be scalars of one type");
    }
    c->out[0] = (gradd_type_t){.dtype = dtype, .rank = 1};
    return range_length(c, &c->out[0].dims[0]);
}

static gradd_status_t infer_eye_like(gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[0].type;
    if (x->rank != 2) return GRADD_FAIL(GRAPH, "the input has rank %d, not 2", x->rank);
    c->out[0] = *x;
    return gradd_dtype_check(gradd_attr_int(c->attrs, "dtype", x->dtype), &c->out[0].dtype);
}

static gradd_status_t infer_one_hot(gradd_infer_t *c) {
    const gradd_type_t *index = &c->in[0].type, *values = &c->in[2].type;
    int axis;
    if (!c->in[1].data)
        return GRADD_FAIL(UNSUPPORTED, "depth depends on data that is not known before the run");
    if (index->rank == GRADD_MAX_RANK) return GRADD_FAIL(LIMIT, "the result's rank is too high");
    if (values->rank != 1 || values->dims[0] != 2 || gradd_type_count(&c->in[1].type) != 1)
        return GRADD_FAIL(GRAPH, "depth must be one number and values two");
    int64_t depth = whole_at(&c->in[1], 0);
    if (depth < 0) return GRADD_FAIL(GRAPH, "depth is %lld", (long long)depth);
    gradd_type_t out = {.dtype = values->dtype, .rank = index->rank + 1};
    GRADD_TRY(gradd_axis(gradd_attr_int(c->attrs, "axis", -1), out.rank, false, &axis));
    for (int i = 0; i < out.rank; i++)
        out.dims[i] = i < axis ? index->dims[i] : i == axis ? depth : index->dims[i - 1];
    c->out[0] = out;
    return GRADD_OK;
}

static gradd_status_t infer_non_zero(gradd_infer_t *c) {
    const gradd_view_t *x = &c->in[0];
    if (!x->data)
        return GRADD_FAIL(UNSUPPORTED, "the number of results depends on data that is not known "
                                       "before the run");
    int64_t n = gradd_type_count(&x->type), found = 0;
    for (int64_t i = 0; i < n; i++)
        found += is_set(x, i);
    c->out[0] = (gradd_type_t){
        .dtype = GRADD_DT_I64, .rank = 2, .dims = {x->type.rank, found}
    };
    return GRADD_OK;
}

static gradd_status_t infer_trilu(gradd_infer_t *c) {
    if (c->in[0].type.rank < 2)
        return GRADD_FAIL(GRAPH, "the input has rank %d, at least 2 is needed", c->in[0].type.rank);
    if (c->n_in > 1 && c->in[1].type.dtype != GRADD_DT_NONE &&
        gradd_type_count(&c->in[1].type) != 1)
        return GRADD_FAIL(GRAPH, "k must be one number");
    return gradd_infer_same(c);
}

/* ---- gradient rules -------------------------------------------------------------------------- */

static gradd_status_t grad_trilu(gradd_grad_t *g) {
    gradd_attr_t attr = gradd_make_int("upper", gradd_attr_int(g->attrs, "upper", 1));
    gradd_val_t in[2] = {g->dout[0], g->n_in > 1 ? g->in[1] : GRADD_NONE};
    if (g->need[0]) g->din[0] = gradd_emit_attrs(g->b, "Trilu", in, g->n_in, &attr, 1);
    return g->b->status;
}

static gradd_val_t total(gradd_builder_t *b, gradd_val_t x) {
    gradd_attr_t keep = gradd_make_int("keepdims", 0);
    return gradd_emit_attrs(b, "ReduceSum", &x, 1, &keep, 1);
}

/* d off = sum over cold places of dy, d on = sum over hot places. */
static gradd_status_t grad_one_hot(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    static const int64_t one = 1;
    if (!g->need[2]) return GRADD_OK;
    gradd_type_t values = *gradd_val_type(b, g->in[2]);
    gradd_val_t flat = gradd_const_i64s(b, &one, 1), ends[2];
    gradd_val_t zero = gradd_const_scalar(b, values.dtype, 0);
    gradd_val_t unit = gradd_const_scalar(b, values.dtype, 1);
    gradd_attr_t axis = gradd_make_int("axis", gradd_attr_int(g->attrs, "axis", -1));
    gradd_attr_t join = gradd_make_int("axis", 0);
    gradd_val_t pair[2] = {GRADD_EMIT(b, "Reshape", zero, flat),
                           GRADD_EMIT(b, "Reshape", unit, flat)};
    gradd_val_t in[3] = {g->in[0], g->in[1], gradd_emit_attrs(b, "Concat", pair, 2, &join, 1)};
    gradd_val_t hot = gradd_emit_attrs(b, "OneHot", in, 3, &axis, 1);
    gradd_val_t on = total(b, GRADD_EMIT(b, "Mul", hot, g->dout[0]));
    gradd_val_t off = GRADD_EMIT(b, "Sub", total(b, g->dout[0]), on);
    ends[0] = GRADD_EMIT(b, "Reshape", off, flat);
    ends[1] = GRADD_EMIT(b, "Reshape", on, flat);
    g->din[2] = gradd_emit_attrs(b, "Concat", ends, 2, &join, 1);
    return b->status;
}

/* ---- rows ------------------------------------------------------------------------------------ */

GRADD_OPS(
    constant,
    GRADD_OP("Constant", "", 1, (0, 0), (1, 1), .flags = GRADD_OP_SHAPE_ONLY | GRADD_OP_NO_GRAD,
             .attrs = GRADD_ATTR_LIST({"value", GRADD_ATTR_TENSOR, false},
                                      {"value_int", GRADD_ATTR_INT, false},
                                      {"value_ints", GRADD_ATTR_INTS, false},
                                      {"value_float", GRADD_ATTR_FLOAT, false},
                                      {"value_floats", GRADD_ATTR_FLOATS, false}),
             .infer = infer_constant, .ref = GRADD_REF(compute_constant),
             .cases = GRADD_CASES({.text = "| value_int=-7"}, {.text = "| value_ints=[1,2,3]"},
                                  {.text = "| value_float=0.5"},
                                  {.text = "| value_floats=[0.5,-1.0]"})),
    GRADD_OP("ConstantOfShape", "", 9, (1, 1), (1, 1), .flags = GRADD_OP_NO_GRAD,
             .types = {GRADD_DTB(I64)},
             .attrs = GRADD_ATTR_LIST({"value", GRADD_ATTR_TENSOR, false}),
             .infer = infer_constant_of_shape, .ref = GRADD_REF(compute_constant_of_shape),
             .cases = GRADD_CASES({.text = "i64[2]={2,3}"}, {.text = "i64[0]={}"},
                                  {.text = "i64[1]={0}"}, {.text = "i64[2]={70,601}"})),
    GRADD_OP("Shape", "", 1, (1, 1), (1, 1), .flags = GRADD_OP_SHAPE_ONLY | GRADD_OP_NO_GRAD,
             .attrs = GRADD_ATTR_LIST({"start", GRADD_ATTR_INT, false},
                                      {"end", GRADD_ATTR_INT, false}),
             .infer = infer_shape, .ref = GRADD_REF(compute_shape),
             .cases = GRADD_CASES({.text = "f32[2,0,4]"}, {.text = "f32[]"},
                                  {.text = "f32[2,3,4] | start=1"},
                                  {.text = "bool[2,3,4] | start=-2 end=-1"},
                                  {.text = "f32[2,3] | start=2 end=1"})),
    GRADD_OP("Size", "", 1, (1, 1), (1, 1), .flags = GRADD_OP_SHAPE_ONLY | GRADD_OP_NO_GRAD,
             .infer = infer_size, .ref = GRADD_REF(compute_size),
             .cases = GRADD_CASES({.text = "f32[2,3,4]"}, {.text = "i64[]"}, {.text = "f32[2,0]"})),
    GRADD_OP(
        "Range", "", 11, (3, 3), (1, 1), .flags = GRADD_OP_NO_GRAD, .types = {GRADD_T_NUM},
        .infer = infer_range, .ref = GRADD_REF(compute_range),
        .cases = GRADD_CASES({.text = "i64[]={0} i64[]={5} i64[]={1}"},
                             {.text = "i64[]={7} i64[]={0} i64[]={-3}"},
                             {.text = "i64[]={-9000000000000000000} i64[]={9000000000000000000} "
                                      "i64[]={4611686018427387904}"},
                             {.text = "f32[]={0} f32[]={1} f32[]={0.25}"},
                             {.text = "i32[]={3} i32[]={3} i32[]={1}"},
                             {.text = "i64[]={0} i64[]={9000} i64[]={1}"},
                             {.text = "f32[]={-3} f32[]={40} f32[]={0.1}"})),
    GRADD_OP(
        "EyeLike", "", 9, (1, 1), (1, 1), .flags = GRADD_OP_SHAPE_ONLY | GRADD_OP_NO_GRAD,
        .attrs = GRADD_ATTR_LIST({"dtype", GRADD_ATTR_INT, false}, {"k", GRADD_ATTR_INT, false}),
        .infer = infer_eye_like, .ref = GRADD_REF(compute_eye_like),
        .cases = GRADD_CASES({.text = "f32[3,4]"}, {.text = "f32[4,3] | k=-2"},
                             {.text = "i64[3,4] | k=2 dtype=1"}, {.text = "f32[3,4] | dtype=16"},
                             {.text = "f32[2,2] | k=7"}, {.text = "f32[0,2]"},
                             {.text = "i64[130,90] | k=-3"}, {.text = "bool[3,5] | k=1"})),
    GRADD_OP("OneHot", "", 9, (3, 3), (1, 1), .no_diff = 3,
             .types = {GRADD_T_NUM, GRADD_T_NUM, 0xffffffffu},
             .attrs = GRADD_ATTR_LIST({"axis", GRADD_ATTR_INT, false}), .infer = infer_one_hot,
             .grad = grad_one_hot, .ref = GRADD_REF(compute_one_hot),
             .cases = GRADD_CASES(
                 {.text = "i64[2,3] i64[]={5} f32[2]"},
                 {.text = "i64[2,3]:(-6,6) i64[1]={5} f32[2] | axis=1"},
                 {.text = "i32[4] i32[]={3} i64[2]={0,1} | axis=0"},
                 {.text = "i64[]={2} i64[]={3} f32[2]"}, {.text = "i64[2,3] f32[]={5} f32[2]"},
                 {.text = "f32[2,4]={0,3,-1,4,-5,nan,inf,-inf} i64[]={4} i64[2]={3,9} | axis=1"},
                 {.text = "i64[90,40]:(0,9) i64[]={7} bool[2]={0,1} | axis=1"},
                 {.text = "f64[3]={0,1,2} i64[]={3} bf16[2]"},
                 {.text = "i64[3]={0,1,2} i64[]={0} f32[2]", .grad_tol = -1})),
    GRADD_OP("NonZero", "", 9, (1, 1), (1, 1), .flags = GRADD_OP_NO_GRAD, .infer = infer_non_zero,
             .ref = GRADD_REF(compute_non_zero),
             .cases = GRADD_CASES({.text = "i64[2,3]={0,1,0,2,0,3}"}, {.text = "bool[3]={0,0,0}"},
                                  {.text = "f32[2,2]={0,0.5,-1,0}"}, {.text = "bf16[3]={0,-0.0,2}"},
                                  {.text = "i64[2,3,500]={1}"}, {.text = "f32[]={2}"},
                                  {.text = "f32[0,2]={}"})),
    GRADD_OP("Trilu", "", 14, (1, 2), (1, 1), .types = {0xffffffffu, GRADD_T_INDEX},
             .attrs = GRADD_ATTR_LIST({"upper", GRADD_ATTR_INT, false}), .infer = infer_trilu,
             .grad = grad_trilu, .ref = GRADD_REF(compute_trilu),
             .cases = GRADD_CASES(
                 {.text = "f32[3,4]"}, {.text = "f32[2,4,3] | upper=0"},
                 {.text = "f32[4,4] i64[]={1}"}, {.text = "f32[4,3] i64[1]={-2} | upper=0"},
                 {.text = "bool[3,3] i64[]={9} | upper=0"}, {.text = "f32[3,3] i64[]={9}"},
                 {.text = "f32[2,150,140] i64[]={-3} | upper=0"}, {.text = "f32[2,0,3]"},
                 {.text = "f32[3,5,16] i32[]={-1}", .grad_tol = -1},
                 {.text = "i64[3,70,80] i64[]={5} | upper=0"},
                 {.text = "bool[33,64] i64[]={-9223372036854775807}"},
                 {.text = "bool[33,64] i64[]={9223372036854775807} | upper=0"},
                 {.text = "i32[6,8] i64[]={-9223372036854775807} | upper=0"})));

GRADD_KERNELS(cpu, constant, GRADD_KERNEL("Constant", "loop", .compute = compute_constant),
              GRADD_KERNEL("ConstantOfShape", "loop", .compute = compute_constant_of_shape,
                           .cost = gradd_cost_move),
              GRADD_KERNEL("Shape", "loop", .compute = compute_shape, .cost = gradd_cost_move),
              GRADD_KERNEL("Size", "loop", .compute = compute_size, .cost = gradd_cost_move),
              GRADD_KERNEL("Range", "loop", .types = {GRADD_T_F32_F64 | GRADD_T_INT},
                           .compute = compute_range, .cost = gradd_cost_move),
              GRADD_KERNEL("EyeLike", "loop", .compute = compute_eye_like, .cost = gradd_cost_move),
              GRADD_KERNEL("OneHot", "loop",
                           .types = {GRADD_T_F32_F64 | GRADD_T_INT, GRADD_T_F32_F64 | GRADD_T_INT,
                                     0xffffffffu},
                           .compute = compute_one_hot, .cost = gradd_cost_move),
              GRADD_KERNEL("NonZero", "loop", .compute = compute_non_zero),
              GRADD_KERNEL("Trilu", "loop", .inplace = 1, .compute = compute_trilu,
                           .cost = gradd_cost_move));
