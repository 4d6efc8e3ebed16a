/* Tests of kernels/cpu/pick and picked_rows: bad indices are named and touch nothing; repeated rows
 * give the same bits for every number of threads. */
#include "tests/test.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/pick.h"
#include "kernels/cpu/picked_rows.h"

static const gradd_type_t data = {
    .dtype = GRADD_DT_F32, .rank = 2, .dims = {50, 3}
};

TEST(axis_index_out_of_range_is_named) {
    int64_t index[4] = {0, -50, 49, 50}, row[4];
    gradd_view_t view = {
        {GRADD_DT_I64, 1, {4}},
        index
    };
    CHECK_STATUS(GRADD_E_INDEX, gradd_pick_axis(&data, 0, &view, GRADD_PICK_ALL, row));
    CHECK_ERROR_HAS("index 50 is out of range for size 50, at position 3");
    index[3] = -51;
    CHECK_STATUS(GRADD_E_INDEX, gradd_pick_axis(&data, 0, &view, GRADD_PICK_ALL, row));
    CHECK_ERROR_HAS("index -51 is out of range for size 50, at position 3");
    index[3] = -1;
    CHECK_OK(gradd_pick_axis(&data, 0, &view, GRADD_PICK_ALL, row));
    CHECK_EQ_INT(row[1], 0);
    CHECK_EQ_INT(row[3], 49);
}

TEST(coordinates_out_of_range_are_named) {
    int32_t index[6] = {1, 2, 49, -3, 3, 3};
    int64_t row[3];
    gradd_view_t view = {
        {GRADD_DT_I32, 2, {3, 2}},
        index
    };
    CHECK_STATUS(GRADD_E_INDEX, gradd_pick_nd(&data, 0, &view, GRADD_PICK_ALL, row));
    CHECK_ERROR_HAS("index 3 is out of range for size 3, at position 5");
    index[5] = 0;
    CHECK_OK(gradd_pick_nd(&data, 0, &view, GRADD_PICK_ALL, row));
    CHECK_EQ_INT(row[1], 49 * 3);
}

TEST(element_index_out_of_range_is_named) {
    int64_t index[6] = {0, 1, 2, 0, 50, 60}, row[6];
    gradd_view_t view = {
        {GRADD_DT_I64, 2, {2, 3}},
        index
    };
    CHECK_STATUS(GRADD_E_INDEX, gradd_pick_elements(&data, 0, &view, GRADD_PICK_ALL, row));
    CHECK_ERROR_HAS("index 50 is out of range for size 50, at position 4");
    index[4] = index[5] = -50;
    CHECK_OK(gradd_pick_elements(&data, 0, &view, GRADD_PICK_ALL, row));
    CHECK_EQ_INT(row[2], 2 * 3 + 2);
    CHECK_EQ_INT(row[5], 2);
}

/* Which way, and what is indexed by what. */
typedef struct ranges_s {
    int way; /* 0 along an axis, 1 by tuples, 2 one element per index */
    gradd_type_t of, by;
} ranges_t;

static gradd_status_t pick(const ranges_t *c, const gradd_view_t *index, gradd_range_t some,
                           int64_t *row) {
    if (c->way == 0) return gradd_pick_axis(&c->of, 1, index, some, row);
    if (c->way == 1) return gradd_pick_nd(&c->of, 1, index, some, row);
    return gradd_pick_elements(&c->of, 1, index, some, row);
}

