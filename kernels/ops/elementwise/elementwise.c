/* Elementwise arithmetic with numpy broadcasting.
 *
 * Math: z = f(a), f(a, b), or a fold over any number of operands (Max, Min, Sum). Shapes: any,
 * which broadcast to one. Integers wrap around; integer division truncates and refuses a zero
 * divisor. Saved for backward: Exp, Sqrt, Reciprocal, Div, Pow, Max, Min their result, the others
 * inputs only. At edges the slope is that of torch: where operands tie, Max and Min share the
 * gradient evenly among them (two operands both get all of it where one is NaN); Clip passes it
 * inside the closed interval and not to NaN, and beyond it to the bound; Abs has 0 at 0 and NaN; a
 * power passes nothing to an exponent >= 0 of 0. Sign, Floor, Ceil and Round have gradient zero. */
#include "kernels/contract/fault.h"
#include "kernels/contract/kernel.h"
#include "kernels/cpu/half.h"
#include "kernels/cpu/map.h"
#include "kernels/cpu/sum.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rowwise.h"
#include "kernels/rules/rules.h"

#include <string.h>

/* ---- kernels -------------------------------------------------------------------------------- */

#define BINARY_NUM(name, E_FLOAT, E_INT)                                                           \
    GRADD_ROWS2_FLOAT(name, E_FLOAT) GRADD_ROWS2_INT(name, E_INT) GRADD_TABLE_NUM(name)
#define UNARY_FLOAT(name, E)                                                                       \
    GRADD_ROWS1_FLOAT(name, E) GRADD_TABLE_FLOAT(name) GRADD_MAP_COMPUTE(name)
#define UNARY_NUM(name, E_FLOAT, E_INT)                                                            \
    GRADD_ROWS1_FLOAT(name, E_FLOAT)                                                               \
    GRADD_ROWS1_INT(name, E_INT) GRADD_TABLE_NUM(name) GRADD_MAP_COMPUTE(name)

BINARY_NUM(add, E_ADD, E_ADD_I)
GRADD_MAP_COMPUTE(add)
BINARY_NUM(sub, E_SUB, E_SUB_I)
GRADD_MAP_COMPUTE(sub)
BINARY_NUM(mul, E_MUL, E_MUL_I)
GRADD_MAP_COMPUTE(mul)
BINARY_NUM(div, E_DIV, E_DIV_I)
BINARY_NUM(max, E_MAX, E_MAX)
BINARY_NUM(min, E_MIN, E_MIN)
BINARY_NUM(fmod, E_FMOD, E_FMOD_I)
GRADD_ROWS2_INT(mod, E_MOD_I)
static const gradd_row_functions_t mod_rows = {.i32 = row_mod_i32, .i64 = row_mod_i64};
static const gradd_row_functions_t mod_refs = {.i32 = ref_mod_i32, .i64 = ref_mod_i64};
UNARY_NUM(neg, E_NEG, E_NEG_I)
UNARY_NUM(abs, E_ABS, E_ABS_I)
UNARY_NUM(sign, E_SIGN, E_SIGN)
UNARY_FLOAT(sqrt, E_SQRT)
UNARY_FLOAT(reciprocal, E_RECIP)
UNARY_FLOAT(exp, E_EXP)
UNARY_FLOAT(log, E_LOG)
UNARY_FLOAT(erf, E_ERF)
UNARY_FLOAT(floor, E_FLOOR)
UNARY_FLOAT(ceil, E_CEIL)
UNARY_FLOAT(round, E_ROUND)

/* Sine and cosine: the vector form is exact up to GRADD_VEC_SINCOS_MAX, libm takes the rest. Which
 * of them takes an element depends on its neighbours, so launches are not cut. */
