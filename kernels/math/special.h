/* Special functions in double, for all devices: gamma and the inverse of the error function.
 *
 * Relative errors are a few units of the 15th digit, away from zeros. At poles they are what
 * PyTorch says. Pure functions.
 */
#ifndef GRADD_KERNELS_MATH_SPECIAL_H
#define GRADD_KERNELS_MATH_SPECIAL_H

#include <math.h>

#include "kernels/math/host_device.h"

#define GRADD_PI 3.14159265358979323846

/* log |gamma(x)| */
GRADD_HD double gradd_lgamma(double x) {
#if defined(__CUDACC__) || defined(_WIN32) /* where it writes nothing */
    return lgamma(x);
#else
    int sign; /* lgamma() writes it to a variable of the process */
    return lgamma_r(x, &sign);
#endif
}

/* The slope of gradd_lgamma: by reflection for x < 0, then upwards to where the asymptotic series
 * of Bernoulli's numbers has converged. */
GRADD_HD double gradd_digamma(double x) {
    double sum = 0;
    if (x == 0) return copysign(INFINITY, -x);
    if (x < 0) {
        if (x == floor(x)) return NAN;
        sum = -GRADD_PI / tan(GRADD_PI * (x - trunc(x)));
        x = 1 - x;
    }
    for (; x < 10; x++)
        sum -= 1 / x;
    const double z = 1 / (x * x);
    const double series =
        z *
        (1.0 / 12 -
         z * (1.0 / 120 -
              z * (1.0 / 252 - z * (1.0 / 240 - z * (1.0 / 132 - z * (691.0 / 32760 - z / 12))))));
    return sum + log(x) - 0.5 / x - series;
}

/* The slope of gradd_digamma. */
GRADD_HD double gradd_trigamma(double x) {
    double sum = 0, sign = 1;
    if (x < 0.5) {
        const double s = sin(GRADD_PI * x);
        sum = -GRADD_PI * GRADD_PI / (s * s);
        sign = -1;
        x = 1 - x;
    }
    for (; x < 10; x++)
        sum += 1 / (x * x);
    const double z = 1 / (x * x);
    const double series =
        1 + 0.5 / x +
        z * (1.0 / 6 - z * (1.0 / 30 - z * (1.0 / 42 - z * (1.0 / 30 - z * (5.0 / 66)))));
    return sign * (sum + series / x);
}

/* y with erf(y) = x: an approximation of a few digits, which Newton's steps double. Towards the
 * ends the steps use 1 - |x|, which is exact. */
GRADD_HD double gradd_erfinv(double x) {
    const double size = fabs(x);
    if (!(size < 1)) return size == 1 ? copysign(INFINITY, x) : NAN;
    const double l = log1p(-x * x), h = 2 / (GRADD_PI * 0.147) + l / 2;
    double y = sqrt(sqrt(h * h - l / 0.147) - h); /* Winitzki's */
    for (int i = 0; i < 4; i++) {
        const double off = size < 0.5 ? erf(y) - size : (1 - size) - erfc(y);
        const double step = off / (1.12837916709551257 * exp(-y * y));
        y -= step / (1 + y * step); /* Halley's */
    }
    return copysign(size < 1e-9 ? size * 0.886226925452758014 : y, x);
}

#endif
