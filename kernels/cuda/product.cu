/* See product.h. */
#include "kernels/cuda/product.h"

#include <stdio.h>
#include <stdlib.h>

#include "kernels/cuda/map.h"
#include "kernels/cuda/product/choose.h"

enum { SCRATCH_ALIGN = 256 }; /* of what the library gets */

/* A product that is ready. `outer` batches are calls of their own. The first choice is for operands
 * that lie where tensors begin, or a step of a batch further; the second one for all others: it is
 * made before it is known to be needed, because a launch may not choose anything. */
typedef struct gpu_product_s {
    gradd_gemm_t g;
    gpu_lt_t lt;
    gpu_choice_t choices[2];
    int n_choices;
    int outer;    /* batch dimensions that calls go through */
    bool library; /* cuBLASLt multiplies; else loops do, or nothing is multiplied */
} gpu_product_t;

const char *gpu_product_library(void) {
    static char text[40];
    const size_t v = cublasLtGetVersion();
    snprintf(text, sizeof text, "cuBLASLt %zu.%zu.%zu", v / 10000, v / 100 % 100, v % 100);
    return text;
}

static bool is_empty(const gradd_gemm_t *g) {
    return !g->m || !g->n || !gradd_gemm_batches(g);
}

void gpu_product_unprepare(gradd_prepared_t *prepared) {
    free(prepared->state);
    prepared->state = NULL;
}

static gradd_status_t choose(gpu_product_t *p) {
    const gpu_align_t least = gpu_align_least(&p->g);
    gpu_choice_t *first = &p->choices[0], *second = &p->choices[1];
    first->align = gpu_align_of_steps(&p->g, p->outer);
    second->align = least;
    p->n_choices = 1;
    GRADD_TRY(gpu_lt_choose(&p->g, &p->lt, true, first));
    if (first->align.a <= least.a && first->align.b <= least.b && first->align.c <= least.c)
        return GRADD_OK;
    p->n_choices = 2;
    return gpu_lt_choose(&p->g, &p->lt, false, second);
}

static gradd_status_t prepare(gpu_product_t *p, gpu_after_t after, gradd_prepared_t *out) {
    GRADD_TRY(gpu_lt_describe(&p->g, after, &p->lt));
    GRADD_TRY(choose(p));
    for (int i = 0; i < p->n_choices; i++)
        if (p->choices[i].workspace > out->workspace) out->workspace = p->choices[i].workspace;
    if (out->workspace) out->workspace += SCRATCH_ALIGN - 1;
    return GRADD_OK;
}

/* Where the library has it: a second result is written by 8 elements at least, and in the wider
 * types the accuracy of its tanh is not documented. */
static bool has_after(const gpu_product_t *p, gpu_after_t after) {
    if (after == GPU_AFTER_NOTHING) return true;
    return p->library && gradd_dtype_is_half(p->g.dtype) && !p->g.result && !p->g.accumulate &&
           !p->g.batch_rank && p->g.n % 8 == 0;
}

gradd_status_t gpu_product_prepare(const gradd_gemm_t *g, gradd_prepared_t *out) {
    return gpu_product_prepare_after(g, GPU_AFTER_NOTHING, out);
}

gradd_status_t gpu_product_prepare_after(const gradd_gemm_t *g, gpu_after_t after,
                                         gradd_prepared_t *out) {
    gpu_product_t *p = (gpu_product_t *)calloc(1, sizeof *p);
    if (!p) return GRADD_FAIL(NOMEM, "no memory for a product");
    *out = gradd_prepared_t{0, p, sizeof *p};
    p->g = *g;
    gradd_gemm_simplify(&p->g);
    p->outer = p->g.batch_rank > 1 ? p->g.batch_rank - 1 : 0;
    p->library = gradd_dtype_is_float(g->dtype) && p->g.k && !is_empty(&p->g);
    gradd_status_t status = GRADD_OK;
    if (!has_after(p, after))
        status = GRADD_FAIL(UNSUPPORTED, "cuBLASLt has no gelu behind such a product");
    else if (p->library)
        status = prepare(p, after, out);
    if (status) gpu_product_unprepare(out);
    return status;
}

/* ---- without the library: integers, and sums of nothing ----------------------------------------
 */

typedef struct plain_product_s {
    gradd_gemm_t g;
    int64_t n;
} plain_product_t;

