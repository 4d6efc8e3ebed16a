/* Tests of kernels/cpu/copy: random boxes, permuted and broadcast, against the plain loop. */
#include "tests/test.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/copy.h"

static uint32_t state = 12345;

static int pick(int n) {
    state = state * 1664525u + 1013904223u;
    return (int)((state >> 8) % (uint32_t)n);
}

/* A contiguous target; the source is a permutation with some axes broadcast or strided. */
static int64_t random_job(gradd_copy_t *job, int max_dim) {
    int rank = pick(5), order[GRADD_COPY_RANK];
    memset(job, 0, sizeof *job);
    job->rank = rank;
    int64_t stride = 1;
    for (int i = rank - 1; i >= 0; i--) {
        job->dims[i] = pick(8) ? 1 + pick(max_dim) : pick(2);
        job->to[i] = stride;
        stride *= job->dims[i];
        order[i] = i;
    }
    for (int i = rank - 1; i > 0; i--) {
        int k = pick(3) ? i : pick(i + 1), t = order[i];
        order[i] = order[k], order[k] = t;
    }
    int64_t span = 1;
    for (int i = rank - 1; i >= 0; i--) {
        int axis = order[i];
        if (!pick(5)) continue; /* broadcast */
        int64_t step = pick(6) ? 1 : 2;
        job->from[axis] = span * step;
        span *= step * (job->dims[axis] ? job->dims[axis] : 1);
    }
    return span;
}

static void compare(int max_dim, size_t bytes) {
    gradd_copy_t job;
    int64_t span = random_job(&job, max_dim), count = 1;
    for (int i = 0; i < job.rank; i++)
        count *= job.dims[i];
    size_t n_to = (size_t)count * bytes, n_from = (size_t)span * bytes;
    unsigned char *from = malloc(n_from + 1), *a = malloc(n_to + 1), *b = malloc(n_to + 1);
    for (size_t i = 0; i < n_from; i++)
        from[i] = (unsigned char)pick(256);
    memset(a, 0xaa, n_to + 1);
    memset(b, 0xaa, n_to + 1);
    gradd_copy_strided(&job, bytes, a, from);
    gradd_copy_plain(&job, bytes, b, from);
    CHECK_EQ_INT(memcmp(a, b, n_to + 1), 0);
    free(from), free(a), free(b);
}

TEST(random_boxes_equal_the_plain_loop) {
    for (int i = 0; i < 4000; i++)
        compare(i % 8 ? 9 : 40, (size_t)1 << pick(4));
}

TEST(large_transposition_uses_every_tile_edge) {
    enum { N = 131, M = 77, B = 9 };
    uint32_t *from = malloc(sizeof *from * N * M * B), *to = malloc(sizeof *to * N * M * B);
    for (int i = 0; i < N * M * B; i++)
        from[i] = (uint32_t)i;
    gradd_copy_t job = {
        .rank = 3, .dims = {B,     M, N},
             .to = {M * N, N, 1},
             .from = {M * N, 1, M}
    };
    gradd_copy_strided(&job, 4, to, from);
    for (int b = 0; b < B; b++)
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++)
                CHECK_EQ_INT(to[(b * M + m) * N + n], (b * N + n) * M + m);
    free(from), free(to);
}

TEST(negative_strides_reverse) {
    int64_t from[5] = {1, 2, 3, 4, 5}, to[5] = {0};
    gradd_copy_t job = {.rank = 1, .dims = {5}, .to = {1}, .from = {-1}};
    gradd_copy_strided(&job, 8, to, from + 4);
    for (int i = 0; i < 5; i++)
        CHECK_EQ_INT(to[i], 5 - i);
}

TEST(bytes_and_zero_cover_odd_sizes) {
    for (size_t n = 0; n < 400000; n = n * 3 + 1) {
        char *a = malloc(n + 1), *b = malloc(n + 1);
        memset(a, 7, n + 1), memset(b, 1, n + 1);
        gradd_copy_bytes(b, a, n);
        CHECK_EQ_INT(memcmp(a, b, n), 0);
        CHECK_EQ_INT(b[n], 1);
        gradd_copy_zero(b, n);
        for (size_t i = 0; i < n; i++)
            CHECK_EQ_INT(b[i], 0);
        CHECK_EQ_INT(b[n], 1);
        free(a), free(b);
    }
}