static bool beyond(const float *x, int64_t n) {
    int any = 0;
#pragma omp simd reduction(| : any)
    for (int64_t i = 0; i < n; i++)
        any |= !(fabsf(x[i]) <= GRADD_VEC_SINCOS_MAX);
    return any;
}
#define TRIGONOMETRIC(name, libm, E, E_FAST)                                                       \
    GRADD_ROW1(name, f64, double, double, double, E)                                               \
    GRADD_ROW1(name##_slow, f32, float, float, double, E)                                          \
    GRADD_ROW1(name##_fast, f32, float, float, double, E_FAST)                                     \
    static void row_##name##_f32(int64_t n, void *out, const void *const *in, const int64_t *step, \
                                 const double *p) {                                                \
        (beyond(in[0], n) ? row_##name##_slow_f32 : row_##name##_fast_f32)(n, out, in, step, p);   \
    }                                                                                              \
    static const gradd_row_functions_t name##_rows = {.f32 = row_##name##_f32,                     \
                                                      .f64 = row_##name##_f64};                    \
    static const gradd_row_functions_t name##_refs = {.f32 = ref_##name##_slow_f32,                \
                                                      .f64 = ref_##name##_f64};                    \
    GRADD_MAP_COMPUTE(name)                                                                        \
    __attribute__((unused)) static const gradd_row_fn name##_unused = ref_##name##_fast_f32;
TRIGONOMETRIC(sin, sinf, E_SIN, E_VSIN)
TRIGONOMETRIC(cos, cosf, E_COS, E_VCOS)

/* A zero divisor would stop the process: refuse it instead. */
static gradd_status_t check_divisor(const gradd_view_t *b) {
    if (gradd_dtype_is_float(b->type.dtype)) return GRADD_OK;
    GRADD_SWITCH_INT(b->type.dtype, T, {
        const T *x = b->data;
        for (int64_t i = 0, n = gradd_type_count(&b->type); i < n; i++)
            if (!x[i])
                return gradd_fault_fail(
                    &(gradd_fault_t){.kind = GRADD_FAULT_ZERO_DIVISOR, .position = i});
    });
    return GRADD_OK;
}

static gradd_status_t compute_div(const gradd_launch_t *r) {
    GRADD_TRY(check_divisor(&r->in[1]));
    return gradd_map_rows(&div_rows, r->out, r->in, 2, NULL, false);
}

static gradd_status_t compute_div_ref(const gradd_launch_t *r) {
    GRADD_TRY(check_divisor(&r->in[1]));
    return gradd_map_rows(&div_refs, r->out, r->in, 2, NULL, true);
}

static gradd_status_t mod_by(const gradd_launch_t *r, bool ref) {
    GRADD_TRY(check_divisor(&r->in[1]));
    bool c_style = gradd_attr_int(r->attrs, "fmod", 0);
    const gradd_row_functions_t *rows = c_style ? &fmod_rows : &mod_rows;
    if (ref) rows = c_style ? &fmod_refs : &mod_refs;
    return gradd_map_rows(rows, r->out, r->in, 2, NULL, ref);
}
static gradd_status_t compute_mod(const gradd_launch_t *r) {
    return mod_by(r, false);
}
static gradd_status_t compute_mod_ref(const gradd_launch_t *r) {
    return mod_by(r, true);
}

/* Folds any number of operands into out, from the left. */
static gradd_status_t fold(const gradd_launch_t *r, const gradd_row_functions_t *rows, bool ref) {
    if (r->n_in == 1) return gradd_compute_copy(r);
    for (int i = 1; i < r->n_in; i++) {
        gradd_view_t pair[2] = {i == 1 ? r->in[0] : r->out[0], r->in[i]};
        GRADD_TRY(gradd_map_rows(rows, r->out, pair, 2, NULL, ref));
    }
    return GRADD_OK;
}
#define FOLD(name, rows)                                                                           \
    static gradd_status_t compute_##name(const gradd_launch_t *r) {                                \
        return fold(r, &rows##_rows, false);                                                       \
    }                                                                                              \
    static gradd_status_t compute_##name##_ref(const gradd_launch_t *r) {                          \
        return fold(r, &rows##_refs, true);                                                        \
    }
FOLD(max, max)
FOLD(min, min)

/* Sums of bf16 and f16 stay f32 until the end: in the scratch memory where shapes differ. */
static size_t workspace_sum(const gradd_infer_t *c) {
    if (c->n_in < 3 || !gradd_dtype_is_half(c->out[0].dtype)) return 0;
    return (size_t)gradd_type_count(&c->out[0]) * sizeof(float);
}

static gradd_status_t compute_sum(const gradd_launch_t *r) {
    gradd_view_t so_far = r->out[0];
    if (r->n_in > 1 && gradd_sum_fits(r->out, r->in, r->n_in))
        return gradd_sum(r->out, r->in, r->n_in);
    if (!r->workspace) return fold(r, &add_rows, false);
    so_far.type.dtype = GRADD_DT_F32;
    so_far.data = r->workspace;
    for (int i = 1; i < r->n_in; i++) {
        gradd_view_t pair[2] = {i == 1 ? r->in[0] : so_far, r->in[i]};
        const gradd_view_t *out = i + 1 == r->n_in ? r->out : &so_far;
        GRADD_TRY(gradd_map_rows(&add_rows, out, pair, 2, NULL, false));
    }
    return GRADD_OK;
}

static gradd_status_t compute_sum_ref(const gradd_launch_t *r) {
    return fold(r, &add_refs, true);
}

/* x^y, where y may have another type. The exponents that models use have loops of their own.
 * bf16 and f16 are known before the run; in a row function they are f32 already. */
#define POWER_ROWS(S, T)                                                                           \
    GRADD_ROW1(square, S, T, T, double, E_SQUARE)                                                  \
    GRADD_ROW1(cube, S, T, T, double, E_CUBE)                                                      \
    GRADD_ROW1(rsqrt, S, T, T, double, E_RSQRT)                                                    \
    static void ref_pow_##S(int64_t n, void *out, const void *const *in, const int64_t *step,      \
                            const double *p) {                                                     \
        T *z = out;                                                                                \
        const T *x = in[0];                                                                        \
        for (int64_t i = 0; i < n; i++)                                                            \
            z[i] = (T)pow((double)x[i * step[0]], gradd_real_at(in[1], i * step[1], (int)p[0]));   \
    }                                                                                              \
    static void row_pow_##S(int64_t n, void *out, const void *const *in, const int64_t *step,      \
                            const double *p) {                                                     \
        double y = gradd_real_at(in[1], 0, (int)p[0]);                                             \
        bool one = step[0] && !step[1];                                                            \
        if (one && y == 2)                                                                         \
            row_square_##S(n, out, in, step, p);                                                   \
        else if (one && y == 3)                                                                    \
            row_cube_##S(n, out, in, step, p);                                                     \
        else if (one && y == -0.5)                                                                 \
            row_rsqrt_##S(n, out, in, step, p);                                                    \
        else if (one && y == 0.5)                                                                  \
            row_sqrt_##S(n, out, in, step, p);                                                     \
        else                                                                                       \
            ref_pow_##S(n, out, in, step, p);                                                      \
    }                                                                                              \
    __attribute__((unused)) static const gradd_row_fn pow_unused_##S[] = {                         \
        ref_square_##S, ref_cube_##S, ref_rsqrt_##S};
POWER_ROWS(f32, float)
POWER_ROWS(f64, double)

#define POWER_INT(S, T)                                                                            \
    static void row_pow_##S(int64_t n, void *out, const void *const *in, const int64_t *step,      \
                            const double *p) {                                                     \
        for (int64_t i = 0; i < n; i++)                                                            \
            ((T *)out)[i] = (T)gradd_power_i64(((const T *)in[0])[i * step[0]],                    \
                                               gradd_real_at(in[1], i * step[1], (int)p[0]));      \
    }
POWER_INT(i32, int32_t)
POWER_INT(i64, int64_t)
static const gradd_row_functions_t pow_rows = {
    .f32 = row_pow_f32, .f64 = row_pow_f64, .i32 = row_pow_i32, .i64 = row_pow_i64};
static const gradd_row_functions_t pow_refs = {
    .f32 = ref_pow_f32, .f64 = ref_pow_f64, .i32 = row_pow_i32, .i64 = row_pow_i64};

