/* See run_model.h. Sizes are kept small, so that an execution takes milliseconds. */
#include "tests/fuzz/run_model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_LIST = 16, MAX_LAUNCHES = 100 };
#define MAX_TENSOR ((int64_t)16 << 10)
#define MAX_ARENA  ((int64_t)128 << 10)

typedef struct model_trial_s {
    gradd_type_t in[MAX_LIST];
    int32_t grads[MAX_LIST], outs[MAX_LIST], gouts[MAX_LIST];
    int n_in, n_grads, n_outs, n_gouts;
    const gradd_plan_info_t *info;
    void *inputs[MAX_LIST], *outputs[MAX_LIST], *go[MAX_LIST], *g[MAX_LIST];
    uint64_t state;
} model_trial_t;

_Noreturn void fuzz_abort(const char *file, int line, const char *what) {
    fprintf(stderr, "%s:%d: %s: %s\n", file, line, what, gradd_error_message());
    abort();
}

static uint32_t draw(model_trial_t *t) {
    t->state = t->state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(t->state >> 33);
}

static bool is_float(gradd_dtype_t dtype) {
    return dtype == GRADD_DT_F32 || dtype == GRADD_DT_F64 || dtype == GRADD_DT_BF16 ||
           dtype == GRADD_DT_F16;
}

/* Exactly the tensor's bytes, so that AddressSanitizer sees the first one behind them. */
static void *make(model_trial_t *t, const gradd_type_t *type) {
    size_t bytes = (size_t)gradd_type_bytes(type);
    void *data = NULL;
    FUZZ_REQUIRE(posix_memalign(&data, 64, bytes ? bytes : 1) == 0);
    memset(data, 0, bytes);
    for (int64_t i = 0; i < gradd_type_count(type); i++) {
        uint32_t r = draw(t);
        float x = (float)(r % 4001) / 1000 - 2;
        if (type->dtype == GRADD_DT_F32)
            ((float *)data)[i] = x;
        else if (type->dtype == GRADD_DT_F64)
            ((double *)data)[i] = (double)x;
        else if (type->dtype == GRADD_DT_I64)
            ((int64_t *)data)[i] = (int64_t)(r % 5) - (r % 64 == 0);
        else if (type->dtype == GRADD_DT_I32)
            ((int32_t *)data)[i] = (int32_t)(r % 5);
        else if (type->dtype == GRADD_DT_BOOL)
            ((uint8_t *)data)[i] = r & 1;
        else if (type->dtype == GRADD_DT_BF16)
            ((uint16_t *)data)[i] = (uint16_t)(0x3f80 + r % 64); /* about 1 */
    }
    return data;
}

/* Concrete types for what the model declares; false if that is more than a fuzzer wants. */
static bool choose_types(model_trial_t *t, const gradd_model_t *model) {
    t->n_in = gradd_model_n_inputs(model);
    t->n_outs = gradd_model_n_outputs(model);
    if (t->n_in > MAX_LIST || t->n_outs > MAX_LIST) return false;
    for (int i = 0; i < t->n_in; i++) {
        gradd_type_t type = gradd_model_input_type(model, i);
        if (type.dtype == GRADD_DT_NONE) type.dtype = GRADD_DT_F32;
        if (type.rank < 0)
            type = (gradd_type_t){
                .dtype = type.dtype, .rank = 2, .dims = {2, 3}
            };
        for (int d = 0; d < type.rank; d++)
            if (type.dims[d] < 0) type.dims[d] = 2;
        if (gradd_type_check(&type) != GRADD_OK || gradd_type_bytes(&type) > MAX_TENSOR)
            return false;
        t->in[i] = type;
        if (is_float(type.dtype)) t->grads[t->n_grads++] = i;
    }
    for (int j = 0; j < t->n_outs; j++)
        t->outs[j] = j;
    return true;
}

/* One for all executions: opened in the first. */
static gradd_device_t *device(void) {
    static gradd_device_t *d;
    const gradd_device_options_t o = {.threads = 1, .compile_ms = GRADD_COMPILE_MS};
    FUZZ_REQUIRE(d || gradd_device_open(&o, &d) == GRADD_OK);
    return d;
}

