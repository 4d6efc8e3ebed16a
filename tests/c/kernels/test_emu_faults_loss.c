/* Labels on the emulated GPU. Out of range: the refusal of the CPU, word for word, of the first row
 * that is wrong, and nothing is written outside. Ignored: what x holds there reaches nothing. */
#include "kernels/cases/cases.h"
#include "kernels/contract/registry.h"
#include "tests/c/eager.h"
#include "tests/emu/device.h"
#include "tests/emu/order.h"
#include "tests/test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct bad_s {
    const char *op, *text;
} bad_t;

#define GRAD4 "f32[] f32[4,3] "
#define STATS "f32[4,2]:(0.5,1)"

static const bad_t bad[] = {
    {"CrossEntropy",                  "f32[4,3] i64[4]={0,3,-1,2}"                                           },
    {"CrossEntropy",                  "f32[4,3] i32[4]={0,-100,2,7} | ignore_index=-100"                     },
    {"CrossEntropy",                  "f32[2,2,3] i64[2,2]={9,1,9,-2} | shift=1"                             },
    {"CrossEntropy",                  "f32[300,40] i64[300]={41} - f32[40] | reduction=\"none\""             },
    {"CrossEntropyGrad",              GRAD4 "i64[4]={0,1,3,5} " STATS                                        },
    {"CrossEntropyGrad",              GRAD4 "i32[4]={-1,1,3,5} " STATS " | reduction=\"sum\" ignore_index=-1"},
    {"SoftmaxCrossEntropyLoss",       "f32[4,3] i64[4]={0,1,2,3} -> 2"                                       },
    {"SoftmaxCrossEntropyLoss",       "f32[2,3,2] i64[2,2]={0,1,-7,3} f32[3]"                                },
    {"SoftmaxCrossEntropyLossGrad",   GRAD4 "i64[4]={0,1,2,9223372036854775807}"                             },
    {"SoftmaxCrossEntropyLossGrad",   "f32[] f32[2,3,2] i32[2,2]={0,3,-7,3}"                                 },
    {"NegativeLogLikelihoodLoss",     "f32[4,3] i64[4]={0,-1,2,3} f32[3]"                                    },
    {"NegativeLogLikelihoodLossGrad", "f32[] i64[4]={0,1,2,3} | shape=[4,3]"                                 },
    {"LinearCrossEntropy",            "f32[4,2] f32[2,3] i64[4]={0,-2,1,3} | chunk=2 -> 3"                   },
    {"LinearCrossEntropy",
     "f32[4,2] f32[2,3] i64[4]={0,1,9,1} - - - f32[4]={1,1,0,1} | reduction=\"sum\""                         },
};

typedef struct attempt_s {
    gradd_infer_t infer;
    gradd_type_t types[GRADD_OP_MAX_OUT];
    gradd_view_t in[GRADD_OP_MAX_IN], out[GRADD_OP_MAX_OUT];
    gradd_launch_t launch;
} attempt_t;

static gradd_status_t prepare(const bad_t *b, gradd_case_data_t *d, attempt_t *c) {
    const gradd_op_t *op = gradd_op_by_name(b->op);
    CHECK(op != NULL);
    *c = (attempt_t){
        .infer = {op,
                  {d->attrs, d->n_attrs},
                  eager_opset(op),
                  d->n_in,
                  d->n_out ? d->n_out : op->min_out,
                  c->in,
                  c->types,
                  1}
    };
    memcpy(c->in, d->in, sizeof c->in);
    GRADD_TRY(gradd_op_infer(&c->infer));
    for (int j = 0; j < c->infer.n_out; j++) {
        c->out[j].type = c->types[j];
        c->out[j].data = gradd_case_alloc(d, (size_t)gradd_type_bytes(&c->types[j]));
    }
    c->launch = (gradd_launch_t){.op = op,
                                 .attrs = c->infer.attrs,
                                 .opset = c->infer.opset,
                                 .n_in = c->infer.n_in,
                                 .n_out = c->infer.n_out,
                                 .in = d->in,
                                 .out = c->out,
                                 .launch = 3,
                                 .threads = 1};
    return GRADD_OK;
}