/* The type that the row function finds the exponents in. */
static double exponent_dtype(const gradd_launch_t *r) {
    gradd_dtype_t dtype = r->in[1].type.dtype;
    return (double)(gradd_dtype_is_half(dtype) ? GRADD_DT_F32 : dtype);
}

static gradd_status_t compute_pow(const gradd_launch_t *r) {
    double dtype = exponent_dtype(r);
    return gradd_map_rows(&pow_rows, r->out, r->in, 2, &dtype, false);
}
static gradd_status_t compute_pow_ref(const gradd_launch_t *r) {
    double dtype = exponent_dtype(r);
    return gradd_map_rows(&pow_refs, r->out, r->in, 2, &dtype, true);
}

/* Clip: absent bounds become a scalar that bounds nothing; a bound that is NaN gives NaN. */
#define CLIP_ROW(S, T)                                                                             \
    GRADD_MULTIARCH static void row_clip_##S(int64_t n, void *out, const void *const *in,          \
                                             const int64_t *step, const double *p) {               \
        T *z = out;                                                                                \
        const T *x = in[0], lo = *(const T *)in[1], hi = *(const T *)in[2];                        \
        (void)p;                                                                                   \
        if (!step[0] || lo != lo || hi != hi) {                                                    \
            const T low = *x < lo ? lo : *x; /* bounds that cross: the upper one, as torch */      \
            const T only = lo != lo ? lo : hi != hi || low > hi ? hi : low;                        \
            for (int64_t i = 0; i < n; i++)                                                        \
                z[i] = only;                                                                       \
            return;                                                                                \
        }                                                                                          \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                      \
            const T at_least = E_AT_LEAST(x[i], lo);                                               \
            z[i] = E_AT_MOST(at_least, hi);                                                        \
        }                                                                                          \
    }
CLIP_ROW(f32, float)
CLIP_ROW(f64, double)
CLIP_ROW(i32, int32_t)
CLIP_ROW(i64, int64_t)
static const gradd_row_functions_t clip_rows = {
    .f32 = row_clip_f32, .f64 = row_clip_f64, .i32 = row_clip_i32, .i64 = row_clip_i64};

static gradd_status_t compute_clip(const gradd_launch_t *r) {
    union {
        uint16_t half;
        float f32;
        double f64;
        int32_t i32;
        int64_t i64;
    } bound[2];
    gradd_view_t in[3] = {r->in[0]};
    for (int k = 1; k < 3; k++) {
        if (k < r->n_in && r->in[k].type.dtype) {
            in[k] = r->in[k];
            in[k].type.rank = 0;
            continue;
        }
        in[k] = (gradd_view_t){.type = {.dtype = r->in[0].type.dtype}, .data = &bound[k - 1]};
        switch (r->in[0].type.dtype) {
        case GRADD_DT_BF16:
        case GRADD_DT_F16:
            gradd_half_put(&bound[k - 1], in[k].type.dtype, k == 1 ? -INFINITY : INFINITY);
            break;
        case GRADD_DT_F32:
            bound[k - 1].f32 = k == 1 ? -INFINITY : INFINITY;
            break;
        case GRADD_DT_F64:
            bound[k - 1].f64 = k == 1 ? -INFINITY : INFINITY;
            break;
        case GRADD_DT_I32:
            bound[k - 1].i32 = k == 1 ? INT32_MIN : INT32_MAX;
            break;
        default:
            bound[k - 1].i64 = k == 1 ? INT64_MIN : INT64_MAX;
            break;
        }
    }
    return gradd_map_rows(&clip_rows, r->out, in, 3, NULL, false);
}

/* ---- shape rules ---------------------------------------------------------------------------- */

static gradd_status_t infer_pow(gradd_infer_t *c) {
    c->out[0].dtype = c->in[0].type.dtype;
    return gradd_broadcast(&c->in[0].type, &c->in[1].type, &c->out[0]);
}

static gradd_status_t infer_mod(gradd_infer_t *c) {
    if (gradd_dtype_is_float(c->in[0].type.dtype) && !gradd_attr_int(c->attrs, "fmod", 0))
        return GRADD_FAIL(GRAPH, "fmod=0 needs integers");
    return gradd_infer_broadcast(c);
}

static gradd_status_t infer_clip(gradd_infer_t *c) {
    for (int k = 1; k < c->n_in; k++) {
        const gradd_type_t *bound = &c->in[k].type;
        if (!bound->dtype) continue;
        if (bound->dtype != c->in[0].type.dtype || gradd_type_count(bound) != 1)
            return GRADD_FAIL(GRAPH, "bound %d must be one element of the input's type", k);
    }
    return gradd_infer_same(c);
}

/* ---- gradient rules ------------------------------------------------------------------------- */

static gradd_val_t scalar_like(gradd_grad_t *g, double value) {
    return gradd_const_scalar(g->b, gradd_val_type(g->b, g->in[0])->dtype, value);
}

static gradd_status_t grad_sum(gradd_grad_t *g) {
    for (int i = 0; i < g->n_in; i++)
        if (g->need[i]) g->din[i] = gradd_reduce_to(g->b, g->dout[0], g->in[i]);
    return g->b->status;
}

static gradd_status_t grad_sub(gradd_grad_t *g) {
    if (g->need[0]) g->din[0] = gradd_reduce_to(g->b, g->dout[0], g->in[0]);
    if (g->need[1])
        g->din[1] = GRADD_EMIT(g->b, "Neg", gradd_reduce_to(g->b, g->dout[0], g->in[1]));
    return g->b->status;
}

static gradd_status_t grad_mul(gradd_grad_t *g) {
    for (int i = 0; i < 2; i++) {
        if (!g->need[i]) continue;
        gradd_val_t d = GRADD_EMIT(g->b, "Mul", g->dout[0], g->in[1 - i]);
        g->din[i] = gradd_reduce_to(g->b, d, g->in[i]);
    }
    return g->b->status;
}

