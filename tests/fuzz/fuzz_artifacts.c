/* libFuzzer target: any bytes as an optimizer model, and as an eval model of which a part is
 * exported. (Models that train go through fuzz_import.)
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/c/onnx_build.h"
#include "tests/fuzz/target.h"
#include "train/files/export.h"

static gradd_train_state_t *state;

static void make_state(void) {
    static const float values[] = {1, 2, 3};
    const gradd_type_t type = {.dtype = GRADD_DT_F32, .rank = 1, .dims = {3}};
    if (state) return;
    REQUIRE(gradd_train_state_create(&state) == GRADD_OK);
    REQUIRE(gradd_train_state_add(state, "w", &type, values, true) == GRADD_OK);
}

static void check(gradd_status_t status) {
    REQUIRE(status == GRADD_OK || gradd_error_message()[0]);
    REQUIRE(status != GRADD_E_NOMEM && status != GRADD_E_INTERNAL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    gradd_train_optimizer_t optimizer;
    const char *outputs[] = {"y"};
    make_state();
    gradd_error_set("");
    check(gradd_train_optimizer_load(&(gradd_train_model_t){.bytes = data, .n = n}, &optimizer));
    gradd_error_set("");
    const export_source_t source = {data, n, state, NULL};
    const gradd_status_t status = export_model(&source, outputs, 1, "/nowhere/model.onnx");
    REQUIRE(status != GRADD_OK); /* there is no such folder */
    check(status);
    return 0;
}

static void write_seed(const char *folder, int i, const Onnx__ModelProto *model) {
    char path[4096];
    size_t n;
    const uint8_t *bytes = build_pack(model, &n);
    snprintf(path, sizeof path, "%s/seed_%d", folder, i);
    FILE *file = fopen(path, "wb");
    REQUIRE(file && fwrite(bytes, 1, n, file) == n && fclose(file) == 0);
}

static void write_seeds(const char *folder) {
    Onnx__ModelProto *model = build_model();
    build_input(model, "x", GRADD_DT_F32, 2, BUILD_DIMS(-1, 3));
    build_input(model, "w", GRADD_DT_F32, 1, BUILD_DIMS(3));
    build_init(model, "ratio", GRADD_DT_F32, 0, BUILD_DIMS(0));
    build_init(model, "mode", GRADD_DT_BOOL, 0, BUILD_DIMS(0));
    Onnx__NodeProto *norm = build_node(model, "BatchNormalization", "n", "x,w,w,w,w", "a,m,v");
    build_attr_int(norm, "training_mode", 1);
    build_node(model, "Dropout", "d", "a,ratio,mode", "y");
    build_node(model, "ReduceMean", "r", "y", "loss");
    build_output(model, "loss");
    build_output(model, "y");
    write_seed(folder, 0, model);
    model = build_model();
    build_node(model, "InplaceClipGradNorm", "c", "gradients", "clipped")->domain = "com.microsoft";
    Onnx__NodeProto *node = build_node(model, "AdamWOptimizer", "o", "clipped", "done");
    node->domain = "com.microsoft";
    build_attr_int(node, "adam_mode", 1);
    build_attr_int(node, "correct_bias", 0);
    write_seed(folder, 1, model);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    const char *folder = getenv("GRADD_FUZZ_SEEDS");
    if (!folder) return 0;
    write_seeds(folder);
    exit(0);
}
