/* Conversions of f16: every pattern, every tie, overflow, infinities, NaN and subnormals, against
 * arithmetic in double and the compiler's own type where it has one; blocks against single numbers;
 * casts to and from the other types. */
#include "kernels/contract/op.h"
#include "kernels/contract/registry.h"
#include "kernels/cpu/half.h"
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

static float wide(uint32_t bits) {
    return gradd_f16_f32((gradd_f16_t){(uint16_t)bits});
}

/* The number that a pattern stands for, by its definition. */
static double value_of(uint32_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double sign = bits >> 15 ? -1 : 1;
    if (exponent == 31) return fraction ? (double)NAN : sign * (double)INFINITY;
    if (!exponent) return sign * ldexp(fraction, -24);
    return sign * ldexp(1024 + fraction, exponent - 25);
}

TEST(all_patterns_survive_a_round_trip) {
    for (uint32_t i = 0; i < 65536; i++) {
        const float x = wide(i);
        const double want = value_of(i);
        CHECK((double)x == want || (x != x && want != want));
        CHECK_EQ_INT(bits_of(x) >> 31, i >> 15);
        if (x == x) CHECK_EQ_INT(gradd_f32_f16(x).bits, i);
        if (x != x) CHECK_EQ_INT(gradd_f32_f16(x).bits, (i & 0x8000) | 0x7e00);
    }
}

/* The nearest half of the patterns around, by distances in double; ties go to the even one. */
static uint32_t nearest(float x) {
    const uint32_t sign = bits_of(x) >> 31 << 15;
    const double a = fabs((double)x);
    uint32_t low = 0, high = 0x7c00; /* value(low) <= a */
    if (a >= 65520) return sign | 0x7c00;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (value_of(middle) <= a)
            low = middle;
        else
            high = middle;
    }
    const double above = high == 0x7c00 ? 65536 : value_of(high);
    const double down = a - value_of(low), up = above - a;
    return sign | (down < up || (down == up && !(low & 1)) ? low : high);
}

static void check(float x) {
    const uint32_t got = gradd_f32_f16(x).bits;
    if (x != x) {
        CHECK(isnan(wide(got)) && got >> 15 == bits_of(x) >> 31);
        return;
    }
    CHECK_EQ_INT(got, nearest(x));
#ifdef __FLT16_MANT_DIG__
    const _Float16 own = (_Float16)x;
    uint16_t bits;
    memcpy(&bits, &own, sizeof bits);
    CHECK_EQ_INT(got, bits);
#endif
}

TEST_LIMIT(rounding_is_to_nearest_and_even, 30) {
    static const uint32_t tails[] = {0, 1, 0x7ff, 0x800, 0xfff, 0x1000, 0x1001, 0x1fff};
    /* every float of the upper 19 bits, and what lies around its ties */
    for (uint32_t i = 0; i < 1u << 19; i += 3)
        for (size_t t = 0; t < sizeof tails / sizeof tails[0]; t++)
            check(of_bits(i << 13 | tails[t]));
    for (uint32_t i = 0; i < 0x7c00; i++) { /* the middle between neighbours, and beside it */
        const double next = i == 0x7bff ? 65536 : value_of(i + 1);
        const float middle = (float)((value_of(i) + next) / 2);
        check(middle), check(-middle);
        check(nextafterf(middle, 0)), check(nextafterf(middle, INFINITY));
    }
    uint32_t seed = 1;
    for (int i = 0; i < 1000000; i++)
        check(of_bits(seed = seed * 1664525u + 1013904223u));
    CHECK_EQ_INT(gradd_f32_f16(65504).bits, 0x7bff);
    CHECK_EQ_INT(gradd_f32_f16(65519.996f).bits, 0x7bff);
    CHECK_EQ_INT(gradd_f32_f16(65520).bits, 0x7c00);
    CHECK_EQ_INT(gradd_f32_f16(-1e30f).bits, 0xfc00);
    CHECK_EQ_INT(gradd_f32_f16(0x1p-24f).bits, 1);
    CHECK_EQ_INT(gradd_f32_f16(0x1p-25f).bits, 0); /* a tie */
    CHECK_EQ_INT(gradd_f32_f16(-0.0f).bits, 0x8000);
    CHECK_EQ_INT(gradd_f32_f16(of_bits(1)).bits, 0);
}