static gradd_status_t grad_div(gradd_grad_t *g) {
    gradd_val_t d = GRADD_EMIT(g->b, "Div", g->dout[0], g->in[1]);
    if (g->need[0]) g->din[0] = gradd_reduce_to(g->b, d, g->in[0]);
    if (g->need[1]) {
        gradd_val_t e =
            gradd_reduce_to(g->b, GRADD_EMIT(g->b, "Mul", d, g->output(g, 0)), g->in[1]);
        g->din[1] = GRADD_EMIT(g->b, "Neg", e);
    }
    return g->b->status;
}

/* a - b * trunc(a / b): the quotient is constant almost everywhere */
static gradd_status_t grad_mod(gradd_grad_t *g) {
    if (g->need[0]) g->din[0] = gradd_reduce_to(g->b, g->dout[0], g->in[0]);
    if (g->need[1]) {
        gradd_val_t ratio = GRADD_EMIT(g->b, "Div", g->in[0], g->in[1]);
        gradd_val_t whole = GRADD_EMIT(g->b, "Floor", GRADD_EMIT(g->b, "Abs", ratio));
        gradd_val_t quotient = GRADD_EMIT(g->b, "Mul", GRADD_EMIT(g->b, "Sign", ratio), whole);
        gradd_val_t d = GRADD_EMIT(g->b, "Neg", GRADD_EMIT(g->b, "Mul", g->dout[0], quotient));
        g->din[1] = gradd_reduce_to(g->b, d, g->in[1]);
    }
    return g->b->status;
}

/* Known exponent of one element: its value, else NaN. */
static double known_exponent(gradd_grad_t *g) {
    const void *data = g->b->data(g->b, g->in[1]);
    gradd_type_t type = *gradd_val_type(g->b, g->in[1]);
    return data && gradd_type_count(&type) == 1 ? gradd_real_at(data, 0, (int)type.dtype) : NAN;
}

static gradd_val_t pow_base(gradd_grad_t *g) {
    double y = known_exponent(g);
    if (y == 0) return gradd_zeros_like(g->b, g->in[0]);
    if (y == 1) return gradd_reduce_to(g->b, g->dout[0], g->in[0]);
    gradd_val_t slope;
    if (y == y) {
        gradd_val_t power = g->in[0];
        if (y != 2) power = GRADD_EMIT(g->b, "Pow", g->in[0], scalar_like(g, y - 1));
        slope = gradd_scaled(g->b, power, y);
    } else {
        gradd_attr_t to = gradd_make_int("to", gradd_val_type(g->b, g->in[0])->dtype);
        gradd_val_t exponent = gradd_emit_attrs(g->b, "Cast", &g->in[1], 1, &to, 1);
        gradd_val_t less = GRADD_EMIT(g->b, "Sub", exponent, scalar_like(g, 1));
        gradd_val_t power = GRADD_EMIT(g->b, "Pow", g->in[0], less);
        gradd_val_t zero = scalar_like(g, 0); /* 0 * x^-1 at x = 0 is 0 here, not NaN */
        slope = GRADD_EMIT(g->b, "Where", GRADD_EMIT(g->b, "Equal", exponent, zero), zero,
                           GRADD_EMIT(g->b, "Mul", power, exponent));
    }
    return gradd_reduce_to(g->b, GRADD_EMIT(g->b, "Mul", g->dout[0], slope), g->in[0]);
}

/* dy x^y log(x), which is NaN for negative x, and 0 for x = 0 unless y is negative */
static gradd_val_t pow_exponent(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    gradd_dtype_t dtype = gradd_val_type(b, g->in[1])->dtype;
    gradd_val_t zero = scalar_like(g, 0), none = gradd_const_scalar(b, dtype, 0);
    gradd_val_t slope = GRADD_EMIT(b, "Mul", g->output(g, 0), GRADD_EMIT(b, "Log", g->in[0]));
    gradd_val_t flat = GRADD_EMIT(b, "And", GRADD_EMIT(b, "Equal", g->in[0], zero),
                                  GRADD_EMIT(b, "GreaterOrEqual", g->in[1], none));
    return GRADD_EMIT(b, "Where", flat, zero, GRADD_EMIT(b, "Mul", g->dout[0], slope));
}

static gradd_status_t grad_pow(gradd_grad_t *g) {
    if (g->need[0]) g->din[0] = pow_base(g);
    if (g->need[1]) {
        gradd_val_t d = pow_exponent(g);
        gradd_dtype_t dtype = gradd_val_type(g->b, g->in[1])->dtype; /* need not be that of x */
        gradd_attr_t to = gradd_make_int("to", dtype);
        d = gradd_reduce_to(g->b, d, g->in[1]);
        bool same = dtype == gradd_val_type(g->b, g->in[0])->dtype;
        g->din[1] = same ? d : gradd_emit_attrs(g->b, "Cast", &d, 1, &to, 1);
    }
    return g->b->status;
}

/* Of two operands: half to each where they are equal, nothing to the one that is beaten. A
 * comparison with NaN is false, so both get all of it there. */
static gradd_status_t grad_extremum_of_two(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    bool max = !strcmp(g->op->name, "Max");
    gradd_val_t zero = scalar_like(g, 0);
    gradd_val_t half = gradd_scaled(b, g->dout[0], 0.5);
    gradd_val_t equal = GRADD_EMIT(b, "Equal", g->in[0], g->in[1]);
    gradd_val_t share = GRADD_EMIT(b, "Where", equal, half, g->dout[0]);
    for (int i = 0; i < 2; i++) {
        if (!g->need[i]) continue;
        gradd_val_t beaten = max ? GRADD_EMIT(b, "Less", g->in[i], g->in[1 - i])
                                 : GRADD_EMIT(b, "Greater", g->in[i], g->in[1 - i]);
        g->din[i] = gradd_reduce_to(b, GRADD_EMIT(b, "Where", beaten, zero, share), g->in[i]);
    }
    return b->status;
}

