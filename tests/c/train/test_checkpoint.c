/* Tests of train/files/checkpoint: a file that ONNX Runtime 1.19.2 wrote, files of our own byte by
 * byte and there and back, and damaged ones. */
#include "tests/test.h"

#include <stdlib.h>
#include <string.h>

#include "train/files/checkpoint.h"

/* clang-format off */
/* Written by ONNX Runtime 1.19.2: w trained by two steps of AdamW, b frozen, three properties. */
static const uint32_t of_onnx_runtime[] = {
    0x00000018, 0x4354444f, 0x00000000, 0x0014000c, 0x000c0010, 0x00040008, 0x0000000c,
    0x00000024, 0x0000000c, 0x00000188, 0x00000002, 0x00000001, 0x000000a8, 0x000a0000,
    0x000c0010, 0x00040008, 0x0000000a, 0x0000000c, 0x00000010, 0x00000014, 0x00000001,
    0x0000002c, 0x00000001, 0x0000000c, 0x00000001, 0x00000048, 0xfffffec4, 0x3f000000,
    0x00000004, 0x00000004, 0x65746172, 0x00000000, 0xfffffedc, 0x00000008, 0x00000010,
    0x00000005, 0x6c6c6568, 0x0000006f, 0x00000004, 0x656d616e, 0x00000000, 0x00140008,
    0x00040010, 0x00000008, 0x00000003, 0x00000000, 0x00000000, 0x00000004, 0x00000005,
    0x636f7065, 0x00000068, 0x0018000c, 0x00080014, 0x00040010, 0x0000000c, 0x00000014,
    0x00000002, 0x00000000, 0x3a83126f, 0x0000000c, 0x00000001, 0x00000010, 0x00000006,
    0x756f7267, 0x00003070, 0xffffff60, 0x00000008, 0x00000010, 0x00000002, 0x00000050,
    0x0000000c, 0x00000001, 0x00000077, 0xffffff26, 0x00000010, 0x00000001, 0x00000014,
    0x00000020, 0x00000008, 0x3a030139, 0x3c030139, 0x00000001, 0x00000002, 0x00000000,
    0x00000000, 0x00000009, 0x656d6f6d, 0x6d75746e, 0x00000031, 0xffffff66, 0x00000010,
    0x00000001, 0x00000014, 0x00000020, 0x00000008, 0x3dc28f5f, 0xbec28f5f, 0x00000001,
    0x00000002, 0x00000000, 0x00000000, 0x00000009, 0x656d6f6d, 0x6d75746e, 0x00000030,
    0x000c0008, 0x00040008, 0x00000008, 0x00000008, 0x0000000c, 0x00000001, 0x0000000c,
    0x00000001, 0x00000048, 0xffffffca, 0x00000010, 0x00000001, 0x00000010, 0x00000020,
    0x00000004, 0x3f800000, 0x00000002, 0x00000001, 0x00000000, 0x00000001, 0x00000000,
    0x00000001, 0x000e0062, 0x00100014, 0x000c0000, 0x00040008, 0x0000000e, 0x00000010,
    0x00000001, 0x00000014, 0x0000001c, 0x00000008, 0x37e98000, 0xbfc00040, 0x00000001,
    0x00000002, 0x00000000, 0x00000001, 0x00000077,
};
/* clang-format on */

static float first(const checkpoint_tensor_t *tensor) {
    float value;
    memcpy(&value, tensor->values, sizeof value);
    return value;
}

