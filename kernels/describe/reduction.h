/* Which elements a reduction over axes folds into which result, for all devices.
 *
 * Adjacent dimensions of one kind are merged, so that every reduction is an alternation of kept and
 * reduced dimensions. It ends either in a reduced one (a stretch is folded) or in a kept one (whole
 * stretches are folded into a stretch). Pure functions.
 */
#ifndef GRADD_KERNELS_DESCRIBE_REDUCTION_H
#define GRADD_KERNELS_DESCRIBE_REDUCTION_H

#include "kernels/contract/op.h"
#include "kernels/math/host_device.h"
#include "kernels/rules/infer.h"

#include <string.h>

/* Merged dimensions, outermost first: kept ones and reduced ones with their strides. */
typedef struct gradd_fold_s {
    int kind;          /* the caller's */
    bool ends_kept;    /* innermost stretch is kept */
    int64_t stretch;   /* innermost stretch */
    int n_kept, n_red; /* outer dimensions of each kind */
    int64_t kept[GRADD_MAX_RANK], kept_step[GRADD_MAX_RANK];
    int64_t red[GRADD_MAX_RANK], red_step[GRADD_MAX_RANK];
    int64_t outer_kept, outer_red, reduced; /* products; all reduced elements */
} gradd_fold_t;

/* The fold of in[0] over the axes that in[1] or an attribute says; in[1] is read. */
static inline gradd_fold_t gradd_fold_of(gradd_attrs_t attrs, const gradd_view_t *in, int n_in) {
    int64_t size[GRADD_MAX_RANK], step[GRADD_MAX_RANK], stride = 1;
    bool mask[GRADD_MAX_RANK], red[GRADD_MAX_RANK];
    int n = 0; /* merged, innermost first */
    const gradd_type_t *type = &in[0].type;
    gradd_infer_t c;
    gradd_fold_t p;
    memset(&c, 0, sizeof c);
    memset(&p, 0, sizeof p);
    c.attrs = attrs, c.n_in = n_in, c.in = in;
    p.outer_kept = p.outer_red = p.reduced = 1;
    if (gradd_known_axes(&c, 1, type->rank, mask)) memset(mask, 0, sizeof mask);
    for (int i = type->rank - 1; i >= 0; i--) {
        if (type->dims[i] == 1) continue;
        if (n && red[n - 1] == mask[i])
            size[n - 1] *= type->dims[i];
        else
            size[n] = type->dims[i], step[n] = stride, red[n] = mask[i], n++;
        stride *= type->dims[i];
    }
    p.ends_kept = n > 0 && !red[0];
    p.stretch = n ? size[0] : 1;
    for (int i = n - 1; i >= 0; i--) {
        if (red[i]) p.reduced *= size[i];
        if (i == 0) break;
        if (red[i]) {
            p.red[p.n_red] = size[i];
            p.red_step[p.n_red++] = step[i];
            p.outer_red *= size[i];
        } else {
            p.kept[p.n_kept] = size[i];
            p.kept_step[p.n_kept++] = step[i];
            p.outer_kept *= size[i];
        }
    }
    return p;
}

/* Where entry `index` of n dimensions begins. */
GRADD_HD int64_t gradd_fold_offset(int64_t index, int n, const int64_t *dims,
                                   const int64_t *steps) {
    int64_t offset = 0;
    for (int i = n - 1; i >= 0; i--) {
        offset += index % dims[i] * steps[i];
        index /= dims[i];
    }
    return offset;
}

#endif
