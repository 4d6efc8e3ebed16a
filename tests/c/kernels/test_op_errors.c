/* Operators refuse what does not fit: wrong shapes and attributes when a graph is compiled, indices
 * out of range when it runs. Each line is a case in the language of kernels/cases/cases.h with the
 * status and a part of the sentence that must name the cause. */
#include "tests/emu/device.h"
#include "tests/test.h"

#include <stdio.h>
#include <string.h>

#include "kernels/cases/cases.h"
#include "kernels/contract/backend.h"
#include "kernels/contract/registry.h"

typedef struct bad_s {
    const char *op, *text;
    gradd_status_t code;
    const char *part;
} bad_t;

static const bad_t bad[] = {
    {"Reshape",            "f32[2,3] i64[1]={7}",                                                GRADD_E_GRAPH,       "cannot be reshaped"                 },
    {"Reshape",            "f32[2,3] i64[2]={-1,-1}",                                            GRADD_E_GRAPH,       "two entries -1"                     },
    {"Reshape",            "f32[2,3] i64[2]={4,-1}",                                             GRADD_E_GRAPH,       "cannot be reshaped"                 },
    {"Reshape",            "f32[0,3,4] i64[3]={0,5,-1}",                                         GRADD_E_GRAPH,       "cannot be reshaped"                 },
    {"Reshape",            "f32[2,3] i64[1]={-2}",                                               GRADD_E_GRAPH,       "entry 0 is -2"                      },
    {"Reshape",            "f32[2,3] i64[3]={2,3,0}",                                            GRADD_E_GRAPH,       "entry 2 is 0"                       },
    {"Reshape",            "f32[2,3] i64[3]={4294967296,4294967296,4}",                          GRADD_E_LIMIT,       "overflows"                          },
    {"Reshape",            "f32[2,3] i64[2]",                                                    GRADD_E_UNSUPPORTED, "not known before the run"           },
    {"Squeeze",            "f32[2,3] i64[1]={0}",                                                GRADD_E_GRAPH,       "axis 0 has size 2"                  },
    {"Unsqueeze",          "f32[2] i64[2]={0,0}",                                                GRADD_E_GRAPH,       "repeated"                           },
    {"Unsqueeze",          "f32[1,1,1,1,1,1,1,1] i64[1]={0}",                                    GRADD_E_LIMIT,       "rank 9"                             },
    {"Transpose",          "f32[2,3] | perm=[0,0]",                                              GRADD_E_GRAPH,       "repeated"                           },
    {"Transpose",          "f32[2,3] | perm=[0]",                                                GRADD_E_GRAPH,       "1 entries"                          },
    {"Transpose",          "f32[2,3] | perm=[0,64]",                                             GRADD_E_GRAPH,       "out of range"                       },
    {"Concat",             "f32[2,3] f32[3,3] | axis=1",                                         GRADD_E_GRAPH,       "outside axis 1"                     },
    {"Concat",             "f32[2] i64[2] | axis=0",                                             GRADD_E_GRAPH,       "element type"                       },
    {"Concat",             "f32[2,3] f32[2,3] | axis=2",                                         GRADD_E_GRAPH,       "axis 2"                             },
    {"Split",              "f32[5] i64[2]={2,2} -> 2",                                           GRADD_E_GRAPH,       "leave 1 of 5"                       },
    {"Split",              "f32[5] i64[2]={6,-1} -> 2",                                          GRADD_E_GRAPH,       "part 0 of 6"                        },
    {"Split",              "f32[5] -> 2",                                                        GRADD_E_GRAPH,       "does not divide"                    },
    {"Split",              "f32[6] | num_outputs=3 -> 2",                                        GRADD_E_GRAPH,       "num_outputs is 3"                   },
    {"Slice",              "f32[5] i64[1]={0} i64[1]={2} i64[1]={0} i64[1]={0}",                 GRADD_E_GRAPH,       "step of axis"                       },
    {"Slice",              "f32[5] i64[2]={0,0} i64[2]={2,2} i64[2]={0,-1}",                     GRADD_E_GRAPH,       "repeated"                           },
    {"Slice",              "f32[5] i64[1]={0} i64[2]={2,2}",                                     GRADD_E_GRAPH,       "differ in length"                   },
    {"Pad",                "f32[5] i64[2]={-3,-3}",                                              GRADD_E_GRAPH,       "cannot be padded"                   },
    {"Pad",                "f32[5] i64[2]={-9223372036854775807,9223372036854775806}",           GRADD_E_LIMIT,       "padded by"                          },
    {"Pad",                "f32[5] i64[1]={1}",                                                  GRADD_E_GRAPH,       "1 entries, expected 2"              },
    {"Pad",                "f32[5] i64[2]={1,1} | mode=\"mirror\"",                              GRADD_E_UNSUPPORTED, "mirror"                             },
    {"Pad",                "f32[0] i64[2]={1,1} | mode=\"edge\"",                                GRADD_E_GRAPH,       "empty"                              },
    {"SolveTriangular",    "f32[2,2] f64[2,3]",                                                  GRADD_E_GRAPH,       "of one type"                        },
    {"SolveTriangular",    "f64[2,2] f32[2,3]",                                                  GRADD_E_GRAPH,       "of one type"                        },
    {"Conv",               "f32[1,3,8] f32[4,2,3]",                                              GRADD_E_GRAPH,
     "f32[1,3,8] and f32[4,2,3] do not fit, with 1"                                                                                                        },
    {"Conv",               "f32[1,4,8] f32[3,2,3] | group=2",                                    GRADD_E_GRAPH,       "do not fit, with 2 groups"          },
    {"Conv",               "f32[1,3,8] f32[4,3,3] f32[3]",                                       GRADD_E_GRAPH,       "the bias is f32[3], expected f32[4]"},
    {"Conv",               "f32[3,8] f32[3,8]",                                                  GRADD_E_UNSUPPORTED, "rank 2, expected 3 to 5"            },
    {"Conv",               "f32[1,1,2,2,2,2] f32[1,1,1,1,1,1]",                                  GRADD_E_UNSUPPORTED, "rank 6"                             },
    {"Conv",               "f32[1,3,8] f32[4,3,3] | group=0",                                    GRADD_E_GRAPH,       "group is 0"                         },
    {"Conv",               "f32[1,3,8] f32[4,3,3] | strides=[0]",                                GRADD_E_GRAPH,       "strides has the entry 0"            },
    {"Conv",               "f32[1,3,8] f32[4,3,3] | dilations=[1,1]",                            GRADD_E_GRAPH,
     "dilations has 2 entries, expected 1"                                                                                                                 },
    {"Conv",               "f32[1,3,8] f32[4,3,3] | pads=[1]",                                   GRADD_E_GRAPH,       "pads has 1 entries, expected 2"     },
    {"Conv",               "f32[1,3,8] f32[4,3,3] | pads=[1,9223372036854775807]",               GRADD_E_LIMIT,
     "pads has the entry"                                                                                                                                  },
    {"Conv",               "f32[1,3,8] f32[4,3,3] | kernel_shape=[2]",                           GRADD_E_GRAPH,
     "kernel_shape has the entry 2"                                                                                                                        },
    {"Conv",               "f32[1,3,8] f32[4,3,3] | auto_pad=\"SAME\"",                          GRADD_E_UNSUPPORTED, "auto_pad 'SAME'"                    },
    {"Conv",               "f32[1,3,8] f32[4,3,9]",                                              GRADD_E_GRAPH,
     "fewer than the 9 that the kernel reaches over"                                                                                                       },
    {"Conv",               "f32[1,3,8] f32[4,3,0]",                                              GRADD_E_GRAPH,       "empty kernel"                       },
    {"ConvTranspose",      "f32[1,3,8] f32[4,2,3]",                                              GRADD_E_GRAPH,       "do not fit"                         },
    {"ConvTranspose",      "f32[1,3,8] f32[3,2,3] f32[3]",                                       GRADD_E_GRAPH,       "expected f32[2]"                    },
    {"ConvTranspose",      "f32[1,3,2] f32[3,2,2] | pads=[2,2]",                                 GRADD_E_GRAPH,
     "would have -1 in the result"                                                                                                                         },
    {"ConvTranspose",      "f32[1,3,2] f32[3,2,2] | output_padding=[-1]",                        GRADD_E_GRAPH,
     "output_padding has the entry -1"                                                                                                                     },
    {"Expand",             "f32[3] i64[1]={4}",                                                  GRADD_E_GRAPH,       "do not broadcast"                   },
    {"Expand",             "f32[1] i64[1]={-1}",                                                 GRADD_E_GRAPH,       "entry 0 is -1"                      },
    {"Tile",               "f32[3] i64[2]={1,1}",                                                GRADD_E_GRAPH,       "rank 1"                             },
    {"Tile",               "f32[3] i64[1]={9223372036854775807}",                                GRADD_E_GRAPH,       "repeated"                           },
    {"Gather",             "f32[4,2] i64[2]={1,4}",                                              GRADD_E_INDEX,
     "index 4 is out of range for size 4, at position 1"                                                                                                   },
    {"Gather",             "f32[4,2] i32[1]={-5}",                                               GRADD_E_INDEX,
     "index -5 is out of range for size 4, at position 0"                                                                                                  },
    {"Gather",             "f32[0,2] i64[1]={0}",                                                GRADD_E_INDEX,       "index 0 is out of range for size 0" },
    {"Gather",             "f32[4] f32[1]",                                                      GRADD_E_UNSUPPORTED, "input 1"                            },
    {"GatherND",           "f32[4,2] i64[1,3]",                                                  GRADD_E_GRAPH,       "do not fit"                         },
    {"GatherND",           "f32[4,2] i64[2,2]={0,1,3,2}",                                        GRADD_E_INDEX,
     "index 2 is out of range for size 2, at position 3"                                                                                                   },
    {"GatherND",           "f32[4,2] i64[3,1] | batch_dims=1",                                   GRADD_E_GRAPH,       "batch axis 0"                       },
    {"GatherElements",     "f32[4,2] i64[4]",                                                    GRADD_E_GRAPH,       "rank 1"                             },
    {"GatherElements",     "f32[4,2] i64[1,3] | axis=0",                                         GRADD_E_GRAPH,       "longer"                             },
    {"GatherElements",     "f32[4,2] i64[1,2]={0,4}",                                            GRADD_E_INDEX,
     "index 4 is out of range for size 4, at position 1"                                                                                                   },
    {"ScatterND",          "f32[4,2] i64[1,1] f32[2]",                                           GRADD_E_GRAPH,       "expected f32[1,2]"                  },
    {"ScatterND",          "f32[4,2] i64[1,1]={4} f32[1,2]",                                     GRADD_E_INDEX,
     "index 4 is out of range for size 4"                                                                                                                  },
    {"ScatterND",          "f32[4] i64[1,1] f32[1] | reduction=\"xor\"",                         GRADD_E_UNSUPPORTED, "xor"                                },
    {"ScatterElements",    "f32[4] i64[2] f32[3]",                                               GRADD_E_GRAPH,       "one shape"                          },
    {"ScatterElements",    "f32[4] i64[1]={-5} f32[1]",                                          GRADD_E_INDEX,
     "index -5 is out of range for size 4"                                                                                                                 },
    {"CheckIndex",         "i64[2]={0,-1} i64[]={4}",                                            GRADD_E_INDEX,
     "index -1 is out of range for size 4, at position 1"                                                                                                  },
    {"CheckIndex",         "i64[2,2]={0,3,4,9} i64[]={4}",                                       GRADD_E_INDEX,
     "index 4 is out of range for size 4, at position 2"                                                                                                   },
    {"CheckIndex",         "i32[1]={-1} i64[]={9000000000000000000}",                            GRADD_E_INDEX,
     "index -1 is out of range for size 9000000000000000000"                                                                                               },
    {"CheckIndex",         "i64[1]={0} i64[]={0}",                                               GRADD_E_INDEX,       "index 0 is out of range for size 0" },
    {"CheckIndex",         "i64[1]={0} i64[]={-1}",                                              GRADD_E_INDEX,       "index 0 is out of range for size 0" },
    {"CheckIndex",         "i64[1]={0} i64[2]={3,3}",                                            GRADD_E_GRAPH,       "2 elements"                         },
    {"CheckIndex",         "f32[1] i64[]={3}",                                                   GRADD_E_UNSUPPORTED, "input 0"                            },
    {"CheckIndex",         "i64[70,100]:(0,20) i64[]={7}",                                       GRADD_E_INDEX,       " for size 7, at position "          },
    {"CheckIndex",         "i32[1001]:(0,20) i64[]={7}",                                         GRADD_E_INDEX,       " for size 7, at position "          },
    {"Attention",          "f32[2,3,4,8] f32[2,3,6,8] f32[2,3,7,8]",                             GRADD_E_GRAPH,
     "V of type f32[2,3,7,8]"                                                                                                                              },
    {"Attention",          "f32[2,3,4,8] f32[2,2,6,8] f32[2,2,6,8]",                             GRADD_E_GRAPH,
     "K of type f32[2,2,6,8]"                                                                                                                              },
    {"Attention",          "f32[2,4,24] f32[2,4,24] f32[2,4,24]",                                GRADD_E_GRAPH,       "Q of type f32[2,4,24]"              },
    {"Attention",          "f32[2,4,24] f32[2,4,24] f32[2,4,24] | q_num_heads=5 kv_num_heads=5",
     GRADD_E_GRAPH,                                                                                                   "Q of type"                          },
    {"Attention",          "f32[1,1,2,4] f32[1,1,3,4] f32[1,1,3,4] bool[2,1]",                   GRADD_E_GRAPH,
     "attn_mask of type bool[2,1]"                                                                                                                         },
    {"Attention",          "f32[1,1,2,4] f32[1,1,3,4] f32[1,1,3,4] f64[2,3]",                    GRADD_E_UNSUPPORTED,
     "attn_mask of f64 beside Q of f32"                                                                                                                    },
    {"Attention",          "f32[1,1,2,4] f32[1,1,3,4] f32[1,1,3,4] - f32[1,1,2,4]",              GRADD_E_GRAPH,
     "must be given together"                                                                                                                              },
    {"Attention",          "f32[1,1,2,4] f32[1,1,3,4] f32[1,1,3,4] - f32[1,1,2,4] f32[1,1,1,4]",
     GRADD_E_GRAPH,                                                                                                   "past_value of type"                 },
    {"Attention",          "f32[1,1,2,4] f32[1,1,3,4] f32[1,1,3,4] | softmax_precision=11",
     GRADD_E_UNSUPPORTED,                                                                                             "computed in f32"                    },
    {"Attention",          "f32[1,1,2,4] f32[1,1,3,4] f32[1,1,3,4] | qk_matmul_output_mode=4",   GRADD_E_GRAPH,
     "qk_matmul_output_mode 4"                                                                                                                             },
    {"RotaryEmbedding",    "f32[2,4,24] f32[2,4,4] f32[2,4,4]",                                  GRADD_E_GRAPH,
     "24 columns are not 0 heads"                                                                                                                          },
    {"RotaryEmbedding",    "f32[2,3,4,8] f32[2,4,3] f32[2,4,3]",                                 GRADD_E_GRAPH,
     "cos_cache of type f32[2,4,3]"                                                                                                                        },
    {"RotaryEmbedding",    "f32[2,3,4,8] f32[7,4] f32[7,4] i64[2,5]",                            GRADD_E_GRAPH,
     "position_ids of type i64[2,5]"                                                                                                                       },
    {"RotaryEmbedding",    "f32[2,3,4,8] f32[2,4,2] f32[2,4,2] | rotary_embedding_dim=3",
     GRADD_E_GRAPH,                                                                                                   "rotary_embedding_dim 3 of 8"        },
    {"ConstantOfShape",    "i64[1]={-1}",                                                        GRADD_E_LIMIT,       ""                                   },
    {"Range",              "i64[]={0} i64[]={5} i64[]={0}",                                      GRADD_E_GRAPH,       "delta is 0"                         },
    {"Range",              "f32[]={0} f32[]={inf} f32[]={1}",                                    GRADD_E_LIMIT,       "entries"                            },
    {"OneHot",             "i64[2] i64[]={-1} f32[2]",                                           GRADD_E_GRAPH,       "depth is -1"                        },
    {"NonZero",            "f32[3]",                                                             GRADD_E_UNSUPPORTED, "depends on data"                    },
    {"Trilu",              "f32[3]",                                                             GRADD_E_GRAPH,       "rank 1"                             },
    {"Dropout",            "f32[3] f32[]={1.5} bool[]={1}",                                      GRADD_E_INDEX,       "ratio is 1.5"                       },
    {"Dropout",            "f32[3] f32[]={nan} bool[]={1}",                                      GRADD_E_INDEX,       "ratio is"                           },
    {"LayerNormalization", "f32[2,3] f32[2]",                                                    GRADD_E_UNSUPPORTED, "expected f32[3]"                    },
    {"LayerNormalization", "f32[2,3] f32[3] | axis=2",                                           GRADD_E_GRAPH,       "axis 2"                             },
    {"GroupNormalization", "f32[2,5,3] f32[5] f32[5] | num_groups=2",                            GRADD_E_GRAPH,       "divide"                             },
    {"TopK",               "f32[3] i64[1]={4}",                                                  GRADD_E_GRAPH,       "K does not fit"                     },
};

