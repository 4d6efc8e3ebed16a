/* SolveTriangular: A X = B for X, A triangular, by substitution; torch.linalg.solve_triangular.
 *
 * Math: lower (or, with `upper`, upper) triangle of A [..., n, n], B and X [..., n, k], the same
 * leading axes; the other triangle is not read. `unit`: the diagonal counts as ones and is not read
 * either. `transposed` solves A^T X = B, of which the gradient is made. Saved: A and X.
 *     dB = A^-T dX;  dA = -dB X^T in the triangle, of `transposed` -X dB^T
 */
#include <string.h>

#include "kernels/contract/kernel.h"
#include "kernels/describe/dispatch.h"
#include "kernels/describe/triangular.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

enum { COLUMNS = 64 }; /* of a task */

/* ---- kernels --------------------------------------------------------------------------------- */

/* The first `width` columns from x on, k apart by rows; x may be b. */
#define SOLVE(T)                                                                                   \
    GRADD_MULTIARCH static void solve_##T(const gradd_triangular_t *s, const T *a, const T *b,     \
                                          T *x, int64_t width) {                                   \
        for (int64_t step = 0; step < s->n; step++) {                                              \
            const int64_t i = s->ascends ? step : s->n - 1 - step;                                 \
            T row[COLUMNS];                                                                        \
            memcpy(row, b + i * s->k, (size_t)width * sizeof(T));                                  \
            for (int64_t before = 0; before < step; before++) {                                    \
                const int64_t j = s->ascends ? before : s->n - 1 - before;                         \
                const T factor = a[i * s->by_row + j * s->by_column], *known = x + j * s->k;       \
                _Pragma("omp simd") for (int64_t c = 0; c < width; c++) row[c] -=                  \
                    factor * known[c];                                                             \
            }                                                                                      \
            const T own = s->unit ? 1 : a[i * (s->n + 1)];                                         \
            T *to = x + i * s->k;                                                                  \
            _Pragma("omp simd") for (int64_t c = 0; c < width; c++) to[c] = row[c] / own;          \
        }                                                                                          \
    }

SOLVE(float)
SOLVE(double)

static gradd_status_t compute_solve(const gradd_launch_t *r) {
    const gradd_triangular_t s = gradd_triangular_of(&r->in[1].type, r->attrs);
    const int64_t parts = (s.k + COLUMNS - 1) / COLUMNS;
    const bool large = s.batch * s.n * s.n * s.k >= GRADD_PARALLEL_MIN;
#pragma omp parallel for schedule(static) if (large)
    for (int64_t task = 0; task < s.batch * parts; task++) {
        const int64_t from = task % parts * COLUMNS, left = s.k - from;
        const int64_t of_a = task / parts * s.n * s.n, of_b = task / parts * s.n * s.k + from;
        const int64_t width = left < COLUMNS ? left : COLUMNS;
        if (r->in[0].type.dtype == GRADD_DT_F32)
            solve_float(&s, (const float *)r->in[0].data + of_a,
                        (const float *)r->in[1].data + of_b, (float *)r->out[0].data + of_b, width);
        else
            solve_double(&s, (const double *)r->in[0].data + of_a,
                         (const double *)r->in[1].data + of_b, (double *)r->out[0].data + of_b,
                         width);
    }
    return GRADD_OK;
}

static gradd_status_t ref_solve(const gradd_launch_t *r) {
    const gradd_triangular_t s = gradd_triangular_of(&r->in[1].type, r->attrs);
    GRADD_SWITCH_FLOAT(r->in[0].type.dtype, T, {
        for (int64_t lane = 0; lane < s.batch * s.k; lane++) {
            const T *a = (const T *)r->in[0].data + lane / s.k * s.n * s.n;
            const int64_t base = lane / s.k * s.n * s.k + lane % s.k;
            const T *b = (const T *)r->in[1].data + base;
            T *x = (T *)r->out[0].data + base;
            for (int64_t step = 0; step < s.n; step++) {
                const int64_t i = s.ascends ? step : s.n - 1 - step;
                double sum = (double)b[i * s.k];
                for (int64_t before = 0; before < step; before++) {
                    const int64_t j = s.ascends ? before : s.n - 1 - before;
                    sum -= (double)a[i * s.by_row + j * s.by_column] * (double)x[j * s.k];
                }
                x[i * s.k] = (T)(s.unit ? sum : sum / (double)a[i * (s.n + 1)]);
            }
        }
    });
    return GRADD_OK;
}

/* ---- shape and gradient rules ---------------------------------------------------------------- */

