/* Reductions over axes.
 *
 * Math: z[kept] = fold over reduced of f(x). Shapes: adjacent dimensions of one kind are merged, so
 * every reduction is an alternation of kept (K) and reduced (R) dimensions; it ends either in R
 * (a stretch is folded) or in K (whole stretches are folded into a stretch of accumulators). Floats
 * accumulate in short f32 chains that flow into double. A reduction to few elements is cut into
 * pieces of fixed size, whose partial results are combined in order. bf16 and f16 are widened where
 * they are read, and the result is rounded once. Saved for backward: the result of Max, Min, L2,
 * LogSumExp. Ties of Max and Min share evenly. */
#include "kernels/contract/kernel.h"
#include "kernels/cpu/half.h"
#include "kernels/cpu/parts.h"
#include "kernels/cpu/row_lanes.h"
#include "kernels/describe/dispatch.h"
#include "kernels/describe/reduction.h"
#include "kernels/math/vec.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rowwise.h"
#include "kernels/rules/rules.h"

#include <math.h>
#include <string.h>

/* ---- geometry ------------------------------------------------------------------------------- */

typedef enum { SUM, MEAN, SQUARES, NORM, MAXIMUM, MINIMUM, LOGSUMEXP, PRODUCT } kind_t;

/* ---- kernels: one stretch to one value ----------------------------------------------------------
 */

enum { CHAIN = 512, PIECE = 32768, COLUMNS = 1024, FLUSH = 16 };

/* Sums of bf16 and f16 run in f32 chains. */
#define WIDE_f32(x)    (x)
#define WIDE_f64(x)    (x)
#define WIDE_bf16(x)   gradd_bf16_f32(x)
#define WIDE_f16(x)    gradd_f16_f32(x)
#define NARROW_f32(x)  ((float)(x))
#define NARROW_f64(x)  (x)
#define NARROW_bf16(x) gradd_f32_bf16((float)(x))
#define NARROW_f16(x)  gradd_f32_f16((float)(x))

#define FOLD_SUM(C, name, SUM)                                                                     \
    GRADD_MULTIARCH static double name(const C *x, int64_t n) {                                    \
        double total = 0;                                                                          \
        for (int64_t from = 0; from < n; from += CHAIN) {                                          \
            const int64_t m = n - from < CHAIN ? n - from : CHAIN;                                 \
            const C *y = x + from;                                                                 \
            total += (double)SUM;                                                                  \
        }                                                                                          \
        return total;                                                                              \
    }
FOLD_SUM(float, sum_f32, gradd_row_sum_f32(y, m))
FOLD_SUM(double, sum_f64, gradd_row_sum_f64(y, m))
FOLD_SUM(gradd_bf16_t, sum_bf16, gradd_row_sum_bf16(y, m))
FOLD_SUM(gradd_f16_t, sum_f16, gradd_row_sum_f16(y, m))
FOLD_SUM(float, squares_f32, gradd_row_squares_f32(y, 0, m))
FOLD_SUM(double, squares_f64, gradd_row_squares_f64(y, 0, m))
FOLD_SUM(gradd_bf16_t, squares_bf16, gradd_row_squares_bf16(y, 0, m))
FOLD_SUM(gradd_f16_t, squares_f16, gradd_row_squares_f16(y, 0, m))

/* Maximum by comparison in lanes; NaN is found apart because a comparison would lose it. Of zeros,
 * whose signs a comparison does not see, it is the first one. */
#define FOLD_EXTREMUM(T, C, WIDE, name, op, pragma)                                                \
    GRADD_MULTIARCH static T name(const C *x, int64_t n) {                                         \
        T best = WIDE(x[0]);                                                                       \
        int nan = 0;                                                                               \
        _Pragma(pragma) for (int64_t i = 0; i < n; i++) {                                          \
            const T a = WIDE(x[i]);                                                                \
            best = EXTREMUM_##op(best, a);                                                         \
            nan |= a != a;                                                                         \
        }                                                                                          \
        if (nan) return (T)NAN;                                                                    \
        for (int64_t i = 0; best == 0 && i < n; i++)                                               \
            if (WIDE(x[i]) == 0) return WIDE(x[i]);                                                \
        return best;                                                                               \
    }
#define EXTREMUM_max(a, b) ((b) > (a) ? (b) : (a))
#define EXTREMUM_min(a, b) ((b) < (a) ? (b) : (a))
FOLD_EXTREMUM(float, float, WIDE_f32, max_f32, max,
              "omp simd reduction(max : best) reduction(| : nan)")
FOLD_EXTREMUM(double, double, WIDE_f64, max_f64, max,
              "omp simd reduction(max : best) reduction(| : nan)")
FOLD_EXTREMUM(float, gradd_bf16_t, WIDE_bf16, max_bf16, max,
              "omp simd reduction(max : best) reduction(| : nan)")
FOLD_EXTREMUM(float, gradd_f16_t, WIDE_f16, max_f16, max,
              "omp simd reduction(max : best) reduction(| : nan)")
FOLD_EXTREMUM(float, float, WIDE_f32, min_f32, min,
              "omp simd reduction(min : best) reduction(| : nan)")
FOLD_EXTREMUM(double, double, WIDE_f64, min_f64, min,
              "omp simd reduction(min : best) reduction(| : nan)")
FOLD_EXTREMUM(float, gradd_bf16_t, WIDE_bf16, min_bf16, min,
              "omp simd reduction(min : best) reduction(| : nan)")
FOLD_EXTREMUM(float, gradd_f16_t, WIDE_f16, min_f16, min,
              "omp simd reduction(min : best) reduction(| : nan)")

