/* TopK, TorchTopK and TorchSort on a GPU: the same elements in the same order as on the CPU. See
 * kernels/ops/index/topk.c.
 *
 * Keys and places together are a total order, so any way of sorting gives the same. A slice takes a
 * warp or a block, which sorts all of it in shared memory, or keeps the best there while it reads
 * on; where more are wanted than fit, tiles are sorted and then merged in scratch memory.
 *
 * That is the order of TopK, and of the other two where the first k + 1 keys differ. Where they do
 * not, the swaps of PyTorch's algorithms decide (kernels/math/select.h): such a slice is marked,
 * and a thread, or of long ones a block, makes the same swaps.
 */
#include "kernels/cuda/copy.h"
#include "kernels/cuda/row/order.h"
#include "kernels/describe/slice_order.h"

enum { THREADS = GPU_ORDER_THREADS, SHARED_BYTES = 16 << 10 };

/* ---- entries --------------------------------------------------------------------------------- */

/* A key of 32 bits and its place, as one number. */
typedef uint64_t small_t;
GPU_FN bool is_less(small_t a, small_t b) {
    return a < b;
}
GPU_FN bool same_key(small_t a, small_t b) {
    return a >> 32 == b >> 32;
}
GPU_FN int64_t place(small_t a) {
    return (int64_t)(uint32_t)a;
}
GPU_FN void make_entry(small_t *out, int64_t key, int64_t at) {
    *out = (uint64_t)((uint32_t)key ^ 0x80000000u) << 32 | (uint32_t)at;
}
GPU_FN void make_end(small_t *out) {
    *out = UINT64_MAX;
}

typedef gradd_entry_t large_t;
GPU_FN bool is_less(large_t a, large_t b) {
    return a.key < b.key || (a.key == b.key && a.at < b.at);
}
GPU_FN bool same_key(large_t a, large_t b) {
    return a.key == b.key;
}
GPU_FN int64_t place(large_t a) {
    return a.at;
}
GPU_FN void make_entry(large_t *out, int64_t key, int64_t at) {
    *out = {key, at};
}
GPU_FN void make_end(large_t *out) {
    *out = {INT64_MAX, INT64_MAX};
}

template <class T> struct entry_of {
    typedef small_t type;
};
template <> struct entry_of<double> {
    typedef large_t type;
};
template <> struct entry_of<int64_t> {
    typedef large_t type;
};

GPU_FN int64_t key_of(float x) {
    return gradd_sort_key_f32(x);
}
GPU_FN int64_t key_of(double x) {
    return gradd_sort_key_f64(x);
}
GPU_FN int64_t key_of(int32_t x) {
    return x;
}
GPU_FN int64_t key_of(int64_t x) {
    return x;
}

/* ---- what a launch works on ------------------------------------------------------------------ */

typedef struct topk_job_s {
    gradd_slice_t s;
    int64_t slices;
    int64_t want;        /* entries to be found: k, and the next one where ties count */
    bool ties;           /* count */
    int64_t room, slots; /* entries of a slice's own, and how many have them at once */
    bool merges, together;
    size_t marks, scratch; /* bytes */
} topk_job_t;

/* Where a slice begins. */
template <class T> struct spot_t {
    const T *from;
    int64_t to;
};

/* Of `job`, what kernels need. */
template <class T> struct slices_t {
    int64_t n, k, want, stride, flip, slices;
    double per_stride; /* a division would be a call */
    bool ties;
    const T *x;
    T *y;
    int64_t *index;
    uint32_t *mark;

    __device__ spot_t<T> slice(int64_t number) const {
        int64_t outer = (int64_t)((double)number * per_stride);
        outer -= outer * stride > number; /* the product may be off by one either way */
        outer += (outer + 1) * stride <= number;
        const int64_t inner = number - outer * stride;
        return {x + outer * n * stride + inner, outer * k * stride + inner};
    }
    template <class E> __device__ E entry(const spot_t<T> &at, int64_t i) const {
        E e;
        make_entry(&e, key_of(gpu_get(at.from[i * stride])) ^ flip, i);
        return e;
    }
    /* Element i of the slice is its result j. */
    __device__ void put(const spot_t<T> &at, int64_t j, int64_t i) const {
        const int64_t to = at.to + j * stride;
        if (y) y[to] = at.from[i * stride];
        if (index) index[to] = i;
    }
};

