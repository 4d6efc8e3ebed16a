/* See conv.h. Sizes and attributes stay below MOST, so that products of two of them fit. */
#include "kernels/describe/conv.h"

#include <string.h>

#include "kernels/rules/rules.h"

enum { AXES = GRADD_CONV_AXES };
#define MOST ((int64_t)1 << 31)

static gradd_status_t misfit(const char *what, const gradd_type_t *a, const gradd_type_t *b,
                             int64_t groups) {
    char ta[GRADD_TYPE_TEXT], tb[GRADD_TYPE_TEXT];
    return GRADD_FAIL(GRAPH, "%s %s and %s do not fit, with %lld groups", what,
                      gradd_type_format(a, ta), gradd_type_format(b, tb), (long long)groups);
}

/* ---- attributes ------------------------------------------------------------------------------ */

/* One entry for each of the `axes` last of AXES; absent: they stay. */
static gradd_status_t read_sizes(gradd_attrs_t attrs, const char *name, int axes, int64_t least,
                                 int64_t *out) {
    const gradd_attr_t *a = gradd_attr_find(attrs, name);
    if (!a) return GRADD_OK;
    if (a->n != (size_t)axes)
        return GRADD_FAIL(GRAPH, "%s has %zu entries, expected %d", name, a->n, axes);
    for (int i = 0; i < axes; i++) {
        if (a->ints[i] < least || a->ints[i] > MOST)
            return GRADD_FAIL(GRAPH, "%s has the entry %lld, expected %lld to %lld", name,
                              (long long)a->ints[i], (long long)least, (long long)MOST);
        out[AXES - axes + i] = a->ints[i];
    }
    return GRADD_OK;
}

static gradd_status_t begin_reading(gradd_dtype_t dtype, int rank, gradd_attrs_t attrs,
                                    gradd_conv_t *v) {
    *v = (gradd_conv_t){.dtype = dtype, .axes = rank - 2};
    if (v->axes < 1 || v->axes > AXES)
        return GRADD_FAIL(UNSUPPORTED, "a convolution of a tensor of rank %d, expected 3 to %d",
                          rank, 2 + AXES);
    for (int i = 0; i < AXES; i++)
        v->x[i] = v->y[i] = v->kernel[i] = v->stride[i] = v->dilation[i] = 1;
    v->groups = gradd_attr_int(attrs, "group", 1);
    if (v->groups < 1 || v->groups > MOST)
        return GRADD_FAIL(GRAPH, "group is %lld, expected 1 or more", (long long)v->groups);
    GRADD_TRY(read_sizes(attrs, "strides", v->axes, 1, v->stride));
    return read_sizes(attrs, "dilations", v->axes, 1, v->dilation);
}

/* The spatial sizes of a tensor. */
static gradd_status_t take_sizes(const gradd_type_t *t, int axes, int64_t *out) {
    for (int i = 0; i < axes; i++) {
        if (t->dims[2 + i] > MOST)
            return GRADD_FAIL(LIMIT, "axis %d has %lld elements, a convolution takes %lld", 2 + i,
                              (long long)t->dims[2 + i], (long long)MOST);
        out[AXES - axes + i] = t->dims[2 + i];
    }
    return GRADD_OK;
}

/* Sizes of the kernel, which an attribute may say as well. */
static gradd_status_t take_kernel(const gradd_type_t *w, gradd_attrs_t attrs, gradd_conv_t *v) {
    int64_t said[AXES];
    GRADD_TRY(take_sizes(w, v->axes, v->kernel));
    memcpy(said, v->kernel, sizeof said);
    GRADD_TRY(read_sizes(attrs, "kernel_shape", v->axes, 0, said));
    for (int i = 0; i < AXES; i++) {
        if (v->kernel[i] < 1) return GRADD_FAIL(GRAPH, "a convolution with an empty kernel");
        if (said[i] != v->kernel[i])
            return GRADD_FAIL(GRAPH, "kernel_shape has the entry %lld, but W has %lld taps there",
                              (long long)said[i], (long long)v->kernel[i]);
    }
    return GRADD_OK;
}

