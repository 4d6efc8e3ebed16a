/* libFuzzer target: any bytes through prescan, unpack and import; a model that loads is planned for
 * small shapes and, if it is small, run. `make fuzz` builds and runs it.
 *
 * Beside crashes and sanitizer reports it checks what the engine relies on: success and failure are
 * consistent, a failure has a message, and every id of a loaded model is in range and in order.
 * Half of the mutations work on the decoded message (tests/fuzz/mutate_onnx.c), because changed
 * bytes rarely get past the lengths of nested messages.
 *
 * With GRADD_FUZZ_SEEDS=<folder> set it writes its seeds there and ends.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/graph/arena.h"
#include "server/graph/model.h"
#include "tests/c/onnx_build.h"
#include "tests/fuzz/mutate_onnx.h"
#include "tests/fuzz/run_model.h"
#include "tests/fuzz/seed_cases.h"
#include "tests/fuzz/target.h"

static void check_tensor(const gradd_view_t *view) {
    volatile uint8_t sink = 0;
    REQUIRE(gradd_type_check(&view->type) == GRADD_OK);
    REQUIRE((uintptr_t)view->data % GRADD_TENSOR_ALIGN == 0);
    for (int64_t i = 0; i < gradd_type_bytes(&view->type); i++)
        sink ^= ((const uint8_t *)view->data)[i];
    (void)sink;
}

static void check_attrs(const model_node_t *node) {
    for (int i = 0; i < node->attrs.n; i++) {
        const gradd_attr_t *attr = &node->attrs.v[i];
        REQUIRE(gradd_attr_find(node->attrs, attr->name) == attr);
        if (attr->kind == GRADD_ATTR_STRING) REQUIRE(strlen(attr->s) == attr->n);
        if (attr->kind == GRADD_ATTR_TENSOR) check_tensor(&attr->tensor);
        REQUIRE(attr->kind > GRADD_ATTR_END && attr->kind < GRADD_ATTR_GRAPH);
    }
}

static void check_node(const model_t *model, const model_node_t *node, bool *defined) {
    REQUIRE(node->op_type[0] && node->name[0] && node->domain && node->opset > 0);
    if (node->op) {
        REQUIRE(!(node->op->flags & GRADD_OP_INTERNAL));
        REQUIRE(node->n_in >= node->op->min_in && node->n_in <= node->op->max_in);
        REQUIRE(node->n_out >= node->op->min_out && node->n_out <= node->op->max_out);
    }
    for (int i = 0; i < node->n_in; i++) {
        int32_t id = node->in[i];
        REQUIRE(id == -1 || (id >= 0 && id < model->n_values && defined[id]));
        REQUIRE(id != -1 || !node->op || i >= node->op->min_in);
    }
    for (int j = 0; j < node->n_out; j++) {
        int32_t id = node->out[j];
        REQUIRE(id == -1 || (id >= 0 && id < model->n_values && !defined[id]));
        if (id >= 0) defined[id] = true;
    }
    check_attrs(node);
}

static void check_model(const model_t *model) {
    bool *defined = calloc((size_t)model->n_values + 1, sizeof *defined);
    REQUIRE(defined != NULL);
    for (int i = 0; i < model->n_values; i++) {
        const model_value_t *value = &model->values[i];
        REQUIRE(value->name[0] && value->rank >= -1 && value->rank <= GRADD_MAX_RANK);
        if (value->known.data) check_tensor(&value->known);
        defined[i] = value->known.data != NULL;
    }
    for (int i = 0; i < model->n_inputs; i++)
        defined[model->inputs[i]] = true;
    for (int k = 0; k < model->n_nodes; k++)
        check_node(model, &model->nodes[k], defined);
    for (int i = 0; i < model->n_values; i++)
        REQUIRE(defined[i]);
    REQUIRE(model->n_outputs > 0);
    for (int i = 0; i < model->n_outputs; i++)
        REQUIRE(model->outputs[i] >= 0 && model->outputs[i] < model->n_values);
    free(defined);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    model_limits_t limits = model_default_limits;
    limits.max_heap_bytes = 32 << 20;
    model_t *model = NULL;
    gradd_error_set("");
    gradd_status_t status = model_load(data, n, &limits, &model);
    REQUIRE((status == GRADD_OK) == (model != NULL));
    REQUIRE(status == GRADD_OK || gradd_error_message()[0]);
    REQUIRE(status != GRADD_E_INTERNAL);
    /* whatever passes the scan must unpack within its estimate: a rest of NOMEM would be a lie */
    REQUIRE(status != GRADD_E_NOMEM);
    if (model) {
        check_model(model);
        fuzz_run_model(model, n, n & 1);
        fuzz_run_model(model, n, !(n & 1));
    }
    model_destroy(model);
    return 0;
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    const char *folder = getenv("GRADD_FUZZ_SEEDS");
    if (!folder) return 0;
    for (int i = 0; i < MUTATE_SEEDS; i++) {
        char path[4096];
        size_t n;
        uint8_t *bytes = build_pack(mutate_seed(i), &n);
        snprintf(path, sizeof path, "%s/seed_%d", folder, i);
        FILE *file = fopen(path, "wb");
        REQUIRE(file && fwrite(bytes, 1, n, file) == n && fclose(file) == 0);
    }
    REQUIRE(seed_cases(folder) > 100);
    exit(0);
}
