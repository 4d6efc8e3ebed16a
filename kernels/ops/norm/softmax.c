/* Softmax and LogSoftmax along one axis (opset 13 and later), and their gradients.
 *
 * Math: y = exp(x - max) / sum, and its logarithm. Shapes: [outer, n, inner] with the axis in the
 * middle; inner is 1 for the last axis, the fast case. Saved for backward: the result.
 * dx = y (dy - sum(dy y)), for the logarithm dx = dy - exp(y) sum(dy). */
#include "kernels/contract/kernel.h"
#include "kernels/cpu/half.h"
#include "kernels/cpu/map.h"
#include "kernels/cpu/row_lanes.h"
#include "kernels/cpu/softmax_rows.h"
#include "kernels/describe/lanes.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rowwise.h"
#include "kernels/rules/rules.h"

/* ---- kernels -------------------------------------------------------------------------------- */

/* Contiguous rows. With `back`, the gradient: x is dy there, and y the result of the forward. */
#define ROWS(T, S)                                                                                 \
    GRADD_MULTIARCH static void scale_##S(T *z, int64_t n, T factor) {                             \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) z[i] *= factor;                        \
    }                                                                                              \
    GRADD_MULTIARCH static void shift_##S(const T *x, T *z, int64_t n, T max, T log_sum) {         \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) z[i] = (x[i] - max) - log_sum;         \
    }                                                                                              \
    static void row_softmax_##S(const T *x, T *z, int64_t n) {                                     \
        const double sum = gradd_row_exp(x, n, gradd_row_max(x, n), z);                            \
        scale_##S(z, n, (T)(1 / sum));                                                             \
    }                                                                                              \
    static void row_log_##S(const T *x, T *z, int64_t n) {                                         \
        const T max = gradd_row_max(x, n);                                                         \
        shift_##S(x, z, n, max, (T)log(gradd_row_exp(x, n, max, NULL)));                           \
    }                                                                                              \
    GRADD_MULTIARCH static double dot_##S(const T *x, const T *y, int64_t n) {                     \
        double total = 0;                                                                          \
        for (int64_t from = 0; from < n; from += 512) {                                            \
            const int64_t m = n - from < 512 ? n - from : 512;                                     \
            total += (double)(y ? gradd_row_dot_##S(x + from, y + from, 0, m)                      \
                                : gradd_row_sum_##S(x + from, m));                                 \
        }                                                                                          \
        return total;                                                                              \
    }                                                                                              \
    GRADD_MULTIARCH static void back_##S(const T *d, const T *y, T *z, int64_t n, T dot) {         \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) z[i] = y[i] * (d[i] - dot);            \
    }                                                                                              \
    GRADD_MULTIARCH static void back_log_##S(const T *d, const T *y, T *z, int64_t n, T sum) {     \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) z[i] = d[i] - vexp(y[i]) * sum;        \
    }                                                                                              \
    static void row_##S(const T *x, const T *y, T *z, int64_t n, bool log_, bool back) {           \
        if (!back && log_)                                                                         \
            row_log_##S(x, z, n);                                                                  \
        else if (!back)                                                                            \
            row_softmax_##S(x, z, n);                                                              \
        else if (log_)                                                                             \
            back_log_##S(x, y, z, n, (T)dot_##S(x, NULL, n));                                      \
        else                                                                                       \
            back_##S(x, y, z, n, (T)dot_##S(x, y, n));                                             \
    }
ROWS(float, f32)
ROWS(double, f64)

/* A bf16 or f16 row in pieces, through the functions for f32. The terms are computed twice rather
 * than rounded in between. */
#define HALF_ROW(T, S)                                                                             \
    static void row_##S(const T *x, const T *y, T *z, int64_t n, bool log_, bool back) {           \
        enum { PIECE = 512 };                                                                      \
        float a[PIECE], b[PIECE], max = -INFINITY;                                                 \
        double sum = 0;                                                                            \
        for (int pass = back ? 1 : 0; pass < 3; pass++)                                            \
            for (int64_t at = 0; at < n; at += PIECE) {                                            \
                const int64_t m = n - at < PIECE ? n - at : PIECE;                                 \
                gradd_##S##_widen(a, x + at, m);                                                   \
                if (back) gradd_##S##_widen(b, y + at, m);                                         \
                const float best = pass ? max : gradd_row_max_f32(a, m);                           \
                if (pass == 0)                                                                     \
                    max = best > max || best != best ? best : max;                                 \
                else if (pass == 1)                                                                \
                    sum += back ? dot_f32(a, log_ ? NULL : b, m)                                   \
                                : gradd_row_exp_f32(a, m, max, NULL);                              \
                else if (back)                                                                     \
                    (log_ ? back_log_f32 : back_f32)(a, b, a, m, (float)sum);                      \
                else if (log_)                                                                     \
                    shift_f32(a, a, m, max, (float)log(sum));                                      \
                else                                                                               \
                    gradd_row_exp_f32(a, m, max, a), scale_f32(a, m, (float)(1 / sum));            \
                if (pass == 2) gradd_##S##_narrow(z + at, a, m);                                   \
            }                                                                                      \
    }