static gradd_status_t take_bias(const gradd_view_t *in, int n_in, int at, int64_t channels,
                                gradd_conv_t *v) {
    char text[GRADD_TYPE_TEXT];
    if (n_in <= at || !in[at].type.dtype) return GRADD_OK;
    const gradd_type_t *bias = &in[at].type;
    if (bias->rank != 1 || bias->dims[0] != channels || bias->dtype != v->dtype)
        return GRADD_FAIL(GRAPH, "the bias is %s, expected %s[%lld]", gradd_type_format(bias, text),
                          gradd_dtype_name(v->dtype), (long long)channels);
    v->has_bias = true;
    return GRADD_OK;
}

/* Elements from the first to the last tap. */
static int64_t extent(const gradd_conv_t *v, int axis) {
    return (v->kernel[axis] - 1) * v->dilation[axis] + 1;
}

/* ---- padding --------------------------------------------------------------------------------- */

typedef enum auto_pad_e { NOTSET, VALID, SAME_UPPER, SAME_LOWER } auto_pad_t;

static gradd_status_t read_auto_pad(gradd_attrs_t attrs, auto_pad_t *out) {
    static const char *const names[] = {"NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"};
    const char *name = gradd_attr_string(attrs, "auto_pad", "NOTSET");
    for (int i = 0; i < 4; i++) {
        if (strcmp(name, names[i]) != 0) continue;
        *out = (auto_pad_t)i;
        return GRADD_OK;
    }
    return GRADD_FAIL(UNSUPPORTED, "auto_pad '%s'", name);
}

static gradd_status_t read_pads(gradd_attrs_t attrs, const gradd_conv_t *v, int64_t *begin,
                                int64_t *end) {
    const gradd_attr_t *pads = gradd_attr_find(attrs, "pads");
    if (!pads) return GRADD_OK;
    if (pads->n != (size_t)(2 * v->axes))
        return GRADD_FAIL(GRAPH, "pads has %zu entries, expected %d", pads->n, 2 * v->axes);
    for (int i = 0; i < 2 * v->axes; i++) {
        const int64_t pad = pads->ints[i];
        if (pad < -MOST || pad > MOST)
            return GRADD_FAIL(LIMIT, "pads has the entry %lld", (long long)pad);
        (i < v->axes ? begin : end)[AXES - v->axes + i % v->axes] = pad;
    }
    return GRADD_OK;
}

/* y and begin, of x, kernel and the padding. */
static gradd_status_t place(gradd_conv_t *v, gradd_attrs_t attrs) {
    auto_pad_t automatic = NOTSET;
    int64_t end[AXES] = {0};
    GRADD_TRY(read_auto_pad(attrs, &automatic));
    if (automatic == NOTSET) GRADD_TRY(read_pads(attrs, v, v->begin, end));
    for (int i = AXES - v->axes; i < AXES; i++) {
        const int64_t s = v->stride[i], n = extent(v, i);
        if (automatic >= SAME_UPPER) {
            v->y[i] = (v->x[i] + s - 1) / s;
            const int64_t lacks = (v->y[i] - 1) * s + n - v->x[i], total = lacks > 0 ? lacks : 0;
            v->begin[i] = automatic == SAME_UPPER ? total / 2 : total - total / 2;
            continue;
        }
        const int64_t room = v->x[i] + v->begin[i] + end[i] - n;
        if (room < 0)
            return GRADD_FAIL(GRAPH,
                              "axis %d has %lld elements and padding of %lld and %lld, fewer than "
                              "the %lld that the kernel reaches over",
                              i - (AXES - v->axes) + 2, (long long)v->x[i], (long long)v->begin[i],
                              (long long)end[i], (long long)n);
        v->y[i] = room / s + 1;
    }
    return GRADD_OK;
}

/* ---- operators ------------------------------------------------------------------------------- */

