/* GridSample: values of x at the places that a grid names, a composite.
 *
 * X is [N, C, D1, ..., Dk], the grid [N, O1, ..., Ok, k], Y [N, C, O1, ..., Ok]. The last axis of
 * the grid holds a place, that along Dk first, from -1 to 1: between the outer edges of the first
 * and the last element, with align_corners between their middles. Modes are nearest, linear
 * (bilinear) and cubic (bicubic), beyond the ends padding_mode counts: zeros, border or reflection.
 *
 * Expansion: elements of x become rows of C channels; each neighbour of a place is one Gather of
 * rows, times its weight. So the gradient of x is a sum of rows in a fixed order. Gradients are
 * PyTorch's: nearest has none for the grid, and none arrives where a place was moved to an end.
 * Source: https://onnx.ai/onnx/operators/onnx__GridSample.html
 */
#include <string.h>

#include "kernels/contract/op.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

enum { X, GRID };
enum { FRONT = 2, MAX_AXES = 3, MAX_TAPS = 4 };
typedef enum { NEAREST, LINEAR, CUBIC } sampling_t;
typedef enum { ZEROS, BORDER, REFLECTION } padding_t;

typedef struct sample_s {
    int axes;
    sampling_t sampling;
    padding_t padding;
    bool aligned;
    int64_t batch, channels, places, elements; /* of a plane: places of the grid, elements of x */
    gradd_type_t x, y;
    gradd_dtype_t wide;
    gradd_val_t zero; /* in that type */
} sample_t;

/* ---- attributes and shapes ------------------------------------------------------------------- */

static gradd_status_t choose(gradd_attrs_t attrs, const char *attr, const char *const (*names)[2],
                             int n, int *out) {
    const char *given = gradd_attr_string(attrs, attr, names[0][0]);
    for (*out = 0; *out < n; ++*out)
        if (!strcmp(given, names[*out][0]) || !strcmp(given, names[*out][1])) return GRADD_OK;
    return GRADD_FAIL(GRAPH, "%s is \"%s\", expected %s, %s or %s", attr, given, names[0][0],
                      names[1][0], names[2][0]);
}

static gradd_status_t read_sample(const gradd_type_t *x, const gradd_type_t *grid,
                                  gradd_attrs_t attrs, sample_t *s) {
    static const char *const samplings[][2] = {
        {"linear",  "bilinear"},
        {"nearest", "nearest" },
        {"cubic",   "bicubic" }
    };
    static const char *const paddings[][2] = {
        {"zeros",      "zeros"     },
        {"border",     "border"    },
        {"reflection", "reflection"}
    };
    int sampling, padding;
    GRADD_TRY(choose(attrs, "mode", samplings, 3, &sampling));
    GRADD_TRY(choose(attrs, "padding_mode", paddings, 3, &padding));
    *s = (sample_t){.axes = x->rank - FRONT,
                    .sampling = sampling == 0   ? LINEAR
                                : sampling == 1 ? NEAREST
                                                : CUBIC,
                    .padding = (padding_t)padding,
                    .aligned = gradd_attr_int(attrs, "align_corners", 0),
                    .x = *x,
                    .y = *x,
                    .wide = x->dtype == GRADD_DT_F64 ? GRADD_DT_F64 : GRADD_DT_F32,
                    .places = 1,
                    .elements = 1};
    if (s->axes < 1 || s->axes > MAX_AXES)
        return GRADD_FAIL(UNSUPPORTED, "the input has rank %d, sampling is there for 3 to %d",
                          x->rank, FRONT + MAX_AXES);
    if (grid->rank != x->rank || grid->dims[0] != x->dims[0] ||
        grid->dims[grid->rank - 1] != s->axes)
        return GRADD_FAIL(GRAPH, "the grid does not fit an input of %d axes and batch %lld",
                          s->axes, (long long)x->dims[0]);
    s->batch = x->dims[0];
    s->channels = x->dims[1];
    for (int i = 0; i < s->axes; i++) {
        if (x->dims[FRONT + i] < 1) return GRADD_FAIL(GRAPH, "axis %d is empty", FRONT + i);
        s->elements *= x->dims[FRONT + i];
        s->places *= grid->dims[1 + i];
        s->y.dims[FRONT + i] = grid->dims[1 + i];
    }
    return gradd_type_check(&s->y);
}