HALF_ROW(gradd_bf16_t, bf16)
HALF_ROW(gradd_f16_t, f16)

/* The definition of one row, and what runs for axes but the last. */
#define PLAIN(C, S, WIDE, NARROW)                                                                  \
    static void plain_##S(const C *x, const C *y, C *z, int64_t n, int64_t step, bool log_,        \
                          bool back) {                                                             \
        double max = -INFINITY, sum = 0;                                                           \
        for (int64_t i = 0; i < n * step; i += step) {                                             \
            const double a = (double)WIDE(x[i]);                                                   \
            if (back)                                                                              \
                sum += log_ ? a : a * (double)WIDE(y[i]);                                          \
            else                                                                                   \
                max = a > max || a != a ? a : max;                                                 \
        }                                                                                          \
        for (int64_t i = 0; !back && i < n * step; i += step)                                      \
            sum += exp((double)WIDE(x[i]) - max);                                                  \
        for (int64_t i = 0; i < n * step; i += step) {                                             \
            const double a = (double)WIDE(x[i]), b = y ? (double)WIDE(y[i]) : 0;                   \
            if (back)                                                                              \
                z[i] = NARROW(log_ ? a - exp(b) * sum : b * (a - sum));                            \
            else                                                                                   \
                z[i] = NARROW(log_ ? a - max - log(sum) : exp(a - max) / sum);                     \
        }                                                                                          \
    }
#define TO_BF16(x) gradd_f32_bf16((float)(x))
#define TO_F16(x)  gradd_f32_f16((float)(x))
PLAIN(float, f32, , (float))
PLAIN(double, f64, , )
PLAIN(gradd_bf16_t, bf16, gradd_bf16_f32, TO_BF16)
PLAIN(gradd_f16_t, f16, gradd_f16_f32, TO_F16)

#define WHOLE(T, S)                                                                                \
    static void whole_##S(const gradd_lanes_t *s, const T *x, const T *y, T *z, bool log_,         \
                          bool back, bool ref) {                                                   \
        const int64_t rows = s->outer * s->inner, n = s->n, step = s->inner;                       \
        const bool fast = step == 1 && !ref;                                                       \
        _Pragma("omp parallel for schedule(static) if (rows * n >= GRADD_PARALLEL_MIN)") for (     \
            int64_t i = 0; i < rows; i++) {                                                        \
            const int64_t at = i / step * n * step + i % step;                                     \
            if (fast)                                                                              \
                row_##S(x + at, y ? y + at : NULL, z + at, n, log_, back);                         \
            else                                                                                   \
                plain_##S(x + at, y ? y + at : NULL, z + at, n, step, log_, back);                 \
        }                                                                                          \
    }
WHOLE(float, f32)
WHOLE(double, f64)
WHOLE(gradd_bf16_t, bf16)
WHOLE(gradd_f16_t, f16)

static gradd_status_t softmax(const gradd_launch_t *r, bool log_, bool back, bool ref) {
    gradd_lanes_t s;
    const void *x = r->in[0].data, *y = back ? r->in[1].data : NULL;
    GRADD_TRY(gradd_lanes_of_axis(&r->in[0].type, r->attrs, -1, &s));
    if (!gradd_type_count(&r->in[0].type)) return GRADD_OK;
    if (r->in[0].type.dtype == GRADD_DT_F32)
        whole_f32(&s, x, y, r->out[0].data, log_, back, ref);
    else if (r->in[0].type.dtype == GRADD_DT_BF16)
        whole_bf16(&s, x, y, r->out[0].data, log_, back, ref);
    else if (r->in[0].type.dtype == GRADD_DT_F16)
        whole_f16(&s, x, y, r->out[0].data, log_, back, ref);
    else
        whole_f64(&s, x, y, r->out[0].data, log_, back, ref);
    return GRADD_OK;
}

