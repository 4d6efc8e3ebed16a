/* Tests of kernels/cpu/pick and picked_rows: bad indices are named and touch nothing; repeated rows
 * give the same bits for every number of threads. */
#include "tests/test.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/contract/backend.h"
#include "kernels/contract/registry.h"
#include "kernels/cpu/half.h"
#include "kernels/cpu/pick.h"
#include "kernels/cpu/picked_rows.h"
#include "kernels/rules/rules.h"

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
    const gradd_launch_t whole = {0};
    omp_set_num_threads(threads);
    CHECK_OK(gradd_rows_add(&(gradd_row_adds_t){
        .rows = {row, n, 10, size},
        .dtype = GRADD_DT_F32,
        .to = to,
        .from = from,
        .launch = &whole
    }));
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

/* ---- sums of halves ---- */

static uint16_t half_of(int64_t i, gradd_dtype_t dtype) {
    uint16_t made;
    gradd_half_put(&made, dtype, (float)(i * 7919 % 1009) / 64 - 7);
    return made;
}

/* By definition: each element's sum is f32, in rising order, and rounded once. */
static void add_plainly(const gradd_row_adds_t *a, float *sum, uint16_t *to) {
    const int64_t n = a->rows.n_rows * a->rows.size;
    for (int64_t i = 0; i < n; i++)
        sum[i] = a->start ? gradd_half_f32((const uint16_t *)a->start + i, a->dtype) : 0;
    for (int64_t i = 0; i < a->rows.n * a->rows.size; i++)
        sum[a->rows.row[i / a->rows.size] * a->rows.size + i % a->rows.size] +=
            gradd_half_f32((const uint16_t *)a->from + i, a->dtype);
    for (int64_t i = 0; i < n; i++)
        gradd_half_put(to + i, a->dtype, sum[i]);
}

static void add_in_parts(gradd_row_adds_t a, int parts, int threads) {
    gradd_launch_t launch = {.parts = parts};
    omp_set_num_threads(threads);
    a.launch = &launch;
    for (; launch.part < (parts ? parts : 1); launch.part++)
        CHECK_OK(gradd_rows_add(&a));
}

static void check_halves(gradd_rows_t rows, gradd_dtype_t dtype, bool starts) {
    const int64_t n = rows.n_rows * rows.size, added = rows.n * rows.size;
    const size_t bytes = (size_t)n * sizeof(uint16_t);
    uint16_t *from = malloc((size_t)added * sizeof *from), *start = malloc(bytes);
    uint16_t *to = malloc(bytes), *expected = malloc(bytes);
    float *sum = malloc((size_t)n * sizeof *sum);
    int64_t *row = malloc((size_t)rows.n * sizeof *row);
    for (int64_t i = 0; i < added; i++)
        from[i] = half_of(i, dtype);
    for (int64_t i = 0; i < n; i++)
        start[i] = half_of(3 * i, dtype);
    for (int64_t i = 0; i < rows.n; i++)
        row[i] = i * i % 101 * 31 % rows.n_rows;
    rows.row = row;
    void *workspace = malloc(gradd_rows_add_workspace(&rows, dtype));
    gradd_row_adds_t a = {.rows = rows,
                          .dtype = dtype,
                          .start = starts ? start : NULL,
                          .to = to,
                          .from = from,
                          .workspace = workspace};
    add_plainly(&a, sum, expected);
    for (int parts = 0; parts <= 7; parts += parts ? 4 : 3)
        for (int threads = 1; threads <= 3; threads += 2) {
            memset(to, 0xee, bytes);
            add_in_parts(a, parts, threads);
            CHECK(!memcmp(to, expected, bytes));
        }
    if (starts) { /* in place */
        a.to = start;
        add_in_parts(a, 5, 2);
        CHECK(!memcmp(start, expected, bytes));
    }
    free(from), free(start), free(to), free(expected), free(sum), free(row), free(workspace);
}

TEST(halves_are_summed_in_f32_in_parts_too) {
    static const gradd_rows_t cases[] = {
        {NULL, 90000, 5000, 1  },
        {NULL, 70000, 300,  3  },
        {NULL, 900,   200,  1  },
        {NULL, 300,   20,   40 },
        {NULL, 40,    7,    700}
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CHECK_EQ_INT(gradd_rows_add_stages(&cases[i], GRADD_DT_BF16), i < 2 ? 3 : 2);
        check_halves(cases[i], GRADD_DT_BF16, false);
        check_halves(cases[i], GRADD_DT_F16, true);
    }
}

/* ---- long rows ---- */

enum { LONG = 200000, N_LONG = 3 }; /* elements */

