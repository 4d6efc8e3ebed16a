/* Blocks of an image: DepthToSpace, SpaceToDepth and Col2Im, composites.
 *
 * DepthToSpace moves channels into blocks of b x b elements: [N, C, H, W] becomes
 * [N, C / b^2, H b, W b]; in mode DCR the block is in front of the channel, in CRD behind it.
 * SpaceToDepth is the way back of DCR. Col2Im(x, image, block) adds blocks to an image of one to
 * three axes: x is [N, C * size of a block, blocks], the result [N, C, image]; sums are in the
 * order of x.
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/contract/op.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

enum { AXES = 3 };

/* ---- depth and space ------------------------------------------------------------------------- */

static gradd_status_t block_of(const gradd_infer_t *c, int64_t *out) {
    const gradd_type_t *x = &c->in[0].type;
    *out = gradd_attr_int(c->attrs, "blocksize", 0);
    if (x->rank != 4) return GRADD_FAIL(GRAPH, "the input has rank %d, expected 4", x->rank);
    if (*out < 1 || *out > INT16_MAX) return GRADD_FAIL(GRAPH, "blocksize %lld", (long long)*out);
    return GRADD_OK;
}

static gradd_status_t infer_to_space(gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[0].type;
    int64_t n;
    GRADD_TRY(block_of(c, &n));
    const char *mode = gradd_attr_string(c->attrs, "mode", "DCR");
    if (strcmp(mode, "DCR") && strcmp(mode, "CRD"))
        return GRADD_FAIL(GRAPH, "mode is \"%s\", expected DCR or CRD", mode);
    if (x->dims[1] % (n * n))
        return GRADD_FAIL(GRAPH, "%lld channels are not blocks of %lld", (long long)x->dims[1],
                          (long long)(n * n));
    c->out[0] = *x;
    c->out[0].dims[1] /= n * n;
    c->out[0].dims[2] *= n;
    c->out[0].dims[3] *= n;
    return gradd_type_check(&c->out[0]);
}

static gradd_status_t infer_to_depth(gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[0].type;
    int64_t n;
    GRADD_TRY(block_of(c, &n));
    if (x->dims[2] % n || x->dims[3] % n)
        return GRADD_FAIL(GRAPH, "%lld x %lld elements are not blocks of %lld",
                          (long long)x->dims[2], (long long)x->dims[3], (long long)n);
    c->out[0] = *x;
    c->out[0].dims[1] *= n * n;
    c->out[0].dims[2] /= n;
    c->out[0].dims[3] /= n;
    return gradd_type_check(&c->out[0]);
}

static gradd_status_t expand_to_space(gradd_expand_t *x) {
    gradd_builder_t *b = x->b;
    const gradd_type_t type = *gradd_val_type(b, x->in[0]);
    const int64_t n = gradd_attr_int(x->attrs, "blocksize", 0), *d = type.dims;
    const int64_t depth = d[1] / (n * n), sizes[] = {d[0], depth, d[2] * n, d[3] * n};
    const bool behind = !strcmp(gradd_attr_string(x->attrs, "mode", "DCR"), "CRD");
    const int64_t parted[] = {d[0], behind ? depth : n, n, behind ? n : depth, d[2], d[3]};
    const int64_t perm_behind[] = {0, 1, 4, 2, 5, 3}, perm_front[] = {0, 3, 4, 1, 5, 2};
    gradd_val_t v = gradd_reshape_to(b, x->in[0], parted, 6);
    v = gradd_transpose(b, v, behind ? perm_behind : perm_front, 6);
    x->out[0] = gradd_reshape_to(b, v, sizes, 4);
    return b->status;
}

static gradd_status_t expand_to_depth(gradd_expand_t *x) {
    gradd_builder_t *b = x->b;
    const gradd_type_t type = *gradd_val_type(b, x->in[0]);
    const int64_t n = gradd_attr_int(x->attrs, "blocksize", 0), *d = type.dims;
    const int64_t parted[] = {d[0], d[1], d[2] / n, n, d[3] / n, n};
    const int64_t sizes[] = {d[0], d[1] * n * n, d[2] / n, d[3] / n}, perm[] = {0, 3, 5, 1, 2, 4};
    gradd_val_t v = gradd_reshape_to(b, x->in[0], parted, 6);
    x->out[0] = gradd_reshape_to(b, gradd_transpose(b, v, perm, 6), sizes, 4);
    return b->status;
}

/* ---- blocks that are added ------------------------------------------------------------------- */

