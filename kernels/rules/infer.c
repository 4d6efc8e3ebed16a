/* Helpers of shape rules. See infer.h. */
#include "kernels/rules/infer.h"

#include <string.h>

gradd_status_t gradd_axis(int64_t axis, int rank, bool end_allowed, int *out_axis) {
    int64_t limit = end_allowed ? rank : rank - 1;
    int64_t wrapped = axis < 0 ? axis + limit + 1 : axis;
    if (wrapped < 0 || wrapped > limit)
        return GRADD_FAIL(GRAPH, "axis %lld is out of range for rank %d", (long long)axis, rank);
    *out_axis = (int)wrapped;
    return GRADD_OK;
}

gradd_status_t gradd_broadcast(const gradd_type_t *a, const gradd_type_t *b, gradd_type_t *out) {
    int rank = a->rank > b->rank ? a->rank : b->rank;
    int64_t dims[GRADD_MAX_RANK] = {0};
    for (int i = 0; i < rank; i++) {
        int ia = i - (rank - a->rank), ib = i - (rank - b->rank);
        int64_t da = ia < 0 ? 1 : a->dims[ia], db = ib < 0 ? 1 : b->dims[ib];
        if (da != db && da != 1 && db != 1) {
            char ta[GRADD_TYPE_TEXT], tb[GRADD_TYPE_TEXT];
            return GRADD_FAIL(GRAPH, "shapes %s and %s do not broadcast", gradd_type_format(a, ta),
                              gradd_type_format(b, tb));
        }
        dims[i] = da == 1 ? db : da;
    }
    out->rank = rank;
    memcpy(out->dims, dims, sizeof dims);
    return GRADD_OK;
}

gradd_status_t gradd_known_i64s(const gradd_infer_t *c, int input, int64_t *out, int max,
                                int *out_n) {
    const gradd_view_t *in = &c->in[input];
    if (input >= c->n_in || in->type.dtype == GRADD_DT_NONE)
        return GRADD_FAIL(GRAPH, "input %d is missing", input);
    if (!in->data)
        return GRADD_FAIL(UNSUPPORTED, "input %d depends on data that is not known before the run",
                          input);
    int64_t n = gradd_type_count(&in->type);
    if (in->type.rank > 1)
        return GRADD_FAIL(GRAPH, "input %d has rank %d, expected a list", input, in->type.rank);
    if (n > max)
        return GRADD_FAIL(LIMIT, "input %d has %lld entries, at most %d", input, (long long)n, max);
    for (int64_t i = 0; i < n; i++) {
        if (in->type.dtype == GRADD_DT_I64)
            out[i] = ((const int64_t *)in->data)[i];
        else if (in->type.dtype == GRADD_DT_I32)
            out[i] = ((const int32_t *)in->data)[i];
        else
            return GRADD_FAIL(GRAPH, "input %d must hold integers", input);
    }
    *out_n = (int)n;
    return GRADD_OK;
}

gradd_status_t gradd_known_axes(const gradd_infer_t *c, int input, int rank, bool *out_mask) {
    int64_t axes[GRADD_MAX_RANK];
    int n = 0;
    memset(out_mask, 0, sizeof out_mask[0] * GRADD_MAX_RANK);
    const gradd_attr_t *attr = gradd_attr_find(c->attrs, "axes");
    if (input < c->n_in && c->in[input].type.dtype != GRADD_DT_NONE) {
        GRADD_TRY(gradd_known_i64s(c, input, axes, GRADD_MAX_RANK, &n));
    } else if (attr) {
        if (attr->n > GRADD_MAX_RANK) return GRADD_FAIL(LIMIT, "more than %d axes", GRADD_MAX_RANK);
        n = (int)attr->n;
        memcpy(axes, attr->ints, sizeof axes[0] * attr->n);
    }
    if (!n) {
        bool all = !gradd_attr_int(c->attrs, "noop_with_empty_axes", 0);
        for (int i = 0; i < rank; i++)
            out_mask[i] = all;
        return GRADD_OK;
    }
    for (int i = 0; i < n; i++) {
        int axis;
        GRADD_TRY(gradd_axis(axes[i], rank, false, &axis));
        if (out_mask[axis]) return GRADD_FAIL(GRAPH, "axis %d is repeated", axis);
        out_mask[axis] = true;
    }
    return GRADD_OK;
}

gradd_status_t gradd_infer_same(gradd_infer_t *c) {
    c->out[0] = c->in[0].type;
    return GRADD_OK;
}

gradd_status_t gradd_infer_broadcast(gradd_infer_t *c) {
    gradd_type_t out = c->in[0].type;
    for (int i = 1; i < c->n_in; i++) {
        if (c->in[i].type.dtype != out.dtype)
            return GRADD_FAIL(GRAPH, "inputs 0 and %d differ in element type: %s and %s", i,
                              gradd_dtype_name(out.dtype), gradd_dtype_name(c->in[i].type.dtype));
        GRADD_TRY(gradd_broadcast(&out, &c->in[i].type, &out));
    }
    c->out[0] = out;
    return GRADD_OK;
}

gradd_status_t gradd_compute_copy(const gradd_launch_t *r) {
    size_t bytes = (size_t)gradd_type_bytes(&r->out[0].type);
    if (bytes && r->out[0].data != r->in[0].data) memcpy(r->out[0].data, r->in[0].data, bytes);
    return GRADD_OK;
}
