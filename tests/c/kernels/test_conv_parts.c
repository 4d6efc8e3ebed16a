/* The gradient of a convolution's weight in parts, over images or over pieces of columns: the sum
 * of all, and of the same bits each time.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/contract/backend.h"
#include "kernels/contract/registry.h"
#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/half.h"
#include "kernels/rules/rules.h"
#include "tests/test.h"

enum { IMAGES = 29, SIDE = 24, CHANNELS = 32, PARTS = 3 };

static void *values(int64_t n, int64_t step, gradd_dtype_t dtype) {
    const int64_t bytes = n * (int64_t)gradd_dtype_bytes(dtype);
    void *v = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64);
    CHECK(v != NULL);
    for (int64_t i = 0; i < n; i++) {
        uint32_t mixed = (uint32_t)(i + 1) * 2654435761u ^ (uint32_t)step * 40503u;
        mixed = (mixed ^ mixed >> 15) * 2246822519u;
        const float x = (float)(mixed >> 12) / (1 << 20) - 0.5f;
        if (dtype == GRADD_DT_F32)
            ((float *)v)[i] = x;
        else
            gradd_half_put((uint16_t *)v + i, dtype, x);
    }
    return v;
}

static float value(const void *v, int64_t i, gradd_dtype_t dtype) {
    return dtype == GRADD_DT_F32 ? ((const float *)v)[i]
                                 : gradd_half_f32((const uint16_t *)v + i, dtype);
}

/* All parts, with what the workspace holds at first. */
static void compute(const gradd_kernel_t *kernel, const gradd_prepared_t *ready, gradd_launch_t *r,
                    int fill) {
    r->workspace = aligned_alloc(64, ready->workspace / 64 * 64 + 64);
    CHECK(r->workspace != NULL);
    memset(r->workspace, fill, ready->workspace);
    r->state = ready->state, r->parts = ready->parts;
    for (r->part = 0; r->part < (r->parts ? r->parts : 1); r->part++)
        CHECK_OK(kernel->compute(r));
    free(r->workspace);
}

/* How far a part's order of the sums may take a result from that of the whole: some roundings of
 * f32 of sums of some hundred, and one of bf16 in the result. */
static void check_near(const void *whole, const void *parts, int64_t n, gradd_dtype_t dtype) {
    for (int64_t i = 0; i < n; i++) {
        const float a = value(whole, i, dtype), b = value(parts, i, dtype);
        CHECK(fabsf(b - a) <= 1e-3f + fabsf(a) * (dtype == GRADD_DT_F32 ? 1e-4f : 1e-2f));
    }
}

typedef struct tried_s {
    const char *op;
    bool last;
    gradd_dtype_t dtype;
    int64_t taps; /* along an axis */
    const char *kernel;
} tried_t;

/* The kernel of that name, if it takes the node. */
static const gradd_kernel_t *find(const tried_t *t, const gradd_infer_t *c) {
    for (size_t f = 0; f < gradd_backend_cpu.n_kernels; f++)
        for (size_t i = 0; i < gradd_backend_cpu.kernels[f]->n; i++) {
            const gradd_kernel_t *kernel = &gradd_backend_cpu.kernels[f]->v[i];
            if (!strcmp(kernel->op, t->op) && !strcmp(kernel->name, t->kernel))
                return !kernel->accepts || kernel->accepts(c) ? kernel : NULL;
        }
    return NULL;
}

