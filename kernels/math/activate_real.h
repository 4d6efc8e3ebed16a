/* Activations and their slopes in one go, written once for f32 and f64.
 *
 * Included by kernels/math/activate.h with REAL (the C type), NAME(x) (appends a suffix), EXP and
 * TANH defined, once per type; there is no guard on purpose. Each function gives value and slope; a
 * caller that uses one of them pays for that one, because all are inlined. No branches, so that
 * they vectorise inside `#pragma omp simd` loops.
 */

typedef struct NAME(act_s) {
    REAL value, slope;
} NAME(act_t);

GRADD_HD NAME(act_t) NAME(act_relu)(REAL x, REAL alpha) {
    (void)alpha;
    return (NAME(act_t)){x < 0 ? 0 : x, (REAL) !(x <= 0)}; /* as torch: of NaN NaN, and 1 */
}

GRADD_HD NAME(act_t) NAME(act_sigmoid)(REAL x, REAL alpha) {
    (void)alpha;
    const REAL s = 1 / (1 + EXP(-x));
    return (NAME(act_t)){s, s * (1 - s)};
}

/* x sigmoid(alpha x) */
GRADD_HD NAME(act_t) NAME(act_swish)(REAL x, REAL alpha) {
    const REAL s = 1 / (1 + EXP(-alpha * x));
    return (NAME(act_t)){x * s, s * (1 + alpha * x * (1 - s))};
}

/* x P(x) with the normal distribution P; its density needs exp(-x^2 / 2) as well. */
GRADD_HD NAME(act_t) NAME(act_gelu)(REAL x, REAL alpha) {
    (void)alpha;
    const REAL e = EXP(x * x * (REAL)-0.5), tail = NAME(normal_tail)(x, e);
    const REAL p = x < 0 ? tail : 1 - tail;
    return (NAME(act_t)){x * p, p + x * e * (REAL)0.39894228040143268};
}

GRADD_HD NAME(act_t) NAME(act_gelu_tanh)(REAL x, REAL alpha) {
    (void)alpha;
    const REAL s = x * x, c = (REAL)0.79788456080286536;
    const REAL t = TANH(c * (x + (REAL)0.044715 * s * x));
    const REAL half = (REAL)0.5 * (1 + t);
    const REAL inner = c * (1 + (REAL)0.134145 * s);
    return (NAME(act_t)){x * half, half + (REAL)0.5 * x * (1 - t * t) * inner};
}
