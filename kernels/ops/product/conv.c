/* Convolutions: Conv and ConvTranspose of ONNX over one to three axes, and the gradients of data
 * and weight, of which everything is made (kernels/describe/conv.h).
 *
 * Math: y = Conv(x, W) + b, x [N, C, X...], W [M, C / groups, K...], b [M], y [N, M, Y...], all
 * sums in f32 for bf16 and f16, rounded once after the bias. Saved for backward: x and W.
 * Gradients: dx = ConvDataGrad(dy, W), dW = ConvWeightGrad(x, dy), db = sum of dy over all but
 * channels. ConvTranspose(x, W) is ConvDataGrad(x, W) with a bias, so ConvDataGrad has gradients
 * as well: d(dy) = Conv(d, W) and dW = ConvWeightGrad(d, dy). Taps that lie in the padding add
 * nothing, or 0 times W: with an infinite W kernels differ in that. */
#include <string.h>

#include "kernels/contract/kernel.h"
#include "kernels/cpu/conv/conv.h"
#include "kernels/describe/conv.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rowwise.h"
#include "kernels/rules/rules.h"

enum { AXES = GRADD_CONV_AXES };

/* ---- shape rules ----------------------------------------------------------------------------- */

static gradd_status_t infer_conv(gradd_infer_t *c) {
    gradd_conv_t v;
    GRADD_TRY(gradd_conv_of_conv(c->in, c->n_in, c->attrs, &v));
    c->out[0] = gradd_conv_y_type(&v);
    return GRADD_OK;
}

static gradd_status_t infer_data(gradd_infer_t *c) {
    gradd_conv_t v;
    GRADD_TRY(gradd_conv_of_data(c->in, c->n_in, c->attrs, &v));
    c->out[0] = gradd_conv_x_type(&v);
    return GRADD_OK;
}

static gradd_status_t infer_weight(gradd_infer_t *c) {
    gradd_conv_t v;
    GRADD_TRY(gradd_conv_of_weight(c->in, c->n_in, c->attrs, &v));
    c->out[0] = gradd_conv_w_type(&v);
    return GRADD_OK;
}

static gradd_status_t infer_transposed(gradd_infer_t *c) {
    gradd_conv_t v;
    GRADD_TRY(gradd_conv_of_transposed(c->in, c->n_in, c->attrs, &v));
    c->out[0] = gradd_conv_x_type(&v);
    return GRADD_OK;
}

/* ---- gradient rules -------------------------------------------------------------------------- */

/* Types of the operands of a node. */
static int views_of(gradd_builder_t *b, const gradd_val_t *in, int n_in, gradd_view_t *out) {
    for (int i = 0; i < n_in; i++)
        out[i] = (gradd_view_t){.type = *gradd_val_type(b, in[i])};
    return n_in;
}

static gradd_val_t data_grad(gradd_builder_t *b, const gradd_conv_t *v, gradd_val_t dy,
                             gradd_val_t w) {
    gradd_attr_t attrs[GRADD_CONV_ATTRS];
    const int n = gradd_conv_data_attrs(v, attrs);
    return gradd_emit_attrs(b, "ConvDataGrad", (gradd_val_t[]){dy, w}, 2, attrs, n);
}

static gradd_val_t weight_grad(gradd_builder_t *b, const gradd_conv_t *v, gradd_val_t x,
                               gradd_val_t dy) {
    gradd_attr_t attrs[GRADD_CONV_ATTRS];
    const int n = gradd_conv_weight_attrs(v, attrs);
    return gradd_emit_attrs(b, "ConvWeightGrad", (gradd_val_t[]){x, dy}, 2, attrs, n);
}

/* The sum over all axes but channels. */
static gradd_val_t bias_grad(gradd_builder_t *b, gradd_val_t d) {
    const int rank = gradd_val_type(b, d)->rank;
    int64_t axes[1 + AXES] = {0};
    for (int i = 2; i < rank; i++)
        axes[i - 1] = i;
    const gradd_attr_t keep = gradd_make_int("keepdims", 0);
    gradd_val_t in[2] = {d, gradd_const_i64s(b, axes, rank - 1)};
    return gradd_emit_attrs(b, "ReduceSum", in, 2, &keep, 1);
}

