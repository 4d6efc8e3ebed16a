/* Index tensors turned into row numbers, with bounds checked.
 *
 * The three ONNX ways to index (Gather, GatherND, GatherElements, and their Scatter twins) become a
 * list of row numbers for picked_rows.h. Negative indices count from the end. An index out of range
 * fails with INDEX and names its value, the limit and its position; nothing is read or written
 * then.
 *
 * Of a launch in parts each makes the numbers of its own range, one range after the other into the
 * same list, so what a part before has read stays read; an index out of range then fails in its
 * part.
 */
#ifndef GRADD_KERNELS_CPU_PICK_H
#define GRADD_KERNELS_CPU_PICK_H

#include "kernels/contract/op.h"
#include "kernels/cpu/parts.h"

/* Index or label at a position of an i32 or i64 tensor. Read once: it may lie in the memory of a
 * client, which may change it while we run, so callers use the copy that they check. */
static inline int64_t gradd_pick_index(const gradd_view_t *v, int64_t at) {
    if (v->type.dtype == GRADD_DT_I32) return ((const volatile int32_t *)v->data)[at];
    return ((const volatile int64_t *)v->data)[at];
}

/* All row numbers. */
#define GRADD_PICK_ALL ((gradd_range_t){0, INT64_MAX})

/* Gather along axis: data seen as [outer, extent, inner] gives outer * count(indices) row numbers
 * of rows of `inner` elements. */
gradd_status_t gradd_pick_axis(const gradd_type_t *data, int axis, const gradd_view_t *indices,
                               gradd_range_t some, int64_t *out_rows);
/* GatherND: the last axis of indices holds coordinates after batch_dims leading axes. */
gradd_status_t gradd_pick_nd(const gradd_type_t *data, int batch_dims, const gradd_view_t *indices,
                             gradd_range_t some, int64_t *out_rows);
/* GatherElements: one row of one element per index. */
gradd_status_t gradd_pick_elements(const gradd_type_t *data, int axis, const gradd_view_t *indices,
                                   gradd_range_t some, int64_t *out_rows);

/* Product of dims[first .. end). */
int64_t gradd_pick_count(const gradd_type_t *type, int first, int end);

#endif
