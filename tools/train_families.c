/* What a training with some models needs of the library: train_families model.onnx ...
 *
 * Plans the models as a training session would, for several sizes of their dynamic dimensions, and
 * prints a line for each family of operators that the importer and the passes have asked for
 * ("family NAME"), each pass that may do something with these operators ("pass NAME"), and each
 * option for element types that no tensor has ("without F64", "without HALVES").
 * It is linked with --wrap for the functions that look operators up and find types of results.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/contract/registry.h"
#include "platform/platform.h"
#include "server/api/gradd.h"
#include "server/graph/graph.h"

#define X(name) extern const graph_pass_t graph_pass_##name;
#include "pass_list.inc"
#undef X

enum { MOST = 1024 }; /* families, and inputs of a model */

static bool needed[MOST];             /* families */
static const gradd_op_t *asked[MOST]; /* operators */
static int n_asked;
static bool has_type[GRADD_DT_END];

static const gradd_op_t *note(const gradd_op_t *op) {
    for (size_t f = 0; op && f < gradd_op_family_count && f < MOST; f++) {
        const gradd_ops_t *family = gradd_op_families[f];
        if (op >= family->v && op < family->v + family->n) needed[f] = true;
    }
    int i = 0;
    while (i < n_asked && asked[i] != op)
        i++;
    if (op && i == n_asked && n_asked < MOST) asked[n_asked++] = op;
    return op;
}

const gradd_op_t *__real_gradd_op_find(const char *domain, const char *name, int opset);
const gradd_op_t *__wrap_gradd_op_find(const char *domain, const char *name, int opset);
const gradd_op_t *__wrap_gradd_op_find(const char *domain, const char *name, int opset) {
    return note(__real_gradd_op_find(domain, name, opset));
}

const gradd_op_t *__real_gradd_op_by_name(const char *name);
const gradd_op_t *__wrap_gradd_op_by_name(const char *name);
const gradd_op_t *__wrap_gradd_op_by_name(const char *name) {
    return note(__real_gradd_op_by_name(name));
}

gradd_status_t __real_gradd_op_infer(gradd_infer_t *c);
gradd_status_t __wrap_gradd_op_infer(gradd_infer_t *c);
gradd_status_t __wrap_gradd_op_infer(gradd_infer_t *c) {
    GRADD_TRY(__real_gradd_op_infer(c));
    for (int i = 0; i < c->n_in; i++)
        has_type[c->in[i].type.dtype] = true;
    for (int j = 0; j < c->n_out; j++)
        has_type[c->out[j].dtype] = true;
    return GRADD_OK;
}

static bool asked_for(const char *name) {
    for (int i = 0; i < n_asked; i++)
        if (!strcmp(asked[i]->name, name)) return true;
    return false;
}

static void print_pass(const graph_pass_t *pass) {
    const char *const *makes = pass->makes;
    if (!makes[0] || asked_for(makes[0]) || (makes[1] && asked_for(makes[1])))
        printf("pass %s\n", pass->name);
}

static void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, gradd_error_message());
    exit(1);
}

/* The declared types with that size for every dynamic dimension; those of fixed size are taken for
 * parameters if they are floats. */
static int fill_types(const gradd_model_t *m, int64_t size, gradd_type_t *types, int32_t *grads) {
    int n_grads = 0;
    for (int i = 0; i < gradd_model_n_inputs(m); i++) {
        types[i] = gradd_model_input_type(m, i);
        bool fixed = gradd_dtype_is_float(types[i].dtype);
        if (types[i].rank < 0) types[i].rank = 0, fixed = false;
        for (int d = 0; d < types[i].rank; d++) {
            fixed = fixed && types[i].dims[d] >= 0;
            if (types[i].dims[d] < 0) types[i].dims[d] = size;
        }
        if (fixed) grads[n_grads++] = i;
    }
    return n_grads;
}

/* Of the first output, with its gradient if it is a number, else of all outputs. */
static bool plan(gradd_model_t *m, gradd_device_t *device, int64_t size, bool trains) {
    static gradd_type_t types[MOST];
    static int32_t grads[MOST], outputs[MOST];
    const int n_grads = fill_types(m, size, types, grads);
    gradd_plan_t *made;
    for (int j = 0; j < gradd_model_n_outputs(m); j++)
        outputs[j] = j;
    const gradd_plan_options_t options = {.inputs = types,
                                          .n_inputs = gradd_model_n_inputs(m),
                                          .grads = grads,
                                          .n_grads = trains ? n_grads : 0,
                                          .outputs = outputs,
                                          .n_outputs = trains ? 1 : gradd_model_n_outputs(m),
                                          .grad_outputs = outputs,
                                          .n_grad_outputs = trains,
                                          .device = device,
                                          .parameters = grads,
                                          .n_parameters = n_grads};
    if (gradd_plan_create(m, &options, &made)) return false;
    gradd_plan_destroy(made);
    return true;
}

static void plan_model(const char *path, gradd_device_t *device) {
    static const int64_t sizes[] = {1, 2, 7, 32};
    gradd_model_t *model;
    void *bytes;
    size_t n;
    bool any = false;
    if (gradd_platform.read_file(path, SIZE_MAX - 1, &bytes, &n)) fail("cannot read a model");
    if (gradd_model_load(bytes, n, &model)) fail(path);
    free(bytes);
    if (gradd_model_n_inputs(model) > MOST || gradd_model_n_outputs(model) > MOST) {
        fprintf(stderr, "%s: more than %d inputs or outputs\n", path, MOST);
        exit(1);
    }
    for (int k = 0; k < 4; k++)
        any |= plan(model, device, sizes[k], true) | plan(model, device, sizes[k], false);
    if (!any) fail(path);
    gradd_model_destroy(model);
}

int main(int n, char **paths) {
    const gradd_device_options_t options = {.threads = 1};
    gradd_device_t *device;
    if (gradd_device_open(&options, &device)) fail("no device");
    for (int i = 1; i < n; i++)
        plan_model(paths[i], device);
    for (size_t f = 0; f < gradd_op_family_count && f < MOST; f++)
        if (needed[f]) printf("family %s\n", gradd_op_families[f]->file);
#define X(name) print_pass(&graph_pass_##name);
#include "pass_list.inc"
#undef X
    if (!has_type[GRADD_DT_F64]) printf("without F64\n");
    if (!has_type[GRADD_DT_F16] && !has_type[GRADD_DT_BF16]) printf("without HALVES\n");
    gradd_device_close(device);
    return 0;
}