static bool needs(const gradd_grad_t *g, int i) {
    return i < g->n_in && g->in[i] != GRADD_NONE && g->need[i];
}

static gradd_status_t grad_conv(gradd_grad_t *g) {
    gradd_view_t in[GRADD_CONV_BIAS + 1];
    gradd_conv_t v;
    const gradd_val_t dy = g->dout[0];
    GRADD_TRY(gradd_conv_of_conv(in, views_of(g->b, g->in, g->n_in, in), g->attrs, &v));
    if (needs(g, GRADD_CONV_X)) g->din[GRADD_CONV_X] = data_grad(g->b, &v, dy, g->in[GRADD_CONV_W]);
    if (needs(g, GRADD_CONV_W))
        g->din[GRADD_CONV_W] = weight_grad(g->b, &v, g->in[GRADD_CONV_X], dy);
    if (needs(g, GRADD_CONV_BIAS)) g->din[GRADD_CONV_BIAS] = bias_grad(g->b, dy);
    return g->b->status;
}

static gradd_status_t grad_data(gradd_grad_t *g) {
    gradd_view_t in[GRADD_CONV_DATA_BIAS + 1];
    gradd_conv_t v;
    const gradd_val_t d = g->dout[0];
    GRADD_TRY(gradd_conv_of_data(in, views_of(g->b, g->in, g->n_in, in), g->attrs, &v));
    if (needs(g, GRADD_CONV_DATA_DY)) {
        int64_t pads[2 * AXES];
        gradd_attr_t attrs[GRADD_CONV_ATTRS];
        const int n = gradd_conv_attrs(&v, pads, attrs);
        gradd_val_t both[2] = {d, g->in[GRADD_CONV_DATA_W]};
        g->din[GRADD_CONV_DATA_DY] = gradd_emit_attrs(g->b, "Conv", both, 2, attrs, n);
    }
    if (needs(g, GRADD_CONV_DATA_W))
        g->din[GRADD_CONV_DATA_W] = weight_grad(g->b, &v, d, g->in[GRADD_CONV_DATA_DY]);
    if (needs(g, GRADD_CONV_DATA_BIAS)) g->din[GRADD_CONV_DATA_BIAS] = bias_grad(g->b, d);
    return g->b->status;
}

/* ---- expansions ------------------------------------------------------------------------------ */

static gradd_val_t count_up(gradd_builder_t *b, int64_t n, int64_t step) {
    gradd_val_t v[3];
    for (int i = 0; i < 3; i++) {
        const int64_t number = (int64_t[]){0, n * step, step}[i];
        v[i] = b->status ? GRADD_NONE
                         : b->constant(b, &(gradd_type_t){.dtype = GRADD_DT_I64}, &number);
    }
    return GRADD_EMIT(b, "Range", v[0], v[1], v[2]);
}

/* x [N, C, X...] as [N, C, K, Y, K, Y, ...]: along each axis the elements that taps read. */
static gradd_val_t patches(gradd_builder_t *b, const gradd_conv_t *v, gradd_val_t x) {
    int64_t pads[2 * (2 + AXES)] = {0};
    const int rank = 2 + v->axes, first = AXES - v->axes;
    for (int i = 0; i < v->axes; i++) {
        const int a = first + i;
        const int64_t reach = gradd_conv_at(v, a, v->y[a] - 1, v->kernel[a] - 1) + 1;
        pads[2 + i] = v->begin[a];
        pads[rank + 2 + i] = reach > v->x[a] ? reach - v->x[a] : 0;
    }
    x = GRADD_EMIT(b, "Pad", x, gradd_const_i64s(b, pads, 2 * rank));
    for (int i = 0; i < v->axes; i++) {
        const int a = first + i;
        const gradd_attr_t axis = gradd_make_int("axis", 2 + 2 * i);
        gradd_val_t taps = count_up(b, v->kernel[a], v->dilation[a]);
        taps = gradd_reshape_to(b, taps, (int64_t[]){v->kernel[a], 1}, 2);
        gradd_val_t in[2] = {x, GRADD_EMIT(b, "Add", taps, count_up(b, v->y[a], v->stride[a]))};
        x = gradd_emit_attrs(b, "Gather", in, 2, &axis, 1);
    }
    return x;
}

