/* BatchNorm: every channel of x [B, C, ...] is normalised over all else.
 *
 * y = (x - mean) * inv * scale[c] + bias[c] with inv = 1 / sqrt(var + epsilon); mean and var are
 * those of the channel's n = B * S elements (S = all spatial axes), var the biased one, or they are
 * given (evaluation). Statistics of no element are 0. Running statistics are no concern of the
 * operator: they are arithmetic on its results, so that a forward may be repeated. Saved for
 * backward: mean and inv, [C].
 *
 * BatchNormGrad(dy, x, scale, mean, inv) -> dx, dscale, dbias is internal:
 *     dx = scale inv (dy - sum(dy) / n - (x - mean) inv^2 sum(dy (x - mean)) / n)
 * without the sums where the statistics were given. Sums are formed for each of the B * C rows, or
 * where S = 1 (channels-last tensors too) for pieces of the batch, of a length that depends on the
 * sizes alone, and added in order: the bits do not depend on the number of threads.
 * ONNX's BatchNormalization consists of BatchNorm and the arithmetic of its running statistics.
 */
#include <math.h>
#include <string.h>

#include "kernels/contract/kernel.h"
#include "kernels/cpu/half.h"
#include "kernels/cpu/parts.h"
#include "kernels/describe/batch_norm.h"
#include "kernels/describe/dispatch.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

typedef struct batch_s {
    const void *x, *dy, *scale, *bias;
    void *y;             /* y or dx */
    void *mean, *inv;    /* [C] */
    double *sum, *sum_h; /* [parts, C]: means and squares, or sums of dy, dy (x - mean) */
    gradd_channels_t s;
    int64_t parts, length; /* parts: B, or where S = 1 pieces of that length */
    bool given;
    double epsilon;
} batch_t;

enum { COLUMNS = 512, FEW = 64, PIECE = 16384, LEAST_ROWS = 16, MOST_ROWS = 128 };

/* Elements of a channel in a part. */
static int64_t part_size(const batch_t *p, int64_t part) {
    const int64_t left = p->s.batch - part * p->length;
    return p->s.spatial != 1 ? p->s.spatial : left < p->length ? left : p->length;
}

/* ---- kernels --------------------------------------------------------------------------------- */

#define REAL    float
#define NAME(x) x##_f32
#include "kernels/cpu/batch_rows.h"
#undef REAL
#undef NAME
#define REAL    double
#define NAME(x) x##_f64
#include "kernels/cpu/batch_rows.h"
#undef REAL
#undef NAME

#undef CELL
#undef LOAD
#undef STORE
#define REAL    float
#define CELL    gradd_bf16_t
#define LOAD    gradd_bf16_f32
#define STORE   gradd_f32_bf16
#define NAME(x) x##_bf16
#include "kernels/cpu/batch_rows.h"
#undef REAL
#undef NAME

