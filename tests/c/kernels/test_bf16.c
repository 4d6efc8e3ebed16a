/* Conversions of bf16: every pattern, every tie, infinities, NaN and subnormals; blocks against
 * single numbers; the plain functions against arithmetic in double. */
#include "kernels/contract/op.h"
#include "kernels/contract/registry.h"
#include "kernels/cpu/bf16.h"
#include "tests/c/eager.h"
#include "tests/test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static float of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

TEST(all_patterns_survive_a_round_trip) {
    for (uint32_t i = 0; i < 65536; i++) {
        gradd_bf16_t x = {(uint16_t)i};
        float wide = gradd_bf16_f32(x);
        CHECK_EQ_INT(bits_of(wide), i << 16);
        gradd_bf16_t back = gradd_f32_bf16(wide);
        CHECK_EQ_INT(back.bits, wide != wide ? i | 0x40 : i);
    }
}

/* The nearest of the two neighbours, found by comparing distances in double. */
static uint16_t nearest(float x) {
    uint16_t below = (uint16_t)(bits_of(x) >> 16), above = (uint16_t)(below + 1);
    double lo = (double)gradd_bf16_f32((gradd_bf16_t){below});
    double hi = (double)gradd_bf16_f32((gradd_bf16_t){above});
    if (isinf(hi)) hi = copysign(0x1p128, lo); /* where the next number would be */
    double to_lo = fabs((double)x - lo), to_hi = fabs((double)x - hi);
    if (to_lo == to_hi) return below & 1 ? above : below;
    return to_lo < to_hi ? below : above;
}

TEST(rounding_is_to_nearest_and_even) {
    static const uint32_t tails[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff, 0x1234, 0xfedc};
    for (uint32_t i = 0; i < 65536; i++)
        for (size_t t = 0; t < sizeof tails / sizeof tails[0]; t++) {
            float x = of_bits(i << 16 | tails[t]);
            uint16_t got = gradd_f32_bf16(x).bits;
            if (x != x)
                CHECK(isnan(gradd_bf16_f32((gradd_bf16_t){got})) && (got >> 15) == (i >> 15));
            else if (isinf(x))
                CHECK_EQ_INT(got, i);
            else
                CHECK_EQ_INT(got, nearest(x));
        }
    CHECK(isinf(gradd_bf16_f32(gradd_f32_bf16(3.4e38f))));
    CHECK_EQ_INT(gradd_f32_bf16(of_bits(1)).bits, 0);               /* the smallest subnormal */
    CHECK_EQ_INT(gradd_f32_bf16(of_bits(0x80008001)).bits, 0x8001); /* one that stays */
    CHECK_EQ_INT(gradd_f32_bf16(-0.0f).bits, 0x8000);
}

TEST(blocks_convert_like_single_numbers) {
    enum { N = 1000 };
    static float wide[N], back[N + 1];
    static gradd_bf16_t narrow[N + 1];
    uint32_t seed = 1;
    for (int n = 0; n < N; n = n < 70 ? n + 1 : n + 311) {
        for (int i = 0; i < n; i++)
            wide[i] = of_bits(seed = seed * 1664525u + 1013904223u);
        narrow[n].bits = 0x1234;
        back[n] = 7;
        gradd_bf16_narrow(narrow, wide, n);
        gradd_bf16_widen(back, narrow, n);
        CHECK(narrow[n].bits == 0x1234 && back[n] == 7);
        for (int i = 0; i < n; i++) {
            CHECK_EQ_INT(narrow[i].bits, gradd_f32_bf16(wide[i]).bits);
            CHECK_EQ_INT(bits_of(back[i]), (uint32_t)narrow[i].bits << 16);
        }
    }
}

/* Cast through its row, for every pattern and every type there is. */
static void cast(const void *from, gradd_dtype_t dtype, void *to, gradd_dtype_t result, int64_t n) {
    gradd_view_t in = {
        .type = {.dtype = dtype, .rank = 1, .dims = {n}},
          .data = (void *)from
    };
    gradd_view_t out = {
        .type = {.dtype = result, .rank = 1, .dims = {n}},
          .data = to
    };
    const gradd_op_t *op = gradd_op_by_name("Cast");
    gradd_attr_t attr = {.name = "to", .kind = GRADD_ATTR_INT, .i = result};
    gradd_launch_t launch = {
        .op = op, .attrs = {&attr, 1},
             .opset = 20, .n_in = 1, .n_out = 1, .in = &in, .out = &out
    };
    CHECK_OK(eager_launch(&launch));
}

TEST(casts_between_bf16_and_the_other_types) {
    enum { N = 65536 };
    static gradd_bf16_t x[N], back[N];
    static double f64[N];
    static int64_t i64[N];
    static uint8_t truth[N];
    for (int i = 0; i < N; i++)
        x[i].bits = (uint16_t)i;
    cast(x, GRADD_DT_BF16, f64, GRADD_DT_F64, N);
    cast(x, GRADD_DT_BF16, i64, GRADD_DT_I64, N);
    cast(x, GRADD_DT_BF16, truth, GRADD_DT_BOOL, N);
    cast(f64, GRADD_DT_F64, back, GRADD_DT_BF16, N);
    for (int i = 0; i < N; i++) {
        double want = (double)gradd_bf16_f32(x[i]);
        CHECK(f64[i] == want || (f64[i] != f64[i] && want != want));
        CHECK_EQ_INT(truth[i], want != 0);
        if (want == want) CHECK_EQ_INT(back[i].bits, x[i].bits);
        if (fabs(want) < 0x1p62) CHECK_EQ_INT(i64[i], (int64_t)want);
        if (want != want) CHECK_EQ_INT(i64[i], 0);
    }
    int64_t ints[4] = {0, -3, 257, 1000003};
    cast(ints, GRADD_DT_I64, back, GRADD_DT_BF16, 4);
    for (int i = 0; i < 4; i++)
        CHECK_EQ_INT(back[i].bits, gradd_f32_bf16((float)ints[i]).bits);
}
