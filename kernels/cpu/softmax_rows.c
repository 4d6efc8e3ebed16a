/* Row kernels of softmax. See softmax_rows.h. */
#include "kernels/cpu/softmax_rows.h"

#include "kernels/cpu/map.h"

enum { CHAIN = 512 };

#define ROW_KERNELS(T, S)                                                                          \
    GRADD_MULTIARCH T gradd_row_max_##S(const T *x, int64_t n) {                                   \
        T best = x[0];                                                                             \
        int nan = 0;                                                                               \
        _Pragma("omp simd reduction(max : best) reduction(| : nan)") for (int64_t i = 0; i < n;    \
                                                                          i++) {                   \
            best = x[i] > best ? x[i] : best;                                                      \
            nan |= x[i] != x[i];                                                                   \
        }                                                                                          \
        return nan ? (T)NAN : best;                                                                \
    }                                                                                              \
    GRADD_MULTIARCH double gradd_row_exp_##S(const T *x, int64_t n, T shift, T *z) {               \
        double total = 0;                                                                          \
        for (int64_t from = 0; from < n; from += CHAIN) {                                          \
            const int64_t to = n - from < CHAIN ? n : from + CHAIN;                                \
            T sum = 0, ones = 0; /* apart: beside a 1 the others would lose their digits */        \
            if (z) {                                                                               \
                _Pragma("omp simd reduction(+ : sum, ones)") for (int64_t i = from; i < to; i++) { \
                    const T e = vexp(x[i] - shift);                                                \
                    z[i] = e;                                                                      \
                    sum += e == 1 ? 0 : e;                                                         \
                    ones += e == 1;                                                                \
                }                                                                                  \
            } else {                                                                               \
                _Pragma("omp simd reduction(+ : sum, ones)") for (int64_t i = from; i < to; i++) { \
                    const T e = vexp(x[i] - shift);                                                \
                    sum += e == 1 ? 0 : e;                                                         \
                    ones += e == 1;                                                                \
                }                                                                                  \
            }                                                                                      \
            total += (double)sum + (double)ones;                                                   \
        }                                                                                          \
        return total;                                                                              \
    }
ROW_KERNELS(float, f32)
ROW_KERNELS(double, f64)
