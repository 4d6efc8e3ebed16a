/* Reductions over axes on a GPU. See kernels/ops/reduce/reduce.c and row_teams.h.
 *
 * A fold defines the state that a thread gathers (state_t), the part that threads, blocks and
 * launches hand on (part_t), and the result. Rows go to teams, columns to blocks of 32 lanes and 8
 * slices. Where there are few results, their elements are cut into pieces; the parts of these lie
 * in scratch memory until a second launch joins them. The cuts depend on shapes alone.
 */
#include "kernels/cuda/row/row_teams.h"
#include "kernels/describe/reduction.h"

/* ---- folds ----------------------------------------------------------------------------------- */

/* The type that elements are widened to; integers wrap around in 64 bits. */
template <class T> struct wide_of {
    typedef gpu_real<T> type;
};
template <> struct wide_of<int32_t> {
    typedef int64_t type;
};

enum { PLAIN, MEAN, ROOT };

GPU_FN double plus(double a, double b) {
    return a + b;
}
GPU_FN int64_t plus(int64_t a, int64_t b) {
    return (int64_t)((uint64_t)a + (uint64_t)b);
}
GPU_FN double times(double a, double b) {
    return a * b;
}
GPU_FN int64_t times(int64_t a, int64_t b) {
    return (int64_t)((uint64_t)a * (uint64_t)b);
}

template <class A> struct total_of {
    typedef double type;
};
template <> struct total_of<int64_t> {
    typedef int64_t type;
};

/* Of elements or their squares: short chains in A flow into a total in double. */
template <class A, bool SQUARES> struct f_sum {
    static const int CHAIN = 8; /* rows that a thread reads ahead, and adds before it flushes */
    typedef typename total_of<A>::type part_t;
    struct state_t {
        part_t total;
        A chain;
    };
    __device__ static state_t start() {
        return {0, 0};
    }
    __device__ static void add(state_t *s, A x) {
        if constexpr (gpu_is_int<A>)
            s->total = plus(s->total, SQUARES ? times(x, x) : x);
        else
            s->chain += SQUARES ? x * x : x;
    }
    __device__ static void flush(state_t *s) {
        s->total = plus(s->total, (part_t)s->chain);
        s->chain = 0;
    }
    __device__ static part_t close(const state_t &s) {
        return s.total;
    }
    __device__ static part_t join(part_t a, part_t b) {
        return plus(a, b);
    }
    __device__ static part_t finish(part_t total, int64_t n, int how) {
        if constexpr (gpu_is_int<A>) return total;
        return how == MEAN ? total / (double)n : how == ROOT ? (part_t)sqrt((double)total) : total;
    }
};

template <class A, class P> struct f_simple {
    static const int CHAIN = 4;
    typedef P part_t;
    typedef P state_t;
    __device__ static void flush(state_t *) {
    }
    __device__ static part_t close(const state_t &s) {
        return s;
    }
};

template <class A, bool LEAST> struct f_extremum : f_simple<A, A> {
    __device__ static A start() {
        if constexpr (gpu_is_int<A>)
            return LEAST ? INT64_MAX : INT64_MIN;
        else
            return LEAST ? (A)INFINITY : -(A)INFINITY;
    }
    __device__ static A join(A a, A b) {
        return (LEAST ? a < b : a > b) || a != a ? a : b;
    }
    __device__ static void add(A *s, A x) {
        *s = join(*s, x);
    }
    __device__ static A finish(A best, int64_t, int) {
        return best;
    }
};

template <class A> struct f_product : f_simple<A, typename total_of<A>::type> {
    typedef typename total_of<A>::type part_t;
    __device__ static part_t start() {
        return 1;
    }
    __device__ static part_t join(part_t a, part_t b) {
        return times(a, b);
    }
    __device__ static void add(part_t *s, A x) {
        *s = times(*s, (part_t)x);
    }
    __device__ static part_t finish(part_t product, int64_t, int) {
        return product;
    }
};

template <class A> struct f_logs : f_simple<A, gpu_soft<A>> {
    static const int CHAIN = 1;
    typedef gpu_soft<A> part_t;
    __device__ static part_t start() {
        return gpu_soft_none<A>();
    }
    __device__ static part_t join(part_t a, part_t b) {
        return gpu_soft_join(a, b);
    }
    __device__ static void add(part_t *s, A x) {
        const A one[1] = {x};
        gpu_soft_scan(s, one);
    }
    /* Of an infinity: that itself, not its distance to itself. */
    __device__ static double finish(part_t s, int64_t, int) {
        return isinf(s.max) ? (double)s.max : (double)s.max + log(s.sum);
    }
};

