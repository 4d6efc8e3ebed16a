/* Convolutions over channels-last tensors: ConvLast, ConvLastDataGrad and ConvLastWeightGrad.
 *
 * Math: that of kernels/ops/product/conv.c over x [N, X..., C] and y [N, Y..., M]; the weight is
 * [M, C / groups, K...] as there, and so is its gradient. ConvLast takes pads, not auto_pad. Saved
 * for backward: x and W. A pass emits them where a device has a kernel (channels_last); what has
 * none, such as a gradient that the library lacks, is the channels-first operator between two
 * transpositions. */
#include <string.h>

#include "kernels/contract/kernel.h"
#include "kernels/cpu/conv/conv.h"
#include "kernels/describe/conv.h"
#include "kernels/rules/rowwise.h"
#include "kernels/rules/rules.h"

enum { AXES = GRADD_CONV_AXES };

static gradd_status_t infer_last(gradd_infer_t *c) {
    gradd_conv_t v;
    gradd_conv_made_t made;
    GRADD_TRY(gradd_conv_of_op(c->op, c->in, c->n_in, c->attrs, &v, &made));
    c->out[0] = made == GRADD_CONV_MAKES_Y   ? gradd_conv_y_type(&v)
                : made == GRADD_CONV_MAKES_X ? gradd_conv_x_type(&v)
                                             : gradd_conv_w_type(&v);
    return GRADD_OK;
}

/* ---- gradient rules -------------------------------------------------------------------------- */

static gradd_status_t relation_of(const gradd_grad_t *g, gradd_conv_t *out) {
    gradd_view_t in[GRADD_CONV_BIAS + 1] = {0};
    gradd_conv_made_t made;
    for (int i = 0; i < g->n_in; i++)
        if (g->in[i] != GRADD_NONE) in[i] = (gradd_view_t){.type = *gradd_val_type(g->b, g->in[i])};
    return gradd_conv_of_op(g->op, in, g->n_in, g->attrs, out, &made);
}

static gradd_val_t weight_grad(gradd_builder_t *b, const gradd_conv_t *v, gradd_val_t x,
                               gradd_val_t dy) {
    gradd_attr_t attrs[GRADD_CONV_ATTRS];
    const int n = gradd_conv_weight_attrs(v, attrs);
    return gradd_emit_attrs(b, "ConvLastWeightGrad", (gradd_val_t[]){x, dy}, 2, attrs, n);
}

/* The sum over all axes but the last. */
static gradd_val_t bias_grad(gradd_builder_t *b, gradd_val_t d) {
    const int axes = gradd_val_type(b, d)->rank - 1;
    const gradd_attr_t keep = gradd_make_int("keepdims", 0);
    const int64_t all[1 + AXES] = {0, 1, 2, 3};
    gradd_val_t in[2] = {d, gradd_const_i64s(b, all, axes)};
    return gradd_emit_attrs(b, "ReduceSum", in, 2, &keep, 1);
}

static bool needs(const gradd_grad_t *g, int i) {
    return i < g->n_in && g->in[i] != GRADD_NONE && g->need[i];
}

static gradd_status_t grad_conv(gradd_grad_t *g) {
    gradd_conv_t v;
    gradd_attr_t attrs[GRADD_CONV_ATTRS];
    const gradd_val_t dy = g->dout[0], in[2] = {dy, g->in[GRADD_CONV_W]};
    GRADD_TRY(relation_of(g, &v));
    const int n = gradd_conv_data_attrs(&v, attrs);
    if (needs(g, GRADD_CONV_X))
        g->din[GRADD_CONV_X] = gradd_emit_attrs(g->b, "ConvLastDataGrad", in, 2, attrs, n);
    if (needs(g, GRADD_CONV_W))
        g->din[GRADD_CONV_W] = weight_grad(g->b, &v, g->in[GRADD_CONV_X], dy);
    if (needs(g, GRADD_CONV_BIAS)) g->din[GRADD_CONV_BIAS] = bias_grad(g->b, dy);
    return g->b->status;
}

