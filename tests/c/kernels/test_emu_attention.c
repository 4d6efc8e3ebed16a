/* Attention of f16 on the emulated GPU: the kernels by tensor cores and those for all types against
 * the CPU's in f32 on the same numbers. */
#include "kernels/cases/cases.h"
#include "kernels/contract/backend.h"
#include "kernels/contract/registry.h"
#include "kernels/math/f16.h"
#include "tests/emu/device.h"
#include "tests/emu/parts.h"
#include "tests/sim/sim.h"
#include "tests/test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = GRADD_OP_MAX_IN };

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

static gradd_status_t run_f16(const gradd_infer_t *c, const gradd_launch_t *r, gradd_view_t *out,
                              const gradd_kernel_t *kernel, gradd_case_data_t *heap) {
    gradd_prepared_t prepared;
    gradd_launch_t launch = *r;
    CHECK(kernel && (!kernel->accepts || kernel->accepts(c)));
    for (int j = 0; j < c->n_out; j++) {
        out[j].type = r->out[j].type;
        if (is_narrow(&out[j].type)) out[j].type.dtype = GRADD_DT_F16;
        out[j].data = gradd_case_alloc(heap, (size_t)gradd_type_bytes(&out[j].type));
    }
    CHECK_OK(gradd_kernel_prepare(kernel, c, &prepared));
    launch.in = c->in;
    launch.out = out;
    launch.workspace = gradd_case_alloc(heap, prepared.workspace);
    memset(launch.workspace, 0xff, prepared.workspace);
    const gradd_status_t status = emu_compute(kernel, &launch);
    gradd_kernel_unprepare(kernel, &prepared);
    return status;
}

static void compare_all(const gradd_infer_t *c, const gradd_launch_t *r, const char *kernel,
                        gradd_case_data_t *heap) {
    gradd_view_t out[MOST];
    CHECK_OK(run_f16(c, r, out, find_kernel(c->op->name, kernel), heap));
    for (int j = 0; j < c->n_out; j++)
        compare(&r->out[j], &out[j]);
}

/* Runs the case on the CPU in f32, and then `then` with the same operands in f16. */
static void with_case(const char *name, const char *text,
                      void (*then)(const gradd_infer_t *, const gradd_launch_t *,
                                   gradd_case_data_t *)) {
    gradd_case_data_t data;
    gradd_type_t types[MOST];
    gradd_view_t narrow[MOST], want[MOST];
    const gradd_op_t *op = gradd_op_by_name(name);
    CHECK_OK(gradd_case_parse(text, GRADD_DT_F32, 1, &data));
    const gradd_attrs_t attrs = {data.attrs, data.n_attrs};
    gradd_infer_t c = {op, attrs, 1, data.n_in, data.n_out, data.in, types, 1, 0};
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
    then(&c, &r, &data);
    gradd_case_free(&data);
}

static void by_both(const gradd_infer_t *c, const gradd_launch_t *r, gradd_case_data_t *heap) {
    compare_all(c, r, "mma", heap);
    compare_all(c, r, "simple", heap);
}

TEST_LIMIT(f16_is_near_what_f32_gives, 60) {
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
        with_case(texts[i][0], texts[i][1], by_both);
}

/* ---- ways to the gradient of q ---- */

/* Shared memory of a block, and where gradients of scores may be kept. */
static const struct {
    int shared;
    int64_t bytes, blocks;
} ways[] = {
    {227 << 10, 1 << 30, 256}, /* all heads at once */
    {99 << 10,  1 << 30, 256}, /* in small tiles */
    {227 << 10, 1 << 18, 1  }, /* heads in turns */
    {99 << 10,  1 << 18, 1  },
    {227 << 10, 0,       1  }, /* made twice */
    {99 << 10,  0,       1  },
};

static void by_all_ways(const gradd_infer_t *c, const gradd_launch_t *r, gradd_case_data_t *heap) {
    const gradd_kernel_t *kernel = find_kernel("FusedAttentionGrad", "mma");
    gradd_view_t first[MOST], out[MOST];
    for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++) {
        sim_settings()->shared = ways[i].shared;
        emu_limit_scores(ways[i].bytes, ways[i].blocks);
        CHECK_OK(run_f16(c, r, i ? out : first, kernel, heap));
        for (int j = 0; j < c->n_out; j++) {
            compare(&r->out[j], i ? &out[j] : &first[j]);
            if (i)
                CHECK(
                    !memcmp(out[j].data, first[j].data, (size_t)gradd_type_bytes(&first[j].type)));
        }
    }
}

/* A range of keys for each of n queries: from the begin of its document to 20 keys behind it, which
 * is in the middle of a tile, and none for the queries of every third document. */
static void print_documents(char *to, size_t room, int n, int document) {
    size_t at = (size_t)snprintf(to, room, "i32[1,1,%d,3]={", n);
    for (int i = 0; i < n; i++) {
        const bool empty = i / document % 3 == 2;
        const int end = i + 21 < n ? i + 21 : n;
        at += (size_t)snprintf(to + at, room - at, "%s%d,%d,1", i ? "," : "",
                               empty ? 0 : i / document * document, empty ? 0 : end);
    }
    snprintf(to + at, room - at, "}");
}

TEST_LIMIT(gradients_have_the_same_bits_by_all_ways, 120) {
    static char ranges[1 << 14], text[1 << 15];
    print_documents(ranges, sizeof ranges, 200, 64);
    snprintf(text, sizeof text,
             "f32[1,4,200,80] f32[1,4,200,112] f32[1,2,200,112] f32[1,2,200,80] f32[1,4,200,80] "
             "f32[1,4,2,200]:(2,3) - - %s | scale=0.1 -> 3",
             ranges);
    with_case("FusedAttentionGrad", text, by_all_ways);
    with_case("FusedAttentionGrad",
              "f32[1,3,70,128] f32[1,3,70,128] f32[1,3,150,128] f32[1,3,150,128] f32[1,3,70,128] "
              "f32[1,3,2,70]:(2,3) - f32[70,150] | scale=0.1 dropout=0.25 -> 3",
              by_all_ways);
}

static void refused(const gradd_infer_t *c, const gradd_launch_t *r, gradd_case_data_t *heap) {
    gradd_view_t out[MOST];
    sim_settings()->shared = 60 << 10;
    CHECK_STATUS(GRADD_E_DEVICE,
                 run_f16(c, r, out, find_kernel("FusedAttentionGrad", "mma"), heap));
    CHECK_ERROR_HAS("FusedAttentionGrad");
    CHECK_ERROR_HAS("invalid argument");
}

TEST(a_block_without_enough_shared_memory_is_refused) {
    with_case("FusedAttentionGrad",
              "f32[1,1,40,128] f32[1,1,40,128] f32[1,1,40,128] f32[1,1,40,128] f32[1,1,40,128] "
              "f32[1,1,2,40]:(2,3) | scale=0.1 -> 3",
              refused);
}