#define BY_TYPE(x, name)                                                                           \
    _Generic((x),                                                                                  \
        const float *: name##_f32,                                                                 \
        const double *: name##_f64,                                                                \
        const gradd_bf16_t *: name##_bf16,                                                         \
        const gradd_f16_t *: name##_f16)
#define fold_sum(x, n)     BY_TYPE(x, sum)(x, n)
#define fold_squares(x, n) BY_TYPE(x, squares)(x, n)
#define fold_max(x, n)     BY_TYPE(x, max)(x, n)
#define fold_min(x, n)     BY_TYPE(x, min)(x, n)

static double start_of(kind_t kind) {
    return kind == MAXIMUM ? -INFINITY : kind == MINIMUM ? INFINITY : 0;
}

static double join(kind_t kind, double a, double b) {
    if (kind == MAXIMUM) return a > b || a != a ? a : b;
    if (kind == MINIMUM) return a < b || a != a ? a : b;
    return a + b;
}

static double finish(kind_t kind, double total, int64_t n) {
    return kind == MEAN ? total / (double)n : kind == NORM ? sqrt(total) : total;
}

#define FOLD_RUN(T, name)                                                                          \
    static double name(kind_t kind, const T *x, int64_t n) {                                       \
        if (!n) return start_of(kind);                                                             \
        switch (kind) {                                                                            \
        case MAXIMUM:                                                                              \
            return (double)fold_max(x, n);                                                         \
        case MINIMUM:                                                                              \
            return (double)fold_min(x, n);                                                         \
        case SQUARES:                                                                              \
        case NORM:                                                                                 \
            return fold_squares(x, n);                                                             \
        default:                                                                                   \
            return fold_sum(x, n);                                                                 \
        }                                                                                          \
    }
FOLD_RUN(float, fold_f32)
FOLD_RUN(double, fold_f64)
FOLD_RUN(gradd_bf16_t, fold_bf16)
FOLD_RUN(gradd_f16_t, fold_f16)
#define fold_stretch(kind, x, n) BY_TYPE(x, fold)(kind, x, n)

/* ---- kernels: stretches into a stretch of accumulators
 * ------------------------------------------------ */

/* Adds rows x[0], x[step], ... to acc, through short chains in the element type. */
#define COLUMNS_SUM(T, C, name, term)                                                              \
    GRADD_MULTIARCH static void name(const C *x, int64_t rows, int64_t step, int64_t n,            \
                                     double *acc) {                                                \
        T chain[COLUMNS];                                                                          \
        for (int64_t from = 0; from < rows; from += FLUSH) {                                       \
            const int64_t to = rows - from < FLUSH ? rows : from + FLUSH;                          \
            memset(chain, 0, sizeof(T) * (size_t)n);                                               \
            for (int64_t r = from; r < to; r++) {                                                  \
                const C *y = x + r * step;                                                         \
                _Pragma("omp simd") for (int64_t i = 0; i < n; i++) chain[i] += term;              \
            }                                                                                      \
            _Pragma("omp simd") for (int64_t i = 0; i < n; i++) acc[i] += (double)chain[i];        \
        }                                                                                          \
    }
COLUMNS_SUM(float, float, columns_sum_f32, y[i])
COLUMNS_SUM(double, double, columns_sum_f64, y[i])
COLUMNS_SUM(float, gradd_bf16_t, columns_sum_bf16, WIDE_bf16(y[i]))
COLUMNS_SUM(float, gradd_f16_t, columns_sum_f16, WIDE_f16(y[i]))
COLUMNS_SUM(float, float, columns_squares_f32, y[i] * y[i])
COLUMNS_SUM(double, double, columns_squares_f64, y[i] * y[i])
COLUMNS_SUM(float, gradd_bf16_t, columns_squares_bf16, WIDE_bf16(y[i]) * WIDE_bf16(y[i]))
COLUMNS_SUM(float, gradd_f16_t, columns_squares_f16, WIDE_f16(y[i]) * WIDE_f16(y[i]))

#define COLUMNS_FOLD(T, S)                                                                         \
    static void columns_##S(kind_t kind, const T *x, int64_t rows, int64_t step, int64_t n,        \
                            double *acc) {                                                         \
        if (kind == SUM || kind == MEAN)                                                           \
            columns_sum_##S(x, rows, step, n, acc);                                                \
        else if (kind == SQUARES || kind == NORM)                                                  \
            columns_squares_##S(x, rows, step, n, acc);                                            \
        else                                                                                       \
            for (int64_t r = 0; r < rows; r++)                                                     \
                for (int64_t i = 0; i < n; i++)                                                    \
                    acc[i] = join(kind, acc[i], (double)WIDE_##S(x[r * step + i]));                \
    }
COLUMNS_FOLD(float, f32)
COLUMNS_FOLD(double, f64)
COLUMNS_FOLD(gradd_bf16_t, bf16)
COLUMNS_FOLD(gradd_f16_t, f16)
#define columns(kind, x, rows, step, n, acc) BY_TYPE(x, columns)(kind, x, rows, step, n, acc)

/* ---- parts ----------------------------------------------------------------------------------- */

/* What a launch, or a part of it, does: kept elements; blocks of 64 pieces of a tensor that becomes
 * one element; or rows in groups of FLUSH that are added to the kept ones. The sums of the last two
 * wait in the workspace for the next part. */
typedef enum { ELEMENTS, PIECES, ROWS } fold_way_t;

typedef struct part_s {
    gradd_range_t of;
    bool begins, ends;
    double *sums; /* NULL: there are no parts */
} part_t;

static fold_way_t way_of(const gradd_fold_t *p) {
    if (p->ends_kept) return ROWS;
    return p->outer_kept == 1 && p->outer_red == 1 && p->stretch > PIECE ? PIECES : ELEMENTS;
}

static int64_t columns_of(const gradd_fold_t *p) {
    int64_t width = p->stretch < COLUMNS ? p->stretch : COLUMNS;
    if (p->outer_kept == 1 && width == p->stretch && width > 64) width = (width + 31) / 32 * 16;
    return width;
}

/* Of columns, for each kept element in front. */
static int64_t blocks_of(const gradd_fold_t *p) {
    return (p->stretch + columns_of(p) - 1) / columns_of(p);
}

static int64_t rows_of(const gradd_fold_t *p) {
    return p->n_red ? p->red[p->n_red - 1] : 1;
}

static int64_t groups_of(const gradd_fold_t *p) {
    return (rows_of(p) + FLUSH - 1) / FLUSH;
}

static int64_t tasks_of(const gradd_fold_t *p) {
    if (way_of(p) == ELEMENTS) return p->outer_kept;
    if (way_of(p) == PIECES) return (p->stretch + 64 * PIECE - 1) / (64 * PIECE);
    return rows_of(p) ? p->outer_red / rows_of(p) * groups_of(p) : 0;
}

static part_t part_of(const gradd_fold_t *p, const gradd_launch_t *r) {
    return (part_t){gradd_part_of(r, tasks_of(p)), !r->part, gradd_part_is_last(r),
                    r->parts > 1 ? r->workspace : NULL};
}

/* The rows of the part in the stretch of rows number `outer`. */
static gradd_range_t part_rows(const gradd_fold_t *p, const part_t *part, int64_t outer) {
    const int64_t groups = groups_of(p), rows = rows_of(p), skip = outer * groups;
    const int64_t from = part->of.from < skip ? 0 : part->of.from - skip;
    const int64_t to = part->of.to < skip + groups ? part->of.to - skip : groups;
    if (from >= to) return (gradd_range_t){0, 0};
    return (gradd_range_t){from * FLUSH, to * FLUSH < rows ? to * FLUSH : rows};
}

/* ---- kernels: whole tensors ------------------------------------------------------------------ */

#define REDUCE_FLOAT(T, S)                                                                         \
    /* ends in R: each kept element folds its stretches */                                         \
    static void stretches_##S(const gradd_fold_t *p, const part_t *part, const T *x, T *z) {       \
        const int64_t elements = p->outer_kept * p->reduced;                                       \
        _Pragma("omp parallel for schedule(static) if (elements >= GRADD_PARALLEL_MIN)") for (     \
            int64_t k = part->of.from; k < part->of.to; k++) {                                     \
            const T *base = x + gradd_fold_offset(k, p->n_kept, p->kept, p->kept_step);            \
            double total = start_of(p->kind);                                                      \
            for (int64_t r = 0; r < p->outer_red; r++) {                                           \
                const T *at = base + gradd_fold_offset(r, p->n_red, p->red, p->red_step);          \
                total = join(p->kind, total, fold_stretch(p->kind, at, p->stretch));               \
            }                                                                                      \
            z[k] = NARROW_##S(finish(p->kind, total, p->reduced));                                 \
        }                                                                                          \
    }                                                                                              \
    /* everything to one element, in pieces of fixed size */                                       \
    static void whole_##S(const gradd_fold_t *p, const part_t *part, const T *x, T *z) {           \
        double total = part->begins ? start_of(p->kind) : part->sums[0], piece[64];                \
        for (int64_t task = part->of.from; task < part->of.to; task++) {                           \
            const int64_t from = task * 64 * PIECE, left = p->stretch - from;                      \
            const int64_t n = left < 64 * PIECE ? left : 64 * PIECE;                               \
            const int64_t pieces = (n + PIECE - 1) / PIECE;                                        \
            _Pragma("omp parallel for schedule(static)") for (int64_t i = 0; i < pieces; i++) {    \
                const int64_t m = n - i * PIECE < PIECE ? n - i * PIECE : PIECE;                   \
                piece[i] = fold_stretch(p->kind, x + from + i * PIECE, m);                         \
            }                                                                                      \
            for (int64_t i = 0; i < pieces; i++)                                                   \
                total = join(p->kind, total, piece[i]);                                            \
        }                                                                                          \
        if (part->ends)                                                                            \
            z[0] = NARROW_##S(finish(p->kind, total, p->reduced));                                 \
        else                                                                                       \
            part->sums[0] = total;                                                                 \
    }                                                                                              \
    /* ends in K: a block of columns at a time */                                                  \
    static void cols_##S(const gradd_fold_t *p, const part_t *part, const T *x, T *z) {            \
        const int64_t width = columns_of(p), blocks = blocks_of(p);                                \
        const int64_t step = p->n_red ? p->red_step[p->n_red - 1] : 0;                             \
        const int64_t outer = p->outer_red / (rows_of(p) ? rows_of(p) : 1);                        \
        const int64_t elements = p->outer_kept * p->stretch * p->reduced;                          \
        _Pragma("omp parallel for schedule(static) if (elements >= GRADD_PARALLEL_MIN)") for (     \
            int64_t u = 0; u < p->outer_kept * blocks; u++) {                                      \
            const int64_t k = u / blocks, from = u % blocks * width;                               \
            const int64_t n = p->stretch - from < width ? p->stretch - from : width;               \
            const T *base = x + gradd_fold_offset(k, p->n_kept, p->kept, p->kept_step) + from;     \
            double own[COLUMNS], *acc = part->sums ? part->sums + u * COLUMNS : own;               \
            for (int64_t i = 0; part->begins && i < n; i++)                                        \
                acc[i] = start_of(p->kind);                                                        \
            for (int64_t r = 0; r < outer; r++) {                                                  \
                const gradd_range_t rows = part_rows(p, part, r);                                  \
                const int64_t at = gradd_fold_offset(r, p->n_red - 1, p->red, p->red_step);        \
                columns(p->kind, base + at + rows.from * step, rows.to - rows.from, step, n, acc); \
            }                                                                                      \
            for (int64_t i = 0; part->ends && i < n; i++)                                          \
                z[k * p->stretch + from + i] = NARROW_##S(finish(p->kind, acc[i], p->reduced));    \
        }                                                                                          \
    }                                                                                              \
    static void reduce_##S(const gradd_fold_t *p, const part_t *part, const T *x, T *z) {          \
        const fold_way_t way = way_of(p);                                                          \
        (way == ROWS ? cols_##S : way == PIECES ? whole_##S : stretches_##S)(p, part, x, z);       \
    }