/* ---- sorting in shared memory ---------------------------------------------------------------- */

template <int ROW> GPU_FN void row_sync() {
    if constexpr (ROW == GPU_WARP)
        __syncwarp();
    else
        __syncthreads();
}

GPU_FN int power_of_two(int n) {
    int p = 2;
    while (p < n)
        p *= 2;
    return p;
}

/* Sorts the n entries that `row` holds, behind which is room up to a power of two. Batcher's
 * bitonic network, 1968. */
template <int ROW, class E> GPU_FN void sort_row(E *row, int n, int me) {
    const int size = power_of_two(n);
    for (int i = n + me; i < size; i += ROW)
        make_end(&row[i]);
    row_sync<ROW>();
    for (int run = 2; run <= size; run *= 2)
        for (int apart = run / 2; apart; apart /= 2) {
            for (int t = me; t < size / 2; t += ROW) {
                const int low = 2 * t - (t & (apart - 1)), high = low + apart;
                const E a = row[low], b = row[high];
                if (is_less(b, a) == ((low & run) == 0)) row[low] = b, row[high] = a;
            }
            row_sync<ROW>();
        }
}

template <int ROW, class E>
constexpr int capacity = (int)SHARED_BYTES / (int)sizeof(E) / ((int)THREADS / ROW);

/* Entries of a slice longer than the row, of which at most half are wanted: those that beat the
 * last one of the best known are gathered until the row is full, and it is sorted. All of the best
 * are in the row afterwards. */
template <int ROW, class E, class T>
GPU_FN int gather_best(const slices_t<T> &x, const spot_t<T> &from, E *row, int *count, int me) {
    constexpr int CAP = capacity<ROW, E>, CHUNK = CAP / 2, ITEMS = CHUNK / ROW;
    const int want = (int)x.want;
    for (int i = me; i < CAP; i += ROW)
        row[i] = x.template entry<E>(from, i);
    sort_row<ROW>(row, CAP, me);
    E last = row[want - 1];
    if (!me) *count = want;
    for (int64_t chunk = CAP; chunk < x.n; chunk += CHUNK) {
        E item[ITEMS];
#pragma unroll
        for (int j = 0; j < ITEMS; j++) {
            const int64_t i = chunk + j * ROW + me;
            if (i < x.n)
                item[j] = x.template entry<E>(from, i);
            else
                make_end(&item[j]);
        }
        row_sync<ROW>(); /* what was gathered, and its count, are there */
        const int have = *count;
        if (have + CHUNK > CAP) {
            sort_row<ROW>(row, have, me);
            last = row[want - 1];
        }
        row_sync<ROW>(); /* all have read the count */
        if (have + CHUNK > CAP && !me) *count = want;
        row_sync<ROW>();
#pragma unroll
        for (int j = 0; j < ITEMS; j++)
            if (is_less(item[j], last)) row[atomicAdd(count, 1)] = item[j];
    }
    row_sync<ROW>();
    return *count;
}

