/* Concat and Split on a GPU: one launch for all parts. See kernels/ops/shape/concat.c. */
#include "kernels/cuda/copy.h"
#include "kernels/describe/cost.h"

/* Parts of rows that lie beside each other in the whole; in atoms. */
template <class I> struct part_t {
    char *at;
    gpu_divisor<I> width;
    int64_t first;
};
template <class I> struct parts_t {
    I rows;
    int64_t whole;
    part_t<I> v[GRADD_OP_MAX_IN];
};

template <bool JOIN, class T, class I>
__global__ void GPU_BLOCK(GPU_COPY_THREADS) cut(parts_t<I> parts, T *whole) {
    const part_t<I> &part = parts.v[blockIdx.y];
    const I all = (I)gridDim.x * blockDim.x, n = parts.rows * part.width.by;
    constexpr int AHEAD = sizeof(T) < 8 ? 4 : 2; /* read before it is written */
    T *alone = (T *)part.at;
    for (I i = (I)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += AHEAD * all) {
        T item[AHEAD], *to[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const I at = i + j * all;
            if (at >= n) continue;
            const I row = part.width.over(at);
            T *shared = whole + (int64_t)row * parts.whole + part.first +
                        (int64_t)(at - row * part.width.by);
            item[j] = JOIN ? alone[at] : *shared;
            to[j] = JOIN ? shared : alone + at;
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
            if (i + j * all < n) *to[j] = item[j];
    }
}

typedef struct list_s {
    gradd_part_t v[GRADD_OP_MAX_IN];
    void *at[GRADD_OP_MAX_IN];
    int n;
} list_t;

/* The largest atom of which every row of every part, and all that is between, is made. */
static size_t atom_of(const list_t &list, size_t bytes, const void *whole) {
    size_t atom = 16;
    for (bool fits = false; !fits && atom > bytes; atom /= fits ? 1 : 2) {
        const int64_t w = (int64_t)(atom / bytes);
        fits = gpu_aligned(whole, atom) && list.v[0].whole % w == 0;
        for (int i = 0; fits && i < list.n; i++)
            fits = gpu_aligned(list.at[i], atom) && list.v[i].width % w == 0 &&
                   list.v[i].first % w == 0;
    }
    return atom;
}

template <bool JOIN>
static gradd_status_t cut_all(const char *what, const list_t &list, size_t bytes, void *whole) {
    if (!list.n) return GRADD_OK;
    const size_t atom = atom_of(list, bytes, whole);
    const int64_t w = (int64_t)(atom / bytes), rows = list.v[0].outer;
    int64_t widest = 0;
    for (int i = 0; i < list.n; i++)
        widest = list.v[i].width > widest ? list.v[i].width : widest;
    const int64_t most = rows * (widest / w);
    return gpu_switch_bytes(atom, [&](auto t) {
        typedef typename decltype(t)::type T;
        return gpu_switch_count(most, [&](auto n) {
            typedef typename decltype(n)::type I;
            parts_t<I> parts = {};
            parts.rows = (I)rows;
            parts.whole = list.v[0].whole / w;
            for (int i = 0; i < list.n; i++)
                parts.v[i] = {(char *)list.at[i], gpu_divisor_of<I>(list.v[i].width / w),
                              list.v[i].first / w};
            const dim3 blocks(gpu_blocks(most, GPU_COPY_THREADS), (unsigned)list.n);
            GPU_LAUNCH((cut<JOIN, T, I>), blocks, GPU_COPY_THREADS, parts, (T *)whole);
            return gpu_launched(what);
        });
    });
}

static void add_part(list_t &list, const gradd_part_t &part, void *at) {
    if (!at || !part.width || !part.outer) return;
    list.v[list.n] = part;
    list.at[list.n++] = at;
}

static gradd_status_t compute_concat(const gradd_launch_t *r) {
    gradd_part_t part;
    list_t list = {};
    for (int i = 0; i < r->n_in; i++) {
        GRADD_TRY(gradd_part_of_concat(r, i, &part));
        add_part(list, part, r->in[i].data);
    }
    return cut_all<true>("Concat", list, gradd_dtype_bytes(r->out[0].type.dtype), r->out[0].data);
}

static gradd_status_t compute_split(const gradd_launch_t *r) {
    gradd_part_t part;
    list_t list = {};
    for (int i = 0; i < r->n_out; i++) {
        GRADD_TRY(gradd_part_of_split(r, i, &part));
        add_part(list, part, r->out[i].data);
    }
    return cut_all<false>("Split", list, gradd_dtype_bytes(r->in[0].type.dtype), r->in[0].data);
}

GRADD_KERNELS(cuda, concat,
              GRADD_KERNEL("Concat", "move", .compute = compute_concat, .cost = gradd_cost_move),
              GRADD_KERNEL("Split", "move", .compute = compute_split, .cost = gradd_cost_move));
