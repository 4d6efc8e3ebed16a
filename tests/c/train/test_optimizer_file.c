/* Tests of train/files/optimizer_file: the nodes that ONNX Runtime writes, and what is refused. */
#include "tests/test.h"

#include <string.h>

#include "tests/c/onnx_build.h"
#include "train/gradd_train.h"

static void attr_float(Onnx__NodeProto *node, const char *name, float value) {
    Onnx__AttributeProto *attr = build_attr(node, name, BUILD_KIND(FLOAT));
    attr->has_f = 1;
    attr->f = value;
}

static Onnx__NodeProto *add(Onnx__ModelProto *model, const char *op) {
    Onnx__NodeProto *node = build_node(model, op, op, "learning_rate,params", "done");
    node->domain = "com.microsoft";
    return node;
}

static gradd_status_t load(const Onnx__ModelProto *model, gradd_train_optimizer_t *out) {
    size_t n;
    const uint8_t *bytes = build_pack(model, &n);
    const gradd_train_model_t from = {.bytes = bytes, .n = n};
    return gradd_train_optimizer_load(&from, out);
}

TEST(adamw_with_clipping) {
    Onnx__ModelProto *model = build_model();
    gradd_train_optimizer_t got;
    attr_float(add(model, "InplaceClipGradNorm"), "max_norm", 2.5f);
    Onnx__NodeProto *node = add(model, "AdamWOptimizer");
    attr_float(node, "alpha", 0.5f);
    attr_float(node, "beta", 0.75f);
    attr_float(node, "epsilon", 0.25f);
    attr_float(node, "weight_decay", 0.125f);
    build_attr_int(node, "adam_mode", 1);
    build_attr_int(node, "correct_bias", 0);
    CHECK_OK(load(model, &got));
    CHECK_EQ_INT(got.kind, GRADD_TRAIN_ADAMW);
    CHECK_EQ_INT(got.mode, GRADD_ADAMW_TRANSFORMERS);
    CHECK(!got.bias_correction && got.beta1 == 0.5 && got.beta2 == 0.75 && got.eps == 0.25);
    CHECK(got.weight_decay == 0.125 && got.max_norm == 2.5 && got.momentum == 0);
}

TEST(defaults_are_those_of_the_schemas) {
    Onnx__ModelProto *model = build_model();
    gradd_train_optimizer_t got;
    add(model, "AdamWOptimizer");
    CHECK_OK(load(model, &got));
    CHECK_EQ_INT(got.mode, GRADD_ADAMW_TORCH);
    CHECK(got.bias_correction && got.beta1 == (double)0.9f && got.eps == (double)1e-8f);
    CHECK(got.weight_decay == (double)1e-2f && got.max_norm == 0);
    model = build_model();
    Onnx__NodeProto *node = add(model, "SGDOptimizerV2");
    CHECK_OK(load(model, &got));
    CHECK_EQ_INT(got.kind, GRADD_TRAIN_SGD);
    CHECK(got.momentum == 0 && got.weight_decay == 0);
    attr_float(node, "momentum", 0.5f);
    CHECK_OK(load(model, &got));
    CHECK(got.momentum == 0.5);
}

TEST(what_is_not_known_is_refused) {
    Onnx__ModelProto *model = build_model();
    gradd_train_optimizer_t got;
    CHECK_STATUS(GRADD_E_MODEL, load(model, &got));
    CHECK_ERROR_HAS("optimizer model: no node AdamWOptimizer or SGDOptimizerV2");
    Onnx__NodeProto *node = add(model, "AdamWOptimizer");
    build_attr_int(node, "adam_mode", 2);
    CHECK_STATUS(GRADD_E_UNSUPPORTED, load(model, &got));
    CHECK_ERROR_HAS("adam_mode 2, expected 0 or 1");
    model = build_model();
    attr_float(add(model, "SGDOptimizerV2"), "nesterov", 1);
    CHECK_STATUS(GRADD_E_UNSUPPORTED, load(model, &got));
    CHECK_ERROR_HAS("SGDOptimizerV2 has an attribute 'nesterov'");
    model = build_model();
    add(model, "AdamWOptimizer");
    add(model, "SGDOptimizerV2");
    CHECK_STATUS(GRADD_E_UNSUPPORTED, load(model, &got));
    CHECK_ERROR_HAS("two optimizers");
    model = build_model();
    build_node(model, "AdamWOptimizer", "n", "x", "y"); /* of ai.onnx */
    CHECK_STATUS(GRADD_E_UNSUPPORTED, load(model, &got));
    CHECK_ERROR_HAS("node AdamWOptimizer of domain ''");
}

TEST(cut_short_it_is_refused) {
    Onnx__ModelProto *model = build_model();
    gradd_train_optimizer_t got;
    size_t n;
    attr_float(add(model, "AdamWOptimizer"), "alpha", 0.5f);
    const uint8_t *bytes = build_pack(model, &n);
    for (size_t i = 0; i < n; i++) {
        const gradd_train_model_t from = {.bytes = build_copy(bytes, i), .n = i};
        const gradd_status_t status = gradd_train_optimizer_load(&from, &got);
        CHECK(status == GRADD_E_MODEL || status == GRADD_OK); /* only what follows is gone */
    }
    CHECK_STATUS(GRADD_E_MODEL, gradd_train_optimizer_load(
                                    &(gradd_train_model_t){.bytes = "\x3a\x7f", .n = 2}, &got));
    CHECK_ERROR_HAS("claims 127 bytes, 0 are left");
}
