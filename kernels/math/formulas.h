/* The formulas of elementwise operators, once for all devices: expressions in a, b and c (operands)
 * and F, a prefix that selects the functions. With v, F##exp(a) is the vectorisable form; with r,
 * it is libm in double, and the operands are double. The CPU turns them into row functions
 * (cpu/map.h), a GPU into functors (cuda/map.h), with the same bits.
 *
 * GRADD_K(x) is a constant of the type of a.
 */
#ifndef GRADD_KERNELS_MATH_FORMULAS_H
#define GRADD_KERNELS_MATH_FORMULAS_H

#include "kernels/math/activate.h"
#include "kernels/math/bf16.h"
#include "kernels/math/f16.h"
#include "kernels/math/vec.h"
#include "shm/dtype.h"

/* ---- vocabulary ---- */

#define GRADD_K(x) ((__typeof__(a))(x))

#ifdef __cplusplus
#define GRADD_FORM(name, narrow, wide)                                                             \
    GRADD_HD float name(float x) {                                                                 \
        return narrow(x);                                                                          \
    }                                                                                              \
    GRADD_HD double name(double x) {                                                               \
        return wide(x);                                                                            \
    }
GRADD_FORM(vexp, gradd_vexpf, exp)
GRADD_FORM(vlog, gradd_vlogf, log)
GRADD_FORM(vlog1p, gradd_vlog1pf, log1p)
GRADD_FORM(vexpm1, gradd_vexpm1f, expm1)
GRADD_FORM(vlogp, gradd_vlog1p_anyf, log1p)
GRADD_FORM(vtanh, gradd_vtanhf, tanh)
GRADD_FORM(verf, gradd_verff, erf)
GRADD_FORM(vsqrt, sqrtf, sqrt)
GRADD_FORM(vabs, fabsf, fabs)
GRADD_FORM(vfloor, floorf, floor)
GRADD_FORM(vceil, ceilf, ceil)
GRADD_FORM(vrint, rintf, rint)
#undef GRADD_FORM
#else
#define vexp(x)   _Generic((x), float: gradd_vexpf, double: exp)(x)
#define vlog(x)   _Generic((x), float: gradd_vlogf, double: log)(x)
#define vlog1p(x) _Generic((x), float: gradd_vlog1pf, double: log1p)(x)
#define vexpm1(x) _Generic((x), float: gradd_vexpm1f, double: expm1)(x)
#define vlogp(x)  _Generic((x), float: gradd_vlog1p_anyf, double: log1p)(x)
#define vtanh(x)  _Generic((x), float: gradd_vtanhf, double: tanh)(x)
#define verf(x)   _Generic((x), float: gradd_verff, double: erf)(x)
#define vsqrt(x)  _Generic((x), float: sqrtf, double: sqrt)(x)
#define vabs(x)   _Generic((x), float: fabsf, double: fabs)(x)
#define vfloor(x) _Generic((x), float: floorf, double: floor)(x)
#define vceil(x)  _Generic((x), float: ceilf, double: ceil)(x)
#define vrint(x)  _Generic((x), float: rintf, double: rint)(x)
#define rexp      exp
#define rlog      log
#define rlog1p    log1p
#define rexpm1    expm1
#define rlogp     log1p
#define rtanh     tanh
#define rerf      erf
#define rsqrt     sqrt
#define rabs      fabs
#define rfloor    floor
#define rceil     ceil
#define rrint     rint
#endif

/* ---- arithmetic; _I of integers, which wrap around ---- */

#define WRAP(op)   ((__typeof__(a))((uint64_t)a op(uint64_t) b))
#define E_ADD(F)   (a + b)
#define E_ADD_I(F) WRAP(+)
#define E_SUB(F)   (a - b)
#define E_SUB_I(F) WRAP(-)
#define E_MUL(F)   (a * b)
#define E_MUL_I(F) WRAP(*)
#define E_DIV(F)   (a / b)
/* Zero divisors are refused before (check_divisor); here they must not trap all the same, because a
 * client may write to its tensor in between. */
