/* Rows of live positions, picked and put back, and ranges of them, on a GPU. See
 * kernels/ops/index/liverows.c and kernels/describe/live_rows.h.
 *
 * A list is checked by a kernel of its own. Later kernels read it as it is by then: an entry that
 * is out of range is skipped, and a list in another order gives other rows, but none from
 * outside. */
#include "kernels/cuda/index/row_groups.h"
#include "kernels/describe/cost.h"
#include "kernels/describe/live_rows.h"

/* ---- lists ----------------------------------------------------------------------------------- */

/* The CPU's order of checks, as `table` of a fault: lists first, then entry by entry. */
enum { FIRST_LIST = 0, OTHER_LIST = 2, ENTRIES = 4 };

static __device__ __forceinline__ void report(gpu_faults_t faults, gradd_fault_t f, int64_t when) {
    f.table = when;
    if (f.kind) gpu_fault(faults, f);
}

__global__ void GPU_BLOCK(GPU_GROUP_THREADS)
    live_check_list(const volatile int64_t *list, int64_t n, int64_t limit, int which,
                    gpu_faults_t faults) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all) {
        const gradd_fault_t f = gradd_live_check(list[i], i ? list[i - 1] : 0, i, limit);
        report(faults, f, which + (f.kind == GRADD_FAULT_LIVE_TAIL));
    }
}

static gradd_status_t check(const gradd_launch_t *r, int input, int64_t limit, int which) {
    const int64_t n = gradd_type_count(&r->in[input].type);
    GPU_LAUNCH(live_check_list, gpu_blocks(n, GPU_GROUP_THREADS), GPU_GROUP_THREADS,
               (const int64_t *)r->in[input].data, n, limit, which, GPU_FAULTS);
    return gpu_launched(r->op->name);
}

/* ---- gather and scatter ---------------------------------------------------------------------- */

enum { MOST = 6, EACH = 4 }; /* 64 threads to a row, four packs each */

struct live_picking {
    const int64_t *list;
    int64_t n; /* rows there are */
    int64_t offset, positions;
    bool fills;
    gpu_pack<uint32_t, 4> fill; /* 16 bytes of filled elements */

    /* The row of x for entry i; -1: it is filled; -2: there is none. */
    __device__ int64_t row(int64_t i) const {
        const int64_t entry = ((const volatile int64_t *)list)[i], at = gradd_live_row(entry);
        if (at >= n) return -2;
        if (entry < 0) return fills ? -1 : at;
        return offset && at % positions >= positions - offset ? -1 : at + offset;
    }
};

template <class P>
__global__ void GPU_BLOCK(GPU_GROUP_THREADS)
    live_gather_rows(live_picking pick, gpu_groups l, P *to, const P *from) {
    P fill;
    memcpy(&fill, &pick.fill, sizeof fill);
    for (int64_t u = l.first(); u < l.units; u += l.all()) {
        const int64_t i = l.pieces(u), first = l.pack(u - i * l.pieces.by);
        if (first >= l.packs) continue;
        const int64_t row = pick.row(i);
        if (row < -1) continue;
        gpu_part<EACH, P> x;
        if (row < 0)
            x.fill(fill);
        else
            x.load(from + row * l.packs + first, l.step(), l.left(first));
        x.store(to + i * l.packs + first, l.step(), l.left(first));
    }
}

/* Every row of y looks for itself in the list; the one that is not there is zero. */
template <class P>
__global__ void GPU_BLOCK(GPU_GROUP_THREADS)
    live_scatter_rows(const int64_t *list, int64_t n, gpu_groups l, P *to, const P *from) {
    for (int64_t u = l.first(); u < l.units; u += l.all()) {
        const int64_t row = l.pieces(u), first = l.pack(u - row * l.pieces.by);
        if (first >= l.packs) continue;
        const int64_t i = gradd_live_below(list, n, row);
        gpu_part<EACH, P> x;
        if (i < n && ((const volatile int64_t *)list)[i] == row)
            x.load(from + i * l.packs + first, l.step(), l.left(first));
        else
            x.fill(P{});
        x.store(to + row * l.packs + first, l.step(), l.left(first));
    }
}

/* 16 bytes of an integer of a type; only integers are filled with another number than 0. */
static gpu_pack<uint32_t, 4> filled(gradd_dtype_t dtype, int64_t value) {
    gpu_pack<uint32_t, 4> p = {};
    for (int k = 0; k < 4; k++)
        p.v[k] = (uint32_t)((uint64_t)value >> (dtype == GRADD_DT_I64 && k % 2 ? 32 : 0));
    return p;
}

static size_t row_bytes(const gradd_type_t &t, int lead) {
    return gradd_dtype_bytes(t.dtype) * (size_t)gpu_dims_count(t, lead, t.rank);
}