template <int ROW, class E, class T> __global__ void GPU_BLOCK(THREADS) sort_slices(slices_t<T> x) {
    constexpr int CAP = capacity<ROW, E>, ROWS = THREADS / ROW;
    GPU_SHARED(E, all, CAP * ROWS);
    GPU_SHARED(int, counts, ROWS);
    const int me = (int)threadIdx.x % ROW, mine = (int)threadIdx.x / ROW;
    E *row = all + mine * CAP;
    for (int64_t number = (int64_t)blockIdx.x * ROWS + mine; number < x.slices;
         number += (int64_t)gridDim.x * ROWS) {
        const spot_t<T> from = x.slice(number);
        int have = (int)x.n;
        if (ROW == GPU_WARP || x.n <= CAP)
            for (int i = me; i < have; i += ROW)
                row[i] = x.template entry<E>(from, i);
        else
            have = gather_best<ROW>(x, from, row, &counts[mine], me);
        sort_row<ROW>(row, have, me);
        for (int i = me; i < (int)x.want; i += ROW) {
            if (i < x.k) x.put(from, i, place(row[i]));
            if (x.ties && i && same_key(row[i], row[i - 1])) x.mark[number] = 1;
        }
        row_sync<ROW>(); /* before the next slice takes the room */
    }
}

/* ---- sorting in scratch memory --------------------------------------------------------------- */

template <class E, class T>
__global__ void GPU_BLOCK(THREADS) sort_tiles(slices_t<T> x, int64_t tiles, E *out) {
    constexpr int CAP = capacity<THREADS, E>;
    GPU_SHARED(E, row, CAP);
    const int me = (int)threadIdx.x;
    for (int64_t k = blockIdx.x; k < tiles * x.slices; k += gridDim.x) {
        const int64_t number = k / tiles, first = (k - number * tiles) * CAP;
        const spot_t<T> from = x.slice(number);
        const int have = x.n - first < CAP ? (int)(x.n - first) : CAP;
        for (int i = me; i < have; i += THREADS)
            row[i] = x.template entry<E>(from, first + i);
        sort_row<THREADS>(row, have, me);
        for (int i = me; i < have; i += THREADS)
            out[number * x.n + first + i] = row[i];
        __syncthreads();
    }
}

/* Pairs of sorted runs of `run` entries become one: each entry goes as far behind the start as
 * there are entries in front of it, in its own run and in the other. */
template <class E>
__global__ void GPU_BLOCK(THREADS)
    merge_runs(int64_t n, int64_t all, int64_t run, E *to, const E *from) {
    const int64_t threads = (int64_t)gridDim.x * blockDim.x;
    for (int64_t e = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; e < all; e += threads) {
        const int64_t base = e / n * n, i = e - base, pair = i / (2 * run) * (2 * run);
        const bool right = i - pair >= run;
        const E mine = from[e];
        const int64_t start = right ? pair : pair + run, end = start + run < n ? start + run : n;
        int64_t low = start, high = end > start ? end : start; /* of the other run */
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (is_less(from[base + middle], mine))
                low = middle + 1;
            else
                high = middle;
        }
        to[base + (right ? i - run : i) + (low - start)] = mine;
    }
}

template <class E, class T>
__global__ void GPU_BLOCK(THREADS) put_sorted(slices_t<T> x, const E *sorted) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t e = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; e < x.slices * x.want;
         e += all) {
        const int64_t number = e / x.want, i = e - number * x.want;
        const E *row = sorted + number * x.n;
        if (i < x.k) x.put(x.slice(number), i, place(row[i]));
        if (x.ties && i && same_key(row[i], row[i - 1])) x.mark[number] = 1;
    }
}

/* ---- one thread, with the CPU's steps -------------------------------------------------------- */

template <class T>
GPU_FN void select_partly(const slices_t<T> &x, const spot_t<T> &from, gradd_entry_t *heap) {
    gradd_heap_make(heap, x.k);
    for (int64_t i = x.k; i < x.n; i++) {
        const gradd_entry_t entry = x.template entry<gradd_entry_t>(from, i);
        if (entry.key < heap[0].key) gradd_heap_replace(heap, x.k, entry);
    }
    gradd_heap_sort(heap, x.k);
}