/* So that no product of sizes overflows further on. */
static gradd_status_t finish(const gradd_conv_t *v, gradd_conv_t *out) {
    const int64_t sizes[] = {v->images, v->in, v->out, v->kernel[0], v->kernel[1], v->kernel[2]};
    double product = 1;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        product *= sizes[i] > 0 ? (double)sizes[i] : 1;
    for (int i = 0; i < AXES; i++)
        product *= (double)(v->x[i] > v->y[i] ? v->x[i] : v->y[i]) + 1;
    if (product / (double)v->groups > 0x1p58)
        return GRADD_FAIL(LIMIT, "a convolution of %g products", product / (double)v->groups);
    *out = *v;
    return GRADD_OK;
}

gradd_status_t gradd_conv_of_conv(const gradd_view_t *in, int n_in, gradd_attrs_t attrs,
                                  gradd_conv_t *out) {
    const gradd_type_t *x = &in[GRADD_CONV_X].type, *w = &in[GRADD_CONV_W].type;
    gradd_conv_t v;
    GRADD_TRY(begin_reading(x->dtype, x->rank, attrs, &v));
    if (w->rank != x->rank || w->dtype != x->dtype || w->dims[0] % v.groups ||
        x->dims[1] % v.groups || w->dims[1] != x->dims[1] / v.groups)
        return misfit("x and W", x, w, v.groups);
    v.images = x->dims[0], v.in = x->dims[1], v.out = w->dims[0];
    GRADD_TRY(take_sizes(x, v.axes, v.x));
    GRADD_TRY(take_kernel(w, attrs, &v));
    GRADD_TRY(take_bias(in, n_in, GRADD_CONV_BIAS, v.out, &v));
    GRADD_TRY(place(&v, attrs));
    return finish(&v, out);
}

gradd_status_t gradd_conv_of_data(const gradd_view_t *in, int n_in, gradd_attrs_t attrs,
                                  gradd_conv_t *out) {
    const gradd_type_t *y = &in[GRADD_CONV_DATA_DY].type, *w = &in[GRADD_CONV_DATA_W].type;
    gradd_conv_t v;
    GRADD_TRY(begin_reading(y->dtype, y->rank, attrs, &v));
    if (w->rank != y->rank || w->dtype != y->dtype || w->dims[0] != y->dims[1] ||
        w->dims[0] % v.groups)
        return misfit("dy and W", y, w, v.groups);
    v.images = y->dims[0], v.out = y->dims[1];
    if (__builtin_mul_overflow(w->dims[1], v.groups, &v.in))
        return GRADD_FAIL(LIMIT, "too many channels");
    GRADD_TRY(take_sizes(y, v.axes, v.y));
    GRADD_TRY(take_kernel(w, attrs, &v));
    GRADD_TRY(take_bias(in, n_in, GRADD_CONV_DATA_BIAS, v.in, &v));
    GRADD_TRY(read_sizes(attrs, "dims", v.axes, 0, v.x));
    GRADD_TRY(read_sizes(attrs, "begins", v.axes, -MOST, v.begin));
    return finish(&v, out);
}

gradd_status_t gradd_conv_of_weight(const gradd_view_t *in, int n_in, gradd_attrs_t attrs,
                                    gradd_conv_t *out) {
    const gradd_type_t *x = &in[GRADD_CONV_WEIGHT_X].type, *y = &in[GRADD_CONV_WEIGHT_DY].type;
    gradd_conv_t v;
    (void)n_in;
    GRADD_TRY(begin_reading(x->dtype, x->rank, attrs, &v));
    if (y->rank != x->rank || y->dtype != x->dtype || y->dims[0] != x->dims[0] ||
        y->dims[1] % v.groups || x->dims[1] % v.groups)
        return misfit("x and dy", x, y, v.groups);
    v.images = x->dims[0], v.in = x->dims[1], v.out = y->dims[1];
    GRADD_TRY(take_sizes(x, v.axes, v.x));
    GRADD_TRY(take_sizes(y, v.axes, v.y));
    GRADD_TRY(read_sizes(attrs, "kernel_shape", v.axes, 1, v.kernel));
    GRADD_TRY(read_sizes(attrs, "begins", v.axes, -MOST, v.begin));
    return finish(&v, out);
}