REDUCE_FLOAT(float, f32)
REDUCE_FLOAT(double, f64)
REDUCE_FLOAT(gradd_bf16_t, bf16)
REDUCE_FLOAT(gradd_f16_t, f16)

static void reduce_any(const gradd_fold_t *p, const part_t *part, gradd_dtype_t dtype,
                       const void *x, void *z) {
    if (dtype == GRADD_DT_F32)
        reduce_f32(p, part, x, z);
    else if (gradd_dtype_is_f64(dtype))
        reduce_f64(p, part, x, z);
    else if (gradd_dtype_is_half(dtype))
        (dtype == GRADD_DT_F16 ? reduce_f16(p, part, x, z) : reduce_bf16(p, part, x, z));
}

/* Sums of integers wrap around, as those of numpy do. */
static int64_t add_i64(int64_t a, int64_t b) {
    return (int64_t)((uint64_t)a + (uint64_t)b);
}
static int64_t mul_i64(int64_t a, int64_t b) {
    return (int64_t)((uint64_t)a * (uint64_t)b);
}
static double add_f64(double a, double b) {
    return a + b;
}
static double mul_f64(double a, double b) {
    return a * b;
}
#define ADD(a, b) _Generic((a), int64_t: add_i64, default: add_f64)(a, b)
#define MUL(a, b) _Generic((a), int64_t: mul_i64, default: mul_f64)(a, b)

