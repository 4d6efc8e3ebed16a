/* Labels, reductions and the loss of a row. See loss_labels.h. */
#include "kernels/cpu/loss_labels.h"
#include "kernels/describe/cross_entropy.h"

#include "kernels/contract/fault.h"
#include "kernels/cpu/half.h"
#include "kernels/cpu/pick.h"

#include <math.h>
#include <string.h>

gradd_dtype_t gradd_loss_dtype(gradd_dtype_t logits) {
    return logits == GRADD_DT_F64 ? GRADD_DT_F64 : GRADD_DT_F32;
}

double gradd_loss_number(const gradd_view_t *v, int64_t i) {
    switch (v->type.dtype) {
    case GRADD_DT_F32:
        return (double)((const float *)v->data)[i];
    case GRADD_DT_BF16:
    case GRADD_DT_F16:
        return (double)gradd_half_f32((const uint16_t *)v->data + i, v->type.dtype);
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
    else if (gradd_dtype_is_half(v->type.dtype))
        gradd_half_put((uint16_t *)v->data + i, v->type.dtype, (float)value);
    else
        ((double *)v->data)[i] = value;
}

static bool given(const gradd_view_t *v) {
    return v && v->type.dtype != GRADD_DT_NONE;
}

gradd_loss_operands_t gradd_loss_operands(const gradd_view_t *in, int n, int first) {
    return (gradd_loss_operands_t){&in[first], n > first + 1 ? &in[first + 1] : NULL,
                                   n > first + 2 ? &in[first + 2] : NULL};
}

static gradd_status_t check_weights(const gradd_type_t *x, const gradd_type_t *weights) {
    if (weights->rank == 1 && weights->dims[0] == x->dims[x->rank - 1] &&
        weights->dtype == gradd_loss_dtype(x->dtype))
        return GRADD_OK;
    char tx[GRADD_TYPE_TEXT], tw[GRADD_TYPE_TEXT];
    return GRADD_FAIL(GRAPH, "weights %s are not one per class of %s",
                      gradd_type_format(weights, tw), gradd_type_format(x, tx));
}

gradd_status_t gradd_loss_check(const gradd_type_t *x, const gradd_loss_operands_t *operands,
                                gradd_attrs_t attrs) {
    const gradd_type_t *labels = &operands->labels->type;
    bool shift = gradd_attr_int(attrs, GRADD_CE_SHIFT, 0);
    const char *name = gradd_attr_string(attrs, GRADD_CE_REDUCTION, "mean");
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
    if (given(operands->weights)) GRADD_TRY(check_weights(x, &operands->weights->type));
    if (!given(operands->items)) return GRADD_OK;
    if (gradd_loss_reduction(attrs) != GRADD_REDUCE_SUM ||
        gradd_type_count(&operands->items->type) != 1)
        return GRADD_FAIL(GRAPH, "num_items must be one number that divides a sum");
    return GRADD_OK;
}

static double weight_of(const gradd_loss_t *l, int64_t label) {
    return l->weights ? gradd_loss_number(l->weights, label) : 1;
}

/* Fills labels and total. */
static gradd_status_t read_labels(gradd_loss_t *l, const gradd_view_t *labels,
                                  const gradd_view_t *items) {
    double counted = 0;
    for (int64_t i = 0; i < l->rows; i++) {
        bool last = l->positions && i % l->positions == l->positions - 1;
        l->labels[i] = -1;
        if (last) continue;
        int64_t label = gradd_pick_index(labels, l->positions ? i + 1 : i);
        if (l->ignores && label == l->ignore) continue;
        if (label < 0 || label >= l->classes)
            return gradd_fault_fail(&(gradd_fault_t){
                .kind = GRADD_FAULT_LABEL, .value = label, .limit = l->classes, .position = i});
        l->labels[i] = label;
        counted += weight_of(l, label);
    }
    l->total = given(items) ? gradd_loss_number(items, 0) : 1;
    if (l->reduction == GRADD_REDUCE_MEAN) l->total = counted;
    return GRADD_OK;
}

gradd_status_t gradd_loss_read(const gradd_type_t *logits, gradd_attrs_t attrs,
                               const gradd_loss_operands_t *operands, int64_t *copy,
                               gradd_loss_t *out) {
    *out = (gradd_loss_t){
        .classes = logits->dims[logits->rank - 1], .dtype = logits->dtype, .rows = 1};
    for (int i = 0; i + 1 < logits->rank; i++)
        out->rows *= logits->dims[i];
    if (gradd_attr_int(attrs, GRADD_CE_SHIFT, 0)) out->positions = logits->dims[logits->rank - 2];
    out->reduction = gradd_loss_reduction(attrs);
    out->ignores = gradd_attr_find(attrs, GRADD_CE_IGNORE_INDEX) != NULL;
    out->ignore = gradd_attr_int(attrs, GRADD_CE_IGNORE_INDEX, 0);
    out->smoothing = gradd_attr_float(attrs, GRADD_CE_SMOOTHING, 0);
    out->labels = copy;
    out->weights = given(operands->weights) ? operands->weights : NULL;
    out->mean_weight = 1;
    if (out->weights && out->smoothing != 0) {
        double sum = 0;
        for (int64_t c = 0; c < out->classes; c++)
            sum += weight_of(out, c);
        out->mean_weight = sum / (double)out->classes;
    }
    return read_labels(out, operands->labels, operands->items);
}

gradd_loss_row_t gradd_loss_scan_row(const gradd_loss_t *l, const void *x) {
    return gradd_loss_scan(l->dtype, x, l->classes, l->smoothing != 0,
                           l->weights ? l->weights->data : NULL);
}

static gradd_loss_rule_t rule_of(const gradd_loss_t *l) {
    return (gradd_loss_rule_t){l->classes, l->smoothing, l->mean_weight, l->weights != NULL};
}

double gradd_loss_of_row(const gradd_loss_t *l, const gradd_loss_row_t *row, int64_t label,
                         double own) {
    const gradd_loss_sums_t sums = {row->max, row->sum, row->plain};
    return gradd_loss_value(rule_of(l), sums, weight_of(l, label), own);
}

double gradd_loss_own_gradient(const gradd_loss_t *l, const gradd_loss_label_t *at) {
    return gradd_loss_own_slope(rule_of(l), weight_of(l, at->label), at->own, at->max, at->rest);
}

gradd_loss_spread_t gradd_loss_gradient(const gradd_loss_t *l, const gradd_loss_label_t *at,
                                        double factor) {
    const double even = l->smoothing / (double)l->classes;
    const double share = gradd_loss_share(rule_of(l), weight_of(l, at->label));
    return (gradd_loss_spread_t){at->max, share * factor / (1 + at->rest), even * factor,
                                 l->weights ? l->weights->data : NULL};
}
