/* Scans of tensors and the optimizer's step on a GPU. See step.h. */
#include "kernels/cuda/step.h"

#include "kernels/math/adam.h"

enum { THREADS = 256 };

static inline unsigned blocks_of(int64_t n) {
    return gpu_blocks(n, THREADS);
}

/* ---- the first NaN and the first infinity ------------------------------------------------------
 */

typedef struct first_s {
    unsigned long long nan, inf;
    int32_t negative;
} first_t;

template <class T>
__global__ void GPU_BLOCK(THREADS) find_first(int64_t n, const T *x, first_t *first) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all) {
        const gpu_real<T> v = gpu_get(x[i]);
        if (v - v == 0) continue; /* finite */
        atomicMin(v != v ? &first->nan : &first->inf, (unsigned long long)i);
    }
}

template <class T> __global__ void GPU_BLOCK(1) look_at_first(const T *x, first_t *first) {
    if (first->inf != ~0ull) first->negative = gpu_get(x[first->inf]) < 0;
}

gradd_status_t gpu_find_nonfinite(const gradd_view_t *view, gradd_nonfinite_t *out) {
    const int64_t n = gradd_type_count(&view->type);
    first_t found = {~0ull, ~0ull, 0}, *there = (first_t *)gpu_call.scratch;
    *out = gradd_nonfinite_t{-1, -1, false};
    if (!n || !gradd_dtype_is_float(view->type.dtype)) return GRADD_OK;
    GRADD_TRY(gpu_write(there, &found, sizeof found));
    GRADD_TRY(gpu_switch(gpu_floats(), view->type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        GPU_LAUNCH((find_first<T>), blocks_of(n), THREADS, n, (const T *)view->data, there);
        GPU_LAUNCH((look_at_first<T>), 1, 1, (const T *)view->data, there);
        return gpu_launched("the finite check");
    }));
    GRADD_TRY(gpu_read(&found, there, sizeof found));
    *out = gradd_nonfinite_t{(int64_t)found.nan, (int64_t)found.inf, found.negative != 0};
    return GRADD_OK;
}

/* ---- sums of squares ---------------------------------------------------------------------------
 */

/* The CPU's order, so that a step that another device finishes is clipped by the same factor: eight
 * lanes walk a block of 4,096 elements, their sums are added one by one, and so are blocks. */
enum { NORM_BLOCK = 4096, LANES = 8, PARTS = GPU_SCRATCH / 8 - 2 };

typedef struct norm_sums_s {
    double all, span; /* sums of the spans before, and of this one */
    double part[PARTS];
} norm_sums_t;

template <class T>
__global__ void GPU_BLOCK(THREADS)
    square_blocks(int64_t n, int64_t blocks, const T *x, norm_sums_t *to) {
    const int64_t all = (int64_t)gridDim.x * (THREADS / LANES);
    const int lane = threadIdx.x % LANES;
    const int64_t from = (int64_t)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
    const int64_t rounds = (blocks + all - 1) / all; /* whole warps exchange their lanes' sums */
    for (int64_t round = 0; round < rounds; round++) {
        const int64_t k = from + round * all, first = k * NORM_BLOCK;
        const int64_t left = n - first;
        const int64_t count = left < 0 ? 0 : left < NORM_BLOCK ? left : NORM_BLOCK;
        const int64_t whole = count / LANES * LANES;
        double mine = 0, sum = 0;
        for (int64_t i = lane; i < whole; i += LANES) {
            const double v = gpu_get(x[first + i]);
            mine += v * v;
        }
        for (int64_t i = whole; i < count; i++) {
            const double v = gpu_get(x[first + i]);
            sum += v * v;
        }
#pragma unroll
        for (int l = 0; l < LANES; l++)
            sum += __shfl_sync(GPU_ALL, mine, (int)threadIdx.x % GPU_WARP / LANES * LANES + l);
        if (lane == 0 && k < blocks) to->part[k] = sum;
    }
}

/* `ends`: of the span. */
__global__ void GPU_BLOCK(1) add_blocks(int64_t blocks, bool ends, norm_sums_t *to) {
    double sum = to->span;
#pragma unroll 8
    for (int64_t k = 0; k < blocks; k++)
        sum += to->part[k];
    if (ends) to->all += sum;
    to->span = ends ? 0 : sum;
}

template <class T> static gradd_status_t add_span(const gradd_span_t *span, norm_sums_t *to) {
    const int64_t most = (int64_t)PARTS * NORM_BLOCK;
    for (int64_t from = 0; from < span->n; from += most) {
        const int64_t n = span->n - from < most ? span->n - from : most;
        const int64_t blocks = (n + NORM_BLOCK - 1) / NORM_BLOCK;
        GPU_LAUNCH((square_blocks<T>), gpu_blocks(blocks, THREADS / LANES), THREADS, n, blocks,
                   (const T *)span->data + from, to);
        GPU_LAUNCH(add_blocks, 1, 1, blocks, from + n == span->n, to);
    }
    return gpu_launched("a norm");
}

