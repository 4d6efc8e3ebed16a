/* See rowwise.h. */
#include "kernels/rules/rowwise.h"

#include <stddef.h>

#include "kernels/rules/infer.h"

/* Operand i is row by row along its first `lead` axes. */
static void use_rows(gradd_rowwise_t *r, int i, int lead) {
    r->use[i] = GRADD_USE_ROWS;
    r->in_lead[i] = lead;
}

void gradd_rowwise_align(gradd_rowwise_t *r, int i, int behind) {
    const gradd_type_t *in = &r->in[i].type, *out = &r->out[0];
    const int missing = out->rank - behind - in->rank; /* axes in front that the operand lacks */
    bool same = true, none = true;
    for (int d = 0; d < r->lead; d++) {
        const int64_t size = d < missing ? 1 : in->dims[d - missing];
        if (out->dims[d] == 1) continue;
        same = same && size == out->dims[d];
        none = none && size == 1;
    }
    r->use[i] = GRADD_USE_SPREAD;
    r->in_lead[i] = r->lead - missing;
    if (same && r->in_lead[i] > 0)
        r->use[i] = GRADD_USE_ROWS;
    else if (none)
        r->use[i] = GRADD_USE_WHOLE;
}

bool gradd_rowwise_map(gradd_rowwise_t *r) {
    bool any = false;
    for (int i = 0; i < r->n_in; i++) {
        if (!r->in[i].type.dtype) continue;
        gradd_rowwise_align(r, i, 0);
        any = any || r->use[i] != GRADD_USE_WHOLE;
    }
    return any;
}

bool gradd_rowwise_leads(gradd_rowwise_t *r, int i) {
    const gradd_type_t *in = &r->in[i].type, *out = &r->out[0];
    if (in->rank < r->lead) return false;
    for (int d = 0; d < r->lead; d++)
        if (in->dims[d] != out->dims[d]) return false;
    use_rows(r, i, r->lead);
    return true;
}

static bool is_behind(const gradd_rowwise_t *r, int64_t axis) {
    return (axis < 0 ? axis + r->in[0].type.rank : axis) >= r->lead;
}

bool gradd_rowwise_axis(gradd_rowwise_t *r) {
    for (int i = 1; i < r->n_in; i++)
        if (r->in[i].type.rank > r->in[0].type.rank - r->lead) return false;
    return is_behind(r, gradd_attr_int(r->attrs, "axis", -1)) && gradd_rowwise_leads(r, 0);
}

bool gradd_rowwise_split(gradd_rowwise_t *r) {
    return is_behind(r, gradd_attr_int(r->attrs, "axis", 0)) && gradd_rowwise_leads(r, 0);
}

bool gradd_rowwise_join(gradd_rowwise_t *r) {
    for (int i = 0; i < r->n_in; i++)
        if (!gradd_rowwise_leads(r, i)) return false;
    return is_behind(r, gradd_attr_int(r->attrs, "axis", 0));
}

bool gradd_rowwise_product(gradd_rowwise_t *r) {
    if (r->in[1].type.rank != 2 || r->lead >= r->in[0].type.rank) return false;
    if (gradd_attr_int(r->attrs, "transA", 0)) return false;
    if (r->n_in > 2 && r->in[2].type.dtype && r->in[2].type.rank > 1) return false;
    return gradd_rowwise_leads(r, 0);
}

bool gradd_rowwise_view(gradd_rowwise_t *r) {
    const gradd_type_t *in = &r->in[0].type;
    int64_t rows = 1;
    for (int d = 0; d < in->rank; d++) {
        rows *= in->dims[d];
        if (rows != r->rows) continue;
        r->resizes = true;
        use_rows(r, 0, d + 1);
        return true;
    }
    return false;
}

bool gradd_rowwise_lookup(gradd_rowwise_t *r) {
    if (gradd_attr_int(r->attrs, "axis", 0)) return false;
    return r->lead <= r->in[1].type.rank && gradd_rowwise_leads(r, 1);
}

bool gradd_rowwise_all(gradd_rowwise_t *r) {
    for (int i = 0; i < r->n_in; i++)
        if (r->in[i].type.dtype && !gradd_rowwise_leads(r, i)) return false;
    return is_behind(r, gradd_attr_int(r->attrs, "axis", -1));
}

bool gradd_rowwise_batch(gradd_rowwise_t *r) {
    return r->lead == 1 && gradd_rowwise_leads(r, 0);
}

bool gradd_rowwise_fold(gradd_rowwise_t *r) {
    bool folded[GRADD_MAX_RANK];
    const gradd_infer_t c = {.op = r->op, .attrs = r->attrs, .n_in = r->n_in, .in = r->in};
    if (gradd_known_axes(&c, 1, r->in[0].type.rank, folded) || !gradd_rowwise_leads(r, 0))
        return false;
    for (int d = 0; d < r->lead; d++)
        if (folded[d]) return false;
    return true;
}