static float *numbered(int64_t n) {
    float *v = aligned_alloc(64, (size_t)(n * 4 + 63) / 64 * 64);
    CHECK(v != NULL);
    for (int64_t i = 0; i < n; i++)
        v[i] = (float)(i * 7919 % 10007);
    return v;
}

/* The result with c->parts; it must be made in some parts, if any are asked for. */
static float *result_of(const gradd_kernel_t *kernel, const gradd_infer_t *c) {
    gradd_prepared_t ready;
    CHECK_OK(gradd_kernel_prepare(kernel, c, &ready));
    CHECK_EQ_INT(ready.parts, c->parts);
    float *made = numbered(gradd_type_count(&c->out[0]));
    gradd_view_t to = {c->out[0], made};
    gradd_launch_t r = {.op = c->op,
                        .attrs = c->attrs,
                        .opset = 20,
                        .n_in = c->n_in,
                        .n_out = 1,
                        .in = c->in,
                        .out = &to,
                        .parts = ready.parts,
                        .cut = ready.cut,
                        .workspace = malloc(ready.workspace)};
    for (; r.part < (r.parts ? r.parts : 1); r.part++)
        CHECK_OK(gradd_kernel_compute(kernel, &r));
    free(r.workspace);
    gradd_kernel_unprepare(kernel, &ready);
    return made;
}

static void check_long(const char *name, gradd_attrs_t attrs, const gradd_view_t *in, int n_in) {
    gradd_type_t out;
    gradd_infer_t c = {.op = gradd_op_by_name(name),
                       .attrs = attrs,
                       .opset = 20,
                       .n_in = n_in,
                       .n_out = 1,
                       .in = in,
                       .out = &out,
                       .threads = 2};
    CHECK_OK(c.op->infer(&c));
    const gradd_kernel_t *kernel = gradd_backend_kernel(&gradd_backend_cpu, &c);
    CHECK(kernel != NULL);
    float *whole = result_of(kernel, &c);
    c.parts = 4; /* more than two threads have rows for */
    float *parts = result_of(kernel, &c);
    CHECK(!memcmp(whole, parts, (size_t)gradd_type_bytes(&out)));
    free(whole), free(parts);
}

TEST(few_long_rows_are_made_in_parts) {
    int64_t twice[2] = {2, 2};
    float *x = numbered(N_LONG * LONG), *some = numbered(2 * LONG);
    const gradd_type_t all = {
        GRADD_DT_F32, 2, {N_LONG, LONG}
    };
    const gradd_type_t two = {
        GRADD_DT_F32, 2, {2, LONG}
    };
    const gradd_view_t data = {all, x}, updates = {two, some};
    const gradd_view_t index = {
        {GRADD_DT_I64, 1, {2}},
        twice
    };
    const gradd_view_t places = {
        {GRADD_DT_I64, 2, {2, 1}},
        twice
    };
    gradd_attr_t dims = gradd_make_ints("dims", all.dims, 2);
    gradd_attr_t add = gradd_make_string("reduction", "add");
    gradd_attr_t most = gradd_make_string("reduction", "max");
    gradd_cpu_enter(2);
    check_long("Gather", (gradd_attrs_t){0}, (gradd_view_t[]){data, index}, 2);
    check_long("GatherND", (gradd_attrs_t){0}, (gradd_view_t[]){data, places}, 2);
    check_long("GatherGrad", (gradd_attrs_t){&dims, 1}, (gradd_view_t[]){updates, index}, 2);
    check_long("GatherNDGrad", (gradd_attrs_t){&dims, 1}, (gradd_view_t[]){updates, places}, 2);
    check_long("ScatterND", (gradd_attrs_t){0}, (gradd_view_t[]){data, places, updates}, 3);
    check_long("ScatterND", (gradd_attrs_t){&add, 1}, (gradd_view_t[]){data, places, updates}, 3);
    check_long("ScatterND", (gradd_attrs_t){&most, 1}, (gradd_view_t[]){data, places, updates}, 3);
    free(x), free(some);
}

TEST(pieces_are_the_row) {
    CHECK_EQ_INT(gradd_rows_pieces(0, 4), 1);
    CHECK_EQ_INT(gradd_rows_pieces(4096, 4), 1);
    CHECK_EQ_INT(gradd_rows_pieces(1 << 20, 4), 16);
    CHECK_EQ_INT(gradd_rows_pieces(1000003, 4), 1); /* a prime */
    const int64_t row[] = {5, 0};
    int64_t list[6];
    const gradd_rows_t whole = {row, 2, 7, 12}, cut = gradd_rows_cut(&whole, 3, list, true);
    static const int64_t expected[] = {15, 16, 17, 0, 1, 2};
    CHECK(!memcmp(list, expected, sizeof list));
    CHECK_EQ_INT(cut.n_rows, 21);
    CHECK_EQ_INT(cut.size, 4);
}