#define E_DIV_I(F)  (b == -1 ? (__typeof__(a))(0 - (uint64_t)a) : b ? a / b : 0)
#define E_MAX(F)    (a > b || a != a ? a : b)
#define E_MIN(F)    (a < b || a != a ? a : b)
#define E_FMOD(F)   ((__typeof__(a))fmod((double)a, (double)b))
#define E_FMOD_I(F) (b == -1 || !b ? 0 : a % b)
#define E_MOD_I(F)  (b == -1 || !b ? 0 : (a % b) + ((a % b) != 0 && (a % b < 0) != (b < 0) ? b : 0))
#define E_NEG(F)    (-a)
#define E_NEG_I(F)  ((__typeof__(a))(0 - (uint64_t)a))
#define E_ABS(F)    (F##abs(a))
#define E_ABS_I(F)  ((__typeof__(a))(a < 0 ? 0 - (uint64_t)a : (uint64_t)a))
#define E_SIGN(F)   (a > 0 ? GRADD_K(1) : a < 0 ? GRADD_K(-1) : GRADD_K(0)) /* of NaN 0, as torch */
#define E_SQRT(F)   (F##sqrt(a))
#define E_RECIP(F)  (1 / a)
#define E_EXP(F)    (F##exp(a))
#define E_LOG(F)    (F##log(a))
#define E_ERF(F)    (F##erf(a))
#define E_FLOOR(F)  (F##floor(a))
#define E_CEIL(F)   (F##ceil(a))
#define E_ROUND(F)  (F##rint(a))
#define E_SIN(F)    sin((double)a)
#define E_COS(F)    cos((double)a)
#define E_VSIN(F)   gradd_vsinf((float)a)
#define E_VCOS(F)   gradd_vcosf((float)a)

/* In double; the last ones are of special.h. */
#define E_TAN(F)      tan((double)a)
#define E_ASIN(F)     asin((double)a)
#define E_ACOS(F)     acos((double)a)
#define E_ATAN(F)     atan((double)a)
#define E_SINH(F)     sinh((double)a)
#define E_COSH(F)     cosh((double)a)
#define E_ASINH(F)    asinh((double)a)
#define E_ACOSH(F)    acosh((double)a)
#define E_ATANH(F)    atanh((double)a)
#define E_ATAN2(F)    atan2((double)a, (double)b)
#define E_LGAMMA(F)   gradd_lgamma((double)a)
#define E_DIGAMMA(F)  gradd_digamma((double)a)
#define E_TRIGAMMA(F) gradd_trigamma((double)a)
#define E_ERFINV(F)   gradd_erfinv((double)a)

#define E_SQUARE(F) (a * a)
#define E_CUBE(F)   (a * a * a)
#define E_RSQRT(F)  (1 / F##sqrt(a))

#define E_AT_LEAST(x, low) ((x) < (low) ? (low) : (x))
#define E_AT_MOST(x, high) ((x) > (high) ? (high) : (x))

/* Of a tensor whose type is known at run time, and never changes along it. */
GRADD_HD double gradd_real_at(const void *y, int64_t i, int dtype) {
    switch (dtype) {
    case GRADD_DT_BF16:
        return (double)gradd_bf16_f32(((const gradd_bf16_t *)y)[i]);
    case GRADD_DT_F16:
        return (double)gradd_f16_f32(((const gradd_f16_t *)y)[i]);
    case GRADD_DT_F32:
        return (double)((const float *)y)[i];
    case GRADD_DT_F64:
        return ((const double *)y)[i];
    case GRADD_DT_I32:
        return (double)((const int32_t *)y)[i];
    default:
        return (double)((const int64_t *)y)[i];
    }
}

/* Integer power by squaring, wrapping around; a negative exponent truncates as 1/x^n does, and a
 * fraction is rounded towards zero. */
