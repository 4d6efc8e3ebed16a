/* Products of bf16 in pairs and their packing against the plain definitions, over odd shapes;
 * nothing is written beyond the result. */
#include "kernels/cpu/attention/attention_cpu.h"
#include "kernels/cpu/attention/attention_pairs.h"
#include "tests/test.h"

#include <math.h>
#include <string.h>

#if ATTN_PAIRS

enum { TILE = GRADD_ATTN_TILE, MOST = TILE * TILE };
static const float GUARD = 12345;

static float number(uint32_t *seed) {
    *seed = *seed * 1664525u + 1013904223u;
    return (float)(int32_t)*seed * 0x1p-31f;
}

static void fill_bf16(gradd_bf16_t *x, int64_t n, uint32_t seed) {
    for (int64_t i = 0; i < n; i++)
        x[i] = gradd_f32_bf16(number(&seed));
}

static double half(const attn_pair_t *x, int64_t which) {
    return (double)gradd_bf16_f32((gradd_bf16_t){(uint16_t)(*x >> (16 * which))});
}

static void check_product(const attn_product_t *p) {
    static attn_pair_t a[MOST], b[MOST];
    static float c[MOST], want[MOST];
    fill_bf16((gradd_bf16_t *)a, 2 * MOST, 1);
    fill_bf16((gradd_bf16_t *)b, 2 * MOST, 2);
    uint32_t seed = 3;
    for (int i = 0; i < MOST; i++)
        c[i] = want[i] = p->add ? number(&seed) : GUARD;
    attn_pairs_product(p, a, b, c);
    for (int64_t i = 0; i < p->m; i++)
        for (int64_t j = 0; j < p->n; j++) {
            double sum = p->add ? (double)want[i * p->ldc + j] : 0;
            for (int64_t l = 0; l < p->k; l++)
                for (int64_t h = 0; h < 2; h++)
                    sum += half(&a[i * p->a_m + l * p->a_k], h) * half(&b[l * p->ldb + j], h);
            CHECK_NEAR(c[i * p->ldc + j], sum, 1e-5);
            c[i * p->ldc + j] = want[i * p->ldc + j];
        }
    CHECK(!memcmp(c, want, sizeof c));
}

static void check_products(void) {
    for (int64_t m = 0; m <= 17; m++)
        for (int64_t n = 16; n <= TILE; n += 16)
            for (int64_t k = 0; k <= 32; k = 2 * k + 1)
                for (int add = 0; add < 2; add++) {
                    attn_product_t p = {m, n, k, 32, 1, TILE, TILE, add};
                    check_product(&p); /* the sum runs along the rows of A */
                    p.a_m = 1, p.a_k = TILE, p.ldc = n;
                    check_product(&p);
                }
}

static void check_rows(void) {
    static gradd_bf16_t x[TILE * 100];
    static attn_pair_t out[TILE / 2 * 96 + 1];
    fill_bf16(x, TILE * 100, 4);
    for (int64_t rows = 1; rows <= TILE; rows += rows < 5 ? 1 : 59)
        for (int64_t cols = 2; cols <= 90; cols += 8) {
            const int64_t ld = (cols + 15) / 16 * 16, pairs = (rows + 1) / 2;
            memset(out, 0xee, sizeof out);
            attn_pairs_rows(x, 100, rows, cols, out, ld);
            for (int64_t j = 0; j < 2 * pairs; j++)
                for (int64_t c = 0; c < ld; c++) {
                    const bool inside = j < rows && c < cols;
                    const double want = inside ? (double)gradd_bf16_f32(x[j * 100 + c]) : 0;
                    CHECK(half(&out[j / 2 * ld + c], j % 2) == want);
                }
            CHECK(out[pairs * ld] == 0xeeeeeeee);
        }
}

static bool same(double a, double b) {
    return a == b || (a != a && b != b);
}

static void check_tile(const float *x, int64_t keys, int64_t queries) {
    static attn_pair_t of_keys[MOST / 2 + 1], of_queries[MOST / 2 + 1];
    memset(of_keys, 0xee, sizeof of_keys);
    memset(of_queries, 0xee, sizeof of_queries);
    attn_pairs_of_keys(x, keys, queries, of_keys);
    attn_pairs_of_queries(x, keys, queries, of_queries);
    for (int64_t j = 0; j < (keys + 1) / 2 * 2; j++)
        for (int64_t i = 0; i < (queries + 1) / 2 * 2; i++) {
            const gradd_bf16_t rounded = gradd_f32_bf16(x[j * TILE + i]);
            const double want = (double)gradd_bf16_f32(rounded);
            const double key = half(&of_keys[j / 2 * TILE + i], j % 2);
            CHECK(i >= queries || same(key, j < keys ? want : 0));
            if (j >= keys) continue;
            const double query = half(&of_queries[j * TILE / 2 + i / 2], i % 2);
            CHECK(same(query, i < queries ? want : 0));
        }
    CHECK(of_keys[(keys + 1) / 2 * TILE] == 0xeeeeeeee);
    CHECK(of_queries[keys * TILE / 2] == 0xeeeeeeee);
}

static void check_tiles(void) {
    static float x[MOST];
    const float special[] = {INFINITY, NAN, -INFINITY, 1 + 0x1p-8f, 3.4e38f};
    uint32_t seed = 5;
    for (int i = 0; i < MOST; i++)
        x[i] = i % 3 ? number(&seed) : special[i / 3 % 5];
    for (int64_t keys = 1; keys <= TILE; keys += keys < 4 ? 1 : 15)
        for (int64_t queries = 1; queries <= TILE; queries++)
            check_tile(x, keys, queries);
}

static void check_sums(void) {
    static gradd_bf16_t x[4 * 80], y[4 * 70];
    float got[4];
    fill_bf16(x, 4 * 80, 6);
    fill_bf16(y, 4 * 70, 7);
    attn_pairs_dots((attn_rows_bf16_t){x, 80}, (attn_rows_bf16_t){y, 70}, 4, 66, got);
    for (int i = 0; i < 4; i++) {
        double sum = 0;
        for (int c = 0; c < 66; c++)
            sum += (double)gradd_bf16_f32(x[i * 80 + c]) * (double)gradd_bf16_f32(y[i * 70 + c]);
        CHECK_NEAR(got[i], sum, 1e-5);
    }
}

#else

static void check_products(void) {
}
static void check_rows(void) {
}
static void check_tiles(void) {
}
static void check_sums(void) {
}

#endif

static void need_pairs(void) {
    if (!attn_pairs_ready()) test_skip("this machine or build has no products of bf16");
}

TEST(products_agree_with_the_definition) {
    need_pairs();
    check_products();
}

TEST(rows_of_tensors_are_packed) {
    need_pairs();
    check_rows();
}

TEST(tiles_are_rounded_and_packed) {
    need_pairs();
    check_tiles();
}

TEST(sums_along_rows) {
    need_pairs();
    check_sums();
}
