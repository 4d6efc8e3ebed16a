/* Index tensors as row numbers: ONNX's three ways to index, computed where a row is needed.
 *
 * gpu_pick is what kernels/cpu/pick.h is on the CPU, without a list in between: pick(i, faults)
 * reads the index of the i-th row, checks it, and gives the number of the row; -1 where it is out
 * of range, which is noted. An index is read once per call, for it may lie in the memory of a
 * client, and the value that is used must be the one that was checked.
 *
 * gpu_div divides by a number that is known at launch with a multiplication.
 */
#ifndef GRADD_KERNELS_CUDA_INDEX_PICK_H
#define GRADD_KERNELS_CUDA_INDEX_PICK_H

#include "kernels/cuda/gpu.h"
#include "kernels/rules/infer.h"

/* ---- division -------------------------------------------------------------------------------- */

/* Of numbers from 0 to `most`, as given to gpu_div_by. Below 2^31, with l = ceil(log2 by) and
 * factor = floor(2^32 (2^l - by) / by) + 1, the quotient is (a * factor / 2^32 + a) / 2^l. Above,
 * as far as a memory reaches, the product with 1 / by is off by at most one. */
struct gpu_div {
    int64_t by;
    double inverse;
    uint32_t factor;
    uint8_t shift;
    bool narrow;

    __device__ int64_t operator()(int64_t a) const {
        if (narrow) {
            const uint32_t x = (uint32_t)a;
            return ((uint32_t)((uint64_t)x * factor >> 32) + x) >> shift;
        }
        const int64_t q = (int64_t)((double)a * inverse), rest = a - q * by;
        return q + (rest >= by) - (rest < 0);
    }
};

static inline gpu_div gpu_div_by(int64_t by, int64_t most) {
    if (by < 1) by = 1;
    gpu_div d = {by, 1 / (double)by, 1, 0, most < INT32_MAX && by < INT32_MAX};
    if (!d.narrow) return d;
    while (((int64_t)1 << d.shift) < by)
        d.shift++;
    const uint64_t over = ((uint64_t)1 << d.shift) - (uint64_t)by;
    d.factor = (uint32_t)((over << 32) / (uint64_t)by + 1);
    return d;
}

/* ---- index tensors --------------------------------------------------------------------------- */

struct gpu_index {
    const void *at;
    bool narrow; /* i32 */

    __device__ int64_t operator[](int64_t i) const {
        return narrow ? ((const volatile int32_t *)at)[i] : ((const volatile int64_t *)at)[i];
    }
};

static inline gpu_index gpu_index_of(const gradd_view_t &v) {
    return {v.data, v.type.dtype == GRADD_DT_I32};
}

/* Product of dims[first .. end). */
static inline int64_t gpu_dims_count(const gradd_type_t &type, int first, int end) {
    int64_t n = 1;
    for (int i = first; i < end; i++)
        n *= type.dims[i];
    return n;
}

/* A place in an operand that is broadcast, or cut out of a larger one: dimensions that it walks
 * without a gap are one, the innermost first. */
struct gpu_places {
    int rank;
    gpu_div dims[GRADD_MAX_RANK];
    int64_t step[GRADD_MAX_RANK];

    __device__ int64_t operator()(int64_t i) const {
        int64_t at = 0;
        for (int k = 0; k < rank; k++) {
            const int64_t rest = k + 1 < rank ? dims[k](i) : 0;
            at += (i - rest * dims[k].by) * step[k];
            i = rest;
        }
        return at;
    }
};

/* `steps` of elements along the first `rank` dimensions of the numbered type. */
static inline gpu_places gpu_places_of(const gradd_type_t &type, int rank, const int64_t *steps) {
    gpu_places p = {};
    const int64_t n = gpu_dims_count(type, 0, rank);
    for (int i = rank - 1; i >= 0; i--) {
        const int last = p.rank - 1;
        if (type.dims[i] == 1) continue;
        if (p.rank && steps[i] == p.step[last] * p.dims[last].by) {
            p.dims[last] = gpu_div_by(p.dims[last].by * type.dims[i], n);
            continue;
        }
        p.dims[p.rank] = gpu_div_by(type.dims[i], n);
        p.step[p.rank++] = steps[i];
    }
    return p;
}