typedef struct columns_s {
    int axes;
    int64_t image[AXES], block[AXES], padded[AXES]; /* padded: the image with its padding */
    int64_t before[AXES], stride[AXES], dilation[AXES], count[AXES]; /* count: of blocks */
    int64_t block_size, blocks, padded_size, channels;
} columns_t;

static gradd_status_t numbers(gradd_attrs_t attrs, const char *name, int n, int64_t otherwise,
                              int64_t *out) {
    const gradd_attr_t *attr = gradd_attr_find(attrs, name);
    if (attr && attr->n != (size_t)n)
        return GRADD_FAIL(GRAPH, "%s has %zu entries, expected %d", name, attr->n, n);
    for (int i = 0; i < n; i++) {
        out[i] = attr ? attr->ints[i] : otherwise;
        if (out[i] < otherwise || out[i] > INT32_MAX)
            return GRADD_FAIL(GRAPH, "%s has the entry %lld", name, (long long)out[i]);
    }
    return GRADD_OK;
}

static gradd_status_t read_columns(const gradd_infer_t *c, columns_t *k) {
    const gradd_type_t *x = &c->in[0].type;
    int64_t pads[2 * AXES];
    int n;
    *k = (columns_t){.block_size = 1, .blocks = 1, .padded_size = 1};
    GRADD_TRY(gradd_known_i64s(c, 1, k->image, AXES, &k->axes));
    GRADD_TRY(gradd_known_i64s(c, 2, k->block, AXES, &n));
    if (n != k->axes || n < 1 || x->rank != 3)
        return GRADD_FAIL(GRAPH, "%d sizes of an image, %d of a block, an input of rank %d",
                          k->axes, n, x->rank);
    GRADD_TRY(numbers(c->attrs, "dilations", n, 1, k->dilation));
    GRADD_TRY(numbers(c->attrs, "strides", n, 1, k->stride));
    GRADD_TRY(numbers(c->attrs, "pads", 2 * n, 0, pads));
    for (int i = 0; i < n; i++) {
        if (k->image[i] < 1 || k->block[i] < 1 || k->image[i] > INT32_MAX ||
            k->block[i] > INT16_MAX)
            return GRADD_FAIL(GRAPH, "axis %d: an image of %lld, a block of %lld", i,
                              (long long)k->image[i], (long long)k->block[i]);
        k->before[i] = pads[i];
        k->padded[i] = k->image[i] + pads[i] + pads[n + i];
        const int64_t reach = k->dilation[i] * (k->block[i] - 1) + 1;
        if (k->padded[i] < reach)
            return GRADD_FAIL(GRAPH, "axis %d: a block of %lld in %lld elements", i,
                              (long long)reach, (long long)k->padded[i]);
        k->count[i] = (k->padded[i] - reach) / k->stride[i] + 1;
        k->block_size *= k->block[i];
        k->blocks *= k->count[i];
        k->padded_size *= k->padded[i];
        if (k->padded_size > INT32_MAX || k->blocks > INT32_MAX || k->block_size > INT32_MAX)
            return GRADD_FAIL(LIMIT, "an image of more than 2^31 elements");
    }
    k->channels = x->dims[1] / k->block_size;
    if (x->dims[1] % k->block_size || x->dims[2] != k->blocks)
        return GRADD_FAIL(GRAPH, "%lld columns of %lld, expected %lld of a multiple of %lld",
                          (long long)x->dims[2], (long long)x->dims[1], (long long)k->blocks,
                          (long long)k->block_size);
    return GRADD_OK;
}

static gradd_status_t infer_columns(gradd_infer_t *c) {
    columns_t k;
    GRADD_TRY(read_columns(c, &k));
    c->out[0] = (gradd_type_t){.dtype = c->in[0].type.dtype, .rank = 2 + k.axes};
    c->out[0].dims[0] = c->in[0].type.dims[0];
    c->out[0].dims[1] = k.channels;
    memcpy(c->out[0].dims + 2, k.image, sizeof k.image[0] * (size_t)k.axes);
    return gradd_type_check(&c->out[0]);
}

/* Places in the padded image, of each element of each block: [block size * blocks]. */
static void find_places(const columns_t *k, int64_t *out) {
    for (int64_t e = 0; e < k->block_size; e++)
        for (int64_t p = 0; p < k->blocks; p++) {
            int64_t place = 0, step = 1, in_block = e, block = p;
            for (int i = k->axes - 1; i >= 0; i--) {
                const int64_t at =
                    in_block % k->block[i] * k->dilation[i] + block % k->count[i] * k->stride[i];
                place += at * step;
                step *= k->padded[i];
                in_block /= k->block[i];
                block /= k->count[i];
            }
            *out++ = place;
        }
}

