/* Resampling of grids: composites of Taps along one axis after the other.
 *
 * Resample(x, sizes, scales) is PyTorch's interpolate over the axes behind batch and channels:
 * sizes i64 has one entry for each, scales (f64, absent = they follow from the sizes) as the caller
 * gave them. Resize is ONNX's. What they say about sizes is known when a plan is made.
 */
#include <math.h>
#include <string.h>

#include "kernels/contract/kernel.h"
#include "kernels/describe/resample.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

enum { FRONT = 2 };

static bool says(gradd_attrs_t attrs, const char *name, const char *otherwise, const char *value) {
    return !strcmp(gradd_attr_string(attrs, name, otherwise), value);
}

/* The place of an attribute's text in a list that NULL ends. */
static gradd_status_t choice(gradd_attrs_t attrs, const char *name, const char *otherwise,
                             const char *const *list, int *out) {
    const char *given = gradd_attr_string(attrs, name, otherwise);
    for (*out = 0; list[*out]; (*out)++)
        if (!strcmp(list[*out], given)) return GRADD_OK;
    return GRADD_FAIL(UNSUPPORTED, "%s \"%s\"", name, given);
}

/* ---- PyTorch's ------------------------------------------------------------------------------- */

static gradd_status_t infer_resample(gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[0].type;
    int64_t sizes[GRADD_MAX_RANK];
    int n;
    GRADD_TRY(gradd_known_i64s(c, 1, sizes, GRADD_MAX_RANK, &n));
    if (n < 1 || n != x->rank - FRONT)
        return GRADD_FAIL(GRAPH, "%d sizes for an input of rank %d", n, x->rank);
    if (c->n_in > 2 && c->in[2].type.dtype != GRADD_DT_NONE &&
        (!c->in[2].data || c->in[2].type.rank != 1 || c->in[2].type.dims[0] != n))
        return GRADD_FAIL(GRAPH, "scales must be %d known numbers", n);
    c->out[0] = *x;
    for (int i = 0; i < n; i++) {
        if (sizes[i] < 1) return GRADD_FAIL(GRAPH, "a size of %lld", (long long)sizes[i]);
        c->out[0].dims[FRONT + i] = sizes[i];
    }
    return GRADD_OK;
}

static gradd_status_t expand_resample(gradd_expand_t *x) {
    static const char *const kinds[] = {"nearest", "linear", "cubic", NULL};
    gradd_builder_t *b = x->b;
    const gradd_type_t type = *gradd_val_type(b, x->in[0]);
    const bool scaled = x->n_in > 2 && x->in[2] != GRADD_NONE;
    const int64_t *sizes = b->data(b, x->in[1]);
    const double *scales = scaled ? b->data(b, x->in[2]) : NULL;
    gradd_torch_resample_t how = {.exact = gradd_attr_int(x->attrs, "exact", 0),
                                  .align_corners = gradd_attr_int(x->attrs, "align_corners", 0),
                                  .antialias = gradd_attr_int(x->attrs, "antialias", 0),
                                  .narrow = type.dtype != GRADD_DT_F64};
    int kind;
    GRADD_TRY(choice(x->attrs, "mode", "nearest", kinds, &kind));
    how.kind = (gradd_resample_kind_t)kind;
    gradd_val_t v = x->in[0];
    for (int i = 0; i < type.rank - FRONT; i++) {
        gradd_windows_t w;
        how.scale = scales ? scales[i] : 0;
        GRADD_TRY(gradd_windows_torch(type.dims[FRONT + i], sizes[i], &how, &w));
        v = gradd_emit_taps(b, v, FRONT + i, &w);
        gradd_windows_finish(&w);
    }
    x->out[0] = gradd_cast(b, v, type.dtype);
    return b->status;
}

/* ---- ONNX's ---------------------------------------------------------------------------------- */

enum { SCALES = 2, SIZES = 3 };

typedef struct resize_s {
    bool is_resized[GRADD_MAX_RANK];
    double scale[GRADD_MAX_RANK];
    int64_t size[GRADD_MAX_RANK];
    gradd_onnx_resample_t how;
} resize_t;