GRADD_HD int64_t gradd_power_i64(int64_t x, double y) {
    if (y != y) return 0;
    int64_t n = y > 0x1p62 ? INT64_MAX : y < -0x1p62 ? -INT64_MAX : (int64_t)y;
    if (y != (double)n && n >= 0 && y < 0x1p62) { /* not a whole exponent */
        double z = pow((double)x, y);
        return z != z ? 0 : z > 0x1p62 ? INT64_MAX : (int64_t)z;
    }
    if (n < 0) return x == 1 ? 1 : x == -1 ? (n % 2 ? -1 : 1) : 0;
    uint64_t result = 1, base = (uint64_t)x;
    for (; n; n >>= 1, base *= base)
        if (n & 1) result *= base;
    return (int64_t)result;
}

/* ---- activations: a is the operand, in gradients dy, and b what was saved ---- */

#define E_RELU(F)           (a < 0 ? GRADD_K(0) : a)
#define E_PRELU(F)          (a > 0 ? a : a * b)
#define E_RELU_GRAD(F)      (b <= 0 ? GRADD_K(0) : a)
#define E_LEAKY(F)          (a > 0 ? a : a * GRADD_K(p[0]))
#define E_LEAKY_GRAD(F)     (b > 0 ? a : a * GRADD_K(p[0]))
#define E_SIGMOID(F)        (1 / (1 + F##exp(-a)))
#define E_SIGMOID_GRAD(F)   (a * b * (1 - b))
#define E_TANH(F)           (F##tanh(a))
#define E_TANH_GRAD(F)      (a * (1 - b * b))
#define E_ELU(F)            (a > 0 ? a : GRADD_K(p[0]) * F##expm1(a))
#define E_ELU_GRAD(F)       (b > 0 ? a : a * (b + GRADD_K(p[0])))
#define E_ELU_INPUT_GRAD(F) (b > 0 ? a : a * (GRADD_K(p[0]) * F##exp(b)))
#define E_SOFTPLUS(F)       ((a > 0 ? a : 0) + F##log1p(F##exp(-F##abs(a))))
#define E_RAMP(x)           ((x) / 6 + GRADD_K(0.5))
#define E_UNIT(x)           ((x) < 0 ? GRADD_K(0) : (x) > 1 ? GRADD_K(1) : (x))
#define E_HARDSWISH(F)      (a * E_UNIT(E_RAMP(a)))
#define E_HARDSWISH_GRAD(F) (b <= -3 ? GRADD_K(0) : b >= 3 ? a : a * (b / 3 + GRADD_K(0.5)))

/* Gelu: x times the normal distribution, or an approximation by tanh. */
#define E_GELU(F)      (F##gelu_value(a, 0))
#define E_GELU_GRAD(F) (a * F##gelu_slope(b, 0))
#define E_INNER(x)     (GRADD_K(0.79788456080286536) * ((x) + GRADD_K(0.044715) * (x) * (x) * (x)))
#define E_INNER_SLOPE(x) (GRADD_K(0.79788456080286536) * (1 + GRADD_K(0.134145) * (x) * (x)))
#define E_GELU_TANH(F)   (a * GRADD_K(0.5) * (1 + F##tanh(E_INNER(a))))
#define E_SLOPE_TANH(t, x)                                                                         \
    (GRADD_K(0.5) * (1 + (t)) + GRADD_K(0.5) * (x) * (1 - (t) * (t)) * E_INNER_SLOPE(x))
#define E_GELU_TANH_GRAD(F) (a * E_SLOPE_TANH(F##tanh(E_INNER(b)), b))

/* Mish: x tanh(log(1 + e)) with e = exp(x), which is x q / (q + 2) with q = e (e + 2) */
#define E_MISH_EXP(F, x) (F##exp((x) > 20 ? GRADD_K(20) : (x)))
#define E_MISH_TANH(e)   ((e) * ((e) + 2) / ((e) * ((e) + 2) + 2))
#define E_MISH(F)        (a * E_MISH_TANH(E_MISH_EXP(F, a)))
#define E_MISH_SLOPE(e, x)                                                                         \
    (E_MISH_TANH(e) + (x) * (1 - E_MISH_TANH(e) * E_MISH_TANH(e)) * ((e) / (1 + (e))))