static gradd_status_t grad_data(gradd_grad_t *g) {
    gradd_conv_t v;
    int64_t pads[2 * AXES];
    gradd_attr_t attrs[GRADD_CONV_ATTRS];
    const gradd_val_t d = g->dout[0], in[2] = {d, g->in[GRADD_CONV_DATA_W]};
    GRADD_TRY(relation_of(g, &v));
    const int n = gradd_conv_attrs(&v, pads, attrs);
    if (needs(g, GRADD_CONV_DATA_DY))
        g->din[GRADD_CONV_DATA_DY] = gradd_emit_attrs(g->b, "ConvLast", in, 2, attrs, n);
    if (needs(g, GRADD_CONV_DATA_W))
        g->din[GRADD_CONV_DATA_W] = weight_grad(g->b, &v, d, g->in[GRADD_CONV_DATA_DY]);
    if (needs(g, GRADD_CONV_DATA_BIAS)) g->din[GRADD_CONV_DATA_BIAS] = bias_grad(g->b, d);
    return g->b->status;
}

/* ---- expansion ------------------------------------------------------------------------------- */

/* Channels from the last axis to the second, or back. */
static gradd_val_t turned(gradd_builder_t *b, gradd_val_t v, bool back) {
    const int rank = gradd_val_type(b, v)->rank;
    int64_t perm[2 + AXES] = {0};
    for (int i = 1; i < rank; i++)
        perm[i] = back ? i % (rank - 1) + 1 : i == 1 ? rank - 1 : i - 1;
    return gradd_transpose(b, v, perm, rank);
}

static gradd_status_t expand_last(gradd_expand_t *x) {
    char name[32] = "Conv";
    gradd_val_t in[GRADD_CONV_BIAS + 1];
    const bool of_weight = !strcmp(x->op->name, "ConvLastWeightGrad");
    strcat(name, x->op->name + strlen("ConvLast"));
    for (int i = 0; i < x->n_in; i++)
        in[i] = i == 0 || of_weight ? turned(x->b, x->in[i], false) : x->in[i];
    gradd_val_t made = gradd_emit_attrs(x->b, name, in, x->n_in, x->attrs.v, x->attrs.n);
    x->out[0] = of_weight || x->b->status ? made : turned(x->b, made, true);
    return x->b->status;
}

/* ---- cases and rows -------------------------------------------------------------------------- */

#define SHARED                                                                                     \
    {"strides", GRADD_ATTR_INTS, false}, {"dilations", GRADD_ATTR_INTS, false}, {                  \
        "group", GRADD_ATTR_INT, false                                                             \
    }
#define CASE(...) {.text = __VA_ARGS__}