TEST(a_file_of_onnx_runtime_is_read) {
    checkpoint_t read;
    CHECK_OK(checkpoint_read(of_onnx_runtime, sizeof of_onnx_runtime, &read));
    CHECK(!read.is_nominal);
    CHECK_EQ_INT(read.n_parameters, 2);
    CHECK_EQ_STR(read.parameters[0].tensor.name, "w");
    CHECK(read.parameters[0].requires_grad && !read.parameters[1].requires_grad);
    CHECK_EQ_INT(read.parameters[0].tensor.type.rank, 1);
    CHECK_EQ_INT(read.parameters[0].tensor.type.dims[0], 2);
    CHECK_NEAR(first(&read.parameters[0].tensor), 2.783537e-05, 1e-10);
    CHECK_EQ_STR(read.parameters[1].tensor.name, "b");
    CHECK_EQ_INT(read.parameters[1].tensor.type.rank, 2);
    CHECK_EQ_INT(read.parameters[1].tensor.type.dtype, GRADD_DT_F32);
    CHECK(first(&read.parameters[1].tensor) == 1.0f);
    CHECK_EQ_INT(read.n_groups, 1);
    const checkpoint_group_t *group = &read.groups[0];
    CHECK_EQ_STR(group->name, "group0");
    CHECK_EQ_INT(group->step, 2);
    CHECK(group->initial_learning_rate == 1e-3f);
    CHECK_EQ_INT(group->n_states, 1);
    CHECK_EQ_STR(group->states[0].parameter, "w");
    CHECK_EQ_INT(group->states[0].n_moments, 2);
    CHECK_EQ_STR(group->states[0].moments[0].name, "momentum0");
    CHECK_NEAR(first(&group->states[0].moments[0]), 0.095, 1e-6);
    CHECK_EQ_STR(group->states[0].moments[1].name, "momentum1");
    CHECK_EQ_INT(read.n_properties, 3);
    CHECK_EQ_STR(read.properties[0].name, "epoch");
    CHECK_EQ_INT(read.properties[0].integer, 3);
    CHECK_EQ_STR(read.properties[1].name, "rate");
    CHECK(read.properties[1].real == 0.5f);
    CHECK_EQ_STR(read.properties[2].name, "name");
    CHECK_EQ_STR(read.properties[2].text, "hello");
    checkpoint_finish(&read);
}

/* ---- writing --------------------------------------------------------------------------------- */

/* The whole file, to be freed. */
static uint8_t *write_file(const checkpoint_t *checkpoint, size_t *out_n) {
    checkpoint_file_t file;
    size_t n = 0;
    CHECK_OK(checkpoint_write(checkpoint, &file));
    for (int i = 0; i < file.n_parts; i++)
        n += file.parts[i].n;
    uint8_t *bytes = aligned_alloc(GRADD_TENSOR_ALIGN, (n / 64 + 1) * 64);
    CHECK(bytes);
    *out_n = 0;
    for (int i = 0; i < file.n_parts; i++) {
        if (file.parts[i].n) memcpy(bytes + *out_n, file.parts[i].data, file.parts[i].n);
        *out_n += file.parts[i].n;
    }
    checkpoint_file_finish(&file);
    return bytes;
}

static checkpoint_tensor_t tensor(const char *name, gradd_dtype_t dtype, int64_t rows,
                                  int64_t columns, const void *values) {
    return (checkpoint_tensor_t){
        name, {.dtype = dtype, .rank = 2, .dims = {rows, columns}},
         values
    };
}

