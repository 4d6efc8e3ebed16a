/* Tests of train/files/export: what is left of a model, and what is inside. */
#include "tests/test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "platform/platform.h"
#include "server/api/gradd.h"
#include "tests/c/onnx_build.h"
#include "train/files/export.h"

static const float values[] = {1, 2, 3};
static const gradd_type_t vector = {.dtype = GRADD_DT_F32, .rank = 1, .dims = {3}};

/* x * w, a batch norm and a dropout in training mode, and a loss beside an unused parameter. */
static Onnx__ModelProto *make_model(void) {
    Onnx__ModelProto *model = build_model();
    build_input(model, "x", GRADD_DT_F32, 2, BUILD_DIMS(-1, 3));
    build_input(model, "target", GRADD_DT_F32, 2, BUILD_DIMS(-1, 3));
    build_input(model, "w", GRADD_DT_F32, 1, BUILD_DIMS(3));
    build_input(model, "unused", GRADD_DT_F32, 1, BUILD_DIMS(3));
    build_raw(build_init(model, "scale", 1, 1, BUILD_DIMS(3)), values, sizeof values);
    build_init(model, "ratio", 1, 0, BUILD_DIMS(0));
    build_init(model, "mode", 9, 0, BUILD_DIMS(0));
    build_init(model, "half", 1, 0, BUILD_DIMS(0));
    build_node(model, "Mul", "mul", "x,w", "product");
    Onnx__NodeProto *norm = build_node(model, "BatchNormalization", "norm",
                                       "product,scale,w,scale,scale", "normal,mean,variance");
    build_attr_int(norm, "training_mode", 1);
    build_node(model, "Dropout", "drop", "normal,ratio,mode", "y");
    build_node(model, "Sub", "sub", "y,target", "difference");
    build_node(model, "Mul", "last", "difference,half", "loss");
    build_output(model, "loss");
    build_output(model, "y");
    return model;
}

static gradd_train_state_t *make_state(void) {
    gradd_train_state_t *state;
    CHECK_OK(gradd_train_state_create(&state));
    CHECK_OK(gradd_train_state_add(state, "w", &vector, values, true));
    CHECK_OK(gradd_train_state_add(state, "unused", &vector, NULL, true));
    return state;
}

static gradd_status_t export_to(const char *path, const char *output) {
    size_t n;
    const uint8_t *bytes = build_pack(make_model(), &n);
    gradd_train_state_t *state = make_state();
    const export_source_t source = {bytes, n, state, NULL};
    const gradd_status_t status = export_model(&source, &output, 1, path);
    gradd_train_state_destroy(state);
    return status;
}

static const char *path_of(void) {
    static char path[64];
    snprintf(path, sizeof path, "/tmp/gradd-%ld-export.onnx", (long)getpid());
    return path;
}

static Onnx__ModelProto *export_and_read(const char *output) {
    void *bytes;
    size_t n;
    CHECK_OK(export_to(path_of(), output));
    CHECK_OK(gradd_platform.read_file(path_of(), 1 << 20, &bytes, &n));
    unlink(path_of());
    Onnx__ModelProto *model = onnx__model_proto__unpack(NULL, n, bytes);
    CHECK(model && model->graph);
    free(bytes);
    return model;
}

TEST(only_what_the_output_needs_is_left) {
    Onnx__ModelProto *model = export_and_read("y");
    const Onnx__GraphProto *graph = model->graph;
    CHECK_EQ_INT(model->n_opset_import, 1);
    CHECK_EQ_INT(graph->n_node, 3);
    CHECK_EQ_STR(graph->node[0]->op_type, "Mul");
    CHECK_EQ_INT(graph->n_input, 1);
    CHECK_EQ_STR(graph->input[0]->name, "x");
    CHECK_EQ_INT(graph->n_output, 1);
    CHECK_EQ_STR(graph->output[0]->name, "y");
    CHECK_EQ_INT(graph->n_initializer, 3); /* scale, ratio and the parameter */
    const Onnx__TensorProto *w = graph->initializer[2];
    CHECK_EQ_STR(w->name, "w");
    CHECK_EQ_INT(w->n_dims, 1);
    CHECK_EQ_INT(w->dims[0], 3);
    CHECK_EQ_INT(w->data_type, 1);
    CHECK_EQ_INT(w->raw_data.len, sizeof values);
    CHECK(memcmp(w->raw_data.data, values, sizeof values) == 0);
    onnx__model_proto__free_unpacked(model, NULL);
}

