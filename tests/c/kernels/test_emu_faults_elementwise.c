/* Values that arithmetic, dropout and random numbers refuse at run time: the emulated GPU reports
 * the same first one as the CPU, in any order of its threads. */
#include "kernels/cases/cases.h"
#include "kernels/contract/backend.h"
#include "kernels/contract/registry.h"
#include "tests/c/eager.h"
#include "tests/emu/device.h"
#include "tests/emu/order.h"
#include "tests/test.h"

#include <stdlib.h>
#include <string.h>

typedef struct refused_s {
    const char *op, *text, *sentence;
} refused_t;

static const refused_t refused[] = {
    {"Div",         "i64[4] i64[4]={1,2,0,0}",                "integer division by zero, element 2"              },
    {"Div",         "i32[3,2] i32[2]={1,0}",                  "integer division by zero, element 1"              },
    {"Mod",         "i64[4] i64[]={0}",                       "integer division by zero, element 0"              },
    {"Mod",         "i32[600] i32[600]={0} | fmod=1",         "integer division by zero, element 0"              },
    {"Dropout",     "f32[3] f32[]={1.5} bool[]={1}",          "the ratio is 1.5, not within 0 and 1"             },
    {"Dropout",     "f32[0] f32[]={-0.5}",                    "the ratio is -0.5, not within 0 and 1"            },
    {"Dropout",     "f32[300] f64[]={nan} bool[]={1} i64[3]", "the ratio is nan, not within 0 and 1"             },
    {"DropoutGrad", "f32[3] f32[]={2.0} bool[]={1} | node=1", "the ratio is 2, not within 0 and 1"               },
    {"DropoutAdd",  "f32[3] f32[3] | ratio=-1.0",             "the ratio is -1, not within 0 and 1"              },
    {"Bernoulli",   "f32[4]={0,1.5,-1,0.5}",                  "probability 1.5, element 1, is not within 0 and 1"},
    {"Bernoulli",   "f64[2000]={nan} | dtype=9",              "probability nan, element 0, is not within 0 and 1"},
};

static gradd_status_t attempt(const gradd_op_t *op, gradd_case_data_t *data, bool there) {
    gradd_type_t types[GRADD_OP_MAX_OUT] = {{0}};
    gradd_view_t out[GRADD_OP_MAX_OUT];
    gradd_infer_t c = {
        .op = op,
        .attrs = {data->attrs, data->n_attrs},
        .opset = eager_opset(op),
        .n_in = data->n_in,
        .n_out = op->min_out,
        .in = data->in,
        .out = types
    };
    GRADD_TRY(gradd_op_infer(&c));
    for (int j = 0; j < c.n_out; j++) {
        out[j].type = types[j];
        out[j].data = gradd_case_alloc(data, (size_t)gradd_type_bytes(&types[j]));
    }
    gradd_launch_t r = {.op = op,
                        .attrs = c.attrs,
                        .opset = c.opset,
                        .n_in = c.n_in,
                        .n_out = c.n_out,
                        .in = data->in,
                        .out = out};
    if (!there) return gradd_cpu_call(&c, &r);
    const gradd_kernel_t *kernel = gradd_backend_kernel(&gradd_backend_emu, &c);
    CHECK(kernel != NULL);
    return emu_compute(kernel, &r);
}

TEST(values_are_refused_in_the_same_words) {
    static const long orders[] = {0, 1, 3, 41};
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++)
        for (int k = -1; k < 4; k++) { /* -1: the CPU */
            gradd_case_data_t data;
            const gradd_op_t *op = gradd_op_by_name(refused[i].op);
            CHECK(op != NULL);
            CHECK_OK(gradd_case_parse(refused[i].text, GRADD_DT_F32, 1, &data));
            emu_set_order(k < 0 ? 0 : orders[k]);
            const gradd_status_t status = attempt(op, &data, k >= 0);
            if (status != GRADD_E_INDEX || strcmp(gradd_error_message(), refused[i].sentence))
                test_fail(__FILE__, __LINE__, "%s \"%s\" %s: %s \"%s\", expected \"%s\"",
                          refused[i].op, refused[i].text, k < 0 ? "here" : "there",
                          gradd_status_name(status), gradd_error_message(), refused[i].sentence);
            gradd_case_free(&data);
        }
    emu_set_order(0);
}
