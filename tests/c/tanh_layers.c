/* See tanh_layers.h. */
#include "tests/c/tanh_layers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/c/onnx_build.h"
#include "tests/test.h"

gradd_model_t *tanh_layers_load(int layers) {
    gradd_model_t *model;
    size_t n;
    char from[16] = "x", w[16], product[16], to[16], operands[40];
    Onnx__ModelProto *proto = build_model();
    build_input(proto, "x", GRADD_DT_F32, 2, BUILD_DIMS(TANH_ROWS, TANH_WIDTH));
    for (int i = 0; i < layers; i++) {
        snprintf(w, sizeof w, "w%d", i);
        build_input(proto, w, GRADD_DT_F32, 2, BUILD_DIMS(TANH_WIDTH, TANH_WIDTH));
    }
    for (int i = 0; i < layers; i++) {
        snprintf(product, sizeof product, "p%d", i), snprintf(to, sizeof to, "y%d", i);
        snprintf(operands, sizeof operands, "%s,w%d", from, i);
        build_node(proto, "MatMul", product, operands, product);
        build_node(proto, "Tanh", to, product, to);
        memcpy(from, to, sizeof from);
    }
    build_output(proto, from);
    uint8_t *bytes = build_pack(proto, &n);
    CHECK_OK(gradd_model_load(bytes, n, &model));
    return model;
}

gradd_plan_t *tanh_layers_plan(gradd_model_t *model, gradd_device_t *device, int layers,
                               bool parameters) {
    static const int32_t output = 0, weights[TANH_MOST_LAYERS] = {1, 2, 3, 4, 5, 6, 7, 8};
    gradd_type_t types[TANH_MOST_LAYERS + 1] = {
        {GRADD_DT_F32, 2, {TANH_ROWS, TANH_WIDTH}}
    };
    for (int i = 1; i <= layers; i++)
        types[i] = (gradd_type_t){
            GRADD_DT_F32, 2, {TANH_WIDTH, TANH_WIDTH}
        };
    const gradd_plan_options_t o = {.inputs = types,
                                    .n_inputs = layers + 1,
                                    .grads = weights,
                                    .n_grads = layers,
                                    .outputs = &output,
                                    .n_outputs = 1,
                                    .grad_outputs = &output,
                                    .n_grad_outputs = 1,
                                    .parameters = weights,
                                    .n_parameters = parameters ? layers : 0,
                                    .device = device};
    gradd_plan_t *plan;
    CHECK_OK(gradd_plan_create(model, &o, &plan));
    return plan;
}

void tanh_layers_fill(float *v, int n, unsigned step) {
    for (int i = 0; i < n; i++)
        v[i] = (float)((unsigned)i * step % 401) / 400 - 0.5f;
}
