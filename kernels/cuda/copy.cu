/* Strided copies on a GPU. See copy.h.
 *
 * After simplification the box is one of three: rows that are contiguous on both sides move as
 * atoms of up to 16 bytes; an element that is repeated along the innermost axis is spread over
 * packs; and where the source walks another axis without gaps than the target does, tiles are
 * turned in shared memory, those of halves in packs of up to 16 bytes. Everything else moves
 * element by element, in the target's order.
 */
#include "kernels/cuda/copy.h"

enum { WIDEST = 16, WARPS = GPU_COPY_THREADS / GPU_WARP, TURN_MIN = 8 };

/* ---- rows, and whatever is no better --------------------------------------------------------- */

/* The innermost axis first; strides in what both sides are made of. */
template <class I> struct box_t {
    int rank;
    gpu_divisor<I> dims[GRADD_COPY_RANK];
    int64_t to[GRADD_COPY_RANK], from[GRADD_COPY_RANK];

    __device__ void find(I element, int64_t *out_to, int64_t *out_from) const {
        int64_t t = 0, f = 0;
        int k = 0;
        for (; k + 1 < rank; k++) {
            const I next = dims[k].over(element);
            const int64_t at = (int64_t)(element - next * dims[k].by);
            t += at * to[k], f += at * from[k];
            element = next;
        }
        *out_to = t + (int64_t)element * to[k];
        *out_from = f + (int64_t)element * from[k];
    }
};

/* The number of reads of a thread before it writes: narrow elements need more in flight. */
template <class T> constexpr int ahead = sizeof(T) < 8 ? 4 : 2;

template <class T> GPU_FN void put(T *to, T x) {
    *to = x;
}
template <class T, int W> GPU_FN void put(gpu_pack<T, W> *to, T x) {
    gpu_pack<T, W> y;
#pragma unroll
    for (int k = 0; k < W; k++)
        y.v[k] = x;
    *to = y;
}

template <class U, class T, class I>
__global__ void GPU_BLOCK(GPU_COPY_THREADS) copy_box(box_t<I> box, I n, U *to, const T *from) {
    const I all = (I)gridDim.x * blockDim.x;
    for (I i = (I)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += ahead<T> * all) {
        T item[ahead<T>];
        int64_t t[ahead<T>];
#pragma unroll
        for (int j = 0; j < ahead<T>; j++) {
            int64_t f;
            if (i + j * all >= n) continue;
            box.find(i + j * all, &t[j], &f);
            item[j] = from[f];
        }
#pragma unroll
        for (int j = 0; j < ahead<T>; j++)
            if (i + j * all < n) put(to + t[j], item[j]);
    }
}

template <class U, class T>
static gradd_status_t launch_box(const char *what, const gradd_copy_t &c, void *to,
                                 const void *from) {
    int64_t n = 1;
    for (int i = 0; i < c.rank; i++)
        n *= c.dims[i];
    return gpu_switch_count(n, [&](auto i) {
        typedef typename decltype(i)::type I;
        box_t<I> box = {};
        box.rank = c.rank;
        for (int k = 0; k < c.rank; k++) {
            const int axis = c.rank - 1 - k;
            box.dims[k] = gpu_divisor_of<I>(c.dims[axis]);
            box.to[k] = c.to[axis], box.from[k] = c.from[axis];
        }
        GPU_LAUNCH((copy_box<U, T, I>), gpu_blocks(n, GPU_COPY_THREADS), GPU_COPY_THREADS, box,
                   (I)n, (U *)to, (const T *)from);
        return gpu_launched(what);
    });
}

/* Whether rows that are contiguous on both sides, or in the target alone, are made of atoms of w
 * elements. */
static bool divides(const gradd_copy_t &c, int64_t w, bool both) {
    const int last = c.rank - 1;
    bool all = c.dims[last] % w == 0;
    for (int i = 0; i < last; i++)
        all = all && c.to[i] % w == 0 && (!both || c.from[i] % w == 0);
    return all;
}

static void widen(gradd_copy_t &c, int64_t w, bool both) {
    const int last = c.rank - 1;
    c.dims[last] /= w;
    for (int i = 0; i < last; i++) {
        c.to[i] /= w;
        if (both) c.from[i] /= w;
    }
}