template <gradd_order_t HOW, class T>
GPU_FN void order_as_cpu(const slices_t<T> &x, const spot_t<T> &from, gradd_entry_t *out) {
    constexpr bool partly = HOW == GRADD_ORDER_PARTIAL, all = HOW == GRADD_ORDER_SORT;
    for (int64_t i = 0; i < (partly ? x.k : x.n); i++)
        out[i] = x.template entry<gradd_entry_t>(from, i);
    if constexpr (partly) select_partly(x, from, out);
    if constexpr (!partly && !all) gradd_select_nth(out, x.n, x.k - 1);
    if constexpr (all || HOW == GRADD_ORDER_SELECT_SORT)
        gradd_sort_entries(out, all ? x.n : x.k - 1); /* the last is in place */
}

/* Those that are marked, or all. */
template <gradd_order_t HOW, class T>
__global__ void GPU_BLOCK(GPU_WARP)
    order_slices(slices_t<T> x, int64_t slots, int64_t room, gradd_entry_t *scratch) {
    const int64_t slot = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (slot >= slots) return;
    gradd_entry_t *out = scratch + slot * room;
    for (int64_t number = slot; number < x.slices; number += slots) {
        if (x.ties && !x.mark[number]) continue;
        const spot_t<T> from = x.slice(number);
        order_as_cpu<HOW>(x, from, out);
        for (int64_t j = 0; j < x.k; j++)
            x.put(from, j, out[j].at);
    }
}

/* ---- a block, with the CPU's steps ----------------------------------------------------------- */

/* Entries that may go into a heap, in order; then one thread offers them. */
template <class T>
GPU_FN void select_partly_together(const slices_t<T> &x, const spot_t<T> &from,
                                   gradd_entry_t *heap) {
    constexpr int WARPS = THREADS / GPU_WARP, EACH = 4;
    GPU_SHARED(gradd_entry_t, offered, THREADS * EACH);
    GPU_SHARED(int, counts, WARPS *EACH);
    const int lane = (int)threadIdx.x % GPU_WARP, warp = (int)threadIdx.x / GPU_WARP;
    for (int64_t i = threadIdx.x; i < x.k; i += THREADS)
        heap[i] = x.template entry<gradd_entry_t>(from, i);
    __syncthreads();
    if (!threadIdx.x) gradd_heap_make(heap, x.k);
    for (int64_t chunk = x.k; chunk < x.n; chunk += THREADS * EACH) {
        gradd_entry_t entry[EACH];
        uint32_t mask[EACH];
        __syncthreads(); /* the heap is as it is, and the counts have been read */
        const int64_t root = heap[0].key;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int64_t i = chunk + j * THREADS + threadIdx.x;
            entry[j] = {INT64_MAX, i};
            if (i < x.n) entry[j] = x.template entry<gradd_entry_t>(from, i);
            mask[j] = __ballot_sync(GPU_ALL, entry[j].key < root);
            if (!lane) counts[j * WARPS + warp] = __popc(mask[j]);
        }
        __syncthreads();
        int all = 0;
#pragma unroll
        for (int j = 0; j < EACH; j++)
            for (int w = 0; w < WARPS; w++) {
                if (w == warp && entry[j].key < root)
                    offered[all + __popc(mask[j] & gpu_lanes_before())] = entry[j];
                all += counts[j * WARPS + w];
            }
        if (!all) continue;
        __syncthreads();
        for (int i = 0; !threadIdx.x && i < all; i++)
            if (offered[i].key < heap[0].key) gradd_heap_replace(heap, x.k, offered[i]);
    }
    __syncthreads();
    if (!threadIdx.x) gradd_heap_sort(heap, x.k);
    __syncthreads();
}

