/* Convolutions by primitives of oneDNN. See conv.h.
 *
 * Of channels-first tensors the library has a product over columns alone; true kernels want blocks
 * of channels, or channels last. So a primitive chooses the forms of its operands, and reorders
 * before and behind it put them into scratch memory, and the result back: weights and activations
 * stay as the graph has them. Channels-last tensors are taken as they are, and only the weights,
 * which are small, have a form of the library's choice. A row takes a node only if the primitive is
 * neither the library's reference loop nor its product over columns; conv_columns.c has one without
 * reorders. */
#include "kernels/cpu/conv/conv.h"

#ifdef GRADD_NO_ONEDNN

bool gradd_conv_onednn_accepts(const gradd_infer_t *c) {
    (void)c;
    return false;
}
bool gradd_conv_onednn_has(const gradd_conv_t *v, gradd_conv_made_t made, gradd_dtype_t dtype) {
    (void)v, (void)made, (void)dtype;
    return false;
}
gradd_status_t gradd_conv_onednn_prepare(const gradd_conv_t *v, gradd_conv_made_t made,
                                         gradd_dtype_t dtype, gradd_prepared_t *out) {
    (void)v, (void)made, (void)dtype, (void)out;
    return GRADD_FAIL(INTERNAL, "built without oneDNN");
}
void gradd_conv_onednn_unprepare(gradd_prepared_t *prepared) {
    (void)prepared;
}
gradd_status_t gradd_conv_onednn(const void *state, const gradd_conv_memory_t *m) {
    (void)state, (void)m;
    return GRADD_FAIL(INTERNAL, "built without oneDNN");
}

#else

#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/onednn.h"

enum { AXES = GRADD_CONV_AXES, TENSORS = 3 };
/* Fewer channels of x in a group make poor use of blocks of them, in dx above all. */
#define LEAST_CHANNELS  8
/* Bytes that a primitive holds, nearly all of them generated code: measured. */
#define PRIMITIVE_BYTES ((size_t)128 << 10)

/* One of x, w and y. */
typedef struct operand_s {
    dnnl_memory_t plain, inner; /* inner NULL: the primitive takes it as it is */
    dnnl_primitive_t reorder;
    size_t at; /* of the inner form in the workspace */
} operand_t;

typedef struct conv_dnnl_s {
    gradd_conv_made_t made;
    dnnl_stream_t stream; /* the calling thread */
    dnnl_primitive_t primitive;
    operand_t tensor[TENSORS]; /* by what is made of them */
    dnnl_memory_t bias, scratch;
    size_t scratch_at;
} conv_dnnl_t;

/* ---- descriptions ---------------------------------------------------------------------------- */

typedef struct descs_s {
    gradd_dtype_t dw_dtype; /* f32, or that of x and y */
    dnnl_memory_desc_t plain[TENSORS], any[TENSORS], dw, bias;
    dnnl_primitive_attr_t attr;
    dnnl_primitive_desc_t forward, pd; /* pd is the forward's own where that is wanted */
} descs_t;

static void destroy_descs(descs_t *d) {
    for (int i = 0; i < TENSORS; i++) {
        dnnl_memory_desc_destroy(d->plain[i]);
        dnnl_memory_desc_destroy(d->any[i]);
    }
    dnnl_memory_desc_destroy(d->bias);
    dnnl_memory_desc_destroy(d->dw);
    dnnl_primitive_attr_destroy(d->attr);
    if (d->pd != d->forward) dnnl_primitive_desc_destroy(d->pd);
    dnnl_primitive_desc_destroy(d->forward);
}

/* x or y with channels behind positions: a primitive takes it as it is. */
static gradd_status_t describe_last(descs_t *d, int which, int rank, const int64_t *dims,
                                    dnnl_data_type_t type) {
    dnnl_dims_t strides = {[1] = 1};
    int64_t step = dims[1];
    for (int i = rank - 1; i > 1; i--)
        strides[i] = step, step *= dims[i];
    strides[0] = step;
    dnnl_memory_desc_t *both[] = {&d->plain[which], &d->any[which]};
    for (int i = 0; i < 2; i++)
        GRADD_TRY_DNNL(dnnl_memory_desc_create_with_strides(both[i], rank, dims, type, strides));
    return GRADD_OK;
}