gradd_status_t gpu_norm2(const gradd_span_t *list, int n, double *out) {
    static const double zeros[2] = {0, 0};
    norm_sums_t *there = (norm_sums_t *)gpu_call.scratch;
    GRADD_TRY(gpu_write(there, zeros, sizeof zeros));
    for (int i = 0; i < n; i++)
        GRADD_TRY(gpu_switch(gpu_floats(), list[i].dtype, [&](auto t) {
            return add_span<typename decltype(t)::type>(&list[i], there);
        }));
    return gpu_read(out, &there->all, sizeof *out);
}

/* ---- Adam --------------------------------------------------------------------------------------
 */

GRADD_HD float master_of(float master, gradd_bf16_t p) {
    return gradd_adam_master_bf16(master, p);
}
GRADD_HD float master_of(float master, gradd_f16_t p) {
    return gradd_adam_master_f16(master, p);
}

/* H: of p16 and g16. Four neighbours at a time where all addresses allow it, else one. */
template <class H, int W>
__global__ void GPU_BLOCK(THREADS) update(gradd_adam_coefficients_t c, gradd_adam_span_t s) {
    typedef gpu_pack<float, W> wide;
    typedef gpu_pack<H, W> narrow;
    const int64_t all = (int64_t)gridDim.x * blockDim.x, n = s.n / W;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all) {
        wide p = {}, g, m = ((const wide *)s.m)[i], v = ((const wide *)s.v)[i];
        narrow p16 = {}, g16 = {};
        if (s.p) p = ((const wide *)s.p)[i];
        if (s.p16) p16 = ((const narrow *)s.p16)[i];
        if (s.g16)
            g16 = ((const narrow *)s.g16)[i];
        else
            g = ((const wide *)s.g)[i];
#pragma unroll
        for (int k = 0; k < W; k++) {
            if (s.p16) p.v[k] = s.p ? master_of(p.v[k], p16.v[k]) : gpu_get(p16.v[k]);
            const float d = s.g16 ? gpu_get(g16.v[k]) : g.v[k];
            const gradd_adam_one_t one = gradd_adam_one(&c, p.v[k], d, m.v[k], v.v[k]);
            p.v[k] = one.p;
            m.v[k] = one.m;
            v.v[k] = one.v;
        }
        ((wide *)s.out_p)[i] = p;
        ((wide *)s.out_m)[i] = m;
        ((wide *)s.out_v)[i] = v;
    }
}

static bool fits_packs(const gradd_adam_span_t *s) {
    const void *const wide[] = {s->p, s->m, s->v, s->g, s->out_p, s->out_m, s->out_v};
    for (const void *p : wide)
        if (!gpu_aligned(p, 16)) return false;
    return s->n % 4 == 0 && gpu_aligned(s->p16, 8) && gpu_aligned(s->g16, 8);
}

template <class H>
static void update_in(const gradd_adam_coefficients_t &c, const gradd_adam_span_t *span) {
    if (fits_packs(span))
        GPU_LAUNCH((update<H, 4>), blocks_of(span->n / 4), THREADS, c, *span);
    else
        GPU_LAUNCH((update<H, 1>), blocks_of(span->n), THREADS, c, *span);
}

gradd_status_t gpu_adam(const gradd_adam_t *hyper, float grad_scale,
                        const gradd_adam_span_t *span) {
    const gradd_adam_coefficients_t c = gradd_adam_coefficients(hyper, grad_scale);
    if (!span->n) return GRADD_OK;
    if (span->half == GRADD_DT_F16)
        update_in<gradd_f16_t>(c, span);
    else
        update_in<gradd_bf16_t>(c, span);
    return gpu_launched("Adam");
}

__global__ void GPU_BLOCK(THREADS) commit(gradd_adam_commit_t c) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < c.n; i += all) {
        const float p = c.p[i];
        if (c.out_master) c.out_master[i] = p;
        if (c.dtype == GRADD_DT_BF16)
            gpu_put((gradd_bf16_t *)c.out_p + i, p);
        else if (c.dtype == GRADD_DT_F16)
            gpu_put((gradd_f16_t *)c.out_p + i, p);
        else
            ((float *)c.out_p)[i] = p;
        c.out_m[i] = c.m[i];
        c.out_v[i] = c.v[i];
    }
}

gradd_status_t gpu_adam_commit(const gradd_adam_commit_t *c) {
    if (!c->n) return GRADD_OK;
    GPU_LAUNCH(commit, blocks_of(c->n), THREADS, *c);
    return gpu_launched("Adam");
}

__global__ void GPU_BLOCK(1) store(uint64_t *word, uint64_t value) {
    __threadfence_system();
    *(volatile uint64_t *)word = value;
}

gradd_status_t gpu_store(uint64_t *word, uint64_t value) {
    GPU_LAUNCH(store, 1, 1, word, value);
    return gpu_launched("a word");
}