static gradd_status_t read_how(gradd_attrs_t attrs, gradd_onnx_resample_t *how) {
    static const char *const kinds[] = {"nearest", "linear", "cubic", NULL};
    static const char *const places[] = {"half_pixel",         "half_pixel_symmetric",
                                         "pytorch_half_pixel", "align_corners",
                                         "asymmetric",         NULL};
    static const char *const rounds[] = {"round_prefer_floor", "round_prefer_ceil", "floor", "ceil",
                                         NULL};
    int kind, place, round;
    GRADD_TRY(choice(attrs, "mode", "nearest", kinds, &kind));
    GRADD_TRY(choice(attrs, "coordinate_transformation_mode", "half_pixel", places, &place));
    GRADD_TRY(choice(attrs, "nearest_mode", "round_prefer_floor", rounds, &round));
    *how = (gradd_onnx_resample_t){.kind = (gradd_resample_kind_t)kind,
                                   .place = (gradd_place_t)place,
                                   .round = (gradd_round_t)round,
                                   .antialias = gradd_attr_int(attrs, "antialias", 0),
                                   .exclude_outside = gradd_attr_int(attrs, "exclude_outside", 0),
                                   .cubic_a = gradd_attr_float(attrs, "cubic_coeff_a", -0.75)};
    return GRADD_OK;
}

static bool is_given(const gradd_view_t *in, int n_in, int i) {
    return i < n_in && in[i].type.dtype != GRADD_DT_NONE && gradd_type_count(&in[i].type);
}

static double number(const gradd_view_t *v, int i) {
    return v->type.dtype == GRADD_DT_F64 ? ((const double *)v->data)[i]
                                         : (double)((const float *)v->data)[i];
}

/* keep_aspect_ratio_policy: one scale, by which no axis becomes larger, or smaller, than asked. */
static void keep_ratio(const gradd_type_t *x, bool larger, resize_t *out) {
    double scale = larger ? 0 : INFINITY;
    for (int i = 0; i < x->rank; i++)
        if (out->is_resized[i])
            scale = larger ? fmax(scale, out->scale[i]) : fmin(scale, out->scale[i]);
    for (int i = 0; i < x->rank; i++)
        if (out->is_resized[i]) {
            out->size[i] = (int64_t)floor(scale * (double)x->dims[i] + 0.5);
            out->scale[i] = scale;
        }
}

static gradd_status_t read_resize(const gradd_view_t *in, int n_in, gradd_attrs_t attrs,
                                  resize_t *out) {
    const gradd_type_t *x = &in[0].type;
    const bool by_size = is_given(in, n_in, SIZES);
    const gradd_attr_t *axes = gradd_attr_find(attrs, "axes");
    const int which = by_size ? SIZES : SCALES, n = axes ? (int)axes->n : x->rank;
    *out = (resize_t){0};
    GRADD_TRY(read_how(attrs, &out->how));
    if (by_size == is_given(in, n_in, SCALES))
        return GRADD_FAIL(GRAPH, "either scales or sizes must be given");
    if (!in[which].data)
        return GRADD_FAIL(UNSUPPORTED, "input %d depends on data that is not known before the run",
                          which);
    if (gradd_type_count(&in[which].type) != n)
        return GRADD_FAIL(GRAPH, "input %d has %lld entries for %d axes", which,
                          (long long)gradd_type_count(&in[which].type), n);
    for (int i = 0; i < x->rank; i++)
        out->size[i] = x->dims[i], out->scale[i] = 1;
    for (int i = 0; i < n; i++) {
        int axis = i;
        if (axes) GRADD_TRY(gradd_axis(axes->ints[i], x->rank, false, &axis));
        const double scale = by_size ? 0 : number(&in[SCALES], i);
        if (!by_size && !(scale > 0 && scale * (double)(x->dims[axis] + 1) < 1e15))
            return GRADD_FAIL(GRAPH, "a scale of %g", scale);
        out->size[axis] = by_size ? ((const int64_t *)in[which].data)[i]
                                  : (int64_t)floor(scale * (double)x->dims[axis]);
        out->scale[axis] = by_size ? (double)out->size[axis] / (double)x->dims[axis] : scale;
        out->is_resized[axis] = true;
    }
    if (by_size && !says(attrs, "keep_aspect_ratio_policy", "stretch", "stretch"))
        keep_ratio(x, says(attrs, "keep_aspect_ratio_policy", "", "not_smaller"), out);
    return GRADD_OK;
}

static gradd_status_t infer_resize(gradd_infer_t *c) {
    resize_t r;
    GRADD_TRY(read_resize(c->in, c->n_in, c->attrs, &r));
    c->out[0] = c->in[0].type;
    for (int i = 0; i < c->out[0].rank; i++) {
        if (r.size[i] < 0 || (r.size[i] && !c->in[0].type.dims[i]))
            return GRADD_FAIL(GRAPH, "axis %d of %lld elements gets %lld", i,
                              (long long)c->in[0].type.dims[i], (long long)r.size[i]);
        c->out[0].dims[i] = r.size[i];
    }
    return GRADD_OK;
}

