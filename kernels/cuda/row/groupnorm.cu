/* GroupNormalization, InstanceNormalization and their gradient on a GPU. See
 * kernels/ops/norm/groupnorm.c and row_teams.h.
 *
 * x is [B, C, S]; a group, C / G channels, is contiguous, and a team normalises it like a row. In
 * the gradient a team sums each channel first, dy and dy * h, [B, C] in scratch memory; the group's
 * means and the gradients of scale and bias come from these sums.
 */
#include "kernels/cuda/row/row_teams.h"

/* Bytes that a thread keeps of a group. */
enum { KEPT = 128 };

template <class T> struct group_t {
    const T *x, *dy, *scale, *bias;
    T *y;              /* y or dx */
    T *mean, *inv;     /* [B, G] */
    T *sum_h, *sum_dy; /* [B, C]: of dy * h and of dy */
    int64_t batch, channels, groups, spatial;
    int64_t each;   /* channels of a group */
    bool per_group; /* scale has one entry per group */
    double epsilon;
};

/* Follows the channel of a thread's packs without a division for each. */
template <int TEAM> struct channel_t {
    int64_t size, channel, rest, step, step_rest;

    /* packs: of a channel; what is longer than a team's stride is divided alike */
    __device__ __forceinline__ channel_t(int64_t packs) : size(packs) {
        const unsigned lane = (unsigned)gpu_lane<TEAM>();
        const unsigned by = packs > TEAM ? TEAM + 1u : (unsigned)packs;
        channel = lane / by;
        rest = lane % by;
        step = TEAM / by;
        step_rest = TEAM % by;
    }
    __device__ __forceinline__ void next() {
        channel += step;
        rest += step_rest;
        if (rest >= size) rest -= size, channel++;
    }
};

/* Where the scale of channel c of a row of groups lies. */
template <class T> GPU_FN int64_t scale_at(const group_t<T> &p, int64_t row, int64_t c) {
    const int64_t group = row % p.groups;
    return p.per_group ? group : group * p.each + c;
}

/* ---- forward --------------------------------------------------------------------------------- */