static gradd_status_t compute_gather(const gradd_launch_t *r) {
    const gradd_view_t &x = r->in[0], &y = r->out[0], &list = r->in[1];
    const int lead = (int)gradd_attr_int(r->attrs, "lead", 1);
    const int64_t n = gpu_dims_count(x.type, 0, lead), entries = gradd_type_count(&list.type);
    const gradd_attr_t *fill = gradd_attr_find(r->attrs, "fill");
    const size_t bytes = row_bytes(x.type, lead);
    const live_picking pick = {(const int64_t *)list.data,
                               n,
                               gradd_attr_int(r->attrs, "offset", 0),
                               gradd_attr_int(r->attrs, "positions", n),
                               fill != NULL,
                               filled(x.type.dtype, fill ? fill->i : 0)};
    GRADD_TRY(check(r, 1, n, FIRST_LIST));
    if (!entries || !bytes) return GRADD_OK;
    return gpu_by_width(gpu_units(), (uintptr_t)x.data | (uintptr_t)y.data | bytes, [&](auto t) {
        typedef typename decltype(t)::type P;
        const gpu_groups l = gpu_groups_of(entries, (int64_t)(bytes / sizeof(P)), MOST, EACH);
        GPU_LAUNCH((live_gather_rows<P>), l.blocks, GPU_GROUP_THREADS, pick, l, (P *)y.data,
                   (const P *)x.data);
        return gpu_launched(r->op->name);
    });
}

static gradd_status_t compute_scatter(const gradd_launch_t *r) {
    const gradd_view_t &x = r->in[0], &y = r->out[0], &list = r->in[1];
    const int lead = (int)gradd_attr_find(r->attrs, "dims")->n;
    const int64_t n = gpu_dims_count(y.type, 0, lead), entries = gradd_type_count(&list.type);
    const size_t bytes = row_bytes(y.type, lead);
    GRADD_TRY(check(r, 1, n, FIRST_LIST));
    if (!n || !bytes) return GRADD_OK;
    return gpu_by_width(gpu_units(), (uintptr_t)x.data | (uintptr_t)y.data | bytes, [&](auto t) {
        typedef typename decltype(t)::type P;
        const gpu_groups l = gpu_groups_of(n, (int64_t)(bytes / sizeof(P)), MOST, EACH);
        GPU_LAUNCH((live_scatter_rows<P>), l.blocks, GPU_GROUP_THREADS, (const int64_t *)list.data,
                   entries, l, (P *)y.data, (const P *)x.data);
        return gpu_launched(r->op->name);
    });
}

/* ---- places and ranges ----------------------------------------------------------------------- */

/* f(i, faults) for every i < n. */
template <class F>
__global__ void GPU_BLOCK(GPU_GROUP_THREADS) live_each(F f, int64_t n, gpu_faults_t faults) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all)
        f(i, faults);
}

template <class F> static gradd_status_t for_each(const gradd_launch_t *r, F f) {
    const int64_t n = gradd_type_count(&r->in[0].type);
    GPU_LAUNCH((live_each<F>), gpu_blocks(n, GPU_GROUP_THREADS), GPU_GROUP_THREADS, f, n,
               GPU_FAULTS);
    return gpu_launched(r->op->name);
}

struct live_place {
    const int64_t *rows, *others;
    int64_t n;
    int64_t *y;

    __device__ void operator()(int64_t i, gpu_faults_t faults) const {
        const int64_t entry = ((const volatile int64_t *)rows)[i];
        report(faults, gradd_live_position(others, n, entry, &y[i]), ENTRIES + i);
    }
};

static gradd_status_t compute_within(const gradd_launch_t *r) {
    const live_place f = {(const int64_t *)r->in[0].data, (const int64_t *)r->in[1].data,
                          gradd_type_count(&r->in[1].type), (int64_t *)r->out[0].data};
    GRADD_TRY(check(r, 1, INT64_MAX, FIRST_LIST));
    GRADD_TRY(check(r, 0, INT64_MAX, OTHER_LIST));
    return for_each(r, f);
}

struct live_range {
    const int64_t *list;
    int64_t n, positions;
    const int32_t *intervals;
    int32_t *y;

    __device__ void operator()(int64_t i, gpu_faults_t faults) const {
        report(faults, gradd_live_range(list, n, i, intervals, positions, y + 3 * i), ENTRIES + i);
    }
};

static gradd_status_t compute_ranges(const gradd_launch_t *r) {
    const live_range f = {(const int64_t *)r->in[0].data, gradd_type_count(&r->in[0].type),
                          r->in[1].type.dims[0], (const int32_t *)r->in[1].data,
                          (int32_t *)r->out[0].data};
    GRADD_TRY(check(r, 0, INT32_MAX, FIRST_LIST));
    return for_each(r, f);
}

struct live_sequence {
    const int64_t *rows, *others;
    int64_t n, positions, other_positions;
    int32_t *y;

    __device__ void operator()(int64_t i, gpu_faults_t) const {
        const int64_t row = gradd_live_row(((const volatile int64_t *)rows)[i]);
        gradd_live_sequence(others, n, row / positions, other_positions, y + 3 * i);
    }
};

