/* Matrix products against the plain definition: transposed, batched, broadcast, odd and empty
 * shapes, bias, alpha and accumulation, in both implementations; repeatable to the bit, whatever
 * the length of vectors. */
#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/half.h"
#include "kernels/describe/dispatch.h"
#include "tests/test.h"

#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef gradd_status_t (*product_fn)(const gradd_gemm_t *, const void *, const void *, const void *,
                                     void *);

static gradd_gemm_t matrices(gradd_dtype_t dtype, int64_t batch, const int64_t *sizes, bool trans_a,
                             bool trans_b) {
    const int64_t m = sizes[0], n = sizes[1], k = sizes[2];
    gradd_gemm_t g = {.dtype = dtype, .m = m, .n = n, .k = k, .alpha = 1};
    g.a_m = trans_a ? 1 : k, g.a_k = trans_a ? m : 1;
    g.b_k = trans_b ? 1 : n, g.b_n = trans_b ? k : 1;
    if (batch != 1) {
        g.batch_rank = 1;
        g.batch[0] = batch, g.a_batch[0] = m * k, g.b_batch[0] = n * k;
    }
    return g;
}

static double at(const void *x, gradd_dtype_t dtype, int64_t i) {
    if (gradd_dtype_is_half(dtype)) return (double)gradd_half_f32((const uint16_t *)x + i, dtype);
    return dtype == GRADD_DT_F32 ? (double)((const float *)x)[i] : ((const double *)x)[i];
}

static void *numbers(gradd_dtype_t dtype, int64_t n, unsigned seed) {
    void *x = malloc((size_t)(n + 1) * 8);
    for (int64_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        double v = (double)(seed >> 8) / 8388608.0 - 1;
        if (dtype == GRADD_DT_F32)
            ((float *)x)[i] = (float)v;
        else if (gradd_dtype_is_half(dtype))
            gradd_half_put((uint16_t *)x + i, dtype, (float)v);
        else
            ((double *)x)[i] = v;
    }
    return x;
}

enum { FENCE = 64, FENCE_BYTE = 0xa5 };

/* Scratch of so many bytes; what lies behind it stays as it is. */
static void *fenced(size_t bytes) {
    char *workspace = aligned_alloc(64, (bytes + FENCE + 63) / 64 * 64);
    if (workspace) memset(workspace + bytes, FENCE_BYTE, FENCE);
    return workspace;
}

static void check_fence(void *workspace, size_t bytes) {
    for (int i = 0; i < FENCE; i++)
        CHECK_EQ_INT(((const unsigned char *)workspace)[bytes + (size_t)i], FENCE_BYTE);
    free(workspace);
}

/* Prepared, called and given back. */
static gradd_status_t once(const gradd_gemm_t *g, const void *a, const void *b, const void *bias,
                           void *c) {
    gradd_prepared_t ready;
    GRADD_TRY(gradd_gemm_prepare(g, &ready));
    void *workspace = fenced(ready.workspace);
    gradd_status_t status = gradd_gemm(ready.state, a, b, bias, c, workspace);
    check_fence(workspace, ready.workspace);
    gradd_gemm_unprepare(&ready);
    return status;
}

static gradd_status_t blocked(const gradd_gemm_t *g, const void *a, const void *b, const void *bias,
                              void *c) {
    const size_t bytes = gradd_gemm_blocked_workspace(g);
    void *workspace = fenced(bytes);
    gradd_status_t status = gradd_gemm_blocked(g, a, b, bias, c, workspace);
    check_fence(workspace, bytes);
    return status;
}

