/* Index tensors turned into row numbers. See pick.h.
 *
 * Indices are i64 or i32; the loops read them through one small accessor, because they are few
 * compared with the rows that are moved. A bad index is noted inside the parallel loop (the lowest
 * position wins, so the message does not depend on threads) and reported after it; only for that
 * text is it read again.
 */
#include "kernels/cpu/pick.h"

#include "kernels/contract/fault.h"
#include "kernels/cpu/copy.h"
#include "kernels/describe/dispatch.h"

/* index in [-extent, extent) to [0, extent); -1 if it is outside. */
static inline int64_t wrap(int64_t index, int64_t extent) {
    if (index < 0) index += extent;
    return index >= 0 && index < extent ? index : -1;
}

static gradd_status_t bad_index(const gradd_view_t *indices, int64_t at, int64_t extent) {
    return gradd_fault_fail(&(gradd_fault_t){.kind = GRADD_FAULT_INDEX,
                                             .value = gradd_pick_index(indices, at),
                                             .limit = extent,
                                             .position = at});
}

int64_t gradd_pick_count(const gradd_type_t *type, int first, int end) {
    int64_t n = 1;
    for (int i = first; i < end; i++)
        n *= type->dims[i];
    return n;
}

gradd_status_t gradd_pick_axis(const gradd_type_t *data, int axis, const gradd_view_t *indices,
                               int64_t *out_rows) {
    int64_t outer = gradd_pick_count(data, 0, axis), extent = data->dims[axis];
    int64_t n = gradd_type_count(&indices->type), bad = n;
    for (int64_t i = 0; i < n; i++) {
        out_rows[i] = wrap(gradd_pick_index(indices, i), extent);
        if (out_rows[i] < 0 && bad == n) bad = i;
    }
    if (bad < n) return bad_index(indices, bad, extent);
    for (int64_t o = 1; o < outer; o++)
        for (int64_t i = 0; i < n; i++)
            out_rows[o * n + i] = o * extent + out_rows[i];
    return GRADD_OK;
}

gradd_status_t gradd_pick_nd(const gradd_type_t *data, int batch_dims, const gradd_view_t *indices,
                             int64_t *out_rows) {
    const gradd_type_t *type = &indices->type;
    int64_t depth = type->dims[type->rank - 1];
    int64_t batch = gradd_pick_count(data, 0, batch_dims);
    int64_t per_batch = gradd_pick_count(type, batch_dims, type->rank - 1);
    int64_t n = batch * per_batch, bad = n * depth;
    const int64_t *extent = data->dims + batch_dims;
#pragma omp parallel for schedule(static) reduction(min : bad) if (n >= GRADD_PARALLEL_MIN)
    for (int64_t i = 0; i < n; i++) {
        int64_t row = per_batch ? i / per_batch : 0;
        for (int64_t k = 0; k < depth; k++) {
            int64_t at = wrap(gradd_pick_index(indices, i * depth + k), extent[k]);
            if (at < 0 && i * depth + k < bad) bad = i * depth + k;
            row = row * extent[k] + at;
        }
        out_rows[i] = row;
    }
    if (bad < n * depth) return bad_index(indices, bad, extent[bad % depth]);
    return GRADD_OK;
}

gradd_status_t gradd_pick_elements(const gradd_type_t *data, int axis, const gradd_view_t *indices,
                                   int64_t *out_rows) {
    const gradd_type_t *type = &indices->type;
    int64_t stride[GRADD_MAX_RANK], at[GRADD_MAX_RANK] = {0};
    int64_t n = gradd_type_count(type), extent = data->dims[axis], bad = n;
    gradd_copy_strides(data, stride);
    int64_t base = 0; /* offset of the coordinates, the indexed axis left out */
    int last = type->rank - 1;
    for (int64_t i = 0; i < n; i++) {
        int64_t index = wrap(gradd_pick_index(indices, i), extent);
        if (index < 0 && bad == n) bad = i;
        out_rows[i] = base + index * stride[axis];
        for (int a = last; a >= 0; a--) {
            int64_t step = a == axis ? 0 : stride[a];
            base += step;
            if (++at[a] < type->dims[a]) break;
            base -= step * type->dims[a];
            at[a] = 0;
        }
    }
    if (bad < n) return bad_index(indices, bad, extent);
    return GRADD_OK;
}