/* Columns [N, groups, C K, Y]. */
static gradd_val_t columns(gradd_builder_t *b, const gradd_conv_t *v, gradd_val_t x) {
    int64_t perm[2 + 2 * AXES] = {0, 1};
    for (int i = 0; i < v->axes; i++)
        perm[2 + i] = 2 + 2 * i, perm[2 + v->axes + i] = 3 + 2 * i;
    const int64_t dims[4] = {v->images, v->groups, v->in / v->groups * gradd_conv_volume(v->kernel),
                             gradd_conv_volume(v->y)};
    x = gradd_transpose(b, patches(b, v, x), perm, 2 + 2 * v->axes);
    return gradd_reshape_to(b, x, dims, 4);
}

static gradd_status_t expand_conv(gradd_expand_t *x) {
    gradd_builder_t *b = x->b;
    gradd_view_t in[GRADD_CONV_BIAS + 1];
    gradd_conv_t v;
    GRADD_TRY(gradd_conv_of_conv(in, views_of(b, x->in, x->n_in, in), x->attrs, &v));
    const int64_t each[3] = {v.groups, v.out / v.groups,
                             v.in / v.groups * gradd_conv_volume(v.kernel)};
    const gradd_type_t type = gradd_conv_y_type(&v);
    gradd_val_t w = gradd_reshape_to(b, gradd_wide(b, x->in[GRADD_CONV_W]), each, 3);
    gradd_val_t y = columns(b, &v, gradd_wide(b, x->in[GRADD_CONV_X]));
    y = gradd_reshape_to(b, GRADD_EMIT(b, "MatMul", w, y), type.dims, type.rank);
    if (v.has_bias) {
        gradd_val_t bias = gradd_wide(b, x->in[GRADD_CONV_BIAS]);
        bias = gradd_reshape_to(b, bias, (int64_t[]){v.out, 1, 1, 1}, 1 + v.axes);
        y = GRADD_EMIT(b, "Add", y, bias);
    }
    x->out[0] = gradd_cast(b, y, v.dtype);
    return b->status;
}

/* What `patches` does, the other way round: along each axis, the elements that taps read are added
 * up where they come from. */
static gradd_val_t from_patches(gradd_builder_t *b, const gradd_conv_t *v, gradd_val_t x) {
    const int first = AXES - v->axes;
    int64_t dims[2 + 2 * AXES] = {v->images, v->in};
    for (int i = 0; i < v->axes; i++)
        dims[2 + 2 * i] = v->kernel[first + i], dims[3 + 2 * i] = v->y[first + i];
    for (int i = v->axes - 1; i >= 0; i--) { /* axes behind i have their final size */
        const int a = first + i, at = 2 + 2 * i, rank = 2 + v->axes + i;
        const int64_t reach = gradd_conv_at(v, a, v->y[a] - 1, v->kernel[a] - 1) + 1;
        int64_t pads[4 * (1 + AXES)] = {0};
        gradd_val_t taps = count_up(b, v->kernel[a], v->dilation[a]);
        taps = gradd_reshape_to(b, taps, (int64_t[]){v->kernel[a], 1}, 2);
        gradd_val_t in[2] = {x, GRADD_EMIT(b, "Add", taps, count_up(b, v->y[a], v->stride[a]))};
        dims[at] = reach + v->begin[a];
        memmove(dims + at + 1, dims + at + 2, sizeof dims[0] * (size_t)(v->axes - 1 - i));
        const gradd_attr_t attrs[2] = {gradd_make_ints("dims", dims, (size_t)rank),
                                       gradd_make_int("axis", at)};
        x = gradd_emit_attrs(b, "GatherGrad", in, 2, attrs, 2);
        pads[at] = -v->begin[a], pads[rank + at] = v->x[a] - reach;
        x = GRADD_EMIT(b, "Pad", x, gradd_const_i64s(b, pads, 2 * rank));
        dims[at] = v->x[a];
    }
    return x;
}