static gradd_status_t describe_tensor(descs_t *d, const gradd_conv_t *v, gradd_conv_made_t made,
                                      int which) {
    const int64_t heads[TENSORS][3] = {
        [GRADD_CONV_MAKES_X] = {v->images, v->in},
        [GRADD_CONV_MAKES_Y] = {v->images, v->out},
        [GRADD_CONV_MAKES_W] = {v->groups, v->out / v->groups, v->in / v->groups}
    };
    const int64_t *sizes = which == GRADD_CONV_MAKES_X   ? v->x
                           : which == GRADD_CONV_MAKES_Y ? v->y
                                                         : v->kernel;
    const bool grouped = which == GRADD_CONV_MAKES_W && v->groups > 1;
    const int skipped = which == GRADD_CONV_MAKES_W && !grouped; /* the axis of groups */
    const int head = which != GRADD_CONV_MAKES_W || !grouped ? 2 : 3;
    dnnl_dims_t dims;
    for (int i = 0; i < head; i++)
        dims[i] = heads[which][skipped + i];
    for (int i = 0; i < v->axes; i++)
        dims[head + i] = sizes[AXES - v->axes + i];
    const dnnl_data_type_t type = gradd_dnnl_type(v->dtype);
    const int rank = head + v->axes;
    if (v->last && which != GRADD_CONV_MAKES_W) return describe_last(d, which, rank, dims, type);
    const bool is_dw = which == GRADD_CONV_MAKES_W && made == GRADD_CONV_MAKES_W;
    const dnnl_data_type_t plain = is_dw ? gradd_dnnl_type(d->dw_dtype) : type;
    GRADD_TRY_DNNL(dnnl_memory_desc_create_with_strides(&d->plain[which], rank, dims, plain, NULL));
    GRADD_TRY_DNNL(
        dnnl_memory_desc_create_with_tag(&d->any[which], rank, dims, type, dnnl_format_tag_any));
    if (is_dw)
        GRADD_TRY_DNNL(
            dnnl_memory_desc_create_with_tag(&d->dw, rank, dims, plain, dnnl_format_tag_any));
    return GRADD_OK;
}

/* Along the axes that there are: strides, dilations (0 = none), zeros in front and behind. */
typedef struct window_s {
    dnnl_dims_t stride, dilation, begin, end;
} window_t;

static window_t window_of(const gradd_conv_t *v) {
    window_t w;
    for (int i = 0; i < v->axes; i++) {
        const int a = AXES - v->axes + i;
        w.stride[i] = v->stride[a];
        w.dilation[i] = v->dilation[a] - 1;
        w.begin[i] = v->begin[a];
        w.end[i] = gradd_conv_at(v, a, v->y[a] - 1, v->kernel[a] - 1) + 1 - v->x[a];
    }
    return w;
}