static gradd_status_t infer_sample(gradd_infer_t *c) {
    sample_t s;
    GRADD_TRY(read_sample(&c->in[X].type, &c->in[GRID].type, c->attrs, &s));
    c->out[0] = s.y;
    return GRADD_OK;
}

/* ---- places along one axis ------------------------------------------------------------------- */

static gradd_val_t number(gradd_builder_t *b, const sample_t *s, double value) {
    return gradd_const_scalar(b, s->wide, value);
}

/* v * factor + offset */
static gradd_val_t moved(gradd_builder_t *b, const sample_t *s, gradd_val_t v, double factor,
                         double offset) {
    if (factor != 1) v = GRADD_EMIT(b, "Mul", v, number(b, s, factor));
    return offset == 0 ? v : GRADD_EMIT(b, "Add", v, number(b, s, offset));
}

/* From [-1, 1] to the numbers of elements, n of them. */
static gradd_val_t in_elements(gradd_builder_t *b, const sample_t *s, gradd_val_t v, int64_t n) {
    const double size = (double)n;
    v = moved(b, s, v, 1, 1);
    if (s->aligned) return moved(b, s, moved(b, s, v, 0.5, 0), size - 1, 0);
    return moved(b, s, moved(b, s, v, size, -1), 0.5, 0);
}

/* Cut to [0, n - 1]: no gradient arrives from the ends on. */
static gradd_val_t cut(gradd_builder_t *b, const sample_t *s, gradd_val_t v, int64_t n) {
    const gradd_val_t low = s->zero, high = number(b, s, (double)(n - 1));
    gradd_val_t inside =
        GRADD_EMIT(b, "And", GRADD_EMIT(b, "Greater", v, low), GRADD_EMIT(b, "Less", v, high));
    gradd_val_t end = GRADD_EMIT(b, "StopGradient", GRADD_EMIT(b, "Clip", v, low, high));
    return GRADD_EMIT(b, "Where", inside, v, end);
}

/* Mirrored at the ends as often as it takes: at the outer edges, aligned at the middles. */
static gradd_val_t mirrored(gradd_builder_t *b, const sample_t *s, gradd_val_t v, int64_t n) {
    const double low = s->aligned ? 0 : -0.5, span = s->aligned ? (double)(n - 1) : (double)n;
    if (span == 0) return GRADD_EMIT(b, "Mul", v, s->zero);
    gradd_val_t zero = s->zero, length = number(b, s, span), two = number(b, s, 2);
    const gradd_attr_t fmod = gradd_make_int("fmod", 1);
    v = moved(b, s, v, 1, -low);
    v = GRADD_EMIT(b, "Where", GRADD_EMIT(b, "Less", v, zero), GRADD_EMIT(b, "Neg", v), v);
    gradd_val_t flips = GRADD_EMIT(b, "Floor", GRADD_EMIT(b, "Div", v, length));
    gradd_val_t rest = gradd_emit_attrs(b, "Mod", (gradd_val_t[]){v, length}, 2, &fmod, 1);
    gradd_val_t odd = gradd_emit_attrs(b, "Mod", (gradd_val_t[]){flips, two}, 2, &fmod, 1);
    gradd_val_t there = moved(b, s, rest, 1, low), back = moved(b, s, rest, -1, span + low);
    return GRADD_EMIT(b, "Where", GRADD_EMIT(b, "Equal", odd, zero), there, back);
}

static gradd_val_t padded(gradd_builder_t *b, const sample_t *s, gradd_val_t v, int64_t n) {
    if (s->padding == ZEROS) return v;
    if (s->padding == REFLECTION) v = mirrored(b, s, v, n);
    return cut(b, s, v, n);
}

/* ---- neighbours ------------------------------------------------------------------------------ */

/* Of each place along one axis: [N, places] each. */
typedef struct axis_s {
    int taps;
    gradd_val_t index[MAX_TAPS];  /* i64, within the axis, times the elements of a step */
    gradd_val_t within[MAX_TAPS]; /* whether there is such an element; GRADD_NONE = always */
    gradd_val_t weight[MAX_TAPS]; /* GRADD_NONE = 1 */
} axis_t;

/* a t^3 + b t^2 + c t + d */
static gradd_val_t polynomial(gradd_builder_t *b, const sample_t *s, gradd_val_t t,
                              const double *c) {
    gradd_val_t v = moved(b, s, t, c[0], c[1]);
    for (int i = 2; i < 4; i++)
        v = moved(b, s, GRADD_EMIT(b, "Mul", v, t), 1, c[i]);
    return v;
}

