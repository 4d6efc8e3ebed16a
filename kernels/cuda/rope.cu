/* Rope and RopeApart on a GPU: each thread turns a pack of pairs. See kernels/ops/attention/rope.c.
 */
#include "kernels/cuda/map.h"
#include "kernels/describe/rope.h"

enum { THREADS = 256 };

struct rope_t {
    const void *x, *cos, *sin;
    void *y;
    int64_t rows, size, half; /* 2 half elements of each row of size elements are turned */
    int64_t width;            /* of a row of the tables */
    gpu_walk<2> tables;       /* from a row of x to those of cos and sin */
    bool small;               /* numbers are below 2^31 */
    gpu_map_divisor by;       /* packs of half a row, if small */
    gpu_map_divisor by_rest;  /* packs of elements that are not turned */
    bool transposed, clockwise;
};

/* W pairs: their first and their second elements. */
template <class T, int W> struct pairs_t {
    typedef gpu_pack<T, W> pack_t;
    pack_t at[2];

    /* Elements FROM, FROM + 2, ... of two packs that follow each other. */
    template <int FROM> static __device__ pack_t every_second(const pack_t low, const pack_t high) {
        pack_t y;
#pragma unroll
        for (int k = 0, i = FROM; k < W; k++, i += 2)
            y.v[k] = i < W ? low.v[i % W] : high.v[i % W];
        return y;
    }
    /* A pack from element FROM of the pairs one after the other. */
    template <int FROM> __device__ pack_t in_turn() const {
        pack_t y;
#pragma unroll
        for (int k = 0, i = FROM; k < W; k++, i++)
            y.v[k] = at[i % 2].v[i / 2];
        return y;
    }

    /* From pair i on: (i, i + half), or with NEXT neighbours. */
    template <bool NEXT> __device__ void get(const T *x, int64_t i, int64_t half) {
        const pack_t low = *(const pack_t *)(x + (NEXT ? 2 * i : i));
        const pack_t high = *(const pack_t *)(x + (NEXT ? 2 * i + W : half + i));
        at[0] = NEXT ? every_second<0>(low, high) : low;
        at[1] = NEXT ? every_second<1>(low, high) : high;
    }
    template <bool NEXT> __device__ void put(T *y, int64_t i, int64_t half) const {
        pack_t *low = (pack_t *)(y + (NEXT ? 2 * i : i));
        pack_t *high = NEXT ? low + 1 : (pack_t *)(y + half + i);
        *low = NEXT ? in_turn<0>() : at[0];
        *high = NEXT ? in_turn<W>() : at[1];
    }
};

/* SHARED: the tables have one column per pair. */
template <int W, class T, class C, bool FROM, bool TO, bool SHARED>
__global__ void GPU_BLOCK(THREADS, 2) turn(rope_t p) {
    typedef gpu_real<T> R;
    const int64_t all = (int64_t)gridDim.x * blockDim.x, per_row = p.half / W;
    const int64_t first = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const R sign = p.clockwise ? 1 : -1;
    for (int64_t u = first; u < p.rows * per_row; u += all) {
        const int64_t row = p.small ? p.by.quotient(u) : u / per_row, i = (u - row * per_row) * W;
        pairs_t<T, W> x;
        pairs_t<C, W> cos, sin;
        int64_t at[2];
        p.tables.find(row, at);
        const C *c = (const C *)p.cos + at[0] * p.width, *s = (const C *)p.sin + at[1] * p.width;
        x.template get<FROM>((const T *)p.x + row * p.size, i, p.half);
        if (SHARED) {
            cos.at[0] = cos.at[1] = *(const gpu_pack<C, W> *)(c + i);
            sin.at[0] = sin.at[1] = *(const gpu_pack<C, W> *)(s + i);
        } else {
            cos.template get<TO>(c, i, p.half);
            sin.template get<TO>(s, i, p.half);
        }
#pragma unroll
        for (int k = 0; k < W; k++) {
            const R s0 = gpu_get(sin.at[0].v[k]), s1 = gpu_get(sin.at[1].v[k]);
            const R to_a = sign * (p.transposed ? s1 : s0), to_b = sign * (p.transposed ? s0 : s1);
            const R c0 = gpu_get(cos.at[0].v[k]), c1 = gpu_get(cos.at[1].v[k]);
            const R a = gpu_get(x.at[0].v[k]), b = gpu_get(x.at[1].v[k]);
            gpu_put(&x.at[0].v[k], E_TURN_FIRST(a, b, c0, to_a));
            gpu_put(&x.at[1].v[k], E_TURN_SECOND(a, b, c1, to_b));
        }
        x.template put<TO>((T *)p.y + row * p.size, i, p.half);
    }
    const int64_t rest = (p.size - 2 * p.half) / W;
    if (p.x == p.y) return;
    for (int64_t u = first; u < p.rows * rest; u += all) {
        const int64_t row = p.small ? p.by_rest.quotient(u) : u / rest;
        const int64_t at = row * p.size + 2 * p.half + (u - row * rest) * W;
        *(gpu_pack<T, W> *)((T *)p.y + at) = *(const gpu_pack<T, W> *)((const T *)p.x + at);
    }
}