template <class T, class R>
__global__ void GPU_BLOCK(256)
    plain_product(plain_product_t p, R *c, const T *a, const T *b, const T *bias) {
    const gradd_gemm_t &g = p.g;
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < p.n; i += all) {
        const int64_t col = i % g.n, row = i / g.n % g.m;
        int64_t at_a, at_b;
        gradd_gemm_offsets(&g, i / g.n / g.m, &at_a, &at_b);
        at_a += row * g.a_m;
        at_b += col * g.b_n;
        gpu_real<T> sum = 0;
        for (int64_t k = 0; k < g.k; k++)
            sum += gpu_get(a[at_a + k * g.a_k]) * gpu_get(b[at_b + k * g.b_k]);
        if (g.has_bias) sum += gpu_get(bias[col]);
        if (g.accumulate) sum += gpu_get(c[i]);
        gpu_put(&c[i], sum);
    }
}

template <class T, class R>
gradd_status_t plain(const gpu_product_t *p, const gpu_product_call_t *x) {
    const plain_product_t how = {p->g, gradd_gemm_batches(&p->g) * p->g.m * p->g.n};
    GPU_LAUNCH((plain_product<T, R>), gpu_blocks(how.n, 256), 256, how, (R *)x->c, (const T *)x->a,
               (const T *)x->b, (const T *)x->bias);
    return gpu_launched("a product");
}

static gradd_status_t multiply_plainly(const gpu_product_t *p, const gpu_product_call_t *x) {
    if (is_empty(&p->g)) return GRADD_OK;
    return gpu_switch(gpu_numbers(), p->g.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        if (gradd_gemm_result(&p->g) == p->g.dtype) return plain<T, T>(p, x);
        if constexpr (sizeof(T) == 2) return plain<T, float>(p, x);
        return GRADD_FAIL(UNSUPPORTED, "a product of %s with a result of %s",
                          gradd_dtype_name(p->g.dtype), gradd_dtype_name(p->g.result));
    });
}

/* ---- by the library ---------------------------------------------------------------------------
 */

static bool fits(const gpu_choice_t *choice, const gpu_product_call_t *x) {
    const gpu_align_t *align = &choice->align;
    return gpu_aligned(x->a, align->a) && gpu_aligned(x->b, align->b) &&
           gpu_aligned(x->c, align->c) && gpu_aligned(x->bias, align->c);
}

static gradd_status_t multiply(const gpu_product_t *p, const gpu_product_call_t *x) {
    const gpu_choice_t *choice = &p->choices[p->n_choices > 1 && !fits(&p->choices[0], x)];
    GPU_LT(gpu_lt_multiply(&p->g, &p->lt, choice, x), "a product");
    return GRADD_OK;
}

/* One call for each index of the outer batch dimensions. */
static gradd_status_t multiply_batches(const gpu_product_t *p, const gpu_product_call_t *x) {
    const gradd_gemm_t *g = &p->g;
    const int64_t size = (int64_t)gradd_dtype_bytes(g->dtype);
    gradd_gemm_t outer = *g;
    outer.batch_rank = p->outer;
    const int64_t inner = p->outer ? g->batch[p->outer] : 1, total = gradd_gemm_batches(g) / inner;
    const int64_t bytes_c = g->m * g->n * inner * (int64_t)gradd_dtype_bytes(gradd_gemm_result(g));
    for (int64_t i = 0; i < total; i++) {
        gpu_product_call_t one = *x;
        int64_t at_a, at_b;
        gradd_gemm_offsets(&outer, i, &at_a, &at_b);
        one.a = (const char *)x->a + at_a * size;
        one.b = (const char *)x->b + at_b * size;
        one.c = (char *)x->c + i * bytes_c;
        GRADD_TRY(multiply(p, &one));
    }
    return GRADD_OK;
}

gradd_status_t gpu_product(const void *state, const gpu_product_call_t *call) {
    const gpu_product_t *p = (const gpu_product_t *)state;
    gpu_product_call_t x = *call;
    if (!p->library) return multiply_plainly(p, call);
    const uintptr_t scratch = (uintptr_t)x.workspace + SCRATCH_ALIGN - 1;
    x.workspace = (void *)(scratch - scratch % SCRATCH_ALIGN);
    return p->outer ? multiply_batches(p, &x) : multiply(p, &x);
}
