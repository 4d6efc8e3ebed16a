/* A backward in groups: the word rises behind the last launch that needs a group, not before and
 * not at the end alone; groups that the caller has are left alone. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/device/device.h"
#include "server/exec/run.h"
#include "tests/c/tanh_layers.h"
#include "tests/test.h"

enum { LAYERS = 4, ROWS = TANH_ROWS, WIDTH = TANH_WIDTH, VALUE = 5 << 16 };

typedef float square_t[WIDTH * WIDTH];

typedef struct stack_s {
    _Alignas(64) float x[ROWS * WIDTH], y[ROWS * WIDTH], dy[ROWS * WIDTH];
    _Alignas(64) square_t w[LAYERS], dw[LAYERS], right[LAYERS];
    _Alignas(64) uint64_t word;
    int32_t of[LAYERS];
    int n_hooks, most; /* launches of the backward; groups that were done before the last of them */
} layers_t;

static layers_t *new_stack(void) {
    layers_t *s = aligned_alloc(64, sizeof *s);
    CHECK(s != NULL);
    memset(s, 0, sizeof *s);
    tanh_layers_fill(s->x, ROWS * WIDTH, 7919), tanh_layers_fill(s->dy, ROWS * WIDTH, 1299709);
    for (int i = 0; i < LAYERS; i++) {
        tanh_layers_fill(s->w[i], WIDTH * WIDTH, 104729 + (unsigned)i);
        s->of[i] = LAYERS - 1 - i; /* the last layer is the first group */
    }
    return s;
}

static void backward(gradd_plan_t *plan, layers_t *s, const gradd_groups_t *groups,
                     device_hook_t hook) {
    const void *inputs[] = {s->x, s->w[0], s->w[1], s->w[2], s->w[3]}, *grad_outputs[] = {s->dy};
    void *outputs[] = {s->y}, *grads[] = {s->dw[0], s->dw[1], s->dw[2], s->dw[3]};
    bool written[LAYERS];
    gradd_run_t *run;
    CHECK_OK(gradd_run_create(plan, &run));
    CHECK_OK(gradd_run_forward(run, 1, 0, inputs, outputs, NULL));
    if (groups) gradd_run_set_groups(run, groups);
    device_set_hook(gradd_plan_device(plan), hook, s);
    CHECK_OK(gradd_run_backward(run, grad_outputs, grads, false, written, NULL));
    device_set_hook(gradd_plan_device(plan), NULL, NULL);
    gradd_run_destroy(run);
}

/* Behind a launch, and before the word is raised for it. */
static void look(void *context, const gradd_plan_t *plan, const plan_launch_t *launch,
                 double seconds) {
    layers_t *s = context;
    const int done = s->word > VALUE ? (int)(s->word - VALUE) : 0;
    (void)plan, (void)seconds;
    s->n_hooks++;
    s->most = done;
    for (int i = 0; i < LAYERS; i++) {
        if (s->of[i] >= done) continue;
        CHECK(!memcmp(s->dw[i], s->right[i], sizeof s->right[i]));
        for (int k = 0; k < launch->args.n_in + launch->args.n_out; k++)
            CHECK(launch->view[k].data != s->w[i] && launch->view[k].data != s->dw[i]);
    }
}

TEST(a_group_is_done_when_nothing_needs_it_any_more) {
    const gradd_device_options_t o = {.threads = 1};
    gradd_device_t *device;
    CHECK_OK(gradd_device_open(&o, &device));
    gradd_model_t *model = tanh_layers_load(LAYERS);
    gradd_plan_t *plan = tanh_layers_plan(model, device, LAYERS, true);
    const gradd_plan_info_t *info = gradd_plan_info(plan);
    for (int i = 1; i < LAYERS; i++)
        CHECK(info->final[i] > 0 && info->final[i] < info->final[i - 1]);
    CHECK_EQ_INT(info->final[0], info->n_launches_backward);
    layers_t *s = new_stack();
    backward(plan, s, NULL, NULL);
    memcpy(s->right, s->dw, sizeof s->right);
    memset(s->dw, 0, sizeof s->dw);
    const gradd_groups_t groups = {
        .n = LAYERS, .of = s->of, .skipped = 0, .word = &s->word, .value = VALUE};
    backward(plan, s, &groups, look);
    CHECK(!memcmp(s->dw, s->right, sizeof s->right));
    CHECK_EQ_INT(s->n_hooks, info->n_launches_backward);
    CHECK_EQ_INT(s->most, LAYERS - 1);
    CHECK_EQ_INT((int)(s->word - VALUE), LAYERS);
    /* they are for one backward */
    s->word = 0;
    backward(plan, s, NULL, NULL);
    CHECK_EQ_INT((int)s->word, 0);
    free(s);
    gradd_plan_destroy(plan);
    gradd_model_destroy(model);
    gradd_device_close(device);
}

/* As in look, but the first two groups are not for the caller. */
static void look_at_word(void *context, const gradd_plan_t *plan, const plan_launch_t *launch,
                         double seconds) {
    layers_t *s = context;
    (void)plan, (void)launch, (void)seconds;
    CHECK(s->word >= VALUE + 2);
}

TEST(groups_that_the_caller_has_are_left_alone) {
    const gradd_device_options_t o = {.threads = 1};
    gradd_device_t *device;
    CHECK_OK(gradd_device_open(&o, &device));
    gradd_model_t *model = tanh_layers_load(LAYERS);
    gradd_plan_t *plan = tanh_layers_plan(model, device, LAYERS, true);
    layers_t *s = new_stack();
    backward(plan, s, NULL, NULL);
    memcpy(s->right, s->dw, sizeof s->right);
    memset(s->dw, 0, sizeof s->dw);
    s->word = VALUE + 2;
    const gradd_groups_t groups = {
        .n = LAYERS, .of = s->of, .skipped = 2, .word = &s->word, .value = VALUE};
    backward(plan, s, &groups, look_at_word);
    CHECK_EQ_INT((int)(s->word - VALUE), LAYERS);
    for (int i = 0; i < LAYERS; i++) {
        static const square_t zeros;
        const float *expected = s->of[i] < 2 ? zeros : s->right[i];
        CHECK(!memcmp(s->dw[i], expected, sizeof s->right[i]));
    }
    free(s);
    gradd_plan_destroy(plan);
    gradd_model_destroy(model);
    gradd_device_close(device);
}