/* The definition: for each result, all its elements in order, in double (integers in int64). */
static gradd_status_t plain(const gradd_launch_t *r, kind_t kind) {
    const gradd_fold_t p = gradd_fold_of(r->attrs, r->in, r->n_in);
    const int64_t width = p.ends_kept ? p.stretch : 1, stretch = p.ends_kept ? 1 : p.stretch;
    const int64_t kept = gradd_type_count(&r->out[0].type),
                  outer = p.reduced ? p.reduced / stretch : 0;
    GRADD_SWITCH_NUM(r->in[0].type.dtype, T, {
        const T *x = r->in[0].data;
        T *z = r->out[0].data;
        for (int64_t k = 0; k < kept; k++) {
            const T *base =
                x + gradd_fold_offset(k / width, p.n_kept, p.kept, p.kept_step) + k % width;
            GRADD_ACC(T) total = kind == PRODUCT ? 1 : 0, best = 0;
            bool first = true;
            for (int pass = kind == LOGSUMEXP ? 0 : 1; pass < 2; pass++)
                for (int64_t i = 0; i < outer * stretch; i++) {
                    GRADD_ACC(T)
                    a = base[gradd_fold_offset(i / stretch, p.n_red, p.red, p.red_step) +
                             i % stretch];
                    bool more = kind == MINIMUM ? a < best : a > best;
                    if (pass == 0 || kind == MAXIMUM || kind == MINIMUM)
                        best = first || more || a != a ? a : best;
                    else if (kind == LOGSUMEXP)
                        total += (GRADD_ACC(T))exp((double)a - (double)best);
                    else if (kind == PRODUCT)
                        total = MUL(total, a);
                    else
                        total = ADD(total, kind == SQUARES || kind == NORM ? MUL(a, a) : a);
                    first = false;
                    if (best != best) break;
                }
            if (kind == MAXIMUM || kind == MINIMUM) total = best;
            if (kind == MAXIMUM && first) total = (GRADD_ACC(T)) - INFINITY;
            if (kind == MINIMUM && first) total = (GRADD_ACC(T))INFINITY;
            if (kind == LOGSUMEXP) /* of an infinity: that itself, not its distance to itself */
                total =
                    isinf((double)best) ? best : (GRADD_ACC(T))((double)best + log((double)total));
            if (kind == MEAN) total = total / (GRADD_ACC(T))(p.reduced);
            if (kind == NORM) total = (GRADD_ACC(T))sqrt((double)total);
            z[k] = (T)total;
        }
    });
    return GRADD_OK;
}

static gradd_status_t reduce(const gradd_launch_t *r, kind_t kind) {
    gradd_dtype_t dtype = r->in[0].type.dtype;
    if (!gradd_type_count(&r->out[0].type)) return GRADD_OK;
    bool empty = !gradd_type_count(&r->in[0].type);
    if (!gradd_dtype_is_float(dtype) || (empty && !gradd_dtype_is_half(dtype)))
        return plain(r, kind);
    gradd_fold_t p = gradd_fold_of(r->attrs, r->in, r->n_in);
    p.kind = kind;
    if (empty) { /* a fold of nothing everywhere */
        const float none = (float)finish(kind, start_of(kind), 0);
        for (int64_t i = 0, n = gradd_type_count(&r->out[0].type); i < n; i++)
            gradd_half_put((uint16_t *)r->out[0].data + i, dtype, none);
        return GRADD_OK;
    }
    const part_t part = part_of(&p, r);
    reduce_any(&p, &part, dtype, r->in[0].data, r->out[0].data);
    return GRADD_OK;
}

/* Of launches that are not cut by rows. */
static int parts_reduce(const gradd_infer_t *c) {
    const bool known = c->n_in < 2 || !c->in[1].type.dtype || c->in[1].data;
    if (c->parts < 2 || !known || !gradd_dtype_is_float(c->in[0].type.dtype)) return 0;
    if (!gradd_type_count(&c->in[0].type) || !gradd_type_count(&c->out[0])) return 0;
    const gradd_fold_t p = gradd_fold_of(c->attrs, c->in, c->n_in);
    return way_of(&p) == ELEMENTS ? gradd_parts_of_tasks(c, tasks_of(&p))
                                  : gradd_parts_of_steps(c, tasks_of(&p));
}

static size_t workspace_reduce(const gradd_infer_t *c) {
    if (!parts_reduce(c)) return 0;
    const gradd_fold_t p = gradd_fold_of(c->attrs, c->in, c->n_in);
    if (way_of(&p) == ELEMENTS) return 0;
    return sizeof(double) *
           (size_t)(way_of(&p) == ROWS ? p.outer_kept * blocks_of(&p) * COLUMNS : 1);
}

#define REDUCE_RUN(name, kind)                                                                     \
    static gradd_status_t compute_##name(const gradd_launch_t *r) {                                \
        return reduce(r, kind);                                                                    \
    }                                                                                              \
    static gradd_status_t ref_##name(const gradd_launch_t *r) {                                    \
        return plain(r, kind);                                                                     \
    }