static void compare(product_fn fn, const gradd_gemm_t *g, int64_t batches) {
    gradd_dtype_t result = g->result ? g->result : g->dtype;
    size_t size = gradd_dtype_bytes(result);
    int64_t n_c = batches * g->m * g->n;
    void *a = numbers(g->dtype, batches * g->m * g->k, 1);
    void *b = numbers(g->dtype, batches * g->n * g->k, 2);
    void *bias = numbers(g->dtype, g->n, 3), *start = numbers(result, n_c, 4);
    void *c = malloc((size_t)n_c * size + 8), *d = malloc((size_t)n_c * size + 8);
    void *e = malloc((size_t)n_c * size + 8);
    memcpy(c, start, (size_t)n_c * size);
    memcpy(d, start, (size_t)n_c * size);
    memcpy(e, start, (size_t)n_c * size);
    CHECK_OK(gradd_gemm_ref(g, a, b, bias, c));
    CHECK_OK(fn(g, a, b, bias, d));
    gradd_narrow = true;
    CHECK_OK(fn(g, a, b, bias, e));
    gradd_narrow = false;
    CHECK(!n_c || !memcmp(d, e, (size_t)n_c * size));
    double tol = (result == GRADD_DT_F64 ? 1e-14 : 1e-6) * (2 + sqrt((double)g->k)) * 4;
    double rounding = result == GRADD_DT_BF16  ? 0x1p-7
                      : result == GRADD_DT_F16 ? 0x1p-10
                                               : 0; /* one last place: the sums differ in order */
    for (int64_t i = 0; i < n_c; i++) {
        double want = at(c, result, i), got = at(d, result, i);
        if (fabs(want - got) <= tol + rounding * fabs(want)) continue;
        test_fail(__FILE__, __LINE__,
                  "[%lld x %lld x %lld] x %lld, strides %lld,%lld %lld,%lld: "
                  "element %lld is %.9g, expected %.9g",
                  (long long)g->m, (long long)g->n, (long long)g->k, (long long)batches,
                  (long long)g->a_m, (long long)g->a_k, (long long)g->b_k, (long long)g->b_n,
                  (long long)i, got, want);
    }
    free(a), free(b), free(bias), free(start), free(c), free(d), free(e);
}

static void sweep(product_fn fn, gradd_dtype_t dtype, gradd_dtype_t result) {
    static const int64_t sizes[][3] = {
        {1,  1,   1  },
        {1,  7,   5  },
        {7,  1,   5  },
        {5,  3,   1  },
        {3,  4,   5  },
        {17, 33,  9  },
        {96, 128, 64 },
        {97, 129, 257},
        {6,  16,  256},
        {33, 300, 13 },
        {0,  3,   2  },
        {2,  3,   0  }
    };
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        for (int v = 0; v < 32; v++) {
            int64_t batch = v & 4 ? 3 : 1;
            omp_set_num_threads(v % 8 == 4 ? 2 : 1);
            gradd_gemm_t g = matrices(dtype, batch, sizes[i], v & 1, v & 2);
            g.result = result;
            g.has_bias = v & 8;
            g.accumulate = v & 16;
            compare(fn, &g, batch);
            if (g.has_bias) continue;
            g.alpha = -0.75;
            compare(fn, &g, batch);
        }
}

/* Sums that are long enough to be cut into pieces: of one size, of two, with a rest. */
static void sweep_long(gradd_dtype_t dtype, gradd_dtype_t result) {
    static const int64_t sizes[][3] = {
        {16, 256, 3072},
        {17, 257, 4096},
        {33, 300, 4097},
        {19, 256, 8192},
        {16, 261, 6150}
    };
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        for (int v = 0; v < 8; v++) {
            omp_set_num_threads(v % 2 + 1);
            gradd_gemm_t g = matrices(dtype, 1, sizes[i], false, false);
            g.result = result;
            g.has_bias = v & 2;
            g.accumulate = v & 4;
            compare(once, &g, 1);
            if (g.has_bias) continue;
            g.alpha = -0.75;
            compare(once, &g, 1);
        }
}

/* Bytes that a product holds: of several primitives where it is cut. */
static size_t bytes_of(const gradd_gemm_t *g) {
    gradd_prepared_t ready;
    CHECK_OK(gradd_gemm_prepare(g, &ready));
    const size_t bytes = ready.bytes;
    gradd_gemm_unprepare(&ready);
    return bytes;
}

