/* Which scale an element of a quantised tensor has. See dequantize.h. */
#include "kernels/describe/dequantize.h"

#include "kernels/rules/infer.h"

static gradd_status_t bad_sizes(const gradd_infer_t *c, const char *what) {
    char x[GRADD_TYPE_TEXT], scale[GRADD_TYPE_TEXT];
    return GRADD_FAIL(GRAPH, "x is %s and x_scale %s: expected %s",
                      gradd_type_format(&c->in[GRADD_DEQUANTIZE_X].type, x),
                      gradd_type_format(&c->in[GRADD_DEQUANTIZE_SCALES].type, scale), what);
}

/* One zero point for each scale, of the type of x. */
static gradd_status_t check_zero(const gradd_infer_t *c) {
    if (c->n_in <= GRADD_DEQUANTIZE_ZEROS) return GRADD_OK;
    const gradd_type_t *zero = &c->in[GRADD_DEQUANTIZE_ZEROS].type;
    gradd_type_t want = c->in[GRADD_DEQUANTIZE_SCALES].type;
    if (zero->dtype == GRADD_DT_NONE) return GRADD_OK;
    want.dtype = c->in[GRADD_DEQUANTIZE_X].type.dtype;
    const bool one_each = gradd_type_count(zero) == 1 && gradd_type_count(&want) == 1;
    if (gradd_type_equal(zero, &want) || (one_each && zero->dtype == want.dtype)) return GRADD_OK;
    char got[GRADD_TYPE_TEXT], expected[GRADD_TYPE_TEXT];
    return GRADD_FAIL(GRAPH, "x_zero_point is %s, expected %s", gradd_type_format(zero, got),
                      gradd_type_format(&want, expected));
}

static int64_t product(const gradd_type_t *t, int from, int to) {
    int64_t n = 1;
    for (int i = from; i < to; i++)
        n *= t->dims[i];
    return n;
}

/* A scale for each block of `size` elements along the axis; the last block may be shorter. */
static gradd_status_t find_blocks(const gradd_infer_t *c, int axis, int64_t size,
                                  gradd_scales_t *out) {
    const gradd_type_t *x = &c->in[GRADD_DEQUANTIZE_X].type,
                       *scale = &c->in[GRADD_DEQUANTIZE_SCALES].type;
    gradd_type_t want = *x;
    want.dtype = scale->dtype;
    want.dims[axis] = x->dims[axis] / size + (x->dims[axis] % size > 0);
    if (!gradd_type_equal(scale, &want)) {
        char text[GRADD_TYPE_TEXT];
        return bad_sizes(c, gradd_type_format(&want, text));
    }
    out->block = size;
    out->inner_step = out->inner > 1;
    out->axis_step = out->inner;
    out->outer_step = out->inner * want.dims[axis];
    return GRADD_OK;
}

gradd_status_t gradd_scales_find(const gradd_infer_t *c, gradd_scales_t *out) {
    const gradd_type_t *x = &c->in[GRADD_DEQUANTIZE_X].type,
                       *scale = &c->in[GRADD_DEQUANTIZE_SCALES].type;
    const int64_t block = gradd_attr_int(c->attrs, GRADD_DEQUANTIZE_BLOCK, 0);
    int axis;
    GRADD_TRY(check_zero(c));
    if (block < 0) return GRADD_FAIL(GRAPH, "block_size is %lld", (long long)block);
    if (!block && scale->rank < 2 && gradd_type_count(scale) == 1) {
        *out = (gradd_scales_t){.axis = 1, .inner = gradd_type_count(x), .block = 1};
        return GRADD_OK;
    }
    GRADD_TRY(
        gradd_axis(gradd_attr_int(c->attrs, GRADD_DEQUANTIZE_AXIS, 1), x->rank, false, &axis));
    *out = (gradd_scales_t){.axis = x->dims[axis], .inner = product(x, axis + 1, x->rank)};
    if (block) return find_blocks(c, axis, block, out);
    if (scale->rank != 1 || scale->dims[0] != x->dims[axis])
        return bad_sizes(c, "one scale, or one for each position on the axis");
    out->block = out->axis_step = 1;
    return GRADD_OK;
}