static gradd_status_t expand_resize(gradd_expand_t *x) {
    gradd_builder_t *b = x->b;
    gradd_view_t in[SIZES + 1] = {
        {{0}, NULL}
    };
    resize_t r;
    for (int i = 0; i < x->n_in; i++)
        if (x->in[i] != GRADD_NONE)
            in[i] = (gradd_view_t){*gradd_val_type(b, x->in[i]),
                                   (void *)(uintptr_t)b->data(b, x->in[i])};
    GRADD_TRY(read_resize(in, x->n_in, x->attrs, &r));
    gradd_val_t v = x->in[0];
    for (int i = 0; i < in[0].type.rank; i++) {
        gradd_windows_t w;
        if (r.size[i] == in[0].type.dims[i] && r.scale[i] == 1) continue;
        r.how.scale = r.scale[i];
        GRADD_TRY(gradd_windows_onnx(in[0].type.dims[i], r.size[i], &r.how, &w));
        v = gradd_emit_taps(b, v, i, &w);
        gradd_windows_finish(&w);
    }
    x->out[0] = v == x->in[0] ? GRADD_EMIT(b, "Identity", v) : gradd_cast(b, v, in[0].type.dtype);
    return b->status;
}

/* ---- rows ------------------------------------------------------------------------------------ */

GRADD_OPS(
    resize,
    GRADD_OP("Resample", "com.gradd", 1, (2, 3), (1, 1), .no_diff = 4,
             .types = {GRADD_T_FLOAT, GRADD_DTB(I64), GRADD_DTB(F64)},
             .attrs = GRADD_ATTR_LIST({"mode", GRADD_ATTR_STRING, false},
                                      {"exact", GRADD_ATTR_INT, false},
                                      {"align_corners", GRADD_ATTR_INT, false},
                                      {"antialias", GRADD_ATTR_INT, false}),
             .infer = infer_resample, .expand = expand_resample,
             .cases = GRADD_CASES(
                 {.text = "f32[2,3,5] i64[1]={8}"}, {.text = "f32[2,3,5] i64[1]={3} | exact=1"},
                 {.text = "f32[1,2,4,5] i64[2]={7,3} | mode=\"linear\""},
                 {.text = "f32[1,2,4,5] i64[2]={7,3} | mode=\"linear\" align_corners=1"},
                 {.text = "f32[1,2,4,5] i64[2]={7,3} | mode=\"cubic\""},
                 {.text = "f32[1,2,9,5] i64[2]={4,8} | mode=\"linear\" antialias=1"},
                 {.text = "f32[1,2,9,5] i64[2]={4,8} | mode=\"cubic\" antialias=1"},
                 {.text = "f32[1,2,5] i64[1]={8} f64[1]={1.7} | mode=\"linear\""})),
    GRADD_OP("Resize", "", 11, (1, 4), (1, 1),
             .types = {GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_T_F32_F64, GRADD_DTB(I64)},
             .no_diff = 2 | 4,
             .attrs = GRADD_ATTR_LIST({"antialias", GRADD_ATTR_INT, false},
                                      {"axes", GRADD_ATTR_INTS, false},
                                      {"coordinate_transformation_mode", GRADD_ATTR_STRING, false},
                                      {"cubic_coeff_a", GRADD_ATTR_FLOAT, false},
                                      {"exclude_outside", GRADD_ATTR_INT, false},
                                      {"extrapolation_value", GRADD_ATTR_FLOAT, false},
                                      {"keep_aspect_ratio_policy", GRADD_ATTR_STRING, false},
                                      {"mode", GRADD_ATTR_STRING, false},
                                      {"nearest_mode", GRADD_ATTR_STRING, false}),
             .infer = infer_resize, .expand = expand_resize,
             .cases = GRADD_CASES(
                 {.text = "f32[2,3,5] - f32[3]={1,1,1.5}"},
                 {.text = "f32[1,2,4,5] - - i64[4]={1,2,7,3} | mode=\"linear\""},
                 {.text = "f32[1,2,4,5] - - i64[4]={1,2,7,3} | mode=\"cubic\" "
                          "coordinate_transformation_mode=\"align_corners\""},
                 {.text = "f32[1,2,4,5] - f32[4]={1,1,0.6,0.6} | mode=\"cubic\" antialias=1"})));
