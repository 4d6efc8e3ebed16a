/* A product in parts: the same sum for each element as by the definition, for every way that there
 * is to cut it, and nothing written outside a part.
 */
#include "kernels/cpu/gemm/gemm.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/contract/backend.h"
#include "kernels/cpu/half.h"
#include "tests/test.h"

static float *values(int64_t n, unsigned step) {
    float *v = aligned_alloc(64, (size_t)(n * 4 + 63) / 64 * 64);
    CHECK(v != NULL);
    for (int64_t i = 0; i < n; i++)
        v[i] = (float)((uint64_t)i * step % 401) / 400 - 0.5f;
    return v;
}

static void *scratch(const gradd_prepared_t *p) {
    void *memory = aligned_alloc(64, p->workspace / 64 * 64 + 64);
    CHECK(memory != NULL);
    return memory;
}

/* Sums that go on from part to part are in the order of the parts. */
static void check(const gradd_gemm_t *g, int expected_parts) {
    const int64_t batches = gradd_gemm_batches(g), n = batches * g->m * g->n;
    float *a = values(batches * g->m * g->k, 7919), *b = values(batches * g->k * g->n, 104729);
    float *bias = values(g->n, 31), *got = values(n, 1), *want = values(n, 1);
    gradd_prepared_t ready;
    CHECK_OK(gradd_gemm_prepare(g, &ready));
    CHECK_EQ_INT(ready.parts, expected_parts);
    void *workspace = scratch(&ready);
    const gradd_gemm_operands_t o = {a, b, g->has_bias ? bias : NULL, got, workspace};
    for (int part = 0; part < ready.parts; part++)
        CHECK_OK(gradd_gemm_part(ready.state, part, &o));
    CHECK_OK(gradd_gemm_ref(g, a, b, o.bias, want));
    for (int64_t i = 0; i < n; i++)
        CHECK(fabsf(got[i] - want[i]) <= 1e-4f * (1 + fabsf(want[i])));
    gradd_gemm_unprepare(&ready);
    free(a), free(b), free(bias), free(got), free(want), free(workspace);
}

static gradd_gemm_t product(int64_t m, int64_t n, int64_t k) {
    return (gradd_gemm_t){.dtype = GRADD_DT_F32,
                          .m = m,
                          .n = n,
                          .k = k,
                          .a_m = k,
                          .a_k = 1,
                          .b_k = n,
                          .b_n = 1,
                          .alpha = 1,
                          .threads = 2,
                          .parts = 3};
}

TEST(rows_are_cut) {
    gradd_cpu_enter(2);
    gradd_gemm_t g = product(300, 40, 50);
    check(&g, 3); /* 128, 128 and 44 rows */
    g.has_bias = true;
    check(&g, 3);
    g.has_bias = false;
    g.a_m = 1, g.a_k = g.m; /* columns of A */
    check(&g, 3);
    g.accumulate = true;
    check(&g, 3);
    g = product(192, 33, 20);
    g.b_k = 1, g.b_n = g.k;
    check(&g, 3); /* equal ones */
    g = product(20, 40, 20);
    check(&g, 1); /* too few */
}

/* So that the right operand is not copied as a whole for each part. */
TEST(columns_are_cut) {
    if (strncmp(gradd_gemm_library(), "oneDNN", 6)) test_skip("columns need oneDNN");
    gradd_cpu_enter(2);
    gradd_gemm_t g = product(20, 300, 20);
    check(&g, 3); /* 128, 128 and 44 columns */
    g.has_bias = true;
    check(&g, 3);
    g.has_bias = false;
    g.accumulate = true;
    check(&g, 3);
    g = product(300, 700, 40);
    g.parts = 12;
    check(&g, 12); /* three rows of four tiles, all four sizes */
    g.has_bias = true;
    g.b_k = 1, g.b_n = g.k;
    check(&g, 12);
    g = product(192, 768, 3100); /* long sums, in steps */
    g.parts = 4;
    check(&g, 9); /* of a block each, as 7 would leave two of 2 */
}

