/* The gradient of a convolution's weight in parts over images: the sum of all, and of the same bits
 * each time.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/contract/backend.h"
#include "kernels/contract/registry.h"
#include "kernels/cpu/gemm/gemm.h"
#include "kernels/rules/rules.h"
#include "tests/test.h"

enum { IMAGES = 29, SIDE = 24, CHANNELS = 32, TAPS = 9, PARTS = 3 };

static float *values(int64_t n, int64_t step) {
    float *v = aligned_alloc(64, (size_t)(n * 4 + 63) / 64 * 64);
    CHECK(v != NULL);
    for (int64_t i = 0; i < n; i++)
        v[i] = (float)(i * step % 401) / 400 - 0.5f;
    return v;
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

static void check(const char *name, bool last) {
    const gradd_op_t *op = gradd_op_by_name(name);
    const gradd_type_t first_type = {
        GRADD_DT_F32, 4, {IMAGES, CHANNELS, SIDE, SIDE}
    };
    const gradd_type_t last_type = {
        GRADD_DT_F32, 4, {IMAGES, SIDE, SIDE, CHANNELS}
    };
    const gradd_type_t *type = last ? &last_type : &first_type;
    const int64_t three[] = {3, 3}, ones[] = {1, 1};
    gradd_attr_t attrs[] = {gradd_make_ints("kernel_shape", three, 2),
                            gradd_make_ints("begins", ones, 2)};
    float *x = values(gradd_type_count(type), 7919), *dy = values(gradd_type_count(type), 31);
    float *got[3];
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
    CHECK_EQ_INT(n, TAPS * CHANNELS * CHANNELS);
    const gradd_kernel_t *kernel = gradd_backend_kernel(&gradd_backend_cpu, &c);
    const bool has_library = !strncmp(gradd_gemm_library(), "oneDNN", 6);
    if (!kernel && !has_library) test_skip("%s is written out without oneDNN", name);
    CHECK(kernel != NULL);
    for (int i = 0; i < 3; i++) { /* as a whole, and twice in parts */
        gradd_prepared_t ready;
        got[i] = values(n, 1);
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
        if (i && !ready.parts) test_skip("%s is made as a whole by %s", name, kernel->name);
        CHECK_EQ_INT(ready.parts, c.parts);
        compute(kernel, &ready, &r, 0x7f * i);
        gradd_kernel_unprepare(kernel, &ready);
    }
    CHECK(!memcmp(got[1], got[2], sizeof(float) * (size_t)n));
    for (int64_t i = 0; i < n; i++)
        CHECK(fabsf(got[1][i] - got[0][i]) <= 1e-4f * (1 + fabsf(got[0][i])));
    for (int i = 0; i < 3; i++)
        free(got[i]);
    free(x), free(dy);
}

TEST(a_part_has_some_of_the_images) {
    gradd_cpu_enter(2);
    check("ConvLastWeightGrad", true);
    check("ConvWeightGrad", false);
}