GRADD_OPS(
    convlast,
    GRADD_OP("ConvLast", "com.gradd", 1, (2, 3), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_COSTLY, .types = {GRADD_T_FLOAT},
             .attrs = GRADD_ATTR_LIST(SHARED, {"pads", GRADD_ATTR_INTS, false},
                                      {"kernel_shape", GRADD_ATTR_INTS, false}),
             .infer = infer_last, .grad = grad_conv, .expand = expand_last,
             .ref = GRADD_REF(gradd_conv_ref),
             .cases = GRADD_CASES(
                 CASE("f32[2,8,3] f32[4,3,3] f32[4] | pads=[1,1] strides=[2]"),
                 CASE("f32[2,9,4] f32[6,2,3] f32[6] | group=2 dilations=[2] pads=[3,1]"),
                 CASE("f32[2,6,5,3] f32[4,3,3,2] | pads=[1,0,1,1]"),
                 CASE("f32[2,5,6,4] f32[4,1,3,3] | group=4 pads=[1,1,1,1] strides=[2,1]"),
                 CASE("f32[2,5,6,4] f32[6,4,1,1] f32[6] | strides=[2,2]"),
                 CASE("f32[1,5,6,2] f32[2,2,3,2] | pads=[-1,2,1,-2]"),
                 CASE("f32[1,4,5,6,2] f32[4,2,2,3,3] f32[4] | pads=[0,1,1,1,1,1]"),
                 CASE("f32[2,5,6,32]:(-1,1) f32[16,16,3,3]:(-1,1) | group=2 dilations=[1,2]"),
                 CASE("f32[2,9,16]:(-1,1) f32[24,16,3]:(-1,1) f32[24] | pads=[1,2] strides=[2]"),
                 CASE("f32[2,5,6,16]:(-1,1) f32[24,16,1,1]:(-1,1) f32[24]"),
                 CASE("f32[1,3,4,5,8]:(-1,1) f32[8,8,2,2,2]:(-1,1) f32[8] | pads=[1,0,0,0,0,1]"),
                 CASE("f32[2,7,9,37] f32[37,1,3,3] f32[37] | group=37 pads=[1,1,1,1]"),
                 CASE("f32[3,7,7,48] f32[48,1,7,7] f32[48] | group=48 pads=[3,3,3,3]"),
                 CASE("f32[2,70,5] f32[5,1,4] f32[5] | group=5 strides=[3] dilations=[2] "
                      "pads=[7,2]"),
                 CASE("f32[2,4,5,6,3] f32[3,1,2,3,2] | group=3 strides=[2,1,2] "
                      "dilations=[1,2,1] pads=[1,2,0,0,1,1]"),
                 CASE("f32[0,5,6,3] f32[3,1,2,2] | group=3"), CASE("f32[0,8,3] f32[4,3,3] f32[4]"),
                 CASE("f32[2,4,4,3] f32[0,3,3,3]"),
                 CASE("f32[2,13,19,17]:(-1,1) f32[24,17,3,3]:(-1,1) f32[24] | pads=[1,1,1,1]"))),
    GRADD_OP("ConvLastDataGrad", "com.gradd", 1, (2, 3), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_COSTLY, .types = {GRADD_T_FLOAT},
             .attrs = GRADD_ATTR_LIST(SHARED, {"dims", GRADD_ATTR_INTS, true},
                                      {"begins", GRADD_ATTR_INTS, true}),
             .infer = infer_last, .grad = grad_data, .expand = expand_last,
             .ref = GRADD_REF(gradd_conv_ref),
             .cases = GRADD_CASES(
                 CASE("f32[2,6,4] f32[4,3,3] f32[3] | dims=[8] begins=[0]"),
                 CASE("f32[2,4,4] f32[4,2,3] f32[4] | dims=[9] begins=[1] strides=[2] group=2"),
                 CASE("f32[2,3,4,4] f32[4,3,3,2] | dims=[6,5] begins=[1,0] strides=[2,1]"),
                 CASE("f32[1,2,3,4,2] f32[2,3,2,2,2] f32[3] | dims=[3,7,5] begins=[0,1,0] "
                      "strides=[1,3,1]"),
                 CASE("f32[2,5,24]:(-1,1) f32[24,16,3]:(-1,1) | dims=[9] begins=[1] strides=[2]"),
                 CASE("f32[2,3,2,16]:(-1,1) f32[16,16,3,3]:(-1,1) | dims=[5,6] begins=[0,0] "
                      "group=2 dilations=[1,2]"),
                 CASE("f32[1,2,3,4,8]:(-1,1) f32[8,8,2,2,2]:(-1,1) | dims=[3,4,5] begins=[0,0,0]"),
                 CASE("f32[2,9,6] f32[6,1,4] f32[6] | dims=[33] begins=[7] strides=[3] group=6 "
                      "dilations=[2]"),
                 CASE("f32[1,2,3,37] f32[37,1,2,2] | dims=[9,5] begins=[-1,0] strides=[3,2] "
                      "group=37"),
                 CASE("f32[1,2,2,3,6] f32[6,1,2,3,2] | dims=[4,5,6] begins=[1,2,0] group=6 "
                      "strides=[2,2,2]"),
                 CASE("f32[3,11,13,40] f32[40,1,5,5] | dims=[11,13] begins=[2,2] group=40"),
                 CASE("f32[0,6,4] f32[4,3,3] | dims=[8] begins=[0]"),
                 CASE("f32[2,13,19,24]:(-1,1) f32[24,17,3,3]:(-1,1) | dims=[13,19] "
                      "begins=[1,1]"))),
    GRADD_OP("ConvLastWeightGrad", "com.gradd", 1, (2, 2), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD | GRADD_OP_COSTLY,
             .types = {GRADD_T_FLOAT},
             .attrs = GRADD_ATTR_LIST(SHARED, {"kernel_shape", GRADD_ATTR_INTS, true},
                                      {"begins", GRADD_ATTR_INTS, true}),
             .infer = infer_last, .expand = expand_last, .ref = GRADD_REF(gradd_conv_ref),
             .cases = GRADD_CASES(
                 CASE("f32[2,9,4] f32[2,4,6] | kernel_shape=[3] begins=[1] strides=[2] group=2"),
                 CASE("f32[2,6,5,3] f32[2,3,4,4] | kernel_shape=[3,2] begins=[1,0] strides=[2,1]"),
                 CASE("f32[1,3,5,4,2] f32[1,2,3,3,4] | kernel_shape=[2,3,2] begins=[0,0,0]"),
                 CASE("f32[2,9,16]:(-1,1) f32[2,5,24]:(-1,1) | kernel_shape=[3] begins=[1] "
                      "strides=[2]"),
                 CASE("f32[2,5,6,32]:(-1,1) f32[2,3,2,16]:(-1,1) | kernel_shape=[3,3] "
                      "begins=[0,0] group=2 dilations=[1,2]"),
                 CASE("f32[2,33,3] f32[2,9,3] | kernel_shape=[4] begins=[7] strides=[3] group=3 "
                      "dilations=[2]"),
                 CASE("f32[9,9,5,37] f32[9,2,3,37] | kernel_shape=[2,2] begins=[-1,0] "
                      "strides=[3,2] group=37"),
                 CASE("f32[0,8,3] f32[0,6,3] | kernel_shape=[3] begins=[0] group=3"),
                 CASE("f32[2,11,13,40] f32[2,11,13,40] | kernel_shape=[5,5] begins=[2,2] "
                      "group=40"),
                 CASE("f32[0,8,3] f32[0,6,4] | kernel_shape=[3] begins=[0]"),
                 CASE("f32[2,13,19,17]:(-1,1) f32[2,13,19,24]:(-1,1) | kernel_shape=[3,3] "
                      "begins=[1,1]"))));