static gradd_status_t grad_extremum(gradd_grad_t *g) {
    if (g->n_in == 2) return grad_extremum_of_two(g);
    gradd_val_t hit[GRADD_OP_MAX_IN];
    gradd_attr_t to = gradd_make_int("to", gradd_val_type(g->b, g->in[0])->dtype);
    if (g->n_in == 1) {
        g->din[0] = g->dout[0];
        return g->b->status;
    }
    for (int i = 0; i < g->n_in; i++) {
        gradd_val_t equal = GRADD_EMIT(g->b, "Equal", g->in[i], g->output(g, 0));
        hit[i] = gradd_emit_attrs(g->b, "Cast", &equal, 1, &to, 1);
    }
    gradd_val_t share =
        GRADD_EMIT(g->b, "Div", g->dout[0], gradd_emit_n(g->b, "Sum", g->n_in, hit));
    for (int i = 0; i < g->n_in; i++)
        if (g->need[i])
            g->din[i] = gradd_reduce_to(g->b, GRADD_EMIT(g->b, "Mul", share, hit[i]), g->in[i]);
    return g->b->status;
}

static gradd_status_t grad_neg(gradd_grad_t *g) {
    g->din[0] = GRADD_EMIT(g->b, "Neg", g->dout[0]);
    return g->b->status;
}
static gradd_status_t grad_abs(gradd_grad_t *g) {
    g->din[0] = GRADD_EMIT(g->b, "Mul", g->dout[0], GRADD_EMIT(g->b, "Sign", g->in[0]));
    return g->b->status;
}
static gradd_status_t grad_sqrt(gradd_grad_t *g) {
    gradd_val_t half = gradd_scaled(g->b, g->dout[0], 0.5);
    g->din[0] = GRADD_EMIT(g->b, "Div", half, g->output(g, 0));
    return g->b->status;
}
static gradd_status_t grad_reciprocal(gradd_grad_t *g) {
    gradd_val_t y = g->output(g, 0);
    gradd_val_t d = GRADD_EMIT(g->b, "Mul", g->dout[0], GRADD_EMIT(g->b, "Mul", y, y));
    g->din[0] = GRADD_EMIT(g->b, "Neg", d);
    return g->b->status;
}
static gradd_status_t grad_exp(gradd_grad_t *g) {
    g->din[0] = GRADD_EMIT(g->b, "Mul", g->dout[0], g->output(g, 0));
    return g->b->status;
}
static gradd_status_t grad_log(gradd_grad_t *g) {
    g->din[0] = GRADD_EMIT(g->b, "Div", g->dout[0], g->in[0]);
    return g->b->status;
}
static gradd_status_t grad_sin(gradd_grad_t *g) {
    g->din[0] = GRADD_EMIT(g->b, "Mul", g->dout[0], GRADD_EMIT(g->b, "Cos", g->in[0]));
    return g->b->status;
}
static gradd_status_t grad_cos(gradd_grad_t *g) {
    gradd_val_t d = GRADD_EMIT(g->b, "Mul", g->dout[0], GRADD_EMIT(g->b, "Sin", g->in[0]));
    g->din[0] = GRADD_EMIT(g->b, "Neg", d);
    return g->b->status;
}
static gradd_status_t grad_erf(gradd_grad_t *g) {
    gradd_val_t square = GRADD_EMIT(g->b, "Mul", g->in[0], g->in[0]);
    gradd_val_t bell = GRADD_EMIT(g->b, "Exp", GRADD_EMIT(g->b, "Neg", square));
    gradd_val_t slope = gradd_scaled(g->b, bell, 1.1283791670955126);
    g->din[0] = GRADD_EMIT(g->b, "Mul", g->dout[0], slope);
    return g->b->status;
}

/* A bound in the place of the elements that it replaces, as torch.clamp: the upper one where the
 * two cross, and neither where an element is equal to one. */
static void grad_bound(gradd_grad_t *g, int k) {
    const gradd_val_t own = g->in[k], other = k < 2 && g->n_in < 3 ? GRADD_NONE : g->in[3 - k];
    const char *beyond = k == 1 ? "Less" : "Greater";
    gradd_val_t bound = gradd_reshape_to(g->b, own, (const int64_t[1]){0}, 0);
    gradd_val_t takes = GRADD_EMIT(g->b, beyond, g->in[0], bound);
    if (other != GRADD_NONE) {
        gradd_val_t against = gradd_reshape_to(g->b, other, (const int64_t[1]){0}, 0);
        gradd_val_t order = GRADD_EMIT(g->b, "Less", bound, against);
        takes = GRADD_EMIT(g->b, k == 1 ? "And" : "Or", takes, order);
    }
    gradd_val_t d = GRADD_EMIT(g->b, "Where", takes, g->dout[0], scalar_like(g, 0));
    g->din[k] = gradd_reduce_to(g->b, d, own);
}

static gradd_status_t grad_clip(gradd_grad_t *g) {
    for (int k = 1; k < g->n_in; k++)
        if (g->need[k]) grad_bound(g, k);
    if (!g->need[0]) return g->b->status;
    gradd_val_t d = g->dout[0], zero = scalar_like(g, 0);
    for (int k = 1; k < g->n_in; k++) {
        if (g->in[k] == GRADD_NONE) continue;
        gradd_val_t bound = gradd_reshape_to(g->b, g->in[k], (const int64_t[1]){0}, 0);
        const char *op = k == 1 ? "GreaterOrEqual" : "LessOrEqual";
        d = GRADD_EMIT(g->b, "Where", gradd_emit_n(g->b, op, 2, (gradd_val_t[]){g->in[0], bound}),
                       d, zero);
    }
    g->din[0] = d;
    return g->b->status;
}

/* ---- cases ---------------------------------------------------------------------------------- */

