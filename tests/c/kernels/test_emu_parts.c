/* Shared parts of the kernels of kernels/cuda: division, the sort, sums by row in both widths, and
 * halves.
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/math/bf16.h"
#include "kernels/math/f16.h"
#include "tests/emu/parts.h"
#include "tests/test.h"

static uint64_t draw(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 11;
}

TEST(quotients_are_exact) {
    static const int64_t ends[] = {INT32_MAX - 1, INT32_MAX, (int64_t)1 << 40, (int64_t)1 << 50};
    uint64_t state = 1;
    for (int e = 0; e < 4; e++)
        for (int k = 0; k < 20000; k++) {
            const int64_t most = ends[e];
            int64_t by = 1 + (int64_t)(draw(&state) % (uint64_t)(k % 2 ? most : 1 + k));
            int64_t a = (int64_t)(draw(&state) % (uint64_t)most);
            if (k % 3 == 0) a = a / by * by;
            if (k % 3 == 1) a = a / by * by + by - 1;
            CHECK_EQ_INT(emu_divide(by, most, a), a / by);
            CHECK_EQ_INT(emu_divide(by, most, 0), 0);
            CHECK_EQ_INT(emu_divide(by, most, most), most / by);
        }
}

static void check_sort(bool wide, int64_t n, uint64_t largest, bool few) {
    uint64_t *key = calloc((size_t)n, sizeof *key), state = (uint64_t)n;
    int64_t *at = malloc(sizeof *at * (size_t)n);
    for (int64_t i = 0; i < n; i++)
        key[i] = few ? largest - draw(&state) % 2 * (largest / 2) : draw(&state) % largest + 1;
    CHECK_OK(emu_sort(wide, key, n, largest, at));
    for (int64_t i = 0; i < n; i++) {
        CHECK(at[i] >= 0 && at[i] < n);
        if (i && key[at[i - 1]] == key[at[i]]) CHECK(at[i - 1] < at[i]);
        if (i) CHECK(key[at[i - 1]] <= key[at[i]]);
    }
    free(key), free(at);
}

TEST_LIMIT(keys_are_sorted_and_equal_ones_keep_their_order, 30) {
    static const int64_t sizes[] = {1, 31, 33, 2047, 2048, 2049, 9000};
    for (int k = 0; k < 7; k++) {
        check_sort(false, sizes[k], 1, false);
        check_sort(false, sizes[k], 200, false);
        check_sort(false, sizes[k], 70000, true);
        check_sort(false, sizes[k], UINT32_MAX, false);
        check_sort(true, sizes[k], (uint64_t)1 << 40, false);
        check_sort(true, sizes[k], (uint64_t)3 << 50, true);
    }
}

/* More than 256 tiles: where those of a digit begin is found in several rounds. */
TEST_LIMIT(many_tiles_are_sorted, 30) {
    check_sort(false, 257 * 2048 + 5, 255, false);
}

TEST(sums_are_the_same_in_both_widths) {
    enum { N = 300, ROWS = 7, WIDTH = 12 };
    static float from[N * WIDTH], a[ROWS * WIDTH], b[ROWS * WIDTH];
    int64_t row[N];
    uint64_t state = 3;
    for (int i = 0; i < N; i++)
        row[i] = i % 2 ? 3 : (int64_t)(draw(&state) % (ROWS + 1)) - 1;
    for (int i = 0; i < N * WIDTH; i++)
        from[i] = (float)(draw(&state) % 1000) / 7;
    for (int i = 0; i < ROWS * WIDTH; i++)
        a[i] = b[i] = (float)i;
    CHECK_OK(emu_sum_rows(false, &(emu_sums_t){row, N, ROWS, WIDTH, from, a}));
    CHECK_OK(emu_sum_rows(true, &(emu_sums_t){row, N, ROWS, WIDTH, from, b}));
    CHECK(!memcmp(a, b, sizeof a));
    for (int i = 0; i < ROWS * WIDTH; i++) {
        double sum = 0;
        for (int k = 0; k < N; k++)
            if (row[k] == i / WIDTH) sum += (double)from[k * WIDTH + i % WIDTH];
        CHECK_NEAR(a[i], i + 0.5 * sum, 1e-2);
    }
}

static void check_narrow(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    CHECK_EQ_INT(emu_narrow_f16(bits), gradd_f32_f16(x).bits);
    CHECK_EQ_INT(emu_narrow_bf16(bits), gradd_f32_bf16(x).bits);
}

/* The emulation's instructions make one NaN of all, as a GPU's do. */
TEST(halves_have_the_cpus_bits) {
    for (uint32_t h = 0; h < 1u << 16; h++) {
        const float x = gradd_f16_f32((gradd_f16_t){(uint16_t)h});
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        CHECK_EQ_INT(emu_widen_f16((uint16_t)h), bits);
        for (uint32_t place = 0x800; place <= 0x8000; place *= 2) /* ends, and between two halves */
            for (uint32_t k = 0; k < 3; k++)
                check_narrow(bits + place + k - 1), check_narrow((h << 16) + place + k - 1);
    }
    for (uint32_t k = 0; k < 1u << 16; k++)
        check_narrow(k * 65537u), check_narrow(0x7f800000u + (k << 7)), check_narrow(k);
}