static gradd_status_t expand_data(gradd_expand_t *e) {
    static const int64_t turned[] = {0, 2, 1};
    gradd_builder_t *b = e->b;
    gradd_view_t in[GRADD_CONV_DATA_BIAS + 1];
    gradd_conv_t v;
    GRADD_TRY(gradd_conv_of_data(in, views_of(b, e->in, e->n_in, in), e->attrs, &v));
    const int64_t taps = v.in / v.groups * gradd_conv_volume(v.kernel);
    const int64_t each[3] = {v.groups, v.out / v.groups, taps};
    const int64_t rows[4] = {v.images, v.groups, v.out / v.groups, gradd_conv_volume(v.y)};
    int64_t dims[2 + 2 * AXES] = {v.images, v.in}, perm[2 + 2 * AXES] = {0, 1};
    for (int i = 0; i < v.axes; i++) {
        dims[2 + i] = v.kernel[AXES - v.axes + i], dims[2 + v.axes + i] = v.y[AXES - v.axes + i];
        perm[2 + 2 * i] = 2 + i, perm[3 + 2 * i] = 2 + v.axes + i;
    }
    gradd_val_t w = gradd_reshape_to(b, gradd_wide(b, e->in[GRADD_CONV_DATA_W]), each, 3);
    gradd_val_t dy = gradd_reshape_to(b, gradd_wide(b, e->in[GRADD_CONV_DATA_DY]), rows, 4);
    gradd_val_t x = GRADD_EMIT(b, "MatMul", gradd_transpose(b, w, turned, 3), dy);
    x = gradd_reshape_to(b, x, dims, 2 + 2 * v.axes);
    x = from_patches(b, &v, gradd_transpose(b, x, perm, 2 + 2 * v.axes));
    if (v.has_bias) {
        gradd_val_t bias = gradd_wide(b, e->in[GRADD_CONV_DATA_BIAS]);
        bias = gradd_reshape_to(b, bias, (int64_t[]){v.in, 1, 1, 1}, 1 + v.axes);
        x = GRADD_EMIT(b, "Add", x, bias);
    }
    e->out[0] = gradd_cast(b, x, v.dtype);
    return b->status;
}

static gradd_status_t expand_transposed(gradd_expand_t *x) {
    gradd_view_t in[GRADD_CONV_BIAS + 1];
    gradd_attr_t attrs[GRADD_CONV_ATTRS];
    gradd_conv_t v;
    GRADD_TRY(gradd_conv_of_transposed(in, views_of(x->b, x->in, x->n_in, in), x->attrs, &v));
    const int n = gradd_conv_data_attrs(&v, attrs);
    x->out[0] = gradd_emit_attrs(x->b, "ConvDataGrad", x->in, x->n_in, attrs, n);
    return x->b->status;
}

/* ---- cases and rows -------------------------------------------------------------------------- */

#define SHARED                                                                                     \
    {"strides", GRADD_ATTR_INTS, false}, {"dilations", GRADD_ATTR_INTS, false}, {                  \
        "group", GRADD_ATTR_INT, false                                                             \
    }
#define OF_ONNX                                                                                    \
    SHARED, {"auto_pad", GRADD_ATTR_STRING, false}, {"kernel_shape", GRADD_ATTR_INTS, false}, {    \
        "pads", GRADD_ATTR_INTS, false                                                             \
    }
#define CASE(...) {.text = __VA_ARGS__}