/* One launch by the emulated GPU's kernel; *out_none: it has none. */
static gradd_status_t call_there(const gradd_infer_t *c, gradd_launch_t *r, gradd_case_data_t *data,
                                 bool *out_none) {
    const gradd_kernel_t *kernel = gradd_backend_kernel(&gradd_backend_emu, c);
    gradd_prepared_t prepared;
    *out_none = !kernel;
    if (!kernel) return GRADD_OK;
    GRADD_TRY(gradd_kernel_prepare(kernel, c, &prepared));
    r->workspace = gradd_case_alloc(data, prepared.workspace);
    r->state = prepared.state;
    const gradd_status_t status = emu_compute(kernel, r);
    gradd_kernel_unprepare(kernel, &prepared);
    return status;
}

/* Infers and runs, on the emulated GPU where there is an out_none; the first failure is the answer.
 */
static gradd_status_t attempt(const gradd_op_t *op, gradd_case_data_t *data, bool *out_none) {
    gradd_type_t types[GRADD_OP_MAX_OUT] = {{0}};
    gradd_view_t in[GRADD_OP_MAX_IN], out[GRADD_OP_MAX_OUT];
    memcpy(in, data->in, sizeof in);
    for (int i = 0; i < data->n_in; i++)
        if (!data->known[i]) in[i].data = NULL;
    gradd_infer_t c = {
        .op = op,
        .attrs = {data->attrs, data->n_attrs},
        .opset = 20,
        .n_in = data->n_in,
        .n_out = data->n_out ? data->n_out : op->min_out,
        .in = in,
        .out = types
    };
    GRADD_TRY(gradd_op_infer(&c));
    for (int j = 0; j < c.n_out; j++) {
        out[j].type = types[j];
        out[j].data = gradd_case_alloc(data, (size_t)gradd_type_bytes(&types[j]));
    }
    gradd_launch_t r = {.op = op,
                        .attrs = c.attrs,
                        .opset = 20,
                        .n_in = c.n_in,
                        .n_out = c.n_out,
                        .in = data->in,
                        .out = out};
    return out_none ? call_there(&c, &r, data, out_none) : gradd_cpu_call(&c, &r);
}

