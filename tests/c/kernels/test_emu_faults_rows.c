/* Kernels that read indices on the emulated GPU: a refusal is the CPU's sentence about the first
 * offender, in whatever order the threads go on. */
#include "kernels/cases/cases.h"
#include "kernels/contract/registry.h"
#include "tests/c/eager.h"
#include "tests/emu/device.h"
#include "tests/emu/order.h"
#include "tests/test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct refused_s {
    const char *op, *text, *part;
} refused_t;

static const refused_t refused[] = {
    {"Gather",             "f32[5,3] i64[4]={0,5,9,-6}",                                 "index 5 is out of range for size 5, at position 1"},
    {"Gather",             "f32[2,5,3] i32[4]={0,4,-6,7} | axis=1",
     "index -6 is out of range for size 5, at position 2"                                                                                   },
    {"Gather",             "f32[5,300] i64[1]={9223372036854775807}",                    " for size 5, at position 0"                       },
    {"Gather",             "f32[0,3] i64[2]={0,1}",                                      "index 0 is out of range for size 0, at position 0"},
    {"GatherND",           "f32[5,6,3] i64[3,2]={4,5,0,6,5,0}",
     "index 6 is out of range for size 6, at position 3"                                                                                    },
    {"GatherND",           "f32[2,5,3] i64[2,2,1]={0,4,-6,5} | batch_dims=1",
     "index -6 is out of range for size 5, at position 2"                                                                                   },
    {"GatherElements",     "f32[3,5] i64[3,2]={0,1,2,5,6,0} | axis=1",
     "index 5 is out of range for size 5, at position 3"                                                                                    },
    {"GatherGrad",         "f32[4,3] i64[4]={0,1,5,-7} | dims=[5,3]",
     "index 5 is out of range for size 5, at position 2"                                                                                    },
    {"GatherNDGrad",       "f32[2,3] i64[2,2]={4,6,5,0} | dims=[5,6,3]",
     "index 6 is out of range for size 6, at position 1"                                                                                    },
    {"GatherElementsGrad", "f32[2,2] i64[2,2]={0,3,-4,2} | dims=[3,5] axis=0",
     "index 3 is out of range for size 3, at position 1"                                                                                    },
    {"ScatterND",          "f32[4,5] i64[3,1]={0,4,-5} f32[3,5]",
     "index 4 is out of range for size 4, at position 1"                                                                                    },
    {"ScatterND",          "f32[90,5] i64[2,2]={0,4,3,-6} f32[2]",
     "index -6 is out of range for size 5, at position 3"                                                                                   },
    {"ScatterND",          "f32[4,5] i64[2,1]={0,4} f32[2,5] | reduction=\"add\"",
     "index 4 is out of range for size 4, at position 1"                                                                                    },
    {"ScatterND",          "f32[4,5] i64[2,1]={-9,4} f32[2,5] | reduction=\"max\"",
     "index -9 is out of range for size 4, at position 0"                                                                                   },
    {"ScatterElements",    "f32[4] i64[2]={3,-5} f32[2]",
     "index -5 is out of range for size 4, at position 1"                                                                                   },
    {"EmbeddingSum",       "f32[5,3] f32[6,3] i64[2,2]={0,1,4,5} i64[2]={6,0}",
     "table 0: index 5 is out of range for size 5, at position 3"                                                                           },
    {"EmbeddingSum",       "f32[5,3] f32[6,3] i64[2,2]={0,1,4,3} i64[2,1]={5,-7}",
     "table 1: index -7 is out of range for size 6, at position 1"                                                                          },
    {"EmbeddingGrad",      "f32[2,2,3] i64[2]={0,5} | dims=[5,3] padding=5",
     "table 0: index 5 is out of range for size 5, at position 1"                                                                           },
    {"GatherRows",         "f32[5,3] i64[3]={0,5,6}",                                    "row 5 of 5, entry 1"                              },
    {"GatherRows",         "f32[5,3] i64[3]={0,-7,-6}",                                  "row 6 of 5, entry 1"                              },
    {"GatherRows",         "f32[5,3] i64[4]={0,3,3,9}",                                  "row 3 behind 3, entry 2"                          },
    {"GatherRows",         "f32[5,3] i64[3]={0,-1,3}",                                   "behind its end"                                   },
    {"GatherRows",         "f32[5,3] i64[3]={-1,3,4}",                                   "behind its end"                                   },
    {"GatherRows",         "f32[5,3] i64[4]={-1,3,4,9}",                                 "row 9 of 5, entry 3"                              },
    {"GatherRows",         "f32[5,0] i64[2]={0,5}",                                      "row 5 of 5, entry 1"                              },
    {"ScatterRows",        "f32[3,2] i64[3]={0,3,2} | dims=[5]",                         "row 2 behind 3, entry 2"                          },
    {"ScatterRows",        "f32[3,2] i64[3]={-1,3,4} | dims=[5]",                        "behind its end"                                   },
    {"RowsWithin",         "i64[3]={1,5,9} i64[3]={1,4,7}",                              "row 5 is not"                                     },
    {"RowsWithin",         "i64[2]={5,4} i64[3]={1,1,7}",                                "row 1 behind 1, entry 1"                          },
    {"RowsWithin",         "i64[3]={2,4,3} i64[3]={1,4,7}",                              "row 3 behind 4, entry 2"                          },
    {"RowsWithin",         "i64[1]={0} i64[1]={9223372036854775807}",                    "entry 0"                                          },
    {"RowRanges",          "i64[2]={1,6} i32[4,2]={0,1,2,3,3,3,0,4}",                    "position 1 may look at [2, 3)"                    },
    {"RowRanges",          "i64[2]={3,6} i32[4,2]={0,1,0,2,0,5,0,5}",                    "position 3 may look at [0, 5)"                    },
    {"RowRanges",          "i64[2]={0,2147483647} i32[1,2]={0,1}",                       "row 2147483647 of"                                },
    {"CrossRanges",        "i64[2]={1,0} i64[2]={-1,2} | positions=3 other_positions=4", "behind its end"                                   },
};

