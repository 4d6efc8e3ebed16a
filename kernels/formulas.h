/* What elementwise operators compute, once for all devices: expressions in a, b and c (operands)
 * and F, a prefix that says in which way. F##exp(a) is the vectorisable form with v, and libm in
 * double with r, for which the operands are double. The CPU makes row functions of them
 * (cpu/map.h), a GPU functors (cuda/map.h): the same bits.
 *
 * GRADD_K(x) is a constant of the type of a.
 */
#ifndef GRADD_KERNELS_FORMULAS_H
#define GRADD_KERNELS_FORMULAS_H

#include "kernels/vec.h"

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

#define E_SQUARE(F) (a * a)
#define E_CUBE(F)   (a * a * a)
#define E_RSQRT(F)  (1 / F##sqrt(a))

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