/* Sizes of the result, and how far in front of it the first tap lies. */
static gradd_status_t place_transposed(gradd_conv_t *v, gradd_attrs_t attrs) {
    auto_pad_t automatic = NOTSET;
    int64_t end[AXES] = {0}, more[AXES] = {0}, wanted[AXES] = {-1, -1, -1};
    GRADD_TRY(read_auto_pad(attrs, &automatic));
    GRADD_TRY(read_sizes(attrs, "output_padding", v->axes, 0, more));
    GRADD_TRY(read_sizes(attrs, "output_shape", v->axes, 0, wanted));
    if (automatic == NOTSET) GRADD_TRY(read_pads(attrs, v, v->begin, end));
    for (int i = AXES - v->axes; i < AXES; i++) {
        const int64_t whole = (v->y[i] - 1) * v->stride[i] + extent(v, i) + more[i];
        if (wanted[i] < 0 && automatic >= SAME_UPPER) wanted[i] = v->y[i] * v->stride[i];
        v->x[i] = wanted[i];
        if (wanted[i] < 0) v->x[i] = whole - v->begin[i] - end[i];
        if (v->x[i] < 0 || v->x[i] > MOST)
            return GRADD_FAIL(GRAPH, "axis %d of %lld elements would have %lld in the result",
                              i - (AXES - v->axes) + 2, (long long)v->y[i], (long long)v->x[i]);
        if (wanted[i] < 0) continue;
        const int64_t cut = whole > wanted[i] ? whole - wanted[i] : 0;
        v->begin[i] = automatic == SAME_UPPER ? cut / 2 : cut - cut / 2;
    }
    return GRADD_OK;
}

gradd_status_t gradd_conv_of_transposed(const gradd_view_t *in, int n_in, gradd_attrs_t attrs,
                                        gradd_conv_t *out) {
    const gradd_type_t *x = &in[GRADD_CONV_X].type, *w = &in[GRADD_CONV_W].type;
    gradd_conv_t v;
    GRADD_TRY(begin_reading(x->dtype, x->rank, attrs, &v));
    if (w->rank != x->rank || w->dtype != x->dtype || w->dims[0] != x->dims[1] ||
        w->dims[0] % v.groups)
        return misfit("x and W", x, w, v.groups);
    v.images = x->dims[0], v.out = x->dims[1];
    if (__builtin_mul_overflow(w->dims[1], v.groups, &v.in))
        return GRADD_FAIL(LIMIT, "too many channels");
    GRADD_TRY(take_sizes(x, v.axes, v.y));
    GRADD_TRY(take_kernel(w, attrs, &v));
    GRADD_TRY(take_bias(in, n_in, GRADD_CONV_BIAS, v.in, &v));
    GRADD_TRY(place_transposed(&v, attrs));
    return finish(&v, out);
}

/* ---- any of the six ---------------------------------------------------------------------------
 */

/* [N, X..., C] as [N, C, X...]. */
static void put_channels_first(gradd_type_t *t) {
    if (t->rank < 3) return;
    const int64_t channels = t->dims[t->rank - 1];
    memmove(&t->dims[2], &t->dims[1], sizeof t->dims[0] * (size_t)(t->rank - 2));
    t->dims[1] = channels;
}

gradd_status_t gradd_conv_of_op(const gradd_op_t *op, const gradd_view_t *in, int n_in,
                                gradd_attrs_t attrs, gradd_conv_t *out,
                                gradd_conv_made_t *out_made) {
    gradd_view_t first[3] = {in[0], in[1]};
    const bool last = !strncmp(op->name, "ConvLast", 8);
    const char *made = op->name + (last ? 8 : 4);
    gradd_status_t status;
    if (n_in > 2) first[2] = in[2];
    if (last) put_channels_first(&first[0].type);
    if (!strcmp(made, "DataGrad")) {
        *out_made = GRADD_CONV_MAKES_X;
        status = gradd_conv_of_data(first, n_in, attrs, out);
    } else if (!strcmp(made, "WeightGrad")) {
        *out_made = GRADD_CONV_MAKES_W;
        if (last) put_channels_first(&first[1].type);
        status = gradd_conv_of_weight(first, n_in, attrs, out);
    } else {
        *out_made = GRADD_CONV_MAKES_Y;
        status = gradd_conv_of_conv(first, n_in, attrs, out);
    }
    if (!status) out->last = last;
    return status;
}

