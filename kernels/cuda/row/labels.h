/* Labels of losses on a GPU: which rows count, the sum of their weights, and the end of a loss.
 *
 * A label out of range is a fault, and its row does not count. Kernels read labels again rather
 * than keep a copy: one that changes in between is checked wherever it is read.
 */
#ifndef GRADD_KERNELS_CUDA_ROW_LABELS_H
#define GRADD_KERNELS_CUDA_ROW_LABELS_H

#include "kernels/cuda/row/row_teams.h"
#include "kernels/describe/cross_entropy.h"
#include "kernels/math/loss.h"

/* A tensor of any type of numbers, read as double. */
typedef struct gpu_any_s {
    const void *at; /* NULL = absent */
    int dtype;
} gpu_any_t;

static inline gpu_any_t gpu_any_of(const gradd_view_t *in, int n, int i) {
    if (i >= n || !in[i].type.dtype) return {nullptr, 0};
    return {in[i].data, in[i].type.dtype};
}

GPU_FN double gpu_number(const gpu_any_t &v, int64_t i) {
    switch (v.dtype) {
    case GRADD_DT_F32:
        return (double)((const float *)v.at)[i];
    case GRADD_DT_BF16:
        return (double)gpu_get(((const gradd_bf16_t *)v.at)[i]);
    case GRADD_DT_F16:
        return (double)gradd_f16_f32(((const gradd_f16_t *)v.at)[i]); /* fewer registers */
    case GRADD_DT_I32:
        return (double)((const int32_t *)v.at)[i];
    case GRADD_DT_I64:
        return (double)((const int64_t *)v.at)[i];
    default:
        return ((const double *)v.at)[i];
    }
}

typedef struct gpu_labels_s {
    const void *at;
    bool narrow; /* i32 */
    int64_t rows, classes;
    int64_t
        positions; /* row s answers for the label of s + 1, the last of so many for none; or 0 */
    bool ignores;
    int64_t ignore;
    gpu_any_t weights; /* of the classes; absent = all one */
    gradd_reduction_t reduction;
    gpu_faults_t faults;
} gpu_labels_t;

static inline gpu_labels_t gpu_labels_of(const gradd_launch_t *r, const gradd_view_t *labels,
                                         int64_t classes) {
    gpu_labels_t l = {};
    l.at = labels->data;
    l.narrow = labels->type.dtype == GRADD_DT_I32;
    l.rows = gradd_type_count(&labels->type);
    l.classes = classes;
    l.ignores = gradd_attr_find(r->attrs, GRADD_CE_IGNORE_INDEX) != NULL;
    l.ignore = gradd_attr_int(r->attrs, GRADD_CE_IGNORE_INDEX, 0);
    l.reduction = gradd_loss_reduction(r->attrs);
    l.faults = GPU_FAULTS;
    return l;
}

/* -1: the row does not count. `reports`: whether the calling thread is the one that says so of a
 * label that is out of range. */
GPU_FN int64_t gpu_label(const gpu_labels_t &l, int64_t row, bool reports) {
    if (l.positions && (uint32_t)row % l.positions == l.positions - 1) return -1;
    const int64_t at = l.positions ? row + 1 : row;
    const int64_t label = l.narrow ? (int64_t)((const volatile int32_t *)l.at)[at]
                                   : ((const volatile int64_t *)l.at)[at];
    if (l.ignores && label == l.ignore) return -1;
    if (label >= 0 && label < l.classes) return label;
    if (reports)
        gpu_fault(l.faults,
                  {.kind = GRADD_FAULT_LABEL, .value = label, .limit = l.classes, .position = row});
    return -1;
}

/* The same for all threads of a team, whatever happens to the label in between: they take the same
 * way to the next barrier. */
template <int TEAM> GPU_FN int64_t gpu_team_label(const gpu_labels_t &l, int64_t row) {
    const bool first = gpu_lane<TEAM>() == 0;
    int64_t label = first ? gpu_label(l, row, true) : -1;
    if constexpr (TEAM > GPU_WARP) {
        GPU_SHARED(int64_t, shared, 1);
        __syncthreads();
        if (first) *shared = label;
        __syncthreads();
        return *shared;
    }
    return __shfl_sync(GPU_ALL, label, 0);
}

GPU_FN double gpu_weight(const gpu_labels_t &l, int64_t label) {
    return l.weights.at ? gpu_number(l.weights, label) : 1;
}

/* ---- sums over all rows, by one block -------------------------------------------------------- */

enum { GPU_TALLY_THREADS = 512 };

/* The totals that row kernels use, in scratch memory. */
typedef struct gpu_tally_s {
    double total;       /* the divisor of "mean": the weights of the labels that count */
    double mean_weight; /* of the classes */
} gpu_tally_t;

/* f(i) of all i < n, added up in a fixed order; AHEAD of them are read at once. */
template <int AHEAD, class F> GPU_FN double gpu_tally_sum(int64_t n, F f) {
    double sum = 0;
#pragma unroll AHEAD
    for (int64_t i = threadIdx.x; i < n; i += GPU_TALLY_THREADS)
        sum += f(i);
    return gpu_team_sum<GPU_TALLY_THREADS>(sum);
}

GPU_FN double gpu_total(const gpu_labels_t &l) {
    return gpu_tally_sum<2>(l.rows, [&](int64_t i) {
        const int64_t label = gpu_label(l, i, false);
        return label < 0 ? 0.0 : gpu_weight(l, label);
    });
}

/* The divisor of the sum of the losses. */
GPU_FN double gpu_loss_divisor(const gpu_labels_t &l, const gpu_tally_t *tally,
                               const gpu_any_t &items) {
    if (l.reduction == GRADD_REDUCE_MEAN) return tally->total;
    return items.at ? gpu_number(items, 0) : 1;
}

template <class Tally>
__global__ void GPU_BLOCK(GPU_TALLY_THREADS)
    gpu_tally(gpu_labels_t l, bool counts, bool weighs, Tally *out) {
    const double total = counts ? gpu_total(l) : 1;
    double weights = (double)l.classes;
    if (weighs) weights = gpu_tally_sum<2>(l.classes, [&](int64_t i) { return gpu_weight(l, i); });
    if (threadIdx.x == 0) *out = {total, weights / (double)l.classes};
}

/* The loss of all rows: their sum, over the number of items if that is given, or the mean. */
template <class U>
__global__ void GPU_BLOCK(GPU_TALLY_THREADS)
    gpu_loss_end(gpu_labels_t l, const double *each, gpu_any_t items, U *out) {
    double total = 1;
    if (l.reduction == GRADD_REDUCE_MEAN)
        total = gpu_total(l);
    else if (items.at)
        total = gpu_number(items, 0);
    const double sum = gpu_tally_sum<4>(l.rows, [&](int64_t i) { return each[i]; });
    if (threadIdx.x == 0) gpu_put(out, (gpu_real<U>)(sum / total));
}

#endif
