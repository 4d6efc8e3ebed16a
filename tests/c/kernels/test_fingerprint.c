/* Fingerprints of memory: what changes them, what does not, and how fast they are. */
#include "kernels/cpu/fingerprint.h"
#include "kernels/math/fingerprint_formulas.h"
#include "tests/test.h"

#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BYTES = 1000003 };

static unsigned char *noise(size_t bytes) {
    unsigned char *p = malloc(bytes + 64);
    uint32_t seed = 7;
    for (size_t i = 0; p && i < bytes + 64; i++)
        p[i] = (unsigned char)((seed = seed * 1664525u + 1013904223u) >> 24);
    CHECK(p != NULL);
    return p;
}

static uint64_t sum_of(const void *p, size_t bytes) {
    gradd_bytes_t one = {p, bytes};
    return gradd_print_sum(&one, 1);
}

static uint64_t drawn_of(const void *p, size_t bytes) {
    gradd_bytes_t one = {p, bytes};
    return gradd_print_drawn(&one, 1);
}

TEST(a_sum_sees_every_bit) {
    unsigned char *p = noise(BYTES);
    for (size_t bytes = 0; bytes <= 300; bytes += bytes < 20 ? 1 : 35) {
        uint64_t before = sum_of(p, bytes);
        for (size_t i = 0; i < 8 * bytes; i++) {
            p[i / 8] ^= (unsigned char)(1 << i % 8);
            CHECK(sum_of(p, bytes) != before);
            p[i / 8] ^= (unsigned char)(1 << i % 8);
        }
        p[bytes] ^= 1; /* the next byte is not ours */
        CHECK(sum_of(p, bytes) == before);
        p[bytes] ^= 1;
    }
    uint64_t before = sum_of(p, BYTES);
    for (size_t i = 0; i < BYTES; i += 997) {
        p[i] ^= 128;
        CHECK(sum_of(p, BYTES) != before);
        p[i] ^= 128;
    }
    CHECK(sum_of(p, BYTES) == before);
    free(p);
}

/* Exchanged words, lines, pieces and tensors have the same plain sum. */
TEST(a_sum_sees_what_changes_places) {
    static const size_t lengths[] = {4, 8, 64, 512, 4096, 1 << 16};
    unsigned char *p = noise(BYTES), room[1 << 16];
    uint64_t before = sum_of(p, BYTES);
    for (size_t k = 0; k < sizeof lengths / sizeof *lengths; k++) {
        size_t n = lengths[k], a = 0, b = 5 * (1 << 16);
        for (int turn = 0; turn < 2; turn++) {
            memcpy(room, p + a, n);
            memcpy(p + a, p + b, n);
            memcpy(p + b, room, n);
            CHECK((sum_of(p, BYTES) == before) == (turn == 1));
        }
    }
    gradd_bytes_t one[2] =
        {
            {p,       640},
            {p + 640, 640}
    },
                  other[2] = {one[1], one[0]};
    CHECK(gradd_print_sum(one, 2) != gradd_print_sum(other, 2));
    CHECK(gradd_print_drawn(one, 2) != gradd_print_drawn(other, 2));
    gradd_bytes_t cut[2] = {
        {p,       600},
        {p + 600, 680}
    };
    CHECK(gradd_print_sum(one, 2) != gradd_print_sum(cut, 2));
    free(p);
}

TEST(threads_and_addresses_do_not_count) {
    unsigned char *p = noise(BYTES), *q = malloc(BYTES + 64);
    CHECK(q != NULL);
    uint64_t want = sum_of(p, BYTES), drawn = drawn_of(p, BYTES);
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        memcpy(q + threads, p, BYTES);
        CHECK(sum_of(q + threads, BYTES) == want);
        CHECK(drawn_of(q + threads, BYTES) == drawn);
    }
    gradd_bytes_t nothing[2] = {
        {NULL, 0},
        {NULL, 0}
    };
    CHECK(gradd_print_sum(nothing, 2) != gradd_print_sum(nothing, 1));
    CHECK(gradd_print_drawn(nothing, 2) != gradd_print_drawn(nothing, 1));
    free(p);
    free(q);
}

/* A dense update changes each element a little; small tensors are seen in every byte. */
TEST(drawn_lines_see_dense_updates_and_small_tensors) {
    static const size_t sizes[] = {1, 7, 64, 65, 200, 1000, 1024, 1025, 5000, 70000, BYTES / 4};
    float *x = (float *)noise(BYTES);
    for (size_t i = 0; i < BYTES / 4; i++)
        x[i] = 1 + (float)(i % 17);
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        size_t n = sizes[k];
        uint64_t before = drawn_of(x, 4 * n);
        for (size_t i = 0; i < n; i++)
            x[i] *= 1 + 1e-6f;
        CHECK(drawn_of(x, 4 * n) != before);
    }
    unsigned char *p = (unsigned char *)x;
    for (size_t i = 0; i < 64 * GRADD_PRINT_LINES; i++) {
        uint64_t before = drawn_of(p, 64 * GRADD_PRINT_LINES);
        p[i] ^= 1;
        CHECK(drawn_of(p, 64 * GRADD_PRINT_LINES) != before);
    }
    free(x);
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

TEST(speed) {
    enum { N = 75, EACH = 1 << 20 };
    unsigned char *p = noise((size_t)N * EACH);
    gradd_bytes_t list[N];
    for (int i = 0; i < N; i++)
        list[i] = (gradd_bytes_t){p + (size_t)i * EACH, EACH};
    omp_set_num_threads(1);
    double drawn = 1, sum = 1;
    volatile uint64_t sink = 0;
    for (int turn = 0; turn < 5; turn++) {
        double start = seconds();
        sink += gradd_print_drawn(list, N);
        double middle = seconds();
        sink += gradd_print_sum(list, N);
        double end = seconds();
        if (middle - start < drawn) drawn = middle - start;
        if (end - middle < sum) sum = end - middle;
    }
    printf("%d tensors of 1 MiB: drawn lines %.1f us, sum %.1f GB/s per thread\n", N, drawn * 1e6,
           (double)N * EACH / sum * 1e-9);
    CHECK(drawn < sum);
    free(p);
}