/* ---- types and attributes -------------------------------------------------------------------- */

static gradd_type_t type_of(const gradd_conv_t *v, int64_t first, int64_t second,
                            const int64_t *sizes) {
    gradd_type_t t = {
        v->dtype, 2 + v->axes, {first, second}
    };
    for (int i = 0; i < v->axes; i++)
        t.dims[2 + i] = sizes[AXES - v->axes + i];
    return t;
}

/* Of x or y. */
static gradd_type_t spatial_type(const gradd_conv_t *v, int64_t channels, const int64_t *sizes) {
    gradd_type_t t = type_of(v, v->images, channels, sizes);
    if (!v->last) return t;
    memmove(&t.dims[1], &t.dims[2], sizeof t.dims[0] * (size_t)v->axes);
    t.dims[1 + v->axes] = channels;
    return t;
}

gradd_type_t gradd_conv_x_type(const gradd_conv_t *v) {
    return spatial_type(v, v->in, v->x);
}
gradd_type_t gradd_conv_w_type(const gradd_conv_t *v) {
    return type_of(v, v->out, v->in / v->groups, v->kernel);
}
gradd_type_t gradd_conv_y_type(const gradd_conv_t *v) {
    return spatial_type(v, v->out, v->y);
}

/* Those that all three have. */
static int shared_attrs(const gradd_conv_t *v, gradd_attr_t *out) {
    const int first = AXES - v->axes;
    out[0] = gradd_make_ints("strides", v->stride + first, (size_t)v->axes);
    out[1] = gradd_make_ints("dilations", v->dilation + first, (size_t)v->axes);
    out[2] = gradd_make_int("group", v->groups);
    return 3;
}

int gradd_conv_data_attrs(const gradd_conv_t *v, gradd_attr_t *out) {
    int n = shared_attrs(v, out);
    out[n++] = gradd_make_ints("begins", v->begin + AXES - v->axes, (size_t)v->axes);
    out[n++] = gradd_make_ints("dims", v->x + AXES - v->axes, (size_t)v->axes);
    return n;
}

int gradd_conv_weight_attrs(const gradd_conv_t *v, gradd_attr_t *out) {
    int n = shared_attrs(v, out);
    out[n++] = gradd_make_ints("begins", v->begin + AXES - v->axes, (size_t)v->axes);
    out[n++] = gradd_make_ints("kernel_shape", v->kernel + AXES - v->axes, (size_t)v->axes);
    return n;
}

int gradd_conv_attrs(const gradd_conv_t *v, int64_t *pads, gradd_attr_t *out) {
    int n = shared_attrs(v, out);
    for (int i = 0; i < v->axes; i++) {
        const int a = AXES - v->axes + i;
        pads[i] = v->begin[a];
        pads[v->axes + i] = (v->y[a] - 1) * v->stride[a] + extent(v, a) - v->x[a] - v->begin[a];
    }
    out[n++] = gradd_make_ints("pads", pads, (size_t)(2 * v->axes));
    return n;
}

/* ---- cost ------------------------------------------------------------------------------------ */

void gradd_conv_cost(const gradd_infer_t *c, gradd_cost_t *cost) {
    gradd_conv_t v;
    gradd_conv_made_t made;
    if (gradd_conv_of_op(c->op, c->in, c->n_in, c->attrs, &v, &made)) return;
    const double y = (double)v.images * (double)v.out * (double)gradd_conv_volume(v.y);
    const double taps = (double)(v.in / v.groups) * (double)gradd_conv_volume(v.kernel);
    cost->flops = 2 * y * taps + (v.has_bias ? (double)gradd_type_count(&c->out[0]) : 0);
}