/* ONNX Runtime 1.19.2 reads these bytes. */
TEST(a_small_file_byte_by_byte) {
    static const float value[] = {1.5f};
    checkpoint_parameter_t parameter = {
        {"w", {.dtype = GRADD_DT_F32, .rank = 1, .dims = {1}}, value},
        true
    };
    const checkpoint_t checkpoint = {.parameters = &parameter, .n_parameters = 1};
    /* clang-format off */
    static const uint32_t want[] = {
        0x00000060, 0x4354444f, 0x0014000c, 0x00080004, 0x0010000c, 0x0010000c, 0x00080004,
        0x0000000c, 0x0014000e, 0x00000004, 0x000c0008, 0x000c0010, 0x00040018, 0x00100008,
        0x00080014, 0x0004000c, 0x000a0008, 0x00040010, 0x000c0008, 0x00100008, 0x00080004,
        0x000c0008, 0x00080004, 0x00000000, 0x00000058, 0x00000002, 0x00000010, 0x00000050,
        0x00000050, 0x00000000, 0x00000064, 0x0000000c, 0x00000038, 0x00000000, 0x00000001,
        0x00000004, 0x00000070, 0x00000010, 0x00000014, 0x00000001, 0x0000005c, 0x00000001,
        0x00000077, 0x00000001, 0x00000001, 0x00000000, 0x00000000, 0x00000000, 0x0000007e,
        0x0000000c, 0x0000000c, 0x0000000c, 0x00000000, 0x00000000, 0x00000000, 0x00000000,
        0x00000000, 0x00000000, 0x00000000, 0x00000000, 0x00000000, 0x00000000, 0x00000000,
        0x00000004, 0x3fc00000,
    };
    /* clang-format on */
    size_t n;
    uint8_t *bytes = write_file(&checkpoint, &n);
    CHECK_EQ_INT(n, sizeof want);
    for (size_t i = 0; i < n / 4; i++) {
        uint32_t word;
        memcpy(&word, bytes + 4 * i, sizeof word);
        if (word != want[i]) test_fail(__FILE__, __LINE__, "word %zu is 0x%08x", i, word);
    }
    free(bytes);
}

static void check_tensor(const checkpoint_tensor_t *got, const checkpoint_tensor_t *want) {
    CHECK_EQ_STR(got->name, want->name);
    CHECK(gradd_type_equal(&got->type, &want->type));
    CHECK_EQ_INT((uintptr_t)got->values % GRADD_TENSOR_ALIGN, 0);
    CHECK(memcmp(got->values, want->values, (size_t)gradd_type_bytes(&want->type)) == 0);
}

TEST(what_is_written_is_read) {
    static const double f64[] = {1, -2, 3, 4, 5, 1e300};
    static const int64_t i64[] = {INT64_MIN, 7};
    static const uint8_t u8[] = {1, 2, 3};
    checkpoint_parameter_t parameters[] = {
        {tensor("frozen",   GRADD_DT_I64,  1, 2, i64), false},
        {tensor("a.weight", GRADD_DT_F64,  2, 3, f64), true },
        {tensor("empty",    GRADD_DT_U8,   0, 3, u8),  false},
        {tensor("b",        GRADD_DT_BOOL, 3, 1, u8),  false},
    };
    checkpoint_moments_t states[] = {
        {"a.weight",
         {tensor("momentum0", GRADD_DT_F64, 3, 2, f64), tensor("x", GRADD_DT_U8, 1, 3, u8)},
         2                                                                                    },
        {"b",        {{0}},                                                                  0},
    };
    checkpoint_group_t groups[] = {
        {"group0", INT64_C(1) << 40, 0.25f, states, 2},
        {"group1", 0,                1.0f,  NULL,   0},
    };
    checkpoint_property_t properties[] = {
        {.name = "s",    .kind = CHECKPOINT_STRING, .text = "lines\nof text, \xc3\xa4"},
        {.name = "f",    .kind = CHECKPOINT_FLOAT,  .real = -0.5f                     },
        {.name = "i",    .kind = CHECKPOINT_INT,    .integer = INT64_MIN              },
        {.name = "none", .kind = CHECKPOINT_STRING, .text = ""                        },
    };
    const checkpoint_t made = {.parameters = parameters,
                               .n_parameters = 4,
                               .groups = groups,
                               .n_groups = 2,
                               .properties = properties,
                               .n_properties = 4};
    static const int order[] = {1, 0, 2, 3}; /* trained ones first */
    checkpoint_t read;
    size_t n;
    uint8_t *bytes = write_file(&made, &n);
    CHECK_OK(checkpoint_read(bytes, n, &read));
    CHECK_EQ_INT(read.n_parameters, 4);
    for (int i = 0; i < 4; i++) {
        check_tensor(&read.parameters[i].tensor, &parameters[order[i]].tensor);
        CHECK(read.parameters[i].requires_grad == parameters[order[i]].requires_grad);
    }
    CHECK_EQ_INT(read.n_groups, 2);
    CHECK_EQ_STR(read.groups[1].name, "group1");
    CHECK_EQ_INT(read.groups[0].step, INT64_C(1) << 40);
    CHECK(read.groups[0].initial_learning_rate == 0.25f);
    CHECK_EQ_INT(read.groups[0].n_states, 2);
    CHECK_EQ_INT(read.groups[0].states[0].n_moments, 2);
    for (int i = 0; i < 2; i++)
        check_tensor(&read.groups[0].states[0].moments[i], &states[0].moments[i]);
    CHECK_EQ_INT(read.groups[0].states[1].n_moments, 0);
    CHECK_EQ_INT(read.n_properties, 4); /* integers, floats, strings */
    CHECK(read.properties[0].integer == INT64_MIN);
    CHECK(read.properties[1].real == -0.5f);
    CHECK_EQ_STR(read.properties[2].text, properties[0].text);
    CHECK_EQ_STR(read.properties[3].text, "");
    checkpoint_finish(&read);
    free(bytes);
}