/* ---- of the host ---- */

/* Without its last axis. */
static gradd_view_t rows_of(const gradd_view_t &v) {
    gradd_view_t rows = v;
    rows.type.rank--;
    return rows;
}

static rope_t describe(const gradd_launch_t *r, bool shared) {
    const gradd_type_t *x = &r->in[GRADD_ROPE_X].type, *table = &r->in[GRADD_ROPE_COS].type;
    const gradd_view_t tables[2] = {rows_of(r->in[GRADD_ROPE_COS]), rows_of(r->in[GRADD_ROPE_SIN])};
    rope_t p = {.x = r->in[GRADD_ROPE_X].data,
                .cos = r->in[GRADD_ROPE_COS].data,
                .sin = r->in[GRADD_ROPE_SIN].data};
    p.y = r->out[0].data;
    p.size = x->dims[x->rank - 1];
    p.rows = p.size ? gradd_type_count(x) / p.size : 0;
    p.width = table->dims[table->rank - 1];
    p.half = shared ? p.width : p.width / 2;
    p.tables = gpu_walk_of<2>(rows_of(r->in[GRADD_ROPE_X]).type, tables);
    p.transposed = gradd_attr_int(r->attrs, GRADD_ROPE_TRANSPOSED, 0);
    p.clockwise = p.transposed != (gradd_attr_int(r->attrs, GRADD_ROPE_INVERSE, 0) != 0);
    return p;
}

template <int W, class T, class C>
static gradd_status_t turn_by(const gradd_launch_t *r, rope_t p, bool apart, bool shared) {
    const int64_t per_row = p.half / W, rest = (p.size - 2 * p.half) / W;
    const int64_t most = p.rows * (per_row > rest ? per_row : rest);
    const unsigned blocks = gpu_blocks(most, THREADS);
    const bool pairs = gradd_attr_int(r->attrs, GRADD_ROPE_INTERLEAVED, 0);
    p.small = most <= INT32_MAX;
    if (p.small && per_row) p.by = gpu_map_divisor_of(per_row);
    if (p.small && rest) p.by_rest = gpu_map_divisor_of(rest);
    if (apart && p.transposed)
        GPU_LAUNCH((turn<W, T, C, false, true, true>), blocks, THREADS, p);
    else if (apart)
        GPU_LAUNCH((turn<W, T, C, true, false, true>), blocks, THREADS, p);
    else if (shared && pairs)
        GPU_LAUNCH((turn<W, T, C, true, true, true>), blocks, THREADS, p);
    else if (shared)
        GPU_LAUNCH((turn<W, T, C, false, false, true>), blocks, THREADS, p);
    else if (pairs)
        GPU_LAUNCH((turn<W, T, C, true, true, false>), blocks, THREADS, p);
    else
        GPU_LAUNCH((turn<W, T, C, false, false, false>), blocks, THREADS, p);
    return gpu_launched(r->op->name);
}

template <class T, class C> static gradd_status_t turn_typed(const gradd_launch_t *r, bool apart) {
    constexpr int W = gpu_width<T>;
    const bool shared = apart || gradd_attr_int(r->attrs, GRADD_ROPE_SHARED, 0);
    const rope_t p = describe(r, shared);
    const size_t table = W * sizeof(C);
    const bool wide = p.half % W == 0 && p.size % W == 0 && gpu_aligned(p.x, 16) &&
                      gpu_aligned(p.y, 16) && gpu_aligned(p.cos, table) &&
                      gpu_aligned(p.sin, table);
    if (!p.rows) return GRADD_OK;
    return wide ? turn_by<W, T, C>(r, p, apart, shared) : turn_by<1, T, C>(r, p, apart, shared);
}

/* The tables have the type of x, or f32 beside a narrower one. */
static gradd_status_t compute(const gradd_launch_t *r, bool apart) {
    const gradd_dtype_t dtype = r->in[GRADD_ROPE_X].type.dtype;
    return gpu_switch(gpu_floats(), dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        if (r->in[GRADD_ROPE_COS].type.dtype == dtype) return turn_typed<T, T>(r, apart);
        return turn_typed<T, gpu_real<T>>(r, apart);
    });
}

static gradd_status_t compute_rope(const gradd_launch_t *r) {
    return compute(r, false);
}
static gradd_status_t compute_apart(const gradd_launch_t *r) {
    return compute(r, true);
}

GRADD_KERNELS(cuda, rope,
              GRADD_KERNEL("Rope", "map", .types = {GRADD_T_ANY}, .inplace = 1,
                           .compute = compute_rope),
              GRADD_KERNEL("RopeApart", "map", .types = {GRADD_T_ANY}, .compute = compute_apart));