#define E_MISH_GRAD(F) (a * E_MISH_SLOPE(E_MISH_EXP(F, b), b))

/* x sigmoid(p[0] x) */
#define E_SWISH(F)      (F##swish_value(a, GRADD_K(p[0])))
#define E_SWISH_GRAD(F) (a * F##swish_slope(b, GRADD_K(p[0])))

#define E_SOFTSIGN(F)      (a / (1 + F##abs(a)))
#define E_SOFTSIGN_GRAD(F) (a / ((1 + F##abs(b)) * (1 + F##abs(b))))

/* NaN stays NaN. */
#define CUT(v)            ((v) < 0 ? 0 : (v) > 1 ? 1 : (v))
#define E_HARD_SIGMOID(F) (CUT(GRADD_K(p[0]) * a + GRADD_K(p[1])))
#define E_HARD_SIGMOID_GRAD(F)                                                                     \
    (GRADD_K(p[0]) * b + GRADD_K(p[1]) > 0 && GRADD_K(p[0]) * b + GRADD_K(p[1]) < 1                \
         ? GRADD_K(p[0]) * a                                                                       \
         : 0)

#define E_EXPM1(F) (F##expm1(a))
#define E_LOG1P(F) (F##logp(a))

/* ---- rotation of a pair (a, b); the sine has the sign of the direction ---- */

#define E_TURN_FIRST(a, b, cos, sin)  ((a) * (cos) + (b) * (sin))
#define E_TURN_SECOND(a, b, cos, sin) ((b) * (cos) - (a) * (sin))

/* ---- conversion of a ---- */

/* Stored integers: enumerator, C type, smallest and largest value as a double that converts back
 * without overflow. */
#define GRADD_INT_TYPES(X, ...)                                                                    \
    X(I8, int8_t, -128.0, 127.0, __VA_ARGS__)                                                      \
    X(U8, uint8_t, 0.0, 255.0, __VA_ARGS__)                                                        \
    X(I16, int16_t, -32768.0, 32767.0, __VA_ARGS__)                                                \
    X(U16, uint16_t, 0.0, 65535.0, __VA_ARGS__)                                                    \
    X(I32, int32_t, -0x1p31, 2147483647.0, __VA_ARGS__)                                            \
    X(I64, int64_t, -0x1p63, 0x1.fffffffffffffp62, __VA_ARGS__)
/* of a double */
#define E_SATURATE(to, lo, hi) (a != a ? 0 : (to)(a<(lo) ? (lo) : a>(hi) ? (hi) : a))
#define E_TRUTH(F)             (a != 0)

/* ---- comparisons and logic ---- */

#define E_EQUAL(F)      (a == b)
#define E_LESS(F)       (a < b)
#define E_LESS_EQ(F)    (a <= b)
#define E_GREATER(F)    (a > b)
#define E_GREATER_EQ(F) (a >= b)
#define E_AND(F)        (a & b)
#define E_OR(F)         (a | b)
#define E_XOR(F)        (a ^ b)
#define E_NOT(F)        (!a)
#define E_ISNAN(F)      (a != a)
#define E_SIGNBIT(F)    (signbit(a) != 0)
/* p[0], p[1]: whether negative and positive infinity count */
#define E_ISINF(F) ((a == -INFINITY && p[0]) || (a == INFINITY && p[1]))

/* ---- running sums of exponentials ---- */

/* log(exp(a) + exp(b)); of equal infinities that infinity */
GRADD_HD double gradd_log_add(double a, double b) {
    if (a != a || b != b) return NAN;
    const double low = a < b ? a : b, high = a < b ? b : a;
    if (low == high && isinf(low)) return low;
    return high + log1p(exp(low - high));
}
/* Of the gradient: what a sum at the next place counts here. 1 of equal ones, also of infinities.
 */
GRADD_HD double gradd_log_share(double here, double next) {
    return here != next ? exp(here - next) : 1;
}

#endif