REDUCE_RUN(sum, SUM)
REDUCE_RUN(mean, MEAN)
REDUCE_RUN(squares, SQUARES)
REDUCE_RUN(norm, NORM)
REDUCE_RUN(max, MAXIMUM)
REDUCE_RUN(min, MINIMUM)
static gradd_status_t compute_logsumexp(const gradd_launch_t *r) {
    return plain(r, LOGSUMEXP);
}
static gradd_status_t compute_product(const gradd_launch_t *r) {
    return plain(r, PRODUCT);
}

/* ---- shape rule ----------------------------------------------------------------------------- */

static gradd_status_t infer_reduce(gradd_infer_t *c) {
    bool mask[GRADD_MAX_RANK], keep = gradd_attr_int(c->attrs, "keepdims", 1);
    const gradd_type_t *in = &c->in[0].type;
    gradd_type_t *out = &c->out[0];
    GRADD_TRY(gradd_known_axes(c, 1, in->rank, mask));
    out->dtype = in->dtype;
    for (int i = 0; i < in->rank; i++)
        if (!mask[i] || keep) out->dims[out->rank++] = mask[i] ? 1 : in->dims[i];
    return GRADD_OK;
}

/* An empty maximum has no value that an integer can express. */
static gradd_status_t infer_extremum(gradd_infer_t *c) {
    GRADD_TRY(infer_reduce(c));
    if (!gradd_type_count(&c->in[0].type) && gradd_type_count(&c->out[0]) &&
        !gradd_dtype_is_float(c->in[0].type.dtype))
        return GRADD_FAIL(GRAPH, "extremum of no elements");
    return GRADD_OK;
}

/* ---- gradient rules ------------------------------------------------------------------------- */

/* A value of the result's shape with the reduced axes put back as 1, ready to broadcast. */
static gradd_val_t unreduced(gradd_grad_t *g, gradd_val_t value) {
    gradd_type_t x = *gradd_val_type(g->b, g->in[0]);
    gradd_view_t in[2] = {{.type = x}};
    bool mask[GRADD_MAX_RANK];
    if (g->b->status) return GRADD_NONE;
    if (g->n_in > 1 && g->in[1] != GRADD_NONE) {
        in[1].type = *gradd_val_type(g->b, g->in[1]);
        in[1].data = (void *)(uintptr_t)g->b->data(g->b, g->in[1]);
    }
    gradd_infer_t c = {.op = g->op, .attrs = g->attrs, .n_in = g->n_in, .in = in};
    g->b->status = gradd_known_axes(&c, 1, x.rank, mask);
    if (g->b->status) return GRADD_NONE;
    for (int i = 0; i < x.rank; i++)
        if (mask[i]) x.dims[i] = 1;
    return gradd_reshape_to(g->b, value, x.dims, x.rank);
}

static gradd_val_t spread(gradd_grad_t *g, gradd_val_t value) {
    gradd_type_t x = *gradd_val_type(g->b, g->in[0]);
    return GRADD_EMIT(g->b, "Expand", value, gradd_const_i64s(g->b, x.dims, x.rank));
}

static gradd_val_t scalar_like(gradd_grad_t *g, double value) {
    return gradd_const_scalar(g->b, gradd_val_type(g->b, g->in[0])->dtype, value);
}

static gradd_status_t grad_sum(gradd_grad_t *g) {
    g->din[0] = spread(g, unreduced(g, g->dout[0]));
    return g->b->status;
}

static gradd_status_t grad_mean(gradd_grad_t *g) {
    gradd_type_t x = *gradd_val_type(g->b, g->in[0]), y = *gradd_val_type(g->b, g->dout[0]);
    double n = (double)gradd_type_count(&x) / (double)gradd_type_count(&y);
    g->din[0] = spread(g, gradd_scaled(g->b, unreduced(g, g->dout[0]), 1 / n));
    return g->b->status;
}

static gradd_status_t grad_squares(gradd_grad_t *g) {
    gradd_val_t twice = gradd_scaled(g->b, unreduced(g, g->dout[0]), 2);
    g->din[0] = GRADD_EMIT(g->b, "Mul", g->in[0], twice);
    return g->b->status;
}

/* x / norm, and 0 where the norm is 0 */
static gradd_status_t grad_norm(gradd_grad_t *g) {
    gradd_val_t y = unreduced(g, g->output(g, 0)), zero = scalar_like(g, 0);
    gradd_val_t slope = GRADD_EMIT(g->b, "Div", unreduced(g, g->dout[0]), y);
    slope = GRADD_EMIT(g->b, "Where", GRADD_EMIT(g->b, "Equal", y, zero), zero, slope);
    g->din[0] = GRADD_EMIT(g->b, "Mul", g->in[0], slope);
    return g->b->status;
}

static gradd_status_t grad_extremum(gradd_grad_t *g) {
    gradd_attr_t to = gradd_make_int("to", gradd_val_type(g->b, g->in[0])->dtype);
    gradd_val_t equal = GRADD_EMIT(g->b, "Equal", g->in[0], unreduced(g, g->output(g, 0)));
    gradd_val_t hit = gradd_emit_attrs(g->b, "Cast", &equal, 1, &to, 1);
    gradd_val_t d = unreduced(g, g->dout[0]);
    gradd_val_t share = GRADD_EMIT(g->b, "Div", d, gradd_reduce_to(g->b, hit, d));
    g->din[0] = GRADD_EMIT(g->b, "Mul", hit, share);
    return g->b->status;
}

/* exp(x - y): NaN where both are infinite, as in PyTorch */
static gradd_status_t grad_logsumexp(gradd_grad_t *g) {
    gradd_val_t below = GRADD_EMIT(g->b, "Sub", g->in[0], unreduced(g, g->output(g, 0)));
    gradd_val_t share = GRADD_EMIT(g->b, "Exp", below);
    g->din[0] = GRADD_EMIT(g->b, "Mul", share, unreduced(g, g->dout[0]));
    return g->b->status;
}