/* ---- kernels --------------------------------------------------------------------------------- */

/* Where results go: finished to z, or as parts [pieces, results]. */
template <class F, class T> struct target_t {
    T *z;
    typename F::part_t *parts;
    int64_t results, reduced;
    int how;

    __device__ void put(int64_t k, int64_t piece, typename F::part_t part) const {
        if (parts)
            parts[piece * results + k] = part;
        else
            gpu_put(&z[k], (gpu_real<T>)F::finish(part, reduced, how));
    }
};

/* Elements of a row are cut into pieces of so many. */
typedef struct cut_s {
    int64_t pieces, size;
} cut_t;

template <class F, class T, int TEAM, int W>
__global__ void GPU_BLOCK(GPU_ROW_THREADS)
    fold_rows(gradd_fold_t p, cut_t cut, const T *x, target_t<F, T> to) {
    typedef typename wide_of<T>::type A;
    const int64_t units = p.outer_kept * cut.pieces;
    for (int64_t u = gpu_team<TEAM>(); u < units; u += gpu_teams<TEAM>()) {
        const int64_t k = cut.pieces > 1 ? u / cut.pieces : u, piece = u - k * cut.pieces;
        const int64_t from = piece * cut.size, left = p.reduced - from;
        const int64_t n = left < cut.size ? left : cut.size;
        const T *row = x + gradd_fold_offset(k, p.n_kept, p.kept, p.kept_step);
        typename F::state_t s = F::start();
        if constexpr (W > 1) {
            const gpu_pack<T, W> *packs = (const gpu_pack<T, W> *)(row + from);
#pragma unroll 4
            for (int64_t i = gpu_lane<TEAM>(); i < n / W; i += TEAM) {
                const gpu_pack<T, W> v = packs[i];
#pragma unroll
                for (int e = 0; e < W; e++)
                    F::add(&s, (A)gpu_get(v.v[e]));
                F::flush(&s);
            }
        } else {
            for (int64_t i = from + gpu_lane<TEAM>(); i < from + n; i += TEAM) {
                int64_t at = i;
                if (p.n_red)
                    at = gradd_fold_offset(i / p.stretch, p.n_red, p.red, p.red_step) +
                         i % p.stretch;
                F::add(&s, (A)gpu_get(row[at]));
                F::flush(&s);
            }
        }
        const auto part = gpu_team_join<TEAM>(F::close(s), F::join);
        if (gpu_lane<TEAM>() == 0) to.put(k, piece, part);
    }
}

/* W columns per thread. */
template <class F, class T, int W>
__global__ void GPU_BLOCK(GPU_ROW_THREADS)
    fold_columns(gradd_fold_t p, cut_t cut, const T *x, target_t<F, T> to) {
    typedef typename wide_of<T>::type A;
    typedef typename F::part_t part_t;
    GPU_SHARED(part_t, shared, GPU_ROW_THREADS * W);
    const int64_t wide = GPU_WARP * W, blocks = (p.stretch + wide - 1) / wide;
    for (int64_t u = blockIdx.x; u < p.outer_kept * blocks * cut.pieces; u += gridDim.x) {
        const int64_t piece = u % cut.pieces, kb = u / cut.pieces, k = kb / blocks;
        const int64_t first = (kb - k * blocks) * wide, from = piece * cut.size;
        const int64_t left = p.reduced - from, end = from + (left < cut.size ? left : cut.size);
        const int64_t column = first + threadIdx.x % GPU_WARP * W;
        const T *at = x + gradd_fold_offset(k, p.n_kept, p.kept, p.kept_step) + column;
        typename F::state_t s[W];
#pragma unroll
        for (int e = 0; e < W; e++)
            s[e] = F::start();
        const auto add = [&](int64_t row) {
            const gpu_pack<T, W> v = *(const gpu_pack<T, W> *)(at + row);
#pragma unroll
            for (int e = 0; e < W; e++)
                F::add(&s[e], (A)gpu_get(v.v[e]));
        };
        const auto flush = [&] {
#pragma unroll
            for (int e = 0; e < W; e++)
                F::flush(&s[e]);
        };
        int64_t r = from + gpu_slice();
        if (column >= p.stretch) r = end;
        if (p.n_red == 1) {
            const int64_t step = p.red_step[0];
            for (; r + (F::CHAIN - 1) * GPU_SLICES < end; r += F::CHAIN * GPU_SLICES) {
#pragma unroll
                for (int j = 0; j < F::CHAIN; j++)
                    add((r + j * GPU_SLICES) * step);
                flush();
            }
            for (; r < end; r += GPU_SLICES)
                add(r * step);
            flush();
        } else {
#pragma unroll 1
            for (; r < end; r += GPU_SLICES) {
                add(gradd_fold_offset(r, p.n_red, p.red, p.red_step));
                flush();
            }
        }
        __syncthreads();
#pragma unroll
        for (int e = 0; e < W; e++)
            shared[gpu_slice() * (int)wide + (int)threadIdx.x % GPU_WARP * W + e] = F::close(s[e]);
        __syncthreads();
        if (threadIdx.x < wide && first + threadIdx.x < p.stretch) {
            part_t all = shared[threadIdx.x];
            for (int i = 1; i < GPU_SLICES; i++)
                all = F::join(all, shared[i * (int)wide + (int)threadIdx.x]);
            to.put(k * p.stretch + first + threadIdx.x, piece, all);
        }
    }
}