template <class S, class T> __global__ void GPU_BLOCK(S::THREADS) group_rows(group_t<T> p) {
    const int64_t n = p.each * p.spatial, packs = n / S::W, rows = p.batch * p.groups;
    for (int64_t r = gpu_team<S::TEAM>(); r < rows; r += gpu_teams<S::TEAM>()) {
        gpu_row<T, S::W, S::TEAM, S::KEEP> row;
        row.open(p.x + r * n, packs);
        double total = 0;
        gpu_each_pack<S::TEAM, S::KEEP>(packs, [&](int j, int64_t i) {
            const gpu_pack<T, S::W> x = row.get(j, i);
            T sum = 0;
#pragma unroll
            for (int k = 0; k < S::W; k++)
                sum += x.v[k];
            total += (double)sum;
        });
        const T mean = (T)gpu_team_sum<S::TEAM>(total) / (T)n;
        total = 0;
        gpu_each_pack<S::TEAM, S::KEEP>(packs, [&](int j, int64_t i) {
            const gpu_pack<T, S::W> x = row.get(j, i);
            T sum = 0;
#pragma unroll
            for (int k = 0; k < S::W; k++)
                sum += (x.v[k] - mean) * (x.v[k] - mean);
            total += (double)sum;
        });
        const T square = (T)gpu_team_sum<S::TEAM>(total) / (T)n;
        const T inv = 1 / vsqrt(square + (T)p.epsilon);
        const int64_t first = scale_at(p, r, 0);
        gpu_pack<T, S::W> *y = (gpu_pack<T, S::W> *)(p.y + r * n);
        channel_t<S::TEAM> at(p.spatial / S::W);
        gpu_each_pack<S::TEAM, S::KEEP>(packs, [&](int j, int64_t i) {
            const int64_t c = first + (p.per_group ? 0 : at.channel);
            const T factor = inv * p.scale[c], shift = p.bias[c];
            gpu_pack<T, S::W> v = row.get(j, i);
#pragma unroll
            for (int k = 0; k < S::W; k++)
                v.v[k] = (v.v[k] - mean) * factor + shift;
            y[i] = v;
            at.next();
        });
        if (gpu_lane<S::TEAM>() == 0) {
            if (p.mean) p.mean[r] = mean;
            if (p.inv) p.inv[r] = inv;
        }
    }
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Rows are channels here. */
template <int TEAM, int W, class T>
__global__ void GPU_BLOCK(GPU_ROW_THREADS) channel_sums(group_t<T> p) {
    const int64_t packs = p.spatial / W, rows = p.batch * p.channels;
    for (int64_t r = gpu_team<TEAM>(); r < rows; r += gpu_teams<TEAM>()) {
        const gpu_pack<T, W> *x = (const gpu_pack<T, W> *)p.x + r * packs;
        const gpu_pack<T, W> *dy = (const gpu_pack<T, W> *)p.dy + r * packs;
        const T mean = p.mean[r / p.each], inv = p.inv[r / p.each];
        double total = 0, total_h = 0;
        for (int64_t i = gpu_lane<TEAM>(); i < packs; i += TEAM) {
            const gpu_pack<T, W> a = x[i], d = dy[i];
            T sum = 0, sum_h = 0;
#pragma unroll
            for (int k = 0; k < W; k++) {
                sum += d.v[k];
                sum_h += d.v[k] * (a.v[k] - mean);
            }
            total += (double)sum;
            total_h += (double)sum_h;
        }
        total = gpu_team_sum<TEAM>(total);
        total_h = gpu_team_sum<TEAM>(total_h);
        if (gpu_lane<TEAM>() == 0) {
            p.sum_dy[r] = (T)total;
            p.sum_h[r] = inv * (T)total_h;
        }
    }
}

template <int TEAM, int W, class T>
__global__ void GPU_BLOCK(GPU_ROW_THREADS) group_rows_grad(group_t<T> p) {
    const int64_t n = p.each * p.spatial, packs = n / W, rows = p.batch * p.groups;
    for (int64_t r = gpu_team<TEAM>(); r < rows; r += gpu_teams<TEAM>()) {
        const int64_t first = scale_at(p, r, 0);
        double total_w = 0, total_h = 0;
        for (int64_t c = gpu_lane<TEAM>(); c < p.each; c += TEAM) {
            const T factor = p.scale[first + (p.per_group ? 0 : c)];
            total_w += (double)(factor * p.sum_dy[r * p.each + c]);
            total_h += (double)(factor * p.sum_h[r * p.each + c]);
        }
        const T mean_w = (T)gpu_team_sum<TEAM>(total_w) / (T)n;
        const T mean_h = (T)gpu_team_sum<TEAM>(total_h) / (T)n;
        const T mean = p.mean[r], inv = p.inv[r];
        const gpu_pack<T, W> *x = (const gpu_pack<T, W> *)p.x + r * packs;
        const gpu_pack<T, W> *dy = (const gpu_pack<T, W> *)p.dy + r * packs;
        gpu_pack<T, W> *dx = (gpu_pack<T, W> *)p.y + r * packs;
        channel_t<TEAM> at(p.spatial / W);
        for (int64_t i = gpu_lane<TEAM>(); i < packs; i += TEAM) {
            const T factor = p.scale[first + (p.per_group ? 0 : at.channel)];
            const gpu_pack<T, W> a = x[i], d = dy[i];
            gpu_pack<T, W> v;
#pragma unroll
            for (int k = 0; k < W; k++)
                v.v[k] = (d.v[k] * factor - mean_w - (a.v[k] - mean) * inv * mean_h) * inv;
            dx[i] = v;
            at.next();
        }
    }
}

/* The gradient of one entry of scale or bias: the sums of its channels in all samples. */
template <class T>
__global__ void GPU_BLOCK(GPU_ROW_THREADS)
    add_channels(group_t<T> p, int64_t entries, const T *sums, T *out) {
    const int64_t each = p.channels / entries, all = (int64_t)gridDim.x * GPU_WARP;
    for (int64_t at = (int64_t)blockIdx.x * GPU_WARP; at < entries; at += all) {
        const int64_t e = at + threadIdx.x % GPU_WARP;
        double total = 0;
        for (int64_t b = gpu_slice(); e < entries && b < p.batch; b += GPU_SLICES)
            for (int64_t c = 0; c < each; c++)
                total += (double)sums[b * p.channels + e * each + c];
        total = gpu_slices_join(total, [](double a, double b) { return a + b; });
        if (gpu_slice() == 0 && e < entries) out[e] = (T)total;
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

static void *output(const gradd_launch_t *r, int j) {
    return j < r->n_out ? r->out[j].data : nullptr;
}

/* x: which operand; scale stands behind it. */
template <class T> group_t<T> read_group(const gradd_launch_t *r, int x) {
    const gradd_type_t *type = &r->in[x].type;
    const bool instance = !strcmp(r->op->name, "InstanceNormalization");
    group_t<T> p = {};
    p.x = (const T *)r->in[x].data;
    p.scale = (const T *)r->in[x + 1].data;
    p.y = (T *)output(r, 0);
    p.batch = type->dims[0];
    p.channels = type->dims[1];
    p.groups = instance ? p.channels : gradd_attr_int(r->attrs, "num_groups", 1);
    p.each = p.groups ? p.channels / p.groups : 0;
    p.spatial = 1;
    for (int i = 2; i < type->rank; i++)
        p.spatial *= type->dims[i];
    p.per_group = r->in[x + 1].type.dims[0] != p.channels;
    p.epsilon = gradd_attr_float(r->attrs, "epsilon", 1e-5);
    return p;
}

typedef gpu_types<float, double> types_t;

static gradd_status_t compute_forward(const gradd_launch_t *r) {
    if (!gradd_type_count(&r->in[0].type)) return GRADD_OK;
    return gpu_switch(types_t(), r->in[0].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        group_t<T> p = read_group<T>(r, 0);
        p.bias = (const T *)r->in[2].data;
        p.mean = (T *)output(r, 1);
        p.inv = (T *)output(r, 2);
        const bool wide =
            p.spatial % gpu_width<T> == 0 && gpu_aligned(p.x, 16) && gpu_aligned(p.y, 16);
        return gpu_by_row<T, KEPT>(p.each * p.spatial, wide, [&](auto shape) {
            typedef decltype(shape) S;
            GPU_LAUNCH((group_rows<S, T>), S::blocks(p.batch * p.groups), S::THREADS, p);
            return gpu_launched(r->op->name);
        });
    });
}

template <int W, class T> void launch_grad(const group_t<T> &p) {
    const int64_t rows = p.batch * p.groups, n = p.each * p.spatial, brief = 1024;
    const unsigned warps = gpu_blocks(p.batch * p.channels, GPU_SLICES);
    if (p.spatial <= brief)
        GPU_LAUNCH((channel_sums<GPU_WARP, W, T>), warps, GPU_ROW_THREADS, p);
    else
        GPU_LAUNCH((channel_sums<GPU_ROW_THREADS, W, T>), gpu_blocks(p.batch * p.channels, 1),
                   GPU_ROW_THREADS, p);
    if (!p.y) return;
    if (n <= brief)
        GPU_LAUNCH((group_rows_grad<GPU_WARP, W, T>), gpu_blocks(rows, GPU_SLICES), GPU_ROW_THREADS,
                   p);
    else
        GPU_LAUNCH((group_rows_grad<GPU_ROW_THREADS, W, T>), gpu_blocks(rows, 1), GPU_ROW_THREADS,
                   p);
}

/* Outputs: dx, dscale, dbias; any of them may be unwanted. */
static gradd_status_t compute_backward(const gradd_launch_t *r) {
    return gpu_switch(types_t(), r->in[1].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        group_t<T> p = read_group<T>(r, 1);
        const int64_t entries = r->in[2].type.dims[0];
        p.dy = (const T *)r->in[0].data;
        p.mean = (T *)r->in[3].data;
        p.inv = (T *)r->in[4].data;
        p.sum_h = (T *)r->workspace;
        p.sum_dy = p.sum_h + p.batch * p.channels;
        const bool wide = p.spatial % gpu_width<T> == 0 && gpu_aligned(p.x, 16) &&
                          gpu_aligned(p.dy, 16) && gpu_aligned(p.y, 16);
        if (!gradd_type_count(&r->in[1].type))
            p.batch = 0;
        else if (wide)
            launch_grad<gpu_width<T>>(p);
        else
            launch_grad<1>(p);
        for (int j = 1; j < 3 && entries; j++)
            if (output(r, j))
                GPU_LAUNCH((add_channels<T>), gpu_column_blocks(entries), GPU_ROW_THREADS, p,
                           entries, j == 1 ? p.sum_h : p.sum_dy, (T *)output(r, j));
        return gpu_launched(r->op->name);
    });
}

static size_t workspace_backward(const gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[1].type;
    return 2 * (size_t)(x->dims[0] * x->dims[1]) * gradd_dtype_bytes(x->dtype);
}

#define WIDE (GRADD_DTB(F32) | GRADD_DTB(F64))

GRADD_KERNELS(cuda, groupnorm,
              GRADD_KERNEL("GroupNormalization", "rows", .types = {WIDE},
                           .compute = compute_forward),
              GRADD_KERNEL("GroupNormGrad", "rows", .types = {WIDE}, .compute = compute_backward,
                           .workspace = workspace_backward),
              GRADD_KERNEL("InstanceNormalization", "rows", .types = {WIDE},
                           .compute = compute_forward));