static gradd_status_t copy_rows(const char *what, gradd_copy_t c, size_t bytes, void *to,
                                const void *from) {
    size_t atom = WIDEST;
    while (atom > bytes && !(divides(c, (int64_t)(atom / bytes), true) && gpu_aligned(to, atom) &&
                             gpu_aligned(from, atom)))
        atom /= 2;
    widen(c, (int64_t)(atom / bytes), true);
    return gpu_switch_bytes(atom, [&](auto t) {
        typedef typename decltype(t)::type T;
        return launch_box<T, T>(what, c, to, from);
    });
}

static gradd_status_t copy_spread(const char *what, gradd_copy_t c, size_t bytes, void *to,
                                  const void *from) {
    const int64_t w = WIDEST / (int64_t)bytes;
    const bool wide = divides(c, w, false) && gpu_aligned(to, WIDEST);
    if (wide) widen(c, w, false);
    return gpu_switch_bytes(bytes, [&](auto t) -> gradd_status_t {
        typedef typename decltype(t)::type T;
        if constexpr (sizeof(T) < WIDEST) {
            if (wide) return launch_box<gpu_pack<T, gpu_width<T>>, T>(what, c, to, from);
        }
        return launch_box<T, T>(what, c, to, from);
    });
}

/* ---- turned tiles ---------------------------------------------------------------------------- */

/* n1 rows of n0 elements, contiguous in the target; columns are contiguous in the source. */
typedef struct turn_s {
    int rank; /* of what is outside */
    int64_t dims[GRADD_COPY_RANK], to[GRADD_COPY_RANK], from[GRADD_COPY_RANK];
    int64_t n1, n0, t1, f0;
} turn_t;

template <class T> constexpr int turn_side = sizeof(T) < 4 ? 64 : 32;

/* The corner of a tile: its row and column in the target, and where that is on both sides. */
typedef struct corner_s {
    int64_t row, column, to, from;
} corner_t;

template <int SIDE> GPU_FN corner_t corner_of(const turn_t &x, int64_t number) {
    const int64_t across = (x.n0 + SIDE - 1) / SIDE, down = (x.n1 + SIDE - 1) / SIDE;
    int64_t rest = number / across;
    corner_t c = {rest % down * SIDE, (number - rest * across) * SIDE, 0, 0};
    c.to = c.row * x.t1 + c.column, c.from = c.row + c.column * x.f0;
    rest /= down;
    for (int i = x.rank - 1; i >= 0; i--) {
        const int64_t at = rest % x.dims[i];
        rest /= x.dims[i];
        c.to += at * x.to[i], c.from += at * x.from[i];
    }
    return c;
}

template <class T>
__global__ void GPU_BLOCK(GPU_COPY_THREADS)
    copy_turn(turn_t x, int64_t tiles, T *to, const T *from) {
    constexpr int SIDE = turn_side<T>, PITCH = SIDE + (sizeof(T) < 4 ? 4 / (int)sizeof(T) : 1);
    GPU_SHARED(T, tile, SIDE * PITCH); /* the pitch keeps columns out of one bank */
    const int lane = (int)threadIdx.x % GPU_WARP, warp = (int)threadIdx.x / GPU_WARP;
    for (int64_t number = blockIdx.x; number < tiles; number += gridDim.x) {
        const corner_t c = corner_of<SIDE>(x, number);
        const int64_t left0 = x.n0 - c.column, left1 = x.n1 - c.row;
#pragma unroll
        for (int row = warp; row < SIDE; row += WARPS)
#pragma unroll
            for (int k = lane; k < SIDE; k += GPU_WARP)
                if (row < left0 && k < left1) tile[row * PITCH + k] = from[c.from + row * x.f0 + k];
        __syncthreads();
#pragma unroll
        for (int row = warp; row < SIDE; row += WARPS)
#pragma unroll
            for (int k = lane; k < SIDE; k += GPU_WARP)
                if (row < left1 && k < left0) to[c.to + row * x.t1 + k] = tile[k * PITCH + row];
        __syncthreads();
    }
}

/* Elements of 2 bytes in packs of W; all sizes and strides are multiples of W. A row of the tile is
 * one of the source, whose packs lie in another order in each W rows, so that neither side meets in
 * a bank. A thread takes the same pair of elements out of W rows: a pack of each of two rows of the
 * target. */