TEST(only_long_sums_over_rows_of_b_are_cut) {
    static const int64_t sizes[] = {64, 256, 8192}, shorter[] = {64, 256, 2048};
    gradd_gemm_t whole = matrices(GRADD_DT_F32, 1, shorter, false, false);
    gradd_gemm_t cut = matrices(GRADD_DT_F32, 1, sizes, false, false);
    gradd_gemm_t columns = matrices(GRADD_DT_F32, 1, sizes, false, true);
    gradd_gemm_t turned = matrices(GRADD_DT_F32, 1, sizes, true, false);
    if (strncmp(gradd_gemm_library(), "oneDNN", 6)) return;
    CHECK(bytes_of(&cut) < bytes_of(&whole)); /* without a primitive */
    CHECK(bytes_of(&columns) == bytes_of(&whole) && bytes_of(&turned) == bytes_of(&whole));
}

TEST_LIMIT(long_sums_agree_with_the_definition, 60) {
    sweep_long(GRADD_DT_F32, GRADD_DT_NONE);
    sweep_long(GRADD_DT_BF16, GRADD_DT_NONE);
    sweep_long(GRADD_DT_BF16, GRADD_DT_F32);
}

TEST_LIMIT(products_agree_with_the_definition, 60) {
    sweep(once, GRADD_DT_F32, 0);
    sweep(once, GRADD_DT_F64, 0);
    printf("%s\n", gradd_gemm_library());
}

TEST_LIMIT(blocked_product_agrees_with_the_definition, 60) {
    sweep(blocked, GRADD_DT_F32, 0);
    sweep(blocked, GRADD_DT_F64, 0);
}

TEST_LIMIT(bf16_and_f16_products_agree_with_the_definition, 60) {
    sweep(once, GRADD_DT_BF16, 0);
    sweep(once, GRADD_DT_BF16, GRADD_DT_F32);
    sweep(blocked, GRADD_DT_BF16, 0);
    sweep(blocked, GRADD_DT_BF16, GRADD_DT_F32);
    printf("bf16 %s\n", gradd_gemm_bf16_native() ? "by oneDNN" : "as f32");
    sweep(once, GRADD_DT_F16, 0);
    sweep(blocked, GRADD_DT_F16, GRADD_DT_F32);
}

/* batch [2,3]: A [2,1,m,k], B [3,k,n]; and strides as of a transposed head layout */
TEST(broadcast_and_strided_batches) {
    gradd_gemm_t g = matrices(GRADD_DT_F32, 1, (int64_t[]){5, 4, 6}, false, true);
    g.batch_rank = 2;
    g.batch[0] = 2, g.batch[1] = 3;
    g.a_batch[0] = 5 * 6, g.a_batch[1] = 0;
    g.b_batch[0] = 0, g.b_batch[1] = 4 * 6;
    compare(once, &g, 6);
    compare(blocked, &g, 6);
    g.a_batch[0] = 5 * 3 * 6, g.a_batch[1] = 6; /* rows of 3 heads side by side */
    g.a_m = 3 * 6;
    compare(once, &g, 6);
    compare(blocked, &g, 6);
}

/* Steps of a dimension of 1 are those of the view that it comes from. */
TEST(steps_of_one_row_or_column) {
    static const int64_t sizes[][3] = {
        {5, 3, 1},
        {1, 3, 6},
        {5, 1, 6},
        {1, 3, 1},
        {5, 1, 1}
    };
    for (int i = 0; i < (int)(sizeof sizes / sizeof sizes[0]); i++)
        for (int form = 0; form < 8; form++) {
            gradd_gemm_t g = matrices(GRADD_DT_F32, 2, sizes[i], form & 1, form & 2);
            g.b_batch[0] = 0;
            g.has_bias = form & 4;
            if (g.k == 1) g.a_k = 7, g.b_k = 11;
            if (g.m == 1) g.a_m = 7;
            if (g.n == 1) g.b_n = 11;
            compare(once, &g, 2);
            compare(blocked, &g, 2);
        }
}