/* Blocks of 384 terms, one part after the other. */
TEST(long_sums_are_cut) {
    if (strncmp(gradd_gemm_library(), "oneDNN", 6)) test_skip("long sums are split by oneDNN");
    gradd_cpu_enter(2);
    gradd_gemm_t g = product(48, 300, 5000);
    check(&g, 7); /* of two blocks each: none is longer than a fifth */
    g.has_bias = true;
    check(&g, 7);
    g.has_bias = false;
    g.accumulate = true;
    g.parts = 2;
    check(&g, 4);
    g.a_m = 1, g.a_k = g.m; /* as gradients of weights are */
    check(&g, 4);
    g.b_k = 1, g.b_n = g.k;
    check(&g, 4);
    g = product(5, 7, 9000); /* none of its sides can be cut */
    g.parts = 8;
    check(&g, 24);
    g.parts = 50; /* 24 blocks */
    check(&g, 24);
    g = product(128, 256, 800); /* two by two tiles in three steps each */
    g.parts = 7;
    check(&g, 12);
    g.has_bias = true;
    check(&g, 12);
    g.accumulate = true;
    check(&g, 12);
    g.has_bias = false;
    g.alpha = 0.5;
    g.a_m = 1, g.a_k = g.m;
    check(&g, 12);
    g.b_k = 1, g.b_n = g.k;
    check(&g, 12);
    g = product(16, 256, 3100); /* not cut, but split: 1920 terms, and 1180 */
    g.parts = 0;
    g.has_bias = true;
    check(&g, 1);
}

/* Whether split or in tiles: the sum is f32, and one in another order may round to the next number.
 */
TEST(long_sums_of_bf16_are_rounded_once) {
    if (!gradd_gemm_bf16_native()) test_skip("this processor does not multiply bf16");
    gradd_cpu_enter(2);
    gradd_gemm_t g = product(80, 300, 5000);
    const int64_t n_a = g.m * g.k, n_b = g.k * g.n, n = g.m * g.n;
    gradd_bf16_t *a = calloc((size_t)n_a, sizeof *a), *b = calloc((size_t)n_b, sizeof *b);
    gradd_bf16_t *got[2];
    for (int64_t i = 0; i < n_a; i++)
        a[i] = gradd_f32_bf16((float)(i * 7919 % 401) / 400 - 0.5f);
    for (int64_t i = 0; i < n_b; i++)
        b[i] = gradd_f32_bf16((float)(i * 104729 % 401) / 400 - 0.5f);
    g.dtype = GRADD_DT_BF16;
    for (int i = 0; i < 2; i++) {
        gradd_prepared_t ready;
        g.parts = i ? 3 : 0;
        CHECK_OK(gradd_gemm_prepare(&g, &ready));
        CHECK_EQ_INT(ready.parts, i ? 3 : 1);
        void *workspace = scratch(&ready);
        got[i] = calloc((size_t)n, sizeof *got[i]);
        for (int part = 0; part < ready.parts; part++)
            CHECK_OK(gradd_gemm_part(ready.state, part,
                                     &(gradd_gemm_operands_t){a, b, NULL, got[i], workspace}));
        gradd_gemm_unprepare(&ready);
        free(workspace);
    }
    for (int64_t i = 0; i < n; i++) {
        const float x = gradd_bf16_f32(got[0][i]), y = gradd_bf16_f32(got[1][i]);
        CHECK(fabsf(x - y) <= fabsf(x) / 128 + 1e-3f);
    }
    CHECK(got[0][n - 1].bits != 0);
    free(a), free(b), free(got[0]), free(got[1]);
}

TEST(a_batch_is_cut) {
    gradd_cpu_enter(2);
    gradd_gemm_t g = product(30, 20, 10);
    g.batch_rank = 1;
    g.batch[0] = 7;
    g.a_batch[0] = g.m * g.k;
    g.b_batch[0] = g.k * g.n;
    check(&g, 3); /* 3, 3 and 1 matrices */
    g.batch_rank = 2;
    g.batch[0] = 5, g.batch[1] = 4;
    g.a_batch[0] = 4 * g.m * g.k, g.a_batch[1] = g.m * g.k;
    g.b_batch[0] = g.k * g.n, g.b_batch[1] = 0; /* one right operand for four */
    check(&g, 3);
}

/* The same bits however often a launch is interrupted: the parts are those that were prepared. */
TEST(parts_in_turn_are_the_whole) {
    gradd_cpu_enter(2);
    const gradd_gemm_t g = product(500, 64, 96);
    float *a = values(g.m * g.k, 7919), *b = values(g.k * g.n, 104729);
    float *whole = values(g.m * g.n, 1), *parts = values(g.m * g.n, 2);
    gradd_prepared_t ready;
    CHECK_OK(gradd_gemm_prepare(&g, &ready));
    void *workspace = scratch(&ready);
    CHECK_OK(gradd_gemm(ready.state, a, b, NULL, whole, workspace));
    for (int part = 0; part < ready.parts; part++) {
        if (workspace && ready.workspace) memset(workspace, 0x7f, ready.workspace);
        CHECK_OK(gradd_gemm_part(ready.state, part,
                                 &(gradd_gemm_operands_t){a, b, NULL, parts, workspace}));
    }
    CHECK(!memcmp(whole, parts, sizeof(float) * (size_t)(g.m * g.n)));
    gradd_gemm_unprepare(&ready);
    free(a), free(b), free(whole), free(parts), free(workspace);
}
