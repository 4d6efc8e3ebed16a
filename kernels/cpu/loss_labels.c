/* Labels, reductions and the loss of a row. See loss_labels.h. */
#include "kernels/cpu/loss_labels.h"

#include "kernels/cpu/bf16.h"
#include "kernels/cpu/pick.h"

#include <math.h>
#include <string.h>

gradd_reduction_t gradd_loss_reduction(gradd_attrs_t attrs) {
    const char *name = gradd_attr_string(attrs, "reduction", "mean");
    if (!strcmp(name, "none")) return GRADD_REDUCE_NONE;
    return !strcmp(name, "sum") ? GRADD_REDUCE_SUM : GRADD_REDUCE_MEAN;
}

gradd_dtype_t gradd_loss_dtype(gradd_dtype_t logits) {
    return logits == GRADD_DT_F64 ? GRADD_DT_F64 : GRADD_DT_F32;
}

double gradd_loss_number(const gradd_view_t *v, int64_t i) {
    switch (v->type.dtype) {
    case GRADD_DT_F32:
        return (double)((const float *)v->data)[i];
    case GRADD_DT_BF16:
        return (double)gradd_bf16_f32(((const gradd_bf16_t *)v->data)[i]);
    case GRADD_DT_I32:
        return (double)((const int32_t *)v->data)[i];
    case GRADD_DT_I64:
        return (double)((const int64_t *)v->data)[i];
    default:
        return ((const double *)v->data)[i];
    }
}

void gradd_loss_store(const gradd_view_t *v, int64_t i, double value) {
    if (v->type.dtype == GRADD_DT_F32)
        ((float *)v->data)[i] = (float)value;
    else if (v->type.dtype == GRADD_DT_BF16)
        ((gradd_bf16_t *)v->data)[i] = gradd_f32_bf16((float)value);
    else
        ((double *)v->data)[i] = value;
}

gradd_status_t gradd_loss_check(const gradd_type_t *x, const gradd_type_t *labels,
                                const gradd_type_t *items, gradd_attrs_t attrs) {
    bool shift = gradd_attr_int(attrs, "shift", 0);
    const char *name = gradd_attr_string(attrs, "reduction", "mean");
    if (strcmp(name, "none") && strcmp(name, "sum") && strcmp(name, "mean"))
        return GRADD_FAIL(GRAPH, "reduction=\"%s\" is not defined", name);
    bool fits = x->rank >= 1 + shift && x->dims[x->rank - 1] > 0 &&
                gradd_type_count(x) == gradd_type_count(labels) * x->dims[x->rank - 1];
    if (shift)
        fits = fits && labels->rank && labels->dims[labels->rank - 1] == x->dims[x->rank - 2];
    if (!fits) {
        char tx[GRADD_TYPE_TEXT], tl[GRADD_TYPE_TEXT];
        return GRADD_FAIL(GRAPH, "labels %s do not fit logits %s", gradd_type_format(labels, tl),
                          gradd_type_format(x, tx));
    }
    if (shift && gradd_loss_reduction(attrs) == GRADD_REDUCE_NONE)
        return GRADD_FAIL(GRAPH, "shifted labels need a reduction");
    if (!items || !items->dtype) return GRADD_OK;
    if (gradd_loss_reduction(attrs) != GRADD_REDUCE_SUM || gradd_type_count(items) != 1)
        return GRADD_FAIL(GRAPH, "num_items must be one number that divides a sum");
    return GRADD_OK;
}

/* Fills labels and total. */
static gradd_status_t read_labels(gradd_loss_t *l, const gradd_view_t *given,
                                  const gradd_view_t *items) {
    int64_t counted = 0;
    for (int64_t i = 0; i < l->rows; i++) {
        bool last = l->positions && i % l->positions == l->positions - 1;
        l->labels[i] = -1;
        if (last) continue;
        int64_t label = gradd_pick_index(given, l->positions ? i + 1 : i);
        if (l->ignores && label == l->ignore) continue;
        if (label < 0 || label >= l->classes)
            return GRADD_FAIL(INDEX, "label %lld of %lld, row %lld", (long long)label,
                              (long long)l->classes, (long long)i);
        l->labels[i] = label;
        counted++;
    }
    const bool divided = items && items->type.dtype;
    l->total = divided ? gradd_loss_number(items, 0) : 1;
    if (l->reduction == GRADD_REDUCE_MEAN) l->total = (double)counted;
    return GRADD_OK;
}

gradd_status_t gradd_loss_read(const gradd_type_t *logits, gradd_attrs_t attrs,
                               const gradd_view_t *labels, const gradd_view_t *items, int64_t *copy,
                               gradd_loss_t *out) {
    *out = (gradd_loss_t){
        .classes = logits->dims[logits->rank - 1], .dtype = logits->dtype, .rows = 1};
    for (int i = 0; i + 1 < logits->rank; i++)
        out->rows *= logits->dims[i];
    if (gradd_attr_int(attrs, "shift", 0)) out->positions = logits->dims[logits->rank - 2];
    out->reduction = gradd_loss_reduction(attrs);
    out->ignores = gradd_attr_find(attrs, "ignore_index") != NULL;
    out->ignore = gradd_attr_int(attrs, "ignore_index", 0);
    out->smoothing = gradd_attr_float(attrs, "smoothing", 0);
    out->labels = copy;
    return read_labels(out, labels, items);
}

double gradd_loss_of_row(const gradd_loss_t *l, const gradd_loss_row_t *row, double own) {
    const double e = l->smoothing;
    own -= row->max;
    if (e == 0) return log(row->sum) - own;
    return log(row->sum) - (1 - e) * own - e * (row->plain / (double)l->classes - row->max);
}

double gradd_loss_own_gradient(const gradd_loss_t *l, double own, double max, double rest) {
    const double inverse = 1 / (1 + rest), even = l->smoothing / (double)l->classes;
    return (expm1(own - max) - rest) * inverse - even + l->smoothing;
}