GRADD_OPS(
    conv,
    GRADD_OP(
        "Conv", "", 11, (2, 3), (1, 1), .flags = GRADD_OP_COSTLY, .types = {GRADD_T_FLOAT},
        .attrs = GRADD_ATTR_LIST(OF_ONNX), .infer = infer_conv, .grad = grad_conv,
        .expand = expand_conv, .ref = GRADD_REF(gradd_conv_ref),
        .cases = GRADD_CASES(
            CASE("f32[2,3,8] f32[4,3,3] f32[4]"),
            CASE("f32[2,3,8] f32[4,3,3] | pads=[1,1] strides=[2]"),
            CASE("f32[2,4,9] f32[6,2,3] f32[6] | group=2 dilations=[2] pads=[3,1]"),
            CASE("f32[2,4,9] f32[8,1,3] f32[8] | group=4 pads=[2,0]"),
            CASE("f32[1,2,7] f32[3,2,2] | auto_pad=\"SAME_LOWER\" strides=[2]"),
            CASE("f32[2,3,6,5] f32[4,3,3,2] f32[4] | pads=[1,0,1,1]"),
            CASE("f32[1,3,7,7] f32[2,3,3,3] | auto_pad=\"SAME_UPPER\" strides=[2,3]"),
            CASE("f32[2,4,5,6] f32[4,1,3,3] | group=4 pads=[1,1,1,1] strides=[2,1]"),
            CASE("f32[2,4,5,6] f32[6,4,1,1] f32[6] | kernel_shape=[1,1]"),
            CASE("f32[2,4,5,6] f32[6,2,1,1] f32[6] | group=2 strides=[2,2]"),
            CASE("f32[2,3,8,4] f32[5,3,4,2] f32[5] | strides=[4,2]"),
            CASE("f32[1,2,5,6] f32[2,2,3,2] | pads=[-1,2,1,-2] auto_pad=\"NOTSET\""),
            CASE("f32[1,2,4,5,6] f32[4,2,2,3,3] f32[4] | pads=[0,1,1,1,1,1]"),
            CASE("f32[2,4,3,5,4] f32[2,2,2,2,1] | group=2 dilations=[1,3,2] strides=[1,1,2]"),
            CASE("f32[1,2,3,3,3] f32[2,2,1,1,1] | auto_pad=\"VALID\""),
            CASE("f32[2,16,9]:(-1,1) f32[24,16,3]:(-1,1) f32[24] | pads=[1,2] strides=[2]"),
            CASE("f32[2,32,5,6]:(-1,1) f32[16,16,3,3]:(-1,1) | group=2 dilations=[1,2]"),
            CASE("f32[1,8,3,4,5]:(-1,1) f32[8,8,2,2,2]:(-1,1) f32[8] | pads=[1,0,0,0,0,1]"),
            CASE("f32[0,3,8] f32[4,3,3] f32[4]"), CASE("f32[2,0,8] f32[4,0,3] f32[4]"),
            CASE("f32[2,3,4,4] f32[0,3,3,3]"),
            CASE("f32[1,1,2] f32[1,1,5] | pads=[4,4] strides=[3]"),
            CASE("f32[2,17,13,19]:(-1,1) f32[24,17,3,3]:(-1,1) f32[24] | pads=[1,1,1,1]"),
            CASE("f32[2,5,33] f32[10,1,4] f32[10] | group=5 strides=[3] dilations=[2] pads=[7,2]"),
            CASE("f32[2,3,5,6] f32[3,1,2,2] | group=3 strides=[3,2] pads=[-1,2,0,-1]"),
            CASE("f32[2,3,4,5,6] f32[6,1,2,3,2] | group=3 strides=[2,1,2] dilations=[1,2,1] "
                 "pads=[1,2,0,0,1,1]"),
            CASE("f32[0,3,5,6] f32[3,1,2,2] | group=3"),
            CASE("f32[3,40,11,13] f32[40,1,5,5] f32[40] | group=40 pads=[2,2,2,2]"))),
    GRADD_OP("ConvTranspose", "", 11, (2, 3), (1, 1), .flags = GRADD_OP_COSTLY,
             .types = {GRADD_T_FLOAT},
             .attrs = GRADD_ATTR_LIST(OF_ONNX, {"output_padding", GRADD_ATTR_INTS, false},
                                      {"output_shape", GRADD_ATTR_INTS, false}),
             .infer = infer_transposed, .expand = expand_transposed,
             .cases = GRADD_CASES(
                 CASE("f32[2,3,8] f32[3,4,3] f32[4]"),
                 CASE("f32[2,4,5] f32[4,3,3] f32[6] | group=2 strides=[2] pads=[1,0]"),
                 CASE("f32[1,2,3,4] f32[2,3,3,3] | strides=[2,3] output_padding=[1,2]"),
                 CASE("f32[1,2,3,3] f32[2,2,3,3] | strides=[3,2] output_shape=[10,8]"),
                 CASE("f32[1,2,3,3] f32[2,2,3,3] | strides=[2,2] auto_pad=\"SAME_UPPER\""),
                 CASE("f32[1,2,3,3] f32[2,2,2,4] | strides=[2,3] auto_pad=\"SAME_LOWER\""),
                 CASE("f32[1,2,2,3,2] f32[2,2,2,3,1] f32[2] | dilations=[2,1,1] strides=[1,2,2]"),
                 CASE("f32[0,2,3] f32[2,2,2]"))),
    GRADD_OP("ConvDataGrad", "com.gradd", 1, (2, 3), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_COSTLY, .types = {GRADD_T_FLOAT},
             .attrs = GRADD_ATTR_LIST(SHARED, {"dims", GRADD_ATTR_INTS, true},
                                      {"begins", GRADD_ATTR_INTS, true}),
             .infer = infer_data, .grad = grad_data, .expand = GRADD_EXPANSION(expand_data),
             .ref = GRADD_REF(gradd_conv_ref),
             .cases = GRADD_CASES(
                 CASE("f32[2,4,6] f32[4,3,3] | dims=[8] begins=[0]"),
                 CASE("f32[2,4,6] f32[4,3,3] f32[3] | dims=[8] begins=[0]"),
                 CASE("f32[2,4,4] f32[4,2,3] f32[4] | dims=[9] begins=[1] strides=[2] group=2"),
                 CASE("f32[2,8,5] f32[8,1,3] | dims=[9] begins=[3] dilations=[2] group=4"),
                 CASE("f32[2,4,3,4] f32[4,3,3,2] | dims=[6,5] begins=[1,0] strides=[2,1]"),
                 CASE("f32[2,4,3,3] f32[4,1,3,3] f32[4] | dims=[5,6] begins=[1,1] group=4 "
                      "strides=[2,2]"),
                 CASE("f32[2,6,5,6] f32[6,4,1,1] f32[4] | dims=[5,6] begins=[0,0]"),
                 CASE("f32[2,6,5,6] f32[6,4,1,1] | dims=[5,6] begins=[0,0]"),
                 CASE("f32[1,2,2,3,4] f32[2,3,2,2,2] f32[3] | dims=[3,7,5] begins=[0,1,0] "
                      "strides=[1,3,1]"),
                 CASE("f32[2,6,9] f32[6,1,4] f32[3] | dims=[33] begins=[7] strides=[3] group=3 "
                      "dilations=[2]"),
                 CASE("f32[1,3,2,3] f32[3,1,2,2] | dims=[9,5] begins=[-1,0] strides=[3,2] group=3"),
                 CASE("f32[1,6,2,2,3] f32[6,1,2,3,2] | dims=[4,5,6] begins=[1,2,0] group=3 "
                      "strides=[2,2,2]"),
                 CASE("f32[3,40,11,13] f32[40,1,5,5] | dims=[11,13] begins=[2,2] group=40"),
                 CASE("f32[2,24,5]:(-1,1) f32[24,16,3]:(-1,1) | dims=[9] begins=[1] strides=[2]"),
                 CASE("f32[2,16,3,2]:(-1,1) f32[16,16,3,3]:(-1,1) | dims=[5,6] begins=[0,0] "
                      "group=2 dilations=[1,2]"),
                 CASE("f32[1,8,2,3,4]:(-1,1) f32[8,8,2,2,2]:(-1,1) | dims=[3,4,5] begins=[0,0,0]"),
                 CASE("f32[0,4,6] f32[4,3,3] | dims=[8] begins=[0]"),
                 CASE("f32[2,0,6] f32[0,3,3] f32[3] | dims=[8] begins=[0]"),
                 CASE("f32[2,24,13,19]:(-1,1) f32[24,17,3,3]:(-1,1) f32[17] | dims=[13,19] "
                      "begins=[1,1]"))),
    GRADD_OP("ConvWeightGrad", "com.gradd", 1, (2, 2), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD | GRADD_OP_COSTLY,
             .types = {GRADD_T_FLOAT},
             .attrs = GRADD_ATTR_LIST(SHARED, {"kernel_shape", GRADD_ATTR_INTS, true},
                                      {"begins", GRADD_ATTR_INTS, true}),
             .infer = infer_weight, .ref = GRADD_REF(gradd_conv_ref),
             .cases = GRADD_CASES(
                 CASE("f32[2,3,8] f32[2,4,6] | kernel_shape=[3] begins=[0]"),
                 CASE("f32[2,4,9] f32[2,6,4] | kernel_shape=[3] begins=[1] strides=[2] group=2"),
                 CASE("f32[2,4,9] f32[2,8,9] | kernel_shape=[3] begins=[2] dilations=[2] group=4"),
                 CASE("f32[2,3,6,5] f32[2,4,3,4] | kernel_shape=[3,2] begins=[1,0] strides=[2,1]"),
                 CASE("f32[3,4,5,6] f32[3,6,5,6] | kernel_shape=[1,1] begins=[0,0]"),
                 CASE("f32[1,2,3,5,4] f32[1,4,2,3,3] | kernel_shape=[2,3,2] begins=[0,0,0]"),
                 CASE("f32[2,3,33] f32[2,6,9] | kernel_shape=[4] begins=[7] strides=[3] group=3 "
                      "dilations=[2]"),
                 CASE("f32[2,3,9,5] f32[2,3,2,3] | kernel_shape=[2,2] begins=[-1,0] strides=[3,2] "
                      "group=3"),
                 CASE("f32[0,3,8] f32[0,3,6] | kernel_shape=[3] begins=[0] group=3"),
                 CASE("f32[2,16,9]:(-1,1) f32[2,24,5]:(-1,1) | kernel_shape=[3] begins=[1] "
                      "strides=[2]"),
                 CASE("f32[2,32,5,6]:(-1,1) f32[2,16,3,2]:(-1,1) | kernel_shape=[3,3] "
                      "begins=[0,0] group=2 dilations=[1,2]"),
                 CASE("f32[1,8,3,4,5] f32[1,8,2,3,4] | kernel_shape=[2,2,2] begins=[0,0,0]"),
                 CASE("f32[0,3,8] f32[0,4,6] | kernel_shape=[3] begins=[0]"),
                 CASE("f32[2,0,8] f32[2,4,6] | kernel_shape=[3] begins=[0]"),
                 CASE("f32[2,40,11,13] f32[2,40,11,13] | kernel_shape=[5,5] begins=[2,2] group=40"),
                 CASE("f32[2,17,13,19]:(-1,1) f32[2,24,13,19]:(-1,1) | kernel_shape=[3,3] "
                      "begins=[1,1]"))));