TEST(nodes_are_in_evaluation_mode) {
    Onnx__ModelProto *model = export_and_read("y");
    const Onnx__NodeProto *norm = model->graph->node[1], *drop = model->graph->node[2];
    CHECK_EQ_STR(norm->op_type, "BatchNormalization");
    CHECK_EQ_INT(norm->n_attribute, 0);
    CHECK_EQ_INT(norm->n_input, 5);
    CHECK_EQ_INT(norm->n_output, 1);
    CHECK_EQ_STR(norm->output[0], "normal");
    CHECK_EQ_STR(drop->op_type, "Dropout");
    CHECK_EQ_INT(drop->n_input, 2);
    CHECK_EQ_STR(drop->output[0], "y");
    onnx__model_proto__free_unpacked(model, NULL);
}

/* Of a value inside the model the engine finds the type: what follows the batch is not fixed. */
TEST(an_output_that_the_model_does_not_declare) {
    void *bytes;
    size_t n, model_n;
    Onnx__ModelProto *model = build_model();
    build_input(model, "x", GRADD_DT_F32, 2, BUILD_DIMS(-1, 3));
    build_input(model, "w", GRADD_DT_F32, 1, BUILD_DIMS(3));
    build_node(model, "Mul", "mul", "x,w", "product");
    build_node(model, "Neg", "neg", "product", "y");
    build_output(model, "y");
    const uint8_t *model_bytes = build_pack(model, &model_n);
    gradd_train_state_t *state = make_state();
    gradd_device_t *device;
    CHECK_OK(gradd_device_open(&(gradd_device_options_t){.threads = 1}, &device));
    const export_source_t source = {model_bytes, model_n, state, device};
    const char *output = "product";
    CHECK_OK(export_model(&source, &output, 1, path_of()));
    CHECK_OK(gradd_platform.read_file(path_of(), 1 << 20, &bytes, &n));
    unlink(path_of());
    Onnx__ModelProto *read = onnx__model_proto__unpack(NULL, n, bytes);
    CHECK(read && read->graph->n_node == 1 && read->graph->n_output == 1);
    const Onnx__TypeProto__Tensor *type = read->graph->output[0]->type->tensor_type;
    CHECK_EQ_INT(type->elem_type, GRADD_DT_F32);
    CHECK_EQ_INT(type->shape->n_dim, 2);
    CHECK_EQ_INT(type->shape->dim[1]->dim_value, 3);
    CHECK(!type->shape->dim[0]->has_dim_value);
    onnx__model_proto__free_unpacked(read, NULL);
    free(bytes);
    gradd_device_close(device);
    gradd_train_state_destroy(state);
}

TEST(all_of_it) {
    Onnx__ModelProto *model = export_and_read("loss");
    CHECK_EQ_INT(model->graph->n_node, 5);
    CHECK_EQ_INT(model->graph->n_input, 2);
    onnx__model_proto__free_unpacked(model, NULL);
}

TEST(errors) {
    CHECK_STATUS(GRADD_E_TENSOR, export_to(path_of(), "nothing"));
    CHECK_ERROR_HAS("export: the model has no output 'nothing'");
    CHECK_STATUS(GRADD_E_TENSOR, export_to(path_of(), "product"));
    CHECK_ERROR_HAS("'product' cannot be an output: the model does not say its type");
    CHECK_STATUS(GRADD_E_IO, export_to("/nowhere/model.onnx", "y"));
    CHECK_ERROR_HAS("/nowhere/model.onnx");
    gradd_train_state_t *state = make_state();
    const char *output = "y";
    export_source_t source = {"\x3a\x02\x0a", 3, state, NULL};
    CHECK_STATUS(GRADD_E_MODEL, export_model(&source, &output, 1, path_of()));
    source.n = 0;
    CHECK_STATUS(GRADD_E_MODEL, export_model(&source, &output, 1, path_of()));
    CHECK_ERROR_HAS("the model has no graph");
    gradd_train_state_destroy(state);
}

TEST(any_damaged_byte_is_survived) {
    size_t n;
    const char *output = "y";
    const uint8_t *bytes = build_pack(make_model(), &n);
    gradd_train_state_t *state = make_state();
    uint8_t *changed = malloc(n);
    CHECK(changed);
    for (size_t at = 0; at < n; at++)
        for (int bit = 0; bit < 8; bit += 3) {
            memcpy(changed, bytes, n);
            changed[at] ^= (uint8_t)(1 << bit);
            const export_source_t source = {changed, n, state, NULL};
            (void)export_model(&source, &output, 1, "/nowhere/model.onnx");
        }
    free(changed);
    gradd_train_state_destroy(state);
}
