/* Row kernels of softmax. See softmax_rows.h. */
#include "kernels/cpu/softmax_rows.h"

#include "kernels/cpu/map.h"
#include "kernels/cpu/row_lanes.h"

enum { CHAIN_BYTES = 2048 };

/* What is not 1; ones are counted apart, for beside a 1 the others would lose their digits. */
#define BELOW_ONE(AT, S, i)           BELOW_ONE_##AT(S, x + (i))
#define BELOW_ONE_gradd_lane_at(S, x) (*(x) == 1 ? 0 : *(x))
#define BELOW_ONE_gradd_lanes_at(S, x)                                                             \
    (gradd_lanes_##S##_t)((gradd_lanes_at_##S(x) != 1) & *(const mask_##S##_t *)(x))
typedef int32_t mask_f32_t
    __attribute__((vector_size(GRADD_LANE_BYTES), aligned(sizeof(float)), may_alias));
typedef int64_t mask_f64_t
    __attribute__((vector_size(GRADD_LANE_BYTES), aligned(sizeof(double)), may_alias));

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
    GRADD_ROW_SUM(below_one_##S, (const T *x, int64_t n), S, S, T, BELOW_ONE)                      \
    GRADD_MULTIARCH double gradd_row_exp_##S(const T *x, int64_t n, T shift, T *z) {               \
        enum { chain = CHAIN_BYTES / sizeof(T) };                                                  \
        double total = 0;                                                                          \
        for (int64_t from = 0; from < n; from += chain) {                                          \
            const int64_t m = n - from < chain ? n - from : chain;                                 \
            const T *y = x + from;                                                                 \
            T room[chain], *e = z ? z + from : room;                                               \
            int ones = 0;                                                                          \
            _Pragma("omp simd reduction(+ : ones)") for (int64_t i = 0; i < m; i++) {              \
                const T term = vexp(y[i] - shift);                                                 \
                e[i] = term;                                                                       \
                ones += term == 1;                                                                 \
            }                                                                                      \
            total += (double)below_one_##S(e, m) + (double)ones;                                   \
        }                                                                                          \
        return total;                                                                              \
    }
ROW_KERNELS(float, f32)
ROW_KERNELS(double, f64)