/* Images of a batch, each by itself; a gradient of the weight is a sum over all. */
static bool rowwise_conv(gradd_rowwise_t *r) {
    return strcmp(r->op->name, "ConvWeightGrad") && gradd_rowwise_batch(r);
}

/* Of one channel each, a row of products is short: it takes about ten times as long as the same
 * arithmetic in a product of matrices. */
static void cost_depthwise(const gradd_infer_t *c, gradd_cost_t *cost) {
    gradd_conv_cost(c, cost);
    cost->again = 0.9 * cost->flops;
}

#define ONEDNN(title, kernel, mask)                                                                \
    GRADD_KERNEL(title, kernel, .types = {mask}, .accepts = gradd_conv_onednn_accepts,             \
                 .prepare = gradd_conv_parts_prepare, .unprepare = gradd_conv_parts_unprepare,     \
                 .makes_parts = true, .compute = gradd_conv_parts, .cost = gradd_conv_cost)
#define ON_CPU(title)                                                                              \
    GRADD_KERNEL(title, "depthwise", .types = {GRADD_T_F32_F64}, .makes_parts = true,              \
                 .accepts = gradd_conv_depthwise_accepts, .prepare = gradd_conv_depthwise_prepare, \
                 .unprepare = gradd_conv_depthwise_unprepare, .compute = gradd_conv_depthwise,     \
                 .cost = cost_depthwise),                                                          \
        ONEDNN(title, "oneDNN f32", GRADD_DTB(F32)),                                               \
        ONEDNN(title, "oneDNN bf16", GRADD_DTB(BF16)),                                             \
        GRADD_KERNEL(title, "columns", .types = {GRADD_T_F32_F64}, .rowwise = rowwise_conv,        \
                     .prepare = gradd_conv_columns_prepare,                                        \
                     .unprepare = gradd_conv_columns_unprepare, .compute = gradd_conv_columns,     \
                     .cost = gradd_conv_cost)

GRADD_KERNELS(cpu, conv, ON_CPU("Conv"), ON_CPU("ConvDataGrad"), ON_CPU("ConvWeightGrad"));