TEST(rows_against_one_matrix_become_one_product) {
    gradd_gemm_t g = matrices(GRADD_DT_F32, 4, (int64_t[]){5, 3, 6}, false, false);
    g.b_batch[0] = 0;
    gradd_gemm_simplify(&g);
    CHECK_EQ_INT(g.batch_rank, 0);
    CHECK_EQ_INT(g.m, 20);
    g = matrices(GRADD_DT_F32, 4, (int64_t[]){5, 3, 6}, true, false); /* columns do not */
    g.b_batch[0] = 0;
    gradd_gemm_simplify(&g);
    CHECK_EQ_INT(g.batch_rank, 1);
}

/* Products that are ready know nothing of each other: called in turns, two of one description and
 * one of another give what each gives alone. */
TEST(ready_products_are_apart) {
    enum { N = 40, TURNS = 3 };
    gradd_gemm_t g[3] = {matrices(GRADD_DT_F32, 1, (int64_t[]){N, N, N}, false, true)};
    g[1] = g[0], g[2] = matrices(GRADD_DT_F32, 1, (int64_t[]){N, N, N}, true, false);
    gradd_prepared_t ready[3];
    void *a[3], *b[3], *want[3], *workspace[3];
    for (int i = 0; i < 3; i++) {
        a[i] = numbers(GRADD_DT_F32, N * N, 10 + (unsigned)i);
        b[i] = numbers(GRADD_DT_F32, N * N, 20 + (unsigned)i);
        want[i] = malloc(sizeof(float) * N * N);
        CHECK_OK(once(&g[i], a[i], b[i], NULL, want[i]));
        CHECK_OK(gradd_gemm_prepare(&g[i], &ready[i]));
        workspace[i] = fenced(ready[i].workspace);
    }
    float c[N * N];
    for (int turn = 0; turn < TURNS * 3; turn++) {
        int i = turn % 3;
        CHECK_OK(gradd_gemm(ready[i].state, a[i], b[i], NULL, c, workspace[i]));
        CHECK(!memcmp(c, want[i], sizeof c));
    }
    for (int i = 0; i < 3; i++) {
        check_fence(workspace[i], ready[i].workspace);
        gradd_gemm_unprepare(&ready[i]);
        free(a[i]), free(b[i]), free(want[i]);
    }
}

static double gflops(product_fn fn, gradd_dtype_t dtype, int64_t size) {
    gradd_gemm_t g = matrices(dtype, 1, (int64_t[]){size, size, size}, false, true);
    void *a = numbers(dtype, size * size, 1), *b = numbers(dtype, size * size, 2);
    float *c = malloc((size_t)(size * size) * 4);
    double best = 1e9;
    for (int i = 0; i < 4; i++) {
        struct timespec from, to;
        clock_gettime(CLOCK_MONOTONIC, &from);
        CHECK_OK(fn(&g, a, b, NULL, c));
        clock_gettime(CLOCK_MONOTONIC, &to);
        double s = (double)(to.tv_sec - from.tv_sec) + 1e-9 * (double)(to.tv_nsec - from.tv_nsec);
        if (s < best) best = s;
    }
    free(a), free(b), free(c);
    return 2e-9 * (double)(size * size * size) / best;
}

/* Printed, not judged: the machine may be busy. Only a collapse to scalar code fails. */
TEST_LIMIT(throughput, 60) {
    static const gradd_dtype_t types[] = {GRADD_DT_F32, GRADD_DT_BF16};
    for (int i = 0; i < 2; i++) {
        double library = gflops(once, types[i], 768);
        double own = gflops(blocked, types[i], 768);
        printf("768: %s %s %.0f GFLOP/s, blocked %.0f GFLOP/s\n", gradd_gemm_library(),
               gradd_dtype_name(types[i]), library, own);
        CHECK(library > 0 && own > 0);
    }
}