#define SOFTMAX_RUN(name, log_, back)                                                              \
    static gradd_status_t compute_##name(const gradd_launch_t *r) {                                \
        return softmax(r, log_, back, false);                                                      \
    }                                                                                              \
    static gradd_status_t ref_##name(const gradd_launch_t *r) {                                    \
        return softmax(r, log_, back, true);                                                       \
    }
SOFTMAX_RUN(softmax, false, false)
SOFTMAX_RUN(softmax_grad, false, true)
SOFTMAX_RUN(log_softmax, true, false)
SOFTMAX_RUN(log_softmax_grad, true, true)

/* ---- shape rules ---------------------------------------------------------------------------- */

static gradd_status_t infer_softmax(gradd_infer_t *c) {
    int axis;
    GRADD_TRY(gradd_axis(gradd_attr_int(c->attrs, "axis", -1), c->in[0].type.rank, false, &axis));
    if (c->n_in > 1 && !gradd_type_equal(&c->in[0].type, &c->in[1].type))
        return GRADD_FAIL(GRAPH, "gradient and result differ in type");
    return gradd_infer_same(c);
}

/* ---- gradient rules ------------------------------------------------------------------------- */

static gradd_status_t grad_by(gradd_grad_t *g, const char *op) {
    gradd_attr_t axis = gradd_make_int("axis", gradd_attr_int(g->attrs, "axis", -1));
    gradd_val_t in[2] = {g->dout[0], g->output(g, 0)};
    g->din[0] = gradd_emit_attrs(g->b, op, in, 2, &axis, 1);
    return g->b->status;
}
static gradd_status_t grad_softmax(gradd_grad_t *g) {
    return grad_by(g, "SoftmaxGrad");
}
static gradd_status_t grad_log_softmax(gradd_grad_t *g) {
    return grad_by(g, "LogSoftmaxGrad");
}

/* ---- expansions ----------------------------------------------------------------------------- */

static gradd_val_t sum_along(gradd_builder_t *b, gradd_val_t v, int64_t axis) {
    const gradd_attr_t keep = gradd_make_int("keepdims", 1);
    gradd_val_t in[2] = {v, gradd_const_i64s(b, &axis, 1)};
    return gradd_emit_attrs(b, "ReduceSum", in, 2, &keep, 1);
}

static gradd_status_t expand_softmax_grad(gradd_expand_t *e) {
    gradd_builder_t *b = e->b;
    const int64_t axis = gradd_attr_int(e->attrs, "axis", -1);
    const gradd_dtype_t dtype = gradd_val_type(b, e->in[0])->dtype;
    gradd_val_t dy = gradd_wide(b, e->in[0]), y = gradd_wide(b, e->in[1]);
    gradd_val_t dot = sum_along(b, GRADD_EMIT(b, "Mul", dy, y), axis);
    e->out[0] = gradd_cast(b, GRADD_EMIT(b, "Mul", y, GRADD_EMIT(b, "Sub", dy, dot)), dtype);
    return b->status;
}

static gradd_status_t expand_log_softmax_grad(gradd_expand_t *e) {
    gradd_builder_t *b = e->b;
    const int64_t axis = gradd_attr_int(e->attrs, "axis", -1);
    const gradd_dtype_t dtype = gradd_val_type(b, e->in[0])->dtype;
    gradd_val_t dy = gradd_wide(b, e->in[0]), y = GRADD_EMIT(b, "Exp", gradd_wide(b, e->in[1]));
    gradd_val_t part = GRADD_EMIT(b, "Mul", y, sum_along(b, dy, axis));
    e->out[0] = gradd_cast(b, GRADD_EMIT(b, "Sub", dy, part), dtype);
    return b->status;
}

/* ---- cases and rows ------------------------------------------------------------------------- */