/* The axes as an operand, or NONE: before opset 18 they are an attribute. */
static gradd_val_t axes_operand(gradd_builder_t *b, gradd_attrs_t attrs, const gradd_val_t *in,
                                int n_in) {
    const gradd_attr_t *axes = gradd_attr_find(attrs, "axes");
    if (axes) return gradd_const_i64s(b, axes->ints, (int)axes->n);
    return n_in > 1 ? in[1] : GRADD_NONE;
}

/* A reduction of a value of the operand's shape over the operator's axes, which are kept as 1. */
static gradd_val_t reduced(gradd_grad_t *g, const char *op, gradd_val_t value) {
    gradd_attr_t attrs[] = {gradd_make_int("keepdims", 1),
                            gradd_make_int("noop_with_empty_axes",
                                           gradd_attr_int(g->attrs, "noop_with_empty_axes", 0))};
    gradd_val_t in[2] = {value, axes_operand(g->b, g->attrs, g->in, g->n_in)};
    return gradd_emit_attrs(g->b, op, in, in[1] == GRADD_NONE ? 1 : 2, attrs, 2);
}

/* 1 where a mask says true, and the sum of that along the axes. */
static gradd_val_t counted(gradd_grad_t *g, gradd_val_t mask, gradd_val_t *out_sum) {
    gradd_attr_t to = gradd_make_int("to", gradd_val_type(g->b, g->in[0])->dtype);
    gradd_val_t ones = gradd_emit_attrs(g->b, "Cast", &mask, 1, &to, 1);
    *out_sum = reduced(g, "ReduceSum", ones);
    return ones;
}

/* 0 times the other factors: NaN where one of them is infinite or NaN. */
static gradd_val_t zero_times_others(gradd_grad_t *g, gradd_val_t zero) {
    gradd_val_t nothing = GRADD_EMIT(g->b, "Sub", g->in[0], g->in[0]), all;
    gradd_val_t odd = GRADD_EMIT(g->b, "Not", GRADD_EMIT(g->b, "Equal", nothing, zero));
    gradd_val_t own = counted(g, odd, &all);
    gradd_val_t others = GRADD_EMIT(g->b, "Greater", GRADD_EMIT(g->b, "Sub", all, own), zero);
    return GRADD_EMIT(g->b, "Where", others, scalar_like(g, NAN), zero);
}

/* The product of the others, with p that of all factors but zeros: p / x without a zero, p for the
 * only zero, 0 times the others for what has a zero beside it. */
static gradd_status_t grad_product(gradd_grad_t *g) {
    gradd_val_t zero = scalar_like(g, 0), one = scalar_like(g, 1), zeros;
    gradd_val_t at = GRADD_EMIT(g->b, "Equal", g->in[0], zero);
    gradd_val_t factor = GRADD_EMIT(g->b, "Where", at, one, g->in[0]);
    gradd_val_t p = reduced(g, "ReduceProd", factor);
    gradd_val_t beside = zero_times_others(g, zero);
    counted(g, at, &zeros);
    gradd_val_t alone = GRADD_EMIT(g->b, "Where", GRADD_EMIT(g->b, "Equal", zeros, one), p, beside);
    gradd_val_t none = GRADD_EMIT(g->b, "Equal", zeros, zero);
    gradd_val_t rest = GRADD_EMIT(g->b, "Where", none, GRADD_EMIT(g->b, "Div", p, factor), beside);
    gradd_val_t others = GRADD_EMIT(g->b, "Where", at, alone, rest);
    g->din[0] = GRADD_EMIT(g->b, "Mul", others, unreduced(g, g->dout[0]));
    return g->b->status;
}

/* ReduceL1: the sum of absolute values. Axes are an operand, or of before opset 18 an attribute. */
static gradd_status_t expand_l1(gradd_expand_t *e) {
    gradd_builder_t *b = e->b;
    const gradd_attr_t attrs[] = {
        gradd_make_int("keepdims", gradd_attr_int(e->attrs, "keepdims", 1)),
        gradd_make_int("noop_with_empty_axes",
                       gradd_attr_int(e->attrs, "noop_with_empty_axes", 0))};
    gradd_val_t in[2] = {GRADD_EMIT(b, "Abs", e->in[0]), axes_operand(b, e->attrs, e->in, e->n_in)};
    e->out[0] = gradd_emit_attrs(b, "ReduceSum", in, in[1] == GRADD_NONE ? 1 : 2, attrs, 2);
    return b->status;
}

/* ---- cases and rows ------------------------------------------------------------------------- */

#define CASES_COMMON(T)                                                                            \
    {.text = T "[2,3,4] i64[1]={-1}"}, {.text = T "[2,3,4] i64[1]={0} | keepdims=0"},              \
        {.text = T "[2,3,4] i64[2]={0,2}"}, {.text = T "[2,3,4] | keepdims=0"},                    \
        {.text = T "[2,3,4]"}, {.text = T "[2,3,4] - | noop_with_empty_axes=1"},                   \
        {.text = T "[2,3,4,5] i64[2]={1,3} | keepdims=0"}, {.text = T "[] | keepdims=1"},          \
        {.text = T "[2,1,4] i64[1]={1} | keepdims=0"}, {.text = T "[2,3,4,5] i64[2]={2,0}"}
/* Cases that a GPU cuts into pieces, and reads in packs. */
#define CASES_LARGE                                                                                \
    {.text = "f32[5,4096]:(0,1) i64[1]={1}", .grad_tol = -1},                                      \
        {.text = "f32[2,20000]:(0,1) i64[1]={1}", .grad_tol = -1},                                 \
        {.text = "f32[300,260]:(0,1) i64[1]={0}", .grad_tol = -1},                                 \
        {.text = "f32[2,1030,3]:(0,1) i64[1]={1}", .grad_tol = -1},                                \
        {.text = "f32[3,7,5,300]:(0,1) i64[2]={1,3}", .grad_tol = -1},                             \
        {.text = "f32[7,5,20,128]:(0,1) i64[2]={0,2}", .grad_tol = -1},                            \
        {.text = "f32[70000]:(0,1)", .grad_tol = -1}