/* With d->dw_dtype set. Leaves d->pd NULL where the library has nothing. */
static gradd_status_t describe(const gradd_conv_t *v, gradd_conv_made_t made, descs_t *d) {
    const window_t w = window_of(v);
    dnnl_engine_t engine;
    dnnl_status_t status;
    GRADD_TRY(gradd_dnnl_engine(&engine));
    for (int i = 0; i < TENSORS; i++)
        GRADD_TRY(describe_tensor(d, v, made, i));
    if (v->has_bias)
        GRADD_TRY_DNNL(dnnl_memory_desc_create_with_strides(&d->bias, 1, (dnnl_dims_t){v->out},
                                                            gradd_dnnl_type(v->dtype), NULL));
    GRADD_TRY_DNNL(dnnl_primitive_attr_create(&d->attr));
    GRADD_TRY_DNNL(dnnl_primitive_attr_set_scratchpad_mode(d->attr, dnnl_scratchpad_mode_user));
    status = dnnl_convolution_forward_primitive_desc_create(
        &d->forward, engine, dnnl_forward_training, dnnl_convolution_direct,
        d->any[GRADD_CONV_MAKES_X], d->any[GRADD_CONV_MAKES_W], d->bias, d->any[GRADD_CONV_MAKES_Y],
        w.stride, w.dilation, w.begin, w.end, d->attr);
    if (!status && made == GRADD_CONV_MAKES_Y)
        d->pd = d->forward;
    else if (!status && made == GRADD_CONV_MAKES_X)
        status = dnnl_convolution_backward_data_primitive_desc_create(
            &d->pd, engine, dnnl_convolution_direct, d->any[GRADD_CONV_MAKES_X],
            d->any[GRADD_CONV_MAKES_W], d->any[GRADD_CONV_MAKES_Y], w.stride, w.dilation, w.begin,
            w.end, d->forward, d->attr);
    else if (!status)
        status = dnnl_convolution_backward_weights_primitive_desc_create(
            &d->pd, engine, dnnl_convolution_direct, d->any[GRADD_CONV_MAKES_X], d->dw, NULL,
            d->any[GRADD_CONV_MAKES_Y], w.stride, w.dilation, w.begin, w.end, d->forward, d->attr);
    if (!status || status == dnnl_unimplemented || status == dnnl_invalid_arguments)
        return GRADD_OK;
    return gradd_dnnl_failed(status, "description of a convolution");
}

static bool is_true_kernel(const descs_t *d) {
    const char *kind = "ref";
    if (!d->pd || dnnl_primitive_desc_query(d->pd, dnnl_query_impl_info_str, 0, &kind))
        return false;
    return !strstr(kind, "ref") && !strstr(kind, "gemm:");
}

/* Whether it is worth asking the library. */
static bool suits(const gradd_conv_t *v, gradd_conv_made_t made) {
    if (v->dtype == GRADD_DT_BF16 && !gradd_gemm_bf16_native()) return false;
    if (v->dtype == GRADD_DT_F32 && !v->last && gradd_conv_is_pointwise(v)) return false;
    if (gradd_conv_is_depthwise(v) && v->out == v->in) return false;
    if (made == GRADD_CONV_MAKES_X && (v->has_bias || v->in / v->groups < LEAST_CHANNELS))
        return false;
    for (int i = 0; i < AXES; i++)
        if (v->begin[i] < 0 || v->x[i] < 1 || v->y[i] < 1) return false;
    return v->images && v->in && v->out;
}

bool gradd_conv_onednn_has(const gradd_conv_t *v, gradd_conv_made_t made, gradd_dtype_t dtype) {
    descs_t d = {.dw_dtype = dtype};
    if (!suits(v, made)) return false;
    const bool taken = !describe(v, made, &d) && is_true_kernel(&d);
    destroy_descs(&d);
    return taken;
}

bool gradd_conv_onednn_accepts(const gradd_infer_t *c) {
    gradd_conv_t v;
    gradd_conv_made_t made;
    return !gradd_conv_of_node(c, &v, &made) && gradd_conv_onednn_has(&v, made, v.dtype);
}

/* ---- preparation ----------------------------------------------------------------------------- */

/* The form that the primitive wants; forward and backward have names of their own for it. */
static const_dnnl_memory_desc_t wanted(const descs_t *d, gradd_conv_made_t made, int which) {
    static const dnnl_query_t plain[TENSORS] = {[GRADD_CONV_MAKES_X] = dnnl_query_src_md,
                                                [GRADD_CONV_MAKES_Y] = dnnl_query_dst_md,
                                                [GRADD_CONV_MAKES_W] = dnnl_query_weights_md};
    static const dnnl_query_t diff[TENSORS] = {[GRADD_CONV_MAKES_X] = dnnl_query_diff_src_md,
                                               [GRADD_CONV_MAKES_Y] = dnnl_query_diff_dst_md,
                                               [GRADD_CONV_MAKES_W] = dnnl_query_diff_weights_md};
    const bool backward =
        made != GRADD_CONV_MAKES_Y && (which == (int)made || which == GRADD_CONV_MAKES_Y);
    return dnnl_primitive_desc_query_md(d->pd, backward ? diff[which] : plain[which], 0);
}