template <int W>
__global__ void GPU_BLOCK(GPU_COPY_THREADS)
    turn_packs(turn_t x, int64_t tiles, uint16_t *to, const uint16_t *from) {
    typedef gpu_pack<uint32_t, W / 2> pack;
    constexpr int SIDE = turn_side<uint16_t>, PACKS = SIDE / W;
    GPU_SHARED(pack, tile, SIDE * PACKS);
    const int lane = (int)threadIdx.x % GPU_WARP, warp = (int)threadIdx.x / GPU_WARP;
    const int p = lane % PACKS, pair = lane / PACKS; /* of the target's row; within a pack */
    for (int64_t number = blockIdx.x; number < tiles; number += gridDim.x) {
        const corner_t c = corner_of<SIDE>(x, number);
        const int64_t left0 = x.n0 - c.column, left1 = x.n1 - c.row;
#pragma unroll
        for (int i = (int)threadIdx.x; i < SIDE * PACKS; i += GPU_COPY_THREADS) {
            const int row = i / PACKS, k = i % PACKS;
            if (row < left0 && k * W < left1)
                tile[row * PACKS + (k ^ row / W)] =
                    *(const pack *)(from + c.from + row * x.f0 + k * W);
        }
        __syncthreads();
#pragma unroll
        for (int k = warp; k < PACKS; k += WARPS) {
            if (k * W >= left1 || p * W >= left0) continue;
            pack low, high;
#pragma unroll
            for (int j = 0; j < W / 2; j++) {
                const int at = (p * W + 2 * j) * PACKS + (k ^ p);
                const uint32_t a = tile[at].v[pair], b = tile[at + PACKS].v[pair];
                low.v[j] = (a & 0xffffu) | b << 16;
                high.v[j] = a >> 16 | (b & 0xffff0000u);
            }
            uint16_t *row = to + c.to + (k * W + 2 * pair) * x.t1 + p * W;
            *(pack *)row = low;
            *(pack *)(row + x.t1) = high;
        }
        __syncthreads();
    }
}

/* Whether w elements on each side are one pack, wherever a tile begins. */
static bool turns_in(const turn_t &x, int64_t w, const void *to, const void *from) {
    bool all = gpu_aligned(to, (size_t)w * 2) && gpu_aligned(from, (size_t)w * 2);
    all = all && x.n1 % w == 0 && x.n0 % w == 0 && x.t1 % w == 0 && x.f0 % w == 0;
    for (int i = 0; i < x.rank; i++)
        all = all && x.to[i] % w == 0 && x.from[i] % w == 0;
    return all;
}

template <class T>
static void launch_turn(const turn_t &x, int64_t outside, void *to, const void *from) {
    constexpr int64_t SIDE = turn_side<T>;
    const int64_t tiles = outside * ((x.n1 + SIDE - 1) / SIDE) * ((x.n0 + SIDE - 1) / SIDE);
    const unsigned blocks = gpu_blocks(tiles, 1);
    if constexpr (sizeof(T) == 2) {
        if (turns_in(x, 8, to, from)) {
            GPU_LAUNCH((turn_packs<8>), blocks, GPU_COPY_THREADS, x, tiles, (T *)to,
                       (const T *)from);
            return;
        }
        if (turns_in(x, 2, to, from)) {
            GPU_LAUNCH((turn_packs<2>), blocks, GPU_COPY_THREADS, x, tiles, (T *)to,
                       (const T *)from);
            return;
        }
    }
    GPU_LAUNCH((copy_turn<T>), blocks, GPU_COPY_THREADS, x, tiles, (T *)to, (const T *)from);
}

/* The axis that the source walks without gaps; -1: the target's, or none, or tiles would be mostly
 * empty. */
static int turned_axis(const gradd_copy_t &c) {
    const int last = c.rank - 1;
    if (c.to[last] != 1 || c.from[last] == 1 || c.dims[last] < TURN_MIN) return -1;
    for (int i = last - 1; i >= 0; i--)
        if (c.from[i] == 1) return c.dims[i] < TURN_MIN ? -1 : i;
    return -1;
}