static gradd_status_t infer_solve(gradd_infer_t *c) {
    const gradd_type_t *a = &c->in[0].type, *b = &c->in[1].type;
    const int last = b->rank - 1;
    char left[GRADD_TYPE_TEXT], right[GRADD_TYPE_TEXT];
    bool fits = a->rank == b->rank && last >= 1 && a->dims[last] == a->dims[last - 1];
    for (int i = 0; fits && i < last; i++)
        fits = a->dims[i] == b->dims[i];
    if (!fits || a->dtype != b->dtype)
        return GRADD_FAIL(GRAPH,
                          "%s and %s do not fit: expected [..., n, n] and [..., n, k] of one type",
                          gradd_type_format(a, left), gradd_type_format(b, right));
    c->out[0] = *b;
    return GRADD_OK;
}

static gradd_val_t turned(gradd_builder_t *b, gradd_val_t v) {
    const int rank = gradd_val_type(b, v)->rank;
    int64_t perm[GRADD_MAX_RANK];
    for (int i = 0; i < rank; i++)
        perm[i] = i;
    perm[rank - 2] = rank - 1, perm[rank - 1] = rank - 2;
    return gradd_transpose(b, v, perm, rank);
}

static gradd_status_t grad_solve(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    const int64_t upper = gradd_attr_int(g->attrs, "upper", 0);
    const int64_t unit = gradd_attr_int(g->attrs, "unit", 0);
    const int64_t other = !gradd_attr_int(g->attrs, "transposed", 0);
    const gradd_attr_t attrs[] = {gradd_make_int("upper", upper), gradd_make_int("unit", unit),
                                  gradd_make_int("transposed", other)};
    const gradd_val_t in[] = {g->in[0], g->dout[0]};
    const gradd_val_t db = gradd_emit_attrs(b, "SolveTriangular", in, 2, attrs, 3);
    if (g->need[1]) g->din[1] = db;
    if (!g->need[0]) return b->status;
    const gradd_val_t x = g->output(g, 0), rows = other ? db : x, columns = other ? x : db;
    gradd_val_t da = GRADD_EMIT(b, "Neg", GRADD_EMIT(b, "MatMul", rows, turned(b, columns)));
    const gradd_attr_t triangle = gradd_make_int("upper", upper);
    const int64_t diagonal = unit ? upper ? 1 : -1 : 0;
    const gradd_val_t cut[] = {da, gradd_const_scalar(b, GRADD_DT_I64, (double)diagonal)};
    g->din[0] = gradd_emit_attrs(b, "Trilu", cut, 2, &triangle, 1);
    return b->status;
}

static void cost_solve(const gradd_infer_t *c, gradd_cost_t *cost) {
    const int64_t n = c->in[0].type.dims[c->in[0].type.rank - 1];
    cost->flops = (double)gradd_type_count(&c->out[0]) * (double)n;
}

/* ---- cases and rows -------------------------------------------------------------------------- */

GRADD_OPS(triangular,
          GRADD_OP("SolveTriangular", "com.gradd", 1, (2, 2), (1, 1), .types = {GRADD_T_FLOAT},
                   .attrs = GRADD_ATTR_LIST({"upper", GRADD_ATTR_INT, false},
                                            {"unit", GRADD_ATTR_INT, false},
                                            {"transposed", GRADD_ATTR_INT, false}),
                   .infer = infer_solve, .grad = grad_solve, .ref = GRADD_REF(ref_solve),
                   .cases = GRADD_CASES(
                       {.text = "f32[3,3]:(1,2) f32[3,2]"},
                       {.text = "f32[2,4,4]:(1,2) f32[2,4,3] | upper=1"},
                       {.text = "f32[2,3,3] f32[2,3,4] | unit=1"},
                       {.text = "f32[2,3,3] f32[2,3,4] | unit=1 upper=1"},
                       {.text = "f32[2,4,4]:(1,2) f32[2,4,3] | transposed=1"},
                       {.text = "f32[4,4]:(1,2) f32[4,3] | transposed=1 upper=1"},
                       {.text = "f32[1,1]:(1,2) f32[1,1]"}, {.text = "f32[2,0,0] f32[2,0,3]"},
                       {.text = "f32[2,2]:(1,2) f32[2,0]"},
                       {.text = "f32[2,2]={0,9,1,2} f32[2,1]={1,2}", .grad_tol = -1},
                       {.text = "f32[5,33,33]:(0.1,0.2) f32[5,33,70] | unit=1", .grad_tol = -1},
                       {.text = "f32[3,40,40]:(1,2) f32[3,40,65] | upper=1", .grad_tol = -1})));

GRADD_KERNELS(cpu, triangular,
              GRADD_KERNEL("SolveTriangular", "substitution", .types = {GRADD_T_F32_F64},
                           .inplace = 2, .compute = compute_solve, .cost = cost_solve));