/* The parts of all pieces, 32 results per block. */
template <class F, class T>
__global__ void GPU_BLOCK(GPU_ROW_THREADS) join_parts(int64_t pieces, target_t<F, T> to) {
    typedef typename F::part_t part_t;
    const part_t *parts = to.parts;
    to.parts = nullptr;
    for (int64_t at = (int64_t)blockIdx.x * GPU_WARP; at < to.results;
         at += (int64_t)gridDim.x * GPU_WARP) {
        const int64_t k = at + threadIdx.x % GPU_WARP;
        part_t all = F::close(F::start());
        for (int64_t i = gpu_slice(); k < to.results && i < pieces; i += GPU_SLICES)
            all = F::join(all, parts[i * to.results + k]);
        all = gpu_slices_join(all, F::join);
        if (gpu_slice() == 0 && k < to.results) to.put(k, 0, all);
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

enum { SHORT = 1024, MANY = 1024, ROW_PIECE = 8192, COLUMN_PIECE = 64, MAX_PIECES = 1024 };

static bool is_wide(const gradd_fold_t &p, int width) {
    return p.stretch % width == 0 && (!p.ends_kept || p.stretch >= width * GPU_WARP);
}

/* As many columns as a thread takes: 16 bytes, 4 at most. */
static int column_width(size_t bytes) {
    return bytes > 4 ? 2 : 4;
}

static cut_t cut_of(const gradd_fold_t &p, gradd_dtype_t dtype) {
    const int width = column_width(gradd_dtype_bytes(dtype));
    const int64_t wide = GPU_WARP * (is_wide(p, width) ? width : 1);
    const int64_t blocks = p.ends_kept ? (p.stretch + wide - 1) / wide : 1;
    const int64_t units = p.outer_kept * blocks, least = p.ends_kept ? COLUMN_PIECE : ROW_PIECE;
    int64_t pieces = units > 0 ? MANY / units : 1;
    if (pieces > p.reduced / least) pieces = p.reduced / least;
    if (pieces > MAX_PIECES) pieces = MAX_PIECES;
    if (pieces < 2) return {1, p.reduced};
    /* whole packs */
    const int64_t size = ((p.reduced + pieces - 1) / pieces + 63) / 64 * 64;
    return {(p.reduced + size - 1) / size, size};
}

template <class F, class T> gradd_status_t fold(const gradd_launch_t *r, int how) {
    constexpr int W = gpu_width<T>, C = sizeof(T) > 4 ? 2 : 4;
    const gradd_fold_t p = gradd_fold_of(r->attrs, r->in, r->n_in);
    const cut_t cut = cut_of(p, r->in[0].type.dtype);
    const int64_t results = gradd_type_count(&r->out[0].type);
    const T *x = (const T *)r->in[0].data;
    typename F::part_t *parts = cut.pieces > 1 ? (typename F::part_t *)r->workspace : nullptr;
    const target_t<F, T> to = {(T *)r->out[0].data, parts, results, p.reduced, how};
    if (!results) return GRADD_OK;
    if (p.ends_kept) {
        const bool wide = is_wide(p, C) && gpu_aligned(x, C * sizeof(T));
        const int64_t each = GPU_WARP * (wide ? C : 1);
        const int64_t units = p.outer_kept * ((p.stretch + each - 1) / each) * cut.pieces;
        if (wide)
            GPU_LAUNCH((fold_columns<F, T, C>), gpu_blocks(units, 1), GPU_ROW_THREADS, p, cut, x,
                       to);
        else
            GPU_LAUNCH((fold_columns<F, T, 1>), gpu_blocks(units, 1), GPU_ROW_THREADS, p, cut, x,
                       to);
    } else {
        const bool wide = !p.n_red && is_wide(p, W) && gpu_aligned(x, 16);
        const bool brief = cut.size <= SHORT;
        const int64_t units = p.outer_kept * cut.pieces;
        const unsigned blocks = gpu_blocks(units, brief ? GPU_SLICES : 1);
        if (wide && brief)
            GPU_LAUNCH((fold_rows<F, T, GPU_WARP, W>), blocks, GPU_ROW_THREADS, p, cut, x, to);
        else if (wide)
            GPU_LAUNCH((fold_rows<F, T, GPU_ROW_THREADS, W>), blocks, GPU_ROW_THREADS, p, cut, x,
                       to);
        else if (brief)
            GPU_LAUNCH((fold_rows<F, T, GPU_WARP, 1>), blocks, GPU_ROW_THREADS, p, cut, x, to);
        else
            GPU_LAUNCH((fold_rows<F, T, GPU_ROW_THREADS, 1>), blocks, GPU_ROW_THREADS, p, cut, x,
                       to);
    }
    if (parts)
        GPU_LAUNCH((join_parts<F, T>), gpu_column_blocks(results), GPU_ROW_THREADS, cut.pieces, to);
    return gpu_launched(r->op->name);
}

/* ---- rows ------------------------------------------------------------------------------------ */

#define REDUCE(name, F, how, Types)                                                                \
    static gradd_status_t compute_##name(const gradd_launch_t *r) {                                \
        return gpu_switch(Types(), r->in[0].type.dtype, [&](auto t) {                              \
            typedef typename decltype(t)::type T;                                                  \
            typedef typename wide_of<T>::type A;                                                   \
            return fold<F, T>(r, how);                                                             \
        });                                                                                        \
    }
#define F_SUM     f_sum<A, false>
#define F_SQUARES f_sum<A, true>
#define F_MAX     f_extremum<A, false>
#define F_MIN     f_extremum<A, true>
REDUCE(sum, F_SUM, PLAIN, gpu_numbers)
REDUCE(mean, F_SUM, MEAN, gpu_floats)
REDUCE(squares, F_SQUARES, PLAIN, gpu_numbers)
REDUCE(norm, F_SQUARES, ROOT, gpu_floats)
REDUCE(max, F_MAX, PLAIN, gpu_numbers)
REDUCE(min, F_MIN, PLAIN, gpu_numbers)
REDUCE(product, f_product<A>, PLAIN, gpu_numbers)
REDUCE(logs, f_logs<A>, PLAIN, gpu_floats)

static size_t workspace_parts(const gradd_infer_t *c) {
    const gradd_fold_t p = gradd_fold_of(c->attrs, c->in, c->n_in);
    const cut_t cut = cut_of(p, c->in[0].type.dtype);
    const size_t part = sizeof(gpu_soft<double>); /* the largest */
    return cut.pieces > 1 ? (size_t)(cut.pieces * gradd_type_count(&c->out[0])) * part : 0;
}

#define ROW(op, function)                                                                          \
    GRADD_KERNEL(op, "fold", .host_in = 2, .compute = compute_##function,                          \
                 .workspace = workspace_parts)

GRADD_KERNELS(cuda, reduce, ROW("ReduceSum", sum), ROW("ReduceMean", mean),
              ROW("ReduceSumSquare", squares), ROW("ReduceL2", norm), ROW("ReduceMax", max),
              ROW("ReduceMin", min), ROW("ReduceLogSumExp", logs), ROW("ReduceProd", product));