/* As launches in parts make them. */
TEST(ranges_are_the_whole) {
    static const ranges_t cases[] = {
        {0, {GRADD_DT_F32, 3, {40, 7, 2}},  {GRADD_DT_I64, 1, {900}}       },
        {0, {GRADD_DT_F32, 2, {1, 7}},      {GRADD_DT_I64, 1, {30000}}     },
        {1, {GRADD_DT_F32, 3, {40, 7, 2}},  {GRADD_DT_I64, 3, {40, 500, 1}}},
        {2, {GRADD_DT_F32, 3, {40, 7, 20}}, {GRADD_DT_I64, 3, {39, 50, 19}}},
    };
    enum { MOST = 40000 };
    static int64_t index[MOST], whole[MOST], parts[MOST];
    for (int k = 0; k < MOST; k++)
        index[k] = k * 7919 % 14 - 7;
    for (int c = 0; c < 4; c++) {
        const gradd_view_t view = {cases[c].by, index};
        const int64_t n = gradd_type_count(&cases[c].by) * (c ? 1 : 40);
        CHECK(n <= MOST);
        omp_set_num_threads(2);
        CHECK_OK(pick(&cases[c], &view, GRADD_PICK_ALL, whole));
        for (int n_parts = 2; n_parts <= 97; n_parts += 19) {
            memset(parts, 0xff, sizeof parts);
            for (int p = 0; p < n_parts; p++)
                CHECK_OK(pick(&cases[c], &view,
                              (gradd_range_t){n * p / n_parts, n * (p + 1) / n_parts}, parts));
            CHECK(!memcmp(whole, parts, sizeof whole[0] * (size_t)n));
        }
    }
}

/* Extremes must not overflow on their way to the check. */
TEST(huge_indices_are_refused) {
    int64_t index[2] = {INT64_MIN, INT64_MAX}, row[2];
    gradd_view_t view = {
        {GRADD_DT_I64, 1, {1}},
        index
    };
    CHECK_STATUS(GRADD_E_INDEX, gradd_pick_axis(&data, 0, &view, GRADD_PICK_ALL, row));
    view.data = index + 1;
    CHECK_STATUS(GRADD_E_INDEX, gradd_pick_axis(&data, 0, &view, GRADD_PICK_ALL, row));
}

static void add_rows(int threads, int64_t size, float *to, const float *from, const int64_t *row,
                     int64_t n) {
    gradd_rows_t rows = {row, n, 10, size};
    memset(to, 0, sizeof *to * (size_t)(10 * size));
    omp_set_num_threads(threads);
    CHECK_OK(gradd_rows_add(&rows, GRADD_DT_F32, to, from));
}

TEST(repeated_rows_do_not_depend_on_threads) {
    static const int64_t sizes[] = {1, 3, 64, 300};
    for (int s = 0; s < 4; s++) {
        int64_t size = sizes[s], n = 40000 / size + 7;
        float *from = malloc(sizeof *from * (size_t)(n * size));
        float *a = malloc(sizeof *a * (size_t)(10 * size)),
              *b = malloc(sizeof *b * (size_t)(10 * size));
        int64_t *row = malloc(sizeof *row * (size_t)n);
        for (int64_t i = 0; i < n * size; i++)
            from[i] = 1.0f / (float)(i % 977 + 1);
        for (int64_t i = 0; i < n; i++)
            row[i] = i * i % 7;
        add_rows(1, size, a, from, row, n);
        for (int threads = 2; threads <= 5; threads++) {
            add_rows(threads, size, b, from, row, n);
            CHECK_EQ_INT(memcmp(a, b, sizeof *a * (size_t)(10 * size)), 0);
        }
        float sum = 0;
        for (int64_t i = 0; i < n; i++)
            sum += row[i] == 4 ? from[i * size] : 0;
        CHECK_NEAR(a[4 * size], sum, 0);
        free(from), free(a), free(b), free(row);
    }
}

TEST(the_last_write_wins) {
    enum { N = 40000 };
    int32_t *from = malloc(sizeof *from * N), to[3] = {-1, -1, -1};
    int64_t *row = malloc(sizeof *row * N);
    for (int i = 0; i < N; i++)
        from[i] = i, row[i] = i % 2;
    gradd_rows_t rows = {row, N, 3, 1};
    omp_set_num_threads(3);
    CHECK_OK(gradd_rows_put(&rows, 4, to, from));
    CHECK_EQ_INT(to[0], N - 2);
    CHECK_EQ_INT(to[1], N - 1);
    CHECK_EQ_INT(to[2], -1);
    free(from), free(row);
}
