/* LayerNormalization, RMSNormalization and their gradients on a GPU. See kernels/ops/norm/norm.c.
 *
 * A team normalises a row, which stays in registers if it is not too long. In the gradient the same
 * threads see the same columns of all rows of a block, so they keep the sums for scale and bias
 * beside it: one part per block, [parts, n], which a second launch adds. Longer rows are read once
 * more for these sums. How many parts there are depends on the shape alone.
 */
#include "kernels/cuda/row/row_teams.h"
#include "kernels/describe/lanes.h"
#include "kernels/describe/norm.h"

template <class T> struct norm_t {
    typedef gpu_real<T> A;
    const T *x, *dy;
    gpu_vector<T> scale, bias;
    T *y;          /* y or dx */
    A *mean, *inv; /* written by forward, read by backward */
    A *parts_scale, *parts_bias;
    int64_t rows, n, parts;
    double epsilon;
};

/* ---- forward --------------------------------------------------------------------------------- */

template <class S, class T, bool CENTRED>
__global__ void GPU_BLOCK(S::THREADS) norm_rows(norm_t<T> p) {
    typedef gpu_real<T> A;
    const int64_t packs = p.n / S::W;
    for (int64_t r = gpu_team<S::TEAM>(); r < p.rows; r += gpu_teams<S::TEAM>()) {
        gpu_row<T, S::W, S::TEAM, S::KEEP> row;
        row.open(p.x + r * p.n, packs);
        double total = 0;
        A mean = 0;
        if constexpr (CENTRED) {
            gpu_each_pack<S::TEAM, S::KEEP>(packs, [&](int j, int64_t i) {
                const gpu_pack<T, S::W> x = row.get(j, i);
                A sum = 0;
#pragma unroll
                for (int k = 0; k < S::W; k++)
                    sum += gpu_get(x.v[k]);
                total += (double)sum;
            });
            mean = (A)gpu_team_sum<S::TEAM>(total) / (A)p.n;
            total = 0;
        }
        gpu_each_pack<S::TEAM, S::KEEP>(packs, [&](int j, int64_t i) {
            const gpu_pack<T, S::W> x = row.get(j, i);
            A sum = 0;
#pragma unroll
            for (int k = 0; k < S::W; k++)
                sum += (gpu_get(x.v[k]) - mean) * (gpu_get(x.v[k]) - mean);
            total += (double)sum;
        });
        const A square = (A)gpu_team_sum<S::TEAM>(total) / (A)p.n;
        const A inv = 1 / vsqrt(square + (A)p.epsilon);
        gpu_pack<T, S::W> *y = (gpu_pack<T, S::W> *)(p.y + r * p.n);
        gpu_each_pack<S::TEAM, S::KEEP>(packs, [&](int j, int64_t i) {
            gpu_pack<T, S::W> v = row.get(j, i);
            A scale[S::W], bias[S::W] = {};
            p.scale.get(scale, i);
            if (p.bias.at) p.bias.get(bias, i);
#pragma unroll
            for (int k = 0; k < S::W; k++)
                gpu_put(&v.v[k], (gpu_get(v.v[k]) - mean) * inv * scale[k] + bias[k]);
            y[i] = v;
        });
        if (gpu_lane<S::TEAM>() == 0) {
            if (p.mean) p.mean[r] = mean;
            if (p.inv) p.inv[r] = inv;
        }
    }
}

/* ---- backward -------------------------------------------------------------------------------- */

/* dx = (w - mean(w) - h * mean(w * h)) * inv with h = (x - mean) * inv and w = dy * scale, without
 * mean(w) for RMS. add(j, k, dy, h) sees every element. */