static void check(const tried_t *t) {
    const gradd_op_t *op = gradd_op_by_name(t->op);
    const gradd_type_t first_type = {
        t->dtype, 4, {IMAGES, CHANNELS, SIDE, SIDE}
    };
    const gradd_type_t last_type = {
        t->dtype, 4, {IMAGES, SIDE, SIDE, CHANNELS}
    };
    const gradd_type_t *type = t->last ? &last_type : &first_type;
    const int64_t taps[] = {t->taps, t->taps}, begins[] = {t->taps / 2, t->taps / 2};
    gradd_attr_t attrs[] = {gradd_make_ints("kernel_shape", taps, 2),
                            gradd_make_ints("begins", begins, 2)};
    void *x = values(gradd_type_count(type), 7919, t->dtype);
    void *dy = values(gradd_type_count(type), 31, t->dtype), *got[3];
    const gradd_view_t in[] = {
        {*type, x },
        {*type, dy}
    };
    gradd_type_t out;
    gradd_infer_t c = {
        .op = op, .attrs = {attrs, 2},
             .opset = 20, .n_in = 2, .n_out = 1, .in = in, .out = &out
    };
    CHECK_OK(op->infer(&c));
    const int64_t n = gradd_type_count(&out);
    CHECK_EQ_INT(n, t->taps * t->taps * CHANNELS * CHANNELS);
    const gradd_kernel_t *kernel = find(t, &c);
    if (!kernel) {
        printf("%s of %s is not made by %s here\n", t->op, gradd_dtype_name(t->dtype), t->kernel);
        free(x), free(dy);
        return;
    }
    for (int i = 0; i < 3; i++) { /* as a whole, and twice in parts */
        gradd_prepared_t ready;
        got[i] = values(n, 1, t->dtype);
        gradd_view_t to = {out, got[i]};
        gradd_launch_t r = {
            .op = op,
            .attrs = {attrs, 2},
            .opset = 20,
            .n_in = 2,
            .n_out = 1,
            .in = in,
            .out = &to
        };
        c.parts = i ? PARTS : 0;
        CHECK_OK(gradd_kernel_prepare(kernel, &c, &ready));
        CHECK_EQ_INT(ready.parts, c.parts);
        compute(kernel, &ready, &r, 0x7f * i);
        gradd_kernel_unprepare(kernel, &ready);
    }
    CHECK(!memcmp(got[1], got[2], (size_t)gradd_type_bytes(&out)));
    check_near(got[0], got[1], n, t->dtype);
    if (!strcmp(t->kernel, "columns")) /* their pieces are added up in the same order */
        CHECK(!memcmp(got[0], got[1], (size_t)gradd_type_bytes(&out)));
    for (int i = 0; i < 3; i++)
        free(got[i]);
    free(x), free(dy);
}

TEST_LIMIT(a_part_has_some_of_the_images, 60) {
    static const tried_t tried[] = {
        {"ConvLastWeightGrad", true,  GRADD_DT_F32,  3, "oneDNN f32" },
        {"ConvWeightGrad",     false, GRADD_DT_F32,  3, "oneDNN f32" },
        {"ConvLastWeightGrad", true,  GRADD_DT_BF16, 3, "oneDNN bf16"},
        {"ConvWeightGrad",     false, GRADD_DT_BF16, 3, "oneDNN bf16"},
        {"ConvWeightGrad",     false, GRADD_DT_F32,  5, "columns"    },
    };
    gradd_cpu_enter(2);
    for (size_t i = 0; i < sizeof tried / sizeof *tried; i++)
        check(&tried[i]);
}

/* ---- bands of rows ---- */

enum { HIGH = 301, WIDE = 161 };

typedef struct banded_s {
    gradd_dtype_t dtype;
    int64_t images, stride, dilation, begin, end; /* along both axes */
    int parts;
} banded_t;

/* One of the three operators, with what it is given, and its result with c->parts; *out_parts: how
 * many it was made in. */
static void *make_band(const gradd_infer_t *c, const char *name, gradd_dtype_t dtype,
                       int *out_parts) {
    const tried_t named = {.op = c->op->name, .kernel = name};
    const gradd_kernel_t *kernel = find(&named, c);
    gradd_prepared_t ready;
    *out_parts = -1;
    if (!kernel) return NULL;
    void *made = values(gradd_type_count(&c->out[0]), 1, dtype);
    const gradd_view_t to = {c->out[0], made};
    gradd_launch_t r = {.op = c->op,
                        .attrs = c->attrs,
                        .opset = 20,
                        .n_in = c->n_in,
                        .n_out = 1,
                        .in = c->in,
                        .out = &to};
    CHECK_OK(gradd_kernel_prepare(kernel, c, &ready));
    compute(kernel, &ready, &r, 0x7f);
    *out_parts = ready.parts;
    gradd_kernel_unprepare(kernel, &ready);
    return made;
}