static gradd_status_t expand_columns(gradd_expand_t *x) {
    gradd_builder_t *b = x->b;
    gradd_view_t in[3];
    for (int i = 0; i < 3; i++)
        in[i] = (gradd_view_t){*gradd_val_type(b, x->in[i]), (void *)b->data(b, x->in[i])};
    columns_t k;
    GRADD_TRY(read_columns(
        &(gradd_infer_t){.op = x->op, .attrs = x->attrs, .n_in = 3, .n_out = 1, .in = in}, &k));
    const int64_t n = k.block_size * k.blocks, planes = in[0].type.dims[0] * k.channels;
    int64_t *places = malloc(sizeof *places * (size_t)n);
    if (!places) return GRADD_FAIL(NOMEM, "%lld places of blocks", (long long)n);
    find_places(&k, places);
    const gradd_val_t index =
        b->constant(b, &(gradd_type_t){.dtype = GRADD_DT_I64, .rank = 1, .dims = {n}}, places);
    free(places);
    const int64_t flat[] = {planes, n}, dims[] = {planes, k.padded_size};
    const gradd_attr_t attrs[] = {gradd_make_ints("dims", dims, 2), gradd_make_int("axis", 1)};
    int64_t sizes[2 + AXES] = {in[0].type.dims[0], k.channels};
    memcpy(sizes + 2, k.padded, sizeof k.padded[0] * (size_t)k.axes);
    gradd_val_t v = gradd_reshape_to(b, x->in[0], flat, 2);
    v = gradd_emit_attrs(b, "GatherGrad", (gradd_val_t[]){v, index}, 2, attrs, 2);
    v = gradd_reshape_to(b, v, sizes, 2 + k.axes);
    for (int i = 0; i < k.axes; i++)
        if (k.padded[i] != k.image[i])
            v = gradd_slice(b, v, 2 + i, k.before[i], k.before[i] + k.image[i], 1);
    x->out[0] = v;
    return b->status;
}

/* ---- rows ------------------------------------------------------------------------------------ */

GRADD_OPS(
    blocks,
    GRADD_OP("DepthToSpace", "", 11, (1, 1), (1, 1), .flags = GRADD_OP_CHEAP,
             .attrs = GRADD_ATTR_LIST({"blocksize", GRADD_ATTR_INT, true},
                                      {"mode", GRADD_ATTR_STRING, false}),
             .infer = infer_to_space, .expand = expand_to_space,
             .cases = GRADD_CASES({.text = "f32[2,8,3,2] | blocksize=2"},
                                  {.text = "f32[2,8,3,2] | blocksize=2 mode=\"CRD\""},
                                  {.text = "i64[1,9,1,2] | blocksize=3"},
                                  {.text = "f32[0,4,3,2] | blocksize=2"})),
    GRADD_OP("SpaceToDepth", "", 1, (1, 1), (1, 1), .flags = GRADD_OP_CHEAP,
             .attrs = GRADD_ATTR_LIST({"blocksize", GRADD_ATTR_INT, true}), .infer = infer_to_depth,
             .expand = expand_to_depth,
             .cases = GRADD_CASES({.text = "f32[2,3,4,6] | blocksize=2"},
                                  {.text = "f32[0,3,4,6] | blocksize=2"})),
    GRADD_OP("Col2Im", "", 18, (3, 3), (1, 1),
             .types = {GRADD_T_FLOAT, GRADD_T_INDEX, GRADD_T_INDEX},
             .attrs = GRADD_ATTR_LIST({"dilations", GRADD_ATTR_INTS, false},
                                      {"pads", GRADD_ATTR_INTS, false},
                                      {"strides", GRADD_ATTR_INTS, false}),
             .infer = infer_columns, .expand = expand_columns,
             .cases = GRADD_CASES(
                 {.text = "f32[2,8,6] i64[2]={3,4} i64[2]={2,2}"},
                 {.text = "f32[1,12,4] i64[2]={5,6} i64[2]={2,3} | strides=[2,3] pads=[0,1,0,1]",
                  .grad_tol = 0},
                 {.text = "f32[1,3,3] i64[1]={5} i64[1]={3}"},
                 {.text = "f32[1,4,6] i64[2]={4,5} i64[2]={2,2} | dilations=[2,2]"},
                 {.text = "f32[2,8,4] i64[3]={2,2,5} i64[3]={2,2,2}"},
                 {.text = "f32[0,8,6] i64[2]={3,4} i64[2]={2,2}"})));