#define CASES_BINARY(range)                                                                        \
    GRADD_CASES(                                                                                   \
        {.text = "f32[2,3,4]" range " f32[2,3,4]" range},                                          \
        {.text = "f32[2,3,4]" range " f32[4]" range},                                              \
        {.text = "f32[2,1,4]" range " f32[3,1]" range}, {.text = "f32[5]" range " f32[]" range},   \
        {.text = "f32[] f32[2,2]" range}, {.text = "f32[3,1,2,1]" range " f32[1,4,1,5]" range},    \
        {.text = "f32[0,3]" range " f32[3]" range},                                                \
        {.text = "f32[37,1031]" range " f32[1031]" range},                                         \
        {.text = "f32[37,1031]" range " f32[37,1]" range},                                         \
        {.text = "f32[7,9,64]" range " f32[64]" range},                                            \
        {.text = "f32[9,1,64]" range " f32[3,1]" range},                                           \
        {.text = "f32[64]" range " f32[9,64]" range}, {.text = "i64[3,2]:(-9,9) i64[2]:(1,5)"},    \
        {.text = "i32[3]:(-9,9) i32[3]:(-3,-1)"})
#define CASES_UNARY(range)                                                                         \
    GRADD_CASES({.text = "f32[3,5]" range}, {.text = "f32[]" range}, {.text = "f32[0,2]" range},   \
                {.text = "f32[211,173]" range})
#define CASES_UNARY_NUM(range)                                                                     \
    GRADD_CASES({.text = "f32[3,5]" range}, {.text = "f32[]" range}, {.text = "f32[0,2]" range},   \
                {.text = "f32[211,173]" range}, {.text = "i64[7]:(-5,5)"},                         \
                {.text = "i32[7]:(-5,5)"})
#define CASES_FOLD                                                                                 \
    GRADD_CASES(                                                                                   \
        {.text = "f32[2,3] f32[2,3]"}, {.text = "f32[3] f32[2,1] f32[]"}, {.text = "f32[2,3]"},    \
        {.text = "f32[1,3] f32[4,1] f32[2,4,3] f32[3]"}, {.text = "f32[211,173] f32[173]"},        \
        {.text = "f32[211,173] f32[211,173] f32[211,173]"},                                        \
        {.text = "f32[64,72] f32[64,72] f32[64,72] f32[64,72]"},                                   \
        {.text = "f32[9,64] f32[64] f32[9,1] f32[9,64]"},                                          \
        {.text = "f32[6]={nan,1,0,-0.0,inf,1} f32[6]={1,nan,-0.0,0,-inf,1}", .grad_tol = -1},      \
        {.text = "i64[3] i64[3]:(1,5) i64[1]={2}"}, {.text = "i32[2,2] i32[2]"})

#define FLAT (GRADD_OP_NO_GRAD | GRADD_OP_FLAT | GRADD_OP_CHEAP)

static const gradd_case_t cases_pow[] = {{.text = "f32[3,4]:(0.2,2) f32[]={2}"},
                                         {.text = "f32[3,4]:(0.2,2) f32[]={3}"},
                                         {.text = "f32[3,4]:(0.2,2) f32[]={0.5}"},
                                         {.text = "f32[3,4]:(0.2,2) f32[1]={-0.5}"},
                                         {.text = "f32[3,4] i64[]={2}"},
                                         {.text = "f32[3,4] i64[]={3}"},
                                         {.text = "f32[3,4] i32[4]={0,1,2,3}"},
                                         {.text = "f32[3,4]:(0.2,2) f32[]={0}"},
                                         {.text = "f32[3,4]:(0.2,2) f32[]={1}"},
                                         {.text = "f32[2,3]:(0.2,2) f32[3]:(-2,2)"},
                                         {.text = "f32[]:(0.2,2) f32[2,3]:(-2,2)"},
                                         {.text = "f32[211,173]:(0.2,2) f32[]={2}"},
                                         {.text = "f32[211,173]:(0.2,2) f32[1,173]:(-2,2)"},
                                         {.text = "f32[64,72]:(0.2,2) f32[64,1]={3}"},
                                         {.text = "f32[1]:(0.2,2) f32[1,1]={3}"},
                                         {.text = "i64[4]:(-3,3) i64[4]={0,1,2,3}"},
                                         {.text = "i64[3] f32[]={2}"},
                                         {.text = "i64[2]={3037000499,-3} i64[2]={2,39}"},
                                         {.text = "i32[3]={2,3,4} f32[]={0.5}"},
                                         {.text = "i32[2]:(1,3) i32[]={-1}"},
                                         {0}};

