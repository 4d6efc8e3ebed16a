/* Accuracy of the vectorisable f32 functions against libm in double, in units in the last place,
 * over the whole range of exponents, and their behaviour at the special values. */
#include "kernels/math/vec.h"

#include "tests/test.h"

#include <float.h>
#include <stdio.h>

typedef struct fn_s {
    const char *name;
    float (*fast)(float);
    double (*exact)(double);
    float lo, hi;
    double limit;
} fn_t;

static double ulp_error(float got, double want) {
    if (isnan(want)) return isnan(got) ? 0 : INFINITY;
    float rounded = (float)want;
    if (isinf(rounded)) return got == rounded ? 0 : INFINITY;
    float size = fabsf(rounded) < FLT_MIN ? FLT_MIN : fabsf(rounded);
    double ulp = (double)nextafterf(size, INFINITY) - (double)size;
    return fabs((double)got - want) / ulp;
}

static void sweep(const fn_t *f) {
    double worst = 0;
    float worst_at = 0;
    for (uint64_t bits = 0; bits <= UINT32_MAX; bits += 997) {
        float x = gradd_bits_f32((uint32_t)bits);
        if (!(x >= f->lo && x <= f->hi)) continue;
        double error = ulp_error(f->fast(x), f->exact((double)x));
        if (error > worst) {
            worst = error;
            worst_at = x;
        }
    }
    printf("%-6s largest error %.2f ulp at %a (%g)\n", f->name, worst, (double)worst_at,
           (double)worst_at);
    CHECK(worst <= f->limit);
}

TEST(errors_stay_below_three_ulp) {
    static const fn_t fns[] = {
        {"exp",          gradd_vexpf,       exp,   -INFINITY,             INFINITY,             2.0},
        {"log",          gradd_vlogf,       log,   0,                     INFINITY,             2.0},
        {"log1p",        gradd_vlog1pf,     log1p, 0,                     INFINITY,             3.0},
        {"expm1",        gradd_vexpm1f,     expm1, -INFINITY,             INFINITY,             3.0},
        {"log1p of any", gradd_vlog1p_anyf, log1p, -INFINITY,             INFINITY,             3.0},
        {"tanh",         gradd_vtanhf,      tanh,  -INFINITY,             INFINITY,             3.0},
        {"erf",          gradd_verff,       erf,   -INFINITY,             INFINITY,             3.0},
        {"sin",          gradd_vsinf,       sin,   -GRADD_VEC_SINCOS_MAX, GRADD_VEC_SINCOS_MAX, 2.0},
        {"cos",          gradd_vcosf,       cos,   -GRADD_VEC_SINCOS_MAX, GRADD_VEC_SINCOS_MAX, 2.0},
    };
    for (size_t i = 0; i < sizeof fns / sizeof fns[0]; i++)
        sweep(&fns[i]);
}

TEST(special_values) {
    CHECK(isnan(gradd_vexpf(NAN)) && isnan(gradd_vlogf(NAN)) && isnan(gradd_vtanhf(NAN)));
    CHECK(isnan(gradd_verff(NAN)) && isnan(gradd_vlogf(-1.0f)));
    CHECK(gradd_vexpf(INFINITY) == INFINITY && gradd_vexpf(-INFINITY) == 0.0f);
    CHECK(gradd_vlogf(0.0f) == -INFINITY && gradd_vlogf(INFINITY) == INFINITY);
    CHECK(gradd_vexpf(0.0f) == 1.0f && gradd_vlogf(1.0f) == 0.0f);
    CHECK(signbit(gradd_vtanhf(-0.0f)) && signbit(gradd_verff(-0.0f)));
    CHECK(gradd_vtanhf(INFINITY) == 1.0f && gradd_verff(-INFINITY) == -1.0f);
}