static gradd_status_t copy_turned(const char *what, const gradd_copy_t &c, int axis, size_t bytes,
                                  void *to, const void *from) {
    const int last = c.rank - 1;
    int64_t outside = 1;
    turn_t x = {};
    for (int i = 0; i < last; i++) {
        if (i == axis) continue;
        x.dims[x.rank] = c.dims[i], x.to[x.rank] = c.to[i], x.from[x.rank] = c.from[i];
        outside *= c.dims[i];
        x.rank++;
    }
    x.n1 = c.dims[axis], x.n0 = c.dims[last];
    x.t1 = c.to[axis], x.f0 = c.from[last];
    return gpu_switch_bytes(bytes, [&](auto t) {
        typedef typename decltype(t)::type T;
        if constexpr (sizeof(T) < WIDEST) launch_turn<T>(x, outside, to, from);
        return gpu_launched(what);
    });
}

/* ---- interface ------------------------------------------------------------------------------- */

gradd_status_t gpu_copy(const char *what, const gradd_copy_t &job, size_t bytes, void *to,
                        const void *from) {
    gradd_copy_t c = {};
    if (!gradd_copy_simplify(&job, &c)) return GRADD_OK;
    if (!c.rank) c = {.rank = 1, .dims = {1}, .to = {1}, .from = {1}};
    const int last = c.rank - 1, axis = turned_axis(c);
    const bool rows = c.to[last] == 1 && c.from[last] == 1;
    if (rows && c.rank == 1) return gpu_copy_bytes(what, to, from, (size_t)c.dims[0] * bytes);
    if (rows) return copy_rows(what, c, bytes, to, from);
    if (c.to[last] == 1 && c.from[last] == 0) return copy_spread(what, c, bytes, to, from);
    if (axis >= 0) return copy_turned(what, c, axis, bytes, to, from);
    return gpu_switch_bytes(bytes, [&](auto t) {
        typedef typename decltype(t)::type T;
        return launch_box<T, T>(what, c, to, from);
    });
}

gradd_status_t gpu_move(const gradd_launch_t *r, const gradd_move_t &move) {
    const size_t bytes = gradd_dtype_bytes(r->out[0].type.dtype);
    if (!gradd_type_count(&r->in[0].type) || !gradd_type_count(&r->out[0].type)) return GRADD_OK;
    return gpu_copy(r->op->name, move.box, bytes, (char *)r->out[0].data + move.to * (int64_t)bytes,
                    (const char *)r->in[0].data + move.from * (int64_t)bytes);
}

static gradd_copy_t row_of(int64_t n, int64_t from) {
    return {.rank = 1, .dims = {n}, .to = {1}, .from = {from}};
}

gradd_status_t gpu_copy_bytes(const char *what, void *to, const void *from, size_t bytes) {
    const size_t tail = bytes % WIDEST, body = bytes - tail;
    if (!bytes || to == from) return GRADD_OK;
    if (!gpu_aligned(to, WIDEST) || !gpu_aligned(from, WIDEST) || !body)
        return copy_rows(what, row_of((int64_t)bytes, 1), 1, to, from);
    GRADD_TRY(copy_rows(what, row_of((int64_t)body, 1), 1, to, from));
    if (!tail) return GRADD_OK;
    return copy_rows(what, row_of((int64_t)tail, 1), 1, (char *)to + body,
                     (const char *)from + body);
}

template <class U, class T>
__global__ void GPU_BLOCK(GPU_COPY_THREADS) fill_with(U *to, int64_t n, T element) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all)
        put(to + i, element);
}

gradd_status_t gpu_fill(const char *what, void *to, int64_t n, size_t bytes, uint64_t element) {
    if (!n) return GRADD_OK;
    return gpu_switch_bytes(bytes, [&](auto t) {
        typedef typename decltype(t)::type T;
        if constexpr (sizeof(T) < WIDEST) {
            typedef gpu_pack<T, gpu_width<T>> U;
            const int64_t wide = gpu_aligned(to, WIDEST) ? n / gpu_width<T> : 0;
            const int64_t tail = n - wide * gpu_width<T>;
            if (wide)
                GPU_LAUNCH((fill_with<U, T>), gpu_blocks(wide, GPU_COPY_THREADS), GPU_COPY_THREADS,
                           (U *)to, wide, (T)element);
            if (tail)
                GPU_LAUNCH((fill_with<T, T>), gpu_blocks(tail, GPU_COPY_THREADS), GPU_COPY_THREADS,
                           (T *)to + wide * gpu_width<T>, tail, (T)element);
        }
        return gpu_launched(what);
    });
}