TEST(blocks_convert_like_single_numbers) {
    enum { N = 1000 };
    static float from[N], back[N + 1];
    static gradd_f16_t narrow[N + 1];
    uint32_t seed = 1;
    for (int n = 0; n < N; n = n < 70 ? n + 1 : n + 311) {
        for (int i = 0; i < n; i++) {
            seed = seed * 1664525u + 1013904223u;
            from[i] = i % 2 ? of_bits(seed) : (float)(seed >> 8) * 0x1p-8f;
        }
        narrow[n].bits = 0x1234;
        back[n] = 7;
        gradd_half_narrow(narrow, from, GRADD_DT_F16, n);
        gradd_half_widen(back, narrow, GRADD_DT_F16, n);
        CHECK(narrow[n].bits == 0x1234 && back[n] == 7);
        for (int i = 0; i < n; i++) {
            CHECK_EQ_INT(narrow[i].bits, gradd_f32_f16(from[i]).bits);
            CHECK_EQ_INT(bits_of(back[i]), bits_of(gradd_f16_f32(narrow[i])));
        }
    }
}

static void cast(const void *from, gradd_dtype_t dtype, void *to, gradd_dtype_t result, int64_t n) {
    gradd_view_t in = {
        .type = {.dtype = dtype, .rank = 1, .dims = {n}},
          .data = (void *)from
    };
    gradd_view_t out = {
        .type = {.dtype = result, .rank = 1, .dims = {n}},
          .data = to
    };
    gradd_attr_t attr = {.name = "to", .kind = GRADD_ATTR_INT, .i = result};
    gradd_launch_t launch = {
        .op = gradd_op_by_name("Cast"),
        .attrs = {&attr, 1},
        .opset = 20,
        .n_in = 1,
        .n_out = 1,
        .in = &in,
        .out = &out
    };
    CHECK_OK(eager_launch(&launch));
}

TEST(casts_between_f16_and_the_other_types) {
    enum { N = 65536 };
    static gradd_f16_t x[N], back[N];
    static gradd_bf16_t other[N];
    static double f64[N];
    static int64_t i64[N];
    static uint8_t truth[N];
    for (int i = 0; i < N; i++)
        x[i].bits = (uint16_t)i;
    cast(x, GRADD_DT_F16, f64, GRADD_DT_F64, N);
    cast(x, GRADD_DT_F16, i64, GRADD_DT_I64, N);
    cast(x, GRADD_DT_F16, truth, GRADD_DT_BOOL, N);
    cast(x, GRADD_DT_F16, other, GRADD_DT_BF16, N);
    cast(f64, GRADD_DT_F64, back, GRADD_DT_F16, N);
    for (int i = 0; i < N; i++) {
        const double want = (double)gradd_f16_f32(x[i]);
        CHECK(f64[i] == want || (f64[i] != f64[i] && want != want));
        CHECK_EQ_INT(truth[i], want != 0);
        if (want == want) CHECK_EQ_INT(back[i].bits, x[i].bits);
        if (want == want) CHECK_EQ_INT(other[i].bits, gradd_f32_bf16((float)want).bits);
        if (fabs(want) < 0x1p62) CHECK_EQ_INT(i64[i], (int64_t)want);
        if (want != want) CHECK_EQ_INT(i64[i], 0);
    }
    for (int i = 0; i < N; i++)
        other[i].bits = (uint16_t)i;
    cast(other, GRADD_DT_BF16, back, GRADD_DT_F16, N);
    for (int i = 0; i < N; i++)
        CHECK_EQ_INT(back[i].bits, gradd_f32_f16(gradd_bf16_f32(other[i])).bits);
    const int64_t ints[4] = {0, -3, 2049, 70000};
    cast(ints, GRADD_DT_I64, back, GRADD_DT_F16, 4);
    for (int i = 0; i < 4; i++)
        CHECK_EQ_INT(back[i].bits, gradd_f32_f16((float)ints[i]).bits);
}
