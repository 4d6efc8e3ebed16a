/* Running sums in parts: by blocks of lanes, or by steps along the axis whose sums go on in the
 * next part.
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/contract/backend.h"
#include "kernels/contract/registry.h"
#include "kernels/rules/rules.h"
#include "tests/test.h"

enum { PARTS = 3 };

/* Of a tensor along that axis, as a whole and in parts. */
static void check(const gradd_type_t *type, int64_t axis, bool reverse, bool *out_carries) {
    const gradd_op_t *op = gradd_op_by_name("CumSum");
    const int64_t n = gradd_type_count(type);
    gradd_attr_t attr = gradd_make_int("reverse", reverse);
    float *x = calloc((size_t)n, sizeof *x), *whole = calloc((size_t)n, sizeof *x);
    float *parts = calloc((size_t)n, sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = (float)(i * 7919 % 401) / 400 - 0.5f;
    const gradd_view_t in[] = {
        {*type,                  x    },
        {{GRADD_DT_I64, 0, {0}}, &axis}
    };
    gradd_type_t out = *type;
    gradd_infer_t c = {
        .op = op, .attrs = {&attr, 1},
             .opset = 20, .n_in = 2, .n_out = 1, .in = in, .out = &out
    };
    gradd_view_t to = {*type, whole};
    gradd_launch_t r = {
        .op = op, .attrs = {&attr, 1},
             .opset = 20, .n_in = 2, .n_out = 1, .in = in, .out = &to
    };
    CHECK_OK(gradd_cpu_call(&c, &r));
    const gradd_kernel_t *kernel = gradd_backend_kernel(&gradd_backend_cpu, &c);
    gradd_prepared_t ready;
    c.parts = PARTS;
    CHECK_OK(gradd_kernel_prepare(kernel, &c, &ready));
    CHECK_EQ_INT(ready.parts, PARTS);
    *out_carries = ready.workspace > 0;
    r.workspace = ready.workspace ? aligned_alloc(64, ready.workspace / 64 * 64 + 64) : NULL;
    r.parts = ready.parts;
    to.data = parts;
    for (r.part = 0; r.part < PARTS; r.part++)
        CHECK_OK(kernel->compute(&r));
    CHECK(!memcmp(whole, parts, sizeof *x * (size_t)n));
    free(r.workspace), free(x), free(whole), free(parts);
}

TEST(the_parts_are_the_whole) {
    static const gradd_type_t row = {GRADD_DT_F32, 1, {4001}};
    static const gradd_type_t lanes = {
        GRADD_DT_F32, 3, {5, 50, 700}
    };
    bool carries;
    gradd_cpu_enter(2);
    for (int reverse = 0; reverse < 2; reverse++) {
        check(&row, 0, reverse, &carries);
        CHECK(carries);
        check(&lanes, 1, reverse, &carries);
        CHECK(!carries);
        check(&lanes, 2, reverse, &carries);
        CHECK(!carries);
        check(&lanes, 0, reverse, &carries);
        CHECK(!carries);
    }
}