static void set_tap(gradd_builder_t *b, const sample_t *s, axis_t *axis, gradd_val_t place,
                    int64_t n, int64_t step) {
    const gradd_val_t low = s->zero, high = number(b, s, (double)(n - 1));
    const int i = axis->taps++;
    axis->within[i] = GRADD_EMIT(b, "And", GRADD_EMIT(b, "GreaterOrEqual", place, low),
                                 GRADD_EMIT(b, "LessOrEqual", place, high));
    gradd_val_t index = gradd_cast(b, GRADD_EMIT(b, "Clip", place, low, high), GRADD_DT_I64);
    axis->index[i] = GRADD_EMIT(b, "Mul", index, gradd_const_scalar(b, GRADD_DT_I64, (double)step));
}

static void find_taps(gradd_builder_t *b, const sample_t *s, gradd_val_t v, int64_t n, int64_t step,
                      axis_t *axis) {
    static const double a = -0.75;
    static const double cubic[MAX_TAPS][4] = {
        {a,        -2 * a,    a,  0},
        {a + 2,    -(a + 3),  0,  1},
        {-(a + 2), 2 * a + 3, -a, 0},
        {-a,       a,         0,  0}
    };
    *axis = (axis_t){0};
    v = in_elements(b, s, v, n);
    if (s->sampling != CUBIC) v = padded(b, s, v, n);
    if (s->sampling == NEAREST) {
        axis->weight[0] = GRADD_NONE;
        set_tap(b, s, axis, GRADD_EMIT(b, "Round", v), n, step);
        return;
    }
    const gradd_val_t first = GRADD_EMIT(b, "StopGradient", GRADD_EMIT(b, "Floor", v));
    const gradd_val_t t = GRADD_EMIT(b, "Sub", v, first);
    for (int i = 0; i < (s->sampling == CUBIC ? 4 : 2); i++) {
        gradd_val_t place = moved(b, s, first, 1, s->sampling == CUBIC ? i - 1 : i);
        if (s->sampling == CUBIC) place = GRADD_EMIT(b, "StopGradient", padded(b, s, place, n));
        axis->weight[i] = s->sampling == CUBIC ? polynomial(b, s, t, cubic[i])
                          : i                  ? t
                                               : moved(b, s, t, -1, 1);
        set_tap(b, s, axis, place, n, step);
    }
}

/* One neighbour along each axis: a row of channels times its weight, [N, places, C]. */
static gradd_val_t neighbour(gradd_builder_t *b, const sample_t *s, const axis_t *axes,
                             const int *taps, gradd_val_t rows, gradd_val_t first) {
    const int64_t column[] = {s->batch, s->places, 1};
    gradd_val_t index = first, within = GRADD_NONE, weight = GRADD_NONE;
    for (int i = 0; i < s->axes; i++) {
        const axis_t *axis = &axes[i];
        const gradd_val_t w = axis->weight[taps[i]], in = axis->within[taps[i]];
        index = GRADD_EMIT(b, "Add", index, axis->index[taps[i]]);
        within = within == GRADD_NONE ? in : GRADD_EMIT(b, "And", within, in);
        if (w != GRADD_NONE) weight = weight == GRADD_NONE ? w : GRADD_EMIT(b, "Mul", weight, w);
    }
    gradd_val_t v = gradd_cast(b, GRADD_EMIT(b, "Gather", rows, index), s->wide);
    v = GRADD_EMIT(b, "Where", gradd_reshape_to(b, within, column, 3), v, s->zero);
    if (weight == GRADD_NONE) return v;
    return GRADD_EMIT(b, "Mul", v, gradd_reshape_to(b, weight, column, 3));
}

/* ---- expansion ------------------------------------------------------------------------------- */

/* Rows of channels, [N * elements, C]. */
static gradd_val_t rows_of(gradd_builder_t *b, const sample_t *s, gradd_val_t x) {
    const int64_t planes[] = {s->batch, s->channels, s->elements}, perm[] = {0, 2, 1};
    const int64_t rows[] = {s->batch * s->elements, s->channels};
    x = gradd_transpose(b, gradd_reshape_to(b, x, planes, 3), perm, 3);
    return gradd_reshape_to(b, x, rows, 2);
}

