/* Elementwise application of a row function to broadcast operands: the engine behind every
 * elementwise, comparison and activation operator.
 *
 * A row function sees n elements whose operands either advance by one element (step 1) or stay put
 * (step 0). gradd_map_rows merges dimensions until the innermost stretch is as long as the operands
 * allow, so same-shape, scalar, leading- and trailing-broadcast operands all reach long stretches,
 * and divides the stretches among threads. With `ref` it visits one element at a time with an index
 * division, which defines the result.
 *
 * Row functions are made by the GRADD_ROWS_* macros from an expression in a, b, c (operands), p
 * (float parameters) and F, a prefix: F##exp(a) is the vector form in the fast function and libm
 * in double in the reference (kernels/math/formulas.h).
 */
#ifndef GRADD_KERNELS_CPU_MAP_H
#define GRADD_KERNELS_CPU_MAP_H

#include "kernels/contract/op.h"
#include "kernels/describe/dispatch.h"
#include "kernels/math/formulas.h"

#define GRADD_MAP_MAX_IN 3

typedef void (*gradd_row_fn)(int64_t n, void *out, const void *const *in, const int64_t *step,
                             const double *p);

/* Functions per element type of the first float or integer operand; NULL = not supported. `half` is
 * for rows that only move elements: where it is NULL, bf16 and f16 go through f32, piece by piece
 * (widened into a small buffer, the result rounded once), so a row function never sees them. */
typedef struct gradd_row_functions_s {
    gradd_row_fn f32, f64, i32, i64, boolean, half;
    int decides; /* the operand whose type picks among them */
} gradd_row_functions_t;

/* out may be exactly in[k] where their types are equal. n_in <= GRADD_MAP_MAX_IN. Picks by the
 * dtype of in[rows->decides], fails with UNSUPPORTED if there is none. */
gradd_status_t gradd_map_rows(const gradd_row_functions_t *rows, const gradd_view_t *out,
                              const gradd_view_t *in, int n_in, const double *p, bool ref);

/* ---- row functions ---- */

/* Unary. U = stored type, T = operand type, R = type the reference computes in, E(F) = value. */
#define GRADD_ROW1(name, suffix, U, T, R, E)                                                       \
    GRADD_MULTIARCH static void row_##name##_##suffix(int64_t n, void *out, const void *const *in, \
                                                      const int64_t *step, const double *p) {      \
        U *z = out;                                                                                \
        const T *x = in[0];                                                                        \
        (void)step, (void)p;                                                                       \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                      \
            const T a = x[i];                                                                      \
            z[i] = (U)(E(v));                                                                      \
        }                                                                                          \
    }                                                                                              \
    static void ref_##name##_##suffix(int64_t n, void *out, const void *const *in,                 \
                                      const int64_t *step, const double *p) {                      \
        const R a = (R) * (const T *)in[0];                                                        \
        (void)n, (void)step, (void)p;                                                              \
        *(U *)out = (U)(E(r));                                                                     \
    }

#define GRADD_ROW2_LOOP(U, TA, TB, fetch_a, fetch_b, E)                                            \
    {                                                                                              \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                      \
            const TA a = fetch_a;                                                                  \
            const TB b = fetch_b;                                                                  \
            z[i] = (U)(E(v));                                                                      \
        }                                                                                          \
    }

/* Binary; both operands of type T. */
#define GRADD_ROW2(name, suffix, U, T, R, E)                                                       \
    GRADD_MULTIARCH static void row_##name##_##suffix(int64_t n, void *out, const void *const *in, \
                                                      const int64_t *step, const double *p) {      \
        U *z = out;                                                                                \
        const T *x = in[0], *y = in[1], x0 = *x, y0 = *y;                                          \
        (void)p;                                                                                   \
        if (step[0] && step[1])                                                                    \
            GRADD_ROW2_LOOP(U, T, T, x[i], y[i], E)                                                \
        else if (step[0])                                                                          \
            GRADD_ROW2_LOOP(U, T, T, x[i], y0, E)                                                  \
        else if (step[1])                                                                          \
            GRADD_ROW2_LOOP(U, T, T, x0, y[i], E)                                                  \
        else                                                                                       \
            GRADD_ROW2_LOOP(U, T, T, x0, y0, E)                                                    \
    }                                                                                              \
    static void ref_##name##_##suffix(int64_t n, void *out, const void *const *in,                 \
                                      const int64_t *step, const double *p) {                      \
        const R a = (R) * (const T *)in[0], b = (R) * (const T *)in[1];                            \
        (void)n, (void)step, (void)p;                                                              \
        *(U *)out = (U)(E(r));                                                                     \
    }

/* Families of types. The reference of a float computes in double, of an integer in itself. */
#define GRADD_ROWS1_FLOAT(name, E)                                                                 \
    GRADD_ROW1(name, f32, float, float, double, E)                                                 \
    GRADD_ROW1(name, f64, double, double, double, E)
#define GRADD_ROWS1_INT(name, E)                                                                   \
    GRADD_ROW1(name, i32, int32_t, int32_t, int32_t, E)                                            \
    GRADD_ROW1(name, i64, int64_t, int64_t, int64_t, E)
#define GRADD_ROWS2_FLOAT(name, E)                                                                 \
    GRADD_ROW2(name, f32, float, float, double, E)                                                 \
    GRADD_ROW2(name, f64, double, double, double, E)
#define GRADD_ROWS2_INT(name, E)                                                                   \
    GRADD_ROW2(name, i32, int32_t, int32_t, int32_t, E)                                            \
    GRADD_ROW2(name, i64, int64_t, int64_t, int64_t, E)

#define GRADD_ROW_F64(row) (GRADD_HAS_F64 ? (row) : NULL)
#define GRADD_TABLE_FLOAT(name)                                                                    \
    static const gradd_row_functions_t name##_rows = {.f32 = row_##name##_f32,                     \
                                                      .f64 = GRADD_ROW_F64(row_##name##_f64)};     \
    static const gradd_row_functions_t name##_refs = {.f32 = ref_##name##_f32,                     \
                                                      .f64 = GRADD_ROW_F64(ref_##name##_f64)};
#define GRADD_TABLE_NUM(name)                                                                      \
    static const gradd_row_functions_t name##_rows = {.f32 = row_##name##_f32,                     \
                                                      .f64 = GRADD_ROW_F64(row_##name##_f64),      \
                                                      .i32 = row_##name##_i32,                     \
                                                      .i64 = row_##name##_i64};                    \
    static const gradd_row_functions_t name##_refs = {.f32 = ref_##name##_f32,                     \
                                                      .f64 = GRADD_ROW_F64(ref_##name##_f64),      \
                                                      .i32 = ref_##name##_i32,                     \
                                                      .i64 = ref_##name##_i64};

/* compute_<name> and compute_<name>_ref of a row whose operands all map directly and that has no
 * parameters. */
#define GRADD_MAP_COMPUTE(name)                                                                    \
    static gradd_status_t compute_##name(const gradd_launch_t *r) {                                \
        return gradd_map_rows(&name##_rows, r->out, r->in, r->n_in, NULL, false);                  \
    }                                                                                              \
    static gradd_status_t compute_##name##_ref(const gradd_launch_t *r) {                          \
        return gradd_map_rows(&name##_refs, r->out, r->in, r->n_in, NULL, true);                   \
    }

#endif