static void put_room(size_t bytes, size_t *workspace, size_t *out_at) {
    *out_at = *workspace;
    *workspace += (bytes + 63) & ~(size_t)63;
}

static gradd_status_t make_operand(const descs_t *d, const conv_dnnl_t *k, int which, operand_t *o,
                                   size_t *workspace) {
    const_dnnl_memory_desc_t inner = wanted(d, k->made, which), plain = d->plain[which];
    const bool result = which == (int)k->made;
    dnnl_engine_t engine;
    dnnl_primitive_desc_t pd = NULL;
    GRADD_TRY(gradd_dnnl_engine(&engine));
    GRADD_TRY_DNNL(dnnl_memory_create(&o->plain, plain, engine, DNNL_MEMORY_NONE));
    if (dnnl_memory_desc_equal(inner, plain)) return GRADD_OK;
    put_room(dnnl_memory_desc_get_size(inner), workspace, &o->at);
    GRADD_TRY_DNNL(dnnl_memory_create(&o->inner, inner, engine, DNNL_MEMORY_NONE));
    GRADD_TRY_DNNL(dnnl_reorder_primitive_desc_create(&pd, result ? inner : plain, engine,
                                                      result ? plain : inner, engine, NULL));
    const dnnl_status_t status = dnnl_primitive_create(&o->reorder, pd);
    dnnl_primitive_desc_destroy(pd);
    return status ? gradd_dnnl_failed(status, "a reorder") : GRADD_OK;
}

static gradd_status_t build(const gradd_conv_t *v, descs_t *d, conv_dnnl_t *k,
                            size_t *out_workspace) {
    dnnl_engine_t engine;
    size_t workspace = 0;
    GRADD_TRY(gradd_dnnl_engine(&engine));
    GRADD_TRY(describe(v, k->made, d));
    if (!d->pd) return GRADD_FAIL(INTERNAL, "oneDNN no longer has this convolution");
    for (int i = 0; i < TENSORS; i++)
        GRADD_TRY(make_operand(d, k, i, &k->tensor[i], &workspace));
    if (v->has_bias)
        GRADD_TRY_DNNL(dnnl_memory_create(&k->bias, d->bias, engine, DNNL_MEMORY_NONE));
    const_dnnl_memory_desc_t scratch =
        dnnl_primitive_desc_query_md(d->pd, dnnl_query_scratchpad_md, 0);
    put_room(dnnl_memory_desc_get_size(scratch), &workspace, &k->scratch_at);
    GRADD_TRY_DNNL(dnnl_memory_create(&k->scratch, scratch, engine, DNNL_MEMORY_NONE));
    GRADD_TRY_DNNL(dnnl_stream_create(&k->stream, engine, dnnl_stream_default_flags));
    GRADD_TRY_DNNL(dnnl_primitive_create(&k->primitive, d->pd));
    *out_workspace = workspace;
    return GRADD_OK;
}

static void destroy(conv_dnnl_t *k) {
    for (int i = 0; i < TENSORS; i++) {
        dnnl_memory_destroy(k->tensor[i].plain);
        dnnl_memory_destroy(k->tensor[i].inner);
        dnnl_primitive_destroy(k->tensor[i].reorder);
    }
    dnnl_memory_destroy(k->bias);
    dnnl_memory_destroy(k->scratch);
    dnnl_primitive_destroy(k->primitive);
    dnnl_stream_destroy(k->stream);
    free(k);
}