/* The number of each batch's first row, [N, 1]. */
static gradd_val_t first_rows(gradd_builder_t *b, const sample_t *s) {
    const int64_t column[] = {s->batch, 1};
    gradd_val_t ends[] = {gradd_const_scalar(b, GRADD_DT_I64, 0),
                          gradd_const_scalar(b, GRADD_DT_I64, (double)s->batch),
                          gradd_const_scalar(b, GRADD_DT_I64, 1)};
    gradd_val_t first = gradd_reshape_to(b, gradd_emit_n(b, "Range", 3, ends), column, 2);
    return GRADD_EMIT(b, "Mul", first, gradd_const_scalar(b, GRADD_DT_I64, (double)s->elements));
}

static gradd_status_t expand_sample(gradd_expand_t *x) {
    gradd_builder_t *b = x->b;
    sample_t s;
    axis_t axes[MAX_AXES];
    int taps[MAX_AXES] = {0}, at;
    GRADD_TRY(
        read_sample(gradd_val_type(b, x->in[X]), gradd_val_type(b, x->in[GRID]), x->attrs, &s));
    s.zero = gradd_const_scalar(b, s.wide, 0);
    const int64_t flat[] = {s.batch, s.places}, back[] = {0, 2, 1};
    const gradd_val_t grid = gradd_cast(b, x->in[GRID], s.wide);
    int64_t step = 1;
    for (int i = s.axes - 1; i >= 0; i--) {
        const int64_t column = s.axes - 1 - i;
        gradd_val_t v = gradd_slice(b, grid, -1, column, column + 1, 1);
        find_taps(b, &s, gradd_reshape_to(b, v, flat, 2), s.x.dims[FRONT + i], step, &axes[i]);
        step *= s.x.dims[FRONT + i];
    }
    const gradd_val_t rows = rows_of(b, &s, x->in[X]), first = first_rows(b, &s);
    gradd_val_t sum = GRADD_NONE;
    do {
        gradd_val_t v = neighbour(b, &s, axes, taps, rows, first);
        sum = sum == GRADD_NONE ? v : GRADD_EMIT(b, "Add", sum, v);
        for (at = s.axes - 1; at >= 0 && ++taps[at] == axes[at].taps; at--)
            taps[at] = 0;
    } while (at >= 0 && !b->status);
    sum = gradd_transpose(b, gradd_cast(b, sum, s.x.dtype), back, 3);
    x->out[0] = gradd_reshape_to(b, sum, s.y.dims, s.y.rank);
    return b->status;
}

/* ---- row ------------------------------------------------------------------------------------- */

GRADD_OPS(gridsample,
          GRADD_OP("GridSample", "", 16, (2, 2), (1, 1), .types = {GRADD_T_FLOAT},
                   .attrs = GRADD_ATTR_LIST({"align_corners", GRADD_ATTR_INT, false},
                                            {"mode", GRADD_ATTR_STRING, false},
                                            {"padding_mode", GRADD_ATTR_STRING, false}),
                   .infer = infer_sample, .expand = expand_sample,
                   .cases = GRADD_CASES(
                       {.text = "f32[2,3,4,5] f32[2,3,2,2]:(-1.2,1.2)"},
                       {.text = "f32[2,3,4,5] f32[2,3,2,2]:(-1.2,1.2) | align_corners=1"},
                       {.text = "f32[1,2,4,5] f32[1,3,2,2]:(-3,3) | padding_mode=\"border\""},
                       {.text = "f32[1,2,4,5] f32[1,3,2,2]:(-4,4) | padding_mode=\"reflection\""},
                       {.text = "f32[1,2,4,5] f32[1,3,2,2]:(-4,4) | padding_mode=\"reflection\" "
                                "align_corners=1"},
                       {.text = "f32[1,2,4,5] f32[1,3,2,2]:(-1.2,1.2) | mode=\"nearest\""},
                       {.text = "f32[1,2,4,5] f32[1,3,2,2]:(-1.2,1.2) | mode=\"cubic\""},
                       {.text = "f32[1,2,4,5] f32[1,3,2,2]:(-3,3) | mode=\"bicubic\" "
                                "padding_mode=\"reflection\""},
                       {.text = "f32[1,2,3,4,2] f32[1,2,1,3,3]:(-1.2,1.2)"},
                       {.text = "f32[1,2,3] f32[1,4,1]:(-1.2,1.2)"},
                       {.text = "f32[1,2,1,1] f32[1,3,2,2] | padding_mode=\"reflection\" "
                                "align_corners=1"},
                       {.text = "f32[0,2,3,4] f32[0,2,2,2]"},
                       {.text = "f32[1,2,3,4] f32[1,0,2,2]"})));