/* A step of the kernel over rows, pieces or channels, by the type of x. */
#define STEP(dtype, p, fn, ...)                                                                    \
    ((dtype) == GRADD_DT_F32   ? fn##_f32(p, __VA_ARGS__)                                          \
     : (dtype) == GRADD_DT_F64 ? fn##_f64(p, __VA_ARGS__)                                          \
                               : fn##_bf16(p, __VA_ARGS__))

/* Without elements: no batch, and one element of each channel in it. */
static gradd_channels_t sizes_of(const gradd_type_t *x) {
    gradd_channels_t s = gradd_channels_of(x);
    return s.spatial ? s : (gradd_channels_t){0, s.channels, 1};
}

static int64_t rows_of_piece(const gradd_channels_t *s) {
    const int64_t rows = s->channels ? PIECE / s->channels : 0;
    return rows < LEAST_ROWS ? LEAST_ROWS : rows > MOST_ROWS ? MOST_ROWS : rows;
}

static int64_t parts_of(const gradd_channels_t *s) {
    const int64_t rows = rows_of_piece(s);
    return s->spatial == 1 ? (s->batch + rows - 1) / rows : s->batch;
}

/* Of one of the arrays of sums, which has room for their totals where there is no part. */
static int64_t room_of(const gradd_channels_t *s) {
    const int64_t parts = parts_of(s);
    return (parts ? parts : 1) * s->channels;
}

static void set_sizes(batch_t *p, const gradd_type_t *x, double *room) {
    p->s = sizes_of(x);
    p->parts = parts_of(&p->s), p->length = rows_of_piece(&p->s);
    p->sum = room, p->sum_h = room + room_of(&p->s);
}

static int64_t row_count(const batch_t *p) {
    return p->s.batch * p->s.channels;
}

static int64_t at_most(int64_t n, int64_t limit) {
    return n < limit ? n : limit;
}

static bool is_large(const batch_t *p) {
    return row_count(p) * p->s.spatial >= GRADD_PARALLEL_MIN;
}

static void *output(const gradd_launch_t *r, int j) {
    return j < r->n_out ? r->out[j].data : NULL;
}

static bool has(const gradd_launch_t *r, int i) {
    return i < r->n_in && r->in[i].type.dtype != GRADD_DT_NONE;
}

/* Of a launch in parts the first half forms sums, if there are any to form, and the second half has
 * the results. The launch's part of n steps of the first, or of the second half. */
static gradd_range_t half_of(const gradd_launch_t *r, bool sums, bool second, int64_t n) {
    if (sums) return gradd_half_of(r, second, n);
    return second ? gradd_part_of(r, n) : (gradd_range_t){0, 0};
}

/* Whether what lies between the halves is due. */
static bool is_between(const gradd_launch_t *r, bool sums) {
    return sums ? gradd_halves_meet(r) : !r->part;
}

/* Into p->sum and p->sum_h; backward: of dy, else the moments of x. */
static void sum_channels(const gradd_launch_t *r, const batch_t *p, gradd_dtype_t dtype,
                         bool backward) {
    const int64_t channels = p->s.channels, blocks = (channels + COLUMNS - 1) / COLUMNS;
    const int64_t n = p->s.spatial == 1 ? p->parts * blocks : row_count(p);
    const gradd_range_t part = half_of(r, true, false, n);
#pragma omp parallel for schedule(static) if (is_large(p))
    for (int64_t i = part.from; i < part.to; i++) {
        const int64_t column = i % (blocks + !blocks) * COLUMNS;
        const int64_t piece = i / (blocks + !blocks), width = at_most(channels - column, COLUMNS);
        if (p->s.spatial != 1 && backward)
            STEP(dtype, p, row_sums, i);
        else if (p->s.spatial != 1)
            STEP(dtype, p, row_moments, i);
        else if (backward)
            STEP(dtype, p, piece_sums, piece, column, width);
        else
            STEP(dtype, p, piece_moments, piece, column, width);
    }
}

/* Of n <= FEW channels: the sums over all parts, in order, in the place of the first. */
static void add_parts(const batch_t *p, int64_t column, int64_t n) {
    double sum[FEW] = {0}, sum_h[FEW] = {0};
    for (int64_t b = 0; b < p->parts; b++)
        for (int64_t k = 0; k < n; k++) {
            sum[k] += p->sum[b * p->s.channels + column + k];
            sum_h[k] += p->sum_h[b * p->s.channels + column + k];
        }
    memcpy(p->sum + column, sum, (size_t)n * sizeof *sum);
    memcpy(p->sum_h + column, sum_h, (size_t)n * sizeof *sum_h);
}

/* Mean and sum of squares of n <= FEW channels, of those of all parts. */
static void join_moments(const batch_t *p, int64_t column, int64_t n, double *mean,
                         double *square) {
    const int64_t channels = p->s.channels;
    const double all = (double)p->s.batch * (double)p->s.spatial;
    memset(mean, 0, FEW * sizeof *mean);
    memset(square, 0, FEW * sizeof *square);
    if (all <= 0) return;
    for (int64_t b = 0; b < p->parts; b++)
        for (int64_t k = 0; k < n; k++)
            mean[k] += (double)part_size(p, b) * p->sum[b * channels + column + k];
    for (int64_t k = 0; k < n; k++)
        mean[k] /= all;
    for (int64_t b = 0; b < p->parts; b++)
        for (int64_t k = 0; k < n; k++) {
            const double off = p->sum[b * channels + column + k] - mean[k];
            square[k] += p->sum_h[b * channels + column + k];
            if (p->parts > 1) square[k] += (double)part_size(p, b) * off * off;
        }
}

static void keep_all_moments(const batch_t *p, gradd_dtype_t dtype, void *var) {
#pragma omp parallel for schedule(static) if (is_large(p))
    for (int64_t column = 0; column < p->s.channels; column += FEW) {
        const int64_t n = at_most(p->s.channels - column, FEW);
        double mean[FEW], square[FEW];
        join_moments(p, column, n, mean, square);
        for (int64_t k = 0; k < n; k++)
            STEP(dtype, p, keep_moments, column + k, mean[k], square[k], var);
    }
}

static void keep_all_sums(const batch_t *p, gradd_dtype_t dtype, void *dscale, void *dbias,
                          void *slopes) {
#pragma omp parallel for schedule(static) if (is_large(p))
    for (int64_t column = 0; column < p->s.channels; column += FEW) {
        const int64_t n = at_most(p->s.channels - column, FEW);
        add_parts(p, column, n);
        for (int64_t c = column; c < column + n; c++) {
            STEP(dtype, p, keep_sums, c, dscale, dbias);
            if (p->parts) STEP(dtype, p, keep_slopes, c, slopes);
        }
    }
}

static void take_statistics(const gradd_launch_t *r, const batch_t *p, void *var,
                            gradd_dtype_t dtype) {
    const gradd_view_t *mean = &r->in[GRADD_BATCH_MEAN];
    const size_t bytes = (size_t)gradd_type_count(&mean->type) * (dtype == GRADD_DT_F64 ? 8 : 4);
    const void *given = r->in[GRADD_BATCH_VAR].data;
    memcpy(p->mean, mean->data, bytes);
    if (var) memcpy(var, given, bytes);
    for (int64_t c = 0; c < p->s.channels; c++)
        STEP(dtype, p, keep_inverse, c, given);
}

static gradd_status_t compute_forward(const gradd_launch_t *r) {
    const gradd_view_t *x = &r->in[GRADD_BATCH_X];
    const gradd_dtype_t dtype = x->type.dtype;
    const bool given = has(r, GRADD_BATCH_MEAN);
    batch_t p = {.x = x->data, .y = r->out[0].data};
    p.epsilon = gradd_attr_float(r->attrs, GRADD_BATCH_EPSILON, 1e-5);
    p.scale = r->in[GRADD_BATCH_SCALE].data, p.bias = r->in[GRADD_BATCH_BIAS].data;
    double *room = r->workspace;
    void *var = output(r, GRADD_BATCH_OUT_VAR);
    const gradd_channels_t sizes = sizes_of(&x->type);
    set_sizes(&p, &x->type, room + 2 * sizes.channels);
    p.mean = output(r, GRADD_BATCH_OUT_MEAN), p.inv = output(r, GRADD_BATCH_OUT_INV);
    if (!p.mean) p.mean = room;
    if (!p.inv) p.inv = room + p.s.channels;
    if (!given) sum_channels(r, &p, dtype, false);
    if (is_between(r, !given) && given) take_statistics(r, &p, var, dtype);
    if (is_between(r, !given) && !given) keep_all_moments(&p, dtype, var);
    const bool across = p.s.spatial == 1;
    const gradd_range_t part = half_of(r, !given, true, across ? p.s.batch : row_count(&p));
#pragma omp parallel for schedule(static) if (is_large(&p))
    for (int64_t i = part.from; i < part.to; i++) {
        if (across)
            STEP(dtype, &p, normalise_across, i);
        else
            STEP(dtype, &p, normalise, i);
    }
    return GRADD_OK;
}

static gradd_status_t compute_backward(const gradd_launch_t *r) {
    const gradd_view_t *x = &r->in[GRADD_BATCH_GRAD_X];
    const gradd_dtype_t dtype = x->type.dtype;
    batch_t p = {.x = x->data, .y = r->out[0].data};
    set_sizes(&p, &x->type, r->workspace);
    p.dy = r->in[GRADD_BATCH_GRAD_DY].data, p.scale = r->in[GRADD_BATCH_GRAD_SCALE].data;
    p.mean = r->in[GRADD_BATCH_GRAD_MEAN].data, p.inv = r->in[GRADD_BATCH_GRAD_INV].data;
    p.given = gradd_attr_int(r->attrs, GRADD_BATCH_GIVEN, 0);
    void *slopes = p.sum_h + room_of(&p.s), *dscale = output(r, GRADD_BATCH_DSCALE),
         *dbias = output(r, GRADD_BATCH_DBIAS);
    sum_channels(r, &p, dtype, true);
    if (is_between(r, true)) keep_all_sums(&p, dtype, dscale, dbias, slopes);
    if (!p.y) return GRADD_OK;
    const bool across = p.s.spatial == 1;
    const gradd_range_t part = half_of(r, true, true, across ? p.s.batch : row_count(&p));
#pragma omp parallel for schedule(static) if (is_large(&p))
    for (int64_t i = part.from; i < part.to; i++) {
        if (across)
            STEP(dtype, &p, backward_across, i, slopes);
        else
            STEP(dtype, &p, backward, i);
    }
    return GRADD_OK;
}

static size_t workspace_forward(const gradd_infer_t *c) {
    const gradd_channels_t s = sizes_of(&c->in[GRADD_BATCH_X].type);
    return sizeof(double) * (size_t)(2 * (s.channels + room_of(&s)));
}

static size_t workspace_backward(const gradd_infer_t *c) {
    const gradd_channels_t s = sizes_of(&c->in[GRADD_BATCH_GRAD_X].type);
    return sizeof(double) * (size_t)(2 * room_of(&s) + 3 * s.channels);
}

/* By images, or by pieces of many rows. */
static int launch_parts(const gradd_infer_t *c, const gradd_type_t *x) {
    const gradd_channels_t s = sizes_of(x);
    return gradd_parts_of_tasks(c, parts_of(&s));
}

static int parts_forward(const gradd_infer_t *c) {
    return launch_parts(c, &c->in[GRADD_BATCH_X].type);
}

static int parts_backward(const gradd_infer_t *c) {
    return launch_parts(c, &c->in[GRADD_BATCH_GRAD_X].type);
}

/* ---- plain loops ----------------------------------------------------------------------------- */

#define EACH_OF(c, s, at)                                                                          \
    for (int64_t b_ = 0; b_ < (s).batch; b_++)                                                     \
        for (int64_t at = (b_ * (s).channels + (c)) * (s).spatial, end_ = at + (s).spatial;        \
             at < end_; at++)

static gradd_status_t ref_forward(const gradd_launch_t *r) {
    const gradd_channels_t s = sizes_of(&r->in[GRADD_BATCH_X].type);
    const double epsilon = gradd_attr_float(r->attrs, GRADD_BATCH_EPSILON, 1e-5);
    const double n = (double)s.batch * (double)s.spatial;
    GRADD_SWITCH_FLOAT(r->in[GRADD_BATCH_X].type.dtype, T, {
        const T *x = r->in[GRADD_BATCH_X].data, *scale = r->in[GRADD_BATCH_SCALE].data;
        const T *bias = r->in[GRADD_BATCH_BIAS].data;
        for (int64_t c = 0; c < s.channels; c++) {
            double mean = 0, var = 0;
            EACH_OF(c, s, i) mean += (double)x[i] / n;
            EACH_OF(c, s, i) var += ((double)x[i] - mean) * ((double)x[i] - mean) / n;
            if (has(r, GRADD_BATCH_MEAN)) {
                mean = (double)((const T *)r->in[GRADD_BATCH_MEAN].data)[c];
                var = (double)((const T *)r->in[GRADD_BATCH_VAR].data)[c];
            }
            const double inv = 1 / sqrt(var + epsilon), all[] = {mean, var, inv};
            EACH_OF(c, s, i)
            ((T *)r->out[0].data)[i] =
                (T)(((double)x[i] - mean) * inv * (double)scale[c] + (double)bias[c]);
            for (int j = 1; j < GRADD_BATCH_OUTPUTS; j++)
                if (output(r, j)) ((T *)output(r, j))[c] = (T)all[j - 1];
        }
    });
    return GRADD_OK;
}

static gradd_status_t ref_backward(const gradd_launch_t *r) {
    const gradd_channels_t s = sizes_of(&r->in[GRADD_BATCH_GRAD_X].type);
    const bool given = gradd_attr_int(r->attrs, GRADD_BATCH_GIVEN, 0);
    const double n = (double)s.batch * (double)s.spatial;
    GRADD_SWITCH_FLOAT(r->in[GRADD_BATCH_GRAD_X].type.dtype, T, {
        const T *x = r->in[GRADD_BATCH_GRAD_X].data;
        const T *dy = r->in[GRADD_BATCH_GRAD_DY].data;
        for (int64_t c = 0; c < s.channels; c++) {
            const double scale = (double)((const T *)r->in[GRADD_BATCH_GRAD_SCALE].data)[c];
            const double mean = (double)((const T *)r->in[GRADD_BATCH_GRAD_MEAN].data)[c];
            const double inv = (double)((const T *)r->in[GRADD_BATCH_GRAD_INV].data)[c];
            double sum = 0, sum_h = 0;
            EACH_OF(c, s, i) sum += (double)dy[i];
            EACH_OF(c, s, i) sum_h += (double)dy[i] * ((double)x[i] - mean) * inv;
            T *dx = output(r, GRADD_BATCH_DX), *dscale = output(r, GRADD_BATCH_DSCALE);
            T *dbias = output(r, GRADD_BATCH_DBIAS);
            if (dscale) dscale[c] = (T)sum_h;
            if (dbias) dbias[c] = (T)sum;
            const double less = given ? 0 : 1 / n;
            if (dx) EACH_OF(c, s, i)
            dx[i] = (T)(scale * inv *
                        ((double)dy[i] - less * (sum + ((double)x[i] - mean) * inv * sum_h)));
        }
    });
    return GRADD_OK;
}

/* ---- shape rules ----------------------------------------------------------------------------- */

static gradd_dtype_t wide_dtype(gradd_dtype_t dtype) {
    return gradd_dtype_is_half(dtype) ? GRADD_DT_F32 : dtype;
}

static gradd_type_t per_channel(const gradd_type_t *x, gradd_dtype_t dtype) {
    return (gradd_type_t){.dtype = dtype, .rank = 1, .dims = {x->dims[1]}};
}

/* One number for each channel, of x's type or the wider one. */
static gradd_status_t check_channels(const gradd_type_t *x, const gradd_type_t *t,
                                     const char *what) {
    char text[GRADD_TYPE_TEXT];
    const bool fits = t->dtype == x->dtype || t->dtype == wide_dtype(x->dtype);
    if (fits && t->rank == 1 && t->dims[0] == x->dims[1]) return GRADD_OK;
    gradd_type_format(t, text);
    return GRADD_FAIL(GRAPH, "%s is %s, expected %s[%lld]", what, text, gradd_dtype_name(x->dtype),
                      (long long)x->dims[1]);
}

static gradd_status_t infer_forward(gradd_infer_t *c) {
    static const char *const names[] = {"x", "scale", "bias", "mean", "var"};
    const gradd_type_t *x = &c->in[GRADD_BATCH_X].type;
    int given = 0;
    if (x->rank < 2) return GRADD_FAIL(GRAPH, "the input has rank %d, at least 2", x->rank);
    for (int i = 1; i < c->n_in; i++) {
        if (c->in[i].type.dtype == GRADD_DT_NONE) continue;
        GRADD_TRY(check_channels(x, &c->in[i].type, names[i]));
        given += i >= GRADD_BATCH_MEAN;
    }
    if (given == 1) return GRADD_FAIL(GRAPH, "mean and var are given together, or neither");
    c->out[0] = *x;
    for (int j = 1; j < c->n_out; j++)
        c->out[j] = per_channel(x, wide_dtype(x->dtype));
    return GRADD_OK;
}

static gradd_status_t infer_backward(gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[GRADD_BATCH_GRAD_X].type;
    const gradd_type_t *scale = &c->in[GRADD_BATCH_GRAD_SCALE].type;
    if (x->rank < 2 || !gradd_type_equal(&c->in[GRADD_BATCH_GRAD_DY].type, x))
        return GRADD_FAIL(GRAPH, "dy does not fit the input");
    GRADD_TRY(check_channels(x, scale, "scale"));
    GRADD_TRY(check_channels(x, &c->in[GRADD_BATCH_GRAD_MEAN].type, "mean"));
    GRADD_TRY(check_channels(x, &c->in[GRADD_BATCH_GRAD_INV].type, "inv"));
    c->out[0] = *x;
    for (int j = 1; j < c->n_out; j++)
        c->out[j] = *scale;
    return GRADD_OK;
}

/* ---- gradient rule --------------------------------------------------------------------------- */

/* factor * a * b in the type of `like` */
static gradd_val_t product(gradd_builder_t *b, double factor, gradd_val_t a, gradd_val_t c,
                           gradd_val_t like) {
    gradd_val_t v = GRADD_EMIT(b, "Mul", gradd_wide(b, a), gradd_wide(b, c));
    return gradd_cast(b, gradd_scaled(b, v, factor), gradd_val_type(b, like)->dtype);
}

static gradd_status_t grad_batch_norm(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    const bool given = g->n_in > GRADD_BATCH_MEAN && g->in[GRADD_BATCH_MEAN] != GRADD_NONE;
    const bool more = given && (g->need[GRADD_BATCH_MEAN] || g->need[GRADD_BATCH_VAR]);
    for (int j = 1; j < g->n_out; j++)
        if (g->dout[j] != GRADD_NONE)
            return GRADD_FAIL(UNSUPPORTED, "a gradient arrives for a statistic");
    if (g->dout[0] == GRADD_NONE) return GRADD_OK;
    const int n_out = more || g->need[GRADD_BATCH_BIAS] ? GRADD_BATCH_GRAD_OUTPUTS
                      : g->need[GRADD_BATCH_SCALE]      ? GRADD_BATCH_DBIAS
                                                        : GRADD_BATCH_DSCALE;
    const gradd_val_t scale = g->in[GRADD_BATCH_SCALE];
    const gradd_val_t inv = g->output(g, GRADD_BATCH_OUT_INV);
    const gradd_val_t in[GRADD_BATCH_GRAD_INPUTS] = {g->dout[0], g->in[GRADD_BATCH_X], scale,
                                                     g->output(g, GRADD_BATCH_OUT_MEAN), inv};
    gradd_val_t out[GRADD_BATCH_GRAD_OUTPUTS];
    const gradd_attr_t attr = gradd_make_int(GRADD_BATCH_GIVEN, given);
    if (b->status) return b->status;
    b->status = b->emit(b, &(gradd_emit_t){"BatchNormGrad", in, GRADD_BATCH_GRAD_INPUTS, &attr, 1},
                        out, n_out);
    if (b->status) return b->status;
    for (int i = 0; i < n_out; i++)
        if (g->need[i]) g->din[i] = out[i];
    if (!more) return GRADD_OK;
    gradd_val_t slope = GRADD_EMIT(b, "Mul", gradd_wide(b, scale), inv);
    g->din[GRADD_BATCH_MEAN] =
        product(b, -1, slope, out[GRADD_BATCH_DBIAS], g->in[GRADD_BATCH_MEAN]);
    slope = GRADD_EMIT(b, "Mul", slope, inv);
    g->din[GRADD_BATCH_VAR] =
        product(b, -0.5, slope, out[GRADD_BATCH_DSCALE], g->in[GRADD_BATCH_VAR]);
    return b->status;
}

/* ---- expansions ------------------------------------------------------------------------------ */

/* [C] shaped to meet [B, C, ...]. */
static gradd_val_t meeting(gradd_builder_t *b, gradd_val_t v, const gradd_type_t *x) {
    int64_t dims[GRADD_MAX_RANK] = {x->dims[1]};
    for (int i = 1; i < x->rank - 1; i++)
        dims[i] = 1;
    return gradd_reshape_to(b, gradd_wide(b, v), dims, x->rank - 1);
}

static gradd_val_t mean_of(gradd_builder_t *b, gradd_val_t v, const gradd_type_t *x) {
    int64_t axes[GRADD_MAX_RANK] = {0};
    for (int i = 1; i < x->rank - 1; i++)
        axes[i] = i + 1;
    gradd_val_t mean = GRADD_EMIT(b, "ReduceMean", v, gradd_const_i64s(b, axes, x->rank - 1));
    const int64_t dims[] = {x->dims[1]};
    return gradd_reshape_to(b, mean, dims, 1);
}

static gradd_status_t expand_batch_norm(gradd_expand_t *x) {
    gradd_builder_t *b = x->b;
    const gradd_type_t type = *gradd_val_type(b, x->in[GRADD_BATCH_X]);
    const gradd_dtype_t dtype = wide_dtype(type.dtype);
    gradd_val_t v = gradd_wide(b, x->in[GRADD_BATCH_X]), mean, var;
    if (x->n_in > GRADD_BATCH_MEAN && x->in[GRADD_BATCH_MEAN] != GRADD_NONE) {
        mean = gradd_wide(b, x->in[GRADD_BATCH_MEAN]);
        var = gradd_wide(b, x->in[GRADD_BATCH_VAR]);
        v = GRADD_EMIT(b, "Sub", v, meeting(b, mean, &type));
    } else if (gradd_type_count(&type)) {
        mean = mean_of(b, v, &type);
        v = GRADD_EMIT(b, "Sub", v, meeting(b, mean, &type));
        var = mean_of(b, GRADD_EMIT(b, "Mul", v, v), &type);
    } else {
        const gradd_val_t sizes = gradd_const_i64s(b, &type.dims[1], 1);
        mean = var = GRADD_EMIT(b, "Expand", gradd_const_scalar(b, dtype, 0), sizes);
    }
    gradd_val_t small =
        gradd_const_scalar(b, dtype, gradd_attr_float(x->attrs, GRADD_BATCH_EPSILON, 1e-5));
    gradd_val_t inv =
        GRADD_EMIT(b, "Reciprocal", GRADD_EMIT(b, "Sqrt", GRADD_EMIT(b, "Add", var, small)));
    v = GRADD_EMIT(b, "Mul", v, meeting(b, inv, &type));
    v = GRADD_EMIT(b, "Mul", v, meeting(b, x->in[GRADD_BATCH_SCALE], &type));
    v = GRADD_EMIT(b, "Add", v, meeting(b, x->in[GRADD_BATCH_BIAS], &type));
    const gradd_val_t all[] = {gradd_cast(b, v, type.dtype), mean, var, inv};
    for (int j = 0; j < x->n_out; j++)
        x->out[j] = all[j];
    return b->status;
}

/* ---- ONNX's operator ------------------------------------------------------------------------- */

/* Before opset 14 there was no attribute: a node that asks for statistics trains. */
static bool is_training(const gradd_op_t *op, gradd_attrs_t attrs, int n_out) {
    return gradd_attr_int(attrs, "training_mode", 0) || (op->until && n_out > 1);
}

static gradd_status_t infer_onnx(gradd_infer_t *c) {
    static const char *const names[] = {"X", "scale", "B", "input_mean", "input_var"};
    const gradd_type_t *x = &c->in[GRADD_BATCH_X].type;
    if (x->rank < 2) return GRADD_FAIL(GRAPH, "X has rank %d, at least 2", x->rank);
    if (c->n_out > 1 && !is_training(c->op, c->attrs, c->n_out))
        return GRADD_FAIL(UNSUPPORTED, "statistics as results without training_mode=1");
    for (int i = 1; i < c->n_in; i++)
        if (c->in[i].type.rank != 1 || c->in[i].type.dims[0] != x->dims[1])
            return GRADD_FAIL(GRAPH, "%s must have one entry for each of %lld channels", names[i],
                              (long long)x->dims[1]);
    c->out[0] = *x;
    for (int j = 1; j < c->n_out; j++)
        c->out[j] = c->in[GRADD_BATCH_MEAN].type;
    return GRADD_OK;
}

/* before * momentum + now * (1 - momentum), which has no gradient. */
static gradd_val_t running(gradd_builder_t *b, gradd_val_t before, gradd_val_t now,
                           double momentum) {
    const gradd_dtype_t dtype = gradd_val_type(b, before)->dtype;
    gradd_val_t kept =
        gradd_scaled(b, gradd_cast(b, before, gradd_val_type(b, now)->dtype), momentum);
    gradd_val_t v = GRADD_EMIT(b, "Add", kept, gradd_scaled(b, now, 1 - momentum));
    return GRADD_EMIT(b, "StopGradient", gradd_cast(b, v, dtype));
}

/* Results behind those of today's BatchNormalization: of the batch the mean and, of
 * BatchNormInternal, 1 / sqrt(variance + epsilon), before opset 14 the variance, in the type of the
 * statistics. */
static const int saved_by[] = {GRADD_BATCH_OUT_MEAN, GRADD_BATCH_OUT_INV};
static const int saved_before[] = {GRADD_BATCH_OUT_MEAN, GRADD_BATCH_OUT_VAR};

static gradd_val_t saved(gradd_builder_t *b, gradd_val_t like, gradd_val_t v) {
    return GRADD_EMIT(b, "StopGradient", gradd_cast(b, v, gradd_val_type(b, like)->dtype));
}

static gradd_status_t expand_onnx(gradd_expand_t *x) {
    gradd_builder_t *b = x->b;
    const gradd_dtype_t dtype = wide_dtype(gradd_val_type(b, x->in[GRADD_BATCH_X])->dtype);
    const bool training = is_training(x->op, x->attrs, x->n_out);
    const int *by = x->op->until ? saved_before : saved_by;
    const double momentum = gradd_attr_float(x->attrs, "momentum", 0.9);
    const gradd_attr_t attr =
        gradd_make_float(GRADD_BATCH_EPSILON, gradd_attr_float(x->attrs, "epsilon", 1e-5));
    gradd_val_t in[GRADD_BATCH_INPUTS] = {x->in[GRADD_BATCH_X]}, out[GRADD_BATCH_OUTPUTS];
    for (int i = 1; i < GRADD_BATCH_INPUTS; i++)
        in[i] = gradd_cast(b, x->in[i], dtype);
    if (b->status) return b->status;
    const int n_in = training ? GRADD_BATCH_MEAN : GRADD_BATCH_INPUTS;
    const int n_out = x->n_out > GRADD_BATCH_OUT_INV ? GRADD_BATCH_OUTPUTS : x->n_out;
    GRADD_TRY(b->emit(b, &(gradd_emit_t){"BatchNorm", in, n_in, &attr, 1}, out, n_out));
    x->out[0] = out[0];
    for (int j = 1; j < x->n_out; j++)
        x->out[j] = j < GRADD_BATCH_OUT_INV
                        ? running(b, x->in[GRADD_BATCH_MEAN + j - 1], out[j], momentum)
                        : saved(b, x->in[GRADD_BATCH_MEAN], out[by[j - GRADD_BATCH_OUT_INV]]);
    return b->status;
}

/* ---- rows ------------------------------------------------------------------------------------ */

GRADD_OPS(
    batchnorm,
    GRADD_OP(
        "BatchNorm", "com.gradd", 1, (GRADD_BATCH_MEAN, GRADD_BATCH_INPUTS),
        (1, GRADD_BATCH_OUTPUTS), .types = {GRADD_T_FLOAT},
        .attrs = GRADD_ATTR_LIST({GRADD_BATCH_EPSILON, GRADD_ATTR_FLOAT, false}),
        .infer = infer_forward, .grad = grad_batch_norm, .expand = expand_batch_norm,
        .ref = GRADD_REF(ref_forward),
        .cases = GRADD_CASES(
            {.text = "f32[4,3,5] f32[3] f32[3]"}, {.text = "f32[5,70] f32[70] f32[70]"},
            {.text = "f32[2,3,3,4] f32[3] f32[3] | epsilon=0.01"},
            {.text = "f32[2,3,2,2,2] f32[3] f32[3]"},
            {.text = "f32[4,3,5] f32[3] f32[3] f32[3] f32[3]:(0.5,2)"},
            {.text = "f32[4,3] f32[3] f32[3] f32[3] f32[3]:(0.5,2) | epsilon=0.1"},
            {.text = "f32[0,3,4] f32[3] f32[3]"}, {.text = "f32[2,3,0] f32[3] f32[3]"},
            {.text = "f32[2,0,5] f32[0] f32[0]"},
            {.text = "f32[0,3] f32[3] f32[3] -> 4", .grad_tol = -1},
            {.text = "f32[1,2,3] f32[2] f32[2]"},
            {.text = "f32[2,3]={1,2,inf,4,nan,6} f32[3] f32[3]", .grad_tol = -1},
            {.text = "f32[5,64,12,12] f32[64] f32[64] -> 4", .grad_tol = -1},
            {.text = "f32[700,90]:(900,902) f32[90] f32[90] -> 4", .tol = 1e-3, .grad_tol = -1},
            {.text = "f32[3,2,130,50] f32[2] f32[2] f32[2] f32[2]:(0.5,2) -> 4", .grad_tol = -1})),
    GRADD_OP("BatchNormGrad", "com.gradd", 1, (GRADD_BATCH_GRAD_INPUTS, GRADD_BATCH_GRAD_INPUTS),
             (1, GRADD_BATCH_GRAD_OUTPUTS), .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD,
             .types = {GRADD_T_FLOAT},
             .attrs = GRADD_ATTR_LIST({GRADD_BATCH_GIVEN, GRADD_ATTR_INT, false}),
             .infer = infer_backward, .ref = GRADD_REF(ref_backward),
             .cases = GRADD_CASES(
                 {.text = "f32[4,3,5] f32[4,3,5] f32[3] f32[3] f32[3]:(0.5,2) -> 3"},
                 {.text = "f32[4,3,5] f32[4,3,5] f32[3] f32[3] f32[3]:(0.5,2) | given=1 -> 3"},
                 {.text = "f32[9,70] f32[9,70] f32[70] f32[70] f32[70]:(0.5,2) -> 3"},
                 {.text = "f32[9,70] f32[9,70] f32[70] f32[70] f32[70]:(0.5,2) | given=1 -> 1"},
                 {.text = "f32[5,64,12,12] f32[5,64,12,12] f32[64] f32[64] f32[64]:(0.5,2) -> 3"},
                 {.text = "f32[600,90] f32[600,90] f32[90] f32[90] f32[90]:(0.5,2) -> 2"},
                 {.text = "f32[0,3,4] f32[0,3,4] f32[3] f32[3] f32[3] -> 3"},
                 {.text = "f32[2,3,0] f32[2,3,0] f32[3] f32[3] f32[3] -> 3"})),
    GRADD_OP("BatchNormalization", "", 9, (GRADD_BATCH_INPUTS, GRADD_BATCH_INPUTS), (1, 5),
             .until = 13, .types = {GRADD_T_FLOAT},
             .attrs = GRADD_ATTR_LIST({"epsilon", GRADD_ATTR_FLOAT, false},
                                      {"momentum", GRADD_ATTR_FLOAT, false},
                                      {"training_mode", GRADD_ATTR_INT, false}),
             .infer = infer_onnx, .expand = expand_onnx,
             .cases = GRADD_CASES(
                 {.text = "f32[5,3,2] f32[3] f32[3] f32[3] f32[3]:(0.5,2)"},
                 {.text = "f32[5,3,2] f32[3] f32[3] f32[3] f32[3]:(0.5,2) | momentum=0.7 -> 5",
                  .grad_tol = -1})),
    GRADD_OP("BatchNormalization", "", 14, (GRADD_BATCH_INPUTS, GRADD_BATCH_INPUTS),
             (1, GRADD_BATCH_OUT_INV), .types = {GRADD_T_FLOAT},
             .attrs = GRADD_ATTR_LIST({"epsilon", GRADD_ATTR_FLOAT, false},
                                      {"momentum", GRADD_ATTR_FLOAT, false},
                                      {"training_mode", GRADD_ATTR_INT, false}),
             .infer = infer_onnx, .expand = expand_onnx,
             .cases = GRADD_CASES(
                 {.text = "f32[4,3,5] f32[3] f32[3] f32[3] f32[3]:(0.5,2)"},
                 {.text = "f32[4,3,5] f32[3] f32[3] f32[3] f32[3]:(0.5,2) | training_mode=1"},
                 {.text = "f32[4,3] f32[3] f32[3] f32[3] f32[3]:(0.5,2) | training_mode=1 "
                          "momentum=0.7 epsilon=0.01 -> 3",
                  .grad_tol = -1})),
    /* What ONNX Runtime makes of it in training models. */
    GRADD_OP("BatchNormInternal", "com.microsoft", 1, (GRADD_BATCH_INPUTS, GRADD_BATCH_INPUTS),
             (1, 5), .types = {GRADD_T_FLOAT},
             .attrs = GRADD_ATTR_LIST({"epsilon", GRADD_ATTR_FLOAT, false},
                                      {"momentum", GRADD_ATTR_FLOAT, false},
                                      {"training_mode", GRADD_ATTR_INT, false}),
             .infer = infer_onnx, .expand = expand_onnx,
             .cases = GRADD_CASES(
                 {.text = "f32[4,3,5] f32[3] f32[3] f32[3] f32[3]:(0.5,2) | training_mode=1 -> 5",
                  .grad_tol = -1})));

GRADD_KERNELS(cpu, batchnorm,
              GRADD_KERNEL("BatchNorm", "loop", .types = {GRADD_T_BF16_F32_F64, GRADD_T_F32_F64},
                           .inplace = 1, .compute = compute_forward, .workspace = workspace_forward,
                           .parts = parts_forward),
              GRADD_KERNEL("BatchNormGrad", "loop",
                           .types = {GRADD_T_BF16_F32_F64, GRADD_T_BF16_F32_F64, GRADD_T_F32_F64},
                           .inplace = 3, .compute = compute_backward,
                           .workspace = workspace_backward, .parts = parts_backward));