template <gradd_order_t HOW, class T>
__global__ void GPU_ORDER_BLOCK order_together(slices_t<T> x, int64_t slots, int64_t room,
                                               gradd_entry_t *scratch) {
    gradd_entry_t *out = scratch + blockIdx.x * room;
    const gpu_stops_t stops = {(int32_t *)(out + x.n), (int32_t *)(out + x.n) + x.n};
    for (int64_t number = blockIdx.x; number < x.slices; number += slots) {
        if (x.ties && !x.mark[number]) continue;
        const spot_t<T> from = x.slice(number);
        if constexpr (HOW == GRADD_ORDER_PARTIAL) {
            select_partly_together(x, from, out);
        } else {
            for (int64_t i = threadIdx.x; i < x.n; i += THREADS)
                out[i] = x.template entry<gradd_entry_t>(from, i);
            __syncthreads();
            if constexpr (HOW != GRADD_ORDER_SORT)
                gpu_select_nth(out, (int)x.n, (int)x.k - 1, stops);
            if constexpr (HOW == GRADD_ORDER_SORT) gpu_sort_entries(out, (int)x.n, stops);
            if constexpr (HOW == GRADD_ORDER_SELECT_SORT)
                gpu_sort_entries(out, (int)x.k - 1, stops); /* the last is in place */
        }
        for (int64_t j = threadIdx.x; j < x.k; j += THREADS)
            x.put(from, j, out[j].at);
        __syncthreads(); /* before the next slice takes the room */
    }
}

/* ---- host ------------------------------------------------------------------------------------ */

enum { TOGETHER = 1024, SLOTS = 1 << 16, BLOCK_SLOTS = 1024, SLOT_BYTES = 64 << 20 };

static bool in_shared(const topk_job_t &job, bool large) {
    const size_t entry = large ? sizeof(large_t) : sizeof(small_t);
    const int64_t cap = SHARED_BYTES / (int64_t)entry;
    return job.s.n <= cap || job.want <= cap / 2;
}

static gradd_status_t plan(const gradd_op_t *op, gradd_attrs_t attrs, const gradd_type_t &x,
                           const gradd_type_t &y, topk_job_t *job) {
    *job = {};
    GRADD_TRY(gradd_slice_of(op, attrs, &x, &y, &job->s));
    const gradd_slice_t &s = job->s;
    const bool large = gradd_dtype_bytes(x.dtype) == 8;
    if (!gradd_type_count(&y)) return GRADD_OK;
    if (s.n >= INT32_MAX) return GRADD_FAIL(LIMIT, "an axis of %lld is too long", (long long)s.n);
    job->slices = gradd_type_count(&x) / s.n;
    job->ties = s.how != GRADD_ORDER_SORT_STABLY && s.how != GRADD_ORDER_SELECT;
    job->want = s.k + (job->ties && s.k < s.n);
    job->merges = s.how != GRADD_ORDER_SELECT && !in_shared(*job, large);
    if (job->merges)
        job->scratch =
            (size_t)(2 * s.n * job->slices) * (large ? sizeof(large_t) : sizeof(small_t));
    if (s.how == GRADD_ORDER_SORT_STABLY) return GRADD_OK;
    job->together = s.n >= TOGETHER;
    job->room = gradd_slice_room(&s);
    if (job->together && s.how != GRADD_ORDER_PARTIAL) job->room += s.n / 2 + 1; /* stops */
    const int64_t fit = SLOT_BYTES / (job->room * (int64_t)sizeof(gradd_entry_t));
    const int64_t most = job->together ? BLOCK_SLOTS : SLOTS;
    job->slots = job->slices < most ? job->slices : most;
    if (job->slots > fit) job->slots = fit > 0 ? fit : 1;
    const size_t bytes = (size_t)(job->slots * job->room) * sizeof(gradd_entry_t);
    if (bytes > job->scratch) job->scratch = bytes;
    if (job->ties) job->marks = ((size_t)job->slices * sizeof(uint32_t) + 63) / 64 * 64;
    return GRADD_OK;
}

static size_t workspace(const gradd_infer_t *c) {
    topk_job_t job;
    if (plan(c->op, c->attrs, c->in[0].type, c->out[0], &job)) return 0;
    return job.marks + job.scratch;
}