static gradd_status_t run_emulated(attempt_t *c) {
    gradd_prepared_t prepared;
    const gradd_kernel_t *kernel = gradd_backend_kernel(&gradd_backend_emu, &c->infer);
    CHECK(kernel != NULL);
    GRADD_TRY(gradd_kernel_prepare(kernel, &c->infer, &prepared));
    void *workspace = malloc(prepared.workspace + 1); /* a sanitizer sees its end */
    CHECK(workspace != NULL);
    c->launch.workspace = workspace;
    c->launch.state = prepared.state;
    const gradd_status_t status = emu_compute(kernel, &c->launch);
    free(workspace);
    gradd_kernel_unprepare(kernel, &prepared);
    return status;
}

TEST(labels_out_of_range_are_refused_as_on_the_cpu) {
    char sentence[256];
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        gradd_case_data_t data;
        attempt_t call;
        CHECK_OK(gradd_case_parse(bad[i].text, GRADD_DT_F32, 1, &data));
        CHECK_OK(prepare(&bad[i], &data, &call));
        CHECK_STATUS(GRADD_E_INDEX, gradd_cpu_call(&call.infer, &call.launch));
        snprintf(sentence, sizeof sentence, "%s", gradd_error_message());
        CHECK(!strncmp(sentence, "label ", 6));
        for (long order = 0; order < 4; order++) {
            emu_set_order(order);
            CHECK_STATUS(GRADD_E_INDEX, run_emulated(&call));
            CHECK_EQ_STR(gradd_error_message(), sentence);
        }
        emu_set_order(0);
        gradd_case_free(&data);
    }
}

static void fill(const gradd_view_t *v, int64_t from, int64_t n, float value) {
    for (int64_t i = from; i < from + n; i++)
        ((float *)v->data)[i] = value;
}

/* Rows of no number without a label or a weight: the loss and all gradients are the CPU's. */
static void check_dead_rows(const char *text) {
    const bad_t b = {"LinearCrossEntropy", text};
    float near[64];
    gradd_case_data_t data;
    attempt_t call;
    CHECK_OK(gradd_case_parse(b.text, GRADD_DT_F32, 1, &data));
    CHECK_OK(prepare(&b, &data, &call));
    fill(&data.in[0], 2, 2, NAN);
    fill(&data.in[0], 6, 2, INFINITY);
    CHECK_OK(gradd_cpu_call(&call.infer, &call.launch));
    size_t at = 0;
    for (int j = 0; j < call.infer.n_out; j++) {
        const size_t bytes = (size_t)gradd_type_bytes(&call.types[j]);
        memcpy(near + at, call.out[j].data, bytes);
        memset(call.out[j].data, 0xff, bytes);
        at += bytes / sizeof near[0];
    }
    CHECK_OK(run_emulated(&call));
    at = 0;
    for (int j = 0; j < call.infer.n_out; j++)
        for (int64_t i = 0; i < gradd_type_count(&call.types[j]); i++, at++) {
            const float x = ((const float *)call.out[j].data)[i];
            CHECK(isfinite(near[at]));
            CHECK_NEAR(x, near[at], 1e-6);
        }
    gradd_case_free(&data);
}

TEST(rows_that_count_nothing_reach_nothing) {
    check_dead_rows("f32[5,2] f32[2,3] i64[5]={0,-1,2,-1,1} f32[3] | ignore_index=-1 chunk=2 -> 4");
    check_dead_rows("f32[5,2] f32[3,2] i64[5]={0,1,2,0,1} f32[3] - - f32[5]={1,0,2,0,0.5} | "
                    "transB=1 reduction=\"sum\" chunk=3 -> 4");
}