static gradd_status_t compute_cross(const gradd_launch_t *r) {
    const live_sequence f = {(const int64_t *)r->in[0].data,
                             (const int64_t *)r->in[1].data,
                             gradd_type_count(&r->in[1].type),
                             gradd_attr_int(r->attrs, "positions", 1),
                             gradd_attr_int(r->attrs, "other_positions", 1),
                             (int32_t *)r->out[0].data};
    GRADD_TRY(check(r, 1, INT32_MAX, FIRST_LIST));
    GRADD_TRY(check(r, 0, INT32_MAX, OTHER_LIST));
    return for_each(r, f);
}

/* ---- segments -------------------------------------------------------------------------------- */

enum { WARPS = GPU_GROUP_THREADS / GPU_WARP };

/* Number of the highest bit; -1 of 0. */
GPU_FN int highest(uint32_t bits) {
#pragma unroll
    for (int n = 1; n < GPU_WARP; n *= 2)
        bits |= bits >> n;
    return __popc(bits) - 1;
}

/* A block per sequence, tile by tile: where the segment of each position begins, from the front,
 * and where it ends, from the back. */
__global__ void GPU_BLOCK(GPU_GROUP_THREADS)
    live_segments(gpu_index segments, const int32_t *intervals, int64_t n, int32_t *y) {
    GPU_SHARED(int, found, WARPS);
    const int64_t start = blockIdx.x * n;
    const int lane = (int)threadIdx.x % GPU_WARP, warp = (int)threadIdx.x / GPU_WARP;
    const uint32_t own = (uint32_t)1 << lane, to_own = own | (own - 1);
    int64_t carry = 0;
    for (int64_t tile = 0; tile < n; tile += GPU_GROUP_THREADS) {
        const int64_t s = tile + threadIdx.x;
        const bool other = s && s < n && segments[start + s] != segments[start + s - 1];
        const uint32_t lanes = __ballot_sync(GPU_ALL, other);
        if (!lane) found[warp] = lanes ? warp * GPU_WARP + highest(lanes) : -1;
        __syncthreads();
        int64_t from = carry;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            if (found[w] < 0) continue;
            if (w < warp) from = tile + found[w];
            carry = tile + found[w];
        }
        if (lanes & to_own) from = tile + warp * GPU_WARP + highest(lanes & to_own);
        if (s < n) {
            int32_t *out = y + 3 * (start + s);
            out[0] = (int32_t)(from > intervals[2 * s] ? from : intervals[2 * s]);
            out[2] = GRADD_ATTN_SOLID;
        }
        __syncthreads();
    }
    carry = n;
    for (int64_t tile = (n - 1) / GPU_GROUP_THREADS * GPU_GROUP_THREADS; tile >= 0;
         tile -= GPU_GROUP_THREADS) {
        const int64_t s = tile + threadIdx.x;
        const bool other = s < n - 1 && segments[start + s] != segments[start + s + 1];
        const uint32_t lanes = __ballot_sync(GPU_ALL, other), from_own = lanes & ~(own - 1);
        if (!lane) found[warp] = lanes ? warp * GPU_WARP + __ffs((int)lanes) : -1;
        __syncthreads();
        int64_t to = carry;
#pragma unroll
        for (int w = WARPS - 1; w >= 0; w--) {
            if (found[w] < 0) continue;
            if (w > warp) to = tile + found[w];
            carry = tile + found[w];
        }
        if (from_own) to = tile + warp * GPU_WARP + __ffs((int)from_own);
        if (s < n)
            y[3 * (start + s) + 1] =
                (int32_t)(to < intervals[2 * s + 1] ? to : intervals[2 * s + 1]);
        __syncthreads();
    }
}

static gradd_status_t compute_segments(const gradd_launch_t *r) {
    const int64_t n = r->in[1].type.dims[0], sequences = gradd_type_count(&r->in[0].type) / n;
    if (!sequences) return GRADD_OK;
    GPU_LAUNCH(live_segments, (unsigned)sequences, GPU_GROUP_THREADS, gpu_index_of(r->in[0]),
               (const int32_t *)r->in[1].data, n, (int32_t *)r->out[0].data);
    return gpu_launched(r->op->name);
}

GRADD_KERNELS(cuda, liverows,
              GRADD_KERNEL("GatherRows", "move", .compute = compute_gather,
                           .cost = gradd_cost_pick),
              GRADD_KERNEL("ScatterRows", "move", .compute = compute_scatter,
                           .cost = gradd_cost_move),
              GRADD_KERNEL("RowsWithin", "move", .compute = compute_within),
              GRADD_KERNEL("RowRanges", "move", .compute = compute_ranges),
              GRADD_KERNEL("CrossRanges", "move", .compute = compute_cross),
              GRADD_KERNEL("SegmentRanges", "move", .compute = compute_segments));