/* A load for each multiply-add, as its products are of single channels. */
static void cost_depthwise(const gradd_infer_t *c, gradd_cost_t *cost) {
    gradd_conv_cost(c, cost);
    cost->again = 0.5 * cost->flops;
}

/* As in conv.c. */
static bool rowwise_conv(gradd_rowwise_t *r) {
    return strcmp(r->op->name, "ConvLastWeightGrad") && gradd_rowwise_batch(r);
}

#define ONEDNN(title, kernel, mask)                                                                \
    GRADD_KERNEL(title, kernel, .types = {mask}, .accepts = gradd_conv_onednn_accepts,             \
                 .prepare = gradd_conv_parts_prepare, .unprepare = gradd_conv_parts_unprepare,     \
                 .makes_parts = true, .compute = gradd_conv_parts, .cost = gradd_conv_cost)
#define ON_CPU(title)                                                                              \
    GRADD_KERNEL(title, "depthwise", .rowwise = rowwise_conv,                                      \
                 .types = {GRADD_DTB(F32) | GRADD_DTB(BF16)},                                      \
                 .accepts = gradd_conv_depthwise_last_accepts,                                     \
                 .prepare = gradd_conv_depthwise_last_prepare,                                     \
                 .unprepare = gradd_conv_depthwise_last_unprepare,                                 \
                 .compute = gradd_conv_depthwise_last, .cost = cost_depthwise),                    \
        ONEDNN(title, "oneDNN f32", GRADD_DTB(F32)), ONEDNN(title, "oneDNN bf16", GRADD_DTB(BF16))

GRADD_KERNELS(cpu, convlast, ON_CPU("ConvLast"), ON_CPU("ConvLastDataGrad"),
              ON_CPU("ConvLastWeightGrad"));