#define CASES_REDUCE                                                                               \
    GRADD_CASES(CASES_COMMON("f32"), {.text = "f32[3,0,2] i64[1]={0}", .grad_tol = -1},            \
                {.text = "f32[211,173] i64[1]={1}"}, {.text = "f32[211,173] i64[1]={0}"},          \
                {.text = "f32[3,2100] i64[1]={0} | keepdims=0"},                                   \
                {.text = "f32[70,3,211] i64[2]={0,1} | keepdims=0", .tol = 3e-5},                  \
                {.text = "f32[100003] | keepdims=0", .tol = 1e-4}, CASES_LARGE,                    \
                {.text = "i64[2,3] i64[1]={1}"}, {.text = "i32[2,3] i64[1]={0}"},                  \
                {.text = "i64[3,3000] i64[1]={1}"}, {.text = "i32[700,5] i64[1]={0}"})

#define ATTRS_INPUT                                                                                \
    GRADD_ATTR_LIST({"keepdims", GRADD_ATTR_INT, false},                                           \
                    {"noop_with_empty_axes", GRADD_ATTR_INT, false})
#define ATTRS_OLD                                                                                  \
    GRADD_ATTR_LIST({"keepdims", GRADD_ATTR_INT, false}, {"axes", GRADD_ATTR_INTS, false})
#define CASES_OLD                                                                                  \
    GRADD_CASES({.text = "f32[2,3,4] | axes=[-1]"},                                                \
                {.text = "f32[2,3,4] | axes=[0,2] keepdims=0"}, {.text = "f32[2,3,4]"})

/* Axes became an input with opset 18 (ReduceSum: 13). */

GRADD_OPS(
    reduce,
    GRADD_OP("ReduceSum", "", 13, (1, 2), (1, 1), .types = {GRADD_T_NUM, GRADD_T_INDEX},
             .attrs = ATTRS_INPUT, .infer = infer_reduce, .grad = grad_sum,
             .ref = GRADD_REF(ref_sum), .cases = CASES_REDUCE),
    GRADD_OP("ReduceMean", "", 18, (1, 2), (1, 1), .types = {GRADD_T_FLOAT, GRADD_T_INDEX},
             .attrs = ATTRS_INPUT, .infer = infer_reduce, .grad = grad_mean,
             .ref = GRADD_REF(ref_mean),
             .cases = GRADD_CASES(CASES_COMMON("f32"), {.text = "f32[211,173] i64[1]={1}"},
                                  {.text = "f32[211,173] i64[1]={0}"},
                                  {.text = "f32[2,3,5,7] i64[2]={2,3} | keepdims=1"})),
    GRADD_OP("ReduceMean", "", 11, (1, 1), (1, 1), .until = 17,
             .types = {GRADD_T_FLOAT, GRADD_T_INDEX}, .attrs = ATTRS_OLD, .infer = infer_reduce,
             .grad = grad_mean, .ref = GRADD_REF(ref_mean), .cases = CASES_OLD),
    GRADD_OP("ReduceSumSquare", "", 18, (1, 2), (1, 1), .types = {GRADD_T_NUM, GRADD_T_INDEX},
             .attrs = ATTRS_INPUT, .infer = infer_reduce, .grad = grad_squares,
             .ref = GRADD_REF(ref_squares), .cases = CASES_REDUCE),
    GRADD_OP("ReduceSumSquare", "", 11, (1, 1), (1, 1), .until = 17,
             .types = {GRADD_T_NUM, GRADD_T_INDEX}, .attrs = ATTRS_OLD, .infer = infer_reduce,
             .grad = grad_squares, .ref = GRADD_REF(ref_squares), .cases = CASES_OLD),
    GRADD_OP("ReduceL1", "", 18, (1, 2), (1, 1), .types = {GRADD_T_NUM, GRADD_T_INDEX},
             .attrs = ATTRS_INPUT, .infer = infer_reduce, .expand = expand_l1,
             .cases = GRADD_CASES(CASES_COMMON("f32"),
                                  {.text = "i64[2,3]={-1,2,-3,4,0,-5} i64[1]={1}"})),
    GRADD_OP("ReduceL1", "", 11, (1, 1), (1, 1), .until = 17, .types = {GRADD_T_NUM, GRADD_T_INDEX},
             .attrs = ATTRS_OLD, .infer = infer_reduce, .expand = expand_l1, .cases = CASES_OLD),
    GRADD_OP("ReduceL2", "", 18, (1, 2), (1, 1), .types = {GRADD_T_FLOAT, GRADD_T_INDEX},
             .attrs = ATTRS_INPUT, .infer = infer_reduce, .grad = grad_norm,
             .ref = GRADD_REF(ref_norm),
             .cases = GRADD_CASES(CASES_COMMON("f32"), {.text = "f32[211,173] i64[1]={1}"},
                                  {.text = "f32[211,173] i64[1]={0}"})),
    GRADD_OP("ReduceL2", "", 11, (1, 1), (1, 1), .until = 17,
             .types = {GRADD_T_FLOAT, GRADD_T_INDEX}, .attrs = ATTRS_OLD, .infer = infer_reduce,
             .grad = grad_norm, .ref = GRADD_REF(ref_norm), .cases = CASES_OLD),
    GRADD_OP("ReduceMax", "", 18, (1, 2), (1, 1), .types = {GRADD_T_NUM, GRADD_T_INDEX},
             .attrs = ATTRS_INPUT, .infer = infer_extremum, .grad = grad_extremum,
             .ref = GRADD_REF(ref_max),
             .cases = GRADD_CASES(CASES_COMMON("f32"), CASES_COMMON("i64"),
                                  {.text = "f32[4]={1,nan,2,0} | keepdims=0", .grad_tol = -1},
                                  {.text = "f32[2,3]={1,nan,2,0,1,2} i64[1]={0}", .grad_tol = -1},
                                  {.text = "f32[211,173] i64[1]={1}"},
                                  {.text = "f32[211,173] i64[1]={0}"}, {.text = "f32[100003]"},
                                  CASES_LARGE)),
    GRADD_OP("ReduceMax", "", 11, (1, 1), (1, 1), .until = 17,
             .types = {GRADD_T_NUM, GRADD_T_INDEX}, .attrs = ATTRS_OLD, .infer = infer_extremum,
             .grad = grad_extremum, .ref = GRADD_REF(ref_max), .cases = CASES_OLD),
    GRADD_OP("ReduceMin", "", 18, (1, 2), (1, 1), .types = {GRADD_T_NUM, GRADD_T_INDEX},
             .attrs = ATTRS_INPUT, .infer = infer_extremum, .grad = grad_extremum,
             .ref = GRADD_REF(ref_min),
             .cases = GRADD_CASES(CASES_COMMON("f32"), CASES_COMMON("i32"),
                                  {.text = "f32[211,173] i64[1]={1}"},
                                  {.text = "f32[211,173] i64[1]={0}"})),
    GRADD_OP("ReduceMin", "", 11, (1, 1), (1, 1), .until = 17,
             .types = {GRADD_T_NUM, GRADD_T_INDEX}, .attrs = ATTRS_OLD, .infer = infer_extremum,
             .grad = grad_extremum, .ref = GRADD_REF(ref_min), .cases = CASES_OLD),
    GRADD_OP("ReduceLogSumExp", "", 18, (1, 2), (1, 1), .types = {GRADD_T_FLOAT, GRADD_T_INDEX},
             .attrs = ATTRS_INPUT, .infer = infer_reduce, .grad = grad_logsumexp,
             .ref = GRADD_REF(compute_logsumexp),
             .cases = GRADD_CASES(
                 CASES_COMMON("f32"), CASES_LARGE,
                 {.text = "f32[4]={-inf,1,inf,2}", .grad_tol = -1},
                 {.text = "f32[2,3]={-inf,-inf,-inf,1,nan,2} i64[1]={1}", .grad_tol = -1},
                 {.text = "f32[3,2]={-inf,-inf,-inf,1,-inf,2} i64[1]={0}", .grad_tol = -1})),
    GRADD_OP("ReduceLogSumExp", "", 11, (1, 1), (1, 1), .until = 17,
             .types = {GRADD_T_FLOAT, GRADD_T_INDEX}, .attrs = ATTRS_OLD, .infer = infer_reduce,
             .grad = grad_logsumexp, .ref = GRADD_REF(compute_logsumexp), .cases = CASES_OLD),
    GRADD_OP("ReduceProd", "", 18, (1, 2), (1, 1), .types = {GRADD_T_NUM, GRADD_T_INDEX},
             .attrs = ATTRS_INPUT, .infer = infer_reduce, .grad = grad_product,
             .ref = GRADD_REF(compute_product),
             .cases = GRADD_CASES(CASES_COMMON("f32"), CASES_COMMON("i64"),
                                  {.text = "f32[3,4]={1,2,0,3,0,5,0,2,1,2,3,4} i64[1]={1}"},
                                  {.text = "f32[2,3]={1,0,2,3,4,5} | keepdims=0"},
                                  {.text = "f32[2,0] i64[1]={1}", .grad_tol = -1},
                                  {.text = "f32[3,2100]:(0.99,1.01) i64[1]={1}", .grad_tol = -1},
                                  {.text = "f32[700,5]:(0.99,1.01) i64[1]={0}", .grad_tol = -1},
                                  {.text = "i64[3,20000]:(1,9) i64[1]={1}"},
                                  {.text = "i32[700,5]:(1,9) i64[1]={0}"},
                                  {.text = "i64[2,0] i64[1]={1}"})),
    GRADD_OP("ReduceProd", "", 11, (1, 1), (1, 1), .until = 17,
             .types = {GRADD_T_NUM, GRADD_T_INDEX}, .attrs = ATTRS_OLD, .infer = infer_reduce,
             .grad = grad_product, .ref = GRADD_REF(compute_product), .cases = CASES_OLD));