GRADD_OPS(
    elementwise,
    GRADD_OP("Add", "", 7, (2, 2), (1, 1), .flags = GRADD_OP_CHEAP, .types = {GRADD_T_NUM},
             .infer = gradd_infer_broadcast, .rowwise = gradd_rowwise_map, .grad = grad_sum,
             .ref = GRADD_REF(compute_add_ref), .cases = CASES_BINARY("")),
    GRADD_OP("Sub", "", 7, (2, 2), (1, 1), .flags = GRADD_OP_CHEAP, .types = {GRADD_T_NUM},
             .infer = gradd_infer_broadcast, .rowwise = gradd_rowwise_map, .grad = grad_sub,
             .ref = GRADD_REF(compute_sub_ref), .cases = CASES_BINARY("")),
    GRADD_OP("Mul", "", 7, (2, 2), (1, 1), .flags = GRADD_OP_CHEAP, .types = {GRADD_T_NUM},
             .infer = gradd_infer_broadcast, .rowwise = gradd_rowwise_map, .grad = grad_mul,
             .ref = GRADD_REF(compute_mul_ref), .cases = CASES_BINARY("")),
    GRADD_OP("Div", "", 7, (2, 2), (1, 1), .flags = GRADD_OP_CHEAP, .types = {GRADD_T_NUM},
             .infer = gradd_infer_broadcast, .rowwise = gradd_rowwise_map, .grad = grad_div,
             .ref = GRADD_REF(compute_div_ref), .cases = CASES_BINARY(":(0.5,2)")),
    GRADD_OP("Mod", "", 10, (2, 2), (1, 1), .types = {GRADD_T_NUM},
             .attrs = GRADD_ATTR_LIST({"fmod", GRADD_ATTR_INT, false}), .infer = infer_mod,
             .rowwise = gradd_rowwise_map, .grad = grad_mod, .ref = GRADD_REF(compute_mod_ref),
             .cases = GRADD_CASES({.text = "i64[3,4]:(-9,9) i64[4]={3,-3,2,-1}"},
                                  {.text = "i32[5]:(-9,9) i32[]={-4}"},
                                  {.text = "i64[5]:(-9,9) i64[]={4} | fmod=1"},
                                  {.text = "f32[3,4]:(-9,9) f32[4]:(1.1,2) | fmod=1"},
                                  {.text = "i32[3,64]:(-9,9) i32[64]:(1,5)"},
                                  {.text = "f32[3,64]:(-9,9) f32[64]:(1.1,2) | fmod=1"},
                                  {.text = "i64[3]={-9223372036854775807,5,0} i64[]={-1}"})),
    GRADD_OP("Pow", "", 13, (2, 2), (1, 1), .types = {GRADD_T_NUM}, .infer = infer_pow,
             .rowwise = gradd_rowwise_map, .grad = grad_pow, .ref = GRADD_REF(compute_pow_ref),
             .cases = cases_pow),
    GRADD_OP("Max", "", 8, (1, GRADD_OP_MAX_IN), (1, 1), .flags = GRADD_OP_CHEAP,
             .types = {GRADD_T_NUM}, .infer = gradd_infer_broadcast, .rowwise = gradd_rowwise_map,
             .grad = grad_extremum, .ref = GRADD_REF(compute_max_ref), .cases = CASES_FOLD),
    GRADD_OP("Min", "", 8, (1, GRADD_OP_MAX_IN), (1, 1), .flags = GRADD_OP_CHEAP,
             .types = {GRADD_T_NUM}, .infer = gradd_infer_broadcast, .rowwise = gradd_rowwise_map,
             .grad = grad_extremum, .ref = GRADD_REF(compute_min_ref), .cases = CASES_FOLD),
    GRADD_OP("Sum", "", 8, (1, GRADD_OP_MAX_IN), (1, 1), .flags = GRADD_OP_CHEAP,
             .types = {GRADD_T_NUM}, .infer = gradd_infer_broadcast, .rowwise = gradd_rowwise_map,
             .grad = grad_sum, .ref = GRADD_REF(compute_sum_ref), .cases = CASES_FOLD),
    GRADD_OP("Neg", "", 6, (1, 1), (1, 1), .types = {GRADD_T_NUM}, .infer = gradd_infer_same,
             .rowwise = gradd_rowwise_map, .grad = grad_neg, .ref = GRADD_REF(compute_neg_ref),
             .cases = CASES_UNARY_NUM(""), .flags = GRADD_OP_CHEAP),
    GRADD_OP("Abs", "", 6, (1, 1), (1, 1), .types = {GRADD_T_NUM}, .infer = gradd_infer_same,
             .rowwise = gradd_rowwise_map, .grad = grad_abs, .ref = GRADD_REF(compute_abs_ref),
             .cases = CASES_UNARY_NUM(""), .flags = GRADD_OP_CHEAP),
    GRADD_OP("Sign", "", 9, (1, 1), (1, 1), .types = {GRADD_T_NUM}, .infer = gradd_infer_same,
             .rowwise = gradd_rowwise_map, .ref = GRADD_REF(compute_sign_ref),
             .cases = CASES_UNARY_NUM(""), .flags = FLAT),
    GRADD_OP("Sqrt", "", 6, (1, 1), (1, 1), .types = {GRADD_T_FLOAT}, .infer = gradd_infer_same,
             .rowwise = gradd_rowwise_map, .grad = grad_sqrt, .ref = GRADD_REF(compute_sqrt_ref),
             .cases = CASES_UNARY(":(0.1,2)"), .flags = GRADD_OP_CHEAP),
    GRADD_OP("Reciprocal", "", 6, (1, 1), (1, 1), .types = {GRADD_T_FLOAT},
             .infer = gradd_infer_same, .rowwise = gradd_rowwise_map, .grad = grad_reciprocal,
             .ref = GRADD_REF(compute_reciprocal_ref), .cases = CASES_UNARY(":(0.3,2)"),
             .flags = GRADD_OP_CHEAP),
    GRADD_OP("Exp", "", 6, (1, 1), (1, 1), .types = {GRADD_T_FLOAT}, .infer = gradd_infer_same,
             .rowwise = gradd_rowwise_map, .grad = grad_exp, .ref = GRADD_REF(compute_exp_ref),
             .cases = CASES_UNARY(""), .flags = GRADD_OP_CHEAP),
    GRADD_OP("Log", "", 6, (1, 1), (1, 1), .types = {GRADD_T_FLOAT}, .infer = gradd_infer_same,
             .rowwise = gradd_rowwise_map, .grad = grad_log, .ref = GRADD_REF(compute_log_ref),
             .cases = CASES_UNARY(":(0.1,3)"), .flags = GRADD_OP_CHEAP),
    GRADD_OP("Sin", "", 7, (1, 1), (1, 1), .types = {GRADD_T_FLOAT}, .infer = gradd_infer_same,
             .rowwise = gradd_rowwise_map, .grad = grad_sin, .ref = GRADD_REF(compute_sin_ref),
             .cases = GRADD_CASES({.text = "f32[3,5]:(-9,9)"}, {.text = "f32[0]"},
                                  {.text = "f32[4]={5e6,-3e7,0,1e4}", .grad_tol = -1},
                                  {.text = "f32[211,173]:(-300,300)"})),
    GRADD_OP("Cos", "", 7, (1, 1), (1, 1), .types = {GRADD_T_FLOAT}, .infer = gradd_infer_same,
             .rowwise = gradd_rowwise_map, .grad = grad_cos, .ref = GRADD_REF(compute_cos_ref),
             .cases = GRADD_CASES({.text = "f32[3,5]:(-9,9)"}, {.text = "f32[]"},
                                  {.text = "f32[4]={5e6,-3e7,0,1e4}", .grad_tol = -1},
                                  {.text = "f32[211,173]:(-300,300)"})),
    GRADD_OP("Erf", "", 9, (1, 1), (1, 1), .types = {GRADD_T_FLOAT}, .infer = gradd_infer_same,
             .rowwise = gradd_rowwise_map, .grad = grad_erf, .ref = GRADD_REF(compute_erf_ref),
             .cases = CASES_UNARY("")),
    GRADD_OP("Floor", "", 6, (1, 1), (1, 1), .types = {GRADD_T_FLOAT}, .infer = gradd_infer_same,
             .rowwise = gradd_rowwise_map, .ref = GRADD_REF(compute_floor_ref),
             .cases = CASES_UNARY(":(-9,9)"), .flags = FLAT),
    GRADD_OP("Ceil", "", 6, (1, 1), (1, 1), .types = {GRADD_T_FLOAT}, .infer = gradd_infer_same,
             .rowwise = gradd_rowwise_map, .ref = GRADD_REF(compute_ceil_ref),
             .cases = CASES_UNARY(":(-9,9)"), .flags = FLAT),
    GRADD_OP("Round", "", 11, (1, 1), (1, 1), .types = {GRADD_T_FLOAT}, .infer = gradd_infer_same,
             .rowwise = gradd_rowwise_map, .ref = GRADD_REF(compute_round_ref),
             .cases = GRADD_CASES({.text = "f32[6]={0.5,1.5,-0.5,-2.5,2.4,-7.6}"},
                                  {.text = "f32[3,4]:(-9,9)"}),
             .flags = FLAT),
    GRADD_OP(
        "Clip", "", 11, (1, 3), (1, 1), .flags = GRADD_OP_CHEAP, .types = {GRADD_T_NUM},
        .infer = infer_clip, .rowwise = gradd_rowwise_map, .grad = grad_clip,
        .ref = GRADD_REF(compute_clip),
        .cases = GRADD_CASES({.text = "f32[3,4] f32[]={-0.5} f32[]={0.7}"}, {.text = "f32[3,4]"},
                             {.text = "f32[3,4] - f32[]={0.7}"}, {.text = "f32[3,4] f32[1]={-0.5}"},
                             {.text = "i64[5] i64[]={1} i64[]={3}"}, {.text = "i32[5] - i32[]={3}"},
                             {.text = "f32[64,72] f32[] f32[]", .grad_tol = -1},
                             {.text = "f32[4]={nan,-2,0,2} f32[]={-1} f32[]={1}", .grad_tol = -1},
                             {.text = "f32[4] f32[]={nan} f32[]={1}", .grad_tol = -1},
                             {.text = "f32[4] f32[]={-1} f32[]={nan}", .grad_tol = -1},
                             {.text = "f32[4] f32[]={1} f32[]={-1}", .grad_tol = -1},
                             {.text = "f32[]={0} f32[]={5} f32[]={1}", .grad_tol = -1},
                             {.text = "f32[211,173] f32[]={0.0}"})));

