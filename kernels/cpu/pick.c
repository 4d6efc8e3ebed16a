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

static gradd_range_t within(gradd_range_t some, int64_t n) {
    return (gradd_range_t){some.from < n ? some.from : n, some.to < n ? some.to : n};
}

static bool are_many(gradd_range_t some) {
    return some.to - some.from >= GRADD_PARALLEL_MIN;
}

/* The indices become the numbers of the first [extent, inner], those of others follow from them. */
gradd_status_t gradd_pick_axis(const gradd_type_t *data, int axis, const gradd_view_t *indices,
                               gradd_range_t some, int64_t *out_rows) {
    const int64_t outer = gradd_pick_count(data, 0, axis), extent = data->dims[axis];
    const int64_t n = gradd_type_count(&indices->type);
    gradd_range_t read = {0, some.from ? 0 : n};
    if (outer == 1) read = within(some, n);
    int64_t bad = n;
#pragma omp parallel for schedule(static) reduction(min : bad) if (are_many(read))
    for (int64_t i = read.from; i < read.to; i++) {
        out_rows[i] = wrap(gradd_pick_index(indices, i), extent);
        if (out_rows[i] < 0 && i < bad) bad = i;
    }
    if (bad < n) return bad_index(indices, bad, extent);
    if (outer < 2 || !n) return GRADD_OK;
    some = within(some, outer * n);
    const int64_t first = some.from < n ? 1 : some.from / n, last = (some.to + n - 1) / n;
#pragma omp parallel for schedule(static) if (are_many(some))
    for (int64_t o = first; o < last; o++) {
        const int64_t from = some.from > o * n ? some.from - o * n : 0;
        const int64_t to = some.to < (o + 1) * n ? some.to - o * n : n;
        for (int64_t i = from; i < to; i++)
            out_rows[o * n + i] = o * extent + out_rows[i];
    }
    return GRADD_OK;
}

gradd_status_t gradd_pick_nd(const gradd_type_t *data, int batch_dims, const gradd_view_t *indices,
                             gradd_range_t some, int64_t *out_rows) {
    const gradd_type_t *type = &indices->type;
    int64_t depth = type->dims[type->rank - 1];
    int64_t batch = gradd_pick_count(data, 0, batch_dims);
    int64_t per_batch = gradd_pick_count(type, batch_dims, type->rank - 1);
    int64_t n = batch * per_batch, bad = n * depth;
    const int64_t *extent = data->dims + batch_dims;
    some = within(some, n);
#pragma omp parallel for schedule(static) reduction(min : bad) if (are_many(some))
    for (int64_t i = some.from; i < some.to; i++) {
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

/* Of an index tensor of that type, whose indices go along the axis. */
typedef struct walk_s {
    const gradd_view_t *indices;
    int64_t stride[GRADD_MAX_RANK]; /* of the data */
    int64_t extent;
    int axis;
} walk_t;

/* Returns the first bad position, or `none`. */
static int64_t walk(const walk_t *w, gradd_range_t some, int64_t none, int64_t *out_rows) {
    const gradd_type_t *type = &w->indices->type;
    const int last = type->rank - 1;
    int64_t at[GRADD_MAX_RANK], base = 0, bad = none;
    int64_t rest = some.from;
    for (int a = last; a >= 0; rest /= type->dims[a], a--) {
        at[a] = rest % type->dims[a];
        if (a != w->axis) base += at[a] * w->stride[a];
    }
    /* base: offset of the coordinates, the indexed axis left out */
    for (int64_t i = some.from; i < some.to; i++) {
        int64_t index = wrap(gradd_pick_index(w->indices, i), w->extent);
        if (index < 0 && bad == none) bad = i;
        out_rows[i] = base + index * w->stride[w->axis];
        for (int a = last; a >= 0; a--) {
            int64_t step = a == w->axis ? 0 : w->stride[a];
            base += step;
            if (++at[a] < type->dims[a]) break;
            base -= step * type->dims[a];
            at[a] = 0;
        }
    }
    return bad;
}

gradd_status_t gradd_pick_elements(const gradd_type_t *data, int axis, const gradd_view_t *indices,
                                   gradd_range_t some, int64_t *out_rows) {
    enum { PIECE = 8192 };
    const int64_t n = gradd_type_count(&indices->type);
    walk_t w = {.indices = indices, .extent = data->dims[axis], .axis = axis};
    int64_t bad = n;
    gradd_copy_strides(data, w.stride);
    some = within(some, n);
#pragma omp parallel for schedule(static) reduction(min : bad) if (are_many(some))
    for (int64_t from = some.from; from < some.to; from += PIECE) {
        const gradd_range_t piece = {from, some.to - from < PIECE ? some.to : from + PIECE};
        const int64_t found = walk(&w, piece, n, out_rows);
        if (found < bad) bad = found;
    }
    if (bad < n) return bad_index(indices, bad, w.extent);
    return GRADD_OK;
}