TEST(every_bad_case_is_refused_and_named) {
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        gradd_case_data_t data;
        const gradd_op_t *op = gradd_op_by_name(bad[i].op);
        CHECK(op != NULL);
        CHECK_OK(gradd_case_parse(bad[i].text, GRADD_DT_F32, 1, &data));
        gradd_status_t status = attempt(op, &data, NULL);
        if (status != bad[i].code || !strstr(gradd_error_message(), bad[i].part))
            test_fail(__FILE__, __LINE__, "%s \"%s\": %s \"%s\", expected %s \"%s\"", bad[i].op,
                      bad[i].text, gradd_status_name(status), gradd_error_message(),
                      gradd_status_name(bad[i].code), bad[i].part);
        gradd_case_free(&data);
    }
}

/* GPU kernels record the CPU's failure, word for word. */
TEST(a_gpu_refuses_the_same_values) {
    int checked = 0;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char sentence[1024];
        bool none = true;
        gradd_case_data_t data;
        const gradd_op_t *op = gradd_op_by_name(bad[i].op);
        if (bad[i].code != GRADD_E_INDEX) continue;
        CHECK_OK(gradd_case_parse(bad[i].text, GRADD_DT_F32, 1, &data));
        CHECK_STATUS(bad[i].code, attempt(op, &data, NULL));
        snprintf(sentence, sizeof sentence, "%s", gradd_error_message());
        gradd_status_t status = attempt(op, &data, &none);
        if (!none && (status != bad[i].code || strcmp(gradd_error_message(), sentence)))
            test_fail(__FILE__, __LINE__, "%s \"%s\": %s \"%s\", on the CPU \"%s\"", bad[i].op,
                      bad[i].text, gradd_status_name(status), gradd_error_message(), sentence);
        checked += !none;
        gradd_case_free(&data);
    }
    CHECK(checked > 0);
}