GRADD_KERNELS(
    cpu, elementwise,
    GRADD_KERNEL("Add", "loop", .types = {GRADD_T_ANY}, .inplace = 3, .compute = compute_add),
    GRADD_KERNEL("Sub", "loop", .types = {GRADD_T_ANY}, .inplace = 3, .compute = compute_sub),
    GRADD_KERNEL("Mul", "loop", .types = {GRADD_T_ANY}, .inplace = 3, .compute = compute_mul),
    GRADD_KERNEL("Div", "loop", .types = {GRADD_T_ANY}, .inplace = 3, .compute = compute_div),
    GRADD_KERNEL("Mod", "loop", .types = {GRADD_T_ANY}, .inplace = 3, .compute = compute_mod),
    GRADD_KERNEL("Pow", "loop", .types = {GRADD_T_ANY}, .inplace = 1, .compute = compute_pow),
    GRADD_KERNEL("Max", "loop", .types = {GRADD_T_ANY}, .inplace = 1, .compute = compute_max),
    GRADD_KERNEL("Min", "loop", .types = {GRADD_T_ANY}, .inplace = 1, .compute = compute_min),
    GRADD_KERNEL("Sum", "loop", .types = {GRADD_T_ANY}, .inplace = 1, .compute = compute_sum,
                 .workspace = workspace_sum),
    GRADD_KERNEL("Neg", "loop", .types = {GRADD_T_ANY}, .inplace = 1, .compute = compute_neg),
    GRADD_KERNEL("Abs", "loop", .types = {GRADD_T_ANY}, .inplace = 1, .compute = compute_abs),
    GRADD_KERNEL("Sign", "loop", .types = {GRADD_T_ANY}, .inplace = 1, .compute = compute_sign),
    GRADD_KERNEL("Sqrt", "loop", .types = {GRADD_T_ANY}, .inplace = 1, .compute = compute_sqrt),
    GRADD_KERNEL("Reciprocal", "loop", .types = {GRADD_T_ANY}, .inplace = 1,
                 .compute = compute_reciprocal),
    GRADD_KERNEL("Exp", "loop", .types = {GRADD_T_ANY}, .inplace = 1, .compute = compute_exp),
    GRADD_KERNEL("Log", "loop", .types = {GRADD_T_ANY}, .inplace = 1, .compute = compute_log),
    GRADD_KERNEL("Sin", "loop", .makes_parts = true, .types = {GRADD_T_ANY}, .inplace = 1,
                 .compute = compute_sin),
    GRADD_KERNEL("Cos", "loop", .makes_parts = true, .types = {GRADD_T_ANY}, .inplace = 1,
                 .compute = compute_cos),
    GRADD_KERNEL("Erf", "loop", .types = {GRADD_T_ANY}, .inplace = 1, .compute = compute_erf),
    GRADD_KERNEL("Floor", "loop", .types = {GRADD_T_ANY}, .inplace = 1, .compute = compute_floor),
    GRADD_KERNEL("Ceil", "loop", .types = {GRADD_T_ANY}, .inplace = 1, .compute = compute_ceil),
    GRADD_KERNEL("Round", "loop", .types = {GRADD_T_ANY}, .inplace = 1, .compute = compute_round),
    GRADD_KERNEL("Clip", "loop", .types = {GRADD_T_ANY}, .inplace = 1, .compute = compute_clip));