static gradd_status_t plan(model_trial_t *t, gradd_model_t *model, bool plain, gradd_plan_t **out) {
    gradd_plan_options_t o = {.inputs = t->in,
                              .n_inputs = t->n_in,
                              .grads = t->grads,
                              .n_grads = t->n_grads,
                              .outputs = t->outs,
                              .n_outputs = t->n_outs,
                              .grad_outputs = t->gouts,
                              .n_grad_outputs = t->n_gouts,
                              .flags = plain ? GRADD_PLAN_PLAIN : 0,
                              .device = device(),
                              .recompute = (gradd_recompute_t)(draw(t) % 3)};
    gradd_error_set("");
    gradd_status_t status = gradd_plan_create(model, &o, out);
    FUZZ_REQUIRE(status == GRADD_OK || gradd_error_message()[0]);
    FUZZ_REQUIRE(status != GRADD_E_INTERNAL);
    return status;
}

/* Which outputs can have a gradient is known once their types are. */
static bool choose_gradients(model_trial_t *t) {
    t->n_gouts = 0;
    for (int j = 0; j < t->n_outs; j++)
        if (is_float(t->info->outputs[j].dtype)) t->gouts[t->n_gouts++] = j;
    return t->n_gouts > 0 && t->n_grads > 0;
}

static bool is_small(const model_trial_t *t) {
    const gradd_plan_info_t *info = t->info;
    if (info->arena_bytes > MAX_ARENA || info->n_launches_forward > MAX_LAUNCHES ||
        info->n_launches_backward > 4 * MAX_LAUNCHES)
        return false;
    for (int j = 0; j < info->n_outputs; j++)
        if (gradd_type_bytes(&info->outputs[j]) > MAX_TENSOR) return false;
    return true;
}

static void run(model_trial_t *t, gradd_plan_t *p) {
    gradd_run_t *r;
    bool written[MAX_LIST] = {false};
    FUZZ_REQUIRE(gradd_run_create(p, &r) == GRADD_OK);
    for (int i = 0; i < t->n_in; i++)
        t->inputs[i] = make(t, &t->in[i]);
    for (int j = 0; j < t->n_outs; j++) {
        t->outputs[j] = make(t, &t->info->outputs[j]);
        t->go[j] = NULL;
    }
    for (int k = 0; k < t->n_gouts; k++)
        if (k == 0 || draw(t) % 2) t->go[t->gouts[k]] = make(t, &t->info->outputs[t->gouts[k]]);
    for (int i = 0; i < t->n_grads; i++)
        t->g[i] = make(t, &t->in[t->grads[i]]);
    gradd_error_set("");
    static const uint32_t checks[4] = {0, 0, GRADD_RUN_FINITE_CHECK, GRADD_RUN_GRADIENT_CHECK};
    uint32_t flags = checks[draw(t) % 4];
    gradd_status_t st =
        gradd_run_forward(r, t->state, flags, (const void *const *)t->inputs, t->outputs, NULL);
    if (st == GRADD_OK && t->n_gouts)
        st = gradd_run_backward(r, (const void *const *)t->go, t->g, draw(t) % 2, written, NULL);
    FUZZ_REQUIRE(st == GRADD_OK || gradd_error_message()[0]);
    FUZZ_REQUIRE(st != GRADD_E_INTERNAL);
    for (int i = 0; i < t->n_grads; i++)
        FUZZ_REQUIRE(!written[i] || t->info->has_grad[i]);
    gradd_run_destroy(r);
    for (int i = 0; i < MAX_LIST; i++) {
        free(t->inputs[i]);
        free(t->outputs[i]);
        free(t->go[i]);
        free(t->g[i]);
    }
}

void fuzz_run_model(gradd_model_t *model, uint64_t seed, bool plain) {
    model_trial_t t = {.state = seed};
    gradd_plan_t *p;
    if (!choose_types(&t, model) || plan(&t, model, plain, &p) != GRADD_OK) return;
    t.info = gradd_plan_info(p);
    if (choose_gradients(&t)) {
        gradd_plan_destroy(p);
        if (plan(&t, model, plain, &p) != GRADD_OK) return;
        t.info = gradd_plan_info(p);
    }
    if (is_small(&t)) run(&t, p);
    gradd_plan_destroy(p);
}