/* By the CPU's kernel, or that of the emulated GPU; the first failure is the answer. */
static gradd_status_t attempt(const gradd_op_t *op, gradd_case_data_t *data, bool there) {
    gradd_type_t types[GRADD_OP_MAX_OUT] = {{0}};
    gradd_view_t in[GRADD_OP_MAX_IN], out[GRADD_OP_MAX_OUT];
    memcpy(in, data->in, sizeof in);
    for (int i = 0; i < data->n_in; i++)
        in[i].data = NULL;
    gradd_infer_t c = {
        .op = op,
        .attrs = {data->attrs, data->n_attrs},
        .opset = eager_opset(op),
        .n_in = data->n_in,
        .n_out = 1,
        .in = in,
        .out = types
    };
    GRADD_TRY(gradd_op_infer(&c));
    out[0].type = types[0];
    out[0].data = gradd_case_alloc(data, (size_t)gradd_type_bytes(&types[0]));
    gradd_launch_t r = {.op = op,
                        .attrs = c.attrs,
                        .opset = c.opset,
                        .n_in = c.n_in,
                        .n_out = 1,
                        .in = data->in,
                        .out = out};
    if (!there) return gradd_cpu_call(&c, &r);
    const gradd_kernel_t *kernel = gradd_backend_kernel(&gradd_backend_emu, &c);
    CHECK(kernel != NULL);
    r.workspace = kernel->workspace ? gradd_case_alloc(data, kernel->workspace(&c)) : NULL;
    return emu_compute(kernel, &r);
}

static void check(const refused_t *bad, long order) {
    gradd_case_data_t data;
    char own[256], cpu[256];
    const gradd_op_t *op = gradd_op_by_name(bad->op);
    CHECK(op != NULL);
    CHECK_OK(gradd_case_parse(bad->text, GRADD_DT_F32, 1, &data));
    emu_set_order(order);
    const gradd_status_t here = attempt(op, &data, false);
    snprintf(cpu, sizeof cpu, "%s", here ? gradd_error_message() : "");
    const gradd_status_t there = attempt(op, &data, true);
    snprintf(own, sizeof own, "%s", there ? gradd_error_message() : "");
    if (here != GRADD_E_INDEX || there != here || strcmp(own, cpu) || !strstr(cpu, bad->part))
        test_fail(__FILE__, __LINE__, "%s \"%s\": \"%s\", the CPU's \"%s\", expected \"%s\"",
                  bad->op, bad->text, own, cpu, bad->part);
    gradd_case_free(&data);
}

TEST(what_is_refused_has_the_cpus_sentence) {
    static const long orders[] = {0, 1, 41};
    for (size_t k = 0; k < sizeof orders / sizeof orders[0]; k++)
        for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++)
            check(&refused[i], orders[k]);
}