template <class S, class T, bool CENTRED, class F>
GPU_FN void norm_row_grad(const norm_t<T> &p, int64_t r, F add) {
    typedef gpu_real<T> A;
    const int64_t packs = p.n / S::W;
    gpu_row<T, S::W, S::TEAM, S::KEEP> row_x, row_dy;
    row_x.open(p.x + r * p.n, packs);
    row_dy.open(p.dy + r * p.n, packs);
    const A mean = CENTRED ? p.mean[r] : (A)0, inv = p.inv[r];
    double total_w = 0, total_h = 0;
    gpu_each_pack<S::TEAM, S::KEEP>(packs, [&](int j, int64_t i) {
        const gpu_pack<T, S::W> x = row_x.get(j, i), dy = row_dy.get(j, i);
        A scale[S::W], sum_w = 0, sum_h = 0;
        p.scale.get(scale, i);
#pragma unroll
        for (int k = 0; k < S::W; k++) {
            const A h = (gpu_get(x.v[k]) - mean) * inv, d = gpu_get(dy.v[k]), w = d * scale[k];
            sum_w += w;
            sum_h += w * h;
            add(j, k, d, h);
        }
        total_w += (double)sum_w;
        total_h += (double)sum_h;
    });
    if (!p.y) return;
    const A mean_w = CENTRED ? (A)gpu_team_sum<S::TEAM>(total_w) / (A)p.n : (A)0;
    const A mean_h = (A)gpu_team_sum<S::TEAM>(total_h) / (A)p.n;
    gpu_pack<T, S::W> *dx = (gpu_pack<T, S::W> *)(p.y + r * p.n);
    gpu_each_pack<S::TEAM, S::KEEP>(packs, [&](int j, int64_t i) {
        const gpu_pack<T, S::W> x = row_x.get(j, i), dy = row_dy.get(j, i);
        gpu_pack<T, S::W> v;
        A scale[S::W];
        p.scale.get(scale, i);
#pragma unroll
        for (int k = 0; k < S::W; k++) {
            const A h = (gpu_get(x.v[k]) - mean) * inv, w = gpu_get(dy.v[k]) * scale[k];
            gpu_put(&v.v[k], (w - mean_w - h * mean_h) * inv);
        }
        dx[i] = v;
    });
}

template <class S, class T, bool CENTRED>
__global__ void GPU_BLOCK(S::THREADS) norm_rows_grad(norm_t<T> p) {
    typedef gpu_real<T> A;
    for (int64_t r = gpu_team<S::TEAM>(); r < p.rows; r += gpu_teams<S::TEAM>())
        norm_row_grad<S, T, CENTRED>(p, r, [](int, int, A, A) {});
}

/* The sums of a block's teams, one after the other, to a row of parts. */
template <class S, class A>
GPU_FN void put_part(A *part, const A (&sum)[S::KEEP * S::W], int64_t packs) {
    constexpr int TEAMS = S::THREADS / S::TEAM, LENGTH = TEAMS > 1 ? S::TEAM * S::KEEP * S::W : 1;
    GPU_SHARED(A, shared, LENGTH);
    for (int team = 0; team < TEAMS; team++) {
        if ((int)threadIdx.x / S::TEAM == team)
            gpu_each_pack<S::TEAM, S::KEEP>(packs, [&](int j, int64_t i) {
#pragma unroll
                for (int k = 0; k < S::W; k++) {
                    A v = sum[j * S::W + k];
                    if (team > 0) v += shared[i * S::W + k];
                    if (team + 1 < TEAMS)
                        shared[i * S::W + k] = v;
                    else
                        part[i * S::W + k] = v;
                }
            });
        if (TEAMS > 1) __syncthreads();
    }
}

template <class S, class T, bool CENTRED>
__global__ void GPU_BLOCK(S::THREADS) norm_rows_grad_sums(norm_t<T> p) {
    typedef gpu_real<T> A;
    constexpr int EACH = S::KEEP * S::W, TEAMS = S::THREADS / S::TEAM;
    const int64_t part = blockIdx.x, end = p.rows * (part + 1) / p.parts;
    A dscale[EACH] = {}, dbias[EACH] = {};
    for (int64_t r = p.rows * part / p.parts + threadIdx.x / S::TEAM; r < end; r += TEAMS)
        norm_row_grad<S, T, CENTRED>(p, r, [&](int j, int k, A d, A h) {
            dscale[j * S::W + k] += d * h;
            if (CENTRED) dbias[j * S::W + k] += d;
        });
    if (p.parts_scale) put_part<S>(p.parts_scale + part * p.n, dscale, p.n / S::W);
    if (CENTRED && p.parts_bias) put_part<S>(p.parts_bias + part * p.n, dbias, p.n / S::W);
}

