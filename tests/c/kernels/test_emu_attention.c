/* Attention of f16 on the emulated GPU: the kernels by tensor cores and those for all types against
 * the CPU's in f32 on the same numbers. */
#include "kernels/cases/cases.h"
#include "kernels/contract/backend.h"
#include "kernels/contract/registry.h"
#include "kernels/math/f16.h"
#include "tests/emu/device.h"
#include "tests/test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 8 };

static const char *const texts[][2] = {
    {"FusedAttention",     "f32[1,2,70,32] f32[1,1,90,32] f32[1,1,90,48] bool[70,90] | scale=0.2 -> 2"},
    {"FusedAttention",
     "f32[1,6,4,32] f32[1,6,1,32] f32[1,6,1,32] - f32[4,4,4] "
     "i32[1,1,6,3]={0,1,1,0,2,1,2,3,1,2,4,1,2,5,1,2,6,1} - i64[6]={0,2,4,5,7,-8} | layout=15 "
     "positions=4 softcap=2.0 scale=0.2 dropout=0.25 -> 2"                                            },
    {"FusedAttentionGrad",
     "f32[1,2,40,80] f32[1,2,40,80] f32[1,1,70,80] f32[1,1,70,80] f32[1,2,40,80] "
     "f32[1,2,2,40]:(3,4) | scale=0.1 dropout=0.25 -> 3"                                              },
};

/* Whether it is f16 there: statistics and the bias stay f32. */
static bool is_narrow(const gradd_type_t *t) {
    return t->dtype == GRADD_DT_F32 && t->rank == 4 && t->dims[2] != 2;
}

/* The same numbers in both types. */
static gradd_view_t narrowed(gradd_case_data_t *heap, gradd_view_t *wide) {
    gradd_view_t to = {.type = wide->type};
    float *x = wide->data;
    to.type.dtype = GRADD_DT_F16;
    to.data = gradd_case_alloc(heap, (size_t)gradd_type_bytes(&to.type));
    for (int64_t i = 0, n = gradd_type_count(&to.type); i < n; i++) {
        ((gradd_f16_t *)to.data)[i] = gradd_f32_f16(x[i]);
        x[i] = gradd_f16_f32(((gradd_f16_t *)to.data)[i]);
    }
    return to;
}

static const gradd_kernel_t *find_kernel(const char *op, const char *name) {
    const gradd_backend_t *b = &gradd_backend_emu;
    for (size_t f = 0; f < b->n_kernels; f++)
        for (size_t i = 0; i < b->kernels[f]->n; i++)
            if (!strcmp(b->kernels[f]->v[i].op, op) && !strcmp(b->kernels[f]->v[i].name, name))
                return &b->kernels[f]->v[i];
    return NULL;
}

static void compare(const gradd_view_t *want, const gradd_view_t *got) {
    double most = 0, apart = 0;
    for (int64_t i = 0, n = gradd_type_count(&want->type); i < n; i++) {
        const float x = ((const float *)want->data)[i];
        const float y = got->type.dtype == GRADD_DT_F16
                            ? gradd_f16_f32(((const gradd_f16_t *)got->data)[i])
                            : ((const float *)got->data)[i];
        most = fmax(most, fabs((double)x));
        apart = fmax(apart, isfinite(y) ? fabs((double)x - (double)y) : INFINITY);
    }
    CHECK_NEAR(apart, 0, 3e-3 * most);
}

static void run_f16(const gradd_infer_t *c, const gradd_launch_t *r, const gradd_view_t *want,
                    const gradd_kernel_t *kernel, gradd_case_data_t *heap) {
    gradd_view_t out[MOST];
    gradd_prepared_t prepared;
    gradd_launch_t launch = *r;
    CHECK(kernel && (!kernel->accepts || kernel->accepts(c)));
    for (int j = 0; j < c->n_out; j++) {
        out[j].type = want[j].type;
        if (is_narrow(&want[j].type)) out[j].type.dtype = GRADD_DT_F16;
        out[j].data = gradd_case_alloc(heap, (size_t)gradd_type_bytes(&out[j].type));
    }
    CHECK_OK(gradd_kernel_prepare(kernel, c, &prepared));
    launch.in = c->in;
    launch.out = out;
    launch.workspace = gradd_case_alloc(heap, prepared.workspace);
    CHECK_OK(emu_compute(kernel, &launch));
    gradd_kernel_unprepare(kernel, &prepared);
    for (int j = 0; j < c->n_out; j++)
        compare(&want[j], &out[j]);
}

TEST_LIMIT(f16_is_near_what_f32_gives, 60) {
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        gradd_case_data_t data;
        gradd_type_t types[MOST];
        gradd_view_t narrow[MOST], want[MOST];
        const gradd_op_t *op = gradd_op_by_name(texts[i][0]);
        CHECK_OK(gradd_case_parse(texts[i][1], GRADD_DT_F32, 1, &data));
        const gradd_attrs_t attrs = {data.attrs, data.n_attrs};
        gradd_infer_t c = {op, attrs, 1, data.n_in, data.n_out, data.in, types, 1};
        CHECK_OK(gradd_op_infer(&c));
        for (int k = 0; k < data.n_in; k++) {
            narrow[k] = data.in[k];
            if (is_narrow(&data.in[k].type)) narrow[k] = narrowed(&data, &data.in[k]);
        }
        for (int j = 0; j < c.n_out; j++) {
            want[j].type = types[j];
            want[j].data = gradd_case_alloc(&data, (size_t)gradd_type_bytes(&types[j]));
        }
        gradd_launch_t r = {.op = op,
                            .attrs = attrs,
                            .opset = 1,
                            .n_in = data.n_in,
                            .n_out = data.n_out,
                            .in = data.in,
                            .out = want,
                            .seed = 3,
                            .threads = 1};
        CHECK_OK(gradd_cpu_call(&c, &r));
        c.in = narrow;
        run_f16(&c, &r, want, find_kernel(texts[i][0], "mma"), &data);
        run_f16(&c, &r, want, find_kernel(texts[i][0], "simple"), &data);
        gradd_case_free(&data);
    }
}