template <class E, class T> static void merge_sort(const slices_t<T> &x, E *a) {
    constexpr int CAP = capacity<THREADS, E>;
    const int64_t all = x.slices * x.n, tiles = (x.n + CAP - 1) / CAP;
    E *b = a + all;
    GPU_LAUNCH((sort_tiles<E, T>), gpu_blocks(tiles * x.slices, 1), THREADS, x, tiles, a);
    for (int64_t run = CAP; run < x.n; run *= 2) {
        GPU_LAUNCH((merge_runs<E>), gpu_blocks(all, THREADS), THREADS, x.n, all, run, b, a);
        E *const merged = b;
        b = a, a = merged;
    }
    GPU_LAUNCH((put_sorted<E, T>), gpu_blocks(x.slices * x.want, THREADS), THREADS, x, a);
}

template <gradd_order_t HOW, class T>
static void launch_in_slots(const slices_t<T> &x, const topk_job_t &job, void *scratch) {
    const unsigned blocks = (unsigned)((job.slots + GPU_WARP - 1) / GPU_WARP);
    gradd_entry_t *room = (gradd_entry_t *)scratch;
    if (job.together)
        GPU_LAUNCH((order_together<HOW, T>), (unsigned)job.slots, THREADS, x, job.slots, job.room,
                   room);
    else
        GPU_LAUNCH((order_slices<HOW, T>), blocks, GPU_WARP, x, job.slots, job.room, room);
}

template <class T> static gradd_status_t order(const gradd_launch_t *r, const topk_job_t &job) {
    typedef typename entry_of<T>::type E;
    const gradd_slice_t &s = job.s;
    char *scratch = (char *)r->workspace + job.marks;
    const slices_t<T> x = {s.n,
                           s.k,
                           job.want,
                           s.stride,
                           s.flip,
                           job.slices,
                           1 / (double)s.stride,
                           job.ties,
                           (const T *)r->in[0].data,
                           (T *)r->out[0].data,
                           r->n_out > 1 ? (int64_t *)r->out[1].data : NULL,
                           (uint32_t *)r->workspace};
    if (job.ties) GRADD_TRY(gpu_fill(r->op->name, r->workspace, job.slices, 4, 0));
    if (job.merges)
        merge_sort<E>(x, (E *)scratch);
    else if (s.how != GRADD_ORDER_SELECT && s.n <= capacity<GPU_WARP, E>)
        GPU_LAUNCH((sort_slices<GPU_WARP, E, T>), gpu_blocks(job.slices, THREADS / GPU_WARP),
                   THREADS, x);
    else if (s.how != GRADD_ORDER_SELECT)
        GPU_LAUNCH((sort_slices<THREADS, E, T>), gpu_blocks(job.slices, 1), THREADS, x);
    if (s.how == GRADD_ORDER_PARTIAL)
        launch_in_slots<GRADD_ORDER_PARTIAL>(x, job, scratch);
    else if (s.how == GRADD_ORDER_SELECT)
        launch_in_slots<GRADD_ORDER_SELECT>(x, job, scratch);
    else if (s.how == GRADD_ORDER_SELECT_SORT)
        launch_in_slots<GRADD_ORDER_SELECT_SORT>(x, job, scratch);
    else if (s.how == GRADD_ORDER_SORT)
        launch_in_slots<GRADD_ORDER_SORT>(x, job, scratch);
    return gpu_launched(r->op->name);
}

static gradd_status_t compute(const gradd_launch_t *r) {
    topk_job_t job;
    GRADD_TRY(plan(r->op, r->attrs, r->in[0].type, r->out[0].type, &job));
    if (!job.slices) return GRADD_OK;
    return gpu_switch(gpu_numbers(), r->in[0].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        return order<T>(r, job);
    });
}

#define ORDER(op)                                                                                  \
    GRADD_KERNEL(op, "move", .types = {GPU_T_NUM, GRADD_T_INDEX}, .compute = compute,              \
                 .workspace = workspace)

GRADD_KERNELS(cuda, topk, ORDER("TopK"), ORDER("TorchTopK"), ORDER("TorchSort"));