TEST(a_nominal_file_has_names_and_element_types) {
    checkpoint_parameter_t parameters[] = {
        {tensor("w", GRADD_DT_F16, 2, 3, "values that are left out"), true },
        {tensor("b", GRADD_DT_I32, 2, 3, NULL),                       false},
    };
    const checkpoint_t made = {.is_nominal = true, .parameters = parameters, .n_parameters = 2};
    checkpoint_t read;
    size_t n;
    uint8_t *bytes = write_file(&made, &n);
    CHECK_OK(checkpoint_read(bytes, n, &read));
    CHECK(read.is_nominal);
    CHECK_EQ_STR(read.parameters[1].tensor.name, "b");
    CHECK_EQ_INT(read.parameters[0].tensor.type.dtype, GRADD_DT_F16);
    CHECK_EQ_INT(read.parameters[0].tensor.type.rank, 0);
    CHECK(!read.parameters[0].tensor.values && !read.parameters[1].tensor.values);
    checkpoint_finish(&read);
    free(bytes);
}

/* ---- damaged files --------------------------------------------------------------------------- */

/* The file of ONNX Runtime with one word changed. */
static uint32_t *damaged(size_t at, uint32_t value) {
    uint32_t *words = malloc(sizeof of_onnx_runtime);
    CHECK(words);
    memcpy(words, of_onnx_runtime, sizeof of_onnx_runtime);
    words[at / 4] = value;
    return words;
}

TEST(damage_is_named) {
    static const struct damage_s {
        size_t at;
        uint32_t value;
        gradd_status_t status;
        const char *text;
    } cases[] = {
        {0,   4096,       GRADD_E_MODEL,       "the offset 4096 leads out of the file, 576 bytes"},
        {0,   1,          GRADD_E_MODEL,       "the offset 1 leads out"                          },
        {4,   0x4d54524f, GRADD_E_MODEL,       "not of kind ODTC"                                },
        {24,  0x7fffffff, GRADD_E_MODEL,       "list of fields is not in the file"               },
        {40,  3,          GRADD_E_VERSION,     "version 3 of the format, expected 1 to 2"        },
        {40,  0,          GRADD_E_VERSION,     "version 0"                                       },
        {44,  1000,       GRADD_E_MODEL,       "a vector of 1000 elements where"                 },
        {544, 12,         GRADD_E_MODEL,       "tensor 'w': 12 bytes of values"                  },
        {532, 8,          GRADD_E_UNSUPPORTED, "tensor 'w'"                                      },
        {560, 4,          GRADD_E_MODEL,       "8 bytes of values, expected 16 for f32[4]"       },
        {568, 0,          GRADD_E_MODEL,       "a string does not end where its length says"     },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        checkpoint_t read;
        uint32_t *words = damaged(cases[i].at, cases[i].value);
        CHECK_STATUS(cases[i].status, checkpoint_read(words, sizeof of_onnx_runtime, &read));
        CHECK_ERROR_HAS(cases[i].text);
        CHECK_ERROR_HAS("checkpoint: ");
        free(words);
    }
}