/* 1: in parts, of the same values; -1: by another kernel here. */
static int compare_bands(const char *op, gradd_attrs_t attrs, const gradd_view_t in[2],
                         const banded_t *b) {
    gradd_type_t out;
    int none, parts;
    gradd_infer_t c = {.op = gradd_op_by_name(op),
                       .attrs = attrs,
                       .opset = 20,
                       .n_in = 2,
                       .n_out = 1,
                       .in = in,
                       .out = &out,
                       .threads = 2};
    const char *name = b->dtype == GRADD_DT_F32 ? "oneDNN f32" : "oneDNN bf16";
    CHECK_OK(c.op->infer(&c));
    void *whole = make_band(&c, name, b->dtype, &none);
    c.parts = b->parts;
    void *made = make_band(&c, name, b->dtype, &parts);
    if (!whole) return -1;
    CHECK_EQ_INT(none, 0);
    check_near(whole, made, gradd_type_count(&out), b->dtype);
    free(whole), free(made);
    return parts > b->images;
}

static void check_bands(const banded_t *b) {
    const int64_t ends[] = {b->begin, b->begin, b->end, b->end}, *begins = ends;
    const int64_t strides[] = {b->stride, b->stride}, dilations[] = {b->dilation, b->dilation};
    const int64_t reach = 2 * b->dilation, taps[] = {3, 3}, sizes[] = {HIGH, WIDE};
    const gradd_type_t x_type = {
        b->dtype, 4, {b->images, HIGH, WIDE, CHANNELS}
    };
    const gradd_type_t y_type = {
        b->dtype,
        4,
        {b->images, (HIGH + b->begin + b->end - reach - 1) / b->stride + 1,
          (WIDE + b->begin + b->end - reach - 1) / b->stride + 1, CHANNELS}
    };
    const gradd_type_t w_type = {
        b->dtype, 4, {CHANNELS, CHANNELS, 3, 3}
    };
    gradd_attr_t attrs[4] = {gradd_make_ints("strides", strides, 2),
                             gradd_make_ints("dilations", dilations, 2)};
    const gradd_view_t x = {x_type, values(gradd_type_count(&x_type), 7919, b->dtype)};
    const gradd_view_t y = {y_type, values(gradd_type_count(&y_type), 31, b->dtype)};
    const gradd_view_t w = {w_type, values(gradd_type_count(&w_type), 101, b->dtype)};
    int n[3];
    attrs[2] = gradd_make_ints("pads", ends, 4);
    n[0] = compare_bands("ConvLast", (gradd_attrs_t){attrs, 3}, (gradd_view_t[]){x, w}, b);
    attrs[2] = gradd_make_ints("begins", begins, 2);
    attrs[3] = gradd_make_ints("dims", sizes, 2);
    n[1] = compare_bands("ConvLastDataGrad", (gradd_attrs_t){attrs, 4}, (gradd_view_t[]){y, w}, b);
    attrs[3] = gradd_make_ints("kernel_shape", taps, 2);
    n[2] =
        compare_bands("ConvLastWeightGrad", (gradd_attrs_t){attrs, 4}, (gradd_view_t[]){x, y}, b);
    for (int i = 0; i < 3; i++)
        CHECK(n[i]);
    free(x.data), free(y.data), free(w.data);
}

TEST_LIMIT(a_part_has_some_rows_of_an_image, 60) {
    static const banded_t cases[] = {
        {GRADD_DT_F32,  1, 1, 1, 1, 1, 5 },
        {GRADD_DT_F32,  2, 1, 1, 0, 2, 7 },
        {GRADD_DT_F32,  1, 2, 1, 1, 1, 5 },
        {GRADD_DT_F32,  1, 1, 2, 2, 2, 9 },
        {GRADD_DT_F32,  1, 2, 3, 6, 5, 6 },
        {GRADD_DT_BF16, 1, 1, 1, 1, 1, 5 },
        {GRADD_DT_BF16, 1, 2, 1, 1, 0, 30},
    };
    gradd_cpu_enter(2);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check_bands(&cases[i]);
}