/* ---- rows ------------------------------------------------------------------------------------ */

enum gpu_pick_way { GPU_PICK_AXIS, GPU_PICK_ND, GPU_PICK_ELEMENTS };

struct gpu_pick {
    gpu_pick_way way;
    gpu_index index;
    int64_t n, n_rows, size; /* rows that are picked, rows there are, elements of one */
    int depth;               /* indices of a row; 1 but for ND */
    int64_t extent[GRADD_MAX_RANK];
    gpu_div group;     /* AXIS: indices; ND: rows of a batch */
    int64_t step;      /* ELEMENTS: along the axis; else 1 */
    gpu_places places; /* ELEMENTS: without the axis */

    __device__ int64_t operator()(int64_t i, gpu_faults_t faults) const {
        int64_t row = way == GPU_PICK_ELEMENTS ? places(i) : group(i);
        const int64_t first = way == GPU_PICK_ND     ? i * depth
                              : way == GPU_PICK_AXIS ? i - row * group.by
                                                     : i;
        for (int k = 0; k < depth; k++) {
            const int64_t given = index[first + k], at = given < 0 ? given + extent[k] : given;
            if (at < 0 || at >= extent[k]) {
                gpu_fault(faults, {.kind = GRADD_FAULT_INDEX,
                                   .value = given,
                                   .limit = extent[k],
                                   .position = first + k});
                return -1;
            }
            row = (way == GPU_PICK_ELEMENTS ? row : row * extent[k]) + at * step;
        }
        return row;
    }
};

static inline gpu_pick gpu_pick_axis(const gradd_type_t &data, int axis,
                                     const gradd_view_t &indices) {
    const int64_t n = gradd_type_count(&indices.type), outer = gpu_dims_count(data, 0, axis);
    gpu_pick p = {};
    p.way = GPU_PICK_AXIS;
    p.depth = 1;
    p.step = 1;
    p.index = gpu_index_of(indices);
    p.n = outer * n;
    p.n_rows = gpu_dims_count(data, 0, axis + 1);
    p.size = gpu_dims_count(data, axis + 1, data.rank);
    p.extent[0] = data.dims[axis];
    p.group = gpu_div_by(n, p.n);
    return p;
}

static inline gpu_pick gpu_pick_nd(const gradd_type_t &data, int batch_dims,
                                   const gradd_view_t &indices) {
    const gradd_type_t &type = indices.type;
    gpu_pick p = {};
    p.way = GPU_PICK_ND;
    p.step = 1;
    p.index = gpu_index_of(indices);
    p.depth = (int)type.dims[type.rank - 1];
    p.n = gpu_dims_count(type, 0, type.rank - 1);
    p.n_rows = gpu_dims_count(data, 0, batch_dims + p.depth);
    p.size = gpu_dims_count(data, batch_dims + p.depth, data.rank);
    for (int k = 0; k < p.depth; k++)
        p.extent[k] = data.dims[batch_dims + k];
    p.group = gpu_div_by(gpu_dims_count(type, batch_dims, type.rank - 1), p.n);
    return p;
}

static inline gpu_pick gpu_pick_elements(const gradd_type_t &data, int axis,
                                         const gradd_view_t &indices) {
    int64_t steps[GRADD_MAX_RANK], step = 1;
    gpu_pick p = {};
    for (int i = data.rank - 1; i >= 0; i--) {
        steps[i] = i == axis ? 0 : step;
        if (i == axis) p.step = step;
        step *= data.dims[i];
    }
    p.way = GPU_PICK_ELEMENTS;
    p.depth = 1;
    p.index = gpu_index_of(indices);
    p.n = gradd_type_count(&indices.type);
    p.n_rows = step;
    p.size = 1;
    p.extent[0] = data.dims[axis];
    p.places = gpu_places_of(indices.type, indices.type.rank, steps);
    return p;
}

#endif
