/* Activations with their slopes: act_<name>_<type>(x, alpha) -> {value, slope}, for f32 and f64.
 *
 * relu, sigmoid, swish (x sigmoid(alpha x)), gelu (by the normal distribution), gelu_tanh. The f32
 * forms vectorise; the f64 forms call libm. Used by the kernels of Gelu, Swish and
 * GatedActivation, so that all of them give the same numbers. alpha is ignored but by swish.
 */
#ifndef GRADD_KERNELS_MATH_ACTIVATE_H
#define GRADD_KERNELS_MATH_ACTIVATE_H

#include "kernels/math/vec.h"

/* The normal distribution at -|x|, given e = exp(-x^2 / 2): e q(|x|) with a smooth q, which is a
 * polynomial in 1 / (1 + 0.3 |x|): our own minimax fit, relative error 6e-8 up to |x| = 14.5,
 * where e vanishes. */
GRADD_HD float normal_tail_f32(float x, float e) {
    const float t = 1.0f / GRADD_FMA(0.3f, fabsf(x), 1.0f);
    float q = GRADD_FMA(0.0384073915f, t, -0.169307455f);
    q = GRADD_FMA(q, t, 0.228951766f);
    q = GRADD_FMA(q, t, -0.0768396451f);
    q = GRADD_FMA(q, t, 0.142765262f);
    q = GRADD_FMA(q, t, 0.0945858692f);
    q = GRADD_FMA(q, t, 0.121945262f);
    q = GRADD_FMA(q, t, 0.119484207f);
    q = GRADD_FMA(q, t, 7.37237692e-06f);
    return q * e;
}

GRADD_HD double normal_tail_f64(double x, double e) {
    (void)e;
    return 0.5 * erfc(fabs(x) * 0.70710678118654752);
}

#define REAL    float
#define NAME(x) x##_f32
#define EXP     gradd_vexpf
#define TANH    gradd_vtanhf
#include "kernels/math/activate_real.h"
#undef REAL
#undef NAME
#undef EXP
#undef TANH
#define REAL    double
#define NAME(x) x##_f64
#define EXP     exp
#define TANH    tanh
#include "kernels/math/activate_real.h"
#undef REAL
#undef NAME
#undef EXP
#undef TANH

/* For the expressions of kernels/math/formulas.h: v##gelu_value(x, alpha), r##gelu_value and so on.
 */
#ifdef __cplusplus
#define GRADD_ACT(name, act, of)                                                                   \
    GRADD_HD float name(float x, float alpha) {                                                    \
        return act##_f32(x, alpha).of;                                                             \
    }                                                                                              \
    GRADD_HD double name(double x, double alpha) {                                                 \
        return act##_f64(x, alpha).of;                                                             \
    }
GRADD_ACT(vgelu_value, act_gelu, value)
GRADD_ACT(vgelu_slope, act_gelu, slope)
GRADD_ACT(vswish_value, act_swish, value)
GRADD_ACT(vswish_slope, act_swish, slope)
#undef GRADD_ACT
#else
#define GRADD_ACT(act, x, alpha) _Generic((x), float: act##_f32, double: act##_f64)((x), (alpha))
#define vgelu_value(x, alpha)    GRADD_ACT(act_gelu, x, alpha).value
#define vgelu_slope(x, alpha)    GRADD_ACT(act_gelu, x, alpha).slope
#define vswish_value(x, alpha)   GRADD_ACT(act_swish, x, alpha).value
#define vswish_slope(x, alpha)   GRADD_ACT(act_swish, x, alpha).slope
#define rgelu_value(x, alpha)    ((x) * 0.5 * (1 + erf((x) * 0.70710678118654752)))
#define rgelu_slope(x, alpha)                                                                      \
    (0.5 * (1 + erf((x) * 0.70710678118654752)) + (x) * exp((x) * (x) / -2) * 0.39894228040143268)
#define rsigmoid(x)            (1 / (1 + exp(-(x))))
#define rswish_value(x, alpha) ((x) * rsigmoid((alpha) * (x)))
#define rswish_slope(x, alpha)                                                                     \
    (rsigmoid((alpha) * (x)) * (1 + (alpha) * (x) * (1 - rsigmoid((alpha) * (x)))))
#endif

#endif