/* The sums alone: a block has 32 columns of the rows of one part. */
template <class T, bool CENTRED>
__global__ void GPU_BLOCK(GPU_ROW_THREADS) norm_columns_grad(norm_t<T> p) {
    typedef gpu_real<T> A;
    const int64_t blocks = (p.n + GPU_WARP - 1) / GPU_WARP;
    for (int64_t u = blockIdx.x; u < blocks * p.parts; u += gridDim.x) {
        const int64_t part = u / blocks,
                      c = (u - part * blocks) * GPU_WARP + threadIdx.x % GPU_WARP;
        const int64_t end = c < p.n ? p.rows * (part + 1) / p.parts : 0;
        A dscale = 0, dbias = 0;
        for (int64_t r = p.rows * part / p.parts + gpu_slice(); r < end; r += GPU_SLICES) {
            const A d = gpu_get(p.dy[r * p.n + c]), mean = CENTRED ? p.mean[r] : (A)0;
            dscale += d * ((gpu_get(p.x[r * p.n + c]) - mean) * p.inv[r]);
            dbias += d;
        }
        dscale = gpu_slices_join(dscale, [](A a, A b) { return a + b; });
        dbias = gpu_slices_join(dbias, [](A a, A b) { return a + b; });
        if (gpu_slice() == 0 && c < p.n) {
            if (p.parts_scale) p.parts_scale[part * p.n + c] = dscale;
            if (CENTRED && p.parts_bias) p.parts_bias[part * p.n + c] = dbias;
        }
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

enum { KEPT = 128, KEPT_GRAD = 64, PART_ROWS = 8, MAX_PARTS = 256 };

/* Blocks of short rows are small: more of them. */
static int64_t count_parts(int64_t rows, int64_t n) {
    const int64_t parts = (rows + PART_ROWS - 1) / PART_ROWS, most = MAX_PARTS * (n > 2048 ? 1 : 2);
    return parts < 1 ? 1 : parts > most ? most : parts;
}

static void *output(const gradd_launch_t *r, int j) {
    return j < r->n_out ? r->out[j].data : nullptr;
}

/* x, scale: which operands. */
template <class T>
gradd_status_t read_norm(const gradd_launch_t *r, int x, int scale, norm_t<T> *p) {
    gradd_lanes_t s;
    GRADD_TRY(gradd_lanes_of_axis(&r->in[x].type, r->attrs, -1, &s));
    *p = norm_t<T>();
    p->x = (const T *)r->in[x].data;
    p->scale = gpu_vector_of<T>(r->in[scale]);
    p->y = (T *)r->out[GRADD_NORM_Y].data;
    p->rows = s.outer;
    p->n = s.n * s.inner;
    p->parts = count_parts(p->rows, p->n);
    p->epsilon = gradd_attr_float(r->attrs, GRADD_NORM_EPSILON, 1e-5);
    return GRADD_OK;
}

template <class T> bool is_wide(const norm_t<T> &p) {
    return gpu_aligned(p.x, 16) && gpu_aligned(p.dy, 16) && gpu_aligned(p.y, 16) &&
           gpu_aligned(p.scale.at, 16) && gpu_aligned(p.bias.at, 16);
}

template <bool CENTRED> gradd_status_t forward(const gradd_launch_t *r) {
    return gpu_switch(gpu_floats(), r->in[GRADD_NORM_X].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        norm_t<T> p;
        GRADD_TRY(read_norm(r, GRADD_NORM_X, GRADD_NORM_SCALE, &p));
        if (CENTRED && r->n_in > GRADD_NORM_BIAS) p.bias = gpu_vector_of<T>(r->in[GRADD_NORM_BIAS]);
        p.mean = CENTRED ? (gpu_real<T> *)output(r, GRADD_LAYER_NORM_MEAN) : nullptr;
        p.inv =
            (gpu_real<T> *)output(r, CENTRED ? (int)GRADD_LAYER_NORM_INV : (int)GRADD_RMS_NORM_INV);
        if (!p.rows) return GRADD_OK;
        return gpu_by_row<T, KEPT>(p.n, is_wide(p), [&](auto shape) {
            typedef decltype(shape) S;
            GPU_LAUNCH((norm_rows<S, T, CENTRED>), S::blocks(p.rows), S::THREADS, p);
            return gpu_launched(r->op->name);
        });
    });
}

/* dx, and the parts of dscale and dbias where there is room for them. */
template <bool CENTRED, class T> gradd_status_t launch_grad(const norm_t<T> &p, const char *what) {
    return gpu_by_row<T, KEPT_GRAD, true>(p.n, is_wide(p), [&](auto shape) {
        typedef decltype(shape) S;
        const bool sums = p.parts_scale || p.parts_bias;
        if constexpr (S::KEEP > 0) {
            if (sums) {
                GPU_LAUNCH((norm_rows_grad_sums<S, T, CENTRED>), (unsigned)p.parts, S::THREADS, p);
                return gpu_launched(what);
            }
        } else if (sums) { /* before dx takes the place of an operand */
            GPU_LAUNCH((norm_columns_grad<T, CENTRED>), gpu_blocks(p.n * p.parts, GPU_WARP),
                       GPU_ROW_THREADS, p);
        }
        if (p.y && p.rows)
            GPU_LAUNCH((norm_rows_grad<S, T, CENTRED>), S::blocks(p.rows), S::THREADS, p);
        return gpu_launched(what);
    });
}

template <class A>
gradd_status_t add_parts(const gradd_launch_t *r, int j, const A *parts, int64_t rows, int64_t n) {
    if (!parts) return GRADD_OK;
    return gpu_switch(gpu_floats(), r->out[j].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type U;
        GPU_LAUNCH((gpu_add_rows<U, A>), gpu_column_blocks(n), GPU_ROW_THREADS, (U *)r->out[j].data,
                   parts, rows, n);
        return gpu_launched(r->op->name);
    });
}

