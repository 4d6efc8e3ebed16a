/* A small model of several launches that depend on each other, for tests of their order. */
#ifndef GRADD_TESTS_C_TANH_LAYERS_H
#define GRADD_TESTS_C_TANH_LAYERS_H

#include "server/device/device.h"

enum { TANH_ROWS = 8, TANH_WIDTH = 16, TANH_MOST_LAYERS = 8 };

/* y = Tanh(... Tanh(Tanh(x w0) w1) ...), x and y f32[ROWS, WIDTH], weights f32[WIDTH, WIDTH]:
 * inputs x, w0, w1, ... */
gradd_model_t *tanh_layers_load(int layers);
/* All weights are differentiated; the client may say that they are parameters. */
gradd_plan_t *tanh_layers_plan(gradd_model_t *model, gradd_device_t *device, int layers,
                               bool parameters);
/* Numbers between -0.5 and 0.5, others for another step. */
void tanh_layers_fill(float *v, int n, unsigned step);

#endif