TEST(a_file_that_is_cut_short_is_refused) {
    for (size_t n = 0; n < sizeof of_onnx_runtime - 4; n++) {
        checkpoint_t read;
        uint8_t *bytes = malloc(n + 1); /* of its own, so that a sanitizer sees the end */
        CHECK(bytes);
        memcpy(bytes, of_onnx_runtime, n);
        CHECK_STATUS(GRADD_E_MODEL, checkpoint_read(bytes, n, &read));
        free(bytes);
    }
}

TEST(any_damaged_byte_is_survived) {
    uint8_t *bytes = malloc(sizeof of_onnx_runtime);
    CHECK(bytes);
    int n_read = 0;
    for (size_t at = 0; at < sizeof of_onnx_runtime; at++)
        for (int bit = 0; bit < 8; bit++) {
            checkpoint_t read;
            memcpy(bytes, of_onnx_runtime, sizeof of_onnx_runtime);
            bytes[at] ^= (uint8_t)(1 << bit);
            if (checkpoint_read(bytes, sizeof of_onnx_runtime, &read) != GRADD_OK) continue;
            n_read++;
            checkpoint_finish(&read);
        }
    CHECK(n_read > 500); /* values, letters, padding */
    free(bytes);
}

TEST(names_are_there_once) {
    static const float value[] = {1};
    checkpoint_parameter_t parameters[] = {
        {tensor("w", GRADD_DT_F32, 1, 1, value), true },
        {tensor("w", GRADD_DT_F32, 1, 1, value), false},
    };
    checkpoint_property_t properties[] = {
        {.name = "p", .kind = CHECKPOINT_INT  },
        {.name = "p", .kind = CHECKPOINT_FLOAT},
    };
    checkpoint_t read, made = {.parameters = parameters, .n_parameters = 2};
    size_t n;
    uint8_t *bytes = write_file(&made, &n);
    CHECK_STATUS(GRADD_E_MODEL, checkpoint_read(bytes, n, &read));
    CHECK_ERROR_HAS("parameter 'w' is there twice");
    free(bytes);
    made = (checkpoint_t){.properties = properties, .n_properties = 2};
    bytes = write_file(&made, &n);
    CHECK_STATUS(GRADD_E_MODEL, checkpoint_read(bytes, n, &read));
    CHECK_ERROR_HAS("property 'p' is there twice");
    free(bytes);
}

/* A small file that names one tensor a million times would take any amount of memory. */
TEST(parts_that_are_named_often_are_refused) {
    static const float values[256] = {1};
    checkpoint_parameter_t parameters[] = {
        {tensor("a", GRADD_DT_F32, 16, 16, values), true},
        {tensor("b", GRADD_DT_F32, 1,  1,  values), true},
        {tensor("c", GRADD_DT_F32, 1,  1,  values), true},
    };
    const checkpoint_t made = {.parameters = parameters, .n_parameters = 3};
    checkpoint_t read;
    size_t n, at = 0;
    uint8_t *bytes = write_file(&made, &n);
    for (size_t i = 0; i + 4 <= n && !at; i += 4)
        if (memcmp(bytes + i, "\3\0\0\0", 4) == 0) at = i + 4; /* the list of the three */
    CHECK(at);
    uint32_t distance;
    memcpy(&distance, bytes + at, sizeof distance);
    for (uint32_t i = 1; i < 3; i++) {
        const uint32_t same = distance - 4 * i;
        memcpy(bytes + at + (size_t)4 * i, &same, sizeof same);
    }
    CHECK_STATUS(GRADD_E_MODEL, checkpoint_read(bytes, n, &read));
    CHECK_ERROR_HAS("parts of the file are named more than once");
    free(bytes);
}