/* Outputs: dx, dscale, dbias; any of them may be unwanted. */
template <bool CENTRED> gradd_status_t backward(const gradd_launch_t *r) {
    return gpu_switch(gpu_floats(), r->in[GRADD_NORM_GRAD_X].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        typedef gpu_real<T> A;
        norm_t<T> p;
        GRADD_TRY(read_norm(r, GRADD_NORM_GRAD_X, GRADD_NORM_GRAD_SCALE, &p));
        A *room = (A *)r->workspace;
        p.dy = (const T *)r->in[GRADD_NORM_GRAD_DY].data;
        p.mean = CENTRED ? (A *)r->in[GRADD_LAYER_NORM_GRAD_MEAN].data : nullptr;
        p.inv = (A *)r->in[CENTRED ? (int)GRADD_LAYER_NORM_GRAD_INV : (int)GRADD_RMS_NORM_GRAD_INV]
                    .data;
        p.parts_scale = output(r, GRADD_NORM_DSCALE) ? room : nullptr;
        p.parts_bias = output(r, GRADD_NORM_DBIAS) ? room + p.parts * p.n : nullptr;
        GRADD_TRY(launch_grad<CENTRED>(p, r->op->name));
        GRADD_TRY(add_parts(r, GRADD_NORM_DSCALE, p.parts_scale, p.parts, p.n));
        return add_parts(r, GRADD_NORM_DBIAS, p.parts_bias, p.parts, p.n);
    });
}

/* Parts of dscale and dbias. */
static size_t workspace_backward(const gradd_infer_t *c) {
    const size_t bytes = c->in[GRADD_NORM_GRAD_X].type.dtype == GRADD_DT_F64 ? 8 : 4;
    gradd_lanes_t s;
    if (gradd_lanes_of_axis(&c->in[GRADD_NORM_GRAD_X].type, c->attrs, -1, &s)) return 0;
    return 2 * (size_t)(count_parts(s.outer, s.n * s.inner) * s.n * s.inner) * bytes;
}

#define STATISTICS (GRADD_DTB(F32) | GRADD_DTB(F64))
#define TYPES_GRAD {GPU_T_FLOAT, GPU_T_FLOAT, GPU_T_FLOAT, STATISTICS}

GRADD_KERNELS(cuda, norm,
              GRADD_KERNEL("LayerNormalization", "rows", .inplace = 1, .compute = forward<true>),
              GRADD_KERNEL("LayerNormGrad", "rows", .types = TYPES_GRAD, .inplace = 3,
                           .compute = backward<true>, .workspace = workspace_backward),
              GRADD_KERNEL("RMSNormalization", "rows", .inplace = 1, .compute = forward<false>),
              GRADD_KERNEL("RMSNormGrad", "rows", .types = TYPES_GRAD, .inplace = 3,
                           .compute = backward<false>, .workspace = workspace_backward));