GRADD_KERNELS(
    cpu, reduce,
    GRADD_KERNEL("ReduceSum", "loop", .rowwise = gradd_rowwise_fold, .types = {GRADD_T_ANY},
                 .compute = compute_sum, .parts = parts_reduce, .workspace = workspace_reduce),
    GRADD_KERNEL("ReduceMean", "loop", .rowwise = gradd_rowwise_fold, .types = {GRADD_T_ANY},
                 .compute = compute_mean, .parts = parts_reduce, .workspace = workspace_reduce),
    GRADD_KERNEL("ReduceSumSquare", "loop", .rowwise = gradd_rowwise_fold, .types = {GRADD_T_ANY},
                 .compute = compute_squares, .parts = parts_reduce, .workspace = workspace_reduce),
    GRADD_KERNEL("ReduceL2", "loop", .rowwise = gradd_rowwise_fold, .types = {GRADD_T_ANY},
                 .compute = compute_norm, .parts = parts_reduce, .workspace = workspace_reduce),
    GRADD_KERNEL("ReduceMax", "loop", .rowwise = gradd_rowwise_fold, .types = {GRADD_T_ANY},
                 .compute = compute_max, .parts = parts_reduce, .workspace = workspace_reduce),
    GRADD_KERNEL("ReduceMin", "loop", .rowwise = gradd_rowwise_fold, .types = {GRADD_T_ANY},
                 .compute = compute_min, .parts = parts_reduce, .workspace = workspace_reduce),
    GRADD_KERNEL("ReduceLogSumExp", "loop", .rowwise = gradd_rowwise_fold,
                 .types = {GRADD_T_F32_F64, GRADD_T_INDEX}, .compute = compute_logsumexp),
    GRADD_KERNEL("ReduceProd", "loop", .rowwise = gradd_rowwise_fold,
                 .types = {GRADD_T_F32_F64 | GRADD_T_INT, GRADD_T_INDEX},
                 .compute = compute_product));
