/* Convolutions, for every device: the operands of the operators, and what their shapes and
 * attributes come to.
 *
 *     y[i, m, o] = bias[m] + sum over c, k of x[i, g C + c, o stride + k dilation - begin] w[m, c,
 * k]
 *
 * with g the group of channel m, C channels of x in a group, and positions o and taps k along one
 * to three spatial axes; x is 0 outside. That one relation between x, w and y has three operators:
 * Conv makes y, ConvDataGrad makes x of y and w (the gradient of Conv, and ConvTranspose), and
 * ConvWeightGrad makes w of x and y. Tensors are channels-first: x [N, G C, X...], w [M, C, K...],
 * y [N, M, Y...]. ConvLast, ConvLastDataGrad and ConvLastWeightGrad are the same three over x
 * [N, X..., G C] and y [N, Y..., M], channels-last; w is as above. Pure functions.
 */
#ifndef GRADD_KERNELS_DESCRIBE_CONV_H
#define GRADD_KERNELS_DESCRIBE_CONV_H

#include "kernels/contract/kernel.h"
#include "kernels/math/host_device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Conv, and ConvTranspose. */
enum { GRADD_CONV_X, GRADD_CONV_W, GRADD_CONV_BIAS };
/* ConvDataGrad: the bias is one per channel of its result; in a gradient it is absent. */
enum { GRADD_CONV_DATA_DY, GRADD_CONV_DATA_W, GRADD_CONV_DATA_BIAS };
/* ConvWeightGrad. */
enum { GRADD_CONV_WEIGHT_X, GRADD_CONV_WEIGHT_DY };

#define GRADD_CONV_AXES 3

/* Which of the three tensors is made of the other two. */
typedef enum gradd_conv_made_e {
    GRADD_CONV_MAKES_Y,
    GRADD_CONV_MAKES_X,
    GRADD_CONV_MAKES_W
} gradd_conv_made_t;

/* Spatial sizes have three entries: those of fewer axes follow sizes of 1 (begin: 0). */
typedef struct gradd_conv_s {
    gradd_dtype_t dtype;
    int axes;        /* 1 to 3 */
    int64_t images;  /* N */
    int64_t in, out; /* channels of x, of y */
    int64_t groups;  /* at least 1 */
    bool has_bias;
    bool last; /* x and y are channels-last */
    int64_t x[GRADD_CONV_AXES], y[GRADD_CONV_AXES], kernel[GRADD_CONV_AXES];
    int64_t stride[GRADD_CONV_AXES], dilation[GRADD_CONV_AXES];
    int64_t begin[GRADD_CONV_AXES]; /* zeros in front of x; less than 0 cuts */
} gradd_conv_t;

/* Of the operands and attributes of Conv, ConvDataGrad and ConvWeightGrad. Operands that do not
 * fit, and attributes that are out of range, fail with GRAPH, UNSUPPORTED or LIMIT, and *out is
 * not written. */
gradd_status_t gradd_conv_of_conv(const gradd_view_t *in, int n_in, gradd_attrs_t attrs,
                                  gradd_conv_t *out);
gradd_status_t gradd_conv_of_data(const gradd_view_t *in, int n_in, gradd_attrs_t attrs,
                                  gradd_conv_t *out);
gradd_status_t gradd_conv_of_weight(const gradd_view_t *in, int n_in, gradd_attrs_t attrs,
                                    gradd_conv_t *out);
/* Of ONNX's ConvTranspose, as the ConvDataGrad that it is: its x is y here. */
gradd_status_t gradd_conv_of_transposed(const gradd_view_t *in, int n_in, gradd_attrs_t attrs,
                                        gradd_conv_t *out);

/* Of any of the six operators, and which tensor it makes. */
gradd_status_t gradd_conv_of_op(const gradd_op_t *op, const gradd_view_t *in, int n_in,
                                gradd_attrs_t attrs, gradd_conv_t *out,
                                gradd_conv_made_t *out_made);

/* The types of x, w and y. */
gradd_type_t gradd_conv_x_type(const gradd_conv_t *v);
gradd_type_t gradd_conv_w_type(const gradd_conv_t *v);
gradd_type_t gradd_conv_y_type(const gradd_conv_t *v);

/* Attributes of the operator that makes x, w or y by this relation. They point into v; returns
 * their number, at most GRADD_CONV_ATTRS. */
#define GRADD_CONV_ATTRS 5
int gradd_conv_data_attrs(const gradd_conv_t *v, gradd_attr_t *out);
int gradd_conv_weight_attrs(const gradd_conv_t *v, gradd_attr_t *out);
/* `pads` is the caller's memory for 2 GRADD_CONV_AXES entries. */
int gradd_conv_attrs(const gradd_conv_t *v, int64_t *pads, gradd_attr_t *out);

/* Elements of a spatial size. */
GRADD_HD int64_t gradd_conv_volume(const int64_t *size) {
    return size[0] * size[1] * size[2];
}
/* Whether every channel of x has a group of its own. */
GRADD_HD bool gradd_conv_is_depthwise(const gradd_conv_t *v) {
    return v->groups == v->in && v->groups > 1;
}
/* Whether x, as [C, X], is the matrix of its patches: taps of 1, no stride and no padding. */
GRADD_HD bool gradd_conv_is_pointwise(const gradd_conv_t *v) {
    for (int i = 0; i < GRADD_CONV_AXES; i++)
        if (v->kernel[i] != 1 || v->stride[i] != 1 || v->begin[i] || v->x[i] != v->y[i])
            return false;
    return true;
}
/* Where element i of a channel lies in x or y, whose channels have `size` elements each. */
GRADD_HD int64_t gradd_conv_element(const gradd_conv_t *v, int64_t channels, int64_t size,
                                    int64_t image, int64_t channel, int64_t i) {
    return v->last ? (image * size + i) * channels + channel
                   : (image * channels + channel) * size + i;
}
/* The index that belongs to position o and tap k along an axis; may lie outside of x. */
GRADD_HD int64_t gradd_conv_at(const gradd_conv_t *v, int axis, int64_t o, int64_t k) {
    return o * v->stride[axis] + k * v->dilation[axis] - v->begin[axis];
}
/* The position o that reads index i of x by tap k along an axis; -1: there is none. */
GRADD_HD int64_t gradd_conv_reader(const gradd_conv_t *v, int axis, int64_t i, int64_t k) {
    const int64_t far = i + v->begin[axis] - k * v->dilation[axis];
    if (far < 0 || far % v->stride[axis]) return -1;
    const int64_t o = far / v->stride[axis];
    return o < v->y[axis] ? o : -1;
}
/* The positions [*from, *to) along an axis that read x, and no zeros, by tap k. */
GRADD_HD void gradd_conv_within(const gradd_conv_t *v, int axis, int64_t k, int64_t *from,
                                int64_t *to) {
    const int64_t s = v->stride[axis], back = v->begin[axis] - k * v->dilation[axis];
    const int64_t first = back > 0 ? (back + s - 1) / s : 0;
    const int64_t room = v->x[axis] + back; /* o stride < room */
    int64_t end = room > 0 ? (room + s - 1) / s : 0;
    if (end > v->y[axis]) end = v->y[axis];
    *from = first < end ? first : end;
    *to = end;
}

/* Costs of the six: 2 operations for each channel of x and tap of an element of y, and its bias. */
void gradd_conv_cost(const gradd_infer_t *c, gradd_cost_t *cost);

#ifdef __cplusplus
}
#endif
#endif