#define CASES                                                                                      \
    GRADD_CASES(                                                                                   \
        {.text = "f32[3,5]"}, {.text = "f32[2,3,4] | axis=1"}, {.text = "f32[2,3,4] | axis=-3"},   \
        {.text = "f32[7] | axis=0"}, {.text = "f32[2,1]"}, {.text = "f32[0,4]"},                   \
        {.text = "f32[2,2,3,37]"}, {.text = "f32[4]={-inf,1,2,-inf}", .grad_tol = -1},             \
        {.text = "f32[3]={-inf,-inf,-inf}", .grad_tol = -1},                                       \
        {.text = "f32[2]={90,1000}", .grad_tol = -1}, {.text = "f32[67,1031]:(-9,9)"},             \
        {.text = "f32[3,64]={nan}", .grad_tol = -1}, {.text = "f32[2,64]={inf}", .grad_tol = -1},  \
        {.text = "f32[2,40,48]:(-9,9) | axis=1", .grad_tol = -1},                                  \
        {.text = "f32[3,4,2]={-inf,1,2,-inf,-inf,3,-inf,-inf,-inf,1,-inf,-inf,nan,3,1,1,"          \
                 "inf,1,0,0,0,0,0,0} | axis=1",                                                    \
         .grad_tol = -1},                                                                          \
        {.text = "f32[5,1024]:(-9,9)", .grad_tol = -1},                                            \
        {.text = "f32[3,4096]:(-9,9)", .grad_tol = -1},                                            \
        {.text = "f32[2,20000]:(-9,9)", .grad_tol = -1},                                           \
        {.text = "f32[2,9001]:(-9,9)", .grad_tol = -1})
#define CASES_BACK                                                                                 \
    GRADD_CASES({.text = "f32[3,5] f32[3,5]:(0,1)"},                                               \
                {.text = "f32[2,3,4] f32[2,3,4]:(-3,0) | axis=1"},                                 \
                {.text = "f32[67,1031] f32[67,1031]:(0,0.002)", .tol = 5e-5},                      \
                {.text = "f32[2,40,48] f32[2,40,48]:(0,0.05) | axis=1"},                           \
                {.text = "f32[5,512] f32[5,512]:(0,0.004)", .tol = 5e-5},                          \
                {.text = "f32[3,4096] f32[3,4096]:(0,0.001)", .tol = 5e-5},                        \
                {.text = "f32[2,9000] f32[2,9000]:(0,0.001)", .tol = 5e-5})
#define INTERNAL (GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD)

GRADD_OPS(softmax,
          GRADD_OP("Softmax", "", 13, (1, 1), (1, 1), .types = {GRADD_T_FLOAT},
                   .attrs = GRADD_ATTR_LIST({"axis", GRADD_ATTR_INT, false}),
                   .infer = infer_softmax, .rowwise = gradd_rowwise_axis, .grad = grad_softmax,
                   .ref = GRADD_REF(ref_softmax), .cases = CASES),
          GRADD_OP("LogSoftmax", "", 13, (1, 1), (1, 1), .types = {GRADD_T_FLOAT},
                   .attrs = GRADD_ATTR_LIST({"axis", GRADD_ATTR_INT, false}),
                   .infer = infer_softmax, .rowwise = gradd_rowwise_axis, .grad = grad_log_softmax,
                   .ref = GRADD_REF(ref_log_softmax), .cases = CASES),
          GRADD_OP("SoftmaxGrad", "com.gradd", 1, (2, 2), (1, 1), .flags = INTERNAL,
                   .types = {GRADD_T_FLOAT},
                   .attrs = GRADD_ATTR_LIST({"axis", GRADD_ATTR_INT, false}),
                   .infer = infer_softmax, .expand = GRADD_EXPANSION(expand_softmax_grad),
                   .ref = GRADD_REF(ref_softmax_grad), .cases = CASES_BACK),
          GRADD_OP("LogSoftmaxGrad", "com.gradd", 1, (2, 2), (1, 1), .flags = INTERNAL,
                   .types = {GRADD_T_FLOAT},
                   .attrs = GRADD_ATTR_LIST({"axis", GRADD_ATTR_INT, false}),
                   .infer = infer_softmax, .expand = GRADD_EXPANSION(expand_log_softmax_grad),
                   .ref = GRADD_REF(ref_log_softmax_grad), .cases = CASES_BACK));

GRADD_KERNELS(cpu, softmax,
              GRADD_KERNEL("Softmax", "loop", .types = {GRADD_T_ANY}, .inplace = 1,
                           .compute = compute_softmax),
              GRADD_KERNEL("LogSoftmax", "loop", .types = {GRADD_T_ANY}, .inplace = 1,
                           .compute = compute_log_softmax),
              GRADD_KERNEL("SoftmaxGrad", "loop", .rowwise = gradd_rowwise_all,
                           .types = {GRADD_T_ANY}, .inplace = 3, .compute = compute_softmax_grad),
              GRADD_KERNEL("LogSoftmaxGrad", "loop", .rowwise = gradd_rowwise_all,
                           .types = {GRADD_T_ANY}, .inplace = 3,
                           .compute = compute_log_softmax_grad));