gradd_status_t gradd_conv_onednn_prepare(const gradd_conv_t *v, gradd_conv_made_t made,
                                         gradd_dtype_t dtype, gradd_prepared_t *out) {
    descs_t d = {.dw_dtype = dtype};
    size_t workspace = 0;
    conv_dnnl_t *k = calloc(1, sizeof *k);
    if (!k) return GRADD_FAIL(NOMEM, "convolution");
    k->made = made;
    const gradd_status_t status = build(v, &d, k, &workspace);
    destroy_descs(&d);
    if (status) {
        destroy(k);
        return status;
    }
    *out = (gradd_prepared_t){
        .workspace = workspace, .state = k, .bytes = sizeof *k + PRIMITIVE_BYTES};
    return GRADD_OK;
}

void gradd_conv_onednn_unprepare(gradd_prepared_t *prepared) {
    destroy(prepared->state);
}

/* ---- launches -------------------------------------------------------------------------------- */

static gradd_status_t reorder(const conv_dnnl_t *k, const operand_t *o, bool back) {
    const dnnl_exec_arg_t args[2] = {
        {DNNL_ARG_FROM, back ? o->inner : o->plain},
        {DNNL_ARG_TO,   back ? o->plain : o->inner}
    };
    GRADD_TRY_DNNL(dnnl_primitive_execute(o->reorder, k->stream, 2, args));
    GRADD_TRY_DNNL(dnnl_stream_wait(k->stream));
    return GRADD_OK;
}

/* Sets where an operand lies, and puts it into its inner form. */
static gradd_status_t enter(const conv_dnnl_t *k, int which, void *data, char *workspace) {
    const operand_t *o = &k->tensor[which];
    GRADD_TRY_DNNL(dnnl_memory_set_data_handle(o->plain, data));
    if (!o->inner) return GRADD_OK;
    GRADD_TRY_DNNL(dnnl_memory_set_data_handle(o->inner, workspace + o->at));
    return which == (int)k->made ? GRADD_OK : reorder(k, o, false);
}

static dnnl_memory_t inner_of(const conv_dnnl_t *k, int which) {
    const operand_t *o = &k->tensor[which];
    return o->inner ? o->inner : o->plain;
}

static gradd_status_t run(const conv_dnnl_t *k) {
    const bool back = k->made != GRADD_CONV_MAKES_Y;
    int n = 4;
    dnnl_exec_arg_t args[5] = {
        {k->made == GRADD_CONV_MAKES_X ? DNNL_ARG_DIFF_SRC : DNNL_ARG_SRC,
         inner_of(k, GRADD_CONV_MAKES_X)},
        {k->made == GRADD_CONV_MAKES_W ? DNNL_ARG_DIFF_WEIGHTS : DNNL_ARG_WEIGHTS,
         inner_of(k, GRADD_CONV_MAKES_W)},
        {back ? DNNL_ARG_DIFF_DST : DNNL_ARG_DST, inner_of(k, GRADD_CONV_MAKES_Y)},
        {DNNL_ARG_SCRATCHPAD, k->scratch}
    };
    if (k->bias) args[n++] = (dnnl_exec_arg_t){DNNL_ARG_BIAS, k->bias};
    GRADD_TRY_DNNL(dnnl_primitive_execute(k->primitive, k->stream, n, args));
    GRADD_TRY_DNNL(dnnl_stream_wait(k->stream));
    return GRADD_OK;
}

gradd_status_t gradd_conv_onednn(const void *state, const gradd_conv_memory_t *m) {
    const conv_dnnl_t *k = state;
    char *workspace = m->workspace;
    GRADD_TRY(enter(k, GRADD_CONV_MAKES_X, m->x, workspace));
    GRADD_TRY(enter(k, GRADD_CONV_MAKES_W, m->w, workspace));
    GRADD_TRY(enter(k, GRADD_CONV_MAKES_Y, m->y, workspace));
    GRADD_TRY_DNNL(dnnl_memory_set_data_handle(k->scratch, workspace + k->scratch_at));
    if (k->bias) /* the library takes what it only reads as void * too */
        GRADD_TRY_DNNL(dnnl_memory_set_data_handle(k->bias, (void *)(uintptr_t)m->bias));
    GRADD_TRY(run(k));
    const operand_t *result = &k->tensor[k->made];
    return result->inner ? reorder(k, result, true) : GRADD_OK;
}

#endif
